"""What samples look like in each stall, GPUs included; the CPU ones are provoked for real in tests/real."""

from __future__ import annotations

from typing import Any

import pytest

from dstui.runs import stall
from dstui.runs.causes import BY_CODE
from dstui.runs.samples import GpuUse, RankUse, Sample
from dstui.runs.stall import Stall

NOW, SINCE = 1_000_000.0, 999_900.0
SPIN = {"utilisation": 1.0, "power": 120.0, "power_limit": 700.0}
IDLE = {"utilisation": 0.0, "power": 75.0, "power_limit": 700.0}
WORK = {"utilisation": 0.99, "power": 600.0, "power_limit": 700.0}


def window(
    *ranks: tuple[float, float, str | None], gpus: tuple[dict[str, float], ...] = (), **more: Any
) -> list[Sample]:
    """20 s of the same; a rank is (own cores, helpers' cores, wait)."""
    return [
        Sample(
            NOW - 20 + i,
            gpus=tuple(GpuUse(n, **g) for n, g in enumerate(gpus)),
            ranks=tuple(RankUse(n, 100 + n, 1, own + helped, helped, wait) for n, (own, helped, wait) in enumerate(ranks)),
            **more,
        )
        for i in range(20)
    ]  # fmt: skip


def named(samples: list[Sample], **more: Any) -> Stall | None:
    return stall.name(samples, NOW, SINCE, **more)


ASLEEP, WAITS, POLLS, RUNS = (0.0, 0.0, "sleep"), (0.01, 0.0, "lock"), (0.0, 0.0, "poll"), (1.0, 0.0, "run")


@pytest.mark.parametrize(
    ("samples", "kind", "ranks", "how"),
    [
        (window(ASLEEP, WAITS), "collective", (0,), "sleep"),
        (window(WAITS, WAITS, POLLS), "data-loader", (2,), "poll"),
        (window(WAITS, (0.0, 0.9, "poll")), "data-loader", (1,), "helpers"),
        (window(WAITS, RUNS), "collective", (1,), "run"),
        (window(WAITS, WAITS), "collective", (), ""),
        (window(RUNS, ASLEEP), "collective", (1,), "sleep"),  # shared memory is waited for spinning
        (window(ASLEEP, ASLEEP), "data-loader", (0, 1), "sleep"),
        (window((0.0, 0.0, "disk"), WAITS), "data-loader", (0,), "disk"),
        (window((0.0, 0.0, None), (0.0, 0.0, None)), "idle", (), ""),
        # GPUs
        (window(RUNS, RUNS, gpus=(SPIN, SPIN)), "collective", (), ""),
        (window(RUNS, ASLEEP, gpus=(SPIN, IDLE)), "collective", (1,), "sleep"),
        (window(RUNS, (1.0, 0.0, "run"), gpus=(SPIN, IDLE)), "collective", (1,), "run"),
        (window(RUNS, POLLS, gpus=(SPIN, IDLE)), "data-loader", (1,), "poll"),
        (window((0.0, 1.5, "poll"), (0.0, 1.5, "poll"), gpus=(IDLE, IDLE)), "data-loader", (0, 1), "helpers"),
        (window(POLLS, POLLS, gpus=(IDLE, IDLE)), "data-loader", (0, 1), "poll"),
        (window(RUNS, RUNS, gpus=(IDLE, IDLE)), "data-loader", (0, 1), "run"),
        # by nature
        (window(ASLEEP, WAITS, build="cpu_adam"), "op-build", (), ""),
        (window(ASLEEP, WAITS, saving="/x/global_step5/model.pt"), "checkpoint", (), ""),
    ],
)
def test_named(samples: list[Sample], kind: str, ranks: tuple[int, ...], how: str) -> None:
    found = named(samples)
    assert found is not None
    assert (found.kind, found.ranks, found.how) == (kind, ranks, how)
    assert found.code in BY_CODE and found.text and "{" not in found.text


def test_offload_needs_a_config_that_offloads() -> None:
    busy = window((8.0, 0.0, "run"), (8.0, 0.0, "run"), gpus=(IDLE, IDLE))
    found = named(busy, offload=True)
    assert found is not None and (found.kind, found.ranks) == ("offload", (0, 1))
    other = named(busy)
    assert other is not None and other.kind == "data-loader"


@pytest.mark.parametrize(
    "samples",
    [
        window(RUNS, RUNS),
        window((0.4, 0.0, "lock"), (0.4, 0.0, "run")),
        window(RUNS, RUNS, gpus=(WORK, WORK)),
        window(RUNS, RUNS, gpus=({**SPIN, "utilisation": 0.5}, {**SPIN, "utilisation": 0.6})),
        window(ASLEEP, WAITS)[:5],
        [],
    ],
)
def test_work_is_no_stall(samples: list[Sample]) -> None:
    assert named(samples) is None


def test_a_lock() -> None:
    lock = ("cpu_adam", "/ext/cpu_adam/lock", None)
    found = stall.on_lock(window(ASLEEP, ASLEEP, lock=lock), NOW)
    assert found is not None and (found.kind, found.code, found.ranks) == ("op-lock", "DR708", (0, 1))
    assert "rm /ext/cpu_adam/lock" in found.text
    held = stall.on_lock(window(ASLEEP, WAITS, lock=("cpu_adam", "/ext/cpu_adam/lock", 77)), NOW)
    assert held is not None and (held.kind, held.ranks) == ("op-build", (0,)) and "77" in held.text
    assert stall.on_lock(window(RUNS, WAITS, lock=lock), NOW) is None  # nobody waits for it
    assert stall.on_lock(window(ASLEEP, ASLEEP), NOW) is None
    gone = [*window(ASLEEP, ASLEEP, lock=lock)[:-1], window(ASLEEP, ASLEEP)[-1]]
    assert stall.on_lock(gone, NOW) is None


def test_a_checkpoint_that_was_just_begun_is_one() -> None:
    """Open files are looked at every 5 s: the samples before cannot tell, and the ranks wait for the writer."""
    samples = window(ASLEEP, WAITS)
    late = [*samples[:14], *window(ASLEEP, WAITS, saving="/x/global_step5/model.pt")[14:]]
    found = stall.name(late, NOW, samples[8].t)
    assert found is not None and (found.kind, found.path) == ("checkpoint", "/x/global_step5/model.pt")
    over = [*late[:18], *samples[18:]]
    found = stall.name(over, NOW, samples[8].t)
    assert found is not None and found.kind == "collective", "it was closed, and they still wait"


def test_ranks_on_other_nodes_may_be_those_that_are_waited_for() -> None:
    here = window(WAITS, WAITS)
    found = named(here, world=4)
    assert found is not None and (found.kind, found.how) == ("collective", "elsewhere")
    assert "other nodes are not sampled" in found.text
    alone = named(here, world=2)
    assert alone is not None and "same one" in alone.text
