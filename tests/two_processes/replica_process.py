"""A replica in a process of its own: `python replica_process.py COMPUTE PARTS THREADS`; its port goes to stdout."""

import os
import signal
import socket
import sys

import torch

from logra.optim import merge
from logra.sync import replica as replica_module
from logra.sync.layout import Layout
from logra.sync.replica import Answer, Replica, Slice, ToldReplica, joined
from logra.sync.wire import serve


class Parts:
    """Tensor-parallel parts of one model, as one replica: the digest is the sum of theirs."""

    def __init__(self, layout: Layout, parts: int, dtype: torch.dtype) -> None:
        self.replicas = []
        for part in range(parts):
            slices = {}
            for index, weight in enumerate(layout.weights):
                rows, columns = range(weight.rows), range(weight.columns)
                if index % 2:  # as column-parallel and row-parallel layers alternate
                    rows = rows[part * weight.rows // parts : (part + 1) * weight.rows // parts]
                else:
                    columns = columns[part * weight.columns // parts : (part + 1) * weight.columns // parts]
                slices[weight.name] = [Slice(torch.zeros(len(rows), len(columns), dtype=dtype), rows, columns)]
            self.replicas.append(Replica(layout, slices, {}))

    def handle(self, data: bytes) -> Answer:
        if (
            os.environ.get("DIES_AT")
            and not replica_module.is_piece(data)
            and self.replicas[0].version == int(os.environ["DIES_AT"])
        ):
            self.replicas[0].held[next(iter(self.replicas[0].held))][0].merge = lambda _: os.kill(  # type: ignore
                os.getpid(), signal.SIGKILL
            )
        return joined([each.handle(data) for each in self.replicas])


def main() -> None:
    compute, parts, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    merge.BLOCK_ELEMENTS["cpu"] = 700  # other blocks than the trainer's
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    told = ToldReplica(lambda layout: Parts(layout, parts, dtype))  # type: ignore[arg-type, return-value]
    serve(listener, lambda data: told(data).to_bytes())


if __name__ == "__main__":
    main()
