"""Programs of the host that a sandbox is shown: the interpreter, pytest, search tools."""
