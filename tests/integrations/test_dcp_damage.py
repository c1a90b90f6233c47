"""DCP: what does not fit, is damaged, or is missing."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from integrations._dcp_states import State, blank, load, refused, save
from support import run_python
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import nvmeio
from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
from nvmeio.testing import FakeEngine

pytestmark = [
    # torch's, of every save and load without a process group, and of saving over a checkpoint
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


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
    with pytest.raises(nvmeio.IntegrityError, match=r"\.metadata: .*mkdir, which is not a class"):
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
