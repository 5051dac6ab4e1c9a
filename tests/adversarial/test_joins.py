"""A lint: nothing joins a name to a path unless the name is the package's own, or was checked.

A small type inference finds expressions that are paths. What stands on the right of their `/` must be a constant, a number, the
name of another path, or the result of `checked` or `single`; or the join stands in REVIEWED, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_imports import PACKAGE, ROOT

CHECKS = {"checked", "single"}
PATH_METHODS = {"resolve", "with_name", "with_suffix", "absolute", "expanduser", "joinpath", "rename", "beneath"}
LISTINGS = {"iterdir", "glob", "rglob"}
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def is_path_note(node: ast.expr | None) -> bool:
    """Whether an annotation says Path: `Path`, `Path | None`, `str | Path`."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node is not None else set()
    return "Path" in names and not isinstance(node, ast.Subscript)


class Names:
    """What the package says of its names: attributes that are paths, functions that return them."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self.attributes, self.functions = {"parent"}, {"Path", "beneath"}
        for node in (each for tree in trees for each in ast.walk(tree)):
            if isinstance(node, ast.ClassDef):
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                self.attributes |= {ast.unparse(each.target) for each in fields if is_path_note(each.annotation)}
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                self.attributes |= {each.name for each in methods if each.decorator_list and is_path_note(each.returns)}
                for method in methods:
                    known = {arg.arg for arg in arguments(method) if is_path_note(arg.annotation)}
                    for each in (inner for inner in ast.walk(method) if isinstance(inner, ast.Assign)):
                        self.attributes |= self_paths(each, known)
            elif isinstance(node, ast.FunctionDef) and is_path_note(node.returns):
                self.functions.add(node.name)


def self_paths(node: ast.Assign, known: set[str]) -> Iterator[str] | set[str]:
    """Attributes of `self` that an assignment makes of a parameter that is a path, as `self.a, self._b = path, 1` does."""
    found = set()
    for target in node.targets:
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        for one, value in zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]:
            if isinstance(one, ast.Attribute) and {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} & known:
                if not isinstance(value, ast.Call) or ast.unparse(value.func).endswith(("Path", "resolve")):
                    found.add(one.attr)
    return found


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own(child)


class Reading:
    """One function, read in order."""

    def __init__(self, names: Names, scope: ast.AST, outer: set[str]) -> None:
        self.names, self.paths, self.constants, self.listed = names, set(outer), set[str](), set[str]()
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            given = arguments(scope)
            self.paths = self.paths - {arg.arg for arg in given} | {
                arg.arg for arg in given if is_path_note(arg.annotation)
            }
            self.constants |= {arg.arg for arg in given if arg.annotation and ast.unparse(arg.annotation) == "int"}
        self.nodes = list(own(scope))
        for _ in range(3):  # names that are made of names
            for node in self.nodes:
                self.learn(node)

    def learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self.bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            self.bind_each(node.target, node.iter)

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self.bind(one, other)
        elif isinstance(target, ast.Name):
            if self.is_path(value):
                self.paths.add(target.id)
            if self.is_own(value):
                self.constants.add(target.id)

    def bind_each(self, target: ast.expr, values: ast.expr) -> None:
        called = ast.unparse(values.func) if isinstance(values, ast.Call) else ""
        if called in ("sorted", "list", "reversed", "set") and values.args:
            values = values.args[0]
            called = ast.unparse(values.func) if isinstance(values, ast.Call) else ""
        if isinstance(target, ast.Tuple):
            bound = [each.id if isinstance(each, ast.Name) else "" for each in target.elts]
            self.listed |= set(bound[1:]) if called == "os.walk" else set()
            self.constants |= set(bound[:1]) if called == "enumerate" else set()
            return
        if not isinstance(target, ast.Name):
            return
        listed = called.rpartition(".")[2] in LISTINGS
        elements = values.elts if isinstance(values, ast.Tuple | ast.List | ast.Set) else []
        parents = isinstance(values, ast.Attribute) and values.attr == "parents"
        if listed or parents or (elements and any(map(self.is_path, elements))):
            self.paths.add(target.id)
        constant = isinstance(values, ast.Name | ast.Attribute) and ast.unparse(values).rpartition(".")[2].isupper()
        walked = isinstance(values, ast.Name) and values.id in self.listed
        if constant or walked or called == "range" or (elements and all(map(self.is_own, elements))):
            self.constants.add(target.id)

    def is_path(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.paths
            case ast.Attribute(attr=name):
                return name in self.names.attributes
            case ast.Call(func=ast.Name(id=name)):
                return name in self.names.functions
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                return name in self.names.functions or (name in PATH_METHODS and self.is_path(value))
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self.is_path(left) or (isinstance(right, ast.Constant) and isinstance(right.value, str))
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_path(body) or self.is_path(orelse)
            case ast.BoolOp(values=values):
                return any(map(self.is_path, values))
            case ast.Subscript(value=ast.Attribute(attr="parents")):
                return True
        return False

    def is_own(self, node: ast.expr) -> bool:
        """Whether a name is the package's own: a constant, a number, part of a path that is there, or one that was checked."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name.isupper() or name in self.constants
            case ast.Attribute(value=value, attr=name):
                return name.isupper() or name == "hex" or (name in ("name", "stem") and self.is_path(value))
            case ast.Subscript(value=value):
                return self.is_own(value)
            case ast.Call(func=ast.Name(id="str"), args=[value]):
                return self.is_own(value)
            case ast.Call(func=ast.Name(id=name)):
                return name in CHECKS
            case ast.Call(func=ast.Attribute(attr=name)):
                return name in ("relative_to", "hexdigest", "getpid", "strftime")
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.is_own(left) and self.is_own(right)
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_own(body) and self.is_own(orelse)
            case ast.JoinedStr(values=values):
                return all(map(self.is_own, values))
            case ast.FormattedValue(value=value, format_spec=spec):
                return self.is_own(value) or (spec is not None and ast.unparse(spec).rstrip("'\"").endswith("d"))
        return False

    def joins(self) -> Iterator[ast.expr]:
        for node in self.nodes:
            match node:
                case ast.BinOp(left=left, op=ast.Div(), right=right) if self.is_path(left) and not self.is_own(right):
                    yield node
                case ast.Call(func=ast.Attribute(value=value, attr="joinpath"), args=args) if self.is_path(value):
                    if not all(map(self.is_own, args)):
                        yield node
                case ast.Call(func=function, args=[_, *rest]) if ast.unparse(function) == "os.path.join":
                    if not all(map(self.is_own, rest)):
                        yield node
                case ast.Call(func=function, args=[ast.JoinedStr(values=[ast.FormattedValue(), *rest]), *_]):
                    called, joined = ast.unparse(function), rest and "/" in str(getattr(rest[0], "value", ""))
                    opens = called in ("Path", "open") or called.startswith(("os.", "self._fs."))
                    if opens and joined and not all(map(self.is_own, rest)):
                        yield node


def scopes(tree: ast.AST, name: str, names: Names, outer: set[str]) -> Iterator[tuple[str, Reading]]:
    reading = Reading(names, tree, outer)
    yield name, reading
    for node in own_functions(tree):
        yield from scopes(node, f"{name}.{node.name}".lstrip("."), names, reading.paths)


def own_functions(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from own_functions(child)


def unchecked(sources: dict[str, str]) -> set[str]:
    """`module function: join` for all joins of names that were not checked, in sources by module."""
    trees = {module: ast.parse(source) for module, source in sources.items()}
    names = Names(list(trees.values()))
    return {
        f"{module} {function}: {ast.unparse(join)}"
        for module, tree in trees.items()
        for function, reading in scopes(tree, "", names, set())
        for join in reading.joins()
    }


# Files whose joins were read, by the reason why they are harmless.
REVIEWED = {
    "runs inside a sandbox, on its own files": "harness/sandbox/guest/calls.py harness/grading/guest/calls.py "
    "harness/grading/guest/plugin.py harness/grading/guest/runner.py",
    "the name of a chat format, one of a fixed few": "trainer/models/companions.py",
    "resolved, and refused unless it lies in the folder": "operations/mcp.py",
    "the user's own words on the command line or in a job file, or a name that `JobFile` holds to letters and digits": ""
    "production/agents.py production/bench.py jobs/directory.py jobs/file.py jobs/runner.py trainer/recipe/launch.py "
    "trainer/records/rundir.py",
    "the name of a served rollout, which requests hold to letters, digits and a few signs": "production/record.py",
    "names that the package makes itself": "doctor.py harness/grading/box.py trainer/models/checkpoint.py operations/runs.py "
    "operations/track.py trainer/recipe/prepare.py trainer/recipe/stages.py "
    "trainer/recipe/recipe.py trainer/recipe/reader.py trainer/services/services.py views/report.py",
    "names that the kernel, or this machine's own folders, have": "harness/sandbox/image.py trainer/services/machine.py",
    "regular files that a walk of the same folder, without its links, has found": "production/checkout.py",
}


def test_no_name_becomes_a_path_unchecked() -> None:
    root = ROOT / PACKAGE
    joins = unchecked({path.relative_to(root).as_posix(): path.read_text() for path in sorted(root.rglob("*.py"))})
    reviewed = set(" ".join(REVIEWED.values()).split())
    new = sorted(join for join in joins if join.partition(" ")[0] not in reviewed)
    assert not new, "use untrusted.beneath, or review them: " + "; ".join(new)


HEAD = "import os\nfrom pathlib import Path\nfrom dataclasses import dataclass\n"
UNCHECKED = [
    "def f(root: Path | None, names):\n    return [root / 'a' / name for name in names]\n",
    "def f(root: str, name: str):\n    out = Path(root).resolve()\n    return (out / name).read_bytes()\n",
    "def f(root: str, name: str):\n    return os.path.join(root, name)\n",
    "def f(root: Path, name: str):\n    return root.joinpath('a', name)\n",
    "def f(root: str, name: str):\n    return open(f'{root}/{name}')\n",
    "@dataclass\nclass A:\n    path: Path\ndef f(a, row):\n    return a.path / row['file']\n",
    "def place() -> Path: ...\ndef f(name):\n    return place() / f'{name}.json'\n",
]
CHECKED = [
    "def f(root: Path, name: str) -> Path:\n    return beneath(root, name) / 'manifest.json'\n",
    "def f(root: Path, step: int) -> Path:\n    return root / f'rl_{step:05d}.parquet'\n",
    "def f(root: Path) -> list[Path]:\n    return [root / name for name in ('a', single('b'))]\n",
    "def f(root: Path, out: Path):\n    return [out / path.name for path in root.iterdir()]\n",
]


def test_the_lint_tells_checked_names_from_others() -> None:
    assert all(unchecked({"m.py": HEAD + body}) for body in UNCHECKED)
    assert not any(unchecked({"m.py": HEAD + body}) for body in CHECKED)
