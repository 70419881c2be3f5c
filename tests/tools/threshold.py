"""The memory at which a training step really runs out, found inside one process.

    python tests/tools/threshold.py NAME [NAME ...] --out FOLDER     those cases, one after another

``torch.cuda.set_per_process_memory_fraction`` caps what PyTorch *reserves*. Before the allocator fails it gives
its free cached blocks back, so the threshold lies between the peak of allocated and that of reserved memory.
The cap comes down in equal steps, each with an emptied cache and one whole training step, until a step fails:
the threshold is in (``fails``, ``works``]. One failure ends the search, because the engine does not survive it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 30
SECONDS = 30.0


def descend(
    step: Callable[[], Any], allocated: int, out: dict[str, Any], save: Callable[[], None] = lambda: None
) -> None:
    """Fill ``out`` (bytes), calling ``save`` after each cap.

    ``allocated``: peak of a step without a cap. ``natural`` is the peak that is reserved without a cap after
    the cache was emptied, ``rest`` what stays reserved between steps then, ``works`` the lowest cap with which
    ``step`` ran, ``fails`` the first with which it did not (None: the time was over first).
    """
    import gc

    import torch
    import torch.distributed as dist

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def peak(cap: int) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_reserved())

    def same(value: int) -> int:
        """The largest over the ranks: they must come down together."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return value
        shared = torch.tensor([value], device="cuda", dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared.item())

    begin = time.time()
    natural = same(peak(total))
    allocated = same(allocated)
    torch.cuda.empty_cache()
    rest = int(torch.cuda.memory_reserved())
    pace = max((natural - round(allocated * 0.97)) // STEPS, allocated // 250, 1 << 21)
    out.update(natural=natural, rest=rest, allocated=allocated, pace=pace, works=natural, fails=None, caps=0)
    cap = natural
    while cap > pace:
        # every rank must leave the loop in the same round
        if same(int(time.time() - begin)) > SECONDS:
            break
        cap -= pace
        try:
            peak(cap)
        except torch.cuda.OutOfMemoryError as e:
            out["fails"], out["message"] = cap, str(e)[:300]
            break
        out["works"], out["caps"] = cap, out["caps"] + 1
        save()
    out["seconds"] = round(time.time() - begin, 1)
    save()


def main() -> int:
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here))
    import argparse
    import json
    import tempfile

    import cases

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    known = {c["name"]: c for c in cases.ONE + cases.TWO}
    chosen = [{**known[n], "threshold": True} for n in options.names]
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as f:
        json.dump(chosen, f)
    words = ["--cases", f.name, "--out", options.out, "--jobs", "1"]
    return subprocess.call([sys.executable, str(here / "measure_grid.py"), *words])


if __name__ == "__main__":
    sys.exit(main())
