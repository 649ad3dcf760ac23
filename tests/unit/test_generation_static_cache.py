import copy
import gc
import weakref
from inspect import signature
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headrace.config import GenerationConfig
from headrace.models.generation import decode_steps
from headrace.models.generation.decode_steps import PaddedPrompts, StaticSteps, decode_attention
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import SamplingParams
from reference_generation import FAMILIES, PROMPTS, TOKENIZER, generator_of, model_of

MANY = [[3 + (i * j) % 11 for j in range(1, 2 + i % 6)] for i in range(12)]


@pytest.fixture
def tight(monkeypatch):
    """A static cache of little room, so that it grows every few steps."""
    monkeypatch.setattr(decode_steps, "_SPARE", 3)
    monkeypatch.setattr(decode_steps, "_GROWTH", 1.0)


@pytest.fixture
def sizes(monkeypatch):
    """The rows and places of every static cache that is made."""
    made = []
    prepare = StaticSteps._prepare

    def noting(self, rows):
        prepare(self, rows)
        made.append((len(rows), self._capacity))

    monkeypatch.setattr(StaticSteps, "_prepare", noting)
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", [PROMPTS, MANY], ids=["few", "many"])
def test_a_static_cache_gives_the_answers_of_a_growing_one(family, prompts, tight):
    params = SamplingParams(20, temperature=1.3, top_k=9)
    growing = generator_of(family).generate(prompts, params, seed=3)
    static = generator_of(family, static_cache=True).generate(prompts, params, seed=3)
    assert static.token_ids == growing.token_ids
    assert static.truncated == growing.truncated
    for one, other in zip(static.logprobs, growing.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_static_cache_grows_by_its_spare_places_and_shrinks_to_the_rows_that_go_on(tight, sizes):
    output = generator_of("moe", static_cache=True).generate(MANY, SamplingParams(20), seed=3)
    assert len({len(ids) for ids in output.token_ids}) > 3, "rows end at different steps"
    rows = [n for n, _ in sizes[1:]]  # the first is of the check at the start
    assert max(rows) == len(MANY)
    assert min(rows) <= len(MANY) // 2
    assert max(places for _, places in sizes) <= -(-(max(map(len, MANY)) + 20) // 8) * 8


def test_a_static_cache_with_room_for_all_tokens_shrinks_to_half_of_its_rows_at_most(sizes):
    generator_of("moe", static_cache=True).generate(MANY, SamplingParams(20), seed=3)
    rows = [n for n, _ in sizes[1:]]
    assert len(rows) > 1
    assert all(2 * fewer <= more for more, fewer in pairwise(rows))


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_over_a_static_cache_is_that_of_transformers(queries):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    query, key, value = torch.randn(3, 4, queries, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    mask = torch.rand(3, 1, queries, 5) > 0.3
    mask[..., 0] = True
    ours, _ = decode_attention(module, query, key, value, mask, scaling=0.9)
    stock, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.9)
    torch.testing.assert_close(ours, stock)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        decode_attention(module, query, key, value, mask, softcap=30.0)


def test_routes_of_a_static_cache_are_those_of_a_growing_one(tight):
    outputs = [
        HFGenerator(
            model_of("moe"), TOKENIZER, GenerationConfig(static_cache=static), record_routes=True
        ).generate(MANY, SamplingParams(16), seed=5)
        for static in (True, False)
    ]
    for one, other in zip(outputs[0].routes, outputs[1].routes, strict=True):
        assert torch.equal(one, other)


def test_layers_that_drop_keys_take_no_static_cache():
    config = copy.deepcopy(model_of("moe").config)
    cache = DynamicCache(config=config)
    for name in ("sdpa", "eager"):
        config._attn_implementation = name
        assert StaticSteps.fits(cache, config)
    config._attn_implementation = "flash_attention_2"
    assert not StaticSteps.fits(cache, config)
    sliding = model_of("sliding").config
    assert not StaticSteps.fits(DynamicCache(config=sliding), sliding)


def test_a_static_cache_leaves_nothing_of_the_cache_of_the_prefill():
    model = model_of("moe")
    cache = DynamicCache(config=model.config)
    keyword = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        model(torch.tensor([[3, 4, 5], [6, 7, 8]]), **{keyword: cache}, use_cache=True)
    held = [weakref.ref(tensor) for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert len(held) > 2
    prompts = PaddedPrompts(None, 3, torch.tensor([3, 3]), torch.tensor([0, 1, 1]))
    # Its graph is captured before it returns, with whoever has the cache.
    steps = StaticSteps(lambda *_: (torch.empty(0), None), cache, prompts, model.config, 4)
    gc.collect()
    assert not any(tensor() is not None for tensor in held)
    del steps
