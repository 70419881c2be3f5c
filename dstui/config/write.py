"""Writing a config: whole or not at all, with a backup, the difference shown before."""

from __future__ import annotations

import difflib
import errno
import os
import stat
import tempfile
from pathlib import Path

from dstui.errors import DstuiError
from dstui.i18n import _


def difference(old: str, new: str, name: str = "ds_config.json") -> str:
    """Unified diff of two texts; ``""`` when they are equal."""
    a, b = old.splitlines(keepends=True), new.splitlines(keepends=True)
    rows = []
    for row in difflib.unified_diff(a, b, name, name):
        rows.append(row if row.endswith("\n") else row + "\n\\ No newline at end of file\n")
    return "".join(rows)


def backup_name(path: Path) -> Path:
    """The first free name of ``NAME.bak``, ``NAME.bak.1``, ``NAME.bak.2``..."""
    candidate = path.with_name(path.name + ".bak")
    n = 0
    while os.path.lexists(candidate):
        n += 1
        candidate = path.with_name(f"{path.name}.bak.{n}")
    return candidate


def save(path: str | os.PathLike[str], text: str, *, backup: bool = True) -> Path | None:
    """Replace the file at ``path`` by ``text`` (UTF-8) in one step; returns the backup made, if any.

    A symbolic link is followed: its target is replaced and the link stays. Mode and, where allowed,
    owner are kept. The text goes to a temporary file in the same folder first, is flushed to disk and
    then renamed over the old one, so a full disk, a crash or a read-only folder leaves the old file
    as it was. A file that already holds ``text`` is left alone. Raises DstuiError.
    """
    target = Path(os.path.realpath(path))
    data = text.encode("utf-8", "surrogatepass")
    try:
        st: os.stat_result | None = target.stat()
    except FileNotFoundError:
        st = None
    except OSError as e:
        raise _failed(target, e) from e
    if st is not None and not stat.S_ISREG(st.st_mode):
        raise DstuiError(_("{path} is not a regular file").format(path=target), _("choose another name"))
    made: Path | None = None
    temporary: str | None = None
    try:
        if st is not None:
            old = target.read_bytes()
            if old == data:
                return None
            if backup:
                made = backup_name(target)
                fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(st.st_mode))
                _write_out(fd, old)
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        if st is not None:
            os.fchmod(fd, stat.S_IMODE(st.st_mode))
            if (st.st_uid, st.st_gid) != (os.geteuid(), os.getegid()):
                try:
                    os.fchown(fd, st.st_uid, st.st_gid)
                except OSError:
                    pass  # not ours to give away
        else:
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(fd, 0o666 & ~mask)
        _write_out(fd, data)
        Path(temporary).replace(target)
        temporary = None
        _sync_folder(target.parent)
    except OSError as e:
        if made is not None:
            made.unlink(missing_ok=True)
        raise _failed(target, e) from e
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return made


def _write_out(fd: int, data: bytes) -> None:
    with os.fdopen(fd, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; some file systems refuse to sync a folder, which is harmless."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def _failed(path: Path, error: OSError) -> DstuiError:
    hint = _("the file is as it was; free space or choose another folder")
    if error.errno == errno.ENOENT:
        hint = _("make the folder first, or choose another one")
    return DstuiError(
        _("{path} could not be written: {reason}").format(path=path, reason=error.strerror or error), hint
    )
