"""The fused output head on a CUDA device: its kernels, and that the scorer takes it by itself."""

from collections.abc import Sequence

import pytest
import torch

from headrace.models.automodel.fused_head import chunks_at_once, fused_scores
from headrace.models.automodel.scoring import OutputHead, Scoring, fused_matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [31, 4096, 50_257])
def test_the_kernels_give_what_log_softmax_gives(dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to(dtype).cuda().requires_grad_()
    weight = torch.randn(vocabulary, 64, generator=generator).to(dtype).cuda().requires_grad_()
    targets = torch.randint(0, vocabulary, (300,), generator=generator).cuda()
    targets[0] = vocabulary - 1
    logprobs, entropies = fused_scores(hidden, weight, targets, scale=0.5, chunk_tokens=128)
    every = ((hidden @ weight.t()).double() * 0.5).log_softmax(-1)
    truth = every.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies.double(), -(every.exp() * every).sum(-1), rtol=1e-4, atol=1e-4)
    pull = torch.linspace(-1, 2, 300, device="cuda")
    ours = torch.autograd.grad((logprobs * pull).sum(), (hidden, weight))
    theirs = torch.autograd.grad((truth * pull).sum(), (hidden, weight))
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, theirs):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("holes", [range(50_000, 50_257), range(5000), (0, 7, 4095, 4096, 50_256)], ids=str)
def test_the_kernels_leave_ids_without_a_token_out(dtype: torch.dtype, holes: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to(dtype).cuda().requires_grad_()
    weight = torch.randn(50_257, 64, generator=generator).to(dtype).cuda().requires_grad_()
    unknown = torch.tensor(list(holes), device="cuda")
    targets = torch.randint(5000, 50_000, (300,), generator=generator).cuda()
    targets[0] = unknown[0]
    logprobs, entropies = fused_scores(
        hidden, weight, targets, scale=2.0, chunk_tokens=128, unknown_ids=unknown
    )
    outside = torch.zeros(300, 50_257, dtype=torch.bool, device="cuda").index_fill_(1, unknown, True)
    outside[0, targets[0]] = False
    every = ((hidden @ weight.t()).double() * 2).masked_fill(outside, -1e9).log_softmax(-1)
    truth = every.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies.double(), -(every.exp() * every).sum(-1), rtol=1e-4, atol=1e-4)
    ours = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    theirs = torch.autograd.grad(truth.sum(), (hidden, weight))
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, theirs):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < tolerance
    assert not ours[1][unknown[1:]].any()


def test_a_plain_matrix_on_cuda_is_fused_unless_that_is_switched_off() -> None:
    projection = torch.nn.Linear(8, 16, bias=False).cuda()
    head = OutputHead(projection)
    assert fused_matrix(head, Scoring()) is projection.weight
    assert fused_matrix(head, Scoring(fused=False)) is None
    assert fused_matrix(OutputHead(torch.nn.Linear(8, 16).cuda()), Scoring()) is None


def test_with_triton_the_fused_head_takes_four_chunks_at_once() -> None:
    pytest.importorskip("triton")
    assert chunks_at_once(torch.device("cuda")) == 4
