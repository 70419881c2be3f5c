"""``dstui watch``: join a run as appended lines of text, for logs, slow lines and screen readers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any

from dstui import paths
from dstui.errors import DstuiError, Exit
from dstui.i18n import _, aside
from dstui.plain.which import run_to_read
from dstui.runs import replay
from dstui.runs.alerts import Alert
from dstui.runs.causes import CHECKPOINTS
from dstui.runs.nodes import elsewhere_text
from dstui.runs.stacks import Stacks, dump
from dstui.runs.state import Phase
from dstui.runs.store import LIVE, RunDir, state, state_word
from dstui.runs.view import RunView, Snapshot
from dstui.units import duration, gib

TICK = 1.0
QUIET = 30.0
"""A line at least this often, so that a silent phase does not look like a dead terminal."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", default="last", metavar="RUN", help=_("default: the newest"))
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--plain", action="store_true", help=_("appended lines instead of the full-screen monitor")
    )
    how.add_argument(
        "--once", action="store_true", help=_("the state now, then leave; exit code 1 if it failed")
    )
    parser.add_argument("--json", action="store_true", help=_("one JSON object a line"))
    parser.add_argument(
        "--stacks", action="store_true", help=_("with --once: what every rank does now, by py-spy")
    )
    parser.add_argument("--low", action="store_true", help=_("fewer bytes: for a slow line"))
    parser.add_argument("--replay", action="store_true", help=_("play the run back from its directory"))
    parser.add_argument(
        "--speed", type=float, metavar="X", help=_("with --replay: X times as fast as it was; default 1")
    )


def run(args: argparse.Namespace) -> int:
    target = run_to_read(args.run)
    if args.speed is not None and not args.replay:
        raise DstuiError(_("--speed goes with --replay"))
    if args.replay:
        return _replay(target, args)
    if args.stacks and not args.once:
        raise DstuiError(_("--stacks goes with --once"))
    if args.once:
        view = RunView(target)
        shot = view.poll()
        found = _stacks(target, shot) if args.stacks else None
        if args.json:
            more = {} if found is None else {"stacks": found.to_json()}
            print(json.dumps({**as_json(shot), **more}, ensure_ascii=False))
        else:
            print("\n".join([render(shot), *(stack_lines(found) if found is not None else ())]))
        return Exit.BAD if shot.over and shot.state != "finished" else Exit.OK
    if not args.plain and not args.json and full_screen_possible():
        import importlib

        tui = importlib.import_module("dstui.tui")  # the two front ends do not know each other
        return int(tui.start(watch=target.id, low=args.low))
    return follow(target, as_lines=args.json)


def _replay(target: RunDir, args: argparse.Namespace) -> int:
    speed = 1.0 if args.speed is None else args.speed
    if args.once:
        raise DstuiError(_("--once shows one moment: leave out --replay"))
    if target.path.parent == paths.runs_dir() and state(target) in LIVE:
        raise DstuiError(
            _("the run goes on: it can be played back once it has ended"),
            _("join it: dstui watch {id}").format(id=target.id),
        )
    view = replay.ReplayView(target, speed)
    if not args.plain and not args.json and full_screen_possible():
        import importlib

        view.close()
        tui = importlib.import_module("dstui.tui")
        return int(tui.start(watch=replay.reference(target, speed), low=args.low))
    return follow(target, as_lines=args.json, view=view, tick=TICK if speed <= 1 else max(0.05, TICK / speed))


def _stacks(target: RunDir, shot: Snapshot) -> Stacks:
    ranks = [(r.rank, r.pid) for r in shot.ranks if r.pid is not None]
    return dump(target, target.manifest, ranks)


def stack_lines(found: Stacks) -> list[str]:
    """py-spy's own text a rank, or why there is none and the command that would do."""
    lines = [text for text in (found.problem, found.hint) if text]
    lines += found.gist
    for r in found.ranks:
        lines.append(_("rank {n}, pid {pid}").format(n=r.rank, pid=r.pid))
        if r.problem:
            lines += ["  " + r.problem, "  " + _("by hand: {command}").format(command=r.command)]
        lines += ["  " + text for text in r.text.splitlines() if not text.startswith(("Process ", "Python "))]
    return lines


def full_screen_possible() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "")


def follow(target: RunDir, *, as_lines: bool = False, view: RunView | None = None, tick: float = TICK) -> int:
    """Print a line at each change until the run is over; Ctrl+C leaves it running (130)."""
    view = view or RunView(target, keep=True)
    shown: tuple[Any, ...] | None = None
    said: set[str] = set()
    at = 0.0
    try:
        while True:
            shot = view.poll()
            now = time.time()
            kinds = tuple(alert.kind for alert in shot.alerts)
            key = (shot.state, shot.phase, shot.step, shot.loss, shot.stall, kinds)
            if key != shown or (not shot.over and now - at >= QUIET):
                shown, at = key, now
                text = json.dumps(as_json(shot), ensure_ascii=False) if as_lines else line(shot, now)
                print(text, flush=True)
            if not as_lines:
                for alert in shot.alerts:
                    if alert.kind not in said and alert.kind != "stall":  # the state's own line has that
                        print(f"{alert_line(alert)}\n  > {alert.advice}", flush=True)
                said = {alert.kind for alert in shot.alerts}
            if shot.over:
                if not as_lines:
                    print(ending(shot), flush=True)
                return Exit.OK if shot.state == "finished" else Exit.BAD
            time.sleep(tick)
    except KeyboardInterrupt:
        if not isinstance(view, replay.ReplayView):
            text = _("run {id} goes on; join it with: dstui watch {id}").format(id=target.id)
            print(text, file=sys.stderr)
        return Exit.INTERRUPTED
    finally:
        view.close()


def phase_text(phase: Phase, now: float) -> str:
    """``building ops (cpu_adam) for 31s``."""
    elapsed = duration(max(0.0, now - phase.since))
    if phase.name == "building":
        name = f" ({phase.detail})" if phase.detail else ""
        return _("building ops{name} for {elapsed}; 30-80 s are normal the first time").format(
            name=name, elapsed=elapsed
        )
    text = {
        "preflight": _("preflight"),
        "launch": _("launching the ranks"),
        "loading": _("loading"),
        "first-step": _("first step"),
    }[phase.name]
    return _("{phase} for {elapsed}").format(phase=text, elapsed=elapsed)


def line(shot: Snapshot, now: float) -> str:
    """One tick as text, most important first."""
    parts = [time.strftime("%H:%M:%S", time.localtime(now)), state_word(shot.state)]
    if shot.phase is not None:
        parts.append(phase_text(shot.phase, now))
    if shot.step is not None and shot.phase is None:
        if shot.total:
            parts.append(_("step {n}/{total}").format(n=shot.step, total=shot.total))
        else:
            parts.append(_("step {n}").format(n=shot.step))
    if shot.loss is not None:
        parts.append(_("loss {x:.4f}").format(x=shot.loss))
    if shot.lr is not None and shot.phase is None:
        parts.append(_("lr {x:.3g}").format(x=shot.lr))
    if shot.grad_norm is not None:
        parts.append(_("grad norm {x:.3g}").format(x=shot.grad_norm))
    if shot.step_time:
        parts.append(_("{x:.3g} s/step").format(x=shot.step_time))
    if shot.tokens_per_second:
        parts.append(_("{x:.0f} tokens/s").format(x=shot.tokens_per_second))
    elif shot.samples_per_second:
        parts.append(_("{x:.1f} samples/s").format(x=shot.samples_per_second))
    if shot.eta is not None and not shot.over:
        parts.append(_("{x} to go").format(x=duration(shot.eta)))
    if shot.gpus and shot.gpus[0].utilisation is not None:
        used = max(g.memory_used or 0 for g in shot.gpus)
        mean = sum(g.utilisation or 0 for g in shot.gpus) / len(shot.gpus)
        parts.append(_("GPU {share:.0%} {used}").format(share=mean, used=gib(used)))
    if shot.host.used is not None:
        parts.append(_("host {used}").format(used=gib(shot.host.used)))
    if shot.overflows:
        parts.append(_("overflows {n}").format(n=shot.overflows))
    if shot.state == "stalled" and shot.quiet_since:
        parts.append(_("no progress for {x}").format(x=duration(now - shot.quiet_since)))
    if shot.stall is not None:
        parts.append(shot.stall.text + aside(shot.stall.code))
    return "  ".join(parts)


def alert_line(alert: Alert) -> str:
    """``! the loss is NaN since step 61 (2 reports)  DR601``; W for a warning."""
    sign = "!" if alert.level == "bad" else "W"
    return f"{sign} {alert.text}" + (f"  {alert.cause}" if alert.cause else "")


def lamp_lines(shot: Snapshot) -> list[str]:
    """The five checkpoints, each with its level and evidence."""
    word = {"red": _("trouble"), "yellow": _("look here"), "green": _("fine"), "unknown": _("unknown")}
    return [
        _("checkpoint {n} {name}: {level}: {text}").format(
            n=lamp.checkpoint,
            name=_(CHECKPOINTS[lamp.checkpoint - 1]),
            level=word[lamp.level],
            text=lamp.text + aside(lamp.advice),
        )
        for lamp in shot.lamps
    ]


def ending(shot: Snapshot) -> str:
    """How it ended, its cause, its evidence and what to change."""
    end = shot.ending
    if end is None:
        return state_word(shot.state)
    lines = [_("run {id} {text}").format(id=shot.id, text=end.text)]
    if end.cause:
        lines.append(f"  {end.cause} {end.cause_name} ({end.certainty})")
    lines += ["  | " + text.splitlines()[0][:160] for text in end.evidence[:3] if text]
    lines += [f"  {n}. {fix}" for n, fix in enumerate(end.fixes[:4], 1)]
    if end.cause:
        lines.append(_("  more: dstui diagnose {id}").format(id=shot.id))
    return "\n".join(lines)


def render(shot: Snapshot) -> str:
    """The whole state on a few lines (``--once``)."""
    now = time.time()
    lines = [f"{shot.id}" + (f"  {shot.name}" if shot.name else "") + f"  {shot.path}", line(shot, now)]
    for g in shot.gpus:
        parts = [_("GPU {index}").format(index=g.index), g.name or ""]
        if g.utilisation is not None:
            parts.append(f"{g.utilisation:.0%}")
        if g.memory_used is not None:
            parts.append(_("{used} of {total}").format(used=gib(g.memory_used), total=gib(g.memory_total)))
        if g.memory_peak:
            parts.append(_("peak {size}").format(size=gib(g.memory_peak)))
        if g.power is not None:
            parts.append(f"{g.power:.0f} W")
        lines.append("  " + "  ".join(p for p in parts if p))
    for r in shot.ranks:
        parts = [_("rank {n}").format(n=r.rank)]
        if r.rss is not None:
            parts.append(_("host memory {size}").format(size=gib(r.rss)))
        if r.rss_peak:
            parts.append(_("peak {size}").format(size=gib(r.rss_peak)))
        if r.cpu is not None:
            parts.append(_("{x:.1f} cores").format(x=r.cpu))
        if r.code is not None:
            parts.append(_("exit code {code}").format(code=r.code))
        lines.append("  " + "  ".join(parts))
    if shot.elsewhere and not shot.over:
        lines.append("  " + elsewhere_text(shot.elsewhere, shot.world_size, shot.nodes))
    for c in shot.comparisons:
        if c.expected is not None:
            measured = gib(c.measured) if c.measured is not None else _("not measured")
            lines.append(
                "  "
                + _("{what}: predicted {predicted}, measured {measured}").format(
                    what=c.what, predicted=gib(c.expected), measured=measured
                )
            )
    lines += ["  " + text for text in lamp_lines(shot)]
    for alert in shot.alerts:
        lines += ["  " + alert_line(alert), "    > " + alert.advice]
    if shot.ending is not None:
        lines.append(ending(shot))
    elif shot.log:
        lines += ["  | " + text[:160] for text in shot.log[-5:]]
    return "\n".join(lines)


CURVES = (
    "losses",
    "lrs",
    "step_times",
    "grad_norms",
    "speeds",
    "speed_unit",
    "utilisation",
    "log",
    "prediction",
)
"""Fields of a Snapshot that are too long for a line."""


def as_json(shot: Snapshot) -> dict[str, Any]:
    """A Snapshot as JSON data: field names as in ``dstui.runs.view.Snapshot``; curves, the log's tail and the prediction left out."""
    data = dataclasses.asdict(shot)
    for name in CURVES:
        del data[name]
    data["lamps"] = [lamp.to_json() for lamp in shot.lamps]
    data["alerts"] = [alert.to_json() for alert in shot.alerts]
    for name in ("loss", "grad_norm"):
        value = data[name]
        if isinstance(value, float) and value != value:
            data[name] = None
    if shot.stall is not None:
        data["stall"]["text"] = shot.stall.text
    return {"schema_version": 1, **data}
