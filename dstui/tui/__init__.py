"""The full-screen front end. Importing this loads nothing of Textual; ``start`` does."""

from __future__ import annotations


def start(
    file: str | None = None, low: bool = False, facts: str | None = None, watch: str | None = None
) -> int:
    """Open the TUI and return its exit code.

    ``file``: a ds_config.json to open in the wizard. ``low``: the low-bandwidth profile. ``facts``: a file
    of ``dstui detect --json`` to plan for instead of this machine. ``watch``: id of a run to join at once.
    Raises DstuiError (exit code 2) without a usable terminal or with an unreadable file.
    """
    from dstui.settings import Settings
    from dstui.tui import terminal

    terminal.require_terminal()
    settings = Settings.load()
    profile = terminal.profile(
        low or settings.get("low"), ascii_only=settings.get("ascii"), notify=settings.get("notify")
    )
    terminal.prepare_environment(profile)
    from dstui.tui.entry import run_app

    return run_app(profile, file=file, facts=facts, watch=watch)
