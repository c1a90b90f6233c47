"""Which bytes lie on which drive."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nvmeio
from nvmeio._io.drives import LEAST_CHUNK_BYTES, MOST_STRIPE_BYTES, StripedFile, Striping

PAGE = 4096
WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=5)
BANDS = st.lists(st.integers(0, 40000).map(lambda pages: pages * PAGE), min_size=1, max_size=6)


@given(WEIGHTS, BANDS, st.data())
def test_every_byte_has_one_place(
    weights: list[int], bands: list[int], data: st.DataObject
) -> None:
    striping = Striping(weights, bands)
    total = sum(bands)
    assert sum(striping.lengths) == total
    whole = striping.spans(0, total)
    assert sum(each.nbytes for each in whole) == total
    for drive, length in enumerate(striping.lengths):
        mine = sorted((e.file_offset, e.nbytes) for e in whole if e.drive == drive and e.nbytes)
        at = 0
        for offset, nbytes in mine:  # end to end: nothing twice, no gaps
            assert offset == at
            at += nbytes
        assert at == length
    offset = data.draw(st.integers(0, total))
    nbytes = data.draw(st.integers(0, total - offset))
    at = 0
    for each in striping.spans(offset, nbytes):
        assert each.start == at
        at += each.nbytes
        if not each.nbytes:
            continue
        (there,) = [
            one for one in whole if one.start <= offset + each.start < one.start + one.nbytes
        ]
        assert there.drive == each.drive
        assert each.file_offset - there.file_offset == offset + each.start - there.start
    assert at == nbytes


@given(WEIGHTS, BANDS, BANDS)
def test_further_bands_move_no_earlier_band(
    weights: list[int], bands: list[int], more: list[int]
) -> None:
    before, after = Striping(weights, bands), Striping(weights, bands + more)
    assert before.spans(0, sum(bands)) == after.spans(0, sum(bands))


@given(st.lists(st.integers(1, 100), min_size=2, max_size=5), st.integers(1, 64))
def test_a_band_is_dealt_in_proportion(weights: list[int], mebibytes: int) -> None:
    """Also from the middle on: its parts are done together, whichever of its bands is read."""
    first, band = 3 << 20, mebibytes << 20
    striping = Striping(weights, [first, band])
    shares = [0] * len(weights)
    stripes = -(-band // MOST_STRIPE_BYTES)
    for each in striping.spans(first, band):
        shares[each.drive] += each.nbytes
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - band * weight / sum(weights)) <= 2 * PAGE * stripes


def test_short_bands_are_spread_whole() -> None:
    bands = [PAGE * (1 + number % 7) for number in range(300)]
    striping = Striping([3, 2, 1], bands)
    at = 0
    for band in bands:
        assert len(striping.spans(at, band)) == 1
        assert band < 3 * LEAST_CHUNK_BYTES
        at += band
    for length, weight in zip(striping.lengths, (3, 2, 1), strict=True):
        assert length == pytest.approx(sum(bands) * weight / 6, abs=max(bands))


def test_one_drive_is_that_drives_file() -> None:
    striping = Striping([7], [100, 0, 1 << 40])
    assert striping.lengths == [100 + (1 << 40)]
    assert striping.spans(50, 1 << 30) == [(0, 50, 0, 1 << 30)]


def test_a_striped_file_tells_where_bytes_lie(tmp_path: Path) -> None:
    opened = [nvmeio.open(tmp_path / name, "rw") for name in "ab"]
    file = StripedFile(opened, Striping([1, 1], [1 << 20]))
    half = 1 << 19
    assert file.spans(half - 1, 2) == [(opened[0], half - 1, 0, 1), (opened[1], 0, 1, 1)]
    told = file.describe(half - 1, 2)
    assert f"{tmp_path}/a bytes [{half - 1}, {half})" in told
    assert f"{tmp_path}/b bytes [0, 1)" in told
    assert file.describe(0, 1 << 20, most=1).endswith(" and 1 more")
    file.close()
    assert all(each.closed for each in opened)
