"""The policy worker: training, scoring, the reference, checkpoints and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from headrace.config import OptimizerConfig, SchedulerConfig
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.errors import ConfigError, HeadraceError
from headrace.models.automodel.attention import PACKED_ATTENTION
from headrace.models.automodel.experts import GROUPED_EXPERTS
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from reference_training import PolicyGradient, naive_logprobs, naive_loss
from tiny_models import (
    CONFIGS,
    tiny_batch,
    tiny_generation_config,
    tiny_model,
    tiny_policy_config,
    tiny_tokenizer,
)

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8, 10, 6, 2, 12, 9, 9, 4, 1]
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}
DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}
BATCHINGS: dict[str, dict[str, Any]] = {"fixed": {}, "packed": PACKED, "dynamic": DYNAMIC}


def _worker(name: str = "qwen3_moe", *, seed: int = 0, generation: Any = None, **changes: Any) -> Any:
    with_reference = changes.pop("with_reference", False)
    return AutomodelPolicyWorker(
        tiny_policy_config(name, **changes),
        tiny_generation_config(**(generation or {})),
        tokenizer=tiny_tokenizer(),
        seed=seed,
        with_reference=with_reference,
    )


def _shard(
    kind: str, *, batch_size: int | None = 8, seed: int = 0
) -> tuple[BatchedDataDict, list[int] | None]:
    data = tiny_batch(LENGTHS, seed=seed)
    columns = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": 32,
    }
    if kind == "packed":
        args: Any = {**columns, "algorithm": "first_fit_decreasing", "sequence_length_pad_multiple": 1}
        parts, inverse = data.shard_by_batch_size(1, batch_size=batch_size, sequence_packing_args=args)
        return parts[0], inverse
    if kind == "dynamic":
        args = {**columns, "sequence_length_round": 4}
        parts, inverse = data.shard_by_batch_size(1, batch_size=batch_size, dynamic_batching_args=args)
        return parts[0], inverse
    return data, None


def _weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.named_weights()}


# Training.


@pytest.mark.slow  # a C++ compiler at work
def test_compiled_layers_train_and_score_like_others() -> None:
    torch._dynamo.reset()
    both = [_worker("llama", with_reference=True, compile=on, **PACKED) for on in (False, True)]
    for seed in range(2):  # the second batch has other lengths of packed rows
        eager, compiled = (one.train(_shard("packed", seed=seed)[0], PolicyGradient()) for one in both)
        for name in ("loss", "grad_norm"):
            torch.testing.assert_close(compiled[name], eager[name], rtol=1e-3, atol=1e-5)
    for method in ("get_logprobs", "get_reference_policy_logprobs"):
        scores = [next(iter(getattr(one, method)(_shard("packed")[0]).values())) for one in both]
        torch.testing.assert_close(*scores, rtol=0, atol=1e-4)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow  # a C++ compiler at work
def test_models_of_many_sizes_run_compiled_in_one_process() -> None:
    """torch runs a piece of code uncompiled after eight versions of it; each size brings two."""
    torch._dynamo.reset()
    for size in range(5):
        config = {**CONFIGS["llama"], "num_hidden_layers": 1, "intermediate_size": 32 + 8 * size}
        worker = _worker("llama", compile=True, model={"config": config})
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            worker.get_logprobs(_shard("fixed")[0])
            worker.train(_shard("fixed")[0], PolicyGradient())


@pytest.mark.parametrize("kind", ["packed", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mistral_window"])
def test_packing_and_dynamic_batching_train_like_fixed_microbatches(name: str, kind: str) -> None:
    results = []
    for batching in ("fixed", kind):
        worker = _worker(name, **BATCHINGS[batching])
        results.append(worker.train(_shard(batching)[0], PolicyGradient()))
    fixed, other = results
    torch.testing.assert_close(other["loss"][0], fixed["loss"][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(other["grad_norm"][0], fixed["grad_norm"][0], rtol=1e-5, atol=0)
    # The second step starts from weights that AdamW has moved by the sign of tiny differences too.
    torch.testing.assert_close(other["loss"], fixed["loss"], rtol=1e-3, atol=1e-5)
    assert other["tokens"] == fixed["tokens"] == sum(LENGTHS)


def test_a_step_reports_the_loss_and_gradient_norm_of_the_naive_computation() -> None:
    worker, naive = _worker("llama"), _worker("llama").model
    data = tiny_batch(LENGTHS[:8])
    loss = naive_loss(naive, data)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in naive.parameters()]).norm()
    result = worker.train(data, PolicyGradient())
    assert float(result["loss"][0]) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float(result["grad_norm"][0]) == pytest.approx(float(norm), rel=1e-5)
    assert result["num_microbatches"] == 2
    assert result["metrics"][0]["lr"] == 1e-2
    assert result["outcomes"] == ["updated"]


def test_every_global_batch_is_one_update() -> None:
    worker = _worker()
    result = worker.train(tiny_batch(LENGTHS), PolicyGradient(), gbs=4, mbs=2)
    assert len(result["loss"]) == len(result["grad_norm"]) == len(result["metrics"]) == 4
    assert worker.weight_version == worker.get_weight_version() == 4


def test_training_raises_the_likelihood_of_rewarded_tokens() -> None:
    worker, data = _worker("llama"), tiny_batch(LENGTHS[:8])
    data["advantages"] = torch.ones_like(data["advantages"])
    losses = [float(worker.train(data, PolicyGradient())["loss"][0]) for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]


def test_two_workers_of_one_seed_train_bit_for_bit_alike() -> None:
    a, b = _worker(), _worker()
    results = [w.train(tiny_batch(LENGTHS), PolicyGradient()) for w in (a, b)]
    assert torch.equal(results[0]["loss"], results[1]["loss"])
    assert torch.equal(results[0]["grad_norm"], results[1]["grad_norm"])
    ours, theirs = _weights(a), _weights(b)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_evaluation_changes_nothing() -> None:
    worker = _worker()
    before = _weights(worker)
    result = worker.train(tiny_batch(LENGTHS), PolicyGradient(), eval_mode=True)
    assert len(result["loss"]) == 2
    assert not result["grad_norm"].any()
    assert worker.weight_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.named_weights())


def test_the_split_step_is_the_whole_step_in_parts() -> None:
    whole, split = _worker(), _worker()
    data, loss = tiny_batch(LENGTHS[:8]), PolicyGradient()
    result = whole.train(data, loss)
    weight = data["token_mask"][:, 1:].sum()
    split.begin_train_step(torch.tensor(8.0), weight.float())
    split.train_microbatches(data.slice(0, 4), loss)
    split.train_microbatches(data.slice(4, 8), loss)
    parts = split.finish_train_step()
    assert parts.loss == float(result["loss"][0])
    assert parts.grad_norm == float(result["grad_norm"][0])
    ours, theirs = _weights(whole), _weights(split)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_an_aborted_step_leaves_no_trace() -> None:
    worker, other = _worker(), _worker()
    data, loss = tiny_batch(LENGTHS[:8]), PolicyGradient()
    worker.begin_train_step(torch.tensor(8.0), torch.tensor(40.0))
    worker.train_microbatches(data, loss)
    worker.abort_train_step()
    assert torch.equal(worker.train(data, loss)["grad_norm"], other.train(data, loss)["grad_norm"])


def test_a_step_must_be_open_and_only_one() -> None:
    worker = _worker()
    with pytest.raises(HeadraceError, match="no train step is open"):
        worker.finish_train_step()
    worker.begin_train_step(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(HeadraceError, match="open already"):
        worker.begin_train_step(torch.tensor(1.0), torch.tensor(1.0))


class _Failing(PolicyGradient):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = super().__call__(*args, **kwargs)
        if self.calls:
            raise HeadraceError("reward model is gone")
        self.calls += 1
        return loss, metrics

    calls = 0


def test_a_loss_that_fails_in_mid_step_leaves_the_worker_usable() -> None:
    worker, other, data = _worker(), _worker(), tiny_batch(LENGTHS[:8])
    with pytest.raises(HeadraceError, match="reward model"):
        worker.train(data, _Failing())
    after, fresh = worker.train(data, PolicyGradient()), other.train(data, PolicyGradient())
    assert torch.equal(after["loss"], fresh["loss"])
    assert torch.equal(after["grad_norm"], fresh["grad_norm"])


def _named(data: BatchedDataDict) -> BatchedDataDict:
    data["sample_id"] = object_array([f"s{row}" for row in range(data.size)])
    return data


class _InfiniteLoss(PolicyGradient):
    """Adds a constant that overflows, so that the gradient alone is finite."""

    def __call__(self, logprobs: torch.Tensor, data: Any, **counts: torch.Tensor) -> Any:
        loss, metrics = super().__call__(logprobs, data, **counts)
        return loss + (float("inf") if "s2" in data["sample_id"] else 0.0), metrics


@pytest.mark.parametrize("kind", BATCHINGS)
def test_an_update_with_a_loss_or_gradient_that_is_not_finite_is_left_out_and_its_sample_named(
    kind: str,
) -> None:
    worker = _worker(**BATCHINGS[kind])
    before = _weights(worker)
    data = _named(tiny_batch(LENGTHS[:8]))
    data["advantages"][2, 8] = float("nan")
    args: Any = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": 32,
    }
    if kind == "packed":
        args |= {"algorithm": "first_fit_decreasing", "sequence_length_pad_multiple": 1}
        data = data.shard_by_batch_size(1, batch_size=8, sequence_packing_args=args)[0][0]
    if kind == "dynamic":
        args |= {"sequence_length_round": 4}
        data = data.shard_by_batch_size(1, batch_size=8, dynamic_batching_args=args)[0][0]
    result = worker.train(data, PolicyGradient())
    assert result["outcomes"] == ["not_finite"]
    assert result["suspects"] == [["s2"]]
    assert sorted(result["sample_ids"][0]) == [f"s{row}" for row in range(8)]
    assert worker.weight_version == worker.scheduler.last_epoch == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.named_weights())


def test_a_loss_that_overflows_over_a_finite_gradient_is_left_out_and_its_microbatch_named() -> None:
    worker = _worker()
    before = _weights(worker)
    result = worker.train(_named(tiny_batch(LENGTHS[:8])), _InfiniteLoss(), mbs=2)
    assert result["outcomes"] == ["not_finite"]
    assert result["suspects"] == [["s2", "s3"]]
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.named_weights())


@pytest.mark.parametrize(
    ("column", "outcome"),
    [("sample_mask", "no_tokens"), ("token_mask", "no_tokens"), ("advantages", "no_gradient")],
)
def test_a_global_batch_from_which_nothing_is_learned_moves_no_weight(column: str, outcome: str) -> None:
    whole, first = _worker(), _worker()
    data = tiny_batch(LENGTHS)
    data[column][8:] = 0
    result = whole.train(data, PolicyGradient())
    first.train(data.slice(0, 8), PolicyGradient())
    assert result["outcomes"] == ["updated", outcome]
    assert whole.weight_version == whole.scheduler.last_epoch == 1
    ours, theirs = _weights(whole), _weights(first)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize(("rows", "gbs", "mbs"), [(7, 8, 4), (12, 8, 4), (16, 8, 3)])
def test_rows_that_do_not_divide_are_refused_with_the_knob(rows: int, gbs: int, mbs: int) -> None:
    with pytest.raises(ConfigError, match=r"(train_global_batch_size|train_micro_batch_size)"):
        _worker().train(tiny_batch(LENGTHS[:rows]), PolicyGradient(), gbs=gbs, mbs=mbs)


def test_activation_checkpointing_changes_no_number() -> None:
    results = []
    for enabled in (False, True):
        worker = _worker(activation_checkpointing=enabled, **PACKED)
        results.append(worker.train(_shard("packed")[0], PolicyGradient()))
    assert torch.equal(results[0]["loss"], results[1]["loss"])
    assert torch.equal(results[0]["grad_norm"], results[1]["grad_norm"])


def test_bfloat16_keeps_weights_and_optimizer_state_in_float32() -> None:
    worker = _worker(precision="bfloat16", **PACKED)
    result = worker.train(_shard("packed")[0], PolicyGradient())
    exact = _worker(**PACKED).train(_shard("packed")[0], PolicyGradient())
    assert torch.allclose(result["loss"][0], exact["loss"][0], rtol=0.1)
    assert {t.dtype for t in _weights(worker).values()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in worker.optimizer.state.values()} == {torch.float32}


def test_packed_rows_and_grouped_experts_use_headraces_own_functions() -> None:
    worker = _worker(**PACKED)
    assert worker.model.config._attn_implementation == PACKED_ATTENTION
    assert worker.model.config._experts_implementation == GROUPED_EXPERTS
    eager = _worker(model={"experts_implementation": "eager", "attn_implementation": "eager"}, **PACKED)
    assert eager.model.config._attn_implementation == "eager"
    assert eager.model.config._experts_implementation == "eager"


# Scoring.


@pytest.mark.parametrize("kind", ["fixed", "packed", "dynamic"])
def test_logprobs_come_back_in_the_rows_order_however_the_rows_are_cut(kind: str) -> None:
    worker = _worker("llama", generation={"temperature": 0.8}, **BATCHINGS[kind])
    data, _ = _shard(kind, batch_size=None)
    result = worker.get_logprobs(data)["logprobs"]
    with torch.no_grad():
        truth = naive_logprobs(
            tiny_plain_copy(worker), data["input_ids"], data["input_lengths"], temperature=0.8
        )
    assert result.shape == data["input_ids"].shape
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, truth, rtol=0, atol=1e-5)


def tiny_plain_copy(worker: Any) -> Any:
    """A stock model with the worker's weights."""
    model = tiny_model("llama")
    model.load_state_dict(worker.model.state_dict())
    return model


@pytest.mark.parametrize("kind", ["packed", "dynamic"])
def test_logprobs_follow_a_plan_of_several_global_batches(kind: str) -> None:
    planned, _ = _shard(kind, batch_size=8)
    one = _worker(**BATCHINGS[kind]).get_logprobs(planned)["logprobs"]
    data = BatchedDataDict(dict(planned.items()))
    fixed = _worker().get_logprobs(data, micro_batch_size=5)["logprobs"]
    torch.testing.assert_close(one, fixed, rtol=0, atol=1e-5)


def test_longest_first_plans_put_every_score_in_its_row() -> None:
    data = tiny_batch(LENGTHS)
    args: Any = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": 32,
        "algorithm": "concatenative",
        "sequence_length_pad_multiple": 1,
        "microbatch_order": "longest_first",
    }
    parts, inverse = data.shard_by_batch_size(1, sequence_packing_args=args)
    scores = _worker(**PACKED).get_logprobs(parts[0])
    scores.reorder_data(inverse)
    expected = _worker().get_logprobs(data)["logprobs"]
    torch.testing.assert_close(scores["logprobs"], expected, rtol=0, atol=1e-5)


def test_a_remainder_of_rows_is_scored_too() -> None:
    worker = _worker()
    some = worker.get_logprobs(tiny_batch(LENGTHS[:7], width=12), micro_batch_size=3)["logprobs"]
    every = worker.get_logprobs(tiny_batch(LENGTHS[:7], width=12), micro_batch_size=7)["logprobs"]
    torch.testing.assert_close(some, every, rtol=0, atol=1e-6)


def test_scoring_leaves_no_gradients_and_no_change() -> None:
    worker = _worker()
    before = _weights(worker)
    worker.get_logprobs(tiny_batch(LENGTHS))
    assert all(p.grad is None for p in worker.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.named_weights())


def test_the_reference_stays_while_the_policy_learns_until_it_is_taken_anew() -> None:
    worker, data = _worker(with_reference=True), tiny_batch(LENGTHS)
    first = worker.get_logprobs(data)["logprobs"]
    assert torch.equal(worker.get_reference_policy_logprobs(data)["reference_logprobs"], first)
    worker.train(data, PolicyGradient())
    assert torch.equal(worker.get_reference_policy_logprobs(data)["reference_logprobs"], first)
    trained = worker.get_logprobs(data)["logprobs"]
    assert not torch.equal(trained, first)
    worker.snapshot_reference()
    assert torch.equal(worker.get_reference_policy_logprobs(data)["reference_logprobs"], trained)


def test_a_saved_reference_loads_into_a_fresh_worker(tmp_path: Path) -> None:
    worker, data = _worker(with_reference=True), tiny_batch(LENGTHS)
    worker.train(data, PolicyGradient())
    worker.snapshot_reference()
    worker.save_reference(tmp_path)
    other = _worker(with_reference=True, seed=3)
    other.load_reference(tmp_path)
    ours, theirs = (w.get_reference_policy_logprobs(data)["reference_logprobs"] for w in (worker, other))
    assert torch.equal(ours, theirs)


def test_without_a_reference_its_logprobs_are_refused_and_a_snapshot_is_nothing() -> None:
    worker = _worker()
    worker.snapshot_reference()
    with pytest.raises(ConfigError, match="has no reference"):
        worker.get_reference_policy_logprobs(tiny_batch(LENGTHS))


# Checkpoints and weights.


@pytest.mark.parametrize("kind", ["fixed", "packed"])
def test_resuming_is_bit_for_bit_what_going_on_would_have_been(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        **BATCHINGS[kind],
        "scheduler": {"kind": "cosine", "warmup_steps": 2, "decay_steps": 6},
    }
    going, stopped = _worker(**changes), _worker(**changes)
    steps = [_shard(kind, seed=seed)[0] for seed in range(3)]
    losses = [going.train(data, PolicyGradient()) for data in steps]
    for data in steps[:2]:
        stopped.train(data, PolicyGradient())
    stopped.save_checkpoint(tmp_path / "c")
    resumed = _worker(seed=11, **changes)
    resumed.load_checkpoint(tmp_path / "c")
    last = resumed.train(steps[2], PolicyGradient())
    for key in ("loss", "grad_norm"):
        assert torch.equal(last[key], losses[2][key])
    assert last["metrics"] == losses[2]["metrics"]
    assert resumed.weight_version == going.weight_version == 6
    ours, theirs = _weights(going), _weights(resumed)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_a_reset_optimizer_starts_from_zero_with_new_settings() -> None:
    worker, data = _worker(), tiny_batch(LENGTHS[:8])
    worker.train(data, PolicyGradient())
    worker.reset_optimizer(OptimizerConfig(lr=0.5), SchedulerConfig(warmup_steps=5))
    assert not worker.optimizer.state
    assert worker.train(data, PolicyGradient())["metrics"][0]["lr"] == pytest.approx(0.1)
    assert worker.weight_version == 2


def test_named_weights_fill_a_model_of_the_same_config() -> None:
    worker = _worker(seed=7)
    worker.train(tiny_batch(LENGTHS), PolicyGradient())
    names = [name for name, _ in worker.named_weights()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names
    model = tiny_model("qwen3_moe")
    result = model.load_state_dict(dict(worker.named_weights()), strict=False)
    assert result.missing_keys == ["lm_head.weight"]
    assert not result.unexpected_keys
    ids = torch.arange(5, 25).view(2, 10)
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, use_cache=False).logits for m in (worker.model, model))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


# Size and speed.


def test_flops_count_active_weights_and_causal_attention() -> None:
    worker = _worker("qwen3_moe")
    names = dict(worker.model.named_parameters())
    experts = sum(p.numel() for n, p in names.items() if ".experts." in n)
    active = worker.num_parameters() - experts + experts * 3 // 8
    attention = 6 * 2 * 4 * 8 * (10**2 + 20**2)
    assert worker.training_flops([10, 20]) == pytest.approx(6 * active * 30 + attention)
    assert worker.attention_ratio() == pytest.approx(2 * 4 * 8 / active)


def test_an_untied_embedding_table_does_no_work() -> None:
    worker = _worker("llama")
    table = worker.model.get_input_embeddings().weight.numel()
    assert worker.training_flops([1]) == pytest.approx(6 * (worker.num_parameters() - table) + 6 * 2 * 4 * 8)


def test_the_peak_of_a_cpu_is_not_known() -> None:
    assert _worker().peak_tflops() == 0.0
