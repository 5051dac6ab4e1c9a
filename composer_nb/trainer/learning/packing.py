"""Streams as a tree of prefixes, in which the trainer forwards tokens common to several rollouts once.

The rollouts of a group begin alike: with the same prompt, and often the same first calls and results. With causal attention, all
computation at a token depends only on that token and those before it, so equal prefixes need one forward and one backward pass.
On the tour's tasks, 45 % of the tokens are left.

Dimensions: N tokens of the tree, S sampled tokens, U distinct places whose output predicts them, R rows, T positions,
L layers, K experts per token, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.plain import Share, require_ranges
from composer_nb.harness.policy import route_checks
from composer_nb.harness.rollout import Hint
from composer_nb.kernels.attention.causal import causal_attention
from composer_nb.kernels.linear import linear
from composer_nb.kernels.logprob import logprob_entropy
from composer_nb.kernels.moe.routing import Replay, Routing
from composer_nb.trainer.models.transformer import Gather, Model

ReplayLevel = Literal["none", "ids", "ids+order", "weights"]
Source = Literal["engine", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The part of the recorded routes that the trainer's forward pass uses."""

    level: ReplayLevel = "none"
    """none: nothing. ids: the set of experts. ids+order: also their order, in which their results are summed. weights: also their
    gates; the router then learns nothing from the replayed tokens."""
    source: Source = "engine"
    """engine: the routes of sampling (R3). trainer: the routes of the trainer's own forward pass before the first optimizer step
    on a batch (R2), which fixes the experts over its minibatches; streams then need no routes."""
    plausible: Share = 0.0
    """Replayed experts whose live score is below this times the lowest score of the router's own choice are replaced by its own
    candidates. 0 replays all experts; 1 replays almost none that the router would not choose, if the score alone decides (a bias
    or limits of groups, as in DeepSeek-V3, are ignored here)."""
    missing: Share = 0.0
    """Share of a rollout's forwarded tokens that may lack routes; these use the trainer's own experts."""
    completion_only: bool = False
    """Replay the routes of the tokens that the policy wrote alone. The tokens that it read use the trainer's own experts, need no
    routes, and so may come from an engine's cache of prompts."""

    def __post_init__(self) -> None:
        require_ranges(self, "replay")
        if self.level == "none" and (self.source != "engine" or self.plausible or self.missing or self.completion_only):
            raise ValueError("replay.level is none, so other replay settings do nothing: set it, as to 'ids+order'")
        if self.source == "trainer" and (self.missing or self.completion_only):
            name = "missing" if self.missing else "completion_only"
            raise ValueError(f"replay.{name} is of routes on record, and replay.source=trainer makes its own")

    @property
    def on(self) -> bool:
        return self.level != "none"

    @property
    def recorded(self) -> bool:
        """Whether streams must contain their routes."""
        return self.on and self.source == "engine"


NO_REPLAY = ReplaySettings()
# R3: recorded experts and their order, with live gates.
FULL = ReplaySettings(level="ids+order")


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """The rollout of a stream. Only its own segments share it: another rollout may have the same tokens.

    Attributes:
        sampled: Sampled tokens of all segments.
    """

    sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The trainer's view of a segment of T tokens.

    Attributes:
        routes: [T, L, K] as sampled.
        gates: [T, L, K] as sampled; needed to replay at level `weights`.
        route_valid: [T]: mask of the tokens whose routes the engine recorded, all but the last. Empty: no routes to
            replay.
        checks: [T]: checks that bind each row of routes to its token (`route_checks`).
        family: The rollout's task and prompt, which identify its family. Empty: the token ids before the first sampled
            one do.
        whole: The rollout that this segment belongs to. None: the stream is all of it.
        hints: Hints for some of its turns (`learner.py`).
    """

    token_ids: NDArray[np.int32]
    acted: NDArray[np.bool_]
    logprob: NDArray[np.float32]
    advantage: NDArray[np.float32]
    routes: NDArray[np.unsignedinteger[Any]]
    gates: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    route_valid: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    checks: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    family: bytes = b""
    whole: Whole | None = None
    hints: tuple[Hint, ...] = ()

    def replayed(self, replay: ReplaySettings) -> NDArray[np.bool_]:
        """Return the mask [T] of the tokens whose recorded routes are replayed."""
        return self.route_valid & self.acted if replay.completion_only else self.route_valid

    def route_fault(self, replay: ReplaySettings = FULL) -> str:
        """Return why these routes cannot be replayed, as far as the stream alone shows; empty if they can."""
        tokens, rows = len(self.token_ids), {len(self.routes), len(self.route_valid), len(self.checks)}
        if rows != {tokens}:
            return f"{tokens} tokens, but routes of {' and '.join(map(str, sorted(rows)))}"
        valid = self.route_valid[:-1]
        lacking_T = ~valid & (self.acted[:-1] if replay.completion_only else True)
        if tokens > 1 and (lacking := float(lacking_T.mean())) > replay.missing:
            more = f"; {lacking:.1%} have none, replay.missing is {replay.missing:.1%}" if replay.missing else ""
            return f"token {int(lacking_T.argmax())} of {tokens} was forwarded and has no routes{more}"
        if self.route_valid[-1:].any():
            return "routes of the last token, which is never forwarded"
        matches = (route_checks(np.arange(tokens), self.token_ids, self.routes) == self.checks)[:-1] | ~valid
        if not matches.all():
            return f"the routes at token {int(matches.argmin())} of {tokens} were recorded at another token or place"
        if replay.level == "weights" and (self.gates.shape != self.routes.shape or str(self.gates.dtype) != "float32"):
            return (
                f"gates of {self.gates.shape} and {self.gates.dtype} beside routes of {self.routes.shape}, and replay.level "
                "is 'weights'"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of similar length, for one call of attention.

    Attributes:
        token_M: [R · T]: tree token at each position of the padded rows.
        own_M: Positions, in the padded rows, of the tokens that these rows compute.
    """

    rows: int
    token_M: Tensor
    own_M: Tensor


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Streams as a tree of N tokens, with their S sampled tokens in order, stream by stream.

    Attributes:
        recorded: The recorded routes, if they are to be replayed.
        rows: Number of forwarded tokens of all streams before they are shared.
        order_N: Position of each token in the concatenated results of the buckets.
        parent_N: The token before each in the tree, of all N tokens; a first token is its own.
        streams_N: Number of streams that contain each token after its parent; 0 for first tokens.
        place_U: Tree tokens whose output predicts a sampled token.
        from_S: Index, into `place_U`, of the place that predicts each sampled token.
        length_S: Number of sampled tokens of each token's rollout, also of segments in other batches.
        counts: Whether this rank counts the tokens; of ranks that share a batch, one does.
    """

    inputs_N: Tensor
    position_N: Tensor
    recorded: Replay | None
    rows: int
    buckets: list[Bucket]
    order_N: Tensor
    parent_N: Tensor
    streams_N: Tensor
    place_U: Tensor
    from_S: Tensor
    token_S: Tensor
    sampled_S: Tensor
    advantage_S: Tensor
    rollout_S: Tensor
    length_S: Tensor
    counts: bool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Apply causal attention along each path of the tree."""
        parts = []
        for bucket in self.buckets:
            rows = [len(bucket.token_M) // bucket.rows] * bucket.rows
            q_M, k_M, v_M = (x.index_select(0, bucket.token_M) for x in (q, k, v))
            out = causal_attention(q_M, k_M, v_M, rows, scale)
            parts.append(out.index_select(0, bucket.own_M))
        return torch.cat(parts).index_select(0, self.order_N) if parts else attend_none(q, k, v)

    @property
    def gather(self) -> Gather | None:
        """A function that assembles the parts of a batch shared by several ranks; None if this rank has all of it."""
        return None

    def collect(self, x_S: Tensor) -> Tensor:
        """Return values of all sampled tokens, given those of the tokens predicted on this rank."""
        return x_S


def moved(x: Any, device: str | torch.device) -> Any:
    """Return a batch, or a part of one, with all of its tensors on `device`."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, list):
        return [moved(part, device) for part in x]
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{name.name: moved(getattr(x, name.name), device) for name in fields(x)})
    return x


def attend_none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention [0, Q, C'] without queries. It depends on all inputs, so that ranks without tokens have gradients to
    sum."""
    return q.new_zeros(0, q.shape[1], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())


def flatten(streams: Sequence[Stream], replay: ReplaySettings = NO_REPLAY) -> FlatBatch:
    """Return the tree of `streams`. The last token of each is only predicted, never forwarded. With replay of recorded routes,
    only prefixes with equal routes are shared. Raises ValueError for routes that do not belong to the streams."""
    if not streams:
        return _nothing()
    for number, stream in enumerate(streams) if replay.recorded else ():
        if fault := stream.route_fault(replay):
            raise ValueError(f"stream {number} of {len(streams)} cannot be replayed: {fault}")
    tree = _Tree([_signature(stream, replay) for stream in streams])
    acted = [stream.acted[1:] for stream in streams]
    rollout_numbers: dict[int, int] = {}
    rollouts = [rollout_numbers.setdefault(id(stream.whole or stream), len(rollout_numbers)) for stream in streams]
    lengths = [stream.whole.sampled if stream.whole else a.sum() for stream, a in zip(streams, acted, strict=True)]
    owner_N, at_N = tree.owner_N, tree.position_N
    place_S = np.concatenate([nodes[a] for nodes, a in zip(tree.nodes, acted, strict=True)])
    place_U, from_S = np.unique(place_S, return_inverse=True)
    buckets, computed = _buckets(tree)
    order_N = np.empty_like(computed)
    order_N[computed] = np.arange(len(computed))

    def of_tokens(values: Sequence[NDArray[np.generic]]) -> Tensor:
        starts = np.cumsum([0, *(len(value) for value in values[:-1])])
        return torch.from_numpy(np.concatenate(values)[starts[owner_N] + at_N])

    def of_sampled(values: Sequence[NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate([x[1:][a] for x, a in zip(values, acted, strict=True)]))

    return FlatBatch(
        inputs_N=of_tokens([stream.token_ids for stream in streams]).long(),
        position_N=torch.from_numpy(at_N),
        recorded=_recorded(streams, replay, of_tokens) if replay.recorded else None,
        rows=sum(map(len, tree.nodes)),
        buckets=buckets,
        order_N=torch.from_numpy(order_N),
        parent_N=torch.from_numpy(tree.parent_N),
        streams_N=torch.from_numpy(np.bincount(np.concatenate(tree.nodes), minlength=len(at_N)) * (at_N > 0)),
        place_U=torch.from_numpy(place_U),
        from_S=torch.from_numpy(from_S),
        token_S=of_sampled([stream.token_ids for stream in streams]).long(),
        sampled_S=of_sampled([stream.logprob for stream in streams]),
        advantage_S=of_sampled([stream.advantage for stream in streams]),
        rollout_S=torch.from_numpy(np.repeat(rollouts, [a.sum() for a in acted])),
        length_S=torch.from_numpy(np.repeat(lengths, [a.sum() for a in acted])),
        counts=True,
    )


def _nothing() -> FlatBatch:
    """Return an empty batch, which ranks without streams compute while others compute theirs."""
    ids, numbers = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    names = "inputs_N position_N order_N parent_N streams_N place_U from_S token_S rollout_S length_S"
    tokens = dict.fromkeys(names.split(), ids)
    return FlatBatch(**tokens, recorded=None, rows=0, buckets=[], sampled_S=numbers, advantage_S=numbers, counts=True)


def _recorded(
    streams: Sequence[Stream], replay: ReplaySettings, of_tokens: Callable[[Sequence[NDArray[Any]]], Tensor]
) -> Replay:
    """Return the recorded routes of the tree's tokens. Not called at level `none`."""
    assert replay.level != "none"
    return Replay(
        experts=of_tokens([stream.routes.astype(np.int64) for stream in streams]),
        gates=of_tokens([stream.gates for stream in streams]) if replay.level == "weights" else None,
        valid_N=of_tokens([stream.replayed(replay) for stream in streams])
        if replay.missing or replay.completion_only
        else None,
        level=replay.level,
        plausible=replay.plausible,
    )


def score(model: Model, batch: FlatBatch, replay: Replay | None = None) -> tuple[Tensor, Tensor]:
    """Return the log-probability [S] and (detached) entropy [S] of each sampled token. `replay` (usually `batch.recorded`):
    routes to use instead of the model's own."""
    return target_scores(model, batch, forward(model, batch, replay)[0])


def target_scores(model: Model, batch: FlatBatch, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `score` does, from the final hidden states."""
    hidden_UD = hidden_ND.index_select(0, batch.place_U)
    logprob_S, entropy_U = logprob_entropy(hidden_UD, model.output_weight, batch.from_S, batch.token_S)
    return batch.collect(logprob_S), batch.collect(entropy_U[batch.from_S])


def distributions(model: Model, batch: FlatBatch, replay: Replay | None = None) -> tuple[Tensor, list[Routing]]:
    """Return the log-probabilities [S, V] of the whole vocabulary at each sampled token, and each layer's routing."""
    hidden_ND, routings = forward(model, batch, replay)
    logits_UV = linear(hidden_ND.index_select(0, batch.place_U), model.output_weight)
    return logits_UV.to(torch.promote_types(logits_UV.dtype, torch.float32)).log_softmax(-1)[batch.from_S], routings


def forward(model: Model, batch: FlatBatch, replay: Replay | None = None) -> tuple[Tensor, list[Routing]]:
    """Return the final hidden states [N, D] of this rank's tokens, and each layer's routing."""
    return model.trunk(batch.inputs_N, batch.position_N, batch.attend, replay, batch.gather)


def families(streams: Sequence[Stream]) -> list[list[int]]:
    """Return the indices of streams grouped by the task and prompt of their rollouts, in order of first appearance. Rollouts of
    one family share most of their forward pass, and so should stay together."""
    members: dict[bytes, list[int]] = {}
    for number, stream in enumerate(streams):
        prompt = stream.token_ids[: int(stream.acted.argmax())]
        members.setdefault(stream.family or prompt.tobytes(), []).append(number)
    return list(members.values())


def microbatches(streams: Sequence[Stream], microbatch_tokens: int, whole_rollouts: bool = False) -> list[list[Stream]]:
    """Return streams in lists of at most `microbatch_tokens` tokens of the tree, or one stream, sorted by prefix within families,
    longest families first. `whole_rollouts`: all segments of a rollout in one list, however long."""
    longest_first = sorted(families(streams), key=lambda family: -max(len(streams[n].token_ids) for n in family))
    ordered_units = [unit for family in longest_first for unit in units(streams, family, whole_rollouts)]
    tree_runs = runs(streams, ordered_units, lambda run: run.tokens > microbatch_tokens)
    return [[streams[number] for number in run.numbers] for run in tree_runs]


# The signature of no stream.
NOTHING = np.zeros((0, 1), np.int32)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring streams of one family in the tree.

    Attributes:
        tokens: Number of tokens of the tree.
        pairs: Number of pairs of a token and one that it attends to, over all rows that own a token: these are computed
            whole.
    """

    numbers: list[int]
    tokens: int
    pairs: int


def runs(streams: Sequence[Stream], ordered: Sequence[Sequence[int]], is_full: Callable[[Run], bool]) -> list[Run]:
    """Cut units of streams, in this order, into the longest runs that are not `is_full`, of at least one unit each."""
    full_runs: list[Run] = []
    run, last_signature = Run([], 0, 0), NOTHING
    for unit in ordered:
        added, signature = _added(streams, unit, last_signature)
        extended = Run([*run.numbers, *unit], run.tokens + added.tokens, run.pairs + added.pairs)
        if run.numbers and is_full(extended):
            full_runs.append(run)
            extended, _ = _added(streams, unit, NOTHING)
        run, last_signature = extended, signature
    return [*full_runs, run] if run.numbers else []


def units(streams: Sequence[Stream], family: Sequence[int], whole_rollouts: bool) -> list[list[int]]:
    """Return the streams of a family in the order of its tree, one by one or, with `whole_rollouts`, rollout by rollout."""
    sorted_numbers = sorted(family, key=lambda number: _signature(streams[number]).tobytes())
    members: dict[int, list[int]] = {}
    for number in sorted_numbers:
        key = id(streams[number].whole or streams[number]) if whole_rollouts else number
        members.setdefault(key, []).append(number)
    return list(members.values())


def _added(
    streams: Sequence[Stream], unit: Sequence[int], last_signature: NDArray[np.int32]
) -> tuple[Run, NDArray[np.int32]]:
    """Return what these streams add to a tree that ends with the signature `last_signature`, and the last signature."""
    tokens = pairs = 0
    for number in unit:
        signature = _signature(streams[number])
        length = len(signature)
        added = length - _shared(last_signature, signature)
        tokens, pairs = tokens + added, pairs + (length * (length + 1) // 2 if added else 0)
        last_signature = signature
    return Run(list(unit), tokens, pairs), last_signature


def _signature(stream: Stream, replay: ReplaySettings = NO_REPLAY) -> NDArray[np.int32]:
    """Return signatures [T - 1, …], which are equal for equal forwarded tokens. Their bytes sort shared prefixes together."""
    parts: list[NDArray[Any]] = [stream.token_ids[:-1, None]]
    if replay.recorded:
        replayed = stream.replayed(replay)[:-1, None]
        parts += [replayed, stream.routes[:-1].reshape(len(parts[0]), -1) * replayed]
    if replay.recorded and replay.level == "weights":
        parts.append(stream.gates[:-1].reshape(len(parts[0]), -1).view(np.int32) * replayed)
    return np.ascontiguousarray(np.concatenate(parts, 1), np.int32)


def _shared(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differs = (a[:length] != b[:length]).any(1)
    return int(differs.argmax()) if differs.any() else length


class _Tree:
    """The prefix tree of rows. `nodes[r]` are the tree's tokens along row r; `owner_N` and `position_N` are the row and the
    position that each token comes from, and `parent_N` is the token before it."""

    def __init__(self, rows: Sequence[NDArray[np.int32]]) -> None:
        empty = np.zeros(0, np.int64)
        self.nodes: list[NDArray[np.int64]] = [empty] * len(rows)
        owners, positions, parents, node_count = [empty], [empty], [empty], 0
        previous_row, path = np.zeros((0, 1), np.int32), empty
        for row in sorted(range(len(rows)), key=lambda row: rows[row].tobytes()):
            shared = _shared(previous_row, rows[row]) if len(path) else 0
            new_count = len(rows[row]) - shared
            path = np.concatenate([path[:shared], np.arange(node_count, node_count + new_count)])
            owners.append(np.full(new_count, row))
            positions.append(np.arange(shared, shared + new_count))
            parents.append(np.concatenate([path[:1], path[:-1]])[shared:])
            self.nodes[row], previous_row, node_count = path, rows[row], node_count + new_count
        self.owner_N, self.position_N, self.parent_N = map(np.concatenate, (owners, positions, parents))


def _buckets(tree: _Tree) -> tuple[list[Bucket], NDArray[np.int64]]:
    """Return rows that own tokens, in buckets whose shortest row is at least three quarters as long as the longest, and the
    tokens in the order in which the buckets compute them."""
    own_by_row = {int(row): np.flatnonzero(tree.owner_N == row) for row in np.unique(tree.owner_N)}
    rows = sorted(own_by_row, key=lambda row: (-len(tree.nodes[row]), row))
    buckets, computed = [], []
    while rows:
        longest = len(tree.nodes[rows[0]])
        bucket_rows = [row for row in rows if 4 * len(tree.nodes[row]) >= 3 * longest]
        rows = rows[len(bucket_rows) :]
        padded = np.zeros((len(bucket_rows), longest), np.int64)
        for index, row in enumerate(bucket_rows):
            padded[index, : len(tree.nodes[row])] = tree.nodes[row]
        own_positions = [index * longest + tree.position_N[own_by_row[row]] for index, row in enumerate(bucket_rows)]
        flat = torch.from_numpy(padded.reshape(-1))
        buckets.append(Bucket(len(bucket_rows), flat, torch.from_numpy(np.concatenate(own_positions))))
        computed += [own_by_row[row] for row in bucket_rows]
    return buckets, np.concatenate(computed)
