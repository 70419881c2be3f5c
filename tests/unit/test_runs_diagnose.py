from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dstui.runs import causes
from dstui.runs.diagnose import diagnose, diagnose_run
from dstui.runs.processes import here
from dstui.runs.samples import HostUse, Sample
from dstui.runs.store import RunDir, write_json
from dstui.units import GiB

LOGS = Path(__file__).parent.parent / "data" / "logs"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu", "pinned": True},
    },
}


def make_run(tmp_path: Path, log: str, exit_data: dict[str, Any] | None, config: Any = CONFIG) -> RunDir:
    """A run directory as the supervisor leaves it."""
    path = tmp_path / "abc2-1129-1920"
    (path / "samples").mkdir(parents=True)
    place = here()
    write_json(
        path / "manifest.json",
        {
            "schema_version": 1,
            "id": path.name,
            "created_at": time.time(),
            "world_size": 2,
            "command": ["deepspeed", "train.py"],
            "host": place.host,
            "boot_id": place.boot_id,
            "pid_namespace": place.pid_namespace,
            "supervisor": {"pid": 999_999_999, "start_time": 1},
            "launcher": {"pid": 999_999_998, "start_time": 1},
        },
    )
    (path / "out.log").write_text(log)
    if config is not None:
        write_json(path / "config.json", config)
    if exit_data is not None:
        write_json(path / "exit.json", {"schema_version": 1, **exit_data})
    return RunDir(path)


def failed(code: int, rank: int = 1, **more: Any) -> dict[str, Any]:
    return {"outcome": "failed", "code": 1, "rank_code": code, "first_rank": rank, "oom_kills": {}, **more}


@pytest.mark.parametrize(
    ("name", "code", "checkpoint"),
    [
        ("raise", "DR710", None),
        ("kill", "DR401", 4),
        ("nan", "DR601", None),
        ("extra", "DR705", 4),  # offload_param.pinned: a pinned-memory key
        ("stage", "DR705", 1),
        ("both", "DR705", None),
        ("batch", "DR301", 3),
        ("dup", "DR706", None),
        ("broken", "DR706", None),
        ("nofile", "DR706", None),
        ("segv", "DR712", None),
        ("exit", "DR711", None),
        ("disk", "DR901", None),
        ("module", "DR704", None),
        ("term", "DR721", None),
        ("nocc", "DR701", None),
        ("dtype", "DR603", None),
        ("arch", "DR703", None),
        ("auto", "DR705", 3),
        ("client", "DR201", 2),
        ("fp16", "DR705", None),
        ("localrank", "DR713", None),
        ("noconf", "DR706", None),
        ("port", "DR503", 5),
        ("save", "DR901", None),
        ("shm", "DR403", 4),
        ("unequal", "DR501", 5),
        ("torchrun", "DR710", None),
        ("quota", "DR901", None),
        ("bus", "DR403", 4),
        ("shm-none", "DR403", 4),
        ("accumulation", "DR304", 3),
        ("twice", "DR105", 1),
        ("weight", "DR106", 1),
        ("unmanaged", "DR302", 3),
        ("hf-mismatch", "DR705", 3),
        ("accelerate", "DR710", None),
        ("torchrun-kill", "DR401", 4),
        ("files", "DR716", None),
        ("nosync", "DR302", 3),
        ("index", "DR801", None),
        ("nvcc", "DR702", None),
        ("template", "DR804", None),  # its exception is raised by the script in LLaMA-Factory's words
        ("memory", "DR404", 4),
        ("loader", "DR802", None),
        ("nvme", "DR203", 2),
    ],
)
def test_real_logs_of_failed_runs(name: str, code: str, checkpoint: int | None) -> None:
    found = diagnose(LOGS / f"{name}.log")
    assert found.cause is not None
    assert (found.cause.code, found.cause.checkpoint) == (code, checkpoint)
    assert found.cause.certainty != "certain"  # the text of a log alone never is
    assert found.evidence
    text = (LOGS / f"{name}.log").read_text().splitlines()
    for e in found.evidence:
        if e.file.endswith(".log") and e.line is not None:
            first = e.text.splitlines()[0][:60]
            assert first in text[e.line - 1].replace("[rank0]: ", "").replace("[rank1]: ", "")


@pytest.mark.parametrize("name", ["ok", "hf-ok"])
def test_healthy_logs_have_no_cause(name: str) -> None:
    found = diagnose(LOGS / f"{name}.log")
    assert (found.outcome, found.cause, found.evidence) == ("finished", None, ())


def test_gpu_truth(shared: Path) -> None:
    logs = shared / "truth" / "logs"
    oom = diagnose(
        logs / "ds-oom.log", {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}
    )
    assert oom.cause is not None
    assert (oom.cause.code, oom.cause.checkpoint, oom.outcome) == ("DR102", 1, "failed")
    assert "139.8 GiB" in oom.cause.detail
    assert oom.evidence[0].line == 90
    edits = [dict(e) for f in oom.fixes for e in f.edits]
    assert {"op": "replace", "path": "/train_micro_batch_size_per_gpu", "value": 4} in edits
    assert {"op": "replace", "path": "/zero_optimization/stage", "value": 3} in edits
    kill = diagnose(logs / "ds-kill.log")
    assert kill.cause is not None
    assert (kill.cause.code, kill.cause.certainty) == ("DR401", "likely")
    for name in ("ds-wall.log", "hf-ok.log"):
        assert diagnose(logs / name).cause is None, name


def test_inputs_of_another_type_get_an_edit() -> None:
    found = diagnose(LOGS / "dtype.log", {"bf16": {"enabled": True}})
    assert found.cause is not None and "train.py, line 29" in found.cause.detail
    edits = [dict(e) for f in found.fixes for e in f.edits]
    assert edits == [{"op": "replace", "path": "/bf16/enabled", "value": False}]
    found = diagnose(LOGS / "dtype.log", {"fp16": {"enabled": True}})
    edits = [dict(e) for f in found.fixes for e in f.edits]
    assert edits[0] == {"op": "add", "path": "/fp16/auto_cast", "value": True}


@pytest.mark.parametrize(
    "message",
    [
        "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
        "Input type (float) and bias type (c10::BFloat16) should be the same",
        "mixed dtype (CPU): expect parameter to have scalar type of Float",
        "expected scalar type Float but found Half",
        "RNN input dtype (torch.float32) does not match weight dtype (torch.bfloat16). Convert input",
        "Expected query, key, and value to have the same dtype, but got query.dtype: float key.dtype: c10::BFloat16",
    ],
)
def test_what_torch_says_to_mixed_types(message: str, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/w/train.py", line 3, in <module>\n    f(x)\n'
        f"RuntimeError: {message}\n"
    )
    found = diagnose(log)
    assert found.cause is not None and found.cause.code == "DR603"


def test_the_first_failing_rank_counts_and_its_peers_only_lost_it() -> None:
    found = diagnose(LOGS / "raise.log")
    assert found.cause is not None
    assert "the labels of row 17" in found.cause.detail
    assert "failing.py" in found.cause.detail


@pytest.mark.parametrize(
    ("kills", "code", "certainty"),
    [
        ({"cgroup": 1, "system": 1}, "DR401", "certain"),
        ({"cgroup": 0, "system": 2}, "DR401", "likely"),
        ({"cgroup": 0, "system": 0}, "DR721", "likely"),
        ({"cgroup": None, "system": None}, "DR401", "likely"),
    ],
)
def test_sigkill_is_judged_by_the_kernels_count(
    tmp_path: Path, kills: Any, code: str, certainty: str
) -> None:
    run = make_run(tmp_path, (LOGS / "kill.log").read_text(), failed(-9, oom_kills=kills))
    found = diagnose_run(run)
    assert found.cause is not None
    assert (found.cause.code, found.cause.certainty) == (code, certainty)
    if code == "DR401":
        edits = [dict(e) for f in found.fixes for e in f.edits]
        assert {"op": "remove", "path": "/zero_optimization/offload_param"} in edits


@pytest.mark.parametrize(
    ("used", "until", "code"),
    [
        (0.24, 0.5, "DR721"),
        (0.95, 0.5, "DR401"),
        (0.24, 60.0, "DR401"),  # nobody sampled the end
    ],
)
def test_sigkill_of_a_run_that_was_taken_over_is_judged_by_the_memory(
    tmp_path: Path, used: float, until: float, code: str
) -> None:
    """Its second supervisor has no count of kills to compare with, and does not know who died first."""
    end = time.time()
    ranks = [{"rank": 0, "code": None, "ended_at": end + 1}, {"rank": 1, "code": -9, "ended_at": end}]
    record = {
        "outcome": "lost",
        "code": None,
        "rank_code": None,
        "first_rank": None,
        "ranks": ranks,
        "oom_kills": {"cgroup": None, "system": None},
    }
    run = make_run(tmp_path, (LOGS / "kill.log").read_text(), record)
    rows = [Sample(end - until - 30 + n, host=HostUse(int(used * GiB), GiB)) for n in range(31)]
    (run.samples_dir / "1s.jsonl").write_text("".join(json.dumps(r.to_json()) + "\n" for r in rows))
    found = diagnose_run(run)
    assert found.cause is not None and found.cause.code == code
    assert any("rank 1 ended by SIGKILL" in e.text for e in found.evidence)
    assert {"DR401", "DR721"} <= {found.cause.code, *(o.code for o in found.others)}


def test_an_op_of_another_release_names_its_folder(tmp_path: Path) -> None:
    ops = tmp_path / "ops" / "deepspeed_shm_comm"
    ops.mkdir(parents=True)
    (ops / "deepspeed_shm_comm.so").touch()
    text = (
        'Traceback (most recent call last):\n  File "/s/train.py", line 9, in <module>\n    deepspeed.initialize()\n'
        '  File "/v/deepspeed/comm/torch.py", line 223, in __init__\n'
        "    self.shm_vector_kernel_level = self.shm_comm_op.vector_kernel_level()\n"
        "AttributeError: module 'deepspeed_shm_comm' has no attribute 'vector_kernel_level'\n"
    )
    run = make_run(tmp_path, text, failed(1, 0))
    write_json(
        run.manifest_path, {**run.manifest, "env_caller": {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}}
    )
    found = diagnose_run(RunDir(run.path))
    assert found.cause is not None and found.cause.code == "DR718"
    assert f"rm -r {ops}" in found.fixes[0].title and "TORCH_EXTENSIONS_DIR" in found.fixes[1].title


def test_the_record_of_the_supervisor_makes_it_certain(tmp_path: Path) -> None:
    run = make_run(tmp_path, (LOGS / "extra.log").read_text(), failed(1))
    found = diagnose_run(run)
    assert found.cause is not None and found.cause.certainty == "certain"
    assert {"op": "remove", "path": "/zero_optimization/offload_param/pinned"} in [
        dict(e) for f in found.fixes for e in f.edits
    ]


@pytest.mark.parametrize(
    ("size", "certainty"), [(64 << 20, "likely"), (64 << 30, "possible"), (None, "possible")]
)
def test_sigbus_is_judged_by_the_size_of_dev_shm(tmp_path: Path, size: int | None, certainty: str) -> None:
    run = make_run(tmp_path, (LOGS / "bus.log").read_text(), failed(-7))
    manifest = json.loads(run.manifest_path.read_text())
    manifest["facts"] = {"host": {"shm_total": size}}
    write_json(run.manifest_path, manifest)
    found = diagnose_run(run)
    assert found.cause is not None and (found.cause.code, found.cause.certainty) == ("DR403", certainty)


def test_stopped_by_a_person(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        (LOGS / "ok.log").read_text(),
        {"outcome": "stopped", "code": 1, "rank_code": None, "stopped_by": {"user": "ann", "host": "n1"}},
    )
    found = diagnose_run(run)
    assert found.outcome == "stopped"
    assert found.cause is not None
    assert (found.cause.code, found.cause.certainty) == ("DR720", "certain")
    assert "ann" in found.cause.detail


def test_launcher_killed(tmp_path: Path) -> None:
    exit_data = {
        "outcome": "failed",
        "code": None,
        "rank_code": None,
        "launcher_signal": "SIGKILL",
        "reason": "the launcher (pid 5) was killed by SIGKILL",
    }
    found = diagnose_run(make_run(tmp_path, "step 1 loss 2.0\n", exit_data))
    assert found.cause is not None and found.cause.code == "DR722"


def test_unknown_is_an_answer(tmp_path: Path) -> None:
    exit_data = {
        "outcome": "failed",
        "code": 1,
        "rank_code": None,
        "reason": "the launcher exited with code 1",
    }
    assert diagnose_run(make_run(tmp_path, "nothing said\n", exit_data)).cause is None
    assert diagnose("hello\nworld\n", text=True).cause is None


def traceback(kind: str, message: str, *frames: tuple[str, str]) -> str:
    lines = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/home/u/train.py", line 5, in <module>',
    ]
    lines += [f'[rank0]:   File "/v/site-packages/{file}", line 7, in {name}' for file, name in frames]
    return "\n".join([*lines, f"[rank0]: {kind}: {message}"]) + "\n"


OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has {mine} GiB memory in use. Of the allocated memory 60.00 GiB is allocated by PyTorch, and {cached} GiB is reserved by PyTorch but unallocated."


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (traceback("torch.OutOfMemoryError", OOM.format(mine=78, cached=1), ("deepspeed/__init__.py", "initialize"), ("deepspeed/runtime/engine.py", "__init__")), "DR101"),
        (traceback("torch.OutOfMemoryError", OOM.format(mine=78, cached=1), ("transformers/modeling_utils.py", "from_pretrained")), "DR101"),
        (traceback("torch.OutOfMemoryError", OOM.format(mine=78, cached=1), ("deepspeed/runtime/engine.py", "forward")), "DR102"),
        (traceback("torch.cuda.OutOfMemoryError", OOM.format(mine=78, cached=1), ("deepspeed/runtime/engine.py", "backward"), ("torch/autograd/__init__.py", "backward")), "DR102"),
        (traceback("torch.OutOfMemoryError", OOM.format(mine=78, cached=1), ("deepspeed/runtime/engine.py", "step"), ("torch/optim/adamw.py", "step")), "DR103"),
        (traceback("torch.OutOfMemoryError", OOM.format(mine=20, cached=1), ("deepspeed/runtime/engine.py", "forward")), "DR104"),
        (traceback("torch.OutOfMemoryError", OOM.format(mine=78, cached=1), ("transformers/trainer.py", "_save_checkpoint"), ("deepspeed/runtime/engine.py", "_zero3_consolidated_16bit_state_dict")), "DR109"),
        (traceback("torch.OutOfMemoryError", OOM.format(mine=78, cached=1), ("transformers/trainer.py", "training_step"), ("torch/nn/modules/module.py", "_call_impl")), "DR102"),
        (traceback("torch.OutOfMemoryError", OOM.format(mine=78, cached=1), ("deepspeed/runtime/engine.py", "load_checkpoint")), "DR101"),
        (traceback("torch.distributed.DistNetworkError", "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", ("torch/distributed/rendezvous.py", "_create_c10d_store")), "DR503"),
        (traceback("ValueError", "invalid literal for int() with base 10: '0a'", ("deepspeed/ops/op_builder/builder.py", "filter_ccs")), "DR703"),
        (traceback("deepspeed.ops.op_builder.builder.MissingCUDAException", "CUDA_HOME does not exist, unable to compile CUDA op(s)", ("deepspeed/ops/op_builder/builder.py", "assert_torch_info")), "DR702"),
        (traceback("deepspeed.ops.op_builder.builder.CUDAMismatchException", ">- DeepSpeed Op Builder: Installed CUDA version 12.1 does not match the version torch was compiled with 13.0", ("deepspeed/ops/op_builder/builder.py", "assert_no_cuda_mismatch")), "DR702"),
        (traceback("RuntimeError", "Error building extension 'cpu_adam'", ("torch/utils/cpp_extension.py", "_run_ninja_build")), "DR701"),
        (traceback("deepspeed.runtime.zero.utils.ZeRORuntimeException", "You are using ZeRO-Offload with a client provided optimizer (<class 'torch.optim.adamw.AdamW'>) which in most cases will yield poor performance. Please either use deepspeed.ops.adam.DeepSpeedCPUAdam or set an optimizer in your ds-config", ("deepspeed/runtime/engine.py", "_configure_optimizer")), "DR201"),
        (traceback("Exception", "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", ("deepspeed/runtime/fp16/loss_scaler.py", "update_scale")), "DR602"),
        (traceback("RuntimeError", "CUDA error: device-side assert triggered", ("torch/nn/functional.py", "embedding")), "DR801"),
        (traceback("RuntimeError", "No backend type associated with device type cpu", ("torch/distributed/distributed_c10d.py", "all_reduce")), "DR508"),
        (traceback("RuntimeError", "Tensors must be CUDA and dense", ("deepspeed/comm/torch.py", "broadcast")), "DR508"),
        ("[2026-11-29 18:00:00,250] [INFO] [real_accelerator.py:158:get_accelerator] Setting ds_accelerator to cpu (auto detect)\n" + traceback("RuntimeError", "No backend type associated with device type cpu", ("deepspeed/runtime/engine.py", "_broadcast_model")), "DR707"),
        (traceback("RuntimeError", "No CUDA GPUs are available", ("torch/cuda/__init__.py", "_lazy_init")), "DR707"),
        (traceback("RuntimeError", "DataLoader worker (pid 44) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.", ("torch/utils/data/dataloader.py", "_try_get_data")), "DR403"),
        (traceback("RuntimeError", "DataLoader worker (pid(s) 44) exited unexpectedly", ("torch/utils/data/dataloader.py", "_try_get_data")), "DR802"),
        (traceback("AssertionError", "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 2", ("deepspeed/runtime/engine.py", "no_sync")), "DR302"),
        (traceback("FileNotFoundError", "[Errno 2] No such file or directory: 'data/train.json'", ("datasets/load.py", "load_dataset")), "DR803"),
        ("mlock failed to allocate 1048576 bytes with error no 12 msg Cannot allocate memory\n[2026-11-29 18:00:00,250] [ERROR] [launch.py:259:sigkill_handler] ['p', '--local_rank=0'] exits with return code = -6\n", "DR402"),
        ("[2026-11-29 18:00:00,250] [INFO] [launch.py:170:main] dist_world_size=2\n[rank1]:[E1129 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n[2026-11-29 18:10:00,250] [ERROR] [launch.py:259:sigkill_handler] ['p', '--local_rank=1'] exits with return code = -6\n", "DR501"),
    ],
)  # fmt: skip
def test_known_messages(text: str, code: str) -> None:
    if "return code" not in text:
        text += "[2026-11-29 18:00:00,250] [ERROR] [launch.py:259:sigkill_handler] ['p', '--local_rank=0'] exits with return code = 1\n"
    found = diagnose(text, CONFIG, text=True)
    assert found.cause is not None
    assert found.cause.code == code
    assert found.cause.certainty in ("likely", "possible")


def test_a_timeout_names_the_rank_that_is_missing() -> None:
    text = (
        "[2026-11-29 18:00:00,250] [INFO] [launch.py:170:main] dist_world_size=2\n"
        "[rank1]:[E1129 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds\n"
        "[2026-11-29 18:10:00,250] [ERROR] [launch.py:259:sigkill_handler] ['p', '--local_rank=1'] exits with return code = -6\n"
    )
    found = diagnose(text, text=True)
    assert found.cause is not None
    assert "rank 0" in found.cause.detail
    assert "600 s" in found.cause.detail


def test_every_edit_applies_to_the_config() -> None:
    from dstui.config.document import Document

    document = Document.parse(json.dumps(CONFIG, indent=1))
    seen = 0
    for name in sorted(LOGS.glob("*.log")):
        for fix in diagnose(name, CONFIG).fixes:
            if fix.edits:
                document.edited(list(fix.edits))
                seen += 1
    assert seen >= 3


def test_json_is_what_the_contract_says() -> None:
    data = diagnose(LOGS / "extra.log", CONFIG).to_json()
    assert data["schema_version"] == 1
    assert data["outcome"] == "failed"
    assert set(data["cause"]) >= {"code", "name", "checkpoint", "certainty"}
    assert set(data["evidence"][0]) == {"file", "line", "text"}
    assert set(data["fixes"][0]) == {"title", "edits", "price"}
    assert isinstance(data["others"], list)
    json.dumps(data)


def test_a_big_log_is_read_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "big.log"
    block = b"step 1 loss 2.0 lr 0.1 and some more words\n" * 20_000
    with path.open("wb") as f:
        while f.tell() < 60 << 20:
            f.write(block)
        f.write((LOGS / "raise.log").read_bytes())
    start = time.perf_counter()
    found = diagnose(path)
    assert found.cause is not None and found.cause.code == "DR710"
    assert time.perf_counter() - start < 20


def test_every_cause_has_a_page() -> None:
    codes = [c.code for c in causes.all_causes()]
    assert len(set(codes)) == len(codes)
    for cause in causes.all_causes():
        assert cause.code.startswith(f"DR{cause.checkpoint}") if cause.checkpoint else cause.code[2] in "6789"
        page = cause.page()
        assert cause.name in page and cause.do[:20] in page
        assert causes.find(cause.code.lower()) is cause is causes.find(cause.name)
    assert causes.find("DR999") is None


@pytest.mark.parametrize(
    ("last", "certainty"),
    [("terminate called without an active exception\n", "certain"), ("", "likely")],
)
def test_an_abort_while_python_ends_is_the_exceptions_own(tmp_path: Path, last: str, certainty: str) -> None:
    """Seen on CPU: rank 1 raised, and a thread of torch's aborted the process while it ended."""
    log = (
        "step 2 loss 0.1319\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/u/train.py", line 148, in <module>\n'
        '[rank1]:     raise ValueError("the labels of row 17 are longer than the inputs")\n'
        "[rank1]: ValueError: the labels of row 17 are longer than the inputs\n" + last
    )
    ended = {"outcome": "failed", "code": 250, "signal": "SIGABRT", "rank_code": -6, "first_rank": 1}
    found = diagnose_run(make_run(tmp_path, log, ended)).cause
    assert found is not None and (found.code, found.certainty) == ("DR710", certainty)


STEPS = "".join(f"step {n} loss {3 - n / 10:.2f}\n" for n in range(8))


@pytest.mark.parametrize("prefix", ["", "0: ", "[rank1]: ", "node3: [rank1]: "])
def test_what_python_ignores_is_no_cause(prefix: str) -> None:
    """A callback at exit, a destructor: the words of two ranks, one after the other, may be mixed."""
    one = (
        "Exception ignored in atexit callback: <function store at 0x7f01>\n"
        "Traceback (most recent call last):\n"
        '  File "/v/site-packages/deepspeed/ops/x.py", line 105, in put\n'
        "    os.replace(self.path + '.tmp', self.path)\n"
        "FileNotFoundError: [Errno 2] No such file or directory: '/h/a.pickle.tmp' -> '/h/a.pickle'\n"
    )
    text = STEPS + "".join(prefix + line + "\n" for line in (one + one).splitlines())
    assert diagnose(text, text=True).cause is None


def test_two_sources_are_ignored_each_for_itself() -> None:
    lines = [
        "0: Exception ignored in: <function D.__del__ at 0x7f01>",
        "1: Traceback (most recent call last):",
        '1:   File "/w/train.py", line 3, in <module>',
        "0: Traceback (most recent call last):",
        '0:   File "/v/x.py", line 5, in __del__',
        "1: ValueError: a row without labels",
        "0: OSError: closed",
    ]
    found = diagnose("\n".join(lines), text=True)
    assert found.cause is not None and "a row without labels" in found.cause.detail


def test_a_thread_that_ended_is_weaker_than_what_ended_its_process() -> None:
    thread = (
        "Exception in thread Thread-4 (_pin_memory_loop):\nTraceback (most recent call last):\n"
        '  File "/v/threading.py", line 1045, in _bootstrap_inner\n    self.run()\n'
        "ConnectionResetError: [Errno 104] gone\n"
    )
    own = 'Traceback (most recent call last):\n  File "/w/train.py", line 3, in <module>\n    f()\nValueError: bad row\n'
    found = diagnose(STEPS + thread + own, text=True)
    assert found.cause is not None and "bad row" in found.cause.detail


def test_the_other_nodes_agent_that_lost_its_store_is_an_echo() -> None:
    text = (
        "0: E0316 13:16:32.769000 575 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -7) "
        "local_rank: 1 (pid: 575909) of binary: /v/bin/python\n"
        "1: W0316 13:16:35.279000 345 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1282] The node 'n2_345_0' "
        "has failed to shutdown the rendezvous '1114' due to an error of type RendezvousConnectionError.\n"
        '1: Traceback (most recent call last):\n1:   File "/v/bin/torchrun", line 33, in <module>\n'
        "1: torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
        "failed. See inner exception for details.\n"
    )
    found = diagnose(text, text=True)
    assert found.cause is not None and found.cause.code == "DR403"
    alone = STEPS + "".join(line + "\n" for line in text.splitlines()[1:2])
    assert diagnose(alone, text=True).cause is None  # the other node was through a second earlier


def test_a_warning_about_an_op_that_nobody_uses_is_no_cause() -> None:
    warning = (
        "n1:  [WARNING]  async_io requires the dev libaio .so object and headers but these were not found.\n"
    )
    assert diagnose(warning * 3 + STEPS, text=True).cause is None
    failed = 'Traceback (most recent call last):\n  File "/w/pretrain.py", line 3, in <module>\n    f()\nRuntimeError: X is not set\n'
    found = diagnose(failed + warning, text=True)
    assert found.cause is not None and (found.cause.code, found.others) == ("DR710", ())


@pytest.mark.parametrize(
    "said",
    ["Last error:\nFailed to CUDA calloc async 4 bytes", "Last error:\nCuda failure 'out of memory'"],
)
def test_nccl_without_room_on_its_card(said: str) -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/w/pretrain.py", line 3, in <module>\n    f()\n'
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:230, unhandled cuda error, NCCL version 2.27.5\n"
        f"ncclUnhandledCudaError: Call to CUDA function failed.\n{said}\n"
    )
    found = diagnose(text, text=True)
    assert found.cause is not None and found.cause.code == "DR101"
    found = diagnose(
        "h:1:2 [1] alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'\n" + text[-30:], text=True
    )
    assert found.cause is not None and found.cause.code == "DR101"


@pytest.mark.parametrize(("skipped", "code"), [(0, "DR601"), (1, None)])
def test_steps_without_a_loss_whose_gradients_are_no_numbers(skipped: int, code: str | None) -> None:
    log = "".join(
        f" iteration {n:8}/ 5000 | consumed samples: {n * 8} | elapsed time per iteration (ms): 4247.9 | "
        f"learning rate: 2.999E-04 | global batch size: 8 | loss scale: 1.0 | grad norm: nan | "
        f"number of skipped iterations: {skipped} | number of nan iterations: 0 |\n"
        for n in range(11, 16)
    )
    answer = diagnose(log, text=True)
    assert (answer.cause.code if answer.cause else None) == code


def test_a_loss_that_sank_below_what_is_printed() -> None:
    sank = "".join(f"step {n} loss {x}\n" for n, x in enumerate((0.9, 0.02, 0.0004, 0.0, 0.0, 0.0, 0.0)))
    assert diagnose(sank, text=True).cause is None
    fell = "".join(f"step {n} loss {x}\n" for n, x in enumerate((2.4, 2.3, 0.0, 0.0, 0.0, 0.0)))
    found = diagnose(fell, text=True)
    assert found.cause is not None and found.cause.code == "DR604"


def test_arguments_that_a_script_refuses_without_a_launchers_word() -> None:
    text = "usage: train.py [-h] [--bf16]\ntrain.py: error: argument --fp16: Truthy value expected: got s\n"
    found = diagnose(text, text=True)
    assert found.cause is not None and found.cause.code == "DR711" and "--fp16" in found.cause.detail
    assert diagnose("note.py: error: see below\n" + STEPS, text=True).cause is None


def test_a_config_that_lies_on_one_node_only() -> None:
    text = traceback(
        "binascii.Error",
        "Incorrect padding",
        ("deepspeed/runtime/config.py", "__init__"),
        ("base64.py", "b64decode"),
    )
    found = diagnose(text, text=True)
    assert found.cause is not None and found.cause.code == "DR706"


DONE = "[2025-11-03 09:13:00,100] [INFO] [launch.py:348:main] Process 1234 exits successfully.\n"
DIED = (
    traceback("RuntimeError", "No CUDA GPUs are available", ("torch/cuda/__init__.py", "_lazy_init"))
    + "[2025-11-03 08:14:00,200] [ERROR] [launch.py:341:sigkill_handler] ['p', '--local_rank=0'] exits with return code = 1\n"
)
BEGIN = "[2025-11-03 09:12:00,100] [INFO] [runner.py:607:main] cmd = /v/bin/python -u -m deepspeed.launcher.launch train.py\n"
ELASTIC = "W1103 09:12:00.1 77 torch/distributed/run.py:779] Setting OMP_NUM_THREADS environment variable for each process\n"


@pytest.mark.parametrize("begin", [BEGIN, ELASTIC])
def test_the_last_of_two_runs_counts_although_the_first_has_no_beginning(begin: str) -> None:
    assert diagnose(DIED + begin + STEPS + DONE, text=True).cause is None
    missing = traceback("FileNotFoundError", "[Errno 2] No such file or directory: 'rows.json'")
    found = diagnose(DIED + begin + missing, text=True)
    assert found.cause is not None and found.cause.code == "DR803"
    found = diagnose("some words of the shell\n" + begin + DIED, text=True)
    assert found.cause is not None and found.cause.code == "DR707"


@pytest.mark.parametrize("said", ["exit code: 247", "trainer-1 exited with code 137", "exit status 137"])
def test_what_shells_and_containers_say_of_a_kill(said: str) -> None:
    found = diagnose(STEPS + said + "\n", text=True)
    assert found.cause is not None and found.cause.code == "DR401"


def test_ranks_time_out_because_one_was_killed() -> None:
    watchdog = (
        "[rank0]:[E1103 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds\n"
    )
    for kill in (
        "[1234.5] Out of memory: Killed process 4102 (python) total-vm:1234kB\n",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=55.0.\n",
    ):
        found = diagnose(STEPS + watchdog + kill, text=True)
        assert found.cause is not None and found.cause.code == "DR401"
        assert [o.code for o in found.others] == ["DR501"]


def test_ranks_whose_tracebacks_were_cut_are_read_each_by_itself() -> None:
    """srun's lines of two ranks, mixed; only the second has its end."""
    lines = [
        ' 2: [rank2]:   File "/v/site-packages/lightning/trainer/call.py", line 46, in _call',
        " 2: [rank2]:     return launch(f)",
        '15: [rank15]:   File "/w/block.py", line 110, in layers',
        "15: [rank15]:     n % size == 0",
        "15: [rank15]: AssertionError: 30 layers on 4 stages",
        " 2: [rank2]:            ^^^^^^^^^",
    ]
    found = diagnose("\n".join(lines), text=True)
    assert found.cause is not None and found.cause.code == "DR710" and "30 layers" in found.cause.detail


def test_a_worker_that_logs_what_it_caught_and_goes_on() -> None:
    """The logger's words stand before the first line only; two steps come after it, an hour each."""
    worker = "(Worker pid=57714) "
    caught = [
        worker + "Error: <answer> tag not found.",
        worker + "ERROR:2026-03-26 21:59:41,526:Traceback (most recent call last):",
        worker + '  File "/w/env.py", line 211, in extract',
        worker + "    x, y = parse(text)",
        worker + "TypeError: cannot unpack non-iterable NoneType object",
        worker + "ERROR:2026-03-26 21:59:41,526:Error extracting action for item 35532",
    ]
    text = "\n".join(
        [
            *caught,
            "(TaskRunner pid=38606) step:1 - actor/pg_loss:0.01",
            *caught,
            "(TaskRunner pid=38606) step:2",
        ]
    )
    assert diagnose(text, text=True).cause is None


def test_a_drawn_traceback_without_its_head() -> None:
    lines = [
        "│ /w/train.py:211 in <module>    │",
        "│ ❱ 211 trainer.train()          │",
        "╰────────────────────────────────╯",
    ]
    found = diagnose("\n".join([*lines, "KeyError: 'input_ids'"]), text=True)
    assert found.cause is not None and "KeyError: 'input_ids'" in found.cause.detail
    assert diagnose("\n".join([*lines, "step 1 loss 2.0"]), text=True).cause is None


def test_an_exception_that_is_set_in_with_its_frames() -> None:
    lines = [
        "Traceback (most recent call last):",
        '    File "/w/train.py", line 551, in <module>',
        "      train(args)",
        "  RuntimeError: Expected all tensors to be on the same device, but found cuda:0 and cpu!",
    ]
    found = diagnose("\n".join(lines), text=True)
    assert found.cause is not None and "same device" in found.cause.detail


@pytest.mark.parametrize(
    "said",
    [
        '../aten/src/ATen/native/cuda/IndexKernel.cu:92: operator(): block: [22,0,0], thread: [64,0,0] Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.',
        "../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [949,0,0], thread: [62,0,0] Assertion `srcIndex < srcSelectDimSize` failed",
    ],
)
def test_an_assertion_on_the_card_comes_before_the_signal_that_follows(said: str) -> None:
    ended = "[2025-11-03 08:14:00,200] [ERROR] [launch.py:341:sigkill_handler] ['p', '--local_rank=1'] exits with return code = -6\n"
    for end in (ended, "srun: error: n1: task 0: Aborted (core dumped)\n"):
        found = diagnose(said + "\n" + end, text=True)
        assert found.cause is not None and found.cause.code == "DR801"


def test_a_service_that_watches_is_no_part_of_the_training() -> None:
    """wandb's own log of a run, and the same words in the run's."""
    thread = (
        "2025-03-02 10:11:32,709 WARNING MsgRouterThr:360778 [router.py:message_loop():77] message_loop has been closed\n"
        "Traceback (most recent call last):\n"
        '  File "/v/site-packages/wandb/sdk/interface/router_sock.py", line 28, in _read_message\n    resp = self._read()\n'
        "wandb.sdk.lib.sock_client.SockClientClosedError\n"
    )
    assert diagnose(thread, text=True).cause is None
    assert diagnose(STEPS + thread, text=True).cause is None
    died = "[2025-11-03 08:14:00,200] [ERROR] [launch.py:341:sigkill_handler] ['p', '--local_rank=0'] exits with return code = 1\n"
    found = diagnose(STEPS + thread + died, text=True)
    assert found.cause is not None and found.cause.code == "DR710"  # nothing else was said


@pytest.mark.parametrize(
    ("kind", "message", "frame", "code"),
    [
        ("TypeError", "Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'", "transformers/trainer.py", "DR714"),
        ("AttributeError", "module 'numpy' has no attribute 'object'", "tensorboard/compat.py", "DR714"),
        ("AttributeError", "module 'utils' has no attribute 'rows'", "data/load.py", "DR710"),
    ],
)  # fmt: skip
def test_packages_that_do_not_fit_each_other(kind: str, message: str, frame: str, code: str) -> None:
    found = diagnose(traceback(kind, message, (frame, "f")), text=True)
    assert found.cause is not None and found.cause.code == code
    own = f'Traceback (most recent call last):\n  File "/w/train.py", line 3, in <module>\n    f()\n{kind}: {message}\n'
    if kind == "TypeError":  # the script's own call
        found = diagnose(own, text=True)
        assert found.cause is not None and found.cause.code == "DR710"


def test_a_torch_that_is_older_than_the_card() -> None:
    source = "".join(f"  #define LINE_{n} 256\n" for n in range(400))
    text = (
        'Traceback (most recent call last):\n  File "/w/train.py", line 3, in <module>\n    f()\nRuntimeError:\n'
        + source
        + "nvrtc: error: invalid value for --gpu-architecture (-arch)\n"
    )
    found = diagnose(text, text=True)
    assert found.cause is not None and found.cause.code == "DR707"


@pytest.mark.parametrize(
    ("message", "frames", "code"),
    [
        ("No buffer available to swap param 7.", [("deepspeed/runtime/swap_tensor/partitioned_param_swapper.py", "swap_into_buffer")], "DR203"),
        ("", [("deepspeed/__init__.py", "initialize"), ("deepspeed/runtime/swap_tensor/utils.py", "get_sized_buffer")], "DR203"),
        ("Expert checkpoint file is corrupt: key 'w' not found", [("deepspeed/runtime/engine.py", "load_moe_state_dict")], "DR903"),
        ("Empty ds_version in checkpoint", [("deepspeed/runtime/engine.py", "load_checkpoint"), ("deepspeed/runtime/bf16_optimizer.py", "_load_legacy_checkpoint")], "DR903"),
        ("can't find 2 files in directory 'x'", [("deepspeed/utils/zero_to_fp32.py", "get_checkpoint_files")], "DR903"),
        ("Nested GatheredParameters contexts cannot overlap", [("deepspeed/runtime/zero/partition_parameters.py", "__enter__")], "DR106"),
        ("expected param 7 to be inflight", [("deepspeed/runtime/zero/partition_parameters.py", "wait")], "DR107"),
        ("bfloat16 and fp16 cannot be enabled at once", [("deepspeed/runtime/zero/partition_parameters.py", "_set_dtype")], "DR705"),
        ("7 expected to be released", [("deepspeed/runtime/zero/parameter_offload.py", "partition_all_parameters")], "DR107"),
        ("Detected a disagreement on list length between rank0 and rank1:", [("deepspeed/runtime/zero/utils.py", "assert_lst_len_same_as_other_ranks")], "DR107"),
        ("Cannot use fp16 without accelerator.", [("deepspeed/runtime/fp16/unfused_optimizer.py", "__init__")], "DR707"),
        ("warmup_num_steps must be a positive integer, got 0", [("deepspeed/runtime/lr_schedules.py", "__init__")], "DR705"),
        ("need to call step() first", [("deepspeed/runtime/lr_schedules.py", "get_last_lr")], "DR710"),
        ("rows and labels differ", [("mine/deepspeed_data.py", "load_checkpoint")], "DR710"),
    ],
)  # fmt: skip
def test_the_checks_of_deepspeeds_parts(message: str, frames: list[tuple[str, str]], code: str) -> None:
    found = diagnose(traceback("AssertionError", message, *frames), text=True)
    assert found.cause is not None and found.cause.code == code
