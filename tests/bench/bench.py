"""The budgets of dstui, measured, beside the tools people use today.

    make bench                     every figure, as a Markdown table
    python tests/bench/bench.py paint keys       some of them: processes, throughput, paint, keys

Times are wall clock of whole cold processes (minimum and median of several runs): they depend on the
machine, so compare rows of one run with each other. Bytes and memory are exact.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.pty.harness import Terminal

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
BIN = Path(sys.executable).parent
DSTUI = [sys.executable, "-m", "dstui"]
RUNS = int(os.environ.get("BENCH_RUNS", "7"))
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def process(argv: list[str], runs: int = RUNS, ok: tuple[int, ...] = (0, 1, 2)) -> tuple[float, float, float]:
    """(minimum s, median s, peak RSS in MB of the process itself) of a whole cold process."""
    walls, rss = [], 0
    for _ in range(runs):
        start = time.perf_counter()
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _pid, status, usage = os.wait4(child.pid, 0)
        walls.append(time.perf_counter() - start)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in ok:
            raise SystemExit(f"{argv}: exit {child.returncode}")
        rss = max(rss, usage.ru_maxrss)
    return min(walls), statistics.median(walls), rss * 1024 / 1e6


def paint(
    argv: list[str], size: tuple[int, int], needle: str, limit: float = 30.0
) -> tuple[float, int, float, float]:
    """(s to the first full frame, bytes to it, bytes/s at rest over 5 s, RSS MB) of a terminal program."""
    import pexpect
    import psutil
    import pyte

    env = dict(os.environ, TERM="xterm-256color", COLORTERM="truecolor", LANG="C.UTF-8")
    screen = pyte.Screen(size[0], size[1])
    stream = pyte.ByteStream(screen)
    start = time.perf_counter()
    child = pexpect.spawn(argv[0], argv[1:], dimensions=(size[1], size[0]), env=env, timeout=1)
    total, shown = 0, None

    def read(wait: float) -> int:
        try:
            data = child.read_nonblocking(65536, wait)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return 0
        stream.feed(data)
        return len(data)

    while time.perf_counter() - start < limit:
        total += read(0.02)
        if needle in "\n".join(screen.display):
            shown = time.perf_counter() - start
            break
    first = total
    settle = time.perf_counter()
    while time.perf_counter() - settle < 3:
        read(0.1)
    rest, since = 0, time.perf_counter()
    while time.perf_counter() - since < 5:
        rest += read(0.1)
    rss = psutil.Process(child.pid).memory_info().rss / 1e6
    child.close(force=True)
    if shown is None:
        raise SystemExit(f"{argv}: {needle!r} never appeared:\n" + "\n".join(screen.display))
    return shown, first, rest / 5, rss


def row(*cells: object) -> None:
    print("| " + " | ".join(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def cold(name: str, argv: list[str], budget: str, runs: int = RUNS) -> None:
    low, mid, rss = process(argv, runs)
    row(name, low, mid, f"{rss:.0f}", budget)


def bench_processes(folder: Path) -> None:
    config = folder / "ds_config.json"
    config.write_text(json.dumps(CONFIG))
    print("| cold process | min s | median s | RSS MB | budget |\n|---|---|---|---|---|")
    cold("python -c pass", [sys.executable, "-c", "pass"], "")
    cold("dstui check FILE", [*DSTUI, "check", str(config), "--deepspeed", "0.19.8"], "0.15 s, 30 MB")
    cold("dstui detect", [*DSTUI, "detect", "--json"], "0.25 s")
    estimate = [
        *DSTUI,
        "estimate",
        str(config),
        "--model",
        "llama-3.1-8b",
        "--gpus",
        "8x80GiB",
        "--ram",
        "512GiB",
    ]
    cold("dstui estimate, one cell", estimate, "0.2 s")
    cold("dstui estimate --grid", [*estimate, "--grid"], "1.0 s")
    if (BIN / "ds_report").exists():
        cold("ds_report", [str(BIN / "ds_report")], "peer", 3)
        cold("import deepspeed", [sys.executable, "-c", "import deepspeed"], "peer", 3)
    if (BIN / "accelerate").exists():
        cold("accelerate env", [str(BIN / "accelerate"), "env"], "peer", 3)
        cold(
            "accelerate estimate-memory --help",
            [str(BIN / "accelerate"), "estimate-memory", "--help"],
            "peer",
            3,
        )


def bench_throughput(folder: Path) -> None:
    config = folder / "many.json"
    config.write_text(json.dumps(CONFIG))
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from dstui.config.document import Document\n"
        "from dstui.rules.engine import Context, check_document\n"
        f"text = Path({str(config)!r}).read_text()\n"
        "context = Context(release='0.19.8', world_size=8)\n"
        "for _ in range(20): check_document(Document.parse(text), context)\n"
        "n, start = 500, time.perf_counter()\n"
        "for _ in range(n): check_document(Document.parse(text), context)\n"
        "print(n / (time.perf_counter() - start))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    print(f"\ncheck, warm: {float(out.stdout):.0f} files/s a core (budget 250)")


def bench_paint(folder: Path) -> None:
    os.chdir(folder)
    print(
        "\n| terminal program | size | first paint s | bytes | bytes/s at rest | RSS MB | budget |\n|---|---|---|---|---|---|---|"
    )
    for size in ((80, 24), (120, 40)):
        results = [paint(DSTUI, size, "dstui") for _ in range(5)]
        best = min(results)
        median = statistics.median(r[0] for r in results)
        row(
            "dstui",
            f"{size[0]}x{size[1]}",
            f"{best[0]:.2f} (median {median:.2f})",
            best[1],
            f"{max(r[2] for r in results):.0f}",
            f"{best[3]:.0f}",
            "0.6 s, 50 MB, 0 B/s",
        )
    if (BIN / "accelerate").exists():
        shown, count, rest, rss = paint([str(BIN / "accelerate"), "config"], (80, 24), "compute environment")
        row("accelerate config", "80x24", f"{shown:.2f}", count, f"{rest:.0f}", f"{rss:.0f}", "peer")


def delay(terminal: Terminal, keys: tuple[str, ...], ready: Callable[[], bool], limit: float = 20.0) -> float:
    """ms from sending ``keys`` to the first moment at which what was drawn satisfies ``ready``."""
    start = time.perf_counter()
    terminal.press(*keys)
    while not ready():
        if time.perf_counter() - start > limit:
            raise SystemExit(f"{keys}: nothing came within {limit:.0f} s:\n{terminal.text}")
        terminal.read_some()
    return 1000 * (time.perf_counter() - start)


def drawn(terminal: Terminal) -> Callable[[], bool]:
    """Whether any byte came since now."""
    before = len(terminal.raw)
    return lambda: len(terminal.raw) > before


def right(terminal: Terminal) -> str:
    """The panel beside the form, at 120 columns."""
    return "\n".join(line[80:] for line in terminal.screen.display)


def spread(name: str, size: str, values: list[float], budget: str) -> None:
    """``values`` in ms. Fewer than one in twenty may be beyond the 95th percentile."""
    ranked = sorted(values)
    p95 = ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))]
    row(name, size, len(values), *(f"{v:.0f}" for v in (statistics.median(values), p95, ranked[-1])), budget)


def bench_keys(folder: Path) -> None:
    """The wizard of a 7B model on a described machine with eight cards, on a real pty."""
    from tests.pty.harness import Terminal
    from tests.walks import machine

    rounds = max(20, 6 * RUNS)
    (folder / "facts.json").write_text(json.dumps(machine("8x80", sys.executable).to_json()))
    (folder / "train.py").write_text("import deepspeed\ndeepspeed.initialize()\n")
    print("\n| key, to what it draws | size | keys | median ms | p95 ms | worst ms | budget |")
    print("|---|---|---|---|---|---|---|")
    for columns, rows in ((80, 24), (120, 40)):
        size = f"{columns}x{rows}"
        with Terminal(["--facts", "facts.json"], columns=columns, rows=rows, cwd=folder) as t:
            t.wait("Recommended", 30)
            t.settle()
            t.press("enter")
            t.wait("step 1 of 10", 30)
            t.press("2", "down", "space", "3", *"qwen2.5-7b", "enter")
            t.wait("7.62B", 30)
            t.press("down")  # from the number: there a digit is typed, not a step chosen
            t.settle(1.0)
            moves, steps, values = [], [], []
            for n in range(rounds):
                moves.append(delay(t, ("up" if n % 2 else "down",), drawn(t)))
                t.settle(0.1)
            spread("cursor: repaint", size, moves, "60")
            if columns >= 120:
                # Each length is new, so nothing of the answer is remembered.
                busy: list[float] = []
                for n in range(2 * rounds):
                    t.press("up", *str(1024 + 8 * n))
                    t.settle(0.2)
                    told = f"{1024 + 8 * n} tokens"  # among the panel's assumptions
                    if n < rounds:
                        values.append(delay(t, ("enter",), lambda told=told: told in right(t)))
                    else:
                        delay(t, ("enter",), drawn(t))
                        busy.append(delay(t, ("down",), drawn(t)))
                        t.press("up")
                    t.settle(0.4)
                spread("new sequence length: estimate in the panel", size, values, "150")
                spread("cursor: repaint while an estimate is computed", size, busy, "60")
            t.press("4")
            t.settle(1.0)
            texts: list[str] = []
            changes: list[float] = []
            keys = [("down", "space"), ("up", "space")]

            def status() -> str:
                return t.screen.display[-4]

            for pair in keys * 2:  # what each of the two answers looks like
                t.press(*pair)
                t.settle(1.0)
                texts.append(status())
            if texts[0] == texts[1] or texts[:2] != texts[2:]:
                raise SystemExit("two stages look the same:\n" + "\n".join(texts))
            for n in range(rounds):
                changes.append(delay(t, keys[n % 2], lambda want=texts[n % 2]: status() == want))
                t.settle(0.3)
            spread("other stage: estimate in the status line", size, changes, "150")
            sent = []
            for n in range(rounds):
                key = "ctrl+n" if n // 5 % 2 == 0 else "ctrl+p"
                begin = len(t.raw)
                steps.append(delay(t, (key,), drawn(t)))
                t.settle(0.3)
                sent.append(len(t.raw) - begin)
            spread("step: repaint", size, steps, "60")
            begin = len(t.raw)
            t.read(5.0)
            row("bytes: largest step, 5 s at rest", size, "", "", max(sent), len(t.raw) - begin, "10 kB, 0")
            row("resident MB", size, "", "", f"{t.rss / 1e6:.0f}", "", "")
            t.press("ctrl+q")
            row("quit ms", size, "", "", f"{1000 * t.gone():.0f}", "", "2000")


LOG_BYTES = 1 << 30


def big_log(path: Path) -> int:
    """A log of 1 GiB in the very format of a run; returns its last step."""
    mark = "#######"
    lines = "".join(
        f"[2026-11-29 19:54:37,726] [INFO] [logging.py:123:log_dist] [Rank 0] step={mark}{n:03d}, skipped=0, "
        f"lr=[0.0003], mom=[(0.9, 0.999)]\nstep {mark}{n:03d} loss 2.{n:03d} lr 0.0003 tokens/s 24000\n"
        for n in range(1000)
    ).encode()
    with path.open("wb") as f:
        for block in range(-(-LOG_BYTES // len(lines))):
            f.write(lines.replace(mark.encode(), b"%07d" % block))
    return block * 1000 + 999


def bench_join(folder: Path) -> None:
    from tests.pty.harness import Terminal
    from tests.run_tools import FakeRun

    run = FakeRun(8, total=20_000_000, now=time.time() - 61)
    for _ in range(60):
        run.tick()
    step = big_log(run.run.out_log)
    size = run.run.out_log.stat().st_size / 1e9
    code = (
        "import sys, time\n"
        "from dstui.runs.view import RunView\n"
        "from dstui.runs.store import find_run\n"
        "run = find_run(sys.argv[1])\n"
        "start, cpu = time.perf_counter(), time.process_time()\n"
        "shot = RunView(run).poll()\n"
        "print(time.perf_counter() - start, shot.step, len(shot.losses), time.process_time() - cpu)"
    )
    seconds, cpu = [], []
    for _ in range(RUNS):
        out = subprocess.run(
            [sys.executable, "-c", code, run.id], capture_output=True, text=True, check=True, cwd=REPO
        ).stdout.split()
        assert int(out[1]) == step and int(out[2]) > 50, out
        seconds.append(float(out[0]))
        cpu.append(float(out[3]))
    print(f"\n| joining a log of {size:.2f} GB | min s | median s | RSS MB | budget |\n|---|---|---|---|---|")
    row("RunView.poll, first", min(seconds), statistics.median(seconds), "", "1 s")
    row("its CPU time", min(cpu), statistics.median(cpu), "", "")
    cold("dstui watch RUN --once", [*DSTUI, "watch", run.id, "--once"], "1 s")
    for key, words in (("", "tokens/s"), ("l", "following the end")):
        with Terminal(["watch", run.id], cwd=folder) as t:
            start = time.perf_counter()
            t.wait("tokens/s", 30)
            if key:
                start = time.perf_counter()
                t.press(key)
                t.wait(words, 30)
            row("the monitor" if not key else "its log view", time.perf_counter() - start, "", "", "1 s")


PARTS: dict[str, Callable[[Path], None]] = {
    "processes": bench_processes,
    "throughput": bench_throughput,
    "paint": bench_paint,
    "keys": bench_keys,
    "join": bench_join,
}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="dstui-bench-"))
    os.environ.update(DSTUI_STATE_HOME=str(folder / "state"), DSTUI_CONFIG_HOME=str(folder / "config"))
    try:
        for name in sys.argv[1:] or PARTS:
            PARTS[name](folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
