"""The tokenizer that a run trains: any text comes back, special tokens are apart, and damage is named."""

import base64
import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from composer_nb.harness.agent.compact import SPECIALS
from composer_nb.trainer.models.tokenizer import load_tokenizer, read_tokenizer


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=("Cs",))) | st.text("ab1 \n_<|>é"))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str):
    safe = text.replace("<|", "< |")
    ids = tokenizer.encode(safe, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == safe
    assert not set(ids) & set(range(len(SPECIALS)))


def replace(pattern: object, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind: str, *parts: object) -> dict[str, object]:
    return {"type": "Sequence", kind: list(parts)}


DOUBLES = replace({"String": "a"}, "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TABLE = base64.b64encode(struct.pack("<I", 8) + bytes(8) + b"a" * 500 + b"\0").decode()


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", sequence("normalizers", *[DOUBLES] * 30)),
        ("normalizer", sequence("normalizers", *[sequence("normalizers", *[DOUBLES] * 4)] * 5)),
        ("normalizer", replace({"Regex": ""}, "b" * 100)),
        ("normalizer", replace({"String": "a"}, "b" * 100) | {"normalizers": [{"type": "NFC"}]}),
        ("normalizer", {"type": "Prepend", "prepend": "b" * 100}),
        ("normalizer", sequence("normalizers", *[{"type": "NFKD"}] * 3)),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": TABLE}),
        ("pre_tokenizer", sequence("pretokenizers", *[BYTES] * 30)),
        ("decoder", sequence("decoders", *[DOUBLES] * 30)),
    ],
)
def test_a_tokenizer_that_makes_texts_grow_without_bound_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, part: str, value: object
):
    saved = json.loads(tokenizer.to_str()) | {part: value}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=rf"tokenizer.json: damaged \(its {part} may make a text .* times as long"):
        load_tokenizer(tmp_path)


def test_ordinary_normalizers_are_read_and_a_huge_token_is_not(tokenizer: Tokenizer, tmp_path: Path):
    plain = sequence(
        "normalizers", {"type": "Prepend", "prepend": "_"}, replace({"String": " "}, "_"), {"type": "NFKC"}
    )
    saved = json.loads(tokenizer.to_str()) | {"normalizer": plain}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert load_tokenizer(tmp_path).normalizer is not None
    saved["added_tokens"].append(saved["added_tokens"][0] | {"id": 420, "content": "x" * 5000})
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="a token of more than 4,096 characters"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_is_read_from_beside_its_weights_and_what_is_wrong_is_named(tokenizer: Tokenizer, tmp_path: Path):
    file, text = tmp_path / "tokenizer.json", tokenizer.to_str()
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: a checkpoint needs its tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer.save(str(file))
    assert load_tokenizer(tmp_path).to_str() == text
    file.write_text(text.replace("<|to|>", "<|TO|>"))
    with pytest.raises(ValueError, match=r"lacks the tokens \['<\|to\|>'\]"):
        load_tokenizer(tmp_path)
    untyped = json.dumps(json.loads(text) | {"normalizer": {"prepend": "b" * 100}}).encode()
    for damaged in (text[:300].encode(), b"[]", b'{"model": {"type": "of another library"}}', b"\xff", untyped):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"tokenizer.json: damaged"):
            load_tokenizer(tmp_path)


def test_a_text_is_neither_padded_nor_given_many_tokens(tokenizer: Tokenizer, tmp_path: Path):
    fields, file = json.loads(tokenizer.to_str()), tmp_path / "tokenizer.json"
    padding = {"strategy": {"Fixed": 10**5}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    read = read_tokenizer(json.dumps(fields | {"padding": padding}).encode(), file)
    assert read.encode("ab").ids == tokenizer.encode("ab").ids
    text = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"SpecialToken": {"id": "x", "type_id": 0}}
    for count, texts in ((1000, 1), (1, 4)):
        single = [token] * count + [text] * texts
        tokens = {"x": {"id": "x", "ids": [0] * 1000, "tokens": ["a"] * 1000}}
        part = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens}
        nested = {"type": "Sequence", "processors": [part]}
        with pytest.raises(ValueError, match="its post_processor adds"):
            read_tokenizer(json.dumps(fields | {"post_processor": nested}).encode(), file)
