"""Options of a conversion: validate them, and build the job from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from shardio._workers.processes.limits import usable_cpus
from shardio._workers.ray.cluster import LOCAL, Engine
from shardio.conversion.append import PathName, check_same_options, inherit_options
from shardio.conversion.inputs import Listing, join_parts
from shardio.conversion.registry import fit_source, guess_kind, make_source
from shardio.conversion.report import Progress
from shardio.conversion.shard_uploader import ShardUploader
from shardio.conversion.worker import ConversionJob
from shardio.dataset.generation import Generation
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema

ON_ERROR: Final = ("skip", "stop")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of a conversion as given; `source` is the name of the source.

    `uploader` uploads finished shards if the dataset goes to an object store.
    """

    kind: str | None
    converter_options: Mapping[str, Any]
    workers: int | None
    on_error: str
    keep_partial: bool
    progress: Callable[[Progress], None] | None
    shard_bytes: int
    resume: bool
    overwrite: bool
    engine: Engine = LOCAL
    uploader: ShardUploader | None = None
    source: str = ""

    @property
    def n_workers(self) -> int:
        """The number of worker processes."""
        return usable_cpus() if self.workers is None else self.workers

    @property
    def hint(self) -> str:
        """The hint for starting an upload again; "" for a folder, for which Staging has its own."""
        return "" if self.uploader is None else self.uploader.hint

    def check_for_samples(self, *, labels: bool) -> None:
        """Check that no options are given that iterables of samples do not support."""
        for_files = {
            "kind": self.kind is not None,
            "workers": self.workers is not None,
            "on_error": self.on_error != "skip",
            "keep_partial": self.keep_partial,
            "progress": self.progress is not None,
            "resume": self.resume,
            "overwrite": self.overwrite,
            "labels": labels,
            "engine": self.engine.is_ray,
            **dict.fromkeys(self.converter_options, True),
        }
        if given := [name for name, is_given in for_files.items() if is_given]:
            raise InvalidArgument(f"{', '.join(given)}: not for samples from an iterable")

    def check_for_items(self, *, labels: bool) -> None:
        """Check that no options are given that only apply to files."""
        for_files = {"kind": self.kind is not None, "labels": labels, **self.converter_options}
        if given := [name for name, is_given in for_files.items() if is_given is not False]:
            raise InvalidArgument(f"{', '.join(given)}: only for files")

    def check_for_inputs(self, schema: Schema | None, *, append: bool) -> None:
        """Check the options of a conversion of files or items."""
        if schema is not None:
            raise InvalidArgument(
                "schema: only for samples from an iterable; a converter has its own schema, or "
                "an option for it, such as `fields` of arrays"
            )
        if self.on_error not in ON_ERROR:
            raise InvalidArgument(f"on_error is {self.on_error!r}; it must be one of {ON_ERROR}")
        if self.overwrite and (self.resume or append):
            other = "resume" if self.resume else "append"
            raise InvalidArgument(f"{other} and overwrite are mutually exclusive")
        if self.workers is not None and self.workers < 0:
            raise InvalidArgument(f"workers is {self.workers}; it must be 0 or more")
        if self.engine.is_ray and self.workers == 0:
            raise InvalidArgument("workers is 0; with engine='ray' it must be 1 or more")

    def make_job(
        self, base: Generation | None, listing: Listing, out: PathName
    ) -> tuple[Callable[[str], ConversionJob], Listing]:
        """Return a function that makes the job for a work folder, and the inputs with their parts.

        The converter is `kind`, else that of `base`, else guessed from the inputs.

        Raises:
            InvalidArgument: the converter rejects the options, or `base` was made with others.
        """
        kind, options, keep_partial = self.kind, self.converter_options, self.keep_partial
        if base is not None:
            kind, options, keep_partial = inherit_options(
                base, kind, options, keep_partial=keep_partial
            )
        try:
            source = make_source(kind or guess_kind(listing.inputs), options)
            listing = join_parts(listing, source)
            source = fit_source(source, listing.inputs)
        except InvalidArgument:
            if base is not None and kind == base.converter.get("name"):
                check_same_options(base, self.converter_options, out)
            raise
        job_for_folder = partial(
            ConversionJob,
            source,
            shard_bytes=self.shard_bytes,
            keep_partial=keep_partial,
            stop_at_broken=self.on_error == "stop",
        )
        return job_for_folder, listing
