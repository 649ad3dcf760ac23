"""Two turns: a completion without an `e` gets another try. Run: python examples/own_environment.py"""

import sys
from pathlib import Path

import headrace


class SecondTry:
    """A word with an `e` earns 1; the first one without it is asked for once more."""

    def prompts(self, split):
        letters = "abcdefgh" if split == "train" else "ijkl"
        return [headrace.Prompt(letter, (headrace.Message("user", letter * 3),)) for letter in letters]

    def step(self, prompts, conversations):
        return [self.judge(talk) for talk in conversations]

    def judge(self, talk):
        right = "e" in talk[-1].content
        if right or len(talk) > 2:
            return headrace.StepResult(float(right), correct=right)
        return headrace.StepResult(0.0, done=False, observation=(headrace.Message("user", "again"),))


def main(folder: Path, *overrides: str) -> headrace.RunResult:
    settings = (
        f"run_dir={folder}",
        "grpo.max_rollout_turns=2",
        "generation.max_new_tokens=4",
        "warm_start.enabled=false",
        "policy.optimizer.lr=1e-3",
        "grpo.max_num_steps=20",
    )
    return headrace.train("demo_moe", environment=SecondTry, overrides=[*settings, *overrides])


if __name__ == "__main__":
    print(main(Path("runs/own_environment"), *sys.argv[1:]).metrics["rollout/turns_mean"])
