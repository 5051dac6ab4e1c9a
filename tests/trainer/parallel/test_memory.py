"""What models weigh and a rank needs: published sizes, the peak of torch's allocator, refusals with settings that fit."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.cli import main
from composer_nb.trainer.drafts import HeadTrainer, new_head
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.optimizer import FlatOptimizer, OptimizerSettings
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import train_step
from composer_nb.trainer.models.hf_config import read_config
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.parallel.memory import Need, RankLoad, estimate, plan_memory, require_memory
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings
from composer_nb.trainer.settings import override


def measured_peak(step: Callable[[], object]) -> int:
    """Return the peak of bytes that `step` allocated and held in torch's CPU allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiling:
        result = step()
    assert profiling.profiler is not None and profiling.profiler.kineto_results is not None
    events = [event for event in profiling.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak


def require_bounds(need: Need, measured: int, over: float = 1.2) -> None:
    """Require a peak between what certainly lives at once and a fifth over the estimate: above, a run that was let through ends
    without memory. How far below depends on the processor: torch chooses kernels, with their workspace, by its instructions."""
    assert need.weights + need.gradients + need.optimizer <= measured <= over * need.peak


CONFIGS = Path(__file__).parents[1] / "configs"


def test_plan_memory_of_kimi_k25():
    sizes = plan_memory(read_config(CONFIGS / "kimi_k25.json").model)
    # By hand, from the sizes alone: attention, experts, the dense layer, routers with biases, tables, norms.
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    expert, norms = 3 * 7168 * 2048, 61 * (2 * 7168 + 1536 + 512) + 7168
    beside = 61 * attention + 3 * 7168 * 18432 + 60 * 384 * 7169 + 2 * 163840 * 7168 + norms
    assert sizes["total"] == beside + 60 * 385 * expert and sizes["active"] == beside + 60 * 9 * expert
    # 1.026 T; the 1.04 T that are published come out with one layer more (384 experts that predict ahead, not released).
    assert sizes["total"] == pytest.approx(1.04e12, rel=0.015)
    assert sizes["bf16_bytes"] == 2 * sizes["total"] and sizes["training_bytes"] == 20 * sizes["total"]
    assert sizes["cache_bytes"] == 61 * 576 * 2 and sizes["engine_cache_bytes"] == 61 * 64 * (192 + 128) * 4


GROUPED: dict[str, Any] = {
    "vocab_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 96,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "family": "deepseek_v3", "vocab_size": 512, "num_hidden_layers": 3, "num_key_value_heads": 4,
    "head_dim": 24, "q_lora_rank": 32, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "intermediate_size": 256, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 96,
}  # fmt: skip
HEAVY = GROUPED | {"vocab_size": 2048, "hidden_size": 256, "num_experts": 16, "moe_intermediate_size": 256}


@pytest.mark.parametrize(
    ("sizes", "rows", "load"),
    [
        (GROUPED, 8, RankLoad()),
        (GROUPED, 8, RankLoad(optimizer="muon", recompute=True)),
        (LATENT, 4, RankLoad()),
        (HEAVY, 1, RankLoad()),
        (GROUPED | {"vocab_size": 4096}, 8, RankLoad(draft=True)),
        (HEAVY, 1, RankLoad(draft=True)),
    ],
    ids=["activations", "recomputed", "latent", "weights", "draft's output", "draft's weights"],
)
def test_the_peak_is_above_the_state_and_below_the_estimate(sizes: dict[str, Any], rows: int, load: RankLoad):
    c, length = ModelConfig(**sizes), 256
    random = np.random.default_rng(0)
    ids = random.integers(0, c.vocab_size, (rows, length + 1)).astype(np.int32)
    data = [TokenRow(row, np.ones(length + 1, np.float32)) for row in ids]

    def two_steps() -> object:
        model = Model(c)
        model.recompute = load.recompute
        flat_optimizer = FlatOptimizer(model, OptimizerSettings(name=load.optimizer), published=torch.bfloat16)
        head = HeadTrainer(model, new_head(model, 0), weight=0.1) if load.draft else None
        for _ in range(2):
            train_step(model, data, flat_optimizer, Ranks(), lr=1e-3, balance=1e-3, clip=1.0, beside=head)
        return flat_optimizer, head

    need = estimate(c, Mesh(), replace(load, tokens=rows * length, longest=length))
    require_bounds(need, measured_peak(two_steps))


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_cutting_keeps_every_weight_once_in_each_copy(shard: int, cp: int, ep: int, copies: int):
    c = ModelConfig(**GROUPED)
    world = 8 * copies
    mesh = Mesh.of(MeshSettings(shard=shard, cp=cp, ep=ep), world)
    whole, need = estimate(c, Mesh(), RankLoad()), estimate(c, mesh, RankLoad())
    expert = 4 * 3 * c.hidden_size * c.moe_intermediate_size * c.num_experts * c.num_hidden_layers
    parts = (whole.weights - expert) / mesh.fsdp + expert / (mesh.ep * mesh.expert_shard)
    assert need.weights == need.gradients == pytest.approx(parts, abs=16)
    assert need.optimizer == pytest.approx(3 * parts, abs=64), "two moments and the published weights"
    silent = {name for name, size in need.traffic.items() if not size}
    assert ("all-to-all of tokens" in silent) == (mesh.ep == 1)
    assert ("all-gather of keys and values" in silent) == (mesh.cp == 1)
    assert ("all-reduce of gradients" in silent) == (mesh.replicate == mesh.expert_replicate == 1)


@pytest.mark.parametrize("share", [0.9, 0.2])
def test_what_does_not_fit_is_refused_with_settings_that_do(share: float):
    c, load = ModelConfig(**GROUPED), RankLoad(tokens=4096, longest=512)
    settings, ranks = MeshSettings(), 2
    limit = int(share * require_memory(c, settings, ranks, load, 2**62).peak)
    with pytest.raises(ValueError, match=r"a rank needs .* would \(") as refusal:
        require_memory(c, settings, ranks, load, limit)
    named = dict(re.findall(r"([\w.]+)=(\w+)", str(refusal.value)))
    mesh = override(settings, {name[5:]: value for name, value in named.items() if name.startswith("mesh.")})
    changed = RankLoad(
        tokens=int(named.get("rl.microbatch_tokens", 4096)), longest=512, recompute=named.get("rl.recompute") == "true"
    )
    assert require_memory(c, mesh, int(named.get("ranks", ranks)), changed, limit).peak <= limit
    with pytest.raises(ValueError, match="no setting that was tried"):
        require_memory(c, settings, 1, load, 1000)


def test_the_command_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["plan", "--model", str(CONFIGS / "kimi_k25.json")]) == 0
    assert "1.03 T, 32.86 B of them active" in capsys.readouterr().out
    assert main(["plan", "--model", str(CONFIGS / "qwen3_30b_a3b.json"), "--json"]) == 0
    assert round(json.loads(capsys.readouterr().out)["total"] / 1e9, 1) == 30.5
    assert main(["plan", "--model", str(tmp_path)]) != 0
    assert "config.json is missing" in capsys.readouterr().err
    kimi = ["plan", "--model", str(CONFIGS / "kimi_k25.json"), "--mesh", "shard=128,cp=2,ep=8"]
    assert main([*kimi, "--ranks", "256", "--tokens", "32768", "--half", "--recompute", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["weights"] == pytest.approx(4 * 1.026e12 / 256, rel=0.01)
    assert main([*kimi, "--ranks", "256", "--tokens", "32768", "--half", "--memory", "80"]) != 0
    assert "would" in capsys.readouterr().err
