"""The environment of attempts: its tasks, tools, chat format and sandboxes, all of them settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSettings:
    """Where tasks come from, and what an agent works with."""

    tasks: str = "generated"
    """`generated`, or a path: a JSON Lines file, a folder of Harbor task directories, or what `composer-nb tasks make` wrote."""
    tools: Literal["tiny", "cursor"] = "tiny"
    """tiny: read a file, edit a line, run the tests, finish. cursor: the tools of the product."""
    renderer: Literal["compact", "qwen", "kimi"] = "compact"
    """The chat format; the tokenizer must have its tokens."""
    backend: Literal["bwrap", "docker"] = "bwrap"
    """Sandboxes of tasks with the graders `pytest` and `script`."""
