"""From a spec to a command line: launchers, devices, environment, and how a config gets into a script."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dstui.config.document import Document
from dstui.errors import DstuiError
from dstui.facts.model import Facts, Gpu, Host, Interpreter, Scheduler
from dstui.runs import answers, command, script
from dstui.runs.command import Refused, adopt_config_from_arguments, build, instrument
from dstui.runs.spec import RunSpec

PACKAGES = {"deepspeed": "0.19.8", "torch": "2.13.0", "transformers": "5.0", "accelerate": "1.9"}
PLAIN = "import argparse, deepspeed\np = argparse.ArgumentParser()\np.add_argument('--local_rank')\ndeepspeed.add_config_arguments(p)\n"
HF = "from transformers import HfArgumentParser, TrainingArguments\nHfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"


def facts(gpus: int | None = 0, **packages: str | None) -> Facts:
    cards = None if gpus is None else tuple(Gpu(i, uuid=f"GPU-{i}", name="H") for i in range(gpus))
    it = Interpreter("/opt/env/bin/python", "active", "3.11.2", {**PACKAGES, **packages})
    return Facts(gpus=cards, host=Host(cores=8, cores_usable=8), interpreters=(it,))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "hf.py").write_text(HF)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 2}\n')
    return tmp_path


def make(
    work: Path,
    where: Facts,
    name: str = "plain.py",
    *args: str,
    env: dict[str, str] | None = None,
    **more: Any,
):
    spec = RunSpec(name, args, cwd=str(work), **more)
    return build(spec, where, work / "run", environ={"PATH": "/usr/bin"} if env is None else env)


CONFIG = {"config": {"train_batch_size": 2}}


def test_deepspeed_on_a_cpu(work: Path) -> None:
    c = make(work, facts(0), num_gpus=2, master_port=29777, **CONFIG)
    assert c.argv == (
        "/opt/env/bin/python", "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29777",
        "plain.py", "--deepspeed", "--deepspeed_config", str(work / "run" / "config.json"),
    )  # fmt: skip
    assert c.env["DS_ACCELERATOR"] == "cpu" and c.env["OMP_NUM_THREADS"] == "4"
    assert c.env["PATH"].split(":")[0] == "/opt/env/bin"
    assert (c.world_size, c.ranks_per_node, c.devices, c.launcher) == (2, 2, None, "deepspeed")


def test_deepspeed_on_gpus_names_them(work: Path) -> None:
    c = make(work, facts(4), **CONFIG)
    assert c.argv[3:5] == ("--include", "localhost:0,1,2,3") and c.world_size == 4
    c = make(work, facts(4), devices=("1", "3"), **CONFIG)
    assert c.argv[3:5] == ("--include", "localhost:1,3") and c.world_size == 2
    c = make(work, facts(4), devices=("GPU-2",), **CONFIG)  # a UUID of a whole card is its number
    assert c.argv[3:5] == ("--include", "localhost:2")
    c = make(work, facts(4), num_gpus=2, **CONFIG)
    assert c.argv[3:5] == ("--include", "localhost:0,1")
    assert c.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and "DS_ACCELERATOR" not in c.env


def test_callers_settings_are_left_alone(work: Path) -> None:
    env = {
        "PATH": "/opt/env/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONUNBUFFERED": "",
    }
    c = make(work, facts(0), num_gpus=2, env=env, **CONFIG)
    assert not {"PATH", "OMP_NUM_THREADS", "DS_ACCELERATOR", "PYTHONUNBUFFERED"} & set(c.env)
    spec = RunSpec("plain.py", cwd=str(work), env={"CUDA_VISIBLE_DEVICES": "1", "MINE": "x"}, **CONFIG)
    c = build(spec, facts(2), work / "run", environ={"PATH": ""})
    assert c.devices == ("1",) and c.env["MINE"] == "x"


def test_unknown_gpus_follow_cuda_visible_devices(work: Path) -> None:
    c = make(work, facts(None), env={"PATH": "", "CUDA_VISIBLE_DEVICES": "5,7"}, **CONFIG)
    assert c.devices == ("5", "7")


def test_mig_goes_through_torchrun(work: Path) -> None:
    mig = Gpu(0, uuid="MIG-1", mig_parent="GPU-0")
    where = Facts(gpus=(mig,), interpreters=facts().interpreters)
    c = make(work, where, **CONFIG)
    assert c.launcher == "torchrun" and c.env["CUDA_VISIBLE_DEVICES"] == "MIG-1"


def test_torchrun_and_python(work: Path) -> None:
    c = make(work, facts(2), launcher="torchrun", master_port=29777, **CONFIG)
    assert c.argv[1:3] == ("-m", "torch.distributed.run") and c.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert c.argv[c.argv.index("--nproc_per_node") + 1] == "2"
    c = make(work, facts(0), launcher="python", **CONFIG)
    assert c.argv[:3] == ("/opt/env/bin/python", "-u", "plain.py") and c.env["WORLD_SIZE"] == "1"


def test_no_deepspeed_means_torchrun(work: Path) -> None:
    assert make(work, facts(0, deepspeed=None)).launcher == "torchrun"


def test_hostfile(work: Path) -> None:
    (work / "hosts").write_text("a slots=8\nb slots=8\n")
    c = make(work, facts(2), hostfile="hosts", nodes=2, num_gpus=2, **CONFIG)
    assert c.argv[3:9] == ("--hostfile", str(work / "hosts"), "--num_nodes", "2", "--num_gpus", "2")
    assert c.world_size == 4
    with pytest.raises(Refused):
        make(work, facts(2), hostfile="hosts", nodes=2, launcher="torchrun", **CONFIG)
    known = Facts(gpus=(), interpreters=facts().interpreters, scheduler=Scheduler(hostfile="/job/hostfile"))
    assert "/dev/null" in make(work, known, **CONFIG).argv  # one node was asked for


def test_local_rank_only_for_scripts_that_take_it(work: Path) -> None:
    assert "--no_local_rank" not in make(work, facts(0), **CONFIG).argv
    (work / "bare.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--ds_config')\n"
    )
    c = make(work, facts(0), "bare.py", **CONFIG)
    assert "--no_local_rank" in c.argv and c.argv[-2] == "--ds_config"
    assert "--no_local_rank" in make(work, facts(0), "hf.py", engine="hf", **CONFIG).argv


def test_placeholder_wins(work: Path) -> None:
    c = make(work, facts(0), "plain.py", "--x={config}", "{config}", **CONFIG)
    assert c.argv[-2:] == (f"--x={work}/run/config.json", f"{work}/run/config.json")
    assert c.config_how == "placeholder"


def test_hf(work: Path) -> None:
    c = make(work, facts(0), "hf.py", "--lr", "1", engine="hf", **CONFIG)
    # without a GPU the Trainer must be told, else it counts one rank and refuses bf16
    assert c.argv[-3:] == ("--deepspeed", f"{work}/run/config.json", "--use_cpu")
    for given in (("--use_cpu", "True"), ("--use-cpu=True",), ("--no_cuda",)):
        c = make(work, facts(0), "hf.py", *given, engine="hf", **CONFIG)
        assert c.argv[-2:] == ("--deepspeed", f"{work}/run/config.json")
    c = make(work, facts(2), "hf.py", engine="hf", **CONFIG)
    assert c.argv[-2:] == ("--deepspeed", f"{work}/run/config.json")


def test_accelerate(work: Path) -> None:
    c = make(work, facts(0), engine="accelerate", num_gpus=2, **CONFIG)
    assert "accelerate.commands.launch" in c.argv and "num_processes: 2" in c.files["accelerate.yaml"]
    assert str(work / "run" / "config.json") in c.files["accelerate.yaml"]
    c = make(work, facts(0), engine="accelerate", launcher="torchrun", **CONFIG)
    assert c.env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(work / "run" / "config.json")


def test_llamafactory(work: Path) -> None:
    yaml = "# mine\nstage: sft\ndeepspeed: ds.json  # old\nlr: 1\n"
    (work / "x.yaml").write_text(yaml)
    c = make(work, facts(0), "x.yaml", engine="llamafactory", num_gpus=2)
    copy = c.files["train.yaml"]
    assert f'deepspeed: "{work}/run/config.json"' in copy and copy.startswith("# mine\nstage: sft\n")
    assert json.loads(c.files["config.json"])["train_batch_size"] == 2  # the file that the YAML named
    assert c.env["FORCE_TORCHRUN"] == "1" and c.argv[c.argv.index("--nproc_per_node") + 1] == "2"
    assert c.argv[-3:] == ("-m", "llamafactory.launcher", f"{work}/run/train.yaml")
    assert (work / "x.yaml").read_text() == yaml


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import deepspeed\ndeepspeed.initialize(config='mine.json')\n", "hard-codes"),
        ("import deepspeed\n", "takes no DeepSpeed config"),
        ("import fire, deepspeed\nfire.Fire()\n", "cannot tell"),
        (
            "from transformers import TrainingArguments\nTrainingArguments('o', deepspeed='a.json')\n",
            "hard-codes",
        ),
    ],
)
def test_refused_with_the_line_to_add(work: Path, source: str, says: str) -> None:
    (work / "bad.py").write_text(source)
    with pytest.raises(Refused, match=says) as e:
        make(work, facts(0), "bad.py", **CONFIG)
    assert "DSTUI_CONFIG" in (e.value.hint or "")
    if says == "hard-codes":
        assert "bad.py:2" in e.value.message
    assert make(work, facts(0), "bad.py").config_how == "none"  # without a config it may do as it likes


def test_a_script_that_reads_the_variable(work: Path) -> None:
    (work / "ok.py").write_text(
        "import os, deepspeed\ndeepspeed.initialize(config=os.environ['DSTUI_CONFIG'])\n"
    )
    c = make(work, facts(0), "ok.py", **CONFIG)
    assert c.config_how == "env" and c.env["DSTUI_CONFIG"] == f"{work}/run/config.json"


def test_remembered_answer(work: Path) -> None:
    path = work / "odd.py"
    path.write_text("import fire\n")
    answers.remember(path, {"options": ["--cfg", "{config}"]})
    c = make(work, facts(0), "odd.py", **CONFIG)
    assert c.argv[-2:] == ("--cfg", f"{work}/run/config.json") and c.config_how == "remembered"


def test_own_option_takes_the_value_or_the_switch(work: Path) -> None:
    (work / "own.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\n"
        "p.add_argument('--deepspeed', action='store_true')\np.add_argument('--deepspeed_config')\n"
    )
    assert make(work, facts(0), "own.py", **CONFIG).argv[-3:-1] == ("--deepspeed", "--deepspeed_config")
    (work / "own.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--deepspeed')\n"
    )
    assert make(work, facts(0), "own.py", **CONFIG).argv[-2] == "--deepspeed"


def test_options_in_an_imported_module(work: Path) -> None:
    (work / "lib").mkdir()
    (work / "lib" / "__init__.py").write_text("")
    (work / "lib" / "opts.py").write_text("def add(p):\n    p.add_argument('--deepspeed_config')\n")
    (work / "main.py").write_text("from lib.opts import add\nimport deepspeed\n")
    assert make(work, facts(0), "main.py", **CONFIG).argv[-2] == "--deepspeed_config"


def test_config_named_among_the_arguments(work: Path) -> None:
    spec = adopt_config_from_arguments(
        RunSpec("hf.py", ("--deepspeed", "ds.json", "--x"), engine="hf", cwd=str(work))
    )
    assert spec.args == ("--deepspeed", "{config}", "--x") and spec.config_source == str(work / "ds.json")
    spec = adopt_config_from_arguments(RunSpec("p.py", ("--deepspeed_config=ds.json",), cwd=str(work)))
    assert spec.args == ("--deepspeed_config={config}",)
    spec = RunSpec("p.py", ("--deepspeed", "--lr", "1"), cwd=str(work))
    assert adopt_config_from_arguments(spec) == spec
    with pytest.raises(Refused, match="two configs"):
        adopt_config_from_arguments(
            RunSpec("p.py", ("--deepspeed", "ds.json"), cwd=str(work), config_source=str(work / "other.json"))
        )


def test_guess_engine(work: Path) -> None:
    assert command.guess_engine(script.look(work / "plain.py")) == "plain"
    assert command.guess_engine(script.look(work / "hf.py")) == "hf"
    assert command.guess_engine(script.look(work / "x.yaml")) == "llamafactory"
    (work / "acc.py").write_text("from accelerate import Accelerator\n")
    assert command.guess_engine(script.look(work / "acc.py")) == "accelerate"


# -- the run's copy of the config ------------------------------------------------------------------------


def test_instrument_keeps_the_text(tmp_path: Path) -> None:
    text = '{\n  // mine\n  "train_batch_size": 2e0, /* two */\n}\n'
    new = instrument(text, tmp_path, "0.19.8")
    data = Document.parse(new).data
    assert "// mine" in new and "/* two */" in new and "2e0" in new
    assert data["steps_per_print"] == 10 and data["log_level"] == "info"
    assert data["csv_monitor"] == {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}


def test_instrument_leaves_what_the_user_set(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "steps_per_print": 500,
            "log_level": "debug",
            "csv_monitor": {"enabled": True, "output_path": "/mine"},
        }
    )
    assert instrument(text, tmp_path, "0.19.8") == text


def test_log_level_only_where_the_release_knows_it(tmp_path: Path) -> None:
    for release in ("0.19.2", "0.16.1", None):
        assert '"log_level"' not in instrument("{}", tmp_path, release)
    for release in ("0.19.3", "0.20.0", "0.19.8+abc"):
        assert '"log_level"' in instrument("{}", tmp_path, release)


def test_instrument_of_a_strict_file_is_strict_json(tmp_path: Path) -> None:
    json.loads(instrument('{"a": 1}', tmp_path, "0.19.8", strict_json=True))
    with pytest.raises(DstuiError):
        instrument('{"a": 1, /* no */}', tmp_path, "0.19.8", strict_json=True)


def test_declined(work: Path) -> None:
    c = make(work, facts(0), config_source="ds.json", instrument=False)
    assert c.files["config.json"] == '{"train_batch_size": 2}\n'
    c = make(work, facts(0), config_source="ds.json")
    assert "csv_monitor" in c.files["config.json"]
    assert (work / "ds.json").read_text() == '{"train_batch_size": 2}\n'


# -- ports -----------------------------------------------------------------------------------------------


def test_ports() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        assert not command.port_is_free(s.getsockname()[1])
    port = command.free_port()
    assert command.port_is_free(port) and port < 32768
    assert command.free_port(frozenset(range(29500, 31999))) == 31999
    with pytest.raises(DstuiError):
        command.free_port(frozenset(range(29500, 32000)))


def test_spec_refuses_nonsense() -> None:
    for bad in ({"engine": "x"}, {"launcher": "x"}, {"num_gpus": 0}):
        with pytest.raises(DstuiError):
            RunSpec("a.py", **bad)
    assert RunSpec("a.py", devices=(0, 1)).devices == ("0", "1")  # type: ignore[arg-type]
    secret = RunSpec("a.py", env={"X": "s3cret"})
    assert "s3cret" not in json.dumps(secret.to_json())


def test_the_source_of_a_run_s_config_is_a_file_that_holds_it(tmp_path: Path) -> None:
    """The wizard may start a config that it never wrote, or that differs from the file of that name."""
    from dstui.runs.start import _source

    spec = RunSpec("t.py", cwd=str(tmp_path), config_text='{"a": 1}', config_source="ds.json")
    assert _source(spec) is None
    (tmp_path / "ds.json").write_text('{"a": 2}')
    assert _source(spec) is None
    (tmp_path / "ds.json").write_text('{"a": 1}')
    assert _source(spec) == str(tmp_path / "ds.json")
    assert _source(RunSpec("t.py", cwd=str(tmp_path), config_source="ds.json")) == str(tmp_path / "ds.json")
    assert _source(RunSpec("t.py", cwd=str(tmp_path))) is None


# -- ranks asked for and ranks there ------------------------------------------------------------------------


def test_deepspeed_never_gets_fewer_ranks_than_asked(work: Path) -> None:
    """--include makes one rank a device: 3 ranks on 2 cards would quietly be 2, with a manifest that says 3."""
    for more in ({"num_gpus": 3}, {"devices": ("0", "1"), "num_gpus": 3}):
        with pytest.raises(Refused) as e:
            make(work, facts(2), **more, **CONFIG)
        assert e.value.problem == "more-ranks-than-devices"
        assert "3 ranks" in e.value.message and "2 GPUs" in e.value.message
    with pytest.raises(Refused) as e:
        make(work, facts(4), devices=("1", "1"), **CONFIG)
    assert e.value.problem == "device-twice"
    c = make(
        work, facts(2), launcher="torchrun", num_gpus=3, **CONFIG
    )  # it starts three; the third says why not
    assert c.argv[c.argv.index("--nproc_per_node") + 1] == "3" and c.world_size == 3
    c = make(work, facts(4), devices=("3", "1", "0"), num_gpus=2, **CONFIG)
    assert c.argv[4] == "localhost:3,1" and c.world_size == 2


def test_hosts_of_a_hostfile(work: Path) -> None:
    (work / "uneven").write_text("# mine\n\na slots=8\nb   slots=4\nc slots=2\n")
    c = make(work, facts(1), hostfile="uneven", nodes=3, **CONFIG)
    assert (c.world_size, c.ranks_per_node) == (14, 8)
    assert "--num_gpus" not in c.argv  # each node has its own slots, whatever is here
    assert make(work, facts(1), hostfile="uneven", nodes=2, **CONFIG).world_size == 12
    assert make(work, facts(1), hostfile="uneven", nodes=2, num_gpus=3, **CONFIG).world_size == 6
    for text, nodes, problem, words in (
        ("a slots=8\n", 2, "more-nodes-than-hosts", "2 nodes"),
        ("a slots=8\na slots=8\n", 1, "hostfile-broken", ":2"),
        ("a\n", 1, "hostfile-broken", ":1"),
        ("# none\n", 1, "hostfile-broken", "no node"),
    ):
        (work / "bad").write_text(text)
        with pytest.raises(Refused) as e:
            make(work, facts(1), hostfile="bad", nodes=nodes, **CONFIG)
        assert e.value.problem == problem and words in e.value.message
    with pytest.raises(Refused) as e:
        make(work, facts(1), nodes=2, **CONFIG)
    assert e.value.problem == "no-hostfile"


def hidden(value: str, remark: str = "hidden") -> Facts:
    return dataclasses.replace(facts(0), visible_devices=value, unknown={"visible_devices": remark})


@pytest.mark.parametrize("value", ["", "-1", "3,4"])
def test_hidden_gpus_are_not_shown_again(work: Path, value: str) -> None:
    """DeepSpeed's launcher gives each rank CUDA_VISIBLE_DEVICES=0..N-1; torchrun leaves it as it is."""
    env = {"PATH": "", "CUDA_VISIBLE_DEVICES": value}
    c = make(work, hidden(value), num_gpus=2, env=env, **CONFIG)
    assert c.launcher == "torchrun" and c.world_size == 2 and c.devices is None
    assert "CUDA_VISIBLE_DEVICES" not in c.env and c.env["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_hidden_for_this_run_alone(work: Path, value: str) -> None:
    spec = RunSpec("plain.py", cwd=str(work), num_gpus=2, env={"CUDA_VISIBLE_DEVICES": value}, **CONFIG)
    c = build(spec, facts(2), work / "run", environ={"PATH": ""})
    assert c.launcher == "torchrun" and c.devices is None and c.env["DS_ACCELERATOR"] == "cpu"
    assert c.env["CUDA_VISIBLE_DEVICES"] == value


def test_the_cpu_accelerator_counts_no_cards(work: Path) -> None:
    """Its device_count is the number of NUMA nodes: --include localhost:0,1 would be refused (runner.py, 0.19.7 on)."""
    c = make(work, facts(2), num_gpus=2, env={"PATH": "", "DS_ACCELERATOR": "cpu"}, **CONFIG)
    assert c.argv[3:5] == ("--num_gpus", "2") and c.devices is None


def test_two_lists_of_devices(work: Path) -> None:
    spec = RunSpec("plain.py", cwd=str(work), devices=("0",), env={"CUDA_VISIBLE_DEVICES": "1"}, **CONFIG)
    with pytest.raises(Refused) as e:
        build(spec, facts(2), work / "run", environ={"PATH": ""})
    assert e.value.problem == "two-device-lists"
