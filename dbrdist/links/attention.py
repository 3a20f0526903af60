"""Links of Transformers: attention with its weights, RMSNorm, the block.

Legend: B examples, L queries, S keys and values, E numbers in each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist import functions as F
from dbrdist.core.array.backend import is_on_gpu
from dbrdist.core.array.types import Array
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.link_hook import thread
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.function_node import is_observed
from dbrdist.core.tape.variable import Operand, as_array
from dbrdist.functions.attention import attention_of_heads
from dbrdist.functions.transformer import dropped_sum, linear_before_bias, normalized_sum, rectified_dropout
from dbrdist.links.connection import Linear
from dbrdist.links.initializers import InitialValue
from dbrdist.links.normalization import LayerNormalization

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Variable


class MultiHeadAttention(Chain):
    """Multi-head attention with linear maps of queries, keys and values, and of the result (Vaswani et al. 2017).

    Args:
        n_units: E, the width of all vectors.
        n_heads: the number of heads, a divisor of ``n_units``.
        dropout: the fraction of attention weights dropped in training.
        nobias: leave out the biases.
        initialW, initial_bias: initializer, array or number of the four maps ``query``, ``key``, ``value`` and
            ``out``; None for LeCunNormal and 0.

    Example:
        >>> L.MultiHeadAttention(8, 2)(np.ones((2, 5, 8), np.float32)).shape
        (2, 5, 8)
    """

    def __init__(
        self, n_units: int, n_heads: int, dropout: float = 0.0, nobias: bool = False, initialW: InitialValue = None,
        initial_bias: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if n_heads < 1 or n_units % n_heads:
            raise expected("MultiHeadAttention", "n_heads", f"a divisor of n_units={n_units}", n_heads)
        self.n_units, self.n_heads, self.dropout = n_units, n_heads, dropout
        with self.init_scope():
            self.query, self.key, self.value, self.out = (
                Linear(n_units, n_units, nobias, initialW, initial_bias) for _ in range(4)
            )

    def forward(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        mask: Any = None,
        is_causal: bool = False,
    ) -> Any:
        """(B, L, E), keys and values (B, S, E) to (B, L, E).

        ``key`` None is ``query``, ``value`` None is ``key``; ``mask`` and ``is_causal`` as of
        :func:`dbrdist.functions.multi_head_attention`.
        """
        key = query if key is None else key
        value = key if value is None else value
        maps = self.query, self.key, self.value
        if _are_on_device(query, key, value) and _are_plain(Linear, *maps):
            return self.out(self.attended((query, key, value), mask, is_causal), 2)
        q, k, v = (to(x, 2) for to, x in zip(maps, (query, key, value)))
        return self.out(F.multi_head_attention(q, k, v, self.n_heads, mask, self.dropout, is_causal), 2)

    def attended(self, xs: tuple[Any, ...], mask: Any, is_causal: bool) -> Any:
        """On a GPU: what ``out`` is given; biases are added as the heads are divided.

        Args:
            xs: queries, keys and values, Variables (B, L, E).
            mask, is_causal: as of :func:`dbrdist.functions.multi_head_attention`.

        Returns:
            A Variable (B, L, E).
        """
        zs, biases = [], []
        for to, x in zip((self.query, self.key, self.value), xs):
            z = linear_before_bias(F.reshape(x, (-1, x.shape[2])), to.W, to.b)
            zs.append(F.reshape(z, (*x.shape[:2], z.shape[1])))
            biases.append(to.b)
        return attention_of_heads((*zs,), (*biases,), self.n_heads, mask, self.dropout, is_causal)


class RMSNormalization(Link):
    """RMSNorm of the last axis, with a scale gamma (Zhang and Sennrich 2019).

    Args:
        size: length of that axis; None takes it from the first batch.
        eps: added to the mean of squares.
        initial_gamma: initializer, array or number; None for 1.

    Example:
        >>> L.RMSNormalization(2)(np.array([[3.0, -3.0]], np.float32)).array.round(3)
        array([[ 1., -1.]], dtype=float32)
    """

    def __init__(self, size: int | None = None, eps: float = 1e-6, initial_gamma: InitialValue = None) -> None:
        super().__init__()
        self.eps = eps
        with self.init_scope():
            self.gamma = Parameter(1 if initial_gamma is None else initial_gamma)
        if size is not None:
            self.gamma.initialize((size,))

    def forward(self, x: Operand) -> Any:
        """Normalize ``x`` (..., K)."""
        if not self.gamma.is_initialized:
            self.gamma.initialize(x.shape[-1:])
        return F.rms_normalization(x, self.gamma, self.eps)


class TransformerBlock(Chain):
    """Self-attention and two linear maps, each with a shortcut and layer normalization (Vaswani et al. 2017).

    With ``norm_first`` x + f(norm(x)) for each of the two parts f, else norm(x + f(x)).

    Args:
        n_units: E, the width of all vectors.
        n_heads: the number of heads.
        n_hidden: the width between the linear maps; None for 4 E.
        dropout: the fraction dropped in training of attention weights, hidden units and results of both parts.
        activation: a function between the linear maps.
        norm_first: normalize the input of each part, as GPT-2 does, rather than its result.
        eps: of both normalizations.
        nobias: leave out the biases of linear maps.
        initialW, initial_bias: initializer, array or number of all linear maps; None for LeCunNormal and 0.

    On a GPU, a bias, ReLU and dropout are one kernel in each direction, and so are a bias, dropout, the shortcut and
    normalization; the same elements are dropped. Where a hook looks on, and with parts of other classes, such as
    subclasses, functions and links are called one after the other there, too.

    Example:
        >>> L.TransformerBlock(8, 2)(np.ones((2, 5, 8), np.float32)).shape
        (2, 5, 8)
    """

    def __init__(
        self, n_units: int, n_heads: int, n_hidden: int | None = None, dropout: float = 0.1,
        activation: Callable[[Any], Any] = F.relu, norm_first: bool = False, eps: float = 1e-5,
        nobias: bool = False, initialW: InitialValue = None, initial_bias: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__()
        n_hidden = 4 * n_units if n_hidden is None else n_hidden
        self.dropout, self.activation, self.norm_first = dropout, activation, norm_first
        with self.init_scope():
            self.attention = MultiHeadAttention(n_units, n_heads, dropout, nobias, initialW, initial_bias)
            self.norm1, self.norm2 = (LayerNormalization(n_units, eps) for _ in range(2))
            self.linear1 = Linear(n_units, n_hidden, nobias, initialW, initial_bias)
            self.linear2 = Linear(n_hidden, n_units, nobias, initialW, initial_bias)

    def forward(self, x: Any, mask: Any = None, is_causal: bool = False) -> Any:
        """The block's output for a batch of sequences.

        Args:
            x: vectors, shape (B, L, n_units).
            mask: which positions are seen, as in :func:`dbrdist.functions.multi_head_attention`; None for all.
            is_causal: position i sees only positions 0 to i.

        Returns:
            A Variable of shape (B, L, n_units).
        """
        if len(x.shape) != 3:
            raise expected("TransformerBlock", "x", "shape (B, L, E)", x)
        rows = F.reshape(x, (-1, x.shape[2]))
        if self._is_in_one_pass(rows):
            return F.reshape(self._on_device(rows, x.shape, mask, is_causal), x.shape)
        for norm, part in (
            (self.norm1, lambda h: self._attended(h, x.shape, mask, is_causal)), (self.norm2, self._mapped),
        ):  # fmt: skip
            rows = rows + self._dropped(part(norm(rows))) if self.norm_first else norm(rows + self._dropped(part(rows)))
        return F.reshape(rows, x.shape)

    def _is_in_one_pass(self, rows: Any) -> bool:
        """Does a GPU do biases, dropout, additions and normalization in one pass each, and does nobody look on?"""
        attention: Any = self.attention
        if not _are_on_device(rows) or not 0 <= self.dropout < 1:
            return False
        if type(attention) is not MultiHeadAttention or attention._hooks or "forward" in attention.__dict__:
            return False
        maps = attention.query, attention.key, attention.value, attention.out, self.linear1, self.linear2
        return _are_plain(LayerNormalization, self.norm1, self.norm2) and _are_plain(Linear, *maps)

    def _on_device(self, rows: Any, shape: Any, mask: Any, is_causal: bool) -> Any:
        """:meth:`forward` of rows (B L, E), where a bias is added by the function that comes next."""
        attention, first, last = self.attention, self.linear1, self.linear2

        def attended(h: Any) -> Any:
            x = F.reshape(h, shape)
            y = attention.attended((x, x, x), mask, is_causal)
            return linear_before_bias(F.reshape(y, (-1, y.shape[2])), attention.out.W, attention.out.b)

        def mapped(h: Any) -> Any:
            if self.activation is F.relu:
                h = rectified_dropout(linear_before_bias(h, first.W, first.b), first.b, self.dropout)
            else:
                h = self._dropped(self.activation(first(h)))
            return linear_before_bias(h, last.W, last.b)

        for norm, part, b in ((self.norm1, attended, attention.out.b), (self.norm2, mapped, last.b)):
            if self.norm_first:
                rows = dropped_sum(part(norm(rows)), b, rows, self.dropout)
            else:
                rows = normalized_sum(part(rows), b, rows, self.dropout, norm.gamma, norm.beta, norm.eps)
        return rows

    def _attended(self, rows: Any, shape: Any, mask: Array | None, is_causal: bool) -> Any:
        x = F.reshape(rows, shape)
        return F.reshape(self.attention(x, mask=mask, is_causal=is_causal), rows.shape)

    def _mapped(self, rows: Variable) -> Any:
        return self.linear2(self._dropped(self.activation(self.linear1(rows))))

    def _dropped(self, h: Variable) -> Any | None:
        return F.dropout(h, self.dropout) if self.dropout else h


def _are_plain(kind: type[Link], *links: Any) -> bool:
    """Are these links what their class says, without hooks, and is there nothing left to initialise?"""
    for link in links:
        if type(link) is not kind or link._hooks or "forward" in link.__dict__:
            return False
        if not all(p.is_initialized for p in link.params(include_uninit=True)):
            return False
    return True


def _are_on_device(*xs: Any) -> bool:
    """Are arrays or Variables of enough axes on a GPU, and does nobody look on, so that a bias may be added later?"""
    arrays = [as_array(x) for x in xs]
    if any(type(a) is np.ndarray or not is_on_gpu(a) or not a.size or a.ndim < 2 for a in arrays):
        return False
    return (len(arrays) == 1 or all(a.ndim == 3 for a in arrays)) and not (thread.hooks or is_observed())


explain_constructors(globals())
