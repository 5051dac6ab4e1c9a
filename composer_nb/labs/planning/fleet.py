"""The gain of more machines: recorded runs replayed under other loads, and the arithmetic of a fleet.

Recorded.of_run(run) or .read(table)  →  replace(load or schedule)  →  simulate  →  sweep (figure)
Fleet(...)                            →  Little's law, bytes, seconds, dollars: closed forms of what was assumed
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from composer_nb.labs.planning.simulate import Durations, SimulatedLoad, measured
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.settings import from_dict
from composer_nb.trainer.versions.store import log
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title

_COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpeed:
    """The speed of a run's RL, as it recorded it.

    Attributes:
        reached: Samples a second after the first step.
        delta_bytes: Bytes of a full version and of a delta, on average; 0 if the run keeps none, as an excerpt.
    """

    load: SimulatedLoad
    schedule: Schedule
    reached: float
    full_bytes: float
    delta_bytes: float
    origin: str

    @classmethod
    def of_run(cls, run: RunDir) -> RunSpeed:
        """Read a run. Raises ValueError for one without durations."""
        load, reached = measured(run)
        sizes = [(row.get("base") is None, row["bytes"]) for row in log(run.path / "weights" / "versions")]
        full, delta = ([size for whole, size in sizes if whole == wanted] for wanted in (True, False))
        made = json.loads((run.path / "provenance.json").read_text(encoding="utf-8"))
        day = time.strftime("%d %B %Y", time.gmtime((run.path / "metrics.jsonl").stat().st_mtime))
        return cls(
            load=load,
            schedule=from_dict(run.settings()).schedule(),
            reached=reached,
            full_bytes=float(np.mean(full or [0])),
            delta_bytes=float(np.mean(delta or [0])),
            origin="by composer-nb plan --run RUN --write CSV from "
            f"{len(run.steps('rl'))} RL steps, {made['cores']} cores, {day}, torch {made['versions']['torch']}",
        )

    @classmethod
    def read(cls, path: Path) -> RunSpeed:
        """Read what `write` wrote."""
        told = json.loads(path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#"))
        load = SimulatedLoad(durations=Durations.read(path), **told.pop("load"))
        return cls(load=load, schedule=Schedule(**told.pop("schedule")), **told)

    def write(self, path: Path) -> None:
        """Write the durations as data/durations.csv has them, and everything else, as JSON, into a comment on the first line.
        Raises ValueError without the sizes of versions."""
        if not self.full_bytes or not self.delta_bytes:
            raise ValueError(
                "the run keeps no full weight version or no delta, and the table needs their sizes; an excerpt has none, nor a "
                "run with services.on=false: give a whole run with services"
            )
        durations = self.load.durations
        numbers = {name: getattr(self.load, name) for name in SimulatedLoad.__slots__ if name != "durations"}
        told = {name: getattr(self, name) for name in ("reached", "full_bytes", "delta_bytes")}
        lines = [
            "# " + json.dumps({"origin": self.origin, "load": numbers, "schedule": asdict(self.schedule), **told}),
            "prompt,draw,seconds,tokens",
        ]
        lines += [f"{p},{d},{s:.3f},{durations.tokens[p, d]}" for (p, d), s in np.ndenumerate(durations.seconds)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A trainer, its engines and its sandboxes, as somebody assumes them. A rollout holds a sandbox from start to end.

    Attributes:
        batch: Rollouts of a training step.
        rollout_s: Seconds of a training step, and of a rollout on average.
        update_bytes: Bytes of one update, sent once to every region.
    """

    gpus: int
    regions: int
    sandboxes: int
    batch: int
    step_s: float
    rollout_s: float
    update_bytes: float

    @property
    def rate(self) -> float:
        """Rollouts a second at best: the trainer's or the sandboxes', whichever is lower."""
        return min(self.batch / self.step_s, self.sandboxes / self.rollout_s)

    @property
    def needed(self) -> float:
        """Sandboxes that keep the trainer busy by Little's law: arrivals a second times seconds of stay."""
        return self.batch / self.step_s * self.rollout_s

    @property
    def bytes_s(self) -> float:
        """Bytes a second into each region."""
        return self.update_bytes * self.rate / self.batch

    def dollars(self, gpu_hour: float, sandbox_hour: float, gigabyte: float) -> float:
        """Return the price of 1,000 rollouts."""
        hourly = self.gpus * gpu_hour + self.sandboxes * sandbox_hour
        return 1000 * (hourly / 3600 + self.regions * self.bytes_s / 1e9 * gigabyte) / self.rate


def sweep(
    x: Sequence[float], across: str, series: Mapping[str, Sequence[Mapping[str, Any]]], shown: Mapping[str, str]
) -> Picture:
    """Draw results of `simulate`: a panel per figure in `shown` (name → heading), a line per series, over `x` (`across`)."""
    picture = Picture(4.2 * len(shown), 3.0)
    for ax, (name, heading) in zip(picture.panels(1, len(shown)), shown.items(), strict=True):
        for (label, results), color in zip(series.items(), _COLORS, strict=False):
            ax.plot(x, [result[name] for result in results], "o-", color=color, markersize=4, label=label)
        if min(x) > 0:
            ax.set_xscale("log")
            style.log_axis(ax.xaxis)
        style.from_zero(title(ax, heading, across))
    key(picture.axes[0], loc="best")
    return picture


def bars(columns: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw a panel of bars per column, with their numbers; on a logarithmic axis where values differ more than tenfold."""
    picture = Picture(4.2 * len(columns), 2.2)
    for ax, (heading, values) in zip(picture.panels(1, len(columns)), columns.items(), strict=True):
        style.bars(ax, values, style.SKY, ",.3g")
        low, high = min(values.values()), max(values.values())
        ax.set(xlim=(0, high * 1.2))
        if high > 10 * low > 0:
            ax.set(xscale="log", xlim=(low / 10, high * 50))
        title(ax, heading)
    return picture
