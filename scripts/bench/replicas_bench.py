#!/usr/bin/env python3
"""Tokens a second of `serve`'s engines, one or several: `scripts/bench/replicas_bench.py [--replicas N] [--rounds N]`.

Agents in threads of their own, as many as conversations are held: each reads what a rollout of the example's evaluation read,
turn by turn, and the example's final model writes as it likes at temperature 1, up to the turn's length on record. The sides take
turns in each round. Prints tokens by the clock and by the CPU seconds of front and engines together, which other work changes
less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from composer_nb.harness.policy import Request
from composer_nb.harness.rollout import Kind
from composer_nb.production.replicas import Replicas, open_actors

EXAMPLE = Path(__file__).parents[2] / "data/example"
READ = (Kind.PROMPT, Kind.OBSERVATION)
Talk = list[tuple[list[int], int]]
"""For each turn, what is read and how many tokens are written."""


def recorded(count: int, number: int) -> list[Talk]:
    talks = list[Talk]()
    for row in pq.read_table(EXAMPLE / "rollouts/eval_final.parquet").to_pylist()[number * count :][:count]:
        pairs = zip(row["token_ids"], row["kind"], strict=True)
        spans = [[token for token, _ in span] for _, span in groupby(pairs, lambda pair: pair[1] in READ)]
        talks.append([(read, len(written)) for read, written in zip(spans[::2], spans[1::2], strict=False)])
    return talks


def play(service: Replicas, talks: list[Talk]) -> list[list[int]]:
    """Return what was written in each conversation."""

    def converse(number: int) -> list[int]:
        written = list[int]()
        for read, most in talks[number]:
            [answer] = service.start(Request(rollout=number, token_ids=read, max_tokens=most))
            written += answer.result().token_ids
        service.release(number)
        return written

    with ThreadPoolExecutor(len(talks)) as agents:
        return [*agents.map(converse, range(len(talks)))]


def cpu(service: Replicas) -> float:
    processes = [psutil.Process(), *(psutil.Process(state["pid"]) for state in service.health()["replicas"])]
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    size = {"path": EXAMPLE / "weights/final", "tokens": 512, "step_tokens": 512}
    sides, rates = (1, args.replicas), list[list[tuple[float, float]]]()
    with ExitStack() as stack:
        actors = stack.enter_context(open_actors())
        options = [[{**size, "slots": -(-args.conversations // count)}] * count for count in sides]
        services = [stack.enter_context(Replicas(actors, replicas)) for replicas in options]
        for number in range(args.rounds + 1):
            talks, written = recorded(args.conversations, number), []
            rates.append([])
            for service in services:
                begin, cpu_before = time.perf_counter(), cpu(service)
                written.append(play(service, talks))
                count = sum(map(len, written[-1]))
                rates[-1].append((count / (time.perf_counter() - begin), count / (cpu(service) - cpu_before)))
            if written[0] != written[1]:
                raise SystemExit("the sides wrote other tokens")
        moved = sum(state["moved_total"] for state in services[1].health()["replicas"])
    print(
        f"load {os.getloadavg()[0]:.1f}; {moved} turns moved\n| processes | tokens / s | tokens / CPU s |\n|---|---|---|"
    )
    for side, count in enumerate(sides):
        clock, work = (statistics.median(row[side][which] for row in rates[1:]) for which in (0, 1))
        print(f"| {count} | {clock:,.0f} | {work:,.0f} |")
    ratios = [row[1][0] / row[0][0] for row in rates[1:]]
    print(
        f"{args.replicas} processes against one: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
