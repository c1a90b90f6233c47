"""Units, which are streamed as one: found in a model's module tree. No I/O here.

A unit is a layer with everything in it, or a larger leaf outside of the layers (an output head), or
leaves that share their weights. Whatever is small and outside of the layers is `fixed`: always
there. If that is too large for the memory, layers are cut into their leaves, and the
matrices of linear layers into tiles, which are units like others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._pages import TENSOR_ALIGNMENT, round_up
from nvmeio._residency.tiled_linear import can_be_tiled
from nvmeio._residency.window import Place, row_major
from nvmeio.errors import an
from nvmeio.inference._plan.checksums import ExpectedBytes, expected_of
from nvmeio.inference._plan.slot_layout import SlotLayout, Weight, dealt, lay_out, rows_of

# Leaves outside of layers up to this size are never streamed: a read of so little costs as much as
# its round trip.
SMALL_BYTES = 1 << 20
# If layers are cut, small parts stay up to this share of a unit: there may be hundreds of them.
_FIXED_SHARE = 16
# A dotted name, around the first number in it.
_NUMBERED = re.compile(r"((?:[^.]*[^.0-9][^.]*\.)*)([0-9]+(?=\.|$))?(.*)")
# Compute with the weights of their children, some only where nothing is trained.
_AS_ONE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class Target(NamedTuple):
    """The parameter or buffer of a module that shows a weight.

    Attributes:
        weight: Its number in the unit.
        empty: The tensor that stands there while it is gone, on the meta device.
        version: How often that had been changed in place when the model was streamed; None before,
            for a buffer, and where torch does not count it.
    """

    module: nn.Module
    attribute: str
    is_buffer: bool
    weight: int
    empty: torch.Tensor
    version: int | None = None


class Experts(NamedTuple):
    """The fused experts of a unit, each of which `pack` gives a checksum.

    `module` is called with the experts that each token is routed to; `weights` are numbers of those
    whose first dimension counts experts.
    """

    module: nn.Module
    number: int
    weights: frozenset[int]


class Unit:
    """Weights that are read as one.

    Attributes:
        name: Dotted name of its (first) module.
        modules: Modules whose forward needs the weights.
        row_modules: Embeddings that can do with the rows of their tokens.
        weights: Each once.
        layout: Its slot; set by `plan`.
        places: The places of its weights' parts in the slot, in order: the first byte, dtype,
            shape and strides; set by `plan`.
        as_stored: Whether each weight is one part, just as the model wants it; set by `plan`.
        sums: Checksums of the bytes there, if the file has them; set by `plan`.
        resident: Whether it stays once it is there; set by the budget.
        tiles: The units that are read in its place, with the rows of its only weight in order.
        tiled: The linear layers that compute with these.
        own_alignment: The layout that `plan` was asked for.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.modules: list[nn.Module] = []
        self.row_modules: list[nn.Embedding] = []
        self.targets: list[Target] = []
        self.weights: list[Weight] = []
        self.experts: Experts | None = None
        self.layout = SlotLayout(0, (), ())
        self.places: tuple[Place, ...] = ()
        self.as_stored = False
        self.sums: tuple[ExpectedBytes, ...] = ()
        self.resident = False
        self.is_layer = False
        self.tiles: list[Unit] = []
        self.tiled: list[nn.Linear] = []
        self.own_alignment = False

    def plan(self, checkpoint: SafetensorsSet, own_alignment: bool) -> None:
        self.own_alignment = own_alignment
        sizes = [file.size() for file in checkpoint.files]
        parts = [part for weight in self.weights for part in weight.parts]
        layout = lay_out(parts, sizes, own_alignment)
        self.layout = dealt(layout, checkpoint.spans)
        self.places = tuple(
            (start, part.dtype, part.shape, part.strides or row_major(part.shape))
            for start, part in zip(layout.starts, parts, strict=True)
        )
        self.as_stored = all(
            len(weight.parts) == 1
            and weight.order is None
            and weight.compute is None
            and not weight.converted_bytes
            for weight in self.weights
        )
        self.sums = expected_of(self.weights, layout.starts, checkpoint.spans)

    @property
    def converted_bytes(self) -> int:
        """Room for its converted weights while it is used."""
        if self.as_stored:
            return 0
        return sum(round_up(weight.converted_bytes, TENSOR_ALIGNMENT) for weight in self.weights)

    @property
    def widened_bytes(self) -> int:
        """Room for the largest matrix that is widened for a product."""
        return max((weight.widened_bytes for weight in self.weights), default=0)

    @property
    def needed_bytes(self) -> int:
        """The approximate bytes of its use: its own, and the converted ones."""
        return sum(weight.nbytes + weight.converted_bytes for weight in self.weights)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are read when it is used and not there; for mixtures, with all experts."""
        return self.layout.nbytes if self.modules else 0

    def __repr__(self) -> str:
        kept = "resident" if self.resident else "streamed"
        return f"<Unit {self.name} of {self.layout.nbytes} bytes, {kept}>"


class Partition(NamedTuple):
    """A model in parts: `fixed` is always there, `units` in the order of the module tree."""

    fixed: Unit
    units: list[Unit]


def partition(
    model: nn.Module,
    weights: dict[int, Weight],
    layers: Sequence[nn.Module | str] | None,
    most: int | None = None,
) -> Partition:
    """Cut a model into units.

    Layers may share modules without weights (one activation for all, a cached rotary embedding):
    nothing of these comes or goes. Weights in a shared module would be taken away by one layer
    while the other, which may be kept, needs them.

    Args:
        model: Its weights on the meta device.
        weights: By the id of the meta tensor that each is shown as.
        layers: Modules or their names; None finds them.
        most: Bytes of a unit, where cutting can do that: the leaves of larger layers are units, and
            tiles of larger linear layers.

    Raises:
        ValueError: `layers` names a missing module, one that lies within another of them, or two
            that share a module with weights.
    """
    names = {module: name for name, module in model.named_modules()}
    given = find_layers(model) if layers is None else _given(model, names, layers)
    chosen = list(dict.fromkeys(given))
    small = SMALL_BYTES
    if most is not None:
        small = min(small, most // _FIXED_SHARE)
        chosen = [part for layer in chosen for part in _cut(layer, weights, most, small)]
    covered: set[nn.Module] = set()
    for layer in chosen:
        inside = set(layer.modules())
        for module in layer.modules():
            if module not in covered:
                continue
            if module in chosen:
                raise ValueError(f"layer {names[layer]!r} is in or around another: name one")
            if _weights_of(module, weights):
                raise ValueError(
                    f"layer {names[layer]!r} shares {names[module]!r} and its weights with another "
                    "layer: name what holds both in layers="
                )
        covered |= inside
    fixed = Unit("the parts outside of the layers")
    units: list[Unit] = []
    groups: dict[tuple[str, ...], Unit] = {}
    done: set[nn.Module] = set()
    for module in model.modules():  # in the order of the tree, each once
        if module in covered:
            if module in chosen and module not in done:
                done.add(module)
                unit = Unit(names[module])
                unit.is_layer = True
                unit.modules = [module]
                _take(unit, module.modules(), weights)
                unit.experts = _experts(unit, module)
                if unit.weights:
                    units.append(unit)
            continue
        found = _weights_of(module, weights)
        if not found:
            continue
        if any(True for _ in module.children()) or sum(w.nbytes for w in found) <= small:
            _take(fixed, [module], weights)
            continue
        takes_rows = _takes_rows(module) and found[0].lies_in_rows
        key = tuple(weight.name for weight in found)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Unit(names[module])
            units.append(group)
        elif not takes_rows and not group.modules:
            # Tied, an embedding and a head: as a read, it takes place where the head is.
            units.remove(group)
            units.append(group)
        if takes_rows:
            group.row_modules.append(module)  # type: ignore[arg-type]
        else:
            group.modules.append(module)
        _take(group, [module], weights)
    if most is not None:
        units = [part for unit in units for part in _in_tiles(unit, fixed, weights, most)]
    return Partition(fixed, units)


def _cut(layer: nn.Module, weights: dict[int, Weight], most: int, small: int) -> list[nn.Module]:
    """The parts of a layer that are still streamed as one; leaves beside them are by themselves.

    A module that has weights of its own and children, as torch's attention has, may compute with
    those of its children itself. Weights that two parts need stay with both in one.
    """
    unit = Unit("")
    _take(unit, layer.modules(), weights)
    children = list(layer.children())
    own = sum(weight.nbytes for weight in _weights_of(layer, weights))
    as_one = isinstance(layer, _AS_ONE) or (children and own > small)
    if not unit.weights:
        return []
    if unit.needed_bytes <= most or as_one:
        return [layer]
    found = [
        part
        for child in _called(children)
        if any(True for _ in child.children())
        for part in _cut(child, weights, most, small)
    ]
    parts = list(dict.fromkeys(found))  # one that is called twice is one
    return [layer] if _share(layer, parts, weights) else parts


def _share(layer: nn.Module, parts: Sequence[nn.Module], weights: dict[int, Weight]) -> bool:
    """Whether a module with weights is in two parts of a layer, or in one and beside them."""
    seen: set[nn.Module] = set()
    for each in [*(part.modules() for part in parts), _beside(layer, set(parts))]:
        needed = {module for module in each if _weights_of(module, weights)}
        if needed & seen:
            return True
        seen |= needed
    return False


def _beside(module: nn.Module, parts: Set[nn.Module]) -> Iterable[nn.Module]:
    """A module and its submodules, without some parts."""
    if module not in parts:
        yield module
        for child in module.children():
            yield from _beside(child, parts)


def _in_tiles(unit: Unit, fixed: Unit, weights: dict[int, Weight], most: int) -> Iterable[Unit]:
    """A unit, followed by its tiles if it is too large and has linear layers only."""
    tiled = [module for module in unit.modules if can_be_tiled(module)]
    if unit.is_layer or not tiled or tiled != unit.modules or unit.needed_bytes <= most:
        return [unit]
    matrix = tiled[0].weight
    cut = rows_of(weights[id(matrix)], most) if id(matrix) in weights else []
    if not cut:
        return [unit]
    whole = Unit(unit.name)
    whole.row_modules, whole.tiled = unit.row_modules, tiled  # type: ignore[assignment]
    _take(whole, [*unit.row_modules, *tiled], weights, "weight")
    _take(fixed, tiled, weights, "bias")
    for first, last, weight in cut:
        tile = Unit(f"{unit.name}, rows {first} to {last}")
        module = Tile(matrix, first, last)  # type: ignore[arg-type]
        tile.modules, tile.weights = [module], [weight]
        tile.targets = [Target(module, "weight", False, 0, module.weight)]
        whole.tiles.append(tile)
    return [whole, *whole.tiles]


def as_code(names: Sequence[str]) -> str:
    """Dotted names as Python has them in a list, those that differ by a number in one expression.

    "head", "blocks.0", "blocks.1" is ``'head', *(f'blocks.{n}' for n in range(2))``.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, behind = _NUMBERED.match(name).groups()  # type: ignore[union-attr]
        groups.setdefault((before, behind), []).append(int(number or -1))
    parts: list[str] = []
    for (before, behind), numbers in groups.items():
        first, last = numbers[0], numbers[-1] + 1
        if len(numbers) > 1 and numbers == list(range(first, last)):
            counted = f"range({first}, {last})" if first else f"range({last})"
            parts.append(f"*(f'{before}{{n}}{behind}' for n in {counted})")
        else:
            parts += [repr(f"{before}{'' if n < 0 else n}{behind}") for n in numbers]
    return ", ".join(parts)


class Tile(nn.Module):
    """Rows [first, last) of a linear layer whose weight is on the meta device."""

    weight: nn.Parameter

    def __init__(self, weight: torch.Tensor, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last
        empty = torch.empty(last - first, weight.shape[1], dtype=weight.dtype, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=weight.requires_grad)

    def forward(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        own = None if bias is None else bias[self.first : self.last]
        return functional.linear(input, self.weight, own)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, in the order of its tree.

    For transformers' models, the classes that they say must not be split; for others, the members
    of the outermost `ModuleList` and `Sequential` containers that hold weights.
    """
    classes = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    found = list(_outermost(model, lambda module: type(module).__name__ in classes))
    if found:
        return found
    members = {
        child
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for child in _called(module.children())
        if any(True for _ in child.parameters())
    }
    return list(_outermost(model, lambda module: module in members))


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward; lists of modules lack one, but their members may not."""
    return type(module).forward is not nn.Module.forward


def _called(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """Modules, with the members of lists and dictionaries of modules in place of these."""
    for module in modules:
        if _is_called(module):
            yield module
        else:
            yield from _called(module.children())


def _outermost(module: nn.Module, wanted: Any) -> Iterable[nn.Module]:
    for child in module.children():
        if wanted(child):
            yield child
        else:
            yield from _outermost(child, wanted)


def _given(
    model: nn.Module, names: dict[nn.Module, str], layers: Sequence[nn.Module | str]
) -> list[nn.Module]:
    chosen = []
    for layer in layers:
        if isinstance(layer, str):
            try:
                chosen.append(model.get_submodule(layer))
            except AttributeError:
                raise ValueError(f"layers: the model has no module {layer!r}") from None
        elif layer in names:
            chosen.append(layer)
        else:
            kind = type(layer).__name__
            raise ValueError(f"layers holds {an(kind)} that is not in the model: name its modules")
    return chosen


def _tensors_of(module: nn.Module) -> Iterable[tuple[str, bool, torch.Tensor]]:
    for is_buffer, tensors in ((False, module._parameters), (True, module._buffers)):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, is_buffer, tensor


def _weights_of(module: nn.Module, weights: dict[int, Weight]) -> list[Weight]:
    return [weights[id(t)] for _, _, t in _tensors_of(module) if id(t) in weights]


def _take(
    unit: Unit, modules: Iterable[nn.Module], weights: dict[int, Weight], only: str | None = None
) -> None:
    numbers = {weight.name: number for number, weight in enumerate(unit.weights)}
    for module in modules:
        for attribute, is_buffer, tensor in _tensors_of(module):
            weight = weights.get(id(tensor))
            if weight is None or (only is not None and attribute != only):
                continue
            if weight.name not in numbers:
                numbers[weight.name] = len(unit.weights)
                unit.weights.append(weight)
            number = numbers[weight.name]
            unit.targets.append(Target(module, attribute, is_buffer, number, tensor))


def _takes_rows(module: nn.Module) -> bool:
    """Whether a module needs the rows of its tokens only: the forward is an embedding's own."""
    if not isinstance(module, nn.Embedding) or "forward" in module.__dict__:
        return False
    stock = type(module).forward is nn.Embedding.forward and module.max_norm is None
    # A hook may need another parameter or buffer: pruning has two.
    return stock and [name for name, _, _ in _tensors_of(module)] == ["weight"]


def _experts(unit: Unit, layer: nn.Module) -> Experts | None:
    """The fused experts of a layer, where there is one set of them, called with the routing."""
    found = []
    for module in layer.modules():
        count = getattr(module, "num_experts", None)
        shapes = [p.shape for p in module.parameters(recurse=False)]
        if (
            isinstance(count, int)
            and shapes
            and all(len(shape) >= 2 and shape[0] == count for shape in shapes)
            and "top_k_index" in inspect.signature(module.forward).parameters
        ):
            found.append(module)
    if len(found) != 1:
        return None
    module = found[0]
    numbers = [t.weight for t in unit.targets if t.module is module and not t.is_buffer]
    others = [t.weight for t in unit.targets if t.module is not module]
    if not numbers or set(numbers) & set(others):
        return None
    if any(unit.weights[number].order is not None for number in numbers):
        return None  # an expert is not a run of bytes there
    return Experts(module, int(module.num_experts), frozenset(numbers))  # type: ignore[arg-type]
