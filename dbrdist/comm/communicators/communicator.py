"""The contract of all communicators. ``tests/contracts/comm`` and ``tests/mpi`` hold every provider to it.

A communicator is put together from two objects: its ranks (``primitives.py``), who is there and how bytes move, and its
reducer (``gradients/reducer.py``), how gradients are added. It owns each public verb: it checks the arguments, passes
the gate (``gate.py``), on which all ranks agree or raise the same error, and has the ranks or the reducer do it.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.gradients import model as models
from dbrdist.comm.gradients.reducer import Reducer
from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.protocol.objects import ObjectVerbs
from dbrdist.comm.protocol.pair import PairVerbs
from dbrdist.comm.protocol.primitives import Ranks
from dbrdist.comm.protocol.roster import check_order
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import CallLog
from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array
from dbrdist.core.model.link import Link
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from dbrdist.comm.protocol.settings import ConfigValue
    from dbrdist.core.model.parameter import Parameter

SETTINGS: dict[str, ConfigValue] = {"allreduce_grad_dtype": None, "batched_copy": True}  # of every communicator


class CommunicatorBase(ObjectVerbs, PairVerbs):
    """A group of ranks that exchange arrays and objects; :func:`create_communicator` makes one.

    Methods without a suffix move arrays: memory of any element type (also bfloat16) in any layout, never pickled.
    Arrays
    may be empty, 0-d or non-contiguous. What is received has its own memory, keeps the sender's order of axes (a
    channels-last array arrives channels-last), and is on this thread's GPU if it came from one; ordinary MPI
    suffices, because it is staged through host memory. Methods that end in ``_obj`` move pickled objects.

    Every method blocks until its result may be used and its argument may be written again. All but send and recv
    are collective: every rank calls them, in the same order. If ranks call different methods, with different roots
    or configurations, or one of them with a wrong argument, all raise the same error. One thread at a time uses a
    communicator; give others their own by :meth:`split`.

    Configuration belongs to this communicator and is inherited by what :meth:`split` makes:

    - ``allreduce_grad_dtype`` (None): the type in which gradients are sent; None means their own. In memory that ranks
      share nothing is sent.
    - ``batched_copy`` (True): accepted for old scripts; gradients are stored in flat memory, so nothing is copied.

    Args:
        ranks: the transport between the ranks, which a subclass chooses.
        record: the numbers and names of the calls, for reports.
        name: the communicator's name in messages.
        members: the ranks of the job that belong to it, in order.
        configs: configuration by name; None takes the defaults.

    Raises:
        CommunicatorError: on every rank, where they disagree; the text names what, on which ranks, and the lines.
        TypeError, ValueError: on every rank, where an argument is wrong on one of them.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> comm.rank, comm.size, comm.allreduce(np.array([1.0]))
        (0, 1, array([1.]))
    """

    reducer_type: type[Reducer]  # how this kind of communicator adds gradients
    reducer: Reducer

    def __init__(
        self,
        ranks: Ranks,
        record: CallLog,
        name: str,
        members: tuple[int, ...],
        configs: dict[str, bool | None] | None = None,
    ) -> None:
        super().__init__(ranks, {**SETTINGS, **self.reducer_type.settings}, record, name, members, configs)
        self.reducer = self.reducer_type(self)
        self._finalized_at = ""
        self._has_averaged = False  # gradients of a model, before whose first mean the ranks' networks are compared

    # ---- arrays ----

    def bcast(self, data: Array | None, max_buf_len: int | None = None, root: int = 0) -> Array:
        """The array of ``root``, on every rank; the others' ``data`` is ignored. The root gets its own array back.

        ``max_buf_len`` is the number of bytes sent at a time, the same on every rank.
        """
        with self.gate.call("bcast") as call:
            (own, piece), error = self._prepare_bcast(call, root, max_buf_len, arguments.prepared, data, "bcast")
            header, flat = own if own is not None else (message.no_header(), None)
            rows = call.agree([piece, *header], error, num_same=1, what="the same max_buf_len", detail=f"{piece} bytes")
            header = rows[call.root, 1:]
            call.num_bytes = message.count_bytes(header)
            with call.moving():
                if flat is not None and data is not None:
                    self.ranks.bcast_in_pieces(call, message.as_bytes(flat), piece)
                    return data
                raw, x = message.empty_like_header(header)
                self.ranks.bcast_in_pieces(call, raw, piece)
                return message.to_current_device(x, header)

    def gather(self, data: Array, root: int = 0) -> tuple[Array, ...] | None:
        """On ``root`` every rank's array, in order of ranks, whatever their shapes; None on the others.

        Args:
            data: this rank's array, of any shape.
            root: the rank that receives, the same on every rank; default 0.
        """
        with self.gate.call("gather") as call:
            flat, headers = self._agree_on_arrays(call, data, root)
            raw, counts, starts = message.room_for(headers if self.rank == root else headers[:0])
            with call.moving():
                self.ranks.gather_bytes(call, message.as_bytes(flat), raw, counts, starts)
            return message.unpack(raw, headers, starts) if self.rank == root else None

    def allgather(self, x: Array) -> tuple[Array, ...]:
        """Every rank's array, in order of ranks, whatever their shapes.

        Args:
            x: this rank's array, of any shape; all ranks pass the same type and device.
        """
        with self.gate.call("allgather") as call:
            flat, headers = self._agree_on_arrays(call, x)
            raw, counts, starts = message.room_for(headers)
            with call.moving():
                self.ranks.allgather_bytes(message.as_bytes(flat), raw, counts, starts)
            return message.unpack(raw, headers, starts)

    def _agree_on_arrays(
        self, call: Passage, x: Any, root: int | None = None
    ) -> tuple[message.HostArray, message.Header]:
        """The elements of this rank's array, and the headers of all."""
        bad_root = self._take_root(call, root) if root is not None else None
        own, error = attempt(arguments.prepared, x, call.verb)
        header, flat = own if own is not None else (message.no_header(), np.empty(0, np.uint8))
        headers = call.agree(header, bad_root or error)[:, : message.HEADER_WORDS]
        call.num_bytes, call.kind = flat.nbytes, flat.dtype
        return flat, headers

    def scatter(self, xs: Sequence[Array] | Array | None, root: int = 0) -> Array:
        """Entry ``rank`` of what ``root`` passes: a sequence of ``size`` arrays, or an array with ``size`` rows.

        Args:
            xs: on ``root`` what is distributed; ignored on the others, which may pass None.
            root: the rank that sends, the same on every rank; default 0.
        """
        with self.gate.call("scatter") as call:
            bad_root = self._take_root(call, root)
            each, error = None, None
            if call.root == self.rank:
                each, error = attempt(arguments.prepared_for_each, xs, self.size, "scatter")
            call.agree((), bad_root or error)
            with call.moving():
                return self.ranks.exchange_arrays(call, each or [], [call.root])[0]

    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        """Entry k of the result is what rank k had at this rank's place of its ``xs`` (one array for each rank).

        Args:
            xs: ``size`` arrays of any shapes; the entry for this rank comes back as a copy.
        """
        with self.gate.call("alltoall") as call:
            each, error = attempt(arguments.prepared_for_each, xs, self.size, "alltoall")
            call.agree((), error)
            with call.moving():
                return self.ranks.exchange_arrays(call, each or [], range(self.size))

    def allreduce(self, data: Array) -> Array:
        """The sum over ranks, as a new array; 4-d results are channels-last, others in C order.

        All ranks pass the same shape and type. Sums of 16-bit types run in float32 and are narrowed once; booleans are
        combined by "or", as NumPy adds them.

        Args:
            data: this rank's summand; it stays as it is.
        """
        with self.gate.call("allreduce") as call:
            x, error = attempt(arguments.summable, data)
            header = message.no_header() if x is None else message.encode(x, ())
            call.agree(
                header,
                error,
                num_same=message.NUM_SAME_WORDS,
                what="the same shape and type",
                detail="" if x is None else f"shape {x.shape} of {x.dtype}",
            )
            assert x is not None
            result = backend.empty(x.shape, x.dtype, x)  # the same order of axes on every rank
            backend.fill(result, x)
            reduce = self.reducer.for_arrays_like(call, result)
            with call.moving():
                reduce(call, _flat(result))
            return result

    def barrier(self) -> None:
        """Return when every rank has called it."""
        with self.gate.call("barrier") as call:
            call.agree()

    # ---- lifetime ----

    def split(self, color: int | None, key: int) -> Any:
        """A communicator of the ranks with the same ``color``, ranked by (key, rank), with this one's configuration.

        A rank whose color is None, or MPI.UNDEFINED, gets None.

        Args:
            color: the number of the new communicator that this rank joins, or None for none.
            key: orders the ranks of the new communicator; equal keys keep their order here.
        """
        with self.gate.call("split") as call:
            own, error = attempt(arguments.color_and_key, color, key)
            rows = call.agree(own or (), error)
            assert own is not None
            has_color, number, _ = own
            entries = [(int(a), int(b), int(c), rank) for rank, (a, b, c) in enumerate(rows[:, :3])]
            with call.moving():
                mine = sorted((c, rank) for a, b, c, rank in entries if has_color and a and b == number)
                return self._part(call, [rank for _, rank in mine])

    @abstractmethod
    def _part(self, call: Passage, ranks: list[int]) -> CommunicatorBase | None:
        """A communicator of these ranks of this one, in this order; None where there are none. Collective."""

    def finalize(self) -> None:
        """Free what the communicator holds. Collective. It must not be used afterwards.

        Where an exception is on its way, as in ``finally:``, other ranks may be elsewhere: that exception goes on.
        """
        if self._finalized_at or self.ranks.refusal():
            return
        failure = sys.exc_info()[1]
        try:
            self._finalize()
        except CommunicatorError:
            if failure is None:
                raise
            self.gate.closed = self.gate.closed or f"this communicator was given up after {type(failure).__name__}"

    def _finalize(self) -> None:
        with self.gate.call("finalize") as call:
            call.agree()
            self._finalized_at = call.where()
            self.reducer.free()  # with the plans of models: the record of the last verbs keeps the communicator
            self.ranks.free()
            self.gate.closed = f"this communicator was finalized at {self._finalized_at}; make a new one"
            self.gate.record.forget(self.gate.name)

    # ---- models ----

    def bcast_data(self, model: Link) -> None:
        """Give every rank rank 0's parameters and persistent values (such as batch-norm statistics).

        A parameter that has no shape yet is broadcast when it is initialised, which must then happen on every rank.

        Args:
            model: an initialised or uninitialised link with the same parameters on every rank; it is changed in
                place.

        Raises:
            CommunicatorError: on every rank, if the models differ in names, shapes or types, or if ranks make the calls
                for two models in another order.
        """
        _check_model("bcast_data", model)
        with self.gate.call("bcast_data"):
            check_order(self, "bcast_data", "models", sys._getframe(1))
            models.bcast_data(self, model)

    def broadcast_data(self, model: Link) -> None:
        """The older name of :meth:`bcast_data`.

        Args:
            model: the link, as there.
        """
        self.bcast_data(model)

    def multi_node_mean_grad(self, model: Link, zero_fill: bool = False) -> None:
        """Replace the gradients of a link by their means over ranks, with equal weights.

        A parameter that has a gradient on some ranks only counts as gradient zero on the others. One without a gradient
        on any rank is left alone, or with ``zero_fill`` gets zeros. Means of 16-bit gradients are summed and divided in
        float32 and narrowed once.

        Args:
            model: a link whose gradients this rank has computed; they are replaced in place.
            zero_fill: whether parameters without a gradient on any rank get zeros; default False.

        Raises:
            CommunicatorError: on every rank, if the parameters differ in name, shape or type.
        """
        _check_model("multi_node_mean_grad", model)
        if not self._has_averaged and self.size > 1:
            models.warn_of_other_networks(self, model)
        self._has_averaged = True
        self.weighted_mean_grad(list(model.namedparams()), zero_fill, None)

    def allreduce_grad(self, model: Link, zero_fill: bool = False) -> None:
        """The older name of :meth:`multi_node_mean_grad`.

        Args:
            model, zero_fill: as there.
        """
        self.multi_node_mean_grad(model, zero_fill)

    def weighted_mean_grad(self, params: list[tuple[str, Parameter]], zero_fill: bool, num_samples: int | None) -> None:
        """As :meth:`multi_node_mean_grad` for named parameters, with each rank weighted by its number of samples.

        None on every rank is equal weights; a rank with 0 samples takes part with weight 0.

        Args:
            params: pairs of a path and a parameter, the same paths on every rank.
            zero_fill: as there.
            num_samples: how many examples this rank's gradients are the mean of, or None.
        """
        with self.gate.call("weighted_mean_grad") as call:
            models.mean_grad(self, call, params, zero_fill, num_samples)


def _check_model(verb: str, model: Link) -> None:
    if not isinstance(model, Link) and not hasattr(model, "namedparams"):  # such as a program's own group of links
        raise TypeError(f"{verb} expected a link, got {type(model).__name__}")


def _flat(x: Array) -> Array:
    """A dense array from the backend as one 1-d view."""
    return (x.transpose(0, 2, 3, 1) if x.ndim == 4 else x).reshape(-1)
