"""Attacks on what keeps a sandbox apart: the host's files, links, networks, the kernel, what is inherited. Cases 19 to 22, 29."""

from __future__ import annotations

from pathlib import Path

from composer_nb.harness.attacks.case import SECRET, SECRET_NAME, Verdict
from composer_nb.harness.attacks.site import REFUSED, SPEC, SandboxCase, Site, nothing, python, register
from composer_nb.harness.linux import machine

CASES: list[SandboxCase] = []


@register(CASES, 19, "read files and environments of the host and of other sandboxes")
def read_the_host(site: Site) -> Verdict:
    source = """
found = []
for path in A[0]:
    attempt(found, path, lambda: open(path, "rb").read(40))
for pid in [p for p in os.listdir("/proc") if p.isdigit()] + ["self"]:
    for name in ("environ", "cmdline", "root/etc/shadow", "cwd/secret"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                text = file.read()
        except OSError:
            continue
        if A[1].encode() in text:
            found.append(f"/proc/{pid}/{name}")
if found:
    print(json.dumps(found))
    raise SystemExit
for top in ("/", "/tmp", "/workspace", "/dev/shm", "/var", "/home", "/root", "/run"):
    for folder, below, files in os.walk(top):
        below[:] = [name for name in below if os.path.join(folder, name) not in ("/proc", "/sys", "/usr", "/dev")]
        for name in files:
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    if A[1].encode() in file.read(1 << 20):
                        found.append(os.path.join(folder, name))
            except OSError:
                pass
print(json.dumps(found))
"""
    names = [
        "/etc/shadow",
        str(Path.home() / ".bashrc"),
        "/run/docker.sock",
        "/var/run/docker.sock",
        str(site.canary),
        str(Path(__file__)),
    ]
    names += [f"/proc/1/root{site.canary}", f"/proc/self/root{site.canary}", f"/workspace/../..{site.canary}"]
    with site.backend.create(SPEC) as neighbour, site.backend.create(SPEC) as box:
        neighbour.write("secret", SECRET.encode())
        return nothing(python(box, source, names, SECRET))


@register(CASES, 20, "lead file tools and the reading of results out of the workspace by links")
def links(site: Site) -> Verdict:
    with site.backend.create(SPEC) as box:
        box.exec(["bash", "-c", f"mkdir /tmp/out; echo {SECRET} > /tmp/out/file; mkdir real; echo inside > real/file"])
        made = "ln -s /tmp/out/file a; ln -s ../../../tmp/out b; ln /etc/passwd c; ln -s /proc/1/root d; ln -s /proc/self/fd e"
        box.exec(["bash", "-c", made + "; mkfifo f; ln -s g g"])
        found = []
        for path in (
            "a",
            "b/file",
            "d/tmp/out/file",
            "e/0",
            "f",
            "g",
            "/tmp/out/file",
            "../tmp/out/file",
            "real/../../tmp/out/file",
        ):
            try:
                if SECRET.encode() in box.read(path):
                    found.append(path)
            except REFUSED:
                pass
        swap = "while :; do ln -sfn real x; ln -sfn /tmp/out x; rm x; mkdir x; echo inside > x/file; rm -r x; done"
        pid = box.exec_background(["bash", "-c", swap], log="log")
        reads = 0
        for _ in range(300):
            try:
                if SECRET.encode() in box.read("x/file"):
                    found.append("swapped")
                reads += 1
            except REFUSED:
                pass
        box.end(pid)
        for path, data in box.download().items():
            if SECRET.encode() in data or path.startswith("/") or ".." in path.split("/"):
                found.append(f"download {path}")
        verdict = nothing(found)
        return Verdict(
            blocked=verdict.blocked, detail=f"{verdict.detail}; {reads} reads of a path that was swapped meanwhile"
        )


@register(CASES, 21, "reach a network, the host's sockets or a package index")
def network(site: Site) -> Verdict:
    source = """
import socket
found = []
port, path, abstract = A
def tcp(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(address)
def udp(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        s.sendto(b"x", address)
        s.recv(1)
for host in ("1.1.1.1", "169.254.169.254", "10.0.0.1", "172.17.0.1", "192.168.0.1"):
    attempt(found, host, lambda: tcp(socket.AF_INET, (host, 80)))
attempt(found, "loopback of the host", lambda: tcp(socket.AF_INET, ("127.0.0.1", port)))
attempt(found, "ipv6", lambda: tcp(socket.AF_INET6, ("2606:4700:4700::1111", 80)))
attempt(found, "udp", lambda: udp(("1.1.1.1", 53)))
attempt(found, "name", lambda: socket.getaddrinfo("example.com", 80))
for name in (path, "\\0" + abstract, "/var/run/docker.sock", "/run/docker.sock", "/run/dbus/system_bus_socket"):
    attempt(found, name, lambda: tcp(socket.AF_UNIX, name))
for family, kind in ((16, 3), (17, 3), (38, 5), (40, 1)):  # netlink, packet, crypto, the hypervisor's
    attempt(found, "family " + str(family), lambda: socket.socket(family, kind).close())
import subprocess
for command in ("python3 -m pip download six", "curl -m2 http://1.1.1.1", "wget -T2 -t1 http://1.1.1.1"):
    attempt(found, command, lambda: subprocess.run(command.split(), check=True, capture_output=True, timeout=20) and None)
print(json.dumps(found))
"""
    with site.backend.create(SPEC) as box:
        name = site.abstract.getsockname().decode().lstrip("\0")
        found = python(box, source, site.tcp.getsockname()[1], site.local.getsockname(), name, timeout_s=90)
    return nothing(found + site.reached())


@register(CASES, 22, "namespaces, mounts, tracing, io_uring, keys, a terminal's input")
def kernel(site: Site) -> Verdict:
    source = """
import fcntl, subprocess
found = []
clone, io_uring, keyctl, ptrace, bpf, userfaultfd, unshare, setns = A[0]
for name, number, first in (("clone", clone, 0x10000011), ("io_uring", io_uring, 1), ("keyctl", keyctl, 0),
                            ("ptrace", ptrace, 16), ("bpf", bpf, 0), ("userfaultfd", userfaultfd, 0),
                            ("unshare", unshare, 0x10000000)):
    def call():
        pid = syscall(number, first, 1, 0, 0, 0)
        if name == "clone" and pid == 0:
            os._exit(0)
    attempt(found, name, call)
for command in ("unshare -Ur true", "mount -t tmpfs x /tmp", "mount -o remount,rw /", "umount /proc", "chroot / true",
                "nsenter -t 1 -m true", "mknod /tmp/sda b 8 0", "echo 1 > /proc/sys/kernel/panic_on_oops",
                "echo x > /proc/sysrq-trigger", "date -s 2001-01-01", "hostname other", "sysctl -w kernel.panic=1",
                "swapon /tmp/x"):
    attempt(found, command, lambda: subprocess.run(["bash", "-c", command], check=True, capture_output=True) and None)
master, slave = os.openpty()
def type_on_it():
    fcntl.ioctl(slave, 0x5412, b"x")
attempt(found, "TIOCSTI", type_on_it)
attempt(found, "setuid", lambda: os.setuid(0))
print(json.dumps(found))
"""
    x86 = machine()["column"] == 0
    numbers = (56, 425, 250, 101, 321, 323, 272, 308) if x86 else (220, 425, 219, 117, 280, 282, 97, 268)
    with site.backend.create(SPEC) as box:
        return nothing(python(box, source, numbers))


@register(CASES, 29, "inherited descriptors, environment, files of root left behind")
def inherited(site: Site) -> Verdict:
    source = """
found = []
for fd in range(3, 300):
    attempt(found, "fd " + str(fd), lambda: os.fstat(fd) and None)
found += [name for name, value in os.environ.items() if A[0] in value or name == A[1]]
if os.getuid() == 0 or os.getgid() == 0 or 0 in os.getgroups():
    found.append("root")
print(json.dumps(found))
"""
    with site.backend.create(SPEC) as box:
        found = python(box, source, SECRET, SECRET_NAME)
        owners = box.exec(["bash", "-c", "touch mine; find . /tmp -uid 0 -type f"]).stdout
        if owners.strip():
            found.append(f"files of root: {owners!r}")
    return nothing(found)
