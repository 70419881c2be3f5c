"""Public failure reports: what ``diagnose`` says to their log text alone. Skipped without the collection beside us.

The collection keeps a short fragment of each log; ``...`` joins parts. Many entries hold no log but a description
("hang at save"): for these, silence is right. ``pytest -s`` prints the table.
"""

from __future__ import annotations

import json
from pathlib import Path

from dstui.runs.diagnose import diagnose

RIGHT = {
    "DR102": "R095",
    "DR103": "R209",
    "DR105": "R179 R180 R214",
    "DR106": "R182 R183 R184 R200",
    "DR107": "R185",
    "DR108": "R230 R231",
    "DR201": "R043 R044",
    "DR203": "R132 R133 R134 R165 R166 R167",
    "DR204": "R181 R212",
    "DR301": "R001 R085 R120 R160 R161",
    "DR302": "R030 R031 R077",
    "DR303": "R061",
    "DR401": "R104 R105 R109 R127 R129 R162 R163 R206 R207 R208",
    "DR402": "R126 R128 R130 R154 R156 R157 R215",
    "DR403": "R122 R123 R124 R164",
    "DR404": "R107",
    "DR501": "R178 R205",
    "DR502": "R149 R159",
    "DR503": "R142 R143",
    "DR504": "R145",
    "DR601": "R054 R177",
    "DR602": "R172 R173 R174 R242",
    "DR701": "R135 R136 R138 R140 R141 R168",
    "DR702": "R137 R139",
    "DR705": "R011",
    "DR707": "R186 R192",
    "DR708": "R216",
    "DR713": "R190 R191",
    "DR714": "R194 R195 R196",
    "DR715": "R066 R144 R188 R193",
    "DR716": "R158",
    "DR901": "R150 R151",
    "DR903": "R197 R198",
}
"""Code of the cause that each report established (or its maintainers named), judged by hand."""
UNNAMED = "R065 R170 R175 R176 R187 R189 R201 R204 R211 R213 R217 R220 R233 R238 R241"
"""Log text that names no cause by itself: harmless lines, or the message of many causes."""


def test_reports(shared: Path) -> None:
    reports = json.loads((shared / "facts" / "reports.json").read_text(encoding="utf-8"))
    wanted = {report: code for code, reports in RIGHT.items() for report in reports.split()}
    unnamed = set(UNNAMED.split())
    rows: dict[str, list[str]] = {"right": [], "unnamed": [], "no log": [], "wrong": []}
    for r in reports:
        if not set(r["catch"].replace(" ", "").split(",")) & set("LMP"):
            continue
        found = diagnose(r["log_fragment"].replace(" ... ", "\n") + "\n", text=True)
        code = found.cause.code if found.cause else None
        assert found.cause is None or found.cause.certainty != "certain"
        if code == wanted.get(r["id"]):
            rows["right" if code else "unnamed" if r["id"] in unnamed else "no log"].append(r["id"])
        else:
            rows["wrong"].append(f"{r['id']}: {code}, not {wanted.get(r['id'])}")
    total = sum(map(len, rows.values()))
    print(f"\n| of {total} reports with catch L, M or P | n |\n|---|---|")
    for name, ids in rows.items():
        print(f"| {name} | {len(ids)} |")
    assert not rows["wrong"]
    assert len(rows["right"]) >= 92 and total == 158
