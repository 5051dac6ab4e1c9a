"""What `scripts/bench_gpu.py` measures with: routes, interleaved timing, targets, tables. Nothing here needs a GPU.

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
    peer: str = ""
    """Which form `target` is against."""
    target: Target | None = None
    share_of: str = ""
    """Instead of a peer: the ceiling whose rate `target` is a share of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Milliseconds, round by round, of the forms that ran, and why the others did not."""

    case: Case
    times: dict[str, list[float]] = field(default_factory=dict)
    holes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """Relative distance of what a form gives from what the peer (or the first form) gives."""

    def median(self, form: str) -> float | None:
        return statistics.median(self.times[form]) if self.times.get(form) else None

    def rate(self, form: str) -> float | None:
        """In the case's unit."""
        middle, scale = self.median(form), {"TFLOP/s": 1e12, "GB/s": 1e9}.get(self.case.unit)
        return None if middle is None or scale is None or not middle else self.case.work / (middle / 1e3) / scale

    def ratio(self, form: str) -> float | None:
        """That form's time over ours."""
        ours, other = self.median(OURS), self.median(form)
        return None if not ours or other is None else other / ours

    def value(self, ceilings: Mapping[str, float]) -> float | None:
        """What the case's target is about."""
        if self.case.share_of:
            ours, top = self.rate(OURS), ceilings.get(self.case.share_of)
            return None if ours is None or not top else ours / top
        return self.ratio(self.case.peer)


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
    case: Case, device: torch.device, *, seconds: float, rounds: int = 30, least: int = 5, flush: Tensor | None = None
) -> Found:
    """Warms every form up once, then rounds until there are enough or the time is over (but `least` of them)."""
    found, outs = Found(case=case), dict[str, Tensor]()
    ready: dict[str, Form] = {}
    for name, form in case.forms.items():
        if isinstance(form, str):
            found.holes[name] = form
            continue
        try:
            for _ in range(2):
                _, out = timed(form, device, None)
        except Exception as error:  # a peer's fault is a hole in the table, ours too: it is named
            found.holes[name] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''}"
            )
            continue
        ready[name] = form
        if isinstance(out, Tensor):
            outs[name] = out.detach()
    exact = outs.get(case.peer, next(iter(outs.values()), None))
    found.errors.update({name: distance(out, exact) for name, out in outs.items() if exact is not None})
    outs.clear()
    end = time.perf_counter() + seconds
    for number in range(rounds):
        if number >= least and time.perf_counter() > end:
            break
        for name, form in ready.items():
            found.times.setdefault(name, []).append(timed(form, device, flush)[0])
    return found


def distance(out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖ / ‖exact‖; NaN where the shapes differ."""
    if out.shape != exact.shape:
        return math.nan
    gap, size = (out.float() - exact.float()).norm(), exact.float().norm()
    return float(gap / size) if float(size) else float(gap)


def table(results: Sequence[Found], ceilings: Mapping[str, float]) -> str:
    """Markdown, a line a form; ours first."""
    lines = [
        "| # | what | shape | form | ms | rate | theirs / ours | target (floor / target / stretch) | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in results:
        case = found.case
        names = sorted([*found.times, *found.holes], key=lambda name: name != OURS)
        for name in names:
            head = (case.number, case.title, case.shape) if name == names[0] else ("", "", "")
            if name in found.holes:
                lines.append(f"| {' | '.join(head)} | {name} | hole: {found.holes[name]} | | | | |")
                continue
            rate, ratio = found.rate(name), found.ratio(name)
            cells = [
                name,
                f"{found.median(name):.3f}",
                "" if rate is None else f"{rate:,.0f} {case.unit}",
                "" if ratio is None or name == OURS else f"{ratio:.2f}",
                target_cell(found, ceilings) if name == OURS else "",
                f"{found.errors[name]:.1e}" if name in found.errors else "",
            ]
            lines.append(f"| {' | '.join(head)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def target_cell(found: Found, ceilings: Mapping[str, float]) -> str:
    target, value = found.case.target, found.value(ceilings)
    if target is None:
        return ""
    against = f"of {found.case.share_of}" if found.case.share_of else f"over {found.case.peer}"
    said = f"{target.floor:g} / {target.target:g} / {target.stretch:g} {against}"
    return f"{said}: not measured" if value is None else f"{said}: {value:.2f}, {target.verdict(value)}"


def as_json(found: Found, ceilings: Mapping[str, float]) -> dict[str, Any]:
    case = found.case
    return {
        "number": case.number,
        "title": case.title,
        "shape": case.shape,
        "unit": case.unit,
        "work": case.work,
        "ms": found.times,
        "median_ms": {name: found.median(name) for name in found.times},
        "rate": {name: found.rate(name) for name in found.times},
        "ratio": {name: found.ratio(name) for name in found.times},
        "holes": found.holes,
        "errors": found.errors,
        "target": None if case.target is None else [case.target.floor, case.target.target, case.target.stretch],
        "against": case.share_of or case.peer,
        "value": found.value(ceilings),
    }
