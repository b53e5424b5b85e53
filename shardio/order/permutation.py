"""Permutations with a key: the row at any position is computed directly.

The result is the same on every machine and in every version of shardio, so this module has its own
arithmetic, and tests compare it with stored results.

Up to `SORTED_MAX` rows are sorted by keyed hashes. More rows are placed in the cells of a grid of
about sqrt(n) by sqrt(n), and a Feistel network permutes the cells (M. Luby and C. Rackoff, 1988; if
a side is not a power of two: J. Black and P. Rogaway, "Ciphers with arbitrary finite domains",
2002). If the result is a cell without a row, the network is applied again (cycle walking). The
mixing constants are from splitmix64 (S. Vigna) and MurmurHash3 (A. Appleby).
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

SORTED_MAX: Final = 1 << 16
CHUNK: Final = 16384
"""The number of positions to compute in one call; a call takes 100 µs plus 15 ns per position."""
ROUNDS: Final = 6
"""The number of rounds of the Feistel network. With 4 rounds, statistics of the rows at positions a
fixed distance apart differ from those of a random permutation; with 5 rounds, they do not."""

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MIX_32: Final = 0x85EBCA6B, 0xC2B2AE35
_MAX_BITS_SCALED_AT_ONCE: Final = 12
"""The maximum bit length of a size for which `_scale` uses only the upper bits of the hash.
With at least 20 bits of the hash, no result is more than 1/256 more likely than another.
"""


def mix(value: int) -> int:
    """Hash a 64-bit integer with the finalizer of splitmix64, which is a bijection."""
    value &= _MASK
    value = (value ^ value >> 30) * _MIX_1 & _MASK
    value = (value ^ value >> 27) * _MIX_2 & _MASK
    return value ^ value >> 31


def derive_key(*parts: int) -> int:
    """Derive a 64-bit key from integers of any size; their order matters."""
    key = 0
    for part in parts:
        key = mix(key + _GOLDEN ^ part)
        while (part := part >> 64) not in (0, -1):
            key = mix(key ^ part)
    return key


def keyed_hashes(numbers: Positions, key: int) -> _U64:
    """Return 64-bit hashes; different integers have different hashes."""
    hashes = (numbers + 1).astype(np.uint64)
    hashes *= np.uint64(_GOLDEN)
    hashes ^= np.uint64(key)
    return _mixed(hashes)


def _mixed(hashes: _U64) -> _U64:
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(31)
    return hashes


class Permutation:
    """A permutation of the integers 0 to n - 1, chosen by a 64-bit key."""

    def __init__(self, n: int, key: int) -> None:
        self.n, self._key = n, key
        self._whole: Positions | None = None

    def at(self, positions: Positions) -> Positions:
        """Return the integer at each of `positions`, as `EpochOrder.at` does."""
        if self.n > SORTED_MAX:
            return permute(positions, self.n, self._key)
        if self._whole is None:
            self._whole = permutations(self.n, np.array([self._key], np.uint64))[0]
        return self._whole[positions]


def substitute_position(n: int, *, seed: int, epoch: int, position: int, attempt: int) -> int:
    """Return one of n positions; its sample replaces the sample that failed at `position`.

    `attempt` is the number of earlier replacements that also failed.
    """
    return derive_key(32, seed, epoch, position, attempt) * n >> 64


def epoch_permutation(n: int, *, seed: int, epoch: int) -> Permutation:
    """Return the permutation of the n samples of an epoch."""
    return Permutation(n, derive_key(1, seed, epoch))


def permutations(n: int, keys: _U64) -> Positions:
    """Return a permutation of 0..n-1 for each key, as (keys, n); n is at most SORTED_MAX."""
    hashes = (np.arange(n) + 1).astype(np.uint64)
    hashes *= np.uint64(_GOLDEN)
    by_key = _mixed(hashes ^ keys[:, None])
    return np.argsort(by_key, axis=1, kind="stable").astype(np.int64, copy=False)


def permute(positions: Positions, n: int, key: int) -> Positions:
    """Return the integer at each of `positions` in a permutation of 0..n-1; n is 2 to 2^48."""
    width = math.isqrt(n - 1) + 1
    height = -(-n // width)
    keys = [mix(key + (i + 1) * _GOLDEN) for i in range(ROUNDS)]
    # Use 32-bit arithmetic if possible. It is three times as fast as 64-bit arithmetic, because
    # AVX2 cannot multiply vectors of 64-bit integers.
    one_pass = _feistel_narrow if width <= 1 << 16 else _feistel_wide
    cells = positions.astype(np.uint64)
    found = one_pass(cells, width, height, keys)
    outside = np.flatnonzero(found >= np.uint64(n))
    while len(outside):
        found[outside] = one_pass(found[outside], width, height, keys)
        outside = outside[found[outside] >= np.uint64(n)]
    return found.astype(np.int64)


def _feistel_narrow(cells: _U64, width: int, height: int, keys: list[int]) -> _U64:
    """Apply the network for up to 2^16 columns, in 32-bit arithmetic."""
    upper = cells // np.uint64(width)
    halves = [upper.astype(np.uint32), (cells - upper * np.uint64(width)).astype(np.uint32)]
    step, low = np.empty_like(halves[0]), np.empty_like(halves[0])
    for i, key in enumerate(keys):
        target, source = halves[i % 2], halves[1 - i % 2]
        size = width if i % 2 else height
        np.add(source, np.uint32(key >> 32), out=step)
        np.multiply(step, np.uint32(_MIX_32[0]), out=step)
        np.right_shift(step, np.uint32(15), out=low)
        np.bitwise_xor(step, low, out=step)
        np.multiply(step, np.uint32(_MIX_32[1]), out=step)
        _scale(step, size, low)
        # Compute target = (target + step) % size. The sum is below 2 * size, so this is either the
        # sum or the sum minus size. In unsigned arithmetic, it is the smaller of the two.
        np.add(target, step, out=target)
        np.subtract(target, np.uint32(size), out=low)
        np.minimum(target, low, out=target)  # the difference is large if it would be negative
    found: _U64 = halves[0].astype(np.uint64) * np.uint64(width) + halves[1]
    return found


def _scale(step: npt.NDArray[np.uint32], size: int, low: npt.NDArray[np.uint32]) -> None:
    """Scale the 32-bit hashes in `step` to integers below size; `low` is a scratch array."""
    n_bits = max(1, (size - 1).bit_length())
    if n_bits <= _MAX_BITS_SCALED_AT_ONCE:  # use only the upper bits of the hash
        np.right_shift(step, np.uint32(n_bits), out=step)
        np.multiply(step, np.uint32(size), out=step)
        np.right_shift(step, np.uint32(32 - n_bits), out=step)
        return
    np.bitwise_and(step, np.uint32(0xFFFF), out=low)
    np.multiply(low, np.uint32(size), out=low)
    np.right_shift(low, np.uint32(16), out=low)
    np.right_shift(step, np.uint32(16), out=step)
    np.multiply(step, np.uint32(size), out=step)
    np.add(step, low, out=step)
    np.right_shift(step, np.uint32(16), out=step)


def _feistel_wide(cells: _U64, width: int, height: int, keys: list[int]) -> _U64:
    """Apply the network for up to 2^24 columns, in 64-bit arithmetic."""
    upper = cells // np.uint64(width)
    halves = [upper, cells - upper * np.uint64(width)]
    for i, key in enumerate(keys):
        target, source = halves[i % 2], halves[1 - i % 2]
        size = np.uint64(width if i % 2 else height)
        step = (source + np.uint64(key)) * np.uint64(_MIX_1)
        step ^= step >> np.uint64(32)
        step *= np.uint64(_MIX_2)
        step >>= np.uint64(32)
        step *= size
        step >>= np.uint64(32)  # the 32-bit hash is now scaled to a number below size
        target += step
        np.minimum(target, target - size, out=target)  # target % size, as in `_feistel_narrow`
    found: _U64 = halves[0] * np.uint64(width) + halves[1]
    return found


OF_SAMPLES, OF_BATCHES, OF_COLLATION, OF_CLIPS, OF_CROPS, OF_SOUNDS = 2, 48, 49, 50, 51, 52
OF_SAMPLERS = 53
"""Identifiers of random streams. Streams with different identifiers are independent."""


class SampleGenerators:
    """A random generator for each sample, keyed by the seed, the epoch and the sample's position.

    Positions are counted over all ranks. The generator of a batch is keyed by the position of the
    batch's first sample, and uses another random stream. One
    Philox generator (J. Salmon et al., 2011) is set to the state of each sample, which takes 1 µs;
    creating a generator takes 13 µs.
    """

    def __init__(self, seed: int, stream: int = OF_SAMPLES) -> None:
        self._seed, self._stream = seed, stream
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._place: dict[str, tuple[int, ...]] = {"counter": (0, 0, 0, 0)}
        self._state: dict[str, Any] = dict(self._bits.state)
        self._state.update(state=self._place, buffer=(0, 0, 0, 0), buffer_pos=4)
        self._epoch, self._epoch_key = -1, 0

    def key(self, epoch: int, position: int) -> int:
        """Return the 64-bit key of a sample, to seed any generator."""
        if epoch != self._epoch:
            self._epoch, self._epoch_key = epoch, derive_key(self._stream, self._seed, epoch)
        return mix(self._epoch_key + (position + 1) * _GOLDEN)

    def at(self, epoch: int, position: int) -> np.random.Generator:
        """Return the generator of a sample, valid until the next call of `at` or `from_key`."""
        return self.from_key(self.key(epoch, position))

    def from_key(self, key: int) -> np.random.Generator:
        """Return the generator of the sample that has this `key`."""
        self._place["key"] = key, mix(key ^ _GOLDEN)
        self._bits.state = self._state  # type: ignore[assignment]  # the stubs' dict is private
        return self._generator
