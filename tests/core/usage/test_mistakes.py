"""Mistakes with networks, sizes, losses and optimizers are refused in words that help; what is right is not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, initializers, iterators, optimizers
from dbrdist.core.usage import mistakes
from dbrdist.errors import UsageWarning
from dbrdist.training import extensions
from tests.training.mistaken import (
    DATA,
    IMAGES,
    NET,
    Net,
    X,
    outside,
    sgd,
    step,
    update,
    within,
    without_graph,
)

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
    # optimizers
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
