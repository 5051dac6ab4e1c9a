"""Sandboxes as containers of a Docker Engine: for tasks that bring an image, and where there is no bubblewrap.

A container has no network, no capabilities and no way to get any; its root is read-only, and its workspace and temporary files
are in memory. Its first process is the resident program (`guest/program.py`), which installs the same system call filter as every
other backend does, on top of the engine's own. The host speaks to it over the container's attached streams, so that nothing
has to listen in the container, and a request costs no `docker exec`.

When the process that made a container dies, the engine closes the streams, at which the resident program ends, and everything
in the container with it. The stopped container stays until `reap` removes it.

Covers engines of version 20.10 and newer with Linux containers, on control groups 1 and 2, and images that have python3, 3.9 or
newer, and no VOLUME. Does not pull images. Where the container's control group can be read, as on the engine's own machine, its
use of memory and CPU is known, and every result tells that memory was used up; elsewhere only that it ended the sandbox is told.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.backend import BOOT, ResidentBackend, resident_program
from composer_nb.harness.sandbox.contract import LIMITS, WORKSPACE, WRITABLE, Capabilities, Machine, SandboxSpec
from composer_nb.harness.sandbox.egress import EgressProxy, listen_in
from composer_nb.harness.sandbox.engine import MARK, TIMEOUT_S, connect, remove_container
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.host import Channel, hide_network_counts
from composer_nb.harness.sandbox.image import UID, host_image
from composer_nb.harness.sandbox.system.cgroups import Cgroup
from composer_nb.harness.sandbox.system.linux import MACHINES, network_settings, patience

STDOUT, STDERR = 1, 2
COMPLAINT = 4000  # Bytes kept of the resident program's last words
SEND_S, END_S = 10.0, 5.0
# Files of /proc about the whole machine, by which two sandboxes could signal to each other. `meminfo` and `stat` stay,
# for `ps`: an engine can hide files of /proc but put nothing in their place.
HIDDEN = """
    acpi asound buddyinfo bus cgroups diskstats driver fs interrupts irq kallsyms kcore key-users keys kmsg kpagecgroup
    kpagecount kpageflags latency_stats loadavg locks mdstat modules pagetypeinfo partitions pressure sched_debug schedstat scsi
    slabinfo softirqs swaps sys sysrq-trigger sysvipc timer_list timer_stats tty vmallocinfo vmstat zoneinfo
""".split()
# Reads all files of an image, three times, so that all their pages are among those in use (`layout.STAGE`), and maps them. Then,
# for each byte of its input, touches every page, which brings back what was evicted, and answers: "." or, if a file that a
# sandbox can read is not mapped, "!". Before Python 3.13 each map keeps a descriptor.
PIN = """
import mmap, os, resource, stat, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
alone = {"trackfd": False} if sys.version_info >= (3, 13) else {}
maps, failures = [], []
def failed(error):
    if not isinstance(error, PermissionError):
        failures.append(error)
for top, below, names in os.walk("/", onerror=failed):
    if top == "/":
        below[:] = [name for name in below if name not in ("proc", "sys", "dev")]
    for path in (os.path.join(top, name) for name in names):
        try:
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_size:
                with open(path, "rb", buffering=0) as file:
                    for _ in range(3):
                        file.seek(0)
                        while file.read(1 << 20):
                            pass
                    maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, **alone))
        except OSError as error:
            failed(error)
while os.read(0, 1):
    for map in maps:
        map[::4096]
    os.write(1, b"!" if failures else b".")
"""
# Memory for it beside the files: parts of pages, and the kernel's notes of as many files as a process can map.
PIN_BYTES = 512 << 20
# Facts of the engine about limits that it cannot set everywhere.
COUNTED = {"memory_bytes": "MemoryLimit", "processes": "PidsLimit", "cpus": "CpuCfsQuota"}


class DockerChannel(Channel):
    """The attached streams of a container: what is sent is its input, what is received its output.

    The engine puts a header before each piece of a stream. At the end of the stream `receive` raises OSError if the resident
    program has said why it ended.
    """

    def __init__(self, attached: Any) -> None:
        """`attached` as from `attach_socket`, of a container that is not started yet: what it says before is lost."""
        super().__init__(getattr(attached, "_sock", attached))
        self._attached = attached
        self._arrived, self._errors = bytearray(), bytearray()
        self._stream, self._left = 0, 0  # of the piece whose header has been read

    def _receive(self, deadline: float) -> bytes:
        while not (output := self._output()):
            self._wait(deadline)
            try:
                arrived = self._end.recv(1 << 18)
            except ConnectionError:
                arrived = b""
            if not arrived:
                self.ended = True
                if complaint := self._errors.decode("utf-8", "replace").strip():
                    raise OSError(complaint.splitlines()[-1])
                return b""
            self._arrived += arrived
        return output

    def _output(self) -> bytes:
        """Return the output that has arrived, without headers; keep what the resident program complains of."""
        output = bytearray()
        while self._arrived:
            if not self._left:
                if len(self._arrived) < 8:
                    break
                self._stream, self._left = struct.unpack_from(">BxxxL", self._arrived)
                del self._arrived[:8]
                continue
            piece = self._arrived[: self._left]
            del self._arrived[: len(piece)]
            self._left -= len(piece)
            if self._stream == STDOUT:
                output += piece
            elif self._stream == STDERR:
                self._errors = (self._errors + piece)[-COMPLAINT:]
        return bytes(output)

    def close(self) -> None:
        super().close()
        with self._sending, self._receiving:
            self._attached.close()


@dataclass(slots=True, kw_only=True)
class _ContainerMachine(Machine):
    """A container; its name is the id."""

    backend: DockerBackend
    channel: DockerChannel = field(init=False)

    def end(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        self.backend.remove(self.id)

    def kills(self) -> int:
        if self.group is not None and not self.channel.ended:
            with contextlib.suppress(OSError):  # it goes with the last process
                return self.group.kills()
        return self.backend.kills(self.id, self.channel.ended)


class DockerBackend(ResidentBackend):
    """Makes sandboxes that are containers. A context manager; may be used from several threads.

    Raises SandboxUnavailable when no engine answers.
    """

    name = "docker"

    def __init__(self, run_id: str | None = None, journal: Path | None = None) -> None:
        self._client = connect()
        self._facts: dict[str, Any] = self._client.info()
        self._runtime = str(self._facts["DefaultRuntime"])
        kind, machine = self._facts["OSType"], self._facts["Architecture"]
        if kind != "linux" or machine not in MACHINES:
            self._client.close()
            advice = f"it has to run Linux containers on {' or '.join(MACHINES)}"
            raise SandboxUnavailable(f"the Docker Engine runs {kind} containers on {machine}: {advice}")
        self._image, self._image_lock = "", threading.Lock()
        self._pins = dict[str, _ContainerMachine]()  # by image: what holds its files in memory
        self._large = set[str]()  # images larger than half the engine's memory, or of which not every file is mapped
        super().__init__(run_id, journal, MACHINES[machine])

    def capabilities(self) -> Capabilities:
        enforced = dict.fromkeys(LIMITS, True) | {name: bool(self._facts.get(fact)) for name, fact in COUNTED.items()}
        warnings = "; ".join(self._facts.get("Warnings") or ()) or "the Docker Engine does not say why"
        why = {name: f"no control group for it: {warnings}" for name, works in enforced.items() if not works}
        if self._large:
            enforced["page_cache"] = False
            why["page_cache"] = f"not all files stay in memory of {', '.join(sorted(self._large))}: use smaller images"
        return Capabilities(backend=self.name, mode=self._runtime, uid=UID, enforced=enforced, why_not=why)

    def close(self) -> None:
        super().close()
        with self._image_lock:
            while self._pins:
                self._pins.popitem()[1].end()
        self._client.close()

    def remove(self, name: str) -> None:
        """Remove a container. Raises SandboxFailure when that does not work; the journal then still has it."""
        try:
            remove_container(self._client, name)
        except OSError as error:
            raise SandboxFailure(str(error)) from error
        self.forget(name)

    def kills(self, name: str, ended: bool) -> int:
        """Return 1 if something in a container was killed for memory before it ended. The engine knows that a moment later."""
        try:
            if ended:
                self._client.api.wait(name, timeout=patience(END_S))
            return int(self._client.api.inspect_container(name)["State"]["OOMKilled"])
        except errors():
            return 0

    def _start(self, spec: SandboxSpec) -> _ContainerMachine:
        image = spec.image or self._host_image()
        with self._lock:
            self._check_open()
        machine = self._machine()
        try:
            config = self._client.api.inspect_image(image)["Config"]
            if volumes := config.get("Volumes"):
                raise SandboxUnavailable(
                    f"the image {image} keeps {', '.join(volumes)} on the engine's disk, without a limit: build it without VOLUME"
                )
            self._pin(image)
            self._run(machine, self._configuration(spec, image))
            container = self._client.api.inspect_container(machine.id)
            machine.group = _group(container)
            if machine.group is not None:  # the engine runs on this machine
                machine.group.limit_sockets(spec.memory_bytes)  # Docker does not
                hide_network_counts(container["State"]["Pid"])
            if spec.egress:
                machine.proxy = EgressProxy(spec.egress, listen_in(container["State"]["Pid"], spec.egress))
        except BaseException as error:
            with contextlib.suppress(SandboxFailure):  # the container is in the journal, if there is one
                machine.end()
            if isinstance(error, errors()):
                raise _explained(error, image) from error
            if spec.egress and isinstance(error, OSError):
                why = "the network of a container can be entered by root alone, on the engine's machine"
                raise SandboxUnavailable(f"env.egress with docker: {why} ({error})") from error
            raise
        environment = dict(variable.split("=", 1) for variable in config.get("Env") or ()) if spec.image else {}
        program = resident_program(self.settings(spec, environment=environment))
        with contextlib.suppress(OSError):  # if it has ended already, its answer, which is waited for, is why
            machine.channel.send(program, patience(SEND_S))
        return machine

    def _machine(self) -> _ContainerMachine:
        return _ContainerMachine(id=f"composer_nb-{uuid.uuid4().hex[:12]}", backend=self)

    def _run(self, machine: _ContainerMachine, configuration: dict[str, Any]) -> None:
        """Make a container, attach its streams and start it."""
        mark = configuration["Labels"][MARK] = uuid.uuid4().hex
        self.note(machine.id, "container", machine.id, mark)
        self._client.api.create_container_from_config(configuration, machine.id)
        streams = dict.fromkeys(("stdin", "stdout", "stderr", "stream"), 1)
        machine.channel = DockerChannel(self._client.api.attach_socket(machine.id, params=streams))
        self._client.api.start(machine.id)

    def _pin(self, image: str) -> None:
        """Bring all files of an image into memory, by a container of its own that maps them as long as this backend is open.

        Sandboxes share their pages. Those that are in memory before a sandbox starts tell none who read them, and do not count
        for one, which could have them evicted by using up its memory. The machine evicts some when others want memory.
        """
        with self._image_lock:
            self._check_open()
            fresh = image not in self._pins
            machine = self._pins.setdefault(image, self._machine())
            try:
                if fresh:
                    configuration = self._configuration(SandboxSpec(), image) | {"Cmd": [PIN], "Labels": {}}
                    size = self._client.api.inspect_image(image)["Size"]  # of compressed layers, with some engines
                    configuration["HostConfig"] |= dict.fromkeys(("Memory", "MemorySwap"), 4 * size + PIN_BYTES)
                    self._run(machine, configuration)
                    if size > self._facts["MemTotal"] // 2:
                        self._large.add(image)
                machine.channel.send(b"\n", patience(SEND_S))
                if not (answer := machine.channel.receive(patience(TIMEOUT_S))):
                    raise ConnectionResetError("the container that holds its files in memory ended")
                if answer != b".":
                    self._large.add(image)
            except BaseException:
                self._pins.pop(image, machine).end()
                raise

    def _host_image(self) -> str:
        with self._image_lock:
            if not self._image:
                self._image = host_image(self._client)
        return self._image

    def _configuration(self, spec: SandboxSpec, image: str) -> dict[str, Any]:
        """Return the configuration of a container, in the words of the engine's API."""
        options = f"rw,nosuid,nodev,nr_inodes={spec.inodes},uid={UID},gid={UID},mode=755"
        return {
            "Image": image,
            "Entrypoint": ["python3", "-I", "-S", "-c"],
            "Cmd": [BOOT],
            "Hostname": "sandbox",
            "User": f"{UID}:{UID}",
            "WorkingDir": WORKSPACE,
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {"composer_nb.run": self.run_id},
            # With StdinOnce the input ends with this process, and so does what reads it.
            **dict.fromkeys(("OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr"), True),
            "HostConfig": {
                "Runtime": self._runtime,
                "NetworkMode": "none",
                "ExtraHosts": [f"{to.host}:{to.local}" for to in spec.egress],
                "IpcMode": "private",
                "Sysctls": {f"net.ipv4.{name}": text for name, text in network_settings().items()},
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "ReadonlyRootfs": True,
                "MaskedPaths": [*(f"/proc/{name}" for name in HIDDEN), "/sys", "/dev/pts"],
                "Tmpfs": {
                    path: f"size={int(spec.disk_bytes * share)},{'noexec' if path == '/dev/shm' else 'exec'},{options}"
                    for path, share in WRITABLE.items()
                },
                "Memory": spec.memory_bytes,
                "MemorySwap": spec.memory_bytes,
                "PidsLimit": spec.processes + 1,  # the resident program is one
                "NanoCpus": int(min(spec.cpus, self._facts["NCPU"]) * 1e9),
                "Ulimits": [{"Name": "core", "Soft": 1, "Hard": 1}],  # the others are the resident program's to set
                "LogConfig": {"Type": "none"},  # other kinds would write all that is said to the disk
            },
        }


def errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of the engine's client."""
    from docker.errors import DockerException
    from requests import RequestException

    return DockerException, RequestException


def _explained(error: BaseException, image: str) -> Exception:
    """Return the error that says in one line why no container of an image could be started."""
    from docker.errors import ImageNotFound

    why = " ".join(str(getattr(error, "explanation", None) or error).split())
    if isinstance(error, ImageNotFound):
        return SandboxUnavailable(f"the Docker Engine has no image {image}: `docker pull {image}`, or `docker load` it")
    if "executable file not found" in why:
        return SandboxUnavailable(f"the image {image} has no python3 (3.9 or newer), which a sandbox needs: add it")
    return SandboxFailure(f"the Docker Engine started no container of {image}: {why}")


def _group(container: dict[str, Any]) -> Cgroup | None:
    """Return the control group of a running container, if the engine's processes and groups can be seen from here."""
    try:
        text = Path(f"/proc/{container['State']['Pid']}/cgroup").read_text()
    except OSError:
        return None
    lines = [line.split(":", 2) for line in text.splitlines()]
    places = [(path, Path("/sys/fs/cgroup", controllers, path.lstrip("/"))) for _, controllers, path in lines]
    group = Cgroup(tuple(folder for path, folder in places if container["Id"] in path and folder.is_dir()))
    try:
        group.kills()
    except OSError:
        return None
    return group
