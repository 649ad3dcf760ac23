"""Conversations as token ids, through a tokenizer's chat template.

A prompt is rendered and tokenised once. What a model generates is never tokenised again: a further turn
appends the ids of the template's text between the end of the answer and the start of the next one.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from headrace.errors import ConfigError
from headrace.experience.types import Message

# Stands for an answer while a template is rendered, and is searched for in the result.
_ANSWER = "qzxanswerxzq"


class ChatTokenizer(Protocol):
    """What headrace uses of a Hugging Face tokenizer that has a chat template."""

    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Any:
        """Tokenise one text, or a list of them."""
        ...

    def batch_decode(
        self, sequences: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> list[str]:
        """Return the text of each list of ids."""
        ...

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> Any:
        """Render messages as the template's text."""
        ...


def render_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the ids of `messages` followed by the template's opening of an answer.

    Raises:
        ConfigError: the template refuses the messages or renders nothing, or the tokenizer lacks a character.
    """
    ids = _ids(tokenizer, _text(tokenizer, messages, opens_answer=True))
    if not ids:
        raise ConfigError("the chat template renders the prompt to nothing; check policy.tokenizer")
    return ids


def render_observation(
    tokenizer: ChatTokenizer,
    history: Sequence[Message],
    observation: Sequence[Message],
    *,
    stopped_by: int | None,
) -> list[int]:
    """Return the ids between a generated answer and the next: closing, `observation`, next opening.

    `history` holds the messages before the answer. `stopped_by` is the token with which the model ended the
    answer, None where it did not; if the closing starts with that token, it is not repeated.

    Example: after `<|im_end|>` was generated, the ids are those of
    `"\\n<|im_start|>user\\nWrong, try again.<|im_end|>\\n<|im_start|>assistant\\n"`.

    Raises:
        ConfigError: the template refuses the roles, leaves the observation out, moves it before the answer,
            or changes the answer's closing because of it.
    """
    answered = [*history, Message("assistant", _ANSWER)]
    roles = ", ".join(f"'{message.role}'" for message in observation)
    closing = _after_answer(_text(tokenizer, answered, opens_answer=False))
    bare = _after_answer(_text(tokenizer, answered, opens_answer=True))
    tail = _after_answer(_text(tokenizer, [*answered, *observation], opens_answer=True))
    if not tail.startswith(closing):
        raise ConfigError(
            f"the chat template is not prefix-stable: a following message of role {roles} changes how the "
            f"answer before it ends ({closing[:40]!r} becomes {tail[:40]!r}); use another role, or a "
            "tokenizer with another chat template (policy.tokenizer)"
        )
    if tail == bare:
        raise ConfigError(
            f"the chat template does not put a message of role {roles} after the answer before it, so the "
            "model would not see it there; use another role, or a tokenizer with another chat template "
            "(policy.tokenizer)"
        )
    ids = _ids(tokenizer, tail)
    return ids[1:] if stopped_by is not None and ids[:1] == [stopped_by] else ids


def decode_answers(
    tokenizer: ChatTokenizer, answers: Sequence[Sequence[int]], stop_token_ids: Sequence[int]
) -> list[str]:
    """Return each answer's text, without the stop token at its end and without special tokens."""
    stops = {*stop_token_ids, tokenizer.eos_token_id}
    bodies = [list(a[:-1] if a and a[-1] in stops else a) for a in answers]
    return tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _text(tokenizer: ChatTokenizer, messages: Sequence[Message], *, opens_answer: bool) -> str:
    conversation = [{"role": m.role, "content": m.content} for m in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=opens_answer, tokenize=False)
    except (TemplateError, ValueError) as error:
        roles = ", ".join(m.role for m in messages)
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the chat template refuses messages of roles {roles}: {reason}; change data.system_prompt or "
            "the environment's roles, or use a tokenizer with another chat template (policy.tokenizer)"
        ) from error
    return str(text)


def _ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    # The template writes the special tokens itself.
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise ConfigError(
            f"the tokenizer does not know a character of {text[:80]!r}, so the model could not tell it from "
            "others; add it to policy.tokenizer.characters, or use another tokenizer (policy.tokenizer.path)"
        )
    return ids


def _after_answer(text: str) -> str:
    if text.count(_ANSWER) != 1:
        raise ConfigError(
            "the chat template does not write a message of role 'assistant' as it is, so a further turn "
            "cannot be appended; use a tokenizer with another chat template (policy.tokenizer), or set "
            "grpo.max_rollout_turns=1"
        )
    return text.partition(_ANSWER)[2]
