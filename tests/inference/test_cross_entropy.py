"""The loss of a large vocabulary, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nvmeio.inference import chunked_cross_entropy

VOCABULARY = 50


def given(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    hidden = torch.randn(2, 7, 16, dtype=dtype, generator=generator).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, 7), generator=generator)
    labels[1, 3:5] = -100
    return hidden, nn.Linear(16, VOCABULARY).to(dtype), labels


def whole(hidden: torch.Tensor, head: Any, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = head(hidden).flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 14, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_are_those_of_the_whole(
    chunk: int, reduction: str, dtype: torch.dtype
) -> None:
    hidden, head, labels = given(dtype)
    trained = [hidden, *head.parameters()]
    wanted = whole(hidden, head, labels, reduction)
    found = chunked_cross_entropy(hidden, head, labels, chunk, reduction=reduction)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(found, trained), torch.autograd.grad(wanted, trained), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_are_right_numerically_and_so_are_their_own() -> None:
    hidden, head, labels = given()

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(hidden, head, labels, 3)

    torch.autograd.gradcheck(loss, (hidden,))
    torch.autograd.gradgradcheck(loss, (hidden,))


def test_logits_never_exist_whole() -> None:
    hidden, head, labels = given()
    sizes: list[int] = []
    head.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    chunked_cross_entropy(hidden, head, labels, 4).backward()  # type: ignore[no-untyped-call]
    assert max(sizes) == 4
    assert sum(sizes) == 2 * labels.numel()


def test_no_tokens_have_no_loss() -> None:
    hidden, head, labels = given()
    assert chunked_cross_entropy(hidden[:0], head, labels[:0], reduction="sum") == 0
    labels.fill_(-100)
    assert chunked_cross_entropy(hidden, head, labels).isnan()  # as torch has it
    assert whole(hidden, head, labels, "mean").isnan()


@pytest.mark.parametrize(
    "ask",
    [
        lambda h, head, labels: chunked_cross_entropy(h, head, labels, 0),
        lambda h, head, labels: chunked_cross_entropy(h, head, labels, reduction="none"),
        lambda h, head, labels: chunked_cross_entropy(h, head, labels[:, 1:]),
    ],
)
def test_what_makes_no_sense_is_refused(ask: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs labels"):
        ask(*given())
