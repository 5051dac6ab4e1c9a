"""Load and save Hugging Face checkpoints of Qwen3-MoE and DeepSeek-V3, as `transformers` reads and writes them.

Everything is checked before anything is copied. Shards are read through memory maps and written tensor by tensor, so there is at
most one weight in memory beside the model. docs/models.md lists what is read and what is refused.
`hf_config` reads config.json, `shards` the safetensors files.

In memory queries, keys and values share one matrix, and so do gates and ups; matrices of experts are stacked for the grouped GEMM
and are [in, out]. On disk each is a tensor of its own, [out, in]. The mapping is a bijection: `hugging_face_views`.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from composer_nb.harness.untrusted import single
from composer_nb.trainer.models import shards as shard_files
from composer_nb.trainer.models.companions import TOKENIZER, read_companions, token_ids
from composer_nb.trainer.models.hf_config import FLOATS, Format, Shape, config_json, read_config
from composer_nb.trainer.models.transformer import Layer, Model, ModelConfig

# Names of tensors that the model does not need, which are ignored.
FOREIGN = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# The same for the checkpoint of a model with vision.
FOREIGN_VISION = re.compile(r"(vision_tower|mm_projector)\..+")
# Hugging Face's names of weights that are stored as they are, and those of `Layer`.
LAYER_NAMES = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "moe_norm", "self_attn.o_proj": "o",
    "self_attn.kv_a_proj_with_mqa": "kv_a", "self_attn.kv_a_layernorm": "kv_a_norm", "self_attn.kv_b_proj": "kv_b",
    "self_attn.q_a_proj": "q_a", "self_attn.q_a_layernorm": "q_a_norm", "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}  # fmt: skip
# Always float32: it moves in steps of a thousandth (arXiv 2412.19437, §4.2).
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"


# Names


def hugging_face_views(model: Model) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint under Hugging Face's name, as a view of the model's weights, in layer order. Reading
    and writing the views is reading and writing the model."""
    c = model.config
    views: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed}
    for index, layer in enumerate(model.layers):
        views |= layer_views(layer, c, f"model.layers.{index}.")
    for depth, head in enumerate(model.aheads):
        prefix = f"model.layers.{c.num_hidden_layers + depth}."
        views |= {
            prefix + "enorm.weight": head.embed_norm,
            prefix + "hnorm.weight": head.hidden_norm,
            prefix + "eh_proj.weight": head.join,
            prefix + "shared_head.norm.weight": head.final_norm,
        }
        views |= layer_views(head.layer, c, prefix)
    views["model.norm.weight"] = model.final_norm
    if not c.tie_word_embeddings:
        views["lm_head.weight"] = model.head
    return {name: view.detach() for name, view in views.items()}


def layer_views(layer: Layer, c: ModelConfig, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of one layer as `hugging_face_views` does, without experts that are dealt over ranks."""
    views: dict[str, Tensor] = {
        f"{name}.weight": getattr(layer, attribute)
        for name, attribute in LAYER_NAMES.items()
        if hasattr(layer, attribute)
    }
    if c.latent:
        views[f"self_attn.{'q_b' if c.q_lora_rank else 'q'}_proj.weight"] = layer.q_b
    else:
        sizes = [c.num_attention_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2]
        for kind, joined in (("weight", layer.qkv), *([("bias", layer.qkv_bias)] if c.qkv_bias else [])):
            for name, part in zip("qkv", joined.split(sizes), strict=True):
                views[f"self_attn.{name}_proj.{kind}"] = part
    if layer.dense:
        views |= swiglu_views(layer.dense_in, layer.dense_out, "mlp.")
    else:
        views["block_sparse_moe.gate.weight" if c.family == "mixtral" else "mlp.gate.weight"] = layer.router
        if layer.router_bias is not None:
            views[ROUTER_BIAS] = layer.router_bias
        if c.n_shared_experts:
            views |= swiglu_views(layer.shared_in, layer.shared_out, "mlp.shared_experts.")
        for expert in range(c.num_experts if layer.experts is None else 0):
            views |= expert_views(layer.w_in[expert], layer.w_out[expert], c, "", expert)
    return {prefix + name: view for name, view in views.items()}


def expert_views(w_in: Tensor, w_out: Tensor, c: ModelConfig, prefix: str, expert: int) -> dict[str, Tensor]:
    """Return the tensors of one expert of the layer whose names begin with `prefix`."""
    views = swiglu_views(w_in, w_out, f"{prefix}mlp.experts.{expert}.")
    if c.family != "mixtral":
        return views
    names = (f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight" for name in ("w1", "w3", "w2"))
    return dict(zip(names, views.values(), strict=True))


def swiglu_views(w_in: Tensor, w_out: Tensor, prefix: str) -> dict[str, Tensor]:
    gate, up = w_in.chunk(2, dim=1)
    return {prefix + "gate_proj.weight": gate.T, prefix + "up_proj.weight": up.T, prefix + "down_proj.weight": w_out.T}


def _repeated(c: ModelConfig) -> dict[str, str]:
    """Return the names of tensors that a checkpoint may repeat, and the names of the originals."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    names = {head: embed} if c.tie_word_embeddings else {}
    for depth in range(c.num_nextn_predict_layers):
        prefix = f"model.layers.{c.num_hidden_layers + depth}."
        names[prefix + "embed_tokens.weight"] = embed
        names[prefix + "shared_head.head.weight"] = embed if c.tie_word_embeddings else head
    return names


# Tensors of a model


@torch.no_grad()
def from_hugging_face(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model. Raises ValueError that names a missing, unknown, misshapen or non-finite tensor; the model
    is unchanged if names or shapes do not fit."""
    views = hugging_face_views(model)
    _check_names(views.keys() - tensors.keys(), tensors.keys() - views.keys())
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        _check_form(name, dtype, "bfloat16|float16|float32|float64", tensor.shape, tuple(views[name].shape))
    for name, tensor in tensors.items():
        fill(views[name], tensor, name)


def fill(view: Tensor, tensor: Tensor, label: str) -> None:
    """Copy `tensor` into `view`. Raises ValueError if the result would not be finite."""
    low, high = (float(bound) for bound in tensor.aminmax())
    largest = torch.finfo(view.dtype).max
    if not (-largest <= low and high <= largest):  # false for NaN
        raise ValueError(f"{label} holds NaN, infinity, or a number beyond {view.dtype}")
    view.copy_(tensor)


def published(model: Model, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return a copy of the weights for publication: under Hugging Face's names, on the CPU, in `dtype`. Router biases stay
    float32, as in `transformers`."""
    return copied(hugging_face_views(model), dtype)


def copied(views: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return copies of tensors of a checkpoint, as `published` does."""
    return {name: views[name].to("cpu", form[0], copy=True).contiguous() for name, form in forms(views, dtype).items()}


def forms(views: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, shard_files.Form]:
    """Return the dtype and shape in which each tensor is published."""
    return {
        name: (torch.float32 if name.endswith(ROUTER_BIAS) else dtype, tuple(view.shape))
        for name, view in views.items()
    }


def empty_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """Return a model with uninitialised weights, without spending time on random numbers."""
    model = Model.planned(config).to(dtype).to_empty(device="cpu")
    for layer in model.decoder_layers:
        if layer.router_bias is not None:  # not a parameter, so `to_empty` skipped it
            layer.router_bias = torch.zeros(config.num_experts)
    return model


# Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParts:
    """The tensors from which one weight is read.

    Attributes:
        format: Format of a weight that several tensors encode; None if it is one plain tensor.
    """

    shape: Shape
    parts: tuple[shard_files.TensorLocation, ...]
    format: Format | None = None

    def read(self) -> Tensor:
        """Return the weight, in float32 if it is quantised. Raises ValueError that names the file and the tensor."""
        if self.format is None:
            return shard_files.mapped(self.parts[0])
        try:
            return self.format.decode(self.shape, *map(shard_files.mapped, self.parts))
        except ValueError as error:
            raise ValueError(f"{self.parts[0].file}: {self.parts[0].name}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """A checkpoint in a folder whose headers fit its config.json.

    Attributes:
        weights: By the names of `hugging_face_views`, in file order, so that each file is read once.
        repeats: Repeated tensors, and the weight that each repeats.
    """

    path: Path
    config: ModelConfig
    weights: Mapping[str, WeightParts]
    repeats: Mapping[shard_files.TensorLocation, str]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read config.json and headers, but no weights. Raises FileNotFoundError or ValueError that names the file, the key or
        the tensor, and the fault."""
        described_config, shards = read_config(path / "config.json"), shard_files.read_shards(path)
        entries = {entry.name: entry for shard in shards for entry in shard}
        prefix, config = described_config.prefix, described_config.model
        if not any(name.startswith(f"{prefix}model.layers.{config.num_hidden_layers}.") for name in entries):
            # `transformers` saves no MTP heads, and does not say so in config.json.
            config = replace(config, num_nextn_predict_layers=0)
        check_counts(path, config, len(entries))
        shapes = {name: tuple(view.shape) for name, view in hugging_face_views(Model.planned(config)).items()}
        repeats = {prefix + again: name for again, name in _repeated(config).items() if prefix + again in entries}
        parts = {name: _parts(prefix + name, described_config.format, entries) for name in shapes}
        needed_names = {part for names, _ in parts.values() for part in names}
        unknown = [
            name
            for name in entries.keys() - needed_names - repeats.keys()
            if not FOREIGN.fullmatch(name.removeprefix(prefix)) and not (prefix and FOREIGN_VISION.fullmatch(name))
        ]
        try:
            _check_names(needed_names - entries.keys(), unknown)
            weights = {name: _stored(*parts[name], shapes[name], entries) for name in shapes}
            for again, name in repeats.items():
                _stored((again,), None, shapes[name], entries)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        in_file_order = sorted(weights.items(), key=lambda pair: (pair[1].parts[0].file, pair[1].parts[0].start))
        by_entry = {entries[again]: name for again, name in repeats.items()}
        return cls(path=path, config=config, weights=dict(in_file_order), repeats=by_entry)

    def read(self, views: Mapping[str, Tensor]) -> None:
        """Fill `views`, by the names of `hugging_face_views`. Raises ValueError, which names the file and the tensor."""
        for name, weight in self.weights.items():
            if name in views:
                fill(views[name], weight.read(), f"{weight.parts[0].file}: {weight.parts[0].name}")

    def require_repeats(self) -> None:
        """Raise ValueError, which names the tensor, if one differs from the weight that it repeats."""
        for entry, name in self.repeats.items():
            weight, again = self.weights[name].read(), shard_files.mapped(entry)
            if not (torch.equal(again.to(weight.dtype), weight) or torch.equal(weight.to(again.dtype), again)):
                raise ValueError(f"{entry.file}: {entry.name} must repeat {name}, but differs from it")


def check_counts(where: object, c: ModelConfig, tensors: int) -> None:
    """Raise ValueError if there are fewer tensors than layers and experts in the configuration, before these are listed."""
    layers, sparse_layers = c.num_hidden_layers + c.num_nextn_predict_layers, c.moe_layers + c.num_nextn_predict_layers
    if (least := layers + sparse_layers * c.num_experts) > tensors:
        raise ValueError(
            f"{where}: the checkpoint does not fit its configuration, which says {layers:,} layers with "
            f"{c.num_experts:,} experts, at least {least:,} tensors; there are {tensors:,}"
        )


def _parts(name: str, format: Format | None, entries: Collection[str]) -> tuple[tuple[str, ...], Format | None]:
    """Return the names of the tensors that encode a weight, which is quantised if any tensor is that only this format has."""
    if format is not None and any(part in entries for part in format.parts(name) if part != name):
        return format.parts(name), format
    return (name,), None


def _stored(
    parts: tuple[str, ...], format: Format | None, shape: Shape, entries: Mapping[str, shard_files.TensorLocation]
) -> WeightParts:
    """Return the tensors that encode a weight of `shape`. Raises ValueError if one is of another dtype or shape than the format
    has."""
    if format is not None and len(shape) != 2:
        raise ValueError(f"{parts[0]} is quantised, but is no matrix")
    try:
        forms = ((FLOATS, shape),) if format is None else format.forms(shape)
    except ValueError as error:
        raise ValueError(f"{parts[0]}: {error}") from None
    locations = tuple(entries[part] for part in parts)
    for entry, (dtypes, part_shape) in zip(locations, forms, strict=True):
        _check_form(entry.name, entry.dtype, dtypes, entry.shape, part_shape)
    return WeightParts(shape=shape, parts=locations, format=format)


def _check_names(missing: Collection[str], unknown: Collection[str]) -> None:
    """Raise ValueError that counts them and names the first."""
    for names, problem in ((missing, "missing"), (unknown, "unknown")):
        if names:
            count = "one tensor is" if len(names) == 1 else f"{len(names):,} tensors are"
            raise ValueError(f"the checkpoint does not fit its config.json: {count} {problem}, first {min(names)}")


def _check_form(name: str, dtype: str, dtypes: str, shape: Shape, expected: Shape) -> None:
    """Raise ValueError unless the dtype is among `dtypes` (separated by |) and the shape is the one expected."""
    if dtype not in dtypes.split("|"):
        hint = "; a quantised weight needs its scale and config.json a quantization_config" if dtypes == FLOATS else ""
        raise ValueError(f"{name} is of dtype {dtype}, it must be {dtypes.replace('|', ' or ')}{hint}")
    if tuple(shape) != expected:
        raise ValueError(f"{name} is {tuple(shape)}, config.json says {expected}")


@torch.no_grad()
def load_pretrained(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Model:
    """Load a checkpoint folder or a GGUF file with weights in `dtype`; quantised weights are dequantised. Raises
    FileNotFoundError or ValueError that names the file, the key or the tensor, and the fault."""
    if Path(path).is_file():
        from composer_nb.trainer.models.gguf_file import read_gguf  # which uses this module

        return read_gguf(Path(path)).to(dtype)
    source = CheckpointSource.open(Path(path))
    model = empty_model(source.config, dtype)
    model.companions = read_companions(source.path)
    source.read(hugging_face_views(model))
    source.require_repeats()
    return model


# Writing


@torch.no_grad()
def save_pretrained(
    model: Model,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    shard_bytes: int = shard_files.SHARD_BYTES,
) -> None:
    """Write a Hugging Face checkpoint, with the model's companions. The folder appears only when it is complete. Raises
    ValueError that names a tensor which is not finite.

    dtype: dtype of the weights (default: that of the model). tokenizer: a tokenizer.json to write instead of the model's.
    shard_bytes: maximum size of a file.
    """
    path, dtype, views = Path(path), dtype or model.embed.dtype, hugging_face_views(model)
    tensor_forms = forms(views, dtype)

    def finite(name: str) -> Tensor:
        tensor = views[name].to(tensor_forms[name][0])
        shard_files.require_finite(str(path), shard_files.not_finite({name: tensor}))
        return tensor

    with replaced(path) as new_folder:
        groups = shard_files.split(tensor_forms, shard_bytes)
        files = {
            file: {name: tensor_forms[name] for name in names}
            for file, names in zip(shard_files.file_names(len(groups)), groups, strict=True)
        }
        for file, tensors in files.items():
            shard_files.write_shard(new_folder / file, tensors, finite)
        write_side_files(model, new_folder, files, dtype)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, new_folder / TOKENIZER)


def side_files(model: Model, dtype: torch.dtype = torch.bfloat16) -> dict[str, bytes]:
    """Return the files beside the weights of a checkpoint: config.json and the model's companions."""
    config = config_json(model.config, dtype, token_ids(model.companions))
    return {**model.companions, "config.json": config.encode()}


def write_side_files(
    model: Model, folder: Path, files: Mapping[str, Mapping[str, shard_files.Form]], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write what belongs beside `files` of weights, with their index if there are several."""
    for name, data in side_files(model, dtype).items():
        (folder / single(name)).write_bytes(data)
    if len(files) > 1:
        (folder / shard_files.INDEX).write_text(shard_files.index_of(files, ROUTER_BIAS), encoding="utf-8")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a folder to fill. On success it replaces `path`; otherwise `path` is unchanged."""
    new_folder, old_folder = (path.with_name(path.name + ending) for ending in (".part", ".old.part"))
    shutil.rmtree(new_folder, ignore_errors=True)
    shutil.rmtree(old_folder, ignore_errors=True)
    new_folder.mkdir(parents=True)
    try:
        yield new_folder
    except BaseException:
        shutil.rmtree(new_folder, ignore_errors=True)
        raise
    if path.exists():
        os.replace(path, old_folder)
    os.replace(new_folder, path)
    shutil.rmtree(old_folder, ignore_errors=True)
