"""The resident program of a sandbox: carries out what is asked over a pipe, as the first process of the sandbox.

`backend.resident_program` hands the text of this file, of `files.py`, `commands.py`, `calls.py`, `warm.py` and `linux.py` to a
bare interpreter inside the sandbox; they use the standard library alone and never import the rest of the project. Two ways to
run it:

* *resident*: serves one sandbox until its input ends. Everything in the sandbox is its descendant, and as the first process of
  its pid namespace it reaps orphans and can be neither killed nor traced from inside.
* *zygote*: waits for (settings, two descriptors), makes new namespaces with a root of their own, and runs a resident there.
  It never runs what an agent wrote. A sandbox costs a fork then, where a new interpreter would cost twenty times as much.

Frames in both directions: 4 bytes of length (big-endian), a JSON header in one line, a newline, a payload. A request has a
number, which its answer repeats. Commands run side by side, and each is answered when it ends; other requests are answered at
once, in order. A request to stop a command has that one's number, and no answer. The header of an answer is {"number": n,
"answer": facts}, or {"number": n, "error": [errno, text]} where the request failed.

Commands run as the same user, without capabilities or new privileges, under a system call filter. They are ended as a tree:
the descendants of a command and all orphans that began after it.

Covers Linux on x86_64 and aarch64, Python 3.9 and newer.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import stat
import struct
import typing

from composer_nb.harness.sandbox.guest.calls import Caller
from composer_nb.harness.sandbox.guest.commands import Commands, Foreground
from composer_nb.harness.sandbox.guest.files import Header, WorkspaceFiles, held, open_beneath
from composer_nb.harness.sandbox.guest.warm import COMMON, Become, load, run
from composer_nb.harness.sandbox.system.linux import (
    NAMESPACES,
    check,
    child_alarm,
    clone,
    drop_capabilities,
    ended_children,
    hide_memory,
    install_filter,
    libc,
    machine,
    map_ids,
    mount,
    network_settings,
    read_exactly,
    send_frame,
    set_limits,
    umount,
    write_ids,
)

PR_SET_CHILD_SUBREAPER = 36
# The kernel counts them per user of all sandboxes.
SHARES = {"user/max_inotify_instances": "8", "user/max_inotify_watches": "4096"}
HOST, LIFELINE = 0, 3  # the descriptors on which the host asks, and by which a new sandbox hands it sockets
TERMINALS = 32  # pseudo-terminals of a sandbox: the machine has a fixed number, and no limit counts their memory


class Resident:
    """Answers requests until its input ends."""

    def __init__(self, settings: Header) -> None:
        self.wake = child_alarm()
        signal.signal(signal.SIGINT, lambda *_: None)  # unlike what is ignored, this is not inherited by commands
        files = self.files = WorkspaceFiles(settings["workspace"], settings["disk_bytes"])
        commands = self.commands = Commands(files, self.wake, settings)
        self.warm = bool(settings["warm"])
        # Requests with their data, and what answers: the facts of an answer, a pair of facts and data, or a command to wait for.
        self.requests: dict[str, typing.Callable[[Header, memoryview], typing.Any]] = {
            "exec": commands.begin,
            "background": lambda request, _: self.start(request),
            "end_all": lambda *_: commands.end_all(),
            "read": lambda request, _: files.read(request["path"], request["offset"], request["max_bytes"]),
            "write": lambda request, data: files.write(request["path"], data, request["mode"]),
            "entries": lambda request, _: files.entries(request["path"]),
            "remove": lambda request, _: files.remove(request["path"]),
            "pack": lambda request, _: files.pack(request["max_bytes"], request["links"]),
            "unpack": lambda _, data: files.unpack(data),
            "stats": lambda *_: [len(commands.all()), *files.count()],
        }

    def serve(self) -> None:
        send_frame(1, {"ready": True, "warm": self.warm})
        commands = self.commands
        commands.poller.register(HOST, select.POLLIN)
        commands.poller.register(self.wake, select.POLLIN)
        while True:
            for fd, event in commands.poller.poll(commands.rest_ms()):
                if fd == self.wake:
                    commands.reap()
                elif fd != HOST:
                    commands.move(fd, event)
                elif (frame := self.receive()) is None:
                    commands.end_all()
                    return
                else:
                    self.take(*frame)
            for command in commands.over():
                self.answer(command.number, functools.partial(commands.finish, command))

    def receive(self) -> tuple[Header, memoryview] | None:
        """Return the next request with its data; None at the end of the input."""
        try:
            body = memoryview(read_exactly(HOST, int.from_bytes(read_exactly(HOST, 4), "big")))
        except EOFError:
            return None
        cut = bytes(body).index(b"\n")
        return json.loads(bytes(body[:cut])), body[cut + 1 :]

    def take(self, request: Header, payload: memoryview) -> None:
        if request["do"] != "stop":
            self.answer(request["number"], lambda: self.requests[request["do"]](request, payload))
        elif command := self.commands.foreground.get(request["number"]):
            command.cut = "stopped"  # else it has ended meanwhile, and was answered

    def answer(self, number: int, work: typing.Callable[[], typing.Any]) -> None:
        """Answer a request with what `work` returns."""
        data = b""
        try:
            answer = work()
            if isinstance(answer, Foreground):
                return
            if isinstance(answer, tuple):
                answer, data = answer
            facts = {"answer": answer}
        except OSError as error:
            facts = {"error": [error.errno or errno.EIO, error.strerror or str(error)]}
        except Exception as error:  # process boundary: what runs here must not be able to end this program
            facts = {"error": [errno.EIO, type(error).__name__ + ": " + str(error)[:300]]}
        send_frame(1, {"number": number, **facts}, data)

    def start(self, request: Header) -> int:
        """Start a command in the background and return its pid."""
        self.files.write(request["log"], b"", 0o644)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW
        with held(open_beneath(self.files.fd, self.files.inner(request["log"]), flags)) as log:
            if not stat.S_ISREG(os.fstat(log).st_mode):
                raise OSError(errno.EINVAL, request["log"] + ": not a regular file")
            with open("/dev/null", "rb") as nothing:
                return self.commands.start(request, (nothing.fileno(), log, log))


def confine(settings: Header) -> None:
    """Give up everything that what runs here must not have."""
    hide_memory()
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0))), "subreaper")
    drop_capabilities(machine())
    set_limits(settings["rlimits"])
    # Workers, which calls need, are made by namespaces and have a filter of their own.
    if not settings["calls"]:
        install_filter(base64.b64decode(settings["filter"]))


def furnish(settings: Header, layout: Header) -> None:
    """Build this sandbox's root, of files that no other sandbox has, and enter it. `layout` comes from `Layout.roots`.

    Locks and watches belong to a file, so two sandboxes with one file in common could signal to each other by them, and keep
    each other waiting. An overlay gives every sandbox files of its own over the same contents. Devices cannot be overlaid.
    """
    read_only, nosuid, nodev, noexec, remount, bind, recursive = 1, 2, 4, 8, 32, 4096, 16384
    new, scratch, empty = layout["new"], layout["scratch"], layout["empty"]

    def overlay(path: str, *lower: str) -> None:
        folders = [re.sub(r"([\\:,])", r"\\\1", folder) for folder in (*lower, empty)]
        mount("sandbox", path, "overlay", read_only | nosuid | nodev, "lowerdir=" + ":".join(folders))

    overlay(new, layout["copy"])
    for path, share in layout["writable"].items():
        options = f"size={int(settings['disk_bytes'] * share)},nr_inodes={int(settings['inodes'])},mode=0755"
        mount("sandbox", new + path, "tmpfs", nosuid | nodev, options)
    for path, lower in layout["trees"].items():
        os.makedirs(new + path, exist_ok=True)  # in the folder for temporary files; elsewhere it is there
        if path in layout["crowded"]:
            mount(lower[0], new + path, "", bind | recursive)
        else:
            overlay(new + path, *lower)
    for path in layout["masks"]:
        mount(new + layout["nothing"], new + path, "", bind)
    for path in layout["devices"]:
        mount(settings["devices"] + path.removeprefix("/dev"), new + path, "", bind)
        # Writing is fine, but not setting times.
        mount(path, new + path, "", bind | remount | read_only | nosuid | noexec)
    mount("proc", new + "/proc", "proc", nosuid | nodev | noexec)
    if not settings["calls"]:
        terminals = f"newinstance,ptmxmode=0666,mode=620,max={TERMINALS}"
        mount("sandbox", new + "/dev/pts", "devpts", nosuid | noexec, terminals)
        settings_here = {"net/ipv4/" + name: text for name, text in network_settings().items()}
        for name, text in {**settings_here, **SHARES}.items():
            with contextlib.suppress(FileNotFoundError), open(new + "/proc/sys/" + name, "w") as setting:
                setting.write(text)
        overlay(scratch, layout["counters"])
        hide_counters(new, scratch, layout)
        umount(scratch)
    if settings["egress"]:
        mount("sandbox", scratch, "tmpfs", nosuid | nodev, "size=64k,mode=0755")
        with open(scratch + "/hosts", "w") as hosts:
            hosts.writelines(local + " " + host + "\n" for host, _, local in settings["egress"])
        mount(scratch + "/hosts", new + "/etc/hosts", "", bind)
        mount("", new + "/etc/hosts", "", bind | remount | read_only | nosuid | nodev)
        umount(scratch)
    os.chdir(new)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    umount(".")  # the old root, which lies over the new one
    os.chdir("/")
    if not settings["calls"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
            up, flags, interface = 1, 0x8914, b"lo"  # SIOCSIFFLAGS, IFF_UP
            fcntl.ioctl(loopback, flags, struct.pack("16sh22x", interface, up))


def hide_counters(new: str, stand_ins: str, layout: Header) -> None:
    """Cover the files of /proc that describe the whole machine."""
    bind = 4096
    for name in os.listdir(new + "/proc"):
        path = new + "/proc/" + name
        open_to_us = os.access(path, os.R_OK) and not os.path.islink(path)
        if open_to_us and not name.isdigit() and name not in layout["shown"]:
            file = stand_ins + "/" + (name if name in layout["stands_in"] else "empty")
            mount(new + layout["nothing"] if os.path.isdir(path) else file, path, "", bind)


def hand_out_listeners(egress: typing.List[typing.List[typing.Any]]) -> None:  # noqa: UP006
    """Listen where connections to allowed hosts arrive, and send the host the sockets over the lifeline, which is closed here."""
    with socket.socket(fileno=LIFELINE) as lifeline:
        listeners = [socket.create_server((local, port)) for _, port, local in egress]
        if listeners:
            socket.send_fds(lifeline, [b"."], [listener.fileno() for listener in listeners])
        for listener in listeners:
            listener.close()


def resident(settings: Header, layout: typing.Optional[Header] = None) -> None:  # noqa: UP045
    if layout is not None:
        # By a copy of this program, which takes the pages of memory that it writes to with it: 1 MiB of an idle sandbox's 3.
        builder = os.fork()
        if builder == 0:
            furnish(settings, layout)
            os._exit(0)
        if os.waitpid(builder, 0)[1]:
            os._exit(1)  # the copy has told why
        os.chdir("/")
        hand_out_listeners(settings["egress"])
    confine(settings)
    if settings["calls"]:
        Caller(settings).serve()
        return
    os.chdir(settings["workspace"])
    os.environ.clear()
    gc.enable()
    Resident(settings).serve()


def zygote(layouts: Header) -> None:
    """Serve a socket of packets: each has a sandbox's settings, and two descriptors, its channel and its lifeline.

    The lifeline is closed here when everything in the sandbox has ended, and closed there to make it end.
    """
    control, wake = socket.socket(fileno=0), child_alarm()
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wake, select.POLLIN)
    lifelines: dict[int, int] = {}  # descriptor -> pid
    table, maps = machine(), map_ids()
    for name in COMMON:
        importlib.import_module(name)
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
        for pid, _ in ended_children(wake):
            for fd in [fd for fd, owner in lifelines.items() if owner == pid]:
                with contextlib.suppress(KeyError):  # it was ended from outside, and is not polled any more
                    poller.unregister(fd)
                del lifelines[fd]
                os.close(fd)
        if control.fileno() in events:
            message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
            if not message:
                return
            try:
                channel, lifeline = fds
                settings = json.loads(message)
                settings["warm"] = bool(settings["warm"]) and load(*settings["warm"])
                pid = clone(sum(NAMESPACES.values()), table)
            except (OSError, ValueError):  # no process or descriptor is left: this one does not start, the others live
                for fd in fds:
                    os.close(fd)
                continue
            if pid == 0:
                _hatch(settings, layouts, (channel, lifeline), maps, max([channel, lifeline, *lifelines, 4096]))
            os.close(channel)
            lifelines[lifeline] = pid
            poller.register(lifeline, select.POLLIN)


def _hatch(settings: Header, layouts: Header, fds: tuple[int, int], maps: typing.Any, most: int) -> typing.NoReturn:
    """Become the first process of a new sandbox. `fds`: its channel and its lifeline. `most`: the highest descriptor."""
    try:
        signal.set_wakeup_fd(-1)
        os.dup2(fds[0], 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], LIFELINE)
        os.closerange(LIFELINE + 1, most + 1)
        write_ids(maps)
        resident(settings, layouts["calls" if settings["calls"] else "basic" if settings["basic"] else "host"])
    except Become:
        raise
    except BaseException as error:  # process boundary: the host gets the reason
        send_frame(1, {"failed": type(error).__name__ + ": " + str(error)})
        os._exit(1)
    os._exit(0)


def main(text: str) -> None:
    """Run with settings as JSON (`ResidentBackend.settings`, or {"role": "zygote", "layouts": …})."""
    settings = json.loads(text)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if settings["role"] == "zygote":
            zygote(settings["layouts"])
        else:
            resident(settings)
        return
    except Become as copy:
        words = copy.args
    run(*words)
