"""A run made again with a changed config, and the stacks of its ranks: what is refused, and what is said instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dstui.errors import DstuiError
from dstui.runs import stacks, store
from dstui.runs.command import instrument
from dstui.runs.processes import here
from dstui.runs.rerun import change, own_config, write_source
from tests.run_tools import CONFIG, FakeRun

EDITS = [{"op": "replace", "path": "/zero_optimization/stage", "value": 2}]


def made(**changes: Any) -> FakeRun:
    run = FakeRun(0)
    spec = {
        "script": "train.py",
        "args": ["--ds", "{config}"],
        "engine": "plain",
        "num_gpus": 2,
        "a_later_key": 1,
    }
    manifest = {**run.run.manifest, "spec": spec, "cwd": "/work", "python": "/opt/bin/python", **changes}
    store.write_json(run.run.manifest_path, manifest)
    return run


def test_the_new_run_is_the_old_one_but_for_the_edits() -> None:
    run = made()
    text = "// a comment stays\n" + json.dumps(CONFIG, indent=2)
    run.run.config_path.write_text(instrument(text, run.run.metrics_dir, "0.19.8"))
    found = change(run.run, EDITS)
    spec = found.spec
    assert (spec.script, spec.args, spec.num_gpus) == ("train.py", ("--ds", "{config}"), 2)
    assert (spec.cwd, spec.python) == ("/work", "/opt/bin/python")
    assert spec.config_text == found.after and "// a comment stays" in found.after
    assert str(run.run.path) not in found.after, "the old run's folder is not the new one's"
    assert '-    "stage": 3' in found.diff and '+    "stage": 2' in found.diff
    assert "csv_monitor" in run.run.config_path.read_text(), "the old run's copy stays"
    assert found.price == "" and found.source is None
    with pytest.raises(DstuiError, match="not there any more"):
        write_source(found)


def test_csv_monitor_of_a_person_stays() -> None:
    run = made()
    own = {**CONFIG, "csv_monitor": {"enabled": True, "output_path": "/mine"}}
    run.run.config_path.write_text(json.dumps(own))
    assert own_config(run.run).data["csv_monitor"]["output_path"] == "/mine"


def test_price_comes_from_the_estimator_where_the_model_is_known() -> None:
    from dstui.estimate.inputs import Training
    from dstui.estimate.model import load_model
    from dstui.estimate.subject import subject
    from tests.tui.conftest import gpu_facts

    asked = json.loads(json.dumps(subject(load_model("llama-3.1-8b"), Training(seq=4096))))
    run = made(
        subject=asked, facts=gpu_facts(8).to_json(), versions={"deepspeed": "0.19.8"}, world_size=8,
    )  # fmt: skip
    offload = [{"op": "add", "path": "/zero_optimization/offload_optimizer", "value": {"device": "cpu"}}]
    found = change(run.run, offload)
    assert found.price.startswith("GPU memory ") and " -> " in found.price
    assert found.spec.prediction is not None and found.spec.subject == asked


def test_a_secret_that_is_not_kept_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(spec={"script": "train.py", "args": ["--hub_token", "***"], "engine": "plain"})
    with pytest.raises(DstuiError, match="hold a secret"):
        change(run.run, EDITS)
    run = made(env_user=["HF_TOKEN", "EXTRA"], env={"HF_TOKEN": "***", "EXTRA": "1"})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(DstuiError, match="HF_TOKEN"):
        change(run.run, EDITS)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert change(run.run, EDITS).spec.env == {"HF_TOKEN": "hf_x", "EXTRA": "1"}


def test_edits_that_do_not_apply_are_an_error() -> None:
    with pytest.raises(DstuiError):
        change(made().run, [{"op": "remove", "path": "/zero_optimization/offload_param"}])
    with pytest.raises(DstuiError, match="does not say how it was started"):
        change(made(spec={}).run, EDITS)


# ---- stacks


def tool(folder: Path, text: str) -> str:
    path = folder / "py-spy"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def look(run: FakeRun, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> stacks.Stacks:
    monkeypatch.setattr("dstui.runs.processes.environment", lambda _pid: {"DSTUI_RUN_ID": run.id})
    manifest = {**run.run.manifest, **changes}
    return stacks.dump(run.run, manifest, [(1, os.getpid()), (0, os.getpid())])


def test_stacks_of_every_rank_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(python=str(tmp_path / "python"))
    tool(tmp_path, 'echo "Thread 1 (idle): MainThread $*"')
    found = look(run, monkeypatch)
    assert [r.rank for r in found.ranks] == [0, 1]
    assert found.ranks[0].text == f"Thread 1 (idle): MainThread dump --pid {os.getpid()}"
    assert found.problem == "" and all(r.problem == "" for r in found.ranks)


@pytest.mark.parametrize(
    ("scope", "words"),
    [("1", "ptrace_scope is 1"), ("2", "only root"), ("0", "CAP_SYS_PTRACE"), (None, "CAP_SYS_PTRACE")],
)
def test_what_is_not_permitted_says_why_and_how_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str | None, words: str
) -> None:
    run = made(python=str(tmp_path / "python"))
    name = tool(tmp_path, 'echo "Error: Permission Denied: Try running again with sudo" >&2; exit 1')
    yama = tmp_path / "ptrace_scope"
    if scope is not None:
        yama.write_text(scope + "\n")
    monkeypatch.setattr(stacks, "YAMA", yama)
    first = look(run, monkeypatch).ranks[0]
    assert words in first.problem and first.text == ""
    assert first.command == f"sudo {name} dump --pid {os.getpid()}"


def test_nothing_of_another_run_or_host_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(python=str(tmp_path / "python"))
    tool(tmp_path, f"touch {tmp_path}/looked")
    assert "another host" in look(run, monkeypatch, host="elsewhere").problem
    assert "another host" in look(run, monkeypatch, boot_id="other").problem
    monkeypatch.setattr("dstui.runs.processes.environment", lambda _pid: {"DSTUI_RUN_ID": "other"})
    assert "no rank" in stacks.dump(run.run, run.run.manifest, [(0, os.getpid())]).problem
    assert not (tmp_path / "looked").exists()
    assert here().host == run.run.manifest["host"]


def test_py_spy_is_found_beside_either_python_or_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "ours" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert stacks.find_tool(None) is None
    for folder in ("path", "ours", "training"):
        (tmp_path / folder).mkdir()
        wanted = tool(tmp_path / folder, "")
        assert stacks.find_tool(str(tmp_path / "training" / "python")) == wanted
