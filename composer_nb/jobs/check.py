"""Checks of a notebook before a kernel starts: its parameters and their types, its variables, its digest."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import symtable
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_nb.harness.syntax import parse

if TYPE_CHECKING:
    from nbformat import NotebookNode


TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)}


def check_parameters(source: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` if the notebook's parameters cell takes it. A parameter `overrides` holds dotted names of settings.

    Raises ValueError that names the parameter and the nearest known one, or the type wanted; FileNotFoundError when there is no
    notebook."""
    types = parameters_of(source)
    for name, value in values.items():
        check_parameter(source.name, types, name, value)
    return dict(values)


def check_parameter(where: str, types: Mapping[str, type], name: str, value: Any) -> None:
    """Raise ValueError unless `value` is of the type wanted (an int will do for a float) and made of plain values."""
    if name not in types:
        raise ValueError(f"{where} has no parameter {name!r}; {nearest(name, types)}")
    kind = types[name]
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: parameter {name}={value!r} must be of type {kind.__name__}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: parameter {name} holds something that is not plain data: {error}") from None
    if name == "overrides" and value:
        from composer_nb.trainer.settings import Settings, override

        override(Settings(), value)


def nearest(name: str, names: Mapping[str, Any]) -> str:
    """Return the advice for a misspelt name."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"did you mean {near[0]!r}?" if near else "it takes none"


def parameters_of(source: Path) -> dict[str, type]:
    """Return the types of the parameters by name. Raises ValueError unless there is exactly one cell of annotated names."""
    cells = [c for c in _read(source).cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ValueError(f"{source.name}: {len(cells)} cells are tagged `parameters`, not one")
    types: dict[str, type] = {}
    try:
        lines = parse(cells[0].source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{source.name}: the parameters cell is not Python: {error}") from None
    for node in lines:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=kind)) if kind in TYPES:
                types[name] = TYPES[kind]
            case _:
                raise ValueError(f"{source.name}: the parameters cell may hold lines like `steps: int = 3` alone")
    return types


def check_outputs(source: Path, outputs: Mapping[str, str]) -> None:
    """Raise ValueError, before the work, for an output whose variable no cell sets."""
    cells = _read(source).cells if outputs else ()
    names = {name: None for cell in cells if cell.cell_type == "code" for name in _sets(cell.source)}
    for name, expression in outputs.items():
        parts = expression.split(".")
        if not name.isidentifier() or not all(part.isidentifier() for part in parts):
            raise ValueError(f"{source.name}: output {name}: {expression!r} is not a variable's name, as run.path")
        if parts[0] not in names:
            raise ValueError(f"{source.name}: output {name}: no cell sets {parts[0]!r}; {nearest(parts[0], names)}")


def _sets(source: str) -> list[str]:
    """Return the variables that a cell binds where later cells see them."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        table = symtable.symtable(TransformerManager().transform_cell(source), "cell", "exec")  # magics become calls
    except (SyntaxError, ValueError):
        return []  # a cell in another language
    return [name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()]


def _read(source: Path) -> NotebookNode:
    if not source.is_file():
        raise FileNotFoundError(f"{source}: no such notebook")
    import nbformat  # takes a second: not before there is something to read

    try:
        return nbformat.read(source, 4)
    except Exception as error:  # nbformat's reader raises what its many versions happen to raise
        raise ValueError(f"{source}: not a notebook ({type(error).__name__})") from None


def notebook_digest(source: Path) -> str:
    """Return the SHA-256 of a notebook's code cells and their tags, without prose, outputs and metadata."""
    cells = [(c.source, c.metadata.get("tags", [])) for c in _read(source).cells if c.cell_type == "code"]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()
