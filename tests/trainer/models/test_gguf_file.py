"""GGUF files: written here with the library's own writer, and read to the model that they came from."""

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from composer_nb.harness.agent.formats import FORMATS
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.convert import upcycle, with_format
from composer_nb.trainer.models.gguf_file import read_gguf
from composer_nb.trainer.models.tokenizer import tokenizer_of
from composer_nb.trainer.models.transformer import Model, ModelConfig
from tests.tiny_models import LATENT

TOKENS = ["<|end|>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "ab", "Ġab", "<call>"]
KINDS = {int: (gguf.GGUFValueType.UINT32,), float: (gguf.GGUFValueType.FLOAT32,), str: (gguf.GGUFValueType.STRING,)}
SIZES = {
    **{"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
}
THEIRS = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
WRITTEN = {
    **{"block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "head_count": 4, "head_count_kv": 2},
    **{"key_length": 16, "context_length": 64, "rope_freq_base": 10_000.0, "layer_norm_rms_eps": 1e-5},
    **{"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": TOKENS},
    **{"token_types": [3, *[1] * (len(TOKENS) - 2), 4], "token_merges": ["a b", "Ġ ab"]},
}
"""What a file says besides its tensors."""


def neighbours(rows: int, heads: int) -> Tensor:
    """Return the order of rows that has pairs of a head beside one another, not in its halves: llama.cpp's, for Llama."""
    order, width = torch.empty(rows, dtype=torch.int64), rows // heads
    for head in range(heads):
        for pair in range(width // 2):
            for half in range(2):
                order[head * width + 2 * pair + half] = head * width + half * (width // 2) + pair
    return order


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """`write(family, kind, drop=(), **fields)`: a GGUF file of a random model of `transformers`, and that model."""

    def make(family: str = "llama", kind: Kind = Kind.F32, drop: tuple[str, ...] = (), **fields: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(3)
        tied = family == "qwen2"
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, tie_word_embeddings=tied)).eval()
        file = tmp_path / f"{family}.gguf"
        writer = gguf.GGUFWriter(file, fields.pop("architecture", family))
        for name, value in WRITTEN.items():
            getattr(writer, f"add_{name}")(value)
        for key, value in fields.pop("keys", {}).items():
            writer.add_key_value(key, value, *KINDS[type(value)])
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in name else torch.randn_like(weight) * 0.3)
                part, _, ending = name.rpartition(".")
                block = part.removeprefix("model.layers.").split(".", 1)
                tensor_name = f"blk.{block[0]}.{THEIRS[block[1]]}" if "layers" in part else THEIRS[part]
                order = torch.arange(len(weight))
                if family == "llama" and tensor_name.endswith(("attn_q", "attn_k")):
                    order = neighbours(len(weight), 4 if tensor_name.endswith("q") else 2)
                stored = weight.detach()[order]
                if stored.ndim == 2 and kind is not Kind.F32:
                    packed = gguf.quants.quantize(stored.numpy(), kind)
                    dequantised = torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())
                    weight.copy_(dequantised[order.argsort()])
                    writer.add_tensor(f"{tensor_name}.{ending}", packed, raw_dtype=kind)
                elif tensor_name not in drop:
                    writer.add_tensor(f"{tensor_name}.{ending}", np.ascontiguousarray(stored.numpy()))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file, model

    return make


@pytest.mark.parametrize(("family", "kind"), [("llama", Kind.Q4_1), ("qwen2", Kind.F32), ("qwen3", Kind.Q8_0)])
def test_a_file_is_read_to_the_model_that_it_came_from(write: Callable[..., Any], family: str, kind: Kind) -> None:
    file, theirs = write(family, kind)
    ours = read_gguf(file)
    tokenizer = tokenizer_of(ours, file)
    assert ours.config.family == family and ours.config.tie_word_embeddings == (family == "qwen2")
    ids = torch.arange(2 * 15).view(2, 15)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, atol=2e-5, rtol=1e-4)
    assert tokenizer.encode("ab ab<|end|><call>z").tokens == ["ab", "Ġab", "<|end|>", "<call>", "z"]
    assert tokenizer.decode(tokenizer.encode("zab ab<|end|><call>").ids) == "zab ab<call>", "only one is special"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture='gemma3' is not supported, only 'qwen3'"),
        ({"drop": ("blk.1.ffn_up",)}, "one tensor is missing, first model.layers.1.mlp.up_proj.weight"),
        ({"keys": {"llama.attention.sliding_window": 64}}, "llama.attention.sliding_window=64 is not supported"),
    ],
)
def test_what_cannot_be_read_is_named(write: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    file, _ = write(**options)
    with pytest.raises(ValueError, match="llama.gguf: ") as error:
        read_gguf(file)
    assert message in str(error.value)


def test_load_pretrained_reads_a_file_with_what_it_says_of_turns(write: Callable[..., Any], tmp_path: Path) -> None:
    template = "{{ messages[0].content }}"
    keys = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": template, "llama.rope.dimension_count": 16}
    file, theirs = write(keys=keys)
    model, ids = load_pretrained(str(file), dtype=torch.float64), torch.arange(15)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0].float(), theirs(ids).logits, atol=2e-5, rtol=1e-4)
    save_pretrained(model, tmp_path / "out")
    out = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (out.eos_token, out.chat_template) == ("<|end|>", template) and out("ab ab").input_ids == [28, 29]
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 0


def announcing(tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def key(kind: int, body: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + body


MANY = 10**9
BOMBS = {
    "tensors": announcing(tensors=MANY),
    "a string": announcing(keys=1, body=key(8, struct.pack("<Q", MANY))),
    "strings": announcing(keys=1, body=key(9, struct.pack("<IQ", 8, MANY))),
    "a nested array": announcing(keys=1, body=key(9, struct.pack("<IQIQ", 9, 1, 0, MANY))),
    "dimensions": announcing(tensors=1, body=struct.pack("<Q", 1) + b"t" + struct.pack("<IQQ", MANY, 1, 1)),
    "one place": announcing(
        tensors=40, body=b"".join(struct.pack("<Q2sIQIQ", 2, b"%02d" % n, 1, 12, 0, 0) for n in range(40))
    ),
    "weights": announcing(tensors=1, body=struct.pack("<Q1sIQQIQ", 1, b"t", 2, MANY, MANY, 0, 0)),
}


@pytest.mark.parametrize("bomb", list(BOMBS))
def test_a_small_file_that_announces_much_is_refused_at_once(tmp_path: Path, bomb: str) -> None:
    (tmp_path / "a.gguf").write_bytes(BOMBS[bomb] + bytes(80))
    begun = time.monotonic()
    with pytest.raises(ValueError, match="a.gguf: not a GGUF file, or damaged"):
        read_gguf(tmp_path / "a.gguf")
    assert time.monotonic() - begun < 1


# Upcycled to experts, with the tokens of a chat format


TWO_ROWS = torch.arange(2 * 20).view(2, 20)


def random_model(**sizes: Any) -> Model:
    torch.manual_seed(5)
    return Model(ModelConfig(**{"family": "llama", "vocab_size": 48, "intermediate_size": 96} | sizes)).double()


@pytest.mark.parametrize(("family", "sparse"), [("llama", "mixtral"), ("qwen3", "qwen3_moe")])
def test_an_upcycled_model_says_what_the_dense_one_says(family: str, sparse: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = random_model(family=family)
    upcycled = upcycle(model, experts=5, chosen=3)
    assert upcycled.config.family == sparse
    with torch.no_grad():
        logits, routes = upcycled(TWO_ROWS)
        torch.testing.assert_close(logits, model(TWO_ROWS)[0], atol=1e-12, rtol=1e-12)
        assert len({tuple(sorted(route.tolist())) for route in routes.flatten(0, 2)}) > 5, "experts differ by token"
        save_pretrained(upcycled, tmp_path / "m", dtype=torch.float32)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        torch.testing.assert_close(theirs(TWO_ROWS).logits, logits.float(), atol=3e-5, rtol=1e-4)
    assert load_pretrained(tmp_path / "m").config == upcycled.config


@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": False}, LATENT], ids=["tied", "untied", "deepseek"])
def test_tokens_of_a_chat_format_are_added_and_change_nothing_else(sizes: dict[str, Any]) -> None:
    model = random_model(**sizes)
    for layer in model.layers:
        layer.router_bias = None if layer.router_bias is None else torch.randn(model.config.num_experts)
    tokenizer = Tokenizer(models.BPE({chr(78 + i): i for i in range(48)}, []))  # "<" and ">" have no token
    extended, longer = with_format(model, tokenizer, "qwen")
    new = [longer.token_to_id(token) for token in FORMATS["qwen"].tokens]
    assert new == list(range(48, 48 + len(FORMATS["qwen"].tokens))) and extended.config.vocab_size == 48 + len(new)
    with torch.no_grad():
        logits = extended(TWO_ROWS)[0]
        torch.testing.assert_close(logits[..., :48], model(TWO_ROWS)[0], atol=1e-12, rtol=1e-12)
        for token in FORMATS["qwen"].tokens:  # its logit is the mean of those of its letters
            spelt = [ord(letter) - 78 for letter in token if ord(letter) >= 78]
            row = logits[..., longer.token_to_id(token)]
            torch.testing.assert_close(row, logits[..., spelt].mean(-1), atol=1e-12, rtol=1e-12)
    assert tokenizer.get_vocab_size() == 48, "the tokenizer given is as it was"
    assert with_format(extended, longer, "qwen")[0] is extended
    with pytest.raises(ValueError, match="format='chatml' is unknown, there are compact, qwen, kimi"):
        with_format(model, tokenizer, "chatml")
