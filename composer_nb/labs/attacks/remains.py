"""Attacks by what the kernel keeps: what a sandbox leaves for a later one, and memory that no limit may count. Cases 22 to 24."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from dataclasses import replace

from composer_nb.harness.sandbox.contract import SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.sandbox.system.linux import machine
from composer_nb.harness.sandbox.system.seccomp import RULED
from composer_nb.labs.attacks.case import SPEC, AttackVerdict, Cell, Site, nothing, python, register, register_both

BITS = 64
BASIC = replace(SPEC, basic=True)
FILES = """
import mmap, resource
def library():
    top = os.path.dirname(os.__file__)
    paths = [os.path.join(top, name) for name in sorted(os.listdir(top)) if name.endswith(".py")]
    return [path for path in paths if os.path.isfile(path) and os.path.getsize(path)]
def faults(path, every):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        before = resource.getrusage(resource.RUSAGE_SELF)
        for at in range(0, len(pages), 4096) if every else [0]:
            pages[at]
        after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_majflt - before.ru_majflt + after.ru_inblock - before.ru_inblock
"""
WRITE = f"""{FILES}
def f(bits):
    evicted = []
    for path, bit in zip(library(), bits):
        fd = os.open(path, os.O_RDONLY)
        faults(path, True)
        if bit:
            attempt(evicted, path, lambda: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as pages:
                attempt([], path, lambda: pages.madvise(21))  # MADV_PAGEOUT
    return len(evicted)
"""
READ = f"{FILES}\ndef f(count):\n    return [faults(path, False) for path in library()[:count]]\n"
# Uses up the memory of a sandbox, at which the kernel takes the pages of files that count for it.
PRESS = "x = []\nwhile True: x.append(bytearray(b'x') * (4 << 20))"


@register(22, "leave a message for a later sandbox in which pages of common files are in memory")
def page_cache(site: Site) -> AttackVerdict:
    leaks = []
    for spec in (SPEC, BASIC):
        bits = [random.randrange(2) for _ in range(BITS)]
        with site.backend.create(spec) as box, contextlib.suppress(SandboxDied):
            evicted = python(box, WRITE, bits)
            box.exec(["python3", "-c", PRESS], timeout_s=20)
        with site.backend.create(spec) as box:
            received = [int(count > 0) for count in python(box, READ, BITS)]
        correct = sum(sent_bit == received_bit for sent_bit, received_bit in zip(bits, received, strict=True))
        leaks += [f"{correct} of {BITS} bits, {evicted} files evicted"] if any(received) else []
    return nothing(leaks)


@register(22, "be the first to read a file, which a later sandbox notices")
def unread_files(site: Site) -> AttackVerdict:
    source = f"""{FILES}
def f():
    cold, read = [], []
    for top, below, names in os.walk("/"):
        if top == "/":
            below[:] = [name for name in below if name not in ("proc", "sys", "dev")]
        for path in (os.path.join(top, name) for name in names):
            if os.path.isfile(path) and os.path.getsize(path):
                attempt(read, path, lambda: cold.extend([path] * (faults(path, True) > 0)))
    return [len(read), len(cold), cold[:3]]
"""
    with site.backend.create(BASIC) as box:
        count, cold, paths = python(box, source)
    return AttackVerdict(count > 500 and not cold, f"{cold} of {count} files came from a disk {paths}")


@register(22, "leave a message in times of devices, ports, or counters of the whole machine")
def counters_of_the_kernel(site: Site) -> AttackVerdict:
    source = """
import socket
def f():
    found, times = [], []
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        attempt(times, "time of /dev/" + name, lambda: os.utime("/dev/" + name))
    with socket.create_server(("127.0.0.1", 5000)) as server:
        with socket.create_connection(server.getsockname()) as connection:
            attempt(found, "SO_COOKIE", lambda: connection.getsockopt(1, 57, 8) and None)
            attempt(found, "pidfd", lambda: os.fstat(os.pidfd_open(os.getpid())).st_ino > 0)
            attempt(found, "SO_PASSPIDFD", lambda: connection.setsockopt(1, 76, 1))
            return [found, times, connection.getsockname()[1]]
"""
    reports: list[tuple[list[str], list[str], int]] = []
    for _ in range(6):  # one after another
        with site.backend.create(SPEC) as box:
            reports.append(python(box, source))
    own_devices = site.backend.name == "docker"
    leaks = {name for counters, times, _ in reports for name in counters + ([] if own_devices else times)}
    steps = [later[2] - earlier[2] for earlier, later in itertools.pairwise(reports)]
    if sum(0 < step <= 64 for step in steps) >= 3:
        leaks.add(f"ports, which advanced by {steps}")
    return nothing(sorted(leaks))


@register(22, "leave a message in what networks count for the whole machine, or in options of sockets")
def counts_of_networks(site: Site) -> AttackVerdict:
    source = """
import socket, struct
def f(counts):
    found = []
    for name in counts:
        attempt(found, name, lambda: open("/proc/self/net/" + name).read(1) != "" or 1 / 0)
    label = struct.pack("16sIBBHHHI", socket.inet_pton(10, "::1"), 0, 0, 255, 1, 6, 100, 0)
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    filter = struct.pack("HxxxxxxQ", 1, ctypes.addressof(program))
    with socket.socket() as one, socket.socket(10, 2) as six:
        attempt(found, "IP_LOCAL_PORT_RANGE", lambda: one.setsockopt(0, 51, struct.pack("I", 25000 | 49000 << 16)))
        attempt(found, "IPV6_FLOWLABEL_MGR", lambda: six.setsockopt(41, 32, label))
        attempt(found, "SO_ATTACH_FILTER", lambda: six.setsockopt(1, 26, filter))
        attempt(found, "SO_NETNS_COOKIE", lambda: one.getsockopt(1, 71, 8) and None)
    attempt(found, "MPTCP", lambda: socket.socket(2, 1, 262).close())
    return found
"""
    counts = ["softnet_stat", "sockstat", "protocols", "stat/arp_cache"] if os.geteuid() == 0 else []  # else shown
    with site.backend.create(SPEC) as box:
        return nothing(python(box, source, counts))


@register(22, "leave a message in which pages of common files the kernel takes to be in use")
def pages_in_use(site: Site) -> AttackVerdict:
    source = f"""{FILES}
def f(bits):
    read, heard = library(), []
    for path, bit in zip(read, bits):
        for _ in range(3 * bit):
            with open(path, "rb") as file:
                file.read()
    for path in [] if bits else read:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            pages[0]
            with open("/proc/self/numa_maps") as lines:
                heard += [" active=0 " not in line for line in lines if line.split()[2:3] == ["file=" + path]]
    return heard
"""
    bits = [random.randrange(2) for _ in range(BITS)]
    with site.backend.create(BASIC) as box:
        python(box, source, bits)
    with site.backend.create(BASIC) as box:
        received = python(box, source, []) if os.path.exists("/proc/self/numa_maps") else []
    correct = sum(sent_bit == received_bit for sent_bit, received_bit in zip(bits, received, strict=False))
    return nothing([] if all(received) else [f"{correct} of {BITS} bits"])


@register_both(24, "have memory merged with that of others, or take pages that no limit counts")
def uncounted_pages(cell: Cell) -> AttackVerdict:
    source = """
import mmap, resource
def f(create):
    found, name = [], ctypes.create_string_buffer(b"x")
    attempt(found, "PR_SET_MEMORY_MERGE", lambda: libc.prctl(67, 1, 0, 0, 0) == 0 or 1 / 0)
    attempt(found, "MFD_HUGETLB", lambda: syscall(create, ctypes.addressof(name), 4))
    attempt(found, "mlock", lambda: libc.mlock(name, 1) == 0 or 1 / 0)
    try:
        mmap.mmap(-1, 1 << 21, flags=0x40000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        return found + ["MAP_HUGETLB"] * (error.errno != 1)  # not for want of such pages
    return found + ["MAP_HUGETLB"]
"""
    return nothing(cell.run(source, RULED["memfd_create"][machine()["column"]]))


@register_both(22, "have a crash start a program of the host, which a piped core_pattern does unless the limit is 1")
def crash(cell: Cell) -> AttackVerdict:
    source = """
import resource
def f(prlimit):
    found, limits = [], []
    attempt([], "", lambda: limits.extend(resource.getrlimit(resource.RLIMIT_CORE)))  # a function call cannot ask
    if limits not in ([], [1, 1]):
        found.append(f"RLIMIT_CORE={limits}")
    zero = ctypes.create_string_buffer(16)
    zero[8] = 1  # the hard limit stays
    attempt(found, "setrlimit", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 1)))
    attempt(found, "prlimit64", lambda: syscall(prlimit, 0, 4, ctypes.addressof(zero), 0))
    attempt(found, "prlimit64 of itself", lambda: syscall(prlimit, os.getpid(), 4, ctypes.addressof(zero), 0))
    return found
"""
    return nothing(cell.run(source, RULED["prlimit64"][machine()["column"]]))


@register(24, "use up memory of the kernel: buffers of sockets and pipes")
def kernel_memory(site: Site) -> AttackVerdict:
    source = """
import resource, select, socket, struct, time
def tcp():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        ends = one, server.accept()[0]
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
    return ends
def pipe():
    ends = os.pipe()
    return os.fdopen(ends[1], "wb", 0), os.fdopen(ends[0], "rb", 0)
kinds = {"tcp": tcp, "unix": socket.socketpair, "pipe": pipe}
def fill(ends):
    size = 0
    for end in ends if hasattr(ends[0], "send") else ends[:1]:
        os.set_blocking(end.fileno(), False)
        for _ in range(3):
            try:
                while True:
                    size += os.write(end.fileno(), bytes(1 << 16))
            except OSError:
                time.sleep(0.002)  # in which the other end takes more
    return size
def child(kind, report):
    kept = []
    try:
        while True:
            kept.append(kinds[kind]())
            report(fill(kept[-1]))
    except OSError:
        report(-1)
        time.sleep(60)
def f(kind, children):
    source, target = os.pipe()
    started = total = 0
    for _ in range(children):
        try:
            if os.fork() == 0:
                child(kind, lambda size: os.write(target, struct.pack("q", size)))
            started += 1
        except OSError:
            break
    while started and select.select([source], [], [], 10)[0]:
        size, = struct.unpack("q", os.read(source, 8))
        started, total = (started - 1, total) if size < 0 else (started, total + size)
    return total
"""
    details, blocked = [], True
    for kind in ("tcp", "unix", "pipe"):
        with site.backend.create(SPEC) as box:
            try:
                size = python(box, source, kind, 20)
            except (SandboxDied, ValueError):
                details.append(f"{kind}: ended")
                continue
        blocked &= size <= SPEC.memory_bytes
        details.append(f"{kind}: {size >> 20} MiB")
    blocked |= not site.backend.capabilities().enforced["memory_bytes"]  # then the capabilities say so
    return AttackVerdict(blocked, f"{', '.join(details)}; the limit is {SPEC.memory_bytes >> 20} MiB")


@register(23, "use up the pseudo-terminals of the machine")
def terminals(site: Site) -> AttackVerdict:
    source = """
def f():
    return repeat(lambda: os.openpty() and None, 200)
"""
    with site.backend.create(SandboxSpec(open_files=1024)) as box:
        count = python(box, source)
    with site.backend.create(SPEC) as box:
        others = python(box, "def f():\n    return [name for name in os.listdir('/dev/pts') if name != 'ptmx']")
    return AttackVerdict(count <= 64 and not others, f"{count} opened; another sandbox sees {others}")
