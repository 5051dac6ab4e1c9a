"""Speculative decoding: a small head drafts the token after the next, and the model checks it in the same step.

    step:   forward  x  d      ──▶ the token y after x is drawn as always; if y is d, a second one is drawn, after d
            head(hidden, last) ──▶ d of the next step, the draft of the token after the last one

Every token is drawn from the model's own logits with the random number of its position. So tokens, log-probabilities and routes
are those of plain decoding, at any temperature (to the last bit with the compiled kernel). A draft only determines whether a step
yields one token or two. It is also drawn with the random number of its position, so that similar distributions mostly agree.

The head is a multi-token prediction head without attention, since the hidden state of a token already encodes its context
(DeepSeek-V3, arXiv 2412.19437, §2.2; EAGLE, arXiv 2401.15077). It learns from the model's logits (self-distillation), on a frozen
model and optionally jointly with it (`HeadTrainer`). Later versions of the weights can use the same head: drafts are
guesses, of which fewer are then correct.

Dimensions: N tokens, S slots, D width, H inner width, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from composer_nb.harness.files import replacing
from composer_nb.harness.policy import Completion
from composer_nb.trainer.engine import Engine, Slot, sample
from composer_nb.trainer.learning.data import TokenRow, deal
from composer_nb.trainer.learning.learner import divergence
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import FlatBatch, forward
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import batch_of, parts_of_rank, rows_of_rank
from composer_nb.trainer.models.transformer import Model

# Path of a head in the folder of its checkpoint.
FILE = Path("draft", "head.safetensors")
# Maximum tokens of an optimizer step.
TOKENS = 4096
# Largest learning rate of a head that is trained by itself.
LR = 2e-3
# Largest norm of its gradient.
CLIP = 1.0


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
        dtype = self.join.weight.dtype
        hidden_ND = hidden_ND.to(dtype)
        embedded_ND = self.embed_norm(F.embedding(next_N, model.embed).to(dtype))
        x_ND = hidden_ND + self.join(torch.cat([embedded_ND, self.hidden_norm(hidden_ND)], -1))
        gate_NH, up_NH = self.gate_up(self.norm(x_ND)).chunk(2, -1)
        x_ND = x_ND + self.down(F.silu(gate_NH) * up_NH)
        return F.linear(x_ND, model.output_weight.to(dtype))


def new_head(model: Model, seed: int) -> DraftHead:
    """Return a head of random weights for `model`, on its device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DraftHead(model.config.hidden_size).to(model.embed.device)


@dataclass(eq=False)
class HeadTrainer:
    """Trains a head: with `distil` for `steps` steps on `rows` and a frozen model, and in supervised training
    (`StagePlan.beside`), if `weight` is above 0, jointly with the model and on the same forward pass, from the step `begin` on,
    in which it is distilled first (Composer 2, arXiv 2603.24477, §3.1). Then `weight` times the mean of KL(model ‖ head) is added
    to the loss. The model's distribution is a constant target. The gradient reaches the model through the head's input and
    through the model's embedding and output (as in DeepSeek-V3, whose targets are tokens).

    Each of the ranks has the whole head. All call the methods with the same rows, and each computes its part."""

    model: Model
    head: DraftHead
    ranks: Ranks = field(default_factory=Ranks)
    rows: Sequence[TokenRow] = ()
    steps: int = 0
    weight: float = 0.0
    begin: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self._optimizer = FlatOptimizer(self.head.requires_grad_(True))

    def distil(self) -> None:
        """Train the head on the model, which does not change. Raises ValueError if no row has three tokens."""
        most = self.model.config.max_position_embeddings
        rows = [row_of(row.token_ids[:most]) for row in self.rows if len(row.token_ids) > 2]
        if not rows:
            raise ValueError("a draft learns from rows of at least 3 tokens, and there is none")
        batches = deal(rows, min(TOKENS, sum(len(row.token_ids) for row in rows)), Random(f"draft {self.seed}"))
        for step, numbers in zip(range(self.steps), batches, strict=False):
            batch = batch_of(self.model, rows_of_rank([rows[number] for number in numbers], self.ranks), self.ranks)
            with torch.no_grad():
                hidden_ND, _ = forward(self.model, batch)
            self._optimizer.zero_()
            loss, drafts = self.loss(batch, hidden_ND)
            loss = loss / self.ranks.sums({"drafts": drafts})["drafts"]
            loss.backward(inputs=list(self.head.parameters()))
            self.update(LR * min(1.0, (step + 1) / 10, 2 * (1 - step / self.steps)))

    def at(self, step: int) -> Self | None:
        """Return this trainer if the head learns jointly with the model in this step."""
        if not self.weight or step < self.begin:
            return None
        if step == self.begin and self.steps:
            self.distil()
        return self

    def loss(self, batch: FlatBatch, hidden_ND: Tensor) -> tuple[Tensor, float]:
        """Return the sum of KL(model ‖ head) over this rank's part of a batch, from its final hidden states, and the number of
        guesses: one for each forwarded token of a row that has one before it."""
        head_NV, model_NV = self.guesses(batch, hidden_ND)
        return (divergence(model_NV, head_NV) * batch.streams_N).sum(), float(batch.streams_N.sum())

    def update(self, lr: float) -> None:
        """Take an optimizer step with the gradients of all ranks."""
        self._optimizer.sum_(self.ranks)
        self._optimizer.step(lr, CLIP)
        self._optimizer.zero_()

    @torch.no_grad()
    def agreement(self, rows: Sequence[TokenRow]) -> float:
        """Return how often the most probable tokens of head and model are equal; NaN without a row of three tokens."""
        sums = {"same": 0.0, "drafts": 0.0}
        for part in parts_of_rank(rows, self.ranks, TOKENS):
            batch = batch_of(self.model, part, self.ranks)
            head_NV, model_NV = self.guesses(batch, forward(self.model, batch)[0])
            sums["same"] += float(((head_NV.argmax(-1) == model_NV.argmax(-1)) * batch.streams_N).sum())
            sums["drafts"] += float(batch.streams_N.sum())
        sums = self.ranks.sums(sums)
        return sums["same"] / sums["drafts"] if sums["drafts"] else math.nan

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {f"draft_{name}": value for name, value in self._optimizer.state().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        own_state = {name.removeprefix("draft_"): state[name] for name in state if name.startswith("draft_")}
        if own_state:  # a checkpoint from before the head joined may have none
            self._optimizer.load(own_state)

    def guesses(self, batch: FlatBatch, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [N, V] of what follows each token of this rank: the head's, from the hidden state of the token
        before, which may be another rank's, and the model's, which have no gradient."""
        whole_ND = batch.gather(hidden_ND) if batch.gather else hidden_ND
        head_NV = self.head(self.model, whole_ND.index_select(0, batch.parent_N), batch.inputs_N).log_softmax(-1)
        with torch.no_grad():
            model_NV = F.linear(hidden_ND, self.model.output_weight).to(head_NV.dtype).log_softmax(-1)
        return head_NV, model_NV


def row_of(token_ids: NDArray[np.int32]) -> TokenRow:
    """Return a row whose tokens all have weight 1."""
    return TokenRow(token_ids, np.ones(len(token_ids), np.float32))


def rows_of(run: Path, files: str = "*.parquet") -> list[TokenRow]:
    """Return the tokens of stored rollouts of a run, one row per segment. Raises ValueError if there are none."""
    rows = list[TokenRow]()
    for file in sorted((run / "rollouts").glob(files)):
        columns = [name for name in ("token_ids", "segments") if name in pq.read_schema(file).names]
        for row in pq.read_table(file, columns=columns).to_pylist():
            segment_ends = np.cumsum(row.get("segments") or [len(row["token_ids"])])
            parts = np.split(np.array(row["token_ids"], np.int32), segment_ends[:-1])
            rows += [row_of(part) for part in parts if len(part)]
    if not rows:
        raise ValueError(f"--rollouts {run}: holds no rollouts with tokens; give a run, or what serve --record wrote")
    return rows


def save_draft(head: DraftHead, checkpoint: Path) -> None:
    """Write a head into the folder of its model."""
    (checkpoint / FILE).parent.mkdir(exist_ok=True)
    with replacing(checkpoint / FILE) as part:
        save_file(head.state_dict(), part)


def load_draft(checkpoint: Path, model: Model) -> DraftHead | None:
    """Return the head of a checkpoint, if it has one. Raises ValueError for that of another model."""
    if not (checkpoint / FILE).is_file():
        return None
    head = DraftHead(model.config.hidden_size)
    try:
        head.load_state_dict(load_file(checkpoint / FILE))
    except RuntimeError as error:
        fault = str(error).splitlines()[-1].strip()
        raise ValueError(f"{checkpoint / FILE}: no head of this model ({fault})") from None
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
