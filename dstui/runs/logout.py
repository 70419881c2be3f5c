"""Whether logging out ends background processes here (systemd-logind), and the way around it."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from pathlib import Path

_FOLDERS = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")
"""In the order in which systemd reads them: the last word wins (logind.conf(5))."""
ROOT = "/"


def kills_user_processes(root: str | None = None) -> bool:
    """logind's ``KillUserProcesses`` as configured; the compiled default of nearly every distribution is no."""
    base = Path(ROOT if root is None else root)
    if not (base / "run/systemd/system").is_dir():
        return False  # not booted with systemd
    answer = False
    files: dict[str, Path] = {}
    for folder in _FOLDERS:
        where = base / folder.lstrip("/")
        if (where / "logind.conf").is_file():
            files[""] = where / "logind.conf"
        for extra in sorted(where.glob("logind.conf.d/*.conf")):
            files[extra.name] = extra
    for name in sorted(files):
        try:
            text = files[name].read_text(errors="replace")
        except OSError:
            continue
        for value in re.findall(r"(?mi)^\s*KillUserProcesses\s*=\s*(\S+)", text):
            answer = value.lower() in ("yes", "true", "1", "on")
    return answer


def lingers() -> bool:
    """Whether the user's systemd lives on after the last logout (``loginctl enable-linger``)."""
    try:
        user = getpass.getuser()
        if Path(ROOT, "var/lib/systemd/linger", user).exists():
            return True
        answer = subprocess.run(
            ["loginctl", "show-user", user, "--property=Linger", "--value"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (KeyError, OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and answer.stdout.strip() == "yes"


def systemd_run() -> str | None:
    """The tool, when the user's systemd can be reached."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    if not Path(runtime, "systemd/private").exists():
        return None
    return shutil.which("systemd-run")
