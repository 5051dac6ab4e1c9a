"""Check on the host what a request says about the structure of code: a name is gone, a function stands where it should.

`structure.rules` in a task's metadata is a JSON list, each `[rule, path, name]` (`Task.rules`):

    absent     no module in the scope holds the name: as definition, variable, attribute, parameter, import or string; tests may
               have it in strings
    defined    the module at the path defines the function itself, `name` or `Class.name`, in at least half as many nodes of
               syntax as the solution, and binds the name in no other way than the solution does
    undefined  the module at the path does not define it, but may import it
    reduced    what the solution takes out of the function, or of the whole module if `name` is empty, is gone from there, also in
               other words: at least half of the nodes are; and the names that the solution brings there are used

Texts are parsed and never executed. Names that are put together when the code runs show only in the ways to do so
(`AT_RUN_TIME`), of which there may be no more than in the solution; tests may use them.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from composer_nb.harness.grading.source import Function
from composer_nb.harness.syntax import parse
from composer_nb.harness.tasks.scope import in_scope, is_test_module
from composer_nb.harness.tasks.task import Task

AT_RUN_TIME = frozenset(
    "globals locals vars setattr getattr delattr exec eval compile modules import_module __import__ __dict__ __getattr__ "
    "__getattribute__ __setattr__ __builtins__ __class__ f_globals f_locals".split()
)


def structure(task: Task, modules: Mapping[str, str]) -> dict[str, bool]:
    """Return whether the modules in a task's scope follow each of its rules; nothing if it has none."""
    if not (rules := task.rules):
        return {}
    labels = [f"{name} is {rule}{f' in {path}' if path else ''}" for rule, path, name in rules]
    labels.append("no name made at run time")
    solved = {path: text for path, text in {**task.files, **task.solution}.items() if _counts(task, path)}
    try:
        trees, counts, names = _read(task, modules)
        right, allowed, _ = _read(task, solved)
        start = {path: parse(task.files.get(path, "")) for rule, path, _ in rules if rule == "reduced"}
    except (SyntaxError, ValueError):
        return dict.fromkeys(labels, False)
    results = []
    for rule, path, name in rules:
        answer, model = _parts(trees.get(path), name), _parts(right.get(path), name)
        once = len(answer) == len(model) == 1  # or else one of two would be read and the other run
        match rule:
            case "absent":
                results.append(name not in names)
            case "undefined":
                results.append(not answer)
            case "reduced":
                before = _parts(start[path], name)
                results.append(once and bool(before) and _reduced(answer[0], before[0], model[0]))
            case "defined":
                extra = other_bindings(trees.get(path), name) > other_bindings(right.get(path), name)
                results.append(once and not extra and 2 * _size(answer[0]) >= _size(model[0]))
    results.append(all(counts[name] <= allowed[name] for name in AT_RUN_TIME))
    return dict(zip(labels, results, strict=True))


def _counts(task: Task, path: str) -> bool:
    return path.endswith((".py", ".pyi")) and in_scope(path, task.source_scope)


def _read(task: Task, modules: Mapping[str, str]) -> tuple[dict[str, ast.AST], Counter[str], set[str]]:
    """Return the syntax trees of the modules that a task's rules name, how often each name of AT_RUN_TIME is in those that are no
    tests, and the names of the rules that are in any. Keep no other tree: those of an answer could fill the memory."""
    paths, rule_names = ({rule[part] for rule in task.rules} for part in (1, 2))
    trees, counts, names = dict[str, ast.AST](), Counter[str](), set[str]()
    for path, text in modules.items():
        tree, is_test = parse(text), is_test_module(path)
        counts.update(name for name in names_of(tree) if name in AT_RUN_TIME and not is_test)
        names |= rule_names.intersection(names_of(tree, strings=not is_test))
        if path in paths:
            trees[path] = tree
    return trees, counts, names


def names_of(tree: ast.AST, *, strings: bool = True) -> Iterator[str]:
    """Yield every name in a module, also in `strings` that are nothing but a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and not strings:
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and re.fullmatch(r"[\w.]+", text):
                    yield from text.split(".")


def _parts(tree: ast.AST | None, name: str) -> list[ast.AST]:
    """Return a module's functions of this name, or the module if it is empty."""
    functions = definitions(tree) if name and tree else [("", tree)]
    return [node for qualified, node in functions if qualified == name and node]


def _size(node: ast.AST) -> int:
    return sum(1 for _ in ast.walk(node))


def _reduced(answer: ast.AST, before: ast.AST, model: ast.AST) -> bool:
    """Return whether an answer lacks what `model`, the solution, lacks of what was there before, and has its new names."""
    left, old, right = (
        Counter(ast.dump(node) for node in ast.walk(tree) if isinstance(node, ast.stmt) and not _is_compound(node))
        for tree in (answer, before, model)
    )
    gone = not (left - right) & (old - right) and 2 * _size(answer) <= _size(before) + _size(model)
    return gone and {*names_of(model)} - {*names_of(before)} <= {*names_of(answer)}


def _is_compound(node: ast.stmt) -> bool:
    return hasattr(node, "body") or isinstance(node, ast.Match)


def definitions(node: ast.AST, base: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield a module's functions and methods by qualified name, also those that are defined in a block."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from definitions(child, f"{base}{child.name}.")
        elif isinstance(child, Function):
            yield base + child.name, child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from definitions(child, base)


def other_bindings(tree: ast.AST | None, name: str) -> int:
    """Return how often a module binds a function's name, or any name, by something else than a function."""
    last, count = name.rpartition(".")[2], 0
    for node in ast.walk(tree) if tree else ():
        match node:
            case ast.alias(name=bound, asname=None) | ast.alias(asname=bound) | ast.ClassDef(name=bound):
                count += bound in (last, "*")
            case ast.Name(id=bound, ctx=ast.Store()):
                count += bound == last
    return count
