"""What is done with each command and each fenced block of the documents: run, or only read, and why.

`python tests/docs_plan.py` prints the list; what is not in it fails tests/unit/test_docs_commands.py.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from docs_pages import PAGES, ROOT, Command, blocks, commands


@dataclass(frozen=True)
class Run:
    """It is run, in a folder with the recipes that a reader writes and runs of two steps in runs/{mine,a,b}.

    `more` makes it short, `instead` replaces words.
    """

    more: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False

    def words(self, command: Command) -> list[str]:
        return [*(self.instead.get(word, word) for word in command.words), *self.more]


@dataclass(frozen=True)
class By:
    """Another test runs it: `test` is a file, or a page that has the same command."""

    test: str


@dataclass(frozen=True)
class Read:
    """It is only read, for a reason: options, keys and files that it names have to exist."""

    why: str


Decision = Run | By | Read

DEMO = (
    "policy.train_global_batch_size=16",
    "policy.model.config.hidden_size=32",
    "policy.model.config.moe_intermediate_size=32",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=1",
    "warm_start.enabled=false",
    "data.train_size=64",
    "data.validation_size=4",
)
SHORT = ("grpo.max_num_steps=1", "warm_start.steps=1", "validation.at_start=false", "validation.at_end=false")
AGAIN = ("overwrite=true", "grpo.max_num_steps=1")  # in the run directory of the run that is there
TESTS, RELEASES, GPU, CLUSTER = (
    "runs tests",
    "takes packages from a registry",
    "needs a GPU",
    "needs a cluster",
)
VLLM, SGLANG = "needs vLLM", "needs SGLang"

COMMANDS: dict[str, dict[str, Decision]] = {
    "CONTRIBUTING.md": {
        "make check": Read(TESTS),
        "make docs": By("tests/unit/test_docs_site.py"),
        "make test": Read(TESTS),
    },
    "README.md": {
        "make demo": By("tests/slow/test_recipes.py"),
        "make test": Read(TESTS),
        "headrace train mine.yaml": Run(AGAIN),
        "headrace eval runs/mine": Run(),
        "headrace report runs/mine": Run(),
        "headrace dashboard runs": By("docs/dashboard.md"),
        "headrace doctor": By("docs/get_started.md"),
    },
    "docs/algorithms.md": {"headrace train demo_moe": Run(DEMO)},
    "docs/asynchrony.md": {"headrace train recipe.yaml": Run((*AGAIN, "grpo.max_num_steps=2"))},
    "docs/bring_your_own.md": {
        name: By("tests/parity/test_bring_your_own.py")
        for name in ("headrace data preview data.yaml", "headrace train", "python train.py")
    },
    "docs/cluster.md": {"headrace train RECIPE.yaml": Read(CLUSTER)},
    "docs/dashboard.md": {"headrace dashboard runs": Run(("--port", "0")), "headrace report runs/a": Run()},
    "docs/engines.md": {
        "pip install": Read(RELEASES),
        "headrace train recipe.yaml generation.backend=vllm": Read(VLLM),
        "headrace train recipe.yaml generation.backend=sglang": Read(SGLANG),
        "python -m sglang.launch_server": Read(SGLANG),
    },
    "docs/get_started.md": {
        "pip install": Read(RELEASES),
        "headrace doctor": Run(),
        "headrace recipes": Run(),
        "headrace train demo_moe": Run(DEMO),
        "headrace report runs/demo": Run(),
        "headrace eval runs/demo": Run(),
        "headrace dashboard runs": By("docs/dashboard.md"),
        "headrace config": Run(),
        "headrace init mine": Run(),
        "cd mine": Run(),
        "headrace train recipe.yaml": Run(SHORT),
        "headrace data preview recipe.yaml": Run(),
        "headrace plan --memory": By("tests/unit/test_docs_models.py"),
        "headrace train mine.yaml": Read(GPU),
        "headrace train mine.yaml policy.workers": Read(GPU),
        "headrace train mine.yaml data_plane.impl=transfer_queue": Read(CLUSTER),
    },
    "docs/models.md": {
        "pip install": Read(RELEASES),
        "headrace train mine.yaml policy.lora.rank=16 policy.lora.alpha=32": By(
            "tests/unit/test_docs_models.py"
        ),
        "headrace train mine.yaml policy.lora.rank=16 'policy.lora.targets": Run(AGAIN),
        "headrace export runs/mine": Run(),
        "headrace train demo_moe run_dir=demo_base": Run(DEMO),
        "headrace export demo_base": Run(),
        "headrace train demo_moe run_dir=demo_lora": Run(tuple(key for key in DEMO if "model" not in key)),
        "headrace plan --memory": By("tests/unit/test_docs_models.py"),
        "headrace train mine.yaml policy.optimizer.kind=adamw_8bit": Read("needs torchao"),
    },
    "docs/operations.md": {
        "pip install": Read(RELEASES),
        "headrace train demo_moe run_dir=runs/watched": Run((*DEMO, "logging.prometheus_port=0")),
        "headrace train demo_moe run_dir=runs/traced": Run(DEMO),
    },
    "docs/packing.md": {"headrace plan": Run()},
    "docs/parallelism.md": {"headrace train demo_moe": Run(DEMO)},
    "docs/performance.md": {
        "make bench": Read("takes twenty minutes"),
        "headrace bench codec local_store": Run(("--quick",), slow=True),
        "headrace bench planner --target": By("tests/unit/test_bench.py"),
        "headrace bench --save": Read("renews the figures of the checkout"),
        "python benchmarks/plot.py": By("tests/unit/test_docs_performance.py"),
    },
    "docs/router_replay.md": {
        "python examples/router_replay_kl.py run": Run(
            (*DEMO, "warm_start.steps=2"), {"$seed": "0", "/tmp/r3": "r3"}, slow=True
        ),
        "python examples/router_replay_kl.py plot": Run(
            instead={"/tmp/r3": "r3", "docs/router_replay_kl.png": "kl.png"}, slow=True
        ),
    },
    "docs/step_recorder.md": {
        "headrace record-step": Run(instead={"12": "2"}),
        "headrace replay-step step12": Run(),
        "headrace replay-step step12 policy.workers=2": Run(slow=True),
    },
    "docs/troubleshooting.md": {
        "headrace doctor": By("docs/get_started.md"),
        "headrace config validate mine.yaml": Run(),
        "headrace report runs/mine": Run(),
    },
}

# Of pages whose blocks have a test of their own, that test; other snippets are run, and recipes built, by SNIPPETS.
SNIPPETS = By("tests/unit/test_docs_site.py")
BLOCKS: dict[tuple[str, str], tuple[Decision, ...]] = {
    ("README.md", ""): (Read("figures of the demo with seed 0"), By("tests/unit/test_readme.py")),
    ("README.md", "python"): (By("tests/unit/test_readme.py"),),
    **{
        (f"docs/add_a_{what}.md", language): (By("tests/unit/test_docs_add.py"),)
        for what in ("column", "generator", "loss", "store")
        for language in ("diff", "python", "text")
    },
    **{
        ("docs/bring_your_own.md", language): count * (By("tests/parity/test_bring_your_own.py"),)
        for language, count in {"yaml": 6, "python": 5, "csv": 1}.items()
    },
    ("docs/cluster.md", "dockerfile"): (Read("needs Docker"),),
    ("docs/cluster.md", "python"): (By("tests/unit/test_docs_cluster.py"),),
    ("docs/cluster.md", ""): (By("tests/unit/test_docs_cluster.py"),),
    ("docs/engines.md", "text"): (
        Read("a drawing"),
        Read("figures of one run; tests/unit/test_mismatch_guard.py makes such messages"),
    ),
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def decision_on(command: Command) -> Decision | None:
    """Return what the list says of a command; the longest beginning that fits counts."""
    found = COMMANDS.get(name_of(command.page), {})
    fitting = [start for start in found if command.line.startswith(start)]
    return found[max(fitting, key=len)] if fitting else None


def plan(page: Path) -> list[tuple[str, Decision | None]]:
    """Return the commands of a page and its other blocks by their first lines, each with what is done with it."""
    found = [(command.line, decision_on(command)) for command in commands(page)]
    for language in {block.language for block in blocks(page)} - {"bash"}:
        same = [block.text.strip().partition("\n")[0] for block in blocks(page) if block.language == language]
        known = len(same) * (SNIPPETS,) if language in ("python", "yaml", "text") else ()
        listed = BLOCKS.get((name_of(page), language), known)
        found += [(first, listed[at] if at < len(listed) else None) for at, first in enumerate(same)]
    return found


def in_words(decision: Decision | None) -> str:
    match decision:
        case Run():
            return "run, slow" if decision.slow else "run"
        case By():
            return f"run by {decision.test}"
        case Read():
            return f"read: {decision.why}"
    return "NOTHING"


if __name__ == "__main__":
    for page in PAGES:
        for what, decision in plan(page):
            sys.stdout.write(f"{name_of(page)}: {in_words(decision)}: {what}\n")
