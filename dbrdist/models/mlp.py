"""Multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.core.model.chain import ChainList
from dbrdist.core.names.limits import counts, fraction, whole

NUM_CLASSES = "Number of outputs; the data's number of classes if not given."


class MLP(ChainList):
    """Linear layers with ReLU between them, over flattened examples.

    Args:
        units: sizes of the hidden layers.
        num_classes: size of the output.
        dropout: ratio after each hidden layer.

    Input (N, ...), output (N, num_classes).

    Example:
        >>> models.MLP((50,), num_classes=3)(np.zeros((2, 8), np.float32)).shape
        (2, 3)
    """

    def __init__(
        self,
        units: Annotated[Sequence[int], counts, "Units of each hidden layer."] = (100, 100),
        num_classes: Annotated[int, whole, NUM_CLASSES] = 10,
        dropout: Annotated[float, fraction, "Fraction of each hidden layer's units that a training step drops."] = 0.0,
    ) -> None:
        super().__init__(*[L.Linear(n) for n in (*units, num_classes)])
        self.dropout = dropout

    def forward(self, x: Any) -> Any:
        """``x`` (N, ...) to the scores (N, num_classes)."""
        *hidden, last = self
        for layer in hidden:
            x = F.relu(layer(x))
            if self.dropout:
                x = F.dropout(x, self.dropout)
        return last(x)
