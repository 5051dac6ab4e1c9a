"""Imports flow one way, and the harness runs without torch."""

import ast
import itertools
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
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


def test_the_harness_imports_without_torch() -> None:
    blocked = {"torch", "transformers", "ray", "numba", "triton", "matplotlib", "IPython"}
    count = import_all([f"{PACKAGE}.harness"], blocked)
    assert count == len(list((ROOT / PACKAGE / "harness").rglob("*.py"))) - 1  # its own __init__


def test_what_learns_imports_without_ray_and_triton() -> None:
    """Except kernels in Triton, which are imported only when one runs."""
    blocked = {"ray", "transformers", "matplotlib", "IPython", "triton"}
    import_all([f"{PACKAGE}.kernels", f"{PACKAGE}.trainer"], blocked, ("_triton",))


def test_a_run_without_a_mesh_does_not_import_what_meshes_need() -> None:
    """PyTorch's sharding imports SymPy: with it, each process of a run would start three seconds later."""
    import_all([f"{PACKAGE}.trainer.recipe", f"{PACKAGE}.trainer.services"], {"sympy", "ray"}, (".meshed",))


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    }


def imported(name: str, path: Path, names: set[str], *, at_import: bool = False) -> Iterator[str]:
    """Yield the package's modules that a file imports anywhere, or with `at_import` only while it is imported itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    deferred_nodes = {child for node in deferred for child in ast.walk(node)}
    for node in ast.walk(tree):
        if at_import and node in deferred_nodes:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: a relative import"
            source = node.module or ""
            if source.split(".")[0] == PACKAGE:
                deeper = [f"{source}.{alias.name}" for alias in node.names]
                yield from (module if module in names else source for module in deeper)


LAYERS = ("kernels", "harness", "trainer", "tour production", "labs views", "jobs")
"""Each layer imports only itself and earlier ones; top-level modules such as the command line import all of them."""


BACKWARDS = {
    (f"{PACKAGE}.trainer.services.services", f"{PACKAGE}.production.conversations"),
    (f"{PACKAGE}.trainer.services.services", f"{PACKAGE}.production.serve"),
    (f"{PACKAGE}.trainer.recipe.recipe", f"{PACKAGE}.production.fidelity"),
}
"""Imports that still go in the wrong direction."""


def part(module: str) -> str:
    """Return `trainer` for composer_nb.trainer.models.transformer, and an empty text for the package itself."""
    return [*module.split("."), ""][1]


def test_imports_flow_one_way() -> None:
    paths = modules()
    order = {name: level for level, layer in enumerate(LAYERS) for name in layer.split()}
    order[""] = 0
    wrong = [
        f"{name} imports {target}"
        for name, path in paths.items()
        for target in imported(name, path, set(paths))
        if order.get(part(target), len(LAYERS)) > order.get(part(name), len(LAYERS)) and (name, target) not in BACKWARDS
    ]
    assert not wrong


def folder(module: str) -> str:
    """Return the folder of a module, at most two levels below the package; a module that lies higher stands for itself."""
    parts = module.split(".")[1:]
    if parts[0] in ("views", "jobs", "production", "tour"):
        return parts[0]
    return "/".join(parts[:3] if parts[:3] == ["harness", "tasks", "making"] else parts[:2])


def test_no_two_folders_import_each_other() -> None:
    """Imports inside functions count. What a package's own `__init__` exports does not."""
    paths = modules()
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        if path.name != "__init__.py":
            targets = {target for target in imported(name, path, set(paths)) if paths[target].name != "__init__.py"}
            targets -= {target for source, target in BACKWARDS if source == name}
            graph.setdefault(folder(name), set()).update({folder(target) for target in targets} - {folder(name)})
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_import_exists_and_none_goes_round() -> None:
    paths = modules()
    graph = {name: set(imported(name, path, set(paths), at_import=True)) for name, path in paths.items()}
    assert not {target for targets in graph.values() for target in targets} - set(paths)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert len(order) == len(paths)


PROMISED = {
    "kernels": ("mx_quantize", "nvfp4_quantize", "grouped_mm", "moe", "explain"),
    "harness": ("Task", "Sandbox", "Agent", "reward", "run_eval", "reap"),
    "trainer.model": ("Model", "load_pretrained", "save_pretrained"),
    "trainer.weights": ("encode_delta", "apply_delta", "verify"),
    "trainer.engine": ("Engine",),
}


def test_promised_names_can_be_imported() -> None:
    lines = [f"from {PACKAGE}.{module} import {', '.join(names)}" for module, names in PROMISED.items()]
    lines.append("assert all(map(callable, (mx_quantize, Task, reward, reap, load_pretrained, verify, Engine)))")
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def picture() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the boxes in each frame of docs/architecture.md, and the boxes that arrows lead to from each box or frame."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    frames: dict[str, set[str]] = {"": set()}
    arrows: dict[str, set[str]] = {}
    frame = ""
    for line in text.partition("```mermaid")[2].partition("```")[0].splitlines():
        word = line.split()[0] if line.split() else ""
        if word == "subgraph":
            frame = line.split()[1].partition("[")[0]
            frames[frame] = set()
        elif word == "end":
            frame = ""
        elif "-->" in line:
            ends = [end.strip() for end in line.split("-->")]
            for start, end in itertools.pairwise(ends):
                arrows.setdefault(start, set()).add(end)
        elif "[" in line:
            frames[frame].add(word.partition("[")[0])
    return frames, arrows


def test_the_picture_of_the_architecture_matches() -> None:
    """Its boxes are the folders, and whatever one folder imports can be reached by arrows."""
    frames, arrows = picture()
    assert {frame: boxes for frame, boxes in frames.items() if (ROOT / PACKAGE / frame).is_dir() and frame} == {
        layer: {path.name for path in (ROOT / PACKAGE / layer).iterdir() if (path / "__init__.py").exists()}
        | ({"rl"} if layer == "trainer" else set())
        for layer in ("harness", "trainer")
    }
    frame_of = {box: frame for frame, boxes in frames.items() for box in boxes}

    def reach(box: str) -> set[str]:
        reached: set[str] = set()
        todo = [box, frame_of.get(box, "")]
        while todo:
            for end in arrows.get(todo.pop(), set()):
                neighbours = {end, *frames.get(end, set())}
                todo += neighbours - reached
                reached |= neighbours
        return reached

    paths = modules()
    missing = set()
    for name, path in paths.items():
        box = box_of(name)
        for target in imported(name, path, set(paths)) if path.name != "__init__.py" else ():
            target_box = box_of(target)
            if (
                box in frame_of
                and target_box in frame_of
                and box != target_box
                and frame_of[box] == frame_of[target_box]
            ):
                missing |= {f"{box} imports {target_box}"} if target_box not in reach(box) else set()
    assert not missing


def box_of(module: str) -> str:
    """Return the folder of a module in the harness or the trainer; `making` is not in the picture."""
    _, layer, box, *rest = [*module.split("."), "", ""]
    return box if layer in ("harness", "trainer") and rest[:1] != ["making"] else ""
