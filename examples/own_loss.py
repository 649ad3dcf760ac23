"""A loss of your own: the plain policy gradient, each token by its advantage. Run: python examples/own_loss.py"""

import sys
from pathlib import Path

import headrace


def plain_gradient(inputs, cfg):
    """(rows, tokens - 1) of loss per token; `loss.aggregation` weighs the tokens."""
    loss = -inputs.logprobs * inputs["advantages"]
    return loss, {"logprob": inputs.logprobs.detach()}


def main(folder: Path, *overrides: str) -> headrace.RunResult:
    settings = (f"run_dir={folder}", "grpo.max_num_steps=20")
    return headrace.train("demo_moe", loss=plain_gradient, overrides=[*settings, *overrides])


if __name__ == "__main__":
    print(main(Path("runs/own_loss"), *sys.argv[1:]).metrics["train/logprob"])
