"""Imports flow one way, and the harness runs without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "composer_nb"
BLOCK = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
names = [
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    if not module.name.endswith(SKIPPED)
]
for name in names:
    importlib.import_module(name)
assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}
print(len(names))
"""


def import_all(packages: list[str], blocked: set[str], skipped: tuple[str, ...] = ()) -> int:
    """Imports every module of `packages`, but for those with names that end in `skipped`, in a process of its own, in which
    `blocked` can not be imported; how many."""
    program = f"PACKAGES, BLOCKED, SKIPPED = {packages!r}, {blocked!r}, {skipped!r}\n{BLOCK}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_the_harness_imports_without_torch() -> None:
    blocked = {"torch", "transformers", "ray", "numba", "triton", "matplotlib", "IPython"}
    count = import_all([f"{PACKAGE}.harness"], blocked)
    assert count == len(list((ROOT / PACKAGE / "harness").rglob("*.py"))) - 1  # its own __init__


def test_what_learns_imports_without_ray_and_triton() -> None:
    """Kernels in Triton and Gluon aside, which nothing imports before one is to run."""
    blocked = {"ray", "transformers", "matplotlib", "IPython", "triton"}
    import_all([f"{PACKAGE}.kernels", f"{PACKAGE}.trainer"], blocked, ("_triton", "_gluon", ".triton_steps"))


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    }


def imported(name: str, path: Path, known: set[str], *, at_import: bool = False) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in the file; with `at_import` only outside of functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        child for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda) for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if at_import and node in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: a relative import"
            source = node.module or ""
            if source.split(".")[0] == PACKAGE:
                deeper = [f"{source}.{alias.name}" for alias in node.names]
                yield from (each if each in known else source for each in deeper)


ALLOWED = {
    # What may be imported by whom: itself, and what is named here.
    "kernels": set(),
    "harness": set(),
    "trainer": {"kernels", "harness", "config", "machine"},
    "machine": set(),
    "config": {"kernels", "harness", "trainer"},
    "views": {"kernels", "harness", "trainer", "config"},
}
"""Of the modules at the top (jobs, the command line and the like) nothing below may import any but `config` and `machine`."""


def part(module: str) -> str:
    """`trainer` of composer_nb.trainer.model; empty for the package itself."""
    return [*module.split("."), ""][1]


def test_imports_flow_one_way() -> None:
    known = modules()
    assert {part(name) for name in known} >= set(ALLOWED)
    wrong = [
        f"{name} imports {target}"
        for name, path in known.items()
        for target in imported(name, path, set(known))
        if part(name) in ALLOWED and part(target) not in ALLOWED[part(name)] | {part(name), ""}
    ]
    assert not wrong


def test_every_import_exists_and_none_goes_round() -> None:
    known = modules()
    graph = {name: set(imported(name, path, set(known), at_import=True)) for name, path in known.items()}
    assert not {target for targets in graph.values() for target in targets} - set(known)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert len(order) == len(known)


def test_settings_are_below_what_runs_with_them() -> None:
    """`config` may import only what defines settings, so that a stage can import it."""
    known = modules()
    targets = set(imported("config", known[f"{PACKAGE}.config"], set(known)))
    assert not any(f"{PACKAGE}.config" in set(imported(name, known[name], set(known))) for name in targets)
