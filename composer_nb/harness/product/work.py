"""What an agent did on a user's repository, kept in a folder until, and after, the user says what becomes of it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.cursor.session import shown
from composer_nb.harness.grade import Grade
from composer_nb.harness.product.accept import accept
from composer_nb.harness.product.checkout import Checkout
from composer_nb.harness.product.diff import LINK, Changes, patch
from composer_nb.harness.product.loop import Conversation
from composer_nb.harness.rollout import Rollout, Segment
from composer_nb.harness.store import save_attempts
from composer_nb.harness.task import Task

Verdict = Literal["accepted", "rejected", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an agent did on a user's repository, kept in `path` until, and after, the user says what becomes of it."""

    path: Path
    source: Checkout
    conversation: Conversation
    changes: Changes
    others: frozenset[str] = frozenset()
    """Paths of what can not come back: devices, links that lead elsewhere."""
    lost: str = ""
    """Why its files could not be carried out of the sandbox, where they could not; then there are no changes."""

    @property
    def patch(self) -> bytes:
        """Makes of the repository, as the agent got it, what `accept` does."""
        return self._patch(whole=True)

    @property
    def diff(self) -> str:
        """The same to be read: of binary files it tells the sizes."""
        return self._patch(whole=False).decode("utf-8", "replace")

    def _patch(self, whole: bool) -> bytes:
        before = {path: blob for path in self.changes if (blob := self.source.blob(path)) is not None}
        return patch(before, self.changes, whole)

    def accept(self) -> None:
        """Writes the changes into the repository. Raises Conflict or OSError, and then nothing is written; ValueError where the
        verdict is there already, or there is nothing to accept."""
        self._must_be_open()
        if not self.changes:
            raise ValueError(f"{self.path}: nothing was changed, so there is nothing to accept")
        accept(self.source, self.changes)
        _write_verdict(self.path, "accepted")

    def reject(self) -> None:
        """Raises ValueError where the verdict is there already."""
        self._must_be_open()
        _write_verdict(self.path, "rejected")

    def _must_be_open(self) -> None:
        said = json.loads((self.path / "verdict.json").read_text())["verdict"]
        if said != "open":
            raise ValueError(f"{self.path}: was {said} before; a verdict is given once")


def keep(work: Work, instruction: str, segment: Segment, policy: str) -> None:
    """Writes it into its folder, which is made, with an open verdict."""
    done, name = work.conversation, shown(work.source.root.name)
    work.path.mkdir(parents=True)
    if work.path.resolve().is_relative_to(work.source.root.resolve()):
        (work.path / ".gitignore").write_text("*\n", encoding="utf-8")  # kept in the repository, and none of it
    before = {path: data.decode("utf-8", "surrogateescape") for path, data in work.source.files.items()}
    after = dict(before)
    for path, blob in work.changes.items():
        after.pop(path, None)
        if blob is not None and blob.mode != LINK:
            after[path] = blob.data.decode("utf-8", "surrogateescape")
    rollout = Rollout(
        task_id=name,
        segments=(segment,),
        turns=done.turns,
        files=after,
        stop=done.stop,
        counted=(done.read, done.written),
        seconds=done.seconds,
    )
    changed = {path: before[path] for path in work.changes if path in before}
    # No task of ours, so none that would pass its checks: what is stored needs its name and its files.
    task = Task.model_construct(id=name, instruction=instruction, files=before)
    save_attempts(
        work.path / "rollout.parquet",
        [Attempt(task=task, rollout=rollout, grade=Grade(status="ungraded"))],
        {"instruction": [instruction], "policy": [shown(policy)], "before": [json.dumps(changed)]},
    )
    (work.path / "changes.diff").write_bytes(work.patch)
    _write_verdict(work.path, "open")


def _write_verdict(path: Path, verdict: Verdict) -> None:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    write_text(path / "verdict.json", json.dumps({"verdict": verdict, "time": when}))


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
