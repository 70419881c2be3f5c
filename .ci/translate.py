"""Translations: extract every `_()` text, merge it into the catalogues, compile them.

    .ci/translate.py            extract, merge, compile
    .ci/translate.py --check    fail when a catalogue is stale, incomplete or breaks a placeholder

The texts of shipped presets (`title`, `when`, `needs`) are extracted from presets/*.json, those of config keys
(`text`) from schemas/keys.json.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from babel.messages import extract, mofile, pofile
from babel.messages.catalog import Catalog

REPO = Path(__file__).resolve().parent.parent
LOCALE = REPO / "dstui" / "locale"
KEYWORDS = {"_": None, "N_": None, "ngettext": (1, 2)}
PRESET_KEYS = ("title", "when", "needs")
PLACEHOLDER = re.compile(r"\{[a-z_0-9]*(?:![rsa])?(?::[^{}]*)?\}")


def template() -> Catalog:
    catalog = Catalog(project="dstui", charset="utf-8", fuzzy=False)
    for path in sorted((REPO / "dstui").rglob("*.py")):
        if "examples" in path.parts:
            continue
        with path.open("rb") as f:
            for line, message, comments, _context in extract.extract("python", f, KEYWORDS, ("tr:",)):
                catalog.add(
                    message,
                    locations=[(str(path.relative_to(REPO)), line)],
                    auto_comments=comments,
                    flags=(),
                )
    for path in sorted((REPO / "presets").glob("*.json")):
        data = json.loads(path.read_text())
        for key in PRESET_KEYS:
            value = data.get(key)
            for text in value if isinstance(value, list) else [value]:
                if text:
                    catalog.add(text, locations=[(str(path.relative_to(REPO)), 1)])
    for text in _texts(json.loads((REPO / "schemas" / "keys.json").read_text())):
        catalog.add(text, locations=[("schemas/keys.json", 1)])
    return catalog


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "text" and isinstance(inner, str):
                yield inner
            else:
                yield from _texts(inner)


def po_path(language: str) -> Path:
    return LOCALE / language / "LC_MESSAGES" / "dstui.po"


def merged(language: str) -> Catalog:
    path = po_path(language)
    if path.exists():
        with path.open("rb") as f:
            catalog = pofile.read_po(f, locale=language)
    else:
        catalog = Catalog(locale=language, project="dstui", charset="utf-8", fuzzy=False)
    catalog.update(template(), no_fuzzy_matching=True)
    catalog.obsolete.clear()
    for message in catalog:
        message.flags.discard("python-format")
    return catalog


def write_po(catalog: Catalog) -> bytes:
    # Places without line numbers: a catalogue that changes only when a text does.
    for message in catalog:
        message.locations = sorted({(name, 0) for name, _line in message.locations})
    out = io.BytesIO()
    pofile.write_po(
        out,
        catalog,
        width=110,
        omit_header=False,
        include_lineno=False,
        sort_output=True,
        include_previous=False,
    )
    text = out.getvalue().decode()
    text = re.sub(
        r'^"(POT-Creation-Date|PO-Revision-Date|Last-Translator|Generated-By|Language-Team).*\n',
        "",
        text,
        flags=re.M,
    )
    text = re.sub(
        r"^# (Translations template|Copyright|FIRST|.*translations for dstui).*\n",
        "",
        text,
        flags=re.M | re.I,
    )
    return text.encode()


def write_mo(catalog: Catalog) -> bytes:
    # Babel puts the time of writing into the header: the same texts must give the same bytes.
    catalog.creation_date = catalog.revision_date = datetime(2000, 1, 1, tzinfo=timezone.utc)
    out = io.BytesIO()
    mofile.write_mo(out, catalog)
    return out.getvalue()


def problems(language: str, catalog: Catalog) -> list[str]:
    out = []
    for message in catalog:
        if not message.id:
            continue
        ids = message.id if isinstance(message.id, (list, tuple)) else [message.id]
        strings = message.string if isinstance(message.string, (list, tuple)) else [message.string]
        if not all(strings):
            out.append(f"{language}: not translated: {ids[0]!r}")
            continue
        for string in strings:
            if sorted(set(PLACEHOLDER.findall(string))) != sorted(set(PLACEHOLDER.findall(ids[-1]))):
                out.append(f"{language}: placeholders differ: {ids[0]!r} -> {string!r}")
    return out


def main() -> int:
    check = "--check" in sys.argv
    bad: list[str] = []
    for language in ("zh_CN",):
        catalog = merged(language)
        po = write_po(catalog)
        path = po_path(language)
        with io.BytesIO(po) as f:
            mo = write_mo(pofile.read_po(f, locale=language))
        if check:
            if not path.exists() or path.read_bytes() != po or path.with_suffix(".mo").read_bytes() != mo:
                bad.append(f"{path.relative_to(REPO)} is stale: run `make locale`")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(po)
            path.with_suffix(".mo").write_bytes(mo)
        bad += problems(language, catalog)
    if bad:
        print("\n".join(bad[:40]))
        print(f"{len(bad)} problems in the translations")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
