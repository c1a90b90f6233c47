"""What tests on the stand-in for a GPU begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_accelerator import Accelerator, Pace, accelerator


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Numbers are always right here: only the order can be wrong."""
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda:
        yield cuda
