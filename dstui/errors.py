"""The one exception that reaches a user, and the exit codes of every verb."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, the same for every verb (docs/cli.md)."""

    OK = 0
    BAD = 1
    """The thing looked at is bad (config with errors, failed run, no fit, difference)."""
    CANNOT = 2
    """dstui could not do it: usage, unreadable input, missing dependency."""
    INTERRUPTED = 130


class DstuiError(Exception):
    """A failure that the user can act on.

    ``message`` names the place and the cause, ``hint`` the next step; both are already translated.
    Front ends print ``error: message`` and ``hint`` on stderr and leave with ``code``.
    """

    def __init__(self, message: str, hint: str | None = None, code: Exit = Exit.CANNOT) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
