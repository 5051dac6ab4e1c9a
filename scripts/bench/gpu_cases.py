"""What `bench_gpu.py` measures: a generator of cases for each part of the plan. Numbers are those of the plan's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_peers import Shape, blockwise_products, liger_layer, loop_mm, peer, rowwise_product, their_layer, torchao_cast
from torch import Tensor

from composer_nb.kernels import grouped_mm, moe, mx_quantize
from composer_nb.kernels.moe.plain import DispatchPlan
from composer_nb.kernels.moe.recipes import architecture, quantise_rows, quantise_weights
from composer_nb.kernels.moe.routing import choose_experts
from scripts.bench.gpu_bench_tools import OURS, Case, Form, Routes, Target, route_logits

BF16 = torch.bfloat16

SHAPES = {
    "S1": Shape("Qwen3-30B-A3B", 32768, 2048, 768, 128, 8),
    "S2": Shape("OLMoE", 32768, 2048, 1024, 64, 8),
    "S3": Shape("DeepSeek-V3, a slice", 65536, 7168, 2048, 8, 1),
    "S4": Shape("gpt-oss", 32768, 2880, 2880, 32, 4),
    "S5": Shape("Qwen3-Next", 32768, 2048, 512, 512, 10),
}
TINY = {name: Shape(shape.name, 6, 128, 128, min(shape.e, 3), min(shape.k, 2)) for name, shape in SHAPES.items()}


class Bench:
    """Where it runs, on which shapes, and what makes random inputs."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.rehearsal = device == "cpu"
        self.shapes = TINY if self.rehearsal else SHAPES
        self.random = torch.Generator(device=self.device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
        return (torch.randn(*shape, generator=self.random, device=self.device) * scale).to(dtype)

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.rehearsal else full

    def weights(self, s: Shape) -> tuple[Tensor, Tensor]:
        return self.normal(s.e, 2 * s.i, s.d, scale=s.d**-0.5), self.normal(s.e, s.d, s.i, scale=s.i**-0.5)

    def plan(self, s: Shape, routes: Routes) -> tuple[Tensor, DispatchPlan]:
        from composer_nb.kernels.moe.steps_triton import TritonSteps

        experts = choose_experts(route_logits(routes, s.n, s.e, self.device), s.k)
        return experts, TritonSteps(architecture(self.device)).plan(experts, s.e)


def forward_only(layer: Callable[..., Tensor], leaves: tuple[Tensor, ...], pull: Tensor) -> Form:
    return lambda: layer(*leaves).detach()


def forward_backward(layer: Callable[..., Tensor], leaves: tuple[Tensor, ...], pull: Tensor) -> Form:
    def run() -> Tensor:
        out = layer(*leaves)
        torch.autograd.grad(out, leaves, pull)
        return out.detach()

    return run


# -- the plan ------------------------------------------------------------------------------------------------


def ceilings(b: Bench) -> Iterator[Case]:
    count, side = b.size(1 << 30, 1 << 12), b.size(8192, 64)
    source, goal = (
        torch.zeros(count, dtype=torch.uint8, device=b.device),
        torch.empty(count, dtype=torch.uint8, device=b.device),
    )
    yield Case(
        number="0",
        title="copy",
        shape=f"{count >> 20} MiB",
        forms={OURS: lambda: goal.copy_(source)},
        work=2.0 * count,
        unit="GB/s",
    )
    x, w = b.normal(side, side), b.normal(side, side)
    yield Case(
        number="0",
        title="product, bf16",
        shape=f"{side}³",
        forms={OURS: lambda: x @ w.T},
        work=2.0 * side**3,
        unit="TFLOP/s",
    )
    unit_scale = torch.ones((), device=b.device)
    qx, qw = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    form: Form = lambda: torch._scaled_mm(qx, qw.T, scale_a=unit_scale, scale_b=unit_scale, out_dtype=BF16)  # noqa: E731
    yield Case(
        number="0", title="product, fp8", shape=f"{side}³", forms={OURS: form}, work=2.0 * side**3, unit="TFLOP/s"
    )


def products(b: Bench) -> Iterator[Case]:
    """Rows 1, 2, 3 and 12: one grouped product on rows that are sorted already."""
    kinds: tuple[tuple[str, str, Routes, Target], ...] = (
        ("1", "S3", "uniform", Target(0.95, 1.0, 1.1)),
        ("2", "S1", "zipf", Target(1.0, 1.2, 1.5)),
        ("2", "S5", "zipf", Target(1.0, 1.2, 1.5)),
    )
    for number, key, routes, target in kinds:
        s = b.shapes[key]
        _, plan = b.plan(s, routes)
        x, (up, _) = b.normal(s.n * s.k, s.d), b.weights(s)
        work, shape = 4.0 * s.n * s.k * s.d * s.i, f"{key}, {routes}"
        forms: dict[str, Form | str] = {
            OURS: lambda x=x, up=up, plan=plan: grouped_mm(x, up.mT, plan.ends_E, backend="triton"),
            "torch grouped_mm": lambda x=x, up=up, plan=plan: torch.nn.functional.grouped_mm(
                x, up.mT, offs=plan.ends_E
            ),
        }
        yield Case(
            number=number,
            title="grouped product, bf16",
            shape=shape,
            forms=forms,
            work=work,
            unit="TFLOP/s",
            goals={"torch grouped_mm": target},
        )
        if key == "S1":
            leaves, pull = (x.requires_grad_(), up.requires_grad_()), b.normal(s.n * s.k, 2 * s.i)
            forms = {
                OURS: forward_backward(
                    lambda x, w, plan=plan: grouped_mm(x, w.mT, plan.ends_E, backend="triton"), leaves, pull
                ),
                "loop over experts": forward_backward(lambda x, w, plan=plan: loop_mm(x, w.mT, plan), leaves, pull),
            }
            yield Case(
                number="3",
                title="grouped product, forward and backward",
                shape=shape,
                forms=forms,
                work=3 * work,
                unit="TFLOP/s",
                goals={"loop over experts": Target(2, 3, 5)},
            )
        if key == "S3":
            yield from scaled_products(b, x, up, plan, work, shape)


def scaled_products(b: Bench, x: Tensor, up: Tensor, plan: DispatchPlan, work: float, shape: str) -> Iterator[Case]:
    """Row 12: operands that are quantised already."""
    from composer_nb.kernels.moe.steps_triton import TritonSteps

    steps = TritonSteps(architecture(b.device))

    def scaled(format: Any) -> Form:
        qx, qw = quantise_rows(x, format, "triton"), quantise_weights(up, format, "triton")
        return lambda: steps.product(qx, qw, plan, gather=False, dtype=BF16)

    plain: Form = lambda: torch.nn.functional.grouped_mm(x, up.mT, offs=plan.ends_E)  # noqa: E731
    common: dict[str, Any] = {"shape": shape, "work": work, "unit": "TFLOP/s"}
    for number, format, target in (
        ("12", "fp8_block128", Target(1.0, 1.15, 1.3)),
        ("–", "mxfp8", None),
        ("–", "nvfp4", None),
    ):
        forms: dict[str, Form | str] = {OURS: scaled(format), "torch grouped_mm, bf16": plain}
        if number == "12":
            forms["torch _scaled_grouped_mm, rows"] = rowwise_product(x, up, plan)
            forms["torch scaled_mm an expert, blocks of 128"] = peer("torch", lambda: blockwise_products(x, up, plan))
        goals = {"torch grouped_mm, bf16": target} if target else {}
        yield Case(number=number, title=f"grouped product, {format}", forms=forms, goals=goals, **common)


def layers(b: Bench) -> Iterator[Case]:
    """Rows 4 to 7 and 15: x, logits and weights to output, and back."""
    for key, routes in (("S1", "zipf"), ("S1", "uniform"), ("S2", "zipf"), ("S4", "zipf"), ("S5", "zipf")):
        s = b.shapes[key]
        leaves = b.normal(s.n, s.d), route_logits(routes, s.n, s.e, b.device), *b.weights(s)  # type: ignore[arg-type]
        leaves, pull = tuple(leaf.requires_grad_() for leaf in leaves), b.normal(s.n, s.d)
        every = layer_forms(s, leaves, everything=key == "S1" and routes == "uniform")
        for passes, factor in (("forward", 1), ("forward and backward", 3)):
            run = forward_only if factor == 1 else forward_backward
            forms = {name: form if isinstance(form, str) else run(form, leaves, pull) for name, form in every.items()}
            goals = {
                "torch grouped_mm": Target(1.3, 1.6, 2.0),
                "liger": Target(1.0, 1.3, 1.5),
                "transformers eager": Target(3, 5, 8),
                "TFLOP/s": Target(380, 450, 520) if factor == 1 else Target(320, 400, 450),
            }
            common: dict[str, Any] = {"shape": f"{key}, {routes}", "work": factor * s.flops, "unit": "TFLOP/s"}
            title = f"layer, bf16, {passes}"
            yield Case(
                number="4 to 7",
                title=title,
                forms=forms,
                goals=goals if key == "S1" else {},
                **common,
            )
    yield from low_precision_layers(b)


def layer_forms(s: Shape, leaves: tuple[Tensor, ...], *, everything: bool) -> dict[str, Callable[..., Tensor] | str]:
    def hugging_face(backend: str) -> Callable[..., Tensor] | str:
        return peer("transformers", lambda: their_layer(s, backend))

    forms: dict[str, Callable[..., Tensor] | str] = {
        OURS: lambda *leaves: moe(*leaves, s.k, backend="triton"),
        "torch grouped_mm": lambda *leaves: moe(*leaves, s.k, backend="torch"),
        "liger": peer("liger_kernel", lambda: liger_layer(s)),
    }
    if everything:
        forms |= {f"transformers {name}": hugging_face(name) for name in ("eager", "grouped_mm", "batched_mm")}
    return forms


def low_precision_layers(b: Bench) -> Iterator[Case]:
    for key in ("S3", "S1"):
        s = b.shapes[key]
        leaves = b.normal(s.n, s.d), route_logits("uniform", s.n, s.e, b.device), *b.weights(s)
        leaves, pull = tuple(leaf.requires_grad_() for leaf in leaves), b.normal(s.n, s.d)
        for recipe in ("fp8_block128", "mxfp8", "nvfp4"):
            forms: dict[str, Form | str] = {
                name: forward_backward(partial(moe, k=s.k, recipe=used, backend="triton"), leaves, pull)
                for name, used in ((OURS, recipe), ("ours, bf16", "bf16"))
            }
            goal = Target(1.0, 1.15, 1.3) if (key, recipe) == ("S3", "fp8_block128") else None
            yield Case(
                number="15",
                title=f"layer, {recipe}, forward and backward",
                shape=f"{key}, uniform",
                forms=forms,
                work=3 * s.flops,
                unit="TFLOP/s",
                goals={"ours, bf16": goal} if goal else {},
            )


def compiled(b: Bench) -> Iterator[Case]:
    """What torch.compile makes of `transformers`' loop: last, as nobody knows how long it compiles."""
    s = b.shapes["S1"]
    leaves = b.normal(s.n, s.d), route_logits("uniform", s.n, s.e, b.device), *b.weights(s)
    leaves, pull = tuple(leaf.requires_grad_() for leaf in leaves), b.normal(s.n, s.d)
    layer: Callable[..., Tensor] | str = "not rehearsed: compiling takes minutes on a CPU"
    if not b.rehearsal:
        layer = peer("transformers", lambda: torch.compile(their_layer(s, "eager")))
    forms: dict[str, Form | str] = {
        OURS: forward_backward(partial(moe, k=s.k, backend="triton"), leaves, pull),
        "transformers eager, torch.compile": layer if isinstance(layer, str) else forward_backward(layer, leaves, pull),
    }
    yield Case(
        number="4 to 7",
        title="layer, bf16, forward and backward, compiled",
        shape="S1, uniform",
        forms=forms,
        work=3 * s.flops,
        unit="TFLOP/s",
    )


def rows(b: Bench) -> Iterator[Case]:
    """Rows 8 to 11: what moves memory."""
    from composer_nb.kernels.moe.steps_triton import TritonSteps

    steps = TritonSteps(architecture(b.device))
    high, wide = b.size(131_072, 64), b.size(7168, 256)
    x, per = b.normal(high, wide), 2 + 1 + 1 / 32
    casts: dict[str, Form | str] = {
        OURS: lambda: mx_quantize(x, backend="triton").qdata,
        "torchao": peer("torchao", lambda: torchao_cast(x, compiled=False)),
    }
    casts["torchao, torch.compile"] = peer("torchao", lambda: torchao_cast(x, compiled=True))
    common: dict[str, Any] = {"unit": "GB/s"}
    size = f"{high} × {wide}"
    yield Case(
        number="8",
        title="mx_quantize",
        shape=size,
        forms=casts,
        work=x.numel() * per,
        goals={"copy": Target(0.75, 0.85, 0.9)},
        **common,
    )
    goal = Target(0.6, 0.75, 0.85)
    s = b.shapes["S1"]
    h, gate = b.normal(s.n * s.k, 2 * s.i), torch.rand(s.n * s.k, device=b.device)
    fused: dict[str, Form | str] = {OURS: lambda: steps.swiglu(h, gate, "mxfp8")}
    yield Case(
        number="9",
        title="SwiGLU to MXFP8",
        shape="S1",
        forms=fused,
        work=h.numel() * (2 + 0.5 + 1 / 64),
        goals={"copy": goal},
        **common,
    )
    _, plan = b.plan(s, "uniform")
    copies = b.normal(s.n * s.k, s.d)
    yield Case(
        number="10",
        title="combine",
        shape="S1, uniform",
        forms={OURS: lambda: steps.combine(copies, plan), "torch": lambda: copies[plan.row_NK].sum(1)},
        work=2.0 * (s.n + s.n * s.k) * s.d,
        goals={"copy": Target(0.75, 0.85, 0.9)},
        **common,
    )
    logits = route_logits("uniform", s.n, s.e, b.device)

    def ours() -> None:
        steps.plan(steps.choose(logits, s.k), s.e)

    def theirs() -> None:
        _, chosen = logits.softmax(-1).topk(s.k, dim=-1)
        flat = chosen.reshape(-1)
        torch.argsort(flat, stable=True)
        torch.bincount(flat, minlength=s.e).cumsum(0)

    yield Case(
        number="11",
        title="router and plan",
        shape="S1",
        forms={OURS: ours, "torch": theirs},
        goals={"torch": Target(3, 6, 10)},
    )


def graphed(form: Form) -> Form:
    """The same as one CUDA graph: what is left is the time on the GPU."""
    for _ in range(2):
        form()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = form()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def decoding(b: Bench) -> Iterator[Case]:
    """Row 16; bytes are those of the experts that are chosen."""
    base = b.shapes["S1"]
    up, down = b.weights(base)
    for n in (1, 8, 32, 64) if not b.rehearsal else (1, 2):
        s = Shape(base.name, n, base.d, base.i, base.e, base.k)
        logits, x = route_logits("uniform", n, s.e, b.device, seed=n), b.normal(n, s.d)
        experts = choose_experts(logits, s.k)
        forms: dict[str, Form | str] = {
            OURS: lambda x=x, logits=logits: moe(x, logits, up, down, base.k, backend="triton")
        }
        for backend in ("grouped_mm", "batched_mm"):
            layer = peer("transformers", lambda s=s, backend=backend: their_layer(s, backend))
            forms[f"transformers {backend}"] = (
                layer if isinstance(layer, str) else lambda layer=layer, x=x, logits=logits: layer(x, logits, up, down)
            )
        if not b.rehearsal:
            for name, form in list(forms.items()):
                if not isinstance(form, str):
                    forms[f"{name}, as a CUDA graph"] = peer("torch", lambda form=form: graphed(form))
        bytes_read = 6.0 * s.d * s.i * experts.unique().numel()
        yield Case(
            number="16",
            title=f"decode, {n} tokens",
            shape="S1",
            forms=forms,
            work=bytes_read,
            unit="GB/s",
            goals={"copy": Target(0.5, 0.6, 0.7)}
            | ({"transformers grouped_mm": Target(1.3, 1.8, 2.5)} if n in (8, 32) else {}),
        )


def memory(b: Bench) -> list[str]:
    """Row 17: peak of a layer beyond its inputs, by recipe."""
    if b.device.type != "cuda":
        return ["row 17, memory: needs a GPU"]
    s, lines, of_bf16, goal = b.shapes["S1"], list[str](), 0, Target(0.25, 0.4, 0.45)
    leaves = b.normal(s.n, s.d), route_logits("uniform", s.n, s.e, b.device), *b.weights(s)
    leaves, pull = tuple(leaf.requires_grad_() for leaf in leaves), b.normal(s.n, s.d)
    for recipe in ("bf16", "mxfp8"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        out = moe(*leaves, s.k, recipe=recipe, backend="triton")
        kept_bytes = torch.cuda.memory_allocated() - allocated
        torch.autograd.grad(out, leaves, pull)
        peak = torch.cuda.max_memory_allocated() - allocated
        of_bf16 = of_bf16 or peak
        less = 1 - peak / of_bf16
        verdict = f"; goals 25 / 40 / 45 %: {goal.verdict(less)}" if recipe == "mxfp8" else ""
        lines.append(
            f"row 17, memory of the S1 layer, {recipe}: {kept_bytes / 2**20:,.0f} MiB kept, peak {peak / 2**20:,.0f} MiB, "
            f"{less:.0%} less than bf16's{verdict}"
        )
        del out
    return lines
