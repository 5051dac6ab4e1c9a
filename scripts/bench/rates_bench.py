#!/usr/bin/env python3
"""Measure this machine for `composer-nb plan --measured FILE`: `scripts/bench/rates_bench.py FILE`.

One process as in a run: one torch thread, or one GPU. A model with random weights decodes and is trained, in turns with a large
product; the rates are medians over rounds with intervals, and the first round warms up.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from composer_nb.harness.policy import Request
from composer_nb.labs.rates import MachineRates, Rate
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.balance import Cost
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.ranks import Ranks, set_up_process
from composer_nb.trainer.learning.supervised import train_step
from composer_nb.trainer.models.hf_config import read_config
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.settings import Settings

PROMPT, ROW = 32, 128


def measure(config: ModelConfig, *, repeats: int, places: int, tokens: int, device: str = "cpu") -> MachineRates:
    """Measure a model of this shape with random weights. All three kinds of work take turns, and the first round warms up."""
    threads = torch.get_num_threads()
    set_up_process(0)
    try:
        with torch.device(device):
            model = Model(config)
        length = max(1, min(tokens // places, config.max_position_embeddings - PROMPT))
        works = {
            "matmul": _product(device),
            "decode": _decoding(model, places, length),
            "train": _training(model, tokens),
        }
        rounds = [{name: _per_second(work, device) for name, work in works.items()} for _ in range(repeats + 1)][1:]
    finally:
        torch.set_num_threads(threads)
    operations = Cost.of(config).row(ROW) / ROW
    return MachineRates(
        chip=_chip(device),
        torch=torch.__version__,
        date=time.strftime("%d %B %Y"),
        weights=sum(weight.numel() for weight in model.parameters()),
        places=places,
        **{name: Rate.of(rates[name] for rates in rounds) for name in works},
        mfu=Rate.of(rates["train"] * operations / rates["matmul"] for rates in rounds),
    )


def _chip(device: str) -> str:
    """Return the name of the GPU or the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _per_second(work: Callable[[], float], device: str) -> float:
    """Return how much of its work a function does in a second."""
    start = time.perf_counter()
    amount = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return amount / (time.perf_counter() - start)


def _product(device: str) -> Callable[[], float]:
    """Return a product of square matrices, and its number of operations."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device) for _ in range(2))

    def product() -> float:
        for _ in range(4):
            a @ b
        return 4 * 2.0 * size**3

    return product


def _decoding(model: Model, places: int, length: int) -> Callable[[], float]:
    """Return the turns of an engine whose places are all in use, and the number of their tokens."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, model.config.vocab_size, (places, PROMPT)).tolist()
    requests = [Request(rollout=n, token_ids=ids, max_tokens=length) for n, ids in enumerate(prompts)]

    def decode() -> float:
        engine = Engine(model, stop=frozenset(), slots=places, max_length=PROMPT + length)
        engine.generate(requests)
        return float(engine.sampled)

    return decode


def _training(model: Model, tokens: int) -> Callable[[], float]:
    """Return a training step on rows of ROW tokens, and the number of its tokens."""
    random, optimizer = np.random.default_rng(0), FlatOptimizer(model)
    shape = max(1, tokens // ROW), ROW
    ids = random.integers(0, model.config.vocab_size, shape).astype(np.int32)
    rows = [TokenRow(row, np.ones(ROW, np.float32)) for row in ids]

    def train() -> float:
        train_step(model, rows, optimizer, Ranks(), lr=1e-6, balance=1e-3, clip=1.0)
        return float(ids.size)

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FILE")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint's folder; by default the tour's model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--places", type=int, default=16, help="rollouts that the engine decodes at a time (16)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a training step, and of decoding (4096)")
    parser.add_argument("--repeats", type=int, default=9, help="rounds (9)")
    args = parser.parse_args()
    config = read_config(args.model / "config.json").model if args.model else Settings().model.architecture
    sizes = {"places": args.places, "tokens": args.tokens, "repeats": args.repeats}
    rates = measure(config, device=args.device, **sizes)
    rates.write(args.out)
    print(rates.table())


if __name__ == "__main__":
    main()
