"""The 22 golden numbers of large-batch training: where each is tested, and those that are tested here.

They are closed forms of the papers' formulas and entries of published logs, none of them computed with dbrdist.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Parameter, optimizers
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.datasets import TupleDataset
from dbrdist.iterators import SerialIterator
from dbrdist.optimizers import schedules
from tests.each import each

TESTS = Path(__file__).parents[1]
HERE = "examples/test_imagenet_numbers.py"
INDEX = {
    1: ("optimizers/test_schedules.py", "test_akibas_slow_start"),
    2: ("optimizers/test_schedules.py", "test_the_share_of_sgd_rises_exponentially_to_one_half",
        "test_the_share_of_sgd_after_the_centre",
        "test_the_share_of_sgd_is_smooth_at_the_centre_and_continuous_at_its_end"),
    3: ("optimizers/test_rmsprop_warmup.py", "test_the_rate_of_rmsprop_does_not_follow_lr"),
    4: ("optimizers/test_rmsprop_warmup.py", "test_the_first_updates_of_the_paper"),
    5: ("optimizers/test_rmsprop_warmup.py", "test_with_a_whole_share_it_is_momentum_sgd",
        "test_without_a_share_the_first_update_does_not_depend_on_the_size_of_the_gradient"),
    6: ("optimizers/test_schedules.py", "test_goyals_gradual_warm_up_at_a_batch_of_8192"),
    7: (HERE, "test_momentum_correction"),
    8: ("optimizers/test_schedules.py", "test_ffcvs_rates_are_those_of_its_published_log",
        "test_mlperfs_polynomial_begins_at_the_end_of_the_warm_up", "test_a_cosine_begins_at_the_end_of_the_warm_up"),
    9: ("optimizers/test_lars.py", "test_the_trust_ratio", "test_trust_is_one_without_a_norm_and_vectors_do_not_decay"),
    10: (HERE, "test_gradients_of_ranks_are_those_of_one", "test_scaling_the_loss_is_not_scaling_the_rate"),
    11: ("comm/virtual_contract.py", "check_steps_are_those_of_one_process_that_adds_gradients_of_small_batches"),
    12: ("comm/test_gradient_rounding.py", "test_averaging_the_statistics_of_batches_is_not_pooling_them"),
    13: ("models/test_resnet.py", "test_zero_gamma_makes_blocks_their_shortcuts"),
    14: ("models/test_resnet.py", "test_resnet50_has_the_known_size"),
    15: ("models/test_resnet.py", "test_stride_lies_where_it_is_asked_for", "test_last_map_has_7_rows"),
    16: (HERE, "test_each_index_once_per_epoch_on_any_number_of_ranks"),
    17: ("comm/test_gradient_rounding.py", "test_the_mean_of_equal_gradients_is_exact_for_powers_of_two",
         "test_float16_rounds_once_whatever_the_size"),
    18: ("functions/test_loss.py", "test_a_loss_of_1000_classes_lies_between_its_floor_and_that_of_no_knowledge"),
    19: ("datasets/image/test_transforms.py", "test_random_resized_crop_covers_the_stated_areas_and_ratios",
         "test_augmentation_changes_with_seed_epoch_and_sample_alone"),
    20: (HERE, "test_as_many_updates_as_steps"),
    21: ("cli/test_virtual_ranks.py", "test_a_killed_run_of_akibas_recipe_goes_on_with_the_same_bits"),
    22: ("cli/test_imagenet_recipes.py", "test_traffic_of_a_ring"),
}  # fmt: skip


@pytest.mark.parametrize("number", range(1, 23))
def test_the_index_names_tests_that_there_are(number):
    file, *names = INDEX[number]
    text = (TESTS / file).read_text()
    assert [name for name in names if not re.search(rf"^def {name}\(", text, re.MULTILINE)] == []


# ---- 7 ---------------------------------------------------------------------------------------------------------------


def test_momentum_correction():
    """m = 0.9, g = 1, rates 0.1, 0.1, 1, 1: equation 9 is equation 10 with the correction, v = lr times its buffer."""
    seen = {}
    for kind in (optimizers.CorrectedMomentumSGD, optimizers.MomentumSGD):
        link = dbrdist.Link()
        with link.init_scope():
            link.p = Parameter(np.zeros(1))
        optimizer = kind(0.1, 0.9).setup(link)
        weights, buffers = [], []
        for lr in (0.1, 0.1, 1.0, 1.0):
            optimizer.lr = lr
            link.p.grad = np.ones(1)
            optimizer.update()
            weights.append(link.p.array[0])
            buffers.append(-lr * link.p.update_rule.state["v"][0])
        seen[kind.__name__] = weights, buffers
    weights, buffers = seen["CorrectedMomentumSGD"]
    assert weights == pytest.approx([-0.1, -0.29, -3.0, -6.439], rel=1e-13)
    assert buffers == pytest.approx([0.1, 0.19, 2.71, 3.439], rel=1e-13)
    assert seen["MomentumSGD"][0] == pytest.approx([-0.1, -0.29, -1.461, -3.5149], rel=1e-13)


# ---- 10 --------------------------------------------------------------------------------------------------------------


def network(dtype):
    with dbrdist.using_config("dtype", np.dtype(dtype)):
        return dbrdist.Sequential(L.Linear(5, 16), F.tanh, L.Linear(16, 3))


@each(**{"dtype, tolerance": [(np.float64, 1e-12), (np.float32, 1e-5)], "cuts": [(8, 16, 24), (5, 14, 31)]})
def test_gradients_of_ranks_are_those_of_one(dtype, tolerance, cuts):
    """A network without batch normalization: 4 ranks, equal parts or not, weighted by their numbers of examples."""
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((32, 5)).astype(dtype), rng.integers(0, 3, 32)
    initial = network(dtype)

    def train(comm, parts):
        net = network(dtype)
        net.copyparams(initial)
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.5), comm).setup(net)
        mine = parts[comm.rank]
        for _ in range(3):
            optimizer.update(lambda: F.softmax_cross_entropy(net(x[mine]), t[mine]), num_samples=len(mine))
        return [p.array for p in net.params()]

    [alone] = run_threads(1, train, [np.arange(32)])
    for found in run_threads(4, train, np.split(np.arange(32), cuts)):
        for a, b in zip(found, alone):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def test_scaling_the_loss_is_not_scaling_the_rate():
    """Losses over n, not kn, and a rate not multiplied by k: the same update, but for the share of the decay."""
    k, lr, rate, w, g = 8, 0.8, 0.01, 2.0, 3.0
    for decay in (0.0, rate):
        moved = []
        for lr_, gradient in ((lr, g / k), (lr / k, g)):
            link = dbrdist.Link()
            with link.init_scope():
                link.p = Parameter(np.full(1, w))
            optimizer = optimizers.CorrectedMomentumSGD(lr_, 0.9).setup(link)
            optimizer.add_hook(optimizers.WeightDecay(decay))
            link.p.grad = np.full(1, gradient)
            optimizer.update()
            moved.append(w - link.p.array[0])
        assert moved[0] - moved[1] == pytest.approx((lr - lr / k) * decay * w, rel=1e-12, abs=1e-15)


# ---- 16 --------------------------------------------------------------------------------------------------------------


@each(size=[1, 2, 3, 7], last=["short", "wrap", "drop"])
def test_each_index_once_per_epoch_on_any_number_of_ranks(size, last):
    """103 examples in batches of 10: no index twice in an epoch; another order and other shares in the next."""
    data = TupleDataset(np.arange(103))
    shared = {"seed": 3, "shuffle": True, "last": last, "size": size}
    iterators = [SerialIterator(data, 10, rank=rank, **shared) for rank in range(size)]
    seen = [[], []]
    for _ in range(22 if last == "short" else 20):
        for iterator in iterators:
            iterator.next()
            for pieces in iterator.pieces:
                for epoch, indices in pieces:
                    if epoch < 2:
                        seen[epoch] += [(int(i), iterator) for i in indices]
    for epoch in seen:
        indices = [i for i, _ in epoch]
        assert len(indices) == len(set(indices)) <= 103
    assert len(seen[0]) == {"short": 103, "wrap": 103, "drop": 100}[last]
    if size > 1:
        first, second = (dict(epoch) for epoch in seen)
        assert any(first[i] is not second[i] for i in first if i in second)


# ---- 20 --------------------------------------------------------------------------------------------------------------


@each(num_ranks=[1, 2, 3])
def test_as_many_updates_as_steps(num_ranks):
    """Unlike ChainerMN, whose first update only sends the weights."""

    def train(comm):
        link = dbrdist.Link()
        with link.init_scope():
            link.p = Parameter(np.zeros(1))
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.25), comm).setup(link)
        for _ in range(5):
            link.p.grad = np.full(1, 1.0 + comm.rank)
            optimizer.update()
        return link.p.array[0]

    expected = -5 * 0.25 * np.mean(1.0 + np.arange(num_ranks))
    assert run_threads(num_ranks, train) == pytest.approx([expected] * num_ranks, rel=1e-14)


# ---- beside the list -------------------------------------------------------------------------------------------------


def test_akibas_recipe_never_has_a_negative_rate_of_rmsprop():
    share = schedules.rmsprop_warmup()
    rates = [(1 - share(step * 32768 / 1_281_167)) * 3e-4 for step in range(3519)]
    assert rates[0] == pytest.approx(2.97253e-4, rel=1e-5)
    assert min(rates) == 0
    assert np.all(np.diff(rates) <= 0)
