"""The bundle of a supervisor's modules: used where it is of this Python, and missed nowhere."""

import importlib.util
import marshal
import os
import subprocess
import sys

import pytest
from dbrdist_launch.launcher.records import jobs
from dbrdist_launch.rank import bundle
from support import ROOT, launch

MAIN = ROOT / "launch" / "dbrdist_launch" / "rank" / "main.py"
LEADS = len(importlib.util.MAGIC_NUMBER)


def started(folder):
    """(what a rank looked for as a file, how it ended, its words): no launcher listens in the folder."""
    words = [sys.executable, "-I", "-S", "-X", "importtime", MAIN, "hydra", f"unix:{folder}/socket"]
    environment = {"PMI_RANK": "3", "PMI_SIZE": "4"}
    child = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    lines = child.stderr.splitlines()
    times = [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]
    return times, child.returncode, [line for line in lines if not line.startswith("import time:")]


@pytest.mark.programs
def test_a_rank_takes_all_of_its_modules_from_the_bundle(tmp_path):
    """And is none without it, or with one of another Python: it says and does the same."""
    (tmp_path / "token").write_text("t")
    files, *ended = started(tmp_path)
    own = {f"dbrdist_launch.{name}" for name in bundle._MODULES}
    assert own | {*bundle._PACKAGES, *bundle._LIBRARY} <= set(files)
    assert {name for name in files if name.startswith("dbrdist_launch")} == own | {*bundle._PACKAGES}  # no more of them
    assert ended[0] == 71 and len(ended[1]) == 1 and "rank 3: FileNotFoundError" in ended[1][0]
    packed = bundle.pack()
    (tmp_path / "modules").write_bytes(packed)
    found, *same = started(tmp_path)
    at_start = files.index("os") + 1  # what comes before is Python's own start
    assert same == ended and found[:at_start] == files[:at_start]
    assert set(found[at_start:]) & set(files[at_start:]) <= set(sys.builtin_module_names)
    for other in (b"\0" * LEADS + packed[LEADS:], b"", packed[: LEADS - 1], packed[:LEADS], packed[:1000]):
        (tmp_path / "modules").write_bytes(other)
        assert started(tmp_path) == (files, *ended)


@pytest.mark.programs
def test_a_module_in_c_that_cannot_be_loaded_is_left_to_who_needs_it(tmp_path):
    """Such as `_ctypes` without its library: ranks without a bundle do without it."""
    (tmp_path / "token").write_text("t")
    loading, names = marshal.loads(bundle.pack()[LEADS:])
    names["compiled"] = [(name, str(tmp_path / "gone.so")) for name in bundle._COMPILED]
    (tmp_path / "modules").write_bytes(importlib.util.MAGIC_NUMBER + marshal.dumps((loading, names)))
    files, code, words = started(tmp_path)
    assert code == 71 and len(words) == 1 and "rank 3: FileNotFoundError" in words[0]
    assert "_ctypes" in files and "dbrdist_launch.linux" not in files


OPENED = """
import os, runpy, sys
sys.addaudithook(lambda event, given: event == "open" and os.write(1, b"%r\\n" % (given[0],)))
sys.argv[:] = ["main.py", "hydra", *sys.argv[2:]]
runpy.run_path(MAIN, run_name="__main__")
"""


@pytest.mark.programs
@pytest.mark.parametrize("address", ["-", ""])
def test_a_rank_that_is_told_no_folder_looks_for_no_bundle(address):
    words = [sys.executable, "-I", "-S", "-c", OPENED.replace("MAIN", repr(str(MAIN))), "-", address]
    child = subprocess.run(words, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    opened = child.stdout.splitlines()
    assert any("outer.cpython" in path for path in opened) and not any("/modules" in path for path in opened)


@pytest.mark.programs
def test_another_python_than_cpython_looks_for_the_modules(tmp_path):
    (tmp_path / "token").write_text("t")
    (tmp_path / "modules").write_bytes(bundle.pack())
    without = OPENED.replace("import os, runpy, sys", "import os, runpy, sys; sys.modules[HIDDEN] = None")
    text = without.replace("MAIN", repr(str(MAIN))).replace("HIDDEN", repr("_frozen_importlib_external"))
    words = [sys.executable, "-I", "-S", "-c", text, "-", f"unix:{tmp_path}/socket"]
    child = subprocess.run(words, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert child.returncode == 71 and "no rank in the environment" in child.stderr and "outer.cpython" in child.stdout


def test_modules_of_a_bundle_know_their_files_and_lines():
    _, names = marshal.loads(bundle.pack()[LEADS:])
    for name, given, code in names["modules"]:
        path = importlib.util.find_spec(name).origin
        assert given["__file__"] == code.co_filename == path
        with open(path, encoding="utf-8") as file:
            assert list(code.co_lines()) == list(compile(file.read(), path, "exec", dont_inherit=True).co_lines())
        module = importlib.import_module(name)
        assert given["__package__"] == module.__package__ and given.get("__path__") == getattr(module, "__path__", None)


def test_modules_without_files_of_their_own_make_no_bundle(monkeypatch):
    monkeypatch.setattr(bundle, "_LIBRARY", ("in_an_archive",))
    assert bundle.pack() == b""


@pytest.mark.parametrize("source", [b"def half(", b"\xff = 1", b"\0"])
def test_modules_that_are_just_being_edited_make_no_bundle(tmp_path, monkeypatch, source):
    (tmp_path / "edited.py").write_bytes(source)
    monkeypatch.setattr(bundle.os, "__file__", str(tmp_path / "os.py"))
    monkeypatch.setattr(bundle, "_LIBRARY", ("edited",))
    assert bundle.pack() == b""


PROGRAM = """
import os
words = open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")
folder = os.path.dirname(next(word for word in words if word.startswith("unix:"))[5:])
print(*sorted(os.listdir(folder)), folder)
"""


@pytest.mark.mpiexec
@pytest.mark.parametrize("ranks", [bundle.FEWEST_RANKS - 1, bundle.FEWEST_RANKS])
def test_a_large_job_has_a_bundle_while_it_runs(ranks):
    result = launch("-n", ranks, sys.executable, "-c", PROGRAM)
    assert result.returncode == 0, result.stderr
    lines = [line.split("] ")[1].split() for line in result.stdout.splitlines()]
    there = ["job.json", *(["modules"] if ranks >= bundle.FEWEST_RANKS else []), "socket", "token"]
    assert [line[:-1] for line in lines] == [there] * ranks
    assert not os.path.exists(lines[0][-1])


def test_a_bundle_that_cannot_be_written_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "bases", lambda: [str(tmp_path / "jobs")])
    folder = jobs.JobFolder("n", ["x"], "t")
    folder.add_modules(b"some")
    path = os.path.join(folder.folder, "modules")
    with open(path, "rb") as file:
        assert file.read() == b"some"
    os.unlink(path)

    def full(*arguments):
        with open(path, "wb") as file:
            file.write(b"so")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "open", full, raising=False)
        folder.add_modules(b"some")
    assert sorted(os.listdir(folder.folder)) == ["job.json", "token"]
    folder.close()
    folder.folder = None
    folder.add_modules(b"some")  # no place for one


def test_the_bundle_has_each_module_with_its_package():
    _, names = marshal.loads(bundle.pack()[LEADS:])
    found = {name: (given["__file__"], given.get("__package__")) for name, given, _ in names["modules"]}
    folder = ROOT / "launch" / "dbrdist_launch"
    assert len(found) == len(names["modules"]) == len(bundle._LIBRARY + bundle._PACKAGES + bundle._MODULES)
    assert found["dbrdist_launch"] == (str(folder / "__init__.py"), "dbrdist_launch")
    assert found["dbrdist_launch.rank"] == (str(folder / "rank" / "__init__.py"), "dbrdist_launch.rank")
    assert found["dbrdist_launch.rank.outer"] == (str(folder / "rank" / "outer.py"), "dbrdist_launch.rank")
    assert found["dbrdist_launch.linux"] == (str(folder / "linux.py"), "dbrdist_launch")
    library = os.path.dirname(os.__file__)
    assert all(found[name] == (os.path.join(library, f"{name}.py"), "") for name in bundle._LIBRARY)
