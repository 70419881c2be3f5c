"""Make ``.venv`` ready: ``run`` (what a user needs), ``dev`` (plus the test tools), ``exec`` (open dstui).

When the Python that calls this has torch and deepspeed, ``.venv`` gets only the UI and that Python
trains (``DSTUI_PYTHON``). Otherwise ``.venv`` gets the extra ``train`` too. What was installed is
stamped, so a second call only compares the stamp.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
VENV = REPO / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "dstui-stamp"
OUTER = VENV / "dstui-training-python"


def caller_trains() -> bool:
    """Whether the calling interpreter (not ours) already has torch and deepspeed."""
    inside = Path(sys.prefix).resolve() == VENV.resolve()
    return not inside and all(importlib.util.find_spec(name) for name in ("torch", "deepspeed"))


def wanted() -> str:
    """What an environment of this checkout and this Python is stamped with."""
    text = (REPO / "pyproject.toml").read_bytes() + (REPO / "constraints.txt").read_bytes()
    return hashlib.sha256(text).hexdigest() + f" py{sys.version_info[0]}.{sys.version_info[1]}"


def pip(*args: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args]
    code = subprocess.call(command, cwd=REPO)
    if code:
        sys.exit(f"bootstrap: `{' '.join(command)}` failed with {code}: see the lines above")


def setup(kind: str) -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - the caller may be any Python
        sys.exit("bootstrap: Python 3.10 or newer is needed: make PYTHON=/path/to/python3.11 run")
    stamp = dict(line.split("=", 1) for line in STAMP.read_text().splitlines()) if STAMP.exists() else {}
    if stamp.get("run") == wanted() and (kind == "run" or stamp.get("dev") == wanted()):
        return
    if not PYTHON.exists():
        print("bootstrap: creating .venv", file=sys.stderr)
        if subprocess.call([sys.executable, "-m", "venv", str(VENV)]):
            sys.exit("bootstrap: cannot create .venv (on Debian and Ubuntu: apt install python3-venv)")
    # The tests train for real, so `dev` always brings the training packages.
    train = kind == "dev" or not caller_trains()
    if train:
        # torch first and alone: its exact pin decides which build everything else meets.
        print("bootstrap: installing torch and deepspeed (minutes, once)", file=sys.stderr)
        pin = next(
            line for line in (REPO / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
        )
        pip(pin, "setuptools", "wheel", "ninja")
        pip("-c", "constraints.txt", "--no-build-isolation", "deepspeed")
    else:
        OUTER.write_text(sys.executable)
    extras = ",".join(name for name, use in (("train", train), ("dev", kind == "dev")) if use)
    print("bootstrap: installing dstui", file=sys.stderr)
    pip("-c", "constraints.txt", "-e", f".[{extras}]" if extras else ".")
    stamp["run"] = wanted()
    if kind == "dev":
        stamp["dev"] = wanted()
    STAMP.write_text("".join(f"{k}={v}\n" for k, v in stamp.items()))


def main() -> None:
    verb = sys.argv[1]
    if verb in ("run", "dev"):
        setup(verb)
        return
    env = dict(os.environ)
    if OUTER.exists():
        env["DSTUI_PYTHON"] = OUTER.read_text().strip()
    os.execve(str(PYTHON), [str(PYTHON), "-m", "dstui", *sys.argv[2:]], env)


if __name__ == "__main__":
    main()
