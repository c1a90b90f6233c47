"""Fixtures: a copy of the fake libcufile for every test, handles on it, the preload shim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_device import FakeDevice, fake_device
from gds._support import FakeCuFile, compiled, fake_cufile
from inside import leave_host_memory

import nvmeio


@pytest.fixture(scope="session")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fakes/cufile_traps.c, compiled."""
    return compiled("cufile_traps.c", tmp_path_factory.mktemp("traps"))


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fakes/fake_cufile.c, compiled."""
    return compiled("fake_cufile.c", tmp_path_factory.mktemp("fakes"))


@pytest.fixture
def fake(
    fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCuFile]:
    """A libcufile of this test's own."""
    with fake_cufile(fake_library, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def new_gds(fake: FakeCuFile) -> Iterator[Callable[..., nvmeio.GdsHandle]]:
    """Makes handles that have cuFile move host memory, in tasks of 16 KiB."""
    made: list[nvmeio.GdsHandle] = []

    def make(**options: object) -> nvmeio.GdsHandle:
        chosen = {
            "block_size": 16384,
            "queue_depth": 8,
            "task_bytes": 16384,
            "cpu_tensors": "cufile",
            **options,
        }
        made.append(nvmeio.GdsHandle(**chosen))  # type: ignore[arg-type]
        return made[-1]

    yield make
    fake.hold = fake.open_hold = fake.close_hold = 0
    for handle in made:
        handle.close()


@pytest.fixture
def gds(new_gds: Callable[..., nvmeio.GdsHandle]) -> nvmeio.GdsHandle:
    """One of them."""
    return new_gds()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A device whose memory is host memory."""
    with fake_device(monkeypatch) as made:
        yield made


@pytest.fixture
def on_device(new_gds: Callable[..., nvmeio.GdsHandle], device: FakeDevice) -> nvmeio.GdsHandle:
    """A handle whose CPU tensors go the AIO way, and the fake device's through cuFile."""
    handle = new_gds()
    leave_host_memory(handle)
    return handle
