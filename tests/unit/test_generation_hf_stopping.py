import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.config import GenerationConfig
from headrace.errors import ConfigError
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.generation.stopping import StopRule
from headrace.models.tokenizers import build_character_tokenizer
from reference_generation import END, PROMPTS, TOKENIZER, endless_generator_of, generator_of, model_of

PIECES = ["<e>", "ab", "c", "xaby", "b", "a", "\n"]


def rule_for(tokenizer, *strings):
    return StopRule(torch.tensor([], dtype=torch.int64), strings, tokenizer)


def steps_until_ended(rule, ids):
    """Feed tokens one at a time, as decoding does; return how many were taken, or None."""
    for count in range(1, len(ids) + 1):
        tail = torch.tensor([ids[max(0, count - rule.window) : count]])
        if bool(rule.ended(tail)):
            return count
    return None


def word_piece_tokenizer():
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<e>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>")


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("batch_size", [3, 64])
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(batch_size):
    prompts, strings = PROMPTS * 20, ("hc", "fj", "ma", "l")
    stayed = endless_generator_of().generate(prompts, SamplingParams(30), seed=2)
    params = SamplingParams(30, stop_strings=strings)
    stopped = endless_generator_of(batch_size=batch_size).generate(prompts, params, seed=2)
    ended_by_pair = 0
    for i, ids in enumerate(stayed.token_ids):
        text = TOKENIZER.decode(ids)
        first = min((text.find(s) + len(s) for s in strings if s in text), default=None)
        answer = TOKENIZER.decode(stopped.token_ids[i])
        assert answer == text[:first]
        assert stopped.truncated[i] == (first is None)
        assert len(stopped.logprobs[i]) == len(stopped.token_ids[i])
        ended_by_pair += answer.endswith(("hc", "fj", "ma"))
    assert ended_by_pair > 3


def test_a_stop_string_may_begin_and_end_inside_longer_tokens():
    tokenizer = word_piece_tokenizer()
    assert steps_until_ended(rule_for(tokenizer, "ab"), [2, 3, 2]) == 2
    assert steps_until_ended(rule_for(tokenizer, "bc\n"), [1, 2, 1, 2, 6]) == 5
    assert steps_until_ended(rule_for(tokenizer, "byx"), [3, 3]) == 2
    assert steps_until_ended(rule_for(tokenizer, "abab"), [1, 5, 4, 2]) == 3
    assert steps_until_ended(rule_for(tokenizer, "zz"), [1, 2, 3]) is None


def test_a_stop_string_of_multi_byte_characters_may_span_byte_tokens():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("né 日本 end")
    rule = rule_for(tokenizer, "日本")
    assert steps_until_ended(rule, ids) == len("né 日本".encode())


def test_a_special_token_can_be_a_stop_string():
    tokenizer = word_piece_tokenizer()
    assert steps_until_ended(rule_for(tokenizer, "c<e>"), [2, 1, 2, 0]) == 4


def test_a_long_answer_before_a_stop_string_does_not_hide_it():
    ids = [5] * 200 + TOKENIZER.encode("hello".replace("e", "d").replace("l", "k"))
    assert steps_until_ended(rule_for(TOKENIZER, "hdkko"), ids) == 205


def test_end_of_text_comes_from_tokenizer_model_and_params_together():
    model = model_of()
    model.generation_config.eos_token_id = [6, 7]
    generator = HFGenerator(model, TOKENIZER, GenerationConfig())
    output = generator.generate(PROMPTS * 20, SamplingParams(40, stop_token_ids=(9,)), seed=0)
    last = {ids[-1] for ids, cut in zip(output.token_ids, output.truncated, strict=True) if not cut}
    assert last == {END, 6, 7, 9}
    assert all(not last & set(ids[:-1]) for ids in output.token_ids)


def test_the_tokenizers_end_of_text_ends_an_answer_and_stays_in_it():
    output = generator_of().generate(PROMPTS * 10, SamplingParams(40), seed=0)
    finished = [ids for ids, cut in zip(output.token_ids, output.truncated, strict=True) if not cut]
    assert len(finished) > 3
    assert all(ids[-1] == END and END not in ids[:-1] for ids in finished)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match=r"generation\.stop_strings"):
        generator_of().generate(PROMPTS, SamplingParams(4, stop_strings=("",)), seed=0)


def test_a_tokenizer_without_end_of_text_ends_nothing_by_itself():
    tokenizer = build_character_tokenizer("ab")
    rule = StopRule(torch.tensor([], dtype=torch.int64), (), tokenizer)
    assert rule.ended(torch.tensor([[1], [2]])).tolist() == [False, False]
