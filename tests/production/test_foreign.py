"""Environments of verifiers and of OpenEnv, by the real libraries where they are installed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from composer_nb.cli import main
from composer_nb.production import foreign
from composer_nb.production.foreign import ForeignSettings, audit_verifiers, evaluate_foreign
from composer_nb.production.improve import conversations, grouped
from tests.production.test_foreign_audit import BEGIN
from tests.production.test_serve_record import recording

DOUBLES = """
import verifiers as vf
from datasets import Dataset

def load_environment():
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(5, 9)]

    def right(completion, answer, **kwargs):
        return float(WHEN)

    short = {"max_tokens": 16}
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), sampling_args=short)
"""
COUNTER = """
class Add(Action):
    number: int

class Adds(Base):
    def reset(self, seed=None, **kwargs):
        self.sum, self.steps = seed, 0
        return Seen(text=str(self.sum))

    def step(self, action, **kwargs):
        self.sum, self.steps = self.sum + action.number, self.steps + 1
        return self.over(str(self.sum), action.number, self.steps == 3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def doubles(folder: Path) -> Iterator[str]:
    pytest.importorskip("verifiers", reason="pip install 'verifiers<0.4' brings it")
    for name, when in {
        "sound": "completion[-1].content.strip() == answer",
        "loose": "answer in completion[-1].content",
    }.items():
        (folder / f"{name}_env.py").write_text(DOUBLES.replace("WHEN", when))
    yield "sound_env"


@pytest.mark.filterwarnings("ignore")
def test_audit_of_verifiers_finds_a_loose_rubric(doubles: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(row == {"tried": 4, "wrong": 0} for row in audit_verifiers(doubles)["probes"].values())
    assert main(["audit", "verifiers:sound_env"]) == 0 and main(["audit", "verifiers:loose_env"]) == 1
    assert "many numbers" in capsys.readouterr().out
    assert audit_verifiers("loose_env")["probes"]["many numbers"] == {"tried": 4, "wrong": 4}


def test_episodes_are_recorded_with_their_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No action of a policy that was never asked for JSON is valid, so each episode ends at its first turn."""

    class Act(BaseModel):
        number: int

    class Seen(BaseModel):
        done: bool = False

    class Room:
        def reset(self, seed: int) -> Seen:
            return Seen()

    monkeypatch.setattr(foreign, "load_openenv", lambda name: (Room(), Act))
    with recording(tmp_path / "run") as server:
        settings = ForeignSettings(grade=True, count=2)
        summary = evaluate_foreign(f"openai:{server.url}", "openenv:room:Room:Act", 2, settings)
    assert summary["reward"] == 0.0 and summary["n_tasks"] == 2
    attempts = [attempt for group in grouped(conversations(tmp_path / "run")) for attempt in group]
    assert sorted(attempt.task.id for attempt in attempts) == [f"openenv:room:Room:Act#{n // 2}" for n in range(4)]
    assert all(attempt.grade.rewards == {"reward": 0.0} and attempt.rollout.segments for attempt in attempts)


def test_a_policy_at_an_environment_of_openenv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openenv.core", reason="pip install openenv-core brings it")
    (folder / "counter_env.py").write_text(BEGIN + COUNTER)
    args = f"eval --policy scripted:{folder}/s.json --tasks openenv:counter_env:Adds:Add --samples 2".split()
    turns = {('{"number": 2}',): 6.0, ('I add {"number": 1} now', "done"): 1.0, ('{"number": "x"}',): 0.0}
    for texts, reward in turns.items():
        (folder / "s.json").write_text(json.dumps([{"text": text} for text in texts]))
        assert main([*args, "--set", "count=3", "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["reward"], summary["n_tasks"], summary["k"]) == (reward, 3, 2)
    assert main([*args, "--set", "limits.turns=2"]) == 2 and "limits.turns" in capsys.readouterr().err
