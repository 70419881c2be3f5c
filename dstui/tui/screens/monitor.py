"""The monitor of one run: overview, lamps, curves, log, prediction beside measurement, config, diagnosis.

A thread polls the run (``RunView``) and hands over one frozen Snapshot a tick; the screen turns it into lines,
of which only those that differ are painted. Nothing here reads a file on the event loop, and nothing that the
screen does or suffers reaches the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Key
from textual.screen import ModalScreen

from dstui.errors import DstuiError
from dstui.i18n import N_, _, ngettext
from dstui.runs.case import Diagnosis
from dstui.runs.causes import CHECKPOINTS
from dstui.runs.repairs import Repair
from dstui.runs.view import RunView, Snapshot
from dstui.tui import actions
from dstui.tui.actions import Action
from dstui.tui.poller import Poller
from dstui.tui.screens.ask import Ask
from dstui.tui.screens.base import BaseScreen
from dstui.tui.screens.prompt import Prompt
from dstui.tui.text import BLANK, Line, line, wrapped
from dstui.tui.widgets import runpages
from dstui.tui.widgets.curves import CurvesPage
from dstui.tui.widgets.dashboard import asleep, guarded, overview, state_word
from dstui.tui.widgets.health import health_page
from dstui.tui.widgets.lines import LineView
from dstui.tui.widgets.logview import LogView

if TYPE_CHECKING:
    from dstui.runs.rerun import Change
    from dstui.runs.stacks import Stacks

actions.register(
    "monitor",
    N_("monitor"),
    [
        Action("monitor", "next_view", "tab,v", N_("next view")),
        Action("monitor", "previous_view", "shift+tab", N_("previous view")),
        Action("monitor", "overview", "o", N_("overview")),
        Action("monitor", "health", "k", N_("five lamps and the alerts, with their evidence")),
        Action("monitor", "curves", "m", N_("curves: loss, lr, gradient norm, step time, speed")),
        Action("monitor", "log", "l", N_("the log: follow, scroll, search")),
        Action("monitor", "plan", "p", N_("prediction beside measurement")),
        Action("monitor", "config", "c", N_("the run's config")),
        Action("monitor", "diagnosis", "d", N_("diagnosis: cause, evidence, what to change")),
        Action("monitor", "stacks", "y", N_("what every rank does now (py-spy)")),
        Action("monitor", "replay", "r", N_("play the run back; in a replay: from its beginning")),
        Action("monitor", "faster", "plus,equals_sign", N_("replay: twice as fast")),
        Action("monitor", "slower", "minus", N_("replay: half as fast")),
        Action("monitor", "apply", "enter", N_("a change is shown: start a new run with it")),
        Action(
            "monitor", "write_source", "w", N_("a change is shown: write it into your file as well (asks)")
        ),
        Action("monitor", "stop", "s", N_("stop the run and all its ranks (asks)")),
        Action("monitor", "stop_now", "S", N_("stop it at once (asks)")),
        Action("monitor", "back", "escape,left_square_bracket", N_("overview; from there the list of runs")),
        Action("monitor", "page_down", "pagedown,space", N_("a page down")),
        Action("monitor", "page_up", "pageup,b", N_("a page up")),
        Action("monitor", "top", "g", N_("the beginning (Home)")),
        Action("monitor", "bottom", "G,f", N_("the end; the log is followed again (End)")),
        Action("monitor", "search", "slash", N_("search the log")),
        Action("monitor", "search_next", "n", N_("next hit")),
        Action("monitor", "search_previous", "N", N_("hit in the other direction")),
    ],
)

VIEWS: dict[str, str] = {
    "overview": N_("overview"),
    "health": N_("lamps"),
    "curves": N_("curves"),
    "log": N_("log"),
    "plan": N_("plan"),
    "config": N_("config"),
    "diagnosis": N_("diagnosis"),
    "stacks": N_("stacks"),
    "change": N_("change"),
}
CYCLE = ("overview", "health", "curves", "log", "plan", "config", "diagnosis")
"""Views that Tab goes through; the others are opened by what they show."""
OVER_TICK = 5.0
"""Seconds between two looks at a run that has ended, cannot be read, or is not what the screen shows."""

REPLAY_SPEED = 10.0
_DIGITS = frozenset("123456789")


@dataclass(frozen=True)
class Look:
    """One poll: the snapshot, and what of the run never changes."""

    shot: Snapshot
    manifest: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None
    log: Path = Path()
    config_path: str = ""
    speed: float | None = None
    """Of a replay."""
    played: float = 1.0
    """Share of a replay that was shown."""


class _Reader:
    """Finds the run and polls it; lives in the poller's thread."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._view: RunView | None = None
        self._manifest: Mapping[str, Any] = {}
        self._config: str | None = None
        self.speed: float | None = None
        """Asked for by a key, in a replay."""

    def take(self) -> Look:
        from dstui.runs.replay import ReplayView, open_view

        if self._view is None:
            self._view = open_view(self._run_id)
        run = self._view.run
        if not run.path.is_dir():
            raise DstuiError(
                _("run {id} is gone: its directory was removed").format(id=run.id),
                _("^R lists the runs that are there"),
            )
        speed, played = None, 1.0
        if isinstance(self._view, ReplayView):
            if self.speed is not None:
                self._view.go(self.speed)
                self.speed = None
            speed, played = self._view.speed, self._view.played
        shot = self._view.poll()
        if not self._manifest:
            try:
                self._config = run.config_path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                self._config = None
            self._manifest = run.manifest
        return Look(shot, self._manifest, self._config, run.out_log, str(run.config_path), speed, played)

    def close(self) -> None:
        if self._view is not None:
            self._view.close()


class MonitorScreen(BaseScreen):
    """Shows the run that ``app.run_id`` names; see the module's text."""

    CSS_PATH = "monitor.tcss"
    MESSAGE_ROWS = 1
    HELP_SCOPE = "monitor"
    BINDINGS: ClassVar[list[BindingType]] = actions.bindings("monitor")

    def __init__(self) -> None:
        super().__init__()
        self._look: Look | None = None
        self._problem: tuple[str, str] | None = None
        self._at = "overview"
        self._poller: Poller[Look] | None = None
        self._watched: str | None = None
        self._diagnosis: Diagnosis | None = None
        self._diagnosed: Snapshot | None = None
        self._backwards = False
        self._asleep_since: float | None = None
        self._note = ""
        self._reader: _Reader | None = None
        self._curves = CurvesPage()
        self._lamp: int | None = None
        self._stacks: Stacks | None = None
        self._change: Change | None = None
        self._fix: Repair | None = None
        self._starting = False

    def compose_body(self) -> ComposeResult:
        yield LineView(id="board")
        yield LineView(id="page", keys=True)
        yield LogView(id="log")

    @property
    def log_view(self) -> LogView:
        return self.query_one("#log", LogView)

    @property
    def shot(self) -> Snapshot | None:
        """The run as last seen; None before the first look."""
        return self._look.shot if self._look else None

    @property
    def view_name(self) -> str:
        return self._at

    # ---- life

    def on_mount(self) -> None:
        self.watch(self.app, "run_id", self._run_changed)

    def on_unmount(self) -> None:
        if self._poller is not None:
            self._poller.stop()

    def on_screen_suspend(self) -> None:
        self.call_later(self._pause_unless_visible)

    @property
    def _shown(self) -> bool:
        return self.is_current or isinstance(self.app.screen, ModalScreen)

    def _pause_unless_visible(self) -> None:
        """A run that has ended needs no looks; one that goes on is still announced when it ends."""
        if self._poller is not None and not self._shown and (self.shot is None or self.shot.over):
            self._poller.pause()

    def on_screen_resume(self) -> None:
        if self._poller is not None:
            self._poller.resume()
            self._poller.poke()
        self.call_after_refresh(self.redraw)

    def _run_changed(self, run_id: str | None) -> None:
        if run_id == self._watched or run_id is None:
            return
        self._watched = run_id
        if self._poller is not None:
            self._poller.stop()
        self._look = self._problem = self._diagnosis = self._diagnosed = self._asleep_since = None
        self._stacks = self._change = self._fix = self._lamp = None
        self._note = ""
        self._curves.reset()
        self._show_view("overview")
        reader = self._reader = _Reader(run_id)
        self._poller = Poller(
            self.app,
            reader.take,
            self._took,
            self._failed,
            self._interval,
            close=reader.close,
            name="monitor",
        )
        self._poller.start()

    def _interval(self) -> float:
        shot = self.shot
        if self._problem is not None or (shot is not None and shot.over) or not self._shown:
            return OVER_TICK
        return self.dstui.profile.tick

    def _took(self, look: Look) -> None:
        before, self._look = self._look, look
        if not asleep(look.shot):
            self._asleep_since = None
        elif self._asleep_since is None:
            self._asleep_since = time.monotonic()
        cured, self._problem = self._problem is not None, None
        self._announce(before, look)
        if not self._shown:
            self._pause_unless_visible()
            return
        if before is not None and (before.speed, round(before.played, 2)) != (
            look.speed,
            round(look.played, 2),
        ):
            self._draw_frame()
        if before is None or cured or before.shot.state != look.shot.state:
            self._draw_frame()
        self._draw_view(changed=before is None or cured or before.shot != look.shot)

    def _announce(self, before: Look | None, look: Look) -> None:
        """Ring and notify when a run that was watched alive ends or stands still."""
        if before is None or look.speed is not None or before.shot.state == look.shot.state:
            return
        shot = look.shot
        if before.shot.over or not (shot.over or shot.state == "stalled"):
            return
        _letter, word, _role = state_word(shot.state)
        reason = shot.stall.text if shot.stall is not None else ""
        if shot.ending is not None and shot.ending.cause_name:
            reason = f"{shot.ending.cause} {shot.ending.cause_name}"
        text = _("run {name}: {state}").format(name=shot.name or shot.id, state=word)
        self.dstui.notify_person(f"{text} {reason}".strip())

    def _failed(self, error: Exception) -> None:
        if isinstance(error, DstuiError):
            problem = (error.message, error.hint or "")
        elif isinstance(error, OSError):
            problem = (_("the run cannot be read: {cause}").format(cause=error), "")
        else:
            text = _("dstui made a mistake: {kind}: {error}").format(kind=type(error).__name__, error=error)
            problem = (text, self.dstui.record(error))
        if problem != self._problem:
            self._problem = problem
            self.redraw()

    # ---- drawing

    def on_line_view_resized(self) -> None:
        self._draw_view(changed=True)

    def help_text(self) -> str:
        return _(
            "The monitor only reads: q leaves and the run goes on; only s and S end it. "
            "The log view never loads the file whole, so a log of any size opens at once."
        )

    def redraw(self) -> None:
        if self.tiny or not self.size:
            return
        self._draw_frame()
        self._draw_view(changed=True)

    def _draw_frame(self) -> None:
        """Title, message and keys: what changes with the view and the state only."""
        shot = self.shot
        name = self._watched or ""
        right = ""
        if shot is not None:
            name = f"{shot.name}  {shot.id}" if shot.name else shot.id
            letter, word, _role = state_word(shot.state)
            facts = [f"{letter} {word}"]
            replayed = self._look is not None and self._look.speed is not None
            if shot.stage is not None and not replayed:
                facts.append(f"ZeRO {shot.stage}")
            if shot.world_size and not replayed:
                facts.append(ngettext("{n} rank", "{n} ranks", shot.world_size).format(n=shot.world_size))
            if self._look is not None and self._look.speed is not None:
                facts.append(
                    _("replay x{speed:g} {share} %").format(
                        speed=self._look.speed, share=int(100 * self._look.played)
                    )
                )
            facts.append(_(VIEWS[self._at]))
            right = "  ".join(facts)
        self.set_title(name or _("monitor"), right)
        self.set_keys(self._keys())
        self._draw_message()

    def _keys(self) -> list[tuple[str, str]]:
        shot = self.shot
        if self._at == "log":
            keys = [("/", _("search")), ("n/N", _("next")), ("f", _("follow")), ("Left/Right", _("sideways"))]
            return [*keys, ("o", _("overview")), ("Tab", _("views"))]
        if self._at == "change":
            keys = [("Enter", _("start a new run with it"))]
            if self._change is not None and self._change.source:
                keys.append(("w", _("write my file")))
            return [*keys, ("d", _("diagnosis"))]
        keys = [("k", _("lamps")), ("m", _("curves")), ("l", _("log")), ("p", _("plan"))]
        if self._look is not None and self._look.speed is not None:
            keys = [("+/-", _("speed")), ("r", _("again")), *keys[:3]]
        if self._at == "diagnosis" and self._diagnosis is not None:
            made = [("1-9", _("make that change"))] if any(f.edits for f in self._diagnosis.fixes) else []
            keys = [*made, ("k", _("lamps")), ("l", _("log"))]
        if self._at == "stacks":
            keys = [("y", _("look again")), *keys[2:3]]
        if shot is not None and (shot.over or shot.state == "stalled") and self._at != "diagnosis":
            keys.append(("d", _("diagnosis")))
        if self._at != "overview":
            keys.insert(0, ("o", _("overview")))
        if shot is not None and not shot.over and (self._look is None or self._look.speed is None):
            keys.append(("s", _("stop")))
        return [*keys, ("Tab", _("views")), ("^R", _("runs"))]

    def _draw_message(self) -> None:
        if self._note:
            self.say(self._note)
        elif self._problem is not None:
            self.say(self._problem[0], "bad", "! ")
        elif self._at == "log" and self._look is not None:
            self.say(f"{self._look.log.name}  {self.log_view.status()}", "dim")
        elif self._look is not None and self._look.speed is not None and self._at == "overview":
            self.say(_("a replay: + and - change its speed, r begins again; nothing here runs"), "dim")
        elif self.shot is not None and not self.shot.over and self._at == "overview":
            self.say(_("q leaves, the run goes on"), "dim")
        else:
            self.say("")

    def _draw_view(self, changed: bool) -> None:
        """The view's rows. ``changed``: the snapshot is another one; else only clocks may have moved on."""
        if self.tiny or not self.size:
            return
        if self._look is None:
            self._draw_waiting()
        elif self._at == "overview":
            if changed or not self._look.shot.over:
                self._draw_overview(self._look.shot)
        elif self._at == "log":
            if changed:
                self.log_view.open(self._look.log)
        elif self._at == "curves":
            if changed:
                self._draw_curves(self._look.shot)
        elif changed:
            self._draw_page(self._look)

    def _draw_waiting(self) -> None:
        view = self.view("board")
        cells = self.size.width
        if self._problem is None:
            view.show([BLANK, line("  " + _("reading the run ..."))])
            return
        message, hint = self._problem
        view.show(
            [
                BLANK,
                *wrapped(message, cells - 4, "bad", "  ", cut=self.glyphs.cut),
                *wrapped(hint, cells - 4, "", "  ", cut=self.glyphs.cut),
            ]
        )

    def _draw_overview(self, shot: Snapshot) -> None:
        view = self.view("board")
        size = view.size
        if not size:
            return
        g, now = self.glyphs, time.time()
        idle = 0.0 if self._asleep_since is None else time.monotonic() - self._asleep_since
        view.show(guarded(lambda: overview(shot, size.width, size.height, g, now, idle)))

    def _draw_curves(self, shot: Snapshot) -> None:
        view = self.view("board")
        if view.size:
            size, g = view.size, self.glyphs
            view.show(guarded(lambda: self._curves.rows(shot, size.width, size.height, g)))

    def _draw_page(self, look: Look) -> None:
        view = self.view("page")
        if not view.size:
            return
        cells, g = view.size.width - 2, self.glyphs
        rows: list[Line]
        if self._at == "plan":
            rows = guarded(lambda: runpages.plan_page(look.shot, look.manifest, cells, g))
        elif self._at == "config":
            rows = runpages.config_page(look.config, look.manifest, look.config_path, cells, g)
        elif self._at == "health":
            rows = guarded(lambda: health_page(look.shot, cells, g, self._lamp))
        elif self._at == "stacks":
            rows = runpages.stacks_page(self._stacks, cells, g)
        elif self._at == "change":
            rows = runpages.change_page(self._change, self._fix, cells, g)
        else:
            self._diagnose(look)
            found = self._diagnosis
            if found is None:
                rows = [line((" " + _("looking at the log, the samples and the exit record ..."), "dim"))]
            else:
                rows = guarded(lambda: runpages.diagnosis_page(found, cells, g))
        view.show(rows)

    def _diagnose(self, look: Look) -> None:
        """Judge the run in the background: when the page is opened, and when the state changes under it."""
        if self._diagnosed is not None and look.shot.state == self._diagnosed.state:
            return
        self._diagnosed = look.shot
        run_id = self._watched or ""

        def work() -> Diagnosis:
            from dstui.runs.diagnose import diagnose_run
            from dstui.runs.replay import run_of

            return diagnose_run(run_of(run_id))

        def done(found: Diagnosis) -> None:
            if run_id == self._watched:
                self._diagnosis = found
                self.redraw()

        self.dstui.jobs.run("diagnose", work, done, self._page_failed)

    def _page_failed(self, error: BaseException) -> None:
        """What a page waits for does not come: leave the page, and say why."""
        if self._at in ("diagnosis", "stacks"):
            self._show_view("overview")
        self.dstui.fail(error)

    # ---- views

    def _show_view(self, name: str) -> None:
        if name != self._at:
            self._note = ""
            self.view("page").scroll_rows(-(1 << 30))
        if name == "diagnosis":
            self._diagnosed = None  # asked anew each time the page is opened
        self._at = name
        self.set_class(name == "log", "-log")
        self.set_class(name not in ("overview", "curves", "log"), "-page")
        if name == "curves":
            self._curves.reset()
        if name != "health":
            self._lamp = None
        if name == "log":
            self.set_focus(self.log_view)
        elif name in ("overview", "curves"):
            self.set_focus(None)
        else:
            self.set_focus(self.view("page"))
        self.call_after_refresh(self.redraw)

    def _turn(self, delta: int) -> None:
        names = [n for n in CYCLE if n != "diagnosis" or (self.shot is not None and self.shot.over)]
        at = names.index(self._at) if self._at in names else 0
        self._show_view(names[(at + delta) % len(names)])

    def action_next_view(self) -> None:
        self._turn(1)

    def action_previous_view(self) -> None:
        self._turn(-1)

    def action_overview(self) -> None:
        self._show_view("overview")

    def action_log(self) -> None:
        self._show_view("overview" if self._at == "log" else "log")

    def action_health(self) -> None:
        self._show_view("overview" if self._at == "health" else "health")

    def action_curves(self) -> None:
        self._show_view("overview" if self._at == "curves" else "curves")

    def action_plan(self) -> None:
        self._show_view("plan")

    def action_config(self) -> None:
        self._show_view("config")

    def action_diagnosis(self) -> None:
        self._show_view("diagnosis")

    def action_back(self) -> None:
        if self._at == "overview":
            self.dstui.action_runs()
        else:
            self._show_view("diagnosis" if self._at == "change" else "overview")

    def on_key(self, event: Key) -> None:
        """A digit: the change of that number on the diagnosis page, elsewhere the lamp."""
        if event.key not in _DIGITS:
            return
        event.stop()
        n = int(event.key)
        if self._at in ("diagnosis", "change"):
            self._show_change(n)
        elif n <= len(CHECKPOINTS):
            self._show_view("health")
            self._lamp = n

    def _tell(self, text: str) -> None:
        self._note = text
        self._draw_message()

    # ---- replay

    def action_replay(self) -> None:
        look = self._look
        if look is None or not look.shot.path:
            return
        from dstui.runs.replay import reference
        from dstui.runs.store import RunDir

        if not look.shot.over and look.speed is None:
            self._tell(_("the run goes on: it can be played back once it has ended"))
            return
        speed = look.speed or REPLAY_SPEED
        wanted = reference(RunDir(Path(look.shot.path)), speed)
        if wanted == self._watched:
            self._watched = None
            self._run_changed(wanted)
        else:
            self.dstui.open_run(wanted)

    def action_faster(self) -> None:
        self._change_speed(2.0)

    def action_slower(self) -> None:
        self._change_speed(0.5)

    def _change_speed(self, factor: float) -> None:
        if self._reader is None or self._look is None or self._look.speed is None:
            return
        self._reader.speed = (self._reader.speed or self._look.speed) * factor
        if self._poller is not None:
            self._poller.poke()

    # ---- stacks of the ranks

    def action_stacks(self) -> None:
        look, run_id = self._look, self._watched or ""
        if look is None:
            return
        if look.speed is not None or look.shot.over:
            self._tell(_("no rank is alive: there is nothing to look at"))
            return
        ranks = [(r.rank, r.pid) for r in look.shot.ranks if r.pid is not None]
        self._stacks = None
        self._show_view("stacks")

        def work() -> Stacks:
            from dstui.runs.stacks import dump
            from dstui.runs.store import find_run

            return dump(find_run(run_id), look.manifest, ranks)

        def done(found: Stacks) -> None:
            if run_id == self._watched:
                self._stacks = found
                self.redraw()

        self.dstui.jobs.run("stacks", work, done, self._page_failed)

    # ---- a fix becomes a run

    def _show_change(self, n: int) -> None:
        found, run_id = self._diagnosis, self._watched or ""
        if found is None or n > len(found.fixes):
            return
        fix = found.fixes[n - 1]
        if not fix.edits:
            self._tell(_("change {n} is not one of the config: it is yours to make").format(n=n))
            return
        self._fix, self._change, self._note = fix, None, ""
        self._show_view("change")

        def work() -> Change:
            from dstui.runs.replay import run_of
            from dstui.runs.rerun import change

            return change(run_of(run_id), fix.edits)

        def done(made: Change) -> None:
            if run_id == self._watched and fix is self._fix:
                self._change = made
                self.redraw()

        def failed(error: BaseException) -> None:
            self._show_view("diagnosis")
            self.dstui.fail(error)

        self.dstui.jobs.run("change", work, done, failed)

    def action_apply(self) -> None:
        """Start a run with the change that is shown, and watch it."""
        made = self._change
        if self._at != "change" or made is None or self._starting:
            return
        self._starting = True
        self._tell(_("starting the run ..."))

        def work() -> str:
            from dstui.runs.rerun import launch

            return launch(made, self.dstui.facts_now()).id

        def done(run_id: str) -> None:
            self._starting = False
            self._tell("")
            self.dstui.open_run(run_id)

        def failed(error: BaseException) -> None:
            self._starting = False
            self._tell("")
            self.dstui.fail(error)

        self.dstui.jobs.run("rerun", work, done, failed)

    def action_write_source(self) -> None:
        made = self._change
        if self._at != "change" or made is None:
            return
        if made.source is None:
            self._tell(_("the config came from no file of yours"))
            return
        question = _("Write the change into {path}?").format(path=made.source)
        detail = _("Its text as it is now is kept beside it as .bak; comments and order stay.")
        self.app.push_screen(
            Ask(question, [("w", _("write it"))], detail), partial(self._write_answered, made)
        )

    def _write_answered(self, made: Change, answer: str | None) -> None:
        if answer != "w":
            return

        def work() -> Path:
            from dstui.runs.rerun import write_source

            return write_source(made)

        self.dstui.jobs.run(
            "write-source", work, lambda path: self._tell(_("written: {path}").format(path=path.name))
        )

    def _scroller(self) -> LineView | None:
        if self._at in ("overview", "curves"):
            return None
        return self.log_view if self._at == "log" else self.view("page")

    def _scroll_pages(self, pages: int) -> None:
        view = self._scroller()
        if isinstance(view, LogView):
            view.page(pages)
        elif view is not None:
            view.scroll_rows(pages * max(1, view.size.height - 1))

    def action_page_down(self) -> None:
        self._scroll_pages(1)

    def action_page_up(self) -> None:
        self._scroll_pages(-1)

    def action_top(self) -> None:
        view = self._scroller()
        if view is not None:
            view.key_home()

    def action_bottom(self) -> None:
        view = self._scroller()
        if view is not None:
            view.key_end()

    def on_log_view_moved(self, message: LogView.Moved) -> None:
        if self._at == "log":
            if message.by_key:
                self._note = ""
            self._draw_message()

    # ---- searching the log

    def action_search(self) -> None:
        if self._look is None:
            return
        if self._at != "log":
            self._show_view("log")
        detail = _(
            "letter case does not matter; n goes on, N turns round; at the end of the log it looks upwards"
        )
        self.app.push_screen(
            Prompt(_("search the log for"), self.log_view.pattern, detail), self._search_asked
        )

    def _search_asked(self, pattern: str | None) -> None:
        if pattern:
            self._backwards = self.log_view.following
            self._search(pattern, self._backwards)

    def _search(self, pattern: str, backwards: bool) -> None:
        self._note = _("searching for {text} ...").format(text=pattern)
        self._draw_message()
        self.log_view.search(pattern, backwards)

    def action_search_next(self) -> None:
        self._search_on(self._backwards)

    def action_search_previous(self) -> None:
        self._search_on(not self._backwards)

    def _search_on(self, backwards: bool) -> None:
        if self._at == "log" and self.log_view.pattern:
            self._search(self.log_view.pattern, backwards)
        else:
            self.action_search()

    def on_log_view_found(self, message: LogView.Found) -> None:
        self._note = ""
        if not message.hit:
            where = _("above") if message.backwards else _("below")
            self._note = _("{text} is not found {where}; N looks the other way").format(
                text=message.pattern, where=where
            )
        self._draw_message()

    # ---- stopping

    def action_stop(self) -> None:
        self._ask_stop(now=False)

    def action_stop_now(self) -> None:
        self._ask_stop(now=True)

    def _ask_stop(self, now: bool) -> None:
        shot = self.shot
        if shot is None:
            return
        if (self._watched or "").startswith("replay:"):
            self._note = _("this is a replay: there is nothing to stop")
            self._draw_message()
            return
        if shot.over and shot.state != "lost":
            self._note = _("the run has ended already")
            self._draw_message()
            return
        self.app.push_screen(stop_question(shot.name or shot.id, now), partial(self._stop_answered, shot.id))

    def _stop_answered(self, run_id: str, answer: str | None) -> None:
        if answer not in ("s", "S"):
            return
        self._note = _("stopping ..")
        self._draw_message()

        def done(text: str) -> None:
            if run_id == self._watched:
                self._note = text
                self._draw_message()
                if self._poller is not None:
                    self._poller.poke()

        self.dstui.jobs.run(f"stop-{run_id}", partial(stop_run, run_id, answer == "S"), done)


def stop_question(name: str, now: bool) -> Ask:
    """What stopping does, asked once; the key that asked also answers, so that a slip is two slips."""
    answers = [
        ("s", _("stop: Ctrl+C to every rank, TERM after 20 s, KILL after 15 s more")),
        ("S", _("stop now: TERM, KILL after 3 s; nothing is saved")),
    ]
    return Ask(
        _("End the run {name} and all its ranks?").format(name=name),
        answers[::-1] if now else answers,
        _("What was not saved as a checkpoint is lost. Leaving with q stops nothing."),
    )


def stop_run(run_id: str, now: bool) -> str:
    """Stop and wait; returns what happened as a sentence. Blocks: for a job."""
    from dstui.runs.control import stop
    from dstui.runs.store import find_run

    done = stop(find_run(run_id), now=now)
    if done.already:
        return _("the run had ended already")
    if done.ended:
        return _("the run has ended, and all its ranks")
    return _("asked to stop; it has not ended yet. S stops it at once")
