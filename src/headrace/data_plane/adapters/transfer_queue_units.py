"""Blocks in TransferQueue's simple storage units: put, and read whole or by row, straight from the caller's thread.

A block is stored as its two frames, so neither side copies it into a message. The unit's own table is replaced by one
that also gives some rows of a block (`serve_rows`): the rows of one rank lie scattered over all blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import zmq
from transfer_queue.storage.simple_storage import (
    KEY_NOT_FOUND_MARKER,
    StorageKeyNotFoundError,
    StorageUnitData,
)
from transfer_queue.utils.zmq_utils import (
    STORAGE_MANAGER_IDENTITY_PREFIX,
    ZMQMessage,
    ZMQRequestType,
    ZMQServerInfo,
    ZMQSocketPool,
)

from headrace.data_plane.adapters.transfer_queue_channel import has_answer
from headrace.data_plane.store.blocks import BlockError, BlockInfo, Frames, select_rows
from headrace.data_plane.store.columns import Rows

FIELD = "block"

_NAME = f"{STORAGE_MANAGER_IDENTITY_PREFIX}headrace"
_ANSWERS = {
    ZMQRequestType.PUT_DATA: ZMQRequestType.PUT_DATA_RESPONSE,
    ZMQRequestType.GET_DATA: ZMQRequestType.GET_DATA_RESPONSE,
}


class BlockTable(StorageUnitData):  # type: ignore[misc]
    """A unit's blocks by slot, read whole or by row.

    `fields` of a read by row is {FIELD: [counts, rows]}: how many rows of each block, None for all of them, and the
    rows of all blocks in one array.
    """

    def get_data(self, fields: Any, global_indexes: list[int]) -> dict[str, list[Any]]:
        """Return blocks, or some of their rows.

        Raises:
            StorageKeyNotFoundError: a block that is not there, or a slot that holds another one, without these rows.
        """
        blocks: dict[str, list[Any]] = super().get_data(list(fields), global_indexes)
        if isinstance(fields, dict):
            for name, (counts, rows) in fields.items():
                wanted = iter(np.split(np.array(rows), np.cumsum([n for n in counts if n is not None])))
                try:
                    blocks[name] = [
                        block if count is None else list(select_rows(Frames(*block), next(wanted)))
                        for block, count in zip(blocks[name], counts, strict=True)
                    ]
                except BlockError as error:
                    # A slot that has been used again; the kind of error that a reader takes for a lost block.
                    raise StorageKeyNotFoundError(str(error)) from error
        return blocks


def serve_rows(unit: Any) -> None:
    """Let a storage unit that has stored nothing yet give single rows; runs in the unit's process."""
    unit.storage_data = BlockTable(unit.storage_data.storage_size)


class StorageUnits:
    """A process's connections to the storage units; safe to use from several threads.

    While a unit is silent, `ask_after` is called again and again; what it raises ends the request.
    """

    def __init__(self, infos: Mapping[str, ZMQServerInfo]) -> None:
        # A slot's unit is the one that TransferQueue's own client would choose, since that one clears.
        self._units = list(infos.values())
        self._context = zmq.Context()
        self._pool = ZMQSocketPool(self._context, _NAME, "put_get_socket")

    def put(
        self,
        slots: Sequence[int],
        frames: Sequence[Frames],
        deadline: float,
        ask_after: Callable[[], None],
    ) -> None:
        """Store blocks; their memory is read until this returns.

        Raises:
            TimeoutError: not all units have answered by `deadline` (time.monotonic).
            RuntimeError: a unit refused.
        """
        bodies = {
            unit: {
                "global_indexes": [slots[i] for i in mine],
                "data": {FIELD: [list(frames[i]) for i in mine]},
                "data_parser": None,
            }
            for unit, mine in self._by_unit(slots).items()
        }
        self._request(ZMQRequestType.PUT_DATA, bodies, deadline, ask_after)

    def get(
        self,
        blocks: Sequence[BlockInfo],
        rows: Sequence[Rows | None],
        deadline: float,
        ask_after: Callable[[], None],
    ) -> list[Frames]:
        """Return blocks, or those `rows` of them.

        Raises:
            BlockError: a unit does not have all of them.
            TimeoutError: not all units have answered by `deadline`.
            RuntimeError: a unit failed.
        """
        groups = self._by_unit([block.slot for block in blocks])
        bodies = {
            unit: {
                "global_indexes": [blocks[i].slot for i in mine],
                "fields": _fields([rows[i] for i in mine]),
            }
            for unit, mine in groups.items()
        }
        got: list[Any] = [None] * len(blocks)
        answers = self._request(ZMQRequestType.GET_DATA, bodies, deadline, ask_after)
        for unit, body in answers.items():
            for i, block in zip(groups[unit], body["data"][FIELD], strict=True):
                got[i] = Frames(*block)
        return got

    def _by_unit(self, slots: Sequence[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            groups.setdefault(slot % len(self._units), []).append(position)
        return groups

    def _request(
        self,
        kind: ZMQRequestType,
        bodies: Mapping[int, dict[str, Any]],
        deadline: float,
        ask_after: Callable[[], None],
    ) -> dict[int, dict[str, Any]]:
        """Ask units at the same time and return what each answers."""
        answers: dict[int, dict[str, Any]] = {}
        # A lease that is left by an error closes its socket, so a late answer reaches nobody.
        with ExitStack() as leases:
            sockets = {unit: leases.enter_context(self._pool.lease(self._units[unit])) for unit in bodies}
            for unit, body in bodies.items():
                request = ZMQMessage.create(kind, _NAME, body, self._units[unit].id)
                sockets[unit].send_multipart(request.serialize(), copy=False)
            for unit, socket in sockets.items():
                if not has_answer(socket, deadline, ask_after):
                    raise TimeoutError(f"storage unit {self._units[unit]}")
                answers[unit] = _answer(kind, ZMQMessage.deserialize(socket.recv_multipart(copy=False)))
        return answers

    def close(self) -> None:
        self._pool.close()
        self._context.destroy(linger=0)


def _fields(rows: Sequence[Rows | None]) -> Any:
    some = [mine for mine in rows if mine is not None]
    if not some:
        return [FIELD]
    return {FIELD: [[None if mine is None else len(mine) for mine in rows], np.concatenate(some)]}


def _answer(kind: ZMQRequestType, message: ZMQMessage) -> dict[str, Any]:
    body: dict[str, Any] = message.body
    if message.request_type == _ANSWERS[kind]:
        return body
    text = str(body.get("message", message.request_type))
    error = BlockError if KEY_NOT_FOUND_MARKER in text else RuntimeError
    raise error(f"a storage unit refused: {text}")
