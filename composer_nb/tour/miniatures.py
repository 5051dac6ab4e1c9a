"""Miniature repositories: a few modules of small functions, with a bug or a gap in one function, and tests of each.

No instruction says what to change: a failed test names the function, a search finds its module, and trials find the answer. Most
instructions say only that tests fail; some also specify the function. Bugs are of the kinds that an agent can enumerate
(`ENUMERABLE`), so that reading, trying and testing suffice to solve a task.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Literal

from composer_nb.harness import syntax
from composer_nb.harness.sandbox.requests import CallOutcome, Executor
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.task import RULES, Task
from composer_nb.tour.paraphrases import draw_others, draw_wrong_number, paraphrase
from composer_nb.tour.programs import Program, draw_program
from composer_nb.tour.repairs import BuggyProgram, bugs, distinct, draw_candidate, evaluate, neighbours, run_programs

# bug: a test fails. feature: a function or a branch is missing. tests: the tests of a function are too weak, and the agent adds
# tests that mutants fail. lint: a name is unused or does not exist. rename: a function gets another name, in two modules.
# paraphrase: a wrong number in one of many modules, whose request shares no word with the code; no test can be run.
Kind = Literal["bug", "feature", "tests", "lint", "rename", "paraphrase"]
ENUMERABLE = frozenset({"compare", "operator", "augmented"})
# Numbers of visible and of hidden tests of the changed function, and of tests of every other function on either side.
VISIBLE, HIDDEN, OTHERS = 12, 10, 2
# Maximum modules of a repository.
MOST = 3
# Numbers of modules of a repository of the kind `paraphrase`.
MANY = (16, 32, 64)
# Maximum mutants of a task of the kind `tests`.
MUTANTS = 3
IMPORTS, SPARE = ("math", "os", "re", "json"), ("spare", "extra", "draft", "old")
MODULES = ("core", "util", "stats", "tools", "data", "calc")
NAMES = (
    *("total", "count", "pick", "scan", "join", "find", "rank", "part", "step", "mark", "load", "pack", "sort", "move"),
    *("peek", "read", "near", "last", "item", "rows", "name", "kind", "line", "text", "size", "time", "path", "call"),
)

Cases = list[tuple[tuple[object, ...], object]]  # Arguments and the value that they give.


def make_miniatures(
    seed: str,
    count: int,
    *,
    heldout: bool,
    executor: Executor,
    described: float = 0.25,
    families: frozenset[str] = frozenset(),
    kinds: Sequence[Kind] = ("bug",),
) -> Iterator[Task]:
    """Return `count` distinct tasks whose function has a held-out structure, or one of the others, the same for the same seed.

    `described`: share of bug tasks whose instruction specifies the function, and of `paraphrase` tasks with the words
    of the code. `families`: only these, if any are given. `kinds`: the kinds of tasks. Iteration raises ValueError if a thousand
    draws yield no new task."""
    rng = Random(f"miniatures {seed} {heldout}")

    def draw() -> BuggyProgram | None:
        kind = kinds[0] if len(kinds) == 1 else rng.choice(kinds)
        if kind == "paraphrase":
            return draw_wrong_number(rng, heldout)
        return draw_candidate(rng, heldout, VISIBLE + HIDDEN, PLANTS[kind], families)

    def make(candidate: BuggyProgram, outcomes: tuple[CallOutcome, ...]) -> Task | None:
        return _task(candidate, outcomes, rng, rng.random() < described, executor)

    return distinct(count, draw, make, executor, ahead=True)


def _bug(source: str, rng: Random) -> tuple[str, str] | None:
    return bugs(source, rng, ENUMERABLE)


def _gap(source: str, rng: Random) -> tuple[str, str]:
    """Replace a branch, or the whole body, by `pass`."""
    tree = syntax.parse(source)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.For | ast.While)]
    branches = [(body, n) for body in bodies for n, statement in enumerate(body) if isinstance(statement, ast.If)]
    if branches and rng.random() < 0.5:
        body, index = rng.choice(branches)
        body[index] = ast.Pass()
    else:
        bodies[0][:] = [ast.Pass()]
    return "feature", ast.unparse(tree)


def _litter(source: str, rng: Random) -> tuple[str, str] | None:
    """Add an unused import or name, or use a name that does not exist. None if that also leaves another name unused."""
    head, *lines = source.split("\n")
    way = rng.choice(("import", "name", "missing"))
    if way == "missing":
        nodes = [node for node in ast.walk(syntax.parse(source)) if isinstance(node, ast.Name)]
        used = rng.choice([node for node in nodes if node.lineno == 1 + len(lines)])
        lines[-1] = lines[-1][: used.col_offset] + rng.choice(SPARE) + lines[-1][used.end_col_offset :]
    else:
        added = f"import {rng.choice(IMPORTS)}" if way == "import" else f"{rng.choice(SPARE)} = {rng.randrange(10)}"
        lines.insert(0, f"    {added}")
    text = "\n".join([head, *lines])
    return ("lint", text) if len(syntax.lints(text)) == 1 else None


PLANTS: Mapping[Kind, Callable[[str, Random], tuple[str, str] | None]] = {
    "bug": _bug,
    "feature": _gap,
    "tests": lambda source, rng: (planted := _bug(source, rng)) and ("tests", planted[1]),
    "lint": _litter,
    "rename": lambda source, rng: ("rename", source),
}


def _deal(
    candidate: BuggyProgram, outcomes: Sequence[CallOutcome], executor: Executor
) -> tuple[list[int], list[int], list[str]] | None:
    """Return the inputs of the visible and of the hidden tests, and for the kind `tests` the mutants, which all fail the first
    hidden test and pass all visible ones. None if the change shows on fewer than three inputs, or on too many."""
    failing = [i for i, pair in enumerate(zip(outcomes, candidate.right, strict=True)) if pair[0] != pair[1]]
    indices = range(len(outcomes))
    if candidate.kind in ("lint", "rename"):
        return [*indices[:VISIBLE]], [*indices[VISIBLE:]], []
    if len(failing) < 3:
        return None
    first, *others = failing
    if candidate.kind != "tests":
        order = [first, *(i for i in indices if i not in (first, others[-1])), others[-1]]
        return order[:VISIBLE], order[VISIBLE:], []
    passing = [i for i in indices if i not in failing][:OTHERS]
    if len(passing) < OTHERS:
        return None
    first = min(failing, key=lambda i: len(repr((candidate.inputs[i], candidate.expected[i]))))
    hidden = [first, *(i for i in indices if i not in (first, *passing))]
    mutants, source, tested = [candidate.buggy], candidate.program.source, (first, *passing)
    near = [] if "while" in source else [text for _, text in neighbours(source, ENUMERABLE) if text != candidate.buggy]
    inputs = tuple(candidate.inputs[i] for i in tested)
    pattern = [False, *[True] * OTHERS]
    for text, results in zip(near, run_programs(near, [inputs] * len(near), executor), strict=True):
        if results and [result == candidate.right[i] for result, i in zip(results, tested, strict=True)] == pattern:
            mutants.append(text)
    return passing, hidden, mutants[:MUTANTS]


def _task(
    candidate: BuggyProgram, outcomes: tuple[CallOutcome, ...], rng: Random, specified: bool, executor: Executor
) -> Task | None:
    """Return the task of a candidate whose change has these `outcomes`; None if it is unfit (`_deal`)."""
    if (dealt := _deal(candidate, outcomes, executor)) is None:
        return None
    visible, hidden, mutants = dealt
    program, cases = candidate.program, list(zip(candidate.inputs, candidate.expected, strict=True))
    if candidate.kind == "paraphrase":
        return _spread(candidate, cases, rng, specified)
    function, *spare_names = rng.sample(NAMES, 2 * MOST)
    modules = rng.sample(MODULES, rng.randint(1 + (candidate.kind == "rename"), MOST))
    home = rng.randrange(len(modules))
    sources: dict[str, list[str]] = {module: [] for module in modules}
    tests: dict[str, str] = {}
    hidden_tests: dict[str, str] = {}
    for index, module in enumerate(modules):
        if index != home or rng.random() < 0.3:
            sibling, examples = _sibling(rng, program.heldout)
            sibling_name = spare_names.pop()
            sources[module].append(_named(sibling.source, sibling_name))
            tests[f"test_{sibling_name}.py"] = render_tests(module, sibling_name, examples[:OTHERS])
            hidden_tests[f"test_hidden_{sibling_name}.py"] = render_tests(module, sibling_name, examples[OTHERS:])
        if index == home:
            sources[module].append(_named(candidate.buggy, function))
            tests[f"test_{function}.py"] = render_tests(module, function, [cases[i] for i in visible])
            hidden_tests[f"test_hidden_{function}.py"] = render_tests(module, function, [cases[i] for i in hidden])
    path, right_code = f"{modules[home]}.py", _named(program.source, function)
    files = {f"{module}.py": "\n\n".join(parts) + "\n" for module, parts in sources.items()}
    scope, right = tuple(files), files[path].replace(_named(candidate.buggy, function), right_code)
    solution = {path: right}
    digest = hashlib.sha256(repr((files, candidate.inputs)).encode()).hexdigest()[:12]
    kind = candidate.kind if candidate.kind in PLANTS else "bug"
    metadata = {"family": program.family, "bug": candidate.kind, "structure": program.structure, "function": function}
    metadata |= {"kind": kind} if kind != "bug" else {}
    if kind == "tests":
        metadata["mutants"] = json.dumps(
            [{path: right.replace(right_code, _named(mutant, function))} for mutant in mutants]
        )
        rendered = render_tests(modules[home], function, [cases[hidden[0]]])
        added = rendered.partition("\n\n\n")[2].replace("_0", f"_{OTHERS}")
        test_path = f"test_{function}.py"
        files, scope = files | {path: right}, (test_path,)
        solution = {test_path: tests[test_path].replace("def test_0", f"{added}\n\ndef test_0")}
    summary = f"{function}: {program.spec}"
    instructions = {"bug": f"fix {summary}" if specified else "fix the tests", "lint": "fix the lints", "rename": "-"}
    task = Task(
        id=f"{program.family}-{digest}",
        instruction=(instructions | {"feature": f"add {summary}", "tests": f"test {summary}"})[kind],
        files=files | tests,
        tests=hidden_tests,
        solution=solution,
        source_scope=scope,
        strictness="lints" if kind == "lint" else "twins",
        metadata=metadata,
    )
    return _renamed(task, spare_names, f"{modules[home - 1]}.py") if kind == "rename" else task


def _spread(candidate: BuggyProgram, cases: Cases, rng: Random, own_words: bool) -> Task:
    """Return the task of a wrong number in one of many modules, all of whose tests are hidden. The request quotes the
    function's name, or a paraphrase, and says which number should be there, and which is."""
    first = candidate.program.family
    sources = {first: candidate.buggy} | draw_others(rng, rng.choice(MANY) - 1, candidate)
    files = {f"{name}.py": _named(source, name) + "\n" for name, source in sources.items()}
    words = [first] if own_words else paraphrase(rng, first)
    digest = hashlib.sha256(repr((files, words)).encode()).hexdigest()[:12]
    return Task(
        id=f"paraphrase-{digest}",
        instruction=f'fix "{" ".join(words)}": {candidate.program.spec}',
        files=files,
        tests={f"test_hidden_{first}.py": render_tests(first, first, cases)},
        solution={f"{first}.py": _named(candidate.program.source, first) + "\n"},
        source_scope=tuple(files),
        metadata={"family": candidate.kind, "kind": candidate.kind, "structure": first, "function": first},
    )


def _renamed(task: Task, names: Sequence[str], user: str) -> Task | None:
    """Return the task to rename the function of a repository, which another module, `user`, then calls. The tests that an agent
    sees call the function through it. None if a variable has one of the names."""
    old, new, caller = task.metadata["function"], *names[:2]
    [home] = task.solution
    parameters = task.files[home].partition(f"def {old}(")[2].partition(")")[0]
    uses = f"def {caller}({parameters}):\n    return {old}({parameters})\n"
    files = task.files | {user: f"from {home[:-3]} import {old}\n\n{task.files[user]}\n\n{uses}"}
    sources = "\n".join(files[path] for path in task.source_scope)
    if [len(re.findall(rf"\b{name}\b", sources)) for name in (old, new, caller)] != [3, 0, 1]:
        return None
    named = re.compile(rf"\b{old}\b(?=\(|$)", re.M)
    tests = task.tests | {f"test_hidden_{new}.py": named.sub(new, task.tests[f"test_hidden_{old}.py"])}
    for texts, prefix in ((files, "test_"), (tests, "test_hidden_")):
        moved = named.sub(caller, texts.pop(f"{prefix}{old}.py"))
        texts[f"{prefix}{caller}.py"] = moved.replace(f"from {home[:-3]} ", f"from {user[:-3]} ")
    solution = {path: re.sub(rf"\b{old}\b", new, files[path]) for path in (home, user)}
    rules = json.dumps([("absent", "", old), ("defined", home, new)])
    return task.model_copy(
        update={
            "instruction": f"rename {old} -> {new}",
            "files": files,
            "tests": tests,
            "solution": solution,
            "metadata": task.metadata | {"renamed": new, RULES: rules},
        }
    )


def _named(source: str, name: str) -> str:
    return source.replace("def f(", f"def {name}(", 1)


def _sibling(rng: Random, heldout: bool) -> tuple[Program, Cases]:
    """Return a correct program on the same side of the split, with its cases."""
    program = draw_program(rng)
    while program.heldout != heldout:
        program = draw_program(rng)
    inputs, results = evaluate(program, 2 * OTHERS, rng)
    return program, list(zip(inputs, results, strict=True))
