"""Make the small data sets of Hugging Face's `datasets` that tests of `--kind arrow` read.

    python tests/converters/made/make_datasets.py tests/converters/made/arrow

Needs `datasets` and Pillow. What `datasets` itself reads of them goes into `values.json`, beside.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import (
    Array2D,
    Audio,
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    List,
    Value,
    load_from_disk,
)
from PIL import Image as Pillow


def main(place: Path) -> None:
    """Make both, and say what `datasets` reads of them."""
    shutil.rmtree(place / "saved", ignore_errors=True)
    plain = Dataset.from_dict(
        {
            "image": [{"bytes": _picture(n), "path": None} for n in range(4)],
            "label": [0, 1, 1, 0],
            "matrix": [np.full((2, 3), n, "float32") for n in range(4)],
            "tokens": [list(range(n)) for n in range(4)],
            "text": ["one", "", "\u00fc", None],
            "box": [{"x": n, "names": ["a"] * n} for n in range(4)],
        },
        features=Features(
            {
                "image": Image(),
                "label": ClassLabel(names=["cat", "\u00e9l\u00e9phant"]),
                "matrix": Array2D((2, 3), "float32"),
                "tokens": List(Value("uint16")),
                "text": Value("string"),
                "box": {"x": Value("int8"), "names": List(Value("string"))},
            }
        ),
    )
    sounds = pa.array([{"bytes": _sound(n), "path": f"{n}.wav"} for n in range(4)])
    plain = plain.add_column("sound", sounds, feature=Audio(decode=False))
    both = DatasetDict({"train": plain, "test": plain.select([3, 1])})
    both.save_to_disk(place / "saved", num_shards={"train": 2, "test": 1})
    plain.to_parquet(place / "plain.parquet")
    values = {
        name: [*map(_readable, rows)] for name, rows in load_from_disk(place / "saved").items()
    }
    text = json.dumps(values, indent=1, ensure_ascii=False)
    (place / "values.json").write_text(text + "\n", encoding="utf-8")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    row["image"] = np.asarray(row["image"]).tolist()
    row["sound"] = len(row["sound"]["bytes"])
    return row


def _picture(number: int) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(np.full((2, 3, 3), 40 * number, "uint8")).save(file, "png")
    return file.getvalue()


def _sound(number: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 8000, 0, "NONE", ""))
        written.writeframes(np.full(160, number, "<i2").tobytes())
    return file.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
