"""``dstui check FILE...``: what a DeepSpeed release does with a config, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstui.config import schema as schemas
from dstui.config.document import MAX_SIZE, Document, read
from dstui.errors import DstuiError, Exit
from dstui.i18n import _, clauses
from dstui.rules import engine as checking
from dstui.rules import registry
from dstui.rules.diagnostic import FileReport, Severity
from dstui.rules.nearest import nearest
from dstui.rules.subject import Model

if TYPE_CHECKING:
    from dstui.facts.model import Facts

FORMATS = ("full", "concise", "json", "github", "sarif")
MOST_FIXES = 20
"""Rounds of safe fixes: one fix may make room for the next."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help=_("a ds_config.json; - reads standard input")
    )
    parser.add_argument(
        "--deepspeed", metavar="V", help=_("release to judge by (default: the installed one)")
    )
    parser.add_argument("--world-size", type=int, metavar="N", help=_("number of ranks"))
    parser.add_argument("--facts", metavar="FILE", help=_("the machine, from dstui detect --json"))
    parser.add_argument(
        "--engine", choices=checking.ENGINES, default="deepspeed", help=_("who hands the file to DeepSpeed")
    )
    parser.add_argument("--args", metavar="FILE|k=v,...", help=_('training arguments that fill "auto"'))
    parser.add_argument("--format", choices=FORMATS, help=_("how to answer (default: full)"))
    parser.add_argument("--json", action="store_true", help=_("the same as --format json"))
    parser.add_argument(
        "--select", metavar="CODES", default="", help=_("only these codes or prefixes: DS2,DS401")
    )
    parser.add_argument("--ignore", metavar="CODES", default="", help=_("not these codes or prefixes"))
    parser.add_argument(
        "--fail-on",
        choices=[s.value for s in Severity],
        help=_("leave with 1 at this severity or worse (default: silent-wrong)"),
    )
    parser.add_argument("--fix", action="store_true", help=_("apply the safe fixes; keeps a backup"))
    parser.add_argument("--live", action="store_true", help=_("also ask the installed DeepSpeed itself"))
    parser.add_argument(
        "--model", metavar="M", help=_("the model, as for dstui estimate: host RAM is judged too")
    )
    parser.add_argument(
        "--launch", metavar="COMMAND", help=_("the deepspeed command line in one string: it is judged too")
    )
    parser.add_argument("--max-size", metavar="SIZE", help=_("largest file to read (default: 1MB)"))


def run(args: argparse.Namespace) -> int:
    if args.world_size is not None and args.world_size < 1:
        raise DstuiError(_("--world-size must be at least 1"))
    if args.json and args.format not in (None, "json"):
        raise DstuiError(_("--json and --format {format} exclude each other").format(format=args.format))
    form = "json" if args.json else args.format or "full"
    if args.fix and "-" in args.files:
        raise DstuiError(_("--fix needs a file, not standard input"))
    options = _options(args)
    reports = []
    for path in args.files:
        report = checking.check_path(path, options)
        if args.fix and report.verdict is not None:
            report = _fix(path, report, options)
        reports.append(report)
    if args.live:
        reports = _live(reports, options)
    _show(reports, form)
    return int(exit_code(reports, Severity(args.fail_on) if args.fail_on else None))


def exit_code(reports: Iterable[FileReport], fail_on: Severity | None = None) -> Exit:
    """2 when a file could not be read, else 1 when one has a finding as bad as ``fail_on`` (default silent-wrong)."""
    limit = (fail_on or Severity.SILENT_WRONG).rank
    bad = unreadable = False
    for r in reports:
        unreadable = unreadable or r.verdict is None
        bad = bad or any(f.severity.rank <= limit for f in r.findings)
    return Exit.CANNOT if unreadable else Exit.BAD if bad else Exit.OK


def _options(args: argparse.Namespace) -> checking.Options:
    facts = _facts(args.facts) if args.facts else None
    release, origin = release_of(args.deepspeed, facts)
    launch = None
    if args.launch is not None:
        from dstui.rules.command import parse_launch

        launch = parse_launch(args.launch, release)
    size = MAX_SIZE
    if args.max_size:
        from dstui.units import parse_size

        size = parse_size(args.max_size)
    return checking.Options(
        context=checking.Context(
            release=release,
            release_from=origin,
            engine=args.engine,
            facts=facts,
            world_size=args.world_size or (launch.ranks if launch else None),
            args=read_args(args.args) if args.args else None,
            model=model_of(args.model) if args.model else None,
            local=facts is None or facts.host.hostname == os.uname().nodename,
            launch=launch,
        ),
        select=_codes("--select", args.select),
        ignore=_codes("--ignore", args.ignore),
        max_size=size,
    )


def _facts(path: str) -> Facts:
    from dstui.facts.describe import load_facts

    return load_facts(path)


def model_of(spec: str) -> Model:
    """The model that ``--model`` names, in the numbers that the rules ask for. Raises DstuiError."""
    from dstui.estimate.model import load_model

    shape = load_model(spec)
    largest = shape.vocab * shape.hidden if shape.vocab and shape.hidden else None
    return Model(params=shape.params, largest=largest)


def _codes(option: str, text: str) -> tuple[str, ...]:
    """The codes and prefixes in ``text``; one that names no rule is refused. Raises DstuiError."""
    wanted = tuple(c.strip().upper() for c in text.split(",") if c.strip())
    known = [r.code for r in registry.all_rules()]
    for one in wanted:
        if any(registry.matches(code, (one,)) for code in known):
            continue
        found = registry.find(one)
        if found is not None and found.code == one:
            continue  # a change between releases: `versions` tells it, never `check`
        begin = (one[:n] for n in range(len(one) - 1, 2, -1))
        near = (found and found.code) or next(
            (p for p in begin if any(registry.matches(code, (p,)) for code in known)), nearest(one, known)
        )
        raise DstuiError(
            _("{option} {code}: no rule has this code").format(option=option, code=one),
            _("did you mean {code}?").format(code=near)
            if near
            else _("a family is written like DS2, a rule like {code}").format(code=known[0]),
        )
    return wanted


def release_of(wanted: str | None, facts: Facts | None = None) -> tuple[str, str]:
    """(release, ``option``|``interpreter``|``newest``): what was asked for, else installed, else the newest known."""
    if wanted:
        from dstui.rules.registry import version_key

        if not version_key(wanted):
            raise DstuiError(
                _("'{text}' is not a release of DeepSpeed").format(text=wanted),
                _("write it like {release}").format(release=schemas.newest()),
            )
        return wanted, "option"
    found = facts.deepspeed if facts is not None else (installed() or (None, None))[0]
    return (found, "interpreter") if found else (schemas.newest(), "newest")


def installed() -> tuple[str, str] | None:
    """(release, interpreter) of the DeepSpeed where training would run: active environment, ./.venv, our own.

    Read from the names of ``*.dist-info`` folders: a millisecond, no process started.
    """
    here = [os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX"), ".venv", sys.prefix]
    for prefix in dict.fromkeys(p for p in here if p):
        for site in Path(prefix).glob("lib/python3*/site-packages"):
            for info in site.glob("deepspeed-*.dist-info"):
                if (info / "METADATA").is_file():
                    return info.name[len("deepspeed-") : -len(".dist-info")], str(
                        Path(prefix) / "bin" / "python"
                    )
    return None


def read_args(text: str) -> dict[str, Any]:
    """Training arguments from ``k=v,k=v`` or from a JSON or flat YAML file. Raises DstuiError."""
    if "=" in text and not Path(text).exists():
        out: dict[str, Any] = {}
        for part in text.split(","):
            key, sign, value = part.partition("=")
            if not sign or not key.strip():
                raise DstuiError(
                    _("--args: '{part}' is not key=value").format(part=part),
                    _("write it like per_device_train_batch_size=2,bf16=true"),
                )
            out[key.strip().lstrip("-").replace("-", "_")] = _scalar(value.strip())
        return out
    try:
        raw = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DstuiError(
            _("--args: {path} cannot be read: {reason}").format(
                path=text, reason=getattr(e, "strerror", None) or e
            ),
            _("give a JSON or YAML file, or key=value pairs"),
        ) from e
    try:
        found = json.loads(raw)
    except ValueError:
        found = _flat_yaml(raw)
    if not isinstance(found, dict) or not found:
        raise DstuiError(_("--args: {path} holds no key: value pairs").format(path=text))
    return found


def _scalar(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None, "~": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")


def _flat_yaml(text: str) -> dict[str, Any]:
    """Top-level ``key: scalar`` lines; nested parts are passed over: no training argument that fills auto is one."""
    import re

    out = {}
    for line in text.splitlines():
        m = re.fullmatch(r"([A-Za-z_]\w*)\s*:\s*([^#]*?)\s*(?:#.*)?", line)
        if m and m.group(2):
            out[m.group(1)] = _scalar(m.group(2))
    return out


def _fix(path: str, report: FileReport, options: checking.Options) -> FileReport:
    """Apply the safe fixes until none is left; writes once. A fix that cannot be applied is left for the person."""
    from dstui.config.write import difference, save

    strict = options.context.engine in checking.JSON_ENGINES
    document = before = read(path, options.max_size, strict)
    done: list[str] = []
    for _round in range(MOST_FIXES):
        fixed = _one_fix(document, report, options)
        if fixed is None:
            break
        document, report, title = fixed
        done.append(title)
    if document.text != before.text:
        kept = save(path, document.text)
        for line in difference(before.text, document.text, path).splitlines():
            print(line, file=sys.stderr)
        print(_("{path}: fixed: {titles}").format(path=path, titles=clauses(done)), file=sys.stderr)
        if kept is not None:
            print(_("the old file is {path}").format(path=kept), file=sys.stderr)
    else:
        print(
            _("{path}: there is no safe fix to apply; the file is as it was").format(path=path),
            file=sys.stderr,
        )
    return report


def _one_fix(
    document: Document, report: FileReport, options: checking.Options
) -> tuple[Document, FileReport, str] | None:
    for f in report.findings:
        if f.fix is None or not f.fix.safe:
            continue
        try:
            changed = document.edited(f.fix.edits)
        except DstuiError:
            continue
        again = checking.check_document(
            changed, options.context, options.select, options.ignore, options.rules
        )
        if any(g.code == f.code and g.pointer == f.pointer for g in again.findings):
            continue  # it did not help
        return changed, again, f.fix.title
    return None


def _live(reports: list[FileReport], options: checking.Options) -> list[FileReport]:
    """Ask the training interpreter's DeepSpeed about every file that can be read."""
    from dstui.rules import live

    facts = options.context.facts
    python = facts.interpreter.path if facts and facts.interpreter else (installed() or (None, None))[1]
    if python is None:
        raise DstuiError(
            _("--live: no DeepSpeed is installed here"),
            _("activate the training environment, or leave --live out"),
        )
    fills = options.context.engine in ("hf", "accelerate")
    if fills and options.context.args is None:
        raise DstuiError(
            _("--live with --engine {engine} needs --args").format(engine=options.context.engine),
            _('give the training arguments that fill "auto"'),
        )
    out = []
    for report in reports:
        if report.path == "-" or report.verdict is None:
            out.append(report)
            continue
        values = _complete(options.context.args or {}, report.world_size) if fills else None
        (answer,) = live.ask([report.path], python, world_size=report.world_size, args=values)
        out.append(replace(report, live=answer.to_json()))
    return out


def _complete(args: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    from dstui.config.resolve import HF_DEFAULTS

    return {**HF_DEFAULTS, **args, "world_size": world_size}


def _show(reports: list[FileReport], form: str) -> None:
    from dstui.plain import report as rendering

    if form == "json":
        print(json.dumps(rendering.to_json(reports), ensure_ascii=False, indent=2))
    elif form == "sarif":
        from dstui import __version__

        print(json.dumps(rendering.sarif(reports, __version__), ensure_ascii=False, indent=2))
    elif form == "github":
        _print(rendering.github(reports))
    elif form == "concise":
        _print(rendering.concise(reports))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        _print(rendering.full(reports, colour))


def _print(lines: Iterable[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # LANG=C: every character of ours has an ASCII form
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
