"""A second reading of the filters: a small interpreter of classic BPF runs them on call numbers and arguments."""

import struct
from collections.abc import Callable

import pytest

from composer_nb.harness.sandbox.system.linux import MACHINES
from composer_nb.harness.sandbox.system.seccomp import ABSENT, KERNEL, PROCESS, RULED, system_call_filter

ALLOW, DENY, MISSING, KILL, IGNORE = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000, 0x00050000
INVALID = 0x00050016
NAMESPACES = (0x80, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
THREAD = 0x003D0F00
NEW, HIGH = 0x7FFF12345678, 0x7F0000000000  # addresses; the second one's low word is 0
Verdict = Callable[..., int]


def reader(program: bytes, arch: int) -> Verdict:
    def verdict(number: int, *arguments: int, arch: int = arch) -> int:
        data, accumulator, at = {0: number, 4: arch}, 0, 0
        for index, value in enumerate((*arguments, *6 * (0,))):
            data |= {16 + 8 * index: value & 0xFFFFFFFF, 20 + 8 * index: value >> 32}
        while True:
            code, yes, no, k = struct.unpack_from("=HBBI", program, 8 * at)
            at += 1
            if code == 0x20:
                accumulator = data[k]
            elif code == 0x06:
                return int(k)
            else:
                at += yes if {0x15: accumulator == k, 0x25: accumulator > k, 0x45: bool(accumulator & k)}[code] else no

    return verdict


@pytest.fixture(params=sorted(MACHINES))
def table(request: pytest.FixtureRequest) -> dict[str, int]:
    return MACHINES[request.param]


def test_all_refuse_the_kernel_and_strange_numbers(table: dict[str, int]) -> None:
    for options in ({"calls": True}, {"locks": False}, {}):
        verdict = reader(system_call_filter(table, **options), table["arch"])
        refused = KERNEL | PROCESS if options.get("calls") else KERNEL
        for name, numbers in refused.items():
            number = numbers[table["column"]]
            assert number is None or verdict(number) == DENY, name
        assert all(verdict(numbers[table["column"]]) == MISSING for numbers in ABSENT.values())
        assert verdict(table["clone3"]) == MISSING and verdict(0x40000000 + 1) == MISSING and verdict(999) == MISSING
        assert verdict(1, arch=0x40000003) == KILL
        assert verdict(63 if table["column"] else 0) == ALLOW  # read
        assert all(verdict(table["clone"], THREAD | flag) == DENY for flag in NAMESPACES)
        assert verdict(table["clone"], THREAD) == ALLOW and verdict(table["clone"], 0x1011) == DENY


FCNTL = dict.fromkeys((1, 5, 36, 6, 7, 37, 38), ALLOW) | dict.fromkeys((1024, 1026, 1036, 1038), DENY)
# Of commands: the call, and arguments with the answer to them.
RULES: dict[str, dict[tuple[int, ...], int]] = {
    "clone": {(17,): ALLOW, (17 | 0x4100,): ALLOW},
    "execve": {(): ALLOW},
    "socket": {(family, 1, 0): ALLOW if family in (1, 2, 10) else DENY for family in range(50)}
    | {(2, 1, 262): DENY, (40, 1, 0): DENY, (10, 2, 17): ALLOW},
    "ioctl": {(0, 0x5412): DENY, (0, 0x541C): DENY, (0, 0x5413): ALLOW},
    "fcntl": {(3, command): answer for command, answer in FCNTL.items()},
    "prlimit64": {(0,): ALLOW, (1,): DENY, (0, 4, 0, 9): ALLOW, (0, 4, NEW): DENY, (0, 4, HIGH): DENY, (0, 7, NEW): ALLOW},
    "setrlimit": {(4, NEW): DENY, (7, NEW): ALLOW},
    "setpriority": {(who, process): ALLOW if (who, process) == (0, 0) else DENY for who in range(3) for process in range(2)},
    "ioprio_set": {(who, process): ALLOW if (who, process) == (1, 0) else DENY for who in range(3) for process in range(2)},
    **{f"sched_set{name}": {(0,): IGNORE, (1,): DENY} for name in ("affinity", "scheduler", "param", "attr")},
    "fadvise64": {(3, 0, 0, advice): ALLOW if advice < 3 else DENY for advice in range(8)},
    "madvise": {(0, 9, advice): DENY if advice in (12, 14, 20, 21, 25) else ALLOW for advice in range(30)},
    "preadv2": {(3, 9, 1, 0, 0, flags): DENY if flags else ALLOW for flags in (0, 1, 8, 0x80)},
    "getsockopt": {(3, 1, 57): DENY, (3, 1, 76): DENY, (3, 1, 77): DENY, (3, 1, 3): ALLOW, (3, 6, 57): ALLOW},
    "setsockopt": {(3, *name): DENY for name in ((0, 51), (1, 26), (1, 50), (1, 51), (1, 52), (1, 71), (1, 73), (41, 32))}
    | {(3, *name): ALLOW for name in ((0, 26), (1, 2), (1, 32), (6, 1), (6, 7), (41, 26), (41, 51))}
    | {(3, 1, 7): IGNORE, (3, 1, 8): IGNORE},
    "prctl": {(67,): DENY, (22, 1): INVALID, (22, 2, NEW): INVALID, (15,): ALLOW, (38, 1): ALLOW},
    "mmap": {(0, 1, 1, 0x40022): DENY, (0, 1, 1, 0x22): ALLOW},
    "memfd_create": {(0, 5): DENY, (0, 3): ALLOW},
    "shmget": {(0, 1, 0x800): DENY, (0, 1, 0x3FF): ALLOW},
}  # fmt: skip


def assert_rules(table: dict[str, int], verdict: Verdict, rules: dict[str, dict[tuple[int, ...], int]]) -> None:
    for name, answers in rules.items():
        number = table["clone"] if name == "clone" else RULED[name][table["column"]]
        assert number is None or {arguments: verdict(number, *arguments) for arguments in answers} == answers, name


def test_commands_change_nothing_of_the_machine(table: dict[str, int]) -> None:
    assert_rules(table, reader(system_call_filter(table), table["arch"]), RULES)


def test_a_function_call_starts_threads_alone_and_locks_of_a_grade_have_no_effect(table: dict[str, int]) -> None:
    locks = {(3, command): DENY for command in (6, 7, 37, 38)}
    calls = {"clone": {(17,): DENY, (THREAD | 0x4000,): DENY}, "fcntl": RULES["fcntl"] | locks}
    assert_rules(table, reader(system_call_filter(table, calls=True), table["arch"]), calls)
    grade = {"fcntl": RULES["fcntl"] | dict.fromkeys(locks, IGNORE), "flock": {(3, 2): IGNORE}}
    grade |= {"inotify_init1": {(0,): MISSING}}
    assert_rules(table, reader(system_call_filter(table, locks=False), table["arch"]), grade)
