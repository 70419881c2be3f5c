"""A GPU driver that misbehaves under a real supervisor: the run goes on, is sampled, ends and can be stopped."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dstui.facts.model import Gpu
from dstui.runs.control import stop
from dstui.runs.processes import alive
from dstui.runs.samples import read_samples
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir
from tests.supervised import FACTS, ended, events, says, until

STUB = Path(__file__).resolve().parent.parent / "data" / "nvml_stub.c"
CARDS = dataclasses.replace(FACTS, gpus=tuple(Gpu(i, name="NVIDIA H200") for i in range(2)))
Begin = Callable[..., RunDir]


@pytest.fixture
def on_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Starts a script on two stand-in cards; further words are the driver's behaviour (tests/data/nvml_stub.c)."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("no C compiler for the NVML stand-in")
    subprocess.run([cc, "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(STUB)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    def go(source: str, **driver: str) -> RunDir:
        (tmp_path / "train.py").write_text(source)
        for name, value in driver.items():
            monkeypatch.setenv(name, value)
        return start(RunSpec("train.py", launcher="python", cwd=str(tmp_path)), CARDS, preflight=False)

    return go


def gone(run: RunDir) -> None:
    supervisor = run.process("supervisor")
    assert supervisor is not None
    until(lambda: not alive(supervisor), 30)


def test_a_healthy_driver_is_sampled(on_cards: Begin) -> None:
    run = on_cards("import time; time.sleep(6)")
    assert ended(run)["outcome"] == "finished"
    last = read_samples(run.samples_dir)[-1]
    assert last.gpus[0].memory_used == 20000 << 20 and last.gpus[0].clock_sm == 1980
    assert last.gpus[0].nvlink_tx and last.gpus[0].pcie_rx
    gone(run)


def test_a_driver_that_hangs_stops_neither_the_run_nor_its_end(on_cards: Begin) -> None:
    run = on_cards("import time; print('up', flush=True); time.sleep(99)", STUB_HANG_AT="1")
    says(run, "up")
    until(lambda: len(read_samples(run.samples_dir)) >= 3)
    last = read_samples(run.samples_dir)[-1]
    assert last.gpus == () and last.host.used and len(last.ranks) == 1
    assert stop(run).state == "stopped"
    gone(run)
    assert "sampler_failed" not in events(run)


def test_a_driver_that_is_not_there_leaves_a_gap(on_cards: Begin) -> None:
    run = on_cards("import time; time.sleep(3)", STUB_INIT="9")
    assert ended(run)["outcome"] == "finished"
    samples = read_samples(run.samples_dir)
    assert samples and all(s.gpus == () for s in samples)
    gone(run)
