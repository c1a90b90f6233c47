"""A file of a handle's: the same as naming both, in all but what a short transfer costs."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.operating import CONTENT, WAIT_S, Make
from support import bytes_tensor, random_bytes, raw, spin_until

import nvmeio
from nvmeio._core.core import REAP_EVERY, Core
from nvmeio.testing import FakeEngine

ENGINES: dict[str, Any] = {"libaio": "libaio", "threads": "threads", "fake": FakeEngine}


@pytest.fixture(params=ENGINES)
def handle(request: pytest.FixtureRequest) -> Any:
    engine = ENGINES[request.param]
    with nvmeio.AioHandle(engine=engine() if callable(engine) else engine) as made:
        yield made


@pytest.mark.parametrize("nbytes", [0, 511, 4096, 65_536])
@pytest.mark.parametrize("offset", [1, 4096])
@pytest.mark.parametrize("own", [True, False], ids=["nvmeio's memory", "torch's"])
def test_a_read_gives_the_bytes(
    handle: nvmeio.AioHandle, file: Path, nbytes: int, offset: int, own: bool
) -> None:
    make = nvmeio.empty_aligned if own else torch.empty
    tensor = make(nbytes, dtype=torch.uint8)
    with handle.open(file) as bound:
        operation = bound.pread(tensor, offset)
        assert operation.result(WAIT_S) == nbytes
    assert raw(tensor) == CONTENT[offset : offset + nbytes]
    assert (operation.nbytes, operation.file_offset) == (nbytes, offset)
    assert (operation.path, operation.transferred) == (str(file), nbytes)
    moved = operation.direct_bytes + operation.bounced_bytes + operation.buffered_bytes
    assert moved == nbytes


@pytest.mark.parametrize("nbytes", [0, 511, 4096, 10_000])
@pytest.mark.parametrize("offset", [1, 4096])
def test_a_write_changes_those_bytes_alone(
    handle: nvmeio.AioHandle, file: Path, nbytes: int, offset: int
) -> None:
    data = random_bytes(nbytes, seed=nbytes + offset)
    with handle.open(file, "r+") as bound:
        assert bound.pwrite(bytes_tensor(data), offset).result(WAIT_S) == nbytes
        handle.sync_fsync(bound)
    expected = bytearray(CONTENT)
    if nbytes:
        expected[offset : offset + nbytes] = data
    assert file.read_bytes() == expected


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_any_element_type_is_read(handle: nvmeio.AioHandle, file: Path, dtype: torch.dtype) -> None:
    tensor, other = torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=dtype)
    with handle.open(file) as bound:
        bound.pread(tensor, 512).result(WAIT_S)
        handle.sync_pread(other, file, 512)
    assert raw(tensor) == raw(other)


def unusual() -> dict[str, torch.Tensor]:
    whole = torch.zeros(2, 512)
    return {
        "transposed": whole.t(),
        "every second": whole[:, ::2],
        "conjugated": torch.zeros(64, dtype=torch.complex64).conj(),
        "negated": torch._neg_view(torch.zeros(64)),
        "a parameter": torch.nn.Parameter(torch.zeros(64), requires_grad=False),
    }


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


@pytest.mark.parametrize("kind", unusual())
def test_tensors_that_do_not_lie_as_they_look(
    handle: nvmeio.AioHandle, file: Path, kind: str
) -> None:
    tensor, other = unusual()[kind], unusual()[kind]
    with handle.open(file) as bound:
        bound.pread(tensor, 4096).result(WAIT_S)
        handle.sync_pread(other, file, 4096)
    assert raw(resolved(tensor)) == raw(resolved(other))
    assert tensor.is_conj() == other.is_conj()


def test_buffers_are_read_and_written(handle: nvmeio.AioHandle, file: Path) -> None:
    found = bytearray(100)
    with handle.open(file, "r+") as bound:
        bound.pread(found, 7).result(WAIT_S)
        bound.pwrite(b"nvme", 3).result(WAIT_S)
    assert found == CONTENT[7:107]
    assert file.read_bytes()[:10] == CONTENT[:3] + b"nvme" + CONTENT[7:10]


def test_autograd_is_told(handle: nvmeio.AioHandle, file: Path) -> None:
    tensor = torch.zeros(1024)
    with handle.open(file, "r+") as bound:
        version = tensor._version
        bound.pread(tensor).result(WAIT_S)
        assert tensor._version == version + 1
        bound.pwrite(tensor).result(WAIT_S)
        assert tensor._version == version + 1
        with pytest.raises(RuntimeError, match="leaf tensor"):
            bound.pread(torch.zeros(4, requires_grad=True))
        with torch.inference_mode():
            frozen = torch.zeros(4)
        with pytest.raises(RuntimeError, match="inference"):
            bound.pread(frozen)


@pytest.mark.parametrize(
    ("offset", "error"),
    [(-1, ValueError), ((1 << 63) - 8, ValueError), (1 << 70, ValueError), ("0", TypeError)],
)
def test_a_wrong_offset_is_refused(
    handle: nvmeio.AioHandle, file: Path, offset: Any, error: type[Exception]
) -> None:
    with handle.open(file, "r+") as bound:
        for start in (bound.pread, bound.pwrite):
            with pytest.raises(error, match="file_offset"):
                start(torch.zeros(64), offset)


def test_what_is_closed_refuses(make_handle: Make, file: Path) -> None:
    handle = make_handle()
    bound, other = handle.open(file, "r+"), handle.open(file)
    bound.close()
    for start in (bound.pread, bound.pwrite):
        with pytest.raises(nvmeio.ClosedError):
            start(torch.zeros(4))
    with pytest.raises(nvmeio.TransferError, match='mode "r"'):
        other.pwrite(torch.zeros(1024)).result(WAIT_S)
    handle.close()
    with pytest.raises(nvmeio.ClosedError):
        other.pread(torch.zeros(4))
    with pytest.raises(nvmeio.ClosedError):
        handle.open(file)
    other.close()


def test_many_coroutines_read_through_one_file(handle: nvmeio.AioHandle, file: Path) -> None:
    async def read(bound: nvmeio.BoundFile, offset: int) -> None:
        tensor = torch.zeros(512, dtype=torch.uint8)
        for turn in range(20):
            at = (offset + turn * 777) % 90_000
            assert await bound.pread(tensor, at) == 512
            assert raw(tensor) == CONTENT[at : at + 512]

    async def main() -> None:
        with handle.open(file) as bound:
            await asyncio.gather(*(read(bound, number * 1000) for number in range(32)))

    before = handle.stats.operations
    asyncio.run(main())
    asyncio.run(main())  # on another loop
    assert handle.stats.operations == before + 2 * 32 * 20
    assert handle.stats.in_flight == 0
    assert handle.wait() == 2 * 32 * 20


def test_what_nobody_waits_for_is_reaped_in_passing(handle: nvmeio.AioHandle, file: Path) -> None:
    """Once a loop had used the handle, what was started without one was never looked after."""
    tensor = torch.zeros(64, dtype=torch.uint8)

    async def read(bound: nvmeio.BoundFile) -> None:
        await bound.pread(tensor)

    with handle.open(file) as bound:
        asyncio.run(read(bound))
        tensors = [torch.zeros(64, dtype=torch.uint8) for _ in range(REAP_EVERY)]
        for each in tensors:
            bound.pread(each)
        spin_until(lambda: handle.stats.operations == 1 + REAP_EVERY)
        for _ in range(REAP_EVERY):
            bound.pread(tensor)
        assert handle.stats.in_flight < 2 * REAP_EVERY
        handle.wait()


def test_a_file_keeps_its_handle(file: Path) -> None:
    bound = nvmeio.AioHandle().open(file)
    gc.collect()
    tensor = torch.zeros(64, dtype=torch.uint8)
    assert bound.pread(tensor).result(WAIT_S) == 64
    bound.close()


def test_every_open_file_is_read_the_short_way(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `handle.open` had it: a read of a file of `nvmeio.open` took 1.7 times as long."""
    monkeypatch.setattr(Core, "start", lambda *_: pytest.fail("by the general way"))
    tensor = torch.zeros(512, dtype=torch.uint8)
    with nvmeio.AioHandle() as handle, nvmeio.open(file, "r+") as opened:
        page = torch.ones(4096, dtype=torch.uint8)
        assert handle.async_pwrite(page, opened, 4096).result(WAIT_S) == 4096
        for read in (handle.async_pread, handle.sync_pread):
            operation = read(tensor, opened, 4000)
            assert (operation if isinstance(operation, int) else operation.result(WAIT_S)) == 512
        assert raw(tensor) == CONTENT[4000:4096] + b"\x01" * 416


@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20])
def test_a_longer_transfer_is_not_begun_as_a_short_one(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of pools and windows was prepared, seen to be too long, and withdrawn."""
    path = tmp_path / "long"
    path.write_bytes(bytes(nbytes))
    memory = nvmeio.empty_aligned(nbytes, dtype=torch.uint8)
    memory = torch.frombuffer(memory.numpy(), dtype=torch.uint8)  # which torch cannot hold
    withdraw = Core.withdraw

    def withdrawn(core: Core, record: object) -> None:
        withdraw(core, record)  # type: ignore[arg-type]
        pytest.fail("a record was made for nothing")

    monkeypatch.setattr(Core, "withdraw", withdrawn)
    with nvmeio.AioHandle() as handle, nvmeio.open(path, "r+") as opened:
        assert handle.async_pread(memory, opened).result(WAIT_S) == nbytes
        assert handle.async_pwrite(memory, opened).result(WAIT_S) == nbytes


def test_one_file_and_several_handles(file: Path) -> None:
    tensor = torch.zeros(512, dtype=torch.uint8)
    with nvmeio.open(file) as opened, nvmeio.AioHandle() as lasting:
        for number in range(5):
            with nvmeio.AioHandle() as handle:
                for each in (handle, lasting):
                    at = 1000 * number
                    assert each.async_pread(tensor, opened, at).result(WAIT_S) == 512
                    assert raw(tensor) == CONTENT[at : at + 512]
            with pytest.raises(nvmeio.ClosedError):
                handle.async_pread(tensor, opened)
        assert len(opened.ways) <= 2  # of the closed handles at most the last one's
        opened.close()
        with pytest.raises(nvmeio.ClosedError):
            lasting.async_pread(tensor, opened)
        assert not opened.ways


def test_a_file_that_turns_out_to_take_no_direct_io(file: Path) -> None:
    tensor = torch.zeros(512, dtype=torch.uint8)
    with nvmeio.AioHandle() as handle, nvmeio.open(file) as opened:
        handle.async_pread(tensor, opened, 100).result(WAIT_S)
        opened.acquire("test").demote()
        opened.let_go("test")
        operation = handle.async_pread(tensor, opened, 200)
        assert operation.result(WAIT_S) == operation.buffered_bytes == 512
        assert raw(tensor) == CONTENT[200:712]


def test_a_closed_handle_prepares_nothing(file: Path) -> None:
    tensor = torch.zeros(512, dtype=torch.uint8)
    with nvmeio.open(file) as opened:
        with nvmeio.AioHandle() as handle:
            pass
        with pytest.raises(nvmeio.ClosedError):
            handle.async_pread(tensor, opened)
        assert not opened.ways
