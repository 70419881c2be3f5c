"""When to look for a stall: the supervisor's cheap ear.

A step leaves a trace that costs nothing to see: csv_monitor's files grow, or else ``out.log`` does; the sampler
knows both sizes every second. Only when neither grew for far longer than usual, a full look is taken: the one that
``dstui watch`` takes when it joins (``dstui.runs.view``), with its evidence and its caution. A run that writes nothing
for long is looked at ever more rarely.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from dstui.runs import state
from dstui.runs.ops import offload_device
from dstui.runs.samples import Sample, read_samples
from dstui.runs.stall import Stall
from dstui.runs.store import RunDir

AGAIN = 1.5
"""The next look comes when the silence has become that many times as long."""
RARELY = 300.0
"""But no later than that many seconds after the last."""
SAMPLES = 180
"""Seconds of samples that a look may need (``dstui.runs.stall``)."""
STEPS = 3
"""Growths of csv_monitor's files from which on only these count: a log may be written to by a run that hangs."""


def full_look(run: RunDir, heard: float, gaps: Sequence[float]) -> Stall | None:
    """What a view that joins now would say, with the pace that was heard. ``heard``: epoch seconds of the last sign."""
    from dstui.runs.view import RunView

    view = RunView(run)
    try:
        view.poll()
    finally:
        view.close()
    progress = view.progress
    if progress.stepped:
        progress.reported_at = heard
        progress.gaps.extend(gaps)
    config = state.read_config(run.config_path) or {}
    offload = any(offload_device(config, w) != "none" for w in ("offload_optimizer", "offload_param"))
    return progress.stall(time.time(), read_samples(run.samples_dir, SAMPLES), offload=offload)


class Ear:
    """``hear`` each sample; ``stall`` is what the run waits for, None while it goes on."""

    def __init__(
        self,
        run: RunDir,
        look: Callable[[RunDir, float, Sequence[float]], Stall | None] = full_look,
    ) -> None:
        self._run = run
        self._look = look
        self._sizes: tuple[int, int] | None = None
        self._steps = 0
        self._heard: float | None = None
        self._gaps: deque[float] = deque(maxlen=state.RECENT)
        self._next = 0.0
        self.looks = 0
        self.stall: Stall | None = None

    def hear(self, sample: Sample) -> bool:
        """Whether ``stall`` is another than before."""
        if self._grew(sample):
            if self._heard is not None:
                self._gaps.append(sample.t - self._heard)
            self._heard = sample.t
            self._next = self._patience
            changed, self.stall = self.stall is not None, None
            return changed
        if self._heard is None:
            self._heard, self._next = sample.t, self._patience
        quiet = sample.t - self._heard
        if self.stall is not None or quiet < self._next:
            return False
        self._next = min(quiet * AGAIN, quiet + RARELY)
        self.looks += 1
        self.stall = self._look(self._run, self._heard, tuple(self._gaps))
        return self.stall is not None

    @property
    def _patience(self) -> float:
        usual = sorted(self._gaps)[len(self._gaps) // 2] if self._gaps else 0.0
        return max(state.NAMED_SECONDS, state.STALL_INTERVALS * usual)

    def _grew(self, sample: Sample) -> bool:
        before, self._sizes = self._sizes, sample.sizes
        if before is None or sample.sizes is None:
            return False
        log, steps = (now > then for now, then in zip(sample.sizes, before, strict=True))
        self._steps += steps
        return steps if self._steps >= STEPS else log or steps
