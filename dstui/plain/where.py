"""``dstui where``: the paths that dstui uses."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from dstui import paths
from dstui.errors import Exit
from dstui.i18n import _, listed
from dstui.plain.columns import pad


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=_("paths as JSON"))


def places() -> dict[str, Path]:
    """``settings presets runs`` are the user's, ``schemas`` and ``shipped_presets`` come with dstui."""
    return {
        "settings": paths.config_home(),
        "presets": paths.user_presets_dir(),
        "runs": paths.runs_dir(),
        "schemas": paths.data_dir("schemas"),
        "shipped_presets": paths.data_dir("presets"),
    }


_MOVED_BY = {
    "settings": "DSTUI_CONFIG_HOME",
    "presets": "DSTUI_CONFIG_HOME",
    "runs": "DSTUI_STATE_HOME",
}


def run(args: argparse.Namespace) -> int:
    found = places()
    if args.json:
        data: dict[str, object] = {"schema_version": 1, **{k: str(v) for k, v in found.items()}}
        data["cache"] = None  # dstui keeps none
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return Exit.OK
    titles = {
        "settings": _("settings"),
        "presets": _("your presets"),
        "runs": _("runs"),
        "schemas": _("schemas"),
        "shipped_presets": _("shipped presets"),
    }
    for key, path in found.items():
        variable = _MOVED_BY.get(key)
        notes = []
        if variable and os.environ.get(variable):
            notes.append(_("moved by {variable}").format(variable=variable))
        try:
            there = path.is_dir()
        except PermissionError:
            notes.append(_("not readable"))
        else:
            if not there:
                notes.append(_("not made yet"))
        print(f"{pad(titles[key], 16)}{path}" + (f"  ({', '.join(notes)})" if notes else ""))
    print()
    print(_("Move them with {names}.").format(names=listed(sorted(set(_MOVED_BY.values())))))
    return Exit.OK
