"""Chores: what is planted, what the probes say of answers and of tricks, and tasks of each kind, end to end."""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

import libcst as cst
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composer_nb.harness.grading.check import check_tasks
from composer_nb.harness.grading.plan import plan_of
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.making import chores, probes
from composer_nb.harness.making.baseline import measure
from composer_nb.harness.making.changes import units
from composer_nb.harness.making.chores import PLANTS, Chore, lints, missing_tests, same_meaning, scan, settle_chore
from composer_nb.harness.making.make import CHORES, TASKS, make
from composer_nb.harness.making.refactors import other_name, refactors
from composer_nb.harness.making.repository import read_repository
from composer_nb.harness.making.trial import Subject
from composer_nb.harness.sandboxes.contract import Backend, SandboxSpec
from composer_nb.harness.task import Task, load_tasks

ALL = ",".join(chores.RULES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with ruff on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"])
    return tmp_path


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("E711", "return a is None"),
        ("E713", "return a not in b"),
        ("E714", "return (a is not b) or b"),
        ("F541", "return 'plain'"),
        ("E722", "try:\n        return a\n    except Exception:\n        return b"),
        ("F841", "print(a)"),
        ("F841", "try:\n        return a\n    except ValueError:\n        return b"),
        ("E741", "return [x.x for x in a if x]"),
        ("E703", "return a"),
    ],
)
def test_ruff_finds_what_is_planted_and_nothing_else(here: Path, rule: str, body: str) -> None:
    text = f"def f(a, b):\n    {body}\n"
    make_one, types = PLANTS[rule]
    tree = cst.parse_module(text)
    found: list[str] = []

    class Finder(cst.CSTVisitor):
        def on_visit(self, node: cst.CSTNode) -> bool:
            if isinstance(node, types):
                found.extend(tree.deep_replace(node, new).code for new in make_one(node, Random(0), []))  # type: ignore[union-attr]
            return True

    tree.visit(Finder())
    (here / "a.py").write_text(text)
    assert found and probes.lint(["a.py"], ALL) == []
    for planted in found:
        (here / "a.py").write_text(planted)
        assert probes.lint(["a.py"], ALL) == [f"a.py: {rule}"]


def test_no_comment_setting_or_missing_file_silences_the_linter(here: Path) -> None:
    (here / "a.py").write_text("# ruff: noqa\nimport os  # noqa: F401\n")
    (here / "pyproject.toml").write_text("[tool.ruff]\nexclude = ['a.py']\nlint.ignore = ['F401']\n")
    (here / "ruff.toml").write_text("lint.per-file-ignores = {'a.py' = ['F401']}\n")
    assert probes.lint(["a.py"], "F401") == ["a.py: F401"]
    (here / "a.py").unlink()
    assert probes.lint(["a.py"], "F401") == ["a.py: gone"]
    (here / "a.py").write_text("def f(:\n")
    assert probes.lint(["a.py"], "F401")


RENAMED = {
    "right": ("def _new(a):\n    return _new(a - 1) if a else 0\n\n\nx = _new(1)\n", True),
    "alias": ("def _old(a):\n    return 0\n\n\n_new = _old\n", False),
    "forwarding": ("def _new(a):\n    return 0\n\n\n_old = _new\n", False),
    "by text": ("def _new(a):\n    return 0\n\n\nx = globals()['_old']\n", False),
    "import": ("from b import _new as _old\n\n\ndef _new(a):\n    return 0\n", False),
    "gone": ("x = 1\n", False),
    "lambda": ("_new = lambda a: 0\n", False),
}


@pytest.mark.parametrize("how", RENAMED)
def test_a_name_is_renamed_when_nothing_is_left_of_the_old_one(here: Path, how: str) -> None:
    text, right = RENAMED[how]
    (here / "pkg").mkdir()
    (here / "pkg" / "a.py").write_text(text)
    (here / "pkg" / "hidden.py").write_text("_old = 1\n")
    assert (probes.renamed(["pkg"], ["pkg/hidden.py"], "pkg/a.py", "_old", "_new", "FunctionDef") == []) is right


@given(st.from_regex(r"_?[A-Z][A-Z0-9_]{2,12}|_[a-z][a-z0-9_]{0,12}", fullmatch=True), st.integers())
@example("DSTSTART_1967_1986", 0)
def test_another_name_is_a_name_of_the_same_style(name: str, seed: int) -> None:
    new = other_name(name, Random(seed))
    assert new.isidentifier() and new.isupper() == name.isupper() and new.startswith("_") == name.startswith("_")


MOVED = {
    "right": ("from .b import f\n\nx = f()\n", "def f():\n    return 1\n", True),
    "handed on": ("from .b import f\n", "def f():\n    return 1\n", False),
    "copied": ("def f():\n    return 1\n\n\nx = f()\n", "def f():\n    return 1\n", False),
    "the other way": ("def f():\n    return 1\n", "from .a import f\n\nx = f()\n", False),
    "gone": ("x = 1\n", "y = 1\n", False),
}


@pytest.mark.parametrize("how", MOVED)
def test_a_function_is_moved_when_it_is_in_one_place(here: Path, how: str) -> None:
    old, new, right = MOVED[how]
    (here / "pkg").mkdir()
    (here / "pkg" / "a.py").write_text(old)
    (here / "pkg" / "b.py").write_text(new)
    assert (probes.moved(["pkg"], [], "f", "pkg/a.py", "pkg/b.py") == []) is right


def test_what_means_the_same_has_another_text_tree_and_bytecode(files: dict[str, str]) -> None:
    text = files["shapes/core.py"]
    for unit in units("shapes/core.py", text):
        lines = text.split("\n")
        old = "\n".join(lines[unit.start - 1 : unit.end])
        new = same_meaning(old, "_other")
        assert new != old and "_other" in new and new[:4] == old[:4]
        whole = "\n".join([*lines[: unit.start - 1], *new.split("\n"), *lines[unit.end :]])
        assert ast.dump(ast.parse(whole)) != ast.dump(ast.parse(text))
        scope: dict[str, Callable[..., object]] = {}
        exec(whole, scope)  # our own text
        assert scope["chunks"]([1, 2, 3], 2) == [[1, 2], [3]] and scope["Stack"]([1]).size == 1  # type: ignore[attr-defined]
        assert scope["most_common"](["a", "b", "b"]) == "b"


# In sandboxes.


@pytest.fixture(scope="module")
def subject(checkout: Path, backend: Backend) -> Subject:
    repository = read_repository(checkout)
    baseline = measure(repository, backend, SandboxSpec(), lambda doing: None)
    return Subject(
        repository=repository, baseline=baseline, names=frozenset(), backend=backend, spec=SandboxSpec(), seed="0"
    )


@pytest.fixture(scope="module")
def settled(subject: Subject) -> dict[str, tuple[Chore, Task]]:
    """By kind, for refactorings with what is done: the first chore that makes a task."""
    where = units("shapes/core.py", subject.repository.files["shapes/core.py"])
    streams: dict[str, Iterator[Chore]] = {
        "lint": lints(subject, where, scan(subject)),
        "tests": (each for each in missing_tests(subject, where) if each.unit and each.unit.name == "chunks"),
        "rename": (each for each in refactors(subject, where) if "renamed(" in each.check),
        "move": (each for each in refactors(subject, where) if "moved(" in each.check),
    }
    found = {}
    for name, stream in streams.items():
        for chore in islice(stream, 3):
            outcome = settle_chore(subject, chore, where)
            if outcome.verdict == "kept" and outcome.task is not None:
                found[name] = chore, outcome.task
                break
    assert set(found) == set(streams)
    return found


def passes(task: Task, backend: Backend, changed: dict[str, str | None]) -> bool:
    """Whether a workspace with these files changed, or gone, is graded as right."""
    left = {path: text for path, text in {**task.files, **changed}.items() if text is not None}
    grade = grade_pytest(task, {path: text.encode() for path, text in left.items()}, backend)
    assert grade.known
    return grade.passed


@pytest.mark.slow
def test_right_answers_count_starts_do_not_and_every_hidden_test_of_ours_has_a_twin(
    settled: dict[str, tuple[Chore, Task]], tmp_path: Path
) -> None:
    tasks = [Task.from_harbor(task.to_harbor(tmp_path / task.id)) for _, task in settled.values()]
    rows = check_tasks(tasks)
    assert [(row["gold"], row["none"], row["repeatable"], row["ok"]) for row in rows] == [(True, False, True, True)] * 4
    for _, task in settled.values():
        plan = plan_of(task)
        assert {key for key in plan.tests if key.startswith(chores.CHECK)} <= plan.covered
        assert not any(path.startswith(chores.CHECK) for path in task.files)


@pytest.mark.slow
def test_tricks_at_lint(settled: dict[str, tuple[Chore, Task]], backend: Backend) -> None:
    _, task = settled["lint"]
    [(path, right)] = task.solution.items()
    start = task.files[path]
    assert passes(task, backend, {path: right + "# a comment more\n"})
    noqa = "\n".join(
        f"{line}  # noqa" if line.strip() and not line.endswith("\\") else line for line in start.split("\n")
    )
    settings = {"ruff.toml": "lint.ignore = ['ALL']\n", "shapes/ruff.toml": "lint.select = []\n"}
    for trick in ({path: "# ruff: noqa\n" + start}, {path: noqa}, settings, {path: None}, {path: ""}):
        assert not passes(task, backend, {**trick})


CHUNKS_TESTS = """\
import pytest
from shapes.core import chunks

@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7])
def test_parts(count, size):
    items = tuple(range(count))
    found = chunks(items, size)
    assert isinstance(found, list) and all(isinstance(each, list) for each in found)
    assert [item for each in found for item in each] == list(items)
    assert all(len(each) == size for each in found[:-1]) and all(0 < len(each) <= size for each in found)

@pytest.mark.parametrize("size", [0, -1])
def test_sizes(size):
    with pytest.raises(ValueError, match="size must be at least 1"):
        chunks([1, 2], size)
"""
COMPARED = """\
import ast, inspect, textwrap
from shapes.core import chunks

def test_text():
    assert {asked} == {said!r}
"""
COUNTED = """\
import os
def test_by_turns():
    with open("/tmp/turns", "a+") as file:
        file.write("x")
        assert file.tell() <= 2
"""


@pytest.mark.slow
def test_tricks_at_tests(settled: dict[str, tuple[Chore, Task]], backend: Backend, files: dict[str, str]) -> None:
    chore, task = settled["tests"]
    [path] = task.solution
    unit = chore.unit
    assert unit is not None and task.source_scope == (path,)
    assert not any("chunks(" in text for name, text in task.files.items() if name.startswith("tests/"))
    assert passes(task, backend, {path: CHUNKS_TESTS})
    text = "\n".join(files["shapes/core.py"].split("\n")[unit.start - 1 : unit.end]) + "\n"
    texts = COMPARED.format(asked="inspect.getsource(chunks)", said=text)
    trees = COMPARED.format(
        asked="ast.dump(ast.parse(textwrap.dedent(inspect.getsource(chunks))))", said=ast.dump(ast.parse(text))
    )
    idle = "from shapes.core import chunks\n\ndef test_it():\n    assert True\n"
    leaving = "import os\n\ndef test_it():\n    os._exit(0)\n"
    for trick in ("", idle, texts, trees, leaving, leaving.replace("0", "1"), COUNTED, "def test_it(:\n"):
        assert not passes(task, backend, {path: trick}), trick
    conftest = {"tests/conftest.py": "import os\nos._exit(1)\n", "shapes/core.py": "def chunks(items, size): pass\n"}
    assert passes(task, backend, {path: CHUNKS_TESTS, **conftest})  # dropped: nothing but the file counts


@pytest.mark.slow
def test_tricks_at_refactorings(settled: dict[str, tuple[Chore, Task]], backend: Backend) -> None:
    _, task = settled["rename"]
    path = "shapes/core.py"
    right = task.solution[path]
    [old, new] = [
        next(iter(set(ast_names(a)) - set(ast_names(b))))
        for a, b in ((task.files[path], right), (right, task.files[path]))
    ]
    assert old == "_largest" and old in task.instruction and new in task.instruction
    for trick in (f"{task.files[path]}\n\n{new} = {old}\n", f"{right}\n\n{old} = {new}\n"):
        assert not passes(task, backend, {path: trick})
    _, task = settled["move"]
    [target] = set(task.solution) - {path}
    assert not passes(task, backend, {target: task.solution[target]})
    assert not passes(task, backend, {target: f"from .core import {old}\n\nfound = {old}([])\n"})


def ast_names(text: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]


@pytest.mark.slow
def test_each_kind_has_its_share_and_the_rest_are_bugs(checkout: Path, tmp_path: Path, backend: Backend) -> None:
    made = make(checkout, tmp_path / "out", backend, limit=CHORES)
    kinds = [task.metadata["kind"] for task in load_tasks(tmp_path / "out" / TASKS)]
    assert [kinds.count(kind) for kind in ("lint", "tests", "refactor", "feature")] == [1, 1, 1, 1]
    assert made.tasks == len(kinds) >= CHORES - 1
    assert {kind.kind for kind in made.kinds} >= {"lint", "tests", "refactor"}
