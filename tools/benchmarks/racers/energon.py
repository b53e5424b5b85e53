"""NVIDIA's Megatron-Energon, whose loader reads indexed tars in torch's DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.racers.samples import decoded
from benchmarks.racers.workloads import Epochs, Workload

DATASET: Final = """\
__module__: megatron.energon
__class__: CrudeWebdataset
"""
"""The description of a dataset whose samples are files of a tar."""


def energon(workload: Workload, workers: int) -> Epochs:
    """Load tars, each sample once per iteration of the loader."""
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    folder = workload.made("energon", lambda folder: _write(workload, folder))
    dataset = get_train_dataset(
        str(folder),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=workload.batch_size,
        shuffle_buffer_size=500,
        max_samples_per_sequence=100,
        task_encoder=_encoder(workload),
        repeat=False,
    )
    loader = get_loader(dataset, prefetch_factor=4)
    return lambda epoch: (batch["x"].numpy() for batch in loader)


def _encoder(workload: Workload) -> Any:
    """Return a task encoder that gathers or decodes the samples of a batch."""
    import torch
    from megatron.energon import Cooker, DefaultTaskEncoder, basic_sample_keys, stateless

    @stateless  # type: ignore[untyped-decorator]
    def cook(files: Any) -> Any:
        return {**basic_sample_keys(files), "x": files["jpg" if workload.is_encoded else "bin"]}

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        """A task encoder whose samples remain bytes until `batch`."""

        decoder = None
        cookers = (Cooker(cook),)

        @stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: Any) -> Any:
            """Return the samples in one tensor."""
            contents = [sample["x"] for sample in samples]
            if workload.is_encoded:
                return {"x": torch.from_numpy(decoded(contents, workload))}
            out = np.empty((len(contents), workload.row_values), workload.dtype)
            for content, row in zip(contents, out, strict=True):
                row[:] = np.frombuffer(content, workload.dtype)
            return {"x": torch.from_numpy(out.reshape(-1, *workload.shape))}

    return Encoder()


def _write(workload: Workload, folder: Path) -> None:
    """Write tars of at most 64 MiB, and the index and description that energon needs."""
    import webdataset
    from megatron.energon.flavors import BaseWebdatasetFactory

    folder.mkdir()
    n_bytes = min(64 << 20, workload.n_samples * workload.row_bytes // 4)
    with webdataset.ShardWriter(f"{folder}/%04d.tar", maxsize=n_bytes, verbose=0) as writer:
        if workload.is_encoded:
            for path in workload.files():
                writer.write({"__key__": path.stem, "jpg": path.read_bytes()})
        else:
            for i, row in enumerate(workload.rows()):
                writer.write({"__key__": f"{i:06d}", "bin": row.tobytes()})
    tars = sorted(path.name for path in folder.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(
        folder, tars, split_parts_ratio=[("train", 1.0)], workers=2
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(DATASET, "utf-8")
