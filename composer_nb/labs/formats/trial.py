"""A tiny mixture-of-experts model trained with its experts in a number format, from the same weights on the same text.

Its questions: whether the loss in MXFP8 and in NVFP4 follows the one in high precision, and what becomes of a run whose
NVFP4 is divided differently. Text is the standard library's, a byte a token; attention and router stay in float32.

Dimensions: B rows of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_nb.kernels.moe.recipes import RecipeName
from composer_nb.labs.formats.findings import Division, dividing
from composer_nb.trainer.learning.data import read_corpus
from composer_nb.trainer.models.transformer import Kernels, Model, ModelConfig

TINY = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=8,
    moe_intermediate_size=64,
    max_position_embeddings=64,
)
ROWS, LENGTH = 8, 64
HELD_OUT = 32
"""Batches of held-out text whose mean loss is the result: enough that what batches add is the same for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One training."""

    recipe: RecipeName
    division: Division
    losses: list[float]
    """Loss of each step, in nats a byte."""
    held_out: float
    """After the last one."""
    gap: list[tuple[int, float, float]]
    """(step, mean |Δ log p| of held-out bytes between this division and IEEE's, both on one published cast to bfloat16, and
    between that cast and the float32 weights, to compare with): what an engine that divides differently from the trainer does to
    importance ratios. Empty for IEEE's own."""
    weights: Tensor
    """All of the last step, one after another."""


def train(
    recipe: RecipeName,
    *,
    division: Division = "ieee",
    steps: int = 300,
    lr: float = 3e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Curve:
    """Train for `steps` steps of 512 bytes. Repeats to the bit on one machine with one thread."""
    torch.manual_seed(seed)
    model = Model(TINY)
    model.kernels = Kernels(recipe=recipe)
    train_text, held_text = _texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    dice, losses, gaps = Random(seed), [], []
    with dividing(division):
        for step in range(1, steps + 1):
            loss = _loss(model, _batch(train_text, dice))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = lr * min(1.0, step / 20, (steps - step + 1) / (0.3 * steps))
            optimizer.step()
            losses.append(float(loss.detach()))
            on_step(step, losses[-1])
            if division != "ieee" and step % max(1, steps // 10) == 0:
                gaps.append((step, *_gap(model, _batch(held_text, Random(step)))))
        dice = Random(seed)
        with torch.no_grad():
            held_out = sum(float(_loss(model, _batch(held_text, dice))) for _ in range(HELD_OUT)) / HELD_OUT
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Curve(recipe=recipe, division=division, losses=losses, held_out=held_out, gap=gaps, weights=weights)


@cache
def _texts() -> tuple[bytes, bytes]:
    """Return the training text and the held-out text."""
    corpus = read_corpus("stdlib")
    return "".join(corpus.train[:200]).encode(), "".join(corpus.validation[:200]).encode()


def _batch(text: bytes, dice: Random) -> Tensor:
    """[B, T + 1]"""
    starts = [dice.randrange(len(text) - LENGTH - 1) for _ in range(ROWS)]
    return torch.tensor([list(text[at : at + LENGTH + 1]) for at in starts])


def _logprobs(model: Model, ids: Tensor) -> Tensor:
    logits, _ = model(ids[:, :-1])
    return -F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def _loss(model: Model, ids: Tensor) -> Tensor:
    return -_logprobs(model, ids).mean()


@torch.no_grad()
def _gap(model: Model, ids: Tensor) -> tuple[float, float]:
    published = deepcopy(model).bfloat16()
    mine = _logprobs(published, ids)
    with dividing("ieee"):
        exact, wide = _logprobs(published, ids), _logprobs(model, ids)
    return float((mine - exact).abs().mean()), float((exact - wide).abs().mean())
