"""Split a dataset randomly into named subsets.

With --group FIELD, samples with the same value in the field are in the same subset. No data is
copied: the dataset gets a new generation, which lists the samples of each subset. Open a subset
with shardio.open(path, subset=NAME), to read it or to pass it to ShardLoader.

Examples:
    shardio split out/ --parts train=0.9,val=0.1
    shardio split out/ --parts train=0.8,val=0.1,test=0.1 --group source
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from shardio.maintenance import SplitReport, split
from shardio_tools.arguments import add_output_arguments, parse_shares
from shardio_tools.output import escaped, format_count, generation_text, print_result, utf8_name
from shardio_tools.screen import Done, Element, Next, Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset to split")
    add(
        "--parts",
        type=parse_shares,
        required=True,
        metavar="NAME=SHARE,…",
        help="the subsets, and the share of samples for each; the rest is in no subset",
    )
    add(
        "--group",
        type=utf8_name,
        metavar="FIELD",
        help="samples with the same value in this field stay together",
    )
    add("--seed", type=int, metavar="N", default=0, help="random seed (default: 0)")
    add_output_arguments(add)


def run(options: argparse.Namespace) -> int:
    """Split, report, and return the exit code."""
    report = split(options.path, options.parts, group=options.group, seed=options.seed)
    print_result(report, options, _describe(report, options))
    return 0


def _describe(report: SplitReport, options: argparse.Namespace) -> Iterator[Element]:
    rows = []
    for name, n_samples in report.n_samples.items():
        groups = [f"{report.n_groups[name]:,}"] if options.group is not None else []
        rows.append([escaped(name), f"{n_samples:,}", *groups])
    head = ("subset", "samples", *(["groups"] if options.group is not None else []))
    yield Table(rows, head, "<>>")
    if report.replaced:
        yield f"replaced the subsets {escaped(', '.join(report.replaced))}"
    total = format_count(sum(report.n_samples.values()), "sample")
    subsets = format_count(len(rows), "subset")
    yield Done(f"split {total} into {subsets}, {generation_text(report, options)}")
    path, name = escaped(options.path), next(iter(report.n_samples))
    yield Next(code=[(f"shardio.open({path!r}, subset={name!r})", "open a subset")])
