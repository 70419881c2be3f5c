"""What model is meant: a directory, a config.json, a cached repository, a well-known name or a size.

Reads ``config.json`` and the headers of safetensors files (an 8-byte little-endian length, then JSON; format:
https://github.com/huggingface/safetensors) with the standard library only. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError
from dstui.estimate.families import inventory, shape_from_config
from dstui.estimate.inputs import ModelShape
from dstui.i18n import _

_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER = 100_000_000
"""The safetensors library refuses longer headers."""


def load_model(spec: str, *, hf_home: str | os.PathLike[str] | None = None) -> ModelShape:
    """The shape of the model that ``spec`` names.

    Tried in this order: an existing path (Hugging Face directory, ``config.json``, one safetensors file),
    a number of parameters (``7B``, ``8.03e9``), a repository id in the local Hugging Face cache, a name of the
    shipped catalogue. ``hf_home`` replaces ``HF_HOME`` (for tests). Raises DstuiError with place, cause and
    next step; never reaches for the network.
    """
    spec = spec.strip()
    if not spec:
        raise DstuiError(_("no model is named"), _("give a directory, a name or a size such as 7B"))
    path = Path(spec).expanduser()
    try:
        exists = path.exists()
    except OSError as e:  # name too long, no permission on a parent
        raise DstuiError(
            _("cannot look at {path}: {cause}").format(path=spec, cause=e.strerror or e), _("check the path")
        ) from e
    if exists:
        return _from_path(path)
    size = parse_params(spec)
    if size is not None:
        return ModelShape(name=spec, params=size, source="typed")
    if not _looks_like_path(spec):
        snapshot = _cached_snapshot(spec, hf_home)
        if snapshot is not None:
            return replace(_from_path(snapshot), name=spec)
        found = _from_catalogue(spec)
        if found is not None:
            return found
    raise _not_found(spec)


def parse_params(text: str) -> int | None:
    """``7B``, ``350m``, ``8.03e9``, ``1_300_000_000`` -> parameters; None when it is no number.

    A bare number below 1000 means billions: nobody trains seven parameters.
    """
    m = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*(?:e\+?[0-9]+)?)\s*([kmbt]?)", text.strip(), re.I)
    if not m:
        return None
    value = float(m.group(1).replace("_", ""))
    unit = m.group(2).lower()
    if not unit and value < 1000:
        unit = "b"
    if value <= 0 or value * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[unit] > 1e14:
        return None
    return round(value * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[unit])


def modules(shape: ModelShape) -> list[tuple[str, int]]:
    """Modules that own parameters, ``(name, elements)``, in registration order."""
    return inventory(shape).modules()


def catalogue_names() -> list[str]:
    """Repository ids and short names that ``load_model`` knows without any file."""
    names: list[str] = []
    for repo, entry in _catalogue().items():
        names += [repo, *entry["aliases"]]
    return names


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    )
    return data


@lru_cache(maxsize=256)
def _from_catalogue(spec: str) -> ModelShape | None:
    wanted = spec.lower()
    for repo, entry in _catalogue().items():
        names = {repo.lower(), repo.rpartition("/")[2].lower(), *(a.lower() for a in entry["aliases"])}
        if wanted in names:
            return shape_from_config(entry["config"], repo, "catalogue")
    return None


def _looks_like_path(spec: str) -> bool:
    return spec.startswith(("/", "./", "../", "~", ".\\")) or spec.endswith((".json", ".safetensors"))


def _not_found(spec: str) -> DstuiError:
    if _looks_like_path(spec):
        return DstuiError(
            _("{path}: no such file or directory").format(path=spec),
            _("give the directory that holds config.json, or a size such as 7B"),
        )
    import difflib

    short = {n.rpartition("/")[2].lower(): n for n in catalogue_names()}
    near = difflib.get_close_matches(spec.rpartition("/")[2].lower(), list(short), 3, 0.6)
    message = _("model '{name}' is neither here nor in the local Hugging Face cache").format(name=spec)
    if near:
        return DstuiError(message, _("did you mean {names}?").format(names=", ".join(short[n] for n in near)))
    return DstuiError(message, _("give its directory, a name such as llama-3.1-8b, or a size such as 7B"))


def cache_roots(hf_home: str | os.PathLike[str] | None = None) -> list[Path]:
    """Folders in which Hugging Face keeps downloaded repositories (``models--org--name``)."""
    if hf_home is not None:
        return [Path(hf_home).expanduser() / "hub"]
    env = os.environ
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(name):
            return [Path(env[name]).expanduser()]
    if env.get("HF_HOME"):
        return [Path(env["HF_HOME"]).expanduser() / "hub"]
    base = Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    return [base / "huggingface" / "hub"]


def _cached_snapshot(repo: str, hf_home: str | os.PathLike[str] | None) -> Path | None:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        return None
    for root in cache_roots(hf_home):
        folder = root / ("models--" + repo.replace("/", "--"))
        try:
            reference = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            reference = ""
        snapshots = folder / "snapshots"
        try:
            others = sorted(snapshots.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
        except OSError:
            continue
        candidates = [snapshots / reference, *others] if reference else others
        for candidate in candidates:
            if (candidate / "config.json").is_file():
                return candidate
    return None


def _from_path(path: Path) -> ModelShape:
    if path.is_dir():
        return _from_directory(path)
    if path.suffix == ".safetensors":
        stored = _read_headers([path])
        return _typed_by_headers(path.stem, str(path), stored)
    return shape_from_config(_read_config(path), path.parent.resolve().name or path.name, str(path))


def _from_directory(path: Path) -> ModelShape:
    try:
        names = {p.name for p in path.iterdir()}
    except OSError as e:
        raise DstuiError(
            _("cannot read {path}: {cause}").format(path=path, cause=e.strerror or e),
            _("check the directory's permissions"),
        ) from e
    stored = _read_headers(_weight_files(path, names))
    if "config.json" not in names:
        if "adapter_config.json" in names:
            raise DstuiError(
                _("{path} holds a LoRA adapter, not a model").format(path=path),
                _("name the base model that the adapter was trained on"),
            )
        if stored is not None:
            return _typed_by_headers(path.resolve().name, str(path), stored)
        raise DstuiError(
            _("{path} holds neither config.json nor safetensors files").format(path=path),
            _("give the directory of a Hugging Face model, or a size such as 7B"),
        )
    config_path = path / "config.json"
    config = _read_config(config_path)
    try:
        shape = shape_from_config(config, path.resolve().name, str(config_path))
    except DstuiError:
        if stored is None:
            raise
        # An architecture without formula whose weights are here: the count is exact, the dimensions unknown.
        return _typed_by_headers(path.resolve().name, str(path), stored)
    shape = replace(shape, source=str(path))
    return shape if stored is None else _checked(shape, stored)


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        cause = e.strerror if isinstance(e, OSError) else _("not UTF-8 text")
        raise DstuiError(
            _("cannot read {path}: {cause}").format(path=path, cause=cause or e),
            _("check that the file is there and readable"),
        ) from e
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        line = getattr(e, "lineno", None)
        raise DstuiError(
            _("{path} is not valid JSON (line {line})").format(path=path, line=line or "?"),
            _("copy the file again from the model's repository"),
        ) from e
    if not isinstance(data, dict):
        raise DstuiError(
            _("{path} is not a model configuration").format(path=path),
            _("use the config.json that came with the model"),
        )
    return data


@dataclass(frozen=True)
class _Stored:
    """What the safetensors headers say."""

    params: int
    nbytes: int
    dtype: str | None
    names: frozenset[str]


def _weight_files(path: Path, names: set[str]) -> list[Path]:
    index = next(
        (n for n in ("model.safetensors.index.json", "pytorch_model.safetensors.index.json") if n in names),
        None,
    )
    if index is None:
        if "model.safetensors" in names:
            return [path / "model.safetensors"]
        shards = sorted(n for n in names if n.endswith(".safetensors") and not n.startswith("adapter_"))
        return [path / n for n in shards if re.fullmatch(r"model-\d+-of-\d+\.safetensors", n)] or (
            [path / shards[0]] if len(shards) == 1 else []
        )
    where = path / index
    mapping = _read_config(where).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise DstuiError(
            _("{path} has no 'weight_map'").format(path=where),
            _("copy the file again from the model's repository"),
        )
    wanted = sorted(set(mapping.values()))
    missing = [n for n in wanted if n not in names]
    if len(missing) == len(wanted):
        return []  # only config and index were fetched: the count comes from the config
    if missing:
        raise DstuiError(
            _("{path}: {n} of {total} weight files are missing, first {name}").format(
                path=path, n=len(missing), total=len(wanted), name=missing[0]
            ),
            _("finish the download of the model"),
        )
    return [path / n for n in wanted]


def _read_headers(files: list[Path]) -> _Stored | None:
    if not files:
        return None
    params = nbytes = 0
    by_dtype: dict[str, int] = {}
    seen: set[str] = set()
    for path in files:
        for name, dtype, count, size in _tensors(path):
            if name in seen:
                continue
            seen.add(name)
            params += count
            nbytes += size
            by_dtype[dtype] = by_dtype.get(dtype, 0) + size
    top = max(by_dtype, key=lambda k: by_dtype[k]) if by_dtype else ""
    return _Stored(params, nbytes, _DTYPES.get(top), frozenset(seen))


def _tensors(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """``(name, dtype, elements, bytes)`` of each tensor of one safetensors file, its length checked."""
    again = _("fetch the file again")
    try:
        with path.open("rb") as f:
            start = f.read(8)
            if len(start) < 8:
                raise DstuiError(_("{path} is truncated: no header").format(path=path), again)
            (length,) = struct.unpack("<Q", start)
            actual = os.fstat(f.fileno()).st_size
            if length > _MAX_HEADER:
                hint = again
                if start.startswith(b"version"):  # a Git LFS pointer: "version https://git-lfs..."
                    hint = _("this is a Git LFS pointer; run `git lfs pull`")
                raise DstuiError(_("{path} is not a safetensors file").format(path=path), hint)
            raw = f.read(length)
    except OSError as e:
        raise DstuiError(
            _("cannot read {path}: {cause}").format(path=path, cause=e.strerror or e),
            _("check that the file is there and readable"),
        ) from e
    if len(raw) < length:
        raise DstuiError(_("{path} is truncated: its header is cut").format(path=path), again)
    try:
        header = json.loads(raw)
        entries = [
            (
                str(name),
                str(t["dtype"]),
                [int(n) for n in t["shape"]],
                int(t["data_offsets"][0]),
                int(t["data_offsets"][1]),
            )
            for name, t in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
        raise DstuiError(_("{path} has a damaged safetensors header").format(path=path), again) from e
    end = 8 + length + max((e[4] for e in entries), default=0)
    if actual < end:
        raise DstuiError(
            _("{path} is truncated: {actual} bytes of {wanted}").format(path=path, actual=actual, wanted=end),
            again,
        )
    for name, dtype, shape, begin, stop in entries:
        count = 1
        for n in shape:
            count *= n
        item = _ITEM_BYTES.get(dtype)
        if item is not None and count * item != stop - begin:
            raise DstuiError(_("{path} has a damaged safetensors header").format(path=path), again)
        yield name, dtype, count, stop - begin


def _typed_by_headers(name: str, source: str, stored: _Stored | None) -> ModelShape:
    assert stored is not None
    return ModelShape(
        name=name,
        params=stored.params,
        source=source,
        dtype=stored.dtype,
        checkpoint_bytes=stored.nbytes,
        exact=True,
        notes=(_("the number of parameters is exact, the architecture is not known to dstui"),),
    )


def _checked(shape: ModelShape, stored: _Stored) -> ModelShape:
    """``shape`` with what the headers add; a note when they hold another count than the class."""
    notes = shape.notes
    surplus = stored.params - shape.params
    if shape.tied and shape.vocab and shape.hidden and surplus == shape.vocab * shape.hidden:
        surplus = 0  # a tied head stored twice
    if surplus and not shape.notes:  # the note of a multimodal model already says why they differ
        notes = (
            *notes,
            _("the weight files hold {stored} parameters, the configuration describes {config}").format(
                stored=f"{stored.params:,}", config=f"{shape.params:,}"
            ),
        )
    return replace(
        shape,
        dtype=stored.dtype or shape.dtype,
        checkpoint_bytes=stored.nbytes,
        exact=shape.exact and not surplus,
        notes=notes,
    )
