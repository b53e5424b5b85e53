"""Peers that decode random clips of videos, in torch's DataLoader: torchcodec and PyAV."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.racers.workloads import CLIP_FRAMES, VIDEO_FRAMES, Batch, Epochs, Workload


class Clips:
    """A map-style dataset with a random clip of each video. Subclasses decode.

    Each worker keeps the decoders of all videos open.
    """

    def __init__(self, workload: Workload) -> None:
        self.paths = workload.files()
        self.decoders: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        if i not in self.decoders:
            self.decoders[i] = self.open(self.paths[i])
        return self.clip(self.decoders[i], random.randrange(VIDEO_FRAMES - CLIP_FRAMES + 1))

    def open(self, path: Path) -> Any:
        """Open a decoder with one thread."""
        raise NotImplementedError

    def clip(self, decoder: Any, start: int) -> Any:
        """Return CLIP_FRAMES frames, from the frame `start` on."""
        raise NotImplementedError


class TorchcodecClips(Clips):
    """Clips that torchcodec decodes."""

    def open(self, path: Path) -> Any:
        """Open a decoder that computes times: all frames have the same duration."""
        from torchcodec.decoders import VideoDecoder

        options: dict[str, Any] = {"seek_mode": "approximate", "num_ffmpeg_threads": 1}
        return VideoDecoder(str(path), dimension_order="NHWC", **options)

    def clip(self, decoder: Any, start: int) -> Any:
        """Return the frames, decoded in one call."""
        return decoder.get_frames_in_range(start, start + CLIP_FRAMES).data


class PyavClips(Clips):
    """Clips that PyAV decodes."""

    def open(self, path: Path) -> Any:
        """Open a container, and list the times of its frames."""
        import av

        with av.open(str(path)) as container:
            packets = container.demux(video=0)
            times = sorted(packet.pts for packet in packets if packet.pts is not None)
        container = av.open(str(path))
        video = container.streams.video[0]
        video.thread_type, video.codec_context.thread_count = "NONE", 1
        return container, video, times

    def clip(self, decoder: Any, start: int) -> Batch:
        """Return the frames, decoded from the keyframe before `start`."""
        container, video, times = decoder
        container.seek(times[start], stream=video)
        frames: list[Batch] = []
        for frame in container.decode(video):
            if frame.pts >= times[start]:
                frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == CLIP_FRAMES:
                break
        return np.stack(frames)


def _loaded(clips: Clips, workload: Workload, workers: int) -> Epochs:
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {"shuffle": True, "persistent_workers": True, "prefetch_factor": 4}
    loader = DataLoader(clips, workload.batch_size, num_workers=workers, **options)
    return lambda epoch: (batch.numpy() for batch in loader)


def torchcodec(workload: Workload, workers: int) -> Epochs:
    """Load clips with torchcodec."""
    return _loaded(TorchcodecClips(workload), workload, workers)


def pyav(workload: Workload, workers: int) -> Epochs:
    """Load clips with PyAV."""
    return _loaded(PyavClips(workload), workload, workers)
