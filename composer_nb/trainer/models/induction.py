"""Initial weights that can copy: an induction head in the first two layers.

An agent's calls repeat what it has read: a path, a name, the text to replace. Induction heads do this (Olsson et al., arXiv
2209.11895): one head looks at the token before, a later one looks for tokens that followed the current one, and predicts them
again. From random weights they form late, and a tour of minutes sees two million tokens. Structured initial weights make up for
it (as in "mimetic initialization", Trockman and Kolter, arXiv 2305.09828); training then changes them like any others.

With orthonormal directions c, P and A of the residual stream (every embedding holds c, and nothing of A):

    layer 0, head 0     q = R(−1) c, k = c in the fast pairs of RoPE, so the score is highest one token back; it moves P x to A
    layer 1, heads      q = P x, k = A x in the slow pairs: tokens whose predecessor is the current token; they add P x
"""

import torch
from torch import Tensor

from composer_nb.trainer.models.config import ModelConfig
from composer_nb.trainer.models.transformer import Layer, Model

# Pairs of RoPE that tell one token back from any other distance.
FAST = 3
# Radians that a pair may turn over half of the positions, to compare tokens at any distance.
SLOW = 0.9
# Scale that is left to the other weights of planted queries and keys.
REST = 0.06
# Scale at which a found token is added.
OUT = 2.0
# Gain of the final norm: with it the first loss is about that of guessing.
LOGITS = 0.3


def can_plant(c: ModelConfig) -> bool:
    """Return whether a model has the parts: grouped-query attention in two layers, tied embeddings, width for the directions."""
    wide = c.hidden_size > 3 * c.head_dim and len(_slow(c)) > 1
    return not c.latent and c.num_hidden_layers > 1 and c.tie_word_embeddings and wide


@torch.no_grad()
def plant_induction(model: Model, seed: int) -> None:
    """Give random weights an induction head. Raises ValueError for a model without the parts (`can_plant`)."""
    c = model.config
    if not can_plant(c):
        raise ValueError("an induction head needs two layers, no latents, tied embeddings, hidden_size > 3 · head_dim")
    width, half, generator = c.head_dim, c.head_dim // 2, torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(c.hidden_size, c.hidden_size, generator=generator))[0].T
    constant, token, before = directions[0], directions[1 : 1 + width], directions[1 + width : 1 + 2 * width]
    rest = directions[1 + 2 * width :]
    embed, size = model.embed, float(model.embed.norm(dim=-1).mean())
    for away in (constant[None], before):
        embed.sub_(embed @ away.T @ away)
    embed.add_(0.5 * size * constant)
    model.final_norm.fill_(LOGITS)

    heads, per = c.num_attention_heads, c.num_attention_heads // c.num_key_value_heads
    q, k, v, o = _parts(model.layers[0], c)
    q[0], k[0] = q[0] * REST, k[0] * REST
    for pair, angle in enumerate(_angles(c)[:FAST]):
        k[0, pair] += constant
        q[0, pair] += angle.cos() * constant
        q[0, half + pair] -= angle.sin() * constant
    v[0], o[:, 0] = token, before.T

    q, k, v, o = _parts(model.layers[1], c)
    dimensions = [dimension for pair in _slow(c) for dimension in (pair, half + pair)]
    groups = range(min(2, heads // per, width // len(dimensions)))
    for group in groups:
        part = slice(group * len(dimensions), (group + 1) * len(dimensions))
        head, added = group * per, (rest[:width], token)[group]
        q[head], k[group] = q[head] * REST, k[group] * REST
        q[head, dimensions] += token[part]
        k[group, dimensions] += before[part]
        v[group], o[:, head] = added, OUT * added.T


def _angles(c: ModelConfig) -> Tensor:
    """Radians that each pair of RoPE turns from one token to the next."""
    return c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)


def _slow(c: ModelConfig) -> list[int]:
    return [pair for pair, angle in enumerate(_angles(c)) if angle * c.max_position_embeddings / 2 < SLOW]


def _parts(layer: Layer, c: ModelConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of a layer's queries [H, C, D], keys and values [G, C, D], and outputs [D, H, C]."""
    heads, groups, width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    q, k, v = layer.qkv.split([heads * width, groups * width, groups * width])
    return *(part.unflatten(0, (-1, width)) for part in (q, k, v)), layer.o.unflatten(1, (heads, width))
