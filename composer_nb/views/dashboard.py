"""A run on one board: where it stands, its curves, its ledger, what is under way.

    Dashboard(run.path)        in a notebook: keeps up with a live run until it ends or is closed
    board(look(run.path))      the same at one moment, as HTML that needs nothing else
    facts(look(run.path))      its figures alone, for a terminal

It attaches to the run's directory, so it does not matter who carries the run, or whether anybody does.
"""

from __future__ import annotations

import base64
import html
import json
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from composer_nb.trainer.journal import REFUSED
from composer_nb.trainer.look import Seen, look
from composer_nb.views import style
from composer_nb.views.curves import line, step_times
from composer_nb.views.rollout import Html
from composer_nb.views.style import Picture, as_share, from_zero, key, title, whole_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY_S = 2.0
SHARE = 0.2
"""Of the time, at most, that a live board spends drawing: the machine has better things to do."""
_STATE = {"live": style.BLUE, "complete": style.GREEN, "dead": style.VERMILION}
_REASON = {"trained": style.BLUE, "held": style.SKY, "zero_advantage": style.GREY}
_BOX = (
    "background:#fff;color:#222;padding:.6em .8em;border:1px solid #e3e3e3;border-radius:4px;"
    "font:13px/1.5 system-ui,sans-serif"
)


# In words


def headline(seen: Seen) -> str:
    """State, steps done and an estimate of the rest, in a line."""
    parts = [f"{seen.path.name}: {seen.state}"]
    if seen.stage:
        steps = f" {seen.done} of {seen.total} steps" if seen.total else ""
        parts.append(f"{seen.stage}{steps}")
    elif seen.total:
        parts.append(f"{seen.done} RL steps")
    if seen.left_s is not None:
        parts.append(f"{seen.stage} needs about {_spoken(seen.left_s)} more")
    return ", ".join(parts)


def facts(seen: Seen) -> Iterator[tuple[str, str]]:
    """What else is known, a line each."""
    if seen.state == "live":
        yield "carried by", f"process {seen.pid or '(it does not say which)'}"
    elif seen.state == "dead":
        yield "carried by", "nobody; start_detached and start_or_resume go on where it stands"
    if seen.quiet_s is not None:
        yield "last wrote", f"{_spoken(seen.quiet_s)} ago"
    yield "last said", seen.last_line or "nothing yet"
    if seen.stages:
        yield "stages, seconds", ", ".join(f"{name} {spent:.0f}" for name, spent in seen.stages.items())
    if share := utilisation(seen):
        yield "trainer at work", f"{share:.0%} of the time of RL's steps"
    if tokens := sum(seen.ledger.values()):
        yield "ledger, tokens", ", ".join(f"{why} {n:,} ({n / tokens:.0%})" for why, n in _ranked(seen.ledger))
    if seen.served is not None:
        served = f"the slowest engine serves those of batch {seen.served} of {seen.trained}"
        yield "weight versions", f"{seen.versions} made; {served}"
        yield "under way", _under_way(seen)
    for engine in seen.engines:
        at = f"reported version {engine.version} ({engine.hash[:12]})"
        yield engine.name, f"{at}, fetched in {engine.seconds:.2f} s, paused for {engine.paused:.3f} s"
    for change in seen.changes:
        since = {None: "asked for, not taken up yet", REFUSED: "refused; the run's log says why"}
        yield (
            f"{change.name} = {json.dumps(change.value)}",
            since.get(change.step, f"from step {(change.step or 0) + 1} on"),
        )


def utilisation(seen: Seen) -> float | None:
    """Share of the wall-clock time of RL's steps in which the trainer trained; None before the first step."""
    wall = sum(point["time"]["wall_s"] for point in seen.steps)
    return sum(point["time"]["train_s"] for point in seen.steps) / wall if wall else None


def _under_way(seen: Seen) -> str:
    if not seen.slots:
        return "nothing"
    size, done, running = (sum(getattr(s, name) for s in seen.slots) for name in ("size", "done", "running"))
    verb = "being sampled" if seen.state == "live" else "to be sampled again"
    training = sum(s.training for s in seen.slots)
    return (
        f"{len(seen.slots)} groups: of {size} rollouts {done} finished, {running} {verb}; {training} groups in training"
    )


def _ranked(ledger: Any) -> list[tuple[str, int]]:
    return sorted(((why, n) for why, n in ledger.items() if n), key=lambda pair: -pair[1])


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plain(seen: Seen) -> dict[str, Any]:
    """All of it, ready for JSON; of RL's steps the last."""
    known = asdict(seen)
    steps = known.pop("steps")
    return {
        **known,
        "path": str(seen.path),
        "utilisation": utilisation(seen),
        "last_step": steps[-1] if steps else None,
    }


# As a picture


def picture(seen: Seen) -> Picture:
    """Curves over RL's steps; below them the ledger, the groups under way and the seconds of every stage."""
    drawn = Picture(9.5, 6.6)
    for ax, panel in zip(drawn.panels(3, 3), _PANELS, strict=True):
        panel(ax, seen)
    return drawn


def _reward(ax: Axes, seen: Seen) -> None:
    line(ax, seen.steps, "reward", style.ORANGE, "reward")
    title(_over_steps(ax, seen), "reward", "", "mean of a batch")


def _solved(ax: Axes, seen: Seen) -> None:
    line(ax, seen.steps, "best_of_group", style.GREEN, "any of a group")
    line(ax, seen.steps, "solved", style.BLUE, "rollouts")
    title(as_share(_over_steps(ax, seen), 1.02), "solved")
    key(ax)


def _entropy(ax: Axes, seen: Seen) -> None:
    line(ax, seen.steps, "entropy", style.PURPLE, "entropy")
    title(from_zero(_over_steps(ax, seen)), "entropy", "", "nats a token")


def _staleness(ax: Axes, seen: Seen) -> None:
    line(ax, seen.steps, "staleness", style.BLUE, "mean")
    if seen.steps and "staleness_max" in seen.steps[-1]:
        ax.plot(*_points(seen, "staleness_max"), color=style.SKY, linewidth=1, label="oldest")
    if seen.bound:
        ax.axhline(seen.bound, color=style.INK, linestyle=":", label="bound")
    title(from_zero(_over_steps(ax, seen)), "staleness of what was trained", "", "batches")
    key(ax)


def _calls(ax: Axes, seen: Seen) -> None:
    line(ax, seen.steps, "turns", style.ORANGE, "calls")
    title(from_zero(_over_steps(ax, seen)), "tool calls a rollout")


def _times(ax: Axes, seen: Seen) -> None:
    if seen.steps:
        step_times(ax, seen.steps)
    title(ax, "seconds of a step")


def _ledger(ax: Axes, seen: Seen) -> None:
    rows = _ranked(seen.ledger)[::-1]
    ax.barh([why for why, _ in rows], [n for _, n in rows], color=[_REASON.get(why, style.ORANGE) for why, _ in rows])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _sideways(ax, "sampled tokens", bool(rows))


def _work(ax: Axes, seen: Seen) -> None:
    """A bar a group, from the oldest: finished, being sampled, not dispatched."""
    names = [str(slot.slot) for slot in seen.slots]
    parts = {
        "finished": ([s.done for s in seen.slots], style.GREEN),
        "sampled now" if seen.state == "live" else "to sample again": ([s.running for s in seen.slots], style.SKY),
        "not dispatched": ([s.size - s.done - s.running for s in seen.slots], style.PALE),
    }
    below = [0] * len(names)
    for label, (counts, color) in parts.items():
        ax.bar(names, counts, bottom=below, color=color, label=label)
        below = [a + b for a, b in zip(below, counts, strict=True)]
    ax.set_xticks(range(0, len(names), max(1, len(names) // 6)))
    title(ax, "rollouts under way, by prompt", "", "")
    if seen.slots:
        ax.set_ylim(0, max(below) * 1.6)
        key(ax, loc="upper left", ncols=2)
    else:
        style.absent(ax, "none")


def _stages(ax: Axes, seen: Seen) -> None:
    rows = list(seen.stages.items())[::-1]
    ax.barh([name for name, _ in rows], [spent for _, spent in rows], color=style.SKY)
    _sideways(ax, "seconds of complete stages", bool(rows))


_PANELS = (_reward, _solved, _entropy, _staleness, _calls, _times, _ledger, _work, _stages)


def _points(seen: Seen, name: str) -> tuple[list[int], list[float]]:
    return [point["step"] for point in seen.steps], [point[name] for point in seen.steps]


def _over_steps(ax: Axes, seen: Seen) -> Axes:
    if not seen.steps:
        style.absent(ax, "RL has no step yet")
    elif not ax.lines:
        style.absent(ax, "nothing was trained")
    return whole_steps(ax)


def _sideways(ax: Axes, text: str, any_: bool) -> None:
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color=style.PALE)
    title(ax, text) if any_ else style.absent(title(ax, text), "none yet")


# As HTML


def head(seen: Seen) -> Html:
    """Headline, bar of progress and facts."""
    share = 1.0 if seen.state == "complete" else seen.done / seen.total if seen.total else 0.0
    color = _STATE[seen.state]
    cell = "text-align:left;vertical-align:top;padding:.05em 1.2em .05em 0;font-size:12.5px"
    rows = "".join(
        f'<tr style="background:none"><td style="{cell};color:#777;white-space:nowrap">{html.escape(name)}</td>'
        f'<td style="{cell};color:#222;overflow-wrap:anywhere">{html.escape(text)}</td></tr>'
        for name, text in facts(seen)
    )
    return Html(
        f'<div style="{_BOX}"><div style="font-weight:600"><span style="color:{color}">●</span> '
        f'{html.escape(headline(seen))}</div><div style="background:#e6e6e6;height:6px;margin:.4em 0">'
        f'<div style="background:{color};height:6px;width:{share:.1%}"></div></div>'
        f'<table style="border:0">{rows}</table></div>'
    )


def board(seen: Seen) -> Html:
    """The whole board at one moment, with nothing outside it: the static twin of `Dashboard`."""
    image = base64.b64encode(picture(seen).png()).decode()
    alt = html.escape(headline(seen))
    shown = f'<img alt="{alt}" style="max-width:100%;background:#fff" src="data:image/png;base64,{image}">'
    return Html(f"{head(seen).text}<div>{shown}</div>")


# Live

_WATCHED: dict[Path, Dashboard] = {}
"""One live board a run in this process: a cell that is run again replaces its own."""


class Dashboard:
    """A board that keeps up with a live run. Raises FileNotFoundError where there is none.

    A thread looks every `every_s` seconds and draws when something has changed; cells go on meanwhile. It ends with the
    run, on `close`, with the button, and when another board of the same run is opened. A run that is over is drawn once.
    """

    def __init__(self, path: Path, every_s: float = EVERY_S) -> None:
        import ipywidgets

        self.seen = look(path)
        self.every_s = every_s
        if (other := _WATCHED.pop(self.seen.path, None)) is not None:
            other.close()
        self._closed = threading.Event()
        self._head, self._picture = ipywidgets.HTML(), ipywidgets.Image(format="png")
        self._button = ipywidgets.Button(description="Stop watching", tooltip="The run goes on")
        self._button.on_click(lambda _: self.close())
        self.widget = ipywidgets.VBox([self._head, self._picture, self._button])
        self._draw()
        self._thread = threading.Thread(target=self._keep_up, name=f"board of {self.seen.path.name}", daemon=True)
        if self.seen.state == "live":
            _WATCHED[self.seen.path] = self
            self._thread.start()
        else:
            self._end()

    @property
    def live(self) -> bool:
        """Whether it still keeps up."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stops keeping up, and returns when nothing is left of it but what it shows. The run goes on."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def still(self) -> Html:
        """The board as it is now."""
        return board(self.seen)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """The widget, and its static twin for whoever can show none."""
        return {**self.widget._repr_mimebundle_(**options), "text/html": self.still().text}

    def _draw(self) -> None:
        self._head.value = head(self.seen).text
        self._picture.value = picture(self.seen).png()

    def _keep_up(self) -> None:
        wait = self.every_s
        try:
            while self.seen.state == "live" and not self._closed.wait(wait):
                begin = time.perf_counter()
                before, self.seen = self.seen, look(self.seen.path)
                if _drawn(before) != _drawn(self.seen):
                    self._picture.value = picture(self.seen).png()
                self._head.value = head(self.seen).text
                wait = max(self.every_s, (time.perf_counter() - begin) / SHARE)
        except Exception:  # there is nobody above a thread: what went wrong stands in the board's place
            self._head.value = f'<div style="{_BOX}"><pre>{html.escape(traceback.format_exc())}</pre></div>'
        finally:
            self._end()

    def _end(self) -> None:
        self._button.layout.display = "none"
        if _WATCHED.get(self.seen.path) is self:
            del _WATCHED[self.seen.path]


def _drawn(seen: Seen) -> tuple[Any, ...]:
    """What the picture shows of a run."""
    return seen.state, len(seen.steps), seen.ledger, seen.slots, seen.stages, seen.changes
