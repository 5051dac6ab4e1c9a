"""Programs for the inside of a sandbox, as one text that a bare interpreter runs.

Modules of ours that use the standard library alone go in under their own names, so that the same files are imported by the
tests and type-checked. No file has to be written into the sandbox.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from composer_nb.harness import linux

_START = """\
import sys, types
sys.path[:] = [entry for entry in sys.path if entry]  # `-c` puts the current directory first
for name, text in {sources!r}:
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main(*{arguments!r})
"""

BOOT = """\
import os
b = bytes()
while len(b) < 4 or len(b) < 4 + int.from_bytes(b[:4], "big"):
    c = os.read(0, 1 << 20)
    if not c:
        raise SystemExit
    b += c
exec(b[4:].decode())
"""
"""A program that reads another one from its input: what runs then does not stand in the list of processes."""


def bundle(*modules: ModuleType, arguments: tuple[str, ...] = ()) -> str:
    """A program that ends in `main(*arguments)` of the last module. They may import those before them, `linux`, and the
    standard library."""
    files = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in (linux, *modules)]
    return _START.format(sources=files, arguments=arguments)


def packet(program: str) -> bytes:
    """What BOOT reads, as one packet. Nothing may follow before the program has answered."""
    data = program.encode()
    return len(data).to_bytes(4, "big") + data
