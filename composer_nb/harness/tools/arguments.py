"""Arguments of the tools: one model per tool, which gives both its JSON schema and its checks.

A call is checked in one of two ways, a setting of the environment. *Strict* accepts only what the schema says. *Lenient* also
accepts a sloppy call that can mean only one thing:

* a value of another type that stands for one of the wanted type: "5" or 5.0 for 5, "true" for true, 5 for "5", a list as JSON
  text, one string where a list of strings is wanted;
* null for an argument that may be left out;
* `run_terminal_cmd` without `is_background`, which then is false;
* a name that other tools have for the same argument (SYNONYMS), if the call does not give that argument besides.

An argument that is in neither is an error in both. Names and parameters follow what coding agents already know (Cursor's public
documentation); optional parameters are left out of `required`, so OpenAI's flag `strict`, which forbids that, is not set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from composer_nb.harness.tools.tool_call import ToolError

SYNONYMS = (
    {"target_file", "file_path", "path", "filepath", "filename", "file"},
    {"target_directory", "path", "directory", "dir", "folder"},
    {"target_directories", "directories", "paths"},
    {"paths", "path", "files"},
    {"path", "file_path", "target_file", "target_directory", "directory"},
    {"contents", "content", "text", "file_text"},
    {"old_string", "old_str", "old_text"},
    {"new_string", "new_str", "new_text"},
    {"glob_pattern", "pattern", "glob"},
    {"pattern", "regex", "query"},
    {"query", "search_term"},
    {"command", "cmd"},
    {"is_background", "background", "run_in_background"},
    {"patch", "input", "diff"},
)
"""Sets of names for one argument; those that a tool has itself keep their meaning there."""
ASSUMED = {"is_background": False}
"""What a lenient call means that leaves out one of these arguments."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if code not in (9, 10)}
"""How characters are shown that show nothing themselves."""


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
Why = Annotated[Text | None, Field(description="One sentence: why you make this call.")]


class Arguments(BaseModel):
    """Arguments of one tool."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class ReadFile(Arguments):
    target_file: Path
    offset: Annotated[Count | None, Field(description="First line to show, counted from 1.")] = None
    limit: Annotated[Count | None, Field(description="Number of lines to show.")] = None


class SearchReplace(Arguments):
    file_path: Path
    old_string: Annotated[
        Content, Field(description="Exact text to replace; include enough context to make it unique.")
    ]
    new_string: Annotated[Content, Field(description="New text.")]
    replace_all: Annotated[bool, Field(description="Replace every occurrence.")] = False


class Write(Arguments):
    file_path: Path
    contents: Annotated[Content, Field(description="Whole content of the file.")]


class DeleteFile(Arguments):
    target_file: Path
    explanation: Why = None


class ListDir(Arguments):
    target_directory: Path
    ignore_globs: Annotated[list[Text] | None, Field(description="Names to leave out, such as *.log.")] = None


class GlobFileSearch(Arguments):
    glob_pattern: Annotated[
        Text,
        Field(min_length=1, max_length=4096, description="Such as *.py or src/**/test_*.py; matches at any depth."),
    ]
    target_directory: Annotated[Path | None, Field(description="Folder to search (default: everywhere).")] = None


class Grep(Arguments):
    pattern: Annotated[
        Text, Field(min_length=1, max_length=20_000, description="Regular expression in ripgrep's syntax.")
    ]
    path: Annotated[Path | None, Field(description="File or folder to search (default: everywhere).")] = None
    glob: Annotated[Text | None, Field(max_length=4096, description="Only files that match, such as *.{ts,tsx}.")] = (
        None
    )
    type: Annotated[Text | None, Field(max_length=100, description="Only files of this ripgrep type, such as py.")] = (
        None
    )
    output_mode: Annotated[
        Literal["content", "files_with_matches", "count"],
        Field(description="Matching lines (default), paths alone, or the number of lines per file."),
    ] = "content"
    after: Annotated[Lines | None, Field(alias="-A", description="Lines to show after each match.")] = None
    before: Annotated[Lines | None, Field(alias="-B", description="Lines to show before each match.")] = None
    around: Annotated[Lines | None, Field(alias="-C", description="Lines to show around each match.")] = None
    ignore_case: Annotated[bool, Field(alias="-i", description="Ignore case.")] = False
    head_limit: Annotated[Count | None, Field(description="Maximum lines of output.")] = None
    multiline: Annotated[bool, Field(description="Allow matches across lines; . matches a newline.")] = False


class CodebaseSearch(Arguments):
    query: Annotated[Text, Field(min_length=1, max_length=20_000, description="A question in plain words.")]
    target_directories: Annotated[
        list[Path], Field(max_length=1, description="One folder to search, or none for everywhere; no globs.")
    ]
    explanation: Why = None


class RunTerminalCmd(Arguments):
    command: Annotated[Text, Field(min_length=1, max_length=30_000, description="Command for bash; it gets no input.")]
    is_background: Annotated[bool, Field(description="Return at once while it runs, for example for servers.")]
    explanation: Why = None
    timeout_ms: Annotated[
        int | None, Field(ge=1, le=600_000, description="Timeout in milliseconds (default 120000).")
    ] = None
    working_directory: Annotated[
        Path | None, Field(description="Folder to run it in (default: where the last command ended).")
    ] = None


class ReadLints(Arguments):
    paths: Annotated[list[Path] | None, Field(max_length=100, description="Files or folders (default: all).")] = None


class Todo(Arguments):
    id: Annotated[Text, Field(min_length=1, max_length=100)]
    content: Annotated[Text, Field(min_length=1, max_length=1000)]
    status: Literal["pending", "in_progress", "completed", "cancelled"]


class TodoWrite(Arguments):
    merge: Annotated[bool, Field(description="Update the list by id instead of replacing it.")]
    todos: Annotated[list[Todo], Field(max_length=100, description="At most one may be in_progress.")]


class ApplyPatch(Arguments):
    patch: Annotated[Content, Field(min_length=1, description="*** Begin Patch … *** End Patch.")]


def check(model: type[BaseModel], arguments: object, strict: bool) -> BaseModel:
    """Return the checked arguments of a call. Raises ToolError (InvalidArguments) with one line that names each wrong one."""
    if not isinstance(arguments, Mapping):
        raise ToolError("InvalidArguments", "arguments must be an object")
    nulls = [name for name, value in arguments.items() if value is None]
    if strict and nulls:
        raise ToolError("InvalidArguments", printable(f"{nulls[0]}: null; leave out what you do not need"))
    try:
        return model.model_validate(dict(arguments) if strict else _meant(model, arguments), strict=strict)
    except ValidationError as error:
        takes = ", ".join(field.alias or name for name, field in model.model_fields.items())
        wrong = []
        for part in error.errors(include_url=False, include_input=False, include_context=False):
            unknown = part["type"] == "extra_forbidden"
            told = f"no such argument; there are {takes}" if unknown else part["msg"].removeprefix("Value error, ")
            wrong.append(f"{'.'.join(map(str, part['loc']))[:100]}: {told}")
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ToolError("InvalidArguments", printable("; ".join(wrong[:3]) + more)) from None


def printable(text: str) -> str:
    """Return one line without control characters and lone surrogates, which no encoding accepts."""
    return " ".join(text.encode("utf-8", "replace").decode().split()).translate(CONTROLS)


def _meant(model: type[BaseModel], arguments: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what a sloppy call must have meant; see the module docstring."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    meant = {name: value for name, value in arguments.items() if name in fields}
    for name, value in arguments.items():
        if name in fields:
            continue
        wanted = {field for names in SYNONYMS if name in names for field in names & fields.keys() - arguments.keys()}
        meant[wanted.pop() if len(wanted) == 1 else name] = value
    for name, field in fields.items():
        if name not in meant:
            continue
        if meant[name] is None and not field.is_required():
            del meant[name]
        elif isinstance(meant[name], str) and "list[" in str(field.annotation):
            meant[name] = _listed(meant[name])
    for name in ASSUMED.keys() & fields.keys():
        if meant.get(name) is None:
            meant[name] = ASSUMED[name]
    return meant


def _listed(text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, list) else [text]


def parameters(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, without references."""
    schema = model.model_json_schema()
    plain = _plain(schema, schema.get("$defs", {}))
    assert isinstance(plain, dict)
    return plain


def _plain(node: Any, known: Mapping[str, Any]) -> Any:
    """A schema without titles, defaults, references, and with a value's own type where it may also be left out."""
    if isinstance(node, list):
        return [_plain(part, known) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _plain(known[node["$ref"].rpartition("/")[2]], known)
    kept: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            kept[key] = {name: _plain(part, known) for name, part in value.items()}
        elif key == "anyOf":
            [kind] = [part for part in value if part.get("type") != "null"]
            kept |= _plain(kind, known)
        elif key not in ("title", "default", "$defs"):
            kept[key] = _plain(value, known)
    return kept
