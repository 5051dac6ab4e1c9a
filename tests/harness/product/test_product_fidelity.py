"""Whether training and the product look the same, and whether the comparison would see it if they did not."""

from __future__ import annotations

import pytest

from composer_nb.harness.cursor.toolset import NAMES
from composer_nb.harness.product.fidelity import PLACES, differences, observations, probes, two_samples
from composer_nb.harness.product.scripts import expert
from composer_nb.harness.sandboxes.contract import Backend, Sandbox
from composer_nb.harness.search.workspace import Indexes
from composer_nb.harness.task import Task
from composer_nb.harness.tools import ToolSet

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


def test_two_samples_of_one_kind_and_of_two(task: Task, backend: Backend) -> None:
    first, second = ([observations(place, task, backend, TOOLS, expert(task)) for _ in range(8)] for place in PLACES)
    same = two_samples(first, second)
    assert same.auc == pytest.approx(0.5) and same.chance > 0.5 and same.observations == 48
    told = [[f"{text} (in {n} ms)" for n, text in enumerate(talk)] for talk in second]
    apart = two_samples(first, told)
    assert apart.auc == 1.0 and apart.chance < 0.05
    with pytest.raises(ValueError, match="at least 5"):
        two_samples(first[:4], second)
