"""Facts of a machine that is not here: typed by a person, or read from a file."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

from dstui.errors import DstuiError
from dstui.facts.cards import find_card
from dstui.facts.model import Facts, Gpu, Host
from dstui.i18n import _
from dstui.units import GiB, parse_size

MOST_GPUS = 4096
MOST_BYTES = 64 << 20


def describe(gpus: str, *, nodes: int = 1, ram: str | None = None) -> Facts:
    """Facts from ``8x80GiB`` or ``8xA100-80G`` (``NxSIZE`` / ``NxNAME``; a lone name or size is one card).

    ``gpus`` counts one node's cards, ``ram`` is one node's host memory (``512GiB``); ``0`` = no GPU. A size
    is taken as typed (all of it usable); a name gives the bytes that NVML reports for that card. What was
    not said stays None, its reason in ``unknown``. Raises DstuiError.
    """
    if isinstance(nodes, bool) or nodes < 1:
        raise DstuiError(_("{n} nodes make no machine").format(n=nodes), _("give --nodes 1 or more"))
    unknown: dict[str, str] = {}
    cards: tuple[Gpu, ...] = ()
    text = gpus.strip()
    if text not in ("0", "none", "cpu"):
        number, what = _split(text)
        name, memory, capability = _card(what)
        not_said = _("the machine is described, not detected")
        if capability is None:
            unknown["gpus.compute_capability"] = _("only the size of the cards was given, not their name")
        unknown["gpus.processes"] = unknown["gpus.p2p_peers"] = unknown["gpus.nvlink_peers"] = not_said
        cards = tuple(
            Gpu(index=i, name=name, memory_total=memory, memory_free=memory, compute_capability=capability)
            for i in range(number)
        )
    host = Host()
    if ram is not None:
        size = parse_size(ram)
        if size < GiB:
            raise DstuiError(
                _("{size} is too little host memory for a machine").format(size=ram),
                _("write it like 512GiB"),
            )
        host = Host(ram_total=size, ram_available=size)
    else:
        unknown["host.ram_total"] = _("the host memory was not given (--ram 512GiB)")
    for key in ("driver", "cuda_driver", "host.cgroup", "storage", "toolchain", "interpreters"):
        unknown[key] = _("the machine is described, not detected")
    return Facts(source="described", gpus=cards, nodes=nodes, host=host, unknown=unknown)


def _split(text: str) -> tuple[int, str]:
    """``8x80GiB`` -> (8, ``80GiB``)."""
    m = re.fullmatch(r"(\d+)\s*[xX*×]\s*(\S.*)", text)
    if m is None:
        number, what = 1, text
    else:
        number, what = int(m.group(1)), m.group(2)
    if not what:
        raise DstuiError(_("no GPUs are given"), _("write them like 8x80GiB or 8xA100-80G"))
    if not 1 <= number <= MOST_GPUS:
        raise DstuiError(
            _("{n} GPUs in a node are not possible").format(n=number),
            _("give the cards of one node; --nodes counts the nodes"),
        )
    return number, what


def _card(what: str) -> tuple[str | None, int, tuple[int, int] | None]:
    """(name, bytes, compute capability)."""
    if re.fullmatch(r"[0-9.]+(e[0-9]+)?\s*[kmgt]i?b?|[0-9.]+e[0-9]+|[0-9]{8,}", what.strip(), re.I):
        size = parse_size(what)
        if not GiB <= size <= 4096 * GiB:
            raise DstuiError(
                _("a GPU with {size} is not possible").format(size=what), _("write it like 80GiB")
            )
        return None, size, None
    card = find_card(what)
    return card.name, card.memory, card.capability


def load_facts(path: str) -> Facts:
    """Facts from a file that ``dstui detect --json`` wrote; ``-`` reads standard input.

    ``source`` becomes ``file`` (a described machine stays ``described``). Raises DstuiError naming the file
    and the place.
    """
    hint = _("make one with: dstui detect --json > facts.json")
    shown = _("standard input") if path == "-" else path
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with Path(path).open("rb") as f:
                raw = f.read(MOST_BYTES + 1)
    except OSError as e:
        raise DstuiError(
            _("{path}: cannot be read: {reason}").format(path=shown, reason=e.strerror or e), hint
        ) from e
    if len(raw) > MOST_BYTES:
        raise DstuiError(_("{path}: too large for a facts file").format(path=shown), hint)
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise DstuiError(_("{path}: is not UTF-8 text").format(path=shown), hint) from e
    except json.JSONDecodeError as e:
        raise DstuiError(
            _("{path}:{line}:{column}: is not JSON: {reason}").format(
                path=shown, line=e.lineno, column=e.colno, reason=e.msg
            ),
            hint,
        ) from e
    except RecursionError as e:
        raise DstuiError(_("{path}: is nested too deeply for a facts file").format(path=shown), hint) from e
    try:
        facts = Facts.from_json(data)
    except DstuiError as e:
        raise DstuiError(f"{shown}: {e.message}", e.hint) from e
    return dataclasses.replace(facts, source="file") if facts.source == "detected" else facts


def facts_for(
    *,
    facts: str | None = None,
    gpus: str | None = None,
    nodes: int | None = None,
    ram: str | None = None,
    python: str | None = None,
) -> Facts:
    """The facts that a verb's options ask for: ``--facts FILE``, else ``--gpus ...``, else this machine.

    ``--ram`` and ``--nodes`` with a detected machine or a file replace that number only.
    """
    if facts is not None and gpus is not None:
        raise DstuiError(_("--facts and --gpus both describe the machine"), _("give one of them"))
    if gpus is not None:
        return describe(gpus, nodes=1 if nodes is None else nodes, ram=ram)
    if facts is not None:
        found = load_facts(facts)
    else:
        from dstui.facts.detect import detect

        found = detect(python)
    if nodes is not None or ram is not None:
        other = describe("0", nodes=found.nodes if nodes is None else nodes, ram=ram)
        found = dataclasses.replace(found, nodes=other.nodes)
        if ram is not None:
            host = dataclasses.replace(
                found.host, ram_total=other.host.ram_total, ram_available=other.host.ram_total, cgroup=None
            )
            found = dataclasses.replace(found, host=host)
    return found
