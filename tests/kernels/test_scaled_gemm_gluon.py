from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import gluon_on_cpu
import numpy as np
import pytest
import torch
from gluon_on_cpu import Barrier, Descriptor, Grid, Pointer

pytest.importorskip("triton", reason="no Triton here; it has wheels for Linux")

from composer_nb.kernels import scaled_gemm_gluon as gluon_gemm
from composer_nb.kernels.formats import MXTensor
from composer_nb.kernels.plain import PlainSteps, Plan
from composer_nb.kernels.recipes import quantise_rows, quantise_weights
from composer_nb.kernels.triton_runtime import interpreting

E, N, K = 5, 192, 384
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def operands(rows: list[int], device: str = "cpu") -> tuple[MXTensor, MXTensor, Plan]:
    """Of very different sizes, sorted by expert."""
    noise = torch.Generator().manual_seed(sum(rows))
    x = torch.randn(sum(rows), K, generator=noise) * torch.logspace(-3, 3, sum(rows))[:, None]
    w = torch.randn(len(rows), N, K, generator=noise)
    w[1, :128, :128] *= 1e3
    ends = torch.tensor(rows).cumsum(0).to(torch.int32).to(device)
    order = torch.arange(sum(rows), dtype=torch.int32, device=device)
    qx, qw = quantise_rows(x.to(device), "fp8_block128"), quantise_weights(w.to(device), "fp8_block128")
    assert isinstance(qx, MXTensor) and isinstance(qw, MXTensor)
    return qx, qw, Plan(ends_E=ends, token_M=order, slot_M=order, row_NK=order[:, None])


def on_cpu(x: MXTensor, w: MXTensor, plan: Plan, programs: int, slots: int, module: Any = gluon_gemm) -> torch.Tensor:
    rows = len(x.qdata)
    made = np.full((rows + 64, N), np.nan, np.float32)
    a, b = (t.qdata.view(torch.uint8).flatten(0, -2).numpy() for t in (x, w))
    Grid(programs, seed=programs + slots).run(
        module,
        "specialised_product_kernel",
        Descriptor(a, (64, 128)),
        Descriptor(b, (128, 128)),
        *(Pointer(t.flatten().numpy()) for t in (x.scale, w.scale)),
        Pointer(made.reshape(-1)),
        Pointer(plan.ends_E.numpy()),
        E=E, N=N, K=K, BM=64, BN=128, SLOTS=slots,
    )  # fmt: skip
    assert np.isnan(made[rows:]).all(), "it wrote behind the last row"
    return torch.from_numpy(made[:rows])


def wanted(x: MXTensor, w: MXTensor, plan: Plan) -> torch.Tensor:
    numbers = (t.dequantize(torch.float64) for t in (x, w))
    return PlainSteps().product(*numbers, plan, gather=False, dtype=torch.float64).float()


@pytest.mark.parametrize(("programs", "slots"), [(1, 2), (3, 6)])
@pytest.mark.parametrize("rows", [[130, 0, 64, 1, 20], [0, 0, 0, 0, 300]])
def test_the_product(rows: list[int], programs: int, slots: int):
    x, w, plan = operands(rows)
    torch.testing.assert_close(on_cpu(x, w, plan, programs, slots), wanted(x, w, plan), rtol=1e-5, atol=1e-3)


def test_a_row_does_not_depend_on_what_is_beside_it():
    x, w, plan = operands([130, 0, 64, 1, 20])
    alone = replace(x, qdata=x.qdata[130:194], scale=x.scale[130:194])
    only = replace(plan, ends_E=torch.tensor([0, 0, 64, 64, 64], dtype=torch.int32))
    assert torch.equal(on_cpu(x, w, plan, 2, 3)[130:194], on_cpu(alone, w, only, 1, 3))


@pytest.mark.parametrize(
    ("fault", "instead"),
    [
        ("((step // SLOTS) & 1) ^ 1", "(step // SLOTS) & 1"),
        ("(2 * BM + BN) * 128", "BM * 128"),
        ("init(empty.index(slot), count=2)", "init(empty.index(slot), count=1)"),
        ("xs.index(2 * slot + half)", "xs.index(2 * slot)"),
        ("n0 // 128) * STEPS", "0) * STEPS"),
        ("mask=row < last", "mask=row < 0"),
    ],
)
def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, instead: str):
    """Phases, promised bytes, a slot given back too early, halves, scales: a wait without an end, or other numbers."""
    text = Path(gluon_gemm.__file__).read_text()
    assert fault in text
    (tmp_path / "faulty.py").write_text(text.replace(fault, instead))
    spec = importlib.util.spec_from_file_location("faulty", tmp_path / "faulty.py")
    assert spec is not None and spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 1.0)
    x, w, plan = operands([130, 0, 64, 1, 20])
    try:
        made = on_cpu(x, w, plan, 1, 2, faulty)
    except AssertionError as error:
        assert "waits for ever" in str(error) or "arrived more often" in str(error)
    else:
        assert not torch.allclose(made, wanted(x, w, plan), rtol=1e-3, atol=1e-2)


def test_a_barrier_is_passed_when_all_have_arrived_and_all_bytes_have_come():
    barrier = Barrier()
    barrier.init(1)
    barrier.wait(1)  # the phase before the first
    barrier.arrive(promised=8)
    assert barrier.phase == 0
    barrier.arrive(0, come=8)
    barrier.wait(0)
    assert barrier.phase == 1


def test_other_blocks_and_other_devices_are_refused():
    x, w, plan = operands([1, 0, 0, 0, 3])
    with pytest.raises(ValueError, match=r"blocks of 1 × 128 and of w|and w of 1 × 128: must be"):
        gluon_gemm.specialised_product(x, x, plan, dtype=torch.float32)
    with pytest.raises(ValueError, match="must be on a Hopper GPU"):
        gluon_gemm.specialised_product(x, w, plan, dtype=torch.float32)
    narrow = replace(x, qdata=x.qdata[:, :256].contiguous(), scale=x.scale[:, :2].contiguous())
    with pytest.raises(ValueError, match="x has K = 256 and w 384: must be one, and a multiple of 128"):
        gluon_gemm.specialised_product(narrow, w, plan, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9; the tests above are its twin")
@pytest.mark.skipif(interpreting(), reason="needs TRITON_INTERPRET=0: what is compiled is tested")
@pytest.mark.parametrize("rows", [[130, 0, 640, 1, 200], [0, 0, 0, 0, 0], [4000, 1, 0, 0, 20_000]])
def test_the_product_on_a_gpu(rows: list[int]):
    """The tensor cores keep some 14 bits of a sum, so an element is as exact as the sum of its products' sizes is."""
    x, w, plan = operands(rows, "cuda")
    found = gluon_gemm.specialised_product(x, w, plan, dtype=torch.float32)
    sizes = wanted(
        *(replace(t, qdata=t.qdata.view(torch.uint8).bitwise_and(127).view(t.qdata.dtype)) for t in (x, w)), plan
    )
    assert found.shape == sizes.shape
    assert bool(((found - wanted(x, w, plan)).abs() <= 2**-9 * sizes).all())
