"""Which grammar reads a file, and which of its nodes are definitions.

Grammars are wheels of the tree-sitter project. Python's is always there, the others come with the extra `grammars`; a file whose
grammar is not installed is cut into plain windows, and the index's report names the language.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from tree_sitter import Language, Parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """Node types of one language, and where its grammar is."""

    module: str
    function: str = "language"
    whole: frozenset[str]
    """Definitions that are one chunk: functions, methods, types."""
    holders: frozenset[str] = frozenset()
    """Definitions that hold others, as a class does: their heads are a chunk of their own."""
    around: frozenset[str] = frozenset()
    """What may stand between a holder and its definitions."""
    comment: frozenset[str] = field(default=frozenset({"comment"}))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_JAVASCRIPT_WHOLE = (
    "function_declaration generator_function_declaration method_definition lexical_declaration variable_declaration"
)
_JAVASCRIPT_AROUND = "export_statement statement_block class_body expression_statement internal_module"
_C_AROUND = "preproc_ifdef preproc_if preproc_else linkage_specification declaration_list field_declaration_list"

SYNTAX: Mapping[str, Syntax] = {
    "python": Syntax(
        module="tree_sitter_python",
        whole=_names("function_definition"),
        holders=_names("class_definition"),
        around=_names(
            "decorated_definition block if_statement elif_clause else_clause try_statement except_clause finally_clause "
            "with_statement"
        ),
    ),
    "javascript": Syntax(
        module="tree_sitter_javascript",
        whole=_names(_JAVASCRIPT_WHOLE),
        holders=_names("class_declaration"),
        around=_names(_JAVASCRIPT_AROUND),
    ),
    "typescript": Syntax(
        module="tree_sitter_typescript",
        function="language_tsx",
        whole=_names(_JAVASCRIPT_WHOLE + " interface_declaration type_alias_declaration enum_declaration"),
        holders=_names("class_declaration abstract_class_declaration"),
        around=_names(_JAVASCRIPT_AROUND),
    ),
    "go": Syntax(module="tree_sitter_go", whole=_names("function_declaration method_declaration type_declaration")),
    "rust": Syntax(
        module="tree_sitter_rust",
        whole=_names("function_item struct_item enum_item macro_definition function_signature_item"),
        holders=_names("impl_item trait_item mod_item"),
        around=_names("declaration_list"),
        comment=_names("line_comment block_comment attribute_item"),
    ),
    "java": Syntax(
        module="tree_sitter_java",
        whole=_names("method_declaration constructor_declaration"),
        holders=_names("class_declaration interface_declaration enum_declaration record_declaration"),
        around=_names("class_body interface_body enum_body enum_body_declarations"),
        comment=_names("line_comment block_comment"),
    ),
    "c": Syntax(
        module="tree_sitter_c",
        whole=_names("function_definition struct_specifier enum_specifier type_definition preproc_function_def"),
        around=_names(_C_AROUND),
    ),
    "c++": Syntax(
        module="tree_sitter_cpp",
        whole=_names("function_definition struct_specifier enum_specifier type_definition preproc_function_def"),
        holders=_names("class_specifier namespace_definition"),
        around=_names(_C_AROUND + " template_declaration"),
    ),
}

_ENDINGS = {
    "python": "py pyi",
    "javascript": "js jsx mjs cjs",
    "typescript": "ts tsx mts cts",
    "go": "go",
    "rust": "rs",
    "java": "java",
    "c": "c h",
    "c++": "cc cpp cxx hh hpp hxx",
}
_LANGUAGE = {ending: name for name, endings in _ENDINGS.items() for ending in endings.split()}


def language_of(path: str) -> str | None:
    """The language that a file's name says, if it is one of SYNTAX."""
    _, dot, ending = path.rpartition(".")
    return _LANGUAGE.get(ending) if dot else None


@cache
def parser(language: str) -> Parser | None:
    """A parser, or None where the grammar is not installed."""
    syntax = SYNTAX[language]
    try:
        grammar = importlib.import_module(syntax.module)
    except ModuleNotFoundError:
        return None
    return Parser(Language(getattr(grammar, syntax.function)()))
