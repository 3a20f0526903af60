"""Arguments in a form or place that is not theirs: the error, or warning, says which one it is and what to write."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import functions as F
from dbrdist import initializers, iterators, optimizers, serializers, training
from dbrdist import links as L
from dbrdist.datasets import get_cross_validation_datasets, split_dataset_n
from dbrdist.errors import UsageWarning
from dbrdist.training import extensions
from dbrdist.training.extension import as_extension

DATA = [0, 1, 2, 3]
SIZES = "expected a number, or one for rows and one for columns, got "


class NoTrainer(training.Extension):
    def __call__(self):
        """What a trainer cannot call."""


REFUSED = {
    "stride None": (lambda: L.Convolution2D(3, 4, 3, None), f"Convolution2D: stride: {SIZES}None"),
    "one pad": (lambda: L.Deconvolution2D(3, 4, 3, pad=[1]), rf"Deconvolution2D: pad: {SIZES}\[1\]"),
    "three dilations": (lambda: L.Convolution2D(3, 4, 3, dilate=(1, 2, 3)), f"Convolution2D: dilate: {SIZES}"),
    "ksize of no channels yet": (lambda: L.Convolution2D(4, (1, 2, 3)), f"Convolution2D: ksize: {SIZES}"),
    "ksize None": (lambda: L.DepthwiseConvolution2D(3, 2, None), f"DepthwiseConvolution2D: ksize: {SIZES}None"),
    "in_size": (lambda: L.LocalConvolution2D(3, 4, [8], 3), f"LocalConvolution2D: in_size: {SIZES}"),
    "one ksize": (lambda: L.LocalConvolution2D(3, 4, 8, [3]), f"LocalConvolution2D: ksize: {SIZES}"),
    "deformed": (lambda: L.DeformableConvolution2D(3, 4, [3]), f"DeformableConvolution2D: ksize: {SIZES}"),
    "rmax": (lambda: L.BatchRenormalization(4, rmax="x"), "rmax: expected a number of 1 or more, got str 'x'"),
    "small rmax": (lambda: L.BatchRenormalization(4, rmax=0.5), "rmax: expected a number of 1 or more, got 0.5"),
    "dmax": (lambda: L.BatchRenormalization(4, dmax=-1), "dmax: expected a number of 0 or more, got -1"),
    "timeout": (lambda: iterators.MultiprocessIterator(DATA, 2, dataset_timeout="1 s"), "dataset_timeout: expected a"),
    "parts": (lambda: split_dataset_n(DATA, 2.0), "n: expected an integer, got float 2.0"),
    "folds": (lambda: get_cross_validation_datasets(DATA, "2"), "n_folds: expected an integer, got str '2'"),
    "order": (lambda: get_cross_validation_datasets(DATA, 2, 5), "order: expected a permutation of 4 indices, got 5"),
    "short order": (lambda: get_cross_validation_datasets(DATA, 2, [1, 0]), "a permutation of 4 indices, got .1, 0"),
    "epoch": (lambda: extensions.snapshot(filename="{.epoch}"), r"a trainer has no epoch; write \{.updater.epoch\}"),
    "name of a link": (lambda: extensions.ParameterStatistics("l1"), "links: expected a link or several, got str"),
    "unnamed links": (lambda: dbrdist.Chain(L.Linear(3, 2)), r"Chain: links .* by names, such as Chain\(l1=link\)"),
    "no trainer": (lambda: as_extension(lambda: 1), r"extend: expected a function of the trainer.*, got <lambda>\(\)"),
    "extension": (
        lambda: as_extension(NoTrainer()),
        r"extend: expected a function of the trainer.*, got NoTrainer\(\)",
    ),
    "no value": (
        lambda: extensions.observe_value("x", lambda: 1),
        r"observe_value: expected a function of the trainer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_the_argument(name):
    make, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize("make", [lambda: F.cast(np.ones(1), "f16"), lambda: initializers.Normal(dtype="f16")])
def test_f16_has_16_bytes(make):
    with pytest.warns(UsageWarning, match="'f16' is NumPy's name of a type of 16 bytes, float128; write 'float16'"):
        make()


def test_what_is_no_slip():
    assert F.cast(np.ones(1), "f2").dtype == np.float16
    assert as_extension(print) is not None and as_extension(lambda *_: None) is not None
    assert as_extension(lambda trainer, k=1: k) is not None
    assert L.BatchRenormalization(4, rmax=np.inf, dmax=np.inf).dmax == np.inf
    iterators.MultiprocessIterator(DATA, 2, dataset_timeout=None).finalize()


def test_sizes_may_be_arrays():
    x = np.ones((1, 3, 8, 8), np.float32)
    assert L.Convolution2D(3, 4, np.array(2), np.array([2, 1]))(x).shape == (1, 4, 4, 7)
    assert F.max_pooling_2d(x, np.array(2)).shape == (1, 3, 4, 4)


def test_a_sequential_is_extended_by_a_list():
    network = dbrdist.Sequential(L.Linear(3, 4))
    network.extend([F.relu, L.Linear(4, 2)])
    network.extend(network)
    assert len(network) == 6 and network[1] is F.relu and network[5] is network[2]
    assert [name for name, _ in network.namedparams()] == [
        "/0/W",
        "/0/b",
        "/1/W",
        "/1/b",
        "/2/W",
        "/2/b",
        "/3/W",
        "/3/b",
    ]


def test_a_file_of_another_object_is_shown(tmp_path):
    serializers.save_npz(tmp_path / "net.npz", dbrdist.Chain(a=L.Linear(2, 2)))
    with pytest.raises(KeyError, match=r"t: expected this entry .* the state has 'a/W', 'a/b': it belongs to another"):
        serializers.load_npz(tmp_path / "net.npz", optimizers.Adam().setup(L.Linear(2, 2)))


MEANS = {
    "mean_absolute_error": lambda x: F.mean_absolute_error(x, x.array),
    "mean_squared_error": lambda x: F.mean_squared_error(x, x.array),
    "bernoulli_nll": lambda x: F.bernoulli_nll(x.array, x, "mean"),
    "gaussian_nll": lambda x: F.gaussian_nll(x.array, x, x, "mean"),
    "laplace_nll": lambda x: F.laplace_nll(x.array, x, x, "mean"),
    "gaussian_kl_divergence": lambda x: F.gaussian_kl_divergence(x, x, "mean"),
}


@pytest.mark.parametrize("name", MEANS)
def test_the_mean_loss_of_no_examples_is_0(name):
    """Not NaN, which the mean over ranks would be as well."""
    x = dbrdist.Variable(np.zeros((0, 3), np.float32))
    loss = MEANS[name](x)
    loss.backward()
    assert loss.shape == () and loss.dtype == np.float32 and loss.array == 0 and x.grad.shape == (0, 3)
