"""The run that a command line names. Whoever looks at runs, or ends one, takes over those that lost their supervisor."""

from __future__ import annotations

import sys
from pathlib import Path

from dstui.runs.adopt import adopt_lost
from dstui.runs.store import RunDir, find_run

BUNDLE = ".tar.gz"


def run_to_read(reference: str) -> RunDir:
    """As ``find_run``; of several runs of one name the newest, which stderr then says; and the run in a report's
    file, unpacked for as long as dstui runs. Raises DstuiError."""
    adopt_lost()
    path = Path(reference).expanduser()
    if reference.endswith(BUNDLE) and path.is_file():
        return _unpacked(path)
    return find_run(reference, newest=lambda text: print(text, file=sys.stderr))


def _unpacked(path: Path) -> RunDir:
    import atexit
    import shutil
    import tempfile

    from dstui.runs.bundle import unpack

    folder = Path(tempfile.mkdtemp(prefix="dstui-report-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return unpack(path, folder)
