"""Which version of a store an engine runs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VersionRule:
    """The newest version, if it is above `after`; else `most`, or the newest if that is older."""

    after: float = -1
    most: float = math.inf

    def of(self, newest: int) -> int:
        return newest if newest > self.after else int(min(newest, self.most))
