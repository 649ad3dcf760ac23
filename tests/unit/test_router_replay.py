"""Routes of one model: the API, stats, missing and padding rows, and what must never pass silently."""

import pickle
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.modeling_layers import MtpLayer

from headrace.errors import ReplayError
from headrace.models.router_replay import (
    LayerMap,
    ReplayStats,
    Routes,
    align_padded,
    install,
    route_digest,
    row_digests,
)
from moe_families import checkpoint_layers, random_routes, tiny_moe

BATCH, LENGTH = 2, 9
TOKENS = BATCH * LENGTH
INPUTS = torch.randint(3, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_moe("qwen3_moe")
    install(model)
    return model


def forward(model: Any, ids: torch.Tensor = INPUTS, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **kwargs).logits


def recorded(model: Any, ids: torch.Tensor = INPUTS) -> torch.Tensor:
    routes = Routes.record()
    forward(model, ids, routes=routes)
    return routes.ids


def gradients(model: Any, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Gradients of all batches (ids, routes), every forward before any backward."""
    model.zero_grad()
    losses = []
    for ids, routes in batches:
        logits = model(input_ids=ids, use_cache=False, routes=Routes.replay(routes)).logits
        losses.append(logits.float().log_softmax(-1)[..., 7].sum())
    for loss in reversed(losses):
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def one_after_the_other(model: Any, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    parts = [gradients(model, [batch]) for batch in reversed(batches)]
    return [sum(grads[1:], grads[0]) for grads in map(list, zip(*parts))]


# --- the handle


def test_the_handle_names_the_routers_in_order(model: Any) -> None:
    replay = install(model)
    assert [r.name for r in replay.routers] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert (replay.num_moe_layers, replay.top_k, replay.num_experts) == (2, 2, 8)
    assert replay.dtype == torch.uint8
    assert replay.layer_map == LayerMap(2, (0, 1))


def test_a_second_install_on_the_model_or_a_part_returns_the_same_handle() -> None:
    model = tiny_moe("qwen3_moe")
    handle = install(model)
    kinds = [type(m) for m in model.modules()]
    assert install(model) is handle
    assert install(model.model) is handle
    assert [type(m) for m in model.modules()] == kinds
    inner = tiny_moe("qwen3_moe")
    handle = install(inner.model)
    assert install(inner) is handle
    assert recorded(inner).shape == (TOKENS, 2, 2)


def test_a_model_built_twice_has_two_sets_of_routers_that_do_not_mix() -> None:
    first, second = tiny_moe("qwen3_moe"), tiny_moe("qwen3_moe")
    handle = install(first)
    with torch.no_grad():
        second.model.layers[0].mlp.gate.weight.neg_()
    other = install(second)
    assert handle.num_moe_layers == other.num_moe_layers == 2
    assert not torch.equal(recorded(first), recorded(second))
    routes = Routes.replay(recorded(first), trace=True)
    forward(second, routes=routes)
    assert torch.equal(routes.ids, recorded(first))
    assert routes.stats.totals() == {"replayed": 2 * TOKENS, "native": 0, "never_reached": 0, "padding": 0}


def test_a_copy_of_an_installed_model_runs_its_own_layers(model: Any) -> None:
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert forward(other, routes=Routes.replay(recorded(model))).abs().max() == 0
    assert forward(model).abs().max() > 0
    assert install(other).routers == install(model).routers


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_a_pickled_model_keeps_its_routers_and_its_handle(model: Any, protocol: int) -> None:
    other = pickle.loads(pickle.dumps(model, protocol))
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert install(other) == install(model)
    assert install(other) is not install(model)
    routes = Routes.replay(random_routes(install(model), TOKENS, seed=3), trace=True)
    replayed = forward(other, routes=routes)
    assert torch.equal(forward(model, routes=Routes.replay(routes.ids)), replayed)
    assert not torch.equal(forward(other), replayed)


_LOAD = """
import sys, torch
torch.set_num_threads(int(sys.argv[3]))
model = torch.load(sys.argv[1], weights_only=False)
from headrace.models.router_replay import Routes
ids, expected = torch.load(sys.argv[2])
routes = Routes.record()
with torch.no_grad():
    assert torch.equal(model(input_ids=ids, use_cache=False, routes=routes).logits, expected)
print(routes.stats.totals()["native"])
"""


def test_a_model_saved_whole_loads_in_another_process(model: Any, tmp_path: Path) -> None:
    torch.save(model, tmp_path / "model.pt")
    torch.save((INPUTS, forward(model)), tmp_path / "expected.pt")
    done = subprocess.run(
        # The last bits depend on how many threads share a product.
        [
            sys.executable,
            "-c",
            _LOAD,
            tmp_path / "model.pt",
            tmp_path / "expected.pt",
            str(torch.get_num_threads()),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(2 * TOKENS)), done.stderr


def test_a_vision_language_model_replays_the_routers_of_its_decoder() -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text: dict[str, Any] = tiny_moe("qwen3_moe").config.to_dict() | {
        "model_type": "qwen3_vl_moe_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tokens = {
        f"{name}_token_id": 60 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))
    }
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision, **tokens)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    ids = INPUTS.clamp(max=59)
    stock = forward(model, ids)
    assert install(model).routers[0].name == "model.language_model.layers.0.mlp.gate"
    assert torch.equal(forward(model, ids, routes=Routes.replay(recorded(model, ids))), stock)


def test_class_names_state_and_signature_stay(model: Any) -> None:
    import inspect

    stock = tiny_moe("qwen3_moe")
    assert [str(type(m)) for m in model.modules()] == [str(type(m)) for m in stock.modules()]
    assert list(model.state_dict()) == list(stock.state_dict())
    parameters = dict(inspect.signature(model.forward).parameters)
    assert parameters.pop("routes").kind is inspect.Parameter.KEYWORD_ONLY
    assert list(parameters) == list(inspect.signature(stock.forward).parameters)


def test_router_logits_and_hidden_states_are_still_returned(model: Any) -> None:
    output = model(
        input_ids=INPUTS, routes=Routes.record(), output_router_logits=True, output_hidden_states=True
    )
    assert len(output.router_logits) == 2
    assert len(output.hidden_states) == 3


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phimoe", "PhimoeTopKRouter.*sparse mixer"),
        ("doge", "DogeCDMoE.*product keys"),
        ("dbrx", "DbrxFFN.*in the block"),
        (
            "inkling2_loop_text",
            r"layers\.1 \(Inkling2LoopSlidingLoopDecoderLayer\).*runs several times in one forward",
        ),
        ("qwen3", "Qwen3Model has no router.*dense"),
    ],
)
def test_a_model_that_cannot_be_replayed_is_refused_with_its_class_and_the_reason(
    family: str, reason: str
) -> None:
    changes: dict[str, Any] = {
        "doge": {"is_moe": True, "num_experts": 16},
        "inkling2_loop_text": {
            "num_hidden_layers": 3,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "n_layers_per_attn_res_block": 1,
        },
    }.get(family, {})
    if family == "dbrx":
        changes = {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        }
    model = tiny_moe(family, **changes)
    stock = [type(m) for m in model.modules()]
    with pytest.raises(ReplayError, match=f"(?s){reason}"):
        install(model)
    assert [type(m) for m in model.modules()] == stock


@pytest.mark.parametrize("family", ["switch_transformers", "nllb-moe"])
def test_encoder_decoder_mixtures_with_capacities_are_refused(family: str) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 16,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_ff": 16,
    }
    sizes |= {"num_heads": 2, "d_kv": 8, "num_experts": 4, "num_sparse_encoder_layers": 1}
    sizes |= {"num_sparse_decoder_layers": 1, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16}
    sizes |= {"decoder_ffn_dim": 16, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **sizes))
    with pytest.raises(ReplayError, match="capacity"):
        install(model)


def test_something_other_than_a_transformers_model_is_refused() -> None:
    with pytest.raises(ReplayError, match="PreTrainedModel; got Linear"):
        install(torch.nn.Linear(2, 2))


def test_a_forward_set_on_the_instance_is_refused() -> None:
    model = tiny_moe("qwen3_moe")
    layer = model.model.layers[0]
    layer.forward = layer.forward
    with pytest.raises(ReplayError, match="forward of its own on the instance"):
        install(model)


def test_a_dense_first_layer_has_no_slot() -> None:
    model = tiny_moe("glm4_moe", num_hidden_layers=4)
    replay = install(model)
    assert replay.layer_map == LayerMap(4, (1, 2, 3))
    assert recorded(model).shape == (TOKENS, 3, 2)
    with pytest.raises(ReplayError, match=r"shape \(18, 4, 2\).*takes \(18, 3, 2\)"):
        forward(model, routes=Routes.replay(torch.zeros(TOKENS, 4, 2, dtype=torch.uint8)))
    everything = torch.full((TOKENS, 4, 2), 255, dtype=torch.uint8)
    everything[:, 1:] = recorded(model)
    assert torch.equal(
        forward(model, routes=Routes.replay(replay.layer_map.select(everything))), forward(model)
    )


def test_a_router_that_is_a_function_of_the_token_keeps_its_slot() -> None:
    model = tiny_moe("deepseek_v4")
    replay = install(model)
    assert [r.fixed_output is not None for r in replay.routers] == [True, False]
    ids = recorded(model)
    table = model.model.layers[0].mlp.gate.tid2eid[INPUTS.flatten()]
    assert torch.equal(ids[:, 0].long(), table)
    routes = Routes.replay(random_routes(replay, TOKENS, seed=1), trace=True)
    forward(model, routes=routes)
    assert torch.equal(routes.ids[:, 0].long(), table)
    assert routes.stats.native == (TOKENS, 0)
    assert routes.stats.replayed == (0, TOKENS)


def test_the_routers_of_a_draft_have_no_slot_and_choose_for_themselves() -> None:
    model = tiny_moe("qwen3_moe")
    decoder = model.model
    decoder.draft = MtpLayer(model.config, type(decoder.layers[-1]), type(decoder.norm), 2)
    stock = type(decoder.draft.mtp_block.mlp.gate)
    replay = install(model)
    assert [r.name for r in replay.routers] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert type(decoder.draft.mtp_block.mlp.gate) is stock
    routes = Routes.replay(random_routes(replay, TOKENS, seed=0), trace=True)
    forward(model, routes=routes)
    assert routes.stats.replayed == (TOKENS,) * 2


def test_more_than_256_experts_take_two_bytes_and_replay() -> None:
    model = tiny_moe("qwen3_moe", num_experts=300)
    replay = install(model)
    ids = recorded(model)
    assert replay.dtype == ids.dtype == torch.int16
    given = random_routes(replay, TOKENS, seed=1)
    given[0, 0] = torch.tensor([299, 256])
    given[5] = -1
    routes = Routes.replay(given.to(torch.int16), trace=True)
    forward(model, routes=routes)
    kept = torch.arange(TOKENS) != 5
    assert torch.equal(routes.ids.long()[kept], given[kept])
    assert routes.stats.native == (1, 1)
    assert torch.equal(forward(model, routes=Routes.replay(ids)), forward(model))


class Widest(TorchDispatchMode):
    """Remembers the most elements that a new tensor of a wide integer dtype has."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int32, torch.int64):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_ids_are_widened_one_layer_at_a_time() -> None:
    layers = 6
    model = tiny_moe("qwen3_moe", num_hidden_layers=layers, experts_implementation="grouped_mm")
    replay = install(model)
    given = random_routes(replay, TOKENS, seed=0).to(torch.uint8)
    with Widest() as widest:
        forward(model, routes=Routes.replay(given, trace=True, compare=True))
    assert TOKENS * replay.top_k <= widest.largest < 2 * TOKENS * replay.top_k


# --- rows


def test_several_forwards_append_their_rows_in_order(model: Any) -> None:
    routes = Routes.record()
    forward(model, routes=routes)
    forward(model, INPUTS.flip(0)[:, :4], routes=routes)
    assert torch.equal(routes.ids[:TOKENS], recorded(model))
    assert torch.equal(routes.ids[TOKENS:], recorded(model, INPUTS.flip(0)[:, :4]))
    assert routes.stats.native == (TOKENS + 8,) * 2


def test_generate_records_the_prefill_and_every_decode_step(model: Any) -> None:
    routes = Routes.record()
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=[])
    answer = model.generate(INPUTS, generation_config=config, routes=routes)
    full = recorded(model, answer[:, :-1]).unflatten(0, (BATCH, LENGTH + 3))
    prefill = routes.ids[:TOKENS].unflatten(0, (BATCH, LENGTH))
    steps = routes.ids[TOKENS:].unflatten(0, (3, BATCH)).transpose(0, 1)
    assert torch.equal(torch.cat([prefill, steps], 1), full)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_missing_rows_are_routed_by_the_model_and_the_rest_as_given(model: Any, dtype: torch.dtype) -> None:
    replay = install(model)
    given = random_routes(replay, TOKENS, seed=3)
    given[4] = -1
    given[7, 1] = -1
    narrow = given.to(dtype)
    routes = Routes.replay(narrow, trace=True)
    forward(model, routes=routes)
    missing = (given == -1).all(-1)
    assert torch.equal(routes.ids.long()[~missing], given[~missing])
    assert (routes.ids != 255).all()
    # Row 4 comes before what its own choice could change in layer 0.
    assert torch.equal(routes.ids[4, 0], recorded(model)[4, 0])
    assert routes.stats.native == (1, 2)
    assert routes.stats.replayed == (TOKENS - 1, TOKENS - 2)


def test_a_replay_of_missing_rows_only_is_the_stock_forward_and_has_no_effect(model: Any) -> None:
    routes = Routes.replay(torch.full((TOKENS, 2, 2), 255, dtype=torch.uint8))
    assert torch.equal(forward(model, routes=routes), forward(model))
    assert routes.stats.totals()["native"] == 2 * TOKENS
    with pytest.raises(ReplayError, match="no effect"):
        routes.stats.require_effect()


def test_padding_rows_are_spread_and_not_counted(model: Any) -> None:
    replay = install(model)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, 6:] = 0
    stock = forward(model, attention_mask=mask)
    aligned = align_padded(
        recorded(model).unflatten(0, (BATCH, LENGTH)), mask, num_experts=replay.num_experts
    )
    routes = Routes.replay(aligned.ids, padding=aligned.padding)
    output = forward(model, routes=routes, attention_mask=mask)
    # Other experts for the padding change the shapes of the experts' products, and so the last bits.
    torch.testing.assert_close(output[mask.bool()], stock[mask.bool()])
    assert routes.stats == ReplayStats(
        tuple(r.name for r in replay.routers), TOKENS, 3, (TOKENS - 3,) * 2, (0, 0), (0, 0)
    )


def test_stats_of_microbatches_add_up(model: Any) -> None:
    routes = [Routes.replay(recorded(model)) for _ in range(3)]
    for part in routes:
        forward(model, routes=part)
    total = sum((part.stats for part in routes), ReplayStats())
    assert total.tokens == 3 * TOKENS
    assert total.replayed == (3 * TOKENS,) * 2
    total.require_effect()


def test_group_limited_scores_weigh_experts_of_other_groups() -> None:
    model = tiny_moe("deepseek_v2")
    replay = install(model)
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    forward(model, routes=Routes.replay(random_routes(replay, TOKENS, seed=2)))
    hook.remove()
    assert (seen[0] > 0).all()


def test_one_group_of_experts_with_two_experts_per_token_is_one_choice() -> None:
    # The ranking of groups is a top-2 over all experts too, when there is one group.
    model = tiny_moe("deepseek_v3", n_group=1, topk_group=1)
    replay = install(model)
    given = random_routes(replay, TOKENS, seed=2)
    routes = Routes.replay(given, trace=True)
    forward(model, routes=routes)
    assert torch.equal(routes.ids.long(), given)


def test_routes_recorded_in_inference_mode_train(model: Any) -> None:
    routes = Routes.record()
    with torch.inference_mode():
        model(input_ids=INPUTS, routes=routes)
    assert len(gradients(model, [(INPUTS, routes.ids)])) == len(list(model.parameters()))
    model.zero_grad()


def test_a_saved_model_has_the_stock_architecture(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = type(tiny_moe("qwen3_moe")).from_pretrained(tmp_path)
    assert loaded.config.architectures == ["Qwen3MoeForCausalLM"]
    assert torch.equal(forward(loaded), forward(model))


# --- travelling


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_three_microbatches_in_flight_with_recompute_for_every_experts_implementation(
    family: str, implementation: str
) -> None:
    model = tiny_moe(family, experts_implementation=implementation).train()
    replay = install(model)
    batches = [(INPUTS.roll(i, 1), random_routes(replay, TOKENS, seed=i)) for i in range(3)]
    plain = one_after_the_other(model, batches)
    checkpoint_layers(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, batches), strict=True))
    native = gradients(model, [(ids, torch.full_like(routes, -1)) for ids, routes in batches])
    assert not all(torch.equal(a, b) for a, b in zip(plain, native))


def test_recompute_is_not_a_second_consumption_and_leaves_the_record_alone(model: Any) -> None:
    other = deepcopy(model).train()
    checkpoint_layers(other)
    routes = Routes.replay(recorded(model), trace=True)
    logits = other(input_ids=INPUTS, use_cache=False, routes=routes).logits
    before = routes.ids.clone()
    with torch.no_grad():
        other.model.layers[1].mlp.gate.weight.neg_()
    logits.sum().backward()
    assert torch.equal(routes.ids, before)
    assert routes.stats.totals() == {"replayed": 2 * TOKENS, "native": 0, "never_reached": 0, "padding": 0}


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_layers_in_a_checkpoint_wrapper_recompute_with_their_rows(wrapped_first: bool) -> None:
    plain = tiny_moe("qwen3_moe").train()
    replay = install(plain)
    batches = [(INPUTS.roll(i, 1), random_routes(replay, TOKENS, seed=i)) for i in range(2)]
    expected = one_after_the_other(plain, batches)
    model = tiny_moe("qwen3_moe").train()
    if not wrapped_first:
        install(model)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    install(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model, batches), strict=True))


@pytest.mark.parametrize("wrapped", [False, True], ids=["transformers", "checkpoint_wrapper"])
def test_what_a_recomputation_used_is_counted_beside_what_the_forward_used(wrapped: bool) -> None:
    model = tiny_moe("qwen3_moe").train()
    replay = install(model)
    if wrapped:
        model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    else:
        checkpoint_layers(model)
    given = [random_routes(replay, TOKENS, seed=i) for i in range(2)]
    given[0][3] = -1
    in_flight = [Routes.replay(ids, trace=True) for ids in given]
    losses = [model(input_ids=INPUTS, routes=routes).logits.sum() for routes in in_flight]
    assert [routes.stats.recomputed for routes in in_flight] == [(0, 0)] * 2

    def stray(router: Any, _: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            router._replay_rows = router._replay_rows._replace(given=random_routes(replay, TOKENS, 5)[:, 0])

    losses[1].backward()
    router = model.get_submodule("model.layers.1." + "_checkpoint_wrapped_module." * wrapped + "mlp.gate")
    router.register_forward_pre_hook(stray)
    losses[0].backward()
    sound, strayed = in_flight[1], in_flight[0]
    first = 0 if wrapped else TOKENS
    for routes in in_flight:
        assert routes.stats.recomputed == (first, TOKENS)
        assert routes.recomputed is not None
        assert torch.equal(routes.recomputed[:, 0] == routes.ids[:, 0], torch.full((TOKENS, 2), not wrapped))
    assert sound.stats.recompute_differs == (0, 0)
    sound.stats.require_effect()
    assert strayed.stats.recompute_differs[0] == 0
    assert strayed.stats.recompute_differs[1] > TOKENS // 2
    with pytest.raises(ReplayError, match=r"other experts than the forward.*model\.layers\.1\.mlp\.gate"):
        strayed.stats.require_effect()


def test_gradient_accumulation_takes_fresh_routes_for_each_microbatch(model: Any) -> None:
    replay = install(model)
    batches = [(INPUTS.roll(i, 1), random_routes(replay, TOKENS, seed=i)) for i in range(2)]
    separate = one_after_the_other(model, batches)
    model.zero_grad()
    for ids, routes in reversed(batches):
        logits = model(input_ids=ids, use_cache=False, routes=Routes.replay(routes)).logits
        logits.float().log_softmax(-1)[..., 7].sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(separate, model.parameters(), strict=True))
    model.zero_grad()


def test_the_base_model_alone_takes_routes_too(model: Any) -> None:
    ids = recorded(model)
    hidden = model.base_model(input_ids=INPUTS, routes=Routes.replay(ids)).last_hidden_state
    assert torch.equal(model.lm_head(hidden), forward(model))
    embeddings = model.get_input_embeddings()(INPUTS)
    assert torch.equal(model(inputs_embeds=embeddings, routes=Routes.replay(ids)).logits, forward(model))


# --- refusals


def test_routes_are_consumed_by_one_forward(model: Any) -> None:
    routes = Routes.replay(recorded(model))
    forward(model, routes=routes)
    with pytest.raises(ReplayError, match="consumed: a forward has replayed them"):
        forward(model, routes=routes)


def test_a_forward_that_failed_has_consumed_nothing(model: Any) -> None:
    routes = Routes.replay(recorded(model))

    def fail(*_: Any) -> None:
        raise MemoryError

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        forward(model, routes=routes)
    hook.remove()
    forward(model, routes=routes)
    assert routes.stats.replayed == (TOKENS,) * 2


def test_a_layer_run_twice_in_one_forward_is_refused_by_name() -> None:
    model = tiny_moe("qwen3_moe")
    install(model)
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ReplayError, match=r"layers\.0\.mlp\.gate took its rows twice"):
        forward(model, routes=Routes.record())


def test_a_router_that_never_runs_is_refused_by_name() -> None:
    model = tiny_moe("qwen3_moe")
    replay = install(model)
    model.model.layers[1].mlp = torch.nn.Identity()
    with pytest.raises(ReplayError, match=r"layers\.1\.mlp\.gate did not run"):
        forward(model, routes=Routes.replay(random_routes(replay, TOKENS, seed=0)))


def test_rows_that_no_layer_takes_are_refused_and_counted() -> None:
    model = tiny_moe("qwen3_moe")
    replay = install(model)
    model.config.num_hidden_layers = 1
    model.model.layers = model.model.layers[:1]
    routes = Routes.replay(random_routes(replay, TOKENS, seed=0))
    with pytest.raises(ReplayError, match=r"never reached 1 of 2 routers: model\.layers\.1\.mlp\.gate"):
        forward(model, routes=routes)
    assert routes.stats.never_reached == (0, TOKENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:-1], r"shape \(17, 2, 2\).*takes \(18, 2, 2\)"),
        (lambda ids: ids[:, :1], r"shape \(18, 1, 2\)"),
        (lambda ids: ids[..., :1], r"shape \(18, 2, 1\)"),
        (
            lambda ids: ids.int().index_fill(0, torch.tensor(5), 300),
            r"token 5, layer 0: experts \[300, 300\].*0\.\.7",
        ),
        (lambda ids: torch.zeros_like(ids), "token 0, layer 0: .*an expert twice"),
        (lambda ids: ids[..., :1].expand(-1, -1, 2), "an expert twice"),
        (lambda ids: torch.cat([ids[..., :1].int(), torch.full((18, 2, 1), -1)], -1), "partly missing"),
        (lambda ids: ids.float(), "dtype torch.float32"),
    ],
    ids=[
        "token-axis",
        "layer-axis",
        "k-axis",
        "id-300",
        "zero-rows",
        "duplicates",
        "partly-missing",
        "dtype",
    ],
)
def test_routes_that_no_router_can_have_chosen_are_refused(model: Any, change: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=f"(?s){message}"):
        forward(model, routes=Routes.replay(change(recorded(model))))


@pytest.mark.parametrize("change", [torch.Tensor.tolist, torch.Tensor.numpy], ids=["list", "array"])
def test_routes_that_are_no_tensor_are_refused_with_what_makes_one(model: Any, change: Any) -> None:
    given = change(recorded(model))
    with pytest.raises(ReplayError, match=rf"{type(given).__name__}.*expected a tensor .*torch.as_tensor"):
        Routes.replay(given)


def test_a_model_without_install_ignores_routes_and_their_stats_say_so() -> None:
    routes = Routes.replay(torch.zeros(TOKENS, 2, 2, dtype=torch.uint8))
    forward(tiny_moe("qwen3_moe"), routes=routes)
    with pytest.raises(ReplayError, match=r"no forward took these routes.*install"):
        routes.stats.require_effect()


def test_rows_of_one_expert_per_token_that_nobody_filled_are_refused() -> None:
    model = tiny_moe("zaya")
    replay = install(model)
    zeros = torch.zeros(TOKENS, replay.num_moe_layers, 1, dtype=torch.int16)
    with pytest.raises(ReplayError, match=rf"all {zeros.numel()} rows .* are expert 0, as in a buffer"):
        forward(model, routes=Routes.replay(zeros))
    zeros[-1] = 1
    forward(model, routes=Routes.replay(zeros))


def test_a_shift_by_one_token_shows_in_the_digests_of_what_was_used(model: Any) -> None:
    sent = recorded(model)
    routes = Routes.replay(sent.roll(1, 0), trace=True)
    forward(model, routes=routes)
    assert route_digest(routes.ids) != route_digest(sent)
    assert torch.equal(row_digests(routes.ids)[1:], row_digests(sent)[:-1])


def test_a_router_that_sees_other_tokens_than_the_call_is_refused_by_name() -> None:
    model = tiny_moe("qwen3_moe")
    replay = install(model)

    def half(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0][:4],)

    model.model.layers[1].mlp.gate.register_forward_pre_hook(half)
    with pytest.raises(ReplayError, match=r"layers\.1\.mlp\.gate sees 4 tokens, its routes have 18"):
        forward(model, routes=Routes.replay(random_routes(replay, TOKENS, seed=0)))


def test_ids_that_no_routes_hold_are_refused_with_what_holds_them(model: Any) -> None:
    ids = recorded(model)
    for given in (ids, ids.tolist()):
        with pytest.raises(
            ReplayError, match=rf"a {type(given).__name__}; pass routes=Routes\.replay\(ids\)"
        ):
            forward(model, routes=given)


def test_nothing_recorded_is_refused(model: Any) -> None:
    with pytest.raises(ReplayError, match="no routes recorded"):
        _ = Routes.record().ids
    with pytest.raises(ReplayError, match="need input_ids or inputs_embeds"):
        model(attention_mask=torch.ones(1, 1), routes=Routes.record())
