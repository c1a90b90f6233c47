"""DeepSpeed's `gds_handle` on the fake cuFile, with a device of host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_device import FakeDevice
from gds._support import FakeCuFile
from support import random_bytes, raw

from nvmeio.compat.deepspeed import GDSBuilder, gds_handle
from nvmeio.engines.cufile import driver


@pytest.fixture
def handle(fake: FakeCuFile, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> gds_handle:
    monkeypatch.setattr(driver, "preflight", lambda needs_cuda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        "nvmeio.engines.cufile.driver._open_in_context", lambda lib, _: lib.open_driver()
    )
    return gds_handle(block_size=16384, queue_depth=8)


def test_verbs_and_their_counts(
    handle: gds_handle, fake: FakeCuFile, device: FakeDevice, path: Path
) -> None:
    data = device.tensor(torch.frombuffer(bytearray(random_bytes(100_000)), dtype=torch.uint8))
    assert handle.sync_pwrite(data, str(path)) == 1
    back = device.take(torch.zeros(100_000, dtype=torch.uint8))
    assert handle.async_pread(back, str(path)) == 0
    assert handle.wait() == 1
    assert raw(back) == raw(data)
    assert fake.calls > 0
    calls = fake.calls
    assert handle.read(torch.zeros(100_000, dtype=torch.uint8), str(path), True) == 0
    assert fake.calls == calls  # CPU tensors go the AIO way
    handle.nvmeio.close()


def test_pinned_device_tensors(handle: gds_handle, fake: FakeCuFile, device: FakeDevice) -> None:
    tensor = device.take(torch.zeros(1000))
    assert handle.pin_device_tensor(tensor) is True
    assert handle.pin_device_tensor(tensor) is False
    assert fake.memories == 1
    assert handle.unpin_device_tensor(tensor) is True
    assert handle.free_pinned_device_tensor(tensor) is False
    # False is for what is pinned already: DeepSpeed does not look at it.
    with pytest.raises(ValueError, match="not contiguous"):
        handle.pin_device_tensor(device.take(torch.zeros(8, 8)).t())
    with pytest.raises(ValueError, match="without elements"):
        handle.pin_device_tensor(device.take(torch.zeros(8))[:0])
    handle.nvmeio.close()


def test_builder_says_that_it_works(handle: gds_handle, capsys: pytest.CaptureFixture[str]) -> None:
    builder = GDSBuilder()
    assert builder.is_compatible(verbose=True)
    assert (builder.error_log, capsys.readouterr().out) == (None, "")
    handle.nvmeio.close()
