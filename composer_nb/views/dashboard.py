"""A run on one board: its state, scores, curves, what each service does, and work in flight.

    Dashboard(run.path)              in a notebook: follows a live run until it ends or is closed
    board(read_status(run.path))     the same at one moment, as HTML that needs no other file
    facts(read_status(run.path))     what the services do, for a terminal

The board reads the run's directory, so it does not matter which process runs it. `Desk` answers what the front end asks, in a
notebook and on the page (`operations/live.py`): `desk.js` draws both.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

from composer_nb.harness.tool_errors import errors_line, tool_errors
from composer_nb.harness.untrusted import as_html, visible_lines
from composer_nb.trainer.recipe.launch import LOCK, stages_of
from composer_nb.trainer.recipe.reader import RECENT, ReadOnly, Status, read_status
from composer_nb.trainer.recipe.report import reward_trend
from composer_nb.trainer.services.head import holder
from composer_nb.trainer.services.journal import REFUSED
from composer_nb.views import curves, rollouts, runs, style
from composer_nb.views.charts import CONFIG, WINDOW, Chart, Figure, bars, scored, script, stack
from composer_nb.views.page import Html, box, html_table, image
from composer_nb.views.rollout import StoredRollout, read
from composer_nb.views.scores import by_policy

# What JupyterLab and the page share: it draws what `Desk` answers.
FRONT_END, STYLES = (Path(__file__).with_name(f"desk.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))

EVERY_S = 2.0
# Maximum number of rollouts in a list.
MOST = 500
# Maximum fraction of time spent redrawing.
SHARE = 0.2
_STATE = {"live": style.BLUE, "complete": style.GREEN, "dead": style.VERMILION}
_REASON = {"trained": style.BLUE, "held": style.SKY, "zero_advantage": style.GREY}


# In words


def headline(status: Status) -> str:
    """Return state, progress and estimated time left in one line."""
    parts = [f"{status.path.name}: {status.state}"]
    if status.stage:
        steps = f" {status.steps_done} of {status.total} steps" if status.total else ""
        parts.append(f"{status.stage}{steps}")
    elif status.total:
        parts.append(f"{status.steps_done} RL steps")
    if status.left_s is not None:
        parts.append(f"{status.stage} needs about {_spoken(status.left_s)} more")
    return ", ".join(parts)


def facts(status: Status) -> Iterator[tuple[str, str]]:
    """Yield name and text of what a run and its services do now."""
    if status.state == "live":
        yield "process", str(status.pid or "unknown")
    elif status.state == "dead":
        yield "process", "none; start_detached and start_or_resume resume the run"
    if status.quiet_s is not None:
        yield "last wrote", f"{_spoken(status.quiet_s)} ago"
    yield "last line", status.last_line or "none yet"
    if recent := status.steps[-WINDOW:]:
        wall_s = sum(point["time"]["wall_s"] for point in recent)
        yield (
            "trainer busy",
            f"{utilisation(status):.0%} of the time of RL steps; the last {len(recent)} took {wall_s / len(recent):.1f} s each",
        )
        yield "tokens sampled a second", f"{sum(point.get('sampled') or 0 for point in recent) / wall_s:,.0f}"
        yield "reward", reward_trend(status.steps)
        if (age := recent[-1].get("staleness")) is not None:
            yield "staleness of the newest batch", f"{age:.2f} batches, bound {status.bound}"
        if (p99 := recent[-1].get("logprob_gap_p99")) is not None:
            yield "engine and trainer, last step", f"p99 of |Δ log p| {p99:.1e}, k3 {recent[-1]['k3']:.1e}"
        if errors := tool_errors(step.get("errors", {}) for step in status.steps[-RECENT:]):
            yield f"errors of tools, last {min(RECENT, len(status.steps))} steps", errors_line(errors)
        for service, share in (recent[-1]["time"].get("engine_waits") or {}).items():
            yield f"engine waits for the {service}", f"{share:.0%} of the time"
    if status.served is not None:
        served = f"the slowest engine serves those of batch {status.served} of {status.trained}"
        yield "weight versions", f"{status.versions} made; {served}"
        yield "in flight", _in_flight(status)
    if status.stages:
        yield "stages, seconds", ", ".join(f"{name} {spent:.0f}" for name, spent in status.stages.items())
    if tokens := sum(status.ledger.values()):
        used = sorted(status.ledger.items(), key=lambda pair: -pair[1])
        yield "ledger, tokens", ", ".join(f"{use} {n:,} ({n / tokens:.0%})" for use, n in used if n)


def tables(status: Status) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield heading and rows, the head first, of what is known of a run."""
    yield "services", [("", "now"), *facts(status)]
    if status.engines:
        engines = [(e.name, str(e.version), e.hash[:12], f"{e.seconds:.2f}", f"{e.paused:.3f}") for e in status.engines]
        yield "engines", [("engine", "version", "hash", "fetched, s", "paused, s"), *engines]
    if status.changes:
        notes = {None: "not applied yet", REFUSED: "refused; the run's log says why"}
        rows = [(c.name, str(c.value), notes.get(c.step, f"step {(c.step or 0) + 1}")) for c in status.changes]
        yield "settings changed while it was live", [("setting", "value", "from"), *rows]
    if status.scores:
        yield "held-out tasks", [*by_policy(status.scores)]


def utilisation(status: Status) -> float | None:
    """Return the share of the wall-clock time of RL steps in which the trainer trained; None before the first step."""
    wall, train = (sum(point["time"][name] for point in status.steps) for name in ("wall_s", "train_s"))
    return train / wall if wall else None


def _in_flight(status: Status) -> str:
    if not status.slots:
        return "nothing"
    size, finished, running = (sum(getattr(s, name) for s in status.slots) for name in ("size", "finished", "running"))
    verb = "being sampled" if status.state == "live" else "to be sampled again"
    training = f"{sum(s.training for s in status.slots)} groups in training"
    return f"{len(status.slots)} groups: of {size} rollouts {finished} finished, {running} {verb}; {training}"


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plain(status: Status) -> dict[str, Any]:
    """Return the status ready for JSON, with the last RL step alone."""
    values = asdict(status) | {"path": str(status.path), "scores": status.scores, "trained": status.trained}
    steps, *_ = (values.pop(name) for name in ("steps", "supervised", "infos", "checkpoints"))
    return {**values, "utilisation": utilisation(status), "last_step": steps[-1] if steps else None}


# As charts and as HTML


def charts(status: Status) -> list[Chart]:
    """Return the panels that a run has data for: held-out scores, RL, the work in flight, and before RL the losses."""
    panels = []
    if scores := status.scores:
        stages = stages_of(status.settings) if status.settings else status.stages
        planned: dict[str, Any] = {stage.removeprefix("eval_"): {} for stage in stages if stage.startswith("eval_")}
        rows = [scored(name, s.get("pass_at_1"), s.get("ci95")) for name, s in (planned | {**scores}).items()]
        panels.append(bars("held-out tasks, pass@1 (95 % over tasks)", rows, style.POLICY, unit="share", form=".2f"))
    panels += curves.panels(status) or curves.supervised(status).charts
    panels += curves.times(status)
    used = sorted(((use, n) for use, n in status.ledger.items() if n), key=lambda pair: -pair[1])
    if used:
        colors = {use: _REASON.get(use, style.ORANGE) for use, _ in used}
        panels.append(bars("sampled tokens", [{"name": use, "value": n} for use, n in used], colors, form=",.0f"))
    return [*panels, *([_work(status)] if status.slots else [])]


def _work(status: Status) -> Chart:
    """Return one bar per group, oldest first: finished, being sampled, not dispatched."""
    running = "sampled now" if status.state == "live" else "to sample again"
    parts = {"finished": style.GREEN, running: style.SKY, "not dispatched": style.GREY}
    rows = [
        {"at": slot.slot, "part": part, "value": count, "order": order}
        for slot in status.slots
        for order, (part, count) in enumerate(
            zip(parts, (slot.finished, slot.running, slot.size - slot.finished - slot.running), strict=True)
        )
    ]
    return stack("rollouts in flight", rows, parts, x="prompt", mark="bar")


def progress(status: Status) -> float:
    """Return the share of the stage's steps that are done."""
    return 1.0 if status.state == "complete" else status.steps_done / status.total if status.total else 0.0


def board(status: Status) -> Html:
    """Return the whole board at one moment, without other files and scripts: the static twin of `Dashboard`."""
    color = _STATE[status.state]
    panels = Figure(charts(status), columns=3, width=260)
    return box(
        f'<div class="head"><span style="color:{color}">●</span> {as_html(headline(status))}</div>',
        '<div style="background:var(--cnb-line);height:6px;margin:.4em 0">',
        f'<div style="background:{color};height:6px;width:{progress(status):.1%}"></div></div>',
        image(headline(status), panels.png()) if panels.charts else "",
        *(f'<div class="head">{heading}</div>{html_table(rows, head)}' for heading, (head, *rows) in tables(status)),
    )


# Live


class Desk:
    """Answers what the front end (`desk.js`) asks about the run in `path`, and about the runs beside it."""

    ASKS = ("board", "runs", "rollouts", "rollout")

    def __init__(self, path: Path) -> None:
        self.path, self.over = path.resolve(), ""
        self._listed: tuple[tuple[str, str], list[StoredRollout]] = ("", ""), []
        self._lock = threading.Lock()

    def answer(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one of `ASKS`, or `error` with what is wrong with `values`."""
        method = getattr(self, name)
        try:
            if unknown := [value for value in values if value not in signature(method).parameters]:
                parameters = ", ".join(signature(method).parameters)
                raise ValueError(f"{', '.join(unknown)}: no parameter of {name}; it has {parameters}")
            with self._lock:
                return dict(method(**values))
        except (ValueError, FileNotFoundError) as error:
            return {"error": visible_lines(str(error))}

    def board(self, over: str | None = None) -> dict[str, Any]:
        """Return the state of the run. `over`: paths of runs, one a line, whose curves are laid over; the last ones by
        default."""
        self.over = self.over if over is None else over
        return self.describe(read_status(self.path))

    def describe(self, status: Status) -> dict[str, Any]:
        """Return what the front end draws of a status."""
        panels = charts(status)
        if names := [name for name in self.over.split("\n") if name]:
            groups = runs.grouped([status, *(read_status(path) for path in self._neighbours() if str(path) in names)])
            shared = curves.overlaid({name: [run.steps for run in group] for name, group in groups.items()})
            titles = {title for title, _, _ in curves.METRICS.values()}
            panels = [*shared, *(chart for chart in panels if chart.title not in titles)]
        return {
            "run": status.path.name,
            "headline": headline(status),
            "state": status.state,
            "progress": progress(status),
            "charts": [{"title": chart.title, "rows": chart.rows, "spec": chart.spec} for chart in panels],
            "config": CONFIG,
            "tables": [[heading, *rows] for heading, rows in tables(status)],
            "sources": rollouts.sources(ReadOnly(self.path)),
        }

    def runs(self, where: str = "") -> dict[str, Any]:
        """Return a row for each run beside this one that fits `where`."""
        return {"rows": runs.run_rows(self._neighbours(), where)}

    def rollouts(self, source: str = "", where: str = "") -> dict[str, Any]:
        """Return a row for each rollout of `source` that fits `where`."""
        fitting = rollouts.search(ReadOnly(self.path), source, where, most=MOST + 1)
        self._listed = (source, where), fitting[:MOST]
        return {"rows": rollouts.rows(fitting[:MOST]), "cut": len(fitting) > MOST, "flags": [*rollouts.FLAGS]}

    def rollout(self, number: str | int, source: str = "", where: str = "") -> dict[str, Any]:
        """Return a rollout of a list to read, as HTML, whatever was listed since. Raises ValueError for another number."""
        if self._listed[0] != (source, where) or not self._listed[1]:
            self.rollouts(source, where)
        listed = self._listed[1]
        if not str(number).isdecimal() or int(number) >= len(listed):
            raise ValueError(f"rollout {number}: the list has {len(listed)}")
        return {"html": read(listed[int(number)]).text}

    def _neighbours(self) -> list[Path]:
        return runs.runs_below(self.path.parent)


# Live boards of this process by run: a cell that is run again replaces its own board.
_WATCHED: dict[Path, Dashboard] = {}


class Dashboard:
    """A board that follows a live run. Raises FileNotFoundError where there is none.

    A thread reads the run every `every_s` seconds, less often on a slow machine, and redraws after a change. It stops when the
    run ends, on `close`, with the button, or when another board of the same run opens, each time after a last update. A
    finished run is drawn once.
    """

    def __init__(self, path: Path, every_s: float = EVERY_S) -> None:
        self.seen = read_status(path)
        self.every_s = every_s
        if (other := _WATCHED.pop(self.seen.path, None)) is not None:
            other.close()
        self._closed = threading.Event()
        self._desk = Desk(self.seen.path)
        self.widget = _widget(self._desk, self.close)
        self._show(self.seen)
        self._thread = threading.Thread(target=self._keep_up, name=f"board of {self.seen.path.name}", daemon=True)
        if self.seen.state == "live":
            _WATCHED[self.seen.path] = self
            self._thread.start()
        else:
            self._end()

    @property
    def live(self) -> bool:
        """True while the board follows the run."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Update once more, then stop. The run goes on."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """Return the widget, and its static twin for front ends without widgets."""
        return {**self.widget._repr_mimebundle_(**options)[0], "text/html": board(self.seen).text}

    def _show(self, status: Status) -> None:
        self.seen = status
        self.widget.board = self._desk.describe(status)

    def _keep_up(self) -> None:
        """Update and rest by turns; a rest lasts the time of the update divided by SHARE. Closing the board or the end of the run
        ends a rest and leads to a last update."""
        rest_s = self.every_s
        try:
            while self.seen.state == "live":
                deadline = time.perf_counter() + rest_s
                while time.perf_counter() < deadline and holder(self.seen.path / LOCK) is not None:
                    if self._closed.wait(min(self.every_s, EVERY_S)):
                        break
                start = time.perf_counter()
                self._show(read_status(self.seen.path))
                if self._closed.is_set():
                    break
                rest_s = max(self.every_s, (time.perf_counter() - start) / SHARE)
        except Exception:  # there is nobody above a thread: what went wrong stands in the board's place
            self.widget.board = {"error": traceback.format_exc()}
        finally:
            self._end()

    def _end(self) -> None:
        self.widget.follows = False
        if _WATCHED.get(self.seen.path) is self:
            del _WATCHED[self.seen.path]


def _widget(desk: Desk, close: Callable[[], None]) -> Any:
    """Return the front end as a widget of JupyterLab, whose questions `desk` answers."""
    import anywidget
    import traitlets

    class DeskWidget(anywidget.AnyWidget):
        _esm = f"{script()}\n{FRONT_END}"
        _css = STYLES
        board = traitlets.Dict().tag(sync=True)
        follows = traitlets.Bool(True).tag(sync=True)

        @anywidget.experimental.command
        def ask(self, message: Any, buffers: Any) -> Any:
            if message["name"] == "close":
                close()
                return {}, buffers
            return desk.answer(message["name"], message["values"]), buffers

    return DeskWidget()
