"""Tools from functions: a pydantic model of the parameters gives both the JSON schema and the checks.

A call is accepted if it matches the schema, and is an error otherwise. Names and parameters follow what coding agents already
know (Cursor's public documentation); optional parameters are left out of `required`, so OpenAI's flag `strict`, which forbids
that, is not set.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from composer_nb.harness.tools.tool_call import Tool, invalid

# Visible forms of control characters.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if code not in (9, 10)}


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not contain a lone surrogate") from None
    return text


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL")
    return text


Content = Annotated[str, AfterValidator(_encodable)]
Text = Annotated[Content, AfterValidator(_no_nul)]
Path = Annotated[Text, Field(min_length=1, max_length=4096)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Lines = Annotated[int, Field(ge=0, le=1000)]


class Arguments(BaseModel):
    """Arguments of one tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Todo(Arguments):
    id: Annotated[Text, Field(min_length=1, max_length=100)]
    content: Annotated[Text, Field(min_length=1, max_length=1000)]
    status: Literal["pending", "in_progress", "completed", "cancelled"]


def tool(**traits: Any) -> Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function.

    Its name is the function's, its arguments are the parameters after the first. The docstring is what a model reads: the
    description of the tool, an empty line, then a line `name: description` for each parameter that needs one. `traits`: further
    fields of `Tool`.
    """

    def made(function: Callable[..., Any]) -> Tool:
        description, _, lines = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        described = dict(line.split(": ", 1) for line in lines.splitlines())
        _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
        fields: dict[str, Any] = {}
        for parameter in parameters:
            default = ... if parameter.default is parameter.empty else parameter.default
            field = Field(default, description=described.pop(parameter.name, None))
            fields[parameter.name] = (parameter.annotation, field)
        assert not described, f"{function.__name__} has no parameter {', '.join(described)}"
        model = create_model(function.__name__, __base__=Arguments, **fields)
        text = " ".join(description.splitlines())
        return Tool(name=function.__name__, description=text, arguments=model, run=function, **traits)

    return made


def check(model: type[BaseModel], arguments: object) -> BaseModel:
    """Return the checked arguments of a call. Raises ToolError (InvalidArguments) with one line that names each wrong one."""
    if not isinstance(arguments, Mapping):
        raise invalid("arguments must be an object")
    nulls = [name for name, value in arguments.items() if value is None]
    if nulls:
        raise invalid(printable(f"{nulls[0]}: null; leave out what you do not need"))
    try:
        return model.model_validate(dict(arguments), strict=True)
    except ValidationError as error:
        takes = ", ".join(field.alias or name for name, field in model.model_fields.items())
        wrong = []
        for part in error.errors(include_url=False, include_input=False, include_context=False):
            unknown = part["type"] == "extra_forbidden"
            message = f"no such argument; there are {takes}" if unknown else part["msg"].removeprefix("Value error, ")
            wrong.append(f"{'.'.join(map(str, part['loc']))[:100]}: {message}")
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise invalid(printable("; ".join(wrong[:3]) + more)) from None


def printable(text: str) -> str:
    """Return one line without control characters and lone surrogates, which no encoding accepts."""
    return " ".join(text.encode("utf-8", "replace").decode().split()).translate(CONTROLS)


def parameters(model: type[BaseModel], described: bool = True) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, without references."""
    schema = model.model_json_schema()
    dropped = {"title", "default", "$defs", *([] if described else ["description"])}
    plain = _plain(schema, schema.get("$defs", {}), dropped)
    assert isinstance(plain, dict)
    return plain


def _plain(node: Any, definitions: Mapping[str, Any], dropped: set[str]) -> Any:
    """Return a schema without references and some keys; an optional value has just its own type."""
    if isinstance(node, list):
        return [_plain(part, definitions, dropped) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _plain(definitions[node["$ref"].rpartition("/")[2]], definitions, dropped)
    plain: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            plain[key] = {name: _plain(part, definitions, dropped) for name, part in value.items()}
        elif key == "anyOf" and len(kinds := [part for part in value if part.get("type") != "null"]) == 1:
            plain |= _plain(kinds[0], definitions, dropped)
        elif key not in dropped:
            plain[key] = _plain(value, definitions, dropped)
    return plain
