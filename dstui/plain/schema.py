"""``dstui schema``: one self-contained JSON Schema of ds_config.json, for editors."""

from __future__ import annotations

import argparse
import json
import sys

from dstui.config import schema
from dstui.i18n import _


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deepspeed", metavar="V", help=_("the release (newest known)"))
    parser.add_argument(
        "--json", action="store_true", help=_("the answer is JSON anyway; accepted for symmetry")
    )


def run(args: argparse.Namespace) -> int:
    loaded = schema.load(args.deepspeed or schema.newest())
    json.dump(schema.published(loaded), sys.stdout, ensure_ascii=False, indent=2)
    print()
    return 0
