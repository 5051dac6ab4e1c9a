"""Sides of a comparison that take turns in each round, so that other work on the machine counts alike for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def clock() -> Callable[[], float]:
    """Return the clock of CPU seconds with one thread, and of seconds with several."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def in_turn(
    forms: Mapping[str, Callable[..., Any]], rounds: int, inputs: Callable[[int], tuple[Any, ...]] = lambda number: ()
) -> dict[str, list[tuple[float, Any]]]:
    """Return seconds and result of each form, round by round; the first round warms up and is left out."""
    now = clock()
    measured: dict[str, list[tuple[float, Any]]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        arguments = inputs(number)
        for name, form in forms.items():
            began = now()
            result = form(*arguments)
            if number:
                measured[name].append((now() - began, result))
    return measured


def timed(forms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return seconds of each form, round by round."""
    return {name: [seconds for seconds, _ in rows] for name, rows in in_turn(forms, rounds).items()}
