"""Tests of dbrdist.comm.failure.watch."""

import os
import threading
from types import SimpleNamespace

import pytest

from dbrdist.comm.failure import watch
from dbrdist.comm.failure.deadlock import WaitState
from dbrdist.comm.transport import call_log, mpi
from tests.comm.comm_helpers import Clock
from tests.descriptors import open_files
from tests.each import each


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def call():
    with call_log.Call(call_log.CallLog(), "bcast", "world", (0, 1), ("x.py", 3)) as made:
        yield made


class Line:
    """A channel of the watch that keeps what it is told; all have come to the exit at look ``arrives_at``."""

    def __init__(self, members=(0, 1, 2), arrives_at=1):
        self.members, self.judge, self.arrives_at = members, members[0], arrives_at
        self.looks, self.told, self.heard = 0, [], []

    def arrive(self):
        self.looks += 1
        return self.looks >= self.arrives_at

    def tell(self, rank, words):
        self.told.append((rank, words))

    def tell_all(self, words):
        self.told.append(("all", words))

    def hear(self):
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """The watch of rank 1, and a record of its own."""
    state = watch._Watch()
    monkeypatch.setattr(watch, "_watch", state)
    monkeypatch.setattr(call_log, "process", call_log.CallLog(1, threading.get_ident()))
    monkeypatch.setattr(watch.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(mpi, "started", lambda: "MPI")
    monkeypatch.setattr(mpi, "world", lambda: (1, 3))
    monkeypatch.setattr(mpi, "end_job", lambda code: state.ended.append(code))
    monkeypatch.delenv("DBRDIST_LAUNCH", raising=False)
    state.ended = []
    return state


@each(**{"rank, is_allowed": [(0, True), (1, True), (1, False)]})
def test_ranks_are_watched_once(monkeypatch, rank, is_allowed):
    state, done = watch._Watch(), []
    monkeypatch.setattr(watch, "_watch", state)
    monkeypatch.setattr(call_log, "process", call_log.CallLog(rank))
    monkeypatch.setattr(watch, "FailureChannel", lambda mpi_comm, members: Line(members))
    monkeypatch.setattr(watch.atexit, "register", lambda function: done.append(("exit", function)))
    monkeypatch.setattr(mpi, "call_before_finalize", lambda function: done.append(("finalize", function)))
    monkeypatch.setattr(mpi, "watching_is_allowed", lambda: is_allowed)
    monkeypatch.setattr(watch, "_listen", lambda: done.append("listens"))
    watch.join("comm", (1, 2))
    if state.listener is not None:
        state.listener.join(20)
    for members in ((2, 1), (2,), (0, 1, 2), (1, 0)):
        watch.join("comm", members)
    assert [channel.members for channel in state.channels] == [(1, 2), (0, 1, 2)]
    assert [(number, judge.channel.judge) for number, judge in state.judges.items()] == ([(0, 1)] if rank else [(1, 0)])
    assert sorted(map(str, done)) == sorted(
        map(str, [("exit", watch._leave), ("finalize", watch._leave), *["listens"] * is_allowed])
    )
    assert (state.listener is not None and state.listener.daemon) == is_allowed


@each(**{"arrives_at, seconds, is_there": [(1, 0.0, True), (2, 0.0, True), (3, 0.0, False), (12, 1.0, True),
                                           (12, 0.2, False), (99, 1.0, False)]})  # fmt: skip
def test_a_meeting_at_the_exit(watched, clock, arrives_at, seconds, is_there):
    """Looks at 0, 0.5, 1.5, 3.5 ms and so on, with pauses of 50 ms at most."""
    watched.over = False
    watched.stop.clear()
    clock.slept.clear()
    early, late = Line(), Line((0, 1), arrives_at)
    watched.channels = [late, early]
    assert watch.all_leave_within(seconds) is is_there
    assert watch.is_over() is is_there is watched.stop.is_set()
    assert early.looks == late.looks == len(clock.slept) + 1  # on every channel, even if the first is late
    assert clock.slept == [min(0.0005 * 2**k, 0.05) for k in range(len(clock.slept))]
    if is_there:
        assert watch.all_leave_within(0.0) and late.looks == arrives_at
    else:
        assert seconds < sum(clock.slept) <= seconds + 0.05


def test_nobody_meets_without_channels_or_mpi(watched, clock, monkeypatch):
    assert not watch.all_leave_within(5.0)
    watched.channels = [Line()]
    monkeypatch.setattr(mpi, "started", lambda: None)
    assert not watch.all_leave_within(5.0) and watched.channels[0].looks == 0 and clock.slept == []


@each(**{"arrives_at, is_said, meetings": [(1, False, 1), (30, False, 2), (140, True, 3)]})
def test_who_leaves_says_so_after_a_while(watched, clock, capfd, arrives_at, is_said, meetings):
    watched.over, watched.has_left, watched.is_ending = False, False, False
    line, judge = Line(arrives_at=arrives_at), SimpleNamespace(heard=[])
    judge.hear = lambda state, is_answer: judge.heard.append((state.rank, state.has_left, is_answer))
    watched.channels, watched.judges = [line], {0: judge}
    watch._leave()
    assert watched.over and watched.has_left == (meetings > 1)
    assert judge.heard == [(1, True, False)] * (meetings > 1)
    assert [(to, words["what"], WaitState.decode({k: v for k, v in words.items() if k != "what"}).has_left)
            for to, words in line.told] == []  # fmt: skip
    words = "[rank 1] finished 5 s ago; ranks 0, 2 of 3 still running\n"
    assert capfd.readouterr().err == (words if is_said else "")


def test_who_leaves_tells_the_judge_alone(watched, clock, capfd):
    """Else ranks that wait at their exit send a message each to each other: a million of a thousand ranks."""
    watched.channels = [Line(arrives_at=140), Line((1, 2), arrives_at=140)]
    watched.judges = {}
    watch._leave()
    assert [(to, words["what"], words["has_left"]) for line in watched.channels for to, words in line.told] == [
        (0, "state", True), (1, "state", True)]  # fmt: skip
    assert capfd.readouterr().err == ""


def test_a_forked_child_and_a_process_without_mpi_leave_at_once(watched, clock, monkeypatch):
    watched.channels = [Line()]
    watched.process += 1
    watch._leave()
    watched.process -= 1
    monkeypatch.setattr(mpi, "started", lambda: None)
    watch._leave()
    assert watched.channels[0].looks == 0


@each(**{"others, has_left, words": [
    ({0}, True, "[rank 0] finished 5 s ago; rank 2 of 3 still running\n"), (set(), False, ""),
    ({2}, True, "[rank 1] finished 5 s ago; rank 0 of 3 still running\n"),
    ({2}, False, "[rank 2] finished 5 s ago; ranks 0, 1 of 3 still running\n"),
    (set(), True, "[rank 1] finished 5 s ago; ranks 0, 2 of 3 still running\n")]}, judges=[True, False])  # fmt: skip
def test_the_judge_says_once_who_is_missing(watched, capfd, others, has_left, words, judges):
    watched.others_left, watched.has_left, watched.has_named_missing = others, has_left, False
    watched.judges = {0: "judge"} if judges else {}
    for _ in range(2):
        watch._say_who_is_missing()
    assert capfd.readouterr().err == (words if judges else "")


def waits_in(own, verb="recv", since=0.0, is_waiting=True):
    """A verb in which this thread waits for others."""
    one = call_log.Call(own, verb, "world", (0, 1), ("x.py", 3))
    one.since, one.is_waiting, one.number = since, is_waiting, 1
    return one


def test_a_rank_says_once_where_it_waits(watched, clock):
    own, line = call_log.process, Line()
    watched.channels = [line]
    watch._say_where()
    with waits_in(own, since=clock.now - watch.patience_seconds) as one:
        watch._say_where()
        assert line.told == []
        clock.now += 2.0**-10
        one.is_waiting = False
        watch._say_where()
        assert line.told == []
        one.is_waiting = True
        watch._say_where()
        watch._say_where()
        ((to, words),) = line.told
        assert to == 0 and words.pop("what") == "state" and WaitState.decode(words).wait_ids() == {one.wait_id}
        line.told.clear()
        watch._say_where()
        assert line.told == []
    for _ in range(2):  # what the judge keeps of a wait that is over it would look at for ever
        watch._say_where()
        assert line.told == [(0, {"what": "goes on", "rank": 1})]
    line.told.clear()
    with waits_in(own, since=clock.now - 5.0):
        own.home = None  # the main thread, which waits nowhere where this is another one
        if threading.current_thread() is threading.main_thread():
            own.threads.add(threading.get_ident())
        watch._say_where()
        assert len(line.told) == 1


def test_a_rank_says_that_another_thread_computes_and_when_it_does_no_more(watched, clock):
    own, line = call_log.process, Line()
    watched.channels = [line]
    computing = threading.Event()
    other = threading.Thread(target=computing.wait, daemon=True)
    other.start()
    own.threads.add(other.ident)
    with waits_in(own, since=clock.now - 5.0):
        for _ in range(2):
            watch._say_where()
            assert [words["is_busy"] for _, words in line.told] == [True]
        computing.set()
        other.join(20)
        for _ in range(2):
            watch._say_where()
            assert [words["is_busy"] for _, words in line.told] == [True, False]


class FakeJudge:
    def __init__(self, verdict=None, channel=None):
        self.heard, self.verdict, self.channel = [], verdict, channel

    def hear(self, state, is_answer):
        self.heard.append((state.rank, is_answer))

    def hear_that_it_goes_on(self, rank):
        self.heard.append(rank)

    def look(self):
        return self.verdict


def test_what_a_watch_is_told(watched, clock, capfd):
    own, line, judge = call_log.process, Line(), FakeJudge()
    for what, has_left in (("state", False), ("answer", False), ("state", True)):
        words = WaitState(2, False, has_left).encode()
        watch._obey({"what": what, **words}, line, judge)
        watch._obey({"what": what, **words}, line, None)
        assert watched.others_left == ({2} if has_left else set())
    for of in (judge, None):
        watch._obey({"what": "goes on", "rank": 2}, line, of)
    assert judge.heard == [(2, False), (2, True), (2, False), 2] and line.told == []
    watch._obey({"what": "ask"}, line, judge)
    ((to, words),) = line.told
    assert to == 0 and words.pop("what") == "answer" and WaitState.decode(words).rank == 1
    with waits_in(own) as outer:
        watch._obey({"what": "end", "text": "stuck", "wait_ids": [outer.wait_id + 1]}, line, None)
        assert outer.error == "" and watched.told_at == clock.now
        watch._obey({"what": "end", "text": "stuck", "wait_ids": [outer.wait_id]}, line, None)
        assert outer.error == "stuck"
    assert not watched.is_ending
    watch._obey({"what": "failing"}, line, None)
    assert watched.is_ending and "the last 1 verbs of this rank are in" in capfd.readouterr().err


def test_a_verdict_goes_to_those_whom_it_concerns():
    line = Line()
    watch._pronounce(FakeJudge(None, line))
    assert line.told == []
    watch._pronounce(FakeJudge(("stuck", {0: {3, 1}, 2: {5}}), line))
    assert line.told == [(0, {"what": "end", "text": "stuck", "wait_ids": [1, 3]}),
                         (2, {"what": "end", "text": "stuck", "wait_ids": [5]})]  # fmt: skip


def test_a_wait_inside_mpi_that_was_told_to_end_ends_the_job(watched, capfd):
    own = call_log.process
    watched.told_at = 5.0
    with waits_in(own) as one:
        watch._end_if_stuck()
        assert watched.told_at == 0.0 and watched.ended == [] and capfd.readouterr().err == ""
        one.error = "stuck"
        watch._end_if_stuck()
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "[rank 1] stuck; the job is ended" and "the last 1 verbs of this rank are in" in said[1]
    assert watched.ended == [1]


def test_a_failure_half_way_through_ends_the_job(watched, call, capfd):
    watch.end_for(call, "ValueError: e")
    assert watched.ended == []
    watched.channels = [Line()]
    watch.end_for(call, "ValueError: e")
    words = "[rank 1] bcast at x.py:3 ended with ValueError: e; the others wait in it, so the job is ended\n"
    assert watched.ended == [1] and capfd.readouterr().err == words


def test_the_record_is_written_once_where_there_is_one(watched, tmp_path, capfd):
    watched.channels = lines = [Line(), Line((0, 1))]
    watch.say_record()
    assert capfd.readouterr().err == "" and watched.is_ending
    watched.is_ending = False
    with waits_in(call_log.process):
        pass
    for _ in range(2):
        watch.tell_that_this_rank_fails()
    assert [line.told for line in lines] == [[("all", {"what": "failing"})] * 2] * 2
    (path,) = tmp_path.iterdir()
    assert capfd.readouterr().err == f"[rank 1] the last 1 verbs of this rank are in {path}\n"
    assert path.name.startswith(f"dbrdist-verbs-rank1-{os.getpid()}-") and "recv" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_newest_four_records_of_a_rank_stay_and_no_file_is_left_open(watched, tmp_path, monkeypatch):
    folder = tmp_path / "[odd]*"
    folder.mkdir()
    monkeypatch.setattr(watch.tempfile, "gettempdir", lambda: str(folder))
    for number in range(6):
        path = folder / f"dbrdist-verbs-rank1-{number}-x.txt"
        path.write_text(str(number))
        os.utime(path, (1000 - number, 1000 - number))
    kept = ["dbrdist-verbs-rank12-1-x.txt", "dbrdist-verbs-rank1-1.log", "dbrdist-verbs-rank1-7-dir.txt"]
    for name in kept[:2]:
        (folder / name).touch()
    (folder / kept[2]).mkdir()
    with waits_in(call_log.process):
        pass
    before = open_files()
    watch.say_record()
    assert not open_files() - before
    left = sorted(path.name for path in folder.iterdir() if path.name not in kept)
    older = [name for name in left if name.endswith("-x.txt")]
    assert older == [f"dbrdist-verbs-rank1-{number}-x.txt" for number in range(3)] and len(left) == 4
    assert all((folder / name).exists() for name in kept)


def test_a_record_is_not_written_where_a_link_of_somebody_else_leads(watched, tmp_path, monkeypatch):
    """Its name cannot be foretold, and it is a new file."""
    victim = tmp_path.parent / "victim"
    victim.write_text("precious")
    with waits_in(call_log.process):
        pass
    names = iter(["a", "b"])
    monkeypatch.setattr(watch.tempfile, "_get_candidate_names", lambda: names)
    for middle in ("", "a"):
        link = tmp_path / f"dbrdist-verbs-rank1-{os.getpid()}{middle and '-' + middle}.txt"
        link.symlink_to(victim)
    watch.say_record()
    assert victim.read_text() == "precious"
    assert "recv" in (tmp_path / f"dbrdist-verbs-rank1-{os.getpid()}-b.txt").read_text()


def test_the_listener_hears_says_and_pronounces(watched, clock, monkeypatch):
    """Three turns: in the first one it hears, in the second it was told to end too long ago, in the third MPI ends."""
    own, line = call_log.process, Line()
    judge = FakeJudge(("stuck", {2: {5}}), line)
    watched.channels, watched.judges = [line], {0: judge}
    line.heard = [{"what": "state", **WaitState(2, False).encode()}]
    turns, stuck = [], []

    def wait(seconds):
        assert seconds == watch._LOOK_SECONDS
        turns.append(len(line.told))
        if len(turns) == 2:
            watched.told_at = clock.now
            clock.now += watch._GRACE_SECONDS
        elif len(turns) == 3:
            clock.now += 2.0**-10
        elif len(turns) == 4:
            monkeypatch.setattr(mpi, "started", lambda: None)
        return False

    monkeypatch.setattr(watch, "_end_if_stuck", lambda: stuck.append(len(turns)))
    monkeypatch.setattr(watched, "stop", SimpleNamespace(wait=wait))
    with waits_in(own, since=clock.now - 5.0):
        watch._listen()
    assert judge.heard == [(2, False)] and len(turns) == 4 and stuck == [3]
    assert turns == [0, 2, 3, 4] and [words["what"] for _, words in line.told] == ["state", "end", "end", "end"]
    stopped = SimpleNamespace(wait=lambda seconds: True)
    monkeypatch.setattr(watched, "stop", stopped)
    watch._listen()


def test_the_listener_does_not_wait_for_itself(watched):
    watched.listener = threading.current_thread()
    watch._stop_listening()
    assert watched.stop.is_set()


def test_the_listener_is_asked_to_end_before_it_is_waited_for(monkeypatch):
    state = watch._Watch()
    state.listener = threading.Thread(target=state.stop.wait, daemon=True)
    state.listener.start()
    monkeypatch.setattr(watch, "_watch", state)
    watch._stop_listening()
    assert not state.listener.is_alive()


def test_a_rank_that_is_asked_answers_with_the_counts_that_are_named(monkeypatch):
    told, asked = [], []
    monkeypatch.setattr(watch, "_state", lambda keys: asked.append(keys) or SimpleNamespace(encode=lambda: {"rank": 3}))
    channel = SimpleNamespace(judge=0, tell=lambda rank, words: told.append((rank, words)))
    watch._obey({"what": "ask", "keys": [["c", "send", 1, 4]]}, channel, None)
    watch._obey({"what": "ask"}, channel, None)
    assert asked == [[["c", "send", 1, 4]], ()] and told == [(0, {"what": "answer", "rank": 3})] * 2
