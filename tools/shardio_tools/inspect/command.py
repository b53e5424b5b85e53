"""Show a dataset, one shard, or one sample.

Shows fields, counts, sizes, classes, the inputs without samples, and one sample. Writes a picture
or animation of the sample, or a sheet of many samples, if requested. Only a few parts are read;
`shardio verify` checks every byte. Exit code 1 means that damage was found; it is listed.

Examples:
    shardio inspect out/                          # fields, counts and classes
    shardio inspect out/ --sample 3               # the values of a sample
    shardio inspect out/ --sheet sheet.png        # 24 samples in one picture
    shardio inspect out/ --sample 3 --image clip.webp
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from shardio_tools.arguments import is_url
from shardio_tools.inspect.pictures import add_arguments as add_picture_arguments
from shardio_tools.inspect.pictures import add_pictures, check_picture_options, describe_pictures
from shardio_tools.inspect.report import (
    Facts,
    Inspection,
    inspect_dataset,
    inspect_shard,
    is_dataset,
    type_text,
)
from shardio_tools.output import (
    OUTCOMES,
    escaped,
    format_count,
    format_list,
    format_size,
    format_table,
    print_json,
    print_out,
    shorten,
)
from shardio_tools.stats import describe_stats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a dataset (a folder, or its URL) or one shard (a file)")
    add("--sample", type=int, metavar="N", help="the sample to show (default: the first)")
    add("--json", action="store_true", help="print everything as JSON, with complete lists")
    add_picture_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Inspect, report, and return the exit code."""
    check_picture_options(options)
    is_folder = is_url(options.path) or is_dataset(options.path)
    found = (inspect_dataset if is_folder else inspect_shard)(options.path, options.sample)
    add_pictures(found, options)
    if options.json:
        print_json(found.as_json())
    else:
        describe = describe_dataset if is_folder else describe_shard
        pictures = describe_pictures(found.facts, options)
        for line in chain(describe(found.facts), pictures, _damage(found, options.path)):
            print_out(line)
    return 1 if found.findings else 0


def describe_dataset(facts: Facts) -> Iterator[str]:
    """Yield the lines about a dataset."""
    if "generation" in facts:
        yield from _origin(facts)
    yield from _fields(facts["schema"])
    if classes := facts.get("classes"):
        yield "classes"
        rows = [
            [str(i), escaped(name), "" if n is None else format_count(n, "sample")]
            for i, (name, n) in enumerate(classes.items())
        ]
        yield _listed(rows)
    if n_without := facts.get("without_class"):
        yield f"{format_count(n_without, 'sample')} with a label outside the classes"
    if subsets := facts.get("subsets"):
        yield "subsets"
        rows = [[escaped(name), format_count(n, "sample")] for name, n in subsets.items()]
        yield _listed(rows)
    yield from describe_stats(facts.get("stats", {}))
    yield "shards"
    rows = [_shard_row(shard) for shard in facts["shards"]]
    yield _listed(rows)
    for name, beside in facts.get("column_groups", {}).items():
        yield f"shards of the added column {escaped(name)}"
        rows = [_shard_row(shard) for shard in beside]
        yield _listed(rows)
    if without := facts.get("without_samples"):
        yield "inputs without samples"
        reasons = [escaped(_reason(entry)) for entry in without]
        yield format_list(reasons, "--json lists all")
    yield from _sample(facts)


def _listed(rows: list[list[str]]) -> str:
    return format_list(format_table(rows).splitlines() if rows else ["none"], "--json lists all")


def _reason(entry: Mapping[str, Any]) -> str:
    outcome = OUTCOMES.get(entry["outcome"], entry["outcome"])
    return ": ".join(filter(None, (outcome, entry["path"], entry.get("reason"))))


def _origin(facts: Facts) -> Iterator[str]:
    shards = format_count(len(facts["shards"]), "shard")
    rows = [
        ["generation", f"{facts['generation']} of lineage {facts['lineage']}"],
        ["samples", f"{facts['samples']:,} in {shards}, {format_size(facts['bytes'])}"],
    ]
    if converter := facts["converter"]:
        options = [f"{k}={json.dumps(v)}" for k, v in converter.get("options", {}).items()]
        rows.append(["converter", f"{converter.get('name')} {converter.get('version')}"])
        rows.append(["options", escaped(" ".join(options))])
    rows.append(["versions", ", ".join(f"{k} {v}" for k, v in facts["versions"].items())])
    if operation := facts["operation"]:
        given = operation.get("options")
        text = [f"{k}={json.dumps(v)}" for k, v in given.items()] if isinstance(given, dict) else []
        rows.append(["made by", escaped(" ".join([str(operation.get("name")), *text]))])
    if facts["outcomes"]:
        counts = [f"{n:,} {OUTCOMES.get(kind, kind)}" for kind, n in facts["outcomes"].items()]
        n_inputs = format_count(sum(facts["outcomes"].values()), "file")
        rows.append(["inputs", f"{n_inputs}: {', '.join(counts)}"])
    yield format_table(rows)


def describe_shard(facts: Facts) -> Iterator[str]:
    """Yield the lines about a shard."""
    rows = [["bytes", f"{facts['bytes']:,} ({format_size(facts['bytes'])})"]]
    if facts["samples"] is not None:
        rows = [["samples", f"{facts['samples']:,}"], *rows, ["id", facts["id"]]]
    yield format_table(rows)
    yield from _fields(facts["schema"])
    if facts["sections"]:
        yield "sections"
        header = ["kind", "field", "offset", "bytes", "count", "stride"]
        numbers = ("offset", "bytes", "count", "stride")
        cells = [
            [s["kind"], escaped(s["field"] or ""), *(f"{s[key]:,}" for key in numbers)]
            for s in facts["sections"]
        ]
        yield format_table([header, *cells], indent="  ")
    yield from _sample(facts)


def _shard_row(shard: Mapping[str, Any]) -> list[str]:
    n_samples = (
        "unreadable" if shard["samples"] is None else format_count(shard["samples"], "sample")
    )
    state = "" if shard["is_readable"] else "damaged"
    return [escaped(shard["name"]), n_samples, format_size(shard["bytes"]), state]


def _fields(schema: Facts) -> Iterator[str]:
    yield "fields"
    if not schema:
        yield "  cannot be read"
        return
    rows = [[escaped(name), type_text(kind)] for name, kind in schema.items()]
    yield format_table(rows, indent="  ")


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _sample(facts: Facts) -> Iterator[str]:
    if not (sample := facts.get("sample")):
        return
    row = f", row {sample['row']:,}" if "row" in sample else ""
    yield f"sample {sample['sample']:,} ({escaped(sample['shard'])}{row})"
    if not sample["fields"]:
        yield "  cannot be read"
        return
    names = list(facts.get("classes") or {})
    rows = []
    for name, value in sample["fields"].items():
        text = "cannot be read" if value is None else _value(value)
        if (
            name == "label"
            and value
            and value.get("shape") == []
            and isinstance(value["min"], int)
            and 0 <= value["min"] < len(names)
        ):
            text += f" ({escaped(names[value['min']])})"
        rows.append([escaped(name), text])
    yield format_table(rows, indent="  ")


def _value(value: Mapping[str, Any]) -> str:
    if value.get("absent"):
        return "none"
    if value["type"] == "List":
        shapes = ", ".join(_shape(shape) for shape in value["first"])
        more = ", …" if value["arrays"] > len(value["first"]) else ""
        what = f"{format_count(value['arrays'], 'array')} of {value['dtype']}"
        return f"{what}: {shapes}{more}" if shapes else what
    if value["type"] in ("Text", "Json"):
        return shorten(json.dumps(value["value"], ensure_ascii=False))
    if value["type"] == "Bytes":
        more = " …" if value["bytes"] > len(value["first"].split()) else ""
        return f"{format_count(value['bytes'], 'byte')}: {value['first']}{more}"
    if value["type"] in ("Image", "Video", "Audio"):
        return _media(value)
    kind = f"{value['dtype']} {_shape(value['shape'])}"
    if "first" not in value:
        return f"{kind}, empty"
    first = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in value["first"]]
    if not value["shape"]:
        return f"{value['dtype']} {first[0]}"
    if math.prod(value["shape"]) == len(first):
        return f"{kind}: {' '.join(first)}"
    least, most = (f"{v:.6g}" if isinstance(v, float) else v for v in (value["min"], value["max"]))
    stats = f"min {least}, max {most}, mean {value['mean']:.6g}"
    return f"{kind}: {stats}; {' '.join(first)} …"


def _media(value: Mapping[str, Any]) -> str:
    n_bytes = format_count(value["bytes"], "byte")
    if value["type"] == "Image":
        sides = f"{value['width']} × {value['height']}"
        return f"{sides} pixels, {format_count(value['channels'], 'channel')}: {n_bytes}"
    length = "" if value["seconds"] is None else f" in {value['seconds']:.6g} s"
    if value["type"] == "Video":
        what = f"{value['width']} × {value['height']}, {format_count(value['frames'], 'frame')}"
    else:
        what = f"{format_count(value['channels'], 'channel')} at {value['rate']:,} Hz, "
        what += format_count(value["samples"], "sample")
    packets = format_count(value["packets"], "packet")
    return f"{escaped(value['codec'])} {what}{length}: {n_bytes} in {packets}"


def _damage(found: Inspection, path: str) -> Iterator[str]:
    verdict = "no damage found (shardio verify checks every byte)"
    if found.findings:
        yield "damage"
        yield format_list([escaped(str(f)) for f in found.findings], "shardio verify lists all")
        verdict = f"{format_count(len(found.findings), 'finding')} of damage"
    yield f"inspected {escaped(path)}: {verdict}"
