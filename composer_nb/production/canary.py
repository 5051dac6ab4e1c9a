"""A new version of the weights for a share of the users first: their verdicts decide whether all get it.

    users ── by a hash of their names ──┬── usual: replicas at the version that is trusted
                                        └── early: replicas at the newest version
    verdicts ── by the version that wrote the conversation ──▶ Trial ──▶ promoted, or withdrawn

A withdrawn version leaves the early replicas between two steps, so no conversation ends. The next version of the store is tried
in its turn. Which version is trusted is kept in `RUN/canary.json` and outlives the server.
"""

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Attempt
from composer_nb.production.policies import OpenEngine, chat_of
from composer_nb.production.replicas import Replica, Replicas, open_actors
from composer_nb.trainer.services.actors import RayActors
from composer_nb.trainer.versions.receiver import Receiver, VersionRule

LOG = logging.getLogger(__name__)
FILE = "canary.json"
# Users with verdicts on each side before anything is decided.
LEAST = 20
# Loss of the mean verdict at which a version is not promoted although chance could explain it, as in `improve`.
MOST_LOST = 0.05
# Error of the interval, and the number of users at about which it is narrowest.
ALPHA, TUNED = 0.05, 50
# Observations of the pooled variance that each side's own is mixed with: that of a few equal verdicts would be nothing.
LENT = 2

Outcome = Literal["", "promoted", "withdrawn"]
# Verdicts by the names of user and rollout.
Side = dict[str, dict[str, float]]


@dataclass(slots=True)
class Trial:
    """The verdicts on a new version and, over the same time, on the trusted one.

    Attributes:
        verdicts: Verdicts on the new version at which it is promoted or withdrawn at the latest.
    """

    version: int
    verdicts: int
    early: Side = field(default_factory=dict)
    usual: Side = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        return {name: sum(map(len, side.values())) for name, side in (("early", self.early), ("usual", self.usual))}

    def interval(self) -> tuple[float, float, float]:
        """Return the difference of the mean verdicts, new minus trusted, with an asymptotic 95 % interval that holds however
        often one looks: a Gaussian mixture (Waudby-Smith et al. 2021, arXiv 2103.06476, theorem 2.2) over the harmonic count of
        the two sides. One observation is the mean of a user's verdicts, since those of one user are not independent."""
        sides = [np.array([np.mean([*user.values()]) for user in side.values()]) for side in (self.early, self.usual)]
        sizes = np.array([len(side) for side in sides])
        if sizes.min() < LEAST:
            return 0.0, -math.inf, math.inf
        gain = float(sides[0].mean() - sides[1].mean())
        squares = np.array([len(side) * side.var() for side in sides])
        variances = (squares + LENT * squares.sum() / (sizes.sum() - 2)) / (sizes - 1 + LENT)
        rho = (-2 * math.log(ALPHA) + math.log(1 - 2 * math.log(ALPHA))) / TUNED
        scaled = rho / float((1 / sizes).sum())
        errors = math.sqrt(2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / ALPHA))
        width = errors * math.sqrt(float((variances / sizes).sum()))
        return gain, gain - width, gain + width

    @property
    def outcome(self) -> Outcome:
        gain, _, high = self.interval()
        if high < -1e-9:  # equal verdicts differ by rounding
            return "withdrawn"
        if self.counts()["early"] < self.verdicts or not math.isfinite(high):
            return ""
        return "withdrawn" if gain < -MOST_LOST else "promoted"


class Known(BaseModel):
    """What outlives the server.

    Attributes:
        withdrawn: -1: none.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    store: str
    trusted: int
    withdrawn: int = -1


class Canary(Replicas):
    """Replicas of which the last one serves the users who get a new version first."""

    def __init__(
        self,
        actors: RayActors,
        options: Sequence[dict[str, Any]],
        share: float,
        verdicts: int,
        state: Known,
        file: Path,
    ) -> None:
        """`share`: of the users who get a new version first. `verdicts`: see `Trial`. `file`: keeps the `state`."""
        super().__init__(actors, options)
        *self.usual, self.early = self._replicas
        self.share, self.verdicts, self.file, self._trial = share, verdicts, file, Trial(state.trusted, verdicts)
        self._settled = set[str]()  # rollouts that had a verdict before the trial
        self._decided(state)

    @property
    def capacity(self) -> int:
        """Conversations held at a time: any of them may be at either side."""
        return min(sum(replica.options["slots"] for replica in self.usual), self.early.options["slots"])

    @property
    def version(self) -> int:
        """The version of most users: the early replica's if no other is left. Raises ProviderFailure when none is."""
        return self._oldest(self.usual)

    def _side(self, user: str) -> Sequence[Replica]:
        """Return the replicas of a new conversation. None begins with a withdrawn version, or waits for a replica to start."""
        fit = self.early.ready and self.early.version != self.known.withdrawn
        return [self.early] if fit and is_early(user, self.share) else self.usual

    def judged(self, name: str, user: str, parts: Sequence[Attempt]) -> None:
        """Count the verdict on a rollout: its reward, or 1 and 0 for passed and failed tests. One on a conversation that several
        versions wrote says nothing, and neither does one without reward and tests. A later verdict takes the place of an earlier
        one."""
        grade = parts[-1].grade
        if not grade.known or (grade.status == "graded" and not (grade.rewards or grade.tests)):
            return
        segments = [segment for part in parts for segment in part.rollout.segments]
        versions = {int(v) for segment in segments for v in np.unique(segment.policy_version[segment.acted])}
        with self._changed:
            if (trial := self._current()) is None or name in self._settled:
                self._settled.add(name)
                return
            for version, side in ((trial.version, trial.early), (self.known.trusted, trial.usual)):
                if versions == {version}:
                    side.setdefault(user, {})[name] = grade.rewards.get("reward", float(grade.passed))
            if outcome := trial.outcome:
                field_name = "trusted" if outcome == "promoted" else "withdrawn"
                self._decided(self.known.model_copy(update={field_name: trial.version}))
                difference = "{:+.3f} ({:.3f} to {:.3f})".format(*trial.interval())
                LOG.warning("version %d is %s; difference of mean verdicts: %s", trial.version, outcome, difference)

    def _current(self) -> Trial | None:
        """Return the trial of the version that runs early; None if it is trusted already, or was withdrawn."""
        newest = self.early.version
        if newest <= max(self.known.trusted, self.known.withdrawn):
            return None
        if newest != self._trial.version:
            self._settled.update(*self._trial.early.values(), *self._trial.usual.values())
            self._trial = Trial(newest, self.verdicts)
        return self._trial

    def _decided(self, decisions: Known) -> None:
        """Have every replica run the version that follows from a decision, and keep it."""
        self.known = decisions
        for replica in self._replicas:
            # The usual ones never run a version that is not trusted; the early one runs the newest, unless it was withdrawn.
            rule = VersionRule(after=decisions.withdrawn if replica is self.early else math.inf, most=decisions.trusted)
            replica.options["rule"] = rule
            replica.orders.append(("rule", rule))
        try:
            write_json(self.file, decisions.model_dump())
        except OSError as error:
            LOG.error("%s is out of date, so a restarted server would not know what was decided: %s", self.file, error)

    def health(self) -> dict[str, Any]:
        """Return what each replica does, and where the trial stands."""
        with self._changed:
            state = {"share": self.share, "early": self.early.version, **self.known.model_dump(exclude={"store"})}
            if (trial := self._current()) is not None:
                gain, low, high = trial.interval()
                state |= {"trying": trial.version, "verdicts": trial.counts()}
                state |= {"difference": gain, "low": low, "high": high} if math.isfinite(low) else {}
            return super().health() | {"canary": state}


def is_early(user: str, share: float) -> bool:
    """Return whether a user is among those who get a new version first: the same ones at every start and on every machine."""
    return int.from_bytes(hashlib.sha256(user.encode()).digest()[:8], "big") < share * 2**64


@contextmanager
def open_canary(
    path: Path,
    count: int,
    *,
    share: float,
    verdicts: int,
    run: Path,
    follow: str,
    slots: int,
    ray: str = "",
    **more: Any,
) -> Iterator[OpenEngine[Canary]]:
    """Run a checkpoint in `count` processes for most users, and in one more for those who get a new version first. `run`: folder
    of the records. Raises ValueError for a store without a version and for a `canary.json` that does not fit it, and like
    `open_replicas`, whose other parameters it has."""
    file = run / FILE
    newest = Receiver(follow, name="canary").newest()
    if newest is None:
        raise ValueError(f"--canary {share:g}: {follow} has no version yet, so there is none to trust")
    decisions = Known(store=follow, trusted=newest)
    if file.is_file():
        try:
            decisions = Known.model_validate_json(file.read_bytes())
            if decisions.store != follow or decisions.trusted > newest:
                raise ValueError(f"it is of {decisions.store} and trusts version {decisions.trusted}")
        except ValueError as error:
            again = "remove it, and the newest version will be trusted"
            raise ValueError(f"{file} is damaged or of another store; {again}: {error}") from None
    run.mkdir(parents=True, exist_ok=True)
    model, tokenizer, form = chat_of(path)
    usual = {**more, "path": path.resolve(), "follow": follow, "slots": -(-slots // count)}
    options = [*(dict(usual) for _ in range(count)), {**usual, "slots": slots}]
    with open_actors(ray) as actors, Canary(actors, options, share, verdicts, decisions, file) as canary:
        yield OpenEngine(shared=canary, tokenizer=tokenizer, format=form, tokens=canary.tokens, training=model)
