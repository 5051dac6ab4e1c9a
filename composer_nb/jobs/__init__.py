"""Notebooks as jobs: one of them, or a graph, here or on a Ray cluster; with a record that can be believed.

`run_notebook` runs one notebook through papermill's API, `run_job` the graph that a job file describes. docs/jobs.md tells the
life of a node, the states, and how to run this from cron, Slurm and Kubernetes.

    records.py     files that are there whole or not at all
    processes.py   what a run started: found, spared, ended
    check.py       parameters, outputs and digests of a notebook, before a kernel starts
    cells.py       papermill's loop over the cells, with true states
    notebook.py    one notebook
    file.py        the job file: nodes, grids, references
    directory.py   what a run leaves on disk; status, cancel, sweep
    runner.py      the graph
    executor.py    its nodes as processes here
    on_ray.py      its nodes on a Ray cluster
    render.py      executed copies to read: a job of all notebooks, an index
    pages.py       one executed notebook as HTML
    commands.py    what the command line prints
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_nb.jobs.check import check_parameters, parameters_of
    from composer_nb.jobs.notebook import JobFailed, run_notebook, terminate_as_interrupt
    from composer_nb.jobs.runner import run_job

__all__ = ["JobFailed", "check_parameters", "parameters_of", "run_job", "run_notebook", "terminate_as_interrupt"]
_HOMES = {"check_parameters": "check", "parameters_of": "check", "run_job": "runner"}


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is: the last cell of each notebook imports this package, and needs none of it."""
    if name not in __all__:
        raise AttributeError(name)
    return getattr(import_module(f"composer_nb.jobs.{_HOMES.get(name, 'notebook')}"), name)
