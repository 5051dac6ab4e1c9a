"""The embedded inference engine: continuous batching with the key-value cache kept across turns.

Every step is one forward pass over new tokens, packed without padding. It takes one token of each rollout, and spends the rest of
its budget on prompts and observations, those of users first. Thus a long prompt does not delay rollouts that decode (chunked
prefill: Agrawal et al. 2023, arXiv 2308.16369). Rollouts with the same tokens so far are forwarded once, as in a group until its
first differing choice; each has its own copy of the cache. A new rollout takes over the cache of the longest beginning that it
shares with one before it under the same weights, such as a system text (prefix caching: Zheng et al. 2023, arXiv 2312.07104).

With the compiled kernel of float32 models, the record of a rollout does not depend, to the last bit, on other rollouts or on how
its prompt was split.

Each rollout has its own random stream. Its draws depend on the engine's seed and the rollout's number, not on other rollouts. At
the next step, a request of higher priority takes the place of a rollout, whose cache is kept in memory and restored later.
Weights can be swapped between steps: the cache stays, and each token records the version that drew it.

Dimensions: N new tokens of all slots, U of them distinct, S slots (live rollouts), T positions, L layers, K experts per token,
V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.policy import (
    ATTEMPT_STRIDE,
    Completion,
    Request,
    SampledToken,
    Trace,
    route_checks,
    route_dtype,
)
from composer_nb.kernels.attention.cached import cached_attention
from composer_nb.kernels.decode import DecodeWeights, LayerWeights, NewTokens, decode, project
from composer_nb.kernels.linear import linear
from composer_nb.kernels.tiles import Matrix, matrix, panels
from composer_nb.kernels.triton_runtime import fused
from composer_nb.trainer.graphs import MOST_TOKENS, Graphs, capturable
from composer_nb.trainer.models.transformer import Layer, Model, stacked
from composer_nb.trainer.models.variants import CacheReset, Transition

# Of the forwarded tokens: final hidden states [U, D], experts [U, L, K], gates [U, L, K] and margins [U, L].
Forwarded = tuple[Tensor, NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]

# Size of the largest model whose weights are copied into the layout of the compiled kernel.
PACKED_BYTES = 2 << 30
# Size of the largest model whose weights fit a processor's cache. A larger one is kept as bfloat16 or int8 if that is lossless,
# as for published weights and `engine.numerics=int8`: a step reads a half or a quarter of the memory, with the same result.
CACHED_BYTES = 16 << 20
# Tokens from which on a shared beginning is copied.
SHARED_TOKENS = 16


@dataclass(slots=True)
class Slot:
    """One live rollout.

    Attributes:
        uniform: Random number for the token at each position.
        request: The turn under way.
        sampling: Temperature, top_p, top_k and min_p of the turn.
        pending: Tokens not yet forwarded.
        index: Place in the cache; -1: the slot has not had its first step, or made room for another.
        away: Copy of the slot's cache and records while it has no place.
        past: Equal for slots that hold the same tokens from the same steps.
        length: Number of tokens forwarded so far, which are in the cache.
        tokens: The forwarded tokens. Those after `length` are drafts that were refused.
        weights: Number of the engine's weights when the rollout began.
        recorded: Number of tokens with records of an earlier version, which stay while the cache is computed again.
        waiting: Whether the turn has ended and the next request has not come.
    """

    uniform: list[float]
    request: Request
    sampling: tuple[float, float, int, float] = (1.0, 1.0, 0, 0.0)
    pending: list[int] = field(default_factory=list)
    index: int = -1
    away: tuple[Tensor | NDArray[Any], ...] = ()
    past: int = 0
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    weights: int = 0
    recorded: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    waiting: bool = False

    @property
    def stored(self) -> int:
        """Number of tokens with records."""
        return max(self.length, self.recorded)


class Engine:
    """Samples turns from a model. Log-probabilities are those of the sampled distribution; a greedy turn (`temperature` 0) has
    those of temperature 1. `step_tokens`: maximum number of distinct tokens that a step forwards, at least one per slot.
    `reset_cache` and `transition`: see `EngineSettings`.

    Raises ValueError for a request that cannot fit `max_length`, and RuntimeError if more rollouts are alive than slots.
    """

    def __init__(
        self,
        model: Model,
        *,
        stop: frozenset[int],
        slots: int = 64,
        max_length: int = 256,
        temperature: float = 1.0,
        seed: int = 0,
        version: int = 0,
        step_tokens: int = 4096,
        reset_cache: CacheReset = "new_session",
        transition: Transition = "async",
    ) -> None:
        c = model.config
        if max_length > c.max_position_embeddings:
            raise ValueError(
                f"max_length={max_length} exceeds model.max_position_embeddings={c.max_position_embeddings}; "
                "lower limits.tokens or raise it"
            )
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be finite and not negative; 0 is greedy")
        if step_tokens < slots:
            raise ValueError(f"engine.step_tokens={step_tokens} is below engine.slots={slots}: raise it")
        self.model, self.stop, self.max_length, self.step_tokens = model, stop, max_length, step_tokens
        self._packed = pack(model)
        self.reset_cache, self.transition = reset_cache, transition
        # In a synchronous transition: the weights that wait for the turns under way, and the requests that wait for them.
        self._next: tuple[Model, int] | None = None
        self._held: list[Request] = []
        self.temperature, self.version = temperature, version
        self.seed = seed
        device = model.embed.device
        self.capacity = slots
        graphed = self._packed is None and capturable(model)
        dtype = model.embed.dtype if graphed else torch.promote_types(model.embed.dtype, torch.float32)
        shape = (c.num_hidden_layers, slots + graphed, c.num_key_value_heads, max_length)
        self._k = torch.zeros((*shape, c.head_dim), device=device, dtype=dtype)
        self._v = torch.zeros((*shape, c.value_width), device=device, dtype=dtype)
        self._graphs = Graphs(model, spare=slots) if graphed else None
        routed = (slots, max_length, c.moe_layers)
        self._routes = np.zeros((*routed, c.num_experts_per_tok), route_dtype(c.num_experts))
        self._gates = np.zeros((*routed, c.num_experts_per_tok), np.float32)
        self._margins = np.zeros(routed, np.float32)
        self._checks = np.zeros(routed[:2], np.uint64)
        self._records = self._routes, self._gates, self._margins, self._checks
        self._free = list(range(slots))
        self._live: dict[int, Slot] = {}
        # The last rollout at each place in the cache, which may have ended.
        self._occupants: dict[int, Slot] = {}
        self._pasts = self._weights = 0
        # Number of computed tokens, without those copied from another rollout.
        self.forwarded = 0
        self.sampled = 0

    @property
    def busy(self) -> bool:
        """Whether any turn is under way, or waits for other weights."""
        return self._next is not None or self._decodes

    @property
    def _decodes(self) -> bool:
        return any(not slot.waiting for slot in self._live.values())

    def submit(self, request: Request) -> None:
        """Begin a turn. A refused request changes nothing. Raises ValueError for a rollout that is in a turn, for sampling
        settings or tokens out of range, and for a turn without a token or without room; RuntimeError if rollouts of its
        priority have all slots."""
        slot = self._live.get(request.rollout)
        if slot is not None and not slot.waiting:
            raise ValueError(f"rollout {request.rollout} is in the middle of a turn already")
        same_priority_count = sum(other.request.priority == request.priority for other in self._live.values())
        if slot is None and same_priority_count >= self.capacity:
            raise RuntimeError(f"more than engine.slots={self.capacity} rollouts are alive")
        pending_tokens = [*(slot.pending if slot else ()), *request.token_ids]
        temperature = self.temperature if request.temperature is None else request.temperature
        sampling = temperature, request.top_p, request.top_k, request.min_p
        is_temperature = temperature == 0 or 1e-30 <= temperature <= 1e30  # float32 has the logits divided by it
        if not (is_temperature and 0 < request.top_p <= 1 and request.top_k >= 0 and 0 <= request.min_p <= 1):
            raise ValueError(
                f"temperature={temperature}, top_p={request.top_p}, top_k={request.top_k}, min_p={request.min_p}: "
                "0 or from 1e-30 to 1e30, above 0 up to 1, at least 0, from 0 to 1"
            )
        if not pending_tokens or request.max_tokens < 1:
            raise ValueError(
                f"rollout {request.rollout} has no token to go on from, or no room for one: "
                f"{len(pending_tokens)} tokens, max_tokens={request.max_tokens}"
            )
        vocabulary = self.model.config.vocab_size
        if min(pending_tokens) < 0 or max(pending_tokens) >= vocabulary:
            raise ValueError(f"rollout {request.rollout}: the model reads tokens from 0 to {vocabulary - 1} alone")
        needed_tokens = (slot.length if slot else 0) + len(pending_tokens) + request.max_tokens
        if needed_tokens > self.max_length:
            raise ValueError(f"the turn may reach {needed_tokens} tokens, past limits.tokens={self.max_length}")
        if self._next is not None:
            self._held.append(request)
            return
        if slot is None:
            seed_key = [abs(self.seed), int(self.seed < 0), request.rollout % ATTEMPT_STRIDE]
            uniforms = np.random.default_rng(seed_key).random(self.max_length + 1).tolist()
            slot = self._live[request.rollout] = Slot(uniforms, request)
        slot.request, slot.sampling, slot.pending, slot.waiting = request, sampling, pending_tokens, False
        slot.sampled, slot.logprobs, slot.versions = [], [], []

    def swap(self, model: Model, version: int) -> None:
        """Use other weights from the next step on; in a synchronous transition, once the turns under way have ended.

        Raises ValueError for a model of another configuration.
        """
        if model.config != self.model.config:
            raise ValueError("the weights are of another model than those that the engine runs")
        if self.transition == "sync" and self._decodes:
            self._next = model, version
            return
        self.model, self.version, self._packed = model, version, None  # two packed copies would take twice the memory
        self._packed = pack(model)
        self._weights += 1
        if self._graphs:
            self._graphs = Graphs(model, spare=self.capacity)
        for slot in self._live.values() if self.reset_cache == "all" else ():
            slot.pending = [*slot.tokens[: slot.length], *slot.pending]
            slot.recorded, slot.length, slot.past = slot.stored, 0, 0

    def _end_transition(self) -> None:
        """Swap if no turn is under way any more, and begin what waited for it."""
        if self._next is not None and not self._decodes:
            (model, version), self._next = self._next, None
            self.swap(model, version)
            requests, self._held = self._held, []
            for request in requests:
                self.submit(request)

    def _placed(self) -> list[tuple[int, Slot]]:
        """Return the turns of this step. Rollouts of lower priority, or without a request, make room for others."""
        self._end_transition()
        unplaced = [slot for slot in self._live.values() if slot.index < 0 and not slot.waiting]
        pasts: dict[tuple[int, ...], int] = {}
        for slot in sorted(unplaced, key=lambda slot: slot.request.priority):
            if not self._free:
                placed = [other for other in self._live.values() if other.index >= 0]
                victim = max(placed, key=lambda other: (other.waiting, other.request.priority))
                if not victim.waiting and victim.request.priority <= slot.request.priority:
                    break
                victim.away = self._copy(victim.index, victim.stored)
                self._free.append(victim.index)
                victim.index = -1
            slot.index = self._free.pop(0)  # that has been free longest: others may still be of use
            if not slot.stored:
                self._begin(slot)
                slot.past = pasts.setdefault(tuple(slot.tokens), self._pasts + len(pasts) + 1) if slot.tokens else 0
            for record in self._records:
                record[slot.index] = 0  # tokens that are not forwarded have the same record on every replay
            for part, copy in zip(self._parts(slot.index, slot.stored), slot.away, strict=False):
                part[:] = copy
            slot.away, self._occupants[slot.index] = (), slot
        self._pasts += len(pasts)
        return [pair for pair in sorted(self._live.items()) if pair[1].index >= 0 and not pair[1].waiting]

    def _begin(self, slot: Slot) -> None:
        """Take over the records and the cache of the longest beginning that a new rollout shares with one in the cache, without
        its last token, whose logits are needed."""
        slot.weights, best_index, best_length = self._weights, 0, 0
        for index, other in self._occupants.items():
            length = min(other.length, len(slot.pending) - 1)
            current = other.weights == self._weights or self.reset_cache == "none"
            alike = current and other.tokens[:SHARED_TOKENS] == slot.pending[:SHARED_TOKENS]
            if alike and length > best_length:
                differs = np.array(slot.pending[:length]) != np.array(other.tokens[:length])
                shared = int(differs.argmax()) if differs.any() else length
                best_index, best_length = (index, shared) if shared > best_length else (best_index, best_length)
        if best_length >= SHARED_TOKENS:
            slot.away = self._copy(best_index, best_length)
            slot.length, slot.tokens = best_length, slot.pending[:best_length]
            slot.pending = slot.pending[best_length:]

    def _copy(self, index: int, length: int) -> tuple[Tensor | NDArray[Any], ...]:
        """Return a copy of a rollout's part of the records and of the cache."""
        return tuple(x.clone() if isinstance(x, Tensor) else x.copy() for x in self._parts(index, length))

    def _parts(self, index: int, length: int) -> Iterator[Any]:
        """Yield a rollout's part of the records and of the cache."""
        yield from (record[index, :length] for record in self._records)
        yield from (cache[:, index, :, :length] for cache in (self._k, self._v))

    def step(self) -> list[Completion]:
        """Forward pending tokens once, and return the turns that end with the tokens drawn from them."""
        active = self._placed()
        if not active:
            return []
        logits_SV = self._forward([slot for _, slot in active])
        return self._drawn([pair for pair in active if not pair[1].pending], logits_SV)

    def _drawn(self, active: Sequence[tuple[int, Slot]], logits_SV: Tensor) -> list[Completion]:
        """Draw the next token of each turn, and return the turns that end with it."""
        slots, completions = [slot for _, slot in active], []
        logits_SV = _masked(logits_SV, slots)
        tokens, logprobs = sample(logits_SV, slots)
        for (rollout, slot), logits_V, token, logprob in zip(active, logits_SV, tokens, logprobs, strict=True):
            slot.pending = [token]
            slot.sampled.append(token)
            slot.logprobs.append(logprob)
            slot.versions.append(self.version)
            if slot.request.on_token:
                slot.request.on_token(SampledToken(token, logprob, self.version, _top(logits_V, slot)))
            if token in self.stop or len(slot.sampled) >= slot.request.max_tokens:
                slot.waiting = True
                ids, versions = slot.sampled, slot.versions
                turn = Completion(rollout=rollout, token_ids=ids, logprobs=slot.logprobs, policy_versions=versions)
                completions.append(turn)
        self.sampled += len(active)
        return completions

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit `requests`, run until all their turns have ended, and return these in the order of the requests.

        Raises ValueError while turns that were submitted one by one are under way, since their completions would be lost.
        """
        if busy := [rollout for rollout, slot in self._live.items() if not slot.waiting]:
            raise ValueError(f"the turns of rollouts {busy} are under way; finish them with step()")
        for request in requests:
            self.submit(request)
        completions: dict[int, Completion] = {}
        while len(completions) < len(requests):
            completions |= {completion.rollout: completion for completion in self.step()}
        return [completions[request.rollout] for request in requests]

    def release(self, rollout: int) -> Trace:
        """End a rollout, free its slot, and return the trace of its tokens; an empty one if its first request was refused."""
        self._held = [request for request in self._held if request.rollout != rollout]
        slot = self._live.pop(rollout, None)
        if slot is None:  # its first request was refused
            return Trace()
        token_count = slot.length + len(slot.pending)
        cached_parts = slot.away or tuple(self._parts(slot.index, slot.stored))
        if slot.index >= 0:
            self._free.append(slot.index)
        self._end_transition()  # without turns under way, nobody may step any more
        records = [np.zeros((token_count, *record.shape[2:]), record.dtype) for record in self._records]
        for record, part in zip(records, cached_parts if slot.stored else (), strict=False):
            record[: slot.stored] = part
        record_names = "routes", "gates", "margins", "checks"
        return Trace(**dict(zip(record_names, records, strict=True)), route_valid=np.arange(token_count) < slot.stored)

    @torch.no_grad()
    def _forward(self, slots: list[Slot]) -> Tensor:
        """Forward pending tokens into the cache. Return the logits [S, V] of each slot that has no pending token left."""
        leaders, leader_S = self._alike(slots)
        sizes = self._sizes([slots[row] for row in leaders])
        counts = sizes[leader_S]
        row_N = np.repeat([slot.index for slot in slots], counts)
        position_N = np.concatenate([slot.length + np.arange(count) for slot, count in zip(slots, counts, strict=True)])
        starts = np.cumsum(sizes) - sizes
        source_N = np.concatenate([np.arange(starts[leader], starts[leader] + sizes[leader]) for leader in leader_S])
        ids_U = np.concatenate([slots[row].pending[:size] for row, size in zip(leaders, sizes, strict=True)])
        slot_U = np.repeat([slots[row].index for row in leaders], sizes)
        position_U = np.empty(len(slot_U), np.int64)
        position_U[source_N] = position_N
        new = NewTokens(ids_U, position_U, slot_U, row_N, position_N, source_N)
        hidden_UD, routes_ULK, gates_ULK, margins_UL = self._hidden(new)
        is_done = sizes == [len(slots[row].pending) for row in leaders]
        last_S = torch.from_numpy((starts + sizes - 1)[is_done]).to(hidden_UD.device)
        # Tokens keep the records of the version that they were first forwarded with: it sampled what follows them.
        unrecorded_N = position_N >= np.repeat([slot.recorded for slot in slots], counts)
        at, source_N = (row_N[unrecorded_N], position_N[unrecorded_N]), source_N[unrecorded_N]
        routes_NLK = routes_ULK[source_N].astype(self._routes.dtype)
        self._routes[at] = routes_NLK
        self._checks[at] = route_checks(at[1], ids_U[source_N], routes_NLK)
        self._gates[at] = gates_ULK[source_N]
        self._margins[at] = margins_UL[source_N]
        for slot, count in zip(slots, counts.tolist(), strict=True):
            slot.tokens[slot.length :] = slot.pending[:count]
            slot.length, slot.pending = slot.length + count, slot.pending[count:]
        self.forwarded += len(slot_U)
        row_S = torch.from_numpy((np.cumsum(is_done) - 1)[leader_S[is_done[leader_S]]]).to(hidden_UD.device)
        self._hidden_UD, self._last_S = hidden_UD, last_S[row_S]
        return self._logits(hidden_UD[last_S]).index_select(0, row_S)

    def _sizes(self, slots: Sequence[Slot]) -> NDArray[np.int64]:
        """Return the number of pending tokens that each slot forwards: one, and more in order of priority up to the budget."""
        sizes, spare_tokens = np.ones(len(slots), np.int64), self.step_tokens - len(slots)
        for row in sorted(range(len(slots)), key=lambda row: slots[row].request.priority):
            extra_tokens = min(len(slots[row].pending) - 1, spare_tokens)
            sizes[row], spare_tokens = 1 + extra_tokens, spare_tokens - extra_tokens
        return sizes

    def _hidden(self, new: NewTokens) -> Forwarded:
        """Forward tokens into the cache: with the compiled kernel on a CPU, in a graph, or with the model's own pass, on any
        device and in any dtype."""
        if self._packed is not None:
            c, k, v = self.model.config, self._k.numpy(), self._v.numpy()
            hidden_UD, experts, gates, margins = decode(self._packed, new, k, v, c.num_experts_per_tok, c.rms_norm_eps)
            return torch.from_numpy(hidden_UD), experts, gates, margins
        if self._graphs and len(new.row_N) <= MOST_TOKENS and capturable(self.model):
            hidden, *routed = self._graphs(self._pass, new)
        else:
            hidden, *routed = self._pass(*(torch.from_numpy(part).to(self.model.embed.device) for part in new))
        experts, gates, margins = (part.cpu().numpy() for part in routed)
        return hidden, experts, gates, margins

    @torch.no_grad()
    def _logits(self, hidden_SD: Tensor) -> Tensor:
        """Return logits [S, V], in float32 or wider."""
        if self._packed is not None:
            return torch.from_numpy(project(hidden_SD.numpy(), self._packed.output, self.model.config.vocab_size))
        logits_SV = linear(hidden_SD, self.model.output_weight)
        return logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))

    def _pass(
        self, ids_U: Tensor, position_U: Tensor, slot_U: Tensor, row_N: Tensor, position_N: Tensor, source_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Forward tokens into the cache. Return hidden states [U, D], experts and gates [U, L, K], and margins [U, L]."""
        dtype = self._k.dtype

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            self._k[layer].transpose(1, 2).index_put_((row_N, position_N), k.to(dtype).index_select(0, source_N))
            self._v[layer].transpose(1, 2).index_put_((row_N, position_N), v.to(dtype).index_select(0, source_N))
            return cached_attention(q.to(dtype), self._k[layer], self._v[layer], slot_U, position_U, scale).to(q.dtype)

        hidden_UD, routings = self.model.trunk(ids_U, position_U, attend)
        shape = len(ids_U), self.model.config.num_experts_per_tok
        experts = stacked([r.experts_NK for r in routings], *shape)
        gates = stacked([r.gates_NK for r in routings], *shape).float()
        margins = stacked([r.margin_N for r in routings], len(ids_U)).float()
        return hidden_UD, experts, gates, margins

    def _alike(self, slots: list[Slot]) -> tuple[list[int], NDArray[np.int64]]:
        """Return the rows of the slots to forward (leaders), and each slot's leader: one with the same cached tokens, from the
        same steps, and the same pending ones. Mark the slots' new pasts."""
        leader_of_past: dict[tuple[int, ...], int] = {}
        leaders: list[int] = []
        leader_S = np.empty(len(slots), np.int64)
        for row, slot in enumerate(slots):
            leader_S[row] = leader_of_past.setdefault((slot.past, slot.length, *slot.pending), len(leaders))
            if leader_S[row] == len(leaders):
                leaders.append(row)
        for slot, leader in zip(slots, leader_S.tolist(), strict=True):
            slot.past = self._pasts + 1 + leader
        self._pasts += len(leaders)
        return leaders, leader_S


def _masked(logits_SV: Tensor, slots: Sequence[Slot]) -> Tensor:
    """Mask the tokens that may not follow in each turn."""
    masks = [(row, slot.request.allowed(slot.sampled)) for row, slot in enumerate(slots) if slot.request.allowed]
    logits_SV = logits_SV.clone() if masks else logits_SV
    for row, mask in masks:
        allowed = torch.from_numpy(mask).to(logits_SV.device)
        logits_SV[row, len(allowed) :] = -torch.inf
        logits_SV[row, : len(allowed)].masked_fill_(~allowed[: logits_SV.shape[1]], -torch.inf)
    return logits_SV


def sample(logits_SV: Tensor, slots: Sequence[Slot], ahead: int = 0) -> tuple[list[int], list[float]]:
    """Return one token per slot, `ahead` of the next one, and log-probabilities. Slots that draw alike form one batch."""
    samplings, uniform_S = {slot.sampling for slot in slots}, [slot.uniform[slot.length + ahead] for slot in slots]
    if len(samplings) == 1:
        return _draw(logits_SV, uniform_S, *samplings.pop())
    tokens, logprobs = [0] * len(slots), [0.0] * len(slots)
    for sampling in samplings:
        rows = [row for row, slot in enumerate(slots) if slot.sampling == sampling]
        draws = _draw(logits_SV[rows], [uniform_S[row] for row in rows], *sampling)
        for row, token, logprob in zip(rows, *draws, strict=True):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def _draw(logits_SV: Tensor, uniform_S: list[float], *sampling: Any) -> tuple[list[int], list[float]]:
    """Return the first token of each row whose cumulative probability exceeds the row's random number, and log-probabilities."""
    logprob_SV = _logprobs(logits_SV, *sampling)
    if sampling[0] == 0:
        token_S = logprob_SV.argmax(-1)
    else:
        below_SV = logprob_SV.double().exp().cumsum(-1)
        goal_S1 = torch.tensor(uniform_S, dtype=torch.float64, device=logits_SV.device)[:, None] * below_SV[:, -1:]
        token_S = torch.searchsorted(below_SV, goal_S1, right=True)[:, 0].clamp_max(logits_SV.shape[1] - 1)
    logprob_S = logprob_SV.gather(1, token_S[:, None])[:, 0]
    return token_S.tolist(), logprob_S.tolist()


def _top(logits_V: Tensor, slot: Slot) -> list[tuple[int, float]]:
    """Return the most probable tokens and their log-probabilities, as many as asked for and only tokens that can be drawn."""
    if not slot.request.top:
        return []
    best = _logprobs(logits_V[None], *slot.sampling)[0].topk(min(slot.request.top, len(logits_V)))
    return [pair for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True) if pair[1] > -np.inf]


def _logprobs(logits_SV: Tensor, temperature: float, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Return log-probabilities of the sampled distribution, or of temperature 1 for a greedy turn. `min_p` (Nguyen et al. 2024,
    arXiv 2407.01082) applies first, then `top_k`, then `top_p`."""
    if temperature == 0:
        return logits_SV.log_softmax(-1)
    logprob_SV = (logits_SV / temperature).log_softmax(-1)
    if min_p > 0:
        least_S1 = logprob_SV.amax(-1, keepdim=True) + math.log(min_p)
        logprob_SV = logprob_SV.masked_fill(logprob_SV < least_S1, -torch.inf).log_softmax(-1)
    if 0 < top_k < logprob_SV.shape[-1]:
        order_SV = logprob_SV.sort(stable=True, dim=-1, descending=True).indices
        logprob_SV = logprob_SV.scatter(1, order_SV[:, top_k:], -torch.inf).log_softmax(-1)
    return nucleus(logprob_SV, top_p) if top_p < 1 else logprob_SV


def nucleus(logprob_SV: Tensor, top_p: float) -> Tensor:
    """Return log-probabilities over the fewest tokens that together have `top_p` (Holtzman et al. 2020, arXiv 1904.09751)."""
    order = logprob_SV.sort(stable=True, dim=-1, descending=True)
    above_SV = order.values.exp().cumsum(-1) - order.values.exp()
    nucleus_SV = torch.zeros_like(logprob_SV, dtype=torch.bool).scatter_(1, order.indices, above_SV < top_p)
    return logprob_SV.masked_fill(~nucleus_SV, -torch.inf).log_softmax(-1)


def pack(model: Model) -> DecodeWeights | None:
    """Return the weights of a float32 model on a CPU, copied into the layout of `decode`; None if that cannot run it."""
    c = model.config
    is_float32_on_cpu = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    is_supported = fused("decode") and not c.latent and c.norm_topk_prob and model.kernels.recipe == "bf16"
    has_float32_router = model.router_dtype in (None, torch.float32)
    weight_bytes = sum(4 * p.numel() for p in model.parameters())
    if not (is_float32_on_cpu and has_float32_router and is_supported and weight_bytes <= PACKED_BYTES):
        return None

    def array(tensor: Tensor) -> NDArray[np.float32]:
        return np.array(tensor.detach().numpy(), order="C")

    def stacked(matrices: Tensor, bits: int) -> Matrix:
        return matrix(np.stack([panels(array(weight)) for weight in matrices]), bits)

    def single(weight: Tensor, bits: int) -> Matrix:
        return Matrix(*(part[0] for part in stacked(weight.T[None], bits)))

    def packed(layer: Layer, bits: int) -> LayerWeights:
        norms = [layer.q_norm] * c.num_attention_heads + [layer.k_norm] * c.num_key_value_heads if c.qk_norm else []
        parts = (layer.dense_in[None], layer.dense_out[None]) if layer.dense else (layer.w_in, layer.w_out)
        return LayerWeights(
            attention_norm_D=array(layer.attention_norm),
            qkv=single(layer.qkv, bits),
            qkv_bias_F=array(layer.qkv_bias) if c.qkv_bias else np.empty(0, np.float32),
            qk_norm_HC=np.stack([array(norm) for norm in norms]) if norms else np.empty((0, c.head_dim), np.float32),
            o=single(layer.o, bits),
            moe_norm_D=array(layer.moe_norm),
            count=0 if layer.dense else c.num_experts,
            router=single(layer.router if not layer.dense else torch.zeros(1, c.hidden_size), bits),
            w_in=stacked(parts[0], bits),
            w_out=stacked(parts[1], bits),
        )

    def weights(bits: int) -> DecodeWeights:
        return DecodeWeights(
            embed_VD=array(model.embed),
            layers=tuple(packed(layer, bits) for layer in model.layers),
            final_norm_D=array(model.final_norm),
            output=single(model.output_weight, bits),
            rope_P2C=array(model.rope_table(model.embed)),
        )

    for bits in (8, 16) if weight_bytes > CACHED_BYTES else ():
        with suppress(ValueError):
            return weights(bits)
    return weights(32)
