"""The field table: the only place where a column is declared.

A FieldSpec says what a column is (one value per token, per sample, or an object), which dtypes it takes, what
pads it, who produces it and who reads it. Every field list, pad value and dtype check in headrace derives from
`FIELDS`; no other module names the columns of a stage. `declare` adds columns of your own. A column that is not in
the table is allowed everywhere and travels as it is: dense stays dense, nested stays nested, objects are encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Literal

import torch

from headrace.errors import SchemaError
from headrace.utils.arguments import names_list

Layout = Literal["padded", "jagged"]

# Keys of KVBatchMeta.extra_info.
MICRO_BATCH_INDICES = "micro_batch_indices"
MICRO_BATCH_LENGTHS = "micro_batch_lengths"
ELEM_COUNTS_PER_GB = "elem_counts_per_gb"
GLOBAL_FORWARD_PAD_SEQLEN = "global_forward_pad_seqlen"
PAD_TO_MULTIPLE = "pad_to_multiple"
CLAIM = "claim"

# Columns that code names one by one.
INPUT_IDS = "input_ids"
INPUT_LENGTHS = "input_lengths"
SAMPLE_MASK = "sample_mask"
TOKEN_MASK = "token_mask"
SAMPLE_ID = "sample_id"
"""Beside the columns of a training batch, never in the store, whose rows are named by it."""
ROUTED_EXPERTS_FIELD = "routed_experts"
# Beside it in a batch, made where the batch is, of the samples' ids: no store holds it.
ROUTE_SALTS = "route_salts"
PREV_UNFILTERED_LOGPROBS = "prev_unfiltered_logprobs"
MEAN_ADVANTAGES = "mean_advantages"
TOKEN_WEIGHT_VERSION = "token_weight_version"

UNFILTERED_LOGPROBS = "unfiltered_logprobs"
"""Not stored: what a forward gives beside its logprobs, those at the same temperature without top-k and top-p."""


class Kind(StrEnum):
    """What one row of a column holds."""

    PER_TOKEN = "per_token"
    """(L, ...) per sample, L = the sample's sequence length; jagged on the wire."""
    PER_SAMPLE = "per_sample"
    """A scalar per sample: (N,) for a batch."""
    OBJECT = "object"
    """A Python value made of None, bool, int, float, str, bytes, list and dict; encoded as msgpack."""


class Stage(StrEnum):
    """A step of the loop that produces or reads columns."""

    ROLLOUT = "rollout"
    PREV_LOGPROBS = "prev_logprobs"
    REFERENCE_LOGPROBS = "reference_logprobs"
    ADVANTAGES = "advantages"
    TRAIN = "train"
    LOG = "log"


@dataclass(frozen=True)
class FieldSpec:
    """The declaration of one column.

    `dtype` is what headrace itself writes, `accepts` what a put may carry (a column keeps the dtype it was put
    with). `pad` fills padded layouts; the string "pad_token" stands for the tokenizer's pad id. `trailing_dims`
    counts the dimensions after the token dimension. `broadcast` allows one value per sample in a per-token
    column: the value holds for all tokens of the row, and N numbers travel in place of N x L. An `optional` column
    is in no stage's list; who wants it asks for it by name.

    Raises:
        SchemaError: tensors without a dtype, or objects with one.
    """

    name: str
    kind: Kind
    dtype: torch.dtype | None = None
    accepts: frozenset[torch.dtype] = frozenset()
    """Empty: `dtype` alone."""
    pad: int | float | Literal["pad_token"] = 0
    producer: Stage = Stage.ROLLOUT
    consumers: frozenset[Stage] = frozenset({Stage.TRAIN})
    trailing_dims: int = 0
    broadcast: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        if (self.kind is Kind.OBJECT) != (self.dtype is None):
            raise SchemaError(
                f"column '{self.name}' is declared as {self.kind.value} with dtype={self.dtype}; give columns of "
                "tensors a dtype, and columns of objects none"
            )
        if self.dtype is not None and not self.accepts:
            object.__setattr__(self, "accepts", frozenset({self.dtype}))

    def refusal(self, dtype: torch.dtype) -> SchemaError:
        """Return the error for a column of tensors with a dtype that is not accepted."""
        wanted = ", ".join(sorted(str(d) for d in self.accepts)) or "objects (numpy array of dtype object)"
        return SchemaError(
            f"column '{self.name}' is declared as {self.kind.value} and takes {wanted}; got {dtype}. "
            f"Cast it to {self.dtype or 'an object array'} before the put, or use an undeclared column name."
        )


_INTEGERS = frozenset({torch.int64, torch.int32})
_FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_MASKS = frozenset({torch.bool, torch.uint8}) | _INTEGERS | _FLOATS
_FORWARD = frozenset({Stage.PREV_LOGPROBS, Stage.REFERENCE_LOGPROBS, Stage.TRAIN})
_ADVANTAGES = frozenset({Stage.ADVANTAGES})

_floats = partial(FieldSpec, kind=Kind.PER_TOKEN, dtype=torch.float32, accepts=_FLOATS)

_TABLE = (
    FieldSpec(
        INPUT_IDS,
        Kind.PER_TOKEN,
        torch.int64,
        _INTEGERS,
        pad="pad_token",
        consumers=_FORWARD | {Stage.LOG},
    ),
    FieldSpec(INPUT_LENGTHS, Kind.PER_SAMPLE, torch.int64, _INTEGERS, consumers=_FORWARD),
    # Logprobs are aligned with the token they score: position t scores token t, position 0 is 0.
    _floats("generation_logprobs"),
    _floats("prev_logprobs", producer=Stage.PREV_LOGPROBS),
    # Without top-k and top-p, as the reference's are: the KL of the reward compares these two.
    _floats(PREV_UNFILTERED_LOGPROBS, producer=Stage.PREV_LOGPROBS, consumers=_ADVANTAGES, optional=True),
    _floats("reference_policy_logprobs", producer=Stage.REFERENCE_LOGPROBS),
    # One number per sample: the mean of its tokens' advantages, where they differ.
    _floats(MEAN_ADVANTAGES, producer=Stage.ADVANTAGES, consumers=_ADVANTAGES, broadcast=True, optional=True),
    _floats("advantages", producer=Stage.ADVANTAGES, broadcast=True),
    FieldSpec(TOKEN_MASK, Kind.PER_TOKEN, torch.uint8, _MASKS, consumers=_FORWARD),
    FieldSpec(SAMPLE_MASK, Kind.PER_SAMPLE, torch.float32, _MASKS, consumers=_FORWARD),
    # Expert ids chosen during the rollout: (L, MoE layers, k). An all-255 (uint8) or all-max row is missing.
    # Padding is not a choice of experts: models.router_replay.align spreads and marks it.
    FieldSpec(
        ROUTED_EXPERTS_FIELD,
        Kind.PER_TOKEN,
        torch.uint8,
        frozenset({torch.uint8, torch.int16, torch.uint16}),
        consumers=frozenset({Stage.PREV_LOGPROBS, Stage.TRAIN}),
        trailing_dims=2,
        optional=True,
    ),
    # Version of the weights that drew the token, -1 where none did; where weights may change inside a sample.
    FieldSpec(
        TOKEN_WEIGHT_VERSION,
        Kind.PER_TOKEN,
        torch.int32,
        _INTEGERS,
        pad=-1,
        consumers=frozenset({Stage.LOG}),
        optional=True,
    ),
    FieldSpec("message_log", Kind.OBJECT, consumers=frozenset({Stage.LOG}), optional=True),
)

FIELDS: dict[str, FieldSpec] = {}
"""Every declared column by name."""

DP_TRAIN_FIELDS: list[str] = []
"""Columns that a training step reads."""

LP_SEED_FIELDS: list[str] = []
"""Columns that a logprob forward reads."""

ROLLOUT_FIELDS: list[str] = []
"""Columns that every rollout writes in its first put."""

PROMOTE_1D_FIELDS: set[str] = set()
"""Scalar columns, which some backends carry as (N, 1)."""

PER_TOKEN_FIELDS: set[str] = set()
"""Columns with one value, or several, per token."""


def declare(*specs: FieldSpec) -> None:
    """Add columns to the table, and to every list made from it; the same declaration twice is none more.

    Declare before the policy and its workers are built: they get the table as it is then.

    >>> declare(FieldSpec("hint_mask", Kind.PER_TOKEN, torch.uint8))
    >>> "hint_mask" in DP_TRAIN_FIELDS, pad_values(7)["hint_mask"]
    (True, 0)

    Raises:
        SchemaError: a name that is declared otherwise.
    """
    for spec in specs:
        known = FIELDS.get(spec.name, spec)
        if known != spec:
            raise SchemaError(f"column '{spec.name}' is declared as {known}; got {spec}. Choose another name")
    FIELDS.update({spec.name: spec for spec in specs})
    DP_TRAIN_FIELDS[:] = _read_by(Stage.TRAIN)
    LP_SEED_FIELDS[:] = _read_by(Stage.PREV_LOGPROBS)
    ROLLOUT_FIELDS[:] = [s.name for s in FIELDS.values() if s.producer is Stage.ROLLOUT and not s.optional]
    PROMOTE_1D_FIELDS.update(s.name for s in FIELDS.values() if s.kind is Kind.PER_SAMPLE)
    PER_TOKEN_FIELDS.update(s.name for s in FIELDS.values() if s.kind is Kind.PER_TOKEN)


def _read_by(stage: Stage) -> list[str]:
    return [s.name for s in FIELDS.values() if not s.optional and stage in s.consumers]


declare(*_TABLE)


def added_fields() -> tuple[FieldSpec, ...]:
    """Return the columns that were declared beside headrace's own; processes of one run must agree on them."""
    return tuple(spec for name, spec in FIELDS.items() if name not in {own.name for own in _TABLE})


def fields_with_optional_routed_experts(fields: Sequence[str], *, enabled: bool) -> list[str]:
    """Return `fields`, with the routes column appended once when router replay is `enabled`."""
    names = list(names_list("fields", fields))
    if enabled and ROUTED_EXPERTS_FIELD not in names:
        names.append(ROUTED_EXPERTS_FIELD)
    return names


def pad_values(pad_token_id: int) -> dict[str, int | float]:
    """Return the pad value of every declared per-token column.

    >>> pad_values(7)["input_ids"]
    7
    """
    return {
        s.name: pad_token_id if s.pad == "pad_token" else s.pad
        for s in FIELDS.values()
        if s.kind is Kind.PER_TOKEN
    }
