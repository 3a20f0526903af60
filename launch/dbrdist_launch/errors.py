"""What stops a launch before a job exists."""


class LaunchError(Exception):
    """The job cannot be started as asked; the text says what was expected, what came, and what to do.

    `code` is the exit code of the launcher (see `codes`).
    """

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code
