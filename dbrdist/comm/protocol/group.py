"""What all verbs of a communicator share: its ranks, its gate, its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Gate
from dbrdist.comm.protocol.primitives import Ranks, Row
from dbrdist.comm.protocol.settings import Configured
from dbrdist.comm.transport.call_log import Call, CallLog

if TYPE_CHECKING:
    from typing import NoReturn, Self

    from dbrdist.comm.protocol.settings import ConfigValue

T = TypeVar("T")


class StopRequests:
    """The request to stop after a step, which comes with the step's header."""

    def __init__(self) -> None:
        self.request = 0  # a signal's number, which the next header tells the other ranks
        self.answers: Row | None = None  # what they said in the last


class RankGroup(Configured):
    """One rank of a communicator.

    Args:
        ranks: who is there, and how bytes move.
        defaults: the configuration that is known beforehand.
        configs: that of a communicator that this one is a part of.
        record: where this rank's verbs are noted.
        name: the same on all ranks.
        members: the ranks, as numbered in the whole job.
    """

    def __init__(
        self,
        ranks: Ranks,
        defaults: dict[str, ConfigValue],
        record: CallLog,
        name: str,
        members: tuple[int, ...],
        configs: dict[str, ConfigValue] | None = None,
    ) -> None:
        super().__init__(defaults, configs)
        self.ranks = ranks
        self.gate = Gate(ranks, record, name, members, self._describe_config)
        self.stop = StopRequests()

    def __copy__(self) -> Self:
        """Itself: there is no second communicator without all ranks making it."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Itself: a copy of a link that communicates does so with the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: a communicator belongs to the processes that created it; create "
            "one there with create_communicator, and save models with dbrdist.serializers"
        )

    def _config_changed(self) -> None:
        self.gate.config_changed()

    # ---- who and where ----

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.size

    @property
    def intra_rank(self) -> int:
        """The number of this rank among those on its host."""
        return self.ranks.intra_rank

    @property
    def intra_size(self) -> int:
        """How many ranks are on this host."""
        return self.ranks.intra_size

    @property
    def inter_rank(self) -> int:
        """The number of this host among the hosts, in the order of their lowest ranks."""
        return self.ranks.inter_rank

    @property
    def inter_size(self) -> int:
        """How many hosts there are."""
        return self.ranks.inter_size

    # ---- what verbs begin with ----

    def _prepare_bcast(
        self, call: Call, root: int | None, max_buf_len: int | None, prepare: Callable[..., T], *args: object
    ) -> tuple[tuple[T | None, int], Exception | None]:
        """((what the root sends, bytes at a time), what is wrong)."""
        error = self._take_root(call, root)
        piece, wrong = attempt(arguments.piece_bytes, max_buf_len, call.verb)
        own = None
        if call.root == self.rank:
            own, bad = attempt(prepare, *args)
            error = error or bad
        return (own, piece or 0), error or wrong

    def _take_root(self, call: Call, root: int | None) -> Exception | None:
        number, error = attempt(arguments.rank_of, root, self.size, call.verb)
        call.root = -1 if number is None else number
        return error
