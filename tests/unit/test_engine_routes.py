"""Payloads as vLLM and SGLang document them, built here, read into the wire's form."""

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data_plane.routes_codec import missing_rows
from headrace.errors import GenerationError
from headrace.models.generation.engine_routes import read_sglang, read_vllm
from headrace.models.router_replay import RouterReplay, install
from moe_families import tiny_moe

PROMPT, NEW = 5, 4
ROWS = PROMPT + NEW - 1


@pytest.fixture(scope="module")
def sparse() -> RouterReplay:
    """Two layers, both mixtures: the layer axis is the same either way."""
    return install(tiny_moe("qwen3_moe"))


@pytest.fixture(scope="module")
def mixed() -> RouterReplay:
    """Four layers, the first one dense."""
    return install(tiny_moe("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=1))


def choices(tokens: int, layers: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).random((tokens, layers, 8))
    return np.argsort(drawn, axis=-1)[..., :2].astype(np.int16)


def npy_text(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def flat_text(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


def vllm(prompt: Any, answer: Any, model: RouterReplay, **options: Any) -> torch.Tensor:
    return read_vllm(prompt, answer, model=model, prompt_tokens=PROMPT, new_tokens=NEW, **options)


def sglang(payload: Any, model: RouterReplay, **options: Any) -> torch.Tensor:
    meta = {} if payload is None else {"routed_experts": payload}
    return read_sglang(meta, model=model, prompt_tokens=PROMPT, new_tokens=NEW, **options)


@pytest.mark.parametrize("form", [lambda a: a, lambda a: a.tolist(), npy_text], ids=["numpy", "json", "npy"])
@pytest.mark.parametrize("extra", [0, 1])
def test_vllm_prompt_and_answer_are_joined_without_the_last_token(
    sparse: RouterReplay, form: Any, extra: int
) -> None:
    rows = choices(ROWS + 1, 2)
    routes = vllm(form(rows[:PROMPT]), form(rows[PROMPT : ROWS + extra]), sparse)
    assert routes.dtype == torch.uint8
    assert np.array_equal(routes.numpy(), rows[:ROWS])


@pytest.mark.parametrize("extra", [0, 1])
def test_vllm_rows_of_prompt_and_answer_together(sparse: RouterReplay, extra: int) -> None:
    rows = choices(ROWS + extra, 2)
    assert np.array_equal(vllm(None, npy_text(rows), sparse).numpy(), rows[:ROWS])


def test_vllm_rows_of_a_prefix_cache_hit_are_missing(sparse: RouterReplay) -> None:
    rows = choices(ROWS, 2)
    rows[:3] = -1
    routes = vllm(rows[:PROMPT], rows[PROMPT:], sparse)
    assert missing_rows(routes).all(1).tolist() == [True] * 3 + [False] * (ROWS - 3)


def test_vllm_answers_with_fewer_rows_miss_their_end(sparse: RouterReplay) -> None:
    rows = choices(ROWS, 2)
    routes = vllm(rows[:PROMPT], rows[PROMPT : ROWS - 2], sparse)
    assert missing_rows(routes).all(1).tolist() == [False] * (ROWS - 2) + [True] * 2


def test_sglang_ids_are_flat_int32(sparse: RouterReplay) -> None:
    rows = choices(ROWS, 2)
    assert np.array_equal(sglang(flat_text(rows), sparse).numpy(), rows)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_ids_in_an_unsigned_dtype_are_read_with_their_missing_rows(sparse: RouterReplay, dtype: str) -> None:
    rows = choices(ROWS, 2).astype(dtype)
    rows[2, 1] = np.iinfo(dtype).max
    text = base64.b64encode(rows.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
    meta = {"routed_experts": text, "routed_experts_dtype": dtype}
    read = read_sglang(meta, model=sparse, prompt_tokens=PROMPT, new_tokens=NEW)
    assert torch.equal(read, vllm(None, rows, sparse))
    assert missing_rows(read).nonzero().tolist() == [[2, 1]]
    read[2, 1], rows[2, 1] = 0, 0
    assert np.array_equal(read.numpy(), rows)


def test_vllm_rows_from_a_start_join_those_of_earlier_turns(sparse: RouterReplay) -> None:
    rows = choices(ROWS, 2).astype(np.uint8)
    alone = vllm(None, rows[3:], sparse, start=3)
    assert missing_rows(alone)[:3].all()
    assert np.array_equal(alone[3:].numpy(), rows[3:])
    earlier = vllm(None, rows, sparse)[:3]
    assert np.array_equal(vllm(None, rows[3:], sparse, start=3, earlier=earlier).numpy(), rows)
    with pytest.raises(GenerationError, match="expected 5 rows of both together, from token 3"):
        vllm(None, rows, sparse, start=3)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"routed_experts_start_len": 2}, "begins with token 2, as SGLang says.*expected 0: pass start=2"),
        (
            {"routed_experts_dtype": "int8"},
            "routed_experts_dtype is 'int8'; expected one of int32, uint16, uint8",
        ),
        ({"routed_experts_dtype": ["int32"]}, "routed_experts_dtype is"),
    ],
)
def test_what_sglang_says_of_its_routes_is_checked(
    sparse: RouterReplay, said: dict[str, Any], message: str
) -> None:
    meta = {"routed_experts": flat_text(choices(ROWS, 2)), **said}
    with pytest.raises(GenerationError, match=message):
        read_sglang(meta, model=sparse, prompt_tokens=PROMPT, new_tokens=NEW)


def test_sglang_rows_from_a_start_join_those_of_earlier_turns(sparse: RouterReplay) -> None:
    rows = choices(ROWS, 2)
    alone = sglang(flat_text(rows[3:]), sparse, start=3)
    assert missing_rows(alone).all(1).tolist() == [True] * 3 + [False] * (ROWS - 3)
    earlier = torch.from_numpy(rows[:3].astype(np.uint8))
    assert np.array_equal(sglang(flat_text(rows[3:]), sparse, start=3, earlier=earlier).numpy(), rows)


@pytest.mark.parametrize("layers", [3, 4])
def test_a_layer_axis_of_all_layers_loses_the_dense_ones(mixed: RouterReplay, layers: int) -> None:
    rows = choices(ROWS, layers)
    expected = rows[:, layers - 3 :]
    assert np.array_equal(vllm(rows[:PROMPT], rows[PROMPT:], mixed).numpy(), expected)
    if layers == 4:
        rows = rows.astype(np.int32)
        rows[:, 0] = -1  # a layer without experts
    axis = "moe" if layers == 3 else "all"
    assert np.array_equal(sglang(flat_text(rows), mixed, layers=axis).numpy(), expected)


def test_a_flat_payload_that_only_one_layer_axis_fits_needs_no_name(mixed: RouterReplay) -> None:
    rows = choices(ROWS, 4)
    assert np.array_equal(sglang(flat_text(rows), mixed).numpy(), rows[:, 1:])
    rows = choices(ROWS - 1, 3)
    assert np.array_equal(sglang(flat_text(rows), mixed, start=1)[1:].numpy(), rows)


@pytest.mark.parametrize(
    ("sent", "start", "message"),
    [
        # Two rows fewer than asked for, and two more (an engine that ignores the start).
        ((6, 4), 0, "24 rows: 8 tokens, as expected, with 3 layers, or 6 tokens with 4 layers"),
        ((8, 3), 2, "24 rows: 6 tokens, as expected, with 4 layers, or 8 tokens with 3 layers"),
    ],
)
def test_a_flat_payload_that_can_be_read_in_two_ways_is_refused_with_the_argument_that_decides(
    mixed: RouterReplay, sent: tuple[int, int], start: int, message: str
) -> None:
    with pytest.raises(GenerationError, match=f'{message}.*layers="moe" or layers="all"'):
        sglang(flat_text(choices(*sent)), mixed, start=start)
    wrong = "all" if start == 0 else "moe"
    with pytest.raises(GenerationError):
        sglang(flat_text(choices(*sent)), mixed, start=start, layers=wrong)


def test_routes_of_earlier_turns_are_taken_as_they_were_read_only(sparse: RouterReplay) -> None:
    rows = choices(ROWS, 2)
    earlier = torch.from_numpy(rows[:3].astype(np.uint8))
    for changed in (earlier.int(), earlier[:, :1]):
        with pytest.raises(
            GenerationError, match=r"earlier turns are .*expected .*\(3, 2, 2\) of torch.uint8"
        ):
            sglang(flat_text(rows[3:]), sparse, start=3, earlier=changed)


def test_a_layer_axis_that_is_neither_is_refused(mixed: RouterReplay) -> None:
    rows = choices(ROWS, 2)
    with pytest.raises(GenerationError, match="payload of 2 layers is neither"):
        vllm(rows[:PROMPT], rows[PROMPT:], mixed)
    with pytest.raises(GenerationError, match="payload of 2 layers is neither"):
        sglang(flat_text(rows), mixed)


def changed(value: int, place: tuple[int, ...] = (2, 1, 0)) -> np.ndarray:
    rows = choices(ROWS, 2).astype(np.int32)
    rows[place] = value
    return rows


def test_physical_ids_zero_rows_and_duplicates_are_refused_by_name(sparse: RouterReplay) -> None:
    for rows, message in (
        (changed(300), r"'s7', token 2, layer 1.*outside 0\.\.7.*physical"),
        (changed(0, (4,)), "'s7', token 4, layer 0.*twice.*zeros"),
        (changed(-1), "'s7', token 2, layer 1.*partly missing"),
    ):
        with pytest.raises(GenerationError, match=message):
            vllm(rows[:PROMPT], rows[PROMPT:], sparse, name="s7")
        with pytest.raises(GenerationError, match=message):
            sglang(flat_text(rows), sparse, name="s7")


def wide(value: int) -> np.ndarray:
    rows = choices(ROWS, 2).astype(np.int64)
    rows[2, 1, 0] = value
    return rows


def damaged_npy(old: str, new: str) -> str:
    content = base64.b64decode(npy_text(choices(ROWS, 2)))
    assert old.encode() in content
    return base64.b64encode(content.replace(old.encode(), new.encode())).decode()


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        (choices(PROMPT, 2), None, "enable_return_routed_experts"),
        (choices(PROMPT - 1, 2), choices(NEW - 1, 2), "prompt_routed_experts: 4 rows.*5 tokens"),
        (choices(PROMPT, 2), choices(NEW + 1, 2), "5 rows for 4 new tokens"),
        (None, choices(NEW, 2), "no prompt_routed_experts; expected 8 rows"),
        (None, choices(ROWS, 2).astype(np.float32), "dtype float32"),
        (None, choices(ROWS, 2)[0], r"shape \(2, 2\)"),
        (None, "not base64!", "not base64"),
        (None, base64.b64encode(b"something").decode(), "other than a .npy"),
        (None, base64.b64encode(b"\x93NUMPY\x01").decode(), "damaged .npy"),
        (None, damaged_npy("(8, 2, 2)", "(8, 2, 2 "), "damaged .npy"),
        (None, damaged_npy("(8, 2, 2)", "(8, 2, 02"), "damaged .npy"),
        (None, [[[1, 2], [3]]], "no array of three axes"),
        (None, wide(2**32 + 1), "sample, token 2, layer 1: expert 4294967297 is no id of 32 bits"),
        (None, wide(-(2**32) - 1).tolist(), "expert -4294967297 is no id"),
        (None, wide(1).astype(np.uint64) + np.uint64(2**63), "is no id of 32 bits"),
    ],
)
def test_what_is_not_a_vllm_payload_is_refused(
    sparse: RouterReplay, prompt: Any, answer: Any, message: str
) -> None:
    with pytest.raises(GenerationError, match=message):
        vllm(prompt, answer, sparse)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "--enable-return-routed-experts"),
        ("%%%", "not base64"),
        (flat_text(choices(ROWS, 2).reshape(-1)[:-1]), "31 ids"),
        (flat_text(choices(ROWS - 1, 2)), "28 ids; expected a multiple of 8 tokens"),
        ("", "0 ids"),
        (base64.b64encode(b"abc").decode(), "3 bytes; expected int32 ids of 4 bytes"),
        ([[1, 2]], "not base64"),
    ],
)
def test_what_is_not_a_sglang_payload_is_refused(sparse: RouterReplay, payload: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        sglang(payload, sparse)
