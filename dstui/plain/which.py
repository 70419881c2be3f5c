"""The run that a command line names, for verbs that only read it."""

from __future__ import annotations

import sys

from dstui.runs.store import RunDir, find_run


def run_to_read(reference: str) -> RunDir:
    """As ``find_run``; of several runs of one name the newest, which stderr then says. Raises DstuiError."""
    return find_run(reference, newest=lambda text: print(text, file=sys.stderr))
