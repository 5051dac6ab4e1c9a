"""The tour's environment, but the tests of an edit say nothing: a control that shows whether RL uses what they say.

    env.tasks=scripts.masked:Masked

Before the first edit, and after `undo`, tests answer as always: what fails is all that most requests tell of the task.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.arguments import tool
from composer_nb.harness.tools.tiny import Observation, Place
from composer_nb.harness.tools.toolset import ToolSet


@tool()
def run_tests(place: Place) -> Observation:
    """Run the visible tests."""
    seen = place.run_visible_tests()
    return replace(seen, text="ran") if place.edits.now else seen  # what they refuse is not kept: `tried` would tell


class Masked:
    """An environment (`Own`) for forks, which have their tasks already."""

    tools = replace(ToolSet.tiny(), tools={**ToolSet.tiny().tools, "run_tests": run_tests})

    def tasks(self) -> Iterable[Task]:
        raise ValueError("env.tasks=scripts.masked:Masked: only a fork of a run can have it, with that run's tasks")
