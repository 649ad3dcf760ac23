"""Chat templates: what follows an answer, and templates with which a further turn cannot be appended."""

from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.experience.chat import decode_completions, render_observation, render_prompt
from headrace.experience.types import Message
from reference_experience import LETTERS, ROLE_TEMPLATE, character_tokenizer

PROMPT = (Message("system", "be"), Message("user", "hi"))
HINT = (Message("user", "no"),)

# Writes thoughts only into the last answer, and closes with a line break that the model does not generate.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] | upper }}"
    "{% if m['role'] == 'assistant' and loop.last %}think{% endif %}"
    "{{ m['content'] | trim }}{{ eos_token }}z{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
HOISTING_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}S{{ m['content'] }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'][0] | upper }}{{ m['content'] }}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
# Ends an answer with end-of-text only where nothing follows.
UNSTABLE_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] | upper }}{{ m['content'] }}"
    "{{ eos_token if loop.last else 'z' }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m['content'] }}{{ eos_token }}{% endfor %}"
)
REWRITING_TEMPLATE = "{% for m in messages %}{{ m['content'] | upper }}{{ eos_token }}{% endfor %}"


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text.replace("/", tokenizer.eos_token), add_special_tokens=False))


def test_a_prompt_ends_with_the_opening_of_an_answer() -> None:
    tokenizer = character_tokenizer()
    assert render_prompt(tokenizer, PROMPT) == encode(tokenizer, "Sbe/Uhi/A")


def test_the_token_that_stopped_an_answer_is_not_repeated() -> None:
    tokenizer = character_tokenizer()
    ids = render_observation(tokenizer, PROMPT, HINT, stopped_by=tokenizer.eos_token_id)
    assert ids == encode(tokenizer, "Uno/A")


@pytest.mark.parametrize("stopped_by", [None, 9])
def test_an_answer_that_ended_otherwise_is_closed_by_the_template(stopped_by: int | None) -> None:
    tokenizer = character_tokenizer()
    ids = render_observation(tokenizer, PROMPT, HINT, stopped_by=stopped_by)
    assert ids == encode(tokenizer, "/Uno/A")


def test_several_messages_of_an_observation_are_appended_in_order() -> None:
    tokenizer = character_tokenizer()
    observation = (Message("tool", "x"), Message("user", "no"))
    ids = render_observation(tokenizer, PROMPT, observation, stopped_by=None)
    assert ids == encode(tokenizer, "/Tx/Uno/A")


def test_what_a_template_writes_after_the_stop_token_is_appended() -> None:
    tokenizer = character_tokenizer(THINKING_TEMPLATE)
    ids = render_observation(tokenizer, PROMPT, HINT, stopped_by=tokenizer.eos_token_id)
    assert ids == encode(tokenizer, "zUno/zA")


def test_an_observation_with_special_characters_of_the_template_language_is_text() -> None:
    tokenizer = character_tokenizer()
    for mark in "{}%":
        tokenizer.add_tokens([mark])
    ids = render_observation(tokenizer, PROMPT, (Message("user", "{{x}}"),), stopped_by=None)
    assert ids == encode(tokenizer, "/U{{x}}/A")


def test_a_template_that_moves_the_observation_is_refused_by_role() -> None:
    tokenizer = character_tokenizer(HOISTING_TEMPLATE)
    with pytest.raises(ConfigError, match="does not put a message of role 'system' after the completion"):
        render_observation(tokenizer, PROMPT, (Message("system", "no"),), stopped_by=None)
    assert render_observation(tokenizer, PROMPT, HINT, stopped_by=None) == encode(tokenizer, "/Uno/A")


def test_a_template_that_changes_how_the_answer_ends_is_refused_by_role() -> None:
    with pytest.raises(ConfigError, match="not prefix-stable: a following message of role 'user' changes"):
        render_observation(character_tokenizer(UNSTABLE_TEMPLATE), PROMPT, HINT, stopped_by=None)


def test_a_role_that_the_template_raises_on_is_named_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="roles system, user, assistant, tool: no tools here"):
        render_observation(
            character_tokenizer(STRICT_TEMPLATE), PROMPT, (Message("tool", "no"),), stopped_by=None
        )


def test_a_template_that_rewrites_answers_takes_no_further_turn() -> None:
    with pytest.raises(ConfigError, match=r"role 'assistant' as it is.*grpo.max_rollout_turns=1"):
        render_observation(character_tokenizer(REWRITING_TEMPLATE), PROMPT, HINT, stopped_by=None)


def test_a_character_that_the_tokenizer_lacks_is_refused_with_the_text() -> None:
    with pytest.raises(ConfigError, match=r"not know a character of 'Uh\?i.*policy.tokenizer.characters"):
        render_prompt(character_tokenizer(ROLE_TEMPLATE), [Message("user", "h?i")])


def test_a_tokenizer_without_a_template_is_refused_as_just_that() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(
        ConfigError, match=r"the tokenizer has no chat template.*policy\.tokenizer\.path"
    ) as said:
        render_prompt(tokenizer, PROMPT)
    assert "role" not in str(said.value)


def test_a_template_that_renders_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="renders the prompt to nothing"):
        render_prompt(character_tokenizer("{% if false %}{% endif %}"), PROMPT)


def test_decoding_drops_the_stop_token_at_the_end_and_no_other() -> None:
    tokenizer = character_tokenizer()
    a, b, e = (tokenizer.convert_tokens_to_ids(c) for c in "abe")
    end = tokenizer.eos_token_id
    answers = [[a, b, end], [a, e, e], [e, a], [], [end]]
    assert decode_completions(tokenizer, answers, (e,)) == ["ab", "ae", "ea", "", ""]


def test_text_survives_encoding_and_decoding() -> None:
    tokenizer = character_tokenizer()
    assert decode_completions(tokenizer, [encode(tokenizer, LETTERS)], ()) == [LETTERS]
