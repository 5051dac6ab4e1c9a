"""What `scripts/bench/bench_gpu.py` measures with: routes, interleaved timing, targets, tables. Nothing here needs a GPU.

A case has several ways to compute one thing. They take turns, round by round, with the L2 cache overwritten before each, and what
is compared are medians. A way that can not run is a hole with a reason, never a crash and never left out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Routes = Literal["uniform", "zipf"]
Form = Callable[[], Any]
OURS = "ours"
L2_BYTES = 256 << 20
"""Overwritten before each measurement: five times the L2 of an H200."""


@dataclass(frozen=True, slots=True)
class Target:
    """Ratios peer time / our time, or shares of a ceiling: what must be, what should be, what would be fine."""

    floor: float
    target: float
    stretch: float

    def verdict(self, value: float) -> str:
        names = ((self.stretch, "stretch"), (self.target, "target"), (self.floor, "floor"))
        return next((f"{name} met" for least, name in names if value >= least), "below the floor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the plan on one shape. `forms`: ways to compute it, ours by the name `ours`; text instead: why it can not
    run."""

    number: str
    title: str
    shape: str
    forms: Mapping[str, Form | str]
    work: float = 0.0
    """Floating point operations or bytes of a call."""
    unit: Literal["TFLOP/s", "GB/s", ""] = ""
    goals: Mapping[str, Target] = field(default_factory=dict)
    """By what they are about: another form, whose time is divided by ours; a ceiling, of whose rate ours is a share; the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Milliseconds, round by round, of the forms that ran, and why the others did not."""

    case: Case
    times: dict[str, list[float]] = field(default_factory=dict)
    holes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """Relative distance of what a form gives from what the first of the others gives."""

    def median(self, form: str) -> float | None:
        return statistics.median(self.times[form]) if self.times.get(form) else None

    def rate(self, form: str) -> float | None:
        """Return a form's rate in the case's unit."""
        middle, scale = self.median(form), {"TFLOP/s": 1e12, "GB/s": 1e9}.get(self.case.unit)
        return None if middle is None or scale is None or not middle else self.case.work / (middle / 1e3) / scale

    def ratio(self, form: str) -> float | None:
        """Return that form's time over ours."""
        ours, theirs = self.median(OURS), self.median(form)
        return None if not ours or theirs is None else theirs / ours

    def value(self, goal: str, ceilings: Mapping[str, float]) -> float | None:
        """What a goal of this name is about; None where it was not measured."""
        ours = self.rate(OURS)
        if goal == self.case.unit:
            return ours
        if goal in ceilings:
            return None if ours is None else ours / ceilings[goal]
        return self.ratio(goal)


def route_logits(kind: Routes, tokens: int, experts: int, device: torch.device | str, seed: int = 0) -> Tensor:
    """float32 [N, E] whose k largest are k draws without replacement (Gumbel's trick): all experts alike, or the r-th most
    popular
    with probability ∝ 1 / r, in a random order."""
    random = torch.Generator(device=device).manual_seed(seed)
    noise = -torch.rand(tokens, experts, generator=random, device=device).clamp(1e-20, 1 - 1e-7).log().neg().log()
    if kind == "uniform":
        return noise
    rank = torch.randperm(experts, generator=random, device=device) + 1
    return noise - rank.float().log()


def timed(form: Form, device: torch.device, flush: Tensor | None) -> tuple[float, Any]:
    """Milliseconds of one call, and what it gave."""
    if device.type != "cuda":
        begin = time.perf_counter()
        out = form()
        return 1e3 * (time.perf_counter() - begin), out
    if flush is not None:
        flush.zero_()
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    out = form()
    end_event.record()
    torch.cuda.synchronize(device)
    return begin_event.elapsed_time(end_event), out


def run_case(
    case: Case,
    device: torch.device,
    *,
    seconds: float,
    rounds: int = 30,
    least: int = 5,
    warm: int = 2,
    flush: Tensor | None = None,
) -> CaseResult:
    """Warm every form up, then measure rounds until there are enough or the time is over, but `least` of them."""
    result, outs = CaseResult(case=case), dict[str, Tensor]()
    ready: dict[str, Form] = {}
    for name, form in case.forms.items():
        if isinstance(form, str):
            result.holes[name] = form
            continue
        try:
            for _ in range(warm):
                _, out = timed(form, device, None)
        except Exception as error:  # a peer's fault is a hole in the table, ours too: it is named
            result.holes[name] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''}"
            )
            continue
        ready[name] = form
        if isinstance(out, Tensor):
            outs[name] = out.detach()
    exact = next((out for name, out in outs.items() if name != OURS), None)
    result.errors.update({name: distance(out, exact) for name, out in outs.items() if exact is not None})
    outs.clear()
    end = time.perf_counter() + seconds
    for number in range(rounds):
        if number >= least and time.perf_counter() > end:
            break
        for name, form in ready.items():
            result.times.setdefault(name, []).append(timed(form, device, flush)[0])
    return result


def distance(out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖ / ‖exact‖; NaN where the shapes differ."""
    if out.shape != exact.shape:
        return math.nan
    gap, size = (out.float() - exact.float()).norm(), exact.float().norm()
    return float(gap / size) if float(size) else float(gap)


def table(results: Sequence[CaseResult], ceilings: Mapping[str, float]) -> str:
    """Return a Markdown table with a row for each form, ours first."""
    lines = [
        "| # | what | shape | form | ms | rate | theirs / ours | goals (floor / target / stretch) | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case = result.case
        names = sorted([*result.times, *result.holes], key=lambda name: name != OURS)
        for name in names:
            head = (case.number, case.title, case.shape) if name == names[0] else ("", "", "")
            if name in result.holes:
                lines.append(f"| {' | '.join(head)} | {name} | hole: {result.holes[name]} | | | | |")
                continue
            rate, ratio = result.rate(name), result.ratio(name)
            cells = [
                name,
                f"{result.median(name):.3f}",
                "" if rate is None else f"{rate:,.0f} {case.unit}",
                "" if ratio is None or name == OURS else f"{ratio:.2f}",
                goals_cell(result, ceilings) if name == OURS else "",
                f"{result.errors[name]:.1e}" if name in result.errors else "",
            ]
            lines.append(f"| {' | '.join(head)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def goals_cell(result: CaseResult, ceilings: Mapping[str, float]) -> str:
    cells = []
    for goal, target in result.case.goals.items():
        value = result.value(goal, ceilings)
        reached = "not measured" if value is None else f"{value:.2f}, {target.verdict(value)}"
        cells.append(
            f"{target.floor:g} / {target.target:g} / {target.stretch:g} {_about(result.case, goal, ceilings)}: {reached}"
        )
    return "; ".join(cells)


def _about(case: Case, goal: str, ceilings: Mapping[str, float]) -> str:
    if goal == case.unit:
        return goal
    return f"of {goal}" if goal in ceilings else f"over {goal}"


def as_json(result: CaseResult, ceilings: Mapping[str, float]) -> dict[str, Any]:
    case = result.case
    return {
        "number": case.number,
        "title": case.title,
        "shape": case.shape,
        "unit": case.unit,
        "work": case.work,
        "ms": result.times,
        "median_ms": {name: result.median(name) for name in result.times},
        "rate": {name: result.rate(name) for name in result.times},
        "ratio": {name: result.ratio(name) for name in result.times},
        "holes": result.holes,
        "errors": result.errors,
        "goals": {
            goal: {"levels": [target.floor, target.target, target.stretch], "value": result.value(goal, ceilings)}
            for goal, target in case.goals.items()
        },
    }
