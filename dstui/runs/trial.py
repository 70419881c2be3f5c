"""A run that was measured from inside (``dstui.runs.measured``): beside its prediction, and for the next estimate.

``settle`` is called by the supervisor when a run is over, and by whoever looks first where it could not: it reads the
measurement, predicts the very settings that ran, writes both into ``trial.json`` and keeps a record for
``dstui.runs.calibration``. Doing it twice gives the same files.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstui import __version__
from dstui.errors import DstuiError
from dstui.estimate.correction import Record
from dstui.estimate.families import shape_from_config
from dstui.estimate.inputs import ModelShape, Training
from dstui.estimate.memory import estimate, settings_of
from dstui.estimate.replay import run_dimensions
from dstui.estimate.result import PHASES, Estimate
from dstui.estimate.subject import from_json, settings_class, settings_summary, training_from
from dstui.facts.model import Facts
from dstui.i18n import _
from dstui.runs import calibration
from dstui.runs.events import Parser
from dstui.runs.measured import Measured, read_probe
from dstui.runs.samples import read_peaks
from dstui.runs.spec import on_its_nodes
from dstui.runs.state import Progress, read_config
from dstui.runs.store import RunDir, read_json, write_json
from dstui.runs.tail import LogFile

SCHEMA_VERSION = 1
LEAST_STEPS = 2
"""Optimizer steps from which memory has been at its peak: the first makes the states, the second uses them."""
_LOG_TAIL = 1 << 20
_LOAD_DTYPES = ("bfloat16", "float16", "float32")
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash"}


def read_samples(run: RunDir, facts: Facts) -> Measured | None:
    """What the sampler and the log tell of a run without probe: peaks of the whole run, one phase."""
    peaks = read_peaks(run.samples_dir)
    if peaks is None:
        return None
    progress = _progress(run)
    busy = any(g.busy is not False for g in facts.gpus or ())
    cards = bool(peaks.gpu_used)
    device = max(peaks.gpu_used.values()) if cards and not busy else None
    reserved = progress.peak_reserved if cards else None
    return Measured(
        ranks=len(peaks.rank_rss),
        steps=progress.engine_step or 0,
        allocated=progress.peak_allocated if cards else None,
        reserved=reserved,
        device=device,
        overhead=device - reserved if device and reserved and device > reserved else None,
        host=peaks.rss_total,
        step_time=progress.step_time,
        by="samples",
    )


def _progress(run: RunDir) -> Progress:
    """The end of the log: torch's peaks and DeepSpeed's steps only grow, so the newest lines tell them all."""
    progress = Progress()
    file = LogFile(run.out_log)
    lines = file.after(max(0, file.size - _LOG_TAIL), _LOG_TAIL)
    progress.apply_all(Parser().feed_all(lines), time.time(), live=False)
    return progress


# -- beside what is predicted ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A measured run and the prediction of the very settings that ran. ``problem``: why there is none (translated)."""

    run: str
    measured: Measured
    estimate: Estimate | None = None
    shape: ModelShape | None = None
    training: Training | None = None
    problem: str | None = None
    stored: str | None = None
    """Path of the record that later estimates are corrected by."""

    def predicted(self, what: str) -> dict[str, int] | None:
        """low, expected, high of ``allocated reserved device host``; of ``pinned`` one figure."""
        e = self.estimate
        if e is None:
            return None
        if what == "pinned":
            n = e.host.pinned
            return None if n is None else {"low": n, "expected": n, "high": n}
        found = {
            "allocated": e.gpu.allocated,
            "reserved": e.gpu.reserved,
            "device": e.gpu.device,
            "host": e.host.peak,
        }[what]
        return None if found is None else found.to_json()

    def to_json(self) -> dict[str, Any]:
        rows = {}
        for what in ("allocated", "reserved", "device", "host", "pinned"):
            predicted, measured = self.predicted(what), getattr(self.measured, what)
            expected = predicted["expected"] if predicted else None
            rows[what] = {
                "predicted": predicted,
                "measured": measured,
                "ratio": measured / expected if expected and measured is not None else None,
            }
        phases = {p.phase: p.total for p in (self.estimate.gpu.phases if self.estimate else ())}
        host = self.estimate.host.phases if self.estimate else {}
        names = [p for p in (*PHASES, "between") if p in phases or p in self.measured.phases]
        return {
            "schema_version": SCHEMA_VERSION,
            "run": self.run,
            "memory": rows,
            "phases": [
                {
                    "phase": p,
                    "predicted": phases.get(p),
                    "predicted_host": host.get(p),
                    "measured": self.measured.phases.get(p),
                }
                for p in names
            ],
            "prediction": self.estimate.to_json() if self.estimate else None,
            "step_time": self.measured.step_time,
            "measured": self.measured.to_json(),
            "model": None if self.shape is None else {"name": self.shape.name, "params": self.shape.params},
            "training": None if self.training is None else dataclasses.asdict(self.training),
            "assumptions": list(self.estimate.assumptions) if self.estimate else [],
            "problem": self.problem,
            "stored": self.stored,
        }


def path_of(run: RunDir) -> Path:
    return run.path / "trial.json"


def read_result(run: RunDir) -> dict[str, Any] | None:
    """``trial.json``; None before the run was settled."""
    return read_json(path_of(run))


def used_facts(manifest: Mapping[str, Any]) -> Facts:
    """The machine as it was when the run started, with the cards that it used. Raises DstuiError."""
    facts = on_its_nodes(Facts.from_json(manifest.get("facts")), manifest)
    devices = manifest.get("devices")
    if facts.gpus and devices:
        used = tuple(g for g in facts.gpus if str(g.index) in devices or g.uuid in devices)
        facts = replace(facts, gpus=used or facts.gpus)
    elif facts.gpus and manifest.get("ranks_per_node"):
        facts = replace(facts, gpus=facts.gpus[: int(manifest["ranks_per_node"])])
    return facts


def shape_seen(seen: Mapping[str, Any]) -> ModelShape | None:
    """The model that really ran, by its configuration; by its size only where it is none of transformers'."""
    params = seen.get("params")
    if not params:
        return None
    name = str(seen.get("class"))
    config = seen.get("config")
    if isinstance(config, Mapping):
        try:
            return shape_from_config(config, str(config.get("_name_or_path") or name), "run")
        except (DstuiError, TypeError, ValueError):
            pass
    return ModelShape(name=name, params=int(params), source="run")


def training_seen(
    before: Training, seen: Mapping[str, Any], stated: frozenset[str] = frozenset()
) -> Training:
    """``before`` with what the probe saw. ``stated``: fields that a person gave and that nothing seen replaces."""
    found: dict[str, Any] = {
        "micro_batch": seen.get("rows") or seen.get("micro_batch"),
        "seq": seen.get("seq"),
        "checkpointing": seen.get("checkpointing"),
        "attention": _ATTENTION.get(str(seen.get("attention"))),
        "loop": "hf" if seen.get("trainer") else "plain",
        "lora_rank": seen.get("lora_rank"),
        "lora_targets": tuple(t) if isinstance(t := seen.get("lora_targets"), list) else None,
        "quant": seen.get("quant"),
        "zero_init": seen.get("zero_init"),
        "load_dtype": d if (d := seen.get("loaded_dtype")) in _LOAD_DTYPES else None,
        "load_on": {"cuda": "gpu", "cpu": "cpu"}.get(str(seen.get("loaded_on"))),
        "optimizer": _optimizer(seen),
        "param_groups": seen.get("param_groups"),
        "expandable": seen.get("expandable"),
    }
    if seen.get(
        "zero_init"
    ):  # partitions are on the card from the start, which says nothing about how weights came
        del found["load_dtype"], found["load_on"]
    return replace(before, **{k: v for k, v in found.items() if v is not None and k not in stated})


def _optimizer(seen: Mapping[str, Any]) -> str | None:
    name = seen.get("optimizer")
    return None if not name else f"{name}_fused".lower() if seen.get("fused") else str(name).lower()


def settle(run: RunDir) -> Result | None:
    """Compare, keep, and write ``trial.json``. None for a run that nothing can be learned from.

    Raises DstuiError for an unreadable manifest, OSError where the run's folder cannot be written.
    """
    ended = run.exit
    if ended is None:
        return None
    manifest = run.manifest
    facts = used_facts(manifest)
    measured = read_probe(run)
    trial = manifest.get("kind") == "trial"
    if measured is None:
        if trial or manifest.get("subject") is None:
            return None
        measured = read_samples(run, facts)
        if measured is None:
            return None
    result = _compare(run, manifest, facts, measured)
    if result.estimate is not None and _complete(ended, measured):
        try:
            result = _keep(run, result, manifest, facts, float(ended.get("ended_at") or time.time()))
        except OSError:
            pass  # a home that cannot be written: the comparison is still worth showing
    write_json(path_of(run), result.to_json())
    return result


def _complete(ended: Mapping[str, Any], m: Measured) -> bool:
    """Whether the run was at its peak: it stepped, and no error of its own or of the probe cut it short."""
    return ended.get("outcome") in ("finished", "stopped") and m.steps >= LEAST_STEPS and not m.troubles


def _compare(run: RunDir, manifest: Mapping[str, Any], facts: Facts, m: Measured) -> Result:
    known = from_json(manifest.get("subject"))
    subject = manifest.get("subject") or {}
    if known is not None:
        shape: ModelShape | None = known[0]
        training = known[1]
    else:
        shape = shape_seen(m.seen)
        training = training_from(subject.get("training") or {})
    if m.seen:
        training = training_seen(training, m.seen, frozenset(subject.get("stated") or ()))
    if shape is None:
        return Result(run.id, m, training=training, problem=_problem(m))
    config = _config(run, m)
    training = _all_linear(shape, training, config, facts, manifest, m)
    try:
        answer = estimate(
            shape, training, config, facts, release=_release(manifest, m), world_size=manifest.get("world_size"),
            changes=False,
        )  # fmt: skip
    except DstuiError as e:
        return Result(run.id, m, shape=shape, training=training, problem=e.message)
    return Result(run.id, m, answer, shape, training)


def _config(run: RunDir, m: Measured) -> Mapping[str, Any]:
    """As the engine got it, with every ``auto`` filled in; else the run's copy."""
    seen = m.seen.get("ds_config")
    return seen if isinstance(seen, Mapping) else read_config(run.config_path) or {}


def _all_linear(
    shape: ModelShape,
    training: Training,
    config: Mapping[str, Any],
    facts: Facts,
    manifest: Mapping[str, Any],
    m: Measured,
) -> Training:
    """The adapters' names as peft lists them, called ``all-linear`` where that trains as many parameters: it is what
    a person says, and what the next estimate is asked."""
    if not training.lora_rank or isinstance(training.lora_targets, str) or shape.family is None:
        return training
    short = replace(training, lora_targets="all-linear")
    try:
        s = settings_of(
            shape, short, config, facts, release=_release(manifest, m), world_size=manifest.get("world_size")
        )
    except DstuiError:
        return training
    return short if sum(run_dimensions(shape, s).trainable) == m.seen.get("trainable") else training


def _problem(m: Measured) -> str:
    if m.troubles:
        return _("the probe failed: {error}").format(error=m.troubles[0])
    return _("the run made no DeepSpeed engine, so its model is not known")


def _release(manifest: Mapping[str, Any], m: Measured) -> str | None:
    found = m.seen.get("deepspeed_version") or (manifest.get("versions") or {}).get("deepspeed")
    return str(found) if found else None


def _keep(run: RunDir, result: Result, manifest: Mapping[str, Any], facts: Facts, at: float) -> Result:
    assert result.shape is not None and result.training is not None
    m = result.measured
    config = _config(run, m)
    release = _release(manifest, m)
    settings = settings_of(
        result.shape, result.training, config, facts, release=release, world_size=manifest.get("world_size")
    )
    whats = ("allocated", "reserved", "device", "host", "pinned")
    record = Record(
        run=result.run,
        at=at,
        kind="trial" if manifest.get("kind") == "trial" else "run",
        dstui=__version__,
        settings=settings_class(settings),
        summary=settings_summary(settings),
        measured={**{w: getattr(m, w) for w in whats}, "overhead": m.overhead, "step_time": m.step_time},
        predicted={w: (p["expected"] if (p := result.predicted(w)) else None) for w in whats},
        phases=tuple(p for p in PHASES if p in m.phases),
        seen=bool(m.seen.get("seq") and m.seen.get("rows")),
    )
    machine = calibration.machine_of(
        facts,
        torch=m.seen.get("torch_version") or (manifest.get("versions") or {}).get("torch"),
        deepspeed=release,
    )
    path = calibration.save(record, result.shape, machine)
    return replace(result, stored=None if path is None else str(path))
