"""The user's settings: one small JSON file, one table of what can be set.

A file that cannot be read counts as empty (``problem`` says why) and is kept aside when it is next written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstui import paths
from dstui.errors import DstuiError
from dstui.i18n import N_, _

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Setting:
    """What can be set: its type, default and, where not everything goes, its choices."""

    key: str
    kind: type
    default: Any
    choices: tuple[Any, ...] = ()
    _help: str = ""

    @property
    def help(self) -> str:
        return _(self._help)


SETTINGS: tuple[Setting, ...] = (
    Setting("language", str, "", ("", "en", "zh"), N_("language of the texts; empty: by the locale")),
    Setting("low", bool, False, (), N_("fewer bytes, for a slow line")),
    Setting("on_event", str, "", (), N_("shell command on a run's end, failure or stall; empty: none")),
    Setting("notify", bool, True, (), N_("bell and notification when a watched run ends or stands still")),
    Setting("ascii", bool, False, (), N_("no character beyond ASCII in frames and graphs")),
)
_BY_KEY = {s.key: s for s in SETTINGS}


@dataclass
class Settings:
    """``get``/``set`` a key of SETTINGS."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a later release: kept when the file is written."""
    problem: str | None = None

    @classmethod
    def load(cls, path: Path | None = None) -> Settings:
        """Never raises; a wrong value counts as not set."""
        out = cls(path or paths.config_home() / "settings.json")
        try:
            data = json.loads(out.path.read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return out
        except (OSError, ValueError) as e:
            out.problem = _("{path} cannot be read: {reason}").format(path=out.path, reason=e)
            return out
        for key, value in data.items():
            setting = _BY_KEY.get(key)
            if setting is not None:
                if isinstance(value, setting.kind) and (not setting.choices or value in setting.choices):
                    out.values[key] = value
            elif key != "schema_version":
                out.extra[key] = value
        return out

    def get(self, key: str) -> Any:
        return self.values.get(key, _BY_KEY[key].default)

    def set(self, key: str, value: Any) -> None:
        """Raises DstuiError for an unknown key or a wrong value."""
        setting = _BY_KEY.get(key)
        if setting is None:
            raise DstuiError(
                _("there is no setting '{name}'").format(name=key),
                _("there are: {names}").format(names=", ".join(_BY_KEY)),
            )
        if not isinstance(value, setting.kind) or (setting.choices and value not in setting.choices):
            raise DstuiError(_("{value!r} is no value of the setting '{name}'").format(value=value, name=key))
        self.values[key] = value

    def save(self) -> Path:
        """Write atomically, readable by the user only. Raises DstuiError."""
        from dstui.config.write import save

        data = {"schema_version": SCHEMA_VERSION, **self.extra, **self.values}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                self.path.touch(mode=0o600)
        except OSError as e:
            raise DstuiError(
                _("{path} cannot be written: {reason}").format(path=self.path, reason=e.strerror or e),
                _("DSTUI_CONFIG_HOME moves the folder"),
            ) from e
        save(
            self.path, json.dumps(data, indent=2, ensure_ascii=False) + "\n", backup=self.problem is not None
        )
        self.problem = None
        return self.path
