"""Headers of blocks: what is written is read, whatever lies behind; what is cut or claims too much is refused."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.kernels.delta import block as delta_header

U = np.uint64
NUMBERS = st.integers(0, 2**64 - 1)


@given(st.integers(0, 2**32), st.integers(1, 16), st.binary(max_size=9))
def test_codes_come_back(seed: int, count: int, behind: bytes) -> None:
    random = np.random.default_rng(seed)
    first, codes = random.integers(0, 256 - count), np.zeros(256, np.uint8)
    codes[first : first + count] = (
        random.integers(0, 160, count) if random.random() < 0.5 else 90 - 8 * np.arange(count) // 2
    )
    codes[:first], header = codes[first], np.zeros(600, np.uint8)
    header[:2] = first, count - 1
    end = int(delta_header.write_codes(codes, U(first), U(first + count - 1), header, U(2)))
    assert end - 2 <= 1 + 1.5 * count
    found = np.zeros(256, np.uint8)
    body = np.concatenate([header[:end], np.frombuffer(behind, np.uint8)])
    assert delta_header.read_codes(body, found, U(255)) == (0, first, count - 1, end)
    assert np.array_equal(found, codes)


@given(st.integers(0, 2**35 - 1), st.binary(max_size=3))
def test_numbers_come_back(number: int, behind: bytes) -> None:
    header = np.zeros(9, np.uint8)
    end = int(delta_header.write_number(U(number), header, U(1)))
    body = np.concatenate([header[:end], np.frombuffer(behind, np.uint8)])
    assert delta_header.read_number(body, U(1)) == (number, end)
    assert delta_header.read_number(body[: end - 1], U(1))[1] > end - 1


@given(NUMBERS)
def test_small_differences_are_small_numbers(difference: int) -> None:
    number = int(delta_header.zigzag(U(difference)))
    signed = difference - 2**64 if difference >= 2**63 else difference
    assert number == (2 * signed if signed >= 0 else -2 * signed - 1)
    assert delta_header.unzigzag(U(number)) == difference


def written(count: int, n: int, cuts: list[int], words: list[int], states: list[int]) -> np.ndarray:
    header = np.full(80, 7, np.uint8)
    arrays = (np.array(x, np.uint64) for x in ([*cuts, n], words, states))
    end = delta_header.write_states(U(count), *arrays, header, U(3))
    return np.concatenate([header[: int(end)], np.zeros(4 * sum(words), np.uint8)])


def read(body: np.ndarray, n: int) -> tuple[int, int, int, list[int], list[int], list[int]]:
    ends, words, states = np.full(4, U(n)), np.zeros(4, np.uint64), np.zeros(4, np.uint64)
    fault, count, begin = delta_header.read_states(body, U(3), ends, words, states)
    return int(fault), int(count), int(begin), ends.tolist(), words.tolist(), states.tolist()


@given(st.data())
def test_states_come_back(data: st.DataObject) -> None:
    n = data.draw(st.integers(1024, 2**20))
    count = data.draw(st.integers(1, n))
    quarters = 4 if count >= 1024 else 1
    states = data.draw(st.lists(st.integers(1, 2**64 - 1), min_size=quarters, max_size=quarters))
    words = data.draw(st.lists(st.integers(0, 3000), min_size=quarters, max_size=quarters))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=3, max_size=3))) if quarters == 4 else [n] * 3
    body = written(count, n, cuts, [*words, 0, 0, 0][:4], [*states, 1, 1, 1][:4])
    begin = len(body) - 4 * sum(words)
    used = np.cumsum([*words, 0, 0, 0][:4]).tolist()
    assert read(body, n) == (0, count, begin, [*cuts, n], used, [*states, 1, 1, 1][:4])
    assert [read(body[:cut], n)[0] for cut in range(3, begin)] == [3] * (begin - 3)
    assert read(body[:-1], n)[0] == 3


def test_more_than_there_is_is_refused() -> None:
    states, words = [2**40] * 4, [10, 11, 9, 10]
    assert read(written(2000, 4000, [1000, 2000, 3000], words, states), 4000)[0] == 0
    assert read(written(4001, 4000, [1000, 2000, 3000], words, states), 4000)[0] == 6
    assert read(written(1001, 1000, [1000] * 3, [40, 0, 0, 0], states), 1000)[0] == 6
    for cuts in ([1000, 2000, 4001], [1000, 900, 3000], [2**63, 2000, 3000], [4001, 4001, 4001]):
        assert read(written(2000, 4000, cuts, words, states), 4000)[0] in {3, 6}
    body = written(2000, 4000, [1000, 2000, 3000], words, states)
    assert read(body[:-40], 4000)[0] == 0 and read(body[:-44], 4000)[0] == 3
    for at in range(3, len(body) - 160):  # whatever is read, limits are in order and within
        for bit in range(8):
            fault, count, begin, ends, used, _ = read(
                np.where(np.arange(len(body)) == at, body ^ (1 << bit), body), 4000
            )
            if not fault:
                assert count <= 4000 and ends == sorted(ends) and ends[-1] == 4000
                assert used == sorted(used) and used[-1] * 4 == len(body) - begin
