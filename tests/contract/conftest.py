"""Fixtures of the contract's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract.operating import CONTENT


@pytest.fixture
def file(path: Path) -> Path:
    """A file of `CONTENT`."""
    path.write_bytes(CONTENT)
    return path
