"""The relay between a program and srun's PMI-2 server: in order, unchanged, and an abort after its words alone."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from clocks import Channel, Clock
from dbrdist_launch import limits
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.loop import Loop
from dbrdist_launch.rank.child import Child
from dbrdist_launch.rank.pmi import PmiRelay

ABORT = b"    86cmd=abort;isworld=TRUE;msg=application called MPI_Abort(MPI_COMM_WORLD, 7) - process 1;"


class Relayed:
    """A relay whose server is the test; `program` is the end that a program would have."""

    def __init__(self):
        self.server, inherited = socket.socketpair()
        self.server.setblocking(False)
        self.number = inherited.detach()
        self.relay = PmiRelay({"PMI_FD": str(self.number), "SLURM_STEP_ID": "0"})
        self.relay.in_child()
        self.program = socket.socket(fileno=os.dup(self.number))
        self.program.setblocking(False)
        os.close(self.number)
        self.loop, self.channel, self.came, self.order = Loop(), Channel(), b"", []
        self.relay.begin(self.loop, self.channel, lambda: self.order.append(self.at_server()))

    def at_server(self):
        """All that has come there so far."""
        with contextlib.suppress(BlockingIOError):
            self.came += self.server.recv(1 << 16)
        return self.came

    def close(self):
        os.close(self.relay._server)
        for one in (self.server, self.program, self.loop, self.relay._ours):
            one.close()


@pytest.fixture
def relayed():
    made = Relayed()
    yield made
    made.close()


def test_both_sides_hear_each_other_unchanged(relayed):
    for data in (b"    20cmd=fullinit;pmirank=0", bytes(range(256)) * 100):
        relayed.program.send(data)
        relayed.loop.turn(1.0)
        assert relayed.at_server().endswith(data)
        relayed.server.send(data[::-1])
        relayed.loop.turn(1.0)
        assert relayed.program.recv(1 << 16) == data[::-1]
    assert relayed.order == []  # the launcher hears nothing
    relayed.server.close()
    relayed.loop.turn(1.0)
    assert relayed.program.recv(10) == b""


@pytest.mark.parametrize("cut", [None, 9, 13])
@pytest.mark.parametrize("request_", [ABORT, b"cmd=abort exitcode=7\n"])
def test_an_abort_goes_on_after_the_program_s_words(relayed, request_, cut):
    """Slurm kills the supervisor for it: at that moment the launcher's connection must have taken all words."""
    relayed.channel.unsent = b"words that the connection does not take yet"
    for data in (request_[:cut], request_[cut:] if cut else b""):
        if data:
            relayed.program.send(data)
            relayed.loop.turn(1.0)
    came = relayed.at_server()
    assert came == request_[: len(came)] and b"abort" not in came
    assert relayed.order == [came]
    relayed.channel.unsent = b""
    relayed.relay.look(0.0)
    assert relayed.at_server() == request_
    assert relayed.relay.due is None


def test_an_abort_does_not_wait_for_a_launcher_that_takes_nothing(relayed, monkeypatch):
    clock = Clock(monkeypatch)
    relayed.channel.unsent = b"x"
    relayed.program.send(ABORT)
    relayed.loop.turn(1.0)
    assert relayed.relay.due == clock.now + limits.ABORT_SECONDS
    relayed.relay.look(clock.now)
    assert relayed.at_server() == b""
    relayed.relay.look(relayed.relay.due)
    assert relayed.at_server() == ABORT


def test_an_abort_goes_on_although_its_words_cannot(relayed):
    def fail():
        raise OSError("no connection")

    relayed.relay._say_all = fail
    relayed.program.send(ABORT)
    with pytest.raises(OSError, match="no connection"):  # the supervisor reports it, and goes on
        relayed.loop.turn(1.0)
    relayed.relay.look(0.0)
    assert relayed.at_server() == ABORT


STEP = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("environment", [{}, {"PMI_FD": "{}"}, STEP, {"PMI_FD": "9x", **STEP}])
def test_other_starters_programs_keep_their_own_connection(environment):
    one, other = socket.socketpair()
    with one, other:
        given = {name: value.format(one.fileno()) for name, value in environment.items()}
        relay = PmiRelay(given)
        relay.in_child()
        relay.begin(Loop(), Channel(), lambda: None)
        relay.look(0.0)
        one.send(b"x")
        assert other.recv(1) == b"x" and relay.due is None


def test_a_file_by_that_number_is_no_connection(tmp_path):
    with open(tmp_path / "file", "w") as file:
        assert PmiRelay({"PMI_FD": str(file.fileno()), "SLURM_STEP_ID": "0"}).number is None
    assert PmiRelay({"PMI_FD": "10000", "SLURM_STEP_ID": "0"}).number is None


@pytest.mark.slow
def test_a_program_and_its_children_have_the_connection_under_its_number(tmp_path):
    """By the child that a supervisor starts, through a shell, to the server and back."""
    server, inherited = socket.socketpair()
    page = os.memfd_create("page")
    os.set_inheritable(inherited.fileno(), True)
    text = "import os, sys; n = int(os.environ['PMI_FD']); os.write(n, b'hello'); print(os.read(n, 10).decode())"
    environment = {"PMI_FD": str(inherited.fileno()), "SLURM_STEP_ID": "0", "PATH": os.environ["PATH"]}
    relay, loop = PmiRelay(environment), Loop()
    words = ["/bin/sh", "-c", '"$@"; exit $?', "-", sys.executable, "-S", "-c", text]
    child = Child(words, environment, None, page, set(), Inherited(), relay.in_child)
    relay.begin(loop, Channel(), lambda: None)
    while not (heard := _maybe(server)):
        loop.turn(0.05)
    assert heard == b"hello"
    server.send(b"answer")
    loop.turn(5.0)
    with os.fdopen(child.out) as out:
        assert out.read() == "answer\n"
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 0
    for one in (server, inherited, loop, relay._ours):
        one.close()
    for descriptor in (page, child.err, child.events, relay._server):
        os.close(descriptor)


def _maybe(server):
    try:
        return server.recv(100, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


@pytest.mark.programs
def test_a_kill_by_the_server_finds_all_words_sent(tmp_path):
    """Events in order: a supervisor that is killed by what an abort causes has sent the words before it."""
    text = """
import os, signal, socket, sys
from dbrdist_launch.channel import Channel
from dbrdist_launch.loop import Loop
from dbrdist_launch.messages import Out
from dbrdist_launch.rank.outputs import Outputs
from dbrdist_launch.rank.pmi import PmiRelay

launcher, server = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
read, write = os.pipe()
relay = PmiRelay({"PMI_FD": str(server.fileno()), "SLURM_STEP_ID": "0"})
relay.in_child()
program = os.dup(server.fileno())
loop, channel = Loop(), Channel(launcher)
outputs = Outputs(loop, {read: "err"}, 0, lambda data, stream: channel.send(Out(stream, data)))  # without credit
relay.begin(loop, channel, outputs.read_all)
os.write(write, b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7)\\n" * 40)
os.write(program, b"cmd=abort exitcode=7\\n")
while True:
    loop.turn(5.0)
"""
    launcher, ours = socket.socketpair()
    server, theirs = socket.socketpair()
    with launcher, server:
        words = [sys.executable, "-c", text, str(ours.fileno()), str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(words, pass_fds=(ours.fileno(), theirs.fileno()), env=environment)
        ours.close()
        theirs.close()
        server.settimeout(40)
        assert server.recv(1000) == b"cmd=abort exitcode=7\n"
        process.kill()  # as slurmstepd does, at the first byte
        process.wait()
        came = b""
        while data := launcher.recv(1 << 16):
            came += data
        assert came.count(b"application called MPI_Abort(MPI_COMM_WORLD, 7)") == 40
