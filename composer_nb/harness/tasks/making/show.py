"""Show the progress of `composer-nb tasks make`, and a table of what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from composer_nb.harness.grading.recorded import guards_line
from composer_nb.harness.tasks.making.make import Report
from composer_nb.harness.untrusted import visible

LINE_S = 30.0  # Seconds between lines where there is no terminal.


@contextmanager
def progress(console: Console) -> Iterator[Report]:
    """Yield a function that shows what is being done: in one line on a terminal, else as a line now and then."""
    last, when = "", -LINE_S
    with console.status("reading") if console.is_terminal else nullcontext() as status:

        def show(doing: str, counts: str) -> None:
            nonlocal last, when
            line = f"{doing}: {counts}" if counts else doing
            if status is not None:
                status.update(escape(line))
            elif doing != last or time.monotonic() - when >= LINE_S:
                last, when = doing, time.monotonic()
                console.print(line, highlight=False, markup=False)

        yield show


def table(summary: Mapping[str, Any]) -> Table:
    """Return a table with a row for each kind of change, those with most tasks first."""
    left_out = ", ".join(f"{count} {why}" for why, count in sorted(summary["left_out"].items())) or "none"
    code = {**summary["files_left_out"], **summary["no_bugs_in"]}
    code = {path: reason for path, reason in code.items() if path.endswith(".py")}
    missing = "".join(
        f"\n{visible(path)}: {reason}, so no task is made of it" for path, reason in list(code.items())[:10]
    )
    count_kept = sum(kind["kept"] for kind in summary["kinds"])
    rows = Table(
        title=f"{escape(summary['repository'])}: {summary['tasks']} tasks, of {count_kept} changes kept, in "
        f"{summary['wall_s']:.0f} s. {summary['tests']} tests count ({summary['coverage']:.0%} with a twin), "
        f"{summary['suite_s']:.1f} s a run; left out: {left_out}\n"
        f"{guards_line(Counter(guard['by'] for guard in summary['guards'].values()))}"
        + (f"\nleft out, below the required guard: {guards_line(summary['below'])}" if summary["below"] else "")
        + escape(missing),
        box=None,
        pad_edge=False,
        title_justify="left",
    )
    for head in ("kind", "tried", "kept", "yield", "s a task", "why not"):
        rows.add_column(head, justify="left" if head in ("kind", "why not") else "right")
    for kind in sorted(summary["kinds"], key=lambda kind: -kind["kept"]):
        others = [f"{count} {why}" for why, count in sorted(kind["verdicts"].items()) if why != "kept"]
        tried, count_kept = kind["tried"], kind["kept"]
        cost = f"{kind['seconds'] / count_kept:.1f}" if count_kept else "-"
        rows.add_row(kind["kind"], str(tried), str(count_kept), f"{count_kept / tried:.0%}", cost, ", ".join(others))
    return rows
