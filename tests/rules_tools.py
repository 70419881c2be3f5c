"""Contexts for rule tests: a rule's page says in a few words what its example needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dstui.config.document import ConfigUnreadable, Document
from dstui.facts.model import Facts, Gpu, Host, Toolchain
from dstui.rules.command import parse_launch
from dstui.rules.diagnostic import FileReport
from dstui.rules.engine import JSON_ENGINES, Context, Options, check_document, check_path
from dstui.rules.subject import Model

NEWEST = "0.19.8"
_FACTS = {
    "ram",
    "free",
    "memlock",
    "gpu",
    "gpus",
    "compute_capability",
    "arch_list",
    "compiler",
    "libaio",
    "wsl",
    "nodes",
}


def facts(**say: Any) -> Facts:
    """A machine from the words that a rule's page uses for what its example needs."""
    card = Gpu(
        0,
        name="a card",
        memory_total=say.get("gpu"),
        compute_capability=tuple(say["compute_capability"]) if "compute_capability" in say else None,
    )
    ram = say.get("ram")
    return Facts(
        gpus=tuple([card] * say.get("gpus", 1)),
        host=Host(
            ram_total=ram,
            ram_available=say.get("free", ram),
            memlock_soft=say.get("memlock"),
            wsl=say.get("wsl"),
        ),
        nodes=say.get("nodes", 1),
        toolchain=Toolchain(
            arch_list=say.get("arch_list"),
            compiler=say.get("compiler", "g++"),
            libaio=say.get("libaio", True),
            libaio_header=say.get("libaio", True),
        ),
    )


def context(say: Mapping[str, Any] | None = None) -> Context:
    say = dict(say or {})
    return Context(
        release=say.get("release", NEWEST),
        engine=say.get("engine", "deepspeed"),
        world_size=say.get("world_size", 1),
        args=say.get("args"),
        facts=facts(**{k: v for k, v in say.items() if k in _FACTS}) if _FACTS & set(say) else None,
        model=Model(say.get("params"), largest=say.get("largest"))
        if {"params", "largest"} & set(say)
        else None,
        local=say.get("local", False),
        launch=parse_launch(say["launch"], say.get("release", NEWEST)) if "launch" in say else None,
    )


def check_text(text: str, say: Mapping[str, Any] | None = None, tmp: Any = None) -> FileReport:
    where = context(say)
    try:
        document = Document.parse(text, "ds.json", strict_json=where.engine in JSON_ENGINES)
    except ConfigUnreadable:
        path = tmp / "ds.json"
        path.write_text(text, encoding="utf-8")
        return check_path(str(path), Options(where))
    return check_document(document, where)


def check(data: Any, **say: Any) -> FileReport:
    return check_text(json.dumps(data), say)


def codes(report: FileReport) -> list[str]:
    return [f.code for f in report.findings]
