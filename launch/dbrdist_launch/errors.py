"""What stops a launch before a job exists."""


def place_of(error: BaseException) -> str:
    """FILE:LINE where it was raised (`traceback` would say it too, at the price of 1 ms at each start)."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "?"


class LaunchError(Exception):
    """The job cannot be started as asked; the text says what was expected, what came, and what to do.

    `code` is the exit code of the launcher (see `codes`).
    """

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code
