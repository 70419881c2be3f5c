"""Files that others write, kept bounded, findable and writable: ``out.log``, each rank's log, csv_monitor's files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstui.runs import store
from dstui.runs.ranklogs import all_logs
from dstui.runs.store import RunDir

_FALLOC_FL_PUNCH_HOLE, _FALLOC_FL_KEEP_SIZE = 2, 1  # linux/falloc.h
_LOG_HEAD = 4 << 20
_AHEAD, _METRIC_AHEAD = 1 << 20, 128 << 10
"""Blocks reserved behind the end of ``out.log`` and of each csv file: the ranks write these files themselves, and a
``print`` that meets a full disk would end the training."""
_EMERGENCY_HEAD, _EMERGENCY_TAIL = 64 << 10, 256 << 10


def metric_files(config: Mapping[str, Any], folder: Path) -> list[Path]:
    """The files that csv_monitor will make below ``folder``, its first step included (DeepSpeed 0.19.8,
    ``runtime/engine.py`` and ``monitor/csv_monitor.py``). It dies of a full disk, at each step: they are made before,
    so that blocks can be kept for them."""
    monitor = config.get("csv_monitor")
    if not isinstance(monitor, Mapping) or monitor.get("output_path") != str(folder):
        return []
    names = ["lr"]
    fp16 = config.get("fp16")
    if isinstance(fp16, Mapping) and fp16.get("enabled"):
        names.append("loss_scale")
    if config.get("wall_clock_breakdown"):
        parts = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
        names += [f"elapsed_time_ms_{part}" for part in parts]
    return [folder / str(monitor.get("job_name")) / f"Train_Samples_{name}.csv" for name in names]


class LogKeeper:
    """Keeps ``out.log`` bounded and findable while others write to it. Never touches their descriptor."""

    def __init__(self, run: RunDir, limit: int) -> None:
        self.run = run
        self.limit = max(limit, 4 * _LOG_HEAD)
        self.fd = os.open(run.out_log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.identity = self._identity(os.fstat(self.fd))
        self.copied: int | None = None
        """Bytes of the deleted file that are in the new one; None while nobody deleted it."""
        self.punched = _LOG_HEAD
        self.punched_ranks: dict[Path, int] = {}
        self.can_punch = True
        self.size = 0
        """Bytes at the last look."""
        self.ahead: dict[Path, int] = {}
        """Up to where blocks are reserved in each file; -1 where the file system cannot."""

    @staticmethod
    def _identity(s: os.stat_result) -> tuple[int, int]:
        return s.st_dev, s.st_ino

    def tick(self) -> dict[str, Any] | None:
        """Look after the file; an event to record when something happened to it."""
        event = self._recover()
        size = os.fstat(self.fd).st_size
        if size < self.size:
            event = self._cut(self.size) or event
            size = os.fstat(self.fd).st_size
        self.size = size
        if self.copied is not None:
            self._copy(size)
        self._bound_rank_logs()
        if size - self.punched > self.limit - _LOG_HEAD:
            dropped = self._drop_middle(size, keep=self.limit // 2)
            if dropped and event is None:
                event = {"event": "log_trimmed", "dropped_until": self.punched}
        return event

    def _bound_rank_logs(self) -> None:
        """Each rank's log keeps its share of the limit: the beginning and the newest part, as ``out.log`` does."""
        paths = all_logs(self.run)
        for path in paths:
            limit = max(self.limit // len(paths), 4 * _LOG_HEAD)
            size, punched = path.stat().st_size, self.punched_ranks.get(path, _LOG_HEAD)
            end = (size - limit // 2) // 4096 * 4096
            if size - punched <= limit - _LOG_HEAD or end <= punched:
                continue
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, punched, end - punched)
            finally:
                os.close(fd)
            self.punched_ranks[path] = end

    def free_space(self) -> dict[str, Any] | None:
        """The disk is nearly full: give the middle of the log back."""
        size = os.fstat(self.fd).st_size
        if size - self.punched > 4 * _LOG_HEAD and self._drop_middle(size, keep=_LOG_HEAD):
            return {"event": "log_trimmed", "dropped_until": self.punched}
        return None

    def reserve(self) -> dict[str, Any] | None:
        """Keep blocks ready for what the ranks write next; on a full disk the log's own middle gives them."""
        event = None
        for path in self.run.metrics_dir.glob("*/*.csv"):
            self._reserve(path, _METRIC_AHEAD)
        for path in all_logs(self.run):
            self._reserve(path, _METRIC_AHEAD)
        if not self._reserve(self.run.out_log, _AHEAD) and self.can_punch:
            size = os.fstat(self.fd).st_size
            start, end = _EMERGENCY_HEAD, (size - _EMERGENCY_TAIL) // 4096 * 4096
            if end - start > _EMERGENCY_TAIL and self._fallocate(
                self.fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, end - start
            ):
                self.punched = max(self.punched, end)
                event = {"event": "log_trimmed", "dropped_until": end}
                self._reserve(self.run.out_log, _AHEAD)
        return event

    def _reserve(self, path: Path, ahead: int) -> bool:
        """False: the disk is full and less than half of the reserve is left."""
        known = self.ahead.get(path, 0)
        if known < 0:
            return True
        try:
            fd = self.fd if path == self.run.out_log else os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            size = os.fstat(fd).st_size
            if known - size > ahead // 2:
                return True
            if self._fallocate(fd, _FALLOC_FL_KEEP_SIZE, size, ahead):
                self.ahead[path] = size + ahead
                return True
            if ctypes.get_errno() not in (errno.ENOSPC, errno.EDQUOT):
                self.ahead[path] = -1
                return True
            return False
        finally:
            if fd != self.fd:
                os.close(fd)

    @staticmethod
    def _fallocate(fd: int, mode: int, offset: int, length: int) -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        return bool(libc.fallocate(fd, mode, offset, length) == 0)

    def _drop_middle(self, size: int, keep: int) -> bool:
        if not self.can_punch:
            return False
        end = (size - keep) // 4096 * 4096
        if end <= self.punched:
            return False
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if not self._fallocate(self.fd, mode, self.punched, end - self.punched):
            self.can_punch = False  # some network file systems; then the log is only watched
            return False
        self.punched = end
        return True

    def _recover(self) -> dict[str, Any] | None:
        """Somebody deleted or replaced out.log: make it again and go on copying from the old descriptor."""
        try:
            there = self._identity(self.run.out_log.stat())
        except FileNotFoundError:
            there = None
        except OSError:
            return None
        if there == self.identity or (self.copied is not None and there is not None):
            return None
        if not self.run.path.is_dir():
            return None
        size = os.fstat(self.fd).st_size
        self.copied = max(0, size - _LOG_HEAD)
        note = (
            f"[dstui] out.log was removed while the run wrote to it; its first {self.copied} bytes are lost\n"
        )
        with contextlib.suppress(OSError):
            store.write_text(self.run.out_log, note)
        return {"event": "log_gap", "lost": self.copied}

    def _cut(self, before: int) -> dict[str, Any]:
        """Somebody truncated the file: what is reserved behind its old end is gone as well."""
        self.punched = _LOG_HEAD
        self.ahead.pop(self.run.out_log, None)
        if self.copied is not None:
            self.copied = 0
        with contextlib.suppress(OSError):
            os.write(self.fd, f"[dstui] out.log was cut here; {before} bytes before are lost\n".encode())
        return {"event": "log_gap", "lost": before}

    def _copy(self, size: int) -> None:
        assert self.copied is not None
        try:
            with self.run.out_log.open("ab") as new:
                while self.copied < size:
                    part = os.pread(self.fd, min(1 << 20, size - self.copied), self.copied)
                    if not part:
                        break
                    new.write(part)
                    self.copied += len(part)
        except OSError:
            return  # disk full or folder gone: tried again at the next tick
