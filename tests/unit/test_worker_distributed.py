"""Two real processes over gloo: the same training as one process, and equal numbers of microbatches."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.compat.automodel_data import get_microbatch_iterator, process_global_batch
from headrace.distributed.columns import object_array
from headrace.models.automodel.dispatch import Dispatch
from headrace.models.policy.results import aggregate_train_results
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from ranks import run_ranks
from reference_training import PolicyGradient
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8, 10, 6, 2, 12, 9, 9, 4, 1]
COLUMNS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
PACKED: dict[str, Any] = {
    "sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}
}
PACKING_ARGS: Any = {
    **COLUMNS,
    "max_tokens_per_microbatch": 32,
    "algorithm": "first_fit_decreasing",
    "sequence_length_pad_multiple": 1,
}
UNEVEN = ([95] * 5, [20] * 5)


def _worker(**changes: Any) -> AutomodelPolicyWorker:
    return AutomodelPolicyWorker(
        tiny_policy_config("qwen3_moe", **changes),
        tiny_generation_config(),
        tokenizer=tiny_tokenizer(),
        seed=0,
    )


def _train(shards: int, rank: int, *, packed: bool) -> dict[str, Any]:
    worker = _worker(**(PACKED if packed else {}))
    data = tiny_batch(LENGTHS)
    if packed:
        parts, _ = data.shard_by_batch_size(shards, batch_size=8, sequence_packing_args=PACKING_ARGS)
    else:
        parts = data.shard_by_batch_size(shards, batch_size=8)
    result = worker.train(parts[rank], PolicyGradient())
    return {**result, "weights": {name: t.clone() for name, t in worker.named_weights()}}


def _left_out(rank: int) -> dict[str, Any]:
    """Take three updates: a good one, one without a token that counts, and one with a bad row on rank 1 alone."""
    worker = _worker()
    data = tiny_batch([*LENGTHS, *LENGTHS[:8]])
    data["sample_id"] = object_array([f"s{row}" for row in range(24)])
    data["sample_mask"][8:16] = 0
    data["advantages"][22, 8] = float("nan")
    result = worker.train(data.shard_by_batch_size(2, batch_size=8)[rank], PolicyGradient())
    return {**result, "version": worker.weight_version}


def _counts(rank: int, group: Any) -> dict[str, Any]:
    """Plan each rank by itself, so that the numbers of microbatches differ."""
    args: Any = {**COLUMNS, "max_tokens_per_microbatch": 100, "sequence_length_round": 1}
    parts, _ = tiny_batch(UNEVEN[rank]).shard_by_batch_size(1, dynamic_batching_args=args)
    data = parts[0]
    cfg = {"dynamic_batching": {"enabled": True}}
    microbatches, length = get_microbatch_iterator(data, cfg, 1, group, tiny_tokenizer())
    weights = [float(m.data_dict["sample_mask"].sum()) for m in microbatches]
    counted = process_global_batch(data, PolicyGradient(), group, batch_idx=0, batch_size=5)
    return {
        "length": length,
        "weights": weights,
        "seqs": float(counted["global_valid_seqs"]),
        "toks": float(counted["global_valid_toks"]),
    }


def _round_trip(top_k_index: list[list[int]]) -> dict[str, Any]:
    """Send three tokens, of which ranks have the same, to 4 experts of two ranks, which give them back as they are."""
    hidden = torch.arange(6.0).view(3, 2).requires_grad_()
    plan = Dispatch.plan(torch.tensor(top_k_index), 4, dist.group.WORLD)
    rows = plan.send(hidden, torch.float32)
    back = plan.bring_back(rows)
    back.sum().backward()
    return {"experts": plan.expert_ids, "rows": rows.detach(), "back": back.detach(), "grad": hidden.grad}


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        results = {
            "fixed": _train(2, rank, packed=False),
            "packed": _train(2, rank, packed=True),
            "counts": _counts(rank, dist.group.WORLD),
            "left_out": _left_out(rank),
            "sent": _round_trip([[0, 2], [3, 1], [2, 0]]),
            "idle": _round_trip([[0, 1], [1, 0], [0, 1]]),
        }
    finally:
        dist.destroy_process_group()
    torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = Path(tmp_path_factory.mktemp("gloo"))
    run_ranks(_run_rank, (str(folder),), 2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", ["fixed", "packed"])
def test_two_ranks_take_the_step_of_one_process(kind: str, ranks: list[dict[str, Any]]) -> None:
    alone = _train(1, 0, packed=kind == "packed")
    first, second = (r[kind] for r in ranks)
    # The first step starts from equal weights; AdamW then amplifies the last bit.
    torch.testing.assert_close((first["loss"] + second["loss"])[0], alone["loss"][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(first["grad_norm"][0], alone["grad_norm"][0], rtol=1e-5, atol=0)
    assert torch.equal(first["grad_norm"], second["grad_norm"])
    # Rank 0 hands the whole weights out.
    assert first["weights"].keys() == alone["weights"].keys()
    assert not second["weights"]


def test_ranks_agree_on_the_updates_that_are_left_out(ranks: list[dict[str, Any]]) -> None:
    first, second = (r["left_out"] for r in ranks)
    assert first["outcomes"] == second["outcomes"] == ["updated", "no_tokens", "not_finite"]
    assert (first["version"], second["version"]) == (1, 1)
    assert (first["suspects"], second["suspects"]) == ([[], [], []], [[], [], ["s22"]])
    trained = aggregate_train_results([first, second], num_ranks=2, total_flops=0.0, theoretical_tflops=0.0)
    assert (trained["updates"], trained["skipped_updates"]) == (1, 2)
    assert [(f.index, f.sample_ids, f.is_exact) for f in trained["non_finite"]] == [(2, ["s22"], True)]
    assert float(trained["loss"]) == float(first["loss"][0] + second["loss"][0])
    assert float(trained["grad_norm"]) == float(first["grad_norm"][0])


def test_metrics_are_shares_of_the_global_batch(ranks: list[dict[str, Any]]) -> None:
    metrics = [r["fixed"]["metrics"][0] for r in ranks]
    assert sum(m["tokens_fraction"] for m in metrics) == pytest.approx(1.0)
    assert sum(m["lr"] for m in metrics) == pytest.approx(1e-2)


def test_a_rank_with_fewer_microbatches_runs_dummies_that_weigh_nothing(ranks: list[dict[str, Any]]) -> None:
    first, second = (r["counts"] for r in ranks)
    assert first["length"] == second["length"] == 5
    assert first["weights"] == [1.0] * 5
    assert second["weights"] == [5.0, 0.0, 0.0, 0.0, 0.0]


def test_global_counts_span_the_ranks(ranks: list[dict[str, Any]]) -> None:
    masks = [tiny_batch(lengths)["token_mask"] for lengths in UNEVEN]
    for counts in (r["counts"] for r in ranks):
        assert counts["seqs"] == 10
        assert counts["toks"] == sum(int(m[:, 1:].sum()) for m in masks)


def test_tokens_go_to_the_ranks_of_their_experts_and_back(ranks: list[dict[str, Any]]) -> None:
    hidden = torch.arange(6.0).view(3, 2)
    for rank in ranks:
        # Both ranks' tokens, by sender and then by expert.
        assert rank["sent"]["experts"].tolist() == [0, 0, 1] * 2
        assert torch.equal(rank["sent"]["rows"], hidden[[0, 2, 1] * 2])
        for found in (rank["sent"], rank["idle"]):
            assert torch.equal(found["back"], hidden[:, None].expand(3, 2, 2))
            assert found["grad"].tolist() == [[2, 2]] * 3


def test_a_rank_whose_experts_get_no_token_has_an_idle_row(ranks: list[dict[str, Any]]) -> None:
    busy, idle = (rank["idle"] for rank in ranks)
    assert busy["experts"].tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert (idle["experts"].tolist(), idle["rows"].tolist()) == ([0], [[0, 0]])
