"""Gradients through communication, as functions of a communicator: compared with one process, which has all ranks'
arrays and moves them by plain functions, in first and second order."""

from __future__ import annotations

import numpy as np

import dbrdist
from dbrdist import functions as F
from dbrdist.comm import functions as C
from dbrdist.core.array import backend
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.differentiate import jvp
from dbrdist.core.tape.variable import Variable
from dbrdist.errors import CommunicatorError
from dbrdist.function_hooks import TimerHook
from tests.comm.contract import BFLOAT16
from tests.comm.disagreement_contract import all_raise, several


def values(shape, *key, dtype=np.float64):
    """Numbers that depend on the rank and the place, the same in every process."""
    return np.random.default_rng([7, *key]).uniform(0.5, 1.5, shape).astype(dtype)


def shape_of(rank, uneven):
    return (2, 3 + (rank if uneven else 0))


# Each case: what rank r has, the call on one rank, and what the ranks get where one process has everything.
def _ring(comm, xs, d):
    delegate = C.send(tuple(xs), comm, (comm.rank + 1) % comm.size, tag=3)
    return C.recv(comm, (comm.rank - 1) % comm.size, delegate, tag=3)


def _added(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def cases(size, root):
    n, last = size, root

    def rooted(r, xs, d):
        return xs[0] if r == last else d

    def scattered(r, xs, d):
        return xs if r == last else d

    def each(r):
        return [values((3, 2), r, k) for k in range(n)]

    found = {
        "allgather": (
            lambda r: [values(shape_of(r, True), r)],
            lambda comm, xs, d: C.allgather(comm, xs[0]),
            lambda xss: [[xs[0] for xs in xss]] * n,
        ),
        "reduce_scatter": (
            each,
            lambda comm, xs, d: [C.reduce_scatter(comm, xs)],
            lambda xss: [[_added([xs[r] for xs in xss])] for r in range(n)],
        ),
        "allreduce": (
            lambda r: [values((4,), r)],
            lambda comm, xs, d: [C.allreduce(comm, xs[0])],
            lambda xss: [[_added([xs[0] for xs in xss])]] * n,
        ),
        "alltoall": (
            lambda r: [values((r + 1, k + 1), r, k) for k in range(n)],
            lambda comm, xs, d: C.alltoall(comm, tuple(xs)),
            lambda xss: [[xs[r] for xs in xss] for r in range(n)],
        ),
        "bcast": (
            lambda r: [values((5,), r)] if r == last else [],
            lambda comm, xs, d: [C.bcast(comm, rooted(comm.rank, xs, d), last)],
            lambda xss: [[xss[last][0]]] * n,
        ),
        "gather": (
            lambda r: [values(shape_of(r, True), r)],
            lambda comm, xs, d: C.gather(comm, xs[0], last),
            lambda xss: [[xs[0] for xs in xss] if r == last else [] for r in range(n)],
        ),
        "scatter": (
            lambda r: each(r) if r == last else [],
            lambda comm, xs, d: [C.scatter(comm, scattered(comm.rank, xs, d), last)],
            lambda xss: [[xss[last][r]] for r in range(n)],
        ),
    }
    if size > 1:
        found["send"] = (
            lambda r: [values((2, r + 1), r), values((3,), r, 1)],
            _ring,
            lambda xss: [xss[(r - 1) % n] for r in range(n)],
        )
    return found


def loss_of(rank, own, ys):
    """A loss whose second derivatives depend on everything."""
    loss = F.sum(own**3)
    for k, y in enumerate(ys):
        loss = loss + F.sum(y**3 * values((), rank, k, 9)) + F.sum(y) ** 2 * F.sum(own)
    return loss


def penalty_of(rank, gradients):
    total = 0
    for k, g in enumerate(gradients):
        total = total + F.sum(g**2 * values((), rank, k, 11))
    return total


def on_one_process(size, case):
    """For each rank: the first-order gradients of its inputs, and those of a penalty on them."""
    inputs_of, _, moved = case
    xss = [[Variable(x) for x in inputs_of(r)] for r in range(size)]
    owns = [Variable(values((2,), r, 5)) for r in range(size)]
    yss = moved(xss)
    loss = _added([loss_of(r, owns[r], yss[r]) for r in range(size)])
    every = [[owns[r], *xss[r]] for r in range(size)]
    found = iter(grad([loss], [x for xs in every for x in xs], enable_double_backprop=True))
    first = [[next(found) for _ in xs] for xs in every]
    _added([penalty_of(r, gs) for r, gs in enumerate(first)]).backward()
    return [[g.array for g in gs] for gs in first], [[x.grad for x in xs] for xs in every]


def on_this_rank(comm, case, higher):
    """The same of this rank, by communication."""
    inputs_of, call, _ = case
    xs = [Variable(x) for x in inputs_of(comm.rank)]
    own, d = Variable(values((2,), comm.rank, 5)), Variable(np.zeros(1))
    ys = call(comm, xs, d)
    gathered, ys = (ys, []) if isinstance(ys, Variable) else (None, ys)  # a delegate variable, or outputs
    loss = C.pseudo_connect(gathered, loss_of(comm.rank, own, ys))
    if not higher:
        loss.backward()
        return [x.grad for x in (own, *xs)]
    *first, delegate = grad([loss], [own, *xs, d], enable_double_backprop=True)
    penalty = C.pseudo_connect(gathered, penalty_of(comm.rank, first))  # the root's depends on what was gathered
    if delegate is not None:
        penalty = C.pseudo_connect(delegate, penalty)
    penalty.backward()
    return [g.array for g in first], [x.grad for x in (own, *xs)]


def check_gradients_of_both_orders(comm):
    for root in sorted({0, comm.size - 1}):
        for name, case in cases(comm.size, root).items():
            expected = [orders[comm.rank] for orders in on_one_process(comm.size, case)]
            first, second = on_this_rank(comm, case, True)
            for found, right in ((on_this_rank(comm, case, False), expected[0]), (first, expected[0])):
                for g, r in zip(found, right, strict=True):
                    np.testing.assert_allclose(g, r, rtol=1e-12, err_msg=f"{name}, root {root}")
            for g, r in zip(second, expected[1], strict=True):
                np.testing.assert_allclose(g, r, rtol=1e-12, err_msg=f"{name}, root {root}, second order")


def check_vectors_have_a_number_for_each_rank(comm):
    """Arrays and Variables alike, from every rank and from the root alone."""
    n, rank = comm.size, comm.rank
    for give in (lambda x: x, list, Variable):
        xs = give(np.arange(n, dtype=np.float32) + 10 * rank)
        summed = C.reduce_scatter(comm, xs)
        exchanged = C.alltoall(comm, xs)
        scattered = C.scatter(comm, xs if rank == n - 1 else None, n - 1)
        assert all(type(y) is Variable and y.shape == () for y in (summed, *exchanged, scattered))
        assert summed.array == n * rank + 5 * n * (n - 1)
        assert [y.array for y in exchanged] == [10 * other + rank for other in range(n)]
        assert scattered.array == 10 * (n - 1) + rank


def check_every_type(comm):
    """Gradients have the type of their inputs; sums of 16-bit types run in float32."""
    for dtype in ("float16", "float32", "float64"):
        x = Variable(np.full((3,), 2.0**comm.rank, dtype))
        for call in (C.allgather, lambda c, x: (C.allreduce(c, x),), lambda c, x: (C.bcast(c, x, 0),)):
            ys = call(comm, x)
            x.cleargrad()
            _added([F.sum(y) for y in ys]).backward()
            if x.grad is not None:
                assert x.grad.dtype == dtype
        parts = [Variable(np.full(2, 2048.0 if comm.rank == 0 else 1.0, dtype)) for _ in range(comm.size)]
        y = C.reduce_scatter(comm, parts)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.array, np.full(2, 2048.0 + comm.size - 1).astype(dtype))


@several
def check_types_and_layouts_of_messages(comm):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for dtype in ("float16", BFLOAT16, "float64"):
        x = Variable(np.full((2, 3), comm.rank + 1, dtype))
        y = C.recv(comm, left, C.send(x, comm, right, tag=5), tag=5)
        F.sum(y * y).backward()
        assert y.dtype == x.grad.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(x.grad.astype("d"), np.full((2, 3), 2.0 * (comm.rank + 1)))
    x = Variable(backend.channels_last(values((2, 3, 4, 5), comm.rank, dtype=np.float32)))
    y = C.recv(comm, left, C.send(x, comm, right))
    F.sum(y**2).backward()
    assert backend.is_channels_last(y.array) and backend.is_channels_last(x.grad)
    for shape in ((), (0,), (3, 0, 2)):
        x = Variable(np.ones(shape))
        F.sum(C.recv(comm, left, C.send(x, comm, right)) * 3).backward()
        np.testing.assert_array_equal(x.grad, np.full(shape, 3.0))


def check_third_order_forward_mode_hooks_and_debug_mode(comm):
    n = comm.size
    total = n * (n + 1) / 2
    x = Variable(np.full(2, comm.rank + 1.0))
    loss = F.sum(C.allreduce(comm, x) ** 4)
    for _ in range(2):
        (g,) = grad([loss], [x], enable_double_backprop=True)
        loss = F.sum(g)
    (third,) = grad([loss], [x])
    np.testing.assert_allclose(third.array, 24 * total * n**3)
    y, t = jvp(lambda a: C.allreduce(comm, a * a), (x.array,), (np.full(2, comm.rank + 2.0),))
    np.testing.assert_allclose(t.array, sum(2.0 * (r + 1) * (r + 2) for r in range(n)))
    x.cleargrad()
    with TimerHook(), dbrdist.using_config("debug", True):
        y = C.allreduce(comm, x * 2)
        F.sum(C.allgather(comm, y)[0]).backward(retain_grad=True)
    np.testing.assert_allclose(y.grad, 0 if comm.rank else n)  # all ranks use rank 0's
    np.testing.assert_allclose(x.grad, 2 * n)


def check_backward_twice_adds_up(comm):
    x = Variable(values((3,), comm.rank))
    loss = F.sum(C.allreduce(comm, x) ** 2)
    loss.backward()
    once = x.grad.copy()
    loss.backward()
    np.testing.assert_allclose(x.grad, 2 * once)


def check_integers_travel_without_gradient(comm):
    tokens = np.arange(4, dtype=np.int32) + comm.rank
    found = C.allgather(comm, tokens)
    for r, y in enumerate(found):
        np.testing.assert_array_equal(y.array, np.arange(4) + r)
        assert not y.requires_grad
    if comm.size > 1:
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        x = Variable(values((2,), comm.rank))
        delegate = C.send((tokens, x), comm, right)
        ids, h = C.recv(comm, left, delegate)
        np.testing.assert_array_equal(ids.array, np.arange(4) + left)
        F.sum(h * (comm.rank + 1)).backward()
        np.testing.assert_array_equal(x.grad, np.full(2, right + 1.0))
        delegate = C.send(tokens, comm, right)  # nothing comes back, and nothing is waited for
        (ids,) = C.recv(comm, left, force_tuple=True)
        assert ids.dtype == np.int32
        delegate.backward()
    comm.barrier()


def check_one_tuple_and_what_is_not_used(comm):
    """A message of one is a Variable, of several a tuple; what no loss depends on has gradient zero."""
    if comm.size == 1:
        return
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    a, b = Variable(values((2,), comm.rank)), Variable(values((3,), comm.rank))
    delegate = C.send((a,), comm, right)
    h = C.recv(comm, left, delegate)
    assert isinstance(h, Variable)
    delegate = C.send([a, b], comm, right)
    g, _ = C.recv(comm, left, C.pseudo_connect(delegate, h))
    F.sum(g * 2 + h).backward()
    np.testing.assert_array_equal(a.grad, np.full(2, 3.0))
    np.testing.assert_array_equal(b.grad, np.zeros(3))


def check_backward_goes_through_calls_in_reverse_order(comm):
    """On every rank, however deep its own graph is: without an order rank 0 would come to the two in another order."""
    x, y = Variable(values((3,), comm.rank)), Variable(values((3,), comm.rank, 1))
    u, v = x, y
    for _ in range(9 if comm.rank == 0 else 0):
        u = u + 0.0
    for _ in range(9 if comm.rank == comm.size - 1 else 0):
        v = v + 0.0
    a = C.allreduce(comm, u)
    b = C.allreduce(comm, v)
    F.sum(a * 2.0 * (comm.rank + 1) + b * 3.0).backward()
    np.testing.assert_allclose(x.grad, np.full(3, comm.size * (comm.size + 1.0)))
    np.testing.assert_allclose(y.grad, np.full(3, comm.size * 3.0))


@several
def check_going_back_through_different_calls(comm):
    """An error on every rank, though both calls are the same verb with the same shapes."""

    def backward():
        x = Variable(values((3,), comm.rank))
        a, b = C.allreduce(comm, x), C.allreduce(comm, x * 2)
        F.sum(a if comm.rank == 0 else b).backward()

    all_raise(comm, CommunicatorError, "allreduce backward through differentiable call", backward)


@several
def check_a_gradient_for_another_message(comm):
    """The rank whose loss leaves out a message is found by the gradient of the next."""
    x = Variable(values((3,), comm.rank))
    if comm.rank == 0:
        first = C.send(x, comm, 1)
        second = C.send(x, comm, 1)
        try:
            C.pseudo_connect(first, second).backward()
        except CommunicatorError as e:
            assert "the gradient of message" in str(e) and "pseudo_connect" in str(e), e
        else:
            raise AssertionError("expected an error")
    elif comm.rank == 1:
        first, second = C.recv(comm, 0), C.recv(comm, 0)
        F.sum(first).backward()
    comm.barrier()


@several
def check_wrong_arguments_raise_on_every_rank(comm):
    x = Variable(values((3,), comm.rank))
    wrong = comm.rank == comm.size - 1
    tries = {
        "alltoall expected": lambda: C.alltoall(comm, [x] * (comm.size + wrong)),
        "alltoall expected ": lambda: C.alltoall(comm, None if wrong else [x] * comm.size),
        "reduce_scatter expected": lambda: C.reduce_scatter(comm, [x] * (comm.size - wrong)),
        "the same shapes and types": lambda: C.reduce_scatter(comm, [x[: 3 - wrong]] * comm.size),
        "allgather expected": lambda: C.allgather(comm, "text" if wrong else x),
        "the same shape and type": lambda: C.allreduce(comm, x[: 3 - wrong]),
        "expected a rank from 0": lambda: C.bcast(comm, x, comm.size if wrong else 0),
        "the same root": lambda: C.gather(comm, x, 1 if wrong else 0),
        "scatter expected": lambda: C.scatter(comm, [x], comm.rank if wrong else comm.size - 1),
    }
    for text, call in tries.items():
        all_raise(comm, Exception, text.strip(), call)


def check_wrong_messages(comm):
    x = Variable(values((3,), comm.rank))
    for call in (lambda: C.send(x, comm, comm.rank), lambda: C.recv(comm, comm.rank)):
        raises(ValueError, "another rank than this one", call)
    raises(ValueError, "one or more Variables", lambda: C.send((), comm, comm.size))
    raises(ValueError, "one or more Variables after the delegate", lambda: C.pseudo_connect(x))
    raises(ValueError, "a rank from 0", lambda: C.recv(comm, comm.size))


def raises(kind, text, call):
    try:
        call()
    except kind as e:
        assert text in str(e), e
    else:
        raise AssertionError(f"expected {kind.__name__} with {text!r}")


def check_without_a_graph(comm):
    with dbrdist.no_backprop_mode():
        y = C.allreduce(comm, Variable(values((3,), 1)))
        assert y.creator is None
    np.testing.assert_allclose(y.array, comm.size * values((3,), 1))


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


def by_name(check):
    return check.__name__.removeprefix("check_")
