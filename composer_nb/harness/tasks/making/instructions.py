"""Write a task's instruction: short, from the symptoms (`symptoms.py`), without the place or the kind of the bug.

One of several wordings is drawn; the same seed gives the same text. Reference: instructions of real sessions are terse and
under-specified, 390 characters in the median (CursorBench, Composer 2 report, section 5).
"""

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random

from composer_nb.harness import syntax
from composer_nb.harness.grading.plan import modules_of
from composer_nb.harness.tasks.making.changes import function_of
from composer_nb.harness.tasks.making.symptoms import MAX_QUOTE, Symptom, find

SAYS = 5  # Words that a docstring must have to say what a function is for.
# {c}: call, {w}: wanted, {o}: observed, {e}: exception, {m}: message, {x}: what should come instead
# Kind of symptom -> wordings of a call that says everything, and what follows lines that reproduce it.
WORDINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "value": (
        (
            "`{c}` gives {o}. It should give {w}.",
            "I expect {w} from `{c}` and get {o}.",
            "Bug: `{c}` is {o}, which should be {w}. Please fix.",
            "why do I get {o} for `{c}`? it should be {w}",
        ),
        "{l} gives {o} there. It should give {w}.",
    ),
    "exception": (
        (
            "`{c}` fails with {e}{m}. {x}",
            "Getting {e}{m} from `{c}`. {x} Can you fix that?",
            "`{c}` raises {e}{m}. {x} Please have a look.",
        ),
        "It fails with {e}{m}. {x}",
    ),
    "missing": (
        (
            "`{c}` should raise {e}, but nothing is raised.",
            "no {e} from `{c}` any more. please restore that",
            "`{c}` is accepted now. I expect {e}.",
        ),
        "It should raise {e}, but nothing is raised.",
    ),
}
LEADS = ("This used to work:", "Can you look into this?", "There is a regression. To reproduce:", "please fix this:")
EXTRAS = ("", "", "{n} of our tests fail because of it.", "Don't touch the tests.", "Keep the change small.")
HEADS = ("Several things broke:", "please fix these:", "A few reports came in, likely not related:")


def write(symptoms: Sequence[Symptom], failing: int, seed: str) -> str:
    """Return the instruction for a bug that makes `failing` tests fail, or for several bugs."""
    rng = Random(f"instruction {seed}")
    if len(symptoms) == 1:
        extra = rng.choice(EXTRAS) if failing > 1 else ""
        return "\n\n".join(filter(None, (_report(symptoms[0], rng), extra.format(n=failing))))
    items = ["\n  ".join(_report(item, rng).split("\n")) for item in symptoms]
    return "\n\n".join([rng.choice(HEADS), *(f"{number}. {text}" for number, text in enumerate(items, 1))])


def _report(symptom: Symptom, rng: Random) -> str:
    """Say what a symptom's call does and what it should do; with its code, if it is more than a call."""
    calls, after_code = WORDINGS["exception" if symptom.exception else "missing" if symptom.missing else "value"]
    expected, actual = (
        # in words
        value if value in ("true", "false") or value.startswith(("something ", "one of ")) else f"`{value}`"
        for value in (symptom.expected, symptom.actual)
    )
    if symptom.missing:
        instead = f"It should raise {symptom.missing}."
    elif symptom.code:
        instead = "It should not."
    else:
        instead = f"It should give {expected}." if symptom.expected else "It worked before."
    words = {
        "c": symptom.call,
        "w": expected,
        "o": actual,
        "e": symptom.exception or symptom.missing,
        "m": f": {symptom.message}" if symptom.message else "",
        "x": instead,
        "l": f"`{symptom.call}`" if symptom.call else "The last line",
    }
    if not symptom.code:
        return rng.choice(calls).format(**words)
    setup = " and ".join(f"`{name}`" for name in symptom.setup)
    come = "come" if len(symptom.setup) > 1 else "comes"
    note = f" ({setup} {come} from the setup of our tests.)" if setup else ""
    return f"{rng.choice(LEADS)}\n\n```python\n{symptom.code}\n```\n\n{after_code.format(**words)}{note}"


def write_feature(path: str, name: str, text: str, seed: str, examples: Sequence[Symptom] = ()) -> str:
    """Return the instruction for a missing feature, from the function's text as it was: its signature, its docstring, and up to
    two of `examples`. Empty if neither says anything."""
    node = function_of(text)
    assert node is not None
    documented = (ast.get_docstring(node) or "").strip()
    paragraphs = documented.split("\n\n")
    brief = " ".join(paragraphs[0].split())
    arguments = ast.unparse(node.args)
    call = f"{name}({arguments})" if len(arguments) <= MAX_QUOTE else f"{name}(…)"
    longer = documented if len(documented) <= 900 else "\n\n".join(paragraphs[:2])[:900].rstrip()
    results = {example.call: example.expected for example in examples if not example.code and example.expected}
    short_name = name.rpartition(".")[2]
    nearest = sorted(results, key=lambda call: short_name not in call)[:2]
    example_text = " and ".join(f"`{example}` should give `{results[example]}`" for example in nearest)
    if len(documented.split()) < SAYS and not example_text:
        return ""
    brief = brief if len(brief.split()) >= SAYS else longer
    styles = (
        f"implement `{call}` in {path}. {brief}",
        f"`{name}` in {path} only raises NotImplementedError. Please write it; this is what it should do:\n\n{longer}",
        f"We need `{call}` ({path}):\n\n{longer}",
        f"`{name}` in {path} is missing its implementation. {brief} The signature stays as it is.",
    )
    return Random(f"instruction {seed}").choice(styles) + (f"\n\nFor example, {example_text}." if example_text else "")


def passing_modules(files: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """Return the test modules among `files` that have tests of these keys, without those."""
    modules = [path for path in modules_of(keys) if path in files]
    return {path: without_tests(files[path], [key for key in keys if key.startswith(f"{path}::")]) for path in modules}


def without_tests(text: str, keys: Iterable[str]) -> str:
    """Return a test module without the functions of these keys."""
    layout = syntax.TextFormat.of(text)
    text = layout.plain(text)
    tree = syntax.parse(text)
    functions = (find(tree, key.rpartition("#")[0].split("::")[1:]) for key in keys)
    gone = {function for function in functions if function is not None}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and gone.issuperset(node.body)]
    alone = {function for node in classes for function in node.body}
    lines = text.split("\n")
    for node in sorted(gone, key=lambda node: -node.lineno):
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines[start - 1 : node.end_lineno] = [" " * node.col_offset + "pass"] if node in alone else []
    return layout.restore("\n".join(lines))
