"""A training run, from the checked configuration to the summary."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from typing import Any

import numpy as np

from dbrdist import __version__
from dbrdist.cli import beats, build
from dbrdist.cli.config import Config, interval
from dbrdist.cli.load import Origin, dump
from dbrdist.cli.prepare import Refused, alike, counted, describe, evaluator, iterator, parts
from dbrdist.cli.state import AverageStatistics, LocalState, SharedSnapshot
from dbrdist.cli.step import AtEndToo, EndTrigger, FollowSchedule, StepAgreement
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm.agree import on_root
from dbrdist.comm.extensions import StopOnRequest
from dbrdist.core.serializer import load_npz, write_atomically
from dbrdist.errors import (
    CheckpointError,
    CommunicatorError,
    ConfigError,
    DbrdistError,
    NonFiniteLossError,
    StopRequested,
)
from dbrdist.training import StandardUpdater, Trainer, extensions
from dbrdist.training.extensions import snapshots
from dbrdist.training.runs import RECIPE

CONFIG, SUMMARY = "config.yaml", "summary.json"
STOPPED = 75  # EX_TEMPFAIL: saved, to be started again with --resume


# what every rank raises: the ranks agree on it first
_AGREED = (NonFiniteLossError, CheckpointError, CommunicatorError)


class Run:
    """One run of training on this rank."""

    def __init__(self, config: Config, origin: Origin, comm: Any):
        self.config = config
        self.comm = comm
        self.stop = StopOnRequest(comm, save=lambda trainer: self.saver.save(trainer))
        self.stop.initialize(None)  # from now on, not only from the first step
        if comm.rank:  # all ranks leave out the same updates: rank 0 says so
            warnings.filterwarnings("ignore", "NaN or infinity in the gradient", RuntimeWarning)
        with alike(comm):
            self.parts = parts(config, origin, comm.intra_rank, comm.size)
            self.optimizer = build.optimizer(config, origin, self.parts.task)
            self.iterator = iterator(config, self.parts.data.train, comm, train=True)
        comm.bcast_data(self.parts.task)
        self.log = extensions.LogReport(trigger=None)
        self.local = LocalState(comm, self.parts.task, self.iterator)
        self.saver = SharedSnapshot(comm, extensions.snapshot(n_retains=config.snapshot.keep), self.local)
        self.trainer = self._trainer()

    def _trainer(self) -> Trainer:
        config, comm, end = self.config, self.comm, EndTrigger(self.config.epochs, self.config.iterations)
        together_optimizer = create_multi_node_optimizer(self.optimizer, comm)
        updater = StandardUpdater(self.iterator, together_optimizer, self.parts.convert, input_device=self.parts.device)
        trainer = Trainer(updater, end, out=config.out)
        trainer.extend(StepAgreement(comm, self.iterator))
        trainer.extend(self.local)
        schedule = build.schedule(config, self.optimizer)
        if schedule is not None:
            trainer.extend(FollowSchedule(schedule, self.optimizer))
        self._evaluation(trainer, end)
        if comm.rank == 0:
            self._reports(trainer, AtEndToo(interval(config.log.every), end))
        trainer.extend(self.saver, trigger=AtEndToo(interval(config.snapshot.every), end))
        trainer.extend(self.stop)
        trainer.extend(beats.Beat())
        trainer.extend(beats.Resume())
        return trainer

    def _evaluation(self, trainer: Trainer, end: EndTrigger) -> None:
        every = interval(self.config.evaluation.every)
        if self.parts.data.test is not None:
            trainer.extend(AverageStatistics(self.comm, self.parts.task), trigger=AtEndToo(every, end))
            evaluation = evaluator(self.config, self.parts, self.comm)
            trainer.extend(evaluation, name="validation", trigger=AtEndToo(every, end))

    def _reports(self, trainer: Trainer, trigger: Any) -> None:
        self.log = extensions.LogReport(trigger=trigger)
        if hasattr(self.optimizer, "lr"):
            trainer.extend(extensions.observe_value("lr", lambda _: self.optimizer.lr), trigger=(1, "iteration"))
        trainer.extend(self.log)
        trainer.extend(extensions.PrintReport(self._columns()))
        live = self.comm.size == 1 and sys.stdout.isatty()
        trainer.extend(extensions.ProgressBar(update_interval=1, live=live, min_seconds=0.1 if live else 10.0))

    def _columns(self) -> list[str]:
        names = ["loss"] + (["accuracy"] if self.parts.data.num_classes else [])
        test = [f"validation/main/{name}" for name in names] if self.parts.data.test is not None else []
        return ["epoch", "iteration", *(f"main/{name}" for name in names), *test, "elapsed_time"]

    # ---- the run ----

    def start_folder(self, resume: bool) -> None:
        """Make the run's folder, or go on from its newest snapshot. Collective."""
        path = None
        try:
            path = on_root(self.comm, lambda: _snapshot_to_go_on_from(self.config.out) if resume else None)
            if path is not None:
                with alike(self.comm):
                    snapshots.load(path, self.trainer)
            on_root(self.comm, lambda: _open_folder(self.config, self.parts.recipe, keep_snapshots=path is not None))
        except (DbrdistError, OSError) as error:
            raise Refused(str(error)) from error
        if path is not None:
            self.say(f"going on from {path}, epoch {self.trainer.updater.epoch_detail:.2f}")

    def train(self) -> int:
        """Train to the end, or to an agreed stop; returns the exit code."""
        began = time.time()
        code, status = 0, "finished"
        try:
            # what overflows shows in the loss, which is looked at after each step; a warning would not say more
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                self.trainer.run(show_loop_exception_msg=False)
        except StopRequested as request:
            self.say(str(request))
            code, status = STOPPED, "stopped"
        except _AGREED as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        except DbrdistError as error:  # of this rank's data, say: the message has what a traceback would not add to
            raise SystemExit(f"dbrdist-train: {type(error).__name__}: {error}") from error
        skipped = self.comm.allreduce_obj(self.local.num_skipped)
        messages = self.comm.allreduce_obj(list(getattr(self.iterator, "skipped", ()))[:10])
        if self.comm.rank == 0:
            summary = self.summary(status, time.time() - began)
            summary |= {"num_skipped_examples": skipped, "skipped_examples": messages[:10]}
            write_json(os.path.join(self.config.out, SUMMARY), summary)
            self._say_end(summary)
        return code

    def summary(self, status: str, seconds: float) -> dict[str, Any]:
        """What the run came to."""
        updater = self.trainer.updater
        last = self.log.log[-1] if self.log.log else {}
        return {
            "status": status,
            "epochs": updater.epoch_detail,
            "iterations": updater.iteration,
            "seconds": seconds,
            "seconds_over_all_starts": self.trainer.elapsed_time,
            "metrics": {key: value for key, value in last.items() if "/" in key},
            "num_parameters": self.parts.task.count_params(),
            "num_ranks": self.comm.size,
            "batch": self.config.batch,
            "seed": self.config.seed,
            "version": __version__,
        }

    def announce(self) -> None:
        """What is going to be trained."""
        for line in describe(self.config, self.parts, self.comm.size):
            self.say(line)

    def _say_end(self, summary: dict[str, Any]) -> None:
        if summary["num_skipped_examples"]:
            self.say(f"{counted(summary['num_skipped_examples'], 'corrupt example')} left out, see {SUMMARY}")
        epochs = counted(f"{summary['epochs']:.4g}", "epoch")
        done = f"{epochs}, {counted(summary['iterations'], 'step')}"
        self.say(f"{summary['status']}: {done} in {summary['seconds']:.1f} s; everything is in {self.config.out}")
        accuracy = summary["metrics"].get("validation/main/accuracy")
        if accuracy is not None:
            self.say(f"test accuracy {100 * accuracy:.2f} %")

    def say(self, words: str) -> None:
        """Print once."""
        if self.comm.rank == 0:
            print(words, flush=True)


def _snapshot_to_go_on_from(folder: str) -> str | None:
    path = snapshots.newest(folder)
    if path is None:
        print(f"no snapshot in {folder}: starting from the beginning", flush=True)
    return path


def _open_folder(config: Config, recipe: dict[str, Any], keep_snapshots: bool) -> None:
    """On one rank: make the run's folder and write what the run is."""
    os.makedirs(config.out, exist_ok=True)
    if not keep_snapshots:
        for old in snapshots.find(config.out):  # of an earlier run: a later --resume must not take them for ours
            os.remove(old)
    for name in os.listdir(config.out):
        if ".tmp-" in name:  # a process was killed while it wrote this
            os.remove(os.path.join(config.out, name))
    write_atomically(os.path.join(config.out, CONFIG), lambda file: file.write(dump(config).encode()))
    write_json(os.path.join(config.out, RECIPE), {**recipe, "dtype": config.dtype, "directory": os.getcwd()})
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(config.out, SUMMARY))


def write_json(path: str, data: Any) -> None:
    """Write a JSON file that people read."""
    write_atomically(path, lambda file: file.write((json.dumps(data, indent=2) + "\n").encode()))


def evaluate(config: Config, origin: Origin, comm: Any, run_dir: str) -> None:
    """Evaluate the newest snapshot of a run, and print the means as one line of JSON."""
    with alike(comm):
        made = parts(config, origin, comm.intra_rank, comm.size)
        if made.data.test is None:
            raise ConfigError(f"{origin.where(('data',))}: data: there is no test data to evaluate on")
        path = snapshots.newest(run_dir)
        if path is None:
            raise ConfigError(f"{run_dir}: expected a snapshot to evaluate, found no whole one")
        load_npz(path, made.task, path="updater/model:main/")
    evaluation = evaluator(config, made, comm)
    evaluation.name = "validation"
    means = evaluation(None)
    evaluation.finalize()
    if comm.rank == 0:
        print(json.dumps({"snapshot": path, **{key: float(value) for key, value in means.items()}}), flush=True)
