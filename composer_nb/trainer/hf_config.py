"""config.json of both families: read with nothing guessed or passed over, and written.

A model that also sees, Kimi K2.5, describes its language model in `text_config` and keeps the weights of it under
`language_model.`. There every size must be stated: the defaults of the family in `transformers` are those of DeepSeek-V3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from composer_nb.trainer.hf_quantized import Format, read_format
from composer_nb.trainer.model import DEEPSEEK, Family, ModelConfig, Yarn

_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "deepseek_v3": {
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "attention_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
"""What `Model` computes. A config.json that asks for something else is refused."""
_ABSENT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": False},
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
}
"""What the family's configuration means by saying nothing, where that is not what `_FIXED` or `ModelConfig` has."""
_FAMILIES: dict[str, Family] = {
    "qwen3_moe": "qwen3_moe",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
}
_WRAPPER, _PREFIX = "kimi_k25", "language_model."
_ARCHITECTURES = {
    "Qwen3MoeForCausalLM": ("qwen3_moe",),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
    "KimiK2ForCausalLM": ("kimi_k2",),
    "KimiK25ForConditionalGeneration": (_WRAPPER,),
    "Kimi_K25ForConditionalGeneration": (_WRAPPER,),
}
"""Names of classes, and the model types that they may stand beside."""
_STATED = (
    *(name for name in DEEPSEEK if name != "num_nextn_predict_layers"),
    *(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "n_routed_experts",
        "num_experts_per_tok",
    ),
    *("moe_intermediate_size", "max_position_embeddings", "rms_norm_eps", "norm_topk_prob", "hidden_act"),
)
"""What a text_config must say itself (some of it may be null)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a config.json says."""

    model: ModelConfig
    prefix: str = ""
    """Of the names of all tensors of the language model."""
    format: Format | None = None
    """How quantised weights are kept; None: there are none."""


def read_config(file: Path) -> Described:
    """Reads a config.json under the names of any `transformers` release. What a key that is known here asks for is done or
    refused, never guessed; keys that are not known are passed over. Raises FileNotFoundError or ValueError that names the file
    and the key."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file.parent}: not a checkpoint, config.json is missing") from None
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    try:
        return _described(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


def _described(raw: object) -> Described:
    if not isinstance(raw, dict):
        raise ValueError("holds no JSON object, so it is not the configuration of a model")
    _check_architecture(raw)
    inner: Any = raw
    prefix, quantization = "", raw.get("quantization_config")
    if raw.get("model_type") == _WRAPPER:
        inner, prefix = raw.get("text_config"), _PREFIX
        if not isinstance(inner, dict):
            raise ValueError("lacks text_config, which describes the language model")
        if missing := [name for name in _STATED if name not in inner]:
            raise ValueError(f"lacks {', '.join(f'text_config.{name}' for name in missing)}")
        if inner.keys().isdisjoint({"rope_parameters", "rope_scaling"}):
            raise ValueError("lacks text_config.rope_scaling")
        _check_architecture(inner)
        quantization = inner.get("quantization_config") or quantization
    format = None
    if quantization is not None:
        if not isinstance(quantization, dict):
            raise ValueError("quantization_config is no JSON object")
        try:
            format = read_format(quantization)
        except ValueError as error:
            raise ValueError(f"quantization_config: {error}") from None
    return Described(model=_model_config(inner, strict=bool(prefix)), prefix=prefix, format=format)


def _check_architecture(raw: Mapping[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind not in (*_FAMILIES, _WRAPPER):
        raise ValueError(f"model_type={kind!r} is not supported, only {', '.join(map(repr, (*_FAMILIES, _WRAPPER)))}")
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures={names!r} is no list of names")
    for name in names:
        if kind not in _ARCHITECTURES.get(name, ()):
            raise ValueError(f"architectures={name!r} is not supported with model_type={kind!r}")


def _model_config(stated: Mapping[str, Any], *, strict: bool) -> ModelConfig:
    """The configuration of one language model. `strict`: nothing is taken for granted that a family has a default for."""
    raw = {name: value for name, value in stated.items() if value is not None}
    family = _FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise ValueError(f"text_config.model_type={raw.get('model_type')!r} is not supported")
    config: dict[str, Any] = {**_FIXED[family], **({} if strict else _ABSENT[family]), **raw}
    for name, value in _FIXED[family].items():
        given = None if value is True and stated.get(name, value) is None else config[name]  # null is no true
        if given != value:
            raise ValueError(f"{name}={given!r} is not supported, only {value!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters or rope_scaling is {rope!r}, no JSON object")
    thetas = [given["rope_theta"] for given in (raw, rope) if given.get("rope_theta") is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:  # releases of `transformers` differ in which they take
        raise ValueError(
            f"rope_theta={thetas[0]}, and rope_theta={thetas[1]} in rope_parameters or rope_scaling: which of them?"
        )
    for given in (raw, rope):
        if (part := given.get("partial_rotary_factor", 1)) not in (1, None):
            raise ValueError(f"partial_rotary_factor={part!r} is not supported, only 1")
    absent = {
        "family": family,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope.get("rope_theta", None if strict else 10_000.0),
        "qk_norm_gain": 1.0,
        "yarn": _yarn(rope, family),
        "num_experts": raw.get("n_routed_experts", raw.get("num_local_experts")),
        **{name: ModelConfig.__dataclass_fields__[name].default for name in DEEPSEEK if family == "qwen3_moe"},
    }
    if family == "deepseek_v3":
        absent |= {
            "q_lora_rank": 0,
            "num_nextn_predict_layers": 0,
            "num_key_value_heads": raw.get("num_attention_heads"),
        }
        config["head_dim"] = _number(config, "qk_nope_head_dim", 0) + _number(config, "qk_rope_head_dim", 0)
    else:
        config = {name: value for name, value in config.items() if name not in DEEPSEEK}
        absent["head_dim"] = _number(raw, "hidden_size", 0) // max(_number(raw, "num_attention_heads", 1), 1)
    config = {name: value for name, value in absent.items() if value is not None} | config
    sizes = ModelConfig.__dataclass_fields__
    if missing := [name for name in sizes if name not in config]:
        raise ValueError(f"lacks {', '.join(missing)}")
    for name, field in sizes.items():
        _check_type(name, config[name], str(field.type))
    return ModelConfig(**{name: config[name] for name in sizes})


def _number(config: Mapping[str, Any], name: str, absent: int) -> int:
    value = config.get(name, absent)
    _check_type(name, value, "int")
    return int(value)


def _check_type(name: str, value: object, kind: str) -> None:
    allowed = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(kind)
    if allowed is not None and (not isinstance(value, allowed) or (kind != "bool" and isinstance(value, bool))):
        raise ValueError(f"{name}={value!r} is not supported, only a value of type {kind}")


def _yarn(rope: Mapping[str, Any], family: Family) -> Yarn:
    """How positions are stretched. `transformers` weighs two temperatures against each other where a configuration gives both,
    and else has one for the turned part alone; Yarn says that by mscale_all_dim = 0."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Yarn()
    if kind != "yarn":
        raise ValueError(
            f"rope_parameters or rope_scaling of type {kind!r} is not supported, only 'default' and 'yarn'"
        )
    both = bool(rope.get("mscale")) and bool(rope.get("mscale_all_dim"))
    if (
        rope.get("attention_factor") is not None
        or not rope.get("truncate", True)
        or bool(rope.get("mscale_all_dim")) != both
        or (both and family == "qwen3_moe")
    ):
        raise ValueError(f"rope_parameters or rope_scaling: this form of YaRN is not supported: {dict(rope)}")
    if missing := [name for name in ("factor", "original_max_position_embeddings") if rope.get(name) is None]:
        raise ValueError(f"rope_parameters or rope_scaling of type 'yarn' lacks {', '.join(missing)}")
    known = {name: rope[name] for name in Yarn.__dataclass_fields__ if rope.get(name) is not None}
    for name, value in known.items():
        _check_type(name, value, str(Yarn.__dataclass_fields__[name].type))
    return Yarn(**known if both else {**known, "mscale": 1.0, "mscale_all_dim": 0.0})


def config_json(c: ModelConfig, dtype: torch.dtype) -> str:
    """The text of config.json."""
    sizes = c.to_dict()
    family, yarn = sizes.pop("family"), asdict(c.yarn)
    del sizes["yarn"]
    if not c.latent:  # it knows one temperature, the paper's
        del yarn["mscale"], yarn["mscale_all_dim"]
    stretched = {"rope_parameters": {"rope_type": "yarn", **yarn, "rope_theta": c.rope_theta}}
    common = {**_FIXED[c.family], "model_type": family, "torch_dtype": str(dtype).removeprefix("torch.")}
    if not c.latent:
        for name in DEEPSEEK:
            del sizes[name]
        config = {
            **sizes,
            **common,
            "architectures": ["Qwen3MoeForCausalLM"],
            "intermediate_size": c.moe_intermediate_size,
            "router_aux_loss_coef": 0.001,
            **({} if c.yarn.factor == 1 else stretched),
        }
    else:
        for name in ("head_dim", "qk_norm_gain"):
            del sizes[name]
        sizes["n_routed_experts"] = sizes.pop("num_experts")
        sizes["q_lora_rank"] = c.q_lora_rank or None
        plain = {"rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}}
        config = {
            **sizes,
            **common,
            "architectures": ["DeepseekV3ForCausalLM"],
            **(plain if c.yarn.factor == 1 else stretched),
        }
    return json.dumps(config, indent=2) + "\n"
