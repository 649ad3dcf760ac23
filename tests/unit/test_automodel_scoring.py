"""Logprobs in chunks: the right numbers, the right gradients, and no [tokens, vocabulary] tensor."""

import logging
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ConfigError
from headrace.models.automodel.scoring import (
    Scoring,
    TokenScorer,
    TokenScores,
    output_head,
)
from reference_training import gradients, largest_gap, naive_logprobs
from tiny_models import VOCAB_SIZE, tiny_batch, tiny_model

LENGTHS = [9, 4, 12, 7]
FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.6},
]


def _scores(model: Any, data: BatchedDataDict, **scoring: Any) -> TokenScores:
    return TokenScorer(model, Scoring(**scoring))(data, with_entropy=True)


@pytest.mark.parametrize("filters", FILTERS)
def test_scores_are_those_of_the_filtered_distribution(filters: dict[str, Any]) -> None:
    model, data = tiny_model("llama"), tiny_batch(LENGTHS)
    with torch.no_grad():
        ours = _scores(model, data, chunk_tokens=5, **filters).logprobs
        truth = naive_logprobs(model, data["input_ids"], data["input_lengths"], **filters)
    torch.testing.assert_close(ours, truth, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "qwen2", "gemma3", "opt"])
def test_the_heads_of_families_that_scale_or_cap_logits_are_chunked_rightly(name: str) -> None:
    model, data = tiny_model(name, attn_implementation="eager"), tiny_batch(LENGTHS)
    assert output_head(model) is not None
    with torch.no_grad():
        ours = _scores(model, data, chunk_tokens=3).logprobs
        truth = naive_logprobs(model, data["input_ids"], data["input_lengths"])
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.8, "top_k": 12}])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_chunks_give_the_gradients_of_the_whole(name: str, filters: dict[str, Any]) -> None:
    results = []
    for chunk in (4, 1000):
        model, data = tiny_model(name), tiny_batch(LENGTHS)
        scores = _scores(model, data, chunk_tokens=chunk, **filters).logprobs
        (scores * data["advantages"]).sum().backward()
        results.append(gradients(model))
    assert largest_gap(results[0], results[1]) < 1e-4


def test_chunked_gradients_match_plain_autograd_over_all_logits() -> None:
    ours, plain, data = tiny_model("qwen2"), tiny_model("qwen2"), tiny_batch(LENGTHS)
    (_scores(ours, data, chunk_tokens=4).logprobs * data["advantages"]).sum().backward()
    truth = naive_logprobs(plain, data["input_ids"], data["input_lengths"])
    (truth * data["advantages"]).sum().backward()
    assert largest_gap(gradients(ours), gradients(plain)) < 1e-4


def test_entropy_is_that_of_the_filtered_distribution() -> None:
    model, data = tiny_model("llama"), tiny_batch(LENGTHS)
    entropy = _scores(model, data, chunk_tokens=5, temperature=0.7, top_k=6).entropy
    assert entropy is not None
    assert not entropy.requires_grad
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):
            logits = model(input_ids=data["input_ids"][row, :length][None], use_cache=False).logits[0] / 0.7
            for t in range(1, length):
                kept = logits[t - 1].topk(6).values.softmax(0)
                assert float(entropy[row, t]) == pytest.approx(float(-(kept * kept.log()).sum()), abs=1e-5)
            assert not entropy[row, length:].any()


class _LargestOutput(TorchDispatchMode):
    """Remembers the most rows of any tensor whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == VOCAB_SIZE:
                self.rows = max(self.rows, value.numel() // VOCAB_SIZE)
        return out


@pytest.mark.parametrize("fused", [False, True])
def test_no_more_than_a_chunk_of_scores_is_ever_held_forward_or_backward(fused: bool) -> None:
    # Of hidden size 32, so that no weight or its gradient looks like scores.
    model, data, chunk = tiny_model("llama"), tiny_batch([40] * 8), 16
    scorer = TokenScorer(model, Scoring(chunk_tokens=chunk, fused=fused))
    with _LargestOutput() as seen:
        scores = scorer(data, with_entropy=True).logprobs
    forward_rows = seen.rows
    with _LargestOutput() as seen:
        scores.sum().backward()
    weight_rows = 32  # the head's transposed weight and its gradient
    assert forward_rows <= max(chunk, weight_rows)
    assert 0 < seen.rows <= max(chunk, weight_rows)


def test_saved_tensors_between_forward_and_backward_hold_no_scores() -> None:
    model, data = tiny_model("llama"), tiny_batch([40] * 8)
    scorer = TokenScorer(model, Scoring(chunk_tokens=16))
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 1 and x.shape[-1] == VOCAB_SIZE:
            saved.append(x.numel() // VOCAB_SIZE)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        scorer(data, with_entropy=True)
    assert max(saved, default=0) <= 32


class _DoubledLogits(torch.nn.Module):
    """A causal LM whose head does something that no config key tells."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model("llama")
        self.config, self.base_model = self.inner.config, self.inner.base_model
        self.get_output_embeddings = self.inner.get_output_embeddings

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, **kwargs: Any) -> Any:
        out = self.inner(**kwargs)
        out.logits = out.logits * 2
        return out


def test_a_head_that_is_not_understood_falls_back_to_the_models_own_logits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Of more tokens than one chunk.
    model, data = _DoubledLogits(), tiny_batch([40] * 30)
    with caplog.at_level(logging.WARNING):
        assert output_head(model) is None
    assert "logprob_chunk_tokens has no effect" in caplog.text
    with torch.no_grad():
        ours = _scores(model, data).logprobs
        truth = naive_logprobs(model, data["input_ids"], data["input_lengths"])
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-5)


def test_a_chunk_size_for_a_head_that_cannot_be_cut_is_refused_and_the_default_is_not() -> None:
    with pytest.raises(ConfigError, match=r"policy\.logprob_chunk_tokens=64 has no effect: _DoubledLogits"):
        TokenScorer(_DoubledLogits(), Scoring(chunk_tokens=64))
    assert not TokenScorer(_DoubledLogits(), Scoring()).has_head
    assert TokenScorer(tiny_model("llama"), Scoring(chunk_tokens=64)).has_head


def test_a_microbatch_without_anything_to_score_still_reaches_every_weight() -> None:
    model, data = tiny_model("llama"), tiny_batch([1, 1])
    scores = _scores(model, data).logprobs
    assert scores.shape == (2, 1)
    scores.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_bfloat16_compute_stays_near_float32_and_leaves_gradients_in_float32() -> None:
    data = tiny_batch(LENGTHS)
    exact = TokenScorer(tiny_model("qwen3_moe"), Scoring())
    model = tiny_model("qwen3_moe")
    rough = TokenScorer(model, Scoring(), "bfloat16")
    with torch.no_grad():
        truth = exact(data).logprobs
    scores = rough(data).logprobs
    scores.sum().backward()
    gap = (scores.detach() - truth).abs()[truth != 0].median()
    assert 0 < float(gap) < 0.2
    assert scores.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
