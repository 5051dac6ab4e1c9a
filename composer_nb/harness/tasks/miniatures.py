"""Miniature repositories: a few modules of small functions with a bug in one of them, and tests of each.

What to change stands in no instruction: a failed test names the function, a search finds its module, and the answer is found by
trying. Most tasks say only that tests fail; some also say what the function should do. Bugs are of the kinds that an agent can
enumerate (`ENUMERABLE`), so that a task is solvable by looking, trying and testing alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random

from composer_nb.harness.sandbox.calls import CallOutcome, Executor
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.programs import Program, draw_program
from composer_nb.harness.tasks.repairs import Candidate, distinct, draw_candidate, evaluate
from composer_nb.harness.tasks.task import Task

ENUMERABLE = frozenset({"compare", "operator", "augmented"})
VISIBLE, HIDDEN, OTHERS = 12, 10, 2
"""Tests of the function with the bug that the agent sees, those that grade, and those of each other function on either side."""
MOST = 3
"""Modules of a repository."""
MODULES = ("core", "util", "stats", "tools", "data", "calc")
NAMES = (
    *("total", "count", "pick", "scan", "join", "find", "rank", "part", "step", "mark", "load", "pack", "sort", "move"),
    *("peek", "read", "near", "last", "item", "rows", "name", "kind", "line", "text", "size", "time", "path", "call"),
)


def make_miniatures(
    seed: str,
    count: int,
    *,
    heldout: bool,
    executor: Executor,
    told: float = 0.25,
    families: frozenset[str] = frozenset(),
) -> Iterator[Task]:
    """Return `count` distinct tasks whose bug is in one of the held-out structures, or of the others, the same for one seed.

    `told`: share of tasks whose instruction says what the function should do. `families`: only these, if any is given. Raises
    ValueError, while they are taken, if a thousand draws hold nothing new."""
    rng = Random(f"miniatures {seed} {heldout}")

    def draw() -> Candidate | None:
        return draw_candidate(rng, heldout, VISIBLE + HIDDEN, ENUMERABLE, families)

    def make(candidate: Candidate, outcomes: tuple[CallOutcome, ...]) -> Task | None:
        return _task(candidate, outcomes, rng, rng.random() < told)

    return (task for task, _, _ in distinct(count, draw, make, executor))


def _task(candidate: Candidate, outcomes: tuple[CallOutcome, ...], rng: Random, told: bool) -> Task | None:
    """Return the task of a candidate whose bug gave `outcomes`; None if the bug shows on fewer than three inputs."""
    bug = [outcome != right for outcome, right in zip(outcomes, candidate.right, strict=True)]
    failing = [i for i, failed in enumerate(bug) if failed]
    if len(failing) < 3:
        return None
    first, *rest = failing
    order = [first, *(i for i in range(len(bug)) if i not in (first, rest[-1])), rest[-1]]
    visible, hidden = order[:VISIBLE], order[VISIBLE:]
    program, cases = candidate.program, list(zip(candidate.inputs, candidate.wanted, strict=True))
    name, *names = rng.sample(NAMES, 2 * MOST)
    modules = rng.sample(MODULES, rng.randint(1, MOST))
    home = rng.randrange(len(modules))
    texts: dict[str, list[str]] = {module: [] for module in modules}
    tests: dict[str, str] = {}
    hidden_tests: dict[str, str] = {}
    for place, module in enumerate(modules):
        if place != home or rng.random() < 0.3:
            other, inputs, wanted = _sibling(rng, program.heldout)
            called = names.pop()
            texts[module].append(_named(other.source, called))
            given = list(zip(inputs, wanted, strict=True))
            tests[f"test_{called}.py"] = render_tests(module, called, given[:OTHERS])
            hidden_tests[f"test_hidden_{called}.py"] = render_tests(module, called, given[OTHERS:])
        if place == home:
            texts[module].append(_named(candidate.buggy, name))
            tests[f"test_{name}.py"] = render_tests(module, name, [cases[i] for i in visible])
            hidden_tests[f"test_hidden_{name}.py"] = render_tests(module, name, [cases[i] for i in hidden])
    path = f"{modules[home]}.py"
    held = {f"{module}.py": "\n\n".join(parts) + "\n" for module, parts in texts.items()}
    right = held[path].replace(_named(candidate.buggy, name), _named(program.source, name))
    digest = hashlib.sha256(repr((held, candidate.inputs)).encode()).hexdigest()[:12]
    return Task(
        id=f"{program.family}-{digest}",
        instruction=f"fix {name}: {program.spec}" if told else "fix the tests",
        files=held | tests,
        tests=hidden_tests,
        solution={path: right},
        source_scope=tuple(held),
        metadata={"family": program.family, "bug": candidate.kind, "structure": program.structure, "function": name},
    )


def _named(source: str, name: str) -> str:
    return source.replace("def f(", f"def {name}(", 1)


def _sibling(rng: Random, heldout: bool) -> tuple[Program, list[tuple[object, ...]], list[object]]:
    """Return a correct program on the same side of the split, with inputs and results."""
    program = draw_program(rng)
    while program.heldout != heldout:
        program = draw_program(rng)
    inputs, wanted = evaluate(program, 2 * OTHERS, rng)
    return program, list(inputs), list(wanted)
