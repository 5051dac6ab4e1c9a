#!/usr/bin/env python3
"""Weight versions over shaped links between hosts (`tests/hosts/network.py`): bytes into a region and seconds, beside the
prediction of `labs/planning.py:deliveries`, which is made before. Run it as root; it writes data/links.csv.

    home: trainer and object store, no limit ── link of the table ── regions, each a host with some engines and a relay

Weights are drawn (N(0, .02), bf16); a version changes the last bit of 2 % of them. Seconds are those from the order to publish,
and to fetch, until the last engine has decoded and checked the version; CPU and the store's own time are taken from the same over
links without a limit (`local_s`), and are part of the prediction. Acknowledgements do not cross the links, as in RL.
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
import json, sys
import torch
from composer_nb.trainer.services.inference import fetch
from composer_nb.trainer.services.relay import RelayedStore
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
millions = int(sys.argv[1])
noise = torch.Generator().manual_seed(0)
start = {f"w{n}": (0.02 * torch.randn(1_000_000, generator=noise)).bfloat16() for n in range(millions)}
print(json.dumps({}), flush=True)
for line in sys.stdin:
    action, *values = line.split()
    report = {}
    if action == "store":
        publisher, receiver = Publisher(values[0], owner="bench"), Receiver(RelayedStore(values[0]))
        tensors = start
    elif action == "draw":
        flips = {name: (torch.rand(len(w), generator=noise) < 0.02).short() for name, w in tensors.items()}
        tensors = {name: w.view(torch.int16).bitwise_xor(flips[name]).view(torch.bfloat16) for name, w in tensors.items()}
    elif action == "publish":
        manifest = publisher.publish(int(values[0]), tensors, {"config.json": b"{}"})
        report = {"hash": manifest.hash, "bytes": manifest.size, "full": manifest.base is None}
    elif action == "acknowledge":
        publisher.acknowledge(int(values[0]), values[1])
    else:
        report = {"hash": receiver.install(fetch(receiver, int(values[0])))}
    print(json.dumps(report), flush=True)
"""
RELAY = ("python", "-P", "-m", "composer_nb.cli", "weights", "relay")
TOKEN = {"RAY_AUTH_TOKEN": "secret"}


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


def deliver(trainer: Worker, engines: list[Worker], version: int) -> tuple[float, dict[str, Any]]:
    """Publish a version and have all engines fetch it; return the seconds."""
    begin = time.monotonic()
    trainer.order("publish", version)
    for engine in engines:
        engine.order("fetch", version)
    manifest = trainer.take()
    hashes = {engine.take()["hash"] for engine in engines}
    seconds = time.monotonic() - begin
    assert hashes == {manifest["hash"]}
    trainer.do("acknowledge", version, manifest["hash"])
    return seconds, manifest


def measure(
    network: Network, store: ObjectStore, trainer: Worker, wire: Link, relay: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """Return medians over `args.rounds` of a full version and two deltas: seconds, bytes of the version, bytes into a region."""
    name = f"{wire.rate:g}-{wire.delay:g}-{relay:d}"
    regions = [network.host(f"region{number}-{name.replace('.', '-')}", wire) for number in range(args.regions)]
    if relay:
        for region in regions:
            started = region.start(*RELAY, store.url, env=store.environment | TOKEN, stderr=None)
            assert started.stdout is not None and "serves" in started.stdout.readline()
    address = "127.0.0.1:8700" if relay else ""
    engines = [Worker(region, store, args.millions, address) for region in regions for _ in range(args.engines)]
    rows: dict[str, list[tuple[float, int, int]]] = {"full": [], "delta": []}
    for number in range(args.rounds + 1):
        for worker in (trainer, *engines):
            worker.do("store", f"{store.url}/{name}-{number}")
        for version in range(3):
            if version:
                trainer.do("draw")
            before = received(regions[0])
            seconds, manifest = deliver(trainer, engines, version)
            row = (seconds, manifest["bytes"], received(regions[0]) - before)
            if number:  # the first compiles the codec
                rows["full" if manifest["full"] else "delta"].append(row)
    for engine in engines:
        engine.process.kill()
    for region in regions:
        region.kill()
    medians = {
        kind: [statistics.median(column) for column in zip(*values, strict=True)] for kind, values in rows.items()
    }
    return {kind: dict(zip(("seconds", "bytes", "received"), row, strict=True)) for kind, row in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=32, help="weights")
    parser.add_argument("--regions", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2, help="in each region")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "links.csv")
    args = parser.parse_args()
    links = (RegionLink(rate=100, round_trip=0.08), RegionLink(rate=1000, round_trip=0.02))
    rows = []
    with Network() as network:
        store = ObjectStore(network.host("store"), "versions")
        trainer = Worker(network.host("trainer"), store, args.millions)
        local = {relay: measure(network, store, trainer, Link(), relay, args) for relay in (False, True)}
        for link, relay in product(links, (False, True)):
            sizes = {kind: local[relay][kind]["bytes"] for kind in ("full", "delta")}
            local_s = {kind: local[relay][kind]["seconds"] for kind in ("full", "delta")}
            predicted = {kind: deliveries(sizes[kind], link, args.engines, local_s[kind])[relay] for kind in sizes}
            wire = Link(rate=link.rate, delay=link.round_trip * 500)
            measured = measure(network, store, trainer, wire, relay, args)
            for kind, row in measured.items():
                rows.append({
                    "rate_mbit": link.rate, "round_trip_ms": link.round_trip * 1000, "version": kind + ", relay" * relay,
                    "version_bytes": int(row["bytes"]), "region_bytes": int(row["received"]), "local_s": round(local_s[kind], 2),
                    "predicted_s": round(predicted[kind], 2), "measured_s": round(row["seconds"], 2),
                })  # fmt: skip
                print(rows[-1], flush=True)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        origin = f"{time.strftime('%Y-%m-%d')}, by scripts/bench/hosts_bench.py"
        file.write(f"# {args.millions} million weights, {args.regions} regions of {args.engines} engines, {origin}\n")
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
