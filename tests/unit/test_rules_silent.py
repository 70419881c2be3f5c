"""Near misses: configs beside each rule's example that must not be flagged by it."""

from __future__ import annotations

from typing import Any

import pytest

from dstui.rules.registry import find
from tests.rules_tools import check, codes

B: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
BF16 = {"bf16": {"enabled": True}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
CPU = {"device": "cpu", "pin_memory": True}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def expert(**keys: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, **keys}}


SILENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("DS117", zero(stage=3, overlap_comm=True), {"release": "0.9.5"}),
    ("DS117", zero(stage=3, zero_quantized_weights=True), {"release": "0.10.0"}),
    ("DS217", zero(stage=3, zero_quantized_gradients=True), {"world_size": 8, "gpus": 4}),
    ("DS217", zero(stage=3, zero_quantized_gradients=True), {"world_size": 2, "gpus": 4}),
    ("DS218", {"fp16": {"enabled": True}, **zero(stage=3, zero_quantized_nontrainable_weights=True)}, {}),
    ("DS219", zero(stage=3, leaf_module={"classes": ["X"]}), {}),
    ("DS220", zero(stage=2, ignore_unused_parameters=False), {}),
    ("DS221", {"gradient_clipping": 0, **zero(stage=2, compute_grad_norm=False)}, {}),
    ("DS222", zero(stage=3, zero_hpz_partition_size=8), {"nodes": 2, "gpus": 8, "world_size": 16}),
    ("DS222", zero(stage=3), {"gpus": 8, "world_size": 8}),
    ("DS314", zero(stage=3, offload_optimizer={**CPU, "super_offload": True}), {"gpus": 1}),
    ("DS412", {"gradient_accumulation_steps": 2}, {}),
    ("DS412", {}, {"engine": "lightning"}),
    ("DS413", zero(stage=0), {"engine": "hf"}),
    ("DS413", {}, {}),
    ("DS413", {"autotuning": {"enabled": True}}, {"engine": "hf"}),
    ("DS506", zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/x", "buffer_size": 100}), {"largest": 200, "world_size": 2}),
    ("DS506", zero(stage=3, offload_param={"device": "cpu", "pin_memory": True}), {"largest": 10**9}),
    ("DS507", zero(stage=2, offload_optimizer={"device": "cpu", "pin_memory": False}), {"wsl": True}),
    ("DS507", zero(stage=2, offload_optimizer=CPU), {"wsl": False}),
    ("DS611", {"tensor_parallel": {"autotp_size": 2}, **zero(stage=2)}, {"release": "0.19.3", "world_size": 2}),
    ("DS611", {"tensor_parallel": {"autotp_size": 2}, **zero(stage=3)}, {"release": "0.19.4", "world_size": 2}),
    ("DS612", {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}}, {"world_size": 2}),
    ("DS613", expert(autoep_size=4), {"world_size": 8}),
    ("DS613", {"expert_parallel": {"enabled": False, "autoep_size": 3}}, {"world_size": 8}),
    ("DS613", {**expert(autoep_size=2), **zero(stage=3)}, {"world_size": 8}),
    ("DS614", {"compile": {"deepcompile": True, "offload_opt_states": True}, **zero(stage=3)}, {}),
    ("DS615", {"aio": {"use_gds": True}}, {"gpus": 1}),
    ("DS616", {"datastates_ckpt": False}, {}),
    ("DS616", {}, {}),
    ("DS617", {"sequence_parallel_size": 2}, {"release": "0.18.6", "world_size": 2}),
    ("DS617", {"sequence_parallel_size": 2, **zero(stage=1)}, {"release": "0.18.5", "world_size": 2, "engine": "hf"}),
    ("DS618", {"pipeline": {"stages": 2}, **zero(stage=1)}, {}),
    ("DS619", {"checkpoint": {"load_universal": False}, **zero(stage=3)}, {}),
    ("DS721", {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, **zero(stage=2, offload_optimizer=CPU)}, {}),
    ("DS721", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, **zero(stage=1)}, {}),
    ("DS722", {"torch_autocast": {"enabled": False}, **zero(stage=3, zero_quantized_weights=True)}, {}),
    ("DS724", {"vocabulary_size": 50304}, {}),
    ("DS725", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_allow_untested_optimizer": True, **zero(stage=2)}, {}),
    ("DS727", {**BF16, "data_types": {"param_dtype": "bf16"}}, {}),
    ("DS728", {"fp16": {"enabled": True}}, {"compute_capability": (7, 0)}),
    ("DS728", BF16, {"compute_capability": (6, 1)}),
    ("DS731", {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True, "number_checkpoints": 4}}, {}),
    ("DS732", {"bf16": {"enabled": True, "check_grad_overflow": True}, **zero(stage=2)}, {}),
    ("DS733", {"wall_clock_breakdown": True}, {"release": "0.18.0"}),
    ("DS737", {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 101, "warmup_num_steps": 100}}}, {"release": "0.19.2"}),
    ("DS810", {"gradient_clipping": 0, **zero(stage=2)}, {"release": "0.16.5"}),
    ("DS811", {"gradient_accumulation_steps": 4, **zero(stage=2, offload_optimizer=CPU)}, {"release": "0.18.9"}),
    ("DS812", {**BF16, **FP32_SUM, "gradient_accumulation_steps": 4, **zero(stage=1)}, {"release": "0.16.9", "world_size": 2}),
    ("DS812", {**BF16, **FP32_SUM, "gradient_accumulation_steps": 4, **zero(stage=1)}, {"release": "0.18.9", "world_size": 1}),
    ("DS813", zero(stage=2), {"release": "0.17.2"}),
    ("DS814", {"fp16": {"enabled": True}, **zero(stage=2)}, {"release": "0.17.6", "world_size": 2}),
    ("DS814", {"fp16": {"enabled": True}, **zero(stage=1)}, {"release": "0.17.6", "world_size": 1}),
    ("DS815", {**MUON, **BF16, **zero(stage=1, reduce_scatter=False)}, {"release": "0.19.6"}),
    ("DS816", zero(stage=2, overlap_comm=False), {"release": "0.19.2"}),
    ("DS817", zero(stage=3, zero_hpz_partition_size=1), {"release": "0.19.4", "world_size": 8}),
    ("DS818", {"amp": {"enabled": True}}, {"release": "0.19.7"}),
    ("DS818", {"amp": {"enabled": False}, **zero(stage=1)}, {"release": "0.19.7"}),
    ("DS819", zero(stage=3, mics_shard_size=-1, offload_optimizer=CPU), {"release": "0.19.6"}),
    ("DS820", {"pipeline": {"stages": 2}}, {"release": "0.18.2"}),
    ("DS821", {**MUON, **BF16, **FP32_SUM, **zero(stage=1, reduce_scatter=False)}, {"release": "0.19.8"}),
    ("DS822", {**MUON, **zero(stage=2, reduce_scatter=False, offload_optimizer=CPU)}, {"release": "0.19.7"}),
    ("DS905", zero(stage=2), {"engine": "hf", "args": {"use_unsloth": True}}),
    ("DS906", zero(stage=3), {"engine": "hf", "args": {"model_name_or_path": "Qwen/Qwen3-8B"}}),
    ("DS907", zero(stage=2), {"engine": "hf", "args": {"device_map": "auto"}}),
    ("DS908", zero(stage=2), {"engine": "lightning", "args": {"precision": "bf16-mixed"}}),
    ("DS909", {"fp16": {"enabled": True}, **zero(stage=2)}, {"engine": "hf", "args": {"model_name_or_path": "gpt2", "fp16": True}}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "config", "say"), SILENT, ids=lambda v: v if isinstance(v, str) else "")
def test_a_near_miss_is_not_flagged(code: str, config: dict[str, Any], say: dict[str, Any]) -> None:
    assert find(code) is not None
    report = check({**B, **config}, **say)
    assert code not in codes(report), [(f.code, f.message) for f in report.findings if f.code == code]
    assert "DS100" not in codes(report)
