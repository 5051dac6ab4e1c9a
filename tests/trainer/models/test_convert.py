"""Checkpoints made from others: upcycled to experts, with the tokens of a chat format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from composer_nb.harness.agent.formats import FORMATS
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.convert import upcycle, with_format
from composer_nb.trainer.models.transformer import Model, ModelConfig

IDS = torch.arange(2 * 20).view(2, 20)


def dense(family: Any = "llama", **sizes: Any) -> Model:
    torch.manual_seed(5)
    config = ModelConfig(family=family, vocab_size=48, intermediate_size=96, **sizes)
    return Model(config).double()


@pytest.mark.parametrize(("family", "sparse"), [("llama", "mixtral"), ("qwen3", "qwen3_moe")])
def test_an_upcycled_model_says_what_the_dense_one_says(family: str, sparse: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = dense(family)
    made = upcycle(model, experts=5, chosen=3)
    assert made.config.family == sparse
    with torch.no_grad():
        logits, routes = made(IDS)
        torch.testing.assert_close(logits, model(IDS)[0], atol=1e-12, rtol=1e-12)
        assert len({tuple(sorted(route.tolist())) for route in routes.flatten(0, 2)}) > 5, (
            "tokens use different experts"
        )
        save_pretrained(made, tmp_path / "m", dtype=torch.float32)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        torch.testing.assert_close(theirs(IDS).logits, logits.float(), atol=3e-5, rtol=1e-4)
    assert load_pretrained(tmp_path / "m").config == made.config


@pytest.mark.parametrize(
    ("family", "options", "what"),
    [
        ("qwen2", {}, "model.family=qwen2 has no counterpart with experts, only llama, qwen3 have"),
        ("llama", {"chosen": 6}, "model.num_experts_per_tok=6 must lie in 1..model.num_experts=4"),
        ("llama", {"noise": -1.0}, "noise=-1.0 must be at least 0"),
    ],
)
def test_what_cannot_be_upcycled(family: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError) as error:
        upcycle(dense(family), **{"experts": 4, "chosen": 2, **options})
    assert str(error.value) == what


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_of_a_chat_format_are_added_and_change_nothing_else(tied: bool) -> None:
    model = dense(tie_word_embeddings=tied)
    tokenizer = Tokenizer(models.BPE({chr(78 + i): i for i in range(48)}, []))  # "<" and ">" have no token
    made, longer = with_format(model, tokenizer, "qwen")
    new = [longer.token_to_id(token) for token in FORMATS["qwen"].tokens]
    assert new == list(range(48, 48 + len(FORMATS["qwen"].tokens))) and made.config.vocab_size == 48 + len(new)
    with torch.no_grad():
        logits = made(IDS)[0]
        torch.testing.assert_close(logits[..., :48], model(IDS)[0], atol=1e-12, rtol=1e-12)
        for token in FORMATS["qwen"].tokens:  # about as probable as the text that it stands for
            spelt = [ord(letter) - 78 for letter in token if ord(letter) >= 78]
            row = logits[..., longer.token_to_id(token)]
            torch.testing.assert_close(row, logits[..., spelt].mean(-1), atol=1e-12, rtol=1e-12)
    assert tokenizer.get_vocab_size() == 48, "the tokenizer given is as it was"
    assert with_format(made, longer, "qwen")[0] is made
    with pytest.raises(ValueError, match="format='chatml' is unknown, there are compact, qwen, kimi"):
        with_format(model, tokenizer, "chatml")
