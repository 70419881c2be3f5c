"""What must hold on a machine with real GPUs; prints Markdown, exit code 1 when something does not.

    python tests/tools/gpu_acceptance.py [detect] [demo] [oom] [screen]     default: all

- detect: every figure of `dstui detect` that nvidia-smi also shows is equal;
- demo: the bundled GPT at stages 0-3 with every legal offload; the loss falls; prediction beside measurement;
- oom: a CUDA out of memory made on purpose is named as such by `dstui diagnose`;
- screen: the wizard and the monitor in a pty on this machine, as text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "dstui" / "examples" / "tiny_gpt.py"
GiB = 1 << 30
failures: list[str] = []


def dstui(*words: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dstui", *words], capture_output=True, text=True, timeout=timeout, cwd=REPO
    )


def expect(ok: bool, what: str) -> str:
    if not ok:
        failures.append(what)
    return "ok" if ok else "**DIFFERS**"


def smi(fields: str) -> list[list[str]]:
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [[c.strip() for c in line.split(",")] for line in out.stdout.splitlines() if line.strip()]


def detect() -> None:
    start = time.perf_counter()
    facts = json.loads(dstui("detect", "--json").stdout)
    took = time.perf_counter() - start
    print(
        f"\n## detect against nvidia-smi ({took:.2f} s)\n\n| card | field | dstui | nvidia-smi | |\n|---|---|---|---|---|"
    )
    fields = {
        "uuid": "uuid",
        "name": "name",
        "memory_total": "memory.total",
        "memory_free": "memory.free",
        "compute_capability": "compute_cap",
        "pcie_generation": "pcie.link.gen.gpucurrent",
        "pcie_generation_max": "pcie.link.gen.max",
        "pcie_width": "pcie.link.width.current",
        "pcie_width_max": "pcie.link.width.max",
        "mig_enabled": "mig.mode.current",
    }
    rows = smi("index," + ",".join(fields.values()))
    print("cards:", len(facts["gpus"]), expect(len(facts["gpus"]) == len(rows), "number of cards"))
    for gpu, row in zip(facts["gpus"], rows, strict=False):
        for (ours, _theirs), value in zip(fields.items(), row[1:], strict=True):
            mine = gpu[ours]
            shown: object = mine
            if ours.startswith("memory"):
                same = mine is not None and abs(mine / (1 << 20) - float(value)) <= (
                    1 if ours == "memory_total" else 64
                )
                shown = None if mine is None else round(mine / (1 << 20))
            elif ours == "compute_capability":
                shown = ".".join(map(str, mine or ()))
                same = shown == value
            elif ours == "mig_enabled":
                same = {"Disabled": False, "Enabled": True}.get(value) == mine
            else:
                same = str(mine) == value or value in ("[N/A]", "N/A", "[Not Supported]")
            print(f"| {gpu['index']} | {ours} | {shown} | {value} | {expect(same, ours)} |")
    driver = smi("driver_version")[0][0]
    print(f"| - | driver | {facts['driver']} | {driver} | {expect(facts['driver'] == driver, 'driver')} |")
    apps = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    ours_busy = [[p["pid"] for p in g["processes"] or []] for g in facts["gpus"]]
    print("\nprocesses:", ours_busy, "nvidia-smi:", [a for a in apps if a.strip()])
    print("cuda driver:", facts["cuda_driver"], " unknown:", json.dumps(facts["unknown"], indent=1))
    print("links:", [(g["index"], g["nvlink_peers"], g["p2p_peers"], g["numa_node"]) for g in facts["gpus"]])
    print(subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout)
    print(dstui("detect").stdout)


def demo(ranks: int) -> None:
    from dstui.runs.store import find_run
    from dstui.runs.view import RunView

    print(
        "\n## demo\n\n| stage | offload | ranks | exit | seconds | loss | "
        "allocated GiB predicted / measured | reserved | device | host |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for stage in range(4):
        for offload in ("none", "optimizer", "both"):
            if (stage == 0 and offload != "none") or (stage < 3 and offload == "both"):
                continue
            start = time.perf_counter()
            words = (
                "demo",
                "--ranks",
                str(ranks),
                "--stage",
                str(stage),
                "--offload",
                offload,
                "--steps",
                "40",
            )
            out = dstui(*words, "--plain", "--json")
            took = time.perf_counter() - start
            label = f"demo stage {stage} offload {offload}"
            try:
                view = RunView(find_run(json.loads(out.stdout.splitlines()[0])["run"])).poll()
            except (IndexError, ValueError):
                print(label, expect(False, label), out.stdout[-500:], out.stderr[-1500:])
                continue
            first, last = (view.losses[0][1], view.losses[-1][1]) if view.losses else (0.0, 0.0)
            fell = expect(out.returncode == 0 and last < first * 0.5, label)
            pairs = {c.what: c for c in view.comparisons}
            cells = []
            for what in ("allocated", "reserved", "device", "host"):
                c = pairs.get(what)
                cells.append(
                    "-"
                    if c is None
                    else f"{(c.expected or 0) / GiB:.2f} / {'?' if c.measured is None else f'{c.measured / GiB:.2f}'}"
                )
            print(
                f"| {stage} | {offload} | {ranks} | {out.returncode} | {took:.0f} | {first:.2f} -> {last:.2f} {fell} | "
                + " | ".join(cells)
                + " |",
                flush=True,
            )
    print(dstui("watch", "last", "--once").stdout)
    print(dstui("runs").stdout)


def oom() -> None:
    print("\n## a CUDA out of memory, made on purpose\n")
    config = Path(tempfile.mkdtemp()) / "ds_config.json"
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 64,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "zero_optimization": {"stage": 2},
            }
        )
    )
    words = ["--hidden", "6144", "--layers", "24", "--seq", "2048", "--steps", "4"]
    out = dstui(
        "run", "--config", str(config), "--num-gpus", "1", "--wait", "--no-preflight", "--", str(TINY), *words
    )
    print("run --wait: exit", out.returncode, expect(out.returncode == 1, "oom run fails"))
    print(out.stdout[-600:], out.stderr[-600:])
    answer = json.loads(dstui("diagnose", "last", "--json").stdout)
    code = (answer["cause"] or {}).get("code")
    print(json.dumps(answer, indent=1)[:3000])
    named = "memory" in json.dumps(answer["cause"]).lower() or "oom" in json.dumps(answer["cause"]).lower()
    print("cause:", code, expect(bool(named), "oom is named"))
    print(dstui("diagnose", "last").stdout)


def screen() -> None:
    import pexpect
    import pyte

    print("\n## the TUI in a pty\n")
    display = pyte.Screen(80, 24)
    stream = pyte.ByteStream(display)
    env = dict(os.environ, TERM="xterm-256color", LANG="C.UTF-8")
    folder = tempfile.mkdtemp()
    child = pexpect.spawn(sys.executable, ["-m", "dstui"], dimensions=(24, 80), env=env, cwd=folder)
    total = 0

    def settle(seconds: float) -> int:
        nonlocal total
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            try:
                data = child.read_nonblocking(65536, 0.1)
            except (pexpect.TIMEOUT, pexpect.EOF):
                continue
            stream.feed(data)
            count += len(data)
        total += count
        return count

    def shot(title: str) -> None:
        print(f"--- {title}\n" + "\n".join(line.rstrip() for line in display.display), flush=True)

    settle(4)
    shot("start")
    child.send("\r")
    settle(3)
    shot("machine")
    child.send("A")
    settle(3)
    shot("review")
    child.send("\r")
    settle(45)
    per_tick = settle(10) / 10
    shot(f"monitor, {per_tick:.0f} bytes/s")
    child.send("q")
    settle(3)
    shot("after q")
    child.close(force=True)


def main() -> int:
    os.environ.setdefault("DSTUI_STATE_HOME", tempfile.mkdtemp(prefix="dstui-state-"))
    sys.path.insert(0, str(REPO))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    wanted = sys.argv[1:] or ["detect", "demo", "oom", "screen"]
    ranks = len(smi("index"))
    for name in wanted:
        {"detect": detect, "demo": lambda: demo(ranks), "oom": oom, "screen": screen}[name]()
    print("\nfailures:", failures or "none")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
