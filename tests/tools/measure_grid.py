"""Measures many cases on this machine's GPUs, several processes at a time where they fit together.

    python tests/tools/measure_grid.py --cases one|two|FILE.json --out FOLDER [--budget SECONDS] [--jobs N]
                                       [--only a,b] [--skip-done] [--list]

Needs torch, deepspeed, transformers, accelerate and peft in the interpreter that runs it. DeepSpeed's kernels are
compiled first, once, beside the cases that need none. What a case will take is predicted by dstui. Processes start
ahead and import; they touch a GPU only when told to go, once their peaks fit beside the running cases. Each row goes to ``FOLDER/results.jsonl`` when its case
ends; at the end of the budget running cases are killed and what they had measured is kept, marked ``killed``.
No case is tried twice. Cases marked ``alone`` run at the end with nothing beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import cases  # noqa: E402

GiB = 1 << 30
ENV = {
    "TORCH_CUDA_ARCH_LIST": "9.0",
    "OMP_NUM_THREADS": "4",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass
class Job:
    case: cases.Case
    gpu: int
    """Predicted bytes of each card."""
    host: int
    """Predicted bytes of RAM, all ranks."""
    started: float = 0.0
    """When its processes started, then when they were told to go."""
    going: bool = False
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[TextIO] = field(default_factory=list)
    uneven: float | None = None
    """Since when a rank waits for one that is over."""

    @property
    def name(self) -> str:
        return str(self.case["name"])


def predict(case: cases.Case) -> Job:
    """What the scheduler counts for a case: dstui's device and host figures with a margin."""
    try:
        import compare_rows

        e = compare_rows.predicted(case, None)
        assert e.gpu.device is not None and e.host.peak is not None
        eager = 1.25 if case["attn"] == "eager" else 1.1
        return Job(case, round(e.gpu.device.expected * eager) + 2 * GiB, round(e.host.peak.expected * 1.1))
    except Exception as error:
        print("no prediction for", case["name"], repr(error)[:200], flush=True)
        return Job(case, 60 * GiB, 8 * GiB * int(case["world"]))


def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Grid:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.time()
        self.out = Path(options.out)
        self.work = Path(options.work)
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.ext = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(self.work / "ext")))
        for key, value in ENV.items():
            os.environ.setdefault(key, value)
        self.running: list[Job] = []
        self.warm: list[Job] = []
        self.builds: dict[str, subprocess.Popen[bytes]] = {}
        self.ready: set[str] = set()
        self.broken: set[str] = set()
        self.counts = {"ok": 0, "failed": 0}

    def seconds(self) -> float:
        return time.time() - self.begin

    def left(self) -> float:
        return float(self.options.budget) - self.seconds()

    def say(self, *words: object) -> None:
        print(f"[{self.seconds():5.0f}s]", *words, flush=True)

    def build(self, needed: set[str]) -> None:
        """Start compiling the kernels (a second process of one would wait for the first)."""
        if self.options.dry:
            self.ready = needed
            return
        for name in sorted(needed):
            code = f"from deepspeed.ops.op_builder import {name} as B; B().load(verbose=False)"
            with (self.work / f"build-{name}.log").open("wb") as log:
                self.builds[name] = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "MAX_JOBS": "6"},
                )

    def look_at_builds(self) -> None:
        if not self.builds:  # a killed process leaves its lock, and every other would wait for it
            for lock in self.ext.glob("*/lock"):
                with contextlib.suppress(OSError):
                    if time.time() - lock.stat().st_mtime > 30:
                        lock.unlink()
        for name, process in list(self.builds.items()):
            code = process.poll()
            if code is None:
                continue
            del self.builds[name]
            if code == 0:
                self.ready.add(name)
                self.say("built", name)
            else:
                self.broken.add(name)
                tail = (self.work / f"build-{name}.log").read_text(errors="replace")[-1500:]
                self.say("could not build", name, tail)

    def start(self, job: Job) -> None:
        folder = self.work / "cases"
        folder.mkdir(exist_ok=True)
        path = folder / f"{job.name}.json"
        path.write_text(json.dumps(job.case), encoding="utf-8")
        for old in (self.row_path(job), self.go_path(job)):
            old.unlink(missing_ok=True)
        world = int(job.case["world"])
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
        common["LOCAL_WORLD_SIZE"] = str(world)
        if job.case.get("expandable"):
            common["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if self.options.dry:
            common["DS_ACCELERATOR"] = "cpu"
        words = [sys.executable, str(HERE / "measure_case.py"), "--case", str(path)]
        words += ["--row", str(self.row_path(job)), "--go", str(self.go_path(job))]
        words += ["--alone"] if job.case.get("alone") else []
        job.started = time.time()
        for rank in range(world):
            log = (folder / f"{job.name}.{rank}.log").open("w", encoding="utf-8")
            job.logs.append(log)
            job.processes.append(
                subprocess.Popen(
                    words,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
        self.warm.append(job)

    def go(self, job: Job) -> None:
        self.warm.remove(job)
        self.running.append(job)
        job.going, job.started = True, time.time()
        self.go_path(job).touch()

    def go_path(self, job: Job) -> Path:
        return self.work / "cases" / f"{job.name}.go"

    def imported(self, job: Job) -> bool:
        return all("READY" in Path(log.name).read_text(errors="replace") for log in job.logs)

    def row_path(self, job: Job) -> Path:
        return self.work / "cases" / f"{job.name}.row.json"

    def look_at(self, job: Job) -> bool:
        """Whether the job is over; its row is written then."""
        codes = [p.poll() for p in job.processes]
        if None in codes:
            if any(c is not None for c in codes) and job.uneven is None:
                job.uneven = time.time()  # the other ranks may wait for ever for one that is over
            late = job.going and time.time() - job.started > float(self.options.timeout)
            stuck = job.uneven is not None and time.time() - job.uneven > 10
            if not (late or stuck or self.left() <= 0):
                return False
            self.kill(job)
        self.finish(job, None in codes)
        return True

    def kill(self, job: Job) -> None:
        for p in job.processes:
            if p.poll() is None:
                p.kill()
        for p in job.processes:
            p.wait()

    def finish(self, job: Job, killed: bool) -> None:
        for log in job.logs:
            log.close()
        text = Path(job.logs[0].name).read_text(encoding="utf-8", errors="replace")
        row: dict[str, Any]
        try:
            row = json.loads(self.row_path(job).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            row = {"case": job.case, "phases": {}, "ok": False}
        row["world"] = int(job.case["world"])
        row["wall"] = round(time.time() - job.started, 1)
        row["beside"] = len(self.running) - 1
        row["aside"] = cases.aside(job.name)
        if killed and not row["ok"]:
            row["killed"] = True
        if not row["ok"]:
            row["codes"] = [p.returncode for p in job.processes]
            row["tail"] = text[-1500:]
            for log in job.logs[1:]:
                row["tail"] += "\n--- another rank:\n" + Path(log.name).read_text(errors="replace")[-800:]
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
            f.flush()
            os.fsync(f.fileno())
        self.counts["ok" if row["ok"] else "failed"] += 1
        found = row.get("threshold") or {}

        def gib(value: object) -> str:
            return f"{value / GiB:.2f}" if isinstance(value, (int, float)) else "-"

        self.say(
            "ok    " if row["ok"] else "FAILED" if not killed else "KILLED",
            f"{job.name:38s}",
            f"allocated {gib(row.get('peak_alloc'))} reserved {gib(row.get('peak_reserved'))}",
            f"rss {gib(row.get('peak_rss'))} nvml {gib(row.get('peak_nvml'))}",
            f"threshold {gib(found.get('fails'))}-{gib(found.get('works'))}" if found else "",
            f"{row['wall']:.0f} s, predicted gpu {gib(job.gpu)} host {gib(job.host)}",
            "" if row["ok"] else row.get("error", row.get("tail", ""))[-300:],
        )

    def fits(self, job: Job) -> bool:
        if not self.running:
            return True
        if job.case.get("alone") or any(j.case.get("alone") for j in self.running):
            return False
        gpu = sum(j.gpu for j in self.running) + job.gpu
        host = sum(j.host for j in self.running) + job.host
        host += sum(2 * GiB * len(j.processes) for j in self.warm if j is not job)
        return (
            len(self.running) < self.options.jobs
            and gpu <= self.options.gpu_gib * GiB
            and host <= self.options.host_gib * GiB
        )

    def next_warm(self, waiting: list[Job]) -> Job | None:
        """What to start importing: first what could go at once, last what wants the card for itself."""
        if len(self.warm) >= self.options.warm or not waiting:
            return None

        def order(job: Job) -> tuple[bool, bool]:
            return bool(job.case.get("alone")), not cases.ops(job.case) <= self.ready

        return min(waiting, key=order)  # the first of equals

    def run(self, chosen: list[cases.Case]) -> int:
        needed: set[str] = set()
        for c in chosen:
            needed |= cases.ops(c)
        self.build(needed)
        waiting = [predict(c) for c in chosen]
        reserve = min(self.options.reserve, self.options.budget / 3)
        while waiting or self.warm or self.running:
            self.look_at_builds()
            for group in (self.running, self.warm):
                for job in list(group):
                    if self.look_at(job):
                        group.remove(job)
            late = self.left() < reserve
            for job in [j for j in self.warm + waiting if late or cases.ops(j.case) & self.broken]:
                self.say("not run:", job.name)
                if job in self.warm:
                    self.kill(job)
                    self.warm.remove(job)
                else:
                    waiting.remove(job)
            while (job := self.next_warm(waiting)) is not None:  # type: ignore[assignment]
                waiting.remove(job)
                self.start(job)
            for job in list(self.warm):
                alone = job.case.get("alone")
                if alone and any(not j.case.get("alone") for j in waiting + self.warm):
                    continue
                if cases.ops(job.case) <= self.ready and self.fits(job) and self.imported(job):
                    self.go(job)
            time.sleep(0.1)
        for process in self.builds.values():
            process.kill()
        self.say(self.counts)
        return 0 if self.counts["ok"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--budget", type=float, default=1e6, help="seconds in all")
    parser.add_argument("--reserve", type=float, default=40, help="no case starts in these last seconds")
    parser.add_argument("--timeout", type=float, default=110, help="seconds of one case")
    parser.add_argument("--jobs", type=int, default=8, help="cases at a time")
    parser.add_argument("--warm", type=int, default=5, help="cases that import ahead")
    parser.add_argument("--gpu-gib", type=float, default=132)
    parser.add_argument("--host-gib", type=float, default=76)
    parser.add_argument("--work", default="/tmp/fr", help="logs and compiled kernels")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--skip-done", action="store_true", help="not those with a good row in --out")
    parser.add_argument("--dry", action="store_true", help="on the CPU, to try the scripts")
    parser.add_argument("--list", action="store_true", help="print the cases and what is predicted")
    options = parser.parse_args()
    chosen = [dict(c) for c in cases.load_cases(options.cases)]
    if options.only:
        wanted = set(options.only.split(","))
        chosen = [c for c in chosen if c["name"] in wanted]
    if options.skip_done:
        done = set()
        path = Path(options.out) / "results.jsonl"
        if path.exists():
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            done = {r["case"]["name"] for r in rows if r["ok"]}
        chosen = [c for c in chosen if c["name"] not in done]
    if options.list:
        for c in chosen:
            job = predict(c)
            print(
                f"{job.name:40s} {c['family']:12s} {'aside' if cases.aside(job.name) else '':6s}"
                f"gpu {job.gpu / GiB:6.1f} host {job.host / GiB:6.1f} {' '.join(sorted(cases.ops(c)))}"
            )
        return 0
    if shutil.which("ninja") is None and not options.dry:
        print("ninja is not on the PATH: DeepSpeed cannot compile its kernels")
    return Grid(options).run(chosen)


if __name__ == "__main__":
    sys.exit(main())
