"""Experts through grouped products: stock results, repeatable gradients, and bfloat16 under autocast."""

from typing import Any

import pytest
import torch

from headrace.models.automodel.experts import GROUPED_EXPERTS
from reference_training import gradients, largest_gap
from tiny_models import tiny_model


def _model(implementation: str) -> Any:
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation(implementation)
    return model


def _run(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    logits.log_softmax(-1).gather(-1, ids[..., None]).sum().backward()
    return logits.detach(), gradients(model)


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_logits_are_those_of_transformers_bit_for_bit() -> None:
    ids = torch.randint(5, 60, (4, 16))
    stock, ours = _run(_model("grouped_mm"), ids), _run(_model(GROUPED_EXPERTS), ids)
    assert torch.equal(ours[0], stock[0])
    assert largest_gap(ours[1], stock[1]) < 1e-4


def test_gradients_of_three_experts_per_token_repeat_bit_for_bit_on_two_threads(two_threads: None) -> None:
    ids = torch.randint(5, 60, (32, 64))
    model = _model(GROUPED_EXPERTS)
    first = _run(model, ids)[1]
    for _ in range(4):
        again = _run(model, ids)[1]
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_autocast_reaches_the_experts_and_leaves_weights_and_gradients_in_float32() -> None:
    model, seen = _model(GROUPED_EXPERTS), []
    experts = next(m for name, m in model.named_modules() if name.endswith("experts"))
    experts.act_fn.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        _, grads = _run(model, torch.randint(5, 60, (4, 16)))
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(g.dtype == torch.float32 for g in grads.values())
    assert grads["model.layers.0.mlp.experts.down_proj"].abs().sum() > 0


def test_a_saved_config_does_not_name_the_implementation(tmp_path: Any) -> None:
    _model(GROUPED_EXPERTS).save_pretrained(tmp_path)
    assert "headrace" not in (tmp_path / "config.json").read_text()
