"""All scenarios by name; `pytest tests/interrupts -k swapped` runs those of a system."""

from __future__ import annotations

from interrupts import _checkpoints, _data, _inference, _offload, _operations, _stores
from interrupts._trials import Scenario

SCENARIOS: dict[str, type[Scenario]] = {
    **_operations.SCENARIOS,
    **_checkpoints.SCENARIOS,
    **_data.SCENARIOS,
    **_inference.SCENARIOS,
    **_offload.SCENARIOS,
    **_stores.SCENARIOS,
}
