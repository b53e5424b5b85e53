"""The arguments of `shardio convert`, and which of them a converter takes."""

from __future__ import annotations

import argparse
from typing import Final

from shardio_tools.arguments import add_engine_arguments
from shardio_tools.output import utf8_name

# What the converter takes, beside what every conversion takes: none of these is passed on unless
# it is given, so that its default is stated in one place, the converter.
CONVERTER_OPTIONS: Final = (
    "frames",
    "stride",
    "step",
    "size",
    "fps",
    "store",
    "codec",
    "gop",
    "quality",
    "check",
    "audio",
    "columns",
    "rows",
    "records",
    "dtype",
    "eot",
    "length",
    "references",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add(
        "src",
        metavar="SRC",
        help="a folder of videos, pictures, sound, arrays or datasets of others, one file, or a "
        "pattern of them, quoted",
    )
    add(
        "out",
        metavar="OUT",
        nargs="?",
        help="the dataset: a folder that is missing or empty, but for --append; or a URL",
    )
    add(
        "--kind",
        type=utf8_name,
        help="videos, images, audio, arrays, tables, arrow, webdataset, hdf5, … "
        "(default: told from the names)",
    )
    add("--labels", metavar="FILE", help="CSV or JSON Lines with columns path and label")
    add("--workers", type=int, metavar="N", help="processes (default: one per usable CPU)")
    add_engine_arguments(add)
    _add_clips(parser.add_argument_group("clips and pictures"))
    _add_stores(parser.add_argument_group("how they are stored"))
    _add_arrays(parser.add_argument_group("arrays, tables and records"))
    _add_tokens(parser.add_argument_group("tokens"))
    _add_ends(parser.add_argument_group("what is broken, and what is there already"))
    add("--quiet", action="store_true", help="print nothing but what is wrong")
    add("--json", action="store_true", help="print the report as JSON")


def _add_clips(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--frames", type=int, metavar="N", help="frames of a clip (default: 16)")
    add("--stride", type=int, metavar="N", help="a clip takes every N-th frame (default: 1)")
    add(
        "--step",
        type=int,
        metavar="N",
        help="frames from one clip's start to the next (default: frames x stride: no overlap)",
    )
    add("--size", type=int, metavar="N", help="height and width of a frame (default: 112)")
    add("--fps", metavar="RATE", help="take frames at this rate, such as 10 or 30000/1001")


def _add_stores(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--store",
        metavar="HOW",
        help="videos: h264 (default), raw, jpeg, packets; images: original (default), jpeg, raw",
    )
    add("--codec", metavar="NAME", help="of h264: h264 (default), hevc or av1")
    add("--gop", type=int, metavar="N", help="of h264: a keyframe every N frames (default: 16)")
    add(
        "--quality",
        type=int,
        metavar="N",
        help="of h264: crf, lower is better (default: 19, hevc 20, av1 30); "
        "of jpeg: 1 to 100 (default: 90)",
    )
    add(
        "--check",
        action="store_true",
        default=None,
        help="of packets, and of LeRobot: decode every frame once, to find damage",
    )
    add(
        "--audio",
        action="store_true",
        default=None,
        help="of videos: keep the sound beside the pictures, its packets untouched",
    )
    add(
        "--estimate",
        action="store_true",
        help="convert a few files into a temporary folder, and say what all would come to",
    )


def _add_arrays(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rows",
        action=argparse.BooleanOptionalAction,
        help="of arrays, HDF5 and Zarr: each row of a file is a sample; with --no-rows each file "
        "is (default: rows of a single file; of HDF5 and Zarr also of several)",
    )
    add(
        "--column",
        type=utf8_name,
        action="append",
        dest="columns",
        metavar="NAME",
        help="of Arrow's tables and LeRobot: take this column or feature, and others that are "
        "named so (default: all)",
    )
    add(
        "--records",
        choices=("example", "bytes"),
        help="of TFRecord and ArrayRecord: tf.train.Example, or bytes (default: as the first is)",
    )
    add(
        "--schema",
        metavar="FILE",
        help="JSON: what the fields are (default: told from the files)",
    )
    add(
        "--reference",
        type=utf8_name,
        dest="references",
        metavar="COLUMN",
        action="append",
        help="of CSV and JSON Lines: a column that names files, which are stored in place of their "
        "names",
    )


def _add_tokens(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dtype", metavar="NAME", help="how they are stored: uint8, uint16, uint32, int32, int64")
    add("--eot", type=int, metavar="ID", help="the token between documents: each is a sample")
    add("--length", type=int, metavar="N", help="so many tokens are a sample (default: 1024)")


def _add_ends(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--keep-partial",
        action="store_true",
        help="of a file that breaks midway, keep what is before the break",
    )
    add(
        "--on-error",
        choices=("skip", "stop"),
        default="skip",
        help="at a broken file: go on with the next, or stop and keep what is done (default: skip)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on with what an interrupted conversion has finished in OUT",
    )
    add(
        "--overwrite",
        action="store_true",
        help="start again; a dataset in OUT is replaced once the new one is done",
    )
    add(
        "--append",
        action="store_true",
        help="add to the dataset in OUT what it does not have; other options as it was made with",
    )
