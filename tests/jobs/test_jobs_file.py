"""Job files: what is refused before anything starts, and what a graph becomes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_jobs import notebook

from composer_nb import cli
from composer_nb.harness.files import point, write_json
from composer_nb.jobs import runner
from composer_nb.jobs.file import Job, load_job, references, resolve
from composer_nb.jobs.runner import OnRay, Runner, run_job

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = "steps: int = 3\nname: str = 'a'\nscores: list = []\noverrides: dict = {}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cells = ["total = steps", "class Run: path = 1\nrun = Run()", "%matplotlib inline\n!true\ndef f():\n    hidden = 3"]
    notebook(tmp_path / "n.ipynb", *cells, parameters=PARAMETERS)
    notebook(tmp_path / "bad.ipynb", "1", parameters="steps: int = = 3")
    return tmp_path


def load(folder: Path, nodes: Any, settings: dict[str, str] | None = None, **top: Any) -> Job:
    path = folder / "job.yml"
    path.write_text(yaml.safe_dump({"name": "job", "nodes": nodes, **top}, sort_keys=False))
    return load_job(path, settings)


def node(**fields: Any) -> dict[str, Any]:
    return {"notebook": "n.ipynb", **fields}


TRAIN = node(outputs={"total": "total", "run_dir": "run.path"})


@pytest.mark.parametrize(
    "nodes, message",
    [
        ({"a": {"notebook": "gone.ipynb"}}, "gone.ipynb: no such notebook"),
        ({"a": node(timeouts=3)}, "nodes.a.timeouts: unknown; did you mean 'timeout_s'?"),
        ({"job": node()}, "'job' cannot name a node"),
        ({"a": node(parameters={"stepz": 1})}, "no parameter 'stepz'; did you mean 'steps'?"),
        ({"a": node(parameters={"steps": "1"})}, "steps='1' must be of type int"),
        ({"a": node(grid={"steps": [1, "2"]})}, "steps='2' must be of type int"),
        ({"a": node(grid={"steps": [1, 1]})}, "two nodes of a grid have the same name"),
        ({"a": node(grid={"overrides": [{}]})}, "label the grid's values"),
        ({"a": node(grid={"steps": [1]}, parameters={"steps": 1})}, "steps is a parameter and in the grid"),
        ({"train": TRAIN, "a": node(parameters={"name": "${ train.total }"})}, "a reference is written ${node.output}"),
        ({"a": {"notebook": "bad.ipynb"}}, "bad.ipynb: the parameters cell is not Python"),
        ({"a": node(outputs={"x": "totl"})}, "no cell sets 'totl'; did you mean 'total'?"),
        ({"train": TRAIN, "a": node(parameters={"steps": "${tran.total}"})}, "no node 'tran'; did you mean 'train'?"),
        ({"train": TRAIN, "a": node(parameters={"steps": "${train.total}0"})}, "must be of type int"),
        ({"a": node(after=["b"]), "b": node(after=["a"])}, "in a circle"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder: Path, nodes: Any, message: str):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(folder, nodes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_all_that_is_wrong_is_said_at_once(folder: Path):
    nodes = {
        "gone": {"notebook": "gone.ipynb"},
        "e": node(grid={"steps": []}),
        "f": node(parameters={"overrides": {"rl.stepz": 1, "rl.group": "many", "seed": 1}}),
    }
    with pytest.raises(ValueError) as caught:
        load(folder, nodes, {"nothing": "1", "g:steps": "1"})
    text = str(caught.value)
    assert text.startswith("5 problems:\n") and text.count("\n") == 5
    for part in (
        "gone.ipynb: no such notebook",
        "--set nothing: no notebook has a parameter 'nothing'",
        "--set g:steps: no node 'g'",
        "grid.steps is empty",
        "unknown setting 'rl.stepz'; did you mean 'rl.steps'?. rl.group='many'",
    ):
        assert part in text


def test_a_grid_becomes_nodes_and_references_become_needs(folder: Path):
    nodes = {
        "report": node(parameters={"scores": "${train.total}", "name": "from ${train.run_dir} in ${job.dir}"}),
        "train": {**TRAIN, "grid": {"steps": [1, 2], "overrides": {"plain": {}, "fast": {"rl.steps": 1}}}},
        "last": node(after=["report"]),
    }
    job = load(folder, nodes, parameters={"name": "all"})
    train = [f"train-steps={steps}-overrides={label}" for steps in (1, 2) for label in ("plain", "fast")]
    assert list(job.nodes) == [*train, "report", "last"] and {job.nodes[name].family for name in train} == {"train"}
    assert job.nodes["report"].needs == tuple(train) and job.nodes["last"].needs == ("report",)
    assert job.nodes[train[3]].parameters == {"name": "all", "steps": 2, "overrides": {"rl.steps": 1}}
    assert job.nodes["report"].parameters["name"].startswith("from ")  # its own wins over the job's


def test_set_reaches_those_who_take_it(folder: Path):
    notebook(folder / "m.ipynb", "1", parameters="size: float = 1.0")
    nodes = {"a": node(parameters={"steps": 1}), "b": node(grid={"steps": [1, 2]}), "m": {"notebook": "m.ipynb"}}
    job = load(folder, nodes, {"steps": "7", "b:name": "007", "rl.steps": "3", "size": "2"})
    assert {name: dict(job_node.parameters) for name, job_node in job.nodes.items()} == {
        "a": {"steps": 7, "overrides": {"rl.steps": 3}},
        "b": {"steps": 7, "name": "007", "overrides": {"rl.steps": 3}},
        "m": {"size": 2},
    }


def test_a_job_file_may_use_anchors_and_numbers_as_python_writes_them(folder: Path):
    notebook(folder / "r.ipynb", "1", parameters="rate: float = 1.0\nrun_dir: str = ''\noverrides: dict = {}")
    text = "name: job\nnodes:\n  a: &a {notebook: r.ipynb, timeout_s: 6e1}\n  b:\n    <<: *a\n    parameters: {rate: 3e-6}\n"
    (folder / "job.yml").write_text(text)
    nodes = load_job(folder / "job.yml", {"a:rl.lr": "1e-4", "a:run_dir": "some/run"}).nodes
    assert nodes["b"].parameters == {"rate": 3e-6} and nodes["b"].spec.timeout_s == 60
    assert nodes["a"].parameters == {"overrides": {"rl.lr": 1e-4}, "run_dir": str(Path("some/run").resolve())}
    (folder / "job.yml").write_text(text + "    parameters: {rate: 1.0}\n")
    with pytest.raises(ValueError, match="'parameters' stands twice"):
        load_job(folder / "job.yml")


def test_a_whole_reference_keeps_its_type():
    outputs = {("a", "n"): 3, ("a-x=1", "path"): "p"}
    value = {"n": "${a.n}", "text": "${a.n} of ${a-x=1.path}", "deep": [{"k": "${a.n}"}], "price": "$5 {a.n}"}
    assert set(references(value)) == set(outputs)
    assert resolve(value, outputs) == {"n": 3, "text": "3 of p", "deep": [{"k": 3}], "price": "$5 {a.n}"}


@pytest.mark.parametrize("path", sorted((ROOT / "papermill_jobs").glob("*.yml")), ids=lambda path: path.stem)
def test_the_job_files_that_ship_are_right(path: Path):
    job = load_job(path)
    assert job.name == path.stem and job.nodes
    assert all(job_node.spec.timeout_s for job_node in job.nodes.values())


def test_a_run_whose_record_is_damaged_is_neither_quietly_begun_anew_nor_swept(
    folder: Path, tmp_path: Path, capsys: Any
):
    load(folder, {"a": node()})
    runs = tmp_path / "runs"
    (runs / "job-1").mkdir(parents=True)
    (runs / "job-1" / "job.json").write_text("{")
    point(runs / "job", runs / "job-1")
    with pytest.raises(ValueError, match=r"job.json cannot be read: this run is lost"):
        run_job(folder / "job.yml", runs=runs, resume=True)
    assert {path.name for path in runs.iterdir()} == {"job", "job-1"}
    assert cli.main(["jobs", "sweep", "--runs", str(runs)]) == 1
    assert "job.json cannot be read: this run is lost" in capsys.readouterr().out


class DyingRay(OnRay):
    """A cluster that is lost when the first attempt has completed."""

    limit, gone = None, False

    def __init__(self) -> None: ...

    def start(self, attempt_file: Path, node: Any) -> Any:
        write_json(attempt_file.with_name("run.json"), {"state": "completed", "seconds": 1.0})
        return attempt_file

    def poll(self, handle: Any) -> str:
        self.gone = True
        return "Ray lost it: LocalRayletDiedError"

    def close(self) -> None: ...


def test_a_run_whose_cluster_is_gone_is_lost_though_nothing_failed(folder: Path, tmp_path: Path):
    job = load(folder, {"first": node(), "second": node(after=["first"])})
    summary = Runner(job, tmp_path / "run", DyingRay(), print, "").run()
    assert {name: state["state"] for name, state in summary["nodes"].items()} == {
        "first": "completed",
        "second": "pending",
    }
    assert summary["state"] == "lost", "its exit status must not be 0"


def test_a_run_that_was_refused_is_not_the_newest(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else `--resume` would begin anew what an earlier run has done. It goes on with the earlier run on that one's cluster."""

    def refuse(*_: Any) -> None:
        raise ValueError("no machine of the cluster has that")

    monkeypatch.setattr(runner, "OnRay", refuse)
    load(folder, {"a": node()})
    (earlier := tmp_path / "runs" / "job-earlier").mkdir(parents=True)
    point(tmp_path / "runs" / "job", earlier)
    with pytest.raises(ValueError, match="no machine"):
        run_job(folder / "job.yml", runs=tmp_path / "runs", ray="auto")
    assert (tmp_path / "runs" / "job").resolve() == earlier
    write_json(earlier / "job.json", {"settings": {}, "ray": "auto"})
    with pytest.raises(ValueError, match="no machine"):
        run_job(folder / "job.yml", runs=tmp_path / "runs", resume=True)
