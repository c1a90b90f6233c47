"""Bits that flip on the drive are found when they are read, before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_state, assert_same_weights, loss_of, model, train
from inside import swapper_of

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._swap_files import manifests


def resumed(made: Any, folder: Path, **options: Any) -> SwappedOptimizer:
    given: dict[str, Any] = {"subgroup_bytes": 64 << 10, "resume": True, **options}
    return SwappedOptimizer(torch.optim.Adam, made.parameters(), swap_dir=folder, **given)


def flip(optimizer: SwappedOptimizer, number: int, name: str) -> str:
    """One bit in the middle of what is current of a parameter; the file."""
    swapper: Any = swapper_of(optimizer)
    swapper._owner.call(swapper.pipeline.forget_ahead)
    piece = swapper.params[number].pieces[0]
    (part,) = swapper.store.files.file_parts(piece, name)
    path = Path(optimizer.swap_dir) / f"state.{piece.current}"
    with path.open("r+b") as file:
        file.seek(part.file_offset + part.nbytes // 2)
        (byte,) = file.read(1)
        file.seek(part.file_offset + part.nbytes // 2)
        file.write(bytes([byte ^ 0x10]))
    return str(path)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_flipped_bit_of_state_ends_the_step_before_it(name: str, tmp_path: Path) -> None:
    """Training went on with it."""
    made = model()
    with resumed(made, tmp_path) as optimizer:
        train(made, optimizer, 2)
        path = flip(optimizer, 4, name)
        loss_of(made, 2).backward()
        before = [p.detach().clone() for p in made.parameters()]
        for _ in range(2):
            with pytest.raises(nvmeio.IntegrityError) as told:
                optimizer.step()
            for word in (path, "parameter 4", name):
                assert word in str(told.value)
        assert optimizer.broken == ""
        assert optimizer.generation == 3
        assert all(map(torch.equal, made.parameters(), before))


@pytest.mark.parametrize("masters", [False, True])
def test_a_flipped_bit_of_weights_is_found_on_resuming(masters: bool, tmp_path: Path) -> None:
    options = {"master_dtype": torch.float32} if masters else {}
    dtype = torch.bfloat16 if masters else torch.float32
    made = model(dtype)
    with resumed(made, tmp_path, **options) as optimizer:
        train(made, optimizer, 2)
        path = flip(optimizer, 0, "weights")
    with pytest.raises(nvmeio.IntegrityError, match="parameter 0") as told:
        resumed(model(dtype), tmp_path, **options)
    assert path in str(told.value)
    with resumed(model(dtype), tmp_path, checksum=False, **options) as optimizer:
        assert optimizer.generation == 3


def test_without_checksums_nothing_is_checked(tmp_path: Path) -> None:
    made = model()
    with resumed(made, tmp_path, checksum=False) as optimizer:
        train(made, optimizer, 2)
        flip(optimizer, 4, "exp_avg")
        train(made, optimizer, 1, 2)
    with resumed(made, tmp_path) as optimizer:  # what was not summed is not missed
        train(made, optimizer, 2, 3)
        flip(optimizer, 4, "exp_avg")
        loss_of(made, 5).backward()
        with pytest.raises(nvmeio.IntegrityError):
            optimizer.step()


def test_a_manifest_of_before_there_were_checksums_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, theirs = model(), model()
    encode = manifests._tensors_of

    def without(manifest: Any) -> dict[str, Any]:
        return {name: value for name, value in encode(manifest).items() if name != "sums"}

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "_tensors_of", without)
        with resumed(made, tmp_path) as optimizer:
            train(made, optimizer, 2)
    again = model()
    reference = torch.optim.Adam(theirs.parameters())
    train(theirs, reference, 4)
    with resumed(again, tmp_path) as optimizer:
        train(again, optimizer, 2, 2)
        assert_same_weights(again, theirs)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_what_is_loaded_added_and_left_out_is_summed_too(tmp_path: Path) -> None:
    """Each way to the drive, then a step that reads it all."""
    made = model()
    with resumed(made, tmp_path) as optimizer:
        train(made, optimizer, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.reload_weights()
        extra = torch.nn.Parameter(torch.ones(5000))
        optimizer.add_param_group({"params": [extra]})
        for _ in range(2):
            extra.grad = torch.ones_like(extra)
            optimizer.step()  # the others have no gradient
            optimizer.zero_grad()
        train(made, optimizer, 2, 2)
        extra.grad = torch.ones_like(extra)
        optimizer.step()
        optimizer.zero_grad()
        swapper: Any = swapper_of(optimizer)
        assert all(set(piece.sums) == set(piece.spans) for piece in swapper.store.files.pieces)
        flip(optimizer, len(swapper.params) - 1, "exp_avg")
        extra.grad = torch.ones_like(extra)
        with pytest.raises(nvmeio.IntegrityError):
            optimizer.step()


def test_weights_that_their_module_changes_by_hand_are_no_fault(tmp_path: Path) -> None:
    """Parameters that live in the state files: `gather` writes there too."""
    made = model()
    with (
        SwappedModule(made, swap_dir=tmp_path, resident_bytes=1 << 20) as module,
        resumed(module, tmp_path) as optimizer,
    ):
        train(module, optimizer, 2)
        with module.gather(), torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
        train(module, optimizer, 2, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.pop("begun"),
        lambda told: told.update(current=told["current"][:-1]),
        lambda told: told.update(current="x" * len(told["current"])),
        lambda told: told.update(begun=3),
        lambda told: told.update(generation="new"),
        lambda told: told.update(tensors="AAAA"),
        lambda told: told.update(tensors=None),
    ],
)
def test_a_whole_manifest_with_other_content_is_named(change: Any, tmp_path: Path) -> None:
    """Its checksum is right. A raw ValueError of zip(), or silently an older step."""
    import json
    import zlib

    made = model()
    with resumed(made, tmp_path) as optimizer:
        train(made, optimizer, 2)
    path = tmp_path / "optimizer" / manifests.NAMES[3 % 2]
    data = path.read_bytes()
    header, body = data[: manifests.HEADER_BYTES], data[manifests.HEADER_BYTES :]
    length = int(header[manifests.DURABLE_AT + 1 :].split()[0], 16)
    told = json.loads(body[:length])
    change(told)
    body = json.dumps(told).encode()
    start = header[: manifests.DURABLE_AT + 1]
    path.write_bytes(start + f" {len(body):07x} {zlib.crc32(body):08x}".encode() + body)
    with pytest.raises(nvmeio.IntegrityError, match=r"manifest\.1"):
        resumed(model(), tmp_path)
