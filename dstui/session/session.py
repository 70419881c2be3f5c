"""The wizard without a screen: fields in, one frozen report out.

A front end calls ``set`` and renders ``fields`` and ``report``; it holds no state of its own. Nothing here
raises for what a person types: a wrong text stays on its field with the reason (``FieldView.error``).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstui.config.write import difference, save
from dstui.errors import DstuiError
from dstui.estimate.result import Estimate
from dstui.facts.model import Facts
from dstui.i18n import _, listed
from dstui.rules.diagnostic import FileReport, Severity
from dstui.session import advice, compose, deciding, engines, wrong
from dstui.session.check import check_text
from dstui.session.model import STEP_IDS, STEPS, Batch, FieldView, Report, Step, Written
from dstui.session.state import BATCH, State
from dstui.session.table import BY_ID, FIELDS, FieldSpec, parse, show

if TYPE_CHECKING:
    from dstui.config.document import Document
    from dstui.config.presets import Preset
    from dstui.runs.spec import RunSpec


class Session:
    """One pass through the wizard.

    ``facts`` may be None while detection runs (``set_facts`` later; typed values stay). ``document`` is an opened
    config: its unknown keys, comments and order survive. ``remembers``: whether what was answered for a script counts again, and is kept.
    ``patient`` False: no call but ``report`` waits for the recommendation; ask ``fork().report()`` on a thread and
    ``adopt`` it.
    """

    def __init__(
        self,
        facts: Facts | None = None,
        *,
        cwd: str | os.PathLike[str] = ".",
        document: Document | None = None,
        preset: Preset | None = None,
        remembers: bool = False,
        patient: bool = True,
    ) -> None:
        self._state = State(facts, Path(cwd).resolve())
        self._state.patient = patient
        self._errors: dict[str, tuple[str, str]] = {}
        self._document: Document | None = None
        self._report: Report | None = None
        self._remembers = remembers
        if preset is not None:
            self.apply_preset(preset)
        if document is not None:
            self.open_document(document)

    # --- inputs --------------------------------------------------------------------------------------------

    def set(self, field_id: str, value: Any) -> None:
        """Take what a person typed or chose (a text or a value). Unknown ids raise KeyError: a programming error."""
        spec = BY_ID[field_id]
        self._report = None
        try:
            parsed = self._parse(spec, value)
        except DstuiError as e:
            text = value if isinstance(value, str) else show(spec, value)
            self._errors[field_id] = (text, e.message)
            return
        self._errors.pop(field_id, None)
        self._state.typed[field_id] = parsed
        if field_id in BATCH:
            order = self._state.batch_order
            if field_id in order:
                order.remove(field_id)
            order.append(field_id)
        if field_id == "gpus" and parsed:
            self._state.typed.setdefault("machine", "describe")
        if field_id == "facts_file" and parsed:
            self._state.typed.setdefault("machine", "file")
        if field_id in ("gpus", "nodes", "ram"):
            self._describe()
        if field_id == "facts_file":
            self._load_facts(parsed)
        if field_id == "script":
            self._recall(parsed)
        self._state.changed()

    def unset(self, field_id: str) -> None:
        """Back to the recommended value."""
        self._report = None
        self._errors.pop(field_id, None)
        self._state.typed.pop(field_id, None)
        if field_id in self._state.batch_order:
            self._state.batch_order.remove(field_id)
        self._state.changed()

    def set_facts(self, facts: Facts | None) -> None:
        """Detection arrived (again). What was typed stays, cards that are gone excepted."""
        self._report = None
        self._state.detected = facts
        self._state.changed()
        typed = self._state.typed.get("cards")
        if typed is not None and self._state.facts is not None:
            there = {self._state.card_key(g) for g in self._state.facts.gpus or ()}
            self._state.typed["cards"] = tuple(c for c in typed if c in there)
            self._state.changed()

    def apply_preset(self, preset: Preset) -> None:
        """Start from a preset. Values typed so far win over it."""
        self._report = None
        self._document = None
        self._state.preset_engine = preset.engine
        self._state.preset_name = preset.title
        self._state.set_base(preset.config, "preset", None)
        self._state.base_values.update(
            {k: v for k, v in preset.fields.items() if k in BY_ID and k != "engine"}
        )

    def open_document(self, document: Document) -> None:
        """Start from a config file; what it states becomes the recommended value of each field."""
        self._report = None
        self._document = document
        self._state.set_base(document.data, "file", document.path)

    def accept(self, step_id: str) -> None:
        """Take the recommended value for every field of the step that was not typed."""
        self._report = None
        for spec in FIELDS:
            if spec.step == step_id and spec.id not in self._errors:
                self._state.accepted.add(spec.id)

    def accept_rest(self) -> None:
        """Take all that is left; the front end goes to ``review``."""
        for step in STEP_IDS:
            self.accept(step)

    # --- outputs -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[Step, ...]:
        return STEPS

    @property
    def facts(self) -> Facts | None:
        """The facts with the chosen cards and the chosen interpreter first."""
        return self._state.used

    @property
    def document(self) -> Document | None:
        return self._document

    @property
    def is_login_node(self) -> bool:
        return self._state.is_login_node

    def field(self, field_id: str) -> FieldView:
        """One field as it is now: value, recommendation with its reason, options. KeyError for an id that is none."""
        return self._view(BY_ID[field_id])

    def fields(self, step_id: str) -> tuple[FieldView, ...]:
        """The fields of a step; those that do not apply now are not ``enabled`` and say why."""
        return tuple(self._view(f) for f in FIELDS if f.step == step_id)

    def problems(self, step_id: str | None = None) -> tuple[tuple[str, str], ...]:
        """(field id, error) of every field that cannot stay as it is."""
        out = []
        for f in FIELDS:
            if step_id is None or f.step == step_id:
                error = self._error(f)
                if error:
                    out.append((f.id, error))
        return tuple(out)

    def deciding(self, step_id: str) -> str:
        """The one line that decides the step, with this machine's figures."""
        return deciding.LINES[step_id](self._state, self.report)

    def report(self) -> Report:
        """The live answer: fit, findings, the file as it will be written. Cached until something changes."""
        if self._report is None:
            patient, self._state.patient = self._state.patient, True
            try:
                if self._state.plans_ahead:
                    _found = self._state.plan  # reading it is what finds it
                self._report = self._make_report()
            finally:
                self._state.patient = patient
        return self._report

    def glance(self) -> Report | None:
        """The answer for the values as they are shown, while the recommendation for them has to be found again.

        Many times faster than ``report``, which finds it. None when ``report`` has nothing to find, and when the
        model or the machine is another: what was recommended for the last one is no answer then.
        """
        state = self._state
        if not state.plan_nears:
            return None
        patient, state.patient = state.patient, False
        try:
            return self._make_report()
        finally:
            state.patient = patient
            state.changed()

    def fork(self) -> Session:
        """An independent copy as it stands now, for ``report`` and ``diff`` in another thread."""
        other = copy.copy(self)
        other._state = self._state.fork()
        other._errors = dict(self._errors)
        return other

    def adopt(self, report: Report) -> bool:
        """Take the report that a fork made. The caller knows that nothing was set since the fork.

        True when fields or deciding lines were shown with an old recommendation and must be drawn again.
        """
        stale = self._state.pending
        self._state.pending = False
        self._state.changed()
        self._report = report
        return stale

    def diff(self, path: str | os.PathLike[str] | None = None) -> str:
        """Unified difference between the file that is there and what will be written."""
        target = self.target(path)
        return difference(_read(target), self.report().config_text, target.name)

    def write(self, path: str | os.PathLike[str] | None = None) -> Written:
        """Write the config atomically, keeping what was there as a backup. Raises DstuiError."""
        report = self.report()
        if report.blockers:
            raise DstuiError(
                _("not written: {why}").format(why=report.blockers[0]), _("change it, then write again")
            )
        target = self.target(path)
        return Written(target, save(target, report.config_text), report)

    def save_preset(self, name: str) -> Preset:
        """Keep the config as the preset ``name`` of the user's. Raises DstuiError."""
        from dstui.config import presets

        report = self.report()
        if report.blockers:
            raise DstuiError(_("the wizard's config is not complete"), report.blockers[0])
        return presets.save_user(
            presets.Preset(
                name=name,
                title=name,
                engine=report.engine if report.engine in presets.ENGINES else "plain",
                when="",
                needs="",
                source=_("made in the wizard"),
                config=report.config,
            )
        )

    def run_spec(self) -> RunSpec:
        """What ``dstui.runs.start`` needs. Raises DstuiError when something must be answered first."""
        from dstui.runs.spec import RunSpec

        report = self.report()
        if report.stops:
            raise DstuiError(
                _("not started: {why}").format(why=report.stops[0]), _("change it, then start again")
            )
        s = self._state
        engine = s.get("engine")
        used = s.used
        on_gpu = bool(used and used.gpus)
        env = {}
        if s.is_typed("timeout") and engine in ("plain", "demo"):
            env["DEEPSPEED_TIMEOUT"] = str(s.get("timeout"))
        return RunSpec(
            script=str(s.get("script")),
            args=self._script_args(),
            engine="plain" if engine == "demo" else engine,
            launcher=None if s.get("launcher") == "auto" else s.get("launcher"),
            python=s.get("python") or None,
            devices=tuple(s.card_key(g) for g in (used.gpus if used else None) or ()) if on_gpu else None,
            num_gpus=None if on_gpu else int(s.get("ranks")),
            nodes=s.nodes,
            cwd=str(s.get("cwd")),
            env=env,
            name=s.get("name") or None,
            config_text=report.config_text,
            config_source=str(self.target()),
            prediction=None if report.estimate is None else report.estimate.to_json(),
            subject=self._subject(),
            instrument=bool(s.get("instrument")),
        )

    def _subject(self) -> dict[str, Any] | None:
        """What the prediction was asked, for the run's folder; the demo's rows are one token longer than ``seq``."""
        s = self._state
        if s.shape is None:
            return None
        from dstui.estimate.subject import subject

        stated = {"stated": ["seq", "checkpointing", "attention"]} if s.get("engine") == "demo" else {}
        return {**subject(s.shape, s.training(s.get("micro_batch"))), **stated}

    # --- parts ---------------------------------------------------------------------------------------------

    def _script_args(self) -> tuple[str, ...]:
        s = self._state
        args = list(s.args)
        if s.get("engine") == "demo":
            if engines.argument(args, "seq") is None:
                args += ["--seq", str(s.get("seq"))]
            if s.get("checkpointing") and "--checkpointing" not in args:
                args.append("--checkpointing")
        if (
            s.get("engine") == "hf"
            and s.is_typed("timeout")
            and engines.argument(args, "ddp_timeout") is None
        ):
            args += ["--ddp_timeout", str(s.get("timeout") * 60)]
        return tuple(args)

    def _parse(self, spec: FieldSpec, value: Any) -> Any:
        parsed = parse(spec, value)
        options = advice.OPTIONS.get(spec.id)
        if options is None:
            return parsed
        open_ = options(self._state)
        if spec.kind == "multi":
            names = [str(o.value) for o in open_]
            unknown = [p for p in parsed if p not in names]
            if unknown and open_:
                raise DstuiError(
                    _("there is no '{name}'; there are: {all}").format(name=unknown[0], all=listed(names))
                )
            return tuple(n for n in names if n in parsed) if open_ else parsed
        for o in open_:
            if o.value == parsed or str(o.value) == str(parsed).strip():
                if not o.enabled:
                    raise DstuiError(f"{o.label.strip()}: {o.why_not}")
                return o.value
        if spec.id == "python" and parse(BY_ID["script"], parsed):
            path = self._state.at_cwd(str(parsed))
            if os.access(path, os.X_OK) and path.is_file():
                return str(path)
            raise DstuiError(_("{path} is not a program").format(path=path))
        raise DstuiError(
            _("'{text}' is none of: {all}").format(text=parsed, all=listed(str(o.value) for o in open_))
        )

    def _describe(self) -> None:
        s = self._state
        s.changed()
        text = s.typed.get("gpus")
        if not text:
            return
        from dstui.facts.describe import describe

        try:
            ram = s.typed.get("ram")
            nodes = int(s.typed.get("nodes", 1))
            s.described = describe(text, nodes=nodes, ram=None if ram is None else str(ram))
        except DstuiError as e:
            self._errors["gpus"] = (str(text), e.message)
        else:
            self._errors.pop("gpus", None)
            s.typed.pop("cards", None)

    def _load_facts(self, path: str) -> None:
        s = self._state
        from dstui.facts.describe import load_facts

        try:
            s.from_file = load_facts(str(s.at_cwd(path)))
        except DstuiError as e:
            self._errors["facts_file"] = (path, e.message)
        else:
            s.typed.pop("cards", None)

    def _recall(self, script: str) -> None:
        """Fill in what was answered for this script last time, unless it was typed."""
        if not self._remembers:
            return
        from dstui.runs import answers

        for field, value in answers.recall(self._state.at_cwd(script)).items():
            if field in ("engine", "args", "launcher") and field not in self._state.typed:
                self.set(field, value)

    def remember(self) -> None:
        """Keep the answers about the script for the next time (called at launch)."""
        if self._remembers and self._state.get("engine") != "demo":
            from dstui.runs import answers

            given = {f: self._state.get(f) for f in ("engine", "args", "launcher")}
            answers.remember(self._state.at_cwd(self._state.get("script")), given)

    def _view(self, spec: FieldSpec) -> FieldView:
        s = self._state
        value = s.get(spec.id)
        error = self._error(spec)
        recommended, reason = (
            (value, "") if spec.id in BATCH and not s.is_typed(spec.id) else s.recommended(spec.id)
        )
        if spec.id in BATCH and not s.is_typed(spec.id):
            reason = s.recommended(spec.id)[1] if spec.id != "global_batch" else ""
        options = advice.OPTIONS.get(spec.id)
        why_not = advice.WHY_NOT[spec.id](s) if spec.id in advice.WHY_NOT else ""
        text = self._errors[spec.id][0] if spec.id in self._errors else show(spec, value)
        return FieldView(
            id=spec.id,
            step=spec.step,
            label=spec.label,
            kind=spec.kind,
            value=value,
            text=text,
            recommended=recommended,
            recommended_reason=reason,
            options=options(s) if options else (),
            unit=spec.unit,
            help=spec.help,
            error=error,
            enabled=not why_not,
            why_not=why_not,
        )

    def _error(self, spec: FieldSpec) -> str:
        s = self._state
        if spec.id in advice.WHY_NOT and advice.WHY_NOT[spec.id](s):
            return ""
        if spec.id in self._errors:
            return self._errors[spec.id][1]
        if s.is_typed(spec.id) and spec.kind == "choice" and spec.id in advice.OPTIONS:
            for o in advice.OPTIONS[spec.id](s):
                if o.value == s.typed[spec.id] and not o.enabled:
                    return f"{o.label.strip()}: {o.why_not}"
        check = wrong.CHECKS.get(spec.id)
        return check(s) if check else ""

    def target(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Where ``write`` puts the config."""
        return self._state.at_cwd(str(path if path is not None else self._state.get("output")))

    def _compose(self, *, effective: bool) -> compose.Editor:
        """``effective``: with every ``auto`` that the Trainer fills replaced by the value typed here."""
        s = self._state
        shape = s.shape
        used = s.used
        tensor = shape.vocab * shape.hidden if shape and shape.vocab and shape.hidden else None
        # on the CPU DeepSpeed's own Adam is an op that takes minutes to compile and is no faster there
        on_cpu = used is not None and used.gpus == ()
        return compose.compose(
            s.base,
            s.get,
            s.is_typed,
            trainer=s.trainer and not effective,
            world=s.world,
            resolve_autos=effective or not s.trainer,
            complete=s.base_kind == "preset",
            batch_misfit=bool(s.batch_misfit),
            largest_tensor=tensor,
            torch_adam=on_cpu,
        )

    def _make_report(self) -> Report:
        s = self._state
        edited = self._compose(effective=False)
        warnings: list[str] = []
        if self._document is not None:
            text = self._document.edited(edited.edits).text if edited.edits else self._document.text
            if s.trainer and not _is_json(text):
                text = json.dumps(edited.data, indent=2, ensure_ascii=False) + "\n"
                warnings.append(
                    _("the Trainer reads strict JSON: comments and trailing commas of the file go")
                )
        else:
            text = json.dumps(edited.data, indent=2, ensure_ascii=False) + "\n"
        micro, steps, _total = s.batch
        if s.batch_misfit:
            warnings.append(_("{why}; it is written as {total}").format(why=s.batch_misfit, total=_total))
        estimate = self._estimate(self._compose(effective=True).data)
        check = self._check(text)
        findings = check.findings
        labels = {f.id: f.label for f in FIELDS}
        blockers = [f"{labels[i]}: {error}" for i, error in self.problems()]
        if s.facts is not None and s.facts.gpus and not s.get("cards"):
            blockers.append(_("no card is chosen: all are busy, or none is ticked"))
        if s.is_login_node and s.facts is None:
            blockers.append(
                _("this is a login node: describe the machine that will train, or give its facts file")
            )
        errors = [f for f in findings if f.severity is Severity.ERROR]
        refused = [f for f in errors if f.when == "parse" or check.verdict == "rejected"]
        blockers += [f"{f.code} {f.message}" for f in refused]
        later = [f"{f.code} {f.message}" for f in errors if f not in refused]
        warnings += self._trainer_warnings()
        return Report(
            estimate=estimate,
            check=check,
            findings=findings,
            config=edited.data,
            config_text=text,
            batch=Batch(micro, steps, s.world),
            world_size=s.world,
            shape=s.shape,
            warnings=tuple(warnings),
            blockers=tuple(blockers),
            launch_blockers=(*self._launch_blockers(), *later),
            engine=s.get("engine"),
            deepspeed=s.release,
            changed=self._document is None or text != self._document.text,
        )

    def _launch_blockers(self) -> Iterable[str]:
        s = self._state
        if not s.get("script"):
            yield _("no script: name the one that trains")
        facts = s.facts
        if facts is None:
            if not s.is_login_node:
                yield _("the machine is not known yet")
            return
        if facts.source != "detected":
            yield _("this plan is for another machine: write the config and start it there")
            return
        it = s.interpreter
        if it is None or (it.version is not None and not it.can_train):
            from dstui.facts.advice import install_advice

            advice = install_advice(facts, it)
            if advice is None:
                yield _("no Python with deepspeed was found")
            else:
                yield advice.reason + "; " + _("install: {c}").format(c=advice.command)

    def _estimate(self, config: Mapping[str, Any]) -> Estimate | None:
        s = self._state
        if s.shape is None or s.used is None:
            return None
        from dstui.config.schema import newest
        from dstui.estimate.memory import estimate
        from dstui.runs import calibration

        release = s.release or newest()
        return estimate(
            s.shape,
            s.training(s.get("micro_batch")),
            config,
            s.used,
            release=release,
            world_size=s.world,
            calibration=calibration.load(s.used, s.shape, release=release),
        )

    def _check(self, text: str) -> FileReport:
        s = self._state
        micro, steps, _total = s.batch
        precision = s.get("precision")
        args = {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": steps,
            "bf16": precision == "bf16",
            "fp16": precision == "fp16",
            "learning_rate": s.get("lr"),
            "weight_decay": s.get("weight_decay"),
            "max_grad_norm": s.get("gradient_clipping"),
        }
        shape = s.shape
        return check_text(
            text,
            engine=s.get("engine"),
            path=str(s.get("output")),
            release=s.release,
            world_size=s.world,
            facts=s.used,
            args=args if s.trainer else None,
            params=shape.params if shape else None,
            trained=advice.trained(s),
            local=bool(s.facts and s.facts.source == "detected"),
        )

    def _trainer_warnings(self) -> list[str]:
        """What the Trainer's own arguments must say so that the run is what was estimated."""
        s = self._state
        if s.get("engine") != "hf":
            return []
        micro, steps, _total = s.batch
        wanted = {
            "per_device_train_batch_size": str(micro),
            "gradient_accumulation_steps": str(steps),
        }
        if s.get("precision") in ("bf16", "fp16"):
            wanted[s.get("precision")] = "True"
        missing = [f"--{k} {v}" for k, v in wanted.items() if engines.argument(s.args, k) is None]
        wrong = [
            f"--{k} {v}"
            for k, v in wanted.items()
            if v != "True" and engines.argument(s.args, k) not in (None, v)
        ]
        out = []
        if missing:
            out.append(
                _("`auto` takes the script's arguments; unless it sets them itself, add: {args}").format(
                    args=" ".join(missing)
                )
            )
        if wrong:
            out.append(
                _("the script's arguments rule, and they differ from what is planned: {args}").format(
                    args=" ".join(wrong)
                )
            )
        return out


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
