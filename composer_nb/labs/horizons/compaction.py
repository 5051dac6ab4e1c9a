"""Costs and losses of the ways to end a segment, counted over finished attempts of `seeker.Seeker`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Kind, Rollout
from composer_nb.labs.horizons.seeker import tried


def figures(attempts: Sequence[Attempt], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the share solved, and means over rollouts: segments, tokens of summaries, tokens whose keys and values a call for a
    summary found in the cache (`reused`), all tokens, tries that were forgotten at the end of a segment, and tries made twice."""
    rollouts = [done.rollout for done in attempts]
    means = {
        "segments": [len(rollout.segments) for rollout in rollouts],
        "summary tokens": [sum(int((s.kind == Kind.SUMMARY).sum()) for s in rollout.segments) for rollout in rollouts],
        "reused": [sum(segment.reused for segment in rollout.segments) for rollout in rollouts],
        "tokens": [rollout.tokens for rollout in rollouts],
        "forgotten": [len(forgotten(rollout, tokenizer)) for rollout in rollouts],
        "tried twice": [sum(turn.observation == "tried" for turn in rollout.turns) for rollout in rollouts],
    }
    solved = float(np.mean([done.grade.passed for done in attempts]))
    return {"solved": solved, **{name: float(np.mean(values)) for name, values in means.items()}}


def forgotten(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """Return the tries that a segment knew of when it ended and the next one did not when it began."""
    found = []
    for before, after in zip(rollout.segments, rollout.segments[1:], strict=False):
        begun = int(after.acted.argmax())
        known, left = (
            tried(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
            for ids in (before.token_ids, after.token_ids[:begun])
        )
        found += [line for line in known if line not in left]
    return found
