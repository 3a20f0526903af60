"""What lies just within and just outside of the conditions in which the communicators' own parts choose and speak."""

from __future__ import annotations

import builtins
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import Variable, comm, optimizers
from dbrdist.comm import (
    abort,
    arguments,
    audit,
    carried,
    cores,
    deadlock,
    environment,
    evaluator,
    exit_status,
    message,
    overlap,
    record,
    trace,
    verdict,
    virtual,
)
from dbrdist.comm.codec import Codec, Narrowed, Scaled, codec_for
from dbrdist.core import checks
from dbrdist.core.backend import as_dtype
from dbrdist.datasets.serial import SerialIterator
from dbrdist.errors import CommunicatorError, ConfigError
from dbrdist.links import Linear
from tests.each import each

# ---- arguments and messages -----------------------------------------------------------------------------------------


def test_tags_and_ranks_at_their_bounds():
    for number in (0, arguments.MAX_TAG, np.int64(3)):
        assert arguments.tag(number, "send") == number
    for number in (-1, arguments.MAX_TAG + 1):
        with pytest.raises(ValueError, match=f"send expected a tag from 0 to 32767, got {number}"):
            arguments.tag(number, "send")


def test_arrays_that_travel():
    for x in (
        np.float32(3),
        np.zeros((1,) * message.MAX_NDIM),
        np.zeros(2, as_dtype("bfloat16")),
        np.zeros((), complex),
    ):
        y = message.as_array(x, "send")
        assert isinstance(y, np.ndarray) and y.shape == x.shape and y.dtype == x.dtype
    with pytest.raises(ValueError, match="send expected at most 32 dimensions, got 33"):
        message.as_array(np.lib.stride_tricks.as_strided(np.zeros(1), (1,) * 33, (0,) * 33), "send")
    for x in ([1], None, Variable(np.ones(1))):
        with pytest.raises(TypeError, match=r"send expected an array, got .*; use send_obj for objects"):
            message.as_array(x, "send")
    for dtype in (object, "V3", [("a", "f4")]):
        with pytest.raises(
            TypeError, match=r"send expected an array of numbers, got dtype .*; use send_obj for objects"
        ):
            message.as_array(np.zeros(2, dtype), "send")


A = np.arange(24.0).reshape(2, 3, 4)


@each(
    x=[
        A, A.T, A[:, :, ::2], A[::-1], A[:, ::-1], A.transpose(1, 0, 2), A[:1], A[:, :0], A[0, 0, 0], A.astype(">f8"),
        np.broadcast_to(A[0], (2, 3, 4)), np.lib.stride_tricks.as_strided(A, (3, 3), (8, 8)), np.asfortranarray(A),
        np.lib.stride_tricks.as_strided(A, (2, 3), (8, 16)), A[:, 1:2], np.zeros((0, 3)).T,
    ]
)  # fmt: skip
def test_elements_in_the_order_in_which_they_lie(x):
    flat, axes = message.dense(np.asarray(x))
    assert flat.ndim == 1 and flat.flags.c_contiguous and flat.dtype.isnative and sorted(axes) == list(range(x.ndim))
    lengths = [x.shape[axis] for axis in axes]
    np.testing.assert_array_equal(flat.reshape(lengths).transpose(np.argsort(axes)) if axes else flat.reshape(()), x)


@each(divisor=[1, 2, 3, 0.5, 8, 10], dtype=["float16", "float32", "float64", "bfloat16", "complex64"])
def test_division_in_place(divisor, dtype):
    x = np.arange(5).astype(as_dtype(dtype))
    expected = (np.arange(5) / divisor).astype(as_dtype(dtype))
    message.divide(x, divisor)
    np.testing.assert_array_equal(x, expected)
    message.divide(x, None)
    np.testing.assert_array_equal(x, expected)


# ---- what ranks say -------------------------------------------------------------------------------------------------


def words(verb="bcast", number=1, root=0, config="a 1, b 2", detail="d", where="x.py:1", kind="", text=""):
    return verdict.Words(verb, number, root, config, "the same shape", detail, where, kind, text)


def made(*everyone):
    return verdict.judge(everyone)


@each(**{"dtype, kind": [(None, Codec), ("f2", Scaled), ("bfloat16", Narrowed), ("f4", Narrowed), ("f8", Narrowed)]})
def test_types_of_few_orders_of_magnitude_are_scaled(dtype, kind):
    assert type(codec_for(dtype and as_dtype(dtype))) is kind


@each(**{"codec, dtype": [(Codec(), "f4"), (Narrowed(as_dtype("f8")), "f8"), (Scaled(as_dtype("f2")), "f2")]})
def test_what_is_added_up_is_what_travels(codec, dtype):
    """The array itself, in place, where it has the type in which it travels."""
    codec._scale = 4.0
    for own in ("f4", dtype):
        x = np.array([1.0, 2.5, -3.0], own)
        seen = []

        def add(travelling, x=x, seen=seen):
            seen.append((travelling is x, travelling.dtype, travelling[1]))
            travelling *= 2

        codec.carry(x, add)
        assert seen == [(own == dtype, dtype, 2.5 if own == dtype else 4 * 2.5)]
        assert x.tolist() == [2.0, 5.0, -6.0] and x.dtype == own


SCALES = [
    (0.0, 2.0, 0), (np.inf, 2.0, 0), (np.nan, 2.0, 0), (1.0, 1.0, 14), (1.0, 0.5, 14), (1.0, 4.0, 12), (3.0, 1.0, 13),
    (70000.0, 1.0, -2), (1e-40, 1.0, 120),
]  # fmt: skip


@each(**{"largest, growth, power": SCALES})
def test_the_scale_that_ranks_agree_on(largest, growth, power):
    """The largest result lands between a quarter and half of the largest number of float16, 65504; zeros need none."""
    codec = Scaled(as_dtype("f2"))
    codec._scale = 8.0  # of the step before
    call = SimpleNamespace(agree=lambda word: np.array([word, np.zeros_like(word)]))
    grads = [np.array([largest, -largest / 2]), np.empty(0), np.array([-largest])]
    codec.prepare(call, grads, growth)
    assert codec._scale == 2.0**power


def test_words_travel_as_they_are():
    assert verdict.Words.decode(words(detail="ä\n").encode()) == words(detail="ä\n")


def test_what_ranks_disagree_on():
    w = words
    place = "(called at x.py:1)"
    both = "(called at x.py:1 on rank 0; y.py:2 on rank 1)"
    for everyone, text in (
        ((w(), w("send", where="y.py:2")),
         "the ranks are in different verbs: bcast on rank 0 (at x.py:1); send on rank 1 (at y.py:2)"),
        ((w("send"), w(kind="ValueError", text="e")),
         "the ranks are in different verbs: send on rank 0 (at x.py:1); bcast on rank 1 (at x.py:1); and e"),
        ((w(), w(root=1), w()),
         f"bcast expected the same root on every rank, got root 0 on ranks 0, 2; root 1 on rank 1 {place}"),
        ((w(), w(config="a 1, b 3")),
         f"bcast expected the same configuration on every rank, got b 2 on rank 0; b 3 on rank 1 {place}"),
        ((w(), w(detail="e", where="y.py:2")),
         f"bcast expected the same shape on every rank, got d on rank 0; e on rank 1 {both}"),
        ((w("agree"), w("agree", detail="e")),
         f"expected the same shape on every rank, got d on rank 0; e on rank 1 {place}"),
        ((w(), w(number=2)), "the ranks have lost count of their verbs in bcast: [1, 2]"),
        ((w(detail="a\nb\n"), w(detail="a\nc\n"), w(detail="a\n"), w(detail="a\nb\nd")),
         "expected the same shape on every rank, but these differ from rank 0: rank 1: c instead of b; rank 2: no b; "
         f"rank 3: d besides {place}"),
    ):  # fmt: skip
        error = made(*everyone)
        assert type(error) is CommunicatorError and str(error) == text


def test_errors_of_ranks_keep_their_class_where_all_can_make_it():
    for error, kind in (
        (None, ""), (ValueError("x"), "ValueError"), (ConfigError("x"), "ConfigError"),
        (checks.expected("f", "x", "a", "b"), "ValueError"), (type("Own", (ValueError,), {})("x"), "CommunicatorError"),
        (type("ValueError", (Exception,), {})("x"), "CommunicatorError"),
    ):  # fmt: skip
        assert verdict.kind_of(error) == kind
    everyone = [words(), words(kind="ValueError", text="e", where="y.py:2"), words(kind="KeyError", text="f")]
    error = made(*everyone)
    assert type(error) is ValueError and str(error) == "e (on ranks 1, 2 of 3, called at y.py:2)"
    assert str(made(everyone[1], everyone[1])) == "e"
    odd = made(words(kind="UnicodeDecodeError", text="e"), words(kind="UnicodeDecodeError", text="e"))
    assert type(odd) is CommunicatorError and str(odd) == "UnicodeDecodeError: e"
    assert hasattr(builtins, "KeyError") and type(made(everyone[2])) is KeyError


@each(n=[1, 2, 8, 9, 20])
def test_long_lists_are_cut(n):
    text = verdict.name_ranks(range(n))
    shown = ", ".join(map(str, range(min(n, 8))))
    assert text == ("rank 0" if n == 1 else f"ranks {shown}" + (f" and {n - 8} more" if n > 8 else ""))
    listed = verdict._listed([str(i) for i in range(n)])
    assert listed == shown.replace(", ", "; ") + (f"; and {n - 8} more" if n > 8 else "")
    assert audit._listed(list(range(n))) == ", ".join(map(str, range(min(n, 5)))) + (
        f" and {n - 5} more" if n > 5 else ""
    )


# ---- the record of verbs --------------------------------------------------------------------------------------------


def test_lines_of_the_record():
    own = record.Record()
    with record.Call(own, "bcast_data", "world", (0, 1), ("x.py", 3)) as outer:
        with record.Call(own, "bcast", "world", (0, 1), ("x.py", 0)) as call:
            call.root, call.num_bytes, call.kind, call.number = 0, 12, np.dtype("f4"), 7
            line = call.line()
            assert line.startswith("world #7 bcast in bcast_data root 0 12 bytes float32 at x.py for ")
            assert line.endswith(" s, not over")
        assert own.running == {outer.thread: outer}
    assert own.running == {} and call.seconds >= 0 and call.line().endswith(f"at x.py {call.seconds:.6f} s")
    call.seconds = 0.0
    assert call.line().endswith(" 0.000000 s")
    assert outer.line().startswith("world #0 bcast_data at x.py:3 ")
    for verb, is_send, way in (("send", True, "to"), ("recv", False, "from")):
        one = record.Call(own, verb, "world", (0, 1), ("x.py", 3))
        one.is_collective, one.partner, one.tag = False, 1, 5
        assert one.is_send is is_send and f"{verb} {way} 1 tag 5 at" in one.line()
    assert own.text().splitlines() == [outer.line(), call.line()]
    before = own.num_entered
    with outer:  # entered again: no second line
        pass
    assert len(own.last) == 2 and own.num_entered == before + 1


def test_a_record_is_written_where_there_is_something_to_write(tmp_path):
    own = record.Record()
    assert not own.dump(str(tmp_path / "a")) and not (tmp_path / "a").exists()
    with record.Call(own, "bcast", "world", (0,), ("x.py", 3)):
        pass
    assert own.dump(str(tmp_path / "a")) and not own.dump(str(tmp_path / "nowhere" / "a"))
    head, line = (tmp_path / "a").read_text().splitlines()
    assert head.startswith(f"# rank {own.rank}, process ") and head.endswith(": its last 1 verbs") and "bcast" in line


# ---- who waits for whom ---------------------------------------------------------------------------------------------


def wait(kind="row", number=1, members=(0, 1), tag=0, name="w", **more):
    return deadlock.Wait(1, "world", name, number, kind, list(members), tag, "x.py:1", 3.0, **more)


def state(rank, *waits, counts=None, **more):
    return deadlock.State(rank, False, waits=list(waits), counts=counts or {}, **more)


def test_ranks_that_wait_for_each_other():
    row, mail = ("world",), ("world", "send", 0, 0)
    both = {0: state(0, wait("recv", members=[1])), 1: state(1, wait("recv", members=[0]))}
    assert deadlock.stuck(both) == {0: {1}, 1: {0}}
    assert deadlock.stuck({**both, 1: state(1, wait("recv", members=[0]), counts={mail: 1})}) == {}
    assert deadlock.stuck({**both, 1: deadlock.State(1, True, waits=[wait("recv", members=[0])])}) == {}
    assert deadlock.stuck({0: both[0], 1: state(1)}) == {}
    assert deadlock.stuck({0: both[0]}) == {}
    left = {0: both[0], 1: state(1, has_left=True)}
    assert deadlock.stuck(left) == {0: {1}}
    assert deadlock.describe(left, deadlock.stuck(left)) == (
        "rank 1 has left, but rank 0 has waited 3 s for rank 1 in w with tag 0 (x.py:1)"
    )
    for theirs, is_missing in ((0, True), (1, False), (2, False)):
        states = {0: state(0, wait(number=1), counts={row: 1}), 1: state(1, counts={row: theirs})}
        assert deadlock._is_missing(states, 0, wait(number=1), 1) == is_missing
    for kind, is_missing in (("bytes", True), ("row", False), ("recv", False)):
        states = {0: state(0), 1: state(1, wait(kind, 1), counts={row: 1})}
        assert deadlock._is_missing(states, 0, wait("row", 1), 1) == is_missing
    for n, is_missing in ((deadlock.MAX_COUNTS - 1, True), (deadlock.MAX_COUNTS, False)):
        states = {1: state(1, counts={("other", i): 1 for i in range(n)})}
        assert deadlock._is_missing(states, 0, wait("send", 1), 1) == is_missing


def test_a_core_grows_by_those_that_wait_for_it():
    states = {
        0: state(0, wait("recv", members=[1])), 1: state(1, wait("recv", members=[0])),
        2: state(2, wait("send", members=[1], tag=4)), 3: state(3),
    }  # fmt: skip
    core = deadlock.stuck({rank: states[rank] for rank in (0, 1)})
    assert deadlock.grow(states, core) == {0: {1}, 1: {0}, 2: {1}}
    assert deadlock.State.decode(states[2].encode()) == states[2] and states[2].wait_ids() == {1}


@each(n=[1, 8, 9])
def test_verdicts_name_some_ranks(n):
    states = {rank: state(rank, wait(members=range(n + 1))) for rank in range(n + 1)}
    text = deadlock.describe(states, {rank: {n} for rank in range(n)})
    assert text.startswith("the ranks wait for each other, and none can continue: rank 0 has waited 3 s for rank ")
    assert text.count("has waited") == min(n, 8) and text.endswith("; and 1 more") == (" more" in text) == (n == 9)
    states[n].has_left = states[0].has_left = True
    text = deadlock.describe(states, {1: {0, n}} if n > 1 else {0: {1}})
    assert text.startswith("ranks 0, " if n > 1 else "rank 1 has left, but rank 0") and (" have left" in text) == (
        n > 1
    )


# ---- buckets, traces, states ----------------------------------------------------------------------------------------


class Stretch:
    """A run of parameters of given sizes, one behind the other, of float32."""

    def __init__(self, *sizes):
        self.size = sum(sizes)
        self.data = np.zeros(self.size, "f")
        ends = np.cumsum([0, *sizes])
        self._layers = [(k, slice(int(a), int(b))) for k, (a, b) in enumerate(itertools.pairwise(ends))]

    def layers(self):
        return self._layers


@each(size=[0, 1, 64, 65, 128, 129, 511, 512, 513, 2000], num_bytes=[1, 256, 512, 2048, 10**6])
def test_buckets_cover_a_run_once(size, num_bytes):
    buckets = overlap.cut([Stretch(size), Stretch(7)], num_bytes)
    step = max(num_bytes // 4 // 64, 1) * 64
    of_first = [b for b in buckets if b.run_number == 0]
    assert [b.run_number for b in buckets] == [1] + [0] * len(of_first)
    ends = [(b.begin, b.end) for b in reversed(of_first)]
    assert [i for begin, end in ends for i in range(begin, end)] == list(range(size))
    assert all(begin % 64 == 0 and 0 < end - begin <= step for begin, end in ends)
    if size > step:  # the one that travels last is an eighth
        assert ends[0] == (0, max(step // 8 // 64, 1) * 64)
    elif size:
        assert ends == [(0, size)]


def test_a_bucket_has_the_parameters_that_touch_it():
    run = Stretch(64, 64, 128)
    assert overlap.Bucket(0, run, 64, 128).params == [1] and overlap.Bucket(0, run, 0, 64).params == [0]
    assert overlap.Bucket(0, run, 63, 65).params == [0, 1] and overlap.Bucket(0, run, 100, 256).params == [1, 2]


def test_clocks_of_ranks_drift_evenly():
    clock = trace.Clock((10.0, 1.0), (20.0, 3.0))
    assert [clock(t) for t in (10.0, 15.0, 20.0, 25.0)] == [11.0, 17.0, 23.0, 29.0]
    assert trace.Clock((10.0, 1.0), (10.0, 3.0))(12.0) == 13.0


@each(late=[0.0, 0.25])
def test_a_summary_blames_where_somebody_was_late(late):
    lines = trace.Summary(4, 2.0, 1.0, 0.5, 0.25, late, 1, 0.75, "forward").lines()
    assert lines[0] == "trace: 4 steps of 2000.00 ms" and lines[1] == "  compute: 1000.00 ms, 50%"
    assert lines[4] == f"  waiting for a late rank: {250 if late else 0:.2f} ms, {12 if late else 0}%"
    said = "  the others waited for rank 1 in 75% of that time; it took longer than they did in: forward"
    assert lines[5:] == [said] * (late > 0)
    assert len(trace.Summary(4, 2.0, 1.0, 0.5, 0.25, late, None, 0.0, "").lines()) == 5


def test_states_are_set_where_they_are():
    link = Linear(2, 1)
    optimizers.Adam().setup(link)
    carried._set_state(None, "m", np.ones(2))
    carried._set_state(link.W, "m", np.ones((1, 2)))  # no state yet
    for p in link.params():
        p.grad = np.ones_like(p.array)
    link.W.update_rule.update(link.W)
    state = link.W.update_rule.state
    carried._set_state(link.W, "m", np.full((1, 2), 5.0, "f"))
    carried._set_state(link.W, "nothing", np.ones(2))
    assert state["m"].tolist() == [[5, 5]] and "nothing" not in state
    state["count"] = 3
    carried._set_state(link.W, "count", np.array(7.0))
    assert state["count"] == 7 and type(state["count"]) is int


# ---- ends, surroundings, settings -----------------------------------------------------------------------------------


@each(
    case=[
        (None, (0, "")), (0, (0, "")), (3, (3, "")), (256, (1, "")), (259, (3, "")), (-1, (255, "")), (True, (1, "")),
        ("words", (1, "words")), (2.5, (1, "2.5")),
    ]
)  # fmt: skip
def test_what_the_interpreter_makes_of_an_exit(case):
    assert abort._status(case[0]) == case[1]


@each(status=[None, 3, "words", (), (4,), SystemExit(5), 0])
def test_exits_as_those_of_python(status):
    with pytest.raises(SystemExit) as caught:
        exit_status._exit(status)
    expected = {None: (), (): (), (4,): (4,)}.get(status, (status,)) if not isinstance(status, SystemExit) else (5,)
    assert caught.value.args == expected
    assert not isinstance(status, SystemExit) or caught.value is status


def test_what_launchers_leave_in_the_environment():
    for environ, found in (
        ({}, (1, 0, "")), ({"PMI_SIZE": "3", "PMI_RANK": "2"}, (3, 2, "PMI_SIZE")),
        ({"PMI_SIZE": "3"}, (3, 0, "PMI_SIZE")),
        ({"PMI_SIZE": "3", "PMI_RANK": "x"}, (3, 0, "PMI_SIZE")), ({"PMI_SIZE": "x"}, (1, 0, "")),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, (1, 0, "")),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, (4, 1, "SLURM_NTASKS")),
    ):  # fmt: skip
        assert environment.launched(environ) == found and environment.is_launched(environ) == bool(found[2])
    assert environment.num_local_ranks({}) == 1 == environment.num_local_ranks({"MPI_LOCALNRANKS": "x"})
    assert environment.num_local_ranks({"MPI_LOCALNRANKS": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == 4
    assert environment.prefix(3, {}) == "[rank 3] " and environment.prefix(3, {"DBRDIST_LAUNCH": "1"}) == ""


@each(**{"world_size, started, is_refused": [(1, 2, True), (1, 3, True), (1, 1, False), (2, 2, False), (2, 3, False)]})
def test_a_world_of_one_is_refused_where_more_ranks_were_started(world_size, started, is_refused):
    text = environment.refusal(world_size, {"PMI_SIZE": str(started), "PMI_RANK": "0"})
    assert text.startswith(f"PMI_SIZE={started} says that {started} ranks were started") if is_refused else text == ""
    assert environment.refusal(world_size, {}) == ""


@pytest.mark.parametrize(("usable", "quota"), [(4, None), (3, 3), (5, None)])
def test_a_seat_has_a_quota_where_a_control_group_grants_less_than_its_cores(monkeypatch, usable, quota):
    monkeypatch.setattr(cores.thread_pools, "affinity", lambda: frozenset(range(4)))
    monkeypatch.setattr(cores, "available_cores", lambda: usable)
    assert cores.seat_on(2)[:3] == (2, frozenset(range(4)), quota)


@pytest.mark.parametrize(
    ("num_ranks", "rank", "usable", "share", "is_said"),
    [(1, 0, 4, None, False), (1, 0, 3, 3, True), (2, 0, 4, 2, True), (2, 1, 4, 2, False), (4, 0, 4, 1, True)],
)
def test_threads_are_limited_and_rank_0_says_so(monkeypatch, capsys, num_ranks, rank, usable, share, is_said):
    """Alone with all cores nothing is limited; where the user has set a number, nothing is, and nothing is said."""
    limited, waits = [], []
    monkeypatch.setattr(cores.thread_pools, "affinity", lambda: frozenset(range(4)))
    monkeypatch.setattr(cores.thread_pools, "wait_briefly", lambda: waits.append(1))
    monkeypatch.setattr(cores, "available_cores", lambda: usable)
    monkeypatch.setattr(cores.environment, "num_local_ranks", lambda: 1)
    of_all = SimpleNamespace(rank=rank, inter_rank=0, allgather_obj=lambda seat: [seat] * num_ranks)
    for can_be_limited in (True, False):
        monkeypatch.setattr(cores.thread_pools, "limit", lambda n, done=can_be_limited: limited.append(n) or done)
        cores.share_out(of_all)
        assert capsys.readouterr().err.startswith("dbrdist: threads: ") == (is_said and can_be_limited)
    assert limited == ([] if share is None else [share] * 2) and len(waits) == 2 * (share != 1)


def test_what_an_evaluation_hands_on_lies_on_the_host():
    a = np.ones(2)
    found = evaluator._on_host({"a": Variable(a), "b": [Variable(a), (a, 3)], "c": "text"})
    assert found["a"] is a and found["b"][0] is a and found["b"][1] == (a, 3) and found["c"] == "text"
    assert type(found["b"]) is list and type(found["b"][1]) is tuple
    named = trace.Clock((0.0, 0.0), (1.0, 1.0))
    assert evaluator._on_host(named) is named


def test_settings_of_a_communicator_are_single_values_of_known_names():
    own = comm.create_communicator("single")
    with pytest.raises(TypeError, match=r"set_config\('allreduce_grad_dtype'\) expected one value, got also other"):
        own.set_config("allreduce_grad_dtype", None, other=1)
    with pytest.raises(ValueError, match="allreduce_grad_dtype expected a float type, got int32"):
        own.set_config("allreduce_grad_dtype", "int32")
    own.set_config("allreduce_grad_dtype", "float16")
    assert own.get_config("allreduce_grad_dtype") == np.float16 == own.get_config()["allreduce_grad_dtype"]
    own.set_config("allreduce_grad_dtype", None)
    assert own.get_config("allreduce_grad_dtype") is None


class Alone:
    rank, size = 0, 1


def test_what_virtual_workers_cannot_train_with():
    link, data = Linear(2, 1), list(range(8))
    workers = SerialIterator(data, 4, virtual_workers=2, rank=0, size=1)
    optimizer = optimizers.SGD().setup(link)
    virtual._check({"main": workers}, {"main": optimizer}, Alone)
    late = optimizers.SGD().setup(Linear(None, 1))
    for iterators, optimizers_, words in (
        ({"main": workers, "x": workers}, {"main": optimizer}, "expected one iterator and one optimizer"),
        ({"main": workers}, {"main": optimizer, "x": optimizer}, "expected one iterator and one optimizer"),
        (
            {"main": SerialIterator(data, 4)},
            {"main": optimizer},
            "an iterator with virtual workers, got SerialIterator",
        ),
        (
            {"main": SerialIterator(data, 4, virtual_workers=2, rank=0, size=2)},
            {"main": optimizer},
            "got rank=0, size=2",
        ),
        ({"main": workers}, {"main": late}, "expected parameters with shapes, but /W waits for its first input"),
    ):
        with pytest.raises(ValueError, match=words):
            virtual._check(iterators, optimizers_, Alone)
