"""Adapters over a mixture: only experts with tokens are read, by forward and by backward."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference import _tiny
from inference._model_budget import weights_of
from inference._models import loaded, mixtral, prompt, saved, transformers
from support import Turns, thread

import nvmeio
from nvmeio.errors import ClosedError, IntegrityError, TransferError
from nvmeio.inference import pack
from nvmeio.inference._plan import units
from nvmeio.testing import FakeEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.timeout(300)
Make = Callable[..., Any]


def many_experts() -> Any:
    """Four layers of 16 experts, two a token."""
    return mixtral(experts=16)


def bytes_of_experts(model: Any) -> int:
    return sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)


def with_share(stream: Make, directory: Path, share: float, **options: Any) -> Any:
    """A trainable stream whose budget holds a share of the experts, and all else."""
    whole = loaded(directory)
    experts = bytes_of_experts(whole)
    given = int((weights_of(whole) - experts) * 1.5) + int(experts * share) + (256 << 10)
    return stream(directory, resident_bytes=given, trainable=True, **options)


def adapted(model: Any, checkpointing: bool | None = None, **options: Any) -> Any:
    """Adapters below, between and behind the experts."""
    torch.manual_seed(3)
    options.setdefault("target_modules", ["q_proj", "v_proj", "o_proj"])
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
    if checkpointing is not None:
        found.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        found.enable_input_require_grads()
    return found


def trained(
    model: Any, steps: int = 3, ids: Callable[[int], torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Losses, gradients of the last step, and adapters after so many steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    model.train()
    losses, grads = [], []
    for step in range(steps):
        given = prompt(seed=step) if ids is None else ids(step)
        optimizer.zero_grad()
        loss = model(input_ids=given, labels=given).loss
        loss.backward()
        grads = [p.grad.clone() for p in parameters]
        optimizer.step()
        losses.append(loss.detach())
    return losses, grads, [p.detach().clone() for p in parameters]


def assert_same(one: Any, other: Any) -> None:
    for what, (a, b) in enumerate(zip(one, other, strict=True)):
        assert len(a) == len(b)
        assert all(x.equal(y) for x, y in zip(a, b, strict=True)), what


@pytest.mark.parametrize("share", [0.26, 0.5, 1.1])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "new", "reentrant"])
@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm", "eager"])
def test_losses_and_adapters_are_those_of_the_model_in_memory(
    kernel: str, checkpointing: bool | None, share: float, tmp_path: Path, stream: Make
) -> None:
    saved(many_experts, tmp_path)
    model, whole = with_share(stream, tmp_path, share), loaded(tmp_path)
    assert model.weight_stream.experts
    results = []
    for each in (model, whole):
        each.set_experts_implementation(kernel)
        results.append(trained(adapted(each, checkpointing), steps=4))
    assert_same(*results)
    counted = model.weight_stream.stats.experts
    assert counted.misses and bool(counted.evictions) == (share < 1)


FAMILIES = [
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
]
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **{"moe_num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "max_position_embeddings": 256},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_train_at_the_smallest_budget_as_in_memory(
    name: str, tmp_path: Path, one_handle: nvmeio.AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"transformers has no {name}")
    monkeypatch.setattr(units, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(_tiny, "_ATTEMPTS", ((4, SIZES), (8, SIZES)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, given = _tiny.make(cls)
        made.save_pretrained(tmp_path)
        whole = cls.from_pretrained(tmp_path)
        options: dict[str, Any] = {"handle": one_handle, "trainable": True}
        with pytest.raises(ValueError, match="is too small") as refused:
            nvmeio.stream_model(tmp_path, resident_bytes=1, **options)
        needed = int(str(refused.value).split()[-2])
        with nvmeio.stream_model(tmp_path, resident_bytes=needed, **options) as model:
            assert model.weight_stream.experts
            ids = given["input_ids"][:1]
            results = []
            for each in (model, whole):
                both = adapted(each, target_modules=["o_proj"], task_type="CAUSAL_LM")
                results.append(trained(both, ids=lambda step: (ids + step) % 50))
            assert_same(*results)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "new", "reentrant"])
def test_experts_without_tokens_are_not_read(
    checkpointing: bool | None, tmp_path: Path, stream: Make
) -> None:
    """Layers were read whole, forward and backward."""
    saved(many_experts, tmp_path)
    model = adapted(with_share(stream, tmp_path, 0.5), checkpointing)
    weights = model.get_base_model().weight_stream
    routed: dict[int, set[int]] = {}
    for number, layer in enumerate(model.get_base_model().model.layers):
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args, number=number: routed.setdefault(number, set()).update(
                args[1].flatten().tolist()
            )
        )
    one = prompt(batch=1, length=2)
    model.train()
    loss = model(input_ids=one, labels=one).loss
    forward = weights.stats.experts
    loss.backward()
    needed = sum(map(len, routed.values()))
    assert needed < 4 * 5
    each = bytes_of_experts(loaded(tmp_path)) // (4 * 16)
    # Half of all experts have room: backward finds those of forward.
    after = weights.stats.experts
    assert forward.misses == after.misses == needed
    assert after.bytes_read == needed * each
    assert after.hits > forward.hits


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("compute", ["widened", "packed"])
def test_experts_of_few_bits_are_trained_on_alike_whatever_the_budget(
    bits: int, compute: str, tmp_path: Path, stream: Make
) -> None:
    saved(many_experts, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", quant_bits=bits, quant_group_size=32)
    results = []
    for given in ("2M", "64M"):
        model = stream(tmp_path / "packed", trainable=True, resident_bytes=given, compute=compute)
        assert model.weight_stream.experts
        results.append(trained(adapted(model, False)))
    assert_same(*results)


def test_experts_that_are_converted_are_trained_on(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    model = with_share(stream, tmp_path, 0.3, dtype=torch.bfloat16)
    whole = loaded(tmp_path, dtype=torch.bfloat16)
    assert_same(*(trained(adapted(each, False)) for each in (model, whole)))


def test_training_within_one_block_of_autocast(tmp_path: Path, stream: Make) -> None:
    """Torch keeps converted adapters to the end of it: the cache was cleared after each call."""
    saved(many_experts, tmp_path)
    results = []
    for each in (with_share(stream, tmp_path, 0.3), loaded(tmp_path)):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(trained(adapted(each)))
    assert_same(*results)


class ListModel(torch.nn.Module):
    """A mixture that is not of transformers, whose experts are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        from offload._mixtures import Layer, Mixture

        self.layers = torch.nn.ModuleList(Layer(Mixture) for _ in range(3))
        self.gain = torch.nn.Parameter(torch.ones(()), requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        for layer in self.layers:
            x = layer(x)
        return x


def test_experts_in_a_list_are_trained_on(tmp_path: Path, stream: Make) -> None:
    torch.manual_seed(0)
    whole = ListModel()
    state = {name: t for name, t in whole.state_dict().items() if name != "gain"}
    nvmeio.save_safetensors(state, tmp_path / "model.safetensors")
    for parameter in whole.layers.parameters():
        parameter.requires_grad_(False)
    with torch.device("meta"):
        empty = ListModel()
    gain = torch.nn.Parameter(torch.ones(()))
    del empty.gain
    model = stream(empty, tmp_path / "model.safetensors", trainable=True, resident_bytes="1200K")
    model.gain = gain
    assert len(model.weight_stream.experts) == 3
    for step in range(4):
        found = []
        for each in (model, whole):
            torch.manual_seed(step)
            x = torch.randn(2, 64, requires_grad=True)
            loss = each(x).square().mean()
            loss.backward()
            found.append((loss.detach(), x.grad, each.gain.grad.clone()))
            each.gain.grad = None
        assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert model.weight_stream.stats.experts.evictions


# What can happen meanwhile


def test_what_backward_computes_with_is_not_taken_from_it(tmp_path: Path, stream: Make) -> None:
    """At the smallest budget another call takes the pages, while a tensor lies over them."""
    saved(many_experts, tmp_path)
    model, whole = with_share(stream, tmp_path, 0.26), loaded(tmp_path)
    weights = model.weight_stream
    first, last = weights.experts[0], weights.experts[-1]
    kept = [weights.memory_of_experts(first, [3, 5]) for _ in range(2)]
    before = [memory[3 * first.nbytes : 6 * first.nbytes].clone() for memory in kept]
    for number in range(first.number):
        weights.memory_of_experts(last, [number])
    ids = prompt(batch=4, length=20)
    with torch.no_grad():
        assert model(ids).logits.equal(whole(ids).logits)
    for memory, was in zip(kept, before, strict=True):
        now = memory[3 * first.nbytes : 6 * first.nbytes]
        assert now[: first.nbytes].equal(was[: first.nbytes])
        assert now[-first.nbytes :].equal(was[-first.nbytes :])
    del kept, memory, now
    gc.collect()
    with torch.no_grad():
        assert model(ids).logits.equal(whole(ids).logits)


def test_two_threads_train_each_with_its_own_graph(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    model, whole = adapted(with_share(stream, tmp_path, 0.26)), adapted(loaded(tmp_path))
    wanted, found = {}, {}
    trainable = [p for p in whole.parameters() if p.requires_grad]
    ours = [p for p in model.parameters() if p.requires_grad]
    for seed in range(2):
        ids = prompt(seed=seed)
        wanted[seed] = torch.autograd.grad(whole(input_ids=ids, labels=ids).loss, trainable)

    def work(seed: int) -> None:
        for _ in range(5):
            ids = prompt(seed=seed)
            found[seed] = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, ours)

    with thread(work, 1):
        work(0)
    for seed in range(2):
        assert all(a.equal(b) for a, b in zip(found[seed], wanted[seed], strict=True))


def test_a_read_that_fails_in_backward_names_the_expert_and_may_be_tried_again(
    tmp_path: Path,
) -> None:
    saved(many_experts, tmp_path)
    failing = Turns()
    engine = FakeEngine(fail=lambda kind, *_: 5 if kind == "pread" and failing.take() else 0)
    whole = loaded(tmp_path)
    experts = bytes_of_experts(whole)
    with nvmeio.AioHandle(engine=engine) as handle:
        given = int((weights_of(whole) - experts) * 1.5) + int(experts * 0.26) + (256 << 10)
        with nvmeio.stream_model(
            tmp_path, resident_bytes=given, trainable=True, handle=handle
        ) as model:
            both, ids = adapted(model), prompt()
            loss = both(input_ids=ids, labels=ids).loss
            failing.left = 1
            with pytest.raises(TransferError, match=r"expert|weights"):
                loss.backward()
            failing.left = 0
            both.zero_grad()
            assert_same(trained(both), trained(adapted(whole)))


def test_a_file_that_changed_is_noticed_in_backward(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    model = adapted(with_share(stream, tmp_path, 0.26))
    ids = prompt(batch=4, length=20)
    loss = model(input_ids=ids, labels=ids).loss
    path = next(tmp_path.glob("*.safetensors"))
    with path.open("r+b") as changed:
        changed.seek(-1, os.SEEK_END)
        changed.write(b"\1")
    with pytest.raises(IntegrityError, match="changed while"):
        loss.backward()


def test_a_hook_that_raises_leaves_the_model_usable(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    model, whole = adapted(with_share(stream, tmp_path, 0.26)), adapted(loaded(tmp_path))
    raising = Turns()

    def hook(*_: Any) -> None:
        if raising.take():
            raise RuntimeError("from a hook")

    for layer in model.get_base_model().model.layers:
        layer.mlp.experts.act_fn.register_forward_hook(hook)
    ids = prompt()
    for number in range(3):
        raising.left = 1
        with pytest.raises(RuntimeError, match="from a hook"):
            model(input_ids=ids, labels=ids)
        loss = model(input_ids=ids, labels=ids).loss
        raising.left = number % 2
        remove = loss.register_hook(hook)
        with contextlib.suppress(RuntimeError):
            loss.backward()
        remove.remove()
        raising.left = 0
    model.zero_grad()
    assert_same(trained(model), trained(whole))


def test_a_close_in_between_is_told_to_backward(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    model = with_share(stream, tmp_path, 0.3)
    both, ids = adapted(model), prompt()
    loss = both(input_ids=ids, labels=ids).loss
    model.weight_stream.close()
    with pytest.raises(ClosedError):
        loss.backward()
    model.weight_stream.reopen()
    both.zero_grad()
    assert_same(trained(both), trained(adapted(loaded(tmp_path))))


def test_a_forked_child_is_refused(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    both, ids = adapted(with_share(stream, tmp_path, 0.3)), prompt()
    loss = both(input_ids=ids, labels=ids).loss
    child = os.fork()
    if child == 0:
        status = 1
        try:
            both.get_base_model().weight_stream.memory_of_experts(
                both.get_base_model().weight_stream.experts[0], [0]
            )
        except ClosedError:
            status = 0
        os._exit(status)
    signal.alarm(60)
    assert os.waitpid(child, 0)[1] == 0
    signal.alarm(0)
    loss.backward()


def test_somebody_who_wants_gradients_of_an_expert_is_refused(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    model, ids = with_share(stream, tmp_path, 0.3), prompt()
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires gradients"):
        model(input_ids=ids)
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(False)
    assert_same(trained(adapted(model)), trained(adapted(loaded(tmp_path))))
    assert threading.active_count() < 50
