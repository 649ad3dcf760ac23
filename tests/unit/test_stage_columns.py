"""What each stage of a step moves through the store: the columns that it reads, each once, and no other."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace.algorithms.sample_stats import stats_columns, token_advantages
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


class BonusLoss(PolicyGradient):
    """Asks for a column of its own."""

    required_columns = frozenset({"bonus", "unfiltered_logprobs"})

    def __call__(self, logprobs: torch.Tensor, data: Any, **totals: Any) -> Any:
        self.seen = data["bonus"].tolist()
        return super().__call__(logprobs, data, **totals)


def test_a_loss_gets_the_columns_that_it_requires(policy: TQPolicy) -> None:
    meta = written_rows(policy)
    policy.get_logprobs_from_meta(meta)
    policy.write_to_dataplane(meta, {"bonus": torch.arange(float(ROWS))})
    loss = BonusLoss()
    moved = moved_by(policy, lambda: policy.train_from_meta(meta, loss, mbs=ROWS))
    assert moved["bonus"] == 4 * ROWS
    assert loss.seen == list(range(ROWS))
    assert "unfiltered_logprobs" not in moved


def test_token_advantages_are_made_where_the_rows_are_also_by_several_ranks(policy: TQPolicy) -> None:
    meta = written_rows(policy)
    policy.get_logprobs_from_meta(meta, unfiltered=True)
    policy.get_reference_policy_logprobs_from_meta(meta)
    means = torch.linspace(-1, 1, ROWS)
    policy.write_to_dataplane(meta, {"mean_advantages": means})
    fields = ["mean_advantages", *stats_columns(reference=True)]

    def make(rows: Any) -> dict[str, torch.Tensor]:
        # A KL of 1 at every token.
        prev = rows["prev_logprobs"]
        columns = {**rows, "prev_unfiltered_logprobs": prev + 1, "reference_policy_logprobs": prev}
        return token_advantages(columns, kl_kind="k1", kl_scale=0.5)

    for part in (meta.slice(0, 3), meta.slice(3, ROWS)):
        shards, _ = policy._shard_meta(part, fields, None, None, "train")
        moved = moved_by(
            policy,
            lambda shards=shards: policy.workers.run_sharded("derive_columns_presharded", shards, make=make),
        )
        assert moved["advantages"] == 4 * sum(part.sequence_lengths or [])
    meta.add_fields(["advantages"])
    made = policy.read_from_dataplane(meta, select_fields=["advantages", "token_mask"])
    for row, mask, mean in zip(made["advantages"], made["token_mask"] > 0, means.tolist()):
        count = int(mask[1:].sum())
        later = torch.arange(count, 0, -1) - (count + 1) / 2  # KL to go less its mean
        assert row[1:][mask[1:]].tolist() == pytest.approx((mean - 0.5 * later).tolist(), abs=1e-5)
