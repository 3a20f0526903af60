"""The verbs between two ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.protocol.group import RankGroup
from dbrdist.comm.transport import message
from dbrdist.core.array.backend import Array
from dbrdist.errors import CommunicatorError

_ARRAY, _ARRAYS, _OBJECT, _BROKEN = range(message.ONE_ARRAY, 4)  # what a message holds


class PairVerbs(RankGroup):
    """Send and receive. Messages of one pair of ranks with one tag keep their order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._own_mail: dict[int, deque[Any]] = {}  # tag -> what this rank has sent to itself

    def send(self, data: Array | Sequence[Array], dest: int, tag: int) -> None:
        """Send an array, or a tuple or list of arrays, to ``dest``, which receives it with the same ``tag``.

        It may return before ``dest`` receives, or wait until then, as MPI's send: a large array waits.

        Args:
            data: an array, or a tuple or list of arrays, of any shapes and types.
            dest: the rank that receives.
            tag: an integer from 0 that tells messages between the same two ranks apart.
        """
        is_one = not isinstance(data, (tuple, list))
        arrays: Any = [data] if is_one else data
        with self.gate.message("send", dest, tag) as call:
            if type(data) is np.ndarray and data.dtype.kind in "biufc" and data.ndim <= message.MAX_NDIM:
                # As below, in less time.
                if call.peer != self.rank and self.ranks.send_small(call, data):
                    return
                header, flat = arguments.prepared(data, "send")
                self._send_message(call, _ARRAY, header, [message.as_bytes(flat)], None)
                return
            each, error = attempt(lambda: [arguments.prepared(x, "send") for x in arrays])
            headers = each[0][0] if each and is_one else np.array([h for h, _ in each or ()], np.int64).reshape(-1)
            kind = _BROKEN if error else _ARRAY if is_one else _ARRAYS
            self._send_message(call, kind, headers, [message.as_bytes(flat) for _, flat in each or ()], error)

    def recv(self, source: int, tag: int) -> Array | tuple[Array, ...]:
        """The array, or tuple of arrays, that ``source`` sent with ``tag``."""
        with self.gate.message("recv", source, tag) as call:
            found = self.ranks.recv_array(call) if call.peer != self.rank else self._own_message(call)
            if type(found) is np.ndarray:
                call.num_bytes = found.nbytes
                return found
            kind, headers, parts = self._opened(call, *found)
            if kind == _OBJECT:
                raise _wrong_kind("array", call)
            if kind == _ARRAY:
                return message.to_current_device(message.empty_like_header(headers, parts[0])[1], headers)
            received = []
            for header, raw in zip(headers.reshape(-1, message.HEADER_WORDS), parts):
                received.append(message.to_current_device(message.empty_like_header(header, raw)[1], header))
            return tuple(received)

    def send_obj(self, obj: object, dest: int, tag: int) -> None:
        """Send a picklable object to ``dest``.

        Args:
            obj: anything that pickle takes.
            dest: the rank that receives.
            tag: an integer from 0 that tells messages between the same two ranks apart.
        """
        with self.gate.message("send_obj", dest, tag) as call:
            raw, error = attempt(arguments.pickled, obj)
            parts = [] if raw is None else [raw]
            self._send_message(call, _BROKEN if error else _OBJECT, np.empty(0, np.int64), parts, error)

    def recv_obj(self, source: int, tag: int) -> Any:
        """The object that ``source`` sent with ``tag``."""
        with self.gate.message("recv_obj", source, tag) as call:
            found = self.ranks.recv_parts(call) if call.peer != self.rank else self._own_message(call)
            kind, _, parts = self._opened(call, *found)
            if kind != _OBJECT:
                raise _wrong_kind("object", call)
            return arguments.unpickled(parts[0])

    def _send_message(
        self, call: Passage, kind: int, headers: message.Header, parts: list[message.HostArray], error: Exception | None
    ) -> None:
        """The head says what kind, how many parts, their sizes in bytes; then what describes them."""
        if error is not None:
            parts = [np.frombuffer(str(error).encode(), np.uint8)]  # so that the receiver raises, too
        sizes = [part.size for part in parts]
        call.num_bytes = sum(sizes)
        head = np.concatenate([np.array([kind, len(sizes), *sizes], np.int64), headers])
        if call.peer == self.rank:  # kept here: a blocking MPI_Send to oneself waits forever
            mail: deque[Any] = self._own_mail.setdefault(call.tag, deque())
            mail.append((head, [part.copy() for part in parts]))
        else:
            self.ranks.send_parts(call, head, parts)
        if error is not None:
            raise error

    def _own_message(self, call: Passage) -> tuple[message.Header, list[message.HostArray]]:
        """The next message that this rank has sent to itself."""
        if not self._own_mail.get(call.tag):
            raise CommunicatorError(
                f"rank {self.rank} expected a message from itself with tag {call.tag}, but sent none"
            )
        mail: tuple[message.Header, list[message.HostArray]] = self._own_mail[call.tag].popleft()
        return mail

    def _opened(
        self, call: Passage, head: message.Header, parts: list[message.HostArray]
    ) -> tuple[int, message.Header, list[message.HostArray]]:
        """What kind of message it is, what describes its parts, and these."""
        call.num_bytes = parts[0].size if len(parts) == 1 else sum(part.size for part in parts)
        if head[0] == _BROKEN:
            raise TypeError(f"{bytes(parts[0]).decode()} (on rank {call.peer} of {self.size}, which sent it)")
        return int(head[0]), head[2 + int(head[1]) :], parts


def _wrong_kind(expected: str, call: Passage) -> TypeError:
    where = f"from rank {call.peer} with tag {call.tag}"
    if expected == "array":
        return TypeError(f"recv expected an array {where}, got an object; use recv_obj")
    return TypeError(f"recv_obj expected an object {where}, got an array; use recv")
