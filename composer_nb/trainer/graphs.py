"""CUDA graphs of the engine's forward pass over few tokens.

Launched one by one from Python, the kernels of such a step take longer to start than to run. A graph starts all of them at once
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). Its shapes and its memory are fixed, so each step is padded to
a power of two of tokens; the padding reads and writes a row of the cache that no rollout has.

Dimensions: N new tokens of all slots, U of them distinct.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from composer_nb.kernels.decode import NewTokens
from composer_nb.kernels.triton_runtime import choose
from composer_nb.trainer.models.transformer import Kernels, Model

# (the parts of `NewTokens`, int64 [N] or [U]) -> tensors [U, …]
Pass = Callable[..., tuple[Tensor, ...]]

CACHE_ROWS = [NewTokens._fields.index(name) for name in ("slot_U", "row_N")]
# Larger steps are launched kernel by kernel: they keep the GPU busy.
MOST_TOKENS = 256


def capturable(model: Model) -> bool:
    """Return whether no step of the model's pass waits for the GPU, as the references in torch and observers do."""
    device = model.embed.device
    kernels = model.embed.dtype != torch.float64 and model.kernels.backend != "torch" and model.watch is None
    return device.type == "cuda" and kernels and choose(device)[0] == "triton"


class Graphs:
    """Forward passes of at most `MOST_TOKENS` tokens, as graphs that are captured when they are first needed with the model's
    kernels. `spare` is a row of the cache for the padding. On a CPU the padded pass runs as it is."""

    def __init__(self, model: Model, spare: int) -> None:
        self._model, self._device, self._spare = model, model.embed.device, spare
        for layer in model.layers:  # a capture cannot wait for a copy from the host
            layer.router_bias = None if layer.router_bias is None else layer.router_bias.to(self._device)
        self._captured: dict[tuple[int, Kernels], tuple[Tensor, torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def __call__(self, run: Pass, new: NewTokens) -> tuple[Tensor, ...]:
        """Return what `run` returns for these tokens. The tensors are overwritten by the next call."""
        size = 1 << (len(new.row_N) - 1).bit_length()
        padded = self._blank(size)
        for row, part in zip(padded, new, strict=True):
            row[: len(part)] = torch.from_numpy(part)
        if self._pool is None:
            outputs = run(*padded)
        else:
            key = size, self._model.kernels
            if key not in self._captured:
                self._captured[key] = self._capture(run, size)
            inputs, graph, outputs = self._captured[key]
            inputs.copy_(padded)
            graph.replay()
        return tuple(part[: len(new.ids_U)] for part in outputs)

    def _blank(self, size: int) -> Tensor:
        """Return the parts of `NewTokens` [6, size] if all tokens are padding."""
        blank = torch.zeros(len(NewTokens._fields), size, dtype=torch.int64)
        blank[CACHE_ROWS] = self._spare
        return blank

    def _capture(self, run: Pass, size: int) -> tuple[Tensor, torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """Return the tensor for tokens, the graph, and the tensors that it fills. `run` is not kept: it holds the engine."""
        inputs = self._blank(size).to(self._device)
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run(*inputs)  # kernels are compiled, and libraries allocate, before the capture
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run(*inputs)
        return inputs, graph, outputs
