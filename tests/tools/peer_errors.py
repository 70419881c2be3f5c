"""The figures of ``docs/accuracy.md``: our error beside that of other estimators, on the same measured rows.

    python tests/tools/peer_errors.py                 write the tables of the page again, in both languages
    python tests/tools/peer_errors.py --check         say whether they are up to date
    python tests/tools/peer_errors.py --ask --tools BIN --cookbook CLONE     ask the peers first

The rows are those of ``tests/data/gpu/h200*.jsonl``; of the blind ones our figures are those of ``predicted.json``. What
the peers answer is kept in ``tests/data/gpu/peers.json`` with their version, the date and the command, so that only
``--ask`` needs them: DeepSpeed and accelerate in this interpreter, ``vramcalc`` and ``canifinetune`` as commands in
the folder BIN, and ``calc/calc_transformer_mem.py`` of EleutherAI's cookbook in CLONE.

Each peer is asked about the rows that it says it covers, with the options that describe the row best, and is
compared with the figure that it says it computes; our error is shown on exactly those rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPO)]

import cases  # noqa: E402
from compare_rows import GiB, pairs, verdicts  # noqa: E402

from dstui.estimate.families import shape_from_config  # noqa: E402
from dstui.estimate.result import Range  # noqa: E402

DATA = REPO / "tests" / "data" / "gpu"
ANSWERS = DATA / "peers.json"
PREDICTED = DATA / "predicted.json"
"""What was expected of the blind rows (``compare_rows.py --predict``), as it was before they were measured."""
PAGES = {"en": REPO / "docs" / "accuracy.md", "zh": REPO / "docs" / "zh" / "accuracy.md"}
Row = dict[str, Any]


def rows() -> list[Row]:
    """Every measured row that has a result, ``set`` added: tuned, aside or blind (``cases.group``)."""
    found: dict[str, Row] = {}
    for path in sorted(DATA.glob("h200*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line) if line.strip() else {}
            if row.get("ok"):
                name = row["case"]["name"]
                found[name] = {**row, "set": cases.group(name)}
    return list(found.values())


def spans(row: Row) -> dict[str, tuple[Range, int]]:
    """``compare_rows.pairs``; of a blind row what was predicted before it was measured, not what would be now."""
    found = pairs(row)
    name = row["case"]["name"]
    if row["set"] != "blind" or not PREDICTED.exists():
        return found
    first = json.loads(PREDICTED.read_text(encoding="utf-8")).get(name, {})
    return {what: (Range(*first[what]), seen) for what, (_span, seen) in found.items() if what in first}


def zero(row: Row) -> dict[str, Any]:
    section: dict[str, Any] = row["case"]["ds"]["zero_optimization"]
    return section


def offloads(row: Row) -> bool:
    return any(
        zero(row).get(k, {}).get("device") in ("cpu", "nvme") for k in ("offload_optimizer", "offload_param")
    )


def optimizer(row: Row) -> str:
    return str(row["case"].get("client") or row["case"]["ds"].get("optimizer", {}).get("type", "")).lower()


def full(row: Row) -> bool:
    return not row["case"].get("lora") and not row["case"].get("quant")


def split(row: Row) -> str | None:
    """Why a tool that knows data parallelism only does not cover the row."""
    case = row["case"]
    return "sequence or tensor parallel" if case.get("sp", 1) > 1 or "tensor_parallel" in case["ds"] else None


def alone(row: Row) -> str | None:
    """Why a tool for one GPU without offload does not cover the row."""
    return "more than one GPU" if row["world"] > 1 else "offload" if offloads(row) else None


# --- DeepSpeed ---


def deepspeed_covers(row: Row) -> str | None:
    if zero(row)["stage"] < 2:
        return "stages 2 and 3 only"
    if not full(row):
        return "counts every parameter as trained"
    return split(row) or (None if "adam" in optimizer(row) else "counts the states of Adam")


def deepspeed_ask(row: Row, _o: argparse.Namespace) -> int:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    case = row["case"]
    section = zero(row)
    offload = section.get("offload_optimizer", {}).get("device") in ("cpu", "nvme")
    where = {
        "total_params": row["params"],
        "num_gpus_per_node": row["world"],
        "num_nodes": 1,
        "cpu_offload": offload,
    }
    if section["stage"] == 2:
        return int(estimate_zero2_model_states_mem_needs(**where)[1])
    model = cases.MODELS[case["model"]]
    return int(
        estimate_zero3_model_states_mem_needs(
            **where,
            largest_layer_params=model["vocab_size"] * model["hidden_size"],
            cpu_offload_params=section.get("offload_param", {}).get("device") in ("cpu", "nvme"),
            zero_init=bool(case.get("zero_init")),
        )[1]
    )


# --- accelerate ---


def accelerate_covers(row: Row) -> str | None:
    if not full(row):
        return "counts every parameter as trained"
    return alone(row) or (None if "adam" in optimizer(row) else "Adam only")


_MADE: dict[tuple[str, str], int] = {}


def accelerate_ask(row: Row, _o: argparse.Namespace) -> int:
    """``accelerate estimate-memory``; its look-up on the Hub answers that the model is there, because it is local."""
    from accelerate.commands import estimate as command

    case = row["case"]
    dtype = "float32" if case["prec"] == "fp32" else "float16"
    if (case["model"], dtype) not in _MADE:
        found = types.SimpleNamespace(library_name="transformers", config={})
        command.verify_on_hub = lambda *_a, **_k: found
        with tempfile.TemporaryDirectory() as folder:
            write_model(case, Path(folder))
            words = [folder, "--library_name", "transformers", "--dtypes", dtype]
            ((_dtype, _layer, _load, train),) = command.gather_data(
                command.estimate_command_parser().parse_args(words)
            )
        _MADE[case["model"], dtype] = int(max(train.values()))
    return _MADE[case["model"], dtype]


# --- vramcalc ---


def write_model(case: cases.Case, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(cases.MODELS[case["model"]]), encoding="utf-8")
    return path


def output(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout


def vramcalc_covers(row: Row) -> str | None:
    if not full(row):
        return "LoRA on the attention only"
    if row["case"].get("loss"):
        return "the loss of transformers only"
    return alone(row) or (None if "adam" in optimizer(row) else "adamw, or sgd with momentum")


def vramcalc_ask(row: Row, o: argparse.Namespace) -> int:
    case = row["case"]
    single = case["prec"] == "fp32"
    words = ["--dtype", case["prec"], "--precision", "pure" if single else "amp"]
    words += ["--batch", str(case["mb"]), "--seq", str(case["seq"]), "--attn", case["attn"].split("_")[0]]
    words += ["--grad-checkpoint"] if case["ckpt"] else []
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(case, Path(folder))
        text = output([str(o.tools / "vramcalc"), str(path), "--train", *words, "--json"])
    return int(json.loads(text)["estimate"]["total"])


# --- canifinetune ---


def canifinetune_covers(row: Row) -> str | None:
    case = row["case"]
    if case.get("targets", "all-linear") != "all-linear":
        return "other targets"
    if case.get("quant") and not case.get("kbit"):
        return "quantized weights only with what peft prepares"
    if case.get("loss"):
        return "the loss of transformers only: it claims nothing for others"
    if full(row) and case["prec"] != "fp32":
        return "no fp32 copy of the weights, which DeepSpeed keeps"
    return alone(row) or (None if "adam" in optimizer(row) or optimizer(row) == "sgd" else "other optimizer")


def canifinetune_ask(row: Row, o: argparse.Namespace) -> int:
    """The sum of its parts without the two that are a share of the card: 8 % overhead, 5 % safety."""
    case = row["case"]
    model = cases.MODELS[case["model"]]
    spec = {
        **{k: v for k, v in model.items() if k != "model_type"},
        "family": model["model_type"],
        "total_params": shape_from_config(model, case["model"], "measured").params,
    }
    quant = {None: "none", "nf4": "nf4", "int8": "int8"}[case.get("quant")]
    words = ["--method", "qlora" if case.get("quant") else "lora" if case.get("lora") else "full"]
    words += ["--quantization", quant]
    words += ["--lora-rank", str(case["lora"]), "--target-scope", "all_linear"] if case.get("lora") else []
    words += [
        "--base-dtype",
        case["prec"],
        "--micro-batch-size",
        str(case["mb"]),
        "--seq-len",
        str(case["seq"]),
    ]
    words += ["--gradient-checkpointing" if case["ckpt"] else "--no-gradient-checkpointing"]
    words += ["--attn", "flash_attention_2" if case["attn"].startswith("flash") else case["attn"]]
    kind = optimizer(row)
    words += [
        "--optimizer",
        "sgd" if kind == "sgd" else "adamw_torch" if case.get("client") else "adamw_torch_fused",
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        json.dump(spec, f)
        f.flush()
        words += ["--model", case["model"], "--override-json", f.name, "--offline", "--json"]
        text = output([str(o.tools / "canifinetune"), "estimate", "--gpu-vram-gb", "141", *words])
    memory = json.loads(text)["memory"]
    beside = memory["cuda_overhead_gb"] + memory["safety_margin_gb"]
    return int((memory["total_estimated_gb"] - beside) * GiB)


# --- EleutherAI's cookbook ---


def cookbook_covers(row: Row) -> str | None:
    if not full(row):
        return "counts every parameter as trained"
    if offloads(row):
        return "offload"
    if row["case"].get("sp", 1) > 1:
        return "sequence parallel"
    if not row["case"]["ckpt"] and row["case"]["attn"] != "eager":
        return "without checkpointing it counts attention matrices, which this attention does not keep"
    return None if "adam" in optimizer(row) or optimizer(row) == "muon" else "other optimizer"


def cookbook_ask(row: Row, o: argparse.Namespace) -> int:
    case = row["case"]
    model = cases.MODELS[case["model"]]
    single = case["prec"] == "fp32"
    accumulate = case["ds"].get("data_types", {}).get("grad_accum_dtype")
    words = {
        "--num-gpus": row["world"],
        "--tensor-parallel-size": case["ds"].get("tensor_parallel", {}).get("autotp_size", 1), "--zero-stage": zero(row)["stage"], "--batch-size-per-gpu": case["mb"],
        "--sequence-length": case["seq"], "--vocab-size": model["vocab_size"], "--hidden-size": model["hidden_size"],
        "--num-attention-heads": model["num_attention_heads"], "--num-layers": model["num_hidden_layers"],
        "--ffn-expansion-factor": model["intermediate_size"] / model["hidden_size"],
        "--num-mlp-linears": 2 if model["model_type"] in ("gpt_neox", "phi", "gpt2") else 3,
        "--kv-size-ratio": model.get("num_key_value_heads", model["num_attention_heads"]) / model["num_attention_heads"],
        "--zero-allgather-bucket-size": int(zero(row).get("allgather_bucket_size", 5e8)),
        "--zero3-max-live-params": int(zero(row).get("stage3_max_live_parameters", 1e9)),
        "--bytes-per-grad-ele": 4 if single or accumulate == "fp32" else 2,
        "--optimizer": "muon" if optimizer(row) == "muon" else "adamw",
    }  # fmt: skip
    source = output(["git", "-C", str(o.cookbook), "show", "HEAD:calc/calc_transformer_mem.py"])
    line = [sys.executable, "-c", source, *(str(w) for pair in words.items() for w in pair)]
    line += ["--checkpoint-activations"] if case["ckpt"] else []
    line += ["--disable-mixed-precision", "--low-prec-bytes-per-val", "4"] if single else []
    found = re.search(r"Per-GPU Memory Required for Training: ([\d.]+) GiB", output(line))
    assert found is not None
    return int(float(found.group(1)) * GiB)


@dataclass(frozen=True)
class Peer:
    """``covers`` says why not (None: it does); ``ask`` gives bytes or raises with what the tool said."""

    title: str
    command: str
    version: Callable[[argparse.Namespace], str]
    covers: Callable[[Row], str | None]
    ask: Callable[[Row, argparse.Namespace], int]
    computes: dict[str, str]


def installed(name: str) -> Callable[[argparse.Namespace], str]:
    def version(_o: argparse.Namespace) -> str:
        from importlib.metadata import version as of

        return of(name)

    return version


def tool(name: str) -> Callable[[argparse.Namespace], str]:
    def version(o: argparse.Namespace) -> str:
        code = f"from importlib.metadata import version; print(version({name!r}))"
        return output([str(o.tools / "python"), "-c", code]).strip()

    return version


def revision(o: argparse.Namespace) -> str:
    return output(["git", "-C", str(o.cookbook), "log", "-1", "--format=commit %h"]).strip()


PEERS: dict[str, Peer] = {
    "deepspeed": Peer(
        "DeepSpeed",
        "estimate_zero2_model_states_mem_needs(...), estimate_zero3_model_states_mem_needs(...)",
        installed("deepspeed"),
        deepspeed_covers,
        deepspeed_ask,
        {
            "en": "Parameters, gradients and Adam's states at stages 2 and 3, with offload to CPU and over several GPUs; no activations, no buffers. "
            "Rows of these stages that train every parameter with Adam.",
            "zh": "第 2、3 阶段的参数、梯度和 Adam 状态，含 CPU 卸载和多卡；不含激活和缓冲区。取这两个阶段中用 Adam 训练全部参数的行。",
        },
    ),
    "accelerate": Peer(
        "accelerate",
        "accelerate estimate-memory MODEL --library_name transformers --dtypes float16|float32",
        installed("accelerate"),
        accelerate_covers,
        accelerate_ask,
        {
            "en": "\"Training using Adam\" on one device, batch size 1, from the model's size alone. Rows of one GPU without offload that train every "
            "parameter with Adam.",
            "zh": "单设备、批量 1、仅由模型大小得出的 “Training using Adam”。取单卡、无卸载、用 Adam 训练全部参数的行。",
        },
    ),
    "vramcalc": Peer(
        "vramcalc",
        "vramcalc CONFIG --train --dtype D --precision amp|pure --batch N --seq N --attn A [--grad-checkpoint] --json",
        tool("vramcalc"),
        vramcalc_covers,
        vramcalc_ask,
        {
            "en": "Peak allocated memory of Llama-like models on one GPU, by part; `amp` (fp32 weights under autocast) for bf16 and fp16 rows, "
            "because it is what it offers for mixed precision; ZeRO is out of its scope. Rows of one GPU without offload or LoRA, with Adam.",
            "zh": "类 Llama 模型在单卡上的已分配峰值，分项给出；bf16 和 fp16 的行用 `amp`（fp32 权重加 autocast），这是它提供的混合精度；ZeRO 不在其范围内。"
            "取单卡、无卸载、无 LoRA、用 Adam 的行。",
        },
    ),
    "canifinetune": Peer(
        "canifinetune",
        "canifinetune estimate --method full|lora|qlora --quantization Q --base-dtype D --micro-batch-size N --seq-len N --attn A --optimizer O "
        "--override-json MODEL --gpu-vram-gb 141 --offline --json",
        tool("canifinetune"),
        canifinetune_covers,
        canifinetune_ask,
        {
            "en": "The memory of a fine-tune on one GPU, by part, without an fp32 copy of bf16 weights; DeepSpeed is out of its scope. Compared without "
            "its two parts that are a share of the card (overhead 8 %, safety 5 %). Rows of one GPU without offload: LoRA or QLoRA on all linear layers, or fp32.",
            "zh": "单卡微调的显存，分项给出，不计 bf16 权重的 fp32 副本；DeepSpeed 不在其范围内。比较时去掉按显卡容量取比例的两项（开销 8 %、安全余量 5 %）。"
            "取单卡、无卸载的行：对所有线性层做 LoRA 或 QLoRA，或 fp32。",
        },
    ),
    "cookbook": Peer(
        "EleutherAI cookbook",
        "calc_transformer_mem.py --num-gpus N --zero-stage S --num-layers N ... [--checkpoint-activations]",
        revision,
        cookbook_covers,
        cookbook_ask,
        {
            "en": "Training memory per GPU with ZeRO 0 to 3, its buckets and live parameters; dimensions, 3 MLP matrices and the share of key/value heads "
            "given by hand. It counts attention matrices unless activations are checkpointed. Rows without offload that train every parameter with Adam or "
            "Muon; without checkpointing only those of eager attention, which keeps these matrices.",
            "zh": "每卡训练显存，含 ZeRO 0 至 3 阶段、通信桶和驻留参数；维度、3 个 MLP 矩阵和键值头的比例手工给出。不做激活重算时它会计入注意力矩阵。取无卸载、用 Adam 或 Muon 训练全部参数的行；"
            "不做激活重算的行只取 eager 注意力，它确实保留这些矩阵。",
        },
    ),
}  # fmt: skip


def ask(measured: list[Row], options: argparse.Namespace) -> None:
    """Ask every peer that is here about every row; keep what it says, or why it was not asked."""
    kept: dict[str, Any] = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}
    peers, answers = kept.setdefault("peers", {}), kept.setdefault("answers", {})
    for name, peer in PEERS.items():
        if name in ("vramcalc", "canifinetune") and (
            options.tools is None or not (options.tools / name).exists()
        ):
            print(f"{name}: not in --tools, its answers stay as they were")
            continue
        if name == "cookbook" and options.cookbook is None:
            print(f"{name}: no --cookbook, its answers stay as they were")
            continue
        peers[name] = {
            "name": peer.title,
            "version": peer.version(options),
            "date": datetime.date.today().isoformat(),
            "command": peer.command,
        }
        asked = 0
        for row in measured:
            reason = peer.covers(row)
            answer: int | str = f"not asked: {reason}"
            if reason is None:
                try:
                    answer = peer.ask(row, options)
                    asked += 1
                except RuntimeError as e:
                    answer = f"refused: {e}"
            answers.setdefault(row["case"]["name"], {})[name] = answer
        print(f"{name} {peers[name]['version']}: {asked} answers")
    names = {row["case"]["name"] for row in measured}
    kept["answers"] = {n: answers[n] for n in sorted(names & set(answers))}
    fresh = ANSWERS.with_suffix(".new")
    fresh.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.move(fresh, ANSWERS)


# --- the page ---

TEXT: dict[str, dict[str, str]] = {
    "zh": {
        "rows": "行", "figure": "数值", "count": "行数", "mean": "平均", "median": "中位数", "worst": "最差",
        "in range": "在区间内", "looked at": "参考过", "set aside": "搁置", "blind": "盲测", "all": "全部",
        "GPU, allocated": "GPU 已分配", "GPU, reserved": "GPU 保留", "GPU, device": "GPU 设备", "host RAM of a rank": "每 rank 主机内存",
        "setting": "设置", "runs out at": "耗尽于", "runs at": "可运行于", "estimator": "估算器", "asked": "询问的行",
        "dstui, same rows": "dstui，相同的行", "measured": "实测", "tool": "工具", "computes": "计算什么；哪些行", "of": "/",
        "version, date": "版本、日期", "command": "命令", "fits": "放得下", "tight": "偏紧", "no": "放不下", "unknown": "未知", "right": "正确",
    }
}  # fmt: skip
SETS = {"tuned": "looked at", "aside": "set aside", "blind": "blind"}
FIGURES = {
    "allocated": "GPU, allocated",
    "reserved": "GPU, reserved",
    "device": "GPU, device",
    "host": "host RAM of a rank",
}


def percent(share: float, digits: int = 1) -> str:
    """Signed; nothing is ``-0``."""
    return f"{round(100 * share, digits) + 0.0:+.{digits}f} %"


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(list(b) for b in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures(errors: list[float]) -> list[str]:
    """Count, mean, median and worst of errors (shares), and the share within 5 and 10 %."""
    size = [abs(e) for e in errors]
    within = [f"{100 * sum(s <= limit for s in size) / len(size):.0f} %" for limit in (0.05, 0.10)]
    return [
        str(len(size)),
        f"{100 * statistics.mean(size):.2f} %",
        f"{100 * statistics.median(size):.2f} %",
        percent(max(errors, key=abs)),
        *within,
    ]


def tables(measured: list[Row], kept: dict[str, Any], language: str) -> dict[str, str]:
    """The generated parts of the page, by name."""

    def say(text: str) -> str:
        return TEXT.get(language, {}).get(text, text)

    def of(a: int, b: int) -> str:
        return f"{a} {say('of')} {b}"

    found = {r["case"]["name"]: spans(r) for r in measured}
    numbers = [say(w) for w in ("count", "mean", "median", "worst")] + ["≤ 5 %", "≤ 10 %"]
    ours = []
    sets = [k for k in SETS if any(r["set"] == k for r in measured)]
    for kind in sets:
        for what, label in FIGURES.items():
            these = [
                found[r["case"]["name"]][what]
                for r in measured
                if r["set"] == kind and what in found[r["case"]["name"]]
            ]
            if these:
                errors = [span.expected / seen - 1 for span, seen in these]
                inside = sum(span.low <= seen <= span.high for span, seen in these)
                ours.append([say(SETS[kind]), say(label), *figures(errors), of(inside, len(these))])

    limits, right = [], {k: [0, 0] for k in sets}
    for r in measured:
        asked = verdicts(r)
        if not asked:
            continue
        cells = [say(v) if good else f"**{say(v)} ✗**" for _share, v, good in asked]
        right[r["set"]][0] += sum(good for _share, _verdict, good in asked)
        right[r["set"]][1] += len(asked)
        fails, works = (f"{r['threshold'][k] / GiB:.2f}" for k in ("fails", "works"))
        limits.append([f"`{r['case']['name']}`", say(SETS[r["set"]]), fails, works, *cells])
    head = ["setting", "rows", "runs out at", "runs at"]
    scale = ["-10 %", "-3 %", "+3 %", "+10 %"]  # as compare_rows.verdicts asks
    sums = [[say(SETS[k]), of(*right[k])] for k in sets if right[k][1]]

    def beside(chosen: list[Row]) -> list[list[str]]:
        out = []
        for name, peer in PEERS.items():
            answers = {
                r["case"]["name"]: kept["answers"].get(r["case"]["name"], {}).get(name) for r in chosen
            }
            these = [r for r in chosen if isinstance(answers[r["case"]["name"]], int)]
            if these:
                theirs = [answers[r["case"]["name"]] / r["peak_alloc"] - 1 for r in these]
                mine = [
                    found[r["case"]["name"]]["allocated"][0].expected / r["peak_alloc"] - 1 for r in these
                ]
                out += [[peer.title, *figures(theirs)], [say("dstui, same rows"), *figures(mine)]]
        return out

    used = [
        [
            peer.title,
            f"{kept['peers'][name]['version']}, {kept['peers'][name]['date']}",
            f"`{kept['peers'][name]['command']}`".replace("|", "\\|"),
            peer.computes[language],
        ]
        for name, peer in PEERS.items()
    ]

    every = []
    for r in measured:
        name = r["case"]["name"]
        line = [f"`{name}`", say(SETS[r["set"]]), f"{r['peak_alloc'] / GiB:.2f}"]
        line.append(percent(found[name]["allocated"][0].expected / r["peak_alloc"] - 1))
        for peer_name in PEERS:
            answer = kept["answers"].get(name, {}).get(peer_name)
            line.append(percent(answer / r["peak_alloc"] - 1, 0) if isinstance(answer, int) else "-")
        every.append(line)
    return {
        "ours": table([say("rows"), say("figure"), *numbers, say("in range")], ours),
        "verdicts": table([say("rows"), say("right")], sums),
        "limits": table([*map(say, head), *scale], limits),
        "peers": table([say("estimator"), *numbers], beside(measured)),
        "blind": table([say("estimator"), *numbers], beside([r for r in measured if r["set"] == "blind"])),
        "asked": table([say(w) for w in ("tool", "version, date", "command", "computes")], used),
        "rows": table([say("setting"), say("rows"), f"{say('measured')} GiB", "dstui", *(p.title for p in PEERS.values())], every),
    }  # fmt: skip


def page(text: str, made: dict[str, str]) -> str:
    """``text`` with what stands between ``<!-- NAME -->`` and ``<!-- /NAME -->`` written again."""
    for name, part in made.items():
        text, n = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda m, p=part: m[1] + "\n" + p + "\n\n" + m[2],
            text,
            flags=re.S,
        )
        if n != 1:
            raise SystemExit(f"the page needs one place <!-- {name} --> ... <!-- /{name} -->")
    return text


def stale(measured: list[Row] | None = None) -> dict[str, str]:
    """The pages that are not up to date, by language, as they should be."""
    measured = rows() if measured is None else measured
    kept = json.loads(ANSWERS.read_text(encoding="utf-8"))
    wanted = {k: page(p.read_text(encoding="utf-8"), tables(measured, kept, k)) for k, p in PAGES.items()}
    return {k: text for k, text in wanted.items() if text != PAGES[k].read_text(encoding="utf-8")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 when a page is stale"
    )
    parser.add_argument("--ask", action="store_true", help="ask the peers first")
    parser.add_argument("--tools", type=Path, metavar="BIN", help="folder with vramcalc and canifinetune")
    parser.add_argument("--cookbook", type=Path, metavar="CLONE", help="clone of EleutherAI's cookbook")
    options = parser.parse_args()
    if options.ask:
        ask(rows(), options)
    found = stale()
    for language, text in found.items():
        if not options.check:
            PAGES[language].write_text(text, encoding="utf-8")
        print(f"{PAGES[language].relative_to(REPO)}: {'stale' if options.check else 'written'}")
    return 1 if options.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
