"""Presets: a config with its title, engine, when to use it, what it needs and its source.

One JSON file each. Shipped ones are read-only; the user's live in ``dstui where`` -> presets. A file that cannot
be read is listed with its problem, never a reason to fail. ``title``, ``when`` and ``needs`` of shipped presets
are translated; the texts are extracted from ``presets/*.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstui import paths
from dstui.config.document import Document
from dstui.config.write import save
from dstui.errors import DstuiError
from dstui.i18n import _

SCHEMA_VERSION = 1
ENGINES = ("plain", "hf", "llamafactory", "accelerate", "swift")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = {"con", "prn", "aux", "nul"}


@dataclass(frozen=True)
class Preset:
    """``config`` is a complete ds_config; ``fields`` other answers of the wizard (method, lora_rank ...).

    ``problem`` is set for a file that cannot be used: then ``config`` is empty.
    """

    name: str
    title: str
    engine: str
    when: str
    needs: str
    source: str
    config: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    shipped: bool = False
    path: Path | None = None
    order: int = 1000
    problem: str | None = None

    @property
    def id(self) -> str:
        return self.name

    def to_json(self) -> dict[str, Any]:
        """The file's content (English texts of a shipped preset are not restored: use ``export``)."""
        out: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "title": self.title,
            "engine": self.engine,
            "when": self.when,
            "needs": self.needs,
            "source": self.source,
        }
        if self.fields:
            out["fields"] = dict(self.fields)
        out["config"] = dict(self.config)
        return out


def check_name(name: str) -> str:
    """``name`` if it can be a file name everywhere. Raises DstuiError."""
    if not _NAME.fullmatch(name) or name.lower() in _RESERVED or name.endswith("."):
        raise DstuiError(
            _("'{name}' is no preset name").format(name=name),
            _("letters, digits, '.', '_' and '-', at most 64, beginning with a letter or digit"),
        )
    return name


def _load_file(path: Path, *, shipped: bool) -> Preset:
    """Raises DstuiError for a file that is no preset."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise DstuiError(
            _("{path} cannot be read: {reason}").format(path=path, reason=e.strerror or e)
        ) from e
    return _load(raw, path, shipped=shipped)


def _load(raw: bytes, path: Path, *, shipped: bool) -> Preset:
    data = Document.parse(raw, str(path)).data
    try:
        data = json.loads(raw)  # the same values, but 1.0 stays a float
    except ValueError:
        pass  # comments are fine

    def text(key: str) -> str:
        value = data.get(key, "")
        if not isinstance(value, str):
            raise DstuiError(_("{path}: '{key}' must be a text").format(path=path, key=key))
        return _(value) if shipped else value

    version = data.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise DstuiError(
            _("{path} is no preset: 'schema_version' is missing").format(path=path),
            _("a plain ds_config.json becomes a preset with: dstui preset import FILE"),
        )
    if version > SCHEMA_VERSION:
        raise DstuiError(
            _("{path} was written by a later dstui (schema_version {version})").format(
                path=path, version=version
            )
        )
    config, fields, engine = data.get("config"), data.get("fields", {}), data.get("engine", "plain")
    if not isinstance(config, dict):
        raise DstuiError(_("{path}: 'config' must be an object").format(path=path))
    if not isinstance(fields, dict):
        raise DstuiError(_("{path}: 'fields' must be an object").format(path=path))
    if engine not in ENGINES:
        raise DstuiError(
            _("{path}: unknown engine '{name}'").format(path=path, name=engine),
            _("one of: {names}").format(names=", ".join(ENGINES)),
        )
    order = data.get("order", 1000)
    return Preset(
        name=path.stem,
        title=text("title") or path.stem,
        engine=engine,
        when=text("when"),
        needs=text("needs"),
        source=data.get("source", "") if isinstance(data.get("source", ""), str) else "",
        config=config,
        fields=fields,
        shipped=shipped,
        path=path,
        order=order if isinstance(order, int) else 1000,
    )


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.suffix == ".json" and not p.name.startswith("."))
    except OSError:
        return []


def list_presets() -> tuple[Preset, ...]:
    """Shipped ones in their order, then the user's by name; broken user files with their ``problem``."""
    shipped = [_load_file(p, shipped=True) for p in _files(paths.data_dir("presets"))]
    mine = []
    for p in _files(paths.user_presets_dir()):
        try:
            mine.append(_load_file(p, shipped=False))
        except DstuiError as e:
            mine.append(Preset(p.stem, p.stem, "plain", "", "", "", {}, path=p, problem=e.message))
    return (*sorted(shipped, key=lambda x: x.order), *mine)


def load(name: str) -> Preset:
    """The preset ``name``. Raises DstuiError (unknown, or a broken file) naming near ones."""
    found = find(name)
    if found is None:
        import difflib

        names = [p.name for p in list_presets()]
        near = difflib.get_close_matches(name, names, 1)
        raise DstuiError(
            _("there is no preset '{name}'").format(name=name),
            _("did you mean '{name}'?").format(name=near[0]) if near else _("see: dstui preset list"),
        )
    if found.problem:
        raise DstuiError(found.problem, _("repair it with: dstui preset edit {name}").format(name=name))
    return found


def find(name: str) -> Preset | None:
    """The preset ``name``, broken ones included; None when there is none."""
    return next((p for p in list_presets() if p.name == name), None)


def user_path(name: str) -> Path:
    """Where the user's preset ``name`` lies. Raises DstuiError for a name that is none."""
    return paths.user_presets_dir() / f"{check_name(name)}.json"


def free(name: str) -> Path:
    """The path for a new preset. Raises DstuiError when the name is taken (case does not distinguish)."""
    path = user_path(name)
    for p in list_presets():
        if p.name.lower() == name.lower():
            raise DstuiError(
                _("the preset '{name}' exists already").format(name=p.name),
                _("choose another name") if p.shipped else _("delete it first, or choose another name"),
            )
    return path


def editable(name: str) -> Preset:
    """The user's preset ``name``, broken ones included. Raises DstuiError for a shipped or unknown one."""
    found = find(name)
    if found is None:
        return load(name)  # raises with the near names
    if found.shipped:
        raise DstuiError(
            _("'{name}' is shipped with dstui and read-only").format(name=name),
            _("make your own: dstui preset copy {name} NEW_NAME").format(name=name),
        )
    return found


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DstuiError(
            _("{path} cannot be made: {reason}").format(path=path.parent, reason=e.strerror or e),
            _("DSTUI_CONFIG_HOME moves the folder"),
        ) from e


def _write(path: Path, preset: Preset, *, backup: bool = False) -> Path:
    _make_folder(path)
    save(path, json.dumps(preset.to_json(), indent=2, ensure_ascii=False) + "\n", backup=backup)
    return path


def save_user(preset: Preset, *, overwrite: bool = False) -> Preset:
    """Write a user preset. ``overwrite`` replaces the user's own of that name, never a shipped one."""
    if overwrite and (found := find(preset.name)) is not None:
        if found.shipped:
            editable(preset.name)
        path = user_path(preset.name)
    else:
        path = free(preset.name)
    _write(path, preset)
    return replace(preset, path=path, shipped=False, problem=None)


def parse(text: str, name: str) -> Preset:
    """The user's preset ``name`` that a file with ``text`` would be. Raises DstuiError when it would be none."""
    path = user_path(name)
    # The editor knows the folder; a message of two lines has no room for it.
    return replace(_load(text.encode(), Path(path.name), shipped=False), path=path)


def save_text(name: str, text: str) -> Preset:
    """Write ``text``, comments and all, as the user's preset ``name``. Raises DstuiError, nothing changed."""
    fresh = parse(text, name)
    found = find(name)
    path = free(name) if found is None or found.shipped else found.path
    assert path is not None
    _make_folder(path)
    save(path, text if text.endswith("\n") else text + "\n", backup=False)
    return replace(fresh, name=name, path=path)


def replace_file(name: str, draft: Path) -> Preset:
    """Replace the user's preset by the file ``draft`` if that is a preset. Raises DstuiError, nothing changed."""
    old = editable(name)
    assert old.path is not None
    fresh = _load_file(draft, shipped=False)
    save(old.path, draft.read_text(encoding="utf-8"), backup=False)
    return replace(fresh, name=name, path=old.path)


def delete(name: str) -> Path:
    """Remove a user preset; returns its path. Raises DstuiError for a shipped or unknown one."""
    path = editable(name).path
    assert path is not None
    try:
        path.unlink()
    except OSError as e:
        raise DstuiError(
            _("{path} cannot be deleted: {reason}").format(path=path, reason=e.strerror or e)
        ) from e
    return path


def rename(name: str, new: str) -> Preset:
    """Rename a user preset. Raises DstuiError when shipped, unknown or the new name is taken."""
    old = editable(name)
    assert old.path is not None
    if name.lower() == new.lower() and name != new:
        target = user_path(new)
    else:
        target = free(new)
    try:
        old.path.rename(target)
    except OSError as e:
        raise DstuiError(
            _("{path} cannot be renamed: {reason}").format(path=old.path, reason=e.strerror or e)
        ) from e
    if old.problem:
        return replace(old, name=new, path=target)
    fresh = _load_file(target, shipped=False)
    _write(target, fresh)
    return fresh


def copy(name: str, new: str) -> Preset:
    """A user preset with the content of ``name``."""
    source = load(name)
    return save_user(replace(source, name=new, order=1000, source=source.source or name))


def import_config(
    path: str, name: str | None = None, *, engine: str | None = None, title: str | None = None
) -> Preset:
    """A user preset from a ds_config.json (or a preset file, kept as it is), named by the file unless ``name``.

    The engine is ``hf`` when the file says ``auto`` (only the Trainer fills that), else ``plain``.
    """
    from dstui.config.document import read

    doc = read(path)
    data = doc.data
    default = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-.") or "imported"
    name = check_name(name or default)
    if isinstance(data.get("config"), dict) and isinstance(data.get("schema_version"), int):
        found = _load_file(Path(path), shipped=False)
        found = replace(found, name=name, engine=engine or found.engine, title=title or found.title)
        return save_user(found)
    auto = '"auto"' in json.dumps(data)
    return save_user(
        Preset(
            name=name,
            title=title or name,
            engine=engine or ("hf" if auto else "plain"),
            when="",
            needs="",
            source=str(Path(path).resolve()) if path != "-" else "",
            config=data,
        )
    )


def export(name: str, *, whole: bool = False) -> str:
    """The text of the preset's ds_config.json; ``whole``: of the preset file, with title, when and needs."""
    found = load(name)
    if whole and found.path is not None:
        return found.path.read_text(encoding="utf-8")
    return json.dumps(dict(found.config), indent=2, ensure_ascii=False) + "\n"
