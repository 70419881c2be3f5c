"""What a rule looks at: one config as its engine hands it to one DeepSpeed release.

``Subject`` reads values the way DeepSpeed does: a lenient integer (``"3"``, ``3.0``, ``true``) is an integer, a
key that is ``"auto"`` inside a pydantic block is absent, old names count as the new ones. It never raises on a
config of the wrong shape; a value that DeepSpeed would refuse reads as None here, and the shape rules speak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstui.config.pointer import join_pointer, lookup
from dstui.rules.registry import version_key
from dstui.rules.tables import PYDANTIC_BLOCKS, default_of

if TYPE_CHECKING:
    from dstui.config.replay import Problem
    from dstui.config.resolve import Resolved
    from dstui.config.schema import Schema
    from dstui.facts.model import Facts
    from dstui.rules.command import Launch


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False


MISSING: Any = _Missing()
"""A key that is not in the file (``None`` is the value ``null``)."""

TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def as_int(value: Any) -> int | None:
    """``value`` as pydantic's lax mode reads an int (2.0, "2", true), else None."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        try:
            number = float(value)
            return int(number) if number.is_integer() else None
        except (ValueError, OverflowError):
            return None
    return None


def as_number(value: Any) -> float | None:
    """``value`` as DeepSpeed's readers take a number (``"2e8"``, true = 1), else None."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


def as_bool(value: Any) -> bool | None:
    """``value`` as pydantic's lax mode reads a bool (1, "yes"), else None."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        return True if value.lower() in TRUE else False if value.lower() in FALSE else None
    return None


@dataclass(frozen=True)
class Model:
    """What is known of the model that will be trained; all else of it is left to the estimate."""

    params: int | None = None
    trained: int | None = None
    """Parameters with gradients; None = all."""
    largest: int | None = None
    """Elements of the largest single parameter, usually the embedding."""


class Subject:
    """One file, one engine, one release. ``raw`` is the file, ``data`` what DeepSpeed gets from the engine."""

    def __init__(
        self,
        data: Mapping[str, Any],
        *,
        release: str,
        engine: str = "deepspeed",
        world_size: int = 1,
        world_size_from: str = "default",
        args: Mapping[str, Any] | None = None,
        facts: Facts | None = None,
        model: Model | None = None,
        schema: Schema | None = None,
        resolved: Resolved | None = None,
        folder: Callable[[str], str | None] | None = None,
        launch: Launch | None = None,
    ) -> None:
        self.raw = data
        self.data: Mapping[str, Any] = data if resolved is None else resolved.data
        self.release = release
        self.key = version_key(release)
        self.engine = engine
        self.world_size = world_size
        self.world_size_from = world_size_from
        self.args = args
        self.facts = facts
        self.model = model
        self.schema = schema
        self.resolved = resolved
        self._folder = folder
        self.launch = launch

    # -- releases

    def at_least(self, release: str) -> bool:
        """The release is ``release`` or later."""
        return self.key >= version_key(release)

    def before(self, release: str) -> bool:
        """The release is earlier than ``release``."""
        return self.key < version_key(release)

    def between(self, first: str, last: str) -> bool:
        """The release lies from ``first`` to ``last``, both included."""
        return version_key(first) <= self.key <= version_key(last)

    @property
    def strict(self) -> bool:
        """The file reaches DeepSpeed as it is written; False when an engine fills ``auto`` first."""
        return self.engine == "deepspeed"

    # -- the machine

    @property
    def world_known(self) -> bool:
        """The number of ranks was said or inferred, not just assumed to be 1."""
        return self.world_size_from != "default"

    def folder(self, path: str) -> str | None:
        """``ok``, ``missing`` (could be made), ``unwritable``; None when nobody looked at this machine's disks."""
        for place in self.facts.storage if self.facts else ():
            if place.path.rstrip("/") == path.rstrip("/"):
                return None if place.writable is None else "ok" if place.writable else "unwritable"
        return self._folder(path) if self._folder else None

    # -- values

    def get(self, pointer: str, default: Any = MISSING) -> Any:
        """The value DeepSpeed is handed at ``pointer``; ``default`` when the key is absent."""
        return lookup(self.data, pointer, default)

    def written(self, pointer: str) -> bool:
        """Whether the file itself has the key."""
        return lookup(self.raw, pointer, MISSING) is not MISSING

    def block(self, pointer: str) -> Mapping[str, Any]:
        """The object at ``pointer``; empty when it is absent or something else."""
        value = self.get(pointer, {})
        return value if isinstance(value, Mapping) else {}

    def effective(self, pointer: str) -> Any:
        """The value with a dropped ``auto`` and an absent key replaced by the release's default."""
        value = self.get(pointer)
        if value is not MISSING and not (value == "auto" and _in_pydantic_block(pointer)):
            return value
        if self.resolved is not None and self.resolved.effective is not None:
            return self.resolved.value(pointer, default_of(pointer, self.key))
        return default_of(pointer, self.key)

    def integer(self, pointer: str) -> int | None:
        """The effective value at ``pointer`` as a whole number; None when it is none."""
        return as_int(self.effective(pointer))

    def number(self, pointer: str) -> float | None:
        """The effective value at ``pointer`` as a number; None when it is none."""
        return as_number(self.effective(pointer))

    def flag(self, pointer: str) -> bool:
        """Whether the effective value at ``pointer`` is on."""
        return as_bool(self.effective(pointer)) is True

    # -- what the config says in one word

    @cached_property
    def stage(self) -> int | None:
        """ZeRO stage 0-3; None when it is not one."""
        zero = self.get("/zero_optimization")
        if isinstance(zero, bool):
            return 1 if zero else 0
        if not isinstance(zero, Mapping):
            return 0 if zero is MISSING else None
        stage = self.integer("/zero_optimization/stage")
        return stage if stage in (0, 1, 2, 3) else None

    def offload(self, which: str) -> str:
        """Device of ``offload_optimizer`` or ``offload_param``: none, cpu, nvme; ``?`` when it is no device.

        The old ``cpu_offload: true`` and ``cpu_offload_param: true`` count as cpu (runtime/config_utils.py).
        """
        base = "/zero_optimization/" + which
        value = self.get(base)
        if isinstance(value, Mapping):
            device = value.get("device", "none")
            device = "none" if device == "auto" else device
            return device if device in ("none", "cpu", "nvme") else "?"
        old = "/zero_optimization/" + ("cpu_offload" if which == "offload_optimizer" else "cpu_offload_param")
        return "cpu" if as_bool(self.get(old, False)) else "none"

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload("offload_optimizer") in ("cpu", "nvme")

    def precision(self, name: str) -> bool:
        """Whether ``fp16`` or ``bf16`` is on. ``bfloat16`` counts when ``bf16`` is absent (runtime/precision_config.py)."""
        block = self.get("/" + name)
        if name == "bf16" and block is MISSING:
            block = self.get("/bfloat16")
        if not isinstance(block, Mapping):
            return False
        value = block.get("enabled", False)
        if value == "auto":
            # until 0.17.0 the block was read as a plain dict, and a string is true
            return self.before("0.17.1")
        return as_bool(value) is True if self.at_least("0.17.1") else bool(value)

    @property
    def optimizer(self) -> str | None:
        value = self.get("/optimizer/type", None)
        return value if isinstance(value, str) else None

    @property
    def scheduler(self) -> str | None:
        value = self.get("/scheduler/type", None)
        return value if isinstance(value, str) else None

    def batch(self) -> tuple[Any, Any, Any]:
        """(train, micro, accumulation) as handed to DeepSpeed; ``auto`` and absent are both MISSING."""
        values = tuple(self.get("/" + k) for k in BATCH_KEYS)
        return tuple(MISSING if v is None or v == "auto" else v for v in values)

    @cached_property
    def autos(self) -> tuple[str, ...]:
        """Pointers of every ``"auto"`` that DeepSpeed itself will read, in file order.

        Those that the engine fills, with values known here or not, are not among them.
        """
        still_open = set(self.resolved.open) if self.resolved else set()
        return tuple(p for p in _find_auto(self.data, "") if p not in still_open)

    def names(self, block: str) -> tuple[str, ...]:
        """The keys that this release knows in a block; empty without a schema."""
        return self.schema.names(block) if self.schema else ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Why the release refuses the config, in its order; empty without a schema."""
        return tuple(self.resolved.problems) if self.resolved else ()

    @property
    def data_parallel_size(self) -> int:
        """Ranks that share the batch: the world size, divided by ``sequence_parallel_size`` (0.17.0+).

        runtime/config.py: ``world_size = dist.get_world_size() / sequence_parallel_size``.
        """
        sequence = as_int(self.get("/sequence_parallel_size", 1)) or 1
        if self.at_least("0.17.0") and sequence > 1 and self.world_size % sequence == 0:
            return self.world_size // sequence
        return self.world_size


def _in_pydantic_block(pointer: str) -> bool:
    return any(pointer.startswith(f"/{b}/") for b in PYDANTIC_BLOCKS)


def _find_auto(value: Any, pointer: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for k, v in value.items():
            yield from _find_auto(v, pointer + join_pointer(k))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _find_auto(v, f"{pointer}/{i}")
    elif value == "auto":
        yield pointer
