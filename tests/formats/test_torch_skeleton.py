"""What is kept of one save for the next: never a value, and the same bytes as without."""

from __future__ import annotations

import io
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeio._formats import torch_skeleton
from nvmeio._formats.torch_layout import FileLayout, plan_layout
from nvmeio._formats.torch_skeleton import KeptSkeleton, Records
from nvmeio.errors import BackendUnavailableError


def file_of(layout: FileLayout) -> bytes:
    """The whole file, but for the CRCs of storages."""
    whole = bytearray(layout.nbytes)
    for piece in layout.pieces:
        whole[piece.offset : piece.end] = piece.data
    for record in layout.records:
        assert isinstance(record.data, torch.Tensor)
        whole[record.offset : record.end] = record.data.numpy().tobytes()
    return bytes(whole)


def planned(state: object, kept: KeptSkeleton | None = None) -> bytes:
    return file_of(plan_layout(state, kept=kept))


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
def test_a_kept_plan_gives_the_bytes_of_a_fresh_one(seed: int, changes: list[str]) -> None:
    training, kept = Training(seed), KeptSkeleton()
    for change in ["count", *changes, "train"]:
        change_it: Callable[[], None] = getattr(training, change)
        change_it()
        state = training.state()
        again = planned(state, kept)
        assert again == planned(state)
        assert records_of(again) == by_torch(state)


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: str) -> None:
    """Each alone, between two saves, the second of which would take everything as it was."""
    training, kept = Training(0), KeptSkeleton()
    for _ in range(2):
        planned(training.state(), kept)
    getattr(training, change)()
    state = training.state()
    again = planned(state, kept)
    assert again == planned(state)
    assert records_of(again) == by_torch(state)


def test_the_second_plan_asks_torch_for_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    training, kept = Training(0), KeptSkeleton()
    planned(training.state(), kept)
    written: list[Records] = []
    monkeypatch.setattr(Records, "written", lambda self: written.append(self))
    training.train()
    training.count()
    data = planned(training.state(), kept)
    assert not written
    assert records_of(data) == by_torch(training.state())


def test_what_is_forgotten_is_made_anew() -> None:
    training, kept = Training(0), KeptSkeleton()
    first = planned(training.state(), kept)
    kept.forget()
    assert planned(training.state(), kept) == first


def test_torchs_own_options_are_seen() -> None:
    """Without CRCs torch makes other numbers of its archives."""
    state, kept = Training(0).state(), KeptSkeleton()
    planned(state, kept)
    torch.serialization.set_crc32_options(False)
    try:
        assert planned(state, kept) == planned(state)
    finally:
        torch.serialization.set_crc32_options(True)
    assert planned(state, kept) == planned(state)


def test_a_pickling_that_fails_leaves_the_plan_good() -> None:
    training, kept = Training(0), KeptSkeleton()
    planned(training.state(), kept)
    with pytest.raises(ZeroDivisionError):
        plan_layout([training.state(), Fails()], kept=kept)
    training.count()
    assert planned(training.state(), kept) == planned(training.state())


class Fails:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


def test_a_large_plan_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_skeleton, "_MOST_KEPT_BYTES", 100)
    training, kept = Training(0), KeptSkeleton()
    for _ in range(2):
        assert planned(training.state(), kept) == planned(training.state())
        assert kept._skeleton is None


def test_a_number_that_torch_makes_otherwise_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits are torch's own affair: where they are not as known, nothing is put in."""
    real = torch_skeleton._with_number
    monkeypatch.setattr(
        torch_skeleton,
        "_with_number",
        lambda made, contents: real(made, contents)._replace(nbytes=0),
    )
    training, kept = Training(0), KeptSkeleton()
    for _ in range(2):
        assert planned(training.state(), kept) == planned(training.state())
        assert kept._skeleton is None


def test_a_torch_without_the_seam_saves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvmeio._formats import torch_layout

    state = Training(0).state()
    usual = planned(state)
    monkeypatch.setattr(torch_layout, "has_seam", lambda: False)
    assert planned(state) == usual


def test_records_that_are_told_twice_or_in_part_are_refused() -> None:
    told = Records()
    told.write_record("a", b"12", 2)
    for name, data, nbytes in (("a", b"12", 2), ("b", b"12", 1)):
        with pytest.raises(BackendUnavailableError):
            told.write_record(name, data, nbytes)
