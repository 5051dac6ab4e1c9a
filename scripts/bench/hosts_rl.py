#!/usr/bin/env python3
"""RL over hosts behind links, beside the same on one host: `scripts/bench/hosts_rl.py RUN [--steps 16]`. Run it as root.

RUN is a finished run; its copies begin with RL. The engine and its environments are a node behind the link (`composer-nb up
--join`), with a relay; head, trainer and S3 are behind none. Nothing but Ray and the store is shared. The prediction is what
was measured on one host, times what the simulation (`composer-nb plan --run`) loses by the seconds of a delta over the link
(`plan --link`); Ray's calls over the link are not in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

from network import Link, Network, ObjectStore  # noqa: E402
from nodes import RUN, join, send_run, start_head  # noqa: E402

from composer_nb.labs.planning import RegionLink, RunSpeed, deliveries, simulate  # noqa: E402
from composer_nb.trainer.recipe.report import training  # noqa: E402
from composer_nb.trainer.records.rundir import RunDir, open_run  # noqa: E402

LINKS = (None, RegionLink(rate=1000, round_trip=0.02), RegionLink(rate=100, round_trip=0.08))


def over(link: RegionLink | None, source: RunDir, steps: int, folder: Path) -> RunDir:
    """Run RL over this link, or on one host, and return the run."""
    with Network() as network:
        store = ObjectStore(network.host("store"), "runs")
        head = start_head(network, store, "head")
        if link:
            wire = Link(rate=link.rate, delay=link.round_trip * 500)
            join(network.host("trainer"), head, store, "trainer")
            join(network.host("engine", wire), head, store, "engine,environment")
        changes: dict[str, Any] = {"rl.steps": steps, "services.ahead": 1, "services.bound": 2}
        run = send_run(source, head, store, folder, changes)
        head.run(*RUN, run, seconds=1800, env=store.environment)
        head.take(run, folder / "result")
    return RunDir(folder / "result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    print("| link | samples a second, predicted | measured | staleness | engine idle | seconds of a version |")
    print("|---|---|---|---|---|---|")
    near: RunSpeed | None = None
    for link in LINKS:
        with tempfile.TemporaryDirectory() as folder:
            run = over(link, open_run(args.run), args.steps, Path(folder))
            speed, info = RunSpeed.of_run(run), run.finished("rl") or {}
            figures = training(run.steps("rl"), run.settings(), info, run.ledger(), info["seconds"])
            near = near or speed
            version_s = near.load.publish_s
            if link:
                _, version_s = deliveries(info["store"]["delta_bytes"], link, 1, version_s)
            loads = near.load, replace(near.load, publish_s=version_s)
            at_home, away = (simulate(near.schedule, load)["samples_s"] for load in loads)
        name = f"{link.rate:g} Mbit/s, {1000 * link.round_trip:g} ms" if link else "one host"
        print(
            f"| {name} | {near.reached * away / at_home:.2f} | {speed.reached:.2f} | {figures['staleness_mean']:.2f} "
            f"| {figures['engine_idle']:.2f} | {speed.load.publish_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
