#!/usr/bin/env python3
"""`moe` on a CPU against `transformers`' experts, each of its back ends: `scripts/bench/moe_bench.py [--rounds N]`.

Each is given the same tokens, router logits and weights, other tokens each round, chooses its experts itself, and goes forward
and backward, gradients of all four. CPU seconds of this process, one thread, the forms in turns after a round to warm up;
the ratio is the median of the rounds' own ratios, with a 95 % interval by bootstrap, so other work beside it changes little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_nb.kernels import moe
from scripts.bench.in_turn import in_turn

SHAPES = {
    "64 experts, 4 a token": (2048, 256, 96, 64, 4),
    "128 experts, 8 a token": (1024, 256, 96, 128, 8),
    "16 experts, 2 a token": (2048, 384, 256, 16, 2),
}
"""Tokens, model width, expert width, experts, experts a token."""
BACKENDS = ("eager", "grouped_mm", "batched_mm")
MOST_COPIED = 2**28
"""Bytes; `batched_mm` copies the weights of an expert for each choice, and is left out beyond that."""


def their_experts(up: Tensor, down: Tensor, k: int, backend: str) -> Any:
    """Return the module of `transformers` with these weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, width, inner = down.shape
    config = Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=k, experts_implementation=backend
    )  # fmt: skip
    module: Any = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = torch.nn.Parameter(up), torch.nn.Parameter(down)
    return module


def theirs(module: Any, k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a layer of that module and the arithmetic of its router."""

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        gates, experts = logits.float().softmax(-1).topk(k, dim=-1)
        out: Tensor = module(x, experts, (gates / gates.sum(-1, keepdim=True)).to(x.dtype))
        return out

    return layer


Layer = Callable[[Tensor, Tensor], Tensor]


def timed(layer: Layer, weights: list[Tensor], x: Tensor, logits: Tensor, pull: Tensor) -> tuple[float, float]:
    """CPU seconds of the forward pass and of both."""
    for tensor in weights:
        tensor.grad = None
    x, logits = x.clone().requires_grad_(), logits.clone().requires_grad_()
    begin = time.process_time()
    out = layer(x, logits)
    middle = time.process_time()
    out.backward(pull)
    return middle - begin, time.process_time() - begin


def forms(case: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[Layer, list[Tensor]]]:
    """Return each implementation of the layer with its weights, which are the same numbers."""
    n, d, i, e, k = case
    g = torch.Generator().manual_seed(0)
    up = (torch.randn(e, 2 * i, d, generator=g) / d**0.5).to(dtype)
    down = (torch.randn(e, d, i, generator=g) / i**0.5).to(dtype)
    weights = up.clone().requires_grad_(), down.clone().requires_grad_()
    layers: dict[str, tuple[Layer, list[Tensor]]] = {
        "ours": (lambda x, logits: moe(x, logits, *weights, k), [*weights])
    }
    for backend in BACKENDS:
        if backend != "batched_mm" or 3 * n * k * d * i * up.itemsize < MOST_COPIED:
            module = their_experts(up, down, k, backend)
            layers[backend] = theirs(module, k), [module.gate_up_proj, module.down_proj]
    return layers


def inputs(case: tuple[int, ...], dtype: torch.dtype, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, logits and a gradient of a round: other ones each time, so that experts have other numbers of rows, as in training.
    Logits stay float32: bf16 has ties, which the two sides break in other ways."""
    n, d, _, e, _ = case
    g = torch.Generator().manual_seed(number)
    x, logits, pull = (torch.randn(n, width, generator=g) for width in (d, e, d))
    return x.to(dtype), logits, pull.to(dtype)


def interval(ratios: np.ndarray) -> tuple[float, float]:
    draws = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(
        "| layer | dtype | form | forward, ms | both, ms | theirs / ours, forward | both |\n|---|---|---|---|---|---|---|"
    )
    for name, case in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            layers = forms(case, dtype)
            x, logits, _ = inputs(case, dtype, 0)
            exact = layers["ours"][0](x, logits).detach()
            for layer, _ in layers.values():
                near = 5e-2 if dtype == torch.bfloat16 else 1e-4
                torch.testing.assert_close(layer(x, logits).detach(), exact, atol=near, rtol=5e-2)
            sides = {form: partial(timed, layer, weights) for form, (layer, weights) in layers.items()}
            measured = in_turn(sides, rounds, lambda number, case=case, dtype=dtype: inputs(case, dtype, number))
            times = {form: [seconds for _, seconds in rows] for form, rows in measured.items()}
            ours = np.array(times["ours"])
            for form, pairs in times.items():
                their = np.array(pairs)
                cells = [f"{1000 * statistics.median(their[:, phase]):.1f}" for phase in (0, 1)]
                for phase in (0, 1):
                    ratio = their[:, phase] / ours[:, phase]
                    low, high = interval(ratio)
                    cells.append("" if form == "ours" else f"{float(np.median(ratio)):.2f} ({low:.2f} to {high:.2f})")
                print(f"| {name} | {str(dtype).removeprefix('torch.')} | {form} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
