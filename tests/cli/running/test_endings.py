"""How a run ends that does not reach its end."""

from __future__ import annotations

import errno
import re

from dbrdist.cli.output import folder
from dbrdist.cli.output.refuse import Refused, RefusedHere
from dbrdist.cli.running import endings
from dbrdist.errors import CheckpointError, ConfigError


def test_how_a_run_ends_for_each_error():
    out = folder.RunFolder("out")
    for error, kind, words in (
        (OSError(errno.ENOSPC, "No space left on device", "out/log.jsonl"), RefusedHere, "^out: .*are unharmed$"),
        (IsADirectoryError(21, "Is a directory", "out/log.jsonl"), RefusedHere, "out/log.jsonl: Is a directory"),
        (IsADirectoryError(21, "Is a directory", "elsewhere"), IsADirectoryError, "elsewhere"),
        (OSError("words"), OSError, "words"),
        (CheckpointError("torn"), Refused, "torn"), (ConfigError("wrong"), RefusedHere, "wrong"),
        (SystemExit(0), SystemExit, "before the run was over"), (SystemExit(3), SystemExit, "3"),
        (KeyError(5), KeyError, "5"),
    ):  # fmt: skip
        ending = endings.as_ending(error, out, False)
        assert type(ending) is kind and re.search(words, str(ending)), error
        assert (ending is error) == (kind is type(error) and "before" not in words)
    own = KeyError(5)
    own.filename = "out/log.jsonl"
    assert endings.as_ending(own, out, False) is own
    torn = endings.as_ending(CheckpointError("torn"), out, True)
    assert type(torn) is RefusedHere and "torn" in str(torn)  # of what this rank alone was writing


def test_a_gpu_without_memory_ends_the_run_with_its_sizes():
    """No traceback, the notes with what held the memory, and a code after which nobody starts it again."""
    error = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})("allocating 8 bytes")
    error.add_note("Of 80 GB, ...")
    ended = endings.as_ending(error, None, False)
    assert isinstance(ended, RefusedHere) and ended.code == 2
    assert str(ended) == "OutOfMemoryError: allocating 8 bytes Of 80 GB, ..."
    assert endings.as_ending(full := MemoryError(), None, False) is full
