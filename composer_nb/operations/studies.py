"""Commands for measurement and inspection: microscope, scaling, weights, doctor."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_nb.operations import JSON, RUN, STEP, arg, command, emit, save
from composer_nb.views.page import text_table


@command(
    "microscope",
    RUN,
    arg("--engine NAME", "recorded, or an engine that reads the tokens again: bf16, …", "recorded"),
    STEP,
    arg("--rollouts N", "rollouts of that step", 16),
    arg("--texts", "let the trainer read texts, tokenised again"),
    arg("--fusions", "instead: what each fused kernel of the trainer changes"),
    JSON,
)
def microscope(args: argparse.Namespace) -> int:
    """Explain why an engine and the trainer give a run's tokens different log-probabilities."""
    from composer_nb.labs.microscope import view
    from composer_nb.labs.microscope.microscope import examine_run
    from composer_nb.trainer.recipe.reader import ReadOnly

    if args.fusions:
        from composer_nb.labs.microscope.fusions import fusion_gaps
        from composer_nb.labs.rewards.rescore import model_before, stored_batch

        batch = stored_batch(ReadOnly(args.path), args.step)
        gaps = fusion_gaps(model_before(ReadOnly(args.path), batch.step), batch.attempts[: args.rollouts])
        cells = [(name, *(f"{value:.1e}" for value in row.values())) for name, row in gaps.items()]
        return emit(args, gaps, lambda: text_table(cells, ("fused", "p50", "p99", "k3")))
    choices = {"step": args.step, "rollouts": args.rollouts, "texts": args.texts}
    report = examine_run(ReadOnly(args.path), args.engine, **choices)
    causes = text_table(list(view.findings(report)), ("cause", "", "first"))
    rows = text_table(list(view.rows(report)), view.HEAD)
    return emit(args, report.to_dict(), lambda: (view.headline(report), rows, causes))


@command(
    "scaling",
    RUN,
    arg("--loss NAME", "heldout_code_loss, of the codebase, or heldout_agent_loss", "heldout_code_loss"),
    arg("--png FILE", "also draw it", type=Path),
    JSON,
)
def scaling(args: argparse.Namespace) -> int:
    """Fit the held-out loss of a run's mid-training against tokens, and test the fits on its second half."""
    from composer_nb.labs.scaling import predictions
    from composer_nb.trainer.recipe.reader import ReadOnly
    from composer_nb.views.midtraining import against_tokens, tokens_seen

    points = ReadOnly(args.path).steps("midtrain")
    if len(points) < 3 or args.loss not in points[0]:
        raise ValueError(f"{args.path}: fewer than three measurements of {args.loss!r} in mid-training")
    tokens, loss = tokens_seen(points).tolist(), [point[args.loss] for point in points]
    laws_by_shape = predictions(tokens, loss)
    fits, half = [fit for fit, _ in laws_by_shape.values()], (len(tokens) + 1) // 2
    save(args.png, lambda: against_tokens(tokens, loss, fits, half, args.loss).png())
    laws = {shape: {**asdict(fit), "error": error} for shape, (fit, error) in laws_by_shape.items()}
    rows = [
        (name, f"{law['intercept']:.3f}", f"{law['slope']:+.4f}", f"{law['error']:+.3f}") for name, law in laws.items()
    ]
    title = f"{args.loss}: {loss[0]:.3f} after {tokens[0]:,.0f} tokens, {loss[-1]:.3f} after {tokens[-1]:,.0f}"
    header = ("law", "intercept", "slope", "error at the last")
    report = {"tokens": tokens, "loss": loss, "laws": laws}
    return emit(args, report, lambda: (title, text_table(rows, header, numbers=True)))


@command(
    "weights diff",
    arg("base BASE", type=Path),
    arg("target TARGET", type=Path),
    arg("--out DIR", "write the delta as a version directory", type=Path),
    JSON,
)
def diff(args: argparse.Namespace) -> int:
    """Show what changed between two checkpoints, and the size of the delta."""
    from composer_nb.trainer import weights

    report: dict[str, Any] = weights.delta_sizes(args.base, args.target)
    if args.out:
        report["out"] = weights.encode_delta(args.base, args.target, args.out).hash
    line = (
        f"full {report['full_bytes']:,} bytes, delta {report['delta_bytes']:,} "
        f"({report['delta_bytes'] / report['full_bytes']:.1%}); {report['changed_fraction']:.2%} of the weights changed"
    )
    return emit(args, report, lambda: line)


@command(
    "weights apply", *(arg("base BASE", type=Path), arg("delta DELTA", type=Path), arg("out OUT", type=Path)), JSON
)
def apply(args: argparse.Namespace) -> int:
    """Write the version that a base and a delta give."""
    from composer_nb.trainer import weights

    return _version(args, weights.apply_delta(args.base, args.delta, args.out))


@command("weights fetch", arg("store STORE"), *(arg("version N", type=int), arg("out OUT", type=Path)), JSON)
def fetch(args: argparse.Namespace) -> int:
    """Write a version of a store or a run as a checkpoint, by its number."""
    from composer_nb.trainer import weights

    return _version(args, weights.fetch_version(_store_of(args.store), args.version, args.out))


@command("weights verify", arg("path VERSION", type=Path), JSON)
def verify(args: argparse.Namespace) -> int:
    """Check every byte of a version directory."""
    from composer_nb.trainer import weights

    return _version(args, weights.verify(args.path))


def _version(args: argparse.Namespace, manifest: Any) -> int:
    report = {"version": manifest.version, "hash": manifest.hash, "bytes": manifest.size}
    return emit(args, report, lambda: f"version {manifest.version}, {manifest.size:,} bytes, {manifest.hash}")


@command(
    "weights revert",
    arg("store STORE"),
    arg("--to N", "version whose weights are published again", required=True, type=int),
    JSON,
)
def revert(args: argparse.Namespace) -> int:
    """Publish the weights of an earlier version as the newest, for everyone who follows the store."""
    from composer_nb.production.improve import revert as publish

    version = publish(args.store, args.to)
    line = f"version {version} of {args.store} has the weights of version {args.to}"
    return emit(args, {"version": version, "weights_of": args.to}, lambda: line)


@command("weights log", arg("store STORE"), JSON)
def history(args: argparse.Namespace) -> int:
    """List the versions of a store or a run; the checkpoints of a run that keeps no versions."""
    from composer_nb.trainer.versions import store

    weights = Path(args.store) / "weights"
    rows = store.log(_store_of(args.store))
    if not rows:  # an excerpt, or a run without services
        sizes = {file.parent.name: file.parent.glob("*.safetensors") for file in sorted(weights.glob("*/config.json"))}
        rows = [{"name": name, "bytes": sum(file.stat().st_size for file in files)} for name, files in sizes.items()]
    if not rows:
        raise FileNotFoundError(f"{args.store}: no weight versions here")
    return emit(args, rows, lambda: "\n".join(map(_version_line, rows)))


@command(
    "weights regions",
    arg("--versions N", "versions to publish", 50),
    arg("--minutes N", "minutes that a line is down, or a region lost", 60.0),
    arg("--png FILE", "also draw staleness and traffic", type=Path),
    JSON,
)
def regions(args: argparse.Namespace) -> int:
    """Simulate four regions that follow a trainer: bytes, lag, staleness, and what a lost region costs."""
    from composer_nb.labs.regions import REGION_COLUMNS, RegionPlan, draw, outage_study

    plan = RegionPlan(versions=args.versions)
    study = outage_study(plan, "overseas", plan.versions // 2 * plan.step_s + plan.step_s, 60 * args.minutes)
    figures = {name: by_region for name, (_, _, by_region) in study.items()}
    save(args.png, lambda: draw(study).png())
    rows = [
        (name, region, *(f"{row[column]:,.4g}" for column in REGION_COLUMNS))
        for name, by_region in figures.items()
        for region, row in by_region.items()
        if name == "no outage" or region == "overseas"
    ]
    head = ("course", "region", *REGION_COLUMNS.values())
    return emit(args, figures, lambda: text_table(rows, head, numbers=True))


def _store_of(path: str) -> str | Path:
    """Return the store of a run, or a path or URL that is a store itself."""
    inside = Path(path) / "weights" / "versions"
    return inside if inside.is_dir() else path


def _version_line(row: dict[str, Any]) -> str:
    if "name" in row:
        return f"{row['name']}  a checkpoint  {row['bytes']:>12,} bytes"
    if "fault" in row:
        return f"v{row['version']:06d}  {row['fault']}: {row['detail']}"
    kind = "full" if row["base"] is None else f"on v{row['base']:06d}"
    line = f"v{row['version']:06d}  {kind:>12}  {row['bytes']:>12,} bytes  {row['hash'][:16]}"
    more = [f"anchor of {row['anchor_bytes']:,} bytes"] if row["anchor_bytes"] else []
    more += [f"run by {', '.join(row['acknowledged'])}"] if row["acknowledged"] else []
    more += [] if row["there"] else ["pruned"]
    return "  ".join([line, *more])


@command("doctor", JSON)
def doctor(args: argparse.Namespace) -> int:
    """Show what this machine has and what it lacks."""
    from composer_nb import doctor

    results = doctor.diagnose()
    plain = [asdict(finding) for finding in results]
    return emit(args, plain, lambda: doctor.as_table(results), int(not doctor.healthy(results)))
