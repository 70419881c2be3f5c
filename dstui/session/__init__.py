"""The wizard as a pure state machine (``Session``): fields in, one frozen report out. No widget, no terminal."""

from __future__ import annotations

from dstui.session.model import STEP_IDS, STEPS, Batch, FieldView, Option, Report, Step, Written
from dstui.session.session import Session
from dstui.session.table import FIELDS, FieldSpec

__all__ = [
    "FIELDS",
    "STEPS",
    "STEP_IDS",
    "Batch",
    "FieldSpec",
    "FieldView",
    "Option",
    "Report",
    "Session",
    "Step",
    "Written",
]
