"""Backward knows from the forward pass which experts it comes to, and reads them ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import loaded, prompt, saved
from inference.test_mixture_training import (
    Make,
    adapted,
    assert_same,
    many_experts,
    trained,
    with_share,
)

from nvmeio.inference._experts.cache import ExpertCache, ExpertStats
from nvmeio.inference._experts.recency import Recency
from nvmeio.inference._experts.way_back import WayBack

pytestmark = pytest.mark.timeout(300)


def ids_of(step: int) -> torch.Tensor:
    return prompt(batch=1, length=5, seed=step)


def in_backward(model: Any, steps: int = 4) -> ExpertStats:
    """What the backward passes of some steps have cost, without those of forward."""
    weights = model.get_base_model().weight_stream
    total = ExpertStats()
    for step in range(steps):
        given = ids_of(step)
        loss = model(input_ids=given, labels=given).loss
        before = weights.stats.experts
        loss.backward()
        after = weights.stats.experts
        total = ExpertStats(*(t + a - b for t, a, b in zip(total, after, before, strict=True)))
        model.zero_grad()
    return total


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "new", "reentrant"])
@pytest.mark.parametrize("kernel", ["grouped_mm", "eager"])  # batched_mm saves its own copies
def test_backward_waits_for_fewer_reads(
    kernel: str,
    checkpointing: bool | None,
    tmp_path: Path,
    stream: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each missing expert was read when backward needed it, and what it needed next had gone."""
    saved(many_experts, tmp_path)
    found: list[Any] = []
    results: list[Any] = []
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr(ExpertCache, "_read_back", lambda *_: None)
        for work in (in_backward, lambda made: trained(made, steps=4, ids=ids_of)):
            model = with_share(stream, tmp_path, 0.3)
            model.set_experts_implementation(kernel)
            made = adapted(model, checkpointing)
            made.train()
            (found if work is in_backward else results).append(work(made))
            model.weight_stream.close()
    whole = loaded(tmp_path)
    whole.set_experts_implementation(kernel)
    wanted = trained(adapted(whole, checkpointing), steps=4, ids=ids_of)
    for result in results:
        assert_same(result, wanted)
    ours, without = found
    assert ours.read_ahead > 0
    assert without.misses > 0
    assert ours.misses <= without.misses // 2
    assert ours.read_in_vain <= ours.read_ahead // 4
    assert ours.bytes_read <= without.bytes_read


def test_nothing_is_read_where_all_experts_have_room(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    model = adapted(with_share(stream, tmp_path, 1.1))
    model.train()
    assert in_backward(model)[1:] == (0,) * 6


def test_another_pass_in_between_reads_nothing_in_vain(tmp_path: Path, stream: Make) -> None:
    """Evaluation between forward and backward: the way back is that of the last pass."""
    saved(many_experts, tmp_path)
    model, whole = adapted(with_share(stream, tmp_path, 0.3)), adapted(loaded(tmp_path))
    grads = []
    for each in (model, whole):
        loss = each(input_ids=ids_of(0), labels=ids_of(0)).loss
        with torch.no_grad():
            each(input_ids=ids_of(1))
        loss.backward()
        grads.append([p.grad for p in each.parameters() if p.requires_grad])
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


# The order alone


def test_the_way_back_is_that_of_the_last_pass() -> None:
    way = WayBack()
    assert way.come_to(2) is None
    assert way.before(2) is None
    for number in range(3):
        way.note(number, [number, 7])
    way.note(2, [5])  # the same set again: micro-batches side by side, or a list of experts
    assert way.come_to(2) == []
    assert way.come_to(2) is None
    assert way.before(2) == 1
    assert way.needed(2) == [(2, 2), (2, 7), (2, 5)]
    assert way.come_to(1) == [2]
    assert way.come_to(0) == [1, 2]
    assert way.before(0) is None
    way.note(0, [3])
    assert way.needed(0) == [(0, 3)]
    assert way.needed(1) == []
    way.note(1, [4])
    way.note(0, [6])  # another pass, without backward in between
    assert way.needed(0) == [(0, 6)]
    assert way.needed(1) == []


def test_what_is_left_goes_first() -> None:
    recency: Recency[int] = Recency()
    for key in range(4):
        recency.use(key)
    recency.pass_by(4)
    recency.leave(2)
    recency.leave(9)
    assert list(recency.victims(())) == [2, 4, 0, 1, 3]
    recency.use(2)
    assert list(recency.victims(())) == [4, 0, 1, 3, 2]
