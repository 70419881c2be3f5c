"""The one table of actions: key bindings, the key line and the help page are all made from it."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding, BindingType

from dstui.i18n import N_, _


@dataclass(frozen=True)
class Action:
    """``id`` names the method ``action_<id>`` of the class whose scope it is in; ``keys`` are Textual's names."""

    scope: str
    id: str
    keys: str
    title: str
    priority: bool = False


SCOPES: dict[str, str] = {
    "app": N_("everywhere"),
    "start": N_("start"),
    "wizard": N_("wizard"),
    "form": N_("fields of a step"),
}
"""Scopes in the order of the help page; screens of other modules add theirs with ``register``."""

ACTIONS: list[Action] = [
    Action("app", "help", "question_mark,f1", N_("help")),
    Action("app", "quit_app", "q,ctrl+q", N_("quit; runs go on")),
    Action("app", "interrupt", "ctrl+c", N_("ask what to do with the run, or quit"), priority=True),
    Action("app", "runs", "ctrl+r", N_("the list of runs")),
    Action("app", "wizard", "ctrl+w", N_("the wizard")),
    Action("app", "presets", "ctrl+e,f6", N_("presets: look, edit, copy, delete")),
    Action("start", "up", "up", N_("up")),
    Action("start", "down", "down", N_("down")),
    Action("start", "choose", "enter,right,space", N_("choose")),
    Action("start", "back", "left,escape,left_square_bracket", N_("back")),
    Action("wizard", "accept_all", "A,ctrl+a", N_("accept all that is left and review")),
    Action("wizard", "back", "left,left_square_bracket,ctrl+p,pageup,escape", N_("previous step")),
    Action("wizard", "skip", "right,right_square_bracket,ctrl+n,pagedown", N_("next step, undecided")),
    Action("wizard", "panel", "v,f2", N_("fit, findings, the file")),
    Action("wizard", "steps", "tab", N_("list of steps, panel, fields")),
    Action("wizard", "write", "w,f3", N_("write the file (review)")),
    Action("wizard", "keep", "s,f5", N_("save the config as a preset (review)")),
    Action("wizard", "launch", "l,f4", N_("launch the run (review)")),
    Action("wizard", "trial", "t,f7", N_("a trial: a few steps, measured (review)")),
    Action("form", "up", "up,shift+tab", N_("up")),
    Action("form", "down", "down", N_("down")),
    Action("form", "enter", "enter", N_("choose; on what is chosen: next step")),
    Action("form", "space", "space", N_("choose, tick, edit")),
    Action("form", "recommended", "r,ctrl+o", N_("back to the recommended value")),
]

JUMPS = "1234567890"
"""Keys that jump to step 1 to 10."""

_KEY_NAMES = {
    "question_mark": "?", "left_square_bracket": "[", "right_square_bracket": "]", "slash": "/",
    "enter": "Enter", "space": "Space", "escape": "Esc", "tab": "Tab", "shift+tab": "S-Tab",
    "up": "Up", "down": "Down", "left": "Left", "right": "Right", "pageup": "PgUp", "pagedown": "PgDn",
    "plus": "+", "minus": "-", "equals_sign": "=", "home": "Home", "end": "End", "delete": "Del", "backspace": "Backspace",
}  # fmt: skip


def register(scope: str, title: str, actions: list[Action]) -> None:
    """Add the actions of a screen that lives in a module of its own (idempotent)."""
    SCOPES[scope] = title
    ACTIONS.extend(a for a in actions if a not in ACTIONS)


def bindings(*scopes: str) -> list[BindingType]:
    """The bindings of these scopes, for a class's ``BINDINGS``."""
    return [
        Binding(a.keys, a.id, a.title, show=False, id=f"{a.scope}.{a.id}", priority=a.priority)
        for a in ACTIONS
        if a.scope in scopes
    ]


def key_name(key: str) -> str:
    """A key as people write it: ``ctrl+a`` -> ``^A``."""
    if key.startswith("ctrl+"):
        return "^" + key[5:].upper()
    return _KEY_NAMES.get(key, key.upper() if key[0] == "f" and key[1:].isdigit() else key)


def help_rows(first: str = "") -> list[tuple[str, str, str]]:
    """(scope title, keys, what it does), in the order of the help page; the scope ``first`` leads."""
    rows = []
    for scope, title in sorted(SCOPES.items(), key=lambda item: item[0] != first):
        for a in ACTIONS:
            if a.scope == scope:
                rows.append((_(title), " ".join(key_name(k) for k in a.keys.split(",")), _(a.title)))
        if scope == "wizard":
            rows.append((_(title), "1 .. 9 0", _("step 1 to 10")))
        if scope == "monitor":
            rows.append((_(title), "1 .. 5", _("evidence of that lamp")))
            rows.append((_(title), "1 .. 9", _("on the diagnosis page: make that change")))
    return rows
