"""RMSprop warm-up over the numbers of Akiba et al. 2017, worked out by hand."""

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter
from dbrdist.optimizers import RMSpropWarmup, schedules
from tests.each import each


def trained(optimizer, gradients, before=lambda optimizer, t: None):
    """Parameter and states of one number that starts at 0, after each update."""
    link = dbrdist.Link()
    with link.init_scope():
        link.p = Parameter(np.zeros(1))
    optimizer.setup(link)
    seen = []
    for t, g in enumerate(gradients):
        before(optimizer, t)
        link.p.grad = np.array([g], np.float64)
        optimizer.update()
        seen.append((float(link.p.array[0]), *(float(a[0]) for a in link.p.update_rule.state.values())))
    return seen


def test_the_first_updates_of_the_paper():
    optimizer = RMSpropWarmup(6.4, a_sgd=schedules.rmsprop_warmup()(0))
    theta, m, d = zip(*trained(optimizer, (1, 0.5, -0.25)))
    assert m == pytest.approx((0.01, 0.0124, 0.012901), rel=1e-12)
    assert d == pytest.approx((-0.00962227667006, -0.0134475061781, -0.00971107171394), rel=1e-11)
    assert theta == pytest.approx((-0.0615825706884, -0.147646610228, -0.209797469197), rel=1e-11)


def test_with_a_whole_share_it_is_momentum_sgd():
    torch = pytest.importorskip("torch")
    p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([p], 6.4, momentum=0.9)
    expected = []
    for _ in range(2):
        p.grad = torch.ones(1, dtype=torch.float64)
        sgd.step()
        expected.append(p.item())
    assert expected == pytest.approx([-6.4, -18.56])
    assert [theta for theta, *_ in trained(RMSpropWarmup(6.4), (1, 1))] == pytest.approx(expected, rel=1e-14)


@each(g=[1.0, -7.0, 1e-3, 1e4])
def test_without_a_share_the_first_update_does_not_depend_on_the_size_of_the_gradient(g):
    [(theta, *_)] = trained(RMSpropWarmup(6.4, a_sgd=0.0), [g])
    assert theta == pytest.approx(-np.sign(g) * 3e-4 * abs(g) / (0.1 * abs(g) + 1e-8), rel=1e-12)
    assert abs(theta) == pytest.approx(3e-3, rel=1.1e-4)


@each(lr=[12.8, 6.4, 0.05], **{"epoch, expected": [(0, 2.97253e-4), (10, 1.5e-4), (12.5, 0), (40, 0)]})
def test_the_rate_of_rmsprop_does_not_follow_lr(lr, epoch, expected):
    """What the RMSprop part moves at the first update: m is g^2 / 100, so that it is ten times its rate."""
    share = schedules.rmsprop_warmup()(epoch)
    [(theta, *_)] = trained(RMSpropWarmup(lr, a_sgd=share, eps=0.0), [1.0])
    assert -theta - lr * share == pytest.approx(10 * expected, rel=1e-5, abs=1e-12)


def test_momentum_needs_no_correction_when_lr_changes():
    """Goyal et al. 2017, equation 9, by hand: a uncorrected momentum would give -1.461 and -3.5149 at the end."""

    def change(optimizer, t):
        optimizer.lr = 0.1 if t < 2 else 1.0

    seen = trained(RMSpropWarmup(0.1), (1, 1, 1, 1), change)
    assert [theta for theta, *_ in seen] == pytest.approx([-0.1, -0.29, -3.0, -6.439], rel=1e-13)


def test_a_rate_of_zero_moves_nothing():
    assert trained(RMSpropWarmup(0.0, a_sgd=0.5), [1.0])[0][0] == 0
