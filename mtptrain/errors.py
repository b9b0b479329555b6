"""The one exception that is shown to a user as a single line instead of a traceback."""


class UserError(Exception):
    """Something the user can mend. The message says what, where (file, line, key) and what to do."""


class StaleError(UserError):
    """A finished stage was made from other inputs than the ones asked for now."""
