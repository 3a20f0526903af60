"""What hooks share that put another weight in place of a link's own while its forward runs."""

from __future__ import annotations

from typing import Any

from dbrdist.core.checks import expected
from dbrdist.core.config import no_backprop_mode
from dbrdist.core.link_hook import ForwardPostprocessArgs, ForwardPreprocessArgs, LinkHook
from dbrdist.core.parameter import Parameter


class WeightHook(LinkHook):
    """For one link: ``link.add_hook(hook)``. The parameter ``weight_name`` is the link's own again after forward."""

    def __init__(self, weight_name: str, name: str | None) -> None:
        self.weight_name = weight_name
        if name is not None:
            self.name = name  # type: ignore[misc]

    def weight(self, link: Any, W: Any) -> Any:
        """The weight for forward, a Variable, from the present one."""
        raise NotImplementedError

    def __enter__(self) -> LinkHook:
        raise NotImplementedError(
            f"{type(self).__name__} is a hook of one link: expected link.add_hook(hook), got with"
        )

    def added(self, link: Any) -> None:
        """Expect the weight to be there."""
        if not isinstance(getattr(link, self.weight_name, None), Parameter):
            what = f"the name of a parameter of {type(link).__name__}"
            raise expected(type(self).__name__, "weight_name", what, repr(self.weight_name))

    def forward_preprocess(self, args: ForwardPreprocessArgs) -> None:
        """Put the weight in place, after one forward without it where its size follows from the input."""
        link, W = args.link, getattr(args.link, self.weight_name)
        if not W.is_initialized:
            with no_backprop_mode():
                link.forward(*args.args, **args.kwargs)
        new = self.weight(link, W)
        new.array  # noqa: B018  (links look whether there is one)
        # Not by setattr, which would make the optimizer look for changes of the model.
        vars(link)[self.weight_name] = new
        if isinstance(W, Parameter):  # else another hook was here before and brings it back
            vars(link)["_own_" + self.weight_name] = W

    def forward_postprocess(self, args: ForwardPostprocessArgs | ForwardPreprocessArgs) -> None:
        """Bring the link's own weight back."""
        own = vars(args.link).pop("_own_" + self.weight_name, None)
        if own is not None:
            vars(args.link)[self.weight_name] = own

    def forward_failed(self, args: ForwardPreprocessArgs) -> None:
        """As after forward."""
        self.forward_postprocess(args)
