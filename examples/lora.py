"""LoRA: only low-rank matrices learn, and only they are kept and sent. Run: python examples/lora.py (needs peft)"""

import sys
from pathlib import Path

import headrace


def main(folder: Path, *overrides: str) -> headrace.RunResult:
    settings = (
        f"run_dir={folder}",
        "policy.lora.rank=8",
        "policy.optimizer.lr=2e-3",
        "grpo.max_num_steps=20",
    )
    return headrace.train("demo_moe", overrides=[*settings, *overrides])


if __name__ == "__main__":
    result = main(Path("runs/lora"), *sys.argv[1:])
    print(
        result.metrics["reward/mean"], *sorted(path.name for path in (result.checkpoint / "policy").iterdir())
    )
