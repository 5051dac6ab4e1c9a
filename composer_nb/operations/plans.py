"""The command plan, which estimates the cost of schedules, models and ranks of a mesh."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_nb.operations import JSON, arg, command, emit, pick

if TYPE_CHECKING:
    from composer_nb.labs.planning import Durations
    from composer_nb.trainer.models.config import ModelConfig
    from composer_nb.trainer.schedule import Schedule

# The compared schedules; the first is synchronous.
SCHEDULES: list[dict[str, Any]] = [
    {"order": order, "ahead": ahead, "bound": bound}
    for order, bounds in {
        "fifo": ((0, 0), (2, 2), (4, 4)),
        "window": ((2, 2), (2, 4), (4, 4), (4, 8)),
        "discard": ((2, 2), (4, 4), (4, 8)),
    }.items()
    for ahead, bound in bounds
]
HEAD = (
    "| schedule | samples/s | against synchronous | of the optimum | staleness mean / max | tokens lost | lengths, KS |"
)


@command(
    "plan",
    arg("--model PATH", "a checkpoint or a config.json: memory of its weights", type=Path),
    arg("--mesh K=V,…", "with --model: memory and traffic of a rank, as shard=4,cp=2,ep=8"),
    arg("--ranks N", "ranks of the mesh", 1),
    arg("--tokens N", "tokens of a microbatch", 4096),
    arg("--microbatches N", "microbatches per step", 1),
    arg("--optimizer", "", "adamw", choices=["adamw", "muon"]),
    arg("--recompute", "recompute layers in the backward pass"),
    arg("--half", "compute in bfloat16 with fused attention, as on a GPU"),
    arg("--memory GIB", "memory of a rank: refuse what does not fit", type=float),
    arg("--run RUN", "replay the durations that the RL of a run recorded, and compare with what it reached", type=Path),
    arg("--write CSV", "with --run: keep what it recorded as a table (data/tour_durations.csv)", type=Path),
    arg("--durations CSV", "prompt,draw,seconds,tokens (data/durations.csv)", type=Path),
    arg("--workers N", "environment workers", 4),
    arg("--capacity N", "rollouts at a time per worker; not with --measured, which has those of its rates", 16),
    arg("--train-s S", "seconds of a training step; not with --measured, which computes them", 60.0),
    arg("--publish-s S", "seconds until engines serve new weights", 0.0),
    arg("--steps N", "training steps to simulate", 200),
    arg("--link MBIT,MS", "link into a region: seconds of a weight version, with --bytes, --engines and --publish-s"),
    arg("--bytes FULL,DELTA", "with --link: bytes of a full version and of a delta"),
    arg("--engines N", "with --link: engines of the region", 1),
    arg("--measured FILE", "rates by scripts/bench/rates_bench.py, for --workers engines, --ranks trainers", type=Path),
    arg("--rollout-tokens N", "with --measured: trained tokens of a rollout, observations too; 0: as sampled", 0),
    arg("--dollars-hour D", "with --measured: price of one engine or rank", 0.0),
    arg("--ray-cluster FILE", "with --measured: write a configuration for ray up, of --hosts", type=Path),
    arg("--hosts IP,…", "with --ray-cluster: hosts of ranks, first the head, then of engines", ""),
    JSON,
)
def plan(args: argparse.Namespace) -> int:
    """Estimate costs: schedules by replayed durations, a model by its config.json."""
    if args.link is not None:
        return _plan_link(args)
    if args.measured is not None:
        return _plan_measured(args)
    if args.ray_cluster or args.hosts or args.dollars_hour:
        raise ValueError("--ray-cluster, --hosts and --dollars-hour: only with --measured FILE")
    if args.mesh is not None:
        return _plan_mesh(args)
    if args.model is not None:
        from composer_nb.trainer.parallel.memory import plan_memory

        sizes = plan_memory(_config(args.model))
        return emit(args, sizes, lambda: _size_table(sizes))
    return _plan_schedules(args)


def _plan_measured(args: argparse.Namespace) -> int:
    """Simulate schedules at the rates of a machine, with dollars a step, and write a cluster of such machines."""
    import yaml

    from composer_nb.labs.rates import MachineRates, ray_cluster, step_cost

    rates, machines = MachineRates.read(args.measured), args.ranks + args.workers
    if args.run:
        raise ValueError("--run has durations of its own: leave out --measured")
    base_schedule, hourly = _base_schedule(args), machines * args.dollars_hour
    fleet = pick(args, "workers", "ranks", "rollout_tokens", "publish_s")
    loads = rates.loads(_durations(args), base_schedule.batch, **fleet)
    results = [row | step_cost(replace(base_schedule, **row), loads, hourly) for row in SCHEDULES]
    if args.ray_cluster:
        hosts = args.hosts.split(",")
        if len(hosts) != machines:
            raise ValueError(
                f"--hosts has {len(hosts)}: one for each of --ranks {args.ranks} and --workers {args.workers}"
            )
        text = yaml.safe_dump(ray_cluster(hosts, args.ranks), sort_keys=False)
        args.ray_cluster.write_text(text, encoding="utf-8")
    lines = [rates.table(), "", "| schedule | samples/s | s a step | dollars a step | staleness mean / max |"]
    lines += ["|---|---|---|---|---|"]
    for row in results:
        cells = ["{:.4g} ({:.4g} to {:.4g})".format(*row[name]) for name in ("samples_s", "step_s", "dollars_step")]
        staleness = f"{row['staleness_total']:.2f} / {row['staleness_max']}"
        lines.append(f"| {' | '.join([_name(row), *cells, staleness])} |")
    return emit(args, results, lambda: "\n".join(lines))


def _name(row: dict[str, Any]) -> str:
    return f"{row['order']}, O = {row['ahead']}, bound {row['bound']}" if row["ahead"] else "synchronous"


def _base_schedule(args: argparse.Namespace) -> Schedule:
    from composer_nb.trainer.schedule import Schedule

    return Schedule(steps=args.steps, window=0.5, hang_s=1e9)  # simulated rollouts do not hang


def _durations(args: argparse.Namespace) -> Durations:
    """Read --durations. Raises FileNotFoundError."""
    from composer_nb.labs.planning import Durations

    path = args.durations or Path(__file__).parents[2] / "data" / "durations.csv"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no durations here; give --durations")
    return Durations.read(path)


def _plan_link(args: argparse.Namespace) -> int:
    """Estimate bytes and seconds of a weight version over a link."""
    from composer_nb.labs.planning import RegionLink, deliveries

    try:
        rate, round_trip_ms = map(float, args.link.split(","))
        sizes = dict(zip(("full", "delta"), map(float, args.bytes.split(",")), strict=True))
    except (ValueError, AttributeError):
        raise ValueError("--link wants MBIT,MS and --bytes FULL,DELTA: plan --link 100,80 --bytes 64e6,6e6") from None
    link, rows = RegionLink(rate=rate, round_trip=round_trip_ms / 1000), []
    for kind, size in sizes.items():
        direct_s, relayed_s = deliveries(size, link, args.engines, args.publish_s)
        rows.append({"version": kind, "bytes": size * args.engines, "seconds": direct_s})
        rows.append({"version": f"{kind}, relay", "bytes": size, "seconds": relayed_s})
    lines = ["| version | MB into the region | seconds |", "|---|---|---|"]
    lines += [f"| {row['version']} | {row['bytes'] / 1e6:,.1f} | {row['seconds']:.2f} |" for row in rows]
    return emit(args, rows, lambda: "\n".join(lines))


def _plan_schedules(args: argparse.Namespace) -> int:
    """Simulate schedules on recorded durations, and compare their throughput, staleness and lost tokens."""
    from composer_nb.labs.planning import RunSpeed, SimulatedLoad, simulate
    from composer_nb.trainer.recipe.reader import ReadOnly

    base_schedule, schedules = _base_schedule(args), [*SCHEDULES]
    measured_rate = 0.0
    if args.write and not args.run:
        raise ValueError("--write needs --run, the run whose durations it keeps")
    if args.run:
        run = ReadOnly(args.run)
        recorded = RunSpeed.of_run(run)
        load, measured_rate = recorded.load, recorded.reached
        base_schedule = replace(recorded.schedule, steps=len(run.steps("rl")), refill=0)
        if args.write:
            recorded.write(args.write)
        schedules.append({name: getattr(base_schedule, name) for name in SCHEDULES[0]})
    else:
        load = SimulatedLoad(durations=_durations(args), **pick(args, "workers", "capacity", "train_s", "publish_s"))
    results = [row | simulate(replace(base_schedule, **row), load) for row in schedules]
    if args.run:
        results[-1]["measured_s"] = measured_rate
    lines, synchronous = [HEAD, "|---|---|---|---|---|---|---|"], results[0]["samples_s"]
    for row in results:
        rate = row["samples_s"]
        lines.append(
            f"| {_name(row)} | {rate:.3f} | {rate / synchronous:.2f}× | {row['of_optimum']:.1%} "
            f"| {row['staleness_total']:.2f} / {row['staleness_max']} | {row['not_trained']:.1%} "
            f"| {row['half_mean_ratio']:.3f}, {row['half_ks']:.4f} |"
        )
    if args.run:
        predicted = results[-1]["samples_s"]
        lines += [
            "",
            f"The last row is the run's own schedule: {predicted / measured_rate:.2f}× the {measured_rate:.3f} samples/s "
            "that it reached.",
        ]
    return emit(args, results, lambda: "\n".join(lines))


def _plan_mesh(args: argparse.Namespace) -> int:
    """Estimate the memory and traffic of a rank of a mesh. Raises ValueError if a rank needs more than --memory."""
    from composer_nb.trainer.parallel.memory import RankLoad, require_memory, table
    from composer_nb.trainer.parallel.mesh import MeshSettings
    from composer_nb.trainer.settings import override

    if args.model is None:
        raise ValueError("--mesh needs --model, a checkpoint or a config.json")
    pairs = [part.partition("=") for part in args.mesh.split(",") if part]
    settings = override(MeshSettings(), {name.strip(): value for name, _, value in pairs})
    load = RankLoad(**pick(args, "tokens", "microbatches", "optimizer", "recompute", "half"), fused=args.half)
    max_bytes = sys.maxsize if args.memory is None else int(args.memory * 2**30)
    need = require_memory(_config(args.model), settings, args.ranks, load, max_bytes)
    return emit(args, asdict(need), lambda: table(need))


def _config(path: Path) -> ModelConfig:
    """Return the configuration of a checkpoint's folder, or of a config.json. Raises FileNotFoundError or ValueError, which names
    the file."""
    from composer_nb.trainer.models.hf_config import read_config

    if not path.exists():
        raise FileNotFoundError(f"{path}: nothing here; give a checkpoint's folder or a config.json")
    return read_config(path / "config.json" if path.is_dir() else path).model


def _size_table(sizes: dict[str, int]) -> str:
    """Return `plan_memory` as a Markdown table."""

    def short(name: str) -> str:
        units = ((10**12, "T"), (10**9, "B"), (10**6, "M"))
        count, unit = sizes[name], next((pair for pair in units if sizes[name] >= pair[0]), None)
        return f"{count / unit[0]:,.2f} {unit[1]}" if unit else f"{count:,}"

    def gib(name: str) -> str:
        return f"{sizes[name] / 2**30:,.1f} GiB" if sizes[name] >= 2**29 else f"{sizes[name] / 2**20:,.1f} MiB"

    rows = [
        ("weights", f"{short('total')}, {short('active')} of them active in a token"),
        ("of the active, embedding table", short("embedding")),
        *([("heads that predict further ahead", short("ahead"))] if sizes["ahead"] else []),
        ("in bfloat16 / float32", f"{gib('bf16_bytes')} / {gib('fp32_bytes')}"),
        ("optimiser: masters and two moments", gib("optimizer_bytes")),
        ("training in all, but activations", gib("training_bytes")),
        ("cache a token, at best in bfloat16", f"{sizes['cache_bytes'] / 1024:,.1f} KiB"),
        ("cache a token, in this project's engine, float32", f"{sizes['engine_cache_bytes'] / 1024:,.1f} KiB"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)])
