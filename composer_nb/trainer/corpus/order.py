"""The order of a repository's files: the imports of a file come before it (arXiv 2401.14196, §2.2)."""

from __future__ import annotations

import ast
import heapq
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from composer_nb.trainer.corpus.filters import parsed


def import_order(texts: Mapping[str, str]) -> list[str]:
    """Return the paths of a repository's files, each after the files that it imports when it is loaded. In a cycle, the file with
    the fewest missing imports comes first; ties are in order of path."""
    names = {_module(path, texts): path for path in sorted(texts, reverse=True) if path.endswith(".py")}
    imports = {path: {names[n] for n in _imports(path, texts, names)} - {path} for path in texts}
    users: dict[str, list[str]] = {path: [] for path in texts}
    for path, needed in imports.items():
        for dependency in needed:
            users[dependency].append(path)
    missing = {path: len(needed) for path, needed in imports.items()}
    heap = [(count, path) for path, count in missing.items()]
    heapq.heapify(heap)
    order: dict[str, None] = {}
    while heap:
        count, path = heapq.heappop(heap)
        if path in order or count != missing[path]:
            continue  # an older entry
        order[path] = None
        for user in users[path]:
            missing[user] -= 1
            heapq.heappush(heap, (missing[user], user))
    return list(order)


def _module(path: str, texts: Mapping[str, str]) -> str:
    """Return the dotted name under which `path` is imported: from the folder above its outermost package, or from its own."""
    location = PurePosixPath(path)
    parts = [] if location.name == "__init__.py" else [location.stem]
    folder = location.parent
    while (folder / "__init__.py").as_posix() in texts and folder.name:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def _imports(path: str, texts: Mapping[str, str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules of the repository that a file imports outside functions."""
    tree = parsed(texts[path]) if path.endswith(".py") else None
    package = _module(path, texts).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    todo: list[ast.AST] = [tree] if tree else []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            modules = (f"{source}.{alias.name}" for alias in node.names)
            yield from (imported for name in modules if (imported := name if name in names else source) in names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
