"""What mpiexec writes itself, beside what spawned processes write."""

import pytest
from dbrdist_launch.launcher.streams.starter_output import StarterOutput

RULE = "=" * 83 + "\n"


@pytest.mark.parametrize(
    ("text", "own", "shown"),
    [
        ("hello\n\nyou\n", [], "hello\n\nyou\n"),
        ("no end", [], "no end"),
        ("\n" + RULE + "=   BAD TERMINATION\n=   EXIT CODE: 9\n" + RULE, 4, ""),
        (RULE + "a table\n" + RULE + "x\n", [], RULE + "a table\n" + RULE + "x\n"),
        ("[mpiexec@vm] words\n[proxy:0@vm] more\nsrun: error: x\n", 3, ""),
        ("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed\nbeyond\n", 1, "beyond\n"),
        ("-" * 74 + "\nprterun has exited\n" + "-" * 74 + "\nx\n", 3, "x\n"),
        ("\udcff\0binary\n", [], "\udcff\0binary\n"),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 100000])
def test_what_spawned_processes_write_is_told_from_mpiexecs_own_words(text, own, shown, step):
    said, found = [], []
    one = StarterOutput(said.append, found.append)
    data = text.encode("utf-8", "surrogateescape")
    for at in range(0, len(data), step):
        one.feed(data[at : at + step])
    one.end()
    assert b"".join(found) == shown.encode("utf-8", "surrogateescape")
    assert len(said) == (own if isinstance(own, int) else len(own))
