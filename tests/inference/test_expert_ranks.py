"""Ranks that compute with each other's experts: real processes with gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint._ranks import running_ranks
from inference import _models as models
from offload import _mixtures

from nvmeio.inference import pack

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    sizes = {"vocab_size": models.VOCABULARY, "eos_token_id": 1, "bos_token_id": 1}
    models.saved(lambda: models.mixtral(experts=8), made / "mixtral")
    models.saved(models.llama, made / "llama")
    for name, cls in (
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("olmoe", "OlmoeForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
    ):
        make = partial(_mixtures.family, cls, **sizes)
        models.saved(make, made / name)
        if name != "olmoe":
            models.saved(lambda make=make: make().bfloat16(), made / f"{name}_bf16")
    return made


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same models, the mixtures packed: an expert is one read with one checksum."""
    made = tmp_path_factory.mktemp("packed")
    for model in [each for each in folder.iterdir() if each.is_dir()]:
        pack(model, made / model.name)
    (made / "whole").symlink_to(folder)
    return made


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., None]]:
    script = str(Path(__file__).parent / "_expert_rank.py")
    with running_ranks(script) as run:
        yield lambda work, *where, world=2, **options: run(
            world, f"experts_{work}", *where, **options
        )


@pytest.mark.parametrize("world", [2, 4])
def test_tokens_of_each_rank_are_those_of_a_process_alone(
    world: int, ranks: Callable[..., None], folder: Path
) -> None:
    ranks("equal", folder, world=world)


def test_tokens_are_those_of_a_process_alone_from_packed_files(
    ranks: Callable[..., None], packed: Path
) -> None:
    ranks("equal", packed)


@pytest.mark.parametrize("world", [2, 4])
def test_each_expert_is_read_once(world: int, ranks: Callable[..., None], folder: Path) -> None:
    ranks("once", folder, world=world)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_whose_drive_fails(world: int, ranks: Callable[..., None], folder: Path) -> None:
    ranks("fails", folder, world=world)


def test_a_hook_of_one_rank_raises(ranks: Callable[..., None], folder: Path) -> None:
    ranks("hooked", folder)


def test_a_rank_that_stands_still(ranks: Callable[..., None], folder: Path) -> None:
    ranks("frozen", folder, victim=0)


def test_what_cannot_be_shared_out_is_refused(ranks: Callable[..., None], folder: Path) -> None:
    ranks("refused", folder)
