"""The size of a delta, on tensors whose difference is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zstandard
from safetensors.torch import save_file
from torch import Tensor

from composer_nb.trainer.checkpoint import save_pretrained
from composer_nb.trainer.weights import delta_sizes


def version(path: Path, **tensors: Tensor) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def test_equal_versions_differ_in_nothing(tmp_path: Path, make_model):
    a, b = tmp_path / "a", tmp_path / "b"
    for path in (a, b):
        save_pretrained(make_model(1), path)
    sizes = delta_sizes(a, b)
    assert sizes["changed_fraction"] == 0 and sizes["delta_bytes"] < 0.1 * sizes["full_bytes"]
    assert sizes["full_bytes"] == 2 * sum(p.numel() for p in make_model(1).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_changed_bits_are_counted_weight_by_weight(tmp_path: Path, dtype: torch.dtype):
    before = (torch.arange(1000) % 100).to(dtype).view(10, 100)
    after = before.clone()
    after[3, :7] += 1
    scalar = torch.tensor(1.0, dtype=torch.float32)
    a, b = version(tmp_path / "a", w=before, s=scalar), version(tmp_path / "b", w=after, s=scalar)
    sizes = delta_sizes(a, b)
    assert sizes["changed_fraction"] == pytest.approx(7 / 1001)
    assert sizes["full_bytes"] == 1000 * before.element_size() + 4
    assert 0 < sizes["delta_bytes"] < 150


def test_a_zero_that_changes_its_sign_counts_because_deltas_are_lossless(tmp_path: Path):
    a, b = version(tmp_path / "a", w=torch.zeros(8)), version(tmp_path / "b", w=-torch.zeros(8))
    assert delta_sizes(a, b)["changed_fraction"] == 1


def test_unrelated_versions_do_not_compress(tmp_path: Path):
    random = torch.Generator().manual_seed(0)
    a, b = (
        version(tmp_path / name, w=torch.randint(-(2**31), 2**31 - 1, (5000,), generator=random, dtype=torch.int32))
        for name in "ab"
    )
    sizes = delta_sizes(a, b)
    assert sizes["changed_fraction"] > 0.999 and sizes["delta_bytes"] >= sizes["full_bytes"]


def test_bytes_of_equal_significance_lie_together(tmp_path: Path):
    """Changes of the lowest byte alone: three quarters of the delta are zeros in one run, which costs next to nothing."""
    random = torch.Generator().manual_seed(0)
    before = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=random, dtype=torch.int32)
    low = torch.randint(0, 256, (4096,), generator=random, dtype=torch.int32)
    a, b = version(tmp_path / "a", w=before), version(tmp_path / "b", w=before ^ low)
    noise = len(zstandard.ZstdCompressor(level=1).compress(low.to(torch.uint8).numpy().tobytes()))
    assert noise <= delta_sizes(a, b)["delta_bytes"] < noise + 64


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.zeros(4), "x": torch.zeros(1)},
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.bfloat16)},
        {"w": torch.zeros(4, dtype=torch.int32)},
    ],
    ids=["more", "name", "shape", "width", "dtype"],
)
def test_versions_of_different_models_are_refused(tmp_path: Path, other: dict[str, Tensor]):
    a, b = version(tmp_path / "a", w=torch.zeros(4)), version(tmp_path / "b", **other)
    with pytest.raises(ValueError, match="are not versions of one model"):
        delta_sizes(a, b)
