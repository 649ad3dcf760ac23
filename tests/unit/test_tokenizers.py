import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headrace.errors import ConfigError
from headrace.models.tokenizers import SPECIAL_TOKENS, build_character_tokenizer, known_ids, unknown_ids

CHARACTERS = string.ascii_lowercase + " .,!'\n\té日"
TOKENIZER = build_character_tokenizer(CHARACTERS)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_text_of_known_characters_survives_encoding_one_token_each(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_ids_are_the_special_tokens_then_the_characters_in_order():
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS.values())) == [0, 1, 2, 3, 4]
    assert TOKENIZER.encode(CHARACTERS) == list(range(5, 5 + len(CHARACTERS)))
    assert len(TOKENIZER) == 5 + len(CHARACTERS)
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (0, 1, 2)


def test_an_unknown_character_becomes_the_unknown_token():
    assert TOKENIZER.encode("aZ") == [5, TOKENIZER.unk_token_id]


def test_a_chat_is_begin_then_question_then_separator_then_answer_then_end():
    question = [{"role": "user", "content": "abc"}]
    ids = TOKENIZER.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert ids == [1, 5, 6, 7, 3]
    answered = TOKENIZER.apply_chat_template([*question, {"role": "assistant", "content": "cb"}])["input_ids"]
    assert answered == [1, 5, 6, 7, 3, 7, 6, 2]


def test_each_turn_of_a_chat_only_adds_tokens():
    roles = ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
    chat = [{"role": role, "content": f"{' ' * i}text {chr(97 + i)}\n"} for i, role in enumerate(roles)]
    before: list[int] = []
    for turns in range(1, len(chat) + 1):
        for generation_prompt in (False, True):
            ids = TOKENIZER.apply_chat_template(chat[:turns], add_generation_prompt=generation_prompt)[
                "input_ids"
            ]
            assert ids[: len(before)] == before
            before = ids


def test_a_saved_tokenizer_loads_as_a_hugging_face_tokenizer_with_everything(tmp_path):
    build_character_tokenizer(CHARACTERS).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.special_tokens_map == TOKENIZER.special_tokens_map
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.padding_side == "left"
    assert loaded.decode(loaded.encode("it's , a .\n!")) == "it's , a .\n!"
    assert set(loaded("ab")) == {"input_ids", "attention_mask"}


def test_two_builds_write_the_same_files(tmp_path):
    for name in ("one", "two"):
        build_character_tokenizer(CHARACTERS).save_pretrained(tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert "tokenizer.json" in files
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_special_tokens_can_be_left_out_of_decoded_text():
    assert TOKENIZER.decode([1, 5, 6, 3, 6, 5, 2, 0], skip_special_tokens=True) == "abba"


@pytest.mark.parametrize(("characters", "fault"), [("", "empty"), ("abca", "'a' more than once")])
def test_characters_that_give_no_clear_ids_are_refused(characters, fault):
    with pytest.raises(ConfigError, match=f"policy.tokenizer.characters .*{fault}"):
        build_character_tokenizer(characters)


def test_ids_without_a_token_are_the_holes_and_what_lies_beyond():
    tokenizer = build_character_tokenizer("ab")
    assert known_ids(tokenizer).tolist() == [True] * 7
    assert unknown_ids(tokenizer, 7) is None
    assert unknown_ids(tokenizer, 5) is None
    assert unknown_ids(tokenizer, 10).tolist() == [7, 8, 9]
    core = Tokenizer(WordLevel({"a": 0, "b": 2, "c": 5}, unk_token="a"))
    assert unknown_ids(PreTrainedTokenizerFast(tokenizer_object=core), 8).tolist() == [1, 3, 4, 6, 7]


def test_a_token_that_is_added_later_is_known():
    tokenizer = build_character_tokenizer("ab")
    assert unknown_ids(tokenizer, 9).tolist() == [7, 8]
    tokenizer.add_tokens(["c"])
    assert unknown_ids(tokenizer, 9).tolist() == [8]
