"""What this terminal can show: glyph set, low-bandwidth profile, whether a full screen is possible at all."""

from __future__ import annotations

import codecs
import locale
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dstui.errors import DstuiError
from dstui.i18n import _

MIN_WIDTH, MIN_HEIGHT = 60, 15
"""Below this a screen shows one line that says so."""


@dataclass(frozen=True)
class Glyphs:
    """Every non-letter that the screens draw. Each is one cell wide in both sets."""

    cursor: str
    on: str
    off: str
    ticked: str
    unticked: str
    done: str
    skipped: str
    problem: str
    vline: str
    hline: str
    dot: str
    arrow: str
    left: str
    up: str
    down: str
    full: str
    part: str
    empty: str
    limit: str
    cut: str
    levels: str
    """Eight rising levels of a one-line chart."""


UNICODE = Glyphs(
    cursor="▸", on="●", off="○", ticked="■", unticked="□", done="✓", skipped="–", problem="!",
    vline="│", hline="─", dot="·", arrow="→", left="←", up="↑", down="↓", full="█", part="▒",
    empty="·", limit="┊", cut="…", levels="▁▂▃▄▅▆▇█",
)  # fmt: skip
ASCII = Glyphs(
    cursor=">", on="*", off="o", ticked="x", unticked="-", done="+", skipped="-", problem="!",
    vline="|", hline="-", dot="-", arrow=">", left="<", up="^", down="v", full="#", part="=",
    empty=".", limit="|", cut="~", levels="_.-:=+*#",
)  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """How the screens are drawn in this session."""

    unicode: bool = True
    low: bool = False
    notify: bool = True
    """Ring and notify when a watched run ends or stands still."""

    @property
    def glyphs(self) -> Glyphs:
        return UNICODE if self.unicode else ASCII

    @property
    def tick(self) -> float:
        """Seconds between two updates of a live screen."""
        return 3.0 if self.low else 1.0


def original_environment() -> dict[str, str]:
    """The environment this process was started with.

    Python replaces a C locale by ``LC_CTYPE=C.UTF-8`` in ``os.environ`` before any code runs (PEP 538), which
    would hide ``LANG=C`` from us; Linux keeps the original in ``/proc``.
    """
    env = dict(os.environ)
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return env
    started = {k: v for k, _eq, v in (item.partition("=") for item in os.fsdecode(raw).split("\0")) if k}
    if env.get("LC_CTYPE") == "C.UTF-8" and "LC_CTYPE" not in started:
        del env["LC_CTYPE"]
    return env


def speaks_utf8(environ: Mapping[str, str]) -> bool:
    """Whether the locale of ``environ`` is installed and uses UTF-8. No locale at all means C, hence False."""
    name = next((environ[k] for k in ("LC_ALL", "LC_CTYPE", "LANG") if environ.get(k)), "C")
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
        return codecs.lookup(locale.nl_langinfo(locale.CODESET)).name == "utf-8"
    except (locale.Error, LookupError):
        return False
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def profile(
    low: bool = False,
    environ: Mapping[str, str] | None = None,
    *,
    ascii_only: bool = False,
    notify: bool = True,
) -> Profile:
    """The profile for this terminal; ``DSTUI_ASCII=1`` and ``DSTUI_LOW=1`` (or ``--low``) force their half."""
    env = original_environment() if environ is None else environ
    ascii_only = (
        ascii_only
        or env.get("DSTUI_ASCII") == "1"
        or (env.get("DSTUI_ASCII") != "0" and not speaks_utf8(env))
    )
    return Profile(unicode=not ascii_only, low=low or env.get("DSTUI_LOW") == "1", notify=notify)


def notification(text: str, environ: Mapping[str, str] | None = None) -> str:
    """BEL, and OSC 9 that many terminals show as a desktop notification; others ignore it.

    tmux hands it on only inside its passthrough sequence, and drops that unless ``allow-passthrough`` is on; GNU
    screen has a sequence of its own. The Linux console knows no OSC 9.
    """
    env = os.environ if environ is None else environ
    if env.get("TERM", "").startswith("linux"):
        return "\a"
    shown = "".join(ch if ch.isprintable() else " " for ch in text)[:200]
    sequence = f"\x1b]9;dstui: {shown}\a"
    if env.get("TMUX"):
        sequence = "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    elif env.get("STY"):
        sequence = f"\x1bP{sequence}\x1b\\"
    return "\a" + sequence


def require_terminal() -> None:
    """Raise DstuiError (exit 2) where a full screen cannot work, naming the plain verbs that do the same."""
    hint = _(
        "the plain verbs do the same: dstui init (wizard), check, estimate, run, watch --plain; see dstui --help"
    )
    if not (sys.stdin.isatty() and sys.__stderr__ is not None and sys.__stderr__.isatty()):
        raise DstuiError(_("the full screen needs a terminal: stdin and stderr are not both one"), hint)
    if not sys.stdout.isatty():
        raise DstuiError(
            _("standard output is piped: the full screen would not know the size of the terminal"), hint
        )
    term = os.environ.get("TERM", "")
    if term in ("", "dumb", "unknown"):
        raise DstuiError(
            _("TERM={term} cannot show a full screen").format(term=term or '""'),
            hint + "\n  " + _("or set TERM, for instance: TERM=xterm-256color dstui"),
        )


def prepare_environment(prof: Profile) -> None:
    """Set the ``TEXTUAL_*`` variables that Textual reads once, when it is imported."""
    env = {"TEXTUAL_ANIMATIONS": "none", "TEXTUAL_SMOOTH_SCROLL": "0", "TEXTUAL_THEME": "ansi-dark"}
    if prof.low:
        env["TEXTUAL_FPS"] = "12"
    for name, value in env.items():
        os.environ.setdefault(name, value)
    for name in ("COLUMNS", "LINES"):
        # Textual would believe them before it asks the terminal, and a shell that exports them does so once.
        os.environ.pop(name, None)
