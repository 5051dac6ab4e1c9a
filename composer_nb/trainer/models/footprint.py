"""The size of a model of a given configuration, counted on shapes alone: no memory, no weights, any size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from composer_nb.trainer.models.hf_config import read_config
from composer_nb.trainer.models.transformer import Model, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Numbers of weights, and bytes."""

    total: int
    """Weights, without the heads that predict further ahead."""
    active: int
    """The part of these that one token uses: all but the routed experts that it does not go through."""
    embedding: int
    """The part of the active ones that is the embedding table, of which a token reads one row."""
    ahead: int
    """Weights of the heads that predict further ahead."""
    bf16_bytes: int
    """Size of all weights, as a checkpoint and in an engine."""
    fp32_bytes: int
    optimizer_bytes: int
    """Master weights and AdamW's two moments, float32 (`FlatOptimizer`)."""
    training_bytes: int
    """These, and weights and gradients in float32; activations come on top."""
    cache_bytes: int
    """Cache of a token in bf16, as small as the architecture allows: keys and values, or latents and the turned part of keys."""
    engine_cache_bytes: int
    """Cache of a token in this project's engine: keys and values of each head, float32."""


def plan_memory(config: ModelConfig) -> Footprint:
    """Return the size of a model of this configuration."""
    c, model = config, Model.planned(config)
    biased = c.num_experts if c.latent else 0  # biases of routers are no parameters
    ahead = sum(weight.numel() for head in model.aheads for weight in head.parameters()) + len(model.aheads) * biased
    total = sum(weight.numel() for weight in model.parameters()) + (c.moe_layers + len(model.aheads)) * biased - ahead
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    idle = c.moe_layers * (c.num_experts - c.num_experts_per_tok) * expert
    everything = total + ahead
    written_out = c.num_key_value_heads * (c.head_dim + c.value_width)
    kept = c.kv_lora_rank + c.qk_rope_head_dim if c.latent else written_out
    return Footprint(
        total=total,
        active=total - idle,
        embedding=0 if c.tie_word_embeddings else model.embed.numel(),
        ahead=ahead,
        bf16_bytes=2 * everything,
        fp32_bytes=4 * everything,
        optimizer_bytes=12 * everything,
        training_bytes=20 * everything,
        cache_bytes=2 * c.num_hidden_layers * kept,
        engine_cache_bytes=4 * c.num_hidden_layers * written_out,
    )


def plan_path(path: Path) -> Footprint:
    """That of a checkpoint's folder, or of a config.json. Raises FileNotFoundError or ValueError that names the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: nothing here; give a checkpoint's folder or a config.json")
    return plan_memory(read_config(path / "config.json" if path.is_dir() else path).model)


def table(found: Footprint) -> str:
    """Return a table in Markdown."""
    rows = [
        ("weights", f"{_short(found.total)}, {_short(found.active)} of them active in a token"),
        ("of the active, embedding table", _short(found.embedding)),
        *([("heads that predict further ahead", _short(found.ahead))] if found.ahead else []),
        ("in bfloat16 / float32", f"{_gib(found.bf16_bytes)} / {_gib(found.fp32_bytes)}"),
        ("optimiser: masters and two moments", _gib(found.optimizer_bytes)),
        ("training in all, but activations", _gib(found.training_bytes)),
        ("cache a token, at best in bfloat16", f"{found.cache_bytes / 1024:,.1f} KiB"),
        ("cache a token, in this project's engine", f"{found.engine_cache_bytes / 1024:,.1f} KiB"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)])


def _short(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,}"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"
