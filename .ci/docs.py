"""Write the tables of options (docs/cli.md) and keys (docs/keys.md), in both languages, and the list of modules
(docs/architecture.md) again, from the code.

``python .ci/docs.py`` after an option, a key, a translation or a module has changed. Everything else on these pages is
written by hand; a verb needs its ``## verb`` section first. ``tests/unit/test_docs.py`` says what is missing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from dstui import cli, i18n  # noqa: E402
from dstui.i18n import _  # noqa: E402

HEADS = {
    "en": ("| option | meaning |", "| keys | does | id |"),
    "zh_CN": ("| 选项 | 含义 |", "| 按键 | 作用 | id |"),
}
TABLE = r"^\|.*\|\n(?:\|.*\|\n)+"


def cell(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|")


def option_rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {c.dest: c.help or "" for c in action._choices_actions}
            for name, sub in action.choices.items():
                usage = " ".join(sub.format_usage().split()).partition(f"{parser.prog} ")[2]
                yield f"| `{cell(usage.replace('[-h] ', ''))}` | {cell(helps.get(name, ''))} |"
            return
    for action in parser._actions:
        names = ", ".join(action.option_strings)
        if action.help == argparse.SUPPRESS or "--help" in names or "--lang" in names:
            continue
        value = "" if action.nargs == 0 else str(action.metavar or "|".join(map(str, action.choices or ())))
        yield f"| `{cell(f'{names} {value}'.strip())}` | {cell(action.help or '')} |"


def options(text: str, head: str) -> str:
    """``text`` with the first table of every verb's section written again."""
    for verb, entry in cli.VERBS.items():
        parser = argparse.ArgumentParser(prog=f"dstui {verb}")
        cli._global_options(parser)
        importlib.import_module(entry.module).configure(parser)
        table = "\n".join([head, "|---|---|", *option_rows(parser)]) + "\n"
        section = re.search(rf"^## {verb}\n.*?(?=^## |\Z)", text, re.M | re.S)
        if section is None:
            sys.exit(f"docs/cli.md has no section '## {verb}'")
        new = re.sub(TABLE, lambda _m, t=table: t, section.group(), count=1, flags=re.M)
        text = text[: section.start()] + new + text[section.end() :]
    return text


def keys(text: str, head: str) -> str:
    """``text`` with everything from its first section on written again."""
    import dstui.tui.screens as screens
    from dstui.tui import actions

    for module in pkgutil.iter_modules(screens.__path__):
        importlib.import_module(f"dstui.tui.screens.{module.name}")
    out = [text[: text.index("\n## ") + 1].rstrip("\n"), ""]
    for scope, title in actions.SCOPES.items():
        out += [f"## {_(title)[0].upper()}{_(title)[1:]}", "", head, "|---|---|---|"]
        for a in actions.ACTIONS:
            if a.scope == scope:
                names = " ".join(f"`{actions.key_name(k)}`" for k in a.keys.split(","))
                out.append(f"| {names} | {cell(_(a.title))} | `{a.scope}.{a.id}` |")
        out.append("")
    return "\n".join(out).rstrip("\n") + "\n"


def modules(text: str) -> str:
    """``text`` with its section Modules written again: each with the first sentence of its docstring."""
    out = ["## Modules", ""]
    rooms: dict[str, list[str]] = {}
    for path in sorted((REPO / "dstui").rglob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if said is None:
            continue  # the mark of a package
        sentence = re.split(r"(?<=\.) ", " ".join(said.split()))[0].replace("``", "`")
        room = path.parent.relative_to(REPO).as_posix()
        rooms.setdefault(room, []).append(f"- `{path.name}`: {sentence}")
    for room, rows in rooms.items():
        out += [f"### `{room}`", "", *rows, ""]
    section = re.search(r"^## Modules\n.*?(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        sys.exit("docs/architecture.md has no section '## Modules'")
    return text[: section.start()] + "\n".join(out) + "\n" + text[section.end() :]


def main() -> None:
    architecture = REPO / "docs" / "architecture.md"
    old = architecture.read_text(encoding="utf-8")
    new = modules(old).rstrip("\n") + "\n"
    if new != old:
        architecture.write_text(new, encoding="utf-8")
        print(architecture.relative_to(REPO))
    for language, folder in (("en", REPO / "docs"), ("zh_CN", REPO / "docs" / "zh")):
        i18n.set_language(language)
        for page, write, head in (
            ("cli.md", options, HEADS[language][0]),
            ("keys.md", keys, HEADS[language][1]),
        ):
            path = folder / page
            old = path.read_text(encoding="utf-8")
            new = write(old, head)
            if new != old:
                path.write_text(new, encoding="utf-8")
                print(path.relative_to(REPO))


if __name__ == "__main__":
    main()
