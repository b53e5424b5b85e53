"""Help texts of the command line: the overview of all commands, and the help of each command.

The docstring of a command's module is its help text: a sentence, details, and examples.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple

MAX_WIDTH: Final = 120
"""The largest number of columns that a help text takes."""
_HELP_COLUMN: Final = 26
_NAME_WIDTH: Final = 12
_EXAMPLES: Final = "\nExamples:\n"
_PURPOSE: Final = "Turn folders of video, images and arrays into datasets that feed training loops."
_FIRST_STEPS: Final = """\
try first:
  shardio demo                    # from videos to a trained network in a minute
  shardio convert videos/ out/    # your own videos, one folder for each class
  shardio inspect out/            # see the fields, classes and samples"""
_MORE_HELP: Final = "shardio COMMAND --help shows the options of a command, with examples."


class HelpText(NamedTuple):
    """The parts of a command's help text: a sentence, paragraphs of details, lines of examples."""

    summary: str
    details: str
    examples: str


def help_text(module: ModuleType) -> HelpText:
    """Return the help text of a command, from the docstring of its module."""
    summary, _, rest = (module.__doc__ or "").partition("\n")
    details, _, examples = f"{rest}\n".partition(_EXAMPLES)
    return HelpText(summary, details.strip(), textwrap.dedent(examples).strip())


def command_help(module: ModuleType) -> tuple[str, str]:
    """Return the texts before and after the options in the help of a command."""
    summary, details, examples = help_text(module)
    if examples:
        summary += f"\n\nexamples:\n{textwrap.indent(examples, '  ')}"
    return summary, details


def overview(groups: Mapping[str, Mapping[str, ModuleType]]) -> str:
    """Return the overview of all commands in their groups, with the commands to try first."""
    width = _width()
    blocks = ["usage: shardio COMMAND [options]", textwrap.fill(_PURPOSE, width), _FIRST_STEPS]
    for title, commands in groups.items():
        lines = [f"{title}:"]
        for name, module in commands.items():
            start = f"  {name:<{_NAME_WIDTH}}"
            indent = " " * len(start)
            summary = help_text(module).summary
            lines.append(textwrap.fill(start + summary, width, subsequent_indent=indent))
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, textwrap.fill(_MORE_HELP, width)]) + "\n"


def _width() -> int:
    return min(shutil.get_terminal_size().columns, MAX_WIDTH) - 2


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that prints a short usage line, wraps paragraphs and keeps indented lines."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=_width(), **options)

    def _format_usage(
        self, usage: Any, actions: Iterable[Any], groups: Iterable[Any], prefix: str | None
    ) -> str:
        """Return the usage with required arguments; "[options]" stands for all others."""
        words = [self._prog]
        alternatives = [group._group_actions for group in groups if group.required]
        for action in actions:
            if isinstance(action, argparse._SubParsersAction):
                words.append(str(action.metavar))
            elif not action.option_strings:
                words.append(self._format_args(action, action.dest))
            elif action.required:
                alternatives.append([action])
        for choices in alternatives:
            text = " | ".join(map(self._format_action_invocation, choices))
            words.append(f"({text})" if len(choices) > 1 else text)
        start = "usage: " if prefix is None else prefix
        text = " ".join([*words, "[options]"])
        lines = textwrap.wrap(start + text, self._width, subsequent_indent=" " * len(start))
        return "\n".join(lines) + "\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = re.split(r"\n{2,}", text.strip())
        return "\n\n".join(
            block
            if "\n  " in block
            else textwrap.fill(" ".join(block.split()), width, break_on_hyphens=False)
            for block in blocks
        )

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if action.metavar is None and action.choices is not None:
            text = "|".join(map(str, action.choices))
            return lambda n: (text,) * n
        return super()._metavar_formatter(action, default_metavar)
