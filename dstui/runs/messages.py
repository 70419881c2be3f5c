"""What DeepSpeed, torch, NCCL, launchers and trainers say when something goes wrong, and the cause that it names.

A message is matched inside an exception or, with less certainty, on a line of its own: logs are cut, wrapped by
schedulers and printed by scripts that caught the exception. Each pattern is the fixed part of a message, so that the
words of data, file names and comments do not match. Where a message changed, the forms of all releases are listed.

Sources: DeepSpeed 0.9.5-0.19.8 (``runtime/engine.py``, ``runtime/config.py``, ``runtime/zero/*.py``,
``runtime/swap_tensor/*.py``, ``runtime/fp16/loss_scaler.py``, ``launcher/runner.py``, ``ops/op_builder/*.py``), torch
1.13-2.13 (``c10/cuda``, ``distributed/elastic``, ``csrc/distributed/c10d``), NCCL, transformers, accelerate,
LLaMA-Factory (``data/template.py``, ``data/parser.py``), SLURM, Ray, the Linux kernel.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Message:
    """``keys``: lower-case literals of which one is in every text that matches (a cheap test first).

    ``bare``: the line alone names the cause, without a traceback. ``weight``: of such a line among the causes.
    """

    code: str
    keys: tuple[str, ...]
    pattern: re.Pattern[str]
    bare: bool = True
    weight: int = 47


def _say(code: str, pattern: str, *keys: str, bare: bool = True, weight: int = 47) -> Message:
    return Message(code, keys, re.compile(pattern, re.IGNORECASE), bare, weight)


# Order: from the special to the general; the first that matches counts.
MESSAGES: tuple[Message, ...] = (
    # 3: batch and accumulation
    _say("DR301", r"Check batch related parameters|\d+ != \d+ \* \d+ \* \d+\b|batch size per gpu: -?\d+ has to be greater|"
         r"gradient accumulation steps: -?\d+ has to be greater",
         "check batch related", " != ", "has to be greater"),
    _say("DR302", r"no_sync context manager is incompatible|managed_gradient_accumulation=False is not supported|"
         r"unmanaged gradient accumulation .*not supported|"
         r"no_sync (?:context manager )?(?:is )?(?:not supported|unsupported)|no_sync context manager reentry|nested inside another no_sync|"
         r"It is illegal to call Engine\.step\(\) inside no_sync",
         "no_sync", "managed_gradient_accumulation", "unmanaged"),
    _say("DR303", r"Updating DeepSpeed's gradient accumulation steps to \d+ from \d+",
         "gradient accumulation steps to", weight=12),
    # 2: offload
    _say("DR201", r"client provided optimizer \(|in most cases will yield poor performance|"
         r"is not (?:recognized as )?(?:a )?supported .*ZeRO-?Offload|CPUAdam .*requires? .*(?:cpu|device)",
         "client provided optimizer", "poor performance", "zerooffload", "zero-offload", "cpuadam"),
    _say("DR203", r"buffer nbytes != file bytes|Not enough (?:swap in )?buffers \d+ for swapping|n_completes >= min_completes|"
         r"(?:aio|swap)[\w ]*(?:read|write)? ?failed.*(?:swp|nvme|zero_stage_3)|io_submit|"
         r"(?:Permission denied|No such file or directory|Read-only file system|Not a directory|File exists): '[^']*(?:/[^'/]*nvme[^'/]*/?|zero_stage_3[^']*)'|"
         r"nvme_path (?:must|is not|should)|NVMe offload .*requires? |More elements \d+ than buffer size [\d,]+",
         "file bytes", "than buffer size", "for swapping", "n_completes", ".swp", "io_submit", "nvme", "zero_stage_3"),
    _say("DR204", r"KeyError[^\n]*\n?[^\n]*(?:norm_for_param_grads|complete_grad_norm_calculation_for_cpu_offload)|"
         r"(?:norm_for_param_grads|complete_grad_norm_calculation_for_cpu_offload)[^\n]*KeyError",
         "norm_for_param_grads", "complete_grad_norm_calculation"),
    # 1: stage
    _say("DR105", r"has already been reduced|Gradient computed twice for this partition",
         "already been reduced", "computed twice"),
    _say("DR106", r"'weight' must be 2-?D|mat2 must be a matrix, got 1-D tensor|weight should have at least three dimensions|"
         r"(?:got weight of|weight of size|but got weight with) (?:shape )?\[0\]|shape torch\.Size\(\[0\]\) from checkpoint|"
         r"size mismatch for [^:]+: copying a param with shape torch\.Size\(\[0\]\)|"
         r"copying a param with shape torch\.Size\(\[[\d, ]+\]\) from checkpoint, the shape in current model is torch\.Size\(\[0\]\)|"
         r"expected param .* to be available|ds_status == ZeroParamStatus\.AVAILABLE|'status': 'NOT_AVAILABLE'|Padding_idx must be within num_embeddings.*\[0",
         "must be 2-d", "must be 2d", "must be a matrix", "three dimensions", "weight", "torch.size([0])", "to be available", "zeroparamstatus", "not_available"),
    _say("DR107", r"assert not param\.ds_active_sub_modules|Cannot free a ZeRO-3 parameter while it is still active|"
         r"tracing error at step \d+|ds_active_sub_modules|still have inflight params|\} already in registry|"
         r"'status': 'AVAILABLE'.*'active_sub_modules': \{\d|'status': 'INFLIGHT'|"
         r"disagreement (?:on .* )?between rank0 and rank\d+|attempted to (?:record trace|invalidate already)",
         "active_sub_modules", "'inflight'", "still active", "tracing error", "inflight params", "already in registry", "disagreement ",
         "attempted to"),
    # environment: builds
    _say("DR718", r"module '(?:deepspeed\w+_comm|cpu_ada\w+|cpu_lion|fused_\w+|async_io|gds|fp_quantizer|random_ltd|"
         r"pin_memory|ragged\w*_ops|inference_c\w+_ops|spatial_inference|evoformer_attn|stochastic_transformer|transformer_inference)' "
         r"has no attribute '(?!__)|"
         r"(?:create|destroy)_ada\w+\(\): incompatible function arguments|\bada\w+_update(?:_copy)?\(\): incompatible function arguments|"
         r"\baio_handle\(?[^\n]*incompatible (?:function|constructor) arguments",
         "has no attribute", "incompatible function arguments", "incompatible constructor arguments", weight=50),
    _say("DR702", r"CUDA_HOME (?:does not exist|environment variable is not set)|CUDAMismatchException|MissingCUDAException|"
         r"Installed CUDA version [\d.]+ does not match|does not match the version torch was compiled|"
         r"nvcc(?:: (?:command )?not found)|(?:No such file or directory|not found): '?[^'\n]*bin/nvcc|"
         r"The detected CUDA version \([\d.]+\) mismatches",
         "cuda_home", "cudamismatch", "missingcuda", "installed cuda", "torch was compiled", "nvcc", "detected cuda"),
    _say("DR701", r"Error building extension '|Unable to JIT load the |Ninja is required to load|"
         r"(?<!\[WARNING\] )(?<!\[WARNING\]  )async_io requires the dev libaio|/ld: cannot find -l|/ld: can not find -l|nvcc fatal|'-v'\]' returned non-zero|"
         r"error: (?:inlining failed in call to|target specific option mismatch)|compilation error .*_mm\d|"
         r"fatal error: (?:Python|cuda\w*|cublas\w*|curand\w*|cusparse\w*|cusolver\w*|libaio|omp|nv\w+)\.h: No such file|"
         r"No module named 'deepspeed\.ops\.\w+_op|has no attribute 'ds_opt_adam'|"
         r"version `(?:GLIBCXX|CXXABI)_[\d.]+' not found",
         "building extension", "jit load", "ninja", "libaio", "/ld: ", "nvcc fatal", "inlining failed", "target specific",
         "compilation error", "fatal error: ", "ds_opt_adam", "glibcxx", "cxxabi", "no module named 'deepspeed.ops", "'-v']'"),
    _say("DR703", r"invalid literal for int\(\) with base 10: '\d[af]'|Unknown CUDA arch \(", "invalid literal for int",
         "unknown cuda arch"),
    # 4: pinned memory and host
    _say("DR402", r"could not page-lock|mlock failed to allocate|ibv_reg_mr\w* failed with error Cannot allocate memory|"
         r"pin_memory\(.*CUDA error|CUDA error.*pin_memory|out of memory in \S*pin_memory|(?:cudaHostAlloc|cudaHostRegister)\S* .*(?:fail|error|invalid)|"
         r"failed to (?:pin|page-lock)|pin_memory\(torch\.empty",
         "page-lock", "mlock", "ibv_reg_mr", "pin_memory", "cudahost", "failed to pin"),
    _say("DR403", r"insufficient shared memory \(shm\)|out of shared memory\. ?Please|workers are out of shared memory|"
         r"posix_fallocate failed : No space left|(?:\d+|: tasks? [\d,-]+:) Bus error +\(core dumped\)|(?:Bus error|SIGBUS)\b.*(?:DataLoader|shm|received)|"
         r"Fatal Python error: Bus error|Caught signal 7 \(Bus error|Signal 7 \(SIGBUS\)|"
         r"unable to (?:open|allocate|write to|mmap) (?:shared memory )?(?:object|file|\d+ bytes)?.*</torch_|"
         r"unable to allocate shared memory|No space left on device.*(?:/dev/shm|nccl-)|(?:/dev/shm|nccl-)\S*.*No space left on device|"
         r"Error while creating shared memory segment|unhandled system error.*No space left on device",
         "shared memory", "posix_fallocate", "sigbus", "bus error", "/dev/shm", "nccl-", "torch_", "unhandled system error"),
    _say("DR401", r"oom[-_]kill event|Detected \d+ oom[-_]kill|Memory cgroup out of memory: Killed|Out of memory: Killed process|"
         r"\bOOMKilled\b|Ray killed this worker|killed due to the node running low on memory|"
         r"srun: error: .*Out Of Memory|Some of (?:your processes|the step tasks) (?:may )?have been (?:killed by the cgroup|OOM Killed)|"
         r"Container killed on request\. Exit code is 137|command terminated with exit code 137|"
         r"(?:exit(?:s|ed)?|returns?|returned)(?: with)?(?: return)?(?: code)?(?: =|:)? ?-9\b|\(exitcode: ?-9\)|"
         r": line \d+: +\d+ Killed\b|exitcode *: *-9\b|Signal 9 \(SIGKILL\) received|died with <Signals\.SIGKILL|terminated with signal SIGKILL|"
         r"srun: error: \S+: tasks? [\d,-]+: Killed|TERM_MEMLIMIT|PBS: job killed: (?:v?p?mem|ncpus mem)|"
         r"node was low on resource: memory|systemd-oomd\S* .*[Kk]illed .*memory pressure",
         "oom_kill", "oom-kill", "out of memory: killed", "oomkilled", "ray killed", "low on memory", "out of memory",
         "oom killed", "killed by the cgroup", "exit code is 137", "exit code 137", "-9", "sigkill", " killed",
         "term_memlimit", "low on resource", weight=46),
    _say("DR404", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|(?:\[Errno 12\]|OSError:?) ?Cannot allocate memory|"
         r"^\s*(?:numpy\.core\._exceptions\._ArrayMemoryError|MemoryError)\b|Unable to allocate [\d.]+ [KMGT]iB for an array|"
         r"std::bad_alloc|unable to mmap \d+ bytes from file .*Cannot allocate memory|"
         r"[Ff]ailed to start a thread.*Resource temporarily unavailable|can't start new thread",
         "defaultcpuallocator", "cannot allocate memory", "memoryerror", "for an array", "bad_alloc", "temporarily unavailable",
         "start new thread"),
    _say("DR402", r"^(?:\w+Error: )?CUDA error: out of memory", "cuda error: out of memory", weight=30),
    # the config
    _say("DR706", r"Expected a string path to an existing deepspeed config", "expected a string path"),
    _say("DR705", r"\bds [\w.]+=\S+ vs hf \w+=|mismatch TrainingArguments values|"
         r"Found `optimizer` configured in the DeepSpeed config, but no `scheduler`|"
         r"[Yy]ou (?:cannot|can't|must) .{0,60}in (?:the|your) DeepSpeed config|Please correct the following DeepSpeed config values",
         " vs hf ", "mismatch trainingarguments", "deepspeed config"),
    _say("DR713", r"error: unrecognized arguments:.*--local[-_]rank", "unrecognized arguments"),
    # numerics
    _say("DR602", r"Current loss scale already at minimum", "already at minimum", weight=48),
    # environment: devices, launch, versions
    _say("DR717", r"uncorrectable (?:NVLink|ECC) error|CUDA error: (?:unspecified launch failure|an illegal instruction|hardware stack error)|"
         r"GPU (?:is lost|has fallen off the bus)|NVRM: Xid|Unable to determine the device handle for GPU",
         "uncorrectable", "unspecified launch", "illegal instruction", "hardware stack", "gpu is lost", "fallen off", "xid",
         "device handle", weight=73),  # the signal that ends the rank comes after it
    _say("DR707", r"nvrtc: error: invalid value for --gpu-architecture", "gpu-architecture", weight=76),  # after 400 lines of source
    _say("DR707", r"No CUDA GPUs are available|invalid device ordinal|no CUDA-capable device|CUDA-capable devices? are busy or unavailable|driver version is insufficient|"
         r"Found no NVIDIA driver|ProcessGroupNCCL is only supported with GPUs|NVIDIA driver on your system is too old|device >= 0 && device < num_gpus|"
         r"no kernel image is available|CUDA driver initialization failed|Torch not compiled with CUDA enabled|"
         r"No slot '\w+' specified on host|Unexpected error from cudaGetDeviceCount|Duplicate GPU detected|Attempting to deserialize object on CUDA device \d+ but",
         "cuda gpus", "only supported with gpus", "device ordinal", "cuda-capable", "driver", "num_gpus", "kernel image", "with cuda enabled", "no slot",
         "cudagetdevicecount", "duplicate gpu", "on cuda device"),
    _say("DR508", r"No backend type associated with device type cpu|Tensors must be CUDA and dense|"
         r"Tensor for argument .* is on CPU, but expected .* NCCL|(?:CPU offload\w*|offloading) requires backend supporting cpu tensors",
         "backend type associated", "cuda and dense", "cpu tensors"),
    _say("DR714", r"cannot import name '\w+' from '(?:torch|transformers|accelerate|deepspeed|peft|trl|numpy)[\w.]*'|"
         r"cannot import name '\w+' from '[\w.]+' \([^)\n]*(?:site|dist)-packages/|Weights only load failed|"
         r"[\w-]+ ?[<>=!~]=? ?[\w.,<>=!]+ is required for a normal functioning of this module, but found|"
         r"No module named '(?:torch|transformers|accelerate|deepspeed|peft|trl|numpy|datasets)\.[\w.]+'|"
         r"Unsupported global: GLOBAL |undefined symbol: \S+|"
         r"CUDA S(?:ETUP|etup)(?: failed despite GPU being available|: Setup Failed!)|A module that was compiled using NumPy 1\.x cannot be run|"
         r"(?:got an unexpected keyword argument|takes \d+ positional arguments?) .*deepspeed|partially initialized module '(?:torch|deepspeed)",
         "cannot import name", "normal functioning", "no module named", "weights only", "unsupported global", "undefined symbol", "cuda setup", "numpy 1.x", "deepspeed", "partially initialized"),
    _say("DR715", r"launcher '\w+' not installed|KeyError: 'PDSH_SSH_ARGS_APPEND'|parse_inclusion_exclusion|"
         r"Hostfile .*(?:is not formatted|contains multiple entries|is empty)|Unable to proceed with (?:training|ssh)|"
         r"environment variable (?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_\w+) expected, but not set|DeepSpeed is not compatible with MP\.|"
         r"ssh to [\w.-]+ failed|was not reachable via ssh|pdsh@\S+: .*ssh exited with exit code (?:255|12[67])|--(?:num_nodes|num_gpus) .*cannot be|"
         r"Permission denied \(publickey",
         "expected, but not set", "compatible with mp", "not installed", "pdsh", "parse_inclusion", "hostfile", "unable to proceed", "ssh", "cannot be"),
    _say("DR720", r"CANCELLED AT \S+ (?:DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)|\*\*\*)|Process \d+ got signal: (?:2|15)\b|"
         r"TERM_(?:RUNLIMIT|OWNER)|PBS: job killed: walltime|Received (?:2|15|SIGTERM|SIGINT) death signal|received (?:SIGTERM|SIGINT) from|Received \d+ death signal, shutting down",
         "cancelled at", "term_runlimit", "term_owner", "pbs: job killed", "got signal", "death signal", "received sig"),
    _say("DR716", r"received 0 items of ancdata|Too many open files", "ancdata", "too many open files"),
    # 5: communication
    _say("DR503", r"Address already in use|EADDRINUSE|errno: 98\b", "already in use", "eaddrinuse", "errno: 98"),
    _say("DR504", r"Timed out initializing process group|The client socket has (?:timed out|failed to connect)|"
         r"Timed out after \d+ seconds waiting for clients|store based barrier.*(?:timed? ?out|timeout)|"
         r"waiting for clients\. \d+/\d+ clients joined|--master_addr= |(?<!due to an error of type )Rendezvous\w*Error|"
         r"(?:Could not resolve|failed to resolve|getaddrinfo|Name or service not known).*(?:master|host|service|\d{4,5})|"
         r"No route to host",
         "initializing process group", "client socket", "waiting for clients", "store based barrier", "--master_addr=",
         "rendezvous", "resolve", "getaddrinfo", "not known", "no route to host"),
    _say("DR501", r"Watchdog caught collective operation timeout|failed to pass monitoredBarrier|monitoredBarrier.*timed? ?out|"
         r"Timed out waiting \d+ms for (?:recv|send)|Some NCCL operations have failed or timed out|"
         r"watchdog got stuck for \d+ seconds|due to ProcessGroupNCCL watchdog hang|failure detected by watchdog|collective timeout|SeqNum=\d+, OpType=\w+, NumelIn=\d+",
         "watchdog", "monitoredbarrier", "timed out waiting", "nccl operations", "collective timeout", "seqnum=", weight=48),
    _say("DR502", r"NET/IB ?: Got completion|socketStartConnect: Connect to|socketProgress: Connection closed|"
         r"ncclRemoteError|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|NCCL error in:|"
         r"\[\d\] \S+ WARN Call to \w+ failed|NCCL WARN \[(?:Service thread|Proxy Service \d+)\] (?:Error encountered progressing|Failed to execute operation)|"
         r"Unable to find address for: \S+|no socket interface found|"
         r"Gloo connectFullMesh failed|NCCL WARN (?:Call to (?:ibv_|connect|recv|send)|Net : |NET/|Timeout)|"
         r"unhandled (?:cuda|system) error, NCCL version",
         "net/ib", "socketstartconnect", "socketprogress", "nccl", "gloo", "unhandled", "warn call to",
         "unable to find address", "no socket interface", weight=41),
    # data
    _say("DR801", r"device-side assert triggered|\.cu:\d+: .*Assertion .*(?:\bindex\b|[iI]ndex\b.* <|out of bounds).* failed|index out of range in self|srcIndex < srcSelectDimSize|"
         r"`?t >= 0 && t < n_classes`?|vectorized_gather_kernel: .*index out of bounds",
         "device-side", "assertion", "out of range in self", "srcindex", "n_classes", "out of bounds", weight=73),
    _say("DR712", r"an illegal memory access was encountered|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)|"
         r"CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)|CUDA error: misaligned address|double free or corruption|"
         r"Fatal Python error: (?:Segmentation fault|Illegal instruction|Aborted)|Caught signal (?:11|4) \(|free\(\): invalid|corrupted size vs\. prev_size|(?:\d+|: tasks? [\d,-]+:) (?:Segmentation fault|Aborted|Illegal instruction) +\(core dumped\)",
         "illegal memory", "cublas_status", "cudnn_status", "misaligned", "double free", "fatal python error", "caught signal", "free(): invalid", "corrupted size", "core dumped"),
    _say("DR802", r"DataLoader worker .*(?:killed by signal|exited unexpectedly)|"
         r"One of the subprocesses has abruptly died during map operation", "dataloader worker", "abruptly died"),
    _say("DR804", r"Template \S+ does not exist|Undefined dataset \S+ in|Please set (?:the )?`?template`?|"
         r"tokenizer\.chat_template is not set|template_type.*(?:not in|not found|not exist)|"
         r"Cannot find valid samples|Unknown (?:template|dataset)[ :]|template `?\S+`? (?:is )?not (?:found|registered|supported)|"
         r"Cannot find (?:the )?(?:template|dataset_info)|Cannot open .*dataset_info\.json",
         "template", "undefined dataset", "valid samples", "unknown dataset", "dataset_info"),
    _say("DR805", r"LocalEntryNotFoundError|couldn't connect to 'https?://|We couldn't connect to|Max retries exceeded with url|"
         r"GatedRepoError|RepositoryNotFoundError|Cannot access gated repo|"
         r"(?:HTTPError|HfHubHTTPError): (?:401|403|404|429|5\d\d)|SSLError|outgoing traffic has been disabled|OfflineModeIsEnabled|"
         r"Temporary failure in name resolution",
         "localentry", "connect to", "max retries", "gatedrepo", "repositorynotfound", "gated repo", "httperror", "sslerror",
         "outgoing traffic", "offlinemode", "name resolution"),
    _say("DR806", r"Error while deserializing header|SafetensorError(?!.*(?:serializing: IoError|StorageFull|No space left))|PytorchStreamReader failed|invalid header or archive is corrupted|"
         r"unexpected EOF, expected \d+ more bytes|_pickle\.UnpicklingError|ArrowInvalid: |file is not a zip file|"
         r"failed finding central directory",
         "deserializing", "safetensorerror", "streamreader", "corrupted", "unexpected eof", "unpicklingerror", "arrowinvalid",
         "zip file", "central directory", bare=True, weight=40),
    _say("DR803", r"can't open file '[^'\n]+': \[Errno 2\] No such file|"
         r"Repo id must (?:be in the form|use alphanumeric)[^\n]*'[./~][^'\n]*'", "can't open file", "repo id must"),
    # disk
    _say("DR901", r"No space left on device|Disk quota exceeded|inline_container.*unexpected pos|"
         r"PytorchStreamWriter failed writing|SafetensorError: .*(?:No space|StorageFull)|Errno 122|File too large",
         "no space left", "quota exceeded", "unexpected pos", "streamwriter", "storagefull", "errno 122", "file too large"),
    _say("DR903", r"checkpoint being loaded used a DP\b|used a DP world size of \d+|zero checkpoints? paths are missing|"
         r"(?:zero|optim)\w*_states\.pt.*(?:not found|missing|No such file)|No such file or directory: '[^']*_(?:optim|model)_states\.pt'|"
         r"(?:client_state|zero_checkpoint) .*mismatch|Error\(s\) in loading state_dict for \w+|Automatic adjustment of ZeRO's optimizer state partitioning",
         "dp world size", "used a dp", "checkpoint paths", "checkpoints paths", "_states.pt", "automatic adjustment", "loading state_dict", "zero_checkpoint", "client_state"),
    _say("DR904", r"\[Errno 13\] Permission denied|Read-only file system|PermissionError: ", "errno 13", "read-only file", "permissionerror"),
)  # fmt: skip


def of_exception(text: str) -> Message | None:
    """The first message that the text of an exception holds."""
    low = text.lower()
    for m in MESSAGES:
        if any(k in low for k in m.keys) and m.pattern.search(text):
            return m
    return None


def on_lines(texts: Sequence[str]) -> Iterator[tuple[int, Message]]:
    """``(index, message)`` of the first line of each message that speaks for itself.

    All texts are searched for the literals at once; only then line by line.
    """
    low = "\n".join(texts).lower()
    live = [m for m in MESSAGES if m.bare and any(k in low for k in m.keys)]
    ends = list(accumulate(len(line) + 1 for line in low.split("\n")))
    found: set[int] = set()
    for i in sorted(_lines_with({k for m in live for k in m.keys}, low, ends)):
        text, lowered = texts[i], texts[i].lower()
        for m in live:
            if any(k in lowered for k in m.keys) and m.pattern.search(text):
                if id(m) not in found:
                    yield i, m
                found.add(id(m))
                break  # a line has one meaning: the most special


def _lines_with(keys: Iterable[str], low: str, ends: Sequence[int]) -> set[int]:
    """Indices of the lines of ``low`` that hold one of ``keys``; ``ends``: where each line and its newline end."""
    hits: set[int] = set()
    for key in keys:
        at = low.find(key)
        while at >= 0:
            i = bisect_right(ends, at)
            hits.add(i)
            at = low.find(key, ends[i])
    return hits
