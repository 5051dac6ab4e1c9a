"""Qwen3-MoE in one file: grouped-query attention with QK norm and RoPE, softmax top-k router, SwiGLU experts.

Dimensions: B rows, T positions, N = the real tokens of all rows side by side (no padding), D width, Q query heads, G key
heads, C head width, L layers, E experts, K experts a token, V vocabulary.

Everything but attention works on the N tokens, so padding costs nothing; how tokens attend (a padded batch in training, a
cache in the engine) is a function that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer_nb.kernels.moe import Routing, load_balance, moe, route
from composer_nb.kernels.norm import norm_rope, rms_norm

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, Q, C], k [N, G, C], v [N, G, C]) -> [N, Q, C]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes, under the names of `transformers`' Qwen3MoeConfig."""

    vocab_size: int = 1024
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qk_norm_gain: float = 1.6
    """Start value of the QK norms' weights (attention that begins sharper learns to copy sooner)."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the sizes that do not fit together."""
        for name in ("vocab_size", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("hidden_size", "moe_intermediate_size"):  # the grouped GEMM wants rows of whole 16 bytes, bf16 too
            if getattr(self, name) < 8 or getattr(self, name) % 8:
                raise ValueError(f"model.{name}={getattr(self, name)} must be a multiple of 8")
        queries, keys = self.num_attention_heads, self.num_key_value_heads
        if queries < 1 or queries % keys:
            raise ValueError(
                f"model.num_attention_heads={queries} must be a multiple of model.num_key_value_heads={keys}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even")
        k, experts = self.num_experts_per_tok, self.num_experts
        if not 1 <= k <= experts:
            raise ValueError(f"model.num_experts_per_tok={k} must lie in 1..model.num_experts={experts}")

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Layer(nn.Module):
    """One decoder layer's weights. The arithmetic is in `Model.trunk`, where it can be read in one piece."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        width = c.num_attention_heads * c.head_dim
        kv_width = c.num_key_value_heads * c.head_dim
        self.attention_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = nn.Parameter(torch.randn(width + 2 * kv_width, c.hidden_size) * c.hidden_size**-0.5)
        self.q_norm = nn.Parameter(torch.full((c.head_dim,), c.qk_norm_gain))
        self.k_norm = nn.Parameter(torch.full((c.head_dim,), c.qk_norm_gain))
        scale = (2 * c.num_hidden_layers) ** -0.5
        self.o = nn.Parameter(torch.randn(c.hidden_size, width) * width**-0.5 * scale)
        self.moe_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.router = nn.Parameter(torch.randn(c.num_experts, c.hidden_size) * c.hidden_size**-0.5)
        inner = c.moe_intermediate_size
        self.w_in = nn.Parameter(torch.randn(c.num_experts, c.hidden_size, 2 * inner) * c.hidden_size**-0.5)
        self.w_out = nn.Parameter(torch.randn(c.num_experts, inner, c.hidden_size) * inner**-0.5 * scale)


class Model(nn.Module):
    """The language model. `model(token_ids[B, T])` gives logits [B, T, V] and routes [B, T, L, K]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.3)
        self._layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.head = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.02)
        self._rope: Tensor | None = None

    @property
    def layers(self) -> list[Layer]:
        return [layer for layer in self._layers if isinstance(layer, Layer)]

    @property
    def output_weight(self) -> Tensor:
        return self.embed if self.config.tie_word_embeddings else self.head

    def trunk(
        self, token_ids_N: Tensor, position_N: Tensor, attend: Attend, replay_NLK: Tensor | None = None
    ) -> tuple[Tensor, list[Routing]]:
        """Hidden states [N, D] after the final norm, and each layer's routing."""
        c = self.config
        if replay_NLK is not None and replay_NLK.shape[1] != len(self.layers):
            raise ValueError(f"replayed routes are of {replay_NLK.shape[1]} layers, the model has {len(self.layers)}")
        x_ND = F.embedding(token_ids_N, self.embed)
        rope_N = self.rope_table(x_ND.device)[position_N].to(x_ND.dtype)
        routings = []
        for index, layer in enumerate(self.layers):
            h_ND = rms_norm(x_ND, layer.attention_norm, c.rms_norm_eps)
            q, k, v = self._qkv(layer, h_ND, rope_N)
            x_ND = x_ND + F.linear(attend(index, q, k, v).flatten(1), layer.o)
            h_ND = rms_norm(x_ND, layer.moe_norm, c.rms_norm_eps)
            replay_NK = None if replay_NLK is None else replay_NLK[:, index]
            routing = route(h_ND, layer.router, c.num_experts_per_tok, replay_NK)
            x_ND = x_ND + moe(h_ND, routing, layer.w_in, layer.w_out)
            routings.append(routing)
        return rms_norm(x_ND, self.final_norm, c.rms_norm_eps), routings

    def rope_table(self, device: torch.device) -> Tensor:
        """Cosines and sines [position, 2, C/2], always made in float32: a model cast to bf16 must not round angles."""
        if self._rope is None or self._rope.device != device:
            c = self.config
            position = torch.arange(c.max_position_embeddings, device=device).float()
            inverse = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, device=device).float() / c.head_dim)
            angle = torch.outer(position, inverse)
            self._rope = torch.stack([angle.cos(), angle.sin()], dim=1)
        return self._rope

    def _qkv(self, layer: Layer, h_ND: Tensor, rope_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        queries, keys = c.num_attention_heads, c.num_key_value_heads
        turned, v = F.linear(h_ND, layer.qkv).unflatten(-1, (-1, c.head_dim)).split([queries + keys, keys], dim=1)
        weight_HC = torch.cat([layer.q_norm.expand(queries, -1), layer.k_norm.expand(keys, -1)])
        q, k = norm_rope(turned, weight_HC, rope_N, c.rms_norm_eps).split([queries, keys], dim=1)
        return q, k, v

    def forward(self, token_ids: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and routes int64 [B, T, L, K] of full rows. Raises ValueError past the longest position."""
        B, T = token_ids.shape
        batch = PackedRows.of_lengths([T] * B, self.config, token_ids.device)
        replay_N = None if replay is None else replay.flatten(0, 1)
        hidden_ND, routings = self.trunk(token_ids.reshape(-1), batch.position_N, batch.attend, replay_N)
        logits = F.linear(hidden_ND, self.output_weight)
        routes = torch.stack([routing.experts_NK for routing in routings], dim=1)
        return logits.view(B, T, -1), routes.view(B, T, *routes.shape[1:])


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of several lengths, side by side as N tokens; attention is causal within a row."""

    row_N: Tensor
    position_N: Tensor
    rows: int
    longest: int

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
        return cls(row_N, position_N, len(lengths), max(lengths))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of each row on itself, by way of a padded batch."""
        groups = q.shape[1] // k.shape[1]
        q, k, v = (self._pad(x) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)[self.row_N, self.position_N]

    def _pad(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(self.rows, self.longest, *x.shape[1:])
        return padded.index_put((self.row_N, self.position_N), x).transpose(1, 2)


def balance_loss(routings: list[Routing]) -> Tensor:
    """Mean of the layers' load-balancing losses."""
    return torch.stack([load_balance(routing) for routing in routings]).mean()
