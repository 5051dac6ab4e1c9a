"""Quantised checkpoints: which tensors stand for a weight, and the weight that they stand for.

Two formats: DeepSeek-V3's blocks of float8, and the groups of int4 or int8 that compressed-tensors packs (Kimi K2 Thinking and
K2.5, routed experts). What comes out are the very numbers that an engine multiplies with, in float32. Activations, which some
engines round as well, are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from composer_nb.kernels.blockwise import dequantize_blocks
from composer_nb.kernels.groupwise import dequantize, unpack

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatBlocks:
    """`X.weight` in float8 and `X.weight_scale_inv`, its factor for each block (arXiv 2412.19437, §3.3.2)."""

    rows: int
    columns: int

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that stand for the weight `name`."""
        return name, name + "_scale_inv"

    def forms(self, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Dtypes (names with | between them) and shapes of these tensors."""
        blocks = (-(-shape[0] // self.rows), -(-shape[1] // self.columns))
        return ("F8_E4M3", shape), ("F32", blocks)

    def decode(self, shape: Shape, code: Tensor, scale: Tensor) -> Tensor:
        return dequantize_blocks(code, scale, rows=self.rows, columns=self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntegers:
    """`X.weight_packed`, `X.weight_scale` for each group along the input, `X.weight_shape` (compressed-tensors)."""

    bits: int
    group: int

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that stand for the weight `name`."""
        return name + "_packed", name + "_scale", name + "_shape"

    def forms(self, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Dtypes (names with | between them) and shapes of these tensors. Raises ValueError for a width that is no multiple of
        the group."""
        if shape[1] % self.group:
            raise ValueError(f"an input width of {shape[1]} is no multiple of group_size={self.group}")
        words, groups = -(-shape[1] * self.bits // 32), shape[1] // self.group
        return ("I32", (shape[0], words)), ("BF16|F16|F32", (shape[0], groups)), ("I32|I64", (2,))

    def decode(self, shape: Shape, word: Tensor, scale: Tensor, written: Tensor) -> Tensor:
        """Raises ValueError where the checkpoint itself says another shape."""
        if tuple(written.tolist()) != shape:
            raise ValueError(f"weight_shape says {tuple(written.tolist())}, config.json says {shape}")
        return dequantize(unpack(word, shape[1], bits=self.bits), scale)


Format = FloatBlocks | PackedIntegers


def read_format(quantization: Mapping[str, Any]) -> Format:
    """The format that a `quantization_config` describes. Raises ValueError that names the key for any other."""
    method = quantization.get("quant_method")
    if method == "fp8":
        _only(quantization, "fmt", ("e4m3", None))
        block = quantization.get("weight_block_size")
        if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
            raise ValueError(f"weight_block_size={block!r} is not supported, only two sizes, as [128, 128]")
        return FloatBlocks(rows=block[0], columns=block[1])
    if method != "compressed-tensors":
        raise ValueError(f"quant_method={method!r} is not supported, only 'fp8' and 'compressed-tensors'")
    _only(quantization, "format", ("pack-quantized",))
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(one := next(iter(groups.values())), dict):
        raise ValueError("config_groups of more or less than one group is not supported")
    _only(one, "input_activations", (None,))
    weights = one.get("weights")
    if not isinstance(weights, dict):
        raise ValueError("config_groups without weights is not supported")
    for name, values in _WEIGHTS.items():
        _only(weights, name, values)
    if type(group := weights.get("group_size")) is not int or group < 1:
        raise ValueError(f"group_size={group!r} is not supported, only a number of weights")
    return PackedIntegers(bits=weights["num_bits"], group=group)


_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4, 8),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "actorder": (None, "weight", "static", False),
    "dynamic": (False, None),
}


def _only(config: Mapping[str, Any], name: str, values: Sequence[Any]) -> None:
    if config.get(name) not in values:
        raise ValueError(f"{name}={config.get(name)!r} is not supported, only {values[0]!r}")
