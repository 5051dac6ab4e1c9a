#!/usr/bin/env python3
"""Tokens a second of the engine beside llama.cpp: `scripts/bench/llama_cpp_bench.py [--rounds N]`. Prints a table.

A dense model of SmolLM2-135M's shape with random weights, in float32, bfloat16 or int8 (`engine.numerics=int8` beside Q8_0) on
both sides, with a float32 key-value cache.
Greedy answers of 64 tokens to prompts of 64, one and sixteen at once; one thread, CPU seconds. In float32 both must find the same
tokens; otherwise llama.cpp rounds activations too. The time of an answer includes reading its prompt.
`pip install llama-cpp-python` compiles llama.cpp for this processor, in ten minutes or more.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.checkpoint import hugging_face_views
from composer_nb.trainer.models.gguf_file import NAMES
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.models.variants import as_engine
from scripts.bench.bench_engine import Form, Tokens, Turns, by, rates, table

try:
    import llama_cpp
except ImportError:
    raise SystemExit("llama.cpp is missing: pip install llama-cpp-python") from None

SHAPE = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    max_position_embeddings=256,
)
READ, WRITTEN = 64, 64
KINDS = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,
    "int8": GGMLQuantizationType.Q8_0,
}
QUIET = llama_cpp.llama_log_callback(lambda *_: None)


def write_gguf(model: Model, file: Path, kind: GGMLQuantizationType) -> None:
    """Write a model of Llama's family, without a tokenizer; query and key rows as llama.cpp orders them."""
    c, writer = model.config, GGUFWriter(file, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("none")
    theirs = {name: short for short, name in NAMES.items()}
    for name, weight in hugging_face_views(model).items():
        *_, number, suffix = ("", *name.removesuffix(".weight").removeprefix("model.layers.").split(".", 1))
        layer = name.startswith("model.layers.")
        short = theirs[suffix if layer else name.removesuffix(".weight")]
        if short in ("attn_q", "attn_k"):
            weight = weight.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        tensor_type = GGMLQuantizationType.F32 if weight.ndim == 1 else kind
        values = quantize(weight.float().numpy(), tensor_type)
        writer.add_tensor(f"blk.{number}.{short}.weight" if layer else f"{short}.weight", values, raw_dtype=tensor_type)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


class Llama:
    """llama.cpp with a sequence of the cache for each conversation."""

    def __init__(self, file: Path, slots: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = slots * (READ + WRITTEN), slots * READ, slots
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self.context: Any = llama_cpp.llama_init_from_model(self.model, params)
        self.batch: Any = llama_cpp.llama_batch_init(slots * READ, 0, 1)

    def run(self, turns: Turns) -> Tokens:
        (turn,) = turns
        read, tokens, at = [list(ids) for ids, _ in turn], [list[int]() for _ in turn], [0] * len(turn)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        for _ in range(WRITTEN):
            rows = self._decode(read, at)
            for slot, row in enumerate(rows):
                at[slot] += len(read[slot])
                logits = np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits_ith(self.context, row), shape=(SHAPE.vocab_size,)
                )
                read[slot] = [int(logits.argmax())]
                tokens[slot] += read[slot]
        return tokens

    def _decode(self, read: list[list[int]], at: list[int]) -> list[int]:
        """Forward new tokens of each conversation; return the positions of the last ones."""
        batch, rows, n = self.batch, list[int](), 0
        for slot, ids in enumerate(read):
            for offset, token in enumerate(ids):
                batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0] = token, at[slot] + offset, 1, slot
                batch.logits[n] = offset == len(ids) - 1
                n += 1
            rows.append(n - 1)
        batch.n_tokens = n
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(SHAPE)
    llama_cpp.llama_log_set(QUIET, None)
    print("| weights, conversations | form | tokens / s | ours / it |\n|---|---|---|---|")
    for name, kind in KINDS.items():
        for weight in model.parameters() if name == "bfloat16" else ():
            weight.data = weight.bfloat16().float()
        model = as_engine(model, "int8") if name == "int8" else model
        with tempfile.TemporaryDirectory() as folder:
            write_gguf(model, file := Path(folder) / "model.gguf", kind)
            for slots in (1, 16):
                engine = Engine(model, stop=frozenset(), slots=slots, max_length=READ + WRITTEN, temperature=0.0)
                forms: dict[str, Form] = {"ours": by(engine), "llama.cpp": Llama(file, slots).run}
                rates_by_form = rates(
                    forms, lambda n, slots=slots: prompts(n, slots), args.rounds, same=name == "float32"
                )
                table(f"{name}, {slots}", rates_by_form)


def prompts(number: int, slots: int) -> Turns:
    rng = np.random.default_rng(number)
    return [[(rng.integers(0, SHAPE.vocab_size, READ).tolist(), WRITTEN) for _ in range(slots)]]


if __name__ == "__main__":
    main()
