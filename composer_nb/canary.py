"""A new version of the weights for a share of the users first: their verdicts decide whether all get it.

    users ── by a hash of their names ──┬── usual: replicas at the version that is trusted
                                        └── early: replicas at the newest version
    verdicts ── by the version that wrote the conversation ──▶ Trial ──▶ promoted, or withdrawn

A withdrawn version leaves the early replicas between two steps, so no conversation ends. The next version of the store is tried
in its turn. Which version is trusted is kept in `RUN/canary.json` and outlives the server.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.files import write_json
from composer_nb.harness.policy import Completion, Request, Trace
from composer_nb.policies import OpenEngine
from composer_nb.replicas import Replicas, open_replicas
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.rule import Rule

LOG = logging.getLogger(__name__)
FILE = "canary.json"
LEAST = 8
"""Verdicts on each side before any of them counts."""
MOST_LOST = 0.05
"""Loss of the mean verdict at which a version is not promoted although chance could explain it, as in `improve`."""
ALPHA, TUNED = 0.05, 50
"""Error of the interval, and the number of verdicts at which it is narrowest for its purpose."""

Outcome = Literal["", "promoted", "withdrawn"]


@dataclass(slots=True)
class Trial:
    """The verdicts on a new version and, over the same time, on the usual one."""

    version: int
    verdicts: int
    """Verdicts on the new version at which it is promoted or withdrawn at the latest."""
    early: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)

    def interval(self) -> tuple[float, float, float]:
        """Return the difference of the means, new minus usual, with an interval that holds at all times with 95 %, however often
        one looks: a Gaussian mixture (Waudby-Smith et al. 2021, arXiv 2103.06476, theorem 2.2), with the variance of all verdicts
        together and the harmonic mean of both numbers of verdicts."""
        sides = len(self.early), len(self.usual)
        if min(sides) < LEAST:
            return 0.0, -math.inf, math.inf
        found = float(np.mean(self.early) - np.mean(self.usual))
        count = 1 / (1 / sides[0] + 1 / sides[1])
        rho = (-2 * math.log(ALPHA) + math.log(1 - 2 * math.log(ALPHA))) / TUNED
        scaled = count * rho
        width = math.sqrt(2 * (scaled + 1) / (count * scaled) * math.log(math.sqrt(scaled + 1) / ALPHA))
        width *= float(np.std([*self.early, *self.usual], ddof=1))
        return found, found - width, found + width

    @property
    def outcome(self) -> Outcome:
        found, _, high = self.interval()
        if high < 0:
            return "withdrawn"
        if len(self.early) < self.verdicts or math.isinf(high):
            return ""
        return "withdrawn" if found < -MOST_LOST else "promoted"


class Canary:
    """Two services as one, for `Conversations`. Thread-safe."""

    def __init__(
        self, usual: Replicas, early: Replicas, share: float, verdicts: int, trusted: int, withdrawn: int, file: Path
    ) -> None:
        """`share`: of the users who get a new version first. `verdicts`: see `Trial`. `trusted`, `withdrawn`: versions, −1: none.
        `file`: keeps both."""
        self.usual, self.early, self.share, self.verdicts, self.file = usual, early, share, verdicts, file
        self.trusted, self.withdrawn = trusted, withdrawn
        self._trial = Trial(trusted, verdicts)
        self._homes: dict[int, Replicas] = {}
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """Conversations held at a time: any of them may be at either service."""
        return min(self.usual.capacity, self.early.capacity)

    @property
    def version(self) -> int:
        """The version of most users. Raises ProviderFailure when no replica is left."""
        return self.usual.version

    def start(self, *requests: Request) -> list[Future[Completion]]:
        """Begin turns, each at the service of its user. Raises ProviderFailure when no replica of one is left."""
        sides = [self._homes.setdefault(each.rollout, self._side(each.user)) for each in requests]
        answers: dict[int, Future[Completion]] = {}
        for service in (self.usual, self.early):
            own = [each for each, side in zip(requests, sides, strict=True) if side is service]
            answers |= zip((each.rollout for each in own), service.start(*own), strict=True) if own else ()
        return [answers[each.rollout] for each in requests]

    def _side(self, user: str) -> Replicas:
        """Return the service of a new conversation: nobody waits for a version that does not run."""
        return self.early if self.early.alive and is_early(user, self.share) else self.usual

    def release(self, rollout: int) -> Trace:
        home = self._homes.pop(rollout, None)
        return home.release(rollout) if home else Trace()

    def states(self) -> list[dict[str, int]]:
        """Return what each replica does."""
        sides = enumerate((self.usual, self.early))
        return [{**state, "early": number} for number, side in sides for state in side.states()]

    def judged(self, done: Attempt) -> None:
        """Count a verdict: its reward, or 1 and 0 for passed and failed tests. One on a conversation that several versions wrote,
        or without a grade, says nothing."""
        if not done.grade.known:
            return
        versions = {int(v) for each in done.rollout.segments for v in np.unique(each.policy_version[each.acted])}
        verdict = done.grade.rewards.get("reward", float(done.grade.passed))
        with self._lock:
            if (trial := self._current()) is None:
                return
            if versions == {trial.version}:
                trial.early.append(verdict)
            elif versions == {self.trusted}:
                trial.usual.append(verdict)
            if outcome := trial.outcome:
                self._decide(trial, outcome)

    def _current(self) -> Trial | None:
        """Return the trial of the version that runs early; None if it is trusted already, or was withdrawn."""
        newest = self.early.version if self.early.alive else -1
        if newest <= max(self.trusted, self.withdrawn):
            return None
        if newest != self._trial.version:
            self._trial = Trial(newest, self.verdicts)
        return self._trial

    def _decide(self, trial: Trial, outcome: Outcome) -> None:
        version = trial.version
        found, low, high = trial.interval()
        LOG.warning("version %d is %s: verdicts %+.3f (%.3f to %.3f)", version, outcome, found, low, high)
        if outcome == "promoted":
            self.trusted = version
        else:
            self.withdrawn = version
        self.keep()
        self.usual.take(rule_of(self.trusted))
        self.early.take(rule_of(self.trusted, self.withdrawn))

    def keep(self) -> None:
        write_json(self.file, {"trusted": self.trusted, "withdrawn": self.withdrawn})

    def told(self) -> dict[str, Any]:
        """Return where the trial stands."""
        with self._lock:
            known = {"share": self.share, "trusted": self.trusted, "withdrawn": self.withdrawn}
            if (trial := self._current()) is None:
                return known
            found, low, high = trial.interval()
            figures = {"difference": found, "low": low, "high": high} if math.isfinite(low) else {}
            counts = {"early": len(trial.early), "usual": len(trial.usual)}
            return known | {"trying": trial.version, "verdicts": counts, **figures}


def is_early(user: str, share: float) -> bool:
    """Return whether a user is among those who get a new version first: the same ones at every start and on every machine."""
    return int.from_bytes(hashlib.sha256(user.encode()).digest()[:8], "big") < share * 2**64


def rule_of(trusted: int, withdrawn: float = math.inf) -> Rule:
    """Return the rule of the usual replicas, or with a version that was `withdrawn` (−1: none) of the early ones."""
    return Rule(after=withdrawn, most=trusted)


@contextmanager
def open_canary(
    path: Path, count: int, *, share: float, verdicts: int, run: Path, follow: str, **given: Any
) -> Iterator[OpenEngine[Canary]]:
    """Run a checkpoint in `count` processes for most users, and in one more for those who get a new version first. `run`: folder
    of the records. Raises ValueError for a store without a version, and like `open_replicas`, whose other parameters it has."""
    run.mkdir(parents=True, exist_ok=True)
    file = run / FILE
    known = json.loads(file.read_text()) if file.is_file() else {}
    newest = Receiver(follow, name="canary").newest()
    if newest is None:
        raise ValueError(f"--canary {share:g}: {follow} has no version yet, so there is none to trust")
    trusted, withdrawn = known.get("trusted", newest), known.get("withdrawn", -1)
    with ExitStack() as stack:
        usual, early = (
            stack.enter_context(open_replicas(path, each, rule=rule, follow=follow, **given))
            for each, rule in ((count, rule_of(trusted)), (1, rule_of(trusted, withdrawn)))
        )
        canary = Canary(usual.shared, early.shared, share, verdicts, trusted, withdrawn, file)
        canary.keep()
        yield OpenEngine(
            shared=canary, tokenizer=usual.tokenizer, format=usual.format, tokens=usual.tokens, known=usual.known
        )
