"""The terminal: commands in bash, one after another; each starts in the folder and with the variables that the last one left."""

import posixpath
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from composer_nb.harness.sandbox.contract import ExecResult
from composer_nb.harness.tools.arguments import Path, Text, tool
from composer_nb.harness.tools.session import FOLDER, Session, clean, summary_counts
from composer_nb.harness.tools.tool_call import ToolError

TIMEOUT_S = 120.0
# Bytes kept of a command's output, half of them from its head and half from its tail.
OUTPUT_BYTES = 2 << 20
# Maximum size of an environment that is carried over to the next command.
STATE_BYTES = 64 << 10
# Nobody is there to page, to edit or to answer.
QUIET = dict.fromkeys(("PAGER", "GIT_PAGER", "MANPAGER"), "cat") | dict.fromkeys(("EDITOR", "GIT_EDITOR"), "true")
QUIET |= dict.fromkeys(("NO_COLOR", "PIP_NO_INPUT", "PYTHONUNBUFFERED"), "1")
QUIET |= {"GIT_TERMINAL_PROMPT": "0", "TERM": "dumb", "DEBIAN_FRONTEND": "noninteractive"}
SHELLS_OWN = {"PWD", "OLDPWD", "SHLVL", "_"}
# Merges both streams of a command, as in a terminal, and reports its final folder and environment on the other stream.
FOREGROUND = """\
exec 3>&2 2>&1
trap '{ printf "%s\\0" "$PWD"; env -0; } >&3' EXIT
cd -- "$1" || exit 1
eval "$2" 3>&-
"""
BACKGROUND = """\
trap 'echo "[exit code $?]"' EXIT
cd -- "$1" || exit 1
eval "$2"
"""


@tool(mutates=True, needs="bash")
def run_terminal_cmd(
    session: Session,
    command: Annotated[Text, Field(min_length=1, max_length=30_000)],
    is_background: bool,
    explanation: Text | None = None,
    timeout_ms: Annotated[int | None, Field(ge=1, le=600_000)] = None,
    working_directory: Path | None = None,
) -> str:
    """Run a command in bash. The working directory and exported variables carry over to the next command. It gets no input
    and is stopped at its timeout; run long commands in the background.

    command: Command for bash; it gets no input.
    is_background: Return at once while it runs, for example for servers.
    explanation: One sentence: why you make this call.
    timeout_ms: Timeout in milliseconds (default 120000).
    working_directory: Folder to run it in (default: where the last command ended).
    """
    folder = session.cwd
    if working_directory is not None:
        folder = posixpath.normpath(posixpath.join(session.root, session.place(working_directory)))
    environment = {**QUIET, **session.environment}
    session.restless = True
    if is_background:
        session.background = True
        log = f"{FOLDER}/terminals/{next(session.numbers)}.txt"
        session.keep(log, "")
        words = ["bash", "-c", BACKGROUND, "bash", folder, command]
        pid = session.sandbox.exec_background(words, log=log, env=environment)
        return f"runs as process {pid}; what it writes is in {log}"
    timeout_s = TIMEOUT_S if timeout_ms is None else timeout_ms / 1000
    words = ["bash", "-c", FOREGROUND, "bash", folder, command]
    result = session.run(words, timeout_s=timeout_s, output_bytes=OUTPUT_BYTES, env=environment)
    output = session.fit(clean(result.stdout), "run_terminal_cmd")
    if result.timed_out:
        raise ToolError("Timeout", f"ended after {timeout_s:g} s, with all that it had started\n{output}".rstrip())
    if state := _state(result):
        session.cwd, session.environment = state
    notes = f"exit code {result.exit_code}"
    notes += ", killed for memory" * result.oom
    if session.cwd != session.root:
        notes += f", in {session.cwd.removeprefix(session.root + '/')}"
    return f"{notes}\n{output}".rstrip()


def tested(output: str) -> dict[str, int]:
    """Return how many tests passed and ran, if the last line of an output is pytest's summary of them."""
    counts = summary_counts(output.rstrip().rpartition("\n")[2].strip("= "))
    run = sum(counts.get(outcome, 0) for outcome in ("passed", "failed", "error"))
    return {"tests_passed": counts.get("passed", 0), "tests_run": run} if run else {}


def _state(result: ExecResult) -> tuple[str, Mapping[str, str]] | None:
    """Return the folder and the exported variables that a command left; None if it did not report them."""
    if len(result.stderr) > STATE_BYTES:
        return None
    folder, *pairs = result.stderr.decode("utf-8", "surrogateescape").removesuffix("\0").split("\0")
    variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if not folder.startswith("/") or "PATH" not in variables:
        return None
    return folder, {name: value for name, value in variables.items() if name not in SHELLS_OWN}
