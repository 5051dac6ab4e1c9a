"""Notebooks as jobs: one of them, or a graph, here or on a Ray cluster.

`notebook.run_notebook` runs one notebook with parameters, `runner.run_job` the graph that a job file describes.
docs/jobs.md describes the life of a node, the states, and how to run this from cron, Slurm and Kubernetes.

    processes.py   signals, and the start of an attempt's process
    check.py       parameters, outputs and digest of a notebook, before a kernel starts
    notebook.py    one notebook, by papermill, with true states of its cells
    file.py        the job file: nodes, grids, references
    directory.py   a run's files; status, cancel, sweep
    runner.py      the graph, its nodes as processes here or on a Ray cluster
"""
