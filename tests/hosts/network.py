"""Hosts on one machine: each is a network, mount, process and host-name namespace, and nothing outlives its first process.

    switch: a namespace with a bridge and no address ── link ── host 10.77.0.1
                                                     ── link ── host 10.77.0.2 …

The namespaces have no names: they are those of a process that the kernel kills when this one dies (also by SIGKILL), and devices
and mounts go with them. A host sees this machine's files read-only, with empty folders of its own for all that is written
(`PRIVATE`). There is no route out, only the hosts' subnet.

A link's rate is the kernel's (`tbf`, both directions). Its delay is real, too, but made here: frames wait in this process between
two TAP devices, so a delay is late by up to a few milliseconds on a busy machine. There is no loss and no reordering.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.system.linux import patience

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")
PRIVATE = ("/tmp", "/var/tmp", "/home", "/run", "/dev/shm")
HOME = "/home"
# Makes disks read-only, mounts empty folders, with this project and this Python in them if they lay there, and waits for the end.
BEGIN = """
set -e
for folder in $(findmnt -rno TARGET -t ext4,xfs,btrfs,overlay -O rw); do mount -o remount,bind,ro $folder; done
mount -t tmpfs none /mnt
number=0
for folder in $SHARED; do number=$((number + 1)); mkdir /mnt/$number; mount --bind $folder /mnt/$number; done
for folder in $PRIVATE; do mount -t tmpfs none $folder; done
number=0
for folder in $SHARED; do number=$((number + 1)); mkdir -p $folder; mount --move /mnt/$number $folder; done
umount /mnt
hostname "$NAME"
ip link set lo up
echo ready
exec sleep infinity
"""
MAKE_BUCKET = """
import sys, time
from urllib.error import URLError
from urllib.request import Request, urlopen
while True:
    try:
        urlopen(Request(sys.argv[1], method="PUT"))
        break
    except URLError:
        time.sleep(0.1)  # it has not begun
"""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's link to the switch: Mbit/s and milliseconds in each direction; 0: unlimited, none."""

    rate: float = 0
    delay: float = 0


class Space:
    """A process with namespaces of its own, which end with it, and it with this thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", BEGIN]
        shared = f"{ROOT} {sys.base_prefix}"
        environment = {"PATH": os.environ["PATH"], "PRIVATE": " ".join(PRIVATE), "SHARED": shared, "NAME": name}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_parent
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"
        [self.pid] = map(int, Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split())

    def enter(self, *words: str) -> list[str]:
        """Return a command that runs another inside."""
        return ["nsenter", f"--target={self.pid}", "--all", *words]

    def kill(self) -> None:
        """End all processes inside, as a loss of power would."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def configure(self, *commands: str) -> None:
        for command in commands:
            subprocess.run(["nsenter", f"--target={self.pid}", "--net", *command.split()], check=True)


class Host(Space):
    """A host with an address and folders of its own."""

    address: str

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command with this package and its environment."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": HOME,
            "TMPDIR": "/tmp",
            "PYTHONPATH": f"{ROOT}",
            "OMP_NUM_THREADS": "1",
        } | options.pop("env", {})
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = self.enter("env", f"--chdir={HOME}", *words)
        return subprocess.Popen(command, env=environment, text=True, **(pipes | options))

    def run(self, *words: str, seconds: float = 60, **options: Any) -> str:
        """Run a command to its end and return its output. Raises AssertionError with the output if it fails."""
        process = self.start(*words, **options)
        try:
            output, _ = process.communicate(timeout=patience(seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{self.name}: {words} takes too long: {process.communicate()[0]}") from None
        assert process.returncode == 0, f"{self.name}: {words} returned {process.returncode}: {output}"
        return output

    def python(self, code: str, *words: str, **options: Any) -> str:
        return self.run("python", "-c", code, *words, **options)

    def send(self, folder: Path, to: str) -> None:
        """Copy a folder of this machine to the host."""
        with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as packed:
            subprocess.run(self.enter("sh", "-c", f"mkdir -p {to} && tar -C {to} -x"), stdin=packed.stdout, check=True)

    def take(self, folder: str, to: Path) -> None:
        """Copy a folder of the host to this machine."""
        to.mkdir()
        with subprocess.Popen(self.enter("tar", "-C", folder, "-c", "."), stdout=subprocess.PIPE) as packed:
            subprocess.run(["tar", "-C", to, "-x"], stdin=packed.stdout, check=True)


# Moto sends the head and the body of an answer apart. Nagle's algorithm would hold the body back until the other side's delayed
# acknowledgement, for 40 ms.
SERVE_STORE = """
import sys
from moto.server import main
from werkzeug.serving import WSGIRequestHandler
WSGIRequestHandler.disable_nagle_algorithm = True
main(["-H", sys.argv[1], "-p", "5000"])
"""


class ObjectStore:
    """S3 by moto on a host. `environment`: variables with which clients find it."""

    def __init__(self, host: Host, bucket: str) -> None:
        address = f"http://{host.address}:5000"
        self.url = f"s3://{bucket}"
        self.environment = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any")
        self.environment |= {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}
        host.start("python", "-c", SERVE_STORE, host.address, stdout=subprocess.DEVNULL)
        host.python(MAKE_BUCKET, f"{address}/{bucket}")


class Network:
    """A switch and its hosts. Use it in `with`."""

    def __init__(self) -> None:
        self._stack, self._frames = ExitStack(), Frames()
        self._numbers = count(1)

    def __enter__(self) -> Network:
        self._switch = Space("switch")
        self._stack.callback(self._switch.kill)
        self._stack.callback(self._frames.stop)
        self._switch.configure("ip link add bridge type bridge", "ip link set bridge up")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def host(self, name: str, link: Link | None = None) -> Host:
        """Add a host."""
        number, link = next(self._numbers), link or Link()
        host, port = Host(name), f"port{number}"
        self._stack.callback(host.kill)
        host.address = f"10.77.0.{number}"
        if link.delay:
            self._frames.join(tap(host.pid, "eth0"), tap(self._switch.pid, port), link.delay / 1000)
        else:
            self._switch.configure(f"ip link add {port} type veth peer name eth0 netns {host.pid}")
        self._switch.configure(f"ip link set {port} master bridge up")
        host.configure(f"ip addr add {host.address}/24 dev eth0", "ip link set eth0 up")
        for space, device in ((host, "eth0"), (self._switch, port)) if link.rate else ():
            space.configure(f"tc qdisc add dev {device} root tbf rate {link.rate}mbit burst 64kb latency 400ms")
        return host

    def cut(self, host: Host, down: bool = True) -> None:
        """Pull the plug of a host's link, or put it back."""
        number = host.address.rpartition(".")[2]
        self._switch.configure(f"ip link set port{number} {'down' if down else 'up'}")


class Frames:
    """Carries frames between pairs of TAP devices, each after the delay of its link."""

    def __init__(self) -> None:
        self._peers: dict[int, tuple[int, float]] = {}
        self._poll, self._ended = select.poll(), threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def join(self, first: int, second: int, delay_s: float) -> None:
        self._peers |= {first: (second, delay_s), second: (first, delay_s)}
        for device in (first, second):
            os.set_blocking(device, False)
            self._poll.register(device, select.POLLIN)
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for device in self._peers:
            os.close(device)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        order = count()
        while not self._ended.is_set():
            timeout = waiting[0][0] - time.monotonic() if waiting else 0.1
            for device, _ in self._poll.poll(max(0.0, timeout) * 1000):
                peer, delay_s = self._peers[device]
                try:
                    frame = os.read(device, 1 << 17)
                except OSError:  # of a host that is gone
                    self._poll.unregister(device)
                    continue
                heapq.heappush(waiting, (time.monotonic() + delay_s, next(order), peer, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, peer, frame = heapq.heappop(waiting)
                try:
                    os.write(peer, frame)
                except OSError:  # of a host that is gone, or down
                    continue


def tap(pid: int, name: str) -> int:
    """Make a TAP device in the network namespace of a process, and return its file."""
    devices: list[int] = []

    def make() -> None:  # in a thread of its own, which alone enters the namespace
        with open(f"/proc/{pid}/ns/net") as space:
            assert _libc.setns(space.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNET
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        # TUNSETIFF: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x5002))
        # TUNSETOFFLOAD: TUN_F_CSUM | TUN_F_TSO4. TCP hands over up to 64 KB at a time, of which it counts the frames.
        fcntl.ioctl(device, 0x400454D0, 3)
        devices.append(device)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    [device] = devices
    return device


def _end_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def missing() -> str:
    """Return why hosts cannot be had here; empty if they can."""
    if not sys.platform == "linux" or os.getuid() != 0:
        return "hosts are namespaces of Linux, which root alone may make"
    missing_programs = [name for name in ("unshare", "nsenter", "ip", "tc") if not shutil.which(name)]
    return f"no {', '.join(missing_programs)} here (packages util-linux and iproute2)" if missing_programs else ""
