"""Read and write config.json of every family, without guessing: each known key is applied or refused.

Kimi K2.5, a model with vision, describes its language model in `text_config` and prefixes its weights with `language_model.`.
There every size must be stated, because `transformers` would fall back to the defaults of DeepSeek-V3.

Two quantised formats are read: DeepSeek-V3's float8 blocks, and the int4 or int8 groups that compressed-tensors packs (the routed
experts of Kimi K2 Thinking and K2.5). Decoding gives the numbers that an engine multiplies with, in float32. Activations, which
some engines round too, are not touched.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_nb.harness.untrusted import json_of, visible
from composer_nb.kernels.formats.groupwise import dequantize, dequantize_blocks, unpack
from composer_nb.trainer.models.config import DEEPSEEK, FOREIGN, QWEN, Family, ModelConfig, Yarn

Shape = tuple[int, ...]
# Dtypes of plain weights and of scales. Tensors of one checkpoint may differ in it.
FLOATS = "F64|F32|F16|BF16"

# Quantised weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatBlocks:
    """`X.weight` in float8 and `X.weight_scale_inv`, one factor per block (arXiv 2412.19437, §3.3.2)."""

    rows: int
    columns: int

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors that encode the weight `name`."""
        return name, name + "_scale_inv"

    def forms(self, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Return dtypes (alternatives separated by |) and shapes of these tensors."""
        blocks = (-(-shape[0] // self.rows), -(-shape[1] // self.columns))
        return ("F8_E4M3", shape), (FLOATS, blocks)

    def decode(self, shape: Shape, code: Tensor, scale: Tensor) -> Tensor:
        return dequantize_blocks(code, scale, rows=self.rows, columns=self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntegers:
    """`X.weight_packed`, `X.weight_scale` per group along the input, and `X.weight_shape` (compressed-tensors)."""

    bits: int
    group: int

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors that encode the weight `name`."""
        return name + "_packed", name + "_scale", name + "_shape"

    def forms(self, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Return dtypes (alternatives separated by |) and shapes of these tensors. Raises ValueError if the group does not
        divide the input width."""
        if shape[1] % self.group:
            raise ValueError(f"an input width of {shape[1]} is no multiple of group_size={self.group}")
        words, groups = -(-shape[1] * self.bits // 32), shape[1] // self.group
        return ("I32", (shape[0], words)), (FLOATS, (shape[0], groups)), ("I32|I64", (2,))

    def decode(self, shape: Shape, word: Tensor, scale: Tensor, written: Tensor) -> Tensor:
        """Raises ValueError if the checkpoint states another shape."""
        if tuple(written.tolist()) != shape:
            raise ValueError(f"weight_shape says {tuple(written.tolist())}, config.json says {shape}")
        return dequantize(unpack(word, shape[1], bits=self.bits), scale)


Format = FloatBlocks | PackedIntegers

# Supported values of keys of a quantization_config and of its parts.
_SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": ("e4m3", None)},
    "compressed-tensors": {"format": ("pack-quantized",)},
    "group": {"input_activations": (None,), "format": (None, "pack-quantized")},
    "weights": {
        "num_bits": (4, 8), "type": ("int",), "symmetric": (True,), "strategy": ("group",),
        "actorder": (None, "weight", "static", False), "dynamic": (False, None),
    },
}  # fmt: skip
# Their keys of any value.
_OTHER_KEYS: dict[str, str] = {
    "fp8": "quant_method weight_block_size activation_scheme modules_to_not_convert scale_fmt",
    "compressed-tensors": "quant_method config_groups ignore quantization_status global_compression_ratio version",
    "group": "targets weights",
    "weights": "group_size observer observer_kwargs scale_dtype zp_dtype",
}


def _check_part(part: object, kind: str) -> dict[str, Any]:
    """Return a part of a quantization_config. Raises ValueError that names a key or a value that is not supported."""
    if not isinstance(part, dict):
        raise ValueError(f"{kind}={part!r:.80} is no JSON object")
    for name, values in _SUPPORTED[kind].items():
        _require(part, name, values)
    _refuse_unknown(part, {*_SUPPORTED[kind], *_OTHER_KEYS[kind].split()})
    return part


def _read_format(quantization: Mapping[str, Any]) -> Format:
    """Return the format that a `quantization_config` describes. Raises ValueError that names the key if it is unsupported."""
    method = quantization.get("quant_method")
    if method not in ("fp8", "compressed-tensors"):
        raise ValueError(f"quant_method={method!r} is not supported, only 'fp8' and 'compressed-tensors'")
    _check_part(quantization, method)
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
            raise ValueError(f"weight_block_size={block!r} is not supported, only two sizes, as [128, 128]")
        return FloatBlocks(rows=block[0], columns=block[1])
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError("config_groups of more or less than one group is not supported")
    weights = _check_part(_check_part(next(iter(groups.values())), "group").get("weights"), "weights")
    if type(group := weights.get("group_size")) is not int or group < 1:
        raise ValueError(f"group_size={group!r} is not supported, only a number of weights")
    return PackedIntegers(bits=weights["num_bits"], group=group)


def _require(config: Mapping[str, Any], name: str, values: Sequence[Any]) -> None:
    if config.get(name) not in values:
        raise ValueError(f"{name}={config.get(name)!r} is not supported, only {values[0]!r}")


def _refuse_unknown(config: Mapping[str, Any], supported: Collection[str]) -> None:
    """Raise ValueError for a key that is not in `supported`, unless it says nothing."""
    for name, value in config.items():
        if name not in supported and value not in (None, {}, []):
            stated = visible(f"{name}={value!r}"[:200])
            raise ValueError(f"{stated}: this key is unknown and may change what the model computes; remove it if not")


# config.json

# Settings that `Model` computes with. A config.json that states another value is refused.
_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "mixtral": {"hidden_act": "silu", "sliding_window": None},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "deepseek_v3": {
        "hidden_act": "silu", "attention_bias": False, "moe_layer_freq": 1, "rope_interleave": True, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}  # fmt: skip
# Defaults of the family's configuration class that differ from `_FIXED` and `ModelConfig`.
_ABSENT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": False, "intermediate_size": 6144},
    "mixtral": {"rms_norm_eps": 1e-5},
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
}
_CLASSES: dict[Family, str] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
_FAMILIES: dict[str, Family] = {**{family: family for family in _CLASSES}, "kimi_k2": "deepseek_v3"}
_WRAPPER, _PREFIX = "kimi_k25", "language_model."
# Class names, and the model types allowed with each.
_ARCHITECTURES = {
    **{name: (family,) for family, name in _CLASSES.items()},
    "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
    "KimiK2ForCausalLM": ("kimi_k2",),
    "KimiK25ForConditionalGeneration": (_WRAPPER,),
    "Kimi_K25ForConditionalGeneration": (_WRAPPER,),
}
# Keys of `transformers` that change no logits: names, token ids, training, sampling. Of other keys each must be known.
_WITHOUT_EFFECT = frozenset(
    """
    architectures auto_map model_type transformers_version _name_or_path name_or_path tokenizer_class dtype torch_dtype
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    initializer_range attention_dropout use_cache pretraining_tp ep_size aux_loss_alpha seq_aux router_aux_loss_coef
    router_jitter_noise output_router_logits output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate id2label label2id problem_type finetuning_task task_specific_params prefix pruned_heads
    torchscript tf_legacy_loss use_bfloat16 chunk_size_feed_forward is_decoder is_encoder_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder max_length min_length do_sample early_stopping num_beams
    num_beam_groups num_return_sequences diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens
    begin_suppress_tokens remove_invalid_values exponential_decay_length_penalty attn_implementation
    _attn_implementation _attn_implementation_autoset experts_implementation
    """.split()
)
_ELSEWHERE = frozenset("rope_theta rope_scaling rope_parameters quantization_config partial_rotary_factor".split())
# Keys that some checkpoints state, and the values with which they agree with `Model`.
_FURTHER: dict[Family, dict[str, tuple[Any, ...]]] = {
    "qwen3_moe": {"use_qk_norm": (True,), "qkv_bias": (False,), "shared_expert_intermediate_size": (0,)},
    "qwen3": {"use_qk_norm": (True,)},
    "qwen2": {"use_mrope": (False,)},
    "llama": {"rope_interleaved": (False,), "is_llama_config": (True,)},
}
# Keys that are read under another name or follow from others. A sliding window is unused, see `_FIXED`.
_OTHER_NAMES: dict[Family, tuple[str, ...]] = {
    "qwen3_moe": ("num_local_experts", "sliding_window", "max_window_layers"),
    "qwen3": ("sliding_window", "max_window_layers"),
    "qwen2": ("sliding_window", "max_window_layers"),
    "mixtral": ("num_local_experts", "intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "num_local_experts", "head_dim", "qk_head_dim"),
}
# Keys of a model with vision, beside those of its language model.
_WRAPPED = frozenset(
    """
    text_config vision_config quantization_config tie_word_embeddings ignore_index media_placeholder_token_id
    image_token_id video_token_id video_placeholder use_unified_vision_chunk
    """.split()
)
# Keys that a text_config must state, if only as null.
_STATED = (
    *(name for name in DEEPSEEK if name != "num_nextn_predict_layers"),
    *(
        "vocab_size hidden_size num_hidden_layers num_attention_heads n_routed_experts num_experts_per_tok "
        "moe_intermediate_size intermediate_size max_position_embeddings rms_norm_eps norm_topk_prob hidden_act"
    ).split(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Contents of a config.json.

    Attributes:
        prefix: Prefix of the names of the language model's tensors.
        format: Format of quantised weights; None if there are none.
    """

    model: ModelConfig
    prefix: str = ""
    format: Format | None = None


def read_config(file: Path) -> Described:
    """Read a config.json as written by any `transformers` release. Raises FileNotFoundError or ValueError that names the file
    and the key, also for a key that is not known."""
    try:
        raw = json_of(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file.parent}: not a checkpoint, config.json is missing") from None
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    try:
        return _described(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


def _described(raw: object) -> Described:
    """Return what a parsed config.json describes, unwrapped from a model with vision. Raises ValueError for one that is not
    supported."""
    if not isinstance(raw, dict):
        raise ValueError("holds no JSON object, so it is not the configuration of a model")
    _check_architecture(raw)
    inner: Any = raw
    prefix, quantization = "", raw.get("quantization_config")
    if raw.get("model_type") == _WRAPPER:
        inner, prefix = raw.get("text_config"), _PREFIX
        if not isinstance(inner, dict):
            raise ValueError("lacks text_config, which describes the language model")
        _refuse_unknown(raw, _WITHOUT_EFFECT | _WRAPPED)
        if missing := [name for name in _STATED if name not in inner]:
            raise ValueError(f"lacks {', '.join(f'text_config.{name}' for name in missing)}")
        if inner.keys().isdisjoint({"rope_parameters", "rope_scaling"}):
            raise ValueError("lacks text_config.rope_scaling")
        _check_architecture(inner)
        quantization = inner.get("quantization_config") or quantization
    if quantization is not None and not isinstance(quantization, dict):
        raise ValueError("quantization_config is no JSON object")
    try:
        format = None if quantization is None else _read_format(quantization)
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
    """Return the configuration of one language model. `strict`: take no defaults of the family's configuration class."""
    raw = {name: value for name, value in stated.items() if value is not None}
    family = _FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise ValueError(f"text_config.model_type={raw.get('model_type')!r} is not supported")
    config: dict[str, Any] = {**_FIXED[family], **({} if strict else _ABSENT.get(family, {})), **raw}
    for name, value in _FIXED[family].items():
        setting = None if value is True and stated.get(name, value) is None else config[name]  # null is not true
        if setting != value:
            raise ValueError(f"{name}={setting!r} is not supported, only {value!r}")
    _check_keys(raw, family)
    rope = _rope(raw)
    defaults = {name: field.default for name, field in ModelConfig.__dataclass_fields__.items()}
    foreign = FOREIGN[family]
    absent = {
        "family": family,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope.get("rope_theta", None if strict else 1e6 if family == "mixtral" else 1e4),
        "qk_norm_gain": 1.0,
        "yarn": _yarn(rope, family),
        "num_experts": raw.get("n_routed_experts", raw.get("num_local_experts")),
        **{name: defaults[name] for name in {*foreign, *QWEN, "norm_topk_prob"}},
    }
    if "norm_topk_prob" in stated and stated["norm_topk_prob"] is None:  # null is not true
        config["norm_topk_prob"] = False
    config = {name: value for name, value in config.items() if name not in foreign}
    if family == "deepseek_v3":
        heads = raw.get("num_attention_heads")
        absent |= {"q_lora_rank": 0, "num_nextn_predict_layers": 0, "num_key_value_heads": heads}
        config["head_dim"] = _number(config, "qk_nope_head_dim", 0) + _number(config, "qk_rope_head_dim", 0)
    else:
        absent["head_dim"] = _number(raw, "hidden_size", 0) // max(_number(raw, "num_attention_heads", 1), 1)
    if family == "qwen3_moe":
        layers = config.get("mlp_only_layers", [])
        if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
            raise ValueError(f"mlp_only_layers={layers!r} is not supported, only a list of layers")
        config["mlp_only_layers"] = tuple(layers)
        if not layers and config.get("decoder_sparse_step", 1) == 1:  # stated in every file, and unused
            config["intermediate_size"] = 0
    if family == "mixtral":  # whose experts have the width that other families give to dense layers
        config["moe_intermediate_size"] = raw.get("intermediate_size")
    config = {name: value for name, value in absent.items() if value is not None} | config
    if missing := [name for name in defaults if name not in config]:
        raise ValueError(f"lacks {', '.join(missing)}")
    return ModelConfig(**{name: config[name] for name in defaults})


def _check_keys(raw: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for a key that `Model` might have to compute with, and does not."""
    for name, values in {**_FURTHER.get(family, {}), "layer_types": ()}.items():
        if name in raw and raw[name] not in values and (name != "layer_types" or set(raw[name]) != {"full_attention"}):
            raise ValueError(f"{name}={raw[name]!r} is not supported, only {[*values, 'full_attention'][0]!r}")
    fields = ModelConfig.__dataclass_fields__.keys() - {"family", "yarn", *FOREIGN[family]}
    family_keys = {*_FIXED[family], *_FURTHER.get(family, ()), *_OTHER_NAMES.get(family, ()), "layer_types"}
    _refuse_unknown(raw, fields | family_keys | _WITHOUT_EFFECT | _ELSEWHERE)


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of positions, checked for contradictions."""
    both = [raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    rope = both[0] if both else {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters or rope_scaling is {rope!r}, no JSON object")
    if len(both) == 2 and both[0] != both[1]:
        raise ValueError(f"rope_parameters={both[0]!r}, and rope_scaling={both[1]!r}: which of them?")
    thetas = [keys["rope_theta"] for keys in (raw, rope) if keys.get("rope_theta") is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:  # releases of `transformers` differ in which one they use
        raise ValueError(
            f"rope_theta={thetas[0]}, and rope_theta={thetas[1]} in rope_parameters or rope_scaling: which?"
        )
    for keys in (raw, rope):
        if (part := keys.get("partial_rotary_factor", 1)) not in (1, None):
            raise ValueError(f"partial_rotary_factor={part!r} is not supported, only 1")
    return rope


def _number(config: Mapping[str, Any], name: str, absent: int) -> int:
    if type(value := config.get(name, absent)) is not int:
        raise ValueError(f"{name}={value!r} is not supported, only a value of type int")
    return int(value)


def _yarn(rope: Mapping[str, Any], family: Family) -> Yarn:
    """Return the extension of positions. `transformers` balances two temperatures if a configuration states both, and otherwise
    applies one to the rotated part alone, which Yarn expresses as mscale_all_dim = 0."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise ValueError(f"rope_type={kind!r}, and type={rope['type']!r} in rope_parameters or rope_scaling: which?")
    general = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "default":
        _refuse_unknown(rope, general)
        return Yarn()
    if kind != "yarn":
        raise ValueError(f"rope_parameters or rope_scaling of type {kind!r} is not supported, only 'default', 'yarn'")
    both = bool(rope.get("mscale")) and bool(rope.get("mscale_all_dim"))
    if (
        rope.get("attention_factor") is not None
        or not rope.get("truncate", True)
        or bool(rope.get("mscale_all_dim")) != both
        or (both and family != "deepseek_v3")
    ):
        raise ValueError(f"rope_parameters or rope_scaling: this form of YaRN is not supported: {dict(rope)}")
    if missing := [name for name in ("factor", "original_max_position_embeddings") if rope.get(name) is None]:
        raise ValueError(f"rope_parameters or rope_scaling of type 'yarn' lacks {', '.join(missing)}")
    _refuse_unknown(rope, {*general, *Yarn.__dataclass_fields__, "attention_factor", "truncate"})
    stated = {name: rope[name] for name in Yarn.__dataclass_fields__ if rope.get(name) is not None}
    return Yarn(**stated if both else {**stated, "mscale": 1.0, "mscale_all_dim": 0.0})


def config_json(c: ModelConfig, dtype: torch.dtype, token_ids: Mapping[str, Any] | None = None) -> str:
    """Return the text of a config.json. `token_ids`: ids of special tokens, by key."""
    sizes, yarn = c.to_dict(), asdict(c.yarn)
    for name in ("family", "yarn", *FOREIGN[c.family], *(("head_dim", "qk_norm_gain") if c.latent else ())):
        del sizes[name]
    if not c.latent:  # one temperature, the paper's
        del yarn["mscale"], yarn["mscale_all_dim"]
    rope = {"rope_type": "yarn", **yarn} if c.yarn.factor != 1 else {"rope_type": "default"}
    config = {**sizes, **_FIXED[c.family], "model_type": c.family, "torch_dtype": str(dtype).removeprefix("torch.")}
    config["architectures"] = [_CLASSES[c.family]]
    if c.latent:
        config["n_routed_experts"] = config.pop("num_experts")
        config["q_lora_rank"] = c.q_lora_rank or None
    if c.family == "qwen3_moe":
        config["intermediate_size"] = c.intermediate_size or c.moe_intermediate_size
    if c.family == "mixtral":
        config["num_local_experts"] = config.pop("num_experts")
        config["intermediate_size"] = config.pop("moe_intermediate_size")
    if c.moe_layers and not c.latent:
        config["router_aux_loss_coef"] = 0.001
    if c.latent or c.yarn.factor != 1:
        config["rope_parameters"] = {**rope, "rope_theta": c.rope_theta}
    return json.dumps({**config, **(token_ids or {})}, indent=2) + "\n"
