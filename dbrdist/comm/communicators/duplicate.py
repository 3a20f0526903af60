"""The duplicate of the program's MPI communicator on which a communicator's rows are exchanged.

Where ranks give different MPI communicators of the same ranks, such as two duplicates in another order, MPI waits for
ever, and cannot say for what. Ranks that have waited meet on a third communicator then.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dbrdist.comm.transport import mpi
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

    from dbrdist.comm.transport.call_log import Call

patience_seconds = 10.0  # the watch finds ranks that have left, or are elsewhere, before that
_NUM_MEETINGS = 300  # that come to their end on the third communicator, and the duplication does not
_TAG = 32721  # of the group that makes the third one; nobody else's
_WATCH = "dbrdist watch"


class Duplication:
    """Duplicates an MPI communicator. Collective.

    Args:
        mpi_comm: the program's.
        call: the verb that waits.
    """

    def __init__(self, mpi_comm: Comm, call: Call) -> None:
        self._mpi_comm = mpi_comm
        self._call = call
        self._third: Comm | None = None
        self._maker: threading.Thread | None = None
        self._meeting: Request | None = None
        self._num_meetings = 0
        self._looks_from = time.monotonic() + patience_seconds
        self.made, self._request = mpi_comm.Idup()

    @property
    def has_looked(self) -> bool:
        """Whether this rank is making a third communicator, which all have to make then."""
        return self._maker is not None

    def wait(self) -> Comm:
        """The duplicate.

        Raises:
            CommunicatorError: on all ranks, if they duplicate different communicators; on this one, if another has
                left.
        """
        mpi.wait_until(self._test, self._call)
        return self.made

    def finish(self) -> None:
        """Make and free the third communicator, if any rank has begun to. Collective."""
        if self._maker is None:
            self._make_third()
        else:
            self._maker.join()
        assert self._third is not None
        self._third.Free()

    def _test(self) -> bool:
        if self._request.Test():
            return True
        if self._maker is None:
            if time.monotonic() > self._looks_from and _is_alone() and self._is_of_world():
                self._maker = threading.Thread(target=self._make_third, name=_WATCH, daemon=True)
                self._maker.start()
        elif self._third is not None:
            self._look(self._third)
        return False

    def _is_of_world(self) -> bool:
        """Whether all ranks have one COMM_WORLD, as those that others have spawned do not: it makes the third one.

        Open MPI makes one communicator after another in a process: the third one would wait for the duplicate.
        """
        if is_open_mpi():
            return False
        world, group = mpi.start().COMM_WORLD.Get_group(), self._mpi_comm.Get_group()
        are_there = mpi.start().UNDEFINED not in group.Translate_ranks(None, world)
        world.Free()
        group.Free()
        return are_there

    def _make_third(self) -> None:
        """Of the same ranks, whatever duplicate each has; waits for all of them."""
        group = self._mpi_comm.Get_group()
        self._third = mpi.start().COMM_WORLD.Create_group(group, _TAG)
        group.Free()

    def _look(self, third: Comm) -> None:
        """All ranks have begun to duplicate long ago. If they can meet many times meanwhile, it is something else."""
        if self._meeting is None:
            self._meeting = third.Ibarrier()
        elif self._meeting.Test():
            self._meeting = None
            self._num_meetings += 1
        if self._num_meetings == _NUM_MEETINGS:
            raise CommunicatorError(
                "create_communicator: mpi_comm: expected the same MPI communicator on every rank, got different ones "
                f"of the same {third.size} ranks, as of two duplicates in another order; create the communicators in "
                "the same order on all ranks"
            )


def is_open_mpi() -> bool:
    """Whether MPI is Open MPI."""
    return "Open MPI" in mpi.start().Get_library_version()


def _is_alone() -> bool:
    """Whether nothing of this process but this wait can end it: other threads may duplicate other communicators."""
    here = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not here and t.name != _WATCH]
    return here is threading.main_thread() and not others and mpi.watching_is_allowed()
