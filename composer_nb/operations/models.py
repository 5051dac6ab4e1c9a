"""The command convert: a checkpoint to start training from."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer_nb.operations import arg, command


@command(
    "convert",
    arg("source MODEL", "a GGUF file or a checkpoint folder", type=Path),
    arg("out DIR", "checkpoint folder to write", type=Path),
    arg("--format NAME", "add the missing tokens of a chat format: compact, qwen or kimi", ""),
    arg("--experts N", "upcycle to so many experts per layer, each a copy of the layer's MLP; 0: none", 0),
    arg("--experts-per-token N", "experts that a token uses", 2),
    arg("--noise X", "noise of each expert, in standard deviations of its weights", 0.0),
    arg("--seed N", "seed of routers and noise", 0),
    epilog="composer-nb tour --set model.start=DIR trains it.",
)
def convert(given: argparse.Namespace) -> int:
    """Make a checkpoint from a GGUF file or another checkpoint, upcycled to experts if asked."""
    from composer_nb.trainer.models.convert import convert as write
    from composer_nb.trainer.models.footprint import plan_memory

    config = write(
        given.source,
        given.out,
        experts=given.experts,
        chosen=given.experts_per_token,
        noise=given.noise,
        format=given.format,
        seed=given.seed,
    )
    size = plan_memory(config)
    print(f"{given.out}: {config.family}, {size.total / 1e6:.1f} M weights, {size.active / 1e6:.1f} M active per token")
    return 0
