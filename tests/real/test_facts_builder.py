"""The advice about TORCH_CUDA_ARCH_LIST and CUDA releases, asked of the installed DeepSpeed's op builder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dstui.facts.advice import bad_arch_entries, lacks
from dstui.facts.interpreters import installed_packages
from dstui.facts.model import Facts, Gpu, Interpreter, Toolchain

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not {"deepspeed", "torch"} <= set(installed_packages([p for p in sys.path if p])),
        reason="needs the train extra",
    ),
]

ARCHS = ("9.0", "8.0;9.0+PTX", "8.6 9.0", "9.0a", "8.0;9.0a", "Hopper", "90", "10.0")
PAIRS = (
    ("13.0", "13.0"),
    ("12.4", "12.8"),
    ("12.8", "13.0"),
    ("13.1", "13.0"),
    ("11.8", "12.1"),
    ("11.7", "11.8"),
)
"""(nvcc, torch)"""

ASK = """
import os, sys, json, types
sys.argv = ["x"]
import torch
from deepspeed.ops.op_builder import builder
archs, pairs, out = json.loads(os.environ["ASK"]), json.loads(os.environ["PAIRS"]), {"archs": {}, "pairs": []}
class B(builder.CUDAOpBuilder):
    NAME = BUILD_VAR = "x"
    def __init__(self): super().__init__(name="x")
    def absolute_name(self): return "x"
    def sources(self): return []
builder.OpBuilder._is_rocm_pytorch = False
for a in archs:
    os.environ["TORCH_CUDA_ARCH_LIST"] = a
    b = B(); b.jit_mode = True
    try: b.compute_capability_args(); out["archs"][a] = True
    except Exception: out["archs"][a] = False
for nvcc, built in pairs:
    builder.installed_cuda_version = lambda name="", v=nvcc: tuple(map(int, v.split(".")))
    torch.version.cuda = built
    try: builder.assert_no_cuda_mismatch("x"); out["pairs"].append(True)
    except builder.CUDAMismatchException: out["pairs"].append(False)
print("ANSWER" + json.dumps(out))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    import json
    import os

    env = {**os.environ, "ASK": json.dumps(ARCHS), "PAIRS": json.dumps(PAIRS)}
    env.pop("DS_SKIP_CUDA_CHECK", None)
    out = subprocess.run(
        [sys.executable, "-c", ASK],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path_factory.mktemp("cwd"),
    )
    assert out.returncode == 0, out.stderr[-2000:]
    line = next(x for x in out.stdout.splitlines() if x.startswith("ANSWER"))
    return dict(json.loads(line.removeprefix("ANSWER")))


def test_arch_lists_that_the_builder_reads(answer: dict[str, dict[str, bool]]) -> None:
    for value in ARCHS:
        assert (bad_arch_entries(value) == []) is answer["archs"][value], value


def test_cuda_releases_that_the_builder_accepts(answer: dict[str, list[bool]]) -> None:
    for (nvcc, built), accepted in zip(PAIRS, answer["pairs"], strict=True):
        it = Interpreter(
            path=str(Path(sys.executable)),
            origin="own",
            packages={"deepspeed": "0.19.8", "torch": "2"},
            torch_cuda=built,
            headers=True,
        )
        tools = Toolchain(
            cuda_home="/c",
            nvcc="/c/bin/nvcc",
            nvcc_version=nvcc,
            compiler="/c++",
            ninja="/ninja",
            libaio=True,
            libaio_header=True,
            python_headers=True,
        )
        facts = Facts(gpus=(Gpu(0),), cuda_driver="13.0", toolchain=tools, interpreters=(it,))
        codes = [lack.code for lack in lacks(facts)]
        assert ("cuda-mismatch" not in codes) is accepted, (nvcc, built)
