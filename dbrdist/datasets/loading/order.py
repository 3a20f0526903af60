"""The order in which examples are visited, and how a position in it moves from batch to batch.

The position of a run is (seed, epoch, position): three integers that do not know how many ranks or workers there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.random import next_iterator_seed, permutation

_MANY = 1 << 17  # from so many examples on, half the memory is worth a cast of each batch's indices
LAST = ("wrap", "short", "drop")


class OrderSampler:
    """Base of Chainer's order samplers: callables that make the next epoch's order from the current one.

    A sampler that also has ``order(epoch, n)``, a pure function, needs nothing but integers to be resumed; the orders
    of others are saved with the iterator.

    Example:
        >>> class Reversed(iterators.OrderSampler):
        ...     def __call__(self, order, position):
        ...         return np.arange(3)[::-1]
        >>> iterators.SerialIterator([10, 11, 12], 2, order_sampler=Reversed()).next()
        [12, 11]
    """

    def __call__(self, current_order: Array, current_position: int) -> Array:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(current_order, current_position)")


class ShuffleOrderSampler(OrderSampler):
    """A fresh random permutation for each epoch, a pure function of (seed, epoch).

    Args:
        random_state: the seed: an integer, or a NumPy RandomState or Generator that is asked for one. None takes
            another seed for each sampler, which follows from that of the run (:func:`dbrdist.random.set_seed`).

    Example:
        >>> iterator = iterators.SerialIterator([1, 2, 3], 3, order_sampler=iterators.ShuffleOrderSampler())
        >>> sorted(iterator.next())
        [1, 2, 3]
    """

    def __init__(self, random_state: Any = None) -> None:
        if random_state is None:
            random_state = next_iterator_seed(False)
        elif isinstance(random_state, np.random.RandomState):
            random_state = random_state.randint(2**31)
        elif isinstance(random_state, np.random.Generator):
            random_state = random_state.integers(2**63)
        self.seed = int(random_state)
        self._num_calls = 0

    def order(self, epoch: int, n: int) -> Array:
        """The permutation of ``range(n)`` for ``epoch``; of many examples in int32 where that holds it."""
        return permutation(self.seed, epoch, n, np.int32 if _MANY <= n < 1 << 31 else np.int64)

    def __call__(self, current_order: Array, current_position: int) -> Array:
        """The next permutation: the k-th call returns ``current_order`` permuted as in epoch k."""
        order = np.asarray(current_order)[self.order(self._num_calls, len(current_order))]
        self._num_calls += 1
        return order


_new: Any = tuple.__new__  # a named tuple's own costs another call


class State(NamedTuple):
    """Where an iterator stands: ``position`` examples of ``epoch`` are done. ``order`` is this epoch's, or None."""

    epoch: int
    position: int
    is_new_epoch: bool
    order: Array | None
    previous_epoch: int  # where the batch before last ended; -1 before the first batch
    previous_position: int


class Step(NamedTuple):
    """One global batch: pieces (epoch, indices), more than one where it wraps around the end of an epoch."""

    pieces: tuple[tuple[int, Array], ...]

    @property
    def num_samples(self) -> int:
        number = 0
        for _, indices in self.pieces:
            number += len(indices)
        return number

    def cut(self, start: int, end: int) -> Step:
        """The examples ``start`` to ``end`` of this batch."""
        if start == 0 and end >= self.num_samples:
            return self
        kept, offset = [], 0
        for epoch, indices in self.pieces:
            piece = indices[max(start - offset, 0) : max(end - offset, 0)]
            if len(piece):
                kept.append((epoch, piece))
            offset += len(indices)
        return Step(tuple(kept))

    @property
    def indices(self) -> Array:
        """All indices, in order."""
        return np.concatenate([indices for _, indices in self.pieces] or [np.empty(0, np.int64)])


class Plan:
    """Which examples the batches take; pure, so that loaders can look ahead.

    Args:
        num_examples: length of the dataset.
        batch_size: size of the global batch.
        repeat: continue after the first epoch.
        last: the batch at the end of an epoch: ``'wrap'`` fills it from the next epoch, ``'short'`` leaves it
            short, ``'drop'`` leaves its examples out. Without ``repeat`` ``'wrap'`` is ``'short'``.
        sampler: None for the order of indices, else an order sampler.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        repeat: bool,
        last: str,
        sampler: OrderSampler | ShuffleOrderSampler | None,
    ) -> None:
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.repeat = repeat
        self.last = last
        self.sampler = sampler
        self.is_pure = sampler is None or hasattr(sampler, "order")
        dropped = num_examples % batch_size if last == "drop" else 0
        self.num_per_epoch = num_examples - dropped
        self._num_sampled = num_examples  # how many a user's sampler gives for an epoch

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_num_sampled": state["num_examples"], **state})  # pickles of b1df9a7 lack it

    def first(self) -> State:
        """The state before the first batch."""
        start = None if self.is_pure else np.arange(self.num_examples)
        order = self.order_at(0, start, 0)
        if not self.is_pure and order is not None:  # a sampler may repeat examples or leave some out
            self.num_per_epoch = len(order) - (len(order) % self.batch_size if self.last == "drop" else 0)
            self._num_sampled = len(order)
            if self.repeat and not self.num_per_epoch:
                raise ValueError(
                    f"the order sampler gave {len(order)} examples, which make no batch of {self.batch_size} with "
                    f"last='{self.last}', so that epochs cannot be repeated; take repeat=False, or a smaller batch"
                )
        return State(0, 0, False, order, -1, -1)

    def order_at(self, epoch: int, order: Array | None, position: int) -> Array | None:
        """The order of ``epoch``, from the one before it where the sampler needs that."""
        if self.sampler is None:
            return None
        if self.is_pure:
            return self.sampler.order(epoch, self.num_examples)
        new = np.asarray(self.sampler(order, position))
        if new.dtype == bool:
            raise ValueError("expected indices of examples from the sampler, got booleans; write np.flatnonzero(mask)")
        if epoch and len(new) != self._num_sampled:
            raise ValueError(
                f"expected an order of {self._num_sampled} examples from the sampler, as in the first epoch, got "
                f"{len(new)}"
            )
        return new

    def advance(self, state: State) -> tuple[State, Step | None]:
        """The state after the next batch, and that batch; None where the only epoch is over."""
        epoch, position, _, order, _, _ = state
        if not self.repeat and (epoch > 0 or not self.num_per_epoch):
            return state, None
        n, end = self.num_per_epoch, position + self.batch_size
        if end < n:  # nearly every batch
            pieces = ((epoch, _slice(order, position, end)),)
            return _new(State, (epoch, end, False, order, epoch, position)), _new(Step, (pieces,))
        fills_up = self.repeat and self.last == "wrap"
        missing, parts, is_new = self.batch_size, [], False
        while missing:
            end = min(position + missing, n)
            parts.append((epoch, _slice(order, position, end)))
            missing -= end - position
            if end < n:
                position = end
                break
            order = self.order_at(epoch + 1, order, position)
            epoch, position, is_new = epoch + 1, 0, True
            if not fills_up:
                break
        return State(epoch, position, is_new, order, state.epoch, state.position), Step(tuple(parts))


_INT32 = np.dtype(np.int32)


def _slice(order: Array | None, start: int, end: int) -> Array:
    """The indices from ``start`` to ``end`` as datasets get them: computing with them must not overflow."""
    if order is None:
        return np.arange(start, end)
    indices = order[start:end]
    return indices.astype(np.int64) if getattr(indices, "dtype", None) == _INT32 else indices
