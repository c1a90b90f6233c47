"""Gathers and scatters as the shim plans them: what engines that use it have in common."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from nvmeio._shim import ffi, lib
from nvmeio.engines.base import EngineError, Outcome, Rows
from nvmeio.errors import RowsError


class RowsFailure(EngineError):
    """Some rows could not be moved; the operation adds which file it was.

    Args:
        errno: Of the first of them.
        row: Its number.
        file_offset: Where it was to be.
        rows: How many there are, of what length.
        whole: How many of them are whole.
        mask: Tells which.
    """

    def __init__(
        self,
        errno: int,
        row: int,
        file_offset: int,
        rows: Rows,
        whole: int,
        mask: Callable[[], bytes],
    ) -> None:
        super().__init__(errno, "")
        self.row = row
        self.file_offset = file_offset
        self.rows = rows
        self.whole = whole
        self.mask = mask

    def with_context(self, **about: Any) -> RowsError:
        about = {**about, "file_offset": self.file_offset, "nbytes": self.rows.row_bytes}
        return RowsError(
            self.errno,
            row=self.row,
            rows=self.rows.number,
            whole=self.whole,
            _whole_rows=self.mask(),
            **about,
        )


def with_cause(outcome: Outcome, raw: Any, rows: Rows) -> Outcome:
    """An outcome with the error that it stands for, given the shim's rows."""
    if outcome.error in (0, errno.ECANCELED):
        return outcome
    return outcome._replace(cause=_cause(outcome.error, raw, rows))


def planning_failure(code: int, raw: Any) -> BaseException | None:
    """Why rows may not be moved at all, given what sorting them told; None for other errors."""
    if code == errno.EEXIST:
        pair = ffi.new("uint64_t[2]")
        lib.nv_rows_overlap(raw, pair, pair + 1)
        return ValueError(
            f"rows {pair[0]} and {pair[1]} of a scatter overlap in the file, and which of them "
            "would remain is unknown; nothing was written"
        )
    if code == errno.ERANGE:
        return ValueError("file_offsets were changed while the operation read them")
    return None


def _cause(code: int, raw: Any, rows: Rows) -> BaseException:
    failure = planning_failure(code, raw)
    if failure is not None:
        return failure
    result = lib.nv_rows_outcome(raw)

    def mask() -> bytes:
        whole = bytearray(rows.number)
        lib.nv_rows_mask(raw, ffi.from_buffer("uint8_t[]", whole, require_writable=True))
        return bytes(whole)

    row = min(int(result.failed_row), rows.number - 1)
    return RowsFailure(code, row, int(result.failed_offset), rows, int(result.whole), mask)
