"""Router replay on the real megatron-core, on the CPU; skipped where it is not installed."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip(
    "megatron.core", reason="megatron-core is not installed (pip install 'headrace[megatron]')"
)

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from headrace.compat import megatron_replay
from headrace.errors import ReplayError
from headrace.models.megatron.router_replay import MegatronRouterReplay, moe_layers, rows_of_rank

EXPERTS, TOP_K, LENGTH, BATCH = 8, 2, 6, 2
FREQUENCY = [0, 1, 1]
MASK = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Megatron asks for the current CUDA device wherever it makes a tensor, and for its random state in a recompute.
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda.random, "get_rng_state", lambda device="cuda": torch.get_rng_state())
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # Without Transformer Engine, 0.16.1 leaves this name undefined.
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    patch.undo()


def gpt(**changes: Any) -> Any:
    config = TransformerConfig(
        num_layers=3,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=16,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_layer_freq=FREQUENCY,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        moe_enable_routing_replay=True,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        init_method_std=0.2,
        **changes,
    )
    torch.manual_seed(0)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = (
        get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    )
    return GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )


def run(model: Any) -> torch.Tensor:
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 32
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    return model(tokens, positions, MASK, labels=tokens if model.config.mtp_num_layers else None)


def routes(seed: int = 0) -> torch.Tensor:
    drawn = torch.rand(BATCH * LENGTH, 2, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return drawn.topk(TOP_K).indices.to(torch.uint8)


def test_recorded_routes_replay_the_same_logits_bit_for_bit() -> None:
    model = gpt()
    replay = MegatronRouterReplay([model])
    stock = run(model)
    with replay.recording():
        recorded_logits = run(model)
    recorded = replay.recorded()
    assert recorded.shape == (BATCH * LENGTH, 2, TOP_K)
    with replay.forward(recorded):
        replayed = run(model)
    assert torch.equal(stock, recorded_logits)
    assert torch.equal(stock, replayed)
    assert replay.stats().totals() == {"replayed": 24, "native": 0, "never_reached": 0, "padding": 0}


def test_other_routes_give_other_logits_and_the_router_keeps_its_gradient() -> None:
    model = gpt()
    replay = MegatronRouterReplay([model])
    with replay.forward(routes()):
        out = run(model)
    assert not torch.equal(out, run(model))
    out.sum().backward()
    gradients = [p.grad for n, p in model.named_parameters() if "router" in n]
    assert len(gradients) == 2
    assert all(g is not None and bool(g.abs().sum() > 0) for g in gradients)


def test_missing_rows_are_routed_natively() -> None:
    model = gpt()
    replay = MegatronRouterReplay([model])
    with replay.recording():
        stock = run(model)
    given = replay.recorded().to(torch.uint8)
    given[3, 0] = given[5, 1] = 255
    with replay.forward(given):
        assert torch.equal(run(model), stock)
    assert replay.stats().native == (1, 1)


def test_two_models_in_one_process_do_not_see_each_other() -> None:
    first, second = gpt(), gpt()
    replay = MegatronRouterReplay([first])
    stock = run(second)
    with replay.forward(routes()):
        run(first)
        assert torch.equal(run(second), stock)


def test_a_recompute_sees_the_rows_of_its_forward_with_two_microbatches_in_flight() -> None:
    def gradients(**changes: Any) -> list[torch.Tensor]:
        model = gpt(**changes).train()
        replay = MegatronRouterReplay([model])
        losses = []
        for seed in (1, 2):
            with replay.forward(routes(seed), keep_for_recompute=True):
                losses.append(run(model).square().mean())
        with replay.backward():
            for loss in losses:
                loss.backward()
        replay.finish()
        return [p.grad for p in model.parameters()]

    plain = gradients()
    recomputed = gradients(**FULL)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["two of three layers", "the experts alone"],
)
def test_layers_that_are_not_recomputed_keep_no_rows(recompute: dict[str, Any]) -> None:
    gradients = []
    for changes in ({}, recompute):
        model = gpt(**changes).train()
        replay = MegatronRouterReplay([model])
        with replay.forward(routes(), keep_for_recompute=True):
            loss = run(model).square().mean()
        with replay.backward():
            loss.backward()
        replay.finish()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_evaluation_between_forward_and_backward_leaves_the_kept_rows() -> None:
    gradients = []
    for evaluates in (False, True):
        model = gpt(**FULL).train()
        replay = MegatronRouterReplay([model])
        with replay.forward(routes(1), keep_for_recompute=True):
            loss = run(model).square().mean()
        if evaluates:
            with torch.no_grad(), replay.forward(routes(2)):
                run(model)
            with pytest.raises(ReplayError, match="never reached"), replay.forward(routes(2)):
                pass
        with replay.backward():
            loss.backward()
        replay.finish()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_forward_that_failed_keeps_nothing_for_a_recompute() -> None:
    model = gpt(**FULL).train()
    replay = MegatronRouterReplay([model])
    model.output_layer.register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError), replay.forward(routes(), keep_for_recompute=True):
        run(model)
    replay.finish()


def test_a_virtual_pipeline_replays_one_chunk_at_a_time() -> None:
    model = gpt()
    chunks = [torch.nn.ModuleList([layer]) for layer in model.decoder.layers]
    for chunk in chunks:
        chunk.config = model.config
    replay = MegatronRouterReplay(chunks)
    hidden = torch.randn(LENGTH, BATCH, 16)
    given = routes()
    for number, layer in enumerate(model.decoder.layers):
        if number:
            with replay.forward(given, chunk=number):
                layer(hidden, attention_mask=MASK)
            assert replay.stats().totals() == {
                "replayed": 12,
                "native": 0,
                "never_reached": 0,
                "padding": 0,
            }
            with replay.recording():
                layer(hidden, attention_mask=MASK)
            assert replay.recorded(number).shape == (BATCH * LENGTH, 1, TOP_K)
    with (
        pytest.raises(ReplayError, match=r"never reached.*\[2\].*forward\(ids, chunk=\.\.\.\)"),
        replay.forward(given),
    ):
        model.decoder.layers[1](hidden, attention_mask=MASK)
    with (
        pytest.raises(ReplayError, match="chunk=3; this rank has the chunks 0 to 2"),
        replay.forward(given, chunk=3),
    ):
        pass


def test_the_routers_of_multi_token_prediction_are_left_alone() -> None:
    model = gpt(mtp_num_layers=1)
    assert sum("mtp" in name and name.endswith("router.weight") for name, _ in model.named_parameters()) == 1
    replay = MegatronRouterReplay([model])
    assert replay.slots == (0, 1)
    with replay.forward(routes()):
        run(model)
    assert replay.stats().totals()["replayed"] == 24


def test_a_capacity_factor_is_refused_by_name() -> None:
    with pytest.raises(ReplayError, match=r"moe_expert_capacity_factor=0\.5 lets a router drop"):
        MegatronRouterReplay([gpt(moe_expert_capacity_factor=0.5)])


def test_functions_by_nemo_rls_names_replay_what_the_handle_replays() -> None:
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    models = [gpt(**recompute).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    handle = MegatronRouterReplay([models[0]])
    with handle.forward(routes(), keep_for_recompute=True):
        by_handle = run(models[0])
    with handle.backward():
        by_handle.sum().backward()
    handle.finish()
    megatron_replay.set_router_replay_forward(models[1], routes())
    by_name = run(models[1])
    megatron_replay.set_router_replay_backward(models[1])
    by_name.sum().backward()
    megatron_replay.clear_router_replay(models[1])
    assert torch.equal(by_name, by_handle)
    for (name, mine), theirs in zip(models[1].named_parameters(), models[0].parameters()):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name


def test_rows_that_no_router_can_have_chosen_are_refused() -> None:
    model = gpt()
    replay = MegatronRouterReplay([model])
    with pytest.raises(ReplayError, match="token 3, layer 1"), replay.forward(zeroed(routes(), 3, 1)):
        run(model)


def zeroed(ids: torch.Tensor, token: int, layer: int) -> torch.Tensor:
    ids[token, layer] = 0
    return ids


def test_stats_before_a_forward_is_refused() -> None:
    with pytest.raises(ReplayError, match="no forward has replayed routes yet"):
        MegatronRouterReplay([gpt()]).stats()


def test_rows_kept_for_a_recompute_that_did_not_come_are_an_error() -> None:
    model = gpt(**FULL).train()
    replay = MegatronRouterReplay([model])
    with replay.forward(routes(), keep_for_recompute=True):
        run(model)
    with pytest.raises(ReplayError, match="not consumed"):
        replay.finish()
    with replay.forward(routes()):  # an evaluation
        run(model)
    replay.finish()


def test_routes_are_consumed_once_and_must_reach_every_router() -> None:
    model = gpt()
    replay = MegatronRouterReplay([model])
    with replay.forward(routes()):
        run(model)
        with pytest.raises(ReplayError, match="consumed once"):
            run(model)
    with pytest.raises(ReplayError, match=r"never reached.*\[1, 2\]"), replay.forward(routes()):
        pass


def test_routes_that_do_not_fit_are_refused() -> None:
    model = gpt()
    replay = MegatronRouterReplay([model])
    with (
        pytest.raises(ReplayError, match=r"shape \(12, 1, 2\); expected \(tokens, 2 layers"),
        replay.forward(routes()[:, :1]),
    ):
        run(model)
    with pytest.raises(ReplayError, match="sees 12 tokens"), replay.forward(routes()[:5]):
        run(model)


def test_dense_layers_have_no_slot_and_a_dense_model_is_refused() -> None:
    replay = MegatronRouterReplay([gpt()])
    assert replay.slots == (0, 1)
    assert replay.layer_map.moe_layers == (1, 2)
    assert moe_layers(type("C", (), {"moe_layer_freq": 2, "num_layers": 5})) == (0, 2, 4)
    with pytest.raises(ReplayError, match="no router"):
        MegatronRouterReplay([torch.nn.Linear(2, 2)])


def test_a_pipeline_stage_takes_the_slots_of_its_own_layers() -> None:
    model = gpt()
    stage = torch.nn.ModuleList([model.decoder.layers[2]])
    stage.config = model.config
    replay = MegatronRouterReplay([stage])
    assert replay.slots == (1,)
    whole = MegatronRouterReplay(
        [torch.nn.ModuleList([layer]) for layer in model.decoder.layers[:0]] + [model]
    )
    assert whole.slots == (0, 1)


def test_rows_are_sequence_major_and_split_like_the_tokens() -> None:
    places = torch.arange(16).view(2, 8, 1, 1)
    assert rows_of_rank(places).flatten().tolist()[:4] == [0, 8, 1, 9]
    assert rows_of_rank(places, sequence=(1, 2)).flatten().tolist() == [4, 12, 5, 13, 6, 14, 7, 15]
    assert rows_of_rank(places, context=(0, 2))[::2].flatten().tolist() == [0, 1, 6, 7]
    assert rows_of_rank(places, context=(1, 2), sequence=(1, 2))[::2].flatten().tolist() == [4, 5]
    with pytest.raises(ReplayError, match="do not divide into 12 parts"):
        rows_of_rank(places, context=(0, 2), sequence=(0, 3))
