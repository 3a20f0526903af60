"""The line of a call, and the counts of a record."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.transport import call_log
from dbrdist.comm.transport.call_log import Call, CallLog, place_of

HERE = __file__


def call_place():
    return place_of(sys._getframe(1))


def run(code, **names):
    """Run code as ``exec`` does; its file is "code"."""
    exec(compile(code, "code", "exec"), names)
    return names


def test_the_line_of_each_call():
    code = "\n".join(
        f"found.append(place()); found.append(place())\nfor _ in '12': found.append(place())\n#{k}" for k in "ab"
    )
    found = []
    for _ in range(3):
        run(code, found=found, place=call_place, __name__="user")
    assert found == 3 * [("code", line) for line in (1, 1, 2, 2, 4, 4, 5, 5)]


def test_one_function_called_from_two_lines_of_code_that_reads_alike():
    """As two cells of a notebook."""
    found = []
    for k in range(3):
        for name in ("a", "b"):
            names = run("\n" * k + "def f(): return place()", place=call_place, __name__=name)
            found.append([names["f"]() for _ in range(2)])
    assert found == [2 * [("code", k + 1)] for k in range(3) for _ in range(2)]


@pytest.mark.parametrize("names", [{}, {"__name__": None}, {"__name__": 3}, {"__name__": "user"}])
def test_code_that_has_no_name(names):
    assert run("found = place()", place=call_place, **names)["found"] == ("code", 1)


def test_a_call_through_the_package_is_that_of_the_program_outside():
    inner = run("def update(): return place()", place=call_place, __name__="dbrdist.comm.steps.optimizer")
    outer = run("\ndef run(): return update()", update=inner["update"], __name__="dbrdist.training.trainer")
    user = run(
        "def main():\n  a = run()\n  b = run()\n  c = update()\n  return a, b, c", **{**outer, "__name__": "user"}
    )
    for _ in range(3):
        assert user["main"]() == (("code", 2), ("code", 3), ("code", 4))


def test_a_call_within_the_package_alone_is_that_of_another_room():
    """As on a thread of ours: no program outside is on its stack."""
    frames = {}
    keep = lambda name: frames.update({name: sys._getframe(1)})  # noqa: E731
    run("\n\nkeep('comm')", keep=keep, __name__="dbrdist.comm.protocol.gate")
    assert place_of(frames["comm"]) == (HERE, place_of(frames["comm"])[1])  # pytest is outside

    class Frame:
        def __init__(self, module, line, back):
            self.f_globals, self.f_lineno, self.f_back, self.f_lasti = {"__name__": module}, line, back, 0
            self.f_code = compile("0", module, "exec")

    top = Frame("dbrdist.training.trainer", 7, None)
    assert place_of(Frame("dbrdist.comm.protocol.gate", 9, Frame("dbrdist.core.model.link", 8, top))) == (
        "dbrdist.core.model.link",
        8,
    )
    assert place_of(Frame("dbrdist.comm.protocol.gate", 9, None)) == ("an unknown place", 0)
    assert place_of(None) == ("an unknown place", 0)  # a thread that does but this
    # what starts a command is no program of somebody's, nor is the script before it
    command = Frame("dbrdist.cli.train", 7, Frame("dbrdist_launch.entry", 53, Frame("__main__", 8, None)))
    assert place_of(Frame("dbrdist.comm.protocol.gate", 9, command)) == ("dbrdist.cli.train", 7)
    assert place_of(Frame("dbrdist.comm.protocol.gate", 9, Frame("mine", 5, command))) == ("mine", 5)


def test_counts_of_several_things_in_any_order():
    record, expected = CallLog(), {}
    for key in [("a",), ("a",), ("b",), ("a",), ("b",), ("b",), ("a", "send", 1, 2), ("a",), ("a",)]:
        expected[key] = expected.get(key, 0) + 1
        assert record.count(*key) == expected[key]
    assert record.counts() == expected
    record.forget("a")
    assert record.counts() == {("b",): 3}
    assert record.count("a") == 1
    assert record.count("a") == 2
    record.forget("a")
    assert record.count("a") == 1


def test_no_count_is_forgotten_while_its_communicator_lives():
    record = CallLog()
    record.count("first")
    for k in range(10_000):
        record.count("second", k)
    assert record.counted("first") == record.counted("second", 0) == 1 and len(record.counts()) == 10_001


@pytest.mark.slow
def test_messages_with_many_tags_leave_collectives_in_order():
    """A tag for each message, as programs with a task number have it; the third rank takes no part in them."""

    def program(comm):
        comm.barrier()
        for tag in range(4200):
            if comm.rank == 0:
                comm.send(np.full(1, tag), 1, tag)
            elif comm.rank == 1:
                assert comm.recv(0, tag)[0] == tag
        comm.barrier()
        return comm.allgather_obj(comm.rank)

    assert run_threads(3, program) == [[0, 1, 2]] * 3


def test_a_verb_that_is_entered_again_is_listed_once_and_knows_who_called_it():
    record = CallLog()
    outer, inner = Call(record, "bcast_data", "c", (0,)), Call(record, "bcast", "c", (0,))
    with outer, inner:
        assert record.running == {inner.thread: inner}
        assert inner.name() == "bcast in bcast_data"
    assert inner.seconds >= 0
    with inner:
        assert inner.outer is None
        assert inner.seconds < 0
        assert "not over" in inner.line()
    assert record.running == {}
    assert list(record.last) == [outer, inner]


def test_lines_of_the_record():
    own = call_log.CallLog()
    with call_log.Call(own, "bcast_data", "world", (0, 1), ("x.py", 3)) as outer:
        with call_log.Call(own, "bcast", "world", (0, 1), ("x.py", 0)) as call:
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
        one = call_log.Call(own, verb, "world", (0, 1), ("x.py", 3))
        one.is_collective, one.partner, one.tag = False, 1, 5
        assert one.is_send is is_send and f"{verb} {way} 1 tag 5 at" in one.line()
    assert own.text().splitlines() == [outer.line(), call.line()]
    before = own.num_entered
    with outer:  # entered again: no second line
        pass
    assert len(own.last) == 2 and own.num_entered == before + 1


def test_a_record_is_written_where_there_is_something_to_write(tmp_path):
    own = call_log.CallLog()
    assert not own.dump(str(tmp_path / "a")) and not (tmp_path / "a").exists()
    with call_log.Call(own, "bcast", "world", (0,), ("x.py", 3)):
        pass
    assert own.dump(str(tmp_path / "a")) and not own.dump(str(tmp_path / "nowhere" / "a"))
    head, line = (tmp_path / "a").read_text().splitlines()
    assert head.startswith(f"# rank {own.rank}, process ") and head.endswith(": its last 1 verbs") and "bcast" in line


def test_verbs_are_made_without_a_look_at_their_arguments():
    """Constructors that explain their errors cost a microsecond, which each step and each message would pay."""
    import dbrdist.comm.gradients.compression  # noqa: F401 - whose constructors do

    assert not hasattr(call_log.Call.__init__, "__wrapped__")
