"""Functions of both styles with type checks and gradient checks."""

import chainer
import chainer.functions as F
import numpy as np
from chainer import cuda, function, function_node, gradient_check
from chainer.utils import type_check


class MulAdd(function.Function):
    def check_type_forward(self, in_types):
        n_in = in_types.size()
        type_check.expect(n_in == 3)
        x_type, y_type, z_type = in_types
        type_check.expect(
            x_type.dtype.kind == "f",
            x_type.dtype == y_type.dtype,
            x_type.shape == y_type.shape,
            z_type.shape == x_type.shape,
        )

    def forward(self, inputs):
        self.retain_inputs((0, 1))
        x, y, z = inputs
        return (x * y + z,)

    def backward(self, inputs, grad_outputs):
        x, y, z = inputs
        assert z is None
        (gw,) = grad_outputs
        return y * gw, x * gw, gw


class ExpAdd(function_node.FunctionNode):
    def check_type_forward(self, in_types):
        type_check._argname(in_types, ("x", "y"))
        x_type, y_type = in_types
        type_check.expect(x_type.shape[-1] == y_type.shape[-1] * 1)

    def forward_cpu(self, inputs):
        self.retain_inputs((0, 1))
        x, y = inputs
        return (np.exp(x) + np.exp(y),)

    def forward_gpu(self, inputs):
        self.retain_inputs((0, 1))
        x, y = inputs
        z = cuda.elementwise("T x, T y", "T z", "z = exp(x) + exp(y)", "exp_add")(x, y)
        return (z,)

    def backward(self, target_input_indexes, grad_outputs):
        (gz,) = grad_outputs
        return tuple(gz * F.exp(x) for x in self.get_retained_inputs())


def main():
    rng = np.random.RandomState(0)
    x, y, z, gw = (rng.uniform(-1, 1, (3, 2)).astype(np.float64) for _ in range(4))

    w = MulAdd()(x, chainer.Variable(y), z)
    np.testing.assert_allclose(w.array, x * y + z)
    gradient_check.check_backward(lambda *xs: MulAdd()(*xs), (x, y, z), gw)
    gradient_check.check_backward(lambda *xs: ExpAdd().apply(xs)[0], (x, y), gw)
    gradient_check.check_double_backward(lambda *xs: ExpAdd().apply(xs)[0], (x, y), gw, (z, z))

    try:
        MulAdd()(x, y, z[:2])
    except type_check.InvalidType as error:
        print(str(error).strip())
    try:
        ExpAdd().apply((x, y[:, :1]))
    except type_check.InvalidType as error:
        print(str(error).strip())
    with chainer.using_config("type_check", False):
        MulAdd()(x, y, z[:1])

    v = chainer.Variable(x)
    loss = F.sum(MulAdd()(v, v, v))
    try:
        F.sum(chainer.grad([loss], [v], enable_double_backprop=True)[0]).backward()
    except RuntimeError as error:
        print("old style" in str(error))
    loss.backward()
    np.testing.assert_allclose(v.grad, 2 * x + 1)
    print(f"cuda available: {cuda.available}")


if __name__ == "__main__":
    main()
