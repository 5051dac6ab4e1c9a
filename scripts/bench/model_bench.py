#!/usr/bin/env python3
"""What a model costs on this machine: `scripts/bench/model_bench.py [--threads N] [--rounds N]`. Prints four Markdown tables.

step        forward and backward of two 30 M-parameter Qwen3-MoEs against `transformers` with each of its experts back ends, and
            the share of the machine's GEMM rate that ours reaches. The forms take turns, and each has a round to warm up.
attention   forward and backward on the same rows, against torch's fused kernel.
replay      a step of RL's trainer with and without replay, in turns: the median of paired ratios, with a 95 % bound by bootstrap.
invariance  decoding in batch-invariant mode, against the same engine without, and against the compiled kernel.

With `--ranks 1 2 4` it times only the step of the optimizer on these numbers of ranks (gloo), for the first of those models and
for a dense one: the fewest seconds of the slowest rank, by the clock and in CPU time. Muon's updates are momentum, the exchange
of matrices, and Newton–Schulz.

With `--model DIR` it compares only the step of that checkpoint: with float32 weights, with their products rounded to bf16
(`matmul=bfloat16`), and with bf16 weights, each with the peak memory of a process of its own.

Times are CPU seconds of one thread, so that other work beside it changes little, and seconds by the clock of several.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from composer_nb.harness.policy import Request
from composer_nb.kernels.attention.causal import causal_attention, padded
from composer_nb.kernels.logprob import logprob_entropy
from composer_nb.labs.rewards.rescore import stored_batch
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.optimizer import OptimizerSettings
from composer_nb.trainer.learning.packing import FULL, NO_REPLAY, flatten, score
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows
from composer_nb.trainer.parallel.fsdp import shard
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings
from composer_nb.trainer.parallel.optimizer import ShardedOptimizer
from composer_nb.trainer.parallel.team import Team, join
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.rl import to_streams
from scripts.bench.in_turn import clock, timed

COMMON: dict[str, Any] = {"vocab_size": 4096, "num_hidden_layers": 6, "max_position_embeddings": 1024}
SHAPES = {
    "64 experts, 4 a token": ModelConfig(
        **COMMON,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
    ),
    "16 experts, 2 a token": ModelConfig(
        **COMMON,
        hidden_size=384,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
    ),
}
"""The first is sparse as Qwen3-30B-A3B is, in small; the second has few and large experts, where a step is mostly GEMMs."""
ROWS, LENGTH = 4, 512
Step = Callable[[], float]


def ours(model: Model, ids: Tensor) -> Step:
    """Forward and backward on rows of tokens, on their device."""
    count, length = ids.shape
    rows = PackedRows.of_lengths([length] * count, model.config, ids.device)
    at = (rows.position_N < length - 1).nonzero()[:, 0]
    flat = ids.reshape(-1)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        hidden, _ = model.trunk(flat, rows.position_N, rows.attend)
        logprob, _ = logprob_entropy(hidden, model.output_weight, at, flat[at + 1])
        loss = -logprob.mean()
        loss.backward()
        return float(loss.detach())

    return step


def theirs(path: Path, dtype: torch.dtype, ids: Tensor, experts: str = "") -> Step:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if experts:
        model.set_experts_implementation(experts)
    return their_step(model.train(), ids)


def their_step(model: nn.Module, ids: Tensor) -> Step:
    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    return step


def gemm_rate(dtype: torch.dtype) -> float:
    """Multiplications and additions a second of one large product, the best of five."""
    now = clock()
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    best = 0.0
    for _ in range(5):
        begin = now()
        a @ b
        best = max(best, 2 * 2048**3 / (now() - begin))
    return best


def operations(model: Model) -> float:
    """Of a step's products, attention's own left out: six times the weights that act on a token, and the output layer."""
    c = model.config
    layer = model.layers[0]
    dense = layer.qkv.numel() + layer.o.numel() + layer.router.numel()
    expert = c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size
    return 6.0 * ROWS * LENGTH * (c.num_hidden_layers * (dense + expert) + c.vocab_size * c.hidden_size)


def steps(rounds: int, dtypes: Sequence[str], against: Sequence[str]) -> None:
    print(
        "| model | dtype | form | s | tokens / s | against ours | share of the GEMM rate |\n|---|---|---|---|---|---|---|"
    )
    ids = torch.randint(0, COMMON["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    for name, config in SHAPES.items():
        torch.manual_seed(0)
        model = Model(config)
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, Path(folder) / "m", dtype=torch.float32)
            for dtype in (getattr(torch, name) for name in dtypes):
                forms = {"ours": ours(copy.deepcopy(model).to(dtype), ids)}
                for experts in against:
                    forms[f"transformers, {experts}"] = theirs(Path(folder) / "m", dtype, ids, experts)
                if config.num_experts_per_tok * ROWS * LENGTH * config.hidden_size * config.moe_intermediate_size > 1e8:
                    forms.pop("transformers, batched_mm", None)  # a copy of the experts' weights for every token
                medians = {form: statistics.median(times) for form, times in timed(forms, rounds).items()}
                share = operations(model) / medians["ours"] / gemm_rate(dtype)
                for form, seconds in medians.items():
                    print(
                        f"| {name} | {str(dtype).removeprefix('torch.')} | {form} | {seconds:.3f} | "
                        f"{ROWS * LENGTH / seconds:,.0f} | {seconds / medians['ours']:.2f} | "
                        f"{f'{share:.0%}' if form == 'ours' else ''} |",
                        flush=True,
                    )


NUMERICS = {
    "float32": (torch.float32, "highest"),
    "float32, bf16 products": (torch.float32, "medium"),
    "bfloat16": (torch.bfloat16, "highest"),
}
"""Dtype of the weights, and torch's precision of float32 products."""


def form_of(path: Path, name: str, numerics: str, threads: int) -> Step:
    """Return a step of a checkpoint, by this package (`ours`) or by `transformers`."""
    torch.set_num_threads(threads)
    dtype, precision = NUMERICS[numerics]
    model = load_pretrained(path)
    ids = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    own_step = ours(model.to(dtype).requires_grad_(), ids) if name == "ours" else theirs(path, dtype, ids)

    def step() -> float:
        torch.set_float32_matmul_precision(precision)
        return own_step()

    return step


def peak(path: Path, name: str, numerics: str, threads: int) -> float:
    """Peak memory of this process after two steps, in MB."""
    step = form_of(path, name, numerics, threads)
    step(), step()
    # Not ru_maxrss, which a new process takes over from the one that began it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def checkpoint(path: Path, rounds: int, threads: int, names: Sequence[str]) -> None:
    """Compare the steps of a checkpoint."""
    print("| weights | form | s | tokens / s | theirs / ours | peak memory, MB |\n|---|---|---|---|---|---|")
    for numerics in names:
        forms = {name: form_of(path, name, numerics, threads) for name in ("ours", "transformers")}
        medians = {name: statistics.median(times) for name, times in timed(forms, rounds).items()}
        for name, seconds in medians.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                memory = alone.submit(peak, path, name, numerics, threads).result()
            print(
                f"| {numerics} | {name} | {seconds:.2f} | {ROWS * LENGTH / seconds:,.0f} | {seconds / medians['ours']:.2f} | "
                f"{memory:,.0f} |",
                flush=True,
            )


def attention(rounds: int) -> None:
    noise = torch.Generator().manual_seed(0)
    print("\n| attention | s, ours | torch | torch / ours |\n|---|---|---|---|")
    for config in SHAPES.values():
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q, k, v = (
            torch.randn(ROWS * LENGTH, n, width, generator=noise).requires_grad_() for n in (heads, groups, groups)
        )
        pull, scale = torch.randn(q.shape, generator=noise), width**-0.5

        def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v, pull: Tensor = pull, scale: float = scale) -> float:
            torch.autograd.grad(causal_attention(q, k, v, [LENGTH] * ROWS, scale), (q, k, v), pull)
            return 0.0

        def fused(q: Tensor = q, k: Tensor = k, v: Tensor = v, pull: Tensor = pull, scale: float = scale) -> float:
            by_row = (padded(x, [LENGTH] * ROWS) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                *by_row, is_causal=True, scale=scale, enable_gqa=True
            )
            torch.autograd.grad(out, (q, k, v), padded(pull, [LENGTH] * ROWS))
            return 0.0

        times = timed({"ours": ours, "torch": fused}, 3 * rounds)
        ours_s, torch_s = (statistics.median(times[name]) for name in ("ours", "torch"))
        print(
            f"| {heads} heads of {width}, {groups} of keys | {ours_s:.4f} | {torch_s:.4f} | {torch_s / ours_s:.2f} |",
            flush=True,
        )


def replay_cost(rounds: int) -> None:
    batch = stored_batch(example_run(), -1)
    model = load_pretrained(example_run().path / "weights" / "before_final")
    streams = [x for group in batch.groups for s in group for x in to_streams(s.attempt, s.advantage)]

    def step(replay: Any) -> Step:
        def run() -> float:
            model.zero_grad(set_to_none=True)
            flat = flatten(streams, replay)
            logprob, _ = score(model, flat, flat.recorded)
            loss = -(logprob * flat.advantage_S).sum()
            loss.backward()
            return float(loss.detach())

        return run

    times = timed({"off": step(NO_REPLAY), "on": step(FULL)}, 4 * rounds)
    ratio = np.array(times["on"]) / np.array(times["off"])
    draws = np.random.default_rng(0).choice(ratio, (4000, len(ratio)))
    bound = float(np.quantile(np.median(draws, axis=1), 0.95))
    print(
        "\n| step of the trainer, without replay | with | median of the ratios | upper 95 % bound |\n|---|---|---|---|"
    )
    off, on = (statistics.median(times[name]) for name in ("off", "on"))
    print(f"| {off:.3f} s | {on:.3f} s | {float(np.median(ratio)):.3f} | {bound:.3f} |", flush=True)


def invariance(rounds: int) -> None:
    torch.manual_seed(0)
    model = Model(ModelConfig())
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 1024, 60).tolist() for _ in range(32)]

    def decode(model: Model, *, compiled: bool = False) -> Step:
        def run() -> float:
            engine = Engine(model, stop=frozenset(), slots=32, max_length=128)
            if not compiled:
                engine._packed = None
            engine.generate([Request(rollout=n, token_ids=ids, max_tokens=40) for n, ids in enumerate(prompts)])
            return 0.0

        return run

    forms = {
        "torch": decode(model),
        "compiled": decode(model, compiled=True),
    }
    medians = {name: statistics.median(times) for name, times in timed(forms, rounds).items()}
    print("\n| decoding 32 rollouts of 100 tokens | s | against torch | independent of the batch |\n|---|---|---|---|")
    for name, seconds in medians.items():
        print(f"| {name} | {seconds:.2f} | {seconds / medians['torch']:.2f} | {'no' if name == 'torch' else 'yes'} |")


@torch.no_grad()
def optimizer_step(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Time the step of the optimizer on a rank. The first prints a row for each model."""
    torch.set_num_threads(1)
    join(rank, ranks, dist.FileStore(f"{folder}/meet-{ranks}", ranks))
    team = Team(Mesh.of(MeshSettings(shard=ranks, ep=ranks), ranks))
    dense = ModelConfig(
        **COMMON, family="qwen3", hidden_size=256, num_attention_heads=8, head_dim=32, intermediate_size=768
    )
    for name, config in {"64 experts": SHAPES["64 experts, 4 a token"], "dense": dense}.items():
        forms: dict[str, Callable[[], object]] = {}
        for kind in ("adamw", "muon"):
            model = shard(Model(config), team)
            optimizer = ShardedOptimizer(model, team, OptimizerSettings(name=kind), published=torch.bfloat16)
            for weight in model.parameters():
                weight.grad = weight.detach().clone()
            forms[kind] = partial(optimizer.step, 1e-5, 1e9)
        forms["Muon's updates"] = lambda optimizer=optimizer: deque(optimizer._updates(), maxlen=0)
        best = dict.fromkeys(forms, (np.inf, np.inf))
        for number in range(rounds + 1):
            for form, act in forms.items():
                team.barrier()
                clock_began, cpu_began = time.perf_counter(), time.process_time()
                act()
                took = time.perf_counter() - clock_began, time.process_time() - cpu_began
                if number:  # the first round makes AdamW's moments
                    slowest = np.max(team.gather(took), axis=0)
                    best[form] = tuple(np.minimum(best[form], slowest))
        if team.first:
            cells = [f"{wall:.3f} / {cpu:.3f}" for wall, cpu in best.values()]
            print(f"| {name} | {ranks} | {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], help="without units for bf16 that takes minutes"
    )
    parser.add_argument(
        "--against", nargs="+", default=["eager", "batched_mm", "grouped_mm"], help="transformers' back ends"
    )
    parser.add_argument("--steps-only", action="store_true", help="and attention, nothing of replay and decoding")
    parser.add_argument("--model", type=Path, help="a checkpoint whose step is compared, and nothing else")
    parser.add_argument("--numerics", nargs="+", default=[*NUMERICS], choices=[*NUMERICS], help="of --model")
    parser.add_argument("--ranks", type=int, nargs="+", help="whose optimizer's step is timed, and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.ranks:
        print(
            "| model | ranks | AdamW: s by the clock / in CPU time | Muon | its updates alone |\n|---|---|---|---|---|",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as folder:
            for ranks in arguments.ranks:
                values = ranks, folder, arguments.rounds
                torch.multiprocessing.start_processes(optimizer_step, values, nprocs=ranks, start_method="fork")
        return
    if arguments.model:
        checkpoint(arguments.model, arguments.rounds, arguments.threads, arguments.numerics)
        return
    steps(arguments.rounds, arguments.dtypes, arguments.against)
    attention(arguments.rounds)
    if arguments.steps_only:
        return
    replay_cost(arguments.rounds)
    invariance(arguments.rounds)


if __name__ == "__main__":
    main()
