"""Randomness without hidden state: every number is a pure function of seed, purpose, epoch, sample and draw.

Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; NumPy's ``Philox``) maps a key and a
counter to random words. The key is (seed, purpose), the counter (draw, sub-stream, sample or iteration, epoch): never a
rank, so that the same numbers come out whatever the number of ranks. :func:`set_seed` sets the seed, which is 0 by
default; ``numpy.random.seed`` has no effect on anything here.
"""

from __future__ import annotations

import operator
import threading
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.elementwise import kernels
from dbrdist.core.array.types import HostArray

if TYPE_CHECKING:
    from dbrdist.core.array.types import Shape

_WORDS_PER_BLOCK = 4  # Philox 4x64 makes four 64-bit words for one counter
_MASK = (1 << 64) - 1
_FORWARD = zlib.crc32(b"forward")  # the purpose of what functions draw


def _philox(seed: int, purpose: str, counter: tuple[int, int, int, int]) -> np.random.Philox:
    key = np.array([operator.index(seed) & _MASK, zlib.crc32(purpose.encode())], np.uint64)
    return np.random.Philox(counter=np.array(counter, np.uint64), key=key)


_MANY_WORDS = 1 << 10


def _words(seed: int, counter: tuple[int, int, int, int], num_words: int) -> np.ndarray[Shape, np.dtype[np.uint64]]:
    """The words of a draw, whole blocks: by a compiled loop, on several threads."""
    kernel = kernels.get("philox")
    if kernel is not None and num_words >= _MANY_WORDS:
        words = np.empty(num_words, np.uint64)
        key = np.array([operator.index(seed) & _MASK, _FORWARD], np.uint64)
        if kernel(words, np.array(counter, np.uint64), key):
            return words
    return _philox(seed, "forward", counter).random_raw(num_words)


def generator(seed: int, purpose: str, epoch: int = 0, sample: int = 0, part: int = 0) -> np.random.Generator:
    """A NumPy generator for one purpose; equal arguments give equal numbers, different ones independent numbers."""
    return np.random.Generator(_philox(seed, purpose, (0, part, sample, epoch)))


class SampleGenerator:
    """What :func:`generator` gives for one sample after another, by one generator: a twentieth of the time of new ones.

    The generator of a sample serves until that of the next one is asked for.
    """

    def __init__(self, seed: int, purpose: str, epoch: int) -> None:
        self._epoch = epoch
        self._bits: np.random.BitGenerator = _philox(seed, purpose, (0, 0, 0, epoch))
        self._generator = np.random.Generator(self._bits)
        self._start: dict[str, Any] = {**self._bits.state}
        self._key = tuple(self._start["state"]["key"].tolist())  # tuples, which are read faster than arrays
        self._start["buffer"] = tuple(self._start["buffer"].tolist())

    def at(self, sample: int, epoch: int | None = None) -> np.random.Generator:
        """The numbers of a sample, from the first on; of another ``epoch`` where it is given."""
        counter = (0, 0, sample, self._epoch if epoch is None else epoch)
        self._start["state"] = {"counter": counter, "key": self._key}
        self._bits.state = self._start
        return self._generator


class _Orders(threading.local):
    """The generator of this thread's last order, which makes the next one of the same seed too."""

    seed: int | None = None
    generator: SampleGenerator

    def at(self, seed: int, epoch: int) -> np.random.Generator:
        if seed != self.seed:
            self.seed, self.generator = seed, SampleGenerator(seed, "order", 0)
        return self.generator.at(0, epoch)


_orders = _Orders()


def permutation(seed: int, epoch: int, n: int, dtype: DTypeLike = np.int64) -> HostArray:
    """The order of ``n`` examples in ``epoch``: the same on every rank, and in any type of integers that holds them.

    Numbers are those of ``Generator.permutation``, which takes int64 and may leave that memory with the process.
    """
    order = np.arange(n, dtype=dtype)
    _orders.at(seed, epoch).shuffle(order)
    return order


class Stream(threading.local):
    """The position of this thread in the random numbers of the run."""

    default_seed = 0
    is_seeded = False  # by the program

    def __init__(self) -> None:
        self.seed = Stream.default_seed
        self.epoch = 0
        self.iteration = 0
        self.row = 0
        self.draw = 0
        self.num_initialized = 0
        self.num_iterators = 0
        self.num_divided_iterators = 0


_stream = Stream()


def set_seed(seed: int) -> None:
    """Start the numbers of this thread, and of threads that start later, from ``seed`` (0 by default).

    Initial values, the orders of iterators made from here on without their own seed, and dropout depend on it.
    """
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"set_seed: expected an integer, got {type(seed).__name__} {seed!r}") from None
    if not 0 <= seed <= _MASK:
        raise ValueError(f"expected a seed from 0 to 2**64 - 1, got {seed}")
    Stream.default_seed, Stream.is_seeded = seed, True
    _stream.__init__()  # type: ignore[misc]
    _stream.seed = seed  # between the two lines above another thread may set its own


def is_seeded() -> bool:
    """Whether the program has set a seed."""
    return Stream.is_seeded


def get_seed() -> int:
    """The seed of this thread."""
    return _stream.seed


def set_stream(seed: int, epoch: int, iteration: int, row: int = 0, draw: int = 0) -> None:
    """Set this thread's stream for one step.

    ``row`` is the position of this rank's first example in the global batch: draws for batches start there, so that the
    ranks together draw what one rank would draw for the whole batch. ``draw`` is the number of draws that count as done
    in this step.
    """
    values = _stream.__dict__  # one look at what this thread has
    values["seed"], values["epoch"], values["iteration"] = seed, epoch, iteration
    values["row"], values["draw"] = row, draw


_STATE = ("seed", "epoch", "iteration", "row", "draw", "num_initialized", "num_iterators", "num_divided_iterators")


def get_state() -> tuple[int, ...]:
    """The position of this thread's stream, as eight integers."""
    return tuple(getattr(_stream, name) for name in _STATE)


def set_state(state: tuple[int, ...]) -> None:
    """Return to a position of :func:`get_state`."""
    for name, value in zip(_STATE, state, strict=True):
        setattr(_stream, name, value)


def raw_words(
    num_rows: int, words_per_row: int, is_shared: bool = False
) -> np.ndarray[Shape, np.dtype[np.uint64]]:  # fmt: skip
    """64 random bits each, shape (num_rows, words_per_row), for the next draw of this step, such as dropout's masks.

    Row i belongs to row ``row + i`` of the global batch, so the numbers do not depend on how many ranks share it; or to
    row i of something that all ranks have (``is_shared``), such as a weight.
    """
    s = _stream
    draw = s.draw
    s.draw = draw + 1
    blocks = -(-words_per_row // _WORDS_PER_BLOCK)
    counter = 0 if is_shared else s.row * blocks, draw, s.iteration, s.epoch
    words = _words(s.seed, counter, num_rows * blocks * _WORDS_PER_BLOCK)
    return words.reshape(num_rows, blocks * _WORDS_PER_BLOCK)[:, :words_per_row]


class Draw(tuple[int, ...]):
    """Which words one draw takes: the first counter, less 1, and what follows it; the key."""

    blocks_per_row: int

    @classmethod
    def at(cls, row: int, blocks_per_row: int, draw: int, iteration: int, epoch: int, seed: int) -> Draw:
        """The words of a draw that begins with a row of the global batch."""
        made = cls((row * blocks_per_row, draw, iteration, epoch, operator.index(seed) & _MASK, _FORWARD))
        made.blocks_per_row = blocks_per_row
        return made

    def of_this_step(self) -> Draw:
        """The same draw of the step that this thread is in."""
        s = _stream
        return Draw.at(s.row, self.blocks_per_row, self[1], s.iteration, s.epoch, s.seed)


Drop = tuple[Draw | None, int, float]  # what is drawn, the threshold and the scale of a dropout; None: nothing


def next_draw(num_rows: int, words_per_row: int) -> Draw:
    """Which words :func:`raw_words` would draw next, for a device that makes them itself and then calls ``drawn``."""
    s = _stream
    return Draw.at(s.row, -(-words_per_row // _WORDS_PER_BLOCK), s.draw, s.iteration, s.epoch, s.seed)


def drawn() -> None:
    """The words of :func:`next_draw` were used."""
    _stream.draw += 1


class Lines:
    """32 random bits for each element of an array of rows of lines, for the next draw of this step, piece by piece.

    Row i belongs to row ``row + i`` of the global batch, as in :func:`raw_words`. A piece is the same whenever it is
    asked for, so that nobody needs to keep it.
    """

    def __init__(self, lines_per_row: int, length: int) -> None:
        s = _stream
        self._length = length
        self._blocks_per_line = -(-length // (2 * _WORDS_PER_BLOCK))
        self._first = s.row
        self._blocks_per_row = lines_per_row * self._blocks_per_line
        self._at = s.seed, s.draw, s.iteration, s.epoch
        s.draw += 1

    @property
    def draw(self) -> Draw:
        """Which words these are, as of :func:`next_draw`."""
        seed, draw, iteration, epoch = self._at
        return Draw.at(self._first, self._blocks_per_row, draw, iteration, epoch, seed)

    def bits(self, row: int, start: int, stop: int) -> np.ndarray[Shape, np.dtype[np.uint32]]:
        """Those of the lines from ``start`` to ``stop`` of a row, shape (stop - start, length)."""
        seed, draw, iteration, epoch = self._at
        block = (self._first + row) * self._blocks_per_row + start * self._blocks_per_line
        num_words = (stop - start) * self._blocks_per_line * _WORDS_PER_BLOCK
        words = _words(seed, (block, draw, iteration, epoch), num_words)
        return words.view("<u4").reshape(stop - start, -1)[:, : self._length]


def next_initializer_generator() -> np.random.Generator:
    """A generator for the next parameter's initial values, in order of initialisation: equal on all ranks."""
    s = _stream
    number = s.num_initialized
    s.num_initialized = number + 1
    return generator(s.seed, "initialize", sample=number)


def next_iterator_seed(is_divided: bool) -> int:
    """The seed of the next iterator made without one: the run's own for the first, another for each after it.

    Iterators whose batches are divided over ranks are counted by themselves. Every rank makes all of those, so that
    their seeds agree, while only some may make others (for example a test set on rank 0).
    """
    s = _stream
    if is_divided:
        number, s.num_divided_iterators = s.num_divided_iterators, s.num_divided_iterators + 1
    else:
        number, s.num_iterators = s.num_iterators, s.num_iterators + 1
        if number == 0:
            return s.seed
    return int(generator(s.seed, "iterator", sample=number, part=int(is_divided)).integers(2**63))
