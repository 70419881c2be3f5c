"""The monitor's overview as lines: pure functions of a ``Snapshot``, a size and the clock.

What changes every second stands at the left of its row and what rarely changes at the right, because a row is
repainted up to its last difference (``lines.changed_until``). One style a row for the same reason.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from dstui.i18n import N_, _, ngettext
from dstui.runs.causes import BY_CODE
from dstui.runs.nodes import elsewhere_text
from dstui.runs.state import Phase
from dstui.runs.view import Comparison, Curve, GpuRow, RankRow, Snapshot
from dstui.tui.terminal import Glyphs
from dstui.tui.text import BLANK, Line, Span, clip, clip_line, columns, line, line_width, pad, width, wrapped
from dstui.tui.widgets.health import CHECKPOINT_NAMES, alert_rows, lamp_row
from dstui.tui.widgets.spark import chart, spark
from dstui.units import GiB, duration, gib

STATES: dict[str, tuple[str, str, str]] = {
    "starting": ("S", N_("starting"), "accent"),
    "running": ("R", N_("running"), "good"),
    "stalled": ("W", N_("stalled"), "warn"),
    "finished": ("D", N_("finished"), "good"),
    "failed": ("F", N_("failed"), "bad"),
    "stopped": ("X", N_("stopped"), "warn"),
    "lost": ("L", N_("lost"), "bad"),
}
"""State -> (letter, word, role): no state is told by its colour alone."""
PHASES: tuple[tuple[str, str], ...] = (
    ("preflight", N_("preflight")),
    ("launch", N_("launch")),
    ("loading", N_("loading")),
    ("building", N_("building ops")),
    ("first-step", N_("first step")),
)
PHASE_NOTES: dict[str, str] = {
    "preflight": N_("checking the script, the config, ports and memory before anything is started"),
    "launch": N_("the launcher starts one process a rank"),
    "loading": N_("the ranks import torch and build the model; a large one takes minutes"),
    "building": N_(
        "30-80 s of silence are normal the first time; later runs find the built ops in the cache"
    ),
    "first-step": N_("the first step is slow: memory is reserved, kernels are tuned, pages are pinned"),
}
COMPARED: dict[str, str] = {
    "allocated": N_("allocated"),
    "reserved": N_("reserved"),
    "device": N_("device"),
    "host": N_("host"),
}
IDLE_CORES, IDLE_SECONDS = 0.05, 60.0
"""Before step 1: ranks that all use less than this, for longer than this, are said to wait."""
LEAST_BAR = 14
"""Cells of a card's bar that further columns leave it."""
LOG_ROWS = 1
"""Rows of the log's tail that the overview keeps free when it is full."""


def state_word(state: str) -> tuple[str, str, str]:
    """(letter, translated word, role)."""
    letter, word, role = STATES.get(state, ("?", state, "dim"))
    return letter, _(word), role


def overview(
    shot: Snapshot, cells: int, height: int, g: Glyphs, now: float, idle_for: float = 0.0
) -> list[Line]:
    """The whole overview in at most ``height`` rows of ``cells`` cells. ``idle_for``: see ``phase_rows``."""
    blocks: list[tuple[str, list[Line]]] = [("", _status(shot, cells, g, now))]
    # a stall is said by the status itself
    alerts = alert_rows([a for a in shot.alerts if a.kind != "stall"], cells, g)
    if alerts:
        blocks.append(("", alerts))
    if shot.over:
        blocks.append(("", ending_rows(shot, cells, g)))
    elif shot.phase is not None:
        blocks.append(("", phase_rows(shot.phase, cells, g, now, idle_for)))
    if shot.lamps and not shot.over:
        blocks.append(("", [lamp_row(shot.lamps, g)]))
    metrics = _metrics(shot, cells, g)
    if metrics:
        blocks.append((_("training"), metrics))
    fixed = sum(len(rows) for _t, rows in blocks) + LOG_ROWS
    plan = plan_rows(shot.comparisons, cells, g, measured_only=True, so_far=before_peak(shot))
    memory = _host_rows(shot, cells, g)
    room = height - fixed - len(plan) - len(memory)
    if shot.gpus:
        blocks.append((_("GPUs"), gpu_rows(shot.gpus, cells, max(2, room), g, over=shot.over)))
    elif shot.ranks:
        blocks.append((_("ranks"), rank_rows(shot.ranks, cells, max(1, room), g)))
    if memory:
        blocks.append((_("host"), memory))
    if plan:
        blocks.append((_("predicted and measured"), plan))
    return _fill(blocks, shot, cells, height, g)


def _fill(
    blocks: list[tuple[str, list[Line]]], shot: Snapshot, cells: int, height: int, g: Glyphs
) -> list[Line]:
    """Spend what is left of ``height``: titles between the blocks, then a chart, then the log."""
    used = sum(len(rows) for _t, rows in blocks)
    titled = used + 2 * len(blocks) + LOG_ROWS + 1 <= height
    spare = height - used - (2 * len(blocks) if titled else 0) - LOG_ROWS - 1
    if titled and spare >= 9 and len(shot.losses) > 2:
        rows = loss_chart(shot.losses, cells, min(10, spare - 4), g)
        place = next((n for n, (title, _r) in enumerate(blocks) if title == _("training")), 0)
        blocks.insert(place + 1, (_("loss"), rows))
    out: list[Line] = []
    for title, rows in blocks:
        if titled and title:
            out += [BLANK, rule(title, cells, g)]
        elif titled and out:
            out.append(BLANK)
        out += rows
    left = height - len(out)
    if left > 1 and titled:
        out += [BLANK, rule(_("log"), cells, g)][-left + 1 :]
        left = height - len(out)
    if left > 0 and shot.log:
        out += log_rows(shot.log[-left:], cells, g)
    return [clip_line(row, cells, g.cut) for row in out[:height]]


def rule(title: str, cells: int, g: Glyphs) -> Line:
    return line((f" {title} ", "title"), (g.hline * max(0, cells - width(title) - 3), "dim"))


# ---- state and progress


def _status(shot: Snapshot, cells: int, g: Glyphs, now: float) -> list[Line]:
    letter, word, role = state_word(shot.state)
    head = line((f" {letter} {word}", role))
    parts: list[str] = []
    if shot.over:
        parts = [p for p in (_step_text(shot), _ran(shot), _ended(shot)) if p]
        rows = [line(*head, "  " + f" {g.dot} ".join(parts))]
    else:
        text = "  " + (_step_text(shot) if shot.phase is None else _waiting_for(shot))
        if shot.phase is None and shot.eta is not None:
            text += "  " + _("{time} to go").format(time=duration(shot.eta))
        since = _("up {time}").format(time=rough(now - (shot.started or shot.created)))
        room = cells - line_width(head) - width(text) - width(since) - 5
        drawn = ""
        if shot.phase is None and shot.total and shot.step is not None and room >= 6:
            full = round(room * min(1.0, shot.step / shot.total))
            drawn = g.full * full + g.empty * (room - full)
        gap = " " * max(2, room + 2 - width(drawn))
        rows = [line(*head, text, "  " + drawn + (gap if not drawn else "  "), (since, "dim"))]
    if shot.state == "stalled":
        quiet = duration(now - shot.quiet_since) if shot.quiet_since else "?"
        text = _("no step for {time} and every rank idle or waiting: d tells what it looks like")
        if shot.stall is not None:
            text = _("no step for {time}: {reason}; d tells more")
        reason = shot.stall.text if shot.stall else ""
        rows += wrapped(text.format(time=quiet, reason=reason), cells - 2, "warn", " ", limit=3, cut=g.cut)
    if not shot.here:
        text = _("it runs on another host: this shows what its files say")
        rows += wrapped(text, cells - 2, "dim", " ", limit=1, cut=g.cut)
    return rows


def rough(seconds: float) -> str:
    """A time that changes rarely: whole minutes after the first one (an idle row costs no byte)."""
    if seconds < 60:
        return _("under 1m")
    if seconds < 3600:
        return f"{int(seconds // 60)}m"
    return duration(seconds // 60 * 60)


def _step_text(shot: Snapshot) -> str:
    if shot.step is None:
        return _("no step yet") if not shot.over else _("before the first step")
    if shot.total:
        share = min(100, 100 * shot.step // shot.total)
        return _("step {n}/{total}  {share} %").format(n=shot.step, total=shot.total, share=share)
    return _("step {n}").format(n=shot.step)


def _waiting_for(shot: Snapshot) -> str:
    if shot.total:
        return _("before step 1 of {total}").format(total=shot.total)
    return _("before step 1")


def _ran(shot: Snapshot) -> str:
    if shot.ended_at is None:
        return ""
    return _("ran {time}").format(time=duration(shot.ended_at - (shot.started or shot.created)))


def _ended(shot: Snapshot) -> str:
    if shot.ended_at is None:
        return ""
    return _("ended {time}").format(time=time.strftime("%Y-%m-%d %H:%M", time.localtime(shot.ended_at)))


def asleep(shot: Snapshot) -> bool:
    """Whether a run before its first step has ranks and none of them computes, nor a compiler for them."""
    return (
        shot.phase is not None
        and shot.phase.name in ("loading", "first-step")
        and bool(shot.ranks)
        and all(r.cpu is not None and r.cpu < IDLE_CORES for r in shot.ranks)
    )


def phase_rows(phase: Phase, cells: int, g: Glyphs, now: float, idle_for: float = 0.0) -> list[Line]:
    """The phases before step 1 in a row, the current one with its clock, and what is normal in it.

    ``idle_for``: seconds for which the ranks were ``asleep``. Ranks that all sleep for long are not normal. What they then most often wait for is ``lock`` in the folder of
    an op: torch waits for it without end, and a build that was killed leaves it there (torch 2.13,
    utils/file_baton.py ``FileBaton.wait``).
    """
    names = [name for name, _t in PHASES]
    at = names.index(phase.name) if phase.name in names else 0
    spans: list[Span | str] = [" "]
    for n, (name, title) in enumerate(PHASES):
        if name == "building" and n != at:
            continue  # shown only while it happens: with a warm cache it never does
        if n < at:
            spans += [(f"{g.done} {_(title)}", "good"), "  "]
        elif n == at:
            detail = f" {phase.detail}" if phase.detail else ""
            text = f"{g.cursor} {_(title)}{detail} {duration(max(0.0, now - phase.since))}"
            spans += [(text, "strong"), "  "]
        else:
            spans += [(f"{g.empty} {_(title)}", "dim"), "  "]
    rows = [line(*spans)]
    if idle_for > IDLE_SECONDS:
        text = _(
            "every rank is idle: they wait for each other, for a disk, or for a `lock` file that a killed build "
            "left in the torch_extensions folder (delete it when no other run builds)"
        )
        return rows + wrapped(text, cells - 4, "warn", "   ", limit=3, cut=g.cut)
    rows += wrapped(_(PHASE_NOTES.get(phase.name, "")), cells - 2, "dim", "   ", limit=2, cut=g.cut)
    return rows


# ---- figures


def _metrics(shot: Snapshot, cells: int, g: Glyphs) -> list[Line]:
    if shot.step is None and shot.loss is None and not shot.losses:
        return []
    half = (cells - 4) // 2
    loss = "?" if shot.loss is None else f"{shot.loss:.4f}"
    rate = "?" if shot.lr is None else f"{shot.lr:.3g}"
    each = "?" if shot.step_time is None else _("{x:.3g} s").format(x=shot.step_time)
    speed = ""
    if shot.tokens_per_second:
        speed = _("{x} tokens/s").format(x=short(shot.tokens_per_second))
    elif shot.samples_per_second:
        speed = _("{x} samples/s").format(x=short(shot.samples_per_second))
    use = shot.utilisation[-1][1] if shot.utilisation and not shot.over else None
    used = "" if shot.over else "?" if use is None else _percent(use)
    on = _("GPU use") if shot.gpus else _("CPU use")
    left = max(width(_("loss")), width(_("lr"))) + 1
    right = max(width(_("step time")), width(on)) + 1

    def cell(name: str, label: int, value: str, size: int, curve: Curve, share: bool = False) -> str:
        head = f"{pad(name, label)}{pad(value, size)} "
        room = half - width(head)
        limits = (0.0, 1.0) if share else (None, None)
        return pad(head + spark([y for _x, y in curve], room, g.levels, *limits), half, g.cut)

    curves = (shot.losses, shot.step_times, shot.lrs, shot.utilisation[-60:])
    size = max(width(loss), width(rate), 8)
    wide = max(width(each) + 1 + width(speed), width(used), 20)
    pair = f"{each} {speed}"
    rows = [
        line(
            " "
            + cell(_("loss"), left, loss, size, curves[0])
            + "  "
            + cell(_("step time"), right, pair, wide, curves[1])
        ),
        line(
            " "
            + cell(_("lr"), left, rate, size, curves[2])
            + "  "
            + cell(on, right, used, wide, curves[3], True)
        ),
    ]
    notes = _notes(shot)
    if notes:
        trouble = bool(shot.overflows or shot.skipped or shot.flushes)
        rows.append(
            line((" " + clip(f" {g.dot} ".join(notes), cells - 2, g.cut), "warn" if trouble else "dim"))
        )
    return rows


def _notes(shot: Snapshot) -> list[str]:
    """What is shown only when a run has it."""
    notes = []
    if shot.skipped:
        notes.append(ngettext("{n} step skipped", "{n} steps skipped", shot.skipped).format(n=shot.skipped))
    if shot.overflows:
        notes.append(ngettext("{n} overflow", "{n} overflows", shot.overflows).format(n=shot.overflows))
    if shot.flushes:
        text = ngettext("{n} allocator flush", "{n} allocator flushes", shot.flushes)
        notes.append(text.format(n=shot.flushes))
    if shot.grad_norm is not None:
        notes.append(_("grad norm {x:.3g}").format(x=shot.grad_norm))
    if shot.loss_scale is not None and shot.loss_scale != 1:
        notes.append(_("loss scale {x:g}").format(x=shot.loss_scale))
    if shot.epoch is not None:
        notes.append(_("epoch {x:.2f}").format(x=shot.epoch))
    names = (
        ("fwd", _("forward")),
        ("bwd", _("backward")),
        ("bwd_allreduce", _("reduce")),
        ("step", _("step")),
    )
    notes += [
        _("{part} {time:.3g} s").format(part=name, time=shot.timers[key])
        for key, name in names
        if shot.timers.get(key)
    ]
    return notes


def loss_chart(curve: Curve, cells: int, rows: int, g: Glyphs) -> list[Line]:
    """The loss of the whole run, ``rows`` cells high, with its highest and lowest value."""
    values = [y for _x, y in curve]
    labels = (f"{max(values):.4g}", f"{min(values):.4g}")
    size = max(width(t) for t in labels)
    drawn = chart(values, cells - size - 5, rows, g.levels)
    out: list[Line] = []
    for n, text in enumerate(drawn):
        label = labels[0] if n == 0 else labels[1] if n == rows - 1 else ""
        out.append(line((f" {label:>{size}} {g.vline} ", "dim"), text))
    first, last = curve[0][0], curve[-1][0]
    foot = _("step {a:g} to {b:g}").format(a=first, b=last)
    out.append(line((" " * (size + 4) + foot, "dim")))
    return out


def short(n: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if n >= size:
            return f"{n / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{n:.0f}" if n >= 100 else f"{n:.3g}"


def _percent(share: float | None) -> str:
    return "? %" if share is None else f"{share * 100:3.0f} %"


def _of(used: int | None, total: int | None) -> str:
    """``79.2/139.8 GiB``."""
    if used is None:
        return "?"
    if total is None or max(used, total) < 0.1 * GiB:
        return gib(used)
    return f"{used / GiB:.1f}/{total / GiB:.1f} GiB"


# ---- devices


def gpu_rows(gpus: Sequence[GpuRow], cells: int, height: int, g: Glyphs, over: bool = False) -> list[Line]:
    """One row a card with a heading; two or more cards a row when ``height`` is too small."""
    if over:
        return _gpu_peaks(gpus, cells, g)
    if len(gpus) <= height - 1 or len(gpus) <= 1:
        memory = max(width(_of(x.memory_used, x.memory_total)) for x in gpus)
        memory = max(memory, width(_("memory")))
        power = max(max(width(_power(x)) for x in gpus), width(_("power")))
        heat = max(4, width(_("temp")))
        use = max(5, width(_("util")))
        head = (
            f" {pad(_('GPU'), 4)}{pad(_('util'), use)}  {pad(_('memory'), memory)}  "
            f"{pad(_('power'), power)}  {pad(_('temp'), heat)}"
        )
        extra = _link_columns(gpus, cells - width(head) - 3 - LEAST_BAR)
        for name, texts in extra:
            head += f"  {pad(name, max(width(name), *map(width, texts)))}"
        rows: list[Line] = [line((head, "dim"))]
        room = cells - width(head) - 3
        for n, x in enumerate(gpus):
            text = (
                f" {x.index:>2}  {pad(_percent(x.utilisation), use)}  "
                f"{pad(_of(x.memory_used, x.memory_total), memory)}  {pad(_power(x), power)}  "
                f"{pad(_heat(x), heat)}"
            )
            for name, texts in extra:
                text += f"  {pad(texts[n], max(width(name), *map(width, texts)))}"
            held = _held(x)
            bar_room = max(0, min(28, room - (width(held) + 2 if held else 0)))
            rows.append(
                line(
                    text,
                    "  " + _bar(x.memory_used, x.memory_total, bar_room, g),
                    ("  " + held if held else "", "warn"),
                )
            )
        return rows
    return packed([_short_gpu(x) for x in gpus], cells, height, g)


def _link_columns(gpus: Sequence[GpuRow], room: int) -> list[tuple[str, list[str]]]:
    """Heading and cells of what the driver tells beyond the usual, as far as it fits into ``room``."""
    offered: list[tuple[str, list[str]]] = []
    if any(x.pcie_rx is not None for x in gpus):
        offered.append((_("PCIe in/out GB/s"), [_ways(x.pcie_rx, x.pcie_tx, 1) for x in gpus]))
    if any(x.nvlink_rx is not None for x in gpus):
        offered.append((_("NVLink in/out GB/s"), [_ways(x.nvlink_rx, x.nvlink_tx, 0) for x in gpus]))
    if any(x.clock_sm is not None for x in gpus):
        offered.append((_("MHz"), ["?" if x.clock_sm is None else f"{x.clock_sm:.0f}" for x in gpus]))
    taken = []
    for name, texts in offered:
        size = 2 + max(width(name), *map(width, texts))
        if size <= room:
            taken.append((name, texts))
            room -= size
    return taken


def _ways(into: float | None, out: float | None, digits: int) -> str:
    if into is None or out is None:
        return "?"
    return f"{into / 1e9:.{digits}f}/{out / 1e9:.{digits}f}"


def _gpu_peaks(gpus: Sequence[GpuRow], cells: int, g: Glyphs) -> list[Line]:
    known = sorted((x.memory_peak, x.index) for x in gpus if x.memory_peak)
    if not known:
        return []
    low, high = known[0], known[-1]
    if len(known) == 1:
        text = _("GPU {n}: at most {size} in use").format(n=high[1], size=gib(high[0]))
    else:
        text = _("GPU memory at most {high} (GPU {n}), least {low} (GPU {m})").format(
            high=gib(high[0]), n=high[1], low=gib(low[0]), m=low[1]
        )
    return [line(" " + clip(text, cells - 2, g.cut))]


def _held(x: GpuRow) -> str:
    """What holds the clocks down, in a few letters; a warning only when it is heat or a fault."""
    return _("hot") if x.throttle and "thermal" in x.throttle else ""


def _power(x: GpuRow) -> str:
    if x.power is None:
        return "?"
    return f"{x.power:3.0f}/{x.power_limit:.0f} W" if x.power_limit else f"{x.power:.0f} W"


def _heat(x: GpuRow) -> str:
    return "?" if x.temperature is None else f"{x.temperature:.0f} C"


def _short_gpu(x: GpuRow) -> str:
    power = "" if x.power is None else f" {x.power:3.0f} W"
    return f"{x.index:>3} {_percent(x.utilisation)} {_of(x.memory_used, x.memory_total)}{power} {_heat(x)}"


def _bar(used: int | None, total: int | None, cells: int, g: Glyphs) -> str:
    if not used or not total or cells < 4:
        return ""
    full = min(cells, round(cells * used / total))
    return g.full * full + g.empty * (cells - full)


def packed(texts: Sequence[str], cells: int, height: int, g: Glyphs) -> list[Line]:
    """Texts in as many columns as fit; what does not fit in ``height`` rows is counted."""
    size = max(width(t) for t in texts) + 2
    across = max(1, (cells - 1) // size)
    count = min(max(1, height), -(-len(texts) // across))
    shown = texts if count * across >= len(texts) else texts[: max(1, count - 1) * across]
    lines_needed = -(-len(shown) // across)
    rows = [
        line(" " + "".join(pad(shown[n], size) for n in range(row, len(shown), lines_needed)).rstrip())
        for row in range(lines_needed)
    ]
    left = len(texts) - len(shown)
    if left:
        rows.append(line(("  " + ngettext("{n} more", "{n} more", left).format(n=left), "dim")))
    return rows


def rank_rows(ranks: Sequence[RankRow], cells: int, height: int, g: Glyphs) -> list[Line]:
    """One row a rank where they fit, else several."""
    texts = columns([_rank_cells(r) for r in ranks])
    if len(texts) > height:
        return packed(texts, cells, height, g)
    return [
        line((" " + clip(t, cells - 2, g.cut), "bad" if r.code else ""))
        for t, r in zip(texts, ranks, strict=True)
    ]


def _rank_cells(r: RankRow) -> list[str]:
    parts = [_("rank {n}").format(n=r.rank)]
    if r.cpu is not None:
        parts.append(_("{x:.2f} cores").format(x=r.cpu))
    if r.rss is not None:
        parts.append(_("RSS {size}").format(size=gib(r.rss, 2)))
    if r.rss_peak:
        parts.append(_("peak {size}").format(size=gib(r.rss_peak, 2)))
    if r.code is not None:
        parts.append(_code_text(r.code))
    elif r.pid is not None:
        parts.append(_("pid {n}").format(n=r.pid))
    return parts


def _code_text(code: int) -> str:
    return _("killed by signal {n}").format(n=-code) if code < 0 else _("exit code {code}").format(code=code)


def _host_rows(shot: Snapshot, cells: int, g: Glyphs) -> list[Line]:
    h = shot.host
    rows: list[Line] = []
    parts = []
    if h.used is not None:
        parts.append(_("host RAM {amount}").format(amount=_of(h.used, h.capacity)))
    if shot.host_peak:
        parts.append(_("peak {size}").format(size=gib(shot.host_peak)))
    if h.used is not None:
        if h.cgroup is not None:
            parts.append(_("cgroup {size}").format(size=gib(h.cgroup)))
        if h.cpu is not None and shot.gpus:
            parts.append(_("CPU {share}").format(share=_percent(h.cpu).strip()))
        if h.shm:
            parts.append(_("shm {size}").format(size=gib(h.shm)))
    elif parts:
        parts[0] = _("host RAM peak {size}").format(size=gib(shot.host_peak))
    while len(parts) > 1 and width("  ".join(parts)) > cells - 2:
        parts.pop()
    if parts:
        text = clip(" " + "  ".join(parts), cells - 1, g.cut)
        drawn = _bar(h.used, h.capacity, min(28, cells - width(text) - 4), g)
        rows.append(line(text, "  " + drawn if drawn else ""))
    if shot.gpus and shot.ranks and not shot.over:
        rows.append(_ranks_summary(shot.ranks, cells, g))
    if shot.elsewhere and not shot.over:
        rows.append(
            line(
                (
                    " " + clip(elsewhere_text(shot.elsewhere, shot.world_size, shot.nodes), cells - 2, g.cut),
                    "dim",
                )
            )
        )
    return rows


def _ranks_summary(ranks: Sequence[RankRow], cells: int, g: Glyphs) -> Line:
    alive = [r for r in ranks if r.pid is not None]
    dead = [r for r in ranks if r.code]
    known = [r.rss for r in alive if r.rss is not None]
    parts = [_("ranks {n} of {all} alive").format(n=len(alive), all=len(ranks))]
    if known:
        low, high = gib(min(known)), gib(max(known))
        parts.append(_("RSS {size}").format(size=low if low == high else f"{low} - {high}"))
    cores = [r.cpu for r in alive if r.cpu is not None]
    if cores:
        parts.append(_("{x:.1f} cores").format(x=sum(cores)))
    parts += [f"{_('rank {n}').format(n=r.rank)} {_code_text(r.code or 0)}" for r in dead[:2]]
    return line((" " + clip("  ".join(parts), cells - 2, g.cut), "bad" if dead else ""))


# ---- prediction


def before_peak(shot: Snapshot) -> bool:
    """Whether memory cannot have been at its peak: the first step is not over, or the run ended before it."""
    if shot.over:
        return shot.step is None and shot.state != "finished"
    return shot.phase is not None


def plan_rows(
    found: Sequence[Comparison],
    cells: int,
    g: Glyphs,
    *,
    measured_only: bool = False,
    so_far: bool = False,
) -> list[Line]:
    """Predicted low - high, measured, difference; one row a figure. ``so_far``: see ``before_peak``."""
    shown = [c for c in found if c.expected is not None and (c.measured is not None or not measured_only)]
    if not shown and measured_only:
        shown = [c for c in found if c.expected is not None and c.what in ("device", "host")]
    table = [_plan_cells(c, so_far) for c in shown]
    sizes = [max(width(t) for t in column) for column in zip(*table, strict=True)] if table else []
    rows = []
    for c, texts in zip(shown, table, strict=True):
        head = " " + "  ".join(pad(t, s) for t, s in zip(texts, sizes, strict=True))
        word, role = plan_word(c, so_far)
        rows.append(line(head, ("  " + word if word else "", role)))
    return rows


def _plan_cells(c: Comparison, so_far: bool) -> tuple[str, str, str, str]:
    span = gib(c.expected)
    if c.low is not None and c.high is not None:
        span += f" ({_bare(c.low)} - {_bare(c.high)})"
    measured = _("not measured") if c.measured is None else _("measured {size}").format(size=gib(c.measured))
    difference = plan_difference(c, so_far)
    name = _(COMPARED.get(c.what, c.what))
    return name, _("predicted {span}").format(span=span), measured, difference


def plan_difference(c: Comparison, so_far: bool) -> str:
    """How far the measured figure is from the expected one; nothing while that can only grow towards it."""
    early = so_far and plan_word(c)[1] != "warn"
    return "" if c.ratio is None or early else f"{100 * c.ratio:+.1f} %"


def plan_word(c: Comparison, so_far: bool = False) -> tuple[str, str]:
    """(word, role) for a measured figure beside its range."""
    if c.measured is None:
        return "", ""
    if c.high is not None and c.measured > c.high:
        return _("higher"), "warn"
    if so_far:
        return _("so far"), "dim"
    if c.low is not None and c.measured < c.low:
        return _("lower"), "accent"
    return _("in range"), "good"


def _bare(n: int) -> str:
    return f"{n / GiB:.1f}" if n >= 0.1 * GiB else f"{n / GiB:.2f}"


# ---- the end


def checkpoint_row(failed: int | None, cells: int, g: Glyphs) -> Line:
    """``1 stage  2 offload  3 accum  4 host  5 comm`` with the failed one marked by a sign and reversed."""
    spans: list[Span | str] = [" "]
    for n, name in enumerate(CHECKPOINT_NAMES, 1):
        text = f" {n} {_(name)} "
        spans.append((f" {g.problem}{text}", "cursor") if n == failed else ("  " + text, "dim"))
    if failed is None:
        spans.append(("  " + _("none of the five"), ""))
    return line(*spans)


def ending_rows(shot: Snapshot, cells: int, g: Glyphs) -> list[Line]:
    """How it ended, the cause with its checkpoint, the evidence, what to change."""
    end = shot.ending
    if end is None:
        return []
    rows: list[Line] = []
    if end.outcome != "finished" or end.cause:
        text = end.text[:1].upper() + end.text[1:]
        rows += wrapped(text, cells - 2, "strong", " ", limit=3, cut=g.cut)
    if end.cause and end.outcome not in ("stopped", "finished"):
        sure = {"certain": _("certain"), "likely": _("likely"), "possible": _("possible")}
        heading = BY_CODE[end.cause].heading if end.cause in BY_CODE else end.cause_name or ""
        certainty = sure.get(end.certainty or "", "")
        rows += wrapped(
            f"{end.cause} {end.cause_name}: {heading} ({certainty})",
            cells - 2,
            "bad",
            " ",
            limit=2,
            cut=g.cut,
        )
        rows.append(checkpoint_row(end.checkpoint, cells, g))
        for text in end.evidence[:2]:
            seen = [t.strip() for t in text.splitlines() if t.strip()]
            shown = " ".join(seen) if len(seen) <= 3 else seen[-1]
            rows.append(
                line((f" {g.vline} ", "dim"), (clip(_STAMP.sub(_shorter, shown), cells - 4, g.cut), ""))
            )
        for n, fix in enumerate(end.fixes[:3], 1):
            found = wrapped(fix, cells - 6, "", "", limit=2, cut=g.cut)
            rows += [
                line((f" {n}. " if m == 0 else "    ", "strong"), *found_row)
                for m, found_row in enumerate(found)
            ]
        rows.append(line(" ", ("d", "key"), (" " + _("all evidence and every change"), "dim")))
    return rows


def log_rows(texts: Sequence[str], cells: int, g: Glyphs) -> list[Line]:
    """The log's tail, each line behind a bar so that it is never taken for ours.

    DeepSpeed's stamp (``[2026-11-29 19:54:37,726] [INFO] [logging.py:123:log_dist] [Rank 0] ``) fills most of
    80 columns and says little: only its time stays, and its level when that is not INFO.
    """
    return [line(f" {g.vline} {clip(_STAMP.sub(_shorter, t), cells - 4, g.cut)}") for t in texts]


_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d)[,.]\d+\] \[([A-Z]+)\] \[[^\]]*\] (?:\[Rank 0\] )?")


def _shorter(m: re.Match[str]) -> str:
    level = "" if m.group(2) == "INFO" else m.group(2) + " "
    return f"{m.group(1)} {level}"


def guarded(draw: Callable[[], list[Line]]) -> list[Line]:
    """``draw()``, or one line about its failure: a figure that nobody foresaw must not end the monitor."""
    try:
        return draw()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        text = _("this cannot be shown: {kind}: {error}").format(kind=type(e).__name__, error=e)
        return [line((" " + text, "bad"))]
