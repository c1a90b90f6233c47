"""Mixtures of experts: those that a token needs are read, and no byte of the others."""

from __future__ import annotations

import _thread
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from faults._support import wait_until_asleep
from inference._model_budget import Make, least, weights_of
from inference._models import (
    loaded,
    logits,
    mixtral,
    prompt,
    saved,
    tokens,
)
from inside import uses_of
from support import HeldEngine, aged, spin_until, thread

import nvmeio
from nvmeio.checkpoint.safetensors import load_safetensors, save_safetensors
from nvmeio.errors import IntegrityError
from nvmeio.inference import stream_model
from nvmeio.testing import FakeEngine

# Mixtures of experts


def test_only_the_experts_that_a_token_needs_are_read(tmp_path: Path, stream: Make) -> None:
    """One token, two of eight experts in each of four layers."""
    saved(lambda: mixtral(experts=8, intermediate_size=1024), tmp_path)
    whole = loaded(tmp_path)
    layer = whole.model.layers[0]
    experts = sum(p.nbytes for p in layer.mlp.experts.parameters())
    model = stream(tmp_path, resident_bytes=least(stream, tmp_path), window=1)
    one = prompt(batch=1, length=1)
    assert logits(model, one).equal(logits(whole, one))
    stats = model.weight_stream.stats
    assert stats.experts_read == 2 * 4
    others = weights_of(whole) - 4 * experts
    assert stats.bytes_read < experts + 2 * others + (1 << 20)  # of 4 × experts


def test_a_hook_may_route_to_other_experts(tmp_path: Path, stream: Make) -> None:
    """Those that it was given were read, and others computed with: with no bytes of theirs."""
    saved(lambda: mixtral(experts=8), tmp_path)
    whole = loaded(tmp_path)
    model = stream(tmp_path, resident_bytes=least(stream, tmp_path), window=1)
    for each in (model, whole):
        for layer in each.model.layers:
            layer.mlp.experts.register_forward_pre_hook(
                lambda _, given: (given[0], (given[1] + 1) % 8, *given[2:])
            )
    for length in (1, 2):
        ids = prompt(batch=1, length=length)
        assert logits(model, ids).equal(logits(whole, ids))


def test_experts_that_change_their_weights_are_refused(tmp_path: Path, stream: Make) -> None:
    saved(mixtral, tmp_path)
    model = stream(tmp_path, resident_bytes=least(stream, tmp_path), window=1)
    experts = model.model.layers[1].mlp.experts

    kept: list[torch.Tensor] = []

    def change(*_: Any) -> None:
        with torch.no_grad():
            experts.down_proj.mul_(2.0)
        kept[:] = [experts.down_proj.detach()]

    hook = experts.act_fn.register_forward_hook(change)
    with pytest.raises(RuntimeError, match="changed by its layer's own call"):
        logits(model, prompt())
    hook.remove()
    assert logits(model, prompt()).equal(logits(loaded(tmp_path), prompt()))
    # What the hook keeps stays: it became zeros, when the set was dropped.
    whole = loaded(tmp_path).model.layers[1].mlp.experts.down_proj
    expert = next(e for e in range(len(whole)) if bool(kept[0][e].ne(0).any()))
    assert kept[0][expert].equal(whole[expert] * 2.0)


def test_shared_experts_that_are_stored_with_other_values_are_refused(tmp_path: Path) -> None:
    """The first were taken for both: only weights of one tensor of the file were compared."""
    saved(mixtral, tmp_path)
    with torch.device("meta"):
        model = mixtral()
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    with pytest.raises(IntegrityError, match=r"other values for .*layers\.0\.mlp\.experts"):
        stream_model(model, checkpoint=tmp_path, resident_bytes="1G")


def test_no_byte_of_an_expert_that_no_token_needs_is_read(tmp_path: Path, stream: Make) -> None:
    """Counted below the handle, block by block, beside what the loaded model routes to."""
    from nvmeio._formats.safetensors.open_set import header_of

    saved(lambda: mixtral(experts=8, intermediate_size=1024), tmp_path)
    whole = loaded(tmp_path)
    one = prompt(batch=1, length=1)
    routed: dict[int, set[int]] = {}
    for number, layer in enumerate(whole.model.layers):
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, given, number=number: routed.update({number: set(given[1].view(-1).tolist())})
        )
    expected = logits(whole, one)
    assert [len(experts) for experts in routed.values()] == [2] * 4

    path = tmp_path / "model.safetensors"
    with nvmeio.AioHandle(engine="threads") as handle, nvmeio.open(path) as file:
        tensors = header_of(file).tensors
    reads: list[tuple[int, int]] = []

    def note(kind: str, offset: int, nbytes: int) -> int:
        reads.append((offset, offset + nbytes))
        return 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=note)) as handle:
        budget = least(stream, tmp_path)
        model = stream(tmp_path, resident_bytes=budget, handle=handle)
        reads.clear()
        assert logits(model, one).equal(expected)
        model.weight_stream.close()
    read: list[tuple[int, int]] = []
    for name, entry in tensors.items():
        parts = name.split(".")
        if "experts" not in parts:
            continue
        expert = int(parts[2]), int(parts[parts.index("experts") + 1])
        bytes_here = sum(max(0, min(end, entry.end) - max(at, entry.start)) for at, end in reads)
        if bytes_here > 8192:  # neighbours are read in whole pages
            assert entry.nbytes <= bytes_here <= entry.nbytes + 8192, name
            read.append(expert)
    wanted = {(layer, expert) for layer, some in routed.items() for expert in some}
    assert sorted(read) == sorted([*wanted] * 3)  # w1, w2 and w3, each once


def test_a_file_of_experts_that_is_written_to_is_noticed(tmp_path: Path, stream: Make) -> None:
    """It was not where experts that are prefetched lie in a file of their own."""
    saved(mixtral, tmp_path)
    state = load_safetensors(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where = {name: f"{'experts' if '.experts.' in name else 'rest'}.safetensors" for name in state}
    for file in set(where.values()):
        save_safetensors({n: t for n, t in state.items() if where[n] == file}, tmp_path / file)
        aged(tmp_path / file)
    index = {"metadata": {}, "weight_map": where}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = stream(tmp_path, resident_bytes=weights_of(loaded(tmp_path)) * 7 // 8)
    many = prompt(batch=4, length=20)
    for _ in range(2):
        assert logits(model, many).equal(logits(loaded(tmp_path), many))
    before = model.weight_stream.stats.experts.misses
    logits(model, many)
    assert model.weight_stream.stats.experts.misses == before  # all are read ahead
    with (tmp_path / "experts.safetensors").open("r+b") as changed:
        changed.seek(-4096, 2)
        changed.write(bytes(4096))
    with pytest.raises(IntegrityError, match=r"experts\.safetensors changed while"):
        for _ in range(2):  # what was read ahead before is good for one pass at most
            logits(model, many)


def test_an_interrupted_read_of_experts_is_over_before_the_next_pass(
    tmp_path: Path, stream: Make
) -> None:
    """It went on into memory that the next layer had got by then."""
    saved(lambda: mixtral(experts=8), tmp_path)
    engine = HeldEngine()
    engine.gate.set()
    one = prompt(batch=1, length=1)
    with nvmeio.AioHandle(engine=engine) as handle:
        budget = least(stream, tmp_path)
        model = stream(tmp_path, resident_bytes=budget, window=1, handle=handle)
        assert logits(model, one).equal(logits(loaded(tmp_path), one))
        held: list[int] = []

        def hold(*_: Any) -> None:
            held.append(engine.begun)
            engine.gate.clear()

        def interrupt() -> None:
            spin_until(lambda: bool(held) and engine.begun > held[0])
            _thread.interrupt_main()
            wait_until_asleep(os.getpid())  # it has come, and the read is waited for all the same
            engine.gate.set()

        hook = model.model.layers[2].mlp.gate.register_forward_hook(hold)
        with thread(interrupt), pytest.raises(KeyboardInterrupt):
            logits(model, one)
        hook.remove()
        assert logits(model, one).equal(logits(loaded(tmp_path), one))
        model.weight_stream.close()


def test_a_prompt_that_needs_most_experts_has_them_prefetched(tmp_path: Path, stream: Make) -> None:
    saved(mixtral, tmp_path)
    whole = loaded(tmp_path)
    model = stream(tmp_path, resident_bytes=weights_of(whole) * 7 // 8)
    many = prompt(batch=4, length=20)
    for _ in range(3):
        assert logits(model, many).equal(logits(whole, many))
    before = model.weight_stream.stats.experts.misses
    logits(model, many)
    assert model.weight_stream.stats.experts.misses == before


def test_experts_that_were_not_read_are_never_used(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NaN where nothing was read, an expert too few would show."""
    saved(lambda: mixtral(experts=8), tmp_path)
    model = stream(tmp_path, resident_bytes=1 << 20)
    take = uses_of(model).resources.memory.take

    def poisoned(unit: Any, stays: bool) -> Any:
        slot = take(unit, stays)
        if slot is not None:
            slot.host.fill_(0xFF)
        return slot

    monkeypatch.setattr(uses_of(model).resources.memory, "take", poisoned)
    ids = prompt(batch=1, length=2)
    assert tokens(model, ids, 8).equal(tokens(loaded(tmp_path), ids, 8))
