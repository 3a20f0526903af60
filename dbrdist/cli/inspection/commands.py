"""What `dbrdist-train` does besides training: it reads runs, and starts no MPI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dbrdist.cli.builders import weights
from dbrdist.cli.configuration import load, resolve
from dbrdist.cli.inspection import onnx_export, predict, report, watch
from dbrdist.cli.output.folder import CONFIG, SUMMARY, read_json, state_of
from dbrdist.cli.output.refuse import Refused
from dbrdist.comm.data import audit
from dbrdist.errors import ConfigError
from dbrdist.training import plotting
from dbrdist.training.runs import find_snapshot, folder_of

_HERE = Path(__file__).parents[1]
# the examples' configurations: in the wheel beside the commands, in a checkout where they are
_PLACES = (_HERE / "configurations" / "{}.yaml", _HERE.parents[1] / "examples" / "{}" / "config.yaml")
CONFIGURATIONS = ("digits", "cifar10", "imagenet")


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    """Name what is written in an error that does not, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def write_report(runs: Sequence[str]) -> Iterator[str]:
    """Write the report on one or several runs; the files' names."""
    with _writing(runs[0]):
        yield from report.write(runs, pictures=True)
    if len(runs) == 1 and not plotting.is_installed():
        yield "no PNG: install matplotlib for these, pip install dbrdist[plot]"


def watch_runs(runs: Sequence[str], port: int | None) -> Iterator[str]:
    """Serve the page about runs until Ctrl-C; the lines that say where."""
    yield from watch.watch(runs, port)


def audit_run(run: str, words: Sequence[str]) -> Iterator[str]:
    """Check which examples a run used: a line for each epoch, and Refused where one was used twice or never."""
    if words:
        raise ConfigError("dbrdist-train: --audit RUN takes no further arguments")
    try:
        summary = read_json(os.path.join(run, SUMMARY))
        is_running = state_of(run, summary) == "running"
        verdict = audit.check(run, int(summary.get("iterations") or 0), is_running)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dbrdist-train: {error}") from error
    yield from verdict.findings
    if verdict.problems:
        raise Refused("\n".join(f"{run}: {problem}" for problem in verdict.problems))
    yield f"{run}: no example was used twice in an epoch, and none was left out of a finished one"


def export(run: str, words: Sequence[str]) -> Iterator[str]:
    """Write a run's weights. A configuration among the words is not needed, and no mistake either."""
    files = [word for word in words if not word.endswith((".yaml", ".yml"))]
    if any(word.endswith(".onnx") for word in files):
        yield from _export_onnx(run, words)
        return
    names = [word for word in files if word.startswith("names=")]
    files = [word for word in files if word not in names]
    if names not in ([], ["names=torch"], ["names=dbrdist"]):
        raise ConfigError(f"dbrdist-train: expected names=torch or names=dbrdist, got {' '.join(names)}")
    if len(files) != 1 or not files[0].endswith(".safetensors"):
        got = f", got {' '.join(files)}" if files else ""
        raise ConfigError(
            f"dbrdist-train: expected one file to write: --export RUN weights.safetensors, or model.onnx{got}"
        )
    with _writing(files[0]):
        yield weights.export(run, files[0], names[0].removeprefix("names=") if names else "dbrdist")


def _export_onnx(run: str, words: Sequence[str]) -> Iterator[str]:
    """Write a run's network as an ONNX file: the file, perhaps a configuration, perhaps the shape of an example."""
    configs = [word for word in words if word.endswith((".yaml", ".yml"))]
    files = [word for word in words if word.endswith(".onnx")]
    shapes = [word for word in words if onnx_export.SHAPE.match(word)]
    if len(files) != 1 or len(configs) > 1 or len(shapes) > 1 or len(configs + files + shapes) < len(words):
        raise ConfigError(
            "dbrdist-train: expected one file to write, and perhaps the shape of an example: --export RUN model.onnx "
            f"3x224x224, got {' '.join(words)}"
        )
    find_snapshot(run)
    settings, origin = load.load(configs[0] if configs else os.path.join(folder_of(run), CONFIG), ())
    if configs:
        resolve.search_beside(configs[0])
    else:
        resolve.refuse_code_of_a_folder(settings, origin, f"--export RUN {files[0]}")
    with _writing(files[0]):
        yield from onnx_export.write(settings, origin, run, files[0], shapes[0] if shapes else None)


def predict_images(run: str, words: Sequence[str]) -> Iterator[str]:
    """Name the classes of image files; a configuration and overrides among the words say how, else the run's own."""
    configs = [word for word in words if word.endswith((".yaml", ".yml"))]
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]
    images = [word for word in words if word not in (*configs, *overrides)]
    if not images or len(configs) > 1:
        raise ConfigError("dbrdist-train: expected image files: --predict RUN image.jpg ...")
    find_snapshot(run)  # or what is said of its configuration would be all one hears
    settings, origin = load.load(configs[0] if configs else os.path.join(folder_of(run), CONFIG), overrides)
    if configs:
        resolve.search_beside(configs[0])
    else:
        resolve.refuse_code_of_a_folder(settings, origin, "--predict RUN IMAGE.jpg")
    yield from predict.predict(settings, origin, run, images)


def configuration(name: str) -> str:
    """The text of a commented configuration."""
    if name not in CONFIGURATIONS:
        known = ", ".join(CONFIGURATIONS)
        raise ConfigError(f"dbrdist-train: expected the name of a configuration ({known}), got {name!r}")
    for place in _PLACES:
        path = Path(str(place).format(name))
        if path.exists():
            return path.read_text(encoding="utf-8").rstrip("\n")
    raise ConfigError(f"dbrdist-train: the configuration {name} was not installed with dbrdist")
