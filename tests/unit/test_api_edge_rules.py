"""Edge rules of the documented interface that no other file holds: worker, policy, store and metadata together."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.algorithms.grpo import Session
from headrace.algorithms.loop import update_weights
from headrace.algorithms.loss import read_inputs
from headrace.algorithms.run import build_session
from headrace.data_plane import (
    DP_TRAIN_FIELDS,
    LP_SEED_FIELDS,
    DataPlaneClient,
    FieldSpec,
    Kind,
    KVBatchMeta,
    MetricsDataPlaneClient,
    build_data_plane_client,
    declare,
    kv_first_write,
    read_columns,
    write_columns,
)
from headrace.data_plane.codec import response_from_nested, to_nested_by_length
from headrace.data_plane.observability import DataPlaneEvent
from headrace.data_plane.schema import (
    FIELDS,
    GLOBAL_FORWARD_PAD_SEQLEN,
    MICRO_BATCH_INDICES,
    MICRO_BATCH_LENGTHS,
    PER_TOKEN_FIELDS,
)
from headrace.data_plane.worker_mixin import TQWorkerMixin
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import (
    DataPlaneError,
    HeadraceError,
    SampleNotFound,
    SchemaError,
    TransportError,
)
from headrace.experience.types import Prompt
from headrace.models.policy.tq_policy import TQPolicy
from ranks import run_ranks
from reference_training import PolicyGradient
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer
from tiny_recipe import tiny_recipe

LOCAL = {"enabled": True, "impl": "local"}
LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
IDS = [f"s{row}" for row in range(len(LENGTHS))]
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}
DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    """A store of this process."""
    made = build_data_plane_client(LOCAL, bootstrap=True)
    yield made
    made.close()


def put(client: DataPlaneClient, lengths: list[int] = LENGTHS, **more: Any) -> KVBatchMeta:
    """Write what a rollout writes and return its meta."""
    batch = tiny_batch(lengths)
    names = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs")
    columns = {**{name: batch[name] for name in names}, **more}
    return kv_first_write(columns, sample_ids=IDS[: len(lengths)], dp_client=client, partition_id="train")


class Worker(TQWorkerMixin):
    """A worker that only moves rows; `group` holds the ranks of its replica."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        return self.group


@pytest.fixture
def worker(client: DataPlaneClient) -> Iterator[Worker]:
    """A worker that is attached to the store."""
    made = Worker()
    made.setup_data_plane(LOCAL)
    yield made
    made.close_data_plane()


# Codec.


class ValueReads(TorchDispatchMode):
    """Counts how often a tensor's value is asked for: on a GPU, each is a synchronisation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_stripping_asks_for_no_value_per_row() -> None:
    counts = []
    for rows in (2, 64):
        padded, lengths = torch.ones(rows, 70), torch.arange(rows) + 1
        with ValueReads() as reads:
            to_nested_by_length(padded, lengths)
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_a_padded_response_mask_is_not_taken_for_a_jagged_one() -> None:
    full = to_nested_by_length(torch.arange(10.0).reshape(2, 5), torch.tensor([5, 4]))
    with pytest.raises(SchemaError, match="response_mask"):
        response_from_nested(full, torch.tensor([[1, 1], [1, 0]]))


# Metadata.


def test_a_part_without_lengths_does_not_hide_the_longest_row_of_the_others() -> None:
    def part(name: str, length: int | None, **extra: int) -> KVBatchMeta:
        lengths = None if length is None else [length]
        return KVBatchMeta("train", "train", [name], sequence_lengths=lengths, extra_info=extra)

    parts = [part("a", 3, **{GLOBAL_FORWARD_PAD_SEQLEN: 16}), part("b", 100), part("c", None)]
    joined = parts[0].concat(*parts[1:])
    assert joined.sequence_lengths is None
    assert joined.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] == 100


@pytest.mark.parametrize("argument", ["sample_ids", "fields"])
def test_a_text_is_no_list_of_names(argument: str) -> None:
    with pytest.raises(SchemaError, match=argument):
        KVBatchMeta(**{"partition_id": "p", "task_name": "t", "sample_ids": ["a"], argument: "input_ids"})


def test_a_length_that_is_no_whole_number_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"3\.7"):
        KVBatchMeta("p", "t", ["a"], sequence_lengths=[3.7])  # type: ignore[list-item]


Write = Callable[[DataPlaneClient, Worker, KVBatchMeta, dict[str, Any]], object]
WRITES: dict[str, Write] = {
    "write_columns": lambda client, worker, meta, columns: write_columns(client, meta, columns),
    "_write_back": lambda client, worker, meta, columns: worker._write_back(meta, columns),
    "_write_back_result_field": lambda client, worker, meta, columns: [
        worker._write_back_result_field(meta, columns, result_key=name, field=name) for name in columns
    ],
}


@pytest.fixture(params=WRITES)
def write(request: pytest.FixtureRequest) -> Write:
    """Each way to add a column to rows that are there."""
    return WRITES[request.param]


def test_a_repeated_id_may_be_read_and_is_refused_by_every_write(
    client: DataPlaneClient, worker: Worker, write: Write
) -> None:
    twice = put(client).subset([0, 0])
    assert read_columns(client, twice, ["input_lengths"])["input_lengths"].tolist() == [9, 9]
    with pytest.raises(SchemaError, match="repeated: 's0'"):
        write(client, worker, twice, {"prev_logprobs": torch.zeros(2, 9)})


def test_no_write_takes_routes_that_no_router_can_have_chosen(
    client: DataPlaneClient, worker: Worker, write: Write
) -> None:
    meta = put(client, [2, 5])
    routes = torch.tensor([3, 7], dtype=torch.uint8).expand(2, 5, 3, 2).clone()
    write(client, worker, meta, {"routed_experts": routes})
    routes[1, 4, 2] = 7
    with pytest.raises(SchemaError, match=r"sample 's1', token 4, layer 2: experts \[7, 7\]"):
        write(client, worker, meta, {"routed_experts": routes})


def test_no_write_sends_a_narrow_column_rectangular(
    client: DataPlaneClient, worker: Worker, write: Write
) -> None:
    meta = put(client, [2, 5])
    with pytest.raises(SchemaError, match="'prev_logprobs' is 3 tokens wide; row 1 has 5 tokens"):
        write(client, worker, meta, {"prev_logprobs": torch.zeros(2, 3)})
    with pytest.raises(SchemaError, match="'prev_logprobs' has 3 rows; expected 2"):
        write(client, worker, meta, {"prev_logprobs": torch.zeros(3, 5)})
    with pytest.raises(SampleNotFound, match="prev_logprobs"):
        client.get_samples(meta.sample_ids, "train", ["prev_logprobs"])


def test_every_write_cuts_a_tail_that_is_wider_than_the_rows(
    client: DataPlaneClient, worker: Worker, write: Write
) -> None:
    meta = put(client, [2, 5])
    write(client, worker, meta, {"prev_logprobs": torch.arange(16.0).reshape(2, 8)})
    rows = client.get_samples(meta.sample_ids, "train", ["prev_logprobs"])["prev_logprobs"].unbind()
    assert [row.tolist() for row in rows] == [[0, 1], [8, 9, 10, 11, 12]]


def test_no_write_guesses_that_a_column_as_wide_as_the_longest_row_is_per_token(
    client: DataPlaneClient, worker: Worker, write: Write
) -> None:
    meta = put(client, [2, 5])
    write(client, worker, meta, {"class_scores": torch.ones(2, 5)})
    stored = client.get_samples(meta.sample_ids, "train", ["class_scores"])["class_scores"]
    assert (stored.is_nested, tuple(stored.shape)) == (False, (2, 5))


def test_a_meta_whose_lengths_are_not_those_of_the_stored_rows_writes_nothing(
    client: DataPlaneClient, worker: Worker, write: Write
) -> None:
    meta = put(client, [2, 5])
    meta.sequence_lengths = [5, 2]
    with pytest.raises(SchemaError, match="prev_logprobs"):
        write(client, worker, meta, {"prev_logprobs": torch.zeros(2, 5)})
    with pytest.raises(SampleNotFound, match="prev_logprobs"):
        client.get_samples(meta.sample_ids, "train", ["prev_logprobs"])


def test_a_write_back_of_per_sample_columns_needs_no_lengths(client: DataPlaneClient, worker: Worker) -> None:
    meta = put(client, [2, 5])
    meta.sequence_lengths = None
    worker._write_back(meta, {"sample_mask": torch.tensor([0.0, 1.0])})
    assert client.get_samples(meta.sample_ids, "train", ["sample_mask"])["sample_mask"].tolist() == [0.0, 1.0]


# The store.


def test_samples_that_do_not_make_whole_groups_are_refused_at_registration(client: DataPlaneClient) -> None:
    with pytest.raises(DataPlaneError, match="grpo_group_size"):
        client.register_partition("train", ["input_ids"], 5, ["train"], grpo_group_size=2)


def test_a_text_in_place_of_ids_clears_nothing(client: DataPlaneClient) -> None:
    client.put_samples(["a", "b"], "train", tags=[{}, {}])
    with pytest.raises(SchemaError):
        client.clear_samples("ab", "train")
    assert client.sample_ids("train") == ["a", "b"]


# Workers.


def test_a_worker_needs_a_store() -> None:
    with pytest.raises(DataPlaneError, match="setup_data_plane"):
        Worker()._fetch(KVBatchMeta("train", "train", ["a"], ["input_ids"]))


def test_a_fetch_gives_the_columns_of_the_meta_padded_to_the_batch_wide_target(
    client: DataPlaneClient, worker: Worker
) -> None:
    meta = put(client).with_fields(["input_ids", "input_lengths"])
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 16
    few = worker._fetch(meta.slice(1, 3), layout="padded")
    assert set(few) == {"input_ids", "input_lengths"}
    assert few["input_ids"].shape == (2, 16)
    assert worker._fetch(meta, layout="jagged")["input_ids"].is_nested


def test_a_fetch_by_a_meta_that_does_not_say_its_columns_is_not_empty(
    client: DataPlaneClient, worker: Worker
) -> None:
    put(client)
    assert set(LP_SEED_FIELDS) <= set(worker._fetch(KVBatchMeta("train", "train", IDS)))


def test_an_unknown_fetch_policy_is_refused(client: DataPlaneClient, worker: Worker) -> None:
    with pytest.raises(HeadraceError, match="leader_brodcast"):
        worker._fetch(put(client), fetch_policy="leader_brodcast")  # type: ignore[arg-type]


def test_the_drivers_plan_is_taken_as_it_is(client: DataPlaneClient, worker: Worker) -> None:
    meta = put(client)
    # No planner makes this one: it is neither balanced nor sorted, and ends with a dummy.
    plan = [[[0, 1], [1, 7], [7, 8], [8, 8]]]
    meta.extra_info.update({MICRO_BATCH_INDICES: plan, MICRO_BATCH_LENGTHS: [[9, 12, 8, 1]]})
    batch = worker._fetch(meta)
    assert batch.micro_batch_indices == plan
    assert [m.size for m in batch.microbatches("dynamic", 1)] == [1, 6, 1, 1]


def test_class_scores_as_wide_as_the_tokens_reach_the_model_whole(
    client: DataPlaneClient, worker: Worker
) -> None:
    meta = put(client, [2, 5], class_scores=torch.ones(2, 5))
    meta.extra_info.update({MICRO_BATCH_INDICES: [[[0, 1], [1, 2]]], MICRO_BATCH_LENGTHS: [[2, 5]]})
    microbatches = list(worker._fetch(meta).microbatches("dynamic", 1))
    assert [tuple(m["input_ids"].shape) for m in microbatches] == [(1, 2), (1, 5)]
    assert [tuple(m["class_scores"].shape) for m in microbatches] == [(1, 5), (1, 5)]


def _replica(rank: int, folder: str) -> None:
    """Be one of the two ranks of a replica; only rank 0 can reach the store."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    try:
        torch.save(_replica_results(rank), f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def _replica_results(rank: int) -> dict[str, Any]:
    events: list[DataPlaneEvent] = []
    worker = Worker(dist.group.WORLD)
    meta = KVBatchMeta("train", "train", IDS, [*LP_SEED_FIELDS, "message_log"], LENGTHS)
    if rank == 0:
        store = build_data_plane_client(LOCAL, bootstrap=True)
        put(store, message_log=[[{"role": "user", "content": name}] for name in IDS])
        worker._dp_client = MetricsDataPlaneClient(store, events.append)
    results: dict[str, Any] = {}
    for policy in ("auto", "leader_broadcast"):
        batch = worker._fetch(meta, fetch_policy=policy, preprocess=_count_calls)  # type: ignore[arg-type]
        results[policy] = as_lists(batch)
    whole = meta.with_fields(meta.fields or [])
    whole.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 16
    results["as stored"] = as_lists(worker._fetch(whole))
    if rank == 0:
        results["read alone"] = as_lists(worker._fetch(whole, fetch_policy="independent"))
    worker._write_back(meta, {"prev_logprobs": torch.full((8, 12), float(rank))})
    results["ops"] = [event.op for event in events]
    try:
        worker._fetch(meta.with_fields(["nowhere"]))
    except HeadraceError as error:
        results["failure"] = (type(error).__name__, str(error))
    dist.barrier()
    results["preprocess failure"] = _kind_of_failure(worker, meta)
    results["unsendable"] = _unsendable_preprocessing(worker, meta)
    return results


def as_lists(batch: BatchedDataDict) -> dict[str, Any]:
    return {name: getattr(v, "tolist", lambda v=v: v)() for name, v in batch.items()}


def _count_calls(batch: BatchedDataDict) -> BatchedDataDict:
    batch["rank"] = torch.full((batch.size,), dist.get_rank())
    return batch


def _kind_of_failure(worker: Worker, meta: KVBatchMeta) -> str:
    def fail(batch: BatchedDataDict) -> BatchedDataDict:
        raise ValueError("no such column")

    try:
        worker._fetch(meta, preprocess=fail)
    except (HeadraceError, ValueError, RuntimeError) as error:
        return type(error).__name__
    return "none"


def _unsendable_preprocessing(worker: Worker, meta: KVBatchMeta) -> tuple[str, bool]:
    def add_lock(batch: BatchedDataDict) -> BatchedDataDict:
        return BatchedDataDict({**batch, "locks": [threading.Lock()] * batch.size})

    begin = time.monotonic()
    try:
        worker._fetch(meta, preprocess=add_lock)
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin < 10
    return "none", False


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks of a replica saw."""
    folder = Path(tmp_path_factory.mktemp("replica"))
    run_ranks(_replica, (str(folder),), 2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("policy", ["auto", "leader_broadcast"])
def test_a_sibling_gets_what_the_leader_fetched_and_preprocessed(
    replica: list[dict[str, Any]], policy: str
) -> None:
    leader, sibling = (rank[policy] for rank in replica)
    assert leader == sibling
    assert leader["input_lengths"] == LENGTHS
    assert leader["rank"] == [0] * len(IDS)
    assert leader["message_log"][1] == [{"role": "user", "content": "s1"}]


def test_rows_that_were_shared_without_padding_are_what_the_leader_would_read_alone(
    replica: list[dict[str, Any]],
) -> None:
    leader, sibling = replica
    assert leader["as stored"] == sibling["as stored"] == leader["read alone"]
    assert {len(row) for row in sibling["as stored"]["input_ids"]} == {16}


def test_the_leader_alone_reads_and_writes_once(replica: list[dict[str, Any]]) -> None:
    assert [rank["ops"] for rank in replica] == [[*["get_samples"] * 4, "put_samples"], []]


def test_a_leader_whose_fetch_fails_leaves_no_sibling_waiting(replica: list[dict[str, Any]]) -> None:
    (leader, text), (sibling, told) = (rank["failure"] for rank in replica)
    assert (leader, sibling) == ("SampleNotFound", TransportError.__name__)
    assert "'nowhere'" in text
    assert text in told


def test_a_leader_whose_preprocessing_fails_leaves_no_sibling_waiting(replica: list[dict[str, Any]]) -> None:
    assert [rank["preprocess failure"] for rank in replica] == ["ValueError", TransportError.__name__]


def test_a_leader_whose_preprocessing_makes_what_cannot_be_sent_leaves_no_sibling_waiting(
    replica: list[dict[str, Any]],
) -> None:
    (leader, in_time), (sibling, told_in_time) = (rank["unsendable"] for rank in replica)
    assert in_time
    assert told_in_time
    assert leader.startswith("SchemaError: column 'locks' is a list that cannot be sent")
    assert sibling.startswith("TransportError")
    assert "column 'locks'" in sibling


def test_an_undeclared_jagged_column_under_dynamic_batching_is_refused_with_the_remedy(
    client: DataPlaneClient, worker: Worker
) -> None:
    hints = [torch.arange(2), torch.arange(5)]
    meta = put(client, [2, 5], hints=hints)
    meta.extra_info.update({MICRO_BATCH_INDICES: [[[0, 1], [1, 2]]], MICRO_BATCH_LENGTHS: [[2, 5]]})
    with pytest.raises(SchemaError, match=r"column 'hints'.*declare\(FieldSpec\('hints', Kind.PER_TOKEN"):
        worker._fetch(meta).microbatches("dynamic", 1)
    assert [m.size for m in worker._fetch(meta).microbatches("packed", 1)] == [1, 1]


# The policy that works from metadata.


@pytest.fixture
def make_policy() -> Iterator[Callable[..., TQPolicy]]:
    """Make policies over a tiny model; they are shut down after the test."""
    made: list[TQPolicy] = []

    def make(observed: bool = False, **changes: Any) -> TQPolicy:
        cfg = {**LOCAL, "store_name": f"store{len(made)}", "observability": {"enabled": observed}}
        parts = (tiny_policy_config("llama", **changes), tiny_generation_config())
        made.append(TQPolicy(*parts, tokenizer=tiny_tokenizer(), seed=0, with_reference=True, dp_cfg=cfg))
        made[-1].prepare_step(len(IDS), group_size=2)
        return made[-1]

    yield make
    for policy in made:
        assert policy.shutdown()
        assert policy.shutdown()


def test_a_pad_target_is_stamped_once_and_grows_with_a_longer_row(make_policy: Any) -> None:
    policy = make_policy(make_sequence_length_divisible_by=8)
    meta = put(policy.dp_client)
    targets = []
    for _ in range(2):
        policy._stamp_pad_seqlen(meta)
        targets.append(meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN])
    longer = KVBatchMeta("train", "train", ["l"], meta.fields, [17], meta.extra_info)
    policy._stamp_pad_seqlen(longer)
    shorter = meta.subset([5])
    shorter.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 24
    policy._stamp_pad_seqlen(shorter)
    targets += [m.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] for m in (longer, shorter, meta)]
    assert targets == [16, 16, 24, 24, 16]
    with pytest.raises(SchemaError, match="sequence_lengths"):
        policy._stamp_pad_seqlen(KVBatchMeta("train", "train", ["a"]))


@pytest.mark.parametrize("batching", [{}, PACKED, DYNAMIC], ids=["fixed", "packed", "dynamic"])
def test_logprobs_of_a_meta_are_those_of_the_batch_in_the_callers_row_order(
    make_policy: Any, batching: dict[str, Any]
) -> None:
    policy = make_policy(**batching)
    meta = put(policy.dp_client)
    policy.get_logprobs_from_meta(meta)
    policy.get_reference_policy_logprobs_from_meta(meta, micro_batch_size=4)
    names = ["prev_logprobs", "reference_policy_logprobs"]
    assert meta.fields is not None
    assert set(names) <= set(meta.fields)
    order = [5, 0, 7, 2, 2, 1, 6, 4]
    columns = policy.read_from_dataplane(meta.subset(order), select_fields=names)
    batch = tiny_batch(LENGTHS)
    expected = policy.get_logprobs(batch)["logprobs"][order]
    torch.testing.assert_close(columns["prev_logprobs"], expected, rtol=0, atol=1e-5)
    expected = policy.get_reference_policy_logprobs(batch)["reference_logprobs"][order]
    torch.testing.assert_close(columns["reference_policy_logprobs"], expected, rtol=0, atol=1e-5)


def test_a_logprob_stage_moves_its_seed_columns_and_its_result_only(make_policy: Any) -> None:
    policy = make_policy(observed=True)
    meta = put(policy.dp_client, extra=torch.ones(len(IDS), 5))
    before = policy.moved_bytes()
    policy.get_logprobs_from_meta(meta)
    moved = {name for name, total in policy.moved_bytes().items() if total != before.get(name, 0)}
    assert moved == {*LP_SEED_FIELDS, "prev_logprobs"}


def test_a_logprob_stage_and_its_arguments_of_the_planner_have_their_documented_names(
    make_policy: Any,
) -> None:
    policy = make_policy(**PACKED)
    meta = put(policy.dp_client)
    policy.get_logprobs_from_meta(meta)
    first = policy.read_from_dataplane(meta, select_fields=["prev_logprobs"])["prev_logprobs"]
    policy.write_to_dataplane(meta, {"prev_logprobs": torch.zeros_like(first)})
    policy._logprob_dispatch(
        meta,
        task_name="prev_lp",
        worker_method="get_logprobs_presharded",
        timer_prefix="get_logprobs",
        timer=None,
        common_kwargs={"micro_batch_size": None},
    )
    again = policy.read_from_dataplane(meta, select_fields=["prev_logprobs"])["prev_logprobs"]
    assert torch.equal(first, again)
    packing, dynamic = policy._packing_args("train_mb_tokens")
    assert (packing["max_tokens_per_microbatch"], dynamic) == (32, None)


def ready_to_train(policy: TQPolicy) -> KVBatchMeta:
    """Write every column of a training step and return the meta."""
    batch = tiny_batch(LENGTHS)
    meta = put(policy.dp_client)
    names = ("prev_logprobs", "advantages")
    policy.write_to_dataplane(meta, {name: batch[name] for name in names})
    return meta


def weights(policy: TQPolicy) -> dict[str, torch.Tensor]:
    """Return copies of the weights."""
    return {name: tensor.clone() for name, tensor in policy.named_weights()}


def test_the_split_step_is_the_whole_step_and_an_aborted_one_is_none(make_policy: Any) -> None:
    policies = [make_policy() for _ in range(2)]
    metas = [ready_to_train(policy) for policy in policies]
    whole = policies[0].train_from_meta(metas[0], PolicyGradient())
    split, meta = policies[1], metas[1]
    before = weights(split)
    split.begin_train_step(meta)
    split.train_microbatches_from_meta(meta.slice(0, 4), PolicyGradient())
    split.abort_train_step()
    split.abort_train_step()
    assert all(torch.equal(before[name], now) for name, now in weights(split).items())
    with pytest.raises(HeadraceError, match="no train step is open"):
        split.finish_train_step()
    split.begin_train_step(meta)
    split.train_microbatches_from_meta(meta.slice(0, 4), PolicyGradient())
    split.train_microbatches_from_meta(meta.slice(4, 8), PolicyGradient())
    parts = split.finish_train_step()
    assert set(whole) == set(parts)
    assert set(whole) >= {
        "loss",
        "grad_norm",
        "all_mb_metrics",
        "total_flops",
        "num_ranks",
        "theoretical_tflops",
    }
    torch.testing.assert_close(parts["loss"], whole["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(parts["grad_norm"], whole["grad_norm"], rtol=1e-5, atol=0)


def test_a_column_asked_for_and_not_there_is_an_error(make_policy: Any) -> None:
    policy = make_policy()
    meta = ready_to_train(policy)
    with pytest.raises(HeadraceError, match="nowhere"):
        policy.train_from_meta(meta, PolicyGradient(), train_fields=[*DP_TRAIN_FIELDS, "nowhere"])


class HintedLoss(PolicyGradient):
    """A loss with a declared column of its own that no training step reads by itself."""

    required_columns = frozenset({"advantages", "hint_weights"})

    def __call__(self, logprobs: torch.Tensor, data: Any, **counts: torch.Tensor) -> Any:
        hints = read_inputs(logprobs, data, {"hint_weights"}, **counts)["hint_weights"]
        loss, metrics = super().__call__(logprobs, data, **counts)
        return loss, {**metrics, "hints": hints.sum()}


@pytest.mark.parametrize("pieces", [False, True])
def test_a_loss_gets_the_declared_column_that_it_asks_for(make_policy: Any, pieces: bool) -> None:
    declare(FieldSpec("hint_weights", Kind.PER_TOKEN, torch.float32, optional=True))
    try:
        policy = make_policy()
        meta = ready_to_train(policy)
        with pytest.raises(HeadraceError, match="hint_weights"):
            policy.train_from_meta(meta, HintedLoss())
        hints = [torch.full((length,), 0.5) for length in LENGTHS]
        policy.write_to_dataplane(
            meta, {"hint_weights": torch.nested.nested_tensor(hints, layout=torch.jagged)}
        )
        if pieces:
            policy.begin_train_step(meta)
            policy.train_microbatches_from_meta(meta, HintedLoss())
            trained = policy.finish_train_step()
        else:
            trained = policy.train_from_meta(meta, HintedLoss())
        assert trained["all_mb_metrics"]["hints"] == sum(length - 1 for length in LENGTHS) / 2
    finally:
        del FIELDS["hint_weights"]
        PER_TOKEN_FIELDS.discard("hint_weights")


def test_a_meta_that_does_not_say_its_columns_can_be_scored(make_policy: Any) -> None:
    policy = make_policy()
    put(policy.dp_client)
    policy.get_logprobs_from_meta(KVBatchMeta("train", "train", IDS, sequence_lengths=LENGTHS))
    scored = policy.dp_client.get_samples(IDS, "train", ["prev_logprobs"])["prev_logprobs"].unbind()
    assert [len(row) for row in scored] == LENGTHS


def test_discarded_and_finished_rows_are_gone_and_other_partitions_are_not(make_policy: Any) -> None:
    policy = make_policy()
    policy.prepare_val_partition(1)
    policy.dp_client.put_samples(["v"], "val", tags=[{}])
    meta = put(policy.dp_client)
    policy.discard_samples(["s1", "s3"], "train")
    assert policy.dp_client.sample_ids("train") == ["s0", "s2", "s4", "s5", "s6", "s7"]
    policy.finish_step(meta)
    policy.finish_step(meta)
    assert policy.dp_client.sample_ids("train") == []
    assert policy.dp_client.sample_ids("val") == ["v"]


def test_a_validation_partition_has_one_task_and_no_groups(make_policy: Any) -> None:
    policy = make_policy()
    policy.prepare_val_partition(3, partition_id="held_out")
    policy.dp_client.put_samples(["v"], "held_out", tags=[{}])
    claimed = policy.dp_client.claim_meta("held_out", "val", [], 1)
    assert claimed.sample_ids == ["v"]
    with pytest.raises(DataPlaneError, match="no task 'train'"):
        policy.dp_client.claim_meta("held_out", "train", [], 1)


def test_groups_of_a_step_are_claimed_whole(make_policy: Any) -> None:
    client = make_policy().dp_client
    client.put_samples(["a_g0", "b_g0", "a_g1"], "train", tags=[{}] * 3)
    assert client.claim_meta("train", "train", [], 2).sample_ids == ["a_g0", "a_g1"]
    with pytest.raises(DataPlaneError, match="grpo_group_size=2"):
        client.claim_meta("train", "train", [], 1, timeout_s=0.01)


# A step of the loop.


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """The parts of a run over the store."""
    made = build_session(tiny_recipe(tmp_path))
    update_weights(made)
    yield made
    made.close()


def rollout(session: Session, prompts: list[Prompt]) -> KVBatchMeta:
    """Put four samples of each prompt into the open partition."""
    method, arguments = session.policy.rollout_call
    request = {"prompts": prompts, "tag": "1", "seed": 0}
    meta: KVBatchMeta = session.rollouts.run_all(method, request, group_size=4, **arguments)[0][0]
    return meta


def test_an_error_in_mid_step_leaves_no_row_in_the_store(session: Session) -> None:
    policy: Any = session.policy
    prompts = session.environment.prompts("train")[:4]
    client = policy.dp_client

    def step() -> None:
        with policy.step_rows(16, 4):
            rollout(session, prompts)
            assert len(client.sample_ids("train")) == 16
            raise RuntimeError("mid-step")

    with pytest.raises(RuntimeError, match="mid-step"):
        step()
    assert client.sample_ids("train") == []


def test_filtering_half_of_the_groups_leaves_the_keys_of_the_others_only(session: Session) -> None:
    policy: Any = session.policy
    client = policy.dp_client
    prompts = session.environment.prompts("train")[:4]

    def step() -> None:
        with policy.step_rows(16, 4):
            meta = rollout(session, prompts)
            kept = policy.keep_rows(meta, range(8))
            assert client.sample_ids("train") == kept.sample_ids == meta.sample_ids[:8]
            client.put_samples(["leaked"], "train", tags=[{}])
            policy.finish_step(kept)

    with pytest.raises(DataPlaneError, match=r"1 rows are left .*'leaked'"):
        step()
    assert client.sample_ids("train") == []
