"""An audit finds the first array in which ranks differ, and says so on all of them."""

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.comm.run import parameter_audit
from dbrdist.comm.run.parameter_audit import ParameterAudit, compare
from dbrdist.errors import CommunicatorError
from tests.comm.comm_helpers import said, steps
from tests.comm.training_contract import Net, batches


class Trainer:
    def __init__(self, optimizer, iteration):
        self.updater = self
        self.optimizer, self.iteration = optimizer, iteration

    def get_all_optimizers(self):
        return {"main": self.optimizer}


def trained(comm, zero=0):
    model = Net(seed=comm.rank)
    optimizer = create_multi_node_optimizer(optimizers.Adam().setup(model), comm, zero=zero)
    for x, t in batches(3):
        optimizer.update(model, x, t)
    return model, optimizer


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_equal_ranks_pass(num_ranks):
    def check(comm):
        for zero in (0, 1):
            ParameterAudit(comm)(Trainer(trained(comm, zero)[1], 3))

    run_threads(num_ranks, check, timeout_seconds=30)


def test_ranks_that_step_by_themselves_are_compared_where_they_meet():
    def check(comm):
        model = Net(seed=comm.rank)
        optimizer = create_multi_node_optimizer(optimizers.Adam().setup(model), comm, local_steps=2)
        for step, (x, t) in enumerate(batches(7), 1):
            optimizer.update(model, x[comm.rank :], t[comm.rank :])
            ParameterAudit(comm)(Trainer(optimizer, step))
        model.l1.b.array[0] += comm.rank
        with pytest.raises(CommunicatorError, match="/l1/b differs"):
            ParameterAudit(comm)(Trainer(optimizer, 7))

    run_threads(3, check, timeout_seconds=30)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda model: model.l2.W.array.__setitem__((0, 0), np.nextafter(model.l2.W.array[0, 0], 9)), "/l2/W"),
        (lambda model: model.l1.b.update_rule.state["v"].__iadd__(1e-9), "/l1/b, state v"),
    ],
)
def test_the_last_bit_of_one_rank_is_found(spoil, named):
    def check(comm):
        model, optimizer = trained(comm)
        if comm.rank == 1:
            spoil(model)
        with pytest.raises(CommunicatorError) as caught:
            ParameterAudit(comm)(Trainer(optimizer, 70))
        return str(caught.value)

    texts = run_threads(3, check, timeout_seconds=30)
    assert len(set(texts)) == 1
    assert f"{named} differs (optimizer 'main', step 70)" in texts[0]
    assert "on rank 0, 2" in texts[0] and "on rank 1" in texts[0]


def test_other_names_are_told():
    def check(comm):
        model, optimizer = trained(comm)
        if comm.rank:
            model.l2.W.update_rule._state = None
        with pytest.raises(CommunicatorError, match=r"step 3.*/l2/W, state m on rank 0; /l2/b, state m on rank 1"):
            parameter_audit.compare(comm, optimizer, "step 3")

    run_threads(2, check, timeout_seconds=30)


def test_an_audit_among_errors():
    """Ranks whose models differ in shape, in type or in one bit of a NaN; equal NaNs are equal."""

    def audited(change):
        def body(comm):
            model, optimizer = steps(comm)
            comm.barrier()
            if comm.rank == 1:
                change(model)
            compare(comm, optimizer, "step 2")

        return said(body)

    def bits(number):
        def change(model):
            model.b.array.view(np.uint32)[0] = number

        return change

    assert audited(lambda model: None) == "nothing"
    assert "/b differs (step 2)" in audited(bits(0x7FC00001))
    assert "/W differs" in audited(lambda model: setattr(model.W, "array", np.ones((4, 7), np.float32)))
    assert "/W differs" in audited(lambda model: setattr(model.W, "array", model.W.array.astype(np.float64)))

    def nan_everywhere(comm):
        model, optimizer = steps(comm)
        model.W.array[...] = np.nan
        compare(comm, optimizer, "step 2")

    assert said(nan_everywhere) == "nothing"
