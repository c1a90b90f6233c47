"""`pack`: a model written in the order in which it is streamed, in fewer bytes where asked for."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from nvmeio import _checks, buffers, files
from nvmeio._checks import Paths
from nvmeio._formats import model_directory as model_files
from nvmeio._formats import packed_index
from nvmeio._formats.packed_index import Dealing
from nvmeio._formats.safetensors import headers, shards
from nvmeio._formats.safetensors.headers import TensorEntry
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io.drives import weights_of
from nvmeio._io.handles import handle_for
from nvmeio._io.inflight import InFlight
from nvmeio._io.long_call import LongCall
from nvmeio._pages import PAGE_BYTES, TENSOR_ALIGNMENT, round_up
from nvmeio._storage import crc32, durable
from nvmeio._storage.untrusted import INDEX_BYTES, read_object
from nvmeio.errors import nearest
from nvmeio.handle import AioHandle
from nvmeio.inference import hub
from nvmeio.inference._experts.sets import ExpertModules, ExpertSet, find_sets
from nvmeio.inference._plan import packed_format, transformers
from nvmeio.inference._plan import units as plan_units
from nvmeio.inference._plan.matching import match
from nvmeio.inference._plan.packed_format import FusedWeight, PackedExperts, PackedWeight
from nvmeio.inference._plan.quantization import (
    Quantised,
    can_quantise,
    check_setting,
    quantise,
    sizes_for,
)
from nvmeio.inference._plan.slot_layout import Weight, WeightPart, extents_within
from nvmeio.inference._plan.units import Unit, partition
from nvmeio.progress import Progress

_CONFIG = "config.json"
_TEMPLATES = "additional_chat_templates"  # in which transformers keeps a tokenizer's named ones
# Weights in any format, which the packed file takes the place of.
_WEIGHTS = tuple(
    [".safetensors", ".part", ".index.json", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf"]
)


# Bytes of experts that are read, converted and written at a time.
_PIECE_BYTES = 32 << 20


class PackReport(NamedTuple):
    """The result of `pack`.

    Attributes:
        bytes_read: Bytes of weights that were read.
        bytes_written: Bytes of the file, or files, that were written.
        records: Layers and other units, one contiguous record each.
        quantised: Weights that were quantised; not those that were so before.
        largest_error: The largest change of an element by quantising.
        relative_error: The root mean square of the changes of a weight's elements, divided by their
            standard deviation; that of the weight that changed most. 0.0 if none is quantised.
    """

    bytes_read: int
    bytes_written: int
    records: int
    quantised: int
    largest_error: float
    relative_error: float


_TensorOf = tuple[str, torch.dtype, tuple[int, ...], int]


class _FusedExperts(NamedTuple):
    """The weights of fused experts, each expert's share side by side in whole pages.

    Attributes:
        module: The name of their module.
        weights: The weights of all experts.
        places: The place of each weight.
    """

    module: str
    weights: list[Weight]
    places: PackedExperts

    @property
    def tensor(self) -> str:
        """The name of the tensor that holds them."""
        return self.module + packed_index.EXPERTS


class _UnitRecord(NamedTuple):
    """The tensors of one unit, each with the number of the weight that it is made of.

    Attributes:
        unit: Which one.
        runs: Runs of tensors, each of which begins on a page: first the tensors that are always
            read; then experts that are modules, one a run.
        fused: Experts behind these.
    """

    unit: Unit
    runs: list[list[_TensorOf]]
    fused: list[_FusedExperts]

    @property
    def tensors(self) -> list[_TensorOf]:
        """Those of all runs."""
        return [tensor for run in self.runs for tensor in run]


def pack(
    model_directory: str | os.PathLike[str],
    out: Paths,
    *,
    dtype: torch.dtype | str | None = None,
    quant_bits: int | None = None,
    quant_group_size: int = 64,
    modules_to_not_convert: Sequence[str] = (),
    ranks: int = 1,
    keep_fused: bool = False,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Write a model's weights in streaming order, a layer's as one aligned record.

    Weights in FP8 with scales of blocks, or in MXFP4, are written as they are stored. With `dtype`
    they are widened, with `quant_bits` widened and quantised anew.

    The result is a model directory with one safetensors file: ``model.safetensors``, which
    transformers loads too, or ``model-packed.safetensors`` if anything is quantised or experts are
    fused, which only nvmeio reads. Its index has a CRC-32 of each tensor (of fused experts, of each
    expert), which `stream_model` compares. An expert's weights (gate, up and down, with their
    biases and scales) lie side by side, in whole pages: one read brings an expert, or all experts
    of a layer. The directory appears when it is complete and durable.

    Args:
        model_directory: As `save_pretrained` writes it, or a name on the hub (see `stream_model`).
        out: A directory that does not exist yet; or a list of them, one on each of several drives,
            over which every layer is dealt by the speed that ``nvmeio tune --save`` measured,
            equally where it did not measure all. `stream_model` takes that list and reads from all
            of them at once. As for `ranks` the files have holes.
        dtype: The dtype of the weights in the file, or its name ("bfloat16"); by default the
            model's, and FP8, MXFP4 and packed integers stay as they are.
        quant_bits: 4 or 8 to quantise the matrices of layers, and embeddings and heads that take
            more than 1 MiB in `model_directory`, in groups of a row; see `stream_model` for how it
            computes with them. None quantises nothing.
        quant_group_size: Elements that share a scale and a minimum, even; matrices whose rows
            are not a multiple of it stay as they are.
        modules_to_not_convert: Names of modules that are not quantised, or the last parts of
            names: ``["lm_head", "embed_tokens"]``. Modules within them are not quantised either.
        ranks: The number of processes that will stream it together (see `stream_model`). `out` gets
            a directory for each, ``rank-0`` and so on, with an equal part of every layer; small
            tensors and embeddings are in each as a whole. The files have the full size, and holes:
            copy them with what keeps holes (``cp``, ``rsync --sparse``).
        keep_fused: Leave fused experts of a mixture as the model has them. Then transformers loads
            the file, if nothing is quantised, and an expert is a read for each of its weights.
        handle: Moves the bytes and stays open; None makes one.
        progress: Told of each layer that was written: ``progress(name, done_bytes, total_bytes)``;
            see `nvmeio.progress`.

    Returns:
        The report of the packing.

    Raises:
        FileExistsError: `out` exists, or one of its directories.
        ValueError: There is no such quantisation, or nothing to quantise; a weight holds infinities
            or NaN; no weights are in one of `modules_to_not_convert`, or it is given without
            `quant_bits`; `ranks` of a mixture of experts, which each rank reads for
            itself; `ranks` with several directories; one of them is named twice.
        IntegrityError, TransferError, FileNotFoundError: As for `stream_model`; the disk is full.

    After an error or Ctrl-C: nothing that was written is left, in any of the directories. Only
    a loss of power between two renames can leave some of them, which `stream_model` refuses.

    Cost: each byte is read and written once; memory for two of the largest records, or of a mixture
    without its experts, of which some 32 MiB are converted and written at a time.
    """
    dtype = _checks.dtype("dtype", dtype)
    targets = [Path(os.path.abspath(each)) for each in _checks.directory_paths("out", out)]
    if not isinstance(ranks, int) or not 1 <= ranks < 100_000:
        raise ValueError(f"ranks must be a number of processes, not {ranks!r}")
    setting = None if quant_bits is None else check_setting(quant_bits, quant_group_size)
    if isinstance(modules_to_not_convert, str):
        raise TypeError(f"modules_to_not_convert: give a list, [{modules_to_not_convert!r}]")
    if setting is None and modules_to_not_convert:
        raise ValueError("modules_to_not_convert: nothing is quantised anyway; give quant_bits=4")
    if ranks > 1 and len(targets) > 1:
        raise ValueError(
            "ranks= is for several processes with a drive each, a list of directories is for one "
            "process with several drives: give one, not both"
        )
    for target in targets:
        if target.exists():
            raise FileExistsError(
                f"{target} exists: name a directory that does not exist, or remove it"
            )
    source = Path(hub.directory_of(model_directory))
    model_files.refuse_adapter(source)
    config = transformers.config_of(source)
    with LongCall("pack", targets[0], progress) as call, contextlib.ExitStack() as stack:
        mover = stack.enter_context(handle_for(handle, source))
        checkpoint = stack.enter_context(contextlib.closing(SafetensorsSet(source)))
        if packed_format.parse(checkpoint) is not None:
            raise ValueError(f"{source} is packed already: pack its source")
        model = transformers.empty_model(config, dtype, checkpoint)
        transformers.compute_buffers(model, torch.device("cpu"))
        matched = match(model, checkpoint, strict=True)
        parts = partition(model, matched, None)
        units = [unit for unit in (parts.fixed, *parts.units) if unit.weights]
        if ranks > 1 and any(unit.experts is not None for unit in units):
            raise ValueError(
                "each rank of a mixture reads the experts that its own tokens need: pack it "
                "without ranks, and give each rank the whole model or a copy"
            )
        temporaries = []
        for target in targets:
            temporary = target.parent / f".{target.name}.packing-{secrets.token_hex(4)}"
            stack.callback(durable.remove_directory, temporary)  # before it is there
            durable.make_directory(temporary)
            temporaries.append(temporary)
        directories = temporaries
        if ranks > 1:
            directories = [temporaries[0] / packed_format.rank_directory(n) for n in range(ranks)]
            for directory in directories:
                directory.mkdir()
        left = _weights_in(model, units, modules_to_not_convert)
        sets = find_sets(model, matched, packing=True) if ranks == 1 else []
        if keep_fused:
            sets = [each for each in sets if isinstance(each, ExpertModules)]
        contents = _Contents(
            units, sets, setting, ranks, weights_of(temporaries), left, widens=dtype is not None
        )
        if setting is not None and not contents.newly_quantised:
            raise ValueError(_nothing_quantised(units, setting, left))
        report = _write(directories, contents, checkpoint, mover, call)
        for directory in directories:
            _copy_others(source, directory, next(iter(model.parameters())).dtype)
            durable.sync_directory(directory)
        for temporary in temporaries:
            durable.sync_directory(temporary)
        _publish(temporaries, targets)
    return report


def _weights_in(model: nn.Module, units: Sequence[Unit], modules: Sequence[str]) -> set[str]:
    names = {module: name for name, module in model.named_modules()}
    places = [(f".{names[t.module]}.", u.weights[t.weight].name) for u in units for t in u.targets]
    for wanted in modules:
        if not any(f".{wanted}." in place for place, _ in places):
            paths = [place.strip(".").split(".") for place, _ in places]
            ends = [(path, end) for path in paths for end in range(1, len(path) + 1)]
            known = {name for path, n in ends for name in (path[n - 1], ".".join(path[:n]))}
            raise ValueError(
                f"modules_to_not_convert: no weights are in a module {wanted!r}"
                f"{nearest(wanted, sorted(known))}; name one such as {'.'.join(paths[-1])!r}, or "
                "the last part of its name"
            )
    return {weight for place, weight in places if any(f".{m}." in place for m in modules)}


def _publish(temporaries: Sequence[Path], targets: Sequence[Path]) -> None:
    """Give directories their names: all of them, or after an error none."""
    with contextlib.ExitStack() as undo:
        for temporary, target in zip(temporaries, targets, strict=True):
            undo.callback(_take_back, target, temporary, temporary.stat().st_ino)
            durable.rename(temporary, target)
        undo.pop_all()


def _take_back(target: Path, temporary: Path, inode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if target.stat().st_ino == inode:  # not what somebody else has put there
            target.rename(temporary)


def _nothing_quantised(units: Sequence[Unit], setting: Quantised, left: Set[str]) -> str:
    """Why no weight is quantised, and with which settings some would be."""
    any_size = setting._replace(group_size=1)
    lengths = {
        weight.shape[-1]
        for unit in units
        if unit.modules or unit.row_modules
        for weight in unit.weights
        if weight.name not in left and can_quantise(weight.shape, weight.dtype, any_size)
    }
    if not lengths:
        return (
            f"quant_bits={setting.bits}: no matrix of floating-point numbers is left to quantise: "
            "leave it out, or name less in modules_to_not_convert"
        )
    rows = ", ".join(map(str, sorted(lengths)))
    sizes = sizes_for(lengths)
    which = f"give one of {', '.join(map(str, sizes))}" if sizes else "no even size does"
    return (
        f"quant_group_size={setting.group_size}: no row can be cut into groups of so many: the "
        f"rows have {rows} elements, {which}"
    )


class _Contents:
    """The layout of a packed file: a record for each unit, on pages of its own.

    Args:
        units: The units to pack; a weight that several of them have goes to the first one.
        sets: Experts that are to lie side by side.
        setting: The quantisation of the matrices of layers, if any.
        ranks: How many read a part each.
        weights: The weights of several drives, over which the file is dealt.
        left: Names of weights that are not quantised.
        widens: Whether weights that others quantised are widened where `setting` leaves them.

    Attributes:
        records: In the order of the file.
        places: The place of each record behind the header, and whether all ranks have all of it;
            known with the first header.
        part_sums: For each rank, the checksums of its part of each record.
        quantised: The weights that are, and how.
        experts: Those that lie side by side, by the names of their modules.
        sums: Each tensor's checksums; as many as there will be, so that the header has its length.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        sets: Sequence[ExpertSet],
        setting: Quantised | None,
        ranks: int,
        weights: Sequence[int],
        left: Set[str],
        widens: bool,
    ) -> None:
        self.ranks, self.weights, self.left, self.widens = ranks, weights, left, widens
        self.files = ranks * len(weights)
        self.dealing: Dealing | None = None  # over several drives; known with the first header
        self.piece_sums: list[int] = []  # of its pieces
        self.places: list[tuple[int, int, bool]] = []
        self.quantised: dict[str, PackedWeight] = {}
        self.experts: dict[str, PackedExperts] = {}
        done: set[str] = set()
        records = [self._record(unit, sets, setting, done) for unit in units]
        self.records = [record for record in records if record.runs or record.fused]
        self.part_sums = [[0] * len(self.records) for _ in range(ranks)]
        self.sums = {
            name: [0] * _shares(record.unit, number)
            for record in self.records
            for name, _, _, number in record.tensors
        }
        for record in self.records:
            self.sums |= {fused.tensor: [0] * fused.places.number for fused in record.fused}

    def _record(
        self,
        unit: Unit,
        sets: Sequence[ExpertSet],
        setting: Quantised | None,
        done: set[str],
    ) -> _UnitRecord:
        numbers = {weight.name: number for number, weight in enumerate(unit.weights)}
        numbers = {name: number for name, number in numbers.items() if name not in done}
        done.update(numbers)
        of_unit = [each for each in sets if all(w.name in numbers for w in each.unit.weights)]
        beside = {weight.name for each in of_unit for weight in each.unit.weights}
        experts = () if unit.experts is None else unit.experts.weights
        # Experts come last: the parts of a layer that are always read are then one read.
        always = [number for name, number in numbers.items() if name not in beside]
        always.sort(key=lambda number: number in experts)
        runs = [[stored for n in always for stored in self._stored(unit, n, setting)]]
        fused = []
        for each in of_unit:
            if not isinstance(each, ExpertModules):
                fused.append(self._fused(each, unit, setting))
                continue
            first = len(runs)
            for number in range(each.number):
                own = [numbers[weight.name] for weight in each.weights_of(number)]
                runs.append([stored for n in own for stored in self._stored(unit, n, setting)])
            nbytes = max(map(_run_nbytes, runs[first:]))
            self.experts[each.name] = PackedExperts(each.number, nbytes, {})
        return _UnitRecord(unit, [run for run in runs if run], fused)

    def _stored(self, unit: Unit, number: int, setting: Quantised | None) -> list[_TensorOf]:
        """The tensors that hold a weight of a unit."""
        weight = unit.weights[number]
        packed = self._quantisation(unit, weight, setting)
        if packed is None:
            return [(weight.name, weight.dtype, weight.shape, number)]
        return [(*stored, number) for stored in packed.stored(weight.name)]

    def _quantisation(
        self, unit: Unit, weight: Weight, setting: Quantised | None
    ) -> PackedWeight | None:
        """Note and return how a weight is quantised in the file; None if it is not."""
        is_fixed = not unit.modules and not unit.row_modules  # small: norms, and the like
        is_fixed = is_fixed or weight.name in self.left
        scheme = None if self.widens else weight.quantised
        if setting is not None and not is_fixed:
            fits = can_quantise(weight.shape, weight.dtype, setting)
            scheme = setting if fits else scheme
        if scheme is None:
            return None
        packed = self.quantised[weight.name] = PackedWeight(scheme, weight.dtype, weight.shape)
        return packed

    def _fused(self, experts: ExpertSet, unit: Unit, setting: Quantised | None) -> _FusedExperts:
        """Lay out what an expert has of all weights."""
        weights: dict[str, FusedWeight] = {}
        end = 0
        for weight in experts.unit.weights:
            packed = self._quantisation(unit, weight, setting)
            kinds = [(weight.dtype, weight.shape)]
            if packed is not None:
                kinds = packed.scheme.stored(weight.shape)
            starts = []
            for dtype, shape in kinds:
                starts.append(round_up(end, TENSOR_ALIGNMENT))
                end = starts[-1] + _nbytes(dtype, shape[1:])
            weights[weight.name] = FusedWeight(weight.dtype, weight.shape, tuple(starts))
        places = PackedExperts(experts.number, round_up(end, PAGE_BYTES), weights)
        self.experts[experts.name] = places
        return _FusedExperts(experts.name, experts.unit.weights, places)

    @property
    def newly_quantised(self) -> int:
        """How many weights `setting` quantises; others are held as they were."""
        return sum(isinstance(packed.scheme, Quantised) for packed in self.quantised.values())

    def parts(self, number: int) -> list[_FileShare]:
        """The parts of a record, by the file that they lie in."""
        start, end, whole = self.places[number]
        if self.dealing is not None:
            return [
                _FileShare(piece.drive, piece.start, piece.held_end, self.piece_sums, at)
                for at, piece in enumerate(self.dealing.pieces)
                if start <= piece.start < end
            ]
        found = []
        places = packed_index.cuts(end - start, self.ranks)
        for rank, sums in enumerate(self.part_sums):
            low, high = (0, end - start) if whole else (places[rank], places[rank + 1])
            found.append(_FileShare(rank, start + low, start + high, sums, number))
        return [part for part in found if part.start < part.end]

    def header(
        self, of_source: Mapping[str, str], number: int = 0
    ) -> tuple[bytes, dict[str, TensorEntry], int]:
        """A file's header as of now, where it puts each tensor, and the size of the file."""
        listed: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        position = 0

        def pad(alignment: int) -> None:  # by tensors: nothing else may lie between two
            nonlocal position
            missing = -position % alignment
            if missing:
                listed.append((f"{packed_index.PADDING}{len(listed)}", torch.uint8, (missing,)))
                position += missing

        self.places = []
        for record in self.records:
            pad(PAGE_BYTES)
            start = position
            for run in record.runs:
                pad(PAGE_BYTES)
                for name, dtype, shape, _ in run:
                    pad(TENSOR_ALIGNMENT)
                    listed.append((name, dtype, shape))
                    position += _nbytes(dtype, shape)
            for fused in record.fused:
                pad(PAGE_BYTES)
                listed.append((fused.tensor, torch.uint8, fused.places[:2]))
                position += fused.places.number * fused.places.nbytes
            end = round_up(position, PAGE_BYTES)
            unit = record.unit
            # Every rank reads small parts, and the rows of its own tokens.
            nbytes = sum(_nbytes(dtype, shape) for _, dtype, shape, _ in record.tensors)
            is_small = not unit.modules or (not unit.is_layer and nbytes <= plan_units.SMALL_BYTES)
            self.places.append((start, end, self.ranks == 1 or is_small or bool(unit.row_modules)))
        pad(PAGE_BYTES)
        metadata = {**of_source, "format": "pt"}
        metadata[packed_index.SEAL] = packed_index.OPEN_SEAL
        metadata[packed_index.KEY] = packed_format.describe(self.quantised, self.sums, self.experts)
        if self.ranks > 1:
            metadata[packed_index.PART] = packed_index.describe_part(
                number, self.ranks, self.places, self.part_sums[number]
            )
        if len(self.weights) > 1:
            if self.dealing is None:
                self.dealing = Dealing(self.weights, self._dealt())
                self.piece_sums = [0] * len(self.dealing.pieces)
            metadata[packed_index.PART] = self.dealing.describe(number, self.piece_sums)
        prefix, entries = headers.build(listed, metadata)
        return prefix, entries, len(prefix) + position

    def _dealt(self) -> list[tuple[int, int, int]]:
        """The records for `Dealing`: each row of a looked-up table lies on one drive."""
        found = []
        for (start, end, _), record in zip(self.places, self.records, strict=True):
            rows = [_nbytes(dtype, shape[1:]) for _, dtype, shape, _ in record.tensors]
            more = round_up(max(rows), PAGE_BYTES) if record.unit.row_modules else 0
            found.append((start, end, more))
        return found


class _FileShare(NamedTuple):
    """Bytes behind the header that lie in a file, and where their checksum is noted."""

    file: int
    start: int
    end: int
    sums: list[int]
    at: int


def _shares(unit: Unit, number: int) -> int:
    """How many checksums a tensor has: experts, which are read one by one, have one each."""
    experts = unit.experts
    return 1 if experts is None or number not in experts.weights else experts.number


class _Change:
    """The changes of a weight's elements by quantising, added up in parts."""

    def __init__(self) -> None:
        self._number = 0
        self._change = self._sum = self._squares = 0.0

    def add(self, before: torch.Tensor, change: torch.Tensor) -> None:
        self._number += before.numel()
        self._change += float(change.square().sum(dtype=torch.float64))
        self._sum += float(before.sum(dtype=torch.float64))
        self._squares += float(before.square().sum(dtype=torch.float64))

    @property
    def relative(self) -> float:
        """Its root mean square, divided by the standard deviation of the elements."""
        mean = self._sum / self._number
        spread = math.sqrt(max(self._squares / self._number - mean * mean, 0.0))
        return math.sqrt(self._change / self._number) / (spread or 1.0)  # equal ones are exact


class _StoredWeights:
    """Weights as they are stored: read, converted, quantised where they are to be.

    Counts are so far; errors as of `PackReport`.
    """

    def __init__(
        self, checkpoint: SafetensorsSet, handle: AioHandle, quantised: Mapping[str, PackedWeight]
    ) -> None:
        self._checkpoint, self._handle, self._quantised = checkpoint, handle, quantised
        self.read_bytes = 0
        self.largest_error = 0.0
        self._changes: dict[str, _Change] = {}

    @property
    def relative_error(self) -> float:
        return max((change.relative for change in self._changes.values()), default=0.0)

    def tensors_of(self, weight: Weight) -> list[torch.Tensor]:
        """A weight in the dtype that is wanted, or its quantised parts."""
        return self._converted(weight, [self._read(part, weight.name) for part in weight.parts])

    def experts_of(self, weight: Weight, chosen: range) -> Iterator[list[torch.Tensor]]:
        """The same of some experts of a weight that has all: of each by itself, [1, ...].

        They are read together, and converted when they are asked for.
        """
        number = weight.shape[0]
        stored = []
        for part in weight.parts:
            first, last = (part.nbytes // number * end for end in (chosen.start, chosen.stop))
            extents = extents_within(part.extents, first, last)
            stored.append(
                self._read(
                    part._replace(
                        shape=(len(chosen), *part.shape[1:]),
                        extents=tuple(each._replace(at=each.at - first) for each in extents),
                    ),
                    weight.name,
                )
            )
        one = weight._replace(shape=(1, *weight.shape[1:]))
        for at in range(len(chosen)):
            yield self._converted(one, [part[at : at + 1] for part in stored])

    def _converted(self, weight: Weight, stored: list[torch.Tensor]) -> list[torch.Tensor]:
        packed = self._quantised.get(weight.name)
        if packed is not None and packed.scheme == weight.quantised:
            return stored
        if weight.quantised is None:
            whole = stored[0].to(weight.dtype)
        else:
            whole = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
            weight.quantised.widen(stored, whole)
        del stored
        if packed is None or not isinstance(packed.scheme, Quantised):
            return [whole]
        try:
            parts = quantise(whole, packed.scheme)
        except ValueError as failed:
            raise ValueError(f"{weight.name!r} cannot be quantised: {failed}") from None
        back = torch.empty_like(whole)
        packed.scheme.widen(parts, back)
        before = whole.float()
        change = back.float() - before
        self._changes.setdefault(weight.name, _Change()).add(before, change)
        self.largest_error = max(self.largest_error, float(change.abs_().max()))
        return list(parts)

    def _read(self, part: WeightPart, name: str) -> torch.Tensor:
        memory = buffers.empty_aligned(max(part.nbytes, 1), dtype=torch.uint8)[: part.nbytes]
        self._handle.sync_pread_batch(
            [memory[extent.at : extent.at + extent.nbytes] for extent in part.extents],
            [self._checkpoint.files[extent.file] for extent in part.extents],
            [extent.offset for extent in part.extents],
        )
        for index in {extent.file for extent in part.extents}:
            self._checkpoint.check(index, repr(name))
        self.read_bytes += part.nbytes
        return memory.view(part.dtype).view(part.shape)


def _write(
    directories: Sequence[Path],
    contents: _Contents,
    checkpoint: SafetensorsSet,
    handle: AioHandle,
    call: LongCall,
) -> PackReport:
    """Write the packed file, or one for each rank or drive, and make it durable."""
    source = _StoredWeights(checkpoint, handle, contents.quantised)
    prefix, entries, total = contents.header(checkpoint.metadata)
    in_parts = contents.files > 1
    spans = [part for number in range(len(contents.records)) for part in contents.parts(number)]
    written = len(prefix) * contents.files + sum(part.end - part.start for part in spans)
    call.expect(written)
    is_ours = contents.quantised or any(record.fused for record in contents.records)
    name = packed_index.QUANTISED_NAME if is_ours else shards.DEFAULT_NAME
    name = packed_index.PART_NAME if in_parts else name
    with contextlib.ExitStack() as opened:
        out = [opened.enter_context(files.open(each / name, "x")) for each in directories]
        if in_parts:
            for directory in directories:
                os.truncate(directory / name, total)  # the parts of others stay holes
        # Two pieces at most: one is written while the next is made.
        with InFlight(0) as flight:
            for number, record in enumerate(contents.records):
                at = contents.places[number][0]
                for memory in _filled(record, entries, source, contents.sums):
                    for part in contents.parts(number):
                        start, end = max(part.start, at), min(part.end, at + memory.nbytes)
                        if start >= end:
                            continue
                        room = memory[start - at : end - at]
                        if in_parts:
                            own = crc32.of_memory(room.data_ptr(), room.nbytes)
                            before = part.sums[part.at]
                            part.sums[part.at] = crc32.combine(before, own, room.nbytes)
                        begin = partial(
                            handle.async_pwrite, room, out[part.file], len(prefix) + start
                        )
                        wrote = partial(call.moved, room.nbytes, record.unit.name)
                        flight.start(begin, room.nbytes, wrote)
                    at += memory.nbytes
            for number, file in enumerate(out):
                # With the checksums of the written bytes, and its own.
                text = packed_index.sealed(contents.header(checkpoint.metadata, number)[0])
                head = buffers.empty_aligned(len(text), dtype=torch.uint8)
                head.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
                wrote = partial(call.moved, head.nbytes, "header")
                flight.start(partial(handle.async_pwrite, head, file, 0), head.nbytes, wrote)
        for file in out:
            handle.sync_fsync(file)
    counts = (source.read_bytes, written, len(contents.records), contents.newly_quantised)
    return PackReport(*counts, source.largest_error, source.relative_error)


def _filled(
    record: _UnitRecord,
    entries: Mapping[str, TensorEntry],
    source: _StoredWeights,
    sums_of: Mapping[str, list[int]],
) -> Iterator[torch.Tensor]:
    """A record's bytes, in pieces of whole pages; its checksums are put into `sums_of`."""
    waiting: list[_TensorOf] = []
    for number, run in enumerate(record.runs):
        waiting += run
        is_last = number == len(record.runs) - 1
        if number == 0 or is_last or _run_nbytes(waiting) >= _PIECE_BYTES:
            yield _filled_run(waiting, record.unit, entries, source, sums_of)
            waiting = []
    for fused in record.fused:
        # The larger of the bytes that are read and written.
        most = max(sum(weight.nbytes for weight in fused.weights), _nbytes_of(fused.places))
        step = max(_PIECE_BYTES * fused.places.number // most, 1)
        for first in range(0, fused.places.number, step):
            chosen = range(first, min(first + step, fused.places.number))
            yield _filled_experts(fused, chosen, source, sums_of[fused.tensor])


def _filled_experts(
    fused: _FusedExperts, chosen: range, source: _StoredWeights, sums: list[int]
) -> torch.Tensor:
    """The bytes of some experts."""
    nbytes = fused.places.nbytes
    memory = buffers.empty_aligned(len(chosen) * nbytes, dtype=torch.uint8).zero_()
    for weight in fused.weights:
        starts = fused.places.fused[weight.name].starts
        for number, parts in enumerate(source.experts_of(weight, chosen)):
            for start, part in zip(starts, parts, strict=True):
                at = number * nbytes + start
                memory[at : at + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    for number, expert in enumerate(chosen):
        sums[expert] = crc32.of_memory(memory.data_ptr() + number * nbytes, nbytes)
    return memory


def _filled_run(
    tensors: Sequence[_TensorOf],
    unit: Unit,
    entries: Mapping[str, TensorEntry],
    source: _StoredWeights,
    sums_of: Mapping[str, list[int]],
) -> torch.Tensor:
    """The bytes of some tensors, the first of which begins on a page."""
    start, last = entries[tensors[0][0]].start, entries[tensors[-1][0]]
    nbytes = round_up(last.end - start, PAGE_BYTES)
    memory = buffers.empty_aligned(nbytes, dtype=torch.uint8).zero_()
    made: dict[int, list[torch.Tensor]] = {}
    for name, dtype, shape, number in tensors:
        if number not in made:
            made[number] = source.tensors_of(unit.weights[number])
        entry = entries[name]
        if entry.nbytes:
            room = memory[entry.start - start : entry.end - start].view(dtype).view(shape)
            room.copy_(made[number].pop(0))
        address, sums = memory.data_ptr() + entry.start - start, sums_of[name]
        share = entry.nbytes // len(sums)
        sums[:] = (crc32.of_memory(address + at * share, share) for at in range(len(sums)))
    return memory


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _run_nbytes(tensors: Sequence[_TensorOf]) -> int:
    """Bytes of tensors one behind the other, up to the end of the last page."""
    end = 0
    for _, dtype, shape, _ in tensors:
        end = round_up(end, TENSOR_ALIGNMENT) + _nbytes(dtype, shape)
    return round_up(end, PAGE_BYTES)


def _nbytes_of(experts: PackedExperts) -> int:
    return experts.number * experts.nbytes


def _copy_others(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy configuration, tokenizer and the like; the configuration gets the dtype.

    It does not name how the weights were quantised before: they are widened, or their own file says
    how they are held.
    """
    for entry in sorted([*source.iterdir(), *source.glob(f"{_TEMPLATES}/*")]):
        if entry.is_file() and not entry.name.endswith(_WEIGHTS):
            copied = target / entry.relative_to(source)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(entry, copied)
    path = target / _CONFIG
    config = read_object(path, INDEX_BYTES, source / _CONFIG)
    for name in ("torch_dtype", "quantization_config", "compression_config"):
        config.pop(name, None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for directory, _, names in os.walk(target):
        for name in names:
            durable.sync_file(os.path.join(directory, name))
        durable.sync_directory(directory)
