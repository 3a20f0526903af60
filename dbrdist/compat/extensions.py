"""Extensions that write other files under Chainer's paths than natively."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dbrdist.core.files import strict_json
from dbrdist.core.files.serializer import AbstractSerializer, write_atomically
from dbrdist.training import extensions

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


class LogReport(extensions.LogReport):
    """As natively, but the file is Chainer's: ``log``, a JSON list of all entries, rewritten with each new one.

    ``filename`` (or ``log_name``, its older name) may name entries, as in ``log_{iteration}``; with ``log_name=None``
    no file is written. A snapshot holds the entries themselves, so that a run resumes in another folder too.
    """

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        trigger: Any = (1, "epoch"),
        postprocess: Callable[[dict[str, Any]], None] | None = None,
        filename: str | None = None,
        **kwargs: Any,
    ):
        log_name = kwargs.pop("log_name", "log")
        super().__init__(keys, trigger, postprocess, **kwargs)
        self._log_name = log_name if filename is None else filename

    def initialize(self, trainer: Trainer) -> None:
        """Nothing: the file is written with the first entry."""

    def read_back(self, trainer: Trainer) -> None:
        """Nothing: the entries come from the snapshot."""

    def _write(self, trainer: Trainer, entry: dict[str, float]) -> None:
        if self._log_name is not None:
            text = strict_json.dumps(self._log, indent=4).encode()
            path = os.path.join(trainer.out, self._log_name.format(**entry))
            write_atomically(path, lambda file: file.write(text))

    def serialize(self, serializer: AbstractSerializer) -> None:
        if hasattr(self._trigger, "serialize"):
            self._trigger.serialize(serializer["_trigger"])
        self._summary.serialize(serializer["_summary"])
        self._log = json.loads(str(serializer("_log", json.dumps(self._log))))
