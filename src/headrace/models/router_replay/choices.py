"""Whether recorded experts are those that the trainer's routers choose: a capture that went wrong is far from them."""

from collections.abc import Iterator, Sequence

import torch

from headrace.errors import ReplayError
from headrace.models.router_replay.agreement import Agreement
from headrace.models.router_replay.diagnosis import Choices, find_cause
from headrace.models.router_replay.proof import Evidence, TracedRows

# A single layer may be further off than all of them together: one of many layers hardly moves the whole share.
_LAYER_PART = 0.5


def describe_misfit(agreement: Agreement | None, floor: float) -> str | None:
    """Return what is below the floor, or None: the share of exact choices, or in a layer less than half of `floor`."""
    if agreement is None or not (rows := int(agreement.rows.sum())):
        return None
    share = float(agreement.exact.sum()) / rows
    if share < floor:
        return (
            f"{share:.1%} of {rows} recorded choices (token x layer) are those of the trainer's own routers"
        )
    shares = agreement.exact / agreement.rows.clamp(min=1)
    low = (shares < floor * _LAYER_PART) & (agreement.rows > 0)
    if not bool(low.any()):
        return None
    layer = int(low.nonzero()[0])
    return (
        f"{float(shares[layer]):.1%} of {int(agreement.rows[layer])} recorded choices in layer {layer} are those of "
        f"the trainer's own router ({share:.1%} in all layers)"
    )


def explain_misfit(agreement: Agreement | None, floor: float, evidence: Evidence) -> str | None:
    """Return what is below the floor and the cause that fits the `evidence` best, or None."""
    misfit = describe_misfit(agreement, floor)
    if misfit is None:
        return None
    earlier = [sample.given for sample in choices_of(evidence.earlier)]
    cause = find_cause(list(choices_of(evidence.samples)), earlier)
    why = (
        "no lag, other layer, other row at hand or renaming fits better: rows of another step, or of another model"
        if cause is None
        else f"the rows are not those of their tokens: {cause.text} (so {cause.share:.1%} would fit)"
    )
    return f"{misfit}, policy.router_replay.min_exact_fraction={floor:.1%}; {why}"


def check_choices(stage: str, agreement: Agreement | None, floor: float, evidence: Evidence) -> None:
    """Refuse a stage whose recorded experts are too seldom those that its routers choose by themselves.

    Raises:
        ReplayError: a share below the floor; names the cause that fits the `evidence` best.
    """
    misfit = explain_misfit(agreement, floor, evidence)
    if misfit is not None:
        raise ReplayError(
            f"stage '{stage}': {misfit}. No weight has changed by it. Mend the engine's capture, or lower the share if "
            "the engine computes that far from the trainer"
        )


def choices_of(parts: Sequence[TracedRows]) -> Iterator[Choices]:
    """Yield the samples of microbatches, each without its last token."""
    for rows in parts:
        native = rows.given if rows.native is None else rows.native
        lengths = rows.lengths.tolist()
        for given, own in zip(torch.split(rows.given, lengths), torch.split(native, lengths)):
            yield Choices(given[:-1], own[:-1])
