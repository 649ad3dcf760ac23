"""The recipe section of the check that generator and trainer agree."""

from pydantic import PositiveFloat, PositiveInt

from headrace.utils.section import Section


class GuardConfig(Section):
    """A check that generator and trainer give the same tokens the same log-probabilities, on a few completions."""

    enabled: bool | None = None
    """Stop a run whose generator disagrees with its trainer. None: where the generator is not transformers (`hf`)."""
    every_n_steps: PositiveInt = 50
    """Steps between two checks, after the one at the start."""
    max_logprob_gap: PositiveFloat = 0.05
    """Largest mean difference of log-probabilities, over the tokens of a few completions, with which a run goes on."""
    num_prompts: PositiveInt = 4
    """Training prompts that are asked at every check, and random prompts that are asked once."""
    max_new_tokens: PositiveInt = 32
    """Tokens of a completion at most."""
