"""A whole step in NeMo-RL's names, on the local store and on TransferQueue; and headrace's own policy in pieces."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import nemo_rl_step
import pytest
import torch
from nemo_rl.data_plane import KVBatchMeta, build_data_plane_client, kv_first_write
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.timer import Timer
from nemo_rl_names import calls

from headrace.errors import DataPlaneError
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from ray_session import SIMPLE, fresh_store
from reference_training import PolicyGradient
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

STORES: dict[str, dict[str, Any]] = {"local": {"impl": "local"}, "transfer_queue": SIMPLE}


@pytest.mark.parametrize("store", STORES)
def test_a_whole_step_in_nemo_rls_names_is_the_step_in_memory(
    store: str, request: pytest.FixtureRequest
) -> None:
    if store != "local":
        request.getfixturevalue("transfer_queue_engine")
    config = {
        **fresh_store(STORES[store]),
        "enabled": True,
        "observability": {"enabled": True, "callback": None},
    }
    outcome = nemo_rl_step.run_step(config)
    table, logs = replayed(seed=0)
    loss = in_memory_loss(table, logs)
    loss.backward()
    assert outcome["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    torch.testing.assert_close(outcome["gradient"], table.grad)
    assert [m["token_ids"].tolist() for log in outcome["seen"]["message_log"] for m in log] == [
        m["token_ids"].tolist() for log in logs for m in log
    ]
    assert outcome["snapshot"]["bytes_outstanding"] == 0
    assert outcome["snapshot"]["total_bytes"] > 0
    assert [result["microbatches"] for result in outcome["results"]] == [2, 2]


def replayed(seed: int) -> tuple[torch.Tensor, list[Any]]:
    generator = torch.Generator().manual_seed(seed)
    size = nemo_rl_step.VOCABULARY
    table = torch.randn(size, size, generator=generator).requires_grad_()
    return table, nemo_rl_step.roll_out(generator)[0]


def in_memory_loss(table: torch.Tensor, logs: list[Any]) -> torch.Tensor:
    """Return the loss of the rows one by one: on the first step the ratio is 1 and the KL 0."""
    rewards = torch.stack([(log[1]["token_ids"] % 2 == 0).float().mean() for log in logs])
    total = torch.zeros(())
    for row, log in enumerate(logs):
        ids = torch.cat([m["token_ids"] for m in log])
        logprobs = torch.log_softmax(table, -1)[ids[:-1], ids[1:]][len(log[0]["token_ids"]) - 1 :]
        group = rewards[row // 2 * 2 : row // 2 * 2 + 2]
        total = total - ((logprobs - logprobs.detach()).exp() * (rewards[row] - group.mean())).sum() / len(
            logs
        )
    return total


def test_the_script_runs_by_itself() -> None:
    script = Path(nemo_rl_step.__file__)
    assert len(script.read_text().splitlines()) <= 180
    done = subprocess.run([sys.executable, str(script), "local"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")


# headrace's own policy under NeMo-RL's names.

LENGTHS = [9, 5, 12, 7, 3, 10, 6, 8]
IDS = [f"p{i // 2}_g{i % 2}" for i in range(8)]


@pytest.fixture
def make_policy() -> Any:
    """Make a policy of one worker over a local store of its own."""
    made: list[TQPolicy] = []

    def make(callback: Any = None) -> TQPolicy:
        observability = {"enabled": callback is not None, "callback": callback}
        config = {**fresh_store(STORES["local"]), "enabled": True, "observability": observability}
        made.append(
            TQPolicy(
                tiny_policy_config("llama"),
                tiny_generation_config(),
                tokenizer=tiny_tokenizer(),
                seed=0,
                with_reference=True,
                dp_cfg=config,
                tq_partition_id="train",
            )
        )
        return made[-1]

    yield make
    for policy in made:
        policy.shutdown()


def ready(policy: TQPolicy) -> KVBatchMeta:
    policy.prepare_step(8, group_size=2)
    batch = tiny_batch(LENGTHS)
    return kv_first_write(batch, sample_ids=IDS, dp_client=policy.dp_client, partition_id="train")


@calls(
    "models.policy.tq_policy",
    "TQPolicy",
    *(
        f"TQPolicy.{name}"
        for name in (
            "prepare_step",
            "prepare_val_partition",
            "discard_samples",
            "finish_step",
            "read_from_dataplane",
            "write_to_dataplane",
            "get_logprobs_from_meta",
            "get_reference_policy_logprobs_from_meta",
            "shutdown",
        )
    ),
)
def test_a_policy_scores_and_clears_the_rows_of_a_meta(make_policy: Any) -> None:
    events: list[Any] = []
    policy = make_policy(events.append)
    meta = ready(policy)
    policy.get_logprobs_from_meta(meta, micro_batch_size=2, timer=Timer())
    policy.get_reference_policy_logprobs_from_meta(meta, micro_batch_size=2, timer=None)
    policy.write_to_dataplane(meta, {"advantages": torch.ones(8)})
    names = ["prev_logprobs", "reference_policy_logprobs", "advantages"]
    read = policy.read_from_dataplane(meta, select_fields=names, pad_value_dict={"prev_logprobs": 9.0})
    assert isinstance(read, BatchedDataDict)
    expected = policy.get_logprobs(tiny_batch(LENGTHS))["logprobs"]
    there = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    torch.testing.assert_close(read["prev_logprobs"][there], expected[there])
    assert bool((read["prev_logprobs"][~there] == 9.0).all())
    torch.testing.assert_close(read["reference_policy_logprobs"], expected)
    policy.prepare_val_partition(2, partition_id="val")
    policy.discard_samples(IDS[:2], "train")
    assert policy.dp_client.sample_ids("train") == IDS[2:]
    policy.finish_step(meta)
    assert policy.dp_client.sample_ids("train") == []
    assert {"register", "put", "get", "clear"} <= {event["op"] for event in events}
    assert policy.shutdown()


@calls(
    "models.policy.tq_policy",
    *(
        f"TQPolicy.{name}"
        for name in (
            "train_from_meta",
            "begin_train_step",
            "train_microbatches_from_meta",
            "finish_train_step",
            "abort_train_step",
        )
    ),
)
def test_a_step_in_pieces_is_the_whole_step_and_an_aborted_one_is_none(make_policy: Any) -> None:
    whole, split = make_policy(), make_policy()
    metas = [ready(policy) for policy in (whole, split)]
    one = whole.train_from_meta(
        metas[0], PolicyGradient(), eval_mode=False, gbs=8, mbs=4, timer=Timer(), train_fields=DP_TRAIN_FIELDS
    )
    before = {name: tensor.clone() for name, tensor in split.named_weights()}
    split.begin_train_step(PolicyGradient(), gbs=8, mbs=4)
    split.train_microbatches_from_meta(metas[1].slice(0, 4), timer=Timer())
    split.abort_train_step()
    split.abort_train_step()
    assert all(torch.equal(before[name], now) for name, now in split.named_weights())
    with pytest.raises(DataPlaneError, match="no train step is open"):
        split.train_microbatches_from_meta(metas[1])
    split.begin_train_step(PolicyGradient(), gbs=8, mbs=4)
    with pytest.raises(DataPlaneError, match="open already"):
        split.begin_train_step(PolicyGradient())
    split.train_microbatches_from_meta(metas[1].slice(0, 4))
    with pytest.raises(DataPlaneError, match="sample 'p1_g1' is in the open train step already"):
        split.train_microbatches_from_meta(metas[1].slice(3, 8))
    split.train_microbatches_from_meta(metas[1].slice(4, 8))
    parts = split.finish_train_step()
    torch.testing.assert_close(parts["loss"], one["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(parts["grad_norm"], one["grad_norm"], rtol=1e-5, atol=0)
    for (name, mine), (_, theirs) in zip(split.named_weights(), whole.named_weights()):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_a_step_that_has_not_the_rows_it_was_begun_for_is_refused_and_closed(make_policy: Any) -> None:
    policy = make_policy()
    meta = ready(policy)
    policy.begin_train_step(PolicyGradient(), gbs=8)
    policy.train_microbatches_from_meta(meta.slice(0, 4))
    with pytest.raises(DataPlaneError, match="the train step has 4 rows; expected 8"):
        policy.finish_train_step()
    policy.begin_train_step(PolicyGradient())
    policy.train_microbatches_from_meta(meta.slice(0, 4))
    assert policy.finish_train_step()["updates"] == 1


class Worker(TQWorkerMixin, AutomodelPolicyWorker):
    """headrace's own worker with NeMo-RL's step in pieces."""


def test_headraces_own_worker_takes_a_step_in_pieces() -> None:
    config = {**fresh_store(STORES["local"]), "enabled": True}
    client = build_data_plane_client(config)
    meta = kv_first_write(tiny_batch(LENGTHS), sample_ids=IDS, dp_client=client, partition_id="p")
    made = {"tokenizer": tiny_tokenizer(), "seed": 0}
    whole, split = (Worker(tiny_policy_config("llama"), tiny_generation_config(), **made) for _ in range(2))
    for worker in (whole, split):
        worker.setup_data_plane(config)
    one = whole.train_presharded(meta, PolicyGradient(), gbs=8, mbs=4)
    split.begin_train_step_presharded(PolicyGradient(), mbs=4)
    split.train_microbatch_presharded(meta.slice(0, 4))
    split.train_microbatch_presharded(meta.slice(4, 8))
    parts = split.finish_train_step_presharded()
    assert torch.equal(parts["loss"], one["loss"])
    for (name, mine), (_, theirs) in zip(split.named_weights(), whole.named_weights()):
        assert torch.equal(mine, theirs), name
    client.close()


@pytest.mark.parametrize("order", ["largest_first", "longest_first"])
def test_the_microbatch_order_of_a_policy_goes_by_both_spellings(order: str) -> None:
    section = tiny_policy_config("llama").model_dump(exclude_unset=True)
    section["sequence_packing"] = {"enabled": True, "microbatch_order": order}
    config = {**fresh_store(STORES["local"]), "enabled": True}
    policy = TQPolicy(section, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0, dp_cfg=config)
    assert policy.cfg.sequence_packing.microbatch_order == "longest_first"
    policy.shutdown()
