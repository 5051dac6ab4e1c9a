"""What a notebook shows of an agent: text of others is text, buttons do what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
from pixels import inked_share

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


def test_changes_are_drawn_by_verdict_with_their_kinds() -> None:
    kinds = [
        {"kind": "loop", "verdicts": {"kept": 2, "unseen": 1}},
        {"kind": "swap", "verdicts": {"kept": 1}},
        {"kind": "operator", "verdicts": {"too much": 90}},
    ]
    picture = agent.verdicts(kinds[:2])
    [ax] = picture.axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["kept (3): tests notice it, each time", "unseen (1): no test notices it"]
    assert [text.get_text() for text in ax.texts] == ["loop", "swap", "loop"] and inked_share(picture.png()) > 0.1
    assert [text.get_text() for text in agent.verdicts(kinds).axes[0].texts] == ["operator"]


@pytest.mark.parametrize("clicked", ["Accept", "Reject"])
def test_a_click_decides_once(work: Work, clicked: str) -> None:
    widget = agent.verdict(work)
    yes, no, message = widget.children[1].children
    assert json.loads((work.path / "verdict.json").read_text())["verdict"] == "open"
    {"Accept": yes, "Reject": no}[clicked].click()
    assert (work.source.root / "new.py").exists() == (clicked == "Accept")
    assert message.value.startswith(clicked.lower()) and yes.disabled and no.disabled


def test_a_conflict_is_said_and_can_still_be_rejected(work: Work) -> None:
    (work.source.root / "new.py").write_text("mine")
    yes, no, message = agent.verdict(work).children[1].children
    yes.click()
    assert "new.py" in message.value and not no.disabled and (work.source.root / "new.py").read_text() == "mine"


def test_no_point_beats_those_of_the_front() -> None:
    points = [(3.0, 0.5), (1.0, 0.2), (2.0, 0.2), (2.0, 0.6), (4.0, 0.6), (5.0, 0.7)]
    assert agent.front(points) == [1, 3, 5] and agent.front([]) == []


def row(score: float, tokens: float, dollars: float | None = None, n_tasks: int = 4) -> dict[str, Any]:
    costs = {"tokens_per_task": tokens, "seconds_p50": 1.0, "dollars_per_task": dollars}
    return costs | {"pass_at_1": score, "ci95": [score - 0.1, score + 0.1], "n_tasks": n_tasks}


def test_score_against_the_costs_that_all_arms_have() -> None:
    lost = {"n_tasks": 0}
    first, second = (
        {"arms": {"all": row(0.5, 100), "bash": lost}},
        {"arms": {"all": row(0.4, 900, 0.1), "b$sh": row(0.6, 50)}},
    )
    picture = agent.pareto({"o$ne": first, "two": second})
    tokens, seconds = picture.axes
    points = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in tokens.lines}
    assert points[r"o\$ne, all"] == (100, 0.5) and points["two, all"] == (900, 0.4) and len(seconds.lines) == 7
    assert [list(tokens.lines[0].get_xdata()), list(tokens.lines[0].get_ydata())] == [[50], [0.6]], "it beats all"
    assert inked_share(picture.png()) > 0.003
    assert len(agent.pareto({"priced": {"arms": {"all": row(0.5, 9, 0.1)}}}).axes) == 3
    assert "no score yet" in agent.pareto({"one": {"arms": {"bash": lost}}}).axes[0].texts[0].get_text()
