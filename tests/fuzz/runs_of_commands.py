"""More jobs of `tests.fuzz.runs`: whole commands on data, networks, streams and signals of any kind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dbrdist_launch import entry
from PIL import Image

import dbrdist
import dbrdist.links as L
from dbrdist.cli import train
from dbrdist.cli.builders import assemble, build, weights
from dbrdist.cli.inspection import predict
from dbrdist.cli.running import evaluation, run
from dbrdist.core import random as chance
from dbrdist.core.array.config import global_config
from dbrdist.core.files import standard_streams
from dbrdist.datasets.public import npz
from dbrdist.training import runs as run_folders

Draw = random.Random
ROOT = Path(__file__).resolve().parents[2]


def dbrdist_train(*words: Any) -> tuple[int, str]:
    """Exit code and output of the command, in this process."""
    out, stderr = io.StringIO(), os.dup(2)
    dtype, argv = global_config.dtype, sys.argv
    sys.argv = ["dbrdist-train", *map(str, words)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)  # what is wrong is written there
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                code = train._main()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            global_config.dtype, sys.argv = dtype, argv
            chance.set_seed(0)
        file.seek(0)
        return code, out.getvalue() + file.read()


@contextlib.contextmanager
def new_folder() -> Iterator[None]:
    """A working directory of its own."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def write_config(**entries: Any) -> None:
    """A configuration as JSON, which is YAML too."""
    given = {"model": {"name": "mlp", "units": [4]}, "data": "digits", "batch": 100, "epochs": 1, "out": "run"}
    Path("run.yaml").write_text(json.dumps({**given, "optimizer": {"lr": 0.05}, **entries}), encoding="utf-8")


# ---- classes, preprocessing and constants

NAMES = [
    *("ash", "blood", "clay", "zinc", "a b", "it's", 'say "so"', "new\nline", "tab\tbed", "a: b", "#1", "- x", "[x]"),
    *("{y}", "1e3", "007", "null", "true", "~", "é", "漢字", "😀", "a\u2028b", "*a", "&a", "!!str", "%", "back\\slash"),
]


def images_of(draw: Draw, names: list[str], parts: tuple[str, ...]) -> None:
    """Images of a class are of nearly one colour."""
    rng = np.random.default_rng(draw.randrange(1 << 30))
    for part in parts:
        for k, name in enumerate(names):
            os.makedirs(f"images/{part}/{name}", exist_ok=True)
            for i in range(2):
                pixels = np.full((4, 4, 3), 30 + 50 * k) + rng.integers(0, 9, (4, 4, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(f"images/{part}/{name}/{i}.png")


def classes(draw: Draw) -> None:
    """Data whose classes are not those that the network has learned is refused, and no other."""
    with new_folder():
        names = sorted(draw.sample(NAMES, draw.randint(2, 4)))
        images_of(draw, names, ("train", "test"))
        write_config(data={"name": "image_folder", "root": "images"}, batch=4)
        code, out = dbrdist_train("run.yaml")
        assert code == 0, out
        with open("run/model.json", encoding="utf-8") as file:
            assert json.load(file)["classes"] == names
        change, now = draw.choice(["none", "none", "rename", "add"]), list(names)
        if change == "rename":
            k = draw.randrange(len(now))
            now[k] = draw.choice([name for name in NAMES if name not in names])
            for part in ("train", "test"):
                os.rename(f"images/{part}/{names[k]}", f"images/{part}/{now[k]}")
        elif change == "add":
            now.append(draw.choice([name for name in NAMES if name not in names]))
            images_of(draw, [*names, now[-1]], ("train", "test"))
        words = draw.choice([["run.yaml", "--resume", "epochs=2"], ["--evaluate", "run"]])
        code, out = dbrdist_train(*words)
        assert code == (0 if change == "none" else 2), (names, now, words, out)
        assert change == "none" or "the network was trained on" in out, out
        with open("run/model.json", encoding="utf-8") as file:
            assert json.load(file)["classes"] == names


def predictions(draw: Draw) -> None:
    """A run with or without test data predicts what its network says of pixels that NumPy prepares."""
    with new_folder():
        names = sorted(draw.sample(NAMES[:4], draw.randint(2, 4)))
        has_tests = draw.random() < 0.3
        images_of(draw, names, ("train", "test"))
        mean, std = round(draw.uniform(0.2, 0.8), 2), round(draw.uniform(0.1, 0.9), 2)
        normalize = {"name": "normalize", "mean": [mean], "std": [std]}
        random_ones = draw.sample(["random_flip", {"name": "mixup", "p": 0.1}], draw.randint(0, 2))
        data = {"name": "image_folder", "root": "images"}
        write_config(
            data=data if has_tests else {**data, "test": None}, batch=4, epochs=3,
            transforms={"train": [*random_ones, normalize], "test": [normalize] if has_tests else []},
        )  # fmt: skip
        code, out = dbrdist_train("run.yaml")
        assert code == 0, out
        paths = sorted(str(path) for path in Path("images/train").rglob("*.png"))
        code, out = dbrdist_train("--predict", "run", *paths)
        assert code == 0, out
        network = dbrdist.load("run")
        for path, line in zip(paths, out.splitlines(), strict=True):
            pixels = np.asarray(Image.open(path), np.float64).transpose(2, 0, 1)[None] / 255
            with dbrdist.using_config("train", False):
                scores = network(((pixels - mean) / std).astype(np.float32)).array[0].astype(np.float64)
            shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            (shown,) = re.findall(r": (\S+) ([\d.]+) %", line)[:1]
            assert shown[0] == names[int(shares.argmax())], (line, shares)
            assert abs(float(shown[1]) - 100 * shares.max()) < 0.06, (line, shares)


class Normalized(dbrdist.Chain):
    """A network whose outputs depend on `eps`."""

    def __init__(self, eps: float = 1e-3) -> None:
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(64, 10)
            self.bn = L.BatchNormalization(10, eps=eps)

    def forward(self, x: Any) -> Any:
        return self.bn(self.fc(x.reshape(len(x), -1)))


def constants(draw: Draw) -> None:
    """Weights give the outputs of the formula with the `eps` that they were trained with, wherever they go."""
    with new_folder():
        eps = draw.choice([1e-5, 1e-3, 0.03, 0.3, 2.0])
        write_config(model={"name": f"{__name__}:Normalized", "args": {"eps": eps}}, iterations=2)
        code, out = dbrdist_train("run.yaml")
        assert code == 0, out
        source, way = "run", draw.choice(["load", "init_from", "export", "resume"])
        if way == "export":
            assert dbrdist_train("--export", "run", "w.safetensors")[0] == 0
            source = "w.safetensors"
        if way in ("export", "init_from"):
            source = f"init_from={source}"
            code, out = dbrdist_train("run.yaml", "out=next", source, "model.args.eps=1e-4", "optimizer.lr=1e-12")
            assert code == 0, out
        if way == "resume":
            assert dbrdist_train("run.yaml", "--resume", "iterations=4")[0] == 0
        folder = "next" if way in ("export", "init_from") else "run"
        entries = np.load(run_folders.find_snapshot(folder))
        w = {key.rpartition("predictor/")[2]: entries[key].astype(np.float64) for key in entries if "predictor" in key}
        x = np.random.default_rng(0).standard_normal((5, 64))
        y = x @ w["fc/W"].T + w["fc/b"]
        expected = (y - w["bn/avg_mean"]) / np.sqrt(w["bn/avg_var"] + eps) * w["bn/gamma"] + w["bn/beta"]
        with dbrdist.using_config("train", False):
            found = dbrdist.load(folder, model=Normalized())(x.astype(np.float32)).array
        assert np.allclose(found, expected, rtol=1e-3, atol=1e-3), (way, eps, np.abs(found - expected).max())


# ---- data of any kind


def arrays(n: int, num_test: int | None, dtype: str, shape: list[int]) -> Any:
    """Random examples of a type and shape, with labels from 0 to 2."""
    rng = np.random.default_rng(0)

    def part(size: int) -> Any:
        x = rng.integers(0, 2, (size, *shape)).astype(dtype)
        return [(row, np.int32(k % 3)) for k, row in enumerate(x)]

    return part(n), None if num_test is None else part(num_test)


def own_data(draw: Draw) -> None:
    """Data either trains, or is refused in a sentence: empty parts, and numbers that no layer takes."""
    n, num_test = draw.choice([0, 1, 2, 7, 20]), draw.choice([None, 0, 1, 5])
    dtype, shape = draw.choice(["f4", "f8", "f2", "u1", "i4", "i8", "?"]), draw.choice([[4], [3, 4, 4], [1, 8, 8]])
    is_file = draw.random() < 0.5 and num_test != 0 and n > 0
    with new_folder():
        args = {"n": n, "num_test": num_test, "dtype": dtype, "shape": shape}
        data: Any = {"name": f"{__name__}:arrays", "args": args}
        if is_file:
            for path, examples in zip(("a.npz", "b.npz"), arrays(n, num_test, dtype, shape)):
                if examples is not None:
                    np.savez(path, x=np.stack([x for x, _ in examples]), y=np.array([t for _, t in examples]))
            data = {"name": "npz", "train": "a.npz", "test": None if num_test is None else "b.npz"}
        model = {"name": "mlp", "units": [4], "num_classes": 3}
        write_config(data=data, batch=max(1, min(n, draw.choice([1, 2, 5]))), iterations=2, model=model)
        code, out = dbrdist_train("run.yaml")
        case = (n, num_test, dtype, shape, is_file, out)
        assert "Traceback" not in out and code in (0, 2), case
        if n == 0 or num_test == 0:
            assert code == 2 and "set is empty" in out, case
        elif "f" in dtype or (is_file and len(shape) == 3):
            assert code == 0, case


def headers(draw: Draw) -> None:
    """A file that claims more than it has costs a sentence, and no memory."""
    with new_folder():
        np.savez("a.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int32))
        with zipfile.ZipFile("a.npz") as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        name = draw.choice(["x.npy", "y.npy"])
        before = b"(4, 2), }" if name == "x.npy" else b"(4,), }"
        rows = draw.choice([5, 10**6, 10**9, 9 * 10**12, 10**18])
        claim = before.replace(b"4", str(rows).encode())
        padded = before + b" " * (len(claim) - len(before))
        assert padded in entries[name]
        entries[name] = entries[name].replace(padded, claim)
        with zipfile.ZipFile("a.npz", "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
            for key, content in entries.items():
                archive.writestr(key, content)
        write_config(data={"name": "npz", "train": "a.npz"}, batch=2)
        code, out = dbrdist_train("run.yaml", *draw.choice([[], ["--dry-run"]]))
        assert code == 2 and "a.npz" in out and f"{rows}" in out.replace(",", "") and "Traceback" not in out, out


# ---- a run that is read while it goes on

_moving: list[Any] = []  # the folder, and at which of the next times that a snapshot is opened it has gone


def _moves(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _moving and isinstance(args[0], str) and args[0].startswith(f"{_moving[0]}/snapshot_iter_"):
        places = _moving[1]
        if places and places.pop(0):
            newer = int(args[0].rpartition("_")[2]) + 1
            os.rename(args[0], f"{_moving[0]}/snapshot_iter_{newer}")


sys.addaudithook(_moves)


def live_runs(draw: Draw) -> None:
    """Snapshots that a run replaces at any moment do not fail those who read it."""
    with new_folder():
        write_config(iterations=2)
        assert dbrdist_train("run.yaml")[0] == 0
        for _ in range(4):
            _moving[:] = ["run", [draw.random() < 0.4 for _ in range(draw.randint(1, 20))]]
            try:
                if draw.random() < 0.5:
                    dbrdist.load("run")
                else:
                    code, out = dbrdist_train("--evaluate", "run")
                    assert code == 0, out
            finally:
                _moving.clear()


# ---- streams and signals

_PROGRAM = """\
import importlib, os, sys, types
sys.argv[0] = "dbrdist-train"
from dbrdist_launch import entry
if plant := os.environ.get("FUZZ_PLANT"):
    from tests.fuzz import runs
    runs.plant(plant)

def imported(name):
    if at := os.environ.get("FUZZ_TELLS"):
        os.write(int(at), b".")
    return importlib.import_module(name)

entry.importlib = types.SimpleNamespace(import_module=imported)
entry.train()
"""
planted = [""]  # the name of the fault, for programs


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FUZZ_PLANT": planted[0], **more}


def streams(draw: Draw) -> None:
    """Streams that are closed, full or left by their reader change neither the run nor its exit code."""
    with new_folder():
        Path("program.py").write_text(_PROGRAM)
        write_config(batch=200)
        words, expected = draw.choice(
            [("run.yaml", 0), ("run.yaml", 0), ("run.yaml --dry-run", 0), ("--print-schema", 0), ("nowhere.yaml", 2)]
        )
        into = draw.choice(
            [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1"]
            + [f"| head -c {draw.choice([0, 1, 100, 700])}", f"2>&1 | head -c {draw.choice([0, 1, 100])}"]
        )
        command = f"set -o pipefail; {sys.executable} program.py {words} {into}"
        done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, timeout=300)
        assert done.returncode == expected, (words, into, done)
        assert b"Traceback" not in done.stderr + done.stdout, (words, into, done)
        if words == "run.yaml":
            with open("run/summary.json", encoding="utf-8") as file:
                assert json.load(file)["status"] == "finished", (words, into)


def interrupts(draw: Draw) -> None:
    """Ctrl-C at any time ends with 130 and without a traceback, and leaves what can be continued."""
    with new_folder():
        Path("program.py").write_text(_PROGRAM)
        write_config(batch=200, epochs=10**6, log={"every": "200 epochs"}, snapshot={"every": "1000 epochs"})
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "program.py", "run.yaml"], env=environment(FUZZ_TELLS=str(writer)), pass_fds=[writer],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        os.close(writer)
        try:
            os.read(reader, 1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.choice([0.0, draw.uniform(0, 0.5), draw.uniform(0, 3)]))
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=300)
        finally:
            os.close(reader)
            process.kill()
        assert process.returncode == 130 and "Traceback" not in out, (process.returncode, out)
        lines = [line for line in out.splitlines() if "nterrupt" in line or "SIGINT" in line]
        assert len(lines) == 1, out
        if lines == ["dbrdist-train: interrupted"]:
            return
        if lines == ["interrupted"] and not Path("run").exists():  # MPI had started, and the run had not
            return
        summary = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
        ending = summary["status"], summary["reason"]
        assert ending[0] == "stopped" or ending == ("failed", "interrupted (Ctrl-C)"), (ending, out)


JOBS: dict[Callable[[Draw], None], int] = {
    classes: 2,
    predictions: 1,
    constants: 1,
    own_data: 2,
    headers: 2,
    live_runs: 1,
    streams: 1,
    interrupts: 1,
}


# ---- planted faults


def _plain_streams() -> None:
    entry.protect_streams = lambda: None
    entry.say_what_was_lost = lambda program: None

    def write(self: Any, words: str) -> int:
        return int(self._stream.write(words))

    standard_streams.StandardStream.write = write  # type: ignore[method-assign]


def _late_interrupts() -> None:
    entry.signal = type("Signal", (), {**vars(signal), "signal": staticmethod(lambda *args: None)})  # type: ignore[assignment]
    entry.interrupted = lambda program: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[assignment]


def _integers_as_they_are() -> None:
    build._are_images_of_integers = lambda x: False


def _unchecked_tests() -> None:
    assemble.len = lambda things: len(things) or 1  # type: ignore[attr-defined]


def _classes_not_compared() -> None:
    evaluation.other_classes = run_folders.other_classes = lambda learned, found: None


def _constants_left_behind() -> None:
    run.set_constants = run_folders.set_constants = lambda *args: None
    weights.runs.set_constants = run_folders.set_constants


PLANTS: dict[str, Callable[[], Any]] = {
    "classes_not_compared": _classes_not_compared,
    "predictions_of_raw_pixels": lambda: setattr(predict, "_without_chance", lambda config, origin: ()),
    "constants_left_behind": _constants_left_behind,
    "plain_streams": _plain_streams,
    "late_interrupts": _late_interrupts,
    "one_look_at_a_live_run": lambda: setattr(run_folders, "_MAX_LOOKS", 1),
    "tests_may_be_empty": _unchecked_tests,
    "integers_as_they_are": _integers_as_they_are,
    "headers_believed": lambda: setattr(npz, "_check_claims", lambda archive, key: None),
}
