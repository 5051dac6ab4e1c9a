"""Failures of sandboxes.

The failures of a command (its exit code, a timeout, exhausted memory) are results. SandboxDied means that the code inside ended
the sandbox; SandboxFailure means that the machinery failed, so that nothing is known about the code.
"""


class SandboxUnavailable(RuntimeError):
    """A backend is missing or cannot start here. The message says what to install or change."""


class SandboxFailure(RuntimeError):
    """The machinery failed: nothing is known about the code that was to run."""


class SandboxSlow(SandboxFailure):
    """A sandbox was not ready in time on a busy machine; a retry may help."""


class SandboxDied(RuntimeError):
    """The code inside ended the sandbox, for instance by exhausting the memory: this is the agent's fault."""
