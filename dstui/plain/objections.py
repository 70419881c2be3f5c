"""What ``check`` says of a config that ``estimate`` and ``plan`` answer about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dstui.facts.model import Facts
from dstui.rules.diagnostic import Finding
from dstui.rules.engine import Engine


class Rules:
    """What ``check`` says about a config for this machine and release."""

    def __init__(self, facts: Facts, release: str | None, engine: Engine, ranks: int | None) -> None:
        from dstui.config.schema import newest
        from dstui.rules.engine import Context

        self._context = Context(
            release=release or newest(),
            engine=engine,
            facts=facts,
            world_size=ranks,
        )

    def findings(self, config: Mapping[str, Any]) -> list[Finding]:
        """All but ``info``."""
        from dstui.config.document import Document
        from dstui.rules.engine import check_document

        report = check_document(Document.parse(json.dumps(config)), self._context)
        return [f for f in report.findings if f.severity != "info"]

    def objection(self, config: Mapping[str, Any]) -> str | None:
        """The first finding for which a config must not be written."""
        for f in self.findings(config):
            if f.severity in ("error", "silent-wrong"):
                return f"{f.code}: {f.message}"
        return None

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """The first finding for which a run with ``config`` does not start or stops."""
        for f in self.findings(config):
            if f.severity == "error":
                return " ".join(x for x in (f.code, f.path) if x) + f": {f.message}"
        return None
