"""What several of these modules use."""

from __future__ import annotations

from tests.supervised import begin

__all__ = ["begin"]
