"""The embedded inference engine: continuous batching with the key-value cache kept across turns.

Every step is one forward pass over whatever tokens are new, side by side: one token for a rollout in the middle of a turn,
a whole prompt or observation for one that starts the next. There is no prefill phase that others wait for, and no padding.

Dimensions: N new tokens, S slots (live rollouts), T positions, L layers, K experts a token, V vocabulary.
Leaves out: prefix sharing between the rollouts of a group, and weight swaps between two steps of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from composer_nb.harness.policy import Completion, Request, Trace
from composer_nb.trainer.attention import cached_attention
from composer_nb.trainer.model import Model


@dataclass(slots=True)
class _Slot:
    """One live rollout."""

    index: int
    pending: list[int]
    """Tokens not yet forwarded."""
    length: int = 0
    """Tokens forwarded so far, those in the cache."""
    max_tokens: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    waiting: bool = False
    """The turn has ended; the next request is not here yet."""


class Engine:
    """Samples turns from a model. `temperature` 0 is greedy; log-probs are always those of temperature 1 or of the
    temperature sampled at, whichever is drawn from.

    Raises ValueError for a request that can not fit `max_length`, RuntimeError when more rollouts are alive than slots.
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
    ) -> None:
        c = model.config
        if max_length > c.max_position_embeddings:
            raise ValueError(
                f"max_length={max_length} exceeds model.max_position_embeddings={c.max_position_embeddings}; "
                "lower limits.tokens or raise it"
            )
        if temperature < 0:
            raise ValueError(f"temperature={temperature} must not be negative; 0 is greedy")
        self.model, self.stop, self.max_length = model, stop, max_length
        self.temperature, self.version = temperature, version
        self.random = torch.Generator().manual_seed(seed % (1 << 63))  # of any size
        device = model.embed.device
        shape = (c.num_hidden_layers, slots, c.num_key_value_heads, max_length, c.head_dim)
        self._k = torch.zeros(shape, device=device)
        self._v = torch.zeros_like(self._k)
        routed = (slots, max_length, c.num_hidden_layers)
        self._routes = np.zeros((*routed, c.num_experts_per_tok), np.uint8)
        self._gates = np.zeros((*routed, c.num_experts_per_tok), np.float32)
        self._margins = np.zeros(routed, np.float32)
        self._free = list(range(slots))[::-1]
        self._live: dict[int, _Slot] = {}
        self.forwarded = 0
        self.sampled = 0
        if c.num_experts > 256:
            raise ValueError("the engine stores routes as uint8: at most 256 experts")

    @property
    def capacity(self) -> int:
        return self._k.shape[1]

    def submit(self, request: Request) -> None:
        """Begins a turn. A request that is refused changes nothing."""
        known = self._live.get(request.rollout)
        if known is not None and not known.waiting:
            raise ValueError(f"rollout {request.rollout} is in the middle of a turn already")
        if known is None and not self._free:
            raise RuntimeError(f"more than engine.slots={self.capacity} rollouts are alive")
        pending = [*(known.pending if known else ()), *request.token_ids]
        if not pending or request.max_tokens < 1:
            raise ValueError(
                f"rollout {request.rollout} has no token to go on from, or no room for one: "
                f"{len(pending)} tokens, max_tokens={request.max_tokens}"
            )
        needed = (known.length if known else 0) + len(pending) + request.max_tokens
        if needed > self.max_length:
            raise ValueError(f"the turn may reach {needed} tokens, past limits.tokens={self.max_length}")
        slot = known or self._live.setdefault(request.rollout, self._new_slot())
        slot.pending = pending
        slot.max_tokens, slot.sampled, slot.logprobs, slot.waiting = request.max_tokens, [], [], False

    def _new_slot(self) -> _Slot:
        slot = _Slot(self._free.pop(), [])
        for record in (self._routes, self._gates, self._margins):
            record[slot.index] = 0  # what is not forwarded is the same on every replay: nothing
        return slot

    def step(self) -> list[Completion]:
        active = [(rollout, slot) for rollout, slot in sorted(self._live.items()) if not slot.waiting]
        if not active:
            return []
        logits_SV = self._forward([slot for _, slot in active])
        tokens, logprobs = self._sample(logits_SV)
        done = []
        for (rollout, slot), token, logprob in zip(active, tokens, logprobs, strict=True):
            slot.pending = [token]
            slot.sampled.append(token)
            slot.logprobs.append(logprob)
            if token in self.stop or len(slot.sampled) >= slot.max_tokens:
                slot.waiting = True
                versions = [self.version] * len(slot.sampled)
                done.append(
                    Completion(
                        rollout=rollout,
                        token_ids=slot.sampled,
                        logprobs=slot.logprobs,
                        policy_versions=versions,
                    )
                )
        self.sampled += len(active)
        return done

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submits `requests`, runs until all their turns have ended, and returns them in the order of the requests.

        Raises ValueError while turns that were submitted one by one are under way: their ends would be lost.
        """
        if busy := [rollout for rollout, slot in self._live.items() if not slot.waiting]:
            raise ValueError(f"the turns of rollouts {busy} are under way; finish them with step()")
        for request in requests:
            self.submit(request)
        done: dict[int, Completion] = {}
        while len(done) < len(requests):
            done |= {completion.rollout: completion for completion in self.step()}
        return [done[request.rollout] for request in requests]

    def release(self, rollout: int) -> Trace:
        slot = self._live.pop(rollout, None)
        if slot is None:  # its first request was refused
            return Trace()
        self._free.append(slot.index)
        total = slot.length + len(slot.pending)
        return Trace(
            routes=self._routes[slot.index, :total].copy(),
            gates=self._gates[slot.index, :total].copy(),
            margins=self._margins[slot.index, :total].copy(),
            route_valid=np.arange(total) < slot.length,
        )

    @torch.no_grad()
    def _forward(self, slots: list[_Slot]) -> Tensor:
        """Logits [S, V] after the last pending token of each slot; all pending tokens go to the cache."""
        counts = np.array([len(slot.pending) for slot in slots])
        row_N = np.repeat([slot.index for slot in slots], counts)
        position_N = np.concatenate([np.arange(slot.length, slot.length + len(slot.pending)) for slot in slots])
        device = self.model.embed.device
        ids_N = torch.tensor([token for slot in slots for token in slot.pending], device=device)
        row, position = torch.from_numpy(row_N).to(device), torch.from_numpy(position_N).to(device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._k[layer].transpose(1, 2).index_put_((row, position), k.float())
            self._v[layer].transpose(1, 2).index_put_((row, position), v.float())
            return cached_attention(q.float(), self._k[layer], self._v[layer], row, position).to(q.dtype)

        hidden_ND, routings = self.model.trunk(ids_N, position, attend)
        self._routes[row_N, position_N] = torch.stack([r.experts_NK for r in routings], 1).cpu().numpy()
        self._gates[row_N, position_N] = torch.stack([r.gates_NK for r in routings], 1).float().cpu().numpy()
        self._margins[row_N, position_N] = torch.stack([r.margin_N for r in routings], 1).cpu().numpy()
        for slot in slots:
            slot.length += len(slot.pending)
            slot.pending = []
        self.forwarded += len(row_N)
        last = torch.from_numpy(np.cumsum(counts) - 1).to(device)
        return F.linear(hidden_ND[last], self.model.output_weight).float()

    def _sample(self, logits_SV: Tensor) -> tuple[list[int], list[float]]:
        """One token a row with its log-probability. Sampling is by the Gumbel trick, which needs one random number an
        entry and no cumulative sums."""
        if self.temperature == 0:
            logprob_SV = logits_SV.log_softmax(-1)
            token_S = logprob_SV.argmax(-1)
        else:
            logprob_SV = (logits_SV / self.temperature).log_softmax(-1)
            uniform = torch.rand(logprob_SV.shape, generator=self.random).to(logits_SV.device)
            token_S = (logprob_SV - (-uniform.clamp_min(1e-20).log()).log()).argmax(-1)
        chosen_S = logprob_SV.gather(1, token_S[:, None])[:, 0]
        return token_S.tolist(), chosen_S.tolist()
