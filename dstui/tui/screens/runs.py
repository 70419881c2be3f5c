"""The list of runs: what each is doing, join it, stop it, forget it, take its config into the wizard.

A thread lists the runs each tick and keeps a view of those on the screen, so that step and loss are there without
a run being opened; an ended run is read once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen

from dstui.errors import DstuiError
from dstui.i18n import N_, _, ngettext
from dstui.runs import store
from dstui.runs.replay import reference
from dstui.runs.store import LIVE, RunDir
from dstui.runs.view import RunView, Snapshot
from dstui.tui import actions
from dstui.tui.actions import Action
from dstui.tui.poller import Poller
from dstui.tui.screens.ask import Ask
from dstui.tui.screens.base import BaseScreen
from dstui.tui.screens.monitor import stop_question, stop_run
from dstui.tui.text import BLANK, Line, clip, clip_middle, line, wrapped
from dstui.tui.widgets.dashboard import PHASES, rough, rule, state_word
from dstui.tui.widgets.lines import LineView
from dstui.tui.widgets.table import Column, Row, Table
from dstui.units import duration

actions.register(
    "runs",
    N_("list of runs"),
    [
        Action("runs", "join", "enter,right", N_("watch the run")),
        Action("runs", "stop", "s", N_("stop the run and all its ranks (asks)")),
        Action("runs", "stop_now", "S", N_("stop it at once (asks)")),
        Action("runs", "forget", "x,delete", N_("forget an ended run: delete its directory (asks)")),
        Action("runs", "open_config", "o", N_("open its config in the wizard")),
        Action("runs", "log", "l", N_("watch the run's log")),
        Action("runs", "replay", "r", N_("play the run back, ten times as fast")),
        Action("runs", "mark", "space", N_("mark the run, to compare it")),
        Action("runs", "compare", "c", N_("compare the marked runs")),
        Action("runs", "back", "escape,left,left_square_bracket", N_("start")),
    ],
)

VIEWS_AT_ONCE = 40
"""Runs whose step and loss are read in one tick."""
TICK = 2.0
PATIENCE = 0.3
"""Seconds after which the list is shown with what was read until then."""
REPLAY_SPEED = 10.0


@dataclass(frozen=True)
class Entry:
    """One run in the list. ``shot`` is None until it was read; ``problem``: why it cannot be."""

    id: str
    state: str
    created: float
    name: str = ""
    config: str = ""
    script: str = ""
    host: str = ""
    engine: str = ""
    ended: float | None = None
    shot: Snapshot | None = None
    problem: str = ""


class _Lister:
    """Lists the runs; lives in the poller's thread. ``wanted``: ids whose step and loss are shown."""

    def __init__(self) -> None:
        self.wanted: tuple[str, ...] = ()
        self._views: dict[str, RunView] = {}
        self._shots: dict[str, Snapshot] = {}
        self.behind = False
        """Some of those wanted were not read yet: look again soon."""

    def take(self) -> tuple[Entry, ...]:
        """The list at once, its logs for no longer than ``PATIENCE``: one of a gigabyte keeps no other waiting."""
        until = time.monotonic() + PATIENCE
        self.behind = False
        runs = store.list_runs()
        there = {r.id for r in runs}
        for gone in [i for i in self._views if i not in there]:
            self._views.pop(gone).close()
        wanted = self.wanted[:VIEWS_AT_ONCE] or tuple(r.id for r in runs[:10])
        return tuple(self._entry(run, run.id in wanted, until) for run in runs)

    def _entry(self, run: RunDir, read: bool, until: float) -> Entry:
        try:
            manifest = run.manifest
            state = store.state(run)
            shot = self._shots.get(run.id)
            if read and (shot is None or not shot.over):
                if shot is None and time.monotonic() > until:
                    self.behind = True
                else:
                    shot = self._read(run)
                    state = shot.state
        except (DstuiError, OSError) as e:
            return Entry(run.id, "lost", run.created_at, problem=getattr(e, "message", str(e)))
        return Entry(
            run.id,
            state,
            run.created_at,
            name=str(manifest.get("name") or ""),
            config=_config_name(manifest),
            script=str(manifest.get("script") or ""),
            host=str(manifest.get("host") or ""),
            engine=str(manifest.get("engine") or ""),
            ended=shot.ended_at if shot else None,
            shot=shot,
        )

    def _read(self, run: RunDir) -> Snapshot:
        view = self._views.get(run.id)
        if view is None:
            view = self._views[run.id] = RunView(run, keep=True)
        shot = view.poll()
        self._shots[run.id] = shot
        if shot.over:
            self._views.pop(run.id).close()
        return shot

    def close(self) -> None:
        for view in self._views.values():
            view.close()


def _config_name(manifest: Mapping[str, Any]) -> str:
    source = (manifest.get("config") or {}).get("source")
    return Path(str(source)).name if source else ""


class RunsScreen(BaseScreen):
    """A table, the newest first, and what the run under the cursor is."""

    CSS_PATH = "runs.tcss"
    MESSAGE_ROWS = 1
    HELP_SCOPE = "runs"
    BINDINGS: ClassVar[list[BindingType]] = actions.bindings("runs")

    def __init__(self) -> None:
        super().__init__()
        self._entries: tuple[Entry, ...] | None = None
        self._lister = _Lister()
        self._poller: Poller[tuple[Entry, ...]] | None = None
        self._problem = ""
        self._marked: list[str] = []
        """Ids, in the order in which they were marked: the first is the base of a comparison."""

    def compose_body(self) -> ComposeResult:
        yield Table(id="table")
        yield LineView(id="about")

    @property
    def table(self) -> Table:
        return self.query_one("#table", Table)

    @property
    def entry(self) -> Entry | None:
        """The run under the cursor."""
        row = self.table.row
        return next((e for e in self._entries or () if row is not None and e.id == row.id), None)

    # ---- life

    def on_mount(self) -> None:
        self.set_focus(self.table)
        self._poller = Poller(
            self.app,
            self._lister.take,
            self._took,
            self._failed,
            lambda: max(TICK, self.dstui.profile.tick),
            close=self._lister.close,
            name="runs",
        )
        self._poller.start()

    def on_unmount(self) -> None:
        if self._poller is not None:
            self._poller.stop()

    def on_screen_suspend(self) -> None:
        self.call_later(self._pause_unless_visible)

    def _pause_unless_visible(self) -> None:
        if self._poller is not None and not self.is_current and not isinstance(self.app.screen, ModalScreen):
            self._poller.pause()

    def on_screen_resume(self) -> None:
        if self._poller is not None:
            self._poller.resume()
        self.call_after_refresh(self.redraw)

    def _took(self, entries: tuple[Entry, ...]) -> None:
        self._entries = entries
        self._problem = ""
        self.redraw()
        if self._lister.behind and self._poller is not None:
            self._poller.poke()

    def _failed(self, error: Exception) -> None:
        text = error.message if isinstance(error, DstuiError) else f"{type(error).__name__}: {error}"
        hint = (error.hint or "") if isinstance(error, DstuiError) else self.dstui.record(error)
        if text != self._problem:
            self._problem = text
            self.say(f"{text}. {hint}", "bad", "! ")

    # ---- drawing

    def on_line_view_resized(self) -> None:
        self._draw()

    def help_text(self) -> str:
        return _(
            "Every run of this state folder, the newest first. Nothing here ends a run unless asked twice."
        )

    def redraw(self) -> None:
        if self.tiny or not self.size:
            return
        self._draw_frame()
        self._draw()

    def _draw_frame(self) -> None:
        count = len(self._entries or ())
        live = sum(1 for e in self._entries or () if e.state in LIVE)
        right = ngettext("{n} run", "{n} runs", count).format(n=count)
        if live:
            right += "  " + _("{n} alive").format(n=live)
        self.set_title(_("runs"), right if self._entries is not None else "")
        self.set_keys(self._keys())

    def _keys(self) -> list[tuple[str, str]]:
        entry = self.entry
        if entry is None:
            return [("Left", _("start"))]
        keys = [("Enter", _("watch")), ("l", _("log")), ("o", _("config in the wizard"))]
        keys += [("s", _("stop"))] if entry.state in LIVE else [("r", _("replay")), ("x", _("forget"))]
        if self._marked:
            keys.insert(0, ("c", _("compare")))
        keys.insert(1, ("Space", _("mark")))
        return [*keys, ("Left", _("start"))]

    def _draw(self) -> None:
        if self.tiny or not self.size:
            return
        if self._entries is None:
            self.view("about").show([])
            self.table.load([], [Column(_("reading the runs ..."))])
            return
        if not self._entries:
            self.table.load([], [Column(_("there are no runs yet"))])
            rows: list[Line] = wrapped(
                _("Start one: Recommended on the start screen, or in a shell: dstui demo"),
                self.size.width - 6, "", "   ", cut=self.glyphs.cut,
            )  # fmt: skip
            self.view("about").show(rows)
            return
        now = time.time()
        self.table.load([self._row(e, now) for e in self._entries], self._columns())
        self._lister.wanted = tuple(r.id for r in self.table.shown_rows)
        self._draw_about()

    def _columns(self) -> list[Column]:
        return [
            Column(_("state")),
            Column(_("run")),
            Column(_("name"), grow=True),
            Column(_("started"), weight=1),
            Column(_("time"), weight=4),
            Column(_("step")),
            Column(_("loss")),
            Column(_("config"), grow=True, weight=3),
        ]

    def _row(self, e: Entry, now: float) -> Row:
        letter, word, _role = state_word(e.state)
        shot = e.shot
        step = loss = ran = ""
        if shot is not None:
            if shot.step is not None:
                step = f"{shot.step}/{shot.total}" if shot.total else str(shot.step)
            elif shot.phase is not None:
                step = _(dict(PHASES).get(shot.phase.name, shot.phase.name))
            loss = "" if shot.loss is None else f"{shot.loss:.4f}"
            end = shot.ended_at if shot.over else now
            ran = (
                ""
                if end is None
                else duration(end - (shot.started or shot.created))
                if shot.over
                else rough(now - (shot.started or shot.created))
            )
        role = {"failed": "bad", "lost": "bad", "stalled": "warn"}.get(
            e.state, "" if e.state in LIVE else "dim"
        )
        name = _("damaged") if e.problem else e.name or Path(e.script).name
        mark = f"{self.glyphs.ticked} " if e.id in self._marked else ""
        cells = (
            f"{mark}{letter} {word}",
            e.id,
            name,
            _("{age} ago").format(age=rough(now - e.created)),
            ran,
            step,
            loss,
            e.config,
        )
        return Row(e.id, cells, role)

    def _draw_about(self) -> None:
        """How the run under the cursor stands, in three rows."""
        e = self.entry
        view = self.view("about")
        if e is None:
            view.show([])
            return
        cells, g = self.size.width, self.glyphs
        rows: list[Line] = [rule(e.name or e.id, cells, g)]
        shot = e.shot
        if e.problem:
            rows += wrapped(e.problem, cells - 2, "bad", " ", limit=2, cut=g.cut)
        elif shot is not None and shot.ending is not None:
            end = shot.ending
            text = end.text[:1].upper() + end.text[1:]
            if end.cause:
                text += f"  {end.cause} {end.cause_name}"
            rows += wrapped(text, cells - 2, "", " ", limit=2, cut=g.cut)
        elif shot is not None and shot.log:
            rows.append(line(f" {g.vline} {clip(shot.log[-1], cells - 4, g.cut)}"))
        where = f"{e.script}  {g.dot} {e.host}" if e.script else e.host
        rows.append(line((" " + clip_middle(where, cells - 2, g.cut), "dim")))
        view.show([BLANK, *rows])

    def on_table_moved(self, message: Table.Moved) -> None:
        self._lister.wanted = tuple(r.id for r in self.table.shown_rows)
        self._draw_about()
        self.set_keys(self._keys())
        if message.by_key:
            self.say("")

    # ---- actions

    def action_join(self) -> None:
        if self.entry is not None:
            self.dstui.open_run(self.entry.id)

    def action_log(self) -> None:
        if self.entry is None:
            return
        self.dstui.open_run(self.entry.id)

        def show() -> None:
            from dstui.tui.screens.monitor import MonitorScreen

            if isinstance(self.app.screen, MonitorScreen):
                self.app.screen.action_log()

        self.app.call_after_refresh(show)

    def action_replay(self) -> None:
        if self.entry is None or self.entry.problem:
            return
        if self.entry.state in LIVE:
            self.say(_("the run goes on: it can be played back once it has ended"), "warn")
        else:
            self.dstui.open_run(reference(store.find_run(self.entry.id), REPLAY_SPEED))

    def action_mark(self) -> None:
        if self.entry is None:
            return
        if self.entry.id in self._marked:
            self._marked.remove(self.entry.id)
        elif not self.entry.problem:
            self._marked.append(self.entry.id)
        self._draw_frame()
        self._draw()

    def action_compare(self) -> None:
        there = {e.id for e in self._entries or ()}
        chosen = [i for i in self._marked if i in there]
        if len(chosen) == 1 and self.entry is not None and self.entry.id not in chosen:
            chosen.append(self.entry.id)
        if len(chosen) < 2:
            self.say(_("mark two runs or more with Space, the base first"))
            return
        from dstui.tui.screens.compare import CompareScreen

        self.app.push_screen(CompareScreen(chosen))

    def action_back(self) -> None:
        self.app.switch_mode("start")

    def action_stop(self) -> None:
        self._ask_stop(False)

    def action_stop_now(self) -> None:
        self._ask_stop(True)

    def _ask_stop(self, now: bool) -> None:
        e = self.entry
        if e is None:
            return
        if e.state not in (*LIVE, "lost"):
            self.say(_("the run has ended already; x forgets it"))
            return
        self.app.push_screen(stop_question(e.name or e.id, now), partial(self._stop_answered, e.id))

    def _stop_answered(self, run_id: str, answer: str | None) -> None:
        if answer not in ("s", "S"):
            return
        self.say(_("stopping {id} ...").format(id=run_id))
        self.dstui.jobs.run(f"stop-{run_id}", partial(stop_run, run_id, answer == "S"), self._done)

    def action_forget(self) -> None:
        e = self.entry
        if e is None:
            return
        if e.state in LIVE:
            self.say(_("the run is alive: stop it first (s)"), "warn")
            return
        question = _("Forget the run {name}? Its log, samples and config copy are deleted.").format(
            name=f"{e.name} {e.id}".strip()
        )
        self.app.push_screen(
            Ask(question, [("x", _("delete it"))], _("Checkpoints that the script wrote elsewhere stay.")),
            partial(self._forget_answered, e.id),
        )

    def _forget_answered(self, run_id: str, answer: str | None) -> None:
        if answer == "x":
            self.dstui.jobs.run(f"forget-{run_id}", partial(_forget, run_id), self._done)

    def _done(self, text: str) -> None:
        self.say(text)
        if self._poller is not None:
            self._poller.poke()

    def action_open_config(self) -> None:
        e = self.entry
        if e is None:
            return

        def work() -> Any:
            return run_config(store.find_run(e.id), self.dstui.cwd)

        self.dstui.jobs.run("run-config", work, lambda document: self.dstui.begin(document=document))


def _forget(run_id: str) -> str:
    from dstui.runs.control import refuse_living, remove

    run = store.find_run(run_id)
    refuse_living(run)
    remove(run)
    return _("run {id} is forgotten").format(id=run_id)


def run_config(run: RunDir, cwd: Path) -> Any:
    """The run's config as a Document: the file it was made from where that is still there, else the run's copy
    under the name of a new file in ``cwd`` (the copy itself is never written to). Raises DstuiError."""
    from dstui.config.document import Document, read
    from dstui.runs.rerun import own_config

    source = (run.manifest.get("config") or {}).get("source")
    if source and Path(str(source)).is_file():
        return read(str(source))
    return Document.parse(own_config(run).text, str(cwd / "ds_config.json"))
