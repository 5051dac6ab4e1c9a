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

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pydantic
import yaml

from composer_nb.jobs.check import check_outputs, check_parameter, nearest, parameters_of

REFERENCE = re.compile(r"\$\{([\w.=+-]+?)\.(\w+)\}")
NAME = re.compile(r"[A-Za-z0-9][\w.=+-]*")
JOB, DIR = "job", "dir"
# Parameters that are paths. A notebook runs in its own folder; a path on the command line is relative to this one.
PATHS = ("run_dir", "runs", "first", "second")


class NodeFile(pydantic.BaseModel):
    """A node as written.

    Attributes:
        notebook: Path, from the job file's directory.
        grid: Parameter -> its values; as a dictionary, labels (for the nodes' names) -> values.
        outputs: Name -> variable of the notebook, dots allowed: `{run_dir: run.path}`.
        after: Nodes to wait for, beyond those that parameters refer to.
        timeout_s: Seconds for the notebook; `cell_timeout_s` for one cell.
        retries: Attempts after the first where the infrastructure failed (state `lost`); an exception in a cell is never retried.
        cpus: CPUs that Ray reserves; `gpus` likewise.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    notebook: str
    parameters: dict[str, Any] = {}
    grid: dict[str, list[Any] | dict[Any, Any]] = {}
    outputs: dict[str, str] = {}
    after: list[str] = []
    timeout_s: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)
    cell_timeout_s: int | None = pydantic.Field(default=None, gt=0)
    retries: int = pydantic.Field(default=1, ge=0)
    cpus: float = pydantic.Field(default=1, ge=0)
    gpus: float = pydantic.Field(default=0, ge=0)


class JobFile(pydantic.BaseModel):
    """A job file as written.

    Attributes:
        parallel: Notebooks at once; with Ray the cluster's resources decide as well.
        parameters: Parameters of every node whose notebook takes them and that does not set them itself. At least one node must
            take each.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = pydantic.Field(pattern=rf"^{NAME.pattern}$")
    about: str = ""
    parallel: int = pydantic.Field(default=1, ge=1)
    parameters: dict[str, Any] = {}
    nodes: dict[str, NodeFile] = pydantic.Field(min_length=1)


@dataclass(kw_only=True)
class Node:
    """One notebook to run, once for each point of a grid.

    Attributes:
        family: The name in the file, which the nodes of one grid share.
        types: Types of the notebook's parameters.
        parameters: With references still in them.
        dotted: Settings of the command line, on top of the `overrides` that the file or the grid gives.
        needs: Names of the nodes that must be completed before.
    """

    name: str
    family: str
    notebook: Path
    types: Mapping[str, type]
    parameters: dict[str, Any]
    spec: NodeFile
    dotted: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked graph, in an order in which it can be run."""

    name: str
    path: Path
    parallel: int
    nodes: dict[str, Node]


class _Problems(list[str]):
    """What is wrong with a job file, gathered so that one reading shows all of it."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error and go on behind the block."""
        try:
            yield
        except (ValueError, FileNotFoundError) as error:
            if str(error) not in self:
                self.append(str(error))

    def raise_all(self) -> None:
        if self:
            raise ValueError("\n".join(self if len(self) == 1 else [f"{len(self)} problems:", *self]))


def load_job(path: Path, settings: Mapping[str, str] | None = None) -> Job:
    """Read and check a job file; `settings` are those of `--set`.

    Each is `parameter=value`, for every node that takes it; `node:parameter=value`, for one; or a dotted setting
    (`rl.steps=20`), which goes into the `overrides` of every node that takes them. Raises FileNotFoundError without the file, and
    ValueError with a line for each problem: unknown names come with the nearest known one.
    """
    file, problems, families, nodes = _read(path), _Problems(), dict[str, Node](), dict[str, Node]()
    for name, spec in file.nodes.items():
        with problems.noted():
            families[name] = _node(path, name, spec, file.parameters)
    types = {name: kind for node in families.values() for name, kind in node.types.items()}
    for name in file.parameters:
        with problems.noted():
            if name not in types and len(families) == len(file.nodes):
                raise ValueError(f"no notebook of {file.name} has a parameter {name!r}; {nearest(name, types)}")
    for key, text in (settings or {}).items():
        with problems.noted():
            _set(key, text, families)
    for family in families.values():
        with problems.noted():
            for node in _expand(path, family):
                if nodes.setdefault(node.name, node) is not node:
                    raise ValueError(f"{path}: two nodes of a grid have the same name; label the grid's values")
    for node in nodes.values():
        for name, value in node.parameters.items():
            with problems.noted():
                _check(path, node, name, value, file.nodes)
        for source in node.spec.after:
            with problems.noted():
                if source not in file.nodes:
                    raise ValueError(f"{path}: {node.name}.after: no node {source!r}; {nearest(source, file.nodes)}")
    problems.raise_all()
    for node in nodes.values():
        families_read = {source for source, _ in references(node.parameters)} - {JOB, node.family} | {*node.spec.after}
        node.needs = tuple(needed.name for needed in nodes.values() if needed.family in families_read)
    try:
        order = [*TopologicalSorter({name: node.needs for name, node in nodes.items()}).static_order()]
    except CycleError as error:
        raise ValueError(f"{path}: nodes wait for one another in a circle: {' -> '.join(error.args[1])}") from None
    ordered = {name: nodes[name] for name in order}
    return Job(name=file.name, path=path.resolve(), parallel=file.parallel, nodes=ordered)


def name_of(path: Path) -> str:
    """Return the name in a job file. Raises like `load_job`."""
    return _read(path).name


def references(value: Any) -> list[tuple[str, str]]:
    """Return (node, output) of every reference in a value, however deep."""
    names = defaultdict[tuple[str, str], Any](str)
    resolve(value, names)
    return [*names]


def resolve(value: Any, outputs: Mapping[tuple[str, str], Any]) -> Any:
    """Return `value` with its references replaced."""
    if isinstance(value, str):
        if whole := REFERENCE.fullmatch(value):
            return outputs[whole[1], whole[2]]
        return REFERENCE.sub(lambda match: str(outputs[match[1], match[2]]), value)
    if isinstance(value, Mapping):
        return {key: resolve(inner, outputs) for key, inner in value.items()}
    return [resolve(inner, outputs) for inner in value] if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that names a key twice, of which YAML's loader would drop the first without a word; and takes 3e-6 for
    the number that it is, which YAML 1.1 does only with a dot."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value if key.value != "<<"]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def _read(path: Path) -> JobFile:
    """Read a job file. Raises FileNotFoundError without the file, and ValueError with a line for each problem."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such job file")
    if path.suffix == ".ipynb":
        raise ValueError(f"{path} is a notebook; jobs run takes a job file that names it")
    problems = _Problems()
    try:
        return JobFile.model_validate(yaml.load(path.read_text(encoding="utf-8"), _Loader))
    except pydantic.ValidationError as error:
        for problem in error.errors():
            keys = [str(part) for part in problem["loc"]]
            text = problem["msg"]
            if problem["type"] == "extra_forbidden":
                text = f"unknown; {nearest(keys[-1], (NodeFile if len(keys) > 1 else JobFile).model_fields)}"
            problems.append(f"{path}: {'.'.join(keys) or 'the file'}: {text}")
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    problems.raise_all()
    raise AssertionError("pydantic names what it refuses")


def _node(path: Path, name: str, spec: NodeFile, job_parameters: Mapping[str, Any]) -> Node:
    """Return a node with those of the job's parameters that its notebook takes, then its own. Raises ValueError for a name,
    output or parameter that it cannot have."""
    if not NAME.fullmatch(name) or name == JOB:
        raise ValueError(f"{path}: {name!r} cannot name a node: letters, digits, - and _, and not `job`")
    notebook = path.parent / spec.notebook
    check_outputs(notebook, spec.outputs)
    if DIR in spec.outputs:
        raise ValueError(f"{path}: {name}: every node has an output `dir` already; choose another name")
    if repeated_names := spec.grid.keys() & spec.parameters.keys():
        raise ValueError(f"{path}: {name}: {min(repeated_names)} is a parameter and in the grid; keep one of them")
    types = parameters_of(notebook)
    job_parameters = {key: value for key, value in job_parameters.items() if key in types and key not in spec.grid}
    node_fields: dict[str, Any] = {"name": name, "family": name, "notebook": notebook.resolve(), "spec": spec}
    return Node(**node_fields, types=types, parameters={**job_parameters, **spec.parameters})


def _set(key: str, text: str, nodes: Mapping[str, Node]) -> None:
    """Apply one `--set`: `key` is a parameter, `node:parameter` or a dotted setting, and `text` its value. A parameter that has
    a value is not varied by a grid. Raises ValueError for a node or parameter that does not exist."""
    node_name, colon, name = key.rpartition(":")
    if colon and node_name not in nodes:
        raise ValueError(f"--set {key}: no node {node_name!r}; {nearest(node_name, nodes)}")
    addressed_nodes = [nodes[node_name]] if colon else [*nodes.values()]
    accepting_nodes = [node for node in addressed_nodes if ("overrides" if "." in name else name) in node.types]
    if not accepting_nodes:
        types = {parameter: kind for node in addressed_nodes for parameter, kind in node.types.items()}
        raise ValueError(f"--set {key}: no notebook has a parameter {name!r}; {nearest(name, types)}")
    for node in accepting_nodes:
        if "." in name:
            node.dotted[name] = _typed(text, object)
        else:
            is_path = name in PATHS and text
            node.parameters[name] = str(Path(text).resolve()) if is_path else _typed(text, node.types[name])


def _typed(text: str, kind: type) -> Any:
    """Return text of the command line in the type of the notebook's annotation: `007` stays text where text is expected."""
    if kind is str:
        return text
    try:
        return kind(text) if kind in (int, float) else yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError):
        return text


def _expand(path: Path, node: Node) -> Iterator[Node]:
    """Yield one node per point of the grid, with the settings of the command line. Raises ValueError for an empty axis, for a
    label that no name can have, and for `overrides` that are no dictionary."""
    axes = []
    for name, values in node.spec.grid.items():
        if name in node.parameters:
            continue
        if not values:
            raise ValueError(f"{path}: {node.name}: grid.{name} is empty")
        labels = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
        labelled_values = zip(labels, values.values() if isinstance(values, dict) else values, strict=True)
        axes.append([(name, label, value) for label, value in labelled_values])
    for point in itertools.product(*axes):
        node_name = "-".join([node.name, *(f"{axis}={label}" for axis, label, _ in point)])
        if not NAME.fullmatch(node_name):
            raise ValueError(f"{path}: {node_name!r} is no name for a node; label the grid's values: {{label: value}}")
        parameters = node.parameters | {axis: value for axis, _, value in point}
        if node.dotted:
            overrides = parameters.get("overrides", {})
            if not isinstance(overrides, Mapping):
                raise ValueError(f"{path}: {node_name}.overrides={overrides!r} is no dictionary for --set to add to")
            parameters["overrides"] = {**overrides, **node.dotted}
        yield replace(node, name=node_name, parameters=parameters)


def _check(path: Path, node: Node, name: str, value: Any, node_files: Mapping[str, NodeFile]) -> None:
    """Check a parameter: its references, name and type. The type of a reference's value is checked when it is known. Raises
    ValueError for an unfit one."""
    if "${" in REFERENCE.sub("", json.dumps(value, default=str)):
        raise ValueError(f"{path}: {node.name}.{name}={value!r}: a reference is written ${{node.output}}")
    for family, output in references(value):
        if family != JOB and family not in node_files:
            raise ValueError(f"{path}: {node.name}.{name}: no node {family!r}; {nearest(family, node_files)}")
        is_own = family in (JOB, node.family)  # of itself a node knows only where it is
        outputs = {DIR: "", **({} if is_own else node_files[family].outputs)}
        if output not in outputs:
            raise ValueError(f"{path}: {node.name}: {family} has no output {output!r}; {nearest(output, outputs)}")
    is_text = isinstance(value, str) and not REFERENCE.fullmatch(value)
    if name not in node.types or is_text or not any(references(value)):
        check_parameter(node.notebook.name, node.types, name, value)
