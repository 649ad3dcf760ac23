"""Several gloo processes train, score, save and load as one process does: FSDP, tensor, context and expert parallel."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from headrace.algorithms.sample_stats import MismatchLoss, split_mismatch
from headrace.data_plane import KVBatchMeta, build_data_plane_client, kv_first_write, read_columns
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.automodel.experts import DISPATCH_GROUP
from headrace.models.policy.results import combine_metrics, merge_rows
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from ranks import run_ranks
from reference_training import PolicyGradient
from tiny_models import CONFIGS, tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}
COLUMNS: Any = {
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "max_tokens_per_microbatch": 32,
    "algorithm": "first_fit_decreasing",
    "sequence_length_pad_multiple": 1,
}
STEPS = 2
# AdamW moves a weight by the sign of its gradient, so that its rounding noise grows with the learning rate.
OPTIMIZER = {"lr": 1e-3, "eps": 1e-5}
# Parts of the MLP and of the vocabulary differ in size from rank to rank.
UNEVEN = {"model": {"config": {**CONFIGS["llama"], "vocab_size": 67, "intermediate_size": 46}}}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}


def _like(name: str, **values: Any) -> dict[str, Any]:
    """Return the changes that put another family's model in the place of the tiny one of this name."""
    return {"model": {"config": {**CONFIGS[name], **values}}}


Case = tuple[str, str, dict[str, Any], dict[str, Any]]
CASES: dict[int, list[Case]] = {
    2: [
        ("data", "qwen3_moe", {}, {}),
        ("data", "llama", {"gathered_gib": 0}, PACKED),
        ("tensor", "qwen3_moe", {"tensor": 2}, {}),
        ("tensor", "llama", {"tensor": 2}, PACKED),
        ("tensor", "gemma3", {"tensor": 2}, {}),
        ("tensor", "qwen2", {"tensor": 2}, {"activation_checkpointing": True}),
        ("mixtral", "llama", {"tensor": 2}, _like("llama", model_type="mixtral", **MIXTRAL)),
        ("qwen3", "llama", {"tensor": 2}, _like("llama", model_type="qwen3")),
        ("gemma", "llama", {"tensor": 2}, _like("llama", model_type="gemma")),
        ("sequence", "qwen3_moe", {"tensor": 2, "sequence_parallel": True}, {}),
        ("sequence", "llama", {"tensor": 2, "sequence_parallel": True}, {"max_grad_norm": 0.05}),
        ("context", "qwen3_moe", {"context": 2}, {}),
        ("context", "llama", {"context": 2}, {**PACKED, "activation_checkpointing": True}),
        ("recompute", "llama", {"gathered_gib": 0}, {**PACKED, "activation_checkpointing": True}),
        ("groups", "qwen2", {}, _like("qwen2", num_hidden_layers=6)),
        (
            "groups",
            "llama",
            {},
            {**_like("llama", num_hidden_layers=7), **PACKED, "activation_checkpointing": True},
        ),
        ("context", "mistral_window", {"context": 2}, {}),
        ("generic", "granite", {"tensor": 2}, {}),
        ("experts", "qwen3_moe", {"expert": 2}, {"activation_checkpointing": True}),
    ],
    4: [
        ("data", "qwen3_moe", {"tensor": 2}, {}),
        ("data", "llama", {"tensor": 2}, PACKED),
        ("context", "qwen3_moe", {"tensor": 2, "context": 2, "sequence_parallel": True}, {}),
        ("uneven", "llama", {"tensor": 2}, UNEVEN),
        ("experts", "qwen3_moe", {"expert": 2, "context": 2}, {}),
    ],
}


STORED: dict[int, list[dict[str, Any]]] = {
    2: [{"tensor": 2}, {"context": 2}],
    4: [{"tensor": 2}, {"tensor": 2, "context": 2}],
}
PLANS: dict[int, list[dict[str, Any]]] = {2: [{}], 4: [{"tensor": 2}, {"context": 2}]}
# Of 5 and of 1 microbatches at 32 tokens.
UNEVEN_LENGTHS = ([30, 29, 28, 31, 27], [6, 5, 6, 5, 6])


def _worker(name: str, parallel: dict[str, Any], changes: dict[str, Any], **options: Any) -> Any:
    replica = parallel.get("tensor", 1) * parallel.get("context", 1)
    world = dist.get_world_size() if dist.is_initialized() else 1
    cfg = tiny_policy_config(
        name, **{"optimizer": OPTIMIZER, **changes}, parallel=parallel, workers=max(world, replica)
    )
    return AutomodelPolicyWorker(cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0, **options)


def _shards(count: int, *, packed: bool) -> tuple[Any, list[int] | None]:
    data = tiny_batch(LENGTHS)
    if packed:
        return data.shard_by_batch_size(count, batch_size=8, sequence_packing_args=COLUMNS)
    return data.shard_by_batch_size(count, batch_size=8), None


def _run(name: str, parallel: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Train and score; rows of every replica in order, as this rank sees them."""
    worker = _worker(name, parallel, changes)
    packed = "sequence_packing" in changes
    own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
    shards, inverse = _shards(worker.dp_size, packed=packed)
    loss = MismatchLoss(PolicyGradient())
    results = [worker.train(shards[own], loss, mbs=2) for _ in range(STEPS)]
    shards, _ = _shards(worker.dp_size, packed=packed)
    return {
        "loss": torch.stack([r["loss"][0] for r in results]),
        "grad_norm": torch.stack([r["grad_norm"][0] for r in results]),
        "metrics": results[0]["metrics"][0],
        "entropy": sum(r["metrics"][0]["entropy"] for r in results),
        "logprobs": worker.get_logprobs(shards[own])["logprobs"],
        "inverse": inverse,
        "replica": own,
        "leader": worker._is_replica_leader(),
        "weights": {n: t.clone() for n, t in worker.named_weights()},
    }


def _run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world
    )
    try:
        results = {i: _run(*case[1:]) for i, case in enumerate(CASES[world])}
        results["checkpoint"] = _save(Path(folder)) if world == 2 else _load(Path(folder), {"tensor": 2})
        results["counts"] = [_train_uneven_counts(parallel) for parallel in PLANS[world]]
        results["store"] = [_stages_from_store(parallel) for parallel in STORED[world]]
        if world == 2:
            results["collectives"] = {gib: _collectives(gib) for gib in (4.0, 0.0)}
            results["told"] = [_counts_told(recompute=recompute) for recompute in (False, True)]
            results["failed"] = [_train_after_a_failure(precision) for precision in ("float32", "bfloat16")]
        if world == 4:
            results["uneven"] = _save_uneven(Path(folder))
    finally:
        dist.destroy_process_group()
    torch.save(results, f"{folder}/rank{rank}of{world}.pt")


def _train_uneven_counts(parallel: dict[str, Any]) -> dict[str, Any]:
    """Train on rows that every replica has planned by itself, so that the numbers of microbatches differ."""
    changes = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}
    worker = _worker("qwen3_moe", parallel, {**changes, "train_global_batch_size": 10})
    own = dist.get_rank(worker.dp_group)
    args: Any = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": 32,
        "sequence_length_round": 1,
    }
    data = tiny_batch(UNEVEN_LENGTHS[own], seed=own, width=31)
    planned, _ = data.shard_by_batch_size(1, batch_size=5, dynamic_batching_args=args)
    result = worker.train(planned[0], PolicyGradient())
    return {"replica": own, "microbatches": result["num_microbatches"], "norm": float(result["grad_norm"][0])}


class Collectives(TorchDispatchMode):
    """Counts FSDP2's all-gathers and reduce-scatters."""

    gathers = reductions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gathers += func is torch.ops.c10d._allgather_base_.default
        self.reductions += func is torch.ops.c10d._reduce_scatter_base_.default
        return func(*args, **(kwargs or {}))


def _collectives(gib: float) -> dict[str, tuple[int, int]]:
    """Return how often weights were gathered, and gradients added up, for 2 and 4 microbatches."""
    worker = _worker("llama", {"gathered_gib": gib}, _like("llama", num_hidden_layers=5))
    own, _ = _shards(2, packed=False)
    shard = own[dist.get_rank()]
    calls: dict[str, Callable[[], Any]] = {
        "train 2": lambda: worker.train(copy.copy(shard), PolicyGradient(), mbs=2),
        "train 4": lambda: worker.train(copy.copy(shard), PolicyGradient(), mbs=1),
        "score 2": lambda: worker.get_logprobs(copy.copy(shard), micro_batch_size=2),
        "score 4": lambda: worker.get_logprobs(copy.copy(shard), micro_batch_size=1),
    }
    found = {}
    for name, call in calls.items():
        with Collectives() as seen:
            call()
        found[name] = seen.gathers, seen.reductions
    return found


class CountsTold(TorchDispatchMode):
    """Counts how often ranks tell each other how many rows they will send."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.c10d.alltoall_base_.default and args[1].dtype == torch.int64
        return func(*args, **(kwargs or {}))


def _counts_told(*, recompute: bool) -> tuple[int, int]:
    """Return how often counts are told for 2 microbatches of training, and in how many layers experts are shared."""
    worker = _worker("qwen3_moe", {"expert": 2}, {"activation_checkpointing": recompute})
    own, _ = _shards(2, packed=False)
    with CountsTold() as told:
        worker.train(copy.copy(own[dist.get_rank()]), PolicyGradient(), mbs=2)
    layers = sum(hasattr(module, DISPATCH_GROUP) for module in worker.model.modules())
    return told.count, layers


class FailsLate(PolicyGradient):
    """Fails in a step's second microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        if self.seen == 2:
            raise RuntimeError("out of memory")
        return super().__call__(*args, **kwargs)


def _train_after_a_failure(precision: str) -> dict[str, Any]:
    """Train after a step that failed with weights gathered, beside a worker that never failed."""
    losses = []
    for fails in (True, False):
        worker = _worker("llama", {}, {"precision": precision})
        shard = _shards(2, packed=False)[0][dist.get_rank()]
        if fails:
            with pytest.raises(RuntimeError, match="out of memory"):
                worker.train(copy.copy(shard), FailsLate(), mbs=2)
            split = all(isinstance(weight, DTensor) for weight in worker.model.parameters())
            worker.abort_train_step()
        losses += [worker.train(copy.copy(shard), PolicyGradient(), mbs=2)["loss"] for _ in range(2)]
    return {"losses": losses, "split": split}


def _stages_from_store(parallel: dict[str, Any]) -> dict[str, Any]:
    """Run every stage over a store that each process has filled, so that siblings could read and write too."""
    worker = _worker("llama", parallel, {}, with_reference=True)
    own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
    rows = range(len(LENGTHS))[own :: worker.dp_size]
    data = tiny_batch(LENGTHS).select_indices(rows)
    names = ["input_ids", "input_lengths", "token_mask", "sample_mask", "advantages", "generation_logprobs"]
    store = build_data_plane_client({"impl": "local"}, bootstrap=True)
    ids = [f"s{i}" for i in rows]
    kv_first_write({n: data[n] for n in names}, sample_ids=ids, dp_client=store, partition_id="train")
    lengths = data["input_lengths"].tolist()
    meta = KVBatchMeta("train", "train", ids, fields=names, sequence_lengths=lengths)
    worker.setup_data_plane({"impl": "local", "observability": {"enabled": True}})
    scored = worker.get_logprobs(data)["logprobs"]
    stages: dict[str, Callable[[], Any]] = {
        "prev": lambda: worker.get_logprobs_presharded(meta),
        "reference": lambda: worker.get_reference_policy_logprobs_presharded(meta),
        "train": lambda: worker.train_presharded(meta, PolicyGradient(), gbs=len(LENGTHS), mbs=2),
        "reduce": lambda: worker.reduce_rows_presharded(meta, lambda rows: {"n": rows["input_lengths"]}),
    }
    done, calls = Counter[str](), {}
    for stage, run in stages.items():
        run()
        total = Counter({op: sums["count"] for op, sums in worker._client().snapshot()["ops"].items()})
        calls[stage], done = dict(total - done), total
    there = sorted(store.get_data(KVBatchMeta("train", "", ids, fields=None)).keys())
    written = read_columns(store, meta, [name for name in there if name not in names])
    store.close()
    return {
        "leader": worker._is_replica_leader(),
        "replica": own,
        "calls": calls,
        "written": dict(written),
        "scored": scored,
    }


def _train_on(worker: Any) -> torch.Tensor:
    own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
    shards, _ = _shards(worker.dp_size, packed=False)
    loss = worker.train(shards[own], PolicyGradient(), mbs=2)["loss"]
    if worker.dp_group:
        dist.all_reduce(loss, group=worker.dp_group)
    return loss


def _save(folder: Path) -> dict[str, Any]:
    worker = _worker("qwen3_moe", {"tensor": 2}, {}, with_reference=True)
    before = worker.get_reference_policy_logprobs(tiny_batch(LENGTHS))["reference_logprobs"]
    _train_on(worker)
    worker.save_reference(folder / "reference")
    worker.save_checkpoint(folder / "two")
    after = worker.get_reference_policy_logprobs(tiny_batch(LENGTHS))["reference_logprobs"]
    again = _worker("qwen3_moe", {"tensor": 2}, {}, with_reference=True)
    again.load_checkpoint(folder / "two")
    exact = [_train_on(w) for w in (worker, again)]
    worker.snapshot_reference()
    moved = worker.get_reference_policy_logprobs(tiny_batch(LENGTHS))["reference_logprobs"]
    worker.load_reference(folder / "reference")
    back = worker.get_reference_policy_logprobs(tiny_batch(LENGTHS))["reference_logprobs"]
    from_one = _load(folder, {}, "one")
    return {
        "reference": [before, after, moved, back],
        "exact": exact,
        "from_one": from_one,
        "norms": [w.weight_version for w in (worker, again)],
    }


def _save_uneven(folder: Path) -> torch.Tensor:
    worker = _worker("llama", {"tensor": 2}, UNEVEN)
    _train_on(worker)
    worker.save_checkpoint(folder / "four")
    return _train_on(worker)


def _load(folder: Path, parallel: dict[str, Any], name: str = "two") -> torch.Tensor:
    worker = _worker("qwen3_moe", parallel, {})
    worker.load_checkpoint(folder / name)
    return _train_on(worker)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[int, list[dict[Any, Any]]]:
    alone = _worker("qwen3_moe", {}, {})
    _train_on(alone)
    alone.save_checkpoint(folder / "one")
    for world in CASES:
        run_ranks(_run_rank, (world, str(folder)), world)
    return {
        world: [torch.load(folder / f"rank{rank}of{world}.pt", weights_only=True) for rank in range(world)]
        for world in CASES
    }


def _in_order(results: list[dict[str, Any]]) -> torch.Tensor:
    inverse = results[0]["inverse"]
    return merge_rows([{"logprobs": r["logprobs"]} for r in results], inverse)["logprobs"]


def _gap(results: list[dict[str, Any]]) -> dict[str, float]:
    """The generator's gap in the first step, of all replicas."""
    return split_mismatch(combine_metrics([r["metrics"] for r in results]))[1]


@pytest.mark.parametrize(
    ("world", "index"),
    [
        pytest.param(world, i, id=f"{world}-{kind}-{name}-{i}")
        for world, cases in CASES.items()
        for i, (kind, name, _, _) in enumerate(cases)
    ],
)
def test_ranks_take_the_steps_of_one_process(world: int, index: int, ranks: Any) -> None:
    _, name, _, changes = CASES[world][index]
    alone = _run(name, {}, changes)
    results = [r[index] for r in ranks[world]]
    leaders = sorted((r for r in results if r["leader"]), key=lambda r: r["replica"])
    torch.testing.assert_close(sum(r["loss"] for r in leaders), alone["loss"], rtol=0, atol=1e-5)
    assert sum(r["entropy"] for r in leaders) == pytest.approx(alone["entropy"], rel=1e-4)
    assert _gap(leaders) == pytest.approx(_gap([alone]), rel=1e-3)
    assert _gap([alone])["token_mult_prob_error"] > 1.1
    torch.testing.assert_close(_in_order(leaders), _in_order([alone]), rtol=0, atol=1e-4)
    for result in results:
        torch.testing.assert_close(result["grad_norm"], alone["grad_norm"], rtol=1e-4, atol=1e-5)
        leader = next(r for r in leaders if r["replica"] == result["replica"])
        assert torch.equal(result["loss"], leader["loss"])
        assert torch.equal(result["logprobs"], leader["logprobs"])
    weights = results[0]["weights"]
    assert weights.keys() == alone["weights"].keys()
    for key, weight in alone["weights"].items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=2e-4)
    assert not any(r["weights"] for r in results[1:])


def test_a_small_model_is_gathered_and_reduced_once_for_all_microbatches_and_layers_of_any_other_for_each(
    ranks: Any,
) -> None:
    layers, groups, outside = 5, 3, 1  # groups of at most two layers, so that there are at most four
    for rank in ranks[2]:
        small, large = rank["collectives"][4.0], rank["collectives"][0.0]
        for microbatches in (2, 4):
            assert small[f"score {microbatches}"] == (groups + outside, 0)
            assert small[f"train {microbatches}"] == (groups + outside, groups + outside)
            assert large[f"score {microbatches}"] == (outside + microbatches * layers, 0)
            # A backward needs them again.
            gathers, reductions = outside + microbatches * 2 * layers, microbatches * (layers + outside)
            assert large[f"train {microbatches}"] == (gathers, reductions)


def test_ranks_that_share_experts_tell_how_many_rows_they_send_once_also_where_layers_are_recomputed(
    ranks: Any,
) -> None:
    for rank in ranks[2]:
        for told, layers in rank["told"]:
            assert layers == 2
            assert told == 2 * layers  # microbatches x layers


def test_a_step_that_fails_with_weights_gathered_leaves_them_split_and_as_they_were(ranks: Any) -> None:
    for failed in [failed for rank in ranks[2] for failed in rank["failed"]]:
        assert failed["split"]
        after, never = failed["losses"][:2], failed["losses"][2:]
        assert torch.equal(torch.stack(after), torch.stack(never))


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_with_fewer_microbatches_run_dummy_microbatches_that_weigh_nothing(
    world: int, ranks: Any
) -> None:
    rows = [tiny_batch(lengths, seed=i, width=31) for i, lengths in enumerate(UNEVEN_LENGTHS)]
    alone = _worker("qwen3_moe", {}, {"train_global_batch_size": 10, "train_micro_batch_size": 5})
    whole = alone.train(BatchedDataDict.from_batches(rows), PolicyGradient(), mbs=10)
    for results in zip(*(r["counts"] for r in ranks[world])):
        assert {r["microbatches"] for r in results} == {5}
        for result in results:
            assert result["norm"] == pytest.approx(float(whole["grad_norm"][0]), rel=1e-5)


READS: dict[str, int] = {"get_samples": 1}
LEADER_CALLS = {
    "prev": {**READS, "put_samples": 1},
    "reference": {**READS, "put_samples": 1},
    "train": READS,
    "reduce": READS,
}


@pytest.mark.parametrize(
    ("world", "index"), [(world, i) for world, layouts in STORED.items() for i in range(len(layouts))]
)
def test_each_replica_reads_once_per_stage_and_writes_once_and_siblings_never(
    world: int, index: int, ranks: Any
) -> None:
    parallel = STORED[world][index]
    results = [r["store"][index] for r in ranks[world]]
    leaders = [r for r in results if r["leader"]]
    replicas = world // math.prod(parallel.values())
    assert sorted(r["replica"] for r in leaders) == list(range(replicas))
    for result in leaders:
        assert result["calls"] == LEADER_CALLS
        assert result["written"].keys() == {"prev_logprobs", "reference_policy_logprobs"}
        written = result["written"]["prev_logprobs"]
        assert torch.equal(written, result["scored"][:, : written.shape[1]])
    for result in results:
        if not result["leader"]:
            assert result["calls"] == {stage: {} for stage in LEADER_CALLS}
            assert result["written"] == {}


def test_a_checkpoint_of_two_ranks_goes_on_bit_for_bit_at_two(ranks: Any) -> None:
    for result in ranks[2]:
        first, second = result["checkpoint"]["exact"]
        assert torch.equal(first, second)
        assert result["checkpoint"]["norms"] == [2, 2]


def test_a_checkpoint_of_two_ranks_goes_on_at_one_and_at_four(ranks: Any, folder: Path) -> None:
    expected = ranks[2][0]["checkpoint"]["exact"][0]
    torch.testing.assert_close(_load(folder, {}), expected, rtol=0, atol=1e-5)
    for result in ranks[4]:
        torch.testing.assert_close(result["checkpoint"], expected, rtol=0, atol=1e-5)


def test_a_checkpoint_of_parts_of_unequal_size_goes_on_at_one(ranks: Any, folder: Path) -> None:
    worker = _worker("llama", {}, UNEVEN)
    worker.load_checkpoint(folder / "four")
    torch.testing.assert_close(_train_on(worker), ranks[4][0]["uneven"], rtol=0, atol=1e-5)


def test_a_checkpoint_of_one_process_goes_on_at_two_ranks(ranks: Any, folder: Path) -> None:
    expected = _load(folder, {}, "one")
    for result in ranks[2]:
        torch.testing.assert_close(result["checkpoint"]["from_one"], expected, rtol=0, atol=1e-5)


def test_a_sharded_checkpoint_holds_a_model_that_transformers_loads(ranks: Any, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "two" / "model")
    worker = _worker("qwen3_moe", {}, {})
    worker.load_checkpoint(folder / "two")
    ours = dict(worker.model.named_parameters())
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.config.architectures == ["Qwen3MoeForCausalLM"]
    assert all(torch.equal(weight, ours[name]) for name, weight in model.named_parameters())


def test_a_sharded_reference_stays_is_replaced_and_comes_back(ranks: Any) -> None:
    for result in ranks[2]:
        before, after, moved, back = result["checkpoint"]["reference"]
        assert torch.equal(before, after)
        assert torch.equal(before, back)
        assert not torch.equal(before, moved)
