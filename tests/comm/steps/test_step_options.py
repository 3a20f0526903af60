"""Tests of dbrdist.comm.steps.step_options."""

from types import SimpleNamespace

import numpy as np

from dbrdist import optimizers
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.comm.steps.step_state import StepState
from tests.comm.training_contract import Net, batches


def carried_by(size=2, rank=0, **options):
    return StepState(SimpleNamespace(size=size, rank=rank), StepOptions(**options))


def model_of():
    model = Net()
    model(*next(batches(1)))
    return model, optimizers.MomentumSGD().setup(model)


def test_numbers_of_examples_of_a_round():
    one = carried_by(accumulate=4)
    assert one.samples(5) == 5 and one.samples(None) is None
    one.gathered = [3, None, 0]
    assert one.samples(5) == 8 and one.samples(None) is None
    model, _optimizer = model_of()
    plan = ReductionPlan(list(model.namedparams()))
    for num_samples, divisor in ((5, 8.0), (None, 4.0)):
        model.l1.b.grad = np.full(9, 16.0)
        one.divide(plan, one.samples(num_samples))
        assert model.l1.b.grad.tolist() == [16.0 / divisor] * 9
    one.gathered = [0]
    model.l1.b.grad = np.full(9, 16.0)
    one.divide(plan, 0)
    assert model.l1.b.grad.tolist() == [16.0] * 9
    one.num_local = 2
    one.forget()
    assert one.gathered == [] and one.num_local == 0
