"""A second reading of the filters: a small interpreter of classic BPF runs them on call numbers and arguments."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from composer_nb.harness.sandbox.system.linux import MACHINES
from composer_nb.harness.sandbox.system.seccomp import ABSENT, KERNEL, PROCESS, RULED, system_call_filter

ALLOW, DENY, MISSING, KILL, IGNORE = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000, 0x00050000
NAMESPACES = (0x80, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
THREAD = 0x003D0F00
Verdict = Callable[..., int]


def reader(program: bytes, arch: int) -> Verdict:
    def verdict(number: int, *arguments: int, arch: int = arch) -> int:
        data, accumulator, at = {0: number, 4: arch}, 0, 0
        for place, value in enumerate((*arguments, *6 * (0,))):
            data |= {16 + 8 * place: value & 0xFFFFFFFF, 20 + 8 * place: value >> 32}
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


def test_both_refuse_the_kernel_and_strange_numbers(table: dict[str, int]) -> None:
    for calls in (True, False):
        verdict = reader(system_call_filter(table, calls=calls), table["arch"])
        for name, numbers in KERNEL.items():
            number = numbers[table["column"]]
            assert number is None or verdict(number) == DENY, name
        assert all(verdict(numbers[table["column"]]) == MISSING for numbers in ABSENT.values())
        fcntl = (72, 25)[table["column"]]
        assert all(verdict(fcntl, 3, command) == DENY for command in (1024, 1026)) and verdict(fcntl, 3, 1) == ALLOW
        locks = [verdict(fcntl, 3, command) for command in (6, 7, 37, 38)]
        assert locks == [DENY if calls else ALLOW] * 4
        assert verdict(table["clone3"]) == MISSING and verdict(0x40000000 + 1) == MISSING and verdict(999) == MISSING
        assert verdict(1, arch=0x40000003) == KILL
        assert verdict(63 if table["column"] else 0) == ALLOW  # read
        assert all(verdict(table["clone"], THREAD | flag) == DENY for flag in NAMESPACES)
        assert verdict(table["clone"], THREAD) == ALLOW


def test_a_function_call_starts_threads_alone(table: dict[str, int]) -> None:
    verdict = reader(system_call_filter(table, calls=True), table["arch"])
    for name, numbers in PROCESS.items():
        number = numbers[table["column"]]
        assert number is None or verdict(number) == DENY, name
    assert verdict(table["clone"], 17) == DENY
    assert verdict(table["clone"], THREAD | 0x4000) == DENY  # vfork's wait


def test_commands_start_processes_and_talk_to_themselves(table: dict[str, int]) -> None:
    verdict, column = reader(system_call_filter(table), table["arch"]), table["column"]
    assert verdict(table["clone"], 17) == ALLOW and verdict(table["clone"], 17 | 0x4100) == ALLOW
    assert verdict((59, 221)[column]) == ALLOW  # execve
    socket, ioctl, prlimit = ((41, 198)[column], (16, 29)[column], (302, 261)[column])
    assert [verdict(socket, family) for family in range(50)].count(ALLOW) == 3
    assert all(verdict(socket, family) == ALLOW for family in (1, 2, 10))
    assert (
        verdict(ioctl, 0, 0x5412) == DENY and verdict(ioctl, 0, 0x541C) == DENY and verdict(ioctl, 0, 0x5413) == ALLOW
    )
    assert verdict(prlimit, 0) == ALLOW and verdict(prlimit, 1) == DENY
    for number, kind in (((141, 140)[column], 0), ((251, 30)[column], 1)):  # setpriority, ioprio_set
        asked = [verdict(number, who, process) for who in (0, 1, 2) for process in (0, 1)]
        assert asked == [ALLOW if (who, process) == (kind, 0) else DENY for who in (0, 1, 2) for process in (0, 1)]
    for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        assert [verdict(RULED[name][column], process) for process in (0, 1)] == [IGNORE, DENY]


def test_locks_of_a_grade_have_no_effect(table: dict[str, int]) -> None:
    verdict, column = reader(system_call_filter(table, locks=False), table["arch"]), table["column"]
    fcntl = RULED["fcntl"][column]
    asked = {command: verdict(fcntl, 3, command) for command in (1, 5, 6, 7, 36, 37, 38, 1024, 1026)}
    assert asked == {1: ALLOW, 5: ALLOW, 36: ALLOW} | dict.fromkeys((6, 7, 37, 38), IGNORE) | dict.fromkeys(
        (1024, 1026), DENY
    )
    assert verdict(PROCESS["flock"][column] or 0, 3, 2) == IGNORE
    assert verdict(PROCESS["inotify_init1"][column] or 0, 0) == MISSING


def test_shared_pages_and_core_dumps_are_left_alone(table: dict[str, int]) -> None:
    verdict, column = reader(system_call_filter(table), table["arch"]), table["column"]

    def allowed(numbers: tuple[int, int], arguments: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [each for each in arguments if verdict(numbers[column], *each) == ALLOW]

    assert allowed((221, 223), [(3, 0, 0, advice) for advice in range(8)]) == [(3, 0, 0, n) for n in range(3)]
    refused = {12, 14, 20, 21, 25}
    assert allowed((28, 233), [(0, 9, advice) for advice in range(30)]) == [
        (0, 9, n) for n in range(30) if n not in refused
    ]
    assert allowed((327, 286), [(3, 9, 1, 0, 0, flags) for flags in (0, 1, 8, 0x80)]) == [(3, 9, 1, 0, 0, 0)]
    for options in ((55, 209), (54, 208)):
        asked = [(3, 1, 57), (3, 1, 76), (3, 1, 77), (3, 1, 3), (3, 6, 57)]
        assert allowed(options, asked) == [(3, 1, 3), (3, 6, 57)]
    assert verdict(table["clone"], 0x1011) == DENY
    new, high = 0x7FFF12345678, 0x7F0000000000  # addresses; the second one's low word is 0
    assert allowed((302, 261), [(0, 4, 0, 9), (0, 4, new), (0, 4, high), (0, 7, new)]) == [(0, 4, 0, 9), (0, 7, new)]
    if column == 0:
        assert allowed((160, 164), [(4, new), (7, new)]) == [(7, new)]


def test_what_counts_for_the_whole_machine_is_refused(table: dict[str, int]) -> None:
    verdict, column = reader(system_call_filter(table), table["arch"]), table["column"]
    number = {name: numbers[column] for name, numbers in RULED.items()}
    for level, name in ((0, 51), (1, 26), (1, 50), (1, 51), (1, 52), (1, 71), (1, 73), (41, 32)):
        assert verdict(number["setsockopt"], 3, level, name) == DENY
    assert [verdict(number["setsockopt"], 3, 1, name) for name in (7, 8)] == [0x00050000] * 2
    for level, name in ((0, 26), (1, 2), (1, 32), (6, 1), (6, 7), (41, 26), (41, 51)):
        assert verdict(number["setsockopt"], 3, level, name) == ALLOW
    assert verdict(number["socket"], 2, 1, 262) == DENY
    assert verdict(number["socket"], 40, 1, 0) == DENY
    assert verdict(number["socket"], 10, 2, 17) == ALLOW
    assert [verdict(number["prctl"], name) for name in (67, 15)] == [DENY, ALLOW]
    assert [verdict(number["mmap"], 0, 1, 1, flags) for flags in (0x40022, 0x22)] == [DENY, ALLOW]
    assert [verdict(number["memfd_create"], 0, flags) for flags in (5, 3)] == [DENY, ALLOW]
    assert [verdict(number["shmget"], 0, 1, flags) for flags in (0x800, 0x3FF)] == [DENY, ALLOW]
    assert [verdict(number["fcntl"], 3, command) for command in (1036, 1038, 6)] == [DENY, DENY, ALLOW]
