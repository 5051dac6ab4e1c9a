"""Attempts at tasks with the product's tools: a conversation in a sandbox, graded in another sandbox."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from composer_nb.harness.agent.loop import LIMITS, Conversation, Told, converse
from composer_nb.harness.agent.turns import Limits, Speaker
from composer_nb.harness.attempt import Attempt
from composer_nb.harness.files import write_atomic
from composer_nb.harness.grading.front import grade as grade_task
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.plan import PLAN
from composer_nb.harness.product.checkout import add_history, carry_back
from composer_nb.harness.product.diff import LINK, Blob
from composer_nb.harness.sandbox.contract import Backend, SandboxDied, SandboxFailure
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.runtime import start, workspace
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.session import FOLDER
from composer_nb.harness.tools.toolset import ToolSet

MAX_KEPT_BYTES = 16 << 20
"""Maximum size of the changed files that are kept with a rollout."""
Cast = Callable[[Task, int], Speaker]
"""Makes the speaker of an attempt from its task and the number of the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The sandboxes, tools and limits of attempts."""

    backend: Backend
    tools: ToolSet
    limits: Limits = LIMITS


def attempt(task: Task, place: Environment, speaker: Speaker, told: Told = lambda event: None) -> Attempt:
    """Run one rollout and grade it.

    A failure of the infrastructure is the grade `infra_error`; a sandbox that the agent broke, or a workspace that it made too
    large to carry away, is `agent_failed`. Raises ValueError for a task that cannot run here."""
    done = Conversation(turns=(), stop="infrastructure")
    left: dict[str, bytes] | None = None
    grade = Grade(status="infra_error")
    try:
        with start(task, place.backend) as box:
            if not task.image:  # images of tasks come with theirs
                add_history(box)
            session = place.tools.open(box)
            try:
                done = converse(task.instruction, speaker, place.tools, session, place.limits, told)
                if done.stop not in ("infrastructure", "interrupted"):
                    left = _left(task, carry_back(box)[0])
            except (SandboxDied, OSError):
                grade = Grade(status="agent_failed")
    except (SandboxDied, SandboxFailure):
        pass
    finally:
        segment = speaker.close()
    if left is not None:
        grade = grade_task(task, left, place.backend)
    rollout = done.rollout(task.id, segment, task.files if left is None else _texts(left, task.files))
    return Attempt(task=task, rollout=rollout, grade=grade)


def _left(task: Task, found: Mapping[str, Blob]) -> dict[str, bytes]:
    """Return the files of a workspace without our own. Raises OSError for changes that are too large to keep."""
    files = {path: blob.data for path, blob in found.items() if blob.mode != LINK}
    ours = (f"{FOLDER}/",) if task.image else (f"{FOLDER}/", ".git/")
    own = {path: data for path, data in files.items() if not path.startswith(ours)}
    if not task.image:
        before = workspace(task)
        size = sum(len(data) for path, data in own.items() if before.get(path) != data)
        if size > MAX_KEPT_BYTES:
            raise OSError(errno.EFBIG, f"{size} bytes of changes")
    return own


def _texts(files: Mapping[str, bytes], before: Mapping[str, str]) -> dict[str, str]:
    """Return files as text, bytes that are not UTF-8 as lone surrogates. Unchanged texts stay the same objects."""
    texts = {path: data.decode("utf-8", "surrogateescape") for path, data in files.items()}
    return {path: before[path] if before.get(path) == text else text for path, text in texts.items()}


def check_fit(tasks: Sequence[Task]) -> None:
    """Raise ValueError for tasks that need other tools, or that lack a plan of their tests."""
    for task in tasks:
        if task.grader == "functions":
            raise ValueError(
                f"task {task.id}: its grader `functions` needs ToolSet.tiny; do not mix such tasks with others"
            )
        if task.grader == "pytest" and PLAN not in task.metadata:
            raise ValueError(
                f"task {task.id}: has no plan of its tests; composer-nb tasks make, or grading.validate, makes one"
            )


def attempt_all(
    tasks: Sequence[Task], samples: int, place: Environment, cast: Cast, keep: Path, workers: int = 2
) -> Iterator[Attempt]:
    """Attempt every task `samples` times, `workers` at a time, and yield each attempt as it ends.

    Each attempt is written into `keep` when it ends, and one that is there already is read instead of repeated, so a killed
    bench resumes. Attempts that the infrastructure failed are not kept. When closed early, as by Ctrl-C, it closes the backend.
    Raises ValueError like `check_fit`.
    """
    check_fit(tasks)
    keep.mkdir(parents=True, exist_ok=True)
    slots = [(task, number, sample) for number, task in enumerate(tasks) for sample in range(samples)]

    def one(task: Task, number: int, sample: int) -> Attempt:
        path = keep / f"{hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:24]}-{sample}.safetensors"
        if path.is_file():
            with suppress(ValueError):  # damaged: it is made again
                return unpack_attempt(path.read_bytes(), task)
        done = attempt(task, place, cast(task, number * samples + sample))
        if done.grade.known:
            write_atomic(path, pack_attempt(done))
        return done

    with ThreadPoolExecutor(workers, thread_name_prefix="attempt") as pool:
        futures = [pool.submit(one, *slot) for slot in slots]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            place.backend.close()  # ends what still runs
            raise
