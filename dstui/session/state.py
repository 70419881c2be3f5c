"""The state behind the wizard: what was typed, what the opened file says, what the machine is. No rendering."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError
from dstui.estimate.inputs import ModelShape, Training, expandable_segments
from dstui.facts.model import Facts, Gpu, Interpreter
from dstui.i18n import _
from dstui.session import advice, compose, engines

BATCH = ("micro_batch", "accumulation", "global_batch")
STRATEGY = ("stage", "offload", "optimizer_device", "param_device", "nvme_path", "precision", "optimizer")
DEMO = {"hidden": 256, "layers": 4, "vocab": 256, "heads": 4}
"""Defaults of ``dstui/examples/tiny_gpt.py``."""


def demo_shape(seq: int) -> ModelShape:
    """The bundled tiny GPT (``dstui/examples/tiny_gpt.py``): learned positions, untied head."""
    h, layers, vocab = DEMO["hidden"], DEMO["layers"], DEMO["vocab"]
    params = 2 * vocab * h + seq * h + layers * (12 * h * h + 13 * h) + 2 * h
    return ModelShape(
        name="tiny GPT",
        params=params,
        source="catalogue",
        family="gpt2",
        hidden=h,
        intermediate=4 * h,
        layers=layers,
        heads=DEMO["heads"],
        kv_heads=DEMO["heads"],
        head_dim=h // DEMO["heads"],
        vocab=vocab,
        tied=False,
        dtype="float32",
        max_positions=seq,
        exact=True,
    )


class State:
    """Values in three layers: typed by the person, stated by the opened file or preset, recommended."""

    def __init__(self, facts: Facts | None, cwd: Path) -> None:
        self.cwd: Path = cwd
        self.detected = facts
        self.described: Facts | None = None
        self.from_file: Facts | None = None
        self.typed: dict[str, Any] = {}
        self.accepted: set[str] = set()
        self.batch_order: list[str] = []
        self.base: Mapping[str, Any] | None = None
        self.base_kind: str | None = None
        self.base_path: Path | str | None = None
        self.base_values: dict[str, Any] = {}
        self.base_autos: tuple[str, ...] = ()
        self.preset_name = ""
        self.preset_engine: str | None = None
        self.patient = True
        self.pending = False
        """Whether something was answered with an old plan since ``settled``."""
        self.plans_ahead = False
        """Whether a report makes the plan too: somebody who does not wait will ask for it."""
        self._plans: dict[Any, advice.Plan] = {}
        self._last_plan = advice.NO_PLAN
        self._last_key: Any = None
        self._cache: dict[str, Any] = {}
        self._shapes: dict[str, ModelShape | DstuiError] = {}
        self._guesses: dict[tuple[str, int], tuple[str, str] | None] = {}

    def fork(self) -> State:
        """A copy that no later change reaches (what is shared is never changed in place)."""
        other = copy.copy(self)
        other.typed = dict(self.typed)
        other.accepted = set(self.accepted)
        other.batch_order = list(self.batch_order)
        other._cache = {}
        other.patient, other.pending, other.plans_ahead = True, False, not self.patient
        other._shapes = dict(self._shapes)
        other._guesses = dict(self._guesses)
        return other

    # --- layers ---

    def changed(self) -> None:
        """Forget everything derived."""
        self._cache.clear()

    def set_base(self, data: Mapping[str, Any] | None, kind: str | None, path: Path | str | None) -> None:
        """Begin from ``data`` (a preset or a file): it answers what nobody typed."""
        self.base, self.base_kind, self.base_path = data, kind, path
        self.base_values = compose.read(data) if data is not None else {}
        self.base_autos = tuple(compose.autos(data)) if data is not None else ()
        self.changed()

    def is_typed(self, field: str) -> bool:
        return field in self.typed

    def recommended(self, field: str) -> tuple[Any, str]:
        """(value, reason): the opened file's or preset's where it is possible here, else the advice."""
        key = "r:" + field
        if key not in self._cache:
            self._cache[key] = self._recommended(field)
        value: tuple[Any, str] = self._cache[key]
        return value

    def _recommended(self, field: str) -> tuple[Any, str]:
        if field in self.base_values and field in self.stated and self._open(field, self.base_values[field]):
            source = _("from the preset") if self.base_kind == "preset" else _("as in your file")
            return self.base_values[field], source
        if field == "offload" and self.stated.get(field) == "both" and self._open(field, "optimizer"):
            return "optimizer", _("the part that this stage can offload")
        return advice.RECOMMEND[field](self)

    @property
    def stated(self) -> Mapping[str, Any]:
        """What the opened file or preset says and what counts here: a preset is for real models, so its
        batch, learning rate and buckets are not for the demo."""
        if self.base_kind == "preset" and self.get("engine") == "demo":
            return {k: v for k, v in self.base_values.items() if k in STRATEGY}
        return self.base_values

    def _open(self, field: str, value: Any) -> bool:
        options = advice.OPTIONS.get(field)
        return options is None or any(o.value == value and o.enabled for o in options(self))

    def get(self, field: str) -> Any:
        """The value that counts."""
        if field in BATCH:
            return self.batch[BATCH.index(field)]
        if field in self.typed:
            return self.typed[field]
        return self.recommended(field)[0]

    # --- batch ---

    @property
    def batch(self) -> tuple[int, int, int]:
        """(micro, accumulation, global). Two are known, the third follows; global = micro x accumulation x world."""
        if "batch" not in self._cache:
            self._cache["batch"] = self._batch()
        triple: tuple[int, int, int] = self._cache["batch"]
        return triple

    def _batch(self) -> tuple[int, int, int]:
        known = {f: self.typed[f] for f in self.batch_order[-2:] if f in self.typed}
        for f in ("micro_batch", "accumulation", "global_batch"):
            if len(known) < 2 and f not in known and f in self.stated:
                known[f] = self.stated[f]
        from_file = self.base_kind == "file" and not self.trainer and not self.batch_order
        if from_file and len(known) == 1 and "accumulation" not in known:
            # as DeepSpeed completes it (runtime/config.py _set_batch_related_parameters @0.19.8)
            known["accumulation"] = 1
        world = self.world
        total = known.get("global_batch")
        micro = known.get("micro_batch")
        steps = known.get("accumulation")
        if total is not None and steps is not None:
            micro = max(1, total // (steps * world))
        else:
            if micro is None:
                self._cache["batch"] = (1, 1, world)  # advice for micro must not come back here
                micro = advice.RECOMMEND["micro_batch"](self)[0]
            if total is not None:
                steps = max(1, total // (micro * world))
            elif steps is None:
                self._cache["batch"] = (micro, 1, micro * world)
                steps = advice.RECOMMEND["accumulation"](self)[0]
        assert micro is not None and steps is not None
        return micro, steps, micro * steps * world

    @property
    def batch_misfit(self) -> str:
        """Why the opened file's batch cannot hold with this number of ranks (DeepSpeed would refuse it)."""
        if self.base_kind != "file" or self.trainer:
            return ""
        total = self.base_values.get("global_batch")
        micro, steps, product = self.batch
        if total is None or self.batch_order or total == product:
            return ""
        return _("train_batch_size {total} of the file is not {micro} x {steps} x {world} ranks").format(
            total=total, micro=micro, steps=steps, world=self.world
        )

    @property
    def batch_problem(self) -> str:
        """Why a typed global batch cannot be met."""
        wanted = self.typed.get("global_batch")
        if wanted is None or "global_batch" not in self.batch_order[-2:]:
            return ""
        micro, steps, total = self.batch
        if total == wanted:
            return ""
        return _("{wanted} is not micro {micro} x accumulation {steps} x {world} ranks = {total}").format(
            wanted=wanted, micro=micro, steps=steps, world=self.world, total=total
        )

    # --- machine ---

    @property
    def is_login_node(self) -> bool:
        return bool(
            self.detected and self.detected.source == "detected" and self.detected.scheduler.login_node
        )

    @property
    def facts(self) -> Facts | None:
        """The machine that is planned for, all cards."""
        machine = self.get("machine")
        if machine == "describe":
            return self.described
        if machine == "file" and self.from_file is not None:
            return self.from_file
        return self.detected

    @staticmethod
    def card_key(gpu: Gpu) -> str:
        """How a card is named in ``cards``: its index, or the UUID of a MIG instance."""
        return gpu.uuid if gpu.mig_parent and gpu.uuid else str(gpu.index)

    @property
    def nodes(self) -> int:
        return int(self.get("nodes"))

    @property
    def used(self) -> Facts | None:
        """The facts with the chosen cards only, on the chosen number of nodes, best interpreter first."""
        if "used" not in self._cache:
            facts = self.facts
            if facts is not None:
                chosen = set(self.get("cards"))
                gpus = (
                    None if facts.gpus is None else tuple(g for g in facts.gpus if self.card_key(g) in chosen)
                )
                interpreters = facts.interpreters or (self.detected.interpreters if self.detected else ())
                it = self.interpreter
                if it is not None:
                    interpreters = (it, *(i for i in interpreters if i.path != it.path))
                facts = dataclasses.replace(facts, gpus=gpus, nodes=self.nodes, interpreters=interpreters)
            self._cache["used"] = facts
        used: Facts | None = self._cache["used"]
        return used

    @property
    def world(self) -> int:
        """Ranks in all."""
        facts = self.facts
        if facts is None:
            return 1
        if facts.gpus:
            return max(1, len(self.get("cards"))) * self.nodes
        return int(self.get("ranks")) * self.nodes

    @property
    def interpreter(self) -> Interpreter | None:
        """The chosen training interpreter; one typed by path is known by its path only."""
        path = self.get("python")
        for it in self.detected.interpreters if self.detected else ():
            if it.path == path:
                return it
        return Interpreter(path, "option") if path else None

    @property
    def release(self) -> str | None:
        """DeepSpeed's release in the training interpreter."""
        it = self.interpreter
        return it.deepspeed if it else None

    # --- script and model ---

    def at_cwd(self, path: str) -> Path:
        """``path`` as the run will see it: relative to the working folder of the run, ``~`` replaced."""
        p = Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib raises for an unknown ~user
        return p if p.is_absolute() else Path(self.get("cwd")) / p

    @property
    def guess(self) -> tuple[str, str] | None:
        """(engine, evidence) by the typed script's text; read again only when the file changes."""
        script = self.typed.get("script")
        if not script:
            return None
        path = self.at_cwd(script)
        try:
            key = (str(path), path.stat().st_mtime_ns)
        except OSError:
            return None
        if key not in self._guesses:
            self._guesses[key] = engines.guess(path)
        return self._guesses[key]

    @property
    def demo_script(self) -> Path:
        return Path(__file__).resolve().parent.parent / "examples" / "tiny_gpt.py"

    @property
    def args(self) -> tuple[str, ...]:
        """The script's arguments; none while the quotes in the field do not close."""
        try:
            return engines.split_args(str(self.get("args")))
        except ValueError:
            return ()

    @property
    def trainer(self) -> bool:
        """Whether a Hugging Face Trainer fills ``auto``."""
        return self.get("engine") in ("hf", "llamafactory")

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape; None when the model is not known (``model_problem`` says why)."""
        found = self._model()
        return found if isinstance(found, ModelShape) else None

    @property
    def model_problem(self) -> str:
        found = self._model()
        return found.message if isinstance(found, DstuiError) else ""

    def _model(self) -> ModelShape | DstuiError | None:
        spec = self.get("model")
        if not spec:
            return None
        if spec == "demo":
            return demo_shape(self._demo_seq)
        if spec not in self._shapes:
            from dstui.estimate.model import load_model

            path = self.at_cwd(spec)
            try:
                self._shapes[spec] = load_model(str(path) if os.path.lexists(path) else spec)
            except DstuiError as e:
                self._shapes[spec] = e
            except OSError as e:  # a name that no file system takes
                self._shapes[spec] = DstuiError(e.strerror or str(e))
        return self._shapes[spec]

    @property
    def _demo_seq(self) -> int:
        # not get("seq"): its advice asks for the shape
        return int(self.typed.get("seq", 64))

    @property
    def micro_argument(self) -> int | None:
        """``--per_device_train_batch_size`` of the script's arguments."""
        named = engines.argument(self.args, "per_device_train_batch_size")
        return int(named) if named and named.isdigit() and int(named) > 0 else None

    @property
    def given_micro(self) -> int | None:
        """The micro batch that somebody chose: typed, an argument, the file's; None when it is free."""
        for value in (self.typed.get("micro_batch"), self.micro_argument, self.stated.get("micro_batch")):
            if value is not None:
                return int(value)
        return 4 if self.get("engine") == "demo" else None

    def training(self, micro: int | None) -> Training:
        """What the estimate asks about the script; ``micro`` samples a GPU in one forward."""
        method = self.get("method")
        return Training(
            micro_batch=micro,
            seq=self.get("seq"),
            checkpointing=self.get("checkpointing"),
            attention=self.get("attention"),
            loop="hf" if self.trainer else "plain",
            lora_rank=None if method == "full" else self.get("lora_rank"),
            quant="nf4" if method == "qlora" else "none",
            expandable=self.described is None and expandable_segments(os.environ),
        )

    @property
    def plan(self) -> advice.Plan:
        """What is recommended for this model on this machine.

        It takes up to seconds for a large model. A front end that must not wait (``patient`` False) gets the last
        one until a fork has computed the new one; forks share what they found.
        """
        if "plan" not in self._cache:
            key = advice.plan_key(self)
            found = self._plans.get(key) if key is not None else advice.NO_PLAN
            if found is None and not self.patient:
                self.pending = True
                return self._last_plan
            if found is None:
                found = self._plans[key] = advice.plan(self)
            self._cache["plan"] = self._last_plan = found
            self._last_key = key
        plan: advice.Plan = self._cache["plan"]
        return plan

    @property
    def plan_nears(self) -> bool:
        """Whether a new plan has to be found for the model and the machine of the last one."""
        key = advice.plan_key(self)
        known = key is None or key in self._plans or self._last_key is None
        return not known and advice.same_subject(key, self._last_key)
