"""Recipe sections of generators, and of the check that they agree with the trainer."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from headrace.utils.section import Section, Settings


class GuardConfig(Section):
    """A check that generator and trainer give the same tokens the same log-probabilities, on a few completions."""

    enabled: bool | None = None
    """Stop a run whose generator disagrees with its trainer. None: unless it is `hf` in place."""
    every_n_steps: PositiveInt = 50
    """Steps between two checks, after the one at the start."""
    max_logprob_gap: PositiveFloat = 0.05
    """Largest mean difference of log-probabilities, over the tokens of a few completions, with which a run goes on.
    Where the recipe asks for bfloat16, a run also goes on if rounding explains a larger one."""
    num_prompts: PositiveInt = 4
    """Training prompts that are asked at every check, and random prompts that are asked once."""
    max_new_tokens: PositiveInt = 32
    """Tokens of a completion at most."""


class SGLangConfig(Section):
    """The server of `generation.backend=sglang`."""

    url: str | None = None
    """Address of a server that runs already, such as http://10.0.0.2:30000; None: headrace starts one, and ends it."""
    args: Settings = Field(default_factory=dict)
    """Arguments of the server that headrace starts, as SGLang names them: `mem_fraction_static` for
    --mem-fraction-static; true stands for a flag."""
    python: str | None = None
    """Interpreter of the environment that SGLang is installed in; None: the one that runs headrace."""
    weights: Literal["disk", "tensor"] = "disk"
    """How new weights get there: files in `weights_dir`, or tensors of a GPU that both processes see."""
    weights_dir: str | None = None
    """Folder for weights on their way to the server, which has to see it too; None: a temporary one of this host."""
    sleep: Literal["none", "kv_cache", "all"] = "none"
    """Memory that the server gives back between rollouts: none, its cache, or its weights too."""
    timeout_s: PositiveFloat = 600.0
    """Longest time that one call may take."""
    startup_timeout_s: PositiveFloat = 600.0
    """Longest wait for a server that starts."""
