"""Read a model and its tokenizer from a GGUF file, the format of llama.cpp, through its library `gguf`.

Every count in the header is compared with what is left of the file before anything is made of it. Numbers are dequantised to
float32. llama.cpp's converter reorders the rows of Llama's query and key matrices so that rotated pairs are neighbours; this is
undone (docs/models.md).
"""

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from composer_nb.harness.files import to_json
from composer_nb.trainer.models.checkpoint import check_counts, empty_model, from_hugging_face
from composer_nb.trainer.models.companions import GENERATION, SETTINGS, TEMPLATE, TOKENIZER
from composer_nb.trainer.models.config import DENSE, ModelConfig
from composer_nb.trainer.models.tokenizer import cut_by
from composer_nb.trainer.models.transformer import Model

# Hugging Face's names of tensors, within a layer those after `model.layers.N.`.
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
# Special tokens in Hugging Face's files and in `tokenizer.ggml.*_token_id`.
_ENDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
# Types of tokens that are found in a text before it is cut: special ones, and those that its author added.
_CONTROL, _USER_DEFINED = 3, 4
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before byte pairs are merged, by `tokenizer.ggml.pre`.
_SPLITS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]),
    "qwen2": cut_by(_WORDS),
}


def read_gguf(file: Path) -> Model:
    """Return the model, in float32, with its tokenizer and what the file says of turns as its companions. Raises
    FileNotFoundError, and ValueError that names the file and the key or tensor for another architecture, quantisation or
    tokenizer, or that says that the library is missing."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ValueError(f"{file}: reading GGUF needs the library gguf: pip install -e '.[gguf]'") from None
    try:
        fields, tensors = _read(file)
    except Exception as error:  # of many kinds: the library checks little
        raise ValueError(f"{file}: not a GGUF file, or damaged: {error}") from None
    try:
        config = _config(fields, tied="output.weight" not in tensors)
        check_counts("it", config, len(tensors))
        model = empty_model(config)
        from_hugging_face(model, {_name(name): _weight(name, t, config) for name, t in tensors.items()})
        model.companions = _companions(fields)
        return model
    except Exception as error:  # of many kinds, where its numbers, tokens and merges contradict each other
        raise ValueError(f"{file}: {error}") from error


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and the tensors of a file, by name. Raises ValueError and the like if it announces more than it holds."""
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):  # the library's own goes on behind the end of a file, where everything is empty
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> NDArray[Any]:
            part: NDArray[Any] = super()._get(offset, dtype, count, *order, **more)
            if len(part) < count:
                raise ValueError(f"it ends before {count:,} of what it announces at byte {offset:,}")
            return part

    reader = BoundedReader(file)
    if sum(tensor.n_bytes for tensor in reader.tensors) > len(reader.data):
        raise ValueError("several tensors have the same place, so it holds less than it announces")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _config(fields: dict[str, Any], *, tied: bool) -> ModelConfig:
    """Return the configuration of a GGUF file's fields. Raises ValueError for a family or a field that is not supported."""
    family = _stated(fields, "general.architecture")
    if family not in DENSE:
        raise ValueError(f"general.architecture={family!r} is not supported, only {', '.join(map(repr, DENSE))}")
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
    width = fields.get(f"{family}.attention.key_length", sizes["hidden_size"] // max(sizes["num_attention_heads"], 1))
    expected = {
        **{"attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width},
        **{"attention.causal": True, "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0},
        "vocab_size": fields.get(f"{family}.vocab_size"),
    }
    for name in fields:
        key = name.removeprefix(f"{family}.")
        if key != name and key not in names.values() and (key not in expected or expected[key] != fields[name]):
            raise ValueError(f"{name}={fields[name]!r:.80} is not supported: it may change what the model computes")
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


def _weight(name: str, tensor: Any, c: ModelConfig) -> Tensor:
    """Return one tensor in float32, [out, in]."""
    from gguf.quants import dequantize

    try:
        numbers = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, KeyError):
        raise ValueError(f"{name}: {tensor.tensor_type.name} is not supported") from None
    weight = torch.tensor(numbers, dtype=torch.float32).reshape(tensor.shape.tolist()[::-1])
    part = name.split(".")[-2]
    if c.family == "llama" and part in ("attn_q", "attn_k"):
        heads = c.num_attention_heads if part == "attn_q" else c.num_key_value_heads
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return weight


def _companions(fields: dict[str, Any]) -> dict[str, bytes]:
    """Return the files that a checkpoint folder would have for what the file says of tokens, turns and templates."""
    tokens = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _ENDS.items()}
    ids = {f"{name}_token_id": number for name, number in tokens.items() if number is not None}
    words = _stated(fields, "tokenizer.ggml.tokens")
    named = {f"{name}_token": words[number] for name, number in tokens.items() if number is not None}
    files = {
        TOKENIZER: _tokenizer(fields).to_str(),
        SETTINGS: to_json({"tokenizer_class": "PreTrainedTokenizerFast", **named}),
        **({GENERATION: to_json(ids)} if ids else {}),
        **({TEMPLATE: fields["tokenizer.chat_template"]} if fields.get("tokenizer.chat_template") else {}),
    }
    return {name: text.encode() for name, text in files.items()}


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a GGUF file's fields. Raises ValueError if it is not byte-level BPE with a known pre-tokenizer."""
    kind, pre_tokenizer = _stated(fields, "tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre_tokenizer not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={pre_tokenizer!r} is not supported, only 'gpt2' with "
            f"{', '.join(map(repr, _SPLITS))}"
        )
    tokens = _stated(fields, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ", 1)) for pair in _stated(fields, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _SPLITS[pre_tokenizer]
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    added = [pair for pair in zip(tokens, kinds, strict=False) if pair[1] in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in added])
    return tokenizer
