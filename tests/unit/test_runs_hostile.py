"""Logs as they arrive: behind the prefixes of schedulers, cut, mixed, coloured, full of words that mean nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dstui.runs import messages
from dstui.runs.case import Diagnosis
from dstui.runs.diagnose import diagnose

LOGS = Path(__file__).parent.parent / "data" / "logs"
REAL = sorted(p.name for p in LOGS.glob("*.log"))


def each(form: str) -> Callable[[str], str]:
    """A prefix for each line; ``{i}`` counts them, ``{s}`` counts seconds."""
    return lambda text: "".join(
        form.format(i=i, s=i % 60, line=line) + "\n" for i, line in enumerate(text.splitlines())
    )


WRAPPERS: dict[str, Callable[[str], str]] = {
    "srun --label": each("0: {line}"),
    "pdsh": each("host1: {line}"),
    "docker compose": each("trainer-1  | {line}"),
    "kubectl --timestamps": each("2026-11-29T18:00:{s:02d}.{i:09d}Z {line}"),
    "containerd": each("2026-11-29T18:00:{s:02d}.{i:09d}Z stderr F {line}"),
    "ray": each("(RayTrainWorker pid=1234, ip=10.0.0.2) {line}"),
    "ray in colour": each("\x1b[36m(WorkerDict pid=1234)\x1b[0m {line}"),
    "colours": each("\x1b[31m{line}\x1b[0m"),
    "ts": each("2026-11-29 18:00:{s:02d},{i:03d} {line}"),
    "torchrun --tee": each("[default0]:{line}"),
    "windows": lambda text: text.replace("\n", "\r\n"),
    "a bar in front": lambda text: re.sub(
        r"^((?:\[rank\d\]: )?Traceback)",
        "\r  3%|▎         | 3/100 [00:03<01:20,  1.2it/s]\\1",
        text,
        flags=re.MULTILINE,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_prefixes_change_nothing(name: str) -> None:
    text = (LOGS / name).read_text()
    plain = diagnose(text, text=True)
    for how, wrap in WRAPPERS.items():
        found = diagnose(wrap(text), text=True)
        assert code(found) == code(plain), how
        assert found.cause is None or found.cause.certainty != "certain"


def code(found: Diagnosis) -> str | None:
    return found.cause.code if found.cause else None


def says(text: str) -> str | None:
    return code(diagnose(text, text=True))


STEPS = "".join(f"step {i} loss {2.5 - i / 100:.4f} lr 0.0001\n" for i in range(20))
TRACE = 'Traceback (most recent call last):\n  File "/home/ann/train.py", line 88, in <module>\n    main()\n'
CAUGHT = 'Traceback (most recent call last):\n  File "/home/ann/train.py", line 31, in attempt\n    tracker.send(row)\n'
"""As logging.exception prints it: from the frame that caught it on."""


@pytest.mark.parametrize(
    "lines",
    [
        "# on CUDA out of memory: halve the micro batch\n# RuntimeError: CUDA out of memory is caught below\n",
        "WARNING: if you see `CUDA out of memory` lower --batch; retrying is on\n",
        "error_rate: 0.25 nan_count: 0 killed_processes: 0\n",
        "eval {'eval_error': 0.31, 'eval_nan_rows': 0, 'eval_loss': 2.2}\n",
        "sample: The process was Killed by a bus error, said Nan. Out of memory, she left.\n",
        "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated, an error in torch 2.9\n",
        "UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown\n",
        "[W1129 18:00:00.1 ProcessGroupNCCL.cpp:4571] [PG ID 0 Rank 0] using GPU 0 as device used by this process\n",
        "NCCL INFO cudaHostRegister supported\nNCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n",
        "[WARNING] Unable to find hostfile, will proceed with training with local resources only.\n",
        "[INFO] zero_force_ds_cpu_optimizer .. True\n[INFO] nvme_path=None, pin_memory=False, buffer_count=5\n",
        "Invalidate trace cache @ step 10: expected module 11, but got module 25\n",
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n",
        "[WARNING] [stage3.py:1:step] 2 pytorch allocator cache flushes since last step. this happens when ...\n",
        "[Rank 0] time (ms) | fwd: 20.5 | bwd: 50.0 | step: 2200.5\n",
        "tried to get lr value before scheduler/optimizer started stepping, returning lr=0\n",
        "Using /root/.cache/torch_extensions/py311_cu130 as PyTorch extensions root...\n",
        CAUGHT + "requests.exceptions.ConnectionError: no tracking server, going on without\n",
        CAUGHT
        + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (caught: batch 8 -> 4)\n",
        "wandb: Network error (ConnectionError), entering retry loop.\n",
        "Some weights of the model were not initialized from the checkpoint and are newly initialized\n",
    ],
)
@pytest.mark.parametrize("end", ["", "[INFO] [launch.py:1:main] Process 77 exits successfully.\n"])
def test_a_healthy_log_with_scary_words(lines: str, end: str) -> None:
    assert says(STEPS + lines + STEPS + end) is None
    if not lines.startswith("Traceback") and "CUDA out of" not in lines:
        assert says(lines + STEPS + end) is None


def test_a_loss_scale_that_walks_down_is_healthy() -> None:
    line = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {a}, reducing to {b}\n"

    def walk(first: int, last: int) -> str:
        return "".join(line.format(a=1 << n, b=1 << (n - 1)) for n in range(first, last, -1))

    assert says(walk(32, 15)) is None
    assert says(walk(16, 1)) == "DR601"
    assert says(walk(16, 0) + line.format(a=1, b=1)) == "DR602"


def test_a_bar_that_shows_nan() -> None:
    bar = "Epoch 0:  12%|█▏ | {n}/100 [00:10<01:20,  1.09it/s, loss={loss}, v_num=3]\r"
    assert says("".join(bar.format(n=n, loss=2.5) for n in range(1, 9))) is None
    assert says("".join(bar.format(n=n, loss="nan") for n in range(1, 9))) == "DR601"


def test_zero_loss_of_a_policy_is_healthy() -> None:
    row = "{{'loss': 0.0, 'grad_norm': 0.31, 'learning_rate': 1e-06, 'reward': {r}, 'epoch': 0.1}}\n"
    assert says("".join(row.format(r=i / 10) for i in range(9))) is None
    row = "{'loss': 0.0, 'grad_norm': 1.4142, 'learning_rate': 1e-06, 'epoch': 0.1}\n"
    assert (
        says("{'loss': 2.0, 'grad_norm': 1.1, 'learning_rate': 1e-06, 'epoch': 0.1}\n" + row * 4) == "DR604"
    )
    nan = "{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '1e-06', 'epoch': '0.1'}\n"
    assert says(nan * 3) == "DR601"


def test_an_exception_that_was_survived_is_not_the_cause_of_the_end() -> None:
    early = CAUGHT + "ConnectionError: no tracking server\n"
    late = TRACE + "OSError: [Errno 28] No space left on device\n"
    assert says(early + STEPS + late) == "DR901"
    assert says(TRACE + "KeyError: 'labels'\n" + STEPS * 30) is None  # far more than a buffer holds


def test_steps_that_a_buffer_held_back_do_not_hide_the_exception() -> None:
    """`python train.py > log 2>&1`: stdout is flushed at the end, after the traceback."""
    assert says(STEPS + TRACE + "OSError: [Errno 28] No space left on device\n" + STEPS) == "DR901"
    ranked = "".join(
        f"[rank0]: {x}\n" for x in (TRACE + "IndexError: index out of range in self").splitlines()
    )
    assert says(STEPS + ranked + STEPS) == "DR801"


def test_a_failure_after_the_last_line_of_the_trainer() -> None:
    summary = "{'train_runtime': 12.3, 'train_samples_per_second': 3.0, 'train_loss': 2.1, 'epoch': 1.0}\n"
    found = diagnose(STEPS + summary + TRACE + "OSError: [Errno 28] No space left on device\n", text=True)
    assert (found.outcome, code(found)) == ("failed", "DR901")


def test_the_first_exception_of_a_chain_not_its_wake() -> None:
    text = (
        TRACE + "KeyError: 'labels'\n\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACE + "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/report'\n"
    )  # fmt: skip
    found = diagnose(text, text=True)
    assert found.cause is not None and "labels" in found.cause.detail
    wake = (
        TRACE
        + "ImportError: libcudart.so.12\n\nDuring handling of the above exception, another exception occurred:\n\n"
    )
    assert says(wake + TRACE + "RuntimeError: Unable to JIT load the async_io op due to it not being compatible\n") in (
        "DR704", "DR701",
    )  # fmt: skip


def test_the_first_failing_rank_by_the_launchers_summary() -> None:
    """Rank 0 printed first, but torchrun saw rank 1 fail before it."""
    text = "".join(
        f"[rank{rank}]: {line}\n"
        for rank, error in ((0, "RuntimeError: shapes do not fit"), (1, "ValueError: row 17 is empty"))
        for line in (TRACE + error).splitlines()
    )
    text += (
        "E1129 18:00:00.1 7 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 12) of binary: python\n"
        + TRACE + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "============================================================\ntrain.py FAILED\n"
        "------------------------------------------------------------\nFailures:\n[1]:\n"
        "  time      : 2026-11-29_18:00:01\n  host      : node1\n  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : 1 (pid: 11)\n  error_file: <N/A>\n"
        "------------------------------------------------------------\nRoot Cause (first observed failure):\n[0]:\n"
        "  time      : 2026-11-29_18:00:00\n  host      : node1\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : 1 (pid: 12)\n  error_file: <N/A>\n  traceback : To enable traceback see: errors.html\n"
    )  # fmt: skip
    found = diagnose(text, text=True)
    assert found.cause is not None and "row 17" in found.cause.detail


def test_kills_after_an_exception_are_the_launchers() -> None:
    text = (
        "".join(f"[rank0]: {x}\n" for x in (TRACE + "IndexError: index out of range in self").splitlines())
        + "E1129 18:00:00.1 7 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 12) of binary: python\n"
        + "  exitcode  : -9 (pid: 13)\n  traceback : Signal 9 (SIGKILL) received by PID 13\n"
    )
    assert says(text) == "DR801"


def test_a_harmless_warning_of_nccl_explains_nothing() -> None:
    end = "[2026-11-29 18:00:00,250] [ERROR] [launch.py:259:sigkill_handler] ['p', '--local_rank=0'] exits with return code = 3\n"
    assert (
        says("node1:1:1 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n" + end) == "DR711"
    )


def test_a_peers_lost_connection_is_an_echo() -> None:
    lost = "torch.distributed.DistBackendError: [1] NCCL communicator was aborted on rank 0\n"
    gone = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4242\n"
    for echo in (lost, gone):
        text = "".join(f"[rank0]: {x}\n" for x in (TRACE + echo).splitlines())
        text += "".join(
            f"[rank1]: {x}\n" for x in (TRACE + "IndexError: index out of range in self\n").splitlines()
        )
        assert says(text) == "DR801"


def test_two_ranks_interleaved_behind_prefixes() -> None:
    a = [f"0: {x}" for x in (TRACE + "ValueError: row 17 is empty").splitlines()]
    b = [f"1: {x}" for x in (TRACE + "RuntimeError: Connection reset by peer").splitlines()]
    mixed = [x for pair in zip(b, a, strict=True) for x in pair]
    found = diagnose("\n".join(mixed) + "\n", text=True)
    assert found.cause is not None and "row 17" in found.cause.detail


def test_the_first_failing_node_counts() -> None:
    first = [f"host1: {x}" for x in (TRACE + "ValueError: row 17 is empty").splitlines()]
    second = [f"host2: {x}" for x in (TRACE + "RuntimeError: No CUDA GPUs are available").splitlines()]
    found = diagnose("\n".join([*first, *second]) + "\n", text=True)
    assert found.cause is not None and "row 17" in found.cause.detail
    found = diagnose("\n".join([*second, *first]) + "\n", text=True)
    assert code(found) == "DR707"


def test_a_timeout_of_ranks_in_different_operations() -> None:
    line = "[rank{r}]:[E1129 ProcessGroupNCCL.cpp:616] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3497, OpType=_ALLGATHER_BASE, NumelIn={n}, NumelOut=9, Timeout(ms)=600000) ran for 600029 milliseconds\n"
    found = diagnose(line.format(r=0, n=1572864) + line.format(r=1, n=512), text=True)
    assert found.cause is not None and found.cause.code == "DR501"
    assert "_ALLGATHER_BASE (1572864), _ALLGATHER_BASE (512)" in found.cause.detail
    same = diagnose(line.format(r=0, n=512) + line.format(r=1, n=512), text=True)
    assert same.cause is not None and "different" not in same.cause.detail


def test_a_destructors_complaint_is_no_cause() -> None:
    text = (
        "[rank0]: " + "\n[rank0]: ".join((TRACE + "RuntimeError: No CUDA GPUs are available").splitlines()) + "\n"
        "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f>\n"
        + TRACE + "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'\n"
    )  # fmt: skip
    assert says(text) == "DR707"


def test_a_drawn_traceback() -> None:
    text = (
        "╭─────────────────────────────── Traceback (most recent call last) ────────────────────────────────╮\n"
        "│ /home/ann/train.py:12 in <module>                                                                │\n"
        "│                                                                                                  │\n"
        "│ ❱ 12 main()                                                                                      │\n"
        "│ /opt/venv/lib/python3.10/site-packages/deepspeed/runtime/engine.py:1800 in forward               │\n"
        "╰──────────────────────────────────────────────────────────────────────────────────────────────────╯\n"
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.70 GiB total capacity; 21.00 GiB "
        "already allocated; 0.50 GiB free; 22.00 GiB reserved in total by PyTorch)\n"
    )
    assert says(text) == "DR102"
    assert says("".join("0: " + x + "\n" for x in text.splitlines())) == "DR102"


def test_an_exception_of_a_loader_worker_is_that_of_the_data_set() -> None:
    text = (
        TRACE + "KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal "
        + TRACE + "KeyError: 'input_ids'\n"
    )  # fmt: skip
    found = diagnose(text, text=True)
    assert found.cause is not None and "input_ids" in found.cause.detail


def test_words_in_other_languages_do_no_harm() -> None:
    text = (
        "[错误] 训练失败，正在退出\n"
        + STEPS[:200]
        + TRACE
        + "RuntimeError: CUDA error: no kernel image is available for execution on the device\n训练日志已保存\n"
    )
    assert says(text) == "DR707"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # launchers and schedulers: the same kill in their words
        ("subprocess.CalledProcessError: Command '['python', 'a.py']' died with <Signals.SIGKILL: 9>.", "DR401"),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL", "DR401"),
        ("E1129 10:00:00 api.py:869] failed (exitcode: -9) local_rank: 0 (pid: 5) of binary: /usr/bin/python", "DR401"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.", "DR401"),
        ("srun: error: node1: task 3: Out Of Memory", "DR401"),
        ("[ 9.1] Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB", "DR401"),
        ("command terminated with exit code 137", "DR401"),
        ("run.sh: line 12: 12345 Killed                  deepspeed train.py", "DR401"),
        ("Killed", "DR401"),
        ("run.sh: line 12: 12345 Segmentation fault      (core dumped) python train.py", "DR712"),
        ("run.sh: line 12: 12345 Bus error               (core dumped) python train.py", "DR403"),
        ("[rank0]:[F1129 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 0] Terminating the process after attempting to dump debug info, due to collective timeout or exception.", "DR501"),
        ("[2026-11-29 18:00:00,250] [INFO] [launch.py:1:sigkill_handler] Killing subprocess 77", "DR401"),
        ("slurmstepd: error: *** JOB 12 ON node1 CANCELLED AT 2026-11-29T18:00:00 DUE TO TIME LIMIT ***", "DR720"),
        ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15", "DR720"),
        # collectives, by release of torch
        ("[rank1]:[E1129 18:10:00.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.", "DR501"),
        ("[E ProcessGroupNCCL.cpp:828] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, TensorShape=[1], Timeout(ms)=1800000) ran for 1800029 milliseconds before timing out.", "DR501"),
        ("[rank0]:[E ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 12 PG status: last enqueued work: 12, last completed work: 11", "DR501"),
        ("RuntimeError: Rank 0 failed to pass monitoredBarrier in 1800000 ms", "DR501"),
        ("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined.", "DR504"),
        ("[W socket.cpp:601] [c10d] The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500).", "DR504"),
        ("RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: store_based_barrier_key:1", "DR504"),
        # numerics, batch, config
        ("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "DR602"),
        ("AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 16 != 2 * 1 * 4", "DR301"),
        ("- ds train_micro_batch_size_per_gpu=1 vs hf per_device_train_batch_size=8", "DR705"),
        ("ValueError: Template llama9 does not exist.", "DR804"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/nvme0/train.json'", None),
        ("PermissionError: [Errno 13] Permission denied: '/mnt/nvme0'", "DR203"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/mnt/x/zero_stage_3/float16params/rank0/0_param.tensor.swp'", "DR203"),
        ("AssertionError: no_sync context manager reentry is unsupported", "DR302"),
        ("host:1:2 [0] init.cc:521 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 40", "DR707"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "DR712"),
        ("free(): invalid pointer", "DR712"),
        ("ValueError: Undefined dataset my_data in dataset_info.json.", "DR804"),
        ("train.py: error: unrecognized arguments: --local-rank=0", "DR713"),
        # environment
        ("nvcc fatal   : Unsupported gpu architecture 'compute_90a'", "DR701"),
        ("/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found", "DR702"),
        ("ValueError: invalid literal for int() with base 10: '0a'", "DR703"),
        ("OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.", "DR702"),
        ("ImportError: /x/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2E", "DR714"),
        ("AttributeError: module 'deepspeed_shm_comm' has no attribute 'vector_kernel_level'", "DR718"),
        ("TypeError: create_adam(): incompatible function arguments. The following argument types are supported:", "DR718"),
        ("AttributeError: module 'utils' has no attribute 'set_seed'", None),
        ("RuntimeError: received 0 items of ancdata", "DR716"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "DR717"),
        # memory in the words of older releases
        ("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.70 GiB total capacity; 21.00 GiB already allocated; 10.00 MiB free; 22.00 GiB reserved in total by PyTorch)", "DR101"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 53687091200 bytes. Error code 12 (Cannot allocate memory)", "DR404"),
        ("RuntimeError: unable to open shared memory object </torch_77_1> in read-write mode: No space left on device (28)", "DR403"),
        ("RuntimeError: unable to write to file </torch_77_1>: No space left on device (28)", "DR403"),
        ("Bus error: it is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.", "DR403"),
        ("RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0", "DR901"),
        ("OSError: [Errno 122] Disk quota exceeded", "DR901"),
        ('safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 122, kind: FilesystemQuotaExceeded, message: "Disk quota exceeded" })', "DR901"),
        ('safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })', "DR901"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "DR806"),
    ],
)  # fmt: skip
def test_one_line_alone(line: str, expected: str | None) -> None:
    for text in (line + "\n", "step 1 loss 2.0\n" + line + "\n", "1: " + line + "\n"):
        if line == "Killed" and text.startswith("1: "):
            continue
        got = says(text)
        if expected == "DR101" and text.startswith("step"):
            assert got == "DR102"
        else:
            assert got == expected
    if expected and re.match(r"\w*(?:Error|Exception): ", line):
        assert says(TRACE + line + "\n") in (expected, "DR101" if expected == "DR101" else expected)


def test_lines_are_found_by_their_keys_as_one_by_one() -> None:
    """The search by literals is only faster: it finds what a look at each line finds, in the same order."""
    texts = [
        line
        for path in sorted((Path(__file__).parent.parent / "data" / "logs").glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()[-200:]
    ]
    texts[3:3] = ["", "İSTANBUL Out of memory: Killed process 7", "Å", "exits with return code = -9", ""]
    found: list[tuple[int, messages.Message]] = []
    for i, text in enumerate(texts):
        fits = (
            m
            for m in messages.MESSAGES
            if m.bare and any(k in text.lower() for k in m.keys) and m.pattern.search(text)
        )
        said = next(fits, None)
        if said is not None and all(said is not m for _i, m in found):
            found.append((i, said))
    assert len(found) > 5
    assert list(messages.on_lines(texts)) == found
    assert list(messages.on_lines([])) == []
