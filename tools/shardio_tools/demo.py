"""Draw videos, convert them, and train a network in a minute.

The demo draws small videos of moving shapes, or takes yours: a folder with one folder of videos per
class. It converts the videos, draws a contact sheet of some samples, trains a small network with
three quarters of the videos, and tests the network with the others. OUT holds the videos, the
dataset, the sheet and the report; the next run of the demo replaces them. The network runs on
tinygrad or, where tinygrad has no device (on the CPU it needs clang), on NumPy.

Examples:
    shardio demo
    shardio demo --videos videos/                 # your own, one folder per class
    shardio demo my-demo/ --seconds 10
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

import shardio
from shardio import InvalidArgument
from shardio.errors import UnsupportedEnvironment
from shardio.maintenance import split
from shardio_tools import convert, sample_clips
from shardio_tools.arguments import add_output_arguments
from shardio_tools.convert_report import describe_report
from shardio_tools.inspect.pictures import add_pictures, check_picture_options
from shardio_tools.inspect.report import inspect_dataset
from shardio_tools.output import (
    escaped,
    flush,
    format_count,
    format_duration,
    inspect_step,
    print_result,
    print_screen,
    shown_path,
    wants_progress,
)
from shardio_tools.screen import Cell, Done, Element, Heading, Next

OUT: Final = "shardio-demo"
REPORT: Final = "demo.json"
"""The name of the report in OUT. A folder with this file was made by an earlier demo."""
MIN_VIDEOS: Final = 4
FEW_VIDEOS: Final = 4
"""The report warns of classes with fewer videos."""
N_VIDEOS: Final = 8
"""The number of videos that are drawn for each class."""
MAX_EPOCHS: Final = 8
WAITS: Final = 0.1
"""The waiting share above which decoding is slower than the network."""
MIN_GAIN: Final = 0.1
"""The network counts as trained if its accuracy exceeds that of a constant guess by this much."""
BATCH_SIZE: Final = 16
_VIDEOS_WANTED: Final = "--videos takes a folder that has one folder of videos per class"
PARTS: Final = {"train": 0.75, "test": 0.25}
PICTURE_SIDE: Final = 14
"""The approximate height and width, in pixels, of the pictures that the network gets."""
N_HIDDEN: Final = 64
"""The number of values in the hidden layer of the network."""
LEARNING_RATE: Final = 1e-3

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Say = Callable[[Element], None]


@dataclass(frozen=True)
class DemoReport:
    """The places and figures of a demo."""

    videos: str
    dataset: str
    sheet: str | None
    n_videos: dict[str, int]
    """The number of videos of each class."""
    network: str
    n_epochs: int
    training_s: float
    accuracy: float
    """The share of the clips of the test videos whose class was found."""
    guess: float
    """The share of the clips in the most frequent class: the accuracy of a constant guess."""
    n_tested: int
    n_workers: int
    samples_per_s: float
    """Clips per second, without the first epoch, in which workers start and tinygrad compiles."""
    step_s: float
    """The mean time of a step of the network, without the first epoch."""
    waiting_share: float
    """The share of the time in which the loop waited for clips, without the first epoch."""

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("out", metavar="OUT", nargs="?", default=OUT, help=f"a new folder (default: {OUT})")
    add("--videos", metavar="FOLDER", help="one folder of videos per class (default: draw some)")
    add(
        "--seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="maximum duration of the training (default: 30)",
    )
    add_output_arguments(add)


def run(options: argparse.Namespace) -> int:
    """Run the demo, report, and return the exit code."""
    if not options.seconds > 0:
        raise InvalidArgument(f"--seconds is {options.seconds:g}; it must be more than 0")
    shows = wants_progress(options)
    say = _say if shows else _say_nothing
    out = Path(options.out)
    _make_folder(out)
    dataset, sheet = out / "dataset", out / "sheet.png"
    videos = Path(options.videos or out / "videos")
    if options.videos is None:
        n_drawn = N_VIDEOS * len(sample_clips.MOTIONS)
        say(f"drawing {n_drawn} videos of moving shapes: {', '.join(sample_clips.MOTIONS)}")
        sample_clips.write_clips(videos, n_clips=N_VIDEOS)
        say("")
    say(Heading(f"$ shardio convert {shown_path(str(videos))} {shown_path(str(dataset))}"))
    n_videos = _convert(videos, dataset, say, shows_progress=shows)
    say("")
    say(Heading(f"$ shardio inspect {shown_path(str(dataset))} --sheet {shown_path(str(sheet))}"))
    problem = _write_sheet(dataset, sheet)
    say(Cell(problem, "warning") if problem else Done(f"wrote {escaped(str(sheet))}"))
    say("")
    figures = _train(dataset, options.seconds, say)
    report = DemoReport(
        str(videos), str(dataset), None if problem else str(sheet), n_videos, **figures
    )
    (out / REPORT).write_text(json.dumps(report.as_json(), indent=1) + "\n", "utf-8")
    print_result(report, options, _conclusion(report))
    return 0


def _say(element: Element) -> None:
    print_screen([element])
    flush()


def _say_nothing(element: Element) -> None:
    """Print nothing, with --quiet and --json."""


def _make_folder(out: Path) -> None:
    """Make the folder of the demo; refuse a folder that holds anything but an earlier demo."""
    if out.exists() and not (out / REPORT).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgument(f"{out}: not an empty folder or an earlier demo: name another folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT).touch()


def _convert(videos: Path, out: Path, say: Say, *, shows_progress: bool) -> dict[str, int]:
    """Convert the videos; return the number of videos of each class."""
    try:
        report = shardio.convert(
            videos, out, kind="videos", overwrite=True, progress=shows_progress
        )
    except InvalidArgument as error:
        if "no file of the kind" not in str(error):
            raise
        raise InvalidArgument(f"{videos}: holds no video; {_VIDEOS_WANTED}") from None
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    options = parser.parse_args(["--", str(videos), str(out)])
    for element in describe_report(report, None, options):
        if not isinstance(element, Next):
            say(element)
    labels = [source.label for source in report.inputs if source.n_samples and source.label >= 0]
    n_videos = {report.classes[label]: n for label, n in sorted(Counter(labels).items())}
    if len(n_videos) < 2 or sum(n_videos.values()) < MIN_VIDEOS:
        raise InvalidArgument(
            f"{videos}: expected at least two folders of videos, one for each class, with "
            f"{MIN_VIDEOS} videos in all to train and test a network; found "
            f"{format_count(sum(n_videos.values()), 'video')} of "
            f"{format_count(len(n_videos), 'class', 'classes')}"
        )
    return n_videos


def _write_sheet(dataset: Path, sheet: Path) -> str | None:
    """Write a contact sheet; return the reason if that is not possible here."""
    more = {"subset": None, "image": None, "frame": None, "field": None, "overwrite": True}
    options = argparse.Namespace(path=str(dataset), sheet=str(sheet), **more)
    try:
        check_picture_options(options)
    except UnsupportedEnvironment as error:
        return f"no contact sheet: {error}"
    add_pictures(inspect_dataset(str(dataset), None), options)
    return None


def features(sample: dict[str, Any]) -> dict[str, Any]:
    """Reduce a clip to two small pictures: its mean, and the deviation that motion causes.

    This is the transform of the loaders, which runs in the workers.
    """
    frames = sample["frames"]
    n, height, width, n_channels = frames.shape
    k = max(1, min(height, width) // PICTURE_SIDE)
    cut = frames[:, : height // k * k, : width // k * k]
    # Whole rows are added first: NumPy adds long runs of bytes several times as fast.
    rows = cut.reshape(n, height // k, k, -1).sum(2, dtype=np.uint16 if k < 256 else np.uint32)
    sums = rows.reshape(n, height // k, width // k, k, n_channels).sum(3, dtype=np.float32)
    small = sums / (255 * k * k)
    pictures = np.stack([small.mean(0) - 0.5, 4 * small.std(0)])
    return {"pictures": pictures.reshape(-1), "label": sample["label"]}


class Network(Protocol):
    """A network of two linear layers: N_HIDDEN rectified values, then a score for each class."""

    name: str
    output: Any
    """The option `output` of the loader: the kind of arrays that the network takes."""

    def step(self, batch: shardio.Batch) -> tuple[float, float]:
        """Train with a batch; return the loss and the share of clips whose class is found."""
        ...

    def classes_of(self, batch: shardio.Batch) -> Labels:
        """Return the number of the most likely class of each clip."""
        ...


class TinygradNetwork:
    """The network on tinygrad; each step is one captured program."""

    output = "tinygrad"

    def __init__(self, n_inputs: int, n_classes: int) -> None:
        import tinygrad.nn

        lib: Any = tinygrad  # its types are incomplete
        nn, tensor = lib.nn, lib.Tensor
        tensor.manual_seed(0)
        self.name = f"tinygrad, device {lib.Device.DEFAULT}"
        # Since 0.14, tinygrad has the context variable TRAINING; before, it had Tensor.train.
        old = getattr(tensor, "train", None)
        self._training: Callable[[], Any] = old or (lambda: lib.Context(TRAINING=1))
        first, second = nn.Linear(n_inputs, N_HIDDEN), nn.Linear(N_HIDDEN, n_classes)
        optimizer = nn.optim.Adam(nn.state.get_parameters([first, second]), lr=LEARNING_RATE)

        def scores_of(pictures: Any) -> Any:
            return second(first(pictures).relu())

        def step(pictures: Any, labels: Any) -> Any:
            optimizer.zero_grad()
            scores = scores_of(pictures)
            loss = scores.sparse_categorical_crossentropy(labels).backward()
            optimizer.step()
            return tensor.stack(loss, (scores.argmax(1) == labels).mean()).realize()

        self._step = lib.TinyJit(step)
        self._classes = lib.TinyJit(lambda pictures: scores_of(pictures).argmax(1).realize())

    def step(self, batch: shardio.Batch) -> tuple[float, float]:
        """Train with a batch; return the loss and the share of clips whose class is found."""
        with self._training():
            loss, share = self._step(batch["pictures"], batch["label"]).tolist()
        return loss, share

    def classes_of(self, batch: shardio.Batch) -> Labels:
        """Return the number of the most likely class of each clip."""
        found: Labels = self._classes(batch["pictures"]).numpy().astype(np.int64)
        return found


class NumpyNetwork:
    """The network on NumPy, with gradients written by hand; it needs no compiler."""

    output, name = "numpy", "NumPy"

    def __init__(self, n_inputs: int, n_classes: int) -> None:
        rng = np.random.default_rng(0)
        self._weights: list[Floats] = []
        for n_from, n_to in ((n_inputs, N_HIDDEN), (N_HIDDEN, n_classes)):
            scale = np.sqrt(2 / n_from)
            self._weights.append(rng.normal(0, scale, (n_from, n_to)).astype(np.float32))
            self._weights.append(np.zeros(n_to, np.float32))
        self._means = [np.zeros_like(weight) for weight in self._weights]
        self._squares = [np.zeros_like(weight) for weight in self._weights]
        self._n_steps = 0

    def _scores(self, pictures: Floats) -> tuple[Floats, Floats]:
        """Return the values of the hidden layer, and the scores of the classes."""
        a, b, c, d = self._weights
        hidden = np.maximum(pictures @ a + b, 0)
        return hidden, hidden @ c + d

    def step(self, batch: shardio.Batch) -> tuple[float, float]:
        """Train with a batch; return the loss and the share of clips whose class is found."""
        pictures, labels = batch["pictures"], batch["label"]
        hidden, scores = self._scores(pictures)
        powers = np.exp(scores - scores.max(1, keepdims=True))
        shares = powers / powers.sum(1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -float(np.log(shares[rows, labels] + 1e-9).mean())
        score_gradient = shares.copy()
        score_gradient[rows, labels] -= 1
        score_gradient /= len(labels)
        hidden_gradient = score_gradient @ self._weights[2].T * (hidden > 0)
        self._update(
            [
                pictures.T @ hidden_gradient,
                hidden_gradient.sum(0),
                hidden.T @ score_gradient,
                score_gradient.sum(0),
            ]
        )
        return loss, float((scores.argmax(1) == labels).mean())

    def _update(self, gradients: list[Floats]) -> None:
        """Update the weights with Adam."""
        self._n_steps += 1
        state = zip(self._weights, self._means, self._squares, gradients, strict=True)
        for weight, mean, square, gradient in state:
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            size = np.sqrt(square / (1 - 0.999**self._n_steps)) + 1e-8
            weight -= LEARNING_RATE * mean / (1 - 0.9**self._n_steps) / size

    def classes_of(self, batch: shardio.Batch) -> Labels:
        """Return the number of the most likely class of each clip."""
        found: Labels = self._scores(batch["pictures"])[1].argmax(1)
        return found


def tinygrad_problem() -> str | None:
    """Return the error of a computation with tinygrad on this machine; None if it works."""
    try:
        from tinygrad.tensor import Tensor

        (Tensor([1.0]) + 1).tolist()
    except Exception as error:  # noqa: BLE001  # each version and device has other errors
        return f"{type(error).__name__}: {error}"
    return None


def _network_kind(say: Say) -> type[TinygradNetwork | NumpyNetwork]:
    if tinygrad_problem() is None:
        return TinygradNetwork
    say(
        Cell(
            "computing with NumPy: tinygrad has no device here; on the CPU it needs clang "
            "(apt-get install --no-install-recommends clang)",
            "warning",
        )
    )
    return NumpyNetwork


def _train(dataset: Path, limit_s: float, say: Say) -> dict[str, Any]:
    """Train for some epochs, at most `limit_s` seconds, and test; return the figures."""
    split(dataset, PARTS)
    kind = _network_kind(say)
    with ExitStack() as opened:
        training, testing = (_loader(opened, dataset, part, kind.output) for part in PARTS)
        classes, first = training.dataset.classes, training.view[0]
        network = kind(len(features(first)["pictures"]), len(classes))
        n_clips = format_count(len(training.view), "clip")
        say(Heading(f"Training on {n_clips}, three quarters of the videos ({network.name})"))
        if kind is TinygradNetwork:
            say("  tinygrad compiles the network during the first steps, for some seconds")
        start_s = time.perf_counter()
        epochs = _train_epochs(network, training, limit_s, say)
        training_s = time.perf_counter() - start_s
        found, labels = _test(network, testing)
        n_workers = training.stats().n_workers
        # Workers start in the first epoch, and tinygrad compiles.
        steady = functools.reduce(operator.add, epochs[1:] or epochs)
    return {
        "network": network.name,
        "n_epochs": len(epochs),
        "training_s": round(training_s, 3),
        "accuracy": float((found == labels).mean()),
        "guess": float(np.bincount(labels).max() / len(labels)),
        "n_tested": len(labels),
        "n_workers": n_workers,
        "samples_per_s": steady.n_samples / (steady.elapsed_s or 1.0),
        "step_s": steady.body_s / (steady.n_batches or 1),
        "waiting_share": steady.waiting_s / (steady.elapsed_s or 1.0),
    }


def _loader(opened: ExitStack, dataset: Path, part: str, output: Any) -> shardio.ShardLoader:
    """Return a loader of the clips in the subset `part` that have a class."""
    subset = opened.enter_context(shardio.open(dataset, subset=part))
    with_class = subset.select(lambda column: column["label"] >= 0, fields=["label"])
    loader = shardio.ShardLoader(
        with_class,
        BATCH_SIZE,
        fields=["frames", "label"],
        shuffle=part == "train",
        seed=0,
        transform=features,
        tail="pad",  # a captured program needs batches of one size
        output=output,
    )
    return opened.enter_context(loader)


def _train_epochs(
    network: Network, loader: shardio.ShardLoader, limit_s: float, say: Say
) -> list[Any]:
    """Train for MAX_EPOCHS epochs or `limit_s` seconds; return the figures of each epoch begun."""
    end_s, epochs = time.perf_counter() + limit_s, []
    for epoch in range(MAX_EPOCHS):
        results = []
        for batch in loader:
            results.append(network.step(batch))
            if time.perf_counter() > end_s:
                break
        loss, share = np.mean(results, 0)
        epochs.append(loader.stats().latest)
        say(f"  epoch {epoch + 1}  loss {loss:.3f}  accuracy {share:6.1%}")
        if time.perf_counter() > end_s:
            break
    return epochs


def _test(network: Network, loader: shardio.ShardLoader) -> tuple[Labels, Labels]:
    """Return the classes that the network finds, and the true ones."""
    found, labels = [], []
    for batch in loader:
        found.append(network.classes_of(batch)[batch.valid])
        labels.append(np.asarray(batch["label"].tolist())[batch.valid])
    return np.concatenate(found), np.concatenate(labels)


def _conclusion(report: DemoReport) -> Iterator[Element]:
    scope = "" if report.n_epochs == 1 else ", after the first epoch"
    yield (
        f"trained {format_count(report.n_epochs, 'epoch')} in {format_duration(report.training_s)};"
        f" {format_count(report.n_workers, 'worker')} loaded {report.samples_per_s:,.0f} clips/s"
        f"{scope}"
    )
    step_ms = 1000 * report.step_s
    digits = ",.0f" if step_ms >= 100 else ".3g"
    step = f"{step_ms:{digits}} ms a step"
    if report.waiting_share > WAITS:
        yield Cell(
            f"the network is small ({step}), so decoding sets the pace: clips/s depend on the CPUs "
            "and the size of the frames",
            "dim",
        )
    else:
        yield Cell(f"decoding keeps up with the network ({step})", "dim")
    if min(report.n_videos.values()) < FEW_VIDEOS:
        yield Cell(
            f"some classes have fewer than {FEW_VIDEOS} videos: too few to learn from", "warning"
        )
    has_learned = report.accuracy >= report.guess + MIN_GAIN
    if not has_learned and report.n_epochs < MAX_EPOCHS:
        yield Cell("too short to learn: give it more --seconds", "warning")
    yield Done(
        f"accuracy {report.accuracy:.1%} on {format_count(report.n_tested, 'clip')} of the other "
        f"videos (always guessing the most frequent class: {report.guess:.1%})",
        "good" if has_learned else "warning",
    )
    yield Next(
        [
            inspect_step(report.dataset),
            (f"shardio bench {shown_path(report.dataset)}", "how fast it loads"),
            ("shardio demo --videos FOLDER", "the same with your videos"),
        ]
    )
