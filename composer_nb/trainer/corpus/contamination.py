"""Find files that contain parts of the tasks that will score a model: their requests, gold patches and hidden tests.

A file is contaminated if it shares a run of `n` tokens with one of them (as in arXiv 2005.14165, appendix C, on tokens of code).
The workspace of a task is not secret: only those runs of a solution count that are not in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.corpus.duplicates import tokens

Run = tuple[str, ...]


def runs(words: Sequence[str], n: int) -> Iterator[Run]:
    """Yield every run of `n` neighbouring tokens."""
    return zip(*(words[at:] for at in range(n)), strict=False)


def secrets(tasks: Iterable[Task], n: int) -> dict[Run, str]:
    """Return the runs of `n` tokens that reveal a task, each with a task's id. A part with fewer tokens gives none."""
    found: dict[Run, str] = {}
    for task in tasks:
        shown = {run for text in task.files.values() for run in runs(tokens(text), n)}
        for text in (task.instruction, *task.tests.values(), *task.solution.values()):
            found |= {run: task.id for run in runs(tokens(text), n) if run not in shown}
    return found


def contaminated(texts: Sequence[tuple[str, str]], secret: Mapping[Run, str], n: int, common: int) -> dict[int, str]:
    """Return the places of those (repository, text) that share a run of `n` tokens with a task, and the task's id. Runs in more
    than `common` repositories are idioms and do not count."""
    users: dict[Run, set[str]] = defaultdict(set)
    shared: dict[int, set[Run]] = {}
    for place, (repository, text) in enumerate(texts if secret else ()):
        if hits := {run for run in runs(tokens(text), n) if run in secret}:
            shared[place] = hits
            for run in hits:
                users[run].add(repository)
    return {
        place: min(secret[run] for run in own)
        for place, hits in shared.items()
        if (own := [run for run in hits if len(users[run]) <= common])
    }
