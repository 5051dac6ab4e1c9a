"""Show the progress of `composer-nb tasks make`, and a table of what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from composer_nb.harness.grading.recorded import guards_line
from composer_nb.harness.tasks.making.make import State
from composer_nb.harness.untrusted import visible

LINE_S = 30.0
"""Seconds between lines where there is no terminal."""


@contextmanager
def progress(console: Console) -> Iterator[Callable[[State], None]]:
    """Yield a function that shows the states that it is given: in one line on a terminal, else as a line now and then."""
    last, when = "", -LINE_S
    with console.status("reading") if console.is_terminal else nullcontext() as status:

        def show(state: State) -> None:
            nonlocal last, when
            counts = f": {state.kept} of {state.wanted} tasks, {state.tried} tried" if state.wanted else ""
            counts += f"; {state.below}" if state.below else ""
            if status is not None:
                status.update(escape(state.doing + counts))
            elif state.doing != last or time.monotonic() - when >= LINE_S:
                last, when = state.doing, time.monotonic()
                console.print(state.doing + counts, highlight=False, markup=False)

        yield show


def table(made: Mapping[str, Any]) -> Table:
    """Return a table with a row for each kind of change, those with most tasks first."""
    left_out = ", ".join(f"{count} {why}" for why, count in sorted(made["left_out"].items())) or "none"
    code = {**made["files_left_out"], **made["no_bugs_in"]}
    code = {path: reason for path, reason in code.items() if path.endswith(".py")}
    missing = "".join(
        f"\n{visible(path)}: {reason}, so no task is made of it" for path, reason in list(code.items())[:10]
    )
    kept = sum(kind["kept"] for kind in made["kinds"])
    found = Table(
        title=f"{escape(made['repository'])}: {made['tasks']} tasks, of {kept} changes kept, in {made['wall_s']:.0f} s. "
        f"{made['tests']} tests count ({made['coverage']:.0%} with a twin), {made['suite_s']:.1f} s a run; left out: {left_out}\n"
        f"{guards_line(Counter(each['by'] for each in made['guards'].values()))}"
        + (f"\nleft out, below the required guard: {guards_line(made['below'])}" if made["below"] else "")
        + escape(missing),
        box=None,
        pad_edge=False,
        title_justify="left",
    )
    for head in ("kind", "tried", "kept", "yield", "s a task", "why not"):
        found.add_column(head, justify="left" if head in ("kind", "why not") else "right")
    for kind in sorted(made["kinds"], key=lambda kind: -kind["kept"]):
        others = [f"{count} {why}" for why, count in sorted(kind["verdicts"].items()) if why != "kept"]
        tried, kept = kind["tried"], kind["kept"]
        cost = f"{kind['seconds'] / kept:.1f}" if kept else "-"
        found.add_row(kind["kind"], str(tried), str(kept), f"{kept / tried:.0%}", cost, ", ".join(others))
    return found
