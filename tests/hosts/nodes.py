"""Ray nodes on hosts, and runs that are sent to them."""

import json
from pathlib import Path
from typing import Any

from network import HOME, Host, Network, ObjectStore

from composer_nb.trainer.recipe.launch import fork
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import from_dict, override

RUN = ("python", "-m", "composer_nb.trainer.services.run")
UP = ("python", "-P", "-m", "composer_nb.cli", "up", "node")
START_S = 300.0
TOKEN = ".ray/auth_token"


def start_head(network: Network, store: ObjectStore, name: str) -> Host:
    host = network.host(name)
    host.run(*UP, "--host", host.address, seconds=START_S, env=store.environment)
    return host


def address_of(head: Host) -> str:
    return str(json.loads(head.run("cat", "node/head.json"))["address"])


def join(host: Host, head: Host, store: ObjectStore, roles: str) -> None:
    """Have a host join a head as a node, with the head's token. It is a region, with a relay, of its own."""
    host.run("sh", "-c", f"umask 77; mkdir -p .ray; printf %s $TOKEN > {TOKEN}", env={"TOKEN": head.run("cat", TOKEN)})
    options = f"--join {address_of(head)} --host {host.address} --roles {roles} --relay {host.address}:8700"
    host.run(*UP, *options.split(), seconds=START_S, env=store.environment)


def send_run(source: RunDir, head: Host, store: ObjectStore, runs: Path, changes: dict[str, Any]) -> str:
    """Send a fork of a run, which is about to begin RL, to a head, and return its path there."""
    changes |= {
        "services.on": True, "services.address": f"{HOME}/node", "services.store": store.url, "rl.prompts": 2,
        "rl.max_seconds": 0.0, "rl.evaluate_every": 0,
    }  # fmt: skip
    run = fork(source, override(from_dict(source.settings()), changes), runs=runs, name="far")
    head.send(run.path, f"{HOME}/{run.path.name}")
    return f"{HOME}/{run.path.name}"
