"""A job file: which notebooks to run headless, with which parameters, in which order.

    name: nightly
    parallel: 1                          # notebooks at once; 1 without
    parameters: {seed: 0}                # for every notebook that takes them
    nodes:
      train:
        notebook: ../notebooks/05_rl_run.ipynb
        parameters: {runs: "${job.dir}/runs"}
        outputs: {run_dir: run.path}     # wanted of it: a name, and the notebook's variable
        timeout_s: 3600
      rewards:
        notebook: ../notebooks/04_reward_design.ipynb
        parameters: {run_dir: "${train.run_dir}"}    # makes it wait for train
        grid: {shuffles: [20, 200]}      # one node for each combination

A value that is one reference and nothing else keeps its type; in a longer text it becomes text. `${train.run_dir}` of a node
with a grid is the list over the grid, in order. Beside its outputs a node has `dir`, a directory of its own that its attempts
share; `${job.dir}` is the run's.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pydantic
import yaml

from composer_nb.harness.untrusted import visible
from composer_nb.jobs.check import check_outputs, check_parameters, check_type, nearest, parameters_of

REFERENCE = re.compile(r"\$\{([\w.=+-]+?)\.(\w+)\}")
NAME = re.compile(r"[A-Za-z0-9][\w.=+-]*")
JOB, DIR = "job", "dir"
MOST_MERGED = 10_000
"""Keys of a mapping, those that it merges included."""
MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`, which takes over what an anchor holds."""
PLACES = ("run_dir", "runs", "first", "second")
"""Parameters that are paths. A notebook runs in its own folder; a path on the command line is relative to this one."""


class NodeFile(pydantic.BaseModel):
    """A node as written."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    notebook: str
    """Path, from the job file's directory."""
    parameters: dict[str, Any] = {}
    grid: dict[str, list[Any] | dict[Any, Any]] = {}
    """Parameter -> its values; as a dictionary, labels (for the nodes' names) -> values."""
    outputs: dict[str, str] = {}
    """Name -> variable of the notebook, dots allowed: `{run_dir: run.path}`."""
    after: list[str] = []
    """Nodes to wait for, beyond those that parameters refer to."""
    timeout_s: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds for the notebook."""
    cell_timeout_s: int | None = pydantic.Field(default=None, gt=0)
    """Seconds for one cell."""
    retries: int = pydantic.Field(default=1, ge=0)
    """Attempts after the first where the infrastructure failed (state `lost`); an exception in a cell is never retried."""
    cpus: float = pydantic.Field(default=1, ge=0)
    """CPUs that Ray reserves."""
    gpus: float = pydantic.Field(default=0, ge=0)


class JobFile(pydantic.BaseModel):
    """A job file as written."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = pydantic.Field(pattern=rf"^{NAME.pattern}$")
    about: str = ""
    parallel: int = pydantic.Field(default=1, ge=1)
    """Notebooks at once; with Ray the cluster's resources decide as well."""
    parameters: dict[str, Any] = {}
    """Parameters of every node whose notebook takes them and that does not set them itself. At least one node must take each."""
    nodes: dict[str, NodeFile] = pydantic.Field(min_length=1)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One notebook to run, once for each point of a grid."""

    name: str
    family: str
    """The name in the file, which the nodes of one grid share."""
    notebook: Path
    parameters: Mapping[str, Any]
    """With references still in them."""
    spec: NodeFile
    needs: tuple[str, ...]
    """Names of the nodes that must be completed before."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked graph, in an order in which it can be run."""

    name: str
    path: Path
    parallel: int
    nodes: dict[str, Node] = field(default_factory=dict)

    def family(self, name: str) -> list[str]:
        return [node.name for node in self.nodes.values() if node.family == name]


def load_job(path: Path, settings: Mapping[str, str] | None = None) -> Job:
    """Read and check a job file; `settings` are those of `--set`.

    Each is `parameter=value`, for every node that takes it; `node:parameter=value`, for one; or a dotted setting
    (`rl.steps=20`), which goes into the `overrides` of every node that takes them. Raises FileNotFoundError or ValueError, with
    a line for each problem: unknown names come with the nearest known one.
    """
    written, problems = _read(path), _Problems()
    drafts: dict[str, _NodeDraft] = {}
    for name, node_file in written.nodes.items():
        with problems.noted():
            drafts[name] = _draft(path, name, node_file, written.parameters)
    everything = {name: kind for draft in drafts.values() for name, kind in draft.known.items()}
    for name in written.parameters:
        with problems.noted():
            if name not in everything and len(drafts) == len(written.nodes):
                raise ValueError(f"no notebook of {written.name} has a parameter {name!r}; {nearest(name, everything)}")
    for key, text in (settings or {}).items():
        with problems.noted():
            _set(key, text, drafts)
    families: dict[str, list[Node]] = {}
    for name, draft in drafts.items():
        with problems.noted():
            families[name] = list(_expand(path, name, draft))
    nodes = {node.name: node for family in families.values() for node in family}
    with problems.noted():
        if len(nodes) < sum(map(len, families.values())):
            raise ValueError(f"{path}: two nodes of a grid have the same name; label its values: {{label: value}}")
    for node in nodes.values():
        for name, value in node.parameters.items():
            with problems.noted():
                _check(path, node, name, value, drafts[node.family].known, written)
        for source in node.spec.after:
            with problems.noted():
                if source not in written.nodes:
                    raise ValueError(f"{path}: {node.name}.after: no node {source!r}; {nearest(source, written.nodes)}")
    problems.raise_all()
    return Job(name=written.name, path=path.resolve(), parallel=written.parallel, nodes=_ordered(path, nodes, families))


class _Problems:
    """What is wrong with a job file, gathered so that one reading shows all of it."""

    def __init__(self) -> None:
        self.errors: dict[str, ValueError | FileNotFoundError] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error and go on behind the block."""
        try:
            yield
        except (ValueError, FileNotFoundError) as error:
            self.errors.setdefault(str(error), error)

    def raise_all(self) -> None:
        if len(self.errors) == 1:
            raise next(iter(self.errors.values()))
        if self.errors:
            raise ValueError("\n".join([f"{len(self.errors)} problems:", *self.errors]))


def name_of(path: Path) -> str:
    """Return the name in a job file. Raises like `load_job`."""
    return _read(path).name


def references(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (node, output) of every reference in a value, however deep."""
    if isinstance(value, str):
        yield from ((node, output) for node, output in REFERENCE.findall(value))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def resolve(value: Any, found: Mapping[tuple[str, str], Any]) -> Any:
    """Return `value` with its references replaced."""
    if isinstance(value, str):
        if whole := REFERENCE.fullmatch(value):
            return found[whole[1], whole[2]]
        return REFERENCE.sub(lambda match: str(found[match[1], match[2]]), value)
    if isinstance(value, Mapping):
        return {key: resolve(inner, found) for key, inner in value.items()}
    return [resolve(inner, found) for inner in value] if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that names a key twice, of which YAML's loader would drop the first without a word; and takes 3e-6 for
    the number that it is, which YAML 1.1 does only with a dot."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what `<<` names. Merges of merges multiply, so their size has a limit."""
        super().flatten_mapping(node)
        if len(node.value) > MOST_MERGED:
            raise yaml.constructor.ConstructorError(None, None, "merges too much by `<<`", node.start_mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value if key.tag != MERGE]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def _yaml(text: str) -> Any:
    """Read YAML. Raises ValueError if it is malformed."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(visible(" ".join(str(error).split()))) from None


def _read(path: Path) -> JobFile:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such job file")
    if path.suffix == ".ipynb":
        raise ValueError(f"{path} is a notebook; jobs run takes a job file that names it")
    try:
        return JobFile.model_validate(_yaml(path.read_text(encoding="utf-8")))
    except pydantic.ValidationError as error:
        problems = _Problems()
        for problem in error.errors():
            keys = [str(part) for part in problem["loc"]]
            model = NodeFile if len(keys) > 1 else JobFile
            unknown = problem["type"] == "extra_forbidden"
            text = f"unknown; {nearest(keys[-1], model.model_fields)}" if unknown else problem["msg"]
            with problems.noted():
                raise ValueError(f"{path}: {'.'.join(keys) or 'the file'}: {text}") from None
        problems.raise_all()
        raise
    except ValueError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None


@dataclass(kw_only=True)
class _NodeDraft:
    """A node while settings of the command line are applied to it."""

    node: NodeFile
    known: Mapping[str, type]
    """Parameters of its notebook."""
    given: dict[str, Any]
    axes: dict[str, Any]
    dotted: dict[str, Any] = field(default_factory=dict)
    """Settings on top of the `overrides` that the file or the grid gives."""


def _draft(path: Path, name: str, node: NodeFile, common: Mapping[str, Any]) -> _NodeDraft:
    """Return a node with the job's parameters, then its own."""
    if not NAME.fullmatch(name) or name == JOB:
        raise ValueError(f"{path}: {name!r} cannot name a node: letters, digits, - and _, and not `job`")
    notebook = path.parent / node.notebook
    check_outputs(notebook, node.outputs)
    if DIR in node.outputs:
        raise ValueError(f"{path}: {name}: every node has an output `dir` already; choose another name")
    known = parameters_of(notebook)
    given = {key: value for key, value in common.items() if key in known and key not in node.grid} | node.parameters
    return _NodeDraft(node=node, known=known, given=given, axes=dict(node.grid))


def _set(key: str, text: str, drafts: Mapping[str, _NodeDraft]) -> None:
    """Apply one `--set`. A parameter that a grid varies is no longer varied."""
    node, colon, name = key.rpartition(":")
    if colon and node not in drafts:
        raise ValueError(f"--set {key}: no node {node!r}; {nearest(node, drafts)}")
    chosen = [drafts[node]] if colon else list(drafts.values())
    takers = [draft for draft in chosen if ("overrides" if "." in name else name) in draft.known]
    if not takers:
        names = {each: kind for draft in chosen for each, kind in draft.known.items()}
        raise ValueError(f"--set {key}: no notebook has a parameter {name!r}; {nearest(name, names)}")
    for draft in takers:
        if "." in name:
            draft.dotted[name] = _typed(text, object)
            continue
        is_path = name in PLACES and text
        draft.given[name] = str(Path(text).resolve()) if is_path else _typed(text, draft.known[name])
        draft.axes.pop(name, None)


def _typed(text: str, wanted: type) -> Any:
    """Return text of the command line in the type of the notebook's annotation: `007` stays text where text is wanted."""
    if wanted is str:
        return text
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            return text
    try:
        return _yaml(text)
    except ValueError:
        return text


def _expand(path: Path, family: str, draft: _NodeDraft) -> Iterator[Node]:
    """Yield one node per point of the grid."""
    node = draft.node
    choices = []
    for name, values in draft.axes.items():
        if not values:
            raise ValueError(f"{path}: {family}: grid.{name} is empty")
        if name in node.parameters:
            raise ValueError(f"{path}: {family}: {name} is a parameter and in the grid; keep one of them")
        labelled = values.items() if isinstance(values, Mapping) else ((_label(value), value) for value in values)
        choices.append([(name, str(label), value) for label, value in labelled])
    for point in itertools.product(*choices):
        name = "-".join([family, *(f"{axis}={label}" for axis, label, _ in point)])
        if not NAME.fullmatch(name):
            raise ValueError(f"{path}: {name!r} is no name for a node; label the grid's values: {{label: value}}")
        parameters = {**draft.given, **{axis: value for axis, _, value in point}}
        if draft.dotted:
            written = parameters.get("overrides", {})
            if not isinstance(written, Mapping):
                raise ValueError(f"{path}: {name}.overrides={written!r} is no dictionary that --set could add to")
            parameters["overrides"] = {**written, **draft.dotted}
        notebook = (path.parent / node.notebook).resolve()
        yield Node(name=name, family=family, notebook=notebook, parameters=parameters, spec=node, needs=())


def _label(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check(path: Path, node: Node, name: str, value: Any, types: Mapping[str, type], written: JobFile) -> None:
    """Check a parameter: its name, references and type. The type of a reference's value is checked when it is known."""
    if name not in types:
        raise ValueError(f"{node.notebook.name} has no parameter {name!r}; {nearest(name, types)}")
    if "${" in REFERENCE.sub("", json.dumps(value)):
        raise ValueError(f"{path}: {node.name}.{name}={value!r}: a reference is written ${{node.output}}")
    for source, output in references(value):
        if source != JOB and source not in written.nodes:
            raise ValueError(f"{path}: {node.name}.{name}: no node {source!r}; {nearest(source, written.nodes)}")
        is_own = source in (JOB, node.family)  # of itself a node knows only where it is
        outputs = {DIR: "", **({} if is_own else written.nodes[source].outputs)}
        if output not in outputs:
            raise ValueError(f"{path}: {node.name}: {source} has no output {output!r}; {nearest(output, outputs)}")
    if not list(references(value)):
        check_parameters(node.notebook, {name: value})
    elif isinstance(value, str) and not REFERENCE.fullmatch(value):
        check_type(node.notebook.name, name, value, types[name])


def _ordered(path: Path, nodes: Mapping[str, Node], families: Mapping[str, list[Node]]) -> dict[str, Node]:
    """Return the nodes in an order in which they can run, with their needs. Raises ValueError for a cycle."""
    needs: dict[str, tuple[str, ...]] = {}
    for node in nodes.values():
        wanted = [source for source, output in references(dict(node.parameters)) if source not in (JOB, node.family)]
        wanted += node.spec.after
        needs[node.name] = tuple(dict.fromkeys(each.name for source in wanted for each in families[source]))
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise ValueError(f"{path}: nodes wait for one another in a circle: {' -> '.join(error.args[1])}") from None
    rank = {name: place for place, name in enumerate(order)}
    return {name: replace(nodes[name], needs=needs[name]) for name in sorted(nodes, key=rank.__getitem__)}
