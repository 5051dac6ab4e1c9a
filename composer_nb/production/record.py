"""Conversations that were served, as rollouts: stored as RL stores its own, and graded when their grade is known.

A conversation is a rollout, whoever carried out its calls. Where an agent rewrote its history a branch begins: a further segment,
which names its parent. It reads the tokens that both share, so that each sampled token trains once.

    RUN/data/tokenizer.json     RUN/rollouts/served_<name>.parquet, .safetensors
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Message, User
from composer_nb.harness.files import write_atomic
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.policy import Completion, Trace
from composer_nb.harness.rollout import Kind, Rollout, Segment, Transcript, Turn
from composer_nb.harness.store import load_attempts, save_attempts
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.untrusted import parquet

# Names of rollouts.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"


class Verdict(BaseModel):
    """A judgement of a rollout, made after it: a reward, or the results of tests, of which the reward's terms make one.

    Attributes:
        reward: Read by the reward term `given`.
        task: Id of the task that was worked on; else the rollout's name.
        files: The workspace at the end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    tests: dict[str, bool] = {}
    status: Literal["graded", "tampered", "agent_failed", "infra_error", "invalid_task"] = "graded"
    task: str | None = None
    files: dict[str, str] = {}
    stop: Literal["finished", "turns", "tokens", "time", "interrupted", "infrastructure"] = "finished"

    def of(self, attempt: Attempt) -> Attempt:
        """Return an attempt with this verdict."""
        rewards = {} if self.reward is None else {"reward": self.reward}
        grade = Grade(status=self.status, tests=self.tests, rewards=rewards)
        name = self.task or attempt.task.id
        rollout = replace(attempt.rollout, task_id=name, files={**attempt.rollout.files, **self.files}, stop=self.stop)
        return Attempt(task=attempt.task.model_copy(update={"id": name}), rollout=rollout, grade=grade)


@dataclass(slots=True, kw_only=True, eq=False)
class ConversationRow:
    """A conversation, or a branch of one, while it goes on.

    Attributes:
        instruction: The user's first text.
        user: Name of the user, if it was told.
        number: Of the branch; 0 is where the conversation began.
        parent: Number of the branch that it leaves; −1: it begins anew.
    """

    name: str
    instruction: str = ""
    user: str = ""
    number: int = 0
    parent: int = -1
    transcript: Transcript = field(default_factory=Transcript)
    turns: list[Turn] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)

    def add(
        self, read: Sequence[int], news: Sequence[Message], turn: Completion, renderer: ChatRenderer, sampling: str = ""
    ) -> None:
        """Add a turn, and what was read before it. `sampling`: as for `Turn`."""
        texts = {message.id: message.text for message in news if isinstance(message, CallResult)}
        user = "\n\n".join(message.text for message in news if isinstance(message, User))
        last = max((index for index, call in enumerate(self.turns) if not call.beside), default=0)
        for index, text in zip(range(last, len(self.turns)), [*texts.values()] or [user], strict=False):
            self.turns[index] = replace(self.turns[index], observation=text)
        self.transcript.read(read, Kind.OBSERVATION if self.turns else Kind.PROMPT)
        self.transcript.wrote(turn, renderer.kinds(turn.token_ids))
        parsed = renderer.parse(turn.token_ids)
        self.turns += [
            Turn(
                call=written.call.json if isinstance(written.call, ToolCall) else written.text,
                observation="",
                error=None if isinstance(written.call, ToolCall) else "InvalidArguments",
                said="" if number else parsed.text,
                beside=number > 0,
                sampling=sampling,
            )
            for number, written in enumerate(parsed.calls)
        ] or [Turn(call="", observation="", said=parsed.text, sampling=sampling)]

    def branch(self, at: int, number: int) -> ConversationRow:
        """Return a branch that begins after `at` tokens."""
        row = ConversationRow(
            name=self.name, instruction=self.instruction, user=self.user, number=number, parent=self.number
        )
        row.transcript.read(self.transcript.token_ids[:at], Kind.PROMPT)
        return row

    def copy(self, at: int, other: ConversationRow) -> ConversationRow:
        """Return `other` with the conversation up to `at` tokens: as it was written if it ends there, else as tokens that it only
        reads."""
        if at < len(self.transcript.token_ids):
            other.transcript.read(self.transcript.token_ids[:at], Kind.PROMPT)
            return other
        return replace(other, transcript=deepcopy(self.transcript), turns=[*self.turns], trace=self.trace)

    def traced(self, trace: Trace) -> None:
        """Take the policy's records. Where tokens were forwarded twice, the first records stay: those of the sampling."""
        new = trace.head(len(self.transcript.token_ids))
        if len(new.route_valid) < len(self.transcript.token_ids):  # it read nothing, or keeps no records
            return
        self.trace = overlaid(self.trace, new)


def overlaid(first: Trace, later: Trace) -> Trace:
    """Return the records of a rollout whose tokens were forwarded twice, the first ones where there are such."""
    if len(later.route_valid) < len(first.route_valid) or not len(first.route_valid):
        return first if len(first.route_valid) else later
    merged = {column.name: getattr(later, column.name).copy() for column in fields(later)}
    for name, records in merged.items():
        earlier = getattr(first, name)
        records[: len(earlier)][first.route_valid] = earlier[first.route_valid]
    return Trace(**merged)


def _segments(rows: Sequence[ConversationRow]) -> tuple[Segment, ...]:
    """Return a conversation and its branches as segments with a record of every token, if the policy keeps any: a token whose
    record was lost, or that a turn read which then failed, counts as not forwarded."""
    position = {row.number: position for position, row in enumerate(rows)}
    like, segments = max((row.trace for row in rows), key=lambda trace: len(trace.route_valid)), []
    for row in rows:
        count, trace = len(row.transcript.token_ids), row.trace
        if len(like.route_valid):
            shapes = {column.name: getattr(like, column.name) for column in fields(like)}
            records = {name: np.zeros((count, *x.shape[1:]), x.dtype) for name, x in shapes.items()}
            for name, record in records.items() if len(trace.route_valid) else ():
                record[: len(trace.route_valid)] = getattr(trace, name)
            records["route_valid"][-1:] = False
            trace = Trace(**records)
        segments.append(row.transcript.segment(trace, position.get(row.parent, -1)))
    return tuple(segments)


Judged = Callable[[str, str, Sequence[Attempt]], None]


class RolloutRecord:
    """A folder of rollouts that were served: that of a run with this tokenizer, or a new one."""

    def __init__(self, run: Path, tokenizer: Tokenizer, judged: Judged | None = None) -> None:
        """`judged`: called with the name of each rollout that got a verdict, the digest of its user, or that name again, and the
        parts in which it is stored. Raises ValueError for a run with another tokenizer."""
        pa.array([0])  # imports pandas, for seconds: now, and not while requests are answered
        self.run, self.judged, tokenizer_file = run, judged, run / "data" / "tokenizer.json"
        if tokenizer_file.exists() and Tokenizer.from_file(str(tokenizer_file)).to_str() != tokenizer.to_str():
            raise ValueError(f"--record {run}: holds rollouts in the tokens of another model; give another folder")
        tokenizer_file.parent.mkdir(parents=True, exist_ok=True)
        (run / "rollouts").mkdir(exist_ok=True)
        write_atomic(tokenizer_file, tokenizer.to_str())

    def keep(self, name: str, rows: Sequence[ConversationRow]) -> None:
        """Store a conversation with its branches. What was stored before under this name stays."""
        rows = sorted(rows, key=lambda row: row.number)
        rollout = Rollout(
            task_id=name,
            segments=_segments(rows),
            turns=tuple(turn for row in rows for turn in row.turns),
            files={},
            stop="interrupted",
        )
        attempt = Attempt(task=_task(name, rows[0].instruction), rollout=rollout, grade=Grade(status="ungraded"))
        owner = next((user_digest(row.user) for row in rows if row.user), "")
        self._save(self._file(name, len(self._files(name))), attempt, owner)

    def grade(self, name: str, verdict: Verdict) -> int:
        """Note the grade of a stored rollout, and return the number of its segments. Raises KeyError if it is not stored."""
        if not (files := self._files(name)):
            raise KeyError(name)
        graded = [verdict.of(_loaded(file)) for file in files]
        for file, attempt in zip(files, graded, strict=True):
            self._save(file, attempt, _owner(file))
        if self.judged:
            self.judged(name, self.owner(name) or name, graded)
        return sum(len(attempt.rollout.segments) for attempt in graded)

    def owner(self, name: str) -> str:
        """Return the digest of the user whose stored rollout has this name; empty if there is none, or no user was told."""
        return next(filter(None, map(_owner, self._files(name))), "")

    def _save(self, file: Path, attempt: Attempt, owner: str) -> None:
        save_attempts(file, [attempt], {"instruction": [attempt.task.instruction], "user": [owner]})

    def _files(self, name: str) -> list[Path]:
        return [*takewhile(Path.exists, (self._file(name, part) for part in count()))]

    def _file(self, name: str, part: int) -> Path:
        return self.run / "rollouts" / f"served_{name}{f'+{part}' if part else ''}.parquet"


def user_digest(user: str) -> str:
    """Return what stands for a user in stored rollouts."""
    return hashlib.sha256(user.encode()).hexdigest()


def _owner(file: Path) -> str:
    if "user" not in pq.read_schema(file).names:
        return ""
    return str(pq.read_table(file, columns=["user"])["user"][0].as_py())


def keep_judged(run: Path, attempts: Sequence[Attempt], rewards: Sequence[float]) -> None:
    """Store attempts as served rollouts, each with the reward of a user who has nothing but its end to judge."""
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    for number, (attempt, reward) in enumerate(zip(attempts, rewards, strict=True)):
        file = run / "rollouts" / f"served_user{number}.parquet"
        named = replace(attempt, task=_task(f"user{number}", attempt.task.instruction))
        save_attempts(file, [Verdict(reward=reward).of(named)], {"instruction": [attempt.task.instruction]})


def served(run: Path) -> dict[str, Attempt]:
    """Return the served rollouts of a run by name. Raises ValueError that names a damaged file."""
    files = sorted((run / "rollouts").glob("served_*.parquet"))
    return {file.stem.removeprefix("served_"): _loaded(file) for file in files}


def _loaded(file: Path) -> Attempt:
    [named] = pq.read_table(parquet(file), columns=["task_id", "instruction"]).to_pylist()
    [attempt] = load_attempts(file, {named["task_id"]: _task(named["task_id"], named["instruction"])})
    return attempt


def _task(name: str, instruction: str) -> Task:
    # Not a task that would pass the checks of one: storing needs its name and files alone.
    return Task.model_construct(id=name, instruction=instruction, files={})
