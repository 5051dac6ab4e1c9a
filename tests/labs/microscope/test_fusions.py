"""The switch of each fused kernel: the kernel does not run, and single operations give its numbers up to rounding."""

from typing import Any

import pytest
import torch

from composer_nb.kernels import logprob, norm
from composer_nb.kernels.attention import cached, causal
from composer_nb.kernels.moe import experts
from composer_nb.kernels.triton_runtime import FUSIONS, UNFUSED, choose, fused, without
from composer_nb.labs.microscope.fusions import TRAINED, fusion_gaps
from composer_nb.trainer.engine import Engine, pack

RANDOM = torch.Generator().manual_seed(3)
TOKENS = 400  # long enough for blocks of attention


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


X, WEIGHT, CACHE = random(TOKENS, 32), random(96, 32), random(2, 2, 8, 16)
HEADS = X.view(-1, 2, 16)
SLOTS, ROWS = torch.tensor([0, 1, 1]), torch.arange(TOKENS)
CASES: dict[str, tuple[Any, str, Any]] = {
    "norm": (norm, "norm_rows", lambda: norm.rms_norm(X, X[0], 1e-6)),
    "rope": (norm, "_norm_rope", lambda: norm.norm_rope(HEADS, WEIGHT[:2, :16], HEADS[..., :8], 1e-6)),
    "logprob": (logprob, "_LogprobEntropy", lambda: torch.stack(logprob.logprob_entropy(X, WEIGHT, ROWS, ROWS % 96))),
    "attention": (causal, "_Causal", lambda: causal.causal_attention(HEADS, HEADS, HEADS, [TOKENS], 0.25)),
    "cached attention": (cached, "_attend", lambda: cached.cached_attention(HEADS[:3], CACHE, CACHE, SLOTS, SLOTS)),
    "experts": (experts, "_forward", lambda: experts.swiglu(X)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_switch_leaves_the_numbers_and_the_kernel_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, kernel, call = CASES[name]
    compiled = call()
    monkeypatch.delattr(module, kernel)
    with pytest.raises(NameError):
        call()
    with without({"rope": "norm", "cached attention": "attention"}.get(name, name)):
        torch.testing.assert_close(call(), compiled, rtol=2e-5, atol=2e-6)


def test_switches_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNFUSED, "norm,quantize")
    assert [name for name in FUSIONS if not fused(name)] == ["norm", "quantize"]
    assert choose(torch.device("cpu"), kernel="quantize") == ("torch", f"{UNFUSED} names quantize")
    monkeypatch.setenv(UNFUSED, "nrom")
    with pytest.raises(ValueError, match="there is no fused kernel 'nrom'; there are attention, decode"):
        fused("norm")


def test_each_fusion_of_a_trainer_is_rounding(make_model, converse) -> None:
    model = make_model(3)
    attempts = converse(Engine(model, stop=frozenset(), slots=5, max_length=96), 5)
    gaps = fusion_gaps(model, attempts)
    assert list(gaps) == ["none", *TRAINED, "all"]
    assert all(row["k3"] < 1e-9 and row["logprob_gap_p99"] < 1e-4 for row in gaps.values())
    assert gaps["quantize"] == {"logprob_gap_p50": 0, "logprob_gap_p99": 0, "k3": 0}  # this model has no number formats
    assert any(gaps[name]["logprob_gap_p99"] > 0 for name in TRAINED) and gaps["norm"]["logprob_gap_p99"] > 0
    with without("decode"):
        assert pack(model) is None
