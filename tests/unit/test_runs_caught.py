"""What somebody caught and printed is no proof; what nobody caught is. Only with an exit record it matters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstui.runs.diagnose import diagnose_run
from tests.run_tools import FakeRun

CAUGHT = """\
Traceback (most recent call last):
  File "/home/ann/cache.py", line 12, in load
    raise OSError(28, "No space left on device")
OSError: [Errno 28] No space left on device
"""
ENDS = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 30, in <module>
    main()
  File "/home/ann/train.py", line 22, in main
    loss = engine(x)
RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16
"""
CHAIN = """\
Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/deepspeed/runtime/config.py", line 700, in __init__
    self._param_dict = json.load(f)
json.decoder.JSONDecodeError: Expecting ',' delimiter: line 3 column 5 (char 40)

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/ann/train.py", line 30, in <module>
    main()
  File "/opt/env/lib/python3.11/site-packages/deepspeed/__init__.py", line 200, in initialize
    config = DeepSpeedConfig(config)
ValueError: Expected a string path to an existing deepspeed config, or a dictionary or a valid base64. Received: z3.json
"""
END = "[2025-11-03 08:15:31,230] [ERROR] [launch.py:325:sigkill_handler] ['python', '-u', 'train.py', '--local_rank=0'] exits with return code = {code}\n"


@pytest.mark.parametrize(
    ("text", "code", "answer", "certainty"),
    [
        (CAUGHT, 3, "DR901", "likely"),  # and then sys.exit(3), who knows why
        (ENDS, 1, "DR603", "certain"),
        (CAUGHT + "going on without the cache\n" + ENDS, 1, "DR603", "certain"),
        (CHAIN, 1, "DR706", "certain"),
        (CAUGHT + "going on without the cache\n" + CHAIN, 1, "DR706", "certain"),
    ],
)
def test_a_run_with_its_record(
    text: str, code: int, answer: str, certainty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path))
    fake = FakeRun(gpus=1, ranks=1)
    fake.log("loading", *text.splitlines(), END.format(code=code))
    record = {
        "schema_version": 1, "outcome": "failed", "code": code, "signal": None, "rank_code": code, "first_rank": 0,
        "reason": f"rank 0 exited with code {code}", "oom_kills": {"cgroup": 0, "system": 0},
    }  # fmt: skip
    fake.run.exit_path.write_text(json.dumps(record))
    found = diagnose_run(fake.run)
    assert found.cause is not None
    assert (found.cause.code, found.cause.certainty) == (answer, certainty)
