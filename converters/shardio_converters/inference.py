"""Numbers of several dtypes in one field: the dtype that has them all, and no value is changed.

The fields of samples whose members or columns say themselves what they are.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio import Input, InvalidArgument, MediaError
from shardio_converters.schema_spec import DTYPES, check_names, format_spec

_NUMBERS: Final = frozenset(DTYPES) - {"bool"}
_WORD: Final = re.compile(r"(list\[)?(\w+)(.*)")


@lru_cache(maxsize=256)
def common_dtype(one: str, other: str) -> str | None:
    """The dtype that numbers of both are stored in; None where they stay apart.

    As NumPy has it, but for whole numbers, which no two dtypes make floats of. Whole numbers beside
    floats are floats: `widened` refuses those that would become others.
    """
    if one == other:
        return one
    if not {one, other} <= _NUMBERS:
        return None
    found = np.promote_types(one, other)
    is_whole = np.dtype(one).kind in "iu" and np.dtype(other).kind in "iu"
    return None if is_whole and found.kind == "f" else found.name


def common_spec(one: str, other: str) -> str | None:
    """The word of a field that has what two words stand for: they differ in dtypes alone."""
    if one == other:
        return one
    (a_list, dtype, a_shape), (b_list, other_dtype, b_shape) = map(_parts, (one, other))
    found = common_dtype(dtype, other_dtype) if (a_list, a_shape) == (b_list, b_shape) else None
    return None if found is None else f"{a_list}{found}{a_shape}"


def _parts(word: str) -> tuple[str, str, str]:
    found = _WORD.fullmatch(word)
    return (found[1] or "", found[2], found[3]) if found else ("", word, "")


def widen(values: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The same numbers in a dtype that `wider` gave.

    Raises:
        MediaError: a whole number is too large to be that float exactly.
    """
    wanted = np.dtype(dtype)
    if values.dtype == wanted:
        return values
    if values.size and values.dtype.kind in "iu" and wanted.kind == "f":
        exact = 1 << (np.finfo(wanted).nmant + 1)
        most = max(int(values.max()), -int(values.min()))
        if most > exact:
            raise MediaError(f"expected whole numbers up to {exact} as {wanted}, found {most}")
    return values.astype(wanted)


class SchemaProbe:
    """Looks at files, to tell fields from them; what cannot be read is passed over."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs, self._reason = inputs, ""

    def files(self) -> Iterator[Input]:
        """The inputs that can be opened: opening a pipe would wait for its writer."""
        return (one for one in self._inputs if os.path.isfile(one.path))

    @contextmanager
    def at(self, one: Input) -> Iterator[None]:
        """Keep what breaks an input from the rest."""
        try:
            yield
        except (MediaError, OSError) as error:
            self._reason = self._reason or f"; {one.name}: {error}".replace(one.path, one.name)

    def none_of(self, what: str, reason: str = "") -> InvalidArgument:
        """Make the error that fields cannot be told from any input; the first that broke says why.

        `reason` is another one, where none broke.
        """
        return InvalidArgument(
            f"no {what}, so fields cannot be told; "
            f"files looked at: {len(self._inputs):,}{self._reason or reason}"
        )


DtypeShape = tuple[str, tuple[int | None, ...]]
"""The word for a field, and its shape."""


class SchemaInference:
    """The fields of samples; the first that has an array decides what it is."""

    def __init__(self) -> None:
        self._facts: dict[str, DtypeShape] = {}
        self._counts: Counter[str] = Counter()
        self.n_samples = 0

    def add(self, sample: Mapping[str, DtypeShape]) -> None:
        """Take a sample in.

        Raises:
            MediaError: an array differs from the same one of others in more than sizes.
        """
        self._merge(sample)
        self._counts.update(sample.keys())
        self.n_samples += 1

    def merge(self, other: SchemaInference) -> None:
        """Take the samples of another file in; none of them if one does not fit.

        Raises:
            MediaError: an array differs from the same one of others in more than sizes.
        """
        self._merge(other._facts)
        self._counts.update(other._counts)
        self.n_samples += other.n_samples

    def as_specs(self) -> dict[str, str]:
        """The fields in a word each; what some samples lack is optional."""
        specs = {
            name: format_spec(*facts, optional=self._counts[name] < self.n_samples)
            for name, facts in self._facts.items()
        }
        return dict(sorted(specs.items()))

    def _merge(self, found: Mapping[str, DtypeShape]) -> None:
        changed = {}
        for name, (dtype, shape) in found.items():
            known = self._facts.get(name)
            if known == (dtype, shape) and 0 not in shape:
                continue
            was, dims = known or (dtype, shape)
            if was != dtype or len(dims) != len(shape):
                raise MediaError(
                    f"{name!r}: expected {format_spec(was, dims)}, "
                    f"found {format_spec(dtype, shape)}"
                )
            merged = tuple(n if n == m and n else None for n, m in zip(shape, dims, strict=True))
            changed[name] = (dtype, merged)
        if new := changed.keys() - self._facts.keys():
            check_names(sorted({*self._facts, *new}), "members or columns")
        self._facts.update(changed)


def infer_fields(
    inputs: Sequence[Input], fields_of: Callable[[Input], SchemaInference], what: str
) -> dict[str, str]:
    """The fields of the samples of all inputs that can be read, in a word each.

    Raises:
        InvalidArgument: none of them is such a file with samples, which `what` names.
    """
    found, looks = SchemaInference(), SchemaProbe(inputs)
    for one in looks.files():
        with looks.at(one):
            found.merge(fields_of(one))
    specs = found.as_specs()
    if not specs:
        raise looks.none_of(what, "; samples have no fields" if found.n_samples else "")
    return specs
