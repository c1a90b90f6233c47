"""What monitoring systems are told of a process: all of it, closed handles too, and never less."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import core_of
from support import run_python, spin_until

import nvmeio
from nvmeio._core import core as core_module
from nvmeio._core.core import metrics, totals
from nvmeio.integrations import opentelemetry, prometheus

NBYTES = 1 << 20


def write(path: Path) -> None:
    with nvmeio.AioHandle(engine="threads") as handle:
        handle.sync_pwrite(torch.zeros(NBYTES, dtype=torch.uint8), path)


def test_what_closed_handles_have_counted_stays(tmp_path: Path) -> None:
    before = totals()[0].bytes_written
    for _ in range(3):
        write(tmp_path / "x")
    assert totals()[0].bytes_written == before + 3 * NBYTES


def test_an_open_handle_is_counted_and_not_kept(tmp_path: Path) -> None:
    before = totals()[0]
    handle = nvmeio.AioHandle(engine="threads")
    handle.sync_pwrite(torch.zeros(NBYTES, dtype=torch.uint8), tmp_path / "x")
    counted, handles = totals()
    assert counted.bytes_written - before.bytes_written == handle.stats.bytes_written == NBYTES
    assert handles >= 1
    core = weakref.ref(core_of(handle))
    del handle

    def gone() -> bool:
        gc.collect()
        return core() is None

    spin_until(gone)
    assert totals()[0].bytes_written == before.bytes_written + NBYTES


def test_many_handles_are_added_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not one entry for each that there ever was."""
    monkeypatch.setattr(core_module, "_MOST_GONE", 4)
    before = totals()[0].bytes_written
    for _ in range(20):
        write(tmp_path / "x")
    assert totals()[0].bytes_written == before + 20 * NBYTES
    assert len(core_module._gone) <= 5


def test_it_never_goes_back_while_handles_come_and_go(tmp_path: Path) -> None:
    over = threading.Event()

    def come_and_go(name: str) -> None:
        for _ in range(30):
            write(tmp_path / name)
        over.set()

    coming = threading.Thread(target=come_and_go, args=("x",))
    coming.start()
    last = 0
    try:
        while not over.is_set():
            now = totals()[0].bytes_written
            assert now >= last
            last = now
    finally:
        coming.join()


def test_a_forked_child_begins_at_nothing(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import os, torch, warnings, nvmeio
        from nvmeio._core.core import metrics, totals
        path = {str(tmp_path / "x")!r}
        warnings.simplefilter("ignore")
        with nvmeio.AioHandle(engine="threads") as closed:
            closed.sync_pwrite(torch.zeros(4096), path)
        handle = nvmeio.AioHandle(engine="threads")
        handle.sync_pread(torch.zeros(4096), path)
        child = os.fork()
        if not child:
            found = totals()
            os._exit(0 if (found[1], found[0].operations) == (0, 0) else 1)
        print(os.waitpid(child, 0)[1], totals()[0].operations, totals()[1])
        handle.close()
        """
    )
    assert done.stdout.split() == ["0", "2", "1"]


def test_prometheus_is_told_the_totals(tmp_path: Path) -> None:
    core = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    registry = core.CollectorRegistry()
    registry.register(prometheus.NvmeioCollector())
    before = registry.get_sample_value("nvmeio_written_bytes_total")
    with nvmeio.AioHandle(engine="threads") as handle:
        handle.sync_pwrite(torch.zeros(NBYTES, dtype=torch.uint8), tmp_path / "x")
        now = registry.get_sample_value("nvmeio_written_bytes_total")
        assert now - before == NBYTES
        assert registry.get_sample_value("nvmeio_handles") >= 1
        text = core.generate_latest(registry).decode()
    assert "# TYPE nvmeio_operations_total counter" in text
    assert "# TYPE nvmeio_in_flight gauge" in text


def test_opentelemetry_is_told_the_totals(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="OpenTelemetry is not installed")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    opentelemetry.instrument(provider.get_meter("nvmeio"))
    with nvmeio.AioHandle(engine="threads") as handle:
        handle.sync_pwrite(torch.zeros(NBYTES, dtype=torch.uint8), tmp_path / "x")
        data: Any = reader.get_metrics_data()
    [scope] = data.resource_metrics[0].scope_metrics
    found = {metric.name: metric.data.data_points[0].value for metric in scope.metrics}
    provider.shutdown()
    assert found.keys() == {f"nvmeio.{each.name}" for each in metrics()}
    assert found["nvmeio.written"] >= NBYTES


@pytest.mark.parametrize("name", ["prometheus_client", "opentelemetry.metrics"])
def test_what_is_missing_is_named(name: str) -> None:
    make = "prometheus.NvmeioCollector()" if "prom" in name else "opentelemetry.instrument(None)"
    done = run_python(
        f"""
        import sys
        sys.modules["prometheus_client.core"] = sys.modules[{name!r}] = None
        import nvmeio
        from nvmeio.integrations import opentelemetry, prometheus
        try:
            {make}
        except nvmeio.BackendUnavailableError as missing:
            print(missing)
        """
    )
    assert "pip install" in done.stdout
