"""Packed sequences see themselves alone, and packed, padded and single rows score alike."""

import pytest
import torch

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ConfigError
from headrace.models.automodel.attention import PACKED_ATTENTION, check_isolation, choose_attention
from headrace.models.automodel.data import Packing
from headrace.models.automodel.exchange import check_heads
from headrace.models.automodel.scoring import Scoring, TokenScorer
from moe_families import INSTALLED, tiny_moe
from reference_training import gradients, largest_gap, naive_logprobs
from tiny_models import tiny_batch, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
LENGTHS = [7, 12, 1, 3, 9, 12, 2]
PACKABLE = ["llama", "qwen2", "qwen3_moe", "mistral_window", "gemma3", "cohere"]


def _score(model: torch.nn.Module, data: BatchedDataDict, *, packed: bool, divisor: int = 1) -> torch.Tensor:
    packing = Packing(divisor, int(tiny_tokenizer().pad_token_id)) if packed else None
    return TokenScorer(model, Scoring(), packing=packing)(data).logprobs


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_and_padded_rows_score_like_single_rows(name: str) -> None:
    data = tiny_batch(LENGTHS)
    with torch.no_grad():
        truth = naive_logprobs(
            tiny_model(name, attn_implementation="eager"), data["input_ids"], data["input_lengths"]
        )
        padded = _score(tiny_model(name), data, packed=False)
        packed = _score(tiny_model(name, attn_implementation=PACKED_ATTENTION), data, packed=True)
    torch.testing.assert_close(padded, truth, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mistral_window", "gemma3"])
def test_the_masks_of_transformers_keep_packed_rows_apart_too(name: str, attention: str) -> None:
    data = tiny_batch(LENGTHS)
    with torch.no_grad():
        ours = _score(tiny_model(name, attn_implementation=PACKED_ATTENTION), data, packed=True)
        theirs = _score(tiny_model(name, attn_implementation=attention), data, packed=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_capped_attention_scores_work_in_eager_mode_and_are_refused_elsewhere() -> None:
    data = tiny_batch(LENGTHS)
    model = tiny_model("gemma2", attn_implementation="eager")
    with torch.no_grad():
        truth = naive_logprobs(model, data["input_ids"], data["input_lengths"])
        torch.testing.assert_close(_score(model, data, packed=True), truth, rtol=0, atol=1e-5)
    refused = tiny_model("gemma2", attn_implementation=PACKED_ATTENTION)
    with pytest.raises(ConfigError, match=r"capped attention scores.*attn_implementation=eager"):
        check_isolation(refused)


def test_attention_sinks_count_in_packed_rows_as_in_single_rows() -> None:
    data, scores, learnt = tiny_batch(LENGTHS), [], []
    for attention in ("eager", PACKED_ATTENTION):
        model = tiny_moe("gpt_oss", sliding_window=4, layer_types=["sliding_attention", "full_attention"])
        model.set_attn_implementation(attention)
        sinks = [layer.self_attn.sinks for layer in model.base_model.layers]
        with torch.no_grad():
            for sink in sinks:
                sink.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
        if attention == PACKED_ATTENTION:
            check_isolation(model)
            scores.append(_score(model, data, packed=True))
        else:
            scores.append(naive_logprobs(model, data["input_ids"], data["input_lengths"]))
        scores[-1].sum().backward()
        learnt.append(torch.stack([sink.grad for sink in sinks]))
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(learnt[1], learnt[0], rtol=1e-4, atol=1e-5)
    assert learnt[0].abs().min() > 0


def _with_another_second_row(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores before and after the second of the packed sequences is replaced."""
    model = tiny_model(name, attn_implementation=PACKED_ATTENTION)
    data, mixed = tiny_batch(LENGTHS, seed=1), tiny_batch(LENGTHS, seed=1)
    mixed["input_ids"][1] = tiny_batch(LENGTHS, seed=2)["input_ids"][1]
    with torch.no_grad():
        return _score(model, data, packed=True), _score(model, mixed, packed=True)


@pytest.mark.parametrize("name", [n for n in PACKABLE if n != "qwen3_moe"])
def test_changing_one_packed_sequence_leaves_the_others_bit_for_bit(name: str) -> None:
    before, after = _with_another_second_row(name)
    unchanged = [i for i in range(len(LENGTHS)) if i != 1]
    assert torch.equal(before[unchanged], after[unchanged])
    assert not torch.equal(before[1], after[1])


def test_packed_sequences_of_a_moe_model_share_nothing_but_the_shape_of_expert_products() -> None:
    # How many tokens an expert gets sets the shape, and with it the last bits, of its matrix product.
    before, after = _with_another_second_row("qwen3_moe")
    unchanged = [i for i in range(len(LENGTHS)) if i != 1]
    torch.testing.assert_close(before[unchanged], after[unchanged], rtol=0, atol=1e-5)
    assert not torch.allclose(before[1], after[1], atol=1e-2)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3_moe"])
def test_packing_does_not_change_gradients(name: str) -> None:
    data = tiny_batch(LENGTHS)
    padded, packed = tiny_model(name), tiny_model(name, attn_implementation=PACKED_ATTENTION)
    (_score(padded, data, packed=False) * data["advantages"]).sum().backward()
    (_score(packed, data, packed=True) * data["advantages"]).sum().backward()
    assert largest_gap(gradients(packed), gradients(padded)) < 1e-4


def test_the_filling_of_a_packed_row_changes_nothing() -> None:
    data = tiny_batch(LENGTHS)
    model = tiny_model("llama", attn_implementation=PACKED_ATTENTION)
    with torch.no_grad():
        filled = _score(model, data, packed=True, divisor=64)
        plain = _score(model, data, packed=True)
    torch.testing.assert_close(filled, plain, rtol=0, atol=1e-6)


def test_a_row_of_length_zero_has_no_logprobs_and_harms_no_other() -> None:
    data = tiny_batch([5, 0, 4])
    for packed, attention in ((True, PACKED_ATTENTION), (False, "sdpa")):
        model = tiny_model("llama", attn_implementation=attention)
        scores = _score(model, data, packed=packed)
        scores.sum().backward()
        assert torch.equal(scores[1], torch.zeros(5))
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_packed_scores_are_equal_in_two_runs_on_two_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        data = tiny_batch([100, 77, 120, 3, 128, 90] * 3)
        runs = []
        for _ in range(2):
            model = tiny_model("qwen2", attn_implementation=PACKED_ATTENTION)
            scores = _score(model, data, packed=True)
            (scores * data["advantages"]).sum().backward()
            runs.append((scores.detach(), gradients(model)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(runs[0][1][n], runs[1][1][n]) for n in runs[0][1])


def test_a_model_that_ignores_position_ids_in_its_mask_is_refused_for_packing() -> None:
    with pytest.raises(
        ConfigError, match=r"OPTForCausalLM does not keep packed sequences apart.*dynamic_batching"
    ):
        check_isolation(tiny_model("opt", attn_implementation="sdpa"))


@pytest.mark.parametrize("name", PACKABLE)
def test_a_model_that_keeps_packed_sequences_apart_passes_the_check(name: str) -> None:
    check_isolation(tiny_model(name, attn_implementation=PACKED_ATTENTION))


def test_a_packed_row_without_boundaries_is_refused_instead_of_leaking() -> None:
    model = tiny_model("llama", attn_implementation=PACKED_ATTENTION)
    ids = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(ConfigError, match="no sequence boundaries"):
        model(input_ids=ids, position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=False)


def test_padded_batches_go_through_transformers_own_attention() -> None:
    packed, plain = tiny_model("llama", attn_implementation=PACKED_ATTENTION), tiny_model("llama")
    ids, mask = torch.randint(5, 60, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2], dtype=torch.bool)
    with torch.no_grad():
        ours = packed(input_ids=ids, attention_mask=mask, use_cache=False).logits
        theirs = plain(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=1e-5)


def test_sdpa_becomes_the_packed_attention_for_packed_rows_only() -> None:
    assert choose_attention(CPU, torch.float32, True, "sdpa") == PACKED_ATTENTION
    assert choose_attention(CPU, torch.float32, False, "sdpa") == "sdpa"
    assert choose_attention(CPU, torch.bfloat16, True, "eager") == "eager"


def test_flash_attention_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"flash_attention_2 needs .* got device cpu"):
        choose_attention(CPU, torch.bfloat16, True, "flash_attention_2")


def test_a_model_that_attends_in_chunks_is_refused_for_packing() -> None:
    model = tiny_model("llama", attn_implementation=PACKED_ATTENTION)
    model.config.attention_chunk_size = 4
    with pytest.raises(ConfigError, match=r"LlamaConfig attends by a pattern of its own.*eager"):
        check_isolation(model)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "ranks", "message"),
    [
        (2, 2, 4, "context=4 and 2 query heads: it must divide them"),
        (6, 2, 4, "context=4 and 6 query heads"),
        (12, 4, 3, "context=3 and 4 key-value heads: one must divide the other.*policy.parallel.context"),
    ],
)
def test_heads_that_context_ranks_cannot_share_out_are_refused_by_number(
    heads: int, key_value_heads: int, ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_heads(heads, key_value_heads, ranks)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "ranks"), [(8, 8, 4), (8, 2, 4), (12, 1, 3), (12, 4, 2)]
)
def test_heads_that_context_ranks_can_share_out_pass(heads: int, key_value_heads: int, ranks: int) -> None:
    check_heads(heads, key_value_heads, ranks)


@pytest.mark.parametrize("family", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_a_family_that_cannot_do_without_a_mask_is_refused_by_name(family: str) -> None:
    if family not in INSTALLED:
        pytest.skip(f"this transformers has no {family}")
    model = tiny_moe(family)
    model.set_attn_implementation(PACKED_ATTENTION)
    with pytest.raises(ConfigError, match=f"{type(model).__name__} cannot run a packed row"):
        check_isolation(model)
