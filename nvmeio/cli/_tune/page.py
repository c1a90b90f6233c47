"""The page."""

from __future__ import annotations

from nvmeio.cli._tune.result import Result


def render(result: Result) -> str:
    """X."""
    return ""
