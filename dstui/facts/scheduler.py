"""Slurm and DeepSpeed's hostfile.

The default ``/job/hostfile`` is DeepSpeed's own (``launcher/runner.py``, ``DLTS_HOSTFILE``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dstui.facts.model import Gpu, Scheduler
from dstui.facts.system import System


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _gpus_on_node(system: System) -> int | None:
    """From SLURM_GPUS_ON_NODE (``4`` or ``h100:4``), else the number of SLURM_JOB_GPUS / SLURM_STEP_GPUS."""
    env = system.environ
    m = re.search(r"(\d+)(?:\(.*\))?$", env.get("SLURM_GPUS_ON_NODE", ""))
    if m:
        return int(m.group(1))
    listed = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")
    return len(listed.split(",")) if listed else None


def read_scheduler(system: System, gpus: Sequence[Gpu] | None, has_card: bool) -> Scheduler:
    """``login_node``: Slurm's commands are here, no job is active and no NVIDIA card is in this machine."""
    env = system.environ
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    present = bool(job) or system.which("srun") is not None or system.which("sinfo") is not None
    hostfile = next(
        (h for h in ("/job/hostfile", f"{system.cwd}/hostfile") if system.path(h).is_file()), None
    )
    return Scheduler(
        slurm_job=job,
        slurm_nodes=_int(env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES")),
        slurm_gpus_on_node=_gpus_on_node(system) if job else None,
        slurm_present=present,
        login_node=present and not job and not gpus and not has_card,
        hostfile=hostfile,
    )
