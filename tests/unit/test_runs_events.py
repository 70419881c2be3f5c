from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dstui.runs.events import KINDS, Event, Parser
from dstui.runs.tail import Line, split

LOGS = Path(__file__).parent.parent / "data" / "logs"


def read(text: str) -> list[Event]:
    parser = Parser()
    return parser.feed_all(split(text.encode(), 0, final=True)[0]) + parser.finish()


def one(text: str) -> Event:
    events = read(text)
    assert len(events) == 1, events
    assert events[0].kind in KINDS
    return events[0]


STAMP = "[2026-11-29 18:00:00,250] [INFO] [logging.py:123:log_dist] "


@pytest.mark.parametrize(
    ("line", "kind", "values"),
    [
        # DeepSpeed, with and without the rank, list of one or two groups
        (STAMP + "[Rank 0] step=10, skipped=2, lr=[0.001], mom=[(0.9, 0.999)]", "step", {"step": 10, "skipped": 2, "lr": 0.001}),
        ("step=7, skipped=0, lr=[1e-05, 2e-05], mom=[0.9, 0.9]", "step", {"step": 7, "lr": 1e-05}),
        ("[2026-11-29 18:00:00,250] [INFO] [timer.py:264:stop] epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.9, MemAllocated=3.21GB, MaxMemAllocated=7.5GB", "throughput", {"step": 10, "samples_per_second": 12.9, "peak_allocated": 7.5 * 2**30}),
        ("[Rank 0] time (ms) | fwd: 24.88 | bwd: 53.36 | step: 13.63", "timers", {"fwd": 0.02488, "step": 0.01363}),
        ("rank=0 time (ms) | fwd_microstep: 1.5", "timers", {"fwd_microstep": 0.0015}),  # 0.9.5
        ("MA 0.38 GB         Max_MA 0.5 GB         CA 0.4 GB         Max_CA 1 GB ", "memory", {"peak_allocated": 2**29, "peak_reserved": 2**30}),
        ("[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768", "overflow", {"scale": 65536.0, "new_scale": 32768.0}),
        ("[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.", "overflow", {"scale": None}),
        ("Reducing dynamic loss scale from 4096.0 to 2048.0", "overflow", {"scale": 4096.0, "new_scale": 2048.0}),
        ("steps: 10 loss: 1.2345 iter time (s): 0.512 samples/sec: 31.250", "step", {"step": 10, "loss": 1.2345, "step_time": 0.512}),
        ("[2026-11-29 18:00:00,250] [WARNING] [stage3.py:1850:step] 3 pytorch allocator cache flushes since last step.", "pressure", {"flushes": 3}),
        # Hugging Face 4.x and 5.x, LLaMA-Factory, ms-swift
        ("{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.1}", "step", {"loss": 2.5, "lr": 5e-05, "grad_norm": 1.5}),
        ("{'loss': '6.971', 'grad_norm': '2.432', 'learning_rate': '4.75e-05', 'epoch': '0.02'}", "step", {"loss": 6.971, "epoch": 0.02}),
        ("{'eval_loss': 1.25, 'eval_runtime': 3.0, 'epoch': 1.0}", "eval", {"eval_loss": 1.25}),
        ("{'train_runtime': '2.412', 'train_samples_per_second': '66.34', 'train_loss': '6.958', 'epoch': '0.4'}", "summary", {"train_loss": 6.958}),
        ("[INFO|2026-11-29 18:00:00] llamafactory.train.callbacks:143 >> {'loss': 1.5, 'learning_rate': 1e-4, 'epoch': 0.5}", "step", {"loss": 1.5, "lr": 1e-4}),
        ('{"current_steps": 5, "total_steps": 100, "loss": 1.2, "lr": 1e-05, "epoch": 0.05}', "step", {"step": 5, "total": 100, "loss": 1.2}),
        ("{'loss': 1.7, 'learning_rate': 1e-4, 'global_step/max_steps': '3/50', 'percentage': '6%'}", "step", {"step": 3, "total": 50}),
        ("[INFO] Total optimization steps = 1,500", "total", {"total": 1500}),
        (" 45%|████▌     | 9/20 [00:01<00:01,  9.59it/s]", "progress", {"done": 9, "total": 20, "desc": ""}),
        ("  5%|▌         | 1/20 [00:10<03:10, 10.0s/it]", "progress", {"done": 1, "seconds": 10.0}),
        ("Loading checkpoint shards:  50%|█████     | 1/2 [00:05<00:05,  5.0s/it]", "loading", {"done": 1}),
        ("Epoch 0:  10%|█    | 10/100 [00:01<00:09, 9.9it/s, loss=1.25, v_num=1]", "progress", {"desc": "Epoch 0", "loss": 1.25}),
        (" iteration       10/     100 | elapsed time per iteration (ms): 523.0 | learning rate: 1.0E-05 | lm loss: 1.05E+01 |", "step", {"step": 10, "total": 100, "loss": 10.5, "lr": 1e-05}),
        ("train loss 1.5 val loss 2.5", "step", {"loss": 1.5}),
        ("{'loss': '1.7', 'grad_norm': 'nan', 'learning_rate': '0', 'global_step/max_steps': '3/50', 'train_speed(iter/s)': '0.5'}", "step", {"step": 3, "step_time": 2.0, "lr": 0.0}),
        ('{"current_steps": 5, "total_steps": 100, "loss": 1.2, "lr": 1e-05, "throughput": 1234.5, "total_tokens": 99}', "step", {"tokens_per_second": 1234.5}),
        ("epoch 1 | step 20 | loss 2.5 | 12,340 tok/s", "step", {"step": 20, "loss": 2.5, "tokens_per_second": 12340.0}),
        # memory that DeepSpeed pins
        ("[2026-11-29 18:00:00,250] [INFO] [pin_memory_tracker.py:55:track] [pinned-memory checkpoint] crossed 32.000 GB: 33.500 GB pinned across 12 allocations", "pinned", {"bytes": 33.5 * 2**30, "calls": 12}),
        ("[pinned-memory] 512.00 MB pinned across 3 allocations", "pinned", {"bytes": 2**29, "calls": 3}),
        # behind the prefixes of schedulers
        ("0: {'loss': 2.5, 'learning_rate': 5e-05, 'epoch': 0.1}", "step", {"loss": 2.5}),
        ("host1: [2026-11-29 18:00:00,250] [INFO] [logging.py:123:log_dist] [Rank 0] step=10, skipped=2, lr=[0.001], mom=[(0.9, 0.999)]", "step", {"step": 10}),
        ("(RayTrainWorker pid=12, ip=10.0.0.2) MA 0.38 GB         Max_MA 0.5 GB         CA 0.4 GB         Max_CA 1 GB ", "memory", {"peak_allocated": 2**29}),
        # scripts
        ("step 3 loss 1.25 lr 1e-4 tokens/s 5400", "step", {"step": 3, "loss": 1.25, "lr": 1e-4, "tokens_per_second": 5400.0}),
        ("Epoch 1 | iter 30/128 | loss: 0.6931", "step", {"step": 30, "total": 128, "loss": 0.6931}),
        ("loss=nan", "step", {}),
        ("[10/100] loss: 3.5", "step", {"step": 10, "total": 100, "loss": 3.5}),
        ("iteration 100, train_loss = 2.75, learning rate: 0.0003", "step", {"step": 100, "loss": 2.75, "lr": 0.0003}),
        # launchers
        ("[2026-11-29 18:00:00,250] [INFO] [launch.py:245:main] process 986 spawned with command: ['p', '-u', 's.py', '--local_rank=1']", "spawn", {"pid": 986, "local_rank": 1}),
        ("[2026-11-29 18:00:00,250] [ERROR] [launch.py:259:sigkill_handler] ['p', 's.py', '--local_rank=1'] exits with return code = -9", "rank_exit", {"code": -9, "rank": 1}),
        ("E1129 18:00:00.000000 1 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 4242) of binary: python", "rank_exit", {"code": -9, "rank": 1, "pid": 4242}),
        ("[2026-11-29 18:00:00,250] [INFO] [launch.py:285:main] Process 733 exits successfully.", "rank_ok", {"pid": 733}),
        # ops
        ("Building extension module cpu_adam...", "ops", {"name": "cpu_adam", "done": False}),
        ("Time to load cpu_adam op: 31.5 seconds", "ops", {"name": "cpu_adam", "done": True}),
        ("DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully", "ops", {"name": "deepspeed_shm_comm_op", "done": True}),
        # trouble
        ("[rank3]:[E1129 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 ms", "collective", {"timeout": True}),
    ],
)  # fmt: skip
def test_a_line_of_each_format(line: str, kind: str, values: dict[str, Any]) -> None:
    event = one(line)
    assert event.kind == kind
    for key, value in values.items():
        assert event.values[key] == pytest.approx(value), key


@pytest.mark.parametrize(
    "line",
    [
        "  steps_per_print .............. 10",
        '    "initial_loss_scale": 65536,',
        "Reduce bucket size 500000000",
        "Config: alpha=0.002000, betas=(0.900000, 0.999000), weight_decay=0.000000, adam_w=1",
        "I lost my keys at step one of the stairs",
        "loss function: CrossEntropyLoss",
        "stepping over 3 stones",
        "Downloading model step-3-base",
        "version 1.2.3 iter",
        "validation loss: 2.5",
        "val_loss=2.5",
        "eval/loss 2.5",
    ],
)
def test_prose_and_config_dumps_are_no_steps(line: str) -> None:
    assert [e for e in read(line) if e.kind == "step"] == []


def test_stamps_are_local_times() -> None:
    import time

    event = one(STAMP + "[Rank 0] step=10, skipped=2, lr=[0.001], mom=[(0.9, 0.999)]")
    assert event.time == pytest.approx(time.mktime((2026, 11, 29, 18, 0, 0, 0, 0, -1)) + 0.25)
    assert event.rank == 0


def test_interleaved_tracebacks_of_two_ranks_stay_apart() -> None:
    text = """[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank0]:   File "a.py", line 3, in <module>
[rank1]:   File "b.py", line 4, in <module>
[rank0]:     x()
[rank1]:     y()
step 9 loss 2.5
[rank1]: ValueError: two
[rank0]: KeyError: 'one'
[2026-11-29 18:00:00,250] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 1500
"""
    events = read(text)
    failures = {e.values["failure"].rank: e.values["failure"] for e in events if e.kind == "error"}
    assert failures[0].type == "KeyError"
    assert failures[0].frames[0].file == "a.py"
    assert failures[1].text == "ValueError: two"
    assert failures[1].frames[0].line == 4
    assert {"step", "killing"} <= {e.kind for e in events}


def test_a_chain_gives_each_exception_and_the_details_of_a_validation_error() -> None:
    text = """Traceback (most recent call last):
  File "c.py", line 1, in load
    open(p)
FileNotFoundError: [Errno 2] No such file or directory: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "d.py", line 2, in main
    check()
pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig
offload_param.pinned
  Extra inputs are not permitted [type=extra_forbidden, input_value=True, input_type=bool]
step 1 loss 2.0
"""
    failures = [e.values["failure"] for e in read(text) if e.kind == "error"]
    assert [f.short for f in failures] == ["FileNotFoundError", "ValidationError"]
    assert failures[1].details[0] == "offload_param.pinned"
    assert text.encode()[failures[1].offset :].startswith(b"pydantic_core")


def test_whole_logs(shared: Path) -> None:
    wanted = {
        "ds-kill.log": {"step": 4, "rank_exit": 1},
        "ds-oom.log": {"step": 3, "error": 2, "rank_exit": 1},
        "ds-wall.log": {"step": 12, "timers": 48, "rank_ok": 2},
        "hf-ok.log": {"step": 20, "summary": 1},
    }
    for name, counts in wanted.items():
        events = read((shared / "truth" / "logs" / name).read_text())
        got = Counter(e.kind for e in events)
        assert {k: got[k] for k in counts} == counts, name


def test_own_logs() -> None:
    events = read((LOGS / "ok.log").read_text())
    losses = [e.values["loss"] for e in events if e.kind == "step" and "loss" in e.values]
    assert len(losses) == 30
    assert losses[-1] < 1.0 < 5.0 < losses[0]
    engine = [e.values["step"] for e in events if e.kind == "step" and e.values["source"] == "deepspeed"]
    assert engine == list(range(31))


def test_parsing_is_cheap_enough_to_join_a_run() -> None:
    import time

    lines = [Line(i * 60, f"step {i} loss 1.2345 lr 0.0001 tokens/s 5400") for i in range(20_000)]
    start = time.process_time()
    events = Parser().feed_all(lines)
    assert len(events) == 20_000
    assert time.process_time() - start < 3.0  # 150 us a line would be far too slow; about 20 us are usual
