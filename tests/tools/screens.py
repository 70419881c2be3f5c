"""Capture every screen of the wizard as text and SVG, to be looked at.

    python -m tests.tools.screens FOLDER [--facts FILE | --cpu] [--size 80x24] [--lang en]

Writes ``FOLDER/<lang>-<size>-<nn>-<name>.txt`` and ``.svg``; without ``--facts`` a described 8-GPU machine is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from dstui import i18n
from dstui.facts.describe import load_facts
from dstui.facts.model import Facts
from dstui.session.model import STEPS
from dstui.tui import terminal


async def capture(
    folder: Path, facts: Facts, size: tuple[int, int], lang: str, profile: terminal.Profile
) -> list[Path]:
    """All screens of one language and size; returns the text files."""
    from dstui.tui.app import DstuiApp
    from tests.tui.conftest import Walk

    i18n.set_language("zh_CN" if lang == "zh" else "en")
    made: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="dstui-screens-") as cwd:
        os.environ["DSTUI_STATE_HOME"] = str(Path(cwd) / ".state")  # no run of the developer's
        script = Path(cwd) / "train.py"
        script.write_text("import deepspeed\ndeepspeed.initialize()\n")
        app = DstuiApp(profile, facts=facts, cwd=Path(cwd))
        async with app.run_test(size=size) as pilot:
            walk = Walk(app, pilot)

            async def shot(name: str) -> None:
                await pilot.pause(0.05)
                stem = folder / f"{lang}-{size[0]}x{size[1]}-{len(made):02d}-{name}"
                stem.with_suffix(".txt").write_text(walk.text + "\n")
                stem.with_suffix(".svg").write_text(app.export_screenshot(title=name))
                made.append(stem.with_suffix(".txt"))

            await pilot.pause(0.1)
            await shot("start")
            await walk.press("down", "enter")
            await shot("presets")
            await walk.press("left", "up", "enter")
            await walk.settle()
            for n, step in enumerate(STEPS, 1):
                await walk.to(n)
                await walk.settle()
                await shot(f"demo-{step.id}")
            app.session.set("engine", "plain")
            app.session.set("script", "train.py")
            app.session.set("model", "Qwen/Qwen2.5-7B")
            app.session.set("seq", 4096)
            app.session.set("stage", 3)
            app.session.set("offload", "both")
            walk.wizard._field_changed()
            await walk.settle()
            for n, step in enumerate(STEPS, 1):
                await walk.to(n)
                await walk.settle()
                await shot(f"plain-{step.id}")
            await walk.to(4)
            for page in ("fit", "findings", "file"):
                await walk.press("v")
                await walk.settle()
                await shot(f"panel-{page}")
            await walk.press("question_mark")
            await shot("help")
            await walk.press("x")
            await walk.press("ctrl+c")
            await shot("interrupt")
            await walk.press("x")
            await pilot.resize_terminal(40, 10)
            await shot("small")
    i18n.set_language("en")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--facts")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--ascii", action="store_true")
    parser.add_argument("--size", action="append")
    parser.add_argument("--lang", action="append", choices=("en", "zh"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    from tests.tui.conftest import cpu_facts, gpu_facts

    facts = load_facts(args.facts) if args.facts else cpu_facts() if args.cpu else gpu_facts(8, busy=(1,))
    for lang in args.lang or ("en", "zh"):
        for size in args.size or ("80x24", "120x40"):
            columns, rows = (int(n) for n in size.split("x"))
            profile = terminal.Profile(unicode=not args.ascii)
            made = asyncio.run(capture(args.folder, facts, (columns, rows), lang, profile))
            print(f"{lang} {size}: {len(made)} screens in {args.folder}")


if __name__ == "__main__":
    main()
