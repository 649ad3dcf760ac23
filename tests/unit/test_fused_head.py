"""The fused output head: which heads it takes, and its numbers against log-softmax and the plain path."""

import weakref
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.models.automodel.fused_head import chunks_at_once, fused_scores
from headrace.models.automodel.scoring import (
    OutputHead,
    Scoring,
    TokenScorer,
    fused_matrix,
    output_head,
)
from reference_training import gradients, largest_gap
from tiny_models import tiny_batch, tiny_model

TOKENS, WIDTH, VOCABULARY = 11, 6, 37


def inputs(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (tokens,), generator=generator)


def plain_scores(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    every = (hidden.double() @ weight.double().t() * scale).log_softmax(-1)
    return every[torch.arange(len(targets)), targets].float(), -(every.exp() * every).sum(-1).float()


@pytest.mark.parametrize(("scale", "chunk"), list(product([1.0, 0.7], [1, 4, 11, 100])))
def test_scores_entropies_and_gradients_are_those_of_log_softmax(scale: float, chunk: int) -> None:
    hidden, weight, targets = inputs()
    logprobs, entropies = fused_scores(hidden, weight, targets, scale=scale, chunk_tokens=chunk)
    truth = plain_scores(hidden, weight, targets, scale)
    torch.testing.assert_close((logprobs, entropies), truth, rtol=1e-5, atol=1e-5)
    assert not entropies.requires_grad
    pull = torch.linspace(-1, 2, TOKENS)
    ours = torch.autograd.grad((logprobs * pull).sum(), (hidden, weight))
    theirs = torch.autograd.grad((truth[0] * pull).sum(), (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_ids_without_a_token_have_no_share_and_no_gradient_but_a_target_has(chunk: int) -> None:
    hidden, weight, _ = inputs()
    unknown = torch.tensor([0, 1, 17, VOCABULARY - 1])
    targets = torch.arange(2, 2 + TOKENS)
    targets[3] = VOCABULARY - 1
    logprobs, entropies = fused_scores(
        hidden, weight, targets, scale=0.7, chunk_tokens=chunk, unknown_ids=unknown
    )
    outside = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bool)
    outside[:, unknown] = True
    outside[3, VOCABULARY - 1] = False
    every = (hidden.double() @ weight.double().t() * 0.7).masked_fill(outside, -1e9).log_softmax(-1)
    truth = every[torch.arange(TOKENS), targets].float()
    torch.testing.assert_close(logprobs, truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(every.exp() * every).sum(-1).float(), rtol=1e-5, atol=1e-5)
    pull = torch.linspace(-1, 2, TOKENS)
    ours = torch.autograd.grad((logprobs * pull).sum(), (hidden, weight))
    theirs = torch.autograd.grad((truth * pull).sum(), (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not ours[1][[0, 1, 17]].any()


class _ScoresAtOnce(TorchDispatchMode):
    """Notes how many chunks' scores there are whenever a product makes some."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self._live: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape == (4, VOCABULARY):
            self._live.add(out)
            self.counts.append(len(self._live))
        return out


def test_the_scores_of_one_chunk_are_gone_before_those_of_the_next_are_made() -> None:
    hidden, weight, targets = inputs(tokens=12)
    with _ScoresAtOnce() as scores:
        logprobs, _ = fused_scores(hidden, weight, targets, scale=1.0, chunk_tokens=4)
        logprobs.sum().backward()
    assert scores.counts == [1] * 5, "three chunks forward, two backward: the last one's are still there"


@pytest.mark.parametrize("chunk", [4, 100])
def test_a_second_backward_pass_gives_the_gradients_of_the_first(chunk: int) -> None:
    hidden, weight, targets = inputs()
    logprobs, _ = fused_scores(hidden, weight, targets, scale=1.0, chunk_tokens=chunk)
    first = torch.autograd.grad(logprobs.square().sum(), (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(logprobs.square().sum(), (hidden, weight))
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_no_tokens_give_no_scores_and_zero_gradients() -> None:
    hidden, weight, targets = inputs(0)
    logprobs, entropies = fused_scores(hidden, weight, targets, scale=1.0, chunk_tokens=4)
    assert (logprobs.shape, entropies.shape) == ((0,), (0,))
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_frozen_matrix_gets_no_gradient() -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(False)
    fused_scores(hidden, weight, targets, scale=1.0, chunk_tokens=4)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_under_autocast_products_are_rounded_and_gradients_keep_the_dtype_of_the_weights() -> None:
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = fused_scores(hidden, weight, targets, scale=1.0, chunk_tokens=4)
    truth, _ = plain_scores(hidden, weight, targets, 1.0)
    assert logprobs.dtype == torch.float32
    assert not torch.equal(logprobs, truth)
    torch.testing.assert_close(logprobs, truth, rtol=0.02, atol=0.05)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_a_score_that_is_not_a_number_makes_that_tokens_numbers_nan() -> None:
    hidden, weight, targets = inputs()
    broken = hidden.detach().clone()
    broken[3] = torch.nan
    logprobs, entropies = fused_scores(broken, weight, targets, scale=1.0, chunk_tokens=4)
    assert logprobs.isnan().nonzero().flatten().tolist() == [3]
    assert entropies[[0, 1, 2, 4]].isfinite().all()


def _hooked(projection: torch.nn.Linear, register: str) -> torch.nn.Linear:
    getattr(projection, register)(lambda *_: None)
    return projection


class _Louder(torch.nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(given)


def matrix(bias: bool = False) -> torch.nn.Linear:
    return torch.nn.Linear(WIDTH, VOCABULARY, bias=bias)


PLAIN = {
    "bias": OutputHead(matrix(bias=True)),
    "hook": OutputHead(_hooked(matrix(), "register_forward_hook")),
    "hook before": OutputHead(_hooked(matrix(), "register_forward_pre_hook")),
    "another module": OutputHead(torch.nn.Identity()),
    "subclass": OutputHead(_Louder(WIDTH, VOCABULARY, bias=False)),
    "softcap": OutputHead(matrix(), softcap=30.0),
    "none": None,
}


@pytest.mark.parametrize("head", PLAIN.values(), ids=PLAIN)
def test_heads_that_do_more_than_a_product_take_the_plain_path(head: OutputHead | None) -> None:
    assert fused_matrix(head, Scoring(fused=True)) is None


def test_a_head_that_is_a_matrix_is_fused_where_that_is_wanted_and_every_token_is_kept() -> None:
    head = OutputHead(matrix(), scale=0.5)
    assert fused_matrix(head, Scoring(fused=True, temperature=0.7)) is head.projection.weight
    for scoring in (Scoring(fused=True, top_k=5), Scoring(fused=True, top_p=0.9), Scoring(fused=False)):
        assert fused_matrix(head, scoring) is None
    # On a CPU, kernels would have nothing to gain.
    assert fused_matrix(head, Scoring()) is None


@pytest.mark.parametrize("name", ["llama", "granite", "cohere"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("unknown", [None, torch.tensor([0, 2, 4])], ids=["whole", "holes"])
def test_a_model_scores_alike_with_the_fused_head_and_without(
    name: str, temperature: float, unknown: torch.Tensor | None
) -> None:
    data = tiny_batch([9, 4, 12, 7])
    found = {}
    for fused in (False, True):
        model = tiny_model(name)
        scoring = Scoring(temperature=temperature, chunk_tokens=5, fused=fused, unknown_ids=unknown)
        assert (fused_matrix(output_head(model), scoring) is not None) is fused
        scores = TokenScorer(model, scoring)(data, with_entropy=True)
        (scores.logprobs * torch.linspace(-1, 2, scores.logprobs.shape[1])).sum().backward()
        assert scores.entropy is not None
        found[fused] = scores.logprobs.detach(), scores.entropy, gradients(model)
    (plain, plain_entropy, plain_gradients), (ours, entropy, our_gradients) = found[False], found[True]
    assert plain.any()
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, plain_entropy, rtol=0, atol=1e-5)
    assert largest_gap(our_gradients, plain_gradients) < 1e-4


def test_without_kernels_a_chunk_is_no_larger_than_asked_for() -> None:
    assert chunks_at_once(torch.device("cpu")) == 1
