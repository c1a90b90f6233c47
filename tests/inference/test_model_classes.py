"""Each causal and seq2seq class of transformers computes the same bits streamed as loaded whole.

Minutes of work, so part of `make stress`. What cannot be built small is skipped with its reason.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from inference import _tiny
from inference._models import transformers

import nvmeio

pytestmark = [pytest.mark.stress, pytest.mark.timeout(300)]

# Made of the checkpoint's tensors in ways that reading to a place cannot: refused by name.
REFUSED = {
    "HrmTextForCausalLM",
    "Inkling2ForCausalLM",
    "Inkling2LoopForCausalLM",
    "LaraMiniForCausalLM",
}
# Divides weights in place in its first pass.
CHANGES_WEIGHTS = {"RwkvForCausalLM"}


@pytest.mark.parametrize("name", _tiny.names())
def test_streamed_logits_are_those_of_the_loaded_model(
    name: str, tmp_path: Path, one_handle: nvmeio.AioHandle
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = getattr(transformers, name, None)
        if cls is None:
            pytest.skip(f"transformers has no {name}")
        try:
            made, given = _tiny.make(cls)
        except _tiny.CannotBeBuilt as why:
            pytest.skip(f"{name}: {why}")
        made.save_pretrained(tmp_path)
        del made
        whole = cls.from_pretrained(tmp_path)
        if name in REFUSED:
            with pytest.raises(TypeError, match="more than reading them to a place"):
                nvmeio.stream_model(tmp_path, handle=one_handle)
            return
        with pytest.raises(ValueError, match="is too small") as refused:
            nvmeio.stream_model(tmp_path, handle=one_handle, resident_bytes=1)
        least = int(str(refused.value).split()[-2])
        model = nvmeio.stream_model(tmp_path, handle=one_handle, resident_bytes=least)
    with model.weight_stream as stream:
        assert isinstance(model, cls)
        assert type(model).__name__ == name
        if name in CHANGES_WEIGHTS:
            with pytest.raises(RuntimeError, match="was changed in place"):
                _tiny.output(model, given)
            return
        assert _tiny.output(model, given).equal(_tiny.output(whole, given))
        assert stream.stats.bytes_read > 0
