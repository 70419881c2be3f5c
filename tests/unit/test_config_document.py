"""Reading as DeepSpeed reads, places, and edits of the text."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dstui.config.document import (
    ConfigUnreadable,
    Document,
    apply_edit,
    read,
)
from dstui.config.pointer import join_pointer, lookup, split_pointer
from dstui.errors import DstuiError


def pointers_of(value: Any, base: str = "") -> list[str]:
    """Every pointer in ``value``, parents first, in the order of the file."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [base, *(p for k, v in inner for p in pointers_of(v, base + join_pointer(k)))]


HUMAN = """\
{
  // a comment
  "train_batch_size": 8, # why
  zero_optimization: {
    stage: 2
    "overlap_comm": true, /* x */
    reduce_bucket_size: 5e8
  }
  note: free text, with a comma
  fp16: {"enabled": false, "loss_scale": 0.0}
  list: [1, 2,
    3,
  ]
}
"""


def deepspeed_reads(text: str) -> Any:
    """``hjson.load`` of a file opened in text mode, with DeepSpeed's hook."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("duplicate")
        return out

    return hjson.loads(text.replace("\r\n", "\n").replace("\r", "\n"), object_pairs_hook=hook)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_reads_hjson_as_deepspeed_does() -> None:
    doc = Document.parse(HUMAN, "x.json")
    assert doc.data == {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500000000},
        "note": "free text, with a comma",
        "fp16": {"enabled": False, "loss_scale": 0},
        "list": [1, 2, 3],
    }
    assert type(doc.data["zero_optimization"]["reduce_bucket_size"]) is int
    assert doc.path == "x.json" and doc.text == HUMAN


@pytest.mark.parametrize(
    ("pointer", "place", "value_place"),
    [
        ("", (1, 1), (1, 1)),
        ("/train_batch_size", (3, 3), (3, 23)),
        ("/zero_optimization/stage", (5, 5), (5, 12)),
        ("/zero_optimization/overlap_comm", (6, 5), (6, 21)),
        ("/fp16/enabled", (10, 10), (10, 21)),
        ("/list/2", (12, 5), (12, 5)),
        ("/nowhere", None, None),
        ("/zero_optimization/stage/deeper", None, None),
    ],
)
def test_places(pointer: str, place: tuple[int, int] | None, value_place: tuple[int, int] | None) -> None:
    doc = Document.parse(HUMAN)
    assert doc.place(pointer) == place
    assert doc.place(pointer, value=True) == value_place


def test_places_count_crlf_and_wide_characters_as_editors_do() -> None:
    doc = Document.parse('{\r\n  "é": 1,\r\n  "b": 2\r\n}\r\n')
    assert doc.place("/b") == (3, 3)
    assert doc.place("/é", value=True) == (2, 8)


def test_strict_json_reads_as_python_does() -> None:
    doc = Document.parse('{"a": 1.0, "a": 2.0, "b": NaN}', strict_json=True)
    assert doc.data["a"] == 2.0 and type(doc.data["a"]) is float and doc.data["b"] != doc.data["b"]
    assert Document.parse('{"a": 1.0, "a": 2.0}', strict_json=True).place("/a") is not None
    with pytest.raises(ConfigUnreadable) as e:
        Document.parse('{"a": 1, // no\n}', "f", strict_json=True)
    assert (e.value.line, e.value.kind) == (1, "syntax")


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ("{", "syntax", 1),
        ('{\n "a": ]\n}', "syntax", 2),
        ("/* never ends", "syntax", None),
        ('{"a": 1e999}', "syntax", None),
        ("[1]", "not-an-object", 1),
        ("true", "not-an-object", 1),
        ('{"a": 1,\n "a": 2}', "duplicate", 2),
        ('{"x": {"b": 1,\n\n "b": 1}}', "duplicate", 3),
        (b'{\n "a": "\xff"}', "encoding", 2),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "too-deep", None),
        ("[" * 10_000, "too-deep", None),
        ("{a:\n" * 10_000, "too-deep", None),
    ],
)
def test_unreadable(text: str | bytes, kind: str, line: int | None) -> None:
    with pytest.raises(ConfigUnreadable) as e:
        Document.parse(text, "f.json")
    assert (e.value.kind, e.value.line) == (kind, line)
    assert e.value.message.startswith("f.json:") and e.value.code == 2
    if kind == "duplicate":
        assert e.value.pointer in ("/a", "/x/b")


def test_blank_and_comment_only_files_are_empty_objects() -> None:
    assert Document.parse("").data == {} and Document.parse("# nothing\n").data == {}


def test_byte_order_mark() -> None:
    assert Document.parse(b'\xef\xbb\xbf{"a": 1}').data == {"a": 1}
    assert Document.parse('\ufeff{\n"a": 1}').place("/a") == (2, 1)
    with pytest.raises(ConfigUnreadable) as e:
        Document.parse("\ufeff{}", strict_json=True)
    assert e.value.kind == "bom"


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: None, "missing"),
        (lambda p: p.mkdir(), "not-a-file"),
        (_fifo, "not-a-file"),
        (lambda p: p.write_text(" " * 200), "too-large"),
        (lambda p: p.symlink_to(p), "not-a-file"),
        (lambda p: p.symlink_to("/dev/zero"), "not-a-file"),
    ],
)
def test_what_is_no_file(tmp_path: Path, make: Callable[[Path], object], kind: str) -> None:
    path = tmp_path / "c.json"
    make(path)
    with pytest.raises(ConfigUnreadable) as e:
        read(str(path), max_size=100)
    assert e.value.kind == kind and str(path) in e.value.message


# -- fuzz: our places, our fast path and our edits against hjson -----------------------------------

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=8),
    st.sampled_from(
        ["auto", "true", "1", "-", "null", "a#b", "x // y", "'''", "5e8", "it's", 'q"q', "a\nb", ""]
    ),
)
_KEYS = st.one_of(st.sampled_from(["a", "stage", "b c", "x:y", "", "é", "/", "~", "0"]), st.text(max_size=4))
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=12,
)
_OBJECTS = st.dictionaries(_KEYS, _VALUES, max_size=5)


def spell(value: Any, pick: random.Random, depth: int = 0, braces: bool = True) -> str:
    """``value`` as some Hjson that a person could have written."""

    def gap() -> str:
        return pick.choice(["", " ", "\n", "\t", " # note\n", " // note, {\n", "/* a\nb */", "\r\n"])

    def line_gap() -> str:
        return pick.choice(["\n", " # c: {\n", "\n// c\n", "\r\n", "\n/* c */ "])

    if isinstance(value, dict):
        rows = []
        for i, (k, v) in enumerate(value.items()):
            bare_key = k and not set(k) & set(" \t\r\n:{}[],'\"#/\\") and k.isprintable() and k.strip() == k
            key = k if bare_key and pick.random() < 0.4 else json.dumps(k, ensure_ascii=pick.random() < 0.5)
            text = spell(v, pick, depth + 1)
            if text.startswith("\0"):  # a bare string: it needs its own end of line
                end = pick.choice(["\n", "\r\n"])
                text = text[1:]
            else:
                last = i == len(value) - 1
                end = pick.choice([line_gap(), "," + gap(), "," + gap(), gap() + "," + gap()])
                if last and braces:
                    end = pick.choice([gap(), "," + gap()])
            rows.append(f"{gap()}{key}{pick.choice(['', ' '])}:{pick.choice(['', ' '])}{text}{end}")
        body = "".join(rows)
        return "{" + body + gap() + "}" if braces else body
    if isinstance(value, list):
        rows = []
        for i, v in enumerate(value):
            text = spell(v, pick, depth + 1)
            if text.startswith("\0"):
                text = json.dumps(v)
            end = pick.choice(["," + gap(), line_gap()]) if i < len(value) - 1 else pick.choice([gap(), ","])
            rows.append(gap() + text + end)
        return "[" + "".join(rows) + gap() + "]"
    if isinstance(value, str):
        plain = value.strip() == value and value and value.isprintable() and value[0] not in "{}[]:,'\"#/"
        if plain and pick.random() < 0.3:
            return "\0" + value
        if "'" not in value and "\r" not in value and "\n" not in value and pick.random() < 0.15:
            return "'''" + value + "'''" if value and value.strip() == value else json.dumps(value)
        return json.dumps(value, ensure_ascii=pick.random() < 0.5)
    return json.dumps(value)


@settings(max_examples=200, deadline=None)
@given(_OBJECTS, st.randoms(use_true_random=False), st.booleans())
def test_places_are_right_or_absent(value: dict[str, Any], pick: random.Random, braces: bool) -> None:
    text = spell(value, pick, braces=braces or not value)
    try:
        expected = deepspeed_reads(text)
    except (ValueError, IndexError, OverflowError):
        with pytest.raises(ConfigUnreadable):
            Document.parse(text)
        return
    if not isinstance(expected, dict):
        return
    doc = Document.parse(text)
    assert same(doc.data, expected)
    for pointer in pointers_of(doc.data):
        place = doc.place(pointer)
        if place is None:
            continue
        tokens = split_pointer(pointer)
        line, column = doc.place(pointer, value=True) or (0, 0)
        rest = "\n".join(text.replace("\r\n", "\n").replace("\r", "\n").split("\n")[line - 1 :])[column - 1 :]
        found = lookup(doc.data, pointer)
        opening = {dict: "{", list: "[", bool: str(found).lower(), type(None): "null"}.get(type(found))
        if opening and tokens:
            assert rest.startswith(opening), (pointer, rest[:20])


def test_places_of_what_people_write_are_found() -> None:
    """The fuzz allows 'no place'; common spellings must have one."""
    pick = random.Random(7)
    found = total = 0
    for _ in range(300):
        value = {
            "train_batch_size": pick.randrange(100),
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1e9},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
            "note": "text",
        }
        doc = Document.parse(spell(value, pick, braces=pick.random() < 0.8))
        total += 1
        found += doc.place("/zero_optimization/offload_optimizer/device") is not None
    assert found / total > 0.97


@settings(max_examples=600, deadline=None)
@given(st.text(alphabet="{}[]:,\"'#/*\n\r ab10.-e\\utrnlf\ufeff", max_size=30))
@example("''''''")
@example("{a: '''x''''}")
@example("{a:'''\n  x\n  y'''}")
@example('{"a":1e5}')
@example("{a: 1 2}")
@example("\ufeff")
@example("a: -0.0")
def test_any_text_reads_as_hjson_or_is_refused(text: str) -> None:
    try:
        expected = deepspeed_reads(text)
    except RecursionError:
        raise
    except Exception:
        with pytest.raises(ConfigUnreadable):
            Document.parse(text)
        return
    if not isinstance(expected, dict):
        with pytest.raises(ConfigUnreadable):
            Document.parse(text)
        return
    doc = Document.parse(text)
    assert same(doc.data, expected)
    for pointer in pointers_of(doc.data):
        doc.place(pointer)


@settings(max_examples=150, deadline=None)
@given(_OBJECTS, _VALUES, _KEYS, st.randoms(use_true_random=False))
def test_an_edit_changes_exactly_what_it_says(
    value: dict[str, Any], new: Any, key: str, pick: random.Random
) -> None:
    text = spell(value, pick)
    try:
        doc = Document.parse(text)
    except ConfigUnreadable:
        return
    pointers = pointers_of(doc.data)
    pointer = pick.choice(pointers)
    holder = lookup(doc.data, pointer)
    if isinstance(holder, dict) and pick.random() < 0.5:
        edit = {"op": "add", "path": pointer + join_pointer(key), "value": new}
    elif pointer and pick.random() < 0.5:
        edit = {"op": "remove", "path": pointer}
    elif pointer:
        edit = {"op": "replace", "path": pointer, "value": new}
    else:
        return
    try:
        edited = doc.edited([edit])
    except DstuiError:
        return  # refused with a message: allowed, the file is untouched
    wanted = apply_edit(doc.data, edit)
    assert json.dumps(edited.data, default=repr) == json.dumps(deepspeed_reads(edited.text), default=repr)
    assert edited.data == wanted
    if edit["op"] == "add" and isinstance(holder, dict) and key not in holder:
        for comment in ("# note", "// note", "# c: {", "/* a"):
            assert edited.text.count(comment) >= text.count(comment)


def edited(text: str, *edits: dict[str, Any], strict: bool = False) -> str:
    return Document.parse(text, strict_json=strict).edited(edits).text


def test_edits_keep_comments_order_indentation_and_trailing_commas() -> None:
    out = edited(
        HUMAN,
        {"op": "test", "path": "/train_batch_size", "value": 8},
        {"op": "replace", "path": "/train_batch_size", "value": 16},
        {"op": "add", "path": "/zero_optimization/offload_optimizer", "value": {"device": "cpu"}},
        {"op": "remove", "path": "/fp16"},
        {"op": "add", "path": "/list/-", "value": 4},
    )
    assert (
        out
        == """\
{
  // a comment
  "train_batch_size": 16, # why
  zero_optimization: {
    stage: 2
    "overlap_comm": true, /* x */
    reduce_bucket_size: 5e8,
    "offload_optimizer": {
      "device": "cpu"
    }
  }
  note: free text, with a comma
  list: [1, 2,
    3,
    4,
  ]
}
"""
    )


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        ("{}", {"op": "add", "path": "/a", "value": 1}, '{\n    "a": 1\n}'),
        ('{"a": 1}', {"op": "add", "path": "/b", "value": [1, {"c": None}]}, '{"a": 1, "b": [1, {"c": null}]}'),
        ('{"a": 1, "b": 2}', {"op": "remove", "path": "/b"}, '{"a": 1}'),
        ('{"a": 1, "b": 2}', {"op": "remove", "path": "/a"}, '{"b": 2}'),
        ('{\n\t"a": 1\n}\n', {"op": "add", "path": "/b", "value": {"c": 1}}, '{\n\t"a": 1,\n\t"b": {\n\t\t"c": 1\n\t}\n}\n'),
        ('{\r\n  "a": 1\r\n}\r\n', {"op": "add", "path": "/b", "value": 2}, '{\r\n  "a": 1,\r\n  "b": 2\r\n}\r\n'),
        ('{\n  "a": 1,\n  "b": 2\n}\n', {"op": "remove", "path": "/b"}, '{\n  "a": 1\n}\n'),
        ('{\n  "a": 1, // keep\n  "b": 2 // gone\n}\n', {"op": "remove", "path": "/b"}, '{\n  "a": 1 // keep\n}\n'),
        ("a: one\nb: two\n", {"op": "add", "path": "/c", "value": "3"}, 'a: one\nb: two\n"c": "3"\n'),
        ("# only this\n", {"op": "add", "path": "/a", "value": 1}, '# only this\n"a": 1\n'),
        ('{"a": [1, 3]}', {"op": "add", "path": "/a/1", "value": 2}, '{"a": [1, 2, 3]}'),
        ('{"a": {"b": 1}}', {"op": "replace", "path": "/a", "value": True}, '{"a": true}'),
        ('{ # why\n}', {"op": "add", "path": "/a", "value": 1}, '{ # why\n    "a": 1\n}'),
    ],
)  # fmt: skip
def test_edits_in_every_style(before: str, edit: dict[str, Any], after: str) -> None:
    assert edited(before, edit) == after


def test_strict_json_stays_strict() -> None:
    text = json.dumps({"a": 1, "b": {"c": 2, "d": 3}}, indent=2)
    out = edited(
        text,
        {"op": "remove", "path": "/b/d"},
        {"op": "add", "path": "/b/e", "value": 1.5},
        {"op": "add", "path": "/f", "value": {}},
        strict=True,
    )
    assert json.loads(out) == {"a": 1, "b": {"c": 2, "e": 1.5}, "f": {}}


@pytest.mark.parametrize(
    "edit",
    [
        {"op": "remove", "path": "/nope"},
        {"op": "replace", "path": "/nope", "value": 1},
        {"op": "add", "path": "/nope/deeper", "value": 1},
        {"op": "test", "path": "/train_batch_size", "value": True},
        {"op": "move", "path": "/a", "from": "/b"},
        {"op": "add", "path": "/list/9", "value": 1},
        {"op": "add", "path": "/x", "value": float("nan")},
        {"op": "add", "path": "x", "value": 1},
    ],
)
def test_edits_that_do_not_apply_are_refused(edit: dict[str, Any]) -> None:
    doc = Document.parse(HUMAN)
    with pytest.raises(DstuiError):
        doc.edited([edit])
    assert doc.text == HUMAN
