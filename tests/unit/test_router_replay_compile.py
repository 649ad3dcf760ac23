"""Compiled layers and compiled models see the same rows as eager ones."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from headrace.models.router_replay import RouterReplay, Routes, install
from moe_families import random_routes, tiny_moe

INPUTS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))
LAYERS = 10  # More than torch.compile's limit of 8 recompilations of one piece of code.


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def logits_and_gradients(model: Any, routes: Routes) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=INPUTS, use_cache=False, routes=routes).logits
    logits.float().log_softmax(-1)[..., 7].sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_replays(model: Any, compiled: Any, replay: RouterReplay) -> None:
    for seed in range(2):
        given = random_routes(replay, INPUTS.numel(), seed=seed)
        given[3] = -1
        eager, expected = logits_and_gradients(model, Routes.replay(given))
        routes = Routes.replay(given, trace=True)
        logits, gradients = logits_and_gradients(compiled, routes)
        # Other experts would differ in the first digit.
        torch.testing.assert_close(logits, eager)
        torch.testing.assert_close(gradients, expected)
        kept = torch.arange(INPUTS.numel()) != 3
        assert torch.equal(routes.ids.long()[kept], given[kept])


def test_compiled_layers_share_their_code_and_replay() -> None:
    model, compiled = (tiny_moe("deepseek_v2", num_hidden_layers=LAYERS).train() for _ in range(2))
    for each in (model, compiled):
        # torch 2.11 cannot trace the backward pass of transformers' grouped_mm without CUDA.
        each.set_experts_implementation("batched_mm")
    replay = install(model)
    install(compiled)
    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_replays(model, compiled, replay)
    assert counters["stats"]["unique_graphs"] < LAYERS


def test_a_compiled_model_replays_and_breaks_only_around_its_forward() -> None:
    model = tiny_moe("qwen3_moe").train()
    replay = install(model)
    assert_replays(model, torch.compile(model, backend="aot_eager"), replay)
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])
