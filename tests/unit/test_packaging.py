"""The data folders reach the user both ways: from a built wheel and from an editable install."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dstui import paths

REPO = Path(__file__).resolve().parents[2]


def test_editable_install_finds_the_folders_beside_the_package() -> None:
    assert list(paths.data_dir("schemas").glob("deepspeed-*.json"))
    assert list(paths.data_dir("presets").glob("*.json"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(REPO)],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))


def test_wheel_carries_data_styles_examples_and_translations(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("schemas", "presets"):
        here = {p.name for p in (REPO / folder).glob("*.json")}
        packed = {n.rsplit("/", 1)[1] for n in names if n.startswith(f"dstui/_data/{folder}/")}
        assert here <= packed
    for wanted in (".tcss", "examples/tiny_gpt.py", "zh_CN/LC_MESSAGES/dstui.mo", "catalogue.json"):
        assert any(n.endswith(wanted) for n in names), wanted


def test_wheel_works_unpacked_elsewhere(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "from dstui import paths; import dstui\n"
        "print(dstui.__file__)\n"
        "print(len(list(paths.data_dir('schemas').glob('deepspeed-*.json'))), len(list(paths.data_dir('presets').glob('*.json'))))"
    )
    out = subprocess.run(
        [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    lines = out.stdout.splitlines()
    assert lines[0].startswith(str(tmp_path))
    schemas, presets = map(int, lines[1].split())
    assert schemas >= 2
    assert presets >= 11
