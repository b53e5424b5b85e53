"""Shards of other loaders: WebDataset's tars and MosaicML's MDS, as these load them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.converter_kinds.kind import Kind


def _make_tar(place: Path, samples: Iterator[dict[str, bytes]]) -> None:
    with tarfile.open(place / "one.tar", "w") as file:
        for number, sample in enumerate(samples):
            for ending, data in sample.items():
                member = tarfile.TarInfo(f"{number:08d}.{ending}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


def _make_texts(place: Path) -> None:
    facts = json.dumps({"width": 640, "words": ["one", "two"]}).encode()
    _make_tar(
        place,
        ({"cls": b"%d" % n, "txt": b"a caption of words", "json": facts} for n in range(10_000)),
    )


def _make_arrays(place: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.zeros((64, 64), np.float32))
    _make_tar(place, ({"npy": file.getvalue(), "cls": b"%d" % n} for n in range(5_000)))


def _make_pictures(place: Path) -> None:
    from PIL import Image

    rng, file = np.random.default_rng(0), io.BytesIO()
    picture = Image.fromarray(rng.integers(0, 255, (24, 32, 3), "uint8")).resize((320, 240))
    picture.save(file, "JPEG")
    _make_tar(place, ({"jpg": file.getvalue(), "cls": b"%d" % n} for n in range(5_000)))


def _load_tar(path: str) -> Iterator[Any]:
    """Yield samples with WebDataset's default decoding, which does not decode pictures."""
    import webdataset

    yield from webdataset.WebDataset(path, shardshuffle=False).decode()


def _make_tokens(place: Path) -> None:
    from streaming import MDSWriter

    columns = {"tokens": "ndarray:uint16", "id": "int", "text": "str"}
    with MDSWriter(out=str(place), columns=columns) as writer:
        for number in range(20_000):
            tokens = np.arange(512, dtype=np.uint16)
            writer.write({"tokens": tokens, "id": number, "text": "some words"})


def _make_large(place: Path) -> None:
    from streaming import MDSWriter

    columns = {"x": "ndarray:float32:256,256", "y": "int64", "facts": "json"}
    with MDSWriter(out=str(place), columns=columns) as writer:
        for number in range(800):
            x = np.full((256, 256), number, np.float32)
            writer.write({"x": x, "y": np.int64(number), "facts": {"a": 1}})


def _load_mds(path: str) -> Iterator[Any]:
    from streaming.base.format import reader_from_json

    place = Path(path)
    if place.suffix != ".mds":
        return
    for entry in json.loads((place.parent / "index.json").read_text())["shards"]:
        if entry["raw_data"]["basename"] == place.name:
            reader = reader_from_json(str(place.parent), "", entry)
            yield from map(reader.get_item, range(reader.samples))


KINDS: Final = {
    "tar texts": Kind("webdataset", _make_texts, _load_tar),
    "tar arrays": Kind("webdataset", _make_arrays, _load_tar),
    "tar pictures": Kind("webdataset", _make_pictures, _load_tar),
    "mds tokens": Kind("mds", _make_tokens, _load_mds),
    "mds large": Kind("mds", _make_large, _load_mds),
}
