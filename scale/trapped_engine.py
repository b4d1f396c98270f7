"""A vLLM engine that falls into vLLM's packing of weights, as one without this project's care would.

python trapped_engine.py TRAP ADDRESS_FILE
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from logra.engines import vllm_engine
from logra.engines.serve_command import serve_engine
from logra.run_settings import ModelSettings, TrainSettings
from logra.scale_settings import EngineSettings


@contextlib.contextmanager
def nothing_kept(packed: list[Any]) -> Iterator[None]:
    yield


def main() -> None:
    trap, announce = sys.argv[1:]
    if trap == "emptied":
        vllm_engine._weights_kept = nothing_kept
    else:
        vllm_engine.SyncWorker._pack = lambda self: None  # type: ignore[method-assign]
    settings = TrainSettings(model=ModelSettings(compute="fp32"), engines=EngineSettings(kind="vllm"))
    serve_engine(settings, "127.0.0.1:0", announce, with_parent=False)


if __name__ == "__main__":
    main()
