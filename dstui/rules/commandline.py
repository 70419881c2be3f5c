"""DS92x-DS93x: what DeepSpeed's launcher makes of the command line that starts the run (``check --launch``)."""

from __future__ import annotations

from collections.abc import Iterator

from dstui.i18n import N_, _
from dstui.rules.command import FLAGS, GONE, SINCE, Launch, slots_of
from dstui.rules.diagnostic import Severity
from dstui.rules.nearest import nearest
from dstui.rules.registry import Hit, Lacks, rule
from dstui.rules.subject import Subject

EXAMPLE = '{"train_batch_size": 8}'
RUNNER = "deepspeed/launcher/runner.py"
LOCAL = ("localhost", "127.0.0.1")
LAUNCHER_ONLY = frozenset(
    [
        "--num_gpus",
        "--num_accelerators",
        "--num_nodes",
        "--include",
        "--exclude",
        "--hostfile",
        "--master_port",
        "--master_addr",
        "--no_local_rank",
        "--ssh_port",
        "--no_ssh",
        "--node_rank",
        "--force_multi",
        "--enable_each_rank_log",
    ]
)
"""Options that a training script hardly has itself."""


def _stops() -> str:
    return _("the launcher stops before a process starts")


def _cards(s: Subject) -> int | None:
    """GPUs of each node; None when they are not known."""
    return len(s.facts.gpus) if s.facts is not None and s.facts.gpus is not None else None


@rule(
    "DS920",
    "launcher-filters-exclude-each-other",
    Severity.ERROR,
    "launch",
    what=N_("The command gives --include with --exclude, or one of them with --num_gpus or --num_nodes."),
    why=N_(
        "The launcher takes one way to choose devices. CUDA_VISIBLE_DEVICES counts as --include unless --num_gpus is above 0 or --num_nodes above 1, so `CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_nodes 1 train.py` is refused too."
    ),
    example=EXAMPLE,
    fix=N_("Keep one of them: --include with device ids says all that --num_gpus says."),
    source=f"{RUNNER} main, parse_resource_filter @ 0.9.5-0.19.8; executed",
    context={"launch": "deepspeed --include localhost:0,1 --num_gpus 2 train.py"},
)
def launcher_filters_exclude_each_other(s: Subject) -> Iterator[Hit]:
    if s.launch is None:
        return
    counts = [
        f for f, n in (("--num_nodes", s.launch.num_nodes), ("--num_gpus", s.launch.num_gpus)) if n >= 0
    ]
    first = "--include" if s.launch.include else "--exclude" if s.launch.exclude else ""
    if s.launch.include and s.launch.exclude:
        second = "--exclude"
    elif counts and s.launch.chosen + s.launch.exclude:
        first, second = first or "CUDA_VISIBLE_DEVICES", counts[0]
    else:
        return
    yield Hit(
        "",
        _("the command gives both {first} and {second}").format(first=first, second=second),
        effect=_stops() + ": ValueError",
        hint=_("leave {flag} out").format(flag=second),
    )


@rule(
    "DS921",
    "launcher-flag-not-in-release",
    Severity.ERROR,
    "launch",
    what=N_("The command has an option before the script that the launcher of this release does not know."),
    why=N_(
        "The launcher reads its options up to the script and leaves with code 2 at one it does not know, or at an abbreviation of several. --ssh_port came with 0.10.2, --node_rank and --no_ssh with 0.14.5, --venv_script with 0.17.1, --log_level and --quiet with 0.17.6. Before 0.14.5, --no_ssh is read as --no_ssh_check."
    ),
    example=EXAMPLE,
    fix=N_(
        "Leave the option out, use a release that has it, or put it behind the script if it is the script's."
    ),
    source=f"{RUNNER} parse_args @ 0.9.5-0.19.8; executed",
    context={"launch": "deepspeed --log_level error train.py", "release": "0.17.5"},
)
def launcher_flag_not_in_release(s: Subject) -> Iterator[Hit]:
    if s.launch is None:
        return
    for flag, other in s.launch.taken_for.items():
        yield Hit(
            "",
            _("the launcher of {release} takes {flag} for {other}").format(
                release=s.release, flag=flag, other=other
            ),
            effect=_("every node is started over ssh"),
            hint=_("the flag came with {release}").format(release=SINCE[flag]),
        )
    unknown = s.launch.unknown
    full = "--quiet" if unknown == "-q" else unknown or ""
    if not unknown or full in GONE:
        return
    if full in SINCE:
        hint = _("the flag came with {release}").format(release=SINCE[full])
    else:
        near = nearest(full, sorted(FLAGS))
        hint = (
            _("did you mean {code}?").format(code=near)
            if near
            else _("options of the script belong behind the script")
        )
    yield Hit(
        "",
        _("the launcher of {release} has no option {flag}").format(release=s.release, flag=unknown),
        effect=_stops(),
        hint=hint,
    )


@rule(
    "DS922",
    "elastic-flags-removed",
    Severity.ERROR,
    "launch",
    since="0.19.8",
    what=N_("The command has --elastic_training, --min_elastic_nodes or --max_elastic_nodes."),
    why=N_("Release 0.19.8 removed elastic training from the launcher; it leaves with code 2."),
    example=EXAMPLE,
    fix=N_("Leave the flags out, or stay with 0.19.7."),
    source=f"{RUNNER} parse_args @ 0.19.7, 0.19.8; executed",
    context={"launch": "deepspeed --elastic_training --num_gpus 2 train.py"},
)
def elastic_flags_removed(s: Subject) -> Iterator[Hit]:
    if s.launch is not None and s.launch.unknown in GONE:
        yield Hit(
            "",
            _("the launcher of {release} has no option {flag}").format(
                release=s.release, flag=s.launch.unknown
            ),
            effect=_stops(),
            hint=_("leave {flag} out").format(flag=s.launch.unknown),
        )


def _same(launch: Launch) -> bool:
    """The ignored variable names the devices that the flags choose anyway."""
    named = slots_of(f"localhost:{launch.devices}")
    if launch.num_gpus > 0:
        return named == {"localhost": list(range(launch.num_gpus))}
    return bool(launch.include) and named == slots_of(launch.include)


@rule(
    "DS923",
    "visible-devices-ignored",
    Severity.NO_EFFECT,
    "launch",
    what=N_(
        "CUDA_VISIBLE_DEVICES is set for a command with --include, --exclude, --num_gpus or --num_nodes."
    ),
    why=N_(
        "The launcher deletes the variable when one of these flags is given. Their ids are physical, so --num_gpus 2 takes cards 0 and 1, whatever the variable says."
    ),
    example=EXAMPLE,
    fix=N_("Name the cards once: --include localhost:2,3 alone, or the variable alone."),
    source=f"{RUNNER} main, 'but ignoring it because' @ 0.9.5-0.19.8",
    context={"launch": "CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 2 train.py"},
)
def visible_devices_ignored(s: Subject) -> Iterator[Hit]:
    if s.launch is None or not s.launch.devices or not s.launch.filtered or _same(s.launch):
        return
    ids = slots_of(f"localhost:{s.launch.devices}")
    yield Hit(
        "",
        _("the launcher ignores CUDA_VISIBLE_DEVICES={value}").format(value=s.launch.devices),
        effect=_("--num_gpus {count} takes the cards from number 0 on").format(count=s.launch.num_gpus)
        if s.launch.num_gpus > 0
        else _("the flags alone choose the cards"),
        hint=_("give --include localhost:{value} alone").format(value=s.launch.devices)
        if ids is not None
        else _("name the cards by their numbers in --include localhost:..."),
    )


@rule(
    "DS924",
    "device-is-no-number",
    Severity.ERROR,
    "launch",
    what=N_("CUDA_VISIBLE_DEVICES, --include or --exclude names a device by something else than its number."),
    why=N_(
        'The launcher turns every entry into an integer. A GPU UUID, a MIG id or an empty entry ends it with "invalid literal for int()".'
    ),
    example=EXAMPLE,
    fix=N_("Name the cards by their numbers. For a MIG instance start the script with torchrun."),
    source=f"{RUNNER} parse_node_config @ 0.9.5-0.19.8; executed",
    context={"launch": "CUDA_VISIBLE_DEVICES=MIG-7a3c1f9e deepspeed train.py"},
)
def device_is_no_number(s: Subject) -> Iterator[Hit]:
    if s.launch is None or (s.launch.exclude and s.launch.include):
        return
    text = s.launch.chosen or s.launch.exclude
    if slots_of(text) is not None:
        return
    entries = [e for node in text.split("@") for e in node.partition(":")[2].split(",") if ":" in node]
    bad = next((e for e in entries if slots_of(f"h:{e}") is None), text)
    yield Hit(
        "",
        _("the launcher cannot read the device '{entry}'").format(entry=bad),
        effect=_stops() + ": ValueError",
        hint=_("name the cards by their numbers"),
    )


@rule(
    "DS925",
    "device-not-there",
    Severity.ERROR,
    "launch",
    what=N_("--include, --exclude or CUDA_VISIBLE_DEVICES names a device that the machine does not have."),
    why=N_(
        "The launcher refuses it, but from 0.15.2 to 0.19.6 it compares what --include asks for with itself and starts a rank that finds no card."
    ),
    example=EXAMPLE,
    fix=N_("Name cards that are there; nvidia-smi -L lists them."),
    source=f"{RUNNER} parse_inclusion_exclusion @ 0.15.1, 0.15.2, 0.19.6, 0.19.7; executed",
    context={"launch": "deepspeed -i localhost:9 train.py", "gpus": 2},
)
def device_not_there(s: Subject) -> Iterator[Hit | Lacks]:
    if s.launch is None or s.launch.hostfile:
        return
    slots = slots_of(s.launch.chosen or s.launch.exclude)
    ids = [i for host in LOCAL for i in (slots or {}).get(host, ())]
    if not ids:
        return
    cards = _cards(s)
    if cards is None:
        yield Lacks("facts.gpus")
        return
    bad = [i for i in ids if not 0 <= i < cards]
    if cards and bad:
        yield Hit(
            "",
            _("the command asks for device {device}, but there are {gpus} GPUs").format(
                device=bad[0], gpus=cards
            ),
            effect=_("the launcher does not notice; the rank stops without a card")
            if s.launch.chosen and s.between("0.15.2", "0.19.6")
            else _stops() + ": ValueError",
            hint=_("devices are numbered from 0 to {last}").format(last=cards - 1),
        )


@rule(
    "DS926",
    "host-without-devices",
    Severity.ERROR,
    "launch",
    since="0.15.2",
    until="0.19.6",
    what=N_("--include names a host without devices."),
    why=N_(
        "It means all devices of that host, but from 0.15.2 to 0.19.6 the launcher reads it as none and drops the host. When no host is left it stops with IndexError, else it trains on fewer hosts."
    ),
    example=EXAMPLE,
    fix=N_("Name the devices: --include localhost:0,1."),
    source=f"{RUNNER} parse_inclusion_exclusion @ 0.15.2-0.19.6; executed",
    context={"launch": "deepspeed -i localhost train.py", "release": "0.19.6"},
)
def host_without_devices(s: Subject) -> Iterator[Hit]:
    slots = (s.launch.slots() if s.launch is not None else None) or {}
    bare = [host for host, ids in slots.items() if not ids]
    if bare and s.launch is not None and not s.launch.exclude:
        yield Hit(
            "",
            _("{release} drops the host {host} from --include: no devices are named").format(
                release=s.release, host=bare[0]
            ),
            effect=_stops() + ": IndexError"
            if len(bare) == len(slots)
            else _("the run trains without that host"),
            hint=_("name its devices: {host}:0,1").format(host=bare[0]),
        )


@rule(
    "DS927",
    "num-gpus-beyond-the-gpus",
    Severity.WARNING,
    "launch",
    what=N_("--num_gpus is larger than the GPUs of the machine."),
    why=N_(
        "The launcher does not check: it exports the ids from 0 on, and the ranks beyond the last card stop."
    ),
    example=EXAMPLE,
    fix=N_("Give at most the number of cards."),
    source=f"{RUNNER} main: list(range(num_gpus)) @ 0.9.5-0.19.8; executed",
    context={"launch": "deepspeed --num_gpus 4 train.py", "gpus": 2},
)
def num_gpus_beyond_the_gpus(s: Subject) -> Iterator[Hit | Lacks]:
    if s.launch is None or s.launch.num_gpus <= 0:
        return
    cards = _cards(s)
    if cards is None:
        yield Lacks("facts.gpus")
    elif 0 < cards < s.launch.num_gpus:
        yield Hit(
            "",
            _("--num_gpus {wanted}, but {gpus} GPUs").format(wanted=s.launch.num_gpus, gpus=cards),
            effect=_("the launcher does not check; ranks without a card stop"),
            hint=_("give --num_gpus {gpus}").format(gpus=cards),
        )


@rule(
    "DS928",
    "launcher-option-after-script",
    Severity.WARNING,
    "launch",
    what=N_("An option of the launcher stands behind the script."),
    why=N_("The launcher hands everything behind the script to the script; it reads none of it."),
    example=EXAMPLE,
    fix=N_("Put the launcher's options before the script."),
    source=f"{RUNNER} parse_args: user_args is argparse.REMAINDER @ 0.9.5-0.19.8; executed",
    context={"launch": "deepspeed train.py --num_gpus 4"},
)
def launcher_option_after_script(s: Subject) -> Iterator[Hit]:
    for word in s.launch.script_args if s.launch is not None else ():
        name = word.partition("=")[0]
        if name in LAUNCHER_ONLY and s.launch is not None:
            yield Hit(
                "",
                _("{flag} stands behind {script}, so the launcher does not read it").format(
                    flag=name, script=s.launch.script
                ),
                effect=_("the script gets it"),
                hint=_("put it before {script}").format(script=s.launch.script),
            )


def _gap(ids: list[int]) -> bool:
    return ids != list(range(len(ids)))


@rule(
    "DS929",
    "slurm-device-subset",
    Severity.ERROR,
    "launch",
    since="0.19.7",
    what=N_("--launcher slurm with device ids that are not the first ones, or not as many on every host."),
    why=N_(
        "srun places tasks by count, not by device id; from 0.19.7 the launcher refuses what it cannot do."
    ),
    example=EXAMPLE,
    fix=N_("Choose whole hosts, or the first N devices on every host."),
    source="deepspeed/launcher/multinode_runner.py SlurmRunner.validate_active_resources @ 0.19.7, 0.19.8",
    context={"launch": "deepspeed --launcher slurm -H hosts -i worker-0:1,2@worker-1:1,2 train.py"},
)
def slurm_device_subset(s: Subject) -> Iterator[Hit]:
    if (
        s.launch is None
        or s.launch.flags.get("--launcher", "").lower() != "slurm"
        or (s.launch.include and s.launch.exclude)
    ):
        return
    wanted = {h: ids for h, ids in (slots_of(s.launch.include) or {}).items() if ids}
    left = {
        h: [i for i in range(max(ids) + 1) if i not in ids]
        for h, ids in (slots_of(s.launch.exclude) or {}).items()
        if ids
    }
    several = s.launch.hostfile and (len(wanted) > 1 or "--force_multi" in s.launch.flags or bool(left))
    if not several:
        return  # one host is started without srun
    odd = next((h for h, ids in {**wanted, **left}.items() if _gap(ids)), None)
    if odd is None and len({len(ids) for ids in wanted.values()}) < 2:
        return
    yield Hit(
        "",
        _("slurm cannot choose devices {devices} on {host}").format(
            devices=",".join(map(str, {**wanted, **left}[odd])), host=odd
        )
        if odd is not None
        else _("slurm needs as many devices on every host"),
        effect=_stops() + ": ValueError",
        hint=_("choose whole hosts, or the first devices on every host"),
    )


@rule(
    "DS930",
    "env-file-not-read",
    Severity.NO_EFFECT,
    "launch",
    until="0.10.0",
    what=N_("DS_ENV_FILE is set for a release that does not read it."),
    why=N_(
        "The variable came with 0.10.1; before, the launcher only reads .deepspeed_env in the home and working directories."
    ),
    example=EXAMPLE,
    fix=N_("Name the file .deepspeed_env, or use 0.10.1 or newer."),
    source=f"{RUNNER} DEEPSPEED_ENVIRONMENT_NAME @ 0.10.0, 0.10.1",
    context={"launch": "DS_ENV_FILE=cluster.env deepspeed -H hosts train.py", "release": "0.10.0"},
)
def env_file_not_read(s: Subject) -> Iterator[Hit]:
    if s.launch is not None and s.launch.env.get("DS_ENV_FILE", ".deepspeed_env") != ".deepspeed_env":
        yield Hit(
            "",
            _("the launcher of {release} does not read DS_ENV_FILE").format(release=s.release),
            effect=_("its variables reach no other node"),
            hint=_("name the file .deepspeed_env"),
        )
