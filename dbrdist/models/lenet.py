"""A small convolutional network in the manner of LeNet."""

from __future__ import annotations

from typing import Annotated, Any

from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.core.model.chain import Chain
from dbrdist.core.names.limits import count, counts, fraction, whole
from dbrdist.models.mlp import NUM_CLASSES


class LeNet(Chain):
    """Two 3x3 convolutions with ReLU and 2x2 max pooling, then two linear layers (after LeCun et al. 1998).

    Args:
        num_classes: size of the output.
        channels: of both convolutions.
        units: of the hidden linear layer.
        dropout: ratio before the last layer.

    Input (N, C, H, W), output (N, num_classes).

    Example:
        >>> models.LeNet()(np.zeros((2, 1, 28, 28), np.float32)).shape
        (2, 10)
    """

    def __init__(
        self,
        num_classes: Annotated[int, whole, NUM_CLASSES] = 10,
        channels: Annotated[tuple[int, int], counts, "Channels of the two convolutions."] = (32, 64),
        units: Annotated[int, count, "Units of the hidden linear layer."] = 128,
        dropout: Annotated[float, fraction, "Fraction of the hidden units that a training step drops."] = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.conv1 = L.Convolution2D(None, channels[0], 3, pad=1)
            self.conv2 = L.Convolution2D(None, channels[1], 3, pad=1)
            self.fc1 = L.Linear(units)
            self.fc2 = L.Linear(units, num_classes)

    def forward(self, x: Any) -> Any:
        """``x`` (N, channels, H, W) to the scores (N, num_classes)."""
        h = F.max_pooling_2d(F.relu(self.conv1(x)), 2)
        h = F.max_pooling_2d(F.relu(self.conv2(h)), 2)
        h = F.relu(self.fc1(h))
        if self.dropout:
            h = F.dropout(h, self.dropout)
        return self.fc2(h)
