"""The mixture-of-experts layer: `moe` from router logits, `experts` from given experts and gates.

One autograd function runs the steps of a back end (`plain.py`: torch, `steps_triton.py`: Triton) in the formats of a recipe. The
default, unquantized in torch, is `experts.py`, which is faster on a CPU.

    h   = x[token] · W_gate_upᵀ        [M, F]      rows sorted by expert, never copied: the product gathers them
    act = silu(h₁) · h₂ · gate         [M, I]
    y   = Σ over a token's choices of act · W_downᵀ    [N, D]

The gate is applied before the second product. So its gradient is an inner product of tensors that the backward pass has anyway,
and the rows of y need not be kept (SonicMoE, arXiv 2512.14080).

Dimensions: N tokens, D model width, E experts, K experts per token, M = N · K, I expert width, F = 2I.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.moe.experts import grouped_experts
from composer_nb.kernels.moe.plain import DispatchPlan, PlainSteps
from composer_nb.kernels.moe.recipes import Recipe, architecture, as_recipe
from composer_nb.kernels.triton_runtime import BackendName, choose

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LOGITS = (torch.float16, *DTYPES)


def moe(
    x: Tensor,
    router_logits: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    k: int,
    recipe: str | Recipe = "bf16",
    backend: str | None = None,
) -> Tensor:
    """Return [..., D] in the dtype of x: the outputs of the k experts with the largest logits, weighted by a softmax over these.

    The arguments are x [..., D], router_logits [..., E], w_gate_up [E, 2I, D] (gate above up) and w_down [E, D, I], the shapes of
    the experts in `transformers`. Of equal logits, the one with the lower index is chosen. All four have gradients. `recipe`: see
    `recipes.py`; `backend`: see `triton_runtime.choose`; `explain` describes their effect.

    Raises ValueError, which names the argument, for shapes, dtypes or devices that do not fit, widths that a format's blocks do
    not divide, an unknown recipe or back end, and an unsupported GPU.
    """
    formats = as_recipe(recipe)
    backend_name = _backend(x, backend)
    _check(x, router_logits, w_gate_up, w_down, k)
    x_ND, logits_NE = x.flatten(0, -2), router_logits.flatten(0, -2)
    experts_NK = _steps(backend_name, x.device).choose(logits_NE.detach(), k)
    float_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    gates_NK = float_NE.gather(1, experts_NK).softmax(-1)
    out_ND = experts(x_ND, experts_NK, gates_NK, w_gate_up, w_down, recipe=formats, backend=backend_name)
    return out_ND.view(x.shape)


def experts(
    x_ND: Tensor,
    experts_NK: Tensor,
    gates_NK: Tensor,
    w_up_EFD: Tensor,
    w_down_EDI: Tensor,
    *,
    recipe: str | Recipe = "bf16",
    backend: str | None = None,
) -> Tensor:
    """Return [N, D] in the dtype of `x_ND`, for given experts [N, K] (int64) and gates [N, K]. Raises ValueError as `moe`."""
    formats = as_recipe(recipe)
    backend_name = _backend(x_ND, backend)
    _check_widths(w_up_EFD, w_down_EDI, formats)
    if backend_name == "torch" and formats.forward is None and formats.dgrad is None:
        return grouped_experts(x_ND, experts_NK, gates_NK, w_up_EFD.transpose(1, 2), w_down_EDI.transpose(1, 2))
    if not len(x_ND):  # a rank without tokens: no kernel runs, and all gradients are zeros
        return x_ND + 0 * (gates_NK.sum() + w_up_EFD.sum() + w_down_EDI.sum())
    steps = _steps(backend_name, x_ND.device)
    return _Experts.apply(x_ND.contiguous(), gates_NK, w_up_EFD, w_down_EDI, experts_NK, formats, steps)


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor, backend: str | None = None) -> Tensor:
    """Return [M, B] in the dtype of a: rows of a [M, A] up to offs[0] times b[0], the next up to offs[1] times b[1], and so on.

    b [E, A, B] has the dtype of a. offs, int32 [E], are the ends of the groups, and the last is M; a group may be empty. a and b
    have gradients. This is torch's `grouped_mm` for every back end and all widths. Raises ValueError, which names the argument
    that does not fit. The values of offs are checked on a CPU only, to avoid a wait for the GPU.
    """
    shapes_fit = a.dim() == 2 and b.dim() == 3 and a.shape[1] == b.shape[1]
    _require(shapes_fit, f"a {tuple(a.shape)} and b {tuple(b.shape)}: must be [M, A] and [E, A, B]")
    dtypes_fit = a.dtype in DTYPES and b.dtype == a.dtype
    _require(dtypes_fit, f"a is {a.dtype} and b is {b.dtype}: must be alike, float32, bfloat16 or float64")
    ends_fit = offs.shape == b.shape[:1] and offs.dtype == torch.int32 and len(offs) > 0
    _require(ends_fit, f"offs is {offs.dtype} {tuple(offs.shape)}: must be int32 [{len(b)}], the end of each group")
    ends = [0, *offs.tolist()] if offs.device.type == "cpu" else [0, len(a)]
    is_rising = ends == sorted(ends) and ends[-1] == len(a)
    _require(is_rising, f"offs {ends[1:]}: must not fall, and end at M = {len(a)}")
    devices = a.device, b.device, offs.device
    _require(len(set(devices)) == 1, "a is on {}, b on {}, offs on {}: must be on one device".format(*devices))
    backend_name = _backend(a, backend)
    return _GroupedMm.apply(a.contiguous(), b, offs, _steps(backend_name, a.device))


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_MA: Tensor, b_EAB: Tensor, ends_E: Tensor, steps: PlainSteps) -> Tensor:
        ctx.save_for_backward(a_MA, b_EAB, ends_E)
        ctx.steps = steps
        return steps.product(a_MA, b_EAB.mT, _of_rows(a_MA, ends_E), gather=False, dtype=a_MA.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a_MA, b_EAB, ends_E = ctx.saved_tensors
        plan, g_MB = _of_rows(a_MA, ends_E), gradients[0].contiguous()
        da_MA = ctx.steps.product(g_MB, b_EAB, plan, gather=False, dtype=a_MA.dtype)
        db_EAB = ctx.steps.outer(a_MA, g_MB, plan, gather_g=False, gather_x=False, like=b_EAB)
        return da_MA, db_EAB, None, None


def _of_rows(a_MA: Tensor, ends_E: Tensor) -> DispatchPlan:
    """Return a plan for sorted rows: each is its own token."""
    row_M = torch.arange(len(a_MA), dtype=torch.int32, device=a_MA.device)
    return DispatchPlan(ends_E, row_M, row_M, row_M[:, None])


def _backend(x: Tensor, backend: str | None) -> BackendName:
    """Return the back end from `choose`, or torch for float64, which only references need."""
    name, _ = choose(x.device, backend, "experts")
    if name == "triton" and x.dtype == torch.float64:
        if backend == "triton":
            raise ValueError("backend='triton': its kernels are for float32 and bfloat16, and x is torch.float64")
        return "torch"
    return name


def _steps(name: BackendName, device: torch.device) -> PlainSteps:
    if name == "torch":
        return PlainSteps()
    from composer_nb.kernels.moe.steps_triton import TritonSteps

    return TritonSteps(architecture(device))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        gates_NK: Tensor,
        w_up_EFD: Tensor,
        w_down_EDI: Tensor,
        experts_NK: Tensor,
        recipe: Recipe,
        steps: PlainSteps,
    ) -> Tensor:
        plan = steps.plan(experts_NK, len(w_up_EFD))
        gate_M = gates_NK.detach().reshape(-1)[plan.slot_M]
        x, dtype = steps.rows(x_ND, recipe.forward), x_ND.dtype
        h_MF = steps.product(x, steps.weights(w_up_EFD, recipe.forward), plan, gather=True, dtype=dtype)
        act = steps.swiglu(h_MF, gate_M, recipe.forward)
        y_MD = steps.product(act, steps.weights(w_down_EDI, recipe.forward), plan, gather=False, dtype=dtype)
        ctx.recipe, ctx.steps = recipe, steps
        parts = plan.ends_E, plan.token_M, plan.slot_M, plan.row_NK
        ctx.save_for_backward(x_ND, gate_M, w_up_EFD, w_down_EDI, h_MF, *parts)
        return steps.combine(y_MD, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_M, w_up_EFD, w_down_EDI, h_MF, *parts = ctx.saved_tensors
        steps, dgrad, plan, dy_ND = ctx.steps, ctx.recipe.dgrad, DispatchPlan(*parts), gradients[0].contiguous()
        dtype = x_ND.dtype
        dy, w = steps.rows(dy_ND, dgrad), steps.weights(w_down_EDI.transpose(1, 2), dgrad)
        d_MI = steps.product(dy, w, plan, gather=True, dtype=dtype)
        dh_MF, dh, act_MI, dgate_M = steps.swiglu_backward(d_MI, h_MF, gate_M, dgrad)
        dw_down = steps.outer(dy_ND, act_MI, plan, gather_g=True, gather_x=False, like=w_down_EDI)
        dw_up = steps.outer(dh_MF, x_ND, plan, gather_g=False, gather_x=True, like=w_up_EFD)
        dx_MD = steps.product(dh, steps.weights(w_up_EFD.transpose(1, 2), dgrad), plan, gather=False, dtype=dtype)
        return steps.combine(dx_MD, plan), dgate_M[plan.row_NK], dw_up, dw_down, None, None, None


def _require(fits: bool, message: str) -> None:
    if not fits:
        raise ValueError(message)


def _check(x: Tensor, logits: Tensor, w_gate_up: Tensor, w_down: Tensor, k: int) -> None:
    """Raise ValueError, which names the argument, if one does not fit."""
    _require(x.dtype in DTYPES, f"x is {x.dtype}: must be float32, bfloat16 or float64")
    weights = {"w_gate_up": w_gate_up, "w_down": w_down}
    for name, tensor in weights.items():
        _require(tensor.dtype == x.dtype, f"{name} is {tensor.dtype}: must be {x.dtype}, as x is")
        shape = f"{name} of shape {tuple(tensor.shape)}"
        _require(tensor.dim() == 3 and tensor.numel() > 0, f"{shape}: must have three dimensions, none of them 0")
    for name, tensor in {"router_logits": logits, **weights}.items():
        _require(tensor.device == x.device, f"{name} is on {tensor.device}: must be on {x.device}, as x is")
    _require(logits.dtype in LOGITS, f"router_logits is {logits.dtype}: must be float16, bfloat16, float32 or float64")
    shape = f"x of shape {tuple(x.shape)}"
    _require(x.dim() >= 2 and x.numel() > 0, f"{shape}: must be [..., D] with one token at least")
    (count, double, width), up_shape = w_gate_up.shape, tuple(w_gate_up.shape)
    requirement = f"must be [E, 2I, D] with D = {x.shape[-1]}, that of x"
    _require(width == x.shape[-1], f"w_gate_up of shape {up_shape}: {requirement}")
    down = (count, width, double // 2)
    requirement = f"must be [E, D, I] = {down}, as w_gate_up [E, 2I, D] is {up_shape}"
    _require(not double % 2 and w_down.shape == down, f"w_down of shape {tuple(w_down.shape)}: {requirement}")
    scores = (*x.shape[:-1], count)
    shape = f"router_logits of shape {tuple(logits.shape)}"
    _require(logits.shape == scores, f"{shape}: must be {scores}, E for each token")
    whole = isinstance(k, int) and not isinstance(k, bool)
    _require(whole and 1 <= k <= count, f"k={k!r}: must be an integer in 1..{count}, the number of experts")


def _check_widths(w_up_EFD: Tensor, w_down_EDI: Tensor, recipe: Recipe) -> None:
    """Raise ValueError unless the blocks of the formats divide the widths of the sums."""
    for name, width in (("D", w_up_EFD.shape[2]), ("I", w_down_EDI.shape[2])):
        if width % recipe.multiple:
            raise ValueError(f"recipe={recipe.name!r} has blocks: {name} = {width} is no multiple of {recipe.multiple}")
    if recipe.multiple > 1 and w_up_EFD.dtype == torch.float64:
        raise ValueError(f"recipe={recipe.name!r} is of float32 and bfloat16: w_gate_up is torch.float64")
