"""The one exception that is shown to a user as a single line instead of a traceback, and others' words in such a line."""


class UserError(Exception):
    """Something the user can mend. The message says what, where (file, line, key) and what to do."""


def one_line(error: BaseException) -> str:
    """What another library's exception says, or its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


class StaleError(UserError):
    """A finished stage was made from other inputs than the ones asked for now."""
