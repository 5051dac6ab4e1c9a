"""`moe` against loops in float64: the formats of each recipe, causality and batch invariance, what is refused, what is
explained."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_nb.kernels import explain, grouped_mm, moe
from composer_nb.kernels.formats.microscaling import mx_quantize_reference, nvfp4_quantize_reference
from composer_nb.kernels.moe.routing import choose_experts
from composer_nb.kernels.triton_runtime import VARIABLE

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(
    seed: int, n: int = 24, d: int = 128, i: int = 128, e: int = 5, dtype: torch.dtype = torch.float32
) -> Inputs:
    """x [N, D], logits [N, E], w_gate_up [E, 2I, D], w_down [E, D, I], all to be learnt."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(dtype).requires_grad_()

    return normal(n, d), normal(n, e), normal(e, 2 * i, d, scale=d**-0.5), normal(e, d, i, scale=i**-0.5)


def by_hand(
    operands: Inputs, k: int, forward: Callable[..., Tensor], backward: Callable[..., Tensor], pull: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the layer's output and gradients, computed one token and one expert at a time in float64. Operands of products go
    through `forward(tensor, is_weight)` and `backward(tensor, is_weight)`."""
    x, logits, up, down = (tensor.detach() for tensor in operands)
    chosen = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    gate = logits.double().gather(1, chosen).softmax(-1)
    qx, q_up, q_down = forward(x, False), forward(up, True), forward(down, True)
    b_down, b_up = (backward(w.mT.contiguous(), True).mT for w in (down, up))
    q_pull = backward(pull, False)
    out, dx, d_up, d_down = (torch.zeros_like(t, dtype=torch.float64) for t in (x, x, up, down))
    d_gate = torch.zeros_like(gate)
    for n in range(len(x)):
        for rank, e in enumerate(chosen[n].tolist()):
            g = gate[n, rank]
            h = (q_up[e] @ qx[n]).float().double()
            a, b = h.chunk(2)
            s = a.sigmoid()
            act = a * s * b * g
            out[n] += q_down[e] @ forward(act.float()[None], False)[0]
            d = b_down[e].T @ q_pull[n]
            da, db = d * g * b * s * (1 + a * (1 - s)), d * g * a * s
            dh = torch.cat([da, db])
            dx[n] += b_up[e].T @ backward(dh.float()[None], False)[0]
            d_up[e] += torch.outer(dh, x[n].double())
            d_down[e] += torch.outer(pull[n].double(), act)
            d_gate[n, rank] = d @ (a * s * b)
    d_logits = torch.zeros_like(logits, dtype=torch.float64)
    d_logits.scatter_(1, chosen, gate * (d_gate - (gate * d_gate).sum(-1, keepdim=True)))
    return out, [dx, d_logits, d_up, d_down]


def as_is(x: Tensor, weight: bool) -> Tensor:
    return x.double()


def mx(x: Tensor, weight: bool) -> Tensor:
    return mx_quantize_reference(x).dequantize().double()


def block128(x: Tensor, weight: bool) -> Tensor:
    return mx_quantize_reference(x, block=128, rows=128 if weight else 1).dequantize().double()


def four(x: Tensor, weight: bool) -> Tensor:
    return nvfp4_quantize_reference(x).dequantize().double()


FORMATS = {"bf16": (as_is, as_is), "mxfp8": (mx, mx), "fp8_block128": (block128, block128), "nvfp4": (four, mx)}


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected).norm() / (expected.norm() + 1e-12))


def slopes(out: Tensor, operands: Inputs, pull: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * pull).sum(), operands)


@pytest.mark.parametrize("e, k, n", [(5, 2, 24), (1, 1, 3), (7, 7, 1), (40, 2, 9)])
@pytest.mark.parametrize("recipe", FORMATS)
def test_a_recipe_reads_exactly_the_numbers_that_its_formats_have(recipe: str, e: int, k: int, n: int):
    """The reference multiplies the same rounded fp32 numbers in another order. What remains is the rounding of sums and, in a few
    elements of a million, a number that a format rounds the other way."""
    operands = inputs(0, n=n, e=e)
    pull = torch.randn(operands[0].shape, generator=torch.Generator().manual_seed(1))
    expected, gradients = by_hand(operands, k, *FORMATS[recipe], pull)
    out = moe(*operands, k, recipe=recipe)
    limit = 2e-6 if recipe == "bf16" else 2e-3
    assert error(out, expected) < limit
    for name, slope, exact in zip(
        ("x", "router_logits", "w_gate_up", "w_down"), slopes(out, operands, pull), gradients, strict=True
    ):
        assert error(slope, exact) < limit, name


def test_torch_computes_every_step_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    """Of any other back end the variable would be refused here."""
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    moe(*inputs(0), 2, recipe="nvfp4", backend="torch").sum().backward()


def test_ties_go_to_the_lower_number_and_not_a_number_comes_first():
    logits = torch.tensor(
        [[1.0, 2, 2, 0], [0, 0, 0, 0], [-0.0, 0.0, -1, -2], [1, float("nan"), 3, 2], [-5, -3, -3, -4]]
    )
    assert choose_experts(logits, 3).tolist() == [[1, 2, 0], [0, 1, 2], [0, 1, 2], [1, 2, 3], [1, 2, 3]]
    random_logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose_experts(random_logits, 8), random_logits.topk(8).indices)


# -- refusals and explanations -------------------------------------------------------------------------------


def refuse(message: str, k: Any = 2, recipe: Any = "bf16", backend: str | None = None, **change: Any) -> None:
    x, logits, up, down = inputs(10, d=64, i=32)
    arguments = {"x": x, "router_logits": logits, "w_gate_up": up, "w_down": down} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        moe(*arguments.values(), k, recipe=recipe, backend=backend)


def test_bad_input_is_refused_by_name():
    x, logits, up, down = inputs(10, d=64, i=32)
    refuse("recipe='fp16': must be one of bf16, mxfp8, fp8_block128, nvfp4, nvfp4_fast, or a Recipe", recipe="fp16")
    refuse("backend='cuda': must be one of torch, triton", backend="cuda")
    for k in (6, 2.0):
        refuse(f"k={k}: must be an integer in 1..5", k=k)
    refuse("recipe='fp8_block128' has blocks: D = 64 is no multiple of 128", recipe="fp8_block128")
    for change, complaint in (
        ({"x": x.half()}, "x is torch.float16: must be"),
        ({"x": x[:0]}, "x of shape (0, 64): must be [..., D] with one token at least"),
        ({"w_gate_up": up.bfloat16()}, "w_gate_up is torch.bfloat16: must be torch.float32, as x is"),
        ({"w_gate_up": up[..., :60]}, "w_gate_up of shape (5, 64, 60): must be [E, 2I, D] with D = 64"),
        ({"w_down": down[..., :30]}, "w_down of shape (5, 64, 30): must be [E, D, I] = (5, 64, 32)"),
        ({"w_gate_up": up[:, :0], "w_down": down[..., :0]}, "must have three dimensions, none of them 0"),
        ({"router_logits": logits[:, :4]}, "router_logits of shape (24, 4): must be (24, 5)"),
        ({"router_logits": logits.long()}, "router_logits is torch.int64: must be"),
        ({"w_down": down.detach().to("meta")}, "w_down is on meta: must be on cpu, as x is"),
    ):
        refuse(complaint, **change)


@pytest.mark.parametrize(
    "capability, recipe, forward, dgrad",
    [
        ((9, 0), "mxfp8", "Hopper has no block-scaled tensor core", "Hopper has no block-scaled"),
        ((10, 0), "nvfp4", "tcgen05.mma (mxf4nvf4)", "tcgen05.mma (mxf8f6f4)"),
        ((12, 0), "mxfp8", "no gate has seen", "no gate has seen"),
    ],
)
def test_explain_tells_instructions(monkeypatch: pytest.MonkeyPatch, capability, recipe: str, forward: str, dgrad: str):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    rows = explain(recipe, device="cuda").splitlines()
    assert recipe in rows[0] and rows[1].startswith("back end:") and "triton on some GPU (sm_" in rows[1]
    assert forward in rows[2] and dgrad in rows[3]
    assert "torch on cpu" in (text := explain(device="cpu")) and "torch's grouped GEMM" in text
    for recipe, device in (("int3", "cpu"), ("bf16", "graphics"), ("bf16", "cuda:1")):
        with pytest.raises(ValueError, match="recipe='int3'" if recipe == "int3" else f"device='{device}': "):
            explain(recipe, device=device)


# -- grouped_mm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(16, 24), (10, 7)])
def test_the_grouped_product_and_its_gradients(widths: tuple[int, int]):
    g = torch.Generator().manual_seed(0)
    a = torch.randn(11, widths[0], generator=g, requires_grad=True)
    b = torch.randn(4, *widths, generator=g, requires_grad=True)
    offs = torch.tensor([3, 3, 10, 11], dtype=torch.int32)
    expected = torch.cat([a[:3] @ b[0], a[3:10] @ b[2], a[10:] @ b[3]])
    product = grouped_mm(a, b, offs)
    torch.testing.assert_close(product, expected)
    for slope, expected_slope in zip(
        torch.autograd.grad(product.sum(), (a, b)), torch.autograd.grad(expected.sum(), (a, b)), strict=True
    ):
        torch.testing.assert_close(slope, expected_slope)
