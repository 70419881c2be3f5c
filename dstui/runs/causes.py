"""Why runs die or stand still: the named causes, their place among the five checkpoints, their pages.

The checkpoints are the order in which people who tune DeepSpeed look: 1 ZeRO stage, 2 offload target,
3 accumulation boundary, 4 pinned memory and host RAM, 5 communication. Codes DR1xx-DR5xx belong to them;
DR6xx numerics, DR7xx environment, DR8xx data, DR9xx disk. Codes and names never change their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from dstui.i18n import N_, _

CHECKPOINTS = (
    N_("ZeRO stage"),
    N_("offload target"),
    N_("accumulation boundary"),
    N_("pinned memory and host RAM"),
    N_("communication"),
)


@dataclass(frozen=True)
class Cause:
    """``title``, ``shows``, ``why`` and ``do`` are English literals, translated when shown."""

    code: str
    name: str
    checkpoint: int | None
    title: str
    shows: str
    why: str
    do: str

    @property
    def heading(self) -> str:
        return _(self.title)

    def page(self) -> str:
        """The page of ``dstui explain CODE``, translated."""
        where = (
            _("checkpoint {n}: {name}").format(n=self.checkpoint, name=_(CHECKPOINTS[self.checkpoint - 1]))
            if self.checkpoint
            else _("not one of the five checkpoints")
        )
        return "\n".join(
            (
                f"{self.code} {self.name}",
                _(self.title) + "  (" + where + ")",
                "",
                _("How it shows: ") + _(self.shows),
                _("Why: ") + _(self.why),
                _("What to do: ") + _(self.do),
            )
        )


_ALL = (
    Cause(
        "DR101", "gpu-oom-init", 1,
        N_("the GPU ran out of memory while model and optimizer were set up"),
        N_("`CUDA out of memory` below deepspeed.initialize or while the weights are loaded; no step was done"),
        N_("parameters, gradients and optimizer states of this ZeRO stage do not fit on a card, before any activation"),
        N_("a higher ZeRO stage splits them over the ranks (1 optimizer, 2 also gradients, 3 also parameters); "
           "offload moves them to host RAM; at stage 3 build the model under zero.Init"),
    ),
    Cause(
        "DR102", "gpu-oom-activations", 1,
        N_("the GPU ran out of memory in the forward or backward pass"),
        N_("`CUDA out of memory` below forward or backward, often at the first long batch"),
        N_("activations and logits come on top of the states and grow with micro batch x sequence length"),
        N_("halve the micro batch and double the accumulation (the same global batch), switch on activation "
           "checkpointing, or free memory for it with a higher ZeRO stage or offload"),
    ),
    Cause(
        "DR103", "gpu-oom-step", 1,
        N_("the GPU ran out of memory in the optimizer step"),
        N_("`CUDA out of memory` below engine.step, usually at step 1: Adam allocates its states there"),
        N_("optimizer states (12 bytes a parameter with Adam and 16-bit weights, divided by the ranks from stage 1 "
           "on) and the temporary fp32 copies of the step"),
        N_("stage 1 or higher if it is 0; offload the optimizer to the CPU; a smaller sub_group_size at stage 3"),
    ),
    Cause(
        "DR104", "gpu-oom-occupied", 1,
        N_("the GPU was full because another process holds memory on it"),
        N_("`CUDA out of memory` although this process holds little of the card"),
        N_("another job, a leftover rank of an earlier run or a desktop shares the card"),
        N_("look at the owners (`dstui detect`), end leftovers, or choose other cards"),
    ),
    Cause(
        "DR105", "gradient-reduced-twice", 1,
        N_("a gradient was reduced twice in one step"),
        N_("`has already been reduced`, `Gradient computed twice for this partition`"),
        N_("ZeRO 2 and 3 reduce each gradient once a step; a weight that is used twice under activation checkpointing, "
           "two losses with a backward each, or two engines over shared weights reduce it again"),
        N_("activation checkpointing with use_reentrant=False, or off; one backward for the sum of the losses; ZeRO "
           "stage 1 has no such limit"),
    ),
    Cause(
        "DR106", "partitioned-weight", 1,
        N_("a weight that ZeRO 3 has split was used outside of its engine"),
        N_("`'weight' must be 2-D`, a shape of `torch.Size([0])`, `expected param ... to be available`"),
        N_("at stage 3 each rank holds a piece of every weight, and only the engine's own modules gather it; a second "
           "model (reference, reward), a resized embedding or a state_dict taken by hand sees an empty tensor"),
        N_("give the second model an engine of its own, or wrap the access in deepspeed.zero.GatheredParameters; save "
           "with engine.save_checkpoint or stage3_gather_16bit_weights_on_model_save; start with a launcher"),
    ),
    Cause(
        "DR107", "module-order-lost", 1,
        N_("ZeRO 3 lost track of the order of the modules"),
        N_("`ds_active_sub_modules`, `tracing error`, `still active in submodules`"),
        N_("stage 3 records the order in which modules run and frees weights by it; another path through the model, "
           "an exception that was caught inside forward, or a module outside of forward breaks the record"),
        N_("take the same path in every step and on every rank; mark a block with deepspeed.utils.set_z3_leaf_modules "
           "(mixture of experts); ZeRO stage 2 keeps no such record"),
    ),
    Cause(
        "DR108", "memory-pressure", 1,
        N_("the GPU's memory is so full that its cache is emptied again and again"),
        N_("`pytorch allocator cache flushes since last step`"),
        N_("before torch gives up it returns its cached blocks to the driver; every flush stalls all ranks"),
        N_("a smaller micro batch, activation checkpointing, a higher ZeRO stage or offload; "
           "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragments"),
    ),
    Cause(
        "DR109", "gpu-oom-save", 1,
        N_("the GPU ran out of memory while a checkpoint was saved"),
        N_("`CUDA out of memory` below save_checkpoint or save_16bit_model"),
        N_("with stage3_gather_16bit_weights_on_model_save all weights are gathered on one GPU, on top of what training holds"),
        N_("set stage3_gather_16bit_weights_on_model_save to false and convert afterwards with zero_to_fp32.py; free the "
           "cache before saving"),
    ),
    Cause(
        "DR201", "offload-needs-cpu-optimizer", 2,
        N_("the optimizer cannot work on offloaded states"),
        N_("DeepSpeed asks for DeepSpeedCPUAdam or zero_force_ds_cpu_optimizer"),
        N_("offloaded states are updated by the CPU; a GPU optimizer given by the script would move them every step"),
        N_("let the config create the optimizer (Adam, AdamW), or build DeepSpeedCPUAdam in the script; "
           '"zero_force_ds_cpu_optimizer": false accepts a slower one'),
    ),
    Cause(
        "DR202", "offload-return", 2,
        N_("the GPUs wait for offloaded states"),
        N_("GPUs idle, the ranks' CPU busy, no step: the CPU updates the weights, or they come back over PCIe or NVMe"),
        N_("the optimizer's states lie in host RAM or on NVMe, and every step passes through them; few cores for each "
           "rank, a slow disk or a narrow PCIe link make it long"),
        N_("a larger micro batch or more accumulation (fewer steps for the same samples), offload less, more cores a "
           "rank (OMP_NUM_THREADS), or no offload at a higher ZeRO stage"),
    ),
    Cause(
        "DR203", "nvme-offload-failed", 2,
        N_("offload to NVMe failed"),
        N_("`buffer nbytes != file bytes`, `Not enough buffers`, an I/O error or a refused path below nvme_path"),
        N_("the folder does not exist or is not writable, the disk is full or no real local disk, or buffer_count and "
           "buffer_size are too small for the largest layer"),
        N_("name a writable folder on a local NVMe disk with enough room; raise buffer_count or buffer_size; or offload "
           "to the CPU"),
    ),
    Cause(
        "DR204", "offload-gradient-missing", 2,
        N_("an offloaded parameter has no gradient at the step"),
        N_("KeyError in norm_for_param_grads or complete_grad_norm_calculation_for_cpu_offload"),
        N_("the CPU's step looks up the norm of every gradient: a parameter that the forward pass skipped, or a step "
           "that did not go through engine.step, leaves none"),
        N_("call engine.step, not optimizer.step; freeze parameters that are not used, or let all take part in the loss"),
    ),
    Cause(
        "DR301", "batch-identity", 3,
        N_("the batch sizes contradict each other"),
        N_("`train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size`"),
        N_("the three numbers and the number of ranks that DeepSpeed sees are tied together; one of them is fixed "
           "for another machine, or the world size was read before the ranks were up"),
        N_("leave train_batch_size out and let DeepSpeed derive it, or make the numbers agree"),
    ),
    Cause(
        "DR302", "accumulation-boundary", 3,
        N_("the script and DeepSpeed disagree about the accumulation boundary"),
        N_("an assertion about no_sync, gradient accumulation or the boundary"),
        N_("the engine counts micro steps itself; a loop that uses no_sync or sets the boundary by hand meets a "
           "ZeRO stage or an offload that cannot do it"),
        N_("call backward and step for every micro batch and let the engine step at the boundary"),
    ),
    Cause(
        "DR303", "accumulation-overridden", 3,
        N_("the accumulation of the config was replaced by another number"),
        N_("`Updating DeepSpeed's gradient accumulation steps to 1 from 16`"),
        N_("accelerate writes its own gradient_accumulation_steps into the engine; its default is 1"),
        N_("give accelerate the same number (Accelerator(gradient_accumulation_steps=...), or `auto` in the config)"),
    ),
    Cause(
        "DR304", "steps-unequal", 3,
        N_("the ranks did not do the same number of steps"),
        N_("a rank ends well; the others then lose it or wait for it until the time-out"),
        N_("another number of batches or of accumulation steps on a rank: at the end it does not come to the reduction "
           "for which the others wait"),
        N_("one gradient_accumulation_steps for all ranks; drop_last=True and a DistributedSampler, so that every rank "
           "gets the same number of batches"),
    ),
    Cause(
        "DR401", "host-oom-kill", 4,
        N_("the host ran out of memory and the kernel killed a rank"),
        N_("a rank is gone without a word: return code -9, `deepspeed` exits with 247, a container with 137"),
        N_("offloaded states, pinned buffers (rounded up to powers of two), data loaders and every rank's own copy "
           "of the weights while loading add up to more than the RAM or the cgroup limit"),
        N_("offload the optimizer only (drop offload_param), set pin_memory to false, use fewer ranks a node, "
           "load under zero.Init, or raise the memory limit of the job"),
    ),
    Cause(
        "DR402", "pinned-memory-refused", 4,
        N_("host memory could not be pinned"),
        N_("`mlock failed to allocate`, or a CUDA error in pin_memory"),
        N_("the limit for locked memory (`ulimit -l`) binds NVMe swap buffers from DeepSpeed 0.19.4 on and the "
           "native pinning backend; plain CPU offload pins through CUDA, which needs free RAM"),
        N_("raise `ulimit -l` (containers: --ulimit memlock=-1), or set pin_memory to false"),
    ),
    Cause(
        "DR403", "shared-memory-full", 4,
        N_("/dev/shm is too small"),
        N_("Bus error, `insufficient shared memory (shm)` or `No space left on device` below /dev/shm"),
        N_("data loader workers and NCCL exchange data through /dev/shm; containers start with 64 MB of it"),
        N_("docker: --shm-size=16g or --ipc=host; Kubernetes: an emptyDir of medium Memory on /dev/shm"),
    ),
    Cause(
        "DR404", "host-allocation-refused", 4,
        N_("the host had no memory for an allocation"),
        N_("`DefaultCPUAllocator: can't allocate memory`, `Cannot allocate memory`, MemoryError"),
        N_("offloaded states and every rank's own copy of the weights while loading exceed the RAM, or the limits of "
           "the process (ulimit -v, overcommit)"),
        N_("load under zero.Init or rank by rank, offload less, fewer ranks on a node, or a larger host"),
    ),
    Cause(
        "DR501", "collective-timeout", 5,
        N_("a collective operation timed out: not all ranks took part"),
        N_("`Watchdog caught collective operation timeout`; GPUs at 100 % with little power before it"),
        N_("one rank does not reach the operation: it waits for data, saves alone, has fewer batches, died, or "
           "takes another path through the model"),
        N_("look at the rank that is missing; give every rank the same number of batches and call save_checkpoint "
           "on all ranks; raise the time-out only when the work is really that long (10 min from 0.19.6 on; what the "
           "script or ddp_timeout asks for does not reach DeepSpeed's own group, which keeps torch's 10 min for NCCL)"),
    ),
    Cause(
        "DR502", "collective-broken", 5,
        N_("communication between the ranks broke"),
        N_("an NCCL or gloo error without a rank that failed before it"),
        N_("a network interface that does not reach the others, a broken link, too little shared memory, or a peer "
           "that vanished"),
        N_("run with NCCL_DEBUG=INFO; name the interface with NCCL_SOCKET_IFNAME (gloo: GLOO_SOCKET_IFNAME)"),
    ),
    Cause(
        "DR503", "port-in-use", 5,
        N_("the port for the ranks' meeting point is taken"),
        N_("`Address already in use` (EADDRINUSE), mostly on 29500"),
        N_("another job of this machine, or a leftover of an earlier one, listens there"),
        N_("another port: --master_port (dstui picks a free one with `auto`), or end the leftover"),
    ),
    Cause(
        "DR504", "ranks-did-not-meet", 5,
        N_("the ranks did not find each other"),
        N_("a time-out in init_process_group or the TCP store before any step"),
        N_("a rank was not started, MASTER_ADDR is wrong, or a firewall lies between the nodes"),
        N_("start the launcher on every node with the same port and address; test the port between the nodes"),
    ),
    Cause(
        "DR505", "waits-for-data", 5,
        N_("the ranks wait for data"),
        N_("no step; GPUs idle; the main thread sleeps, reads or waits for data loader workers"),
        N_("the data set is slower than the training: too few workers, slow storage, work a row in Python, or a "
           "download in the middle of an epoch"),
        N_("more workers (num_workers), pin_memory in the DataLoader, data prepared beforehand and on a local disk"),
    ),
    Cause(
        "DR506", "waits-in-collective", 5,
        N_("ranks wait in a collective for a rank that does not come"),
        N_("no step; with NCCL GPUs at 100 % and little power, with gloo all but one rank asleep; a time-out follows"),
        N_("one rank sleeps, computes alone, has fewer batches or takes another path through the model"),
        N_("look at the rank that is named (py-spy dump --pid PID); give every rank the same number of batches; what "
           "one rank does alone must be short"),
    ),
    Cause(
        "DR507", "all-idle", 5,
        N_("every rank is idle and nothing tells for what"),
        N_("no step for long; neither CPU nor GPU is used"),
        N_("a wait outside of the training: a service, a lock, a network file system"),
        N_("py-spy dump --pid PID on each rank shows the line"),
    ),
    Cause(
        "DR508", "tensor-on-cpu", 5,
        N_("a tensor that lies in host RAM was given to a collective of NCCL"),
        N_("`No backend type associated with device type cpu`, `Tensors must be CUDA and dense`"),
        N_("NCCL moves only what lies on a GPU: offloaded parameters or gradients that a clipping, a logging or a second "
           "model reduces by hand, a model or a tensor that was never moved to its card, or a script that asks for NCCL "
           "while DeepSpeed works on the CPU"),
        N_("move the tensor to the rank's card before the collective (in a plain script: to engine.device), leave "
           "clipping to DeepSpeed (gradient_clipping), offload only what the script does not touch; "
           'init_process_group("cpu:gloo,cuda:nccl") serves both'),
    ),
    Cause(
        "DR601", "loss-not-finite", None,
        N_("the loss is NaN or infinite"),
        N_("`loss nan`, or gradients non-finite step after step"),
        N_("too high a learning rate (above 5e-5 for fine-tuning), fp16 overflow, no clipping, bad rows in the data; "
           "some DeepSpeed releases corrupt gradients in certain configs"),
        N_("bf16 instead of fp16, a lower learning rate with warm-up, gradient_clipping 1.0; "
           "`dstui check` tells whether this release is known to damage gradients with this config"),
    ),
    Cause(
        "DR602", "loss-scale-floor", None,
        N_("the fp16 loss scale fell to its floor"),
        N_("`Current loss scale already at minimum`, after a series of OVERFLOW lines"),
        N_("gradients overflow fp16 at every scale: the model was trained in bf16, or training diverged"),
        N_("use bf16 where the card has it (compute capability 8.0), else a lower learning rate"),
    ),
    Cause(
        "DR603", "dtype-mismatch", None,
        N_("the script feeds another number type than the model computes in"),
        N_("`mat1 and mat2 must have the same dtype`, `expected scalar type`, `Input type (...) and bias type (...)`"),
        N_("with bf16 or fp16 in its config DeepSpeed casts the parameters, but not the batches of a plain script: "
           "they stay float32"),
        N_("cast the inputs in the script (`x = x.to(torch.bfloat16)`), or train in fp32; "
           "fp16 has auto_cast, which casts them"),
    ),
    Cause(
        "DR604", "loss-zero", None,
        N_("the loss is exactly 0"),
        N_("`'loss': 0.0` step after step"),
        N_("with fp16 a NaN is shown as 0 by some trainers; all labels are masked; or gradients were damaged (some "
           "releases with overlap_comm)"),
        N_("bf16 instead of fp16; overlap_comm false; look at the labels of one batch; `dstui check` tells what this "
           "release is known for"),
    ),
    Cause(
        "DR701", "op-build-failed", None,
        N_("a DeepSpeed op could not be compiled"),
        N_("`Error building extension`, `Unable to JIT load`, ninja or compiler errors"),
        N_("DeepSpeed compiles CPU Adam and others at first use; that needs a C++ compiler, ninja, Python headers "
           "and, on GPUs, nvcc of the CUDA release that torch was built for"),
        N_("install what `dstui detect` names as missing; `ds_report` lists the ops; delete a half-built folder "
           "below ~/.cache/torch_extensions after an interrupted build"),
    ),
    Cause(
        "DR702", "no-cuda-toolkit", None,
        N_("the CUDA toolkit (nvcc) is missing or of another release"),
        N_("`CUDA_HOME does not exist`, `CUDAMismatchException`, nvcc not found"),
        N_("the ops of DeepSpeed are compiled with nvcc; its major release must equal torch's"),
        N_("install the toolkit of torch's CUDA release and set CUDA_HOME, or avoid the op (no offload, torch's Adam)"),
    ),
    Cause(
        "DR703", "arch-list", None,
        N_("TORCH_CUDA_ARCH_LIST has an entry that DeepSpeed cannot read"),
        N_("`invalid literal for int() with base 10` while an op is built"),
        N_("DeepSpeed's op builder takes the minor release as a number; entries such as 9.0a break it"),
        N_("unset TORCH_CUDA_ARCH_LIST or use plain entries such as 9.0"),
    ),
    Cause(
        "DR704", "missing-module", None,
        N_("a Python package is missing in the training interpreter"),
        N_("ModuleNotFoundError or ImportError"),
        N_("the run uses another interpreter than the one in which the package was installed"),
        N_("install it there, or choose the interpreter with --python"),
    ),
    Cause(
        "DR705", "config-refused", None,
        N_("DeepSpeed refused the config"),
        N_("a validation error, DeepSpeedConfigError or an assertion below deepspeed/runtime/config.py"),
        N_("a key that this release does not know, a wrong type, or settings that exclude each other"),
        N_("`dstui check` on the file names the key and the fix for this release"),
    ),
    Cause(
        "DR706", "config-unreadable", None,
        N_("the config could not be read"),
        N_("a JSON error, duplicate keys, or a path that does not exist"),
        N_("a typing error in the file, or a path relative to another directory"),
        N_("`dstui check` on the file; give an absolute path"),
    ),
    Cause(
        "DR707", "no-usable-gpu", None,
        N_("the ranks found no usable GPU"),
        N_("`No CUDA GPUs are available`, `invalid device ordinal`, a driver too old"),
        N_("more ranks than visible cards, CUDA_VISIBLE_DEVICES hides them, or torch was built for a newer driver"),
        N_("compare the devices of the run with `dstui detect`; install a torch for this driver"),
    ),
    Cause(
        "DR708", "op-lock-stale", None,
        N_("the ranks wait for the lock of an op build that died"),
        N_("no output after the launch, every rank asleep; a file `lock` lies in the op's folder below torch_extensions"),
        N_("torch guards a build by this file and waits for its removal without end (torch/utils/file_baton.py); a "
           "build that was killed leaves it"),
        N_("delete the file when nobody builds: the run then goes on by itself; `dstui run` looks for it before a start"),
    ),
    Cause(
        "DR709", "op-building", None,
        N_("an op of DeepSpeed is being compiled"),
        N_("a compiler runs below a rank, or another process holds the op's lock"),
        N_("the first use of an op on this machine, or after an upgrade of torch, compiles it: 30-80 s, minutes for CUDA"),
        N_("wait; TORCH_EXTENSIONS_DIR on a disk that outlives the job keeps what was built"),
    ),
    Cause(
        "DR710", "python-exception", None,
        N_("the training script raised an exception"),
        N_("a Python traceback"),
        N_("see its last line and the frame of your own code"),
        N_("correct the script or its arguments"),
    ),
    Cause(
        "DR711", "script-exit", None,
        N_("the training script ended itself with an error code"),
        N_("a return code without a traceback"),
        N_("sys.exit in the script, an argument error, or an error that it caught and printed"),
        N_("see the last lines of the rank that ended first"),
    ),
    Cause(
        "DR712", "crash", None,
        N_("a rank crashed in native code"),
        N_("SIGSEGV, SIGABRT, SIGBUS or SIGILL; return code -11, -6, -7 or -4"),
        N_("libraries built for another CPU, CUDA or torch, a broken op build, an assertion in C++"),
        N_("the lines just before it name the library; rebuild ops (delete ~/.cache/torch_extensions)"),
    ),
    Cause(
        "DR713", "no-local-rank-option", None,
        N_("the script does not know the option --local_rank"),
        N_("`error: unrecognized arguments: --local_rank=0`, return code 2 of every rank"),
        N_("DeepSpeed's launcher appends --local_rank=N to the arguments of the script; torchrun only sets LOCAL_RANK"),
        N_('add parser.add_argument("--local_rank", type=int, default=-1), or start it with --launcher torchrun'),
    ),
    Cause(
        "DR714", "releases-apart", None,
        N_("packages of the training interpreter do not fit each other"),
        N_("`cannot import name ... from`, `Weights only load failed`, `undefined symbol`"),
        N_("torch renames and removes parts that an older DeepSpeed, transformers or a compiled extension uses; from "
           "torch 2.6 on torch.load refuses pickled objects by default"),
        N_("upgrade DeepSpeed (or pin the torch it was made for); rebuild compiled extensions (flash-attn, apex)"),
    ),
    Cause(
        "DR715", "launcher-refused", None,
        N_("the launcher could not start the ranks"),
        N_("`launcher 'pdsh' not installed`, a hostfile that cannot be read, ssh that fails, an exception of the launcher "
           "itself, `environment variable RANK expected, but not set`"),
        N_("DeepSpeed starts other nodes by pdsh over ssh: it must be installed, and every node must let this user in "
           "without a password; a script that was started without a launcher does not know its rank"),
        N_("install pdsh, or choose --launcher torchrun; test `ssh NODE true` for every line of the hostfile; start the "
           "script with a launcher"),
    ),
    Cause(
        "DR716", "too-many-open-files", None,
        N_("the limit of open files was reached"),
        N_("`Too many open files`, `received 0 items of ancdata`"),
        N_("data loader workers pass each tensor as a file descriptor; NVMe offload and checkpoints open many files"),
        N_("ulimit -n 65536, or torch.multiprocessing.set_sharing_strategy('file_system')"),
    ),
    Cause(
        "DR717", "gpu-hardware", None,
        N_("a GPU reported a hardware or driver error"),
        N_("`uncorrectable ECC error`, `GPU has fallen off the bus`, an Xid, `unspecified launch failure`"),
        N_("a defect card or link, overheating, a driver error; rarely a faulty kernel"),
        N_("nvidia-smi -q and the kernel log (dmesg) name the card; leave it out (--devices) and have it tested"),
    ),
    Cause(
        "DR718", "op-of-another-release", None,
        N_("a compiled op belongs to another DeepSpeed release"),
        N_("`module 'deepspeed_shm_comm' has no attribute 'vector_kernel_level'`, `create_adam(): incompatible function "
           "arguments`"),
        N_("DeepSpeed keeps compiled ops by name, without its release, in TORCH_EXTENSIONS_DIR or "
           "~/.cache/torch_extensions: two releases that share the folder, or a release that was changed in place, load "
           "what the other one built"),
        N_("delete the folder of that op, it is built again; give each release a TORCH_EXTENSIONS_DIR of its own"),
    ),
    Cause(
        "DR720", "stopped-by-person", None,
        N_("somebody stopped the run"),
        N_("a stop request, Ctrl-C or SIGTERM to the launcher"),
        N_("a person, a scheduler at its time limit, or a shutdown"),
        N_("start it again; a scheduler's limit is in its own log"),
    ),
    Cause(
        "DR721", "killed-from-outside", None,
        N_("a rank was killed from outside"),
        N_("SIGKILL or SIGTERM to a rank, while the kernel counted no out-of-memory kill"),
        N_("a person, a scheduler, a node agent or another job's clean-up ended it"),
        N_("ask who sent it: the scheduler's log, the node agent, other jobs of this user"),
    ),
    Cause(
        "DR722", "launcher-killed", None,
        N_("the launcher was killed; its ranks were ended"),
        N_("the launcher's process is gone by a signal before its ranks"),
        N_("a person or a system service ended it"),
        N_("start the run again; dstui keeps it in a session of its own"),
    ),
    Cause(
        "DR723", "node-lost", None,
        N_("a node of the run is gone"),
        N_("a node answers ssh no more, or its ssh ended with 255, while its ranks ran; the others lose their connection"),
        N_("the node was shut down, lost its power or its network, or hangs; a scheduler took it back"),
        N_("look at the node itself (its console, the scheduler); run `dstui stop` once it answers, for ranks that may "
           "live on there; start again without it: another hostfile, or fewer --nodes"),
    ),
    Cause(
        "DR801", "index-out-of-range", None,
        N_("an index lies outside its table: token ids and vocabulary do not match"),
        N_("`device-side assert triggered`, `index out of range in self`"),
        N_("tokens were added without resizing the embedding, or the tokenizer belongs to another model"),
        N_("resize the embeddings, or use the model's own tokenizer; run once with CUDA_LAUNCH_BLOCKING=1"),
    ),
    Cause(
        "DR802", "data-worker-died", None,
        N_("a data loader worker died"),
        N_("`DataLoader worker (pid ...) is killed by signal` or `exited unexpectedly`"),
        N_("memory or shared memory ran out, or the data set raised in a worker"),
        N_("fewer workers, more /dev/shm, or num_workers 0 to see the real error"),
    ),
    Cause(
        "DR803", "file-not-found", None,
        N_("a file of the training does not exist"),
        N_("FileNotFoundError, `No such file or directory`"),
        N_("a path relative to another directory, or a data set that is not on this machine"),
        N_("give an absolute path; the run's working directory is in its manifest"),
    ),
    Cause(
        "DR804", "template-or-dataset-unknown", None,
        N_("a template or data set of that name is not known"),
        N_("`Template ... does not exist`, `Undefined dataset ... in dataset_info.json`"),
        N_("LLaMA-Factory and ms-swift look both up by name: a typing error, a release without it, or another dataset_dir"),
        N_("correct `template` or `dataset` in the YAML; custom data sets are registered in dataset_info.json"),
    ),
    Cause(
        "DR805", "download-failed", None,
        N_("a model or data set could not be downloaded"),
        N_("an HTTP error, `We couldn't connect to`, a gated repository, no name resolution"),
        N_("compute nodes often have no way out; gated models need a token that the run must see"),
        N_("download it on the login node and give its folder; HF_HUB_OFFLINE=1; HF_TOKEN for gated models"),
    ),
    Cause(
        "DR806", "file-damaged", None,
        N_("a weights or data file is damaged"),
        N_("`Error while deserializing header`, `PytorchStreamReader failed`, `unexpected EOF`"),
        N_("an interrupted download or save, a Git LFS pointer in place of the file, or a full disk at that time"),
        N_("compare its size and sha256 with the source and fetch it again"),
    ),
    Cause(
        "DR901", "disk-full", None,
        N_("the disk is full"),
        N_("`No space left on device` or `Disk quota exceeded`"),
        N_("checkpoints (with optimizer states 12-16 bytes a parameter), the op cache or NVMe swap files"),
        N_("free space or write elsewhere; keep fewer checkpoints"),
    ),
    Cause(
        "DR902", "saving-checkpoint", None,
        N_("a checkpoint is being written"),
        N_("no step; a rank has a checkpoint file open for writing, the others wait for it"),
        N_("with optimizer states a checkpoint is 12-16 bytes a parameter; a network disk takes minutes for it"),
        N_("save less often, on a local disk, or without optimizer states where you will not resume"),
    ),
    Cause(
        "DR903", "checkpoint-does-not-match", None,
        N_("the checkpoint does not fit this model or this world size, or is incomplete"),
        N_("`used a DP world size of`, `zero checkpoints paths are missing`, `Error(s) in loading state_dict`"),
        N_("each rank writes its own piece of the optimizer: another number of ranks cannot read them, and on several "
           "nodes each local disk holds only its own"),
        N_("resume with the same number of ranks, or convert: ds_to_universal.py and "
           '"checkpoint": {"load_universal": true}; save to a shared disk'),
    ),
    Cause(
        "DR904", "permission-denied", None,
        N_("a file or folder may not be written or read by this user"),
        N_("`Permission denied`, `Read-only file system`"),
        N_("a folder of somebody else, a read-only mount, or a container that runs as another user"),
        N_("write elsewhere (output_dir, TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR, HF_HOME) or correct the rights"),
    ),
)  # fmt: skip
BY_CODE = {cause.code: cause for cause in _ALL}
BY_NAME = {cause.name: cause for cause in _ALL}


def find(word: str) -> Cause | None:
    """A cause by code (any letter case) or name."""
    return BY_CODE.get(word.upper()) or BY_NAME.get(word.lower())


def all_causes() -> tuple[Cause, ...]:
    return _ALL
