"""Router replay on one GPU in bfloat16 with grouped_mm experts: the same bits, recompute, and compiled layers."""

from typing import Any

import pytest
import torch

from headrace.models.router_replay import Routes, install
from moe_families import checkpoint_layers, random_routes, tiny_moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe"]
INPUTS = torch.randint(3, 64, (4, 48), generator=torch.Generator().manual_seed(5))
# grouped_mm wants rows of 16 bytes or more.
SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
LATENT = {"head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


def gpu_model(family: str) -> Any:
    sizes = SIZES | {"num_hidden_layers": 4} | (LATENT if family == "deepseek_v3" else {})
    return tiny_moe(family, experts_implementation="grouped_mm", **sizes).to("cuda", torch.bfloat16)


def gradients(model: Any, seeds: tuple[int, ...]) -> list[torch.Tensor]:
    """Gradients of one microbatch per seed, all forwards before any backward."""
    replay, losses = install(model), []
    model.zero_grad()
    for seed in seeds:
        given = random_routes(replay, INPUTS.numel(), seed=seed)
        routes = Routes.replay(given, trace=True)
        logits = model(input_ids=INPUTS.roll(seed, 1).cuda(), use_cache=False, routes=routes).logits
        assert torch.equal(routes.ids.long().cpu(), given)
        losses.append(logits.float().log_softmax(-1)[..., 7].mean())
    for loss in reversed(losses):
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_record_replay_and_the_stock_forward_are_bit_identical_on_the_gpu(family: str) -> None:
    model = gpu_model(family)
    ids = INPUTS.cuda()
    with torch.no_grad():
        stock = model(input_ids=ids, use_cache=False).logits
        install(model)
        recorded = Routes.record()
        assert torch.equal(model(input_ids=ids, use_cache=False, routes=recorded).logits, stock)
        replayed = Routes.replay(recorded.ids, trace=True)
        assert torch.equal(model(input_ids=ids, use_cache=False, routes=replayed).logits, stock)
    assert recorded.ids.is_cuda
    assert torch.equal(recorded.ids, replayed.ids)
    replayed.stats.require_effect()


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_with_two_microbatches_in_flight_on_the_gpu(family: str) -> None:
    model = gpu_model(family).train()
    plain = gradients(model, (1, 2))
    checkpoint_layers(model)
    torch.testing.assert_close(gradients(model, (1, 2)), plain, rtol=0, atol=0)


def test_layers_compiled_by_inductor_use_the_given_experts() -> None:
    model = gpu_model("qwen3_moe").train()
    plain = gradients(model, (1, 2))
    for layer in model.model.layers:
        layer.compile()
    # Fused kernels round elsewhere; with other experts the gradients would differ in the first digit.
    compiled = gradients(model, (1, 2))
    total = sum(g.float().norm() ** 2 for g in plain) ** 0.5
    apart = sum((a - b).float().norm() ** 2 for a, b in zip(plain, compiled, strict=True)) ** 0.5
    assert apart < 0.02 * total
