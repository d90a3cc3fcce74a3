"""The HTTP app: all routes behind the gate."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from slime_like import __version__
from slime_like.tinker.api.context import Context
from slime_like.tinker.api.gate import Gate, failure, refusal
from slime_like.tinker.api.identity import Identity
from slime_like.tinker.api.known import Known
from slime_like.tinker.api.routes import downloads, futures, management, openai, page, sampling, sessions, training
from slime_like.tinker.api.settings import ApiSettings
from slime_like.tinker.api.skipped import skip_refused
from slime_like.tinker.errors import Refused
from slime_like.tinker.protocols import Service
from slime_like.tinker.store.rows import Rows

ROUTERS = tuple(
    module.router for module in (sessions, training, sampling, futures, management, downloads, openai, page)
)


def make_app(service: Service, rows: Rows, settings: ApiSettings) -> FastAPI:
    """An ASGI app over a service and the database that both write in."""
    app = FastAPI(title="slime_like", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    context = Context(service=service, rows=rows, settings=settings, known=Known(rows))
    app.state.context = context
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Gate, identity=Identity(rows, settings), settings=settings, observed=context.observed)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused), "registered for it alone"
    await skip_refused(request, error, str(error), error.status)
    return refusal(error, request.url.path)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for it alone"
    problems = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:8]]
    message = "; ".join(problems)[:2000]
    await skip_refused(request, error, message, 422)
    return failure(message, 422, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it alone"
    return failure(str(error.detail), error.status_code, request.url.path, dict(error.headers or {}) or None)
