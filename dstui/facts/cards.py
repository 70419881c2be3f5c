"""NVIDIA cards by name: memory as NVML's ``memory.total`` reports it, and compute capability.

Memory is what public ``nvidia-smi`` listings of that card show (driver 510 or later, ECC as delivered);
it is always a little below the round number of the data sheet. Compute capability: NVIDIA's "CUDA GPU
Compute Capability" list. Shipped as data so that a machine that is not here can be planned for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.units import MiB


@dataclass(frozen=True)
class Card:
    """``memory`` in bytes; ``capability`` (major, minor)."""

    key: str
    name: str
    memory: int
    capability: tuple[int, int]
    aliases: tuple[str, ...] = ()


def _c(key: str, name: str, mib: int, capability: tuple[int, int], *aliases: str) -> Card:
    return Card(key, name, mib * MiB, capability, aliases)


CARDS: tuple[Card, ...] = (
    # Blackwell
    _c("B300", "NVIDIA B300 SXM6 AC", 275040, (10, 3), "B300-SXM"),
    _c("GB200", "NVIDIA GB200", 189471, (10, 0)),
    _c("B200", "NVIDIA B200", 183359, (10, 0), "B200-SXM", "B200-180G", "B200-192G"),
    _c("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, (12, 0), "PRO-6000"),
    _c("5090", "NVIDIA GeForce RTX 5090", 32607, (12, 0), "RTX-5090"),
    _c("5080", "NVIDIA GeForce RTX 5080", 16303, (12, 0), "RTX-5080"),
    # Hopper
    _c("H200", "NVIDIA H200", 143771, (9, 0), "H200-141G", "H200-SXM"),
    _c("GH200-96G", "NVIDIA GH200 480GB", 97871, (9, 0), "GH200"),
    _c("H100-80G", "NVIDIA H100 80GB HBM3", 81559, (9, 0), "H100", "H100-SXM", "H100-SXM5"),
    _c("H100-PCIE", "NVIDIA H100 PCIe", 81559, (9, 0), "H100-PCIE-80G"),
    _c("H100-NVL", "NVIDIA H100 NVL", 95830, (9, 0), "H100-94G"),
    _c("H800", "NVIDIA H800", 81559, (9, 0), "H800-80G"),
    _c("H20", "NVIDIA H20", 97871, (9, 0), "H20-96G"),
    # Ada
    _c("L40S", "NVIDIA L40S", 46068, (8, 9), "L40S-48G"),
    _c("L40", "NVIDIA L40", 46068, (8, 9), "L40-48G"),
    _c("L20", "NVIDIA L20", 46068, (8, 9), "L20-48G"),
    _c("L4", "NVIDIA L4", 23034, (8, 9), "L4-24G"),
    _c("RTX-6000-ADA", "NVIDIA RTX 6000 Ada Generation", 49140, (8, 9), "6000-ADA"),
    _c("4090", "NVIDIA GeForce RTX 4090", 24564, (8, 9), "RTX-4090"),
    _c("4080", "NVIDIA GeForce RTX 4080", 16376, (8, 9), "RTX-4080"),
    # Ampere
    _c("A100-80G", "NVIDIA A100-SXM4-80GB", 81920, (8, 0), "A100-SXM4-80G", "A100-PCIE-80G"),
    _c("A100-40G", "NVIDIA A100-SXM4-40GB", 40960, (8, 0), "A100-SXM4-40G", "A100-PCIE-40G"),
    _c("A800", "NVIDIA A800-SXM4-80GB", 81920, (8, 0), "A800-80G"),
    _c("A30", "NVIDIA A30", 24576, (8, 0), "A30-24G"),
    _c("A40", "NVIDIA A40", 46068, (8, 6), "A40-48G"),
    _c("A10", "NVIDIA A10", 23028, (8, 6), "A10-24G"),
    _c("A10G", "NVIDIA A10G", 23028, (8, 6), "A10G-24G"),
    _c("A6000", "NVIDIA RTX A6000", 49140, (8, 6), "RTX-A6000", "A6000-48G"),
    _c("3090", "NVIDIA GeForce RTX 3090", 24576, (8, 6), "RTX-3090"),
    _c("3090-TI", "NVIDIA GeForce RTX 3090 Ti", 24564, (8, 6), "RTX-3090-TI"),
    _c("3080", "NVIDIA GeForce RTX 3080", 10240, (8, 6), "RTX-3080", "3080-10G"),
    # Turing and Volta
    _c("T4", "Tesla T4", 15360, (7, 5), "T4-16G"),
    _c("2080-TI", "NVIDIA GeForce RTX 2080 Ti", 11264, (7, 5), "RTX-2080-TI"),
    _c("TITAN-RTX", "NVIDIA TITAN RTX", 24576, (7, 5)),
    _c("V100-32G", "Tesla V100-SXM2-32GB", 32768, (7, 0), "V100-SXM2-32G"),
    _c("V100-16G", "Tesla V100-SXM2-16GB", 16384, (7, 0), "V100-SXM2-16G"),
)


def _normal(name: str) -> str:
    """``NVIDIA GeForce RTX 4090``, ``rtx4090``, ``a100 80gb`` in one spelling."""
    text = re.sub(r"^(nvidia|tesla|geforce|quadro)[ _-]*", "", name.strip(), flags=re.I)
    text = re.sub(r"^(nvidia|tesla|geforce|quadro)[ _-]*", "", text, flags=re.I)
    text = re.sub(r"(\d)\s*(gb|gib|g)(?![a-z0-9])", r"\1g", text, flags=re.I)
    return re.sub(r"[^a-z0-9]+", "", text.lower())


def _index() -> dict[str, Card]:
    table: dict[str, Card] = {}
    for card in CARDS:
        for name in (card.key, card.name, *card.aliases):
            table.setdefault(_normal(name), card)
    return table


def find_card(name: str) -> Card:
    """The card called ``name`` (``A100-80G``, ``rtx 4090``, NVML's own name). DstuiError with near names."""
    table = _index()
    found = table.get(_normal(name))
    if found:
        return found
    import difflib

    wanted = _normal(name)
    longer = [n for n in table if wanted and n.startswith(wanted)]  # A100: sold with 40 and 80 GB
    near = longer or difflib.get_close_matches(wanted, list(table), 3, 0.5)
    keys = list(dict.fromkeys(table[n].key for n in near))
    hint = (
        _("did you mean {names}?").format(names=", ".join(keys))
        if keys
        else _("known cards: {names}").format(names=", ".join(c.key for c in CARDS))
    )
    raise DstuiError(
        _("no card called '{name}' is known").format(name=name),
        hint + " " + _("Or give its memory, e.g. 8x80GiB."),
    )
