"""The fields of samples whose members or columns say themselves what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from shardio import Input, MediaError
from shardio_converters.field_specs import check_names, format_spec
from shardio_converters.widening import SchemaProbe

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
                    f"{name!r}: expected {format_spec(was, dims)}, found {format_spec(dtype, shape)}"
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
