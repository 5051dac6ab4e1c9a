"""The bench: rows computed by hand, the arm `planned`, and one score of a policy from its folder and behind `serve`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from composer_nb.cli import main
from composer_nb.harness.agent.chat import Said, Written
from composer_nb.harness.agent.scripts import read_script
from composer_nb.harness.agent.turns import Spoken, TokenlessTurnPolicy
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.production.bench import bench_settings, compare_evals, evaluate, figures
from composer_nb.production.planner import TaskPlan, make_plans, with_plans
from composer_nb.production.policies import open_engine
from composer_nb.production.serve import ScriptServer
from composer_nb.trainer.records import provenance
from composer_nb.views.agent import plan_worth
from tests.production.conftest import serving

EXAMPLE = Path(__file__).resolve().parents[2] / "data" / "example"
POLICY, HELDOUT = EXAMPLE / "weights" / "final", EXAMPLE / "data" / "heldout.jsonl"
HELD_OUT = load_tasks(HELDOUT)


def attempt(task: str, passed: bool, **grade: Any) -> Attempt:
    rollout = Rollout(task_id=task, segments=(), turns=(), files={}, stop="finished", counted=(9000, 1000), seconds=2.0)
    fields = {"status": "graded", "tests": {"t": passed}} | grade
    bare_task = Task.model_construct(id=task, grader="pytest", metadata={}, files={}, solution={})
    return Attempt(task=bare_task, rollout=rollout, grade=Grade(**fields))


def test_a_row_by_hand() -> None:
    rows = [attempt("a", True), attempt("a", True), attempt("b", True), attempt("b", False), attempt("c", False)]
    rows += [attempt("c", False, status="tampered", flags=("twin_passed",))]
    row = figures(rows, price=(0.5, 2.5))
    assert (row["pass_at_1"], row["best_of_k"], row["all_of_k"]) == pytest.approx((1 / 2, 2 / 3, 1 / 3))
    assert row["pass_at_k"] == pytest.approx({"1": 1 / 2, "2": 2 / 3})
    assert row["pass_hat_k"] == pytest.approx({"1": 1 / 2, "2": 1 / 3})
    assert row["flagged"] == pytest.approx(1 / 6) and row["disqualified"] == ["c"]
    assert row["disqualified_attempts"] == 1
    assert row["dollars_per_task"] == pytest.approx((9000 * 0.5 + 1000 * 2.5) / 1e6)
    assert figures(rows)["dollars_per_task"] is None


@pytest.fixture
def tasks() -> list[Task]:
    return HELD_OUT[:2]


class Thinker(TokenlessTurnPolicy):
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def say(self, news: Any, until: float) -> Spoken:
        self.texts.append(news[0].text)
        call = Written(id="c", call=ToolCall(name="grep", arguments={"pattern": "x"}))
        return Spoken(message=Said(text=f" plan {len(self.texts)} ", calls=(call,)), read=90, written=10)


def test_a_planner_reads_the_task_and_its_files_once_and_never_its_answer(tasks: list[Task], tmp_path: Path) -> None:
    texts: list[str] = []
    plans = [make_plans(tasks, lambda task, number: Thinker(texts), tmp_path, 1, 9.0) for _ in range(2)]
    assert plans[0] == plans[1], "kept, not asked again"
    for number, (task, plan) in enumerate(zip(tasks, plans[0], strict=True), 1):
        fields = {"read": 90, "written": 10, "files": tuple(sorted(task.files)), "flawed": True}
        assert plan == TaskPlan(text=f"plan {number}", **fields)
    for task, text, plan in zip(tasks, texts, plans[0], strict=True):
        assert all(part in text for part in (task.instruction, *task.files, *task.files.values()))
        assert not any(part in text for part in (*task.tests.values(), *task.solution.values()))
        planned = plan.given(task)
        assert planned.instruction == f"{task.instruction}\n\nplan:\n{plan.text}"
        assert planned == task.model_copy(update={"instruction": planned.instruction})


@pytest.mark.parametrize(("price", "cost"), [((1, 10), pytest.approx(2.00019)), (None, None)])
def test_who_plans_is_paid(price: Any, cost: Any) -> None:
    plans = [TaskPlan(text=text, read=90, written=10) for text in ("a", "")]
    row = with_plans({"n_tasks": 1, "tokens_per_task": 50.0, "dollars_per_task": 2.0}, plans, "p", price)
    assert (row["tokens_per_task"], row["planner"]["empty"], row["dollars_per_task"]) == (150, 1, cost)


def test_planned_arm(tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned arm has the same tasks and its own rollouts, resumes, and belongs to its planner."""
    script = tmp_path / "plan.json"
    script.write_text(json.dumps([{"text": "1. read it"}]))
    with ScriptServer(read_script(script)) as server:
        policy = f"openai:{server.url}"
        monkeypatch.setenv("OPENAI_API_KEY", server.key or "none")
        options: dict[str, Any] = {"samples": 1, "planner": policy}
        report = evaluate("scripted:searcher", tasks, tmp_path / "out", **options)
        assert list(report["arms"]) == ["all", "planned"] and 0 < report["detectable"] < 2
        planned = report["arms"]["planned"]
        assert planned["planner"] | {"read": 0, "written": 0} == {"policy": policy, "read": 0, "written": 0, "empty": 0}
        assert planned["n_tasks"] == 2 and len(planned["gain"]) == 3
    assert evaluate("scripted:searcher", tasks, tmp_path / "out", samples=1)["arms"]
    with pytest.raises(ValueError, match="holds rollouts of another"):
        evaluate("scripted:searcher", tasks, tmp_path / "out", **options | {"planner": "scripted:planner"})


def test_eval_draws_what_a_plan_is_worth(tasks: list[Task], tmp_path: Path) -> None:
    save_tasks(tasks, tmp_path / "tasks.jsonl")
    words = ["--tasks", str(tmp_path / "tasks.jsonl"), "--samples", "1", "--planner", "scripted:planner"]
    assert main(["eval", "--policy", "scripted:expert", *words, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/plan.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "out/report.json").read_text())
    [tokens] = plan_worth(report).axes
    assert tokens.get_xlabel() == "tokens a task"
    assert tokens.get_title(loc="left").endswith("+0.0 points (+0.0 to +0.0)")


@contextmanager
def served(tokens: int = 32_768) -> Iterator[str]:
    with (
        open_engine(POLICY, slots=4, tokens=tokens) as engine,
        serving(engine, model="final", trained=engine.training, context=engine.tokens) as site,
    ):
        yield f"openai:{site.url}"


def attempts(out: Path) -> list[dict[str, Any]]:
    """Return all that an evaluation stored of its attempts but tokens and times."""
    files = sorted(out.glob("*/*.parquet"))
    names = ["task_id", "stop", "status", "passed", "tests", "turns", "files"]
    rows = [row for file in files for row in pq.read_table(file, columns=names).to_pylist()]
    for row in rows:
        row["turns"] = [{**turn, "seconds": 0.0} for turn in json.loads(row["turns"])]
    return rows


def test_a_policy_has_the_score_of_its_folder_behind_serve(tmp_path: Path) -> None:
    """Greedy and sampled, turn for turn: attempts that fill the context, and calls of a tool that was not offered."""
    tasks, rows, reports = HELD_OUT[4:6], list[Any](), list[Any]()
    with served() as address:
        for name, policy in (("folder", str(POLICY)), ("served", address)):
            options: dict[str, Any] = {"samples": 2, "greedy": True, "arms": "all,no-search"}
            report = evaluate(policy, tasks, tmp_path / name, settings=bench_settings(policy, tasks, {}), **options)
            rows.append(attempts(tmp_path / name))
            reports.append(report["arms"])
    assert rows[0] == rows[1] and {"finished", "tokens"} <= {row["stop"] for row in rows[1]}
    for arm, scores in reports[0].items():
        measured_fields = {"tokens_per_task", "sampled_per_task", "seconds_p50", "seconds_p95"}
        assert all(scores[name] == reports[1][arm][name] for name in scores.keys() - measured_fields)
        assert scores["infra_errors"] == 0 and (arm == "all" or scores["invalid_call_rate"] > 0.3)


def test_too_many_lost_attempts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer_nb.harness.agent.endpoint.LONGEST_WAIT_S", 0)
    save_tasks(HELD_OUT[:1], tmp_path / "tasks.jsonl")
    for source in (["--tasks", str(tmp_path / "tasks.jsonl")], ["--suite", "impossible:1"]):
        call = ["eval", "--policy", "openai:http://127.0.0.1:9/v1#m", *source, "--samples", "2", "--json"]
        assert main([*call, "--out", str(tmp_path / source[0])]) == 1
        out, err = capsys.readouterr()
        assert json.loads(out)["lost_share"] == 1.0 and "2 of 2 attempts were lost" in err and "127.0.0.1:9" in err
    call = ["headroom", str(tmp_path / "tasks.jsonl"), "--policy", "openai:http://127.0.0.1:9/v1#m", "--samples", "2"]
    assert main(call) == 1 and "attempts were lost" in capsys.readouterr().err


def test_the_words_of_a_conversation_that_is_too_long_are_those_that_clients_look_for() -> None:
    """litellm begins its fallbacks at these texts alone (`is_error_str_context_window_exceeded`)."""
    long = {"model": "final", "max_tokens": 4, "messages": [{"role": "user", "content": "word " * 300}]}
    with served(tokens=256) as address:
        url = address.removeprefix("openai:")
        plain = httpx.post(f"{url}/chat/completions", json=long, timeout=60)
        anthropic = httpx.post(f"{url}/messages", json=long, timeout=60)
        huge = httpx.post(f"{url}/messages", json=long | {"messages": [{"role": "user", "content": "x" * 10**6}]})
        model = httpx.get(f"{url}/models").json()["data"][0]
    assert [plain.status_code, anthropic.status_code, huge.status_code, model["max_model_len"]] == [400, 400, 400, 256]
    error = plain.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 256 tokens" in error["message"].lower()
    for answer in (anthropic, huge):
        message = answer.json()["error"]["message"]
        assert message.startswith("prompt is too long: ") and message.endswith(" tokens > 256 maximum")


def test_an_evaluation_is_pinned_to_its_harness(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The digest follows the harness alone; another harness neither evaluates nor resumes, and a comparison says so."""
    harness = provenance.harness_digest()
    script, settings = "scripted:searcher", bench_settings("scripted:searcher", tasks, {"harness": harness[:12]})
    assert evaluate(script, tasks, tmp_path / "old", samples=1, settings=settings)["harness"] == harness
    (tmp_path / "package/harness").mkdir(parents=True)
    (tmp_path / "package/harness/tool.py").write_text("changed")
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "package")
    monkeypatch.setattr(provenance, "EVALUATION", ["harness"])
    provenance.harness_digest.cache_clear()
    changed = provenance.harness_digest()
    (tmp_path / "package/labs.py").write_text("not the harness")
    provenance.harness_digest.cache_clear()
    try:
        assert provenance.harness_digest() == changed != harness
        with pytest.raises(ValueError, match=rf"eval\.harness={harness[:12]}: this harness is {changed}"):
            evaluate(script, tasks, tmp_path / "new", samples=1, settings=settings)
        with pytest.raises(ValueError, match="holds rollouts of another policy, backend, harness"):
            evaluate(script, tasks, tmp_path / "old", samples=1)
        evaluate(script, tasks, tmp_path / "new", samples=1)
    finally:
        provenance.harness_digest.cache_clear()
    assert compare_evals(tmp_path / "old", tmp_path / "new")["harness"] == [harness, changed]
    assert "evaluated by different harnesses" in caplog.text
