"""What rates ended attempts while others are sampled: the reward of a custom environment, or a judge.

    rollout → grade → rater → grade.rewards → terms

A judge is a function of the user's, `reward.judge`. The term `judged` has what it returned.
"""

import math
import threading
import time
from collections.abc import Mapping
from numbers import Real

from composer_nb.harness.attempt import Rater
from composer_nb.harness.blocking import CallTimeout, TooManyBlocked, within
from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.plain import function_named
from composer_nb.harness.rewards import JUDGED, OWN, RewardSettings, fault, own_reward


def rater_of(env: EnvSettings, reward: RewardSettings, seconds: float) -> Rater | None:
    """Return what rates the attempts of a run, if anything does. A call may take `seconds`. Raises ValueError for a judge that
    cannot be imported."""
    if (term := env.reward_function(seconds)) is not None:
        return lambda attempt: {OWN: own_reward(term, attempt)}
    return Judge(reward.judge, reward.judge_share, seconds) if reward.judge else None


class Judge:
    """Rates attempts with a function of the user's, `MODULE:FUNCTION`, from several threads.

    An attempt is not rated if it ends while the calls, those of all threads together and those under way too, have taken more
    than `share` of the time since the first one; or if its call takes longer than `seconds`, or returns None."""

    def __init__(self, name: str, share: float, seconds: float) -> None:
        self._name, self._share, self._seconds = name, share, seconds
        self._function = function_named(name, "reward.judge")
        self._lock, self._start = threading.Lock(), math.inf
        # Calls under way, and the sum of the times at which calls ended less the sum of those at which calls began.
        self._under_way, self._calls_s = 0, 0.0

    def __call__(self, attempt: Attempt) -> Mapping[str, float]:
        """Return the rating of an attempt, or nothing. Raises ValueError if the function fails or returns no finite number, and
        TooManyBlocked like `within`."""
        start = time.monotonic()
        with self._lock:
            self._start = min(self._start, start)
            if self._calls_s + self._under_way * start > self._share * (start - self._start):
                return {}
            self._under_way, self._calls_s = self._under_way + 1, self._calls_s - start
        what = f"reward.judge: {self._name} of task {attempt.task.id}"
        try:
            rating = within(lambda: start + self._seconds - time.monotonic(), what, lambda: self._function(attempt))
        except CallTimeout:
            return {}
        except TooManyBlocked:
            raise
        except (Exception, SystemExit) as error:
            raise fault(what, error) from error
        finally:
            with self._lock:
                self._under_way, self._calls_s = self._under_way - 1, self._calls_s + time.monotonic()
        if rating is not None and not (isinstance(rating, Real) and math.isfinite(rating)):
            raise ValueError(f"{what} returned {rating!r:.80}; it must return a finite number or None")
        return {} if rating is None else {JUDGED: float(rating)}
