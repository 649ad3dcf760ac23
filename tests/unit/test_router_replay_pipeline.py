"""Faults between rollout and router, injected one by one: each is refused or reported by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.algorithms.loss import NLLLoss
from headrace.algorithms.replay_checks import ReplayWatch
from headrace.config import RouterReplayConfig
from headrace.data_plane.route_binding import bound_digests, sample_salts
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ConfigError, ReplayError, SchemaError
from headrace.models.automodel.data import Packing, forward_kwargs
from headrace.models.automodel.replay import PREV_LOGPROBS, RouteReplayer, align_microbatch
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from headrace.models.router_replay import install
from headrace.models.router_replay.stats import ReplayStats, TracedRows
from headrace.models.router_replay.trace import (
    RouteTrace,
    check_run,
    check_trace,
    read_trace,
    trace_of,
    write_trace,
)
from headrace.utils.run_directory import RunDirectory
from tiny_models import tiny_batch, tiny_generation_config, tiny_model, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 7, 12]
NAMES = [f"s{i}" for i in range(len(LENGTHS))]
LAYERS, TOP_K, EXPERTS = 2, 3, 8
FIXED: dict[str, Any] = {}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}


def batch(seed: int = 0) -> BatchedDataDict:
    """Rows with recorded routes: random experts, so that no router would choose them by itself."""
    data = tiny_batch(LENGTHS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    width = data["input_ids"].shape[1]
    drawn = torch.rand(len(LENGTHS), width, LAYERS, EXPERTS, generator=generator)
    routes = drawn.topk(TOP_K).indices.to(torch.uint8)
    for row, length in enumerate(LENGTHS):
        routes[row, length - 1] = 255
        routes[row, length:] = 0
    data["routed_experts"] = routes
    data["route_salts"] = sample_salts(NAMES)
    return data


def rows_of_equal_length() -> BatchedDataDict:
    """Four rows of eight tokens, random routes."""
    data = tiny_batch([8] * 4)
    drawn = torch.rand(4, 8, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(1))
    data["routed_experts"] = drawn.topk(TOP_K).indices.to(torch.uint8)
    data["route_salts"] = sample_salts(NAMES)
    return data


def digests_of(data: BatchedDataDict) -> torch.Tensor:
    """One digest per row, as the rollout computes them; by a loop over rows."""
    sums, salts = [], data["route_salts"]
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids, tokens = data["routed_experts"][row, : length - 1], data["input_ids"][row, : length - 1]
        sums.append(bound_digests(ids, tokens, torch.arange(length - 1), salts[row]).sum())
    return torch.stack(sums)


def worker(**changes: Any) -> AutomodelPolicyWorker:
    settings = {"router_replay": {"enabled": True, "trace": True, "min_exact_fraction": 0}, **changes}
    cfg = tiny_policy_config(
        "qwen3_moe", train_global_batch_size=4, train_micro_batch_size=2, logprob_batch_size=2, **settings
    )
    return AutomodelPolicyWorker(cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0)


def prev_stats(data: BatchedDataDict, made: AutomodelPolicyWorker | None = None) -> ReplayStats:
    made = made or worker()
    made.get_logprobs(data)
    return made.take_replay_stats()["prev_logprobs"]


def check(stats: ReplayStats, recorded: BatchedDataDict) -> None:
    stats.check("prev_logprobs", digests=digests_of(recorded), total_tokens=recorded["input_lengths"])


def planned(data: BatchedDataDict, changes: dict[str, Any]) -> BatchedDataDict:
    """The batch as one rank gets it, with a plan where the worker packs."""
    if not changes:
        return data
    shards = data.shard_by_batch_size(
        1,
        batch_size=4,
        sequence_packing_args={
            "algorithm": "first_fit_decreasing",
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_pad_multiple": 1,
            "max_tokens_per_microbatch": 32,
        },
    )
    return shards[0][0] if isinstance(shards, tuple) else shards[0]


# What goes right.


@pytest.mark.parametrize("changes", [FIXED, PACKED], ids=["fixed", "packed"])
def test_every_row_is_used_once_and_with_its_token(changes: dict[str, Any]) -> None:
    data, made = batch(), worker(**changes)
    stats = prev_stats(planned(data, changes), made)
    check(stats, data)
    assert stats.totals()["replayed"] == LAYERS * sum(n - 1 for n in LENGTHS)
    assert stats.totals()["native"] == 0
    made.train(planned(batch(), changes), NLLLoss())
    trained = made.take_replay_stats()["train"]
    trained.check("train", digests=digests_of(data), total_tokens=data["input_lengths"])


def test_replay_changes_the_logprobs_of_rows_whose_routes_differ() -> None:
    with_routes = worker().get_logprobs(batch())["logprobs"]
    native = worker(router_replay={"enabled": False}).get_logprobs(batch())["logprobs"]
    assert (with_routes - native).abs().max() > 1e-3


def test_the_reference_scores_with_routes_of_its_own() -> None:
    cfg = worker().cfg
    made = AutomodelPolicyWorker(
        cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0, with_reference=True
    )
    reference = made.get_reference_policy_logprobs(batch())["reference_logprobs"]
    assert made.take_replay_stats() == {}
    native = worker(router_replay={"enabled": False}).get_logprobs(batch())["logprobs"]
    assert torch.equal(reference, native)
    replayed = made.get_logprobs(batch())["logprobs"]
    assert torch.equal(made.get_reference_policy_logprobs(batch())["reference_logprobs"], native)
    assert not torch.equal(replayed, native)


@pytest.mark.parametrize("packed", [False, True])
def test_routes_are_cut_with_the_same_indices_as_their_tokens(packed: bool) -> None:
    data = batch()
    tokens = forward_kwargs(data, Packing(16) if packed else None)["input_ids"].flatten()
    aligned = align_microbatch(data, tokens, packed=packed, num_experts=EXPERTS)
    assert aligned.ids.shape[0] == len(tokens)
    assert torch.equal(aligned.tokens, tokens)
    place = 0
    for row, length in enumerate(LENGTHS):
        start = place if packed else row * data["input_ids"].shape[1]
        there = slice(start, start + length - 1)
        assert torch.equal(aligned.ids[there], data["routed_experts"][row, : length - 1])
        assert torch.equal(aligned.tokens[there], data["input_ids"][row, : length - 1])
        assert aligned.counted[start : start + length].tolist() == [True] * (length - 1) + [False]
        place += length
    # The rest is spread over all experts.
    rest = aligned.ids[~aligned.counted].flatten().to(torch.int64)
    counts = torch.bincount(rest, minlength=EXPERTS)
    assert counts.min() > 0
    assert (counts.max() - counts.min()) <= 0.5 * counts.float().mean() + 2


def test_a_row_that_is_missing_is_routed_natively_and_counted() -> None:
    data = batch()
    data["routed_experts"][0, 2, 1] = 255
    stats = prev_stats(data)
    check(stats, data)
    assert stats.totals()["native"] == 1


# Faults in the rows that a worker gets.


def shift_by_one_token(data: BatchedDataDict) -> None:
    routes = data["routed_experts"]
    for row, length in enumerate(LENGTHS):
        routes[row, : length - 1] = routes[row, : length - 1].roll(1, dims=0)


def rows_of_another_step(data: BatchedDataDict) -> None:
    data["routed_experts"] = batch(seed=1)["routed_experts"]


def another_samples_rows(data: BatchedDataDict) -> None:
    data["routed_experts"][2, :3] = data["routed_experts"][1, :3].clone()


def layers_the_other_way(data: BatchedDataDict) -> None:
    data["routed_experts"] = data["routed_experts"].flip(2)


def renamed_experts(data: BatchedDataDict) -> None:
    routes = data["routed_experts"]
    data["routed_experts"] = torch.where(routes == 255, routes, (routes + 3) % EXPERTS)


@pytest.mark.parametrize(
    "fault",
    [shift_by_one_token, rows_of_another_step, another_samples_rows, layers_the_other_way, renamed_experts],
)
def test_valid_rows_that_are_not_those_of_the_rollout_are_refused(fault: Any) -> None:
    recorded, data = batch(), batch()
    fault(data)
    with pytest.raises(ReplayError, match=r"fetched.*not what the rollout recorded"):
        check(prev_stats(data), recorded)


def test_a_shift_over_equal_tokens_is_refused() -> None:
    recorded, data = batch(), batch()
    for rows in (recorded, data):
        rows["input_ids"].fill_(7)
    check(prev_stats(data), recorded)
    shift_by_one_token(data)
    with pytest.raises(ReplayError, match=r"\(fetched\).*not what the rollout recorded"):
        check(prev_stats(data), recorded)


def test_rows_of_two_samples_with_the_same_tokens_cannot_be_exchanged() -> None:
    recorded, data = rows_of_equal_length(), rows_of_equal_length()
    for rows in (recorded, data):
        rows["input_ids"].fill_(7)
    check(prev_stats(data), recorded)
    data["routed_experts"] = data["routed_experts"].flip(0)
    with pytest.raises(ReplayError, match=r"\(fetched\).*not what the rollout recorded"):
        check(prev_stats(data), recorded)


# Faults behind the fetch: what a worker got is what the rollout recorded.


@pytest.mark.parametrize("place", ["fetched", "sliced", "used"])
def test_a_digest_that_differs_in_one_place_is_named(place: str) -> None:
    stats = prev_stats(batch())
    check(stats, batch())
    with pytest.raises(ReplayError, match=rf"digest is [0-9a-f]{{16}} \({place}\)"):
        check(replace(stats, **{place: getattr(stats, place) ^ 1}), batch())


def shift_the_tokens_by_one(data: BatchedDataDict) -> None:
    data["input_ids"] = data["input_ids"].roll(1, dims=1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fault", [shift_by_one_token, shift_the_tokens_by_one])
def test_a_microbatch_whose_routes_and_tokens_are_one_apart_is_refused_as_badly_cut(
    fault: Any, packed: bool
) -> None:
    def stats_of(data: BatchedDataDict) -> ReplayStats:
        model = tiny_model("qwen3_moe")
        replayer = RouteReplayer(install(model))
        replayer.begin(PREV_LOGPROBS, batch())
        ids = forward_kwargs(data, Packing() if packed else None)["input_ids"]
        routes = replayer.routes(data, ids.flatten(), packed=packed)
        with torch.no_grad():
            model(input_ids=ids, routes=routes)
        return replayer.take()[PREV_LOGPROBS]

    check(stats_of(batch()), batch())
    shifted = batch()
    fault(shifted)
    with pytest.raises(ReplayError, match=r"\(sliced\).*not those that were fetched"):
        check(stats_of(shifted), batch())


def test_a_plan_that_takes_a_row_twice_and_leaves_one_out_is_refused_though_tokens_add_up() -> None:
    data, made = planned(rows_of_equal_length(), PACKED), worker(**PACKED)
    data.micro_batch_indices, data.micro_batch_lengths = [[[0, 2], [2, 4]]], [[16, 16]]
    check(prev_stats(data, made), rows_of_equal_length())
    data.micro_batch_indices = [[[0, 2], [1, 3]]]
    with pytest.raises(ReplayError, match=r"\(sliced\).*rows taken twice"):
        check(prev_stats(data, made), rows_of_equal_length())


def give_a_layer_other_rows(made: AutomodelPolicyWorker, layer: int) -> None:
    """Make the router of one layer use experts that the call did not give it."""

    def change(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs["routes"] = tuple(rows._replace(given=rows.given.roll(1, dims=0)) for rows in kwargs["routes"])
        return args, kwargs

    made.model.model.layers[layer].register_forward_pre_hook(change, with_kwargs=True)


@pytest.mark.parametrize("stage", ["prev_logprobs", "train"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_router_that_uses_other_experts_than_it_was_given_is_refused(layer: int, stage: str) -> None:
    data, made = batch(), worker()
    give_a_layer_other_rows(made, layer)
    made.get_logprobs(data)
    made.train(batch(), NLLLoss(), eval_mode=True)
    stats = made.take_replay_stats()[stage]
    with pytest.raises(ReplayError, match=rf"'{stage}'.*\(used\).*did not use the rows"):
        stats.check(stage, digests=digests_of(data), total_tokens=data["input_lengths"])


def give_a_recomputation_other_rows(made: AutomodelPolicyWorker) -> None:
    """Make the first router use experts of other tokens while a backward pass runs its layer again."""

    def change(router: Any, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            router._replay_rows = router._replay_rows._replace(
                given=router._replay_rows.given.roll(1, dims=0)
            )

    made.model.model.layers[0].mlp.gate.register_forward_pre_hook(change)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda made: give_a_layer_other_rows(made, 1), r"'train'.*\(used\).*did not use the rows"),
        (
            give_a_recomputation_other_rows,
            r"'train': recomputation.*other experts than the forward.*\(model\.layers\.0\.mlp\.gate\)",
        ),
    ],
    ids=["forward", "recomputation"],
)
def test_gradients_of_routers_that_disobey_never_reach_the_weights(fault: Any, message: str) -> None:
    made = worker(activation_checkpointing=True)
    before = {name: weight.clone() for name, weight in made.named_weights()}
    fault(made)
    with pytest.raises(ReplayError, match=message):
        made.train(batch(), NLLLoss())
    assert all(torch.equal(weight, before[name]) for name, weight in made.named_weights())
    assert made.take_replay_stats() == {}


def test_a_recomputation_that_obeys_is_counted_row_by_row() -> None:
    made, data = worker(activation_checkpointing=True), batch()
    made.train(batch(), NLLLoss())
    stats = made.take_replay_stats()["train"]
    rows = int((data["input_lengths"] - 1).sum())
    assert (stats.recomputed, stats.recompute_differs) == ((rows,) * LAYERS, (0,) * LAYERS)
    plain = worker()
    plain.train(batch(), NLLLoss())
    assert plain.take_replay_stats()["train"].recomputed == (0,) * LAYERS


@pytest.mark.parametrize(
    ("value", "message"),
    [(0, "twice"), (9, "outside 0..7")],
)
def test_zero_rows_and_unknown_experts_are_refused_at_the_forward(value: int, message: str) -> None:
    data = batch()
    data["routed_experts"][1, :3] = value
    with pytest.raises(ReplayError, match=message):
        worker().get_logprobs(data)


def test_an_id_that_needs_more_than_a_byte_is_refused() -> None:
    data = batch()
    data["routed_experts"] = data["routed_experts"].to(torch.int16)
    data["routed_experts"][data["routed_experts"] == 255] = -1
    data["routed_experts"][0, 0, 0, 0] = 300
    with pytest.raises(ReplayError, match=r"token 0, layer 0.*300.*outside"):
        worker().get_logprobs(data)


def test_routes_over_all_layers_of_a_model_with_a_dense_one_are_refused() -> None:
    data = batch()
    data["routed_experts"] = torch.cat([data["routed_experts"], data["routed_experts"][:, :, :1]], dim=2)
    with pytest.raises(ReplayError, match=r"LayerMap\.select"):
        worker().get_logprobs(data)


def test_an_absent_column_stops_the_stage() -> None:
    data = batch()
    del data["routed_experts"]
    made = worker()
    with pytest.raises(ReplayError, match=r"'prev_logprobs'.*no column 'routed_experts'"):
        made.get_logprobs(data)
    with pytest.raises(ReplayError, match=r"'train'.*no column 'routed_experts'"):
        made.train(data, NLLLoss())


def test_supervised_rows_need_no_routes() -> None:
    data = batch()
    for name in ("routed_experts", "generation_logprobs"):
        del data[name]
    made = worker()
    made.train(data, NLLLoss())
    assert made.take_replay_stats() == {}


def test_rows_that_are_scored_twice_or_not_at_all_are_refused() -> None:
    data = batch()
    twice = worker()
    twice.get_logprobs(batch())
    twice.get_logprobs(batch())
    with pytest.raises(ReplayError, match="consumed twice"):
        check(twice.take_replay_stats()["prev_logprobs"], data)
    with pytest.raises(ReplayError, match="never reached"):
        check(prev_stats(batch().slice(0, 2)), data)


def test_a_replay_of_nothing_is_refused() -> None:
    data = batch()
    data["routed_experts"].fill_(255)
    with pytest.raises(ReplayError, match="no effect"):
        check(prev_stats(data), data)


def test_a_dense_model_is_refused_before_any_step() -> None:
    cfg = tiny_policy_config("llama", router_replay={"enabled": True})
    with pytest.raises(ConfigError, match=r"policy\.router_replay\.enabled=true"):
        AutomodelPolicyWorker(cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0)


def test_two_workers_of_one_process_have_their_own_routers() -> None:
    first, second = worker(), worker()
    check(prev_stats(batch(), first), batch())
    assert second.take_replay_stats() == {}
    check(prev_stats(batch(seed=1), second), batch(seed=1))


def test_a_step_that_is_aborted_leaves_no_stats_behind() -> None:
    made = worker()

    class Fails(NLLLoss):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise SchemaError("broken")

    with pytest.raises(SchemaError):
        made.train(batch(), Fails())
    assert made.take_replay_stats() == {}


# What a step checks.


def watch(cfg: RouterReplayConfig, missing: torch.Tensor) -> ReplayWatch:
    data = batch()
    return ReplayWatch(
        cfg,
        step=1,
        sample_ids=NAMES,
        total_tokens=data["input_lengths"],
        missing=missing,
        digests=digests_of(data),
        read=lambda names: {n: data[n] for n in names},
    )


def test_samples_over_the_budget_are_refused_by_name_or_masked() -> None:
    missing = torch.tensor([0.0, 0.3, 0.05, 0.5])
    cfg = RouterReplayConfig(enabled=True, max_missing_fraction=0.1)
    with pytest.raises(ReplayError, match=r"2 of 4 samples.*'s3' 50.0%, 's1' 30.0%"):
        watch(cfg, missing).budget()
    masking = watch(cfg.model_copy(update={"on_excess": "mask"}), missing)
    assert masking.budget().tolist() == [1.0, 0.0, 1.0, 0.0]
    assert masking.metrics["router_replay/masked_samples"] == 2
    assert watch(RouterReplayConfig(), missing).budget().tolist() == [1.0] * 4


def test_a_stage_without_stats_is_refused() -> None:
    with pytest.raises(ReplayError, match="'train' ran without router replay"):
        watch(RouterReplayConfig(enabled=True), torch.zeros(4)).check({}, "train")


# The trace.


def trace(change: Any = None, *, stored: Any = None) -> RouteTrace:
    """A trace of a step whose worker got rows that `change` has altered, and whose store `stored` has altered."""
    recorded, fetched = batch(), batch()
    digests = digests_of(recorded)
    for alter, data in ((stored, recorded), (stored, fetched), (change, fetched)):
        if alter is not None:
            alter(data)
    return trace_of(3, NAMES, digests, recorded, {"prev_logprobs": not_compared(prev_stats(fetched))})


def not_compared(stats: ReplayStats) -> list[TracedRows]:
    """The rows of a stage as one that compares nothing leaves them; the routes here are random."""
    return [replace(rows, native=None) for rows in stats.rows]


def test_a_sound_trace_passes_and_survives_the_file(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "router_trace", trace())
    assert sorted(load_file(path)) == [
        "prev_logprobs.given",
        "prev_logprobs.lengths",
        "prev_logprobs.tokens",
        "prev_logprobs.used",
        "rollout.digests",
        "rollout.lengths",
        "rollout.routes",
        "rollout.tokens",
    ]
    assert check_trace(read_trace(path)) == "step 3: 4 samples as recorded; used as given: prev_logprobs 4"
    assert check_run(tmp_path) == [check_trace(read_trace(path))]


def test_a_dummy_microbatch_leaves_no_sample_in_the_trace() -> None:
    data, made = planned(batch(), PACKED), worker(**PACKED)
    plan, lengths = data.micro_batch_indices, data.micro_batch_lengths
    assert plan is not None
    assert lengths is not None
    plan[0].append([4, 4])
    lengths[0].append(1)
    made.get_logprobs(data)
    stats = made.take_replay_stats()["prev_logprobs"]
    assert sum(len(rows.lengths) for rows in stats.rows) == len(LENGTHS) + 1
    check(stats, batch())
    said = check_trace(
        trace_of(3, NAMES, digests_of(batch()), batch(), {"prev_logprobs": not_compared(stats)})
    )
    assert said == "step 3: 4 samples as recorded; used as given: prev_logprobs 4"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (shift_by_one_token, "sample 's0', rows handed to the forward: a shift by tokens, first at token 0"),
        (layers_the_other_way, "sample 's0'.*a shift by layers"),
        (renamed_experts, "sample 's0'.*renamed experts"),
        (another_samples_rows, "sample 's2'.*stale rows.*those of 's1'"),
    ],
)
def test_the_check_of_a_trace_names_the_first_difference_and_its_cause(fault: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        check_trace(trace(fault))


def test_the_check_of_a_trace_tells_a_fault_of_the_store_from_one_of_the_worker() -> None:
    def shift_one_sample(data: BatchedDataDict) -> None:
        rows = data["routed_experts"][2, :6]
        rows.copy_(rows.roll(1, dims=0))

    with pytest.raises(ReplayError, match=r"store, sample 's2'.*transport"):
        check_trace(trace(stored=shift_one_sample))


def test_stale_rows_in_the_store_are_named() -> None:
    def stale(data: BatchedDataDict) -> None:
        data["routed_experts"][0, :8] = batch()["routed_experts"][3, :8]

    with pytest.raises(ReplayError, match=r"sample 's0'.*rows are those of sample 's3' \(stale rows\)"):
        check_trace(trace(stored=stale))


def test_rows_that_lost_their_routes_on_the_way_are_named() -> None:
    def lose(data: BatchedDataDict) -> None:
        data["routed_experts"][1, 1, 0] = 255

    with pytest.raises(
        ReplayError, match=r"sample 's1'.*1 rows have lost their routes, first token 1, layer 0"
    ):
        check_trace(trace(lose))


def test_a_run_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.router_replay\.trace=true"):
        check_run(tmp_path)
    (tmp_path / "router_trace").mkdir()
    (tmp_path / "router_trace" / "step_000001.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a trace"):
        check_run(tmp_path)


def traced_run(path: Path, steps: list[int]) -> RunDirectory:
    run, recorded = RunDirectory(path), batch()
    for step in steps:
        write_trace(run.traces_dir, trace_of(step, NAMES, digests_of(recorded), recorded, {}))
    return run


def test_a_hole_between_traces_is_refused_by_step(tmp_path: Path) -> None:
    traced_run(tmp_path, [2, 3, 6])
    with pytest.raises(ReplayError, match=r"traces of 2 steps are lost \(4, 5\).*those of 3 steps are sound"):
        check_run(tmp_path)


def test_traces_are_held_to_the_steps_that_the_run_has_recorded_as_traced(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [1, 4])
    for step in range(1, 5):
        # Resumed with another policy.router_replay.trace, twice.
        traced = {"router_replay/traced_samples": 4.0} if step in (1, 4) else {}
        run.append_metrics({"kind": "step", "step": step, "reward/mean": 0.5, **traced})
    assert len(check_run(tmp_path)) == 2
    (run.traces_dir / "step_000004.safetensors").unlink()
    with pytest.raises(ReplayError, match=r"traces of 1 steps are lost \(4\)"):
        check_run(tmp_path)
    # A step that a fault has stopped has a trace, and no line.
    traced_run(tmp_path, [4, 5])
    assert len(check_run(tmp_path)) == 3
