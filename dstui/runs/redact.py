"""Values that must never be written: of variables and options named like a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REDACTED = "***"
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.I)
_HARMLESS = re.compile(
    r"TOKENIZ|KEYS?_?(?:CACHE|FILE)?_?DIR$|TOKENS?_PER|(?:NUM|MAX|MIN|TOTAL)_.*TOKENS?|BYPASS|PASSES", re.I
)
_URL = re.compile(r"(?<=://)[^/@\s:]+:[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret: *TOKEN*, *KEY*, *SECRET*, *PASS*.

    Names such as ``TOKENIZERS_PARALLELISM`` or ``--max_tokens`` hold none.
    """
    plain = name.lstrip("-").replace("-", "_")
    return bool(_SECRET.search(plain)) and not _HARMLESS.search(plain)


def text(value: str) -> str:
    """Without the user and password of a URL."""
    return _URL.sub(REDACTED, value)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: REDACTED if is_secret(name) else text(value) for name, value in env.items()}


def arguments(argv: Iterable[str]) -> list[str]:
    """A command line without secrets: ``--hub_token X``, ``--hub-token=X`` and ``NAME_KEY=X``."""
    out: list[str] = []
    hide_next = False
    for arg in argv:
        name, equals, _value = arg.partition("=")
        if hide_next and not arg.startswith("-"):
            out.append(REDACTED)
        elif equals and re.fullmatch(r"-{0,2}[\w.-]+", name) and is_secret(name):
            out.append(f"{name}={REDACTED}")
        else:
            out.append(text(arg))
        hide_next = arg.startswith("--") and not equals and is_secret(arg)
    return out
