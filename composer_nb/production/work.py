"""The result of an agent on a user's repository: kept in a folder until the user accepts or rejects it, and after."""

import base64
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from composer_nb.harness.agent.loop import Conversation, system_text
from composer_nb.harness.carry import EXECUTABLE, PLAIN, Blob
from composer_nb.harness.files import replacing, write_atomic
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Segment
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.store import save_attempts
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.search import Indexes
from composer_nb.harness.tools.session import Session, shown
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.harness.untrusted import HISTORY, json_of, parquet, visible
from composer_nb.production.accept import Conflict, accept
from composer_nb.production.checkout import Checkout
from composer_nb.production.diff import Changes, patch
from composer_nb.production.planner import TaskPlan

Verdict = Literal["accepted", "rejected", "open"]
DIFF, CHANGES = "changes.diff", "changes.json"
# A plan to edit, and with its figures.
PLAN, PLAN_FIGURES = "plan.md", "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The result of an agent on a user's repository, kept in the folder `path`.

    Attributes:
        others: Paths that cannot come back: links, devices, protected names.
        lost: Reason why its files could not be carried out of the sandbox; then there are no changes.
    """

    path: Path
    source: Checkout
    conversation: Conversation
    changes: Changes
    others: frozenset[str] = frozenset()
    lost: str = ""

    @property
    def before(self) -> dict[str, Blob]:
        """The changed files as the agent got them."""
        return {path: blob for path in self.changes if (blob := self.source.blob(path)) is not None}

    @property
    def diff(self) -> str:
        """The patch for reading: binary files are described. Bytes that are not UTF-8 are lone surrogates."""
        return patch(self.before, self.changes, whole=False).decode("utf-8", "surrogateescape")

    def accept(self) -> None:
        """Write the changes into the repository. Raises Conflict or OSError, and then nothing is written; ValueError if a verdict
        was given before, or nothing was changed."""
        give_verdict(self.path, "accepted", self.source.root)

    def reject(self) -> None:
        """Note that the changes are rejected. Raises ValueError if a verdict was given before."""
        give_verdict(self.path, "rejected")


def tools_for(name: str) -> ToolSet:
    """Return the tools of this name (`ToolSet.named`) for an agent in the product. Raises ValueError for those of an environment
    of your own: the file of a checkpoint makes nobody import a module."""
    if ":" in name:
        raise ValueError(f"the checkpoint was trained with the tools of {name}, which only its training has")
    return ToolSet.named(name, Indexes())


@contextmanager
def open_session(
    source: Checkout,
    tools: ToolSet,
    backend: Backend,
    image: str = "",
    packages: Mapping[str, bytes] | None = None,
    answered: bool = False,
) -> Iterator[tuple[Session, str]]:
    """Open an agent's session in a new sandbox with a copy of a user's repository; with the system text that it is told.
    `answered`: the user answers questions."""
    with source.start(backend, image, packages) as box:
        session = tools.open(box)
        yield session, system_text(session.root, answered=answered)


def give_verdict(
    path: Path, verdict: Literal["accepted", "rejected"], repository: Path | None = None
) -> tuple[Path, int]:
    """Carry out the verdict on the result that is kept in `path`, and note it.

    A result names its repository, and whoever sent it may have written that name. It must be `repository`, by default the current
    folder or the checkout around it. Returns the repository and the number of files changed in it. Raises Conflict, which names
    the diff, or OSError, and then nothing is written; FileNotFoundError where no result is kept; ValueError if a verdict was
    given before, if nothing was changed, or if it is for another repository.
    """
    if not (path / CHANGES).is_file():
        raise FileNotFoundError(f"{path}: no agent's work is kept here; give the folder that `composer-nb agent` named")
    if (earlier := _told(path).get("verdict")) != "open":
        raise ValueError(f"{path}: was {visible(str(earlier)[:80])} before; a verdict is given once")
    root, before, changes = _kept(path)
    if verdict == "accepted":
        _check(path, root, before, changes, repository)
        if not changes:
            raise ValueError(f"{path}: nothing was changed, so there is nothing to accept")
        try:
            _write_verdict(path, verdict, partial(accept, root, before, changes))
        except Conflict as error:
            raise Conflict(f"{error}; the diff is {path.resolve() / DIFF}") from None
    else:
        _write_verdict(path, verdict)
    return root, len(changes) if verdict == "accepted" else 0


def accepted(path: Path) -> tuple[str, str, dict[str, Blob], Changes] | None:
    """Return of the result that is kept in `path` the time of its acceptance, the request, and the changed files before and
    after; None if it was not accepted. Raises OSError for what is missing, ValueError for what is damaged."""
    verdict = _told(path)
    if verdict.get("verdict") != "accepted":
        return None
    file, (_, before, changes) = path / "rollout.parquet", _kept(path)
    try:
        [request] = pq.read_table(parquet(file), columns=["instruction"])["instruction"].to_pylist()
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"{file}: damaged ({error!r:.200})") from None
    return str(verdict.get("time")), str(request), before, changes


def _told(path: Path) -> dict[str, Any]:
    content = json_of((path / "verdict.json").read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _kept(path: Path) -> tuple[Path, dict[str, Blob], Changes]:
    try:
        return _unpack(json_of((path / CHANGES).read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / CHANGES}: damaged ({error!r:.200})") from None


def _check(path: Path, root: Path, before: Mapping[str, Blob], changes: Changes, repository: Path | None) -> None:
    """Raise ValueError for changes that would go into a repository's history or below a relative path, that the diff does not
    show, or that are for another repository than the user named: a diff shows relative paths only. A change to what is there
    already is not shown, but could remove folders."""
    if not root.is_absolute() or any(part.casefold() in HISTORY for part in (*root.parts, *root.resolve().parts)):
        raise ValueError(f"{path / CHANGES}: {visible(str(root))} is no repository's folder; nothing was written")
    unshown = any(before.get(name) == blob for name, blob in changes.items())
    if unshown or patch(before, changes) != (path / DIFF).read_bytes():
        raise ValueError(f"{path}: {CHANGES} is not what {DIFF} shows; nothing was written")
    here = Path.cwd()
    checkout = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    if root.resolve() not in ({here.resolve(), checkout.resolve()} if repository is None else {repository.resolve()}):
        raise ValueError(
            f"{path}: its changes are for {visible(str(root))}; nothing was written. If you want them there, add --repository "
            f"{visible(shlex.quote(str(root)))}"
        )


def _unpack(content: Mapping[str, Any]) -> tuple[Path, dict[str, Blob], Changes]:
    """Return the repository, its changed files as the agent saw them, and the changes, which `keep` wrote."""

    def unpacked(blob: Mapping[str, Any] | None) -> Blob | None:
        if blob is not None and blob["mode"] not in (PLAIN, EXECUTABLE):
            raise ValueError(f"mode {blob['mode']!r}")
        return None if blob is None else Blob(data=base64.b64decode(blob["data"]), mode=blob["mode"])

    changes = {path: (unpacked(old), unpacked(new)) for path, (old, new) in content["changes"].items()}
    before = {path: old for path, (old, _) in changes.items() if old is not None}
    return Path(content["repository"]), before, {path: new for path, (_, new) in changes.items()}


def keep(work: Work, instruction: str, segments: tuple[Segment, ...], policy: str) -> None:
    """Make the folder of a result and write it there, with an open verdict."""
    conversation, name = work.conversation, shown(work.source.root.name)
    _make_folder(work.path, work.source.root)
    before = {path: data.decode("utf-8", "surrogateescape") for path, data in work.source.files.items()}
    after = dict(before)
    for path, blob in work.changes.items():
        after.pop(path, None)
        if blob is not None:
            after[path] = blob.data.decode("utf-8", "surrogateescape")
    rollout = conversation.rollout(name, segments, after, before)
    changed = {path: before[path] for path in work.changes if path in before}
    # Not a task that would pass the checks of one: storing needs its name and files alone.
    task = Task.model_construct(id=name, instruction=instruction, files=before)
    attempt = Attempt(task=task, rollout=rollout, grade=Grade(status="ungraded"))
    columns = {"instruction": [instruction], "policy": [shown(policy)], "before": [json.dumps(changed)]}
    save_attempts(work.path / "rollout.parquet", [attempt], columns)
    (work.path / DIFF).write_bytes(patch(work.before, work.changes))

    def packed(blob: Blob | None) -> dict[str, str] | None:
        return None if blob is None else {"mode": blob.mode, "data": base64.b64encode(blob.data).decode()}

    # What `accept` needs: the repository, and each changed file before and after.
    changes = {path: [packed(work.source.blob(path)), packed(blob)] for path, blob in work.changes.items()}
    content = {"repository": os.fspath(work.source.root.resolve()), "changes": changes}
    write_atomic(work.path / CHANGES, json.dumps(content))
    _write_verdict(work.path, "open")


def keep_plan(path: Path, root: Path, plan: TaskPlan) -> None:
    """Write a plan for the repository `root` into the folder of a result."""
    _make_folder(path, root)
    write_atomic(path / PLAN, f"{plan.text}\n")
    write_atomic(path / PLAN_FIGURES, plan.model_dump_json(indent=2))


def read_plan(path: Path) -> TaskPlan:
    """Read a plan that `keep_plan` wrote, or a user, with the text that it has now. Raises ValueError for an empty one."""
    try:
        text, figures = path.read_text(encoding="utf-8").strip(), path.with_name(PLAN_FIGURES)
        has_figures = path.name == PLAN and figures.is_file()
        plan = TaskPlan.model_validate_json(figures.read_bytes()) if has_figures else TaskPlan(text="")
    except ValueError as error:  # also of its bytes
        raise ValueError(f"--plan {path}: damaged, or not UTF-8 ({error!r:.200})") from None
    if not text:
        raise ValueError(f"--plan {path}: is empty; write the plan there")
    return plan.model_copy(update={"text": text})


def holds_plan_alone(path: Path) -> bool:
    """Return whether a folder holds a plan, also with what editors leave beside it (`plan.md~`), and no result yet."""
    names = {file.name for file in path.iterdir()} if path.is_dir() else set()
    return PLAN in names and {name for name in names if PLAN not in name} <= {PLAN_FIGURES, ".gitignore"}


def _make_folder(path: Path, root: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if path.resolve().is_relative_to(root.resolve()):
        # The folder lies in the repository but is not part of it.
        (path / ".gitignore").write_text("*\n", encoding="utf-8")


def _write_verdict(path: Path, verdict: Verdict, carry_out: Callable[[], None] = lambda: None) -> None:
    """Note a verdict that is carried out; one that cannot be written down is not."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with replacing(path / "verdict.json") as part:
        part.write_text(json.dumps({"verdict": verdict, "time": when}))
        carry_out()
