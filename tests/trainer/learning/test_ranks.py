"""One rank alone, and a process that is set up the same way twice."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from composer_nb.trainer.learning.ranks import Ranks, set_up_process


def test_one_rank_needs_no_others():
    ranks = Ranks()
    assert ranks.first and ranks.world == 1
    tensor = torch.tensor([1.0, 2.0])
    assert ranks.sum_(tensor) is tensor and tensor.tolist() == [1.0, 2.0]
    assert ranks.sums({"a": 0.1, "b": 3.0}) == {"a": 0.1, "b": 3.0}
    assert ranks.gather("x") == ["x"]
    ranks.barrier()
    ranks.close()


def test_two_processes_with_one_seed_draw_the_same_numbers_on_one_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    drawn, precision = [], []
    for seed in (3, 3, 2**40):
        set_up_process(seed, "bfloat16" if seed == 3 else "float32")
        precision.append(torch.get_float32_matmul_precision())
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1] and all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))
    assert precision == ["medium", "medium", "highest"]
    assert torch.get_num_threads() == 1 and os.environ["TOKENIZERS_PARALLELISM"] == "false"
