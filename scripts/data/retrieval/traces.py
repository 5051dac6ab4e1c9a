"""What search should have found at each step of a rollout: steps -> (query, spans), labels to train its embedding on.

At a step the agent says what it wants to know. The spans that answer are those it edited later, and those that it read later in
files that it edited after reading them: it needed them, whatever way it found them. (Cursor, "Improving agent with semantic
search", 2025, lets a model rank what would have helped; the later edits are what such a ranking has to go by.)

Lines are those of the files as they were when the rollout began, since that is what an index for it holds.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Turn
from composer_nb.harness.store import load_attempts
from composer_nb.harness.tasks.task import load_tasks

from .questions import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A part of a file; both ends are included."""

    path: str
    first: int
    last: int

    def meets(self, other: Lines) -> bool:
        return self.path == other.path and self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a call searched for, and the lines that it read or edited."""

    query: str = ""
    read: Lines | None = None
    edited: Lines | None = None


def labels(steps: Sequence[Step]) -> Iterator[tuple[str, tuple[Lines, ...]]]:
    """Yield every query of a rollout with what answers it, the edited lines first; queries that nothing answers are left out."""
    for start, step in enumerate(steps):
        if not step.query.strip():
            continue
        answers: list[Lines] = [later.edited for later in steps[start:] if later.edited]
        for index in range(start, len(steps)):
            lines_read = steps[index].read
            if lines_read and any(later.edited and later.edited.path == lines_read.path for later in steps[index:]):
                answers.append(lines_read)
        apart = [
            lines for index, lines in enumerate(answers) if not any(lines.meets(earlier) for earlier in answers[:index])
        ]
        if apart:
            yield step.query, tuple(apart)


def steps_of(instruction: str, turns: Sequence[Turn], files: Mapping[str, str]) -> list[Step]:
    """Return the steps of a stored rollout: the instruction is the first query, then the queries of `codebase_search`.

    Calls that failed, that nobody knows, or that name what `files` (the workspace at the start) lacks are steps that ask
    and touch nothing.
    """
    return [Step(query=instruction), *(_step(turn, files) for turn in turns)]


def _step(turn: Turn, files: Mapping[str, str]) -> Step:
    try:
        call = json.loads(turn.call)
        name, arguments = call["name"], dict(call["arguments"])
    except (ValueError, KeyError, TypeError):
        return Step()
    path = arguments.get("path") or arguments.get("target_file") or arguments.get("file_path")
    if name == "codebase_search":
        return Step(query=str(arguments.get("query", "")))
    if turn.error is not None or not isinstance(path, str) or path not in files:
        return Step()
    count = files[path].removesuffix("\n").count("\n") + 1
    match name, arguments:
        case "read_file", _:
            first = _whole(arguments.get("offset"), 1, count)
            return Step(
                read=Lines(
                    path=path,
                    first=first,
                    last=_whole(first + _whole(arguments.get("limit"), count, count) - 1, count, count),
                )
            )
        case "edit_line", {"line": int(line)} if 1 <= line <= count:
            return Step(edited=Lines(path=path, first=line, last=line))
        case "search_replace", {"old_string": str(old)} if old and files[path].count(old) == 1:
            first = files[path][: files[path].index(old)].count("\n") + 1
            return Step(edited=Lines(path=path, first=first, last=first + old.removesuffix("\n").count("\n")))
    return Step()


def _whole(value: object, default: int, most: int) -> int:
    """A number of lines between 1 and `most`."""
    return min(max(value, 1), most) if isinstance(value, int) else default


def trace_questions(instruction: str, turns: Sequence[Turn], files: Mapping[str, str]) -> list[Question]:
    """Return a rollout's labels as questions of the kind `trace`, one for each span."""
    return [
        Question(text=query, path=span.path, first=span.first, last=span.last, kind="trace")
        for query, spans in labels(steps_of(instruction, turns, files))
        for span in spans
    ]


def traced(attempts: Sequence[Attempt]) -> tuple[dict[str, bytes], list[Question]]:
    """Return a repository as the solutions of its tasks leave it, and what rollouts on these tasks ask of it.

    A question's lines are where they stand in the repository, which all tasks share. Raises ValueError for no attempts.
    """
    if not attempts:
        raise ValueError("no rollouts")
    final_texts: dict[str, str] = {}
    for attempt in attempts:
        final_texts |= {path: text for path, text in attempt.task.files.items() if path not in final_texts}
    for attempt in attempts:
        final_texts |= attempt.task.solution
    questions = [
        followed(question, attempt.task.files[question.path], final_texts[question.path])
        for attempt in attempts
        for question in trace_questions(attempt.task.instruction, attempt.rollout.turns, attempt.task.files)
    ]
    return {path: text.encode() for path, text in final_texts.items()}, list(dict.fromkeys(questions))


def read_traces(tasks: Path, rollouts: Path) -> tuple[dict[str, bytes], list[Question]]:
    """`traced` of the tasks in a file as `tasks make` writes it, and of the rollouts in one as `eval` keeps them
    (`OUT/ARM/rollouts.parquet`). Raises ValueError for damaged files, or other tasks' rollouts."""
    return traced(load_attempts(rollouts, {task.id: task for task in load_tasks(tasks)}))


def followed(question: Question, old_text: str, new_text: str) -> Question:
    """Return the same question about another state of its file: lines that differ are those that they became."""
    blocks = difflib.SequenceMatcher(None, old_text.split("\n"), new_text.split("\n"), autojunk=False).get_opcodes()

    def moved(line: int, last: bool) -> int:
        for _, start, end, new_start, new_end in blocks:
            if start <= line < end:
                if end - start == new_end - new_start:
                    return new_start + line - start
                return new_end - 1 if last else new_start
        raise ValueError(f"{question.path} has no line {line + 1}")

    end = new_text.count("\n")  # what stood at the end of the file may be gone
    first = min(moved(question.first - 1, last=False), end)
    return replace(question, first=first + 1, last=max(first, min(moved(question.last - 1, last=True), end)) + 1)
