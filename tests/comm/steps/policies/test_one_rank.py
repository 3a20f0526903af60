"""One rank: its gradients, whole; a step without examples says what is wrong."""

import numpy as np
import pytest

from dbrdist import functions as F
from dbrdist.comm.gradients.compression import TopK
from dbrdist.comm.steps.policies.one_rank import OneRank
from dbrdist.errors import CommunicatorError, NoSamplesError
from tests.comm.steps.policies.policy_helpers import policy_of, work
from tests.comm.training_contract import batches
from tests.each import each


@each(
    **{"gathered, num_samples, error": [([], 0, NoSamplesError), ([], -1, CommunicatorError), ([0], 0, NoSamplesError)]}
)
def test_a_step_without_examples(gathered, num_samples, error):
    policy = policy_of(OneRank, accumulate=1 + len(gathered))
    policy.carried.gathered = gathered
    with pytest.raises(error):
        policy.gradients(work(num_samples=num_samples), False)


def test_calls_before_count_and_their_sum_becomes_a_mean():
    policy = policy_of(OneRank, accumulate=2)
    model = policy.optimizer.target
    model.cleargrads()
    (x, t), (x2, t2) = batches(2)
    policy.work_alone(work(model, x[:3], t[:3], num_samples=3))
    policy.carried.gathered = [3]
    assert policy.gradients(work(model, x2[:5], t2[:5], num_samples=5), False)
    found = model.l1.W.grad.copy()
    model.cleargrads()
    model(np.concatenate([x[:3], x2[:5]]), np.concatenate([t[:3], t2[:5]])).backward()
    np.testing.assert_allclose(found, model.l1.W.grad, rtol=1e-12)


def test_what_a_compression_has_kept_is_spent():
    policy = policy_of(OneRank, compression=TopK(0.5))
    model = policy.optimizer.target
    policy.way.compression.kept[model.l1.b] = np.full(9, 3.0)
    x, t = next(batches(1))
    assert policy.gradients(work(model, x, t), False)
    found = model.l1.b.grad.copy()
    model.cleargrads()
    model(x, t).backward()
    np.testing.assert_allclose(found, model.l1.b.grad + 3)
    assert not policy.way.compression.kept


def test_gradients_of_a_step_are_arrays_of_parameters_alone():
    """Without a graph of their own, and none is kept of what is between."""
    policy = policy_of(OneRank)
    model, seen = policy.optimizer.target, []
    ((x, t),) = batches(1)

    def loss(x, t):
        seen.append(model.l1(x))
        return F.sum(seen[0] * seen[0])

    policy.work_alone(work(loss, x, t))
    assert seen[0].grad is None and all(p.grad_var.creator is None for p in model.l1.params())
    assert all(p.grad is not None for p in model.l1.params())
