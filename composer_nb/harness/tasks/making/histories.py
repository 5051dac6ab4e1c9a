"""Work with git, in a history made of a repository's own functions (`tasks/history.py`).

Two forms: one of several commits broke the tests, which are still there, and has to be undone; or two branches added neighbouring
functions, and their merge was left with its conflict. An answer has to be committed, on top of every commit that was there.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from random import Random

from composer_nb.harness.carry import add_history, commits_left
from composer_nb.harness.tasks.history import GIT_REPORT, import_stream, report
from composer_nb.harness.tasks.making.assignments import NEAR, assignments, behaving, hidden_of, task_of
from composer_nb.harness.tasks.making.changes import Change, Edit, Unit, bugs, text_of
from composer_nb.harness.tasks.making.trial import Assignment, NoTask, Subject, failing_keys, job_on, run_jobs
from composer_nb.harness.tasks.runtime import start_sandbox
from composer_nb.harness.tasks.task import COMMITS, Task

COUNT, DRAWS = 4, 3  # Commits after the first, and bugs that are tried for each.
MOST_CHARACTERS = 1 << 19  # Of a history, which is part of a task.toml.
Commits = list[tuple[str, str, dict[str, str]]]


def histories(subject: Subject) -> Iterator[Assignment]:
    """Yield candidates. Raises ValueError if sandboxes have no git."""
    with subject.backend.create(subject.spec) as box:
        if box.exec(["sh", "-c", "command -v git"]).exit_code:
            raise ValueError("--kinds git: sandboxes have no git; install it on this machine, or in the image")
    files = subject.repository.files
    units = [unit for unit in subject.reached if "\r" not in files[unit.path]]
    following = {unit: _following(subject, unit) for unit in units}

    def build(subject: Subject, unit: Unit) -> Task:
        neighbour = following[unit]
        if neighbour and Random(f"form {subject.seed} {unit.path} {unit.name}").random() < 0.5:
            return _conflict(subject, unit, neighbour)
        return _regression(subject, unit, units)

    return assignments("git", subject, build, units)


def _following(subject: Subject, unit: Unit) -> Unit | None:
    """Return the function after this one, of the same module or class, if tests reach it and nothing stands between the two."""
    lines, holder = subject.repository.files[unit.path].split("\n"), unit.name.rpartition(".")[0]
    for other in subject.reached:
        if (other.path, other.name.rpartition(".")[0]) == (unit.path, holder) and other.start > unit.end:
            between = "".join(lines[unit.end : other.start - 1])
            return None if between.strip() or other.name == unit.name else other
    return None


def _regression(subject: Subject, unit: Unit, units: Sequence[Unit]) -> Task:
    """Return the task to undo the one commit, of several to as many functions, that broke the tests."""
    files, rng = subject.repository.files, Random(f"regression {subject.seed} {unit.path} {unit.name}")
    planted: dict[Unit, Edit] = {}
    for candidate in (unit, *(other for other in rng.sample(units, len(units)) if other != unit)):
        if len(planted) < COUNT and (edit := _noticed_bug(subject, candidate)):
            planted[candidate] = edit
        elif not planted:
            break
    if len(planted) < COUNT:
        raise NoTask("unseen")
    paths = {other.path for other in planted}

    def state(broken: set[Unit]) -> dict[str, str]:
        """Return the files in which these functions are wrong."""
        edits = tuple(planted[other] for other in broken)
        return {path: files[path] for path in paths} | Change(kind="git", edits=edits, places=()).apply(files)

    broken = {*planted} - {unit}
    before = state(broken)
    commits: Commits = [("main", "Begin", before)]
    for other in rng.sample([*planted], COUNT):
        broken ^= {other}
        after = state(broken)
        changed = {path: after[path] for path in paths if after[path] != before[path]}
        commits.append(("main", f"Rework {other.name}", changed))
        before = after
    wordings = (
        f"one of the last {COUNT} commits broke the tests. find it, undo it with a new commit, and keep the others",
        f"Our tests pass no longer, because of one of the {COUNT} newest commits (see git log). Please revert that one and leave "
        "the others as they are. They are pushed, so history stays and the revert is committed on top.",
    )
    return _committed(subject, unit, wordings, commits, state(set()), [*planted])


def _noticed_bug(subject: Subject, unit: Unit) -> Edit | None:
    """Return a bug in a function that tests near it notice, as the lines with it; None if none of the first does."""
    keys = subject.baseline.nearest([unit.place])[: NEAR // COUNT]
    seconds = 6.0 + 4 * sum(subject.baseline.reach[key].seconds for key in keys)
    for change in islice(bugs(subject.repository.files, [unit], subject.seed), DRAWS):
        with suppress(NoTask):
            [ran] = run_jobs(subject, [job_on(subject, change.apply(subject.repository.files), keys)], seconds)
            if failing_keys(ran, keys):
                return change.edits[0]
    return None


def _conflict(subject: Subject, first: Unit, second: Unit) -> Task:
    """Return the task to end a merge of two branches that each added one of two neighbouring functions."""
    files, path = subject.repository.files, first.path
    texts = ["", text_of(first, files), text_of(second, files)]
    span = [Edit(path=path, name=first.name, start=first.start, end=second.end, text=text) for text in texts]
    base, ours, theirs = (Change(kind="git", edits=(edit,), places=()).apply(files) for edit in span)
    keys = [key for unit in (first, second) for key in subject.baseline.nearest([unit.place])[:COUNT]]
    jobs = [job_on(subject, side, keys) for side in (ours, theirs)]
    for side in run_jobs(subject, jobs, 20.0 + subject.baseline.suite_s):
        if not failing_keys(side, keys):  # one of the functions is not needed
            raise NoTask("unseen")
    commits: Commits = [
        ("main", "Begin", base),
        ("main", f"Add {first.name}", ours),
        ("topic", f"Add {second.name}", theirs),
    ]
    wordings = (
        f"I merged the branch topic and got a conflict in {path}. resolve it and commit the merge, we need both sides",
        f"Merging topic into main stopped with a conflict ({path}). Please finish it so that nothing of either branch is lost, "
        "and commit it.",
    )
    return _committed(subject, first, wordings, commits, {path: files[path]}, [first, second])


def _committed(
    subject: Subject,
    unit: Unit,
    wordings: Sequence[str],
    commits: Commits,
    right: dict[str, str],
    units: Sequence[Unit],
) -> Task:
    """Return the task whose workspace begins with these commits and whose answer is a commit of the `right` files."""
    keys = [key for other in units for key in subject.baseline.nearest([other.place])[: NEAR // len(units)]]
    tests = {key: subject.baseline.plan.tests[key] for key in keys}
    start = dict(subject.repository.files)
    for _, _, changed in commits:
        start |= changed
    scope = (*subject.repository.scope, GIT_REPORT)
    fields = {"files": start, "tests": hidden_of(subject, tests), "source_scope": scope}
    if len(history := json.dumps(commits)) > MOST_CHARACTERS:
        raise NoTask("too much")
    task = task_of(subject, "git", unit, wordings, {COMMITS: history}, solution=right, **fields)
    with start_sandbox(task, subject.backend) as box:
        add_history(box, import_stream(task))
        hashes = [line for line in commits_left(box, "--all").split("\n") if len(line) == 40]
        start |= {path: box.read(path).decode() for path in right}
    listing = report(hashes, {path: text.encode() for path, text in right.items()})
    task = task.model_copy(update={"files": start, "solution": {**right, GIT_REPORT: listing}})
    return behaving(subject, task, tests, hide=False)
