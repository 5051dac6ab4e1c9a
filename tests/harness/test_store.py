"""Rollouts on disk: what is read is what was written, and damage is named."""

import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.agent.driver import drive
from composer_nb.harness.attempt import Agent
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.policy import Trace
from composer_nb.harness.rollout import Rollout, Segment, Turn
from composer_nb.harness.store import load_attempts, save_attempts
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.tour.expert import one

TEXT = st.text(max_size=10) | st.sampled_from(["\u2028", "\ud800", "\0", '"'])
TURNS = st.builds(
    Turn,
    call=TEXT,
    observation=TEXT,
    error=st.none() | st.sampled_from(["InvalidArguments", "UnexpectedEnvironment"]),
    tests_passed=st.none() | st.integers(0, 9),
    tests_run=st.none() | st.integers(0, 9),
)
GRADES = st.builds(Grade, status=st.just("infra_error")) | st.builds(
    Grade,
    status=st.just("graded"),
    tests=st.dictionaries(TEXT, st.booleans(), max_size=3),
    flags=st.lists(st.just("outside_scope"), max_size=1).map(tuple),
    calls=st.integers(0, 9),
    calls_failed=st.integers(0, 9),
)


def random_trace(size: int, random: np.random.Generator) -> Trace:
    return Trace(
        routes=random.integers(0, 256, (size, 2, 3)).astype(np.uint8),
        gates=random.random((size, 2, 3), np.float32),
        margins=random.random((size, 2), np.float32),
        route_valid=np.arange(size) < size - 1,
        checks=random.integers(0, 2**64, size, np.uint64),
    )


@st.composite
def pieces(draw: st.DrawFn, traced: bool, parent: int) -> Segment:
    size = draw(st.integers(0 if not traced else 1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Segment(
        token_ids=random.integers(0, 2**31 - 1, size).astype(np.int32),
        kind=random.integers(0, 6, size).astype(np.uint8),
        logprob=-random.random(size, np.float32),
        policy_version=random.integers(-1, 2**31 - 1, size).astype(np.int32),
        trace=random_trace(size, random) if traced else Trace(),
        parent=parent,
    )


@st.composite
def attempts(draw: st.DrawFn, task: Task, traced: bool) -> Attempt:
    parents = [-1, *(draw(st.integers(-1, n)) for n in range(draw(st.integers(0, 2))))]
    rollout = Rollout(
        task_id=task.id,
        segments=tuple(draw(pieces(traced, parent)) for parent in parents),
        turns=tuple(draw(st.lists(TURNS, max_size=3))),
        files=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
        stop=draw(st.sampled_from(["finished", "turns", "tokens", "time", "infrastructure"])),
    )
    return Attempt(task=task, rollout=rollout, grade=draw(GRADES))


def assert_same(actual: list[Attempt], expected: list[Attempt]) -> None:
    assert len(actual) == len(expected)
    for new, old in zip(actual, expected, strict=True):
        assert (new.task, new.grade) == (old.task, old.grade)
        assert replace(new.rollout, segments=()) == replace(old.rollout, segments=())
        assert new.rollout.before == old.task.files
        for a, b in zip(new.rollout.segments, old.rollout.segments, strict=True):
            assert a.parent == b.parent
            streams = ("token_ids", "kind", "logprob", "policy_version")
            pairs = [(getattr(a, name), getattr(b, name)) for name in streams]
            pairs += [(getattr(a.trace, f.name), getattr(b.trace, f.name)) for f in fields(Trace)]
            for left, right in pairs:
                assert left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right)


@settings(max_examples=40)
@given(data=st.data(), traced=st.booleans())
def test_what_is_written_is_read(task: Task, data: st.DataObject, traced: bool) -> None:
    second_task = task.model_copy(update={"id": "other"})
    strategy = st.sampled_from([task, second_task]).flatmap(lambda drawn_task: attempts(drawn_task, traced))
    expected = data.draw(st.lists(strategy, max_size=4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.parquet"
        save_attempts(path, expected)
        assert_same(load_attempts(path, {"other": second_task, task.id: task}), expected)
        assert sorted(entry.name for entry in Path(folder).iterdir()) == ["step.parquet", "step.safetensors"]


@pytest.fixture
def played(agent: Agent, task: Task, typist: Callable[..., Any], boxes: Callable[..., Any]) -> list[Attempt]:
    """Return two rollouts of the loop, without traces."""
    finish = agent.renderer.turn(one(ToolCall(name="finish", arguments={})))
    policy = typist(lambda rollout, turn: finish)
    return [attempt for _, attempt in drive((agent.attempt(task, n) for n in range(2)), policy, boxes("1"))]


def with_trace(attempt: Attempt) -> Attempt:
    [segment] = attempt.rollout.segments
    trace = random_trace(len(segment.token_ids), np.random.default_rng(0))
    return replace(attempt, rollout=replace(attempt.rollout, segments=(replace(segment, trace=trace),)))


def test_pandas_reads_it_with_the_columns_added(played: list[Attempt], tmp_path: Path) -> None:
    save_attempts(tmp_path / "a.parquet", played, {"reward": [0.5, None], "group": [0, 0]})
    frame = pd.read_parquet(tmp_path / "a.parquet")
    assert list(frame["task_id"]) == ["keep", "keep"] and list(frame["stop"]) == ["finished", "finished"]
    assert frame["reward"][0] == 0.5 and np.isnan(frame["reward"][1]) and not frame["passed"].any()
    [segment] = played[0].rollout.segments
    assert frame["token_ids"][0].tolist() == segment.token_ids.tolist()


OLDER = "segments parents read_tokens written_tokens seconds calls calls_failed timeouts rewards".split()


def test_columns_that_older_files_lack_are_one_segment_and_nothing_counted(
    played: list[Attempt], task: Task, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    save_attempts(path, played)
    pq.write_table(pq.read_table(path).drop_columns(OLDER), path)
    assert_same(load_attempts(path, {task.id: task}), played)


@pytest.mark.parametrize(("sizes", "parents"), [([1], [-1]), ([], []), (None, [-1, 0])])
def test_segments_that_do_not_fit_their_tokens_are_damage(
    played: list[Attempt], tmp_path: Path, sizes: list[int] | None, parents: list[int]
) -> None:
    path = tmp_path / "a.parquet"
    save_attempts(path, played[:1])
    frame = pd.read_parquet(path)
    frame["segments"] = [list(frame["segments"][0]) if sizes is None else sizes]
    frame["parents"] = [parents]
    frame.to_parquet(path)
    with pytest.raises(ValueError, match=r"a\.parquet: damaged or incomplete \(\d+ tokens, but segments of"):
        load_attempts(path, {"keep": played[0].task})


HARMS: list[Callable[[bytes], bytes | None]] = [lambda data: b"", lambda data: data[:-20], lambda data: None]


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_file_is_named(played: list[Attempt], task: Task, tmp_path: Path, suffix: str, harm: Any) -> None:
    path = tmp_path / "a.parquet"
    save_attempts(path, [with_trace(attempt) for attempt in played])
    file = path.with_suffix(suffix)
    data = harm(file.read_bytes())
    file.unlink() if data is None else file.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet: damaged or incomplete"):
        load_attempts(path, {task.id: task})
