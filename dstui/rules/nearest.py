"""Did you mean: the known word nearest to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable


def distance(a: str, b: str, limit: int = 3) -> int:
    """Edit distance with neighbouring letters swapped counted as one; ``limit + 1`` when it is more.

    Optimal string alignment distance (Damerau-Levenshtein, restricted).
    """
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i] + [0] * len(b)
        for j, y in enumerate(b, 1):
            row[j] = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        if min(row) > limit:
            return limit + 1
        before, last = last, row
    return last[-1] if last[-1] <= limit else limit + 1


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` most likely stands for, or None when none is near.

    Case and the choice between ``-``, ``_`` and nothing are free; then at most one edit in five letters
    (at least one, at most three), so that an own key of the user's script is not taken for a typo.
    """
    plain = _plain(word)
    best: tuple[int, str] | None = None
    for candidate in known:
        other = _plain(candidate)
        if plain == other:
            return candidate
        limit = min(3, max(1, min(len(plain), len(other)) // 5))
        if len(plain) < 4 or len(other) < 4:
            continue
        d = distance(plain, other, limit)
        if d <= limit and (best is None or (d, candidate) < best):
            best = (d, candidate)
    return best[1] if best else None


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "").replace(" ", "")
