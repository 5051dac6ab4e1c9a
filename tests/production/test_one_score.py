"""One policy has one score, whether `eval` opens its folder or asks `composer-nb serve`, and lost attempts are no footnote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from composer_nb.cli import main
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks
from composer_nb.production.agents import bench_settings, evaluate
from composer_nb.production.conversations import Conversations
from composer_nb.production.policies import open_engine
from composer_nb.production.serve import ChatServer

EXAMPLE = Path(__file__).parents[2] / "data/example"
POLICY = EXAMPLE / "weights" / "final"
HELD_OUT = load_tasks(EXAMPLE / "data" / "heldout.jsonl")


@contextmanager
def served(tokens: int = 32_768) -> Iterator[str]:
    with open_engine(POLICY, slots=4, tokens=tokens) as engine:
        answer = Conversations(engine.shared, engine.tokenizer, engine.format, engine.tokens)
        with ChatServer(answer, model="final", trained=engine.known, context=engine.tokens) as server:
            yield f"openai:{server.url}"


def attempts(out: Path) -> list[dict[str, Any]]:
    """Return all that an evaluation stored of its attempts but tokens and times."""
    files = sorted(out.glob("*/*.parquet"))
    names = ["task_id", "stop", "status", "passed", "tests", "turns", "files"]
    rows = [row for file in files for row in pq.read_table(file, columns=names).to_pylist()]
    for row in rows:
        row["turns"] = [{**turn, "seconds": 0.0} for turn in json.loads(row["turns"])]
    return rows


def both(tasks: list[Task], out: Path, arms: str) -> None:
    rows, reports = [], []
    with served() as address:
        for name, policy in (("folder", str(POLICY)), ("served", address)):
            settings = bench_settings(policy, tasks, {})
            report = evaluate(policy, tasks, out / name, samples=2, greedy=True, arms=arms, settings=settings)
            rows.append(attempts(out / name))
            reports.append(report["arms"])
    assert rows[0] == rows[1]
    for arm, scores in reports[0].items():
        counted = ("tokens_per_task", "sampled_per_task", "seconds_p50", "seconds_p95")
        assert {n: v for n, v in scores.items() if n not in counted} == {
            n: v for n, v in reports[1][arm].items() if n not in counted
        }
        assert scores["infra_errors"] == 0 and (arm == "all" or scores["invalid_call_rate"] > 0.3)


def test_a_policy_has_the_score_of_its_folder_behind_serve(tmp_path: Path) -> None:
    """Greedy and sampled, turn for turn: attempts that fill the context, and calls of a tool that was not offered."""
    both(HELD_OUT[4:6], tmp_path, "all,no-search")
    assert {"finished", "tokens"} <= {row["stop"] for row in attempts(tmp_path / "served")}


def test_a_server_with_less_context_ends_attempts_and_loses_none(tmp_path: Path) -> None:
    with served(tokens=200) as address:
        report = evaluate(address, HELD_OUT[:2], tmp_path, samples=1)
    assert report["infra_errors"] == 0 and report["stops"]["tokens"] >= 1


def test_too_many_lost_attempts_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer_nb.harness.agent.endpoint.LONGEST_WAIT_S", 0)
    save_tasks(HELD_OUT[:1], tmp_path / "tasks.jsonl")
    for where in (["--tasks", str(tmp_path / "tasks.jsonl")], ["--suite", "impossible:1"]):
        call = ["eval", "--policy", "openai:http://127.0.0.1:9/v1#m", *where, "--samples", "2", "--json"]
        assert main([*call, "--out", str(tmp_path / where[0])]) == 1
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
        other = httpx.post(f"{url}/messages", json=long, timeout=60)
        huge = httpx.post(f"{url}/messages", json=long | {"messages": [{"role": "user", "content": "x" * 10**6}]})
        listed = httpx.get(f"{url}/models").json()["data"][0]
    assert [plain.status_code, other.status_code, huge.status_code, listed["max_model_len"]] == [400, 400, 400, 256]
    error = plain.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 256 tokens" in error["message"].lower()
    for answer in (other, huge):
        said = answer.json()["error"]["message"]
        assert said.startswith("prompt is too long: ") and said.endswith(" tokens > 256 maximum")
