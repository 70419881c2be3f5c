"""The allocations of a decoder's forward and backward pass, in program order.

``Tape`` is a small symbolic autograd: a layer is written once, as the Hugging Face class computes it, and the
tape derives what a forward without gradient, a forward with gradient (saved tensors stay) and the backward
pass allocate and free. The result is a flat list of operations that ``dstui.estimate.replay`` runs through
the allocator, once per layer.

What each operator keeps and needs for backward follows PyTorch's ``tools/autograd/derivatives.yaml`` and the
modelling code of transformers 4.57-5.24; ``tests/real/test_estimate_program.py`` checks the sums against the
real classes traced on the meta device. T = tokens of a micro batch, b = bytes of an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dstui.estimate.allocator import ACTIVATIONS

ALLOC, FREE, ENTER, LEAVE, GRAD, HOOK, WORK, GIVE = range(8)
"""Operation codes: ``(ALLOC, slot, bytes, tag)``, ``(FREE, slot, 0, 0)``, ``(ENTER|LEAVE, module, 0, 0)``
(ZeRO-3 hooks), ``(GRAD, parameter, bytes, 0)`` (a gradient is made), ``(HOOK, parameter, 0, 0)`` (it arrives in the leaf, after the
node that made it has let go of what it saved), ``(WORK, 0, 0, 0)`` (a matrix product: the
first of a thread makes its cuBLAS workspace), ``(GIVE, parameter, slot, 0)`` (the tensor in a slot is the gradient)."""

Op = tuple[int, int, int, int]


class Param(NamedTuple):
    """A parameter of a module of the program: elements stored (packed when quantised) and whether it trains."""

    numel: int
    nbytes: int
    trainable: bool


@dataclass
class Program:
    """One block of the model (head, layer, tail): its modules and three operation lists.

    Slots are numbers of tensors inside the block. ``inputs`` and ``output`` are slots; ``forward`` keeps what
    ``backward`` needs, ``inference`` keeps nothing but the output. ``backward`` expects the gradient of the
    output in ``grad_output`` and leaves that of the input in ``grad_input``.
    """

    modules: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Name and indices into ``params``, in order of first call."""
    params: list[Param] = field(default_factory=list)
    forward: list[Op] = field(default_factory=list)
    inference: list[Op] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)
    recompute: list[Op] = field(default_factory=list)
    """``forward`` up to the last save: what non-reentrant checkpointing runs again."""
    slots: int = 0
    output: int = 0
    inference_output: int = 0
    grad_output: int = 0
    grad_input: int = -1
    input_saved: bool = False
    held: list[int] = field(default_factory=list)
    """Slots of ``forward`` that stay as long as the graph does, whatever backward has used."""
    inference_held: list[int] = field(default_factory=list)
    logits: int = -1
    """Slot of the logits that the model returns (the tail's)."""


@dataclass(frozen=True)
class Workload:
    """What one micro batch computes with: everything the program depends on beside the model's shape."""

    micro_batch: int
    seq: int
    """Tokens of a sequence that this rank has."""
    element: int
    """Bytes of an element of the compute type: 2, or 4 in an fp32 run."""
    half: bool
    """fp16 (whose softmax upcasts inside the kernel) and not bf16."""
    attention: str
    loss: str = "standard"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    """Linear module names, or empty for all of them."""
    quant: str = "none"
    weight: int = 2
    """Bytes of a stored weight."""
    adapter: int = 2
    """Bytes of an element of a LoRA adapter."""
    together: int = 1
    """Ranks that share a sequence: each then attends over all of it with its part of the heads."""
    reentrant: bool = False
    """Checkpointed layers run without a graph first (not: with one, whose saved tensors are thrown away)."""

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq


class Tensor:
    __slots__ = ("grad", "nbytes", "refs", "saves", "slot")

    def __init__(self, slot: int, nbytes: int, grad: bool) -> None:
        self.slot = slot
        self.nbytes = nbytes
        self.grad = grad
        self.refs = 1
        self.saves = 0


class Grad:
    __slots__ = ("refs", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.refs = 1


BackwardFn = Callable[[Grad], "list[Grad | None]"]


@dataclass
class _Node:
    inputs: tuple[Tensor, ...]
    output: Tensor
    saved: tuple[Tensor, ...]
    backward: BackwardFn


class Tape:
    """Records one block. With ``grad`` the tensors that backward needs stay; without, nothing does."""

    def __init__(self, work: Workload, grad: bool, program: Program) -> None:
        self.work = work
        self.grad = grad
        self.program = program
        self.ops: list[Op] = []
        self.nodes: list[_Node] = []
        self.slots = 0
        self.alive: set[Tensor] = set()
        self.cut = 0
        """Position of the last save: a recomputation stops there (torch.utils.checkpoint, early stop)."""
        self.cut_frees: list[int] = []
        self.held: list[int] = []
        self._worked = False
        self._after: list[Op] = []
        """Operations that follow the node in progress."""
        self._names = {name: i for i, (name, _params) in enumerate(program.modules)}

    # -- tensors -------------------------------------------------------------------------------------
    def slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def new(self, nbytes: int, grad: bool = True, tag: int = ACTIVATIONS) -> Tensor:
        t = Tensor(self.slot(), nbytes, grad and self.grad)
        self.ops.append((ALLOC, t.slot, nbytes, tag))
        self.alive.add(t)
        return t

    def width(self, n: int, element: int | None = None, grad: bool = True) -> Tensor:
        """A ``[tokens, n]`` tensor of the compute type (or of ``element`` bytes)."""
        return self.new((self.work.element if element is None else element) * n * self.work.tokens, grad)

    def drop(self, *tensors: Tensor | None) -> None:
        """A Python name goes away."""
        for t in tensors:
            if t is not None:
                t.refs -= 1
                self._maybe_free(t)

    def _maybe_free(self, t: Tensor) -> None:
        if t.refs == 0 and t.saves == 0:
            self.ops.append((FREE, t.slot, 0, 0))
            self.alive.discard(t)

    def node(
        self, inputs: tuple[Tensor, ...], output: Tensor, saved: tuple[Tensor, ...], backward: BackwardFn
    ) -> Tensor:
        """Register how ``output`` was made. Call ``save`` first where the operator saves before it computes."""
        if self.grad and any(t.grad for t in inputs):
            self.nodes.append(_Node(inputs, output, saved, backward))
        else:
            output.grad = False
            for t in saved:
                self._unsave(t)
        return output

    def leaf(self, output: Tensor, backward: BackwardFn) -> Tensor:
        """``output`` was made from parameters alone (an embedding)."""
        if self.grad:
            self.nodes.append(_Node((), output, (), backward))
        return output

    def save(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not self.grad:
            return ()
        for t in tensors:
            t.saves += 1
        self.cut = len(self.ops)
        self.cut_frees = [t.slot for t in self.alive if t.saves == 0]
        return tensors

    def hold(self, t: Tensor) -> None:
        """An attribute of the graph's node names ``t``: nothing frees it before the graph itself goes."""
        if t.slot not in self.held:
            self.held.append(t.slot)
            t.saves += 1

    def _unsave(self, t: Tensor) -> None:
        t.saves -= 1
        self._maybe_free(t)

    # -- modules -------------------------------------------------------------------------------------
    def index(self, name: str) -> int:
        return self._names[name]

    def enter(self, name: str) -> None:
        self.ops.append((ENTER, self._names[name], 0, 0))

    def leave(self, name: str) -> None:
        (self._after or self.ops).append((LEAVE, self._names[name], 0, 0))

    def gradient(self, index: int, nbytes: int) -> None:
        """The gradient of parameter ``index`` is made by the node in progress. Its leaf runs next (accumulating
        comes first in ``torch/csrc/autograd/engine.cpp``), and then what comes after the module."""
        self.ops.append((GRAD, index, nbytes, 0))
        self._after.append((HOOK, index, 0, 0))

    def give(self, index: int, tensor: Tensor) -> None:
        """``tensor`` is the gradient of parameter ``index``, made before the backward pass began."""
        self.ops.append((GIVE, index, tensor.slot, 0))
        self._after.append((HOOK, index, 0, 0))

    def weight_grads(self, name: str) -> None:
        """Gradients of the trainable parameters of ``name``, in the order autograd makes them."""
        for index in self.program.modules[self._names[name]][1]:
            p = self.program.params[index]
            if p.trainable:
                element = max(self.work.element, -(-p.nbytes // p.numel)) if p.numel else self.work.element
                self.gradient(index, element * p.numel)

    def work_space(self) -> None:
        """The first product of this tape, once its output is there."""
        if not self._worked:
            self._worked = True
            self.ops.append((WORK, 0, 0, 0))

    def trains(self, name: str) -> bool:
        params = self.program.params
        return any(params[i].trainable for i in self.program.modules[self._names[name]][1])

    # -- gradients -----------------------------------------------------------------------------------
    def gnew(self, nbytes: int, tag: int = ACTIVATIONS) -> Grad:
        g = Grad(self.slot())
        self.ops.append((ALLOC, g.slot, nbytes, tag))
        return g

    def gwidth(self, n: int, element: int | None = None) -> Grad:
        return self.gnew((self.work.element if element is None else element) * n * self.work.tokens)

    def gdrop(self, *grads: Grad | None) -> None:
        for g in grads:
            if g is not None:
                g.refs -= 1
                if g.refs == 0:
                    self.ops.append((FREE, g.slot, 0, 0))

    def run_backward(self, output: Tensor, grad: Grad, source: Tensor | None) -> Grad | None:
        """Emit the backward pass from ``grad`` of ``output``; returns the gradient of ``source``.

        Nodes run in reverse order of creation. A second gradient of a tensor is added in place when
        nobody else holds the first (``torch/csrc/autograd/input_buffer.cpp``).
        """
        pending: dict[Tensor, Grad] = {output: grad}
        for node in reversed(self.nodes):
            g = pending.pop(node.output, None)
            if g is None:
                for t in node.saved:
                    self._unsave(t)
                continue
            results = node.backward(g)
            self.gdrop(g)
            for t in node.saved:
                self._unsave(t)
            self.ops += self._after
            self._after = []
            for t, r in zip(node.inputs, results, strict=True):
                if r is None:
                    continue
                if not t.grad:
                    self.gdrop(r)
                    continue
                old = pending.get(t)
                if old is None:
                    pending[t] = r
                elif old.refs == 1:
                    self.gdrop(r)
                else:
                    total = self.gnew(t.nbytes)
                    self.gdrop(old, r)
                    pending[t] = total
        return None if source is None else pending.get(source)

    # -- operators -----------------------------------------------------------------------------------
    def linear(self, x: Tensor, name: str, n_in: int, n_out: int) -> Tensor:
        """``F.linear``: saves its input for the weight's gradient (nothing when the weight is frozen)."""
        self.enter(name)
        adapted = f"{name}.lora_A" in self._names
        base = f"{name}.base_layer" if adapted else name
        if adapted:
            self.enter(base)
        y = self._matmul(x, base, n_in, n_out)
        if adapted:
            self.leave(base)
            y = self._adapter(x, y, name, n_in, n_out)
        self.leave(name)
        return y

    def _matmul(self, x: Tensor, name: str, n_in: int, n_out: int) -> Tensor:
        work = self.work
        saved = self.save(x) if self.trains(name) else ()
        quant = "none" if name == "lm_head" else work.quant
        plain = 2 * n_in * n_out
        if quant == "nf4":  # the weight is dequantised for each product (bitsandbytes gemm_4bit, MatMul4Bit)
            w = self.new(plain, grad=False)
            y = self.width(n_out)
            self.drop(w)
        elif quant == "int8":  # MatMul8bitLt: the input in fp16, then in 8 bits; it stays with the node
            if x.grad or not (self.grad or work.reentrant):
                self.hold(x)
            half = self.width(n_in, 2, grad=False) if not work.half else None
            low = self.width(n_in, 1, grad=False)
            self.drop(half)
            y = self.width(n_out)
            self.drop(low)
        else:
            y = self.width(n_out)
        self.work_space()

        def backward(g: Grad) -> list[Grad | None]:
            self.enter(name)
            dx: Grad | None = None
            if x.grad:
                w = self.gnew(plain) if quant != "none" else None
                dx = self.gwidth(n_in)
                self.gdrop(w)
            self.weight_grads(name)
            self.leave(name)
            return [dx]

        return self.node((x,), y, saved, backward)

    def _adapter(self, x: Tensor, y: Tensor, name: str, n_in: int, n_out: int) -> Tensor:
        """``y + B(A(x)) * scale`` (peft ``tuners/lora/layer.py``), adapters in the compute type."""
        rank, element = self.work.lora_rank, self.work.adapter
        name_a, name_b = f"{name}.lora_A", f"{name}.lora_B"
        wide = element > self.work.element  # fp32 adapters: the input is cast to them, the sum back
        given = self._cast(x, n_in, element) if wide else x
        a = self._plain_product(given, name_a, rank, n_in)
        if wide:
            self.drop(given)
        b = self._plain_product(a, name_b, n_out, rank)
        self.drop(a)
        scaled = self.width(n_out, element)
        self.node((b,), scaled, (), lambda _g: [self.gwidth(n_out, element)])
        self.drop(b)
        out = self.width(n_out, element)
        if wide:  # the gradient of the 16-bit addend is cast
            self.node((y, scaled), out, (), self._share_cast(n_out))
        else:
            self.node((y, scaled), out, (), self._share(2))
        self.drop(y, scaled)
        if wide:
            narrow = self._cast(out, n_out, self.work.element)
            self.drop(out)
            return narrow
        return out

    def _cast(self, x: Tensor, n: int, element: int) -> Tensor:
        """``x.to(dtype)`` of a ``[tokens, n]`` tensor: nothing saved, its gradient is cast back."""
        back = self.work.element if element > self.work.element else self.work.adapter
        y = self.width(n, element)
        return self.node((x,), y, (), lambda _g: [self.gwidth(n, back)])

    def _share_cast(self, n: int) -> BackwardFn:
        def backward(g: Grad) -> list[Grad | None]:
            low = self.gwidth(n)
            g.refs += 1
            return [low, g]

        return backward

    def _plain_product(self, x: Tensor, name: str, n_out: int, n_in: int) -> Tensor:
        element = self.work.adapter
        self.enter(name)
        saved = self.save(x)
        y = self.width(n_out, element)
        self.leave(name)

        def backward(_g: Grad) -> list[Grad | None]:
            self.enter(name)
            dx = self.gwidth(n_in, element)
            self.weight_grads(name)
            self.leave(name)
            return [dx]

        return self.node((x,), y, saved, backward)

    def _share(self, n: int) -> BackwardFn:
        """Backward of an addition: every input gets the same tensor."""

        def backward(g: Grad) -> list[Grad | None]:
            g.refs += n
            return [g] * n

        return backward

    def add(self, a: Tensor, b: Tensor, n: int) -> Tensor:
        out = self.width(n)
        return self.node((a, b), out, (), self._share(2))

    def unary(self, x: Tensor, n: int, keep: str = "input") -> Tensor:
        """SiLU, GELU (saves its input) or tanh (``keep='output'``)."""
        saved = self.save(x) if keep == "input" else ()
        y = self.width(n)
        if keep == "output":
            saved = self.save(y)
        return self.node((x,), y, saved, lambda _g: [self.gwidth(n)])

    def scale(self, x: Tensor, n: int) -> Tensor:
        """Product or sum with a constant: nothing saved."""
        y = self.width(n)
        return self.node((x,), y, (), lambda _g: [self.gwidth(n)])

    def product(self, a: Tensor, b: Tensor, n: int) -> Tensor:
        saved = self.save(a, b)
        y = self.width(n)
        return self.node((a, b), y, saved, lambda _g: [self.gwidth(n), self.gwidth(n)])

    def dropout(self, x: Tensor, n: int) -> Tensor:
        """Output and a boolean mask, which is saved."""
        y = self.width(n)
        mask = self.width(n, 1, grad=False)
        saved = self.save(mask)
        self.drop(mask)
        return self.node((x,), y, saved, lambda _g: [self.gwidth(n)])

    def gelu_new(self, x: Tensor, n: int) -> Tensor:
        """``0.5 * x * (1 + tanh(c * (x + 0.044715 * x**3)))`` as transformers' NewGELUActivation writes it."""
        half = self.scale(x, n)
        saved = self.save(x)
        cube = self.node((x,), self.width(n), saved, lambda _g: [self.gwidth(n)])
        scaled = self.scale(cube, n)
        self.drop(cube)
        total = self.add(x, scaled, n)
        self.drop(scaled)
        inner = self.scale(total, n)
        self.drop(total)
        bent = self.unary(inner, n, keep="output")
        self.drop(inner)
        one = self.scale(bent, n)
        self.drop(bent)
        y = self.product(half, one, n)
        self.drop(half, one)
        return y

    def layer_norm(self, x: Tensor, name: str, n: int) -> Tensor:
        """``F.layer_norm``: saves input, mean and reciprocal deviation (fp32)."""
        self.enter(name)
        kept = self.save(x)
        y = self.width(n)
        mean, rstd = self.width(1, 4, grad=False), self.width(1, 4, grad=False)
        saved = (*kept, *self.save(mean, rstd))
        self.drop(mean, rstd)
        self.leave(name)

        def backward(_g: Grad) -> list[Grad | None]:
            self.enter(name)
            dx = self.gwidth(n)
            self.weight_grads(name)
            self.leave(name)
            return [dx]

        return self.node((x,), y, saved, backward)

    def rms_norm(self, x: Tensor, name: str, n: int, rows: int = 1, gemma: bool = False) -> Tensor:
        """The RMSNorm of the Llama classes, in fp32 step by step; ``rows`` norms of width ``n`` a token.

        Gemma multiplies by ``1 + weight`` before the cast back, so it keeps an fp32 product.
        """
        low = self.work.element != 4
        wide = n * rows
        self.enter(name)
        x32 = self.width(wide, 4) if low else x
        saved = list(self.save(x32))
        square = self.width(wide, 4, grad=False)
        mean = self.width(rows, 4, grad=False)
        self.drop(square)
        shifted = self.width(rows, 4, grad=False)
        self.drop(mean)
        r = self.width(rows, 4, grad=False)
        self.drop(shifted)
        saved += self.save(r)
        y32 = self.width(wide, 4)
        if low:
            self.drop(x32)  # its name now means y32, which lives to the end of the function
        trains = self.trains(name)
        if gemma:
            if trains:
                saved += self.save(y32)
            product = self.width(wide, 4)
            self.drop(y32)
            out = self.width(wide) if low else product
            if low:
                self.drop(product)
        elif low:
            y = self.width(wide)
            if trains:
                saved += self.save(y)
            out = self.width(wide)
            self.drop(y, y32)
        else:
            if trains:
                saved += self.save(y32)
            out = self.width(wide)
            self.drop(y32)
        self.drop(r)
        self.leave(name)

        def backward(g: Grad) -> list[Grad | None]:
            self.enter(name)
            if gemma:
                g32 = self.gwidth(wide, 4) if low else g
                gy = self.gwidth(wide, 4)
                if trains:
                    self.gdrop(self.gwidth(wide, 4))
                self.weight_grads(name)
                if low:
                    self.gdrop(g32)
            else:
                gb = self.gwidth(wide)
                if trains:
                    self.gdrop(self.gwidth(wide))
                self.weight_grads(name)
                gy = gb
                if low:
                    gy = self.gwidth(wide, 4)
                    self.gdrop(gb)
            # grad of x32 * r: one product for x, one reduced to r's shape
            gx = self.gwidth(wide, 4)
            self.gdrop(self.gwidth(wide, 4))
            self.gdrop(gy)
            # grad through mean(x32 ** 2): expand, then 2 * x32 * grad
            spread = self.gwidth(wide, 4)
            twice = self.gwidth(wide, 4)
            second = self.gwidth(wide, 4)
            self.gdrop(twice, spread, second)
            if low:
                out32 = gx
                gx = self.gwidth(wide)
                self.gdrop(out32)
            self.leave(name)
            return [gx]

        return self.node((x,), out, tuple(saved), backward)

    def rotary(self, x: Tensor, n: int) -> Tensor:
        """``x * cos + rotate_half(x) * sin`` (saves only the shared tables)."""
        a = self.width(n)
        half = self.new(self.work.element * n * self.work.tokens // 2, grad=False)
        turned = self.width(n)
        self.drop(half)
        b = self.width(n)
        self.drop(turned)
        y = self.width(n)
        self.drop(a, b)

        def backward(_g: Grad) -> list[Grad | None]:
            self.gdrop(self.gwidth(n), self.gwidth(n))
            return [self.gwidth(n)]

        return self.node((x,), y, (), backward)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, heads: int, kv: int, d: int, dv: int) -> Tensor:
        """Scores and weighted sum. ``q`` is ``heads * d`` wide, the result ``heads * dv``."""
        if self.work.attention == "eager":
            return self._eager(q, k, v, heads, kv, d, dv)
        saved = list(self.save(q, k, v))
        out = self.width(heads * dv)
        lse = self.width(heads, 4, grad=False)
        saved += self.save(out, lse)
        self.drop(lse)

        def backward(_g: Grad) -> list[Grad | None]:
            dq, dk, dv_ = self.gwidth(heads * d), self.gwidth(kv * d), self.gwidth(kv * dv)
            # FlashAttention-2 backward: fp32 accumulator of dq and the row sums
            self.gdrop(self.gwidth(heads * d, 4), self.gwidth(heads, 4))
            return [dq, dk, dv_]

        return self.node((q, k, v), out, tuple(saved), backward)

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, heads: int, kv: int, d: int, dv: int) -> Tensor:
        """``eager_attention_forward``: the [heads, tokens, seq] matrices are all made.

        The softmax of bf16 needs an fp32 copy of its input, that of fp16 does not (aten SoftMax.cu); its
        backward makes ``grad * output`` in fp32.
        """
        work = self.work
        n = heads * work.tokens * work.seq
        b = work.element
        kk, vv = k, v
        if kv != heads:  # repeat_kv copies
            kk = self.node((k,), self.width(heads * d), (), lambda _g: [self.gwidth(kv * d)])
            vv = self.node((v,), self.width(heads * dv), (), lambda _g: [self.gwidth(kv * dv)])
        saved = list(self.save(q, kk))
        scores = self.new(b * n)
        scaled = self.new(b * n)
        self.drop(scores)
        masked = self.new(b * n)
        self.drop(scaled)
        copy = None if work.half or b == 4 else self.new(4 * n, grad=False)
        soft = self.new(4 * n)
        self.drop(copy)
        saved += self.save(soft)
        probs = self.new(b * n) if b == 2 else soft
        saved += self.save(probs, vv)
        self.drop(masked)
        if b == 2:
            self.drop(soft)
        out = self.width(heads * dv)
        final = self.width(heads * dv)
        self.drop(out)

        def backward(_g: Grad) -> list[Grad | None]:
            copy_g = self.gwidth(heads * dv)
            gp = self.gnew(b * n)
            dvv = self.gwidth(heads * dv)
            self.gdrop(copy_g)
            g32 = self.gnew(4 * n) if b == 2 else gp
            if b == 2:
                self.gdrop(gp)
            product = self.gnew(4 * n)
            gi = self.gnew(b * n if work.half else 4 * n)
            self.gdrop(product, g32)
            if not work.half and b == 2:
                low = self.gnew(b * n)
                self.gdrop(gi)
                gi = low
            gs = self.gnew(b * n)
            self.gdrop(gi)
            dq, dk = self.gwidth(heads * d), self.gwidth(heads * d)
            self.gdrop(gs)
            return [dq, dk, dvv]

        result = self.node((q, kk, vv), final, tuple(saved), backward)
        self.drop(probs)
        if kv != heads:
            self.drop(kk, vv)
        return result
