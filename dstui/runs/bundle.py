"""``dstui report RUN``: one file with all that tells what a run did, and nothing that is a secret.

Left out of every file: values of variables and options named like secrets, the values of such variables of the caller
wherever they stand, well-known forms of tokens, passwords in URLs, webhooks, mail addresses, the user's hook; names of
users, home directories and the host's name become ``<user>``, ``~`` and ``<host>``. The same run gives the same bytes.
A bundle unpacks to a run's directory, so that it plays back (``watch --replay``) and is judged (``diagnose``) where it
arrives; both verbs take the file itself as well (``unpack``).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import socket
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstui import __version__
from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.runs import redact
from dstui.runs.diagnose import diagnose_run
from dstui.runs.store import RunDir

HEAD, TAIL = 2 << 20, 14 << 20
"""A larger log keeps its beginning and its end."""
TOTAL = 64 << 20
"""Bytes of all files before they are packed; what comes last (logs of single ranks) is cut or left out first."""
_SMALLEST = 4 << 10
_UNPACKED = 4 * TOTAL
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
_HOOKS = re.compile(
    r"(?<=hooks\.slack\.com/)[\w/-]+|(?<=/api/webhooks/)[\w/-]+|(?<=/bot/v2/hook/)[\w-]+|(?<=logged in as: )\S+"
)
_HOMES = re.compile(r"(?<![\w.-])/(home|Users)/(?!<user>)[^/\s\"':,;]+")
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9+/._~-]{12,}=*")
_ASSIGNED = re.compile(
    r"""(?P<name>[A-Za-z_][\w.-]*)(?P<between>["']?\s*[=:]\s*["']?|["']?,\s*["'])(?P<value>[^\s"',;&}\]]{4,})"""
)
_OPTION = re.compile(
    r"""(?P<name>--[A-Za-z][\w-]*)(?P<between>["']?,?\s+["']?)(?P<value>[^\s"',-][^\s"',]{3,})"""
)


@dataclass(frozen=True)
class Packed:
    """``redacted``: how many places were blanked. ``left_out``: files that found no room, or not all of it."""

    path: Path
    files: tuple[str, ...]
    size: int
    redacted: int
    left_out: tuple[str, ...] = ()


class _Redactor:
    def __init__(self, manifest: dict[str, Any]) -> None:
        self.count = 0
        names: list[tuple[str, str]] = []
        home = os.path.expanduser("~")  # noqa: PTH111
        if len(home) > 1:
            names.append((home, "~"))
        user = str(manifest.get("user") or "")
        if len(user) > 2 and user != "root":
            names += [(f"/home/{user}", "~"), (user, "<user>")]
        for host in {str(manifest.get("host") or ""), socket.gethostname()}:
            if len(host) > 2 and host != "localhost":
                names.append((host, "<host>"))
        names.sort(key=lambda pair: -len(pair[0]))
        values = {v for k, v in os.environ.items() if redact.is_secret(k) and len(v) >= 8}
        shapes = [v for v in values if not re.fullmatch(r"[\d.]+|(?:/[\w.@ -]+)+/?", v)]  # a number, a path
        self._values = re.compile("|".join(map(re.escape, sorted(shapes, key=len, reverse=True))) or r"(?!)")
        self._names = [(re.compile(rf"(?<![\w.-]){re.escape(a)}(?![\w-])"), b) for a, b in names]

    def __call__(self, text: str) -> str:
        text = self._values.sub(self._hide, text)
        text = _TOKENS.sub(self._hide, text)
        text = _HOOKS.sub(self._hide, text)
        text = _BEARER.sub(lambda m: self._hide(m, m.group(1) + m.group(2)), text)
        text = _ASSIGNED.sub(self._assigned, text)
        text = _OPTION.sub(self._assigned, text)
        changed = redact.text(text)
        self.count += changed != text
        text = changed
        for pattern, name in self._names:
            text, n = pattern.subn(name, text)
            self.count += n
        for pattern, name in ((_MAIL, "<mail>"), (_HOMES, r"/\1/<user>")):
            text, n = pattern.subn(name, text)
            self.count += n
        return text

    def _hide(self, m: re.Match[str], before: str = "") -> str:
        self.count += 1
        return before + redact.REDACTED

    def _assigned(self, m: re.Match[str]) -> str:
        value = m.group("value")
        number = re.fullmatch(r"[-+]?[\d.]+(?:e[-+]?\d+)?|true|false|null|none|auto|True|False|None", value)
        if number or value.startswith(redact.REDACTED) or not redact.is_secret(m.group("name")):
            return m.group()
        return self._hide(m, m.group("name") + m.group("between"))


def pack(run: RunDir, target: Path) -> Packed:
    """Write ``target`` (.tar.gz) in one step. Raises DstuiError: unreadable run, existing or unwritable target."""
    manifest = run.manifest
    clean = _Redactor(manifest)
    if target.exists():
        raise DstuiError(_("{path}: exists already").format(path=target), _("name another one with -o"))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    names: list[str] = []
    cut: list[str] = []
    room = TOTAL
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with (
            os.fdopen(fd, "wb") as raw,
            gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, text in _files(run):
                data = clean(text).encode()
                if len(data) > room:
                    cut.append(name)
                    if room < _SMALLEST:
                        continue
                    data = data[: room // 2] + data[-(room // 2) :]
                room -= len(data)
                info = tarfile.TarInfo(f"{run.id}/{name}")
                info.size, info.mode, info.mtime = len(data), 0o600, int(run.created_at)
                tar.addfile(info, io.BytesIO(data))
                names.append(name)
        temporary.replace(target)
    except OSError as e:
        raise DstuiError(
            _("{path}: {cause}").format(path=target, cause=e.strerror or e), _("another place: -o FILE")
        ) from e
    finally:
        temporary.unlink(missing_ok=True)
    return Packed(target, tuple(names), target.stat().st_size, clean.count, tuple(cut))


def _files(run: RunDir) -> Iterator[tuple[str, str]]:
    yield "report.json", json.dumps({"schema_version": 1, "dstui": __version__}) + "\n"
    yield "manifest.json", json.dumps(_without_others(run.manifest), ensure_ascii=False, indent=1) + "\n"
    for path in (run.config_path, run.exit_path, run.events_path, run.heartbeat_path, run.supervisor_log, run.out_log):  # fmt: skip
        yield from _one(run, path)
    yield "diagnosis.json", json.dumps(diagnose_run(run).to_json(), ensure_ascii=False, indent=1) + "\n"
    for pattern in (
        "samples/*.json*",
        "metrics/**/*.csv",
        "probe/*.jsonl",
        "*.yaml",
        "*.yml",
        "trial.json",
        "rank-logs/**/*",
    ):
        for path in sorted(run.path.glob(pattern)):
            yield from _one(run, path)


def _without_others(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest without other people's processes on the cards, and without the user's hook."""
    data: dict[str, Any] = json.loads(json.dumps(manifest))
    for gpu in (data.get("facts") or {}).get("gpus") or ():
        if isinstance(gpu, dict):
            for process in gpu.get("processes") or ():
                process.update({k: "<user>" for k in ("user", "owner") if process.get(k)})
    for holder in (data, data.get("spec") or {}):
        if holder.get("on_event"):
            holder["on_event"] = redact.REDACTED
    return data


def unpack(bundle: Path, folder: Path) -> RunDir:
    """The run of a bundle, unpacked below ``folder``. Raises DstuiError for what is no bundle of ours."""
    try:
        with tarfile.open(bundle, "r:gz") as tar:
            members = tar.getmembers()
            roots = {m.name.partition("/")[0] for m in members}
            size = sum(m.size for m in members)
            if len(roots) != 1 or size > _UNPACKED or not all(m.isfile() for m in members):
                raise DstuiError(_("{path}: not a report of dstui").format(path=bundle))
            for m in members:
                target = (folder / m.name).resolve()
                if not target.is_relative_to(folder.resolve()):
                    raise DstuiError(_("{path}: not a report of dstui").format(path=bundle))
                source = tar.extractfile(m)
                assert source is not None
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                target.write_bytes(source.read())
    except (OSError, tarfile.TarError, EOFError, zlib.error) as e:
        raise DstuiError(
            _("{path}: {cause}").format(path=bundle, cause=getattr(e, "strerror", None) or e),
            _("it may have been cut on its way: fetch it again"),
        ) from e
    run = RunDir(folder / roots.pop())
    if not run.manifest_path.is_file():
        raise DstuiError(_("{path}: not a report of dstui").format(path=bundle))
    return run


def _one(run: RunDir, path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file() or path.is_symlink():
        return
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size <= HEAD + TAIL:
                data = f.read()
            else:
                data = f.read(HEAD)
                f.seek(size - TAIL)
                left = size - HEAD - TAIL
                data += f"\n[dstui] {left} bytes left out of this report\n".encode() + f.read()
    except OSError:
        return
    yield str(path.relative_to(run.path)), data.replace(b"\0", b"").decode("utf-8", "replace")
