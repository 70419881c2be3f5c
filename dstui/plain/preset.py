"""``dstui preset``: list, show, new, edit, copy, rename, delete, import, export."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dstui.config import presets
from dstui.config.presets import Preset
from dstui.errors import DstuiError, Exit
from dstui.i18n import _


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="list|show|new|edit|copy|rename|delete|import|export")

    def verb(name: str, text: str, *names: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        for n in names:
            sub.add_argument(n.lower(), metavar=n)
        sub.add_argument("--json", action="store_true", help=_("answer as JSON"))
        sub.add_argument("--lang", choices=("en", "zh"), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return sub

    verb("list", _("all presets"))
    verb("show", _("one preset: when to use it, what it needs, its config"), "NAME")
    new = verb("new", _("make a preset, then edit it"), "NAME")
    new.add_argument(
        "--like", metavar="PRESET", default="zero2", help=_("start as a copy of this one (default: zero2)")
    )
    new.add_argument("--title")
    new.add_argument("--no-edit", action="store_true", help=_("do not open the editor"))
    verb("edit", _("open one of your presets in $EDITOR; it is checked before it is kept"), "NAME")
    verb("copy", _("a preset of your own from another"), "NAME", "NEW_NAME")
    verb("rename", _("rename one of your presets"), "NAME", "NEW_NAME")
    verb("delete", _("delete one of your presets"), "NAME")
    imports = verb("import", _("a preset from a ds_config.json (or a preset file)"), "FILE")
    imports.add_argument("--name", help=_("default: the file's name"))
    imports.add_argument("--title")
    imports.add_argument("--engine", choices=presets.ENGINES, help=_("default: hf when the file says `auto`"))
    export = verb("export", _("write a preset's ds_config.json"), "NAME")
    export.add_argument("-o", "--output", metavar="FILE", help=_("default: stdout"))
    export.add_argument("--whole", action="store_true", help=_("the preset file, with title, when and needs"))


def run(args: argparse.Namespace) -> int:
    if args.what is None:
        raise DstuiError(
            _("say what to do with presets"), "list, show, new, edit, copy, rename, delete, import, export"
        )
    handler = {
        "list": _list,
        "show": _show,
        "new": _new,
        "edit": _edit,
        "copy": lambda a: _made(a, presets.copy(a.name, a.new_name)),
        "rename": lambda a: _made(a, presets.rename(a.name, a.new_name)),
        "delete": _delete,
        "import": _import,
        "export": _export,
    }[args.what]
    return int(handler(args))


def _describe(p: Preset, config: bool = False) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": p.name,
        "title": p.title,
        "engine": p.engine,
        "when": p.when,
        "needs": p.needs,
        "source": p.source,
        "shipped": p.shipped,
        "path": None if p.path is None else str(p.path),
        "problem": p.problem,
    }
    if config:
        out["fields"] = dict(p.fields)
        out["config"] = dict(p.config)
    return out


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": 1, **data}, indent=2, ensure_ascii=False))


def _list(args: argparse.Namespace) -> int:
    found = presets.list_presets()
    if args.json:
        _print_json({"presets": [_describe(p) for p in found]})
        return Exit.OK
    width = max((len(p.name) for p in found), default=0)
    for shipped, head in ((True, _("shipped")), (False, _("yours"))):
        rows = [p for p in found if p.shipped is shipped]
        if rows:
            print(f"{head}:")
        for p in rows:
            text = _("broken: {why}").format(why=p.problem) if p.problem else p.title
            print(f"  {p.name:<{width}}  {p.engine:<5}  {text}")
    return Exit.OK


def _show(args: argparse.Namespace) -> int:
    p = presets.load(args.name)
    if args.json:
        _print_json({"preset": _describe(p, config=True)})
        return Exit.OK
    rows = (
        (_("engine"), p.engine),
        (_("when"), p.when),
        (_("needs"), p.needs),
        (_("source"), p.source),
        (_("file"), str(p.path) if not p.shipped else _("shipped, read-only")),
    )
    print(f"{p.name}: {p.title}")
    for label, text in rows:
        if text:
            print(f"  {label}: {text}")
    print(presets.export(p.name), end="")
    return Exit.OK


def _made(args: argparse.Namespace, p: Preset) -> int:
    if args.json:
        _print_json({"preset": _describe(p, config=True)})
    else:
        print(_("{name}: {path}").format(name=p.name, path=p.path))
    return Exit.OK


def _new(args: argparse.Namespace) -> int:
    presets.check_name(args.name)
    base = presets.load(args.like)
    made = presets.save_user(
        dataclasses.replace(base, name=args.name, title=args.title or base.title, source=base.name)
    )
    if args.no_edit or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _made(args, made)
    return _edit(args)


def _delete(args: argparse.Namespace) -> int:
    path = presets.delete(args.name)
    if args.json:
        _print_json({"deleted": str(path)})
    else:
        print(_("deleted: {path}").format(path=path))
    return Exit.OK


def _import(args: argparse.Namespace) -> int:
    p = presets.import_config(args.file, args.name, engine=args.engine, title=args.title)
    _explain(p)
    return _made(args, p)


def _explain(p: Preset) -> None:
    """What the rules say about the config, old aliases included, on stderr."""
    from dstui.plain import report as rendering
    from dstui.session.check import check_text

    report = check_text(presets.export(p.name), engine=p.engine, path=p.name)
    for line, finding in zip(rendering.concise([report]), report.findings, strict=True):
        print(line, file=sys.stderr)
        if finding.hint:
            print("    " + _("next: {text}").format(text=finding.hint), file=sys.stderr)


def _export(args: argparse.Namespace) -> int:
    text = presets.export(args.name, whole=args.whole)
    if args.output is None:
        sys.stdout.write(text)
        return Exit.OK
    from dstui.config.write import save

    backup = save(args.output, text)
    if args.json:
        _print_json({"path": str(args.output), "backup": None if backup is None else str(backup)})
    else:
        print(_("written: {path}").format(path=args.output))
        if backup is not None:
            print(_("backup: {path}").format(path=backup))
    return Exit.OK


def _editor() -> list[str]:
    for name in ("VISUAL", "EDITOR"):
        value = os.environ.get(name, "").strip()
        if value:
            return shlex.split(value)
    import shutil

    for name in ("sensible-editor", "nano", "vi"):
        found = shutil.which(name)
        if found:
            return [found]
    raise DstuiError(_("there is no editor"), _("set EDITOR to yours, for example: EDITOR=vim"))


def _edit(args: argparse.Namespace) -> int:
    """Edits a copy; the preset changes only when the result can be used."""
    p = presets.editable(args.name)
    assert p.path is not None
    editor = _editor()
    with tempfile.TemporaryDirectory(prefix="dstui-") as folder:
        draft = Path(folder) / p.path.name
        draft.write_bytes(p.path.read_bytes())
        while True:
            before = draft.read_bytes()
            try:
                code = subprocess.call([*editor, str(draft)])
            except OSError as e:
                raise DstuiError(
                    _("{editor} cannot be started: {reason}").format(
                        editor=editor[0], reason=e.strerror or e
                    ),
                    _("set EDITOR to yours"),
                ) from e
            if code:
                raise DstuiError(
                    _("{editor} ended with code {code}; the preset is as it was").format(
                        editor=editor[0], code=code
                    )
                )
            try:
                kept = presets.replace_file(p.name, draft)
            except DstuiError as e:
                if not (sys.stdin.isatty() and sys.stderr.isatty()):
                    raise DstuiError(e.message, _("the preset is as it was")) from e
                print(_("error: {message}").format(message=e.message), file=sys.stderr)
                print(_("Enter: edit again; d: discard the change"), end=" ", file=sys.stderr, flush=True)
                answer = sys.stdin.readline()
                if not answer or answer.strip().lower() == "d":
                    raise DstuiError(_("the preset is as it was")) from e
                continue
            if draft.read_bytes() == before and before == p.path.read_bytes() and p.problem is None:
                print(_("nothing changed"), file=sys.stderr)
            _explain(kept)
            return _made(args, kept)
