"""The arm `planned`: who reads what, what a plan costs, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_nb.cli import main
from composer_nb.harness.agent.chat import Said, Written
from composer_nb.harness.agent.scripts import read_script
from composer_nb.harness.agent.turns import Spoken, TokenlessTurnPolicy
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.production.agents import evaluate
from composer_nb.production.arms import ARMS
from composer_nb.production.planner import TaskPlan, make_plans, with_plans
from composer_nb.production.serve import ScriptServer

HELDOUT = Path(__file__).resolve().parents[2] / "data" / "example" / "data" / "heldout.jsonl"


@pytest.fixture
def tasks() -> list[Task]:
    return load_tasks(HELDOUT)[:2]


class Thinker(TokenlessTurnPolicy):
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def say(self, news: Any, until: float) -> Spoken:
        self.heard.append(news[0].text)
        call = Written(id="c", call=ToolCall(name="grep", arguments={"pattern": "x"}))
        return Spoken(said=Said(text=f" plan {len(self.heard)} ", calls=(call,)), read=90, written=10)


def test_a_planner_reads_the_task_and_its_files_once_and_never_its_answer(tasks: list[Task], tmp_path: Path) -> None:
    heard: list[str] = []
    plans = [make_plans(tasks, lambda task, number: Thinker(heard), tmp_path, 1, 9.0) for _ in range(2)]
    assert plans[0] == plans[1] == [TaskPlan(text=f"plan {n}", read=90, written=10) for n in (1, 2)], (
        "kept, not asked again"
    )
    for task, text, plan in zip(tasks, heard, plans[0], strict=True):
        assert all(part in text for part in (task.instruction, *task.files, *task.files.values()))
        assert not any(part in text for part in (*task.tests.values(), *task.solution.values()))
        given = plan.given(task)
        assert given.instruction == f"{task.instruction}\n\nplan:\n{plan.text}"
        assert given == task.model_copy(update={"instruction": given.instruction})


@pytest.mark.parametrize(
    ("own", "price", "tokens", "cost"),
    [
        (2.0, (1.0, 10.0), 100.0, 2.00019),
        (2.0, None, 100.0, None),
        (None, (1.0, 10.0), 100.0, None),
        (2.0, None, 0.0, 2.0),
    ],
)
def test_who_plans_is_paid(own: float | None, price: Any, tokens: float, cost: float | None) -> None:
    plans = (
        [TaskPlan(text="a", read=90, written=10), TaskPlan(text="", read=90, written=10)]
        if tokens
        else [TaskPlan(text="a", read=0, written=0)]
    )
    row = with_plans({"n_tasks": 1, "tokens_per_task": 50.0, "dollars_per_task": own}, plans, "p", price)
    assert row["tokens_per_task"] == 50 + tokens and row["planner"]["empty"] == bool(tokens)
    assert row["dollars_per_task"] == (None if cost is None else pytest.approx(cost))


def test_an_endpoint_plans_and_a_policy_executes(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planned arm has the same tasks and its own rollouts, resumes, and belongs to its planner."""
    script = tmp_path / "plan.json"
    script.write_text(json.dumps([{"text": "1. read it"}]))
    with ScriptServer(read_script(script)) as server:
        policy = f"openai:{server.url}"
        monkeypatch.setenv("OPENAI_API_KEY", server.key or "none")
        given: dict[str, Any] = {"samples": 1, "planner": policy}
        report = evaluate("scripted:searcher", tasks, tmp_path / "out", **given)
        assert list(report["arms"]) == ["all", "planned"] and 0 < report["detectable"] < 2
        planned = report["arms"]["planned"]
        assert planned["planner"] | {"read": 0, "written": 0} == {"policy": policy, "read": 0, "written": 0, "empty": 0}
        assert planned["n_tasks"] == 2 and len(planned["gain"]) == 3
    assert evaluate("scripted:searcher", tasks, tmp_path / "out", samples=1)["arms"]
    with pytest.raises(ValueError, match="holds rollouts of another"):
        evaluate("scripted:searcher", tasks, tmp_path / "out", **given | {"planner": "scripted:planner"})


def test_tiny_models_lose_grep_without_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, less = (ARMS[name].tiny().tools.keys() for name in ("all", "no-search"))
    assert whole - less == {"grep"} and not less - whole
    asked = ["eval", "--policy", "scripted:blind", "--tasks", str(HELDOUT), "--out", str(tmp_path / "out")]
    assert main([*asked, "--arms", "bash"]) == 2
    assert "no-search" in capsys.readouterr().err
    assert main([*asked, "--arms", "no-search"]) == 2 and "call grep" in capsys.readouterr().err
    assert main([*asked, "--planner", "nothing:x"]) == 2 and "--policy nothing:x" in capsys.readouterr().err
