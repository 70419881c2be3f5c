"""The decoder families that dstui knows: from a Hugging Face ``config.json`` to every parameter.

``shape_from_config`` reads the numbers, ``inventory`` lists the modules that own parameters, in the
registration order of the classes of transformers 5 (``PreTrainedModel.named_parameters``). Both are pure
arithmetic; ``tests/real/test_estimate_families.py`` compares them with the real classes on the meta device.

Numbers are elements (not bytes). Experts of a mixture are one fused tensor per projection, as transformers 5
stores them; earlier releases hold one matrix per expert, with the same sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dstui.errors import DstuiError
from dstui.estimate.inputs import ModelShape
from dstui.i18n import _

FAMILIES: dict[str, str] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "gpt_neox": "gpt_neox",
    "phi": "phi",
    "phi3": "phi3",
    "glm": "glm",
    "glm4": "glm4",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "gpt2": "gpt2",
    "dstui_gpt": "dstui_gpt",
}
"""``model_type`` of a config.json -> family. ``dstui_gpt`` is the GPT bundled with ``dstui demo``."""

TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3", "gpt2", "dstui_gpt"})
"""Families whose configuration class has ``tie_word_embeddings=True`` when the file does not say."""


@dataclass(frozen=True)
class Module:
    """A module that owns parameters: its name and the elements of each of its parameters."""

    name: str
    params: tuple[int, ...]
    dims: tuple[int, int] | None = None
    """``(in, out)`` of a linear layer, which LoRA can adapt and quantisation can pack."""

    @property
    def numel(self) -> int:
        return sum(self.params)


@dataclass(frozen=True)
class Inventory:
    """Every parameter of a model in registration order; layers of one kind are stored once."""

    prefix: str
    """Name of the layer list: ``model.layers``."""
    head: tuple[Module, ...]
    kinds: tuple[tuple[Module, ...], ...]
    """The distinct decoder layers (a mixture may start with dense ones)."""
    order: tuple[int, ...]
    """Kind of each layer."""
    tail: tuple[Module, ...]

    @property
    def params(self) -> int:
        per_kind = [sum(m.numel for m in kind) for kind in self.kinds]
        return sum(m.numel for m in self.head + self.tail) + sum(per_kind[k] for k in self.order)

    @property
    def largest(self) -> int:
        """Elements of the largest single parameter (DeepSpeed sizes staging buffers by it)."""
        groups = (self.head, self.tail, *self.kinds)
        return max((n for group in groups for m in group for n in m.params), default=0)

    def modules(self) -> list[tuple[str, int]]:
        out = [(m.name, m.numel) for m in self.head]
        for i, k in enumerate(self.order):
            out += [(f"{self.prefix}.{i}.{m.name}", m.numel) for m in self.kinds[k]]
        return out + [(m.name, m.numel) for m in self.tail]

    def parameters(self) -> list[int]:
        """Elements of each parameter, in registration order."""
        out = [n for m in self.head for n in m.params]
        for k in self.order:
            out += [n for m in self.kinds[k] for n in m.params]
        return out + [n for m in self.tail for n in m.params]


def shape_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """A ModelShape from the content of a ``config.json``.

    A multimodal wrapper (``text_config``) gives the shape of its language part with a note. Raises DstuiError
    for an architecture outside ``FAMILIES`` and for a missing or impossible number.
    """
    notes: list[str] = []
    kind = str(config.get("model_type", ""))
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        notes.append(
            _("only the language part of this multimodal model is counted; its other towers are not")
        )
        outer = config
        config = {**inner}
        config.setdefault("torch_dtype", outer.get("torch_dtype", outer.get("dtype")))
        kind = str(config.get("model_type") or kind)
    stored = config.get("quantization_config")
    if isinstance(stored, Mapping):
        notes.append(
            _("its weights are stored quantised ({method}); they are counted in the type of the run").format(
                method=stored.get("quant_method") or "?"
            )
        )
    family = FAMILIES.get(kind)
    if family is None:
        raise DstuiError(
            _("{source}: no formula for architecture '{kind}'").format(source=source, kind=kind or "?"),
            _("give the number of parameters instead, for example --model 7B"),
        )
    shape = _Reader(config, family, name, source, notes).shape()
    return replace(shape, extra={**shape.extra, "multimodal": True}) if isinstance(inner, Mapping) else shape


_LAYERS = ("num_hidden_layers", "n_layer")
_MOST_LAYERS, _MOST = 4096, 1 << 31
"""Beyond these a config.json is damaged; the replay walks layer by layer."""


class _Reader:
    def __init__(
        self, config: Mapping[str, Any], family: str, name: str, source: str, notes: list[str]
    ) -> None:
        self.config, self.family, self.name, self.source, self.notes = config, family, name, source, notes

    def number(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise DstuiError(
                    _("{source}: '{key}' must be a whole number, found {value!r}").format(
                        source=self.source, key=key, value=value
                    ),
                    _("use the config.json that came with the model"),
                )
            if value > (_MOST_LAYERS if key in _LAYERS else _MOST):
                raise DstuiError(
                    _("{source}: '{key}' cannot be {value}").format(source=self.source, key=key, value=value),
                    _("use the config.json that came with the model"),
                )
            return value
        if default is None:
            raise DstuiError(
                _("{source}: '{key}' is missing").format(source=self.source, key=keys[0]),
                _("use the config.json that came with the model"),
            )
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def shape(self) -> ModelShape:
        family = self.family
        hidden = self.number("hidden_size", "n_embd")
        layers = self.number(*_LAYERS)
        heads = self.number("num_attention_heads", "n_head")
        if not (hidden and layers and heads and self.number("vocab_size")):
            raise DstuiError(
                _("{source}: hidden size, layers, heads and vocabulary must be above 0").format(
                    source=self.source
                ),
                _("use the config.json that came with the model"),
            )
        kv_default = {"gemma2": 4, "gemma3": 4, "glm": 2, "glm4": 2}.get(family, heads)
        kv = (
            heads
            if family in ("gpt_neox", "gpt2", "dstui_gpt")
            else self.number("num_key_value_heads", default=kv_default)
        )
        dim_default = {"gemma": 256, "gemma2": 256, "gemma3": 256, "qwen3": 128, "glm": 128, "glm4": 128}.get(
            family, hidden // heads
        )
        head_dim = self.number("head_dim", default=dim_default)
        if family in ("gpt_neox", "gpt2", "dstui_gpt", "phi", "qwen2"):
            head_dim = hidden // heads  # these classes have no head_dim of their own
        inner_default = 4 * hidden if family in ("gpt2", "dstui_gpt") else None
        inner = self.number("intermediate_size", "n_inner", default=inner_default)
        extra, experts, per_token = self._extra(inner, layers)
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        shape = ModelShape(
            name=self.name,
            params=0,
            source=self.source,
            family=family,
            hidden=hidden,
            intermediate=inner,
            layers=layers,
            heads=heads,
            kv_heads=kv,
            head_dim=head_dim,
            vocab=self.number("vocab_size"),
            tied=self.flag("tie_word_embeddings", family in TIED_BY_DEFAULT),
            dtype=dtype if dtype in ("bfloat16", "float16", "float32") else None,
            experts=experts,
            experts_per_token=per_token,
            max_positions=self.number("max_position_embeddings", "n_positions", "n_ctx", default=0) or None,
            exact=True,
            extra=extra,
            notes=tuple(self.notes),
        )
        return _with_params(shape)

    def _extra(self, inner: int, layers: int) -> tuple[dict[str, Any], int | None, int | None]:
        family = self.family
        extra: dict[str, Any] = {}
        attention_bias = self.flag("attention_bias", family in ("gpt_neox", "glm", "glm4"))
        extra["qkv_bias"] = {
            "qwen2": True,
            "phi": True,
            "gpt2": True,
            "dstui_gpt": True,
            "qwen2_moe": self.flag("qkv_bias", True),
        }.get(family, attention_bias if family not in ("mistral", "phi3", "mixtral") else False)
        extra["o_bias"] = (
            family in ("phi", "gpt2", "dstui_gpt")
            or (
                family in ("llama", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "qwen3_moe")
                and attention_bias
            )
            or (family in ("deepseek_v2", "deepseek_v3") and attention_bias)
        )
        extra["mlp_bias"] = family in ("gpt_neox", "phi", "gpt2", "dstui_gpt") or (
            family == "llama" and self.flag("mlp_bias", False)
        )
        if family == "phi":
            extra["qk_norm"] = self.flag("qk_layernorm", False)
        if family in ("gpt2", "phi"):
            rates = [
                self.config.get(k, 0.1 if family == "gpt2" else 0.0) for k in ("resid_pdrop", "embd_pdrop")
            ]
            extra["dropout"] = any(isinstance(r, (int, float)) and r > 0 for r in rates)
        if family == "gemma2":
            extra["softcap"] = self.config.get("final_logit_softcapping", 30.0) is not None
        if family not in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"):
            return extra, None, None
        defaults = {"mixtral": 8, "qwen2_moe": 60, "qwen3_moe": 128, "deepseek_v2": 64, "deepseek_v3": 256}
        experts = self.number(
            "num_experts", "num_local_experts", "n_routed_experts", default=defaults[family]
        )
        per_token = self.number(
            "num_experts_per_tok",
            default={"mixtral": 2, "qwen2_moe": 4, "qwen3_moe": 8, "deepseek_v2": 6, "deepseek_v3": 8}[
                family
            ],
        )
        extra["moe_intermediate"] = inner if family == "mixtral" else self.number("moe_intermediate_size")
        dense: list[int] = []
        if family.startswith("deepseek"):
            dense = list(range(min(layers, self.number("first_k_dense_replace", default=0))))
            extra["shared_intermediate"] = extra["moe_intermediate"] * self.number(
                "n_shared_experts", default=1 if family == "deepseek_v3" else 2
            )
            rank = self.config.get("q_lora_rank", 1536)
            extra["q_lora_rank"] = None if rank is None else self.number("q_lora_rank", default=1536)
            for key, default in (
                ("kv_lora_rank", 512),
                ("qk_rope_head_dim", 64),
                ("qk_nope_head_dim", 128),
                ("v_head_dim", 128),
            ):
                extra[key] = self.number(key, default=default)
        elif family.startswith("qwen"):
            only = self.config.get("mlp_only_layers") or []
            step = self.number("decoder_sparse_step", default=1)
            dense = [i for i in range(layers) if i in only or not step or (i + 1) % step]
            if family == "qwen2_moe":
                extra["shared_intermediate"] = self.number("shared_expert_intermediate_size", default=5632)
        if len(dense) == layers:
            experts, per_token = 0, 0
        extra["dense_layers"] = tuple(dense)
        return extra, experts, per_token


def _with_params(shape: ModelShape) -> ModelShape:
    from dataclasses import replace

    return replace(shape, params=inventory(shape).params)


def inventory(shape: ModelShape) -> Inventory:
    """Every parameter of ``shape`` in registration order (transformers 5). Needs a shape with a family."""
    return _inventory(shape, tuple(sorted((k, v) for k, v in shape.extra.items())))


@lru_cache(maxsize=64)
def _inventory(shape: ModelShape, extra: tuple[tuple[str, Any], ...]) -> Inventory:
    return _Builder(shape, dict(extra)).build()


class _Builder:
    def __init__(self, shape: ModelShape, extra: Mapping[str, Any]) -> None:
        if None in (shape.hidden, shape.layers, shape.heads, shape.vocab, shape.family):
            raise ValueError("inventory() needs a shape with dimensions")
        self.x = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, **extra}
        self.family = shape.family or ""
        self.h = shape.hidden or 0
        self.inner = shape.intermediate or 0
        self.layers = shape.layers or 0
        self.heads = shape.heads or 0
        self.kv = shape.kv_heads or self.heads
        self.d = shape.head_dim or self.h // self.heads
        self.vocab = shape.vocab or 0
        self.tied = bool(shape.tied)
        self.experts = shape.experts or 0
        self.positions = shape.max_positions or 0

    def linear(self, name: str, n_in: int, n_out: int, bias: bool = False) -> Module:
        return Module(name, (n_in * n_out, n_out) if bias else (n_in * n_out,), (n_in, n_out))

    def norm(self, name: str, width: int | None = None) -> Module:
        """LayerNorm (weight and bias) in the older families, RMSNorm (weight) in the others."""
        n = self.h if width is None else width
        return Module(name, (n, n) if self.family in ("gpt_neox", "phi", "gpt2", "dstui_gpt") else (n,))

    def build(self) -> Inventory:
        dense = set(self.x.get("dense_layers", ()))
        sparse = self.experts > 0
        kinds: list[tuple[Module, ...]] = []
        order: list[int] = []
        index: dict[bool, int] = {}
        for i in range(self.layers):
            moe = sparse and i not in dense
            if moe not in index:
                index[moe] = len(kinds)
                kinds.append(self.layer(moe))
            order.append(index[moe])
        head: tuple[Module, ...]
        tail: tuple[Module, ...]
        if self.family == "gpt_neox":
            head = (Module("gpt_neox.embed_in", (self.vocab * self.h,)),)
            tail = (self.norm("gpt_neox.final_layer_norm"), *self.output("lm_head"))
            prefix = "gpt_neox.layers"
        elif self.family in ("gpt2", "dstui_gpt"):
            base = "transformer." if self.family == "gpt2" else ""
            head = (
                Module(f"{base}wte", (self.vocab * self.h,)),
                Module(f"{base}wpe", (self.positions * self.h,)),
            )
            tail = (self.norm(f"{base}ln_f"), *self.output("lm_head"))
            prefix = f"{base}h"
        else:
            head = (Module("model.embed_tokens", (self.vocab * self.h,)),)
            final = "model.final_layernorm" if self.family == "phi" else "model.norm"
            tail = (self.norm(final), *self.output("lm_head"))
            prefix = "model.layers"
        return Inventory(prefix, head, tuple(kinds), tuple(order), tail)

    def output(self, name: str) -> tuple[Module, ...]:
        """The untied head; Phi's has a bias, which stays a parameter when the weight is tied."""
        bias = self.family == "phi"
        if self.tied:
            return (Module(name, (self.vocab,)),) if bias else ()
        return (self.linear(name, self.h, self.vocab // self.x.get("head_ranks", 1), bias),)

    def layer(self, moe: bool) -> tuple[Module, ...]:
        if self.family == "gpt_neox":
            return (
                self.norm("input_layernorm"),
                self.norm("post_attention_layernorm"),
                self.linear("attention.query_key_value", self.h, 3 * self.h, self.x["qkv_bias"]),
                self.linear("attention.dense", self.h, self.h, self.x["o_bias"]),
                self.linear("mlp.dense_h_to_4h", self.h, self.inner, True),
                self.linear("mlp.dense_4h_to_h", self.inner, self.h, True),
            )
        if self.family in ("gpt2", "dstui_gpt"):
            return (
                self.norm("ln_1"),
                self.linear("attn.c_attn", self.h, 3 * self.h, True),
                self.linear("attn.c_proj", self.h, self.h, True),
                self.norm("ln_2"),
                self.linear("mlp.c_fc", self.h, self.inner, True),
                self.linear("mlp.c_proj", self.inner, self.h, True),
            )
        norms = [self.norm("input_layernorm")]
        if self.family != "phi":
            norms.append(self.norm("post_attention_layernorm"))
        if self.family in ("gemma2", "gemma3"):
            norms += [self.norm("pre_feedforward_layernorm"), self.norm("post_feedforward_layernorm")]
        if self.family == "glm4":
            norms += [self.norm("post_self_attn_layernorm"), self.norm("post_mlp_layernorm")]
        return (*self.attention(), *(self.mixture() if moe else self.mlp()), *norms)

    def attention(self) -> tuple[Module, ...]:
        h, q, k = self.h, self.heads * self.d, self.kv * self.d
        bias, o_bias = self.x["qkv_bias"], self.x["o_bias"]
        if self.family.startswith("deepseek"):
            return self.latent_attention(o_bias)
        if self.family == "phi3":
            return (
                self.linear("self_attn.o_proj", q, h),
                self.linear("self_attn.qkv_proj", h, q + 2 * k),
            )
        out = "dense" if self.family == "phi" else "o_proj"
        projections = (
            self.linear("self_attn.q_proj", h, q, bias),
            self.linear("self_attn.k_proj", h, k, bias),
            self.linear("self_attn.v_proj", h, k, bias),
            self.linear(f"self_attn.{out}", q, h, o_bias),
        )
        if self.family == "phi" and self.x.get("qk_norm"):
            width = self.h // self.heads
            return (
                *projections,
                self.norm("self_attn.q_layernorm", width),
                self.norm("self_attn.k_layernorm", width),
            )
        if self.family in ("qwen3", "qwen3_moe", "gemma3"):
            return (
                *projections,
                self.norm("self_attn.q_norm", self.d),
                self.norm("self_attn.k_norm", self.d),
            )
        return projections

    def latent_attention(self, bias: bool) -> tuple[Module, ...]:
        """Multi-head latent attention (DeepSeek-V2/V3): low-rank queries (optional) and key/values."""
        rope, nope, value = self.x["qk_rope_head_dim"], self.x["qk_nope_head_dim"], self.x["v_head_dim"]
        rank, latent = self.x["q_lora_rank"], self.x["kv_lora_rank"]
        width = self.heads * (rope + nope)
        query: tuple[Module, ...]
        if rank is None:
            query = (self.linear("self_attn.q_proj", self.h, width),)
        else:
            query = (
                self.linear("self_attn.q_a_proj", self.h, rank, bias),
                self.norm("self_attn.q_a_layernorm", rank),
                self.linear("self_attn.q_b_proj", rank, width),
            )
        return (
            *query,
            self.linear("self_attn.kv_a_proj_with_mqa", self.h, latent + rope, bias),
            self.norm("self_attn.kv_a_layernorm", latent),
            self.linear("self_attn.kv_b_proj", latent, self.heads * (nope + value)),
            self.linear("self_attn.o_proj", self.heads * value, self.h, bias),
        )

    def mlp(self, base: str = "mlp", inner: int | None = None) -> tuple[Module, ...]:
        h, n, bias = self.h, self.inner if inner is None else inner, self.x["mlp_bias"]
        if self.family == "phi":
            return (self.linear("mlp.fc1", h, n, True), self.linear("mlp.fc2", n, h, True))
        if self.family in ("phi3", "glm", "glm4"):
            return (self.linear("mlp.gate_up_proj", h, 2 * n), self.linear("mlp.down_proj", n, h))
        return (
            self.linear(f"{base}.gate_proj", h, n, bias),
            self.linear(f"{base}.up_proj", h, n, bias),
            self.linear(f"{base}.down_proj", n, h, bias),
        )

    def mixture(self) -> tuple[Module, ...]:
        h, e, n = self.h, self.experts, self.x["moe_intermediate"]
        fused = Module("mlp.experts", (e * 2 * n * h, e * h * n))
        router = Module("mlp.gate", (e * h,))
        shared = self.x.get("shared_intermediate")
        if self.family == "qwen3_moe":
            return (fused, router)
        if self.family == "mixtral":
            return (router, fused)
        if self.family == "qwen2_moe":
            return (
                router,
                fused,
                *self.mlp("mlp.shared_expert", shared),
                self.linear("mlp.shared_expert_gate", h, 1),
            )
        return (fused, router, *self.mlp("mlp.shared_experts", shared))


def split_layers(shape: ModelShape, ranks: int, *, vocab: bool) -> ModelShape:
    """What one of ``ranks`` has of a model whose linear layers are split by rows or columns (AutoTP,
    ``module_inject/auto_tp.py``): its part of the heads and of the inner width, and of the vocabulary if asked;
    norms and the residual stream stay whole. ``params`` are those of the part. With ``vocab`` embedding and head
    are split by tokens, and so are the logits; without, only the head is, and the logits are gathered
    (``LinearLayer``, ``gather_output``)."""

    def part(n: int | None) -> int | None:
        return None if n is None else max(1, -(-n // ranks))

    extra = {
        k: part(v) if k in ("moe_intermediate", "shared_intermediate") else v for k, v in shape.extra.items()
    }
    if not vocab and not shape.tied:
        extra["head_ranks"] = ranks
    heads = shape.heads or 1
    piece = replace(
        shape,
        heads=part(shape.heads),
        kv_heads=part(shape.kv_heads),
        head_dim=shape.head_dim or (shape.hidden or 1) // heads,
        intermediate=part(shape.intermediate),
        vocab=part(shape.vocab) if vocab else shape.vocab,
        extra=extra,
    )
    return replace(piece, params=inventory(piece).params)
