"""Deltas: their size, on tensors whose difference is known; every bit comes back; nothing damaged is ever used."""

import math
import warnings
import weakref
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from composer_nb.kernels.delta.codec import CODECS, bits
from composer_nb.trainer.models import shards
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.versions import payload
from composer_nb.trainer.versions.manifest import (
    BaseVersion,
    DamagedVersion,
    Manifest,
    MissingVersion,
    WeightState,
    seal,
    state_hash,
)
from composer_nb.trainer.versions.payload import Decoded, read_link, write_part, write_side
from composer_nb.trainer.versions.store import VersionStore
from composer_nb.trainer.weights import apply_delta, delta_sizes, encode_delta, verify

# The codec


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn, torch.float64, torch.bool]
SPECIAL = [0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-40, 65504.0]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw two versions of a few tensors: any bits, special values, few changes or many, empty tensors and scalars."""
    base, target = {}, {}
    for index in range(draw(st.integers(0, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from([(), (0,), (3, 0), (1,), (7,), (2, 3), (40,), (300, 2)]))
        noise = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        count, width = math.prod(shape), dtype.itemsize
        a = torch.randint(0, 2 if dtype == torch.bool else 256, (count, width), generator=noise).byte()
        if dtype.is_floating_point and draw(st.booleans()):
            a = torch.tensor(SPECIAL * (count // 8 + 1))[:count].to(dtype).view(torch.uint8).reshape(count, width)
        changed = torch.rand(count, generator=noise) < draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        b = torch.where(changed[:, None], a.flip(0), a)
        base[f"t{index}"], target[f"t{index}"] = (x.reshape(-1).view(dtype).reshape(shape) for x in (a, b))
    return base, target


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    forms = [{name: (t.dtype, t.shape, bits(t).tobytes()) for name, t in tensors.items()} for tensors in (a, b)]
    return forms[0] == forms[1]


def through(
    store: VersionStore, folder: str, target: WeightState, base: WeightState | None, shard_bytes: int
) -> dict[str, Tensor]:
    """Write a version, seal it, and return the tensors that are read from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "SHARD_BYTES", shard_bytes)
        part = write_part(store, folder, target, base)
    manifest = seal(target.version, base and BaseVersion(version=base.version, hash=base.hash), [part], {})
    reloaded = Manifest.load(manifest.dump(), "m")
    assert reloaded == manifest and manifest.hash == target.hash
    return dict(Decoded(base, [read_link(store, folder, reloaded)]))


@given(pairs(), st.sampled_from([1, 100, 1 << 20]))
@settings(max_examples=120, deadline=None)
def test_a_delta_gives_back_every_bit(pair: tuple[dict[str, Tensor], dict[str, Tensor]], shard_bytes: int):
    base, target = (WeightState.of(number, tensors) for number, tensors in enumerate(pair))
    store = VersionStore("memory://bits")
    tensors = through(store, "delta", target, base, shard_bytes)
    assert same_bits(tensors, pair[1]) and state_hash(tensors) == target.hash
    assert same_bits(through(store, "full", target, None, shard_bytes), pair[1])


def test_a_full_version_by_one_rank_is_a_checkpoint(tmp_path: Path):
    store, state = VersionStore(tmp_path), WeightState.of(0, {"w": torch.arange(4.0)})
    write_side(store, "v", [write_part(store, "v", state, None, rank="rank00000")], {})
    [[entry]] = shards.read_shards(tmp_path / "v")
    assert torch.equal(shards.mapped(entry), state.tensors["w"])


def test_a_frame_that_claims_to_be_huge_is_not_expanded():
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(10_000_000))
    with pytest.raises(ValueError, match="another size"):
        CODECS["xor-planes-zstd1"].decode(np.zeros(9, "u2"), bomb, "bfloat16")


# Directories


@pytest.fixture
def three(tmp_path: Path, make_model) -> Path:
    """base, target (plain checkpoints) and delta."""
    model = make_model(1)
    save_pretrained(model, tmp_path / "base", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[..., :2] += 0.01
    save_pretrained(model, tmp_path / "target", dtype=torch.bfloat16)
    encode_delta(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    return tmp_path


def test_a_delta_between_checkpoints_gives_the_target_byte_for_byte(three: Path):
    full = apply_delta(three / "base", three / "delta", three / "full")
    assert verify(three / "full") == full and full.base is None and full.version == 1
    for name in ("config.json", "model.safetensors"):
        assert (three / "full" / name).read_bytes() == (three / "target" / name).read_bytes()
    with torch.no_grad():
        logits = [load_pretrained(three / name)(torch.arange(20).view(1, 20))[0] for name in ("full", "target", "base")]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    delta = verify(three / "delta")
    assert delta.base is not None and delta.base.version == 0 and delta.hash == full.hash
    sizes = delta_sizes(three / "base", three / "target")
    assert sizes["delta_bytes"] < delta.size < sizes["full_bytes"]


def test_checkpoints_are_walked_a_tensor_at_a_time(three: Path, monkeypatch: pytest.MonkeyPatch):
    mapped, live, most = shards.mapped, set[int](), list[int]()

    def counted(entry: shards.TensorLocation) -> Tensor:
        tensor = mapped(entry)
        live.add(id(tensor))
        weakref.finalize(tensor, live.discard, id(tensor))
        most.append(len(live))
        return tensor

    monkeypatch.setattr(shards, "mapped", counted)
    encode_delta(three / "base", three / "target", three / "again")
    apply_delta(three / "base", three / "again", three / "full")
    assert len(most) > 50 and max(most) <= 3 and not live


def test_checkpoints_of_different_models_and_places_in_use_are_refused(three: Path, make_model):
    for name, changed in (("more", {"w": torch.zeros(4), "x": torch.zeros(1)}), ("dtype", {"w": torch.zeros(4).int()})):
        for path, tensors in ((three / f"{name} a", {"w": torch.zeros(4)}), (three / f"{name} b", changed)):
            path.mkdir()
            save_file(tensors, path / "model.safetensors")
        with pytest.raises(ValueError, match="are not versions of one model"):
            delta_sizes(three / f"{name} a", three / f"{name} b")
    save_pretrained(make_model(1, hidden_size=40), three / "wide", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="wide: they are not versions of one model: model.embed"):
        encode_delta(three / "base", three / "wide", three / "no")
    with pytest.raises(ValueError, match="target is there already"):
        apply_delta(three / "base", three / "delta", three / "target")
    with pytest.raises(MissingVersion, match="manifest.json is missing"):
        verify(three / "target")
    assert not list(three.glob("no*")) and not list(three.glob("*.part"))


@pytest.mark.parametrize("folder", ["delta", "full"])
def test_a_damaged_directory_is_refused_whatever_is_damaged(three: Path, folder: str):
    apply_delta(three / "base", three / "delta", three / "full")
    random = Random(0)
    for file, damage in product(sorted((three / folder).iterdir()), ("flip", "cut", "lose", "add")):
        good = file.read_bytes()
        for _ in range(12 if damage == "flip" else 1):
            bad = bytearray(good)
            bad[random.randrange(len(bad))] ^= 1 << random.randrange(8)
            written = {"flip": bytes(bad), "cut": good[: random.randrange(len(good))], "add": good}.get(damage)
            damaged_file = file.with_name("stray") if damage == "add" else file
            file.unlink() if written is None else damaged_file.write_bytes(written)
            with pytest.raises((DamagedVersion, MissingVersion), match=f"{folder}.*{damaged_file.name}"):
                verify(three / folder)
            if folder == "delta" and damage != "add":
                with pytest.raises((DamagedVersion, MissingVersion)):
                    apply_delta(three / "base", three / folder, three / "no")
            damaged_file.unlink(missing_ok=True)
            file.write_bytes(good)
    assert verify(three / folder) and not (three / "no").exists()


def test_a_manifest_that_contradicts_what_is_there_is_refused_though_its_seal_holds(three: Path):
    file = three / "delta" / "manifest.json"
    m = Manifest.load(file.read_bytes(), "m")
    coded = {name: entry.model_copy(update={"encoding": "new"}) for name, entry in m.tensors.items()}
    for change in ({"hash": "0" * 40}, {"base": None}, {"tensors": coded}, {"format": "composer-nb-weights-9"}):
        with warnings.catch_warnings(action="ignore"):
            file.write_bytes(m.model_copy(update=change).dump())
        with pytest.raises(DamagedVersion):
            apply_delta(three / "base", three / "delta", three / "no")
        assert not (three / "no").exists()
