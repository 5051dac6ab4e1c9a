"""What a notebook shows of an agent: text of others is text, buttons do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_nb.harness.rollout import Turn
from composer_nb.production.agents import run_agent
from composer_nb.production.work import Work
from composer_nb.views import agent

SCRIPT = [
    {
        "text": "<b>I</b> change it.",
        "calls": [{"name": "write", "arguments": {"file_path": "new.py", "contents": "a = 1 < 2\n"}}],
    },
    {"calls": [{"name": "read_file", "arguments": {"target_file": "<img src=x>"}}]},
    {"text": "Done."},
]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "old.py").write_text("x = 1\n")
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    return run_agent(tmp_path / "mine", "do it", f"scripted:{tmp_path / 'script.json'}", tmp_path / "out")


def test_a_conversation_and_a_diff_are_text_and_nothing_else(work: Work) -> None:
    text = agent.conversation(work.conversation.turns).text
    assert "&lt;b&gt;I&lt;/b&gt;" in text and "<b>" not in text and "<img" not in text and text.count("<details>") == 2
    assert "+a = 1 &lt; 2" in (text := agent.diff(work.diff).text) and "#00996622" in text


@pytest.mark.parametrize("clicked", ["Accept", "Reject"])
def test_a_click_decides_once(work: Work, clicked: str) -> None:
    widget = agent.verdict(work)
    yes, no, said = widget.children[1].children
    assert json.loads((work.path / "verdict.json").read_text())["verdict"] == "open"
    {"Accept": yes, "Reject": no}[clicked].click()
    assert (work.source.root / "new.py").exists() == (clicked == "Accept")
    assert said.value.startswith(clicked.lower()) and yes.disabled and no.disabled


def test_a_conflict_is_said_and_can_still_be_rejected(work: Work) -> None:
    (work.source.root / "new.py").write_text("mine")
    yes, no, said = agent.verdict(work).children[1].children
    yes.click()
    assert "new.py" in said.value and not no.disabled and (work.source.root / "new.py").read_text() == "mine"


def test_pictures_are_drawn_of_anything_that_can_happen(work: Work) -> None:
    failed = Turn(call="", observation="no call", error="InvalidArguments", seconds=0.0)
    for turns in (work.conversation.turns, [], [failed]):
        assert agent.times(turns).png().startswith(b"\x89PNG")
    row = {"pass_at_1": 0.5, "ci95": [0.2, 0.8], "tool_calls_per_task": 3.0, "invalid_call_rate": 0.1}
    silent, lost = row | {"tool_calls_per_task": 0.0, "invalid_call_rate": None}, {"n_tasks": 0}
    solved, calls = agent.arms({"arms": {"all": row, "bash": silent, "none": lost}}).axes
    assert [text.get_text() for text in solved.texts] == ["–"] and len(solved.patches) == 3
    assert [bar.get_height() for bar in calls.patches] == pytest.approx([2.7, 0.0, 0.0, 0.3, 0.0, 0.0])
