"""Conversations as token ids, through a tokenizer's chat template.

A prompt is rendered and tokenised once. What a model generates is never tokenised again: a further turn
appends the ids of the template's text between the end of the completion and the start of the next one.

Control tokens are the template's. A message that spells one, such as `<|im_end|>`, is tokenised as those characters.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from headrace.errors import ConfigError, GenerationError
from headrace.experience.types import Message
from headrace.models.tokenizers import known_ids
from headrace.utils.arguments import is_utf8

# Begins what stands for something else while a template is rendered; in a message it is quoted as a control token is.
_MARK = "qzxquoted"
# Stands for the text of a control token in a message, which is in there in hexadecimal.
_QUOTED = re.compile(f"{_MARK}([0-9a-f]+)xzq")
# Stands for a completion, and is searched for in the result.
_COMPLETION = Message("assistant", f"{_MARK}answerxzq")

ChatTokenizer: TypeAlias = PreTrainedTokenizerBase
"""A tokenizer of Hugging Face, which has a chat template."""
_SWITCHES = "headrace_template_switches"


class UnknownText(ConfigError):
    """Text that the tokenizer has no ids for."""


def set_template_switches(tokenizer: ChatTokenizer, switches: Mapping[str, Any]) -> None:
    """Give a tokenizer's chat template these variables from now on, in place of earlier ones.

    Raises:
        ConfigError: the template does not read one of them.
    """
    if not switches and not hasattr(tokenizer, _SWITCHES):
        return
    template = tokenizer.get_chat_template(tools=switches.get("tools")) if switches else ""
    for name in switches:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"env.chat_template_kwargs.{name}: the tokenizer's chat template does not read it; remove it, or use "
                "a tokenizer whose template does (policy.tokenizer)"
            )
    setattr(tokenizer, _SWITCHES, dict(switches))


def render_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the ids of `messages` followed by the template's opening of a completion.

    Raises:
        ConfigError: the template refuses the messages or renders nothing, or the tokenizer lacks a character.
    """
    ids = _ids(tokenizer, _text(tokenizer, messages, opens_completion=True))
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
    """Return the ids between a generated completion and the next: closing, `observation`, next opening.

    `history` holds the messages before the completion. `stopped_by` is the token with which the model ended
    it, None where it did not; if the closing starts with that token, it is not repeated.

    Example: after `<|im_end|>` was generated, the ids are those of
    `"\\n<|im_start|>user\\nWrong, try again.<|im_end|>\\n<|im_start|>assistant\\n"`.

    Raises:
        ConfigError: the template refuses the roles, leaves the observation out, moves it before the completion,
            or changes the completion's closing because of it.
    """
    completed = [*history, _COMPLETION]
    roles = ", ".join(f"'{message.role}'" for message in observation)
    closing = _after_completion(_text(tokenizer, completed, opens_completion=False))
    bare = _after_completion(_text(tokenizer, completed, opens_completion=True))
    tail = _after_completion(_text(tokenizer, [*completed, *observation], opens_completion=True))
    if not tail.startswith(closing):
        raise ConfigError(
            f"the chat template is not prefix-stable: a following message of role {roles} changes how the "
            f"completion before it ends ({closing[:40]!r} becomes {tail[:40]!r}); use another role, or a "
            "tokenizer with another chat template (policy.tokenizer)"
        )
    if tail == bare:
        raise ConfigError(
            f"the chat template does not put a message of role {roles} after the completion before it, so the model "
            "would not see it there; use another role, or a tokenizer with another chat template (policy.tokenizer)"
        )
    ids = _ids(tokenizer, tail)
    return ids[1:] if stopped_by is not None and ids[:1] == [stopped_by] else ids


def text_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Return the ids of a text that stands in no template, such as a completion to learn.

    Raises:
        ConfigError: the tokenizer lacks a character.
    """
    return _ids(tokenizer, _quoted(tokenizer, text))


def check_sampled(
    tokenizer: ChatTokenizer, completions: Sequence[Sequence[int]], names: Sequence[str]
) -> None:
    """Refuse sampled ids that the tokenizer has no tokens for, which would decode to nothing.

    Raises:
        GenerationError: the first sample with another id.
    """
    known = known_ids(tokenizer)
    flat = torch.tensor(list(chain.from_iterable(completions)), dtype=torch.int64)
    if bool(((flat >= 0) & (flat < len(known))).all()) and bool(known[flat].all()):
        return
    name, bad = next(
        (n, i) for n, ids in zip(names, completions) for i in ids if not 0 <= i < len(known) or not known[i]
    )
    raise GenerationError(
        f"sample '{name}': the generator sampled id {bad}, for which the tokenizer has no token; an engine must leave "
        "such ids out (headrace.models.tokenizers.unknown_ids)"
    )


def decode_completions(
    tokenizer: ChatTokenizer, completions: Sequence[Sequence[int]], stop_token_ids: Sequence[int]
) -> list[str]:
    """Return each completion's text, without the stop token at its end and without special tokens.

    `stop_token_ids` are those beside the tokenizer's end-of-text.
    """
    stops = {*stop_token_ids, tokenizer.eos_token_id}
    bodies = [list(c[:-1] if c and c[-1] in stops else c) for c in completions]
    texts: list[str] = tokenizer.batch_decode(
        bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return texts


def _text(tokenizer: ChatTokenizer, messages: Sequence[Message], *, opens_completion: bool) -> str:
    contents = (m.content if m is _COMPLETION else _quoted(tokenizer, m.content) for m in messages)
    conversation = [{"role": m.role, "content": content} for m, content in zip(messages, contents)]
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            add_generation_prompt=opens_completion,
            tokenize=False,
            **getattr(tokenizer, _SWITCHES, {}),
        )
    except (TemplateError, ValueError) as error:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "the tokenizer has no chat template, which turns messages into a prompt; name a tokenizer that has "
                "one, such as that of the model's instruction-tuned version (policy.tokenizer.path)"
            ) from error
        roles = ", ".join(m.role for m in messages)
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the chat template refuses messages of roles {roles}: {reason}; change data.system_prompt or "
            "the environment's roles, or use a tokenizer with another chat template (policy.tokenizer)"
        ) from error
    return str(text)


def _ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    ids: list[int] = []
    # What is quoted stands at the odd places.
    for place, part in enumerate(_QUOTED.split(text)):
        # The template writes the special tokens itself.
        if place % 2:
            ids += _control_ids(tokenizer, _unquoted(part))
        elif part:
            ids += tokenizer(part, add_special_tokens=False)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        shown = _QUOTED.sub(lambda match: _unquoted(match[1]), text)
        raise UnknownText(
            f"the tokenizer does not know a character of {shown[:80]!r}, so the model could not tell it from "
            "others; add it to policy.tokenizer.characters, or use another tokenizer (policy.tokenizer.path)"
        )
    return ids


def _quoted(tokenizer: ChatTokenizer, text: str) -> str:
    if not is_utf8(text):
        half = next(letter for letter in text if not is_utf8(letter))
        raise UnknownText(
            f"a message holds {half!r}, half a surrogate pair, which no tokenizer takes; decode bytes with "
            "errors='replace', or remove it"
        )
    control = _control_tokens(tokenizer, len(tokenizer))
    return control.sub(lambda match: f"{_MARK}{match[0].encode().hex()}xzq", text)


def _unquoted(hexadecimal: str) -> str:
    return bytes.fromhex(hexadecimal).decode()


def _control_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Return the ids of a control token's text as text."""
    ids = list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    each = [[i] for i in ids]
    if text in tokenizer.batch_decode(each, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        raise ConfigError(
            f"a message holds {text!r}, which the tokenizer can write as a control token only; remove it from the "
            "data, or use another tokenizer (policy.tokenizer)"
        )
    return ids


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: ChatTokenizer, size: int) -> re.Pattern[str]:
    """Return what finds the text of special tokens and of the mark, the longest first; `size` tells new tokens."""
    added = (token for token in tokenizer.added_tokens_decoder.values() if token.special)
    texts = {_MARK, *(str(token) for token in (*tokenizer.all_special_tokens, *added))} - {""}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _after_completion(text: str) -> str:
    if text.count(_COMPLETION.content) != 1:
        raise ConfigError(
            "the chat template does not write a message of role 'assistant' as it is, so a further turn "
            "cannot be appended; use a tokenizer with another chat template (policy.tokenizer), or set "
            "grpo.max_rollout_turns=1"
        )
    return text.partition(_COMPLETION.content)[2]
