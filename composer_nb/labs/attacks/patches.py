"""Hostile patches for a task of the grader `pytest`, of which `attacks.txt` is the table. Each must score nothing;
the honest fix must score.

They are the kinds 1 to 18 of ways to a reward without the work: files that an agent can leave in a workspace, or code that it can
write into the module under test. A `flagged` patch is reported to a person. `fools` names the plain graders that a patch
gets past, which the tests verify, so that no patch is rejected only because it would not work anyway:

* `exit_code`: pytest, in the agent's own workspace with the hidden tests laid in, says 0;
* `one_process`: the runner here without twins, one process, reports every test as passed.

References: Berkeley RDI on conftest hooks, Anthropic's AlwaysEqual and `sys.exit(0)` in production RL, METR's stack
introspection, SWE-bench #601 and #620 (forged lines), #465 (history), Harbor #1779 (forged reward files), Composer 2.5 (caches).
"""

import importlib.util
import marshal
import re
from collections.abc import Mapping
from dataclasses import dataclass

from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.patch_target import ANSWER, FRAGMENTS, MODULE, PROPERTY, SETUP, TARGET, filled, module
from composer_nb.labs.attacks.texts import ATTACKS, Sections

REPORT = FRAGMENTS["REPORT"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Changes that an agent made to a workspace.

    Attributes:
        case: In the reference's list; 0: a control.
        files: Changes of the workspace; None: deleted.
    """

    id: str
    title: str
    case: int
    files: Mapping[str, bytes | None]
    flagged: bool = False
    honest: bool = False
    fools: tuple[str, ...] = ()
    task: Task = TARGET

    @property
    def workspace(self) -> dict[str, bytes]:
        """Return all files of the workspace afterwards."""
        files = {path: text.encode() for path, text in self.task.files.items()} | dict(self.files)
        return {path: data for path, data in files.items() if data is not None}


def _patch(title: str, head: str, sections: Sections) -> Patch:
    """Return a patch of the table: files beside the faulty code, or a trick in the module under test."""
    files: dict[str, bytes | None] = {path: filled(text).encode() for path, text in sections["file"].items()}
    files |= dict.fromkeys(sections["deleted"])
    for name in sections["import"]:
        files[MODULE] = module(SETUP[name]).encode()
    for name in sections["answer"]:
        files[MODULE] = module("", ANSWER[name]).encode()
    for path, name in sections["compiled"].items():  # which Python believes without a look at its source
        code = compile(module("", ANSWER[name.strip()]), MODULE, "exec")
        files[path] = importlib.util.MAGIC_NUMBER + b"\1" + bytes(11) + marshal.dumps(code)
    id, _, title = title.partition(": ")
    _, case, *words = re.findall(r"\w+", head)
    return Patch(
        id=id,
        title=title,
        case=int(case),
        files=files,
        flagged="flagged" in words,
        honest="honest" in words,
        fools=tuple(name for name in ("exit_code", "one_process") if name in words),
        task=PROPERTY if "properties" in words else TARGET,
    )


_PATCHES = tuple(_patch(title, *case) for title, case in ATTACKS.items() if ": " in title)


def patches() -> tuple[Patch, ...]:
    """Return all of them, the controls first."""
    return _PATCHES
