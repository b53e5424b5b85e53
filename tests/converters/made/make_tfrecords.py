"""Write the TFRecord files that tests compare with, and what TensorFlow reads in them.

    python tests/converters/made/make_tfrecords.py tests/converters/made/tfrecord

Needs `tensorflow`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

EXTREMES = [0, 1, -1, 127, 128, 300, 2**62, 2**63 - 1, -(2**63), *range(20)]


def main() -> None:
    """Write all into the folder given."""
    place = Path(sys.argv[1])
    records = [_example(number).SerializeToString() for number in range(5)]
    for suffix, compression in (("", ""), (".gz", "GZIP"), (".zlib", "ZLIB")):
        path = place / f"examples.tfrecord-00000-of-00001{suffix}"
        with tf.io.TFRecordWriter(str(path), compression) as writer:
            for record in records:
                writer.write(record)
    path = place / "sequence.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        steps = tf.train.FeatureList(feature=[_feature([1]), _feature([2])])
        lists = tf.train.FeatureLists(feature_list={"steps": steps})
        context = tf.train.Features(feature={"id": _feature([1])})
        made = tf.train.SequenceExample(context=context, feature_lists=lists)
        writer.write(made.SerializeToString())
    read = tf.data.TFRecordDataset(str(place / "examples.tfrecord-00000-of-00001"))
    known = [_values(tf.train.Example.FromString(one)) for one in read.as_numpy_iterator()]
    text = json.dumps(known, indent=1, sort_keys=True)
    (place / "known.json").write_text(text + "\n")


def _example(number: int) -> Any:
    features: dict[str, Any] = {
        "label": [number - 2],
        "image/encoded": [bytes(range(number, 200))],
        "box": [number / 3, float("inf"), -0.0, 1e-45],
        "numbers": EXTREMES[: 4 * number],
        "names": [f"caf\u00e9 {i}".encode() for i in range(number)],
        "\u00fcber": [f"text {number}".encode()],
        "weights": [0.5] * (number % 2),
    }
    if number % 2:
        features["odd"] = [number]
    kinds = {
        name: _feature(values, name in ("weights", "box")) for name, values in features.items()
    }
    kinds["names"] = tf.train.Feature(bytes_list=tf.train.BytesList(value=features["names"]))
    if number == 2:
        kinds["nothing"] = tf.train.Feature()
    return tf.train.Example(features=tf.train.Features(feature=kinds))


def _feature(values: list[Any], is_float: bool = False) -> Any:  # noqa: FBT001, FBT002
    if is_float:
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def _values(example: Any) -> dict[str, Any]:
    """Return the values of all features that have a kind, with bytes as hexadecimal digits."""
    found = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind is not None:
            values = list(getattr(feature, kind).value)
            found[name] = [kind, [_plain(value) for value in values]]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return value.hex() if isinstance(value, float) else value


if __name__ == "__main__":
    main()
