"""A Checkpointer of several ranks that share no directory: real processes with gloo, 2 and 4."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint._rank_program import own, replicated, same
from checkpoint._ranks import running_ranks

import nvmeio

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., None]]:
    """Runs a function of `_drives_rank` on so many ranks."""
    with running_ranks("_drives_rank.py") as run:
        yield lambda world, work, *rest, **options: run(world, f"drives_{work}", *rest, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "works"),
    [
        (2, [("save", "one"), ("save", "per_rank"), ("some_write", "one"), ("protect", "one")]),
        (2, [("protect", "per_rank"), ("fail", "one"), ("fail", "per_rank")]),
        (2, [("disagree", "one"), ("cancel", "one"), ("late", "one"), ("many", "one")]),
        (2, [("anew", "one"), ("anew", "per_rank")]),
        (4, [("save", "one"), ("some_write", "one"), ("fail", "one"), ("save", "per_rank")]),
    ],
)
def test_ranks_with_drives_of_their_own_do_what_others_do(
    world: int, works: list[tuple[str, str]], ranks: Any, tmp_path: Path
) -> None:
    ranks(world, "as_shared", tmp_path, works=works)


@pytest.mark.parametrize("world", [2, 4])
def test_each_byte_is_written_and_read_once(world: int, ranks: Any, tmp_path: Path) -> None:
    ranks(world, "shares", tmp_path)
    whole = sum(
        os.stat(path).st_size for path in tmp_path.glob("shares/drive-*/step-00000002.*.part-*")
    )
    for rank in range(world):
        counts = json.loads((tmp_path / f"shares-{world}-{rank}.json").read_text())
        for what, count in counts.items():
            assert abs(count - whole / world) <= 0.01 * whole / world, (rank, what, count)


def test_directories_that_are_not_what_was_said(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "mistakes", tmp_path)


def test_a_call_that_one_rank_is_refused(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "refused", tmp_path)


@pytest.mark.parametrize("shared", [True, False])
def test_a_write_that_fails_while_others_agree(shared: bool, ranks: Any, tmp_path: Path) -> None:
    """`save` raised on the last rank, and the next one on the others: they were out of step."""
    ranks(3, "early", tmp_path, shared=shared)


def test_the_rank_with_the_store_leaves_first(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "leave", tmp_path, store="rank 0")


def test_other_ranks_and_one_process_restore(ranks: Any, tmp_path: Path) -> None:
    """As long as all drives are somebody's; alone, from a list, and on to a file of torch."""
    ranks(4, "as_shared", tmp_path, works=[("save", "one"), ("save", "per_rank")])
    for world in (2, 4):
        ranks(world, "restore", tmp_path, saved_by=4)
    for layout in ("one", "per_rank"):
        drives = [tmp_path / f"save-{layout}" / f"drive-{rank}" for rank in range(4)]
        alone = nvmeio.Checkpointer(drives, shared=False, read_only=True)
        wanted = replicated(6) if layout == "one" else [own(6, rank) for rank in range(4)]
        assert alone.steps() == [5, 6]
        found = alone.restore()
        assert same(found, wanted)
        nvmeio.save(found, tmp_path / "whole.pt")
        assert same(torch.load(tmp_path / "whole.pt"), wanted)
        with pytest.raises(FileNotFoundError, match=r"no rank has 3; .* give each of them several"):
            nvmeio.Checkpointer(drives[:3], shared=False, read_only=True).restore()
        assert same(alone.restore(5, rank=2), own(5, 2) if layout == "per_rank" else replicated(5))


def test_a_drive_that_is_lost(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "lost", tmp_path)


def test_a_rank_that_fails_after_all_said_durable(ranks: Any, tmp_path: Path) -> None:
    """What the others had named by then stayed: a save that raised became the latest step."""
    ranks(2, "not_named", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "victim", "moment", "least"),
    [
        (2, 1, "writing", 2),
        (2, 0, "syncing", 2),
        (4, 2, "naming", 2),
        (2, 1, "named", 3),  # all others name theirs, too
    ],
)
def test_a_rank_is_killed(
    world: int, victim: int, moment: str, least: int, ranks: Any, tmp_path: Path
) -> None:
    """The newest step of which all parts are named is what all go on with."""
    store = "rank 0" if victim else "tcp"
    ranks(world, "killed", tmp_path, store=store, victim=victim, moment=moment)
    ranks(world, "resume", tmp_path, least=least)


def killed_again_and_again(
    ranks: Any, folder: Path, layout: str, world: int, chance: random.Random, turns: int
) -> None:
    for turn in range(turns):
        ranks(
            world,
            "killed_sometime",
            folder,
            layout,
            store=("tcp", "rank 0")[turn % 2],
            victim=chance.randrange(world),
            after_s=chance.uniform(0.02, 0.3),
        )
    ranks(world, "resume", folder, layout, name="sometime")


@pytest.mark.parametrize("layout", ["one", "per_rank"])
def test_ranks_are_killed_at_random_moments(layout: str, ranks: Any, tmp_path: Path) -> None:
    killed_again_and_again(ranks, tmp_path, layout, 2, random.Random(5), 2)


@pytest.mark.stress
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_are_killed_at_many_moments(world: int, ranks: Any, tmp_path: Path) -> None:
    killed_again_and_again(ranks, tmp_path, "one", world, random.Random(world), 40)
