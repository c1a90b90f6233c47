"""Where weights lie in a slot, and which of them stay: pure arithmetic, checked on any input."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import run_python
from torch import nn

import nvmeio
from nvmeio._formats.safetensors.open_set import FileBytes
from nvmeio._pages import PAGE_BYTES
from nvmeio.inference._plan.budget import share_out
from nvmeio.inference._plan.slot_layout import (
    FileExtent,
    Read,
    SlotLayout,
    Weight,
    WeightPart,
    lay_out,
)
from nvmeio.inference._plan.units import Unit, as_code, find_layers
from nvmeio.inference._stream.slots import SlotPools


def filled(layout: SlotLayout, files: list[bytes]) -> bytearray:
    """What the reads leave in a slot."""
    slot = bytearray(layout.nbytes)
    for read in layout.reads:
        assert 0 <= read.start < read.end <= len(files[read.file])
        assert read.at >= 0 and read.at + read.end - read.start <= layout.nbytes
        slot[read.at : read.at + read.end - read.start] = files[read.file][read.start : read.end]
    return slot


def wanted(part: WeightPart, files: list[bytes]) -> bytes:
    found = bytearray(part.nbytes)
    for extent in part.extents:
        data = files[extent.file][extent.offset : extent.offset + extent.nbytes]
        found[extent.at : extent.at + extent.nbytes] = data
    return bytes(found)


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[list[bytes], list[WeightPart]]:
    """Files of random bytes, and parts anywhere in them."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    generator = random.Random(draw(st.integers(0, 1000)))
    files = [generator.randbytes(size * 30_000 + draw(st.integers(0, 4095))) for size in sizes]
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        file = draw(st.integers(0, len(files) - 1))
        each = 4 * draw(st.integers(1, 1500))
        extents, at = [], 0
        for _ in range(draw(st.integers(1, 3))):
            offset = draw(st.integers(0, (len(files[file]) - each) // 4)) * 4
            extents.append(FileExtent(file, offset, each, at))
            at += each
        parts.append(WeightPart(torch.float32, (at // 4,), tuple(extents)))
    return files, parts


@given(checkpoints(), st.booleans())
def test_reads_fill_every_part(
    checkpoint: tuple[list[bytes], list[WeightPart]], own_alignment: bool
) -> None:
    files, parts = checkpoint
    layout = lay_out(parts, [len(data) for data in files], own_alignment)
    assert layout.nbytes % PAGE_BYTES == 0
    slot = filled(layout, files)
    taken: list[tuple[int, int]] = []
    for part, start in zip(parts, layout.starts, strict=True):
        assert slot[start : start + part.nbytes] == wanted(part, files)
        assert start % 4 == 0
        if own_alignment:
            assert start % 16 == 0
        taken.append((start, start + part.nbytes))


def test_neighbours_in_a_file_are_one_read() -> None:
    parts = [
        WeightPart(torch.float32, (1024,), (FileExtent(0, 100 + n * 4096, 4096, 0),))
        for n in range(5)
    ]
    layout = lay_out(parts, [1 << 20])
    assert layout.reads == (Read(0, 0, 24576, 0),)


class OneFile:
    """A checkpoint of one file of 1 GiB."""

    def __init__(self) -> None:
        self.files = [self]

    def size(self) -> int:
        return 1 << 30

    def spans(self, file: int, start: int, end: int) -> list[FileBytes]:
        return [FileBytes(file, start, end)]


def units(sizes: list[int]) -> list[Unit]:
    found = []
    checkpoint: Any = OneFile()
    for number, nbytes in enumerate(sizes):
        unit = Unit(f"layers.{number}")
        unit.is_layer = True
        unit.modules = [nn.Identity()]
        part = WeightPart(torch.uint8, (nbytes,), (FileExtent(0, 0, nbytes, 0),))
        unit.weights = [Weight("w", torch.uint8, (nbytes,), (part,), None, ("w",))]
        unit.plan(checkpoint, own_alignment=False)
        found.append(unit)
    return found


@given(
    st.lists(st.integers(1, 1 << 20), min_size=1, max_size=12),
    st.integers(1, 16 << 20),
    st.sampled_from([None, 1, 2, 5]),
)
def test_the_budget_is_kept(sizes: list[int], budget: int, window: int | None) -> None:
    layers = units(sizes)
    try:
        shares = share_out(Unit("fixed"), layers, budget, window)
    except ValueError as refused:
        assert "is too small" in str(refused)
        assert budget < sum(unit.layout.nbytes for unit in layers)
        return
    assert shares.total <= budget
    streamed = [unit.layout.nbytes for unit in layers if not unit.resident]
    assert shares.window >= max(streamed, default=0)
    assert shares.resident == sum(unit.layout.nbytes for unit in layers if unit.resident)


def test_what_stays_finds_its_place_again() -> None:
    """After a failure it is read anew; the pool has just enough, and could be cut to pieces."""
    first, second, settled, last = layers = units([4 << 12, 6 << 12, 1 << 12, 5 << 12])
    shares = share_out(Unit("fixed"), layers, 1 << 20, None)
    assert all(unit.resident for unit in layers)
    memory = SlotPools(shares, torch.device("cpu"))
    slots = {unit: memory.take(unit, stays=True) for unit in layers}
    for unit in (first, second, last):
        memory.give_back(slots[unit])
    for unit in (first, second, last):
        again = memory.take(unit, stays=True)
        assert again is not None
        assert again.host.data_ptr() == slots[unit].host.data_ptr()
        memory.give_back(again)
    memory.give_back(slots[settled])
    memory.close()


def test_a_limit_of_data_counts() -> None:
    script = """
        import resource, torch
        from nvmeio._memory import system as _memory_system
        from nvmeio.inference._model_plan import memory_left
        used = _memory_system.proc_bytes("/proc/self/status", "VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20), used + (64 << 20)))
        print(memory_left())
    """
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert 48 << 20 < int(done.stdout) <= 64 << 20


def test_layers_are_found() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)
            )
            self.empty = nn.ModuleList([nn.ReLU()])
            self.head = nn.Linear(2, 2)

    net = Net()
    assert find_layers(net) == list(net.blocks)
    assert find_layers(nn.Linear(2, 2)) == []


def test_a_list_of_modules_is_no_layer() -> None:
    """Funnel and GLPN have lists of lists of layers: a list is never called, and nothing came."""
    two = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(3))
    named = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(2, 2)}) for _ in range(2))
    for lists in (two, named):
        net = nn.Module()
        net.lists = lists
        linear = [module for module in net.modules() if isinstance(module, nn.Linear)]
        assert find_layers(net) == linear


def test_names_are_written_as_code() -> None:
    names = ["embed", "h.0.a", "h.1.a", "h.2.a", "x.1", "x.2", "y.3", "y.5", "7", "8", "b.0", "b2"]
    code = as_code(names)
    assert eval(f"[{code}]") == names
    assert code.startswith("'embed', *(f'h.{n}.a' for n in range(3)), *(f'x.{n}' for n in range(1,")


@pytest.mark.parametrize("resident", [None, 2_000])
@torch.no_grad()
def test_members_of_a_list_within_a_layer_are_cut_out_of_it(
    resident: int | None, tmp_path: Path
) -> None:
    """A small list within a large layer became a part of its own, which is never called."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
            self.wide = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return self.wide(x)  # type: ignore[no-any-return]

    def made() -> nn.Module:
        return nn.Sequential(*(Layer() for _ in range(3)))

    whole = made()
    nvmeio.save_safetensors(whole.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = made()
    if resident is not None:
        with pytest.raises(nvmeio.inference.BudgetTooSmall) as refused:
            nvmeio.stream_model(empty, tmp_path, resident_bytes=1)
        resident = refused.value.least
    x = torch.randn(3, 8)
    with nvmeio.stream_model(empty, tmp_path, resident_bytes=resident) as model:
        assert model(x).equal(whole(x))


def test_two_files_are_two_reads() -> None:
    parts = [WeightPart(torch.uint8, (10,), (FileExtent(file, 0, 10, 0),)) for file in (0, 1)]
    assert [read.file for read in lay_out(parts, [10, 10]).reads] == [0, 1]
    with pytest.raises(IndexError):
        lay_out(parts, [10])
