#!/usr/bin/env python3
"""The small figures of docs/figures.md, each as a table: `scripts/docs/figures.py NAME [PATH …] [--png FILE]`.

kl                 mean and variance of k1, k2 and k3 on Gaussians, sampled and in closed form
mix PATH …         what tasks ask for, by categories of work and by kinds; --png draws the shares of categories
sizes PATH …       lines that solutions change, and characters of requests: quartiles; --png draws them as boxplots
during RUN         mean and best of a group while RL runs
formats            what a later token and another division change in stored numbers
precision          loss of a tiny mixture of experts whose products are quantised, over three seeds
routes RUN         experts that engine and trainer share, load of experts over a run's steps, bytes of routes
zigzag             attention work of the busiest rank of a context, over the mean
warp               experts of a few tokens by outputs (warp decode) and by experts: error, and bytes of Qwen3-30B-A3B's layer
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from composer_nb.harness.files import write_atomic
from composer_nb.harness.quality import solution_lines
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.kernels.formats.microscaling import nvfp4_quantize_reference
from composer_nb.kernels.moe.warp_decode import decode_costs, decode_errors
from composer_nb.labs.formats import FORMATS, changed_past
from composer_nb.labs.microscope.routes import load_drift, route_bytes, shared_experts
from composer_nb.labs.rewards.rescore import weights_of
from composer_nb.trainer.learning.loss import kl_estimate
from composer_nb.trainer.learning.retrace import retrace
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.config import Kernels, ModelConfig
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import PAIRS, variant
from composer_nb.trainer.parallel.context import zigzag as zigzag_shares
from composer_nb.trainer.recipe.reader import open_run, stored_groups, stored_steps
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import style
from composer_nb.views.agent import sizes as draw_sizes
from composer_nb.views.rollout import expert_use
from composer_nb.views.style import Picture

Row = tuple[object, ...]


def closed_form(kind: str, mean: float) -> tuple[float, float]:
    """Return mean and variance of an estimator of KL(N(0, 1) ‖ N(mean, 1)) on samples of the first."""
    m, s = mean**2 / 2, mean  # k1 is normal with this mean and deviation; E[ρ] = 1, E[ρ k1] = −m
    if kind == "k1":
        return m, s**2
    if kind == "k2":
        return (m**2 + s**2) / 2, (2 * s**4 + 4 * m**2 * s**2) / 4
    return m, math.expm1(s**2) - s**2


def kl(count: int = 10_000_000) -> Iterator[Row]:
    yield "mean of the reference", "estimator", "mean", "exact", "variance", "exact"
    x = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for mean in (0.1, 0.5, 1.0, 2.0):
        for kind in ("k1", "k2", "k3"):
            estimates = kl_estimate(-(x**2) / 2, -((x - mean) ** 2) / 2, kind)
            first, second = closed_form(kind, mean)
            yield mean, kind, f"{estimates.mean():.4g}", f"{first:.4g}", f"{estimates.var():.4g}", f"{second:.4g}"


CATEGORIES = {
    "new features": ("feature", "features"),
    "tests": ("tests",),
    "refactoring": ("rename", "move", "extract"),
    "cleaning up": ("lint",),
    "version control": ("git",),
    "answering questions": ("question", "paraphrase"),
    "long-running commands": ("long",),
}
"""Kinds of tasks by what they ask for; all others ask to fix a bug. The report names fixing bugs and the last three as uses that
its tasks have, besides plans and analyses of data, of which there is no kind here."""


def category(task: Task) -> str:
    kind = task.metadata.get("kind", "bug")
    return next((name for name, kinds in CATEGORIES.items() if kind in kinds), "fixing bugs")


def mix(tasks: list[Task]) -> Iterator[Row]:
    yield "category", "kind", "family", "bug", "tasks", "share"
    names = (("kind", "bug"), ("family", "–"), ("bug", "–"))
    rows = [(category(task), *(task.metadata.get(name, default) for name, default in names)) for task in tasks]
    for counts in (Counter((row[0], "all", "", "") for row in rows), Counter(rows)):
        yield from ((*key, n, f"{n / len(tasks):.0%}") for key, n in counts.most_common())


def draw_mix(tasks: list[Task]) -> Picture:
    picture, ax = style.one_panel(6.5, 3.2)
    counts = Counter(map(category, tasks))
    style.bars(ax, {name: n / len(tasks) for name, n in counts.most_common()}, style.BLUE, ".0%")
    style.title(ax, f"what {len(tasks)} tasks ask for", "share of the tasks")
    return picture


def sizes(tasks: list[Task]) -> Iterator[Row]:
    yield "figure", "least", "lower quartile", "median", "upper quartile", "most", "tasks"
    solved = [task for task in tasks if task.solution]
    for name, values in (
        ("lines changed", [solution_lines(task) for task in solved]),
        ("characters of the request", [len(task.instruction) for task in tasks]),
    ):
        yield name, *np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist(), len(values)


def during(run: Path, sections: int = 4) -> Iterator[Row]:
    steps = open_run(run).steps("rl")
    yield "steps", "mean", "best of a group"
    for section in np.array_split(np.arange(len(steps)), sections):
        means = [np.mean([steps[n][name] for n in section]) for name in ("solved", "best_of_group")]
        yield f"{section[0] + 1} to {section[-1] + 1}", *(f"{value:.3f}" for value in means)


def formats() -> Iterator[Row]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 2048, generator=random) * torch.randn(2048, 1, generator=random).exp()
    x = x.bfloat16().float()
    few = x[:64].clone()
    few[-1] = 3 * few.abs().max() * few[-1].sign()  # the last token holds the largest number, and grows
    yield "what", "differs"
    for name, quantize in FORMATS.items():
        yield f"{name}: earlier tokens, if the last is tripled", int((changed_past(quantize, few) != 0).sum())
    exact, fast = (
        nvfp4_quantize_reference(x, division=division).scale.view(torch.uint8) for division in ("ieee", "fast")
    )
    wrong = exact != fast
    yield "NVFP4, x · (1/s) for x / s: scales of 16", f"{wrong.float().mean():.1e}"
    yield "the same: tokens with such a scale", f"{wrong.any(1).float().mean():.0%}"


def losses(recipe: str, text: torch.Tensor, seed: int, steps: int) -> float:
    """Train a mixture of experts on bytes; return its loss on the last eighth of them, nats a byte."""
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    model = Model(config)
    model.kernels = Kernels(recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    heldout_start, random = len(text) * 7 // 8, torch.Generator().manual_seed(seed)

    def loss(at: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([text[n : n + 129] for n in at.tolist()])
        return F.cross_entropy(model(rows[:, :-1])[0].flatten(0, 1), rows[:, 1:].flatten())

    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.randint(heldout_start - 129, (4,), generator=random)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(torch.arange(heldout_start, len(text) - 129, 512)))


def precision(steps: int = 200) -> Iterator[Row]:
    library = Path(sysconfig.get_path("stdlib"))
    read = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py", "typing.py"))
    text = torch.tensor(list(read))
    yield "recipe", "held-out loss by seed", "mean less that of bf16", "largest difference of a seed"
    base = [losses("bf16", text, seed, steps) for seed in range(3)]
    for recipe in ("bf16", "mxfp8", "nvfp4"):
        recipe_losses = base if recipe == "bf16" else [losses(recipe, text, seed, steps) for seed in range(3)]
        differences = [loss / base_loss - 1 for loss, base_loss in zip(recipe_losses, base, strict=True)]
        losses_text = " ".join(f"{loss:.4f}" for loss in recipe_losses)
        yield recipe, losses_text, f"{np.mean(differences):+.2%}", f"{max(map(abs, differences)):.2%}"


def zigzag(tokens: int = 4096) -> Iterator[Row]:
    yield "ranks", "contiguous", "zigzag"
    for ranks in (2, 4, 8):
        plain = torch.arange(tokens).chunk(ranks)
        works = [[int((share + 1).sum()) for share in shares] for shares in (plain, zigzag_shares(tokens, ranks))]
        yield ranks, *(f"{max(work) * ranks / sum(work):.4f}" for work in works)


def warp() -> Iterator[Row]:
    yield (
        "tokens",
        "organised",
        "error / output",
        "largest error",
        "MB of weights",
        "MB between stages",
        "stages",
        "µs at 6.8 TB/s, by the model",
    )
    for tokens in (1, 8, 32):
        errors, costs = decode_errors(tokens, seed=0), decode_costs(tokens, 8, 128, 2048, 768)
        for name, cost in costs.items():
            moved = f"{cost.weights / 1e6:.1f}", f"{cost.buffers / 1e6:.2f}", cost.stages
            yield (
                *(tokens, name, f"{errors[name]['relative']:.2%}", f"{errors[name]['largest']:.1e}", *moved),
                f"{1e6 * cost.seconds(6.8e12):.0f}",
            )


def routes(run: RunDir, pair: str = "int4-experts-int8-router", most: int = 16) -> Iterator[Row]:
    yield "what", "of", "figure"
    stored = stored_steps(run)
    number, groups = stored_groups(run)
    model, attempts = load_pretrained(weights_of(run, number)), [scored.attempt for group in groups for scored in group]
    read = [
        [attempt.rollout.segments[0].trace for attempt in retrace(variant(model, numerics), attempts[:most])]
        for numerics in (PAIRS[pair].engine, PAIRS[pair].trainer)
    ]
    shared = shared_experts(*read)
    for count, pairs in enumerate(shared):
        yield f"tokens and layers that share {count} experts", pair, f"{pairs / shared.sum():.3%}"
    use = {n: expert_use(sorted((run.path / "rollouts").glob(f"rl_{n - 1:05d}_*.safetensors"))) for n in stored}
    for earlier, later in pairwise(stored):
        moved = load_drift(use[earlier], use[later])
        yield "load that moved to other experts", f"RL step {earlier} to {later}", " ".join(f"{x:.1%}" for x in moved)
    c = model.config
    shapes = {
        "this model": (c.moe_layers, c.num_experts_per_tok, c.num_experts),
        "DeepSeek-V3": (58, 8, 256),
        "Kimi K2": (60, 8, 384),
    }
    for name, shape in shapes.items():
        for field, size in route_bytes(*shape).items():
            yield f"bytes a token, {field}", name, f"{size:,.0f} ({size * 1e5 / 2**20:,.0f} MiB for 100,000 tokens)"


def table(rows: Iterable[Row]) -> str:
    head, *body = [" | ".join(map(str, row)) for row in rows]
    rule = "|".join("---" for _ in head.split(" | "))
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {row} |" for row in body)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    alone = {"kl": kl, "formats": formats, "precision": precision, "zigzag": zigzag, "warp": warp}
    parser.add_argument("name", choices=[*alone, "mix", "sizes", "during", "routes"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--png", type=Path, metavar="FILE", help="of mix and sizes: a picture as well")
    args = parser.parse_args()
    if (args.name in alone) == bool(args.paths):
        parser.error(f"{args.name}: {'takes no path' if args.paths else 'give a path'}")
    if args.png and args.name not in ("mix", "sizes"):
        parser.error(f"--png: {args.name} has no picture; mix and sizes have one")
    if args.name in alone:
        print(table(alone[args.name]()))
    elif args.name == "routes":
        print(table(routes(open_run(args.paths[0]))))
    elif args.name == "during":
        print(table(during(args.paths[0])))
    else:
        tasks = [task for path in args.paths for task in load_tasks(path)]
        count, draw = (mix, draw_mix) if args.name == "mix" else (sizes, draw_sizes)
        print(table(count(tasks)))
        if args.png:
            write_atomic(args.png, draw(tasks).png())


if __name__ == "__main__":
    main()
