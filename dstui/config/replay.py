"""What ``DeepSpeedConfig`` makes of a dictionary, replayed without DeepSpeed.

The steps are those of ``deepspeed/runtime/config.py`` ``DeepSpeedConfig.__init__``,
``_initialize_params``, ``_set_batch_related_parameters``, ``_batch_assertion`` and ``_do_error_check``.
Which readers a release calls, in which order, and its pydantic models (fields, bounds, validators) come
from its schema (``x-dstui.release``), so one replay serves all releases with a schema. A reader that
behaved otherwise in older releases has a name for that behaviour in ``variants``. How pydantic takes a
value is in ``coerce``; what only older releases read, in ``replay_old``.

DeepSpeed stops at its first problem; the replay goes on where later steps do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dstui.config.coerce import BOUNDS, LAX, LAX_1, shown, type_words
from dstui.config.pointer import join_pointer
from dstui.config.schema import Schema
from dstui.i18n import _


@dataclass(frozen=True)
class Problem:
    """One reason why the release refuses the config.

    ``kind``: ``removed``, ``unknown-key``, ``two-names``, ``deprecated-and-new``, ``type``, ``bound``,
    ``choice``, ``block-type``, ``combination``, ``batch``, ``batch-missing``, ``mismatch``, ``crash``.
    ``params`` holds what a rule may want: ``known`` names of the block, ``wanted``, ``found``.
    """

    pointer: str
    kind: str
    message: str
    params: Mapping[str, Any] = field(default_factory=dict)


class _Stop(Exception):
    """The step cannot go on; its problem is recorded."""


class _Bad(Exception):
    def __init__(self, problems: list[Problem]) -> None:
        super().__init__()
        self.problems = problems


@dataclass
class Model:
    """A filled pydantic model: values by JSON name, and which fields were given."""

    values: dict[str, Any]
    given: set[str]
    """Python names of the fields."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Replay:
    """One pass of a release over a config. Use ``run``; then read ``problems``, ``batch``, ``values``."""

    def __init__(
        self,
        schema: Schema,
        data: dict[str, Any],
        world_size: int,
        accelerator: str = "cuda",
        from_file: bool = False,
    ) -> None:
        """``from_file``: ``deepspeed.initialize`` gets the path of a file, not a dictionary."""
        self.schema = schema
        self.accelerator = accelerator
        self.from_file = from_file
        self.variants: Mapping[str, str] = schema.facts["variants"]
        self.pydantic1 = schema.facts["pydantic"] == 1
        self.lax = LAX
        if self.pydantic1:
            self.lax = LAX_1
        self.data = data
        self.world: float = world_size
        self.problems: list[Problem] = []
        self.blocks: dict[str, Model] = {}
        """Root pointer -> model, also when something in it is wrong (then with defaults there)."""
        self.sound: set[str] = set()
        """Roots that the release accepts."""
        self.batch: dict[str, Any] | None = None

    # -- bookkeeping --

    def report(self, pointer: str, kind: str, message: str, **params: Any) -> None:
        """Note what the release refuses at ``pointer``, and go on."""
        self.problems.append(Problem(pointer, kind, message, params))

    def stop(self, pointer: str, kind: str, message: str, **params: Any) -> _Stop:
        """As ``report``; the caller raises what comes back, which ends the step."""
        self.report(pointer, kind, message, **params)
        return _Stop()

    def step(self, pointer: str, action: Callable[[], Any]) -> Any:
        """Run one step; whatever Python error the wrong data causes is a refusal, as in DeepSpeed."""
        try:
            return action()
        except _Stop:
            return None
        except RecursionError:
            raise
        except Exception as e:
            self.report(
                pointer,
                "crash",
                _("DeepSpeed fails on this value: {error}").format(error=f"{type(e).__name__}: {e}"[:200]),
            )
            return None

    def block(self, name: str, holder: Any = None, base: str = "") -> dict[str, Any]:
        """The dictionary that a reader takes at ``name``; anything else stops the step."""
        value = (self.data if holder is None else holder)[name]
        if not isinstance(value, dict):
            raise self.stop(
                base + join_pointer(name),
                "block-type",
                _("must be an object, found {found}").format(found=shown(value)),
                wanted="object",
                found=value,
            )
        return value

    # -- the whole --

    def run(self) -> Replay:
        """All readers in the order in which the release calls them; each is tried even when one before it refused."""
        self._removed()
        self.step("/sequence_parallel_size", self._world)
        if self.schema.facts["elasticity"]:
            self.step("/elasticity", self._elasticity)
        done: set[str] = set()
        for reader in self.schema.facts["readers"]:
            found = _READERS.get(reader)
            if found and found[1] not in done:
                done.add(found[1])
                self.step(found[0], getattr(self, found[1]))
        self._batch()
        self._error_check()
        self.step("/vocabulary_size", self._warning_check)
        return self

    def _removed(self) -> None:
        for key in self.schema.facts["removed"]:
            if key in self.data:
                self._removed_key(join_pointer(key), key)
        zero = self.data.get("zero_optimization")
        for key in self.schema.facts["removed_zero"]:
            if isinstance(zero, dict) and key in zero:
                self._removed_key(join_pointer("zero_optimization", key), key)

    def _removed_key(self, pointer: str, key: str) -> None:
        self.report(
            pointer,
            "removed",
            _("'{key}' was removed: DeepSpeed {release} refuses a config that has it").format(
                key=key, release=self.schema.release
            ),
            key=key,
        )

    def _world(self) -> None:
        """``world_size / sequence_parallel_size``: true division, so the sizes become floats."""
        variant = self.variants.get("__init__")
        if "sequence_parallel_size" not in self.data or variant == "no-sequence-parallel":
            return
        if self.from_file and not self.schema.facts["reads_file"]:
            return  # ``"sequence_parallel_size" in config`` looks into the path (to 0.18.5)
        size = self.data["sequence_parallel_size"]
        if variant == "any-error-is-one-rank":
            try:
                self.world = self.world / size
            except Exception:
                self.world = 1
            return
        if not isinstance(size, (int, float)) or size == 0:
            raise self.stop(
                "/sequence_parallel_size",
                "type",
                _("must be a number other than 0, found {found}").format(found=shown(size)),
                wanted="int",
                found=size,
            )
        self.world = self.world / size

    # -- pydantic blocks --

    def fill(self, name: str, raw: Any, pointer: str) -> tuple[Model, bool]:
        """A model from raw data; (values with defaults where wrong, accepted?)."""
        spec = self.schema.facts["models"][name]
        fields: dict[str, Any] = spec["fields"]
        checks = {v["name"]: v for v in spec["validators"]}
        sound = True

        def bad(where: str, kind: str, message: str, **params: Any) -> None:
            nonlocal sound
            sound = False
            self.report(where, kind, message, **params)

        if not isinstance(raw, dict):
            bad(
                pointer,
                "block-type",
                _("must be an object, found {found}").format(found=shown(raw)),
                wanted="object",
                found=raw,
            )
            raw = {}
        given = dict(raw)
        if "self" in raw:
            bad(pointer + "/self", "unknown-key", _("unknown key '{key}'").format(key="self"), known=[])
            del given["self"]
        # config_utils.py: DeepSpeedConfigModel.__init__(self, strict=False, **data)
        if spec.get("drops_auto") and not given.pop("strict", False):
            given = {k: v for k, v in given.items() if v != "auto" or k == "replace_method"}
        if "_coerce_container_types" in checks:
            given = {k: [v] if k in fields and isinstance(v, str) else v for k, v in given.items()}
        model = Model({}, set())
        used: set[str] = set()
        for key, f in fields.items():
            alias = f.get("alias", key)
            source = alias if alias in given else key if key in given else None
            if source is None:
                model.values[alias] = self._default(f, pointer + join_pointer(alias))
                continue
            used.add(source)
            where = pointer + join_pointer(source)
            value = given[source]
            try:
                for check in checks.values():
                    if key in check.get("fields", ()):
                        value = self._field_check(check["name"], where, value)
                value = self._coerce(f["type"], value, where)
                for word, (test, sign) in BOUNDS.items():
                    if word in f and value is not None and not test(value, f[word]):
                        raise _Bad(
                            [
                                Problem(
                                    where,
                                    "bound",
                                    _("must be {sign} {limit}, found {found}").format(
                                        sign=sign, limit=shown(f[word]), found=shown(value)
                                    ),
                                    {"sign": sign, "limit": f[word], "found": value},
                                )
                            ]
                        )
                model.values[alias] = value
                model.given.add(key)
            except _Bad as e:
                sound = False
                self.problems.extend(e.problems)
                model.values[alias] = self._default(f, where)
        known = [f.get("alias", k) for k, f in fields.items()]
        for key in given:
            if key in used or spec["extra"] != "forbid":
                continue
            if any(p.kind == "removed" and p.pointer == pointer + join_pointer(key) for p in self.problems):
                sound = False  # said already
                continue
            other = next((f["alias"] for k, f in fields.items() if k == key and "alias" in f), None)
            if other:
                bad(
                    pointer + join_pointer(key),
                    "two-names",
                    _("'{key}' and '{other}' are two names of one key: give only one").format(
                        key=key, other=other
                    ),
                    other=other,
                )
            else:
                bad(
                    pointer + join_pointer(key),
                    "unknown-key",
                    _("unknown key '{key}'").format(key=key),
                    known=known,
                )
        if sound:
            sound = self._model_checks(checks, model, pointer) and sound
        if sound:
            sound = self._deprecated(fields, model, pointer) and sound
        return model, sound

    def _default(self, f: dict[str, Any], pointer: str) -> Any:
        term = f["type"]
        if isinstance(term, dict) and "model" in term:
            return self.fill(term["model"], f["default"] or {}, pointer)[0].values
        return f["default"]

    def _coerce(self, term: Any, value: Any, pointer: str) -> Any:
        if isinstance(term, dict):
            ((kind, inner),) = term.items()
            if kind == "null":
                return None if value is None else self._coerce(inner, value, pointer)
            if kind == "model":
                if value is None and self._takes_null(inner):
                    value = {}
                if self.pydantic1:
                    value = self._pairs(value)
                before = len(self.problems)
                model, sound = self.fill(inner, value, pointer)
                if not sound:
                    found = self.problems[before:]
                    del self.problems[before:]
                    raise _Bad(found)
                return model.values
            if kind == "list":
                if isinstance(value, list):
                    return [self._coerce(inner, v, f"{pointer}/{i}") for i, v in enumerate(value)]
            elif kind == "enum":
                try:
                    found_value = value
                    if isinstance(inner[0], int) and not self.pydantic1:
                        found_value = LAX["int"](value)
                    if not isinstance(found_value, (dict, list)) and found_value in inner:
                        return inner[inner.index(found_value)]
                except ValueError:
                    pass
            elif kind == "literal":
                if any(value == v and type(value) is type(v) for v in inner):
                    return value
            elif kind == "union":
                for option in inner:
                    try:
                        return self._coerce(option, value, pointer)
                    except _Bad:
                        continue
        else:
            try:
                return self.lax[term](value)
            except (ValueError, TypeError):
                pass
        wanted = type_words(term)
        choice = isinstance(term, dict) and ("enum" in term or "literal" in term)
        raise _Bad(
            [
                Problem(
                    pointer,
                    "choice" if choice else "type",
                    _("must be {wanted}, found {found}").format(wanted=wanted, found=shown(value)),
                    {
                        "wanted": term,
                        "found": value,
                        **({"choices": next(iter(term.values()))} if choice else {}),
                    },
                )
            ]
        )

    def _pairs(self, value: Any) -> Any:
        """What pydantic 1 tries where it wants a model: ``dict(value)``; the value itself when that fails."""
        try:
            pairs = self.lax["dict"](value)
        except (TypeError, ValueError):
            return value
        return pairs if all(isinstance(k, str) for k in pairs) else value

    def _takes_null(self, model: str) -> bool:
        checks = self.schema.facts["models"][model]["validators"]
        return any(v["name"] == "_coerce_container_types" for v in checks)

    def _field_check(self, name: str, pointer: str, value: Any) -> Any:
        """``runtime/precision_config.py``: checks that run before the type is looked at."""
        wrong = ""
        if name == "_validate_loss_scale":
            try:
                number = float(value) if not isinstance(value, bool) else math.nan
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if isinstance(value, bool) or not math.isfinite(number) or number < 0:
                wrong = _("a finite number >= 0 (0 = dynamic)")
            value = number
        elif name == "_reject_non_integer_scale_params":
            try:
                if isinstance(value, bool):
                    raise TypeError
                int(value)
            except (TypeError, ValueError, OverflowError):
                wrong = _("an integer")
        if wrong:
            raise _Bad(
                [
                    Problem(
                        pointer,
                        "type",
                        _("must be {wanted}, found {found}").format(wanted=wrong, found=shown(value)),
                        {"found": value},
                    )
                ]
            )
        return value

    def _model_checks(self, checks: Mapping[str, Any], model: Model, pointer: str) -> bool:
        """Validators that look at several fields, in the order of the class. The first failure ends it."""
        before = len(self.problems)
        for name in checks:
            if len(self.problems) > before:
                break
            if checks[name]["check"] == "never-fails":
                continue
            if name == "overlap_comm_valid" and model["overlap_comm"] is None:
                model.values["overlap_comm"] = model["stage"] == 3
            elif name == "compute_grad_norm_valid":
                if not model["compute_grad_norm"] and model["stage"] not in (1, 2):
                    self.report(
                        pointer + "/compute_grad_norm",
                        "combination",
                        _("compute_grad_norm false needs ZeRO stage 1 or 2, the stage is {stage}").format(
                            stage=model["stage"]
                        ),
                    )
            elif name == "offload_ratio_check":
                offload = model["offload_optimizer"]
                if offload and offload["ratio"] < 1.0 and model["stage"] != 3:
                    self.report(
                        pointer + "/offload_optimizer/ratio",
                        "combination",
                        _("ratio below 1 needs ZeRO stage 3, the stage is {stage}").format(
                            stage=model["stage"]
                        ),
                    )
            elif name == "_validate_dynamic_loss_scale_params":
                if model["enabled"] and model["loss_scale"] == 0:
                    for key in ("loss_scale_window", "min_loss_scale"):
                        if model[key] <= 0:
                            self.report(
                                pointer + join_pointer(key),
                                "bound",
                                _("must be > 0 while the loss scale is dynamic, found {found}").format(
                                    found=model[key]
                                ),
                            )
                            break
            elif name == "validate_fields":
                self._zenflow(model, pointer, checks[name]["check"])
            elif name == "_validate_entries":
                for key in ("classes", "names", "name_suffixes"):
                    model.values[key] = list(dict.fromkeys(model[key]))
        return len(self.problems) == before

    def _zenflow(self, model: Model, pointer: str, check: str) -> None:
        strategy = model["select_strategy"]
        if strategy not in ("auto", "step", "epoch"):
            self.report(
                pointer + "/select_strategy",
                "choice",
                _("must be one of {choices}, found {found}").format(
                    choices='"auto", "step", "epoch"', found=shown(strategy)
                ),
                choices=["auto", "step", "epoch"],
            )
            return
        for key in ("select_interval", "update_interval"):
            value = model[key]
            if isinstance(value, str) and value != "auto":
                self.report(
                    pointer + join_pointer(key),
                    "type",
                    _("must be {wanted}, found {found}").format(
                        wanted=_('an integer or "auto"'), found=shown(value)
                    ),
                )
                return
        if (
            check == "zenflow-2"
            and isinstance(model["update_interval"], int)
            and model["update_interval"] < 1
        ):
            self.report(
                pointer + "/update_interval",
                "bound",
                _("must be {sign} {limit}, found {found}").format(
                    sign=">=", limit=1, found=model["update_interval"]
                ),
            )

    def _deprecated(self, fields: Mapping[str, Any], model: Model, pointer: str) -> bool:
        """``config_utils.py`` ``_process_deprecated_field``: an old key sets the new one, or both are refused."""
        for key, f in fields.items():
            old = f.get("deprecated")
            if (
                not old
                or key not in model.given
                or not old.get("new_param")
                or not old.get("set_new_param", True)
            ):
                continue
            new = old["new_param"]
            if new in model.given:
                self.report(
                    pointer + join_pointer(key),
                    "deprecated-and-new",
                    _("'{key}' is the old name of '{new}': give only the new one").format(key=key, new=new),
                    new=new,
                )
                return False
            alias = fields[new].get("alias", new) if new in fields else new
            value = model.values.pop(f.get("alias", key), None)
            if "converts" in old:
                value = next((v for given, v in old["converts"] if given is value), value)
            if value is not None and new in fields:
                value = self._coerce(fields[new]["type"], value, pointer + join_pointer(alias))
            model.values[alias] = value
            model.given.add(new)
        return True

    def root(self, pointer: str, raw: Any) -> Model | None:
        """Fill the model of a root block, as ``Model(**raw)`` does."""
        name = self.schema.facts["roots"].get(pointer)
        if name is None:
            return None
        model, sound = self.fill(name, raw, pointer)
        self.blocks[pointer] = model
        if sound:
            self.sound.add(pointer)
        return model

    def _zero_block(self) -> None:
        raw = self.data.get("zero_optimization", {})
        if isinstance(raw, bool):  # the deprecated form
            raw = {"stage": int(raw)}
            if raw["stage"]:
                raw["allgather_bucket_size"] = self.data.get("allgather_size", 5e8)
        self.root("/zero_optimization", raw)

    def _comms(self) -> None:
        if "comms_logger" in self.data:  # its presence alone switches it on (comm/config.py)
            self.root("/comms_logger", self.data["comms_logger"])

    def _monitor(self) -> None:
        for name in ("tensorboard", "comet", "wandb", "csv_monitor"):
            raw = self.data.get(name, {})
            if self.pydantic1:
                raw = self._pairs(raw)
            self.root(join_pointer(name), {} if raw == "auto" else raw)

    def _fp16(self) -> None:
        self.root("/fp16", self.data.get("fp16", {}))

    def _bf16(self) -> None:
        raw = self.data.get("bf16")
        self.root("/bf16", self.data.get("bfloat16", {}) if raw is None else raw)
        fp16, bf16 = self.blocks.get("/fp16"), self.blocks.get("/bf16")
        if fp16 and bf16 and {"/fp16", "/bf16"} <= self.sound and fp16["enabled"] and bf16["enabled"]:
            self.report(
                "/fp16/enabled" if isinstance(self.data.get("fp16"), dict) else "/fp16",
                "combination",
                _("fp16 and bf16 cannot both be enabled"),
            )

    fp16_master: Any = False
    """``fp16_master_weights_and_grads`` where fp16 is plain dictionary code (to 0.17.0)."""

    def _precision(self) -> None:
        from dstui.config.replay_old import precision

        precision(self)

    def _hybrid(self) -> None:
        self.root("/hybrid_engine", self.data.get("hybrid_engine", {}))

    def _compile(self) -> None:
        self.root("/compile", self.data.get("compile", {}))

    def _tensor_parallel(self) -> None:
        self.root("/tensor_parallel", self.data.get("tensor_parallel", {}))

    def _weight_quantization(self) -> None:
        if "weight_quantization" in self.data:
            self.root("/weight_quantization", self.data["weight_quantization"])

    def _timers(self) -> None:
        raw: Any = {}
        if "timers" in self.data:
            timers = self.data["timers"]
            if not isinstance(timers, (dict, list, str)):
                self.block("timers")
            if "throughput" in timers:
                raw = self.block("timers").get("throughput")
        self.root("/timers/throughput", raw)

    # -- dictionary readers --

    def _communication(self) -> None:
        names = ["communication_data_type"]
        names += [
            n
            for n in ("seq_parallel_communication_data_type", "seq_parallel_comm_data_type")
            if n in self.schema.json_schema["properties"]
        ]
        known = ["fp32", "fp16", self.variants.get("get_communication_data_type", "bf16")]
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if not isinstance(value, str) or value.lower() not in known:
                self._choice(join_pointer(name), value, known)

    def _choice(self, pointer: str, value: Any, choices: list[Any]) -> None:
        self.report(
            pointer,
            "choice",
            _("must be one of {choices}, found {found}").format(
                choices=", ".join(map(shown, choices)), found=shown(value)
            ),
            choices=choices,
            found=value,
        )

    def _allreduce_op(self) -> None:
        value = self.data.get("gradient_allreduce_op", "mean")
        self.allreduce = value.lower() if isinstance(value, str) else value
        if self.allreduce not in ("mean", "sum"):
            self._choice("/gradient_allreduce_op", value, ["mean", "sum"])

    allreduce: Any = "mean"

    def _activation_checkpointing(self) -> None:
        if "activation_checkpointing" in self.data:
            self.block("activation_checkpointing")

    def _flops(self) -> None:
        if "flops_profiler" in self.data:
            self.block("flops_profiler")

    def _breakdown(self) -> None:
        """``wall_clock_breakdown | flops_profiler.enabled``: Python's own operator decides."""
        flops = self.data.get("flops_profiler", {})
        if not isinstance(flops, dict):
            return
        value, enabled = self.data.get("wall_clock_breakdown", False), flops.get("enabled", False)
        try:
            value | enabled
        except TypeError:
            pointer = "/wall_clock_breakdown" if not isinstance(value, int) else "/flops_profiler/enabled"
            culprit = value if not isinstance(value, int) else enabled
            self.report(
                pointer,
                "type",
                _("must be {wanted}, found {found}").format(wanted=_("true or false"), found=shown(culprit)),
                wanted="bool",
                found=culprit,
            )

    def _autotuning(self) -> None:
        if "autotuning" not in self.data:
            return
        block = self.block("autotuning")
        for key, default in (("results_dir", "autotuning_results"), ("exps_dir", "autotuning_exps")):
            if not block.get(key, default):
                self.report(f"/autotuning/{key}", "type", _("must not be empty"))
        if block.get("model_info") is not None:
            self.block("model_info", block, "/autotuning")

    def _amp(self) -> None:
        if "amp" in self.data:
            self._enabled_required("amp")

    def _pld(self) -> None:
        if "progressive_layer_drop" in self.data:
            self._enabled_required("progressive_layer_drop")

    def _curriculum(self) -> None:
        if "curriculum_learning" in self.data:
            self._enabled_required("curriculum_learning")

    def _enabled_required(self, name: str, holder: Any = None, base: str = "") -> dict[str, Any]:
        """Readers that ``pop("enabled")`` without a default."""
        block = self.block(name, holder, base)
        if "enabled" not in block:
            raise self.stop(
                base + join_pointer(name),
                "type",
                _("'enabled' must be given in this block"),
                wanted="enabled",
            )
        return block

    def _torch_autocast(self) -> None:
        if "torch_autocast" not in self.data:
            return
        block = self.block("torch_autocast")
        names = {"torch.float16", "fp16", "float16", "half", "torch.float32", "fp32", "float32", "float",
                 "torch.int8", "int8", "torch.bfloat16", "bf16", "bfloat16"}  # fmt: skip
        if "dtype" in block and (not isinstance(block["dtype"], str) or block["dtype"] not in names):
            self._choice("/torch_autocast/dtype", block["dtype"], ["bf16", "fp16", "bfloat16", "float16"])
        if "lower_precision_safe_modules" in block:
            modules = block["lower_precision_safe_modules"]
            if not isinstance(modules, (list, dict, str)) or not all(isinstance(m, str) for m in modules):
                self.report(
                    "/torch_autocast/lower_precision_safe_modules",
                    "type",
                    _("must be {wanted}, found {found}").format(
                        wanted=_("a list of strings"), found=shown(modules)
                    ),
                    found=modules,
                )

    def _optimizer(self) -> None:
        if "optimizer" not in self.data:
            return
        block = self.block("optimizer")
        name = block.get("type")
        if name is None:
            return
        if not isinstance(name, str):
            self.report(
                "/optimizer/type",
                "type",
                _("must be {wanted}, found {found}").format(wanted=_("a string"), found=shown(name)),
                wanted="str",
                found=name,
            )
        if block.get("params") is not None:
            params = self.block("params", block, "/optimizer")
            value = params.get("max_grad_norm", 0)
            if not isinstance(value, (int, float)):
                self.report(
                    "/optimizer/params/max_grad_norm",
                    "type",
                    _("must be {wanted}, found {found}").format(wanted=_("a number"), found=shown(value)),
                    wanted="float",
                    found=value,
                )

    def _scheduler(self) -> None:
        if "scheduler" in self.data:
            self.block("scheduler")

    def _pipeline(self) -> None:
        if "pipeline" in self.data:
            self.block("pipeline")

    def _data_types(self) -> None:
        if "data_types" not in self.data:
            return
        block = self.block("data_types")
        known = self.schema.json_schema["properties"]["data_types"]["properties"]
        if "keep_in_fp32_modules" in known and "keep_in_fp32_modules" in block:
            value = block["keep_in_fp32_modules"]
            if value != "auto" and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
                self.report(
                    "/data_types/keep_in_fp32_modules",
                    "type",
                    _("must be {wanted}, found {found}").format(
                        wanted=_('"auto" or a list of strings'), found=shown(value)
                    ),
                    found=value,
                )

    def _checkpoint(self) -> None:
        if "checkpoint" not in self.data:
            return
        block = self.block("checkpoint")
        value = block.get("tag_validation", "WARN")
        if not isinstance(value, str) or value.upper() not in ("WARN", "IGNORE", "FAIL"):
            self._choice("/checkpoint/tag_validation", value, ["Warn", "Ignore", "Fail"])
        if "parallel_write" in block:
            parallel = self.block("parallel_write", block, "/checkpoint")
            value = parallel.get("pipeline_stage", False)
            if value not in (True, False):
                self._choice("/checkpoint/parallel_write/pipeline_stage", value, [True, False])

    def _checkpoint_writer(self) -> None:
        block = self.data.get("checkpoint")
        if not isinstance(block, dict) or block.get("writer") is None:
            return
        writer = self.block("writer", block, "/checkpoint")
        for key, default, choices in (
            ("type", "FAST", ["FAST", "PYTHON", "MOCK"]),
            ("data_parallel", None, ["REPLICA", "SOCKET", "MACHINE"]),
        ):
            value = writer.get(key, default)
            if value is not None and (not isinstance(value, str) or value.upper() not in choices):
                self._choice(f"/checkpoint/writer/{key}", value, choices)

    def _aio(self) -> None:
        if self.data.get("aio") is None:
            return
        block = self.block("aio")
        if self.variants.get("get_aio_config") == "no-gds":
            return
        if block.get("use_gds", False) and self.accelerator != "cuda":
            self.report("/aio/use_gds", "combination", _("use_gds works only on CUDA devices"))

    def _nebula(self) -> None:
        if "nebula" in self.data:
            self.block("nebula")

    def _expert_parallel(self) -> None:
        if self.data.get("expert_parallel"):
            block = self.block("expert_parallel")
            if block.get("load_balance_coeff") is not None:
                self.report(
                    "/expert_parallel/load_balance_coeff",
                    "type",
                    _("must be null: this release does not support it"),
                )

    def _sparse_attention(self) -> None:
        if "sparse_attention" in self.data:
            block = self.block("sparse_attention")
            modes = ["dense", "fixed", "variable", "bigbird", "bslongformer"]
            if block.get("mode", "fixed") not in modes:
                self._choice("/sparse_attention/mode", block["mode"], modes)

    def _data_efficiency(self) -> None:
        """``runtime/data_pipeline/config.py``."""
        if "data_efficiency" not in self.data:
            return
        block = self.block("data_efficiency")
        base = "/data_efficiency"
        if "data_sampling" in block:
            self.step(base + "/data_sampling", lambda: self._data_sampling(block))
        if "data_routing" in block:
            routing = self.block("data_routing", block, base)
            if "random_ltd" in routing:
                ltd = self.block("random_ltd", routing, base + "/data_routing")
                if ltd.get("enabled", False):
                    self._enabled_required("random_ltd", routing, base + "/data_routing")

    def _data_sampling(self, block: dict[str, Any]) -> None:
        base = "/data_efficiency/data_sampling"
        sampling = self.block("data_sampling", block, "/data_efficiency")
        if "curriculum_learning" in sampling:
            curriculum = self.block("curriculum_learning", sampling, base)
            if curriculum.get("enabled", False) and "curriculum_metrics" not in curriculum:
                self.report(
                    base + "/curriculum_learning",
                    "combination",
                    _("'{key}' must be given while '{block}' is enabled").format(
                        key="curriculum_metrics", block="curriculum_learning"
                    ),
                )
        if "dynamic_batching" in sampling and "get_dynamic_batching" in self.schema.facts.get("helpers", ()):
            self._dynamic_batching(sampling)

    def _dynamic_batching(self, sampling: dict[str, Any]) -> None:
        where = "/data_efficiency/data_sampling/dynamic_batching"
        batching = self.block("dynamic_batching", sampling, where.rpartition("/")[0])
        enabled = bool(batching.get("enabled", False))
        numbers = {"min_batch_size": 1}
        for key in ("min_batch_size", "max_batch_size"):
            if key in batching or key in numbers:
                self._python_int(f"{where}/{key}", batching.get(key, numbers.get(key)))
        if enabled:
            if "max_tokens" not in batching:
                self.report(
                    where,
                    "combination",
                    _("'{key}' must be given while '{block}' is enabled").format(
                        key="max_tokens", block="dynamic_batching"
                    ),
                )
            else:
                self._python_int(where + "/max_tokens", batching["max_tokens"])

    def _python_int(self, pointer: str, value: Any) -> None:
        try:
            int(value)
        except (TypeError, ValueError, OverflowError):
            self.report(
                pointer,
                "type",
                _("must be {wanted}, found {found}").format(wanted=_("an integer"), found=shown(value)),
                wanted="int",
                found=value,
            )

    def _compression(self) -> None:
        from dstui.config.replay_old import compression

        if "compression_training" in self.data:
            compression(self, self.block("compression_training"))

    def _eigenvalue(self) -> None:
        from dstui.config.replay_old import eigenvalue

        if isinstance(self.data.get("compression_training"), dict):
            eigenvalue(self)

    def _elasticity(self) -> None:
        from dstui.config.replay_old import elasticity

        if "elasticity" in self.data:
            elasticity(self, self.block("elasticity"))

    # -- batch --

    elastic: dict[str, Any] | None = None
    """Batch sizes that elasticity (to 0.19.7) puts in the place of the written ones."""

    def _batch(self) -> None:
        """``_set_batch_related_parameters`` and ``_batch_assertion``, floor divisions and all."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        source = self.data if self.elastic is None else self.elastic
        train: Any = source.get(names[0])
        micro: Any = source.get(names[1])
        steps: Any = source.get(names[2])
        wrong = [n for n in names if source.get(n) is not None and not isinstance(source[n], (int, float))]
        for name in wrong:
            self.report(
                join_pointer(name),
                "batch",
                _("must be a number, found {found}").format(found=shown(source[name])),
                found=source[name],
            )
        if wrong or any(p.pointer == "/sequence_parallel_size" for p in self.problems):
            return
        given = [n for n in names if source.get(n) is not None]
        if train is None and micro is None:
            self.report(
                "",
                "batch-missing",
                _("one of '{a}' and '{b}' must be given").format(a=names[0], b=names[1]),
            )
            return
        try:
            if train is not None and micro is not None:
                if steps is None:
                    steps = train // micro // self.world
            elif train is not None:
                if steps is None:
                    steps, micro = 1, train // self.world
                else:
                    micro = train // self.world // steps
            elif steps is not None:
                train = micro * steps * self.world
            else:
                train, steps = micro * self.world, 1
            self.batch = dict(zip(names, (train, micro, steps), strict=True))
            product = micro * steps * self.world
        except (ZeroDivisionError, OverflowError, ValueError) as e:
            zero = next((n for n in names if source.get(n) == 0), names[0])
            self.report(
                join_pointer(zero),
                "batch",
                _("cannot be {found}: {error}").format(found=shown(source.get(zero)), error=e),
            )
            self.batch = None
            return
        for name in names:
            if not self.batch[name] > 0:
                self.report(
                    join_pointer(name) if name in given else join_pointer(given[0]),
                    "batch",
                    _("{name} comes out as {value}: it must be greater than 0").format(
                        name=name, value=shown(self.batch[name])
                    ),
                    sizes=dict(self.batch),
                    world_size=self.world,
                )
                return
        if train != product:
            self.report(
                join_pointer(given[0]),
                "batch",
                _(
                    "train_batch_size {train} is not micro batch {micro} x accumulation {steps} x {world} ranks = {product}"
                ).format(
                    train=shown(train),
                    micro=shown(micro),
                    steps=shown(steps),
                    world=shown(self.world),
                    product=shown(product),
                ),
                sizes=dict(self.batch),
                world_size=self.world,
            )

    def _error_check(self) -> None:
        """``_do_error_check``: combinations of blocks."""
        zero = self.blocks.get("/zero_optimization") if "/zero_optimization" in self.sound else None
        stage = zero["stage"] if zero else None
        if self.allreduce == "sum" and "get_gradient_allreduce_op" in self.schema.facts["readers"]:
            compiled = self.blocks.get("/compile")
            against = ""
            if stage == 3:
                against = _("ZeRO stage 3")
            elif zero and zero.values.get("zenflow") is not None:
                against = "ZenFlow"
            elif compiled and compiled.values.get("deepcompile"):
                against = "DeepCompile"
            if against:
                self.report(
                    "/gradient_allreduce_op",
                    "combination",
                    _("gradient_allreduce_op 'sum' does not go with {other}").format(other=against),
                )
        if self.variants.get("_do_error_check") == "fp16-master-stage-2":
            block = self.blocks.get("/fp16") if "/fp16" in self.sound else None
            master = block.values.get("fp16_master_weights_and_grads") if block else self.fp16_master
            if master and zero and stage != 2:
                self.report(
                    "/fp16/fp16_master_weights_and_grads",
                    "combination",
                    _("{key} needs ZeRO stage 2").format(key="fp16_master_weights_and_grads"),
                )
            return
        for root, key in (
            ("/fp16", "fp16_master_weights_and_grads"),
            ("/bf16", "bf16_master_weights_and_grads"),
            ("/bf16", "bf16_optimizer_states"),
        ):
            block = self.blocks.get(root)
            if block is None or root not in self.sound or not block.values.get(key):
                continue
            if stage == 0:
                self.report(
                    root + join_pointer(key),
                    "combination",
                    _("{key} needs ZeRO stage 1, 2 or 3").format(key=key),
                )
            elif key == "bf16_optimizer_states" and not block["bf16_master_weights_and_grads"]:
                self.report(
                    root + join_pointer(key),
                    "combination",
                    _("{key} needs {other}").format(key=key, other="bf16_master_weights_and_grads"),
                )

    def _warning_check(self) -> None:
        """``_do_warning_check`` only warns, but its ``%`` fails on what is no number."""
        size = self.data.get("vocabulary_size")
        if size and not isinstance(size, (int, float)):
            try:
                size % 8
            except TypeError:
                self.report(
                    "/vocabulary_size",
                    "type",
                    _("must be {wanted}, found {found}").format(wanted=_("an integer"), found=shown(size)),
                    wanted="int",
                    found=size,
                )


_READERS: dict[str, tuple[str, str]] = {
    "get_communication_data_type": ("/communication_data_type", "_communication"),
    "get_gradient_allreduce_op": ("/gradient_allreduce_op", "_allreduce_op"),
    "get_zero_config": ("/zero_optimization", "_zero_block"),
    "DeepSpeedActivationCheckpointingConfig": ("/activation_checkpointing", "_activation_checkpointing"),
    "DeepSpeedCommsConfig": ("/comms_logger", "_comms"),
    "get_monitor_config": ("/tensorboard", "_monitor"),
    "get_float16_config": ("/fp16", "_fp16"),
    "get_bfloat16_config": ("/bf16", "_bf16"),
    "get_fp16_enabled": ("/fp16", "_precision"),
    "get_amp_params": ("/amp", "_amp"),
    "get_torch_autocast_enabled": ("/torch_autocast", "_torch_autocast"),
    "get_compression_config": ("/compression_training", "_compression"),
    "get_optimizer_name": ("/optimizer", "_optimizer"),
    "get_scheduler_name": ("/scheduler", "_scheduler"),
    "DeepSpeedFlopsProfilerConfig": ("/flops_profiler", "_flops"),
    "get_wall_clock_breakdown": ("/wall_clock_breakdown", "_breakdown"),
    "DeepSpeedAutotuningConfig": ("/autotuning", "_autotuning"),
    "get_eigenvalue_config": ("/quantize_training", "_eigenvalue"),
    "get_hybrid_engine_config": ("/hybrid_engine", "_hybrid"),
    "get_sparse_attention": ("/sparse_attention", "_sparse_attention"),
    "get_pipeline_config": ("/pipeline", "_pipeline"),
    "get_pld_params": ("/progressive_layer_drop", "_pld"),
    "get_curriculum_params_legacy": ("/curriculum_learning", "_curriculum"),
    "get_data_efficiency_config": ("/data_efficiency", "_data_efficiency"),
    "get_checkpoint_tag_validation_mode": ("/checkpoint", "_checkpoint"),
    "get_data_types_params": ("/data_types", "_data_types"),
    "get_aio_config": ("/aio", "_aio"),
    "DeepSpeedNebulaConfig": ("/nebula", "_nebula"),
    "get_checkpoint_config": ("/checkpoint", "_checkpoint_writer"),
    "WeightQuantConfig": ("/weight_quantization", "_weight_quantization"),
    "CompileConfig": ("/compile", "_compile"),
    "get_compile_config": ("/compile", "_compile"),
    "get_timers_config": ("/timers", "_timers"),
    "get_tensor_parallel_config": ("/tensor_parallel", "_tensor_parallel"),
    "get_expert_parallel_config": ("/expert_parallel", "_expert_parallel"),
}
"""Reader of ``runtime/config.py`` -> (pointer to blame for an unforeseen failure, method)."""
