"""Requests behind commits: an agent's change, committed with a message that says nothing, and what is not traced back."""

import json
from pathlib import Path

import pytest
from dulwich import porcelain

from composer_nb.cli import main
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.plan import gold_files
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.production.requests import accepted_requests, request_behind
from tests.harness.tasks.making.test_making_mine import EMPTY, MEAN, RANGE, SPREAD, SUMS, TESTS, commit

FIRST, SECOND = "mean([]) crashes, make it 0", "how far apart are values? add spread"


def work(root: Path, out: Path, request: str, old: str, new: str, verdict: str = "accept") -> None:
    """Let an agent replace a text of `sums.py`, as a user does."""
    edit = {"name": "search_replace", "arguments": {"file_path": "sums.py", "old_string": old, "new_string": new}}
    out.parent.mkdir(exist_ok=True)
    script = out.parent / f"{out.name}.json"
    script.write_text(json.dumps([{"calls": [edit]}, {"text": "Done."}]))
    words = ["agent", str(root), request, "--policy", f"scripted:{script}", "--out", str(out), "--verdict", verdict]
    assert main(words) == (verdict != "accept")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkout and the folder of three conversations about it: two that were accepted, and one that was rejected."""
    root = tmp_path_factory.mktemp("logs") / "sums"
    root.mkdir()
    runs, end = root.parent / "runs", "    return total(values) / len(values)\n"
    porcelain.init(root)
    commit(root, "begin", {"sums.py": SUMS, "test_sums.py": TESTS})
    work(root, runs / "rejected", "mean of nothing should be nan", end, f"    assert values\n{end}", "reject")
    work(root, runs / "first", FIRST, end, f"    if not values:\n        return 0.0\n{end}")
    by_agent = (root / "sums.py").read_text()
    commit(root, "wip", {"sums.py": by_agent, "test_sums.py": TESTS + EMPTY})
    work(root, runs / "second", SECOND, end, end + RANGE)
    edited = (root / "sums.py").read_text().replace("def spread(values):", "def spread(values):\n    'Of values.'")
    commit(root, "Add some things that were missing", {"sums.py": edited, "test_sums.py": TESTS + EMPTY + SPREAD})
    return root, runs


def test_a_commit_that_says_nothing_becomes_a_task_with_the_users_request(
    checkout: tuple[Path, Path], tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    root, runs = checkout
    out = str(tmp_path / "out")
    assert main(["tasks", "mine", str(root), "--out", out, "--json"]) == 0  # without logs, `wip` asks for nothing
    assert json.loads(capsys.readouterr().out)["verdicts"] == {"kept": 1, "no request": 1, "first": 1}
    assert main(["tasks", "mine", str(root), "--out", out, "--requests", str(runs), "--json"]) == 0  # resumes
    summary = json.loads(capsys.readouterr().out)
    assert summary["verdicts"] == {"kept": 2, "first": 1} and summary["from_logs"] == 2
    second, first = load_tasks(Path(out))
    assert first.instruction == FIRST and second.instruction == SECOND  # which names `spread` itself
    assert first.files["sums.py"] == SUMS and first.solution == {"sums.py": MEAN}
    assert grade(first, gold_files(first), backend).passed
    logs = ["--requests", str(runs / "second"), str(runs / "rejected")]
    assert main(["tasks", "mine", str(root), "--out", out, *logs]) == 0
    assert "1 tasks of 3 changes" in (output := " ".join(capsys.readouterr().out.split()))
    assert "1 with the request of a log" in output


def test_what_is_not_traced_back(checkout: tuple[Path, Path]) -> None:
    with pytest.raises(FileNotFoundError, match="no agent's work is kept here"):
        accepted_requests([checkout[0]])
    log = accepted_requests([checkout[1]])
    assert [entry.request for entry in log] == [FIRST, SECOND], "a rejected change is no request"

    def behind(before: str, after: str, path: str = "sums.py") -> str:
        return request_behind(log, {path: before}, {path: after})

    assert behind(SUMS, MEAN) == FIRST
    assert behind(SUMS, MEAN + RANGE) == f"{FIRST}\n\n{SECOND}", "a commit may hold several"
    assert behind(SUMS, MEAN.replace("        return 0.0", "        return float(0)")) == FIRST, "half of it"
    assert behind(SUMS, SUMS.replace("    return total", "    values or 0\n    return total")) == ""
    assert behind(SUMS, MEAN + "".join(f"v{n} = {n}\n" for n in range(3))) == "", "most of it is something else"
    assert behind(MEAN, SUMS) == "" and behind(SUMS, MEAN, "tests/sums.py") == "", "what is removed, and other files"
    assert request_behind([], {}, {"sums.py": SUMS}) == ""
