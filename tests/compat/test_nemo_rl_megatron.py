"""Router replay by NeMo-RL's functions, on Megatron's replay objects; on a real model: test_megatron_router_replay."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemo_rl.models.megatron import router_replay
from nemo_rl_names import calls

from headrace.errors import ConfigError, ReplayError, SchemaError

MODULE = "models.megatron.router_replay"


@calls(MODULE, "router_replay_enabled", "configure_vllm_for_router_replay", "validate_router_replay_config")
def test_a_recipe_with_replay_needs_an_engine_that_records_and_megatron() -> None:
    config: dict[str, Any] = {
        "router_replay": {"enabled": True},
        "generation": {"backend": "vllm", "vllm_cfg": {"enable_prefix_caching": True}},
        "megatron_cfg": {"enabled": True},
    }
    assert router_replay.router_replay_enabled(config)
    assert not router_replay.router_replay_enabled({})
    router_replay.configure_vllm_for_router_replay(config)
    assert config["generation"]["vllm_kwargs"] == {"enable_return_routed_experts": True}
    assert config["generation"]["vllm_cfg"] == {"enable_prefix_caching": True}
    empty: dict[str, Any] = {**config, "generation": {"backend": "vllm", "vllm_kwargs": None}}
    router_replay.configure_vllm_for_router_replay(empty)
    assert empty["generation"]["vllm_kwargs"] == {"enable_return_routed_experts": True}
    router_replay.validate_router_replay_config(config)
    router_replay.validate_router_replay_config({"generation": {"backend": "hf"}})
    with pytest.raises(ConfigError, match=r"generation\.backend=hf"):
        router_replay.validate_router_replay_config({**config, "generation": {"backend": "hf"}})
    with pytest.raises(ConfigError, match="megatron_cfg"):
        router_replay.validate_router_replay_config({**config, "megatron_cfg": {"enabled": False}})
    assert router_replay._MISSING_ROUTE_SENTINEL == -1


megatron = pytest.importorskip(
    "megatron.core.transformer.moe.router_replay", reason="needs headrace[megatron]"
)
RouterReplay, Action = megatron.RouterReplay, megatron.RouterReplayAction


class Router(torch.nn.Module):
    """Stands where a router of a layer does."""

    def __init__(self, layer_number: int, replay: Any = None) -> None:
        super().__init__()
        self.layer_number = layer_number
        if replay is not None:
            self.router_replay = replay


class Chunk(torch.nn.Module):
    """A part of a model with routers in some layers."""

    def __init__(self, layers: list[int], *, plain: list[int] | None = None, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            **{"num_layers": 4, "moe_layer_freq": [0, 1, 1, 0], "num_moe_experts": 8, **config}
        )
        for layer in layers:
            setattr(self, f"router_{layer}", Router(layer, RouterReplay()))
        for layer in plain or []:
            setattr(self, f"layer_{layer}", Router(layer))


@pytest.fixture(autouse=True)
def no_routers_of_others() -> Any:
    RouterReplay.clear_global_router_replay_instances()
    yield
    RouterReplay.clear_global_router_replay_instances()


@calls(MODULE, "build_router_replay_tensors", "build_router_replay_assignments")
@pytest.mark.parametrize("layers", [2, 4])
def test_routes_fall_to_the_routers_by_their_layer_in_megatrons_token_order(layers: int) -> None:
    chunks = [Chunk([3]), Chunk([2])]
    ids = torch.arange(2 * 3 * layers * 2).view(2, 3, layers, 2)
    third, second = router_replay.build_router_replay_tensors(chunks, ids.to(torch.uint8))
    by_layer = ids.transpose(0, 1).flatten(0, 1)
    assert torch.equal(second, by_layer[:, layers // 2 - 1])
    assert torch.equal(third, by_layer[:, layers // 2])
    assert second.dtype == torch.int64
    packed = ids.flatten(0, 1)
    (replay, rows), _ = router_replay.build_router_replay_assignments(chunks, packed)
    assert replay is chunks[0].router_3.router_replay
    assert torch.equal(rows, packed[:, layers // 2])


def test_routes_that_do_not_fit_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SchemaError, match="Expected exactly 2 layers for compressed MoE-layer layout or 4 layers"
    ):
        router_replay.build_router_replay_tensors(Chunk([2, 3]), torch.zeros(2, 3, 2, dtype=torch.int32))
    with pytest.raises(SchemaError, match=r"local MoE layers \[3\]"):
        router_replay.build_router_replay_assignments(Chunk([2], plain=[3]), torch.zeros(2, 2, 2).int())
    assert (
        router_replay.build_router_replay_assignments(Chunk([], plain=[1, 4]), torch.zeros(2, 2, 2).int())
        == []
    )
    twice = torch.zeros(1, 2, 2, dtype=torch.int32)
    assert len(router_replay.build_router_replay_tensors(Chunk([2, 3]), twice)) == 2
    monkeypatch.setenv(router_replay._ROUTER_REPLAY_VALIDATE_ENV, "1")
    with pytest.raises(SchemaError, match="an expert twice"):
        router_replay.build_router_replay_tensors(Chunk([2, 3]), twice)


def test_a_tensor_rank_of_a_sequence_parallel_model_gets_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_replay, "_get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(router_replay, "_get_tensor_model_parallel_rank", lambda: 1)
    ids = torch.arange(4 * 2 * 2).view(4, 2, 2)
    rows, _ = router_replay.build_router_replay_tensors(Chunk([2, 3], sequence_parallel=True), ids)
    assert torch.equal(rows, ids[2:, 0])


@calls(
    MODULE,
    "set_router_replay_forward",
    "set_router_replay_backward",
    "clear_router_replay",
    "clear_global_router_replay_instances",
)
def test_routes_are_set_followed_and_cleared_in_one_model_alone() -> None:
    active, idle = Chunk([2, 3]), Chunk([2, 3])
    ids = torch.tensor([[[1, 2], [3, 4]], [[255, 255], [5, 6]]], dtype=torch.uint8)
    router_replay.set_router_replay_forward(active, ids)
    replay = active.router_2.router_replay
    assert replay.router_replay_action == Action.REPLAY_FORWARD
    assert replay.target_topk_idx.tolist() == [[1, 2], [-1, -1]]

    def own_choice(scores: torch.Tensor, topk: int, **_: Any) -> Any:
        return torch.topk(scores, topk, dim=1)

    scores = torch.rand(2, 8, generator=torch.Generator().manual_seed(0))
    weights, chosen = replay.get_replay_topk(scores, 2, default_compute_topk=own_choice)
    assert chosen[0].tolist() == [1, 2]
    assert torch.equal(chosen[1], own_choice(scores, 2)[1][1])
    assert torch.equal(weights, scores.gather(1, chosen))
    with pytest.raises(ReplayError, match="ran twice"):
        replay.get_replay_topk(scores, 2, default_compute_topk=own_choice)
    router_replay.set_router_replay_backward(active)
    assert replay.router_replay_action == Action.REPLAY_BACKWARD
    assert idle.router_2.router_replay.router_replay_action is None
    router_replay.clear_router_replay(active)
    assert (replay.router_replay_action, replay.target_topk_idx, replay.replay_backward_list) == (
        None,
        None,
        [],
    )
    router_replay.set_router_replay_forward([active, idle], ids)
    router_replay.clear_router_replay()
    assert all(r.router_replay_action is None for r in RouterReplay.global_router_replay_instances)
    router_replay.clear_global_router_replay_instances()
    assert RouterReplay.global_router_replay_instances == []
