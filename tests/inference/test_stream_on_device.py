"""A model that streams to a device computes what it computes in memory (`fake_accelerator`)."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DEVICE, EVERY_PACE, Accelerator, Kernels, Pace, Stream, accelerator
from inside import uses_of
from test_training import data, empty, saved, unit_bytes

import nvmeio
from nvmeio._memory import devices

LAYERS = 5


def computed(path: Path, cuda: Accelerator, dtype: torch.dtype, units: int) -> list[torch.Tensor]:
    """Three passes, of which nothing is looked at before the end."""
    model = nvmeio.stream_model(
        empty(LAYERS), path, device="cuda", dtype=dtype, resident_bytes=units * unit_bytes()
    )
    try:
        with torch.no_grad():
            found = [model(cuda.tensor(data(n)).to(dtype)) for n in range(3)]
        return [cuda.value(each) for each in found]
    finally:
        model.weight_stream.close()


@pytest.mark.parametrize(
    ("dtype", "pace"),
    [
        *((torch.float32, pace) for pace in EVERY_PACE),
        (torch.bfloat16, (Pace.LAZY, Pace.EAGER)),
        (torch.bfloat16, (Pace.EAGER, Pace.LAZY)),
    ],
)
def test_passes_equal_those_in_memory(
    pace: tuple[Pace, Pace], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers stream through memory for two, beside what stays."""
    whole = saved(tmp_path / "base.safetensors", LAYERS).to(dtype)
    with torch.no_grad():
        wanted = [whole(data(number).to(dtype)) for number in range(3)]
    with accelerator(monkeypatch, *pace) as cuda:
        found = computed(tmp_path / "base.safetensors", cuda, dtype, 4)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("missing", "compute", "copies"),
    [
        ("compute does not wait for copies", Pace.EAGER, Pace.LAZY),
        ("copies do not wait for compute", Pace.LAZY, Pace.EAGER),
        ("memory is read into before it was copied on", Pace.LAZY, Pace.LAZY),
    ],
)
def test_a_missing_wait_shows(
    missing: str, compute: Pace, copies: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved(tmp_path / "base.safetensors", LAYERS)
    with torch.no_grad():
        wanted = [whole(data(number)) for number in range(3)]
    with monkeypatch.context() as patch, accelerator(patch, compute, copies) as cuda:
        if missing == "compute does not wait for copies":
            patch.setattr(devices, "come_after", lambda stream, mark: None)
        elif missing == "copies do not wait for compute":
            patch.setattr(devices.Beside, "after", lambda self, mark: None)
        else:
            patch.setattr(devices.CudaMark, "wait", lambda self: None)
        found = computed(tmp_path / "base.safetensors", cuda, torch.float32, 2)
        assert cuda.forgive()
    assert not all(map(torch.equal, found, wanted))


def test_a_full_device_keeps_no_place_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that the device had no room for a layer, its place in host memory was lost."""
    whole = saved(tmp_path / "base.safetensors", LAYERS)
    with torch.no_grad(), accelerator(monkeypatch) as cuda:
        model = nvmeio.stream_model(
            empty(LAYERS),
            tmp_path / "base.safetensors",
            device="cuda",
            resident_bytes=4 * unit_bytes(),
        )
        try:
            x = cuda.tensor(data(0))
            cuda.limit_bytes = cuda.in_use_bytes + unit_bytes() // 2
            for _ in range(5):
                with pytest.raises(torch.OutOfMemoryError):
                    model(x)
            cuda.limit_bytes = 1 << 28
            assert_same(cuda, [model(x)], [whole(data(0))])
        finally:
            model.weight_stream.close()


# Several streams of the callers'


def stream(cuda: Accelerator, pace: Pace) -> Stream:
    made: Stream = cuda.Stream(DEVICE)
    made.pace = pace
    return made


def passed(cuda: Accelerator, on: Stream, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Of any thread, which computes as this one does."""
    torch.set_num_threads(1)
    of_torch: Any = on
    with cuda.stream(of_torch), Kernels(cuda), torch.no_grad():
        model(cuda.tensor(x))
        found: torch.Tensor = model(cuda.tensor(x))
        return found


def assert_same(cuda: Accelerator, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    equal = [torch.equal(cuda.value(a), b) for a, b in zip(found, wanted, strict=True)]
    assert all(equal), equal


def test_what_stays_has_arrived_for_streams_that_do_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that had used one such layer used the others, on any stream, before their copies."""
    whole = saved(tmp_path / "base.safetensors", LAYERS)
    with torch.no_grad():
        wanted = [whole(data(number)) for number in range(2)]
    with accelerator(monkeypatch, Pace.LAZY, Pace.LAZY) as cuda:
        model = nvmeio.stream_model(
            empty(LAYERS),
            tmp_path / "base.safetensors",
            device="cuda",
            resident_bytes=2 * LAYERS * unit_bytes(),
        )
        try:
            assert not model.weight_stream.stats.streamed_bytes
            found = [
                passed(cuda, stream(cuda, pace), model, data(number))
                for number, pace in enumerate([Pace.LAZY, Pace.EAGER])
            ]
            assert_same(cuda, found, wanted)
            passed(cuda, stream(cuda, Pace.EAGER), model, data(0))
            uses, here = uses_of(model), threading.get_ident()
            assert all(uses.settled_use(unit, here) for unit in model.weight_stream.units)
        finally:
            model.weight_stream.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_do_not_get_in_each_other_s_way(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory was used again once one stream was done with it: the last, or whichever was current.

    And nobody waited for the others' conversions, nor for those who used their room.
    """
    whole = saved(tmp_path / "base.safetensors", LAYERS).to(dtype)
    with torch.no_grad():
        wanted = [whole(data(number).to(dtype)) for number in range(3)]
    with accelerator(monkeypatch, Pace.LAZY, Pace.EAGER) as cuda:
        model = nvmeio.stream_model(
            empty(LAYERS),
            tmp_path / "base.safetensors",
            device="cuda",
            dtype=dtype,
            # Of float32 none stays; of bfloat16 all, so that nothing but the room is shared.
            resident_bytes=(2 if dtype is torch.float32 else 2 * LAYERS) * unit_bytes(),
        )
        streams = [stream(cuda, pace) for pace in (Pace.LAZY, Pace.LAZY, Pace.EAGER)]
        works = [
            partial(passed, cuda, each, model, data(number).to(dtype))
            for number, each in enumerate(streams)
        ]
        try:
            found = model.weight_stream.in_lockstep(works)
            # Each in the middle of its work while the other one does its own.
            streams[0].run_to(streams[0].asked // 2)
            while any(each.done < each.asked for each in streams):
                for each in streams:
                    each.run_to(min(each.done + 1, each.asked))
        finally:
            model.weight_stream.close()
        assert_same(cuda, found, wanted)


def test_a_close_waits_for_streams_that_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others allocate then may be the memory of its weights."""
    whole = saved(tmp_path / "base.safetensors", LAYERS)
    with torch.no_grad():
        wanted = [whole(data(number)) for number in range(2)]
    with accelerator(monkeypatch, Pace.EAGER, Pace.LAZY) as cuda:
        model = nvmeio.stream_model(
            empty(LAYERS),
            tmp_path / "base.safetensors",
            device="cuda",
            resident_bytes=2 * LAYERS * unit_bytes(),
        )
        streams: Any = [stream(cuda, Pace.EAGER), stream(cuda, Pace.LAZY)]
        found = [passed(cuda, each, model, data(n)) for n, each in enumerate(streams)]
        sizes = [unit.layout.nbytes for unit in model.weight_stream.units]
        model.weight_stream.close()
        gc.collect()
        with cuda.stream(streams[0]):  # on which the memory was allocated
            others = [cuda.tensor(torch.zeros(nbytes // 4)) for nbytes in sizes]
        assert len(others) == LAYERS
        assert_same(cuda, found, wanted)
