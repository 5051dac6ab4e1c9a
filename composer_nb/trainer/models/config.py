"""Settings of a model: sizes, positions, and how its experts are computed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from composer_nb.harness.plain import Count, NotNegative, Positive, Some, require_ranges
from composer_nb.kernels.moe.recipes import RecipeName
from composer_nb.kernels.moe.routing import RoutingRule

# Sizes: far above those of any model, and small enough to describe a model on the device `meta`.
Layers = Annotated[int, Field(ge=1, le=10_000)]
Heads = Annotated[int, Field(ge=0, le=1 << 16)]
Width = Annotated[int, Field(ge=0, le=1 << 20)]
Family = Literal["qwen3_moe", "deepseek_v3", "mixtral", "qwen3", "qwen2", "llama"]
# Families without experts.
DENSE: tuple[Family, ...] = ("qwen3", "qwen2", "llama")


def _require(fits: bool, message: str) -> None:
    if not fits:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071) extends the positions of pretraining. Slowly rotating frequencies are stretched the most."""

    factor: Annotated[float, Field(ge=1)] = 1.0
    """Stretch of the positions; 1 means none."""
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 22)] = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        require_ranges(self, "model.yarn")
        blend = 0 < self.beta_slow <= self.beta_fast  # Kimi K2 sets both to 1: a step instead of a blend
        _require(blend, "model.yarn.beta_slow must be above 0 and at most model.yarn.beta_fast")

    def temper(self, mscale: float) -> float:
        """Return 0.1 · mscale · ln(factor) + 1: the paper's temperature, to the power of -1/2."""
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Number format and back end of the routed experts, in the trainer and every engine alike, so that both compute with the
    same numbers. Attention, router, dense layers and shared experts are unaffected."""

    recipe: RecipeName = "bf16"
    """bf16 computes in the dtype of the model; the others quantise the operands (`kernels/moe/recipes.py`)."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """auto: Triton on a supported GPU, otherwise torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes, under the names of `transformers`' Qwen3MoeConfig and DeepseekV3Config. Fields that other families alone have must
    keep their defaults."""

    family: Family = "qwen3_moe"
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)] = 1024
    hidden_size: Width = 128
    num_hidden_layers: Layers = 4
    num_attention_heads: Heads = 4
    num_key_value_heads: Annotated[int, Field(ge=1, le=1 << 16)] = 2
    """DeepSeek-V3: equal to `num_attention_heads`."""
    head_dim: Heads = 32
    """DeepSeek-V3: qk_nope_head_dim + qk_rope_head_dim."""
    num_experts: Heads = 8
    num_experts_per_tok: Count = 2
    norm_topk_prob: bool = True
    """Whether the gates of a token's experts are divided by their sum."""
    moe_intermediate_size: Width = 128
    mlp_only_layers: tuple[int, ...] = ()
    """Qwen3-MoE: indices of dense layers."""
    decoder_sparse_step: Some = 1
    """Qwen3-MoE: every so many layers one has experts; the others are dense."""
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 22)] = 512
    rope_theta: Positive = 10_000.0
    rms_norm_eps: NotNegative = 1e-6
    tie_word_embeddings: bool = True
    qk_norm_gain: float = 1.6
    """Initial value of the QK norms' weights (sharper attention learns to copy sooner)."""

    q_lora_rank: Width = 0
    """0: queries are projected directly."""
    kv_lora_rank: Width = 0
    qk_nope_head_dim: Count = 0
    qk_rope_head_dim: Count = 0
    v_head_dim: Heads = 0
    intermediate_size: Width = 0
    """Width of the dense layers, if any."""
    first_k_dense_replace: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of dense layers at the start."""
    n_shared_experts: Annotated[int, Field(ge=0, le=1 << 10)] = 0
    n_group: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    topk_group: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    routed_scaling_factor: Positive = 1.0
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of multi-token prediction heads."""
    yarn: Yarn = field(default_factory=Yarn)

    def stretched(self, factor: float) -> ModelConfig:
        """Return the configuration with `factor` times as many positions, by YaRN."""
        plain = self.yarn.factor == 1
        original = self.max_position_embeddings if plain else self.yarn.original_max_position_embeddings
        yarn = replace(self.yarn, factor=factor * self.yarn.factor, original_max_position_embeddings=original)
        if plain and not self.latent:  # whole heads are rotated, so one temperature is enough
            yarn = replace(yarn, mscale=1.0, mscale_all_dim=0.0)
        return replace(self, yarn=yarn, max_position_embeddings=round(factor * self.max_position_embeddings))

    def __post_init__(self) -> None:
        """Raises ValueError that names the sizes that do not fit together, or that no model has."""
        require_ranges(self, "model")
        dense = ["intermediate_size"] if self.moe_layers < self.num_hidden_layers else []
        # Grouped GEMM needs rows of whole 16 bytes, in bf16 too.
        sparse = [] if self.family in DENSE else ["moe_intermediate_size"]
        for name in ("hidden_size", *sparse, *dense):
            size = getattr(self, name)
            _require(size >= 8 and size % 8 == 0, f"model.{name}={size} must be a multiple of 8")
        queries, keys = self.num_attention_heads, self.num_key_value_heads
        no_multiple = f"model.num_attention_heads={queries}: no multiple of model.num_key_value_heads={keys}"
        _require(queries >= 1 and queries % keys == 0, no_multiple)
        k, experts = self.num_experts_per_tok, self.num_experts
        _require(1 <= k <= experts, f"model.num_experts_per_tok={k} must lie in 1..model.num_experts={experts}")
        name = "qk_rope_head_dim" if self.latent else "head_dim"
        even = self.rope_width >= 2 and self.rope_width % 2 == 0
        _require(even, f"model.{name}={self.rope_width} must be even")
        for name in FOREIGN[self.family]:
            applies = f"model.{name} does not apply to {self.family}: change model.family, or leave it"
            _require(getattr(self, name) == _DEFAULTS[name], applies)
        if self.latent:
            self._check_deepseek()
        else:
            plain = self.yarn.factor == 1 or (self.yarn.mscale, self.yarn.mscale_all_dim) == (1.0, 0.0)
            _require(plain, f"model.yarn: {self.family} has mscale=1 and mscale_all_dim=0")

    def _check_deepseek(self) -> None:
        """Raise ValueError, which names the setting, unless the sizes fit latent attention and the choice of expert groups."""
        for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            _require(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} must be at least 1")
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        equal = "model.num_key_value_heads must be model.num_attention_heads (model.family=deepseek_v3)"
        _require(self.num_key_value_heads == self.num_attention_heads, equal)
        sum_of_widths = f"model.head_dim={self.head_dim} must be qk_nope_head_dim + qk_rope_head_dim = {width}"
        _require(self.head_dim == width, sum_of_widths)
        within = 0 <= self.first_k_dense_replace <= self.num_hidden_layers
        _require(within, "model.first_k_dense_replace must lie in 0..model.num_hidden_layers")
        groups = self.n_group >= 1 and self.num_experts % self.n_group == 0 and 1 <= self.topk_group <= self.n_group
        divides = f"model.n_group={self.n_group} must divide model.num_experts={self.num_experts}"
        _require(groups, f"{divides}, and model.topk_group={self.topk_group} lie in 1..model.n_group")
        enough = self.num_experts_per_tok <= self.topk_group * (self.num_experts // self.n_group)
        _require(enough, "model.num_experts_per_tok is more than the experts of model.topk_group groups")

    @property
    def latent(self) -> bool:
        return self.family == "deepseek_v3"

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised before they are rotated."""
        return self.family in ("qwen3_moe", "qwen3")

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def rope_width(self) -> int:
        """Number of dimensions of a query or key that are rotated."""
        return self.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def value_width(self) -> int:
        return self.v_head_dim if self.latent else self.head_dim

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts, ascending."""
        if self.family in DENSE:
            return ()
        return tuple(
            index
            for index in range(self.first_k_dense_replace, self.num_hidden_layers)
            if (index + 1) % self.decoder_sparse_step == 0 and index not in self.mlp_only_layers
        )

    @property
    def moe_layers(self) -> int:
        """L: number of layers with routes."""
        return len(self.sparse_layers)

    @property
    def rule(self) -> RoutingRule:
        return RoutingRule(
            chosen=self.num_experts_per_tok,
            sigmoid=self.latent,
            groups=self.n_group,
            kept_groups=self.topk_group,
            scale=self.routed_scaling_factor,
            normalised=self.norm_topk_prob,
        )

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


_DEFAULTS = {name: entry.default for name, entry in ModelConfig.__dataclass_fields__.items()}
QWEN = ("mlp_only_layers", "decoder_sparse_step")
DEEPSEEK = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace"),
    *("n_shared_experts", "n_group", "topk_group", "routed_scaling_factor", "num_nextn_predict_layers"),
)
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# Fields that a family does not have.
FOREIGN: dict[Family, tuple[str, ...]] = {
    "qwen3_moe": DEEPSEEK,
    "deepseek_v3": QWEN,
    "mixtral": ("norm_topk_prob", *QWEN, *DEEPSEEK, "intermediate_size"),
    **dict.fromkeys(DENSE, ("norm_topk_prob", *QWEN, *DEEPSEEK, *EXPERTS)),
}
