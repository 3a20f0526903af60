"""Exceptions that somebody would catch, and warnings. A caller's mistake is a ValueError or a TypeError."""


class DbrdistError(Exception):
    """The base of all exceptions below."""


class UsageWarning(UserWarning):
    """A program does what is probably not meant; ``warnings.simplefilter("ignore", UsageWarning)`` silences them."""


class NonFiniteLossError(DbrdistError, RuntimeError):
    """The loss or a gradient became NaN or infinite; the message names the step and the parameter."""


class StopRequested(DbrdistError):
    """All ranks agreed to stop at this step; the state is saved, and the process exits with 75, after Ctrl-C with 130.

    ``signal`` is the number of the signal that asked for it, 0 if it was none.
    """

    def __init__(self, message: str = "", signal: int = 0) -> None:
        super().__init__(message)
        self.signal = signal


class CaptureError(DbrdistError, RuntimeError):
    """A step cannot be captured as a CUDA graph; the message says what stands in the way. It runs eagerly."""


class StaleParametersError(DbrdistError, RuntimeError):
    """Backward needs values of parameters that were assigned new ones after forward."""


class CheckpointError(DbrdistError):
    """A checkpoint is missing, damaged, or belongs to another architecture."""


class MissingEntryError(CheckpointError, KeyError):
    """A saved state has no entry of this name; Chainer raises KeyError, which programs catch."""

    __str__ = Exception.__str__  # KeyError shows its message in quotes


class CorruptExampleError(DbrdistError):
    """An example of a dataset cannot be read; the message names its file."""


class LoaderError(DbrdistError):
    """A worker process of a loader ended or failed; the message says how."""


class CommunicatorError(DbrdistError):
    """Ranks disagree, or a collective cannot be carried out; raised alike on every rank."""


class NoSamplesError(CommunicatorError):
    """No rank has an example in this step, so there is nothing to update with; raised alike on every rank."""


class DatasetError(DbrdistError, ValueError):
    """An example does not fit the others, or what is done with it; the message names its file."""


class ScheduleError(DbrdistError, ValueError):
    """A schedule gave a value that cannot be used; the message names the step and the value."""


class ConfigError(DbrdistError):
    """A configuration is wrong; the message has one line per mistake, each beginning with its position."""


class DataSizeError(DbrdistError):
    """A dataset has too few examples to be divided over the ranks; raised alike on every rank.

    Example:
        >>> raise dbrdist.comm.DataSizeError("no examples")  # doctest: +SKIP
    """
