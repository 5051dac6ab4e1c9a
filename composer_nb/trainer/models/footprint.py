"""The size of a model of a given configuration, counted on shapes alone: no memory, no weights, any size."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Cache of a token in this project's engine: keys and values of each head, in float32. A bf16 model on a GPU needs half."""


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
