"""The cases of docs/plan.md, as the verb answers them.

    python tests/tools/plan_cases.py            print every block
    python tests/tools/plan_cases.py --write    write them into docs/plan.md and docs/zh/plan.md again, each in its language

A block is the command line, the verdict, and those lines of the answer that decide (the rest is left out).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
PAGES = {"en": REPO / "docs" / "plan.md", "zh": REPO / "docs" / "zh" / "plan.md"}
COMMANDS = (
    "dstui plan --model llama-2-7b --lora-rank 16 --gpus 1x4090 --ram 64GiB",
    "dstui plan --model llama-2-7b --gpus 4x4090 --ram 256GiB",
    "dstui plan --model llama-2-7b --gpus 8xA100-80G --ram 512GiB",
    "dstui plan --model llama-2-7b --gpus 8xA100-80G --ram 512GiB --goal speed",
    "dstui plan --model llama-2-13b --gpus 1x4090 --ram 64GiB",
    "dstui plan --model llama-2-13b --gpus 1x4090 --ram 256GiB",
    "dstui plan --model llama-2-13b --gpus 2x4090 --ram 256GiB",
    "dstui plan --model llama-2-13b --lora-rank 16 --gpus 2x4090 --ram 128GiB",
    "dstui plan --model gpt-neox-20b --gpus 2x4090 --ram 128GiB",
    "dstui plan --model gpt-neox-20b --gpus 2x4090 --ram 512GiB",
    "dstui plan --model llama-2-70b --gpus 8xA100-80G --ram 1TiB",
    "dstui plan --model llama-2-70b --gpus 8xH100-80G --ram 2TiB",
    "dstui plan --model llama-2-70b --gpus 8xH100-80G --nodes 2 --ram 1TiB --network 400",
)
SHOWN = (
    "stage", "offload_optimizer", "offload_param", "ratio", "pin_memory", "micro_batch", "loading", "tight",
    "zero_hpz_partition_size",
)  # fmt: skip


def block(command: str, language: str = "en") -> str:
    """``$ command`` and the deciding lines of its answer."""
    sys.path.insert(0, str(REPO))
    from dstui.cli import main
    from dstui.i18n import _

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        main([*command.split()[1:], "--deepspeed", "0.19.8", "--no-calibration", "--lang", language])
    chosen, others = _("Chosen"), (_("What would fit"), _("Also possible"))
    lines: list[str] = []
    section, shown = "", True
    for line in said.getvalue().splitlines():
        if re.match(r"\S", line):
            section = section if not lines else line
            shown = not lines or line in others
        elif section == chosen and re.match(r"  \S", line):
            shown = line.split()[0].rstrip(":") in SHOWN
        if shown and line:
            lines.append(line)
    return "\n".join([f"$ {command}", *lines])


def written(page: Path) -> list[str]:
    """The blocks of a page."""
    return re.findall(r"```text\n(\$ dstui plan .*?)\n```", page.read_text(encoding="utf-8"), re.S)


def write(page: Path, blocks: dict[str, str]) -> None:
    text = page.read_text(encoding="utf-8")
    for command in COMMANDS:
        found = re.search(
            rf"```text\n{re.escape('$ ' + command)}\n.*?```|```text\n{re.escape('$ ' + command)}```",
            text,
            re.S,
        )
        if found is None:
            sys.exit(f"{page.name} has no block for: {command}")
        text = text[: found.start()] + f"```text\n{blocks[command]}\n```" + text[found.end() :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for each, its_page in PAGES.items():
            write(its_page, {c: block(c, each) for c in COMMANDS})
    else:
        print("\n\n".join(block(c) for c in COMMANDS))
