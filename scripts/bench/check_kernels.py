"""Compile every Triton kernel for Hopper and Blackwell and print a table. Needs no GPU. Exits with 1 if an expectation fails.

python scripts/bench/check_kernels.py --arch 90,100
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from composer_nb.kernels.triton_runtime import triton_version
from scripts.bench.aot import ARCHITECTURES, PACKAGE, gate, table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compile every Triton kernel")
    parser.add_argument("--arch", default=",".join(map(str, ARCHITECTURES)), help="comma-separated: 90,100")
    parser.add_argument("--module", default=PACKAGE, help="module with SPECS")
    parser.add_argument("--only", default="", help="compile kernels whose names contain this")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(arguments)
    try:
        architectures = [int(number) for number in args.arch.split(",")]
    except ValueError:
        parser.error(f"--arch {args.arch!r}: must be numbers such as 90,100")
    if unknown := set(architectures) - set(ARCHITECTURES):
        parser.error(f"--arch {sorted(unknown)}: must be of {', '.join(map(str, ARCHITECTURES))}")
    began = time.perf_counter()
    try:
        rows = gate(architectures, module=args.module, only=args.only, processes=args.processes)
    except ValueError as error:
        parser.error(str(error))
    failed = sum(bool(row.failed) for row in rows)
    print(table(rows))
    print(f"{len(rows)} compiled by Triton {triton_version()} in {time.perf_counter() - began:.0f} s, {failed} failed")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
