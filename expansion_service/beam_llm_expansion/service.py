"""The gRPC service: requests in, expansions out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc.aio
from apache_beam.portability.api import (
    beam_expansion_api_pb2,
    beam_expansion_api_pb2_grpc,
)
from apache_beam.transforms.environments import Environment
from apache_beam.typehints.decorators import TypeCheckError

from beam_llm.validation import ConfigError
from beam_llm_expansion.admission import admit, asked_for
from beam_llm_expansion.discovery import discover
from beam_llm_expansion.errors import RequestError
from beam_llm_expansion.expansion import expand
from beam_llm_expansion.metrics import Metrics
from beam_llm_expansion.settings import Settings
from beam_llm_expansion.workers import offer_pool

_LOGGER = logging.getLogger(__name__)

#: Trailing metadata that holds the id under which a request is logged.
REQUEST_ID_KEY = "beam-llm-request-id"

_STATUS = {
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
}
Result = TypeVar("Result")
_Context = grpc.aio.ServicerContext[Any, Any]


class ExpansionService(beam_expansion_api_pb2_grpc.ExpansionServiceServicer):
    """Answers ``Expand`` and ``DiscoverSchemaTransform``.

    Expansions run one at a time, in a thread beside the one that serves: Beam keeps types in
    registries of the process, and the interpreter runs one thread at a time anyway.
    """

    def __init__(
        self,
        settings: Settings,
        environment: Environment,
        pool: str | None,
        metrics: Metrics,
        on_stuck: Callable[[bool], None] = lambda stuck: None,
    ):
        """Makes the service.

        Args:
          settings: Limits, and what is allowed.
          environment: Where workers run the transforms.
          pool: Address of the worker pool that local runners may take, if there is one.
          metrics: Where requests are counted.
          on_stuck: Called with True when an expansion is over time and still runs, and with
            False when it has ended after all.
        """
        self._settings = settings
        self._environment = environment
        self._pool = pool
        self._metrics = metrics
        self._on_stuck = on_stuck
        self._expander = ThreadPoolExecutor(1, thread_name_prefix="expand")
        self._pending = 0
        # Our transforms are imported, and described, while the first requests are on their way.
        self._discovered = self._expander.submit(discover)

    async def Expand(  # noqa: N802 - Beam's name
        self, request: beam_expansion_api_pb2.ExpansionRequest, context: _Context
    ) -> beam_expansion_api_pb2.ExpansionResponse:
        """Expands a transform; what is wrong with the request is in the response's ``error``."""

        async def answer() -> beam_expansion_api_pb2.ExpansionResponse:
            return await self._in_turn(lambda: self._expand(request), context)

        return await self._answered(
            "expand", asked_for(request), context, answer, beam_expansion_api_pb2.ExpansionResponse
        )

    async def DiscoverSchemaTransform(  # noqa: N802 - Beam's name
        self, request: beam_expansion_api_pb2.DiscoverSchemaTransformRequest, context: _Context
    ) -> beam_expansion_api_pb2.DiscoverSchemaTransformResponse:
        """Describes every transform."""
        del request

        async def answer() -> beam_expansion_api_pb2.DiscoverSchemaTransformResponse:
            return await asyncio.shield(asyncio.wrap_future(self._discovered))

        return await self._answered(
            "discover", "", context, answer, beam_expansion_api_pb2.DiscoverSchemaTransformResponse
        )

    def close(self) -> bool:
        """Lets go of what waits; what runs is not waited for.

        Returns:
          Whether an expansion still runs, and keeps its thread.
        """
        self._expander.shutdown(wait=False, cancel_futures=True)
        return self._pending > 0

    def _expand(
        self, request: beam_expansion_api_pb2.ExpansionRequest
    ) -> beam_expansion_api_pb2.ExpansionResponse:
        admitted = admit(
            request,
            max_components=self._settings.max_components,
            allow_callables=self._settings.allow_callables,
        )
        response = expand(admitted, self._environment)
        if self._pool is not None:
            for name, environment in response.components.environments.items():
                if name not in admitted.components.environments:
                    environment.CopyFrom(offer_pool(environment, self._pool))
        return response

    async def _in_turn(self, work: Callable[[], Result], context: _Context) -> Result:
        """Runs work after that which came before, within its time."""
        if self._pending >= self._settings.max_pending:
            raise RequestError("too many expansions are waiting: try again later", "busy")
        running = False

        def run() -> Result:
            nonlocal running
            running = True
            return work()

        self._pending += 1
        future = self._expander.submit(run)
        loop = asyncio.get_running_loop()

        def done(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(self._done)

        future.add_done_callback(done)
        remaining: Any = context.time_remaining()
        limit = (
            self._settings.timeout_secs
            if remaining is None
            else min(remaining, self._settings.timeout_secs)
        )
        try:
            async with asyncio.timeout(limit):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if running and not future.done():
                self._on_stuck(True)
                future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._on_stuck, False))
            raise RequestError(f"no expansion within {limit:.3g} seconds", "timeout") from None

    def _done(self) -> None:
        self._pending -= 1

    async def _answered(
        self,
        method: str,
        transform: str,
        context: _Context,
        answer: Callable[[], Any],
        response: type[Any],
    ) -> Any:
        request_id = secrets.token_hex(8)
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        began = time.perf_counter()
        outcome, message, trouble = "ok", "", None
        with self._metrics.in_flight():
            try:
                return await answer()
            except RequestError as error:
                outcome, message = error.outcome, str(error)
            except (ConfigError, TypeCheckError) as error:
                outcome, message = "invalid", str(error)
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            except Exception as error:  # whatever Beam makes of a request
                outcome, trouble = "error", error
                message = "the transform could not be expanded; the service's log says why"
            finally:
                seconds = time.perf_counter() - began
                self._metrics.answered(method, transform, outcome, seconds)
                fields = {
                    "request": request_id,
                    "method": method,
                    "transform": transform,
                    "outcome": outcome,
                    "seconds": round(seconds, 4),
                    "peer": context.peer(),
                }
                if message:
                    fields["error"] = message
                level = logging.ERROR if trouble else logging.INFO
                _LOGGER.log(level, "answered", extra={"fields": fields}, exc_info=trouble)
        message = f"{message} (request {request_id})"
        if outcome in _STATUS:
            await context.abort(_STATUS[outcome], message)
        return response(error=message)
