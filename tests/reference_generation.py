"""Naive truth for generation (one prompt, a full forward pass per token, no cache), and tiny models."""

import copy
import math

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3MoeConfig

from headrace.config import GenerationConfig
from headrace.models.generation.hf import HFGenerator
from headrace.models.tokenizers import build_character_tokenizer


def filtered_probabilities(logits, temperature=1.0, top_k=None, top_p=1.0):
    """Probabilities of one row as a list, by the definition: temperature, then top k, then nucleus."""
    scores = [x / temperature for x in logits.double().tolist()]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    if top_k is not None:
        order = [i for i in order if scores[i] >= scores[order[min(top_k, len(order)) - 1]]]
    total = sum(math.exp(scores[i] - scores[order[0]]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and mass >= top_p:
            break
        kept.append(i)
        mass += math.exp(scores[i] - scores[order[0]]) / total
    total = sum(math.exp(scores[i] - scores[order[0]]) for i in kept)
    probabilities = [0.0] * len(scores)
    for i in kept:
        probabilities[i] = math.exp(scores[i] - scores[order[0]]) / total
    return probabilities


def next_token_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float()


def answer(model, prompt, quantiles, stop_ids=(), **filters):
    """Draw tokens at the given quantiles until a stop id; return ids, logprobs and whether it stopped."""
    tokens, logprobs = [], []
    for quantile in quantiles:
        probabilities = filtered_probabilities(next_token_logits(model, [*prompt, *tokens]), **filters)
        mass, chosen = 0.0, None
        for i, p in enumerate(probabilities):
            mass += p
            if mass > quantile:
                chosen = i
                break
        tokens.append(chosen)
        logprobs.append(math.log(probabilities[chosen]))
        if chosen in stop_ids:
            return tokens, logprobs, True
    return tokens, logprobs, False


def greedy_answer(model, prompt, limit, stop_ids=()):
    tokens, logprobs = [], []
    for _ in range(limit):
        scores = next_token_logits(model, [*prompt, *tokens]).log_softmax(-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
        if tokens[-1] in stop_ids:
            break
    return tokens, logprobs


TOKENIZER = build_character_tokenizer("abcdefghijklmnop")
END = TOKENIZER.eos_token_id
PROMPTS = [[1, 5, 6, 3], [1, 9, 3], [1, 5, 6, 7, 8, 9, 10, 3], [1, 9, 3], [1, 12, 11, 13, 14, 3], [7]]
"""Of several lengths, one of them twice."""
POSITIONS = 64

_SHAPE = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": TOKENIZER.bos_token_id,
    "eos_token_id": END,
    "pad_token_id": TOKENIZER.pad_token_id,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_CONFIGS = {
    "llama": LlamaConfig(**_SHAPE),
    "tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "sliding": MistralConfig(**_SHAPE, sliding_window=6),
    "moe": Qwen3MoeConfig(**_SHAPE, **_EXPERTS, experts_implementation="grouped_mm"),
}
FAMILIES = list(_CONFIGS)


def model_of(family="moe", seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(_CONFIGS[family])).eval()


def generator_of(family="moe", seed=0, **settings):
    return HFGenerator(model_of(family, seed), TOKENIZER, GenerationConfig(**settings))


def endless_generator_of(family="moe", seed=0, **settings):
    """A generator that knows no end-of-text token."""
    model, tokenizer = model_of(family, seed), build_character_tokenizer("abcdefghijklmnop")
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    return HFGenerator(model, tokenizer, GenerationConfig(**settings))


def quantiles_of(rows, limit, seed):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(rows, limit, generator=generator, dtype=torch.float64, device="cpu").tolist()
