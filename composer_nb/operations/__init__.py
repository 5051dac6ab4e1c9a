"""The subcommands of `composer-nb`. Each is one function, declared together with its arguments.

    @command("report", RUN, JSON)
    def report(args: argparse.Namespace) -> int:
        'Summarize a run.'
        summary = build_report(ReadOnly(args.path))
        return emit(args, summary, lambda: table(summary))

The first line of the docstring is the help text. A command returns the exit status. It raises ValueError and the like for errors
that the user can fix, which `cli.main` prints as one line. Heavy imports are inside the functions, so that `composer-nb --help`
starts quickly.
"""

import argparse
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.segment import Segment

from composer_nb.harness.untrusted import visible_lines

Run = Callable[[argparse.Namespace], int]
Argument = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """One subcommand, such as `report`, or one action of a subcommand, such as `tasks make`.

    Attributes:
        lines: Whether the package's log goes to standard output; otherwise, and with --json, it goes to standard error.
    """

    run: Run
    arguments: tuple[Argument, ...]
    epilog: str
    lines: bool

    @property
    def help(self) -> str:
        """The first line of the docstring, in the style of argparse."""
        first = inspect.cleandoc(self.run.__doc__ or "").partition("\n")[0]
        return first[:1].lower() + first[1:].rstrip(".")


COMMANDS: dict[str, Subcommand] = {}


def command(name: str, *arguments: Argument, epilog: str = "", lines: bool = False) -> Callable[[Run], Run]:
    """Register a function as a subcommand."""

    def register(run: Run) -> Run:
        COMMANDS[name] = Subcommand(run=run, arguments=arguments, epilog=epilog, lines=lines)
        return run

    return register


def arg(name: str, help: str = "", default: Any = None, **options: Any) -> Argument:
    """Declare `--flag`, `--option METAVAR` or `positional METAVAR`. The value has the type of its default, which the help shows;
    `options` are those of `ArgumentParser.add_argument`."""
    first, _, metavar = name.partition(" ")
    if default is not None:
        options = {"default": default, "type": type(default), **options}
        if isinstance(default, list):
            del options["type"]
        help = f"{help} ({default})".strip() if default not in ("", []) else help
    elif first.startswith("-") and not metavar and "choices" not in options:
        options["action"] = "store_true"
    if metavar:
        options["metavar"] = metavar
    return (first,), {"help": help, **options}


JSON = arg("--json", "print JSON, for programs")
RUN = arg("path RUN", "a run directory, as runs/tour", type=Path)
HTML = arg("--html FILE", "also write a page with figures", type=Path)
STEP = arg("--step N", "RL step, from 1; -1: the last", -1)
SET = arg("--set KEY=VALUE", "change a setting by its dotted name, as rl.steps=20; repeatable", [], action="append")


def overrides(pairs: Sequence[str]) -> dict[str, str]:
    """Return `["rl.steps=20"]` as a dictionary. Raises ValueError for a pair without `=`."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"{pair!r}: write NAME=VALUE, as rl.steps=20")
        values[name] = value
    return values


def pick(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return some of the arguments by name, to pass them on."""
    return {name: getattr(args, name) for name in names}


def console() -> Console:
    """Return a console as wide as the terminal, or wide enough for all tables if output is a file. It escapes what a terminal
    would obey in any text (`visible_lines`): names and texts may be those of a foreign run."""

    class EscapingConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for part in super().render(renderable, options):
                yield part if part.control else Segment(visible_lines(part.text), part.style)

    terminal = EscapingConsole(highlight=False)
    return terminal if terminal.is_terminal else EscapingConsole(highlight=False, width=130)


def emit(args: argparse.Namespace, result: Any, render: Callable[[], Any], status: int = 0) -> int:
    """Print a result as JSON with --json, else what `render` returns: a text, a table, or a tuple of these, escaped as by
    `console`. Return `status`."""
    parts = json.dumps(result, indent=2) if args.json else render()
    for part in parts if isinstance(parts, tuple) else (parts,):
        if isinstance(part, str):
            print(part if args.json else visible_lines(part))
        else:
            console().print(part)
    return status


def save(path: Path | None, make: Callable[[], str | bytes]) -> None:
    """Write a page or a picture, if an option names the file."""
    from composer_nb.harness.files import write_atomic

    if path:
        write_atomic(path, make())
