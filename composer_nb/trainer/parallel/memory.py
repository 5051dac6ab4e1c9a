"""The memory and traffic of a model and of a rank in a training step, from shapes alone.

    weights, gradients, optimizer    this rank's share of them, float32
    activations                      what the forward pass keeps for the backward pass, of one micro-batch
    output                           probabilities of the vocabulary and their gradient
    passing                          what lives for a moment: gathered weights, gradients before they are summed, tokens on their
                                     way to experts
    peak                             the first three + the most of the rest at one moment: at the output layer, in the last
                                     layer's backward pass, or in the optimiser

The count follows `model.py` and the kernels line by line, so it is of this trainer and of no other. It is of tensors: what an
allocator rounds up or a library keeps for itself is not in it (docs/scaling.md measures it).

Dimensions of counts a token are as in `model.py`: D width, Q query heads, G key heads, C head width, H width of
experts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from composer_nb.trainer.learning.optimizer import TOGETHER, OptimizerName, matrices
from composer_nb.trainer.models.transformer import Layer, Model, ModelConfig, weight_counts
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings

# That are tried for a model that does not fit.
MOST_RANKS = 1 << 14


def plan_memory(config: ModelConfig) -> dict[str, int]:
    """Return the size of a model of this configuration: its `weight_counts`, and bytes.

    bf16_bytes, fp32_bytes: all weights, as a checkpoint and in an engine. optimizer_bytes: master weights and AdamW's two
    moments, float32. training_bytes: these, and weights and gradients in float32; activations come on top. cache_bytes: bytes of
    cache per token, over all layers, in bf16, as small as the architecture allows: keys and values; with latent attention, the
    latent and the rotary part of the key. engine_cache_bytes: bytes of cache per token, over all layers, in this project's
    engine: keys and values of each head, in float32; a bf16 model on a GPU needs half."""
    counts = weight_counts(config)
    weights = counts["total"] + counts["ahead"]
    cached_per_layer = config.num_key_value_heads * (config.head_dim + config.value_width)
    least_cached_per_layer = config.kv_lora_rank + config.qk_rope_head_dim if config.latent else cached_per_layer
    bytes_per_weight = {"bf16_bytes": 2, "fp32_bytes": 4, "optimizer_bytes": 12, "training_bytes": 20}
    return {
        **counts,
        **{name: weight_bytes * weights for name, weight_bytes in bytes_per_weight.items()},
        "cache_bytes": 2 * config.num_hidden_layers * least_cached_per_layer,
        "engine_cache_bytes": 4 * config.num_hidden_layers * cached_per_layer,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The work of a rank on its share of the weights.

    Attributes:
        tokens: Tokens of a micro-batch, those of all ranks of a `cp` group together.
        longest: Tokens of its longest row; needed where attention keeps its probabilities. 0: the micro-batch is one row.
        microbatches: A step.
        published: Rounded weights beside the masters, as RL has.
        half: Computed in bfloat16 where this is true, in float32 otherwise; masters, gradients and moments are float32.
        draft: A draft head learns jointly (`drafts.HeadTrainer`). Each rank has all of it.
        fused: Attention keeps no probabilities whatever the widths of keys and values. torch's on a CPU does when they differ.
    """

    tokens: int = 4096
    longest: int = 0
    microbatches: int = 1
    optimizer: OptimizerName = "adamw"
    published: bool = True
    recompute: bool = False
    half: bool = False
    draft: bool = False
    fused: bool = False

    @property
    def width(self) -> int:
        """Bytes of a number that is computed with."""
        return 2 if self.half else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of one rank, the busiest one; `traffic` is what it sends in a step, by collective."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    output: int
    passing: int
    peak: int
    traffic: dict[str, int] = field(default_factory=dict)


class _Shapes(NamedTuple):
    """Numbers of weights. Muon moves `muon` of them, at most `muon_stack` at once. `layer_…` are of the largest layer,
    `largest_…` of single tensors: a gradient lives beside the one that it is added to."""

    experts: int
    others: int
    muon: int
    muon_stack: int
    layer_experts: int
    layer_others: int
    tables: int
    largest_expert: int
    largest_other: int


@lru_cache(maxsize=8)
def _shapes(c: ModelConfig) -> _Shapes:
    """Return the numbers of weights of a model, from one without memory."""
    model = Model.planned(c)
    named = dict(model.named_parameters())
    stacks = [stack.numel() for name, weight in named.items() for stack in matrices(name, weight, c)]
    per_layer = [_split(layer) for layer in model.layers]
    experts = sum(_split(layer)[0] for layer in model.decoder_layers)
    return _Shapes(
        experts=experts,
        others=sum(weight.numel() for weight in named.values()) - experts,
        muon=sum(stacks),
        muon_stack=max(stacks),
        layer_experts=max(e for e, _ in per_layer),
        layer_others=max(o for _, o in per_layer),
        tables=sum(named[name].numel() for name in ("embed", "head") if name in named),
        largest_expert=max((w.numel() for n, w in named.items() if n.endswith(("w_in", "w_out"))), default=0),
        largest_other=max(w.numel() for n, w in named.items() if "_layers" in n and "w_" not in n),
    )


def _split(layer: Layer) -> tuple[int, int]:
    """Weights of a layer's experts, and its others."""
    experts = sum(weight.numel() for name, weight in layer.named_parameters() if name in ("w_in", "w_out"))
    return experts, sum(weight.numel() for weight in layer.parameters()) - experts


def estimate(c: ModelConfig, mesh: Mesh, load: RankLoad) -> Need:
    """Return the need of the busiest rank of `mesh`. Raises ValueError where the mesh does not fit the model's experts."""
    mesh.require_experts(c.num_experts)
    s, b = _shapes(c), load.width
    others, experts = math.ceil(s.others / mesh.fsdp), math.ceil(s.experts / (mesh.ep * mesh.expert_shard))
    mine = others + experts
    muon = s.muon * mine // (s.others + s.experts) if load.optimizer == "muon" else 0
    trained = mine + (8 * c.hidden_size**2 + 4 * c.hidden_size) * load.draft  # a head's matrices and norms
    optimizer = 8 * trained - 4 * muon + 4 * mine * load.published
    state = {"weights": 4 * trained, "gradients": 4 * trained, "optimizer": optimizer}
    n = math.ceil(load.tokens / mesh.cp)
    rows = n * c.num_experts_per_tok if c.moe_layers else 0
    dense, sparse = (_layer(c, mesh, load, n, rows, dense=kind) for kind in (True, False))
    first = c.num_hidden_layers - c.moe_layers
    if load.recompute:
        layers = n * (c.num_hidden_layers * c.hidden_size * b + c.moe_layers * _routing(c))
        again = max(dense * (first > 0), sparse)
    else:
        layers, again = first * dense + c.moe_layers * sparse, 0
    activations = layers + n * 2 * c.hidden_size * b
    activations += 4 * n * 18 * c.hidden_size * load.draft
    # A draft's loss has its head's log-probabilities, the model's, their difference and what these are multiplied with.
    output = (2 + 4 * load.draft) * 4 * n * c.vocab_size
    # Weights put together for a layer and the next one, the gradients of one before they are summed, and the tables.
    gathered = b * (3 * s.layer_others + s.tables) * (mesh.fsdp > 1)
    gathered += b * 3 * s.layer_experts // mesh.ep * (mesh.expert_shard > 1)
    table = s.tables // (1 if c.tie_word_embeddings else 2)
    # What lives while gradients go through the first product of the experts, less what has been let go by then.
    passing = n * c.hidden_size + rows * (c.hidden_size - c.moe_intermediate_size)
    passing += 2 * rows * c.hidden_size * (mesh.ep > 1) + max(s.largest_expert // mesh.ep, s.largest_other)
    # Of Muon on shards: parts that are sent and matrices that are received, and the largest stack, dealt or of experts; before
    # that, the parts twice.
    dealt = math.ceil((s.muon - s.experts) / mesh.fsdp) * (mesh.fsdp * mesh.ep > 1)
    of_experts = s.largest_expert // (2 * mesh.ep * mesh.expert_shard)
    stack = max(of_experts, min(dealt, max(TOGETHER, s.largest_other))) if dealt else s.muon_stack
    peak = max(
        activations + output + (n * c.hidden_size + table) * b + gathered,
        activations + again + passing * b + gathered,
        8 * trained,  # the optimizer's step
        4 * max(2 * dealt + 5 * stack, 3 * dealt) * (muon > 0),
    )
    return Need(
        **state,
        activations=activations,
        output=output,
        passing=max(0, peak - activations - output),
        peak=sum(state.values()) + peak,
        traffic=_traffic(c, s, mesh, load, n, rows),
    )


def _layer(c: ModelConfig, mesh: Mesh, load: RankLoad, n: int, rows: int, *, dense: bool) -> int:
    """Bytes that one layer keeps of `n` tokens, `rows` of them with an expert each."""
    D, H, b = c.hidden_size, c.moe_intermediate_size, load.width
    numbers = 4 * n * D + _attention(c, mesh, load, n)  # what both norms read and write
    if dense:
        return b * (numbers + 3 * n * c.intermediate_size)
    numbers += rows * (D + 3 * H) + 3 * n * H * c.n_shared_experts
    return b * numbers + n * _routing(c) + rows * (4 * 8 + b)


def _routing(c: ModelConfig) -> int:
    """Bytes a token of what a router decides: scores, their shares, experts, the best of all, gates."""
    k = c.num_experts_per_tok
    return 4 * 2 * c.num_experts + 8 * (2 * k + 1) + 4 * 2 * k


def _attention(c: ModelConfig, mesh: Mesh, load: RankLoad, n: int) -> int:
    """Numbers that attention keeps; keys and values are of all ranks of a `cp` group."""
    Q, G, C = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    keys = n * mesh.cp
    if not c.latent:  # what the norms read, queries and keys, the product in which values lie, the result
        return n * (2 * (Q + G) * C + (Q + 2 * G) * C + Q * C + 2 * Q) + (keys * 2 * G * C if mesh.cp > 1 else 0)
    fused = load.fused or c.head_dim == c.v_head_dim
    values = c.qk_nope_head_dim + c.v_head_dim if fused else c.v_head_dim
    numbers = n * (2 * c.q_lora_rank + Q * C + Q * c.v_head_dim) + keys * (2 * c.kv_lora_rank + Q * (C + values))
    return numbers + (0 if fused else n * Q * (load.longest or load.tokens))


def _traffic(c: ModelConfig, s: _Shapes, mesh: Mesh, load: RankLoad, n: int, rows: int) -> dict[str, int]:
    """Bytes that a rank sends in a step. A ring of R ranks sends (R − 1) / R of the whole in an all-gather or a reduce-scatter,
    twice that in an all-reduce."""
    m, b, again = load.microbatches, load.width, int(load.recompute)

    def ring(size: int) -> float:
        return (size - 1) / size

    local = s.experts / mesh.ep
    gather = s.others * ring(mesh.fsdp) + local * ring(mesh.expert_shard)
    copies = s.others / mesh.fsdp * ring(mesh.replicate) + local / mesh.expert_shard * ring(mesh.expert_replicate)
    away = rows * c.hidden_size * ring(mesh.ep) * c.moe_layers * m
    latent = c.kv_lora_rank + c.qk_rope_head_dim if c.latent else 2 * c.num_key_value_heads * c.head_dim
    context = n * latent * b * (mesh.cp - 1) * c.num_hidden_layers * m
    dealt = (s.muon - s.experts) / mesh.fsdp * ring(mesh.fsdp) * (load.optimizer == "muon")
    sizes = {
        "all-gather of weights": 2 * gather * b * m,
        "reduce-scatter of gradients": gather * 4 * m,
        "all-reduce of gradients": 2 * copies * 4,
        "all-to-all of tokens": away * (4 + 2 * again) * b,
        "all-gather of keys and values": context * (1 + again),
        "reduce-scatter of their gradients": context,
        "all-to-all of matrices": 8 * dealt,
    }
    return {name: round(size) for name, size in sizes.items()}


def require_memory(
    c: ModelConfig, settings: MeshSettings, ranks: int, load: RankLoad, limit: int, *, more_ranks: bool = True
) -> Need:
    """Return the need of a rank. Raises ValueError if that is more than `limit` bytes; it says how much is missing and names the
    first settings that fit: recomputation, smaller micro-batches, with `more_ranks` weights cut more finely, or more ranks."""
    need = estimate(c, Mesh.of(settings, ranks), load)
    if need.peak <= limit:
        return need
    lacking = f"a rank needs {need.peak / 2**30:,.2f} GiB at its peak and has {limit / 2**30:,.2f} GiB; "
    for name, mesh, world, changed in _smaller(c, settings, ranks, load):
        if not more_ranks and (mesh, world) != (settings, ranks):
            would = "a smaller model.*, fewer ranks or more memory would do"
            raise ValueError(f"{lacking}no micro-batch is small enough; {would}")
        smaller = estimate(c, Mesh.of(mesh, world), changed)
        if smaller.peak <= limit:
            raise ValueError(f"{lacking}{name} would ({smaller.peak / 2**30:,.2f} GiB)")
    raise ValueError(f"{lacking}no setting that was tried fits, not even {MOST_RANKS} ranks")


def _smaller(
    c: ModelConfig, settings: MeshSettings, ranks: int, load: RankLoad
) -> Iterator[tuple[str, MeshSettings, int, RankLoad]]:
    """(What is set, the mesh, its ranks, the load), in the order in which one would try them."""
    least = replace(load, recompute=True)
    if not load.recompute:
        yield "rl.recompute=true", settings, ranks, least
    tokens = load.tokens // 2
    while tokens >= max(load.longest, 256):
        least = replace(least, tokens=tokens)
        yield f"rl.recompute=true rl.microbatch_tokens={tokens}", settings, ranks, least
        tokens //= 2
    for world in (ranks * 2**power for power in range(MOST_RANKS.bit_length())):
        if world > MOST_RANKS:
            return
        deals = [ep for ep in range(settings.ep, world + 1) if world % ep == 0 and c.num_experts % ep == 0]
        for ep in deals[:1] + deals[-1:]:
            mesh = replace(settings, shard=world // settings.cp, ep=ep, expert_shard=world // ep)
            named = f"ranks={world} mesh.shard={mesh.shard} mesh.ep={ep} mesh.expert_shard={mesh.expert_shard}"
            for tried in (replace(load, recompute=True), least):
                yield f"rl.recompute=true rl.microbatch_tokens={tried.tokens} {named}", mesh, world, tried


def table(need: Need) -> str:
    """Return a table in Markdown."""
    sizes = [("peak of a rank", need.peak), ("weights", need.weights), ("gradients", need.gradients)]
    sizes += [("optimiser", need.optimizer), ("activations", need.activations), ("output layer", need.output)]
    sizes += [("passing at the peak", need.passing)]
    sizes += [(f"{name}, a step", size) for name, size in need.traffic.items()]
    return "\n".join(["| | GiB |", "|---|---|", *(f"| {name} | {size / 2**30:,.3f} |" for name, size in sizes)])
