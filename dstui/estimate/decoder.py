"""Decoder blocks of the known families as programs of allocations (``dstui.estimate.program``).

``decoder(shape, work)`` gives the embedding part, one program per kind of layer and the part after the last
layer with the loss. Written after the ``modeling_*.py`` files of transformers 5.24 (same allocations in 4.57
unless noted). A mixture of experts is an approximation: the experts are computed as two grouped products over
``tokens * experts_per_token`` rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dstui.estimate.allocator import GRADS, LOGITS
from dstui.estimate.families import Inventory, Module, inventory
from dstui.estimate.inputs import ModelShape
from dstui.estimate.program import FREE, WORK, Grad, Param, Program, Tape, Tensor, Workload

TIED = -1
"""Parameter index in the tail that means the embedding of the head."""

GELU_NEW = frozenset({"gpt2", "phi"})
LAYER_NORM = frozenset({"gpt_neox", "phi", "gpt2", "dstui_gpt"})
APPROXIMATE = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"})
"""Families whose activations are approximate (wider range in the estimate)."""


@dataclass(frozen=True)
class Decoder:
    """A model as programs. ``layers[i]`` is the index of layer i's program in ``kinds``."""

    head: Program
    kinds: tuple[Program, ...]
    layers: tuple[int, ...]
    tail: Program
    saved_once: int
    """Bytes that live from the first layer's forward to the end of backward: rotary tables, the mask."""

    def blocks(self) -> Iterable[Program]:
        yield self.head
        for k in self.layers:
            yield self.kinds[k]
        yield self.tail


def decoder(shape: ModelShape, work: Workload) -> Decoder:
    """Programs of ``shape`` under ``work``. Needs a family."""
    return _decoder(shape, tuple(sorted(shape.extra.items())), work)


def named(name: str, targets: Sequence[str]) -> bool:
    """Whether one of ``target_modules`` names the module ``name``: whole, or from a dot on (peft
    ``tuners/tuners_utils.py: check_target_module_exists``)."""
    return any(name == t or name.endswith("." + t) for t in targets)


@lru_cache(maxsize=32)
def _decoder(shape: ModelShape, extra: tuple[tuple[str, Any], ...], work: Workload) -> Decoder:
    return _Builder(shape, dict(extra), work).build()


class _Builder:
    def __init__(self, shape: ModelShape, extra: dict[str, Any], work: Workload) -> None:
        self.shape, self.x, self.work = shape, extra, work
        self.family = shape.family or ""
        self.h = shape.hidden or 0
        self.inner = shape.intermediate or 0
        self.heads = shape.heads or 1
        self.kv = shape.kv_heads or self.heads
        self.d = shape.head_dim or self.h // self.heads
        self.vocab = shape.vocab or 0

    def build(self) -> Decoder:
        inv = inventory(self.shape)
        kinds = tuple(self._layer(inv, k) for k in range(len(inv.kinds)))
        b, seq = self.work.element, self.work.seq
        once = 2 * b * self.d * seq if self.family not in ("gpt2", "dstui_gpt") else 0
        if self.work.attention == "eager":
            once += b * self.work.micro_batch * seq * seq
        return Decoder(self._head(inv), kinds, inv.order, self._tail(inv), once)

    # -- modules and parameters ------------------------------------------------------------------------
    def _program(self, modules: Iterable[Module], extra: Iterable[str]) -> Program:
        """A program with its modules: those that own parameters and the parameterless ``extra``.

        A LoRA target becomes four modules, as peft nests them; quantised weights count packed bytes.
        """
        program = Program()
        work = self.work
        for name in extra:
            program.modules.append((name, ()))

        def own(
            name: str, sizes: Iterable[int], trainable: bool, packed: bool = False, element: int = work.weight
        ) -> None:
            start = len(program.params)
            for n in sizes:
                nbytes = element * n
                if (
                    packed
                ):  # nf4 with double quantisation: 4.127 bits a weight; int8: a byte and a scale a row
                    nbytes = round(n * (0.5 + 0.0159)) if work.quant == "nf4" else n
                program.params.append(Param(n, nbytes, trainable))
            program.modules.append((name, tuple(range(start, len(program.params)))))

        full = work.lora_rank == 0
        for m in modules:
            packed = work.quant != "none" and m.dims is not None and m.name != "lm_head"
            if m.dims is None or full or not self._adapted(m.name):
                own(m.name, m.params, full, packed)
                continue
            n_in, n_out = m.dims
            program.modules.append((m.name, ()))
            own(f"{m.name}.base_layer", m.params, False, packed)
            own(f"{m.name}.lora_A", (work.lora_rank * n_in,), True, element=work.adapter)
            own(f"{m.name}.lora_B", (work.lora_rank * n_out,), True, element=work.adapter)
        return program

    def _adapted(self, name: str) -> bool:
        if name == "lm_head":
            return False
        return not self.work.lora_targets or named(name, self.work.lora_targets)

    # -- before the layers -------------------------------------------------------------------------------
    def _head(self, inv: Inventory) -> Program:
        outer = ("", "backbone") if self.family != "dstui_gpt" else ("",)
        rotary = ("rotary",) if self.family not in ("gpt2", "dstui_gpt") else ()
        program = self._program(inv.head, (*outer, *rotary))

        def body(tape: Tape) -> Tensor:
            for name in outer:
                tape.enter(name)
            parts: list[Tensor] = []
            for m in inv.head:
                tape.enter(m.name)
                size = self.h * (self.work.tokens if m is inv.head[0] else self.work.seq)
                e = tape.new(self.work.element * size)
                name = m.name
                tape.leave(name)

                def backward(_g: Grad, name: str = name) -> list[Grad | None]:
                    tape.enter(name)
                    tape.weight_grads(name)
                    tape.leave(name)
                    return []

                parts.append(tape.leaf(e, backward))
            x = parts[0]
            if len(parts) > 1:
                total = tape.add(parts[0], parts[1], self.h)
                tape.drop(*parts)
                x = total
            elif self.family.startswith("gemma"):
                scaled = tape.scale(x, self.h)
                tape.drop(x)
                x = scaled
            if self.x.get("dropout") and self.family == "gpt2":
                dropped = tape.dropout(x, self.h)
                tape.drop(x)
                x = dropped
            for name in rotary:
                tape.enter(name)
                tape.leave(name)
            return x

        return self._record(program, body, has_input=False)

    # -- one layer -----------------------------------------------------------------------------------------
    def _layer(self, inv: Inventory, kind: int) -> Program:
        modules = inv.kinds[kind]
        names = {m.name for m in modules}
        moe = "mlp.experts" in names
        attn = (
            "attn" if self.family in ("gpt2",) else "attention" if self.family == "gpt_neox" else "self_attn"
        )
        extra = ["", attn, "mlp", "act"] if self.family != "dstui_gpt" else [""]
        program = self._program(modules, extra)

        def norm(tape: Tape, x: Tensor, name: str, width: int | None = None, rows: int = 1) -> Tensor:
            n = self.h if width is None else width
            if self.family in LAYER_NORM:
                return tape.layer_norm(x, name, n * rows)
            return tape.rms_norm(x, name, n, rows, gemma=self.family.startswith("gemma"))

        def attention(tape: Tape, x: Tensor) -> Tensor:
            if attn in extra:
                tape.enter(attn)
            y = self._attention(tape, x, norm)
            if attn in extra:
                tape.leave(attn)
            return y

        def mlp(tape: Tape, x: Tensor) -> Tensor:
            if "mlp" in extra:
                tape.enter("mlp")
            y = self._mixture(tape, x) if moe else self._mlp(tape, x, "mlp", self.inner)
            if "mlp" in extra:
                tape.leave("mlp")
            return y

        def body(tape: Tape, x: Tensor) -> Tensor:
            tape.enter("")
            out = (
                self._parallel(tape, x, norm, attention, mlp)
                if self.family in ("gpt_neox", "phi")
                else (self._sequential(tape, x, norm, attention, mlp))
            )
            tape.leave("")
            return out

        return self._record(program, body, has_input=True)

    def _sequential(self, tape: Tape, x: Tensor, norm: Any, attention: Any, mlp: Any) -> Tensor:
        first, second = (
            ("ln_1", "ln_2")
            if self.family in ("gpt2", "dstui_gpt")
            else (
                "input_layernorm",
                "post_attention_layernorm",
            )
        )
        after_attention = after_mlp = None
        if self.family in ("gemma2", "gemma3"):
            after_attention, second, after_mlp = (
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        elif self.family == "glm4":
            after_attention, after_mlp = "post_self_attn_layernorm", "post_mlp_layernorm"
        n1 = norm(tape, x, first)
        a = attention(tape, n1)
        tape.drop(n1)
        a = self._then(tape, a, norm, after_attention)
        x2 = tape.add(x, a, self.h)
        tape.drop(a)
        n2 = norm(tape, x2, second)
        m = mlp(tape, n2)
        tape.drop(n2)
        m = self._then(tape, m, norm, after_mlp)
        out = tape.add(x2, m, self.h)
        tape.drop(x2, m)
        return out

    @staticmethod
    def _then(tape: Tape, x: Tensor, norm: Any, name: str | None) -> Tensor:
        if name is None:
            return x
        y: Tensor = norm(tape, x, name)
        tape.drop(x)
        return y

    def _parallel(self, tape: Tape, x: Tensor, norm: Any, attention: Any, mlp: Any) -> Tensor:
        """GPT-NeoX and Phi: attention and MLP both read the layer's input."""
        n1 = norm(tape, x, "input_layernorm")
        a = attention(tape, n1)
        if self.family == "gpt_neox":
            tape.drop(n1)
            n2 = norm(tape, x, "post_attention_layernorm")
        else:
            n2 = n1
            a = self._dropped(tape, a)
        m = mlp(tape, n2)
        tape.drop(n2)
        if self.family == "phi":
            m = self._dropped(tape, m)
        both = tape.add(m, a, self.h)
        tape.drop(m, a)
        out = tape.add(both, x, self.h)
        tape.drop(both)
        return out

    def _dropped(self, tape: Tape, x: Tensor) -> Tensor:
        if not self.x.get("dropout"):
            return x
        y = tape.dropout(x, self.h)
        tape.drop(x)
        return y

    def _attention(self, tape: Tape, x: Tensor, norm: Any) -> Tensor:
        family, h, heads, kv, d = self.family, self.h, self.heads, self.kv, self.d
        if family.startswith("deepseek"):
            return self._latent_attention(tape, x, norm)
        wide, narrow = heads * d, kv * d
        if family in ("gpt2", "dstui_gpt", "gpt_neox", "phi3"):
            name = {"gpt_neox": "attention.query_key_value", "phi3": "self_attn.qkv_proj"}.get(
                family, "attn.c_attn"
            )
            fused = tape.linear(x, name, h, wide + 2 * narrow)
            q, k, v = self._split(tape, fused, (wide, narrow, narrow))
        else:
            fused = None
            q = tape.linear(x, "self_attn.q_proj", h, wide)
            k = tape.linear(x, "self_attn.k_proj", h, narrow)
            v = tape.linear(x, "self_attn.v_proj", h, narrow)
        if family in ("qwen3", "qwen3_moe", "gemma3"):
            q, k = (
                self._normed(tape, q, norm, "self_attn.q_norm", heads),
                self._normed(tape, k, norm, "self_attn.k_norm", kv),
            )
        elif family == "phi" and self.x.get("qk_norm"):
            q, k = (
                self._normed(tape, q, norm, "self_attn.q_layernorm", heads),
                self._normed(tape, k, norm, "self_attn.k_layernorm", kv),
            )
        if family not in ("gpt2", "dstui_gpt"):
            qr, kr = tape.rotary(q, wide), tape.rotary(k, narrow)
            tape.drop(q, k)
            q, k = qr, kr
        shared = self.work.together > 1
        if shared:
            q, k, v, kv = self._exchange(tape, q, k, v)
        a = tape.attention(q, k, v, heads, kv, d, d)
        if shared:  # back to this rank's tokens
            tokens = tape.scale(a, wide)
            tape.drop(a)
            a = tokens
        out = {"gpt_neox": "attention.dense", "phi": "self_attn.dense"}.get(
            family, "attn.c_proj" if family in ("gpt2", "dstui_gpt") else "self_attn.o_proj"
        )
        y = tape.linear(a, out, wide, h)
        tape.drop(q, k, v, a)
        if fused is not None:
            tape.drop(fused)
        return self._dropped(tape, y) if family == "gpt2" else y

    def _exchange(self, tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """All-to-all from tokens of all heads to all tokens of some heads, then in the order that attention wants
        (``ulysses_sp.UlyssesSPAttentionHF``); key and value heads fewer than ranks are repeated. Returns the heads
        that keys count for too."""
        kv = max(self.kv, self.work.together)
        out: list[Tensor] = []
        for x, n in ((q, self.heads * self.d), (k, kv * self.d), (v, kv * self.d)):
            sent = tape.scale(x, n)
            tape.drop(x)
            placed = tape.scale(sent, n)
            tape.drop(sent)
            out.append(placed)
        return out[0], out[1], out[2], kv

    def _split(self, tape: Tape, fused: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
        """Views of a fused projection: no memory of their own; their gradients are gathered into one tensor."""
        total = sum(widths)
        views = [tape.new(0) for _ in widths]
        for i, view in enumerate(views):
            first = i == 0

            def backward(_g: Grad, first: bool = first) -> list[Grad | None]:
                return [tape.gwidth(total) if first else None]

            tape.node((fused,), view, tape.save(fused), backward)
        return views

    def _normed(self, tape: Tape, x: Tensor, norm: Any, name: str, rows: int) -> Tensor:
        y: Tensor = norm(tape, x, name, self.d, rows)
        tape.drop(x)
        return y

    def _latent_attention(self, tape: Tape, x: Tensor, norm: Any) -> Tensor:
        rope, nope, value = self.x["qk_rope_head_dim"], self.x["qk_nope_head_dim"], self.x["v_head_dim"]
        rank, latent, heads = self.x["q_lora_rank"], self.x["kv_lora_rank"], self.heads
        wide = heads * (rope + nope)
        if rank is None:
            q = tape.linear(x, "self_attn.q_proj", self.h, wide)
        else:
            low = tape.linear(x, "self_attn.q_a_proj", self.h, rank)
            normed = norm(tape, low, "self_attn.q_a_layernorm", rank)
            tape.drop(low)
            q = tape.linear(normed, "self_attn.q_b_proj", rank, wide)
            tape.drop(normed)
        compressed = tape.linear(x, "self_attn.kv_a_proj_with_mqa", self.h, latent + rope)
        normed = norm(tape, compressed, "self_attn.kv_a_layernorm", latent)
        both = tape.linear(normed, "self_attn.kv_b_proj", latent, heads * (nope + value))
        tape.drop(normed)
        query, key, val = tape.scale(q, wide), tape.scale(both, wide), tape.scale(both, heads * value)
        a = tape.attention(query, key, val, heads, heads, rope + nope, value)
        y = tape.linear(a, "self_attn.o_proj", heads * value, self.h)
        tape.drop(q, compressed, both, query, key, val, a)
        return y

    def _mlp(self, tape: Tape, x: Tensor, base: str, n: int) -> Tensor:
        family, h = self.family, self.h
        if family in ("gpt_neox", "phi", "gpt2", "dstui_gpt"):
            up, down = {
                "gpt_neox": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                "phi": ("mlp.fc1", "mlp.fc2"),
            }.get(family, ("mlp.c_fc", "mlp.c_proj"))
            a = tape.linear(x, up, h, n)
            self._act(tape, True)
            act = tape.gelu_new(a, n) if family in GELU_NEW else tape.unary(a, n)
            self._act(tape, False)
            tape.drop(a)
            y = tape.linear(act, down, n, h)
            tape.drop(act)
            return self._dropped(tape, y) if family == "gpt2" else y
        fused: Tensor | None = None
        if family in ("phi3", "glm", "glm4"):
            fused = tape.linear(x, "mlp.gate_up_proj", h, 2 * n)
            gate, up_t = self._split(tape, fused, (n, n))
        else:
            gate = tape.linear(x, f"{base}.gate_proj", h, n)
        self._act(tape, True)
        act = tape.unary(gate, n)
        self._act(tape, False)
        if fused is None:
            tape.drop(gate)
            up_t = tape.linear(x, f"{base}.up_proj", h, n)
        both = tape.product(act, up_t, n)
        tape.drop(act, up_t)
        if fused is not None:
            tape.drop(gate)
        y = tape.linear(both, f"{base}.down_proj", n, h)
        tape.drop(both, fused)
        return y

    def _act(self, tape: Tape, enter: bool) -> None:
        if self.family == "dstui_gpt":
            return
        if enter:
            tape.enter("act")
        else:
            tape.leave("act")

    def _mixture(self, tape: Tape, x: Tensor) -> Tensor:
        """Router, grouped experts over ``tokens * experts_per_token`` rows, weighted sum, shared expert."""
        experts, k = self.shape.experts or 1, self.shape.experts_per_token or 1
        n, h = self.x["moe_intermediate"], self.h
        tape.enter("mlp.gate")
        kept = tape.save(x)
        router = tape.width(experts)
        tape.leave("mlp.gate")

        def router_backward(_g: Grad) -> list[Grad | None]:
            tape.enter("mlp.gate")
            tape.weight_grads("mlp.gate")
            tape.leave("mlp.gate")
            return [tape.gwidth(h)]

        tape.node((x,), router, kept, router_backward)
        soft = tape.width(experts, 4)
        tape.node((router,), soft, tape.save(soft), lambda _g: [tape.gwidth(experts)])
        tape.enter("mlp.experts")
        rows = tape.node((x,), tape.width(k * h), (), lambda _g: [tape.gwidth(h)])
        saved_rows = tape.save(rows)
        gate_up = tape.width(k * 2 * n)

        def first(_g: Grad) -> list[Grad | None]:
            dx = tape.gwidth(k * h)
            index = tape.program.modules[tape.index("mlp.experts")][1][0]
            self._expert_grad(tape, index)
            tape.leave("mlp.experts")
            return [dx]

        tape.node((rows,), gate_up, saved_rows, first)
        act = tape.node(
            (gate_up,), tape.width(k * n), tape.save(gate_up), lambda _g: [tape.gwidth(2 * k * n)]
        )
        both = tape.node(
            (act, gate_up), tape.width(k * n), tape.save(act), lambda _g: [tape.gwidth(k * n), None]
        )
        saved_both = tape.save(both)
        down = tape.width(k * h)

        def second(_g: Grad) -> list[Grad | None]:
            tape.enter("mlp.experts")
            dx = tape.gwidth(k * n)
            index = tape.program.modules[tape.index("mlp.experts")][1][1]
            self._expert_grad(tape, index)
            return [dx]

        tape.node((both,), down, saved_both, second)
        weighted = tape.node(
            (down, soft),
            tape.width(k * h),
            tape.save(down),
            lambda _g: [tape.gwidth(k * h), tape.gwidth(experts, 4)],
        )
        y = tape.node((weighted,), tape.width(h), (), lambda _g: [tape.gwidth(k * h)])
        tape.leave("mlp.experts")
        tape.drop(router, soft, rows, gate_up, act, both, down, weighted)
        shared = self.x.get("shared_intermediate")
        if shared:
            base = "mlp.shared_expert" if self.family == "qwen2_moe" else "mlp.shared_experts"
            s = self._mlp(tape, x, base, shared)
            if self.family == "qwen2_moe":
                gate = tape.linear(x, "mlp.shared_expert_gate", h, 1)
                scaled = tape.product(s, gate, h)
                tape.drop(s, gate)
                s = scaled
            total = tape.add(y, s, h)
            tape.drop(y, s)
            y = total
        return y

    @staticmethod
    def _expert_grad(tape: Tape, index: int) -> None:
        p = tape.program.params[index]
        if p.trainable:
            tape.gradient(index, tape.work.element * p.numel)

    # -- after the layers ------------------------------------------------------------------------------------
    def _tail(self, inv: Inventory) -> Program:
        tied = bool(self.shape.tied)
        program = self._program(inv.tail, ())
        names = [name for name, _params in program.modules]
        if tied:
            full = self.work.lora_rank == 0
            program.params.append(Param(0, 0, full))
            if "lm_head" in names:  # Phi keeps a bias of its own
                at = names.index("lm_head")
                program.modules[at] = ("lm_head", (TIED, *program.modules[at][1]))
            else:
                program.modules.append(("lm_head", (TIED,)))
        final = inv.tail[0].name
        work, v, parts = self.work, self.vocab, int(self.x.get("head_ranks", 1))

        def logits_width(tape: Tape, element: int) -> Tensor:
            return tape.new(element * v * work.tokens, tag=LOGITS)

        def glogits(tape: Tape, element: int) -> Grad:
            return tape.gnew(element * v * work.tokens, LOGITS)

        def body(tape: Tape, x: Tensor) -> Tensor:
            n = (
                tape.layer_norm(x, final, self.h)
                if self.family in LAYER_NORM
                else tape.rms_norm(x, final, self.h, gemma=self.family.startswith("gemma"))
            )
            tape.drop(x, x)  # the model's `hidden_states` now names the normed ones
            b = work.element
            if work.loss == "fused":
                return self._fused_loss(tape, n)
            tape.enter("lm_head")
            trains = (tied and work.lora_rank == 0) or (not tied and tape.trains("lm_head"))
            kept = tape.save(n) if trains else ()
            logits = tape.new(b * v // parts * work.tokens, tag=LOGITS)
            tape.leave("lm_head")

            def head_backward(_g: Grad) -> list[Grad | None]:
                tape.enter("lm_head")
                dx = tape.gwidth(self.h)
                tape.ops.append((WORK, 0, 0, 0))
                if tied and work.lora_rank == 0:
                    tape.gradient(TIED, b * v * self.h)
                elif not tied:
                    tape.weight_grads("lm_head")
                tape.leave("lm_head")
                return [dx]

            tape.node((n,), logits, kept, head_backward)
            tape.drop(n)
            if parts > 1:  # this rank's columns, gathered
                whole = logits_width(tape, b)
                tape.node((logits,), whole, (), lambda _g: [tape.gnew(b * v // parts * work.tokens, LOGITS)])
                tape.drop(logits)
                logits = whole
            if self.x.get("softcap"):
                scaled = logits_width(tape, b)
                tape.node((logits,), scaled, (), lambda _g: [glogits(tape, b)])
                tape.drop(logits)
                bent = logits_width(tape, b)
                tape.node((scaled,), bent, tape.save(bent), lambda _g: [glogits(tape, b)])
                tape.drop(scaled)
                logits = logits_width(tape, b)
                tape.node((bent,), logits, (), lambda _g: [glogits(tape, b)])
                tape.drop(bent)
            if work.loss == "chunked":  # the logits are saved, their gradient has their type
                kept = tape.save(logits)
                loss = tape.new(4)
                tape.node((logits,), loss, kept, lambda _g: [glogits(tape, b)])
                tape.drop(logits)
                program.logits = logits.slot
                return loss
            # ForCausalLMLoss: float(), then cross entropy = log_softmax + nll
            wide = logits
            if b == 2:
                wide = logits_width(tape, 4)
                tape.node((logits,), wide, (), lambda _g: [glogits(tape, b)])
            soft = logits_width(tape, 4)
            tape.node((wide,), soft, tape.save(soft), lambda _g: [glogits(tape, 4)])
            loss = tape.new(4)
            tape.node((soft,), loss, (), lambda _g: [glogits(tape, 4)])
            tape.drop(soft)
            if b == 2:
                tape.drop(wide)
            tape.drop(logits)
            program.logits = logits.slot
            return loss

        return self._record(program, body, has_input=True)

    def _fused_loss(self, tape: Tape, n: Tensor) -> Tensor:
        """Liger's fused linear cross entropy (``fused_linear_cross_entropy_forward``): both gradients are made in
        the forward pass, from logits of as many rows at a time as take no more than the input does."""
        work, v, h, b = self.work, self.vocab, self.h, self.work.element
        tied = bool(self.shape.tied)
        trains = (tied and work.lora_rank == 0) or (not tied and tape.trains("lm_head"))
        tape.enter("lm_head")
        source = tape.width(h, grad=False)
        weight = tape.new(b * v * h, grad=False, tag=GRADS) if trains else None
        tokens = work.tokens
        rows = min(tokens, 1 << (-(-tokens // -(-v // h)) - 1).bit_length())
        logits = tape.new(b * v * rows, grad=False, tag=LOGITS)
        tape.work_space()
        tape.drop(logits)
        loss = tape.new(4)
        tape.leave("lm_head")

        def backward(_g: Grad) -> list[Grad | None]:
            tape.enter("lm_head")
            if weight is not None:
                at = TIED if tied else tape.program.modules[tape.index("lm_head")][1][0]
                tape.give(at, weight)
            tape.leave("lm_head")
            return [Grad(source.slot)]

        kept = [t for t in (source, weight) if t is not None]
        if not tape.grad:
            tape.drop(*kept)
        tape.node((n,), loss, (), backward)
        tape.drop(n)
        return loss

    # -- recording -------------------------------------------------------------------------------------------
    def _record(self, program: Program, body: Any, has_input: bool) -> Program:
        """Fill the operation lists of ``program`` by running ``body`` on two tapes."""

        def start(tape: Tape) -> Tensor | None:
            if not has_input:
                return None
            x = Tensor(tape.slot(), self.work.element * self.h * self.work.tokens, tape.grad)
            x.refs = 2  # the caller's name and ours: never freed here
            return x

        quiet = Tape(self.work, False, program)
        x = start(quiet)
        out = body(quiet) if x is None else body(quiet, x)
        program.inference, program.inference_output = quiet.ops, out.slot
        program.inference_held = quiet.held
        tape = Tape(self.work, True, program)
        x = start(tape)
        out = body(tape) if x is None else body(tape, x)
        program.forward, program.output, program.held = tape.ops, out.slot, tape.held
        # a recomputation stops at the last save and loses its local names there
        program.recompute = [*tape.ops[: tape.cut], *((FREE, slot, 0, 0) for slot in tape.cut_frees)]
        program.input_saved = x is not None and x.saves > 0
        tape.ops = []
        seed = Grad(tape.slot())
        seed.refs = 1
        program.grad_output = seed.slot
        result = tape.run_backward(out, seed, x)
        program.backward = tape.ops
        program.grad_input = -1 if result is None else result.slot
        program.slots = max(tape.slots, quiet.slots)
        return program
