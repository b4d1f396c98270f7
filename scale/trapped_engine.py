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
def emptied(packed: list[Any]) -> Iterator[None]:
    """As vLLM does it: the weight goes, its packed form stays."""
    yield


@contextlib.contextmanager
def packed_once(packed: list[Any]) -> Iterator[None]:
    """The weight stays beside its packed form, which nobody renews."""
    plain = vllm_engine.layers.dispatch_cpu_unquantized_gemm
    vllm_engine.layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: plain(layer, remove_weight=False)
    yield


def main() -> None:
    trap, announce = sys.argv[1:]
    vllm_engine._weights_kept = {"emptied": emptied, "packed once": packed_once}[trap]
    settings = TrainSettings(model=ModelSettings(compute="fp32"), engines=EngineSettings(kind="vllm"))
    serve_engine(settings, "127.0.0.1:0", announce, with_parent=0)


if __name__ == "__main__":
    main()
