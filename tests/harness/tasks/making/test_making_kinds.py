"""Kinds of work from a repository: the right answer is accepted; the empty, the lazy and the deceitful one are refused."""

import json
import subprocess
import tracemalloc
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from composer_nb.harness.carry import add_history, carry_back, commits_left
from composer_nb.harness.grading.check import check_task
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.structure import structure
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.syntax import lints
from composer_nb.harness.tasks.history import GIT_REPORT, import_stream
from composer_nb.harness.tasks.making.changes import units
from composer_nb.harness.tasks.making.kinds import KINDS, without_assertions
from composer_nb.harness.tasks.making.make import TASKS, make
from composer_nb.harness.tasks.making.questions import long_run, questions
from composer_nb.harness.tasks.making.refactors import new_name, renameable, renamed
from composer_nb.harness.tasks.making.repository import Repository
from composer_nb.harness.tasks.making.trial import NoTask
from composer_nb.harness.tasks.runtime import start_sandbox, workspace
from composer_nb.harness.tasks.task import RULES, Task, load_tasks
from tests.folders import write
from tests.harness.tasks.making.conftest import FILES

LIMIT = 2
SIDES = ("ours", "theirs")
REPORT = """\
from shapes.core import chunks, clamp


def pages(items):
    '''The lengths of pages of three items, none above two.

    The last page may be the shortest.
    '''
    return [clamp(len(part), high=2) for part in chunks(items, 3)]


def in_pairs(items):
    '''The items in lists of two, in their order.

    The last list may be shorter.
    '''
    return chunks(items, 2)
"""
TESTS_OF_REPORT = """\
from shapes.report import in_pairs, pages


def test_pages():
    assert pages([5, 6, 7, 8]) == [2, 1]


def test_in_pairs():
    assert in_pairs([5, 6, 7]) == [[5, 6], [7]]
"""
QUESTIONS = """\
import html
class Node:
    def __init__(self, value): self.value = value
def widen(value): return value + 1
def clean(value): return value
def quoted(text): return html.escape(text)
def escape(text): return widen(clean(text))
def tally(node): return widen(clean(tally(node)))
def build(value): return Node(widen(clean(value)))
def plain(value): return widen(clean(value))
"""
Tasks = Mapping[str, list[Task]]


@pytest.fixture(scope="module")
def tasks_by_kind(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    folder, kinds = tmp_path_factory.mktemp("kinds"), list(KINDS)
    more = {"shapes/report.py": REPORT, "tests/test_report.py": TESTS_OF_REPORT}
    out = folder / "out"
    make(write(folder / "shapes", FILES | more), out, backend, limit=LIMIT * len(kinds), kinds=kinds)
    tasks = load_tasks(out / TASKS)
    return {kind: [task for task in tasks if task.metadata["kind"] == kind] for kind in kinds}


def passes(task: Task, backend: Backend, changed: Mapping[str, str]) -> bool:
    result = grade(task, workspace(task) | {path: text.encode() for path, text in changed.items()}, backend)
    assert result.status == "graded", (task.id, result)
    return result.passed


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("bug", "poem"), "--kinds poem: no such kind; choose from feature,bug,combined,tests"),
        ((), "--kinds : no such kind"),
        (("combined",), "combines tasks of the kind bug"),
    ],
)
def test_unknown_kinds_are_refused_before_work_starts(
    checkout: Path, tmp_path: Path, kinds: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(checkout, tmp_path, cast(Backend, None), kinds=kinds)


@pytest.mark.slow
def test_a_kind_without_a_candidate_is_refused(checkout: Path, tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"shapes: --kinds question: no candidate, as no function"):
        make(checkout, tmp_path, backend, kinds=("question", "bug"))


@pytest.mark.slow
def test_each_kind_is_made_and_fit(tasks_by_kind: Tasks, backend: Backend) -> None:
    for kind, tasks in tasks_by_kind.items():
        assert len(tasks) == LIMIT, kind
        for task in tasks:
            row = check_task(task, backend)
            assert row["gold"] and not row["none"] and row["repeatable"] and not row["problem"], row


@pytest.mark.slow
def test_tests_must_notice_the_mutants_by_what_they_do(tasks_by_kind: Tasks, backend: Backend) -> None:
    """`assert True` notices nothing. A test that knows the text of the code also refuses the same code in other words."""
    for task in tasks_by_kind["tests"]:
        [(path, right)] = task.solution.items()
        start = task.files[path]
        assert right.count("def test_") > start.count("def test_") and len(task.mutants) > 1
        source = json.loads(task.metadata["places"])[0].partition("::")[0]
        spy = f"\n\ndef test_spy():\n    assert open({source!r}).read() == {task.files[source]!r}\n"
        more = f"\n\ndef test_more():\n    '''As {source} says.'''\n    assert 1 + 1 == 2\n"
        assert passes(task, backend, {path: right + more})
        assert not passes(task, backend, {path: without_assertions(right)})
        lazy = "\n\ndef test_all():\n    assert True\n"
        wrong = "\n\ndef test_false():\n    assert False\n"
        for reader in ("import dis", f"open({source!r})", "open('a')", "print(test_reader.__code__)"):
            assert not passes(task, backend, {path: f"{right}\n\ndef test_reader():\n    {reader}\n"})
        for text in ("", lazy, start + lazy, start + spy, right + wrong, right + "\n\ndef ("):
            assert not passes(task, backend, {path: text})


@pytest.mark.slow
def test_lints_are_mended_without_a_change_of_behaviour(tasks_by_kind: Tasks, backend: Backend) -> None:
    for task in tasks_by_kind["lint"]:
        for path, right in task.solution.items():
            start = task.files[path]
            assert {*lints(start)} - {*lints(right)}
            functions = [line for line in right.split("\n") if line.startswith("def ")]
            empty = "\n".join(f"{head} pass" for head in functions)
            for text in (start, right.replace("return", "return 0 and"), "", empty):
                assert not passes(task, backend, {**task.solution, path: text})
            assert passes(task, backend, {**task.solution, path: right + "\n\n# tidy\n"})


@pytest.mark.slow
def test_a_rename_leaves_no_way_to_the_old_name(tasks_by_kind: Tasks, backend: Backend) -> None:
    for task in tasks_by_kind["rename"]:
        [[_, _, old], [_, path, name]] = json.loads(task.metadata[RULES])
        holder, _, new = name.rpartition(".")
        right, sources = task.solution[path], {at: text for at, text in task.solution.items() if "test" not in at}
        assert old in task.instruction and new in task.instruction
        extra_test = f"\n\ndef test_gone():\n    assert not hasattr(int, {old!r})\n"
        tests = {at: text + extra_test for at, text in task.solution.items() if at not in sources}
        assert passes(task, backend, task.solution) and passes(task, backend, sources | tests)
        assert tests and not passes(task, backend, sources), "tests that were not renamed"
        alias = f"{holder}.{old} = {holder}.{new}\n" if holder else f"{old} = {new}\n"
        for text in (f"{right}\n\n{alias}", task.files[path], "", right.replace("return", "return 0 and")):
            assert not passes(task, backend, {**task.solution, path: text}), text
        assert not passes(task, backend, {**task.solution, f"{path}i": f"def {old}(): ...\n"}), "a stub of types"


@pytest.mark.slow
def test_a_moved_function_is_defined_once(tasks_by_kind: Tasks, backend: Backend) -> None:
    for task in tasks_by_kind["move"]:
        [[_, old, name], _, [_, new, _]] = json.loads(task.metadata[RULES])
        assert new not in task.files and f"import {name}" in task.solution[old]
        old_module, new_module = (path[:-3].replace("/", ".") for path in (old, new))
        lazy = {new: f"from {old_module} import {name}\n"}
        duplicated = {**task.solution, old: task.files[old]}
        renamed_import = {**task.solution, old: task.solution[old].replace(f"import {name}", f"import {name} as other")}
        source = task.files[old].replace(f"def {name}(", f"def {name}_old(")
        thin = {old: f"{source}\n\nfrom {new_module} import {name}\n"}
        body = f"from {old_module} import {name}_old\n\n    return {name}_old(*items, **more)\n"
        thin[new] = f"def {name}(*items, **more):\n    {body}"
        for changed in (lazy, duplicated, renamed_import, thin):
            assert not passes(task, backend, changed)


@pytest.mark.slow
def test_an_extracted_piece_is_gone_from_where_it_was(tasks_by_kind: Tasks, backend: Backend) -> None:
    for task in tasks_by_kind["extract"]:
        [[_, path, name], [_, _, new]] = json.loads(task.metadata[RULES])
        right, start, short = task.solution[path], task.files[path], new.rpartition(".")[2]
        assert f"`{short}`" in task.instruction and f"`{name}`" in task.instruction
        piece = right[right.index(f"def {short}(") - (4 if "." in new else 0) :].partition("\n\n\n")[0]
        lazy = [start, f"{start}\n\ndef {short}(): 0\n", f"{start}\n\n{piece}", right.replace("return", "return 0 and")]
        for text in (*lazy, right.replace(f"def {short}(", "def other(")):
            assert not passes(task, backend, {path: text}), text
        assert passes(task, backend, {path: right.replace(f"def {short}(", f"def {short}(  # of {name}\n        ")})


@pytest.mark.slow
def test_a_feature_over_several_files_needs_each_of_them(tasks_by_kind: Tasks, backend: Backend) -> None:
    for task in tasks_by_kind["features"]:
        assert len(task.solution) > 1 and all(path in task.instruction for path in task.solution)
        for path, text in task.solution.items():
            assert "raise NotImplementedError" in task.files[path] and not passes(task, backend, {path: text})


def passes_after(task: Task, backend: Backend, script: str) -> bool:
    """Return whether a task is solved by commands in its repository."""
    with start_sandbox(task, backend) as box:
        add_history(box, import_stream(task))
        box.exec(["sh", "-c", script], env={"GIT_EDITOR": "true"})
        files = {path: blob.data for path, blob in carry_back(box)[0].items() if not path.startswith(".git/")}
        files[GIT_REPORT] = commits_left(box).encode()
    return grade(task, files, backend).passed


@pytest.mark.slow
def test_a_history_is_mended_on_top_of_every_commit(tasks_by_kind: Tasks, backend: Backend) -> None:
    """Files alone are not enough, nor is a history without the commits that were there."""
    forms = {len(task.commits): task for task in tasks_by_kind["git"]}
    assert {*forms} == {3, 5}
    [target] = json.loads(forms[5].metadata["places"])
    messages = [message for _, message, _ in forms[5].commits]
    bad = messages.index(f"Rework {target.partition('::')[2]}")
    at, other_commit = f"main~{4 - bad}", f"main~{int(bad == 4)}"
    [path] = {*forms[3].solution} - {GIT_REPORT}
    keep_both, commit = f"sed -i '/^[<=>]\\{{7\\}}/d' {path}", "git commit -qam x"
    one_side = [f"git checkout --{side} .; {commit}" for side in SIDES]
    right = {5: f"git revert --no-edit {at}", 3: f"{keep_both} && {commit}"}
    wrong = {
        5: ("true", f"git revert -n {at}", f"git reset -q --hard {at}~1", f"git revert --no-edit {other_commit}"),
        3: (commit, keep_both, f"{keep_both}; rm .git/MERGE_HEAD; {commit}", *one_side),
    }
    for count, task in forms.items():
        assert passes_after(task, backend, right[count])
        assert not [script for script in wrong[count] if passes_after(task, backend, script)]
    rewritten = f"git rebase -q --onto {at}~1 {at} main || git rebase --skip"
    assert not passes_after(forms[5], backend, rewritten)


@pytest.mark.slow
def test_an_answer_is_compared_word_by_word(tasks_by_kind: Tasks, backend: Backend) -> None:
    for task in tasks_by_kind["question"]:
        names = task.solution["ANSWER.txt"].strip().split(", ")
        assert len(names) == 2 and "ANSWER.txt" in task.instruction
        for text in (f"- `{names[1]}()`, {names[0]}.", f"\"{names[1]}\"; '{names[0]}'"):
            assert passes(task, backend, {"ANSWER.txt": text})
        for text in ("", "chunks", names[0], "chunks clamp pages in_pairs"):
            assert not passes(task, backend, {"ANSWER.txt": text})


def test_only_functions_with_one_answer_are_asked_about_and_renamed() -> None:
    """None whose name another package has too; none that calls itself, or makes an object: whether that is a call is open."""
    functions = units("q.py", QUESTIONS)
    repository = SimpleNamespace(files={"q.py": QUESTIONS}, sources=("q.py",), scope=("q.py",))
    subject = cast(Any, SimpleNamespace(repository=repository, units=functions, reached=functions, seed="0"))
    names = {candidate.build.args[1].name for candidate in questions(subject)}
    assert names == {"widen", "clean", "plain"}
    assert {unit.name for unit in renameable(subject)} == {*names, "quoted", "tally", "build"}


def test_a_module_that_no_test_can_import_by_its_name_makes_no_task() -> None:
    files = {"my-tool.py": "def work(value):\n    return value\n", "test_tool.py": "def test_work(): ...\n"}
    plan = SimpleNamespace(tests={"test_tool.py::test_work#0": "test_tool.py::test_work"})
    baseline = SimpleNamespace(plan=plan, nearest=lambda places: [*plan.tests])
    subject: Any = SimpleNamespace(repository=Repository(name="r", files=files), baseline=baseline, seed="0")
    [unit] = units("my-tool.py", files["my-tool.py"])
    with pytest.raises(NoTask, match=r"unfit.*test_the_new_structure\.py:1: not Python"):
        renamed(subject, unit)


def test_a_function_for_which_no_name_is_left_makes_no_task() -> None:
    words = {f"{verb}_work" for verb in ("compute", "run", "make", "apply")}
    with pytest.raises(NoTask, match="unfit.*all new names for work are in use"):
        new_name("work", words, Random(0))


def test_a_long_program_may_read_more_sources_than_fit_into_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{'x' * 200}{number}.py": "" for number in range(700)}
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True)
    backend = SimpleNamespace(
        create=lambda spec: nullcontext(SimpleNamespace(upload=partial(write, tmp_path), exec=run))
    )
    repository = Repository(name="r", files=files)
    subject: Any = SimpleNamespace(repository=repository, backend=backend, spec=None, seed="0")
    monkeypatch.setattr(f"{questions.__module__}._answered", lambda *task, files: task[-1])
    [answer] = cast(Any, long_run(subject, units("f.py", "def f(x):\n    return x\n")[0]))
    assert len(answer) == 12


def test_structure_is_read_off_the_code_and_not_off_its_words() -> None:
    rules = [["absent", "", "old"], ["defined", "a.py", "A.new"], ["undefined", "b.py", "moved"]]
    task = Task(
        id="t",
        instruction="-",
        files={"a.py": "class A:\n def old(self): pass\n", "b.py": "def moved(): pass\n"},
        tests={"test_a.py": ""},
        source_scope=("*.py",),
        grader="pytest",
        metadata={RULES: json.dumps(rules)},
        solution={"a.py": "class A:\n def new(self): pass\n", "b.py": "from c import moved\n"},
    )
    right = {
        "a.py": 'class A:\n "old, as x.old was"\n def new(self): pass  # once old\n',
        "b.py": "from c import moved\n",
    }
    assert all(structure(task, right).values())
    test = "def test_a(): assert not hasattr(A, 'old') and A.__dict__\n"
    assert all(structure(task, right | {"test_a.py": test}).values())
    wrong = [("a.py", "class A:\n new = 1\n"), ("b.py", "def moved(): pass\n")]
    wrong += [("b.py", f"{block}:\n def moved(): pass\n") for block in ("for _ in [0]", "while 1", "with x", "if x")]
    wrong += [("b.py", "try: x\nexcept: \n def moved(): pass\n"), ("test_a.py", "def test_a(): A().old()\n")]
    wrong += [("a.py", f"if 0:\n class A:\n  def new(): 0\n{line}\n") for line in ("from d import *", "new = d")]
    more = ("import old", "x = {'old': 1}", "(", "def f(old): pass", "f(old=1)", "from a import b as old", "x.__dict__")
    dynamic = ("x.f_globals", "globals()['o' + 'ld'] = 1", "setattr(A, 'dlo'[::-1], 1)", "def __getattr__(name): pass")
    for path, text in [*wrong, *(("c.py", line) for line in (*more, *dynamic))]:
        assert not all(structure(task, right | {path: text}).values()), text
    tracemalloc.start()
    try:
        assert all(structure(task, right | {f"m{number}.py": "a\n" * 10_000 for number in range(8)}).values())
        assert tracemalloc.get_traced_memory()[1] < 45 << 20, "the trees of all modules take 60 MiB"
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match=r"task t: metadata\.structure\.rules: "):
        Task.model_validate(task.model_dump() | {"metadata": {RULES: '[["gone", "", "old"]]'}})
