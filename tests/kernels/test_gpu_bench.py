"""What the GPU bench says about what it measured, and its whole flow on a CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from composer_nb.kernels.moe.plain import DispatchPlan
from composer_nb.kernels.triton_runtime import triton_version
from scripts.bench.gpu_bench_tools import Case, Found, Target, as_json, route_logits, run_case, table

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_routes_are_as_popular_as_they_are_called():
    tokens, experts, k = 20_000, 8, 2
    for kind in ("uniform", "zipf"):
        first = route_logits(kind, tokens, experts, "cpu").topk(k, dim=-1).indices
        assert (first[:, 0] != first[:, 1]).all()
        share = torch.bincount(first[:, 0], minlength=experts).double() / tokens
        weight = torch.ones(experts) if kind == "uniform" else 1 / torch.arange(1, experts + 1)
        wanted = (weight / weight.sum()).double().sort(descending=True).values
        torch.testing.assert_close(share.sort(descending=True).values, wanted, atol=0.012, rtol=0)
    assert torch.equal(route_logits("zipf", 5, 4, "cpu", seed=3), route_logits("zipf", 5, 4, "cpu", seed=3))


@pytest.mark.parametrize(
    "value, said",
    [(0.99, "below the floor"), (1.0, "floor met"), (1.2, "target met"), (1.59, "target met"), (1.6, "stretch met")],
)
def test_targets(value: float, said: str):
    assert Target(1.0, 1.2, 1.6).verdict(value) == said


def test_peers_blocks_lie_as_torch_wants_them(monkeypatch: pytest.MonkeyPatch):
    """Its check of shapes and strides is that of a GPU; no number is computed."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    import gpu_peers

    own, sizes = torch.nn.functional.scaled_mm, list[int]()

    def checked(*given: object, **more: object) -> torch.Tensor:
        outlines = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") if isinstance(t, torch.Tensor) else t
            for t in given
        ]
        sizes.append(len(outlines[0]))  # type: ignore[arg-type]
        return own(*outlines, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", checked)
    rows = torch.arange(200, dtype=torch.int32)
    plan = DispatchPlan(torch.tensor([72, 72, 200], dtype=torch.int32), rows, rows, rows[:, None])
    x, w = torch.ones(200, 640, dtype=torch.bfloat16), torch.ones(3, 256, 640, dtype=torch.bfloat16)
    assert gpu_peers.blockwise_products(x, w, plan)().shape == (200, 256)
    assert sizes == [72, 128]
    with pytest.raises(RuntimeError, match="scale a must have shape"):
        kinds = torch.nn.functional.ScalingType.BlockWise1x128, torch.nn.functional.ScalingType.BlockWise128x128
        fp8 = torch.float8_e4m3fn
        checked(x.to(fp8), w[0].T.to(fp8), torch.ones(200, 5), kinds[0], torch.ones(2, 8).T, kinds[1])


def found(**named: object) -> Found:
    case = Case(
        number="4", title="layer", shape="S1", forms={}, work=6e9, unit="TFLOP/s", goals={"torch": Target(1.3, 1.6, 2.0)}
    )  # fmt: skip
    return Found(case=case, times={"ours": [2.0, 1.0, 9.0], "torch": [3.0, 4.0, 3.0]}, holes={"liger": "not installed"})


def test_medians_rates_and_ratios():
    one = found()
    assert one.median("ours") == 2.0 and one.ratio("torch") == 1.5 and one.ratio("liger") is None
    assert one.rate("ours") == pytest.approx(3.0) and one.rate("torch") == pytest.approx(2.0)
    assert one.value("torch", {}) == 1.5 and one.value("TFLOP/s", {}) == pytest.approx(3.0)
    copies = Case(
        number="8", title="q", shape="", forms={}, work=4e9, unit="GB/s", goals={"copy": Target(0.7, 0.8, 0.9)}
    )
    share = Found(case=copies, times={"ours": [2.0]})
    assert share.value("copy", {"copy": 4000.0}) == pytest.approx(0.5) and share.value("copy", {}) is None
    assert Found(case=copies).value("copy", {"copy": 4000.0}) is None


def test_the_table_shows_ours_first_holes_with_reasons_and_verdicts():
    text = table([found(), Found(case=found().case, holes={"ours": "not built"})], {})
    lines = text.splitlines()
    assert len(lines) == 6 and all(line.count("|") == lines[0].count("|") for line in lines)
    assert lines[2].startswith("| 4 | layer | S1 | ours | 2.000 | 3 TFLOP/s |")
    assert "1.3 / 1.6 / 2 over torch: 1.50, floor met" in lines[2]
    assert "| torch | 3.000 | 2 TFLOP/s | 1.50 |" in lines[3] + lines[4]
    assert "| liger | hole: not installed |" in text and "| ours | hole: not built |" in lines[5]
    saved = json.loads(json.dumps(as_json(found(), {})))
    assert (
        saved["median_ms"]["ours"] == 2.0
        and saved["goals"]["torch"] == {"levels": [1.3, 1.6, 2.0], "value": 1.5}
        and saved["holes"] == {"liger": "not installed"}
    )


def test_forms_take_turns_and_one_that_fails_is_a_hole():
    order: list[str] = []

    def form(name: str, value: float):
        def run() -> torch.Tensor:
            order.append(name)
            return torch.full((4,), value)

        return run

    def broken() -> None:
        raise RuntimeError("no kernel image\nand more")

    case = Case(
        number="1", title="", shape="", forms={"ours": form("a", 1.1), "b": form("b", 1.0), "c": broken, "d": "missing"}
    )
    result = run_case(case, CPU, seconds=10, rounds=3)
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"], "twice to warm up, then in turns"
    assert result.holes == {"c": "RuntimeError: no kernel image", "d": "missing"}
    assert result.errors["ours"] == pytest.approx(0.1, rel=1e-5) and result.errors["b"] == 0
    assert {name: len(times) for name, times in result.times.items()} == {"ours": 3, "b": 3}
    late = run_case(case, CPU, seconds=0, rounds=30, least=2)
    assert len(late.times["ours"]) == 2, "out of time"
    other = Case(number="1", title="", shape="", forms={"ours": form("a", 1), "b": lambda: torch.ones(5)})
    assert math.isnan(run_case(other, CPU, seconds=0, rounds=1).errors["ours"]), "of another shape"


def run(*arguments: str, script: str = "bench_gpu.py") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "scripts" / "bench" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 2 and "no CUDA device here" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow  # two to three minutes in the interpreter
@pytest.mark.skipif(triton_version() is None, reason="no Triton here; it has wheels for Linux")
def test_the_whole_flow_on_a_cpu_is_labelled_a_rehearsal(tmp_path: Path):
    done = run("--device", "cpu", "--seconds", "600", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report, text = json.loads((tmp_path / "bench_gpu.json").read_text()), (tmp_path / "bench_gpu.md").read_text()
    assert report["rehearsal"] and "REHEARSAL" in text and report["machine"]["gpu"] == "none"
    rows = {case["number"] for case in report["cases"]}
    assert rows >= {"0", "1", "2", "3", "4 to 7", "8", "9", "10", "11", "12", "13", "14", "15", "16"}
    for case in report["cases"]:
        assert "ours" in case["ms"] or case["holes"]["ours"] == "needs a Hopper GPU", case
        for name, error in case["errors"].items():
            assert error < (0.3 if "nvfp4" in case["title"] else 0.1), (case["title"], name)


@pytest.mark.slow  # half a minute in the interpreter
@pytest.mark.skipif(triton_version() is None, reason="no Triton here; it has wheels for Linux")
def test_the_bench_of_whole_models_compares_the_same_model(tmp_path: Path):
    done = run("--device", "cpu", "--out", str(tmp_path / "model.md"), script="bench_gpu_model.py")
    text = (tmp_path / "model.md").read_text()
    assert done.returncode == 0 and "hole" not in text, done.stderr
    losses = [
        line.split("|")[-2] for line in text.splitlines() if line.startswith(("| ours, bf16", "| transformers, g"))
    ]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-3), "forward passes with the same weights"
    rows = [line.split("|") for line in text.splitlines() if "random" in line]
    assert len(rows) == 2 and all(0 < float(row[6]) < 1 for row in rows), "floors of the mismatch"
