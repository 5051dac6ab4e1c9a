"""Commands before and after training: convert, draft, corpus, bases, improve."""

import argparse
from pathlib import Path

from composer_nb.operations import JSON, SET, arg, command, emit, overrides, pick


@command(
    "convert",
    arg("source MODEL", "a GGUF file or a checkpoint folder", type=Path),
    arg("out DIR", "checkpoint folder to write", type=Path),
    arg("--format NAME", "add the missing tokens of a chat format: compact, qwen or kimi", ""),
    arg("--experts N", "upcycle to so many experts per layer, each a copy of the layer's MLP; 0: none", 0),
    arg("--experts-per-token N", "experts that a token uses", 2),
    arg("--noise X", "noise of each expert, in standard deviations of its weights", 0.0),
    arg("--seed N", "seed of routers and noise", 0),
    JSON,
    epilog="composer-nb tour --set model.start=DIR trains it.",
)
def convert(args: argparse.Namespace) -> int:
    """Make a checkpoint from a GGUF file or another checkpoint, upcycled to experts if asked."""
    from composer_nb.trainer.models.convert import convert as write
    from composer_nb.trainer.models.transformer import weight_counts

    options = pick(args, "experts", "noise", "format", "seed")
    config = write(args.source, args.out, chosen=args.experts_per_token, **options)
    total, active = (weight_counts(config)[name] for name in ("total", "active"))
    report = {"out": str(args.out), "family": config.family, "weights": total, "active": active}
    line = f"{args.out}: {config.family}, {total / 1e6:.1f} M weights, {active / 1e6:.1f} M active per token"
    return emit(args, report, lambda: line)


@command(
    "draft",
    arg("model DIR", "checkpoint folder, which gets the head", type=Path),
    arg("--rollouts RUN", "run whose stored rollouts it learns from", type=Path, required=True),
    arg("--steps N", "optimiser steps of 4,096 tokens", 200),
    JSON,
)
def draft(args: argparse.Namespace) -> int:
    """Train a head that drafts tokens beside a checkpoint: serve is then faster, with the same output."""
    from composer_nb.trainer.drafts import HeadTrainer, new_head, rows_of, save_draft
    from composer_nb.trainer.models.checkpoint import load_pretrained

    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: at least 1")
    model, rows = load_pretrained(args.model), rows_of(args.rollouts)
    held_out = max(len(rows) // 20, 1)
    trainer = HeadTrainer(model, new_head(model, 0), rows=rows[:-held_out] or rows, steps=args.steps)
    trainer.distil()
    save_draft(trainer.head, args.model)
    share = trainer.agreement(rows[-held_out:])
    line = f"{args.model}: the head names {share:.0%} of the model's likeliest tokens, on {held_out} rollouts held out"
    return emit(args, {"same": share, "held_out": held_out}, lambda: line)


@command(
    "corpus",
    arg("root DIR", "a folder of repositories, one repository, or a site-packages folder", type=Path),
    arg("--out DIR", "folder to write", type=Path, required=True),
    arg("--tasks PATH", "tasks that must not leak into it, as for eval; repeatable", [], action="append"),
    SET,
    JSON,
    epilog="Settings are those of CorpusSettings, as similar=0.7. composer-nb tour --set data.code=DIR trains on it.",
)
def corpus(args: argparse.Namespace) -> int:
    """Filter repositories by licence, quality, duplicates and leaked tasks into code to train on."""
    from composer_nb.harness.tasks.task import load_tasks
    from composer_nb.trainer.corpus.build import CorpusSettings, make_corpus
    from composer_nb.trainer.settings import override
    from composer_nb.views.midtraining import yields

    tasks = [task for path in args.tasks for task in load_tasks(Path(path))]
    report = make_corpus(args.root, args.out, override(CorpusSettings(), overrides(args.set)), tasks)
    return emit(args, report, lambda: yields(report))


@command(
    "bases",
    arg("bases MODEL", "checkpoint folders, GGUF files, random:DIR for random weights of its sizes", nargs="+"),
    arg("--code DIR", "code that no model was trained on: what data.code holds out", "stdlib"),
    arg("--against MODEL", "ask only what this earlier model does not know", ""),
    SET,
    JSON,
    epilog="Settings are those of Measures, as questions=200. Figures compare between models of any tokenizer.",
)
def bases(args: argparse.Namespace) -> int:
    """Compare models to train, by fresh knowledge, state tracking and the likelihood of a codebase."""
    from composer_nb.labs.bases import BaseCandidate, Measures, compare_bases
    from composer_nb.trainer.learning.data import read_corpus
    from composer_nb.trainer.settings import override
    from composer_nb.views.midtraining import base_table

    measures = override(Measures(), overrides(args.set))
    earlier_model = BaseCandidate.open(args.against, measures.seed) if args.against else None
    candidates = [BaseCandidate.open(name, measures.seed) for name in args.bases]
    comparison = compare_bases(candidates, read_corpus(args.code).validation, measures, earlier_model)
    return emit(args, comparison, lambda: base_table(comparison))


@command(
    "improve",
    arg("records RUN", "folders of conversations with verdicts, from composer-nb serve --record", nargs="+", type=Path),
    arg("--model DIR", "checkpoint that was served", required=True, type=Path),
    arg("--gate TASKS", "tasks that decide whether the update ships", required=True, type=Path),
    arg("--out DIR", "new folder for the update and its report", required=True, type=Path),
    arg("--store STORE", "store of weight versions that serve --follow follows", ""),
    arg("--samples N", "attempts at each task of the gate", 2),
    SET,
    JSON,
)
def improve(args: argparse.Namespace) -> int:
    """Learn from judged conversations in one update, which ships only if it passes a gate."""
    from composer_nb.production.improve import improve as run
    from composer_nb.trainer.settings import Settings, override

    weights = {"reward.weights": {"solved": 1.0, "given": 1.0, "invalid_calls": -0.2}}
    settings = override(override(Settings(), weights), overrides(args.set))
    report = run(args.records, args.model, args.out, args.gate, settings, **pick(args, "store", "samples"))
    rollouts, gate = report["rollouts"], report["gate"]
    lines = [
        f"{rollouts['trained']} of {rollouts['judged']} judged rollouts trained, {rollouts['stale']} of other weights, "
        f"{rollouts['drawn_otherwise']} drawn with other settings than temperature 1; "
        f"mean reward {report['reward']:.3f}",
        f"stopped: {gate['stopped']}; {args.out}/candidate is not published"
        if gate["stopped"]
        else f"passed: {args.out}/weights",
    ]
    if gate["before"]:
        before, after, (low, high) = gate["before"]["pass_at_1"], gate["after"]["pass_at_1"], gate["ci95"]
        lines.insert(1, f"gate: pass@1 {before:.3f} → {after:.3f} ({gate['gain']:+.3f}, {low:+.3f} to {high:+.3f})")
    lines += [f"published as version {report['version']} of {args.store}"] if report["version"] is not None else []
    return emit(args, report, lambda: "\n".join(lines), int(bool(gate["stopped"])))
