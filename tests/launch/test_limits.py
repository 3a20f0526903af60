"""Times and sizes that the launcher decides by: a changed one is a decision, and some must fit to each other."""

from dbrdist_launch import limits

KIB, MIB = 1024, 1024 * 1024
TABLE = {
    # before the start
    "LIBRARY_SECONDS": 60, "START_SECONDS": 60,
    # the launcher and its ranks
    "TICK_SECONDS": 0.25, "PING_SECONDS": 1, "ASLEEP_SECONDS": 2, "CONNECT_SECONDS": 10, "HELLO_SECONDS": 10,
    "HELLO_BYTES": 4 * KIB, "MAX_STRANGERS": 128, "MESSAGE_BYTES": MIB, "WELCOME_BYTES": 16 * MIB,
    "WINDOW_BYTES": 32 * KIB, "LOCAL_WINDOW_BYTES": 512 * KIB, "PIECE_BYTES": 512, "READ_BYTES": 256 * KIB,
    "INPUT_BYTES": 64 * KIB, "KEPT_INPUT_BYTES": MIB, "PIPE_BYTES": 256 * KIB, "PIECES": 16, "GATHER_SECONDS": 0.07,
    "LEAST_SECONDS": 0.002,
    # output
    "PARTIAL_SECONDS": 1, "IDLE_SECONDS": 0.1, "LINE_BYTES": 64 * KIB, "VIEW_SECONDS": 0.25, "TAIL_BYTES": 32 * KIB,
    "STARTER_LINE_BYTES": 4 * KIB, "STARTER_BOX_LINES": 40, "OPEN_LOGS": 200,
    # the end of a rank
    "DRAIN_SECONDS": 0.3, "WRITER_SECONDS": 5, "FILTER_SECONDS": 60, "FAILED_FILTER_SECONDS": 10,
    "LEFTOVER_LOOK_SECONDS": 0.1, "ABORT_SECONDS": 0.5, "FAREWELL_SECONDS": 20, "KILL_SECONDS": 1,
    "FINALIZE_SECONDS": 1, "WORKER_SECONDS": 2, "OOM_LOOK_SECONDS": 5, "SLURM_SECONDS": 0.5, "SEARCH_SECONDS": 0.02,
    "SEARCH_MOST_SECONDS": 30, "STACK_SECONDS": 0.5, "STACK_PAUSE_SECONDS": 0.1, "STACK_LOOK_SECONDS": 0.01,
    "FROZEN_SECONDS": 1.5, "SPY_SECONDS": 1,
    # judgement
    "LAST_WORDS_SECONDS": 1, "STARTER_SECONDS": 2, "DOUBT_SECONDS": 3, "SAME_MOMENT_SECONDS": 0.005,
    "CUT_SECONDS": 0.2, "LOST_SECONDS": 0.3, "TOLD_SECONDS": 0.5, "ANSWER_SECONDS": 0.2, "STACKS_SECONDS": 2,
    "REQUEST_SECONDS": 0.7, "WAITING_SECONDS": 15, "EARLY_SECONDS": 10, "SILENT_SECONDS": 30, "REPLY_SECONDS": 10,
    "PROBE_SECONDS": 2, "QUICK_SECONDS": 60, "SAME_FAILURES": 3,
}  # fmt: skip


def test_each_time_and_size_is_that_of_the_table():
    assert {name: value for name, value in vars(limits).items() if name.isupper()} == TABLE


def test_who_waits_longer_than_whom():
    """A failed rank is held for as long as the others' stacks take, and is asked for them before it is killed."""
    one = limits
    assert one.ANSWER_SECONDS + one.STACKS_SECONDS + one.SPY_SECONDS < one.FAREWELL_SECONDS
    assert one.STACK_PAUSE_SECONDS < one.STACK_SECONDS < one.STACKS_SECONDS
    assert one.CUT_SECONDS < one.LOST_SECONDS < one.REQUEST_SECONDS < one.DOUBT_SECONDS
    assert one.TICK_SECONDS < one.PING_SECONDS < one.FROZEN_SECONDS < one.ASLEEP_SECONDS < one.DOUBT_SECONDS
    assert one.WINDOW_BYTES + one.PIECE_BYTES < one.LOCAL_WINDOW_BYTES < one.MESSAGE_BYTES < one.WELCOME_BYTES
