"""The graph of the first step as a file, and as a picture where Graphviz is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dbrdist.core.array.config import config, using_config
from dbrdist.core.chainer.computational_graph import build_computational_graph
from dbrdist.core.files.serializer import AbstractSerializer, is_about, write_atomically
from dbrdist.core.tape.variable import Variable
from dbrdist.training import plotting
from dbrdist.training.extension import Extension

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


def is_return_code_zero(args: Sequence[str]) -> bool:
    """True if a command runs and ends with exit status 0; its output is thrown away."""
    try:
        done = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def is_graphviz_available() -> bool:
    """True if Graphviz's program `dot` is installed."""
    return shutil.which("dot") is not None and is_return_code_zero(["dot", "-V"])


class DumpGraph(Extension):
    """Writes the graph behind an observed Variable at the first step, in the language DOT.

    During that step observed Variables keep their graphs (`config.keep_graph_on_report`). Where Graphviz is installed,
    a picture is written too: `cg.png` beside `cg.dot`.

    Args:
        root_name: the observed value, such as "main/loss".
        filename: the file in the trainer's `out`; None for cg.dot.
        variable_style, function_style: attributes of DOT for variables and functions.
        kwargs: ``out_name``, Chainer's older name of ``filename``.

    Raises:
        ValueError: no such value was observed at the first step.
        TypeError: it is no Variable.

    Example:
        >>> dump = extensions.dump_graph("main/loss")
    """

    default_name = "dump_graph"

    def __init__(
        self,
        root_name: str,
        filename: str | None = None,
        variable_style: Mapping[str, str] | None = None,
        function_style: Mapping[str, str] | None = None,
        **kwargs: Any,
    ):
        self._root_name = root_name
        self._filename = plotting.chosen_filename("DumpGraph", filename, "cg.dot", "out_name", kwargs)
        self._styles = variable_style, function_style
        self._is_done = False
        self._keeping: Any = None

    def trigger(self, trainer: Trainer) -> bool:
        """Fires once, whatever the ``trainer`` does."""
        is_first, self._is_done = not self._is_done, True
        return is_first

    def initialize(self, trainer: Trainer) -> None:
        if not self._is_done and not config.keep_graph_on_report:  # another one may have set it: the first resets it
            self._keeping = using_config("keep_graph_on_report", True)
            self._keeping.__enter__()

    def __call__(self, trainer: Trainer) -> None:
        self.finalize()
        path = os.path.join(trainer.out, self._filename)
        graph = build_computational_graph(
            [self._root(trainer.observation)], variable_style=self._styles[0], function_style=self._styles[1]
        )
        write_atomically(path, lambda file: file.write(graph.dump().encode()))
        if is_graphviz_available():
            picture = os.path.splitext(path)[0] + ".png"
            subprocess.run(["dot", "-Tpng", path, "-o", picture], check=True)

    def _root(self, observation: Mapping[str, Any]) -> Variable:
        if self._root_name not in observation:
            raise ValueError(
                f"DumpGraph: root_name: expected a value that was observed ({', '.join(observation) or 'none was'}), "
                f"got {self._root_name!r}"
            )
        root = observation[self._root_name]
        if not isinstance(root, Variable):
            raise TypeError(f"DumpGraph: expected a Variable as {self._root_name!r}, got {type(root).__name__}")
        return root

    def finalize(self) -> None:
        """Let observed values lose their graphs again."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.__exit__(None, None, None)

    def serialize(self, serializer: AbstractSerializer) -> None:
        if is_about(serializer, self._root_name):
            self._is_done = bool(serializer("_is_done", self._is_done))


dump_graph = DumpGraph
