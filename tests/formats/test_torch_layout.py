"""The archive around the storages: the same bytes as torch's own writer makes."""

from __future__ import annotations

import io
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nvmeio
from nvmeio._formats.torch_archives import torch_layout as torch_layout_module
from nvmeio._formats.torch_archives.torch_layout import FileLayout, TorchRecords, plan_layout
from nvmeio.errors import BackendUnavailableError, IntegrityError


def file_of(layout: FileLayout) -> bytes:
    """The whole file, but for the CRCs of storages."""
    whole = bytearray(layout.nbytes)
    for piece in layout.pieces:
        whole[piece.offset : piece.end] = piece.data
    for record in layout.records:
        assert isinstance(record.data, torch.Tensor)
        whole[record.offset : record.end] = record.data.numpy().tobytes()
    return bytes(whole)


def planned(state: object) -> bytes:
    return file_of(plan_layout(state))


def written(state: object) -> bytes:
    """The same by torch's own writer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_layout_module, "agrees", lambda *options: False)
        return planned(state)


@pytest.fixture(name="asked")
def _asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of records of each archive that torch's own writer makes."""
    asked: list[int] = []
    real = TorchRecords.written

    def watched(told: TorchRecords) -> torch_layout_module.Skeleton:
        asked.append(len(told.sizes))
        return real(told)

    monkeypatch.setattr(TorchRecords, "written", watched)
    return asked


def by_torch(state: object) -> dict[str, bytes]:
    """The records that torch.save writes, but for the alignment and what follows from it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return records_of(buffer.getvalue())


def records_of(data: bytes) -> dict[str, bytes]:
    leave_out = ("serialization_id", ".storage_alignment")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found: dict[str, bytes] = {}
        for entry in archive.infolist():
            if not entry.filename.endswith(leave_out):
                with archive.open(entry) as record:
                    record._expected_crc = None  # type: ignore[attr-defined]
                    found[entry.filename] = record.read()
        return found


class Training:
    """A state that changes as states do, and in ways that they do not."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
        self.moments = [torch.zeros_like(p) for p in self.net.parameters()]
        self.step: Any = 1
        self.text = "a"
        self.more: dict[str, Any] = {"rates": [0.1, 0.2], "flags": (True, None)}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "moments": self.moments,
            "parameters": list(self.net.parameters()),
            "step": self.step,
            "text": self.text,
            "more": OrderedDict(self.more),
        }

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.add_(1)

    def count(self) -> None:
        self.step = self.step + 1 if isinstance(self.step, int) else 1

    def count_far(self) -> None:
        self.step = self.random.choice([300, 70_000, 1 << 40, 1.5, True, "one"])

    def say(self) -> None:
        self.text = self.random.choice(["b", "c", "step", "cpu", "ü", "storage"])

    def change_a_value(self) -> None:
        self.more["rates"] = [self.random.random(), 0.2]

    def other_memory(self) -> None:
        self.moments[1] = self.moments[1].clone()

    def reshape(self) -> None:
        self.moments[0] = self.moments[0].reshape(-1).reshape(-1, 2)

    def transpose(self) -> None:
        self.moments[0] = self.moments[0].t()

    def tie(self) -> None:
        self.moments[3] = self.moments[1][:3]

    def untie(self) -> None:
        self.moments[3] = torch.ones(3)

    def other_dtype(self) -> None:
        dtypes = [torch.int32, torch.float32, torch.float64, torch.uint16]
        self.moments[2] = torch.ones(12, dtype=self.random.choice(dtypes))

    def same_object_twice(self) -> None:
        self.moments[2] = self.moments[0]

    def swap_names(self) -> None:
        self.moments[0], self.moments[1] = self.moments[1], self.moments[0]

    def gradients(self) -> None:
        self.moments[3] = torch.ones(3, requires_grad=True)

    def conjugate(self) -> None:
        self.moments[3] = torch.ones(3, dtype=torch.complex64).conj()

    def empty(self) -> None:
        self.moments[3] = torch.zeros(0)

    def attribute(self) -> None:
        self.moments[3] = torch.ones(3)
        self.moments[3].told = self.step  # type: ignore[attr-defined]


CHANGES = [name for name in vars(Training) if not name.startswith("_") and name != "state"]


@given(seed=st.integers(0, 1 << 30), changes=st.lists(st.sampled_from(CHANGES), max_size=6))
@settings(max_examples=15)
def test_every_state_is_laid_out_as_torchs_writer_does(seed: int, changes: list[str]) -> None:
    training = Training(seed)
    for change in ["count", *changes, "train"]:
        change_it: Callable[[], None] = getattr(training, change)
        change_it()
    state = training.state()
    data = planned(state)
    assert data == written(state)
    assert records_of(data) == by_torch(state)


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: str) -> None:
    """Each alone, so that one that is missed is not hidden by another."""
    training = Training(0)
    getattr(training, change)()
    state = training.state()
    data = planned(state)
    assert data == written(state)
    assert records_of(data) == by_torch(state)


def test_torchs_writer_is_asked_of_a_few_records_once(asked: list[int]) -> None:
    torch_layout_module.agrees.cache_clear()
    for _ in range(3):
        planned(Training(0).state())
    assert asked == [10]


def test_a_writer_that_writes_otherwise_is_asked_itself(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another torch: what is put together here is not believed."""
    state = Training(0).state()
    usual = planned(state)
    torch_layout_module.agrees.cache_clear()
    monkeypatch.setattr(torch_layout_module, "_VERSION", b"4\n")
    try:
        assert planned(state) == usual
    finally:
        torch_layout_module.agrees.cache_clear()
    assert len(asked) == 2


def test_torchs_own_options_are_seen() -> None:
    """Without CRCs torch makes other numbers of its archives."""
    state = Training(0).state()
    usual = planned(state)
    torch.serialization.set_crc32_options(False)
    try:
        without = planned(state)
        assert without == written(state)
        assert records_of(without) == by_torch(state)
    finally:
        torch.serialization.set_crc32_options(True)
    assert without != usual == planned(state)


@pytest.mark.parametrize("nbytes", [0, 4, 400])
def test_a_storage_that_is_resized_after_it_was_pickled_is_told(nbytes: int) -> None:
    """The file said one size in its pickle, and had a record of another: nothing could load it."""
    state = [torch.ones(10), torch.ones(20)]
    pickling = torch_layout_module.pickled(state)
    state[1].untyped_storage().resize_(nbytes)
    with pytest.raises(IntegrityError, match=r"archive/data/1.*was given back") as raised:
        pickling.layout()
    assert (raised.value.expected, raised.value.found) == (80, nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("alignment", [64, 4096])
def test_more_records_than_the_end_record_can_count(alignment: int) -> None:
    told = TorchRecords(alignment)
    told.write_record("data.pkl", b"1", 1)
    told.write_record("byteorder", b"little", 6)
    for number in range(0x10000):
        told.write_record_metadata(f"data/{number}", number % 3)
    assert told.skeleton() == told.written()


@pytest.mark.parametrize("alignment", [64, 4096])
def test_archives_of_more_than_32_bits(alignment: int) -> None:
    """The directory too lies past 4 GiB; nothing of that size is allocated."""
    for sizes in ([(1 << 32) - 1], [1 << 32], [5 << 30, 1, 6 << 30, 0, 2]):
        told = TorchRecords(alignment)
        told.write_record("byteorder", b"little", 6)
        for number, nbytes in enumerate(sizes):
            told.write_record_metadata(f"data/{number}", nbytes)
        assert told.skeleton() == told.written()


def test_a_torch_without_the_seam_saves_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_layout_module, "has_seam", lambda: False)
    state = {"a": torch.arange(1000), "name": "n"}
    nvmeio.save(state, tmp_path / "a.pt")
    assert "saving through torch.save" in caplog.text
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], state["a"])


def test_records_that_are_told_twice_or_in_part_are_refused() -> None:
    told = TorchRecords(64)
    told.write_record("a", b"12", 2)
    for name, data, nbytes in (("a", b"12", 2), ("b", b"12", 1)):
        with pytest.raises(BackendUnavailableError):
            told.write_record(name, data, nbytes)
