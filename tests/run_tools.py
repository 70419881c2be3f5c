"""A run's directory as a supervisor writes it, with figures that a test chooses; its process is the test itself.

Every file has the format of a real run (``dstui.runs.store``, ``dstui.runs.samples``), so a view reads it by the
very same path; only the trainer is missing.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

from dstui.runs import samples, store
from dstui.runs.processes import here, stat
from dstui.runs.samples import GpuUse, HostUse, Peaks, RankUse, Sample
from dstui.runs.store import RunDir
from dstui.units import GiB

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
}


def prediction(gpus: int = 8) -> dict[str, Any]:
    """As ``Estimate.to_json`` gives it."""

    def around(x: float) -> dict[str, int]:
        return {"low": int(x * 0.96 * GiB), "expected": int(x * GiB), "high": int(x * 1.05 * GiB)}

    return {
        "verdict": "fits",
        "gpu": {
            "capacity": 139 * GiB,
            "allocated": around(70.0),
            "reserved": around(74.0),
            "device": around(76.0),
            "phases": [
                {
                    "phase": "backward",
                    "parts": {"params": 16 * GiB, "grads": 8 * GiB, "activations": 40 * GiB},
                }
            ],
        },
        "host": {
            "capacity": 1007 * GiB,
            "pinned": 0,
            "pageable": 30 * GiB,
            "peak": around(3.4 * max(gpus, 4)),
        },
        "assumptions": ["activation checkpointing is on"],
    }


class FakeRun:
    """A run of ``gpus`` cards (0: CPU ranks); ``tick`` is one second of it with one step."""

    def __init__(
        self,
        gpus: int = 8,
        ranks: int | None = None,
        total: int = 500,
        name: str = "llama-8b",
        started: bool = True,
        predicted: bool = True,
        now: float | None = None,
        root: Path | None = None,
    ) -> None:
        me = stat(os.getpid())
        assert me is not None
        process = {"pid": os.getpid(), "start_time": me.start}
        place = here()
        self.now = time.time() if now is None else now
        self.gpus, self.ranks, self.total = gpus, ranks or gpus or 2, total
        self.step = 0
        self._random = random.Random(7)
        self.run: RunDir = store.create(
            {
                "name": name,
                "created_at": self.now - 90,
                "started_at": self.now - 85 if started else None,
                "command": ["python", "-m", "deepspeed.launcher.runner", "train.py", "--steps", str(total)],
                "script": "/home/ann/train.py",
                "engine": "plain",
                "launcher_kind": "deepspeed",
                "world_size": self.ranks,
                "config": {"source": None, "instrumented": True, "how": "placeholder", "options": []},
                "facts": {"gpus": [{"index": i, "name": "NVIDIA H200"} for i in range(gpus)]},
                "prediction": prediction(gpus) if predicted else None,
                "host": place.host,
                "boot_id": place.boot_id,
                "pid_namespace": place.pid_namespace,
                "supervisor": process,
                "launcher": process if started else None,
                "spec": {},
            },
            json.dumps(CONFIG, indent=2),
            root=root,
        )
        self.peaks = Peaks()

    @property
    def id(self) -> str:
        return self.run.id

    def log(self, *lines: str) -> None:
        with self.run.out_log.open("a", encoding="utf-8") as f:
            f.writelines(line + "\n" for line in lines)

    def sample(self, **changes: Any) -> None:
        r = self._random
        use = tuple(
            GpuUse(
                index=i,
                utilisation=0.9 + r.random() / 10,
                memory_used=int((78 + r.random()) * GiB),
                memory_total=int(139.8 * GiB),
                power=600 + r.random() * 90,
                power_limit=700.0,
                temperature=float(round(58 + r.random() * 8)),
                throttle="",
                clock_sm=float(1755 + round(r.random() * 20) * 15),
                pcie_rx=(3 + r.random()) * 1e9,
                pcie_tx=(2 + r.random()) * 1e9,
                nvlink_rx=(120 + 9 * r.random()) * 1e9,
                nvlink_tx=(120 + 9 * r.random()) * 1e9,
            )
            for i in range(self.gpus)
        )
        ranks = tuple(
            RankUse(i, os.getpid(), int((3.1 + r.random() / 10) * GiB), 0.9 + r.random() / 5)
            for i in range(self.ranks)
        )
        host = HostUse(int((402 + r.random()) * GiB), 1007 * GiB, int(390 * GiB), 0.2 + r.random() / 10, GiB)
        sample = Sample(t=self.now, gpus=use, host=host, ranks=ranks, **changes)
        self.peaks.add(sample)
        path = self.run.samples_dir / "1s.jsonl"
        head = ""
        if not path.exists():
            head = json.dumps({"schema_version": samples.SCHEMA_VERSION, "gpus": samples.GPU_COLUMNS}) + "\n"
        with path.open("a") as f:
            f.write(head + json.dumps(sample.to_json()) + "\n")
        store.write_json(self.run.samples_dir / "peaks.json", self.peaks.to_json())

    def tick(self, seconds: float = 1.0, steps: int = 1) -> None:
        self.now += seconds
        self.sample()
        for _n in range(steps):
            self.step += 1
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.now))
            lr = 3e-4 * min(1.0, self.step / 50)
            loss = 2.0 + 8.0 * math.exp(-self.step / 60) + self._random.random() / 10
            self.log(
                f"[{stamp},123] [INFO] [logging.py:123:log_dist] [Rank 0] step={self.step}, skipped=0, "
                f"lr=[{lr}], mom=[(0.9, 0.999)]",
                f"step {self.step} loss {loss:.4f} lr {lr:.3g} tokens/s {24000 + self._random.random() * 900:.0f}",
            )

    def end(self, outcome: str = "finished", **fields: Any) -> None:
        """Write ``exit.json`` as the supervisor does."""
        store.write_json(
            self.run.exit_path,
            {"schema_version": 1, "outcome": outcome, "ended_at": self.now, "code": 0, **fields},
        )


OOM = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/ann/train.py", line 88, in <module>
[rank3]:     engine.step()
[rank3]:   File "/opt/venv/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line 2400, in step
[rank3]:     self._take_model_step(lr_kwargs)
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of \
139.80 GiB of which 1.20 GiB is free. Process 4711 has 138.60 GiB memory in use. Of the allocated memory \
130.10 GiB is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch but unallocated."""
