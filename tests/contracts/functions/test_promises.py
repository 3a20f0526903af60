"""What functions say of themselves, against what they do: whether they are linear, whether their gradients are new."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, backward, grad
from dbrdist.core.tape.elementwise_table import Elementwise
from tests.functions.cases import CASES
from tests.functions.gradient_helpers import largest, outputs_of, seeds_of


class Calls(dbrdist.FunctionHook):
    """Notes each function with its inputs."""

    name = "calls"

    def __init__(self):
        self.made = []

    def forward_postprocess(self, function, in_data):
        self.made.append((function, in_data))


def graph_of(case):
    """Outputs and, where there are second derivatives, gradients, with seeds for them."""
    xs = [Variable(a) for a in case.inputs(largest(case))]
    ys = outputs_of(case, xs)
    seeds = seeds_of(ys)
    if case.order > 1:
        gys = [Variable(g) for g in seeds]
        gxs = [g for g in grad(ys, xs, gys, enable_double_backprop=True) if g is not None and g.creator is not None]
        ys, seeds = ys + gxs, seeds + seeds_of(gxs)
    return ys, seeds


@pytest.fixture(scope="module")
def cases():
    """Those whose packages are there."""
    found = []
    for case in CASES:
        try:
            case.inputs(largest(case))
        except pytest.skip.Exception:
            continue
        found.append(case)
    return found


def first_of_each_class(calls):
    return {type(function): (function, given) for function, given in reversed(calls)}.values()


# Linear as called here, but not so in all that they are called with, or of no use to forward mode.
NOT_SAID_TO_BE_LINEAR = {
    "AveragePooling2D", "AveragePoolingGradient", "Copy", "Dropout", "Forget", "MaxPoolingGradient", "ReLUGradient",
    "SplitAxis", "add", "neg", "sub",
}  # fmt: skip


@pytest.mark.slow
def test_functions_say_whether_they_are_linear(cases):
    """f(x) - f(z) = f(x - z)"""
    differs, said = collections.defaultdict(bool), {}
    for case in cases:
        with Calls() as calls:
            graph_of(case)
        for function, given in first_of_each_class(calls.made):
            rng = np.random.default_rng(0)
            xs = [np.asarray(a) for a in given]
            zs = [np.asarray(rng.uniform(0.1, 0.9, a.shape), a.dtype) for a in xs]
            name = type(function).__name__
            said[name] = function.is_linear
            try:
                with np.errstate(all="ignore"):
                    fs = [function.forward(v) for v in (tuple(xs), tuple(zs), tuple(a - b for a, b in zip(xs, zs)))]
            except ValueError:  # not of every array, as linear functions are
                differs[name] = True
            else:
                differs[name] |= not all(np.allclose(a - b, c, rtol=1e-6, atol=1e-6) for a, b, c in zip(*fs))
    assert {name for name in said if said[name] and differs[name]} == set()
    assert {name for name in said if not said[name] and not differs[name]} == NOT_SAID_TO_BE_LINEAR


# Beside those of one formula, which say so by their derivatives.
SAID_TO_BE_NEW = {
    "AveragePooling2D", "BatchNormalization", "CReLU", "Cast", "Col2Im", "Concat", "Convolution2D", "ConvolutionData",
    "FixedBatchNormalization", "FoldedFrame", "GetItem", "Im2Col", "Interpolation", "LargestAlong",
    "LayerNormalization", "LogSoftmax", "LogSumExp", "MatMul", "MaxPooling2D", "Mixed", "PadWithElements",
    "Permutation", "PixelProducts", "Product",
    "ReLU", "Rearranged", "Reshape", "Sampled", "Scatter", "Shift", "Softmax", "SplitAxis", "Spread", "SpreadAlong",
    "SpreadMixed", "SquaredCovariances", "Strided", "SumAlong", "SumOfExp", "Unstrided", "WeightedCrossEntropy",
    "WeightedMean", "Where", "Zoneout",
}  # fmt: skip


@pytest.mark.slow
def test_gradients_that_are_said_to_be_new_are_nobody_elses(cases):
    """Leaves keep such an array without a copy, and sums are added in it."""
    said = set()

    def watch(function):
        rule = function.derive

        def derive(wanted, gys, *out):
            gxs = tuple(rule(wanted, gys, *out))
            of_others = () if function.owns_gy else gys  # what a rule owns it may give on
            others = [a for a in [*of_others, *arrays_of(function)] if isinstance(a, np.ndarray)]
            name = type(function).__name__
            for gx in gxs:
                if isinstance(gx, np.ndarray) and gx.size:
                    is_new = gx.flags.writeable and not any(np.shares_memory(gx, a) for a in others)
                    assert is_new or not function.gives_new, name
                    assert is_new or not function.hands_on or gx is gys[0], name
                    if function.gives_new and not isinstance(function, Elementwise):
                        said.add(name)
                    others.append(gx)
            return gxs

        function.derive = derive

    for case in cases:
        ys, seeds = graph_of(case)
        for function in functions_behind(ys):
            watch(function)
        backward(ys, seeds)
    assert said == SAID_TO_BE_NEW


def arrays_of(function):
    """What it keeps."""
    kept = [function._kept_xs, function._kept_ys, *vars(function).values()]
    return [a for v in kept for a in (v if isinstance(v, (tuple, list)) else (v,))]


def functions_behind(ys):
    found, waiting = {}, [y.creator_node for y in ys]
    while waiting:
        function = waiting.pop()
        if function is not None and id(function) not in found:
            found[id(function)] = function
            waiting += [node.creator_node for node in function.inputs]
    return list(found.values())
