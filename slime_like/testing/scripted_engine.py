"""An engine that answers by a script: SGLang's HTTP face without a model, with faults on demand.

with ScriptedEngine(lambda prompt: ([7, 8, 2], [-0.1, -0.2, -0.3])) as engine:
    requests.post(engine.url + "/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}})
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import threading
import uuid
from collections.abc import Callable, Sequence

import numpy as np
import orjson
from aiohttp import web

from slime_like.errors import EngineError, WaitTimeout

#: prompt ids -> (output ids, log-probs); called in the server's thread, once a request.
Script = Callable[[list[int]], tuple[Sequence[int], Sequence[float]]]

_START_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one /generate request. The fields combine: first the delay, then the rest.

    status: answer with this HTTP status instead. drop: close the connection without an answer. abort: answer with
    finish reason "abort" after this many tokens. body: answer 200 with this text.
    """

    status: int | None = None
    delay_s: float = 0.0
    drop: bool = False
    abort: int | None = None
    body: str | None = None


class ScriptedEngine:
    """A server on 127.0.0.1 in a thread of its own; a context manager.

    context_length: refuse prompts that leave too little of it, as SGLang does.
    faults: one for each /generate request in the order of arrival, None for a good answer; afterwards all are good.
    fault_for: called with the request's body, decides instead of the list. decode: ids -> text of the answer.
    routing, to be set: input and output ids -> the experts of all but the last, [tokens - 1, layers, topk]; without it
    none are reported, as by an engine without --enable-return-routed-experts. requests: bodies of all /generate
    requests. calls: (path, body) of every other POST.
    """

    def __init__(
        self,
        script: Script,
        *,
        faults: Sequence[Fault | None] = (),
        fault_for: Callable[[dict], Fault | None] | None = None,
        decode: Callable[[list[int]], str] | None = None,
        api_key: str | None = None,
        stop_token_ids: Sequence[int] = (),
        context_length: int | None = None,
        port: int = 0,
    ):
        self.script = script
        self.decode = decode or (lambda ids: " ".join(map(str, ids)))
        self.stop_token_ids = frozenset(stop_token_ids)
        self.context_length = context_length
        self.routing: Callable[[list[int]], Sequence] | None = None
        self.weight_version = "default"
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []  # of all /generate requests, names in small letters
        self.calls: list[tuple[str, dict]] = []
        self.most_in_flight = 0
        self._in_flight: dict[str, asyncio.Event] = {}  # request id -> set when aborted
        self._faults = iter(list(faults))
        self._fault_for = fault_for
        self._api_key = api_key
        self._port = port
        self._updating = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-engine", daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> ScriptedEngine:
        """Listen; the URL is valid afterwards."""
        self._thread.start()
        self._call(self._start(), "starting")
        return self

    def close(self) -> None:
        """Stop listening and drop open connections."""
        if self._thread.is_alive():
            self._call(self._stop(), "stopping")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=_START_S)
            self._loop.close()

    def __enter__(self) -> ScriptedEngine:
        return self.start()

    def __exit__(self, *_) -> None:
        self.close()

    def _call(self, work, phase: str) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=_START_S)
        except TimeoutError:
            raise WaitTimeout(
                who="test", whom="the scripted engine", phase=phase, seconds=_START_S, last="nothing"
            ) from None

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._authorize], client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_route("*", "/flush_cache", self._flush)
        app.router.add_post("/begin_weight_update", self._begin)
        app.router.add_post("/end_weight_update", self._end)
        for path in ("from_tensor", "from_distributed", "from_disk"):
            app.router.add_post(f"/update_weights_{path}", self._update)
        app.router.add_post("/update_weight_version", self._set_version)
        for path in ("/init_weights_update_group", "/destroy_weights_update_group"):
            app.router.add_post(path, self._accept)
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            app.router.add_post(path, self._change_memory)
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        try:
            await site.start()
        except OSError as error:
            raise EngineError(
                f"the scripted engine cannot listen on 127.0.0.1:{self._port}: {error.strerror}"
            ) from error
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        for aborted in self._in_flight.values():
            aborted.set()
        self._resumed.set()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authorize(self, request: web.Request, handler) -> web.StreamResponse:
        open_paths = ("/health", "/health_generate")  # as in SGLang
        if (
            self._api_key
            and request.path not in open_paths
            and request.headers.get("Authorization") != f"Bearer {self._api_key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.method == "POST" and request.path != "/generate":
            self.calls.append((request.path, await request.json() if request.can_read_body else {}))
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "scripted",
                "tokenizer_path": "scripted",
                "is_generation": True,
                "weight_version": self.weight_version,
            }
        )

    async def _loads(self, _: web.Request) -> web.Response:
        running = len(self._in_flight) if self._resumed.is_set() else 0
        return web.json_response(
            {"loads": [{"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": len(self._in_flight) - running}]}
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        reports = {"enable_return_routed_experts": self.routing is not None}
        return web.json_response(
            {
                "model_path": "scripted",
                "tp_size": 1,
                "dp_size": 1,
                "version": "scripted",
                "weight_version": self.weight_version,
            }
            | reports
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if not isinstance(body.get("input_ids"), list) or not body["input_ids"]:
            return web.json_response(
                {"error": {"message": "input_ids is missing: the scripted engine takes one list of ids"}}, status=400
            )
        if self.context_length and len(body["input_ids"]) >= self.context_length - 6:
            return web.json_response(
                {
                    "error": {
                        "message": f"Input length ({len(body['input_ids'])} tokens) exceeds the maximum allowed length"
                    }
                },
                status=400,
            )
        fault = (self._fault_for(body) if self._fault_for else next(self._faults, None)) or Fault()
        request_id = body.get("rid") or uuid.uuid4().hex
        aborted = self._in_flight[request_id] = asyncio.Event()
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        try:
            await self._wait_for_turn(fault.delay_s, aborted)
        finally:
            del self._in_flight[request_id]
        if fault.drop:
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        if fault.status is not None:
            return web.json_response({"error": {"message": f"scripted {fault.status}"}}, status=fault.status)
        if fault.body is not None:
            return web.Response(text=fault.body)
        answer = self._answer(body, request_id, abort_after=0 if aborted.is_set() else fault.abort)
        return web.Response(
            body=orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), content_type="application/json"
        )

    async def _wait_for_turn(self, delay_s: float, aborted: asyncio.Event) -> None:
        """Wait while generation is paused, then the delay; an abort ends both."""
        if self._resumed.is_set() and not delay_s:
            await asyncio.sleep(0)  # an engine that answers at once still takes its requests in turns
            return

        async def turn():
            await self._resumed.wait()
            await asyncio.sleep(delay_s)

        tasks = [asyncio.ensure_future(turn()), asyncio.ensure_future(aborted.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _answer(self, body: dict, request_id: str, *, abort_after: int | None) -> dict:
        """SGLang's answer to a script's tokens, cut as sampling_params and stop tokens demand."""
        params = body.get("sampling_params") or {}
        script_ids, logprobs = self.script(list(body["input_ids"]))
        ids = list(script_ids)
        stops = self.stop_token_ids | set(params.get("stop_token_ids") or ())
        most = params.get("max_new_tokens", 128)
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
        reason: dict = {"type": "stop", "matched": ids[end - 1] if end else None}
        ids = ids[:end]
        if len(ids) > most:
            reason, ids = {"type": "length", "length": most}, ids[:most]
        if abort_after is not None:
            reason, ids = {"type": "abort", "message": "Abort before prefill"}, ids[:abort_after]
        shown = [token for token in ids if not (params.get("skip_special_tokens", True) and token in stops)]
        meta = {
            "id": request_id,
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": self.weight_version,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [
                [logprob, token, None] for token, logprob in zip(ids, logprobs, strict=False)
            ]
        if body.get("return_routed_experts") and self.routing is not None:
            experts = np.asarray(self.routing([*body["input_ids"], *ids]), dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return {"text": self.decode(shown), "output_ids": ids, "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for request_id, aborted in self._in_flight.items():
            if body.get("abort_all") or request_id == body.get("rid"):
                aborted.set()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        self._resumed.clear()
        body = await request.json() if request.can_read_body else {}
        if body.get("mode", "abort") == "abort":
            for aborted in self._in_flight.values():
                aborted.set()
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def _continue(self, _: web.Request) -> web.Response:
        self._resumed.set()
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def _flush(self, _: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _begin(self, _: web.Request) -> web.Response:
        self._updating = True
        return web.json_response({"success": True, "message": "Success"})

    async def _end(self, _: web.Request) -> web.Response:
        if not self._updating:
            return _refusal("end_weight_update without begin_weight_update")
        self._updating = False
        return web.json_response({"success": True, "message": "Success"})

    async def _update(self, request: web.Request) -> web.Response:
        # As SGLang: only the disk path needs no begin and end around it.
        if not self._updating and request.path != "/update_weights_from_disk":
            return _refusal(f"{request.path} must stand between begin_weight_update and end_weight_update")
        body = await request.json()
        if body.get("weight_version") is not None:
            self.weight_version = str(body["weight_version"])
        return web.json_response({"success": True, "message": "Success"})

    async def _set_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            for aborted in self._in_flight.values():
                aborted.set()
        self.weight_version = str(body["new_version"])
        return web.json_response(
            {
                "success": True,
                "message": f"Weight version updated to {self.weight_version}",
                "new_version": self.weight_version,
            }
        )

    async def _change_memory(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _accept(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "Success"})


def _refusal(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)
