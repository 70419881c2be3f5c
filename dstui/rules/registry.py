"""The rules: declared with ``@rule`` in one module a family, found here by code, name or prefix.

A rule is one function ``check(subject) -> iterator of Hit | Lacks``. It is pure: no file, no clock, no
environment; what it needs to know of the machine comes in through the subject. Its page (what, why,
example, fix, source) is part of the declaration, so a rule without a page cannot exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Union

from dstui.rules.diagnostic import Fix, Severity, When

if TYPE_CHECKING:
    from dstui.rules.subject import Subject


@dataclass(frozen=True)
class Hit:
    """What a rule found at one place. Texts are already translated."""

    pointer: str
    message: str
    effect: str = ""
    hint: str = ""
    fix: Fix | None = None


@dataclass(frozen=True)
class Lacks:
    """The rule would have to know ``needs`` (``facts.gpus``) to judge this file; listed as skipped."""

    needs: str


Check = Callable[["Subject"], Iterator[Union[Hit, Lacks]]]  # noqa: UP007 - evaluated at run time on 3.10


@dataclass(frozen=True)
class Shift:
    """What one release does with a file that the release before it does not. Texts are already translated.

    ``before`` and ``after`` are the two values when a default changed; ``dstui versions --pin`` writes the one the
    file had, unless ``pinnable`` is False (the release has no such key) or ``fix`` says how.
    """

    pointer: str
    message: str
    effect: str = ""
    hint: str = ""
    before: Any = None
    after: Any = None
    fix: Fix | None = None
    pinnable: bool = True


Compare = Callable[["Subject", "Subject"], Iterator[Shift]]


@dataclass(frozen=True)
class Page:
    """What ``dstui explain`` shows. All texts but ``example`` and ``source`` are translated when shown."""

    what: str
    why: str
    example: str
    """A config (JSON) that the rule flags; the registry test proves that it does."""
    fix: str
    source: str
    """The DeepSpeed file and release that prove the rule, or the measurement."""


@dataclass(frozen=True)
class Rule:
    """One rule: when it holds, what it checks, and its page. Made by ``@rule``."""

    code: str
    name: str
    severity: Severity
    when: When
    page: Page
    check: Check
    since: str | None = None
    """First release in which the rule holds; None = every release dstui knows."""
    until: str | None = None
    """Last release in which it holds; None = still so."""
    needs: tuple[str, ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)
    """What the page's example needs besides the file: release, world_size, engine, facts, params."""
    compare: Compare | None = None
    """Set for a change between two releases: it speaks in ``dstui versions`` only, ``check`` never runs it."""
    kind: str = ""
    """Of a change: ``default``, ``changed``, ``fixed`` or ``new``."""

    @property
    def family(self) -> str:
        return self.code[:3]

    def holds(self, release: tuple[int, ...]) -> bool:
        """Whether the rule applies to ``release`` (``version_key`` of it)."""
        if self.since and release < version_key(self.since):
            return False
        return not (self.until and release > version_key(self.until))


_RULES: dict[str, Rule] = {}
_CHANGES: dict[str, Rule] = {}


@lru_cache(maxsize=256)
def version_key(release: str) -> tuple[int, ...]:
    """``0.19.8+cu121`` -> (0, 19, 8): compares releases; anything after the numbers is left out."""
    parts = re.match(r"\d+(?:\.\d+)*", release.strip())
    return tuple(int(p) for p in parts.group().split(".")) if parts else ()


def rule(
    code: str,
    name: str,
    severity: Severity,
    when: When,
    *,
    what: str,
    why: str,
    example: str,
    fix: str,
    source: str,
    since: str | None = None,
    until: str | None = None,
    needs: tuple[str, ...] = (),
    context: Mapping[str, Any] | None = None,
) -> Callable[[Check], Check]:
    """Declare a rule; see ``Rule`` and ``Page`` for the meaning of the parameters.

    Raises ValueError for a code or name used twice, or out of form.
    """
    _free(code, name)

    def register(check: Check) -> Check:
        _RULES[code] = Rule(
            code, name, severity, when,
            Page(what, why, example, fix, source), check, since, until, needs, context or {},
        )  # fmt: skip
        return check

    return register


def change(
    code: str,
    name: str,
    kind: str,
    since: str,
    *,
    what: str,
    why: str,
    example: str,
    fix: str,
    source: str,
    context: Mapping[str, Any] | None = None,
) -> Callable[[Compare], Compare]:
    """Declare what ``since`` does otherwise than the release before it: ``compare(older, newer)`` says for a file.

    ``example`` is a config that relies on it. Raises ValueError as ``rule`` does.
    """
    _free(code, name)

    def register(compare: Compare) -> Compare:
        severity = Severity.INFO if kind in ("new", "fixed") else Severity.MEANING_CHANGED
        _CHANGES[code] = Rule(
            code, name, severity, "always", Page(what, why, example, fix, source), _silent, since, None,
            context=context or {}, compare=compare, kind=kind,
        )  # fmt: skip
        return compare

    return register


def _silent(_subject: Subject) -> Iterator[Hit | Lacks]:
    return iter(())


def _free(code: str, name: str) -> None:
    if not re.fullmatch(r"DS\d{3}", code):
        raise ValueError(f"{code}: a rule's code is DS and three digits")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"{name}: a rule's name is kebab case")
    both = {**_RULES, **_CHANGES}
    if code in both or any(r.name == name for r in both.values()):
        raise ValueError(f"{code} {name}: declared twice")


def _load() -> None:
    from dstui.rules import (  # noqa: F401 - importing a family declares its rules
        auto,
        batch,
        comm,
        commandline,
        features,
        launch,
        offload,
        pinned,
        precision,
        release,
        shape,
        training,
        values,
        windows,
        zero,
    )


def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    _load()
    return tuple(_RULES[c] for c in sorted(_RULES))


def all_changes() -> tuple[Rule, ...]:
    """Every change between two releases that ``dstui versions`` knows, by release, then code."""
    from dstui.rules import changes  # noqa: F401 - importing it declares them

    return tuple(sorted(_CHANGES.values(), key=lambda c: (version_key(c.since or ""), c.code)))


def find(code_or_name: str) -> Rule | None:
    """The rule or change with this code (any case) or name."""
    _load()
    wanted = code_or_name.strip()
    found = _RULES.get(wanted.upper()) or next((r for r in _RULES.values() if r.name == wanted.lower()), None)
    if found is None:
        found = next((c for c in all_changes() if wanted.upper() == c.code or wanted.lower() == c.name), None)
    return found


def matches(code: str, prefixes: Iterable[str]) -> bool:
    """``DS204`` matches ``DS204``, ``DS2``, ``DS`` and ``ALL``; any case."""
    return any(
        code.startswith(p.strip().upper()) or p.strip().upper() == "ALL" for p in prefixes if p.strip()
    )


def selected(code: str, select: Iterable[str], ignore: Iterable[str]) -> bool:
    """Whether ``--select``/``--ignore`` leave ``code`` in: the longest matching prefix decides, ignore on a tie."""

    def longest(prefixes: Iterable[str]) -> int:
        return max(
            (0 if p.strip().upper() == "ALL" else len(p.strip()) for p in prefixes if matches(code, (p,))),
            default=-1,
        )

    chosen, dropped = longest(select), longest(ignore)
    if not any(p.strip() for p in select):
        return dropped < 0
    return chosen >= 0 and chosen > dropped
