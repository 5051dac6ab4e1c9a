"""What a run begins with: a checkpoint or none, tasks that are generated or one's own, and what is refused before it begins."""

import json
import re
import sys
import threading
from bdb import BdbQuit
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.formats import FORMATS
from composer_nb.harness.agent.scripts import turn
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.grading.plan import PLAN, GradePlan, digest, with_plan
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.tasks.runtime import PACKAGES
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.tour.expert import ScriptedPolicy
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.checkpoint import save_pretrained
from composer_nb.trainer.models.tokenizer import format_of
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe import recipe
from composer_nb.trainer.recipe.launch import new_run
from composer_nb.trainer.recipe.prepare import chunks, deal_tasks, make_data, make_tokenizer, own_tasks
from composer_nb.trainer.recipe.reader import EXAMPLES
from composer_nb.trainer.recipe.recipe import midtrain
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.rundir import create
from composer_nb.trainer.rl import score_groups
from composer_nb.trainer.services.journal import change_live
from composer_nb.trainer.settings import DataSettings, Settings, override

ALONE: dict[str, Any] = dict.fromkeys(
    ("midtrain.steps", "sft.steps", "data.demonstrations", "data.mistaken_demonstrations"), 0
)
"""Settings that leave out every stage before RL."""


@pytest.fixture
def checkpoint(tmp_path: Path, make_model: Callable[..., Model], tokenizer: Tokenizer) -> Path:
    """A random checkpoint with a tokenizer of the compact format, of 512 positions."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = make_model(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    save_pretrained(model, tmp_path / "model", tokenizer=tmp_path / "tokenizer.json")
    return tmp_path / "model"


def own_task(number: int, **changes: Any) -> Task:
    """Return a task that shares nothing with those of other numbers."""
    source = f"def f{number}(x):\n    return x + {number}\n"
    tests = {"hidden.py": "from f import f\n\n\ndef test_0():\n    assert f(1) == 2\n"}
    values: dict[str, Any] = {"id": f"own-{number}", "instruction": f"add {number}", "tests": tests}
    values |= {"files": {"f.py": source.replace("+", "-")}, "solution": {"f.py": source}, "source_scope": ("f.py",)}
    return Task(**values | changes)


def stages(path: Path, settings: Settings) -> Stages:
    return Stages(create(path / "runs", "run"), settings, Ranks(), Sandboxes(), lambda line: None)


# A checkpoint


def refused(folder: Path, **dotted: Any) -> str:
    """Return why there is no run with these settings: one line, before anything is made."""
    with pytest.raises((ValueError, OSError)) as error:
        new_run(folder / "runs", "run", override(Settings(), dotted))
    assert not (folder / "runs").exists() and "\n" not in str(error.value)
    return str(error.value)


def test_a_checkpoint_is_refused_where_it_does_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    messages: dict[str, dict[str, Any]] = {
        "model.start='gone': no such folder": {"model.start": "gone"},
        "config.json is missing": {"model.start": str(tmp_path)},
        "model.hidden_size=64: model.start has 32; leave it out": {"model.hidden_size": 64},
        "with env.renderer='qwen': ": {"env.renderer": "qwen"},
        "set model.start": {"env.renderer": "qwen", "model.start": ""},
    }
    for message, changes in messages.items():
        assert message in refused(tmp_path, **{"model.start": str(checkpoint), **ALONE, **changes})
    (checkpoint / "tokenizer.json").write_text("{")
    assert "damaged" in refused(tmp_path, **{"model.start": str(checkpoint)}, **ALONE)
    (checkpoint / "tokenizer.json").unlink()
    assert "a checkpoint needs its tokenizer beside it" in refused(
        tmp_path, **{"model.start": str(checkpoint)}, **ALONE
    )


def test_the_chat_format_is_the_tokenizers(checkpoint: Path, tokenizer: Tokenizer) -> None:
    assert format_of(checkpoint) == "compact"
    foreign = Tokenizer.from_str(tokenizer.to_str().replace("<|call|>", "<|gone|>"))
    foreign.save(str(checkpoint / "tokenizer.json"))
    with pytest.raises(ValueError, match="the tokens of no chat format.*composer-nb convert .* DIR --format qwen"):
        format_of(checkpoint)
    foreign.add_special_tokens(list(FORMATS["qwen"].tokens))
    foreign.save(str(checkpoint / "tokenizer.json"))
    assert format_of(checkpoint) == "qwen"


# Tasks of one's own


def test_dealing_is_deterministic_and_complete() -> None:
    tasks = [own_task(number) for number in range(100)]
    for data, sizes in ((DataSettings(), (20, 10, 70)), (DataSettings(heldout_tasks=4, tune_tasks=2), (4, 2, 94))):
        dealt = deal_tasks(tasks, data)
        assert {kind: len(part) for kind, part in dealt.items()} == dict(
            zip(("heldout", "tune", "rl"), sizes, strict=True)
        )
        assert sorted(task.id for part in dealt.values() for task in part) == sorted(task.id for task in tasks)
        assert deal_tasks(tasks[::-1], data) == dealt


def side(dealt: dict[str, list[Task]], tasks: Iterable[Task]) -> set[str]:
    ids = {task.id for task in tasks}
    return {kind for kind, part in dealt.items() if ids & {task.id for task in part}}


def test_tasks_that_have_something_in_common_stay_on_one_side() -> None:
    text = "def g(x):\n    return 2 * x\n\n\ndef f(x):\n    return x\n"
    other_source = "import os\n\n\ndef g(x):\n    return 2 * x\n"
    origin = {"repository": "r", "places": json.dumps(["a.py::g"])}
    pairs = [
        [own_task(200), own_task(201, instruction="add 200")],
        [own_task(210), own_task(211, solution={"f.py": "def f210(x):\n    return x + 210\n"})],
        [
            own_task(220, metadata=origin),
            own_task(221, metadata=origin | {"places": json.dumps(["a.py::g", "b.py::h"])}),
        ],
        [own_task(230, metadata={"structure": "s"}), own_task(231, metadata={"structure": "s"})],
        [
            own_task(240, files={"f.py": text.replace("2 *", "3 *")}, solution={"f.py": text}),
            own_task(241, files={"f.py": other_source.replace("2 *", "4 *")}, solution={"f.py": other_source}),
        ],
    ]
    tasks = [own_task(number) for number in range(20)]
    for data in (DataSettings(), DataSettings(heldout_tasks=2, tune_tasks=1)):
        dealt = deal_tasks([*tasks, *(task for pair in pairs for task in pair)], data)
        assert all(len(side(dealt, pair)) == 1 for pair in pairs)


def test_few_tasks_still_make_three_sides_and_fewer_are_refused() -> None:
    assert [len(part) for part in deal_tasks([own_task(n) for n in range(3)], DataSettings()).values()] == [1, 1, 1]
    alike = [own_task(number, instruction="same") for number in range(50)]
    dealt = deal_tasks([*alike, own_task(60), own_task(61)], DataSettings())
    assert [len(part) for part in dealt.values()] == [1, 1, 50]
    with pytest.raises(ValueError, match=r"env\.tasks: at least 3 tasks must share no instruction or place; 2 do"):
        deal_tasks([*alike, own_task(60)], DataSettings())


def test_tasks_that_cannot_be_trained_on_are_refused_before_there_is_a_run(tmp_path: Path) -> None:
    three = [own_task(number) for number in range(3)]
    script = own_task(4, grader="script", tests={"test.sh": "true"}, solution={})
    mismatched = planned(7).model_copy(update={"tests": {"test_f.py": "def test_1(): pass\n"}})
    messages = {
        "holds no task": [],
        "at least 3 tasks": three[:2],
        "task own-4: has the grader `script`": [*three, script],
        "task own-5: has no plan of its tests": [*three, own_task(5, **HIDDEN)],
        "env.tasks: task own-6: not a plan of hidden tests: ": [
            *three,
            own_task(6, **HIDDEN, metadata={PLAN: '{"x": 1}'}),
        ],
        "own-7: its plan was made for other hidden tests": [*three, mismatched],
        "in the image gone, which bwrap does not have": [*three, planned(8, image="gone")],
        "are missing or not those": [*three, planned(8, **{PACKAGES: "gone"})],
    }
    for message, tasks in messages.items():
        save_tasks(tasks, tmp_path / "tasks.jsonl")
        assert message in refused(tmp_path, **{"env.tasks": str(tmp_path / "tasks.jsonl")})
    assert "gone: no task file or folder here" in refused(tmp_path, **{"env.tasks": "gone"})


HIDDEN: dict[str, Any] = {"grader": "pytest", "tests": {"test_f.py": "def test_0(): pass\n"}}


def planned(number: int, **metadata: str) -> Task:
    """Return a task of the grader `pytest`, with its plan."""
    task = own_task(number, **HIDDEN, metadata=metadata)
    return with_plan(task, GradePlan(digest=digest(task), tests={}))


def test_tasks_of_ones_own_are_dealt_into_the_run_and_demonstrations_are_not_held_out(
    tmp_path: Path, checkpoint: Path
) -> None:
    tasks = [own_task(number) for number in range(30)]
    save_tasks(tasks, tmp_path / "tasks.jsonl")
    values = {**ALONE, "env.tasks": str(tmp_path / "tasks.jsonl"), "model.start": str(checkpoint)}
    s = stages(tmp_path, override(Settings(), {**values, "limits.tokens": 200}))
    make_tokenizer(s)
    make_data(s)
    dealt = deal_tasks(own_tasks(s.settings.env), s.settings.data)
    assert {kind: load_tasks(s.run.path / "data" / f"{kind}.jsonl") for kind in dealt} == dealt
    info = s.run.finished("data")
    assert info is not None and info["tasks"] == {"heldout": 6, "tune": 3, "rl": 21}
    assert not chunks(s.settings, dealt)
    demonstrating = override(s.settings, {"data.demonstrations": 5, "data.mistaken_demonstrations": 2048})
    chunk_of = {chunk.kind: chunk for chunk in chunks(demonstrating, dealt)}
    assert {kind: len(chunk.own_tasks) for kind, chunk in chunk_of.items()} == {"tune": 3, "mistaken": 21, "clean": 5}
    assert (
        side(dealt, [*chunk_of["clean"].own_tasks, *chunk_of["mistaken"].own_tasks]) == {"rl"}
        and chunk_of["mistaken"].mistake_rate == 0.5
    )


def test_the_tokenizer_knows_an_agents_words_and_rl_tasks_end_early(tmp_path: Path) -> None:
    small = {"heldout_tasks": 6, "structure_tasks": 0, "tune_tasks": 2, "rl_tasks": 6, "demonstrations": 1}
    values = {f"data.{name}": count for name, count in (small | {"mistaken_demonstrations": 24}).items()}
    s = stages(tmp_path, override(Settings(), {**values, "rl.steps": 2, "rl.prompts": 1}))
    with s.sandboxes:
        make_tokenizer(s)
        make_data(s)
    for text in ("grep", "undo", " <", "        "):
        assert len(s.tokenizer().encode(text, add_special_tokens=False).tokens) == 1
    turns = {kind: {task.metadata.get("max_turns") for task in s.tasks(kind)} for kind in ("heldout", "tune", "rl")}
    assert turns == {"heldout": {None}, "tune": {None}, "rl": {"7"}}


def test_a_checkpoint_rehearses_what_it_wrote_itself(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"heldout_tasks": 3, "structure_tasks": 0, "tune_tasks": 2, "rl_tasks": 4, "demonstrations": 4}
    values = {f"data.{name}": count for name, count in (small | {"mistaken_demonstrations": 0}).items()}
    values |= {"rl.steps": 1, "rl.prompts": 1, "sft.steps": 0, "model.start": str(checkpoint), "limits.tokens": 512}
    values |= {"midtrain.steps": 4, "midtrain.code_first": 1.0, "midtrain.rehearsal": 0.5, "engine.slots": 8}
    s = stages(tmp_path, override(Settings(), values))
    supervised: list[Any] = []
    monkeypatch.setattr(
        recipe, "supervise", lambda model, optimizer, batches, *_: supervised.append([*batches]) or iter(())
    )
    with s.sandboxes:
        for stage in (make_tokenizer, make_data, midtrain):
            stage(s)
    own_rows = s.rows("own")
    begin, wrote = s.tokenizer().token_to_id("<|bos|>"), {row.token_ids.tobytes() for row in own_rows}
    assert all(len(row.token_ids) == 256 and row.token_ids[0] == begin for row in own_rows) and len(wrote) == len(
        own_rows
    )
    heldout = {row.token_ids.tobytes() for row in own_rows[: recipe.HELD]}
    rows = [row.token_ids.tobytes() for batch in supervised[0] for row in batch]
    assert 0.2 < sum(row in wrote for row in rows) / len(rows) < 0.8 and not heldout & {*rows}
    info = s.run.finished("midtrain")
    assert info is not None and info["own_loss_before"] < 5.2, "less than the 5.6 of a guess: it wrote this"
    with pytest.raises(ValueError, match=r"midtrain.rehearsal: needs model.start"):
        override(Settings(), {"midtrain.rehearsal": 0.5})


# An environment of one's own


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvSettings:
    """The environment of the documents, as a module that can be imported."""
    return EnvSettings(tasks=f"{module_of_the_page('Mine', tmp_path, monkeypatch)}:Mine")


def module_of_the_page(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a module in `folder` of the code that has a class of this name, with 3 tasks in place of 300; return its name."""
    page = (Path(__file__).parents[3] / "docs" / "rl.md").read_text(encoding="utf-8")
    [code] = [part for part in re.findall(r"```python\n(.*?)```", page, re.S) if f"class {kind}" in part]
    (folder / f"{kind.lower()}_of_the_docs.py").write_text(code.replace("300", "3"))
    monkeypatch.syspath_prepend(folder)
    return f"{kind.lower()}_of_the_docs"


def test_an_environment_of_ones_own_has_tasks_tools_and_a_reward(documented: EnvSettings, tokenizer: Tokenizer) -> None:
    tasks = own_tasks(documented)
    assert len(tasks) == 40 and all(deal_tasks(tasks, DataSettings()).values())
    read, count, end = (
        turn([ToolCall(name=name, arguments=arguments)])
        for name, arguments in (("read_file", {"path": "f.py"}), ("count_lines", {"path": "f.py"}), ("finish", {}))
    )
    mend = turn([ToolCall(name="edit_line", arguments={"path": "f.py", "line": 2, "text": "return x + 7"})])
    with Sandboxes() as sandboxes:
        agent = make_agent(documented, tokenizer, Limits(turns=20, tokens=4000), sandboxes)
        policy = ScriptedPolicy(agent.renderer, lambda rollout: (message for message in (read, count, mend, end)))
        [(_, attempt)] = drive([agent.attempt(tasks[6], 0)], policy, sandboxes)
    assert attempt.grade.passed and attempt.rollout.turns[1].observation == "2" and not attempt.rollout.invalid_calls
    own_environment: Any = documented.own
    [[scored]] = score_groups([[attempt]], RewardSettings(), LossSettings(), own_environment.reward)
    assert scored.reward.total == pytest.approx(0.96) and scored.reward.terms == {"own": pytest.approx(0.96)}


def test_another_tool_at_the_tours_tasks_answers_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    module = module_of_the_page("FirstLine", tmp_path, monkeypatch)
    usual, changed = (EnvSettings(tasks=f"{module}:{kind}") for kind in ("Usual", "FirstLine"))
    tasks = own_tasks(usual)
    assert len(tasks) == 3 and [task.id for task in own_tasks(changed)] == [task.id for task in tasks]
    call = turn([ToolCall(name="grep", arguments={"pattern": "e"})])
    lines = []
    with Sandboxes() as sandboxes:
        for env in (usual, changed):
            agent = make_agent(env, tokenizer, Limits(turns=1, tokens=4000), sandboxes)
            policy = ScriptedPolicy(agent.renderer, lambda rollout: (message for message in [call]))
            [(_, attempt)] = drive([agent.attempt(tasks[0], 0)], policy, sandboxes)
            lines.append(attempt.rollout.turns[0].observation.splitlines())
    assert len(lines[0]) > 1 and lines[1] == lines[0][:1]


def test_an_environment_of_ones_own_may_lie_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It comes last, so that no file there takes the place of a library."""
    (tmp_path / "env_of_mine.py").write_text("class Mine:\n    def tasks(self):\n        return []\n")
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert EnvSettings(tasks="env_of_mine:Mine").own.tasks() == []
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1
    for number, text in enumerate(("def", "raise SystemExit(0)", "raise RuntimeError('no\\nluck')", "")):
        (tmp_path / f"broken_{number}.py").write_text(f"{text}\n")
        with pytest.raises(ValueError, match=f"^env.tasks='broken_{number}:Mine': neither a path nor MODULE:CLASS .*$"):
            own_tasks(EnvSettings(tasks=f"broken_{number}:Mine"))


FAULTY = {
    # What `tasks` gives.
    "Raises": (
        "def tasks(self): raise ValueError('boom\\nand more')",
        r"tasks\(\) ended in ValueError: boom \(.*_env.py:\d+\)",
    ),
    "Exits": ("def tasks(self): raise SystemExit(0)", r"tasks\(\) ended in SystemExit: 0 \(.*_env.py:\d+\)"),
    "Empty": ("def tasks(self): return []", r"tasks\(\) has no task"),
    "Texts": ("def tasks(self): return ['fix f']", r"tasks\(\) must give Tasks, and gave str"),
    "Twice": ("def tasks(self): return [own_task(0), own_task(0)]", r"tasks\(\) gives the id 'own-0' more than once"),
    # What the class is.
    "Breaks": ("def __init__(self): raise RuntimeError('no data')", "can be imported .*RuntimeError.*no data"),
    "Names": ("tools = ['grep']", "tools must be a ToolSet, and is list"),
    "Number": ("reward = 1.0", r"reward must be called as reward\(rollout, grade\)"),
    # What its reward returns.
    "Fails": (
        "def reward(self, rollout, grade): return grade.nothing",
        r"Fails.reward.* ended in AttributeError: .*_env.py:\d+",
    ),
    "Nan": ("def reward(self, rollout, grade): return float('nan')", r"Nan.reward.* returned nan \(float\)"),
    "Stops": ("def reward(self, rollout, grade): breakpoint()", r"Stops.reward.*: breakpoint\(\) has no terminal "),
    "Blocks": ("def reward(self, rollout, grade): time.sleep(1e9)", r"did not return within \d s \(limits.seconds\)"),
}


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a run from the example's checkpoint on the classes of FAULTY, `Good` or `Tools`, as `env.tasks` names them."""
    bodies = {name: body for name, (body, _) in FAULTY.items()} | {
        "Good": "def reward(self, rollout, grade): return grade.passed + len(rollout.segments[0].token_ids) + rollout.calls",
        "Tools": "tools = ToolSet.tiny()",
    }
    head = "import time\nfrom composer_nb.harness.tools.toolset import ToolSet\n"
    head += "from tests.trainer.recipe.test_prepare import own_task\n"
    head += "class Tasks:\n    def tasks(self):\n        return [own_task(n) for n in range(9)]\n"
    classes = (f"class {name}(Tasks):\n    {body}\n" for name, body in bodies.items())
    (tmp_path / "faulty_env.py").write_text("\n".join([head, *classes]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty_env", raising=False)
    return ALONE | {"model.start": str(EXAMPLES[0] / "weights" / "final"), "limits.seconds": 1.0}


def no_terminal() -> None:
    """What `breakpoint()` does where it can read nothing."""
    raise BdbQuit


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_environment_is_one_line_before_the_run_starts(
    name: str, faulty: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = override(Settings(), faulty | {"env.tasks": f"faulty_env:{name}"})
    monkeypatch.setattr(sys, "breakpointhook", no_terminal)
    with pytest.raises(ValueError, match=FAULTY[name][1]) as caught:
        new_run(tmp_path / "runs", "run", settings)
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()
    if name == "Stops":
        new_run(tmp_path / "runs", "run", override(Settings(), faulty | {"env.tasks": "faulty_env:Good"}))
        stops = list[threading.Thread]()
        monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(threading.current_thread()))
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        with pytest.raises(ValueError, match="returned None"):
            new_run(tmp_path / "runs", "run", settings)
        assert stops == [threading.main_thread()], "a debugger in a terminal has all the time"


def test_a_setting_that_the_class_replaces_is_refused(faulty: dict[str, Any], tmp_path: Path) -> None:
    replaced = {"reward.weights": {"solved": 2.0}, "reward.effort.weight": 0.1, "env.tools": "cursor"}
    for name, value in replaced.items():
        environment = "faulty_env:Tools" if name == "env.tools" else "faulty_env:Good"
        settings = override(Settings(), faulty | {"env.tasks": environment})
        with pytest.raises(ValueError, match=f"^{name}: has no effect, because env.tasks='{environment}' has"):
            new_run(tmp_path / "runs", "run", override(settings, {name: value}))
        if name != "env.tools":
            with pytest.raises(ValueError, match=f"^{name}: has no effect"):
                change_live(settings, name, value)
