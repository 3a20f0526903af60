"""Networks whose complete steps are run, compared and counted: every kind of block, small enough for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Sequential
from dbrdist.models.blocks import Bottleneck
from dbrdist.models.resnet import ResNet20


class Bottlenecks(Chain):
    """A stem with pooling, and each kind of bottleneck: with and without a projection, of stride 1 and 2."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 7, 2, pad=3, nobias=True)
            self.bn = L.BatchNormalization(8)
            self.blocks = Sequential(
                Bottleneck(8, 4, 1), Bottleneck(16, 4, 1), Bottleneck(16, 8, 2), Bottleneck(32, 8, 1)
            )
            self.fc = L.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.bn(self.conv(x)))
        h = self.blocks(F.max_pooling_2d(h, 3, stride=2, pad=1, cover_all=False))
        return self.fc(F.average_pooling_2d(h, h.shape[2:]))


class LanguageModel(Chain):
    """Embedding, layers of LSTM and a linear layer over all steps."""

    def __init__(self, num_words: int, units: int, num_layers: int = 2) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(num_words, units)
            self.lstm = L.NStepLSTM(num_layers, units, units, 0.0)
            self.fc = L.Linear(units, num_words)

    def forward(self, x: Any) -> Any:
        """x (N, T): scores (N T, words)."""
        n = len(x)
        rows = self.embed(x)
        _, _, ys = self.lstm(None, None, [rows[k] for k in range(n)])
        return self.fc(F.concat(ys, axis=0))


class Recurrent(Chain):
    """Layers of LSTM alone."""

    def __init__(self, units: int, num_layers: int) -> None:
        super().__init__()
        with self.init_scope():
            self.lstm = L.NStepLSTM(num_layers, units, units, 0.0)

    def forward(self, x: Any) -> Any:
        """x (N, T, U): the last layer's outputs, of all steps together."""
        _, _, ys = self.lstm(None, None, list(x))
        return F.concat(ys, axis=0)


class Transformer(Chain):
    """Embedding and one block with causal attention."""

    def __init__(self, num_words: int, units: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(num_words, units)
            self.block = L.TransformerBlock(units, heads, dropout=dropout, activation=F.gelu)
            self.fc = L.Linear(units, num_words)

    def forward(self, x: Any) -> Any:
        """x (N, T): scores (N T, words)."""
        h = self.block(self.embed(x), is_causal=True)
        return self.fc(F.reshape(h, (-1, h.shape[2])))


def _images(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    return rng.standard_normal((4, 3, 16, 16)).astype(dtype), np.arange(4, dtype=np.int32)


def _words(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    return rng.integers(0, 12, (3, 5)).astype(np.int32), rng.integers(0, 12, 15).astype(np.int32)


# Network and data; images in the type of the step.
MODELS: dict[str, tuple[Callable[[], Any], Callable[..., tuple[Any, Any]]]] = {
    "ResNet-20": (lambda: ResNet20(10), _images),
    "bottlenecks": (Bottlenecks, _images),
    "LSTM": (lambda: LanguageModel(12, 8), _words),
    "Transformer": (lambda: Transformer(12, 16, 2), _words),
}


def step(net: Any, optimizer: Any, x: Any, t: Any) -> Any:
    """Forward, backward and update; the loss."""
    loss = F.softmax_cross_entropy(net(x), t)
    net.cleargrads()
    loss.backward()
    optimizer.update()
    return loss
