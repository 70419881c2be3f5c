"""What a process needs beside its tensors: CUDA context, NCCL, cuBLAS, interpreter.

Measured on one and two H200 with torch 2.11 (CUDA 13) and DeepSpeed 0.19.8, 18 runs: NVML's figure for the
device minus ``torch.cuda.memory_reserved()``, and peak RSS of a rank minus its tensors. Other cards were not
measured; their ranges are wider.
"""

from __future__ import annotations

from dstui.estimate.result import Range
from dstui.units import GiB, MiB

WORKSPACE_HOPPER = 64 * MiB
"""cuBLAS and cuBLASLt workspaces, 32 MiB each, made at the first product (measured on H200)."""
WORKSPACE_OTHER = 17 * MiB
"""Twice cuBLAS's default of 8.125 MiB (T4: 8.1 MiB measured for the first)."""

RANK_RSS = round(2.08 * GiB)
"""Peak RSS of a rank on a GPU without any tensor of ours: 1.97-2.12 GiB measured."""
RANK_RSS_LIGHT = round(1.80 * GiB)
"""The same of a script that imports no transformers: 1.87 and 1.94 GiB measured for the bundled GPT on one H200 and on two."""
RANK_RSS_LIGHT_OFFLOAD = round(1.64 * GiB)
"""The same where the CPU does the optimizer's step, so that no kernels for it are loaded: 1.68 GiB measured."""
RANK_RSS_INIT = round(1.45 * GiB)
"""The same while ``deepspeed.initialize`` runs (1.44-1.57 GiB measured)."""
RANK_RSS_LOAD = round(0.94 * GiB)
"""The same while the model loads, its tensors apart (0.92-0.98 GiB measured)."""
RANK_RSS_TOGETHER = round(0.32 * GiB)
"""More while the model loads where several ranks have opened NCCL (1.25-1.26 GiB measured in all)."""
RANK_RSS_COMPILE = round(0.24 * GiB)
"""More in the step when torch.compile builds kernels in the process (0.21-0.29 GiB measured with Muon)."""
RANK_RSS_CPU = round(0.5 * GiB)
"""A rank on the CPU with Python, torch and DeepSpeed loaded: 0.53 GiB measured for a GPT of 5 M parameters."""


def workspace(capability: tuple[int, int] | None) -> int:
    """Bytes of the cuBLAS workspaces on a card of this compute capability (None: unknown, as Hopper)."""
    return WORKSPACE_HOPPER if capability is None or capability[0] >= 9 else WORKSPACE_OTHER


def overhead(capability: tuple[int, int] | None, ranks: int, stage: int) -> Range:
    """Device bytes beside PyTorch's reserve, the driver's own share included (``memory`` takes it off where the facts
    tell it, as nvidia-smi does). Of a card that is not known, the range
    is that of all.

    H200: 1.90 GiB for one rank (0.5-0.6 of them the idle card's), + 0.47 with NCCL between two ranks, + 0.28
    to 0.38 at stage 3, which opens further streams and kernels. More ranks open more channels: 0.69 GiB are
    reported for 4 A100 and 1.06 GiB for 8 H100 (NVIDIA/nccl issues 964 and 1685).
    """
    measured = capability is not None and capability[0] >= 9
    base = 1.90 if capability is None or measured else 1.10
    nccl = 0.0 if ranks == 1 else 0.47 if ranks == 2 else 0.69 if ranks <= 4 else 1.06
    extra = 0.0 if stage < 3 else 0.33
    less, more = (1.3, 0.4) if capability is None else (0.7, 0.25) if measured else (0.5, 1.0)
    low = (base - less) + 0.6 * nccl + 0.5 * extra
    high = base + more + (1.5 * nccl) + extra * 1.3
    return Range(round(low * GiB), round((base + nccl + extra) * GiB), round(high * GiB))
