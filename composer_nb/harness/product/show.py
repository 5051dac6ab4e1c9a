"""What the agent and the bench show in a terminal: turns as they come, a diff with a question, progress, a table."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.attempt import Attempt
from composer_nb.harness.product.work import Work
from composer_nb.harness.rollout import Turn
from composer_nb.harness.untrusted import json_of, visible, visible_lines

SHOWN_LINES = 8
"""Of an observation."""
SHOWN_DIFF = 200_000
"""Characters."""


def teller(console: Console) -> Callable[[Said | Turn], None]:
    """Prints turns as they come. What a model or a tool wrote can not move the cursor or colour the terminal."""

    def tell(event: Said | Turn) -> None:
        if isinstance(event, Said):
            if event.text:
                console.out(visible_lines(event.text), highlight=False)
            return
        if not event.call and event.error is None:
            return
        colour = "red" if event.error else "cyan"
        console.print(f"[{colour}]{escape(call_line(event))}[/] [dim]{event.seconds * 1e3:.0f} ms[/]", soft_wrap=True)
        lines = visible_lines(event.observation).splitlines()
        more = [f"… {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
        for line in [*lines[:SHOWN_LINES], *more]:
            console.out(f"  {line[:200]}", style="dim", highlight=False)

    return tell


def call_line(turn: Turn) -> str:
    """A call as one line, `read_file target_file=a.py`."""
    if not turn.call:
        return "(a call that could not be read)"
    held = json_of(turn.call)
    parts = [f"{name}={visible_lines(str(value))!r}"[:80] for name, value in held["arguments"].items()]
    return visible(" ".join([held["name"], *parts]))[:200]


def decide(work: Work, verdict: str, console: Console) -> int:
    """Shows what an agent did, and carries out what the user makes of it. 0 where it ended by itself and something is accepted,
    or nothing was changed, which leaves the verdict open; 1 otherwise."""
    done, say = work.conversation, partial(console.print, markup=False, soft_wrap=True)
    if behind := Counter(work.source.left_out.values()):
        text = ", ".join(f"{count} {why}" for why, count in sorted(behind.items()))
        say(f"\nstayed behind: {text}", style="dim")
    say(f"\n{done.stop} after {len(done.turns)} calls, {done.seconds:.0f} s {visible(done.why)}".rstrip(), style="dim")
    for path in sorted(work.others):
        what = "a device, a protected name, or a link that leads out of what the agent saw"
        say(f"not carried back, {what}: {visible(path)}", style="red")
    if work.lost:
        say(f"its files could not be carried out of the sandbox: {visible(work.lost)}", style="red")
    if not work.changes:
        say("it changed nothing")
        return 0 if done.stop == "finished" else 1
    shown, left = _beginning(visible_lines(work.diff))
    console.print(Syntax(shown, "diff", background_color="default", word_wrap=True))
    if left:
        say(f"… {left} more characters: all of it is in {work.path.resolve()}/changes.diff", style="red")
    if verdict == "ask":
        verdict = _asked(console) if sys.stdin.isatty() else "later"
    if verdict == "accept":
        work.accept()
        say(f"accepted: {len(work.changes)} files changed in {work.source.root}")
    elif verdict == "reject":
        work.reject()
        say("rejected: nothing was changed")
    else:
        say(f"undecided: nothing was changed; the diff is {work.path.resolve()}/changes.diff")
        say(f"decide with: composer-nb verdict {shlex.quote(str(work.path))} accept, or reject")
    say(f"kept: {work.path}", style="dim")
    return 0 if verdict == "accept" and done.stop == "finished" else 1


def _beginning(text: str) -> tuple[str, int]:
    """Whole lines of at most SHOWN_DIFF characters, and how many characters come after them."""
    if len(text) <= SHOWN_DIFF:
        return text, 0
    end = text.rfind("\n", 0, SHOWN_DIFF) + 1 or SHOWN_DIFF
    return text[:end], len(text) - end


def _asked(console: Console) -> str:
    while True:
        said = console.input("accept these changes? \\[y/n] ").strip().lower()
        if said in ("y", "yes"):
            return "accept"
        if said in ("n", "no"):
            return "reject"


@contextmanager
def bench_progress(total: int, console: Console) -> Iterator[Callable[[str, Attempt], None]]:
    """A bar for each arm on a terminal, else a line a rollout."""
    done: Counter[str] = Counter()
    solved: Counter[str] = Counter()

    def count(arm: str, attempt: Attempt) -> str:
        done[arm] += 1
        solved[arm] += attempt.grade.passed
        return f"{arm}: {solved[arm]} of {done[arm]} solved"

    if not console.is_terminal:
        yield lambda arm, attempt: console.print(
            f"{count(arm, attempt)}, {total - done[arm]} to go: {visible(attempt.task.id)} {attempt.grade.status}",
            highlight=False,
            markup=False,
        )
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        bars: dict[str, TaskID] = {}

        def tell(arm: str, attempt: Attempt) -> None:
            if arm not in bars:
                bars[arm] = bar.add_task(arm, total=total)
            bar.update(bars[arm], description=count(arm, attempt), completed=done[arm])

        yield tell


def bench_table(report: Mapping[str, Any]) -> Table:
    """A row an arm."""
    found = Table(
        title=escape(f"{report['policy']}, {report['samples']} rollouts a task"),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    head = (
        "tools",
        "pass@1",
        "95 %",
        "best of k",
        "tasks",
        "tokens",
        "calls",
        "invalid",
        "s p50",
        "s p95",
        "lost",
        "gain",
    )
    for place, name in enumerate(head):
        found.add_column(name, justify="right" if place else "left")
    for arm, row in report["arms"].items():
        if not row["n_tasks"]:
            why = escape(visible(row["lost_to"])[:200]) or "see composer-nb doctor"
            found.add_row(arm, f"no grade: {row['infra_errors']} lost, {why}")
            continue
        gain = "{:+.3f} ({:+.3f} to {:+.3f})".format(*row["gain"]) if "gain" in row else ""
        found.add_row(
            arm,
            f"{row['pass_at_1']:.3f}",
            "{:.3f}–{:.3f}".format(*row["ci95"]),
            f"{row['best_of_k']:.3f} (k={row['k']})",
            str(row["n_tasks"]),
            f"{row['tokens_per_task']:.0f}",
            f"{row['tool_calls_per_task']:.1f}",
            "–" if row["invalid_call_rate"] is None else f"{row['invalid_call_rate']:.1%}",
            f"{row['seconds_p50']:.1f}",
            f"{row['seconds_p95']:.1f}",
            str(row["infra_errors"]),
            gain,
        )
    return found
