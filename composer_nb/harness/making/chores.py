"""Work that is no bug: make the linter clean, write tests, refactor.

A *chore* is a task's workspace, its right answer and its own hidden test, made from texts alone; `settle_chore` finds out by
execution whether it makes a task. The hidden test asks a probe (`probes.py`). Beside it count the suite's own tests that reach
the place, but for `tests`, whose answer is a test file and nothing else. References: the kinds of work in Composer's training
(Composer 2 report, section 4); mutation testing as the measure of tests (DeMillo, Lipton and Sayward, 1978).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import libcst as cst

from composer_nb.harness.calls import SandboxFailure
from composer_nb.harness.grading.box import Place
from composer_nb.harness.grading.plan import Plan, digest, modules_of, plan_of, with_plan
from composer_nb.harness.grading.reach import all_candidates
from composer_nb.harness.grading.scope import is_conftest
from composer_nb.harness.grading.validate import seen_to_fail
from composer_nb.harness.making.changes import (
    Change,
    Edit,
    Function,
    Kinds,
    Unit,
    bugs,
    changed_lines,
    is_public,
    rewritten,
    text_of,
)
from composer_nb.harness.making.instructions import without_tests, write_chore
from composer_nb.harness.making.trial import (
    BESIDES,
    MOST_BROKEN,
    Outcome,
    Subject,
    Verdict,
    failures,
    graded,
    needed,
    repeated,
    restricted,
)
from composer_nb.harness.task import Task

PROBES = Path(__file__).with_name("probes.py").read_text(encoding="utf-8")
CHECK = "00_check"
"""The folder of a chore's own hidden test: it sorts before the suite's, and so is imported first."""
MODULES = ("json", "re", "os", "sys", "itertools", "functools", "textwrap", "string", "math", "copy")
MUTANTS = (4, 6)
"""At least and at most."""
TRIED = 16
TEST_LINES = 6
"""A function shorter than this needs no tests of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    """What may become a task."""

    kind: Literal["lint", "tests", "refactor"]
    unit: Unit | None = None
    """What tests are to be written for."""
    places: tuple[Place, ...]
    """Tests that reach one of these count."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Of the workspace, where they are not as the repository has them."""
    solution: Mapping[str, str]
    scope: tuple[str, ...]
    noticed_by: tuple[str, ...] = ()
    """Keys of the suite's tests that the right answer consists of."""
    instruction: str
    check: str = ""
    """The hidden test, but for the probes."""
    cases: tuple[str, ...] = ()
    """Keys of its tests less the module, and their ids: `test_lint#0 test_lint`."""

    @property
    def key(self) -> str:
        held = [self.kind, sorted(self.files.items()), sorted(self.solution.items())]
        return hashlib.sha256(json.dumps(held).encode()).hexdigest()[:12]


# lint


def _is_none(node: cst.Comparison, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """E711: `x == None`."""
    match node.comparisons:
        case [cst.ComparisonTarget(operator=cst.Is(), comparator=cst.Name("None")) as target]:
            yield node.with_changes(comparisons=[target.with_changes(operator=cst.Equal())])


def _not_first(node: cst.Comparison, operator: type[cst.BaseCompOp], instead: cst.BaseCompOp) -> Iterator[cst.CSTNode]:
    if len(node.comparisons) == 1 and isinstance(node.comparisons[0].operator, operator):
        inner = node.with_changes(comparisons=[node.comparisons[0].with_changes(operator=instead)], lpar=[], rpar=[])
        yield cst.UnaryOperation(operator=cst.Not(), expression=inner, lpar=node.lpar, rpar=node.rpar)


def _not_in(node: cst.Comparison, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """E713: `not x in y`."""
    yield from _not_first(node, cst.NotIn, cst.In())


def _not_is(node: cst.Comparison, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """E714: `not x is y`."""
    yield from _not_first(node, cst.IsNot, cst.Is())


def _f_string(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """F541: an f-string without a placeholder."""
    text = node.value
    if isinstance(text, cst.SimpleString) and text.prefix == "" and not re.search(r"[{}\\]", text.value):
        yield node.with_changes(value=cst.parse_expression("f" + text.value))


def _bare(node: cst.ExceptHandler, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """E722: an `except` for everything."""
    if isinstance(node.type, cst.Name) and node.type.value == "Exception" and node.name is None:
        yield node.with_changes(type=None, whitespace_after_except=cst.SimpleWhitespace(""))


def _unused(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """F841: a variable that nobody reads."""
    name = lot.choice([each for each in ("result", "found", "ok", "ret", "exc") if each not in names])
    if isinstance(node, cst.ExceptHandler):
        if node.type is not None and node.name is None:
            yield node.with_changes(name=cst.AsName(cst.Name(name)))
    elif isinstance(node.value, cst.Call):
        yield cst.Assign(targets=[cst.AssignTarget(cst.Name(name))], value=node.value)


def _ambiguous(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """E741: a comprehension's variable is called `l`."""
    loop = node.for_in
    if isinstance(loop.target, cst.Name) and loop.inner_for_in is None and "l" not in names:
        yield node.visit(Renaming(loop.target.value, "l", attributes=False))


def _semicolon(node: cst.SimpleStatementLine, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """E703: a semicolon at the end of a line."""
    if isinstance(node.body[-1], cst.Assign | cst.Return):
        yield node.with_changes(body=[*node.body[:-1], node.body[-1].with_changes(semicolon=cst.Semicolon())])


PLANTS: Kinds = {
    "E711": (_is_none, (cst.Comparison,)),
    "E713": (_not_in, (cst.Comparison,)),
    "E714": (_not_is, (cst.Comparison,)),
    "F541": (_f_string, (cst.Arg, cst.Return, cst.Assign)),
    "E722": (_bare, (cst.ExceptHandler,)),
    "F841": (_unused, (cst.Expr, cst.ExceptHandler)),
    "E741": (_ambiguous, (cst.ListComp, cst.SetComp, cst.GeneratorExp)),
    "E703": (_semicolon, (cst.SimpleStatementLine,)),
}
RULES = (*PLANTS, "F401", "F811")
"""All among those that ruff has on by default."""


class Renaming(cst.CSTTransformer):
    """Gives a name another, keywords of calls aside."""

    def __init__(self, old: str, new: str, attributes: bool) -> None:
        self.old, self.new, self.attributes = old, new, attributes

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return updated_node.with_changes(value=self.new) if updated_node.value == self.old else updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        return updated_node if self.attributes else updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)


def scan(subject: Subject) -> dict[str, list[str]]:
    """Path of a source -> the rules of RULES that it keeps, told by the same probe that a grade asks; nothing where
    the sandbox has no ruff. Raises SandboxFailure."""
    sources = subject.repository.sources
    code = f"{PROBES}\nprint(json.dumps(sorted(set(lint(sys.argv[2:], sys.argv[1])))))"
    with subject.backend.create(subject.spec) as box:
        box.upload({path: subject.repository.files[path].encode() for path in sources})
        done = box.exec(["python3", "-c", code, ",".join(RULES), *sources], timeout_s=60, output_bytes=32 << 20)
    if b"FileNotFoundError" in done.stderr:  # no ruff there: no such tasks
        return {}
    if done.exit_code:
        raise SandboxFailure(f"ruff: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}")
    found = set(json.loads(done.stdout))
    return {
        path: [rule for rule in RULES if f"{path}: {rule}" not in found]
        for path in sources
        if f"{path}: invalid" not in found and f"{path}: invalid-syntax" not in found
    }


def lints(subject: Subject, where: Sequence[Unit], clean: Mapping[str, list[str]]) -> Iterator[Chore]:
    """Files with a few violations of rules that they kept."""
    files, lot = subject.repository.files, Random(f"lint {subject.seed}")
    used = Counter({"E703": 4})  # fits every other line
    paths = sorted({unit.path for unit in where if clean.get(unit.path) and not unit.path.endswith("__init__.py")})
    for _ in range(4):
        lot.shuffle(paths)
        for path in paths:
            edits = list(_head_edits(path, files[path], clean[path], lot))[: lot.randrange(2)]
            units = [unit for unit in where if unit.path == path and not unit.is_class]
            lot.shuffle(units)
            kinds = {rule: plant for rule, plant in PLANTS.items() if rule in clean[path]}
            wanted = lot.randrange(2, 5)
            for unit in units:
                planted = (
                    next(rewritten(text_of(unit, files), False, lot, kinds, used), None)
                    if len(edits) < wanted
                    else None
                )
                if planted:
                    used[planted[0]] += 1
                    edits.append(Edit(path=path, name=unit.name, start=unit.start, end=unit.end, text=planted[1]))
            change = Change(kind="lint", edits=tuple(edits), places=tuple(p for unit in units for p in unit.places))
            if len(edits) > 1:
                yield Chore(
                    kind="lint",
                    places=change.places,
                    files=change.apply(files),
                    solution={path: files[path]},
                    scope=subject.repository.scope,
                    instruction=write_chore("lint", f"{subject.seed} {change.key}", path=path),
                    check=finding("lint", f"lint({[path]!r}, {','.join(clean[path])!r})"),
                    cases=("test_lint#0 test_lint",),
                )


def _head_edits(path: str, text: str, clean: Sequence[str], lot: Random) -> Iterator[Edit]:
    """An import that nobody needs, or one that comes twice."""
    lines = text.split("\n")
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = [
        node for node in nodes if lines[node.lineno - 1] == ast.unparse(node) and "__future__" not in ast.unparse(node)
    ]
    unknown = [name for name in MODULES if not re.search(rf"\b{name}\b", text)]
    if plain:
        node = lot.choice(plain)
        new = [f"import {lot.choice(unknown)}"] if unknown and "F401" in clean else []
        new += [lines[node.lineno - 1]] if "F811" in clean and isinstance(node, ast.Import) else []
        for each in lot.sample(new, len(new)):
            yield Edit(path=path, name="", start=node.lineno + 1, end=node.lineno, text=each)


def finding(name: str, asked: str) -> str:
    return f"FOUND = {asked}\n\n\ndef test_{name}():\n    assert FOUND == []\n"


# tests


def missing_tests(subject: Subject, where: Sequence[Unit]) -> Iterator[Chore]:
    """Functions and classes whose tests are gone. Which mutants tests must notice is found out by `with_mutants`."""
    files, reach, plan = subject.repository.files, subject.baseline.reach, subject.baseline.plan
    others = {re.sub(r"\[.*", "", name, flags=re.S) + "#0" for name in subject.baseline.left_out}
    order = [unit for unit in where if is_public(unit.name) and text_of(unit, files).count("\n") + 1 >= TEST_LINES]
    Random(f"tests {subject.seed}").shuffle(order)
    for unit in order:
        near = subject.baseline.nearest(unit.places)
        direct = [key for key in near if min(reach[key].depths.get(place, 9) for place in unit.places) == 1]
        if len(direct) < 2 or len(near) > max(8, MOST_BROKEN * len(plan.tests)):
            continue
        [(module, _)] = Counter(key.partition("::")[0] for key in direct).most_common(1)
        kept = {key for key in direct if key.startswith(f"{module}::")}
        gone = {*near, *others}
        folder, _, _ = module.rpartition("/")
        stem = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", unit.name).replace(".", "_").lower()
        path = f"{folder}/test_{stem}.py".lstrip("/")
        if path in files or path.partition("/")[0] == CHECK:
            path = f"{folder}/test_{stem}_again.py".lstrip("/")
        in_module = {key for key in (*plan.tests, *others) if key.startswith(f"{module}::")}
        functions = {key.rpartition("#")[0] for key in kept}
        text = without_tests(files[module], [key for key in in_module if key.rpartition("#")[0] not in functions])
        answer = re.sub(r"\n{4,}", "\n\n\n", text).rstrip() + "\n"
        yield Chore(
            kind="tests",
            unit=unit,
            places=unit.places,
            files={
                each: without_tests(files[each], [k for k in gone if k.startswith(f"{each}::")])
                for each in modules_of(gone)
            },
            solution={path: answer},
            scope=(path,),
            noticed_by=tuple(sorted(kept)),
            instruction=write_chore(
                "tests", f"{subject.seed} {unit.path} {unit.name}", path=path, name=unit.name, source=unit.path
            ),
        )


def with_mutants(subject: Subject, chore: Chore, units: Sequence[Unit]) -> Chore | None:
    """With the bugs that the right answer's tests notice, those first that most of them do. Raises SandboxFailure."""
    unit, [path] = chore.unit, chore.solution
    assert unit is not None
    inner = [
        each for each in units if each.path == unit.path and not each.is_class and set(each.places) <= set(unit.places)
    ]
    changes = list(islice(bugs(subject.repository.files, inner, subject.seed), TRIED))
    noticed = failures(subject, changes, chore.noticed_by)
    found = [(change, failing) for change, failing in zip(changes, noticed, strict=True) if failing]
    found.sort(key=lambda each: -len(each[1]))
    if len(found) < MUTANTS[0]:
        return None
    chosen = [change for change, _ in found[: MUTANTS[1]]]
    # Mutants are written like the second right text: what is left of that tells nothing.
    name = f"_{Random(f'{subject.seed} {chore.key}').choice(MODULES)}_done"
    right = [(unit.path, unit.start, unit.end, same_meaning(text_of(unit, subject.repository.files), name))]
    wrong = [[(e.path, e.start, e.end, same_meaning(e.text, name)) for e in change.edits] for change in chosen]
    cases = [[], right, *wrong]
    given = {each: text for each, text in subject.repository.files.items() if is_conftest(each)}
    check = (
        f"SAID = outcomes({path!r}, {cases!r}, {given!r}, {[*given, f'{CHECK}/test_tests.py']!r})\n\n\n"
        '@pytest.mark.parametrize("number", range(2))\n'
        'def test_right_code(number):\n    assert SAID[number] == "passed"\n\n\n'
        f'@pytest.mark.parametrize("number", range(2, {len(cases)}))\n'
        'def test_mutant(number):\n    assert SAID[number] == "failed"\n'
    )
    ids = [f"test_right_code#{n} test_right_code[{n}]" for n in range(2)]
    ids += [f"test_mutant#{n} test_mutant[{n + 2}]" for n in range(len(chosen))]
    return replace(chore, check=f"import pytest\n\n{check}", cases=tuple(ids))


def same_meaning(text: str, name: str) -> str:
    """A unit's text written anew: no comments, other lines, and in each function a statement that only gives `name` a value, so
    that neither text nor tree nor bytecode are as they were."""
    depth = (len(text) - len(text.lstrip(" "))) // 4
    tree = ast.parse("".join(f"{'    ' * level}if 1:\n" for level in range(depth)) + text)
    for node in ast.walk(tree):
        if isinstance(node, Function):
            documented = ast.get_docstring(node, clean=False) is not None
            node.body.insert(int(documented), ast.parse(f"{name} = None").body[0])
    return "\n".join(ast.unparse(tree).split("\n")[depth:]).lstrip("\n")


# settling


def settle_chore(subject: Subject, chore: Chore, units: Sequence[Unit]) -> Outcome:
    """The task of a chore, or why there is none. Raises SandboxFailure."""
    began = time.monotonic()
    verdict, task = _settled(subject, chore, units)
    return Outcome(key=chore.key, kind=chore.kind, verdict=verdict, seconds=time.monotonic() - began, task=task)


def _settled(subject: Subject, chore: Chore, units: Sequence[Unit]) -> tuple[Verdict, Task | None]:
    repository, suite = subject.repository, subject.baseline.plan
    near: list[str] = []
    if chore.kind == "tests":
        with_them = with_mutants(subject, chore, units)
        if with_them is None:
            return "unseen", None
        chore = with_them
    else:
        near = subject.baseline.nearest(chore.places)[:BESIDES]
    check = f"{CHECK}/test_{chore.kind}.py"
    text = f"{PROBES}\n\n{chore.check}"
    own = {f"{check}::{key}": f"{check}::{name}" for key, name in (each.split(" ") for each in chore.cases)}
    task = Task(
        id=f"{repository.name}-{chore.kind}-{chore.key}",
        instruction=chore.instruction,
        files={**repository.files, **chore.files},
        tests={path: repository.hidden[path] for path in (needed(repository.hidden, modules_of(near)) if near else ())}
        | {check: text},
        solution=dict(chore.solution),
        source_scope=chore.scope,
        grader="pytest",
        metadata={
            "kind": chore.kind,
            "repository": repository.name,
            "places": json.dumps([*chore.solution]),
            "changed_lines": str(
                sum(
                    changed_lines(chore.files.get(p, repository.files.get(p, "")), t) for p, t in chore.solution.items()
                )
            ),
        },
    )
    kept = restricted(suite, near, digest(task))
    plan = Plan(digest=kept.digest, tests=dict(sorted({**kept.tests, **own}.items())), twins=kept.twins)
    steady = repeated(subject, with_plan(task, plan), own)
    if not isinstance(steady, Task):
        return steady, None
    if set(json.loads(steady.metadata["fail_to_pass"])) != set(own.values()):
        return "flaky", None
    plan = plan_of(steady)
    gold = {path: each.encode() for path, each in (steady.files | steady.solution).items()}
    probe = steady.model_copy(update={"tests": {check: text}})
    only = replace(plan, tests=own, twins=())
    twins = seen_to_fail(probe, gold, only, all_candidates(probe.tests), subject.backend, 60.0, subject.spec)
    steady = with_plan(steady, replace(plan, twins=(*plan.twins, *twins)))
    if not set(own) <= plan_of(steady).covered:
        return "ungraded", None
    return graded(subject, steady), steady
