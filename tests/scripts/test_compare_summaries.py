"""The script that compares summaries which a policy writes: what its counts mean, and the whole study at a tiny size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.policy import Trace
from composer_nb.harness.rollout import Kind, Rollout, Transcript

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "studies"))
import compare_summaries as script


def test_what_a_summary_keeps_and_invents() -> None:
    renderer = CompactRenderer(script.TOKENIZER)

    def segment(read: str, wrote: list[str | int]) -> Transcript:
        transcript = Transcript()
        transcript.read(renderer.prompt(read), Kind.PROMPT)
        ids = renderer.encoded(wrote)
        transcript._add(ids, [Kind.TOOL_CALL] * len(ids), [0.0] * len(ids), [0] * len(ids))
        return transcript

    first = segment("fix", ["sub f.py", renderer.to, "a + b", renderer.to, "a - b", renderer.call, "sub f.py", renderer.to,
                            " x", renderer.to, "y", renderer.end])  # fmt: skip
    second = segment("fix\ntried a + b > a - b\ntried c > d", ["done", renderer.end])
    segments = tuple(each.segment(Trace()) for each in (first, second))
    rollout = Rollout(task_id="t", segments=segments, turns=(), files={}, stop="finished")
    assert script.known(rollout) == ([1, 2], [1, 2])


def test_the_study_at_a_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = script.Size(demonstrations=14, sft=2, rl=1, prompts=1, group=2, scored=4, samples=1)
    for arm in script.ARMS:
        script.study(1, arm, tmp_path, size)
    stored = json.loads((tmp_path / "before RL 1.json").read_text())["ways"]
    assert list(stored) == list(script.WAYS) and all(np.isfinite(list(each.values())).all() for each in stored.values())
    assert stored["one segment"]["error"] == stored["one segment"]["summary tokens"] == 0
    assert script.report(tmp_path).count("| one segment |") == len(script.ARMS)
