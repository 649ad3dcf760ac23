"""Columns of samples as one safetensors file, whatever they hold; objects are msgpack, nothing is pickled.

A column is a tensor `values.I`; offsets of ragged rows, and of the messages of objects, are tensors `offsets.I`, which
columns share. The file's metadata says, in JSON, what is what.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headrace.data_plane.store.columns import Chunk, Form, chunk_of_leaf
from headrace.data_plane.wire import Leaf, materialize, wire_tensordict
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import place_among
from headrace.errors import ConfigError
from headrace.utils import atomic

_ABOUT = "headrace"


@dataclass(frozen=True)
class SampleColumns:
    """Columns of samples, by name, each with one row per id."""

    sample_ids: list[str]
    columns: dict[str, Chunk]

    @classmethod
    def of_leaves(cls, sample_ids: Sequence[str], leaves: Mapping[str, Any]) -> "SampleColumns":
        """Return columns that share the memory of their values."""
        ids, known = list(sample_ids), list[Any]()
        return cls(ids, {name: chunk_of_leaf(name, leaf, ids, known) for name, leaf in leaves.items()})

    def batch(self) -> BatchedDataDict:
        """Return the columns as a batch in memory, tokens jagged."""
        known = list[Any]()
        leaves = {name: cast(Leaf, chunk.leaf(known)) for name, chunk in self.columns.items()}
        return materialize(wire_tensordict(leaves, len(self.sample_ids)), layout="jagged")

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            WriteError: a full disk, or no permission.
        """
        tensors: dict[str, torch.Tensor] = {}
        offsets: list[torch.Tensor] = []
        columns = []
        for number, (name, chunk) in enumerate(self.columns.items()):
            tensors[f"values.{number}"] = chunk.values.detach().cpu().contiguous().clone()
            place = None if chunk.offsets is None else place_among(chunk.offsets.cpu(), offsets)
            dtype = None if chunk.form.dtype is None else str(chunk.form.dtype).removeprefix("torch.")
            columns.append({"name": name, **chunk.form._asdict(), "dtype": dtype, "offsets": place})
        tensors |= {f"offsets.{number}": own.clone() for number, own in enumerate(offsets)}
        about = json.dumps({"sample_ids": self.sample_ids, "columns": columns})
        with atomic.naming(path):
            try:
                save_file(tensors, path, metadata={_ABOUT: about})
            except SafetensorError as error:
                raise atomic.write_error(path, str(error)) from error

    @classmethod
    def read(cls, path: Path) -> "SampleColumns":
        """Read what `write` wrote; a ConfigError names a file that is missing or damaged."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()[_ABOUT])
                columns = {}
                for number, column in enumerate(about["columns"]):
                    place = column["offsets"]
                    offsets = None if place is None else file.get_tensor(f"offsets.{place}")
                    columns[column["name"]] = Chunk(
                        _form(column), file.get_tensor(f"values.{number}"), offsets
                    )
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{path}: cannot read these columns ({reason}); copy or record the step again"
            ) from error
        return cls(about["sample_ids"], columns)


def _form(column: Mapping[str, Any]) -> Form:
    dtype = None if column["dtype"] is None else getattr(torch, column["dtype"])
    return Form(column["kind"], dtype, tuple(column["trailing"]), column["ragged_dim"])
