"""The rollouts of a run as rows, and a search over them (`views.query`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from composer_nb.harness.monitors import DETECTORS
from composer_nb.trainer.recipe.reader import stored_steps
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views.query import selector
from composer_nb.views.rollout import StoredRollout, held_out, sampled

_MONITORS = {
    "edited a test": "edited_tests",
    "deleted an assertion": "deleted_assertions",
    "special-cased a test": "special_casing",
    "looks at tests": "looks_at_tests",
    "read the answer": "read_answer",
}


# What can be asked of a rollout, by words.
FLAGS: Mapping[str, Callable[[StoredRollout], bool]] = {
    "solved": lambda stored: stored.attempt.grade.passed,
    "tampered": lambda stored: stored.attempt.grade.status == "tampered",
    "invalid call": lambda stored: stored.attempt.rollout.invalid_calls > 0,
    **{words: lambda stored, name=name: DETECTORS[name](stored.attempt) for words, name in _MONITORS.items()},  # type: ignore[misc]
}
NAMES = frozenset({"rollout", "from", "group", "task", "solved", "reward", "advantage", "calls", "tokens", "ended"})


def row(number: int, stored: StoredRollout) -> dict[str, Any]:
    """Return the values of a rollout that a table shows."""
    rollout, grade = stored.attempt.rollout, stored.attempt.grade
    return {
        "rollout": number,
        "from": stored.name,
        "group": stored.group,
        "task": stored.attempt.task.id,
        "solved": "yes" if grade.passed else "no" if grade.known else grade.status,
        "reward": stored.reward,
        "advantage": stored.advantage,
        "calls": rollout.calls,
        "tokens": rollout.tokens,
        "ended": rollout.stop,
    }


def text(stored: StoredRollout) -> str:
    """Return the instruction, and what the agent wrote and read, for a search."""
    parts = (part for turn in stored.attempt.rollout.turns for part in (turn.said, turn.call, turn.observation))
    return "\n".join([stored.attempt.task.instruction, *parts])


def sources(run: RunDir) -> list[str]:
    """Return the names of what `rollouts` reads: stored RL steps, the newest first, `all` of them, and held-out policies."""
    steps = [f"step {number}" for number in reversed(stored_steps(run))]
    files = sorted((run.path / "rollouts").glob("eval_*.parquet"))
    policies = [file.stem.removeprefix("eval_") for file in files if not file.stem.endswith("_structures")]
    return [*steps, *["all steps"] * (len(steps) > 1), *policies]


def rollouts(run: RunDir, source: str = "") -> Iterator[StoredRollout]:
    """Yield the rollouts of one of `sources`; by default those of the last RL step that trained on something. Raises ValueError
    for another name."""
    names = sources(run)
    if source and source not in names:
        raise ValueError(f"{source!r}: {run.path.name} has rollouts of {', '.join(names) or 'nothing yet'}")
    if source == "all steps":
        for number in stored_steps(run):
            yield from sampled(run, number)
    elif source and not source.startswith("step "):
        yield from held_out(run, source).values()
    else:
        yield from sampled(run, int(source.removeprefix("step ") or -1))


def search(run: RunDir, source: str = "", where: str = "", most: int | None = None) -> list[StoredRollout]:
    """Return the first `most` rollouts that fit `where`, or all."""
    fits, fitting = selector(where, NAMES, text, FLAGS), list[StoredRollout]()
    for number, stored in enumerate(rollouts(run, source)):
        if fits(row(number, stored), stored):
            fitting.append(stored)
            if len(fitting) == most:
                break
    return fitting


def rows(fitting: Sequence[StoredRollout]) -> list[dict[str, Any]]:
    """Return a row for each rollout."""
    return [row(number, stored) for number, stored in enumerate(fitting)]
