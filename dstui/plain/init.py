"""``dstui init``: the wizard line by line, for scripts and screen readers.

The questions, flags and recommended values come from the same table as the TUI's forms. Questions and messages go
to stderr, the answer to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from dstui.errors import DstuiError, Exit
from dstui.facts.describe import facts_for
from dstui.i18n import _, clauses, phrases
from dstui.session import FIELDS, STEPS, FieldView, Session, Step
from dstui.session.table import FieldSpec
from dstui.units import gib

_OWN_OPTION = {"facts_file", "output", "machine", "python"}
"""Fields whose option has another form here: --facts, -o, (by --gpus and --facts), --python for detection."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--yes",
        "-y",
        action="store_true",
        help=_("no question: recommended values where no option says otherwise"),
    )
    parser.add_argument(
        "--facts", metavar="FILE", help=_("plan for the machine in FILE (from dstui detect --json)")
    )
    parser.add_argument("--python", metavar="P", help=_("the training interpreter"))
    parser.add_argument("--preset", metavar="NAME", help=_("start from a preset (dstui preset list)"))
    parser.add_argument(
        "--from", dest="base", metavar="FILE", help=_("start from a config; what dstui does not know stays")
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=_("where to write (`-`: to stdout); default ds_config.json")
    )
    parser.add_argument("--json", action="store_true", help=_("report as JSON"))
    group = parser.add_argument_group(_("answers (each skips its question)"))
    for f in FIELDS:
        if f.id not in _OWN_OPTION:
            group.add_argument(f.flag, dest=f"field_{f.id}", metavar=_metavar(f), help=_help(f))


def _metavar(spec: FieldSpec) -> str:
    return {"bool": "yes|no", "int": "N", "float": "X", "size": "SIZE", "path": "PATH", "multi": "0,1"}.get(
        spec.kind, "VALUE"
    )


def _help(spec: FieldSpec) -> str:
    text = f"{spec.label}: {spec.help}" if spec.help else spec.label
    return text.replace("%", "%%")


def run(args: argparse.Namespace) -> int:
    asks = not args.yes
    if asks and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise DstuiError(
            _("`dstui init` asks questions and this is no terminal"),
            _(
                "give --yes and the answers as options, for example: --yes --model 7B --stage 3 --offload optimizer"
            ),
        )
    session = _open(args)
    given = _apply(session, args)
    if args.facts:
        given |= {"machine", "facts_file"}
    if asks:
        _Dialogue(session, given, sys.stdin, sys.stderr).run()
    session.accept_rest()
    problems = [f"{_flag(i)}: {error}" for i, error in session.problems()]
    views = [session.field(f.id) for f in FIELDS if getattr(args, f"field_{f.id}", None) is not None]
    problems += [f"{_flag(v.id)}: {v.why_not}" for v in views if not v.enabled]
    if problems:
        raise DstuiError(clauses(problems), _("see `dstui init --help`"))
    return _finish(session, args, asks)


def _open(args: argparse.Namespace) -> Session:
    from dstui.config import presets
    from dstui.config.document import read

    if args.preset and args.base:
        raise DstuiError(_("--preset and --from both say where to start"), _("give one of them"))
    facts = facts_for(facts=args.facts, python=args.python)
    document = read(args.base) if args.base else None
    preset = presets.load(args.preset) if args.preset else None
    return Session(facts, cwd=Path.cwd(), document=document, preset=preset, remembers=True)


def _apply(session: Session, args: argparse.Namespace) -> set[str]:
    """Set the fields that options answer; returns their ids."""
    given = set()
    if args.output and args.output != "-":
        session.set("output", args.output)
        given.add("output")
    for spec in FIELDS:
        value = getattr(args, f"field_{spec.id}", None)
        if value is not None:
            session.set(spec.id, value)
            given.add(spec.id)
    return given


def _flag(field_id: str) -> str:
    if field_id == "output":
        return "-o"
    return "--" + ("facts" if field_id == "facts_file" else field_id.replace("_", "-"))


class _Stop(Exception):
    """The person leaves before the end."""


class _Dialogue:
    """Asks field after field. ``back`` returns, ``rest`` accepts all that is left, ``?`` explains, ``quit`` leaves."""

    def __init__(self, session: Session, given: set[str], source: TextIO, sink: TextIO) -> None:
        self.session = session
        self.given = given
        self.source = source
        self.sink = sink
        self.rest = False

    def say(self, text: str = "") -> None:
        print(text, file=self.sink)

    def read(self, prompt: str) -> str:
        self.sink.write(prompt)
        self.sink.flush()
        line = self.source.readline()
        if not line:
            raise _Stop
        return line.strip()

    def run(self) -> None:
        self.say(_("Enter takes the value in brackets; also: back, rest (accept all that is left), ?, quit."))
        try:
            self._steps()
        except _Stop:
            self.say()
            raise DstuiError(_("left before the end; nothing was written"), code=Exit.INTERRUPTED) from None

    def _steps(self) -> None:
        asked: list[tuple[int, str]] = []  # (step, field) in the order asked, for `back`
        n = 0
        shown = -1
        done: set[str] = set(self.given)
        while n < len(STEPS):
            step = STEPS[n]
            field = self._next(step, done)
            if field is None:
                self.session.accept(step.id)
                n += 1
                continue
            if shown != n:
                self._title(n, step)
                shown = n
            answer = self._ask(field)
            if answer == "back":
                if asked:
                    n, last = asked.pop()
                    done.discard(last)
                    self.session.unset(last)
                    shown = n if shown == n else -1
                continue
            if answer == "rest":
                if self.session.problems():
                    self.say(_("first put right: {what}").format(what=self.session.problems()[0][1]))
                    continue
                return
            asked.append((n, field.id))
            done.add(field.id)

    def _next(self, step: Step, done: set[str]) -> FieldView | None:
        for view in self.session.fields(step.id):
            if view.enabled and (view.id not in done or view.error) and not _pointless(view):
                return view
        return None

    def _title(self, n: int, step: Step) -> None:
        self.say()
        head = _("Step {n} of {all}: {title}").format(n=n + 1, all=len(STEPS), title=step.title)
        if step.checkpoint:
            head += " " + _("(checkpoint {n})").format(n=step.checkpoint)
        self.say(head)
        self.say(_("When a run fails here: {signal}").format(signal=step.signal))
        line = self.session.deciding(step.id)
        if line:
            self.say(line)

    def _ask(self, view: FieldView) -> str:
        """``back``, ``rest`` or ``""`` when the field was answered."""
        while True:
            if view.error:
                self.say(_("  {label}: {error}").format(label=view.label, error=view.error))
            if view.options:
                self._options(view)
            unit = f" ({view.unit})" if view.unit else ""
            answer = self.read(f"{view.label}{unit} [{view.text}]: ")
            word = answer.lower()
            if word in ("back", "b", "<"):
                return "back"
            if word == "rest":
                return "rest"
            if word in ("quit", "q"):
                raise _Stop
            if word in ("?", "help"):
                self._explain(view)
                continue
            if not answer:
                if not view.error:
                    return ""
                self.session.unset(view.id)
            else:
                self.session.set(view.id, _by_number(view, answer))
            view = self.session.field(view.id)
            if not view.error:
                return ""
            if answer:  # the brackets hold what Enter takes: never the answer that was just refused
                self.say(_("  {label}: {error}").format(label=view.label, error=view.error))
                self.session.unset(view.id)
                view = self.session.field(view.id)

    def _options(self, view: FieldView) -> None:
        for i, o in enumerate(view.options, 1):
            chosen = o.value in view.value if view.kind == "multi" else o.value == view.value
            parts = [f"  {i}. {o.label}"]
            if o.note:
                parts.append(f"- {o.note}")
            if not o.enabled:
                parts.append(_("(not here: {why})").format(why=o.why_not))
            if chosen:
                parts.append(_("(chosen)"))
            self.say(" ".join(parts))

    def _explain(self, view: FieldView) -> None:
        if view.help:
            self.say("  " + view.help)
        if view.recommended_reason:
            self.say("  " + _("recommended: {reason}").format(reason=view.recommended_reason))


def _pointless(view: FieldView) -> bool:
    """A choice with one way out needs no question."""
    return (
        view.kind == "choice"
        and view.id != "python"
        and sum(o.enabled for o in view.options) == 1
        and not view.error
    )


def _by_number(view: FieldView, answer: str) -> Any:
    """``2`` chooses the second option, unless ``2`` is itself one of the values."""
    if view.kind != "choice" or not answer.isdigit() or any(str(o.value) == answer for o in view.options):
        return answer
    i = int(answer) - 1
    return view.options[i].value if 0 <= i < len(view.options) else answer


def _finish(session: Session, args: argparse.Namespace, asks: bool) -> int:
    report = session.report()
    for text in report.warnings:
        print(_("note: {text}").format(text=text), file=sys.stderr)
    if report.blockers:
        for text in report.blockers:
            print(_("error: {message}").format(message=text), file=sys.stderr)
        return Exit.BAD
    if args.output == "-":
        path, backup = None, None
        if not args.json:
            sys.stdout.write(report.config_text)
    else:
        target = session.target()
        diff = session.diff()
        if target.exists() and diff:
            sys.stderr.write(diff)
        if asks and diff:
            answer = _Dialogue(session, set(), sys.stdin, sys.stderr).read(
                _("Write {path}? [yes]: ").format(path=target)
            )
            if answer.lower() not in ("", "y", "yes", _("yes")):
                print(_("nothing was written"), file=sys.stderr)
                return Exit.BAD
        written = session.write()
        path, backup = written.path, written.backup
    if args.json:
        print(json.dumps(_as_json(session, path, backup), indent=2, ensure_ascii=False))
    elif path is not None:
        print(_("written: {path}").format(path=path))
        if backup is not None:
            print(_("backup: {path}").format(path=backup))
        for text in _verdict(session, path, args.facts):
            print(text)
        hint = _run_line(session, path)
        if hint:
            print(_("start it with: {command}").format(command=hint))
    return Exit.OK


def _verdict(session: Session, path: Path, facts: str | None) -> Iterable[str]:
    """The fit in a line, with its figures; where it is no ``fits``, the command that tells more."""
    e = session.report().estimate
    if e is None:
        yield _("fit: unknown, no model was named")
        return
    words = {"fits": _("fits"), "tight": _("tight"), "no": _("does not fit"), "unknown": _("unknown")}
    parts = [_("fit: {verdict}").format(verdict=words[e.verdict])]
    if e.verdict == "unknown" and e.reason:
        parts.append(e.reason)
    for where, span, there in (
        (_("GPU"), e.gpu.device, e.gpu.capacity),
        (_("host RAM"), e.host.peak, e.host.capacity),
    ):
        if e.verdict != "unknown" and span is not None and there is not None:
            size = _("{used} of {all}").format(used=gib(span.expected), all=gib(there))
            parts.append(f"{where} {size}")
    yield phrases(parts)
    line = _estimate_line(session, path, facts)
    if e.verdict in ("tight", "no") and line:
        yield _("why, and what would fit: {command}").format(command=line)


def _estimate_line(session: Session, path: Path, facts: str | None) -> str:
    """``dstui estimate`` asked the same; empty for the demo's model, which has no name."""
    import shlex

    def given(field: str) -> Any:
        view = session.field(field)
        return view.value if view.enabled else None

    if not given("model"):
        return ""
    words = ["dstui", "estimate", str(path), "--model", str(given("model"))]
    pairs = {"--gpus": "gpus", "--nodes": "nodes", "--ram": "ram", "--seq": "seq", "--attention": "attention"}
    if given("method") in ("lora", "qlora"):
        pairs["--lora-rank"] = "lora_rank"
    for option, field in pairs.items():
        if given(field) and (field, given(field)) != ("nodes", 1):
            words += [option, str(given(field))]
    words += ["--quant", "nf4"] if given("method") == "qlora" else []
    words += ["--checkpointing" if given("checkpointing") else "--no-checkpointing"]
    words += ["--facts", facts] if facts else []
    return shlex.join(words)


def _run_line(session: Session, path: Path) -> str:
    import shlex

    try:
        spec = session.run_spec()
    except DstuiError:
        return ""
    words = ["dstui", "run", "--config", str(path), "--engine", spec.engine]
    if spec.launcher:
        words += ["--launcher", spec.launcher]
    if spec.devices:
        words += ["--devices", ",".join(spec.devices)]
    elif spec.num_gpus:
        words += ["--num-gpus", str(spec.num_gpus)]
    words += [w for k, v in spec.env.items() for w in ("--env", f"{k}={v}")]
    return shlex.join([*words, "--", spec.script, *spec.args])


def _as_json(session: Session, path: Path | None, backup: Path | None) -> dict[str, Any]:
    report = session.report()
    batch = report.batch
    return {
        "schema_version": 1,
        "path": None if path is None else str(path),
        "backup": None if backup is None else str(backup),
        "engine": report.engine,
        "deepspeed": report.deepspeed,
        "world_size": report.world_size,
        "batch": {
            "train_batch_size": batch.total,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        },
        "fields": {f.id: session.field(f.id).value for f in FIELDS if session.field(f.id).enabled},
        "verdict": None if report.estimate is None else report.estimate.verdict,
        "warnings": list(report.warnings),
        "launch_blockers": list(report.launch_blockers),
        "config": dict(report.config),
    }
