"""What each stage of a step moves through the store: the columns that it reads, each once, and no other."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace.data_plane import KVBatchMeta, kv_first_write
from headrace.models.policy.tq_policy import TQPolicy
from reference_training import PolicyGradient
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
TOKENS, ROWS = sum(LENGTHS), len(LENGTHS)
LAYERS, TOP_K = 2, 3
SEED = {"input_ids": 8 * TOKENS, "input_lengths": 8 * ROWS, "token_mask": TOKENS, "sample_mask": 4 * ROWS}
FLOATS = 4 * TOKENS
ROUTES = {"routed_experts": LAYERS * TOP_K * TOKENS}


@pytest.fixture
def policy() -> Iterator[TQPolicy]:
    cfg = tiny_policy_config("qwen3_moe", router_replay={"enabled": True})
    store: dict[str, Any] = {"impl": "local", "observability": {"enabled": True}}
    parts = cfg, tiny_generation_config()
    made = TQPolicy(*parts, tokenizer=tiny_tokenizer(), seed=0, with_reference=True, dp_cfg=store)
    yield made
    made.shutdown()


def written_rows(policy: TQPolicy) -> KVBatchMeta:
    """The rows of a rollout with routes."""
    data = tiny_batch(LENGTHS)
    del data["prev_logprobs"]
    drawn = torch.rand(ROWS, max(LENGTHS), LAYERS, 8, generator=torch.Generator().manual_seed(0))
    data["routed_experts"] = drawn.topk(TOP_K).indices.to(torch.uint8)
    policy.prepare_step(ROWS)
    ids = [f"s{i}" for i in range(ROWS)]
    return kv_first_write(data, sample_ids=ids, dp_client=policy.dp_client, partition_id="train")


def moved_by(policy: TQPolicy, run: Callable[[], Any]) -> dict[str, int]:
    before = policy.moved_bytes()
    run()
    return dict(Counter(policy.moved_bytes()) - Counter(before))


def test_the_reference_reads_no_routes_and_the_replayed_stages_read_them_once(policy: TQPolicy) -> None:
    meta = written_rows(policy)
    reference = moved_by(policy, lambda: policy.get_reference_policy_logprobs_from_meta(meta))
    assert reference == {**SEED, "reference_policy_logprobs": FLOATS}
    prev = moved_by(policy, lambda: policy.get_logprobs_from_meta(meta))
    assert prev == {**SEED, **ROUTES, "prev_logprobs": FLOATS}
    train = moved_by(policy, lambda: policy.train_from_meta(meta, PolicyGradient()))
    scores = ("advantages", "generation_logprobs", "prev_logprobs", "reference_policy_logprobs")
    assert train == {**SEED, **ROUTES, **dict.fromkeys(scores, FLOATS)}
