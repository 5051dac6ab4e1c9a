"""What the linter finds, held against ruff."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig

import pytest

from composer_nb.harness.syntax import lints

RUFF = shutil.which("ruff", path=sysconfig.get_path("scripts"))
SOURCES = {
    "import os\n": ["unused os"],
    "import os\n\n\ndef f(x):\n    import re\n    t = 0\n    return y + os.x\n": [
        "no name y in f", "unused re in f", "unused t in f",
    ],
    "def f(a):\n    out = [x * 2 for x in a if x > k]\n    return sum(out)\n": ["no name k in f"],
    "def f(n):\n    t = 0\n    while n:\n        t += 1\n        n //= 10\n    return t\n": [],
    "class A:\n    x = 1\n\n    def g(self):\n        return __class__\n": [],
    "def f():\n    x = 1\n\n    def g():\n        return x\n\n    return g\n": [],
    "def f():\n    global q\n    q = 1\n\n\ndef g():\n    return q\n": [],
    "def f():\n    return g()\n\n\ndef g():\n    return f\n": [],
    "def f():\n    return here\n": ["no name here in f"],
    "from os import path as p\n\nprint(__name__, p)\n": [],
}  # fmt: skip


@pytest.mark.parametrize("text", SOURCES)
def test_findings(text: str) -> None:
    assert sorted(lints(text)) == SOURCES[text]


@pytest.mark.skipif(RUFF is None, reason="no ruff here")
def test_ruff_finds_the_same() -> None:
    for text, found in SOURCES.items():
        command = [str(RUFF), "check", "--isolated", "--select", "F401,F841,F821", "--output-format", "json", "-"]
        said = json.loads(subprocess.run(command, input=text, capture_output=True, text=True).stdout)
        assert len(said) == len(found), (text, said)
