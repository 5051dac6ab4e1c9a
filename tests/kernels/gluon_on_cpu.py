"""Runs Gluon kernels for Hopper on a CPU: their own source, with threads for groups of warps, and NumPy arrays for registers and
shared memory. Float8 are bytes here.

What it shows: indices, masks, phases of barriers (a wait that would never end is an error), and that nothing is read from
shared memory before it has come, or overwritten while a product still reads it: copies arrive late, and an asynchronous product
reads its operands when it is waited for. What it does not: layouts, the order of memory between threads, speed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

PATIENCE = 20.0
"""Seconds that a wait may take: much longer than anything here does."""


class Value:
    """What is in registers: a scalar or a tensor."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        return Value(self.array.view(dtype) if bitcast else self.array.astype(dtype))

    def __getitem__(self, key: Any) -> Value:
        return Value(self.array[key])

    def __index__(self) -> int:
        return int(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)


def raw(x: Any) -> Any:
    return x.array if isinstance(x, Value) else x


def _operator(name: str) -> Callable[..., Any]:
    def act(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        found = getattr(self.array, name)(
            np.asarray(raw(other), self.array.dtype) if isinstance(other, int) else raw(other)
        )
        return found if found is NotImplemented else Value(found)

    return act


for _name in "add sub mul floordiv mod and or xor lshift rshift lt le gt ge eq ne".split():
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
    if _name not in "lt le gt ge eq ne".split():
        setattr(Value, f"__r{_name}__", _operator(f"__r{_name}__"))


class Pointer:
    def __init__(self, memory: np.ndarray[Any, Any], at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + raw(other))


class Descriptor:
    """Of a matrix, for copies of blocks."""

    def __init__(self, matrix: np.ndarray[Any, Any], block: tuple[int, int]) -> None:
        self.matrix, self.block, self.dtype, self.layout = matrix, block, matrix.dtype, None

    def read(self, row: int, column: int) -> np.ndarray[Any, Any]:
        """Zeros beyond the matrix."""
        out = np.zeros(self.block, self.matrix.dtype)
        found = self.matrix[row : row + self.block[0], column : column + self.block[1]]
        out[: found.shape[0], : found.shape[1]] = found
        return out


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.phase = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int = 1, promised: int = 0, come: int = 0) -> None:
        with self.changed:
            self.missing -= count
            self.bytes += promised - come
            assert self.missing >= 0, "arrived more often than was agreed"
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """For the phase of that parity: the one that runs is another, or was when it was waited for."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE), "waits for ever"


class Shared:
    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays

    def index(self, at: Any) -> Any:
        return self.arrays[int(at)]


class Tile:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def permute(self, order: tuple[int, ...]) -> Tile:
        return Tile(self.array.transpose(order))


class Grid:
    """`run` runs a kernel with so many programs, one after another."""

    def __init__(self, programs: int, seed: int = 0) -> None:
        self.programs, self.random = programs, random.Random(seed)
        self.program = 0
        self.failed: list[BaseException] = []

    def run(self, module: Any, kernel: str, *arguments: Any, **constants: Any) -> None:
        functions = self._functions(module)
        for program in range(self.programs):
            self.program = program
            functions[kernel](*arguments, **constants)
            if self.failed:
                raise self.failed[0]

    def _functions(self, module: Any) -> dict[str, Any]:
        """Of a module, each on the names that are here."""
        names: dict[str, Any] = {
            "gl": self._language(),
            "mbarrier": self._barriers(),
            "tma": SimpleNamespace(async_copy_global_to_shared=self._copy),
            "warpgroup_mma": lambda x, w, acc, use_acc, is_async: lambda: self._product(x, w, raw(acc) * use_acc),
            "warpgroup_mma_wait": lambda outstanding, deps: deps[0](),
            "range": lambda *ends: (Value(np.int32(i)) for i in range(*map(int, ends))),
        }
        for name, each in vars(module).items():
            if hasattr(each, "is_gluon"):
                code = each.fn.__code__
                names[name] = FunctionType(code, names, name)
        return names

    def _language(self) -> Any:
        layout = lambda *_, **__: None  # noqa: E731
        return SimpleNamespace(
            constexpr=None, int32=np.int32, int64=np.int64, float32=np.float32,
            program_id=lambda axis: Value(np.int32(self.program)),
            num_programs=lambda axis: Value(np.int32(self.programs)),
            arange=lambda begin, end, layout: Value(np.arange(begin, end, dtype=np.int32)),
            zeros=lambda shape, dtype, layout: Value(np.zeros(shape, dtype)),
            where=lambda mask, a, b: Value(np.where(raw(mask), raw(a), raw(b)).astype(np.int32)),
            static_range=range, load=self._load, store=self._store, convert_layout=lambda x, layout: x,
            allocate_shared_memory=self._allocate, warp_specialize=self._specialise,
            SliceLayout=layout, BlockedLayout=layout, NVMMADistributedLayout=layout,
        )  # fmt: skip

    def _barriers(self) -> Any:
        return SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, parity: barrier.wait(int(parity)),
            expect=lambda barrier, promised: barrier.arrive(promised=promised),
            arrive=lambda barrier, count: barrier.arrive(count),
        )

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        if layout == "barriers":
            return Shared([Barrier() for _ in range(shape[0])])
        return Shared([Tile(part) for part in np.full(shape, 0x7F, dtype)])  # NaN of float8

    def _load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Value:
        at = np.where(raw(mask), pointer.at, 0)
        return Value(np.where(raw(mask), pointer.memory[at], np.asarray(other, pointer.memory.dtype)))

    def _store(self, pointer: Pointer, value: Value, mask: Value) -> None:
        at, value, mask = np.broadcast_arrays(pointer.at, raw(value), raw(mask))  # type: ignore[assignment]
        pointer.memory[at[mask]] = value[mask]  # type: ignore[index]

    def _copy(self, source: Descriptor, at: list[Any], barrier: Barrier, target: Tile) -> None:
        row, column, delay = int(at[0]), int(at[1]), self.random.random() * 2e-3

        def come() -> None:
            time.sleep(delay)
            target.array[:] = source.read(row, column)
            barrier.arrive(0, come=target.array.nbytes)

        threading.Thread(target=self._watched(come), daemon=True).start()

    def _product(self, x: Tile, w: Tile, acc: Any) -> Value:
        time.sleep(self.random.random() * 2e-3)
        return Value(acc + of_float8(x.array) @ of_float8(w.array))

    def _specialise(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        threads = [threading.Thread(target=self._watched(act), args=arguments, daemon=True) for act, arguments in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _watched(self, act: Callable[..., None]) -> Callable[..., None]:
        def watched(*arguments: Any) -> None:
            try:
                act(*arguments)
            except BaseException as error:  # told to whoever started the kernel
                self.failed.append(error)

        return watched


def of_float8(byte: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.from_numpy(byte.copy()).view(torch.float8_e4m3fn).float().numpy()
