"""``Form``: the fields of one step in one widget, drawn from ``FieldView``s by the line API.

One widget for a whole step instead of one a field: a pane is built when it is first visited and costs no mount
(200 ``Select`` widgets take 2.5 s, 200 rows here 5 ms), and a moved cursor repaints two rows.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from textual.events import Key, Paste, Resize
from textual.message import Message

from dstui.i18n import _, listed
from dstui.session.model import FieldView, Option
from dstui.tui import actions
from dstui.tui.text import Line, Span, clip, clip_middle, line, pad, width, wrapped
from dstui.tui.widgets.lines import LineView

NUMBERS = ("int", "float", "size")
LISTS = ("choice", "multi")


@dataclass(frozen=True)
class _Item:
    """A place the cursor can be: a field, or one of its options."""

    field: int
    option: int | None = None


class Form(LineView):
    """Keys and drawing of a step's fields. Holds a cursor and at most one text being edited, no values."""

    BINDINGS = actions.bindings("form")

    class Changed(Message):
        """A person gave ``field_id`` a value: typed text, an option's value, or a tuple of them (multi)."""

        def __init__(self, field_id: str, value: Any) -> None:
            super().__init__()
            self.field_id = field_id
            self.value = value

    class Reset(Message):
        """The recommended value of ``field_id`` is wanted again."""

        def __init__(self, field_id: str) -> None:
            super().__init__()
            self.field_id = field_id

    class Finished(Message):
        """Enter on what is already chosen: on to the next step."""

    class Moved(Message):
        """The cursor is on another item, or an edit began or ended."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, keys=True)
        self._fields: tuple[FieldView, ...] = ()
        self._cursor = 0
        self._buffer: str | None = None
        self._caret = 0
        self._cursors: dict[str, int] = {}
        self._step = ""
        self._typing = True
        self._advance = False

    # ---- content

    def load(self, step: str, fields: Sequence[FieldView], *, typing: bool = True) -> None:
        """Show the fields of ``step``; the cursor of each step is remembered.

        ``typing``: a letter on a text field replaces its text; else only Space opens it and letters stay keys.
        """
        if step != self._step:
            self._cursors[self._step] = self._cursor
            self._step = step
            self._buffer = None
            self._top = 0
            self._fields = tuple(fields)
            self._cursor = self._cursors.get(step, self._first())
            if self.field is not None:
                self._on_chosen(self.field)
        item = self._item()
        self._fields = tuple(fields)
        self._typing = typing
        if item is not None:  # options may have come or gone above the cursor
            items = self._items()
            if item in items:
                self._cursor = items.index(item)
        if self._advance:
            self._advance = False
            if self.field is not None and not self.field.error:
                self._next_field()
        self._draw()

    @property
    def field(self) -> FieldView | None:
        """The field under the cursor."""
        item = self._item()
        return self._fields[item.field] if item else None

    @property
    def option(self) -> Option | None:
        """The option under the cursor."""
        item = self._item()
        return None if item is None or item.option is None else self._fields[item.field].options[item.option]

    @property
    def note_is_cut(self) -> bool:
        """Whether the note of the option under the cursor is not there in full."""
        f, o = self.field, self.option
        if f is None or o is None or not o.note:
            return False
        room = self._free() - self._names(f) - 2
        return all(text.strip() != o.note for text, _role in self._tail_of(f, o, room))

    @property
    def editing(self) -> bool:
        return self._buffer is not None

    @property
    def takes_text(self) -> bool:
        """Whether letters typed here are text and not keys of the screen."""
        f = self.field
        return self.editing or (self._typing and f is not None and f.kind in ("text", "path", "size"))

    def would_finish(self) -> bool:
        """Whether Enter goes on to the next step (what is under the cursor is already chosen)."""
        f, o = self.field, self.option
        if self.editing:
            return False
        return f is None or o is None or f.kind == "multi" or self._chosen(f, o) or not o.enabled

    def focus_field(self, field_id: str) -> None:
        """Put the cursor on a field."""
        for n, item in enumerate(self._items()):
            if self._fields[item.field].id == field_id:
                self._cursor = n
                self._on_chosen(self._fields[item.field])
                break
        self._draw()

    # ---- cursor

    def _items(self) -> list[_Item]:
        items: list[_Item] = []
        for n, f in enumerate(self._fields):
            if not f.enabled:
                continue
            if f.kind in LISTS and f.options:
                items += [_Item(n, m) for m in range(len(f.options))]
            else:
                items.append(_Item(n))
        return items

    def _item(self) -> _Item | None:
        items = self._items()
        if not items:
            return None
        self._cursor = max(0, min(self._cursor, len(items) - 1))
        return items[self._cursor]

    def _first(self) -> int:
        for n, item in enumerate(self._items()):
            f = self._fields[item.field]
            if f.error or item.option is None or f.kind == "multi" or self._chosen(f, f.options[item.option]):
                return n
        return 0

    def _on_chosen(self, f: FieldView) -> None:
        """Coming to a list of options from another field: land on the chosen one."""
        if f.kind != "choice":
            return
        for n, item in enumerate(self._items()):
            if (
                self._fields[item.field] is f
                and item.option is not None
                and self._chosen(f, f.options[item.option])
            ):
                self._cursor = n
                return

    @staticmethod
    def _chosen(f: FieldView, o: Option) -> bool:
        if f.kind == "multi":
            return isinstance(f.value, (tuple, list, set, frozenset)) and o.value in f.value
        return bool(o.value == f.value) and isinstance(o.value, bool) == isinstance(f.value, bool)

    def _move(self, delta: int) -> None:
        self._commit()
        items = self._items()
        if not items:
            self.scroll_rows(delta)
            return
        before = self._item()
        target = self._cursor + delta
        if not 0 <= target < len(items):
            self.scroll_rows(delta)
            return
        was_open = self._expanded()
        self._cursor = target
        after = self._item()
        if before and after and before.field != after.field and after.field not in was_open:
            self._on_chosen(self._fields[after.field])
        self._draw()
        self.post_message(self.Moved())

    # ---- actions

    def action_up(self) -> None:
        self._move(-1)

    def action_down(self) -> None:
        self._move(1)

    def action_enter(self) -> None:
        if self.editing:
            self._advance = self._commit()
            if not self._advance:
                self._next_field()
            return
        if self.would_finish():
            self.post_message(self.Finished())
        else:
            self._advance = True  # once the screen has loaded what follows from the choice
            self._choose()

    def _next_field(self) -> None:
        here = self._item()
        if here is None:
            return
        for n, item in enumerate(self._items()):
            if item.field > here.field:
                self._cursor = n
                self._on_chosen(self._fields[item.field])
                break
        self._draw()
        self.post_message(self.Moved())

    def action_space(self) -> None:
        f = self.field
        if f is None:
            return
        if f.kind == "bool" or f.kind in LISTS:
            self._choose()
        elif not self.editing:
            self._begin(f.text)

    def action_recommended(self) -> None:
        f = self.field
        if f is not None and not self.editing:
            self.post_message(self.Reset(f.id))

    def _choose(self) -> None:
        f, o = self.field, self.option
        if f is None:
            return
        if f.kind == "bool":
            self.post_message(self.Changed(f.id, not f.value))
        elif o is not None and o.enabled:
            if f.kind == "choice":
                self.post_message(self.Changed(f.id, o.value))
            else:
                chosen = tuple(f.value or ())
                new = tuple(v for v in chosen if v != o.value) if o.value in chosen else (*chosen, o.value)
                order = [x.value for x in f.options]
                self.post_message(self.Changed(f.id, tuple(sorted(new, key=order.index))))
        else:
            self.post_message(self.Moved())

    # ---- editing

    def _begin(self, text: str) -> None:
        self._buffer = text
        self._caret = len(text)
        self._draw()
        self.post_message(self.Moved())

    def _commit(self) -> bool:
        """End the edit; whether the text is a change (a good one moves the cursor on when it is loaded)."""
        f = self.field
        if self._buffer is None or f is None:
            return False
        text, self._buffer = self._buffer, None
        changed = text != f.text
        if changed:
            self.post_message(self.Changed(f.id, text))
        self._draw()
        self.post_message(self.Moved())
        return changed

    def on_key(self, event: Key) -> None:
        f = self.field
        if f is None or f.kind in LISTS or f.kind == "bool":
            return
        if self._buffer is None:
            starts = event.character is not None and event.is_printable and event.character != " "
            starts = starts and self._typing
            character = event.character or ""
            if starts and f.kind in ("int", "float"):
                starts = character in "0123456789.-+"
            if starts:
                self._begin(character)
            elif event.key == "backspace":
                self._begin(f.text[:-1])
            else:
                return
            event.stop()
            event.prevent_default()
            return
        if self._edit(event):
            event.stop()
            event.prevent_default()

    def _edit(self, event: Key) -> bool:
        """One key while editing; whether it was used."""
        text, at = self._buffer or "", self._caret
        key = event.key
        if event.is_printable and event.character:
            self._buffer, self._caret = text[:at] + event.character + text[at:], at + len(event.character)
        elif key == "backspace":
            self._buffer, self._caret = text[: max(0, at - 1)] + text[at:], max(0, at - 1)
        elif key == "delete":
            self._buffer = text[:at] + text[at + 1 :]
        elif key in ("left", "right"):
            self._caret = max(0, min(len(text), at + (1 if key == "right" else -1)))
        elif key in ("home", "end"):
            self._caret = 0 if key == "home" else len(text)
        elif key == "ctrl+u":
            self._buffer, self._caret = text[at:], 0
        elif key == "escape":
            self._buffer = None
            self.post_message(self.Moved())
        elif key == "tab":
            if self.field is None or self.field.kind != "path" or not self._complete():
                return False
        else:
            return False
        self._draw()
        return True

    def _complete(self) -> bool:
        """Complete a path up to where the candidates differ; whether anything was added."""
        typed = self._buffer or ""
        found: list[str] = sorted(glob.glob(glob.escape(os.path.expanduser(typed)) + "*"))  # noqa: PTH111, PTH207
        if not found:
            return False
        common = os.path.commonprefix(found)  # noqa: RUF071 - of characters, not of components
        if len(found) == 1 and os.path.isdir(common):  # noqa: PTH112
            common += "/"
        if common == typed:
            return False
        self._buffer, self._caret = common, len(common)
        return True

    def on_paste(self, event: Paste) -> None:
        f = self.field
        if f is None or f.kind in LISTS or f.kind == "bool":
            return
        text = "".join(event.text.splitlines())
        if self._buffer is None:
            self._begin(text)
        else:
            at = self._caret
            self._buffer = self._buffer[:at] + text + self._buffer[at:]
            self._caret = at + len(text)
            self._draw()
        event.stop()

    # ---- drawing

    def on_resize(self, event: Resize) -> None:
        super().on_resize(event)
        self._draw()

    def _shown(self) -> list[tuple[int, FieldView]]:
        """Fields with a row of their own: those that apply, or all where none does (each says why not)."""
        apply = [(n, f) for n, f in enumerate(self._fields) if f.enabled]
        return apply or list(enumerate(self._fields))

    def _height(self, f: FieldView) -> int:
        return max(1, len(f.options)) if f.kind in LISTS and f.enabled else 1

    def _expanded(self) -> set[int]:
        """Lists shown with all their options: the current one, then, in order, as many as have room."""
        item = self._item()
        shown = self._shown()
        lists = [n for n, f in shown if self._height(f) > 1]
        first = [n for n in lists if item is not None and n == item.field]
        room = self.size.height - sum(1 + bool(f.error) for _n, f in shown)
        out: set[int] = set()
        for n in first + [n for n in lists if n not in first]:
            extra = self._height(self._fields[n]) - 1
            if n in first or extra <= room:
                out.add(n)
                room -= extra
        return out

    def _draw(self) -> None:
        if not self.size:
            return
        item = self._item()
        expanded = self._expanded()
        shown = self._shown()
        unused = [f for f in self._fields if not f.enabled] if len(shown) < len(self._fields) else []
        needed = sum((self._height(f) if n in expanded else 1) + bool(f.error) for n, f in shown)
        spaced = needed + len(shown) + bool(unused) <= self.size.height
        label_width = self._label_width()
        rows: list[Line] = []
        here = (0, 0)
        for n, f in shown:
            if rows and spaced:
                rows.append(())
            current = item is not None and item.field == n
            start = len(rows)
            if f.kind in LISTS and f.options and f.enabled and (n in expanded or current):
                rows += self._options(n, f, label_width, item)
                if current and item is not None and item.option is not None:
                    here = (start + item.option, start + item.option)
            else:
                rows.append(self._one(f, label_width, current))
                if current:
                    here = (start, start)
            if f.error and f.enabled:
                rows += wrapped(
                    f.error, self.size.width - 2, "bad", " " * (label_width + 3), limit=2, cut=self.glyphs.cut
                )
        if unused and needed < self.size.height:
            text = _("not used now: {fields}").format(fields=listed(f.label for f in unused))
            rows += [()] if spaced else []
            rows.append(line(" ", (clip(text, self.size.width - 2, self.glyphs.cut), "dim")))
        self.show(rows)
        self.reveal(*here)

    def _label_width(self) -> int:
        if len(self._fields) == 1:  # the title of the step is its label
            return 0
        longest = max((width(f.label) for _n, f in self._shown()), default=0)
        return min(longest + 1, max(12, self.size.width // 3))

    def _label(self, f: FieldView, cells: int, current: bool) -> Span:
        return (" " + pad(f.label, cells - 1, self.glyphs.cut) if cells else "", "strong" if current else "")

    def _options(self, n: int, f: FieldView, label_width: int, item: _Item | None) -> list[Line]:
        g = self.glyphs
        free, names = self._free(), self._names(f)
        rows = []
        for m, o in enumerate(f.options):
            on_it = item is not None and item.field == n and item.option == m
            current = item is not None and item.field == n
            label = self._label(f, label_width, current) if m == 0 else (" " * label_width, "")
            chosen = self._chosen(f, o)
            mark = (g.ticked if chosen else g.unticked) if f.kind == "multi" else (g.on if chosen else g.off)
            role = "" if o.enabled else "dim"
            name = pad(clip_middle(o.label, names, g.cut), names)
            tail = self._tail_of(f, o, free - names - 2)
            rows.append(
                line(
                    label,
                    (" " + (g.cursor if on_it else " "), "key"),
                    (mark + " ", "good" if chosen else role),
                    (name, "cursor" if on_it else "strong" if chosen else role),
                    *tail,
                )
            )
        return rows

    def _free(self) -> int:
        """Columns for an option's name and note."""
        return self.size.width - self._label_width() - 6

    def _names(self, f: FieldView) -> int:
        """Columns of them for the names."""
        free = self._free()
        noted = any(o.note or o.why_not for o in f.options)
        return min(max(width(o.label) for o in f.options), max(25, free // 2) if noted else free)

    def _tail_of(self, f: FieldView, o: Option, room: int) -> list[Span]:
        note = o.note if o.enabled else o.why_not or o.note
        best = f.kind == "choice" and o.enabled and o.value == f.recommended and f.recommended is not None
        return self._tail(note, best, self._chosen(f, o), room)

    def _tail(self, note: str, best: bool, chosen: bool, room: int) -> list[Span]:
        """After an option's name: its note, and the word that it is the recommended one.

        The word comes first where something else is chosen; else only if the note leaves it room.
        """
        g = self.glyphs
        word = _("recommended") if best else ""
        if word and chosen and note and width(note) + 2 + width(word) > room:
            word = ""
        tail: list[Span] = []
        if word and room > 4:
            word = clip(word, room, g.cut)
            tail.append(("  " + word, "accent"))
            room -= width(word) + 2
        if note and room > 4:
            tail.append(("  " + clip(note, room, g.cut), "dim"))
        return tail

    def _one(self, f: FieldView, label_width: int, current: bool) -> Line:
        g = self.glyphs
        free = self.size.width - label_width - 5
        pointer = (" " + (g.cursor if current else " "), "key")
        label = self._label(f, label_width, current)
        if not f.enabled:
            return line((label[0], "dim"), "    ", (clip(f.why_not or "-", free, g.cut), "dim"))
        if f.kind == "bool":
            mark = g.ticked if f.value else g.unticked
            word = _("yes") if f.value else _("no")
            return line(
                label,
                pointer,
                (f"{mark} ", "good"),
                (word, "cursor" if current else ""),
                *self._hint(f, word),
            )
        if f.kind in LISTS:
            chosen = [o for o in f.options if self._chosen(f, o)]
            text = listed(o.label for o in chosen) or _("none")
            if f.kind == "multi" and len(chosen) > 2:
                text = _("{n} of {total}").format(n=len(chosen), total=len(f.options))
            note = chosen[0].note if len(chosen) == 1 else ""
            text = clip(text, free, g.cut)
            room = free - width(text) - 2
            return line(
                label, pointer, (g.on + " ", "good"), (text, "cursor" if current else ""),
                ("  " + clip(note, room, g.cut) if note and room > 4 else "", "dim"),
            )  # fmt: skip
        if current and self._buffer is not None:
            return line(label, pointer, "  ", *self._caret_spans(free))
        shown = clip_middle(f.text, free - 1, g.cut) if f.kind == "path" else clip(f.text, free - 1, g.cut)
        role = "bad" if f.error else "cursor" if current else ""
        if not shown:
            return line(
                label, pointer, "  ", (_("empty"), "cursor" if current else "dim"), *self._hint(f, _("empty"))
            )
        return line(label, pointer, "  ", (shown, role), *self._hint(f, shown))

    def _hint(self, f: FieldView, shown: str) -> list[Span]:
        """Unit, and the recommended value where it differs."""
        g = self.glyphs
        parts = [f.unit] if f.unit else []
        if f.recommended not in (None, "") and f.value != f.recommended and f.kind not in LISTS:
            value = (_("yes") if f.recommended else _("no")) if f.kind == "bool" else str(f.recommended)
            parts.append(_("recommended: {value}").format(value=value))
        free = self.size.width - self._label_width() - 8 - width(shown)
        text = f" {g.dot} ".join(parts)
        return [("  " + clip(text, free, g.cut), "dim")] if text and free > 4 else []

    def _caret_spans(self, free: int) -> list[Span]:
        text, at = self._buffer or "", self._caret
        left = text[:at]
        while left and width(left) > free - 2:
            left = left[1:]
        at_caret = text[at : at + 1] or " "
        right = clip(text[at + 1 :], max(0, free - 2 - width(left)), self.glyphs.cut)
        return [(left, "strong"), (at_caret, "cursor"), (right, "strong")]
