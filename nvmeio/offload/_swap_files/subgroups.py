"""The places of state in swap files: pieces, subgroups. Pure arithmetic.

A piece is a parameter, or a run of elements of one. Pieces are packed into subgroups; a subgroup is
one span of the file, section by section: first the weights of all its pieces, then each kind of
state. A whole section, or several neighbours, is then one transfer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nvmeio._pages import PAGE_BYTES, round_down, round_up

# Pieces from this size on begin on a page: their edges then go direct when they move alone.
_PAGED_BYTES = 64 << 10
_LINE_BYTES = 64
_RUN_BYTES = 1 << 20  # a shorter transfer costs more than the bytes that it leaves out
WEIGHTS = "weights"


class Kind(NamedTuple):
    """One kind of state of a piece, by the optimizer's own name, such as "exp_avg".

    `shape` is that of the whole tensor; None: that of the piece.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


class SlotSpan(NamedTuple):
    """A tensor's bytes; `offset` counts from the start of the subgroup (or of its gradients).

    `strides` say how its elements lie in them, without gaps; () is row-major order.
    """

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()


class SlotRun(NamedTuple):
    """Bytes that move in one transfer, from the start of the subgroup."""

    offset: int
    nbytes: int


@dataclass(eq=False)
class Piece:
    """A parameter, or elements [start, stop) of one.

    Attributes:
        param: The parameter's number.
        shape: The parameter's own where the piece is all of it, else 1-D.
        step_dtype: The dtype that the optimizer computes in: that of the weights on the drive.
        grad_dtype: The dtype of the parameter, and so of its gradient.
        kinds: The state that is swapped.
        staged: The step works on the weights in the slot, and the parameter gets a copy.
        stored: The weights have a place on the drive.
        strides: The strides of the weights on the drive, as in `SlotSpan`.
        grad_strides: The strides of the gradient there: those that autograd gives it.
        number: Position among all pieces.
        spans: The spans by name: `WEIGHTS` and the kinds.
        grad: The place of the gradient among those of the subgroup.
        scratch: Room in the slot for the gradient in `step_dtype`; None where none is needed.
        current: Which of the two files holds the state of the last complete step.
        begun: The state exists: the piece was stepped (or loaded).
        lent: The weights on the drive are the parameter's own; its module changes them there too.
        sums: By name, the CRC-32 of what is current; spans that were not summed are missing.
    """

    param: int
    start: int
    stop: int
    shape: tuple[int, ...]
    step_dtype: torch.dtype
    grad_dtype: torch.dtype
    kinds: tuple[Kind, ...]
    staged: bool
    stored: bool
    strides: tuple[int, ...] = ()
    grad_strides: tuple[int, ...] = ()
    number: int = -1
    spans: dict[str, SlotSpan] = field(default_factory=dict)
    grad: SlotSpan | None = None
    scratch: SlotSpan | None = None
    current: int = 0
    begun: bool = False
    lent: bool = False
    sums: dict[str, int] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def lay(self, name: str, strides: tuple[int, ...]) -> None:
        """Change the order in which a span's elements lie within its bytes."""
        self.spans[name] = self.spans[name]._replace(strides=strides)

    @property
    def record_nbytes(self) -> int:
        """Bytes on the drive, without padding."""
        weights = self.numel * self.step_dtype.itemsize if self.stored else 0
        return weights + sum(
            (self.numel if k.shape is None else math.prod(k.shape)) * k.dtype.itemsize
            for k in self.kinds
        )


@dataclass(eq=False)
class Subgroup:
    """Pieces that are read, stepped and written as one, in the order of the parameters.

    It lies at `offset` of each state file, a multiple of a page, and takes `nbytes` there, padding
    included; its gradients at `grad_offset` of theirs. `scratch_nbytes` is room for gradients in
    the dtype of the step. A `resident` one stays in memory (`ratio`).
    """

    pieces: list[Piece]
    offset: int = 0
    nbytes: int = 0
    grad_offset: int = 0
    grad_nbytes: int = 0
    scratch_nbytes: int = 0
    resident: bool = False

    @property
    def grads_at(self) -> int:
        """The first byte of its gradients in memory, behind state and scratch room."""
        return self.nbytes + self.scratch_nbytes

    def slot_nbytes(self, gradients: bool) -> int:
        return self.grads_at + (self.grad_nbytes if gradients else 0)


def cut(numel: int, record_bytes_per_element: float, most_bytes: int) -> list[tuple[int, int]]:
    """Even runs of elements whose records have at most `most_bytes`; each a multiple of 1024."""
    parts = max(1, math.ceil(numel * record_bytes_per_element / most_bytes))
    each = max(1024, round_up(math.ceil(numel / parts), 1024))
    return [(start, min(start + each, numel)) for start in range(0, numel, each)] or [(0, 0)]


def cut_rows(
    numel: int, rows: int, record_bytes_per_element: float, most_bytes: int
) -> list[tuple[int, int]]:
    """Runs of whole rows, as few as make 1 MiB; a row with more than `most_bytes` is `cut`."""
    row = numel // rows
    record = row * record_bytes_per_element
    if record > most_bytes:
        parts = cut(row, record_bytes_per_element, most_bytes)
        return [(n * row + a, n * row + b) for n in range(rows) for a, b in parts]
    each = max(1, int(min(most_bytes, _RUN_BYTES) // record))
    return [(n * row, min(n + each, rows) * row) for n in range(0, rows, each)]


def pack(pieces: Iterable[Piece], subgroup_bytes: int, gradients: bool = False) -> list[Subgroup]:
    """Pieces into subgroups of at most `subgroup_bytes`, in order; a larger piece is alone in one.

    `gradients` are counted too where they are on the drive.
    """
    groups: list[Subgroup] = []
    room = 0
    for piece in pieces:
        nbytes = piece.record_nbytes
        nbytes += piece.numel * piece.grad_dtype.itemsize if gradients else 0
        if not groups or nbytes > room:
            groups.append(Subgroup([]))
            room = subgroup_bytes
        groups[-1].pieces.append(piece)
        room -= nbytes
    return groups


def place(subgroup: Subgroup) -> None:
    """Lay out the sections of a subgroup, its gradients, and its scratch room."""
    names = list(dict.fromkeys(kind.name for p in subgroup.pieces for kind in p.kinds))
    at = 0
    for piece in subgroup.pieces:
        if piece.stored:
            at = _put(piece, WEIGHTS, Kind(WEIGHTS, piece.step_dtype), at)
            piece.lay(WEIGHTS, piece.strides)
    for name in names:
        at = round_up(at, PAGE_BYTES)
        for piece in subgroup.pieces:
            for kind in piece.kinds:
                if kind.name == name:
                    at = _put(piece, name, kind, at)
    subgroup.nbytes = round_up(at, PAGE_BYTES)
    grads = scratch = 0
    for piece in subgroup.pieces:
        nbytes = piece.numel * piece.grad_dtype.itemsize
        grads = aligned(grads, nbytes)
        piece.grad = SlotSpan(grads, nbytes, piece.grad_dtype, piece.shape, piece.grad_strides)
        grads += nbytes
        if piece.staged and piece.grad_dtype != piece.step_dtype:
            wide = piece.numel * piece.step_dtype.itemsize
            scratch = round_up(scratch, _LINE_BYTES)
            piece.scratch = SlotSpan(scratch, wide, piece.step_dtype, piece.shape)
            scratch += wide
    subgroup.grad_nbytes = round_up(grads, PAGE_BYTES)
    subgroup.scratch_nbytes = round_up(scratch, PAGE_BYTES)


def sections(subgroup: Subgroup) -> list[int]:
    """The lengths of a subgroup's sections: its weights, and each kind of state."""
    starts = {0}
    for name in {name for piece in subgroup.pieces for name in piece.spans}:
        first = min(p.spans[name].offset for p in subgroup.pieces if name in p.spans)
        starts.add(round_down(first, PAGE_BYTES))
    ordered = sorted({min(start, subgroup.nbytes) for start in starts} | {subgroup.nbytes})
    return [end - start for start, end in itertools.pairwise(ordered)]


def _put(piece: Piece, name: str, kind: Kind, at: int) -> int:
    shape = piece.shape if kind.shape is None else kind.shape
    nbytes = math.prod(shape) * kind.dtype.itemsize
    at = aligned(at, nbytes)
    piece.spans[name] = SlotSpan(at, nbytes, kind.dtype, shape)
    return at + nbytes


def aligned(at: int, nbytes: int) -> int:
    """The first byte of a tensor of `nbytes`, from `at` on."""
    return round_up(at, PAGE_BYTES if nbytes >= _PAGED_BYTES else _LINE_BYTES)


def runs(spans: Sequence[SlotSpan], limit: int, whole: bool) -> list[SlotRun]:
    """As few transfers as cover these spans of a subgroup of `limit` bytes.

    With `whole` nothing else lies between them: gaps are padding, and go along. Else only spans
    that touch are joined.
    """
    if not spans or not whole:
        return joined(spans, _LINE_BYTES - 1)
    start = round_down(min(span.offset for span in spans), PAGE_BYTES)
    end = max(span.offset + span.nbytes for span in spans)
    return [SlotRun(start, min(round_up(end, PAGE_BYTES), limit) - start)]


def joined(spans: Iterable[SlotSpan | SlotRun], gap: int = 0) -> list[SlotRun]:
    """As few runs as hold the bytes of all spans, and at most `gap` bytes between two of them."""
    found: list[SlotRun] = []
    for start, nbytes in sorted((each.offset, each.nbytes) for each in spans if each.nbytes):
        end = sum(found[-1]) if found else -1
        if found and start <= end + gap:
            found[-1] = found[-1]._replace(nbytes=max(end, start + nbytes) - found[-1].offset)
        else:
            found.append(SlotRun(start, nbytes))
    return found
