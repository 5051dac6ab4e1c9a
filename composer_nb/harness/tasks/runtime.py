"""Start a task's sandbox, with the resources that the task requests and its workspace.

`host-python` is the sandboxes' own interpreter and tools; every isolated backend has it. A task with an image runs on `docker`
alone, in an image derived from its own. There, the files of the working directory are ready to be copied into the workspace,
which is in memory, and a link replaces the directory, so that scripts find their files. The rest of the image is read-only.

If no sandbox here can meet a task's requests, ValueError is raised before anything starts (`obstacles`). Some defaults are
stricter than Harbor's: no network but the hosts of `env.egress`, one user, and the agent's workspace and artifacts are carried
into a new sandbox for grading.
"""

import contextlib
import errno
import hashlib
import json
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from composer_nb.harness.sandbox.contract import PLACES, WORKSPACE, Backend, Sandbox, SandboxSpec, archive_of, members
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.tasks import harbor
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import is_plain, read_file, visible, walk

MIB = 1 << 20
# Metadata keys of the folder of installed packages for a task's tests, and of its digest.
PACKAGES, PACKAGES_DIGEST = "packages", "packages.sha256"
PACKAGES_AT = "/tmp/packages"
# Empty file in a folder of packages, with which its owner lets tasks bring the folder into sandboxes.
ALLOWED = "composer_nb.packages"
MAX_PACKAGES_BYTES = 32 << 20
MAX_PACKAGES_FILES = 20_000
_UNPACK = """\
import os, sys, tarfile
os.makedirs(sys.argv[1], exist_ok=True)
for member in (archive := tarfile.open(fileobj=sys.stdin.buffer, mode="r|")):
    member.mode = int(sys.argv[2])
    archive.extract(member, sys.argv[1])
"""
PACK_BYTES = 16 << 20  # Maximum size of an archive of artifacts.
_PACK = """\
import fnmatch, json, os, sys, tarfile
asked, writable, reserved = json.loads(sys.argv[1])
def inside(path, folders):
    return any((path + "/").startswith(folder + "/") for folder in folders)
def pack(archive, path, exclude):
    real = os.path.realpath(path)
    place = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    names = (os.path.basename(path), path, path[1:])
    if not inside(real, writable) or inside(place, reserved) or any(fnmatch.fnmatch(n, e) for n in names for e in exclude):
        return
    if os.path.isdir(path) and not os.path.islink(path):
        for name in sorted(os.listdir(path)):
            pack(archive, os.path.join(path, name), exclude)
    elif os.path.isfile(real):
        info = tarfile.TarInfo(place)
        try:
            file = open(real, "rb")
        except OSError:
            return
        with file:
            info.size = os.fstat(file.fileno()).st_size
            archive.addfile(info, file)
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
    for source, exclude in asked:
        pack(archive, source, exclude)
"""
_REAL = "import os, sys; print(*map(os.path.realpath, sys.argv[1:]), sep='\\0', end='\\0')"
_WRITABLE = ("/tmp", "/dev/shm")
# Places of the verifier's own files. Nothing that an agent left there reaches its grade.
_RESERVED = ("/tmp/tests", "/tmp/solution", "/tmp/logs/verifier")
# Lines of a Dockerfile without effect in a sandbox with this machine's Python and pytest.
_NO_EFFECT = re.compile(
    r"((FROM|CMD|ENTRYPOINT|LABEL|EXPOSE|MAINTAINER|STOPSIGNAL|HEALTHCHECK)( .*)?"
    r"|WORKDIR (/|/workspace/?)|COPY workspace/? (\.|/workspace)/?"
    r"|RUN (python3? -m )?pip3? install( -[\w-]+)* pytest([=<>~!]=?[\w.]+)?)"
)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.S)


def needs_network(task: Task) -> str:
    """Return the setting by which a task asks for a network; empty if none does."""
    if task.kept is None:
        return ""
    settings = task.settings
    if settings.environment.allow_internet:
        return "environment.allow_internet = true"
    modes = settings.environment.network_mode, settings.agent.network_mode, settings.verifier.network_mode
    named = zip(("environment", "agent", "verifier"), modes, strict=True)
    return next((f"{name}.network_mode = {mode!r}" for name, mode in named if mode not in (None, "no-network")), "")


def obstacles(task: Task, egress: bool = False) -> Iterator[str]:
    """Name the requests of a task that no sandbox here can meet, each by its setting. `egress`: sandboxes may have a network."""
    settings = task.settings
    environment, verifier = settings.environment, settings.verifier
    network = "" if egress else needs_network(task)
    rest = task.kept.rest if task.kept else {}
    checks: list[tuple[object, str]] = [
        (network, f"{network}: sandboxes have no network; list the hosts that it may reach in env.egress, as HOST:PORT"),
        *((f"environment/{name}" in rest, f"environment/{name}: a sandbox is one container") for name in harbor.IMAGE_FILES[1:]),
        (environment.gpus, "environment.gpus: sandboxes have none"),
        (environment.os.lower() != "linux", f"environment.os = {environment.os!r}: sandboxes run Linux"),
        (environment.mcp_servers, "environment.mcp_servers: tools of a task's own are not supported"),
        (environment.healthcheck, "environment.healthcheck: services are not supported"),
        (verifier.environment, "verifier.environment: a task has one image, which grading uses too"),
        (verifier.collect, "verifier.collect: only the workspace and artifacts are carried into grading"),
        *(
            (user not in (None, "agent"), f"{name}.user = {user!r}: a sandbox has one user, who is not root")
            for name, user in (("agent", settings.agent.user), ("verifier", verifier.user))
        ),
        (
            environment.workdir not in (None, WORKSPACE) and not task.image,
            f"environment.workdir = {environment.workdir!r}: without an image it is {WORKSPACE}",
        ),
    ]  # fmt: skip
    yield from (text for wrong, text in checks if wrong)
    folders = (WORKSPACE, "/logs", *_WRITABLE, *filter(None, [environment.workdir]))
    for artifact in settings.carried[1:]:  # that no agent here can write, or no grader reads
        if artifact.service not in (None, "main"):
            yield f"artifacts: service = {artifact.service!r}: a sandbox is one container"
        elif artifact.source.startswith("/") and not _within(artifact.source, folders) and not task.image:
            yield f"artifacts: {artifact.source!r}: a sandbox can write {', '.join(folders)} alone"
        elif task.grader != "script" and _within(artifact.source, folders[1:]):
            yield f"artifacts: {artifact.source!r}: the grader {task.grader!r} reads the workspace alone"
    if task.grader == "script" and not task.image:
        text = rest.get("environment/Dockerfile", b"").decode("utf-8", "replace")
        plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        for line in re.sub(r"\\[ \t]*\n", " ", plain).split("\n"):
            word, *words = line.split() or [""]
            if word and not _NO_EFFECT.fullmatch(line := " ".join([word.upper(), *words])):
                yield f"environment/Dockerfile: {visible(line[:80])}: needs an image, so remove runtime = {harbor.RUNTIME!r}"
    for name, table in (("environment", environment), ("verifier", verifier), ("solution", settings.solution)):
        for key, value in table.env.items():
            if (template := _TEMPLATE.fullmatch(value)) and template[2] is None:
                yield f"{name}.env.{key} = {value!r}: this machine's variables are not for sandboxes; give it a default"


def variables(table: Mapping[str, str]) -> dict[str, str]:
    """Return an `env` of task.toml for a command. Templates become their defaults, never this machine's variables."""
    templates = {name: _TEMPLATE.fullmatch(value) for name, value in table.items()}
    return {name: match[2] or "" if (match := templates[name]) else value for name, value in table.items()}


def limits_spec(task: Task) -> SandboxSpec:
    """Return the sandbox of a task's agent and of its tests, with the limits that the task states, else usual ones. The packages
    of an image take more memory than the standard library.

    A workspace is in memory, so `storage_mb` counts only within `memory_mb`.
    """
    image, usual = task.metadata.get("image", ""), SandboxSpec()
    environment = task.settings.environment if task.kept else harbor.HarborEnvironment()
    memory = 2 << 30 if image else usual.memory_bytes
    memory = memory if environment.memory_mb is None else max(environment.memory_mb, 128) * MIB
    disk = usual.disk_bytes if environment.storage_mb is None else environment.storage_mb * MIB
    return SandboxSpec(
        image=image,
        memory_bytes=memory,
        disk_bytes=min(disk, (memory - 64 * MIB) // 2),
        cpus=max(environment.cpus or usual.cpus, 0.01),
    )


def spec_of(task: Task, backend: Backend) -> SandboxSpec:
    """Return the specification of a task's sandbox; on `docker`, build a missing image.

    Raises ValueError for requests that no sandbox here can meet, and SandboxUnavailable for an image that cannot be built.
    """
    if problem := next(obstacles(task, bool(backend.egress)), ""):
        raise ValueError(f"task {task.id}: {problem}")
    named = task.metadata.get("image", "")
    if named and backend.name != "docker":
        why = f"its tests run in the image {named}, which {backend.name} does not have: use docker"
        raise ValueError(f"task {task.id}: {why}")
    if task.image and backend.name != "docker":
        raise ValueError(
            f"task {task.id}: needs an image (environment/Dockerfile or docker_image), which {backend.name} cannot build: use "
            f"docker, or say runtime = {harbor.RUNTIME!r} in [metadata.composer_nb] if this machine's Python with pytest is "
            "enough"
        )
    egress = backend.egress if needs_network(task) else ()
    image = _image(task) if task.image else named
    return replace(limits_spec(task), image=image, warm=task.grader == "pytest", egress=egress)


def start_sandbox(task: Task, backend: Backend) -> Sandbox:
    """Return a new sandbox with the task's initial workspace and, at PACKAGES_AT, its packages; the caller destroys it.

    Raises like `spec_of`; ValueError also for packages or artifacts that do not fit the task; SandboxFailure if the files cannot
    be written, SandboxDied if the sandbox ends.
    """
    sandbox = backend.create(spec_of(task, backend))
    try:
        if task.image:
            result = sandbox.exec(["cp", "-a", f"{harbor.PRISTINE}/.", "."])
            if result.exit_code:
                raise SandboxFailure(
                    f"task {task.id}: its image's files cannot be copied: {result.stderr[-300:].decode('utf-8', 'replace')}"
                )
            _check_artifacts(task, sandbox)
        sandbox.upload(workspace(task))
        if packages := packages_of(task):
            bring(sandbox, packages, PACKAGES_AT)
    except OSError as error:
        sandbox.destroy()
        raise SandboxFailure(f"task {task.id}: its workspace does not fit into a sandbox: {error}") from error
    except BaseException:
        sandbox.destroy()
        raise
    return sandbox


def workspace(task: Task) -> dict[str, bytes]:
    """Return a task's initial workspace, without the files of an image."""
    return {path: text.encode() for path, text in task.files.items()}


def packages_of(task: Task) -> Mapping[str, bytes]:
    """Return the installed packages for a task's tests. Raises ValueError if they are missing or changed, or if the folder was
    not allowed here, because a foreign task may name any folder."""
    folder = task.metadata.get(PACKAGES, "")
    if not folder:
        return {}
    if Path(folder).exists() and not (Path(folder) / ALLOWED).is_file():
        raise ValueError(f"task {task.id}: {visible(folder)} lacks {ALLOWED}, which `tasks make --packages` writes")
    packages = read_packages(Path(folder))
    if packages_digest(packages) != task.metadata.get(PACKAGES_DIGEST):
        raise ValueError(f"task {task.id}: the packages in {folder} are missing or not those that it was made with")
    return packages


def allow_packages(folder: Path) -> None:
    """Let tasks bring a folder of packages into sandboxes. Raises ValueError if it cannot be written."""
    try:
        (folder / ALLOWED).touch()
    except OSError as error:
        raise ValueError(f"--packages {folder}: cannot write {ALLOWED} ({error.strerror})") from None


@lru_cache(maxsize=4)
def read_packages(folder: Path) -> Mapping[str, bytes]:
    """Return the files below a folder of packages, cached. Raises ValueError above the limits, because a foreign task may name
    any folder."""
    packages: dict[str, bytes] = {}
    left = 2 * MAX_PACKAGES_BYTES  # with bytecode
    for path in (path for path, reason in walk(folder, lambda path: "") if not reason and path != ALLOWED):
        size = (folder / path).lstat().st_size
        left -= size
        if left < 0 or len(packages) >= MAX_PACKAGES_FILES:
            raise ValueError(f"{visible(str(folder))}: holds more than packages that a task's tests need")
        packages[path] = read_file(folder / path, size)  # no more than its stated size: some files are endless
    return dict(sorted(packages.items()))


def packages_digest(packages: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of paths and contents."""
    digest = hashlib.sha256()
    for path, data in sorted(packages.items()):
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def bring(box: Sandbox, files: Mapping[str, bytes], at: str, mode: int = 0o644) -> None:
    """Write files to a folder outside the workspace. Raises OSError if they do not fit."""
    result = box.exec(["python3", "-I", "-S", "-c", _UNPACK, at, str(mode)], stdin=archive_of(files))
    if result.exit_code:
        raise OSError(result.stderr[-300:].decode("utf-8", "replace"))


def artifacts_left(task: Task, box: Sandbox) -> dict[str, bytes]:
    """Return what an agent left outside its workspace for its grade, by absolute path. Raises OSError for more than can be
    carried, and SandboxFailure for what no sandbox sends."""
    if task.grader != "script":
        return {}
    sources = [(artifact.source, artifact.exclude) for artifact in task.settings.carried]
    program = ["python3", "-I", "-S", "-c", _PACK, json.dumps([sources, _WRITABLE, _RESERVED])]
    result = box.exec(program, output_bytes=PACK_BYTES, granted=True)
    if result.exit_code or result.truncated:
        last = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise OSError(errno.EFBIG, f"artifacts: {visible(last[:200]) or 'too large'}")
    return {f"/{info.name.lstrip('/')}": data for info, data in members(result.stdout) if info.isreg()}


def lay_artifacts(box: Sandbox, files: Mapping[str, bytes]) -> bool:
    """Write what `artifacts_left` returned into a sandbox, and return whether all of it has a place there. What begins with `#!`
    becomes executable. Raises OSError if it does not fit."""
    outside = {path[1:]: data for path, data in files.items() if path.startswith("/")}
    fit = {path: data for path, data in outside.items() if is_plain(path) and _within(f"/{path}", _WRITABLE)}
    fit = {path: data for path, data in fit.items() if not _within(f"/{path}", _RESERVED)}
    for mode, script in ((0o644, False), (0o755, True)):
        if some := {path: data for path, data in fit.items() if data.startswith(b"#!") == script}:
            bring(box, some, "/", mode)
    return len(fit) == len(outside)


def _within(path: str, folders: Iterable[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)


def _check_artifacts(task: Task, box: Sandbox) -> None:
    """Raise ValueError if a task with an image names artifacts that its agent cannot write."""
    sources = [artifact.source for artifact in task.settings.carried]
    result = box.exec(["python3", "-I", "-S", "-c", _REAL, *sources])
    for source, real in zip(sources, result.stdout.decode("utf-8", "replace").split("\0"), strict=False):
        if not _within(real, (WORKSPACE, *_WRITABLE)):
            raise ValueError(f"task {task.id}: artifacts: {source!r}: an agent writes its workspace, /tmp and /logs")


def _image(task: Task) -> str:
    """Build the derived image and return its name."""
    from composer_nb.harness.sandbox.engine import connect
    from composer_nb.harness.sandbox.image import build_image

    assert task.kept is not None
    environment = task.settings.environment
    with contextlib.closing(connect()) as client, tempfile.TemporaryDirectory() as folder:
        base = environment.docker_image
        if base is None or "environment/Dockerfile" in task.kept.rest:
            layout = harbor.layout(task)
            inside = {n: data for n, data in layout.files.items() if n.startswith("environment/")}
            context = harbor.Directory(files=inside, executable=layout.executable)
            base = build_image(client, harbor.write(context, Path(folder) / "task") / "environment")
        derived = Path(folder) / "derived"
        derived.mkdir()
        where = environment.workdir or client.api.inspect_image(base)["Config"].get("WorkingDir") or "/"
        if where == "/":
            raise SandboxUnavailable(f"task {task.id}: its image has no WORKDIR: name one in environment.workdir")
        (derived / "Dockerfile").write_text(_derived(base, where.rstrip("/")), encoding="utf-8")
        return build_image(client, derived)


def _derived(base: str, where: str) -> str:
    where, pristine = shlex.quote(where), harbor.PRISTINE
    links = " && ".join(f"rm -rf {link} && ln -s {target} {link}" for link, target in PLACES.items())
    workspace = f"rm -rf {where} && ln -s {WORKSPACE} {where}" if where != WORKSPACE else f"mkdir -p {WORKSPACE}"
    return (
        f"FROM {base}\nUSER root\nWORKDIR /\n"
        f"RUN mkdir -p {where} {pristine} && cp -a {where}/. {pristine} && chmod -R a+rX {pristine} && {workspace} && {links}\n"
    )
