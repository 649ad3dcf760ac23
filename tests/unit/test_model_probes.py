"""What is tried out on a model before a run: that it runs, that it is causal, and that it decodes as it scores."""

from typing import Any

import pytest
import torch

from headrace.errors import ConfigError
from headrace.models.automodel.attention import PACKED_ATTENTION
from headrace.models.automodel.probes import check_causal
from headrace.models.automodel.setup import load_model, load_tokenizer
from headrace.models.generation.build import build_generator
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from tiny_models import (
    CONFIGS,
    VOCAB_SIZE,
    tiny_batch,
    tiny_generation_config,
    tiny_model,
    tiny_policy_config,
)

BERT = {
    "model_type": "bert",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA4 = {
    **CONFIGS["llama"],
    "model_type": "llama4_text",
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
}
MINIMAX = {**CONFIGS["llama"], "model_type": "minimax", "num_local_experts": 4, "num_experts_per_tok": 2}
BART = {
    "model_type": "bart",
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.2,
}


def policy_config(values: dict[str, Any]) -> Any:
    # The model's section is merged with that of a family, whose config is replaced.
    return tiny_policy_config("llama", model={"config": values})


def build_worker(values: dict[str, Any]) -> AutomodelPolicyWorker:
    cfg = policy_config(values)
    return AutomodelPolicyWorker(cfg, tiny_generation_config(), tokenizer=load_tokenizer(cfg), seed=0)


def build_engine(values: dict[str, Any]) -> Any:
    cfg = policy_config(values)
    return build_generator(tiny_generation_config(), load_model(cfg, seed=0), load_tokenizer(cfg))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            BERT,
            r"BertLMHeadModel is not causal: a later token moves .*set policy.model.config.is_decoder=true, or",
        ),
        ({**BERT, "model_type": "roberta"}, r"RobertaForCausalLM is not causal"),
        (
            {**CONFIGS["gemma3"], "use_bidirectional_attention": True},
            r"Gemma3ForCausalLM is not causal: .*; use a causal model$",
        ),
    ],
    ids=["bert", "roberta", "gemma3"],
)
def test_a_model_in_which_later_tokens_move_earlier_ones_is_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^policy\.model: {message}") as error:
        build_worker(values)
    assert "\n" not in str(error.value)


def test_the_same_family_as_a_decoder_is_taken() -> None:
    build_worker({**BERT, "is_decoder": True})


@pytest.mark.parametrize("name", CONFIGS)
def test_causal_families_pass(name: str) -> None:
    check_causal(tiny_model(name))


@pytest.mark.parametrize("attention", [PACKED_ATTENTION, "eager"])
def test_causal_models_pass_whatever_their_attention(attention: str) -> None:
    check_causal(tiny_model("llama", attn_implementation=attention))


def test_a_family_whose_base_is_the_whole_model_is_scored_in_chunks_as_by_itself() -> None:
    worker = build_worker(LLAMA4)
    assert worker._scorer.has_head
    data = tiny_batch([9, 4, 12, 7])
    logprobs = worker.get_logprobs(data)["logprobs"]
    with torch.no_grad():
        whole = worker.model(data["input_ids"][2:3]).logits.log_softmax(-1)[0, :-1]
    truth = whole.gather(-1, data["input_ids"][2, 1:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs[2, 1:], truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            MINIMAX,
            r"MiniMaxForCausalLM cannot answer prompts with a key-value cache \(ValueError: MiniMax uses",
        ),
        (BART, r"BartForCausalLM gives tokens other logprobs in generation, .* \(relative change .*\)"),
        (
            {**CONFIGS["mistral_window"], "sliding_window": -4},
            r"MistralForCausalLM cannot answer prompts with a key-value cache \(RuntimeError",
        ),
    ],
    ids=["cache of its own", "positions of its own", "window"],
)
def test_a_model_that_cannot_be_decoded_as_it_is_scored_is_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^policy\.model: {message}.*; use another model$") as error:
        build_engine(values)
    assert "\n" not in str(error.value)


def test_probes_draw_no_random_numbers_and_change_no_weights() -> None:
    plain = {
        k: v.clone() for k, v in load_model(policy_config(CONFIGS["qwen3_moe"]), seed=0).state_dict().items()
    }
    before = torch.get_rng_state()
    build_engine(CONFIGS["qwen3_moe"])
    after = build_worker(CONFIGS["qwen3_moe"]).model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(plain[name], after[name]) for name in plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_token_id": 64}, r"the model's pad_token_id=64 is beyond its vocab_size=64; lower the first"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            r"rope_type='spiral' is unknown to transformers; known: default, linear",
        ),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, r"rope_type='spiral' is unknown"),
        (
            {"hidden_act": "spiral"},
            r"policy\.model: transformers cannot build this model: config\.hidden_act=spiral is no name",
        ),
        ({"num_attention_heads": 0}, r"policy\.model\.config\.num_attention_heads=0: expected 1 or more"),
        ({"model_type": "llama", "num_attention_heads": 0}, r"num_attention_heads=0: expected 1 or more"),
        ({"decoder_sparse_step": 0}, r"policy\.model: transformers cannot build .*ZeroDivisionError"),
        (
            {"return_dict": False},
            r"policy\.model\.config: the Qwen3MoeForCausalLM .*cannot run \(AttributeError",
        ),
    ],
    ids=str,
)
def test_a_config_that_python_alone_would_refuse_is_refused_in_a_line(
    changes: dict[str, Any], message: str
) -> None:
    family = changes.get("model_type", "qwen3_moe")
    cfg = policy_config({**CONFIGS[family], **changes})
    with pytest.raises(ConfigError, match=message) as error:
        load_model(cfg, seed=0)
    assert "\n" not in str(error.value)


def test_a_model_whose_scores_are_no_numbers_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"policy\.model\.config: the GraniteForCausalLM .*scores that are no numbers"
    ):
        load_model(policy_config({**CONFIGS["granite"], "logits_scaling": 0.0}), seed=0)
