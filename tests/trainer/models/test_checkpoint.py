"""Checkpoints: read and written like `transformers` does, and clear about what is wrong with one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from composer_nb.trainer.models import checkpoint
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained


def test_a_float32_round_trip_is_exact_and_bf16_rounds_once(make_model, tmp_path: Path):
    model = make_model(3)
    save_pretrained(model, tmp_path / "m", dtype=torch.float32)
    exact, rounded = load_pretrained(tmp_path / "m"), load_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    assert exact.config == model.config
    triples = zip(model.parameters(), exact.parameters(), rounded.parameters(), strict=True)
    for mine, same, half in triples:
        assert torch.equal(mine, same) and half.dtype == torch.bfloat16 and torch.equal(mine.bfloat16(), half)


def test_the_tokenizer_travels_with_the_weights_and_a_second_save_replaces_the_first(make_model, tmp_path: Path):
    (tmp_path / "t.json").write_text("{}")
    save_pretrained(make_model(1), tmp_path / "m")
    save_pretrained(make_model(2), tmp_path / "m", tokenizer=tmp_path / "t.json")
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    assert torch.equal(load_pretrained(tmp_path / "m").embed, make_model(2).embed)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_weights_that_are_not_finite_are_not_saved(make_model, tmp_path: Path, value: float):
    save_pretrained(make_model(1), tmp_path / "m")
    bad = make_model(2).double()
    with torch.no_grad():
        bad.layers[1].o[3, 2] = value
    with pytest.raises(
        ValueError, match=r"m: model.layers.1.self_attn.o_proj.weight holds NaN or infinity, so training"
    ):
        save_pretrained(bad, tmp_path / "m", dtype=torch.bfloat16)
    assert torch.equal(load_pretrained(tmp_path / "m").embed, make_model(1).embed) and len([*tmp_path.iterdir()]) == 1


def test_a_save_that_fails_leaves_what_was_there_before(make_model, tmp_path: Path, monkeypatch):
    save_pretrained(make_model(1), tmp_path / "m")

    def full_disk(*_args, **_kwargs):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_shard", full_disk)
        with pytest.raises(OSError, match="no space"):
            save_pretrained(make_model(2), tmp_path / "m")
    assert torch.equal(load_pretrained(tmp_path / "m").embed, make_model(1).embed)
    save_pretrained(make_model(2), tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# What is wrong with a checkpoint


@pytest.fixture
def saved(make_model, tmp_path: Path) -> Path:
    save_pretrained(make_model(1, tie_word_embeddings=False), tmp_path / "m", dtype=torch.float32)
    return tmp_path / "m"


def edit_config(path: Path, remove: str = "", **changes: object) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    config.pop(remove, None)
    (path / "config.json").write_text(json.dumps(config))


def holds(saved: Path, name: str, value: float) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors[name].view(-1)[9] = value
    save_file(tensors, saved / "model.safetensors")


def cut(saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])


UP = "model.layers.0.mlp.experts.3.up_proj.weight"
UNSUPPORTED: list[dict[str, Any]] = [
    {"model_type": "qwen2_moe"},
    {"model_type": None},
    {"hidden_act": "gelu"},
    {"use_sliding_window": True},
    {"attention_bias": True},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0}},
]
SIZES = ("num_experts_per_tok", "num_experts", "num_attention_heads", "vocab_size")
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda saved: (saved / "config.json").unlink(), "config.json is missing"),
    (lambda saved: (saved / "config.json").write_text('{"hidden'), "config.json: not JSON"),
    (
        lambda saved: (saved / "model.safetensors").unlink(),
        "model.safetensors: this shard of the checkpoint is missing",
    ),
    *((partial(edit_config, **changes), f"{next(iter(changes))}.*not supported") for changes in UNSUPPORTED),
    *((partial(edit_config, remove=name), f"config.json: lacks {name}$") for name in SIZES),
    *((partial(cut, keep=keep), "model.safetensors: this shard is damaged") for keep in (4, -1)),
    *((partial(holds, name=UP, value=float(x)), f"{UP} holds NaN, infinity") for x in ("nan", "-inf")),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_what_is_wrong_is_named(saved: Path, damage: Callable[[Path], object], message: str):
    damage(saved)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_pretrained(saved)


def test_tensors_of_one_checkpoint_may_differ_in_dtype(make_model, tmp_path: Path):
    model = make_model(1).bfloat16().float()
    save_pretrained(model, tmp_path / "m", dtype=torch.float32)
    file = tmp_path / "m" / "model.safetensors"
    wide = load_file(file)
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    mixed = {name: tensor.to(dtypes[number % 3]) for number, (name, tensor) in enumerate(wide.items())}
    embed = mixed["model.embed_tokens.weight"] = torch.rand_like(model.embed)
    save_file({**mixed, "lm_head.weight": embed.bfloat16()}, file)
    loaded = load_pretrained(tmp_path / "m")
    assert torch.equal(loaded.embed, embed) and {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(loaded.layers[0].parameters(), model.layers[0].parameters(), strict=True)
    )


@pytest.mark.parametrize("sizes", [{"num_hidden_layers": 9_999, "num_experts": 65_536}, {"num_hidden_layers": 9_999}])
def test_more_layers_and_experts_than_tensors_are_refused_before_they_are_listed(saved: Path, sizes: dict[str, int]):
    edit_config(saved, **sizes)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"which says 9,999 layers .*there are"):
        load_pretrained(saved)
    assert time.monotonic() - begun < 2


def test_tensors_that_do_not_fit_the_config_are_named(saved: Path):
    file = saved / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    save_file({**tensors, name: tensors[name].T.contiguous()}, file)
    with pytest.raises(ValueError, match=rf"{name} is \(16, 32\), config.json says \(32, 16\)"):
        load_pretrained(saved)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"one tensor is missing, first {name}"):
        load_pretrained(saved)
    edit_config(saved, num_experts=5)
    with pytest.raises(ValueError, match="5 tensors are unknown"):
        load_pretrained(saved)


@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2"])
def test_weights_of_other_dtypes_are_named_before_any_is_read(saved: Path, monkeypatch, dtype: str):
    file, name = saved / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: torch.zeros(32, 32).to(getattr(torch, dtype))}, file)
    monkeypatch.setattr(checkpoint, "empty_model", None)  # would fail if the model were made
    with pytest.raises(ValueError, match=f"{name} is of dtype .*, it must be F64 or F32 or F16 or BF16"):
        load_pretrained(saved)


def test_a_model_in_memory_stays_as_it_is_where_names_or_forms_do_not_fit(make_model):
    model, other = make_model(1), make_model(2)
    tensors = checkpoint.published(other)
    name = next(reversed(tensors))
    for wrong in (tensors[name].to(torch.int8), tensors[name][:-1]):
        with pytest.raises(ValueError, match=name):
            checkpoint.from_hugging_face(model, {**tensors, name: wrong})
    assert torch.equal(model.embed, make_model(1).embed)
    checkpoint.from_hugging_face(model, tensors)
    assert torch.equal(model.embed, other.embed.bfloat16().float())
