"""Documents of tokens as windows of one length: what is in each, however it is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio import (
    Array,
    Batch,
    InvalidArgument,
    List,
    Schema,
    ShardLoader,
    ShardReader,
    Text,
    WeightedSampler,
    mix,
)
from shardio import open as open_dataset
from shardio.errors import ChecksumMismatch, ShardCorrupt, TransformError
from shardio.format.layout import Kind
from shardio.maintenance import split
from shardio.samples.packing import Pack, PackedWindows
from shardio.samples.token_view import TokenSource, TokenView
from shardio.shard.verification import Rows
from tests.loading import WORKERS, append_shard, bits, make_loader, write_dataset
from tests.packed_naively import Window, naive_windows

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

Document = npt.NDArray[Any]
SCHEMA = Schema({"tokens": Array("uint16", (None,)), "label": Array("int64")})
LENGTHS = (5, 0, 17, 3, 3, 0, 0, 9, 40, 1, 12, 7, 0, 30, 2)
EVERYTHING = Pack(8, targets=True, apart=True, eot=7)


def documents_of(lengths: Sequence[int], dtype: str = "uint16", seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 100, n).astype(dtype) for n in lengths]


DOCUMENTS = documents_of(LENGTHS)


def samples_of(documents: Iterable[Document]) -> list[dict[str, Any]]:
    return [{"tokens": each, "label": i} for i, each in enumerate(documents)]


def write(
    folder: Path, documents: Iterable[Document], n_shards: int = 2, field: Array | None = None
) -> str:
    schema = SCHEMA if field is None else Schema({"tokens": field, "label": Array("int64")})
    samples = samples_of(documents)
    return write_dataset(folder, len(samples), n_shards, schema, samples)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("packing") / "set", DOCUMENTS, 3)


def loader(folder: Any, pack: Pack = EVERYTHING, **options: Any) -> ShardLoader:
    options = {"batch_size": 4, "num_workers": 0, "output": "numpy", **options}
    return make_loader(folder, pack=pack, **options)


def windows_in(batches: Iterable[Batch]) -> list[tuple[int, Window]]:
    """Every window of some batches with its number, but those that only fill a batch up."""
    return [
        (int(batch.indices[i]), {name: np.array(batch[name][i]) for name in batch})
        for batch in batches
        for i in np.flatnonzero(batch.valid)
    ]


def epoch(folder: Any, pack: Pack = EVERYTHING, **options: Any) -> list[tuple[int, Window]]:
    with loader(folder, pack, **options) as made:
        return windows_in(made)


def plain(window: Window) -> dict[str, Any]:
    return {name: (value.dtype.str, value.tolist()) for name, value in window.items()}


def check(found: list[tuple[int, Window]], expected: list[Window]) -> None:
    """Make sure that the windows found are, by their numbers, those expected, each once."""
    assert sorted(number for number, _ in found) == list(range(len(expected)))
    for number, window in found:
        assert plain(window) == plain(expected[number])


PACKS = st.builds(
    Pack,
    length=st.integers(1, 9),
    field=st.just("tokens"),
    targets=st.booleans(),
    apart=st.booleans(),
    eot=st.sampled_from([None, 7]),
    pad=st.sampled_from([0, 3]),
    rest=st.sampled_from(["pad", "drop"]),
)


def ends_of(lengths: list[int], pack: Pack) -> Rows:
    return np.cumsum([n + (pack.eot is not None) for n in lengths], dtype=np.int64)


class _Memory:
    """A stand-in for a dataset with documents in memory, as far as a gather of windows needs it."""

    def __init__(self, documents: list[Document], pack: Pack, sources: list[int]) -> None:
        self.schema, self.access, self.verify = SCHEMA, "pread", "first"
        self.files = SimpleNamespace(is_partial=False)
        ends = ends_of([len(each) for each in documents], pack)
        self.windows = PackedWindows(pack, ends, sources)
        self.documents = documents


class _FromMemory(TokenSource):
    def _shards(self, documents: Rows) -> Rows:
        return np.zeros_like(documents)

    def _read(self, documents: Rows) -> list[bytes | memoryview]:
        found = self._dataset.documents  # type: ignore[attr-defined]
        return [found[k].tobytes() for k in documents]


@given(
    sources=st.lists(
        st.tuples(
            st.lists(st.integers(0, 20), min_size=1, max_size=8),
            st.lists(st.integers(0, 20), max_size=4),
        ),
        min_size=1,
        max_size=3,
    ),
    pack=PACKS.map(lambda pack: dataclasses.replace(pack, rest="pad")),
)
@settings(max_examples=100)
def test_appends_keep_old_windows(sources: list[tuple[list[int], list[int]]], pack: Pack) -> None:
    old, new = [first for first, _ in sources], [first + more for first, more in sources]
    before, after = (
        PackedWindows(pack, ends_of(sum(lengths, []), pack), [*map(len, lengths)])
        for lengths in (old, new)
    )
    starts = [0, *np.cumsum(before.n_windows).tolist()], [0, *np.cumsum(after.n_windows).tolist()]
    shift = 0
    for source, (_, more) in enumerate(sources):
        numbers = np.arange(before.n_windows[source])
        expected = before.parts(numbers + starts[0][source])
        found = after.parts(numbers + starts[1][source], before.n_tokens)
        expected = expected._replace(documents=expected.documents + shift)
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]
        shift += len(more)


@given(
    sources=st.lists(st.lists(st.integers(0, 20), max_size=8), min_size=1, max_size=3),
    pack=PACKS,
    data=st.data(),
)
@settings(max_examples=150)
def test_windows_match_reference(sources: list[list[int]], pack: Pack, data: st.DataObject) -> None:
    streams = [documents_of(lengths, seed=i) for i, lengths in enumerate(sources)]
    expected = [each for s in streams if s for each in naive_windows(s, pack)]
    documents = [each for stream in streams for each in stream]
    made = _Memory(documents, pack, [len(stream) for stream in streams])
    assert len(made.windows) == len(expected)
    if not expected:
        return
    numbers = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=9))
    tokens: Any = _FromMemory(made, made.windows)  # type: ignore[arg-type]
    outs = {
        name: np.full((len(numbers), pack.length), 99, field.numpy)
        for name, field in pack.window_fields(SCHEMA["tokens"]).items()  # type: ignore[arg-type]
    }
    stretch, cut = np.array(numbers), data.draw(st.integers(0, len(numbers)))
    for part in (slice(0, cut), slice(cut, len(numbers))):
        if part.start < part.stop:
            tokens.fill({name: out[part] for name, out in outs.items()}, stretch, part)
    for i, number in enumerate(numbers):
        assert plain({name: out[i] for name, out in outs.items()}) == plain(expected[number])


@pytest.mark.parametrize("shuffle", [False, "full", "blocks"])
@pytest.mark.parametrize(
    "pack",
    [EVERYTHING, Pack(1), Pack(8, rest="drop"), Pack(50, apart=True), Pack(1000, targets=True)],
    ids=["everything", "of one token", "whole ones", "apart", "longer than all"],
)
def test_a_loader_has_every_window_once(folder: str, pack: Pack, shuffle: Any) -> None:
    check(epoch(folder, pack, shuffle=shuffle), naive_windows(DOCUMENTS, pack))


@pytest.mark.parametrize(
    "field",
    [
        Array("uint16", (None,), codec="zstd"),
        Array("int64", (None,)),
        Array("uint8", (None,), codec="zstd_dictionary"),
        Array("uint32", (20,)),
        Array("uint32", (20,), codec="zstd"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_windows_do_not_depend_on_storage(tmp_path: Path, field: Array, access: Any) -> None:
    documents = documents_of([20] * 7 if field.is_fixed else LENGTHS, field.dtype)
    made = write(tmp_path / "set", documents, field=field)
    check(epoch(made, access=access), naive_windows(documents, EVERYTHING))


@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_windows_do_not_depend_on_verification(folder: str, verify: Any) -> None:
    expected = naive_windows(DOCUMENTS, EVERYTHING)
    with loader(folder, verify=verify, shuffle=True) as made:
        for _ in range(2):
            check(windows_in(made), expected)


@pytest.mark.parametrize("rest", ["pad", "drop"])
def test_documents_without_a_token_have_no_window(tmp_path: Path, rest: Any) -> None:
    made = write(tmp_path / "set", documents_of([0, 0, 0]))
    assert epoch(made, Pack(4, rest=rest)) == []
    nothing = write(tmp_path / "none", [])
    assert epoch(nothing, Pack(4, eot=0, rest=rest)) == []


def test_workers_and_ranks_make_the_same_batches(folder: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 5}
    with loader(folder, **options) as alone:
        expected = [bits(batch) for batch in alone]
    with loader(folder, num_workers=2, **options) as shared:
        assert [bits(batch) for batch in shared] == expected
    by_rank = [
        epoch(folder, rank=rank, world_size=2, num_workers=2 * rank, batch_size=2, **options)
        for rank in range(2)
    ]
    check([each for found in by_rank for each in found], naive_windows(DOCUMENTS, EVERYTHING))


@WORKERS
@pytest.mark.parametrize("shuffle", [False, "full", "blocks"])
def test_a_state_resumes_at_the_next_window(folder: str, num_workers: int, shuffle: Any) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 2}
    whole = epoch(folder, **options)
    with loader(folder, **options) as made:
        batches = iter(made)
        next(batches), next(batches)
        state = json.loads(json.dumps(made.state_dict()))
    with loader(folder, batch_size=3, num_workers=num_workers, **options) as other:
        other.load_state_dict(state)
        found = windows_in(other)
    assert [(n, plain(w)) for n, w in found] == [(n, plain(w)) for n, w in whole[8:]]


@pytest.mark.parametrize(
    "other",
    [Pack(9), Pack(8, targets=True), Pack(8, eot=0), Pack(8, rest="drop"), None],
    ids=["length", "targets", "eot", "rest", "rows"],
)
def test_a_state_of_other_windows_is_refused(folder: str, other: Pack | None) -> None:
    with loader(folder, Pack(8)) as made:
        next(iter(made))
        state = made.state_dict()
    with make_loader(folder, 4, num_workers=0, pack=other) as made:
        with pytest.raises(InvalidArgument, match="the state's view"):
            made.load_state_dict(state)


def test_what_lies_beside_the_tokens_is_no_part_of_a_state(folder: str) -> None:
    with loader(folder, Pack(8, eot=0)) as made:
        next(iter(made))
        state = made.state_dict()
    with loader(folder, Pack(8, eot=1, apart=True, pad=5, field="tokens")) as other:
        other.load_state_dict(state)
        assert windows_in(other)[0][0] == 4


@WORKERS
def test_an_append_does_not_change_a_running_epoch(tmp_path: Path, num_workers: int) -> None:
    folder = tmp_path / "set"
    write(folder, DOCUMENTS)
    before = naive_windows(DOCUMENTS, EVERYTHING)
    assert not before[-1]["tokens_mask"].all()  # it is padded
    with loader(folder, num_workers=num_workers) as made:
        next(iter(made))
        state = json.loads(json.dumps(made.state_dict()))
    more = documents_of([9, 30], seed=1)
    append_shard(folder, SCHEMA, samples_of(more))
    after = naive_windows([*DOCUMENTS, *more], EVERYTHING)
    with loader(folder, num_workers=num_workers) as made:
        made.load_state_dict(state)
        batches = iter(made)
        next(batches)
        assert made.state_dict()["tokens"] == state["tokens"]
        made.load_state_dict(state)
        found = windows_in(made)
        assert [number for number, _ in found] == list(range(4, len(before)))
        assert [plain(window) for _, window in found] == list(map(plain, before[4:]))
        check(windows_in(made), after)
        for wrong in (None, [10**6], [1], [3, 3], [-1], "5"):
            with pytest.raises(InvalidArgument, match="the state's tokens must be"):
                made.load_state_dict({**state, "tokens": wrong})


def test_weighted_windows_are_resumed_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write(folder, documents_of([9, 4]))  # 13 tokens, two windows of 8
    options: dict[str, Any] = {"sampler": WeightedSampler([1, 1], n_draws=9), "batch_size": 1}
    with loader(folder, Pack(8), **options) as made:
        batches = iter(made)
        next(batches)
        state = made.state_dict()
        expected = [bits(each) for each in batches]
    append_shard(folder, SCHEMA, samples_of(documents_of([2], seed=1)))  # no window more
    with loader(folder, Pack(8), **options) as made:
        made.load_state_dict(state)
        assert [bits(each) for each in made] == expected


@WORKERS
def test_subsets_and_selections_are_streams_of_their_own(tmp_path: Path, num_workers: int) -> None:
    folder = write(tmp_path / "set", DOCUMENTS, 3)
    split(folder, {"val": 0.4, "train": 0.6})
    with open_dataset(folder, subset="val") as dataset:
        chosen = [sample["tokens"] for sample in dataset]
    found = epoch(folder, subset="val", num_workers=num_workers)
    check(found, naive_windows(chosen, EVERYTHING))
    with open_dataset(folder) as dataset, dataset.select([13, 2, 2, 0, 1]) as selected:
        found = epoch(selected, shuffle=True, num_workers=num_workers)
    check(found, naive_windows([DOCUMENTS[i] for i in (13, 2, 2, 0, 1)], EVERYTHING))


@WORKERS
def test_windows_have_one_source_each(folder: str, tmp_path: Path, num_workers: int) -> None:
    others = documents_of([11, 2, 33], seed=9)
    other = write(tmp_path / "other", others)
    first, second = naive_windows(DOCUMENTS, EVERYTHING), naive_windows(others, EVERYTHING)
    weights = [len(first), len(second)]
    with mix([folder, other], weights=weights) as mixture:
        found = epoch(mixture, shuffle=True, num_workers=num_workers)
        check(found, first + second)
        with loader(mixture) as made:
            last = len(first) + len(second) - 1
            assert made.view.sources_of([0, last]).tolist() == [0, 1]


def test_a_source_without_a_window_is_no_part_of_a_mixture(folder: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other", documents_of([3]))
    with (
        mix([folder, other], weights=[1, 1]) as mixture,
        pytest.raises(InvalidArgument, match="leave it out"),
    ):
        loader(mixture, Pack(8, rest="drop"))


@WORKERS
def test_a_transform_gets_a_window(folder: str, num_workers: int) -> None:
    expected = naive_windows(DOCUMENTS, EVERYTHING)

    def halved(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "tokens": sample["tokens"] // 2}

    found = epoch(folder, transform=halved, shuffle=True, num_workers=num_workers)
    check(found, [{**each, "tokens": each["tokens"] // 2} for each in expected])


def test_a_transform_that_fails_says_where_its_window_begins(folder: str) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no")

    with pytest.raises(TransformError, match="sample 0 of shard 000000-000"):
        epoch(folder, transform=fail)


def test_origins_are_the_documents_that_windows_begin_in(folder: str) -> None:
    with loader(folder, Pack(16)) as made:
        batch = next(iter(made))
    assert batch.origins.tolist() == [[0, 0], [0, 2], [1, 2], [1, 3]]


def test_only_what_is_packed_is_read(folder: str) -> None:
    with loader(folder, Pack(8), shuffle=True) as made:
        assert set(next(iter(made))) == {"tokens", "tokens_mask"}
        numbers = np.array([0, 1, 0])
        assert made.view.covered_rows(numbers).tolist() == [0, 2]


def test_a_changed_byte_names_the_document(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", DOCUMENTS, 1)
    shard = next(Path(folder).glob("*.shard"))
    with ShardReader(shard) as reader:
        payload = next(each for each in reader.sections if each.kind == Kind.PAYLOAD)
        (entry,) = reader.records.entries("tokens", np.array([8]))
    with shard.open("r+b") as file:
        file.seek(payload.offset + int(entry["offset"]))
        file.write(b"\xff")
    with pytest.raises(ChecksumMismatch, match="sample 8") as raised:
        epoch(folder)
    assert (raised.value.field, raised.value.sample) == ("tokens", 8)
    found = epoch(folder, on_error="skip", max_skips=99, tail="drop")
    assert 0 < len(found) < len(naive_windows(DOCUMENTS, EVERYTHING))


def test_a_document_of_another_length_than_the_index_said_is_an_error(folder: str) -> None:
    with loader(folder) as made:
        assert isinstance(made.view, TokenView)
        packed = made.view.packed
        packed.ends = packed.ends.copy()
        packed.ends[2:] += 1  # as if the file had been another when it was opened
        with pytest.raises(ShardCorrupt, match="does not match its stored shape") as raised:
            windows_in(made)
    assert (raised.value.field, raised.value.sample) == ("tokens", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length must be a whole number"),
        ({"length": True}, "length must be a whole number"),
        ({"length": 8, "field": 3}, "field must be the name"),
        ({"length": 8, "targets": 1}, "targets must be True or False"),
        ({"length": 8, "apart": None}, "apart must be True or False"),
        ({"length": 8, "eot": "x"}, "eot must be a token"),
        ({"length": 8, "pad": None}, "pad must be a token"),
        ({"length": 8, "rest": "keep"}, "rest must be one of 'pad', 'drop'"),
    ],
)
def test_options_that_are_not_acceptable_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Pack(**options)


@pytest.mark.parametrize(
    ("pack", "options", "message"),
    [
        (Pack(8, field="none"), {}, "no field 'none'; there are tokens"),
        (Pack(8), {}, r"these are: tokens, sub\.ids: choose one"),
        (Pack(8, field="text"), {}, "'text' must be an array of integers"),
        (Pack(8, field="real"), {}, "'real' must be an array of integers"),
        (Pack(8, field="lists"), {}, "'lists' must be an array of integers"),
        (Pack(8, field="square"), {}, "'square' must have one dimension"),
        (Pack(8, field="maybe"), {}, "'maybe' must not be optional"),
        (
            Pack(8, field="tokens"),
            {"fields": ["tokens", "text"]},
            r"leave \['text'\] out of fields",
        ),
        (Pack(8, field="tokens"), {"fields": ["text"]}, "made of many rows' 'tokens'"),
        (Pack(8, field="tokens", eot=1 << 16), {}, "eot must be a token .* from 0 to 65535"),
        (Pack(8, field="tokens", pad=-1), {}, "pad must be a token .* found -1"),
        (Pack(99, field="tokens", rest="drop"), {}, "10 tokens .* are not enough"),
    ],
)
def test_refusals_have_a_hint(mixed: str, pack: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        loader(mixed, pack, **options)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a dataset with fields that can be packed, one of them nested, and others."""
    schema = Schema(
        {
            "tokens": Array("uint16", (None,)),
            "sub.ids": Array("int32", (4,)),
            "text": Text(),
            "real": Array("float32", (None,)),
            "lists": List(Array("int32", (None,))),
            "square": Array("int32", (2, None)),
            "maybe": Array("int32", (None,), optional=True),
        }
    )
    sample = {
        "tokens": np.arange(5, dtype=np.uint16),
        "sub.ids": np.arange(4, dtype=np.int32),
        "text": "",
        "real": np.zeros(2, np.float32),
        "lists": [],
        "square": np.zeros((2, 1), np.int32),
        "maybe": None,
    }
    folder = tmp_path_factory.mktemp("mixed") / "set"
    return write_dataset(folder, 2, 1, schema, [sample, sample])


def test_a_nested_field_is_packed_by_its_name(mixed: str) -> None:
    found = epoch(mixed, Pack(3, field="sub.ids", rest="drop"))
    assert [window["sub.ids"].tolist() for _, window in found] == [[0, 1, 2], [3, 0, 1]]
