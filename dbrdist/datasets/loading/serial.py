"""The iterator that reads its batches when they are asked for; those of ``prefetch.py`` give the same ones."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.random import next_iterator_seed
from dbrdist.core.files.serializer import AbstractSerializer, saved_entry
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.usage.foreign_names import add_hints
from dbrdist.core.usage.mistakes import warn
from dbrdist.datasets.loading.base import Batch, block_bounds, check_dataset, get_batch, join
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.datasets.loading.divided import note_divided
from dbrdist.datasets.loading.order import LAST, OrderSampler, Plan, ShuffleOrderSampler, State, Step
from dbrdist.errors import CheckpointError, CorruptExampleError

if TYPE_CHECKING:
    from dbrdist.datasets.loading.base import Dataset


class Iterator:
    """Base of iterators over batches; also a context manager that finalizes.

    Example:
        >>> with iterators.SerialIterator([1, 2, 3], 2) as iterator:
        ...     isinstance(iterator, iterators.Iterator)
        True
    """

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define __next__")

    def next(self) -> Any:
        """The next batch."""
        return self.__next__()

    def finalize(self) -> None:
        """Give back threads and processes; the iterator must not be used afterwards."""

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the position by ``serializer``, or go to a saved one."""

    def __enter__(self) -> Iterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.finalize()


add_hints(Iterator, "Iterator")


class SerialIterator(Iterator):
    """Batches of a dataset, read in the calling thread.

    A batch is a list of examples, or a :class:`~dbrdist.datasets.Batch`, which reads like one and is stacked already.
    The order is a fresh permutation per epoch, a pure function of (seed, epoch), as are the random changes of examples;
    neither depends on ranks or workers. The state is integers, and a saved iterator continues exactly where it was.

    Args:
        dataset: anything with ``len`` and ``[i]``.
        batch_size: examples per batch; over all ranks together where there are several.
        repeat: continue forever, or stop after one epoch (whose last batch may then be short).
        shuffle: None or True for random order, False for the order of indices.
        order_sampler: makes the orders instead; excludes ``shuffle``.
        seed: of the order and of random changes to examples. None takes another one for each iterator, which follows
            from the seed of the run (:func:`dbrdist.random.set_seed`) and how many iterators were made before it;
            ``numpy.random.seed`` has no effect.
        rank, size: with ``size`` ranks each gets its contiguous block of every global batch; blocks differ by at most
            one example, and at the end of an epoch may be empty (such a Batch has arrays of length 0). Without a seed,
            every rank must make its iterators with ``size`` in the same order.
        last: with ``repeat``, the batch at the end of an epoch. ``'wrap'``, as in Chainer, fills it with examples of
            the next epoch, so all batches are full and ``is_new_epoch`` comes with the batch that crosses the end.
            ``'short'`` leaves it short, so an epoch is each example once; this is what ``dbrdist-train`` uses.
            ``'drop'`` leaves out the examples that fill no batch, others in each epoch.
        virtual_workers: divide each global batch over so many virtual workers, of which each rank has a contiguous
            block. A batch is then a list of batches, one for each virtual worker of this rank, possibly empty; they are
            the same whatever the number of ranks.

    Attributes:
        indices: the indices of this rank's examples in the last batch.
        row: the position of the first of them in the global batch.
        workers: the numbers of this rank's virtual workers, a range; without virtual ones, of the rank itself.
        pieces: for each of them, pairs (epoch, indices): where a batch reaches into the next epoch there are two.
        rows: the position in the global batch of the first example of each of them.
        num_samples_global: how many examples the last global batch has.
        num_read: how many examples this rank's last batch has: those of ``indices`` that were not left out.
        skipped: messages of the examples that could not be read and were left out (``on_corrupt='skip'``), each once.
        num_skipped: how many times an example of this rank was left out.

    Example:
        >>> iterator = iterators.SerialIterator([10, 11, 12], 2, repeat=False, shuffle=False)
        >>> [list(batch) for batch in iterator]
        [[10, 11], [12]]
    """

    is_synchronized = False  # whether all ranks are meant to read the same examples

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        repeat: bool = True,
        shuffle: bool | None = None,
        order_sampler: OrderSampler | None = None,
        *,
        seed: int | None = None,
        rank: int | None = None,
        size: int | None = None,
        last: str = "wrap",
        virtual_workers: int | None = None,
    ) -> None:
        is_divided = size is not None or virtual_workers is not None
        rank, size = rank or 0, 1 if size is None else size
        _check_arguments(dataset, batch_size, repeat, shuffle, order_sampler, rank, size, last, virtual_workers)
        if seed is None:
            seed = next_iterator_seed(is_divided)
        self._follows_seed = order_sampler is None and shuffle is not False
        if self._follows_seed:
            order_sampler = ShuffleOrderSampler(seed)
        self.dataset = dataset
        self.batch_size = batch_size
        self.order_sampler = order_sampler
        self.seed = seed
        self.rank = rank
        self.size = size
        self.virtual_workers = virtual_workers
        self.num_workers = size if virtual_workers is None else virtual_workers
        self._takes_all = self.num_workers == 1 and virtual_workers is None
        self.workers = range(*block_bounds(self.num_workers, rank, size))
        self._first = self.workers[0]
        self.skipped: list[str] = []
        self.num_skipped = 0
        self._plan = Plan(len(dataset), batch_size, repeat, last, order_sampler)
        self.reset()
        if size > 1:
            note_divided(self)

    _has_given_order = False  # whether the order of this epoch comes from a saved state, and from no seed

    # ---- batches ----

    def __iter__(self) -> SerialIterator:
        if self._plan.num_per_epoch and not self._plan.repeat and self._plan.advance(self._state)[1] is None:
            name = type(self).__name__
            warn(f"{name}: its epoch is over (repeat=False), so this loop does nothing; call reset() first")
        return self

    def __next__(self) -> Any:
        state, step = self._plan.advance(self._state)
        if step is None:
            raise StopIteration
        if self._takes_all and len(step.pieces) == 1:  # nearly every batch: as read_step, with fewer calls
            messages: list[str] = []
            ((epoch, indices),) = step.pieces
            batch = get_batch(self.dataset, indices, self.seed, epoch, messages)
            num_read = len(batch)
            if not num_read:
                batch = _empty_batch(self.dataset, step, self.seed)
            self._state, self._step, self._parts, self.num_read = state, step, [step], num_read
            if messages:
                self._note(messages)
            return _as_list(batch)
        own = self._own(step)
        return self._arrive(state, step, own, [read_step(self.dataset, part, self.seed, step) for part in own])

    next = __next__

    def _own(self, step: Step) -> list[Step]:
        """The parts of a global batch that the workers of this rank take."""
        if self.num_workers == 1:
            return [step]
        return [step.cut(*block_bounds(step.num_samples, worker, self.num_workers)) for worker in self.workers]

    def _arrive(self, state: State, step: Step, own: list[Step], found: list[tuple[Any, list[str]]]) -> Any:
        """Note what was read for each worker; returns the batch, or with virtual workers theirs."""
        self._state, self._step, self._parts = state, step, own
        self.num_read = 0
        for part, (_, messages) in zip(own, found):
            self.num_read += part.num_samples - len(messages)
            if messages:
                self._note(messages)
        return _as_list(found[0][0]) if self.virtual_workers is None else [_as_list(batch) for batch, _ in found]

    def _note(self, messages: list[str]) -> None:
        """What was said of examples that were left out."""
        self.num_skipped += len(messages)
        self.skipped = list(dict.fromkeys([*self.skipped, *messages]))

    def reset(self) -> None:
        """Go back to the start of epoch 0."""
        self._state = self._plan.first()
        self._step = Step(())  # the last one, and the parts of it that the workers of this rank took
        self._parts = [self._step] * len(self.workers)
        self.num_read = 0

    def reorder(self, seed: int) -> None:
        """Start over with the permutations, and the random changes of examples, that follow from ``seed``."""
        self.reset()  # batches that were made ahead go
        self.order_sampler = self._plan.sampler = ShuffleOrderSampler(seed)
        self._plan.is_pure = self._follows_seed = True
        self.seed = seed
        self.reset()

    # ---- the last batch ----

    @property
    def indices(self) -> Array:
        """The indices of this rank's examples, those left out included."""
        return np.concatenate([part.indices for part in self._parts])

    @property
    def pieces(self) -> list[tuple[tuple[int, Array], ...]]:
        """For each worker of this rank, the pairs (epoch, indices) of its examples."""
        return [part.pieces for part in self._parts]

    @property
    def row(self) -> int:
        """The position of this rank's first example in the global batch."""
        return self._row(self._first) if self._first else 0

    @property
    def rows(self) -> list[int]:
        """For each worker of this rank, the position of its first example in the global batch."""
        return [self._row(worker) for worker in self.workers]

    def _row(self, worker: int) -> int:
        return block_bounds(self._step.num_samples, worker, self.num_workers)[0]

    @property
    def num_samples_global(self) -> int:
        """How many examples the global batch has."""
        return self._step.num_samples

    # ---- where it stands ----

    @property
    def repeat(self) -> bool:
        """False if it stops after one epoch."""
        return self._plan.repeat

    @property
    def last(self) -> str:
        """What happens to the batch at the end of an epoch: ``'wrap'``, ``'short'`` or ``'drop'``."""
        return self._plan.last

    @property
    def num_per_epoch(self) -> int:
        """How many examples an epoch uses, over all ranks: all of them but with ``last='drop'``."""
        return self._plan.num_per_epoch

    @property
    def current_position(self) -> int:
        """How many examples of the current epoch are done, over all ranks."""
        return self._state.position

    @property
    def next_index(self) -> int:
        """The index of the first example of the next global batch; -1 where it begins another epoch."""
        _, position, _, order, _, _ = self._state
        if order is None:
            return position
        return int(order[position]) if position < len(order) else -1

    @property
    def order_checksum(self) -> int:
        """A checksum of the order of this epoch; 0 for the order of indices."""
        order = self._state.order
        return 0 if order is None else zlib.crc32(np.asarray(order, np.int64).tobytes())

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return self._state.epoch

    @property
    def is_new_epoch(self) -> bool:
        """True if the last batch ended an epoch."""
        return self._state.is_new_epoch

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self._state.epoch + self._state.position / max(self._plan.num_per_epoch, 1)

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        if self._state.previous_epoch < 0:
            return None
        return self._state.previous_epoch + self._state.previous_position / max(self._plan.num_per_epoch, 1)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save seed, epoch, position by ``serializer``, or go there; another dataset length is a CheckpointError."""
        plan, state = self._plan, self._state
        is_loading = getattr(serializer, "is_loading", None)
        if is_loading is not False and saved_entry(serializer, "num_examples") is None:
            self._load_chainers(serializer)
            return
        n = int(serializer("num_examples", plan.num_examples))
        if n != plan.num_examples:
            raise CheckpointError(
                f"expected a dataset of {n} examples, as it was when the iterator was saved, got {plan.num_examples}; "
                "resume with the same data"
            )
        seed = int(serializer("seed", self.seed))
        epoch = int(serializer("epoch", state.epoch))
        position = int(serializer("current_position", state.position))
        if not 0 <= position < max(plan.num_per_epoch, 1):
            raise CheckpointError(
                f"expected a position below {plan.num_per_epoch}, the examples of an epoch, got {position}; "
                "resume with the same batch size where last='drop'"
            )
        is_new_epoch = bool(serializer("is_new_epoch", int(state.is_new_epoch)))
        previous = (
            int(serializer("previous_epoch", state.previous_epoch)),
            int(serializer("previous_position", state.previous_position)),
        )
        order = self._saved_order(serializer, is_loading)
        there = State(epoch, position, is_new_epoch, order, *previous)
        if seed != self.seed or not _same_place(there, state):  # else it was saved, or is there already
            self._go_to(there, seed)

    def _saved_order(self, serializer: AbstractSerializer, is_loading: bool | None) -> Array | None:
        """Save the order of this epoch where no seed tells it, and in a program of Chainer, or load it."""
        order = self._state.order
        if is_loading is False:
            if order is not None and (as_chainer[0] or self._has_given_order or not self._plan.is_pure):
                serializer("order", np.array(order))
                serializer("given_order", int(self._has_given_order or not self._plan.is_pure))
            if as_chainer[0] and self.previous_epoch_detail is not None:
                serializer("previous_epoch_detail", self.previous_epoch_detail)
            return order
        # Read in any case, as is the next: a snapshot's entries must have a place. Chainer once had "_order".
        saved = saved_entry(serializer, "order", "_order")
        saved_entry(serializer, "previous_epoch_detail")
        if not self._plan.is_pure or saved_entry(serializer, "given_order"):
            self._has_given_order = saved is not None and self._plan.is_pure
            return order if saved is None else saved
        self._has_given_order = False
        return order

    def _load_chainers(self, serializer: AbstractSerializer) -> None:
        """Go to the place that Chainer's iterator saved, in the order of its epoch; the next epoch has one of ours."""
        n = self._plan.num_per_epoch
        epoch = int(serializer("epoch", self.epoch))
        position = int(serializer("current_position", self.current_position))
        is_new_epoch = bool(serializer("is_new_epoch", int(self.is_new_epoch)))
        order = saved_entry(serializer, "order", "_order")
        if order is not None:
            order = np.asarray(order)
            n = len(order)
        if not 0 <= position < max(n, 1) or (
            order is not None and order.size and int(order.max()) >= len(self.dataset)
        ):
            raise CheckpointError(
                f"the iterator was saved at example {position} of a larger dataset, got one of {n} examples; resume "
                "with the same data"
            )
        detail = saved_entry(serializer, "previous_epoch_detail")
        if detail is None:
            detail = epoch + (position - self.batch_size) / max(n, 1)
            detail = max(detail, 0.0) if epoch + position else -1.0
        done = -1 if float(detail) < 0 else round(float(detail) * n)
        previous = (done, -1) if done < 0 else divmod(done, max(n, 1))
        self._has_given_order = order is not None and self._plan.is_pure
        order = self._state.order if order is None else order
        self._state = State(epoch, position, is_new_epoch, order, *previous)
        if self._plan.is_pure and not self._has_given_order:
            self._state = self._state._replace(order=self._plan.order_at(epoch, None, 0))

    def _go_to(self, state: State, seed: int) -> None:
        """Stand where a saved iterator stood; the order of a pure sampler is computed again."""
        if seed != self.seed and self._follows_seed:
            self.order_sampler = self._plan.sampler = ShuffleOrderSampler(seed)
        self.seed = seed
        if self._plan.is_pure and not self._has_given_order:
            state = state._replace(order=self._plan.order_at(state.epoch, None, 0))
        self._state = state


def _as_list(batch: Any) -> Any:
    """The batch of a program of Chainer: a list of examples, which it may change."""
    return list(batch) if as_chainer[0] and isinstance(batch, Batch) else batch


def _same_place(a: State, b: State) -> bool:
    return a._replace(order=None) == b._replace(order=None) and (a.order is b.order or np.array_equal(a.order, b.order))


def _check_arguments(
    dataset: Dataset, batch_size: int, repeat: bool, shuffle: bool | None, order_sampler: OrderSampler | None,
    rank: int, size: int, last: str, virtual_workers: int | None,
) -> None:  # fmt: skip
    if shuffle is not None and order_sampler is not None:
        raise ValueError("expected shuffle or order_sampler, got both; leave shuffle at None to use the order sampler")
    if last not in LAST:
        raise ValueError(f"expected last to be one of {LAST}, got {last!r}")
    if not 0 <= rank < size:
        raise ValueError(f"expected 0 <= rank < size, got rank={rank} and size={size}")
    if batch_size < 1:
        raise ValueError(f"expected a batch size of at least 1, got {batch_size}")
    check_dataset(dataset, repeat=repeat, shuffle=shuffle)
    n = len(dataset)
    if n == 0 and repeat:
        raise ValueError(
            "expected a dataset with examples, got an empty one, which cannot be repeated; with repeat=False it is no "
            "batches, as a rank's part of a small dataset may be"
        )
    if virtual_workers is not None:
        check_workers(virtual_workers, size, batch_size)
    if batch_size < size:
        raise ValueError(
            f"expected a global batch of at least one example per rank, got batch_size={batch_size} for {size} ranks; "
            "take a larger batch or fewer ranks"
        )
    if repeat and n < size and virtual_workers is None:
        raise ValueError(f"expected at least one example per rank, got {n} examples for {size} ranks; take fewer ranks")
    if last == "drop" and 0 < n < batch_size:
        raise ValueError(f"expected a full batch with last='drop', got {n} examples for batches of {batch_size}")
    if repeat and last == "wrap" and n < batch_size:
        warn(
            f"batch_size: {batch_size} is more than the dataset has ({n}), so that each batch holds examples more than "
            "once; take a smaller batch, or last='short'"
        )


def check_workers(virtual_workers: int, size: int, batch_size: int) -> None:
    """Raise ValueError unless every rank has a virtual worker, and each of these an example of a full batch."""
    if virtual_workers < size:
        raise ValueError(
            f"expected at least as many virtual workers as ranks, got virtual_workers={virtual_workers} for {size} "
            f"ranks; start at most {virtual_workers} ranks"
        )
    if batch_size < virtual_workers:
        raise ValueError(
            f"expected a global batch of at least one example per virtual worker, got batch_size={batch_size} for "
            f"virtual_workers={virtual_workers}"
        )


# ---- reading --------------------------------------------------------------------------------------------------------


def read_step(dataset: Any, own: Step, seed: int, whole: Step) -> tuple[Any, list[str]]:
    """The examples of this rank's part ``own`` of the global batch ``whole``, and messages of those left out.

    Where no example is left, the result is a Batch with arrays of length 0, of the shapes of one readable example, so
    that a rank without examples can take part in the step.
    """
    if len(own.pieces) > 1:
        parts, skipped = read_parts(dataset, own, seed)
        return put_together(dataset, parts, seed, whole), skipped
    skipped = []
    for epoch, indices in own.pieces:  # nearly every batch is one piece: nothing is to be joined
        batch = get_batch(dataset, indices, seed, epoch, skipped)
        if len(batch):
            return batch, skipped
    return _empty_batch(dataset, whole, seed), skipped


def read_parts(dataset: Dataset, own: Step, seed: int) -> tuple[list[Any], list[str]]:
    """The examples of ``own`` in batches, one for each piece that has any, and messages of those left out."""
    skipped: list[str] = []
    parts = [get_batch(dataset, indices, seed, epoch, skipped) for epoch, indices in own.pieces]
    return [part for part in parts if len(part)], skipped


def put_together(dataset: Dataset, parts: list[Any], seed: int, whole: Step) -> Any:
    """Batches concatenated into one; an empty batch if there are none."""
    if not parts:
        return _empty_batch(dataset, whole, seed)
    joined = join(parts)
    return [e for part in parts for e in part] if joined is None else joined


def _empty_batch(dataset: Dataset, whole: Step, seed: int) -> Batch:
    candidates = [(epoch, i) for epoch, indices in whole.pieces for i in indices]
    candidates += [(whole.pieces[0][0], i) for i in range(len(dataset))]
    skipped: list[str] = []
    for epoch, i in candidates:
        examples = get_batch(dataset, np.array([i]), seed, epoch, skipped)
        if len(examples):
            return Batch(concat_examples(examples))[:0]
    raise CorruptExampleError(f"expected at least one readable example, but all were skipped; the first: {skipped[0]}")


explain_constructors(globals())
