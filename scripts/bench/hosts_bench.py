#!/usr/bin/env python3
"""Weight versions over shaped links between hosts (`tests/hosts/network.py`): bytes into a region and seconds, beside the
prediction of `labs/planning.py:deliveries`, which is made before. Run it as root; it writes data/links.csv.

    home: trainer and object store, no limit ── link of the table ── regions, each a host with some engines and a relay

With the defaults it takes some ten minutes on two idle cores; `--millions 2 --regions 1 --rounds 1 --out /tmp/links.csv` shows in
two that it works.

Weights are drawn (N(0, .02), bf16); a version changes the last bit of 2 % of them. Seconds are those from the order to publish,
and to fetch, until the last engine has decoded and checked the version. The prediction takes encoding, checking and decoding from
the same over links without a limit, less what is spent there on reading (`local_s`). Acknowledgements do not cross the links, as
in RL.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

from network import Host, Link, Network, ObjectStore  # noqa: E402

from composer_nb.labs.planning import RegionLink, deliveries  # noqa: E402

WORKER = """
import json, sys, time
import torch
from composer_nb.trainer.services.inference import fetch
from composer_nb.trainer.services.relay import RelayedStore
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
class TimedStore(RelayedStore):
    read_s = 0.0
    def read_file(self, *file):
        begin = time.monotonic()
        data = super().read_file(*file)
        self.read_s += time.monotonic() - begin
        return data
millions = int(sys.argv[1])
noise = torch.Generator().manual_seed(0)
start = {f"w{n}": (0.02 * torch.randn(1_000_000, generator=noise)).bfloat16() for n in range(millions)}
print(json.dumps({}), flush=True)
for line in sys.stdin:
    action, *values = line.split()
    report = {}
    if action == "store":
        publisher, store, tensors = Publisher(values[0], owner="bench"), TimedStore(values[0]), start
        receiver = Receiver(store)
    elif action == "draw":
        flips = {name: (torch.rand(len(w), generator=noise) < 0.02).short() for name, w in tensors.items()}
        tensors = {name: w.view(torch.int16).bitwise_xor(flips[name]).view(torch.bfloat16) for name, w in tensors.items()}
    elif action == "publish":
        manifest = publisher.publish(int(values[0]), tensors, {"config.json": b"{}"})
        report = {"hash": manifest.hash, "bytes": manifest.size, "full": manifest.base is None}
    elif action == "acknowledge":
        publisher.acknowledge(int(values[0]), values[1])
    else:
        store.read_s = 0.0
        report = {"hash": receiver.install(fetch(receiver, int(values[0]))), "read_s": store.read_s}
    print(json.dumps(report), flush=True)
"""
# The relay of a region, as `composer-nb up --relay` opens it.
RELAY = """
from pathlib import Path
from composer_nb.trainer.services.relay import FileCache, Relay
with Relay(FileCache(Path("relay")), "127.0.0.1", 8700) as relay:
    print("serves", flush=True)
    relay.serve_forever()
"""
TOKEN = {"RAY_AUTH_TOKEN": "secret"}
# Seconds, and those without the reading of files; bytes of a version, and those that came into a region.
COLUMNS = ("seconds", "local_s", "bytes", "received")


class Worker:
    """A trainer or an engine in a process on a host."""

    def __init__(self, host: Host, store: ObjectStore, millions: int, relay: str = "") -> None:
        env = store.environment | TOKEN | ({"COMPOSER_NB_RELAY": relay} if relay else {})
        self.process = host.start("python", "-c", WORKER, str(millions), env=env, stderr=None)
        self.take()

    def order(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def take(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def do(self, *words: object) -> dict[str, Any]:
        self.order(*words)
        return self.take()


def received(host: Host) -> int:
    return int(host.run("sed", "-n", "s/ *eth0: *//p", "/proc/net/dev").split()[0])


def deliver(trainer: Worker, engines: list[Worker], version: int) -> tuple[float, float, dict[str, Any]]:
    """Publish a version and have all engines fetch it; return the seconds, and those without the reading of files."""
    begin = time.monotonic()
    trainer.order("publish", version)
    for engine in engines:
        engine.order("fetch", version)
    manifest = trainer.take()
    reports = [engine.take() for engine in engines]
    seconds = time.monotonic() - begin
    assert {report["hash"] for report in reports} == {manifest["hash"]}
    trainer.do("acknowledge", version, manifest["hash"])
    return seconds, seconds - max(report["read_s"] for report in reports), manifest


def measure(
    network: Network, store: ObjectStore, trainer: Worker, wire: Link, relay: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """Return medians over `args.rounds` (`COLUMNS`) of a full version and two deltas."""
    name = f"{wire.rate:g}-{wire.delay:g}-{relay:d}"
    regions = [network.host(f"region{number}-{name.replace('.', '-')}", wire) for number in range(args.regions)]
    if relay:
        for region in regions:
            process = region.start("python", "-c", RELAY, env=store.environment | TOKEN, stderr=None)
            assert process.stdout is not None and process.stdout.readline() == "serves\n"
    address = "127.0.0.1:8700" if relay else ""
    engines = [Worker(region, store, args.millions, address) for region in regions for _ in range(args.engines)]
    rows: dict[str, list[tuple[float, ...]]] = {"full": [], "delta": []}
    for number in range(args.rounds + 1):
        for worker in (trainer, *engines):
            worker.do("store", f"{store.url}/{name}-{number}")
        for version in range(3):
            trainer.do("draw")  # also the first: relays have the files of earlier rounds
            before = received(regions[0])
            seconds, local_s, manifest = deliver(trainer, engines, version)
            row = (seconds, local_s, manifest["bytes"], received(regions[0]) - before)
            if number:  # the first compiles the codec
                rows["full" if manifest["full"] else "delta"].append(row)
    for engine in engines:
        engine.process.kill()
    for region in regions:
        region.kill()
    medians = {
        kind: [statistics.median(column) for column in zip(*values, strict=True)] for kind, values in rows.items()
    }
    return {kind: dict(zip(COLUMNS, row, strict=True)) for kind, row in medians.items()}


HEAD = """| link | version | MB into a region, predicted | measured | seconds, predicted | measured | error |
|---|---|---|---|---|---|---|"""


def line(row: dict[str, Any]) -> str:
    """Return a row of the table, with each prediction beside what was measured."""
    sizes = f"{row['predicted_bytes'] / 1e6:.2f} | {row['region_bytes'] / 1e6:.2f}"
    error = row["predicted_s"] / row["measured_s"] - 1
    return (
        f"| {row['rate_mbit']:g} Mbit/s, {row['round_trip_ms']:g} ms | {row['version']} | {sizes} "
        f"| {row['predicted_s']:.2f} | {row['measured_s']:.2f} | {error:+.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=32, help="weights")
    parser.add_argument("--regions", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2, help="in each region")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "links.csv")
    args = parser.parse_args()
    links = (RegionLink(rate=100, round_trip=0.08), RegionLink(rate=1000, round_trip=0.02))
    rows: list[dict[str, Any]] = []
    with Network() as network:
        store = ObjectStore(network.host("store"), "versions")
        trainer = Worker(network.host("trainer"), store, args.millions)
        local = {relay: measure(network, store, trainer, Link(), relay, args) for relay in (False, True)}
        print(HEAD, flush=True)
        for link, relay in product(links, (False, True)):
            predicted = {
                kind: deliveries(row["bytes"], link, args.engines, row["local_s"])[relay]
                for kind, row in local[relay].items()
            }
            wire = Link(rate=link.rate, delay=link.round_trip * 500)
            for kind, row in measure(network, store, trainer, wire, relay, args).items():
                rows.append({
                    "rate_mbit": link.rate, "round_trip_ms": link.round_trip * 1000, "version": kind + ", relay" * relay,
                    "predicted_bytes": int(row["bytes"] * (1 if relay else args.engines)), "region_bytes": int(row["received"]),
                    "local_s": round(local[relay][kind]["local_s"], 2), "predicted_s": round(predicted[kind], 2),
                    "measured_s": round(row["seconds"], 2),
                })  # fmt: skip
                print(line(rows[-1]), flush=True)
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    print(f"seconds are predicted within {max(errors):.0%}")
    with args.out.open("w", newline="", encoding="utf-8") as file:
        origin = f"{time.strftime('%Y-%m-%d')}, by scripts/bench/hosts_bench.py"
        file.write(f"# {args.millions} million weights, {args.regions} regions of {args.engines} engines, {origin}\n")
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
