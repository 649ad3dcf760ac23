"""Cutting a batch into microbatches waits for the CUDA device once, however many there are."""

from typing import Any

import pytest
import torch

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.automodel.data import get_microbatch_iterator
from tiny_models import tiny_batch, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]


def planned(kind: str) -> BatchedDataDict:
    args: Any = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": 32,
    }
    packing = {"algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 1}
    args |= packing if kind == "sequence_packing" else {"sequence_length_round": 1}
    parts, _ = tiny_batch(LENGTHS).shard_by_batch_size(1, batch_size=8, **{f"{kind}_args": args})
    return parts[0]


@pytest.mark.parametrize("kind", ["sequence_packing", "dynamic_batching", "fixed"])
def test_no_microbatch_waits_for_the_device(kind: str) -> None:
    rows = tiny_batch(LENGTHS) if kind == "fixed" else planned(kind)
    cfg = {} if kind == "fixed" else {kind: {"enabled": True}}
    microbatches, count = get_microbatch_iterator(rows.to("cuda"), cfg, 2, None, tiny_tokenizer())
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = list(microbatches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(made) == count > 1
    for microbatch in made:
        assert microbatch.lengths is not None
        assert not microbatch.lengths.is_cuda
        assert microbatch.data_dict["input_lengths"].is_cuda
        assert microbatch.processed_inputs.input_ids.is_cuda
        assert torch.equal(microbatch.data_dict["input_lengths"].cpu(), microbatch.lengths)
