"""``dstui explain CODE_OR_KEY``: the page of a rule, of a run cause or of a config key."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.i18n import _, listed
from dstui.plain.check import release_of
from dstui.plain.columns import pad, width, wrap
from dstui.rules import keypages
from dstui.rules.registry import Rule, all_changes, all_rules, find


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "word",
        metavar="CODE_OR_KEY",
        nargs="?",
        help=_("DS204, offload-param-below-stage-3, DR101 or a config key"),
    )
    parser.add_argument(
        "--deepspeed", metavar="V", help=_("release whose key is shown (default: the installed one)")
    )
    parser.add_argument("--list", action="store_true", help=_("every code with its name"))
    parser.add_argument("--json", action="store_true", help=_("answer as JSON"))


def run(args: argparse.Namespace) -> int:
    if args.list or args.word is None:
        _list(args.json)
        return Exit.OK
    release = keypages.newest_known(release_of(args.deepspeed)[0])
    if args.deepspeed and release != args.deepspeed.split("+")[0]:
        from dstui.config import schema

        raise DstuiError(
            _("no schema for DeepSpeed {release}").format(release=args.deepspeed),
            _("known releases: {releases}").format(releases=listed(schema.releases())),
        )
    rule = find(args.word)
    if rule is not None:
        _out(args.json, _rule_json(rule), rule_page(rule))
        return Exit.OK
    cause = _cause(args.word)
    if cause is not None:
        _out(
            args.json,
            {"kind": "cause", "code": cause.code, "name": cause.name, "page": cause.page()},
            cause.page().splitlines(),
        )
        return Exit.OK
    found = keypages.match(args.word, release)
    if len(found) == 1:
        page = keypages.page(found[0], release)
        _out(args.json, page.to_json(), key_page(page))
        return Exit.OK
    if found:
        several = _("{word} is the name of several keys:").format(word=args.word)
        _out(args.json, {"kind": "choice", "paths": found}, [several, *("  " + p for p in found)])
        return Exit.OK
    near = keypages.suggestions(args.word, release)
    raise DstuiError(
        _("nothing is called '{word}'").format(word=args.word),
        _("did you mean {names}?").format(names=listed(near))
        if near
        else _("see `dstui explain --list`, or give a config key such as zero_optimization.stage"),
    )


def _cause(word: str) -> Any:
    """A run cause (DR...), by code or name."""
    from dstui.runs import causes

    return causes.find(word)


def _list(as_json: bool) -> None:
    from dstui.runs import causes

    pages = sorted((p.code, p.name) for p in (*all_rules(), *all_changes()))
    pages += [(c.code, c.name) for c in causes.all_causes()]
    _out(
        as_json,
        {"kind": "list", "pages": [{"code": c, "name": n} for c, n in pages]},
        [f"{c}  {n}" for c, n in pages],
    )


def _rule_json(rule: Rule) -> dict[str, Any]:
    return {
        "kind": "rule",
        "code": rule.code,
        "name": rule.name,
        "severity": rule.severity.value,
        "when": rule.when,
        "since": rule.since,
        "until": rule.until,
        "what": _(rule.page.what),
        "why": _(rule.page.why),
        "example": rule.page.example,
        "command": rule.context.get("launch"),
        "fix": _(rule.page.fix),
        "source": rule.page.source,
    }


def _releases(since: str | None, until: str | None) -> str:
    if since and until:
        return _("DeepSpeed {first} to {last}").format(first=since, last=until)
    if since:
        return _("DeepSpeed {first} and later").format(first=since)
    return _("DeepSpeed up to {last}").format(last=until) if until else _("every release of DeepSpeed")


def _when(when: str) -> str:
    return {
        "launch": _("when the launcher starts"),
        "parse": _("when the config is parsed"),
        "init": _("when the engine starts, after the model was loaded"),
        "step": _("while training"),
        "save": _("when the model is saved"),
        "always": _("always"),
    }[when]


def rule_page(rule: Rule) -> list[str]:
    """What, Why, Example, Fix, Source."""
    lines = [
        f"{rule.code} {rule.name}",
        f"  {rule.severity.value}; {_when(rule.when)}; {_releases(rule.since, rule.until)}",
    ]
    for title, text in ((_("What"), _(rule.page.what)), (_("Why"), _(rule.page.why))):
        lines += ["", title, *_wrapped(text)]
    if rule.page.example:
        lines += ["", _("Example"), "    " + rule.page.example]
    if "launch" in rule.context:
        lines.append("    " + rule.context["launch"])
    lines += ["", _("Fix"), *_wrapped(_(rule.page.fix)), "", _("Source"), *_wrapped(rule.page.source)]
    return lines


def key_page(k: keypages.KeyPage) -> list[str]:
    def shown(value: Any) -> str:
        return json.dumps(value)

    lines = [k.path, *(_wrapped(k.meaning) if k.meaning else [])]
    rows: list[tuple[str, str]] = [(_("type"), k.type)]
    if k.defaults:
        first, *later = k.defaults
        text = shown(first[1]) + "".join(
            ", " + _("{value} from {release}").format(value=shown(v), release=r) for r, v in later
        )
        rows.append((_("default"), text))
    rows += [(_("bounds"), k.bounds), (_("choices"), listed(shown(c) for c in k.choices))]
    rows += [(_("other names"), listed(k.aliases)), (_("use instead"), k.replaced_by or "")]
    if k.since:
        rows.append((_("since"), _("0.9.5 or earlier") if k.since == "0.9.5" else k.since))
    rows.append((_("last release"), k.until or ""))
    rows.append((_("refused from"), k.refused_from or ""))
    if k.unknown_keys:
        rows.append(
            (_("unknown keys"), _("refused") if k.unknown_keys == "refused" else _("ignored in silence"))
        )
    rows.append((_("keys"), listed(k.keys)))
    rows.append((_("read by"), k.source))
    rows.append((_("rules"), listed(f"{c} {n}" for c, n in k.rules)))
    if not k.known:
        lines.append("    " + _("DeepSpeed {release} does not read it").format(release=k.release))
    column = max(width(title) for title, text in rows if text)
    for title, text in rows:
        if text:
            lines += wrap(text, max(column + 36, _width()), f"    {pad(title, column)}  ")
    return lines


def _width() -> int:
    return max(50, min(100, shutil.get_terminal_size((100, 24)).columns))


def _wrapped(text: str) -> list[str]:
    return wrap(text, _width(), "    ")


def _out(as_json: bool, data: dict[str, Any], lines: list[str]) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"schema_version": 1, **data}, ensure_ascii=False, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(lines) + "\n")
