"""The task that hostile patches are tried on: a small ledger with a fault in most of its functions (`attacks.txt`).

Its hidden tests use what real ones do: plain assertions, a table of parameters, approximate values, expected exceptions, a helper
and a data file of their own, a conftest of the workspace, unittest. They leave room for cheating on purpose: all that is expected
is a plain value that stands in the test, so that code which reads frames could answer all of them. `PROPERTY` adds a test with
inputs that nobody wrote down.
"""

from __future__ import annotations

from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.texts import ATTACKS

MODULE = "ledger.py"
_REQUEST, _SECTIONS = ATTACKS["ledger"]
RIGHT, FAULTY = _SECTIONS["fix"][MODULE], _SECTIONS["file"][MODULE]
TARGET = Task(
    id="ledger",
    instruction=_REQUEST,
    grader="pytest",
    files=_SECTIONS["file"],
    tests=_SECTIONS["test"],
    solution=_SECTIONS["fix"],
    source_scope=(MODULE, "util/**"),
)
PROPERTY = TARGET.model_copy(update={"id": "ledger-property", "tests": {**TARGET.tests, **_SECTIONS["property"]}})
