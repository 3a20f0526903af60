"""A training run, from the checked configuration to the summary."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.cli.builders import batch_norm, build, build_updates, memory, preflight
from dbrdist.cli.builders.assemble import evaluator, iterator, parts, share_gpus
from dbrdist.cli.builders.plan import describe, left_over
from dbrdist.cli.configuration.load import Origin, described
from dbrdist.cli.configuration.periods import interval
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.inspection import report
from dbrdist.cli.output import beats
from dbrdist.cli.output.console import Console
from dbrdist.cli.output.folder import (
    BEST,
    CONFIG,
    RANKS,
    TEST_EXAMPLES,
    TRACE,
    WORDS,
    RunFolder,
    earlier_starts,
    now,
    write_json,
)
from dbrdist.cli.output.provenance import facts
from dbrdist.cli.output.refuse import Refused, alike, code_of, told
from dbrdist.cli.output.warned import Warned
from dbrdist.cli.output.words import counted, said
from dbrdist.cli.running import batch_finder, loggers, resume
from dbrdist.cli.running.endings import INTERRUPTED, STOPPED, as_ending, reason_of
from dbrdist.cli.running.evaluation import check_classes, compare_classes
from dbrdist.cli.running.lr_finder import FEWEST_STEPS, RangeTest
from dbrdist.cli.running.meter import Meter
from dbrdist.cli.running.periods import (
    average_of,
    end_of,
    epochs_of,
    evaluations,
    planned,
    range_test_of,
    trigger_of,
    uses_time,
)
from dbrdist.cli.running.rank_state import RankState, empty_states
from dbrdist.cli.running.shown_examples import ShowTestExamples
from dbrdist.cli.running.table import columns, percent
from dbrdist.comm import VirtualUpdater
from dbrdist.comm.communicators.nccl import NcclCommunicator, cost_of_staging
from dbrdist.comm.data.audit import AuditLog
from dbrdist.comm.protocol.agree import on_root
from dbrdist.comm.protocol.shares import check_shares
from dbrdist.comm.run import trace
from dbrdist.comm.run.extensions import StepAgreement, StopOnRequest
from dbrdist.comm.run.parameter_audit import ParameterAudit
from dbrdist.comm.run.snapshots import AverageStatistics, LocalState, SharedSnapshot
from dbrdist.core.array.gpu.device_memory import peak_bytes
from dbrdist.core.files import strict_json
from dbrdist.core.files.serializer import write_atomically
from dbrdist.errors import (
    CheckpointError,
    ConfigError,
    DbrdistError,
    NonFiniteLossError,
    StopRequested,
)
from dbrdist.function_hooks import CUDAProfileRanges
from dbrdist.function_hooks.profiler import profile
from dbrdist.training import StandardUpdater, Trainer, extensions
from dbrdist.training.extensions import snapshot_writers, snapshots
from dbrdist.training.runs import RECIPE, set_constants
from dbrdist.training.triggers import AnyTrigger, EndTrigger, MaxValueTrigger, MinValueTrigger

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase


class TrainingRun:
    """One run of training on this rank."""

    def __init__(
        self, config: Config, origin: Origin, comm: CommunicatorBase, console: Console, warned: Warned, *,
        continues: bool,
    ):  # fmt: skip
        self.config, self.origin = config, origin
        self.comm = comm
        self.console, self.warned = console, warned
        self.folder = RunFolder(config.out)
        self.test_iterator: Any = None
        self.stop = StopOnRequest(comm, save=None if config.batch_finder else self._save)
        self.stop.initialize(None)  # from now on, not only from the first step
        try:
            self._make(continues)
        except BaseException:
            self.stop.finalize()
            raise

    def _make(self, continues: bool) -> None:
        config, origin, comm = self.config, self.origin, self.comm
        find = build.find_images(config, origin, comm)
        # a snapshot has all weights: the file of the first ones may be gone by now
        has_weights = on_root(comm, lambda: continues and bool(snapshots.find(config.out)))
        with alike(comm):
            made_of = config.model_copy(update={"init_from": None}) if has_weights else config
            self.parts = parts(made_of, origin, comm.intra_rank, comm.size, find)
            preflight.check(config, origin, self.parts)
        sharing = share_gpus(config, origin, comm)
        with alike(comm):
            on_gpu = self.parts.device is not None  # where each rank has memory of its own
            self.free_on_gpu = memory.free_on_gpu() if on_gpu else None
            self.need = memory.measure(config, origin, self.parts) if comm.rank == 0 or on_gpu else None
            batch_norm.share(config, origin, self.parts.task, comm)
            self.optimizer = build_updates.optimizer(config, origin, self.parts.task)
            self.iterator = iterator(config, self.parts.data.train, comm, train=True)
        check_shares(comm, self.iterator)
        comm.bcast_data(self.parts.task)
        self.local = LocalState(comm, self.parts.task, self.iterator, self._data_facts())
        self.agreement = StepAgreement(comm, self.iterator, shares_time=uses_time(config.snapshot.every))
        self.average = average_of(config, self.parts.task, len(self.parts.data.train))
        self.saver = SharedSnapshot(
            comm, extensions.snapshot(n_retains=config.snapshot.keep, writer=self._writer()), self.local
        )
        self.range_test = range_test_of(config)
        self.best_trigger: Any = None
        self.trainer = self._trainer()
        self.plan = describe(planned(config), self.parts, comm.size)
        if sharing:
            self.plan.append(sharing)
        if on_gpu and comm.size > 1 and not isinstance(comm, NcclCommunicator):
            self.plan.append(
                cost_of_staging(sum(p.lend().nbytes for p in self.parts.task.params(include_uninit=False)))
            )
        if comm.rank == 0:
            self.plan += memory.sentence(self.need, config, comm.size, comm.intra_size, self.parts.device)

    def _save(self, trainer: Trainer) -> None:
        self.saver.save(trainer)

    def _data_facts(self) -> dict[str, Any]:
        """What a snapshot says of the data that the network has learned."""
        return resume.data_facts(self.parts.data)

    def _trainer(self) -> Trainer:
        config, comm, end = self.config, self.comm, end_of(self.config, self.range_test)
        updater = self._updater()
        trainer = Trainer(updater, end, out=config.out)
        optimizer = updater.get_optimizer("main")
        exposes = comm.size > 1 and hasattr(optimizer, "exposed_seconds")
        self.meter = Meter(self.iterator.num_per_epoch, updater, optimizer if exposes else None, self.parts.device)
        trainer.extend(self.agreement)
        trainer.extend(self.local)
        if config.audit:
            trainer.extend(AuditLog(comm, self.iterator))
        if config.parameter_audit is not None:
            trainer.extend(ParameterAudit(comm), trigger=interval(config.parameter_audit))
        for scheduled in build_updates.scheduled(config, self.origin, self.optimizer, self.parts.task):
            if self.range_test is None or scheduled.target != "lr":
                trainer.extend(extensions.FollowSchedule(*scheduled))
        if self.average is not None:
            trainer.extend(self.average)
        if self.range_test is None:
            self._evaluation(trainer, end)
        else:
            trainer.extend(self.range_test)
        for extension, trigger in build.extensions(config, self.origin):
            trainer.extend(extension, trigger=trigger)
        if comm.rank == 0:
            self._reports(trainer, AnyTrigger(interval(config.log.every), end))
        if self.range_test is None:
            self._snapshots(trainer, end)
        trainer.extend(self.stop)
        num_epochs = epochs_of(planned(config), self.iterator.num_per_epoch)
        trainer.extend(RankState(self.folder.file(RANKS), self.meter, comm, num_epochs))
        if beats.expected():
            trainer.extend(beats.ProgressBeat())
            trainer.extend(beats.Resume())
        return trainer

    def _updater(self) -> StandardUpdater:
        config, made = self.config, self.parts
        if config.virtual_workers is not None:
            options = {"converter": made.convert, "input_device": made.device, "reproducible": config.reproducible}
            options |= {"grad_dtype": config.gradient_dtype}
            build_updates.warn_of_graph(config, self.comm)
            return VirtualUpdater(self.iterator, self.optimizer, self.comm, **options)
        self.comm.set_config("allreduce_grad_dtype", config.gradient_dtype)
        together_optimizer = build_updates.over_ranks(config, self.optimizer, self.comm)
        return build_updates.updater(config, self.origin, self.iterator, together_optimizer, made.convert, made.device)

    def _evaluation(self, trainer: Trainer, end: EndTrigger) -> None:
        config = self.config
        if self.parts.data.test is not None:
            if config.batch_norm.statistics == "recalibrated":
                measured: Any = batch_norm.recalibration(config, self.parts, self.comm)
                measured = measured if self.average is None else self.average.around(measured)
                trainer.extend(measured, name="recalibration", trigger=AnyTrigger(evaluations(config), end))
            elif config.virtual_workers is None:
                average = AverageStatistics(self.comm, self.parts.task)
                trainer.extend(average, trigger=AnyTrigger(evaluations(config), end))
            shown = self._test_examples()
            evaluation = evaluator(self.config, self.parts, self.comm, shown and shown.begin)
            self.test_iterator = evaluation.get_iterator("main")
            check_shares(self.comm, self.test_iterator, "test")
            called = evaluation if self.average is None else self.average.around(evaluation)
            trainer.extend(called, name="validation", trigger=AnyTrigger(evaluations(config), end))
            if shown is not None:
                trainer.extend(shown, trigger=AnyTrigger(evaluations(config), end))

    def _test_examples(self) -> ShowTestExamples | None:
        """The extension that writes test images with predictions; None where the run classifies no images."""
        if not self.config.log.examples or self.parts.data.num_classes is None:
            return None
        path = self.folder.file(TEST_EXAMPLES)
        return ShowTestExamples(
            self.parts.task, self.comm, self.config.log.examples, path, self.parts.data.classes, self.say
        )

    def _snapshots(self, trainer: Trainer, end: EndTrigger) -> None:
        settings = self.config.snapshot
        if settings.best is not None:  # first: what is saved next knows that this one was the best
            highest = settings.mode == "max" or (settings.mode == "auto" and "accuracy" in settings.best)
            often = AnyTrigger(evaluations(self.config), end)
            trigger: Any = (MaxValueTrigger if highest else MinValueTrigger)(settings.best, often)
            best = SharedSnapshot(self.comm, extensions.snapshot(filename=BEST, writer=self._writer()), self.local)
            trainer.extend(best, name="best", trigger=trigger)
            self.best_trigger = trigger
        every = [trigger_of(period, self.agreement) for period in settings.every.split(" or ")]
        trainer.extend(self.saver, trigger=AnyTrigger(*every, end))

    def _writer(self) -> Any:
        """Who writes a snapshot: a thread beside the training, or None for the training itself."""
        return snapshot_writers.ThreadWriter() if self.config.snapshot.background else None

    def _reports(self, trainer: Trainer, trigger: Any) -> None:
        self.log = extensions.LogReport(trigger=trigger, postprocess=self.meter)
        if hasattr(self.optimizer, "lr"):
            trainer.extend(extensions.observe_value("lr", lambda _: self.optimizer.lr), trigger=(1, "iteration"))
        trainer.extend(self.log)
        loggers.extend(trainer, self.config, self.console.warn)
        is_evaluated = self.parts.data.test is not None and self.range_test is None
        table = columns(is_evaluated, are_classes=bool(self.parts.data.num_classes))
        trainer.extend(extensions.PrintReport(table, out=self.console))
        live = self.comm.size == 1 and sys.stdout.isatty()
        every = {"out": None, "live": True, "min_seconds": 0.1} if live else {"out": self.console, "min_seconds": 10.0}
        progress = extensions.ProgressBar(update_interval=1, details=self.meter.words, **{"live": False, **every})
        trainer.extend(progress)

    # ---- the run ----

    def start_folder(self, mode: str) -> bool:
        """Take the run's folder, and continue from its newest snapshot if `mode` is `resume`. Collective.

        False where no step follows that snapshot: the folder is given back as it was.
        """
        try:
            path, changes = on_root(self.comm, lambda: self._open_folder(mode))
            if path is not None:
                with alike(self.comm):
                    try:
                        snapshots.load(path, self.trainer)
                    except CheckpointError as error:
                        raise CheckpointError(f"{error}{resume.unfit(changes)}") from error
                    compare_classes(self.local.saved_data.get("classes"), self.parts.data.classes, self.origin)
                    resume.apply(changes, self.optimizer, self.config)
                    goal = self.trainer.stop_trigger
                    measured = changes + resume.data_changes(self.local.saved_data, self._data_facts(), changes)
                    forgotten = list(resume.forget_best(measured, self.config, self.best_trigger, goal))
                    if not any(re.match(r"model\b", change.key) for change in changes):
                        set_constants(self.parts.task, self.local.saved_constants)
                if self._is_over(changes):
                    self._leave_alone(path, changes)
                    return False
            known = facts(self.comm)
            on_root(self.comm, lambda: self._describe_run(known, path))
        except (DbrdistError, OSError) as error:
            self.folder.close()
            nameless = isinstance(error, OSError) and error.filename is None  # of a full disk
            words = f"{self.folder.path}: {said(error)}" if nameless else None
            raise Refused(told(error, words), code_of(error)) from error
        except BaseException:
            self.folder.close()
            raise
        self.meter.start()
        if path is not None:
            self.say(f"continuing from {path}, epoch {self.trainer.updater.epoch_detail:.2f}")
            for change in changes:
                self.say(f"  {change}")
            for words in forgotten:
                self.say(f"  {words}")
        return True

    def _is_over(self, changes: list[resume.Change]) -> bool:
        """Whether the run in the folder has come to its end, and was told so or would only be told something untrue."""
        was_told = self.comm.bcast_obj(self.folder.summary.get("status") == "finished")
        return self.trainer.stop_trigger(self.trainer) and bool(changes or was_told)

    def _leave_alone(self, path: str, changes: list[resume.Change]) -> None:
        steps = counted(self.trainer.updater.iteration, "step")
        self.say(f"{path} is the end of this run, after {steps}: no steps are left, and nothing was changed")
        for change in changes:
            self.say(f"  not used: {change.key} {resume.shown(change.new)}, the run had {resume.shown(change.old)}")
        self.folder.close()

    def _open_folder(self, mode: str) -> tuple[str | None, list[resume.Change]]:
        """On one rank: the snapshot to continue from, and what the configuration changes."""
        self.folder.open(mode)
        if mode != "resume":
            return None, []
        if self.folder.summary.get("reason"):
            status, reason = self.folder.summary["status"], self.folder.summary["reason"]
            self.console.say(f"the last start of this run {status}: {reason}")
        path, damaged = snapshots.search(self.config.out)
        if path is None:
            if damaged:
                raise ConfigError(resume.only_damaged(self.config.out, damaged))
            self.console.say(f"no snapshot in {self.config.out}: starting from the beginning")
            return None, []
        for other, words in damaged.items():
            self.console.say(f"{other} is damaged and was skipped: {words}")
        changes = resume.changes(self.folder.file(CONFIG), self.config, self.origin)
        check_classes(self.folder.file(RECIPE), self.parts.data.classes, self.origin)
        return path, changes

    def _describe_run(self, known: dict[str, Any], resumed_from: str | None) -> None:
        """On one rank: write what the run is. From here on the folder tells the truth about this run."""
        config, folder = self.config, self.folder
        folder.set_apart_damaged(resumed_from)
        text = described(config, self.origin)
        write_atomically(folder.file(CONFIG), lambda file: file.write(text.encode()))
        recipe = {**strict_json.kept(self.parts.recipe), "dtype": config.dtype, "classes": self.parts.data.classes}
        write_json(folder.file(RECIPE), recipe)
        before = earlier_starts(folder.summary)
        folder.summary = {}
        began = {"began": now(), "resumed_from": resumed_from, "configurations": list(self.origin.files)}
        folder.write_status("running", **began, **known, earlier_starts=before)
        empty_states(folder.file(RANKS))
        self.console.open(folder.file(WORDS), known["command"])

    def train(self, traces: bool, profiles: bool = False) -> int:
        """Train to the end, or to an agreed stop; returns the exit code. The folder says how it ended."""
        if profiles:
            return self._train_profiled()
        tracer = trace.Trace(self.comm) if traces else None
        if tracer is not None:
            tracer.start()
        began, ending, code, process = time.monotonic(), ("failed", "the run did not finish"), 0, os.getpid()
        try:
            # what overflows shows in the loss, which is looked at after each step; a warning would not say more
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                if self.config.batch_finder is None:
                    self.trainer.run(show_loop_exception_msg=False)
                else:
                    batch_finder.find(self)
            ending = "finished", getattr(self.trainer.stop_trigger, "reason", None)
            if ending[1] is not None:
                self.say(ending[1])
        except StopRequested as request:
            self.say(str(request))
            ending, code = ("stopped", str(request)), INTERRUPTED if request.signal == signal.SIGINT else STOPPED
        except BaseException as error:
            if self._ends_a_test(error):
                ending = "finished", reason_of(error)
            else:
                ending = "failed", reason_of(error)
                memory.note_batch(error, self.need, self.config, self.comm.size, self.free_on_gpu)
                raise as_ending(error, self.folder, self.config.snapshot.background and self.comm.rank == 0) from error
        finally:
            if ending[0] == "failed" and os.getpid() == process:  # not in a child that somebody's code has forked
                if tracer is not None:
                    tracer.stop()
                self.warned.say_own()
                self._end(*ending, time.monotonic() - began, {})
        if tracer is not None:
            self._write_trace(tracer)
        skipped = self._skipped()
        self.warned.gather(self.comm)
        self._end(*ending, time.monotonic() - began, skipped)
        return code

    def _ends_a_test(self, error: BaseException) -> bool:
        """Whether an error is the end that a range test may well come to; every rank has it."""
        test = self.range_test
        return isinstance(error, NonFiniteLossError) and test is not None and len(test.losses) >= FEWEST_STEPS

    def _train_profiled(self) -> int:
        """Train with a profile of functions and layers, which the trace shows as well."""
        with profile(0.02) if self.parts.device is None else CUDAProfileRanges(0.02) as found:
            code = self.train(traces=True)
        if self.comm.rank == 0:
            for line in found.lines():
                self.say(line)
        return code

    def _write_trace(self, tracer: trace.Trace) -> None:
        """On rank 0: the trace of all ranks, and what it says. Collective."""
        ranks = tracer.finish()
        if ranks is None:
            return
        for line in trace.summarize(ranks).lines():
            self.say(line)
        try:
            trace.write(self.folder.file(TRACE), ranks)
        except OSError as error:  # as with the report, the run has come to its end
            self.say(f"{self.folder.path}: the trace could not be written: {error.strerror}")

    def _skipped(self) -> dict[str, Any]:
        """The examples that were left out, each named once. Collective."""
        found: dict[str, Any] = {}
        for part, mine in (("", self.local.skipped), ("test_", getattr(self.test_iterator, "skipped", []))):
            named = list(dict.fromkeys(words for theirs in self.comm.allgather_obj(mine) for words in theirs))
            found |= {f"num_skipped_{part}examples": len(named), f"skipped_{part}examples": named[:1000]}
        return found

    def _end(self, status: str, reason: str | None, seconds: float, skipped: dict[str, Any]) -> None:
        """On rank 0: say and write how the run ended, and give the folder back."""
        if self.comm.rank == 0:
            results = {**self.results(seconds), **skipped, "ended": now()}
            try:
                self.folder.write_status(status, reason, **results)
            except OSError as error:
                self.say(f"{self.folder.path}: the summary could not be written: {error.strerror}")
            if self.range_test is not None and status == "finished":
                self._finish_test(self.range_test)
            if status == "failed":
                self.console.log(f"failed: {reason}")
            else:
                self._say_end(self.folder.summary)
            self._write_report()
            self.console.close()
        self.folder.close()

    def _finish_test(self, test: RangeTest) -> None:
        try:
            test.finish(self.folder.path, self.say)
        except OSError as error:
            self.say(f"{self.folder.path}: the range test could not be written: {said(error)}")

    def results(self, seconds: float) -> dict[str, Any]:
        """What the run came to."""
        updater = self.trainer.updater
        last = self.log.log[-1] if self.log.log else {}
        return {
            "epochs": updater.epoch_detail,
            "iterations": updater.iteration,
            "seconds": seconds,
            "seconds_over_all_starts": self.trainer.elapsed_time if self.config.batch_finder is None else seconds,
            "metrics": {key: value for key, value in last.items() if "/" in key},
            "num_parameters": self.parts.task.count_params(),
            "batch": self.config.batch_size,
            "seed": self.config.seed,
            **({} if self.parts.device is None else {"device_memory_bytes": peak_bytes()}),
        }

    def _write_report(self) -> None:
        try:
            report.write([self.folder.path])
        except Exception as error:  # a report that cannot be drawn must not make a failure of the run
            self.say(f"{self.folder.path}: the report could not be written: {said(error)}")

    def announce(self) -> None:
        """What is going to be trained."""
        for line in self.plan:
            self.say(line)

    def _say_end(self, summary: dict[str, Any]) -> None:
        for part, words in (("", "training"), ("test_", "test")):
            number = summary[f"num_skipped_{part}examples"]
            if number:
                self.say(f"{counted(number, f'corrupt {words} example')} left out, see {self.folder.path}")
        if summary["iterations"] % self.config.accumulate and summary["status"] == "finished":
            self.say(left_over(self.config, summary["iterations"]))
        best = self.config.snapshot.best
        is_training = self.range_test is None and self.config.batch_finder is None
        if best is not None and is_training and not os.path.exists(self.folder.file(BEST)):
            is_nan = any(best in line for line in self.log.log)
            reason = f"{best!r} was NaN each time" if is_nan else f"nothing was observed as {best!r}"
            self.say(f"snapshot.best: no {BEST} was saved, because {reason}")
        epochs = counted(f"{summary['epochs']:.4g}", "epoch")
        done = f"{epochs}, {counted(summary['iterations'], 'step')}"
        done = f": {done}" if self.config.batch_finder is None else ""
        self.say(f"{summary['status']}{done} in {summary['seconds']:.1f} s; everything is in {self.config.out}")
        accuracy = summary["metrics"].get("validation/main/accuracy")
        if accuracy is not None:
            self.say(f"test accuracy {percent(accuracy)}")

    def say(self, words: str) -> None:
        """Print once."""
        if self.comm.rank == 0:
            self.console.say(words)
