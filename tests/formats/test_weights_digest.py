"""Weights in files are told by what they hold, and not read again where that cannot be another."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import kv_weights
from safetensors.torch import load_file, save_file

from nvmeio._formats import weights_digest
from nvmeio._formats.weights_digest import ChangingError, look_at


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each file that is read; what is found of one is remembered at once."""
    monkeypatch.setattr(weights_digest, "_SETTLED_NS", -(10**10))
    calls: list[int] = []
    advise = os.posix_fadvise  # once for each file that is read whole

    def note(fd: int, *what: int) -> None:
        calls.append(fd)
        advise(fd, *what)

    monkeypatch.setattr(os, "posix_fadvise", note)
    return calls


def test_what_was_read_once_is_remembered(tmp_path: Path, read: list[int]) -> None:
    model, known = kv_weights.made(tmp_path / "model"), tmp_path / "known.json"
    found = look_at(model, known=known)
    assert (found.files, found.how, len(read)) == (1, "full", 1)
    assert look_at(model, known=known) == found
    assert len(read) == 1
    kv_weights.made(model)  # the same again, by another writing
    assert look_at(model, known=known).digest == found.digest
    assert len(read) == 2
    stat = os.stat(model / kv_weights.NAME)
    kv_weights.change(model, "one element")
    os.utime(model / kv_weights.NAME, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert look_at(model, known=known).digest != found.digest  # by a time that nobody can set


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    """It may be written again within the same tick of its times."""
    model, known = kv_weights.made(tmp_path / "model"), tmp_path / "known.json"
    look_at(model, known=known)
    assert not known.exists()


@pytest.mark.parametrize("spoil", ["text", "list", "pipe", "link"])
def test_what_is_remembered_in_a_foreign_file_counts_for_nothing(
    spoil: str, tmp_path: Path, read: list[int]
) -> None:
    model, known = kv_weights.made(tmp_path / "model"), tmp_path / "known.json"
    spoilers: dict[str, Callable[[], Any]] = {
        "text": lambda: known.write_text("no JSON"),
        "list": lambda: known.write_text("[1]"),
        "pipe": lambda: os.mkfifo(known),
        "link": lambda: known.symlink_to("/dev/zero"),
    }
    spoilers[spoil]()
    assert look_at(model, known=known).digest == look_at(model).digest


def test_samples_of_each_tensor_see_training_and_merging(tmp_path: Path) -> None:
    model = kv_weights.made(tmp_path / "model")
    file = model / kv_weights.NAME
    weights = load_file(file)
    big = {
        f"{n}.{name}": each.repeat(4, 4)
        for name, each in weights.items()
        for n in range(2)
        if each.dim() == 2
    }
    save_file(big, file)

    def digest() -> str:
        os.utime(file, ns=(0, 0))  # it shall not be the time that tells
        return look_at(model, "samples").digest

    before = digest()
    assert digest() == before
    for name, weight in big.items():
        changed = {**big, name: weight + torch.randn(1, weight.shape[1]).to(weight.dtype) * 0.01}
        save_file(changed, file)
        assert digest() != before, name
    save_file(big, file)
    assert digest() == before
    assert look_at(model, "samples").digest == before
    os.utime(file)
    assert look_at(model, "samples").digest != before  # written by somebody: it may be another


def test_samples_lie_from_the_first_byte_to_the_last() -> None:
    assert list(weights_digest.samples(100, 4, 10)) == [0, 30, 60, 90]
    assert list(weights_digest.samples(25, 4, 10)) == [0, 7, 15]  # all bytes
    assert list(weights_digest.samples(9, 4, 10)) == [0]
    assert list(weights_digest.samples(0, 4, 10)) == []
    assert list(weights_digest.samples(100, 1, 10)) == [45]


def test_what_is_being_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kv_weights.made(tmp_path / "model")

    def meanwhile(*_: int) -> None:
        with (model / kv_weights.NAME).open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(os, "posix_fadvise", meanwhile)
    with pytest.raises(ChangingError, match="was written to while it was read"):
        look_at(model)


def test_pickled_weights_and_single_files_count_as_well(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(100_000)}, tmp_path / "pytorch_model.bin")
    found = {how: look_at(tmp_path, how).digest for how in ("full", "samples")}
    assert look_at(tmp_path / "pytorch_model.bin").nbytes == look_at(tmp_path).nbytes
    torch.save({"w": torch.ones(100_000)}, tmp_path / "pytorch_model.bin")
    os.utime(tmp_path / "pytorch_model.bin", ns=(0, 0))
    assert all(look_at(tmp_path, how).digest != before for how, before in found.items())


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="has no weights"):
            look_at(path)
