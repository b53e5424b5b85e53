"""Show a dataset, one shard, or one sample.

Shows counts, size, the default view, fields, classes, subsets, statistics, and one sample. Writes a
picture or animation of the sample, or a sheet of many samples, if requested. Only a few parts are
read; `shardio verify` checks every byte. Exit code 1 means that damage was found; it is listed.

Examples:
    shardio inspect out/                          # fields, counts and classes
    shardio inspect out/ --sample 3               # the values of a sample
    shardio inspect out/ --subset train           # the samples of a subset
    shardio inspect out/ --sheet sheet.png        # 24 samples in one picture
    shardio inspect out/ --sample 3 --image clip.webp
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from shardio import InvalidArgument
from shardio._base.progress import format_sides, format_size
from shardio_tools.arguments import is_url
from shardio_tools.inspect.pictures import add_arguments as add_picture_arguments
from shardio_tools.inspect.pictures import add_pictures, check_picture_options, describe_pictures
from shardio_tools.inspect.report import (
    Facts,
    Inspection,
    inspect_dataset,
    inspect_shard,
    is_dataset,
    media_text,
    type_text,
)
from shardio_tools.output import (
    escaped,
    format_count,
    print_json,
    print_screen,
    shorten,
    shown_path,
    utf8_name,
)
from shardio_tools.screen import MAX_LISTED, Cell, Done, Element, Heading, Next, Table
from shardio_tools.screen import facts as facts_table
from shardio_tools.stats import describe_stats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a dataset (a folder, or its URL) or one shard (a file)")
    add("--subset", type=utf8_name, metavar="NAME", help="inspect the samples of this subset")
    add("--sample", type=int, metavar="N", help="the sample to show (default: the first)")
    add("--verbose", action="store_true", help="also show history, options, versions and shards")
    add("--all", action="store_true", help="print complete lists")
    add("--json", action="store_true", help="print everything as JSON, with complete lists")
    add_picture_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Inspect, report, and return the exit code."""
    check_picture_options(options)
    is_folder = is_url(options.path) or is_dataset(options.path)
    if is_folder:
        found = inspect_dataset(options.path, options.sample, options.subset)
    elif options.subset is not None:
        raise InvalidArgument("--subset is for datasets, not for one shard")
    else:
        found = inspect_shard(options.path, options.sample)
    add_pictures(found, options)
    if options.json:
        print_json(found.as_json())
    else:
        print_screen(_describe(found, options, is_folder=is_folder))
    return 1 if found.findings else 0


def _describe(
    found: Inspection, options: argparse.Namespace, *, is_folder: bool
) -> Iterator[Element]:
    rest = "" if options.all else "--all lists them"
    if is_folder:
        yield from _describe_dataset(found, rest, is_verbose=options.verbose)
    else:
        yield from _describe_shard(found, is_verbose=options.verbose)
    yield from describe_pictures(found.facts, options)
    yield from _damage(found, rest, options)


def _describe_dataset(found: Inspection, rest: str, *, is_verbose: bool) -> Iterator[Element]:
    facts = found.facts
    yield Heading(escaped(facts["dataset"]))
    if "generation" in facts:
        yield facts_table([*_overview(found), *(_history(facts) if is_verbose else ())])
    yield from _fields(found)
    if classes := facts.get("classes"):
        yield Heading("Classes")
        rows = [
            [str(i), escaped(name), "" if n is None else f"{n:,}"]
            for i, (name, n) in enumerate(classes.items())
        ]
        yield Table(rows, ("label", "class", "samples"), "><>", rest)
    if n_without := facts.get("without_class"):
        text = f"{format_count(n_without, 'sample')} with a label outside the classes"
        yield Cell(text, "warning")
    if subsets := facts.get("subsets"):
        yield Heading("Subsets")
        rows = [[escaped(name), f"{n:,}"] for name, n in subsets.items()]
        yield Table(rows, ("subset", "samples"), "<>", rest)
    yield from describe_stats(facts.get("stats", {}), rest)
    if is_verbose or "generation" not in facts:
        yield from _shards(facts, rest)
    yield from _sample(facts)


def _overview(found: Inspection) -> Iterator[list[str]]:
    """Yield rows about a dataset: samples, size, the default view, the inputs by outcome."""
    facts = found.facts
    samples = f"{facts['samples']:,}"
    if "subset" in facts:
        samples += f" of subset {escaped(facts['subset'])}"
    if facts.get("classes"):
        samples += f" in {format_count(len(facts['classes']), 'class', 'classes')}"
    yield ["samples", samples]
    shards = format_count(len(facts["shards"]), "shard")
    yield ["size", f"{format_size(facts['bytes'])} in {shards}"]
    yield ["view", view_text(found)]
    n_inputs = sum(facts["outcomes"].values())
    if n_inputs != facts["outcomes"].get("converted", 0):
        from shardio_tools.convert_report import outcome_text  # takes 0.1 s to import

        kind, outcomes = facts["converter"].get("name"), facts["outcomes"]
        counts = [f"{n:,} {outcome_text(kind, outcome)}" for outcome, n in outcomes.items()]
        yield ["inputs", f"{format_count(n_inputs, 'file')}: {', '.join(counts)}"]


def view_text(found: Inspection) -> str:
    """Return a text that describes the samples of the default view."""
    view = found.view
    if view["kind"] != "clips":
        return "rows, as they are stored"
    parts = [f"stride {view['stride']}", f"a step of {view['step']}"]
    if "size" in view:
        height, width = view["size"]
        parts.append(format_sides(height, width))
    clips = "clips" if found.n_clips is None else format_count(found.n_clips, "clip")
    return f"{clips} of {format_count(view['frames'], 'frame')}, {', '.join(parts)}"


def _history(facts: Facts) -> Iterator[list[str]]:
    """Yield rows about the origin of a dataset."""
    yield ["generation", f"{facts['generation']} of lineage {facts['lineage']}"]
    if converter := facts["converter"]:
        given = [f"{k}={json.dumps(v)}" for k, v in converter.get("options", {}).items()]
        yield ["converter", escaped(f"{converter.get('name')} {converter.get('version')}")]
        yield ["options", escaped(" ".join(given))]
    yield ["versions", escaped(", ".join(f"{k} {v}" for k, v in facts["versions"].items()))]
    if operation := facts["operation"]:
        given = operation.get("options")
        text = [f"{k}={json.dumps(v)}" for k, v in given.items()] if isinstance(given, dict) else []
        yield ["made by", escaped(" ".join([str(operation.get("name")), *text]))]


def _shards(facts: Facts, rest: str) -> Iterator[Element]:
    """Yield the shards, and the inputs that gave no sample."""
    groups = {f"Shards of the added column {escaped(k)}": v for k, v in _groups(facts).items()}
    for title, shards in {"Shards": facts["shards"], **groups}.items():
        yield Heading(title)
        rows = [_shard_row(shard) for shard in shards]
        yield Table(rows, ("shard", "samples", "size", ""), "<>.", rest) if rows else "  none"
    if without := facts.get("without_samples"):
        yield Heading("Inputs without samples")
        kind = facts["converter"].get("name")
        yield Table([_input_row(entry, kind) for entry in without], rest=rest)


def _groups(facts: Facts) -> dict[str, list[Facts]]:
    groups: dict[str, list[Facts]] = facts.get("column_groups", {})
    return groups


def _input_row(entry: Mapping[str, Any], kind: str | None) -> list[str]:
    from shardio_tools.convert_report import outcome_text

    outcome = outcome_text(kind, entry["outcome"])
    return [escaped(text) for text in (outcome, entry["path"], entry.get("reason") or "")]


def _describe_shard(found: Inspection, *, is_verbose: bool) -> Iterator[Element]:
    facts = found.facts
    yield Heading(escaped(facts["shard"]))
    rows = [["size", f"{facts['bytes']:,} bytes ({format_size(facts['bytes'])})"]]
    if facts["samples"] is not None:
        rows = [["samples", f"{facts['samples']:,}"], *rows]
        rows += [["id", facts["id"]]] if is_verbose else []
    yield facts_table(rows)
    yield from _fields(found)
    if is_verbose and facts["sections"]:
        yield Heading("Sections")
        numbers = ("offset", "bytes", "count", "stride")
        cells = [
            [s["kind"], escaped(s["field"] or ""), *(f"{s[key]:,}" for key in numbers)]
            for s in facts["sections"]
        ]
        yield Table(cells, ("kind", "field", *numbers), "<<>>>>")
    yield from _sample(facts)


def _shard_row(shard: Mapping[str, Any]) -> list[str]:
    n_samples = "?" if shard["samples"] is None else f"{shard['samples']:,}"
    state = "" if shard["is_readable"] else Cell("damaged", "bad")
    return [escaped(shard["name"]), n_samples, format_size(shard["bytes"]), state]


def _fields(found: Inspection) -> Iterator[Element]:
    schema = found.facts["schema"]
    yield Heading("Fields")
    if not schema:
        yield Cell("  cannot be read", "bad")
        return
    units = found.facts.get("converter", {}).get("options", {}).get("units") or {}
    rows = [
        [
            escaped(name),
            type_text(kind),
            media_text(found.media.get(name, ())) or escaped(units.get(name, "")),
        ]
        for name, kind in schema.items()
    ]
    yield Table(rows if found.media or units else [row[:2] for row in rows])
    if any(kind["type"] == "Audio" for kind in schema.values()):
        yield "  loaders deliver 16,000 Hz mono; decode={…: shardio.Sound(…)} changes it"
    n_media = max(map(len, found.media.values()), default=0)
    if 0 < n_media < found.n_samples:
        yield Cell(f"  sizes and lengths are of {n_media:,} of {found.n_samples:,} samples", "dim")


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _sample(facts: Facts) -> Iterator[Element]:
    if not (sample := facts.get("sample")):
        return
    row = f", row {sample['row']:,}" if "row" in sample else ""
    yield Heading(f"Sample {sample['sample']:,} ({escaped(sample['shard'])}{row})")
    if not sample["fields"]:
        yield Cell("  cannot be read", "bad")
        return
    names = list(facts.get("classes") or {})
    rows = []
    for name, value in sample["fields"].items():
        text = Cell("cannot be read", "bad") if value is None else _value(value)
        if (
            name == "label"
            and value
            and value.get("shape") == []
            and isinstance(value["min"], int)
            and 0 <= value["min"] < len(names)
        ):
            text += f" ({escaped(names[value['min']])})"
        rows.append([escaped(name), text])
    yield Table(rows)


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
        sides = format_sides(value["height"], value["width"])
        return f"{sides}, {format_count(value['channels'], 'channel')}: {n_bytes}"
    length = "" if value["seconds"] is None else f" in {value['seconds']:.6g} s"
    if value["type"] == "Video":
        sides = format_sides(value["height"], value["width"])
        what = f"{sides}, {format_count(value['frames'], 'frame')}"
    else:
        what = f"{format_count(value['channels'], 'channel')} at {value['rate']:,} Hz, "
        what += format_count(value["samples"], "sample")
    packets = format_count(value["packets"], "packet")
    return f"{escaped(value['codec'])} {what}{length}: {n_bytes} in {packets}"


def _damage(found: Inspection, rest: str, options: argparse.Namespace) -> Iterator[Element]:
    path = escaped(options.path)
    if found.findings:
        yield Heading("Damage", "bad")
        lines = [f"  {escaped(str(finding))}" for finding in found.findings]
        n_shown = MAX_LISTED if rest else len(lines)
        yield from lines[:n_shown]
        if more := lines[n_shown:]:
            yield f"  … and {len(more):,} more ({rest})"
        verdict = f"{format_count(len(found.findings), 'finding')} of damage"
        yield Done(f"inspected {path}: {verdict}", "bad")
        repair = f"shardio repair {shown_path(options.path)} NEW"
        yield Next([(repair, "save the undamaged samples as a new dataset")])
        return
    yield Done(f"inspected {path}: no damage found (shardio verify checks every byte)")
    command, is_folder = f"shardio inspect {shown_path(options.path)}", "dataset" in found.facts
    if options.subset is not None:
        command += f" --subset {shown_path(options.subset)}"
    steps: list[tuple[str, str]] = []
    if not options.verbose:
        remark = "history, options, versions, shards" if is_folder else "sections of the file"
        steps.append((f"{command} --verbose", remark))
    kinds = {value["type"] for values in found.media.values() for value in values[:1]}
    if is_folder and options.sheet is None and kinds & {"Image", "Video"}:
        steps.append((f"{command} --sheet sheet.png", "pictures of up to 24 samples"))
    yield Next(steps)
