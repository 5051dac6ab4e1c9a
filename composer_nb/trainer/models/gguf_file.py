"""Read a model and its tokenizer from a GGUF file, the format of llama.cpp, through the library `gguf`.

Numbers are dequantised to float32. llama.cpp's converter reorders the rows of Llama's query and key matrices so that rotated
pairs are neighbours; this is undone (docs/models.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from composer_nb.trainer.models.checkpoint import empty_model, from_hugging_face
from composer_nb.trainer.models.config import DENSE, ModelConfig
from composer_nb.trainer.models.tokenizer import cut_by
from composer_nb.trainer.models.transformer import Model

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
"""Hugging Face's names of tensors, within a layer those after `model.layers.N.`."""
_CONTROL = 3
"""Type of a token that no text is encoded to."""
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]),
    "qwen2": cut_by(_WORDS),
}
"""How text is cut before byte pairs are merged, by `tokenizer.ggml.pre`."""


def read_gguf(file: Path) -> tuple[Model, Tokenizer]:
    """Return the model, in float32, and the tokenizer. Raises FileNotFoundError, and ValueError that names the file
    and the key or tensor for another architecture, quantisation or tokenizer, or that says that the library is missing."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"{file}: reading GGUF needs the library gguf: pip install 'composer-nb[gguf]'") from None
    try:
        reader = GGUFReader(file)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{file}: not a GGUF file, or damaged: {error}") from None
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {t.name: t for t in reader.tensors}
        config = _config(fields, tied="output.weight" not in tensors)
        model = empty_model(config)
        from_hugging_face(model, {_name(name): _weight(t, config) for name, t in tensors.items()})
        return model, _tokenizer(fields)
    except Exception as error:  # of many kinds, where its numbers, tokens and merges contradict each other
        raise ValueError(f"{file}: {error}") from error


def _config(fields: dict[str, Any], *, tied: bool) -> ModelConfig:
    family = _stated(fields, "general.architecture")
    if family not in DENSE:
        raise ValueError(f"general.architecture={family!r} is not supported, only {', '.join(map(repr, DENSE))}")
    if (scaling := fields.get(f"{family}.rope.scaling.type", "none")) != "none":
        raise ValueError(f"{family}.rope.scaling.type={scaling!r} is not supported")
    names = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "max_position_embeddings": "context_length",
        "rope_theta": "rope.freq_base",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    sizes = {name: _stated(fields, f"{family}.{key}") for name, key in names.items()}
    width = fields.get(f"{family}.attention.key_length", sizes["hidden_size"] // sizes["num_attention_heads"])
    sizes["qk_norm_gain"] = 1.0
    sizes["rms_norm_eps"] = float(f"{sizes['rms_norm_eps']:.6g}")  # a float32 of the decimal that was meant
    vocabulary = len(_stated(fields, "tokenizer.ggml.tokens"))
    return ModelConfig(family=family, head_dim=width, vocab_size=vocabulary, tie_word_embeddings=tied, **sizes)


def _stated(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"lacks {name}")
    return fields[name]


def _name(name: str) -> str:
    """Return Hugging Face's name of a tensor, as `blk.3.attn_q.weight`; as it is where none is known."""
    block, layer, rest = name.split(".", 2) if name.startswith("blk.") else ("", "", name)
    part, _, kind = rest.rpartition(".")
    prefix = f"model.layers.{layer}." if block else ""
    return f"{prefix}{NAMES[part]}.{kind}" if part in NAMES else name


def _weight(tensor: Any, c: ModelConfig) -> Tensor:
    """Return one tensor in float32, [out, in]."""
    from gguf.quants import dequantize

    try:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
    except (NotImplementedError, KeyError):
        raise ValueError(f"{tensor.name}: {tensor.tensor_type.name} is not supported") from None
    weight = weight.reshape(tuple(reversed(tensor.shape.tolist())))
    part = tensor.name.split(".")[-2]
    if c.family == "llama" and part in ("attn_q", "attn_k"):
        heads = c.num_attention_heads if part == "attn_q" else c.num_key_value_heads
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return weight


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    kind, split = _stated(fields, "tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={split!r} is not supported, only 'gpt2' with "
            f"{', '.join(map(repr, _SPLITS))}"
        )
    tokens = _stated(fields, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ", 1)) for pair in _stated(fields, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _SPLITS[split]
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
