"""What `check_kernels.py` compiles: every Triton kernel of the package, for Qwen3-30B-A3B's sizes, and what must hold of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer_nb.kernels import logprob_triton
from composer_nb.kernels.attention import cached_triton
from composer_nb.kernels.formats import quantize_triton
from composer_nb.kernels.formats.microscaling import NVFP4_BLOCK
from composer_nb.kernels.moe import gemm_triton, steps_triton, warp_decode_triton
from composer_nb.kernels.moe.gemm_triton import Tiles
from composer_nb.kernels.moe.recipes import INSTRUCTIONS, Format
from scripts.bench.aot import ARCHITECTURES, Expect, Spec

EXPERTS = {"E": 128, "BE": 128}
PRODUCT = {**EXPERTS, "N": 1536, "K": 2048}
"""Gates and ups of 128 experts of 768 by 2,048."""
TILES = Tiles()
BLOCKS = {"BM": TILES.m, "BN": TILES.n, "BK": TILES.k, "GROUP": TILES.group}
WIDE_TILES = Tiles(n=128)
WIDE = BLOCKS | {"BN": WIDE_TILES.n}
"""Of bf16 operands with float32 results, which need shared memory of the stages."""
TENSOR_CORES = {arch: INSTRUCTIONS[None, arch][1] for arch in ARCHITECTURES}
"""What PTX must contain, by architecture: what `explain` says."""


def spec(
    name: str,
    kernel: Any,
    tensors: str,
    numbers: str = "",
    constants: Mapping[str, Any] | None = None,
    *,
    tiles: Tiles | None = None,
    warps: int = 4,
    architectures: tuple[int, ...] = ARCHITECTURES,
    types: Mapping[str, str] | None = None,
    **expect: Any,
) -> Spec:
    """`tensors`: names of pointers, in bf16 unless a type follows after a colon. `numbers`: names of 32-bit integers. `types`:
    arguments of other types. `tiles`: give warps and stages."""
    pointers = (pointer.partition(":") for pointer in tensors.split())
    return Spec(
        name=name,
        kernel=kernel,
        types={
            **{pointer: f"*{kind or 'bf16'}" for pointer, _, kind in pointers},
            **dict.fromkeys(numbers.split(), "i32"),
            **(types or {}),
        },
        constants=constants or {},
        warps=tiles.warps if tiles else warps,
        stages=tiles.stages if tiles else 3,
        architectures=architectures,
        expect=Expect(**expect),
    )


def descriptor(high: int, wide: int) -> str:
    return f"tensordesc<bf16[{high}, {wide}]>"


def bulk(architecture: int) -> str:
    """What PTX has that loads tiles by the tensor memory accelerator and multiplies on tensor cores."""
    return rf"cp\.async\.bulk\.tensor[\s\S]*{TENSOR_CORES[architecture]}"


def products() -> list[Spec]:
    g, t, wide = gemm_triton, TILES, WIDE_TILES
    tensors, strides = "a b c a_scale:fp32 b_scale:fp32 ends:i32 row_of:i32", "stride_am stride_be"
    forward = PRODUCT | BLOCKS | {"stride_bn": 2048, "stride_bk": 1, "GATHER": True, "SCALED": False}
    forward |= {"BULK_A": False, "BULK_B": False}
    sorted_rows = forward | {"GATHER": False, "BULK_A": True, "BULK_B": True}
    rows, columns = {"b": descriptor(t.n, t.k)}, {"b": descriptor(t.k, t.n)}
    hopper = tuple(arch for arch in ARCHITECTURES if arch < 100)
    kernels: dict[str, tuple[Mapping[str, Any], Mapping[str, str], int]] = {
        "unaligned": (forward, {}, 12),
        "gathered rows": (forward | {"BULK_B": True}, rows, 12),
        "gathered rows with scales": (forward | {"BULK_B": True, "SCALED": True}, rows, 20),
        "sorted rows": (sorted_rows, rows | {"a": descriptor(t.m, t.k)}, 8),
        "sorted rows, transposed weights": (
            sorted_rows | {"stride_bn": 1, "stride_bk": 1536}, columns | {"a": descriptor(t.m, t.k)}, 8,
        ),
        "sorted rows, float32 results": (
            sorted_rows | WIDE | {"SCALED": True},
            {"a": descriptor(wide.m, wide.k), "b": descriptor(wide.n, wide.k), "c": "*fp32"},
            24,
        ),
    }  # fmt: skip
    specs = [
        spec(
            f"grouped product, {name}",
            g.product_kernel,
            tensors,
            strides,
            constants,
            types=types,
            tiles=wide if constants["BN"] == wide.n else t,
            narrow=narrow,
            ptx={arch: bulk(arch) if types else TENSOR_CORES[arch] for arch in ARCHITECTURES},
            architectures=hopper if constants["SCALED"] else ARCHITECTURES,
        )
        for name, (constants, types, narrow) in kernels.items()
    ]
    o = gemm_triton.outer_tiles(torch.bfloat16, gather=True)
    outer = {"stride_wf": 1, "stride_ws": 2048, "F": 2048, "S": 1536, "GATHER": True, "BULK": True}
    outer |= {"BM": o.k, "BF": o.m, "BS": o.n, "GROUP": o.group}
    of_rows = outer | {"stride_wf": 1536, "stride_ws": 1, "GATHER": False, "BULK": False}
    for name, constants, types in (
        ("gathered second operand", outer, {"second": descriptor(o.k, o.n)}),
        ("unaligned", of_rows, {}),
    ):
        specs.append(
            spec(
                f"gradients of weights, {name}",
                g.outer_kernel,
                "first second dw ends:i32 row_of:i32",
                "stride_f stride_s stride_we",
                constants,
                types=types,
                tiles=o if constants["GATHER"] else t,
                narrow=12,
                ptx={arch: bulk(arch) if types else TENSOR_CORES[arch] for arch in ARCHITECTURES},
            )
        )
    return specs


def scaled_product(name: str, format: Format, arch: int) -> Spec:
    """Gathered rows times gates and ups."""
    four, wide = format == "nvfp4", format == "fp8_block128"
    tiles = gemm_triton.scaled_tiles(128 if wide else NVFP4_BLOCK if four else 32)
    data, scales = (":u8", ":fp8e4nv") if four else (":fp8e4nv", ":u8")
    tensors = f"a{data} a_scale{scales} b{data} b_scale{scales} c ends:i32 row_of:i32"
    constants = PRODUCT | {"GATHER": True, "BM": tiles.m, "BN": tiles.n, "GROUP": tiles.group}
    if not wide:
        tensors += " a_global:fp32 b_global:fp32"
        constants |= {"FOUR": four, "BK": tiles.k}
    return spec(
        f"grouped product, {name}",
        gemm_triton.block128_product_kernel if wide else gemm_triton.scaled_product_kernel,
        tensors,
        constants=constants,
        tiles=tiles,
        architectures=(arch,),
        ptx={arch: INSTRUCTIONS[format, arch][1]},
        narrow=48,  # scales, and rows to gather
    )


def widened(name: str, data: str, scales: str, *, four: bool) -> Spec:
    return spec(
        name,
        quantize_triton.widen_kernel,
        f"q_ptr:{data} s_ptr:{scales} out_ptr",
        "total",
        {"FOUR": four, "PER": 16 if four else 32, "W": 4096},
        warps=8,
        narrow=16,
        architectures=(90,),
    )


def rows() -> list[Spec]:
    r, d = steps_triton, 2048
    inner = {"INNER": 768, "BM": 4, "BI": r.swiglu_shape(768, 32)[1]}
    plain, quantised = inner | {"BLOCK": 0, "PACKED": False}, inner | {"BLOCK": 32, "PACKED": True}
    forward, backward = "h gate:fp32 out q:u8 scale:u8", "d h gate:fp32 dh act dgate:fp32 q:u8 scale:u8"
    combined = {"D": d, "BD": r.columns(d), "K": 8, "BN": 4}
    return [
        spec("combine", r.combine_kernel, "y out row:i32", "tokens", combined, narrow=64),
        spec("swiglu", r.swiglu_kernel, forward, "rows", plain, narrow=4),
        spec("swiglu to mxfp8", r.swiglu_kernel, forward, "rows", quantised, narrow=5),
        spec("swiglu backward", r.swiglu_backward_kernel, backward, "rows", plain, narrow=8),
        spec("swiglu backward to mxfp8", r.swiglu_backward_kernel, backward, "rows", quantised, narrow=10),
    ]


def routes() -> list[Spec]:
    r = steps_triton
    return [
        spec(
            "router",
            r.choice_kernel,
            "logits:fp32 experts:i32",
            "tokens stride_n",
            {"E": 128, "K": 8, "BE": 128, "BK": 8, "BN": 16},
            narrow=2,  # results, of which a token has eight
        ),
        spec(
            "plan, histograms",
            r.histogram_kernel,
            "experts:i32 counts:i32",
            "choices",
            EXPERTS | {"BM": r.CHOICES},
            narrow=2,
        ),
        spec(
            "plan, places",
            r.place_kernel,
            "experts:i32 base:i32 token:i32 slot:i32 row:i32",
            "choices",
            EXPERTS | {"K": 8, "CHUNK": 32, "BM": r.CHOICES},
            narrow=16,  # each choice to a place of its own
        ),
    ]


def log_probabilities() -> list[Spec]:
    m, t = logprob_triton, logprob_triton.logprob_tiles(torch.bfloat16)
    sizes = {"D": 2048, "V": 151_936, "BM": t.m, "BV": t.n, "BD": t.k}
    part_size = {"PART": t.n * 75}
    tiles = {"hidden": descriptor(t.m, t.k), "weight": descriptor(t.n, t.k)}
    sampled = "hidden weight from_s:i64 token_s:i64 out:fp32"
    specs = [
        spec(
            "log-probabilities, sampled tokens",
            m.chosen_kernel,
            sampled,
            "S",
            {"D": 2048, "BS": 16, "BD": 256},
            narrow=2,
        )
    ]
    for loads, types in ((" of a vocabulary", tiles), (" of a vocabulary, unaligned", {})):
        constants = sizes | {"BULK": bool(types)}
        common: dict[str, Any] = {"types": types, "tiles": t}
        common["ptx"] = {arch: bulk(arch) if types else TENSOR_CORES[arch] for arch in ARCHITECTURES}
        names = "hidden weight out:fp32", "hidden weight total:fp32 g:fp32 slope"
        specs += [
            spec(f"normalisers{loads}", m.normaliser_kernel, names[0], "U", constants | part_size, narrow=4, **common),
            spec(f"slopes{loads}", m.slope_kernel, names[1], "U", constants, narrow=8, **common),
        ]
    return specs


def attention() -> list[Spec]:
    """Of Qwen3-30B-A3B, and wider: heads of 256, and of DeepSeek-V3."""
    specs, strides = [], dict.fromkeys(("k_slot", "k_head", "k_at", "v_slot", "v_head", "v_at"), "i64")
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for heads, group_heads, width, values in ((32, 8, 128, 128), (16, 8, 256, 256), (128, 1, 192, 128)):
            tiles = cached_triton.shape(dtype, group_heads, width, values)
            warps = tiles.pop("num_warps")
            sizes = {
                "HEADS": heads,
                "EACH": group_heads,
                "C": width,
                "V": values,
                "PARTS": 8,
                "PART": cached_triton.PART,
            }
            specs.append(
                spec(
                    f"attention on a cache, {kind}, width {width}",
                    cached_triton.part_kernel,
                    f"q:{kind} k:{kind} v:{kind} slot:i64 position:i64 state:fp32 mix:fp32",
                    constants=sizes | tiles,
                    types={**strides, "scale": "fp32"},
                    warps=warps,
                    narrow=8,
                )
            )
    joined = "position:i64 state:fp32 mix:fp32 out"
    sizes = {"HEADS": 32, "V": 128, "PARTS": 8, "PART": cached_triton.PART, "BV": 128}
    return [
        *specs,
        spec("attention on a cache, parts", cached_triton.join_kernel, joined, constants=sizes, warps=1, narrow=16),
    ]


def mxfp8(name: str, *, block: int = 32, rows: int = 1, down: bool = False) -> Spec:
    height, width, warps = quantize_triton.mx_tile(down, rows)
    return spec(
        name,
        quantize_triton.mx_kernel,
        "x_ptr q_ptr:u8 s_ptr:u8",
        "R K stride_b stride_r",
        {
            **{"BLOCK": block, "ROWS": rows, "DOWN": down, "H": height, "W": width},
            "PACKED": (height if down else width) >= 4 * block,
        },
        warps=warps,
        narrow=1,  # scales
        ptx=dict.fromkeys(ARCHITECTURES, r"cvt\.rn\.satfinite\.e4m3x2\.f32"),
        never=r"\.ftz|div\.|rcp\.|lg2\.|ex2\.",
    )


def nvfp4(name: str, arch: int) -> Spec:
    return spec(
        name,
        quantize_triton.nvfp4_kernel,
        "x_ptr q_ptr:u8 s_ptr:u8 g_ptr:fp32",
        "R K stride_r",
        {"FAST": False, "TOKEN": True, "HARDWARE": arch == 100, "H": 4, "W": 1024},
        architectures=(arch,),
        narrow=8,  # scales
        ptx={90: r"div\.rn\.f32", 100: r"div\.rn\.f32[\s\S]*cvt\.rn\.satfinite\.e2m1x2\.f32"},
        never=r"\.ftz|div\.full|div\.approx|rcp\.approx",
    )


def warps() -> list[Spec]:
    up, down = "x_ptr expert_ptr:i64 gate_ptr w_ptr act_ptr:fp32", "act_ptr:fp32 expert_ptr:i64 w_ptr y_ptr"
    m, sizes = warp_decode_triton, {"K": 8, "B": 512}
    return [
        spec("warp decode, gate and up", m.warp_up_kernel, up, "H", sizes | {"D": 2048}, warps=1, narrow=12),
        spec("warp decode, down", m.warp_down_kernel, down, "D", sizes | {"H": 768}, warps=1, narrow=12),
    ]


SPECS = (
    *attention(),
    *log_probabilities(),
    *products(),
    *routes(),
    *rows(),
    scaled_product("mxfp8", "mxfp8", 90),  # to compare with: on Hopper the operands are widened first
    scaled_product("mxfp8", "mxfp8", 100),
    scaled_product("fp8_block128", "fp8_block128", 90),
    scaled_product("fp8_block128", "fp8_block128", 100),
    widened("mxfp8 to bf16", "fp8e4nv", "u8", four=False),
    widened("nvfp4 to bf16", "u8", "fp8e4nv", four=True),
    scaled_product("nvfp4", "nvfp4", 100),
    mxfp8("mx_quantize"),
    mxfp8("mx_quantize, blocks of 128", block=128),
    mxfp8("mx_quantize, squares of 128", block=128, rows=128),
    mxfp8("mx_quantize, transposed", down=True),
    nvfp4("nvfp4_quantize, codes by comparisons", 90),
    nvfp4("nvfp4_quantize, codes by conversion", 100),
    *warps(),
)
