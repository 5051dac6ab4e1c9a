#!/usr/bin/env python3
"""Measures tokens a second of the engine beside `transformers`: `scripts/bench/bench_engine.py [--threads N] [--rounds N]`.
With `--heads STEPS` it compares heads instead (below).

32 conversations of ragged turns with observations between, greedy, with a Qwen3-MoE of 32 million parameters and random weights,
against `generate` with each experts back end. Both keep the cache between turns, and must find the same tokens.

Then the engine with drafts beside the engine without: the example's final model reads and writes as in the evaluation on record,
with a head that learnt from other rollouts of the example; and a dense model of 66 million random weights, one greedy answer at a
time, whose head has learnt these very answers. That is the most that drafts bring there.

`--heads 60`: how many drafts are right if a head learns the distribution of the example's final model, and if it learns the
tokens of the same rows, from the same random weights, in as many steps: on three seeds, from the example's rollouts of RL and
from its demonstrations. The drafts are those of held-out tasks, of which the engine reads what the evaluation on record read.

Sides take turns in each round; a ratio is the median of the rounds' ratios. Tokens are those that were drawn; reading prompts and
observations counts as time: CPU seconds of one thread, seconds by the clock of several.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers

from composer_nb.harness.policy import Request
from composer_nb.harness.rollout import Kind
from composer_nb.trainer.drafts import DraftHead, DraftingEngine, HeadTrainer, new_head, row_of, rows_of
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.data import TokenRow, load_rows
from composer_nb.trainer.learning.packing import FlatBatch
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.transformer import Model, ModelConfig
from scripts.bench.in_turn import in_turn

MOE = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=96,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
DENSE = ModelConfig(
    family="qwen3",
    vocab_size=4096,
    hidden_size=768,
    num_hidden_layers=10,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=2048,
    max_position_embeddings=512,
)
TURNS, ROLLOUTS = 3, 32
EXAMPLE = Path(__file__).parents[2] / "data/example"
READ = (Kind.PROMPT, Kind.OBSERVATION)
Turns = list[list[tuple[list[int], int]]]
"""For each turn, what each rollout reads and how many tokens it draws."""
Tokens = list[list[int]]
"""What each rollout drew."""
Form = Callable[[Turns], Tokens]


def conversations(seed: int, rollouts: int, turns: int, vocabulary: int) -> Turns:
    """Prompts of 20 to 150 tokens, observations of 5 to 60, turns of 8 to 64."""
    rng = np.random.default_rng(seed)

    def turn(least: int, most: int) -> tuple[list[int], int]:
        return rng.integers(0, vocabulary, int(rng.integers(least, most))).tolist(), int(rng.integers(8, 64))

    return [[turn(*span) for _ in range(rollouts)] for span in [(20, 150)] + [(5, 60)] * (turns - 1)]


def ours(model: Model, slots: int) -> Form:
    return by(Engine(model, stop=frozenset(), slots=slots, max_length=1024, temperature=0.0))


def by(engine: Engine) -> Form:
    def run(turns: Turns) -> Tokens:
        """Each rollout goes on as soon as its turn has ended."""
        tokens: Tokens = [[] for _ in turns[0]]
        at = [0] * len(tokens)
        for rollout, (ids, most) in enumerate(turns[0]):
            engine.submit(Request(rollout=rollout, token_ids=ids, max_tokens=most))
        while engine.busy:
            for completion in engine.step():
                tokens[completion.rollout] += completion.token_ids
                at[completion.rollout] += 1
                if at[completion.rollout] < len(turns):
                    ids, most = turns[at[completion.rollout]][completion.rollout]
                    engine.submit(Request(rollout=completion.rollout, token_ids=ids, max_tokens=most))
        for rollout in range(len(tokens)):
            engine.release(rollout)
        return tokens

    return run


def of_transformers(path: Path, experts: str) -> Form:
    """One `generate` a turn for all rollouts. Rows are padded on the left, and the cache goes on from turn to turn."""
    model: Any = transformers.Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.set_experts_implementation(experts)

    class Long(transformers.StoppingCriteria):
        """A row stops when it has as many tokens as it draws."""

        def __init__(self, most: torch.Tensor, start: int) -> None:
            self.most, self.start = most, start

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] - self.start >= self.most

    def run(turns: Turns) -> Tokens:
        rows = len(turns[0])
        tokens: Tokens = [[] for _ in range(rows)]
        ids, mask = torch.zeros(rows, 0, dtype=torch.int64), torch.zeros(rows, 0, dtype=torch.int64)
        cache = transformers.DynamicCache(config=model.config)
        for turn in turns:
            width = max(len(read) for read, _ in turn)
            ids = torch.cat([ids, torch.tensor([[0] * (width - len(read)) + read for read, _ in turn])], 1)
            mask = torch.cat([mask, torch.tensor([[0] * (width - len(read)) + [1] * len(read) for read, _ in turn])], 1)
            start, most = ids.shape[1], torch.tensor([most for _, most in turn])
            ids = model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=int(most.max()),
                pad_token_id=0,
                eos_token_id=None,
                stopping_criteria=[Long(most, start)],
            )
            sampled = torch.arange(ids.shape[1] - start)[None] < most[:, None]
            mask = torch.cat([mask, sampled.long()], 1)
            for row in range(rows):
                tokens[row] += ids[row, start : start + int(most[row])].tolist()
        return tokens

    return run


def rates(
    forms: Mapping[str, Form], make: Callable[[int], Turns], rounds: int, *, same: bool = True
) -> dict[str, list[float]]:
    """Return the tokens a second of each form, round by round. Raises SystemExit where two wrote different tokens, if `same`."""
    measured = in_turn(forms, rounds, lambda number: (make(number),))
    tokens = {name: [tokens for _, tokens in rows] for name, rows in measured.items()}
    first, *other_names = tokens
    for name in other_names:
        if same and tokens[name] != tokens[first]:
            raise SystemExit(f"{name} found other tokens than {first}")
    return {
        name: [sum(map(len, row_tokens)) / seconds for seconds, row_tokens in rows] for name, rows in measured.items()
    }


def table(title: str, rates_by_form: Mapping[str, list[float]]) -> None:
    (_, base), *_ = rates_by_form.items()
    for name, form_rates in rates_by_form.items():
        ratio = statistics.median(a / b for a, b in zip(base, form_rates, strict=True))
        print(f"| {title} | {name} | {statistics.median(form_rates):,.0f} | {ratio:.2f} |", flush=True)


def moe(rounds: int) -> None:
    torch.manual_seed(0)
    model = Model(MOE)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, Path(folder))
        peers = {f"transformers, {name}": of_transformers(Path(folder), name) for name in ("grouped_mm", "eager")}
    forms = {"ours": ours(model, ROLLOUTS), **peers}
    size = sum(p.numel() for p in model.parameters())
    table(f"MoE, {size / 1e6:.1f} M", rates(forms, lambda n: conversations(n, ROLLOUTS, TURNS, 4096), rounds))


def recorded(slots: int, number: int) -> Turns:
    """What rollouts of the example's evaluation read and how many tokens they wrote, for as many turns as all of them have."""
    rows = pq.read_table(EXAMPLE / "rollouts/eval_final.parquet").to_pylist()[number * slots :][:slots]
    talks = list[list[tuple[list[int], int]]]()
    for row in rows:
        spans = [
            (wrote, [token for token, _ in span])
            for wrote, span in groupby(
                zip(row["token_ids"], row["kind"], strict=True), lambda pair: bool(pair[1] not in READ)
            )
        ]
        talks.append([(read, len(written)) for (_, read), (_, written) in zip(spans[::2], spans[1::2], strict=False)])
    return [[talk[turn] for talk in talks] for turn in range(min(map(len, talks)))]


class OnTokens(HeadTrainer):
    """Learns the tokens that follow in the rows, by their cross-entropy, where the model's distribution is learnt otherwise."""

    def loss(self, batch: FlatBatch, hidden_ND: torch.Tensor) -> tuple[torch.Tensor, float]:
        head_NV, _ = self.guesses(batch, hidden_ND)
        place_S = batch.place_U[batch.from_S]
        logprob_S = head_NV[place_S, batch.token_S]
        guessed_S = batch.streams_N[place_S] > 0
        return -logprob_S[guessed_S].sum(), float(guessed_S.sum())


def trained(
    model: Model, rows: Sequence[TokenRow], steps: int, seed: int = 0, form: type[HeadTrainer] = HeadTrainer
) -> DraftHead:
    trainer = form(model, new_head(model, seed), rows=rows, steps=steps, seed=seed)
    trainer.distil()
    return trainer.head.requires_grad_(False)


def drafts(rounds: int) -> None:
    model = load_pretrained(EXAMPLE / "weights/final")
    head = trained(model, rows_of(EXAMPLE, "rl_*.parquet"), 150)
    for slots in (1, 8, 32):
        size: dict[str, Any] = {"stop": frozenset(), "slots": slots, "max_length": model.config.max_position_embeddings}
        for temperature in (0.0, 1.0):
            engine = DraftingEngine(model, head, temperature=temperature, **size)
            forms = {"with drafts": by(engine), "without": by(Engine(model, temperature=temperature, **size))}
            rates_by_form = rates(forms, lambda n, slots=slots: recorded(slots, n), rounds)
            accuracy = f"{engine.accepted / engine.proposed:.0%} of drafts right"
            table(f"example, {slots} at once, temperature {temperature:g}, {accuracy}", rates_by_form)


def ceiling(rounds: int) -> None:
    torch.manual_seed(0)
    model = Model(DENSE)
    size: dict[str, Any] = {"stop": frozenset(), "slots": 1, "max_length": 512, "temperature": 0.0}
    plain = Engine(model, **size)
    prompts = [np.random.default_rng(n).integers(0, DENSE.vocab_size, 16).tolist() for n in range(8)]
    continuations = [by(plain)([[(prompt, 60)]])[0] for prompt in prompts]
    answers = [np.array(prompt + tokens, np.int32) for prompt, tokens in zip(prompts, continuations, strict=True)]
    head = trained(model, [row_of(ids) for ids in answers], 40)
    engine = DraftingEngine(model, head, **size)
    rates_by_form = rates(
        {"with drafts": by(engine), "without": by(plain)}, lambda n: [[(prompts[n % len(prompts)], 60)]], rounds
    )
    table(f"dense, 66 M, 1 at once, {engine.accepted / engine.proposed:.0%} of drafts right", rates_by_form)


def heads(steps: int, seeds: int = 3, slots: int = 32) -> None:
    model = load_pretrained(EXAMPLE / "weights/final")
    data = {"rollouts of RL": rows_of(EXAMPLE, "rl_*.parquet")}
    data["demonstrations"] = [row for path in sorted((EXAMPLE / "data").glob("*.npz")) for row in load_rows(path)]
    size: dict[str, Any] = {"stop": frozenset(), "slots": slots, "max_length": model.config.max_position_embeddings}
    print("| rows | temperature | distilled | on tokens | difference |\n|---|---|---|---|---|")
    for name, rows in data.items():
        shares: dict[tuple[float, type[HeadTrainer]], list[float]] = {}
        for seed, form in product(range(seeds), (HeadTrainer, OnTokens)):
            head = trained(model, rows, steps, seed, form)
            for temperature in (0.0, 1.0):
                engine = DraftingEngine(model, head, temperature=temperature, seed=seed, **size)
                by(engine)(recorded(slots, 0))
                shares.setdefault((temperature, form), []).append(engine.accepted / engine.proposed)
        for temperature in (0.0, 1.0):
            distilled, on_tokens = shares[temperature, HeadTrainer], shares[temperature, OnTokens]
            differences = [a - b for a, b in zip(distilled, on_tokens, strict=True)]
            columns = " | ".join(
                f"{statistics.mean(values):.1%} ({', '.join(f'{value:.1%}' for value in values)})"
                for values in (distilled, on_tokens, differences)
            )
            print(f"| {name} | {temperature:g} | {columns} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=0, help="steps of training; only compare heads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.heads:
        return heads(args.heads)
    transformers.utils.logging.disable_progress_bar()
    print("| model | form | tokens / s | ours / it |\n|---|---|---|---|")
    moe(args.rounds)
    drafts(args.rounds)
    ceiling(args.rounds)


if __name__ == "__main__":
    main()
