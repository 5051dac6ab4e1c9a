"""Checkpoints: read and written like `transformers` does, and clear about what is wrong with one."""

import json
import struct
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from composer_nb.trainer.models import shards
from composer_nb.trainer.models.checkpoint import ROUTER_BIAS, hugging_face_views, load_pretrained, save_pretrained
from composer_nb.trainer.models.shards import INDEX, index_of, mapped, read_shard, read_shards, split, write_shard
from tests.tiny_models import LATENT

AHEAD = LATENT | {"num_nextn_predict_layers": 2, "tie_word_embeddings": False, "qk_norm_gain": 1.0}
"""A DeepSeek-V3 with two heads that predict ahead."""


def test_a_float32_round_trip_is_exact_and_bf16_rounds_once(make_model, tmp_path: Path):
    model = make_model(3)
    save_pretrained(model, tmp_path / "m", dtype=torch.float32)
    exact, rounded = load_pretrained(tmp_path / "m"), load_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    assert exact.config == model.config
    triples = zip(model.parameters(), exact.parameters(), rounded.parameters(), strict=True)
    for weight, exact_weight, rounded_weight in triples:
        assert (
            torch.equal(weight, exact_weight)
            and rounded_weight.dtype == torch.bfloat16
            and torch.equal(weight.bfloat16(), rounded_weight)
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_weights_that_are_not_finite_are_not_saved(make_model, tmp_path: Path, value: float):
    save_pretrained(make_model(1), tmp_path / "m")
    bad = make_model(2).double()
    with torch.no_grad():
        bad.layers[1].o[3, 2] = value
    with pytest.raises(ValueError, match=r"m: model.layers.1.*o_proj.weight holds NaN or infinity, so training"):
        save_pretrained(bad, tmp_path / "m", dtype=torch.bfloat16)
    assert torch.equal(load_pretrained(tmp_path / "m").embed, make_model(1).embed) and len([*tmp_path.iterdir()]) == 1


def test_a_save_that_fails_leaves_what_was_there_before(make_model, tmp_path: Path, monkeypatch):
    save_pretrained(make_model(1), tmp_path / "m")

    def full_disk(*_args, **_kwargs):
        raise OSError("no space left on device")

    (tmp_path / "t.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shard", full_disk)
        with pytest.raises(OSError, match="no space"):
            save_pretrained(make_model(2), tmp_path / "m")
    assert torch.equal(load_pretrained(tmp_path / "m").embed, make_model(1).embed)
    save_pretrained(make_model(2), tmp_path / "m", tokenizer=tmp_path / "t.json")
    assert torch.equal(load_pretrained(tmp_path / "m").embed, make_model(2).embed)
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"m", "t.json"}


# What is wrong with a checkpoint


@pytest.fixture
def saved(make_model, tmp_path: Path) -> Path:
    save_pretrained(make_model(1, tie_word_embeddings=False), tmp_path / "m", dtype=torch.float32)
    return tmp_path / "m"


def edit_config(path: Path, remove: str = "", **changes: object) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    config.pop(remove, None)
    (path / "config.json").write_text(json.dumps(config))


def holds(saved: Path, name: str, value: float) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors[name].view(-1)[9] = value
    save_file(tensors, saved / "model.safetensors")


def cut(saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])


def of_another_dtype(saved: Path, dtype: torch.dtype) -> None:
    name, tensors = "model.layers.1.self_attn.k_proj.weight", load_file(saved / "model.safetensors")
    save_file({**tensors, name: torch.zeros(32, 32).to(dtype)}, saved / "model.safetensors")


UP = "model.layers.0.mlp.experts.3.up_proj.weight"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda saved: (saved / "config.json").unlink(), "config.json is missing"),
    (lambda saved: (saved / "config.json").write_text('{"hidden'), "config.json: not JSON"),
    (lambda saved: (saved / "model.safetensors").unlink(), "model.safetensors: this shard .* is missing"),
    (partial(edit_config, hidden_act="gelu"), "hidden_act.*not supported"),
    (partial(edit_config, remove="num_experts"), "config.json: lacks num_experts$"),
    (partial(of_another_dtype, dtype=torch.int8), "k_proj.weight is of dtype .*, it must be F64 or F32 or F16 or BF16"),
    *((partial(cut, keep=keep), "model.safetensors: this shard is damaged") for keep in (4, -1)),
    *((partial(holds, name=UP, value=float(x)), f"{UP} holds NaN, infinity") for x in ("nan", "-inf")),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_what_is_wrong_is_named(saved: Path, damage: Callable[[Path], object], message: str):
    damage(saved)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_pretrained(saved)


def test_more_layers_and_experts_than_tensors_are_refused_before_they_are_listed(saved: Path, make_model):
    edit_config(saved, num_hidden_layers=9_999, num_experts=65_536)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"which says 9,999 layers .*there are"):
        load_pretrained(saved)
    save_pretrained(make_model(1, **AHEAD), saved)
    edit_config(saved, num_nextn_predict_layers=100, n_routed_experts=600, first_k_dense_replace=2)
    with pytest.raises(ValueError, match=r"which says 102 layers .*there are"):
        load_pretrained(saved)
    assert time.monotonic() - begun < 4


def test_tensors_that_do_not_fit_the_config_are_named(saved: Path):
    file = saved / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    save_file({**tensors, name: tensors[name].T.contiguous()}, file)
    with pytest.raises(ValueError, match=rf"{name} is \(16, 32\), config.json says \(32, 16\)"):
        load_pretrained(saved)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"one tensor is missing, first {name}"):
        load_pretrained(saved)
    edit_config(saved, num_experts=5)
    with pytest.raises(ValueError, match="5 tensors are unknown"):
        load_pretrained(saved)


# There and back


IDS = torch.arange(120).view(2, 60) % 61


@pytest.mark.parametrize("shard_bytes", [None, 30_000])
def test_deepseek_of_ours_is_what_transformers_loads_and_saves(make_model, tmp_path: Path, shard_bytes: int | None):
    from transformers import AutoModelForCausalLM

    model = make_model(2, **AHEAD | {"num_nextn_predict_layers": 0})
    for layer in model.layers[1:]:
        layer.router_bias.copy_(torch.randn(6) * 0.2 + 1e-4)
    save_pretrained(model, tmp_path / "ours", dtype=torch.bfloat16, shard_bytes=shard_bytes or shards.SHARD_BYTES)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes or "1GB")
    our_tensors, their_tensors = (tensors_of(tmp_path / side) for side in ("ours", "theirs"))
    assert our_tensors.keys() == their_tensors.keys()
    for name, tensor in our_tensors.items():
        wide = name.endswith(ROUTER_BIAS)
        assert tensor.dtype == their_tensors[name].dtype == (torch.float32 if wide else torch.bfloat16), name
        assert torch.equal(tensor, their_tensors[name]), name
    if shard_bytes:
        indexes = [json.loads((tmp_path / side / shards.INDEX).read_text()) for side in ("ours", "theirs")]
        assert indexes[0]["metadata"] == indexes[1]["metadata"]
        assert indexes[0]["weight_map"].keys() == indexes[1]["weight_map"].keys()
        assert all(file.stat().st_size < 35_000 for file in (tmp_path / "ours").glob("*.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(
            load_pretrained(tmp_path / "ours")(IDS)[0], theirs.float()(IDS).logits, atol=2e-4, rtol=1e-3
        )


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


# Repeated tensors


def add_tensors(path: Path, added: dict[str, torch.Tensor]) -> None:
    """To a checkpoint in one file."""
    save_file({**load_file(path / "model.safetensors"), **added}, path / "model.safetensors", metadata={"format": "pt"})


def test_what_a_checkpoint_repeats_is_checked(make_model, tmp_path: Path):
    source = tmp_path / "m"
    save_pretrained(make_model(3, **AHEAD), source, dtype=torch.bfloat16)
    stored = load_file(source / "model.safetensors")
    repeated = {
        f"model.layers.{layer}.embed_tokens.weight": stored["model.embed_tokens.weight"].clone() for layer in (2, 3)
    }
    repeated["model.layers.3.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    repeated["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(4.0)
    add_tensors(source, repeated)
    assert torch.equal(load_pretrained(source).embed, stored["model.embed_tokens.weight"].float())
    add_tensors(source, {"model.layers.3.shared_head.head.weight": stored["model.embed_tokens.weight"].clone()})
    with pytest.raises(ValueError, match="shared_head.head.weight must repeat lm_head.weight, but differs"):
        load_pretrained(source)


def test_loading_maps_one_tensor_at_a_time(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = make_model(3, **AHEAD)
    save_pretrained(saved, tmp_path / "m", dtype=torch.float32, shard_bytes=20_000)
    mapped, live = shards.mapped, set[int]()
    most = {"tensors": 0, "reads": 0}

    def counted(entry: shards.TensorLocation) -> torch.Tensor:
        tensor = mapped(entry)
        live.add(id(tensor))
        weakref.finalize(tensor, live.discard, id(tensor))
        most["tensors"], most["reads"] = max(most["tensors"], len(live)), most["reads"] + 1
        return tensor

    monkeypatch.setattr(shards, "mapped", counted)
    model = load_pretrained(tmp_path / "m")
    views = hugging_face_views(model)
    assert most["reads"] == len(views), "each tensor is read once"
    assert len(model.aheads) == 2 and all(torch.equal(views[n], view) for n, view in hugging_face_views(saved).items())
    assert most["tensors"] == 1 and not live


# Files


names = st.text("abcdefgh.0123456789_", min_size=1, max_size=12)
forms = st.tuples(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.lists(st.integers(0, 5), max_size=3)
)
tensors = st.dictionaries(names, forms, min_size=1, max_size=12)


@given(tensors)
def test_a_file_is_to_the_byte_what_the_library_writes(tmp_path_factory: pytest.TempPathFactory, sizes):
    path = tmp_path_factory.mktemp("shard")
    random = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=random).to(dtype) for name, (dtype, shape) in sizes.items()}
    save_file(weights, path / "theirs", metadata={"format": "pt"})
    write_shard(path / "ours", {name: (w.dtype, tuple(w.shape)) for name, w in weights.items()}, weights.__getitem__)
    assert (path / "ours").read_bytes() == (path / "theirs").read_bytes()
    shard = read_shard(path / "ours")
    assert {entry.name for entry in shard} == set(weights)
    for entry in shard:
        assert torch.equal(mapped(entry), weights[entry.name])


def test_a_name_that_is_there_twice_is_found_at_once_among_many(tmp_path: Path):
    entries = (f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for name in [*range(40_000), 39_999])
    header = f"{{{','.join(entries)}}}".encode()
    (tmp_path / "twice").write_bytes(struct.pack("<Q", len(header)) + header)
    begun = time.process_time()  # a comparison of all pairs takes minutes
    with pytest.raises(ValueError, match="twice: this shard is damaged .39999 is there twice"):
        read_shard(tmp_path / "twice")
    assert time.process_time() - begun < 30


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120))
def test_shards_are_divided_as_transformers_does(sizes: list[int], most: int):
    from huggingface_hub import split_torch_state_dict_into_shards

    weights = {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(weights, max_shard_size=4 * most)
    ours = split({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}, 4 * most)
    assert ours == list(theirs.filename_to_tensors.values())


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A checkpoint in two shards."""
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"c": torch.ones(4)}, tmp_path / "two.safetensors")
    write_index(tmp_path, a="one.safetensors", b="one.safetensors", c="two.safetensors")
    return tmp_path


def write_index(path: Path, **file_of: str) -> None:
    forms = {name: (torch.float32, (size,)) for name, size in zip("abcd", (2, 3, 4, 1), strict=True)}
    files = {file: {name: forms[name] for name, at in file_of.items() if at == file} for file in file_of.values()}
    (path / INDEX).write_text(index_of(files))


@pytest.mark.parametrize(
    ("file_of", "message"),
    [
        ({"a": "one", "b": "one", "c": "one"}, "says that c is in one.safetensors, but it is in nowhere"),
        ({"a": "one", "c": "two"}, "says that b is in nowhere, but it is in one.safetensors"),
        ({"a": "one", "b": "one", "c": "two", "d": "three"}, "three.safetensors: this shard .* is missing"),
    ],
)
def test_an_index_that_is_not_true_is_refused(two: Path, file_of: dict[str, str], message: str):
    write_index(two, **{name: f"{file}.safetensors" for name, file in file_of.items()})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_shards(two)


def test_shards_are_read_by_an_index_and_each_tensor_lies_in_one(two: Path):
    assert [[entry.name for entry in shard] for shard in read_shards(two)] == [["a", "b"], ["c"]]
    about = json.loads((two / INDEX).read_text())["metadata"]
    assert about == {"total_parameters": 9, "total_size": 36}
    save_file({"c": torch.ones(4), "a": torch.ones(1)}, two / "two.safetensors")
    with pytest.raises(ValueError, match="a is in both one.safetensors and two.safetensors"):
        read_shards(two)
    save_file({"a": torch.zeros(2)}, two / "model.safetensors")
    with pytest.raises(ValueError, match="holds both model.safetensors and model.safetensors.index.json"):
        read_shards(two)
