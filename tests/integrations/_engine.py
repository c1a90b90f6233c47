"""One SGLang engine on a CPU, which says its tokens: `python _engine.py MODEL [OPTIONS]`.

SGLang's compiled kernels are imported, and none of them is called on the way that this takes: where
they are not installed, names stand for them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from typing import Any


class _Name:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__}: sgl_kernel is not installed")


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module: Any = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = lambda name: getattr(_Name(spec.name), name)
        return module

    def exec_module(self, module: Any) -> None:
        pass


# Its workers import this file anew, before they import SGLang.
if importlib.util.find_spec("sgl_kernel") is None:
    sys.meta_path.append(_Kernels())
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.6,
    "max_total_tokens": 4096,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "log_level": "info",
}
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def main() -> None:
    import sglang

    model, *options = sys.argv[1:]
    engine: Any = sglang.Engine(
        model_path=model, **{**OPTIONS, **json.loads((options or ["{}"])[0])}
    )
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    found: dict[str, Any] = {"tokens": [], "update": None}
    try:
        for _ in range(2):
            answers = engine.generate(input_ids=prompts, sampling_params=SAMPLING)
            found["tokens"].append([answer["output_ids"] for answer in answers])
        found["update"] = engine.update_weights_from_disk(model)[:2]
        answers = engine.generate(input_ids=prompts, sampling_params=SAMPLING)
        found["tokens"].append([answer["output_ids"] for answer in answers])
        found["weight"] = engine.get_weights_by_name("model.layers.0.self_attn.q_proj.weight")
    finally:
        print("FOUND", json.dumps(found, default=str), flush=True)
        engine.shutdown()


if __name__ == "__main__":
    main()
