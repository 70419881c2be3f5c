"""``dstui detect``: the facts of this machine (or of a described one) as text or JSON."""

from __future__ import annotations

import argparse
import json

from dstui.errors import Exit
from dstui.facts.advice import install_advice, lacks
from dstui.facts.describe import facts_for
from dstui.facts.model import UNLIMITED, Facts, Gpu, Host, Interpreter
from dstui.i18n import _, listed, ngettext, phrases
from dstui.plain.columns import pad, wrap
from dstui.units import MiB, gib

WIDTH = 80


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", metavar="P", help=_("the training interpreter: a path, a venv folder or a name")
    )
    parser.add_argument(
        "--json", action="store_true", help=_("facts as JSON, accepted anywhere as --facts FILE")
    )
    parser.add_argument("--facts", metavar="FILE", help=_("show the facts in FILE instead of this machine"))
    parser.add_argument(
        "--gpus", metavar="NxSIZE|NxNAME", help=_("describe a machine: 8x80GiB or 8xA100-80G")
    )
    parser.add_argument("--nodes", type=int, metavar="N", help=_("number of such nodes"))
    parser.add_argument("--ram", metavar="SIZE", help=_("host memory of a node, e.g. 512GiB"))


def run(args: argparse.Namespace) -> int:
    facts = facts_for(facts=args.facts, gpus=args.gpus, nodes=args.nodes, ram=args.ram, python=args.python)
    if args.json:
        print(json.dumps(facts.to_json(), indent=2, ensure_ascii=False))
    else:
        print(render(facts))
    return Exit.OK


class _Page:
    """Grouped ``label  value`` lines, 80 columns."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def group(self, title: str) -> None:
        if self.lines:
            self.lines.append("")
        self.lines.append(title)

    def row(self, label: str, value: str) -> None:
        indent = 15
        self.lines += wrap(value, WIDTH, pad(f"  {label}", indent - 1) + " ", " " * indent)

    def note(self, text: str) -> None:
        self.lines += wrap(text, WIDTH - 4, "    ")

    def command(self, text: str) -> None:
        """Never wrapped: it is to be copied."""
        self.lines.append("    " + text)


def render(facts: Facts) -> str:
    """The page of ``dstui detect`` (no trailing newline)."""
    page = _Page()
    _gpu_group(page, facts)
    _host_group(page, facts)
    _storage_group(page, facts)
    _tool_group(page, facts)
    _interpreter_group(page, facts)
    _scheduler_group(page, facts)
    _missing_group(page, facts)
    return "\n".join(page.lines)


def _unknown(facts: Facts, *keys: str) -> str:
    """``unknown: reason`` of the first key (or of the group that holds it) that has a reason."""
    for key in keys:
        head = key
        while head:
            if head in facts.unknown:
                return _("unknown: {reason}").format(reason=facts.unknown[head])
            head = head.rpartition(".")[0]
    return _("unknown")


def _gpu_group(page: _Page, facts: Facts) -> None:
    if facts.gpus is None:
        page.group(_("GPUs"))
        page.row(_("cards"), _unknown(facts, "gpus"))
    elif not facts.gpus:
        page.group(_("GPUs"))
        page.row(_("cards"), _("none: {reason}").format(reason=_no_gpu_reason(facts)))
    else:
        total = ngettext("GPUs: {n} card", "GPUs: {n} cards", len(facts.gpus)).format(n=len(facts.gpus))
        if facts.nodes > 1:
            total += " " + _("x {n} nodes").format(n=facts.nodes)
        page.group(total)
        for i, gpu in enumerate(facts.gpus):
            _one_gpu(page, facts, gpu, i)
        if facts.driver or facts.cuda_driver:
            page.row(
                _("driver"),
                _("{driver}, CUDA up to {cuda}").format(
                    driver=facts.driver or "?", cuda=facts.cuda_driver or "?"
                ),
            )
    if facts.visible_devices is not None:
        page.row(_("visible"), f"CUDA_VISIBLE_DEVICES={facts.visible_devices}")
    for key in ("visible_devices", "device_order", "gpus.mig"):
        if facts.gpus and key in facts.unknown:
            page.note(facts.unknown[key])


def _no_gpu_reason(facts: Facts) -> str:
    if facts.source == "described":
        return _("the machine was described so")
    return (
        facts.unknown.get("visible_devices") or facts.unknown.get("driver") or _("no NVIDIA card was found")
    )


def _one_gpu(page: _Page, facts: Facts, gpu: Gpu, position: int) -> None:
    at = f"gpus.{position}"
    if gpu.name is None and gpu.memory_total is None:
        page.row(str(gpu.index), _unknown(facts, at))
        return
    parts = [gpu.name or _("a card")]
    if gpu.memory_free is not None and gpu.memory_free != gpu.memory_total:
        parts.append(
            _("{free} free of {total}").format(free=gib(gpu.memory_free), total=gib(gpu.memory_total))
        )
    else:
        parts.append(gib(gpu.memory_total))
    if gpu.compute_capability:
        parts.append("sm_{}{}".format(*gpu.compute_capability))
    page.row(str(gpu.index), phrases(parts))
    if facts.source == "described":
        return
    details = []
    if gpu.pcie_generation is not None and gpu.pcie_width is not None:
        details.append(
            _("PCIe gen {gen} x{width} (max {gen_max} x{width_max})").format(
                gen=gpu.pcie_generation,
                width=gpu.pcie_width,
                gen_max=gpu.pcie_generation_max or "?",
                width_max=gpu.pcie_width_max or "?",
            )
        )
    if gpu.nvlink_peers:
        details.append(_("NVLink to {peers}").format(peers=_numbers(gpu.nvlink_peers)))
    elif gpu.p2p_peers:
        details.append(_("P2P to {peers}").format(peers=_numbers(gpu.p2p_peers)))
    if gpu.numa_node is not None:
        details.append(_("NUMA node {n}").format(n=gpu.numa_node))
    if gpu.mig_parent:
        details.append(_("MIG instance"))
    elif gpu.mig_enabled:
        details.append(_("MIG on, no instance made"))
    if details:
        page.row("", phrases(details))
    if gpu.uuid:
        page.row("", gpu.uuid)
    if gpu.processes is None:
        page.row("", _("processes {unknown}").format(unknown=_unknown(facts, f"{at}.processes")))
    for p in gpu.processes or ():
        page.row(
            "",
            _("used by {user}: {name} (pid {pid}), {memory}").format(
                user=p.user or "?", name=p.name or "?", pid=p.pid, memory=gib(p.memory)
            ),
        )


def _numbers(values: tuple[int, ...]) -> str:
    """``0-3,6``."""
    out: list[str] = []
    run: list[int] = []
    for v in [*sorted(values), None]:
        if run and (v is None or v != run[-1] + 1):
            out.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if v is not None:
            run.append(v)
    return ",".join(out)


def _limit(value: int | None, size: bool = True) -> str:
    if value is None:
        return "?"
    if value == UNLIMITED:
        return _("unlimited")
    if not size:
        return str(value)
    return f"{value // 1024} KiB" if value < MiB else gib(value)


def _host_group(page: _Page, facts: Facts) -> None:
    host = facts.host
    page.group(_("Host: {name}").format(name=host.hostname) if host.hostname else _("Host"))
    if host.ram_total is None:
        page.row(_("RAM"), _unknown(facts, "host.ram_total"))
    else:
        page.row(
            _("RAM"),
            _("{free} free of {total}").format(free=gib(host.ram_available), total=gib(host.ram_total)),
        )
    if facts.source == "described":
        return
    _cgroup_row(page, facts, host)
    page.row(
        _("swap"), _("{free} free of {total}").format(free=gib(host.swap_free), total=gib(host.swap_total))
    )
    memlock = _("soft {soft}, hard {hard}").format(
        soft=_limit(host.memlock_soft), hard=_limit(host.memlock_hard)
    )
    if host.ipc_lock:
        memlock += " " + _("(does not apply: CAP_IPC_LOCK)")
    page.row("memlock", memlock)
    page.row(
        "nofile",
        _("soft {soft}, hard {hard}").format(
            soft=_limit(host.nofile_soft, False), hard=_limit(host.nofile_hard, False)
        ),
    )
    if host.shm_total is None:
        page.row("/dev/shm", _unknown(facts, "host.shm_total"))
    else:
        page.row(
            "/dev/shm",
            _("{free} free of {total}").format(free=gib(host.shm_free), total=gib(host.shm_total)),
        )
    cores = _("{usable} of {total} cores usable").format(
        usable="?" if host.cores_usable is None else host.cores_usable, total=host.cores or "?"
    )
    if host.cpu_quota is not None and host.cpu_quota != UNLIMITED:
        cores += ", " + _("CPU time for {n:g}").format(n=host.cpu_quota)
    if host.numa_nodes is not None:
        cores += ", " + ngettext("{n} NUMA node", "{n} NUMA nodes", host.numa_nodes).format(n=host.numa_nodes)
    page.row(_("CPU"), cores)
    if host.container:
        page.row(_("container"), host.container)
    if host.wsl:
        page.row(_("system"), _("WSL2: pinned memory is limited"))


def _cgroup_row(page: _Page, facts: Facts, host: Host) -> None:
    group = host.cgroup
    if group is None:
        page.row("cgroup", _unknown(facts, "host.cgroup"))
        return
    if group.limit == UNLIMITED:
        text = _("no memory limit (v{version})").format(version=group.version)
    else:
        text = _("limit {limit}, in use {usage} of which {cache} is cache (v{version})").format(
            limit=gib(group.limit),
            usage=gib(group.usage),
            cache=gib(group.reclaimable),
            version=group.version,
        )
    if group.oom_kills:
        text += ", " + ngettext(
            "{n} process killed for memory", "{n} processes killed for memory", group.oom_kills
        ).format(n=group.oom_kills)
    page.row("cgroup", text)


def _yes(value: bool | None) -> str:
    return "?" if value is None else _("yes") if value else _("no")


def _storage_group(page: _Page, facts: Facts) -> None:
    if facts.source == "described":
        return
    page.group(_("Storage for NVMe offload"))
    if not facts.storage:
        page.row("-", _unknown(facts, "storage"))
    for i, s in enumerate(facts.storage):
        kind = (
            _("disk of unknown kind")
            if s.rotational is None
            else _("spinning disk")
            if s.rotational
            else _("solid state")
        )
        if s.filesystem in ("tmpfs", "ramfs"):
            kind = _("in RAM")
        if s.writable:
            direct = _("O_DIRECT {answer}").format(answer=_yes(s.o_direct))
        else:
            direct = _("not writable")
        text = _("{free} free, {filesystem}, {kind}, {direct}").format(
            free=gib(s.free), filesystem=s.filesystem or "?", kind=kind, direct=direct
        )
        if len(s.path) > 12:
            page.lines.append(f"  {s.path}")
            page.row("", text)
        else:
            page.row(s.path, text)
        why = facts.unknown.get(f"storage.{i}.o_direct")
        if why:
            page.row("", why)


def _tool_group(page: _Page, facts: Facts) -> None:
    if facts.source == "described":
        return
    t = facts.toolchain
    page.group(_("Building DeepSpeed's ops"))
    page.row("CUDA_HOME", t.cuda_home or _unknown(facts, "toolchain.cuda_home"))
    if t.nvcc:
        version = t.nvcc_version or _unknown(facts, "toolchain.nvcc_version")
        page.row("nvcc", f"{version} ({t.nvcc})")
    elif t.cuda_home:
        page.row("nvcc", _unknown(facts, "toolchain.nvcc"))
    if t.compiler:
        page.row(_("compiler"), f"{t.compiler} {t.compiler_version or '?'}")
    else:
        page.row(_("compiler"), _unknown(facts, "toolchain.compiler"))
    ninja = t.ninja or _unknown(facts, "toolchain.ninja")
    if t.ninja and t.ninja_on_path is False:
        ninja += " " + _("(not on PATH)")
    page.row("ninja", ninja)
    page.row(
        "libaio",
        _("library {library}, header {header}").format(library=_yes(t.libaio), header=_yes(t.libaio_header)),
    )
    page.row("Python.h", _yes(t.python_headers))
    if t.arch_list:
        page.row("archs", f"TORCH_CUDA_ARCH_LIST={t.arch_list}")


def origin_text(origin: str) -> str:
    """How an interpreter was found, for people."""
    return {
        "option": _("asked for"),
        "active": _("active environment"),
        "project": _("./.venv"),
        "own": _("runs dstui"),
        "conda": _("conda environment"),
        "path": _("python3 on PATH"),
    }.get(origin, origin)


def _interpreter_group(page: _Page, facts: Facts) -> None:
    if facts.source == "described":
        return
    page.group(_("Interpreters (* = trains)"))
    if not facts.interpreters:
        page.row("-", _unknown(facts, "interpreters"))
    for it in facts.interpreters:
        mark = "*" if it is facts.interpreter and it.can_train else " "
        page.lines.append(f"{mark} {it.path}")
        _one_interpreter(page, it)


def _one_interpreter(page: _Page, it: Interpreter) -> None:
    head = f"{origin_text(it.origin)}, Python {it.version or '?'}"
    if it.problem:
        page.note(f"{head}: {it.problem}")
        return
    words = []
    for name, version in it.packages.items():
        if version is None:
            continue
        build = ""
        if name == "torch":
            build = f" (CUDA {it.torch_cuda})" if it.torch_cuda else " (CPU)" if it.torch_cuda == "" else ""
        words.append(f"{name} {version}{build}")
    absent = [n for n in ("deepspeed", "torch") if it.packages.get(n) is None]
    if absent:
        words.insert(0, _("without {names}").format(names=listed(absent)))
    page.note(f"{head}: {', '.join(words)}")
    if it.launchers:
        page.note(_("launchers: {names}").format(names=" ".join(it.launchers)))


def _scheduler_group(page: _Page, facts: Facts) -> None:
    s = facts.scheduler
    if not (s.slurm_present or s.hostfile):
        return
    page.group(_("Scheduler"))
    if s.slurm_job:
        page.row(
            "Slurm",
            _("job {job}, {nodes} nodes, {gpus} GPUs on this node").format(
                job=s.slurm_job,
                nodes=s.slurm_nodes or "?",
                gpus="?" if s.slurm_gpus_on_node is None else s.slurm_gpus_on_node,
            ),
        )
    elif s.login_node:
        page.row("Slurm", _("this is a login node: no job is active and no GPU is here"))
        page.note(
            _(
                "describe the machine that will train, e.g. --gpus 8x80GiB, or run dstui detect --json in a job"
            )
        )
    elif s.slurm_present:
        page.row("Slurm", _("installed, no job is active"))
    if s.hostfile:
        page.row("hostfile", s.hostfile)


def _missing_group(page: _Page, facts: Facts) -> None:
    if facts.source == "described":
        return
    advice = install_advice(facts)
    missing = advice.lacks if advice else lacks(facts)
    if not advice and not missing:
        return
    page.group(_("To do"))
    if advice:
        page.note(_("{reason}; install with:").format(reason=advice.reason))
        page.command(advice.command)
    for lack in missing:
        page.note(lack.message)
        page.command(lack.fix)
