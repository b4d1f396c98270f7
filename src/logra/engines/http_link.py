# SPDX-License-Identifier: Apache-2.0
"""vLLM's own HTTP server as a replica: messages go through its `/collective_rpc`, prompts through `/v1/completions`.

The server is started with `--worker-cls logra.engines.vllm_engine.SyncWorker --logprobs-mode processed_logprobs` and
VLLM_SERVER_DEV_MODE=1; see docs/scaling.md.
"""

import base64
import http.client
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from logra.engines.requests import Completions, Request, is_request
from logra.engines.vllm_requests import completed, sampling_parameters
from logra.rl.batch import Sample
from logra.rollout.engine import Prompt
from logra.sync.replica import Answer, joined
from logra.sync.sender import every

_PAUSE_SECONDS = 1.0
_SIDE_BY_SIDE = 64


class HttpLink:
    """The way to one server.

    Args:
        name: for messages.
        url: such as http://10.0.0.2:8000.
        tokenizer: decodes completions.
        end_ids: every id that ends one.
    """

    def __init__(self, name: str, url: str, tokenizer: Any, end_ids: frozenset[int]) -> None:
        self.name, self.url, self.tokenizer, self.end_ids = name, urlsplit(url), tokenizer, end_ids
        self.model = ""
        self.version: int | None = None

    def reach(self, seconds: float) -> None:
        """Wait until the server answers.

        Raises:
            OSError: it does not in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                models = self._call("GET", "/v1/models", None, max(0.1, deadline - time.monotonic()))
                self.model = models["data"][0]["id"]
                return
            except OSError as error:
                if time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise TimeoutError(f"{self.url.geturl()} did not answer within {seconds:g} s ({error})") from error
                time.sleep(_PAUSE_SECONDS)

    def open(self, layout: str, seconds: float) -> None:
        """Tell it the layout.

        Raises:
            OSError: it does not answer.
            ValueError: it has no use for the layout.
        """
        Answer.from_bytes(self.ask(layout.encode(), seconds)).accepted(self.name)

    def close(self) -> None:
        """Nothing is kept open."""

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Send, and wait for the answer.

        Raises:
            OSError: the server is gone, refuses, or does not answer in time (TimeoutError).
        """
        if is_request(data):
            return self._drawn(Request.from_bytes(data), seconds).to_bytes()
        self.version = None
        body = {"method": "logra_answer", "args": [base64.b64encode(data).decode()], "timeout": seconds}
        answers = self._call("POST", "/collective_rpc", body, seconds)["results"]
        found = joined([Answer.from_bytes(each.encode()) for each in answers])
        if found.version is not None:
            dropped = self._call("POST", "/reset_prefix_cache?reset_running_requests=true", {}, seconds)
            if not dropped["success"]:
                raise ConnectionError("the prefix cache, made with other weights, could not be dropped")
        self.version = found.version
        return found.to_bytes()

    def _drawn(self, request: Request, seconds: float) -> Completions:
        if not self._has_version(seconds):
            return Completions(None, (), "this server has no whole weights of the trainer yet, or no longer")

        def draw(prompt: Prompt) -> list[Sample] | str:
            ways = sampling_parameters(prompt, request.sampling, request.update, self.end_ids)
            body = ways | {"model": self.model, "prompt": list(prompt.ids), "return_token_ids": True}
            try:
                choices = self._call("POST", "/v1/completions", body, seconds)["choices"]
            except Refused as error:
                return str(error)
            return completed(prompt, [_output(each) for each in choices], request.sampling.stop, self.tokenizer)

        samples: list[Sample] = []
        prompts: Sequence[Prompt] = request.prompts
        for first in range(0, len(prompts), _SIDE_BY_SIDE):
            for found in every(prompts[first : first + _SIDE_BY_SIDE], draw):
                if isinstance(found, str):
                    return Completions(self.version, (), found)
                samples += found
        if not self._has_version(seconds):
            return Completions(None, (), "this server was started again while it drew")
        return Completions(self.version, sorted(samples, key=lambda sample: sample.sample_id))

    def _has_version(self, seconds: float) -> bool:
        """Whether the server itself says that it has the version that it answered with last."""
        body = {"method": "logra_version", "timeout": seconds}
        found = set(self._call("POST", "/collective_rpc", body, seconds)["results"])
        return self.version is not None and found == {str(self.version)}

    def _call(self, verb: str, path: str, body: dict[str, Any] | None, seconds: float) -> Any:
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.url.hostname or "", self.url.port, timeout=seconds)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(verb, self.url.path.rstrip("/") + path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            found = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status == 404:
            raise ConnectionError(
                f"{self.url.geturl()} has no {path}; start the server with VLLM_SERVER_DEV_MODE=1 (docs/scaling.md)"
            )
        if 400 <= response.status < 500:
            raise Refused(f"{path} was refused with {response.status}: {found[:500].decode(errors='replace')}")
        if response.status != 200:
            raise ConnectionError(f"{path} failed with {response.status}: {found[:500].decode(errors='replace')}")
        return json.loads(found)


class Refused(ConnectionError):
    """What the server says is wrong with a request."""


def _output(choice: dict[str, Any]) -> tuple[list[int], list[float], str | None]:
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
