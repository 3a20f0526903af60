"""Graphs, optimizers and iterators as programs of Chainer use them, where dbrdist is stricter natively."""

import numpy as np
import pytest

import dbrdist
from tests.each import each


def double(n_gradients=1):
    import chainer

    class Double(chainer.FunctionNode):
        def forward(self, xs):
            return (xs[0] * 2,)

        def backward(self, indexes, gys):
            assert self.get_retained_inputs() == () and self.get_retained_outputs() == ()
            return (gys[0] * 2,) * n_gradients

    return Double()


def test_a_function_node_may_be_applied_again(installed):
    import chainer

    node = double()
    for value in (1, 3):
        x = chainer.Variable(np.array(value, "f"))
        (y,) = node.apply((x,))
        y.backward()
        assert (y.array, x.grad) == (2 * value, 2)


def test_a_rule_may_return_a_gradient_for_each_input_also_for_those_that_take_none(installed):
    import chainer

    x, constant = chainer.Variable(np.array(1, "f")), chainer.Variable(np.array(5, "f"), requires_grad=False)
    (y,) = double(2).apply((constant, x))
    y.backward()
    assert x.grad == 2 and constant.grad is None


def test_backward_of_outputs_takes_their_gradients_and_sets_none(installed):
    import chainer

    x = chainer.Variable(np.array([1, 2], "f"))
    h = x * 2
    y, z, unset = h * 3, h * 4, h * 5
    y.grad, z.grad = np.array([1, 10], "f"), np.array([100, 1000], "f")
    with pytest.warns(RuntimeWarning, match="sets no default gradient"):
        chainer.backward([y, z, y, unset])
    np.testing.assert_array_equal(x.grad, [6 + 800, 60 + 8000])
    assert y.grad is None and z.grad is None and unset.grad is None


def test_our_own_backward_passes_begin_with_one(installed):
    import chainer
    import chainermn

    x = chainer.Variable(np.array(3, "f"))
    dbrdist.backward([x * 2])
    assert x.grad == 2

    model = chainer.links.Linear(2, 1, initialW=5, nobias=True)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1), chainermn.create_communicator("naive"))
    optimizer.setup(model).update(lambda: chainer.functions.sum(model(np.array([[1, 2]], "f"))))
    assert model.W.array.tolist() == [[4, 3]]


def test_new_parameters_have_a_gradient_of_nan_to_write_to(installed):
    import chainer

    model = chainer.links.Linear(2, 3)
    assert np.isnan(model.W.grad).all()
    model.W.grad[:] = 1
    late = chainer.links.Linear(None, 3)
    late.cleargrads()
    late(np.ones((1, 2), "f"))
    assert late.W.grad is None
    assert np.isnan(chainer.Parameter(0, (2,)).grad).all()


def test_batches_are_lists_that_a_program_may_change(installed):
    import chainer

    batch = chainer.iterators.SerialIterator(np.arange(4, dtype="f"), 2, shuffle=False).next()
    batch.append(np.float32(9))
    np.testing.assert_array_equal(chainer.dataset.concat_examples(batch), [0, 1, 9])


def test_reports_are_variables_without_a_graph(installed):
    import chainer

    reporter = chainer.Reporter()
    reporter.report({"loss": chainer.Variable(np.array(2, "f")) * 3})
    loss = reporter.observation["loss"]
    assert float(loss.data) == 6 and loss.creator is None


def test_any_object_with_update_serves_as_an_update_rule(installed):
    import chainer

    class Halve:
        def update(self, param):
            param.array[...] /= 2

    class Optimizer(chainer.GradientMethod):
        def create_update_rule(self):
            return Halve()

    model = chainer.links.Linear(1, 1, nobias=True, initialW=8)
    optimizer = Optimizer()
    optimizer.setup(model)
    for expected in (4, 2):
        model.W.grad = np.ones((1, 1), "f")
        optimizer.update()
        assert model.W.array.item() == expected


def test_own_update_rules_see_parameters_without_a_shape(installed):
    import chainer

    seen = []

    class Rule(chainer.UpdateRule):
        def update_core(self, param):
            seen.append(param.array is None)

    class Optimizer(chainer.GradientMethod):
        def create_update_rule(self):
            return Rule()

    optimizer = Optimizer()
    optimizer.setup(chainer.links.Linear(None, 2))
    optimizer.update()
    assert seen == [False, True]  # b, and W without a shape


def test_a_gradient_that_a_hook_removes_is_zero_for_the_next(installed):
    import chainer

    model, seen = chainer.links.Linear(1, 1), []
    optimizer = chainer.optimizers.SGD(1.0)
    optimizer.setup(model)
    optimizer.add_hook(lambda opt: opt.target.cleargrads(), "clear")
    optimizer.add_hook(lambda opt: seen.extend(p.grad.sum() for p in opt.target.params()), "look")
    model.W.grad, model.b.grad = np.ones((1, 1), "f"), np.ones(1, "f")
    optimizer.update()
    assert seen == [0, 0]


def test_an_iterator_goes_on_where_chainers_was_saved(installed):
    import chainer

    saved = {"current_position": 2, "epoch": 1, "is_new_epoch": False, "order": np.array([3, 1, 0, 2])}
    saved = {name: np.asarray(value) for name, value in saved.items()}
    for missing in ({}, {"previous_epoch_detail": np.asarray(1.0)}):
        iterator = chainer.iterators.SerialIterator([10, 11, 12, 13], 2)
        iterator.serialize(chainer.serializers.NpzDeserializer({**saved, **missing}))
        assert (iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail) == (1, 1.5, 1.0)
        again = {}
        iterator.serialize(chainer.serializers.DictionarySerializer(again))
        other = chainer.iterators.SerialIterator([10, 11, 12, 13], 2)
        other.serialize(chainer.serializers.NpzDeserializer(again))
        assert iterator.next() == other.next() == [10, 12] and iterator.is_new_epoch
        assert sorted(iterator.next() + iterator.next()) == [10, 11, 12, 13]


def test_functions_that_a_program_replaces_deep_inside_are_replaced_for_links(installed):
    import chainer
    import chainer.functions.loss.negative_sampling as module

    link = chainer.links.NegativeSampling(2, [1, 1], 1)
    x, t = np.ones((1, 2), "f"), np.zeros(1, "i")
    before, module.negative_sampling = module.negative_sampling, lambda *args, **kwargs: "replaced"
    try:
        assert link(x, t) == "replaced"
    finally:
        module.negative_sampling = before
    assert link(x, t).shape == ()


def test_checks_of_users_name_the_function(installed):
    import chainer
    from chainer.utils import type_check

    class Checked(chainer.FunctionNode):
        def check_type_forward(self, in_types):
            type_check.expect(in_types[0].ndim >= 2)

    with pytest.raises(type_check.InvalidType) as caught:
        Checked().apply((np.ones(2, "f"),))
    words = "Invalid operation is performed in: Checked (Forward)\n\nExpect: in_types[0].ndim >= 2\nActual: 1 < 2"
    assert str(caught.value) == words


@pytest.mark.parametrize("kind, call", [
    (AssertionError, lambda F, x: F.bias(x, np.ones(5, "f"))),
    (AssertionError, lambda F, x: F.scale(x, np.ones(5, "f"))),
    (NotImplementedError, lambda F, x: F.hinge(x, np.zeros(2, "i"), norm="L3")),
    (TypeError, lambda F, x: F.prod(x, axis=[0])),
    (ValueError, lambda F, x: F.dropout(x, train=True)),
    (TypeError, lambda F, x: F.dropout(x, unknown=True)),
    (ValueError, lambda F, x: F.get_item(x, (Ellipsis, Ellipsis))),
    (ValueError, lambda F, x: F.scatter_add(x, (Ellipsis, Ellipsis), x)),
    (ValueError, lambda F, x: F.mean_squared_error(x, x.astype("d"))),
])  # fmt: skip
def test_errors_are_of_the_classes_that_programs_catch(installed, kind, call):
    import chainer.functions as F

    with pytest.raises(kind):
        call(F, np.ones((2, 3), "f"))


INCEPTION = 3, 2, 2, 2, 2, 2


@pytest.mark.parametrize("kind, call", [
    (AssertionError, lambda L: L.InceptionBN(*INCEPTION, "max")),
    (AssertionError, lambda L: L.InceptionBN(*INCEPTION, "max", 2, stride=2)),
    (NotImplementedError, lambda L: L.InceptionBN(*INCEPTION, "min", 2)),
    (ValueError, lambda L: L.MLPConvolution2D(2, (3, 4), 3, wscale=1)),
    (TypeError, lambda L: L.MLPConvolution2D(2, (3, 4), None, 1, 0, None, 1)),
    (ValueError, lambda L: L.GRU(2, 2)()),
    (ValueError, lambda L: L.GRU(2, 2)(np.ones((1, 2), "f"), np.ones((1, 2), "f"))),
])  # fmt: skip
def test_errors_of_links_are_of_the_classes_that_programs_catch(installed, kind, call):
    import chainer.links as L

    with pytest.raises(kind):
        call(L)


def test_the_print_hook_shows_statistics(installed, capsys):
    import chainer

    with chainer.function_hooks.PrintHook():
        y = chainer.functions.sum(chainer.Variable(np.array([1, 3], "f")))
        y.backward()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "function\tSum" and lines[2].startswith("<variable at 0x")
    assert "- statistics: mean=2.00000000, std=1.00000000" in lines and lines.count("output gradient") == 1


def test_the_last_ranks_are_one_set_of_replicas_in_chainermn(installed):
    from dbrdist.comm.run.checkpoints import _parse_sets

    assert _parse_sets([[0, 2]], 5) == [[0, 2], [1, 3, 4]] and _parse_sets([], 2) == [[0, 1]]


def test_pseudo_connect_gives_a_tuple(installed):
    import chainer
    import chainermn.functions

    x = chainer.Variable(np.arange(6, dtype="f").reshape(2, 3))
    ys = chainermn.functions.pseudo_connect(chainer.Variable(np.ones(1, "f")), x)
    (y,) = ys
    assert isinstance(ys, tuple) and ys[0] is y and y.shape == (2, 3)
    ys.grad = np.full((2, 3), 2, "f")  # a program of Chainer 6 takes it to be the Variable
    ys.backward()
    assert ys.array is y.array and x.grad.tolist() == [[2] * 3] * 2


@each(is_old=[False, True])
def test_none_among_inputs_and_outputs(is_old, installed):
    """Chainer calls functions with None, and takes None as an output; the rule sees None at their places."""
    import chainer

    seen = []

    def check(xs, gys):
        seen.append([x is None for x in xs] + [g is None for g in gys])

    if is_old:

        class Double(chainer.Function):
            def forward(self, xs):
                self.retain_inputs((1, 2))
                self.retain_outputs((0, 1))
                return None, xs[1] * 2

            def backward(self, xs, gys):
                check((*xs, *self.output_data), gys)
                return None, 2 * gys[1], None

        call = Double()
    else:

        class Double(chainer.FunctionNode):
            def forward(self, xs):
                self.retain_inputs((1, 2))
                self.retain_outputs((0, 1))
                return None, xs[1] * 2

            def backward(self, indexes, gys):
                assert indexes == (1,)
                check((None, *self.get_retained_inputs(), *self.get_retained_outputs()), gys)
                return None, 2 * gys[1], None

        def call(*xs):
            return Double().apply(xs)

    x = chainer.Variable(np.array([2, 3], "f"))
    nothing, y = call(None, x, None)
    assert nothing.array is None and y.array.tolist() == [4, 6]
    y.grad = np.array([1, 10], "f")
    y.backward()
    assert x.grad.tolist() == [2, 20] and seen == [[True, False, True, True, False, True, False]]
    with chainer.no_backprop_mode():
        nothing, y = call(None, x, None)
        assert nothing.array is None and y.array.tolist() == [4, 6]


def test_natively_an_output_of_none_is_an_error():
    class Forgets(dbrdist.FunctionNode):
        def forward(self, xs):
            return (None,)

    for requires_grad in (False, True):
        with pytest.raises(TypeError, match="Forgets: forward output must be a tuple of ndarrays, got NoneType"):
            Forgets().apply((dbrdist.Variable(np.ones(2), requires_grad=requires_grad),))


def test_results_of_arrays_alone_have_a_creator(installed):
    import chainer
    import chainer.functions as F

    x = np.array([[1, -2, 3]], "f")
    y = F.relu(x)
    assert isinstance(y.creator, F.activation.relu.ReLU) and not y.requires_grad
    assert F.dropout(x, 0.0).creator.mask.tolist() == [[1, 1, 1]], "also where nothing is dropped"
    W = chainer.Parameter(np.array([[1, 2, 3]], "f"))
    W.cleargrad()
    F.sum(W * y).backward()
    assert W.grad.tolist() == [[1, 0, 3]]
    with chainer.no_backprop_mode():
        assert F.relu(x).creator is None
    with pytest.warns(UserWarning, match="the output has no graph"):
        F.sum(y).backward()


def test_natively_they_have_none():
    assert dbrdist.functions.relu(np.ones(2, "f")).creator is None
    x = dbrdist.Variable(np.ones(2, "f"))
    assert dbrdist.functions.dropout(x, 0.0) is x


@each(name=["Convolution2D", "Deconvolution2D", "ConvolutionND", "Linear"], dtype=["e", "d"])
def test_an_array_beside_parameters_gives_its_type_to_the_result(name, dtype, installed):
    import chainer.functions as F
    import chainer.links as L

    link = {
        "Convolution2D": lambda: L.Convolution2D(2, 3, 1, nobias=True),
        "Deconvolution2D": lambda: L.Deconvolution2D(2, 3, 1, nobias=True),
        "ConvolutionND": lambda: L.ConvolutionND(2, 2, 3, 1, nobias=True),
        "Linear": lambda: L.Linear(8, 3, nobias=True),
    }[name]()
    x = np.random.RandomState(0).uniform(-1, 1, (2, 2, 2, 2))
    y = link(x.astype(dtype))
    assert y.dtype == dtype
    reference = link(x.astype("f")).array
    np.testing.assert_allclose(y.array, reference, rtol=1e-2 if dtype == "e" else 1e-5, atol=1e-2)
    F.sum(y).backward()
    assert link.W.grad.dtype == np.float32
    assert (link.W * np.ones(1, dtype)).dtype == np.float32, "arithmetic takes the Variable's type"


def test_variables_that_begin_with_gradients_of_zero(installed):
    import chainer.links as L

    link = L.Linear(None, 2)
    with pytest.warns(DeprecationWarning):
        link.zerograds()
    link.W.initialize((2, 3))
    assert link.W.grad.tolist() == [[0, 0, 0]] * 2 and link.b.grad.tolist() == [0, 0]


def test_a_tuple_as_a_size_is_an_error_when_the_array_is_made(installed):
    import chainer
    import chainer.links as L

    with pytest.warns(UserWarning, match=r"Linear: in_size: expected an integer, got tuple \(3, 3\)"):
        link = L.Linear((3, 3))
    assert len(chainer.Sequential(link)) == 1
    with pytest.raises(TypeError):
        link(np.ones((1, 3), "f"))


def test_forget_gives_one_variable_for_a_tuple_of_one(installed):
    import chainer.functions as F

    assert F.forget(lambda x: (x * 2,), np.ones(2, "f")).array.tolist() == [2, 2]


def test_devices_of_other_names_are_refused(installed):
    import chainer

    with pytest.raises(RuntimeError, match="ChainerX"):
        chainer.get_device("native:0x")
    for wrong in ("@cupy", "@foo", ("native", 0)):
        with pytest.raises((TypeError, ValueError)):
            chainer.get_device(wrong)


def test_nodes_of_a_graph_have_chainers_attributes(installed):
    import chainer
    import chainer.functions as F

    link, x = chainer.links.Linear(3, 2), chainer.Variable(np.ones((1, 3), "f"))
    h = link(x)
    y = F.exp(h)
    inputs = h.creator.inputs
    assert inputs[0].data is x.array and inputs[1].data is link.W.array
    assert inputs[0].get_variable() is x and inputs[1].get_variable() is link.W
    assert y.node.data is y.array  # its function retained it
    assert h.node.data is None and h.node.get_variable_or_none() is None
    h.retain_data()
    assert h.node.data is h.array and h.node.get_variable().array is h.array
    assert (h.node.label, h.node.rank, h.node.grad) == ("(1, 2), float32", 1, None)
    F.sum(y).backward(retain_grad=True)
    assert h.node.grad is h.grad and h.node.grad_var.array is h.grad
    x.data = np.zeros((4, 2), "d")
    assert x.node.data is x.array and x.node.shape == (4, 2)
    node, shared = h.node, h.node.get_variable()
    del h
    assert node.get_variable().node is node is shared.node
    node.unchain()
    assert node.creator is None
