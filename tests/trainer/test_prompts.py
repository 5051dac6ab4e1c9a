"""The order of prompts under a curriculum: pure, nothing twice, harder kinds more often, tasks made of two that were solved."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.grading.grade import grade_functions
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.trainer import prompts as curricula

TEST = "from m{n} import f{n}\n\n\ndef test_{i}():\n    assert f{n}({i}) == {v}\n"


def task(n: int, family: str = "loop", turns: int = 7) -> Task:
    return Task(
        id=f"t{n}",
        instruction="fix the tests",
        files={f"m{n}.py": f"def f{n}(x):\n    return x - {n + 1}\n", f"test_f{n}.py": TEST.format(n=n, i=0, v=n + 1)},
        tests={f"hidden_f{n}.py": TEST.format(n=n, i=3, v=n + 4)},
        solution={f"m{n}.py": f"def f{n}(x):\n    return x + {n + 1}\n"},
        source_scope=(f"m{n}.py",),
        metadata={"family": family, "max_turns": str(turns)},
    )


KNOWN = {known_task.id: known_task for known_task in (task(n, ("easy", "hard")[n % 2]) for n in range(40))}


def order(prompts: int = 4, steps: int = 10, **curriculum: Any) -> curricula.Order:
    settings = curricula.CurriculumSettings(**{"start": 0.2, **curriculum})
    return curricula.Order(seed="0 0", prompts=prompts, steps=steps, curriculum=settings)


def run_through(of: curricula.Order, steps: int, solved: float = 1.0) -> list[list[str]]:
    """The prompts of each step of a run in which hard tasks take four times the turns, and half of them fail."""
    blocks: list[list[str]] = []
    tried: list[curricula.Tried] = []
    for step in range(steps):
        blocks.append(curricula.chosen(step, of, KNOWN, [name for block in blocks for name in block], tried))
        tried += [
            curricula.Tried(name, 8.0, 0.0, solved / 2)
            if "hard" in curricula.kind_of(curricula.named(name, KNOWN))
            else curricula.Tried(name, 2.0, 0.0, solved)
            for name in blocks[-1]
        ]
    return blocks


@settings(max_examples=30, deadline=None)
@given(harder=st.floats(0, 1), share=st.floats(0, 1), start=st.floats(0, 1), solved=st.sampled_from([0.0, 0.4, 1.0]))
def test_no_prompt_comes_twice_and_every_part_was_solved_before(
    harder: float, share: float, start: float, solved: float
) -> None:
    of = order(harder=harder * (1 - share), made=share, start=start)
    blocks = run_through(of, 9, solved)
    names = [name for block in blocks for name in block]
    assert len(names) == len(set(names)) == 36 and blocks == run_through(of, 9, solved)
    early = min(9, int(start * 10))
    assert [name for block in blocks[:early] for name in block] == list(KNOWN)[: 4 * early]
    parts = [part for name in names if name not in KNOWN for part in name.split("+")]
    assert len(parts) == len(set(parts)) and (solved == 1.0 or not parts)
    for step, block in enumerate(blocks):
        before = {name for earlier in blocks[:step] for name in earlier}
        assert all(set(name.split("+")) <= before for name in block if name not in KNOWN)


@pytest.mark.parametrize("by", ["effort", "failures"])
def test_kinds_that_took_more_effort_or_failed_come_more_often(by: str) -> None:
    shares = []
    for harder in (0.0, 1.0):
        blocks = run_through(order(prompts=2, steps=10, harder=harder, by=by), 8)
        late = [name for block in blocks[2:] for name in block]
        shares.append(Counter(KNOWN[name].metadata["family"] for name in late)["hard"] / len(late))
    assert shares[0] == 0.5 and shares[1] >= 0.8, "two to the power of two, against one half"


def test_a_task_made_of_two_is_solved_by_both_answers_and_by_no_one_of_them() -> None:
    merged = curricula.combined(task(1), task(2))
    assert merged.id == "t1+t2" and merged.instruction == "fix the tests" and merged.metadata["max_turns"] == "14"
    assert merged.metadata["difficulty"] == "2" and Task.model_validate(merged.model_dump()) == merged
    with SandboxExecutor() as boxes:
        for answer, passed in ((task(1).solution | task(2).solution, True), (task(1).solution, False), ({}, False)):
            assert grade_functions(merged, merged.files | answer, boxes).passed is passed
    hard = task(1).model_copy(update={"metadata": {"difficulty": "hard"}})  # foreign tasks say it in words
    assert curricula.combined(hard, task(2)).metadata["difficulty"] == "hard+1"
    with pytest.raises(ValueError, match="tasks t1 and t1 share files"):
        curricula.combined(task(1), task(1))


def test_prompts_are_on_record_and_never_chosen_anew(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "rollouts").mkdir()
    save_tasks(list(KNOWN.values()), tmp_path / "data" / "rl.jsonl")
    of = order(harder=0.5)
    first = curricula.prompt_order(tmp_path, of)
    plain = curricula.prompt_order(tmp_path, curricula.Order(seed="0 0"))
    assert [first[slot].id for slot in range(4)] == [plain[slot].id for slot in range(4)]
    file = tmp_path / "rollouts" / "prompts_00000.json"
    names = json.loads(file.read_text())
    file.write_text(json.dumps([f"{names[0]}+{names[1]}", *names[1:]]))
    reread = curricula.prompt_order(tmp_path, of)
    assert reread[0].id == f"{names[0]}+{names[1]}" == curricula.tasks_by_id(tmp_path)[reread[0].id].id
    assert [name for _, name in reread.places(4)] == [f"{names[0]}+{names[1]}", *names[1:]]
    assert not (tmp_path / "rollouts" / "prompts_00001.json").exists()
