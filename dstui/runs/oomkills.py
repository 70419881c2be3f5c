"""What the kernel counts of its own kills."""

from __future__ import annotations

from dstui.facts.host import read_cgroup
from dstui.facts.system import System


class OomKills:
    """The kernel's count of OOM kills in the run's cgroup (v1 or v2), and on the whole machine."""

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self.start = self.read()

    def read(self) -> dict[str, int]:
        found: dict[str, int] = {}
        group, _why = read_cgroup(self._system)
        if group is not None and group.oom_kills is not None:
            found["cgroup"] = group.oom_kills
        for line in (self._system.read("/proc/vmstat") or "").splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                found["system"] = int(value)
        return found

    def difference(self) -> dict[str, int | None]:
        """Kills since the start: ``cgroup`` (own), ``system``; None where the kernel does not count."""
        now = self.read()
        return {
            where: now[where] - self.start[where] if where in now and where in self.start else None
            for where in ("cgroup", "system")
        }
