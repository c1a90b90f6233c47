"""What an engine says it can do is what it has methods for."""

from __future__ import annotations

from typing import Any

import pytest

from nvmeio import engines
from nvmeio.engines.cufile.engine import CuFileEngine
from nvmeio.engines.device_ring import RingEngine
from nvmeio.testing import FakeEngine

METHODS = {
    "rows": "prepare_rows",
    "batches": "prepare_batch",
    "short_transfers": "short_place",
    "keeps_gil": "open_gil_keeping_queue",
    "works_through_another": "inside",
}


@pytest.mark.parametrize(
    "engine", [*engines.ENGINES.values(), FakeEngine, RingEngine, CuFileEngine]
)
def test_capabilities_are_the_methods_that_an_engine_has(engine: Any) -> None:
    assert engine.capabilities._asdict() == {
        capability: hasattr(engine, method) for capability, method in METHODS.items()
    }


def test_every_engine_has_one_name() -> None:
    assert engines.NAMES == ("auto", "libaio", "threads")
    assert [name for name, *_ in engines.describe()] == list(engines.ENGINES)
