"""Whether training and the product look the same, and whether the comparison would see it if they did not."""

from __future__ import annotations

import numpy as np
import pytest

from composer_nb.harness.agent.scripts import expert
from composer_nb.harness.product.fidelity import PLACES, differences, observations, probes, two_samples
from composer_nb.harness.sandbox.contract import Backend, Sandbox
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.toolset import NAMES, ToolSet
from composer_nb.harness.tools.workspace import Indexes

TOOLS = ToolSet.cursor(search=Indexes())


def test_every_tool_is_probed_and_answers_the_same(task: Task, backend: Backend) -> None:
    assert {call.name for call in probes(task.files)} - {"unknown_tool"} == set(NAMES)
    calls, found = differences(task, backend, TOOLS)
    assert calls > 25 and found == []


def test_a_difference_is_seen(task: Task, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_nb.harness.product import fidelity

    original = fidelity.open_in

    def marked(place: str, task: Task, backend: Backend) -> Sandbox:
        box = original(place, task, backend)
        if place == "product":
            box.write("README", b"dates \n")
        return box

    monkeypatch.setattr(fidelity, "open_in", marked)
    assert {each.tool for each in differences(task, backend, TOOLS)[1]} >= {"read_file"}


def test_the_time_of_writing_is_no_difference(task: Task, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one upload have different times when the clock ticks in between."""
    from composer_nb.harness.product import fidelity

    original = fidelity.open_in

    def slow(place: str, task: Task, backend: Backend) -> Sandbox:
        box = original(place, task, backend)
        if place == "product":
            for number, path in enumerate(sorted(task.files)):
                assert box.exec(["touch", "-d", f"@{number + 1}", path]).exit_code == 0
        return box

    monkeypatch.setattr(fidelity, "open_in", slow)
    assert differences(task, backend, TOOLS)[1] == []


def test_two_samples_of_one_kind_and_of_two(task: Task, backend: Backend) -> None:
    first, second = ([observations(place, task, backend, TOOLS, expert(task)) for _ in range(8)] for place in PLACES)
    same = two_samples(first, second)
    assert same.auc == pytest.approx(0.5) and same.chance > 0.5 and same.observations == 48
    told = [[f"{text} (in {n} ms)" for n, text in enumerate(talk)] for talk in second]
    apart = two_samples(first, told)
    assert apart.auc == 1.0 and apart.chance < 0.05
    with pytest.raises(ValueError, match="at least 5 pairs"):
        two_samples(first[:4], second)


def test_the_level_and_the_power_of_two_samples_in_pairs() -> None:
    """Conversations about one thing are alike within a pair; a word more in a part of one side's answers is to be found."""
    lot = np.random.default_rng(0)

    def talks(word: str, noise: float) -> list[list[str]]:
        topics = [f"topic {n} " * 5 for n in range(10)]
        return [
            [
                topic + ("other " if lot.random() < noise else "") + (word if lot.random() < 0.3 else "")
                for _ in range(4)
            ]
            for topic in topics
        ]

    false = [two_samples(talks("", 0.1), talks("", 0.1), seed, shuffles=39).chance for seed in range(40)]
    found = [two_samples(talks("", 0.05), talks("added", 0.05), seed, shuffles=39).chance for seed in range(20)]
    assert np.mean(np.array(false) <= 0.05) <= 0.15 and np.mean(np.array(found) <= 0.05) >= 0.4
