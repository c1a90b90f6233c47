"""Which saves are whole where ranks have drives of their own, and what one part is by itself."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import PATIENCE_S, spin_until
from typer.testing import CliRunner

import nvmeio
from nvmeio._distributed.messages import Messages
from nvmeio._distributed.rank_store import RankStore
from nvmeio._distributed.shared_spans import RankSpan, rounds_by_source
from nvmeio._formats.torch_archives.torch_part import HEAD_BYTES, PART_MAGIC
from nvmeio._io.spans import Region, Run, Span, plan_reads
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.interruptible import Cancelled
from nvmeio.checkpoint._manager import job_parts
from nvmeio.checkpoint._manager.job_parts import PartOfEachRank
from nvmeio.checkpoint._multi_rank import drives
from nvmeio.checkpoint._multi_rank.drives import Save, Survey, decide
from nvmeio.checkpoint.verifying import verify
from nvmeio.cli import app


def saved(folder: Path, **options: Any) -> Path:
    """The part of a process alone, which is all of it."""
    with nvmeio.Checkpointer(folder, shared=False, **options) as checkpointer:
        checkpointer.save_sync({"a": torch.arange(50_000), "b": [torch.ones(3)]}, 12)
        report = checkpointer.wait_sync()
    assert report is not None
    return Path(report.path)


@pytest.mark.parametrize("options", [{}, {"layout": "per_rank"}, {"checksum": False}])
def test_a_part_says_what_it_is_and_is_checked(options: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "drive", **options)
    verdict = verify(path)
    what = "the state of rank 0 of 1 of step 12" if "layout" in options else "part 0 of 0 to 0"
    assert verdict.kind == "part" and what in verdict.what and not verdict.problems
    assert verdict.unchecked == ("checksum" in options)
    shown = CliRunner().invoke(app, ["inspect", str(path.parent)])
    assert shown.exit_code == 0 and what in shown.stdout.replace("\n", " ")
    whole = path.read_bytes()
    assert whole.startswith(PART_MAGIC)
    for at in (20, HEAD_BYTES, HEAD_BYTES + 70_000, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        told = CliRunner().invoke(app, ["verify", str(path.parent)])
        known = "checksum" not in options or at < HEAD_BYTES
        assert told.exit_code == known and ("DAMAGED" in told.stdout) == known, (at, told.stdout)
    path.write_bytes(whole[:-PAGE_BYTES])
    assert "and should have" in verify(path).problems[0].what


def test_who_waits_for_why_another_rank_gave_up_beats_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did neither, for all of the time that the other one has to say why."""
    monkeypatch.setattr(job_parts, "NEXT_WORD_S", PATIENCE_S)
    store = RankStore(dist.HashStore(), 0, 2, str(tmp_path), "save")

    class Waiting(PartOfEachRank):
        def __init__(self) -> None:
            self.messages = Messages(store, 1, PATIENCE_S)
            self.cancelled = True

        def check_cancelled(self) -> None:
            if self.cancelled:
                raise Cancelled

    job = Waiting()
    with pytest.raises(Cancelled):
        job.raise_cause()
    job.cancelled = False

    def fail_late() -> None:
        spin_until(lambda: store.check(["1/beat/0"]))
        store.set("1/failed", json.dumps({"rank": 1, "errno": 28, "text": "full"}).encode())

    other = threading.Thread(target=fail_late)
    other.start()
    with pytest.raises(nvmeio.TransferError, match="rank 1 of 2 could not save: full"):
        job.raise_cause()
    other.join()


def test_a_part_under_the_name_of_another_save_is_refused(tmp_path: Path) -> None:
    """Their sizes are the same, and so would their ranges be."""
    with nvmeio.Checkpointer(tmp_path, shared=False, keep=2) as checkpointer:
        paths = []
        for step in (1, 2):
            checkpointer.save_sync({"a": torch.full((50_000,), step)}, step)
            report = checkpointer.wait_sync()
            assert report is not None
            paths.append(Path(report.path))
        paths[1].replace(paths[0])
        with pytest.raises(nvmeio.IntegrityError, match=r"of step 2.*its name says step 1"):
            checkpointer.restore(step=1)


def test_a_part_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path / "drive")
    with pytest.raises(nvmeio.NvmeioError, match=r"the part of one rank.*shared=False"):
        nvmeio.load(path)
    with pytest.raises(FileNotFoundError, match=r"parts of step 12.*shared=False"):
        nvmeio.Checkpointer(tmp_path / "drive").restore()


def test_checkpoints_of_one_directory_are_told_of(tmp_path: Path) -> None:
    with nvmeio.Checkpointer(tmp_path / "all") as checkpointer:
        checkpointer.save_sync({}, 1)
    with pytest.raises(FileNotFoundError, match="without shared=False restores these"):
        nvmeio.Checkpointer(tmp_path / "all", shared=False).restore()


def test_what_goes_with_several_directories(tmp_path: Path) -> None:
    two = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(TypeError, match="give shared=False as well"):
        nvmeio.Checkpointer(two)
    with pytest.raises(ValueError, match="not an empty list"):
        nvmeio.Checkpointer([], shared=False)
    with pytest.raises(TypeError, match="shared must be True or False"):
        nvmeio.Checkpointer(two, shared="no")  # type: ignore[arg-type]
    with nvmeio.Checkpointer(two, shared=False) as checkpointer:
        assert checkpointer.directory == str(two[0]) and checkpointer.steps() == []


# Which save is whole


def having(*ranks: list[str]) -> Survey:
    told = [{"where": f"drive-{rank}", "names": names} for rank, names in enumerate(ranks)]
    return Survey([each | {"of_all": False} for each in told])


def save_of(order: int, parts: int = 2, step: int | None = None) -> Save:
    return Save(order, f"{order:016x}", order if step is None else step, "part", parts)


def test_names_are_read_as_they_are_written() -> None:
    for save, number in itertools.product(
        (save_of(3), save_of(10**9, 3)._replace(kind="rank")), (0, 1)
    ):
        assert drives.parsed(save.part_name(number)) == (save, number)
    for name in ("step-00000012.pt", "step-00000012", save_of(1).name, save_of(1).part_name(2)):
        assert drives.parsed(name) is None


def test_two_saves_of_one_step_are_not_mixed() -> None:
    first, second = save_of(1, step=5), save_of(2, step=5)
    survey = having([first.part_name(0)], [second.part_name(1)])
    assert survey.whole() == []
    with pytest.raises(FileNotFoundError, match=r"step 5 is incomplete: .* no rank has 0"):
        survey.chosen(5)
    survey = having([first.part_name(0), second.part_name(0)], [first.part_name(1)])
    assert survey.chosen(None) == (
        first,
        survey.missing(second) + "; going on from step 5, which is complete",
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7), st.integers(0, 4)), max_size=8),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_is_kept_whatever_is_there(
    there: list[tuple[int, int, int]], keep: int, recycle: bool
) -> None:
    """The newest whole ones stay until the new one is whole, and a missing drive may come back."""
    ranks: list[list[str]] = [[], [], []]
    for order, (parts, present, step) in enumerate(there, 1):
        save = save_of(order, parts, step)
        for number in range(parts):
            if present >> number & 1:
                ranks[number].append(save.part_name(number))
    survey = having(*ranks)
    whole = survey.whole()
    decision = decide(survey, save_of(0, 3, 2), keep, recycle)
    assert all(decision.save.order > save.order for save in survey.saves)
    going = {*decision.removed, decision.recycled} - {None}
    assert not going & set(whole[max(len(whole) - keep, 0) :])
    assert (decision.recycled is not None) == (recycle and len(whole) > keep)
    oldest = whole[-keep] if len(whole) >= keep else None
    for save in set(survey.saves) - set(whole):
        assert (save in going) == (oldest is not None and save < oldest)
    assert all(save in whole for save in decision.replaced)
    assert all(save in decision.replaced for save in whole if save.step == 2)
    if not recycle:
        left = [save for save in whole if save not in going and save not in decision.replaced]
        assert len(left) + 1 <= max(keep, 1)


# Who reads what


@given(
    st.lists(st.integers(1, 9 * PAGE_BYTES), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.integers(1, 5),
    st.data(),
)
def test_rounds_of_ranks_are_all_of_it_once_each_of_who_has_it(
    sizes: list[int], owners: list[int], most: int, data: st.DataObject
) -> None:
    file: Any = None
    ends = list(itertools.accumulate(size + 700_000 * (size % 2) for size in sizes))
    spans = [Span(file, end - size, size) for end, size in zip(ends, sizes, strict=True)]
    pages = -(-ends[-1] // PAGE_BYTES)
    cuts = sorted(data.draw(st.integers(0, pages)) for _ in owners[1:])
    bounds = [page * PAGE_BYTES for page in (0, *cuts, pages)]
    sources = [
        RankSpan(low, high, owner, file, 0)
        for owner, low, high in zip(owners, bounds, bounds[1:], strict=False)
        if low < high
    ]
    regions = plan_reads(spans, [0] * len(spans), [ends[-1]])
    covered = [bytearray(region.nbytes // PAGE_BYTES) for region in regions]
    for parts in rounds_by_source(regions, sources, 3, most * PAGE_BYTES):
        assert len({part.rank for part in parts}) == len(parts)  # all of them read at once
        for part in parts:
            assert 0 < part.end - part.start <= most * PAGE_BYTES
            for page in range(part.start // PAGE_BYTES, part.end // PAGE_BYTES):
                covered[part.region][page] += 1
                offset = offset_of(regions[part.region], page * PAGE_BYTES)
                (owner,) = [s.rank for s in sources if s.start <= offset < s.end]
                assert owner == part.rank
    assert all(set(each) == {1} for each in covered)


def offset_of(region: Region, at: int) -> int:
    """Where a page of a region's memory comes from."""
    run: Run = max((run for run in region.runs if run.at <= at), key=lambda run: run.at)
    return run.start + at - run.at
