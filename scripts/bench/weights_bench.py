#!/usr/bin/env python3
"""The codec of weight updates beside others, on the same pairs: `make bench-weights`, which brings the peers, or this script.

Pairs of bf16 weights published from float32 masters, one optimiser step apart:
drawn     w ~ N(0, σ) in five tensors of σ 0.006 to 0.04, a step of learning rate times N(0, 0.23): what AdamW's steps are like
          long after the start, where masters lie anywhere between two bf16 numbers
trained   a Qwen3-MoE of 11 million weights, 60 steps of AdamW on Python's standard library at 1e-3; then eight at a low learning
          rate with the moments that it has (a fresh optimiser's first steps are several times too large)
RL        the example's policy, 12 steps of policy gradient on its stored rollouts; 5e-4 was the rate of the stored example

TRL's gaps and NeMo-RL's layout are written here from their descriptions: gaps between changes in 16 bits, or in 32 where one is
larger; new values as they are, or XOR and one zstd-1 frame for all tensors. XOR+zlib is what arc_v1 does, and
XOR+zstd is arc_v2's way, each tensor alone. arc_v3 is Fireworks' own package, told to
wait for all of its candidates. Times are CPU seconds of the process, the best of some rounds, codecs in turns, one thread (arc_v3
has its own pool). The bound is the entropy of what changed and by how many steps, given each base exponent, tensor by tensor.
"""

from __future__ import annotations

import argparse
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

from composer_nb.kernels.delta.codec import CODECS, LAYOUTS, Bits, bits, encode
from composer_nb.kernels.logprob import logprob_entropy
from composer_nb.labs.rewards.rescore import stored_batch
from composer_nb.trainer.learning.loss import policy_loss
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import flatten, score
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.rl import to_streams, trains

DTYPE = "bfloat16"
Pair = list[tuple[Bits, Bits]]
Packed = list[Any]
# Of a codec: to payloads, and back.
Form = tuple[Callable[[Pair], Packed], Callable[[Pair, Packed], list[Bits]]]

# Pairs


def random_pair(lr: float) -> Pair:
    noise = torch.Generator().manual_seed(1)
    pair = []
    for rows, columns, sigma in (
        (2048, 1024, 0.02),
        (1024, 1024, 0.01),
        (1024, 512, 0.04),
        (2048, 1024, 0.006),
        (4096, 512, 0.02),
    ):
        w = sigma * torch.randn(rows * columns, generator=noise)
        u = 0.23 * torch.randn(rows * columns, generator=noise)
        pair.append((bits(w.bfloat16()), bits((w - lr * u).bfloat16())))
    return pair


def cut(model: Model, old_weights: torch.Tensor, new_weights: torch.Tensor) -> Pair:
    """Cut two vectors of all weights into the model's tensors."""
    sizes = [p.numel() for p in model.parameters()]
    return [
        (bits(a.bfloat16()), bits(b.bfloat16()))
        for a, b in zip(old_weights.split(sizes), new_weights.split(sizes), strict=True)
    ]


def trained(rates: list[float]) -> Iterator[tuple[float, Pair]]:
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

    for _ in range(60):
        step(1e-3)
    start_state = {name: value.clone() for name, value in optimizer.state().items()}
    for lr in rates:
        optimizer.load(start_state)
        for _ in range(8):
            old_weights = optimizer.weights.clone()
            step(lr)
        yield lr, cut(model, old_weights, optimizer.weights)


def reinforced(rates: list[float]) -> Iterator[tuple[float, Pair]]:
    batch = stored_batch(example_run(), -1)
    settings = batch.settings.loss
    streams = [x for group in batch.groups for s in group if trains(s, settings) for x in to_streams(s)]
    tokens = sum(int(stream.acted[1:].sum()) for stream in streams)
    for lr in rates:
        model = load_pretrained(example_run().path / "weights" / "before_final")
        optimizer = FlatOptimizer(model, published=torch.bfloat16)
        for number in range(12):
            old_weights = optimizer.weights.clone()
            optimizer.zero_()
            flat = flatten(streams[number % 4 :: 4])
            logprob, _ = score(model, flat)
            loss, _ = policy_loss(logprob, flat.sampled_S, flat.advantage_S, flat.rollout_S, settings, tokens / 4)
            loss.backward()
            optimizer.step(lr, 1.0)
        yield lr, cut(model, old_weights, optimizer.weights)


# Codecs: of all tensors together to a list of payloads, and back


def ours(pair: Pair) -> Packed:
    return [encode(a, b, DTYPE) for a, b in pair]


def from_ours(pair: Pair, packed: Packed) -> list[Bits]:
    return [CODECS[name].decode(a, payload, DTYPE) for (a, _), (name, payload) in zip(pair, packed, strict=True)]


def xor(compress: Callable[[Any], bytes], decompress: Callable[[bytes], bytes]) -> Form:
    def unpack(pair: Pair, packed: Packed) -> list[Bits]:
        differences = (np.frombuffer(decompress(payload), np.uint16) for payload in packed)
        return [a ^ difference for (a, _), difference in zip(pair, differences, strict=True)]

    return lambda pair: [compress((a ^ b).data) for a, b in pair], unpack


def gaps(at: Bits) -> bytes:
    differences = np.diff(at, prepend=0)
    return differences.astype(np.uint16 if differences.max(initial=0) < 1 << 16 else np.uint32).tobytes()


def trl(pair: Pair) -> Packed:
    indices = [np.flatnonzero(a != b) for a, b in pair]
    return [gaps(at) + b[at].tobytes() for (_, b), at in zip(pair, indices, strict=True)]


def nemo(pair: Pair) -> Packed:
    indices = [np.flatnonzero(a != b) for a, b in pair]
    bucket = [gaps(at) + (a ^ b)[at].tobytes() for (a, b), at in zip(pair, indices, strict=True)]
    return [zstandard.ZstdCompressor(level=1).compress(b"".join(bucket))]


def arc() -> Form:
    """Return Fireworks' codec. Raises ImportError where the package is not installed."""
    os.environ["ARC3_CANDIDATE_WAIT_MULTIPLIER"] = "1000"
    from fireworks_delta_compression.backends.arc3 import Arc3Backend

    backend = Arc3Backend()

    def tensor(array: Bits) -> torch.Tensor:
        return torch.from_numpy(array).view(torch.bfloat16)

    def pack(pair: Pair) -> Packed:
        return [backend.compress(src=tensor(a), dst=tensor(b)) for a, b in pair]

    def unpack(pair: Pair, packed: Packed) -> list[Bits]:
        tensors = [
            backend.decompress(src=tensor(a), compressed_diff=diff, checksum=sum_)
            for (a, _), (diff, sum_) in zip(pair, packed, strict=True)
        ]
        return [bits(t) for t in tensors]

    return pack, unpack


def size(packed: Packed) -> int:
    """Bytes: of payloads alone, or with a name or a checksum beside each, which are not counted."""
    payloads = [p if isinstance(p, bytes) else next(x for x in p if not isinstance(x, str)) for p in packed]
    return sum(len(payload) for payload in payloads)


def bound(pair: Pair) -> float:
    """Bytes: Σ over tensors and base exponents of N·H(c/N) + c·H(step)."""
    total, layout = 0.0, LAYOUTS[DTYPE]
    for a, b in pair:
        classes = (a >> layout.shift) & layout.mask
        class_sizes, (at,) = np.bincount(classes, minlength=256), np.nonzero(a != b)
        signed = (np.where(x < 1 << 15, x.astype(np.int64), (1 << 15) - 1 - x.astype(np.int64)) for x in (a[at], b[at]))
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


def measure(pair: Pair, rounds: int, forms: dict[str, Any]) -> dict[str, tuple[int, float, float]]:
    """By codec: bytes, and the fewest CPU seconds of encoding and decoding (NaN for layouts of which only the size is known)."""
    best: dict[str, tuple[int, float, float]] = {}
    for turn in range(rounds):
        for name, (pack, unpack) in forms.items():
            if turn and name == "arc_v3":
                continue  # takes seconds, and is not near
            forward, packed = cpu(lambda pack=pack: pack(pair))
            back, decoded = cpu(lambda unpack=unpack, packed=packed: unpack(pair, packed)) if unpack else (np.nan, None)
            assert decoded is None or all(np.array_equal(m, b) for m, (_, b) in zip(decoded, pair, strict=True)), name
            _, e, d = best.get(name, (0, np.inf, np.inf))
            best[name] = size(packed), min(e, forward), min(d, back)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=["drawn", "trained", "RL"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    forms: dict[str, Any] = {
        "ours": (ours, from_ours),
        "XOR+zstd-1": xor(lambda data: zstandard.compress(data, 1), zstandard.decompress),
        "XOR+zlib": xor(zlib.compress, zlib.decompress),
        "NeMo-RL": (nemo, None),
        "TRL": (trl, None),
    }
    try:
        forms["arc_v3"] = arc()
    except ImportError:
        print("arc_v3 is left out: fireworks-delta-compression is not installed (make bench-weights brings it)\n")
    pairs: dict[str, Callable[[], Iterator[tuple[float, Pair]]]] = {
        "drawn": lambda: ((lr, random_pair(lr)) for lr in (1.8e-7, 5e-7, 1e-6, 4e-6)),
        "trained": lambda: trained([1e-7, 3e-7, 1e-6, 3e-6]),
        "RL": lambda: reinforced([1e-7, 1e-6, 1e-5, 5e-4]),
    }
    peers = list(forms)[1:]
    heads = [
        "pair",
        "lr",
        "changed",
        "ours: of full, bits a change",
        "over the bound",
        *(f"{n} / ours" for n in peers),
    ]
    print(f"| {' | '.join(heads)} | GB/s: ours | XOR+zstd-1 |\n|{'---|' * (len(heads) + 2)}")
    for kind in args.kinds:
        for lr, pair in pairs[kind]():
            results = measure(pair, args.rounds, forms)
            changed = sum(int(np.count_nonzero(a != b)) for a, b in pair)
            full, mine = sum(b.nbytes for _, b in pair), results["ours"][0]
            larger = " | ".join(f"{results[name][0] / mine:.2f}" for name in peers)
            speeds = [
                f"{full / results[n][1] / 1e9:.2f} / {full / results[n][2] / 1e9:.2f}" for n in ("ours", "XOR+zstd-1")
            ]
            print(
                f"| {kind} | {lr:.1e} | {changed * 2 / full:.2%} | {full / mine:.1f}×, {8 * mine / changed:.2f} | "
                f"{mine / bound(pair) - 1:+.1%} | {larger} | {' | '.join(speeds)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
