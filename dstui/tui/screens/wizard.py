"""The wizard: steps on the left, one step's fields in the middle, the live answer on the right.

The screen holds only what is on it: the step, the panel's page, which steps were left decided. Every value is
the session's. A change is set at once, the report is computed in the background 120 ms after the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.message import Message
from textual.timer import Timer

from dstui.i18n import N_, _, ngettext
from dstui.session.model import STEPS, Report
from dstui.tui import actions
from dstui.tui.machine import title_right
from dstui.tui.screens import review
from dstui.tui.screens.base import BaseScreen
from dstui.tui.text import Line, line, pad, width, wrapped
from dstui.tui.widgets import panel
from dstui.tui.widgets.form import NUMBERS, Form
from dstui.tui.widgets.lines import LineView

if TYPE_CHECKING:
    from dstui.session import Session

DEBOUNCE = 0.02
"""Seconds after the last change before the report is computed: keys that come in one piece make one report.

More would be felt: an answer is due 150 ms after its key, and is computed in a thread, one at a time.
"""
NAMES: dict[str, str] = {
    "machine": N_("Machine"),
    "script": N_("Script"),
    "model": N_("Model"),
    "stage": N_("ZeRO stage"),
    "offload": N_("Offload"),
    "batch": N_("Batch"),
    "pinned": N_("Pinned memory"),
    "comm": N_("Communication"),
    "precision": N_("Precision"),
    "review": N_("Review"),
}
"""Short names of the steps for the rail."""
PAGES = ("fit", "findings", "file")
PAGE_NAMES: dict[str, str] = {"fit": N_("Fit"), "findings": N_("Findings"), "file": N_("File")}
OFFLOADS: dict[str, str] = {
    "none": N_("no offload"),
    "optimizer": N_("offload opt."),
    "param": N_("offload param."),
    "both": N_("offload both"),
}
SLOW_DECIDING = ("pinned", "review")
"""Steps whose deciding line needs the report."""


class Rail(LineView):
    """The list of steps. With the focus on it, Up and Down change the step."""

    class Step(Message):
        def __init__(self, delta: int) -> None:
            super().__init__()
            self.delta = delta

    class Left(Message):
        """Back to the fields."""

    def key_up(self) -> None:
        self.post_message(self.Step(-1))

    def key_down(self) -> None:
        self.post_message(self.Step(1))

    def key_enter(self) -> None:
        self.post_message(self.Left())


class WizardScreen(BaseScreen):
    """Ten steps; see the module's text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *actions.bindings("wizard"),
        *(Binding(key, f"jump({n})", show=False) for n, key in enumerate(actions.JUMPS)),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._step = 0
        self._done: set[str] = set()
        self._seen: set[str] = set()
        self._page = "all"
        self._panel_open = False
        self._report: Report | None = None
        self._fresh = False
        self._broken = ""
        """Why the last report could not be made: an error of ours, never of the person."""
        self._session: Session | None = None
        self._timer: Timer | None = None
        self._computing = False
        self._review = review.Review()

    # ---- structure

    def compose_body(self) -> ComposeResult:
        with Container(id="body"):
            yield Rail(id="rail", keys=True)
            yield LineView(id="sep")
            with Container(id="pane"):
                yield LineView(id="head")
                yield Form(id="form")
                yield LineView(id="detail", keys=True)
                yield LineView(id="signal")
            yield LineView(id="sep2")
            yield LineView(id="panel", keys=True)
        yield LineView(id="status")

    @property
    def form(self) -> Form:
        return self.query_one("#form", Form)

    @property
    def session(self) -> Session:
        return self.dstui.session

    @property
    def step_id(self) -> str:
        return STEPS[self._step].id

    @property
    def fresh(self) -> bool:
        """Whether the report belongs to the values as they are."""
        return self._fresh

    @property
    def settled(self) -> bool:
        """Whether nothing is scheduled or being computed."""
        return self._timer is None and not self._computing

    @property
    def report(self) -> Report | None:
        """The last report; None before the first."""
        return self._report

    def on_mount(self) -> None:
        self.set_focus(self.form)
        self.watch(self.app, "facts", self._facts_changed, init=False)

    def on_screen_resume(self) -> None:
        if self.dstui.session is not self._session:
            self._session = self.dstui.session
            self._step = 0
            self._done, self._seen = set(), set()
            self._report, self._fresh = None, False
            self._panel_open = False
            self.set_class(False, "-panel", "-review")
            self.set_focus(self.form)
            if self.dstui.facts is not None:
                self.session.set_facts(self.dstui.facts)
            self._changed()
        self.call_after_refresh(self.redraw)

    def _facts_changed(self) -> None:
        if self._session is not None:
            self.session.set_facts(self.dstui.facts)
            self._changed()
            self.redraw()

    def on_line_view_resized(self, message: LineView.Resized) -> None:
        """A view has come, or has another width."""
        if self._session is None or self.tiny:
            return
        if message.view.id in ("panel", "detail"):
            self._draw_answer()
        elif message.view.id == "head":
            self._draw_head()
        elif message.view.id == "form":
            self._draw_help()
        elif message.view.id == "signal":
            self._draw_signal()

    def help_text(self) -> str:
        """For the top of the help page: this step and its signal."""
        step = STEPS[self._step]
        return f"{step.title}. {step.signal}"

    # ---- report

    def _changed(self) -> None:
        self._fresh = False
        self._review.forget()
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(DEBOUNCE, self._compute)

    def _compute(self) -> None:
        self._timer = None
        if self._computing:
            self._timer = self.set_timer(DEBOUNCE, self._compute)
            return
        self._computing = True
        session = self.session
        copy = session.fork()

        def current() -> bool:
            """Whether nothing was changed since; else a later change has asked again."""
            return session is self._session and self._timer is None

        def glanced(report: Report | None) -> None:
            if not self.is_mounted:
                self._computing = False
                return
            if report is not None and current():
                self._report = report
                self._draw_answer()
            self.dstui.jobs.run("report", copy.report, done, failed)

        def done(report: Report) -> None:
            self._computing = False
            if not self.is_mounted or not current():
                return
            stale = session.adopt(report)
            self._fresh = True
            self._broken = ""
            self._report = report
            if stale:  # the recommendation was computed with the report
                self.form.load(self.step_id, session.fields(self.step_id), typing=self.step_id != "review")
                self._draw_head()
            self._draw_answer()

        def failed(error: BaseException) -> None:
            self._computing = False
            if not self.is_mounted:
                return
            self._broken = f"{type(error).__name__}: {error}. {self.dstui.record(error)}"
            self._draw_answer()

        self.dstui.jobs.run("report", copy.glance, glanced, failed)

    # ---- drawing

    def redraw(self) -> None:
        if self._session is None or self.tiny:
            return
        self._draw_title()
        self._draw_step()
        self._draw_answer()

    def _draw_title(self) -> None:
        document = self.session.document
        left = document.path if document is not None else _("new config")
        self.set_title(str(left), title_right(self.dstui.facts))

    def _draw_rail(self) -> None:
        g = self.glyphs
        view = self.view("rail")
        cells = view.size.width
        focused = self.focused is view
        rows: list[Line] = []
        for n, step in enumerate(STEPS):
            if self._problem(step.id):
                mark, role = g.problem, "bad"
            elif step.id in self._done:
                mark, role = g.done, "good"
            elif step.id in self._seen and n != self._step and step.id != "review":
                mark, role = g.skipped, "dim"
            else:
                mark, role = " ", ""
            name = pad(f"{(n + 1) % 10} {_(NAMES[step.id])}", cells - 4, g.cut)
            if n == self._step:
                rows.append(line((f" {mark} ", role), (name, "cursor"), (g.left if focused else " ", "key")))
            else:
                rows.append(line((f" {mark} ", role), (name, "" if step.id in self._done else "dim")))
        rows += [(), *self._summary(cells)]
        view.show(rows)
        for sep in ("sep", "sep2"):
            height = self.view("body" if sep == "body" else sep).size.height
            self.view(sep).show([line((g.vline, "dim"))] * height)

    def _summary(self, cells: int) -> list[Line]:
        """What was decided, in four words each."""
        s = self.session
        values = {f: s.field(f) for f in ("engine", "stage", "offload", "precision", "global_batch")}
        chosen = {
            f: next((o.label for o in v.options if o.value == v.value), v.text) for f, v in values.items()
        }
        rows = [
            chosen["engine"],
            f"ZeRO {values['stage'].value}",
            _(OFFLOADS[values["offload"].value]),
            f"{chosen['precision']}",
            _("batch {n}").format(n=values["global_batch"].text),
        ]
        if self._report is not None:
            rows.append(
                ngettext("{n} rank", "{n} ranks", self._report.world_size).format(n=self._report.world_size)
            )
        return [line(("   " + pad(text, cells - 4, self.glyphs.cut), "dim")) for text in rows]

    def _problem(self, step_id: str) -> bool:
        if step_id == "review":
            return bool(self._report and self._fresh and self._report.blockers)
        return bool(self.session.problems(step_id))

    def _draw_step(self) -> None:
        step = STEPS[self._step]
        reviewing = step.id == "review"
        self.set_class(reviewing, "-review")
        self._draw_rail()
        self._draw_head()
        self.form.load(step.id, self.session.fields(step.id), typing=not reviewing)
        self._draw_signal()
        self._draw_help()

    def _draw_signal(self) -> None:
        """The bottom of the pane: what tells that this step is the culprit."""
        view = self.view("signal")
        view.styles.height = height = 1 if self.step_id == "review" else 3
        if not view.size.width:  # hidden by the panel: drawn when it comes back
            return
        head = _("Culprit when:")
        rows = wrapped(
            f"{head} {STEPS[self._step].signal}",
            view.size.width - 2,
            "dim",
            " ",
            limit=height,
            cut=self.glyphs.cut,
        )
        first = rows[0][0][0]
        if first.startswith(" " + head):
            rows[0] = line((" " + head, "accent"), (first[1 + len(head) :], "dim"))
        view.show([*[()] * (height - len(rows)), *rows])

    def _draw_head(self) -> None:
        step = STEPS[self._step]
        head = self.view("head")
        tall = self.size.height >= 30
        head.styles.height = 2 if step.id == "review" and not tall else 4 if tall else 3
        cells = head.size.width
        if not cells:  # hidden by the panel: drawn when it comes back
            return
        right = _("step {n} of {all}").format(n=self._step + 1, all=len(STEPS))
        title = step.title
        gap = max(1, cells - width(title) - width(right) - 2)
        deciding = ""
        if self._fresh or step.id not in SLOW_DECIDING:
            deciding = self.session.deciding(step.id)
        if step.id == "review" and self._report is not None and deciding:
            estimate = self._report.estimate
            if not self._report.blockers and estimate is not None and not estimate.reason:
                deciding = panel.verdict_word(estimate)[0]
        rows = [line((" " + title, "title"), " " * gap, (right, "dim"))]
        rows += wrapped(deciding, cells - 1, "strong", " ", limit=2, cut=self.glyphs.cut)
        head.show(rows)

    def _draw_help(self) -> None:
        """Message rows (what the field means) and the key line (what the keys do here)."""
        f, o = self.form.field, self.form.option
        if f is None:
            self.say("")
        else:
            parts = []
            if o is not None and not o.enabled:
                parts.append(_("not possible: {why}").format(why=o.why_not))
            elif o is not None and self.form.note_is_cut:
                parts.append(f"{o.label.strip()}: {o.note}")
            if f.help:
                parts.append(f"{f.label}: {f.help}")
            if f.recommended_reason:
                parts.append(_("recommended: {reason}").format(reason=f.recommended_reason))
            self.say((f" {self.glyphs.dot} ").join(parts), "")
        self.set_keys(self._keys(), typing=self.focused is self.form and self.form.takes_text)

    def _keys(self) -> list[tuple[str, str]]:
        f = self.form.field
        if self.focused is self.view("rail"):
            return [("Up/Down", _("step")), ("Enter", _("fields")), ("1-0", _("jump"))]
        if self.focused in (self.view("panel"), self.view("detail")):
            keys = [("Up/Down", _("scroll")), ("v", _("next page")), ("Tab", _("fields"))]
            return [*keys, ("Esc", _("close"))] if not self.wide and self._panel_open else keys
        if self.form.editing:
            keys = [("Enter", _("take")), ("Esc", _("undo")), ("^U", _("clear"))]
            return [*keys, ("Tab", _("complete"))] if f is not None and f.kind == "path" else keys
        if self.step_id == "review":
            return [
                ("Enter", _("launch")), ("w", _("write only")), ("s", _("save as preset")), ("t", _("trial")),
                ("Space", _("edit")), ("v", _("fit, findings")), ("Tab", _("scroll")), ("Left", _("back")),
            ]  # fmt: skip
        text = self.form.takes_text
        keys = [("Enter", _("next") if self.form.would_finish() else _("choose"))]
        if f is not None and f.kind == "multi":
            keys.append(("Space", _("tick")))
        elif f is not None and f.kind == "bool":
            keys.append(("Space", _("yes/no")))
        elif text or (f is not None and f.kind in NUMBERS):
            keys.append((_("typing"), _("change")))
        keys += [
            ("^A" if text else "A", _("accept rest")),
            ("F2" if text else "v", _("fit, file")),
            ("Left", _("back")),
            ("Right", _("skip")),
        ]
        return keys

    def _draw_answer(self) -> None:
        """Everything that follows from the report."""
        g = self.glyphs
        if self._session is None or self.tiny:
            return
        status = self.view("status")
        if self._broken:
            text = _("the check failed, a mistake of dstui: {error}").format(error=self._broken)
            status.show([line((" " + text, "bad"))])
        else:
            status.show([panel.status_line(self._report, status.size.width, g)])
        self._draw_rail()
        self._draw_head()
        view = self.view("panel")
        if view.size.width:
            view.show(self._panel_rows(view.size.width - 2))
        if self.step_id == "review":
            self.draw_review()

    def _panel_rows(self, cells: int) -> list[Line]:
        g = self.glyphs
        page = self._page
        if not self.wide and page == "all":
            page = "fit"
        r = self._report
        head: list[tuple[str, str] | str] = []
        for name in PAGES:
            label = _(PAGE_NAMES[name])
            if name == "findings" and r is not None:
                label += f" {panel.count(r)}"
            head += [
                (f" {label} ", "cursor" if page == name else "strong"),
                " ",
            ]
        rows: list[Line] = [line(*head) if page != "all" else line((" " + _("live answer"), "title"))]
        bodies = {
            "fit": lambda: panel.fit_lines(r, cells, g),
            "findings": lambda: panel.finding_lines(r, cells, g, limit=4 if page == "all" else None),
            "file": lambda: panel.json_lines(r.config_text if r else "", cells, g),
        }
        for name in PAGES:
            if page not in (name, "all"):
                continue
            if page == "all":
                title = _(PAGE_NAMES[name]) + " "
                rows.append(line((title, "title"), (g.hline * max(0, cells - width(title)), "dim")))
            rows += bodies[name]()
            if page == "all" and name != "file" and rows[-1]:
                rows.append(())
        return (
            [rows[0], (), *(line(" ", *r) for r in rows[1:])]
            if page != "all"
            else [line(" ", *r) for r in rows[1:]]
        )

    # ---- moving

    def show_step(self, index: int) -> None:
        """Go to a step (0-based); the one left counts as seen."""
        self._seen.add(self.step_id)
        self._step = max(0, min(index, len(STEPS) - 1))
        self.say("")
        self._close_panel()
        self._draw_step()
        self._draw_answer()

    def _close_panel(self) -> None:
        if self._panel_open:
            self._panel_open = False
            self.set_class(False, "-panel")
            self.set_focus(self.form)

    def on_rail_step(self, message: Rail.Step) -> None:
        self.show_step(self._step + message.delta)

    def on_rail_left(self) -> None:
        self.set_focus(self.form)
        self.call_after_refresh(self._refocused)

    def _refocused(self) -> None:
        self._draw_rail()
        self._draw_help()

    def action_steps(self) -> None:
        """Tab: the form, the list of steps, what scrolls, and round again."""
        ring: list[LineView] = [self.form, self.view("rail")]
        if self.step_id == "review":
            ring.insert(1, self.view("detail"))
        if self.wide:
            ring.append(self.view("panel"))
        if self._panel_open and not self.wide:
            self._close_panel()
            return
        here = self.focused if isinstance(self.focused, LineView) else self.form
        at = ring.index(here) if here in ring else 0
        self.set_focus(ring[(at + 1) % len(ring)])
        self.call_after_refresh(self._refocused)

    def action_back(self) -> None:
        if self._panel_open:
            self._close_panel()
            self._draw_step()
        elif self.focused is not self.form:
            self.on_rail_left()
        elif self._step == 0:
            self.app.switch_mode("start")
        else:
            self.show_step(self._step - 1)

    def action_skip(self) -> None:
        if self._step + 1 < len(STEPS):
            self.show_step(self._step + 1)

    def action_jump(self, n: int) -> None:
        self.show_step(n)

    def action_accept_all(self) -> None:
        self.session.accept_rest()
        self._done = {s.id for s in STEPS if s.id != "review" and not self.session.problems(s.id)}
        self._changed()
        self.show_step(len(STEPS) - 1)

    def action_panel(self) -> None:
        if self.wide:
            order = ("all", *PAGES)
            self._page = order[(order.index(self._page) + 1) % len(order)]
            self.view("panel").scroll_rows(-10_000)
        else:
            pages = list(PAGES)
            if not self._panel_open:
                self._panel_open = True
                self._page = pages[0]
            elif self._page == pages[-1]:
                self._close_panel()
                self.call_after_refresh(self.redraw)
                return
            else:
                self._page = pages[pages.index(self._page) + 1]
            self.set_class(True, "-panel")
            self.set_focus(self.view("panel"))
        self.call_after_refresh(self._draw_help)
        self._draw_answer()

    # ---- fields

    def on_form_moved(self) -> None:
        self._draw_help()

    def on_form_changed(self, message: Form.Changed) -> None:
        self.session.set(message.field_id, message.value)
        self._field_changed()

    def on_form_reset(self, message: Form.Reset) -> None:
        self.session.unset(message.field_id)
        self._field_changed()

    def _field_changed(self) -> None:
        self._changed()
        self.form.load(self.step_id, self.session.fields(self.step_id), typing=self.step_id != "review")
        self._draw_rail()
        self._draw_head()
        self._draw_help()

    def on_form_finished(self) -> None:
        if self.step_id == "review":
            self.action_launch()
            return
        problems = self.session.problems(self.step_id)
        if problems:
            self.form.focus_field(problems[0][0])
            self.say(
                _("this step has a problem: {why} (Right goes on without it)").format(why=problems[0][1]),
                "bad",
            )
            return
        self.session.accept(self.step_id)
        self._done.add(self.step_id)
        self.show_step(self._step + 1)

    # ---- review

    def draw_review(self) -> None:
        """Draw the lower part of the last step, when that is shown."""
        if self.step_id != "review":
            return
        self._review.prepare(self)
        view = self.view("detail")
        if self._report is None or not view.size.width:
            return
        rows = self._review.rows(self._report, view.size.width - 2, self.glyphs)
        view.show([line(" ", *row) for row in rows])

    def action_write(self) -> None:
        """Write the config; ask first where a file would be replaced."""
        if self.step_id != "review":
            self.show_step(len(STEPS) - 1)
            return
        self._review.write(self)

    def action_keep(self) -> None:
        """Save the config as a preset of the person's."""
        if self.step_id != "review":
            self.show_step(len(STEPS) - 1)
            return
        self._review.keep(self)

    def action_launch(self) -> None:
        """Start the run and show it."""
        if self.step_id != "review":
            self.show_step(len(STEPS) - 1)
            return
        self._review.launch(self)

    def action_trial(self) -> None:
        """Start a few steps of the run, to be measured, and show them."""
        if self.step_id != "review":
            self.show_step(len(STEPS) - 1)
            return
        self._review.try_out(self)
