"""Which devices a CUDA program sees under ``CUDA_VISIBLE_DEVICES``.

Rules: CUDA C++ Programming Guide, "CUDA Environment Variables"; where the guide is silent, the reading of
PyTorch (``torch/cuda/__init__.py``, ``_parse_visible_devices``) is followed: leading digits of an entry count
(``1gpu2`` is 1), a repeated entry leaves no device, the kind of the first entry fixes the kind of all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dstui.facts.model import Gpu
from dstui.i18n import _


def select(value: str | None, devices: Sequence[Gpu]) -> tuple[list[Gpu], str | None]:
    """The devices seen, in CUDA's order, and a remark when the variable does not do what it seems to.

    ``None`` (unset) = all; empty or ``-1`` = none; the first invalid entry ends the list.
    An index counts physical cards; on a card split by MIG it means that card's first instance.
    """
    if value is None:
        return list(devices), None
    entries = [e.strip() for e in value.split(",")]
    if not value.strip():
        return [], _("CUDA_VISIBLE_DEVICES is set and empty: CUDA sees no GPU")
    by_name = entries[0].startswith(("GPU-", "MIG-"))
    prefix = entries[0][:4]
    chosen: list[Gpu] = []
    seen: set[str] = set()
    for entry in entries:
        key, match = (
            _by_uuid(entry, devices) if by_name and entry.startswith(prefix) else _by_index(entry, devices)
        )
        if by_name and not entry.startswith(prefix):
            key, match = "", None
        if key and key in seen:
            return [], _("CUDA_VISIBLE_DEVICES names {entry} twice: CUDA sees no GPU").format(entry=entry)
        seen.add(key)
        if match is None:
            if entry.startswith("-") and not chosen and len(entries) == 1:
                return [], _("CUDA_VISIBLE_DEVICES={value}: CUDA sees no GPU").format(value=value)
            remark = _("CUDA_VISIBLE_DEVICES: '{entry}' is no device here; it and all after it are ignored")
            return chosen, remark.format(entry=entry)
        chosen.append(match)
    return chosen, None


def _by_index(entry: str, devices: Sequence[Gpu]) -> tuple[str, Gpu | None]:
    m = re.match(r"\+?\d+", entry)
    if not m:
        return "", None
    index = int(m.group())
    return str(index), next((g for g in devices if g.index == index), None)


def _by_uuid(entry: str, devices: Sequence[Gpu]) -> tuple[str, Gpu | None]:
    """A full UUID or a prefix that names one device; ``GPU-...`` of a split card = its first instance."""
    old_form = re.match(r"MIG-(GPU-[^/]+)/", entry)  # MIG-GPU-<uuid>/<gi>/<ci>, drivers before 470
    if old_form:
        inside = [g for g in devices if g.uuid == entry]
        return entry, inside[0] if inside else None
    if entry.startswith("MIG-"):
        found = [g for g in devices if (g.uuid or "").startswith(entry) and g.mig_parent]
        return entry, found[0] if len(found) == 1 else None
    cards: dict[str, Gpu] = {}
    for g in devices:
        uuid = g.mig_parent or g.uuid or ""
        if uuid.startswith(entry):
            cards.setdefault(uuid, g)
    if len(cards) != 1:
        return entry, None
    uuid, gpu = next(iter(cards.items()))
    return uuid, gpu
