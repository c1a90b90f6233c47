"""nvmeio's counters as instruments of OpenTelemetry.

Once in a process:

    from opentelemetry import metrics
    from nvmeio.integrations.opentelemetry import instrument

    instrument(metrics.get_meter("nvmeio"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nvmeio._core.core import metrics
from nvmeio.integrations._clients import client


def instrument(meter: Any) -> None:
    """Observe `AioHandle.stats` of all handles of this process together, closed ones included.

    Args:
        meter: A meter of ``opentelemetry.metrics.get_meter``. Its instruments are called
            ``nvmeio.read``, ``nvmeio.in_flight`` and so on.

    Raises:
        BackendUnavailableError: The OpenTelemetry API is not installed.

    Cost: nothing but when a reader collects; no handle is kept alive.
    """
    observation = client(
        "opentelemetry.metrics",
        "Observation",
        wanted="no instruments",
        remedy="pip install opentelemetry-api",
    )

    def observe(name: str) -> Callable[[Any], Iterable[Any]]:
        return lambda _: [observation(each.value) for each in metrics() if each.name == name]

    for metric in metrics():
        make = meter.create_observable_counter if metric.grows else None
        make = make or meter.create_observable_up_down_counter
        unit = "By" if metric.unit == "bytes" else "1"
        make(f"nvmeio.{metric.name}", [observe(metric.name)], unit, metric.what)
