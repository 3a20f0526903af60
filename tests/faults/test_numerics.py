"""One process: results that earlier versions got wrong without an error."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, distributions, link_hooks
from dbrdist.dataset import concat_examples
from dbrdist.optimizers import schedules


def array(*values, dtype="f"):
    return np.array(values, dtype)


def told(function):
    """What a call returns, or the name of the error that refuses it."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__


# ---- the first element decides for all


@pytest.mark.parametrize(
    "examples",
    [
        [np.array([1, 2]), np.array([0.5, 1.5])],
        [np.uint8([1, 2]), np.array([300, -1])],
        [np.float16([1]), np.float32([1e6])],
        [(np.float32(1), np.array([1])), (np.float32(2), np.array([0.5]))],
    ],
    ids=["integers first", "bytes first", "half first", "in a tuple"],
)
def test_a_batch_has_the_type_of_all_its_examples(examples):
    batch = concat_examples(examples)
    columns = zip(*examples) if isinstance(examples[0], tuple) else [examples]
    for found, column in zip(batch if isinstance(batch, tuple) else [batch], columns):
        np.testing.assert_array_equal(found, np.stack(column))


# ---- a call keeps its results in the link


def test_a_hook_that_replaces_a_weight_leaves_the_parameter_in_its_link():
    """Another thread that looks during a call finds the parameter, not that call's normalized weight."""
    inside, leave = threading.Event(), threading.Event()

    class Waits(L.Linear):
        def forward(self, x):
            inside.set()
            leave.wait(20)
            return super().forward(x)

    link = Waits(5, 3)
    weight = link.W
    link.add_hook(link_hooks.SpectralNormalization())
    call = threading.Thread(target=link, args=(np.ones((2, 5), "f"),))
    call.start()
    inside.wait(20)
    seen = link.W
    leave.set()
    call.join(20)
    assert seen is weight and link.W is weight


def test_a_classifier_that_two_threads_call_returns_each_its_own_loss():
    both = threading.Barrier(2, timeout=10)

    class Meets(dbrdist.Link):
        def forward(self, x):
            return x

    def loss(y, t):
        value = F.softmax_cross_entropy(y, t)
        both.wait()
        return value

    def accuracy(y, t):
        both.wait()  # both have their losses now
        return F.accuracy(y, t)

    model = L.Classifier(Meets(), lossfun=loss, accfun=accuracy)
    inputs = [np.array([[k, 0.0]], "f") for k in (1, 3)]
    found = {}
    threads = [
        threading.Thread(target=lambda k=k: found.update({k: float(model(inputs[k], np.array([1])).array)}))
        for k in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = [np.log1p(np.exp(k)) for k in (1, 3)]
    np.testing.assert_allclose([found[0], found[1]], expected, rtol=1e-5)


# ---- accuracy relative to the result, on both sides of every number of elements


@pytest.mark.parametrize("count", [1, 8191, 8192, 100_000])
@pytest.mark.parametrize("name", ["sigmoid", "mish", "silu"])
def test_tails_of_activations_keep_their_digits(name, count):
    for value in (-15.0, -16.5, -20.0, -60.0):
        x = np.full(count, value, "f")
        small = np.exp(value)
        exact = {
            "sigmoid": small / (1 + small),
            "mish": value * np.tanh(np.log1p(small)),
            "silu": value * small / (1 + small),
        }[name]
        with np.errstate(all="ignore"):
            found = getattr(F, name)(x)
        np.testing.assert_allclose(found.array[0].astype("f8"), exact, rtol=2e-6)


# ---- remainders and whole quotients


def test_remainders_are_exact():
    a, b = array(1.0, 1e10, -7.5, 1e30), array(0.1, 3.0, 0.2, 7.0)
    np.testing.assert_array_equal(F.fmod(a, b).array, np.fmod(a, b))


def test_whole_quotients_are_exact():
    assert (Variable(np.array([1.0])) // 0.1).array[0] == 9.0
    big = np.array([2**60 + 1])
    found = (Variable(big) // 1).array
    assert found[0] == big[0] and found.dtype == big.dtype


# ---- labels that are none


X = np.linspace(-1, 1, 8, dtype="f").reshape(2, 4)
LABELLED = {
    "hinge": lambda: F.hinge(X, np.array([9, 9])),
    "sigmoid_cross_entropy": lambda: F.sigmoid_cross_entropy(X, np.full((2, 4), 3)),
    "sigmoid_cross_entropy without normalization": lambda: F.sigmoid_cross_entropy(X, np.full((2, 4), -2), False),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_that_a_loss_does_not_know_are_refused(name):
    found = told(LABELLED[name])
    assert isinstance(found, str), f"a loss of {found}"


# ---- quantiles and supports


def test_quantiles_of_the_cauchy_distribution_in_its_tails():
    d = distributions.Cauchy(np.zeros(1, "f"), np.ones(1, "f"))
    p = array(1e-8, 1e-7, 0.25, 0.75)
    found = np.asarray(getattr(d.icdf(p), "array", d.icdf(p)))
    np.testing.assert_allclose(found, -1 / np.tan(np.pi * p.astype("f8")), rtol=1e-5)
    assert np.asarray(getattr(d.icdf(array(0.0)), "array", d.icdf(array(0.0))))[0] == -np.inf


QUANTILES = {
    "Cauchy": lambda p: distributions.Cauchy(array(0), array(1)).icdf(p),
    "Exponential": lambda p: distributions.Exponential(array(1)).icdf(p),
    "Pareto": lambda p: distributions.Pareto(array(1), array(2)).icdf(p),
    "Uniform": lambda p: distributions.Uniform(low=array(0), high=array(2)).icdf(p),
    "Normal": lambda p: distributions.Normal(array(0), array(1)).icdf(p),
}


@pytest.mark.parametrize("name", QUANTILES)
def test_there_are_no_quantiles_beyond_0_and_1(name):
    with np.errstate(all="ignore"):
        for p in (-0.2, 1.2):
            assert np.isnan(QUANTILES[name](array(p)).array).all()


def test_an_outcome_outside_the_support_has_no_probability():
    d = distributions.OneHotCategorical(array(0.2, 0.3, 0.5))
    found = told(lambda: float(np.ravel(d.log_prob(array(0, 0, 0)).array)[0]))
    assert isinstance(found, str) or found == -np.inf


# ---- maxima that are NaN or minus infinity


def test_the_place_of_a_maximum_that_is_nan():
    x = np.array([[[1, np.nan]]], "f")
    assert F.max_pooling_1d(x, 2, return_indices=True)[1].ravel()[0] == 1


def test_the_maximum_of_a_window_of_minus_infinities_is_no_padding():
    x = Variable(np.array([[[[-np.inf, 3], [1, 2]]]], "f"))
    F.sum(F.max_pooling_2d(x, 2, 2, 1)).backward()
    np.testing.assert_array_equal(x.grad, np.ones((1, 1, 2, 2)))


# ---- parts that are computed again


def test_what_is_handed_on_gets_its_gradient_where_a_part_is_computed_again():
    x, k = Variable(array(2)), Variable(array(3))
    y, z = F.forget(lambda a: (a * k, k), x)
    F.sum(y * 3 + z * 5).backward()
    assert k.grad[0] == 3 * 2 + 5


def test_a_hooks_state_is_that_of_each_call_where_a_part_is_computed_again():
    """A normalized discriminator that is called twice: the same gradients with and without ``forget``."""
    grads = []
    for again in (False, True):
        dbrdist.random.set_seed(0)
        link = L.Linear(6, 6)
        link.W.array[...] = np.random.default_rng(0).normal(size=(6, 6)).astype("f")
        link.add_hook(link_hooks.SpectralNormalization())
        both = [np.random.default_rng(k).normal(size=(2, 6)).astype("f") for k in (1, 2)]

        def parts(a, b, link=link):
            return F.sum(link(a) ** 2) - F.sum(link(b) ** 3)

        (F.forget(parts, *map(Variable, both)) if again else parts(*both)).backward()
        grads.append(link.W.grad)
    np.testing.assert_allclose(grads[1], grads[0], rtol=1e-4, atol=1e-4)


# ---- schedules by parts of an epoch


def test_a_schedule_of_whole_periods_counts_them_all():
    stairs = schedules.stairs(1.0, 0.5, 0.1)
    assert [stairs(k / 10) for k in range(10)] == [0.5**k for k in range(10)]


# ---- smaller ones


def test_a_variable_compared_with_an_array_is_no_single_answer():
    t = np.array([1, 2, 3])
    y = Variable(np.array([1.0, 2.0, 0.0], "f"))
    for found in (told(lambda: y == t), told(lambda: y != t)):
        assert not isinstance(found, bool)


def test_weighted_means_of_halves_do_not_overflow():
    x = Variable(np.full(4000, 100, np.float16))
    assert float(x.mean(weights=np.ones(4000, np.float16)).array) == 100.0


def test_a_small_convolution_takes_any_byte_order():
    x = Variable(np.ones((1, 2, 4, 4), ">f4"))
    W = np.ones((3, 2, 3, 3), "f")
    found = told(lambda: F.convolution_2d(x, W).array)
    assert not isinstance(found, str) and (found == 18).all(), found
