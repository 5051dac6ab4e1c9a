#!/usr/bin/env python3
"""The codec of weight updates beside others, on the same pairs: `make bench-weights`, which brings the peers, or this script.

Pairs of weights published from float32 masters, one optimiser step apart:
drawn     w ~ N(0, σ) in five tensors of σ 0.006 to 0.04, a step of learning rate times N(0, 0.23): what AdamW's steps are like
          long after the start, where masters lie anywhere between two bf16 numbers
trained   a Qwen3-MoE of 11 million weights, 60 steps of AdamW on Python's standard library at 1e-3; then eight at a low learning
          rate with the moments that it has (a fresh optimiser's first steps are several times too large)
RL        the example's policy, eight steps of policy gradient on its stored rollouts at 1e-4, then eight at each rate, as above;
          5e-4 was the rate of the stored example

All in bfloat16, as runs publish them; RL's also as `--dtypes` name: float32, float16, float8_e4m3fn, float8_e5m2, and mxfp8 or
nvfp4, whose matrices are packed numbers beside scales along the dimension that a product sums over, of NVFP4 one more for the
tensor (norms stay bfloat16).

TRL's gaps and NeMo-RL's layout are written here from their descriptions: gaps between changes in 16 bits, or in 32 where one is
larger; new values as they are, or XOR and one zstd-1 frame for all tensors. XOR+zstd-1 is each tensor alone. arc_v1 (XOR+zlib),
arc_v2 (XOR+zstd) and arc_v3 are Fireworks' own package, the last told to wait for all of its candidates; without the package v1
and v2 are written here, which is XOR at the default levels, and v3 is left out. Times are CPU seconds of the process, the best of
some rounds, codecs in turns, one thread (arc_v3 has its own pool). The bound is the entropy of what changed and by how many
steps, given each base exponent, tensor by tensor.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from tokenizers import Tokenizer
from torch import Tensor

from composer_nb.kernels.delta.codec import CODECS, LAYOUTS, Bits, ElementLayout, _elements, bits, encode
from composer_nb.kernels.formats.microscaling import mx_quantize, nvfp4_quantize
from composer_nb.kernels.logprob import logprob_entropy
from composer_nb.labs.rewards.rescore import stored_batch
from composer_nb.trainer.learning.loss import policy_loss
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import flatten, score
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.rl import to_streams, trains

# Names and masters of all tensors, float32.
Masters = list[tuple[str, Tensor, Tensor]]
# The tensors of two versions.
Pair = list[tuple[Tensor, Tensor]]
Packed = list[Any]
# Of a codec: to payloads, and back.
Form = tuple[Callable[[Pair], Packed], Callable[[Pair, Packed], list[Any]] | None]

FORMS = ("bfloat16", "float32", "float16", "float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4")

# Pairs


def drawn(lr: float) -> Masters:
    noise = torch.Generator().manual_seed(1)
    masters = []
    for rows, columns, sigma in (
        (2048, 1024, 0.02),
        (1024, 1024, 0.01),
        (1024, 512, 0.04),
        (2048, 1024, 0.006),
        (4096, 512, 0.02),
    ):
        w = sigma * torch.randn(rows * columns, generator=noise)
        u = 0.23 * torch.randn(rows * columns, generator=noise)
        masters.append(("drawn", w.view(rows, columns), (w - lr * u).view(rows, columns)))
    return masters


def cut(model: Model, old: Tensor, new: Tensor) -> Masters:
    """Cut two vectors of all masters into the model's tensors."""
    named = dict(model.named_parameters())
    vectors = (vector.split([x.numel() for x in named.values()]) for vector in (old, new))
    return [(name, a.view_as(x), b.view_as(x)) for (name, x), a, b in zip(named.items(), *vectors, strict=True)]


def in_form(name: str, master: Tensor, form: str) -> list[Tensor]:
    """Return the tensors in which a master is published."""
    if form not in ("mxfp8", "nvfp4"):
        return [master.to(getattr(torch, form))]
    if master.dim() == 1:
        return [master.bfloat16()]
    rows = master.mT if name.endswith(("_in", "_out")) else master  # matrices of experts and dense layers are [in, out]
    if form == "mxfp8":
        quantised = mx_quantize(rows)
        return [quantised.qdata, quantised.scale]
    packed = nvfp4_quantize(rows, share="tensor")
    return [packed.qdata, packed.scale, packed.global_scale]


def pair_in(masters: Masters, form: str) -> Pair:
    return [pair for name, *ab in masters for pair in zip(*(in_form(name, x, form) for x in ab), strict=True)]


def trained(rates: list[float]) -> Iterator[tuple[float, Masters]]:
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab_size=1024, num_hidden_layers=4, max_position_embeddings=256, **shape, **experts))
    optimizer = FlatOptimizer(model, published=torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(example_run().path / "data" / "tokenizer.json"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    ids = torch.tensor([i for f in files for i in tokenizer.encode(f.read_text(encoding="utf-8")).ids])
    order = torch.Generator().manual_seed(2)
    rows = PackedRows.of_lengths([128] * 8, model.config)
    at = (rows.position_N < 127).nonzero()[:, 0]

    def step(lr: float) -> None:
        starts = torch.randint(0, len(ids) - 128, (8,), generator=order)
        flat = torch.cat([ids[s : s + 128] for s in starts])
        optimizer.zero_()
        hidden, _ = model.trunk(flat, rows.position_N, rows.attend)
        logprob, _ = logprob_entropy(hidden, model.output_weight, at, flat[at + 1])
        (-logprob.mean()).backward()
        optimizer.step(lr, 1.0)

    return settled(model, optimizer, step, 60, 1e-3, rates)


def reinforced(rates: list[float]) -> Iterator[tuple[float, Masters]]:
    batch = stored_batch(example_run(), -1)
    settings = batch.settings.loss
    streams = [
        x for group in batch.groups for s in group if trains(s, settings) for x in to_streams(s.attempt, s.advantage)
    ]
    tokens = sum(int(stream.acted[1:].sum()) for stream in streams)
    quarters = itertools.cycle(flatten(streams[number::4]) for number in range(4))
    model = load_pretrained(example_run().path / "weights" / "before_final")
    optimizer = FlatOptimizer(model, published=torch.bfloat16)

    def step(lr: float) -> None:
        flat = next(quarters)
        optimizer.zero_()
        logprob, _ = score(model, flat)
        loss, _ = policy_loss(logprob, flat.sampled_S, flat.advantage_S, flat.rollout_S, settings, tokens / 4)
        loss.backward()
        optimizer.step(lr, 1.0)

    return settled(model, optimizer, step, 8, 1e-4, rates)


def settled(
    model: Model, optimizer: FlatOptimizer, step: Callable[[float], None], first: int, rate: float, rates: list[float]
) -> Iterator[tuple[float, Masters]]:
    """Take the first steps at a rate, until masters lie anywhere in their cells. Yield for each of `rates` the masters before and
    after the last of eight steps from there."""
    for _ in range(first):
        step(rate)
    start_state = {name: value.clone() for name, value in optimizer.state().items()}
    for lr in rates:
        optimizer.load(start_state)
        for _ in range(8):
            old = optimizer.master.clone()
            step(lr)
        yield lr, cut(model, old, optimizer.master)


# Codecs: of all tensors together to a list of payloads, and back


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def ours(pair: Pair) -> Packed:
    return [encode(bits(a), bits(b), dtype_of(b)) for a, b in pair]


def from_ours(pair: Pair, packed: Packed) -> list[Bits]:
    return [
        CODECS[name].decode(bits(a), payload, dtype_of(a)) for (a, _), (name, payload) in zip(pair, packed, strict=True)
    ]


def xor(compress: Callable[[Any], bytes], decompress: Callable[[bytes], bytes]) -> Form:
    def unpack(pair: Pair, packed: Packed) -> list[Bits]:
        return [
            bits(a) ^ np.frombuffer(decompress(payload), bits(a).dtype)
            for (a, _), payload in zip(pair, packed, strict=True)
        ]

    return lambda pair: [compress((bits(a) ^ bits(b)).data) for a, b in pair], unpack


def gaps(at: Bits) -> bytes:
    differences = np.diff(at, prepend=0)
    return differences.astype(np.uint16 if differences.max(initial=0) < 1 << 16 else np.uint32).tobytes()


def changes(pair: Pair) -> Iterator[tuple[Bits, Bits, Bits]]:
    """Yield, of each tensor, where its bits changed, what they were there and what they are."""
    for old, new in ((bits(a), bits(b)) for a, b in pair):
        at = np.flatnonzero(old != new)
        yield at, old[at], new[at]


def trl(pair: Pair) -> Packed:
    return [gaps(at) + new.tobytes() for at, _, new in changes(pair)]


def nemo(pair: Pair) -> Packed:
    bucket = [gaps(at) + (old ^ new).tobytes() for at, old, new in changes(pair)]
    return [zstandard.compress(b"".join(bucket), 1)]


def arc(name: str) -> Form:
    """Return one of Fireworks' codecs. Raises ImportError where the package is not installed."""
    os.environ["ARC3_CANDIDATE_WAIT_MULTIPLIER"] = "1000"
    from fireworks_delta_compression import delta_compress, delta_decompress

    def unpack(pair: Pair, packed: Packed) -> list[Tensor]:
        return [
            delta_decompress(src=a, compressed_diff=diff, checksum=sum_, compression_format=name)
            for (a, _), (diff, sum_) in zip(pair, packed, strict=True)
        ]

    return lambda pair: [delta_compress(src=a, dst=b, compression_format=name) for a, b in pair], unpack


# What needs no further package. Of layouts that other libraries write, only the size is known.
CODEC_FORMS: dict[str, Form] = {
    "ours": (ours, from_ours),
    "XOR+zstd-1": xor(lambda data: zstandard.compress(data, 1), zstandard.decompress),
    "NeMo-RL": (nemo, None),
    "TRL": (trl, None),
    "arc_v1": xor(zlib.compress, zlib.decompress),
    "arc_v2": xor(zstandard.compress, zstandard.decompress),
}


def size(packed: Packed) -> int:
    """Bytes: of payloads alone, or with a name or a checksum beside each, which are not counted."""
    payloads = [p if isinstance(p, bytes) else next(x for x in p if not isinstance(x, str)) for p in packed]
    return sum(len(payload) for payload in payloads)


def elements(pair: Pair) -> Iterator[tuple[ElementLayout, Bits, Bits]]:
    """Yield the layout of each tensor's elements, and these elements; those of packed numbers have four bits."""
    for a, b in pair:
        yield (layout := LAYOUTS[dtype_of(a)]), _elements(bits(a), layout), _elements(bits(b), layout)


def bound(pair: Pair) -> float:
    """Bytes: Σ over tensors and base exponents of N·H(c/N) + c·H(step)."""
    total = 0.0
    for layout, a, b in elements(pair):
        classes, sign = (a >> layout.shift) & layout.mask, 1 << layout.width - 1
        class_sizes, (at,) = np.bincount(classes, minlength=256), np.nonzero(a != b)
        signed = (np.where(x < sign, x.astype(np.int64), sign - 1 - x.astype(np.int64)) for x in (a[at], b[at]))
        old, new = signed
        changed = np.bincount(classes[at], minlength=256)
        _, same = np.unique(np.stack([classes[at].astype(np.int64), new - old]), axis=1, return_counts=True)
        for n in (changed, class_sizes - changed):
            total -= (n[n > 0] * np.log2(n[n > 0] / class_sizes[n > 0])).sum()
        total += (changed[changed > 0] * np.log2(changed[changed > 0])).sum() - (same * np.log2(same)).sum()
    return float(total / 8)


# Tables


def cpu(act: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = act()
    return time.process_time() - begin, result


def measure(pair: Pair, rounds: int, forms: dict[str, Form]) -> dict[str, tuple[int, float, float]]:
    """By codec: bytes, and the fewest CPU seconds of encoding and decoding (NaN for layouts of which only the size is known)."""
    best: dict[str, tuple[int, float, float]] = {}
    for turn in range(rounds):
        for name, (pack, unpack) in forms.items():
            if turn and name == "arc_v3":
                continue  # takes seconds, and is not near
            forward, packed = cpu(lambda pack=pack: pack(pair))
            back, decoded = cpu(lambda unpack=unpack, packed=packed: unpack(pair, packed)) if unpack else (np.nan, None)
            for result, (_, b) in zip(decoded or [], pair, strict=decoded is not None):
                assert np.array_equal(bits(result) if isinstance(result, Tensor) else result, bits(b)), name
            _, e, d = best.get(name, (0, np.inf, np.inf))
            best[name] = size(packed), min(e, forward), min(d, back)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=["drawn", "trained", "RL"])
    parser.add_argument("--dtypes", nargs="+", default=FORMS, choices=FORMS, help="of RL's pairs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    forms = dict(CODEC_FORMS)
    try:
        forms |= {name: arc(name) for name in ("arc_v1", "arc_v2", "arc_v3")}
    except ImportError:
        print("arc_v3 is left out: fireworks-delta-compression is not installed (make bench-weights brings it)\n")
    kinds: dict[str, Callable[[], Iterator[tuple[float, Masters]]]] = {
        "drawn": lambda: ((lr, drawn(lr)) for lr in (1.8e-7, 5e-7, 1e-6, 4e-6)),
        "trained": lambda: trained([1e-7, 3e-7, 1e-6, 3e-6]),
        "RL": lambda: reinforced([1e-7, 1e-6, 1e-5, 5e-4]),
    }
    heads = ["pair", "lr", "dtype", "changed", "ours: of full, bits a change", "over the bound"]
    heads += [*(f"{name} / ours" for name in [*forms][1:]), "GB/s: ours", "XOR+zstd-1"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for kind in args.kinds:
        for lr, masters in kinds[kind]():
            for dtype in args.dtypes if kind == "RL" else ["bfloat16"]:
                print(
                    f"| {kind} | {lr:.1e} | {dtype} | {row(pair_in(masters, dtype), args.rounds, forms)} |", flush=True
                )


def row(pair: Pair, rounds: int, forms: dict[str, Form]) -> str:
    results = measure(pair, rounds, forms)
    counts = [(int(np.count_nonzero(a != b)), len(b)) for _, a, b in elements(pair)]
    changed, count = (sum(column) for column in zip(*counts, strict=True))
    full, mine = sum(b.nbytes for _, b in pair), max(results["ours"][0], 1)  # nothing may have changed
    speeds = [f"{full / results[n][1] / 1e9:.2f} / {full / results[n][2] / 1e9:.2f}" for n in ("ours", "XOR+zstd-1")]
    cells = [f"{changed / count:.2%}" if changed >= count / 1e4 else f"{changed / count:.4%}"]
    cells += [f"{full / mine:.1f}×, {8 * mine / max(changed, 1):.2f}", f"{mine / max(bound(pair), 1) - 1:+.1%}"]
    return " | ".join([*cells, *(f"{results[name][0] / mine:.2f}" for name in [*forms][1:]), *speeds])


if __name__ == "__main__":
    main()
