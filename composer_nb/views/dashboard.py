"""A run on one board: its state, curves, ledger and work in flight.

    Dashboard(run.path)              in a notebook: follows a live run until it ends or is closed
    board(read_status(run.path))     the same at one moment, as HTML that needs no other file
    facts(read_status(run.path))     the figures alone, for a terminal

The board reads the run's directory, so it does not matter which process runs it.
"""

from __future__ import annotations

import html
import json
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from composer_nb.harness.bench import errors_line, tool_errors
from composer_nb.harness.untrusted import as_html
from composer_nb.trainer.recipe.launch import LOCK
from composer_nb.trainer.recipe.reader import RECENT, Status, read_status
from composer_nb.trainer.recipe.report import reward_trend
from composer_nb.trainer.services.head import holder
from composer_nb.trainer.services.journal import REFUSED
from composer_nb.views import style
from composer_nb.views.curves import metric, step_times, supervised
from composer_nb.views.page import Html, box, image, shown
from composer_nb.views.style import Picture, key, title

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

EVERY_S = 2.0
# Maximum fraction of time spent redrawing.
SHARE = 0.2
_STATE = {"live": style.BLUE, "complete": style.GREEN, "dead": style.VERMILION}
_REASON = {"trained": style.BLUE, "held": style.SKY, "zero_advantage": style.GREY}


# In words


def headline(status: Status) -> str:
    """Return state, progress and estimated time left in one line."""
    parts = [f"{status.path.name}: {status.state}"]
    if status.stage:
        steps = f" {status.done} of {status.total} steps" if status.total else ""
        parts.append(f"{status.stage}{steps}")
    elif status.total:
        parts.append(f"{status.done} RL steps")
    if status.left_s is not None:
        parts.append(f"{status.stage} needs about {_spoken(status.left_s)} more")
    return ", ".join(parts)


def facts(status: Status) -> Iterator[tuple[str, str]]:
    """Yield name and text of all other facts."""
    if status.state == "live":
        yield "process", str(status.pid or "unknown")
    elif status.state == "dead":
        yield "process", "none; start_detached and start_or_resume resume the run"
    if status.quiet_s is not None:
        yield "last wrote", f"{_spoken(status.quiet_s)} ago"
    yield "last line", status.last_line or "none yet"
    if status.stages:
        yield "stages, seconds", ", ".join(f"{name} {spent:.0f}" for name, spent in status.stages.items())
    for name, score in status.scores.items():
        in_12_calls = shown(score.get("pass_within", {}).get("12"), ".3f")
        yield f"{name}, held out", f"pass@1 {score['pass_at_1']:.3f}, in 12 calls {in_12_calls}"
    if share := utilisation(status):
        yield "trainer busy", f"{share:.0%} of the time of RL steps"
    if tokens := sum(status.ledger.values()):
        yield "ledger, tokens", ", ".join(f"{use} {n:,} ({n / tokens:.0%})" for use, n in _ranked(status.ledger))
    if status.served is not None:
        served = f"the slowest engine serves those of batch {status.served} of {status.trained}"
        yield "weight versions", f"{status.versions} made; {served}"
        yield "in flight", _in_flight(status)
    for engine in status.engines:
        at = f"reported version {engine.version} ({engine.hash[:12]})"
        yield engine.name, f"{at}, fetched in {engine.seconds:.2f} s, paused for {engine.paused:.3f} s"
    if status.steps:
        yield "reward", reward_trend(status.steps)
        if (p99 := status.steps[-1].get("logprob_gap_p99")) is not None:
            yield "engine and trainer, last step", f"p99 of |Δ log p| {p99:.1e}, k3 {status.steps[-1]['k3']:.1e}"
        if errors := tool_errors(step.get("errors", {}) for step in status.steps[-RECENT:]):
            yield f"errors of tools, last {min(RECENT, len(status.steps))} steps", errors_line(errors)
    notes = {None: "requested, not applied yet", REFUSED: "refused; the run's log says why"}
    for change in status.changes:
        applied = f"from step {(change.step or 0) + 1} on"
        yield f"{change.name} = {json.dumps(change.value)}", notes.get(change.step, applied)


def utilisation(status: Status) -> float | None:
    """Return the share of the wall-clock time of RL steps in which the trainer trained; None before the first step."""
    wall, train = (sum(point["time"][name] for point in status.steps) for name in ("wall_s", "train_s"))
    return train / wall if wall else None


def _in_flight(status: Status) -> str:
    if not status.slots:
        return "nothing"
    size, finished, running = (sum(getattr(s, name) for s in status.slots) for name in ("size", "done", "running"))
    verb = "being sampled" if status.state == "live" else "to be sampled again"
    training = f"{sum(s.training for s in status.slots)} groups in training"
    return f"{len(status.slots)} groups: of {size} rollouts {finished} finished, {running} {verb}; {training}"


def _ranked(ledger: Any) -> list[tuple[str, int]]:
    return sorted(((use, n) for use, n in ledger.items() if n), key=lambda pair: -pair[1])


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plain(status: Status) -> dict[str, Any]:
    """Return the status ready for JSON, with the last RL step alone."""
    values = asdict(status) | {"path": str(status.path), "scores": status.scores, "trained": status.trained}
    steps, *_ = (values.pop(name) for name in ("steps", "supervised", "infos", "checkpoints"))
    return {**values, "utilisation": utilisation(status), "last_step": steps[-1] if steps else None}


# As a picture


def picture(status: Status) -> Picture:
    """Draw curves over RL steps, the ledger, the groups in flight and the seconds of each stage; before RL, the losses."""
    if not status.steps and "midtrain" in status.supervised:
        return supervised(status)
    figure = Picture(11.5, 6.6)
    # Two parts, so that the long names of bars do not narrow the curves.
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(2, 1)).flat
    *over_steps, times = map(style.plain, upper.subplots(2, 4).flat)
    ledger, work, stages = map(style.plain, lower.subplots(1, 3))
    steps = [
        {**p, "unfinished": 1 - p.get("finished", 1.0), "dead": 1 - p.get("live_groups", 1.0)} for p in status.steps
    ]
    names = ("reward", "solved", "entropy", "staleness", "turns", "mismatch", "faults")
    for ax, name in zip(over_steps, names, strict=True):
        metric(ax, steps, name, status.bound if name == "staleness" else None)
    if status.steps:
        step_times(times, status.steps)
    title(times if status.steps else style.absent(times, "RL has no step yet"), "seconds of a step")
    ledger.xaxis.set_major_locator(MaxNLocator(4))
    ledger.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    tokens = dict(_ranked(status.ledger))
    _bars(ledger, "sampled tokens", tokens, [_REASON.get(reason, style.ORANGE) for reason in tokens])
    _work(work, status)
    _bars(stages, "seconds of complete stages", status.stages, style.SKY)
    return figure


def _bars(ax: Axes, text: str, values: Mapping[str, float], color: Any) -> None:
    title(style.bars(ax, values, color), text)
    if not values:
        style.absent(ax, "none yet").set_xticks([])


def _work(ax: Axes, status: Status) -> None:
    """Draw one bar per group, oldest first: finished, being sampled, not dispatched."""
    names = [str(slot.slot) for slot in status.slots]
    parts = {
        "finished": ([s.done for s in status.slots], style.GREEN),
        "sampled now" if status.state == "live" else "to sample again": ([s.running for s in status.slots], style.SKY),
        "not dispatched": ([s.size - s.done - s.running for s in status.slots], style.PALE),
    }
    bottoms = np.zeros(len(names))
    for label, (counts, color) in parts.items():
        ax.bar(names, counts, bottom=bottoms, color=color, label=label)
        bottoms += counts
    ax.set_xticks(range(0, len(names), max(1, len(names) // 4)))
    title(ax, "rollouts in flight, by prompt", "", "")
    if status.slots:
        ax.set_ylim(0, max(bottoms) * 1.05)
        key(ax, near=True)
    else:
        style.absent(ax, "none")


# As HTML


def head(status: Status) -> Html:
    """Return headline, progress bar and facts."""
    progress = 1.0 if status.state == "complete" else status.done / status.total if status.total else 0.0
    color = _STATE[status.state]
    rows = "".join(f'<tr><td class="quiet">{as_html(name)}</td><td>{as_html(t)}</td></tr>' for name, t in facts(status))
    return box(
        f'<div class="head"><span style="color:{color}">●</span> {as_html(headline(status))}</div>',
        '<div style="background:var(--cnb-line);height:6px;margin:.4em 0">',
        f'<div style="background:{color};height:6px;width:{progress:.1%}"></div></div><table>{rows}</table>',
    )


def board(status: Status) -> Html:
    """Return the whole board at one moment, without other files: the static twin of `Dashboard`."""
    return Html(f"{head(status).text}<div>{image(headline(status), picture(status).png())}</div>")


# Live

# Live boards of this process by run: a cell that is run again replaces its own board.
_WATCHED: dict[Path, Dashboard] = {}


class Dashboard:
    """A board that follows a live run. Raises FileNotFoundError where there is none.

    A thread reads the run every `every_s` seconds, less often on a slow machine, and redraws after a change. It stops when the
    run ends, on `close`, with the button, or when another board of the same run opens, each time after a last update. A
    finished run is drawn once.
    """

    def __init__(self, path: Path, every_s: float = EVERY_S) -> None:
        import ipywidgets

        self.seen = read_status(path)
        self.every_s = every_s
        if (other := _WATCHED.pop(self.seen.path, None)) is not None:
            other.close()
        self._closed = threading.Event()
        self._last_drawn: tuple[Any, ...] | None = None
        self._head = ipywidgets.HTML(layout=ipywidgets.Layout(width="100%"))
        self._picture = ipywidgets.Image(format="png", layout=ipywidgets.Layout(max_width="100%"))
        self._button = ipywidgets.Button(description="Stop watching", tooltip="The run goes on")
        self._button.on_click(lambda _: self.close())
        layout = ipywidgets.Layout(width="100%")
        self.widget = ipywidgets.VBox([self._head, self._picture, self._button], layout=layout)
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

    def still(self) -> Html:
        """Return the board as it is now."""
        return board(self.seen)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """Return the widget, and its static twin for front ends without widgets."""
        return {**self.widget._repr_mimebundle_(**options), "text/html": self.still().text}

    def _show(self, status: Status) -> None:
        self.seen = status
        self._head.value = head(status).text
        if pictured(status) != self._last_drawn:
            self._picture.value = picture(status).png()
            self._last_drawn = pictured(status)

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
            self._head.value = box(f"<pre>{html.escape(traceback.format_exc())}</pre>").text
        finally:
            self._end()

    def _end(self) -> None:
        self._button.layout.display = "none"
        if _WATCHED.get(self.seen.path) is self:
            del _WATCHED[self.seen.path]


def pictured(status: Status) -> tuple[Any, ...]:
    """Return the part of a status that the picture shows."""
    return status.state, len(status.steps) or status.done, status.ledger, status.slots, status.stages, status.changes
