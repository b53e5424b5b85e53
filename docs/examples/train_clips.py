"""Train a small classifier of video clips with tinygrad, fed by shardio.

    python docs/examples/train_clips.py DATASET [--epochs 2] [--batch-size 16] [--workers N]

DATASET is what `shardio convert` makes of a folder that holds one folder of videos per class. The
model looks at pictures of about 28 x 28 pixels, and at how each differs from the clip's mean one,
which is where motion shows. It is meant to be read and changed, not to win anything.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import shardio

if "--tiny" in sys.argv:  # tinygrad reads DEV when it is imported
    os.environ["DEV"] = "PYTHON"
from tinygrad import Context, Device, Tensor, TinyJit, nn

PICTURE = 28  # pixels that the model sees of each side, or nearly so many
CAPTURE_STEPS = 2  # TinyJit runs the first step as it is and records the second
# Packets may hold a video that breaks midway (without --check); another clip stands for such ones.
MAY_SKIP: dict[str, Any] = {"on_error": "skip", "max_skips": 100}


class ClipNet:
    """Two strided convolutions over time and space, then two dense layers.

    Kernels are as large as their strides, so that each is one matrix product: on a CPU, tinygrad
    compiles these in a quarter of the time of overlapping ones, and runs them ten times as fast.
    """

    def __init__(self, clip_shape: tuple[int, ...], n_classes: int, width: int = 16) -> None:
        n_frames, n_rows, n_columns, n_channels = clip_shape
        self.shrink = max(1, min(n_rows, n_columns) // PICTURE)
        kernel = (2 if n_frames >= 4 else 1, 2, 2)
        self.conv1 = nn.Conv2d(2 * n_channels, width, kernel, stride=kernel)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel, stride=kernel)
        self.norm2 = nn.GroupNorm(4, 2 * width)
        n_left = n_frames // kernel[0] // kernel[0]
        for n_pixels in (n_rows, n_columns):
            n_left *= n_pixels // self.shrink // 2 // 2
        self.dense = nn.Linear(2 * width * n_left, 4 * width)
        self.head = nn.Linear(4 * width, n_classes)

    def __call__(self, clips: Tensor) -> Tensor:
        """From uint8 (batch, frames, rows, columns, channels) to logits (batch, classes)."""
        k = self.shrink
        n, n_frames, n_rows, n_columns, n_channels = clips.shape
        x = clips[:, :, : n_rows // k * k, : n_columns // k * k].cast("float32")
        x = x.reshape(n, n_frames, n_rows // k, k, n_columns // k, k, n_channels).mean((3, 5))
        x = (x / 255 - 0.5).permute(0, 4, 1, 2, 3).contiguous()
        motion = 4 * (x - x.mean(2, keepdim=True))
        x = self.norm1(self.conv1(x.cat(motion, dim=1))).relu()
        x = self.norm2(self.conv2(x)).relu()
        return self.head(self.dense(x.flatten(1)).relu())


def make_step(net: ClipNet, learning_rate: float) -> TinyJit:
    """One step of training, captured by TinyJit: (clips, labels) to [loss, accuracy]."""
    optimizer = nn.optim.Adam(nn.state.get_parameters(net), lr=learning_rate)

    @TinyJit
    def step(clips: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = net(clips)
        loss = logits.sparse_categorical_crossentropy(labels).backward()
        accuracy = (logits.argmax(axis=1) == labels).mean()
        optimizer.step()
        return Tensor.stack(loss, accuracy).realize()

    return step


def train_epoch(loader: shardio.ShardLoader, step: TinyJit, n_steps: int | None) -> str:
    """Train one epoch, or its first n_steps; return a line about it."""
    losses, accuracies, ends = [], [], [time.perf_counter()]
    for batch in loader:
        # .tolist() waits for the device, so that the time measured is that of the work.
        loss, accuracy = step(batch["frames"], batch["label"]).tolist()
        losses.append(loss)
        accuracies.append(accuracy)
        ends.append(time.perf_counter())
        if len(losses) == n_steps:
            break
    loading = loader.stats().latest
    return (
        f"loss {sum(losses) / len(losses):.3f}  accuracy {sum(accuracies) / len(losses):.1%}  "
        f"{loading.n_samples / loading.elapsed_s:.1f} samples/s  "
        f"waiting for data {loading.waiting_s / loading.elapsed_s:.1%}  "
        f"({loading.elapsed_s:.1f} s, of which "
        f"{ends[min(CAPTURE_STEPS, len(losses))] - ends[0]:.1f} s "
        f"for the first {min(CAPTURE_STEPS, len(losses))} steps)"
        + (f"  skipped, as they do not decode: {loading.n_skipped}" if loading.n_skipped else "")
    )


def problem_with(dataset: shardio.ShardDataset) -> str | None:
    """Return why this dataset cannot be trained on; None if it can."""
    missing = [name for name in ("frames", "label") if name not in dataset.schema]
    if missing:
        return f"has no field {' or '.join(missing)}; make it with: shardio convert VIDEOS OUT"
    if not len(dataset):
        return "holds no clip: were all videos too short, or broken? See: shardio inspect"
    readers = (dataset.reader(i) for i in range(len(dataset.shards)))
    n_without = sum(int((r.column("label", rows=range(len(r))) < 0).sum()) for r in readers)
    if n_without:
        return (
            f"has {n_without} samples of {len(dataset)} without a class (label -1), because their "
            "videos lie directly in the folder; put each video into a folder named after its "
            "class, and convert again"
        )
    if len(dataset.classes) < 2:
        return "has one class only; it takes two, so two folders of videos, to tell them apart"
    return None


def shrink(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep every fourth frame, and about 8 x 8 pixels of it. Runs in the workers."""
    frames = sample["frames"]
    n = max(1, min(frames.shape[1:3]) // 8)
    return {**sample, "frames": frames[::4, ::n, ::n].copy()}


def look_at(dataset: shardio.ShardDataset, *, shrunk: bool) -> tuple[int, tuple[int, ...]]:
    """Return the shape of the clips: (clips, frames, rows, columns, channels)."""
    transform = shrink if shrunk else None
    options: dict[str, Any] = {"fields": ["frames"], "num_workers": 0, "output": "numpy"}
    with shardio.ShardLoader(dataset, 1, transform=transform, **options, **MAY_SKIP) as loader:
        return len(loader), next(iter(loader))["frames"].shape[1:]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small classifier of video clips.")
    parser.add_argument("dataset", help="a dataset made by `shardio convert VIDEOS OUT`")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="maximum clips per step")
    parser.add_argument("--workers", type=int, help="default: one per usable CPU")
    parser.add_argument("--steps", type=int, help="maximum steps per epoch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="two steps on a few pixels, on tinygrad's device written in Python: needs no clang",
    )
    options = parser.parse_args(arguments)
    if options.tiny:
        options.epochs, options.steps, options.batch_size = 1, 2, 2
    for name in ("epochs", "batch_size", "steps"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    return options


def train(options: argparse.Namespace, dataset: shardio.ShardDataset) -> None:
    """Train, and print one line per epoch."""
    Tensor.manual_seed(options.seed)
    classes = dataset.classes
    n_clips, shape = look_at(dataset, shrunk=options.tiny)
    print(f"{n_clips} clips, {len(classes)} classes ({', '.join(classes)}), {Device.DEFAULT}")
    print(f"compiling in the first {CAPTURE_STEPS} steps: on a CPU, up to a minute", flush=True)
    net = ClipNet(shape, len(classes), width=4 if options.tiny else 16)
    step = make_step(net, options.learning_rate)
    loader = shardio.ShardLoader(
        options.dataset,
        min(options.batch_size, n_clips),
        shuffle=True,
        seed=options.seed,
        fields=["frames", "label"],
        transform=shrink if options.tiny else None,
        tail="drop",  # a captured step takes batches of one shape only
        num_workers=options.workers,
        **MAY_SKIP,
    )
    # tinygrad says so by a context variable from 0.14 on, and by Tensor.train before.
    training = Tensor.train() if hasattr(Tensor, "train") else Context(TRAINING=1)
    with loader, training:
        for epoch in range(options.epochs):
            print(f"epoch {epoch + 1}  {train_epoch(loader, step, options.steps)}", flush=True)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    with shardio.open(options.dataset) as dataset:
        if problem := problem_with(dataset):
            print(f"{options.dataset} {problem}", file=sys.stderr)
            return 1
        train(options, dataset)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except shardio.ShardioError as error:  # no such dataset, damage, too little memory
        sys.exit(str(error))
