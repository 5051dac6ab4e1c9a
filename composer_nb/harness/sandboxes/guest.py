"""The resident program of a sandbox: carries out what is asked over a pipe, as the first process of the sandbox.

`bundle.py` hands the text of this file, of `guest_files.py`, `guest_commands.py` and `harness/linux.py` to a bare interpreter
inside the sandbox; they use the standard library alone and never import the rest of the project. Two ways to run it:

* *resident*: serves one sandbox until its input ends. Everything in the sandbox is its descendant, and as the first process of
  its pid namespace it reaps orphans and can be neither killed nor traced from inside.
* *zygote*: waits for (settings, two descriptors), makes new namespaces with an empty workspace, and runs a resident there. It
  never runs what an agent wrote. A sandbox costs a fork then, where a new interpreter would cost twenty times as much.

Frames in both directions: 4 bytes of length (big-endian), a JSON header in one line, a newline, a payload. One request is
answered at a time, in order; only that a command shall stop is said while it runs, and has no answer of its own. Headers of
answers have "error": [errno, text] where a request failed.

Commands run as the same user, without capabilities or new privileges, under a system call filter. They are ended as a tree:
the descendants of a command and all orphans that began after it.

Covers Linux on x86_64 and aarch64, Python 3.9 and newer.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import typing

from composer_nb.harness.linux import (
    NAMESPACES,
    check,
    clone,
    drop_capabilities,
    hide_memory,
    install_filter,
    libc,
    machine,
    map_ids,
    mount,
    read_exactly,
    write_all,
    write_ids,
)
from composer_nb.harness.sandboxes.guest_commands import Commands
from composer_nb.harness.sandboxes.guest_files import Files, Header, open_beneath, refuse

PR_SET_CHILD_SUBREAPER = 36
START_S = 10.0  # how long a background command may take to be executed


class Missing(Exception):
    """No command of this number was started here."""


class Resident:
    """Answers requests until its input ends."""

    def __init__(self, settings: Header) -> None:
        self.wake, note = os.pipe()
        for fd in (self.wake, note):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(note, warn_on_full_buffer=False)
        self.files = Files(settings["workspace"], settings["disk_bytes"])
        self.commands = Commands(self.files, self.wake, settings["nice"], settings["programs"], settings["environment"])

    def serve(self) -> None:
        send({"ready": True, "pid": os.getpid(), "uid": os.getuid(), "python": sys.version.split()[0]})
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while True:
            events = dict(poller.poll())
            if self.wake in events:
                self.commands.reap()
            if 0 in events:
                try:
                    size = int.from_bytes(read_exactly(0, 4), "big")
                    body = memoryview(read_exactly(0, size))
                except EOFError:
                    self.commands.end_all()
                    return
                cut = bytes(body).index(b"\n")
                header = json.loads(bytes(body[:cut]))
                if header["do"] != "stop":  # of a command that has ended meanwhile: it was answered
                    self.answer(header, body[cut + 1 :])

    def answer(self, header: Header, payload: memoryview) -> None:
        try:
            facts, data = getattr(self, "do_" + header["do"])(header, payload)
        except OSError as error:
            facts, data = {"error": [error.errno or errno.EIO, error.strerror or str(error)]}, b""
        except Missing as error:
            facts, data = {"missing": str(error)}, b""
        except Exception as error:  # process boundary: what runs here must not be able to end this program
            facts, data = {"error": [errno.EIO, type(error).__name__ + ": " + str(error)[:300]]}, b""
        send(facts, data)

    def do_exec(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        return self.commands.run(header, payload)

    def do_background(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.files.write(header["log"], b"", 0o644)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW
        log = open_beneath(self.files.fd, self.files.inner(header["log"]), flags)
        try:
            if not stat.S_ISREG(os.fstat(log).st_mode):
                raise OSError(errno.EINVAL, header["log"] + ": not a regular file")
            with open("/dev/null", "rb") as nothing:
                streams, deadline = (nothing.fileno(), log, log), time.monotonic() + START_S
                return {
                    "pid": self.commands.start(header["command"], header["cwd"], header["env"], streams, deadline)
                }, b""
        finally:
            os.close(log)

    def do_poll(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.commands.reap()
        pid = header["pid"]
        if pid in self.commands.running:
            return {"exit_code": None}, b""
        code = self.commands.ended.get(pid)
        if code is None:
            raise Missing(str(pid))
        return {"exit_code": code if code >= 0 else 128 - code}, b""

    def do_end(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        pid = header["pid"]
        if pid not in self.commands.running and pid not in self.commands.ended:
            raise Missing(str(pid))
        if pid in self.commands.running:
            # What a background command left as orphans is told from other orphans by nothing: they stay.
            self.commands.end(pid, self.commands.now() + (1 << 40))
        return {}, b""

    def do_end_all(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.commands.end_all()
        if self.commands.all():
            raise refuse(errno.EBUSY, "processes that were killed are still there")
        return {}, b""

    def do_read(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        return {}, self.files.read(header["path"], header["offset"], header["max_bytes"])

    def do_write(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.files.write(header["path"], payload, header["mode"])
        return {}, b""

    def do_entries(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        return {"entries": self.files.entries(header["path"])}, b""

    def do_remove(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.files.remove(header["path"])
        return {}, b""

    def do_pack(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        data, facts = self.files.pack(header["max_bytes"], header["links"])
        return facts, data

    def do_unpack(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.files.unpack(payload)
        return {}, b""

    def do_stats(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        size, inodes = self.files.count()
        return {"processes": len(self.commands.all()), "disk_bytes": size, "inodes": inodes}, b""


def send(header: Header, payload: bytes = b"") -> None:
    head = json.dumps(header).encode() + b"\n"
    write_all(1, (len(head) + len(payload)).to_bytes(4, "big") + head)
    write_all(1, payload)


def confine(settings: Header) -> None:
    """Give up everything that what runs here must not have."""
    table = machine()
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    hide_memory()
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, one, zero, zero, zero), "subreaper")
    if settings["drop"]:
        drop_capabilities(table)
    for name, value in settings["rlimits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))
    if settings["filter"]:
        install_filter(base64.b64decode(settings["filter"]))


def furnish(settings: Header) -> None:
    """Own processes, an empty workspace and a loopback, in namespaces that were just made."""
    nosuid, nodev, noexec = 2, 4, 8
    mount("proc", "/proc", "proc", nosuid | nodev | noexec)
    mount("sandbox", "/dev/pts", "devpts", nosuid | noexec, "newinstance,ptmxmode=0666,mode=620")
    for place, size in ((settings["workspace"], 1.0), ("/tmp", 1.0), ("/dev/shm", 0.25)):
        options = f"size={int(settings['disk_bytes'] * size)},nr_inodes={int(settings['inodes'])},mode=0755"
        mount("sandbox", place, "tmpfs", nosuid | nodev, options)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
        up, flags, interface = 1, 0x8914, b"lo"  # SIOCSIFFLAGS, IFF_UP
        fcntl.ioctl(loopback, flags, struct.pack("16sh22x", interface, up))


def resident(settings: Header, forked: bool = False) -> None:
    if forked:
        furnish(settings)
    confine(settings)
    os.chdir(settings["workspace"])
    os.environ.clear()
    gc.enable()
    Resident(settings).serve()


def zygote() -> None:
    """Serve a socket of packets: each has a sandbox's settings, and two descriptors, its channel and its lifeline.

    The lifeline is closed here when everything in the sandbox has ended, and closed there to make it end.
    """
    control = socket.socket(fileno=0)
    wake, note = os.pipe()
    for fd in (wake, note):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wake, select.POLLIN)
    lifelines: dict[int, int] = {}  # descriptor -> pid
    table, maps = machine(), map_ids()
    control.send(b"ready")
    gc.collect()
    gc.disable()
    gc.freeze()
    while True:
        events = dict(poller.poll())
        for fd in events:
            if fd in lifelines:
                poller.unregister(fd)
                os.kill(lifelines[fd], signal.SIGKILL)
        if wake in events:
            _bury(wake, poller, lifelines)
        if control.fileno() in events:
            message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
            if not message:
                return
            try:
                channel, lifeline = fds
                pid = clone(sum(NAMESPACES.values()), table)
            except (OSError, ValueError):  # no process or descriptor is left: this one does not start, the others live
                for fd in fds:
                    os.close(fd)
                continue
            if pid == 0:
                _hatch(json.loads(message), channel, maps, max([channel, lifeline, *lifelines, 4096]))
            os.close(channel)
            lifelines[lifeline] = pid
            poller.register(lifeline, select.POLLIN)


def _bury(wake: int, poller: select.poll, lifelines: dict[int, int]) -> None:
    os.read(wake, 4096)
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        for fd in [fd for fd, owner in lifelines.items() if owner == pid]:
            try:
                poller.unregister(fd)
            except KeyError:
                pass  # it was ended from outside
            del lifelines[fd]
            os.close(fd)


def _hatch(settings: Header, channel: int, maps: typing.Any, most: int) -> typing.NoReturn:
    """The first process of a new sandbox. `most`: the highest descriptor."""
    try:
        signal.set_wakeup_fd(-1)
        os.dup2(channel, 0)
        os.dup2(channel, 1)
        os.closerange(3, most + 1)
        write_ids(maps)
        resident(settings, forked=True)
    except BaseException as error:  # process boundary: the host gets the reason
        send({"failed": type(error).__name__ + ": " + str(error)})
        os._exit(1)
    os._exit(0)


def main(told: str) -> None:
    """`told`: settings as JSON (`resident.resident_settings`, or {"role": "zygote"})."""
    settings = json.loads(told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if settings["role"] == "zygote":
        zygote()
    else:
        resident(settings)
