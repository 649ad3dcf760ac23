"""Cutting a batch into microbatches waits for the CUDA device once, however many there are."""

from typing import Any

import pytest
import torch

from headrace.distributed.batched_data_dict import BatchedDataDict, Cut
from headrace.models.automodel.data import Packing, forward_kwargs
from tiny_models import tiny_batch

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
    cuts: dict[str, Cut] = {"sequence_packing": "packed", "dynamic_batching": "dynamic", "fixed": "fixed"}
    packing = Packing() if kind == "sequence_packing" else None
    microbatches = rows.to("cuda", on_host=("input_lengths",)).microbatches(cuts[kind], 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = [forward_kwargs(microbatch, packing) for microbatch in microbatches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(made) > 1
    assert all(kwargs["input_ids"].is_cuda and kwargs["position_ids"].is_cuda for kwargs in made)
