"""Media, object and other undeclared columns reach the worker from a store as they do from memory."""

from typing import Any

import numpy as np
import pytest
import torch

from headrace.data_plane.column_io import kv_first_write
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.worker_groups import LocalWorkerGroup
from headrace.models.policy.lm_policy import Policy
from headrace.models.policy.tq_policy import TQPolicy
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from ray_session import SIMPLE, fresh_store
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7]
MEDIA = ("pixel_values", "image_grid", "scores", "remarks")


class SeeingWorker(AutomodelPolicyWorker):
    """Keeps the rows that it is asked to score, and scores them without their media."""

    seen: BatchedDataDict

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        self.seen = data
        text = {name: column for name, column in data.items() if name not in MEDIA}
        return super().get_logprobs(BatchedDataDict(text), micro_batch_size)


def rows_with_media() -> BatchedDataDict:
    rows = tiny_batch(LENGTHS)
    del rows["prev_logprobs"]
    images: list[torch.Tensor | None] = [
        torch.arange(6.0).view(2, 3),
        None,
        torch.ones(5, 3),
        torch.zeros(1, 3),
    ]
    rows["pixel_values"] = PackedTensor(images)
    rows["image_grid"] = torch.tensor([[1, 2, 1], [0, 0, 0], [1, 5, 1], [1, 1, 1]])
    rows["scores"] = torch.rand(
        4, 12, generator=torch.Generator().manual_seed(0)
    )  # as wide as the longest row
    remarks = np.empty(4, dtype=object)
    remarks[:] = [{"turns": [1, 2]}, None, "text", {"nested": {"x": 1.5}}]
    rows["remarks"] = remarks
    return rows


def seen_by_the_worker(dp_cfg: dict[str, Any] | None) -> BatchedDataDict:
    parts = (tiny_policy_config("llama"), tiny_generation_config())
    worker = SeeingWorker(*parts, tokenizer=tiny_tokenizer(), seed=0)
    common: dict[str, Any] = {
        "tokenizer": tiny_tokenizer(),
        "seed": 0,
        "media_fields": MEDIA,
        "workers": LocalWorkerGroup(worker),
    }
    if dp_cfg is None:
        Policy(*parts, **common).get_logprobs(rows_with_media())
        return worker.seen
    policy = TQPolicy(*parts, dp_cfg=dp_cfg, **common)
    try:
        policy.prepare_step(4)
        ids = [f"s{i}" for i in range(4)]
        meta = kv_first_write(
            rows_with_media(), sample_ids=ids, dp_client=policy.dp_client, partition_id="train"
        )
        policy.get_logprobs_from_meta(meta)
        policy.finish_step(meta)
    finally:
        policy.shutdown()
    return worker.seen


@pytest.mark.parametrize("store", ["local", "transfer_queue/simple"])
def test_every_extra_column_arrives_as_from_memory(store: str, request: pytest.FixtureRequest) -> None:
    if store == "local":
        config: dict[str, Any] = {"impl": "local"}
    else:
        request.getfixturevalue("transfer_queue_engine")
        config = fresh_store(SIMPLE)
    got, want = seen_by_the_worker(config), seen_by_the_worker(None)
    for name in ("input_ids", "image_grid", "scores"):
        assert torch.equal(got[name], want[name]), name
        assert got[name].dtype == want[name].dtype
    assert got["remarks"].tolist() == want["remarks"].tolist()
    assert isinstance(got["pixel_values"], PackedTensor)
    assert got["pixel_values"].dim_to_pack == want["pixel_values"].dim_to_pack
    for a, b in zip(got["pixel_values"].tensors, want["pixel_values"].tensors, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b)
