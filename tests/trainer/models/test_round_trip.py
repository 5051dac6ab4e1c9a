"""Checkpoints there and back, with the same logits as in `transformers`."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from composer_nb.trainer.models import checkpoint, shards
from composer_nb.trainer.models.checkpoint import ROUTER_BIAS, hugging_face_views, load_pretrained, save_pretrained

IDS = torch.arange(120).view(2, 60) % 61
AHEAD: dict[str, Any] = {
    "family": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 24, "q_lora_rank": 16, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 48,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 2, "tie_word_embeddings": False, "qk_norm_gain": 1.0,
}  # fmt: skip
"""A DeepSeek-V3 with two heads that predict ahead."""


@pytest.mark.parametrize("shard_bytes", [None, 30_000])
def test_deepseek_of_ours_is_what_transformers_loads_and_saves(make_model, tmp_path: Path, shard_bytes: int | None):
    from transformers import AutoModelForCausalLM

    model = make_model(2, **AHEAD | {"num_nextn_predict_layers": 0})
    for layer in model.layers[1:]:
        layer.router_bias.copy_(torch.randn(6) * 0.2 + 1e-4)
    save_pretrained(model, tmp_path / "ours", dtype=torch.bfloat16, shard_bytes=shard_bytes or shards.SHARD_BYTES)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes or "1GB")
    ours, other = (tensors_of(tmp_path / who) for who in ("ours", "theirs"))
    assert ours.keys() == other.keys()
    for name, tensor in ours.items():
        wide = name.endswith(ROUTER_BIAS)
        assert tensor.dtype == other[name].dtype == (torch.float32 if wide else torch.bfloat16), name
        assert torch.equal(tensor, other[name]), name
    if shard_bytes:
        indexes = [json.loads((tmp_path / who / shards.INDEX).read_text()) for who in ("ours", "theirs")]
        assert indexes[0]["metadata"] == indexes[1]["metadata"]
        assert indexes[0]["weight_map"].keys() == indexes[1]["weight_map"].keys()
        assert all(file.stat().st_size < 35_000 for file in (tmp_path / "ours").glob("*.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(
            load_pretrained(tmp_path / "ours")(IDS)[0], theirs.float()(IDS).logits, atol=2e-4, rtol=1e-3
        )


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_heads_that_predict_ahead_survive(make_model, tmp_path: Path):
    model = make_model(3, **AHEAD)
    save_pretrained(model, tmp_path / "m", dtype=torch.float32, shard_bytes=20_000)
    loaded = load_pretrained(tmp_path / "m")
    assert loaded.config == model.config and len(loaded.aheads) == 2
    theirs = hugging_face_views(loaded)
    for name, view in hugging_face_views(model).items():
        assert torch.equal(view, theirs[name]), name
    assert "model.layers.3.shared_head.norm.weight" in theirs


# Repeated tensors


def add_tensors(path: Path, added: dict[str, torch.Tensor]) -> None:
    """To a checkpoint in one file."""
    save_file({**load_file(path / "model.safetensors"), **added}, path / "model.safetensors", metadata={"format": "pt"})


def test_what_a_checkpoint_repeats_is_checked(make_model, tmp_path: Path):
    source = tmp_path / "m"
    save_pretrained(make_model(3, **AHEAD), source, dtype=torch.bfloat16)
    given = load_file(source / "model.safetensors")
    again = {
        f"model.layers.{layer}.embed_tokens.weight": given["model.embed_tokens.weight"].clone() for layer in (2, 3)
    }
    again["model.layers.3.shared_head.head.weight"] = given["lm_head.weight"].clone()
    again["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(4.0)
    add_tensors(source, again)
    assert torch.equal(load_pretrained(source).embed, given["model.embed_tokens.weight"].float())
    add_tensors(source, {"model.layers.3.shared_head.head.weight": given["model.embed_tokens.weight"].clone()})
    with pytest.raises(
        ValueError, match="model.layers.3.shared_head.head.weight must repeat lm_head.weight, but differs"
    ):
        load_pretrained(source)


def test_loading_maps_one_tensor_at_a_time(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_pretrained(make_model(3, **AHEAD), tmp_path / "m", dtype=torch.bfloat16, shard_bytes=20_000)
    live: set[int] = set()
    most = {"tensors": 0, "reads": 0}

    def counted(entry: shards.TensorLocation) -> torch.Tensor:
        tensor = shards.mapped(entry)
        live.add(id(tensor))
        weakref.finalize(tensor, live.discard, id(tensor))
        most["tensors"], most["reads"] = max(most["tensors"], len(live)), most["reads"] + 1
        return tensor

    monkeypatch.setattr(checkpoint, "mapped", counted)
    model = load_pretrained(tmp_path / "m")
    assert most["reads"] == len(hugging_face_views(model)), "each tensor is read once"
    assert most["tensors"] == 1 and not live
