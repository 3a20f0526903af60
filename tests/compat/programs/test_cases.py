#!/usr/bin/env python
"""Test cases of a function, a link and an extension of one's own, with the tools of chainer.testing."""
from __future__ import division
import unittest

import numpy

import chainer
from chainer import cuda
from chainer import function_node
import chainer.functions as F
from chainer import gradient_check
from chainer import initializers
import chainer.links as L
from chainer import testing
from chainer.testing import attr
from chainer.testing import condition
from chainer import training
from chainer.utils import type_check


class MulAdd(function_node.FunctionNode):

    """z = x * y + a"""

    def check_type_forward(self, in_types):
        type_check.expect(in_types.size() == 2)
        x_type, y_type = in_types
        type_check.expect(x_type.dtype.kind == 'f', x_type.shape == y_type.shape)

    def __init__(self, a):
        self.a = a

    def forward(self, inputs):
        self.retain_inputs((0, 1))
        x, y = inputs
        return (x * y + self.a).astype(x.dtype),

    def backward(self, target_input_indexes, grad_outputs):
        x, y = self.get_retained_inputs()
        gz, = grad_outputs
        return gz * y, gz * x


def muladd(x, y, a):
    return MulAdd(a).apply((x, y))[0]


@testing.parameterize(*testing.product({
    'shape': [(3, 2), (4,), ()],
    'dtype': [numpy.float32, numpy.float64],
    'a': [0, 1.5],
}))
@testing.fix_random()
@testing.inject_backend_tests(
    None,
    # CPU tests
    [{}, {'use_ideep': 'always'}]
    # GPU tests
    + testing.product({'use_cuda': [True], 'use_cudnn': ['never', 'always']}))
class TestMulAdd(testing.FunctionTestCase):

    def setUp(self):
        self.check_forward_options.update({'atol': 1e-6, 'rtol': 1e-6})

    def generate_inputs(self):
        x = numpy.random.uniform(-1, 1, self.shape).astype(self.dtype)
        y = numpy.random.uniform(-1, 1, self.shape).astype(self.dtype)
        return x, y

    def forward(self, inputs, device):
        x, y = inputs
        return muladd(x, y, self.a),

    def forward_expected(self, inputs):
        x, y = inputs
        return numpy.asarray(x * y + self.a, dtype=self.dtype),


class LinearTestBase(object):

    param_names = ('W', 'b')

    def generate_params(self):
        W = numpy.random.uniform(-1, 1, (self.out_size, 3)).astype(numpy.float32)
        b = numpy.random.uniform(-1, 1, self.out_size).astype(numpy.float32)
        return W, b

    def generate_inputs(self):
        return numpy.random.uniform(-1, 1, (4, 3)).astype(numpy.float32),

    def create_link(self, initializers):
        initialW, initial_bias = initializers
        return L.Linear(3, self.out_size, initialW=initialW, initial_bias=initial_bias)


@testing.parameterize({'out_size': 1}, {'out_size': 5})
@testing.inject_backend_tests(None, [{}, {'use_cuda': True}])
class TestLinear(LinearTestBase, testing.LinkTestCase):

    def forward_expected(self, link, inputs):
        x, = inputs
        return x.dot(link.W.array.T) + link.b.array,


@testing.parameterize_pytest('out_size', [1, 5])
@testing.inject_backend_tests(None, [{}])
class TestLinearInitializers(LinearTestBase, testing.LinkInitializersTestCase):

    def get_initializers(self):
        initialW = [initializers.Constant(1), 2]
        initial_bias = [initializers.Zero(), 3, testing.InitializerArgument(None, 0)]
        return initialW, initial_bias


@testing.unary_math_function_unittest(F.tanh)
class TestTanh(unittest.TestCase):
    pass


class TestDropout(unittest.TestCase):

    @condition.retry(10)
    def test_share(self):
        y = F.dropout(numpy.ones((100, 100), numpy.float32), 0.5)
        self.assertAlmostEqual(float((y.array == 0).mean()), 0.5, delta=0.02)

    @condition.repeat_with_success_at_least(10, 8)
    def test_mean(self):
        y = F.dropout(numpy.ones((100, 100), numpy.float32), 0.5)
        testing.assert_allclose(y.array.mean(), 1, atol=0.05)

    @attr.gpu
    def test_gpu(self):
        F.dropout(cuda.to_gpu(numpy.ones(3, numpy.float32)))

    @attr.slow
    def test_old_style(self):
        x = testing.generate_matrix((3, 3), singular_values=[1, 2, 3])
        gradient_check.check_backward(F.det, x, numpy.array(1.0), dtype=numpy.float64)


class TestExtension(unittest.TestCase):

    def test_calls(self):
        calls = []

        @training.make_extension(trigger=(1, 'epoch'))
        def count(trainer):
            calls.append(trainer.updater.iteration)

        trainer = testing.get_trainer_with_mock_updater((6, 'iteration'), iter_per_epoch=3)
        trainer.extend(count)
        trainer.run()
        self.assertEqual(calls, [3, 6])

    def test_serialization(self):
        src, dst = L.BatchNormalization(3), L.BatchNormalization(3)
        src.avg_mean[...] = 4
        testing.save_and_load_npz(src, dst)
        testing.assert_allclose(dst.avg_mean, src.avg_mean)

    @testing.with_requires('numpy>=1.10')
    def test_patch(self):
        with testing.patch('chainer.functions.relu') as relu:
            chainer.functions.relu(numpy.zeros(2, numpy.float32))
        self.assertEqual(relu.call_count, 1)


testing.run_module(__name__, __file__)
