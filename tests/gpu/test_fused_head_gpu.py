"""The fused output head on a CUDA device: its kernels, and whether the scorer takes it."""

import pytest
import torch

from headrace.models.automodel.fused_head import fused_scores, fusible_matrix

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


def test_a_plain_matrix_on_cuda_is_fused_and_one_with_a_bias_or_a_hook_is_not() -> None:
    head = torch.nn.Linear(8, 16, bias=False).cuda()
    assert fusible_matrix(head) is head.weight
    assert fusible_matrix(torch.nn.Linear(8, 16).cuda()) is None
    head.register_forward_hook(lambda *_: None)
    assert fusible_matrix(head) is None
