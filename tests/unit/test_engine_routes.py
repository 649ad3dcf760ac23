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
    assert np.array_equal(sglang(flat_text(rows), mixed).numpy(), expected)


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
    ],
)
def test_what_is_not_a_sglang_payload_is_refused(sparse: RouterReplay, payload: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        sglang(payload, sparse)
