"""What `composer-nb tasks make` shows: how far it is, and a table of what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from composer_nb.harness.making.make import Made, State

LINE_S = 30.0
"""How often a line is written where no terminal is."""


@contextmanager
def progress(console: Console) -> Iterator[Callable[[State], None]]:
    """Shows the states that it is told: a bar on a terminal, else a line now and then."""
    if not console.is_terminal:
        said, when = "", -LINE_S

        def line(state: State) -> None:
            nonlocal said, when
            if state.doing != said or time.monotonic() - when >= LINE_S:
                said, when = state.doing, time.monotonic()
                console.print(
                    f"{state.doing}: {state.kept} of {state.wanted} tasks, {state.tried} tried", highlight=False
                )

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tried]} tried"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        shown = bar.add_task("reading", total=None, tried=0)
        yield lambda state: bar.update(
            shown,
            description=state.doing,
            completed=state.kept,
            total=state.wanted or None,
            tried=state.tried,
        )


def table(made: Made) -> Table:
    """A row a kind of change, those with most tasks first."""
    left_out = ", ".join(f"{count} {why}" for why, count in sorted(made.left_out.items())) or "none"
    found = Table(
        title=f"{escape(made.repository)}: {made.tasks} tasks in {made.wall_s:.0f} s. {made.tests} tests count "
        f"({made.coverage:.0%} with a twin), {made.suite_s:.1f} s a run; left out: {left_out}",
        box=None,
        pad_edge=False,
        title_justify="left",
    )
    for head in ("kind", "tried", "kept", "yield", "s a task", "why not"):
        found.add_column(head, justify="left" if head in ("kind", "why not") else "right")
    for kind in sorted(made.kinds, key=lambda kind: -kind.kept):
        others = [f"{count} {why}" for why, count in sorted(kind.verdicts.items()) if why != "kept"]
        cost = f"{kind.seconds / kind.kept:.1f}" if kind.kept else "-"
        share = f"{kind.kept / kind.tried:.0%}"
        found.add_row(kind.kind, str(kind.tried), str(kind.kept), share, cost, ", ".join(others))
    return found
