"""Rows of fused experts without tokens, with gradients on the drive and with masters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from _mixtures import fused, loss_of
from _offload_models import WithMasters

from nvmeio.offload import SwappedModule, SwappedOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.timeout(120),
]

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
}
ALONE = {"SGD", "Adagrad"}  # a gradient of zeros changes nothing
WAYS = [("disk", False), ("memory", True), ("disk", True)]
WAY_NAMES = ["disk", "masters", "disk-masters"]


class Pair:
    """A mixture on the drive, and one in memory that is to be the same after each step."""

    def __init__(
        self, name: str, gradients: str, masters: bool, folder: Path, **options: Any
    ) -> None:
        self.kind, self.arguments = CLASSES[name]
        self.masters, self.gradients, self.folder, self.options = (
            masters,
            gradients,
            folder,
            options,
        )
        dtype = torch.bfloat16 if masters else torch.float32
        self.theirs = fused().to(dtype)
        reference: Any = WithMasters if masters else self.kind
        given = (self.kind,) if masters else ()
        self.reference = reference(self.theirs.parameters(), *given, **self.arguments)
        self.open()

    def open(self) -> None:
        ours = fused().to(torch.bfloat16 if self.masters else torch.float32)
        window = int(sum(p.nbytes for p in ours.parameters()) * 0.75) + 65536
        self.module = SwappedModule(ours, swap_dir=self.folder, resident_bytes=window)
        more = {"master_dtype": torch.float32} if self.masters else {}
        self.optimizer = SwappedOptimizer(
            self.kind,
            self.module.parameters(),
            swap_dir=self.folder,
            subgroup_bytes=64 << 10,
            durable=False,
            gradients=self.gradients,
            **more,
            **self.options,
            **self.arguments,
        )

    def close(self) -> None:
        self.optimizer.close()
        self.module.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, *batches: tuple[int, int], clip: float = 0) -> tuple[int, int]:
        """One step over some (seed, tokens); what the optimizer has read and written for it."""
        before = self.optimizer.bytes_read, self.optimizer.bytes_written
        for seed, number in batches:
            loss_of(self.module, seed, number).backward()
            loss_of(self.theirs, seed, number).backward()
        if clip:
            found = self.optimizer.clip_grad_norm_(clip)
            wanted = torch.nn.utils.clip_grad_norm_(self.theirs.parameters(), clip)
            assert torch.equal(found.to(wanted.dtype), wanted)
            assert wanted > clip
        self.optimizer.step()
        self.reference.step()
        moved = self.optimizer.bytes_read - before[0], self.optimizer.bytes_written - before[1]
        self.optimizer.zero_grad()
        self.reference.zero_grad()
        return moved

    def assert_alike(self) -> None:
        found = self.module.state_dict()
        for key, tensor in self.theirs.state_dict().items():
            assert torch.equal(found[key], tensor), key
        ours = self.optimizer.state_dict()["state"]
        if self.masters:
            for number, master in enumerate(self.reference.masters):
                assert torch.equal(ours[number]["master"], master), number
        theirs = self.reference.optimizer if self.masters else self.reference
        for number, entry in theirs.state_dict()["state"].items():
            for name, value in entry.items():
                same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
                assert same(ours[number][name], value), (number, name)


@pytest.mark.parametrize(("gradients", "masters"), WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("name", CLASSES)
def test_rows_without_tokens_are_neither_read_nor_written(
    name: str, gradients: str, masters: bool, tmp_path: Path
) -> None:
    """All were, with gradients on the drive or with masters."""
    with Pair(name, gradients, masters, tmp_path) as pair:
        pair.step((9, 64))
        whole = pair.step((9, 64))
        for seed in range(6):  # others have tokens each time, some for the first time
            read, written = pair.step((seed, 1))
            assert (read < whole[0] * 0.6) == (name in ALONE), (read, whole[0])
            assert (written < whole[1] * 0.6) == (name in ALONE), (written, whole[1])
            pair.assert_alike()


@pytest.mark.parametrize(("gradients", "masters"), WAYS, ids=WAY_NAMES)
def test_accumulated_and_clipped_gradients(gradients: str, masters: bool, tmp_path: Path) -> None:
    """A row's zeros are those of all micro-batches, whichever came first."""
    with Pair("Adagrad", gradients, masters, tmp_path) as pair:
        pair.step((9, 64))
        whole = pair.step((9, 64))
        for seed in range(4):
            read, written = pair.step((seed, 1), (seed + 20, 1))
            assert read < whole[0] * 0.8
            assert written < whole[1] * 0.9
            pair.assert_alike()
        if not masters:  # torch clips bf16 gradients before they are widened
            pair.step((1, 1), (2, 1), clip=1e-3)
            pair.step((3, 1), clip=1e-3)
            pair.assert_alike()


@pytest.mark.parametrize(("gradients", "masters"), WAYS, ids=WAY_NAMES)
def test_a_step_that_decays_brings_zeros_from_nowhere(
    gradients: str, masters: bool, tmp_path: Path
) -> None:
    """Zeros of gradients are not on the drive: an option that is set later steps them all."""
    with Pair("SGD", gradients, masters, tmp_path) as pair:
        pair.step((9, 64))
        pair.step((0, 1))
        inner = pair.reference.optimizer if masters else pair.reference
        for steps in (pair.optimizer, inner):
            steps.param_groups[0]["weight_decay"] = 0.1
        pair.step((1, 1))
        pair.step((2, 1), (3, 1))
        pair.assert_alike()


@pytest.mark.parametrize(("gradients", "masters"), WAYS, ids=WAY_NAMES)
def test_it_goes_on_after_resume(gradients: str, masters: bool, tmp_path: Path) -> None:
    with Pair("Adagrad", gradients, masters, tmp_path, resume=True) as pair:
        pair.step((9, 64))
        for seed in range(3):
            pair.step((seed, 1))
        pair.close()
        pair.open()
        assert pair.optimizer.generation == 5
        pair.assert_alike()
        for seed in range(3):
            pair.step((seed + 3, 1))
        pair.assert_alike()


@pytest.mark.parametrize(("gradients", "masters"), WAYS, ids=WAY_NAMES)
def test_a_state_dict_is_taken_over_in_the_middle(
    gradients: str, masters: bool, tmp_path: Path
) -> None:
    with Pair("Adagrad", gradients, masters, tmp_path) as pair:
        pair.step((9, 64))
        weights = {name: t.clone() for name, t in pair.module.state_dict().items()}
        state = copy.deepcopy(pair.optimizer.state_dict())  # else it is on the drive
        after = []
        for _ in range(2):
            for seed in range(2):
                loss_of(pair.module, seed, 1).backward()
                pair.optimizer.step()
                pair.optimizer.zero_grad()
            after.append({name: t.clone() for name, t in pair.module.state_dict().items()})
            pair.module.load_state_dict(weights)
            pair.optimizer.load_state_dict(state)
        for name, tensor in after[0].items():
            assert torch.equal(tensor, after[1][name]), name


def test_rounded_weights_that_somebody_changed_follow_their_masters(tmp_path: Path) -> None:
    """Masters step, and weights follow them, those of rows without tokens too."""
    with Pair("SGD", "memory", True, tmp_path) as pair:
        pair.step((9, 64))
        pair.step((0, 1))
        with torch.no_grad():
            ours = pair.module.module.layers[1].mixture.experts.up
            with pair.module.gather(ours):
                ours.add_(1)
            pair.theirs.layers[1].mixture.experts.up.add_(1)
        pair.step((0, 1))
        pair.assert_alike()
        pair.step((1, 1))
        pair.assert_alike()


def test_gradients_of_zeros_have_no_bytes_on_the_drive(tmp_path: Path) -> None:
    """With any class, where a piece of a parameter has none but zeros."""
    with Pair("AdamW", "disk", False, tmp_path) as pair:

        def written(seed: int, number: int) -> int:
            before = pair.optimizer.bytes_written
            loss_of(pair.module, seed, number).backward()
            pair.optimizer.clip_grad_norm_(1e9)  # waits until they are written
            return pair.optimizer.bytes_written - before

        for parameter in pair.module.parameters():
            assert parameter.grad is None
        many = written(9, 64)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        few = written(0, 1)
        pair.optimizer.step()
        assert few < many


@pytest.mark.parametrize("name", sorted(ALONE))
def test_rows_whose_state_is_in_memory_keep_their_shape(name: str, tmp_path: Path) -> None:
    """A parameter of one piece with all of its rows was a single row in the state dict."""
    with Pair(name, "memory", True, tmp_path, ratio=0.0) as pair:
        pair.optimizer.close()
        pair.optimizer = SwappedOptimizer(
            pair.kind,
            pair.module.parameters(),
            swap_dir=tmp_path,
            ratio=0.0,
            master_dtype=torch.float32,
            **pair.arguments,
        )
        pair.step((9, 64))
        pair.assert_alike()
        pair.optimizer.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
        pair.step((1, 1))
        pair.assert_alike()
