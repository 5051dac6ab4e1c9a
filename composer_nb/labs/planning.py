"""The gain of more machines: recorded runs replayed under other loads, the arithmetic of a fleet, and figures of a mesh.

RunSpeed.of_run(run) or .read(table)  →  replace(load or schedule)  →  simulate  →  sweep (figure)
Fleet(...)                            →  Little's law, bytes, seconds, dollars: closed forms of what was assumed

`simulate` runs the real orchestrator on replayed durations, in virtual time:

    orchestrator.handle(event) → commands → world.execute(command) … world.wait() → event

Work is fixed: the first draw of rollout (slot, member) takes the same time and tokens under every schedule, so schedules are
compared on the same work. A rollout that is dispatched again is drawn anew for the same prompt.

The optimum is an upper bound on samples per second, with all places always busy or the trainer always busy, whichever is slower:
N / max(sum of durations / places, steps · train_s). The model leaves out that rollouts slow each other down in an engine.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from numpy.typing import ArrayLike, NDArray

from composer_nb.harness.plain import NotNegative, Some, require_ranges
from composer_nb.trainer.parallel.memory import Need
from composer_nb.trainer.parallel.mesh import Axis, Mesh
from composer_nb.trainer.recipe.reader import rl_tables
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.services import orchestrator as fsm
from composer_nb.trainer.settings import from_dict
from composer_nb.trainer.versions.store import stored_bytes
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds and tokens of rollouts [prompts, draws]."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @classmethod
    def read(cls, path: Path) -> Durations:
        """Read a table of prompt, draw, seconds, tokens, as data/durations.csv. Raises ValueError for a table with holes."""
        rows = np.loadtxt(path, delimiter=",", comments=("#", "prompt"), ndmin=2)
        prompts, draws = int(rows[:, 0].max()) + 1, int(rows[:, 1].max()) + 1
        if rows.shape != (prompts * draws, 4) or len(np.unique(rows[:, :2], axis=0)) != len(rows):
            raise ValueError(f"{path}: needs four columns and one row for each of {prompts} prompts × {draws} draws")
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        return cls(seconds=rows[:, 2].reshape(prompts, draws), tokens=rows[:, 3].astype(int).reshape(prompts, draws))

    def rollout(self, slot: int, position: int, again: int) -> tuple[float, int]:
        """Return (seconds, tokens) of a rollout dispatched for the (`again` + 1)th time: any draw of the slot's prompt."""
        prompt = slot % len(self.seconds)
        draw = Random(f"{slot} {position} {again}").randrange(self.seconds.shape[1])
        return float(self.seconds[prompt, draw]), int(self.tokens[prompt, draw])

    @classmethod
    def of_run(cls, run: RunDir) -> Durations:
        """Read what the RL of a run as services recorded: `time.rollouts_s` of its steps, and the tokens that were sampled.
        Steps after a restart, which know only a part, are left out. Raises ValueError where nothing is left."""
        recorded = {step["step"] - 1: step["time"].get("rollouts_s", [None]) for step in run.steps("rl")}
        seconds, tokens = list[float](), list[int]()
        for number, table in rl_tables(run, ["policy_version"]):
            if None not in recorded[number]:
                seconds += recorded[number]
                tokens += [int((np.array(row) >= 0).sum()) for row in table["policy_version"].to_pylist()]
        group = run.settings()["rl"]["group"]
        if not seconds or len(seconds) != len(tokens):
            raise ValueError(f"{run.path.name}: no durations of rollouts; needs services.on and stored rollouts")
        return cls(seconds=np.array(seconds).reshape(-1, group), tokens=np.array(tokens).reshape(-1, group))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """Workers, trainer, and their speed.

    Attributes:
        capacity: Rollouts at a time per worker.
        train_s: Seconds of a training step.
        publish_s: Seconds from the end of a step until every engine serves its weights; running rollouts continue with
            them.
        report_s: Seconds from the end of a rollout until its worker says so.
    """

    durations: Durations
    workers: Some = 4
    capacity: Some = 16
    train_s: NotNegative = 60.0
    publish_s: NotNegative = 0.0
    report_s: NotNegative = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        require_ranges(self, "load")


class World:
    """Workers and a trainer that only take time, which jumps from event to event."""

    def __init__(self, load: SimulatedLoad) -> None:
        self.load, self.version = load, 0
        self.queue: list[tuple[float, int, fsm.Event]] = []
        self.now, self.number = 0.0, 0
        self.drawn: dict[tuple[int, int], int] = {}
        self.running: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        self.lengths: dict[tuple[int, int, int], int] = {}
        self.batches: list[fsm.Train] = []
        self.busy_s = 0.0
        for number in range(load.workers):
            self.after(0.0, fsm.Joined(at=0.0, worker=f"w{number}", capacity=load.capacity))
        if load.publish_s:
            self.after(0.0, fsm.Served(at=0.0, version=0))

    def after(self, seconds: float, event: fsm.Event) -> None:
        """Let an event happen in `seconds`."""
        self.number += 1  # events of the same instant stay in order
        heapq.heappush(self.queue, (self.now + seconds, self.number, event))

    def wait(self) -> fsm.Event:
        """Return the next event, at its time."""
        while self.queue:
            self.now, _, event = heapq.heappop(self.queue)
            if happened := self._happened(event):
                return happened
        raise RuntimeError("nothing is under way and the orchestrator wants nothing: a deadlock")

    def execute(self, command: fsm.Command) -> None:
        match command:
            case fsm.Dispatch():
                for position in command.members:
                    self._start(command.slot, command.attempt, position)
            case fsm.Cancel():
                for key in [key for key in self.running if key[:2] == (command.slot, command.attempt)]:
                    self._abandon(key)
            case fsm.Train():
                self.batches.append(command)
                self.after(self.load.train_s, fsm.Trained(at=0.0, step=command.step))

    def _start(self, slot: int, attempt: int, position: int) -> None:
        again = self.drawn.get((slot, position), 0)
        self.drawn[slot, position] = again + 1
        seconds, tokens = self.load.durations.rollout(slot, position, again)
        self.running[slot, attempt, position] = (self.now, seconds, tokens)
        self.lengths[slot, attempt, position] = tokens
        numbers = {"slot": slot, "attempt": attempt, "member": position, "sampled": tokens}
        self.after(seconds + self.load.report_s, fsm.Finished(at=0.0, oldest_version=self.version, **numbers))

    def _abandon(self, key: tuple[int, int, int]) -> None:
        start, seconds, tokens = self.running.pop(key)
        self.busy_s += self.now - start
        sampled = int(tokens * min(1.0, (self.now - start) / seconds))
        names = dict(zip(("slot", "attempt", "member"), key, strict=True))
        self.after(0.0, fsm.Faulted(at=0.0, reason="cancelled", sampled=sampled, **names))

    def _happened(self, event: fsm.Event) -> fsm.Event | None:
        """Return the event with its time; None if it was cancelled."""
        if isinstance(event, fsm.Finished):
            entry = self.running.pop((event.slot, event.attempt, event.member), None)
            if entry is None:
                return None
            self.busy_s += entry[1]
        elif isinstance(event, fsm.Trained) and self.load.publish_s:
            self.after(self.load.publish_s, fsm.Served(at=0.0, version=event.step + 1))
        elif isinstance(event, fsm.Trained | fsm.Served):
            self.version = event.step + 1 if isinstance(event, fsm.Trained) else event.version
        return replace(event, at=self.now)


def simulate(schedule: Schedule, load: SimulatedLoad) -> dict[str, Any]:
    """Run `schedule.steps` batches in virtual time and return the figures.

    These are samples_s, the optimum and their ratio; utilisation; staleness; the share of tokens not trained; trained against
    asked lengths. Lengths are compared over the first half of the steps (a run in progress) and over all, with the rollouts that
    the same number of prompts in order would have given: ratio of means, and the KS distance. Raises RuntimeError with the
    orchestrator's reason if it stops.
    """
    if not schedule.steps:
        raise ValueError("services.steps=0: say how many steps to simulate")
    orchestrator, world = fsm.Orchestrator(schedule), World(load)
    drained = False
    while not drained:
        for command in orchestrator.handle(world.wait()):
            if isinstance(command, fsm.Stop):
                raise RuntimeError(command.error)
            drained = drained or isinstance(command, fsm.Drained)
            world.execute(command)
    seconds = world.now
    slots = range(schedule.steps * schedule.prompts)
    first = [load.durations.rollout(slot, position, 0) for slot in slots for position in range(schedule.group)]
    work_s = sum(duration for duration, _ in first)
    requested = [tokens for _, tokens in first]
    trained = [world.lengths[key] for batch in world.batches for key in batch.rollouts]
    best_s = max(work_s / (load.workers * load.capacity), schedule.steps * load.train_s)
    books, half = orchestrator.books, len(trained) // 2
    return {
        "seconds": seconds,
        "samples_s": len(trained) / seconds,
        "optimum_s": len(trained) / best_s,
        "of_optimum": best_s / seconds,
        "workers_busy": world.busy_s / (load.workers * load.capacity * seconds),
        "trainer_busy": schedule.steps * load.train_s / seconds,
        **{
            f"staleness_{what}": sum(age * n for age, n in ages.items()) / ages.total()
            for what, ages in books.staleness.items()
        },
        "staleness_max": max(books.staleness["total"]),
        "not_trained": 1 - books.ledger["trained"] / books.counts["received_tokens"],
        "half_mean_ratio": float(np.mean(trained[:half]) / np.mean(requested[:half])),
        "half_ks": ks(trained[:half], requested[:half]),
        "mean_ratio": float(np.mean(trained) / np.mean(requested)),
        "ks": ks(trained, requested),
    }


def ks(a: ArrayLike, b: ArrayLike) -> float:
    """Return the Kolmogorov-Smirnov distance: the largest gap between two distribution functions."""
    a, b = np.sort(a), np.sort(b)
    at = np.concatenate([a, b])
    return float(np.abs(np.searchsorted(a, at, "right") / len(a) - np.searchsorted(b, at, "right") / len(b)).max())


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
        """Read a run. Raises ValueError for one without durations, or with one step."""
        settings, times = from_dict(run.settings()), [step["time"] for step in run.steps("rl")]
        if len(times) == 1:
            raise ValueError(f"{run.path.name}: one RL step, and in it the start of the services; give a run of more")
        load = SimulatedLoad(
            durations=Durations.of_run(run),
            workers=settings.services.engines,
            capacity=settings.slots,
            train_s=sum(time["train_s"] for time in times) / len(times),
            publish_s=run.query("SELECT AVG(seconds) FROM served")[0][0] or 0.0,
            report_s=fsm.WORK_S / 2,  # workers report at such intervals
        )
        after_start = sum(time["wall_s"] for time in times[1:])  # the first step has the start of the services in it
        sizes = stored_bytes(run.path / "weights" / "versions")
        provenance = json.loads((run.path / "provenance.json").read_text(encoding="utf-8"))
        day = time.strftime("%d %B %Y", time.gmtime((run.path / "metrics.jsonl").stat().st_mtime))
        return cls(
            load=load,
            schedule=settings.schedule(),
            reached=(len(times) - 1) * settings.rl.prompts * settings.rl.group / after_start,
            full_bytes=sizes.get("full_bytes", 0.0),
            delta_bytes=sizes.get("delta_bytes", 0.0),
            origin="by composer-nb plan --run RUN --write CSV from "
            f"{len(run.steps('rl'))} RL steps, {provenance['cores']} cores, {day}, torch {provenance['versions']['torch']}",
        )

    @classmethod
    def read(cls, path: Path) -> RunSpeed:
        """Read what `write` wrote."""
        header = json.loads(path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#"))
        load = SimulatedLoad(durations=Durations.read(path), **header.pop("load"))
        return cls(load=load, schedule=Schedule(**header.pop("schedule")), **header)

    def write(self, path: Path) -> None:
        """Write the durations as data/durations.csv has them, and everything else, as JSON, into a comment on the first line.
        Raises ValueError without the sizes of versions."""
        if not self.full_bytes or not self.delta_bytes:
            raise ValueError(
                "the run keeps no full weight version or no delta, and the table needs their sizes; an excerpt has none, nor a "
                "run with services.on=false: give a whole run with services"
            )
        durations = self.load.durations
        header: dict[str, Any] = {"origin": self.origin}
        header["load"] = {name: getattr(self.load, name) for name in SimulatedLoad.__slots__ if name != "durations"}
        header["schedule"] = asdict(self.schedule)
        header |= {name: getattr(self, name) for name in ("reached", "full_bytes", "delta_bytes")}
        lines = ["# " + json.dumps(header), "prompt,draw,seconds,tokens"]
        lines += [f"{p},{d},{s:.3f},{durations.tokens[p, d]}" for (p, d), s in np.ndenumerate(durations.seconds)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# Requests to S3, one after another, before an engine has the files of a version, as s3fs makes them: half a look in vain, which
# takes four, and one that finds it; two for anchors; two each, of which one asks for the size, for manifest, config.json and
# payload. A relay has config.json, which is the same in all versions. That is 11 and 9. The seconds over links of 40 and 160 ms
# (`measure` of scripts/bench/hosts_bench.py, one engine, a million weights) differ by 15 and 12.5; what the others are is open.
ROUNDS, RELAY_ROUNDS = 15.0, 12.5
# TCP's first window (RFC 6928), and the share of payload in its frames.
FIRST_WINDOW, PAYLOAD = 14_600, 1448 / 1514


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLink:
    """A link into a region: Mbit/s, and seconds of a round trip."""

    rate: float
    round_trip: float = 0.0

    def seconds(self, byte_count: float, rounds: float = 0.0) -> float:
        """Return the seconds of `rounds` requests and a transfer. Its window doubles every round trip until the link is full."""
        bytes_s = self.rate * 1e6 / 8 * PAYLOAD
        begin = min(byte_count, bytes_s * self.round_trip)
        return (rounds + math.log2(1 + begin / FIRST_WINDOW)) * self.round_trip + (byte_count - begin) / bytes_s


def deliveries(byte_count: float, link: RegionLink, engines: int, local_s: float) -> tuple[float, float]:
    """Return the seconds in which a version reaches all engines of a region, from the store and by a relay. `local_s`: seconds
    over a link without a limit, for encoding, the store's own work, checking and decoding."""
    return local_s + link.seconds(engines * byte_count, ROUNDS), local_s + link.seconds(byte_count, RELAY_ROUNDS)


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
    x: Sequence[float], across: str, series: Mapping[str, Sequence[Any]], headings: Mapping[str, str], limit: float = 0
) -> Picture:
    """Draw results of `simulate` over `x` (`across`): a panel per figure in `headings`, a line per series, `limit` dashed."""
    picture = Picture(4.2 * len(headings), 3.0)
    for ax, (name, heading) in zip(picture.panels(1, len(headings)), headings.items(), strict=True):
        for (label, results), color in zip(series.items(), style.COLORS, strict=False):
            ax.plot(x, [result[name] for result in results], "o-", color=color, markersize=4, label=label)
        if limit and name == "samples_s":
            ax.axhline(limit, color=style.GREY, linestyle="--", label="the trainer's limit")
        if min(x) > 0:
            ax.set_xscale("log")
            style.log_axis(ax.xaxis)
            ax.set_xticks(x, [f"{value:.3g}" for value in x])
        style.from_zero(title(ax, heading, across))
    key(picture.axes[0])
    return picture


def bars(columns: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw a panel of bars per column, with their numbers."""
    picture = Picture(4.2 * len(columns), 2.2)
    for ax, (heading, values) in zip(picture.panels(1, len(columns), sharey=True), columns.items(), strict=True):
        style.bars(ax, values, style.SKY, ",.3g").set_xlim(0, 1.25 * max(values.values()))
        title(ax, heading)
    return picture


GIB = 2**30
_GRIDS: dict[str, tuple[Axis, ...]] = {
    "attention and embeddings": ("replicate", "shard", "cp"),
    "experts": ("expert_replicate", "expert_shard", "ep"),
}
_SHADES = ListedColormap(["#ffffff", "#e8f3fa", "#cfe6f4", "#b3d8ee", "#95c8e6", "#78b8dd", "#5ca7d2", "#4396c6"])


def grids(mesh: Mesh, experts: int) -> Picture:
    """Draw both grids, one column per rank; a darker field is a higher coordinate."""
    picture = Picture(max(6.0, 0.55 * mesh.world + 2.5), 3.6)
    for ax, (name, axes) in zip(picture.panels(2, 1), _GRIDS.items(), strict=True):
        places = np.array([[mesh.place(rank)[axis] for rank in range(mesh.world)] for axis in axes])
        ax.imshow(places, cmap=_SHADES, aspect="auto", vmin=0, vmax=max(7, int(places.max())))
        for (row, rank), at in np.ndenumerate(places):
            style.note(ax, rank, row, str(at), ha="center", color=style.DARK)
        ranks = [mesh.experts(rank, experts) for rank in range(mesh.world)]
        labels = [f"{rank}\n{e.start}–{e.stop - 1}" if name == "experts" else str(rank) for rank, e in enumerate(ranks)]
        ax.set_xticks(range(mesh.world), labels)
        ax.set_yticks(range(len(axes)), axes)
        ax.grid(False)
        title(ax, name, "rank" if name != "experts" else "rank, and its experts")
    return picture


def needs(estimates: Mapping[str, Need], limit: int) -> Picture:
    """Draw GiB of one rank, one bar per estimate; the line is `limit` bytes."""
    picture, ax = style.one_panel(9.0, 1.3 + 0.45 * len(estimates))
    colors = {"weights": style.BLUE, "gradients": style.SKY, "optimizer": style.ORANGE, "only at the peak": style.GREY}
    parts = {part: [getattr(need, part) / GIB for need in estimates.values()] for part in list(colors)[:3]}
    peaks = np.array([need.peak / GIB for need in estimates.values()])
    parts["only at the peak"] = list(peaks - np.sum(list(parts.values()), axis=0))
    style.stacked(ax, list(estimates), parts, colors)
    ax.axvline(limit / GIB, color=style.VERMILION, linewidth=1.4, label="what a rank has")
    title(ax, "memory of a rank", "GiB")
    key(ax)
    return picture
