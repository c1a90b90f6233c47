"""The ranks of test_tensor_parallel.py: what they do, run by `checkpoint._rank_program`."""

from __future__ import annotations

import errno
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import _rank_program
from checkpoint._rank_program import PATIENCE_S, Rank
from inference import _models as models
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import nvmeio
from nvmeio._files import system
from nvmeio.testing import FakeEngine

SMALL: dict[str, Any] = {"window": 2, "timeout_s": PATIENCE_S}


def from_the_drive() -> None:
    """And not from the page cache, where what was just written is."""
    system.copy_cached = lambda *_: False  # type: ignore[assignment]
    system.is_cached = lambda *_: False  # type: ignore[assignment]


def handle_of(me: Rank) -> nvmeio.AioHandle:
    from_the_drive()
    return nvmeio.AioHandle(engine=FakeEngine(fail=me._meet))


def stream(me: Rank, name: str, **options: Any) -> Any:
    small = {**SMALL, "resident_bytes": (22 << 20) // me.world}
    chosen = {"process_group": dist.group.WORLD, "tp_plan": "auto", **small, **options}
    return nvmeio.stream_model(me.notes / name, **chosen)


def equal(me: Rank) -> None:
    """As transformers has it in memory, bit for bit, and no byte of another rank's is read."""
    ids = models.prompt(2, 7)
    logits_of: dict[str, torch.Tensor] = {}
    for name in ("llama", "qwen3"):
        whole = AutoModelForCausalLM.from_pretrained(
            me.notes / name, distributed_config=DistributedConfig(tp_size=me.world)
        )
        logits_of[name] = wanted = models.logits(whole, ids)
        handle = handle_of(me)
        model = stream(me, name, handle=handle)
        assert torch.equal(models.logits(model, ids), wanted), name
        assert torch.equal(models.tokens(model, ids, 2), models.tokens(whole, ids, 2)), name
        streamed = [u for u in model.weight_stream.units if u.modules and not u.resident]
        names = tuple(f"{unit.name}." for unit in streamed)
        assert sum(unit.is_layer for unit in streamed) >= 3, model.weight_stream.units
        needed = sum(
            getattr(parameter, "_local_tensor", parameter).nbytes
            for path, parameter in whole.named_parameters()
            if path.startswith(names)
        )
        # Of each run of rows the whole pages at both ends.
        planned = sum(r.end - r.start for unit in streamed for r in unit.layout.reads)
        assert needed <= planned <= 1.03 * needed, (needed, planned)
        passes = 2
        began = sum(nbytes for _, nbytes in me.read)
        for _ in range(passes):
            models.logits(model, ids)
        read = sum(nbytes for _, nbytes in me.read) - began
        runs = sum(len(unit.layout.reads) for unit in streamed)
        # Direct I/O takes whole sectors at both ends of a run.
        sector = 4096 if all(nbytes % 4096 == 0 for _, nbytes in me.read) else 512
        ahead = SMALL["window"] * max(unit.layout.nbytes for unit in streamed)
        most = passes * (planned + 2 * sector * runs) + ahead
        assert passes * planned - ahead <= read <= most, (read, planned, most)
        model.weight_stream.close()
        handle.close()
    model = stream(me, "llama", tp_plan={"lm_head": "replicate"})
    torch.testing.assert_close(models.logits(model, ids), logits_of["llama"])
    model.weight_stream.close()
    for compute in ("auto", "widened"):
        alone, shared = (
            stream(me, "four bits", compute=compute, **options)
            for options in ({"process_group": None, "tp_plan": None}, {})
        )
        wanted = models.logits(alone, ids)
        torch.testing.assert_close(models.logits(shared, ids), wanted)
        assert torch.equal(models.tokens(shared, ids, 2), models.tokens(alone, ids, 2))
        own, whole = (
            sum(w.nbytes for unit in each.weight_stream.units for w in unit.weights)
            for each in (shared, alone)
        )
        assert own < (1 / me.world + 0.1) * whole
        shared.weight_stream.close()
        alone.weight_stream.close()
    refused(me)


def refused(me: Rank) -> None:
    """What cannot be cut is refused by name, on every rank."""
    for name, options, text in (
        ("mixtral", {}, "moe_tp_experts|packed_colwise"),
        ("tied", {}, "tied weight"),
        ("packed", {}, "groups of 64 columns"),
        ("llama", {"tp_plan": {"lm_head": "sideways"}}, "sideways"),
        ("llama", {"tp_plan": {"model.norm": "all_reduce"}}, "'all_reduce' of 'model.norm.weight'"),
        ("llama", {"tp_plan": {"model.embed_tokens": "colwise"}}, "Embedding"),
        ("llama", {"process_group": None}, "process_group="),
        ("llama", {"trainable": True}, "trainable"),
    ):
        try:
            stream(me, name, **options)
        except (ValueError, nvmeio.TransferError) as failed:
            assert any(each in str(failed) for each in text.split("|")), failed
        else:
            raise AssertionError(name)
        me.meet_others()


def fails(me: Rank) -> None:
    """A rank whose drive fails ends the pass of all, and nobody computes with what is left."""
    handle = handle_of(me)
    model = stream(me, "llama", handle=handle)
    ids = models.prompt(2, 7)
    wanted = models.logits(model, ids)
    me.meet_others()
    if me.rank == 0:
        me.read_errno = errno.EIO
    with me.raises(nvmeio.TransferError):
        for _ in range(3):
            models.logits(model, ids)
    me.read_errno = 0
    with me.raises(nvmeio.TransferError, "Call stream_model again"):
        models.logits(model, ids)
    model.weight_stream.close()
    del model
    me.meet_others()
    model = stream(me, "llama", handle=handle)
    assert torch.equal(models.logits(model, ids), wanted)
    model.weight_stream.close()
    handle.close()


def killed(me: Rank, victim: int) -> bool:
    """A rank dies in a pass."""
    handle = handle_of(me)
    model = stream(me, "llama", handle=handle)
    ids = models.prompt(2, 7)
    models.logits(model, ids)
    me.meet_others()
    me.kill_reading = me.rank == victim
    with me.raises(nvmeio.TransferError, "failed, died"):
        for _ in range(3):
            models.logits(model, ids)
    model.weight_stream.close()
    handle.close()
    return False


if __name__ == "__main__":
    _rank_program.main({"tp_equal": equal, "tp_fails": fails, "tp_killed": killed})
