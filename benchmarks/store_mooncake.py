"""What does the store cost over Mooncake? The questions of store_transfer_queue, asked of backend mooncake_cpu.

The ways to compare with, TransferQueue's own calls among them, run over TransferQueue's simple storage, since its
own start of Mooncake ends every other Mooncake of the machine. Needs headrace[ray,mooncake].
"""

from run import Bench, main
from store_transfer_queue import measure_backend, stores


def measure(bench: Bench) -> None:
    """Time everything over Mooncake; no target is set for it."""
    sizes = {"global_segment_size": 1024 * 1024**2, "local_buffer_size": 512 * 1024**2}
    with stores("mooncake_cpu", **sizes) as client:
        measure_backend(bench, client, held=False)


if __name__ == "__main__":
    main(measure, __doc__)
