"""``dstui trial``: a few steps of the real command with the real config, measured beside what is predicted."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.estimate.families import shape_from_config
from dstui.estimate.inputs import Training
from dstui.estimate.model import load_model
from dstui.estimate.subject import subject
from dstui.examples import tiny_gpt_script
from dstui.i18n import _, ngettext
from dstui.plain import run as running
from dstui.plain.columns import pad, wrap
from dstui.plain.estimate import WIDTH
from dstui.runs import command as commands
from dstui.runs import control, store, trial
from dstui.runs.measured import FOLDER, STEPS, as_trial, read_probe
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir
from dstui.units import GiB, count, gib

TICK = 0.5
SETTLE_SECONDS = 10.0
"""How long the supervisor may take to write the comparison before it is made here."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = _("dstui trial [--steps N] [options of dstui run] -- SCRIPT [ARGS]")
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        metavar="N",
        help=_("optimizer steps, default {n}; then the run ends by itself").format(n=STEPS),
    )
    parser.add_argument(
        "--model",
        metavar="DIR|NAME|REPO_ID|PARAMS",
        help=_("the model, where it is none of transformers' (those tell it themselves)"),
    )
    parser.add_argument("--show", metavar="RUN", help=_("print the result of an earlier trial"))
    running.launch_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.show is not None:
        if args.command:
            raise DstuiError(_("--show starts nothing: leave out the script"))
        return _report(store.find_run(args.show), args)
    from dstui.facts.detect import detect

    spec = trial_spec(running.spec_of(args), steps=args.steps, model=args.model)
    facts = detect(python=args.python, cwd=spec.cwd)
    started = running.begin(spec, facts, args)
    if started is None:
        return Exit.CANNOT
    if not args.json:
        print(
            _("trial {id} started: {n} steps, then it ends by itself (Ctrl+C ends it now)").format(
                id=started.id, n=args.steps
            ),
            flush=True,
        )
    try:
        _follow(started, args.steps)
    except KeyboardInterrupt:
        print(_("stopping trial {id} ...").format(id=started.id), file=sys.stderr, flush=True)
        control.stop(started)
        return Exit.INTERRUPTED
    return _report(started, args)


def trial_spec(spec: RunSpec, *, steps: int, model: str | None = None) -> RunSpec:
    """``spec`` as a trial of ``steps`` optimizer steps. Raises DstuiError for a model that is not known."""
    asked = None
    if model is not None:
        asked = subject(load_model(model), Training())
    elif spec.subject is None and commands.script_path(spec).resolve() == tiny_gpt_script():
        asked = _tiny_gpt(spec)
    return as_trial(dataclasses.replace(spec, subject=asked or spec.subject), steps)


def _tiny_gpt(spec: RunSpec) -> dict[str, Any]:
    """The bundled GPT has no configuration object; its arguments say what it is (``examples/tiny_gpt.py``)."""
    from dstui.session.engines import argument

    def number(name: str, default: int) -> int:
        value = argument(spec.args, name)
        return int(value) if value and value.isdigit() else default

    hidden, seq = number("hidden", 256), number("seq", 64)
    config = {
        "model_type": "dstui_gpt",
        "hidden_size": hidden,
        "num_hidden_layers": number("layers", 4),
        "num_attention_heads": number("heads", 0) or max(1, hidden // 64),
        "vocab_size": number("vocab", 256),
        "max_position_embeddings": seq,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    shape = shape_from_config(config, "tiny GPT", "run")
    training = Training(seq=seq, checkpointing="--checkpointing" in spec.args)
    # its rows are one token longer than what the model sees
    return {**subject(shape, training), "stated": ["seq", "checkpointing", "attention"]}


# -- while it runs -----------------------------------------------------------------------------------------


def _follow(run: RunDir, steps: int) -> None:
    """Until it is over; a line on stderr whenever the phase or the step changes."""
    shown = ""
    on_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    while store.state(run) in store.LIVE:
        text = _progress(run, steps)
        if text != shown:
            shown = text
            print(
                f"\r\x1b[K{text}" if on_terminal else text,
                end="" if on_terminal else "\n",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(TICK)
    if on_terminal and shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _progress(run: RunDir, steps: int) -> str:
    measured = read_probe(run)
    if measured is None:
        return _("loading ...")
    if measured.steps:
        return _("step {n} of {total}").format(n=measured.steps, total=steps)
    if "init" in measured.phases:
        return _("first step ...")
    return _("making the engine ...")


# -- when it is over ---------------------------------------------------------------------------------------


def _report(run: RunDir, args: argparse.Namespace) -> int:
    state = store.state(run)
    if state in store.LIVE:
        raise DstuiError(
            _("run {id} still runs").format(id=run.id), _("join it: dstui watch {id}").format(id=run.id)
        )
    result = _result(run)
    code = Exit.OK if state == "finished" else Exit.BAD
    if code == Exit.OK and (result is None or not _compared(result["measured"])):
        code = Exit.CANNOT
    if args.json:
        answer = {"schema_version": 1, "run": run.id, "dir": str(run.path), "state": state, **(result or {})}
        print(json.dumps(answer, ensure_ascii=False))
        if code == Exit.CANNOT:
            _say_nothing(run, result)
        return code
    if code == Exit.BAD:
        print(_ending(run))
    if result is not None:
        print("\n".join(lines(result)))
    if result is None or code == Exit.CANNOT:
        _say_nothing(run, result)
    return code


def _compared(measured: Mapping[str, Any]) -> bool:
    """Whether there is anything to compare a prediction with."""
    return bool(measured["steps"] and measured["phases"])


def _say_nothing(run: RunDir, result: Mapping[str, Any] | None) -> None:
    text = _why_nothing(run) if result is None else _no_step(run, result["measured"])
    print(_("error: {message}").format(message=text), file=sys.stderr)


def _result(run: RunDir) -> dict[str, Any] | None:
    """As the supervisor wrote it, within moments of the end; else made here."""
    if (run.path / FOLDER).is_dir():
        deadline = time.monotonic() + SETTLE_SECONDS
        while (
            trial.read_result(run) is None and store.liveness(run).supervisor and time.monotonic() < deadline
        ):
            time.sleep(0.1)
    found = trial.read_result(run)
    if found is None:
        with contextlib.suppress(OSError):
            settled = trial.settle(run)
            found = None if settled is None else settled.to_json()
    return found


def _ending(run: RunDir) -> str:
    from dstui.plain.watch import ending
    from dstui.runs.view import RunView

    view = RunView(run)
    try:
        return ending(view.poll())
    finally:
        view.close()


def _no_step(run: RunDir, measured: Mapping[str, Any]) -> str:
    if measured["steps"]:
        return _("nothing was measured: the probe failed")
    if "init" not in measured["phases"]:
        return _(
            "the script ended without a DeepSpeed engine: is it the one that trains? See dstui logs {id}"
        ).format(id=run.id)
    return _(
        "the script ended before its first optimizer step: give it more data or fewer gradient_accumulation_steps"
    )


def _why_nothing(run: RunDir) -> str:
    if not (run.path / FOLDER).is_dir():
        return _("run {id} was not measured").format(id=run.id)
    return _(
        "no rank was measured: an interpreter started with -I, -E or -S, or a launcher that drops PYTHONPATH, "
        "does not load the probe"
    )


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result as text of at most 80 columns."""
    m = result["measured"]
    out = wrap(_headline(result, m), WIDTH, "")
    if result.get("problem"):
        out += wrap(result["problem"], WIDTH, "  ")
    out += ["", *_memory(result), *_phases(result)]
    if m["step_time"] is not None:
        out += [
            "",
            _("step time {seconds:.3g} s (median, the first step not counted)").format(
                seconds=m["step_time"]
            ),
        ]
    if m["retries"]:
        n = m["retries"]
        out += wrap(
            ngettext(
                "the allocator gave its cache back {n} time to make room: this is tight",
                "the allocator gave its cache back {n} times to make room: this is tight",
                n,
            ).format(n=n),
            WIDTH,
            "",
        )
    for text in m["troubles"]:
        out += wrap(_("the probe failed: {error}").format(error=text), WIDTH, "")
    if result.get("stored"):
        out += ["", *wrap(_("later estimates of this model on this machine are corrected by it"), WIDTH, "")]
    elif not result.get("problem"):
        out += ["", *wrap(_not_kept(m), WIDTH, "")]
    return out


def _headline(result: Mapping[str, Any], m: Mapping[str, Any]) -> str:
    model, training = result.get("model"), result.get("training") or {}
    ranks = ngettext("{n} rank", "{n} ranks", m["ranks"]).format(n=m["ranks"])
    text = ngettext("{n} step measured on {ranks}", "{n} steps measured on {ranks}", m["steps"]).format(
        n=m["steps"], ranks=ranks
    )
    if model is not None:
        text = _("{model} ({params} parameters): {text}").format(
            model=model["name"], params=count(model["params"]), text=text
        )
    if training.get("micro_batch") and m["seen"].get("seq"):
        text += ", " + _("micro batch {micro}, {seq} tokens").format(
            micro=training["micro_batch"], seq=training["seq"]
        )
    return text


def _name(what: str) -> str:
    return {
        "allocated": _("allocated"),
        "reserved": _("reserved"),
        "device": _("device"),
        "host": _("host"),
        "pinned": _("pinned"),
    }[what]


def _memory(result: Mapping[str, Any]) -> list[str]:
    head = (_("peak"), _("predicted"), _("low to high"), _("measured"), _("difference"))
    rows = [head]
    for what, row in result["memory"].items():
        p, measured = row["predicted"], row["measured"]
        if measured is None and (p is None or not p["expected"]):
            continue
        ratio = row["ratio"]
        rows.append(
            (
                _name(what),
                gib(p["expected"], 2) if p else "?",
                f"{gib(p['low'], 2)} - {gib(p['high'], 2)}" if p else "",
                gib(measured, 2) if measured is not None else _("not measured"),
                "" if ratio is None else f"{100 * (ratio - 1):+.1f} %",
            )
        )
    return [
        "  "
        + pad(a, 12)
        + pad(b, 12, right=True)
        + pad(c, 24, right=True)
        + pad(d, 14, right=True)
        + pad(e, 12, right=True)
        for a, b, c, d, e in rows
    ]


def _phases(result: Mapping[str, Any]) -> list[str]:
    """Phases down; what was predicted to be allocated beside all that was measured."""
    rows = []
    for p in result["phases"]:
        m = p["measured"] or {}
        cells = [p["predicted"], *(m.get(k) for k in ("allocated", "reserved", "device", "host", "pinned"))]
        rows.append((p["phase"], cells))
    *named, beside = rows if rows and rows[-1][0] == "between" else [*rows, ("", [None] * 6)]
    if not any(b is not None and all(b > (c[i] or 0) for _p, c in named) for i, b in enumerate(beside[1])):
        rows = named  # what the script does beside the engine is nowhere the peak
    used = [any(cells[i] is not None for _phase, cells in rows) for i in range(6)]
    if not any(used):
        return []
    titles = (_("predicted"), _("allocated"), _("reserved"), _("device"), _("host"), _("pinned"))
    head = (
        "  "
        + pad(_("GiB by phase"), 12)
        + "".join(pad(t, 11, right=True) for t, u in zip(titles, used, strict=True) if u)
    )
    out = ["", head]
    from dstui.plain.estimate import phase_name

    for phase, cells in rows:
        shown = ["" if c is None else f"{c / GiB:.2f}" for c in cells]
        out.append(
            "  "
            + pad(phase_name(phase), 12)
            + "".join(pad(c, 11, right=True) for c, u in zip(shown, used, strict=True) if u)
        )
    return out


def _not_kept(m: Mapping[str, Any]) -> str:
    if m["steps"] < trial.LEAST_STEPS:
        return _("not kept for later estimates: memory is at its peak from step {n} on").format(
            n=trial.LEAST_STEPS
        )
    return _(
        "not kept for later estimates: the run did not end well, the machine is not fully known, or dstui's folder cannot be written"
    )
