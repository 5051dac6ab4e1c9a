"""Quantised checkpoints, made by plain loops and read back; and Kimi K2.5's wrapper around one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.trainer.models.checkpoint import ROUTER_BIAS, hugging_face_views, load_pretrained, save_pretrained
from composer_nb.trainer.models.transformer import Model

DEEPSEEK = {
    "family": "deepseek_v3", "hidden_size": 40, "num_key_value_heads": 4, "head_dim": 24, "q_lora_rank": 16,
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "intermediate_size": 48, "first_k_dense_replace": 1, "n_shared_experts": 1, "tie_word_embeddings": False,
}  # fmt: skip
KIMI = DEEPSEEK | {"hidden_size": 32, "moe_intermediate_size": 64}
NAME = "model.layers.1.mlp.experts.2.down_proj.weight"


def in_blocks(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what they stand for in float64, block by block."""
    blocks = [-(-length // size) for length in weight.shape]
    scale, exact = torch.zeros(blocks), torch.zeros(weight.shape, dtype=torch.float64)
    code = torch.zeros(weight.shape).to(torch.float8_e4m3fn)
    for r in range(blocks[0]):
        for c in range(blocks[1]):
            place = (slice(r * size, (r + 1) * size), slice(c * size, (c + 1) * size))
            scale[r, c] = weight[place].abs().max() / 448
            code[place] = (weight[place] / scale[r, c]).to(torch.float8_e4m3fn)
            exact[place] = code[place].double() * float(scale[r, c])
    return code, scale, exact


def in_words(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Words of eight codes, scales of groups of 32, and what they stand for in float64, one weight at a time."""
    words, scales, exact = [], [], []
    for row in weight.tolist():
        step = [float(torch.tensor(max(map(abs, row[c : c + 32])) / 7).bfloat16()) for c in range(0, len(row), 32)]
        code = [max(-8, min(7, round(value / step[c // 32]))) for c, value in enumerate(row)]
        word = [sum((code[c + place] + 8) << (4 * place) for place in range(8)) for c in range(0, len(row), 8)]
        words.append([value - 2**32 if value >= 2**31 else value for value in word])
        scales.append(step)
        exact.append([value * step[c // 32] for c, value in enumerate(code)])
    return (
        torch.tensor(words, dtype=torch.int32),
        torch.tensor(scales).bfloat16(),
        torch.tensor(exact, dtype=torch.float64),
    )


@pytest.fixture
def blocks(make_model, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """DeepSeek-V3 in float8, with blocks of 16 (the sizes cut some of them), and what its weights are."""
    path = tmp_path / "fp8"
    save_pretrained(make_model(4, **DEEPSEEK), path, dtype=torch.bfloat16)
    tensors, exact = load_file(path / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        exact[name] = weight.double()
        if weight.dim() == 2 and "proj" in name:
            tensors[name], tensors[name + "_scale_inv"], exact[name] = in_blocks(weight.float(), 16)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    (path / "model.safetensors").unlink()  # scales in a file of their own: the weights' files need not hold them
    save_file(tensors, path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(scales, path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    places = {name: f"model-0000{1 + (name in scales)}-of-00002.safetensors" for name in tensors | scales}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path, exact


@pytest.fixture
def kimi(make_model, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Kimi K2.5's shape: a text model under a prefix with int4 experts, and eyes."""
    path = tmp_path / "kimi"
    model = make_model(5, **KIMI)
    for layer in model.layers[1:]:
        layer.router_bias.copy_(torch.randn(6))
    save_pretrained(model, path, dtype=torch.bfloat16)
    tensors = {
        "vision_tower.patch_embed.proj.weight": torch.randn(3, 2, 2, 2),
        "mm_projector.linear_1.bias": torch.ones(5),
    }
    exact = {}
    for name, weight in load_file(path / "model.safetensors").items():
        full = "language_model." + name
        exact[name] = weight.double()
        if ".experts." in name:
            tensors[full + "_packed"], tensors[full + "_scale"], exact[name] = in_words(weight.float())
            tensors[full + "_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
        else:
            tensors[full] = weight
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"input_activations": None, "weights": weights, "targets": ["Linear"]}
    text = json.loads((path / "config.json").read_text()) | {
        "model_type": "kimi_k2",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
        },
    }
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (path / "config.json").write_text(json.dumps(config, indent=3))
    return path, exact


def check_weights(model: Model, exact: dict[str, Tensor]) -> None:
    views = hugging_face_views(model)
    assert views.keys() == exact.keys()
    for name, view in views.items():
        wanted = exact[name].to(torch.float32).to(view.dtype)
        assert torch.equal(view, wanted), name
        assert view.dtype == (torch.float32 if name.endswith(ROUTER_BIAS) else model.embed.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("made", ["blocks", "kimi"])
def test_weights_are_what_a_loop_in_float64_says(request: pytest.FixtureRequest, made: str, dtype: torch.dtype):
    path, exact = request.getfixturevalue(made)
    model = load_pretrained(path, dtype=dtype)
    check_weights(model, exact)
    with torch.no_grad():
        assert model(torch.arange(20)[None])[0].isfinite().all()


def edit(path: Path, name: str, tensor: Tensor | None) -> None:
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = tensors[name] if tensor is None else tensor
            save_file({key: value for key, value in tensors.items() if key != name or tensor is not None}, file)


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("_packed", torch.zeros(32, 4, dtype=torch.int32), r"_packed is \(32, 4\), config.json says \(32, 8\)"),
        ("_packed", torch.zeros(32, 8, dtype=torch.int64), "_packed is of dtype I64, it must be I32"),
        ("_scale", torch.zeros(32, 1), r"_scale is \(32, 1\), config.json says \(32, 2\)"),
        ("_scale", torch.full((32, 2), torch.nan), "_packed holds NaN, infinity"),
        ("_shape", torch.tensor([64, 32]), r"weight_shape says \(64, 32\), config.json says \(32, 64\)"),
        (
            "_scale",
            None,
            "one tensor is missing, first language_model.model.layers.1.mlp.experts.2.down_proj.weight_scale",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(kimi, part: str, tensor: Tensor | None, message: str):
    path, _ = kimi
    edit(path, f"language_model.{NAME}{part}", tensor)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(path)
    assert NAME in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["vision_tower.x", "mm_projector.x", "model.vision_tower.x", "language_model.extra"])
def test_what_is_foreign_is_listed(kimi, make_model, tmp_path: Path, name: str):
    path, _ = kimi
    allowed = name.startswith(("vision_tower", "mm_projector"))
    save_file({**load_file(path / "model.safetensors"), name: torch.ones(1)}, path / "model.safetensors")
    if allowed:
        load_pretrained(path)
        save_pretrained(make_model(5, **KIMI), tmp_path / "text", dtype=torch.bfloat16)
        path = tmp_path / "text"
        save_file({**load_file(path / "model.safetensors"), name: torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"one tensor is unknown, first {name}"):
        load_pretrained(path)
