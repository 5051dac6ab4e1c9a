"""Rollouts as trajectories keep the rules of ATIF, which `atif.json` has from the words of its RFC 0001, and lose no token."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from composer_nb import cli
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.policy import Completion, Trace
from composer_nb.harness.rollout import Kind, Rollout, Transcript, Turn
from composer_nb.production.atif import trajectory
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.recipe.reader import EXAMPLES, ReadOnly
from composer_nb.views import rollouts
from tests.test_cli import TASK

SCHEMA = jsonschema.Draft202012Validator(json.loads(Path(__file__).with_name("atif.json").read_text()))


def require_valid(document: dict[str, Any]) -> None:
    """Assert the schema, and its rules between fields: steps in sequence, results of calls of the same step, counts."""
    SCHEMA.validate(document)
    steps, totals, ids = document["steps"], document["final_metrics"], list[str]()
    assert [step["step_id"] for step in steps] == [*range(1, totals["total_steps"] + 1)]
    for step in steps:
        calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
        results = step.get("observation", {"results": ()})["results"]
        assert [result["source_call_id"] for result in results if "source_call_id" in result] == calls
        ids += calls
    assert len(ids) == len({*ids})
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    for kind in ("prompt", "completion"):
        counts = [part[f"{kind}_tokens"] for part in metrics]
        assert counts == [len(part[f"{kind}_token_ids"]) for part in metrics]
        assert totals[f"total_{kind}_tokens"] == sum(counts)
    assert all(len(part["logprobs"]) == part["completion_tokens"] for part in metrics)


def test_stored_rollouts_are_valid_and_have_every_token(tmp_path: Path, capsys: Any) -> None:
    export = ["rollouts", str(EXAMPLES[0]), "--where", "calls > 8", "--json", "--atif", str(tmp_path / "new")]
    assert cli.main(export) == 0
    rows, files = json.loads(capsys.readouterr().out), sorted((tmp_path / "new").iterdir())
    stored = rollouts.search(ReadOnly(EXAMPLES[0]), "", "calls > 8")
    assert len(rows) == len(files) == len(stored) > 9
    for file, row, one in zip(files, rows, stored, strict=True):
        document, [segment] = json.loads(file.read_text()), one.attempt.rollout.segments
        require_valid(document)
        assert document["extra"].items() >= row.items() and document["extra"]["tests"] == one.attempt.grade.tests
        metrics = [step["metrics"] for step in document["steps"] if step["source"] == "agent"]
        for name, stream in (("completion_token_ids", segment.token_ids), ("logprobs", segment.logprob)):
            assert [value for part in metrics for value in part[name]] == stream[segment.acted].tolist()
        last = metrics[-1]["prompt_token_ids"] + metrics[-1]["completion_token_ids"]
        assert last == segment.token_ids[: len(last)].tolist()
        calls = [call["function_name"] for step in document["steps"] for call in step.get("tool_calls", [])]
        assert len(calls) == sum(turn.call.startswith("{") for turn in one.attempt.rollout.turns)
    assert cli.main(export) == 2 and "File exists" in capsys.readouterr().err


TOKENIZER = load_tokenizer(EXAMPLES[0] / "data", needed=())


def summarised() -> dict[str, Any]:
    """Return the trajectory of a rollout of two segments, with a question, an invalid call and a failure at its end."""
    segments = []
    for kinds in ([Kind.THINKING, Kind.TOOL_CALL], [Kind.SUMMARY]), ([Kind.FINAL_MESSAGE], [Kind.TOOL_CALL]):
        transcript = Transcript()
        for number, kind in enumerate(kinds):
            transcript.read([40, 41], Kind.OBSERVATION if number else Kind.PROMPT)
            size, tokens = len(kind), [*range(50, 50 + len(kind))]
            said = Completion(rollout=0, token_ids=tokens, logprobs=[-0.5] * size, policy_versions=[3] * size)
            transcript.wrote(said, kind)
        segments.append(transcript.segment(Trace(), len(segments) - 1))
    turns = (
        Turn(call='{"name": "grep", "arguments": {"pattern": "x"}}', observation="a.py", said="I look."),
        Turn(call='{"name": "read_file"}', observation="text", beside=True),
        Turn(call="", observation="The first.", said="Which one?"),
        Turn(call="grep(", observation="no JSON", error="InvalidArguments"),
        Turn(call="", observation="503", error="ProviderError"),
    )
    rollout = Rollout(task_id=TASK.id, segments=tuple(segments), turns=turns, files={}, stop="infrastructure")
    return trajectory(Attempt(task=TASK, rollout=rollout, grade=Grade(status="infra_error")), TOKENIZER, "run 0", {})


def test_summaries_answers_and_what_is_no_call_have_their_steps() -> None:
    require_valid(document := summarised())
    sources = [step["source"] for step in document["steps"]]
    assert sources == ["user", "agent", "agent", "system", "agent", "user", "agent", "system"]
    _, message, summary, compaction, question, answer, invalid, failure = document["steps"]
    assert message["reasoning_content"] == TOKENIZER.decode([50]) and len(message["tool_calls"]) == 2
    assert summary["message"] == TOKENIZER.decode([50]) and summary["metrics"]["prompt_tokens"] == 6
    assert compaction["extra"]["context_management"] == {"type": "compaction", "boundary": "replace"}
    assert (question["message"], answer["message"], failure["message"]) == ("Which one?", "The first.", "503")
    assert invalid["observation"]["results"][0]["extra"] == {"error": "InvalidArguments", "call": "grep("}
    assert question["metrics"]["extra"] == {"policy_versions": [3]}


def test_the_package_harbor_takes_it() -> None:
    theirs = pytest.importorskip(
        "harbor.models.trajectories", reason="harbor needs Python 3.12: pip install harbor lifts it"
    )
    assert theirs.Trajectory(**summarised()).to_json_dict() == summarised()
