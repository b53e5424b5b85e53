"""Write the MDS shards that tests compare with, by MosaicML's own library.

    python tests/converters/made/make_mds.py tests/converters/made/mds

Needs `mosaicml-streaming` (0.13.0 wrote those in the repository) and Pillow, in an environment of
their own. Beside the shards lies what the library reads from them, as JSON.
"""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from streaming import MDSWriter
from streaming.base.format import reader_from_json

COLUMNS: Final = {
    "blob": "bytes",
    "caption": "str",
    "count": "int",
    "dec": "str_decimal",
    "facts": "json",
    "fixed": "ndarray:float32:2,3",
    "free": "ndarray",
    "half": "float16",
    "long": "str_int",
    "picture": "png",
    "real": "str_float",
    "small": "uint8",
    "typed": "ndarray:int16",
}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"hashes": ["sha1", "xxh3_64"]},
    "packed": {"hashes": ["xxh64"], "compression": "zstd:3"},
}


def main() -> None:
    """Write one folder per way of storing."""
    place = Path(sys.argv[1])
    for name, options in WAYS.items():
        folder = place / name
        with MDSWriter(out=str(folder), columns=COLUMNS, size_limit=1_200, **options) as writer:
            for number in range(6):
                writer.write(_sample(number))
        if name == "plain":
            read = [_shown(sample) for sample in _read(folder)]
            (place / "read.json").write_text(json.dumps(read, indent=1))


def _sample(n: int) -> dict[str, Any]:
    return {
        "blob": bytes(range(n)),
        "caption": f"Bild \u00fc{n}\U0001f600",
        "count": -n,
        "dec": Decimal(f"{n}.10"),
        "facts": {"n": n, "list": [1, None, "x"]},
        "fixed": np.full((2, 3), n + 0.5, "float32"),
        "free": np.arange(300 if n == 5 else n + 1, dtype="uint64"),
        "half": n / 4,
        "long": n - 2**40,
        "picture": Image.new("RGB", (4, 3), (n, 0, 255)),
        "real": n / 3,
        "small": n,
        "typed": np.arange(2 * (n + 1), dtype="int16").reshape(n + 1, 2),
    }


def _read(folder: Path) -> list[dict[str, Any]]:
    index = json.loads((folder / "index.json").read_text())
    shards = [reader_from_json(str(folder), "", entry) for entry in index["shards"]]
    return [shard[i] for shard in shards for i in range(shard.samples)]


def _shown(sample: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in sample.items():
        if isinstance(value, Image.Image):
            shown[name] = np.asarray(value).tolist()
        elif isinstance(value, np.ndarray):
            shown[name] = [value.dtype.name, value.tolist()]
        elif isinstance(value, bytes):
            shown[name] = value.hex()
        else:
            shown[name] = value.item() if isinstance(value, np.generic) else value
            shown[name] = str(value) if isinstance(value, Decimal) else shown[name]
    return shown


if __name__ == "__main__":
    main()
