"""The contract of all communicators. ``tests/comm`` and ``tests/mpi`` hold every provider to it."""

from __future__ import annotations

import difflib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dbrdist.comm import agree, message
from dbrdist.comm import model as models
from dbrdist.core import backend
from dbrdist.core.backend import Array


class CommunicatorBase(ABC):
    """A group of ranks that exchange arrays and objects.

    Verbs without a suffix move arrays: memory of any element type (also bfloat16) in any layout, never pickled. Arrays
    may be empty, 0-d or non-contiguous. What is received has its own memory, keeps the sender's order of axes (a
    channels-last array arrives channels-last), and lies on this thread's GPU if it came from one; ordinary MPI
    suffices, for it is staged through host memory. Verbs that end in ``_obj`` move pickled objects.

    Every verb blocks until its result may be used and its argument may be written again. All verbs but send and recv
    are collective: every rank calls them, in the same order. A wrong argument on one rank raises on every rank.

    Configuration belongs to this communicator and is inherited by what :meth:`split` makes:

    - ``allreduce_grad_dtype`` (None): the type in which gradients travel; None means their own.
    - ``batched_copy`` (True): accepted for old scripts; gradients lie in flat memory, so there is nothing to copy.
    - ``check_ranks`` (True): before a sum, compare the arguments of all ranks, so that a mismatch is an error.
    """

    _defaults: dict[str, Any] = {"allreduce_grad_dtype": None, "batched_copy": True, "check_ranks": True}

    def __init__(self) -> None:
        self._configs: dict[str, Any] = dict(self._defaults)
        self._within_config_scope = False
        self._plan: Any = None  # of the last reduction of gradients

    # ---- who and where ----

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @property
    @abstractmethod
    def intra_rank(self) -> int:
        """The number of this rank among those on its host."""

    @property
    @abstractmethod
    def intra_size(self) -> int:
        """How many ranks are on this host."""

    @property
    @abstractmethod
    def inter_rank(self) -> int:
        """The number of this host among the hosts, in the order of their lowest ranks."""

    @property
    @abstractmethod
    def inter_size(self) -> int:
        """How many hosts there are."""

    # ---- arrays ----

    @abstractmethod
    def split(self, color: int | None, key: int) -> Any:
        """A communicator of the ranks with the same ``color``, ranked by (key, rank), with this one's configuration.

        A rank with the colour None gets None.
        """

    @abstractmethod
    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        """Entry k of the result is what rank k had at this rank's place of its ``xs`` (one array for each rank)."""

    @abstractmethod
    def send(self, data: Array | Sequence[Array], dest: int, tag: int) -> None:
        """Send an array, or a tuple or list of arrays, to ``dest``, which receives it with the same ``tag``."""

    @abstractmethod
    def recv(self, source: int, tag: int) -> Any:
        """The array, or tuple of arrays, that ``source`` sent with ``tag``."""

    @abstractmethod
    def bcast(self, data: Array | None, max_buf_len: int | None = None, root: int = 0) -> Array:
        """The array of ``root``, on every rank; the others' ``data`` is ignored. The root gets its own array back.

        ``max_buf_len`` is the number of bytes sent at a time.
        """

    @abstractmethod
    def gather(self, data: Array, root: int = 0) -> tuple[Array, ...] | None:
        """On ``root`` every rank's array, in order of ranks, whatever their shapes; None on the others."""

    @abstractmethod
    def allgather(self, x: Array) -> tuple[Array, ...]:
        """Every rank's array, in order of ranks, whatever their shapes."""

    @abstractmethod
    def scatter(self, xs: Sequence[Array] | Array | None, root: int = 0) -> Array:
        """Entry ``rank`` of what ``root`` passes: a sequence of ``size`` arrays, or an array with ``size`` rows."""

    def allreduce(self, data: Array) -> Array:
        """The sum over ranks, as a new array; 4-d results are channels-last, others in C order.

        All ranks pass the same shape and type. Sums of 16-bit types run in float32 and are narrowed once; booleans are
        combined by "or", as NumPy adds them.

        Raises:
            CommunicatorError: on every rank, if shapes or types differ, listing which.
        """
        x = self._checked_for_sum(data)
        result = backend.empty(x.shape, x.dtype, x)  # where layouts differ between ranks, one that all have
        result[...] = x
        self._reduce(_flat(result))
        return result

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.allgather_obj(None)

    def finalize(self) -> None:  # noqa: B027 - most providers hold nothing
        """Free what the communicator holds. It must not be used afterwards."""

    # ---- objects ----

    @abstractmethod
    def send_obj(self, obj: Any, dest: int, tag: int) -> None:
        """Send a picklable object to ``dest``."""

    @abstractmethod
    def recv_obj(self, source: int, tag: int) -> Any:
        """The object that ``source`` sent with ``tag``."""

    @abstractmethod
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """The object of ``root``, on every rank; the root gets its own object back."""

    @abstractmethod
    def allgather_obj(self, obj: Any) -> list[Any]:
        """Every rank's object, in order of ranks."""

    @abstractmethod
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Entry ``rank`` of the ``size`` objects that ``root`` passes."""

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """On ``root`` every rank's object, in order of ranks; None on the others."""
        objs = self.allgather_obj(obj)
        return objs if self.rank == root else None

    def allreduce_obj(self, obj: Any) -> Any:
        """The sum (``+``) of every rank's object, added in order of ranks."""
        first, *others = self.allgather_obj(obj)
        for other in others:
            first = first + other
        return first

    # ---- models ----

    _reduces_one_by_one = False  # True in providers that reduce parameter by parameter

    def bcast_data(self, model: Any) -> None:
        """Give every rank rank 0's parameters and persistent values (batch-norm statistics, say).

        A parameter that has no shape yet is broadcast when it is initialised, which must then happen on every rank.

        Raises:
            CommunicatorError: on every rank, if the models differ in names, shapes or types.
        """
        models.bcast_data(self, model)

    def broadcast_data(self, model: Any) -> None:
        """The older name of :meth:`bcast_data`."""
        self.bcast_data(model)

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        """Replace the gradients of a link by their means over ranks, all ranks weighing the same.

        A parameter that has a gradient on some ranks only counts as gradient zero on the others. One without a gradient
        on any rank is left alone, or with ``zero_fill`` gets zeros. Means of 16-bit gradients are summed and divided in
        float32 and narrowed once.

        Raises:
            CommunicatorError: on every rank, if the parameters differ in shape or type.
        """
        self.weighted_mean_grad(list(model.namedparams()), zero_fill, None)

    def allreduce_grad(self, model: Any, zero_fill: bool = False) -> None:
        """The older name of :meth:`multi_node_mean_grad`."""
        self.multi_node_mean_grad(model, zero_fill)

    def weighted_mean_grad(self, params: list[tuple[str, Any]], zero_fill: bool, num_samples: int | None) -> None:
        """As :meth:`multi_node_mean_grad` for named parameters, each rank weighing its number of samples.

        None on every rank is equal weights; a rank with 0 samples takes part with weight 0.
        """
        models.mean_grad(self, params, zero_fill, num_samples, one_by_one=self._reduces_one_by_one)

    # ---- what providers fill in ----

    @abstractmethod
    def _allgather_rows(self, row: message.Header) -> message.Header:
        """A few 64-bit integers of every rank, as an array of ``size`` rows: cheap, and never fails on its own."""

    @abstractmethod
    def _reduce_host(self, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None) -> None:
        """Replace the 1-d contiguous ``x`` by ``sum(factors[k] * x of rank k) / divisor`` on every rank.

        16-bit types are summed and divided in float32. Every rank gets the same bits.
        """

    def _reduce(self, x: Array, factors: Sequence[float] | None = None, divisor: float | None = None) -> None:
        """As :meth:`_reduce_host`, also for arrays on a device."""
        if x.size == 0:
            return
        if isinstance(x, np.ndarray):
            self._reduce_host(x, factors, divisor)
            return
        host = backend.to_cpu(x)
        self._reduce_host(host, factors, divisor)
        x[...] = message.to_place(host, x)

    def _checked_for_sum(self, data: Array) -> Array:
        """``data``, after making sure that every rank brings the same shape and type."""
        error: Exception | None = None
        text = ""
        try:
            data = message.as_array(data, "allreduce")
            message.check_summable(data)
            text = f"shape {data.shape} of {data.dtype.name}"
        except (TypeError, ValueError) as e:
            error = e
        if self.get_config("check_ranks"):
            agree.same_everywhere(self, text, "allreduce expected the same shape and type on every rank", error)
        elif error is not None:
            raise error
        return data

    # ---- configuration ----

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Set one configuration entry of this communicator. False is False."""
        if kwargs:
            raise TypeError(f"set_config({name!r}) expected one value, got also {', '.join(kwargs)}")
        self._check_config_name(name)
        if name == "allreduce_grad_dtype" and value is not None:
            value = backend.as_dtype(value)
            if not backend.is_floating(value):
                raise ValueError(f"allreduce_grad_dtype expected a float type, got {value}")
        self._configs[name] = value

    def get_config(self, name: str | None = None) -> Any:
        """The value of one entry, or without a name a dictionary of all."""
        if name is None:
            return dict(self._configs)
        self._check_config_name(name)
        return self._configs[name]

    def _check_config_name(self, name: str) -> None:
        if name not in self._configs:
            known = sorted(self._configs)
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown configuration {name!r} of a communicator, known are {', '.join(known)}{hint}")

    @contextmanager
    def config_scope(self) -> Iterator[bool]:
        """Within the block, attributes set on this communicator are configuration entries too (for subclasses)."""
        self._within_config_scope = True
        try:
            yield True
        finally:
            self._within_config_scope = False

    @property
    def within_config_scope(self) -> bool:
        """True inside :meth:`config_scope`."""
        return bool(self.__dict__.get("_within_config_scope", False))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not name.startswith("_") and self.within_config_scope:
            self._configs[name] = value

    def _inherit(self, parent: CommunicatorBase) -> None:
        """Take over the configuration of the communicator that was split."""
        self._configs = dict(parent._configs)

    # ---- checks that all providers share ----

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{what} expected a rank from 0 to {self.size - 1}, got {rank}")

    def _one_for_each_rank(self, xs: Any, verb: str) -> list[Array]:
        """``xs`` as a list of ``size`` arrays: a sequence of them, or the rows of one."""
        if xs is None or not hasattr(xs, "__len__") or getattr(xs, "ndim", 1) == 0:
            raise TypeError(f"{verb} expected {self.size} arrays, one for each rank, got {type(xs).__name__}")
        if len(xs) != self.size:
            raise ValueError(f"{verb} expected {self.size} arrays, one for each rank, got {len(xs)}")
        return [message.as_array(x, verb) for x in xs]


class _Unpicklable:
    """Travels in place of an object that cannot be pickled, so that the receivers raise as the sender does."""

    def __init__(self, text: str) -> None:
        self.text = text


def pickled(obj: Any) -> tuple[message.HostArray, TypeError | None]:
    """An object as bytes, and the error to raise once they are sent if it cannot be pickled."""
    error = None
    try:
        raw = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as e:  # pickling runs the object's own code
        error = TypeError(f"expected an object that can be pickled, got {type(obj).__name__}: {e}")
        raw = pickle.dumps(_Unpicklable(str(error)))
    return np.frombuffer(raw, np.uint8), error


def unpickled(raw: message.HostArray) -> Any:
    """The object behind the bytes."""
    obj = pickle.loads(raw.data)
    if isinstance(obj, _Unpicklable):
        raise TypeError(obj.text)
    return obj


def _flat(x: Array) -> Array:
    """A dense array from the backend as one 1-d view."""
    return (x.transpose(0, 2, 3, 1) if x.ndim == 4 else x).reshape(-1)
