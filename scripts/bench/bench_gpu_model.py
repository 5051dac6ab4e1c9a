#!/usr/bin/env python3
"""Whole models on a GPU: `scripts/bench/bench_gpu_model.py [--out FILE] [--device cuda|cpu]`. Prints Markdown tables.

step      forward and backward of four layers of Qwen3-30B-A3B against `transformers` with the same weights. Forms take turns.
decoding  rollouts that read a prompt and draw tokens in the engine, against `generate`, greedy.
replay    |Δ log p| between engine and trainer, with the trainer's own routes and with the engine's replayed: of the model above,
          and of the example's trained policy.
profile   where the time of a step goes, with --profile: the GPU's kernels by their total time.

`--device cpu` rehearses the flow on tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_nb.harness.policy import Request
from composer_nb.kernels import explain
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.transformer import Kernels, Model, ModelConfig
from composer_nb.trainer.recipe.mismatch import compare_streams, figures
from scripts.bench import triton_interpreter
from scripts.bench.model_bench import ours, their_step

SLICE = ModelConfig(
    vocab_size=151_936, hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
"""Four of the 48 layers of Qwen3-30B-A3B, 3.1 billion weights."""
TINY = replace(
    SLICE, vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, max_position_embeddings=128,
)  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "data/example/weights/final"
Form = Callable[[], float]
PARTS = ("step", "decoding", "replay")


def seconds_of(form: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    form()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def peak_of(form: Callable[[], Any], device: str) -> float:
    """GiB at the height of a call, weights included."""
    if device != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    form()
    return torch.cuda.max_memory_allocated() / 2**30


def step_of(model: Model, ids: Tensor, recipe: str, backend: str) -> Form:
    step = ours(model, ids)

    def run() -> float:
        model.kernels = Kernels(recipe=recipe, backend=backend)  # type: ignore[arg-type]
        return step()

    return run


def their_model(model: Model, experts: str) -> Any:
    """Return a model of `transformers` with the same weights, on the same device."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    c = model.config
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings", "tie_word_embeddings",
        "norm_topk_prob", "rope_theta", "rms_norm_eps",
    )  # fmt: skip
    config = Qwen3MoeConfig(**{name: getattr(c, name) for name in same}, attn_implementation="sdpa")
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(model.embed.dtype)
    try:
        with torch.device(model.embed.device):
            peer: Any = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(default_dtype)
    peer.set_experts_implementation(experts)
    sizes = [c.num_attention_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2]
    with torch.no_grad():
        peer.model.embed_tokens.weight.copy_(model.embed)
        peer.lm_head.weight.copy_(model.head)
        peer.model.norm.weight.copy_(model.final_norm)
        for theirs, ours in zip(peer.model.layers, model.layers, strict=True):
            attention = theirs.self_attn
            for projection, weight in zip(
                (attention.q_proj, attention.k_proj, attention.v_proj), ours.qkv.split(sizes), strict=True
            ):
                projection.weight.copy_(weight)
            pairs = (
                (attention.o_proj, ours.o), (attention.q_norm, ours.q_norm), (attention.k_norm, ours.k_norm),
                (theirs.input_layernorm, ours.attention_norm), (theirs.post_attention_layernorm, ours.moe_norm),
                (theirs.mlp.gate, ours.router),
            )  # fmt: skip
            for module, weight in pairs:
                module.weight.copy_(weight)
            theirs.mlp.experts.gate_up_proj.copy_(ours.w_in.mT)
            theirs.mlp.experts.down_proj.copy_(ours.w_out.mT)
    return peer


def steps(model: Model, peer: Any, rows: int, length: int, rounds: int, device: str) -> list[str]:
    ids = torch.randint(0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)).to(
        device
    )
    forms: dict[str, Form] = {
        "ours, bf16": step_of(model, ids, "bf16", "triton"),
        "ours, fp8_block128": step_of(model, ids, "fp8_block128", "triton"),
        "ours, mxfp8": step_of(model, ids, "mxfp8", "triton"),
        "ours, bf16, torch's grouped_mm": step_of(model, ids, "bf16", "torch"),
        "transformers, grouped_mm": their_step(peer, ids),
    }
    if device == "cpu":
        forms = {name: form for name, form in forms.items() if name in ("ours, bf16", "transformers, grouped_mm")}
    lines = ["| step | ms | spread | tokens / s | over ours, bf16 | peak GiB | loss |", "|---|---|---|---|---|---|---|"]
    losses, peaks, holes, times = {}, {}, {}, {name: [] for name in forms}  # type: ignore[var-annotated]
    for name, form in list(forms.items()):
        try:
            losses[name] = form()
            model.zero_grad(set_to_none=True)
            peer.zero_grad(set_to_none=True)
            peaks[name] = peak_of(form, device)
        except Exception as error:  # a hole in the table, ours too
            holes[name] = f"{type(error).__name__}: {str(error)[:150]}"
            del forms[name]
        model.zero_grad(set_to_none=True)
        peer.zero_grad(set_to_none=True)
    for _ in range(rounds):
        for name, form in forms.items():
            times[name].append(1e3 * seconds_of(form, device))
            model.zero_grad(set_to_none=True)
            peer.zero_grad(set_to_none=True)
    middle = {name: statistics.median(form_times) for name, form_times in times.items() if form_times}
    for name, ms in middle.items():
        lines.append(
            f"| {name} | {ms:.1f} | {min(times[name]):.1f} to {max(times[name]):.1f} | {1e3 * rows * length / ms:,.0f} | "
            f"{ms / middle.get('ours, bf16', float('nan')):.2f} | {peaks[name]:.1f} | {losses[name]:.4f} |"
        )
    return [*lines, *(f"| {name} | hole: {why} | | | | | |" for name, why in holes.items())]


def profiled(model: Model, rows: int, length: int, device: str) -> list[str]:
    ids = torch.randint(0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)).to(
        device
    )
    step = step_of(model, ids, "bf16", "torch" if device == "cpu" else "triton")
    step()
    with torch.profiler.profile() as profile:
        step()
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return [profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)]


def decoding(model: Model, peer: Any, rollouts: int, read: int, length: int, device: str) -> list[str]:
    ids = torch.randint(0, model.config.vocab_size, (rollouts, read), generator=torch.Generator().manual_seed(2))
    model.kernels = Kernels()

    def engine(graphs: bool) -> Callable[[], None]:
        decoder = Engine(
            model, stop=frozenset(), slots=rollouts, max_length=read + length, temperature=0.0, step_tokens=16_384
        )
        decoder._graphs = decoder._graphs if graphs else None

        def run() -> None:
            requests = [Request(rollout=n, token_ids=row, max_tokens=length) for n, row in enumerate(ids.tolist())]
            for completion in decoder.generate(requests):
                decoder.release(completion.rollout)

        return run

    def theirs() -> None:
        with torch.no_grad():
            peer.generate(
                ids.to(device), attention_mask=torch.ones_like(ids, device=device), max_new_tokens=length, min_new_tokens=length,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip

    lines = [
        f"| {rollouts} rollouts, {read} tokens read, {length} drawn | s | drawn tokens / s | over ours |",
        "|---|---|---|---|",
    ]
    seconds = {}
    forms = {"ours": engine(True), "ours, kernel by kernel": engine(False), "transformers, grouped_mm": theirs}
    for name, form in forms.items():
        seconds_of(form, device)
        seconds[name] = statistics.median(seconds_of(form, device) for _ in range(3))
        lines.append(
            f"| {name} | {seconds[name]:.2f} | {rollouts * length / seconds[name]:,.0f} | {seconds[name] / seconds['ours']:.2f} |"
        )
    return lines


def sampled(model: Model, prompts: list[list[int]], new_tokens: int) -> list[Stream]:
    """Return rollouts of one turn, as the trainer sees them."""
    longest = max(map(len, prompts)) + new_tokens
    engine = Engine(model, stop=frozenset(), slots=len(prompts), max_length=longest, step_tokens=16_384, seed=3)
    completions = engine.generate(
        [Request(rollout=n, token_ids=ids, max_tokens=new_tokens) for n, ids in enumerate(prompts)]
    )
    streams = []
    for completion, prompt in zip(completions, prompts, strict=True):
        trace, ids = engine.release(completion.rollout), [*prompt, *completion.token_ids]
        blank = np.zeros(len(ids), np.float32)
        logprob = blank.copy()
        logprob[len(prompt) :] = completion.logprobs
        streams.append(
            Stream(
                token_ids=np.array(ids, np.int32),
                acted=np.arange(len(ids)) >= len(prompt),
                logprob=logprob,
                advantage=blank,
                routes=trace.routes,
                gates=trace.gates,
                route_valid=trace.route_valid,
                checks=trace.checks,
            )
        )
    return streams


def replayed(models: dict[str, tuple[Model, list[list[int]]]], new_tokens: int) -> list[str]:
    lines = [
        "| engine and trainer in bf16 | tokens | sets of experts that differ | p99 of abs(Δ log p) | replayed | floor | k3 | "
        "replayed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (model, prompts) in models.items():
        model.kernels = Kernels()
        compared = figures(compare_streams(model, sampled(model, prompts, new_tokens)))
        off, on, floor = compared["off"], compared["on"], compared["floor"] or {"logprob_gap_p99": float("nan")}
        p99 = " | ".join(f"{setting['logprob_gap_p99']:.4f}" for setting in (off, on, floor))
        lines.append(
            f"| {name} | {compared['tokens']:,} | {compared['routes_differ']:.2%} | {p99} | {off['k3']:.2e} | {on['k3']:.2e} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/bench_gpu/model.md"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="of a step of ours, instead of all else")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    tiny = args.device == "cpu"
    if tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("bench_gpu_model: no CUDA device here. The flow alone: --device cpu", file=sys.stderr)
        return 2
    triton_interpreter.repair()
    explain(device=torch.device(args.device), backend="triton")
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Model(TINY if tiny else SLICE)
    model = model.to(torch.bfloat16)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("")

    def say(section: Callable[[], list[str]]) -> None:
        """Run one section and report it; its failure does not stop the others."""
        begin = time.perf_counter()
        try:
            lines = section()
        except Exception as error:
            lines = [f"hole: {type(error).__name__}: {str(error)[:400]}"]
        lines.append(f"\n({time.perf_counter() - begin:.0f} s)\n")
        print("\n".join(lines), flush=True)
        with args.out.open("a") as out:
            out.write("\n".join(lines) + "\n")

    step_size, decode_sizes, prompt_sizes = (
        ((2, 32), [(4, 16, 8)], ((4, 16), (4, 16)))
        if tiny
        else ((4, 4096), [(1, 512, 128), (8, 512, 128), (64, 512, 128)], ((64, 256), (256, 64)))
    )
    if args.profile:
        say(lambda: profiled(model, *step_size, args.device))
        return 0
    if {"step", "decoding"} & set(args.parts):
        peer = their_model(model, "grouped_mm")
        if "step" in args.parts:
            say(partial(steps, model, peer, *step_size, 1 if tiny else args.rounds, args.device))
        for size in decode_sizes if "decoding" in args.parts else ():
            say(partial(decoding, model, peer, *size, args.device))
        del peer
        gc.collect()
    if "replay" in args.parts:
        small = load_pretrained(EXAMPLE).to(args.device, torch.bfloat16)
        random = np.random.default_rng(0)
        models = {"four layers of Qwen3-30B-A3B, random weights": model, "the example's policy, random prompts": small}
        inputs = {
            name: (model, random.integers(0, model.config.vocab_size, size).tolist())
            for (name, model), size in zip(models.items(), prompt_sizes, strict=True)
        }
        say(lambda: replayed(inputs, 8 if tiny else 128))
    return 0


if __name__ == "__main__":
    sys.exit(main())
