"""The one exception that is shown to a user as a single line instead of a traceback, and others' words in such a line."""


class UserError(Exception):
    """Something the user can mend. The message says what, where (file, line, key) and what to do; always one line."""

    def __init__(self, message: str) -> None:
        super().__init__(in_line(message))


class StaleError(UserError):
    """A finished stage was made from other inputs than the ones asked for now."""


def in_line(text: str) -> str:
    """Without the ends of lines that other libraries' messages have."""
    return " ".join(line.strip() for line in text.splitlines())


def one_line(error: BaseException) -> str:
    """What another library's exception says, or its kind where it says nothing."""
    return in_line(str(error)) or type(error).__name__
