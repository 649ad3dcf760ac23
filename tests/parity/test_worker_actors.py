"""Two Ray actors on a TransferQueue store: the numbers of one process, and one fetch and write-back per replica."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.data_plane.column_io import kv_first_write
from headrace.data_plane.observability import MetricsDataPlaneClient
from headrace.distributed.topology import lay_out_ranks
from headrace.distributed.worker_groups import RankSettings, WorkerGroup, WorkerSpec
from headrace.models.policy.tq_policy import TQPolicy
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from ray_session import SIMPLE, fresh_store
from reference_training import PolicyGradient
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 1e-5}
PACKED = {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}
OBSERVED = {"observability": {"enabled": True}}


class CountingWorker(AutomodelPolicyWorker):
    """Tells what every rank has asked of the store."""

    def store_calls(self) -> list[dict[str, int]]:
        client = self._client()
        assert isinstance(client, MetricsDataPlaneClient)
        counts = {op: totals["count"] for op, totals in client.snapshot()["ops"].items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, counts)
        return everyone


def build_policy(store: dict[str, Any], tensor: int, workers: int) -> TQPolicy:
    cfg = tiny_policy_config(
        "llama",
        workers=workers,
        parallel={"tensor": tensor},
        sequence_packing=PACKED,
        make_sequence_length_divisible_by=tensor,
    )
    parts, tokenizer = (cfg, tiny_generation_config()), tiny_tokenizer()
    group = actors(parts, tokenizer, tensor) if workers > 1 else None
    dp_cfg = {**store, **OBSERVED}
    return TQPolicy(*parts, tokenizer=tokenizer, seed=0, workers=group, dp_cfg=dp_cfg)


def actors(parts: tuple[Any, ...], tokenizer: Any, tensor: int) -> WorkerGroup:
    from headrace.distributed.worker_groups.ray_group import RayWorkerGroup

    spec = WorkerSpec(CountingWorker, parts, {"tokenizer": tokenizer, "seed": 0})
    return RayWorkerGroup(spec, lay_out_ranks(2, tensor=tensor), settings=RankSettings(threads=1))


def step(policy: TQPolicy, seed: int) -> dict[str, Any]:
    """Score and train on one global batch through the store."""
    rows = tiny_batch(LENGTHS, seed=seed)
    del rows["prev_logprobs"]
    policy.prepare_step(len(LENGTHS))
    ids = [f"s{seed}_{i}" for i in range(len(LENGTHS))]
    meta = kv_first_write(rows, sample_ids=ids, dp_client=policy.dp_client, partition_id="train")
    policy.get_logprobs_from_meta(meta)
    scored = policy.read_from_dataplane(meta, select_fields=["prev_logprobs"])["prev_logprobs"]
    trained = policy.train_from_meta(meta, PolicyGradient())
    policy.finish_step(meta)
    return {"logprobs": scored, "loss": trained["loss"], "grad_norm": trained["grad_norm"], "all": trained}


@pytest.fixture(scope="module", params=[1, 2], ids=["data_parallel", "tensor_parallel"])
def runs(request: pytest.FixtureRequest, transfer_queue_engine: None) -> dict[str, Any]:
    """Three steps on two actors, what the ranks asked of the store, and the same steps in this process."""
    tensor = request.param
    pair = build_policy(fresh_store(SIMPLE), tensor, workers=2)
    try:
        before = pair.workers.run_all("store_calls")[0]
        steps = [step(pair, seed) for seed in range(3)]
        after = pair.workers.run_all("store_calls")[0]
        weights = dict(pair.named_weights())
    finally:
        pair.shutdown()
    alone = build_policy({"impl": "local"}, 1, workers=1)
    try:
        expected = [step(alone, seed) for seed in range(3)]
        expected_weights = {name: w.clone() for name, w in alone.named_weights()}
    finally:
        alone.shutdown()
    calls = [{op: a.get(op, 0) - b.get(op, 0) for op in {*a, *b}} for a, b in zip(after, before)]
    return {
        "tensor": tensor,
        "calls": calls,
        "steps": steps,
        "weights": weights,
        "expected": expected,
        "expected_weights": expected_weights,
    }


def test_two_actors_take_the_steps_of_one_process(runs: dict[str, Any]) -> None:
    for got, want in zip(runs["steps"], runs["expected"]):
        width = want["logprobs"].shape[1]
        torch.testing.assert_close(got["logprobs"][:, :width], want["logprobs"], **CLOSE)
        torch.testing.assert_close(got["loss"], want["loss"], **CLOSE)
        torch.testing.assert_close(got["grad_norm"], want["grad_norm"], **CLOSE)
        assert got["all"]["num_ranks"] == 2
    assert abs(float(runs["expected"][0]["loss"])) > 1e-3
    assert runs["weights"].keys() == runs["expected_weights"].keys()
    for name, weight in runs["expected_weights"].items():
        torch.testing.assert_close(runs["weights"][name], weight, rtol=0.0, atol=1e-4)


def test_each_replica_fetches_once_and_writes_back_once(runs: dict[str, Any]) -> None:
    # Per step: one fetch to score, one to train; one write-back of logprobs.
    leader = {"get_samples": 6, "put_samples": 3}
    siblings = [leader, leader] if runs["tensor"] == 1 else [leader, {}]
    got = [{op: n for op, n in calls.items() if n} for calls in runs["calls"]]
    assert got == siblings
