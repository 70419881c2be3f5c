"""``dstui [FILE]`` and its verbs. Loads the one module a verb needs and nothing else."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from dstui import __version__, i18n
from dstui.errors import DstuiError, Exit
from dstui.i18n import N_, _


class Verb(NamedTuple):
    """The module of a verb, loaded only when it is called, and its line in ``--help``."""

    module: str
    help: str


VERBS: dict[str, Verb] = {
    "detect": Verb("dstui.plain.detect", N_("the facts of this machine")),
    "check": Verb("dstui.plain.check", N_("what a DeepSpeed release does with a config")),
    "explain": Verb("dstui.plain.explain", N_("the page of a rule, a run cause or a config key")),
    "versions": Verb("dstui.plain.versions", N_("what a file does differently in another DeepSpeed release")),
    "schema": Verb("dstui.plain.schema", N_("the JSON Schema of ds_config.json, for editors")),
    "estimate": Verb("dstui.plain.estimate", N_("will it fit, on the GPU and in host RAM")),
    "plan": Verb("dstui.plain.plan", N_("the best config for a machine, with the reasons")),
    "preset": Verb("dstui.plain.preset", N_("list, show, edit and copy presets")),
    "diff": Verb("dstui.plain.diff", N_("difference of two configs in meaning")),
    "init": Verb("dstui.plain.init", N_("the wizard line by line, for scripts and screen readers")),
    "run": Verb("dstui.plain.run", N_("start a training run that outlives this terminal")),
    "trial": Verb("dstui.plain.trial", N_("a few steps, measured beside what was predicted")),
    "runs": Verb("dstui.plain.runs", N_("list the runs")),
    "watch": Verb("dstui.plain.watch", N_("join a run")),
    "logs": Verb("dstui.plain.logs", N_("the output of a run")),
    "stop": Verb("dstui.plain.stop", N_("end a run and all its ranks")),
    "rm": Verb("dstui.plain.rm", N_("forget an ended run")),
    "report": Verb("dstui.plain.bundle", N_("pack a run into one file, without secrets")),
    "diagnose": Verb("dstui.plain.diagnose", N_("why a run failed")),
    "compare": Verb("dstui.plain.compare", N_("runs side by side: config, speed, memory, price")),
    "ab": Verb("dstui.plain.ab", N_("two configs or two DeepSpeed releases against each other")),
    "demo": Verb("dstui.plain.demo", N_("train the bundled tiny GPT on this machine")),
    "where": Verb("dstui.plain.where", N_("the paths that dstui uses")),
}
"""Each module has ``configure(parser)`` and ``run(args) -> int``."""


def _global_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lang", choices=("en", "zh"), default=argparse.SUPPRESS, help=_("language of the texts")
    )


def _usage() -> str:
    lines = [
        _("usage: dstui [FILE]            the wizard and the monitor"),
        _("       dstui VERB [options]    the same as plain commands"),
        "",
        _("verbs:"),
        *(f"  {name:<10} {_(verb.help)}" for name, verb in VERBS.items()),
        "",
        _("options:"),
        "  --lang en|zh    " + _("language of the texts"),
        "  --low           " + _("fewer bytes: for a slow line"),
        "  --facts FILE    " + _("plan for the machine in FILE (from dstui detect --json)"),
        "  --version, --help",
        "",
        _("`dstui VERB --help` tells the options of a verb."),
    ]
    return "\n".join(lines)


def _peek_language(argv: Sequence[str]) -> str | None:
    for i, a in enumerate(argv):
        if a == "--":
            return None
        if a == "--lang" and i + 1 < len(argv):
            return argv[i + 1]
        if a.startswith("--lang="):
            return a.partition("=")[2]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``dstui`` command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _mend_streams()
    tty = sys.stdout.isatty()
    i18n.set_language(i18n.pick_language(_peek_language(args), tty=tty, setting=_language_set))
    try:
        code = int(_dispatch(args))
        sys.stdout.flush()  # a full disk shows here, not in the interpreter's last breath
        return code
    except DstuiError as e:
        return _say(e)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()
        return int(Exit.OK)
    except OSError as e:
        _drop_stdout()
        what = os.strerror(e.errno) if e.errno else str(e)
        where = f"{os.fsdecode(e.filename)}: " if isinstance(e.filename, str | bytes) else ""
        hint = None
        if e.errno == errno.ENOENT and not where and not _has_cwd():
            what, hint = _("the working directory was deleted"), _("change to one that exists")
        elif e.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = _("free some space; `dstui where` tells what dstui writes where")
        elif e.errno in (errno.EACCES, errno.EPERM):
            hint = _("check the permissions, or move dstui's folders: `dstui where`")
        return _say(DstuiError(where + what, hint))
    except Exception:  # a fault of ours: never the exit code that judges the user's file
        import traceback

        traceback.print_exc()
        return _say(DstuiError(_("dstui itself failed"), _("please report it with the lines above")))


def _language_set() -> str:
    """The setting ``language``; the settings are loaded only where the file says something about it."""
    from dstui import paths

    try:
        if b'"language"' not in (paths.config_home() / "settings.json").read_bytes():
            return ""
    except OSError:
        return ""
    from dstui.settings import Settings

    return str(Settings.load().get("language"))


def _has_cwd() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib would cost the import
    except OSError:
        return False
    return True


def _say(e: DstuiError) -> int:
    print(_("error: {message}").format(message=e.message), file=sys.stderr)
    if e.hint:
        print("  " + e.hint, file=sys.stderr)
    return int(e.code)


def _mend_streams() -> None:
    """Standard streams that take any text: none closed, and no character that ends the program."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # `<&-` or `>&-`: the next file opened must not become stdout
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif fd and isinstance(stream, io.TextIOWrapper):
            # An ASCII stdout, or a file name that is no UTF-8: `\u4e2d` is also what JSON would write.
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Nobody reads stdout any more: what is still buffered goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _dispatch(args: list[str]) -> int:
    if "--version" in args[:2]:
        print(f"dstui {__version__}")
        return Exit.OK
    words = list(args)
    while words and words[0].startswith("--lang"):  # `dstui --lang zh check ...`
        words = words[1:] if "=" in words[0] else words[2:]
    if words and words[0] in ("-h", "--help", "help"):
        print(_usage())
        return Exit.OK
    if words and words[0] in VERBS:
        verb = VERBS[words[0]]
        module = importlib.import_module(verb.module)
        parser = argparse.ArgumentParser(prog=f"dstui {words[0]}", description=_(verb.help))
        _global_options(parser)
        module.configure(parser)
        return int(module.run(parser.parse_args(words[1:])))
    return _open_tui(words)


class _Parser(argparse.ArgumentParser):
    """Errors as everywhere in dstui: one line and the next step, no page of usage."""

    def error(self, message: str) -> NoReturn:
        raise DstuiError(message, _("see `dstui --help`"))


def _open_tui(words: list[str]) -> int:
    parser = _Parser(prog="dstui", add_help=False)
    _global_options(parser)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--low", action="store_true")
    parser.add_argument("--facts")
    parser.add_argument("--watch")
    args, rest = parser.parse_known_args(words)
    if args.file in VERBS:
        raise DstuiError(
            _("the options of `{verb}` come after it").format(verb=args.file),
            _("see `dstui {verb} --help`").format(verb=args.file),
        )
    if args.file and not os.path.exists(args.file):  # noqa: PTH110 - pathlib would cost the import
        import difflib

        near = difflib.get_close_matches(args.file, VERBS, 1)
        raise DstuiError(
            _("'{word}' is neither a verb nor a file").format(word=args.file),
            _("did you mean `dstui {verb}`?").format(verb=near[0]) if near else _("see `dstui --help`"),
        )
    if rest:
        raise DstuiError(
            _("unknown: {words}").format(words=" ".join(rest)),
            _("see `dstui --help`"),
        )
    from dstui.tui import start

    return start(file=args.file, low=args.low, facts=args.facts, watch=args.watch)
