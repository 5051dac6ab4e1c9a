"""Repair tasks: a small correct program, one planted bug, and tests that distinguish the two.

A bug is one change of the syntax tree that changes exactly one line. A task is kept only if the program has at least three
distinct results on twelve inputs, and the bug shows on at least two of them. Bugs are executed only in a sandbox, where an
endless loop can be killed; a bug that never returns is not kept.
"""

import ast
import builtins
import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from composer_nb.harness import syntax
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest, Executor
from composer_nb.harness.tasks.functions import is_test, render_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.tour.programs import Program, draw_arguments, draw_program

VISIBLE, HIDDEN = 4, 8

_BINARY = [ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod]
# Operators of each kind of place. Of an augmented assignment, a bug is one of the first three.
_CHOICES: dict[str, list[Any]] = {
    "compare": [ast.Gt, ast.Lt, ast.GtE, ast.LtE, ast.Eq, ast.NotEq],
    "operator": _BINARY,
    "augmented": _BINARY[:4],
}
_AGGREGATES = ["sum", "max", "min", "len", "sorted"]


def bugs(source: str, rng: Random, kinds: Collection[str] = ()) -> tuple[str, str] | None:
    """Plant one bug, of one of `kinds` if any are given. Return (kind, changed source), or None if the drawn change does not
    change exactly one line."""
    tree = syntax.parse(source)
    sites = [site for site in _sites(tree) if not kinds or site[0] in kinds]
    if not sites:
        return None
    kind, index = rng.choice(sites)
    text = _changed(source, index, lambda node: _plant(kind, node, rng, _locals(tree)))
    return (kind, text) if text else None


def neighbours(source: str, kinds: Collection[str]) -> list[tuple[str, str]]:
    """Return (kind, changed source) of every change of these kinds that changes exactly one line, without repeats."""
    kind_of: dict[str, str] = {}
    for kind, index in dict.fromkeys(_sites(syntax.parse(source))):
        for operator in _CHOICES[kind] if kind in kinds else ():
            if text := _changed(source, index, partial(_operate, operator=operator)):
                kind_of.setdefault(text, kind)
    return [(kind, text) for text, kind in kind_of.items()]


def _changed(source: str, index: int, change: Callable[[Any], None]) -> str:
    """Return `source` with its node of this number changed; empty unless exactly one line differs."""
    tree = syntax.parse(source)
    change(list(ast.walk(tree))[index])
    text = ast.unparse(tree)
    before, after = source.split("\n"), text.split("\n")
    one_line = len(before) == len(after) and sum(a != b for a, b in zip(before, after, strict=True)) == 1
    return text if one_line else ""


def _locals(tree: ast.AST) -> list[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return sorted(name for name in names if not hasattr(builtins, name))


def _sites(tree: ast.AST) -> list[tuple[str, int]]:
    sites: list[tuple[str, int]] = []
    for index, node in enumerate(ast.walk(tree)):
        match node:
            case ast.Compare():
                sites += [("compare", index)] * 3
            case ast.BinOp():
                sites += [("operator", index), ("swap", index)]
            case ast.AugAssign():
                sites.append(("augmented", index))
            case ast.Constant(value=int()):
                sites.append(("constant", index))
            case ast.Name(id=name, ctx=ast.Load()) if name in _AGGREGATES:
                sites.append(("aggregate", index))
            case ast.Name(id=name, ctx=ast.Load()) if not hasattr(builtins, name):
                sites.append(("name", index))
    return sites


def _operate(node: Any, operator: Any) -> None:
    if isinstance(node, ast.Compare):
        node.ops = [operator()]
    else:
        node.op = operator()


def _plant(kind: str, node: Any, rng: Random, names: Sequence[str]) -> None:
    """Change a node in place by a bug of this kind; `names`: variables that may replace one."""

    def other(choices: Sequence[Any], now: object) -> Any:
        return rng.choice([choice for choice in choices if choice != now])

    match kind:
        case "compare":
            _operate(node, other(_CHOICES[kind], type(node.ops[0])))
        case "operator" | "augmented":
            _operate(node, other(_BINARY if kind == "operator" else _BINARY[:3], type(node.op)))
        case "swap":
            node.left, node.right = node.right, node.left
        case "constant":
            node.value = max(0, node.value + rng.choice([-1, 1]))
        case "aggregate":
            node.id = other(_AGGREGATES, node.id)
        case "name":
            if len(names) > 1:
                node.id = other(names, node.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuggyProgram:
    """A program with a bug and the inputs on which both are tried."""

    program: Program
    kind: str
    buggy: str
    inputs: tuple[tuple[object, ...], ...]
    expected: tuple[object, ...]

    @property
    def right(self) -> tuple[CallOutcome, ...]:
        """Outcomes of the correct program."""
        return tuple(CallOutcome(status="returned", text=repr(value)) for value in self.expected)


def draw_candidate(
    rng: Random,
    heldout: bool,
    count: int = VISIBLE + HIDDEN,
    plant: Callable[[str, Random], tuple[str, str] | None] = bugs,
    families: Collection[str] = (),
) -> BuggyProgram | None:
    """Draw one candidate with `count` inputs; None if the draw is unfit. `plant` changes the program and names the change.
    `families`: only these, if any are given. The reference program is trusted, so it runs in this process."""
    program = draw_program(rng)
    if program.heldout != heldout or (families and program.family not in families):
        return None
    planted = plant(program.source, rng)
    if planted is None:
        return None
    inputs, results = evaluate(program, count, rng)
    if len({repr(value) for value in results}) < 3 or len({repr(arguments) for arguments in inputs}) < len(inputs):
        return None
    return BuggyProgram(program=program, kind=planted[0], buggy=planted[1], inputs=inputs, expected=results)


def evaluate(program: Program, count: int, rng: Random) -> tuple[tuple[tuple[object, ...], ...], tuple[object, ...]]:
    """Return inputs and results of a trusted program."""
    inputs = tuple(draw_arguments(rng, program) for _ in range(count))
    scope: dict[str, Any] = {}
    exec(compile(program.source, "f.py", "exec"), scope)
    return inputs, tuple(scope["f"](*copy.deepcopy(arguments)) for arguments in inputs)


def run_programs(
    sources: Sequence[str], inputs: Sequence[tuple[tuple[object, ...], ...]], sandboxes: Executor
) -> list[tuple[CallOutcome, ...] | None]:
    """Return the outcomes of each program on its inputs, or None if it does not end."""
    requests = [
        CallRequest(files={"f.py": source}, module="f", function="f", arguments=tuple(map(repr, program_inputs)))
        for source, program_inputs in zip(sources, inputs, strict=True)
    ]
    runs = sandboxes.run(requests)
    unended = {"timeout", "died", "not_run"}
    return [None if unended & {call.status for call in outcomes} else outcomes for outcomes in runs]


def make_task(candidate: BuggyProgram, outcomes: tuple[CallOutcome, ...]) -> Task | None:
    """Return the task of a candidate whose bug has these `outcomes`; None if the bug shows on fewer than two inputs, or all
    hidden tests expect the same.

    The first visible test fails at the start; the others are drawn in order, so that hidden tests fail as well.
    """
    fails = [outcome != right for outcome, right in zip(outcomes, candidate.right, strict=True)]
    if sum(fails) < 2:
        return None
    failing = [index for index, failed in enumerate(fails) if failed]
    passing = [index for index, failed in enumerate(fails) if not failed][: VISIBLE - 1]
    visible = [failing[0], *passing, *failing[2:]][:VISIBLE]
    cases = list(zip(candidate.inputs, candidate.expected, strict=True))
    hidden = [cases[index] for index in range(len(cases)) if index not in visible]
    if len({repr(value) for _, value in hidden}) < 2:  # else a constant would pass
        return None
    program = candidate.program
    digest = hashlib.sha256((candidate.buggy + repr(candidate.inputs)).encode()).hexdigest()[:12]
    return Task(
        id=f"{program.family}-{digest}",
        instruction=f"fix f.py: {program.spec}",
        files={"f.py": candidate.buggy + "\n", "test_f.py": render_tests("f", "f", [cases[i] for i in visible])},
        tests={"test_hidden.py": render_tests("f", "f", hidden)},
        solution={"f.py": program.source + "\n"},
        source_scope=("f.py",),
        metadata={"family": program.family, "bug": candidate.kind, "structure": program.structure},
    )


def make_tasks(seed: str, count: int, *, heldout: bool, executor: Executor) -> Iterator[Task]:
    """Return `count` distinct tasks of the held-out structures, or of the others. The same seed gives the same tasks. Iteration
    raises ValueError if a thousand draws yield no new task."""
    rng = Random(f"repairs {seed} {heldout}")
    return distinct(count, lambda: draw_candidate(rng, heldout), make_task, executor)


def distinct(
    count: int,
    draw: Callable[[], BuggyProgram | None],
    make: Callable[[BuggyProgram, tuple[CallOutcome, ...]], Task | None],
    executor: Executor,
    ahead: bool = False,
) -> Iterator[Task]:
    """Yield `count` tasks with different bugs or instructions. Only as many candidates run as are likely to be needed. `ahead`:
    draw a thousand before the first task is made, so that `draw` and `make` can share a random number generator.

    Raises ValueError if a thousand draws yield no new task."""
    keys: set[tuple[str, str]] = set()
    while len(keys) < count:
        before = len(keys)
        draws = (draw() for _ in range(1024))
        fit = filter(None, list(draws) if ahead else draws)
        while candidates := list(islice(fit, max(16, 2 * (count - len(keys))))):
            programs, inputs = [pair.buggy for pair in candidates], [pair.inputs for pair in candidates]
            runs = run_programs(programs, inputs, executor)
            for candidate, outcomes in zip(candidates, runs, strict=True):
                task = make(candidate, outcomes) if outcomes is not None else None
                if task is None or (key := (task.instruction, candidate.buggy)) in keys:
                    continue
                keys.add(key)
                yield task
                if len(keys) == count:
                    return
        if len(keys) == before:
            raise ValueError(f"only {before} of {count} tasks can be made; ask for fewer, or see `composer-nb doctor`")


def buggy(task: Task) -> str:
    """Return the program with the bug: the file that the solution changes, or in a repository the function, renamed to `f`."""
    return _program(task, task.files)


def _program(task: Task, files: Mapping[str, str]) -> str:
    name = task.metadata.get("function")
    if name is None:
        return files[min(task.solution)]
    text = files[home_of(name, task.files)]
    name = name if f"def {name}(" in text else task.metadata["renamed"]
    return split_at(text, name)[1].replace(f"def {name}(", "def f(", 1)


def home_of(name: str, files: Mapping[str, str]) -> str:
    """Return the path of the module that defines a function."""
    return next(path for path, text in files.items() if f"def {name}(" in text and not is_test(path))


def split_at(source: str, name: str) -> tuple[str, str, str]:
    """Return the text before a function of a module, the function, and the text after it."""
    start = source.index(f"def {name}(")
    end = source.find("\n\ndef ", start)
    end = len(source.rstrip("\n")) if end < 0 else end
    return source[:start], source[start:end], source[end:]


def fingerprints(tasks: Iterable[Task]) -> set[str]:
    """Return digests that training and tasks of new structures must not share: of the structure, of the correct program, and of
    the program with the bug together with the instruction."""
    prints: set[str] = set()
    for task in tasks:
        right = _program(task, task.files | task.solution)
        texts = (task.metadata["structure"], right, task.instruction + buggy(task))
        prints |= {hashlib.sha256(text.encode()).hexdigest()[:20] for text in texts}
    return prints


def buggy_prints(tasks: Iterable[Task]) -> set[str]:
    """Return digests of the programs with bugs. Training must contain no such program of a held-out task, and no correct program
    of a new structure as a bug."""
    return {hashlib.sha256(buggy(task).encode()).hexdigest()[:20] for task in tasks}
