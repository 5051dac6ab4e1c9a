"""Name the code that nobody reaches, and the parameters that nobody passes. Exits with 1 if there are any.

python scripts/check_reach.py

Users are the package, the notebooks and the scripts; tests are not. Dead code is what vulture names. A parameter with a default
is idle if no call of a function with that name passes it. Calls are matched by name, so some idle ones are missed.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "composer_nb"
CONFIDENCE = 60
"""Vulture's for unused functions, classes and attributes, in percent."""
REACHED_OTHERWISE = {
    "pytest_*": "hooks of pytest",
    "_repr_*_": "read by IPython",
    "find_spec": "of importlib's protocol",
    "create_module": "of importlib's protocol",
    "exec_module": "of importlib's protocol",
    "_getobj": "of pytest's collectors",
    "repr_failure": "of pytest's items",
    "visit_JoinedStr": "of ast's visitors",
    "on_visit": "of libcst's visitors",
    "on_leave": "of libcst's visitors",
    "process_renderables": "of rich's progress bars",
    "do_GET": "of http.server's handlers",
    "log_message": "of http.server's handlers",
    "exchange": "called on a Ray actor",
    "meet": "called on a Ray actor",
    "__getattr__": "of modules, by Python",
    "doctest_namespace": "asked for by conftests",
    "papermill_execute_cells": "called by papermill",
    "device_line": "printed by the Makefile",
}
"""Patterns of names that are called by others, and who they are."""
PASSED_OTHERWISE = {
    "find_spec.path": "of importlib's protocol",
    "find_spec.target": "of importlib's protocol",
    "load_pretrained.dtype": "a promised name, for callers of the library",
    "save_pretrained.tokenizer": "a promised name, for callers of the library",
    "save_pretrained.shard_bytes": "a promised name, for callers of the library",
    "changed_past.factor": "a question of notebook 13",
    "__call__.alive": "by the server, through the protocol `Answering`",
    "__call__.report": "by the server, through the protocol `Answering`",
    "SandboxExecutor.limits": "by tests, for limits that end soon",
    "EndpointTurnPolicy.parallel": "by tests, for servers without parallel calls",
    "measure_mismatch.budget": "by tests, to split a small batch",
    "cross_entropy.budget": "by tests, to split a small batch",
    "inner_products.width": "by tests, to split a small matrix",
    "detectable.spread": "by tests, which draw policies of several",
}
"""Parameters, as FUNCTION.PARAMETER, that others pass, and who they are. Keep this list short: a parameter is for users."""
REGISTERED = {
    *("validator", "field_validator", "model_validator", "computed_field", "field_serializer", "property"),
    *(
        "jit",
        "njit",
        "tool",
        "term",
        "mistake",
        "command",
        "overload",
        "remote",
        "cached_property",
        "case",
    ),
}
"""Decorators that make something reachable without its name."""


def notebook_code(path: Path) -> str:
    """Return the code of a notebook, its magics left out."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    lines = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code").split("\n")
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def sources() -> dict[str, str]:
    """Return the text of each Python file of the users, by its path; notebooks count as files."""
    files = {
        str(path): path.read_text(encoding="utf-8")
        for top in ("composer_nb", "scripts")
        for path in (ROOT / top).rglob("*.py")
    }
    return files | {str(path): notebook_code(path) for path in (ROOT / "notebooks").glob("*.ipynb")}


def called(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def dead(texts: dict[str, str]) -> Iterator[str]:
    """Yield what no user reaches."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, (name, text) in enumerate(texts.items()):
            if name.endswith(".py"):
                paths.append(name)
            else:
                paths.append(f"{folder}/notebook_{number}.py")
                Path(paths[-1]).write_text(text, encoding="utf-8")
        vulture = Vulture(ignore_names=[*REACHED_OTHERWISE], ignore_decorators=[f"@*{name}*" for name in REGISTERED])
        vulture.scavenge(paths)
        for code in vulture.get_unused_code(min_confidence=CONFIDENCE):
            if PACKAGE in Path(code.filename).parents and code.typ in ("class", "function", "method"):
                yield f"{Path(code.filename).relative_to(ROOT)}:{code.first_lineno}: nobody reaches the {code.typ} {code.name}"


def calls(trees: list[ast.Module]) -> tuple[dict[str, set[str]], dict[str, int], set[str]]:
    """Return, by the function's name, the keywords and the most positional arguments of its calls, and the functions that are
    called with a star or used other than by a call, so that anything may be passed."""
    keywords, positions, free = defaultdict[str, set[str]](set), defaultdict[str, int](int), set[str]()
    for tree in trees:
        functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
        names = {alias.asname: alias.name for alias in imports if alias.asname}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = names.get(called(node.func), called(node.func))
                keywords[name] |= {keyword.arg for keyword in node.keywords if keyword.arg}
                positions[name] = max(positions[name], len(node.args))
                starred = any(isinstance(argument, ast.Starred) for argument in node.args)
                if starred or any(keyword.arg is None for keyword in node.keywords):
                    free.add(name)
            elif isinstance(node, ast.Name | ast.Attribute) and id(node) not in functions:
                free.add(names.get(called(node), called(node)))
    return keywords, positions, free


def idle(texts: dict[str, str]) -> Iterator[str]:
    """Yield the parameters with a default that no call passes."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    keywords, positions, free = calls([*trees.values()])
    for name, tree in trees.items():
        if PACKAGE not in Path(name).parents:
            continue
        classes = {child: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            home = classes.get(node)
            public = home.name if home and node.name == "__init__" else node.name
            if public in free or any(
                called(d.func if isinstance(d, ast.Call) else d) in REGISTERED for d in node.decorator_list
            ):
                continue
            ordered = [*node.args.posonlyargs, *node.args.args]
            bound = int(bool(home) and not any(called(d) == "staticmethod" for d in node.decorator_list))
            defaults = {
                arg.arg: index - bound
                for index, arg in enumerate(ordered)
                if index >= len(ordered) - len(node.args.defaults)
            }
            defaults |= {
                a.arg: 10**6 for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None
            }
            for arg, index in defaults.items():
                if (
                    arg not in keywords[public]
                    and positions[public] <= index
                    and f"{public}.{arg}" not in PASSED_OTHERWISE
                ):
                    yield f"{Path(name).relative_to(ROOT)}:{node.lineno}: nobody passes {arg} to {public}"


def main() -> int:
    texts = sources()
    problems = [*dead(texts), *idle(texts)]
    print("\n".join(problems))
    print(f"{len(problems)} problems", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
