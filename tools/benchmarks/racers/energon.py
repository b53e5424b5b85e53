"""NVIDIA's Megatron-Energon, whose loader reads indexed tars in torch's DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

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
    """Return a task encoder that views or decodes samples, and stacks them."""
    import torch
    from megatron.energon import Cooker, DefaultTaskEncoder, basic_sample_keys, stateless

    @stateless  # type: ignore[untyped-decorator]
    def cook(files: Any) -> Any:
        if workload.is_encoded:
            import simplejpeg

            row = simplejpeg.decode_jpeg(files["jpg"])
        else:
            row = np.frombuffer(files["bin"], workload.dtype).reshape(workload.stored)
        return {**basic_sample_keys(files), "x": row}

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        """Samples are dictionaries, from bytes that energon does not decode."""

        decoder = None
        cookers = (Cooker(cook),)

        @stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: Any) -> Any:
            """Return the stacked samples."""
            return {"x": torch.from_numpy(np.stack([sample["x"] for sample in samples]))}

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
