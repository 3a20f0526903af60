"""Update rules, hooks and loss scaling on the device: five steps equal NumPy's."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support import assert_same, is_on, put

import dbrdist
from dbrdist import Parameter
from dbrdist.core.array import backend
from dbrdist.optimizers import (
    LAMB,
    LARS,
    MSVAG,
    SGD,
    SMORMS3,
    AdaBound,
    AdaDelta,
    AdaGrad,
    Adam,
    AdamW,
    AMSBound,
    AMSGrad,
    CorrectedMomentumSGD,
    CorrectedNesterovAG,
    GradientClipping,
    GradientHardClipping,
    GradientLARS,
    GradientNoise,
    Lasso,
    MomentumSGD,
    NesterovAG,
    RMSprop,
    RMSpropGraves,
    WeightDecay,
)
from tests.each import each

METHODS = {
    "SGD": lambda: SGD(0.1),
    "MomentumSGD": lambda: MomentumSGD(0.1, 0.9),
    "CorrectedMomentumSGD": lambda: CorrectedMomentumSGD(0.1, 0.9),
    "NesterovAG": lambda: NesterovAG(0.1, 0.9),
    "CorrectedNesterovAG": lambda: CorrectedNesterovAG(0.1, 0.9),
    "Adam": lambda: Adam(0.01),
    "Adam without eps": lambda: Adam(0.01, eps=0),
    "AdamW": lambda: AdamW(0.01, weight_decay_rate=0.1),
    "AMSGrad": lambda: AMSGrad(0.01),
    "AdaBound": lambda: AdaBound(0.01, gamma=0.5),
    "AMSBound": lambda: AMSBound(0.01, gamma=0.5),
    "AdaGrad": lambda: AdaGrad(0.1),
    "AdaDelta": lambda: AdaDelta(),
    "RMSprop": lambda: RMSprop(0.01),
    "RMSprop with eps inside": lambda: RMSprop(0.01, eps_inside_sqrt=True),
    "RMSpropGraves": lambda: RMSpropGraves(0.01),
    "SMORMS3": lambda: SMORMS3(0.01),
    "MSVAG": lambda: MSVAG(0.1),
    "LAMB": lambda: LAMB(0.01),
    "LAMB for vectors": lambda: LAMB(0.01, skip_vectors=False),
    "LARS": lambda: LARS(0.5, weight_decay=0.01),
    "LARS for vectors": lambda: LARS(0.5, weight_decay=0.01, skip_vectors=False),
}
HOOKS = {
    "weight decay": lambda: WeightDecay(0.1),
    "clipping": lambda: GradientClipping(0.5),
    "clipping that does nothing": lambda: GradientClipping(1e6),
    "Lasso": lambda: Lasso(0.1),
    "LARS": lambda: GradientLARS(weight_decay=0.1),
    "noise": lambda: GradientNoise(0.1),
    "hard clipping": lambda: GradientHardClipping(-0.2, 0.3),
}
SHAPES = ((3, 4), (5,), (2, 3, 3, 3), (1,))
TOLERANCE = {"float64": 1e-12, "float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}


def link(dtype):
    rng = np.random.default_rng(1)
    net = dbrdist.Link()
    with net.init_scope():
        for i, shape in enumerate(SHAPES):
            setattr(net, f"p{i}", Parameter(rng.standard_normal(shape).astype(dtype)))
    return net


def five_steps(net, optimizer, device):
    """Every parameter after each step."""
    rng = np.random.default_rng(2)
    seen = []
    for _ in range(5):
        for p in net.params():
            p.grad = put(device, rng.standard_normal(p.shape).astype(p.dtype))
        optimizer.update()
        seen += [backend.to_cpu(p.array).astype(np.float64) for p in net.params()]
    return seen


def compare(dtype, device, make, hook=None, before=lambda optimizer: None):
    dtype = backend.as_dtype(dtype)
    results = []
    for place in (device, backend.get_device("@numpy")):
        net = link(dtype).to_device(place)
        optimizer = make().setup(net)
        if hook is not None:
            optimizer.add_hook(hook())
        before(optimizer)
        results.append(five_steps(net, optimizer, place))
        for p in net.params():
            assert is_on(place, p.array) and p.dtype == dtype
            for state in (p.update_rule.state or {}).values():
                assert is_on(place, state) and state.dtype == backend.accumulation_dtype(dtype)
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype.name], atol=TOLERANCE[dtype.name])


@each(dtype=TOLERANCE, name=METHODS)
def test_five_steps(name, dtype, device):
    compare(dtype, device, METHODS[name])


@each(dtype=["float16", "bfloat16"], hook=[None, "weight decay", "clipping"], name=METHODS)
def test_16_bit_parameters_are_updated_in_float32(name, hook, dtype, device):
    compare(dtype, device, METHODS[name], HOOKS.get(hook), before=lambda optimizer: optimizer.use_fp32_update())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name, dtype, device):
    compare(dtype, device, METHODS["MomentumSGD"], HOOKS[name])


def test_a_hook_of_one_parameter_and_a_frozen_one(device):
    def before(optimizer):
        optimizer.target.p1.update_rule.add_hook(WeightDecay(0.5))
        optimizer.target.p2.update_rule.enabled = False
        optimizer.target.p3.update_rule.hyperparam.lr = 0.01

    compare("float32", device, METHODS["MomentumSGD"], before=before)


def test_chainers_form_of_a_rule(device):
    class Rule(dbrdist.UpdateRule):
        def update_core_cpu(self, param):
            param.array -= 0.5 * param.grad

        def update_core_gpu(self, param):
            param.array -= 0.5 * param.grad

    def before(optimizer):
        for p in optimizer.target.params():
            p.update_rule = Rule()

    compare("float32", device, METHODS["SGD"], before=before)


class Accumulating(dbrdist.UpdateRule):
    """A rule in Chainer's form with a state."""

    def init_state(self, param):
        self.state["sum"] = param.device.xp.zeros(param.shape, param.dtype)

    def update_core(self, param):
        self.state["sum"] += param.grad
        param.array -= 0.1 * self.state["sum"]


def test_the_state_of_such_a_rule_moves_too(device):
    p = Parameter(np.ones(3, np.float32))
    p.update_rule = Accumulating()
    for k, place in enumerate((device, backend.get_device("@numpy"), device)):
        p.to_device(place)
        p.grad = place.xp.ones(3, np.float32)
        p.update()
        assert is_on(place, p.update_rule.state["sum"])
        np.testing.assert_array_equal(backend.to_cpu(p.update_rule.state["sum"]), np.full(3, k + 1))


def test_zero_gradients_and_zero_parameters(device):
    """Norms of zero: LARS trusts with 1, and clipping leaves gradients as they are."""
    for value, grad in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        results = []
        for place in (device, backend.get_device("@numpy")):
            net = dbrdist.Link()
            with net.init_scope():
                net.W = Parameter(np.full((2, 3), value, np.float32))
            net.to_device(place)
            optimizer = LARS(0.5, weight_decay=0.1).setup(net)
            optimizer.add_hook(GradientClipping(10.0))
            net.W.grad = place.xp.full((2, 3), grad, np.float32)
            optimizer.update()
            results.append(backend.to_cpu(net.W.array))
        np.testing.assert_allclose(*results, rtol=1e-6)


def test_loss_scaling_leaves_out_a_step_with_infinity(device):
    net = link(np.float32).to_device(device)
    optimizer = SGD(1.0).setup(net)
    optimizer.loss_scaling()
    before = backend.to_cpu(net.p0.array).copy()
    net.p0.grad = device.xp.full((3, 4), np.inf, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.update()
    np.testing.assert_array_equal(backend.to_cpu(net.p0.array), before)
    net.p0.grad = device.xp.ones((3, 4), np.float32)
    optimizer.update()
    np.testing.assert_allclose(backend.to_cpu(net.p0.array), before - 1, rtol=1e-6)


def test_gaps_between_parameters_stay_zero_where_a_gradient_is_nan(device):
    """The norm is NaN, and so is zero times it; the next step must not find that between the parameters."""
    net = link(np.float32).to_device(device)
    optimizer = SGD(0.0).setup(net)
    optimizer.add_hook(GradientClipping(1.0))
    for value in (np.nan, 1.0):
        for p in net.params():
            p.grad = device.xp.full(p.shape, value, np.float32)
        with np.errstate(invalid="ignore"):
            optimizer.update()
        (run,) = optimizer.runs()
        assert run.gaps.size == 4 + 11 + 10
        assert_same(device, run.grad[run.gaps], np.zeros(25, np.float32))
        assert_same(device, run.data[run.gaps], np.zeros(25, np.float32))
