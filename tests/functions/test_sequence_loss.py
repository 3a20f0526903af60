"""Losses of sequences against PyTorch; wrong arguments; samples."""

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.tape.gradient_check import check_double_backward
from tests.each import each

RNG = np.random.default_rng(0)
X = [RNG.standard_normal((2, 4)) for _ in range(6)]
T = np.array([[1, 2, 2], [3, 1, 0]])


@pytest.mark.torch
def test_ctc_against_pytorch():
    torch = pytest.importorskip("torch")
    xs = [Variable(x) for x in X]
    steps, lengths = np.array([6, 5]), np.array([3, 2])
    losses = F.connectionist_temporal_classification(xs, T, 0, steps, lengths, "no")
    F.sum(losses * np.array([1.0, 2.0])).backward()
    theirs = torch.tensor(np.stack(X), requires_grad=True)
    found = torch.nn.functional.ctc_loss(
        theirs.log_softmax(2), torch.tensor(T), torch.tensor(steps), torch.tensor(lengths), blank=0, reduction="none"
    )
    (found * torch.tensor([1.0, 2.0])).sum().backward()
    np.testing.assert_allclose(losses.array, found.detach().numpy(), rtol=1e-9)
    np.testing.assert_allclose(np.stack([x.grad for x in xs]), theirs.grad.numpy(), rtol=1e-8, atol=1e-12)


@pytest.mark.torch
@each(seed=range(40))
def test_ctc_of_any_lengths_labels_and_blanks_against_pytorch(seed):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    num_steps, batch, size, most = (int(rng.integers(*r)) for r in ((1, 9), (1, 5), (2, 6), (0, 4)))
    blank = int(rng.integers(size))
    labels = rng.choice([k for k in range(size) if k != blank], (batch, most)).astype(rng.choice(["i1", "u4", "i8"]))
    steps, lengths = rng.integers(1, num_steps + 1, batch), rng.integers(0, most + 1, batch)
    x, gy = rng.standard_normal((num_steps, batch, size)) * rng.choice([1, 100]), rng.standard_normal(batch)
    xs = [Variable(a) for a in x]
    losses = F.connectionist_temporal_classification(xs, labels, blank, steps, lengths, "no")
    losses.grad = gy
    losses.backward()
    theirs = torch.tensor(x, requires_grad=True)
    found = torch.nn.functional.ctc_loss(
        theirs.log_softmax(2), *(torch.tensor(a.astype(np.int64)) for a in (labels, steps, lengths)), blank, "none"
    )
    possible = torch.isfinite(found)
    (found * torch.tensor(gy))[possible].sum().backward()
    possible, gx = possible.numpy(), np.stack([a.grad for a in xs])
    np.testing.assert_array_equal(losses.array < 1e20, possible)
    np.testing.assert_allclose(losses.array[possible], found.detach().numpy()[possible], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gx[:, possible], theirs.grad.numpy()[:, possible], rtol=1e-8, atol=1e-10)
    assert (gx[np.arange(num_steps)[:, None] >= steps] == 0).all() and (abs(gx) <= abs(gy)[:, None] * 1.001).all()


def test_ctc_derives_twice_with_lengths_and_repeated_labels():
    def losses(*xs):
        return F.connectionist_temporal_classification(xs, T, 0, np.array([6, 4]), np.array([3, 1]), "no")

    ggs = [RNG.standard_normal(x.shape) for x in X]
    check_double_backward(losses, X, np.array([1.0, -2.0]), ggs, eps=1e-3, atol=1e-6, rtol=1e-6)


def test_ctc_looks_at_no_score_beyond_a_sequence_and_gives_each_step_its_own_gradient():
    xs, padded = ([Variable(x.copy()) for x in X] for _ in range(2))
    padded[4].array[1] = np.nan
    padded[5].array[1] = -np.inf
    for steps in (xs, padded):
        F.connectionist_temporal_classification(steps, T, 0, np.array([6, 4]), np.array([3, 1])).backward()
    before = [x.grad.copy() for x in xs]
    np.testing.assert_array_equal([x.grad for x in padded], before)
    xs[0].grad[...] = 7
    np.testing.assert_array_equal([x.grad for x in xs[1:]], before[1:])


def test_ctc_adds_up_what_one_array_gets_in_several_steps():
    x, xs = Variable(X[0]), [Variable(X[0]) for _ in range(4)]
    for steps in ([x] * 4, xs):
        F.connectionist_temporal_classification(steps, T[:, :2], 0).backward()
    np.testing.assert_allclose(x.grad, sum(a.grad for a in xs), rtol=1e-12)


def test_ctc_of_scores_of_minus_infinity_stays_finite():
    x = np.where(np.arange(4) == 3, -np.inf, X[0])
    xs = [Variable(x.copy()) for _ in range(5)]
    losses = F.connectionist_temporal_classification(xs, np.array([[1, 2], [3, 1]]), 0, reduce="no")
    losses.grad = np.ones(2)
    losses.backward()
    lacking = F.connectionist_temporal_classification([x[:1, :3]] * 5, np.array([[1, 2]]), 0)
    np.testing.assert_allclose(losses.array[0], lacking.array, rtol=1e-12)
    assert losses.array[1] > 1e20 and all(np.isfinite(a.grad).all() for a in xs)
    alone = [Variable(np.array([[-np.inf, -np.inf, -np.inf, 1.0]])) for _ in range(5)]
    loss = F.connectionist_temporal_classification(alone, np.array([[1, 2]]), 0)
    loss.backward()
    assert loss.array > 1e20 and all(np.isfinite(a.grad).all() for a in alone)


def test_ctc_of_long_sequences_in_float32_stays_finite():
    xs = [Variable(RNG.standard_normal((2, 4)).astype(np.float32) * 5) for _ in range(200)]
    loss = F.connectionist_temporal_classification(xs, T, 0, label_length=np.array([3, 2]))
    loss.backward()
    assert np.isfinite(loss.array) and all(np.isfinite(x.grad).all() for x in xs)


def test_ctc_of_impossible_labels_is_very_large_and_its_gradient_finite():
    xs = [Variable(x) for x in X[:2]]
    loss = F.connectionist_temporal_classification(xs, T, 0, label_length=np.array([3, 2]))
    loss.backward()
    assert loss.array > 1e20 and all(np.isfinite(x.grad).all() for x in xs)


def test_best_path_beats_all_others():
    cost, xs = RNG.standard_normal((3, 3)), [RNG.standard_normal((n, 3)) for n in (3, 2, 2, 1)]
    score, path = F.argmax_crf1d(cost, xs)
    loss = F.crf1d(cost, xs, path, reduce="no")
    for other in range(3):
        changed = [np.where(np.arange(len(p)) == 0, other, p) for p in path]
        assert (F.crf1d(cost, xs, changed, reduce="no").array >= loss.array - 1e-12).all()
    assert [len(p) for p in path] == [3, 2, 2, 1] and score.shape == (3,)


ONES = np.ones


@pytest.mark.parametrize("call, message", [
    (lambda: F.crf1d(ONES((2, 2)), X, [T[:, 0]] * 6), r"crf1d: cost: expected shape \(4, 4\) to match xs"),
    (lambda: F.crf1d(ONES((4, 4)), X, [T[:, 0]] * 5), r"crf1d: ys: expected 6 steps as in xs, got 5"),
    (lambda: F.crf1d(ONES((4, 4)), X[:1], [np.array([0, 4])]), r"crf1d: ys\[0\]: expected labels from 0 to 3"),
    (lambda: F.crf1d(ONES((4, 4)), X[:1], [np.array([0.0, 1.0])]), r"ys\[0\]: expected integers of shape \(2,\)"),
    (lambda: F.crf1d(ONES((4, 4)), [X[0][:1], X[1]], []), r"crf1d: xs\[1\]: expected shape \(N, 4\) with N at most 1"),
    (lambda: F.crf1d(ONES((4, 4)), [], []), r"crf1d: xs: expected at least one step, got none"),
    (lambda: F.argmax_crf1d(ONES((4, 3)), X), r"argmax_crf1d: cost: expected shape \(4, 4\)"),
    (lambda: F.connectionist_temporal_classification(X, T, 2), r"t: expected labels from 0 to 3 without the blank 2"),
    (lambda: F.connectionist_temporal_classification(X, T, 4), r"blank_symbol: expected a label from 0 to 3"),
    (lambda: F.connectionist_temporal_classification(X, T[:1], 0), r"t: expected integers of shape \(2, L\)"),
    (lambda: F.connectionist_temporal_classification(X, T, 0, np.array([7, 1])), r"input_length: expected 2 integers"),
    (lambda: F.negative_sampling(ONES((2, 3)), T[:, 0], ONES((4, 2)), None, 1), r"W: expected shape \(V, 3\)"),
    (lambda: F.negative_sampling(ONES((2, 3)), T[:, 0], ONES((2, 3)), None, 1), r"t: expected words from 0 to 1"),
    (lambda: F.negative_sampling(ONES((2, 3)), T[:, 0], ONES((4, 3)), None, 1, samples=np.array([[1, 0], [4, 0]])),
     r"^negative_sampling: samples: expected labels from -1 to 3, got labels from 1 to 4"),
    (lambda: F.negative_sampling(ONES((2, 3)), T[:, 0], ONES((4, 3)), None, 1, samples=np.array([[1, 0], [1, -1]])),
     r"^negative_sampling: samples: expected labels from 0 to 3, got labels from -1 to 0"),
    (lambda: F.black_out(ONES((2, 3)), T[:, 0], ONES((4, 3)), T[:1]), r"samples: expected integers of shape \(2, S\)"),
    (lambda: F.black_out(ONES((2, 3)), T[:, 0], ONES((4, 3)), T, "sum"), r"black_out: reduce: expected"),
])  # fmt: skip
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_half_precision_stays_half_and_finite():
    x = [Variable(a.astype(np.float16)) for a in X]
    loss = F.connectionist_temporal_classification(x, T, 0, label_length=np.array([3, 2]))
    loss.backward()
    assert loss.dtype == np.float16 and all(np.isfinite(a.grad).all() for a in x)
    h, W = Variable(RNG.standard_normal((2, 3)).astype(np.float16)), Variable(RNG.standard_normal((5, 3)).astype("e"))
    loss = F.black_out(h, T[:, 0], W, T)
    loss.backward()
    assert loss.dtype == np.float16 and np.isfinite(W.grad).all()


@pytest.mark.slow
def test_sums_over_steps_run_in_a_wider_type_than_float16():
    labels = [np.zeros(1, np.int32)] * 900
    loss = F.crf1d(np.zeros((3, 3), np.float16), [np.full((1, 3), 100, np.float16)] * 900, labels)
    np.testing.assert_allclose(loss.array, 900 * np.log(3), rtol=1e-3)
    assert loss.dtype == np.float16
    assert F.crf1d(np.zeros((3, 3), np.float32), [np.zeros((1, 3), np.float16)] * 900, labels).dtype == np.float32
    xs = [Variable(5 * a) for a in RNG.standard_normal((40, 2, 4)).astype(np.float16)]
    wide = [Variable(x.array.astype(np.float64)) for x in xs]
    for steps in (xs, wide):
        F.connectionist_temporal_classification(steps, T, 0, label_length=np.array([3, 2])).backward()
    np.testing.assert_allclose([x.grad for x in xs], [x.grad for x in wide], rtol=0, atol=1e-3)


def test_ctc_of_no_steps():
    def of(num_labels):
        lengths = np.full(2, num_labels)
        return F.connectionist_temporal_classification(X, T, 0, np.array([0, 6]), lengths, "no").array[0]

    assert of(0) == 0.0 and of(1) > 1e20


@each(steps=[1, 2], label=[[0], [1]])
def test_ctc_of_few_steps_has_second_derivatives(steps, label):
    xs = tuple(RNG.standard_normal((1, 3)) for _ in range(steps))
    t, length = np.array([label]), np.array([int(label[0] > 0)])

    def loss(*xs):
        return F.connectionist_temporal_classification(list(xs), t, 0, label_length=length)

    p = [np.exp(x) / np.exp(x).sum() for x in xs]
    likely = np.prod([q[0, 0] for q in p])
    if length[0]:  # the label at one step, with blanks around it, or at both
        q = [v[0, 1] for v in p]
        likely = q[0] if steps == 1 else q[0] * q[1] + q[0] * p[1][0, 0] + p[0][0, 0] * q[1]
    np.testing.assert_allclose(loss(*xs).array, -np.log(likely), rtol=1e-10)
    g = RNG.standard_normal(())
    check_double_backward(loss, xs, np.asarray(g), tuple(RNG.standard_normal((1, 3)) for _ in xs), atol=1e-5, rtol=1e-4)


@each(label=[-1, 0, 3, 4])
def test_labels_beyond_the_classes_and_the_blank_are_refused(label):
    xs = [np.zeros((1, 3), np.float32)] * 4
    with pytest.raises(ValueError, match=r": t: expected labels from 0 to 2 without the blank 0, got shape \(1, 1\)"):
        F.connectionist_temporal_classification(xs, np.array([[label]]), 0)
    loss = F.connectionist_temporal_classification(xs, np.array([[2]]), 0)  # 10 of 81 paths lead to one label
    np.testing.assert_allclose(float(loss.array), np.log(81 / 10), rtol=1e-6)
