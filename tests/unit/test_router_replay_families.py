"""Router replay on every family: the same bits, the asked experts, the router's gradient, decode and recompute."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.models.router_replay import RouterReplay, Routes, install
from moe_families import FAMILIES, INSTALLED, checkpoint_layers, random_routes, tiny_moe

BATCH, LENGTH = 2, 9
WITHOUT_CHECKPOINTING = {"jetmoe"}
INPUTS = torch.randint(3, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", params=INSTALLED)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return tiny_moe(family)


@pytest.fixture(scope="module")
def replay(model: Any) -> RouterReplay:
    return install(model)


def test_at_least_45_families_are_tested() -> None:
    assert len(INSTALLED) >= 45


def live_slots(replay: RouterReplay) -> list[int]:
    return [i for i, router in enumerate(replay.routers) if router.fixed_output is None]


def forward(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_record_replay_and_the_stock_forward_are_bit_identical(family: str, dtype: torch.dtype) -> None:
    model = tiny_moe(family).to(dtype)
    stock = forward(model, INPUTS)
    replay = install(model)
    recorded = Routes.record()
    assert torch.equal(forward(model, INPUTS, routes=recorded), stock)
    assert recorded.ids.shape == (BATCH * LENGTH, replay.num_moe_layers, replay.top_k)
    assert recorded.ids.dtype == torch.uint8
    replayed = Routes.replay(recorded.ids, trace=True)
    assert torch.equal(forward(model, INPUTS, routes=replayed), stock)
    assert torch.equal(replayed.ids, recorded.ids)
    assert torch.equal(forward(model, INPUTS), stock)


def test_with_other_weights_the_experts_used_are_the_recorded_ones(model: Any, replay: RouterReplay) -> None:
    recorded = Routes.record()
    forward(model, INPUTS, routes=recorded)
    other = deepcopy(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in other.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    native, replayed = Routes.record(), Routes.replay(recorded.ids, trace=True)
    native_logits = forward(other, INPUTS, routes=native)
    seen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args: seen.extend(a for a in args if a.dtype == torch.int64)
        )
        for name, module in other.named_modules()
        if name.endswith(".experts")
    ]
    logits = forward(other, INPUTS, routes=replayed)
    for hook in hooks:
        hook.remove()
    assert torch.equal(replayed.ids, recorded.ids)
    live = live_slots(replay)
    assert not torch.equal(native.ids[:, live], recorded.ids[:, live])
    assert not torch.equal(native_logits, logits)
    # What the experts' own forward was called with, in the families that call it with ids.
    for ids, expected in zip(seen, recorded.ids.unbind(1)):
        kept = expected < 8  # zaya's and longcat's further classes have no expert of their own
        assert torch.equal(ids.reshape(expected.shape)[kept], expected.long()[kept])


def test_every_router_has_a_gradient_through_given_routes(model: Any, replay: RouterReplay) -> None:
    routes = Routes.replay(random_routes(replay, BATCH * LENGTH, seed=2))
    model.zero_grad()
    output = model(input_ids=INPUTS, use_cache=False, routes=routes).logits
    output.float().log_softmax(-1)[..., 7].sum().backward()
    for slot in live_slots(replay):
        router = model.get_submodule(replay.routers[slot].name)
        gradients = [p.grad for p in router.parameters() if p.requires_grad and p.dim() == 2]
        assert gradients, replay.routers[slot].name
        for gradient in gradients:
            assert gradient is not None
            assert gradient.abs().max() > 0
    model.zero_grad()


def test_decoding_with_a_cache_records_the_rows_of_a_full_forward(model: Any, replay: RouterReplay) -> None:
    whole, steps = Routes.record(), Routes.record()
    forward(model, INPUTS, routes=whole)
    prefill = 5
    cache: dict[str, Any] = {}
    with torch.no_grad():
        for start, stop in [(0, prefill), *((i, i + 1) for i in range(prefill, LENGTH))]:
            output = model(input_ids=INPUTS[:, start:stop], use_cache=True, routes=steps, **cache)
            name = "cache" if getattr(output, "cache", None) is not None else "past_key_values"
            cache = {name: getattr(output, name)}
    first = steps.ids[: BATCH * prefill].unflatten(0, (BATCH, prefill))
    later = steps.ids[BATCH * prefill :].unflatten(0, (LENGTH - prefill, BATCH)).transpose(0, 1)
    full = whole.ids.unflatten(0, (BATCH, LENGTH))
    assert torch.equal(torch.cat([first, later], dim=1).sort(-1).values, full.sort(-1).values)


def gradients_of_two_microbatches(model: Any, replay: RouterReplay, *, in_flight: bool) -> list[torch.Tensor]:
    """The gradients of two microbatches with routes of their own; in flight, both are forward before either is back."""
    model.zero_grad()
    batches = [
        (INPUTS, Routes.replay(random_routes(replay, BATCH * LENGTH, seed=3))),
        (INPUTS.flip(1), Routes.replay(random_routes(replay, BATCH * LENGTH, seed=4))),
    ]
    losses = []
    # The second microbatch's backward is first either way, so that gradients add up in the same order.
    for ids, routes in batches if in_flight else reversed(batches):
        output = model(input_ids=ids, use_cache=False, routes=routes).logits
        losses.append(output.float().log_softmax(-1)[..., 7].sum())
        if not in_flight:
            losses.pop().backward()
    for loss in reversed(losses):
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_checkpointing_with_two_microbatches_in_flight_gives_the_same_gradients(
    family: str, model: Any, replay: RouterReplay
) -> None:
    if family in WITHOUT_CHECKPOINTING:
        pytest.skip("transformers has no activation checkpointing for this family")
    other = deepcopy(model).train()
    install(other)
    plain = gradients_of_two_microbatches(other, replay, in_flight=False)
    checkpoint_layers(other)
    recomputed = gradients_of_two_microbatches(other, replay, in_flight=True)
    assert len(plain) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed))


def test_the_documentation_lists_exactly_the_families_that_are_tested() -> None:
    text = (Path(__file__).parents[2] / "docs" / "router_replay.md").read_text()
    table = text.split("| How the router weighs its choice |")[1].split("\n\n")[0]
    cells = [line.split("|")[2] for line in table.splitlines()[2:]]
    names = [name.split()[0].rstrip("\\*") for cell in cells for name in cell.split(",")]
    assert sorted(names) == sorted(FAMILIES)
