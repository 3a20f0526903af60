"""What hooks share that give forward another weight than a link's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbrdist.core.array.config import no_backprop_mode
from dbrdist.core.model.link_hook import ForwardPreprocessArgs, LinkHook
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.checks import expected

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.core.tape.variable import Variable


class WeightHook(LinkHook):
    """For one link: ``link.add_hook(hook)``. The parameter ``weight_name`` stays the link's own."""

    def __init__(self, weight_name: str, name: str | None) -> None:
        self.weight_name = weight_name
        if name is not None:
            self.name = name  # type: ignore[misc]

    def weight(self, link: Link, W: Variable) -> Variable:
        """The weight for forward, a Variable, from the present one."""
        raise NotImplementedError

    def __enter__(self) -> LinkHook:
        raise NotImplementedError(
            f"{type(self).__name__} is a hook of one link: expected link.add_hook(hook), got with"
        )

    def added(self, link: Any) -> None:
        """Refuse a ``link`` without the weight (ValueError)."""
        if not isinstance(getattr(link, self.weight_name, None), Parameter):
            what = f"the name of a parameter of {type(link).__name__}"
            raise expected(type(self).__name__, "weight_name", what, repr(self.weight_name))

    def stand_ins(self, args: ForwardPreprocessArgs, link: Link) -> dict[str, Variable]:
        """The other weight, after one forward without it where its size follows from the input."""
        W = getattr(link, self.weight_name)
        if not W.is_initialized:
            with no_backprop_mode():
                link.forward(*args.args, **args.kwargs)
        new = self.weight(args.link, W)
        new.array  # noqa: B018  (links look whether there is one)
        return {self.weight_name: new}
