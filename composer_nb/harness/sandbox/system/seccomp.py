"""The system call filter of every sandbox, compiled here and installed inside.

It refuses what opens up the kernel (namespaces, mounts, tracing, keys, io_uring, bpf), sockets of all but three families, and
changes of limits and priorities of other processes. A process's wish for certain CPUs or another scheduler is answered as if it
were fulfilled: one that waits for the machine on purpose would look starved (`granted.py`). The filter also refuses what tells or
changes which pages of a file are in memory, what counts for the whole machine, and other limits on core dumps. For a *function
call*, which is one process, it refuses besides whatever makes another process or reaches one: only threads may be started.

For a *grade*, locks are answered as if they were set, and there are no watches. They belong to files, of which sandboxes have
some in common whatever they see: the namespace of the clock, or the interpreter of which all are copies.

Classic BPF over `struct seccomp_data`. Covers x86_64 and aarch64.
"""

import struct
from collections.abc import Mapping

from composer_nb.harness.sandbox.system.linux import NAMESPACES

# name: (x86_64, aarch64); None where the machine has no such call.
# Always refused.
KERNEL = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "syslog": (103, 116), "personality": (135, 92), "fanotify_init": (300, 262), "vmsplice": (278, 75),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
    # The page cache belongs to files that sandboxes share; memory and load of the machine to all.
    "mincore": (27, 232), "cachestat": (451, 451), "readahead": (187, 213), "sysinfo": (99, 179),
}  # fmt: skip
# Refused to function calls too.
PROCESS = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "pidfd_send_signal": (424, 424), "memfd_create": (319, 279),
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "prlimit64": (302, 261), "setrlimit": (160, 164),
    # What would let a program wait for the machine on purpose, and so look starved: low priority, the disks of the host.
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sync": (162, 81), "syncfs": (306, 267), "fadvise64": (221, 223),
    # Locks and watches belong to files of the library, which function calls share.
    "flock": (73, 32), "inotify_init": (253, None), "inotify_init1": (294, 26),
}  # fmt: skip
# Answered ENOSYS, as by a kernel without them, so that programs do without.
ABSENT = {
    "io_setup": (206, 0),  # takes of a small number of contexts that the whole machine has
    "pidfd_open": (434, 434),  # its inode's number counts all processes of the machine
    "seccomp": (317, 277),  # filters of its own are compiled, as those of sockets (OPTIONS)
}
# Allowed in part, to commands (RULES).
RULED = PROCESS | {
    "socketpair": (53, 199), "ioctl": (16, 29), "fcntl": (72, 25), "madvise": (28, 233), "preadv2": (327, 286),
    "getsockopt": (55, 209), "setsockopt": (54, 208), "prctl": (157, 167), "mmap": (9, 222),
}  # fmt: skip
LAST_KNOWN_CALL = 462  # newer calls answer ENOSYS, as on an older kernel
LOAD, EQUAL, GREATER, BITS, RET = 0x20, 0x15, 0x25, 0x45, 0x06
KILL, ALLOW, DENY, MISSING = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026  # errno 1 EPERM, 38 ENOSYS
IGNORE, INVALID = 0x00050000, 0x00050016  # errno 0: the call does nothing and succeeds; 22 EINVAL
# Offsets; of arguments, the low word.
NUMBER, ARCHITECTURE, FIRST, SECOND, THIRD, FOURTH, SIXTH = 0, 4, 16, 24, 32, 40, 56
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: others reach past the network namespace, or deep into the kernel
LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
CORE = 4  # RLIMIT_CORE: below 1 a crash would start the program of a piped core_pattern (core(5)), as root of the host

# A clause: an answer, and the tests of arguments that must all hold for it. A test: an offset, how it compares, and with what.
Clause = tuple[int, *tuple[tuple[int, str, tuple[int, ...]], ...]]
OWN_PROCESS: Clause = (DENY, (FIRST, "none of", (0,)))  # of the caller's own process alone
OPTIONS: list[Clause] = [  # of sockets, by level
    # IP_LOCAL_PORT_RANGE: with equal bounds, ports count the connections of all sandboxes.
    (DENY, (SECOND, "one of", (0,)), (THIRD, "one of", (51,))),
    # SO_COOKIE, SO_NETNS_COOKIE, SO_PASSPIDFD, SO_PEERPIDFD: numbers that count sockets, networks or processes of the machine.
    # SO_ATTACH_FILTER and _BPF, SO_ATTACH_REUSEPORT_CBPF and _EBPF, SO_RESERVE_MEM: compiled filters are in memory that no group
    # counts, of which the whole machine has a fixed size.
    (DENY, (SECOND, "one of", (1,)), (THIRD, "one of", (57, 71, 76, 77, 26, 50, 51, 52, 73))),
    # IPV6_FLOWLABEL_MGR: of 4,096 labels, which the whole machine has.
    (DENY, (SECOND, "one of", (41,)), (THIRD, "one of", (32,))),
]
# For each call, the first clause whose tests hold decides; otherwise it is allowed.
RULES: dict[str, list[Clause]] = {
    # Namespaces, for network, ipc, uts, cgroup and time too, and CLONE_PIDFD.
    "clone": [(DENY, (FIRST, "any bit", (sum(NAMESPACES.values()) | 0x1080,)))],
    # Protocols but ICMP, TCP, UDP and ICMPv6, such as MPTCP, may load a module, and have memory of their own.
    "socket": [(DENY, (FIRST, "none of", FAMILIES)), (DENY, (THIRD, "none of", (0, 1, 6, 17, 58)))],
    "socketpair": [(DENY, (FIRST, "none of", FAMILIES))],
    # TIOCSTI, TIOCLINUX: type on somebody else's terminal.
    "ioctl": [(DENY, (SECOND, "one of", (0x5412, 0x541C)))],
    # F_SETLEASE, F_NOTIFY: hear of what others do to a file, and make them wait. F_SET_RW_HINT, F_SET_FILE_RW_HINT: stay with an
    # inode that the eventfds of all processes share.
    "fcntl": [(DENY, (SECOND, "one of", (1024, 1026, 1036, 1038)))],
    **{f"sched_set{name}": [OWN_PROCESS, (IGNORE,)] for name in ("affinity", "scheduler", "param", "attr")},
    # Reading is fine: then both words of the address of a new limit are 0.
    "prlimit64": [
        OWN_PROCESS,
        *((DENY, (SECOND, "one of", (CORE,)), (word, "none of", (0,))) for word in (THIRD, THIRD + 4)),
    ],
    "setrlimit": [(DENY, (FIRST, "one of", (CORE,)))],
    # Other advice than POSIX_FADV_NORMAL, _RANDOM and _SEQUENTIAL evicts pages of a file or fetches them.
    "fadvise64": [(DENY, (FOURTH, "none of", (0, 1, 2)))],
    # MADV_MERGEABLE, _HUGEPAGE, _COLD, _PAGEOUT, _COLLAPSE: of shared pages, others notice.
    "madvise": [(DENY, (THIRD, "one of", (12, 14, 20, 21, 25)))],
    "preadv2": [(DENY, (SIXTH, "none of", (0,)))],
    "getsockopt": OPTIONS,
    # SO_SNDBUF, SO_RCVBUF: a megabyte and more for each socket.
    "setsockopt": [(IGNORE, (SECOND, "one of", (1,)), (THIRD, "one of", (7, 8))), *OPTIONS],
    # PR_SET_MEMORY_MERGE: as MADV_MERGEABLE, for all memory of a process. PR_SET_SECCOMP: as by a kernel without it.
    "prctl": [(DENY, (FIRST, "one of", (67,))), (INVALID, (FIRST, "one of", (22,)))],
    # MAP_HUGETLB, MFD_HUGETLB, SHM_HUGETLB: pages that no limit on memory counts.
    "mmap": [(DENY, (FOURTH, "any bit", (0x40000,)))],
    "memfd_create": [(DENY, (SECOND, "any bit", (0x4,)))],
    "shmget": [(DENY, (THIRD, "any bit", (0x800,)))],
    "setpriority": [OWN_PROCESS, (DENY, (SECOND, "none of", (0,)))],
    "ioprio_set": [(DENY, (FIRST, "none of", (1,))), (DENY, (SECOND, "none of", (0,)))],
}
# Of function calls: CLONE_VFORK, or no CLONE_THREAD.
THREADS_ALONE: list[Clause] = [(DENY, (FIRST, "any bit", (0x4000,))), (DENY, (FIRST, "no bit", (0x10000,)))]


def system_call_filter(table: Mapping[str, int], *, calls: bool = False, locks: bool = True) -> bytes:
    """Compile the filter for `table`, a machine of `linux.MACHINES`. `calls`: for function calls instead of commands. `locks`:
    whether locks and watches have an effect."""
    column = table["column"]
    program = [_op(LOAD, ARCHITECTURE), _op(EQUAL, table["arch"], 1, 0), _op(RET, KILL), _op(LOAD, NUMBER)]
    program += [_op(GREATER, LAST_KNOWN_CALL, 0, 1), _op(RET, MISSING)]  # x32 numbers are far above it too
    program += [_op(EQUAL, table["clone3"], 0, 1), _op(RET, MISSING)]  # its flags lie in memory: use clone
    without_effect = {} if locks else {"flock": PROCESS["flock"]}
    absent = ABSENT if locks else ABSENT | {name: PROCESS[name] for name in ("inotify_init", "inotify_init1")}
    for group, answer in ((KERNEL | PROCESS if calls else KERNEL, DENY), (absent, MISSING), (without_effect, IGNORE)):
        for numbers in group.values():
            if (number := numbers[column]) is not None:
                program += [_op(EQUAL, number, 0, 1), _op(RET, answer)]
    more: dict[str, list[Clause]] = {"clone": THREADS_ALONE} if calls else {}
    if calls or not locks:
        more["fcntl"] = [(DENY if calls else IGNORE, (SECOND, "one of", LOCKS))]
    for name, clauses in RULES.items():
        number = table["clone"] if name == "clone" else RULED[name][column]
        assert number is not None, f"a rule for {name}, which this machine has not"
        rule = [part for clause in [*clauses, *more.get(name, ())] for part in _compiled(clause)] + [_op(RET, ALLOW)]
        program += [_op(EQUAL, number, 0, len(rule)), *rule]
    return b"".join([*program, _op(RET, ALLOW)])


def _compiled(clause: Clause) -> list[bytes]:
    """Return a clause's code, which goes on behind itself where a test does not hold."""
    answer, *tests = clause
    code = [_op(RET, answer)]
    for offset, how, values in reversed(tests):
        left, checks = len(code), list[bytes]()
        for after, value in zip(reversed(range(len(values))), values, strict=True):  # `after`: values that follow
            match how:
                case "one of":
                    checks.append(_op(EQUAL, value, after, 0 if after else left))
                case "none of":
                    checks.append(_op(EQUAL, value, after + left, 0))
                case "any bit":
                    checks.append(_op(BITS, value, 0, left))
                case "no bit":
                    checks.append(_op(BITS, value, left, 0))
        code = [_op(LOAD, offset), *checks, *code]
    return code


def _op(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, k)
