"""Router replay on every family: the same bits, the given experts' numbers and gradients, decode and recompute."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING

from headrace.models.router_replay import RouterReplay, Routes, install
from moe_families import FAMILIES, INSTALLED, checkpoint_layers, config_class, random_routes, scores, tiny_moe

BATCH, LENGTH = 2, 9
WITHOUT_CHECKPOINTING = {"jetmoe"}
FORCED = (torch.topk, torch.Tensor.topk, torch.Tensor.masked_fill)
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


def test_at_least_55_families_are_tested() -> None:
    assert len(INSTALLED) >= 55


def live_slots(replay: RouterReplay) -> list[int]:
    return [i for i, router in enumerate(replay.routers) if router.fixed_output is None]


def forward(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return scores(model(input_ids=ids, use_cache=False, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_record_replay_and_the_stock_forward_are_bit_identical(family: str, dtype: torch.dtype) -> None:
    model = tiny_moe(family, dtype=dtype)
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


class ForcedTopK(TorchFunctionMode):
    """A stock router whose top-k over the experts returns `ids`, with the scores at them; a mask on them hides none."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        super().__init__()
        self.ids, self.experts = ids, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        over_experts = func in FORCED and args[0].shape[-1] == self.experts
        if over_experts and func is torch.Tensor.masked_fill:
            return args[0]
        native = func(*args, **(kwargs or {}))
        if not over_experts or native[1].shape[-1] != self.ids.shape[-1]:
            return native
        ids = self.ids.view(native[1].shape)
        return torch.return_types.topk((args[0].gather(-1, ids), ids))


def force(model: Any, replay: RouterReplay, ids: torch.Tensor) -> None:
    """Have the routers of a stock model choose `ids` (tokens, routers, k)."""
    for slot in live_slots(replay):
        router = model.get_submodule(replay.routers[slot].name)

        def forced(*args: Any, own: Any = router.forward, slot: int = slot, **kwargs: Any) -> Any:
            with ForcedTopK(ids[:, slot], replay.routers[slot].num_experts):
                return own(*args, **kwargs)

        router.forward = forced


def outputs_and_gradients(model: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = scores(model(input_ids=INPUTS, use_cache=False, **kwargs)).float()
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(6))).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output.detach(), found


def test_given_experts_give_the_numbers_of_a_stock_model_whose_top_k_is_forced(
    family: str, model: Any, replay: RouterReplay
) -> None:
    given, live = random_routes(replay, BATCH * LENGTH, seed=2), live_slots(replay)
    stock = tiny_moe(family)
    force(stock, replay, given)
    expected, gradients = outputs_and_gradients(stock)
    routes = Routes.replay(given, trace=True, compare=True)
    found, replayed = outputs_and_gradients(model, routes=routes)
    assert torch.equal(routes.ids[:, live].long(), given[:, live])
    assert not torch.equal(routes.native[:, live].sort(-1).values.long(), given[:, live].sort(-1).values)
    assert torch.equal(found, expected)
    assert replayed.keys() == gradients.keys()
    assert [name for name, g in gradients.items() if not torch.equal(g, replayed[name])] == []
    for slot in live:
        router = replay.routers[slot].name
        own = [g for name, g in replayed.items() if name.startswith(f"{router}.") and g.dim() == 2]
        assert own, router
        assert all(g.abs().max() > 0 for g in own), router


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
        output = scores(model(input_ids=ids, use_cache=False, routes=routes))
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


DOCS = (Path(__file__).parents[2] / "docs" / "router_replay.md").read_text()
NOT_TESTED = {
    *("dbrx", "diffusion_gemma", "doge", "ernie4_5_vl_moe", "inkling2_loop", "nllb_moe", "phimoe"),
    "openai_privacy_filter",
}


def test_the_documentation_lists_exactly_the_families_that_are_tested() -> None:
    table = DOCS.split("| How the router weighs its choice |")[1].split("\n\n")[0]
    cells = [line.split("|")[2] for line in table.splitlines()[2:]]
    names = [name.split()[0].rstrip("\\*") for cell in cells for name in cell.split(",")]
    assert sorted(names) == sorted(FAMILIES)


def test_every_mixture_of_experts_that_transformers_has_is_tested_or_named_as_one_that_is_not() -> None:
    sources = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    mixtures = {
        f.parent.name for f in sources if {"topk", "experts"} <= set(re.findall(r"[a-z]+", f.read_text()))
    }
    tested = {config_class(f).__module__.split(".")[2] for f in FAMILIES if f in CONFIG_MAPPING}
    assert len(mixtures & tested) > 40
    assert mixtures - tested <= NOT_TESTED
    assert [name for name in NOT_TESTED if name.replace("nllb_moe", "nllb-moe") not in DOCS] == []
