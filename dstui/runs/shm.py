"""DeepSpeed's shared-memory collectives on a CPU leave 66 MiB a rank in ``/dev/shm``.

``ops/csrc/cpu/comm/shm.cpp`` (0.19.8) creates ``deepspeed_allreduce_buffer_<uid>_<MASTER_ADDR>_<MASTER_PORT>_<rank>``
and never removes them, not even at a normal end: nothing calls its ``shared_close``. What they hold means nothing
once the ranks are gone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"deepspeed_allreduce_buffer_(\d+)_(.+)_(\d+)_(\d+)")


def leftovers(port: int, since: float, folder: Path = FOLDER) -> list[Path]:
    """Buffers of the run of this user that met at ``port`` and began at ``since`` (epoch seconds).

    A file that a living process has mapped is left alone: somebody chose the same port meanwhile.
    """
    found = []
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    for entry in entries:
        m = _NAME.fullmatch(entry.name)
        if m is None or int(m.group(1)) != os.getuid() or int(m.group(3)) != port:
            continue
        try:
            st = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if st.st_uid == os.getuid() and st.st_mtime >= since - 1 and entry.is_file(follow_symlinks=False):
            found.append(Path(entry.path))
    if not found:
        return []
    used = _mapped()
    return [p for p in found if str(p) not in used]


def _mapped() -> set[str]:
    """Files of this kind that some process has mapped."""
    names: set[str] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"{entry.path}/maps", errors="replace") as f:  # noqa: PTH123
                names.update(
                    line[line.index("/") :].rstrip() for line in f if "deepspeed_allreduce_buffer" in line
                )
        except (OSError, ValueError):
            continue
    return names


def remove(port: int | None, since: float, folder: Path = FOLDER) -> tuple[int, int]:
    """Delete them; (files, bytes) that are gone. Call it when no rank of the run lives any more."""
    count = size = 0
    for path in leftovers(port, since, folder) if port else ():
        try:
            held = path.stat().st_size
            path.unlink()
        except OSError:
            continue
        count, size = count + 1, size + held
    return count, size
