"""Distributed checkpoints of one process: the format, atomicity, errors, torch's own classes."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program
from support import bytes_tensor, random_bytes, raw, run_python
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

import nvmeio
from nvmeio.integrations._dcp import reading, writing
from nvmeio.integrations._dcp import reading as reading_module
from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
from nvmeio.testing import FakeEngine

pytestmark = [
    # torch's, of every save and load without a process group, and of saving over a checkpoint
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

Writers = [NvmeStorageWriter, dcp.FileSystemWriter]
Readers = [NvmeStorageReader, dcp.FileSystemReader]
State = dict[str, Any]


def every_form() -> State:
    base = torch.randn(400, 300)
    dtypes = {
        str(dtype): bytes_tensor(random_bytes(96, 1)).view(dtype)
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int8,
            torch.int64,
            torch.uint16,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    }
    return {
        **dtypes,
        "bool": torch.tensor([True, False, True]),
        "0-d": torch.tensor(3.5),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "odd": torch.arange(70_001, dtype=torch.int32).to(torch.uint8),
        "large": torch.randn(1100, 1001),
        "transposed": torch.randn(700, 900).t(),
        "columns": base[:, 100:250],
        "rows": base[100:],
        "conjugate": torch.randn(100, 90, dtype=torch.complex64).conj(),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "parameter": torch.nn.Parameter(torch.randn(8, 8)),
        "nested": {"list": [torch.randn(3), 4, "five"], "text": "s" * 5000, "none": None},
        "object": {1, 2, 3},
    }


def blank(value: Any) -> Any:
    """The same with other bytes."""
    if isinstance(value, torch.Tensor):
        made = torch.empty(value.shape, dtype=value.dtype)
        made.view(torch.uint8).fill_(1) if made.dim() and made.numel() else None
        return made
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return "other"


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        dense = wanted.detach().resolve_conj().contiguous()
        assert raw(found.detach().contiguous()) == raw(dense), where
    elif isinstance(wanted, dict):
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == wanted, where


def save(state: State, path: Path, **options: Any) -> Metadata:
    return dcp.save(state, storage_writer=NvmeStorageWriter(path, **options))


def load(state: State, path: Path, **options: Any) -> State:
    """What the checkpoint has for the keys of a state."""
    found: State = blank(state)
    dcp.load(found, storage_reader=NvmeStorageReader(path, **options))
    return found


@contextmanager
def refused(kind: type[BaseException], match: str = "") -> Iterator[list[Any]]:
    """Expects torch's CheckpointException around an error of a kind; the list gets the error."""
    found: list[Any] = []
    with pytest.raises(dcp.CheckpointException) as told:
        yield found
    found.append(told.value.failures[0][0])
    assert type(found[0]).__name__ == kind.__name__ or isinstance(found[0], kind), found
    assert re.search(match, str(found[0])), found


def files_of(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


# The format


@pytest.mark.parametrize("reader", Readers)
@pytest.mark.parametrize("writer", Writers)
def test_each_reads_what_the_other_wrote(writer: Any, reader: Any, tmp_path: Path) -> None:
    state = every_form()
    dcp.save(state, storage_writer=writer(tmp_path))
    found = blank(state)
    dcp.load(found, storage_reader=reader(tmp_path))
    assert_same(found, state)


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
    state = {"w": torch.randn(10)}
    for _ in range(2):  # a new checkpoint, and one in place of another
        save(state, tmp_path / "step", sync_files=sync_files)
    assert len(synced) == (9 if sync_files else 0)  # four a save, and of what the directory is in
    assert_same(load(state, tmp_path / "step"), state)


class Failing(DefaultSavePlanner):
    """Resolves the first items only."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "w2":
            raise ArithmeticError("not this one")
        return super().resolve_data(write_item)


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


# What does not fit, is damaged, or is missing


def saved(tmp_path: Path) -> tuple[State, Path, Any]:
    """A checkpoint of one large and one small tensor; the metadata."""
    state = {"large": torch.randn(700, 600), "small": torch.randn(20)}
    metadata = save(state, tmp_path)
    return state, tmp_path / "__0_0.distcp", metadata


def info_of(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_missing_checkpoint_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(nvmeio.TransferError, match=re.escape(f"{tmp_path}/.metadata")) as told:
        NvmeStorageReader(tmp_path).read_metadata()
    assert isinstance(told.value, FileNotFoundError)


def test_metadata_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(nvmeio.IntegrityError, match="not a DCP metadata file"):
        NvmeStorageReader(tmp_path).read_metadata()
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(nvmeio.IntegrityError, match="expected Metadata, found dict"):
        NvmeStorageReader(tmp_path).read_metadata()


class Runs:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["instead", "planner_data", "version", "storage_data"])
def test_metadata_runs_no_code(tmp_path: Path, where: str) -> None:
    """torch's reader unpickles whatever the file says."""
    _, _, metadata = saved(tmp_path)
    hostile = Runs(tmp_path / "it ran")
    found: Any = metadata
    if where == "instead":
        found = hostile
    elif where == "storage_data":
        metadata.storage_data[hostile] = None
    else:
        setattr(metadata, where, hostile)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(nvmeio.IntegrityError, match=r"\.metadata: .*mkdir, which is none of DCP's"):
        NvmeStorageReader(tmp_path).read_metadata()
    assert not (tmp_path / "it ran").exists()


def test_metadata_of_dotted_names_runs_no_code(tmp_path: Path) -> None:
    """From protocol 4 on a name may have dots: what a module has imported can be reached."""
    code = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.getpid\x93)R."
    (tmp_path / ".metadata").write_bytes(code)
    with pytest.raises(nvmeio.IntegrityError, match=r"os\.getpid"):
        NvmeStorageReader(tmp_path).read_metadata()


@pytest.mark.parametrize("name", ["../{}", "{}/../../{}", "/etc/hostname", "", "a\0b", 5, None])
def test_places_outside_of_the_checkpoint_are_refused(tmp_path: Path, name: Any) -> None:
    _, path, metadata = saved(tmp_path / "a")
    if isinstance(name, str):
        name = name.format("a", path.name)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(info, relative_path=name)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(nvmeio.IntegrityError, match=r"\.metadata: '.*' lies outside of the check"):
        NvmeStorageReader(tmp_path / "a").read_metadata()


def test_metadata_of_every_kind_of_tensor_is_read(tmp_path: Path) -> None:
    """All that torch's own writer may name: dtypes, memory formats, layouts, paths."""
    state: dict[str, Any] = {
        f"{dtype}": torch.zeros(2, 2, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
        for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int8)
    }
    state["nested"] = {"list": [1, {"a": torch.ones(3)}], "text": "x", "set": {1, 2}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    metadata = NvmeStorageReader(tmp_path).read_metadata()
    assert set(metadata.state_dict_metadata) >= {"torch.bool", "nested.text"}


def test_interrupts_at_random_moments_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """Real signals: what is there is whole, and the next save and load work."""
    done = run_python(
        f"""
        import logging, random, signal, time, torch
        import torch.distributed.checkpoint as dcp
        from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
        logging.disable(logging.CRITICAL)
        armed = False
        def interrupt(*_):
            global armed
            if armed:  # one that comes later comes too late, and does nothing
                armed = False
                raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        moments = random.Random(3)
        place = {str(tmp_path)!r}
        def save(value):
            state = {{"a": torch.full((300_000,), float(value)), "n": value}}
            dcp.save(state, storage_writer=NvmeStorageWriter(place), no_dist=True)
        def load():
            state = {{"a": torch.zeros(300_000), "n": None}}
            dcp.load(state, storage_reader=NvmeStorageReader(place), no_dist=True)
            assert bool((state["a"] == state["n"]).all()), state
            return state["n"]
        save(0)
        load()
        trial = interrupted = 0
        took = 0.05
        while trial < 40 or interrupted < 6:
            trial += 1
            try:
                armed = True
                began = time.perf_counter()
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0005, 1.2 * took))
                save(trial)
                load()
                armed = False
                took = time.perf_counter() - began
            except (KeyboardInterrupt, dcp.CheckpointException):
                armed = False
                interrupted += 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert load() in range(trial + 1)
        save(-1)
        assert load() == -1
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    state, path, _ = saved(tmp_path)
    path.unlink()
    with refused(FileNotFoundError, match=re.escape(str(path))):
        load(state, tmp_path)


@pytest.mark.parametrize("name", ["large", "small"])
def test_a_file_that_is_cut_off_is_refused(name: str, tmp_path: Path) -> None:
    state, path, metadata = saved(tmp_path)
    info = info_of(metadata, name)
    os.truncate(path, info.offset + info.length - 10)
    with refused(nvmeio.IntegrityError, match="item '(large|small)' lies at bytes"):
        load(state, tmp_path)


@pytest.mark.parametrize("name", ["large", "small"])
def test_a_damaged_item_is_named(name: str, tmp_path: Path) -> None:
    state, path, metadata = saved(tmp_path)
    info = info_of(metadata, name)
    damage(path, info.offset + info.length - 30, b"\0" * 30)
    with refused(nvmeio.IntegrityError, match=f"{re.escape(str(path))}: item '{name}'"):
        load(state, tmp_path)


@pytest.mark.parametrize("name", ["large", "small"])
def test_items_that_lie_are_refused(name: str, tmp_path: Path) -> None:
    """The metadata's places and shapes are checked against the items."""
    state, _, metadata = saved(tmp_path)
    index = next(index for index in metadata.storage_data if index.fqn == name)
    whole = metadata.storage_data[index]
    for wrong, told in [
        (dataclasses.replace(whole, length=whole.length - 1), "item '"),
        (dataclasses.replace(whole, length=whole.length + 10**9), "lies at bytes"),
        (dataclasses.replace(whole, offset=-5), "lies at bytes"),
        (dataclasses.replace(whole, offset=whole.offset + 64), "item '"),
        (dataclasses.replace(whole, length=0), "no zip archive|begins at byte"),
    ]:
        metadata.storage_data[index] = wrong
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with refused(nvmeio.IntegrityError, match=told):
            load(state, tmp_path)


def test_items_that_overlap_are_refused(tmp_path: Path) -> None:
    state, _, metadata = saved(tmp_path)
    small, large = info_of(metadata, "small"), info_of(metadata, "large")
    for index, info in metadata.storage_data.items():
        if info is small:
            metadata.storage_data[index] = dataclasses.replace(info, offset=large.offset + 100)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with refused(nvmeio.IntegrityError, match=r"item 'small' begins at byte .* 'large'"):
        load(state, tmp_path)


@pytest.mark.parametrize("shape", [(700, 601), (701, 600), (420_000,)])
def test_a_tensor_smaller_than_the_metadata_says_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    state, _, metadata = saved(tmp_path)
    other = save({"large": torch.randn(shape)}, tmp_path / "other")
    info = info_of(other, "large")
    (index,) = (index for index in metadata.storage_data if index.fqn == "large")
    metadata.storage_data[index] = dataclasses.replace(info, relative_path="other/__0_0.distcp")
    metadata.state_dict_metadata["large"].size = torch.Size([700, 600])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if len(shape) == 2:  # a larger one has what is asked for
        assert load(state, tmp_path)["large"].shape == (700, 600)
        return
    with refused(nvmeio.IntegrityError, match=r"is a tensor of \(420000,\)"):
        load(state, tmp_path)


def test_an_item_that_metadata_does_not_place_is_named(tmp_path: Path) -> None:
    state, _, metadata = saved(tmp_path)
    index = next(index for index in metadata.storage_data if index.fqn == "small")
    del metadata.storage_data[index]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with refused(nvmeio.IntegrityError, match="does not say where 'small' lies"):
        load(state, tmp_path)


def test_a_forbidden_global_in_an_item_is_refused(tmp_path: Path) -> None:
    """Items are unpickled with weights_only, as torch's reader does."""
    state, path, metadata = saved(tmp_path)

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("exit 1",)

    buffer = io.BytesIO()
    torch.save([Evil(), torch.randn(20)], buffer)
    index = next(index for index in metadata.storage_data if index.fqn == "small")
    info = metadata.storage_data[index]
    with path.open("ab") as file:
        offset = file.tell()
        file.write(buffer.getvalue())
    metadata.storage_data[index] = dataclasses.replace(
        info, offset=offset, length=len(buffer.getvalue())
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with refused(pickle.UnpicklingError, match="system"):
        load(state, tmp_path)


def test_a_failed_read_names_file_and_item(tmp_path: Path) -> None:
    state, path, _ = saved(tmp_path)
    large = 1 << 19

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if kind == "pread" and nbytes > large else 0

    with (
        nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle,
        refused(nvmeio.TransferError, match="read for item 'large'") as told,
    ):
        load(state, tmp_path, handle=handle)
    assert (told[0].errno, told[0].path) == (errno.EIO, str(path))


def test_a_target_of_another_size_is_refused(tmp_path: Path) -> None:
    state, _, _ = saved(tmp_path)

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            return super().resolve_tensor(read_item)[:-1]

    with refused(ValueError, match=r"the planner gave a tensor of \(699, 600\)"):
        dcp.load(
            {"large": blank(state["large"])},
            storage_reader=NvmeStorageReader(tmp_path),
            planner=Planner(),
        )


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(nvmeio.TransferError, match="mkdir"):
        save({"w": torch.ones(3)}, tmp_path / "file" / "checkpoint")


def test_other_formats_are_refused() -> None:
    formats = pytest.importorskip("torch.distributed.checkpoint.filesystem").SerializationFormat
    NvmeStorageWriter("x", serialization_format=formats.TORCH_SAVE)
    with pytest.raises(ValueError, match="TORCH_SAVE"):
        NvmeStorageWriter("x", serialization_format=formats.SAFETENSORS)
    with pytest.raises(ValueError, match="thread_count"):
        NvmeStorageWriter("x", thread_count=0)


def test_what_is_no_switch_is_refused() -> None:
    with pytest.raises(TypeError, match="cache_staged_state_dict must be true or false, not 2"):
        NvmeStorageWriter("x", cache_staged_state_dict=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sync_files must be true or false, not 4"):
        NvmeStorageWriter("x", True, 4)  # the place of thread_count once


# The contract with torch


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(NvmeStorageWriter, dcp.FileSystemWriter), (NvmeStorageReader, dcp.FileSystemReader)],
)
def test_arguments_and_attributes_are_those_of_torch(
    ours: Any, theirs: Any, tmp_path: Path
) -> None:
    wanted = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted
    mine, stock = ours(tmp_path), theirs(tmp_path)
    public = {name for name in dir(stock) if not name.startswith("_")}
    assert not public - set(dir(mine))
    for name in public - set(vars(stock)):
        expected = getattr(theirs, name)
        if callable(expected):
            wanted = list(inspect.signature(expected).parameters)
            assert list(inspect.signature(getattr(ours, name)).parameters) == wanted, name
    for name in vars(stock):
        found, expected = getattr(mine, name), getattr(stock, name)
        assert type(found) is type(expected), name
        if isinstance(expected, (bool, int, Path, dict, type(None))):
            assert found == expected, name
    assert len(mine.save_id if "save_id" in vars(stock) else mine.load_id) == 36


def test_ids_are_those_of_torch(tmp_path: Path) -> None:
    writer, reader = NvmeStorageWriter(tmp_path / "a"), NvmeStorageReader(tmp_path / "a")
    first = writer.storage_meta()
    assert first.checkpoint_id == tmp_path / "a" == reader.checkpoint_id
    state = {"w": torch.randn(5)}
    dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert writer.storage_meta().save_id != first.save_id
    assert files_of(tmp_path) == {"b"}
    found = blank(state)
    dcp.load(found, storage_reader=reader, checkpoint_id=tmp_path / "b")
    assert_same(found, state)
    metadata = reader.read_metadata()
    assert metadata.storage_meta.save_id == writer.storage_meta().save_id
    assert metadata.storage_meta.load_id
    assert NvmeStorageWriter.validate_checkpoint_id(tmp_path)
    assert not NvmeStorageReader.validate_checkpoint_id("s3://bucket/x")


def test_metadata_is_that_of_torchs_writer(tmp_path: Path) -> None:
    state = every_form()
    ours = save(state, tmp_path / "ours")
    theirs = dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)
    assert {type(info) for info in ours.storage_data.values()} == {
        type(info) for info in theirs.storage_data.values()
    }


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """What AsyncCheckpointerType.PROCESS does with it."""
    writer = pickle.loads(pickle.dumps(NvmeStorageWriter(tmp_path, thread_count=2)))
    state = {"w": torch.randn(5), "v": torch.randn(6)}
    dcp.save(state, storage_writer=writer)
    assert_same(load(state, tmp_path), state)


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.randn(900, 900), "b": torch.randn(3), "step": 7}
    kept = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
    future = dcp.async_save(state, storage_writer=NvmeStorageWriter(tmp_path), no_dist=True)
    state["w"].zero_()
    future.result(timeout=60)
    assert_same(load(kept, tmp_path), kept)


@pytest.mark.parametrize("kind", [NvmeStorageWriter, dcp.FileSystemWriter])
def test_staged_memory_is_kept_where_that_is_asked_for(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused, with the way to torch's own stager."""
    if not torch.cuda.is_available():  # what torch asks for is page-locked
        monkeypatch.setattr(staging, "_create_cpu_state_dict", unlocked)
    writer = kind(tmp_path / "none", cache_staged_state_dict=True)
    assert writer.state_dict_cache is None
    kept = None
    for step in range(2):
        state = {"w": torch.full((300, 300), float(step))}
        future = dcp.async_save(
            state, storage_writer=writer, checkpoint_id=tmp_path / str(step), no_dist=True
        )
        state["w"].fill_(7)
        future.result(timeout=60)
        found = load(state, tmp_path / str(step))
        assert_same(found, {"w": torch.full((300, 300), float(step))})
        assert kept is None or writer.state_dict_cache["w"].data_ptr() == kept
        kept = writer.state_dict_cache["w"].data_ptr()


def unlocked(state: Any, pin_memory: bool) -> Any:
    """Torch's own function without page-locking."""
    return _state_dict_utils._create_cpu_state_dict(state)


def test_a_failed_async_save_is_told(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(5) for number in range(4)}
    future = dcp.async_save(
        state, storage_writer=NvmeStorageWriter(tmp_path), planner=Failing(), no_dist=True
    )
    with refused(ArithmeticError):
        future.result(timeout=60)
    assert ".metadata" not in files_of(tmp_path)


def test_ranks_may_save_without_each_other(tmp_path: Path) -> None:
    """``use_collectives=False``: metadata of its own for each rank."""
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("this torch saves with collectives only")
    for step in range(2):
        state = {"w": torch.randn(300, 300) + step}
        dcp.save(state, storage_writer=NvmeStorageWriter(tmp_path), use_collectives=False)
        assert len(files_of(tmp_path)) == 2
        assert "__0.metadata" in files_of(tmp_path)
        for reader in (NvmeStorageReader, dcp.FileSystemReader):
            found = blank(state)
            dcp.load(found, storage_reader=reader(tmp_path))
            assert_same(found, state)


def test_memory_of_a_save_is_bounded(tmp_path: Path) -> None:
    done = run_python(
        """
        import sys, warnings
        import torch
        import torch.distributed.checkpoint as dcp
        from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
        warnings.simplefilter("ignore")
        # Not ru_maxrss: that begins with what the process had which started this one.
        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if "VmHWM" in line) >> 10
        dcp.save({"w": torch.ones(1 << 18)}, storage_writer=NvmeStorageWriter(sys.argv[1] + "/1"))
        state = {f"w{n}": torch.ones(1 << 24) for n in range(8)}  # 512 MiB
        before = peak()
        dcp.save(state, storage_writer=NvmeStorageWriter(sys.argv[1] + "/2"))
        after_save = peak()
        dcp.load(state, storage_reader=NvmeStorageReader(sys.argv[1] + "/2"))
        print(after_save - before, peak() - before)
        """.replace("sys.argv[1]", repr(str(tmp_path))),
        fresh=True,
    )
    assert done.returncode == 0, done.stderr
    save_mib, both_mib = map(int, done.stdout.split())
    assert save_mib <= 256
    assert both_mib <= 256


@pytest.mark.gpu
def test_tensors_of_a_gpu_come_and_go(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    state = {"w": torch.randn(3000, 3000, device="cuda"), "b": torch.randn(3, device="cuda")}
    save(state, tmp_path)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=NvmeStorageReader(tmp_path))
    assert all(torch.equal(found[name], state[name]) for name in state)
