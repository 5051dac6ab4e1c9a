"""The codec conditioned on the base: every pattern comes back, near the entropy, the same on any thread; damage is refused."""

import struct
import subprocess
import sys
from base64 import b85decode
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.kernels.delta import coder as delta
from composer_nb.kernels.delta.codec import BLOCK, LAYOUTS, Bits, Conditioned, Same, bits
from tests.kernels.delta import conditioned_reference

CODEC = Conditioned()
STORED = {name: f"u{getattr(torch, name).itemsize}" for name in LAYOUTS}
"""What a tensor of a dtype is kept as."""


def round_trip(base: Bits, target: Bits, dtype: str) -> bytes:
    """Return the payload, once it is decoded to the target (by the reference too, where that takes seconds) with the base
    unchanged."""
    before = base.copy()
    payload = CODEC.encode(base, target, dtype)
    assert payload is not None
    decoders = [CODEC.decode, conditioned_reference.decode]
    for decode in decoders if np.count_nonzero(base != target) < 10_000 else decoders[:1]:
        decoded = decode(base, payload, dtype)
        assert decoded.dtype == base.dtype and np.array_equal(decoded, target)
    assert np.array_equal(base, before)
    return payload


def weights(
    count: int, sigma: float = 0.02, lr: float = 1e-6, seed: int = 1, dtype: str = "bfloat16"
) -> tuple[Bits, Bits]:
    """Before and after a step, published from masters that lie anywhere between two numbers of the dtype."""
    noise = torch.Generator().manual_seed(seed)
    w, u = sigma * torch.randn(count, generator=noise), 0.23 * torch.randn(count, generator=noise)
    kind = getattr(torch, dtype)
    return bits(w.to(kind)), bits((w - lr * u).to(kind))


SPECIAL = [
    0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 2.0**-9, 448.0, 65504.0,
    1.0,
]  # fmt: skip


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_bit_comes_back(data: st.DataObject):
    dtype = data.draw(st.sampled_from(list(LAYOUTS)))
    count = data.draw(st.sampled_from([0, 1, 2, 7, 15, 16, 17, 33, 100, 257]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kind = np.dtype(STORED[dtype])
    base = random.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    if LAYOUTS[dtype].width >= 8 and data.draw(st.booleans()):
        base = np.resize(bits(torch.tensor(SPECIAL).to(getattr(torch, dtype))), count)
    changed = base ^ kind.type(1) if data.draw(st.booleans()) else random.permutation(base)
    target = np.where(random.random(count) < data.draw(st.sampled_from([0, 0.02, 0.5, 1])), changed, base)
    round_trip(base, target, dtype)


@pytest.mark.parametrize("dtype", [name for name, kind in STORED.items() if kind == "u1"])
def test_every_pattern_can_become_every_other(dtype: str):
    base, target = (x.reshape(-1).astype(np.uint8) for x in np.mgrid[:256, :256])
    round_trip(base, target, dtype)


@pytest.mark.parametrize("changes", [1023, 1024, 1027])
def test_changes_in_quarters(changes: int):
    """In two heaps. From 1024 on they are in quarters, which have equal numbers of changes and any of elements."""
    random, count = np.random.default_rng(changes), 70_001
    base = (0x3C00 + random.integers(0, 512, count)).astype(np.uint16)
    at = np.r_[5 : 5 + changes // 3, count - changes + changes // 3 : count]
    target = base.copy()
    target[at] += np.where(random.random(changes) < 0.1, 3, 1).astype(np.uint16)
    round_trip(base, target, "bfloat16")


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_quarters_of_any_numbers(seed: int):
    """Steps have any size and may cross zero, in halves that change at different rates."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1100, 30_000))
    base = random.integers(0, 1 << 16, count).astype(np.uint16)
    if random.random() < 0.7:
        base = base & np.uint16(0x83FF) | np.uint16(random.choice([0, 0x3C00]))
    rate = np.where(np.arange(count) < random.integers(0, count), random.choice([0.001, 0.1, 1]), 0.9)
    changed = base + random.choice([1, 0xFFFF, 0x8000, 700], count).astype(np.uint16)
    round_trip(base, np.where(random.random(count) < rate, changed, base), random.choice(["bfloat16", "float16"]))


def test_after_a_long_time_without_a_change_the_next_one_is_still_found():
    """A thousand changes in a row, then none in a hundred times the time that one is waited for."""
    base = np.full(200_000, 0x3C00, np.uint16)
    target = base.copy()
    target[:1000] += 1
    target[[5_000, 199_999]] += 1
    assert len(round_trip(base, target, "bfloat16")) < 1000 * 2


def entropy(base: Bits, target: Bits, dtype: str) -> float:
    """Return the bytes that positions and steps need, given exponents: Σ N·H(changed) + c·H(step)."""
    layout = LAYOUTS[dtype]
    number = torch.from_numpy(base).to(torch.int32), torch.from_numpy(target).to(torch.int32)
    half = 1 << (layout.width - 1)
    step = np.subtract(*(torch.where(x < half, x, half - 1 - x).numpy() for x in number))
    total = 0.0
    for c in np.unique(exponent := (base >> layout.shift) & layout.mask):
        steps = step[exponent == c]
        for n in np.unique(steps, return_counts=True)[1]:
            total -= n * np.log2(n / len(steps))
    return total / 8


@pytest.mark.parametrize(("lr", "over"), [(3e-7, 1.2), (1e-6, 1.08), (1e-5, 1.03), (1e-4, 1.03)])
def test_payloads_are_near_the_entropy(lr: float, over: float):
    base, target = weights(1 << 18, lr=lr)
    payload = round_trip(base, target, "bfloat16")
    assert 0.99 * entropy(base, target, "bfloat16") < len(payload) < over * entropy(base, target, "bfloat16")


def test_rows_that_change_more_than_others_cost_less_than_their_entropy():
    """The clock finds what exponents do not say: one row in eight changes, and no header tells which."""
    base, target = weights(1 << 18, lr=1e-5)
    still = (np.arange(len(base)) // 4096) % 8 != 3
    target = np.where(still, base, target)
    assert len(round_trip(base, target, "bfloat16")) < 0.9 * entropy(base, target, "bfloat16")


def test_threads_make_the_same_payloads_also_of_memory_that_is_read_only_or_not_aligned():
    base, target = weights(1000, lr=1e-4)
    shifted = np.frombuffer(b"\0" + base.tobytes(), np.uint8)[1:].view(np.uint16)
    round_trip(shifted, target, "bfloat16")
    pairs = [weights(60_000, seed=n) for n in range(6)]
    sequential = [CODEC.encode(a, b, "bfloat16") for a, b in pairs]
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(lambda pair: CODEC.encode(*pair, "bfloat16"), pairs * 4))
        decoded = list(pool.map(lambda n: CODEC.decode(pairs[n][0], sequential[n], "bfloat16"), range(6)))
    assert threaded == sequential * 4
    assert all(np.array_equal(m, b) for m, (_, b) in zip(decoded, pairs, strict=True))


def test_a_base_and_a_target_of_other_lengths_are_refused():
    """The shorter one would be read beyond its end."""
    for a, b in ((10, 9), (0, 1), (1 << 16, 1)):
        with pytest.raises(ValueError, match=f"a base of {a} numbers and a target of {b}"):
            CODEC.encode(np.zeros(a, np.uint16), np.zeros(b, np.uint16), "bfloat16")
    assert Same().encode(np.zeros(1 << 16, np.uint16), np.zeros((1 << 16) + 1, np.uint16), "bfloat16") is None


def test_what_has_no_exponents_is_left_to_other_codecs():
    for dtype in ("float64", "int64", "bool"):
        assert CODEC.encode(np.zeros(4, np.uint8), np.ones(4, np.uint8), dtype) is None
        with pytest.raises(ValueError, match=dtype):
            CODEC.decode(np.zeros(4, np.uint8), b"", dtype)
    with pytest.raises(ValueError, match="16 bits"):
        CODEC.encode(np.zeros(4, np.uint32), np.ones(4, np.uint32), "bfloat16")


GOLDEN = {
    (600, 7, 1): "e*kh;2m{+_1j+7p0c&0$4w$sfl3>eRjNoA97M$}@)hbZ@A8=b~rOHU!&;+KIgo=>LV>@0X<LiyGTL",
    (1500, 1, 1): (
        "e*l`?3jhWH0001pc!KtC9lr04!uG?Xl69@0YgPwG9J%<F8`1JV<}mb9%-6OZe6oukfqS7<kx5I?w?)elx7m1zbag$M"
        "Sa2jz>$x_BulJaC5lrvtcZ-i~"
    ),
    (1100, 1, 3): "e*l`y2mlBG0{{V5h&itASSA4@CWvDQ#Y`srH{fA9G3fwYyDZumvih=5mL#3owm;$Q0RWfBpiIswnwGk#W#z73jXVEp",
}
"""Payloads in base 85, by numbers of elements, how many of them change and by how much. They were written when the format got its
name: who changes what they decode to has made another format."""


@pytest.mark.parametrize(("count", "every", "step"), GOLDEN)
def test_payloads_of_the_first_day_are_still_read(count: int, every: int, step: int):
    at = np.arange(count)
    base = (0x3C00 + at * 7919 % 1024).astype(np.uint16)
    target = np.where(at * at % every == 0, base + step, base).astype(np.uint16)
    payload = b85decode(GOLDEN[count, every, step])
    for decode in (CODEC.decode, conditioned_reference.decode):
        assert np.array_equal(decode(base, payload, "bfloat16"), target)


# Damage


def spoil(payload: bytes, random: Random) -> bytes:
    """Bits flipped, cut, grown, a piece repeated, dropped or of zeros, or a number replaced."""
    data, at = bytearray(payload), random.randrange(len(payload))
    match random.randrange(7):
        case 0:
            data[at] ^= 1 << random.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data += random.randbytes(1 + at % 9)
        case 3:
            data[at : at + 4] = data[:4]
        case 4:
            del data[at : at + random.randint(1, 8)]
        case 5:
            data[at : at + 8] = bytes(8)
        case 6:
            at = random.randrange(min(30, len(data)))
            data[at : at + 4] = random.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", random.randbytes(4)])
    return bytes(data)


def fuzz(rounds: int) -> int:
    """Return how many of the spoilt payloads are refused. The others give a tensor of the right size: digits that are stored
    verbatim carry no redundancy, so a flipped one shows only in the tensor's hash, one level up."""
    random, refused = Random(0), 0
    pairs = {
        d: weights(605, lr=lr, dtype=d) for d, lr in (("bfloat16", 3e-5), ("float32", 1e-9), ("float8_e4m3fn", 1e-3))
    }
    pairs["uint8"] = tuple(x.view(np.uint8) for x in weights(300, lr=1e-4))
    pairs["float16"] = weights(1500, lr=1e-3, dtype="float16")  # in quarters
    assert np.count_nonzero(np.not_equal(*pairs["float16"])) > delta.TOGETHER
    for dtype, (base, target) in pairs.items():
        payload = CODEC.encode(base, target, dtype)
        for _ in range(rounds // len(pairs)):
            spoilt = spoil(payload, random)
            try:
                decoded = CODEC.decode(base, spoilt, dtype)
            except ValueError:
                refused += 1
            else:
                assert decoded.shape == base.shape and decoded.dtype == base.dtype
    return refused


def test_what_is_damaged_is_refused_or_of_the_right_size():
    assert fuzz(8000) > 7500


def test_headers_that_claim_too_much_are_refused_before_anything_is_made():
    base, target = weights(600, lr=3e-5)
    payload = CODEC.encode(base, target, "bfloat16")
    for at, value, message in ((0, b"\xff", "classes"), (1, b"\x10", "classes"), (2, b"\xff", "a rate")):
        data = payload[:at] + value + payload[at + len(value) :]
        with pytest.raises(ValueError, match=message):
            CODEC.decode(base, data, "bfloat16")
    for data in (payload[:1], payload[:4], payload[:-1]):
        with pytest.raises(ValueError, match="header"):
            CODEC.decode(base, data, "bfloat16")
    with pytest.raises(ValueError, match="block"):
        CODEC.decode(target[:1], payload, "bfloat16")
    base = np.zeros(2 * BLOCK + 3, np.uint8)
    payload = CODEC.encode(base, base ^ (np.arange(len(base)) % 1000 == 0), "uint8")
    for data in (payload[:3], payload[:7], struct.pack("<I", 2**32 - 1) + payload[4:]):
        with pytest.raises(ValueError, match="the payload ends within"):
            CODEC.decode(base, data, "uint8")


BESIDE_NOTHING = """
import ctypes, mmap, sys
import numpy as np
from composer_nb.kernels.delta.codec import Conditioned
libc = ctypes.CDLL(None, use_errno=True)
room = mmap.mmap(-1, 5 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(room))
assert libc.mprotect(ctypes.c_void_p(start + 4 * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
pages = np.frombuffer(room, np.uint8, 4 * mmap.PAGESIZE)
for kind, dtype, number in ((np.uint16, "bfloat16", 0x3C00), (np.uint8, "float8_e4m3fn", 0x3C)):
    for count in [*range(1, 40), 1021, 1022, 1023, 1024, 1025, 4097, 4102, -1100, -3001]:
        quarters, count = count < 0, abs(count)
        base = pages[-count * kind().itemsize :].view(kind)
        base[:] = number
        target = base.copy()
        target[-2:] += kind(1)
        target[0] += kind(1)
        if quarters:
            target[-1090:] += kind(1)
        payload = Conditioned().encode(base, target, dtype)
        assert np.array_equal(Conditioned().decode(base, payload, dtype), target), count
        for at in range(len(payload)):  # damaged, it is refused or not, and nothing is read
            try:
                Conditioned().decode(base, payload[:at] + bytes([payload[at] ^ 129]) + payload[at + 1 :], dtype)
            except ValueError:
                pass
print("sound")
"""


def test_nothing_is_read_behind_an_array_that_ends_where_memory_does():
    """Reading the page behind the base ends the process."""
    result = subprocess.run([sys.executable, "-c", BESIDE_NOTHING], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "sound\n"), result.stderr[-2000:]
