"""A lint: nothing joins a name to a path unless the name is the package's own, or was checked.

What stands on the right of a path's `/`, or in `joinpath` and `os.path.join`, must be a constant, a number, the name of another
path, or the result of `checked` or `single`; or the join stands in REVIEWED, with the reason. A path is what an annotation or an
assignment of the same module makes one.
"""

import ast

from tests.test_imports import PACKAGE, ROOT

PATH_CALLS = {"Path", "beneath", "resolve", "with_name", "with_suffix", "absolute", "joinpath"}
OWN_CALLS = {"checked", "single", "relative_to", "hexdigest", "getpid", "strftime"}
LISTINGS = {"iterdir", "glob", "rglob"}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Joins(ast.NodeVisitor):
    """Collects the unchecked joins of a module. `paths` and `own` are names of paths and of the package's own names."""

    def __init__(self, tree: ast.Module) -> None:
        self.paths, self.own, self.joins = {"parent"}, set[str](), list[str]()
        for node in ast.walk(tree):
            match node:
                case (
                    ast.arg(arg=name, annotation=ast.expr() as note)
                    | ast.AnnAssign(target=ast.Name(id=name), annotation=note)
                ):
                    self.paths |= {name} if ast.unparse(note).split(" |")[0] == "Path" else set()
                    self.own |= {name} if ast.unparse(note) == "int" else set()
                case ast.FunctionDef(name=name, returns=ast.Name(id="Path")):
                    self.paths.add(name)
                case ast.Assign(targets=[target], value=value) if self.is_path(value):
                    self.paths.add(name_of(target))
                case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
                    function_name = name_of(values.func) if isinstance(values, ast.Call) else ""
                    names = {name_of(part) for part in (target.elts[:1] if isinstance(target, ast.Tuple) else [target])}
                    constant = isinstance(values, ast.Tuple) and all(map(self.is_own, values.elts))
                    self.own |= (
                        names
                        if constant or name_of(values).isupper() or function_name in ("range", "enumerate")
                        else set()
                    )
                    self.paths |= names if function_name in LISTINGS else set()
        self.visit(tree)

    def is_path(self, node: ast.AST) -> bool:
        match node:
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self.is_path(left) or (isinstance(right, ast.Constant) and isinstance(right.value, str))
            case ast.Call(func=function):
                return name_of(function) in self.paths | PATH_CALLS
            case ast.Name() | ast.Attribute():
                return name_of(node) in self.paths
        return False

    def is_own(self, node: ast.AST) -> bool:
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name.isupper() or name in self.own
            case ast.Attribute(attr=name):
                return name.isupper() or name in ("name", "stem", "hex")
            case ast.Call(func=function, args=args):
                return name_of(function) in OWN_CALLS or (name_of(function) == "str" and all(map(self.is_own, args)))
            case ast.JoinedStr(values=values):
                return all(map(self.is_own, values))
            case ast.FormattedValue(value=value, format_spec=spec):
                return self.is_own(value) or (spec is not None and "d" in ast.unparse(spec))
            case ast.Subscript(value=value):
                return self.is_own(value)
        return False

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Div) and self.is_path(node.left) and not self.is_own(node.right):
            self.joins.append(ast.unparse(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        joined = node.args if name_of(node.func) == "joinpath" else []
        if ast.unparse(node.func) == "os.path.join":
            joined = node.args[1:]
        match node:
            case ast.Call(func=ast.Name(id="open" | "Path"), args=[ast.JoinedStr(values=[_, *rest]), *_]):
                joined = rest
        if not all(map(self.is_own, joined)):
            self.joins.append(ast.unparse(node))
        self.generic_visit(node)


# Files whose joins were read, by the reason why they are harmless.
REVIEWED = {
    "runs inside a sandbox, on its own files": "harness/sandbox/guest/calls.py harness/grading/guest/calls.py "
    "harness/grading/guest/plugin.py harness/grading/guest/runner.py",
    "the name of a chat format, one of a fixed few": "trainer/models/companions.py",
    "resolved, and refused unless it lies in the folder": "operations/mcp.py",
    "the user's own words on the command line or in a job file, or a name that `JobFile` holds to letters and digits": ""
    "production/agents.py jobs/directory.py jobs/file.py jobs/runner.py trainer/recipe/launch.py trainer/records/rundir.py",
    "the name of a served rollout, which requests hold to letters, digits and a few signs": "production/record.py",
    "names that the package makes itself": "doctor.py labs/rewards/judges.py labs/rewards/review.py operations/track.py "
    "trainer/recipe/evaluate.py trainer/recipe/prepare.py trainer/recipe/recipe.py trainer/recipe/stages.py "
    "trainer/services/finished.py trainer/services/services.py trainer/services/trainer_ranks.py views/report.py",
    "names that the kernel has": "harness/sandbox/docker.py harness/sandbox/granted.py",
    "regular files that a walk of the same folder, without its links, has found": "production/checkout.py "
    "harness/tasks/making/repository.py harness/tasks/runtime.py harness/untrusted.py trainer/corpus/repositories.py",
    "names in a recipe that the package ships": "harness/tasks/making/bugs.py",
    "numbers": "trainer/learning/learner.py",
}


def unchecked(source: str) -> list[str]:
    return Joins(ast.parse(source)).joins


def test_no_name_becomes_a_path_unchecked() -> None:
    root = ROOT / PACKAGE
    reviewed = set(" ".join(REVIEWED.values()).split())
    joins = {path.relative_to(root).as_posix(): unchecked(path.read_text()) for path in sorted(root.rglob("*.py"))}
    new = {path: calls for path, calls in joins.items() if calls and path not in reviewed}
    assert not new, f"use untrusted.beneath, or review them: {new}"


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
    assert all(map(unchecked, UNCHECKED)) and not any(map(unchecked, CHECKED))
