"""A new version of the weights for a share of the users first: their verdicts decide whether all get it.

    users ── by a hash of their names ──┬── usual: replicas at the version that is trusted
                                        └── early: replicas at the newest version
    verdicts ── by the version that wrote the conversation ──▶ Trial ──▶ promoted, or withdrawn

A withdrawn version leaves the early replicas between two steps, so no conversation ends. The next version of the store is tried
in its turn. Which version is trusted is kept in `RUN/canary.json` and outlives the server.
"""

from __future__ import annotations

import hashlib
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
from pydantic import BaseModel, ConfigDict

from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Completion, ProviderFailure, Request, Trace
from composer_nb.production.policies import OpenEngine
from composer_nb.production.replicas import Replicas, open_replicas
from composer_nb.trainer.versions.receiver import Receiver, VersionRule

LOG = logging.getLogger(__name__)
FILE = "canary.json"
LEAST = 20
"""Users with verdicts on each side before anything is decided."""
MOST_LOST = 0.05
"""Loss of the mean verdict at which a version is not promoted although chance could explain it, as in `improve`."""
ALPHA, TUNED = 0.05, 50
"""Error of the interval, and the number of users at about which it is narrowest."""
LENT = 2
"""Observations of the pooled variance that each side's own is mixed with: that of a few equal verdicts would be nothing."""

Outcome = Literal["", "promoted", "withdrawn"]
Side = dict[str, dict[str, float]]
"""Verdicts by the names of user and rollout."""


@dataclass(slots=True)
class Trial:
    """The verdicts on a new version and, over the same time, on the trusted one."""

    version: int
    verdicts: int
    """Verdicts on the new version at which it is promoted or withdrawn at the latest."""
    early: Side = field(default_factory=dict)
    usual: Side = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        return {name: sum(map(len, side.values())) for name, side in (("early", self.early), ("usual", self.usual))}

    def interval(self) -> tuple[float, float, float]:
        """Return the difference of the mean verdicts, new minus trusted, with an asymptotic 95 % interval that holds however
        often one looks: a Gaussian mixture (Waudby-Smith et al. 2021, arXiv 2103.06476, theorem 2.2) over the harmonic count of
        the two sides. One observation is the mean of a user's verdicts, since those of one user are not independent."""
        sides = [np.array([np.mean([*each.values()]) for each in side.values()]) for side in (self.early, self.usual)]
        if min(map(len, sides)) < LEAST:
            return 0.0, -math.inf, math.inf
        found = float(sides[0].mean() - sides[1].mean())
        squares = [float(((side - side.mean()) ** 2).sum()) for side in sides]
        pooled = sum(squares) / (sum(map(len, sides)) - 2)
        variances = [(each + LENT * pooled) / (len(side) - 1 + LENT) for each, side in zip(squares, sides, strict=True)]
        count = 1 / sum(1 / len(side) for side in sides)
        rho = (-2 * math.log(ALPHA) + math.log(1 - 2 * math.log(ALPHA))) / TUNED
        scaled = count * rho
        errors = math.sqrt(2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / ALPHA))
        width = errors * math.sqrt(sum(each / len(side) for each, side in zip(variances, sides, strict=True)))
        return found, found - width, found + width

    @property
    def outcome(self) -> Outcome:
        found, _, high = self.interval()
        if high < -1e-9:  # equal verdicts differ by rounding
            return "withdrawn"
        if self.counts()["early"] < self.verdicts or not math.isfinite(high):
            return ""
        return "withdrawn" if found < -MOST_LOST else "promoted"


class Known(BaseModel):
    """What outlives the server."""

    model_config = ConfigDict(extra="forbid", strict=True)

    store: str
    trusted: int
    withdrawn: int = -1
    """-1: none."""

    @property
    def usual(self) -> VersionRule:
        """The rule of the usual replicas: never a version that is not trusted."""
        return VersionRule(after=math.inf, most=self.trusted)

    @property
    def early(self) -> VersionRule:
        """The rule of the early replicas: the newest version, or the trusted one after a withdrawal."""
        return VersionRule(after=self.withdrawn, most=self.trusted)


class Canary:
    """Two services as one, for `Conversations`. Thread-safe."""

    def __init__(self, usual: Replicas, early: Replicas, share: float, verdicts: int, known: Known, file: Path) -> None:
        """`share`: of the users who get a new version first. `verdicts`: see `Trial`. `file`: keeps what is `known`."""
        self.usual, self.early, self.share, self.verdicts = usual, early, share, verdicts
        self.known, self.file = known, file
        self._trial = Trial(known.trusted, verdicts)
        self._before: set[str] = set()
        """Rollouts that had a verdict before the trial."""
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
        """Begin turns, each at the service of its conversation. Raises ProviderFailure when no replica of one is left."""
        sides = [self._homes.setdefault(each.rollout, self._side(each.user)) for each in requests]
        answers: dict[int, Future[Completion]] = {}
        for service in (self.usual, self.early):
            own = [each for each, side in zip(requests, sides, strict=True) if side is service]
            answers |= zip((each.rollout for each in own), service.start(*own), strict=True) if own else ()
        return [answers[each.rollout] for each in requests]

    def _side(self, user: str) -> Replicas:
        """Return the service of a new conversation. None begins with a withdrawn version, or waits for a replica to start."""
        fit = self.early.ready and self._newest() != self.known.withdrawn
        return self.early if fit and is_early(user, self.share) else self.usual

    def _newest(self) -> int:
        """Return the version that runs early; -1 if none does."""
        try:
            return self.early.version
        except ProviderFailure:
            return -1

    def release(self, rollout: int) -> Trace:
        home = self._homes.pop(rollout, None)
        return home.release(rollout) if home else Trace()

    def states(self) -> list[dict[str, int]]:
        """Return what each replica does."""
        sides = enumerate((self.usual, self.early))
        return [{**state, "early": number} for number, side in sides for state in side.states()]

    def judged(self, name: str, user: str, done: Attempt) -> None:
        """Count a verdict on a rollout: its reward, or 1 and 0 for passed and failed tests. One on a conversation that several
        versions wrote says nothing, and neither does one without reward and tests. A later verdict takes the place of an earlier
        one."""
        grade = done.grade
        if not grade.known or (grade.status == "graded" and not (grade.rewards or grade.tests)):
            return
        versions = {int(v) for each in done.rollout.segments for v in np.unique(each.policy_version[each.acted])}
        verdict = grade.rewards.get("reward", float(grade.passed))
        with self._lock:
            if (trial := self._current()) is None or name in self._before:
                self._before.add(name)
                return
            if versions == {trial.version}:
                trial.early.setdefault(user, {})[name] = verdict
            elif versions == {self.known.trusted}:
                trial.usual.setdefault(user, {})[name] = verdict
            if outcome := trial.outcome:
                self._decide(trial, outcome)

    def _current(self) -> Trial | None:
        """Return the trial of the version that runs early; None if it is trusted already, or was withdrawn."""
        newest = self._newest()
        if newest <= max(self.known.trusted, self.known.withdrawn):
            return None
        if newest != self._trial.version:
            for side in (self._trial.early, self._trial.usual):
                self._before.update(*side.values())
            self._trial = Trial(newest, self.verdicts)
        return self._trial

    def _decide(self, trial: Trial, outcome: Outcome) -> None:
        self.known = self.known.model_copy(update={"trusted" if outcome == "promoted" else "withdrawn": trial.version})
        self.early.take(self.known.early)
        self.usual.take(self.known.usual)
        difference = "{:+.3f} ({:.3f} to {:.3f})".format(*trial.interval())
        LOG.warning("version %d is %s; difference of mean verdicts: %s", trial.version, outcome, difference)
        self.keep()

    def keep(self) -> None:
        try:
            write_json(self.file, self.known.model_dump())
        except OSError as error:
            LOG.error(
                "%s is not up to date, and a restarted server would not know what was decided: %s", self.file, error
            )

    def told(self) -> dict[str, Any]:
        """Return where the trial stands."""
        with self._lock:
            told = {"share": self.share, "early": self._newest(), **self.known.model_dump(exclude={"store"})}
            if (trial := self._current()) is None:
                return told
            found, low, high = trial.interval()
            figures = {"difference": found, "low": low, "high": high} if math.isfinite(low) else {}
            return told | {"trying": trial.version, "verdicts": trial.counts(), **figures}


def is_early(user: str, share: float) -> bool:
    """Return whether a user is among those who get a new version first: the same ones at every start and on every machine."""
    return int.from_bytes(hashlib.sha256(user.encode()).digest()[:8], "big") < share * 2**64


@contextmanager
def open_canary(
    path: Path, count: int, *, share: float, verdicts: int, run: Path, follow: str, **given: Any
) -> Iterator[OpenEngine[Canary]]:
    """Run a checkpoint in `count` processes for most users, and in one more for those who get a new version first. `run`: folder
    of the records. Raises ValueError for a store without a version and for a `canary.json` that does not fit it, and like
    `open_replicas`, whose other parameters it has."""
    file = run / FILE
    newest = Receiver(follow, name="canary").newest()
    if newest is None:
        raise ValueError(f"--canary {share:g}: {follow} has no version yet, so there is none to trust")
    known = Known(store=follow, trusted=newest)
    if file.is_file():
        again = "remove it, and the newest version will be trusted"
        try:
            known = Known.model_validate_json(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file} is damaged; {again}: {error}") from None
        if known.store != follow or known.trusted > newest:
            raise ValueError(f"{file} is of {known.store} and trusts version {known.trusted}; {again}")
    run.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        usual, early = (
            stack.enter_context(open_replicas(path, each, rule=rule, narrow=True, follow=follow, **given))
            for each, rule in ((count, known.usual), (1, known.early))
        )
        canary = Canary(usual.shared, early.shared, share, verdicts, known, file)
        canary.keep()
        yield OpenEngine(
            shared=canary, tokenizer=usual.tokenizer, format=usual.format, tokens=usual.tokens, known=usual.known
        )
