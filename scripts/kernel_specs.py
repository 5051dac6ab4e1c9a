"""What `check_kernels.py` compiles: every Triton kernel of the package, for Qwen3-30B-A3B's sizes, and what must hold of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_nb.kernels import logprob_triton
from composer_nb.kernels.attention import cached_triton
from composer_nb.kernels.formats import quantize_triton
from composer_nb.kernels.formats.microscaling import NVFP4_BLOCK
from composer_nb.kernels.moe import grouped_gemm_triton, routing_triton, rows_triton, scaled_gemm_triton
from composer_nb.kernels.moe.explanation import INSTRUCTIONS
from composer_nb.kernels.moe.grouped_gemm_triton import Tiles
from composer_nb.kernels.moe.recipes import Format
from scripts.aot import ARCHITECTURES, Expect, Spec

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
    pointers = (each.partition(":") for each in tensors.split())
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


def products() -> list[Spec]:
    g = grouped_gemm_triton
    tensors, strides = "a b c a_scale:fp32 b_scale:fp32 ends:i32 row_of:i32", "stride_am stride_be"
    forward = PRODUCT | BLOCKS | {"stride_bn": 2048, "stride_bk": 1, "GATHER": True, "SCALED": False}
    transposed = forward | {"stride_bn": 1, "stride_bk": 1536, "GATHER": False}
    by_tma = {
        "a": f"tensordesc<bf16[{TILES.m}, {TILES.k}]>",
        "b": f"tensordesc<bf16[{TILES.n}, {TILES.k}]>",
        "c": "*bf16",
        "a_scale": "*fp32",
        "b_scale": "*fp32",
        "ends": "*i32",
    }
    scaled = {arch: TENSOR_CORES[arch] for arch in ARCHITECTURES if arch < 100}
    outer = {"stride_wn": 2048, "stride_wk": 1, "N": 1536, "K": 2048, "GATHER_G": False, "GATHER_X": True}
    outer |= {"BM": TILES.k, "BN": TILES.n, "BK": TILES.m, "GROUP": TILES.group}
    # narrow: the ends of experts, and rows to gather
    common: dict[str, Any] = {"tiles": TILES, "ptx": TENSOR_CORES}
    return [
        spec("grouped product, gathered rows", g.product_kernel, tensors, strides, forward, narrow=12, **common),
        spec("grouped product, transposed weights", g.product_kernel, tensors, strides, transposed, narrow=8, **common),
        spec(
            "grouped product, by TMA",
            g.product_tma_kernel,
            "",
            constants=PRODUCT | BLOCKS | {"SCALED": False},
            types=by_tma,
            tiles=TILES,
            narrow=8,
            ptx={arch: rf"cp\.async\.bulk\.tensor[\s\S]*{text}" for arch, text in TENSOR_CORES.items()},
        ),
        spec(
            "grouped product, by TMA, float32 results",
            g.product_tma_kernel,
            "",
            constants=PRODUCT | WIDE | {"SCALED": True},
            types={
                **by_tma,
                "a": f"tensordesc<bf16[{WIDE_TILES.m}, {WIDE_TILES.k}]>",
                "b": f"tensordesc<bf16[{WIDE_TILES.n}, {WIDE_TILES.k}]>",
                "c": "*fp32",
            },
            tiles=WIDE_TILES,
            narrow=24,
            ptx=scaled,
            architectures=tuple(scaled),
        ),
        spec(
            "grouped product, gathered rows with scales",
            g.product_kernel,
            tensors,
            strides,
            forward | {"SCALED": True},
            narrow=20,
            tiles=TILES,
            ptx=scaled,
            architectures=tuple(scaled),
        ),
        spec(
            "gradients of weights",
            g.outer_kernel,
            "g x dw ends:i32 row_of:i32",
            "stride_g stride_x stride_we",
            outer,
            narrow=12,
            **common,
        ),
    ]


def scaled_product(name: str, format: Format, arch: int) -> Spec:
    """Gathered rows times gates and ups."""
    four, wide = format == "nvfp4", format == "fp8_block128"
    tiles = scaled_gemm_triton.scaled_tiles(128 if wide else NVFP4_BLOCK if four else 32)
    data, scales = (":u8", ":fp8e4nv") if four else (":fp8e4nv", ":u8")
    tensors = f"a{data} a_scale{scales} b{data} b_scale{scales} c ends:i32 row_of:i32"
    constants = PRODUCT | {"GATHER": True, "BM": tiles.m, "BN": tiles.n, "GROUP": tiles.group}
    if not wide:
        tensors += " a_global:fp32 b_global:fp32"
        constants |= {"FOUR": four, "BK": tiles.k}
    return spec(
        f"grouped product, {name}",
        scaled_gemm_triton.block128_product_kernel if wide else scaled_gemm_triton.scaled_product_kernel,
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
    r, d = rows_triton, 2048
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
    r = routing_triton
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
    m, tensors = logprob_triton, "hidden weight total:fp32"
    sizes = {"D": 2048, "V": 151_936, "BM": TILES.m, "BV": 128, "BD": TILES.k}
    common: dict[str, Any] = {"warps": TILES.warps, "ptx": TENSOR_CORES}
    return [
        spec(
            "log-probabilities, normalisers",
            m.normaliser_kernel,
            f"{tensors} entropy:fp32",
            "U",
            sizes,
            narrow=4,
            **common,
        ),
        spec(
            "log-probabilities, sampled tokens",
            m.chosen_kernel,
            "hidden weight from_s:i64 token_s:i64 out:fp32",
            "S",
            {"D": 2048, "BS": 16, "BD": 256},
            narrow=2,
        ),
        spec("log-probabilities, slopes", m.slope_kernel, f"{tensors} g:fp32 slope", "U", sizes, narrow=8, **common),
    ]


def attention() -> list[Spec]:
    sizes = {"HEADS": 32, "EACH": 8, "C": 128, "V": 128, "BT": cached_triton.BLOCK, "BC": 128, "BV": 128}
    strides = dict.fromkeys(("k_slot", "k_head", "k_at", "v_slot", "v_head", "v_at"), "i64")
    return [
        spec(
            f"attention on a cache, {dtype}",
            cached_triton.attend_kernel,
            f"q:{dtype} k:{dtype} v:{dtype} out:{dtype} slot:i64 position:i64",
            constants=sizes,
            types={**strides, "scale": "fp32"},
            narrow=4,
        )
        for dtype in ("fp32", "bf16")
    ]


def mxfp8(name: str, *, block: int = 32, rows: int = 1, down: bool = False) -> Spec:
    height, width, warps = quantize_triton.mx_tile(down, rows)
    return spec(
        name,
        quantize_triton.mx_kernel,
        "x_ptr q_ptr:u8 s_ptr:u8",
        "R K stride_b stride_r",
        {
            **{"BLOCK": block, "ROWS": rows, "RCEIL": True, "DOWN": down, "H": height, "W": width},
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
        {"TOKEN": True, "HARDWARE": arch == 100, "H": 4, "W": 1024},
        architectures=(arch,),
        narrow=8,  # scales
        ptx={90: r"div\.rn\.f32", 100: r"div\.rn\.f32[\s\S]*cvt\.rn\.satfinite\.e2m1x2\.f32"},
        never=r"\.ftz|div\.full|div\.approx|rcp\.approx",
    )


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
)
