"""Mistakes with networks, sizes, losses and optimizers are refused in words that help; what is right is not."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import threading
import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, distributions, initializers, iterators, optimizers
from dbrdist.comm import run_threads
from dbrdist.comm.links import MultiNodeBatchNormalization
from dbrdist.core.array import random
from dbrdist.core.tape.backprop import watching_backward
from dbrdist.core.usage import mistakes
from dbrdist.errors import UsageWarning
from dbrdist.training import extensions
from tests.training.mistaken import (
    DATA,
    IMAGES,
    MAP,
    NET,
    Net,
    T,
    X,
    outside,
    sgd,
    step,
    update,
    within,
    without_graph,
)


def _replaced():
    net = Net()
    net.l1.W = net.l1.W * 2
    return net


def _replaced_after_setup():
    net = Net()
    optimizer = sgd(net)
    net.l1.W = net.l1.W * 2
    optimizer.update(lambda: F.sum(net(X)))


REFUSED = {
    # networks
    "no parameters": (
        lambda: sgd(dbrdist.Chain()),
        ValueError,
        "Chain has no parameters, so there is nothing to train",
    ),
    "links in a list": (
        lambda: sgd(outside(a=[L.Linear(2, 2)])),
        ValueError,
        r"Chain.a \(a list with Linear\).*init_scope",
    ),
    "no scope": (lambda: sgd(outside(fc=L.Linear(2, 2))), ValueError, r"not registered: Chain.fc \(Linear\)"),
    "parameter without scope": (lambda: sgd(outside(W=dbrdist.Parameter(0, 2))), ValueError, r"Chain.W \(Parameter\)"),
    "functions only": (lambda: sgd(dbrdist.Sequential(F.relu)), ValueError, "Sequential has no parameters"),
    **{
        f"child {name}": (lambda name=name: within(name, L.Linear(2, 2)), AttributeError, f"{name!r}.*exists|{name!r}")
        for name in ("links", "copy", "params", "children", "name", "serialize", "xp", "repeat", "_params")
    },
    "parameter copy": (lambda: within("copy", dbrdist.Parameter(0, 2)), AttributeError, "'copy': the attribute exists"),
    "class in scope": (lambda: within("fc", L.Linear), TypeError, r"got the class Linear; write Linear\(\.\.\.\)"),
    "class in Sequential": (lambda: dbrdist.Sequential(L.Linear, F.relu), TypeError, "layer 0.*the class Linear"),
    "list in Sequential": (lambda: dbrdist.Sequential([F.relu]), TypeError, r"got list; write Sequential\(\*layers\)"),
    "class in ChainList": (lambda: dbrdist.ChainList(L.Linear), TypeError, "got the class Linear"),
    "list in ChainList": (
        lambda: dbrdist.ChainList([L.Linear(2, 2)]),
        TypeError,
        r"got list; write ChainList\(\*links\)",
    ),
    "class in Chain": (lambda: dbrdist.Chain(a=L.Linear), TypeError, "Chain: a: expected a Link, got the class Linear"),
    "class in Classifier": (lambda: L.Classifier(Net), TypeError, "predictor: expected a link, got the class Net"),
    "text as loss": (lambda: L.Classifier(NET, "softmax"), TypeError, "lossfun: expected a function, got str"),
    "class as initializer": (
        lambda: L.Linear(2, 2, initialW=initializers.HeNormal),
        TypeError,
        r"the class HeNormal; write HeNormal\(",
    ),
    "requires_grad of a parameter": (
        lambda: setattr(NET.l1.W, "requires_grad", False),
        AttributeError,
        r"requires_grad cannot be assigned: link.disable_update\(\) freezes",
    ),
    "freezing one parameter": (
        lambda: NET.l1.W.disable_update(),
        AttributeError,
        r"write disable_update\(\) of its link",
    ),
    "copies by a fraction": (lambda: L.Linear(2, 2).repeat(2.5), TypeError, "Linear.repeat: n_repeat: .*got float 2.5"),
    "two inputs to a network of one": (
        lambda: L.Classifier(dbrdist.Sequential(L.Linear(4, 3)))(X, T, T),
        TypeError,
        "n_batch_axes: expected an integer, got shape .*does the network take more than one input",
    ),
    "two inputs to a lazy network": (lambda: L.Linear(3)(X, T), TypeError, "n_batch_axes: expected an integer"),
    "dictionaries to a Classifier": (
        lambda: L.Classifier(NET)(x=X, t=T),
        ValueError,
        r"examples are dictionaries: pass label_key, one of \['t', 'x'\]",
    ),
    "folder as dataset": (
        lambda: iterators.SerialIterator("images/train", 2),
        TypeError,
        "got the text 'images/train'; read it first",
    ),
    "number as a reported name": (
        lambda: dbrdist.Reporter().report({3: 1.0}),
        TypeError,
        "report: expected names as keys, got int 3",
    ),
    "text as initializer": (lambda: L.Linear(2, 2, initialW="he"), TypeError, "got the text 'he'"),
    "class in Parameter": (lambda: dbrdist.Parameter(initializers.Zero, 3), TypeError, "the class Zero"),
    "class as link hook": (
        lambda: L.Linear(2, 2).add_hook(dbrdist.link_hooks.TimerHook),
        TypeError,
        "the class TimerHook",
    ),
    # inputs
    **{
        f"list to {type(link).__name__}": (
            lambda link=link: link([[1.0, 2.0]]),
            TypeError,
            "expected an array or Variable, got list",
        )
        for link in (
            L.Linear(2, 2),
            L.Linear(2),
            L.BatchNormalization(2),
            L.LSTM(2, 2),
            L.EmbedID(2, 2),
            L.Convolution2D(2, 2, 1),
            L.LayerNormalization(2),
            L.PReLU(),
            L.Highway(2),
        )
    },
    "None to Linear": (lambda: L.Linear(2, 2)(None), TypeError, "expected an array or Variable, got NoneType"),
    # sizes
    "2.5 outputs": (lambda: L.Linear(4, 3.5), TypeError, "Linear: out_size: expected an integer, got float 3.5"),
    "784 / 2 inputs": (lambda: L.Linear(784 / 2, 3), TypeError, "in_size.*got float 392.0; write a // b"),
    "text": (lambda: L.EmbedID("10", 3), TypeError, "EmbedID: in_size: expected an integer, got str '10'"),
    "stride 1.5": (
        lambda: L.Convolution2D(3, 4, 3, stride=1.5),
        TypeError,
        "Convolution2D: stride: expected an integer",
    ),
    "pad of text": (
        lambda: L.Convolution2D(3, 4, 3, pad="same"),
        TypeError,
        "pad: expected an integer.*got str 'same'",
    ),
    "kernel 2.5": (lambda: L.Deconvolution2D(3, 4, (2, 2.5)), TypeError, "Deconvolution2D: ksize: .*got float 2.5"),
    "batch norm": (lambda: L.BatchNormalization(2.5), TypeError, "BatchNormalization: size"),
    "layers": (lambda: L.NStepLSTM(1.5, 2, 2, 0.0), TypeError, "NStepLSTM: n_layers: expected an integer"),
    "window 2.5": (lambda: F.max_pooling_2d(IMAGES, 2.5), TypeError, "max_pooling_2d: .*integer.*ksize: float 2.5"),
    "window 2.5 n": (
        lambda: F.average_pooling_nd(IMAGES, 2.5),
        ValueError,
        "average_pooling_nd: ksize: expected an integer",
    ),
    "conv stride 1.5": (
        lambda: F.convolution_2d(IMAGES, np.zeros((1, 3, 2, 2), "f"), stride=1.5),
        TypeError,
        "convolution_2d: .*integer",
    ),
    "repeats 1.5": (lambda: F.repeat(X, 1.5), TypeError, "repeat"),
    "sections 2.5": (lambda: F.split_axis(X, 2.5, 1), TypeError, "split_axis: "),
    "resize to 2.5": (lambda: F.resize_images(IMAGES, (2.5, 4)), TypeError, "resize_images: .*integer"),
    "axis 1.5": (lambda: F.sum(X, 1.5), TypeError, "sum: axis: expected an int.*got float 1.5"),
    "pooling words": (
        lambda: F.max_pooling_2d(IMAGES, 2, 2, 3),
        ValueError,
        "got ksize 2, stride 2, pad 3, cover_all=True;",
    ),
    **{
        f"batch of {size!r}": (
            lambda size=size: iterators.SerialIterator(DATA, size),
            TypeError,
            "SerialIterator: batch_size: expected an integer",
        )
        for size in (2.5, "32", None)
    },
    "batch of threads": (
        lambda: iterators.MultithreadIterator(DATA, "4"),
        TypeError,
        "MultithreadIterator: batch_size",
    ),
    "workers 1.5": (lambda: iterators.MultiprocessIterator(DATA, 4, n_processes=1.5), TypeError, "n_processes"),
    # losses
    "without a graph": (without_graph, RuntimeError, "the output has no graph.*no_backprop_mode"),
    "from an array": (lambda: F.sum(NET(X).array).backward(), RuntimeError, "the output has no graph.*x.array"),
    "update from an array": (update(lambda: F.sum(NET(X).array)), RuntimeError, "the output has no graph"),
    "loss is a float": (update(lambda: 1.0), TypeError, "expected the loss as a Variable from <lambda>, got float"),
    "loss is None": (update(lambda: None), TypeError, "got NoneType; it returns nothing: write `return loss`"),
    "loss has a shape": (update(lambda: NET(X)), ValueError, r"expected a loss of one number .* got shape \(20, 3\)"),
    "the loss itself": (update(F.sum(NET(X))), TypeError, r"got the loss itself; call loss.backward\(\)"),
    "no Classifier": (
        step(Net()),
        TypeError,
        r"the target Net was called with 2 arguments, and takes \(x\); wrap it in L.Cl",
    ),
    "no Classifier, Sequential": (
        step(dbrdist.Sequential(L.Linear(4, 3))),
        TypeError,
        "the target Sequential was called with 2 arguments",
    ),
    "no Classifier, convolution": (
        step(dbrdist.Sequential(dbrdist.Sequential(L.Convolution2D(4, 3, 1)))),
        TypeError,
        "wrap it in L.Classifier",
    ),
    "no labels": (
        step(L.Classifier(Net()), X),
        ValueError,
        r"expected examples \(input, label\), got an array of shape \(5, 4\)",
    ),
    "neither": (step(Net(), X), ValueError, "expected a loss of one number from Net.*L.Classifier"),
    "transform returns nothing": (
        step(None, datasets.TransformDataset(DATA, lambda example: None)),
        ValueError,
        "got None: does the dataset",
    ),
    "one example": (lambda: L.Linear(4, 3)(X[0]), ValueError, r"a single example needs an axis of examples, x\[None\]"),
    "one example, lazily": (lambda: L.Linear(None, 3)(X[0]), ValueError, r"a single example is x\[None\]"),
    "sequences": (
        lambda: L.Linear(4, 3)(X.reshape(5, 4, 4)),
        ValueError,
        "n_batch_axes=2 applies the link to",
    ),
    "labels as floats": (lambda: F.sigmoid_cross_entropy(X, X), ValueError, r"t.astype\(int\)"),
    # sizes below their least
    **{
        f"{cls.__name__} {name}": (
            lambda cls=cls, args=args, kwargs=kwargs: cls(*args, **kwargs),
            ValueError,
            f"{cls.__name__}: {name}: expected .* or|{cls.__name__}: {name}: expected a number from 0",
        )
        for cls, name, args, kwargs in (
            (L.Linear, "out_size", (4, -3), {}),
            (L.Convolution2D, "stride", (3, 4, 3), {"stride": 0}),
            (L.Convolution2D, "pad", (3, 4, 3), {"pad": (1, -1)}),
            (L.Convolution2D, "ksize", (3, 4, 0), {}),
            (L.Deconvolution2D, "dilate", (3, 4, 3), {"dilate": 0}),
            (L.Convolution2D, "groups", (3, 4, 3), {"groups": 0}),
            (L.NStepLSTM, "n_layers", (0, 4, 3, 0.0), {}),
            (L.NStepLSTM, "dropout", (1, 4, 3, 1.5), {}),
            (L.BatchNormalization, "decay", (4, 1.5), {}),
            (L.BatchNormalization, "eps", (4,), {"eps": -1}),
            (L.LayerNormalization, "eps", (4, -1), {}),
            (initializers.Normal, "scale", (-1,), {}),
        )
    },
    "array as a parameter": (lambda: setattr(Net().l1, "W", X), TypeError, r"assign to its array: \.W\.array = "),
    "no super().__init__": (lambda: sgd(_WithoutInit()), AttributeError, r"call super\(\).__init__\(\) first"),
    "train as a text": (lambda: setattr(dbrdist.config, "train", "False"), TypeError, "expected True or False"),
    # data
    **{
        f"data: {type(data).__name__}": (lambda data=data: iterators.SerialIterator(data, 2), TypeError, words)
        for data, words in (
            ({"x": X, "t": T}, r"got dict; write DictDataset\(\*\*dataset\)"),
            (zip(X, T), r"got zip; write list\(\.\.\.\)"),
            ((x for x in X), r"got generator; write list"),
            (None, "got NoneType"),
        )
    },
    "text as repeat": (
        lambda: iterators.SerialIterator(DATA, 2, repeat="False"),
        TypeError,
        "repeat: expected True or",
    ),
    "data as transform": (lambda: datasets.TransformDataset(len, DATA), TypeError, "transform: expected a function"),
    "shape as initializer": (lambda: dbrdist.Parameter((3, 4)), TypeError, r"write Parameter\(shape=\(3, 4\)\)"),
    "hook of optimizers": (lambda: Net().add_hook(optimizers.WeightDecay(0.1)), TypeError, "optimizer.add_hook"),
    "train of dropout": (lambda: F.dropout(X, train=False), TypeError, "using_config"),
    "report without a dictionary": (lambda: dbrdist.report(0.5), TypeError, "expected a dictionary, got float"),
    "seed of text": (lambda: dbrdist.random.set_seed("a"), TypeError, "set_seed: expected an integer"),
    # functions called where they are meant themselves
    "relu()": (lambda: dbrdist.Sequential(F.relu()), TypeError, r"as a layer of Sequential.*itself, F\.relu$"),
    "dropout(0.5)": (lambda: F.dropout(0.5), TypeError, r"pass lambda x: F\.dropout\(x, 0\.5\)"),
    "dropout(ratio=0.5)": (lambda: F.dropout(ratio=0.5), TypeError, r"pass lambda x: F\.dropout\(x, ratio=0\.5\)"),
    "max_pooling_2d(2)": (lambda: F.max_pooling_2d(2), TypeError, r"lambda x: F\.max_pooling_2d\(x, 2\)"),
    "leaky_relu(0.2)": (lambda: F.leaky_relu(0.2), TypeError, r"lambda x: F\.leaky_relu\(x, 0\.2\)"),
    "loose shape": (lambda: F.reshape(X, 4, 20), TypeError, r"write reshape\(x, \(4, 20\)\)"),
    "loose axes": (lambda: F.transpose(X, 1, 0), TypeError, r"write transpose\(x, \(1, 0\)\)"),
    "loose repeats": (lambda: F.tile(X, 2, 1), TypeError, r"write tile\(x, \(2, 1\)\)"),
    "padding by name": (lambda: L.Convolution2D(3, 4, 3, pad="same"), ValueError, r"write \(ksize - 1\) // 2"),
    "layers are added": (lambda: dbrdist.Sequential().add(L.Linear(4, 3)), AttributeError, r"write append\(layer\)"),
    "sequences alone": (lambda: L.NStepLSTM(1, 4, 5, 0.0)([X]), ValueError, r"write link\(None, None, xs\)"),
    "sequences alone, without cells": (lambda: L.NStepGRU(1, 4, 5, 0.0)([X]), ValueError, r"write link\(None, xs\)"),
    "sequences in one array": (
        lambda: L.NStepLSTM(1, 4, 5, 0.0)(None, None, X[None]),
        ValueError,
        r"write list\(xs\) for sequences",
    ),
    "names of parameters": (lambda: distributions.Normal(mu=0.0, sigma=1.0), TypeError, "'mu'; did you mean 'loc'"),
    "logits": (lambda: distributions.Categorical(logits=X), TypeError, "'logits'; did you mean 'logit'"),
    "a norm of gradients": (lambda: dbrdist.clip_grad_norm_, AttributeError, r"GradientClipping\(threshold\)"),
    # Variables
    "dim of a method": (lambda: NET(X).sum(dim=1), TypeError, r"Variable\.sum\(\).*did you mean 'axis'"),
    "keepdim of a method": (lambda: NET(X).mean(1, keepdim=True), TypeError, "did you mean 'keepdims'"),
    "larger": (lambda: NET(X) > 0, TypeError, r"compare their arrays: x\.array > y\.array"),
    "not smaller": (lambda: max([F.sum(NET(X)), F.sum(NET(X))]) >= 0, TypeError, "compare their arrays"),
    "format of several": (lambda: f"{NET(X):.3f}", TypeError, r"format '\.3f': .*of one number, got shape \(20, 3\)"),
    # links
    "a comma behind a link": (lambda: within("fc", (L.Linear(2, 2),)), TypeError, "a tuple of one Linear: .*a comma"),
    "super of another class": (lambda: _SuperOfChain(), RuntimeError, "has not been called"),
    "forwad": (lambda: _Forwad()(X), TypeError, r"no forward\(\).*; it defines forwad\(\)"),
    "a Variable in the place of W": (
        lambda: sgd(_replaced()),
        TypeError,
        "setup: /l1/W is a parameter, .*Variable",
    ),
    "replaced after setup": (_replaced_after_setup, TypeError, "SGD.update: /l1/W is a parameter"),
    "integers as the type": (
        lambda: setattr(dbrdist.config, "dtype", "int32"),
        TypeError,
        "a floating type, got int32",
    ),
    "int as the type": (lambda: setattr(dbrdist.config, "dtype", int), TypeError, "config.dtype: expected a floating"),
    # inputs of other frameworks
    "channels last": (
        lambda: L.Convolution2D(3, 4, 3)(IMAGES.transpose(0, 2, 3, 1)),
        ValueError,
        r"\(N, H, W, C\), are x\.transpose\(0, 3, 1, 2\)",
    ),
    "one image": (lambda: L.Convolution2D(3, 4, 3)(IMAGES[0]), ValueError, r"needs an axis of examples, x\[None\]"),
    "grey images": (lambda: L.Convolution2D(1, 4, 3)(IMAGES[:, 0]), ValueError, r"an axis of channels, x\[:, None\]"),
    "labels in a column": (lambda: F.softmax_cross_entropy(NET(X), T[:, None]), ValueError, r"write t\[:, 0\]"),
    "whole labels as floats": (
        lambda: F.softmax_cross_entropy(NET(X), T.astype("f")),
        ValueError,
        r"write t\.astype\(int\)",
    ),
    "labels as bool": (lambda: F.softmax_cross_entropy(NET(X), T > 0), ValueError, r"write t\.astype\(int\)"),
    "one-hot integers": (
        lambda: F.softmax_cross_entropy(NET(X), np.eye(3, dtype=int)[T]),
        ValueError,
        r"are t\.argmax\(axis=1\)",
    ),
    # optimizers
    "network to an optimizer": (lambda: optimizers.Adam(NET), TypeError, r"to setup: Adam\(\.\.\.\)\.setup\(model\)"),
    "parameters to an optimizer": (lambda: optimizers.SGD(NET.params()), TypeError, "the network goes to setup"),
    "loss function of outputs": (
        update(F.softmax_cross_entropy, X[:, :3], T),
        RuntimeError,
        r"was called with the batch itself.*lambda x, t: softmax_cross_entropy\(model\(x\), t\)",
    ),
    "parameters to setup": (
        lambda: optimizers.SGD().setup(NET.params()),
        TypeError,
        r"got generator; .*setup\(model\)",
    ),
    "class to setup": (lambda: optimizers.SGD().setup(Net), TypeError, "got the class Net"),
    "hook as a class": (lambda: sgd(Net()).add_hook(optimizers.WeightDecay), TypeError, r"write WeightDecay\(\.\.\.\)"),
    "rule hook as a class": (
        lambda: sgd(NET).target.l1.W.update_rule.add_hook(optimizers.WeightDecay),
        TypeError,
        "the class WeightDecay",
    ),
}


class _WithoutInit(dbrdist.Chain):
    def __init__(self):
        self.l = L.Linear(2, 2)


class _SuperOfChain(dbrdist.Chain):
    def __init__(self):
        super(dbrdist.Chain, self).__init__()
        with self.init_scope():
            self.l = L.Linear(2, 2)


class _Forwad(dbrdist.Chain):
    def forwad(self, x):
        return x


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        program()


# ---- frozen parameters ----------------------------------------------------------------------------------------------


def train_a_step(*optimizers_):
    model = optimizers_[0].target
    model.cleargrads()
    F.sum(model(X)).backward()
    for optimizer in optimizers_:
        optimizer.update()


@pytest.mark.parametrize("order", ["before", "after", "twice", "by the rule", "copied", "pickled", "late"])
def test_frozen_layers_stay_frozen(order):
    model = dbrdist.Sequential(L.Linear(4, 8), L.Linear(None if order == "late" else 8, 3))
    if order == "late":
        model[1].disable_update()
        model[0].disable_update()
        model[1].enable_update()
        model(X)
    elif order == "by the rule":
        sgd(model)
        for p in model[0].params():
            p.update_rule.enabled = False
    elif order != "after":
        model[0].disable_update()
    if order == "copied":
        model = model.copy("copy")
    optimizer = sgd(model)
    if order == "after":
        model[0].disable_update()
    optimizers_ = [optimizers.Adam().setup(model)] if order in ("twice", "by the rule") else [optimizer]
    frozen, trained = model[0].W.array.copy(), model[1].W.array.copy()
    train_a_step(*optimizers_)
    np.testing.assert_array_equal(model[0].W.array, frozen)
    assert (model[1].W.array != trained).any()
    model[0].enable_update()
    train_a_step(*optimizers_)
    assert (model[0].W.array != frozen).any()


def test_only_what_was_frozen_is():
    model = Net()
    model.l1.disable_update()
    optimizer = sgd(model)
    assert [p.update_rule.enabled for p in model.params()] == [False, False, True, True]
    assert not model.l1.update_enabled and model.update_enabled and optimizer.target is model


# ---- what is right, and what Chainer accepted -----------------------------------------------------------------------


@pytest.fixture
def as_chainer():
    before = list(mistakes.as_chainer)
    mistakes.as_chainer[0] = True
    yield
    mistakes.as_chainer[:] = before


ACCEPTED_BY_CHAINER = {
    "no parameters": lambda: sgd(dbrdist.Chain()),
    "loss without a graph": without_graph,
    "SGD(-1)": lambda: optimizers.SGD(-1),
    "beta1": lambda: optimizers.Adam(beta1=1.5),
    "clipping": lambda: optimizers.GradientClipping(-1),
    "evaluator": lambda: extensions.Evaluator(iterators.SerialIterator(DATA, 2), NET),
    "class in scope": lambda: within("kind", L.Linear),
    "parameter copy": lambda: within("copy", dbrdist.Parameter(0, 2)),
    "number as a reported name": lambda: dbrdist.Reporter().report({3: 1.0}),
}


@pytest.mark.parametrize("name", ACCEPTED_BY_CHAINER)
def test_what_chainer_accepted_is_accepted_with_a_warning(name, as_chainer):
    with pytest.warns(UsageWarning) as given:
        ACCEPTED_BY_CHAINER[name]()
    assert len(given) == 1


def teacher():
    net = Net()
    net.teacher = Net()
    net.teacher.disable_update()
    return net


def shared():
    net = Net()
    net.same = net.l1
    net.layers = [net.l1, net.l2]
    return net


def of_two_optimizers():
    critic = Net()
    sgd(critic)
    actor = Net()
    actor.critic = critic
    return actor


def evaluator_of_ten_batches():
    class TenBatches(extensions.Evaluator):
        def evaluate(self):
            return {"n": float(sum(len(self.get_iterator("main").next()) for _ in range(10)))}

    return TenBatches(iterators.SerialIterator(DATA, 2), NET)()


RIGHT = {
    **{
        f"negative {kind.__name__}": lambda kind=kind: kind(-0.5)(np.empty((3, 3), np.float32))
        for kind in (initializers.Identity, initializers.Orthogonal, initializers.Uniform, initializers.HeUniform)
    },
    "frozen link outside": lambda: sgd(teacher()),
    "registered elsewhere": lambda: sgd(shared()),
    "another optimizer's link": lambda: sgd(of_two_optimizers()),
    "gradient of a leaf": lambda: dbrdist.Variable(np.ones((), "f")).backward(),
    "leaf with a gradient": lambda: dbrdist.Variable(X, grad=X).backward(),
    "loss of several numbers with a gradient": update(lambda: _seeded(NET(X)), net=NET),
    "ints of NumPy": lambda: L.Linear(np.int64(4), np.int32(3))(X),
    "channels and pair": lambda: L.Convolution2D(4, (3, 3))(IMAGES),
    "pair of NumPy": lambda: F.max_pooling_2d(IMAGES, np.array([2, 2])),
    "rate of NumPy": lambda: optimizers.SGD(np.float32(0.1)),
    "rate in an array": lambda: optimizers.SGD(np.array(0.1)),
    "rate 0": lambda: optimizers.SGD(0),
    "momentum 0 and 1": lambda: (optimizers.MomentumSGD(momentum=0), optimizers.MomentumSGD(momentum=1)),
    "clip at infinity": lambda: optimizers.GradientClipping(float("inf")),
    "no decay": lambda: optimizers.WeightDecay(0),
    "child named as a hint": lambda: within("eval", L.Linear(2, 2)).eval,
    "child over a default": lambda: sgd(_WithDefault()),
    "child named forward": lambda: within("forward", L.Linear(4, 2))(X),
    "reassigned child": lambda: sgd(_reassigned()),
    "evaluator with an end": evaluator_of_ten_batches,
    "update without gradients later": lambda: _without_gradients_later(),
}


def _seeded(y):
    y.grad = np.ones_like(y.array)
    return y


class _WithDefault(Net):
    head = None

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.head = L.Linear(2, 2)


def _reassigned():
    net = Net()
    with net.init_scope():
        net.l2 = L.Linear(8, 5)
    return net


def _without_gradients_later():
    optimizer = sgd(Net())
    train_a_step(optimizer)
    optimizer.target.cleargrads()
    optimizer.update()


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_refused(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RIGHT[name]()


# ---- what is warned of ----------------------------------------------------------------------------------------------


def steps(optimizer, model, num=3, clear=True):
    for _ in range(num):
        if clear:
            model.cleargrads()
        F.softmax_cross_entropy(model(X), T).backward()
        optimizer.update()


def trained(model, **options):
    steps(sgd(model), model, **options)


def another_target():
    first, second = Net(), Net()
    optimizer = sgd(first)
    optimizer.setup(second)


def displaced():
    model = Net()
    first, _ = sgd(model), optimizers.Adam().setup(model)
    steps(first, model, 1)


def registered_later():
    model = Net()
    optimizer = sgd(model)
    model.add_link("l3", L.Linear(3, 3))
    steps(optimizer, model, 1)


def frozen_altogether():
    model = Net()
    model.disable_update()
    trained(model, num=1)


def in_evaluation():
    with dbrdist.using_config("train", False):
        trained(Net())


def misspelt(name, value):
    before = dict(vars(dbrdist.config))
    try:
        setattr(dbrdist.config, name, value)
    finally:
        if name not in before:
            delattr(dbrdist.config, name)


def set_on(optimizer, name):
    setattr(optimizer, name, 0.5)


class MakesLinks(Net):
    def forward(self, x):
        return super().forward(L.Linear(4, 4)(x))


def exhausted():
    iterator = iterators.SerialIterator(DATA, 5, repeat=False)
    for _ in range(2):
        for _batch in iterator:
            pass


def jacobian(end):
    """Several passes from one output in each step, each with another gradient of its own."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(3):
        model.cleargrads()
        y = end(model(X))
        for k in range(1, 3):
            y.grad = np.full(y.shape, k / 4, np.float32)
            y.backward()
        optimizer.update()


def twice(clear=False):
    """Two backward passes from one loss in each step."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(3):
        model.cleargrads()
        loss = F.softmax_cross_entropy(model(X), T)
        loss.backward()
        if clear:
            model.cleargrads()
        loss.backward()
        optimizer.update()


def seeded(draws=0, own=None):
    """A program that seeds NumPy, and perhaps dbrdist."""
    before = random.Stream.is_seeded, random.Stream.default_seed
    state = np.random.get_state()
    try:
        random.Stream.is_seeded = False
        np.random.seed(3)
        np.random.rand(draws)
        if own is not None:
            random.set_seed(own)
        sgd(Net())
    finally:
        random.Stream.is_seeded, random.Stream.default_seed = before
        random.set_seed(before[1])
        random.Stream.is_seeded = before[0]
        np.random.set_state(state)


def softmax_by_hand(x):
    e = F.exp(x - F.max(x, axis=1, keepdims=True))
    return e / F.sum(e, axis=1, keepdims=True)


LABELS = (np.arange(20) % 2).astype(np.int32)
GREY = np.linspace(0, 255, 60, dtype=np.float32).reshape(20, 3)


def set_up_in_each_step(count, optimizer=None):
    """As in a loop with setup in it: a new optimizer each time, or the same one."""
    net = Net()
    for _ in range(count):
        made = optimizers.Adam() if optimizer is None else optimizer
        made.setup(net)
        made.update(lambda: F.sum(net(X)))


WARNED = {
    "probabilities that are none": (
        lambda: distributions.Categorical(np.array([[1.0, 1.0], [0.5, 0.5]])),
        "p: the probabilities add up to 1 to 2",
    ),
    "counts as probabilities": (
        lambda: distributions.OneHotCategorical(np.float32([0.1, 0.1])),
        "add up to 0.2 instead of 1; divide them",
    ),
    "a new optimizer in each step": (lambda: set_up_in_each_step(5), "call setup once, before the loop"),
    "setup in each step": (lambda: set_up_in_each_step(5, optimizers.MomentumSGD()), "MomentumSGD.setup: each setup"),
    "two passes from one loss": (twice, "backward\\(\\) was called twice from the same loss"),
    "NumPy's seed": (seeded, "numpy.random.seed has no effect on dbrdist.*set_seed"),
    **{
        f"{name} by hand": (
            lambda f=f: F.softmax_cross_entropy(f(NET(X)), T),
            "expected scores, got probabilities that sum up to 1.*leave the softmax out",
        )
        for name, f in (
            ("softmax", softmax_by_hand),
            ("exp of log_softmax", lambda x: F.exp(F.log_softmax(x))),
            ("softmax within limits", lambda x: F.clip(F.softmax(x), 1e-7, 1.0)),
        )
    },
    **{
        f"sigmoid by hand in {loss.__name__}": (
            lambda loss=loss, order=order, t=t: loss(*(1 / (1 + F.exp(-NET(X)[:, 0])), t)[::order]),
            r"got 1 / \(1 \+ exp\(-x\)\).*pass x itself",
        )
        for loss, order, t in (
            (F.sigmoid_cross_entropy, 1, LABELS),
            (F.bernoulli_nll, -1, LABELS.astype("f")),
        )
    },
    "pixels as probabilities": (
        lambda: F.bernoulli_nll(GREY, NET(X)),
        "bernoulli_nll: x: expected probabilities from 0 to 1, got numbers from 0 to 255.*divide pixels by 255",
    ),
    "targets below 0": (
        lambda: F.binary_cross_entropy(NET(X), X[:, :3]),
        "binary_cross_entropy: t: expected probabilities from 0 to 1",
    ),
    "one link thrice": (
        lambda: dbrdist.Sequential(*[L.Linear(4, 4)] * 3),
        r"Sequential: layers 0 and 1 are the same Linear.*link.repeat\(n\)",
    ),
    "one link twice in a list": (
        lambda: (lambda link: dbrdist.ChainList(link, dbrdist.Chain(), link))(L.Linear(4, 4)),
        "ChainList: layers 0 and 2 are the same Linear",
    ),
    "no cleargrads": (lambda: trained(Net(), clear=False), "gradients are added to those of the update before"),
    "training in evaluation mode": (in_evaluation, "config.train is False"),
    "two targets": (another_target, "the first one is not trained; use one optimizer for each"),
    "displaced optimizer": (displaced, "another optimizer was set up for all parameters of Net"),
    "link after setup": (registered_later, "/l3/W, /l3/b came to the target after setup"),
    "all frozen": (frozen_altogether, "all parameters of Net are frozen"),
    "softmax twice": (lambda: F.softmax_cross_entropy(F.softmax(NET(X)), T), "got the output of softmax"),
    "softmax of maps": (
        lambda: F.softmax_cross_entropy(F.softmax(dbrdist.Variable(IMAGES)), np.zeros((2, 8, 8), int)),
        "got the output of softmax",
    ),
    "sigmoid twice": (lambda: F.sigmoid_cross_entropy(F.sigmoid(NET(X)[:, 0]), LABELS), "got the output of sigmoid"),
    "sigmoid before focal loss": (
        lambda: F.sigmoid_focal_loss(F.sigmoid(NET(X)[:, 0]), LABELS),
        "got the output of sigmoid",
    ),
    "sigmoid before a likelihood": (
        lambda: F.bernoulli_nll(LABELS.astype("f"), F.sigmoid(NET(X)[:, 0])),
        "got the output of sigmoid",
    ),
    **{
        f"{name} before {loss.__name__}": (
            lambda loss=loss, f=f, t=t: loss(f(NET(X)), t),
            f"{loss.__name__}: x: expected scores, got the output of {name}, .*leave {name} out",
        )
        for loss, t in ((F.softmax_cross_entropy, T), (F.sigmoid_cross_entropy, np.eye(3, dtype=int)[T]))
        for name, f in (
            ("relu", F.relu),
            ("dropout", F.dropout),
            ("hard_sigmoid", F.hard_sigmoid),
            ("relu6", F.relu6),
            ("sigmoid", F.sigmoid),
            ("softmax", F.softmax),
        )
    },
    "flat sigmoid": (
        lambda: F.sigmoid_cross_entropy(F.flatten(F.sigmoid(NET(X)[:, :1])), LABELS),
        "got the output of sigmoid",
    ),
    "relu in a loop": (lambda: trained(dbrdist.Sequential(Net(), F.relu)), "got the output of relu"),
    "softmax before CTC": (
        lambda: F.connectionist_temporal_classification([F.softmax(NET(X))] * 3, T[:, None] % 2, 2),
        "connectionist_temporal_classification: x: expected scores, got the output of softmax",
    ),
    "channels last": (
        lambda: L.Convolution2D(None, 2, 3)(np.zeros((2, 32, 32, 3), np.float32)),
        r"got shape \(2, 32, 32, 3\), which looks like \(N, H, W, C\); write x.transpose\(0, 3, 1, 2\)",
    ),
    "channels last, transposed": (lambda: L.Deconvolution2D(2, 3)(np.zeros((2, 9, 9, 1), np.float32)), "N, H, W, C"),
    "layers of a GRU": (lambda: L.GRU(4, 5, 2), r"GRU: init: 2 fills all weights.*write NStepGRU\(2"),
    "layers of a stateful GRU": (lambda: L.StatefulGRU(4, 5, 3), "StatefulGRU: init: 3"),
    "nested lists": (
        lambda: sgd(dbrdist.Sequential(Net(), outside(blocks=[{"a": [L.Linear(2, 2)]}]))),
        r"Chain.blocks \(a list with Linear\) will not be trained",
    ),
    "trainable": (lambda: setattr(L.Linear(2, 2), "trainable", False), "no switch 'trainable'.*write disable_update"),
    "requires_grad": (lambda: setattr(L.Linear(2, 2), "requires_grad", False), "write disable_update"),
    "training": (lambda: setattr(L.BatchNormalization(2), "training", False), "no switch 'training'.*config.train"),
    "fewer than no copies": (lambda: L.Linear(2, 2).repeat(-1), "n_repeat: expected an integer of 0 or more, got -1"),
    "clipping after the update": (
        lambda: sgd(Net()).add_hook(optimizers.GradientClipping(1), timing="post"),
        "GradientClipping: it changes gradients, which the update has used before; leave out timing='post'",
    ),
    "decay after the update": (
        lambda: sgd(Net()).add_hook(optimizers.WeightDecay(1), timing="post"),
        "WeightDecay: it changes gradients",
    ),
    "a batch beyond the dataset": (
        lambda: iterators.SerialIterator(X, 21),
        r"batch_size: 21 is more than the dataset has \(20\)",
    ),
    "likelihood the other way round": (
        lambda: F.bernoulli_nll(NET(X)[:, 0], LABELS.astype("f")),
        r"write bernoulli_nll\(data, scores\)",
    ),
    "one class": (lambda: F.softmax_cross_entropy(NET(X)[:, :1], T * 0), "there is one class"),
    "labels from 1": (lambda: F.accuracy(NET(X), T + 1), "labels such as 3 among 3 classes.*counted from 0"),
    "ignored labels": (lambda: F.accuracy(NET(X), T - 1), "pass ignore_label=-1"),
    "best of k": (lambda: F.top_k_accuracy(NET(X), T + 1, 2), "labels such as 3 among 3 classes"),
    "train misspelt": (lambda: misspelt("trian", False), "config.trian: .*did you mean 'train'"),
    "Train": (lambda: misspelt("Train", False), "did you mean 'train'"),
    "using_config without with": (lambda: dbrdist.using_config("train", False), "was not entered.*with using_config"),
    "no_backprop_mode without with": (dbrdist.no_backprop_mode, "was not entered"),
    "alpha of SGD": (lambda: set_on(sgd(Net()), "alpha"), "SGD has no hyperparameter 'alpha'.*it has lr"),
    "learning_rate": (lambda: set_on(optimizers.Adam(), "learning_rate"), "did you mean 'lr'"),
    "momentum of SGD": (lambda: set_on(sgd(Net()), "momentum"), "write the optimizer MomentumSGD"),
    "links made in forward": (lambda: trained(MakesLinks()), "MakesLinks.forward makes a new Linear at each call"),
    "Variable in scope": (lambda: within("W", dbrdist.Variable(X)), "Chain.W: a Variable is not registered"),
    "no outputs": (lambda: L.Linear(4, 0), "Linear: out_size is 0"),
    "clipping at 0": (lambda: optimizers.GradientClipping(0), "makes all gradients 0"),
    "one value per channel": (lambda: L.BatchNormalization(4)(X[:1]), "one value per channel in training"),
    "loop over an exhausted iterator": (exhausted, r"its epoch is over.*call reset\(\)"),
    "arrays in a list": (lambda: datasets.TupleDataset([X, T]), r"write TupleDataset\(\*arrays\)"),
    "accuracy of one output": (lambda: F.accuracy(X[:, :1], X[:, :1]), "of one output it is always 1"),
    "arrays side by side": (
        lambda: iterators.SerialIterator((X, T), 2),
        "dataset: 2 arrays side by side are 2 examples.*TupleDataset",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_mistake_is_warned_of_once_at_the_users_line(name):
    program, words = WARNED[name]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        program()
    found = [w for w in given if issubclass(w.category, UsageWarning)]
    assert len(found) == 1, [str(w.message) for w in found]
    assert found[0].filename.startswith(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    assert re.search(words, str(found[0].message))


@pytest.mark.parametrize("name", WARNED)
def test_the_warning_can_be_turned_off(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UsageWarning)
        WARNED[name][0]()


def gan():
    """Gradients of the discriminator are added to by the generator's loss, and cleared before its next update."""
    generator, critic = L.Linear(4, 4), L.Linear(4, 1)
    of_generator, of_critic = sgd(generator), sgd(critic)
    for _ in range(3):
        critic.cleargrads()
        F.sum(critic(X) - critic(generator(X).array)).backward()
        of_critic.update()
        generator.cleargrads()
        F.sum(critic(generator(X))).backward()
        of_generator.update()


def accumulated():
    model = Net()
    optimizer = sgd(model)
    for _ in range(3):
        model.cleargrads()
        for part in (X[:10], X[10:]):
            F.sum(model(part)).backward()
        optimizer.update()


def gradients_by_hand():
    model = Net()
    optimizer = sgd(model)
    for _ in range(3):
        for p in model.params():
            p.grad = np.ones_like(p.array)
        optimizer.update()


def zeros_by_hand():
    model = Net()
    optimizer = sgd(model)
    for _ in range(3):
        for p in model.params():
            if p.grad is not None:
                p.grad[...] = 0
        F.sum(model(X)).backward()
        optimizer.update()


class MakesLinksOnce(Net):
    def forward(self, x):
        if not hasattr(self, "made"):
            self.made = []
            for _ in range(3):
                self.made.append(L.Linear(3, 3))
        return super().forward(x)


class OwnOptimizer(optimizers.SGD):
    def __init__(self):
        super().__init__(0.1)
        self.momentum = self.decay = 0.5


def alternating():
    model = Net()
    optimizer = sgd(model)
    for _ in range(2):
        model.l1.disable_update()
        steps(optimizer, model, 1)
        model.l1.enable_update()
        steps(optimizer, model, 1)


def frozen_normalization():
    model = dbrdist.Sequential(L.Linear(4, 8), L.BatchNormalization(8), L.Linear(8, 3))
    optimizer = sgd(model)
    for _ in range(3):
        model.cleargrads()
        with dbrdist.using_config("train", False):
            loss = F.softmax_cross_entropy(model(X), T)
        loss.backward()
        optimizer.update()


@dbrdist.no_backprop_mode()
def predicted(depth):
    return NET(X) if depth == 0 else predicted(depth - 1)


def own_switch():
    dbrdist.config.my_own_flag = "on"
    with dbrdist.using_config("another", 3):
        pass
    del dbrdist.config.my_own_flag


def loop_after_reset():
    iterator = iterators.SerialIterator(DATA, 5, repeat=False)
    for _ in range(2):
        assert len(list(iterator)) == 4
        iterator.reset()


def types_of_parameters():
    with dbrdist.using_config("dtype", "float32"), dbrdist.using_config("dtype", np.float32):
        pass


def gradients_of_a_copy():
    """Asynchronous workers: gradients are computed in copies of the network that is updated."""
    shared = Net()
    optimizer, local = sgd(shared), shared.copy()
    for _ in range(3):
        local.copyparams(shared)
        local.cleargrads()
        F.sum(local(X)).backward()
        shared.cleargrads()
        shared.addgrads(local)
        optimizer.update()


class PutsTogether(Net):
    """Its forward makes containers of links that last."""

    def forward(self, x):
        return dbrdist.Sequential(self.l1, F.relu, self.l2)(x)


@dataclasses.dataclass
class WithoutHash(dbrdist.Chain):
    size: int

    def __post_init__(self):
        super().__init__()

    def forward(self, x):
        return L.Linear(4, self.size)(x)


def put_together():
    model = PutsTogether()
    for _ in range(3):
        model(X)
        gc.collect()


def optimized_input():
    """Such as in style transfer: a network in evaluation mode, and a picture that is trained."""
    picture = L.Parameter(X.copy())
    optimizer = sgd(picture)
    with dbrdist.using_config("train", False):
        for _ in range(3):
            picture.cleargrads()
            F.sum(NET(picture())).backward()
            optimizer.update()


def cell_run_again():
    optimizer = optimizers.SGD(0.1)
    for _ in range(2):
        model = Net()
        optimizer.setup(model)
    steps(optimizer, model, 2)


def one_example_on_each_rank():
    run_threads(2, lambda comm: MultiNodeBatchNormalization(4, comm)(X[comm.rank :][:1]), timeout_seconds=30)


def switches_of_ones_own():
    for name in ("types", "trace", "my_dtypes"):
        with dbrdist.using_config(name, 1):
            pass


class Softmax(dbrdist.FunctionNode):
    """A program's own function, which gives scores."""

    def forward(self, xs):
        return (xs[0] * 2,)

    def backward(self, indexes, gys):
        return (gys[0] * 2,)


def several_kinds_of_optimizers():
    net = Net()
    for kind in (optimizers.Adam, optimizers.AdaGrad, optimizers.RMSprop, optimizers.MomentumSGD):
        kind().setup(net).update(lambda: F.sum(net(X)))


def tuples_of_one():
    """References to links that a chain has already, or to frozen ones."""
    frozen, other = L.Linear(2, 2), dbrdist.Sequential(L.Linear(2, 2))
    frozen.disable_update()

    class References(dbrdist.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.fc = L.Linear(2, 2)
                self.layers, self.teacher, self.first = (self.fc,), (frozen,), (other[0],)

    assert [path for path, _ in References().namedlinks(skipself=True)] == ["/fc"]


def part_with_its_whole():
    """A part of a network that refers to the whole, and has an optimizer of its own."""
    whole = dbrdist.Chain(part=Net(), other=Net())
    whole.part.parent = whole
    sgd(whole.part)


class Infinite:
    """What knows by itself how it compares with anything."""

    def __gt__(self, other):
        return True

    __ge__ = __gt__


NOT_WARNED = {
    "rounded probabilities": lambda: (
        distributions.Categorical(np.full(1000, 1e-3, "f2")),
        distributions.Categorical(np.ones((0, 3))),
        distributions.Categorical(F.softmax(X)),
        distributions.Categorical(logit=X),
    ),
    "a layer named add": lambda: within("add", L.Linear(4, 3)).add(X),
    "what compares by itself": lambda: F.sum(NET(X)) < Infinite() and F.sum(NET(X)) <= Infinite(),
    "a part that refers to the whole": part_with_its_whole,
    "several kinds of optimizers in turn": several_kinds_of_optimizers,
    "tuples of one link": tuples_of_one,
    "formats of whole numbers": lambda: f"{dbrdist.Variable(np.array(3)):d} {dbrdist.Variable(np.array([True])):d}",
    "two setups": lambda: set_up_in_each_step(2),
    "setup in each step of an optimizer without states": lambda: set_up_in_each_step(5, optimizers.SGD()),
    "types of parameters": types_of_parameters,
    "formats of losses": lambda: (f"{F.sum(NET(X)):.3f} {NET(X)}", format(F.sum(NET(X)), "")),
    "a function of one's own called Softmax": lambda: F.softmax_cross_entropy(Softmax().apply((NET(X),))[0], T),
    "gradients of a copy": gradients_of_a_copy,
    "containers made in forward": put_together,
    "links made in forward of a class without hash": lambda: WithoutHash(3)(X),
    "an input that is trained": optimized_input,
    "a cell that is run again": cell_run_again,
    "names like those of entries": switches_of_ones_own,
    "one example on each rank": one_example_on_each_rank,
    "renormalization of one example": lambda: L.BatchRenormalization(4, 3, 5)(X[:1]),
    "GAN": gan,
    "gradients of several batches": accumulated,
    "gradients by hand": gradients_by_hand,
    "zeros by hand": zeros_by_hand,
    "links made once in forward": lambda: trained(MakesLinksOnce()),
    "attributes of an optimizer of one's own": OwnOptimizer,
    "freezing in turns": alternating,
    "normalization in evaluation mode": frozen_normalization,
    "passes from one loss with cleargrads": lambda: twice(clear=True),
    "NumPy's seed for draws of one's own": lambda: seeded(draws=1),
    "both seeds": lambda: seeded(own=0),
    "scores that happen to be from 0 to 1": lambda: F.sigmoid_cross_entropy(
        F.clip(NET(X)[:, 0], 0.0, 1.0) / F.sum(NET(X) ** 2), LABELS
    ),
    "scores of a division": lambda: F.softmax_cross_entropy(NET(X) / 2.0, T),
    "a sigmoid with a trained scale": lambda: F.sigmoid_cross_entropy(
        dbrdist.Parameter(np.float32(0.5), (20,)) / (1 + F.exp(-NET(X)[:, 0])), LABELS
    ),
    "a sigmoid of half the height": lambda: F.sigmoid_cross_entropy(0.5 / (1 + F.exp(-NET(X)[:, 0])), LABELS),
    "a sigmoid with a fixed scale": lambda: F.sigmoid_cross_entropy(30 / (1 + F.exp(-NET(X)[:, 0])), LABELS),
    "large scores in float16": lambda: F.softmax_cross_entropy(
        dbrdist.Variable(np.full((2, 3), 4e4, np.float16)) / np.float16(1), T[:2]
    ),
    "probabilities for bernoulli_nll": lambda: F.bernoulli_nll(GREY / 255, NET(X)),
    "functions in several places": lambda: dbrdist.Sequential(L.Linear(4, 4), F.relu, L.Linear(4, 4), F.relu),
    "passes with gradients of one's own": lambda: jacobian(lambda y: y),
    "passes of a loss with other weights": lambda: jacobian(F.sum),
    "targets of a resized image": lambda: F.bernoulli_nll(GREY / 255 * np.float32(1.000001), NET(X)),
    "copies that share": lambda: dbrdist.Sequential(L.Linear(4, 4)).repeat(3, "share"),
    "links without parameters": lambda: dbrdist.ChainList(*[dbrdist.Chain()] * 2),
    "decorated function": lambda: predicted(2),
    "entries of one's own": own_switch,
    "classifier around the same network": lambda: sgd(NET).setup(L.Classifier(NET)),
    "softmax over another axis": lambda: F.softmax_cross_entropy(F.softmax(dbrdist.Variable(X[:3, :3]), axis=0), T[:3]),
    "relu before other layers": lambda: F.softmax_cross_entropy(
        F.average_pooling_2d(F.relu(MAP(IMAGES)), 8), T[:2, None, None]
    ),
    "relu before another loss": lambda: F.mean_squared_error(F.relu(NET(X)), X[:, :3]),
    "scores through a reshape": lambda: F.softmax_cross_entropy(F.reshape(F.transpose(NET(X)), (-1, 3)), T),
    "small maps of few columns": lambda: L.Convolution2D(None, 2, 1)(np.zeros((2, 64, 3, 3), np.float32)),
    "channels told": lambda: L.Convolution2D(32, 2, 1)(np.zeros((2, 32, 32, 3), np.float32)),
    "weights of a GRU": lambda: (L.GRU(4, 5, 0.1), L.GRU(4, 5, 0), L.GRU(4, 5, initializers.Normal(2))),
    "switches of one's own": lambda: setattr(Net(), "trainable", False),
    "a hook of one's own after the update": lambda: sgd(Net()).add_hook(lambda optimizer: None, "own", timing="post"),
    "a batch of the whole dataset": lambda: iterators.SerialIterator(X, 20),
    "a short batch beyond the dataset": lambda: iterators.SerialIterator(X, 21, repeat=False),
    "log_softmax": lambda: F.softmax_cross_entropy(F.log_softmax(NET(X)), T),
    "softmax for evaluation": lambda: F.accuracy(F.softmax(NET(X)), T),
    "ignored label": lambda: F.accuracy(NET(X), T - 1, ignore_label=-1),
    "a pair of examples": lambda: iterators.SerialIterator((X[0], X[1]), 1),
    "one image per batch": lambda: L.BatchNormalization(3)(IMAGES[:1]),
    "loop after reset": loop_after_reset,
    "weights shared by assignment": lambda: setattr(Net().l1, "W", NET.l1.W),
    "array beside parameters": lambda: setattr(Net(), "mean", X),
}


@pytest.mark.parametrize("name", NOT_WARNED)
def test_what_is_right_is_not_warned_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NOT_WARNED[name]()


@pytest.mark.parametrize("name", ["asarray", "argmax", "concatenate", "stack", "isnan"])
def test_numpy_makes_no_array_of_variables(name):
    y = NET(X)
    with pytest.raises(TypeError, match=r"takes arrays, got a Variable"):
        getattr(np, name)([y, y] if name in ("concatenate", "stack") else y)


def test_a_variable_of_one_number_is_a_float(as_chainer):
    assert float(F.sum(NET(X))) == float(F.sum(NET(X)).array)
    assert float(NET(X)[:1, 0]) == float(NET(X).array[0, 0])
    with pytest.raises(TypeError, match=r"of one number, got shape \(20, 3\)"):
        float(NET(X))
    assert np.asarray(NET(X)[0]).dtype == object  # as Chainer's


def test_steps_after_the_first_three_are_not_watched():
    model = Net()
    optimizer = sgd(model)
    steps(optimizer, model, 3)
    assert optimizer._first_updates is None and not watching_backward


def test_a_backward_pass_of_another_thread_says_nothing_of_this_one():
    model = Net()
    optimizer = sgd(model)
    steps(optimizer, model, 1)
    model.cleargrads()
    other = threading.Thread(target=lambda: F.sum(NET(X)).backward())
    other.start()
    other.join()
    assert len(watching_backward) == 3
    steps(optimizer, model, 2)
    assert not watching_backward


def test_masked_arrays_are_warned_of(recwarn):
    masked = np.ma.array([[1.0, 2.0], [3.0, 4.0]], mask=[[0, 1], [0, 0]])
    for call in (lambda: F.sum(masked), lambda: F.relu(masked), lambda: F.linear(masked, np.ones((2, 2)))):
        with pytest.warns(UsageWarning, match="takes a masked array: some functions leave masked elements out"):
            call()
    recwarn.clear()
    assert F.sum(masked.filled(0.0)).array == 8 and not recwarn.list


class Plain(dbrdist.Chain):
    """Takes x alone."""

    def __init__(self):
        super().__init__(layer=L.Linear(4, 3))

    def forward(self, x):
        return self.layer(x)


WRAP = "; wrap it in L.Classifier(model), or pass a function that computes the loss"


@pytest.mark.parametrize(
    ("args", "named", "given", "hint"),
    [
        ((X,), {"t": X}, "1 argument, t", WRAP), ((X, X), {}, "2 arguments", WRAP), ((), {"y": X}, "y", ""),
        ((), {}, "nothing", ""),
    ],
)  # fmt: skip
def test_a_target_that_is_called_with_other_arguments_says_what_it_takes(args, named, given, hint):
    optimizer = optimizers.SGD().setup(Plain())
    with pytest.raises(TypeError) as caught:
        optimizer.update(optimizer.target, *args, **named)
    assert str(caught.value) == f"SGD.update: the target Plain was called with {given}, and takes (x){hint}"


def test_a_second_setup_is_warned_of_where_the_first_link_is_not_a_part_of_it_or_around_it():
    outer = dbrdist.Chain(a=L.Linear(2, 2), b=L.Linear(2, 2))
    for first, second in ((outer, outer), (outer, outer.a), (outer.a, outer)):
        optimizers.SGD().setup(first).setup(second)
    with pytest.warns(UsageWarning) as caught:
        optimizers.SGD().setup(outer.a).setup(outer.b)
    assert [str(one.message) for one in caught] == [
        "SGD.setup: the target was Linear and is Linear from now on: the first one is not trained; use one optimizer "
        "for each, or put both links into a Chain"
    ]
