"""A ``deepspeed ...`` command line as the launcher of one release reads it: its flags, the script, the rest.

The launcher is an argparse parser whose last arguments are ``user_script`` and a remainder
(deepspeed/launcher/runner.py ``parse_args``): what follows the script is the script's, long options may be
shortened while they stay unique, and an unknown option before the script ends it with exit code 2.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.rules.registry import version_key

_WITH_VALUE = frozenset(
    [
        "--hostfile",
        "--include",
        "--exclude",
        "--num_nodes",
        "--min_elastic_nodes",
        "--max_elastic_nodes",
        "--num_gpus",
        "--num_accelerators",
        "--master_port",
        "--master_addr",
        "--launcher",
        "--launcher_args",
        "--enable_each_rank_log",
        "--autotuning",
        "--bind_core_list",
        "--ssh_port",
        "--node_rank",
        "--venv_script",
        "--log_level",
    ]
)
_ALONE = frozenset(
    [
        "--module",
        "--no_python",
        "--no_local_rank",
        "--no_ssh_check",
        "--force_multi",
        "--save_pid",
        "--elastic_training",
        "--bind_cores_to_rank",
        "--no_ssh",
        "--quiet",
        "--help",
    ]
)
_SHORT = {"-H": "--hostfile", "-i": "--include", "-e": "--exclude", "-q": "--quiet", "-h": "--help"}
SINCE = {
    "--ssh_port": "0.10.2",
    "--node_rank": "0.14.5",
    "--no_ssh": "0.14.5",
    "--venv_script": "0.17.1",
    "--log_level": "0.17.6",
    "--quiet": "0.17.6",
}
"""First release with the flag; read off ``parse_args`` of every release from 0.9.5 to 0.19.8."""
GONE = dict.fromkeys(("--elastic_training", "--min_elastic_nodes", "--max_elastic_nodes"), "0.19.8")
"""First release without the flag."""
FLAGS = _WITH_VALUE | _ALONE
_PROGRAMS = frozenset({"deepspeed", "deepspeed.pt", "ds"})
_MODULES = frozenset({"deepspeed", "deepspeed.launcher.runner"})
_PREFIXES = frozenset({"env", "exec", "nohup", "sudo", "time"})


@dataclass(frozen=True)
class Launch:
    """``env`` launcher ``flags`` script ``script_args``. Flags by their full name; one without a value has ``""``."""

    launcher: str
    flags: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None
    script_args: tuple[str, ...] = ()
    unknown: str | None = None
    """The first option before the script that the release does not know; nothing behind it was read."""
    taken_for: Mapping[str, str] = field(default_factory=dict)
    """Flags that only a later release has and that this one reads as an abbreviation -> of what."""

    def number(self, flag: str) -> int | None:
        """A flag's whole number; None when it is not given or is none."""
        try:
            return int(self.flags[flag])
        except (KeyError, ValueError):
            return None

    @property
    def include(self) -> str:
        return self.flags.get("--include", "")

    @property
    def exclude(self) -> str:
        return self.flags.get("--exclude", "")

    @property
    def num_gpus(self) -> int:
        """-1 when not given, as in the launcher."""
        found = self.number("--num_gpus")
        return -1 if found is None else found

    @property
    def num_nodes(self) -> int:
        """-1 when not given, as in the launcher."""
        found = self.number("--num_nodes")
        return -1 if found is None else found

    @property
    def hostfile(self) -> bool:
        """Hosts come from a file that nobody has read here."""
        return "--hostfile" in self.flags

    @property
    def devices(self) -> str:
        """``CUDA_VISIBLE_DEVICES`` where the launcher looks at it: with a hostfile it does not."""
        return "" if self.hostfile else self.env.get("CUDA_VISIBLE_DEVICES", "")

    @property
    def filtered(self) -> bool:
        """One of the flags that make the launcher drop ``CUDA_VISIBLE_DEVICES``."""
        return bool(self.include or self.exclude or self.num_nodes > 1 or self.num_gpus > 0)

    @property
    def chosen(self) -> str:
        """What the launcher takes as --include: the flag, else the devices that the environment names."""
        if self.devices and not self.filtered:
            return f"localhost:{self.devices}"
        return self.include

    @property
    def ranks(self) -> int | None:
        """Ranks in all, where the command alone decides it."""
        if self.num_gpus > 0:
            nodes = self.num_nodes if self.num_nodes > 0 else None if self.hostfile else 1
            return None if nodes is None else nodes * self.num_gpus
        slots = self.slots()
        return sum(map(len, slots.values())) if slots and all(slots.values()) else None

    def slots(self) -> dict[str, list[int]] | None:
        """Host -> device ids that ``chosen`` names, [] = the whole host; None when it cannot be read."""
        return slots_of(self.chosen)


def slots_of(text: str) -> dict[str, list[int]] | None:
    """``a@b:0,2`` -> {"a": [], "b": [0, 2]}; None when an entry is no number (runner.py parse_node_config)."""
    found: dict[str, list[int]] = {}
    for node in text.split("@") if text else ():
        host, colon, ids = node.partition(":")
        try:
            found.setdefault(host, []).extend(int(i) for i in (ids.split(",") if colon else ()))
        except ValueError:
            return None
    return {host: sorted(set(ids)) for host, ids in found.items()}


def known(flag: str, release: tuple[int, ...]) -> bool:
    """Whether the launcher of ``release`` has ``flag``."""
    if flag in SINCE and release < version_key(SINCE[flag]):
        return False
    return not (flag in GONE and release >= version_key(GONE[flag]))


def parse_launch(text: str, release: str) -> Launch:
    """``[VARIABLE=value ...] deepspeed [flags] script [arguments]`` as ``release`` reads it. Raises DstuiError."""
    try:
        words = [w for w in shlex.split(text.replace("\\\n", " ")) if w.strip()]
    except ValueError as e:
        raise DstuiError(
            _("--launch: the command cannot be split: {reason}").format(reason=e), _("close the quotes")
        ) from e
    env: dict[str, str] = {}
    while words:
        assignment = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.S)
        if assignment:
            env[assignment.group(1)] = assignment.group(2)
        elif words[0] not in _PREFIXES:
            break
        del words[0]
    program = PurePosixPath(words[0]).name if words else ""
    if re.fullmatch(r"python[\d.]*", program):
        module = words.index("-m") if "-m" in words else 0
        if module and words[module + 1 : module + 2] and words[module + 1] in _MODULES:
            program, words = "deepspeed", words[module + 1 :]
    if program not in _PROGRAMS:
        raise DstuiError(
            _("--launch: {word} is not DeepSpeed's launcher").format(word=program or "''"),
            _('write it like --launch "deepspeed --num_gpus 4 train.py"'),
        )
    return _read(words[1:], version_key(release), env)


def _read(words: list[str], release: tuple[int, ...], env: Mapping[str, str]) -> Launch:
    flags: dict[str, str] = {}
    taken_for: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--" and rest:
            word = rest.pop(0)
        elif word.startswith("-") and word != "-":
            name, sign, value = word.partition("=")
            if name[:2] in _SHORT and not name.startswith("--"):
                name, value = word[:2], word[2:].lstrip("=")
                sign = value
            flag = _full(name, release)
            if flag is None or (name[:2] in _SHORT and not known(flag, release)):
                return Launch("deepspeed", flags, env, unknown=name, taken_for=taken_for)
            if name in SINCE and flag != name:
                taken_for[name] = flag
            if flag in _WITH_VALUE and not sign:
                value = rest.pop(0) if rest else ""
            flags["--num_gpus" if flag == "--num_accelerators" else flag] = value
            continue
        return Launch("deepspeed", flags, env, word, tuple(rest), taken_for=taken_for)
    return Launch("deepspeed", flags, env, taken_for=taken_for)


def _full(name: str, release: tuple[int, ...]) -> str | None:
    """The flag that ``name`` is, or shortens without doubt."""
    if name in _SHORT:
        return _SHORT[name]
    there = [f for f in FLAGS if known(f, release)]
    if name in there:
        return name
    close = [f for f in there if name.startswith("--") and f.startswith(name)]
    return close[0] if len(close) == 1 else None
