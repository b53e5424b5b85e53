"""Infer fields from files: probe inputs, merge samples, widen dtypes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    """Return the dtype to which NumPy promotes both dtypes; None if they have no common dtype.

    Two integer dtypes that NumPy promotes to a float dtype have no common dtype. An integer and a
    float dtype have one, but `widen` refuses integers that may be rounded.
    """
    if one == other:
        return one
    if not {one, other} <= _NUMBERS:
        return None
    found = np.promote_types(one, other)
    is_whole = np.dtype(one).kind in "iu" and np.dtype(other).kind in "iu"
    return None if is_whole and found.kind == "f" else found.name


def _common_spec(one: str, other: str) -> str | None:
    """Merge two specs that may differ in dtype only; return None if they cannot be merged."""
    if one == other:
        return one
    (a_list, dtype, a_shape), (b_list, other_dtype, b_shape) = map(_parts, (one, other))
    found = common_dtype(dtype, other_dtype) if (a_list, a_shape) == (b_list, b_shape) else None
    return None if found is None else f"{a_list}{found}{a_shape}"


def _parts(word: str) -> tuple[str, str, str]:
    found = _WORD.fullmatch(word)
    return (found[1] or "", found[2], found[3]) if found else ("", word, "")


def widen(values: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Convert numbers to `dtype`; raise MediaError for integers that a float dtype may round."""
    wanted = np.dtype(dtype)
    if values.dtype == wanted:
        return values
    if values.size and values.dtype.kind in "iu" and wanted.kind == "f":
        exact = 1 << (np.finfo(wanted).nmant + 1)
        most = max(int(values.max()), -int(values.min()))
        if most > exact:
            raise MediaError(f"expected whole numbers up to {exact} as {wanted}, found {most}")
    return values.astype(wanted)


class InputProbe:
    """A pass over the inputs to infer fields; unreadable inputs are skipped."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs, self._reason = inputs, ""

    def files(self) -> Iterator[Input]:
        """Yield only the regular files, because opening a pipe could block."""
        return (one for one in self._inputs if os.path.isfile(one.path))

    @contextmanager
    def skip_broken(self, one: Input) -> Iterator[None]:
        """Suppress the errors of a broken input; keep the first error for `nothing_usable`."""
        try:
            yield
        except (MediaError, OSError) as error:
            self._reason = self._reason or f"; {one.name}: {error}".replace(one.path, one.name)

    def nothing_usable(self, what: str, reason: str = "") -> InvalidArgument:
        """Return the error for no usable file, with the first suppressed error or `reason`."""
        return InvalidArgument(
            f"no {what}, so fields cannot be inferred; "
            f"files looked at: {len(self._inputs):,}{self._reason or reason}"
        )


UNKNOWN: Final = "null"  # the dtype of a field whose values are all null so far

DtypeShape = tuple[str, tuple[int | None, ...]]
"""The type of a field as a pair. The first item is a dtype, the name of a type, or a whole spec.
The second item is the shape, which is () if the first item is a whole spec."""


class SchemaInference:
    """The merged fields of samples or files.

    A dimension with differing sizes becomes variable; a field that some samples lack becomes
    optional. A dtype that differs from the first is an error or, if `widens`, widens the field. A
    field that is `UNKNOWN` in some files gets its type, maybe a nested record, from other files.
    `names` is the plural noun for fields in messages about invalid names; None skips this check.
    """

    def __init__(self, names: str | None = "members or columns", *, widens: bool = False) -> None:
        self._names, self._widens = names, widens
        self._facts: dict[str, DtypeShape] = {}
        self._counts: Counter[str] = Counter()
        self.n_samples = 0

    def add(self, sample: Mapping[str, DtypeShape], nulls: Collection[str] = frozenset()) -> None:
        """Add the fields of a sample or of a file; the fields in `nulls` become optional."""
        self._merge(sample)
        self._counts.update(sample.keys() - nulls if nulls else sample.keys())
        self.n_samples += 1

    def merge(self, other: SchemaInference) -> None:
        """Add all samples of another file; if a field does not match, raise and add none."""
        self._merge(other._facts)
        self._counts.update(other._counts)
        self.n_samples += other.n_samples

    def is_optional(self, name: str) -> bool:
        """Return True if a sample lacks the field, or has a null in it."""
        return self._counts[name] < self.n_samples

    def facts(self) -> dict[str, DtypeShape]:
        """Return the dtype and the shape of each field, by name."""
        return dict(self._facts)

    def as_specs(self) -> dict[str, str]:
        """Return the field specs."""
        return {
            name: "json?"
            if dtype == UNKNOWN
            else format_spec(dtype, shape, optional=self.is_optional(name))
            for name, (dtype, shape) in self._facts.items()
        }

    def _merge(self, found: Mapping[str, DtypeShape]) -> None:
        changed = {}
        for name, (dtype, shape) in found.items():
            known = self._facts.get(name)
            if (known == (dtype, shape) and 0 not in shape) or (known and dtype == UNKNOWN):
                continue
            was, dims = known if known and known[0] != UNKNOWN else (dtype, shape)
            both = _common_spec(was, dtype) if self._widens else dtype if was == dtype else None
            if both is None or len(dims) != len(shape):
                raise MediaError(
                    f"{name!r}: expected {format_spec(was, dims)}, "
                    f"found {format_spec(dtype, shape)}"
                )
            merged = tuple([n if n == m and n else None for n, m in zip(shape, dims, strict=True)])
            if known != (both, merged):
                changed[name] = (both, merged)
        if not changed:  # the usual case
            return
        facts = self._facts | changed
        facts = {
            name: one for name, one in facts.items() if not is_null_record(name, one[0], facts)
        }
        if self._names and not facts.keys() <= self._facts.keys():
            check_names(sorted(facts), self._names)
        self._facts = facts


def is_null_record(name: str, dtype: str, names: Iterable[str]) -> bool:
    """Return True if a field has only nulls, and `names` has fields nested in it (`name.x`)."""
    return dtype == UNKNOWN and any(each.startswith(f"{name}.") for each in names)


def infer_fields(
    inputs: Sequence[Input], fields_of: Callable[[Input], SchemaInference], what: str
) -> dict[str, str]:
    """Return the field specs inferred from all readable inputs."""
    found, probe = SchemaInference(), InputProbe(inputs)
    for one in probe.files():
        with probe.skip_broken(one):
            found.merge(fields_of(one))
    specs = found.as_specs()
    if not specs:
        raise probe.nothing_usable(what, "; samples have no fields" if found.n_samples else "")
    return specs
