"""Ranks that stream one model together: real processes with gloo, 2 and 4 of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint._ranks import running_ranks
from hypothesis import given
from hypothesis import strategies as st
from inference import _models as models
from typer.testing import CliRunner

import nvmeio
from nvmeio import cli
from nvmeio._formats import packed_index
from nvmeio._pages import PAGE_BYTES
from nvmeio.checkpoint.verifying import verify
from nvmeio.inference import pack
from nvmeio.inference._parallel import rank_reader
from nvmeio.inference._plan import units
from nvmeio.inference._plan.slot_layout import Read

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)


def llama() -> Any:
    return models.llama(layers=3, width=256)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., None]]:
    """Runs a function of `_stream_rank` on so many ranks."""
    script = str(Path(__file__).parent / "_stream_rank.py")
    with running_ranks(script) as run:
        yield lambda world, work, *rest, **options: run(world, f"stream_{work}", *rest, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.saved(llama, tmp_path / "model")
    return tmp_path


# Without processes


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200_000)), max_size=8), st.integers(1, 9)
)
def test_shares_are_all_of_a_unit_once_and_even(found: list[tuple[int, int]], ranks: int) -> None:
    reads, at = [], 0
    for file, nbytes in found:
        reads.append(Read(file, at + 12_345, at + 12_345 + nbytes, at))
        at += nbytes + 777
    cut = rank_reader.shares(reads, ranks)
    assert len(cut) == ranks
    wanted = [
        (r.file, r.start + i, r.at + i) for r in reads for i in range(0, r.end - r.start, 997)
    ]
    got = {(part.file, part.start, part.end, part.at) for each in cut for part in each}
    for file, start, place in wanted:
        assert (
            sum(f == file and s <= start < e and a + start - s == place for f, s, e, a in got) == 1
        )
    sizes = [sum(part.end - part.start for part in each) for each in cut]
    assert sum(sizes) == sum(nbytes for _, nbytes in found)
    assert max(sizes) - min(sizes) <= 2 * PAGE_BYTES * (1 + len(reads))


@given(st.integers(0, 300_000), st.integers(1, 70))
def test_what_is_packed_is_what_is_read(pages: int, ranks: int) -> None:
    nbytes = pages * PAGE_BYTES
    cut = rank_reader.shares([Read(0, PAGE_BYTES, PAGE_BYTES + nbytes, 0)], ranks)
    places = packed_index.cuts(nbytes, ranks)
    for rank, each in enumerate(cut):
        spans = [(read.start - PAGE_BYTES, read.end - PAGE_BYTES) for read in each]
        assert spans == [
            (low, high) for low, high in [(places[rank], places[rank + 1])] if low < high
        ]


def test_who_is_behind_is_served_first() -> None:
    for wanted, first in (([5, 5], 5), ([4, 3], 3), ([0, 9], 9), ([1, 9, 0], 9), ([2, 7], 2)):
        assert rank_reader.choose(wanted, 10) == first
    assert rank_reader.choose([0], 1) == 0


# With processes


@pytest.mark.parametrize(
    ("world", "packed"), [(2, "model"), (4, "model"), (2, "parts"), (4, "parts")]
)
def test_each_rank_reads_its_share_of_each_layer(
    world: int, packed: str, ranks: Any, folder: Path
) -> None:
    if packed == "parts":
        report = pack(folder / "model", folder / "parts", ranks=world)
        whole = (folder / "model" / "model.safetensors").stat().st_size
        assert report.bytes_written < 1.1 * whole
        for rank in range(world):
            directory = folder / "parts" / f"rank-{rank}"
            on_disk = (directory / "model.safetensors.part").stat().st_blocks * 512
            assert on_disk < 1.3 * whole / world, "it holds what is another rank's"
    ranks(world, "shares", folder, packed=packed)


@pytest.mark.parametrize(("world", "blocks"), [(2, True), (4, False)])
def test_other_prompts_and_other_numbers_of_passes(
    world: int, blocks: bool, ranks: Any, folder: Path
) -> None:
    ranks(world, "prompts", folder, blocks=blocks)


def test_ranks_train_over_a_base_each(ranks: Any, folder: Path) -> None:
    """DistributedDataParallel wrote over the base, and the error spoke of merged adapters only."""
    ranks(2, "trains", folder)


def test_kinds_of_models(ranks: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.saved(models.gpt2, folder / "gpt2")
    models.saved(models.mixtral, folder / "mixtral")
    pack(folder / "gpt2", folder / "gpt2-parts", ranks=2)
    pack(folder / "model", folder / "quantised", ranks=2, quant_bits=8)
    pack(folder / "model", folder / "quantised alone", quant_bits=8)
    # A head of 2 MiB, which is read by its rows' shares; packed it is small, and all ranks have it.
    models.saved(lambda: models.llama(layers=8, width=256, vocab_size=2048), folder / "head")
    monkeypatch.setattr(units, "SMALL_BYTES", 1 << 20)  # as it is but in tests
    pack(folder / "head", folder / "small head", ranks=2, quant_bits=4)
    pack(folder / "head", folder / "small head alone", quant_bits=4)
    ranks(2, "kinds", folder)


def test_a_rank_that_fails(ranks: Any, folder: Path) -> None:
    pack(folder / "model", folder / "parts", ranks=2)
    ranks(2, "fail", folder)


@pytest.mark.parametrize(("world", "victim", "packed"), [(2, 1, "parts"), (4, 0, "model")])
def test_a_rank_is_killed(world: int, victim: int, packed: str, ranks: Any, folder: Path) -> None:
    if packed == "parts":
        pack(folder / "model", folder / "parts", ranks=world)
    ranks(world, "killed", folder, victim=victim, packed=packed)


def test_a_rank_that_hangs(ranks: Any, folder: Path) -> None:
    ranks(2, "hangs", folder)


def test_a_rank_that_stands_still_in_a_pass(ranks: Any, folder: Path) -> None:
    ranks(2, "stopped", folder)


def test_a_rank_is_interrupted(ranks: Any, folder: Path) -> None:
    ranks(2, "interrupted", folder)


def test_a_rank_drops_its_model(ranks: Any, folder: Path) -> None:
    ranks(2, "dropped", folder)


def test_ranks_with_parts_of_different_packings_are_refused(ranks: Any, folder: Path) -> None:
    pack(folder / "model", folder / "parts", ranks=2)
    pack(folder / "model", folder / "four", ranks=4)
    other = folder / "other"
    models.saved(llama, other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"other")
    pack(other, folder / "parts-of-other", ranks=2)
    ranks(2, "wrong", folder)


# Parts on disk


def test_parts_are_verified_and_taken_for_no_whole_model(folder: Path) -> None:
    result = CliRunner().invoke(
        cli.app, ["pack", str(folder / "model"), str(folder / "parts"), "--ranks", "2"]
    )
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(folder / "parts")) == ["rank-0", "rank-1"]
    part = folder / "parts" / "rank-1" / "model.safetensors.part"
    assert not verify(part).problems
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        nvmeio.load_safetensors(part.parent)
    with pytest.raises(OSError, match="model"):
        models.loaded(part.parent)
    with part.open("r+b") as file:
        at = os.lseek(file.fileno(), part.stat().st_size // 2, os.SEEK_DATA) + 100
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, at)[0] ^ 4]), at)
    (problem,) = verify(part).problems
    assert problem.record == "the part of rank 1 of 2"


def test_what_cannot_be_packed_for_ranks(tmp_path: Path) -> None:
    models.saved(models.mixtral, tmp_path / "model")
    with pytest.raises(ValueError, match="each rank of a mixture"):
        pack(tmp_path / "model", tmp_path / "parts", ranks=2)
    with pytest.raises(ValueError, match="ranks must be"):
        pack(tmp_path / "model", tmp_path / "parts", ranks=0)
    assert os.listdir(tmp_path) == ["model"]
