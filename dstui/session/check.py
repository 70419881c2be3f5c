"""What the rules say about a config text, for whichever engine of the wizard will read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstui.config.document import Document
from dstui.facts.model import Facts
from dstui.rules.diagnostic import FileReport

READERS = {"demo": "deepspeed", "plain": "deepspeed", "hf": "hf", "llamafactory": "hf", "swift": "hf"}
"""Engine of the wizard or of a preset -> engine of the rules: LLaMA-Factory and ms-swift train through the Trainer."""


def check_text(
    text: str,
    *,
    engine: str,
    path: str,
    release: str | None = None,
    world_size: int | None = None,
    facts: Facts | None = None,
    args: Mapping[str, Any] | None = None,
    params: int | None = None,
    trained: int | None = None,
    local: bool = False,
) -> FileReport:
    """``dstui check`` of a text. ``release`` None: the newest known. ``args``: what fills ``auto`` (the Trainer)."""
    from dstui.config.schema import newest
    from dstui.rules.engine import Context, check_document
    from dstui.rules.subject import Model

    reader: Any = READERS.get(engine, engine)
    context = Context(
        release=release or newest(),
        release_from="interpreter" if release else "newest",
        engine=reader,
        facts=facts,
        world_size=world_size,
        args=args,
        model=None if params is None else Model(params, trained),
        local=local,
    )
    return check_document(Document.parse(text, path, strict_json=reader == "hf"), context)
