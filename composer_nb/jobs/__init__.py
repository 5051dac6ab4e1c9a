"""Notebooks as jobs: one of them, or a graph, here or on a Ray cluster.

`notebook.run_notebook` runs one notebook with parameters, `runner.run_job` the graph that a job file describes.
docs/jobs.md describes the life of a node, the states, and how to run this from cron, Slurm and Kubernetes.

    records.py     atomic records
    processes.py   processes that a run started: found, spared, ended
    check.py       parameters, outputs and digest of a notebook, before a kernel starts
    cells.py       the loop over the cells, with true states
    notebook.py    one notebook
    file.py        the job file: nodes, grids, references
    directory.py   a run's files; status, cancel, sweep
    runner.py      the graph
    executor.py    its nodes as processes here
    on_ray.py      its nodes on a Ray cluster
"""
