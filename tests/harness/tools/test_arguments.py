"""What a call may look like, and that schemas and checks say the same."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.tools.arguments import check, parameters
from composer_nb.harness.tools.tool_call import ToolError
from composer_nb.harness.tools.toolset import TOOLS, ToolSet
from tests.harness.tools.conftest import FixedSearch

MODELS = {tool.name: tool.arguments for tool in TOOLS}
REFERENCE = {
    "read_file": ({"target_file"}, {"offset", "limit"}),
    "search_replace": ({"file_path", "old_string", "new_string"}, {"replace_all"}),
    "write": ({"file_path", "contents"}, set()),
    "delete_file": ({"target_file"}, {"explanation"}),
    "list_dir": ({"target_directory"}, {"ignore_globs"}),
    "glob_file_search": ({"glob_pattern"}, {"target_directory"}),
    "grep": ({"pattern"}, {"path", "glob", "type", "output_mode", "-A", "-B", "-C", "-i", "head_limit", "multiline"}),
    "codebase_search": ({"query", "target_directories"}, {"explanation"}),
    "run_terminal_cmd": ({"command", "is_background"}, {"explanation", "timeout_ms", "working_directory"}),
    "read_lints": (set(), {"paths"}),
    "todo_write": ({"merge", "todos"}, set()),
    "apply_patch": ({"patch"}, set()),
}


def test_names_and_parameters_are_those_that_agents_know() -> None:
    tools = ToolSet.cursor(search=lambda session: FixedSearch(lambda query: []))
    schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in tools.schemas}
    assert schemas.keys() == REFERENCE.keys()
    for name, (required, optional) in REFERENCE.items():
        assert set(schemas[name].get("required", ())) == required, name
        assert set(schemas[name]["properties"]) == required | optional, name
        assert schemas[name]["additionalProperties"] is False
        jsonschema.Draft202012Validator.check_schema(schemas[name])
        assert "$" not in json.dumps(schemas[name]) and "null" not in json.dumps(schemas[name])


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2000), st.floats(allow_nan=False), st.text(max_size=5), st.just("content"),
    st.lists(st.text(max_size=3), max_size=3), st.just([{"id": "1", "content": "x", "status": "pending"}]),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_strict_is_what_the_schema_says(data: st.DataObject) -> None:
    """The schema, read by an independent validator, and the check agree; but for NUL, which no schema speaks of."""
    model = data.draw(st.sampled_from(list(MODELS.values())))
    schema = parameters(model)
    names = st.sampled_from([*schema["properties"], "other"])
    arguments = data.draw(st.dictionaries(names, VALUES, max_size=6))
    for name in data.draw(st.just(schema.get("required", []))):
        if name not in arguments and data.draw(st.booleans()):
            arguments[name] = data.draw(VALUES)
    if "\\u0000" in json.dumps(arguments) or any(isinstance(value, float) for value in arguments.values()):
        return  # 1.0 is an integer for JSON, not here
    valid = jsonschema.Draft202012Validator(schema).is_valid(arguments)
    try:
        check(model, arguments)
    except ToolError as error:
        assert not valid, (str(error), arguments)
        assert error.kind == "InvalidArguments" and "\n" not in str(error)
    else:
        assert valid, arguments


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("read_file", {"target_file": "a", "offset": 5.0}),
        ("read_file", {"target_file": "a", "limit": None}),
        ("run_terminal_cmd", {"command": "a\0b", "is_background": False}),
        ("read_file", {"\udcff": "a", "target_file": "a"}),
        ("write", {"file_path": "a", "contents": "\udcff"}),
        ("todo_write", {"merge": True, "todos": [{"id": "\udcff", "content": "x", "status": "pending"}]}),
        ("read_file", ["a"]),
    ],
)
def test_what_the_schema_does_not_say_is_an_error(name: str, arguments: object) -> None:
    with pytest.raises(ToolError) as error:
        check(MODELS[name], arguments)
    assert error.value.kind == "InvalidArguments"
    str(error.value).encode()
