import datetime
import math
from collections import OrderedDict
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.data_plane.object_codec import decode, decode_column, encode, encode_column
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import SchemaError
from ragged_cases import DTYPES, arbitrary
from reference import same_bits

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(-5, 5), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(values)
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    again = decode(encode(value))
    assert again == value
    assert repr(again) == repr(value)


def test_floats_that_equal_nothing_come_back() -> None:
    assert math.isnan(decode(encode(float("nan"))))
    assert decode(encode([float("inf"), -0.0])) == [float("inf"), -0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_tensors_inside_objects_come_back_bit_for_bit_and_writable(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = arbitrary(shape, dtype)
    again = decode(encode({"token_ids": [tensor]}))["token_ids"][0]
    assert same_bits(again, tensor)
    again.zero_()


def test_a_transposed_tensor_and_one_with_a_gradient_come_back_as_values() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).requires_grad_()
    assert decode(encode(tensor.t())).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "<i4", ">i4", "float16", "float64"])
def test_numeric_arrays_inside_objects_come_back(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    again = decode(encode([array]))[0]
    assert again.dtype == array.dtype
    assert (again == array).all()
    again[0, 0] = 1


@pytest.mark.parametrize(
    "value", [np.float32(0.1), np.int64(7), np.bool_(True), np.str_("x"), np.uint8(200)], ids=repr
)
def test_numpy_scalars_come_back_as_python_values(value: Any) -> None:
    again = decode(encode({"reward": value}))["reward"]
    assert type(again) is type(value.item())
    assert again == value.item()


def test_media_rows_come_back() -> None:
    for row in (torch.ones(2, 3, dtype=torch.uint8), None):
        again = decode(encode(PackedTensor([row], dim_to_pack=1)))
        assert isinstance(again, PackedTensor)
        assert again.dim_to_pack == 1
        assert again.tensors[0] is None if row is None else torch.equal(again.tensors[0], row)


def test_a_message_log_survives() -> None:
    log = [
        {"role": "user", "content": "2+2?", "token_ids": torch.tensor([1, 2, 3])},
        {
            "role": "assistant",
            "content": "4",
            "token_ids": torch.tensor([4]),
            "logprobs": torch.tensor([-0.5]),
        },
    ]
    again = decode_column(encode_column("message_log", [log]))[0]
    assert [m["role"] for m in again] == ["user", "assistant"]
    assert all(torch.equal(a["token_ids"], b["token_ids"]) for a, b in zip(again, log))


class Colour(StrEnum):
    RED = "red"


def circle() -> list[object]:
    inner: list[object] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        datetime.datetime(2024, 1, 1),
        Colour.RED,
        OrderedDict(a=1),
        bytearray(b"x"),
        1j,
        lambda: None,
        np.array(["a"]),
        np.array([None]),
        np.datetime64("2024-01-01"),
        {(1, 2): 3},
        2**64,
        "\ud800",
        circle(),
        torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch._empty_affine_quantized((2,), scale=0.1, zero_point=0, dtype=torch.qint8),
        PackedTensor([None, None]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_with_column_row_sample_and_reason(value: object) -> None:
    with pytest.raises(SchemaError) as caught:
        encode_column("info", [1, [{"deep": (value,)}]], ["a_g0", "a_g1"])
    assert "column 'info', row 1 (sample 'a_g1')" in str(caught.value)


def test_the_refusal_names_the_type() -> None:
    with pytest.raises(SchemaError, match=r"builtins\.set"):
        encode_column("info", [{1}])


def test_lists_of_equal_length_make_a_flat_column() -> None:
    column = decode_column(encode_column("x", [[1, 2], [3, 4]]))
    assert (column.shape, column.tolist()) == ((2,), [[1, 2], [3, 4]])
