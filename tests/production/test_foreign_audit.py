"""The audit of OpenEnv's environments: faults that are planted, one at a time, in sound ones."""

from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from composer_nb.production.foreign import ONE, RANDOM, audit_openenv, drawn

LIBRARY = """
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
"""
STAND_IN = """
from pydantic import BaseModel
class Action(BaseModel, extra="forbid"):
    metadata: dict = {}
class Observation(Action):
    done: bool = False
    reward: bool | int | float | None = None
State = Environment = object
"""
# Follows the library's classes, or these.
BEGIN = """
import random
from typing import Annotated, Literal
from pydantic import Field
class Seen(Observation):
    text: str
class Base(Environment):
    @property
    def state(self):
        return State()
    def over(self, text, reward=None, done=True):
        return Seen(text=text, reward=reward, done=done)
"""
GUESS = """
class Act(Action):
    number: Annotated[int, Field(ge=0, le=9)]
class Env(Base):
    def reset(self, seed=None, **kwargs):
        self.wanted, self.bonus = random.Random(seed).randrange(10), 0
        return Seen(text=f"{self.wanted} is wanted")
    def step(self, action, **kwargs):
        return self.over("over", float(action.number == self.wanted))
"""
ASKS = """
class Act(Action):
    answer: str
    sure: bool = False
class Env(Base):
    def reset(self, seed=None, **kwargs):
        a, b = random.Random(seed).choices(range(5, 100), k=2)
        self.answer, self.left = str(a + b), 3
        return Seen(text=f"What is {a} + {b}?")
    def step(self, action, **kwargs):
        right, self.left = action.answer == self.answer, self.left - 1
        return self.over("right" if right else "wrong", float(right), right or not self.left)
"""
WALK = """
class Act(Action):
    move: Literal["left", "stay", "right"]
class Env(Base):
    def reset(self, seed=None, **kwargs):
        self.away, self.left = random.Random(seed).choice([-6, -4, -3, 3, 4, 6]), 10
        return Seen(text=str(self.away))
    def step(self, action, **kwargs):
        before, self.left = abs(self.away), self.left - 1
        self.away += {"left": 1, "stay": 0, "right": -1}[action.move]
        return self.over(str(self.away), before - abs(self.away), not self.left or not self.away)
"""
GUESSED, ANSWERED = "float(action.number == self.wanted)", "float(right)"
PAID = ("the smallest action", "the request, repeated", "a refusal", "many numbers", "many choices", ONE, RANDOM)
PLANTED: dict[str, tuple[str, str, str, set[str]]] = {
    "a guess": (GUESS, "", "", set()),
    "a question": (ASKS, "", "", set()),
    "a walk": (WALK, "", "", set()),
    "a seed that is not used": (GUESS, "Random(seed)", "Random()", {"a new environment"}),
    "noise": (WALK, "before - abs(self.away)", "before - abs(self.away) + random.random()", {"a new environment"}),
    "what another episode left": (
        WALK,
        "before, self.left =",
        "self.moves = getattr(self, 'moves', 0) + 0.01\n        before, self.left = self.moves +",
        {"the same environment"},
    ),
    "what another environment left": (
        GUESS,
        "        return self.over(",
        "        Env.played = getattr(Env, 'played', 0) + 1\n        return self.over(str(Env.played) + ",
        {"a new environment"},
    ),
    "no end": (WALK, "not self.left or not self.away", "False", {"no end"}),
    "a reward that is no number": (GUESS, GUESSED, "float('nan')", {"no reward"}),
    "no reward": (ASKS, ANSWERED, "None", {"no reward"}),
    "an action that is valid and unknown": (
        GUESS,
        GUESSED,
        "{n: 0.0 for n in range(9)}[action.number]",
        {"an exception"},
    ),
    "pay for any answer": (ASKS, "action.answer == self.answer", "True", set(PAID)),
    "pay for an empty answer": (ASKS, "action.answer == self.answer", "not action.answer", {"the smallest action"}),
    "the answer anywhere": (ASKS, "action.answer == self.answer", "self.answer in action.answer", {"many numbers"}),
    "the same answer at every seed": (WALK, "[-6, -4, -3, 3, 4, 6]", "[3, 4, 5, 6, 7, 8, 9, 10, 11, 12]", {ONE}),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_environment(folder: Path, case: str) -> str:
    code, old, new, _ = PLANTED[case]
    assert old in code
    module = f"planted_{[*PLANTED].index(case)}"
    (folder / f"{module}.py").write_text(STAND_IN + BEGIN + (code.replace(old, new) if old else code))
    return f"{module}:Env:Act"


@pytest.mark.parametrize("case", PLANTED)
def test_what_is_planted_is_found_and_nothing_else_is_reported(case: str, folder: Path) -> None:
    report, faults = audit_openenv(write_environment(folder, case)), PLANTED[case][-1]
    assert faults <= set(report["faults"]) and bool(faults) == bool(report["faults"])
    assert all(kind in PAID for kind in report["faults"]) or set(report["faults"]) - faults <= {"the same environment"}
    assert bool(report["errors"]) == (faults == {"an exception"})


class Part(BaseModel):
    name: Annotated[str, Field(min_length=2, max_length=4)]
    size: Annotated[float, Field(gt=0, lt=1)]


class Wide(BaseModel):
    number: Annotated[int, Field(gt=3)]
    parts: Annotated[list[Part], Field(min_length=1, max_length=2)]
    choice: Literal["b", "c"] | None
    kind: Literal["k"] = "k"
    note: str = "none"
    more: dict[str, Any] = {}


def test_values_of_a_schema() -> None:
    schema = Wide.model_json_schema()
    models = [Wide.model_validate(drawn(schema, schema, Random(seed), "")) for seed in range(200)]
    assert {len(model.parts) for model in models} == {1, 2} and {model.choice for model in models} == {"b", "c", None}
    least = {"number": 4, "parts": [{"name": "aa", "size": 0}], "choice": "b"}
    assert drawn(schema, schema, None, "") == least
    arguments = drawn(schema, schema, None, "a text")
    assert arguments["note"] == "a text" and arguments["parts"][0]["name"] == "a te"
