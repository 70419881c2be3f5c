"""NVML: the real pynvml binding against a stub library, recorded shapes, errors, MIG and a hung driver."""

# ruff: noqa: N802, N815 - the names are NVML's own

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstui.facts import nvml
from dstui.facts.detect import read_facts
from dstui.facts.gpu import NvmlSession
from dstui.facts.system import System
from dstui.facts.visible import select
from dstui.units import MiB

STUB = Path(__file__).resolve().parent.parent / "data" / "nvml_stub.c"


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def memory(total: int, reserved: int, used: int) -> SimpleNamespace:
    return SimpleNamespace(
        total=total * MiB, reserved=reserved * MiB, used=used * MiB, free=(total - reserved - used) * MiB
    )


class FakeNvml:
    """The functions of pynvml that are called, over a list of cards; ``broken`` maps a name to a code."""

    NVMLError = FakeError
    nvmlMemory_v2 = 0x02000028
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as nvidia-ml-py 13 ships it
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, cards: list[dict[str, Any]], broken: dict[str, int] | None = None) -> None:
        self.cards = cards
        self.broken = broken or {}

    def __getattribute__(self, name: str) -> Any:
        broken = object.__getattribute__(self, "__dict__").get("broken", {})
        if name in broken:
            code = broken[name]
            if code < 0:
                raise AttributeError(name)

            def fail(*_a: Any, **_k: Any) -> Any:
                raise FakeError(code)

            return fail
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.54.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, i: int) -> dict[str, Any]:
        if self.cards[i].get("lost"):
            raise FakeError(15)
        return self.cards[i]

    def nvmlDeviceGetUUID(self, h: dict[str, Any]) -> str:
        return h["uuid"]

    def nvmlDeviceGetName(self, h: dict[str, Any]) -> Any:
        return h["name"]

    def nvmlDeviceGetMemoryInfo(self, h: dict[str, Any], version: int | None = None) -> Any:
        if version and h.get("no_v2"):
            raise FakeError(13)
        return h["memory"]

    def nvmlDeviceGetCudaComputeCapability(self, h: dict[str, Any]) -> tuple[int, int]:
        return h["cc"]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, h: dict[str, Any]) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, h: dict[str, Any]) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, h: dict[str, Any]) -> int:
        return 8

    def nvmlDeviceGetMaxPcieLinkWidth(self, h: dict[str, Any]) -> int:
        return 16

    def nvmlDeviceGetPciInfo(self, h: dict[str, Any]) -> Any:
        return SimpleNamespace(busId=h["bus"])

    def nvmlDeviceGetMigMode(self, h: dict[str, Any]) -> list[int]:
        if "mig" not in h:
            raise FakeError(3)
        return [int(bool(h["mig"])), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, h: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, h: dict[str, Any], i: int) -> dict[str, Any]:
        try:
            return h["mig"][i]
        except IndexError:
            raise FakeError(6) from None

    def nvmlDeviceGetComputeRunningProcesses(self, h: dict[str, Any]) -> list[Any]:
        return h.get("compute", [])

    def nvmlDeviceGetGraphicsRunningProcesses(self, h: dict[str, Any]) -> list[Any]:
        return h.get("graphics", [])

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        return b"/usr/bin/train"

    def nvmlDeviceGetP2PStatus(self, a: dict[str, Any], b: dict[str, Any], what: int) -> int:
        assert isinstance(what, int)
        return 0 if what in a.get("p2p", ()) else 5

    def nvmlDeviceGetNvLinkState(self, h: dict[str, Any], link: int) -> int:
        if link >= len(h.get("links", [])):
            raise FakeError(2)
        return int(h["links"][link] is not None)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, h: dict[str, Any], link: int) -> Any:
        return SimpleNamespace(busId=h["links"][link])


def card(n: int, **more: Any) -> dict[str, Any]:
    base = {
        "uuid": f"GPU-{n:08x}-1111-2222-3333-444444444444",
        "name": "NVIDIA GeForce RTX 4090",
        "memory": memory(24564, 380, 300),
        "cc": (8, 9),
        "bus": f"00000000:{n + 1:02X}:00.0",
    }
    return {**base, **more}


def gpus_of(fake: FakeNvml, proc: str = "/proc") -> tuple[list[Any], dict[str, str]]:
    return nvml.devices(nvml.read(fake, proc), lambda bus: None)


def test_a_card_as_nvidia_smi_shows_it() -> None:
    gpus, unknown = gpus_of(FakeNvml([card(0)]))
    (g,) = gpus
    assert (g.index, g.name, g.compute_capability) == (0, "NVIDIA GeForce RTX 4090", (8, 9))
    assert g.memory_total == 24564 * MiB
    assert g.memory_reserved == 380 * MiB
    assert g.memory_free == (24564 - 380 - 300) * MiB
    assert (g.pcie_generation, g.pcie_generation_max, g.pcie_width, g.pcie_width_max) == (1, 4, 8, 16)
    assert g.pci_bus == "0000:01:00.0"
    assert g.mig_enabled is False  # "not supported" is a no
    assert g.p2p_peers == () and g.nvlink_peers == ()
    assert g.processes == () and g.busy is False
    assert unknown == {"0.numa_node": "the kernel gives no NUMA node for this device"}


def test_old_drivers_have_memory_v1_only() -> None:
    (g,), _ = gpus_of(FakeNvml([card(0, no_v2=True)]))
    assert g.memory_total == 24564 * MiB and g.memory_reserved is None


def test_names_may_be_bytes() -> None:
    (g,), _ = gpus_of(FakeNvml([card(0, name=b"Tesla T4")]))
    assert g.name == "Tesla T4"


def test_processes_have_owner_name_memory_and_kind(tmp_path: Path) -> None:
    me = os.getpid()
    other = 4_100_000  # above pid_max of most systems: not visible here
    fake = FakeNvml(
        [
            card(
                0,
                compute=[
                    SimpleNamespace(pid=me, usedGpuMemory=5 * MiB),
                    SimpleNamespace(pid=other, usedGpuMemory=None),
                ],
                graphics=[
                    SimpleNamespace(pid=me, usedGpuMemory=5 * MiB),
                    SimpleNamespace(pid=1, usedGpuMemory=9 * MiB),
                ],
            )
        ]
    )
    (g,), _ = gpus_of(fake)
    by_pid = {p.pid: p for p in g.processes}
    assert set(by_pid) == {1, me, other}
    import pwd

    assert by_pid[me].user == pwd.getpwuid(os.getuid()).pw_name
    assert by_pid[me].memory == 5 * MiB and by_pid[me].kind == "compute"
    assert "py" in (by_pid[me].name or "")
    assert by_pid[other].user is None and by_pid[other].memory is None
    assert by_pid[other].name == "/usr/bin/train"  # NVML knows what /proc here does not
    assert by_pid[1].kind == "graphics"


def test_a_desktop_does_not_make_a_card_busy() -> None:
    (g,), _ = gpus_of(FakeNvml([card(0, graphics=[SimpleNamespace(pid=1, usedGpuMemory=9 * MiB)])]))
    assert g.processes and g.busy is False


def test_memory_in_use_without_a_process_is_unknown_not_idle() -> None:
    (g,), unknown = gpus_of(FakeNvml([card(0, memory=memory(24564, 380, 20000))]))
    assert g.processes is None and g.busy is None
    assert "another container" in unknown["0.processes"]


@pytest.mark.parametrize(
    ("call", "code", "field", "words"),
    [
        ("nvmlDeviceGetName", 999, "name", "NVML: NVML error 999"),
        ("nvmlDeviceGetComputeRunningProcesses", 4, "processes", "to this user"),
        ("nvmlDeviceGetCudaComputeCapability", 3, "compute_capability", "for this device"),
        ("nvmlDeviceGetPciInfo", -1, "pci_bus", "for this device"),
        ("nvmlDeviceGetMigMode", 999, "mig_enabled", "999"),
    ],
)
def test_each_refusal_is_none_with_a_reason(call: str, code: int, field: str, words: str) -> None:
    gpus, unknown = gpus_of(FakeNvml([card(0)], {call: code}))
    assert getattr(gpus[0], field) is None
    assert words in unknown[f"0.{field}"]
    assert gpus[0].memory_total == 24564 * MiB


def test_memory_refused() -> None:
    (g,), unknown = gpus_of(FakeNvml([card(0)], {"nvmlDeviceGetMemoryInfo": 3}))
    assert g.memory_total is None and g.memory_free is None
    assert "0.memory_total" in unknown and "0.memory_free" in unknown


def test_a_lost_card_is_listed_with_its_reason() -> None:
    gpus, unknown = gpus_of(FakeNvml([card(0, lost=True), card(1)]))
    assert [g.index for g in gpus] == [0, 1]
    assert gpus[0].name is None and unknown["0"] == "the GPU has fallen off the bus"
    assert gpus[1].p2p_peers == ()


def test_a_driver_before_510_lists_processes_by_the_v2_call() -> None:
    class Old(FakeNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, h: dict[str, Any]) -> list[Any]:
            raise RuntimeError("Unversioned function called and the pyNVML version does not match")

        def nvmlDeviceGetComputeRunningProcesses_v2(self, h: dict[str, Any]) -> list[Any]:
            return [SimpleNamespace(pid=1, usedGpuMemory=MiB)]

    (g,), _ = gpus_of(Old([card(0)]))
    assert g.busy is True


def test_peers_over_nvswitch_and_over_pcie_only() -> None:
    switch = [card(i, p2p=(0, 2)) for i in range(3)]
    gpus, _ = gpus_of(FakeNvml(switch))
    assert gpus[1].nvlink_peers == (0, 2) and gpus[1].p2p_peers == (0, 2)
    gpus, _ = gpus_of(FakeNvml([card(i, p2p=(0,)) for i in range(2)]))
    assert gpus[0].p2p_peers == (1,) and gpus[0].nvlink_peers == ()
    gpus, _ = gpus_of(FakeNvml([card(0), card(1)]))
    assert gpus[0].p2p_peers == ()


def test_nvlink_without_p2p_status_reads_the_links() -> None:
    cards = [card(0, links=["00000000:02:00.0", None]), card(1, links=["00000000:01:00.0"]), card(2)]
    gpus, unknown = gpus_of(FakeNvml(cards, {"nvmlDeviceGetP2PStatus": 13}))
    assert gpus[0].nvlink_peers == (1,) and gpus[1].nvlink_peers == (0,)
    assert gpus[2].nvlink_peers is None
    assert gpus[0].p2p_peers is None and "0.p2p_peers" in unknown


def mig_card() -> dict[str, Any]:
    def part(n: int) -> dict[str, Any]:
        return {"uuid": f"MIG-0000000{n}", "name": "NVIDIA A100 MIG 3g.20gb", "memory": memory(19968, 0, 20)}

    return card(1, uuid="GPU-f00d0000-aaaa", name="NVIDIA A100-SXM4-40GB", cc=(8, 0), mig=[part(1), part(2)])


def test_mig_instances_stand_for_their_card() -> None:
    gpus, _ = gpus_of(FakeNvml([card(0, mig=[]), mig_card()]))
    assert [g.uuid for g in gpus] == [card(0)["uuid"], "MIG-00000001", "MIG-00000002"]
    part = gpus[1]
    assert part.mig_enabled and part.mig_parent == "GPU-f00d0000-aaaa" and part.index == 1
    assert part.memory_total == 19968 * MiB and part.compute_capability == (8, 0)
    assert part.nvlink_peers == ()
    assert part.cuda_id == "MIG-00000001"


DEVICES, _reasons = gpus_of(FakeNvml([card(0), mig_card(), card(2), card(3, uuid="GPU-00000002-ffff")]))


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, ["GPU-00000000", "MIG-00000001", "MIG-00000002", "GPU-00000002-1111", "GPU-00000002-ffff"]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("0", ["GPU-00000000"]),
        (" 3 , 0 ", ["GPU-00000002-ffff", "GPU-00000000"]),
        ("2,7,0", ["GPU-00000002-1111"]),  # the first invalid entry ends the list
        ("2,-1,0", ["GPU-00000002-1111"]),
        ("0,0", []),  # a repeated entry leaves nothing
        ("0gpu,2", ["GPU-00000000", "GPU-00000002-1111"]),  # strtoul reads leading digits
        ("1", ["MIG-00000001"]),  # an index on a split card: its first instance
        ("GPU-00000000", ["GPU-00000000"]),
        ("GPU-00000002", []),  # a prefix of two cards
        ("GPU-00000002-f,GPU-0000000000", ["GPU-00000002-ffff"]),
        ("GPU-00000002-f,0", ["GPU-00000002-ffff"]),  # kinds do not mix
        ("MIG-00000002,MIG-00000001", ["MIG-00000002", "MIG-00000001"]),
        ("MIG-0000000", []),
        ("GPU-f00d", ["MIG-00000001"]),
        ("MIG-GPU-f00d0000-aaaa/1/0", []),
    ],
)
def test_cuda_visible_devices(value: str | None, seen: list[str]) -> None:
    chosen, remark = select(value, DEVICES)
    assert len(chosen) == len(seen)
    assert all((g.uuid or "").startswith(s) for g, s in zip(chosen, seen, strict=True))
    if value is not None and not seen:
        assert remark and "CUDA_VISIBLE_DEVICES" in remark


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (9, "driver is not loaded"),
        (18, "different versions"),
        (12, "libnvidia-ml.so.1"),
        (999, "NVML error 999"),
    ],
)
def test_nvml_that_does_not_start(code: int, words: str) -> None:
    data = nvml.read(FakeNvml([], {"nvmlInit": code}))
    assert words in nvml.reason(data["error"])


# --- the real binding -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("no C compiler for the NVML stand-in")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([cc, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(STUB)], check=True)
    return folder


@pytest.fixture
def stub_system(stub_folder: Path, tmp_path: Path) -> System:
    # PATH without nvcc and python3: only NVML matters here.
    env = {"LD_LIBRARY_PATH": str(stub_folder), "PATH": str(tmp_path), "STUB_PID": str(os.getpid())}
    return System(environ=env, cwd=str(tmp_path))


def test_detect_through_the_real_binding(stub_system: System) -> None:
    facts = read_facts(stub_system)
    assert facts.gpus is not None, facts.unknown
    assert (facts.driver, facts.cuda_driver) == ("580.95.05", "13.0")
    first, second = facts.gpus
    assert first.name == "NVIDIA H200" and first.compute_capability == (9, 0)
    assert first.uuid == "GPU-aaaa1111-0000-0000-0000-000000000000"
    assert first.memory_total == 143771 * MiB
    assert first.memory_free == (143771 - 600 - 20000) * MiB
    assert first.memory_reserved == 600 * MiB
    assert first.nvlink_peers == (1,) and second.nvlink_peers == (0,)
    assert first.pci_bus == "0000:1b:00.0" and second.pci_bus == "0000:3d:00.0"
    assert first.pcie_generation == 4 and first.pcie_generation_max == 5
    assert first.processes is not None and first.processes[0].pid == os.getpid()
    assert first.processes[0].memory == 19990 * MiB and first.busy
    assert second.processes == () and second.busy is False
    assert facts.world_size == 2


def test_visible_devices_filter_order_and_peers(stub_system: System) -> None:
    env = {**stub_system.environ, "CUDA_VISIBLE_DEVICES": "1"}
    facts = read_facts(System(environ=env, cwd=stub_system.cwd))
    assert [g.index for g in facts.gpus or ()] == [1]
    assert facts.gpus is not None and facts.gpus[0].nvlink_peers == ()
    assert facts.visible_devices == "1"
    assert any(k.startswith("gpus.0.") for k in facts.unknown)
    env["CUDA_VISIBLE_DEVICES"] = ""
    facts = read_facts(System(environ=env, cwd=stub_system.cwd))
    assert facts.gpus == () and "empty" in facts.unknown["visible_devices"]


def test_mig_through_the_real_binding(stub_system: System) -> None:
    env = {**stub_system.environ, "STUB_MIG": "1"}
    facts = read_facts(System(environ=env, cwd=stub_system.cwd))
    assert facts.gpus is not None
    assert [g.mig_parent is not None for g in facts.gpus] == [False, True, True]
    assert facts.gpus[2].memory_total == 70144 * MiB
    assert "one MIG instance only" in facts.unknown["gpus.mig"]
    assert "device_order" not in facts.unknown  # a card and a part of one like it


def test_cards_that_differ_get_the_order_remark(stub_system: System) -> None:
    fake = FakeNvml([card(0), card(1, name="NVIDIA GeForce RTX 3090")])
    data = json.dumps(nvml.read(fake))
    command = [sys.executable, "-c", f"print({data!r})"]
    facts = read_facts(stub_system, nvml_command=command)
    assert "PCI_BUS_ID" in facts.unknown["device_order"]
    env = {**stub_system.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    facts = read_facts(System(environ=env, cwd=stub_system.cwd), nvml_command=command)
    assert "device_order" not in facts.unknown and facts.device_order == "PCI_BUS_ID"


def test_a_hung_driver_costs_the_timeout_and_no_more(stub_system: System) -> None:
    env = {**stub_system.environ, "STUB_HANG": "1"}
    facts = read_facts(System(environ=env, cwd=stub_system.cwd), timeout=0.6)  # the stub never answers
    assert facts.gpus is None
    assert "did not answer within 0.6 s" in facts.unknown["gpus"]
    assert facts.host.ram_total  # everything else is still known


def test_driver_not_loaded_but_library_here(stub_system: System) -> None:
    env = {**stub_system.environ, "STUB_INIT": "9"}
    facts = read_facts(System(environ=env, cwd=stub_system.cwd))
    if facts.gpus is None:  # this machine has an NVIDIA card without its driver
        assert "not loaded" in facts.unknown["gpus"]
    else:
        assert facts.gpus == () and "not loaded" in facts.unknown["driver"]


def test_a_crashing_child_is_a_reason(stub_system: System) -> None:
    facts = read_facts(stub_system, nvml_command=[sys.executable, "-c", "raise SystemExit('boom')"])
    assert facts.gpus is None and "boom" in facts.unknown["gpus"]
    facts = read_facts(stub_system, nvml_command=[sys.executable, "-c", "print('no json')"])
    assert facts.gpus is None and "no json" in facts.unknown["gpus"]


@pytest.fixture
def polled(stub_folder: Path) -> Iterator[list[str]]:
    code = (
        "from dstui.facts.gpu import NvmlSession\n"
        "import time\n"
        "s = NvmlSession(slow=0)\n"
        "assert s.open(), s.problem\n"
        "assert s.sample()[0].pcie_tx is None\n"
        "time.sleep(0.05)\n"
        "print(*s.sample(), sep='\\n')\n"
        "s2 = NvmlSession(['GPU-bbbb2222-0000-0000-0000-000000000001'])\n"
        "print(*s2.sample(), sep='\\n')\n"
        "s2.close(); s.close()\n"
    )
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub_folder)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    yield out.stdout.splitlines()


def number(line: str, name: str) -> float:
    return float(line.partition(f"{name}=")[2].split(",")[0].rstrip(")"))


def test_a_session_polls_the_real_binding(polled: list[str]) -> None:
    busy, idle, by_uuid = polled
    assert "utilisation=0.97" in busy and "power=655.432" in busy and "power_limit=700.0" in busy
    assert f"memory_used={20000 * MiB}" in busy  # nvidia-smi's figure, the driver's own share apart
    assert "throttle=('power-cap',)" in busy and "temperature=64" in busy
    assert number(busy, "pcie_tx") == 1000 * 1024 and number(busy, "pcie_rx") == 2000 * 1024
    assert 39e9 < number(busy, "nvlink_tx") < 41e9 and 29e9 < number(busy, "nvlink_rx") < 31e9
    assert "sm_clock=1980" in busy and "memory_clock=3201" in busy
    assert "throttle=()" in idle
    assert by_uuid.startswith("GpuSample(index=1, uuid='GPU-bbbb2222") and "pcie_tx=None" in by_uuid


def in_python(code: str, stub_folder: Path, **more: str) -> list[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub_folder), **more}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_one_card_at_a_time_is_asked_for_its_pcie_traffic(stub_folder: Path) -> None:
    code = (
        "from dstui.facts.gpu import NvmlSession\n"
        "s = NvmlSession()\n"
        "for _ in range(4): print([g.pcie_rx for g in s.sample()], s.sample()[0].nvlink_tx)\n"
    )
    rows = in_python(code, stub_folder, STUB_NO_COUNTERS="1", STUB_CARDS="3")
    rx = 2000 * 1024
    assert rows[0] == "[None, None, None] None"
    assert rows[1] == f"[{rx}, {rx}, None] None"  # each row is two readings: one card more each
    assert rows[2] == rows[3] == f"[{rx}, {rx}, {rx}] None"


def test_a_driver_that_loses_its_cards_and_comes_back(stub_folder: Path) -> None:
    code = (
        "from dstui.facts.gpu import NvmlSession\n"
        "s = NvmlSession()\n"
        "for _ in range(4): print([g.memory_used is not None for g in s.sample()])\n"
    )
    rows = in_python(code, stub_folder, STUB_FAIL_AT="3", STUB_FAIL_FOR="2")
    assert rows == ["[True, True]", "[False, False]", "[True, True]", "[True, True]"]


def test_cards_by_their_number_in_any_form(stub_folder: Path) -> None:
    code = (
        "from dstui.facts.gpu import NvmlSession\n"
        "for asked in (['1'], [1], ['GPU-bbbb2222-0000-0000-0000-000000000001']):\n"
        "    print(*((g.index, g.memory_used) for g in NvmlSession(asked).sample()))\n"
    )
    assert set(in_python(code, stub_folder)) == {f"(1, {4 * MiB})"}


def test_a_counter_that_was_reset_gives_no_rate() -> None:
    class Counting(FakeNvml):
        total = 1000

        def nvmlDeviceGetFieldValues(self, h: dict[str, Any], fields: list[tuple[int, int]]) -> list[Any]:
            return [
                SimpleNamespace(
                    fieldId=f, nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=self.total)
                )
                for f, _scope in fields
            ]

    fake = Counting([card(0)])
    with NvmlSession(slow=0, nvml=fake) as s:
        assert s.sample()[0].nvlink_rx is None
        fake.total = 10
        assert s.sample()[0].nvlink_rx is None
        fake.total = 20
        assert s.sample()[0].nvlink_rx


def test_what_changes_slowly_is_read_seldom() -> None:
    asked: list[str] = []

    class Counting(FakeNvml):
        def nvmlDeviceGetTemperature(self, h: dict[str, Any], sensor: int) -> int:
            asked.append("temperature")
            return 50

        def nvmlDeviceGetPowerUsage(self, h: dict[str, Any]) -> int:
            asked.append("power")
            return 1000

    fake = Counting([card(0), card(1)])
    with NvmlSession(slow=3600, nvml=fake) as s:
        readings = [s.sample() for _ in range(5)]
    assert all(g.temperature == 50 and g.power == 1 for r in readings for g in r)
    assert asked.count("temperature") == 2 and asked.count("power") == 10


def test_a_session_never_raises() -> None:
    fake = FakeNvml([card(0), card(1, lost=True)], {"nvmlDeviceGetName": 999})
    with NvmlSession(nvml=fake) as s:
        first, second = s.sample()
    assert first.memory_used == 300 * MiB and first.utilisation is None and first.throttle is None
    assert second.memory_total is None
    dead = NvmlSession(nvml=FakeNvml([], {"nvmlInit": 9}))
    assert dead.sample() == () and dead.problem
