"""Plain values: portable JSON, types and ranges of settings, and the functions that settings name."""

import json
import math
import os
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0)]
Some = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def require_ranges(settings: Any, group: str) -> None:
    """Raise ValueError, in one line that names the field, if a field of a dataclass violates its annotation."""
    kind: type = type(settings)
    for name, adapter in _adapters(kind).items():
        try:
            adapter.validate_python(getattr(settings, name))
        except ValidationError as error:
            first = error.errors()[0]
            item = "".join(f"[{part!r}]" for part in first["loc"])
            message = f"{group}.{name}{item}={first['input']!r}: {first['msg'].replace('Input should', 'must')}"
            raise ValueError(message) from None


@lru_cache
def _adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Return a validator of each field that is no dataclass: its type, without conversion, and its range."""
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: TypeAdapter(hint, config=strict) for name, hint in hints.items() if not is_dataclass(hint)}


def import_for_user(module: str) -> ModuleType:
    """Import a module of the user's. One that is found nowhere else may lie in the current folder. The folder is added to the
    path only then, and last: it may be untrusted."""
    first = module.partition(".")[0]
    if first not in sys.modules and find_spec(first) is None:
        sys.path += {os.getcwd()} - {*sys.path}
    return import_module(module)


def function_named(name: str, setting: str) -> Callable[..., Any]:
    """Return the function `MODULE:FUNCTION` of the user's. Raises ValueError, which names the setting, if there is none."""
    module, _, function = name.partition(":")
    try:
        return cast(Callable[..., Any], getattr(import_for_user(module), function))
    except (Exception, SystemExit) as error:  # whatever the module raises
        problem = f"{setting} names {name!r}, which cannot be imported ({error})"
        raise ValueError(f"{problem}; install the module, or put its folder into PYTHONPATH") from None


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON. Numbers that are not finite become null, since JSON has none."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
