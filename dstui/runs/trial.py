"""A run that is measured from inside: the probe's file in its folder, and what it wrote."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from dstui.runs.command import Command
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir

FOLDER = "probe"


def equip(command: Command, spec: RunSpec, run: RunDir, environ: Mapping[str, str]) -> Command:
    """``command`` with the probe in it, where ``spec`` asks for one: two files, and PYTHONPATH longer by one folder."""
    if spec.measure is None:
        return command
    source = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    settings = {"schema_version": 1, "steps": spec.measure, "end": spec.trial}
    files = {
        **command.files,
        f"{FOLDER}/sitecustomize.py": source,
        f"{FOLDER}/settings.json": json.dumps(settings) + "\n",
    }
    before = command.env.get("PYTHONPATH", environ.get("PYTHONPATH", ""))
    path = os.pathsep.join([str(run.path / FOLDER), *([before] if before else [])])
    return dataclasses.replace(command, files=files, env={**command.env, "PYTHONPATH": path})
