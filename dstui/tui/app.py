"""The app: modes, what screens share (facts, the run being watched), and every way out."""

from __future__ import annotations

import asyncio
import importlib
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.reactive import var
from textual.screen import Screen

from dstui import paths
from dstui.errors import DstuiError
from dstui.facts.model import Facts
from dstui.i18n import _
from dstui.tui import actions
from dstui.tui.jobs import JobDone, Jobs
from dstui.tui.lifeline import Lifeline
from dstui.tui.screens.ask import Ask
from dstui.tui.terminal import Profile, notification
from dstui.tui.typeahead import OrderedKeys

if TYPE_CHECKING:
    from dstui.config.document import Document
    from dstui.config.presets import Preset
    from dstui.session import Session


def _screen(module: str, name: str) -> Screen[Any]:
    """A mode's screen, imported when the mode is first entered."""
    made: Screen[Any] = getattr(importlib.import_module(f"dstui.tui.screens.{module}"), name)()
    return made


MODES: dict[str, tuple[str, str]] = {
    "start": ("start", "StartScreen"),
    "wizard": ("wizard", "WizardScreen"),
    "monitor": ("monitor", "MonitorScreen"),
    "runs": ("runs", "RunsScreen"),
    "presets": ("presets", "PresetsScreen"),
}
"""Mode -> (module under ``screens``, class). Each mode has its own screen stack; its screen is made once and
reads what it shows from the app: ``facts`` and ``run_id`` (both reactive: ``self.watch(self.app, "run_id", ...)``)."""


class DstuiApp(OrderedKeys):
    """``facts`` is None until detection ends. ``run_id`` names the run that the monitor shows."""

    CSS_PATH: ClassVar = ["screens/base.tcss", "screens/wizard.tcss"]
    ENABLE_COMMAND_PALETTE = False
    MODES: ClassVar[dict[str, Any]] = {name: partial(_screen, *where) for name, where in MODES.items()}
    DEFAULT_MODE = "start"
    BINDINGS = actions.bindings("app")
    ESCAPE_TO_MINIMIZE = False

    facts: var[Facts | None] = var(None)
    run_id: var[str | None] = var(None)

    def __init__(
        self,
        profile: Profile,
        *,
        facts: Facts | None = None,
        document: Document | None = None,
        watch: str | None = None,
        cwd: Path | None = None,
    ) -> None:
        """``facts``: plan for these instead of detecting. ``document``: a parsed config that the wizard opens."""
        super().__init__()
        self.theme = "ansi-dark"
        self.profile = profile
        self.cwd = cwd or Path.cwd()
        self._document = document
        self._session: Session | None = None
        self.detect_error: str | None = None
        self.jobs = Jobs(self, self.fail)
        self.touched_runs: list[str] = []
        """Ids of the runs launched or watched here, for the line printed when leaving."""
        self._given = facts
        self._watch_first = watch
        self._lifeline: Lifeline | None = None

    # ---- life

    def on_mount(self) -> None:
        if not self.is_headless:
            loop = asyncio.get_running_loop()

            def leave(code: int) -> None:
                loop.call_soon_threadsafe(partial(self.exit, return_code=code))

            self._lifeline = Lifeline(leave)
            self._lifeline.start()
        if self._watch_first:
            self.open_run(self._watch_first)
        elif self._document is not None:
            self.begin(document=self._document)
        self.call_after_refresh(self.detect)

    def on_unmount(self) -> None:
        if self._lifeline is not None:
            self._lifeline.stop()

    def detect(self) -> None:
        """Read the machine in the background; ``facts`` or ``detect_error`` follows."""
        if self._given is not None:
            self.facts = self._given
            return

        self.jobs.run("detect", self.facts_now, self._detected, self._not_detected)

    def facts_now(self) -> Facts:
        """Read in a worker's thread: who uses the GPUs changes while the app is open. Raises what detection raises."""
        if self._given is not None:
            return self._given
        from dstui.facts.detect import detect

        return detect()

    def _detected(self, facts: Facts) -> None:
        self.facts = facts

    def _not_detected(self, error: BaseException) -> None:
        self.detect_error = str(error)
        self.facts = Facts(unknown={"gpus": str(error)})

    # ---- the wizard's session

    @property
    def session(self) -> Session:
        """The wizard's session; made for the bundled demo when nothing else was chosen."""
        if self._session is None:
            self._session = self._new_session(None, None)
        return self._session

    @property
    def has_session(self) -> bool:
        return self._session is not None

    def begin(self, *, preset: Preset | None = None, document: Document | None = None) -> None:
        """Open the wizard on a new session: recommended, from a preset, or on an opened file."""
        self._session = self._new_session(preset, document)
        self.switch_mode("wizard")

    def _new_session(self, preset: Preset | None, document: Document | None) -> Session:
        from dstui.session import Session

        return Session(
            self.facts,
            cwd=self.cwd,
            document=document,
            preset=preset,
            remembers=True,
            patient=False,
        )

    # ---- errors

    def on_job_done(self, message: JobDone) -> None:
        message.deliver()

    def fail(self, error: BaseException) -> None:
        """Show an error as a question with one answer; an unexpected one is written to a file first."""
        if isinstance(error, DstuiError):
            self.push_screen(Ask(error.message, [("enter", _("go on"))], error.hint or ""))
            return
        text = _("dstui made a mistake: {kind}: {error}").format(kind=type(error).__name__, error=error)
        self.push_screen(Ask(text, [("enter", _("go on; nothing is lost"))], self.record(error)))

    def record(self, error: BaseException) -> str:
        """Write a traceback to the state folder; returns where it is, as a sentence."""
        try:
            path = paths.state_home() / "tui-error.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(traceback.format_exception(type(error), error, error.__traceback__)))
            return _("the details are in {path}").format(path=path)
        except OSError as e:
            return str(e)

    def _fatal_error(self) -> None:
        """An error in a handler ends the app. Textual prints every local variable; we say what matters."""
        if self._exception is None or self.is_headless:
            super()._fatal_error()
            return
        error = self._exception
        text = _("dstui made a mistake and had to close: {kind}: {error}").format(
            kind=type(error).__name__, error=error
        )
        self._exit_renderables.append(Text(f"{text}\n{self.record(error)}\n" + _("Runs go on: dstui runs")))
        self._close_messages_no_wait()

    # ---- actions

    def open_run(self, run_id: str) -> None:
        """Show a run in the monitor."""
        if run_id not in self.touched_runs:
            self.touched_runs.append(run_id)
        self.run_id = run_id
        self.switch_mode("monitor")

    def notify_person(self, text: str) -> None:
        """Ring the bell and hand ``text`` to the terminal's notifications, unless that is switched off."""
        if self.profile.notify and self._driver is not None and not self.is_headless:
            self._driver.write(notification(text))
            self._driver.flush()

    def action_help(self) -> None:
        from dstui.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            about = getattr(self.screen, "help_text", None)
            scope = getattr(self.screen, "HELP_SCOPE", "")
            self.push_screen(HelpScreen(about() if callable(about) else "", scope))

    def action_runs(self) -> None:
        self.switch_mode("runs")

    def action_wizard(self) -> None:
        self.switch_mode("wizard")

    def action_presets(self) -> None:
        self.switch_mode("presets")

    def action_quit_app(self) -> None:
        self.exit()

    def action_interrupt(self) -> None:
        """Ctrl+C: say once what it would do to the run, then do what is answered."""
        if isinstance(self.screen, Ask):  # a second Ctrl+C quits; in another question it only closes that
            self.screen.dismiss("q" if self.screen.id == "interrupt" else "")
            return
        live = self.live_runs()
        if live:
            self.push_screen(
                Ask(
                    _("Ctrl+C does not reach the run {id}: it goes on without this screen.").format(
                        id=live[-1]
                    ),
                    [
                        ("q", _("quit; the run goes on")),
                        ("s", _("stop the run with all its ranks, stay here")),
                    ],
                    _("join it again with: dstui watch {id}").format(id=live[-1]),
                    id="interrupt",
                ),
                partial(self._interrupted, live[-1]),
            )
        else:
            question = _("Quit? No run was started here; what was not written is dropped.")
            self.push_screen(
                Ask(question, [("q", _("quit"))], id="interrupt"), partial(self._interrupted, None)
            )

    def _interrupted(self, run_id: str | None, answer: str | None) -> None:
        if answer == "q":
            self.exit()
        elif answer == "s" and run_id is not None:
            self.stop_run(run_id)

    def stop_run(self, run_id: str) -> None:
        """End a run and all its ranks in the background."""

        def work() -> None:
            from dstui.runs.control import stop
            from dstui.runs.store import find_run

            stop(find_run(run_id))

        self.jobs.run(f"stop-{run_id}", work, lambda _result: None)

    def live_runs(self) -> list[str]:
        """Ids of the runs touched here that have not ended, oldest first."""
        from dstui.runs import store

        live = []
        for run_id in self.touched_runs:
            try:
                if store.state(store.find_run(run_id)) in store.LIVE:
                    live.append(run_id)
            except DstuiError:
                continue
        return live
