"""Standard files that were closed are opened again."""

import builtins
import os
import pathlib
import signal
import sys
from types import SimpleNamespace

import pytest
from dbrdist_launch import entry
from processes import in_child

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize("name", ["train", "data"])
def test_each_program_runs_its_own_module(name, monkeypatch):
    ran = []
    monkeypatch.setattr(entry, "_run", lambda program, module: ran.append((program, module)))
    getattr(entry, name)()
    assert ran == [(f"dbrdist-{name}", f"dbrdist.cli.{name}")]


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize("raises", [None, KeyboardInterrupt, ValueError])
def test_an_interrupt_is_heard_from_the_first_import_to_the_last_word(monkeypatch, is_ignored, raises):
    """And stays ignored where it was."""
    happened = []

    def main():
        happened.append("main")
        if raises is not None:
            raise raises

    def imported(module):
        happened.append(module)
        if not is_ignored:
            happened[0](signal.SIGINT, None)
        return SimpleNamespace(main=main)

    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda number, handler: happened.append(handler))
    monkeypatch.setattr(entry, "protect_streams", lambda: None)
    monkeypatch.setattr(entry, "interrupted", lambda program: happened.append(f"{program} interrupted"))
    monkeypatch.setattr(entry, "say_what_was_lost", lambda program: happened.append(f"{program} says"))
    monkeypatch.setattr(entry.importlib, "import_module", imported)
    if raises is ValueError:
        with pytest.raises(ValueError):
            entry._run("p", "m")
    else:
        entry._run("p", "m")
    caught = ["p interrupted"] * (raises is KeyboardInterrupt)
    if is_ignored:
        assert happened == ["m", "main", *caught, "p says"]
    else:
        assert happened[1:] == [
            "m", "p interrupted", signal.default_int_handler, "main", *caught, signal.SIG_IGN, "p says"
        ]  # fmt: skip


RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


@pytest.mark.parametrize(
    ("variables", "said"),
    [({}, b"p: interrupted\n"), *(({name: "0"}, b"p: interrupted\n") for name in RANKS),
     *(({name: "1"}, b"") for name in RANKS), ({"PMI_RANK": "1", "SLURM_PROCID": "0"}, b"")],
)  # fmt: skip
def test_rank_0_says_that_it_was_interrupted(monkeypatch, variables, said):
    for name in (*RANKS, "PMI_FD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    read, write = os.pipe()

    def act():
        os.dup2(write, 2)
        entry.interrupted("p")

    assert in_child(act) == 130
    os.close(write)
    assert os.read(read, 100) == said
    os.close(read)


@pytest.mark.parametrize(
    ("variables", "sent"),
    [
        ({"PMI_SIZE": "2"}, b"cmd=abort exitcode=130\n"), ({"PMI_SIZE": "1"}, b""), ({}, b""),
        ({"PMI_SIZE": "2", "DBRDIST_LAUNCH": "x"}, b""), ({"PMI_SIZE": "2", "PMI_FD": "port"}, b""),
        ({"PMI_SIZE": "2", "PMI_FD": ""}, b""),
    ],
)  # fmt: skip
def test_a_rank_that_was_interrupted_alone_has_hydra_end_the_others_later(monkeypatch, variables, sent):
    read, write = os.pipe()
    for name in ("PMI_SIZE", "DBRDIST_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PMI_FD": str(write), **variables}.items():
        monkeypatch.setenv(name, value)

    def act():
        os.close(read)
        waited = []
        entry.time = SimpleNamespace(sleep=waited.append)
        before = os.getpid()
        entry._end_others_later()
        return 7 if os.getpid() == before and waited == [] else 8

    assert in_child(act) == 7
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == sent


def test_a_stream_takes_everything_and_keeps_the_first_reason(monkeypatch):
    happened = []
    answers = [BlockingIOError(), 3, OSError(28, "No space left on device"), OSError(32, "Broken pipe"), 2]

    def write(descriptor, data):
        happened.append((descriptor, bytes(data)))
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(entry.os, "write", write)
    monkeypatch.setattr(entry.select, "select", lambda *given: happened.append(given))
    one = entry.Unfailing(9)
    assert one.writable() and one.fileno() == 9 and not one.isatty()
    assert [one.write(b"abcde"), one.write(b"fgh"), one.write(b"ij"), one.write(b"kl")] == [3, 3, 2, 2]
    assert happened == [(9, b"abcde"), ([], [9], []), *[(9, data) for data in (b"abcde", b"fgh", b"ij", b"kl")]]
    assert one.error.strerror == "No space left on device"


@pytest.mark.parametrize(
    ("error", "said"),
    [(None, ""), (28, "p: the standard output is incomplete: No space left on device\n"), (32, ""), (9, ""), (5, "")],
)
def test_what_the_standard_output_has_lost_is_said_at_the_end(monkeypatch, capsys, error, said):
    raw = entry.Unfailing(9)
    raw.error = error and OSError(error, os.strerror(error))
    monkeypatch.setattr(entry, "_raw", {"stdout": raw})
    entry.say_what_was_lost("p")
    assert capsys.readouterr() == ("", said)
    monkeypatch.setattr(entry, "_raw", {})
    entry.say_what_was_lost("p")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [None, object()])
def test_streams_of_the_program_that_cannot_be_flushed_make_no_failure(monkeypatch, stream):
    monkeypatch.setattr(entry.sys, "stdout", stream)
    entry.say_what_was_lost("p")


def test_closed_standard_files_are_opened_again():
    def act():
        for number in (0, 1, 2):
            os.close(number)
        sys.stdout = sys.stderr = None
        entry._raw.clear()
        entry.protect_streams()
        null = os.stat(os.devnull)
        are_open = all(os.path.samestat(os.fstat(number), null) for number in (0, 1, 2))
        return 7 if are_open and (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2) else 8

    assert in_child(act) == 7


@pytest.mark.parametrize(
    ("program", "variables", "said"),
    [
        ("dbrdist-train", {}, b"dbrdist-train: interrupted\n"), ("dbrdist-data", {"PMI_RANK": "1"}, b""),
        ("dbrdist-data", {"SLURM_PROCID": "0"}, b"dbrdist-data: interrupted\n"), ("pytest", {}, None),
    ],
)  # fmt: skip
def test_an_interrupt_before_there_is_a_handler_ends_our_programs_alone(monkeypatch, program, variables, said):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    happened, plain = [], builtins.__import__

    def imports(name, *given, **more):
        if name == "select":
            raise KeyboardInterrupt
        return plain(name, *given, **more)

    def end(code):
        happened.append(code)
        raise SystemExit  # what a process that has ended does not come to

    code = compile(pathlib.Path(entry.__file__).read_text(), entry.__file__, "exec")
    monkeypatch.setattr(sys, "argv", [f"/bin/{program}"])
    monkeypatch.setattr(os, "write", lambda descriptor, data: happened.append((descriptor, data)))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(builtins, "__import__", imports)
    with pytest.raises(KeyboardInterrupt if said is None else SystemExit):
        exec(code, {"__name__": "entry"})
    assert happened == ([] if said is None else [(2, said)] * bool(said) + [130])


@pytest.mark.parametrize(
    ("errors", "text", "written"),
    [
        ("strict", "é", b"\\xe9"), ("surrogateescape", "a\udcff", b"a\xff"),
        ("surrogateescape", "é", b"\\xe9"), ("replace", "é", b"?"),
        ("ignore", "é", b""),
    ],
)  # fmt: skip
def test_what_an_error_handler_does_not_write_is_escaped(errors, text, written):
    name = entry._forgiving(errors)
    assert name == f"dbrdist-{errors}" and text.encode("ascii", name) == written


@pytest.mark.parametrize(("errors", "out"), [("strict", "backslashreplace"), (None, "backslashreplace"),
                                             ("surrogateescape", "dbrdist-surrogateescape")])  # fmt: skip
def test_streams_keep_their_encoding_and_what_they_do_with_odd_letters(monkeypatch, errors, out):
    for name in ("stdout", "stderr"):
        given = SimpleNamespace(encoding="latin-1", errors=errors, write_through=False)
        monkeypatch.setattr(sys, name, given)
    monkeypatch.setattr(entry, "_raw", {})
    entry.protect_streams()
    first, second = sys.stdout, sys.stderr
    entry.protect_streams()
    assert (sys.stdout, sys.stderr) == (first, second)
    assert (first.errors, second.errors) == (out, "backslashreplace") and first.encoding == "latin-1" == second.encoding
    assert (first.write_through, second.write_through, second.line_buffering) == (False, True, True)
    assert (first.fileno(), second.fileno(), first.mode, second.mode) == (1, 2, "w", "w")
