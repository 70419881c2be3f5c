"""Translations: ``from dstui.i18n import _``; nothing heavier than gettext.

Every user-facing text is an English literal inside ``_()`` (or ``ngettext``) evaluated when it is
shown, so the language can be set at start. Machine output (codes, names, JSON keys) is never
translated. ``N_()`` marks a literal in a table that is evaluated at import; translate it with ``_()``
when it is shown. Use ``_("... {name} ...").format(name=...)``, never an f-string.
"""

from __future__ import annotations

import gettext
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

_current: gettext.NullTranslations = gettext.NullTranslations()
_language = "en"


def pick_language(
    wanted: str | None = None,
    environ: Mapping[str, str] | None = None,
    tty: bool = True,
    setting: Callable[[], str] | None = None,
) -> str:
    """Language code from ``--lang`` (``en``, ``zh``), else DSTUI_LANG, the user's setting (``""``: none), the POSIX
    locale variables, else English.

    Without a terminal the default is English whatever ``LANG`` says (JSON and logs stay stable).
    """
    if wanted:
        return "zh_CN" if wanted.lower().startswith("zh") else "en"
    if not tty:
        return "en"
    env = os.environ if environ is None else environ
    names = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
    for value in (env.get("DSTUI_LANG") or (setting() if setting is not None else ""), *map(env.get, names)):
        if value:
            return "zh_CN" if value.lower().startswith("zh") else "en"
    return "en"


def set_language(code: str) -> None:
    """Make ``code`` (``en`` or ``zh_CN``) the language of every later ``_()``."""
    global _current, _language
    _language = code
    if code == "en":
        _current = gettext.NullTranslations()
        return
    _current = gettext.translation(
        "dstui", localedir=str(Path(__file__).parent / "locale"), languages=[code], fallback=True
    )


def language() -> str:
    """The language in use: ``en`` or ``zh_CN``."""
    return _language


def _(message: str) -> str:
    return _current.gettext(message) if message else ""


def ngettext(singular: str, plural: str, n: int) -> str:
    """``_`` for a text that counts: the form that ``n`` wants."""
    return _current.ngettext(singular, plural, n)


def listed(words: Iterable[str]) -> str:
    """Things of one kind in a row: ``a, b``; in Chinese ``a、b``."""
    return ("、" if _language == "zh_CN" else ", ").join(words)


def phrases(parts: Iterable[str]) -> str:
    """Parts of one sentence: ``a, b``; in Chinese ``a，b``."""
    return ("，" if _language == "zh_CN" else ", ").join(parts)


def clauses(parts: Iterable[str]) -> str:
    """Sentences that belong together: ``a; b``; in Chinese ``a；b``."""
    return ("；" if _language == "zh_CN" else "; ").join(parts)


def aside(text: str) -> str:
    """`` (text)``, to be put behind a sentence; in Chinese ``（text）``. Nothing for nothing."""
    if not text:
        return ""
    return f"（{text}）" if _language == "zh_CN" else f" ({text})"


def N_(message: str) -> str:  # noqa: N802 - the conventional gettext marker
    """Marks a text for the catalogue that ``_`` translates later, when it is shown."""
    return message
