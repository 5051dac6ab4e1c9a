"""The terminal: commands in bash, one after the other, that find folder and exported variables as the last one left them."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from composer_nb.harness.sandbox.contract import ExecResult
from composer_nb.harness.tools.arguments import RunTerminalCmd
from composer_nb.harness.tools.session import FOLDER, Session, clean
from composer_nb.harness.tools.tool_call import ToolError

TIMEOUT_S = 120.0
OUTPUT_BYTES = 2 << 20
"""Kept of what a command writes: its head and its tail."""
STATE_BYTES = 64 << 10
"""Of the environment; of a larger one nothing is taken over."""
QUIET = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "true",
    "EDITOR": "true",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Nobody is there to page, to edit or to answer."""
SHELLS_OWN = {"PWD", "OLDPWD", "SHLVL", "_"}
FOREGROUND = """\
exec 3>&2 2>&1
trap '{ printf "%s\\0" "$PWD"; env -0; } >&3' EXIT
cd -- "$1" || exit 1
eval "$2" 3>&-
"""
"""Both streams of a command are one, as in a terminal; where it ended goes to the other."""
BACKGROUND = """\
trap 'echo "[exit code $?]"' EXIT
cd -- "$1" || exit 1
eval "$2"
"""


def run_terminal_cmd(session: Session, arguments: RunTerminalCmd) -> str:
    folder = session.cwd
    if arguments.working_directory is not None:
        path = session.place(arguments.working_directory)
        folder = posixpath.normpath(posixpath.join(session.root, path))
    environment = {**QUIET, **session.environment}
    session.restless = True
    if arguments.is_background:
        session.background = True
        log = f"{FOLDER}/terminals/{next(session.numbers)}.txt"
        session.keep(log, "")
        command = ["bash", "-c", BACKGROUND, "bash", folder, arguments.command]
        pid = session.sandbox.exec_background(command, log=log, env=environment)
        return f"runs as process {pid}; what it writes is in {log}"
    timeout_s = TIMEOUT_S if arguments.timeout_ms is None else arguments.timeout_ms / 1000
    command = ["bash", "-c", FOREGROUND, "bash", folder, arguments.command]
    done = session.run(command, timeout_s=timeout_s, output_bytes=OUTPUT_BYTES, env=environment)
    output = session.fit(clean(done.stdout), "run_terminal_cmd")
    if done.timed_out:
        raise ToolError("Timeout", f"ended after {timeout_s:g} s, with all that it had started\n{output}".rstrip())
    state = _state(done)
    if state is not None:
        session.cwd, session.environment = state
    notes = f"exit code {done.exit_code}"
    notes += ", killed for memory" * done.oom
    if session.cwd != session.root:
        notes += f", in {session.cwd.removeprefix(session.root + '/')}"
    return f"{notes}\n{output}".rstrip()


def _state(done: ExecResult) -> tuple[str, Mapping[str, str]] | None:
    """The folder and the exported variables that a command left; None where it did not tell: it replaced the shell, say."""
    if len(done.stderr) > STATE_BYTES:
        return None
    folder, *pairs = done.stderr.decode("utf-8", "surrogateescape").removesuffix("\0").split("\0")
    variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if not folder.startswith("/") or "PATH" not in variables:
        return None
    return folder, {name: value for name, value in variables.items() if name not in SHELLS_OWN}
