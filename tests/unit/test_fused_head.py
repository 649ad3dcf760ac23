"""The fused output head against log-softmax over whole scores."""

from itertools import product

import pytest
import torch

from headrace.models.automodel.fused_head import fused_scores, fusible_matrix

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


def test_heads_on_the_cpu_with_a_bias_or_with_hooks_take_the_plain_path() -> None:
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    assert fusible_matrix(head) is None
    assert fusible_matrix(torch.nn.Linear(WIDTH, VOCABULARY)) is None
    assert fusible_matrix(torch.nn.Identity()) is None
