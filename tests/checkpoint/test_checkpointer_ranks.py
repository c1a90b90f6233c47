"""A Checkpointer of several ranks: real processes with gloo, 1, 2 and 4 of them."""

from __future__ import annotations

import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint._checkpointers import names
from checkpoint._rank_program import MIB, own, replicated, same
from checkpoint._ranks import running_ranks

import nvmeio
from nvmeio._formats.torch_archives.torch_layout import plan_layout
from nvmeio._formats.torch_archives.torch_writing import padded_nbytes
from nvmeio.checkpoint._multi_rank import agreement

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

LAYOUTS = ["one", "per_rank"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., None]]:
    """Runs a function of `_checkpointer_rank` on so many ranks."""
    with running_ranks("_checkpointer_rank.py") as run:
        yield run


def check_file(path: Path, wanted: Any) -> None:
    assert same(torch.load(path), wanted)
    assert same(torch.load(path, mmap=True), wanted)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


# Saving together


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_write_one_file(world: int, ranks: Any, tmp_path: Path) -> None:
    """Disjoint parts, evenly sized, of whole pages; together they are an ordinary checkpoint."""
    ranks(world, "save", tmp_path)
    folder = tmp_path / "checkpoints"
    assert names(folder) == ["latest", "step-00000005.pt", "step-00000006.pt"]
    check_file(folder / "latest", replicated(6))
    check_file(folder / "step-00000005.pt", replicated(5))
    layout = plan_layout(replicated(6))
    comment = len(b"nvmeio completed ") + 19  # says when it was completed
    assert os.stat(folder / "latest").st_size == layout.nbytes + comment
    with zipfile.ZipFile(folder / "latest") as archive:  # byte for byte what one process writes
        nvmeio.save(replicated(6), tmp_path / "alone.pt")
        with zipfile.ZipFile(tmp_path / "alone.pt") as alone:
            crcs = {info.filename.split("/", 1)[1]: info.CRC for info in alone.infolist()}
        found = {info.filename.split("/", 1)[1]: info.CRC for info in archive.infolist()}
        assert found == crcs

    parts = []
    for rank in range(world):
        blocks = json.loads((tmp_path / f"written-one-{world}-{rank}.json").read_text())
        assert all(at % 4096 == 0 and nbytes % 4096 == 0 for at, nbytes in blocks)
        # Rank 0 ends with the few pages whose checksums no part knew alone.
        start = min(at for at, _ in blocks) if rank else 0
        end = start
        for at, nbytes in sorted(blocks):
            if at == end:
                end += nbytes
        rest = [(at, nbytes) for at, nbytes in blocks if not start <= at < end]
        assert sum(nbytes for at, nbytes in blocks if start <= at < end) == end - start  # once
        assert not rest or rank == 0
        assert sum(nbytes for _, nbytes in rest) <= 64 << 10
        parts.append((start, end))
    assert [start for start, _ in parts[1:]] == [end for _, end in parts[:-1]]
    assert parts[0][0] == 0 and parts[-1][1] == padded_nbytes(layout)
    sizes = [end - start for start, end in parts]
    assert max(sizes) - min(sizes) <= 4096, sizes


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_write_a_file_each(world: int, ranks: Any, tmp_path: Path) -> None:
    ranks(world, "save", tmp_path, "per_rank")
    folder = tmp_path / "checkpoints"
    assert names(folder) == ["latest", "step-00000005", "step-00000006"]
    expected = ["index.json", *(f"rank-{rank:05d}.pt" for rank in range(world))]
    assert names(folder / "latest") == expected
    index = json.loads((folder / "latest" / "index.json").read_text())
    for rank in range(world):
        path = folder / "latest" / f"rank-{rank:05d}.pt"
        check_file(path, own(6, rank))
        assert index["files"][path.name] == os.stat(path).st_size
        check_file(folder / "step-00000005" / path.name, own(5, rank))


def test_any_number_of_ranks_restores(ranks: Any, tmp_path: Path) -> None:
    for layout in LAYOUTS:
        ranks(2, "save", tmp_path / layout, layout, store="file")
    for world in (1, 2, 4):
        ranks(world, "restore", tmp_path)
    alone = nvmeio.Checkpointer(tmp_path / "one" / "checkpoints")
    assert same(alone.restore(), replicated(6))
    alone = nvmeio.Checkpointer(tmp_path / "per_rank" / "checkpoints")
    assert same(alone.restore(), [own(6, rank) for rank in range(2)])
    assert same(alone.restore(5, rank=1), own(5, 1))


def test_another_number_of_ranks_goes_on(ranks: Any, tmp_path: Path) -> None:
    """Directories of more ranks are recycled: nothing of theirs is left in them."""
    for world in (4, 1, 2):
        ranks(world, "save", tmp_path, "per_rank")
        folder = tmp_path / "checkpoints"
        for name in ("step-00000005", "step-00000006"):
            assert len(names(folder / name)) == world + 1


def test_parts_that_are_larger_than_the_memory(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "stream", tmp_path)
    check_file(tmp_path / "checkpoints" / "latest", replicated(2, 140 * MIB))


@pytest.mark.parametrize("world", [2, 4])
def test_some_of_the_ranks_write(world: int, ranks: Any, tmp_path: Path) -> None:
    ranks(world, "some_write", tmp_path)
    check_file(tmp_path / "checkpoints" / "latest", replicated(15))


@pytest.mark.parametrize("nodes", [["a"], ["a", "a"], ["a", "b", "a", "c"], list("aabbccdd")])
@pytest.mark.parametrize("pages", [0, 1, 3, 1000])
def test_shares_of_those_that_write(nodes: list[str], pages: int) -> None:
    for writers in ("all", "per_node", *range(1, len(nodes) + 1)):
        writing = agreement.chosen_writers(writers, nodes)
        assert writing == sorted(set(writing)) and writing[0] == 0
        if writers == "per_node":
            assert sorted(nodes[rank] for rank in writing) == sorted(set(nodes))
        else:
            assert len(writing) == (len(nodes) if writers == "all" else writers)
        shares = agreement.shares_of_writers(pages, len(nodes), writing)
        assert [start for start, _ in shares] == [0, *(end for _, end in shares[:-1])]
        assert shares[-1][1] == pages
        sizes = {shares[rank][1] - shares[rank][0] for rank in writing}
        assert max(sizes) - min(sizes) <= 1
        assert all(s == e for r, (s, e) in enumerate(shares) if r not in writing)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whoever_writes_while_ranks_save_changes_no_file(
    layout: str, ranks: Any, tmp_path: Path
) -> None:
    ranks(2, "protect", tmp_path, layout)


def test_shards_are_saved_as_they_were(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.fsdp")
    ranks(2, "shards", tmp_path, "per_rank")


def test_ranks_on_devices_of_their_own(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "devices", tmp_path)


def test_training_beside_the_saves(ranks: Any, tmp_path: Path) -> None:
    ranks(4, "many", tmp_path)


def test_groups_of_some_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(4, "subgroups", tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rank_with_the_store_leaves_first(layout: str, ranks: Any, tmp_path: Path) -> None:
    """The others took the end of the store for a failure, of a save that was durable."""
    ranks(2, "leave", tmp_path, layout, store="rank 0")


# Failures


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_fails(world: int, layout: str, ranks: Any, tmp_path: Path) -> None:
    ranks(world, "fail", tmp_path, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_disagree(layout: str, ranks: Any, tmp_path: Path) -> None:
    ranks(2, "disagree", tmp_path, layout)


def test_four_ranks_that_disagree(ranks: Any, tmp_path: Path) -> None:
    ranks(4, "disagree", tmp_path, store="file")


def test_a_directory_that_somebody_else_has(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "busy", tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_run_in_an_old_directory(layout: str, ranks: Any, tmp_path: Path) -> None:
    """What was there went, one save after the other."""
    ranks(2, "anew", tmp_path, layout)


def test_a_rank_that_does_not_come(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "late", tmp_path)


def test_a_checkpointer_that_one_rank_is_refused(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "refused", tmp_path)


def test_a_call_that_one_rank_is_refused(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "refused_calls", tmp_path)


def test_a_rank_that_is_slow(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "slow", tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cancelling_on_one_rank(layout: str, ranks: Any, tmp_path: Path) -> None:
    """It waited for the others, for as long as the time limit."""
    ranks(2, "cancel", tmp_path, layout)


def test_interrupted_before_its_thread_has_the_save(ranks: Any, tmp_path: Path) -> None:
    """The others waited for that rank, for as long as the time limit."""
    ranks(2, "interrupted", tmp_path)


def test_the_group_is_destroyed(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "drop", tmp_path, store="rank 0")


# Killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "victim", "moment", "layout", "store"),
    [
        (2, 1, "writing", "one", "tcp"),
        (2, 0, "committing", "one", "rank 0"),
        (2, 1, "before", "one", "rank 0"),
        (2, 1, "plan", "one", "tcp"),
        (2, 0, "place", "one", "tcp"),
        (4, 2, "committing", "one", "tcp"),
        pytest.param(4, 0, "writing", "one", "tcp", marks=pytest.mark.stress),
        pytest.param(2, 1, "writing", "per_rank", "tcp", marks=pytest.mark.stress),
        (2, 0, "committing", "per_rank", "tcp"),
        (4, 3, "committing", "per_rank", "rank 0"),
    ],
)
def test_a_rank_is_killed(
    world: int, victim: int, moment: str, layout: str, store: str, ranks: Any, tmp_path: Path
) -> None:
    """The checkpoint before stays the latest, the others raise soon, and saving can go on."""
    ranks(world, "killed", tmp_path, layout, store=store, victim=victim, moment=moment)
    folder = tmp_path / "checkpoints"
    pointed = os.readlink(folder / "latest")
    assert pointed.startswith("step-00000002")
    if layout == "one":
        check_file(folder / pointed, replicated(2))
    else:
        for rank in range(world):
            check_file(folder / pointed / f"rank-{rank:05d}.pt", own(2, rank))
    ranks(world, "resume", tmp_path, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "victim", "moment", "writers"),
    [
        (4, 2, "writing", 2),  # 0 and 2 write
        pytest.param(4, 2, "committing", 2, marks=pytest.mark.stress),
        (4, 3, "before", 2),  # has nothing to write, and is missed all the same
        (2, 0, "committing", "per_node"),
    ],
)
def test_a_rank_is_killed_where_few_write(
    world: int, victim: int, moment: str, writers: str | int, ranks: Any, tmp_path: Path
) -> None:
    options = {"victim": victim, "moment": moment, "writers": writers}
    ranks(world, "killed", tmp_path, "one", store="tcp", **options)
    folder = tmp_path / "checkpoints"
    assert os.readlink(folder / "latest") == "step-00000002.pt"
    check_file(folder / "latest", replicated(2))
    ranks(world, "resume", tmp_path, "one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_are_killed_at_random_moments(layout: str, ranks: Any, tmp_path: Path) -> None:
    moments = random.Random(3)
    for turn in range(2):
        ranks(
            2,
            "killed_sometime",
            tmp_path,
            layout,
            store=("tcp", "rank 0")[turn % 2],
            victim=moments.randrange(2),
            after_s=moments.uniform(0.02, 0.3),
        )
    ranks(2, "resume", tmp_path, layout)
