"""A model sharded over ranks: FSDP2 (`torch.distributed.fsdp.fully_shard`, arXiv 2304.11277) on separate meshes for experts and
for all other weights, and the experts dealt over ranks (expert parallelism).

A layer's weights are gathered when it is called and resharded afterwards, forward and backward; gradients are reduce-scattered.
No sum is divided (`set_gradient_divide_factor(1)`), because FSDP2's means over one mesh would not be means over the other.

Uneven all-to-alls send tokens to their experts and back:

    tokens ──K copies, by expert──▶ all-to-all ──▶ experts of this rank ──▶ all-to-all ──▶ weighted by their gates, summed

Ranks of an expert group work on different tokens, of any number, including none. Counts are sent first, so that each rank knows
how much it receives. Optionally, rows are sent to the experts as MXFP8, a quarter of float32's bytes and half of bfloat16's,
while results and gradients are sent unquantized (as in Composer 2's technical report, §6.1).

Dimensions: N tokens, D width, K experts per token, E experts, R ranks, e = E / R experts per rank, M = N · K rows sent, P
received.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composer_nb.kernels.formats.microscaling import MXTensor, mx_quantize
from composer_nb.kernels.moe.routing import Routing
from composer_nb.trainer.models.transformer import Experts, Layer, Model
from composer_nb.trainer.parallel.mesh import MeshSettings
from composer_nb.trainer.parallel.team import Team


def on_mesh(model: Model, team: Team, settings: MeshSettings) -> Model:
    """Move `model`, which is the same on all ranks, to the ranks' device, and shard it with the formats of `settings`. The shards
    of a planned model are uninitialised. See `shard`."""
    compute = torch.bfloat16 if settings.compute == "bfloat16" else None
    planned = model.embed.is_meta
    model = shard(model if planned else model.to(team.device), team, compute, quantised=settings.dispatch == "mxfp8")
    return model.to_empty(device=team.device) if planned else model


def shard(model: Model, team: Team, compute: torch.dtype | None = None, *, quantised: bool = False) -> Model:
    """Shard `model`, which is the same on all ranks, in place. With `compute` (bfloat16), layers compute in that dtype, while the
    dtype of weights and of sums of gradients does not change. `quantised`: send tokens to experts as MXFP8. Raises ValueError if
    the experts cannot be dealt evenly."""
    team.mesh.require_experts(model.config.num_experts)
    dtype = model.embed.dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=dtype if compute else None)

    def cut(module: nn.Module, mesh: Any) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy)

    for layer in model.layers:
        if not layer.dense:
            experts = DealtExperts(layer, team.experts["ep"], quantised)
            cut(experts, team.cut_experts)
            layer.experts = experts
        cut(layer, team.dense)
    cut(model, team.dense)
    register_fsdp_forward_method(model, "trunk")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


class DealtExperts(nn.Module):
    """The experts of one layer, e of them on this rank."""

    w_in: nn.Parameter
    w_out: nn.Parameter

    def __init__(self, layer: Layer, ep: DeviceMesh, quantised: bool = False) -> None:
        """Move the weights out of `layer`, in which they are the same on all ranks."""
        super().__init__()
        self.group, self.quantised = ep.get_group(), quantised
        # e, the number of experts per rank.
        self.dealt = len(layer.w_in) // ep.size()
        for name in ("w_in", "w_out"):
            weight = getattr(layer, name)
            delattr(layer, name)
            dealt = weight if ep.size() == 1 else distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(dealt.detach(), requires_grad=weight.requires_grad))

    def forward(self, x_ND: Tensor, routing: Routing, compute: Experts) -> Tensor:
        """Return the experts' output, [N, D]. `compute` does so for tokens and experts of one rank."""
        w_in, w_out = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w_in, self.w_out))
        chosen, ranks = routing.experts_NK.shape[1], dist.get_world_size(self.group)
        experts_M = routing.experts_NK.reshape(-1)
        order_M = experts_M.argsort(stable=True)
        sent_RE = torch.bincount(experts_M, minlength=ranks * len(w_in)).view(ranks, -1)
        got_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(got_RE, sent_RE, group=self.group)
        sent, got = sent_RE.sum(1).tolist(), got_RE.sum(1).tolist()
        send = _SendQuantised.apply if self.quantised else all_to_all_single_autograd
        x_P = send(x_ND.index_select(0, order_M // chosen), got, sent, self.group)
        # Received rows are sorted by rank, then by expert; here, each row is a token with one choice.
        expert_P = torch.arange(len(w_in), device=x_ND.device).repeat(ranks).repeat_interleave(got_RE.reshape(-1))
        y_P = compute(x_P, expert_P[:, None], x_P.new_ones(len(x_P), 1), w_in, w_out)
        y_M = all_to_all_single_autograd(y_P, sent, got, self.group)
        y_NKD = y_M.index_select(0, order_M.argsort()).unflatten(0, (-1, chosen)) if len(x_ND) else y_M[:, None]
        return (y_NKD * routing.gates_NK.to(x_ND.dtype)[:, :, None]).sum(1)


class _SendQuantised(torch.autograd.Function):
    """An all-to-all of rows as MXFP8. The gradient of the quantization is 1, and gradients are sent unquantized."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, got: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = sent, got, group
        small = mx_quantize(x_MD.float())
        qdata = _exchange(small.qdata.view(torch.uint8), got, sent, group).view(small.qdata.dtype)
        return MXTensor(qdata=qdata, scale=_exchange(small.scale, got, sent, group)).dequantize(x_MD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], *ctx.way), None, None, None


def _exchange(rows: Tensor, got: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(got), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), got, sent, group=group)
    return received
