"""Chain, ChainList and Sequential: links made of links."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, overload

from dbrdist.core.array.chainer_mode import loading
from dbrdist.core.array.types import Number
from dbrdist.core.model.device_resident import DeviceResidentsVisitor
from dbrdist.core.model.link import Link, _join
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.model.versions import Watch, note_change
from dbrdist.core.tape.variable import Variable
from dbrdist.core.usage.mistakes import given_a_class, missing_init, refuse, warn

if TYPE_CHECKING:
    from typing import Self

    from dbrdist.core.array.types import Shape
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.tape.node import VariableNode
    from dbrdist.core.tape.variable import Operand, Variable

Layer: TypeAlias = "Callable[..., Variable | tuple[Variable, ...]]"  # a link or a function


class _Container(Link):
    """What Chain and ChainList share: walking over children, whose names are keys of a path."""

    def _named_children(self) -> list[tuple[str, Link]]:
        raise NotImplementedError

    def children(self) -> Iterator[Link]:
        return iter([link for _, link in self._named_children()])

    def params(self, include_uninit: bool = True) -> Iterator[Parameter]:
        yield from super().params(include_uninit)
        for _, link in self._named_children():
            yield from link.params(include_uninit)

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, Parameter]]:
        yield from super().namedparams(include_uninit)
        for name, link in self._named_children():
            yield from _join("/" + name, link.namedparams(include_uninit))

    def links(self, skipself: bool = False) -> Iterator[Link]:
        if not skipself:
            yield self
        for _, link in self._named_children():
            yield from link.links()

    def namedlinks(self, skipself: bool = False) -> Iterator[tuple[str, Link]]:
        if not skipself:
            yield "/", self
        for name, link in self._named_children():
            yield "/" + name, link
            yield from _join("/" + name, link.namedlinks(skipself=True))

    def device_resident_accept(self, visitor: DeviceResidentsVisitor) -> None:
        super().device_resident_accept(visitor)
        for link in self.children():
            link.device_resident_accept(visitor)

    def cleargrads(self) -> None:
        cleared = self._cleared
        if cleared is None or cleared[0] != self._changed_at or not cleared[1].is_current():
            cleared = self._plan_clearing()
        for node in cleared[2]:
            node.gradient = None
        for link in cleared[3]:
            link.cleargrads()

    def _plan_clearing(self) -> tuple[int, Watch, list[VariableNode], list[Link]]:
        """What tells whether the rest still holds, the nodes of all parameters, and links that clear in their own way.

        To walk over the links each time takes three times as long. Of this link there is the number of its last change:
        if it were among the links of its own plan, it would not die with its last reference.
        """
        if self._changed_at is None:
            self._changed_at = 0
        links: list[Link] = [self]
        others: list[Link] = []
        for link in links:  # which grows
            for child in link.children():
                is_known = type(child).cleargrads in (Link.cleargrads, _Container.cleargrads)
                (links if is_known else others).append(child)
        nodes = [link.__dict__[name].node for link in links for name in link._params]
        self._cleared = self._changed_at, Watch(links[1:]), nodes, others
        return self._cleared

    def copyparams(self, link: Link, copy_persistent: bool = True) -> None:
        super().copyparams(link, copy_persistent)
        assert isinstance(link, _Container)
        theirs = dict(link._named_children())
        for name, child in self._named_children():
            child.copyparams(theirs[name], copy_persistent)

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        for name, link in self._named_children():
            link.serialize(serializer[name])

    def __repr__(self) -> str:
        lines = [f"  ({name}): " + repr(link).replace("\n", "\n  ") for name, link in self._named_children()]
        return f"{type(self).__name__}(\n" + ",\n".join(lines) + ",\n)" if lines else f"{type(self).__name__}()"


def _is_to_be_child(x: object) -> bool:
    """Whether it is a link that no chain has yet, and that is not frozen, as what a network only refers to."""
    if not isinstance(x, Link) or x.name is not None:
        return False
    params = list(x.params())
    return not params or not all(p.is_frozen for p in params)


class Chain(_Container):
    """A link whose children are attributes, assigned within ``with self.init_scope():`` or given as keywords.

    Args:
        unnamed: none; for a link without a name the error says what to write.
        links: the children by name.

    Raises:
        TypeError, AttributeError: a child is no link, or its name is taken.

    Example:
        >>> class MLP(dbrdist.Chain):
        ...     def __init__(self):
        ...         super().__init__()
        ...         with self.init_scope():
        ...             self.l1 = L.Linear(None, 100)
        ...             self.l2 = L.Linear(100, 10)
        ...     def forward(self, x):
        ...         return self.l2(F.relu(self.l1(x)))
        >>> MLP()(np.zeros((2, 64), np.float32)).shape
        (2, 10)
    """

    def __init__(self, *unnamed: object, **links: Link) -> None:
        if unnamed:
            words = "links are given by names, such as Chain(l1=link); without names take a Sequential or ChainList"
            raise TypeError(f"{type(self).__name__}: {words}")
        super().__init__()
        self._children: list[str] = []
        for name, link in links.items():
            self.add_link(name, link)

    def _assign(self, name: str, value: Any) -> None:
        if isinstance(value, Link) and self.within_init_scope:
            if "_children" not in self.__dict__:  # of super(dbrdist.Chain, self), which leaves Chain out
                raise missing_init()
            self._check_name(name, "link")
        elif type(value) is tuple and len(value) == 1 and self.within_init_scope and _is_to_be_child(value[0]):
            kind = type(value[0]).__name__
            refuse(TypeError(
                f"{type(self).__name__}.{name}: expected a link, got a tuple of one {kind}: is there a comma at the "
                "end of the line?"
            ))  # fmt: skip
        super()._assign(name, value)
        if isinstance(value, type) and issubclass(value, Link) and self.within_init_scope:
            refuse(given_a_class(f"{type(self).__name__}.{name}", value, "a link within init_scope()"))
        if isinstance(value, Link):
            if self.within_init_scope:
                value.name = name
                if name not in self._children:
                    self._children.append(name)
            note_change(self)
        elif name in self.__dict__.get("_children", ()):
            note_change(self)

    def _leave_out(self, name: str) -> None:
        super()._leave_out(name)
        if name in self.__dict__.get("_children", ()):
            note_change(self)

    def __delattr__(self, name: str) -> None:
        if name in self._children:
            self._children.remove(name)
        super().__delattr__(name)

    def __getitem__(self, name: str) -> Link:
        return getattr(self, name)

    def add_link(self, name: str, link: Link) -> None:
        """Register ``link`` as the child and attribute ``name``; a name in use is an AttributeError."""
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: cannot register link {name!r}: the attribute exists")
        _check_link(f"{type(self).__name__}: {name}", link)
        with self.init_scope():
            setattr(self, name, link)

    def _named_children(self) -> list[tuple[str, Link]]:
        values = self.__dict__  # a child that None or a function has replaced is none until there is a link again
        return [(name, values[name]) for name in self._children if isinstance(values[name], Link)]

    def copy(self, mode: str = "share") -> Self:
        new = super().copy(mode)
        if mode != "copy":
            new._children = list(self._children)
            copies = _copies(self.children(), mode)
            for name, old in self._named_children():
                child = copies[id(old)]
                child.name = name
                new.__dict__[name] = child
        return new


def _warn_of_shared(where: str, layers: Sequence[Layer]) -> None:
    """Warn where one link with parameters stands for all that have some, as ``[link] * 3`` gives them."""
    if len(layers) < 2 or len(set(map(id, layers))) == len(layers):
        return
    places = [i for i, layer in enumerate(layers) if isinstance(layer, Link) and any(True for _ in layer.params())]
    if len(places) > 1 and len({id(layers[i]) for i in places}) == 1:
        link = layers[places[0]]
        warn(
            f"{where}: layers {places[0]} and {places[1]} are the same {type(link).__name__}, so that they share "
            "their weights; link.repeat(n) makes layers with weights of their own; to share, call a link several times"
        )


class ChainList(_Container):
    """A link whose children are a list; it may be indexed, and grows by ``append``.

    Args:
        links: the children, in order.

    Raises:
        TypeError: a child is no link.

    Example:
        >>> layers = dbrdist.ChainList(L.Linear(4, 3), L.Linear(3, 2))
        >>> len(layers), layers[1].out_size
        (2, 2)
    """

    def __init__(self, *links: Link) -> None:
        super().__init__()
        self._list: list[Link] = []
        for link in links:
            self.add_link(link)
        _warn_of_shared(type(self).__name__, links)

    def _assign(self, name: str, value: Any) -> None:
        if isinstance(value, Link) and self.within_init_scope:
            raise TypeError("a ChainList's children have no names: use append() or add_link(), or a Chain")
        super()._assign(name, value)

    def _named_children(self) -> list[tuple[str, Link]]:
        return [(str(i), link) for i, link in enumerate(self._list)]

    def children(self) -> Iterator[Link]:
        return iter(self._list)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Link: ...
    @overload
    def __getitem__(self, index: slice) -> list[Link]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Link | list[Link]:
        return self._list[index]

    def __setitem__(self, index: int, link: Link) -> None:
        self._list[index] = link
        self._renumber()

    def __iter__(self) -> Iterator[Link]:
        return iter(self._list)

    def __len__(self) -> int:
        return len(self._list)

    def append(self, value: Link) -> None:
        """Add the link ``value`` as the last child."""
        self.add_link(value)

    def add_link(self, link: Link) -> None:
        """Add ``link`` as the last child; its name is its index."""
        _check_link(f"{type(self).__name__}: link {len(self._list)}", link)
        link.name = str(len(self._list))
        self._list.append(link)
        note_change(self)

    def insert(self, index: int, link: Link) -> None:
        """Add ``link`` before the child number ``index``, which counts from the end where it is negative."""
        self._list.insert(index, link)
        self._renumber()

    def _renumber(self) -> None:
        for i, child in enumerate(self._list):
            child.name = str(i)
        note_change(self)

    def copy(self, mode: str = "share") -> Self:
        new = super().copy(mode)
        if mode != "copy":
            copies = _copies(self.children(), mode)
            new._list = [copies[id(child)] for child in self.children()]
            new._renumber()
        return new


class LayerError(TypeError, ValueError):
    """What is no link or function in the place of a layer."""


class Sequential(ChainList):
    """Links and functions that are called one after another.

    Args:
        layers: links, and functions of one array; a tuple that a layer returns is passed on as several arguments.

    Raises:
        TypeError: a layer is a class or cannot be called.

    Example:
        >>> model = dbrdist.Sequential(L.Linear(None, 100), F.relu, L.Linear(100, 10))
        >>> model(np.zeros((2, 64), np.float32)).shape
        (2, 10)
    """

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self._layers: list[Layer] = []
        for layer in layers:
            self.append(layer)
        _warn_of_shared(type(self).__name__, layers)

    def _named_children(self) -> list[tuple[str, Link]]:
        links = self._in_order_of_chainer() if loading.file_of_chainer else self._list
        return [(str(i), link) for i, link in enumerate(links)]

    def __repr__(self) -> str:
        lines = [f"  ({i}): {_words_of(layer)},".replace("\n", "\n  ") for i, layer in enumerate(self._layers)]
        return f"{type(self).__name__}(\n" + "\n".join(lines) + "\n)" if lines else f"{type(self).__name__}()"

    def _in_order_of_chainer(self) -> list[Link]:
        """The links as Chainer numbers them: each later one is inserted right behind the first."""
        links: list[Link] = []
        first: int | None = None  # the place of the first link among the layers
        for i, layer in enumerate(self._layers):
            if isinstance(layer, Link):
                links.insert((first or 0) + 1 if i else 0, layer)
                first = i if first is None else first
        return links

    def has_two_orders(self) -> bool:
        """Whether Chainer numbers the links in another order, and each finds the same shapes in both."""
        pairs = list(zip(self._in_order_of_chainer(), self._list))
        return any(a is not b for a, b in pairs) and all(_shapes(a) == _shapes(b) for a, b in pairs)

    def _renew(self) -> None:
        self._list = [layer for layer in self._layers if isinstance(layer, Link)]
        self._renumber()

    def append(self, layer: Layer) -> None:
        """Add a ``layer``, a link or any callable, at the end."""
        self.insert(len(self._layers), layer)

    def insert(self, i: int, layer: Any) -> None:
        """Add ``layer``, a link or any callable, before position ``i``."""
        if isinstance(layer, type) and issubclass(layer, Link):
            raise given_a_class(f"Sequential: layer {i}", layer, "a link or a function")
        if not callable(layer):
            hint = "; write Sequential(*layers)" if isinstance(layer, (list, tuple)) else ""
            if isinstance(layer, Variable):
                hint = ", the result of a call; write the function itself, F.relu and not F.relu(x)"
            raise LayerError(f"Sequential: layer {i}: expected a link or a function, got {type(layer).__name__}{hint}")
        if not -len(self._layers) <= i <= len(self._layers):
            raise IndexError(f"Sequential.insert: expected a place from 0 to {len(self._layers)}, got {i}")
        self._layers.insert(i, layer)
        self._renew()

    def extend(self, sequential: Iterable[Layer]) -> None:
        """Add the layers of another ``sequential``, or of a list, at the end; links are shared, not copied."""
        for layer in list(sequential):
            self.append(layer)

    def forward(self, *x: Operand | Number) -> Variable | tuple[Variable, ...]:
        """Call the layers in order, the first with ``*x``; a tuple is spread over the next layer's arguments."""
        if not self._layers:
            raise RuntimeError("Sequential: it has no layers; append some before the call")
        y: Any = x
        for layer in self._layers:
            y = layer(*y) if isinstance(y, tuple) else layer(y)
        return y[0] if isinstance(y, tuple) and len(y) == 1 else y

    def __add__(self, other: Sequential) -> Sequential:
        """The layers of this one and of another, in a new Sequential that shares them."""
        return _sequence([*self._layers, *self._layers_of(other)])

    def __iadd__(self, other: Sequential) -> Sequential:
        for layer in self._layers_of(other):
            self.append(layer)
        return self

    @staticmethod
    def _layers_of(other: Sequential) -> list[Layer]:
        if not isinstance(other, Sequential):
            raise LayerError(f"Sequential: + expects another Sequential, got {type(other).__name__}")
        return list(other._layers)

    def __getitem__(self, i: SupportsIndex | slice) -> Any:
        if not isinstance(i, slice):
            return self._layers[i]
        return _sequence(self._layers[i])

    def __setitem__(self, i: int, layer: Any) -> None:
        self._layers[i] = layer
        self._renew()

    def __delitem__(self, i: int | slice) -> None:
        del self._layers[i]
        self._renew()

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._layers)

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    def clear(self) -> None:
        """Remove all layers."""
        self._layers = []
        self._renew()

    def pop(self, i: int = -1) -> Layer:
        """Remove the layer at position ``i`` (default: the last) and return it."""
        layer = self._layers.pop(i)
        self._renew()
        return layer

    def remove(self, layer: Layer) -> None:
        """Remove the first occurrence of ``layer``; a ValueError where it does not occur."""
        self._layers.remove(layer)
        self._renew()

    def remove_by_layer_type(self, type_name: str) -> None:
        """Remove all layers with the class or function name ``type_name``."""
        self._layers = [layer for layer in self._layers if _layer_name(layer) != type_name]
        self._renew()

    def count(self, layer: Layer) -> int:
        """How often the object ``layer`` occurs."""
        return self._layers.count(layer)

    def count_by_layer_type(self, type_name: str) -> int:
        """How many layers have the class or function name ``type_name``, such as ``"Linear"``."""
        return sum(_layer_name(layer) == type_name for layer in self._layers)

    def index(self, layer: Layer, start: int | None = None, end: int | None = None) -> int:
        """The position of ``layer`` in ``[start, end)``, by default in all; a ValueError where it does not occur."""
        return self._layers.index(layer, start or 0, len(self._layers) if end is None else end)

    def flatten(self) -> Sequential:
        """The same layers without nested Sequentials."""
        out: list[Layer] = []
        for layer in self._layers:
            out.extend(layer.flatten()._layers if isinstance(layer, Sequential) else [layer])
        return _sequence(out)

    def copy(self, mode: str = "share") -> Self:
        new: Any = Link.copy(self, mode)
        if mode != "copy":
            copies = _copies(self._layers, mode)
            new._layers = [copies.get(id(layer), layer) for layer in self._layers]
            new._renew()
        return new


def _check_link(where: str, link: object) -> None:
    """Refuse what is no link, in the place of a child."""
    if isinstance(link, type):
        raise given_a_class(where, link, "a Link")
    if not isinstance(link, Link):
        hint = "; write ChainList(*links)" if isinstance(link, (list, tuple)) else ""
        if callable(link):
            hint = "; a Sequential takes functions too"
        raise TypeError(f"{where}: expected a Link, got {type(link).__name__}{hint}")


def _copies(layers: Iterable[Layer], mode: str) -> dict[int, Link]:
    """A copy of each link by the id of the original, so that a link used in several places is copied once."""
    links = {id(layer): layer for layer in layers if isinstance(layer, Link)}
    return {key: link.copy(mode) for key, link in links.items()}


def _shapes(link: Link) -> list[tuple[str, Shape | None]]:
    return [(name, p.shape) for name, p in link.namedparams()]


def _words_of(layer: Layer) -> str:
    """A layer as text: of a lambda its source, where it can be read."""
    if getattr(layer, "__name__", None) == "<lambda>":
        with contextlib.suppress(OSError):
            return inspect.getsource(layer).strip().rstrip(",")
    return str(layer)


def _layer_name(layer: Layer) -> str:
    return type(layer).__name__ if isinstance(layer, Link) else getattr(layer, "__name__", type(layer).__name__)


Link.repeated_class = Sequential


def _sequence(layers: Sequence[Layer]) -> Sequential:
    """As Sequential(*layers), of layers that were there before: whoever shares them has been warned."""
    new = Sequential()
    for layer in layers:
        new.append(layer)
    return new
