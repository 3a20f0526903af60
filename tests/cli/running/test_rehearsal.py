"""What a rehearsal predicts, against formulas that are worked out here."""

import os

import numpy as np
import pytest

from dbrdist.cli.running import rehearsal
from tests.cli.config_helpers import configured
from tests.each import each

HERE = rehearsal.Measured(1_000_000, 4_000_000, 0.01, None)
WITHIN = 4_000_000 * 1.1e-3 / 2**23  # 16 MiB between two ranks take 1.1 ms


def folder(*lines):
    return configured("model: {name: resnet20, num_classes: 10}", "data: {name: image_folder, root: x}", *lines)[0]


def batch(config, text):
    return type(config).model_validate(config.model_dump(mode="python") | {"batch": text})


@each(
    **{
        "words, ranks, per_host, computation, between": [
            ((), 8, 8, 4, 0.0),
            ((), 8, 4, 4, 4_000_000 * 8 / 1e9 + 2 * 50e-6),
            ((), 8, 2, 4, 2 * 3 / 4 * 4_000_000 * 8 / 1e9 + 6 * 50e-6),
            ((), 2, 2, 16, 0.0),
            ((), 8, 1, 4, 2 * 7 / 8 * 4_000_000 * 8 / 1e9 + 14 * 50e-6),
            (("gradient_dtype: float16",), 8, 4, 4, 2_000_000 * 8 / 1e9 + 2 * 50e-6),
            ((), 3, 1, 11, 4 / 3 * 4_000_000 * 8 / 1e9 + 4 * 50e-6),  # the busiest has 11 of 32
        ]
    }
)
def test_the_time_of_a_step(words, ranks, per_host, computation, between):
    config = batch(folder(*words), 32)
    job = rehearsal.TargetJob(ranks, per_host, 1.0, 50.0)
    found = rehearsal.predict(config, job, HERE)
    communication = between + (WITHIN if per_host > 1 else 0.0)
    assert found.computation == pytest.approx(0.01 * computation)
    assert found.communication == pytest.approx(communication)
    assert found.step == pytest.approx(0.01 * computation + max(communication - 2 / 3 * 0.01 * computation, 0))


@each(**{"is_reproducible, senders, messages": [(False, 1, 2), (True, 4, 14)]})
def test_virtual_workers_hide_nothing_and_reproducible_sums_are_sent_by_all_ranks(is_reproducible, senders, messages):
    workers = {"virtual_workers": 16, "per_worker": 2}
    config = batch(folder(), workers).model_copy(update={"reproducible": is_reproducible})
    found = rehearsal.predict(config, rehearsal.TargetJob(8, 4, 1.0, 50.0), HERE)
    between = senders * 4_000_000 * 8 / 1e9 + messages * 50e-6
    assert found.communication == pytest.approx(between + WITHIN)
    assert found.step == pytest.approx(4 * 0.01 + between + WITHIN)


def test_the_update_hides_nothing():
    measured = HERE._replace(update_seconds=0.5)
    found = rehearsal.predict(batch(folder(), 32), rehearsal.TargetJob(8, 1, 0.001, 50.0), measured)
    assert found.computation == pytest.approx(0.54)
    assert found.step == pytest.approx(0.54 + found.communication - 2 / 3 * 0.04)


def test_small_images_take_less_of_the_run():
    """Half of the side in 6 of 10 epochs: a quarter of the work there."""
    transforms = "transforms: {train: [{name: random_resized_crop, size: [[0, 16], [6, 32]]}]}"
    config = batch(folder(transforms), 32)
    steps, seconds = rehearsal.whole_seconds(config, rehearsal.TargetJob(1, 1), HERE, 320)
    assert steps == 100
    assert seconds == pytest.approx(60 * 32 * 0.01 / 4 + 40 * 32 * 0.01)
    steps, seconds = rehearsal.whole_seconds(batch(folder(), 32), rehearsal.TargetJob(1, 1), HERE, 320)
    assert (steps, seconds) == (100, pytest.approx(100 * 32 * 0.01))


def test_the_slowest_rank_counts_and_the_speed_says_how_it_was_measured():
    times = rehearsal.calibration.Times((0.5, 1.0), (0.1,), 4, 2, 3)
    job = rehearsal.TargetJob(16, 8)
    words = (
        "measured here by 2 processes at the same time, 3 threads each, as this machine has no cores for 8, in 2 steps "
    )
    assert rehearsal._source(times, job) == words + "of 4 images: 4 to 8, the slowest rank's counts"
    alone = rehearsal._source(times._replace(num_processes=1), job)
    assert alone.startswith("measured here by one process with all of its threads, in 2 steps")


@each(**{"workers, ranks, copies": [(8, 8, 1), (8, 4, 1), (8, 2, 2), (8, 1, 3), (9, 1, 4), (None, 1, 0)]})
def test_sums_over_the_workers_of_a_rank_need_memory(workers, ranks, copies):
    """As many as a binary counter over them has digits, as in the sum itself."""
    given = 32 if workers is None else {"virtual_workers": workers, "per_worker": 2}
    assert rehearsal._num_copies(batch(folder(), given), ranks) == copies
    assert rehearsal._num_copies(batch(folder("ema: 0.9"), given), ranks) == copies + 1


@pytest.mark.slow
def test_memory_and_time_are_those_of_the_largest_images(monkeypatch):
    monkeypatch.setattr(rehearsal.calibration, "_SECONDS", 0.0)

    def measured(size):
        normalize = "{name: normalize, mean: [0.5], std: [0.2]}"
        crop = f"transforms: {{train: [{{name: random_resized_crop, size: {size}}}, {normalize}]}}"
        model = "model: {name: resnet20, num_classes: 10}"
        config, origin = configured(model, "data: {name: image_folder, root: x}", crop, "optimizer: lars")
        return rehearsal.measure(config, origin, rehearsal.TargetJob(1, 1))

    growing, small, large = measured("[[0, 16], [1, 64]]"), measured("16"), measured("64")
    assert growing.memory_bytes == pytest.approx(large.memory_bytes, rel=0.05)
    assert small.memory_bytes < large.memory_bytes / 2
    assert large.seconds_per_example > 0
    assert large.update_seconds > 0


def test_the_trial_goes_to_no_service_and_is_no_range_test(tmp_path):
    words = ("lr_finder: {steps: 50}", "log: {csv: true, wandb: {project: p}, mlflow: {run_name: n}}")
    config, origin = configured(
        "model: {name: resnet20, num_classes: 10}", "data: {name: image_folder, root: x}", *words
    )
    found = rehearsal.small(config, origin, str(tmp_path), rehearsal.Trial())
    assert (found.log.wandb, found.log.mlflow, found.log.csv, found.lr_finder) == (None, None, True, None)
    assert (found.batch, found.iterations, found.out, found.log.every) == (16, 3, f"{tmp_path}/run", "1 iteration")


def test_a_trial_is_small_and_of_one_process(tmp_path):
    """8 workers of 2 images of 64 pixels in 3 steps; what needs other ranks, services or a long run is left out."""
    words = (
        "transforms: {train: [{name: random_resized_crop, size: [[0, 96], [1, 128]]}, random_flip], "
        "test: [{name: resize, size: 256}, {name: center_crop, size: 224}]}",
        "snapshot: {best: main/loss, every: 2 epochs}", "evaluation: {every: 2 epochs, offset: 1, batch: 7}",
        "batch_norm: {group: 2, statistics: recalibrated}", "stop: {metric: main/loss, patience: 2}", "local_steps: 4",
    )  # fmt: skip
    model = "model: {name: resnet20, num_classes: null}"
    config, origin = configured(model, "data: {name: image_folder, root: x, train: a, test: b}", *words)
    found = rehearsal.small(config, origin, str(tmp_path), rehearsal.Trial())
    before, after = config.model_dump(), found.model_dump()
    changed = {key: value for key, value in after.items() if value != before[key]}
    assert [one["size"] for part in ("train", "test") for one in changed["transforms"][part] if "size" in one] == [
        64, 73, 64,
    ]  # fmt: skip
    assert (changed["data"]["root"], changed["data"]["train"], changed["data"]["test"]) == (
        str(tmp_path),
        "train",
        "test",
    )
    assert changed["model"]["num_classes"] == 1000
    assert (changed["snapshot"]["best"], changed["snapshot"]["every"]) == (None, "1 epoch")
    assert changed["evaluation"] == {**before["evaluation"], "batch": None, "every": "1 epoch", "offset": 0.0}
    assert changed["batch_norm"] == {**before["batch_norm"], "group": 1, "batches": 1}
    assert (changed["batch"], changed["iterations"], changed["stop"], changed["local_steps"]) == (16, 3, None, 1)
    names = {"transforms", "data", "model", "snapshot", "evaluation", "batch_norm", "batch", "iterations", "stop"}
    assert set(changed) == names | {"local_steps", "log", "out"}
    workers = rehearsal.small(batch(configured(model, "data: {name: image_folder, root: x}")[0],
                                    {"virtual_workers": 100, "per_worker": 9}), origin, str(tmp_path),
                              rehearsal.Trial(3, 5, 40))  # fmt: skip
    assert workers.batch.model_dump() == {"virtual_workers": 3, "per_worker": 5}


@each(test=[None, "val"])
def test_the_trial_has_a_test_where_the_run_has_one(tmp_path, test):
    """Where it has none, made-up photographs of another size than those for training were given to the network."""
    words = f"data: {{name: image_folder, root: x, test: {test or 'null'}}}"
    config, origin = configured("model: {name: resnet20, num_classes: 10}", words)
    found = rehearsal.small(config, origin, str(tmp_path), rehearsal.Trial())
    assert (found.data.test is None) == (test is None)


@pytest.mark.slow
@each(**{"batch, num_train": [(0, 8), (15, 8), (30, 15), (31, 16)]})
def test_there_are_photographs_for_two_batches_of_training(tmp_path, batch, num_train):
    """At least 8 in each of 4 classes; the test set has no more than that."""
    rehearsal.make_photographs(str(tmp_path / str(batch)), batch)
    for part, number in (("train", num_train), ("test", 8)):
        assert [len(os.listdir(tmp_path / str(batch) / part / f"class{k}")) for k in range(4)] == [number] * 4


@pytest.mark.slow
@each(**{"words, copies": [((), 0), (("ema: 0.9",), 1)]})
def test_memory_has_the_parameters_and_their_copies(monkeypatch, words, copies):
    """Beside what a step needs: 1000 bytes and 10 for each of the 16 examples of a rank."""
    monkeypatch.setattr(rehearsal.memory, "measure", lambda *args: rehearsal.memory.Need(1000.0, 10.0))
    config, origin = configured(
        "model: {name: resnet20, num_classes: 10}", "data: {name: image_folder, root: x}",
        "transforms: {train: [{name: random_resized_crop, size: 16}]}", *words,
    )  # fmt: skip
    job = rehearsal.TargetJob(2, 2, examples_per_second=100.0)
    found = rehearsal.measure(batch(config, 32), origin, job)
    assert found.gradient_bytes == 4 * found.num_parameters > 1_000_000
    assert found.memory_bytes == 1000 + 10 * 16 + (1 + copies) * found.gradient_bytes


# 32 examples of 10 ms on 16 ranks of 4 hosts, of which each step sends 4 MB: 2 * 3/4 * 4 MB of 8 bits at 1 Gbit/s are
# 48 ms between hosts, with 6 messages of 20 us, and 4 MB within a host are 0.52 ms. Behind 2/3 of 20 ms they hide.
SAID = """\
ranks: 16 on 4 hosts, 4 on each
batch: 32, that is 2 examples per rank
data: 1,000 examples; 320 steps, 32 per epoch
lr: 0 at the start, 0.1 at most (epoch 2), 0.01 at the end
size: 16 at the start, 32 at most (epoch 6), 32 at the end
reduction: 1,000,000 parameters, 4.0 MB; a ring over all ranks sends 7.50 MB per rank and step, 3.75 in 16 bits
memory: about 2.50 GB per rank beside the process, 4 on each host
computation: 0.022 s per step, at 100 examples/s per rank (measured here by 2 processes at the same time, 1 thread \
each, as this machine has no cores for 4, in 2 steps of 4 images: 50 to 100, the slowest rank's counts)
communication: 0.04864 s per step, at 1 Gbit/s and 20 us between hosts
step: 0.05731 s with the largest images (0.05731 to 0.06498 with the fastest and the slowest step measured here), \
558 examples/s, efficiency 38 %; 17.4 s in all, without evaluations"""
# Nothing hides behind virtual workers: 20 ms, and 2/3 of 4 MB of 0.32 ms each at 100 Gbit/s with 4 messages of 5 us.
SAID_OF_WORKERS = """\
ranks: 3 on 3 hosts, 1 on each
batch: 12, that is 4 examples per rank; 6 virtual workers of 2
data: 100 examples; 80 steps, 8 per epoch
lr: 0.01 at the start, 0.01 at most (epoch 0), 0.01 at the end
reduction: 1,000,000 parameters, 4.0 MB; a ring over all ranks sends 5.33 MB per rank and step, 2.67 in 16 bits
computation: 0.04 s per step, at 100 examples/s per rank (given)
communication: 0.0004467 s per step, at 100 Gbit/s and 5 us between hosts
step: 0.04045 s, 297 examples/s, efficiency 99 %; 3.2 s at most, without evaluations"""


def said(monkeypatch, measured, job, num_examples, words, given):
    monkeypatch.setattr(rehearsal, "measure", lambda config, origin, job: measured)
    model = "model: {name: resnet20, num_classes: 10}"
    config, origin = configured(model, "data: {name: image_folder, root: x}", *words)
    return "\n".join(rehearsal.describe(batch(config, given), origin, job, num_examples))


def test_all_that_a_rehearsal_says(monkeypatch):
    """Half of the side takes a quarter of the work: 192 steps of 52.3 ms, and 128 of 57.3 ms."""
    times = rehearsal.calibration.Times((0.04, 0.08), (0.002, 0.003), 4, 2, 1)
    measured = rehearsal.Measured(1_000_000, 4_000_000, 0.01, 2.5e9, 0.002, times)
    words = (
        "transforms: {train: [{name: random_resized_crop, size: [[0, 16], [6, 32]]}]}",
        "optimizer: {name: momentum_sgd, lr: 0.1, schedule: {name: step, milestones: [5], warmup_epochs: 2}}",
    )  # fmt: skip
    assert said(monkeypatch, measured, rehearsal.TargetJob(16, 4, 1.0, 20.0), 1000, words, 32) == SAID
    words = ("optimizer: {name: sgd, lr: 0.01}", "stop: {metric: main/loss, patience: 2}", "last_batch: drop")
    given = {"virtual_workers": 6, "per_worker": 2}
    words = (*words, "gradient_dtype: float16")
    assert said(monkeypatch, HERE, rehearsal.TargetJob(3, 1), 100, words, given) == SAID_OF_WORKERS


@each(
    **{
        "seconds, words": [
            (0.04, "0.0 s"), (119.94, "119.9 s"), (120, "2.0 minutes"), (7199, "120.0 minutes"), (7200, "2.0 hours"),
            (360_000, "100.0 hours"),
        ]
    }
)  # fmt: skip
def test_a_duration_in_its_unit(seconds, words):
    assert rehearsal._duration(seconds) == words


def test_the_made_up_photographs(tmp_path):
    """Blocks of 40 pixels in 6 rows and 8 columns, of other colours in each; quality 90 divides 121 by five."""
    image = pytest.importorskip("PIL.Image", reason="Pillow, which reads the pictures, is not installed")
    rehearsal.make_photographs(str(tmp_path))
    seen = []
    for part in ("train", "test"):
        for label in range(4):
            for i in (0, 7):
                with image.open(tmp_path / part / f"class{label}" / f"{i}.jpg") as picture:
                    assert picture.size == (320, 240) and max(picture.quantization[0]) == 24
                    pixels = np.asarray(picture.convert("RGB"), int)
                blocks = pixels.reshape(6, 40, 8, 40, 3)[:, 16:24, :, 16:24].transpose(0, 2, 1, 3, 4).reshape(48, 64, 3)
                assert np.ptp(blocks, 1).max() < 8  # one colour each
                seen.append(blocks.mean(1))
    colours = np.concatenate(seen)
    assert colours.min() < 15 and colours.max() > 240
    for k, one in enumerate(seen):
        assert all(abs(one - other).mean() > 20 for other in seen[:k])
