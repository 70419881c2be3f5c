"""A config file as text with places: read as DeepSpeed reads it, edited without losing what people wrote.

DeepSpeed reads a config *file* with the ``hjson`` package and refuses an object that has the same key
twice (``deepspeed/runtime/config.py`` ``DeepSpeedConfig.__init__`` and ``config_utils.py``
``dict_raise_error_on_duplicate_keys``, the same from 0.9.5 to 0.19.8). Comments, trailing commas,
unquoted keys and ``2e8`` for an integer are therefore legal, and ``1.0`` is read as the integer 1.
Hugging Face reads the same file with Python's ``json``: ``strict_json=True``.

``Document.data`` is what those readers return. The scanner in this module only finds places and
makes edits; when its values differ from the reader's, it gives no place at all.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dstui.config.pointer import join_pointer, lookup, split_pointer
from dstui.errors import DstuiError
from dstui.i18n import _

MAX_SIZE = 1_000_000
"""Bytes; a larger file is no DeepSpeed config (the largest public one seen has 20 kB)."""
_MAX_DEPTH = 150
"""Deepest nesting that the scanner gives places for. hjson itself gives up near 300 (Python's stack)."""
_FAST_BRACKETS = 200
"""Below so many brackets the C reader of ``json`` cannot nest deeper than hjson would."""


class ConfigUnreadable(DstuiError):
    """The engine that reads this file stops before it looks at a single key.

    ``line`` and ``column`` count from 1, in characters; both None when no place is known.
    ``kind``: ``syntax``, ``duplicate``, ``not-an-object``, ``encoding``, ``bom``, ``not-a-file``,
    ``missing``, ``too-large``, ``too-deep``. ``pointer`` names the second of two equal keys.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        kind: str = "syntax",
        path: str = "-",
        line: int | None = None,
        column: int | None = None,
        pointer: str = "",
    ) -> None:
        where = path if line is None else f"{path}:{line}" if column is None else f"{path}:{line}:{column}"
        super().__init__(f"{where}: {message}", hint or _next_step(kind))
        self.reason = message
        self.kind = kind
        self.path = path
        self.line = line
        self.column = column
        self.pointer = pointer


def _next_step(kind: str) -> str:
    if kind == "not-an-object":
        return _("put the keys between { and }")
    if kind == "duplicate":
        return _("remove one of the two")
    if kind == "missing":
        return _("check the path: it is read from the current directory")
    return _("correct the place and check again")


class _Duplicate(ValueError):
    pass


class _NoPlace(Exception):
    """The scanner does not understand the text."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class _Node(NamedTuple):
    kind: str
    """``object``, ``array`` or ``scalar``."""
    start: int
    end: int
    value: Any
    """Decoded value of a scalar, else None."""
    members: tuple[_Member, ...] = ()
    braces: bool = True
    bare: bool = False
    """A string without quotes: it runs to the end of its line, so no comma may follow it."""


class _Member(NamedTuple):
    key: str
    """Index as text for array items."""
    start: int
    node: _Node
    comma: int | None
    """Position of the comma after the value."""


# -- reading ------------------------------------------------------------------------------------


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        raise _Duplicate(next(k for k, _v in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return out


def _hjson_float(text: str) -> float | int:
    """hjson's number: an integral value below 1e10 becomes an int; 1e999 is an OverflowError there too."""
    value = float(text)
    return int(value) if int(value) == value and abs(value) < 1e10 else value


def _no_constant(text: str) -> Any:
    raise ValueError(text)  # NaN is a word to hjson: let it decide


def _load_as_deepspeed(text: str) -> Any:
    if text.count("{") + text.count("[") < _FAST_BRACKETS:
        try:  # valid JSON means the same to hjson (tests/unit/test_config_document.py proves it)
            return json.loads(
                text,
                object_pairs_hook=_refuse_duplicates,
                parse_float=_hjson_float,
                parse_constant=_no_constant,
            )
        except _Duplicate:
            raise
        except (ValueError, OverflowError, RecursionError):
            pass
    import hjson

    # a file opened in text mode has only \n at the ends of its lines
    return hjson.loads(text.replace("\r\n", "\n").replace("\r", "\n"), object_pairs_hook=_refuse_duplicates)


def read_bytes(path: str, max_size: int = MAX_SIZE) -> bytes:
    """The bytes of a regular file (``-`` = standard input), at most ``max_size``.

    Raises ConfigUnreadable for a missing file, a directory, a FIFO, a device or a larger file;
    never blocks on a FIFO.
    """
    if path == "-":
        raw = sys.stdin.buffer.read(max_size + 1)
        if len(raw) > max_size:
            raise _too_large(path, max_size)
        return raw
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except OSError as e:
        kind = "missing" if isinstance(e, FileNotFoundError) else "not-a-file"
        raise ConfigUnreadable(
            _("cannot be opened: {reason}").format(reason=e.strerror or e), kind=kind, path=path
        ) from e
    try:
        mode = os.fstat(fd)
        if stat.S_ISDIR(mode.st_mode):
            raise ConfigUnreadable(
                _("is a directory"), _("give the config file in it"), kind="not-a-file", path=path
            )
        if not stat.S_ISREG(mode.st_mode):
            raise ConfigUnreadable(_("is not a regular file"), kind="not-a-file", path=path)
        if mode.st_size > max_size:
            raise _too_large(path, max_size)
        with os.fdopen(os.dup(fd), "rb") as f:
            raw = f.read(max_size + 1)
    except OSError as e:
        raise ConfigUnreadable(
            _("cannot be read: {reason}").format(reason=e.strerror or e), kind="not-a-file", path=path
        ) from e
    finally:
        os.close(fd)
    if len(raw) > max_size:
        raise _too_large(path, max_size)
    return raw


def _too_large(path: str, max_size: int) -> ConfigUnreadable:
    return ConfigUnreadable(
        _("is larger than {size} bytes").format(size=max_size),
        _("a DeepSpeed config has a few kilobytes; is this the right file?"),
        kind="too-large",
        path=path,
    )


def read(path: str, max_size: int = MAX_SIZE, strict_json: bool = False) -> Document:
    """Read and parse ``path`` (``-`` = standard input). Raises ConfigUnreadable."""
    return Document.parse(read_bytes(path, max_size), path, strict_json)


class Document:
    """A parsed config: ``text`` as written, ``data`` as the engine reads it, ``path`` for messages."""

    __slots__ = ("_lines", "_scanned", "_tree", "data", "path", "strict_json", "text")

    def __init__(self, text: str, data: dict[str, Any], path: str = "-", strict_json: bool = False) -> None:
        self.text = text
        self.data = data
        self.path = path
        self.strict_json = strict_json
        self._scanned = False
        self._tree: _Node | None = None
        self._lines: list[int] | None = None

    @classmethod
    def parse(cls, text: str | bytes, path: str = "-", strict_json: bool = False) -> Document:
        """Parse as DeepSpeed reads a file, or as Hugging Face does with ``strict_json``.

        Raises ConfigUnreadable with the place where it is known.
        """
        if isinstance(text, bytes):
            raw = text
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as e:
                before = raw[: e.start].decode("utf-8", "replace")
                line, column = _line_column(before, len(before))
                raise ConfigUnreadable(
                    _("is not valid UTF-8 (byte 0x{byte:02x})").format(byte=raw[e.start]),
                    _("save it as UTF-8"),
                    kind="encoding",
                    path=path,
                    line=line,
                    column=column,
                ) from e
        try:
            data = json.loads(text) if strict_json else _load_as_deepspeed(text)
        except _Duplicate as e:
            raise _duplicate_error(text, str(e), path) from e
        except RecursionError as e:
            raise ConfigUnreadable(_("is nested too deeply to be read"), kind="too-deep", path=path) from e
        except json.JSONDecodeError as e:
            if strict_json and text.startswith("\ufeff"):
                raise ConfigUnreadable(
                    _("starts with a byte order mark, which Python's json refuses"),
                    _("save it as UTF-8 without BOM"),
                    kind="bom",
                    path=path,
                    line=1,
                    column=1,
                ) from e
            raise ConfigUnreadable(
                _("invalid JSON: {reason}").format(reason=e.msg),
                _("this engine reads strict JSON: no comments, no trailing commas"),
                path=path,
                line=e.lineno,
                column=e.colno,
            ) from e
        except (ValueError, IndexError, OverflowError) as e:  # hjson: also an IndexError at an open /*
            reason = getattr(e, "msg", None)
            lineno, colno = getattr(e, "lineno", None), getattr(e, "colno", None)
            if reason is None:
                reason = _("a comment or a string does not end") if isinstance(e, IndexError) else str(e)
            raise ConfigUnreadable(
                _("invalid syntax: {reason}").format(reason=reason), path=path, line=lineno, column=colno
            ) from e
        if not isinstance(data, dict):
            raise ConfigUnreadable(
                _("is not an object: a config is {{ ... }}, found: {kind}").format(kind=_type_name(data)),
                kind="not-an-object",
                path=path,
                line=1,
                column=1,
            )
        return cls(text, data, path, strict_json)

    # -- places ---------------------------------------------------------------------------------

    def _node(self) -> _Node | None:
        if not self._scanned:
            self._scanned = True
            try:
                tree = _Scanner(self.text).root()
                # HF's json keeps the last of two equal keys; then no place can be trusted
                self._tree = tree if _same(_values(tree, self.strict_json), self.data) else None
            except (_NoPlace, RecursionError, ValueError, OverflowError):
                self._tree = None
        return self._tree

    def _member(self, pointer: str) -> tuple[_Node, _Member | None] | None:
        node, member = self._node(), None
        if node is None:
            return None
        for token in split_pointer(pointer):
            member = next((m for m in node.members if m.key == token), None)
            if member is None:
                return None
            node = member.node
        return node, member

    def place(self, pointer: str, value: bool = False) -> tuple[int, int] | None:
        """(line, column) from 1 of the key (``value=True``: of its value) at ``pointer``.

        None when the pointer is not in the file or the scanner cannot vouch for the place.
        """
        found = self._member(pointer)
        if found is None:
            return None
        node, member = found
        return self._at(node.start if value or member is None else member.start)

    def _at(self, offset: int) -> tuple[int, int]:
        if self._lines is None:
            self._lines = [0, *(m.end() for m in re.finditer(r"\r\n|\r|\n", self.text))]
        row = bisect_right(self._lines, offset)
        return row, offset - self._lines[row - 1] + 1

    # -- edits ----------------------------------------------------------------------------------

    def edited(self, edits: Iterable[Mapping[str, Any]]) -> Document:
        """A new document with RFC 6902 ``add``/``replace``/``remove``/``test`` applied to the *text*.

        Comments, order, indentation, trailing commas and unknown keys stay. Raises DstuiError when
        an edit does not apply or when the text cannot be edited so that it reads as intended.
        """
        doc = self
        for edit in edits:
            doc = doc._edited_once(edit)
        return doc

    def _edited_once(self, edit: Mapping[str, Any]) -> Document:
        op, pointer = str(edit.get("op")), str(edit.get("path"))
        wanted = apply_edit(self.data, edit)
        if op == "test":
            return self
        tree = self._node()
        if tree is None:
            raise DstuiError(
                _("{path}: the text cannot be edited in place").format(path=self.path),
                _("save it as plain JSON first"),
            )
        text = _edit_text(self.text, tree, op, split_pointer(pointer), edit.get("value"))
        try:
            new = Document.parse(text, self.path, self.strict_json)
        except ConfigUnreadable:
            new = None
        if new is None or not _same(new.data, wanted):
            raise DstuiError(
                _("{path}: cannot edit {pointer} without changing something else").format(
                    path=self.path, pointer=pointer
                ),
                _("edit the file by hand"),
            )
        return new


def _line_column(text: str, offset: int) -> tuple[int, int]:
    before = text[:offset].replace("\r\n", "\n").replace("\r", "\n")
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    return {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
    }.get(type(value), type(value).__name__)


def _duplicate_error(text: str, key: str, path: str) -> ConfigUnreadable:
    line = column = None
    pointer = ""
    try:
        found = _first_duplicate(_Scanner(text).root(), "")
        if found:
            pointer, start = found
            key = split_pointer(pointer)[-1]
            line, column = _line_column(text, start)
    except (_NoPlace, RecursionError, ValueError, OverflowError):
        pass
    return ConfigUnreadable(
        _("the key '{key}' is there twice").format(key=key),
        _("remove one of the two"),
        kind="duplicate",
        path=path,
        line=line,
        column=column,
        pointer=pointer,
    )


def _first_duplicate(node: _Node, base: str) -> tuple[str, int] | None:
    """The first object to be complete that has a key twice, as the reader meets them."""
    for m in node.members:
        inner = _first_duplicate(m.node, base + join_pointer(m.key))
        if inner:
            return inner
    seen: set[str] = set()
    for m in node.members if node.kind == "object" else ():
        if m.key in seen:
            return base + join_pointer(m.key), m.start
        seen.add(m.key)
    return None


def _values(node: _Node, strict_json: bool) -> Any:
    if node.kind == "object":
        return {m.key: _values(m.node, strict_json) for m in node.members}
    if node.kind == "array":
        return [_values(m.node, strict_json) for m in node.members]
    return node.value


def _same(a: Any, b: Any) -> bool:
    """Equal values; True is not 1. (1 and 1.0 are: hjson reads both as 1.)"""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and (a == b or (a != a and b != b))


# -- the scanner --------------------------------------------------------------------------------

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/)*", re.S)
_QUOTED = {
    '"': re.compile(r'"((?:[^"\\\x00-\x1f]|\\.)*)"', re.S),
    "'": re.compile(r"'((?:[^'\\\x00-\x1f]|\\.)*)'", re.S),
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.S)
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_BARE_KEY = re.compile(r"([^ \t\r\n:{}\[\],]+)[ \t\r\n]*(?=:)")
_STOP = re.compile(r"[\r\n,}\]#]|/[/*]|\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?[\t ]*")
_WORDS: dict[str, Any] = {"null": None, "true": True, "false": False}


class _Scanner:
    """Hjson with positions. Understands what real configs use; raises _NoPlace for the rest."""

    def __init__(self, text: str) -> None:
        self.s = text
        self.depth = 0

    def blank(self, at: int) -> int:
        m = _BLANK.match(self.s, at)
        return m.end() if m else at

    def root(self) -> _Node:
        at = self.blank(1 if self.s.startswith("\ufeff") else 0)
        if at < len(self.s) and self.s[at] in "{[":
            node, end = self.value(at)
        else:
            node, end = self.container(at, "object", braces=False)
        if self.blank(end) != len(self.s):
            raise _NoPlace(end)
        return node

    def value(self, at: int) -> tuple[_Node, int]:
        c = self.s[at : at + 1]
        if c == "{":
            return self.container(at, "object")
        if c == "[":
            return self.container(at, "array")
        if self.s.startswith("'''", at):
            return self.multiline(at)
        if c and c in "\"'":
            value, end = self.quoted(at)
            return _Node("scalar", at, end, value), end
        return self.bare(at)

    def container(self, at: int, kind: str, braces: bool = True) -> tuple[_Node, int]:
        s, start = self.s, at
        close = "}" if kind == "object" else "]"
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _NoPlace(at)
        at = self.blank(at + 1 if braces else at)
        members: list[_Member] = []
        while s[at : at + 1] != (close if braces else ""):
            key_at = at
            if kind == "object":
                key, at = self.key(at)
                at = self.blank(at)
                if s[at : at + 1] != ":":
                    raise _NoPlace(at)
                at = self.blank(at + 1)
            else:
                key = str(len(members))
            node, at = self.value(at)
            at = self.blank(at)
            comma = None
            if s[at : at + 1] == ",":
                comma, at = at, self.blank(at + 1)
            members.append(_Member(key, key_at, node, comma))
            if at >= len(s) and braces:
                raise _NoPlace(at)
        self.depth -= 1
        end = at + 1 if braces else at
        return _Node(kind, start, end, None, tuple(members), braces), end

    def key(self, at: int) -> tuple[str, int]:
        if self.s[at : at + 1] in ('"', "'"):
            return self.quoted(at)
        m = _BARE_KEY.match(self.s, at)
        if not m:
            raise _NoPlace(at)
        return m.group(1), m.end()

    def quoted(self, at: int) -> tuple[str, int]:
        m = _QUOTED[self.s[at]].match(self.s, at)
        if not m:
            raise _NoPlace(at)
        body = m.group(1)
        if "\\" in body:
            body = _ESCAPE.sub(self._unescape, body)
            if any("\ud800" <= c <= "\udfff" for c in body):
                body = body.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return body, m.end()

    @staticmethod
    def _unescape(m: re.Match[str]) -> str:
        if m.group(1):
            return chr(int(m.group(1), 16))
        if m.group(2) not in _ESCAPES:
            raise _NoPlace(0)
        return _ESCAPES[m.group(2)]

    def multiline(self, at: int) -> tuple[_Node, int]:
        """``'''text'''``: as many leading blanks are cut from each line as the opening quotes are indented."""
        s = self.s
        indent = at - (s.rfind("\n", 0, at) + 1)
        close = s.find("'''", at + 3)
        if close < 0 or (indent == at and indent > 0):  # first line of the file: hjson wraps around
            raise _NoPlace(at)
        while s[close + 3 : close + 4] == "'":  # hjson ends at the first three quotes in a row
            raise _NoPlace(at)
        body = s[at + 3 : close].replace("\r\n", "\n")
        body = re.sub(r"\A[ \t]*\n?", "", body) if re.match(r"[ \t]*\n", body) else body.lstrip(" \t")
        lines = body.split("\n")
        first_is_cut = "\n" in s[at + 3 : close] and not s[at + 3 : close].split("\n", 1)[0].strip()
        cut = [line if i == 0 and not first_is_cut else _cut(line, indent) for i, line in enumerate(lines)]
        value = "\n".join(cut)
        value = value[:-1] if value.endswith("\n") else value
        return _Node("scalar", at, close + 3, value), close + 3

    def bare(self, at: int) -> tuple[_Node, int]:
        s = self.s
        if s[at : at + 1] in ("", *"{}[],:"):
            raise _NoPlace(at)
        stop = at
        while True:
            m = _STOP.search(s, stop)
            stop = m.start() if m else len(s)
            word = s[at:stop].strip()
            if word in _WORDS:
                return _Node("scalar", at, at + len(word), _WORDS[word]), stop
            number = _NUMBER.match(s, at)
            if number and number.end() == stop:
                text = number.group().strip()
                value = _hjson_float(text) if number.group(1) or number.group(2) else int(text)
                return _Node("scalar", at, at + len(text), value), stop
            if stop >= len(s) or s[stop] in "\r\n":
                return _Node("scalar", at, at + len(word), word, bare=True), stop
            stop += 1


def _cut(line: str, n: int) -> str:
    blanks = len(line) - len(line.lstrip(" \t\r"))
    return line[min(n, blanks) :]


# -- editing ------------------------------------------------------------------------------------


def apply_edit(data: Any, edit: Mapping[str, Any]) -> Any:
    """RFC 6902 ``add``/``replace``/``remove``/``test`` on plain data; returns a changed copy.

    Raises DstuiError when it does not apply.
    """
    op, pointer = edit.get("op"), edit.get("path")
    if op not in ("add", "replace", "remove", "test") or not isinstance(pointer, str):
        raise DstuiError(_("unknown edit: {edit}").format(edit=dict(edit)))
    tokens = split_pointer(pointer)
    missing = DstuiError(_("cannot {op} {pointer}: it is not there").format(op=op, pointer=pointer or "/"))
    if op == "test":
        marker = object()
        if not _same(lookup(data, pointer, marker), edit.get("value")):
            raise DstuiError(
                _("{pointer} is not {value}").format(
                    pointer=pointer, value=json.dumps(edit.get("value"), ensure_ascii=False)
                )
            )
        return data
    if not tokens:
        if op == "remove":
            raise missing
        return edit.get("value")
    root = data.copy() if isinstance(data, (dict, list)) else data
    parent = root
    for i, token in enumerate(tokens[:-1]):
        key: Any = token
        if isinstance(parent, list):
            if not token.isdigit() or int(token) >= len(parent):
                raise missing
            key = int(token)
        elif not isinstance(parent, dict) or token not in parent:
            raise DstuiError(
                _("cannot {op} {pointer}: {parent} is not there").format(
                    op=op, pointer=pointer, parent=join_pointer(*tokens[: i + 1])
                )
            )
        child = parent[key]
        parent[key] = child.copy() if isinstance(child, (dict, list)) else child
        parent = parent[key]
    last = tokens[-1]
    if isinstance(parent, dict):
        if op == "remove":
            if last not in parent:
                raise missing
            del parent[last]
        else:
            if op == "replace" and last not in parent:
                raise missing
            parent[last] = edit.get("value")
    elif isinstance(parent, list):
        index = len(parent) if last == "-" and op == "add" else int(last) if last.isdigit() else -1
        if not 0 <= index < len(parent) + (op == "add"):
            raise missing
        if op == "add":
            parent.insert(index, edit.get("value"))
        elif op == "replace":
            parent[index] = edit.get("value")
        else:
            del parent[index]
    else:
        raise missing
    return root


def dump(value: Any, indent: str = "", unit: str = "    ", width: int = 60) -> str:
    """``value`` as JSON text, objects broken over lines, short arrays of scalars on one line.

    ``indent``: blanks before the line that the text starts on. Raises DstuiError for NaN, infinity
    and what JSON cannot hold.
    """
    if isinstance(value, dict) and value:
        inner = indent + unit
        rows = (
            f"{inner}{json.dumps(k, ensure_ascii=False)}: {dump(v, inner, unit)}" for k, v in value.items()
        )
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        if not any(isinstance(v, (dict, list)) for v in value):
            line = "[" + ", ".join(dump(v) for v in value) + "]"
            if len(line) <= width:
                return line
        inner = indent + unit
        return "[\n" + ",\n".join(inner + dump(v, inner, unit) for v in value) + f"\n{indent}]"
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise DstuiError(_("{value!r} cannot be written as JSON").format(value=value)) from e


def _line_start(text: str, at: int) -> int:
    return max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1


def _indent_at(text: str, at: int) -> str | None:
    """The blanks before ``at`` when nothing else is on its line before it."""
    before = text[_line_start(text, at) : at]
    return before if not before.strip(" \t") else None


def _own_indent(text: str, at: int) -> str:
    line = text[_line_start(text, at) : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str, tree: _Node) -> str:
    """One level of indentation as this file has it."""
    stack = [tree]
    while stack:
        node = stack.pop()
        for m in node.members:
            inner = _indent_at(text, m.start)
            outer = _own_indent(text, node.start)
            if node.braces and inner and inner.startswith(outer) and len(inner) > len(outer):
                return inner[len(outer) :]
            stack.append(m.node)
    return "    "


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


_TAIL = re.compile(r"(?:[ \t]+|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/)*", re.S)
"""Blanks and comments that start on the same line."""


def _edit_text(text: str, tree: _Node, op: str, tokens: list[str], value: Any) -> str:
    unit = _unit(text, tree)
    if not tokens:
        out = dump(value, "", unit) + "\n"
        return out.replace("\n", _newline(text))
    node = tree
    for token in tokens[:-1]:
        node = next(m.node for m in node.members if m.key == token)
    last = tokens[-1]
    if node.kind == "array" and last == "-":
        last = str(len(node.members))
    index = next((i for i, m in enumerate(node.members) if m.key == last), None)
    if op == "remove":
        return _remove(text, node, index if index is not None else -1)
    if index is not None and (op == "replace" or node.kind == "object"):
        member = node.members[index]
        new = dump(value, _own_indent(text, member.start), unit).replace("\n", _newline(text))
        return text[: member.node.start] + new + text[member.node.end :]
    return _insert(text, node, len(node.members) if index is None else index, last, value, unit)


def _insert(text: str, node: _Node, index: int, key: str, value: Any, unit: str) -> str:
    nl = _newline(text)
    head = json.dumps(key, ensure_ascii=False) + ": " if node.kind == "object" else ""
    if not node.members:
        outer = _own_indent(text, node.start)
        if not node.braces:
            sep = "" if not text or text.endswith(("\n", "\r")) else nl
            return text + sep + head + dump(value, "", unit).replace("\n", nl) + nl
        inner = outer + unit
        new = inner + head + dump(value, inner, unit).replace("\n", nl)
        inside = text[node.start + 1 : node.end - 1]
        if inside.strip():  # only comments in it
            keep = inside.rstrip(" \t").rstrip("\r\n")
            return text[: node.start + 1] + keep + nl + new + nl + outer + text[node.end - 1 :]
        return text[: node.start + 1] + nl + new + nl + outer + text[node.end - 1 :]
    if index < len(node.members):  # before an array item
        before = node.members[index]
        blanks = _indent_at(text, before.start)
        gap = ", " if blanks is None else "," + nl + blanks
        return (
            text[: before.start]
            + dump(value, blanks or "", unit).replace("\n", nl)
            + gap
            + text[before.start :]
        )
    last = node.members[-1]
    end = last.node.end
    inner_or_none = _indent_at(text, last.start)
    if inner_or_none is None and not last.node.bare and node.braces:  # everything on one line
        flat = head + json.dumps(value, ensure_ascii=False, allow_nan=False)
        if last.comma is not None:
            at = last.comma + 1
            return text[:at] + " " + flat + "," + text[at:]
        return text[:end] + ", " + flat + text[end:]
    inner = inner_or_none if inner_or_none is not None else _own_indent(text, last.start)
    new = nl + inner + head + dump(value, inner, unit).replace("\n", nl)
    if last.comma is not None:
        at = _TAIL.match(text, last.comma + 1).end()  # type: ignore[union-attr]
        at = at if text[at : at + 1] in ("", "\r", "\n") else last.comma + 1
        return text[:at] + new + "," + text[at:]
    if last.node.bare:  # a comma would become part of the string
        return text[:end] + new + text[end:]
    at = _TAIL.match(text, end).end()  # type: ignore[union-attr]
    at = at if text[at : at + 1] in ("", "\r", "\n") else end
    return text[:end] + "," + text[end:at] + new + text[at:]


def _remove(text: str, node: _Node, index: int) -> str:
    member = node.members[index]
    start = member.start
    end = member.node.end if member.comma is None else member.comma + 1
    was_last = index == len(node.members) - 1
    previous = node.members[index - 1] if index else None
    cut_comma = was_last and member.comma is None and previous is not None and previous.comma is not None
    blanks = _indent_at(text, start)
    tail = _TAIL.match(text, end).end()  # type: ignore[union-attr]
    if blanks is not None and text[tail : tail + 1] in ("", "\r", "\n"):  # it has its lines to itself
        start -= len(blanks)
        end = tail
        if text.startswith("\r\n", end):
            end += 2
        elif end < len(text):
            end += 1
        elif start > 0:  # no newline at the end of the file: take the one before
            start -= 2 if text.startswith("\r\n", start - 2) else 1
    elif not was_last:
        end += len(text[end:]) - len(text[end:].lstrip(" \t"))
    elif cut_comma and previous is not None and previous.comma is not None:
        return text[: previous.comma] + text[end:]
    if cut_comma and previous is not None and previous.comma is not None:
        return text[: previous.comma] + text[previous.comma + 1 : start] + text[end:]
    return text[:start] + text[end:]
