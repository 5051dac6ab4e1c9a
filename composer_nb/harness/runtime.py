"""Where a task runs: what its settings ask of a sandbox, and a sandbox with its workspace ready.

`host-python` is the sandboxes' own interpreter and tools; every isolated backend has it. A task with an image runs on `docker`
alone, in an image derived from its own: the working directory's files lie ready to be copied into the workspace, which is in
memory, and a link stands in its place, so that scripts find things where they expect them. The rest of the image is read-only.

What can not be had here is a ValueError before anything starts, never a sandbox that lacks it: see `obstacles`. Stricter than
Harbor without saying so: no network where a task does not ask for one, one user, and the agent's work is carried into a new
sandbox, as a workspace, where Harbor may go on in the agent's.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from composer_nb.harness import harbor
from composer_nb.harness.calls import SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandboxes.contract import PLACES, WORKSPACE, Backend, Sandbox, SandboxSpec
from composer_nb.harness.task import Task

MIB = 1 << 20
PRISTINE = "/composer_nb/workspace"
"""In a derived image: what was in its working directory."""
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.S)


def obstacles(task: Task) -> list[str]:
    """What a task asks for that no sandbox here can give, each with the name of its setting."""
    told = task.settings
    place = told.environment
    network = {
        f"{name}.network_mode": table.network_mode
        for name, table in (("environment", place), ("agent", told.agent), ("verifier", told.verifier))
    }
    compose = [name for name in harbor.IMAGE_FILES[1:] if task.kept and f"environment/{name}" in task.kept.rest]
    return [
        *(f"{name} = {mode!r}: sandboxes have no network" for name, mode in network.items() if mode not in (None, "no-network")),
        *(f"environment/{name}: a sandbox is one container" for name in compose),
        *(["environment.gpus: sandboxes have none"] if place.gpus else []),
        *([f"environment.os = {place.os!r}: sandboxes run Linux"] if place.os.lower() != "linux" else []),
        *(["environment.mcp_servers: tools of a task's own are not supported"] if place.mcp_servers else []),
        *(["environment.healthcheck: services are not supported"] if place.healthcheck else []),
        *(["verifier.environment: a task has one image, which grading uses too"] if told.verifier.environment else []),
        *(["verifier.collect: only the workspace is carried into grading"] if told.verifier.collect else []),
        *(
            f"{name}.user = {table.user!r}: a sandbox has one user, who is not root"
            for name, table in (("agent", told.agent), ("verifier", told.verifier))
            if table.user not in (None, "agent")
        ),
        *(
            [f"environment.workdir = {place.workdir!r}: without an image it is {WORKSPACE}"]
            if place.workdir not in (None, WORKSPACE) and not task.image
            else []
        ),
        *(_unknown_variables(task)),
    ]  # fmt: skip


def _unknown_variables(task: Task) -> Iterator[str]:
    told = task.settings
    for name, table in (("environment", told.environment), ("verifier", told.verifier), ("solution", told.solution)):
        for key, value in table.env.items():
            found = _TEMPLATE.fullmatch(value)
            if found and found[2] is None:
                yield f"{name}.env.{key} = {value!r}: this machine's variables are not for sandboxes; give it a default"


def variables(table: Mapping[str, str]) -> dict[str, str]:
    """An `env` of task.toml for a command: templates become their defaults, whatever this machine's environment has."""
    found = {name: _TEMPLATE.fullmatch(value) for name, value in table.items()}
    return {name: match[2] or "" if (match := found[name]) else value for name, value in table.items()}


def spec_of(task: Task, backend: Backend) -> SandboxSpec:
    """The sandbox that a task asks for; on `docker` its image is built, if it is not there already.

    A workspace is in memory: `storage_mb` counts as far as `memory_mb` has room for it. Raises ValueError for what can not be had
    here, SandboxUnavailable for an image that can not be built.
    """
    if found := obstacles(task):
        raise ValueError(f"task {task.id}: {found[0]}")
    if backend.name == "process":
        raise ValueError(f"task {task.id}: the backend process isolates nothing and has no /tests: use bwrap or docker")
    if task.image and backend.name != "docker":
        raise ValueError(
            f"task {task.id}: needs an image (environment/Dockerfile or docker_image), which {backend.name} can not build: use "
            f"docker, or say runtime = {harbor.RUNTIME!r} in [metadata.composer_nb] if this machine's Python is enough"
        )
    asked, usual = task.settings.environment, SandboxSpec()
    memory = usual.memory_bytes if asked.memory_mb is None else max(asked.memory_mb, 128) * MIB
    disk = usual.disk_bytes if asked.storage_mb is None else asked.storage_mb * MIB
    return SandboxSpec(
        memory_bytes=memory,
        disk_bytes=min(disk, (memory - 64 * MIB) // 2),
        cpus=max(asked.cpus or usual.cpus, 0.01),
        image=_image(task) if task.image else "",
    )


def start(task: Task, backend: Backend) -> Sandbox:
    """A new sandbox with the task's workspace as it is at the start. Raises what `spec_of` does, and SandboxFailure."""
    made = backend.create(spec_of(task, backend))
    try:
        if task.image:
            done = made.exec(["cp", "-a", f"{PRISTINE}/.", "."])
            if done.exit_code:
                raise SandboxFailure(
                    f"task {task.id}: its image's files: {done.stderr[-300:].decode('utf-8', 'replace')}"
                )
        made.upload({path: text.encode() for path, text in task.files.items()})
    except OSError as error:
        made.destroy()
        raise SandboxFailure(f"task {task.id}: its workspace does not fit into a sandbox: {error}") from error
    except BaseException:
        made.destroy()
        raise
    return made


def _image(task: Task) -> str:
    """Name of the derived image."""
    from composer_nb.harness.sandboxes.engine import connect
    from composer_nb.harness.sandboxes.image import build_image

    assert task.kept is not None
    asked = task.settings.environment
    with contextlib.closing(connect()) as client, tempfile.TemporaryDirectory() as folder:
        base = asked.docker_image
        if base is None or "environment/Dockerfile" in task.kept.rest:
            held = harbor.layout(task)
            inside = {n: data for n, data in held.files.items() if n.startswith("environment/")}
            context = harbor.Directory(files=inside, executable=held.executable)
            base = build_image(client, harbor.write(context, Path(folder) / "task") / "environment")
        derived = Path(folder) / "derived"
        derived.mkdir()
        where = asked.workdir or client.api.inspect_image(base)["Config"].get("WorkingDir") or "/"
        if where == "/":
            raise SandboxUnavailable(
                f"task {task.id}: its image has no WORKDIR, and environment.workdir names none: name one"
            )
        (derived / "Dockerfile").write_text(_derived(base, where.rstrip("/")), encoding="utf-8")
        return build_image(client, derived)


def _derived(base: str, where: str) -> str:
    where = shlex.quote(where)
    links = " && ".join(f"rm -rf {place} && ln -s {target} {place}" for place, target in PLACES.items())
    workspace = f"rm -rf {where} && ln -s {WORKSPACE} {where}" if where != WORKSPACE else f"mkdir -p {WORKSPACE}"
    return (
        f"FROM {base}\nUSER root\nWORKDIR /\n"
        f"RUN mkdir -p {where} {PRISTINE} && cp -a {where}/. {PRISTINE} && chmod -R a+rX {PRISTINE} && {workspace} && {links}\n"
    )
