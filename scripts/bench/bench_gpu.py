#!/usr/bin/env python3
"""The MoE kernels on a GPU against their peers: `make bench-gpu`, or `scripts/bench/bench_gpu.py [--out FOLDER] [--seconds 450]`.

Ceilings first (a copy, a product in bf16, one in fp8), then a row for each line of the plan: grouped products, whole layers
forward and backward, quantisation, permutation, router, FP8, decoding, memory. Random data, uniform and Zipf routing. Peers
that are not installed are named as holes. Writes bench_gpu.json and bench_gpu.md.

`--device cpu` is a rehearsal: the same flow on shapes of a few dozen, in Triton's interpreter. Its times mean nothing, and it
says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from gpu_cases import Bench, ceilings, compiled, decoding, layers, memory, products, rows

from composer_nb.kernels import explain
from scripts.bench import triton_interpreter
from scripts.bench.gpu_bench_tools import L2_BYTES, OURS, Case, CaseResult, as_json, run_case, table

REHEARSAL = "REHEARSAL on a CPU, in Triton's interpreter: the flow is tested, the times mean nothing."
PLAN: tuple[tuple[Callable[[Bench], Iterator[Case]], int], ...] = (
    (ceilings, 3), (products, 10), (rows, 6), (decoding, 4), (layers, 16), (compiled, 1),
)  # fmt: skip
"""What is measured, and about how many cases each has."""


def machine(b: Bench) -> dict[str, str]:
    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    names = ("torch", "triton", "transformers", "liger-kernel", "torchao")
    facts = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), **{name: version(name) for name in names}}
    if b.device.type == "cuda":
        properties = torch.cuda.get_device_properties(b.device)
        facts |= {
            "gpu": properties.name,
            "memory": f"{properties.total_memory >> 30} GiB",
            "cuda": str(torch.version.cuda),
        }
    return {"gpu": "none", **facts}


def measure(
    b: Bench, parts: list[str], seconds: float, rounds: int, keep: Callable[[list[CaseResult], dict[str, float]], None]
) -> tuple[list[CaseResult], dict[str, float]]:
    """Measure the cases of `parts` in about `seconds`; each gets its share of the time left. `keep` is called after each."""
    plan = [(make_cases, count) for make_cases, count in PLAN if make_cases.__name__ in parts]
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device=b.device) if b.device.type == "cuda" else None
    end, cases_left = time.monotonic() + seconds, sum(count for _, count in plan)
    results: list[CaseResult] = []
    tops: dict[str, float] = {}
    for make_cases, count in plan:
        for case in make_cases(b):
            share = max(0.0, end - time.monotonic()) / max(1, cases_left)
            if time.monotonic() > end:
                results.append(CaseResult(case=case, holes=dict.fromkeys(case.forms, "out of time")))
                continue
            few = {"rounds": 1, "least": 1, "warm": 1} if b.rehearsal else {"rounds": rounds}
            result = run_case(case, b.device, seconds=share / 2, flush=flush, **few)
            print(
                f"{case.number:>2} {case.title}, {case.shape}: {result.median(OURS) or float('nan'):.3f} ms {result.holes or ''}",
                file=sys.stderr,
                flush=True,
            )
            results.append(result)
            if case.number == "0" and (rate := result.rate(OURS)):
                tops[case.title] = rate
            keep(results, tops)
        cases_left -= count
    return results, tops


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/bench_gpu"))
    parser.add_argument("--seconds", type=float, default=450.0)
    parser.add_argument("--rounds", type=int, default=30)
    names = [make_cases.__name__ for make_cases, _ in PLAN]
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=names, help="ceilings give the shares of the others"
    )
    args = parser.parse_args(arguments)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print(
            "bench-gpu: no CUDA device here. On a machine with one: make bench-gpu. The flow alone: --device cpu",
            file=sys.stderr,
        )
        return 2
    triton_interpreter.repair()
    b = Bench(args.device)
    explain(device=b.device, backend="triton")  # refuses a GPU that is too old, and a machine without Triton
    facts, first, notes = machine(b), [REHEARSAL] if b.rehearsal else [], list[str]()
    args.out.mkdir(parents=True, exist_ok=True)

    def keep(results: list[CaseResult], tops: dict[str, float]) -> None:
        """Write the results so far, so that a run that is cut off leaves them."""
        head = ", ".join(f"{name} {value}" for name, value in facts.items())
        (args.out / "bench_gpu.md").write_text("\n\n".join([*first, head, table(results, tops), *notes]) + "\n")
        cases = [as_json(result, tops) for result in results]
        data = {"machine": facts, "rehearsal": b.rehearsal, "ceilings": tops, "cases": cases, "notes": [*first, *notes]}
        (args.out / "bench_gpu.json").write_text(json.dumps(data, indent=1))

    results, tops = measure(b, args.parts, args.seconds, args.rounds, keep)
    notes += memory(b)
    keep(results, tops)
    print((args.out / "bench_gpu.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
