"""What a ds_config, a training script and a machine size come to, as the numbers the replay needs.

``read_settings`` is the only place of this room that reads a config. Values come from the file, defaults from
``dstui.config.resolve`` for the release; for a release without a schema, and a file that it refuses, the
defaults below are used, those of ``deepspeed/runtime/zero/config.py`` and ``offload_config.py`` (0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dstui.config import schema as schemas
from dstui.config.resolve import Resolved, resolve
from dstui.errors import DstuiError
from dstui.estimate.inputs import Attention, Loss, ModelShape, Training
from dstui.i18n import _

Target = Literal["none", "cpu", "nvme"]
Optimizer = Literal["adam", "lion", "sgd", "momentum", "adagrad", "muon", "other"]

_MOMENTS: dict[str, int] = {
    "adam": 8, "lion": 4, "sgd": 0, "momentum": 4, "adagrad": 4, "muon": 2, "other": 8,
}  # fmt: skip
"""Bytes of optimizer state a parameter beside the fp32 copy."""
_MOST = 100_000_000
"""Of tokens, rows, groups: more is a slip of the keyboard."""


@dataclass(frozen=True)
class Settings:
    """Effective values. Sizes named ``*_elements`` in the config are elements, everything else is plain."""

    stage: int
    ranks: int
    """Over which ZeRO divides: all, but for those that share each layer."""
    processes: int
    """All ranks."""
    ranks_per_node: int
    tensor_parallel: int
    """Ranks that share each layer (AutoTP)."""
    sequence_parallel: int
    """Ranks that share a sequence (Ulysses); they divide the states among them too."""
    micro_batch: int
    accumulation: int
    seq: int
    checkpointing: bool
    reentrant: bool
    """A recomputation runs the whole layer, and autograd on its own."""
    attention: Attention
    loss: Loss
    element: int
    half: bool
    accumulate: int
    """Bytes of an element of the gradient accumulation type."""
    optimizer: Optimizer
    fused: bool
    """No temporaries in the step (FusedAdam, fused=True, CPU Adam)."""
    client: bool
    """The script makes the optimizer."""
    overlap: bool
    contiguous: bool
    reduce_bucket: int
    prefetch: int
    live: int
    reuse: int
    persist: int
    sub_group: int
    offload_optimizer: Target
    offload_param: Target
    ratio: float
    pin_optimizer: bool
    pin_param: bool
    buffer_count: int
    param_buffer_count: int
    param_buffer: int
    max_in_cpu: int
    zero_init: bool
    gather_on_save: bool
    communication: int
    """Bytes of the communication type."""
    param_groups: int
    """Of the optimizer. The Trainer makes two, with and without weight decay, of which the first holds nearly all
    (``trainer.get_decay_parameter_names``); groups are taken to be so here too."""
    release: tuple[int, ...]
    lora_rank: int
    lora_targets: tuple[str, ...]
    quant: str
    load: int
    """Bytes of a parameter while the model loads."""
    load_on_gpu: bool
    """The model is made there at once."""
    hold_logits: bool
    expandable: bool
    adapter: int
    """Bytes of an element of a LoRA adapter. Under zero.Init the engine casts no parameter
    (``engine._cast_module_mixed_precision``), so adapters that peft made in fp32 afterwards stay so."""
    temporaries: int
    """fp32 tensors, as large as the gradient, that one step of the optimizer makes beside it."""

    @property
    def moment(self) -> int:
        return _MOMENTS[self.optimizer]


def release_tuple(text: str | None) -> tuple[int, ...]:
    """``0.19.8`` -> ``(0, 19, 8)``; local parts are ignored. None: the newest known."""
    parts: list[int] = []
    for piece in (text or schemas.newest()).split("+")[0].split("."):
        digits = "".join(c for c in piece if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    if not parts:
        raise DstuiError(
            _("'{text}' is not a release of DeepSpeed").format(text=text),
            _("write it like {release}").format(release=schemas.newest()),
        )
    return tuple(parts)


def read_settings(
    config: Mapping[str, Any],
    training: Training,
    shape: ModelShape,
    *,
    release: str | None,
    ranks: int,
    ranks_per_node: int,
) -> tuple[Settings, list[str]]:
    """Effective settings and the assumptions that they rest on (translated).

    ``auto`` is filled as transformers fills it (``integrations/deepspeed.py``,
    ``HfTrainerDeepSpeedConfig.trainer_config_finalize``): buckets from the hidden size, batch from the script.
    Raises DstuiError where a value cannot be a setting at all.
    """
    for name, least in (
        ("seq", 1),
        ("micro_batch", 1),
        ("param_groups", 1),
        ("sequence_parallel", 1),
        ("lora_rank", 0),
    ):
        value = getattr(training, name)
        if value is not None and not least <= value <= _MOST:
            raise DstuiError(
                _("'{key}' must be from {least} to {most}, found {value!r}").format(
                    key=name, least=least, most=_MOST, value=value
                ),
                _("give a number in between"),
            )
    settings, assumptions = _Reader(
        config, training, shape, release_tuple(release), ranks, ranks_per_node
    ).read()
    if release is None:
        assumptions.append(
            _("the DeepSpeed release is not known: {release}").format(release=schemas.newest())
        )
    return settings, assumptions


class _Reader:
    def __init__(
        self,
        config: Mapping[str, Any],
        training: Training,
        shape: ModelShape,
        release: tuple[int, ...],
        ranks: int,
        ranks_per_node: int,
    ) -> None:
        self.config, self.training, self.shape = config, training, shape
        self.release, self.ranks, self.ranks_per_node = release, ranks, ranks_per_node
        self.assumptions: list[str] = []
        self.resolved = self._resolve()
        zero = config.get("zero_optimization")
        if isinstance(zero, bool):  # DeepSpeed 0.2's form: true means stage 1
            zero = {"stage": 1 if zero else 0}
        self.zero: Mapping[str, Any] = zero if isinstance(zero, Mapping) else {}

    def _resolve(self) -> Resolved | None:
        """The release's own reading of the file; None when it has no schema here."""
        text = ".".join(map(str, self.release))
        if not schemas.known(text):
            self.assumptions.append(
                _("DeepSpeed {release} has no schema here: defaults of {newest}").format(
                    release=text, newest=schemas.newest()
                )
            )
            return None
        resolved = resolve(self.config, release=text, world_size=self.ranks)
        if (
            resolved.verdict == "rejected"
            and resolved.problem is not None
            and not self._has_auto(self.config)
        ):
            self.assumptions.append(
                _(
                    "DeepSpeed {release} refuses this config (see: dstui check); the figures are those it would need"
                ).format(release=text)
            )
        return resolved if resolved.effective is not None else None

    def _has_auto(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(self._has_auto(v) for v in value.values())
        return isinstance(value, str) and value == "auto"

    def zero_default(self, key: str, fallback: Any, block: str = "") -> Any:
        """Default of a key of ``zero_optimization`` (or of one of its blocks) in this release."""
        if self.resolved is None:
            return fallback
        parent: Mapping[str, Any] = self.section(self.zero, block) if block else self.zero
        if key in parent:
            return fallback
        value = self.resolved.value("/".join(p for p in ("/zero_optimization", block, key) if p))
        return value if isinstance(value, (int, float)) else fallback

    def zero_number(self, key: str, fallback: float, auto: float | None = None, block: str = "") -> int:
        """A number of ``zero_optimization``, under its own name or without the ``stage3_`` of old files."""
        parent: Mapping[str, Any] = self.section(self.zero, block) if block else self.zero
        keys = (key, key.removeprefix("stage3_"))
        return self.number(parent, keys, self.zero_default(key, fallback, block), auto)

    def zero_flag(self, key: str, fallback: bool, block: str = "") -> bool:
        parent: Mapping[str, Any] = self.section(self.zero, block) if block else self.zero
        return self.flag(parent, key, bool(self.zero_default(key, fallback, block)))

    def section(self, parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        value = parent.get(key)
        return value if isinstance(value, Mapping) else {}

    def number(
        self, parent: Mapping[str, Any], keys: tuple[str, ...], default: float, auto: float | None = None
    ) -> int:
        for key in keys:
            value = parent.get(key)
            if value is None:
                continue
            if value == "auto":
                return int(default if auto is None else auto)
            try:
                number = float(value)
            except (TypeError, ValueError) as e:
                raise DstuiError(
                    _("'{key}' must be a number, found {value!r}").format(key=key, value=value),
                    _("see: dstui check"),
                ) from e
            if number != number or number < 0 or number > 1e15:
                raise DstuiError(
                    _("'{key}' must be from 0 to {most}, found {value!r}").format(
                        key=key, most="1e15", value=value
                    ),
                    _("see: dstui check"),
                )
            return int(number)
        return int(default)

    def flag(self, parent: Mapping[str, Any], key: str, default: bool) -> bool:
        value = parent.get(key)
        if isinstance(value, str):
            if value.lower() in ("true", "false"):
                return value.lower() == "true"
            return default
        return default if value is None else bool(value)

    def target(self, key: str, legacy: str) -> tuple[Target, Mapping[str, Any]]:
        section = self.section(self.zero, key)
        device = str(section.get("device", "none" if not section else "cpu")).lower()
        if not section and self.flag(self.zero, legacy, False):
            device = "cpu"
        if section and "device" not in section:
            device = "none"
        return ("cpu" if device == "cpu" else "nvme" if device == "nvme" else "none"), section

    def precision(self) -> tuple[int, bool]:
        def on(name: str) -> bool:
            value = self.section(self.config, name).get("enabled", False)
            if value == "auto":
                dtype = self.training.load_dtype or self.shape.dtype or "bfloat16"
                chosen = dtype == ("bfloat16" if name == "bf16" else "float16")
                if chosen:
                    self.assumptions.append(_("{name} 'auto' is taken as on").format(name=name))
                return chosen
            return bool(value) and value != "false"

        if on("bf16") or on("bfloat16"):
            return 2, False
        if on("fp16"):
            return 2, True
        if self.section(self.config, "torch_autocast").get("enabled"):
            self.assumptions.append(
                _("torch autocast: parameters and gradients in fp32; activations are overestimated")
            )
        return 4, False

    def read(self) -> tuple[Settings, list[str]]:
        zero, training = self.zero, self.training
        stage = self.number(zero, ("stage",), 0)
        if stage not in (0, 1, 2, 3):
            raise DstuiError(
                _("ZeRO stage must be 0 to 3, found {stage}").format(stage=stage), _("see: dstui check")
            )
        element, half = self.precision()
        offload_optimizer, optimizer_section = self.target("offload_optimizer", "cpu_offload")
        offload_param, _param_section = self.target("offload_param", "cpu_offload_params")
        if stage == 0:
            offload_optimizer = "none"
        if stage < 3:
            offload_param = "none"
            if offload_optimizer == "nvme":
                offload_optimizer = "cpu"  # stages 1 and 2 keep the states in RAM (stage_1_and_2.py)
        hidden = self.shape.hidden or 4096
        pin_default = self.release >= (0, 19, 5)
        micro, accumulation = self.batch()
        name, fused, client = self.optimizer(offload_optimizer != "none")
        accumulate = self.accumulation_type(element, half, stage)
        lora = training.lora_rank or 0
        if lora and self.shape.family is None:
            lora = 0
        stage3_gather = self.flag(zero, "stage3_gather_16bit_weights_on_model_save", False) or self.flag(
            zero, "stage3_gather_fp16_weights_on_model_save", False
        )
        tensor, sequence = self.degrees()
        # with shared sequences another key counts, and its default is fp32 (``engine.py``, ``constants.py``)
        key, default = (
            ("seq_parallel_communication_data_type", 4)
            if sequence > 1
            else ("communication_data_type", element)
        )
        communication = {"fp32": 4, "fp16": 2, "bfp16": 2, "bf16": 2}.get(str(self.config.get(key)), default)
        zero_init = training.zero_init if training.zero_init is not None else training.loop == "hf"
        settings = Settings(
            stage=stage,
            ranks=max(1, self.ranks // tensor),
            processes=self.ranks,
            ranks_per_node=self.ranks_per_node,
            tensor_parallel=tensor,
            sequence_parallel=sequence,
            micro_batch=micro,
            accumulation=accumulation,
            seq=training.seq,
            checkpointing=training.checkpointing,
            reentrant=training.reentrant and training.checkpointing,
            attention=training.attention,
            loss=training.loss,
            element=element,
            half=half,
            accumulate=accumulate,
            optimizer=name,
            fused=fused,
            client=client,
            overlap=self.zero_flag("overlap_comm", stage == 3),
            contiguous=self.zero_flag("contiguous_gradients", True) or offload_optimizer != "none",
            reduce_bucket=max(1, self.zero_number("reduce_bucket_size", 5e8, hidden * hidden)),
            prefetch=self.zero_number("stage3_prefetch_bucket_size", 5e7, int(0.9 * hidden * hidden)),
            live=self.zero_number("stage3_max_live_parameters", 1e9),
            reuse=self.zero_number("stage3_max_reuse_distance", 1e9),
            persist=self.zero_number("stage3_param_persistence_threshold", 1e5, 10 * hidden),
            sub_group=max(1, self.zero_number("sub_group_size", 1e9)),
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            ratio=self.ratio(optimizer_section),
            pin_optimizer=self.zero_flag("pin_memory", pin_default, "offload_optimizer"),
            pin_param=self.zero_flag("pin_memory", pin_default, "offload_param"),
            buffer_count=max(1, self.zero_number("buffer_count", 4, block="offload_optimizer")),
            param_buffer_count=max(1, self.zero_number("buffer_count", 5, block="offload_param")),
            param_buffer=self.zero_number("buffer_size", 1e8, block="offload_param"),
            max_in_cpu=self.zero_number("max_in_cpu", 1e9, block="offload_param"),
            zero_init=bool(zero_init) and stage == 3,
            gather_on_save=stage3_gather and stage == 3,
            communication=communication,
            param_groups=max(
                training.param_groups, 2 if client and not lora and training.loop == "hf" else 1
            ),
            release=self.release,
            lora_rank=lora,
            lora_targets=() if training.lora_targets == "all-linear" else tuple(training.lora_targets),
            quant=training.quant,
            load={"float32": 4, "float16": 2, "bfloat16": 2}.get(
                training.load_dtype or self.shape.dtype or "", element
            ),
            load_on_gpu=training.load_on == "gpu",
            hold_logits=bool(training.hold_logits),
            expandable=bool(training.expandable),
            adapter=4 if lora and zero_init and stage == 3 else element,
            temporaries=self.temporaries(name, fused),
        )
        return settings, self.assumptions

    def degrees(self) -> tuple[int, int]:
        """Ranks that share a layer and those that share a sequence. The latter are asked of a config in which
        DeepSpeed itself reads them (``deepspeed/__init__.py``), else of the script."""
        tensor = self.number(self.section(self.config, "tensor_parallel"), ("autotp_size",), 1)
        sequence = self.number(self.config, ("sequence_parallel_size",), self.training.sequence_parallel)
        for name, n in (("tensor_parallel.autotp_size", tensor), ("sequence_parallel_size", sequence)):
            if n > 1 and self.ranks % n:
                raise DstuiError(
                    _("{name} {n} does not divide {ranks} ranks").format(name=name, n=n, ranks=self.ranks),
                    _("choose a divisor of the number of ranks"),
                )
        if tensor > 1:
            self.assumptions.append(
                _("tensor parallel over {n} ranks: every linear layer is taken to be split").format(n=tensor)
            )
        if sequence > 1:
            self.assumptions.append(_("each sequence is shared by {n} ranks (Ulysses)").format(n=sequence))
        return max(1, tensor), max(1, sequence)

    def ratio(self, section: Mapping[str, Any]) -> float:
        value = section.get("ratio", 1.0)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
        return 1.0

    def batch(self) -> tuple[int, int]:
        """Micro batch and accumulation steps (``runtime/config.py: _set_batch_related_parameters``)."""

        def known(key: str) -> int | None:
            value = self.config.get(key)
            if value is None or value == "auto":
                return None
            return max(1, self.number(self.config, (key,), 1))

        total, micro, steps = (
            known("train_batch_size"),
            known("train_micro_batch_size_per_gpu"),
            known("gradient_accumulation_steps"),
        )
        ranks = max(1, self.ranks // self.number(self.config, ("sequence_parallel_size",), 1))
        if micro is None and total is not None:
            micro = max(1, total // (ranks * (steps or 1)))
        if micro is None:
            micro = self.training.micro_batch
            if micro is None:
                micro = 1
                self.assumptions.append(_("micro batch 1: neither the config nor the script names one"))
        if steps is None:
            steps = max(1, total // (ranks * micro)) if total is not None else 1
        return micro, steps

    def optimizer(self, on_cpu: bool) -> tuple[Optimizer, bool, bool]:
        """Kind, whether its step is free of temporaries, whether the script makes it."""
        section = self.section(self.config, "optimizer")
        kind = str(section.get("type", "")).lower()
        params = self.section(section, "params")
        client = not kind
        if client:
            kind = (self.training.optimizer or "adamw_torch").lower()
            if not on_cpu and self.training.optimizer is None and self.training.loop != "hf":
                self.assumptions.append(_("the config names no optimizer: torch.optim.AdamW is assumed"))
        fused = on_cpu or "fused" in kind
        if self.training.loop == "hf" and self.training.optimizer is None:
            fused = True  # the Trainer's default is adamw_torch_fused (training_args.py, torch >= 2.8)
        if not client:
            fused = on_cpu or not params.get("torch_adam")
            asked = (self.training.optimizer or "").lower()
            if asked and asked.partition("_")[0] not in kind and kind not in asked:
                self.assumptions.append(
                    _("the config names the optimizer {name}: {asked} of the script is not used").format(
                        name=section.get("type"), asked=self.training.optimizer
                    )
                )
        if "8bit" in kind or "4bit" in kind:
            self.assumptions.append(
                _("optimizer '{name}' is counted with fp32 states: its own are smaller").format(name=kind)
            )
        if "adagrad" in kind:
            return "adagrad", fused, client
        if "muon" in kind:
            return "muon", fused, client
        if "lion" in kind:
            return "lion", fused, client
        if "sgd" in kind:
            return ("momentum" if params.get("momentum") else "sgd"), fused, client
        if "adam" in kind or "lamb" in kind:
            return "adam", fused, client
        self.assumptions.append(
            _("optimizer '{name}' is counted like Adam: two fp32 states a parameter").format(name=kind)
        )
        return "other", False, client

    @staticmethod
    def temporaries(name: Optimizer, fused: bool) -> int:
        """``torch.optim`` takes the foreach path for parameters on a GPU: Adam makes one tensor there, the root
        of the second moment (``adamw.py: _multi_tensor_adamw``, ``exp_avg_sq_sqrt``)."""
        if fused or name in ("sgd", "momentum"):
            return 0
        return 1 if name == "adam" else 2

    def accumulation_type(self, element: int, half: bool, stage: int) -> int:
        """Bytes of ``data_types.grad_accum_dtype``; before 0.17.6 bf16 without ZeRO accumulated in fp32
        (``engine.get_data_types``)."""
        value = str(self.section(self.config, "data_types").get("grad_accum_dtype") or "").lower()
        if value in ("fp32", "float32"):
            return 4
        if value in ("fp16", "bf16", "float16", "bfloat16"):
            return 2
        if stage == 0 and element == 2 and not half and self.release < (0, 17, 6):
            return 4
        return element
