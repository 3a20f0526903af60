"""Every time and size that the launcher decides by, with its reason. Users' own: launcher/preparation/settings.py."""

# --- before the start
LIBRARY_SECONDS = 60.0  # for a Python to load its MPI, or an mpiexec to say its version: shared disks can be slow
START_SECONDS = 60.0  # without a new rank, where no queue stands before the start

# --- the launcher and its ranks
TICK_SECONDS = 0.25  # how often the launcher looks at its clocks
PING_SECONDS = 1.0  # a supervisor answers each ping with a beat; a ping goes out once the last one was answered
ASLEEP_SECONDS = 2.0  # a tick that comes so late: the launcher itself was stopped, and nobody else was silent
CONNECT_SECONDS = 10.0  # from a rank to the launcher, for each of its addresses
HELLO_SECONDS = 10.0  # within which a connection must have shown the token
HELLO_BYTES = 4096  # a longer first line is no hello
MAX_STRANGERS = 128  # connections that have not shown the token yet; of more, the oldest is closed
MESSAGE_BYTES = 1 << 20  # no message of a rank is longer
WELCOME_BYTES = 1 << 24  # nor one to a rank: command and environment hold 2 MB, in JSON up to six times as much
WINDOW_BYTES = 1 << 15  # what a rank may have written that nobody has read yet; beyond it the program itself waits.
# It fits into the launcher's end of a TCP connection: the kernel drops one that is full for as long as a silent one.
LOCAL_WINDOW_BYTES = 1 << 19  # the same over a Unix socket, where nothing is ever dropped
PIECE_BYTES = 512  # what a piece of output counts beyond its own length, for the kernel's own needs
READ_BYTES = 1 << 18  # what is read at one time
INPUT_BYTES = 1 << 16  # of stdin on their way to rank 0
KEPT_INPUT_BYTES = 1 << 20  # of a pipe on stdin that a restarted program gets again; of a longer one nothing
PIPE_BYTES = 1 << 18  # what a rank's stdout holds, if its user may have so much; a quarter of it by default
PIECES = 16  # of a rank's output that are passed on as they come; one that keeps writing
GATHER_SECONDS = 0.07  # has them gathered for so long: each piece costs four processes a wake-up
LEAST_SECONDS = 0.002  # where its pipe fills sooner than that, it is read at once

# --- output
PARTIAL_SECONDS = 1.0  # an unfinished line is shown when its end has not come by then
IDLE_SECONDS = 0.1  # how often a writer with nothing to do looks for such lines
LINE_BYTES = 1 << 16  # a longer line is shown in pieces
VIEW_SECONDS = 0.25  # between two drawings of the live view, whatever the ranks write
TAIL_BYTES = 1 << 15  # last output of a rank that is kept for the report
STARTER_LINE_BYTES = 4096  # of a line of mpiexec's that has no end yet: no message of its own is longer
STARTER_BOX_LINES = 40  # of a message of mpiexec's between two rules
OPEN_LOGS = 200  # log files that are open at one time

# --- the end of a rank
DRAIN_SECONDS = 0.3  # how long a silent output may stay open after the end of a program that failed or was ended
WRITER_SECONDS = 5.0  # the same after a good end, while a process that the program started could still write there
FILTER_SECONDS = 60.0  # for one that reads what the program wrote (`exec > >(filter)`) to write the rest, in silence
FAILED_FILTER_SECONDS = 10.0  # the same after a bad end: the other ranks wait for its report
LEFTOVER_LOOK_SECONDS = 0.1  # between two looks for such processes
ABORT_SECONDS = 0.5  # from mpiexec's kill to ours: a rank in MPI_Abort ends by itself with its code
FAREWELL_SECONDS = 20.0  # the launcher gathers what the others do before it lets a failed rank go
KILL_SECONDS = 1.0  # from SIGTERM to SIGKILL after a failure
FINALIZE_SECONDS = 1.0  # in MPI_Finalize with a bad exit code, after all of Python has ended: it waits for the others
WORKER_SECONDS = 2.0  # a program that looks after its workers fetches a dead one sooner
OOM_LOOK_SECONDS = 5.0  # between two looks at the control group, which a program hardly ever changes
SLURM_SECONDS = 0.5  # within which Slurm's signals reach all processes of a step
SEARCH_SECONDS = 0.02  # between two looks for the connection that a rank makes in MPI_Init
SEARCH_MOST_SECONDS = 30.0  # a rank that has not called MPI_Init by then hardly will
STACK_SECONDS = 0.5  # for a program to write its stacks, and before that to leave a write that a signal would cut short
STACK_PAUSE_SECONDS = 0.1  # of silence after stacks: they are whole
STACK_LOOK_SECONDS = 0.01  # between two looks whether a program still writes
FROZEN_SECONDS = 1.5  # without a ping or an event a supervisor looks at the clock: was it stopped with all others?
SPY_SECONDS = 1.0  # for py-spy to read them

# --- judgement
LAST_WORDS_SECONDS = 1.0  # for the ranks' reports to arrive after mpiexec has ended
STARTER_SECONDS = 2.0  # for mpiexec to end after its ranks
DOUBT_SECONDS = 3.0  # a supervisor elsewhere that was silent for so long: its host may be gone, which shows soon
SAME_MOMENT_SECONDS = 0.005  # connections that break within it broke together
CUT_SECONDS = 0.2  # between a supervisor that was killed and those that mpiexec then kills; it kills its own at once
LOST_SECONDS = 0.3  # from a broken connection to a verdict: the other ranks of a dead host break in this time
TOLD_SECONDS = 0.5  # from a dead thread or worker to a verdict, where the user asked for one: the rank may end itself
ANSWER_SECONDS = 0.2  # after a failure, for the others' last beats
STACKS_SECONDS = 2.0  # for the stacks of all ranks
REQUEST_SECONDS = 0.7  # a signal to the ranks may come from an mpiexec whose host is gone: that shows in this time
WAITING_SECONDS = 15.0  # ranks that have not appeared by then are named, once
EARLY_SECONDS = 10.0  # a rank that left without MPI_Finalize is named when the others still run after it
SILENT_SECONDS = 30.0  # a supervisor that does not answer on a host that does is named, once
REPLY_SECONDS = 10.0  # for a running job's launcher to answer `ps`, `stacks` or `stop`
PROBE_SECONDS = 2.0  # for a host to answer ssh
QUICK_SECONDS = 60.0  # failures of a program without beats that come sooner may be a crash loop
SAME_FAILURES = 3  # in a row without a step in between: the job would fail forever
