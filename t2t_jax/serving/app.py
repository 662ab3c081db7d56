"""The page, the JSON endpoints, and what they share: the batches, the searches, the attention pages."""

import asyncio
import collections
import contextlib
import dataclasses
import http
import math
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from t2t_jax.decoding.stream import json_line
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import DamagedError, InputError, memory_reason, on_one_line
from t2t_jax.serving.batching import Batcher, Full, Job
from t2t_jax.serving.guard import Guard, error_response
from t2t_jax.serving.limits import Limits
from t2t_jax.serving.metrics import CONTENT_TYPE, Metrics
from t2t_jax.serving.page import content_security_policy, page
from t2t_jax.serving.requests import OPTIONS, attention_request, translate_request
from t2t_jax.serving.searches import Searches
from t2t_jax.serving.warm_up import sample_batches
from t2t_jax.visualization import page as attention_page

_TRANSLATE, _ATTENTION, _WARM_UP = "translate", "attention", "warm-up"
_WAITING_SHARE = 0.8  # of the time for an answer: the rest is for the batch at work and the request's own


class Demo:
    """The demo of one translator; `app` is the ASGI application. Call `close` at the end.

    `defaults` are the options of the run, `about` what the page says of it, `hosts` the names in URLs of the server.
    """

    def __init__(
        self,
        translator: Translator,
        defaults: Mapping[str, Any],
        *,
        about: Mapping[str, Any],
        limits: Limits,
        hosts: Iterable[str] = (),
    ):
        self._translator, self._limits = translator, limits
        self._defaults = OPTIONS | dict(defaults)
        self._about = {
            **about,
            "has_trees": translator.task.metric == "brackets",
            "has_attention": len(translator.ensemble.modules) == 1,
            "options": {name: self._defaults[name] for name in OPTIONS},
            "limits": dataclasses.asdict(limits),
        }
        self._searches = Searches(_search(self._defaults), limits)
        self._batcher = Batcher(
            self._work,
            batch_items=limits.batch_sentences,
            waiting_items=limits.waiting_sentences,
            longest_wait=_WAITING_SHARE * limits.request_seconds,
        )
        self._warm_up: list[Job] = []
        self._metrics = Metrics()
        # Of attention, by their secret names.
        self._pages: collections.OrderedDict[str, str] = collections.OrderedDict()
        self.app: ASGIApp = Guard(self._routes(), hosts, self._answered)

    def warm_up(self) -> None:
        """Compiles the run's own search, one shape after the other, each while no request waits."""
        batches = sample_batches(self._translator, self._limits)
        key = (_WARM_UP, _frozen(self._defaults))
        self._warm_up = [Job(key, sentences) for sentences in batches]
        for job in self._warm_up:
            job.future.add_done_callback(_log_failure)
        self._batcher.submit_idle(self._warm_up)

    def close(self) -> None:
        """Gives up the requests in progress and ends the thread of the batches."""
        self._batcher.close()
        self._searches.close()

    def _routes(self) -> Starlette:
        app = Starlette(
            routes=[
                Route("/", self._page, methods=["GET"]),
                Route("/info", self._info, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics_page, methods=["GET"]),
                Route("/translate", self._translate, methods=["POST"]),
                Route("/attention", self._attention, methods=["POST"]),
                Route("/attention/{name}", self._attention_page, methods=["GET"]),
            ],
            exception_handlers={
                HTTPException: _http_error, InputError: _input_error, DamagedError: _damaged, Full: _full,
                ClientDisconnect: _gone, Exception: _bug,
            },
        )  # fmt: skip
        app.router.redirect_slashes = False
        return app

    # --- In the event loop ----------------------------------------------------------------------------------

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(page(), headers={"Content-Security-Policy": content_security_policy()})

    async def _info(self, _: Request) -> Response:
        return JSONResponse(self._about)

    async def _health(self, _: Request) -> Response:
        """503 if a batch takes longer than any client waits, or if nothing is translated (any more)."""
        age = self._batcher.batch_age()
        is_damaged = any(isinstance(_failure(job.future), DamagedError) for job in self._warm_up)
        healthy = self._batcher.is_running and age < self._limits.request_seconds and not is_damaged
        status = {
            "healthy": healthy,
            "warm": all(job.future.done() for job in self._warm_up),
            "batch_seconds": round(age, 3),
            "waiting_sentences": self._batcher.waiting(),
        }
        return JSONResponse(status, 200 if healthy else 503)

    async def _metrics_page(self, _: Request) -> Response:
        gauges = {"t2t_waiting_sentences": self._batcher.waiting(), "t2t_batch_seconds": self._batcher.batch_age()}
        return Response(self._metrics.text(gauges), headers={"Content-Type": CONTENT_TYPE})

    async def _translate(self, request: Request) -> Response:
        body = await _body(request, self._limits)
        sentences, is_list, options = translate_request(body, self._translator, self._defaults, self._limits)
        if wait := self._searches.admit(_search(options)):
            self._refused("search")
            raise HTTPException(
                429,
                "too many different searches: each combination of beam_size, n_best and constrained is "
                f"compiled; use one again, or a new one in {math.ceil(wait)} s",
                {"Retry-After": str(math.ceil(wait))},
            )
        lines = await self._result(request, Job((_TRANSLATE, _frozen(options)), sentences))
        text = f"[{', '.join(lines)}]" if is_list else lines[0]
        return Response(text + "\n", media_type="application/json")

    async def _attention(self, request: Request) -> Response:
        if not self._about["has_attention"]:
            raise InputError("attention: an ensemble has no attention weights of its own; serve one run")
        pair = attention_request(await _body(request, self._limits), self._translator, self._limits)
        (content,) = await self._result(request, Job((_ATTENTION, secrets.token_urlsafe()), [pair]))
        name = secrets.token_urlsafe()
        self._pages[name] = content
        if len(self._pages) > self._limits.attention_pages:
            self._pages.popitem(last=False)
        return JSONResponse({"page": f"/attention/{name}"})

    async def _attention_page(self, request: Request) -> Response:
        content = self._pages.get(request.path_params["name"])
        if content is None:
            raise HTTPException(404, f"only the newest {self._limits.attention_pages} attention pages are kept")
        # The page has a policy of its own too.
        return HTMLResponse(content, headers={"Content-Security-Policy": "frame-ancestors 'self'"})

    async def _result(self, request: Request, job: Job) -> list[Any]:
        """The results of a job, which is withdrawn when the client leaves or the time is up."""
        try:
            self._batcher.submit(job)
        except Full:
            self._refused("full")
            raise
        answered = asyncio.wrap_future(job.future)
        left = asyncio.ensure_future(request.receive())  # the body has been read: the next message is a disconnect
        try:
            seconds = self._limits.request_seconds
            await asyncio.wait({answered, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return answered.result()
            if left.done():
                raise ClientDisconnect
            raise self._unavailable("time", f"not done within {seconds:g} s; try again, or send less")
        except asyncio.CancelledError:  # by uvicorn, after `stop_seconds`
            raise HTTPException(503, "the server is stopping; try again", {"Retry-After": "1"}) from None
        except Exception as error:
            if not (memory := memory_reason(error)):
                raise
            reason = f"out of memory ({memory}); send fewer or shorter sentences, or lower beam_size"
            raise self._unavailable("memory", reason) from None
        finally:
            left.cancel()
            if not answered.done():
                self._batcher.withdraw(job)

    def _unavailable(self, kind: str, reason: str) -> HTTPException:
        """The 503 of a valid request that is refused, which is counted."""
        self._refused(kind)
        return HTTPException(503, reason, {"Retry-After": str(self._batcher.retry_after())})

    def _answered(self, status: int) -> None:
        self._metrics.add("t2t_requests_total", status=status)

    def _refused(self, reason: str) -> None:
        self._metrics.add("t2t_refusals_total", reason=reason)

    # --- In the thread of the batches -----------------------------------------------------------------------

    def _work(self, key: Hashable, items: list[Any], check: Callable[[], None]) -> list[str]:
        """The lines of JSON of sentences, or the attention pages of pairs."""
        kind, options = key
        if kind == _ATTENTION:
            return [self._attention_of(*pair) for pair in items]
        options = dict(options)
        self._searches.prepare(_search(options))
        begun = time.monotonic()
        try:
            # Without warnings, whose lines would be those of a batch of several clients.
            found = self._translator.translate(items, on_progress=lambda count: check(), first_line=None, **options)
        finally:
            self._metrics.add("t2t_translation_seconds_total", time.monotonic() - begun)
        self._metrics.add("t2t_sentences_total", len(items) if kind == _TRANSLATE else 0)
        return [json_line(*pair) for pair in zip(items, found, strict=True)]

    def _attention_of(self, source: str, tokens: list[str]) -> str:
        return attention_page.page(self._translator.attention([source], tokens=[tokens]), f"Attention: {source[:80]}")


def _failure(future: Future) -> BaseException | None:
    """The error that a job has ended with."""
    return future.exception() if future.done() and not future.cancelled() else None


def _log_failure(future: Future) -> None:
    if error := _failure(future):
        logging.error("warm-up: %s", on_one_line(error))


def _search(options: Mapping[str, Any]) -> Hashable:
    """What a search is compiled for: its options but α, the limit on the length and how lines are split."""
    others = ("alpha", "max_extra_length", "split_sentences")
    return _frozen({name: value for name, value in options.items() if name not in others})


def _frozen(options: Mapping[str, Any]) -> Hashable:
    return tuple(sorted(options.items()))


async def _body(request: Request, limits: Limits) -> bytes:
    """The body of a request, within the limits of size and time."""
    body = bytearray()
    too_large = HTTPException(413, f"body: at most {limits.body_bytes:,} bytes; send several requests")
    if int(request.headers.get("content-length", 0)) > limits.body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_seconds), contextlib.aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        reason = f"body: not complete after {limits.body_seconds:g} s; check Content-Length"
        raise HTTPException(408, reason, {"Connection": "close"}) from None
    return bytes(body)


# --- Errors: one line of JSON -----------------------------------------------------------------------------------


async def _http_error(request: Request, error: HTTPException) -> Response:
    reason = error.detail
    if reason == http.HTTPStatus(error.status_code).phrase:  # Starlette's own: no such path, or not by this method
        known = "GET /, /info, /health and /metrics, POST /translate and /attention"
        reason = f"{request.method} {request.url.path[:100]}: there are {known}"
    return error_response(error.status_code, reason, error.headers)


async def _input_error(_: Request, error: InputError) -> Response:
    return error_response(400, str(error))


async def _damaged(_: Request, error: DamagedError) -> Response:
    logging.error("%s", error)
    return error_response(500, str(error))


async def _full(_: Request, error: Full) -> Response:
    return error_response(503, str(error), {"Retry-After": str(error.retry_after)})


async def _gone(*_: Any) -> Response:
    """Nobody reads this; the status, nginx's, is for the metrics."""
    return Response(status_code=499)


async def _bug(_: Request, error: Exception) -> Response:
    """Starlette raises the error again, so that uvicorn logs it."""
    return error_response(500, f"a bug of the server ({type(error).__name__}); its log says more")
