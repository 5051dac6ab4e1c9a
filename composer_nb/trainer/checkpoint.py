"""Checkpoints in the shape of Hugging Face's Qwen3-MoE and DeepSeek-V3, so that `transformers` and everything else can read them.

Checked before anything is copied, read shard by shard through memory maps and written a tensor at a time: beside the model
there is never more than one weight in memory. docs/models.md says what is read, what is refused, and what writing `like`
another checkpoint keeps. Names are in `hf_names`, config.json in `hf_config`, files in `shards`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_nb.trainer.hf_config import config_json
from composer_nb.trainer.hf_names import ROUTER_BIAS, hugging_face_views
from composer_nb.trainer.hf_source import Source, check_form, check_names
from composer_nb.trainer.model import Model, ModelConfig
from composer_nb.trainer.shards import (
    DTYPES,
    INDEX,
    SHARD_BYTES,
    WHOLE,
    Form,
    Reader,
    Shard,
    bytes_of,
    header_of,
    index_of,
    raw,
    read_shards,
    size_of,
    split,
    write_shard,
)

_STALE = (".safetensors", ".gguf", ".pt", ".pth")
"""Endings of files with weights: a copy of one would be of another model than the checkpoint that is written beside it."""


def to_hugging_face(model: Model) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, in their present dtype."""
    return {name: view.contiguous() for name, view in hugging_face_views(model).items()}


@torch.no_grad()
def from_hugging_face(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the model. Raises ValueError that names what is missing, unknown, of a wrong form or not finite, and
    leaves the model as it is where names or forms do not fit."""
    views = hugging_face_views(model)
    check_names(views.keys() - tensors.keys(), tensors.keys() - views.keys())
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        check_form(name, dtype, "bfloat16|float16|float32|float64", tensor.shape, tuple(views[name].shape))
    for name, tensor in tensors.items():
        _fill(views[name], tensor, name)


def _fill(view: Tensor, tensor: Tensor, what: str) -> None:
    """Raises ValueError for what would not be finite."""
    low, high = (float(bound) for bound in tensor.aminmax())
    most = torch.finfo(view.dtype).max
    if not (-most <= low and high <= most):  # NaN is neither
        raise ValueError(f"{what} holds NaN, infinity, or a number beyond {view.dtype}")
    view.copy_(tensor)


def published(model: Model, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A copy of the weights as they are published: under Hugging Face's names, on the CPU, in `dtype`; biases of routers stay
    float32, as `transformers` keeps them."""
    views = hugging_face_views(model)
    return {name: views[name].to("cpu", form[0], copy=True).contiguous() for name, form in _forms(views, dtype).items()}


def _forms(views: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Form]:
    return {
        name: (torch.float32 if name.endswith(ROUTER_BIAS) else dtype, tuple(view.shape))
        for name, view in views.items()
    }


def empty_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """A model whose weights are still to be filled in: no time and no random numbers go into what is overwritten."""
    model = Model.planned(config).to(dtype).to_empty(device="cpu")
    for layer in (*model.layers, *(head.layer for head in model.aheads)):
        if layer.router_bias is not None:  # no parameter, so the call before did not see it
            layer.router_bias = torch.zeros(config.num_experts)
    return model


# Reading


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint as they are, from one file or the shards of its index. Raises FileNotFoundError or ValueError
    that names the file."""
    reader = Reader()
    return {entry.name: reader(entry) for shard in read_shards(path) for entry in shard.entries}


@torch.no_grad()
def load_pretrained(path: Path, *, dtype: torch.dtype = torch.float32) -> Model:
    """Reads a checkpoint of either family into weights of `dtype`; quantised ones are dequantised. Raises FileNotFoundError or
    ValueError that names the file, the key or the tensor, and what is wrong."""
    source, reader = Source.open(path), Reader()
    model = empty_model(source.config, dtype)
    views = hugging_face_views(model)
    for name, stored in source.weights.items():
        _fill(views[name], stored.read(reader), f"{stored.parts[0].file}: {stored.parts[0].name}")
    for entry, name in source.repeats.items():
        if not torch.equal(reader(entry).to(views[name].dtype), views[name]):
            raise ValueError(f"{entry.file}: {entry.name} must repeat {name}, but differs from it")
    return model


# Writing


@torch.no_grad()
def save_pretrained(
    model: Model,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    shard_bytes: int | None = None,
    like: Path | None = None,
) -> None:
    """Writes `path` as a Hugging Face checkpoint. No half-written one is ever there.

    dtype: of the weights, bfloat16 unless given. tokenizer: a tokenizer.json to lay beside them. shard_bytes: what a file holds
    at most, as `transformers` divides it unless given. like: a checkpoint of this model, of which everything is kept but the
    numbers: its files, headers, dtypes, and what the model does not hold. Raises ValueError where the model does not fit
    `like`, or where a weight that is quantised there has changed.
    """
    if like is None:
        with _replaced(path) as part:
            _write(model, part, dtype or torch.bfloat16, SHARD_BYTES if shard_bytes is None else shard_bytes)
            if tokenizer is not None:
                shutil.copyfile(tokenizer, part / "tokenizer.json")
        return
    if any(given is not None for given in (dtype, tokenizer, shard_bytes)):
        raise ValueError("dtype, tokenizer and shard_bytes are those of `like`: give either it or them")
    target, folder = path.resolve(), like.resolve()
    if target != folder and (target.is_relative_to(folder) or folder.is_relative_to(target)):
        raise ValueError(f"{path} and {like} lie in each other; choose another place")
    source = Source.open(like)
    _check_like(model, source)
    with _replaced(path) as part:
        _write_like(model, source, part)


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A folder to fill. What was at `path` is moved out of the way when it is complete, and removed when that is in place."""
    part, before = (path.with_name(path.name + ending) for ending in (".part", ".old.part"))
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if path.exists():
        os.replace(path, before)
    os.replace(part, path)
    shutil.rmtree(before, ignore_errors=True)


def _write(model: Model, part: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    views = hugging_face_views(model)
    forms = _forms(views, dtype)
    groups = split(forms, shard_bytes)
    files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    shards = {WHOLE: groups[0]} if len(groups) == 1 else dict(zip(files, groups, strict=True))
    (part / "config.json").write_text(config_json(model.config, dtype), encoding="utf-8")
    for file, names in shards.items():
        header, order = header_of({name: forms[name] for name in names})
        write_shard(part / file, header, (bytes_of(views[name].to(forms[name][0])) for name in order))
    if len(shards) > 1:
        parameters = sum(view.numel() for name, view in views.items() if not name.endswith(ROUTER_BIAS))
        size = sum(size_of(form) for form in forms.values())
        (part / INDEX).write_text(index_of(shards, parameters, size), encoding="utf-8")


def _check_like(model: Model, source: Source) -> None:
    """Raises ValueError for what can not be written like `source`, before anything is."""
    ours, theirs = model.config.to_dict(), source.config.to_dict()
    for name in ours.keys() - {"qk_norm_gain"}:  # of a beginning alone
        if ours[name] != theirs[name]:
            raise ValueError(f"{source.path}: {name} is {theirs[name]!r} there, the model's is {ours[name]!r}")
    shards = {shard.file for shard in source.shards}
    for file in sorted(source.path.rglob("*")):
        if file not in shards and (file.suffix in _STALE or file.name.startswith("pytorch_model")):
            raise ValueError(f"{file}: weights that would not be those of the model; remove it, or save without `like`")
    views, reader = hugging_face_views(model), Reader()
    for name, stored in source.weights.items():
        if stored.format is not None and not torch.equal(stored.read(reader).to(views[name].dtype), views[name]):
            raise ValueError(
                f"{stored.parts[0].name} is quantised in {source.path} and has changed: save without `like`, in bfloat16"
            )


def _write_like(model: Model, source: Source, part: Path) -> None:
    views = hugging_face_views(model)
    ours = {stored.parts[0]: views[name] for name, stored in source.weights.items() if stored.format is None}
    ours |= {entry: views[name] for entry, name in source.repeats.items()}
    shards = {shard.file for shard in source.shards}

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder, name) in shards]

    def tensors(shard: Shard) -> Iterator[Any]:
        for entry in shard.entries:
            if entry in ours:
                yield bytes_of(ours[entry].to(DTYPES[entry.dtype]))
            else:
                yield from raw(entry)

    shutil.copytree(source.path, part, ignore=left_out, dirs_exist_ok=True)
    for shard in source.shards:
        write_shard(part / shard.file.name, shard.header, tensors(shard))
