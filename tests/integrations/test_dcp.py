"""Distributed checkpoints of one process: the format, atomicity, errors, torch's own classes."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations._dcp_states import (
    Failing,
    assert_same,
    blank,
    every_form,
    files_of,
    load,
    refused,
    save,
)
from programs import Program
from support import raw
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan

import nvmeio
from nvmeio._storage import replace
from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter, reading, writing
from nvmeio.integrations.dcp import reading as reading_module
from nvmeio.testing import FakeEngine

pytestmark = [
    # torch's, of every save and load without a process group, and of saving over a checkpoint
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

Writers = [NvmeStorageWriter, dcp.FileSystemWriter]
Readers = [NvmeStorageReader, dcp.FileSystemReader]


# The format


@pytest.mark.parametrize("reader", Readers)
@pytest.mark.parametrize("writer", Writers)
def test_each_reads_what_the_other_wrote(writer: Any, reader: Any, tmp_path: Path) -> None:
    state = every_form()
    dcp.save(state, storage_writer=writer(tmp_path))
    found = blank(state)
    dcp.load(found, storage_reader=reader(tmp_path))
    assert_same(found, state)


@pytest.mark.parametrize("numel", [20, 300_000])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
@pytest.mark.parametrize("writer", Writers)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_read_as_torch_reads_them(
    writer: Any, dtype: torch.dtype, numel: int, tmp_path: Path
) -> None:
    """The shape was asked of the meta device, which has no such tensors."""
    values = torch.quantize_per_tensor(torch.randn(numel), 0.1, 3, dtype)
    dcp.save({"x": values}, storage_writer=writer(tmp_path))
    found = {"x": torch.quantize_per_tensor(torch.zeros(numel), 0.1, 3, dtype)}
    dcp.load(found, storage_reader=NvmeStorageReader(tmp_path))
    assert torch.equal(found["x"].int_repr(), values.int_repr())


def test_metadata_and_items_are_of_one_checkpoint_though_a_link_to_it_changes(
    tmp_path: Path,
) -> None:
    """Metadata of one checkpoint placed items in the data files of another."""
    for step in (1, 2):
        save({"a": torch.full((300,), step)}, tmp_path / str(step))
    latest = tmp_path / "latest"
    latest.symlink_to("1")

    class Changing(NvmeStorageReader):
        def read_metadata(self, *arguments: Any, **options: Any) -> Any:
            metadata = super().read_metadata(*arguments, **options)
            latest.unlink()
            latest.symlink_to("2")
            return metadata

    found = {"a": torch.zeros(300, dtype=torch.int64)}
    dcp.load(found, storage_reader=Changing(latest))
    assert found["a"].unique().tolist() == [1]


def test_ranks_that_find_different_checkpoints_are_refused(tmp_path: Path) -> None:
    """Each rank reads the metadata itself: a link that changes gave them different ones."""
    plans = []
    for step in (1, 2):
        save({"a": torch.full((300,), step)}, tmp_path / str(step))
        reader = NvmeStorageReader(tmp_path / str(step))
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    assert reader.prepare_global_plan([plans[0]] * 2) == [plans[0]] * 2
    with pytest.raises(nvmeio.IntegrityError, match=r"rank 0 has found .*/1, and rank 1 another"):
        reader.prepare_global_plan(plans)


def test_items_are_archives_with_valid_checksums_and_page_aligned_data(tmp_path: Path) -> None:
    state = {
        "large": torch.randn(1100, 1001),
        "columns": torch.randn(500, 500)[:, :400],
        "small": torch.randn(7),
        "empty": torch.empty(0),
        "text": "no archive of storages",
    }
    metadata = save(state, tmp_path)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    ends = []
    for index, info in metadata.storage_data.items():
        item = data[info.offset : info.offset + info.length]
        archive = zipfile.ZipFile(io.BytesIO(item))
        assert archive.testzip() is None, index.fqn
        ends.append(info.offset + info.length)
        tensor = state[index.fqn]
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(torch.load(io.BytesIO(item), weights_only=True), tensor)
            if tensor.nbytes > 100_000:
                assert data.find(raw(tensor.contiguous())) % 4096 == 0, index.fqn
    assert max(ends) == len(data)


def test_checksums_can_be_left_out(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 300)}
    metadata = save(state, tmp_path, checksum=False)
    (info,) = metadata.storage_data.values()
    item = (tmp_path / info.relative_path).read_bytes()[info.offset :][: info.length]
    assert zipfile.ZipFile(io.BytesIO(item)).testzip() == "archive/data/0"
    assert_same(load(state, tmp_path), state)


def test_files_of_a_rank(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(50 + number, 100) for number in range(7)}
    save(state, tmp_path / "one")
    save(state, tmp_path / "three", thread_count=3)
    save(state, tmp_path / "each", single_file_per_rank=False, thread_count=2)
    assert files_of(tmp_path / "one") == {".metadata", "__0_0.distcp"}
    assert len(files_of(tmp_path / "three")) == 1 + 3
    assert len(files_of(tmp_path / "each")) == 1 + 7
    for folder in ("one", "three", "each"):
        assert_same(load(state, tmp_path / folder), state)
        found = blank(state)
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / folder))
        assert_same(found, state)


def test_groups_of_items_make_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "GROUP_BYTES", 100_000)
    state = {f"w{number}": torch.randn(number * 40, 50) for number in range(9)}
    save(state, tmp_path)
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_same(found, state)


def test_items_come_in_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{number}": torch.randn(number * 400, 150) for number in range(9)}
    save(state, tmp_path, single_file_per_rank=False)
    monkeypatch.setattr(reading, "ROUND_BYTES", 500_000)
    monkeypatch.setattr(reading, "MOST_FILES", 2)
    assert_same(load(state, tmp_path), state)


def test_a_handle_of_the_caller_stays_open(tmp_path: Path) -> None:
    state = {"w": torch.randn(700, 700), "b": torch.randn(7)}
    with nvmeio.AioHandle() as handle:
        save(state, tmp_path, handle=handle)
        written = handle.stats.bytes_written
        assert_same(load(state, tmp_path, handle=handle), state)
        assert not handle.closed
    assert written >= state["w"].nbytes


def test_what_a_planner_makes_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are made one group after another, and are let go of."""
    monkeypatch.setattr(writing, "GROUP_BYTES", 1)

    class Halving(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.bfloat16
            return plan

        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return data.bfloat16() if isinstance(data, torch.Tensor) else data

    state = {f"w{number}": torch.randn(200, 300) for number in range(4)}
    writer = NvmeStorageWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=Halving())
    halves = {name: tensor.bfloat16() for name, tensor in state.items()}
    assert_same(load(halves, tmp_path), halves)


class Tagged(torch.Tensor):
    """A tensor that torch.save pickles as what it is."""


def test_a_tensor_subclass_is_saved_as_torch_saves_it(tmp_path: Path) -> None:
    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item).as_subclass(Tagged)

    state = {"w": torch.randn(700, 400)[:, 100:], "b": torch.randn(5)}
    dcp.save(state, storage_writer=NvmeStorageWriter(tmp_path), planner=Planner())
    with refused(pickle.UnpicklingError, "Tagged"):
        load(state, tmp_path)
    with torch.serialization.safe_globals([Tagged]):
        assert_same(load(state, tmp_path), state)


# Loading


def test_tensors_of_other_dtype_and_strides_are_filled(tmp_path: Path) -> None:
    state = {"w": torch.randn(1200, 500), "b": torch.randn(30)}
    save(state, tmp_path)
    found = {
        "w": torch.zeros(500, 1200, dtype=torch.float64).t(),
        "b": torch.zeros(30, dtype=torch.bfloat16),
    }
    dcp.load(found, storage_reader=NvmeStorageReader(tmp_path))
    assert torch.equal(found["w"], state["w"].double())
    assert torch.equal(found["b"], state["b"].bfloat16())


def test_parameters_are_filled_in_place_and_autograd_is_told(tmp_path: Path) -> None:
    weight = torch.randn(900, 900)
    save({"w": weight}, tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(900, 900))
    address, version = parameter.data_ptr(), parameter._version
    dcp.load({"w": parameter}, storage_reader=NvmeStorageReader(tmp_path))
    assert torch.equal(parameter, weight)
    assert parameter.data_ptr() == address
    assert parameter._version > version


def test_slices_go_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that asks for parts, as resharding does."""
    monkeypatch.setattr(reading_module, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(reading_module, "ROW_BYTES", 1 << 12)
    monkeypatch.setattr(reading, "WHOLE_BYTES", 1 << 14)
    weight = torch.randn(60, 50, 70)
    save({"w": weight}, tmp_path)
    asked = [
        ((0, 0, 0), (60, 50, 70)),
        ((3, 0, 0), (20, 50, 70)),
        ((0, 10, 0), (60, 20, 70)),
        ((1, 2, 3), (50, 40, 60)),
        ((59, 49, 69), (1, 1, 1)),
        ((0, 0, 69), (60, 50, 1)),
    ]
    targets = [torch.zeros(lengths) for _, lengths in asked]
    committed = []

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            (item,) = plan.items
            return dataclasses.replace(
                plan,
                items=[
                    dataclasses.replace(
                        item,
                        storage_offsets=torch.Size(offsets),
                        lengths=torch.Size(lengths),
                        dest_index=dataclasses.replace(item.dest_index, index=number),
                    )
                    for number, (offsets, lengths) in enumerate(asked)
                ],
            )

        def resolve_tensor(self, read_item: Any) -> Any:
            return targets[read_item.dest_index.index]

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            assert tensor.abs().sum() > 0
            committed.append(read_item.dest_index.index)

    dcp.load(
        {"w": torch.zeros(60, 50, 70)},
        storage_reader=NvmeStorageReader(tmp_path),
        planner=Planner(),
    )
    for (offsets, lengths), target in zip(asked, targets, strict=True):
        box = tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))
        assert torch.equal(target, weight[box]), (offsets, lengths)
    assert sorted(committed) == list(range(len(asked)))


@settings(max_examples=80)
@given(st.data())
def test_parts_fill_the_target_from_the_storage(data: st.DataObject) -> None:
    """Whatever is wanted of whatever layout, the parts read together what narrow gives."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "shape")
    order = data.draw(st.permutations(range(len(shape))), "order")
    stored = torch.arange(torch.Size(shape).numel(), dtype=torch.int32)
    stored = stored.view([shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(shape))]
    )
    source, where = stored, torch.empty(0, dtype=torch.int32, device="meta")
    meta = torch.empty_strided(stored.shape, stored.stride(), dtype=torch.int32, device="meta")
    for dim, size in enumerate(stored.shape):
        start = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - start))
        source, meta = source.narrow(dim, start, length), meta.narrow(dim, start, length)
    target = torch.full(source.shape, -1, dtype=torch.int32)
    if data.draw(st.booleans(), "strided target"):
        target = torch.full(source.shape[::-1], -1, dtype=torch.int32).permute(
            *range(source.dim() - 1, -1, -1)
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reading_module, "CHUNK_BYTES", data.draw(st.sampled_from([16, 64, 256, 4096]))
        )
        patch.setattr(reading_module, "ROW_BYTES", data.draw(st.sampled_from([4, 16, 1 << 20])))
        for part in reading_module.parts(meta, target):
            seen = torch.as_strided(
                stored, part.source.shape, part.source.stride(), int(part.source.storage_offset())
            )
            assert not part.direct or (part.source.is_contiguous() and part.target.is_contiguous())
            part.target.copy_(seen)
    assert torch.equal(target, source)
    assert where.numel() == 0


class Inverting(dcp._extension.StreamTransformExtension):
    """A stream transform: every byte inverted, compressed."""

    @staticmethod
    def registry_name() -> str:
        return "stream.inverting"

    @staticmethod
    def from_descriptor(version: str) -> Inverting:
        return Inverting()

    def get_descriptor(self) -> str:
        return "stream.inverting/1"

    def transform_to(self, output: IO[bytes]) -> Any:
        class Writer(io.RawIOBase):
            data = b""

            def write(self, data: Any) -> int:
                self.data += bytes(data)
                return len(data)

            def close(self) -> None:
                if not self.closed:
                    output.write(zlib.compress(bytes(255 - byte for byte in self.data)))
                super().close()

        return Writer()

    def transform_from(self, input: IO[bytes]) -> Any:
        return io.BytesIO(bytes(255 - byte for byte in zlib.decompress(input.read())))


def test_stream_transforms_of_torchs_writer_are_undone(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 40), "large": torch.randn(600, 500), "text": "words"}
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Inverting()])
    dcp.save(state, storage_writer=writer)
    registry = dcp._extension.ExtensionRegistry()
    registry.register(Inverting)
    assert_same(load(state, tmp_path, _extension_registry=registry), state)


@pytest.mark.parametrize("reader", [dcp.FileSystemReader, NvmeStorageReader])
def test_torchs_reader_undoes_our_stream_transforms(reader: Any, tmp_path: Path) -> None:
    view = torch.randn(50, 60)[10:20, ::2]
    state = {"w": torch.randn(30, 40), "large": torch.randn(600, 500), "text": "words", "v": view}
    metadata = save(state, tmp_path, _extensions=[Inverting()])
    theirs = dcp.save(
        state, storage_writer=dcp.FileSystemWriter(tmp_path / "x", _extensions=[Inverting()])
    )
    for index, info in metadata.storage_data.items():
        of_theirs = theirs.storage_data[index]
        assert info.transform_descriptors == of_theirs.transform_descriptors
        assert info.length < 10_000 + 4 * 600 * 500
    registry = dcp._extension.ExtensionRegistry()
    registry.register(Inverting)
    found = blank(state)
    dcp.load(found, storage_reader=reader(tmp_path, _extension_registry=registry))
    assert_same(found, state)


# Saving over a checkpoint


def test_a_save_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    first = {f"w{number}": torch.randn(100, 100) for number in range(3)}
    second = {f"w{number}": torch.randn(100, 100) for number in range(3)}
    save(first, tmp_path, thread_count=3)
    save(second, tmp_path)
    assert_same(load(second, tmp_path), second)
    assert len(files_of(tmp_path)) == 2  # those of the first are gone
    save(first, tmp_path)
    assert_same(load(first, tmp_path), first)
    assert len(files_of(tmp_path)) == 2


def test_overwriting_can_be_refused(tmp_path: Path) -> None:
    state = {"w": torch.randn(10)}
    save(state, tmp_path, overwrite=False)
    before = {name: (tmp_path / name).read_bytes() for name in files_of(tmp_path)}
    with refused(RuntimeError, match="Checkpoint already exists and self.overwrite=False."):
        save({"w": torch.zeros(10)}, tmp_path, overwrite=False)
    assert {name: (tmp_path / name).read_bytes() for name in files_of(tmp_path)} == before


@pytest.mark.parametrize("sync_files", [True, False])
def test_syncing_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync_files: bool
) -> None:
    synced: list[str] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(fd: int, real: Any = real) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
            real(fd)

        monkeypatch.setattr(os, name, sync)
    monkeypatch.setattr(replace, "is_local", lambda path: False)  # no call of the shim's own
    state = {"w": torch.randn(10)}
    for _ in range(2):  # a new checkpoint, and one in place of another
        save(state, tmp_path / "step", sync_files=sync_files)
    assert len(synced) == (9 if sync_files else 0)  # four a save, and of what the directory is in
    assert_same(load(state, tmp_path / "step"), state)


def test_a_failed_save_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(100, 100) for number in range(4)}
    save(state, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files_of(tmp_path)}
    other = {name: torch.zeros(100, 100) for name in state}
    with refused(ArithmeticError):
        writer = NvmeStorageWriter(tmp_path, single_file_per_rank=False)
        dcp.save(other, storage_writer=writer, planner=Failing())
    for name, data in before.items():
        assert (tmp_path / name).read_bytes() == data
    assert_same(load(state, tmp_path), state)
    save(other, tmp_path)  # removes what the failed one has left
    assert len(files_of(tmp_path)) == 2
    assert_same(load(other, tmp_path), other)


def test_a_planner_that_keeps_its_plan_may_save_again(tmp_path: Path) -> None:
    """The plan that it brings again names files of the first save."""
    for step in range(3):
        state = {"w": torch.full((300, 300), float(step)), "b": torch.ones(3)}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=NvmeStorageWriter(tmp_path), planner=planner)
        if step:
            assert "__0_0.distcp" not in files_of(tmp_path)
        assert_same(load(state, tmp_path), state)
        assert len(files_of(tmp_path)) == 2


def test_a_full_disk_is_told_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    state = {"w": torch.randn(600, 600)}
    save(state, tmp_path)
    engine = FakeEngine(fail=lambda kind, offset, nbytes: errno.ENOSPC if kind == "pwrite" else 0)
    with (
        nvmeio.AioHandle(engine=engine) as handle,
        refused(nvmeio.TransferError) as told,
    ):
        save({"w": torch.zeros(600, 600)}, tmp_path, handle=handle)
    assert told[0].errno == errno.ENOSPC
    assert files_of(tmp_path) == {".metadata", "__0_0.distcp"}
    assert_same(load(state, tmp_path), state)


SAVES = """
    import sys, warnings
    import torch
    import torch.distributed.checkpoint as dcp
    from nvmeio.integrations.dcp import NvmeStorageWriter
    warnings.simplefilter("ignore")
    print("ready", flush=True)
    for step in range(1, 10**6):
        state = {f"w{number}": torch.full((512, 512), float(step)) for number in range(8)}
        dcp.save(state, storage_writer=NvmeStorageWriter(sys.argv[1], thread_count=2))
"""


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    state = {f"w{number}": torch.zeros(512, 512) for number in range(8)}
    save(state, tmp_path)
    root = str(Path(nvmeio.__file__).parent.parent)
    for wait_s in (0.013, 0.16, 0.3):
        started = Program[str](
            [sys.executable, "-c", textwrap.dedent(SAVES), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert started.stdout is not None
        with started.stdout:
            assert started.stdout.readline() == "ready\n"
        time.sleep(wait_s)  # any moment will do: it saves all the time
        started.send_signal(signal.SIGKILL)
        assert started.wait(timeout=60) == -signal.SIGKILL
        found = load(state, tmp_path)
        values = {float(value) for tensor in found.values() for value in tensor.unique()}
        assert len(values) == 1
    save(state, tmp_path)
    assert len(files_of(tmp_path)) == 2
