"""Who computes with weights of 4 bits in memory, on a CPU: bitsandbytes and torchao."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn

from nvmeio.cli.measure.worker import PeerUnavailable
from peers.inference import Decoding, _transformers, with_peak


class _FewBits(Decoding):
    """A Llama in bfloat16, whose linear layers are quantised one by one."""

    name = ""
    install = ""

    def __init__(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                logging.disable(logging.WARNING)
                self._import()
        except ImportError as error:
            raise PeerUnavailable(
                f"{self.name} cannot be imported ({error})", self.install
            ) from error

    def prepare(self, directory: str) -> None:
        made = _transformers().AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        for module in list(made.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, self._quantised(child))
        self.model = made
        self.begin()
        self._pass()

    @with_peak
    def passes(self, count: int) -> Any:
        return self._timed(count)

    def _import(self) -> None:
        raise NotImplementedError

    def _quantised(self, linear: nn.Linear) -> nn.Module:
        raise NotImplementedError


class BitsAndBytes(_FewBits):
    """Linear4bit, on its CPU backend."""

    name = "bitsandbytes"
    install = "pip install bitsandbytes"

    def _import(self) -> None:
        import bitsandbytes

        self._bnb = bitsandbytes

    def _quantised(self, linear: nn.Linear) -> nn.Module:
        made = self._bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16
        )
        made.weight = self._bnb.nn.Params4bit(linear.weight.data, requires_grad=False)
        found: nn.Module = made.to("cpu").eval()
        return found


class TorchAO(_FewBits):
    """Weights of 4 bits in groups of 64, by torch's kernel for CPUs."""

    name = "torchao"
    install = "pip install torchao"

    def _import(self) -> None:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import quantize_

        self._config, self._quantise = PrototypeInt4WeightOnlyConfig(group_size=64), quantize_

    def _quantised(self, linear: nn.Linear) -> nn.Module:
        self._quantise(linear, self._config)
        return linear
