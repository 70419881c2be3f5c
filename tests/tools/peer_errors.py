"""Our error beside that of DeepSpeed's own estimators, on the same measured rows.

    python tests/tools/peer_errors.py tests/data/gpu/h200.jsonl

The rows are those of stages 2 and 3 that train every parameter. ``estimate_zero2_model_states_mem_needs`` and
``estimate_zero3_model_states_mem_needs`` of the installed DeepSpeed are called as ``..._all_cold`` calls them: with
the number of parameters, the largest layer, the GPUs, and the offload of the row. They promise model states only.
Prints rows, then a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import cases  # noqa: E402
from compare_rows import GiB, predicted  # noqa: E402


def theirs(row: dict[str, Any]) -> int:
    """GPU bytes by DeepSpeed's estimator."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    case = row["case"]
    zero = case["ds"]["zero_optimization"]
    offload = zero.get("offload_optimizer", {}).get("device") == "cpu"
    if zero["stage"] == 2:
        _cpu, gpu = estimate_zero2_model_states_mem_needs(
            total_params=row["params"], num_gpus_per_node=row["world"], num_nodes=1, cpu_offload=offload
        )
        return int(gpu)
    model = cases.MODELS[case["model"]]
    _cpu, gpu, _largest = estimate_zero3_model_states_mem_needs(
        total_params=row["params"],
        largest_layer_params=model["vocab_size"] * model["hidden_size"],
        num_gpus_per_node=row["world"],
        num_nodes=1,
        cpu_offload=offload,
        cpu_offload_params=zero.get("offload_param", {}).get("device") == "cpu",
        zero_init=bool(case.get("zero_init")),
    )
    return int(gpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.results for line in path.read_text().splitlines() if line]
    errors: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        case = row["case"]
        stage = case["ds"]["zero_optimization"]["stage"]
        if not row["ok"] or stage < 2 or case.get("lora"):
            continue
        span = predicted(case, row).gpu.allocated
        assert span is not None
        measured = row["peak_alloc"]
        found = {"dstui": span.expected / measured - 1, "DeepSpeed": theirs(row) / measured - 1}
        print(
            f"{case['name']:40s}{measured / GiB:8.2f} GiB"
            + "".join(f"  {k} {100 * v:+7.1f} %" for k, v in found.items())
        )
        for key, value in found.items():
            errors.setdefault(key, {}).setdefault(f"stage {stage}", []).append(value)
    print("\n| estimator | rows | mean error | median | worst |\n|---|---|---|---|---|")
    for key, groups in errors.items():
        for group, values in [*groups.items(), ("both", [v for g in groups.values() for v in g])]:
            size = [100 * abs(v) for v in values]
            worst = 100 * max(values, key=abs)
            print(
                f"| {key}, {group} | {len(size)} | {statistics.mean(size):.1f} % | {statistics.median(size):.1f} % "
                f"| {worst:+.1f} % |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
