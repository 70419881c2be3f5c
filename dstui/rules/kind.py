"""What a file is when it is no DeepSpeed training config: told by keys that only the other format has."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import N_, _

_KINDS: tuple[tuple[str, str, frozenset[str], int], ...] = (
    # (kind, name for people, telling keys, how many must be there)
    (
        "accelerate",
        N_("an Accelerate configuration"),
        frozenset({"compute_environment", "distributed_type", "deepspeed_config", "machine_rank", "main_training_function",
                   "num_machines", "num_processes", "downcast_bf16", "fsdp_config"}),
        2,
    ),
    (
        "axolotl",
        N_("an Axolotl configuration"),
        frozenset({"base_model", "datasets", "adapter", "sequence_len", "micro_batch_size", "lora_r", "val_set_size",
                   "special_tokens", "sample_packing", "num_epochs", "wandb_project"}),
        3,
    ),
    (
        "llamafactory",
        N_("a LLaMA-Factory configuration"),
        frozenset({"finetuning_type", "cutoff_len", "dataset_dir", "lora_target", "template", "stage", "do_train",
                   "model_name_or_path", "overwrite_cache", "preprocessing_num_workers", "adapter_name_or_path"}),
        3,
    ),
    (
        "swift",
        N_("an ms-swift configuration"),
        frozenset({"train_type", "tuner_type", "model_type", "custom_train_dataset_path", "sft_type", "torch_dtype",
                   "lora_rank", "target_modules", "system"}),
        4,
    ),
    (
        "hf-args",
        N_("Hugging Face training arguments"),
        frozenset({"output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs",
                   "learning_rate", "save_strategy", "logging_steps", "eval_strategy", "evaluation_strategy", "warmup_ratio",
                   "lr_scheduler_type", "max_grad_norm", "report_to", "save_steps", "gradient_checkpointing", "deepspeed"}),
        2,
    ),
    (
        "hf-model",
        N_("a Hugging Face model's config.json"),
        frozenset({"architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                   "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id"}),
        3,
    ),
    (
        "lora",
        N_("a LoRA adapter's configuration"),
        frozenset({"peft_type", "target_modules", "lora_alpha", "base_model_name_or_path", "task_type"}),
        3,
    ),
    (
        "inference",
        N_("a DeepSpeed inference configuration"),
        frozenset({"replace_with_kernel_inject", "kernel_inject", "injection_policy", "injection_policy_tuple", "max_out_tokens",
                   "max_tokens", "min_out_tokens", "enable_cuda_graph", "replace_method", "set_empty_params", "return_tuple",
                   "mp_size", "quant", "save_mp_checkpoint_path", "use_triton", "keep_module_on_host", "moe"}),
        1,
    ),
)  # fmt: skip

_OWN = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "optimizer",
    "scheduler", "fp16", "bf16", "bfloat16", "gradient_clipping", "steps_per_print", "wall_clock_breakdown",
    "zero_allow_untested_optimizer", "prescale_gradients", "activation_checkpointing", "flops_profiler", "tensorboard",
    "csv_monitor", "comms_logger", "data_efficiency", "amp", "communication_data_type", "zero_force_ds_cpu_optimizer",
})  # fmt: skip
"""Keys that make a file a training config whatever else is in it. ``gradient_accumulation_steps`` alone does not."""


def identify(keys: Collection[str]) -> tuple[str, str] | None:
    """(kind, name) of what a file with these top-level keys is, None for a DeepSpeed training config.

    ``name`` is an English literal to translate. ``unknown`` = not one key that DeepSpeed knows.
    """
    own = _OWN & set(keys)
    shared = {"gradient_accumulation_steps", "optimizer", "scheduler", "fp16", "bf16"}
    for kind, name, telling, enough in _KINDS:
        found = telling & set(keys)
        if len(found) >= enough and len(found) > 2 * len(own - shared):
            return kind, name
    return None


def identify_text(text: str) -> tuple[str, str] | None:
    """The same for text that cannot be parsed as JSON: YAML's top-level keys are read by their looks."""
    keys = re.findall(r"^([A-Za-z_][\w.-]*)\s*:(?:\s|$)", text, re.M)
    if len(keys) < 2 or text.lstrip().startswith("{"):
        return None
    return identify(keys) or ("yaml", N_("a YAML file"))


def refuse_other(data: Any, path: str) -> None:
    """Raises DstuiError for a file of another tool: its keys would all be read as left to their defaults."""
    other = identify(top_level_keys(data))
    if other is not None:
        raise DstuiError(
            f"{path}: " + _("this is {name}, not a DeepSpeed config").format(name=_(other[1])),
            _("see: dstui check {path}").format(path=path),
        )


def top_level_keys(data: Any) -> list[str]:
    """The keys of a file's data as text; none when it is no object."""
    return [str(k) for k in data] if isinstance(data, Mapping) else []
