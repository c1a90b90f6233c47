"""nvmeio's counters as metrics for Prometheus.

Once in a process:

    from prometheus_client import REGISTRY, start_http_server
    from nvmeio.integrations.prometheus import NvmeioCollector

    REGISTRY.register(NvmeioCollector())
    start_http_server(9000)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nvmeio._core.core import metrics
from nvmeio.integrations._clients import client


class NvmeioCollector:
    """Collects `AioHandle.stats` of all handles of this process together, closed ones included.

    Args:
        prefix: The prefix of the names: ``nvmeio_read_bytes_total``, ``nvmeio_in_flight`` and so
            on.

    Raises:
        BackendUnavailableError: prometheus_client is not installed.

    Cost: nothing but when it is asked; then some microseconds for each open handle. No handle is
    kept alive.
    """

    def __init__(self, prefix: str = "nvmeio") -> None:
        self._core = client(
            "prometheus_client.core",
            wanted="no metrics for Prometheus",
            remedy="pip install 'nvmeio[metrics]'",
        )
        self._prefix = prefix

    def collect(self) -> Iterator[Any]:
        """The metrics as they are now; called by the registry."""
        for metric in metrics():
            kind = "CounterMetricFamily" if metric.grows else "GaugeMetricFamily"
            name = "_".join(filter(None, (self._prefix, metric.name, metric.unit)))
            yield getattr(self._core, kind)(name, metric.what, value=metric.value)
