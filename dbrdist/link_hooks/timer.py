"""Time by link."""

from __future__ import annotations

from dbrdist.core.model.link_hook import ForwardPostprocessArgs, ForwardPreprocessArgs, LinkHook
from dbrdist.function_hooks.timer import Stopwatch


class TimerHook(Stopwatch, LinkHook):
    """The time of each link's forward, by the name of its class; that of a chain contains those of its children.

    Example:
        >>> with dbrdist.link_hooks.TimerHook() as hook:
        ...     y = L.Linear(3, 2)(np.ones((1, 3), np.float32))
        >>> hook.total_time() > 0
        True
    """

    name = "TimerHook"
    heading = "LinkName"

    def __init__(self) -> None:
        super().__init__()
        self._outermost: list[int] = []

    def forward_preprocess(self, args: ForwardPreprocessArgs) -> None:
        self.start(args.link.xp)

    def forward_postprocess(self, args: ForwardPostprocessArgs) -> None:
        if len(self._started) == 1:
            self._outermost.append(len(self.call_history))
        self.stop(type(args.link).__name__)

    def forward_failed(self, args: ForwardPreprocessArgs) -> None:
        self._started.pop()

    def total_time(self) -> float:
        """Seconds in all calls that are not within another one."""
        self.settle()
        return sum(self.call_history[i][1] for i in self._outermost)
