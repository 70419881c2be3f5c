"""The last step's lower part: what will be written, what will be run, and doing both."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dstui import paths
from dstui.config import presets
from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.session.model import Report
from dstui.tui.screens.ask import Ask
from dstui.tui.screens.presets import name_rule, new_name
from dstui.tui.screens.prompt import Prompt
from dstui.tui.terminal import Glyphs
from dstui.tui.text import SEVERITY_ROLE, Line, clip_middle, line, width, wrapped
from dstui.tui.widgets import panel

if TYPE_CHECKING:
    from dstui.config.presets import Preset
    from dstui.facts.model import Facts
    from dstui.runs.preflight import Problem
    from dstui.session import Session
    from dstui.session.model import Written
    from dstui.tui.screens.wizard import WizardScreen


@dataclass(frozen=True)
class Prepared:
    """What the review shows beside the report, computed off the event loop."""

    target: str
    exists: bool
    diff: str
    command: str
    """The command line of the run; ``""`` when it cannot be made."""
    env: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    """What preflight found, errors first."""


def _prepare(session: Session, facts_now: Callable[[], Facts] | None) -> Prepared:
    target = session.target()
    command = ""
    env: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    try:
        spec = session.run_spec()
        if facts_now is not None:
            from dstui.runs.command import build
            from dstui.runs.preflight import preflight

            facts = facts_now()
            problems = preflight(spec, facts)
            folder = paths.runs_dir() / "RUN"
            built = build(spec, facts, folder)
            command = shlex.join(built.argv).replace(str(folder), "RUN")
            env = tuple(f"{k}={v}".replace(str(folder), "RUN") for k, v in built.env.items() if k != "PATH")
    except DstuiError:
        pass  # a blocker of the report, or an error that preflight has named
    return Prepared(str(target), target.exists(), session.diff(), command, env, problems)


class Review:
    """Belongs to one wizard screen; holds what was computed and whether a run is being started."""

    def __init__(self) -> None:
        self._prepared: Prepared | None = None
        self._preparing = False
        self._starting = False
        self._generation = 0
        self._then: Callable[[WizardScreen], None] | None = None
        """What was asked for while it was being computed."""

    def forget(self) -> None:
        """A value changed: what was prepared is stale, what was asked for is taken back."""
        self._then = None
        self._prepared = None
        self._generation += 1

    def prepare(self, screen: WizardScreen) -> None:
        """Compute difference and command in the background, once for each report."""
        if self._prepared is not None or self._preparing or not screen.fresh:
            return
        self._preparing = True
        generation = self._generation
        copy = screen.session.fork()
        facts_now = None if screen.dstui.facts is None else screen.dstui.facts_now

        def done(prepared: Prepared) -> None:
            self._preparing = False
            if generation != self._generation:
                self.prepare(screen)
                return
            self._prepared = prepared
            screen.draw_review()
            then, self._then = self._then, None
            if then is not None and screen.step_id == "review":
                then(screen)

        def failed(error: BaseException) -> None:
            self._preparing = False
            self._then = None
            screen.dstui.fail(error)

        screen.dstui.jobs.run("review", lambda: _prepare(copy, facts_now), done, failed)

    # ---- doing

    def write(self, screen: WizardScreen) -> None:
        """Write the config; a file that is there and differs is asked about first."""
        p, report = self._prepared, screen.report
        if p is None or report is None or not screen.fresh:
            self._then = self.write
            screen.say(_("computing, then writing ..."))
            return
        if report.blockers:
            screen.say(_("not written: {why}").format(why=report.blockers[0]), "bad")
            return
        if p.exists and not p.diff:
            screen.say(_("{path} already says this; nothing to write").format(path=p.target), "good")
            return
        if not p.exists:
            self._write(screen)
            return
        added = sum(row.startswith("+") and not row.startswith("+++") for row in p.diff.splitlines())
        removed = sum(row.startswith("-") and not row.startswith("---") for row in p.diff.splitlines())
        question = Ask(
            _("Replace {path}? {added} lines come, {removed} go.").format(
                path=p.target, added=added, removed=removed
            ),
            [("w", _("write; the old file is kept as a backup"))],
        )
        screen.app.push_screen(question, lambda answer: self._write(screen) if answer == "w" else None)

    def _write(self, screen: WizardScreen) -> None:
        session = screen.session

        def done(written: Written) -> None:
            self.forget()
            self.prepare(screen)
            text = _("written: {path}").format(path=written.path)
            if written.backup is not None:
                text += "; " + _("the old file is {path}").format(path=written.backup)
            screen.say(text, "good")

        screen.dstui.jobs.run("write", session.fork().write, done, lambda error: _failed(screen, error))

    def keep(self, screen: WizardScreen) -> None:
        """Ask for a name and save the config as a preset."""
        report = screen.report
        if report is None or not screen.fresh:
            self._then = self.keep
            screen.say(_("computing, then saving ..."))
            return
        if report.blockers:
            screen.say(_("not saved: {why}").format(why=report.blockers[0]), "bad")
            return
        session = screen.session.fork()

        def answered(name: str | None) -> None:
            if not name:
                return
            screen.dstui.jobs.run(
                "preset",
                lambda: session.save_preset(name),
                lambda _preset: screen.say(_("saved: {name}").format(name=name), "good"),
                lambda error: _failed(screen, error),
            )

        def ask(taken: tuple[Preset, ...]) -> None:
            if screen.is_current and screen.step_id == "review":
                offered = new_name("mine", {p.name for p in taken})
                screen.app.push_screen(Prompt(_("save as preset"), offered, name_rule()), answered)

        screen.dstui.jobs.run("presets", presets.list_presets, ask, lambda error: _failed(screen, error))

    def launch(self, screen: WizardScreen) -> None:
        """Start the run in the background and open the monitor on it."""
        self._start(screen, self.launch, trial=False)

    def try_out(self, screen: WizardScreen) -> None:
        """The same for a few measured steps; the monitor's page "plan" then has what they took, by phase."""
        self._start(screen, self.try_out, trial=True)

    def _start(
        self,
        screen: WizardScreen,
        again: Callable[[WizardScreen], None],
        *,
        trial: bool,
        share_gpus: bool = False,
    ) -> None:
        report = screen.report
        if self._starting:
            return
        if self._prepared is None or report is None or not screen.fresh:
            self._then = again
            screen.say(_("computing, then starting ..."))
            return
        stops = report.stops
        if stops or screen.dstui.facts is None:
            screen.say(_("not started: {why}").format(why=stops[0] if stops else _("no facts yet")), "bad")
            return
        self._starting = True
        screen.say(_("starting the trial ...") if trial else _("starting the run ..."))
        copy = screen.session.fork()

        def work() -> str:
            from dstui.runs.measured import as_trial
            from dstui.runs.start import start

            spec = replace(copy.run_spec(), share_gpus=share_gpus)
            run_id = start(as_trial(spec) if trial else spec, screen.dstui.facts_now()).id
            copy.remember()
            return run_id

        def done(run_id: str) -> None:
            self._starting = False
            screen.say("")
            screen.dstui.open_run(run_id)

        def failed(error: BaseException) -> None:
            self._starting = False
            busy = _only_busy(error)
            if not busy or not screen.is_current:
                _failed(screen, error)
                return
            screen.say("")
            question = Ask(
                _("Others compute on these GPUs. Start all the same?"),
                [("s", _("share them: less memory, slower for all"))],
                "\n".join(p.message for p in busy),
            )
            screen.app.push_screen(
                question,
                lambda answer: (
                    self._start(screen, again, trial=trial, share_gpus=True) if answer == "s" else None
                ),
            )

        screen.dstui.jobs.run("launch", work, done, failed)

    # ---- drawing

    def rows(self, report: Report, cells: int, g: Glyphs) -> list[Line]:
        """What happens on ``w`` and on Enter, most important first."""
        rows: list[Line] = []
        for text in report.stops:
            rows += _marked("!", "bad", text, cells, g)
        for text in report.warnings:
            rows += _marked("W", "warn", text, cells, g)
        said = set(report.stops)
        serious = [
            f for f in report.findings if f.severity.letter != "I" and f"{f.code} {f.message}" not in said
        ]
        for f in sorted(serious, key=lambda f: f.severity.rank)[:3]:
            rows += _marked(
                f.severity.letter, SEVERITY_ROLE[f.severity.letter], f"{f.code} {f.message}", cells, g
            )
        p = self._prepared
        if p is None:
            rows.append(line((_("computing ..."), "dim")))
            return rows
        for problem in p.problems:
            error = problem.severity == "error"
            rows += _marked("!" if error else "W", "bad" if error else "warn", problem.message, cells, g)
            if problem.hint:
                rows += wrapped(f"{g.arrow} {problem.hint}", cells, "dim", "  ", cut=g.cut)
        if rows:
            rows.append(())
        if p.command:
            stopped = any(problem.severity == "error" for problem in p.problems)
            rows.append(_rule(_("would start") if stopped else _("Enter starts"), cells, g))
            rows += wrapped(p.command, cells, cut=g.cut, limit=6)
            rows += wrapped(" ".join(p.env), cells, "dim", cut=g.cut, limit=2)
            rows.append(())
        state = _("new") if not p.exists else _("changed") if p.diff else _("unchanged")
        rows.append(_rule(_("w writes {path} ({state})").format(path=p.target, state=state), cells, g))
        if p.exists and p.diff:
            rows += panel.diff_lines(p.diff, cells, g)
        else:
            rows += panel.json_lines(report.config_text, cells, g)
        return rows


def _rule(title: str, cells: int, g: Glyphs) -> Line:
    title = clip_middle(title, cells - 2, g.cut)
    return line((title + " ", "title"), (g.hline * max(0, cells - width(title) - 1), "dim"))


def _marked(mark: str, role: str, text: str, cells: int, g: Glyphs) -> list[Line]:
    first, *rest = wrapped(text, cells - 2, cut=g.cut)
    return [line((mark + " ", role), *first), *(line("  ", *r) for r in rest)]


def _only_busy(error: BaseException) -> list[Problem]:
    """The cards that others compute on, where nothing else kept a run from starting."""
    problems: tuple[Problem, ...] = getattr(error, "problems", ())
    errors = [p for p in problems if p.severity == "error"]
    return errors if all(p.code == "device-busy" for p in errors) else []


def _failed(screen: WizardScreen, error: BaseException) -> None:
    if isinstance(error, DstuiError):
        screen.say(error.message + (f". {error.hint}" if error.hint else ""), "bad")
    else:
        screen.dstui.fail(error)
