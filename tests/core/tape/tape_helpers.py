"""Functions in the forms that users write them in."""

from __future__ import annotations

from dbrdist import FunctionNode


class Square(FunctionNode):
    """A user's function in Chainer's form."""

    def forward(self, inputs):
        self.retain_inputs((0,))
        (x,) = inputs
        return (x * x,)

    def backward(self, target_input_indexes, grad_outputs):
        (x,) = self.get_retained_inputs()
        (gy,) = grad_outputs
        return (2.0 * x * gy,)
