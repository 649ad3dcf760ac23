"""Router replay in real processes: data, tensor, sequence and context parallel ranks use the same rows once."""

from typing import Any

import pytest
import torch

from headrace.algorithms.loss import NLLLoss
from headrace.data_plane.route_binding import bound_digests, sample_salts
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ReplayError
from headrace.models.policy.lm_policy import Policy
from headrace.models.router_replay.stats import ReplayStats
from headrace.models.router_replay.trace import check_trace, trace_of
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 7, 12]
NAMES = [f"s{i}" for i in range(len(LENGTHS))]


def batch() -> BatchedDataDict:
    data = tiny_batch(LENGTHS)
    drawn = torch.rand(len(LENGTHS), max(LENGTHS), 2, 8, generator=torch.Generator().manual_seed(0))
    data["routed_experts"] = drawn.topk(3).indices.to(torch.uint8)
    data["route_salts"] = sample_salts(NAMES)
    return data


def run(workers: int, **parallel: Any) -> tuple[torch.Tensor, float]:
    """Return logprobs and gradient norm, after both stages have proven their replay and left a sound trace."""
    cfg = tiny_policy_config(
        "qwen3_moe",
        train_global_batch_size=4,
        train_micro_batch_size=2,
        logprob_batch_size=2,
        router_replay={"enabled": True, "trace": True},
        workers=workers,
        parallel=parallel,
        model={"experts_implementation": "grouped_mm"},
    )
    policy = Policy(cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0)
    try:
        logprobs = policy.get_logprobs(batch())["logprobs"]
        trained = policy.train(batch(), NLLLoss(), gbs=4)
        stats = policy.take_replay_stats()
        refuse_an_update_together(policy)
    finally:
        policy.shutdown()
    check_stats(stats)
    return logprobs, float(trained["grad_norm"])


def refuse_an_update_together(policy: Policy) -> None:
    """Train without scoring; over data ranks, only the second has rows to compare, and nobody may wait for it."""
    data = batch()
    data["routed_experts"][:2] = 255
    with pytest.raises(ReplayError, match=r"'train': .*min_exact_fraction=80\.0%"):
        policy.train(data, NLLLoss(), gbs=4)
    assert policy.weight_version == 1


def check_stats(stats: dict[str, ReplayStats]) -> None:
    data = batch()
    digests = torch.stack(
        [
            bound_digests(
                data["routed_experts"][i, : n - 1],
                data["input_ids"][i, : n - 1],
                torch.arange(n - 1),
                data["route_salts"][i],
            ).sum()
            for i, n in enumerate(LENGTHS)
        ]
    )
    for stage in ("prev_logprobs", "train"):
        stats[stage].check(stage, digests=digests, total_tokens=data["input_lengths"])
    stages = {stage: found.rows for stage, found in stats.items()}
    said = check_trace(trace_of(1, NAMES, digests, data, stages), floor=0)
    assert said.startswith("step 1: 4 samples as recorded; used as given: prev_logprobs 4, train 4; ")
    # The routes are random, so what is needed to find out why comes along: from every sample, whole.
    samples = [n for rows in stats["prev_logprobs"].rows for n in rows.lengths.tolist()]
    assert sorted(samples) == sorted(LENGTHS)
    assert all(len(rows.given) == int(rows.lengths.sum()) for rows in stats["prev_logprobs"].rows)


@pytest.fixture(scope="module")
def alone() -> tuple[torch.Tensor, float]:
    return run(1)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"expert": 2}, id="data_experts"),
        pytest.param({}, id="data", marks=pytest.mark.slow),  # so does `data_experts`, and more
        pytest.param({"tensor": 2}, id="tensor", marks=pytest.mark.slow),  # so does `sequence`, and more
        pytest.param({"tensor": 2, "sequence_parallel": True}, id="sequence"),
        pytest.param({"context": 2}, id="context"),
    ],
)
def test_two_ranks_replay_what_one_does(alone: tuple[torch.Tensor, float], parallel: dict[str, Any]) -> None:
    logprobs, grad_norm = run(2, **parallel)
    torch.testing.assert_close(logprobs, alone[0], atol=1e-5, rtol=1e-5)
    assert grad_norm == pytest.approx(alone[1], rel=1e-5)
