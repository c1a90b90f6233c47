"""Ranks that load one checkpoint together: real processes with gloo, 2 and 4 of them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint._rank_program import own, replicated
from checkpoint._ranks import running_ranks
from hypothesis import given
from hypothesis import strategies as st

import nvmeio
from nvmeio._distributed.shared_spans import rounds
from nvmeio._pages import PAGE_BYTES

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., None]]:
    """Runs a function of `_loading_rank` on so many ranks."""
    with running_ranks("_loading_rank.py") as run:
        yield lambda world, work, *rest, **options: run(world, f"load_{work}", *rest, **options)


@given(
    st.lists(st.integers(1, 60), max_size=12),
    st.integers(1, 9),
    st.integers(1, 20),
)
def test_rounds_are_all_of_it_once_and_even(pages: list[int], world: int, most: int) -> None:
    sizes = [each * PAGE_BYTES for each in pages]
    found = list(rounds(sizes, world, most * PAGE_BYTES))
    covered = [0] * len(sizes)
    mine = [0] * world
    for parts in found:
        in_round = [0] * world
        for part in parts:
            assert part.start == covered[part.region] and part.start < part.end
            assert part.start % PAGE_BYTES == part.end % PAGE_BYTES == 0
            covered[part.region] = part.end
            in_round[part.rank] += part.end - part.start
        assert max(in_round) <= most * PAGE_BYTES
        assert max(in_round) - min(in_round) <= PAGE_BYTES
        mine = [a + b for a, b in zip(mine, in_round, strict=True)]
    assert covered == sizes
    assert max(mine) - min(mine) <= PAGE_BYTES  # only the last round is not full


@pytest.mark.parametrize("world", [2, 4])
def test_each_byte_is_read_once_an_equal_part_by_each(
    world: int, ranks: Any, tmp_path: Path
) -> None:
    """Counted below the handle, in few parts and in many."""
    ranks(world, "shares", tmp_path)
    whole = os.stat(tmp_path / "state.pt").st_size
    for turn in range(2):
        files = [tmp_path / f"read-{turn}-{rank}.json" for rank in range(world)]
        reads = [json.loads(file.read_text()) for file in files]
        counts = [sum(nbytes for _, nbytes in each) for each in reads]
        assert all(abs(count - whole / world) <= 0.01 * whole / world for count in counts), counts
        everything = sorted((at, at + nbytes) for each in reads for at, nbytes in each)
        for (_, end), (start, _) in itertools.pairwise(everything):
            assert start >= end, "a byte was read twice"


def test_every_kind_of_state_and_place(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "kinds", tmp_path)


@pytest.mark.parametrize("world", [2, 4])
def test_through_chunks_to_a_device(world: int, ranks: Any, tmp_path: Path) -> None:
    ranks(world, "chunks", tmp_path)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.stress)])
def test_a_rank_that_fails(world: int, ranks: Any, tmp_path: Path) -> None:
    ranks(world, "fail", tmp_path)


def test_files_that_differ_and_damaged_ones(ranks: Any, tmp_path: Path) -> None:
    ranks(4, "files", tmp_path)


def test_a_call_that_one_rank_is_refused(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "refused", tmp_path)


def test_a_rank_that_does_not_come(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "late", tmp_path)


@pytest.mark.parametrize(("world", "victim"), [(2, 1), (4, 0), (4, 2)])
def test_a_rank_is_killed(world: int, victim: int, ranks: Any, tmp_path: Path) -> None:
    ranks(world, "killed", tmp_path, victim=victim)


def test_a_rank_that_hangs(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "hangs", tmp_path)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_is_interrupted(world: int, ranks: Any, tmp_path: Path) -> None:
    ranks(world, "interrupted", tmp_path)


@pytest.mark.parametrize("layout", ["one", "per_rank"])
def test_a_checkpointer_restores_together(layout: str, ranks: Any, tmp_path: Path) -> None:
    ranks(2, "restore", tmp_path, layout)


def test_another_number_of_ranks_restores_together(ranks: Any, tmp_path: Path) -> None:
    for layout, states in (("one", replicated), ("per_rank", own)):
        folder = tmp_path / layout
        folder.mkdir()
        if states is replicated:
            with nvmeio.Checkpointer(folder / "checkpoints") as checkpointer:
                checkpointer.save_sync(replicated(6), 6)
            continue
        step = folder / "checkpoints" / "step-00000006"
        step.mkdir(parents=True)
        sizes = {}
        for rank in range(2):
            name = f"rank-{rank:05d}.pt"
            torch.save(own(6, rank), step / name)
            sizes[name] = os.stat(step / name).st_size
        (step / "index.json").write_text(json.dumps({"format": 1, "step": 6, "files": sizes}))
    ranks(4, "restore_more", tmp_path)


def test_a_checkpoint_that_is_replaced_while_ranks_look(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "replaced", tmp_path)
