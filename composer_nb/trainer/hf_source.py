"""A checkpoint in a folder, checked as far as its headers tell: which tensors each weight of the model is read from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import Tensor

from composer_nb.trainer.hf_config import read_config
from composer_nb.trainer.hf_names import hugging_face_views, is_foreign, repeated
from composer_nb.trainer.hf_quantized import Format
from composer_nb.trainer.model import Model, ModelConfig
from composer_nb.trainer.shards import Entry, Reader, Shard, read_shards

Shape = tuple[int, ...]
_FLOATS = "F64|F32|F16|BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a weight is read from."""

    shape: Shape
    parts: tuple[Entry, ...]
    format: Format | None = None
    """How several tensors stand for the weight; None: one is the weight."""

    def read(self, reader: Reader) -> Tensor:
        """The weight, float32 where it is quantised. Raises ValueError that names the file and the tensor."""
        if self.format is None:
            return reader(self.parts[0])
        try:
            return self.format.decode(self.shape, *(reader(part) for part in self.parts))
        except ValueError as error:
            raise ValueError(f"{self.parts[0].file}: {self.parts[0].name}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint that fits its config.json."""

    path: Path
    config: ModelConfig
    shards: tuple[Shard, ...]
    weights: Mapping[str, Stored]
    """By the names of `hugging_face_views`, in the order in which they lie on disk, so that each file is gone through once."""
    repeats: Mapping[Entry, str]
    """Tensors that are there once more, and the weight that each repeats."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads config.json and headers, no weight. Raises FileNotFoundError or ValueError that names the file, the key or the
        tensor, and what is wrong."""
        described, shards = read_config(path / "config.json"), read_shards(path)
        entries = {entry.name: entry for shard in shards for entry in shard.entries}
        prefix, config = described.prefix, described.model
        if not any(name.startswith(f"{prefix}model.layers.{config.num_hidden_layers}.") for name in entries):
            # `transformers` says nothing of heads that predict ahead when it leaves them out of what it saves.
            config = replace(config, num_nextn_predict_layers=0)
        shapes = {name: tuple(view.shape) for name, view in hugging_face_views(Model.planned(config)).items()}
        repeats = {prefix + again: name for again, name in repeated(config).items() if prefix + again in entries}
        forms = {name: _form(prefix + name, described.format, entries) for name in shapes}
        wanted = {part for parts, _ in forms.values() for part in parts}
        unknown = [name for name in entries.keys() - wanted - repeats.keys() if not is_foreign(name, prefix)]
        try:
            check_names(wanted - entries.keys(), unknown)
            weights = {name: _stored(parts, format, shapes[name], entries) for name, (parts, format) in forms.items()}
            for again, name in repeats.items():
                _stored((again,), None, shapes[name], entries)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls(
            path=path,
            config=config,
            shards=tuple(shards),
            weights=dict(sorted(weights.items(), key=lambda one: (one[1].parts[0].file, one[1].parts[0].start))),
            repeats={entries[again]: name for again, name in repeats.items()},
        )


def _form(name: str, format: Format | None, entries: Collection[str]) -> tuple[tuple[str, ...], Format | None]:
    """Names of the tensors that stand for a weight. It is quantised where one is there that only a quantised one has."""
    if format is not None and any(part in entries for part in format.parts(name) if part != name):
        return format.parts(name), format
    return (name,), None


def _stored(parts: tuple[str, ...], format: Format | None, shape: Shape, entries: Mapping[str, Entry]) -> Stored:
    found = tuple(entries[part] for part in parts)
    if format is not None and len(shape) != 2:
        raise ValueError(f"{found[0].name} is quantised, but is no matrix")
    try:
        forms = ((_FLOATS, shape),) if format is None else format.forms(shape)
    except ValueError as error:
        raise ValueError(f"{found[0].name}: {error}") from None
    for entry, (dtypes, wanted) in zip(found, forms, strict=True):
        check_form(entry.name, entry.dtype, dtypes, entry.shape, wanted)
    return Stored(shape=shape, parts=found, format=format)


def check_names(missing: Collection[str], unknown: Collection[str]) -> None:
    """Raises ValueError that counts them and names the first."""
    for names, what in ((missing, "missing"), (unknown, "unknown")):
        if names:
            count = "one tensor is" if len(names) == 1 else f"{len(names):,} tensors are"
            raise ValueError(f"the checkpoint does not fit its config.json: {count} {what}, first {min(names)}")


def check_form(name: str, dtype: str, dtypes: str, shape: Shape, wanted: Shape) -> None:
    """Raises ValueError for a tensor of a dtype that is not among `dtypes` (names with | between them), or of another shape."""
    if dtype not in dtypes.split("|"):
        hint = "; a quantised weight needs its scale and config.json a quantization_config" if dtypes == _FLOATS else ""
        raise ValueError(f"{name} is of dtype {dtype}, it must be {dtypes.replace('|', ' or ')}{hint}")
    if tuple(shape) != wanted:
        raise ValueError(f"{name} is {tuple(shape)}, config.json says {wanted}")
