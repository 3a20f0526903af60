"""Multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.core.model.chain import ChainList


class MLP(ChainList):
    """Linear layers with ReLU between them, over flattened examples.

    Args:
        units: sizes of the hidden layers.
        num_classes: size of the output.
        dropout: ratio after each hidden layer.

    Input (N, ...), output (N, num_classes).
    """

    def __init__(self, units: Sequence[int] = (100, 100), num_classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__(*[L.Linear(n) for n in (*units, num_classes)])
        self.dropout = dropout

    def forward(self, x: Any) -> Any:
        *hidden, last = self
        for layer in hidden:
            x = F.relu(layer(x))
            if self.dropout:
                x = F.dropout(x, self.dropout)
        return last(x)
