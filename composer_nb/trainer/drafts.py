"""Speculative decoding: a small head drafts the token after the next, and the model checks it in the same step.

    step:   forward  x  d      ──▶ the token y after x is drawn as always; if y is d, a second one is drawn, after d
            head(hidden, last) ──▶ d of the next step, the draft of the token after the last one

Every token is drawn from the model's own logits with the random number of its position. So tokens, log-probabilities and routes
are those of plain decoding, at any temperature (to the last bit with the compiled kernel). A draft only determines whether a step
yields one token or two. It is also drawn with the random number of its position, so that similar distributions mostly agree.

The head is a multi-token prediction head without attention, since the hidden state of a token already encodes its context
(DeepSeek-V3, arXiv 2412.19437, §2.2; EAGLE, arXiv 2401.15077). It learns from the model's logits (self-distillation), on a frozen
model (`train_draft`) and optionally jointly with it (`Joint`). Later versions of the weights can use the same head: drafts are
guesses, of which fewer are then correct.

Dimensions: N tokens, S slots, D width, H inner width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from composer_nb.harness.policy import Completion
from composer_nb.trainer.engine import Engine, Slot, sample
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.transformer import Model, PackedRows

# Path of a head in the folder of its checkpoint.
FILE = Path("draft", "head.safetensors")
# Maximum tokens of an optimizer step.
TOKENS = 4096
# Largest learning rate of a head that is trained by itself.
LR = 2e-3


class DraftHead(nn.Module):
    """Predicts the token after `next_N` from the final hidden state of the token before it, with the model's own embedding and
    output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed_norm, self.hidden_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.join = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, model: Model, hidden_ND: Tensor, next_N: Tensor) -> Tensor:
        """Return logits [N, V]."""
        embedded_ND = self.embed_norm(F.embedding(next_N, model.embed).float())
        x_ND = hidden_ND.float() + self.join(torch.cat([embedded_ND, self.hidden_norm(hidden_ND.float())], -1))
        gate_NH, up_NH = self.gate_up(self.norm(x_ND)).chunk(2, -1)
        x_ND = x_ND + self.down(F.silu(gate_NH) * up_NH)
        return F.linear(x_ND, model.output_weight.float())


def train_draft(model: Model, rows: Sequence[Sequence[int]], steps: int, *, seed: int = 0) -> DraftHead:
    """Train a head on rows of tokens, as the model reads and writes them, with the mean of KL(model ‖ head) as loss. The model is
    unchanged. Raises ValueError if no row has three tokens."""
    rows = [row[: model.config.max_position_embeddings] for row in rows if len(row) > 2]
    if not rows:
        raise ValueError("a draft learns from rows of at least 3 tokens, and there is none")
    rng, model = np.random.default_rng(seed), model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = DraftHead(model.config.hidden_size).to(model.embed.device)
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.0)
    row_numbers = chain.from_iterable(rng.permutation(len(rows)).tolist() for _ in count())
    step_tokens = min(TOKENS, sum(map(len, rows)))
    for step in range(steps):
        batch, token_count = list[Sequence[int]](), 0
        while token_count < step_tokens:
            batch.append(rows[next(row_numbers)])
            token_count += len(batch[-1])
        loss, _ = divergence(model, head, batch)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 10, 2 * (1 - step / steps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False)


@dataclass(eq=False)
class Joint:
    """A head that learns beside its model in supervised training (`supervised.Beside`): first on the model of step `begin`, which
    is frozen meanwhile, then jointly with it (Composer 2, arXiv 2603.24477, §3.1). `weight` times the mean of KL(model ‖ head) is
    added to the loss. The model's distribution is a constant target. The gradient reaches the model through the head's input and
    through the model's embedding and output (as in DeepSeek-V3, whose targets are tokens)."""

    model: Model
    rows: Sequence[Sequence[int]]
    ranks: Ranks
    begin: int
    steps: int
    weight: float
    seed: int
    head: DraftHead | None = None
    _optimizer: FlatOptimizer = field(init=False)

    def at(self, step: int) -> Self | None:
        if step < self.begin:
            return None
        if self.head is None:
            self._take(train_draft(self.model, self.rows, self.steps, seed=self.seed))
            self.model.requires_grad_(True)
            if not self.ranks.first:
                self._optimizer.weights.zero_()
            self.ranks.sum_(self._optimizer.weights)  # the first rank's
        return self

    def loss(self, rows: Sequence[TokenRow]) -> Tensor:
        assert self.head is not None
        return self.weight * divergence(self.model, self.head, [row.token_ids.tolist() for row in rows])[0]

    def update(self, lr: float) -> None:
        self._optimizer.sum_(self.ranks)
        self._optimizer.step(lr, 1.0)
        self._optimizer.zero_()

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs; empty before the first step."""
        return {f"draft_{name}": value for name, value in self._optimizer.state().items()} if self.head else {}

    def load(self, state: Mapping[str, Any]) -> None:
        if own_state := {name.removeprefix("draft_"): state[name] for name in state if name.startswith("draft_")}:
            self._take(DraftHead(self.model.config.hidden_size).to(self.model.embed.device))
            self._optimizer.load(own_state)

    def _take(self, head: DraftHead) -> None:
        self.head = head.requires_grad_(True)
        self._optimizer = FlatOptimizer(head)


def add_draft(
    model: Model,
    rows: Sequence[Sequence[int]],
    steps: int,
    checkpoint: Path,
    *,
    seed: int = 0,
    head: DraftHead | None = None,
) -> tuple[float, int]:
    """Train a head, or take a given one, and write it beside the model's checkpoint. Return how often it predicts the model's
    most probable token, and on how many rows: the last twentieth, held out from its training here."""
    held_out = max(len(rows) // 20, 1)
    head = head or train_draft(model, rows[:-held_out] or rows, steps, seed=seed)
    save_draft(head, checkpoint)
    with torch.no_grad():
        return divergence(model, head, rows[-held_out:])[1], held_out


def divergence(model: Model, head: DraftHead, rows: Sequence[Sequence[int]]) -> tuple[Tensor, float]:
    """Return the mean of KL(model ‖ head), in nats per token, and how often the most probable tokens of both are equal. The
    model's distribution has no gradient."""
    device = model.embed.device
    ids_N = torch.tensor([token for row in rows for token in row], device=device)
    packed = PackedRows.of_lengths([len(row) for row in rows], model.config, device)
    hidden_ND, _ = model.trunk(ids_N, packed.position_N, packed.attend)
    with torch.no_grad():
        model_NV = F.linear(hidden_ND, model.output_weight).float().log_softmax(-1)
    place_N = torch.nonzero(packed.position_N[1:] > 0)[:, 0]  # their next token is in the same row
    head_NV = head(model, hidden_ND[place_N], ids_N[place_N + 1]).log_softmax(-1)
    agreement = (head_NV.argmax(-1) == model_NV[place_N + 1].argmax(-1)).float().mean()
    return F.kl_div(head_NV, model_NV[place_N + 1], log_target=True, reduction="batchmean"), float(agreement)


def rows_of(run: Path) -> list[list[int]]:
    """Return the tokens of all stored rollouts of a run, one row per segment. Raises ValueError if there are none."""
    rows = list[list[int]]()
    for file in sorted((run / "rollouts").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            segment_ends = np.cumsum(row.get("segments") or [len(row["token_ids"])])
            rows += [part.tolist() for part in np.split(np.array(row["token_ids"], np.int64), segment_ends[:-1])]
    if not any(rows):
        raise ValueError(
            f"--rollouts {run}: holds no rollouts with tokens; give a run, or what composer-nb serve --record wrote"
        )
    return rows


def save_draft(head: DraftHead, checkpoint: Path) -> None:
    """Write a head into the folder of its model."""
    (checkpoint / FILE).parent.mkdir(exist_ok=True)
    save_file(head.state_dict(), checkpoint / FILE)


def load_draft(checkpoint: Path, model: Model) -> DraftHead | None:
    """Return the head of a checkpoint, if it has one. Raises ValueError for that of another model."""
    if not (checkpoint / FILE).is_file():
        return None
    head = DraftHead(model.config.hidden_size)
    try:
        head.load_state_dict(load_file(checkpoint / FILE))
    except RuntimeError as error:
        raise ValueError(
            f"{checkpoint / FILE}: no head of this model ({str(error).splitlines()[-1].strip()})"
        ) from None
    return head.requires_grad_(False).to(model.embed.device)


class DraftingEngine(Engine):
    """An engine that draws up to two tokens a step of each turn. While prompts take all of a step's budget, none is drafted."""

    def __init__(self, model: Model, head: DraftHead, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.head = head
        self.proposed = self.accepted = 0
        # Rollout -> draft of the token after its pending one.
        self._drafts: dict[int, int] = {}
        # Drafts of this step.
        self._tested: dict[int, int] = {}

    def step(self) -> list[Completion]:
        """Forward pending tokens with a draft after each, draw after both if the draft comes true, and return the turns that
        end."""
        active = self._placed()
        if not active:
            return []
        self._propose(active)
        logits_SV = self._forward([slot for _, slot in active])
        active = [pair for pair in active if not pair[1].pending]
        tested_rows = [row for row, (rollout, _) in enumerate(active) if rollout in self._tested]
        first_SV, hidden_SD = logits_SV.clone(), self._hidden_UD[self._last_S]
        if tested_rows:
            first_SV[tested_rows] = self._logits(self._hidden_UD[self._last_S[tested_rows] - 1])
        for row in tested_rows:
            active[row][1].length -= 1
        completions = self._drawn(active, first_SV)
        accepted_rows = []
        for row in tested_rows:
            rollout, slot = active[row]
            if slot.pending == [self._tested[rollout]] and not slot.waiting:
                slot.length += 1
                accepted_rows.append(row)
        if rejected_rows := sorted({*tested_rows} - {*accepted_rows}):
            hidden_SD[rejected_rows] = self._hidden_UD[self._last_S[rejected_rows] - 1]
        if accepted_rows:
            completions += self._drawn([active[row] for row in accepted_rows], logits_SV[accepted_rows])
        self.proposed, self.accepted = self.proposed + len(tested_rows), self.accepted + len(accepted_rows)
        self._draft(active, hidden_SD)
        return sorted(completions, key=lambda completion: completion.rollout)

    def _propose(self, active: Sequence[tuple[int, Slot]]) -> None:
        """Add drafts to what is forwarded, as far as the step's budget goes."""
        self._tested, room = {}, self.step_tokens - sum(len(slot.pending) for _, slot in active)
        for rollout, slot in active:
            more = slot.request.max_tokens - len(slot.sampled) > 1 and len(self._tested) < room
            if more and len(slot.pending) == 1 and rollout in self._drafts:
                self._tested[rollout] = self._drafts[rollout]
                slot.pending.append(self._drafts[rollout])

    @torch.no_grad()
    def _draft(self, active: Sequence[tuple[int, Slot]], hidden_SD: Tensor) -> None:
        going = [row for row, (_, slot) in enumerate(active) if not slot.waiting]
        slots = [active[row][1] for row in going]
        self._drafts = {}
        if going:
            pending = torch.tensor([slot.pending[0] for slot in slots], device=hidden_SD.device)
            tokens, _ = sample(self.head(self.model, hidden_SD[going], pending), slots, ahead=1)
            self._drafts = {active[row][0]: token for row, token in zip(going, tokens, strict=True)}
