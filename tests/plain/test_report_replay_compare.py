"""``report``, ``watch --replay`` and ``compare`` on a run's directory as a supervisor writes it."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main
from dstui.runs.pace import communication_of
from dstui.runs.processes import here, identify
from dstui.runs.replay import ReplayView, open_view, reference
from dstui.runs.samples import GpuUse, HostUse, RankUse, Sample
from dstui.runs.store import RunDir, write_json
from dstui.runs.view import RunView

BEGIN = 1_700_000_000.0
SECRETS = {
    "token": "hf_abcdefghijklmnopqrstuvwx",
    "key": "sk-proj-abcdefghijklmnopqrst",
    "password": "correcthorsebattery",
    "aws": "AKIAABCDEFGHIJKLMNOP",
}


def make(
    state: Path, run_id: str, seconds: float = 1.0, stage: int = 1, sizes: bool = True, gpus: int = 2
) -> RunDir:
    """60 steps of ``seconds`` each after 10 s of loading; a sample a second."""
    path = state / "runs" / run_id
    (path / "samples").mkdir(parents=True)
    (path / "metrics").mkdir()
    place = here()
    me = {"pid": 1, "start_time": 1}
    write_json(
        path / "manifest.json",
        {
            "schema_version": 1, "id": run_id, "name": None, "created_at": BEGIN - 1, "started_at": BEGIN,
            "world_size": 2, "command": ["deepspeed", "train.py", "--steps", "60"], "host": "trainbox7",
            "boot_id": place.boot_id, "pid_namespace": None, "supervisor": me, "launcher": me, "user": "wilhelmina",
            "versions": {"deepspeed": "0.19.8", "torch": "2.13.0"}, "cwd": "/home/wilhelmina/project",
            "env": {"HF_HOME": "/home/wilhelmina/hf"}, "engine": "plain",
            "facts": {"gpus": [{"index": i, "name": "H200"} for i in range(gpus)]},
        },
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "steps_per_print": stage,
    }
    write_json(path / "config.json", config)
    log = path / "out.log"
    log.write_text(
        f"login with {SECRETS['token']} OPENAI_API_KEY={SECRETS['key']} and {{'password': '{SECRETS['password']}'}}\n"
        f"--wandb_token {SECRETS['aws']} https://anna:secretpw@git.example/x on trainbox7, max_tokens=2048\n"
    )
    end = 10 + 60 * seconds
    samples, written = [], 0
    lines = log.read_text()
    for t in range(int(end) + 1):
        while written < 60 and 10 + (written + 1) * seconds <= t:
            written += 1
            lines += f"step {written} loss {3 - written * 0.03:.4f} lr 0.001 tokens/s {512 / seconds:.0f}\n"
            if written % 10 == 0:
                fwd, bwd, reduce, step = (1000 * seconds * x for x in (0.25, 0.5, 0.2, 0.25))
                lines += f"time (ms) | fwd: {fwd:.2f} | bwd: {bwd:.2f} | bwd_allreduce: {reduce:.2f} | step: {step:.2f}\n"
        cards = tuple(
            GpuUse(i, 0.5 if t > 10 else 0.0, 10 << 30, 141 << 30, 300.0, 700.0) for i in range(gpus)
        )
        samples.append(
            Sample(
                BEGIN + t, cards, HostUse(used=5 << 30, capacity=64 << 30), (RankUse(0, 5, 2 << 30, 1.0), RankUse(1, 6, 1 << 30, 1.0)),
                sizes=(len(lines.encode()), 0) if sizes else None,
            )
        )  # fmt: skip
    log.write_text(lines)
    text = "".join(json.dumps(s.to_json()) + "\n" for s in samples)
    (path / "samples/1s.jsonl").write_text(text)
    (path / "events.jsonl").write_text('{"t": 1, "event": "launched"}\n')
    write_json(
        path / "exit.json",
        {"schema_version": 1, "outcome": "finished", "code": 0, "ranks": [], "started_at": BEGIN, "ended_at": BEGIN + end},
    )  # fmt: skip
    return RunDir(path)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state"


def test_a_report_holds_the_run_and_no_secret(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(state, "aaa2-1129-1200")
    assert main(["report", run.id, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    path = tmp_path / answer["path"]
    assert path.stat().st_mode & 0o777 == 0o600 and answer["redacted"] >= 6
    with tarfile.open(path) as tar:
        tar.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there" / run.id
    whole = "".join(p.read_text() for p in there.rglob("*") if p.is_file())
    for secret in (*SECRETS.values(), "secretpw", "wilhelmina", "trainbox7"):
        assert secret not in whole, secret
    assert "max_tokens=2048" in whole and "step 60 loss" in whole and "~/project" in whole
    # It is a run where it arrives: it plays back and is judged.
    assert main(["watch", "--once", str(there)]) == 0
    assert "step 60/60" in capsys.readouterr().out
    assert main(["diagnose", str(there), "--json"]) == 0
    assert main(["report", run.id]) == 2  # nothing is overwritten
    assert "-o" in capsys.readouterr().err


def test_a_report_hides_what_no_name_tells(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(state, "aaa2-1129-1200")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("SSL_CERT_KEY", "/etc/ssl/private")  # a path, no secret
    manifest = run.manifest
    hook = "curl -d x https://hooks.slack.com/services/T0AAA/B0BBB/cccDDDeee"
    manifest["on_event"] = hook
    manifest["spec"] = {"on_event": hook, "args": ["--data", "/home/gertrude/corpus"]}
    manifest["facts"]["gpus"][0]["processes"] = [{"pid": 9, "user": "bartholomew", "name": "python"}]
    write_json(run.manifest_path, manifest)
    with run.out_log.open("a") as f:
        f.write("using 0123456789abcdef0123456789abcdef01234567, certificates in /etc/ssl/private\n")
        f.write("wandb: Currently logged in as: wilhelmina-team; mail to anna.b@example.org\n")
        f.write(
            "https://open.feishu.cn/open-apis/bot/v2/hook/8f2d-4411 https://discord.com/api/webhooks/77/abcXYZ\n"
        )
    assert main(["report", run.id, "-o", "r.tar.gz"]) == 0
    with tarfile.open(tmp_path / "r.tar.gz") as tar:
        files = {m.name: tar.extractfile(m) for m in tar.getmembers()}
        whole = "".join(f.read().decode() for f in files.values() if f)
    for secret in (
        "0123456789abcdef",
        "cccDDDeee",
        "T0AAA",
        "gertrude",
        "bartholomew",
        "wilhelmina",
        "anna.b",
    ):
        assert secret not in whole, secret
    for secret in ("8f2d-4411", "abcXYZ"):
        assert secret not in whole, secret
    assert "/etc/ssl/private" in whole and "/home/<user>/corpus" in whole


def test_the_same_run_gives_the_same_bytes_and_they_are_bounded(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dstui.runs import bundle

    run = make(state, "aaa2-1129-1200")
    folder = run.rank_logs / "0"
    folder.mkdir(parents=True)
    for n in range(64):
        (folder / f"rank-{n:02d}.log").write_text(f"rank {n}\n" * 2000)
    first = bundle.pack(run, tmp_path / "1.tar.gz")
    again = bundle.pack(run, tmp_path / "2.tar.gz")
    assert first.path.read_bytes() == again.path.read_bytes() and not first.left_out
    size = sum(len((run.path / f).read_bytes()) for f in first.files if (run.path / f).exists())
    monkeypatch.setattr(bundle, "TOTAL", size - 300_000)
    small = bundle.pack(run, tmp_path / "3.tar.gz")
    with tarfile.open(small.path) as tar:
        assert sum(m.size for m in tar.getmembers()) <= bundle.TOTAL
    assert small.left_out and all(name.startswith("rank-logs/") for name in small.left_out)


def test_a_report_s_file_is_a_run(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(state, "aaa2-1129-1200")
    assert main(["report", run.id, "-o", "r.tar.gz"]) == 0
    assert main(["watch", "--replay", "--speed", "100", "--plain", "r.tar.gz"]) == 0
    assert "finished after 60 steps" in capsys.readouterr().out
    assert main(["diagnose", "r.tar.gz", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "finished"
    assert main(["compare", "r.tar.gz", run.id, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["runs"][0]["step_time"] == data["runs"][1]["step_time"]
    whole = (tmp_path / "r.tar.gz").read_bytes()
    (tmp_path / "torn.tar.gz").write_bytes(whole[: len(whole) // 2])
    assert main(["diagnose", "torn.tar.gz"]) == 2
    (tmp_path / "evil").write_text("x")
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "evil", "run/../../escaped")
    assert main(["watch", "--once", "evil.tar.gz"]) == 2
    assert not list(tmp_path.rglob("escaped")) and "not a report" in capsys.readouterr().err


def test_a_huge_log_keeps_its_ends(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstui.runs import bundle

    monkeypatch.setattr(bundle, "HEAD", 1000)
    monkeypatch.setattr(bundle, "TAIL", 1000)
    run = make(state, "aaa2-1129-1200")
    bundle.pack(run, tmp_path / "r.tar.gz")
    with tarfile.open(tmp_path / "r.tar.gz") as tar:
        member = tar.extractfile(f"{run.id}/out.log")
        assert member is not None
        text = member.read().decode()
    assert "step 1 loss" in text and "step 60 loss" in text and "bytes left out" in text


@pytest.mark.parametrize("sizes", [True, False])
def test_a_replay_shows_each_moment(state: Path, sizes: bool) -> None:
    run = make(state, "aaa2-1129-1200", sizes=sizes)
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}
    view = ReplayView(run)
    early = view.at(BEGIN + 5)
    assert early.state == "running" and early.step is None
    middle = view.at(BEGIN + 40)
    assert (
        middle.state == "running" and middle.step is not None and abs(middle.step - 30) <= (1 if sizes else 8)
    )
    assert middle.gpus[0].utilisation == 0.5 and middle.ending is None
    last = view.at(BEGIN + 1000)
    assert (last.state, last.step, last.loss) == ("finished", 60, 1.2)
    real = RunView(run).poll()
    assert (last.step, last.loss, last.ending) == (real.step, real.loss, real.ending)
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*")} == before  # nothing is written


def test_replay_at_speed(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(state, "aaa2-1129-1200")
    started = time.monotonic()
    assert main(["watch", "--replay", "--speed", "50", "--plain", run.id]) == 0
    assert time.monotonic() - started > 1.0  # 70 s of it
    out = capsys.readouterr().out
    assert out.count("running") > 10 and "finished after 60 steps" in out
    view = open_view(reference(run, 10.0))
    shot = view.poll()
    assert abs((shot.started or 0) - time.time()) < 2  # moved to the present
    view.close()
    for words in (["--replay", "--speed", "0"], ["--speed", "2"], ["--replay", "--once"]):
        assert main(["watch", *words, run.id]) == 2


def test_a_run_that_goes_on_is_not_played_back(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(state, "aaa2-1129-1200")
    run.exit_path.unlink()
    me = identify(os.getpid())
    assert me is not None
    live = {"host": here().host, "pid_namespace": here().pid_namespace}
    write_json(
        run.manifest_path, {**run.manifest, **live, "supervisor": {"pid": me.pid, "start_time": me.start}}
    )
    assert main(["watch", "--replay", "--plain", run.id]) == 2
    assert "it can be played back once it has ended" in capsys.readouterr().err


def test_compare(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(state, "aaa2-1129-1200", seconds=1.0, stage=1)
    make(state, "bbb2-1129-1200", seconds=2.0, stage=2)
    runs = ["aaa2", "bbb2"]
    assert main(["compare", *runs, "--json", "--price-per-gpu-hour", "3.6"]) == 0
    data = json.loads(capsys.readouterr().out)
    a, b = data["runs"]
    assert a["step_time"] == pytest.approx(1.0, rel=0.1) and b["step_time"] == pytest.approx(2.0, rel=0.1)
    assert (a["gpu_utilisation"], round(a["gradient_reduction"], 6)) == (0.5, 0.2)
    assert (a["step_time_from"], a["communication"]) == ("timers", None)
    assert (a["gpu_peak"], a["host_peak"], a["gpu"]) == (10 << 30, 3 << 30, "2xH200")
    assert b["gpu_hours"] == pytest.approx(2 * 130 / 3600) and b["price"] == pytest.approx(2 * 130 / 1000)
    assert a["samples_per_second"] == pytest.approx(8.0, rel=0.1)
    paths = {x["path"]: x["values"] for x in data["config"]}
    assert data["verdicts"][0]["outcome"] == "slower" and data["verdicts"][0]["ratio"] == pytest.approx(2.0)
    assert data["equal_step"] == 60 and data["loss_gap"] == 0
    assert paths["zero_optimization.stage"] == [1, 2] and "steps_per_print" not in paths
    assert main(["compare", *runs]) == 0
    out = capsys.readouterr().out
    assert "(+100.0 %)" in out and "zero_optimization.stage" in out
    assert main(["compare", *runs, "--format", "markdown"]) == 0
    assert "| `zero_optimization.stage` | 1 | 2 |" in capsys.readouterr().out
    assert main(["compare", *runs, "--format", "csv"]) == 0
    rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [r["zero_optimization.stage"] for r in rows] == ["1", "2"] and float(rows[0]["gpu_hours"]) > 0
    assert main(["compare", "aaa2"]) == 2


def test_communication_needs_the_breakdown() -> None:
    assert communication_of({}) is None
    assert communication_of({"fwd": 1.0, "bwd": 2.0, "bwd_allreduce": 1.0, "step": 1.0}) == 0.25
