"""Evaluation of a finished run's weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dbrdist.cli.builders import build, preflight, weights
from dbrdist.cli.builders.assemble import evaluator, parts
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.output.folder import read_json
from dbrdist.cli.output.refuse import alike
from dbrdist.core.files import strict_json
from dbrdist.errors import ConfigError
from dbrdist.training.runs import RECIPE, find_snapshot, folder_of, load_weights, other_classes

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase


def evaluate(config: Config, origin: Origin, comm: CommunicatorBase, run_dir: str) -> None:
    """Evaluate the newest snapshot of a run, and print the means as one line of JSON."""
    find = build.find_images(config, origin, comm)
    config = config.model_copy(update={"init_from": None})  # the weights are those of the snapshot
    with alike(comm):
        made = parts(config, origin, comm.intra_rank, comm.size, find)
        if made.data.test is None:
            raise ConfigError(f"{origin.where(('data',))}: data: there is no test data to evaluate on")
        check_classes(os.path.join(folder_of(run_dir), RECIPE), made.data.classes, origin)
        preflight.check_test(config, origin, made)
        weights.warn_of_other_network(run_dir, made.recipe, f"--evaluate {run_dir}")
    path, learned = _load_newest(run_dir, made.task, comm)
    with alike(comm):
        compare_classes(learned.get("classes"), made.data.classes, origin)
    evaluation = evaluator(config, made, comm)
    evaluation.name = "validation"
    means = evaluation(None)
    evaluation.finalize()
    if comm.rank == 0:
        print(strict_json.dumps({"snapshot": path, **{key: float(value) for key, value in means.items()}}), flush=True)


def _load_newest(run_dir: str, task: Any, comm: CommunicatorBase) -> tuple[str, dict[str, Any]]:
    """Fill the network with the weights of the snapshot that rank 0 finds; its path, and what it says of the data.

    Collective.
    """
    while True:
        with alike(comm):
            path = find_snapshot(run_dir) if comm.rank == 0 else None
        path = comm.bcast_obj(path)
        is_there, learned = True, {}
        with alike(comm):
            try:
                learned = load_weights(path, task)
            except FileNotFoundError:  # the run continues, and has removed it
                is_there = path == run_dir
                if is_there:
                    raise
        if all(comm.allgather_obj(is_there)):
            return str(path), learned


def check_classes(recipe: str, classes: list[str] | None, origin: Origin) -> None:
    """Raise ConfigError where the data has other classes than those in a run's recipe."""
    compare_classes(read_json(recipe).get("classes"), classes, origin)


def compare_classes(learned: list[str] | None, classes: list[str] | None, origin: Origin) -> None:
    """Raise ConfigError where the data has other classes than those that the network was trained on."""
    words = other_classes(learned, classes)
    if words:
        raise ConfigError(
            f"{origin.where(('data',))}: data: {words}; give the network the data with its own classes, or train "
            "another one with out=..."
        )
