"""Changes beside the human's: figures by hand, and what hostile files cannot change."""

from dataclasses import replace

import pytest

from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.quality import ChangeQuality, change_quality, quality_columns, quality_figures, solution_lines
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tasks.task import Task

UTIL = """\
class Table:
    def width(self, rows):
        return max(len(row) for row in rows)


def clean_name(text, mark="-"):
    parts = [part for part in text.lower().split() if part]
    return mark.join(parts)
"""
APP = """\
from util import Table


def label(text):
    return text


def size(rows):
    return Table().width(rows)
"""
TEST = "from app import label\n\n\ndef test_label():\n    assert label('A b') == 'a-b'\n"
HUMAN = APP.replace("import Table", "import Table, clean_name").replace("return text", "return clean_name(text)")
TASK = Task(
    id="label",
    instruction="label does not clean",
    grader="pytest",
    files={"pkg/util.py": UTIL, "pkg/app.py": APP, "pkg/tests/test_old.py": "def test_old():\n    pass\n"},
    tests={"pkg/tests/test_label.py": TEST},
    solution={"pkg/app.py": HUMAN},
    source_scope=("pkg/**",),
)
SLUG = "\n\ndef slug(words):\n    pieces = [w for w in words.lower().split() if w]\n    return '-'.join(pieces) or ''\n"
REPEATED = """

def slug(words, sign="-"):
    pieces = [piece for piece in words.lower().split() if piece]
    return sign.join(pieces)
"""
SAME = ChangeQuality(lines=4, human_lines=4, extra_files=(), new_names=(), human_names=(), needless_names=())


def quality(**files: str | None) -> ChangeQuality | None:
    """Return the quality of a change of the task's files, which are named by their modules."""
    changed = {f"pkg/{name}.py": text for name, text in files.items()}
    after = {path: text for path, text in (TASK.files | changed).items() if text is not None}
    return change_quality(TASK, after)


def app_calling(name: str, more: str) -> str:
    return APP.replace("return text", f"return {name}(text)") + more


CASES: dict[str, tuple[dict[str, str | None], ChangeQuality]] = {
    "nothing": ({}, replace(SAME, lines=0)),
    "the human's change": ({"app": HUMAN}, SAME),
    "tests and caches beside it": (
        {"app": HUMAN, "tests/test_mine": TEST, "tests/helpers": "x = 1\n", "__pycache__/x": "x"},
        SAME,
    ),
    "a new function where one existed": (
        {"app": app_calling("slug", SLUG)},
        replace(SAME, lines=7, new_names=("slug",), needless_names=("slug",)),
    ),
    "a function that is there, written again, beside the right call": (
        {"app": HUMAN + REPEATED},
        replace(SAME, lines=9, new_names=("slug",), needless_names=("slug",)),
    ),
    "a new function beside the right call": ({"app": HUMAN + SLUG}, replace(SAME, lines=9, new_names=("slug",))),
    "a method, a class in a branch, and another file": (
        {
            "app": HUMAN,
            "util": UTIL.replace("class Table:", "class Table:\n    def height(self):\n        return 1\n"),
            "more": "if True:\n    class More:\n        x = 1\n",
        },
        replace(SAME, lines=10, extra_files=("pkg/more.py", "pkg/util.py"), new_names=("More", "Table.height")),
    ),
    "a moved function": (
        {
            "app": HUMAN.replace("\n\ndef label(text):\n    return clean_name(text)\n", ""),
            "util": UTIL + "\n\ndef label(text):\n    return clean_name(text)\n",
        },
        replace(SAME, lines=10, extra_files=("pkg/util.py",)),
    ),
    "a deleted file": ({"app": HUMAN, "util": None}, replace(SAME, lines=12, extra_files=("pkg/util.py",))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_change_beside_the_humans(case: str) -> None:
    files, expected = CASES[case]
    assert quality(**files) == expected


def test_where_the_human_writes_a_name_too_none_is_needless() -> None:
    task = TASK.model_copy(update={"solution": {"pkg/app.py": HUMAN + SLUG.replace("slug", "humans")}})
    [figures] = [change_quality(task, TASK.files | {"pkg/app.py": app_calling("slug", SLUG)})]
    assert figures and (figures.new_names, figures.human_names, figures.needless_names) == (("slug",), ("humans",), ())
    task = TASK.model_copy(update={"solution": {"pkg/app.py": HUMAN + REPEATED}})
    figures = change_quality(task, TASK.files | {"pkg/app.py": HUMAN + REPEATED})
    assert figures and figures.lines == figures.human_lines == solution_lines(task) and not figures.needless_names


def test_outside_the_scope_and_unreadable_files_leave_figures_alone() -> None:
    deep, broken = "(" * 5000, "def slug(:\n"
    after = TASK.files | {"pkg/app.py": HUMAN, "try.py": "def f():\n    pass\n", "../x.py": "", "/etc/a.py": ""}
    assert change_quality(TASK, after) == SAME
    for text in (deep, broken, "\udce9 = 1", "x = 1\n" * 100_000):
        figures = change_quality(TASK, TASK.files | {"pkg/app.py": HUMAN, "pkg/odd.py": text})
        assert figures and figures.extra_files == ("pkg/odd.py",) and not figures.new_names


def test_tasks_without_a_humans_change_have_no_quality() -> None:
    only_tests = TASK.model_copy(update={"solution": {"pkg/tests/test_old.py": ""}})
    for task in (TASK.model_copy(update={"solution": {}}), only_tests):
        assert change_quality(task, TASK.files | {"pkg/app.py": HUMAN}) is None


def attempt(passed: bool) -> Attempt:
    rollout = Rollout(task_id="label", segments=(), turns=(), files={}, stop="finished")
    return Attempt(task=TASK, rollout=rollout, grade=Grade(status="graded", tests={"t": passed}))


def test_figures_are_of_passed_attempts_and_columns_of_all() -> None:
    wide = replace(SAME, lines=10, extra_files=("a", "b"), new_names=("f",), needless_names=("f",))
    qualities = [SAME, wide, replace(SAME, lines=100), None]
    attempts = [attempt(True), attempt(True), attempt(False), attempt(True)]
    figures = quality_figures(qualities, attempts)
    assert figures and figures["n"] == 2 and figures["lines"] == {"median": 7.0, "mean": 7.0}
    assert figures["lines_ratio"]["mean"] == (1 + 2.5) / 2 and figures["lines_more"]["median"] == 3
    names = ("extra_files", "new_names", "human_names", "needless_names")
    assert [figures[name]["mean"] for name in names] == [1, 0.5, 0, 0.5]
    columns = quality_columns(qualities)
    assert columns["lines"] == [4, 10, 100, None] and columns["new_names"] == [(), ("f",), (), None]
    assert quality_columns([None]) == {} and quality_figures([None], attempts[:1]) is None
