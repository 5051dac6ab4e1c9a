"""Several requests in one process, where their code can look nothing up.

A process in namespaces of its own costs milliseconds, and calls of a small function cost microseconds. Hostile code must not
share a process with arguments of other calls, which it could read, or with other code, which it could change. Plain code
(`is_plain`) can do neither: its functions compute with their arguments, without imports, attributes, state or callbacks. So they
give in a common process what they give alone. A request that a common process does not answer to the end, as after a timeout,
runs again in its own.
"""

import ast
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from composer_nb.harness.sandbox.requests import CALLER, CALLER_SOURCE, CallOutcome, CallRequest, Executor
from composer_nb.harness.syntax import nodes_of

# The module of a merged request. `targets` are in order of the calls: their number, the sources of the modules by name, and the
# module and function, which are None where the arguments name them.
_MERGED = """from types import ModuleType

targets = iter([target for count, *target in {targets!r} for _ in range(count)])
loaded = {{}}


def call(*arguments):
    sources, module, function = next(targets)
    if module is None:
        module, function, arguments = arguments
    source = sources[module]
    if source not in loaded:
        fresh = ModuleType(module)
        exec(compile(source, module + ".py", "exec"), fresh.__dict__)
        loaded[source] = fresh
    return getattr(loaded[source], function)(*arguments)
"""
# Maximum requests of one process, whose calls use a small part of its CPU time.
MOST = 16
# Maximum characters of a plain module, and files and characters of a workspace.
LONGEST, FILES, SIZE = 4096, 100, 1 << 16
_MODULE = re.compile(r"\w{1,64}\.py")
BUILTINS = frozenset({"abs", "len", "max", "min", "range", "sorted", "sum"})
_NODES = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.Expr, ast.Pass),
    *(ast.For, ast.While, ast.If, ast.Break, ast.Continue),
    *(ast.IfExp, ast.ListComp, ast.GeneratorExp, ast.comprehension),
    *(ast.BinOp, ast.operator, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.Compare, ast.cmpop, ast.Constant),
    *(ast.Name, ast.expr_context, ast.Call, ast.keyword, ast.Attribute, ast.Subscript, ast.Slice, ast.List, ast.Tuple),
)


@lru_cache(maxsize=8192)
def is_plain(source: str) -> bool:
    """Return whether a module has nothing but functions that compute with their arguments: with no name but of their parameters,
    their variables and BUILTINS, no call but of BUILTINS and `append`, and no default value."""
    nodes = nodes_of(source) if len(source) <= LONGEST else []
    functions = nodes[0].body if nodes and isinstance(nodes[0], ast.Module) else []
    has_plain_nodes = all(isinstance(node, _NODES) for node in nodes)
    return bool(functions) and has_plain_nodes and all(map(_is_plain_function, functions))


def _is_plain_function(statement: ast.stmt) -> bool:
    match statement:
        case ast.FunctionDef(
            args=ast.arguments(posonlyargs=[], vararg=None, kwonlyargs=[], kwarg=None, defaults=[]),
            decorator_list=[],
            returns=None,
        ):
            inner = [*ast.walk(statement)][1:]
        case _:
            return False
    names = [node for node in inner if isinstance(node, ast.Name)]
    variables = {node.arg for node in statement.args.args} | {n.id for n in names if isinstance(n.ctx, ast.Store)}
    called = {node.func for node in inner if isinstance(node, ast.Call)}

    def is_fit(node: ast.AST) -> bool:
        match node:
            case ast.FunctionDef() | ast.arg(annotation=ast.expr()):
                return False
            case ast.Name(id=name):
                return name in variables | BUILTINS
            case ast.Constant(value=value):
                return type(value) in (int, bool)
            case ast.keyword(arg=name):
                return name == "default"
            case ast.Attribute(attr=name):
                return name == "append" and node in called
            case ast.Call(func=ast.Name(id=name)):
                return name in BUILTINS
            case ast.Call(func=function):
                return isinstance(function, ast.Attribute)
        return True

    is_named_plainly = all(name not in BUILTINS and name[0] != "_" for name in {statement.name, *variables})
    return is_named_plainly and all(map(is_fit, inner))


def _called_modules(request: CallRequest) -> dict[str, str]:
    """Return the texts of the modules that a request calls, by name; none if it must run alone."""
    names, files = {request.module}, request.files
    if len(files) > FILES or sum(map(len, files.values())) > SIZE or not all(map(_MODULE.fullmatch, files)):
        return {}  # a process of its own may have no room for them
    if request.module == CALLER and files.get(f"{CALLER}.py") == CALLER_SOURCE:
        names = {argument.split("'", 2)[1] for argument in request.arguments}
    sources = {name: files.get(f"{name}.py", "") for name in names}
    if request.limits is not None or not names.isdisjoint(sys.stdlib_module_names):
        return {}
    return sources if all(map(is_plain, sources.values())) else {}


def _merged(requests: Sequence[CallRequest]) -> CallRequest:
    """Return the request for the calls of all `requests`, in order."""
    if len(requests) == 1:
        return requests[0]
    targets = []
    for request in requests:
        name = (None, None) if request.module == CALLER else (request.module, request.function)
        targets.append((len(request.arguments), _called_modules(request), *name))
    files = {"merged.py": _MERGED.format(targets=targets)}
    arguments = tuple(argument for request in requests for argument in request.arguments)
    return CallRequest(files=files, module="merged", function="call", arguments=arguments)


def run_merged(requests: Sequence[CallRequest], executor: Executor) -> list[tuple[CallOutcome, ...]]:
    """Answer requests as `executor` does, but those of plain code in common processes. Raises SandboxFailure.

    The first request of a process is answered as if it were alone, whatever ends it. Loops that may be endless come first, so
    that their CPU time is used up once."""
    answers: dict[int, tuple[CallOutcome, ...]] = {}
    alone, first, others = list[int](), list[int](), list[int]()
    for number, request in enumerate(requests):
        texts = _called_modules(request).values()
        (alone if not texts else first if any("while" in text for text in texts) else others).append(number)
    while alone or first or others:
        batches = [[number] for number in alone]
        batches += [[number, *others[at * MOST : (at + 1) * MOST]] for at, number in enumerate(first)]
        batches += [others[at : at + MOST] for at in range(len(first) * MOST, len(others), MOST)]
        alone, first, others = [], [], []
        merged = [_merged([requests[number] for number in batch]) for batch in batches]
        for batch, outcomes in zip(batches, executor.run(merged), strict=True):
            remaining = iter(outcomes)
            for position, number in enumerate(batch):
                answer = tuple(islice(remaining, len(requests[number].arguments)))
                is_final = all(map(_is_final, answer))
                if is_final or position == 0:
                    answers[number] = answer
                else:
                    first.append(number)
                if not is_final:
                    others += batch[position + 1 :]
                    break
    return [answers[number] for number in range(len(requests))]


def _is_final(outcome: CallOutcome) -> bool:
    """Return whether a call ended without reaching a limit, which depends on what else is in a process."""
    return outcome.status == "returned" or (outcome.status == "raised" and outcome.text != "MemoryError")
