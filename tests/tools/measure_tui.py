"""Measure the TUI on a real pty: first paint, memory, bytes, key to repaint. Prints one table.

python -m tests.tools.measure_tui [--runs 5] [--size 80x24]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

from tests.pty.harness import Terminal


def p95(values: list[float]) -> float:
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


def first_paint(columns: int, rows: int) -> tuple[float, int, int]:
    """(seconds to the first complete frame, resident bytes, bytes written) of one cold start."""
    with tempfile.TemporaryDirectory() as cwd, Terminal(columns=columns, rows=rows, cwd=cwd) as t:
        t.wait("Recommended")
        seconds = time.monotonic() - t.started
        written = len(t.raw)
        t.settle()
        return seconds, t.rss, written


def wizard(columns: int, rows: int) -> dict[str, float]:
    """Bytes and delays inside the wizard."""
    out: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cwd, Terminal(columns=columns, rows=rows, cwd=cwd) as t:
        t.wait("Training Python")
        t.settle()
        t.press("enter")
        t.wait("step 1 of 10")
        t.settle(0.6)
        delays: list[float] = []
        moves: list[int] = []
        for n in range(40):
            before = time.monotonic()
            t.press("down" if n % 2 == 0 else "up")
            count = 0
            while not count and time.monotonic() - before < 2:
                count = t.read(0)
            delays.append(time.monotonic() - before)
            moves.append(count + t.settle(0.08))
        out["cursor: key to bytes p50 ms"] = 1000 * statistics.median(delays)
        out["cursor: key to bytes p95 ms"] = 1000 * p95(delays)
        out["cursor: bytes"] = max(moves)
        delays, changes = [], []
        for n in range(36):
            forward = (n // 9) % 2 == 0
            before = time.monotonic()
            t.press("ctrl+n" if forward else "ctrl+p")
            count = 0
            while not count and time.monotonic() - before < 2:
                count = t.read(0)
            delays.append(time.monotonic() - before)
            changes.append(count + t.settle(0.1))
        out["step: key to bytes p50 ms"] = 1000 * statistics.median(delays)
        out["step: key to bytes p95 ms"] = 1000 * p95(delays)
        out["step: bytes median"] = statistics.median(changes)
        out["step: bytes max"] = max(changes)
        t.press("4")
        t.settle(0.4)
        updates: list[float] = []
        for n in range(10):
            before = time.monotonic()
            t.press("down" if n % 2 == 0 else "up", "space")
            last = before
            while time.monotonic() - last < 0.5:
                if t.read(0.005):
                    last = time.monotonic()
            updates.append(last - before)
        out["answer after a change p95 ms"] = 1000 * p95(updates)
        out["idle bytes in 5 s"] = t.read(5.0)
        out["resident MiB"] = t.rss / 2**20
        before = time.monotonic()
        t.press("ctrl+q")
        t.gone()
        out["quit ms"] = 1000 * (time.monotonic() - before)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--size", default="80x24")
    args = parser.parse_args()
    columns, rows = (int(n) for n in args.size.split("x"))
    starts = [first_paint(columns, rows) for _n in range(args.runs)]
    print(f"size {args.size}, {args.runs} cold starts")
    print(
        f"{'first paint s: median (min-max)':<36}{statistics.median(s for s, _r, _w in starts):.2f}", end=""
    )
    print(f" ({min(s for s, _r, _w in starts):.2f}-{max(s for s, _r, _w in starts):.2f})")
    print(f"{'resident at start, MiB':<36}{max(r for _s, r, _w in starts) / 2**20:.1f}")
    print(f"{'bytes to first paint':<36}{max(w for _s, _r, w in starts)}")
    for name, value in wizard(columns, rows).items():
        print(f"{name:<36}{value:.0f}")


if __name__ == "__main__":
    main()
