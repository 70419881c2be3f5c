"""The documentation says what is there: commands parse, links lead somewhere, every verb, option, key and field is in it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstui import cli

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
ENGLISH = sorted([REPO / "README.md", *DOCS.glob("*.md")])
CHINESE = sorted((DOCS / "zh").glob("*.md"))
PAGES = [*ENGLISH, *CHINESE, REPO / "CHANGELOG.md"]
ONE_LANGUAGE = {"architecture.md", "adding-a-release.md"}
"""For those who change the code; in English only."""


def name(path: Path) -> str:
    return str(path.relative_to(REPO))


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of the fenced blocks."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)


def commands(path: Path) -> Iterator[str]:
    """The `dstui ...` command lines of a page, screen captures left out."""
    for language, body in blocks(path.read_text(encoding="utf-8")):
        if language == "text":
            continue
        for row in body.splitlines():
            m = re.match(r"\s*(?:- run: |entry: )?(dstui(?: .*)?)$", row)
            if m:
                yield m.group(1) + (" FILE" if "entry: " in row else "")


def words_of(command: str) -> list[str]:
    """Arguments up to a pipe or a redirection."""
    words = shlex.split(command, comments=True)[1:]
    stop = next((i for i, w in enumerate(words) if w in ("|", ">", "<", "&&", ";")), len(words))
    return words[:stop]


def verb_parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"dstui {verb}")
    cli._global_options(parser)
    importlib.import_module(cli.VERBS[verb].module).configure(parser)
    return parser


def accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    words = words_of(command)
    if words and words[0] in ("--help", "--version"):
        return True
    try:
        if words and words[0] in cli.VERBS:
            if "--help" not in words:
                verb_parser(words[0]).parse_args(words[1:])
            return True
        import dstui.tui

        opened: list[str | None] = []
        monkeypatch.setattr(dstui.tui, "start", lambda file, **_rest: opened.append(file) or 0)
        monkeypatch.setattr(os.path, "exists", lambda path: str(path).endswith(".json"))
        cli._open_tui(words)
        return len(opened) == 1
    except (SystemExit, Exception) as e:
        print(f"{command}: {e}")
        return False


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_command_line_parses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [c for c in commands(path) if not accepted(c, monkeypatch)]
    assert not wrong


def test_the_command_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not accepted("dstui check --no-such-option x", monkeypatch)
    assert not accepted("dstui chekc x", monkeypatch)
    assert accepted("dstui check x > out", monkeypatch)
    assert sum(1 for path in PAGES for _c in commands(path)) > 80


def test_both_languages_have_the_same_pages_and_sections() -> None:
    english = {p.name: p for p in ENGLISH}
    chinese = {p.name: p for p in CHINESE}
    assert set(english) - ONE_LANGUAGE == set(chinese)
    for page, path in chinese.items():
        here, there = path.read_text(encoding="utf-8"), english[page].read_text(encoding="utf-8")
        for pattern in (r"^#+ ", r"^\|", r"^```", r"^- ", r"^\d+\. "):
            ours, theirs = (len(re.findall(pattern, t, re.M)) for t in (here, there))
            assert ours == theirs, f"{page}: {ours} lines like {pattern!r} in Chinese, {theirs} in English"
        keep = [list(commands(p)) for p in (path, english[page])]
        assert [c.replace(" --lang zh", "") for c in keep[0]] == keep[1], page


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _hash, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.is_file(), f"{name(path)} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{name(path)} links to {target}"
    for quoted in re.findall(r"`((?:tests|schemas|presets|dstui|docs)/[\w./-]+\.\w+)`", text):
        assert (REPO / quoted).exists(), f"{name(path)} names {quoted}"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_no_page_knows_the_machine_it_was_written_on(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(?:work|root|tmp|home)/\w", text)


def options_of(verb: str) -> list[tuple[str, ...]]:
    """The spellings of every option of a verb and of its own verbs, whose names are there as well."""
    parsers = [verb_parser(verb)]
    found: list[tuple[str, ...]] = []
    while parsers:
        for action in parsers.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [(name,) for name in action.choices]
                parsers += action.choices.values()
            elif action.option_strings and action.help != argparse.SUPPRESS:
                found.append(tuple(action.option_strings))
    return [names for names in found if not {"--help", "--lang"} & set(names)]


@pytest.mark.parametrize("page", [DOCS / "cli.md", DOCS / "zh" / "cli.md"], ids=name)
def test_every_verb_and_option_is_described(page: Path) -> None:
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page.read_text(encoding="utf-8"), re.M | re.S))
    everywhere = {name for verb in cli.VERBS for names in options_of(verb) for name in names}
    for verb in cli.VERBS:
        assert verb in sections, f"no section '## {verb}'"
        words = set(re.findall(r"(?<![\w-])-*[a-z][a-z-]*", sections[verb]))
        missing = [names for names in options_of(verb) if not words & set(names)]
        assert not missing, f"{verb}: {missing} (python .ci/docs.py)"
        there = {name for names in options_of(verb) for name in names}
        described = {w for w in words if w.startswith("--")}
        assert described <= there | everywhere | {"--fix"}, verb


@pytest.mark.parametrize("page", [DOCS / "cli.md", DOCS / "zh" / "cli.md"], ids=name)
def test_every_json_field_is_named(page: Path) -> None:
    from dstui.estimate.result import Change, Estimate, GpuFit, HostFit
    from dstui.facts import model
    from dstui.rules.diagnostic import FileReport, Finding
    from dstui.runs.compare import Figures
    from dstui.runs.view import Snapshot

    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)(?:\[\])?`", text))
    shapes = [
        *(model.Facts, model.Gpu, model.GpuProcess, model.Host, model.Cgroup, model.Storage),
        *(model.Toolchain, model.Interpreter, model.Scheduler),
        *(Estimate, GpuFit, HostFit, Change, Finding, FileReport, Snapshot, Figures),
    ]
    left_out = {"losses", "lrs", "step_times", "grad_norms", "speeds", "speed_unit", "utilisation", "log"}
    for shape in shapes:
        fields = {f.name for f in dataclasses.fields(shape)} - left_out
        assert fields <= named, f"{shape.__name__}: {sorted(fields - named)}"


@pytest.mark.parametrize("page", [DOCS / "keys.md", DOCS / "zh" / "keys.md"], ids=name)
def test_every_action_is_described(page: Path) -> None:
    import dstui.tui.screens as screens
    from dstui.tui import actions

    for module in pkgutil.iter_modules(screens.__path__):
        importlib.import_module(f"dstui.tui.screens.{module.name}")
    rows = re.findall(r"^\| (.*) \| (.*) \| `(\w+\.\w+)` \|$", page.read_text(encoding="utf-8"), re.M)
    described = {(action, keys) for keys, text, action in rows if text}
    there = {
        (f"{a.scope}.{a.id}", " ".join(f"`{actions.key_name(k)}`" for k in a.keys.split(",")))
        for a in actions.ACTIONS
    }
    assert described == there, "python .ci/docs.py"


@pytest.mark.parametrize("page", [DOCS / "runs.md", DOCS / "zh" / "runs.md"], ids=name)
def test_every_variable_is_described(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in (REPO / "dstui").rglob("*.py"):
        for variable in re.findall(r"\bDSTUI_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")):
            assert variable in text, f"{path.name} reads {variable}"


@pytest.mark.parametrize("page", [DOCS / "presets.md", DOCS / "zh" / "presets.md"], ids=name)
def test_every_shipped_preset_is_listed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in (REPO / "presets").glob("*.json"):
        assert f"| `{path.stem}` |" in text


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_codes_in_the_text_exist(path: Path) -> None:
    from dstui.rules.registry import find
    from dstui.runs.causes import BY_CODE

    for code in set(re.findall(r"\bD[SR]\d{3}\b", path.read_text(encoding="utf-8"))):
        assert code in BY_CODE if code.startswith("DR") else find(code) is not None, code


def test_the_hook_runs_the_check() -> None:
    text = (REPO / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    entry = re.search(r"^  entry: dstui (.+)$", text, re.M)
    files = re.search(r"^  files: (.+)$", text, re.M)
    assert entry and files and "- id: dstui-check\n" in text
    words = shlex.split(entry.group(1))
    assert verb_parser(words[0]).parse_args([*words[1:], "a.json", "b.json"]).files == ["a.json", "b.json"]
    for path, wanted in (
        ("configs/ds_config_zero3.json", True),
        ("deepspeed.json", True),
        ("package.json", False),
        ("ds_config.py", False),
    ):
        assert bool(re.search(files.group(1), path)) is wanted, path


def test_every_module_is_placed() -> None:
    """docs/architecture.md names each module in its room, and no other."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("\n## Modules\n")[2]
    rooms = re.findall(r"^### `([\w/]+)`\n(.*?)(?=^### |\Z)", text, re.M | re.S)
    placed = {
        f"{room}/{file}" for room, rows in rooms for file in re.findall(r"^- `(\w+\.py)`: ", rows, re.M)
    }
    there = {name(p) for p in (REPO / "dstui").rglob("*.py") if p.name != "__init__.py"}
    marks = {name(p) for p in (REPO / "dstui").rglob("__init__.py")}
    assert placed - marks == there, "python .ci/docs.py"
