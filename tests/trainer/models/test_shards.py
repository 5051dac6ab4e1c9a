"""Safetensors files against the library's own writer and Hugging Face's own division into shards."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from composer_nb.trainer.models.shards import INDEX, index_of, mapped, read_shard, read_shards, split, write_shard

names = st.text("abcdefgh.0123456789_", min_size=1, max_size=12)
forms = st.tuples(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.lists(st.integers(0, 5), max_size=3)
)
tensors = st.dictionaries(names, forms, min_size=1, max_size=12)


@given(tensors)
def test_a_file_is_to_the_byte_what_the_library_writes(tmp_path_factory: pytest.TempPathFactory, sizes):
    path = tmp_path_factory.mktemp("shard")
    random = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=random).to(dtype) for name, (dtype, shape) in sizes.items()}
    save_file(made, path / "theirs", metadata={"format": "pt"})
    write_shard(path / "ours", {name: (w.dtype, tuple(w.shape)) for name, w in made.items()}, made.__getitem__)
    assert (path / "ours").read_bytes() == (path / "theirs").read_bytes()
    shard = read_shard(path / "ours")
    assert {entry.name for entry in shard.entries} == set(made)
    for entry in shard.entries:
        assert torch.equal(mapped(entry), made[entry.name])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120))
def test_shards_are_divided_as_transformers_does(sizes: list[int], most: int):
    from huggingface_hub import split_torch_state_dict_into_shards

    made = {f"t{place}": torch.zeros(size) for place, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(made, max_shard_size=4 * most)
    ours = split({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()}, 4 * most)
    assert ours == list(theirs.filename_to_tensors.values())


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A checkpoint in two shards."""
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"c": torch.ones(4)}, tmp_path / "two.safetensors")
    write_index(tmp_path, a="one.safetensors", b="one.safetensors", c="two.safetensors")
    return tmp_path


def write_index(path: Path, **places: str) -> None:
    forms = {name: (torch.float32, (size,)) for name, size in zip("abcd", (2, 3, 4, 1), strict=True)}
    files = {file: {name: forms[name] for name, at in places.items() if at == file} for file in places.values()}
    (path / INDEX).write_text(index_of(files))


def test_shards_are_read_by_their_index(two: Path):
    assert [[entry.name for entry in shard.entries] for shard in read_shards(two)] == [["a", "b"], ["c"]]
    about = json.loads((two / INDEX).read_text())["metadata"]
    assert about == {"total_parameters": 9, "total_size": 36}


def test_a_tensor_in_two_shards_is_refused(two: Path):
    save_file({"c": torch.ones(4), "a": torch.ones(1)}, two / "two.safetensors")
    with pytest.raises(ValueError, match="a is in both one.safetensors and two.safetensors"):
        read_shards(two)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "one", "b": "one", "c": "one"}, "says that c is in one.safetensors, but it is in nowhere"),
        ({"a": "one", "c": "two"}, "says that b is in nowhere, but it is in one.safetensors"),
        (
            {"a": "one", "b": "one", "c": "two", "d": "three"},
            "three.safetensors: this shard of the checkpoint is missing",
        ),
        ({"a": "../m/one"}, "this index is damaged"),
    ],
)
def test_an_index_that_is_not_true_is_refused(two: Path, places: dict[str, str], message: str):
    write_index(two, **{name: f"{file}.safetensors" for name, file in places.items()})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_shards(two)


def test_a_whole_file_beside_an_index_is_ambiguous(two: Path):
    save_file({"a": torch.zeros(2)}, two / "model.safetensors")
    with pytest.raises(ValueError, match="holds both model.safetensors and model.safetensors.index.json"):
        read_shards(two)


def test_a_name_that_a_header_holds_twice_is_refused(tmp_path: Path):
    text = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(4))
    with pytest.raises(ValueError, match="f: this shard is damaged"):
        read_shard(tmp_path / "f")
