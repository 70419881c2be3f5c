"""One training case on real GPUs, one process a rank: what it takes, phase by phase, as one JSON line.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        python tests/tools/measure_case.py --case CASE.json [--row ROW.json] [--alone]

CASE.json is a case of ``cases.py``. Rank 0 prints ``RESULT {...}``; with ``--row`` the row is also rewritten
after each phase, so that a killed run leaves what it had measured. Sizes are bytes, times seconds.

Phases: ``start`` (process group, CUDA context), ``model``, ``engine`` (``deepspeed.initialize``), ``step0..``,
and inside the last step of the plain loop ``forward``, ``backward``, ``update``. Peaks are those of the phase.
With ``DS_ACCELERATOR=cpu`` (and ``"dry": true``) everything runs but the GPU's figures are 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START = time.time()
sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases  # noqa: E402
import threshold  # noqa: E402
import torch  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CUDA = os.environ.get("DS_ACCELERATOR") != "cpu"


class Probe:
    """Reads the counters of this process and its card; ``phase`` closes a phase."""

    def __init__(self, case: cases.Case, local: int, row: Path | None, alone: bool) -> None:
        self.row_path = row
        self.row: dict[str, Any] = {"case": case, "phases": {}, "ok": False, "torch": torch.__version__}
        self.page = os.sysconf("SC_PAGE_SIZE")
        self.rss_peak = self.nvml_peak = self.pinned_peak = 0
        self.nvml: Any = None
        if CUDA and alone:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(local)
            self.nvml = lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            self.row["nvml_before"] = self.nvml()
        self.stopped = threading.Event()
        threading.Thread(target=self._poll, daemon=True).start()

    def _rss(self) -> int:
        with Path("/proc/self/statm").open(encoding="ascii") as f:
            return int(f.read().split()[1]) * self.page

    def _poll(self) -> None:
        while not self.stopped.wait(0.02):
            self.rss_peak = max(self.rss_peak, self._rss())
            if self.nvml is not None:
                self.nvml_peak = max(self.nvml_peak, self.nvml())

    def phase(self, name: str) -> None:
        entry: dict[str, Any] = {"t": round(time.time() - START, 2)}
        if CUDA:
            torch.cuda.synchronize()
            entry["t"] = round(time.time() - START, 2)
            s = torch.cuda.memory_stats()
            for key, stat in (
                ("alloc", "allocated_bytes.all"),
                ("reserved", "reserved_bytes.all"),
                ("active", "active_bytes.all"),
                ("requested", "requested_bytes.all"),
            ):
                entry[key] = s.get(stat + ".current", 0)
                entry["peak_" + key] = s.get(stat + ".peak", 0)
            entry["retries"], entry["ooms"] = s.get("num_alloc_retries", 0), s.get("num_ooms", 0)
            entry["pinned"] = {
                k: int(v)
                for k, v in getattr(torch.cuda, "host_memory_stats", dict)().items()
                if "_bytes." in k and k.endswith((".current", ".peak")) and "bucket" not in k
            }
            torch.cuda.reset_peak_memory_stats()
        rss = self._rss()
        entry["rss"], entry["peak_rss"] = rss, max(self.rss_peak, rss)
        self.rss_peak = rss
        if self.nvml is not None:
            now = self.nvml()
            entry["nvml"], entry["peak_nvml"] = now, max(self.nvml_peak, now)
            self.nvml_peak = now
        with Path("/proc/self/status").open(encoding="ascii", errors="replace") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key in ("VmHWM", "VmLck", "VmPin", "RssAnon", "RssFile", "RssShmem"):
                    entry[key] = int(value.split()[0]) * 1024
        self.row["phases"][name] = entry
        self.save()

    def save(self) -> None:
        phases = self.row["phases"].values()
        for key in ("peak_alloc", "peak_reserved", "peak_active", "peak_rss", "peak_nvml"):
            values = [p[key] for p in phases if key in p]
            if values:
                self.row[key] = max(values)
        if self.row_path is not None:
            fresh = self.row_path.with_suffix(".new")
            fresh.write_text(json.dumps(self.row), encoding="utf-8")
            fresh.replace(self.row_path)


@contextlib.contextmanager
def cheap_weights(cheap: bool) -> Iterator[None]:
    """Random numbers for billions of weights take a CPU minutes: there a constant touches the same pages."""
    names = ("normal_", "uniform_", "trunc_normal_")
    if not cheap:
        yield
        return
    own = {n: torch.Tensor.__dict__.get(n) for n in names}

    def constant(self: torch.Tensor, *_a: Any, **_k: Any) -> torch.Tensor:
        return self.fill_(0.01)

    for n in names:
        setattr(torch.Tensor, n, constant)
    try:
        yield
    finally:
        for n, f in own.items():
            if f is None:
                delattr(torch.Tensor, n)
            else:
                setattr(torch.Tensor, n, f)


def quantised(case: cases.Case, cls: Any, config: Any) -> Any:
    """The model in 4 or 8 bits, through a checkpoint on disk, as ``from_pretrained`` makes it."""
    import tempfile

    from transformers import BitsAndBytesConfig

    folder = Path(tempfile.gettempdir()) / f"weights-{case['model']}"
    if not (folder / "config.json").exists() and torch.distributed.get_rank() == 0:
        part = Path(tempfile.mkdtemp())
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):  # random weights, as a real model's: int8 treats outliers otherwise
                cls(config).save_pretrained(part)
        finally:
            torch.set_default_dtype(before)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):  # another process was first
            part.replace(folder)
    if case["quant"] == "nf4":
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    else:
        how = BitsAndBytesConfig(load_in_8bit=True)
    local = int(os.environ["LOCAL_RANK"])
    return cls.from_pretrained(
        folder,
        quantization_config=how,
        dtype=torch.bfloat16,
        device_map={"": local},
        attn_implementation=case["attn"],
        use_cache=False,
    )


def use_loss(case: cases.Case, model: Any) -> None:
    """Another cross entropy than that of transformers."""
    if case["loss"] == "chunked":
        from deepspeed.runtime.chunked_cross_entropy import install_chunked_causal_lm_loss

        install_chunked_causal_lm_loss(model)
        return
    from liger_kernel.transformers import monkey_patch

    patch = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
    patch(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, model=model)


def make_model(case: cases.Case) -> tuple[Any, Any]:
    """The model of a case, ready for ``deepspeed.initialize``, and its configuration."""
    import deepspeed
    from transformers import AutoConfig

    fields = dict(cases.MODELS[case["model"]])
    config = AutoConfig.for_model(
        fields.pop("model_type"), max_position_embeddings=cases.POSITIONS, use_cache=False, **fields
    )
    config._attn_implementation = case["attn"]
    cls = model_class(config.model_type)
    dtype = DTYPES[case.get("load_prec", case["prec"])]
    on_gpu = CUDA and case["load"] == "gpu"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if case.get("quant"):
            torch.set_default_dtype(before)
            model = quantised(case, cls, config)
        elif case.get("zero_init") and case["loop"] == "hf":
            torch.set_default_dtype(before)  # transformers sets it itself, and opens zero.Init
            model = cls._from_config(config, dtype=dtype, attn_implementation=case["attn"])
        elif case.get("zero_init"):
            with deepspeed.zero.Init(config_dict_or_path=case["ds"], dtype=dtype):
                model = cls(config)
        else:
            with cheap_weights(CUDA and not on_gpu), torch.device("cuda" if on_gpu else "cpu"):
                model = cls(config)
    finally:
        torch.set_default_dtype(before)
    assert model.config._attn_implementation == case["attn"], model.config._attn_implementation
    if case.get("loss"):
        use_loss(case, model)
    if case.get("kbit"):
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                r=case["lora"],
                lora_alpha=16,
                lora_dropout=case.get("dropout", 0.0),
                target_modules=case.get("targets", "all-linear"),
                task_type="CAUSAL_LM",
            ),
        )
    if case["ckpt"] and case["loop"] == "plain":
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": bool(case.get("reentrant"))}
        )
    if case["ckpt"] and case.get("lora"):
        model.enable_input_require_grads()
    model.train()
    return model, config


CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gpt_neox": "GPTNeoX",
    "phi3": "Phi3", "gemma3_text": "Gemma3",
}  # fmt: skip


def model_class(kind: str) -> Any:
    import transformers

    return getattr(transformers, CLASSES[kind] + "ForCausalLM")


def imports(case: cases.Case) -> None:
    """Everything that is slow to import and touches no GPU."""
    import deepspeed  # noqa: F401
    import transformers

    model_class(cases.MODELS[case["model"]]["model_type"])
    if case["loop"] == "hf":
        transformers.Trainer  # noqa: B018
    if case.get("lora"):
        import peft  # noqa: F401
    if case.get("quant"):
        import bitsandbytes  # noqa: F401
    if case.get("loss") == "liger":
        import liger_kernel.transformers  # noqa: F401


def count(model: Any, probe: Probe) -> None:
    def numel(p: Any) -> int:
        return int(getattr(p, "ds_numel", p.numel()))

    probe.row["params"] = sum(numel(p) for p in model.parameters())
    probe.row["trainable"] = sum(numel(p) for p in model.parameters() if p.requires_grad)


def describe(engine: Any, probe: Probe) -> None:
    inner = getattr(engine.optimizer, "optimizer", None)
    probe.row["optimizer"] = type(engine.optimizer).__name__ + "/" + type(inner).__name__


def plain(case: cases.Case, probe: Probe, rank: int) -> None:
    """The loop that people write by hand around an engine."""
    import deepspeed

    model, config = make_model(case)
    count(model, probe)
    probe.phase("model")
    trained = [p for p in model.parameters() if p.requires_grad]
    more: dict[str, Any] = {}
    if case.get("client"):
        more["optimizer"] = torch.optim.AdamW(trained, lr=1e-5)
    together = case.get("sp", 1)
    if together > 1:  # Ulysses: each rank has its share of one sequence
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        more["mpu"] = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=case["attn"],
            sequence_parallel_size=together,
            micro_batch_size=case["mb"],
            seq_length_is_variable=True,
        )
    alike = together > 1 or case["ds"].get("tensor_parallel")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=case["ds"], **more)
    describe(engine, probe)
    del trained, more
    probe.phase("engine")
    random = torch.Generator().manual_seed(0 if alike else rank)
    held: list[Any] = []

    def batch() -> dict[str, torch.Tensor]:
        ids = torch.randint(0, config.vocab_size, (case["mb"], case["seq"]), generator=random)
        if together == 1:
            ids = ids.to(engine.device)
            return {"input_ids": ids, "labels": ids}
        width = case["seq"] // together
        mine = slice(rank % together * width, (rank % together + 1) * width)
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:][:, mine]
        places = torch.arange(case["seq"]).expand_as(ids)[:, mine].contiguous()
        share = {"input_ids": ids[:, mine], "position_ids": places, "labels": labels, "shift_labels": labels}
        return {k: v.contiguous().to(engine.device) for k, v in share.items()}

    def step(mark: bool = False) -> float:
        value = 0.0
        for i in range(engine.gradient_accumulation_steps()):
            last = mark and i == engine.gradient_accumulation_steps() - 1
            inputs = batch()
            out = engine(**inputs)
            del inputs
            loss = out.loss
            if case.get("hold"):
                held[:] = [out]
            del out
            if last:
                probe.phase("forward")
            engine.backward(loss)
            if last:
                probe.phase("backward")
            engine.step()
            if last:
                probe.phase("update")
            value = float(loss.detach())
        return value

    for n in range(case["steps"]):
        begin = time.time()
        probe.row["loss"] = step(mark=n == case["steps"] - 1)
        if n < case["steps"] - 1:
            probe.phase(f"step{n}")
        probe.row.setdefault("times", []).append(round(time.time() - begin, 3))
    if case.get("save"):
        save(case, engine, probe)
    if case.get("threshold") and CUDA:
        probe.row["ok"] = True  # the row stands whatever becomes of the search
        probe.row["threshold"] = found = {}
        threshold.descend(step, _steady(probe), found, probe.save)


def save(case: cases.Case, engine: Any, probe: Probe) -> None:
    """What is written of a model takes, in memory and on disk (``written``: bytes of all files of all ranks)."""
    import shutil
    import tempfile

    import torch.distributed as dist

    folder = Path(tempfile.gettempdir()) / f"saved-{case['name']}"
    if case["save"] == "16bit":
        engine.save_16bit_model(str(folder))
    else:
        engine.save_checkpoint(str(folder))
    dist.barrier()
    probe.phase("save")
    if dist.get_rank() == 0:
        probe.row["written"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        shutil.rmtree(folder, ignore_errors=True)


def _steady(probe: Probe) -> int:
    """Peak allocated of the last whole step."""
    return max(probe.row["phases"][k]["peak_alloc"] for k in ("forward", "backward", "update"))


def trainer(case: cases.Case, probe: Probe, rank: int) -> None:
    """The Trainer of transformers on tokens of fixed length."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    ds = case["ds"]
    args = TrainingArguments(
        output_dir=f"/tmp/measure-{os.getpid()}",
        deepspeed=json.loads(json.dumps(ds)),
        per_device_train_batch_size=case["mb"],
        gradient_accumulation_steps=ds["gradient_accumulation_steps"],
        max_steps=case["steps"],
        learning_rate=1e-5,
        bf16=case["prec"] == "bf16",
        fp16=case["prec"] == "fp16",
        optim=case.get("client") or "adamw_torch",
        gradient_checkpointing=case["ckpt"],
        gradient_checkpointing_kwargs={"use_reentrant": bool(case.get("reentrant"))}
        if case["ckpt"]
        else None,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not CUDA,
    )
    model, config = make_model(case)  # after the arguments: they say whether zero.Init is opened
    count(model, probe)
    probe.phase("model")
    random = torch.Generator().manual_seed(rank)
    rows = case["mb"] * ds["gradient_accumulation_steps"] * case["world"] * case["steps"]
    data = [torch.randint(0, config.vocab_size, (case["seq"],), generator=random) for _ in range(rows)]

    class Watch(TrainerCallback):  # type: ignore[misc]
        steps = 0

        def on_train_begin(self, *_a: Any, **_k: Any) -> None:
            describe(job.model_wrapped, probe)
            probe.phase("engine")

        def on_step_end(self, *_a: Any, **_k: Any) -> None:
            probe.phase(f"step{self.steps}")
            self.steps += 1

    job = Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": x, "labels": x} for x in data],
        data_collator=default_data_collator,
        callbacks=[Watch()],
    )
    del model
    gc.collect()
    probe.row["loss"] = float(job.train().training_loss)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", required=True, type=Path)
    parser.add_argument("--row", type=Path)
    parser.add_argument("--go", type=Path, help="after the imports say READY and wait for this file")
    parser.add_argument("--alone", action="store_true", help="record what NVML counts on the card")
    options = parser.parse_args()
    case: cases.Case = json.loads(options.case.read_text(encoding="utf-8"))
    zero = case["ds"]["zero_optimization"]
    for section in (zero.get("offload_optimizer", {}), zero.get("offload_param", {})):
        if "nvme_path" in section:  # cases side by side would empty each other's folder
            section["nvme_path"] += "/" + case["name"]
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    imports(case)
    if options.go is not None:
        print("READY", flush=True)
        parent = os.getppid()
        while not options.go.exists():
            if os.getppid() != parent:
                return 1
            time.sleep(0.05)
    if CUDA:
        torch.cuda.set_device(local)
    probe = Probe(case, local, options.row if rank == 0 else None, options.alone)
    probe.row["world"] = int(os.environ["WORLD_SIZE"])
    try:
        import deepspeed
        import transformers

        probe.row["ds"], probe.row["transformers"] = deepspeed.__version__, transformers.__version__
        if case.get("lora"):
            import peft

            probe.row["peft"] = peft.__version__
        deepspeed.init_distributed()
        if CUDA:
            torch.cuda.init()
            probe.row["card"] = torch.cuda.get_device_name(local)
            probe.row["card_total"] = torch.cuda.get_device_properties(local).total_memory
        probe.phase("start")
        (trainer if case["loop"] == "hf" else plain)(case, probe, rank)
        probe.row["ok"] = True
    except Exception as e:
        probe.row["error"] = f"{type(e).__name__}: {e}"[:600]
        probe.row["traceback"] = traceback.format_exc()[-2500:]
        with contextlib.suppress(Exception):
            probe.phase("failed")
    probe.stopped.set()
    probe.row["seconds"] = round(time.time() - START, 1)
    probe.save()
    if rank == 0:
        print("RESULT " + json.dumps(probe.row), flush=True)
    else:
        print(probe.row.get("traceback", "done"), flush=True)
    sys.stdout.flush()
    os._exit(0 if probe.row["ok"] else 1)  # not through the teardown of process groups, which may hang


if __name__ == "__main__":
    main()
