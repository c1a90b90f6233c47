"""Planning: which bytes go direct, which through the page cache."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nvmeio._files.descriptors import Alignment
from nvmeio._pages import PAGE_BYTES
from nvmeio.engines.transfers import Plan, plan_read, plan_write

ALIGNMENTS = st.sampled_from([1, 512, 1024, 4096, 8192, 65536])
OFFSETS = st.one_of(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 62),
    st.integers(0, 1 << 40).map(lambda n: n * PAGE_BYTES),
)
SIZES = st.one_of(st.integers(1, 1 << 14), st.integers(1, 1 << 40), st.just(PAGE_BYTES))


def test_the_page_is_the_machines() -> None:
    assert PAGE_BYTES == mmap.PAGESIZE


# Reads


@given(OFFSETS, SIZES, ALIGNMENTS)
def test_a_read_takes_the_smallest_aligned_span_around_it(
    file_offset: int, nbytes: int, alignment: int
) -> None:
    plan = plan_read(file_offset, nbytes, alignment)
    assert plan.span_start % alignment == 0
    assert plan.span_end % alignment == 0
    assert file_offset - alignment < plan.span_start <= file_offset
    assert file_offset + nbytes <= plan.span_end < file_offset + nbytes + alignment
    assert plan.direct
    assert not plan.buffered


# Writes


@given(OFFSETS, SIZES, ALIGNMENTS)
def test_a_write_goes_direct_in_whole_pages_within_its_own_bytes(
    file_offset: int, nbytes: int, alignment: int
) -> None:
    plan = plan_write(file_offset, nbytes, alignment)
    unit = max(alignment, PAGE_BYTES)
    end = file_offset + nbytes
    assert file_offset <= plan.span_start <= plan.span_end <= end
    if plan.direct:
        assert plan.span_start % unit == 0
        assert plan.span_end % unit == 0
        assert plan.span_end > plan.span_start
        # The edges are less than a unit each: nothing goes through the page cache needlessly.
        assert plan.span_start - file_offset < unit
        assert end - plan.span_end < unit
    else:
        assert plan.span_start == plan.span_end == end  # all of it is head
        first_whole_unit = -(-file_offset // unit) * unit
        assert first_whole_unit + unit > end
    edges = (plan.span_start - file_offset) + (end - plan.span_end)
    assert plan.buffered == (edges > 0)


@given(OFFSETS, SIZES, ALIGNMENTS)
def test_an_aligned_write_needs_no_buffered_descriptor(
    file_offset: int, nbytes: int, alignment: int
) -> None:
    unit = max(alignment, PAGE_BYTES)
    start, size = file_offset // unit * unit, -(-nbytes // unit) * unit
    assert plan_write(start, size, alignment) == Plan(start, start + size, True, False)


@given(st.lists(st.integers(0, 1 << 17), min_size=3, max_size=3, unique=True), ALIGNMENTS)
def test_of_two_adjacent_writes_neither_goes_direct_in_a_page_of_the_other(
    cuts: list[int], alignment: int
) -> None:
    """Write-back of one's buffered edge would overwrite the other's direct bytes."""
    start, middle, end = sorted(cuts)
    plans = [
        (start, middle, plan_write(start, middle - start, alignment)),
        (middle, end, plan_write(middle, end - middle, alignment)),
    ]
    for (_, _, plan), (other_start, other_end, _) in (plans, plans[::-1]):
        if plan.direct:
            assert (
                plan.span_end <= other_start // PAGE_BYTES * PAGE_BYTES
                or plan.span_start >= -(-other_end // PAGE_BYTES) * PAGE_BYTES
            )


# Both


@pytest.mark.parametrize("planner", [plan_read, plan_write])
@given(file_offset=OFFSETS, nbytes=st.one_of(st.just(0), SIZES))
def test_without_direct_io_a_transfer_is_one_buffered_span(
    planner: object, file_offset: int, nbytes: int
) -> None:
    assert callable(planner)
    expected = Plan(file_offset, file_offset + nbytes, False, True)
    assert planner(file_offset, nbytes, 0) == expected


@pytest.mark.parametrize("planner", [plan_read, plan_write])
@given(file_offset=OFFSETS, alignment=ALIGNMENTS)
def test_nothing_is_moved_direct_for_no_bytes(
    planner: object, file_offset: int, alignment: int
) -> None:
    assert callable(planner)
    assert planner(file_offset, 0, alignment) == Plan(file_offset, file_offset, False, True)


@given(OFFSETS, SIZES, ALIGNMENTS, st.integers(1, 64))
def test_plans_of_reads_and_writes_agree_on_the_bytes_in_between(
    file_offset: int, nbytes: int, alignment: int, blocks: int
) -> None:
    """A write's span lies within a read's of the same bytes: what was written can be read back."""
    assume(nbytes >= blocks)
    write = plan_write(file_offset, nbytes, alignment)
    read = plan_read(file_offset, nbytes, alignment)
    assert read.span_start <= write.span_start <= write.span_end <= read.span_end


def test_an_alignment_of_nothing_says_no_direct_io() -> None:
    assert not Alignment(0, 0).offset
    assert plan_write(0, 1 << 20, Alignment(0, 0).offset).direct is False
