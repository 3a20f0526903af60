"""What the launcher makes of the ranks' output: the screen, the live view, copies and logs."""

import errno
import os
import random
import re
import shutil
import threading
from types import SimpleNamespace

import pytest
from dbrdist_launch import limits
from dbrdist_launch.launcher.streams import output as outputs
from dbrdist_launch.launcher.streams.logs import Logs
from dbrdist_launch.launcher.streams.output import Output, OutputWriter, Piece, Screen
from dbrdist_launch.launcher.streams.pieces import Echo

# --- the screen


def shown(screen, *pieces):
    """What a screen makes of (rank, bytes) pieces, with one front for each rank."""
    text = b"".join(screen.feed((rank, "out"), b"[%d] " % rank, data) for rank, data in pieces)
    return text + screen.end()


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([(0, b"a\nb\n")], b"[0] a\n[0] b\n"),
        ([(0, b"a"), (1, b"x\n"), (0, b"b\n")], b"[1] x\n[0] ab\n"),
        ([(0, b"1%\r2%\r3%\n")], b"[0] 1%\r[0] 2%\r[0] 3%\n"),
        ([(0, b"a\r\nb\r"), (0, b"\nc\n")], b"[0] a\r\n[0] b\r\n[0] c\n"),
        ([(0, b"50%\rx"), (1, b"y\n")], b"[0] 50%\r\n[1] y\n[0] x\n"),
        ([(0, b"no end")], b"[0] no end\n"),
        ([(0, b"\n\n"), (1, b"\n")], b"[0] \n[0] \n[1] \n"),
        ([(0, b"\xff\x00\xfe\n")], b"[0] \xff\x00\xfe\n"),
    ],
)
def test_each_line_has_its_rank_in_front(pieces, text):
    assert shown(Screen(), *pieces) == text


def test_unfinished_lines_are_shown_after_a_while_and_go_on_where_they_stopped():
    screen = Screen()
    assert screen.feed((0, "out"), b"[0] ", b"prompt> ") == b""
    assert screen.flush(10.0) == b"" and screen.flush(10.0 + limits.PARTIAL_SECONDS) == b"[0] prompt> "
    assert screen.feed((0, "out"), b"[0] ", b"yes\n") == b"yes\n"
    screen.feed((0, "out"), b"[0] ", b"dots ..")
    screen.flush()
    assert screen.feed((1, "out"), b"[1] ", b"other\n") == b"\n[1] other\n"
    assert screen.feed((0, "out"), b"[0] ", b"..\n") == b"[0] ..\n"
    assert screen.note(b"said") == b"said\n"


def test_time_in_which_nobody_read_does_not_make_a_line_unfinished():
    screen = Screen()
    screen.feed((0, "out"), b"[0] ", b"begin")
    assert screen.flush(10.0) == b""
    screen.restart_wait()
    assert screen.flush(20.0) == b"" and screen.flush(20.0 + limits.PARTIAL_SECONDS) == b"[0] begin"


def test_long_lines_are_not_kept_back():
    text = Screen().feed((0, "out"), b"[0] ", b"x" * (limits.LINE_BYTES + 1))
    assert text == b"[0] " + b"x" * (limits.LINE_BYTES + 1)


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_lost_however_the_pieces_are_cut(seed):
    chance, screen, wrote, pieces = random.Random(seed), Screen(), {}, []
    for _ in range(300):
        rank = chance.randrange(3)
        data = bytes(chance.choice(b"ab\n\r\xff ") for _ in range(chance.randrange(1, 40)))
        wrote[rank] = wrote.get(rank, b"") + data
        pieces.append(screen.feed((rank, "out"), b"<%d>" % rank, data))
        if chance.random() < 0.1:
            pieces.append(screen.flush())
    text = b"".join(pieces) + screen.end()
    found = dict.fromkeys(wrote, b"")
    for part in re.findall(rb"<\d>[^<]*", text):
        found[int(part[1:2])] += part[3:]
    for rank, data in wrote.items():  # a line end of ours stands where a rank's line was interrupted
        left = iter(found[rank])
        assert all(byte in left for byte in data)
        assert len(found[rank]) - len(data) == found[rank].count(b"\n") - data.count(b"\n")


# --- the writers


def pieces_arrived(output, pieces, seconds=20.0):
    """Hand pieces over and wait until all of them have arrived."""
    arrived = threading.Semaphore(0)
    output.written = lambda piece: arrived.release()
    output.start()
    for piece in pieces:
        output.take(piece)
    assert all(arrived.acquire(timeout=seconds) for _ in pieces)
    output.stop()
    output.close()


def test_logs_hold_the_bytes_as_they_came(tmp_path, capfd):
    data = bytes(range(256)) * 10
    pieces_arrived(Output(frozenset(), str(tmp_path)), [Piece(3, "a", s, data) for s in ("out", "err", "out")])
    assert (tmp_path / "rank-3.out").read_bytes() == 2 * data
    assert (tmp_path / "rank-3.err").read_bytes() == data
    assert capfd.readouterr() == ("", "")


def test_more_logs_than_files_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "OPEN_LOGS", 3)
    pieces = [Piece(rank, "a", "out", b"%d\n" % rank) for _ in range(2) for rank in range(10)]
    pieces_arrived(Output(frozenset(), str(tmp_path)), pieces)
    assert [(tmp_path / f"rank-{rank}.out").read_text() for rank in range(10)] == [
        f"{rank}\n" * 2 for rank in range(10)
    ]


def test_a_full_disk_costs_one_warning(tmp_path, capfd):
    (tmp_path / "rank-0.out").symlink_to("/dev/full")
    output = Output(None, str(tmp_path))
    pieces_arrived(output, [Piece(0, "a", "out", b"line\n") for _ in range(5)])
    output.flush()
    out, err = capfd.readouterr()
    assert out.count("[0 a] line") == 5
    assert err.count("is incomplete: No space left on device") == 1


class Moments:
    """A clock in the place of the output's own."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(outputs.time, "monotonic", lambda: self.now)


def test_what_is_neither_shown_nor_logged_has_arrived_at_once(tmp_path):
    arrived = []
    output = Output(shown={1})
    output.written = arrived.append
    output.take(Piece(2, "a", "out", b"x\n"))
    assert [piece.rank for piece in arrived] == [2] and output.shows(1) and not output.shows(2)
    output.take(Piece(1, "a", "out", b"x\n"))
    assert len(arrived) == 1
    both = Output(folder=str(tmp_path))
    both.written = arrived.append
    piece = Piece(1, "a", "out", b"x\n")
    both.take(piece)
    assert piece.left == 2
    both._arrived([piece])
    assert len(arrived) == 1
    both._arrived([piece])
    assert arrived[1:] == [piece]


def test_streams_go_where_they_came_from_and_notes_to_the_second(capfd, monkeypatch):
    monkeypatch.setattr(outputs.time, "strftime", lambda form: {"%H:%M:%S ": "01:02:03 "}[form])
    for timestamps, front in ((False, ""), (True, "01:02:03 ")):
        output = Output(timestamps=timestamps)
        output._show(
            [Piece(0, "a", "out", b"one\n"), Piece(1, "b", "out", b"two\nthr"), Piece(0, "a", "err", b"bad\n")]
        )
        output._show(["said", Piece(1, "b", "out", b"ee\n")])
        out, err = capfd.readouterr()
        assert out == f"{front}[0 a] one\n{front}[1 b] two\n{front}[1 b] three\n"
        assert err == f"{front}[0 a] bad\nsaid\n"


def test_two_streams_to_one_place_break_no_line(capfd, monkeypatch):
    monkeypatch.setattr(outputs, "_same_place", lambda one, other: (one, other) == (1, 2))
    output = Output()
    output._show([Piece(0, "a", "out", b"begin")])
    output._on_idle(False, False, (1, 2))
    output._screens[1].flush()
    output._show(["said", Piece(0, "a", "out", b"end\n")])
    assert capfd.readouterr().err == "\nsaid\n"


def test_places_are_the_same_by_their_files(tmp_path):
    with open(tmp_path / "a", "w") as a, open(tmp_path / "a") as again, open(tmp_path / "b", "w") as b:
        assert outputs._same_place(a.fileno(), again.fileno())
        assert not outputs._same_place(a.fileno(), b.fileno())
        number = b.fileno()
    assert not outputs._same_place(number, number)


def test_unfinished_lines_wait_anew_where_the_reader_was_slow(capfd, monkeypatch):
    clock, output = Moments(monkeypatch), Output()
    output._show([Piece(0, "a", "out", b"begin")])
    output._on_idle(False, False, (1, 2))
    clock.now += limits.PARTIAL_SECONDS
    output._on_idle(True, False, (1, 2))
    assert capfd.readouterr().out == ""
    clock.now += limits.PARTIAL_SECONDS
    output._on_idle(False, False, (1, 2))
    assert capfd.readouterr().out == "[0 a] begin"
    output._on_idle(False, True, (1, 2))
    assert capfd.readouterr().out == "\n"


def test_the_view_is_drawn_below_the_output_at_a_rate_of_its_own(capfd, monkeypatch):
    clock, output = Moments(monkeypatch), Output(view=True)
    output.footer = ["one", "two"]
    output._show([Piece(0, "a", "out", b"x\n"), Piece(0, "a", "err", b"y\n")])
    assert capfd.readouterr().out == "[0 a] x\n[0 a] y\none\ntwo\n"
    output._show([Piece(0, "a", "out", b"z\n")])
    clock.now += limits.VIEW_SECONDS - 2.0**-10
    output._on_idle(False, False, (1, 2))
    assert capfd.readouterr() == ("", "")
    clock.now = 100.0 + limits.VIEW_SECONDS
    output.footer = ["three"]
    output._on_idle(False, False, (1, 2))
    assert capfd.readouterr().out == "\x1b[2F\x1b[J[0 a] z\nthree\n"
    output._show([Piece(0, "a", "out", b"w" * ((1 << 20) - 8) + b"\n")])  # with its front a byte short of a megabyte
    assert capfd.readouterr().out == ""
    output._show([Piece(0, "a", "out", b"\n")])
    assert len(capfd.readouterr().out) == len("\x1b[1F\x1b[J") + (1 << 20) + 6 + len("three\n")
    output._show([Piece(0, "a", "out", b"last")])
    output._on_idle(False, True, (1, 2))
    assert capfd.readouterr().out == "\x1b[1F\x1b[J[0 a] last\n"
    output._on_idle(False, True, (1, 2))
    assert capfd.readouterr().out == ""


def test_what_is_typed_below_the_view_becomes_a_part_of_the_output(capfd, monkeypatch):
    """The terminal's own echo has moved the cursor by a line."""
    clock, output = Moments(monkeypatch), Output(view=True)
    output.footer = ["one", "two"]
    output._show([Piece(0, "a", "out", b"name? ")])
    capfd.readouterr()
    clock.now += limits.VIEW_SECONDS
    output._show([Echo(b"Ada\n"), Piece(0, "a", "out", b"hello\n")])
    assert capfd.readouterr().out == "\x1b[3F\x1b[J[0 a] name? Ada\n[0 a] hello\none\ntwo\n"
    clock.now += limits.VIEW_SECONDS
    output._on_idle(False, True, (1, 2))
    assert capfd.readouterr().out == "\x1b[2F\x1b[J"


@pytest.mark.parametrize(
    ("typed", "rows", "shown"),
    [
        (b"a" * 40 + b"\n", 1, "a" * 40), (b"a" * 41 + b"\n", 2, "a" * 41),
        (b"\t" + b"a" * 33 + b"\n", 2, "\t" + "a" * 33),
        ("漢".encode() * 21 + b"\n", 2, "漢" * 21), (b"\x1b[A\x7f\n", 1, "^[[A^?"), (b"\n", 1, ""),
    ],
)  # fmt: skip
def test_long_lines_and_keys_are_typed_too(capfd, monkeypatch, typed, rows, shown):
    """The view counts the rows that they took, and an arrow key does not move its cursor."""
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    clock, output = Moments(monkeypatch), Output(view=True)
    output.footer = ["one"]
    output._show([Piece(0, "a", "out", b"> ")])
    capfd.readouterr()
    clock.now += limits.VIEW_SECONDS
    output._show([Echo(typed)])
    assert capfd.readouterr().out == f"\x1b[{1 + rows}F\x1b[J[0 a] > {shown}\none\n"


def test_what_is_typed_for_a_rank_that_is_not_shown_is_erased(capfd, monkeypatch):
    clock, output = Moments(monkeypatch), Output(view=True)
    output.footer, output.shown = ["one"], [1]
    output._show([Piece(1, "a", "out", b"x\n")])
    capfd.readouterr()
    clock.now += limits.VIEW_SECONDS
    output.echo(b"y\n")
    output._show([output._screen_writers[1]._queue.get_nowait()])
    assert capfd.readouterr().out == "\x1b[2F\x1b[Jone\n"


def test_a_copy_has_what_is_left_at_the_end_too(tmp_path, capfd):
    output = Output(tee=str(tmp_path / "copy"))
    output._show([Piece(0, "a", "out", b"no end"), Piece(0, "a", "err", b"bad")])
    output._on_idle(False, True, (1, 2))
    output._tee.start()
    output._tee.stop()
    os.close(output._tee_file)
    out, err = capfd.readouterr()
    assert (out, err) == ("[0 a] no end\n", "[0 a] bad\n")
    assert sorted((tmp_path / "copy").read_text().splitlines()) == ["[0 a] bad", "[0 a] no end"]


def test_a_copy_of_the_screen_goes_into_a_file(tmp_path, capfd):
    path = tmp_path / "copy"
    path.write_text("something from before")
    output = Output(tee=str(path))
    output._show([Piece(0, "a", "out", b"x\n"), "said", Piece(0, "a", "err", b"y\n")])
    output._tee.start()
    output._tee.stop()
    assert path.read_text() == "[0 a] x\nsaid\n[0 a] y\n" and path.stat().st_mode & 0o777 & ~0o644 == 0
    os.close(output._tee_file)
    assert capfd.readouterr() == ("[0 a] x\n", "said\n[0 a] y\n")
    assert Output(tee=str(tmp_path / "nowhere" / "x"))._tee is None
    assert "cannot be written: No such file or directory" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "descriptor", "said"),
    [
        (errno.EPIPE, 1, []),
        (errno.ENOSPC, 1, [(2, b"dbrdist-launch: output is cut short here: No space left on device\n")]),
        (errno.ENOSPC, 2, []),
    ],
)
def test_a_reader_that_has_gone_is_not_written_to_again(monkeypatch, number, descriptor, said):
    wrote, tries = [], []

    def write(target, data):
        tries.append(target)
        if target == descriptor:
            raise OSError(number, os.strerror(number))
        wrote.append((target, bytes(data)))
        return len(data)

    output = Output()
    monkeypatch.setattr(outputs.os, "write", write)
    for _ in range(2):
        output._write(descriptor, b"x\n")
    monkeypatch.undo()
    assert wrote == said and tries.count(descriptor) == 1


def test_all_is_written_in_as_many_pieces_as_it_takes(monkeypatch):
    wrote, waited = [], []

    def write(target, data):
        if len(wrote) == 1 and not waited:
            raise BlockingIOError
        wrote.append(bytes(data[:3]))
        return len(wrote[-1])

    output = Output()
    monkeypatch.setattr(outputs.os, "write", write)
    monkeypatch.setattr(outputs.select, "select", lambda *arguments: waited.append(arguments))
    output._write(7, b"12345678")
    monkeypatch.undo()
    assert wrote == [b"123", b"456", b"78"] and waited == [([], [7], [], 1.0)]


def test_logs_go_on_in_the_next_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    output = Output(frozenset(), str(tmp_path / "a"))
    output.take(Piece(0, "h", "out", b"1"))
    output.next_folder(None)
    output.note("a note")
    output.take(Piece(0, "h", "out", b"2"))
    output.next_folder(str(tmp_path / "b"))
    output.take(Piece(0, "h", "out", b"3"))
    output.flush()
    output.close()
    assert [(tmp_path / name / "rank-0.out").read_bytes() for name in ("a", "b")] == [b"12", b"3"]
    assert (tmp_path / "a" / "rank-0.out").stat().st_mode & 0o777 & ~0o644 == 0
    Output().next_folder(str(tmp_path))
    Output().close()


def test_each_trouble_of_the_logs_is_said_once(tmp_path):
    said = []
    logs = Logs(str(tmp_path / "nowhere"), said.append)
    for _ in range(2):
        logs.write([Piece(0, "h", "out", b"1"), Piece(1, "h", "out", b"1")])
    assert said == [f"dbrdist-launch: output in {tmp_path / 'nowhere'} is incomplete: No such file or directory"]


def test_the_log_that_was_not_written_for_longest_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "OPEN_LOGS", 2)
    logs = Logs(str(tmp_path), None)
    for rank in (0, 1, 0, 2):
        logs.write([Piece(rank, "h", "out", b"x")])
    assert list(logs._files) == ["rank-0.out", "rank-2.out"]
    numbers = list(logs._files.values())
    logs.close()
    for number in numbers:
        with pytest.raises(OSError):
            os.fstat(number)


def writer_of(write, idle=lambda slow, last: None):
    done = []
    one = OutputWriter(write, idle, done.extend)
    return one, done


def test_a_writer_says_when_it_was_slow_and_when_it_ends(monkeypatch):
    clock, seen, wrote, slow = Moments(monkeypatch), [], [], [limits.IDLE_SECONDS]

    def write(items):
        wrote.extend(items)
        clock.now += slow[0] if items else 0.0

    one, done = writer_of(write, lambda is_slow, last: seen.append((is_slow, last)))
    pieces = [Piece(0, "a", "out", b"x"), "note", Piece(1, "a", "out", b"y")]
    for item in pieces:
        one.put(item)
    one.put(None)
    one._run()
    assert (wrote == pieces and done == [pieces[0], pieces[2]] and seen == [(True, True)]) or seen == [(False, True)]
    slow[0] = limits.IDLE_SECONDS * 1.5
    one.put("more")
    one.put(None)
    one._run()
    assert seen[1:] == [(True, True)]
    one.stop()  # of one that never started


def test_many_pieces_are_written_a_thousand_at_a_time():
    sizes = []
    one, _ = writer_of(lambda items: sizes.append(len(items)))
    for number in range(2500):
        one.put(str(number))
    one.put(None)
    one._run()
    assert sizes == [1000, 1000, 500]


def test_a_fault_in_a_writer_is_said_and_holds_nobody_up(capfd):
    def write(items):
        raise ValueError("odd")

    one, done = writer_of(write)
    piece = Piece(0, "a", "out", b"x")
    one.put(piece)
    one.start()
    one.stop()
    assert done == [piece]
    assert "internal error, output is incomplete: ValueError('odd')" in capfd.readouterr().err


def test_a_writer_is_waited_for_so_that_signals_are_heard(monkeypatch):
    one, _ = writer_of(lambda items: None)
    alive, joins = [True, True, False], []
    one._thread = SimpleNamespace(is_alive=lambda: alive.pop(0), join=joins.append)
    one.stop()
    assert joins == [1.0, 1.0] and one._thread is None and one._queue.get_nowait() is None
    one.stop()
    assert one._queue.empty()

    def interrupted(seconds):
        raise KeyboardInterrupt

    output, started = Output(), []
    output._writers[0]._thread = SimpleNamespace(is_alive=lambda: True, join=interrupted)
    output.stop()
    output._writers[0].start = lambda: started.append(1)
    output.start()
    assert output._given_up and started == []


def test_a_line_of_the_length_that_is_kept_back():
    for extra in (0, 1):
        text = Screen().feed((0, "out"), b"[0] ", b"a\n" + b"x" * ((1 << 16) + extra))
        assert text == b"[0] a\n" + (b"[0] " + b"x" * ((1 << 16) + 1) if extra else b"")


def test_each_line_begins_with_its_rank_whoever_wrote_before():
    screen, first, second = Screen(), ((0, "out"), b"[0] "), ((1, "out"), b"[1] ")
    assert screen.feed(*first, b"half") == b""
    assert screen.flush() == b"[0] half"
    assert screen.feed(*first, b" of it\nnext\n") == b" of it\n[0] next\n"
    assert screen.feed(*first, b"half") + screen.flush() == b"[0] half"
    assert screen.feed(*second, b"whole\n") == b"\n[1] whole\n"
    assert screen.feed(*first, b"10 %\r20 %\r\n") == b"[0] 10 %\r[0] 20 %\r\n"
    assert screen.feed(*first, b"30 %\r") + screen.flush() == b"[0] 30 %\r"
    assert screen.feed(*first, b"40 %\n") == b"[0] 40 %\n"
    assert screen.note(b"ours") == b"ours\n"


def test_a_line_that_goes_on_waits_anew_for_its_end():
    screen, key = Screen(), (0, "out")
    wait = limits.PARTIAL_SECONDS
    assert screen.feed(key, b"[0] ", b"a") == screen.flush(5.0) == b""
    assert screen.feed(key, b"[0] ", b"b") == screen.flush(5.0 + wait) == b""  # from here on
    assert screen.flush(5.0 + 1.5 * wait) == b""
    assert screen.flush(5.0 + 2.0 * wait) == b"[0] ab"
    assert screen.feed(key, b"[0] ", b"c") == b"" and screen.feed(key, b"[0] ", b"\n") == b"c\n"
    assert screen.flush() == b""


@pytest.mark.parametrize(
    ("text", "piece", "put"), [(b"", None, 0), (b"x", None, 1), (b"", "a piece", 1), (b"x", "y", 1)]
)
def test_a_copy_is_given_what_there_is(text, piece, put, monkeypatch):
    """A piece of which nothing is shown yet too: who wrote it is to hear that it arrived."""
    output, given = Output(), []
    output._hand_to_tee(text, piece)  # there is no copy
    monkeypatch.setattr(output, "_tee", SimpleNamespace(put=given.append))
    output._hand_to_tee(text, piece)
    assert [(item.text, item.piece) for item in given] == [(text, piece)] * put
