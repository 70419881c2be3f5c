"""Alerts: each from its own evidence, steady at the border, none on a healthy run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest

from dstui.runs.alerts import CLIMB_SECONDS, KINDS, Alert, AlertBook, Disk, Moment, slower
from dstui.runs.events import Parser
from dstui.runs.samples import GpuUse, HostUse, RankUse, Sample
from dstui.runs.stall import Stall
from dstui.runs.state import Pace, Progress
from dstui.runs.tail import Line, split
from dstui.units import GiB

ROOT = Path(__file__).resolve().parents[2]
LOGS = sorted((ROOT / "tests/data/logs").glob("*.log"))
SICK = {"nan.log": {"loss-not-finite"}}
"""What the recorded logs of tests/data/logs are known to have; all others have nothing."""


class Feed:
    """A log fed line by line, with the alerts after each."""

    def __init__(self, start: float = 1000.0) -> None:
        self.progress = Progress()
        self.book = AlertBook()
        self.parser = Parser()
        self.now = start
        self.samples: list[Sample] = []
        self.disks: tuple[Disk, ...] = ()

    def say(self, *lines: str, seconds: float = 1.0) -> dict[str, Alert]:
        found: dict[str, Alert] = {}
        for text in lines:
            self.now += seconds
            self.progress.apply_all(self.parser.feed_all([Line(0, text)]), self.now)
            found = self.look()
        return found

    def look(self, **more: object) -> dict[str, Alert]:
        moment = Moment(self.now, self.progress, self.samples, disks=self.disks, **more)  # type: ignore[arg-type]
        return {a.kind: a for a in self.book.look(moment)}

    def sample(
        self, gpus: Iterable[tuple[float, str]] = (), rss: Iterable[float] = (), seconds: float = 1.0
    ) -> dict[str, Alert]:
        """``gpus``: (GiB used, throttle reasons) of 80 GiB cards; ``rss``: GiB a rank on a host of 100 GiB."""
        self.now += seconds
        use = tuple(
            GpuUse(i, 0.9, int(used * GiB), 80 * GiB, temperature=91.0, throttle=reasons)
            for i, (used, reasons) in enumerate(gpus)
        )
        sizes = tuple(rss) or tuple(1.0 for _g in use)
        ranks = tuple(RankUse(i, 100 + i, int(x * GiB), 1.0) for i, x in enumerate(sizes))
        host = HostUse(used=50 * GiB, capacity=100 * GiB)
        self.samples.append(Sample(self.now, use, host, ranks))
        return self.look()


def healthy(step: int, loss: float = 2.0, norm: float = 1.0) -> str:
    return f"{{'loss': '{loss}', 'grad_norm': '{norm}', 'learning_rate': '1e-05', 'epoch': '{step / 100}'}}"


# ---- numbers


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.name)
def test_recorded_logs_have_the_alerts_that_they_are_known_for(path: Path) -> None:
    feed = Feed()
    seen: set[str] = set()
    for line in split(path.read_bytes(), 0, final=True)[0]:
        seen |= set(feed.say(line.text))
    assert seen == SICK.get(path.name, set())


def test_healthy_logs_of_the_truth_have_none() -> None:
    logs = sorted((ROOT.parent / "shared/truth/logs").glob("*.log"))
    if not logs:
        pytest.skip("no recorded logs beside the repository")
    for path in logs:
        feed = Feed()
        for line in split(path.read_bytes(), 0, final=True)[0]:
            assert feed.say(line.text) == {}, path.name


def test_nan_is_said_at_once_and_goes_after_five_finite_reports() -> None:
    feed = Feed()
    assert feed.say(*[f"step {n} loss 2.{n}" for n in range(5)]) == {}
    first = feed.say("step 5 loss nan")["loss-not-finite"]
    assert (first.level, first.step) == ("warn", 5)
    alert = feed.say("step 6 loss nan")["loss-not-finite"]
    assert (alert.level, alert.step, alert.since, alert.cause) == ("bad", 5, first.since, "DR601")
    assert alert.text == "the loss is NaN since step 5 (2 reports)"
    for n in range(7, 11):
        assert "finite again" in feed.say(f"step {n} loss 2.0")["loss-not-finite"].text
    assert feed.say("step 11 loss 2.0") == {}


def test_infinite_loss_is_named_so() -> None:
    feed = Feed()
    assert "the loss is infinite" in feed.say("step 5 loss inf")["loss-not-finite"].text


def test_loss_of_exactly_zero_needs_three_and_no_descent() -> None:
    feed = Feed()
    assert feed.say(healthy(1, 2.5), healthy(2, 0.0), healthy(3, 0.0)) == {}
    alert = feed.say(healthy(4, 0.0))["loss-zero"]
    assert alert.level == "bad" and "exactly 0" in alert.text
    feed = Feed()  # sank until four digits show nothing of it
    assert (
        feed.say(*[f"step {n} loss {x}" for n, x in enumerate((1.0, 0.1, 0.0012, 0.0, 0.0, 0.0, 0.0))]) == {}
    )


def test_gradient_norms_of_zero_and_nan() -> None:
    feed = Feed()
    assert feed.say(healthy(1), healthy(2, norm=0.0), healthy(3, norm=0.0)) == {}
    assert set(feed.say(healthy(4, norm=0.0))) == {"grad-zero"}
    assert feed.say(*[healthy(n) for n in range(5, 10)]) == {}
    assert feed.say(healthy(10, norm=math.nan), healthy(11, norm=math.nan)) == {}
    assert feed.say(healthy(12, norm=math.nan))["grad-not-finite"].level == "bad"


def overflow(old: float, new: float) -> str:
    return f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {old}, reducing to {new}"


def test_search_for_the_first_loss_scale_is_no_alert_but_its_floor_is() -> None:
    feed = Feed()
    for n in range(16):  # 2**32 to 2**16
        assert feed.say(overflow(2.0 ** (32 - n), 2.0 ** (31 - n)), f"step {n} loss 10.1") == {}
    for n in range(16, 60):
        assert feed.say(f"step {n} loss 9.1") == {}
    found = feed.say(
        "[deepspeed] OVERFLOW! Current loss scale already at minimum - cannot decrease scale anymore."
    )
    assert found["scale-floor"].level == "bad"


def test_overflow_in_every_step() -> None:
    feed = Feed()
    for n in range(17):
        found = feed.say(overflow(8, 8), f"step {n} loss 10.1")
    assert set(found) == {"overflows"}
    assert "17 overflows in a row" in found["overflows"].text


def test_many_skipped_steps() -> None:
    feed = Feed()
    line = "[2026-11-29 19:40:56,117] [INFO] [x.py:1:f] [Rank 0] step={}, skipped={}, lr=[0.1], mom=[0.9]"
    assert feed.say(line.format(90, 30)) == {}
    assert "30 of 120 steps" in feed.say(line.format(120, 30))["overflows"].text


# ---- pace


def paces(values: Iterable[float]) -> Progress:
    p = Progress()
    at = 0.0
    for n, seconds in enumerate(values, 1):
        at += seconds
        p.paces.append(Pace(n, seconds, at))
    return p


def test_steps_that_became_slower_and_stay_so() -> None:
    usual = [0.5 + 0.02 * (n % 3) for n in range(60)]
    assert slower(paces(usual), False) is None
    assert slower(paces([*usual, 6.0, *usual[:7]]), False) is None, "a checkpoint is one outlier"
    assert slower(paces([*usual, *[0.6] * 8]), False) is None
    alert = slower(paces([*usual, *[1.1] * 8]), False)
    assert alert is not None and alert.step == 61
    assert alert.text == "steps take 1.1 s instead of 0.52 s since step 61 (2.1 times as long)"
    border = paces([*usual, *[1.1] * 8, *[0.75] * 8])
    assert slower(border, False) is None and slower(border, True) is not None, (
        "it enters late and leaves late"
    )
    assert slower(paces([*usual, *[1.1] * 8, *[0.52] * 8]), True) is None


def test_a_line_every_ten_steps_tells_it_as_well() -> None:
    """Each reading is the mean of ten steps: four of them say as much as eight single ones."""

    def run(*seconds: float) -> Progress:
        p = Progress()
        p.paces.extend(Pace(10 * n, s, 1000.0 + n) for n, s in enumerate(seconds, 1))
        return p

    usual = [0.5, 0.52, 0.48, 0.5, 0.51] * 4
    assert slower(run(*usual), False) is None
    assert slower(run(*usual[:10], *[1.5] * 3), False) is None
    found = slower(run(*usual[:10], *[1.5] * 4), False)
    assert found is not None and found.step == 110 and found.values["factor"] == 3.0
    assert slower(run(*usual, 9.0, 0.5, 9.0, 0.5), False) is None, "two checkpoints"


def test_a_run_that_is_joined_late_tells_the_same() -> None:
    usual = [0.5 + 0.02 * (n % 3) for n in range(40)]
    for late in (8, 30, 60, 150):
        found = slower(paces([*usual, *[1.1 + 0.01 * (n % 2) for n in range(late)]]), False)
        assert found is not None and found.step == 41 and found.values["usual"] == 0.52, late


def test_slow_stretches_that_come_and_go_are_how_a_run_goes() -> None:
    cycle = [0.5] * 30 + [1.2] * 12
    values = cycle * 5
    said = [end for end in range(40, len(values)) if slower(paces(values[:end]), False) is not None]
    assert said and max(said) <= 2 * len(cycle), "news the first time, not after that"


def test_steps_of_one_time_stamp_are_no_pace() -> None:
    """A log whose clock stands still, or was set back, gives intervals of nothing."""
    assert slower(paces([0.0] * 60 + [1.1] * 8), False) is None
    assert slower(paces([0.0] * 80), True) is None


def test_noisy_steps_are_no_change_of_pace() -> None:
    noisy = [0.2 + 0.25 * ((n * 7919) % 13) / 13 for n in range(240)]
    for end in range(40, 240, 5):
        assert slower(paces(noisy[:end]), False) is None, end


# ---- machine


def test_throttling_by_heat_is_said_and_a_power_cap_is_not() -> None:
    feed = Feed()
    for _n in range(40):
        assert feed.sample([(60, "power-cap"), (60, "")]) == {}
    for n in range(40):
        found = feed.sample([(60, "power-cap"), (60, "sw-thermal" if n % 10 else "")])
    assert found["throttling"].text == "GPU 1 slowed down: SW thermal slowdown, 91 C"
    assert found["throttling"].level == "warn"
    for n in range(60):  # comes and goes at the border: it stays said
        assert "throttling" in feed.sample([(60, ""), (60, "sw-thermal" if n % 3 == 0 else "")]), n
    for _n in range(40):
        found = feed.sample([(60, ""), (60, "")])
    assert found == {}


def test_cards_that_are_slowed_for_different_reasons_are_told_apart() -> None:
    feed = Feed()
    for _n in range(40):
        found = feed.sample([(60, "hw-thermal"), (60, ""), (60, "power-brake,power-cap"), (60, "hw-thermal")])
    assert found["throttling"].text == (
        "GPUs 0, 3 slowed down: HW thermal slowdown, 91 C; GPU 2 slowed down: HW power brake slowdown, 91 C"
    )
    assert found["throttling"].level == "bad" and "power supply" in found["throttling"].advice


def climbing(
    feed: Feed, seconds: int, gpu: tuple[float, float], rss: tuple[float, float]
) -> dict[str, Alert]:
    found: dict[str, Alert] = {}
    for n in range(seconds):
        share = n / seconds
        gpus = [(gpu[0] + (gpu[1] - gpu[0]) * share, ""), (gpu[0], "")]
        found = feed.sample(gpus, [rss[0] + (rss[1] - rss[0]) * share, rss[0]])
    return found


def test_memory_that_climbs_until_it_is_full() -> None:
    feed = Feed()
    feed.say("step 1 loss 2.0")
    assert climbing(feed, 400, (40, 40), (3, 3)) == {}
    found = climbing(feed, int(CLIMB_SECONDS) + 5, (40, 46), (3, 10))
    assert set(found) == {"gpu-memory-climbs", "host-memory-climbs"}
    assert "memory of GPU 0 climbs" in found["gpu-memory-climbs"].text
    assert found["host-memory-climbs"].checkpoint == 4
    gone = feed.sample([(0, ""), (0, "")], rss=[0.0, 0.0])
    for _n in range(5):
        gone = feed.sample([(0, ""), (0, "")], rss=[0.0, 0.0])
    assert "13.0 of 100.0 GiB" in gone["host-memory-climbs"].text, "the ranks of a run that ends are gone"
    assert climbing(feed, 400, (46, 46), (10, 10)) == {}


def test_memory_that_jumps_to_a_plateau_does_not_climb() -> None:
    feed = Feed()
    feed.say("step 1 loss 2.0")
    for used in (40, 52, 52, 52, 61, 61, 61):
        assert climbing(feed, 60, (used, used), (3, 3)).keys() <= {"uneven-memory"}


def test_uneven_cards_of_one_run() -> None:
    feed = Feed()
    for _n in range(40):
        assert feed.sample([(70, ""), (20, "")]) == {}, "before the first step nothing is uneven"
    feed.say("step 1 loss 2.0")
    for _n in range(40):
        found = feed.sample([(70, ""), (20, "")])
    assert found["uneven-memory"].text == "memory is uneven: GPU 0 70.0 GiB, GPU 1 20.0 GiB"
    for _n in range(40):
        found = feed.sample([(70, ""), (56, "")])
    assert set(found) == {"uneven-memory"}, "20 % less is enough to stay, not to enter"
    for _n in range(40):
        found = feed.sample([(70, ""), (64, "")])
    assert found == {}
    for _n in range(40):
        assert feed.sample([(70, ""), (0, "")], rss=[3.0]) == {}, "a card that no rank of this run uses"


def test_disk_nearly_full_leaves_later_than_it_enters() -> None:
    feed = Feed()

    def look(free: float) -> dict[str, Alert]:
        feed.now += 30
        feed.disks = (Disk("/scratch", int(free * GiB), 500 * GiB),)
        return feed.look()

    assert look(30) == {} and look(5) == {}
    assert look(3.5)["disk-full"].level == "warn"
    assert look(5)["disk-full"].text == "5.0 GiB left at /scratch"
    assert look(0.5)["disk-full"].level == "bad"
    assert look(7) == {}


def test_stall_is_an_alert_with_its_reason() -> None:
    feed = Feed()
    stall = Stall("collective", "DR506", 900.0, (1,), how="sleep")
    alert = feed.look(stall=stall)["stall"]
    assert (alert.level, alert.since, alert.cause) == ("bad", 900.0, "DR506")
    assert "rank 1" in alert.text
    assert feed.look() == {}


def test_worst_first_and_every_kind_has_its_sentence() -> None:
    feed = Feed()
    feed.say("step 1 loss 2.0", "step 2 loss nan", "step 3 loss nan")
    feed.disks = (Disk("/", 2 * GiB, 500 * GiB),)
    feed.now += 10
    assert list(feed.look()) == ["loss-not-finite", "disk-full"]
    from dstui.runs.alerts import _ADVICE, _TEXTS

    assert set(_TEXTS) == set(_ADVICE) == set(KINDS)


def test_ended_run_keeps_what_still_matters() -> None:
    feed = Feed()
    feed.say("step 1 loss 2.0", "step 2 loss nan", "step 3 loss nan")
    for _n in range(40):
        found = feed.sample([(70, "hw-thermal"), (20, "")])
    assert set(found) == {"loss-not-finite", "throttling", "uneven-memory"}
    assert set(feed.look(over=True)) == {"loss-not-finite", "uneven-memory"}


def test_cost_of_a_look_is_bounded() -> None:
    """Long windows are looked at every five seconds of the run, whatever the number of polls."""
    feed = Feed()
    feed.say("step 1 loss 2.0")
    for _n in range(600):
        feed.sample([(40, "")] * 8)
    touched = 0

    class Counting(list[Sample]):
        def __reversed__(self):  # type: ignore[no-untyped-def]
            nonlocal touched
            for s in super().__reversed__():
                touched += 1
                yield s

    feed.samples = Counting(feed.samples)
    for _n in range(100):
        feed.now += 0.1
        feed.look()
    assert touched <= 3 * (CLIMB_SECONDS + 2 * 31)
