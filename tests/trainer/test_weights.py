"""Deltas: their size, on tensors whose difference is known; every bit comes back; nothing damaged is ever used."""

import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import save_file
from torch import Tensor

from composer_nb.kernels.delta.codec import CODECS
from composer_nb.trainer.models import shards
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.versions.manifest import (
    DamagedVersion,
    Manifest,
    MissingVersion,
)
from composer_nb.trainer.weights import apply_delta, delta_sizes, encode_delta, verify


def test_a_frame_that_claims_to_be_huge_is_not_expanded():
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(10_000_000))
    with pytest.raises(ValueError, match="another size"):
        CODECS["xor-planes-zstd1"].decode(np.zeros(9, "u2"), bomb, "bfloat16")


# Directories


@pytest.fixture
def three(tmp_path: Path, make_model) -> Path:
    """base, target (plain checkpoints) and delta."""
    model = make_model(1)
    save_pretrained(model, tmp_path / "base", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[..., :2] += 0.01
    save_pretrained(model, tmp_path / "target", dtype=torch.bfloat16)
    encode_delta(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    return tmp_path


def test_a_delta_between_checkpoints_gives_the_target_byte_for_byte(three: Path):
    full = apply_delta(three / "base", three / "delta", three / "full")
    assert verify(three / "full") == full and full.base is None and full.version == 1
    for name in ("config.json", "model.safetensors"):
        assert (three / "full" / name).read_bytes() == (three / "target" / name).read_bytes()
    with torch.no_grad():
        logits = [load_pretrained(three / name)(torch.arange(20).view(1, 20))[0] for name in ("full", "target", "base")]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    delta = verify(three / "delta")
    assert delta.base is not None and delta.base.version == 0 and delta.hash == full.hash
    sizes = delta_sizes(three / "base", three / "target")
    assert sizes["delta_bytes"] < delta.size < sizes["full_bytes"]


def test_checkpoints_are_walked_a_tensor_at_a_time(three: Path, monkeypatch: pytest.MonkeyPatch):
    mapped, live, most = shards.mapped, set[int](), list[int]()

    def counted(entry: shards.TensorLocation) -> Tensor:
        tensor = mapped(entry)
        live.add(id(tensor))
        weakref.finalize(tensor, live.discard, id(tensor))
        most.append(len(live))
        return tensor

    monkeypatch.setattr(shards, "mapped", counted)
    encode_delta(three / "base", three / "target", three / "again")
    apply_delta(three / "base", three / "again", three / "full")
    assert len(most) > 50 and max(most) <= 3 and not live


def test_checkpoints_of_different_models_and_places_in_use_are_refused(three: Path, make_model):
    for name, other in (("more", {"w": torch.zeros(4), "x": torch.zeros(1)}), ("dtype", {"w": torch.zeros(4).int()})):
        for path, tensors in ((three / f"{name} a", {"w": torch.zeros(4)}), (three / f"{name} b", other)):
            path.mkdir()
            save_file(tensors, path / "model.safetensors")
        with pytest.raises(ValueError, match="are not versions of one model"):
            delta_sizes(three / f"{name} a", three / f"{name} b")
    save_pretrained(make_model(1, hidden_size=40), three / "wide", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="wide: they are not versions of one model: model.embed"):
        encode_delta(three / "base", three / "wide", three / "no")
    with pytest.raises(ValueError, match="target is there already"):
        apply_delta(three / "base", three / "delta", three / "target")
    with pytest.raises(MissingVersion, match="manifest.json is missing"):
        verify(three / "target")
    assert not list(three.glob("no*")) and not list(three.glob("*.part"))


def test_a_manifest_that_contradicts_what_is_there_is_refused_though_its_seal_holds(three: Path):
    file = three / "delta" / "manifest.json"
    m = Manifest.load(file.read_bytes(), "m")
    coded = {name: entry.model_copy(update={"encoding": "new"}) for name, entry in m.tensors.items()}
    for change in ({"hash": "0" * 40}, {"base": None}, {"tensors": coded}, {"format": "composer-nb-weights-9"}):
        with warnings.catch_warnings(action="ignore"):
            file.write_bytes(m.model_copy(update=change).dump())
        with pytest.raises(DamagedVersion):
            apply_delta(three / "base", three / "delta", three / "no")
        assert not (three / "no").exists()
