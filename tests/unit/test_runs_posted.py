"""Logs as people post them: cut, prefixed by schedulers, several launchers. Written for this test, word by word.

Each holds the message of a real failure in the surroundings that such a failure has. The healthy ones hold what
frightens at first sight: none of them gets a cause.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dstui.runs.case import Diagnosis
from dstui.runs.diagnose import diagnose

LOGS = Path(__file__).parent.parent / "data" / "logs"

SPAWNED = """\
[2025-11-03 08:12:01,118] [INFO] [runner.py:610:main] cmd = /opt/env/bin/python -u -m deepspeed.launcher.launch --world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19 --master_addr=127.0.0.1 --master_port=29500 train.py
[2025-11-03 08:12:04,207] [INFO] [launch.py:152:main] WORLD INFO DICT: {'localhost': [0, 1]}
[2025-11-03 08:12:04,208] [INFO] [launch.py:245:main] process 4101 spawned with command: ['/opt/env/bin/python', '-u', 'train.py', '--local_rank=0']
[2025-11-03 08:12:04,211] [INFO] [launch.py:245:main] process 4102 spawned with command: ['/opt/env/bin/python', '-u', 'train.py', '--local_rank=1']
"""
STEPS = "".join(
    f"[2025-11-03 08:14:{i:02d},500] [INFO] [logging.py:128:log_dist] [Rank 0] step={i}0, skipped=0, lr=[2e-05], mom=[(0.9, 0.999)]\n"
    for i in range(1, 8)
)
ENDED = """\
[2025-11-03 08:15:30,001] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 4101
[2025-11-03 08:15:30,002] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 4102
[2025-11-03 08:15:31,230] [ERROR] [launch.py:325:sigkill_handler] ['/opt/env/bin/python', '-u', 'train.py', '--local_rank=1'] exits with return code = {code}
"""


def traceback(message: str, *frames: str, tag: str = "", file: str = "/home/ann/train.py") -> str:
    """``frames``: ``file:function``, outermost first."""
    lines = ["Traceback (most recent call last):", f'  File "{file}", line 88, in <module>', "    main()"]
    for n, frame in enumerate(frames):
        where, _, function = frame.rpartition(":")
        lines += [
            f'  File "/opt/env/lib/python3.11/site-packages/{where}", line {40 + n}, in {function}',
            "    call(x)",
        ]
    return "".join(f"{tag}{line}\n" for line in [*lines, *message.splitlines()])


def elastic(code: int, rank: int = 1, said: str = "") -> str:
    """torchrun's end."""
    trace = said or "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    return f"""\
W1103 08:15:29.100000 4000 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4101 closing signal SIGTERM
E1103 08:15:30.200000 4000 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {code}) local_rank: {rank} (pid: 4102) of binary: /opt/env/bin/python
Traceback (most recent call last):
  File "/opt/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/env/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 277, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-11-03_08:15:29
  host      : node1
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 4102)
  error_file: <N/A>
  traceback : {trace}
============================================================
"""


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 1 has a total capacity of 79.15 GiB of "
    "which 402.75 MiB is free. Process 4102 has 78.74 GiB memory in use. Of the allocated memory 74.18 GiB is allocated "
    "by PyTorch, and 3.02 GiB is reserved by PyTorch but unallocated."
)
WATCH = (
    "[rank{rank}]:[E1103 09:15:29.123456789 ProcessGroupNCCL.cpp:633] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=2101, OpType={op}, NumelIn=5242880, NumelOut=5242880, Timeout(ms)=600000) ran for 600041 "
    "milliseconds before timing out.\n"
)
ENGINE = "deepspeed/runtime/engine.py"
STAGE3 = "deepspeed/runtime/zero/stage3.py"
MODULE = "torch/nn/modules/module.py:_call_impl"


def srun(text: str) -> str:
    """As ``srun --label`` prints it."""
    return "".join(f"{i % 2}: {line}" for i, line in enumerate(text.splitlines(keepends=True)))


def pod(text: str) -> str:
    """As ``kubectl logs --timestamps`` prints it."""
    return "".join(
        f"2025-11-03T08:15:{i % 60:02d}.104Z {x}" for i, x in enumerate(text.splitlines(keepends=True))
    )


FAILED = {
    "oom in the first long batch, torchrun": (
        "DR102", STEPS + traceback(OOM, "transformers/trainer.py:training_step", f"{MODULE}", tag="[rank1]: ") + elastic(1)),
    "oom when the engine is made, deepspeed": (
        "DR101", SPAWNED + traceback(OOM, "deepspeed/__init__.py:initialize", f"{ENGINE}:__init__",
                                     "deepspeed/runtime/zero/stage_1_and_2.py:__init__", tag="[rank1]: ") + ENDED.format(code=1)),
    "oom in Adam, accelerate": (
        "DR103", STEPS + traceback(OOM, f"{ENGINE}:step", f"{ENGINE}:_take_model_step", "torch/optim/adamw.py:step",
                                   tag="[rank1]: ") + elastic(1)),
    "oom at save": ("DR109", STEPS + traceback(OOM, f"{ENGINE}:save_16bit_model",
                                                f"{ENGINE}:_zero3_consolidated_16bit_state_dict") + elastic(1)),
    "oom that the script printed itself": ("DR102", SPAWNED + STEPS + f"caught: {OOM}\n" + ENDED.format(code=1)),
    "killed while weights were loaded": (
        "DR401", SPAWNED + "Loading checkpoint shards:  40%|####      | 6/15 [01:02<01:33, 10.4s/it]\n" + ENDED.format(code=-9)),
    "killed, torchrun": ("DR401", STEPS + elastic(-9, said="Signal 9 (SIGKILL) received by PID 4102")),
    "slurm's memory limit": (
        "DR401", srun(SPAWNED) + "slurmstepd: error: Detected 1 oom_kill event in StepId=88123.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: node7: task 1: Out Of Memory\nsrun: Terminating StepId=88123.0\n"),
    "slurm's time limit": (
        "DR720", srun(STEPS) + "slurmstepd: error: *** JOB 88123 ON node7 CANCELLED AT 2025-11-03T12:00:07 DUE TO TIME LIMIT ***\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"),
    "srun reports a kill": ("DR401", srun(STEPS) + "srun: error: node7: task 1: Killed\nsrun: launch/slurm: _step_signal: Terminating StepId=1.0\n"),
    "srun reports a fault": ("DR712", srun(STEPS) + "srun: error: node7: tasks 0-3: Segmentation fault (core dumped)\n"),
    "srun reports a bus error": ("DR403", srun(STEPS) + "srun: error: node7: task 1: Bus error (core dumped)\n"),
    "PBS's time limit": ("DR720", STEPS + "=>> PBS: job killed: walltime 86430 exceeded limit 86400\n"),
    "LSF's memory limit": ("DR401", STEPS + "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 137.\n"),
    "a pod that is evicted": ("DR401", STEPS + "The node was low on resource: memory. Container trainer was using 210Gi, which exceeds its request of 0.\n"),
    "systemd-oomd": ("DR401", STEPS + "systemd-oomd[812]: Killed /user.slice/user-1000.slice due to memory pressure\n"),
    "srun reports a code only": (None, srun(STEPS) + "srun: error: node7: task 1: Exited with exit code 1\n"),
    "segmentation fault in an extension": ("DR712", SPAWNED + "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f10 (most recent call first):\n"
                                            '  File "/opt/env/lib/python3.11/site-packages/flash_attn/flash_attn_interface.py", line 61 in _forward\n' + ENDED.format(code=-11)),
    "bus error while rows are tokenized": ("DR403", "Running tokenizer on dataset (num_proc=16):  31%|###       | 940/3000 [00:00<00:00, 2525.51 examples/s]\nFatal Python error: Bus error\n"),
    "a map worker is gone": (
        "DR802", traceback("RuntimeError: One of the subprocesses has abruptly died during map operation.To debug the error, disable multiprocessing.",
                           "datasets/arrow_dataset.py:map", "datasets/utils/py_utils.py:iflatmap_unordered", tag="[rank0]: ") + elastic(1, 0)),
    "a loader worker is killed": (
        "DR802", STEPS + traceback("RuntimeError: DataLoader worker (pid 5120) is killed by signal: Killed. ", "torch/utils/data/dataloader.py:_try_get_data") + elastic(1)),
    "one rank saves alone": ("DR501", STEPS + WATCH.format(rank=1, op="_ALLGATHER_BASE") + elastic(-6, said="Signal 6 (SIGABRT) received by PID 4102")),
    "ranks in two places": (
        "DR501", STEPS + WATCH.format(rank=0, op="ALLREDUCE") + WATCH.format(rank=1, op="_REDUCE_SCATTER_BASE")
        + "terminate called after throwing an instance of 'c10::DistBackendError'\n" + ENDED.format(code=-6)),
    "gloo's own time-out": (
        "DR501", STEPS + traceback("RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
                                   "torch/distributed/distributed_c10d.py:barrier") + elastic(1)),
    "the nodes do not meet": (
        "DR504", traceback("torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.7, 29500).",
                           "deepspeed/comm/comm.py:init_distributed", "torch/distributed/distributed_c10d.py:init_process_group")),
    "a port that is taken": (
        "DR503", SPAWNED + traceback("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
                                     "torch/distributed/rendezvous.py:_create_c10d_store") + ENDED.format(code=1)),
    "a node that ssh cannot reach": (
        "DR715", traceback("RuntimeError: Using hostfile at hosts but host=10.0.0.8 was not reachable via ssh. If you are running with a single node please remove hosts or setup passwordless ssh.",
                           "deepspeed/launcher/runner.py:main", file="/opt/env/bin/deepspeed")),
    "a script that is not there": ("DR803", SPAWNED + "/opt/env/bin/python: can't open file '/home/ann/trian.py': [Errno 2] No such file or directory\n" + ENDED.format(code=2)),
    "a wrong option": ("DR711", SPAWNED + "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --bf_16\n" + ENDED.format(code=2)),
    "ZeRO 3 split a convolution": (
        "DR106", traceback("RuntimeError: weight should have at least three dimensions", "torch/nn/modules/conv.py:_conv_forward", tag="[rank4]: ")),
    "ZeRO 3 split a linear layer": (
        "DR106", traceback("RuntimeError: mat2 must be a matrix, got 1-D tensor", "torch/nn/modules/linear.py:forward")),
    "a weight that a module still uses, in newer words": (
        "DR107", traceback("AssertionError: {'id': 0, 'status': 'AVAILABLE', 'numel': 900, 'shape': (30, 30), 'active_sub_modules': {372}}",
                           "deepspeed/runtime/zero/partition_parameters.py:free_param", tag="[rank1]: ")),
    "a weight that is on its way": (
        "DR107", traceback("AssertionError: {'id': 12, 'status': 'INFLIGHT', 'numel': 4096, 'active_sub_modules': set()}",
                           "deepspeed/runtime/zero/partitioned_param_coordinator.py:fetch_sub_module")),
    "another path through the model": (
        "DR107", traceback("IndexError: pop from an empty deque", "deepspeed/runtime/zero/partitioned_param_coordinator.py:record_parameters")),
    "a checkpoint of another model": (
        "DR903", traceback("RuntimeError: Error(s) in loading state_dict for LlavaForCausalLM:", "transformers/integrations/deepspeed.py:deepspeed_load_checkpoint",
                           "deepspeed/runtime/engine.py:load_module_state_dict", "torch/nn/modules/module.py:load_state_dict")),
    "bitsandbytes without its library": (
        "DR714", traceback("RuntimeError: ", "bitsandbytes/cextension.py:<module>") + "        CUDA Setup failed despite GPU being available. Please run the following command:\n"),
    "an optimizer without a scheduler, of two ranks at once": (
        "DR705", traceback("ValueErrorValueError: : ValueErrorFound `optimizer` configured in the DeepSpeed config, but no `scheduler`. Please configure one.",
                           "transformers/deepspeed.py:deepspeed_init")),
    "a loader's worker that broke its pipe": (
        "DR802", traceback("BrokenPipeError: [Errno 32] Broken pipe", "torch/utils/data/dataloader.py:__init__", "multiprocessing/reduction.py:dump")),
    "an object file that was not compiled": (
        "DR701", "Building extension module cpu_adam...\n[1/3] c++ -MMD -MF cpu_adam.o.d -c cpu_adam.cpp -o cpu_adam.o\nFAILED: cpu_adam.o\n"),
    "NCCL under mpirun": (
        "DR502", "".join(f"Fri Aug 11 12:31:45 2023[1,0]<stdout>:n1:1850301:18813{i} [0] proxy.cc:1519 NCCL WARN [Proxy Service 0] Failed to execute operation "
                         "Connect from rank 0, retcode 3\n" for i in range(2))),
    "an exception under mpirun": (
        "DR707", "".join(f"Fri Aug 11 12:31:4{i} 2023[1,3]<stderr>:{line}\n" for i, line in
                         enumerate(traceback("RuntimeError: No CUDA GPUs are available", "torch/cuda/__init__.py:_lazy_init").splitlines()))),
    "a worker of Ray that is gone": (
        "DR401", traceback("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "ray/_private/worker.py:get_objects")
        + "\tclass_name: Actor\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits "
        "with a connection error code 2. End of file.\n"),
    "a worker of Ray that was out of memory": (
        "DR102",
        (
            '(W pid=77) step 1 loss 2.0\nTraceback (most recent call last):\n  File "/w/main_ppo.py", line 30, in main\n    run_ppo(config)\n'
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.update_actor() (pid=77, ip=10.0.0.1)\n"
        '  File "/v/site-packages/torch/nn/modules/module.py", line 1518, in _call_impl\n    return forward_call(*args)\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free.\n"
        ),
    ),
    "the program that failed is another one": (None, traceback("RuntimeError: Step 2 exited with non-zero status 1", file="/home/ann/chat/run.py")),
    "transformers asks for another DeepSpeed": (
        "DR714", traceback("ImportError: deepspeed>=0.9.3 is required for a normal functioning of this module, but found deepspeed==0.8.3.",
                           "transformers/training_args.py:__post_init__", "transformers/utils/versions.py:_compare_versions")),
    "a name that is gone from a package": (
        "DR714", traceback("ImportError: cannot import name 'selective_log_softmax' from 'trl.trainer.utils' (/opt/env/lib/python3.11/site-packages/trl/trainer/utils.py)")),
    "a name that the own module does not have": (
        "DR704", traceback("ImportError: cannot import name 'rows' from 'data' (/home/ann/data.py)", "fire/core.py:Fire")),
    "a module that moved": ("DR714", traceback("ModuleNotFoundError: No module named 'transformers.deepspeed'")),
    "a package that is missing": ("DR704", traceback("ModuleNotFoundError: No module named 'flash_attn'", tag="[rank0]: ") + elastic(1, 0)),
    "a config that is not there, Trainer": (
        "DR706", traceback("ValueError: Expected a string path to an existing deepspeed config, or a dictionary, or a base64 encoded string. Received: conf/z3.json",
                           "transformers/training_args.py:__post_init__", "accelerate/utils/deepspeed.py:__init__")),
    "a key of another release": (
        "DR705", SPAWNED + traceback("pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedBF16Config\nloss_scale_window\n"
                                     "  Extra inputs are not permitted [type=extra_forbidden, input_value=100, input_type=int]\n"
                                     "    For further information visit https://errors.pydantic.dev/2.12/v/extra_forbidden",
                                     "deepspeed/runtime/config_utils.py:__init__") + ENDED.format(code=1)),
    "batch sizes of another machine": (
        "DR301", traceback("AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 256 != 8 * 4 * 6",
                           "deepspeed/__init__.py:initialize", "deepspeed/runtime/config.py:_batch_assertion") + elastic(1)),
    "no_sync at stage 2": (
        "DR302", traceback("AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 2",
                           "accelerate/accelerator.py:no_sync", f"{ENGINE}:no_sync", tag="[rank0]: ") + elastic(1, 0)),
    "a weight that was split before": (
        "DR106", traceback("AssertionError: {'id': 291, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0, 'shape': (0,), 'ds_shape': (0,), 'requires_grad': True, 'grad_shape': None, 'persist': True, 'active_sub_modules': {7}, 'ds_tensor.shape': torch.Size([0])}",
                           MODULE, "deepspeed/runtime/zero/partitioned_param_coordinator.py:fetch_sub_module")),
    "parameters still under way": (
        "DR107", traceback("RuntimeError: still have inflight params [{'id': 723, 'status': 'AVAILABLE', 'numel': 4194304}]",
                           "deepspeed/runtime/zero/partitioned_param_coordinator.py:reset_step")),
    "ranks that fetch other weights": (
        "DR107", traceback("RuntimeError: disagreement between rank0 and rank1: rank0: [1028, 1029], rank1: [1028]", "deepspeed/runtime/zero/utils.py:assert_ints_same_as_other_ranks")),
    "a watchdog that hangs": (
        "DR501", STEPS + "[rank2]:[F1103 08:15:29.383067836 ProcessGroupNCCL.cpp:1614] [PG ID 1 PG GUID 1 Rank 2] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.\n" + elastic(-6)),
    "a layer larger than the swap buffer": (
        "DR203", traceback("AssertionError: More elements 524709888 than buffer size 100,000,000", "deepspeed/runtime/swap_tensor/partitioned_param_swapper.py:swap_in")),
    "the loss scale at its end": (
        "DR602", SPAWNED + STEPS + traceback("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
                                             f"{ENGINE}:step", f"{STAGE3}:step", "deepspeed/runtime/fp16/loss_scaler.py:update_scale") + ENDED.format(code=1)),
    "token ids of another tokenizer": (
        "DR801", "../aten/src/ATen/native/cuda/Indexing.cu:1369: indexSelectLargeIndex: block: [12,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
        + traceback("RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API call", MODULE, tag="[rank0]: ") + elastic(1, 0)),
    "no gradient anywhere": ("DR710", traceback("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", f"{ENGINE}:backward") + elastic(1)),
    "a checkpoint without its pieces": (
        "DR903", traceback("FileNotFoundError: [Errno 2] No such file or directory: 'out/global_step900/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt'",
                           f"{ENGINE}:load_checkpoint", f"{ENGINE}:_get_all_zero_checkpoint_state_dicts")),
    "a full disk at save, in a pod": (
        "DR901", pod(STEPS + traceback("OSError: [Errno 28] No space left on device", f"{ENGINE}:save_checkpoint") + ENDED.format(code=1))),
    "too little shared memory for NCCL": (
        "DR403", "node1:97:183 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-a81WQe to 33030532 bytes, error: No space left on device (28)\n"
        + traceback("torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:317, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
                    "deepspeed/comm/torch.py:broadcast")),
    "a full disk, safetensors": (
        "DR901", traceback("safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: \"No space left on device\" })", "transformers/modeling_utils.py:save_pretrained")),
    "a limit of processes": ("DR404", traceback("RuntimeError: can't start new thread", "threading.py:start")),
    "a card in exclusive mode": ("DR707", traceback("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", "torch/cuda/__init__.py:set_device")),
    "a killed peer, and a time-out after it": ("DR401", STEPS + WATCH.format(rank=0, op="ALLREDUCE") + ENDED.format(code=-9)),
    "a row that is wrong, and a time-out after it": (
        "DR710", STEPS + traceback("ValueError: the labels of row 17 are longer than the inputs", file="/home/ann/data.py", tag="[rank3]: ") + WATCH.format(rank=0, op="ALLREDUCE") + ENDED.format(code=1)),
    "a gated model": ("DR805", traceback("huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-65)\n\nCannot access gated repo for url https://huggingface.co/x/y/resolve/main/config.json.",
                                         "transformers/utils/hub.py:cached_file")),
    "a path that is no repository": (
        "DR803", traceback("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data/models/llama'. Use `repo_type` argument if needed.",
                           "huggingface_hub/utils/_validators.py:validate_repo_id")),
    "a card without bf16": (
        "DR705", traceback("ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with cuda>=11.0", "transformers/training_args.py:__post_init__")),
    "a card that fell off": (
        "DR717", STEPS + "[ 8123.1] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n" + ENDED.format(code=-6)),
    "an unknown template": ("DR804", traceback("ValueError: Template qwen9 does not exist.", file="/home/ann/LF/src/llamafactory/data/template.py") + elastic(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_the_first_answer(name: str) -> None:
    code, text = FAILED[name]
    found = diagnose(text, text=True)
    assert (found.cause and found.cause.code) == code, found
    assert all(n.certainty != "certain" for n in (*([found.cause] if found.cause else []), *found.others))


BEFORE = {
    "mpirun": "[1,1]<stderr>:", "torchrun --tee": "[default1]:", "docker compose": "trainer-1  | ", "a pod": "trainer-0-abc12 trainer ",
    "kubectl": "2025-11-03T08:15:29.104567890Z stderr F ", "srun": " 1: ", "pdsh": "node-7: ", "an address": "10.0.0.7: ",
    "ray": "\x1b[36m(RayTrainWorker pid=8123, ip=10.0.0.1)\x1b[0m ", "accelerate": "stderr: ", "a cloud": "[1,mpirank:1,algo-1]<stderr>:",
    "a stamp": "[2025-11-03 08:15:29] ", "a short stamp": "08:15:29 ", "an answer": "> ", "a block": "    ", "two": "node7: 1: ",
}  # fmt: skip


@pytest.mark.parametrize("name", BEFORE)
def test_what_stands_before_each_line(name: str) -> None:
    text = STEPS + traceback(OOM, "transformers/trainer.py:training_step", MODULE)
    found = diagnose("".join(BEFORE[name] + line for line in text.splitlines(keepends=True)), text=True)
    assert found.cause is not None and found.cause.code == "DR102"


def test_lines_that_are_numbered() -> None:
    """As ``grep -n`` and ``cat -n`` print them."""
    lines = traceback(OOM, "transformers/trainer.py:training_step", MODULE).splitlines(keepends=True)
    for form in ("train.log:{}:", "{:6d}\t"):
        found = diagnose("".join(form.format(i + 1) + line for i, line in enumerate(lines)), text=True)
        assert found.cause is not None and found.cause.code == "DR102"


@pytest.mark.parametrize("name", [n for n, (_code, text) in FAILED.items() if text.startswith("Traceback")])
def test_the_answer_without_the_head_of_the_traceback(name: str) -> None:
    """Somebody copied the end of the screen only."""
    code, text = FAILED[name]
    cut = text.split("\n", 3)[3]
    found = diagnose(cut, text=True)
    assert (found.cause and found.cause.code) == code, (cut, found)


TRAINER = "".join(
    f"{{'loss': '{2.1 - i / 20:.4f}', 'grad_norm': '1.3{i}', 'learning_rate': '1.9e-05', 'epoch': '0.{i:02d}'}}\n" for i in range(1, 20)
)  # fmt: skip
RATE = " 40%|####      | 40/100 [03:20<05:00,  5.01s/it]\r"
HEALTHY = {
    "frightening warnings before the first step": SPAWNED
    + "/opt/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:4876: UserWarning: barrier(): using the device under current context. You can specify `device_id` in `init_process_group` to mute this warning.\n"
    "[W1103 08:12:09.1 socket.cpp:755] [c10d] The client socket cannot be initialized to connect to [node1]:29500 (errno: 97 - Address family not supported by protocol).\n"
    "[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.\n"
    "[WARNING]  sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.6\n"
    " [WARNING]  using untested triton version (3.2.0), only 1.0.0 is known to be compatible\n"
    + STEPS,
    "the scale comes down from 65536 as it always does": SPAWNED
    + "".join(
        f"[2025-11-03 08:13:0{i},100] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempting loss scale: {65536 >> i}, reducing to {32768 >> i}\n"
        for i in range(6)
    )
    + STEPS,
    "a logger's thread that ended": TRAINER
    + "Exception in thread MsgRouterThr:\nTraceback (most recent call last):\n"
    '  File "/opt/env/lib/python3.11/threading.py", line 1045, in _bootstrap_inner\n    self.run()\nBrokenPipeError: [Errno 32] Broken pipe\n',
    "an op that was loaded at last": "Using /root/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...\n"
    "Loading extension module cpu_adam...\nTime to load cpu_adam op: 2.1 seconds\n",
    "a retry that worked": traceback("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded with url: /api", file="/opt/env/lib/python3.11/site-packages/hub/retry.py").replace(
        "in <module>", "in fetch"
    )
    + "Retrying in 2s [Retry 1/5].\n"
    + TRAINER * 10
    + "{'train_runtime': '88.1', 'train_samples_per_second': '9.0', 'train_loss': '1.3', 'epoch': '1.0'}\n",
    "a run that is half done": TRAINER + RATE * 3,
    "a good end with a late complaint of NCCL": SPAWNED
    + STEPS
    + "[rank0]:[W1103 08:15:29.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources.\n"
    "[2025-11-03 08:15:33,230] [INFO] [launch.py:351:main] Process 4101 exits successfully.\n"
    "[2025-11-03 08:15:33,231] [INFO] [launch.py:351:main] Process 4102 exits successfully.\n",
    "data that speaks of errors": "".join(f"step {i} loss {2 - i / 50:.3f} | sample: 'RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB'\n" for i in range(1, 12)),
    "samples that are tracebacks": "".join(
        f"{{'loss': '1.{i}', 'grad_norm': '1', 'learning_rate': '1e-5', 'epoch': '0.{i}'}}\n" + 'completion: Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\nValueError: bad row\n'
        for i in range(1, 9)
    ),
    "a config that is printed": SPAWNED + '  "comment": "AssertionError: no_sync context manager is incompatible with"\n  zero_config .... stage=3 offload_param=None\n' + STEPS,
    "slurm's farewell": srun(STEPS) + "srun: Job 88123 step creation temporarily disabled, retrying (Requested nodes are busy)\nsrun: Step created for StepId=88123.1\n" + srun(STEPS),
    "a single cache flush": STEPS + "[2025-11-03 08:14:59,500] [WARNING] [stage3.py:2069:step] 1 pytorch allocator cache flushes since last step. this happens when there is high memory pressure and is detrimental to performance.\n" + STEPS.replace("08:14", "08:16"),
    "a worker of Ray starts": "(Trainer pid=812, ip=10.0.0.4) [rank1]: Loading extension module utils...\n" + STEPS,
    "ports and errno of a healthy store": "[I1103 08:12:09.1 TCPStore.cpp:274] [c10d - debug] The server has started on port = 29500.\n" + TRAINER,
    "op built": "Emitting ninja build file /root/.cache/torch_extensions/cpu_adam/build.ninja...\nBuilding extension module cpu_adam...\nninja: no work to do.\nLoading extension module cpu_adam...\nTime to load cpu_adam op: 2.4 seconds\n" + TRAINER,
    "a stack somebody printed": "some log line\n" + '  File "/home/ann/train.py", line 12, in main\n    traceback.print_stack()\n' + "Epoch: 3\n" + TRAINER,
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_has_no_cause(name: str) -> None:
    found: Diagnosis = diagnose(HEALTHY[name], text=True)
    assert found.cause is None, found
    assert found.outcome != "failed"


GOOD_END = """\
[2025-11-03 08:15:33,230] [INFO] [launch.py:351:main] Process 4101 exits successfully.
[2025-11-03 08:15:33,231] [INFO] [launch.py:351:main] Process 4102 exits successfully.
"""
TIMED_OUT = SPAWNED + WATCH.format(rank=0, op="BROADCAST") + ENDED.format(code=-6)
AGAIN = "W1103 08:15:29.1 4000 torch/distributed/elastic/agent/server/api.py:723] [default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"


@pytest.mark.parametrize(
    ("text", "code", "outcome"),
    [
        (TIMED_OUT + SPAWNED + STEPS, None, "unknown"),
        (TIMED_OUT + SPAWNED + STEPS + GOOD_END, None, "finished"),
        (
            SPAWNED + STEPS + GOOD_END + SPAWNED + traceback(OOM, MODULE) + ENDED.format(code=1),
            "DR102",
            "failed",
        ),
        (TIMED_OUT + SPAWNED, "DR501", "failed"),  # of the second nothing is known yet
        (STEPS + traceback(OOM, MODULE, tag="[rank1]: ") + AGAIN + STEPS, None, "unknown"),
        (STEPS + traceback(OOM, MODULE, tag="[rank1]: ") + AGAIN + elastic(-9), "DR401", "failed"),
    ],
)
def test_the_last_of_several_runs_in_one_file(text: str, code: str | None, outcome: str) -> None:
    found = diagnose(text, text=True)
    assert (found.cause and found.cause.code, found.outcome) == (code, outcome)
    if found.evidence and found.evidence[0].line:
        assert found.evidence[0].text[:20] in text.splitlines()[found.evidence[0].line - 1]


def test_an_empty_weight_needs_stage_3() -> None:
    """The same words come from an empty batch."""
    text = traceback(
        "RuntimeError: The size of tensor a (0) must match the size of tensor b (1024) at non-singleton dimension 1"
    )
    for stage, code in ((3, "DR106"), (2, "DR710")):
        found = diagnose(text, {"zero_optimization": {"stage": stage}}, text=True)
        assert found.cause is not None and found.cause.code == code


def test_a_stray_line_inside_a_traceback() -> None:
    """Ranks before torch 2.2 and compilers write between the lines of each other."""
    lines = traceback(OOM, "deepspeed/__init__.py:initialize", f"{ENGINE}:__init__").splitlines(keepends=True)
    lines.insert(6, "Loading extension module utils...\n")
    found = diagnose("".join(lines) + ENDED.format(code=1), text=True)
    assert found.cause is not None and found.cause.code == "DR101"


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("syntax", "DR710", "SyntaxError: invalid syntax (in /home/user/train/syn.py, line 2)"),
        ("recursion", "DR710", "RecursionError"),
        ("abort-torchrun", "DR712", "SIGABRT"),
        ("no-script", "DR803", "nothere.py"),
        ("no-script-torchrun", "DR803", "nothere.py"),
        ("no-launcher", "DR715", "environment variable RANK expected"),
        ("no-hostfile", "DR715", "no extra nodes available"),
        ("bad-include", "DR715", "invalid literal for int() with base 10: 'x'"),
        ("host-twice", "DR715", "multiple entries for node1"),
        ("no-ssh", "DR715", "not reachable via ssh"),
    ],
)
def test_real_logs_of_launches_that_failed(name: str, code: str, says: str) -> None:
    """Recorded with DeepSpeed 0.19.8 and torch 2.13; names of folders replaced."""
    found = diagnose(LOGS / f"{name}.log")
    assert found.outcome == "failed" and found.cause is not None
    assert (found.cause.code, found.cause.certainty) == (code, "likely")
    assert says in found.cause.detail
    assert found.evidence and found.evidence[0].line


def test_a_script_without_a_config_is_told_how_to_get_one(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    message = "AssertionError: DeepSpeed requires --deepspeed_config to specify configuration file"
    log.write_text(
        SPAWNED + traceback(message, "/opt/env/lib/python3.11/site-packages/deepspeed/__init__.py:initialize")
    )
    found = diagnose(log)
    assert found.cause is not None and found.cause.code == "DR705"
    (fix,) = found.fixes
    assert "{config}" in fix.title and "dstui check" not in fix.title
