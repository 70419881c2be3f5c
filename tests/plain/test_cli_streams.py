"""Standard streams as they come: closed, full, ASCII. Never a traceback, never the exit code of a verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstui import cli
from dstui.errors import Exit

REPO = Path(__file__).parent.parent.parent
GOOD = '{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}'


def shell(line: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    (tmp_path / "ds.json").write_text(GOOD)
    return subprocess.run(
        ["sh", "-c", line.replace("dstui", f"{sys.executable} -m dstui")],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("verb", ["check ds.json", "schema", "preset list", "where"])
def test_a_full_disk_behind_stdout(verb: str, tmp_path: Path) -> None:
    done = shell(f"dstui {verb} >/dev/full", tmp_path)
    assert done.returncode == Exit.CANNOT
    assert b"No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("dstui where >&-", 0),
        ("dstui check ds.json 2>&-", 0),
        ("dstui check - <&-", 1),  # an empty config has no batch size
        ("dstui check nothing.json >&- 2>&-", 2),
        ("dstui check nothing.json <&- >&- 2>&-", 2),
    ],
)
def test_closed_streams(line: str, code: int, tmp_path: Path) -> None:
    done = shell(line, tmp_path)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr


def test_an_ascii_stdout_takes_chinese_and_any_file_name(tmp_path: Path) -> None:
    ascii_only = {
        "LC_ALL": "POSIX",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    done = shell("dstui preset list --lang zh", tmp_path, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert b"zero3-offload" in done.stdout
    os.rename(bytes(tmp_path / "ds.json"), bytes(tmp_path) + b"/\xff.json")  # noqa: PTH104
    done = shell("dstui check *.json; dstui check --json *.json", tmp_path)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["init --yes", "demo --detach", "run -- x.py"])
def test_a_working_directory_that_is_gone(line: str, tmp_path: Path) -> None:
    done = shell(f"mkdir d && cd d && rmdir ../d && dstui {line}", tmp_path, PYTHONPATH=str(REPO))
    assert done.returncode == Exit.CANNOT
    assert b"working directory was deleted" in done.stderr and b"Traceback" not in done.stderr


def test_a_fault_of_dstui_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_dispatch", broken)
    assert cli.main(["where"]) == Exit.CANNOT
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "dstui itself failed" in err


def test_an_unforeseen_failure_of_the_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "_dispatch", lambda args: len((tmp_path / "gone").read_bytes()))
    monkeypatch.setattr(cli, "_drop_stdout", lambda: None)
    assert cli.main(["where"]) == Exit.CANNOT
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "gone: No such file or directory" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["chek", "--format", "json", "a.json"], "'chek' is neither a verb nor a file", "`dstui check`"),
        (["--json", "detct"], "'detct' is neither a verb nor a file", "`dstui detect`"),
        (["frobnicate", "--foo"], "'frobnicate' is neither a verb nor a file", "`dstui --help`"),
        (["--json", "check", "a.json"], "options of `check` come after it", "`dstui check --help`"),
        (["--foo"], "unknown: --foo", "`dstui --help`"),
        (["--facts"], "--facts", "`dstui --help`"),
    ],
)
def test_a_wrong_command_line_is_told_in_two_lines(
    words: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == "" and error in first and hint in second and "usage" not in err
