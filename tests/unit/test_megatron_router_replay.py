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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from headrace.errors import ReplayError
from headrace.models.megatron.router_replay import MegatronRouterReplay, moe_layers, rows_of_rank

EXPERTS, TOP_K, LENGTH, BATCH = 8, 2, 6, 2
FREQUENCY = [0, 1, 1]


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
    return GPTModel(config, spec, vocab_size=32, max_sequence_length=16, position_embedding_type="rope")


def run(model: Any) -> torch.Tensor:
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 32
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens, positions, mask)


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
    assert replay.receipt().totals() == {"replayed": 24, "native": 0, "never_reached": 0, "padding": 0}


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
    assert replay.receipt().native == (1, 1)


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
        if changes:
            replay.finish()
        return [p.grad for p in model.parameters()]

    plain = gradients()
    recomputed = gradients(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_rows_kept_for_a_recompute_that_did_not_come_are_an_error() -> None:
    model = gpt()
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
    with pytest.raises(ReplayError, match="2 MoE layers"), replay.forward(routes()[:, :1]):
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
