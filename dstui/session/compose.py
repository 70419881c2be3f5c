"""Field values <-> ds_config: reads the fields out of a config, and the edits that write them into it.

Only keys that a field owns are ever written or dropped; everything else of an opened file stays. Edits are
RFC 6902 operations, so that a document can apply them without losing comments and order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from dstui.config.pointer import join_pointer, lookup, split_pointer

AUTO = "auto"
Z = "/zero_optimization"
OO = Z + "/offload_optimizer"
OP = Z + "/offload_param"

ALIASES: dict[str, tuple[str, ...]] = {
    "/bf16": ("/bfloat16",),
    Z + "/stage3_prefetch_bucket_size": (Z + "/prefetch_bucket_size",),
    Z + "/stage3_param_persistence_threshold": (Z + "/param_persistence_threshold",),
    Z + "/stage3_gather_16bit_weights_on_model_save": (
        Z + "/gather_16bit_weights_on_model_save",
        Z + "/stage3_gather_fp16_weights_on_model_save",
    ),
}
"""Other names that DeepSpeed takes for a key; both at once are refused (runtime/zero/config.py @0.19.8)."""

STAGE3_KEYS = (
    "stage3_prefetch_bucket_size",
    "prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "param_persistence_threshold",
    "stage3_max_live_parameters",
    "max_live_parameters",
    "stage3_max_reuse_distance",
    "max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "sub_group_size",
)
"""Read at stage 3 only: dropped when the person leaves stage 3."""


_MISSING = object()


class Editor:
    """Applies edits to a private copy and records them, parents first."""

    def __init__(self, base: Mapping[str, Any] | None) -> None:
        self.data: dict[str, Any] = copy.deepcopy(dict(base)) if base is not None else {}
        self.edits: list[dict[str, Any]] = []

    def get(self, pointer: str, default: Any = None) -> Any:
        return lookup(self.data, self.name(pointer), default)

    def has(self, pointer: str) -> bool:
        return lookup(self.data, self.name(pointer), _MISSING) is not _MISSING

    def name(self, pointer: str) -> str:
        """The pointer as this file spells it (an alias that is in use stays in use)."""
        for canonical, others in ALIASES.items():
            if pointer == canonical or pointer.startswith(canonical + "/"):
                for alias in others:
                    if lookup(self.data, alias, _MISSING) is not _MISSING:
                        return alias + pointer[len(canonical) :]
        return pointer

    def put(self, pointer: str, value: Any) -> None:
        """Set a value; nothing is recorded when it is already there with the same type."""
        pointer = self.name(pointer)
        *parents, last = split_pointer(pointer)
        node: Any = self.data
        path = ""
        for i, p in enumerate(parents):
            path += join_pointer(p)
            child = node.get(p)
            if not isinstance(child, dict):
                fresh: dict[str, Any] = {}
                for q in [*reversed(parents[i + 1 :])]:
                    fresh = {q: fresh}
                leaf = fresh
                for q in parents[i + 1 :]:
                    leaf = leaf[q]
                leaf[last] = copy.deepcopy(value)
                self.edits.append(
                    {"op": "replace" if p in node else "add", "path": path, "value": copy.deepcopy(fresh)}
                )
                node[p] = fresh
                return
            node = child
        old = node.get(last, _MISSING)
        if old is not _MISSING and old == value and isinstance(old, bool) == isinstance(value, bool):
            return
        self.edits.append(
            {"op": "add" if old is _MISSING else "replace", "path": pointer, "value": copy.deepcopy(value)}
        )
        node[last] = copy.deepcopy(value)

    def drop(self, pointer: str) -> None:
        """Remove a key if it is there."""
        pointer = self.name(pointer)
        *parents, last = split_pointer(pointer)
        node: Any = self.data
        for p in parents:
            node = node.get(p) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            del node[last]
            self.edits.append({"op": "remove", "path": pointer})


def _device(block: Any) -> str:
    if not isinstance(block, Mapping):
        return "none"
    device = block.get("device", "none")
    return device if device in ("cpu", "nvme") else "none"


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    """The field values that a config states; what it leaves out or gives as ``auto`` is absent."""
    e = Editor(data)
    out: dict[str, Any] = {}

    def take(field: str, pointer: str, kind: type | tuple[type, ...], convert: Callable[[Any], Any]) -> None:
        value = e.get(pointer)
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            out[field] = convert(value)

    number = (int, float)
    zero = data.get("zero_optimization")
    if isinstance(zero, bool):
        out["stage"] = int(zero)
    elif isinstance(zero, Mapping):
        if zero.get("stage", 0) in (0, 1, 2, 3) and not isinstance(zero.get("stage"), bool):
            out["stage"] = int(zero.get("stage", 0))
        opt_device = _device(zero.get("offload_optimizer"))
        param = _device(zero.get("offload_param"))
        if zero.get("cpu_offload") is True:
            opt_device = "cpu"
        if zero.get("cpu_offload_param") is True:
            param = "cpu"
        out["offload"] = {
            (False, False): "none",
            (True, False): "optimizer",
            (False, True): "param",
            (True, True): "both",
        }[opt_device != "none", param != "none"]
        if opt_device != "none":
            out["optimizer_device"] = opt_device
            take("pin_optimizer", OO + "/pin_memory", bool, bool)
        if param != "none":
            out["param_device"] = param
            take("pin_param", OP + "/pin_memory", bool, bool)
        for block in (OO, OP):
            take("nvme_path", block + "/nvme_path", str, str)
        take("overlap_comm", Z + "/overlap_comm", bool, bool)
        take("reduce_bucket_size", Z + "/reduce_bucket_size", number, int)
        take("allgather_bucket_size", Z + "/allgather_bucket_size", number, int)
        take("prefetch_bucket_size", Z + "/stage3_prefetch_bucket_size", number, int)
        take("persistence_threshold", Z + "/stage3_param_persistence_threshold", number, int)
    else:
        out["stage"] = 0
    take("micro_batch", "/train_micro_batch_size_per_gpu", number, int)
    take("accumulation", "/gradient_accumulation_steps", number, int)
    take("global_batch", "/train_batch_size", number, int)
    if e.get("/bf16/enabled") is True:
        out["precision"] = "bf16"
    elif e.get("/fp16/enabled") is True:
        out["precision"] = "fp16"
    elif AUTO not in (e.get("/bf16/enabled"), e.get("/fp16/enabled")):
        out["precision"] = "fp32"
    optimizer = data.get("optimizer")
    if optimizer is None:
        out["optimizer"] = "script"
    elif isinstance(optimizer, Mapping) and isinstance(optimizer.get("type"), str):
        out["optimizer"] = optimizer["type"]
        take("lr", "/optimizer/params/lr", number, float)
        take("weight_decay", "/optimizer/params/weight_decay", number, float)
    take("gradient_clipping", "/gradient_clipping", number, float)
    return out


def autos(data: Any, pointer: str = "") -> list[str]:
    """Pointers of every value ``"auto"``."""
    if isinstance(data, Mapping):
        return [
            p
            for k, v in data.items()
            for p in autos(v, f"{pointer}/{str(k).replace('~', '~0').replace('/', '~1')}")
        ]
    if isinstance(data, list):
        return [p for i, v in enumerate(data) for p in autos(v, f"{pointer}/{i}")]
    return [pointer] if data == AUTO else []


def compose(
    base: Mapping[str, Any] | None,
    get: Callable[[str], Any],
    touched: Callable[[str], bool],
    *,
    trainer: bool,
    world: int,
    resolve_autos: bool,
    complete: bool,
    batch_misfit: bool = False,
    largest_tensor: int | None = None,
    torch_adam: bool = False,
) -> Editor:
    """The config for the field values, as edits on ``base`` (None: a new file).

    ``trainer``: a Hugging Face Trainer fills ``auto``, so the values that it owns are written as ``auto``.
    ``resolve_autos``: write the typed value where ``base`` says ``auto`` (nobody else would fill it).
    ``complete``: every field is written (a preset; an opened file only gets what was changed).
    ``batch_misfit``: the batch of ``base`` does not hold at this world size and is written anew.
    ``largest_tensor``: elements of the largest parameter; NVMe buffers must hold it.
    """
    w = Editor(base)
    fresh = base is None

    def own(*fields: str, at: str = "") -> bool:
        # a preset is a start, not a text to keep: every field is written, at its value where nothing else was chosen
        if fresh or complete or any(touched(f) for f in fields):
            return True
        return bool(at) and resolve_autos and w.get(at) == AUTO

    def write(field: str, at: str, *, also: tuple[str, ...] = (), auto: bool = False) -> None:
        if own(field, *also, at=at):
            w.put(at, AUTO if auto and trainer else get(field))

    stage = get("stage")
    offload = get("offload")
    # batch: micro x accumulation is enough for DeepSpeed and stays right at any world size; a train_batch_size
    # that the file already has is kept in step
    batch = {"micro_batch": "/train_micro_batch_size_per_gpu", "accumulation": "/gradient_accumulation_steps"}
    total = "/train_batch_size"
    if batch_misfit or any(own(*batch, "global_batch", at=p) for p in (*batch.values(), total)):
        for field, pointer in batch.items():
            w.put(pointer, AUTO if trainer else get(field))
        if trainer:
            w.put(total, AUTO)
        elif w.has(total):
            w.put(total, get("micro_batch") * get("accumulation") * world)
    write("gradient_clipping", "/gradient_clipping", auto=True)

    _precision(w, get("precision"), own, trainer, fresh, complete)
    _optimizer(w, get, own, write, trainer, torch_adam and offload in ("none", "param"))

    if isinstance(w.get(Z), bool):  # the deprecated form: true = stage 1
        if not (touched("stage") or touched("offload") or complete):
            return w
        w.put(Z, {"stage": stage})
    write("stage", Z + "/stage")
    _offload(w, get, own, stage, offload, largest_tensor, world)
    if stage == 0:
        return w
    write("overlap_comm", Z + "/overlap_comm")
    if fresh:
        w.put(Z + "/contiguous_gradients", True)
    if stage in (1, 2):
        if fresh:
            w.put(Z + "/reduce_scatter", True)
        write("reduce_bucket_size", Z + "/reduce_bucket_size")
        write("allgather_bucket_size", Z + "/allgather_bucket_size")
    else:
        # the Trainer sizes these by the model's hidden_size (transformers/integrations/deepspeed.py)
        for field, key in (
            ("reduce_bucket_size", "reduce_bucket_size"),
            ("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
            ("persistence_threshold", "stage3_param_persistence_threshold"),
        ):
            pointer = f"{Z}/{key}"
            if own(field, at=pointer):
                w.put(pointer, AUTO if trainer and not touched(field) else get(field))
        if fresh:
            w.put(Z + "/stage3_gather_16bit_weights_on_model_save", True)
    return w


def _precision(
    w: Editor, precision: str, own: Callable[..., bool], trainer: bool, fresh: bool, complete: bool
) -> None:
    if trainer:
        for key in ("/bf16", "/fp16"):
            if own("precision", at=f"{key}/enabled") and (fresh or complete or w.has(key)):
                if key == "/bf16" and w.has("/bfloat16"):
                    w.drop("/bfloat16")  # the Trainer fills bf16.enabled only, under this one name
                w.put(f"{key}/enabled", AUTO)
        return
    wanted = {"bf16": "/bf16", "fp16": "/fp16"}.get(precision)
    stale = [k for k in ("/bf16", "/fp16") if w.get(f"{k}/enabled") == AUTO]
    if not (own("precision") or (stale and own(at=f"{stale[0]}/enabled"))):
        return
    for key in ("/bf16", "/fp16"):
        if key == wanted:
            w.put(f"{key}/enabled", True)
        elif w.has(key):
            w.put(f"{key}/enabled", False)


def _optimizer(
    w: Editor,
    get: Callable[[str], Any],
    own: Callable[..., bool],
    write: Callable[..., None],
    trainer: bool,
    torch_adam: bool,
) -> None:
    kind = get("optimizer")
    if own("optimizer"):
        if kind == "script":
            w.drop("/optimizer")
        elif w.get("/optimizer/type") != kind:
            w.put("/optimizer/type", kind)
    if kind == "script":
        return
    params = "/optimizer/params"
    has = w.has("/optimizer/type")
    if not has:
        return
    write("lr", params + "/lr", auto=True)
    for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        pointer = f"{params}/{key}"
        if key == "eps" and kind == "Lion":
            continue
        if own("optimizer", at=pointer) and (trainer or w.get(pointer) in (None, AUTO)):
            w.put(pointer, AUTO if trainer else default)
    write("weight_decay", params + "/weight_decay", auto=True)
    if kind == "Lion" and own("optimizer"):
        w.drop(params + "/eps")
    if kind in ("Adam", "AdamW") and own("optimizer", "offload") and torch_adam:
        w.put(params + "/torch_adam", True)
    elif own("optimizer", "offload") and not torch_adam and w.get(params + "/torch_adam") is True:
        w.drop(params + "/torch_adam")


def _offload(
    w: Editor,
    get: Callable[[str], Any],
    own: Callable[..., bool],
    stage: int,
    offload: str,
    largest_tensor: int | None,
    world: int,
) -> None:
    for block, wanted, device, pin, aliases in (
        (OO, offload in ("optimizer", "both"), "optimizer_device", "pin_optimizer", ("cpu_offload",)),
        (OP, offload in ("param", "both"), "param_device", "pin_param", ("cpu_offload_param",)),
    ):
        mine = own("offload", device, "stage", "nvme_path")
        if mine:
            for alias in (*aliases, "cpu_offload_use_pin_memory"):
                w.drop(f"{Z}/{alias}")
            if not wanted:
                w.drop(block)
                continue
            where = get(device)
            w.put(block + "/device", where)
            if where == "nvme":
                w.put(block + "/nvme_path", get("nvme_path"))
                _nvme_buffers(w, block, largest_tensor, world)
            else:
                w.drop(block + "/nvme_path")
        # written in any case: its default changed in 0.19.5, so a file that leaves it out means two things
        if _device(w.get(block)) != "none" and (own(pin) or not w.has(block + "/pin_memory")):
            w.put(block + "/pin_memory", get(pin))
    if stage < 3 and own("stage"):
        for key in STAGE3_KEYS:
            if lookup(w.data, f"{Z}/{key}", _MISSING) is not _MISSING:
                w.drop(f"{Z}/{key}")


def _nvme_buffers(w: Editor, block: str, largest_tensor: int | None, world: int) -> None:
    """A swap buffer must hold the rank's part of the largest parameter (default 1e8 elements: an 8B
    model's embedding is larger; runtime/swap_tensor/partitioned_param_swapper.py @0.19.8)."""
    if block != OP or not largest_tensor:
        return
    need = -(-largest_tensor // max(1, world))
    if need > 100_000_000 and (w.get(block + "/buffer_size") or 100_000_000) < need:
        w.put(block + "/buffer_size", -(-need // 10_000_000) * 10_000_000)
