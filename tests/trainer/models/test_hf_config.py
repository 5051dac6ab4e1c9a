"""config.json: what a wrapper must state itself, and one line for each thing that is not supported."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.trainer.models.checkpoint import ROUTER_BIAS, hugging_face_views, load_pretrained, save_pretrained
from composer_nb.trainer.models.hf_config import _STATED, PackedIntegers, config_json, read_config
from composer_nb.trainer.models.transformer import Yarn
from tests.tiny_models import LATENT

CONFIGS = Path(__file__).parents[1] / "configs"
KIMI, QWEN = (json.loads((CONFIGS / name).read_text()) for name in ("kimi_k25.json", "qwen3_30b_a3b.json"))
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def integers(**changes: object) -> dict[str, Any]:
    """Kimi's quantization_config with other settings of its weights."""
    config = copy.deepcopy(KIMI["text_config"]["quantization_config"])
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def described(tmp_path: Path, config: object):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_config(tmp_path / "config.json")


def test_kimi_k25_is_read_from_its_text_config(tmp_path: Path):
    description = described(tmp_path, KIMI)
    c = description.model
    assert description.prefix == "language_model." and description.format == PackedIntegers(bits=4, group=32)
    assert (c.family, c.num_experts, c.num_experts_per_tok, c.n_group) == ("deepseek_v3", 384, 8, 1)
    assert (c.head_dim, c.v_head_dim, c.rms_norm_eps, c.rope_theta) == (192, 128, 1e-5, 50_000.0)
    assert c.yarn == Yarn(factor=64.0) and c.num_nextn_predict_layers == 0
    (tmp_path / "text.json").write_text(config_json(c, torch.bfloat16))
    assert read_config(tmp_path / "text.json").model == c, "written again, without the wrapper"


@pytest.mark.parametrize("name", _STATED)
def test_a_wrapper_takes_no_default_of_a_class(tmp_path: Path, name: str):
    config = copy.deepcopy(KIMI)
    del config["text_config"][name]
    with pytest.raises(ValueError, match=rf"config.json: lacks text_config.{name}$"):
        described(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3' is not supported, only 'qwen3_moe'"),
        ({"hidden_size": "2048"}, "hidden_size='2048' is not supported, only a value of type int"),
        ({"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, "of type 'linear' is not"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta=1000000.0, and rope_theta=5"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "which of them?"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config: fmt='e5m2' is not supported"),
        ({"quantization_config": integers(num_bits=3)}, "num_bits=3 is not supported"),
        ({"logit_scale": 0.5}, "logit_scale=0.5: this key is unknown and may change what the model computes"),
        ({"num_experts": 10**9}, "model.num_experts=1000000000: must be less than or equal to 65536"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        described(tmp_path, QWEN | changes)
    assert message in str(error.value) and str(error.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(error.value)


def test_keys_without_effect_are_read(tmp_path: Path):
    harmless = {"use_cache": True, "sliding_window": 4096, "max_window_layers": 28, "some_feature": None}
    assert described(tmp_path, QWEN | harmless | {"layer_types": ["full_attention"] * 48}).model
    with pytest.raises(ValueError, match=r"config.json: text_tower=.*: this key is unknown"):
        described(tmp_path, KIMI | {"text_tower": {"scale": 2}})


@pytest.mark.parametrize("layers", [-(10**12), 10**12])
def test_a_number_of_dense_layers_that_would_take_all_memory_is_refused(tmp_path: Path, layers: int):
    text = KIMI["text_config"] | {"first_k_dense_replace": layers}
    with pytest.raises(ValueError, match="first_k_dense_replace"):
        described(tmp_path, KIMI | {"text_config": text})


def test_yarn_of_qwen3_is_written_and_read_again(tmp_path: Path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    c = described(tmp_path, QWEN | {"rope_scaling": yarn}).model
    assert c.yarn == Yarn(factor=4.0, original_max_position_embeddings=32768, mscale_all_dim=0.0)
    (tmp_path / "config.json").write_text(config_json(c, torch.bfloat16))
    assert read_config(tmp_path / "config.json").model == c
    with pytest.raises(ValueError, match="this form of YaRN"):
        described(tmp_path, QWEN | {"rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}})
    with pytest.raises(ValueError, match="mscale_all_dim=0"):
        replace(c, yarn=Yarn(factor=4.0))


# Quantised checkpoints, made by plain loops and read back; and Kimi K2.5's wrapper around one


DEEPSEEK = LATENT | {"hidden_size": 40, "tie_word_embeddings": False}
SMALL_KIMI = DEEPSEEK | {"hidden_size": 32, "moe_intermediate_size": 64}
NAME = "model.layers.1.mlp.experts.2.down_proj.weight"


def in_blocks(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales, and the float64 values that they represent, computed block by block."""
    blocks = [-(-length // size) for length in weight.shape]
    scale, exact = torch.zeros(blocks), torch.zeros(weight.shape, dtype=torch.float64)
    code = torch.zeros(weight.shape).to(torch.float8_e4m3fn)
    for r in range(blocks[0]):
        for c in range(blocks[1]):
            block = (slice(r * size, (r + 1) * size), slice(c * size, (c + 1) * size))
            scale[r, c] = weight[block].abs().max() / 448
            code[block] = (weight[block] / scale[r, c]).to(torch.float8_e4m3fn)
            exact[block] = code[block].double() * float(scale[r, c])
    return code, scale, exact


def in_words(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return words of eight codes, scales of groups of 32, and the float64 values that they represent, one weight at a time."""
    words, scales, exact = [], [], []
    for row in weight.tolist():
        step = [float(torch.tensor(max(map(abs, row[c : c + 32])) / 7).bfloat16()) for c in range(0, len(row), 32)]
        code = [max(-8, min(7, round(value / step[c // 32]))) for c, value in enumerate(row)]
        word = [sum((code[c + lane] + 8) << (4 * lane) for lane in range(8)) for c in range(0, len(row), 8)]
        words.append([value - 2**32 if value >= 2**31 else value for value in word])
        scales.append(step)
        exact.append([value * step[c // 32] for c, value in enumerate(code)])
    packed = torch.tensor(words, dtype=torch.int32)
    return packed, torch.tensor(scales).bfloat16(), torch.tensor(exact, dtype=torch.float64)


@pytest.fixture
def blocks(make_model, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return a DeepSeek-V3 checkpoint in float8, in blocks of 16 of which the sizes cut some, and the values of its weights."""
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
    (path / "model.safetensors").unlink()  # scales lie in a file of their own, as checkpoints may store them
    save_file(tensors, path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(scales, path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"model-0000{1 + (name in scales)}-of-00002.safetensors" for name in tensors | scales}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path, exact


@pytest.fixture
def kimi(make_model, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Kimi K2.5's shape: a text model under a prefix with int4 experts, and eyes."""
    path = tmp_path / "kimi"
    model = make_model(5, **SMALL_KIMI)
    for layer in model.layers[1:]:
        layer.router_bias.copy_(torch.randn(6))
    save_pretrained(model, path, dtype=torch.bfloat16)
    tensors = {"vision_tower.patch_embed.proj.weight": torch.randn(3, 2, 2, 2)}
    tensors["mm_projector.linear_1.bias"] = torch.ones(5)
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
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    text = json.loads((path / "config.json").read_text()) | {"model_type": "kimi_k2", "quantization_config": packed}
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (path / "config.json").write_text(json.dumps(config, indent=3))
    return path, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fixture", ["blocks", "kimi"])
def test_weights_are_what_a_loop_in_float64_says(request: pytest.FixtureRequest, fixture: str, dtype: torch.dtype):
    path, exact = request.getfixturevalue(fixture)
    model = load_pretrained(path, dtype=dtype)
    views = hugging_face_views(model)
    assert views.keys() == exact.keys()
    for name, view in views.items():
        assert view.dtype == (torch.float32 if name.endswith(ROUTER_BIAS) else model.embed.dtype)
        assert torch.equal(view, exact[name].to(torch.float32).to(view.dtype)), name
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
        ("_scale", torch.full((32, 2), torch.nan), "_packed holds NaN, infinity"),
        ("_shape", torch.tensor([64, 32]), r"weight_shape says \(64, 32\), config.json says \(32, 64\)"),
        ("_scale", None, f"one tensor is missing, first language_model.{NAME}_scale"),
    ],
)
def test_parts_that_do_not_fit_are_named(kimi, part: str, tensor: Tensor | None, message: str):
    path, _ = kimi
    edit(path, f"language_model.{NAME}{part}", tensor)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(path)
    assert NAME in str(error.value) and "\n" not in str(error.value)


def test_what_is_foreign_is_listed(kimi, make_model, tmp_path: Path):
    def add(path: Path, name: str) -> Path:
        save_file({**load_file(path / "model.safetensors"), name: torch.ones(1)}, path / "model.safetensors")
        return path

    load_pretrained(add(kimi[0], "vision_tower.x"))
    save_pretrained(make_model(5, **SMALL_KIMI), tmp_path / "text", dtype=torch.bfloat16)
    for path, name in ((tmp_path / "text", "vision_tower.x"), (kimi[0], "language_model.extra")):
        with pytest.raises(ValueError, match=f"one tensor is unknown, first {name}"):
            load_pretrained(add(path, name))
