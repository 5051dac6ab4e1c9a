"""Terminal output of the agent and the bench: turns as they come, a diff with a question, progress, a table."""

import os
import shlex
import signal
import subprocess
import sys
import termios
import tty
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.user import Answers, nobody
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Turn
from composer_nb.harness.terms.conduct import asks
from composer_nb.harness.terms.registry import called
from composer_nb.harness.tool_errors import errors_line
from composer_nb.harness.untrusted import visible, visible_lines
from composer_nb.production.work import Work, read_plan

# Lines shown of an observation.
SHOWN_LINES = 8
# Characters shown of a diff.
SHOWN_DIFF = 200_000


def teller(console: Console) -> Callable[[Said | Turn], None]:
    """Return a function that prints turns as they come. Text of a model or a tool cannot move the cursor or set colours."""

    def tell(event: Said | Turn) -> None:
        if isinstance(event, Said):
            if event.text:
                console.out(visible_lines(event.text), highlight=False)
            return
        if not event.call and event.error is None:
            if event.observation:
                console.out(f"user: {visible_lines(event.observation)}", highlight=False)
            return
        colour = "red" if event.error else "cyan"
        console.print(f"[{colour}]{escape(call_line(event))}[/] [dim]{event.seconds * 1e3:.0f} ms[/]", soft_wrap=True)
        lines = visible_lines(event.observation).splitlines()
        more = [f"… {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
        for line in [*lines[:SHOWN_LINES], *more]:
            console.out(f"  {line[:200]}", style="dim", highlight=False)

    return tell


def answerer(console: Console) -> Answers:
    """Return a user who types answers to the questions of an agent. Without a terminal, nobody answers."""

    def answer(message: str, until: float) -> str:
        if not asks(message):
            return ""
        try:
            return console.input("your answer (Enter alone ends the work): ").strip()
        except EOFError:
            return ""

    return answer if sys.stdin.isatty() else nobody


def call_line(turn: Turn) -> str:
    """Return a call as one line, such as `read_file target_file=a.py`."""
    tool, arguments = called(turn)
    if not tool:
        return visible(f"(a call that could not be read) {turn.call}")[:200].rstrip()
    parts = [f"{name}={visible_lines(str(value))!r}"[:80] for name, value in arguments.items()]
    return visible(" ".join([tool, *parts]))[:200]


def decide(work: Work, verdict: str, console: Console) -> int:
    """Show what an agent did, and carry out the verdict of the user.

    Returns 0 if the agent finished and its changes are accepted, left for later as was asked, or none, else 1."""
    conversation, say = work.conversation, partial(console.print, markup=False, soft_wrap=True)
    if behind := Counter(work.source.left_out.values()):
        text = ", ".join(f"{count} {why}" for why, count in sorted(behind.items()))
        say(f"\nstayed behind: {text}", style="dim")
    counts = f"{len(conversation.turns)} calls, {conversation.seconds:.0f} s"
    say(f"\n{conversation.stop} after {counts} {visible(conversation.why)}".rstrip(), style="dim")
    for path in sorted(work.others):
        what = "a link, a device, or a protected name"
        say(f"not carried back, {what}: {visible(path)}", style="red")
    if work.lost:
        say(f"its files could not be carried out of the sandbox: {visible(work.lost)}", style="red")
    if not work.changes:
        say("it changed nothing")
        return 0 if conversation.stop == "finished" else 1
    excerpt, left = _beginning(visible_lines(work.diff))
    console.print(Syntax(excerpt, "diff", background_color="default", word_wrap=True))
    if left:
        say(f"… {left} more characters: all of it is in {work.path.resolve()}/changes.diff", style="red")
    undecided = verdict == "later"
    if verdict == "ask":
        keys = {b"y": "accept", b"n": "reject", b"\x04": "later", b"": "later"}
        verdict = _choice(console, "accept these changes? [y/n] ", keys) if sys.stdin.isatty() else "later"
    if verdict == "accept":
        work.accept()
        say(f"accepted: {len(work.changes)} files changed in {work.source.root}")
    elif verdict == "reject":
        work.reject()
        say("rejected: nothing was changed")
    else:
        say(f"undecided: nothing was changed; the diff is {work.path.resolve()}/changes.diff")
        root = str(work.source.root)
        option = "" if root == os.getcwd() else f" --repository {shlex.quote(root)}"
        say(f"decide with: composer-nb verdict {shlex.quote(str(work.path))} accept{option}, or reject")
    say(f"kept: {work.path}", style="dim")
    return 0 if (verdict == "accept" or undecided) and conversation.stop == "finished" else 1


def _beginning(text: str) -> tuple[str, int]:
    """Return whole lines of at most SHOWN_DIFF characters, and the number of characters after them."""
    if len(text) <= SHOWN_DIFF:
        return text, 0
    end = text.rfind("\n", 0, SHOWN_DIFF) + 1 or SHOWN_DIFF
    return text[:end], len(text) - end


def review(path: Path, console: Console, ask: bool) -> bool:
    """Show the plan in a file. If `ask`, let the user edit it until he starts the work (True) or stops. Raises ValueError for a
    plan that he emptied."""
    keys = {b"y": "start", b"e": "edit", b"n": "stop", b"\x04": "stop", b"": "stop"}
    while True:
        console.out(visible_lines(read_plan(path).text), highlight=False)
        if not ask:
            return True
        choice = _choice(console, "start with this plan? [y/n, e edits it] ", keys)
        if choice != "edit":
            return choice == "start"
        _edit(path, console)


def _edit(path: Path, console: Console) -> None:
    """Open a file in the user's editor. Ctrl-C is left to the editor, so that it does not die with what it has not saved."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = subprocess.run([*shlex.split(editor), os.fspath(path)]).returncode
        fault = f"ended with status {status}" if status else ""
    except (OSError, ValueError) as error:
        fault = str(error)
    finally:
        signal.signal(signal.SIGINT, before)
    if fault:
        console.print(f"editor {editor}: {fault}; VISUAL or EDITOR names another", style="red", markup=False)


def _choice(console: Console, question: str, keys: Mapping[bytes, str]) -> str:
    """Ask for one key, without Enter. Keys that were pressed before the question do not answer it."""
    console.print(question, end="", markup=False)
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)  # drops what was typed so far
        while (key := os.read(sys.stdin.fileno(), 1).lower()) not in keys:
            pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
    console.print(keys[key])
    return keys[key]


def bench_progress(total: int, console: Console) -> Callable[[str, Attempt], None]:
    """Return a function that prints one line for each rollout that ends."""
    ended: Counter[str] = Counter()
    solved: Counter[str] = Counter()

    def tell(arm: str, attempt: Attempt) -> None:
        ended[arm] += 1
        solved[arm] += attempt.grade.passed
        counts = f"{arm}: {solved[arm]} of {ended[arm]} solved, {total - ended[arm]} to go"
        console.print(f"{counts}: {visible(attempt.task.id)} {attempt.grade.status}", highlight=False, markup=False)

    return tell


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "pass@1": lambda row: f"{row['pass_at_1']:.3f}",
    "95 %": lambda row: "{:.3f}–{:.3f}".format(*row["ci95"]),
    "best of k": lambda row: f"{row['best_of_k']:.3f} (k={row['k']})",
    "pass^k": lambda row: f"{row['all_of_k']:.3f}",
    "tasks": lambda row: str(row["n_tasks"]),
    "tokens": lambda row: f"{row['tokens_per_task']:.0f}",
    "calls": lambda row: f"{row['tool_calls_per_task']:.1f}",
    "invalid": lambda row: "–" if row["invalid_call_rate"] is None else f"{row['invalid_call_rate']:.1%}",
    "s p50": lambda row: f"{row['seconds_p50']:.1f}",
    "s p95": lambda row: f"{row['seconds_p95']:.1f}",
    "flagged": lambda row: f"{row['flagged']:.1%}" + (f", {n} out" if (n := row["disqualified_attempts"]) else ""),
    "$": lambda row: "–" if row["dollars_per_task"] is None else f"{row['dollars_per_task']:.4f}",
    "timeouts": lambda row: str(row["timeouts"]),
    "lost": lambda row: str(row["infra_errors"]),
    "gain": lambda row: "{:+.3f} ({:+.3f} to {:+.3f})".format(*row["gain"]) if "gain" in row else "",
}


def bench_table(report: Mapping[str, Any]) -> Table:
    """Return a table with a row for each arm."""
    title = escape(f"{report['policy']}, {report['samples']} rollouts a task")
    table = Table("tools", title=title, title_justify="left", box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for arm, row in report["arms"].items():
        if row["n_tasks"]:
            table.add_row(arm, *(column(row) for column in COLUMNS.values()))
        else:
            why = escape(visible(row["lost_to"])[:200]) or "see composer-nb doctor"
            table.add_row(arm, f"no grade: {row['infra_errors']} lost, {why}")
    failed = [f"{arm}: {errors_line(row['errors'])}" for arm, row in report["arms"].items() if row.get("errors")]
    table.caption, table.caption_justify = escape("errors of tools – " + " – ".join(failed)), "left"
    return table
