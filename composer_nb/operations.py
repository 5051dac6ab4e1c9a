"""Subcommands for whoever operates runs: up, follow, stop, weights, replay, losses, set, plan, reap. `cli.py` hooks them up.

Each function takes the parsed command line, prints, and returns the exit status. What a user can mend is raised, for
`cli.main` to say in one line. Imports stand inside, so that other subcommands do not pay for them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_commands(add: Add) -> None:
    """Adds the subcommands with `add(name, function, help)`."""
    ray = add("up", up_command, "a Ray head that outlives notebooks and runs; services.address=FOLDER uses it")
    ray.add_argument("path", nargs="?", type=Path, default=Path("runs/head"), metavar="FOLDER", help="(runs/head)")
    ray.add_argument("--lease", type=float, default=3600.0, metavar="S", help="seconds it lives unless used (3600)")
    ray.add_argument("--down", action="store_true", help="end it, whoever uses it")
    ray.add_argument("--json", action="store_true", help="for programs")

    for name, function, text in (
        ("follow", follow_command, "what a run says, until it ends; leaving it (Ctrl-C) does nothing to the run"),
        ("stop", stop_command, "end a live run, wherever it was started; it can be resumed"),
    ):
        add(name, function, text).add_argument("path", nargs="?", type=Path, default=Path("runs/tour"), metavar="RUN")

    weights = add("weights", weights_command, "weight versions: differences, applying, checking, a store's log")
    actions = weights.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, paths, text in (
        ("diff", ("BASE", "TARGET"), "what changed between two checkpoints, and what the delta costs"),
        ("apply", ("BASE", "DELTA", "OUT"), "make the version of a base and a delta"),
        ("verify", ("VERSION",), "check every byte of a version directory"),
        ("log", ("STORE",), "the versions of a store, or of a run"),
    ):
        one = actions.add_parser(action, help=text, description=text)
        one.add_argument("paths", nargs=len(paths), metavar=paths if len(paths) > 1 else paths[0])
        one.add_argument("--json", action="store_true", help="for programs")
        if action == "diff":
            one.add_argument("--out", type=Path, metavar="DIR", help="write the delta as a version directory")

    again = add("replay", replay_command, "do a run's RL steps again from what it kept, and compare every version")
    again.add_argument("path", type=Path, metavar="RUN")
    again.add_argument("--step", type=int, metavar="N", help="up to this step (all)")
    again.add_argument("--json", action="store_true", help="for programs")

    losses = add("losses", losses_command, "policy-gradient losses side by side on a stored batch of RL")
    losses.add_argument("path", type=Path, metavar="RUN")
    losses.add_argument("--step", type=int, default=-1, metavar="N", help="whose rollouts, from 1 (the last)")
    losses.add_argument("--figures", type=Path, metavar="DIR", help="write the figures there, as PNG")
    losses.add_argument("--json", action="store_true", help="for programs")

    change = add("set", set_command, "change a setting of a live run; the run notes from which step on")
    change.add_argument("path", type=Path, metavar="RUN")
    change.add_argument("pairs", nargs="+", metavar="NAME=VALUE", help="as services.bound=4")

    plan = add(
        "plan", plan_command, "what a schedule would cost, by replayed durations; or a model, by its config.json"
    )
    plan.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint or a config.json: its weights in memory")
    plan.add_argument("--mesh", metavar="K=V,…", help="with --model: what a rank needs and sends, as shard=4,cp=2,ep=8")
    plan.add_argument("--ranks", type=int, default=1, help="of the mesh (1)")
    plan.add_argument("--tokens", type=int, default=4096, help="of a micro-batch (4096)")
    plan.add_argument("--microbatches", type=int, default=1, help="a step (1)")
    plan.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    plan.add_argument("--recompute", action="store_true", help="layers are computed again in the backward pass")
    plan.add_argument("--half", action="store_true", help="computed in bfloat16, attention fused: a GPU")
    plan.add_argument("--memory", type=float, metavar="GIB", help="of a rank: refuse what does not fit")
    plan.add_argument("--durations", type=Path, metavar="CSV", help="prompt,draw,seconds,tokens (data/durations.csv)")
    plan.add_argument("--workers", type=int, default=4)
    plan.add_argument("--capacity", type=int, default=16, help="rollouts at a time, a worker (16)")
    plan.add_argument("--train-s", type=float, default=60.0, metavar="S", help="seconds of a training step (60)")
    plan.add_argument("--publish-s", type=float, default=0.0, metavar="S", help="until engines serve new weights (0)")
    plan.add_argument("--steps", type=int, default=200)
    plan.add_argument("--json", action="store_true", help="for programs")

    reaper = add("reap", reap_command, "end what killed runs left on this machine")
    reaper.add_argument("path", nargs="?", type=Path, default=Path("runs"), metavar="RUNS")
    reaper.add_argument("--json", action="store_true", help="for programs")


def up_command(given: argparse.Namespace) -> int:
    """Starts, renews or ends a head."""
    from dataclasses import asdict

    from composer_nb.trainer import head

    if given.down:
        ended = head.down(given.path)
        print(json.dumps({"ended": ended}) if given.json else "ended" if ended else f"no head lives in {given.path}")
        return 0
    found = head.up(given.path, given.lease)
    left = found.until - time.time()
    line = f"{found.address}, process {found.pid}, for {left:.0f} s and as long as it is used; services.address={given.path}"
    print(json.dumps(asdict(found), indent=2) if given.json else line)
    return 0


def follow_command(given: argparse.Namespace) -> int:
    """0 when the run is complete, 1 when it ended before."""
    from composer_nb.trainer.detached import follow

    return int(follow(given.path.resolve(), lambda line: print(line, flush=True)) != "complete")


def stop_command(given: argparse.Namespace) -> int:
    """Ends a run."""
    from composer_nb.trainer.detached import stop

    print("stopped" if stop(given.path.resolve()) else "it is not live")
    return 0


def weights_command(given: argparse.Namespace) -> int:
    """diff, apply, verify, log."""
    from composer_nb.trainer import store, weights

    paths = [Path(path) for path in given.paths]
    if given.action == "diff":
        found: Any = weights.delta_sizes(paths[0], paths[1])
        if given.out:
            found["out"] = weights.encode_delta(paths[0], paths[1], given.out).hash
        lines = [
            f"full {found['full_bytes']:,} bytes, delta {found['delta_bytes']:,} "
            f"({found['delta_bytes'] / found['full_bytes']:.1%}); {found['changed_fraction']:.2%} of the weights changed"
        ]
    elif given.action == "log":
        inside = paths[0] / "weights" / "versions"
        found = store.log(inside if inside.is_dir() else given.paths[0])
        if not found:
            raise FileNotFoundError(f"{given.paths[0]}: no weight versions here")
        lines = [_version_line(row) for row in found]
    else:
        manifest = (
            weights.apply_delta(paths[0], paths[1], paths[2]) if given.action == "apply" else weights.verify(paths[0])
        )
        found = {"version": manifest.version, "hash": manifest.hash, "bytes": manifest.size}
        lines = [f"version {manifest.version}, {manifest.size:,} bytes, {manifest.hash}"]
    print(json.dumps(found, indent=2) if given.json else "\n".join(lines))
    return 0


def _version_line(row: dict[str, Any]) -> str:
    if "fault" in row:
        return f"v{row['version']:06d}  {row['fault']}: {row['detail']}"
    kind = "full" if row["base"] is None else f"on v{row['base']:06d}"
    return f"v{row['version']:06d}  {kind:>12}  {row['bytes']:>12,} bytes  {row['hash'][:16]}"


def replay_command(given: argparse.Namespace) -> int:
    """0 when every version came out as it was, 1 otherwise."""
    from composer_nb.config import from_dict
    from composer_nb.trainer.replay import replay
    from composer_nb.trainer.report import open_run

    run = open_run(given.path.resolve())
    settings = from_dict(run.settings())
    last = given.step if given.step is not None else len(run.steps("rl"))
    if last < 1:
        raise ValueError(f"--step {last}: the first step is 1")
    rows = []
    for one in replay(run, settings, last):
        rows.append({"step": one.step, "version": one.version, "was": one.was, "now": one.now, "same": one.same})
        if not given.json:
            print(f"step {one.step:>5}  version {one.version:>6}  {one.now[:16]}  {'same' if one.same else 'DIFFERS'}")
    if given.json:
        print(json.dumps(rows, indent=2))
    return 0 if all(row["same"] for row in rows) else 1


def losses_command(given: argparse.Namespace) -> int:
    """Holds a stored batch against its own weights, later ones and other engines; a table of losses each."""
    import sys
    from dataclasses import asdict

    from composer_nb.trainer.loss_stages import markdown, stages
    from composer_nb.trainer.report import open_run
    from composer_nb.views import losses

    found = {}
    for stage in stages(open_run(given.path), given.step):
        print(stage.name, file=sys.stderr, flush=True)
        found[stage.name] = stage.bench()
        if not given.json:
            print(markdown(stage.name, found[stage.name]), flush=True)
    if given.json:  # what is infinite or no number is null there
        rows = {name: [_finite(asdict(row)) for row in bench.rows] for name, bench in found.items()}
        print(json.dumps(rows, indent=2, allow_nan=False))
    if given.figures:
        given.figures.mkdir(parents=True, exist_ok=True)
        for name, picture in losses.pictures(found).items():
            (given.figures / f"{name}.png").write_bytes(picture.png())
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def set_command(given: argparse.Namespace) -> int:
    """Checks names and types here, so that a mistake is told to whoever made it."""
    from composer_nb.config import from_dict
    from composer_nb.trainer.journal import change_live, request_change
    from composer_nb.trainer.report import open_run

    run = open_run(given.path.resolve())
    settings = from_dict(run.settings())
    changes = {}
    for pair in given.pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise ValueError(f"{pair!r} is not NAME=VALUE")
        settings = change_live(settings, name, text)
        changes[name] = text
    if run.finished("rl") is not None:
        raise ValueError(f"{run.path.name}: its RL is over; nothing is left to change")
    for name, value in changes.items():
        request_change(run, name, value)
        print(f"asked: {name} = {value!r}")
    return 0


def plan_command(given: argparse.Namespace) -> int:
    """A table of schedules, of what a model weighs, or of what a rank of a mesh needs."""
    if given.mesh is not None:
        return _plan_mesh(given)
    if given.model is not None:
        from dataclasses import asdict

        from composer_nb.trainer.footprint import plan_path, table

        found = plan_path(given.model)
        print(json.dumps(asdict(found), indent=2) if given.json else table(found))
        return 0
    from composer_nb.trainer.schedule import Schedule
    from composer_nb.trainer.simulate import Durations, Load, simulate

    file = given.durations or Path(__file__).parents[1] / "data" / "durations.csv"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no durations here; give --durations")
    load = Load(
        durations=Durations.read(file),
        workers=given.workers,
        capacity=given.capacity,
        train_s=given.train_s,
        publish_s=given.publish_s,
    )
    rows = []
    for order, ahead, bound in (
        ("fifo", 0, 0),
        *(("fifo", 2, 2), ("fifo", 4, 4)),
        *(("window", 2, 2), ("window", 2, 4), ("window", 4, 4), ("window", 4, 8)),
        *(("discard", 2, 2), ("discard", 4, 4), ("discard", 4, 8)),
    ):
        schedule = Schedule(order=order, ahead=ahead, bound=bound, steps=given.steps)  # type: ignore[arg-type]
        rows.append({"order": order, "ahead": ahead, "bound": bound, **simulate(schedule, load)})
    if given.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(
        "| schedule | samples/s | against synchronous | of the optimum | staleness mean / max | tokens lost | lengths, KS |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        name = f"{row['order']}, O = {row['ahead']}, bound {row['bound']}" if row["ahead"] else "synchronous"
        print(
            f"| {name} | {row['samples_s']:.3f} | {row['samples_s'] / rows[0]['samples_s']:.2f}× | {row['of_optimum']:.1%} "
            f"| {row['staleness_total']:.2f} / {row['staleness_max']} | {row['not_trained']:.1%} "
            f"| {row['half_mean_ratio']:.3f}, {row['half_ks']:.4f} |"
        )
    return 0


def _plan_mesh(given: argparse.Namespace) -> int:
    from dataclasses import asdict

    from composer_nb.config import override
    from composer_nb.trainer.hf_config import read_config
    from composer_nb.trainer.memory import Load, require_memory, table
    from composer_nb.trainer.mesh import MeshSettings

    if given.model is None:
        raise ValueError("--mesh is of a model: give --model, a checkpoint or a config.json")
    pairs = [part.partition("=") for part in given.mesh.split(",") if part]
    settings = override(MeshSettings(), {name.strip(): value for name, _, value in pairs})
    load = Load(
        tokens=given.tokens,
        microbatches=given.microbatches,
        optimizer=given.optimizer,
        recompute=given.recompute,
        half=given.half,
        fused=given.half,
    )
    file = given.model / "config.json" if given.model.is_dir() else given.model
    limit = sys.maxsize if given.memory is None else int(given.memory * 2**30)
    need = require_memory(read_config(file).model, settings, given.ranks, load, limit)
    print(json.dumps(asdict(need), indent=2) if given.json else table(need))
    return 0


def reap_command(given: argparse.Namespace) -> int:
    """0 when nothing is left, 1 when something could not be ended."""
    from dataclasses import asdict

    from composer_nb.harness.reap import reap

    found = asdict(reap(given.path))
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        kinds = ("containers", "processes", "mounts", "cgroups", "directories")
        ended = [f"{len(found[kind])} {kind}" for kind in kinds if found[kind]]
        print(f"ended: {', '.join(ended) or 'nothing'}; left alone, as their owners live: {found['kept']}")
        for line in found["failed"]:
            print(f"failed: {line}")
    return 1 if found["failed"] else 0
