"""Command-line options of converters: one for each field of a converter's dataclass.

The annotation of a field determines how its value is parsed; its docstring is the help text.
The metadata of a field may override `flag` (None for no option), `metavar`, `choices` and `help`.
With the `unit` "bytes", a number may be a size such as 100MB.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import shardio
from shardio.conversion import BUILT_IN, converter_class, converter_classes, known_kinds
from shardio_tools.arguments import named_once, parse_bytes
from shardio_tools.output import utf8_name

PREFIX = "converter."
"""The prefix of the options' names in the parsed arguments."""
_MAX_NAMED = 3
"""The maximum number of kinds in the title of a group; all options of more kinds share a group."""
_METAVARS = {int: "N", float: "X"}


@dataclass
class ConverterOption:
    """A command-line option: its flag, arguments for argparse, and the help text by kind."""

    name: str
    flag: str
    parsing: dict[str, Any]
    helps: dict[str, str] = field(default_factory=dict)

    def help(self, kinds: Sequence[str]) -> str:
        """Return the help text; if only some of `kinds` have the option, the text names them."""
        texts = {*self.helps.values()}
        if len(texts) > 1:
            return "; ".join(f"{kind}: {text}" for kind, text in self.helps.items())
        names = "" if [*self.helps] == [*kinds] else f" [{', '.join(self.helps)}]"
        return f"{texts.pop()}{names}"


def add_converter_options(
    parser: argparse.ArgumentParser, kind: str | None, main: Sequence[str] = ()
) -> None:
    """Add the options of shardio's converters and of the converter `kind` to a parser.

    Options that the same kinds have form a group. The flags in `main` are added to the parser's own
    options instead of a group.
    """
    options: dict[str, ConverterOption] = {}
    kinds = [*BUILT_IN] if kind in (None, *BUILT_IN) else [str(kind), *BUILT_IN]
    for converter in converter_classes(kinds):
        for option in options_of(converter):
            known = options.setdefault(option.flag, option)
            if known.parsing == option.parsing:
                known.helps |= option.helps
    taken = parser._option_string_actions
    groups: dict[tuple[str, ...], list[ConverterOption]] = {}
    for flag, option in options.items():
        if flag in main:
            _add(parser, option, kinds)
        elif flag not in taken:
            groups.setdefault(tuple(option.helps), []).append(option)
    several = [option for names in groups if len(names) > _MAX_NAMED for option in groups[names]]
    for names, members in groups.items():
        if len(names) <= _MAX_NAMED:
            group = parser.add_argument_group(f"options of {_joined(names)}")
            for option in members:
                _add(group, option, names)
    if several:
        group = parser.add_argument_group("options of several kinds")
        for option in several:
            _add(group, option, kinds)


def _add(group: argparse._ActionsContainer, option: ConverterOption, kinds: Sequence[str]) -> None:
    text = option.help(kinds).replace("%", "%%")
    group.add_argument(option.flag, dest=PREFIX + option.name, help=text, **option.parsing)


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def options_of(converter: type[shardio.Converter]) -> Iterator[ConverterOption]:
    """Yield the command-line options of a converter."""
    docs = _docstrings(converter)
    try:
        types = get_type_hints(converter)
    except NameError:  # an annotation that only the type checker can resolve
        types = {}
    for each in dataclasses.fields(converter):  # type: ignore[arg-type]
        known = each.metadata
        flag = known.get("flag", f"--{each.name.replace('_', '-')}")
        parsing = _parsing(types.get(each.name, str), known.get("choices"))
        if flag is None or parsing is None or not each.init:
            continue
        if known.get("unit") == "bytes":
            parsing["type"] = parse_bytes
        if "metavar" in known:
            parsing["metavar"] = known["metavar"]
        text = known.get("help", docs.get(each.name, ""))
        if "(default" not in text and each.default not in (None, False, dataclasses.MISSING):
            text = f"{text} (default: {each.default})".lstrip()
        yield ConverterOption(each.name, flag, parsing, {converter.kind: text})


def hint_at_kinds(flag: str) -> str:
    """Return a hint at the third-party kinds that have the option `flag`; "" if there are none."""
    kinds = []
    for kind in sorted(set(known_kinds()).difference(BUILT_IN)):
        with contextlib.suppress(shardio.ShardioError):  # the kind cannot be imported
            flags = {option.flag for option in options_of(converter_class(kind))}
            if flag in flags or flag.replace("--no-", "--") in flags:
                kinds.append(kind)
    named = " or ".join(map(repr, kinds))
    return f"; an option of the kind {named}: add --kind {kinds[0]}" if kinds else ""


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        sides = re.fullmatch(r"(\d+)[x×,]\d+", text)
        hint = f": pictures become squares, so write one number, {sides[1]}" if sides else ""
        raise argparse.ArgumentTypeError(f"expected a whole number; found {text!r}{hint}") from None


def _parsing(type_: Any, choices: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the arguments of `add_argument` for an annotation; None for an unsupported one."""
    types = [each for each in get_args(type_) or (type_,) if each is not NoneType]
    of, *others = [type_] if get_origin(type_) in (Literal, list, tuple, Sequence) else types
    origin = get_origin(of) or of
    if choices or origin is Literal:
        return {"choices": tuple(choices or get_args(of))}
    if others or of is str:
        return {"type": utf8_name, "metavar": "NAME"}
    if of is bool:
        return {"action": argparse.BooleanOptionalAction}
    if of in _METAVARS:
        return {"type": _whole_number if of is int else of, "metavar": _METAVARS[of]}
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return {"type": JsonFile, "metavar": "FILE"}
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        single = _parsing(next(iter(get_args(of)), str), None)
        return None if single is None else {**single, "action": "append"}
    return None


@lru_cache(maxsize=64)
def _docstrings(converter: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of its bases, as help texts."""
    found: dict[str, str] = {}
    for base in reversed(converter.__bases__):
        found |= _docstrings(base)
    body = _class_bodies(converter.__module__).get(converter.__qualname__, ())
    for before, after in pairwise(body):
        match before, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = _help(text)
    return found


@lru_cache(maxsize=64)
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the bodies of a module's classes by qualified name; empty if it has no source code.

    A module is parsed once for all its classes; `inspect.getsource` would do it for each of them.
    """
    found: dict[str, list[ast.stmt]] = {}

    def collect(statements: Sequence[ast.stmt], prefix: str) -> None:
        for each in statements:
            if isinstance(each, ast.ClassDef):
                found.setdefault(prefix + each.name, each.body)
                collect(each.body, f"{prefix}{each.name}.")
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                collect(each.body, f"{prefix}{each.name}.<locals>.")
            else:
                for branch in ("body", "orelse"):  # of `if` and `try`
                    collect(getattr(each, branch, ()), prefix)

    with contextlib.suppress(OSError, TypeError, KeyError):  # no source code
        collect(ast.parse(inspect.getsource(sys.modules[module])).body, "")
    return found


def _help(text: str) -> str:
    text = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split()).removesuffix(".")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


class JsonFile(str):
    """The name of a JSON file that holds the value of an option."""

    __slots__ = ()

    def read(self) -> Any:
        """Return the content of the file; refuse invalid JSON and repeated keys."""
        try:
            with open(self, encoding="utf-8-sig") as file:
                return json.load(file, object_pairs_hook=named_once)
        except (ValueError, RecursionError) as error:
            raise shardio.InvalidArgument(f"{self}: not JSON: {error}") from error


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the converter options that were given; a converter has defaults for the rest."""
    return {
        name.removeprefix(PREFIX): value.read() if isinstance(value, JsonFile) else value
        for name, value in vars(options).items()
        if name.startswith(PREFIX) and value is not None
    }
