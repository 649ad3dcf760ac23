"""Which ids a tokenizer knows, and a tokenizer with one token per character, for small models trained from scratch."""

from collections import Counter
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from headrace.errors import ConfigError

SPECIAL_TOKENS = {
    "pad_token": "<|pad|>",
    "bos_token": "<|begin|>",
    "eos_token": "<|end|>",
    "sep_token": "<|answer|>",
    "unk_token": "<|unknown|>",
}
"""In the order of their ids, from 0; the characters follow in the order given."""

# The separator belongs to the question, with or without `add_generation_prompt`: adding a turn never changes
# what was written before it.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else sep_token }}{% endfor %}"
)


def build_character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of five special tokens and `characters`.

    The same characters give the same ids everywhere. Other characters become the unknown token; text made of
    `characters` decodes back to itself. In a chat, a message is its text followed by the separator, an
    assistant's by end-of-text.

    >>> tokenizer = build_character_tokenizer("abc")
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "cab"}], tokenize=False)
    '<|begin|>cab<|answer|>'
    >>> tokenizer.encode("cab")
    [7, 5, 6]

    Raises:
        ConfigError: no characters, or one of them twice.
    """
    repeated = [c for c, count in Counter(characters).items() if count > 1]
    if repeated or not characters:
        fault = f"holds {''.join(repeated)!r} more than once" if repeated else "is empty"
        raise ConfigError(
            f"policy.tokenizer.characters {fault}; expected each character of the task once, "
            f"got {characters!r}"
        )
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS.values(), *characters])}
    core = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL_TOKENS,
    )


def unknown_ids(tokenizer: Any, vocabulary: int) -> torch.Tensor | None:
    """Return the ids (K,) below `vocabulary` that no token has, in order; None if every id has one.

    Models have more scores than their tokenizer has tokens where the vocabulary is rounded up, and tokenizers have
    holes.
    """
    missing = (~known_ids(tokenizer, vocabulary)).nonzero().flatten()
    return missing if len(missing) else None


def vocabulary_of(model: Any) -> int:
    head = getattr(model.get_output_embeddings(), "weight", None)
    return int(model.config.get_text_config().vocab_size if head is None else head.shape[0])


def known_ids(tokenizer: Any, vocabulary: int | None = None) -> torch.Tensor:
    """Return (V,) bool: whether a token has the id; V is `vocabulary`, or else one more than the highest id."""
    ids = _ids(tokenizer, len(tokenizer))
    size = int(ids[-1]) + 1 if vocabulary is None else vocabulary
    known = torch.zeros(size, dtype=torch.bool)
    known[ids[ids < size]] = True
    return known


@lru_cache(maxsize=4)
def _ids(tokenizer: Any, size: int) -> torch.Tensor:
    """Return the ids of all tokens in order; `size` tells a tokenizer that has got tokens since."""
    return torch.tensor(sorted({*tokenizer.get_vocab().values()}), dtype=torch.int64)
