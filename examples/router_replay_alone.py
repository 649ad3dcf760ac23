"""Router replay on a Hugging Face model, alone. Run: python examples/router_replay_alone.py"""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from headrace.models.router_replay import Routes, install


def main() -> tuple[float, float]:
    """Return how far a changed model's logits are from before: with routes of its own, and with the recorded."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    install(model)
    ids = torch.randint(0, 64, (4, 32))
    routes = Routes.record()
    with torch.no_grad():
        before = model(input_ids=ids, routes=routes).logits
        # What an update does, or another precision: scores near a tie change their order.
        for router in (layer.mlp.gate for layer in model.model.layers):
            router.weight += 0.02 * torch.randn_like(router.weight)
        own = model(input_ids=ids).logits
        replayed = Routes.replay(routes.ids)
        same = model(input_ids=ids, routes=replayed).logits
    replayed.stats.require_effect()
    return (own - before).abs().mean().item(), (same - before).abs().mean().item()


if __name__ == "__main__":
    print("mean gap of logits with own routes {:.6f}, with recorded routes {:.6f}".format(*main()))
