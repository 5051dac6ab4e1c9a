"""The default environment: generated tasks, the tools of tiny models, and an expert that demonstrates how to solve tasks.

It enters a run through the door of custom environments (`harness/environment.py`), which the trainer alone knows.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from composer_nb.harness.agent import scripts
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.attempt import Agent
from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.tour import expert as experts
from composer_nb.tour.miniatures import make_miniatures
from composer_nb.tour.repairs import buggy, buggy_prints, fingerprints, make_tasks


class Tour:
    """The environment of `env.tasks=generated`."""

    tools = ToolSet.tiny()

    def tasks(self) -> Iterator[Task]:
        with Sandboxes() as sandboxes:
            yield from self.generate("tour", 64, heldout=False, executor=sandboxes.functions)

    def generate(
        self, seed: str, count: int, *, heldout: bool, executor: Executor, level: str = "repositories", **options: Any
    ) -> Iterator[Task]:
        """Return `count` distinct tasks, the same for the same seed: of one function each, or repositories with the `options` of
        `make_miniatures`."""
        if level == "functions":
            return make_tasks(seed, count, heldout=heldout, executor=executor)
        return make_miniatures(seed, count, heldout=heldout, executor=executor, **options)

    def prints(self, tasks: Sequence[Task]) -> set[str]:
        """Return the digests of tasks that are trained on."""
        return fingerprints(tasks) | buggy_prints(tasks)

    def leaks(self, task: Task, prints: set[str], *, structure: bool) -> bool:
        """Return whether training with these `prints` shows a held-out task or, with `structure`, its program's structure."""
        return bool((fingerprints if structure else buggy_prints)([task]) & prints)

    def key(self, task: Task) -> tuple[str, str]:
        """Return what no two tasks of a run share."""
        return task.instruction, buggy(task)

    def shows(self, task: Task, tools: ToolSet) -> bool:
        """Return whether the expert can demonstrate a task with these tools."""
        return tools.needs_sandbox or "function" in task.metadata or experts.changes_lines(task)

    def demonstrations(
        self, tasks: Sequence[Task], agent: Agent, sandboxes: Executor, seed: int, mistake_rate: float
    ) -> Iterator[Attempt]:
        """Return attempts of the scripted expert at `tasks` in the real harness, in the order in which they end.

        The expert searches for the bug of a generated repository; with the product's tools, only if the request does not specify
        the function; and what a request paraphrases. At other tasks it makes mistakes at `mistake_rate`, or none with the
        product's tools."""

        def script(position: int) -> experts.Script:
            task, tiny = tasks[position], "finish" in agent.tools.tools
            if task.metadata.get("kind") == "paraphrase":
                return experts.seeker(task, agent.tools.tools)
            rng, verbs = Random(f"expert {seed} {task.id}"), experts.searches(agent.tools.tools)
            hidden = ":" not in task.instruction and "kind" not in task.metadata  # a bug that no request describes
            if "function" in task.metadata and verbs and (tiny or hidden):
                return experts.searcher(task, rng, verbs)
            return experts.expert(task, rng, mistake_rate) if tiny else experts.step_by_step(scripts.expert(task))

        capacity = 256 if agent.backend is None else 16  # sandboxes take memory
        policy = experts.ScriptedPolicy(agent.renderer, script, capacity, chained=agent.summary.trigger > 0)
        jobs = (agent.attempt(task, position) for position, task in enumerate(tasks))
        return (attempt for _, attempt in drive(jobs, policy, sandboxes))
