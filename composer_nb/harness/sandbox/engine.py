"""The Docker Engine: a connection to it, and the containers on it that are known by a label.

A leaf, so that a journal of resources (`reap.py`) ends containers without the backend that makes them.
"""

import os
import time
from typing import Any

from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.sandbox.system.linux import patience

MARK = "composer_nb.mark"  # the label by which a container is distinguished from another one of its name
TIMEOUT_S = 60  # that an answer of the engine may take, more on a busy machine
REMOVAL_S = 30.0


class EngineUnreachable(SandboxUnavailable, OSError):
    """No Docker Engine answers; the message says what to do."""


def connect() -> Any:
    """Return a `docker.DockerClient`, to be closed, of the engine that DOCKER_HOST and the like name, else of this machine's.

    Raises EngineUnreachable. The package `docker` is an extra, so it is imported where it is used.
    """
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise EngineUnreachable("the backend docker needs a Python package: pip install 'docker>=7'") from error
    where = os.environ.get("DOCKER_HOST") or "/var/run/docker.sock"
    try:
        return docker.from_env(timeout=int(patience(TIMEOUT_S)))
    except DockerException as error:
        if "PermissionError" in str(error):
            advice = "join the group that may use it (sudo usermod -aG docker $USER) and log in again"
            raise EngineUnreachable(f"this user may not use the Docker Engine at {where}: {advice}") from error
        advice = "start it (sudo systemctl start docker), or install and start one (sudo scripts/docker_engine)"
        raise EngineUnreachable(f"no Docker Engine answers at {where}: {advice}") from error


def container_mark(client: Any, name: str) -> str | None:
    """Return the mark of the container that has this name; None when there is none. Raises OSError."""
    from docker.errors import APIError, NotFound

    try:
        return str(client.api.inspect_container(name)["Config"]["Labels"].get(MARK, ""))
    except NotFound:
        return None
    except APIError as error:
        raise OSError(f"the Docker Engine does not say what {name} is: {error.explanation}") from error


def remove_container(client: Any, name: str) -> None:
    """Kill what runs in a container and remove it, if it is there, and wait until it is gone. Raises OSError."""
    from docker.errors import APIError, NotFound

    deadline, problem = time.monotonic() + patience(REMOVAL_S), "it is still there"
    while time.monotonic() < deadline:
        try:
            client.api.remove_container(name, v=True, force=True)
            return
        except NotFound:
            return
        except APIError as error:  # as when somebody else is removing it
            problem = str(error.explanation)
        time.sleep(0.05)
    raise OSError(f"the Docker Engine did not remove {name} within {REMOVAL_S:g} s: {problem}")
