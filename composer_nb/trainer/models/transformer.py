"""Language models: Qwen3-MoE, and DeepSeek-V3, the architecture of Kimi K2 and of K2.5's text model.

                  Qwen3-MoE                                  DeepSeek-V3 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534)
    attention     grouped queries, QK norm                   latent (MLA): queries, keys and values of low rank
    positions     RoPE on half-split pairs                   RoPE on neighbours, for a part of each head; YaRN
    router        softmax, top k                             sigmoid, a bias for the choice alone, group limits
    experts       SwiGLU; any layer may be dense             SwiGLU and shared experts; the first layers are dense
    extra                                                    multi-token prediction (MTP) heads

Four families are Qwen3-MoE with something left out: Qwen3 has dense layers alone, Llama also no QK norm, Qwen2 no QK norm but a
bias of queries, keys and values, and Mixtral no QK norm.

Dimensions: B rows, T positions, N = the real tokens of all rows side by side (no padding), D width, Q query heads, G key
heads, C head width, L MoE layers, E experts, K experts per token, V vocabulary.

All but attention computes on the N tokens, so padding costs nothing. The caller passes a function for attention (a padded batch
in training, a cache in the engine).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composer_nb.kernels.attention.causal import causal_attention
from composer_nb.kernels.linear import linear, matmul
from composer_nb.kernels.moe.experts import swiglu
from composer_nb.kernels.moe.layer import experts
from composer_nb.kernels.moe.routing import Replay, Routing, load_balance, route
from composer_nb.kernels.norm import norm_rope, rms_norm, rotate
from composer_nb.trainer.models.config import Family, Kernels, ModelConfig, Yarn

__all__ = ["Family", "Kernels", "Layer", "Model", "ModelConfig", "PackedRows", "Yarn", "balance_loss"]

# (layer, q [N, Q, C], k [N, G, C], v [N, G, C'], scale of the scores) -> [N, Q, C']
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]

# Rows [N, …] of this rank -> [N', …] of all ranks that share a context. Keys and values, or their latents, pass through it;
# `attend` then gets k and v of N' tokens.
Gather = Callable[[Tensor], Tensor]

# (tokens [N, D], experts [N, K], gates [N, K], weights [E, D, F], weights [E, H, D]) -> [N, D]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

T = TypeVar("T")
# Queries [N, Q, C], keys [N, G, C] and values [N, G, C'].
Qkv = tuple[Tensor, Tensor, Tensor]

# (layer, last part added, residual stream [N, D]): called after "embedding" (layer -1), and after "attention" and "experts" of
# each layer; the MLP of a dense layer counts as experts.
Watch = Callable[[int, str, Tensor], None]

# Epsilon of the norms inside latent attention, independent of the configuration (as in all published checkpoints).
LATENT_EPS = 1e-6


class Layer(nn.Module):
    """Weights of one decoder layer. `Model` holds the arithmetic, in one place.

    Matrices of attention and router are [out, in], those of experts and dense layers [in, out].
    """

    def __init__(self, c: ModelConfig, *, dense: bool = False) -> None:
        super().__init__()
        self.dense = dense
        # A plain tensor, so that no cast of the model rounds it: it moves in steps of a thousandth (arXiv 2412.19437, §4.2).
        self.router_bias: Tensor | None = None
        # Module that holds `w_in` and `w_out` and computes with them, if experts are distributed over ranks.
        self.experts: Callable[[Tensor, Routing, Experts], Tensor] | None = None
        scale = (2 * c.num_hidden_layers) ** -0.5
        self.attention_norm = nn.Parameter(torch.ones(c.hidden_size))
        if c.latent:
            if c.q_lora_rank:
                self.q_a = _normal(c.q_lora_rank, c.hidden_size)
                self.q_a_norm = nn.Parameter(torch.ones(c.q_lora_rank))
            self.q_b = _normal(c.num_attention_heads * c.head_dim, c.q_lora_rank or c.hidden_size)
            self.kv_a = _normal(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
            self.kv_a_norm = nn.Parameter(torch.ones(c.kv_lora_rank))
            self.kv_b = _normal(c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        else:
            kv_width = c.num_key_value_heads * c.head_dim
            self.qkv = _normal(c.num_attention_heads * c.head_dim + 2 * kv_width, c.hidden_size)
            if c.qkv_bias:
                self.qkv_bias = nn.Parameter(torch.zeros(len(self.qkv)))
        if c.qk_norm:
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
        """Return `compute(self, *values)`. FSDP gathers sharded weights around a call of their module."""
        return compute(self, *values)


def _normal(*shape: int, along: int = -1, scale: float = 1.0) -> nn.Parameter:
    """Return random weights that preserve the scale of their input; `along` is the dimension that is summed over."""
    return _random(*shape, scales=(shape[along] ** -0.5, scale))


def _random(*shape: int, scales: Sequence[float]) -> nn.Parameter:
    """Return normal random weights times `scales`; on the device `meta`, where arithmetic would import torch's compiler for more
    than a second, shapes alone."""
    weights = torch.empty(shape)
    if not weights.is_meta:
        weights.normal_()
        for scale in scales:
            weights *= scale
    return nn.Parameter(weights)


class Ahead(nn.Module):
    """Weights of a multi-token prediction head, which predicts one token further (DeepSeek-V3's MTP module, arXiv 2412.19437,
    §2.2). They are carried through checkpoints; nothing here computes with them."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.hidden_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.join = _normal(c.hidden_size, 2 * c.hidden_size)
        self.layer = Layer(c)
        self.final_norm = nn.Parameter(torch.ones(c.hidden_size))


class Model(nn.Module):
    """Language model. `model(token_ids[B, T])` returns logits [B, T, V] and routes [B, T, L, K]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _random(config.vocab_size, config.hidden_size, scales=[0.3])
        sparse = config.sparse_layers
        self._layers = nn.ModuleList(Layer(config, dense=n not in sparse) for n in range(config.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.head = _random(config.vocab_size, config.hidden_size, scales=[0.02])
        self._aheads = nn.ModuleList(Ahead(config) for _ in range(config.num_nextn_predict_layers))
        # Dtype of the router's product; None: that of its weights. float64 models always use float64.
        self.router_dtype: torch.dtype | None = torch.float32 if config.latent else None
        # Recompute layers in the backward pass instead of keeping activations: less memory, a third more time.
        self.recompute = False
        self.kernels = Kernels()
        # The files beside the weights: `companions.py`.
        self.companions: Mapping[str, bytes] = {}
        # Observer of the residual stream in `trunk`, to compare two forward passes.
        self.watch: Watch | None = None
        self._rope: Tensor | None = None

    @classmethod
    def planned(cls, config: ModelConfig) -> Model:
        """Return a model on the device `meta`: shapes without memory."""
        with torch.device("meta"):
            return cls(config)

    @property
    def layers(self) -> list[Layer]:
        return [layer for layer in self._layers if isinstance(layer, Layer)]

    @property
    def aheads(self) -> list[Ahead]:
        return [ahead for ahead in self._aheads if isinstance(ahead, Ahead)]

    @property
    def decoder_layers(self) -> list[Layer]:
        """All layers, those of the heads that predict further ahead at the end."""
        return [*self.layers, *(ahead.layer for ahead in self.aheads)]

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
        """Return hidden states [N, D] after the final norm, and each MoE layer's routing. Raises ValueError for replayed routes
        of another number of layers."""
        c = self.config
        if replay is not None and replay.experts.shape[1] != c.moe_layers:
            raise ValueError(f"replayed routes are of {replay.experts.shape[1]} layers, the model has {c.moe_layers}")
        x_ND = F.embedding(token_ids_N, self.embed)
        if self.watch is not None:
            self.watch(-1, "embedding", x_ND)
        rope_N = self.rope_table(x_ND)[position_N].to(x_ND.dtype)
        routings: list[Routing] = []
        for index, layer in enumerate(self.layers):
            layer_replay = None if replay is None or layer.dense else replay.layer(len(routings))
            compute = self._recomputed if self.recompute and torch.is_grad_enabled() else self._layer
            x_ND, routing = layer(compute, index, x_ND, rope_N, attend, layer_replay, gather)
            if self.watch is not None:
                self.watch(index, "experts", x_ND)
            routings += [] if routing is None else [routing]
        return rms_norm(x_ND, self.final_norm, c.rms_norm_eps), routings

    def _recomputed(self, layer: Layer, *values: Any) -> tuple[Tensor, Routing | None]:
        output: tuple[Tensor, Routing | None] = checkpoint(self._layer, layer, *values, use_reentrant=False)
        return output

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
        """Compute one decoder layer. The routing of a dense layer is None."""
        c = self.config
        h_ND = rms_norm(x_ND, layer.attention_norm, c.rms_norm_eps)
        qkv = self._latent_qkv if c.latent else self._grouped_qkv
        q, k, v = qkv(layer, h_ND, rope_N, gather)
        x_ND = x_ND + linear(attend(index, q, k, v, self.attention_scale).flatten(1), layer.o)
        if self.watch is not None:
            self.watch(index, "attention", x_ND)
        h_ND = rms_norm(x_ND, layer.moe_norm, c.rms_norm_eps)
        if layer.dense:
            return x_ND + _feed_forward(h_ND, layer.dense_in, layer.dense_out), None
        routing = self._route(layer, h_ND, replay)
        if layer.experts is None:
            y_ND = self._experts(h_ND, routing.experts_NK, routing.gates_NK, layer.w_in, layer.w_out)
        else:
            y_ND = layer.experts(h_ND, routing, self._experts)
        if c.n_shared_experts:
            y_ND = y_ND + _feed_forward(h_ND, layer.shared_in, layer.shared_out)
        return x_ND + y_ND, routing

    def _experts(
        self, x_ND: Tensor, experts_NK: Tensor, gates_NK: Tensor, w_in_EDF: Tensor, w_out_EHD: Tensor
    ) -> Tensor:
        """Compute the routed experts with this model's recipe and back end."""
        recipe, backend = self.kernels.recipe, None if self.kernels.backend == "auto" else self.kernels.backend
        weights = w_in_EDF.mT, w_out_EHD.mT
        return experts(x_ND, experts_NK, gates_NK, *weights, recipe=recipe, backend=backend)

    def _route(self, layer: Layer, h_ND: Tensor, replay: Replay | None) -> Routing:
        router: Tensor = layer.router
        if self.router_dtype is not None and router.dtype != torch.float64:
            router = router.to(self.router_dtype)
        return route(h_ND, router, self.config.rule, layer.router_bias, replay)

    def _grouped_qkv(self, layer: Layer, h_ND: Tensor, rope_N: Tensor, gather: Gather | None) -> Qkv:
        """Return queries [N, Q, C], keys and values [N, G, C] of grouped-query attention, after norm and rotation; with `gather`,
        keys and values of all ranks that share the batch."""
        c = self.config
        queries, keys = c.num_attention_heads, c.num_key_value_heads
        joined = linear(h_ND, layer.qkv)
        joined = joined + layer.qkv_bias if c.qkv_bias else joined
        heads, v = joined.unflatten(-1, (-1, c.head_dim)).split([queries + keys, keys], dim=1)
        if c.qk_norm:
            weight_HC = torch.cat([layer.q_norm.expand(queries, -1), layer.k_norm.expand(keys, -1)])
            rotated = norm_rope(heads, weight_HC, rope_N, c.rms_norm_eps)
        else:
            rotated = rotate(heads, rope_N)
        q, k = rotated.split([queries, keys], dim=1)
        if gather is not None:
            k, v = gather(torch.cat([k, v], dim=-1)).chunk(2, dim=-1)
        return q, k, v

    def _latent_qkv(self, layer: Layer, h_ND: Tensor, rope_N: Tensor, gather: Gather | None) -> Qkv:
        """Return queries, keys and values of each head. (A cache of the latents alone would be smaller; it is not built.)"""
        c = self.config
        low = rms_norm(linear(h_ND, layer.q_a), layer.q_a_norm, LATENT_EPS) if c.q_lora_rank else h_ND
        q = linear(low, layer.q_b).unflatten(-1, (-1, c.head_dim))
        latent, k_turned = linear(h_ND, layer.kv_a).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = rms_norm(latent, layer.kv_a_norm, LATENT_EPS)
        k_turned = rotate(_half_split(k_turned[:, None]), rope_N).squeeze(1)
        if gather is not None:  # hundreds of numbers per token, while keys and values are tens of thousands
            parts = [c.kv_lora_rank, c.qk_rope_head_dim]
            latent, k_turned = gather(torch.cat([latent, k_turned], dim=-1)).split(parts, dim=-1)
        kv = linear(latent, layer.kv_b).unflatten(-1, (c.num_attention_heads, -1))
        q_plain, q_turned = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        k_plain, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_turned = k_turned[:, None].expand(-1, c.num_attention_heads, -1)
        q = torch.cat([q_plain, rotate(_half_split(q_turned), rope_N)], dim=-1)
        return q, torch.cat([k_plain, k_turned], dim=-1), v

    def on_positions(self, config: ModelConfig) -> Model:
        """Return a copy of the model, on its device, with the positions of `config`."""
        model = copy.deepcopy(self)
        model.config, model._rope = config, None
        return model

    @property
    def attention_scale(self) -> float:
        """Scale of the products of queries and keys, including YaRN's temperature (§3.4 of its paper)."""
        c = self.config
        return c.yarn.temper(c.yarn.mscale_all_dim) ** 2 / math.sqrt(c.head_dim)

    def rope_table(self, like: Tensor) -> Tensor:
        """Return cosines and sines [position, 2, C/2] on the device of `like`, in float32 or wider: a model cast to bf16 must
        not round angles."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self._rope is None or self._rope.device != like.device or self._rope.dtype != dtype:
            c = self.config
            position = torch.arange(c.max_position_embeddings, device=like.device).to(dtype)
            angle = torch.outer(position, _frequencies(c).to(like.device, dtype))
            self._rope = torch.stack([angle.cos(), angle.sin()], dim=1) * (
                c.yarn.temper(c.yarn.mscale) / c.yarn.temper(c.yarn.mscale_all_dim)
            )
        return self._rope

    def forward(self, token_ids: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, V] and routes int64 [B, T, L, K], using the routes `replay` if given. Raises ValueError for rows
        that are too long, unknown tokens, and routes of another shape or unknown experts."""
        c, (B, T) = self.config, token_ids.shape
        _require_range("token_ids", token_ids, c.vocab_size, "tokens")
        if replay is not None:
            _require_range("replay", replay, c.num_experts, "experts")
        batch = PackedRows.of_lengths([T] * B, self.config, token_ids.device)
        routes_of_layers = None if replay is None else Replay(experts=replay.flatten(0, 1))
        hidden_ND, routings = self.trunk(token_ids.reshape(-1), batch.position_N, batch.attend, routes_of_layers)
        logits = linear(hidden_ND, self.output_weight)
        routes = stacked([routing.experts_NK for routing in routings], B * T, c.num_experts_per_tok)
        return logits.view(B, T, -1), routes.view(B, T, *routes.shape[1:])


def weight_counts(c: ModelConfig) -> dict[str, int]:
    """Return numbers of weights, from shapes alone, for any size: `total`, without the heads that predict further ahead; the
    `active` part, all but the routed experts that one token does not go through; the part of these that is the `embedding` table,
    of which a token reads one row; those of heads that predict further `ahead`."""
    model = Model.planned(c)
    biases = c.num_experts if c.latent else 0  # biases of routers are no parameters
    ahead = sum(weight.numel() for head in model.aheads for weight in head.parameters()) + len(model.aheads) * biases
    total = sum(weight.numel() for weight in model.parameters()) + (c.moe_layers + len(model.aheads)) * biases - ahead
    idle = c.moe_layers * (c.num_experts - c.num_experts_per_tok) * 3 * c.hidden_size * c.moe_intermediate_size
    embedding = 0 if c.tie_word_embeddings else model.embed.numel()
    return {"total": total, "active": total - idle, "embedding": embedding, "ahead": ahead}


def stacked(parts_NK: Sequence[Tensor], *shape: int) -> Tensor:
    """Stack what each MoE layer has of N tokens, [N, ...], to [N, L, ...]. `shape` is that of one part, for models without such
    layers, where the result is empty int64."""
    return torch.stack(list(parts_NK), 1) if parts_NK else torch.zeros(shape[0], 0, *shape[1:], dtype=torch.int64)


def _require_range(name: str, values: Tensor, count: int, what: str) -> None:
    """Raise ValueError for values outside 0 … count − 1."""
    if values.numel() and not (0 <= (low := int(values.min())) and (high := int(values.max())) < count):
        raise ValueError(f"{name}: holds {low if low < 0 else high}; there are {count} {what}, from 0")


def _feed_forward(x_ND: Tensor, w_in_DF: Tensor, w_out_HD: Tensor) -> Tensor:
    return matmul(swiglu(matmul(x_ND, w_in_DF)), w_out_HD)


def _half_split(x: Tensor) -> Tensor:
    """Reorder neighbouring pairs (0, 1), (2, 3), … to the half-split pairs that `rotate` expects."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _frequencies(c: ModelConfig) -> Tensor:
    """Return radians per position for each pair of dimensions [C/2], in float32 as in training: theta^(-2i/C). With YaRN,
    frequencies below `beta_slow` turns within the original positions are divided by the factor, those above `beta_fast` turns
    are kept, and those in between are blended (arXiv 2309.00071, eq. 23)."""
    width, yarn = c.rope_width, c.yarn
    period = c.rope_theta ** (torch.arange(0, width, 2, device="cpu").float() / width)
    if yarn.factor == 1:
        return 1.0 / period

    def place(turns: float) -> float:
        """Return the dimension with this number of turns."""
        ratio = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(c.rope_theta))

    low, high = max(math.floor(place(yarn.beta_fast)), 0), min(math.ceil(place(yarn.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, device="cpu").float() - low) / (high - low if high > low else 1e-3)
    plain = 1 - ramp.clamp(0, 1)
    return 1.0 / (yarn.factor * period) * (1 - plain) + 1.0 / period * plain


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of different lengths, packed into N tokens; attention is causal within a row."""

    row_N: Tensor
    position_N: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of_lengths(cls, lengths: list[int], config: ModelConfig, device: torch.device | str = "cpu") -> PackedRows:
        if max(lengths) > config.max_position_embeddings:
            most = config.max_position_embeddings
            raise ValueError(f"{max(lengths)} tokens exceed model.max_position_embeddings={most}")
        sizes = torch.tensor(lengths, device=device)
        row_N = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
        starts = sizes.cumsum(0) - sizes
        position_N = torch.arange(int(sizes.sum()), device=device) - starts[row_N]
        return cls(row_N, position_N, tuple(lengths))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Compute causal attention within each row."""
        return causal_attention(q, k, v, self.lengths, scale)


def balance_loss(routings: list[Routing]) -> Tensor:
    """Return the mean of the layers' load-balancing losses; 0 for a model without experts."""
    return torch.stack([load_balance(routing) for routing in routings]).mean() if routings else torch.zeros(())
