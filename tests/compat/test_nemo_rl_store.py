"""The store as a caller of NeMo-RL uses it: started without `bootstrap`, watched by a callback, written and read."""

import logging
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nemo_rl.data_plane import (
    KVBatchMeta,
    build_data_plane_client,
    kv_first_write,
    read_columns,
    round_up,
    write_columns,
)
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.column_io import TOKEN_ALIGNED_FIELDS
from nemo_rl.data_plane.interfaces import DataPlaneConfig, ObservabilityConfig
from nemo_rl.data_plane.observability import DataPlaneStats, MetricsDataPlaneClient, log_event
from nemo_rl.data_plane.preshard import shard_meta_for_dp
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl_names import calls
from omegaconf import OmegaConf
from tensordict import TensorDict

from headrace.errors import ConfigError, DataPlaneError, SchemaError
from ray_session import fresh_store

LOCAL = {"enabled": True, "impl": "local"}
IDS = ["a_g0", "a_g1", "b_g0", "b_g1"]
SEEN: list[Any] = []


def columns(rows: int, **values: Any) -> TensorDict:
    return TensorDict(values, batch_size=[rows])


@calls("data_plane.factory", "build_data_plane_client")
def test_a_client_without_bootstrap_starts_the_store_and_others_attach_to_it() -> None:
    config: DataPlaneConfig = fresh_store({**LOCAL, "storage_capacity": 8})
    client = build_data_plane_client(config)
    client.put_samples(["a"], "p", fields=columns(1, x=torch.ones(1)))
    worker = build_data_plane_client(config, bootstrap=False)
    assert worker.get_samples(["a"], "p", ["x"])["x"].tolist() == [1.0]
    client.close()


def test_configs_that_name_no_store_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="data_plane is None; expected a mapping"):
        build_data_plane_client(None)
    with pytest.raises(ValueError, match="enabled"):
        build_data_plane_client({"enabled": False, "impl": "transfer_queue"})
    with pytest.raises(ConfigError, match=r"controller_address=10\.0\.0\.1:5: .* data_plane.store_name"):
        build_data_plane_client({**LOCAL, "controller_address": "10.0.0.1:5"})


def test_the_keys_of_a_nemo_rl_recipe_are_taken() -> None:
    config = {
        **fresh_store(LOCAL),
        "backend": "simple",
        "storage_capacity": 16,
        "num_storage_units": 2,
        "claim_meta_poll_interval_s": 0.5,
        "global_segment_size": 1024,
        "local_buffer_size": 1024,
        "controller_address": None,
        "ack_timeout_ms": 2500,
        "observability": {"enabled": False, "callback": None},
    }
    client = build_data_plane_client(config)
    assert not isinstance(client, MetricsDataPlaneClient)
    client.close()


@pytest.mark.parametrize("form", ["function", "text", "logger", "none"])
def test_observability_callback_gets_events_that_read_as_mappings(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    SEEN.clear()
    callback: Any = {
        "function": SEEN.append,
        "text": "test_nemo_rl_store:remember",
        "logger": logging.getLogger("mine"),
        "none": None,
    }[form]
    observability: ObservabilityConfig = {"enabled": True, "callback": callback}
    with caplog.at_level(logging.INFO):
        client = build_data_plane_client({**fresh_store(LOCAL), "observability": observability})
        client.put_samples(["a", "b"], "p", fields=columns(2, x=torch.zeros(2, 3)))
    client.close()
    if form in ("function", "text"):
        (event,) = SEEN
        assert {key: event[key] for key in ("op", "partition_id", "n_keys", "n_bytes", "status")} == {
            "op": "put",
            "partition_id": "p",
            "n_keys": 2,
            "n_bytes": 24,
            "status": "ok",
        }
        assert event["wall_ms"] > 0
    else:
        logger = "mine" if form == "logger" else "headrace.data_plane"
        assert [(r.name, r.getMessage().split(" ms")[0].rsplit(",", 1)[0]) for r in caplog.records] == [
            (logger, "put p: 2 keys, 24 bytes")
        ]


def remember(event: Any) -> None:
    SEEN.append(event)


@pytest.mark.parametrize("form", [SimpleNamespace, "data class", OmegaConf.create])
def test_a_config_may_have_attributes_in_place_of_keys(form: Any) -> None:
    SEEN.clear()
    observability = {"enabled": True, "callback": "test_nemo_rl_store:remember"}
    config = fresh_store(LOCAL)
    if form is OmegaConf.create:
        made = OmegaConf.create({**config, "observability": observability})
    elif form is SimpleNamespace:
        made = SimpleNamespace(**config, observability=SimpleNamespace(**observability))
    else:
        names = [*config, "observability"]
        made = make_dataclass("Config", names)(*config.values(), observability)
    client = build_data_plane_client(made)
    client.put_samples(["a"], "p", fields=columns(1, x=torch.zeros(1)))
    client.close()
    assert [event["op"] for event in SEEN] == ["put"]


def test_a_logger_may_take_the_events_of_a_client(caplog: pytest.LogCaptureFixture) -> None:
    client = MetricsDataPlaneClient(NoOpDataPlaneClient(), on_event=logging.getLogger("mine"))
    with caplog.at_level(logging.INFO):
        client.put_samples(["a"], "p", fields=columns(1, x=torch.zeros(1)))
    client.close()
    assert [(r.name, r.getMessage()[:22]) for r in caplog.records] == [("mine", "put p: 1 keys, 4 bytes")]


def test_a_callback_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data_plane\.observability\.callback is a int"):
        build_data_plane_client({**LOCAL, "observability": {"enabled": True, "callback": 3}})


@calls("data_plane.observability", "log_event")
def test_an_event_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    event: Any = {
        "op": "get",
        "partition_id": "p",
        "n_keys": 1,
        "n_bytes": 4,
        "wall_ms": 0.25,
        "status": "error",
    }
    with caplog.at_level(logging.INFO):
        log_event(event)
    assert caplog.messages == ["get p: 1 keys, 4 bytes, 0.250 ms, error"]


METHODS = (
    "register_partition",
    "claim_meta",
    "get_data",
    "check_consumption_status",
    "put_samples",
    "get_samples",
    "clear_samples",
    "close",
)


@calls("data_plane.observability", "MetricsDataPlaneClient", "DataPlaneStats")
@calls(
    "data_plane.observability",
    *(f"MetricsDataPlaneClient.{name}" for name in (*METHODS, "snapshot", "bytes_outstanding_by_partition")),
)
@calls("data_plane.interfaces", *(f"DataPlaneClient.{name}" for name in METHODS))
def test_every_operation_is_an_event_and_the_snapshot_adds_them_up() -> None:
    events: list[Any] = []
    client = MetricsDataPlaneClient(NoOpDataPlaneClient(), on_event=events.append)
    client.register_partition("p", ["x"], 4, ["train"], grpo_group_size=2, enums=None)
    client.put_samples(IDS, "p", columns(4, x=torch.arange(4.0)), [{"n": i} for i in range(4)])
    claimed = client.claim_meta("p", "train", ["x"], 2, dp_rank=0, blocking=True, timeout_s=1.0)
    assert claimed is not None
    assert claimed.sample_ids == IDS[:2]
    assert client.get_data(claimed, select_fields=["x"])["x"].tolist() == [0.0, 1.0]
    assert client.check_consumption_status("p", ["train"]) is False
    assert client.get_samples(["b_g1", "a_g0"], "p", ["x"])["x"].tolist() == [3.0, 0.0]
    assert client.snapshot()["bytes_outstanding"] == 16
    assert client.bytes_outstanding_by_partition() == {"p": 16}
    client.clear_samples(["a_g0"], "p")
    assert client.bytes_outstanding_by_partition() == {"p": 12}
    client.clear_samples(None, "p")
    client.close()
    assert [(e["op"], e["n_keys"], e["n_bytes"]) for e in events] == [
        ("register", 4, 0),
        ("put", 4, 16),
        ("claim_meta", 2, 0),
        ("get_data", 2, 8),
        ("check_consumption_status", 0, 0),
        ("get", 2, 8),
        ("clear", 1, 0),
        ("clear", 0, 0),
    ]
    snapshot = client.snapshot()
    assert (snapshot["total_ops"], snapshot["total_keys"], snapshot["total_bytes"]) == (8, 15, 32)
    assert (snapshot["bytes_outstanding"], snapshot["peak_bytes_outstanding"]) == (0, 16)
    assert (snapshot["max_bytes_per_key_seen"], snapshot["last_put_bytes_per_key"]) == (4, 4)
    assert set(vars(DataPlaneStats())) < set(snapshot)
    assert set(vars(DataPlaneStats()).values()) == {0}


def test_a_failed_operation_is_an_event_but_no_total_and_still_raised() -> None:
    events: list[Any] = []
    client = MetricsDataPlaneClient(NoOpDataPlaneClient(), events.append)
    with pytest.raises(KeyError) as caught:
        client.get_samples(["a"], "nowhere", ["x"])
    assert isinstance(caught.value, DataPlaneError)
    assert str(caught.value).startswith("unknown partition 'nowhere'")
    assert [(e["op"], e["status"]) for e in events] == [("get", "error")]
    assert client.snapshot()["total_ops"] == 0
    client.close()


def test_outstanding_bytes_come_to_nothing_also_where_they_do_not_divide_or_are_written_twice() -> None:
    client = MetricsDataPlaneClient(NoOpDataPlaneClient())
    ids = [f"u{i}" for i in range(7)]
    for _ in range(2):
        client.put_samples(ids, "p", columns(7, x=torch.zeros(7, 5)))
        assert client.snapshot()["bytes_outstanding"] == 140
    client.put_samples(ids, "p", columns(7, y=torch.zeros(7, dtype=torch.uint8)))
    assert client.snapshot()["bytes_outstanding"] == 147
    client.clear_samples(ids, "p")
    assert client.snapshot()["bytes_outstanding"] == 0
    client.close()


@pytest.mark.parametrize("advantages", [[0.5, 1.0], np.ones(2), torch.ones(2)])
def test_one_value_per_sample_does_not_say_how_long_rows_are(advantages: Any) -> None:
    client = NoOpDataPlaneClient()
    client.register_partition("p", ["input_ids"], 2, ["train"])
    meta = KVBatchMeta("p", "train", ["a", "b"])
    with pytest.raises(SchemaError, match="'advantages' is per token, and the meta has no sequence_lengths"):
        write_columns(client, meta, {"advantages": advantages})
    with pytest.raises(SchemaError, match="no column 'input_lengths'"):
        kv_first_write({"advantages": advantages}, sample_ids=["a", "b"], dp_client=client, partition_id="p")
    both = {"advantages": advantages, "input_ids": torch.ones(2, 3, dtype=torch.int64)}
    meta = kv_first_write(both, sample_ids=["a", "b"], dp_client=client, partition_id="p")
    assert meta.sequence_lengths == [3, 3]
    client.close()


def test_columns_that_are_written_to_rows_are_outstanding_and_what_a_second_try_does_not_write_is_not() -> (
    None
):
    client = MetricsDataPlaneClient(NoOpDataPlaneClient())
    client.register_partition("p", ["x"], 2, ["train"])
    batch = {"x": torch.zeros(2), "input_lengths": torch.tensor([1, 1])}
    meta = kv_first_write(batch, sample_ids=["a", "b"], dp_client=client, partition_id="p", once=True)
    assert client.snapshot()["bytes_outstanding"] == 24
    write_columns(client, meta, {"advantages": torch.zeros(2)})
    snapshot = client.snapshot()
    assert (snapshot["bytes_outstanding"], snapshot["last_put_bytes_per_key"]) == (32, 4)
    client.clear_samples(["a", "b"], "p")
    again = kv_first_write(batch, sample_ids=["a", "b"], dp_client=client, partition_id="p", once=True)
    assert (again.size, client.snapshot()["bytes_outstanding"]) == (0, 0)
    client.close()


@calls(
    "data_plane.interfaces",
    "KVBatchMeta",
    *(f"KVBatchMeta.{n}" for n in ("size", "stamp_tags", "subset", "slice", "concat", "drop", "with_fields")),
)
def test_metadata_is_cut_joined_and_tagged() -> None:
    meta = KVBatchMeta("p", None, IDS, ["x"], [1, 2, 3, 4], {"note": 1}, None)
    assert meta.size == 4
    meta.stamp_tags({"reward": torch.tensor([0.5, 1.0, 1.5, 2.0])})
    assert meta.tags is not None
    assert [tag["reward"] for tag in meta.tags] == [0.5, 1.0, 1.5, 2.0]
    assert meta.subset([3, 0]).sequence_lengths == [4, 1]
    assert meta.slice(1, 3).sample_ids == ["a_g1", "b_g0"]
    dropped = meta.drop([0, 1, 2])
    assert dropped is not None
    assert dropped.sample_ids == ["b_g1"]
    assert meta.slice(0, 1).concat(dropped).sample_ids == ["a_g0", "b_g1"]
    assert meta.with_fields(["y"]).fields == ["y"]
    assert KVBatchMeta(partition_id="p", task_name="t", sample_ids=[]).tags is None


# Columns.


@calls("data_plane.column_io", "round_up", "kv_first_write", "read_columns", "write_columns")
def test_a_batch_is_written_extended_and_read() -> None:
    client = NoOpDataPlaneClient()
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]),
        "input_lengths": torch.tensor([3, 2]),
        "generation_logprobs": torch.tensor([[0.0, -1.0, -2.0, 0.0], [0.0, -3.0, 0.0, 0.0]]),
    }
    meta = kv_first_write(
        batch,
        sample_ids=["a", "b"],
        dp_client=client,
        partition_id="p",
        extra_info={"note": 1},
        task_name="train",
        pad_to_multiple=4,
        tags=[{"n": 0}, {"n": 1}],
    )
    assert (meta.sequence_lengths, meta.task_name, meta.tags) == ([3, 2], "train", [{"n": 0}, {"n": 1}])
    write_columns(client, meta, {"advantages": torch.tensor([0.5, -0.5])})
    read = read_columns(
        client, meta, ["input_ids", "advantages"], layout="padded", pad_value_dict={"input_ids": 9}
    )
    assert read["input_ids"].tolist() == [[1, 2, 3], [4, 5, 9]]
    assert read["advantages"].tolist() == [0.5, -0.5]
    assert round_up(5, 4) == 8
    assert {"input_ids", "generation_logprobs", "token_mask"} <= set(TOKEN_ALIGNED_FIELDS)
    client.close()


def test_rows_without_input_lengths_count_as_full_width() -> None:
    client = NoOpDataPlaneClient()
    batch = {
        "input_ids": torch.tensor([[1, 2, 0], [3, 0, 0]]),
        "token_mask": torch.ones(2, 3, dtype=torch.uint8),
    }
    meta = kv_first_write(batch, sample_ids=["a", "b"], dp_client=client, partition_id="p")
    assert meta.sequence_lengths == [3, 3]
    read = read_columns(client, meta, ["input_ids", "input_lengths"])
    assert read["input_ids"].tolist() == [[1, 2, 0], [3, 0, 0]]
    assert read["input_lengths"].tolist() == [3, 3]
    bare = KVBatchMeta("p", "train", ["a", "b"])
    write_columns(client, bare, {"prev_logprobs": torch.full((2, 3), -1.0)})
    assert read_columns(client, bare, ["prev_logprobs"])["prev_logprobs"].tolist() == [[-1.0] * 3] * 2
    client.close()


def test_microbatch_orders_go_by_both_spellings() -> None:
    lengths = [46, 24, 55, 88, 11, 14, 73, 17]
    meta = KVBatchMeta("p", "train", [f"s{i}" for i in range(8)], sequence_lengths=lengths)
    args = {
        "algorithm": "modified_first_fit_decreasing",
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": 1,
        "max_tokens_per_microbatch": 100,
    }

    def plans(order: str) -> list[Any]:
        shards, _ = shard_meta_for_dp(
            meta, dp_world=2, sequence_packing_args={**args, "microbatch_order": order}
        )
        return [(s.sample_ids, s.extra_info["micro_batch_lengths"]) for s in shards]

    assert plans("largest_first") == plans("longest_first")
    assert plans("packer") == plans("planned")
    assert all(loads == sorted(loads, reverse=True) for _, (loads,) in plans("largest_first"))
    with pytest.raises(ValueError, match="microbatch_order"):
        plans("smallest_first")


# Workers.


class Worker(TQWorkerMixin):
    """A worker of a caller's own: it sums what it is given."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def train(
        self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None
    ) -> Any:
        self.said.append(("train", loss_fn, eval_mode, gbs, mbs))
        return {"loss": int(data["input_ids"].sum())}

    def get_logprobs(self, data: Any, micro_batch_size: Any = None) -> Any:
        return {"logprobs": -data["input_ids"].float()}

    def get_reference_policy_logprobs(self, data: Any, micro_batch_size: Any = None) -> Any:
        return {"reference_logprobs": -2 * data["input_ids"].float()}


class PiecewiseWorker(Worker):
    """A worker that trains in pieces by itself, as NeMo-RL's do."""

    def begin_train_step(self, loss_fn: Any, gbs: Any = None, mbs: Any = None) -> None:
        self.total = 0
        self.said.append(("begin", loss_fn, gbs, mbs))

    def train_microbatch(self, data: Any) -> int:
        self.total += int(data["input_ids"].sum())
        return self.total

    def finish_train_step(self) -> Any:
        return {"loss": self.total}

    def abort_train_step(self) -> None:
        self.said.append("abort")


@pytest.fixture
def stored() -> Any:
    """A config of a store, its client, and the meta of two rows in it."""
    config = fresh_store(LOCAL)
    client = build_data_plane_client(config)
    batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "input_lengths": torch.tensor([3, 3])}
    yield config, client, kv_first_write(batch, sample_ids=["a", "b"], dp_client=client, partition_id="p")
    client.close()


@calls(
    "data_plane.worker_mixin",
    "TQWorkerMixin",
    *(
        f"TQWorkerMixin.{name}"
        for name in (
            "setup_data_plane",
            "train_presharded",
            "get_logprobs_presharded",
            "get_reference_policy_logprobs_presharded",
        )
    ),
)
def test_a_worker_trains_and_scores_from_metadata(stored: Any) -> None:
    config, client, meta = stored
    worker = Worker()
    worker.setup_data_plane(config)
    assert worker.train_presharded(meta, "loss", eval_mode=True, gbs=2, mbs=1) == {"loss": 21}
    assert worker.said == [("train", "loss", True, 2, 1)]
    worker.get_logprobs_presharded(meta, micro_batch_size=1)
    worker.get_reference_policy_logprobs_presharded(meta, micro_batch_size=1)
    read = read_columns(client, meta, ["prev_logprobs", "reference_policy_logprobs"])
    assert read["prev_logprobs"].tolist() == [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]
    assert torch.equal(read["reference_policy_logprobs"], 2 * read["prev_logprobs"])


@calls(
    "data_plane.worker_mixin",
    "TQWorkerMixin.begin_train_step_presharded",
    "TQWorkerMixin.train_microbatch_presharded",
    "TQWorkerMixin.finish_train_step_presharded",
    "TQWorkerMixin.abort_train_step_presharded",
)
@pytest.mark.parametrize("kind", [Worker, PiecewiseWorker])
def test_a_step_in_pieces_gives_what_one_call_gives(stored: Any, kind: Any) -> None:
    config, _, meta = stored
    worker = kind()
    worker.setup_data_plane(config)
    worker.begin_train_step_presharded("loss", gbs=2, mbs=1)
    worker.train_microbatch_presharded(meta.slice(0, 1))
    worker.train_microbatch_presharded(meta.slice(1, 2))
    assert worker.finish_train_step_presharded() == {"loss": 21}
    first = ("begin", "loss", 2, 1) if kind is PiecewiseWorker else ("train", "loss", False, 2, 1)
    assert worker.said == [first]
    worker.begin_train_step_presharded("loss")
    with pytest.raises(DataPlaneError, match="open already"):
        worker.begin_train_step_presharded("loss")
    worker.abort_train_step_presharded()
    worker.abort_train_step_presharded()
    with pytest.raises(DataPlaneError, match="no train step is open"):
        worker.finish_train_step_presharded()
