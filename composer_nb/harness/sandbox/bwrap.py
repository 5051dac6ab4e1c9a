"""Sandboxes by bubblewrap, embedded in this process: no daemon, no root, a few milliseconds each.

One bubblewrap process holds a zygote (`guest/program.py`), which makes new namespaces for each sandbox: user, pid, mount,
network, ipc, uts, cgroup. A second one, with pytest imported, makes those of `SandboxSpec(warm=True)`. Nothing ever runs with
less isolation: a machine that forbids nested namespaces is an error, and `capabilities` names each limit that cannot be enforced
here.

A sandbox sees, read-only, the programs and libraries of this machine's /usr, but no installed Python packages, nothing of /etc
but what the loader needs, no home, no /sys, no other sandbox; besides these, the few programs of `toolchain.py`. With
`SandboxSpec(basic=True)` it sees copies of the basic ones alone (`layout.py`). Its workspace and temporary files are in memory.

Covers Linux with user namespaces, as root or as an ordinary user. Does not cover images: `docker` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.backend import BOOT, ResidentBackend, resident_program
from composer_nb.harness.sandbox.contract import LIMITS, WORKSPACE, Capabilities, Machine, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.egress import EgressProxy
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxSlow, SandboxUnavailable
from composer_nb.harness.sandbox.host import hide_network_counts, sender, socket_pair
from composer_nb.harness.sandbox.image import UID
from composer_nb.harness.sandbox.layout import KIT, STAGE, Layout, make_devices, namespaces, own_copies
from composer_nb.harness.sandbox.reap import OWN
from composer_nb.harness.sandbox.system.cgroups import Cgroups
from composer_nb.harness.sandbox.system.linux import machine, patience, unstoppable_dumps
from composer_nb.harness.sandbox.toolchain import Interpreter, install_hint

NICE = 10
SIGNALS = 1024  # maximum pending signals and timers of a sandbox
START_S, END_S = 10.0, 10.0  # that the zygote may take to be ready, and a sandbox to end: more on a busy machine


@dataclass(slots=True, kw_only=True)
class _BwrapMachine(Machine):
    """`lifeline`: of the zygote, which closes it when all processes have ended; None until it was asked."""

    backend: BwrapBackend
    lifeline: socket.socket | None = None

    def end(self) -> None:
        self.channel.close()
        if self.lifeline is not None:
            with contextlib.suppress(OSError):
                self.lifeline.shutdown(socket.SHUT_WR)
                self.lifeline.settimeout(patience(END_S))
                self.lifeline.recv(1)
            self.lifeline.close()
        try:
            if self.group is not None:
                self.group.remove()
        except OSError as error:
            raise SandboxFailure(f"sandbox {self.id}: its cgroup cannot be removed: {error.strerror}") from error
        finally:
            if self.backend.devices is not None:
                shutil.rmtree(self.backend.devices / self.id, ignore_errors=True)
            gone = self.group is None or not any(folder.is_dir() for folder in self.group.folders)
            self.backend.forget(self.id, strike=gone)


def _open_folder() -> Path:
    """Return the folder for temporary files; /tmp where a sandbox's user cannot enter it, as in a user's private one."""
    folder = Path(tempfile.gettempdir()).resolve()
    return folder if all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents)) else Path("/tmp")


@dataclass(slots=True)
class _Zygote:
    """The process that makes sandboxes: its bubblewrap, and the socket on which it is asked."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    pid: int = 0


class BwrapBackend(ResidentBackend):
    """Makes sandboxes by bubblewrap. A context manager; may be used from several threads.

    Raises SandboxUnavailable when no sandbox can be made here, SandboxSlow when none is ready in time.
    """

    name = "bwrap"

    def __init__(self, run_id: str | None = None, journal: Path | None = None) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable("bubblewrap runs on Linux alone; use the backend docker here")
        if (bwrap := shutil.which("bwrap")) is None:
            raise SandboxUnavailable(f"bubblewrap (bwrap) is not installed: {install_hint()}")
        self._bwrap = bwrap
        self._interpreter = Interpreter.find()
        self._uid: int | None = UID if os.getuid() == 0 else None
        self._layout = Layout(self._interpreter, self._uid)
        self._cgroups = Cgroups.find()
        # By whether pytest is imported in it: copies of a large process cost more.
        self._zygotes: dict[bool, _Zygote] = {}
        super().__init__(run_id, journal, machine())
        self.devices = self._device_folder()
        self._probe()

    def capabilities(self) -> Capabilities:
        why = {"core_dumps": unstoppable_dumps()}
        if isinstance(self._cgroups, str):
            why |= {"memory_bytes": self._cgroups, "cpus": self._cgroups}
        if crowded := self._layout.crowded:
            why["locks"] = f"something is mounted in {', '.join(crowded)}: their files are shared"
        elif not self.devices:
            why["locks"] = "only root can give each sandbox devices of its own: locks on /dev/null are everybody's"
        why = {name: reason for name, reason in why.items() if reason}
        enforced = {name: name not in why for name in LIMITS}
        uid = os.getuid() if self._uid is None else self._uid
        return Capabilities(backend=self.name, mode="forked", uid=uid, enforced=enforced, why_not=why)

    def close(self) -> None:
        super().close()
        for warm in list(self._zygotes):
            self._stop_zygote(warm)
        if self.devices is not None:
            shutil.rmtree(self.devices, ignore_errors=True)
            self.forget("devices")

    def _device_folder(self) -> Path | None:
        """Make a folder for device files of each sandbox, which no other sandbox can lock; None where this user may not."""
        if self._uid is None:
            return None
        folder = Path(tempfile.mkdtemp(prefix="composer_nb-", dir=_open_folder()))
        self.note("devices", "directory", folder)
        try:
            folder.chmod(0o755)
            make_devices(folder / "probe")
            (folder / "probe/null").write_bytes(b"x")  # fails where the file system has no devices
        except OSError:
            shutil.rmtree(folder)
            self.forget("devices")
            return None
        return folder

    def _begin(self, spec: SandboxSpec) -> Sandbox:
        try:
            sandbox = Sandbox(self, spec, machine := self._start(spec))
        except SandboxSlow:
            raise
        except SandboxFailure:
            if not self._zygote_died(spec.warm):
                raise
            sandbox = Sandbox(self, spec, machine := self._start(spec))
        try:
            if spec.calls is None:
                self._confine(machine, spec)
            if spec.egress:
                assert machine.lifeline is not None
                descriptors = socket.recv_fds(machine.lifeline, 1, len(spec.egress))[1]
                machine.proxy = EgressProxy(spec.egress, [socket.socket(fileno=fd) for fd in descriptors])
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    def _start(self, spec: SandboxSpec) -> _BwrapMachine:
        id, grouped = uuid.uuid4().hex, not isinstance(self._cgroups, str)
        # The kernel counts processes per user namespace, pending signals per user of all sandboxes, data of each process.
        limits = {"RLIMIT_NPROC": spec.processes + 1, "RLIMIT_SIGPENDING": SIGNALS}
        settings = self.settings(
            spec,
            limits=limits if grouped else limits | {"RLIMIT_DATA": spec.memory_bytes},
            workspace="/tmp" if spec.calls else WORKSPACE,
            nice=NICE if grouped else 0,
            copies=True,
            basic=spec.basic,
            devices=f"{KIT}/devices/{id}" if self.devices else "/dev",
            egress=[(to.host, to.port, to.local) for to in spec.egress],
            warm=self._layout.warm() if spec.warm and spec.calls is None else [],
        )
        channel, there = socket_pair()
        machine = _BwrapMachine(id=id, channel=channel, backend=self)
        try:
            if self.devices:
                make_devices(self.devices / id)
            with there, self._lock:
                self._check_open()
                machine.lifeline = self._request(settings, there, spec.warm)
        except BaseException:
            machine.end()
            raise
        return machine

    def _confine(self, machine: _BwrapMachine, spec: SandboxSpec) -> None:
        """Put the sandbox, in which nothing of an agent runs yet, into a group with its limits.

        Calls have limits of their own, and a group would get no more of a busy machine than one process.
        """
        hide_network_counts(machine.channel.peer)
        if isinstance(self._cgroups, str):
            return
        try:
            folders = self._cgroups.folders(f"{OWN}{machine.id}")
            for folder in folders:
                self.note(machine.id, "cgroup", folder, folder.name)
            machine.group = self._cgroups.make(folders, spec.memory_bytes, spec.processes, spec.cpus)
            machine.group.attach(machine.channel.peer)
        except OSError as error:
            raise SandboxFailure(f"sandbox {machine.id}: its cgroup cannot be made: {error}") from error

    def _probe(self) -> None:
        """Make a sandbox, to see that it works here. Raises SandboxUnavailable, and SandboxSlow on a busy machine."""
        try:
            with self.create() as sandbox:
                result = sandbox.exec(["true"], timeout_s=patience(START_S))
            if result.exit_code == 0:
                return
            if result.timed_out:
                raise SandboxSlow("`true` took too long in a sandbox: the machine is busy")
            complaint = f"`true` ended with {result.exit_code}: {result.stderr!r}"
        except SandboxFailure as error:
            complaint = str(error)
            self._stop_zygote(False)
            if isinstance(error, SandboxSlow):
                raise
        self._stop_zygote(False)
        user = "this user" if self._uid is None else f"user {self._uid}"
        raise SandboxUnavailable(
            "bubblewrap cannot make a sandbox here (are unprivileged user namespaces, nested and with overlays, allowed, and can "
            f"{user} read {self._interpreter.path}?): {complaint}"
        )

    def _request(self, settings: str, there: socket.socket, warm: bool) -> socket.socket:
        """Ask the zygote for a sandbox and return its lifeline. Start a zygote if there is none, or if it is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            zygote = self._zygotes[warm] = self._zygotes.get(warm) or self._start_zygote()
            try:
                socket.send_fds(zygote.control, [settings.encode()], [there.fileno(), theirs.fileno()])
            except OSError as error:
                ours.close()
                if isinstance(error, ConnectionError):  # otherwise it lives, and so do its sandboxes
                    self._stop_zygote(warm)
                raise SandboxFailure(f"the process that makes sandboxes cannot be asked: {error}") from error
        return ours

    def _start_zygote(self) -> _Zygote:
        """Start the process from which sandboxes are forked."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            zygote = _Zygote(self._popen(theirs), ours)
        process = zygote.process
        try:
            self.note(f"zygote {process.pid}", "process", process.pid)
            ours.settimeout(patience(START_S))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            ours.send(resident_program(json.dumps({"role": "zygote", "layouts": self._layout.roots()})))
            answer, ancillary, _, _ = ours.recvmsg(100, socket.CMSG_SPACE(12))
            if answer != b"ready":
                raise OSError("it ended at once")
            zygote.pid = sender(ancillary)
            self.note(f"zygote {process.pid}", "process", zygote.pid)
            own_copies(self._layout.plan, process)
        except BaseException as error:
            assert process.stderr is not None
            process.stderr.seek(0)
            complaint = process.stderr.read(4000).decode("utf-8", "replace").strip().rpartition("\n")[2]
            self._end_zygote(zygote)
            if not isinstance(error, OSError):
                raise
            if isinstance(error, TimeoutError) and not complaint:
                raise SandboxSlow("bubblewrap was not ready in time: the machine is busy") from error
            raise SandboxFailure(f"bubblewrap: {complaint or error}") from error
        return zygote

    def _zygote_died(self, warm: bool) -> bool:
        """Return whether the death of the zygote is why a sandbox did not start; then the next request starts another one."""
        with self._lock:
            if warm not in self._zygotes:
                return True
            try:
                self._zygotes[warm].process.wait(timeout=0.2)  # bubblewrap ends a moment after it
            except subprocess.TimeoutExpired:
                return False
            self._stop_zygote(warm)
            return True

    def _stop_zygote(self, warm: bool) -> None:
        with self._lock:
            if zygote := self._zygotes.pop(warm, None):
                self._end_zygote(zygote)

    def _end_zygote(self, zygote: _Zygote) -> None:
        """End the process from which sandboxes are forked, and with it all of them."""
        process = zygote.process
        with contextlib.suppress(OSError):
            zygote.control.shutdown(socket.SHUT_RDWR)  # also where a forked child of this process has it too
        zygote.control.close()  # at which it ends, and with it, being the first in its pid namespace, all sandboxes
        try:
            process.wait(timeout=patience(END_S))
        except subprocess.TimeoutExpired:  # none is reaped yet: the numbers are still theirs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its child too, which waits for it for ever while it starts
            if zygote.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(zygote.pid, signal.SIGKILL)
            process.wait()
        assert process.stderr is not None
        process.stderr.close()
        self.forget(f"zygote {process.pid}")

    def _popen(self, end: socket.socket) -> subprocess.Popen[bytes]:
        """Start the stage that makes copies of programs (`layout.STAGE`) and becomes bubblewrap, which starts the zygote."""
        user: dict[str, Any] = {} if self._uid is None else {"user": self._uid, "group": self._uid, "extra_groups": []}
        errors = tempfile.TemporaryFile()
        with contextlib.ExitStack() as stack:
            entered = stack.enter_context(namespaces(self._layout.plan))
            plan = stack.enter_context(open(os.memfd_create("plan"), "w+b"))
            plan.write(b"" if entered else self._layout.plan)
            plan.seek(0)
            passed = [plan.fileno(), *entered]
            where = ",".join(map(str, entered)) or "-"
            command = [self._interpreter.path, "-I", "-S", "-c", STAGE, str(plan.fileno()), where]
            command += [self._bwrap, "--unshare-all", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
            # One seed, so that calls see sets in one order.
            command += ["--hostname", "sandbox", "--setenv", "PYTHONHASHSEED", "0"]
            command += self._layout.zygote(self.devices)
            command += ["--chdir", "/", "--remount-ro", "/", "--"]
            command += [self._interpreter.path, "-s", "-S", "-c", BOOT]  # -I would ignore the seed
            # In a session of its own: Ctrl-C is for this process.
            streams: dict[str, Any] = {"stdin": end.fileno(), "stdout": end.fileno(), "stderr": errors}
            try:
                process = subprocess.Popen(
                    command, **streams, env={}, start_new_session=True, pass_fds=passed, cwd="/", **user
                )
            except OSError as error:
                errors.close()
                raise SandboxFailure(f"cannot start {self._bwrap}: {error}") from error
        process.stderr = errors
        return process
