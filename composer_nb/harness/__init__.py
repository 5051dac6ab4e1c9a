"""The harness: tasks, sandboxes, tools, the agent loop, grading and rewards. It needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_nb.harness.attempt import Agent
    from composer_nb.harness.bench import run_eval
    from composer_nb.harness.grading.front import grade
    from composer_nb.harness.rewards import reward
    from composer_nb.harness.sandbox.contract import Sandbox
    from composer_nb.harness.sandbox.reap import reap
    from composer_nb.harness.tasks.task import Task

__all__ = ["Agent", "Sandbox", "Task", "grade", "reap", "reward", "run_eval"]
_HOMES = {
    **{"Agent": "attempt", "Sandbox": "sandbox.contract", "Task": "tasks.task", "grade": "grading.front"},
    **{"reap": "sandbox.reap", "reward": "rewards", "run_eval": "bench"},
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use, since most programs need one part of the harness."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
