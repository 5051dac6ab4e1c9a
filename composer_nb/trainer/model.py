"""Mixture-of-experts language models in one file: Qwen3-MoE, and DeepSeek-V3, which Kimi K2 and the text of K2.5 are.

                  Qwen3-MoE                                  DeepSeek-V3 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534)
    attention     grouped queries, QK norm                   latent (MLA): queries, keys and values from low ranks
    positions     RoPE on half-split pairs                   RoPE on neighbours, of a part of each head; YaRN
    router        softmax, top k                             sigmoid, a bias for the choice alone, limits on groups
    experts       SwiGLU                                     SwiGLU, shared ones beside them; the first layers are dense
    beside it                                                heads that predict further tokens (MTP)

Dimensions: B rows, T positions, N = the real tokens of all rows side by side (no padding), D width, Q query heads, G key
heads, C head width, L MoE layers, E experts, K experts a token, V vocabulary.

Everything but attention works on the N tokens, so padding costs nothing; how tokens attend (a padded batch in training, a
cache in the engine) is a function that the caller passes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composer_nb.kernels.attention import cached_attention
from composer_nb.kernels.causal import causal_attention, padded
from composer_nb.kernels.layer import experts
from composer_nb.kernels.linear import linear, matmul
from composer_nb.kernels.norm import norm_rope, rms_norm, rotate
from composer_nb.kernels.recipes import RecipeName
from composer_nb.kernels.routing import Replay, Routing, Rule, load_balance, route
from composer_nb.kernels.swiglu import swiglu

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, q [N, Q, C], k [N, G, C], v [N, G, C'], scale of the scores) -> [N, Q, C']"""

Gather = Callable[[Tensor], Tensor]
"""Rows [N, …] that a rank computed -> [N', …], those of all ranks that share a context. Keys and values go through it, or the
latents that they are made of; `attend` then gets k and v of N' tokens."""

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tokens [N, D], experts [N, K], gates [N, K], weights [E, D, F], weights [E, H, D]) -> [N, D]"""

T = TypeVar("T")

Watch = Callable[[int, str, Tensor], None]
"""(layer, what was added last, residual stream [N, D]): called after the "embedding" (layer -1), and after "attention" and
"experts" of each layer; a dense layer's block counts as experts."""

Family = Literal["qwen3_moe", "deepseek_v3"]
LATENT_EPS = 1e-6
"""Of the norms within latent attention, whatever the configuration says of the others (as in every published checkpoint)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071): positions beyond those of pretraining, by frequencies that are stretched the less the faster
    they turn."""

    factor: float = 1.0
    """How far positions are stretched; 1: not at all."""
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf or self.original_max_position_embeddings < 1:
            raise ValueError("model.yarn.factor and original_max_position_embeddings must be numbers of at least 1")
        if not 0 < self.beta_slow <= self.beta_fast:  # Kimi K2 has 1 and 1: a step instead of a blend
            raise ValueError("model.yarn.beta_slow must be above 0 and at most model.yarn.beta_fast")

    def temper(self, mscale: float) -> float:
        """0.1 · mscale · ln(factor) + 1: the paper's temperature, to the power of -1/2."""
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """By what, and in which number formats, the routed experts are computed: in the trainer and in every engine alike, so that
    the two read the same numbers. Attention, router, dense layers and shared experts are not touched."""

    recipe: RecipeName = "bf16"
    """bf16: as they are, in the dtype of the model. Others quantise what products read (`kernels/recipes.py`)."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """auto: Triton on a GPU that its kernels are for, else torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes, under the names of `transformers`' Qwen3MoeConfig and DeepseekV3Config. What only the other family has must be as
    it is here."""

    family: Family = "qwen3_moe"
    vocab_size: int = 1024
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    """DeepSeek-V3: the same as `num_attention_heads`."""
    head_dim: int = 32
    """Qwen3-MoE's. DeepSeek-V3: qk_nope_head_dim + qk_rope_head_dim."""
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qk_norm_gain: float = 1.6
    """Start value of the QK norms' weights (attention that begins sharper learns to copy sooner)."""

    q_lora_rank: int = 0
    """0: queries are made directly."""
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    intermediate_size: int = 0
    """Of the dense layers."""
    first_k_dense_replace: int = 0
    """So many layers, the first ones, are dense."""
    n_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0
    """Heads that predict a further token each."""
    yarn: Yarn = field(default_factory=Yarn)

    def stretched(self, factor: float) -> ModelConfig:
        """The same weights on `factor` times as many positions, by YaRN."""
        plain = self.yarn.factor == 1
        original = self.max_position_embeddings if plain else self.yarn.original_max_position_embeddings
        yarn = replace(self.yarn, factor=factor * self.yarn.factor, original_max_position_embeddings=original)
        if (
            plain and not self.latent
        ):  # the queries and keys of Qwen3-MoE are turned as a whole, so one temperature does
            yarn = replace(yarn, mscale=1.0, mscale_all_dim=0.0)
        return replace(self, yarn=yarn, max_position_embeddings=round(factor * self.max_position_embeddings))

    def __post_init__(self) -> None:
        """Raises ValueError that names the sizes that do not fit together."""
        for name in ("vocab_size", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        wide = ("hidden_size", "moe_intermediate_size", *(["intermediate_size"] if self.first_k_dense_replace else []))
        for name in wide:  # the grouped GEMM wants rows of whole 16 bytes, bf16 too
            if getattr(self, name) < 8 or getattr(self, name) % 8:
                raise ValueError(f"model.{name}={getattr(self, name)} must be a multiple of 8")
        queries, keys = self.num_attention_heads, self.num_key_value_heads
        if queries < 1 or queries % keys:
            raise ValueError(
                f"model.num_attention_heads={queries} must be a multiple of model.num_key_value_heads={keys}"
            )
        k, experts = self.num_experts_per_tok, self.num_experts
        if not 1 <= k <= experts:
            raise ValueError(f"model.num_experts_per_tok={k} must lie in 1..model.num_experts={experts}")
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"model.rope_theta={self.rope_theta} must be above 0")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"model.rms_norm_eps={self.rms_norm_eps} must be at least 0")
        if self.rope_width < 2 or self.rope_width % 2:
            name = "qk_rope_head_dim" if self.latent else "head_dim"
            raise ValueError(f"model.{name}={self.rope_width} must be even")
        if self.latent:
            self._check_deepseek()
        elif self.yarn.factor != 1 and (self.yarn.mscale, self.yarn.mscale_all_dim) != (1.0, 0.0):
            raise ValueError("model.yarn: Qwen3-MoE has mscale=1 and mscale_all_dim=0")
        elif foreign := [name for name in DEEPSEEK if getattr(self, name) != _DEFAULTS[name]]:
            raise ValueError(f"model.{foreign[0]} is not of Qwen3-MoE: set model.family=deepseek_v3, or leave it")

    def _check_deepseek(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1 (model.family=deepseek_v3)")
        for name in ("q_lora_rank", "n_shared_experts", "num_nextn_predict_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 0")
        if not 0 < self.routed_scaling_factor < math.inf:
            raise ValueError(f"model.routed_scaling_factor={self.routed_scaling_factor} must be above 0")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError("model.num_key_value_heads must be model.num_attention_heads (model.family=deepseek_v3)")
        if self.head_dim != self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise ValueError(
                f"model.head_dim={self.head_dim} must be model.qk_nope_head_dim + model.qk_rope_head_dim = "
                f"{self.qk_nope_head_dim + self.qk_rope_head_dim}"
            )
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ValueError("model.first_k_dense_replace must lie in 0..model.num_hidden_layers")
        if self.n_group < 1 or self.num_experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"model.n_group={self.n_group} must divide model.num_experts={self.num_experts}, and "
                f"model.topk_group={self.topk_group} lie in 1..model.n_group"
            )
        if self.num_experts_per_tok > self.topk_group * (self.num_experts // self.n_group):
            raise ValueError("model.num_experts_per_tok is more than the experts of model.topk_group groups")

    @property
    def latent(self) -> bool:
        return self.family == "deepseek_v3"

    @property
    def rope_width(self) -> int:
        """The part of a query's or key's width that is turned."""
        return self.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def value_width(self) -> int:
        return self.v_head_dim if self.latent else self.head_dim

    @property
    def moe_layers(self) -> int:
        """L: layers that have routes."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def rule(self) -> Rule:
        return Rule(
            chosen=self.num_experts_per_tok,
            sigmoid=self.latent,
            groups=self.n_group,
            kept_groups=self.topk_group,
            scale=self.routed_scaling_factor,
        )

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


_DEFAULTS = {name: entry.default for name, entry in ModelConfig.__dataclass_fields__.items()}
DEEPSEEK = (
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size first_k_dense_replace "
    "n_shared_experts n_group topk_group routed_scaling_factor num_nextn_predict_layers"
).split()


class Layer(nn.Module):
    """One decoder layer's weights. The arithmetic is in `Model`, where it can be read in one piece.

    Matrices of attention and router lie [out, in], those of experts and dense layers [in, out].
    """

    def __init__(self, c: ModelConfig, *, dense: bool = False) -> None:
        super().__init__()
        self.dense = dense
        # Plain, so that no cast of the model rounds it: it moves in steps of a thousandth (arXiv 2412.19437, §4.2).
        self.router_bias: Tensor | None = None
        self.experts: Callable[[Tensor, Routing, Experts], Tensor] | None = None
        """Holds `w_in` and `w_out` in this layer's stead, and computes with them, where they are dealt over ranks."""
        scale = (2 * c.num_hidden_layers) ** -0.5
        self.attention_norm = nn.Parameter(torch.ones(c.hidden_size))
        if c.latent:
            self._latent(c)
        else:
            kv_width = c.num_key_value_heads * c.head_dim
            self.qkv = _normal(c.num_attention_heads * c.head_dim + 2 * kv_width, c.hidden_size)
            self.q_norm = nn.Parameter(torch.full((c.head_dim,), c.qk_norm_gain))
            self.k_norm = nn.Parameter(torch.full((c.head_dim,), c.qk_norm_gain))
        self.o = _normal(c.hidden_size, c.num_attention_heads * c.value_width, scale=scale)
        self.moe_norm = nn.Parameter(torch.ones(c.hidden_size))
        if dense:
            self.dense_in = _normal(c.hidden_size, 2 * c.intermediate_size, along=0)
            self.dense_out = _normal(c.intermediate_size, c.hidden_size, along=0, scale=scale)
            return
        inner = c.moe_intermediate_size
        self.router = _normal(c.num_experts, c.hidden_size)
        self.w_in = _normal(c.num_experts, c.hidden_size, 2 * inner, along=1)
        self.w_out = _normal(c.num_experts, inner, c.hidden_size, along=1, scale=scale)
        if c.latent:
            self.router_bias = torch.zeros(c.num_experts)
        if c.n_shared_experts:
            self.shared_in = _normal(c.hidden_size, 2 * inner * c.n_shared_experts, along=0)
            self.shared_out = _normal(inner * c.n_shared_experts, c.hidden_size, along=0, scale=scale)

    def forward(self, compute: Callable[..., T], *values: Any) -> T:
        """`compute(self, *values)`: weights that are cut over ranks are put together around a call of their module."""
        return compute(self, *values)

    def _latent(self, c: ModelConfig) -> None:
        heads = c.num_attention_heads
        if c.q_lora_rank:
            self.q_a = _normal(c.q_lora_rank, c.hidden_size)
            self.q_a_norm = nn.Parameter(torch.ones(c.q_lora_rank))
        self.q_b = _normal(heads * c.head_dim, c.q_lora_rank or c.hidden_size)
        self.kv_a = _normal(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_norm = nn.Parameter(torch.ones(c.kv_lora_rank))
        self.kv_b = _normal(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)


def _normal(*shape: int, along: int = -1, scale: float = 1.0) -> nn.Parameter:
    """Random weights that keep the size of what they are multiplied with; `along` is the dimension that is summed over."""
    return nn.Parameter(torch.randn(shape) * shape[along] ** -0.5 * scale)


class Ahead(nn.Module):
    """Predicts one token further than what is before it (DeepSeek-V3's MTP module, arXiv 2412.19437, §2.2)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.hidden_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.join = _normal(c.hidden_size, 2 * c.hidden_size)
        self.layer = Layer(c)
        self.final_norm = nn.Parameter(torch.ones(c.hidden_size))


class Model(nn.Module):
    """The language model. `model(token_ids[B, T])` gives logits [B, T, V] and routes [B, T, L, K]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.3)
        self._layers = nn.ModuleList(
            Layer(config, dense=index < config.first_k_dense_replace) for index in range(config.num_hidden_layers)
        )
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.head = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.02)
        self._aheads = nn.ModuleList(Ahead(config) for _ in range(config.num_nextn_predict_layers))
        self.router_dtype: torch.dtype | None = torch.float32 if config.latent else None
        """Of the router's product; None: of its weights. At least float32 in float64 models."""
        self.recompute = False
        """Layers are computed again in the backward pass instead of being kept: less memory, a third more time."""
        self.kernels = Kernels()
        self.tile = 0
        """Rows that products are computed in at a time; 0: all. Any other number makes what is computed for a token, but for
        attention, independent of the tokens beside it to the last bit (`kernels/linear.py`)."""
        self.watch: Watch | None = None
        """Sees the residual stream of a forward pass through `trunk`, for whoever compares two of them."""
        self._rope: Tensor | None = None

    @classmethod
    def planned(cls, config: ModelConfig) -> Model:
        """A model of shapes alone, which takes no memory: weights are on the device `meta`."""
        with torch.device("meta"):
            return cls(config)

    @property
    def layers(self) -> list[Layer]:
        return [layer for layer in self._layers if isinstance(layer, Layer)]

    @property
    def aheads(self) -> list[Ahead]:
        return [ahead for ahead in self._aheads if isinstance(ahead, Ahead)]

    @property
    def output_weight(self) -> Tensor:
        return self.embed if self.config.tie_word_embeddings else self.head

    def trunk(
        self,
        token_ids_N: Tensor,
        position_N: Tensor,
        attend: Attend,
        replay: Replay | None = None,
        gather: Gather | None = None,
    ) -> tuple[Tensor, list[Routing]]:
        """Hidden states [N, D] after the final norm, and each MoE layer's routing. Raises ValueError where routes do not fit."""
        c = self.config
        if replay is not None and replay.experts.shape[1] != c.moe_layers:
            raise ValueError(f"replayed routes are of {replay.experts.shape[1]} layers, the model has {c.moe_layers}")
        x_ND = F.embedding(token_ids_N, self.embed)
        if self.watch is not None:
            self.watch(-1, "embedding", x_ND)
        rope_N = self.rope_table(x_ND)[position_N].to(x_ND.dtype)
        routings: list[Routing] = []
        for index, layer in enumerate(self.layers):
            given = None if replay is None or layer.dense else replay.layer(len(routings))
            compute = self._recomputed if self.recompute and torch.is_grad_enabled() else self._layer
            x_ND, routing = layer(compute, index, x_ND, rope_N, attend, given, gather)
            if self.watch is not None:
                self.watch(index, "experts", x_ND)
            routings += [] if routing is None else [routing]
        return rms_norm(x_ND, self.final_norm, c.rms_norm_eps), routings

    def linear(self, x_NA: Tensor, w_BA: Tensor) -> Tensor:
        """x · wᵀ as this model computes products."""
        return linear(x_NA, w_BA, self.tile)

    def _recomputed(self, layer: Layer, *values: Any) -> tuple[Tensor, Routing | None]:
        found: tuple[Tensor, Routing | None] = checkpoint(self._layer, layer, *values, use_reentrant=False)
        return found

    def _layer(
        self,
        layer: Layer,
        index: int,
        x_ND: Tensor,
        rope_N: Tensor,
        attend: Attend,
        replay: Replay | None,
        gather: Gather | None,
    ) -> tuple[Tensor, Routing | None]:
        """One decoder layer; no routing where it is dense."""
        c = self.config
        h_ND = rms_norm(x_ND, layer.attention_norm, c.rms_norm_eps)
        qkv = self._latent_qkv if c.latent else self._grouped_qkv
        q, k, v = qkv(layer, h_ND, rope_N, gather)
        x_ND = x_ND + self.linear(attend(index, q, k, v, self.attention_scale).flatten(1), layer.o)
        if self.watch is not None:
            self.watch(index, "attention", x_ND)
        h_ND = rms_norm(x_ND, layer.moe_norm, c.rms_norm_eps)
        if layer.dense:
            return x_ND + _feed_forward(h_ND, layer.dense_in, layer.dense_out, self.tile), None
        routing = self._route(layer, h_ND, replay)
        if layer.experts is None:
            y_ND = self._experts(h_ND, routing.experts_NK, routing.gates_NK, layer.w_in, layer.w_out)
        else:
            y_ND = layer.experts(h_ND, routing, self._experts)
        if c.n_shared_experts:
            y_ND = y_ND + _feed_forward(h_ND, layer.shared_in, layer.shared_out, self.tile)
        return x_ND + y_ND, routing

    def _experts(
        self, x_ND: Tensor, experts_NK: Tensor, gates_NK: Tensor, w_in_EDF: Tensor, w_out_EHD: Tensor
    ) -> Tensor:
        """The routed experts as this model computes them."""
        recipe, backend = self.kernels.recipe, None if self.kernels.backend == "auto" else self.kernels.backend
        weights = w_in_EDF.mT, w_out_EHD.mT
        return experts(x_ND, experts_NK, gates_NK, *weights, recipe=recipe, backend=backend, tile=self.tile)

    def _route(self, layer: Layer, h_ND: Tensor, replay: Replay | None) -> Routing:
        router: Tensor = layer.router
        if self.router_dtype is not None and router.dtype != torch.float64:
            router = router.to(self.router_dtype)
        return route(h_ND, router, self.config.rule, layer.router_bias, replay, tile=self.tile)

    def _grouped_qkv(
        self, layer: Layer, h_ND: Tensor, rope_N: Tensor, gather: Gather | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        queries, keys = c.num_attention_heads, c.num_key_value_heads
        turned, v = self.linear(h_ND, layer.qkv).unflatten(-1, (-1, c.head_dim)).split([queries + keys, keys], dim=1)
        weight_HC = torch.cat([layer.q_norm.expand(queries, -1), layer.k_norm.expand(keys, -1)])
        q, k = norm_rope(turned, weight_HC, rope_N, c.rms_norm_eps).split([queries, keys], dim=1)
        if gather is not None:
            k, v = gather(torch.cat([k, v], dim=-1)).chunk(2, dim=-1)
        return q, k, v

    def _latent_qkv(
        self, layer: Layer, h_ND: Tensor, rope_N: Tensor, gather: Gather | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values are written out a head; a cache of the latents alone would be smaller and is not built."""
        c = self.config
        low = rms_norm(self.linear(h_ND, layer.q_a), layer.q_a_norm, LATENT_EPS) if c.q_lora_rank else h_ND
        q = self.linear(low, layer.q_b).unflatten(-1, (-1, c.head_dim))
        latent, k_turned = self.linear(h_ND, layer.kv_a).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = rms_norm(latent, layer.kv_a_norm, LATENT_EPS)
        k_turned = rotate(_half_split(k_turned[:, None]), rope_N).squeeze(1)
        if gather is not None:  # a few hundred numbers a token, where its keys and values are tens of thousands
            parts = [c.kv_lora_rank, c.qk_rope_head_dim]
            latent, k_turned = gather(torch.cat([latent, k_turned], dim=-1)).split(parts, dim=-1)
        kv = self.linear(latent, layer.kv_b).unflatten(-1, (c.num_attention_heads, -1))
        q_plain, q_turned = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        k_plain, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_turned = k_turned[:, None].expand(-1, c.num_attention_heads, -1)
        q = torch.cat([q_plain, rotate(_half_split(q_turned), rope_N)], dim=-1)
        return q, torch.cat([k_plain, k_turned], dim=-1), v

    def on_positions(self, config: ModelConfig) -> Model:
        """A copy with the same weights on `config`'s positions."""
        made = Model(config)
        made.load_state_dict(self.state_dict())
        made.kernels, made.recompute = self.kernels, self.recompute
        return made

    @property
    def attention_scale(self) -> float:
        """Of the products of queries and keys; with YaRN they are sharpened as its paper says (§3.4)."""
        c = self.config
        return c.yarn.temper(c.yarn.mscale_all_dim) ** 2 / math.sqrt(c.head_dim)

    def rope_table(self, like: Tensor) -> Tensor:
        """Cosines and sines [position, 2, C/2] on the device of `like`, float32 or, for float64, float64: a model cast to bf16
        must not round angles."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self._rope is None or self._rope.device != like.device or self._rope.dtype != dtype:
            c = self.config
            position = torch.arange(c.max_position_embeddings, device=like.device).to(dtype)
            angle = torch.outer(position, _frequencies(c).to(like.device, dtype))
            self._rope = torch.stack([angle.cos(), angle.sin()], dim=1) * (
                c.yarn.temper(c.yarn.mscale) / c.yarn.temper(c.yarn.mscale_all_dim)
            )
        return self._rope

    def ahead(
        self, depth: int, hidden_ND: Tensor, next_ids_N: Tensor, position_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Routing]:
        """Hidden states [N, D] from which head `depth` (from 0) predicts the token after `next_ids_N`, which stand at
        `position_N`; `hidden_ND` are those one token before, of the trunk or of head `depth` - 1. It attends as layer
        `num_hidden_layers` + `depth`."""
        c, head = self.config, self.aheads[depth]
        embedded_ND = rms_norm(F.embedding(next_ids_N, self.embed), head.embed_norm, c.rms_norm_eps)
        x_ND = self.linear(
            torch.cat([embedded_ND, rms_norm(hidden_ND, head.hidden_norm, c.rms_norm_eps)], dim=-1), head.join
        )
        rope_N = self.rope_table(x_ND)[position_N].to(x_ND.dtype)
        x_ND, routing = self._layer(head.layer, c.num_hidden_layers + depth, x_ND, rope_N, attend, None, None)
        assert routing is not None, "its layer has experts"
        return rms_norm(x_ND, head.final_norm, c.rms_norm_eps), routing

    def forward(self, token_ids: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and routes int64 [B, T, L, K] of full rows, on the routes `replay` if given. Raises ValueError past
        the longest position, for tokens that the vocabulary lacks, and for routes of another shape or unknown experts."""
        c, (B, T) = self.config, token_ids.shape
        _require_range("token_ids", token_ids, c.vocab_size, "tokens")
        if replay is not None:
            _require_range("replay", replay, c.num_experts, "experts")
        batch = PackedRows.of_lengths([T] * B, self.config, token_ids.device)
        given = None if replay is None else Replay(experts=replay.flatten(0, 1))
        hidden_ND, routings = self.trunk(token_ids.reshape(-1), batch.position_N, batch.attend, given)
        logits = self.linear(hidden_ND, self.output_weight)
        routes = torch.stack([routing.experts_NK for routing in routings], dim=1)
        return logits.view(B, T, -1), routes.view(B, T, *routes.shape[1:])


def _require_range(name: str, values: Tensor, count: int, what: str) -> None:
    """Raises ValueError for values outside of 0 … count − 1."""
    if values.numel() and not (0 <= (low := int(values.min())) and (high := int(values.max())) < count):
        raise ValueError(f"{name}: holds {low if low < 0 else high}; there are {count} {what}, from 0")


def _feed_forward(x_ND: Tensor, w_in_DF: Tensor, w_out_HD: Tensor, tile: int) -> Tensor:
    return matmul(swiglu(matmul(x_ND, w_in_DF, tile), tile=tile), w_out_HD, tile)


def _half_split(x: Tensor) -> Tensor:
    """Neighbours (0, 1), (2, 3), … as pairs of first and second half, in which `rotate` turns them."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _frequencies(c: ModelConfig) -> Tensor:
    """Radians a position of each pair of dimensions [C/2], float32 as everywhere that checkpoints are trained: theta^(-2i/C);
    with YaRN those that turn less than `beta_slow` times within the original positions are divided by the factor, those that
    turn more than `beta_fast` times are left, and between the two it is a blend (arXiv 2309.00071, eq. 23)."""
    width, yarn = c.rope_width, c.yarn
    period = c.rope_theta ** (torch.arange(0, width, 2, device="cpu").float() / width)
    if yarn.factor == 1:
        return 1.0 / period

    def place(turns: float) -> float:
        """Which dimension turns so often."""
        ratio = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(c.rope_theta))

    low, high = max(math.floor(place(yarn.beta_fast)), 0), min(math.ceil(place(yarn.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, device="cpu").float() - low) / (high - low if high > low else 1e-3)
    plain = 1 - ramp.clamp(0, 1)
    return 1.0 / (yarn.factor * period) * (1 - plain) + 1.0 / period * plain


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of several lengths, side by side as N tokens; attention is causal within a row."""

    row_N: Tensor
    position_N: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of_lengths(cls, lengths: list[int], config: ModelConfig, device: torch.device | str = "cpu") -> PackedRows:
        if max(lengths) > config.max_position_embeddings:
            raise ValueError(
                f"a row of {max(lengths)} tokens exceeds model.max_position_embeddings={config.max_position_embeddings}"
            )
        sizes = torch.tensor(lengths, device=device)
        row_N = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
        starts = sizes.cumsum(0) - sizes
        position_N = torch.arange(int(sizes.sum()), device=device) - starts[row_N]
        return cls(row_N, position_N, tuple(lengths))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention of each row on itself."""
        return causal_attention(q, k, v, self.lengths, scale)

    def attend_one_by_one(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The same by the kernel that the engine attends with: each token against exactly the keys that it may see."""
        k, v = (
            padded(x, self.lengths).contiguous() for x in (k, v)
        )  # as a cache is: the kernel sums strided ones otherwise
        return cached_attention(q, k, v, self.row_N, self.position_N, scale)


def balance_loss(routings: list[Routing]) -> Tensor:
    """Mean of the layers' load-balancing losses."""
    return torch.stack([load_balance(routing) for routing in routings]).mean()
