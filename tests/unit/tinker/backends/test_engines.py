"""Which adapters an engine holds while many clients sample: an engine that refuses what SGLang would, and remembers."""

# Covers slime_like.tinker.backends.seat too.

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from aiohttp import web

from slime_like.errors import RunError
from slime_like.records import EngineEndpoint
from slime_like.tinker.backends.engines import EngineSampling, SamplingOptions
from slime_like.tinker.backends.sample_bodies import EngineLimits
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.records import SampleJob

PROMPT = np.array([3, 4], np.int32)


class LoraEngine:
    """SGLang's endpoints that samples need, by its rules: a name is loaded once, an adapter that is unloaded waits for
    its requests, one that is not there is refused. What is generated is the number of the weights.
    """

    def __init__(self, index: int, capacity: int):
        self.index, self.capacity = index, capacity
        self.adapters: dict[str, str] = {}  # name -> folder
        self.base = "start"
        self.running: list[tuple[str | None, str]] = []  # (adapter, base) of each request
        self.history: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.delay_s = 0.01
        self.dies = False
        self.endpoint: EngineEndpoint
        self._runner: web.AppRunner

    async def start(self) -> None:
        app = web.Application()
        for path, handler in {
            "/load_lora_adapter": self._load, "/unload_lora_adapter": self._unload,
            "/update_weights_from_disk": self._whole, "/flush_cache": self._flush, "/generate": self._generate,
        }.items():  # fmt: skip
            app.router.add_post(path, handler)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint = EngineEndpoint(
            index=self.index, url=f"http://127.0.0.1:{self._runner.addresses[0][1]}", api_key="k"
        )

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _load(self, request):
        body = await request.json()
        await asyncio.sleep(self.delay_s / 2)
        if body["lora_name"] in self.adapters:
            return web.json_response({"error": "already loaded"}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.history.append(("load", body["lora_path"]))
        if len(self.adapters) > self.capacity:
            self.problems.append(f"{len(self.adapters)} adapters")
        return web.json_response({"success": True})

    async def _unload(self, request):
        name = (await request.json())["lora_name"]
        if any(adapter == name for adapter, _ in self.running):
            self.problems.append(f"{name} unloaded while it runs")
        self.history.append(("unload", self.adapters.pop(name)))
        return web.json_response({"success": True})

    async def _whole(self, request):
        if self.running:
            self.problems.append(f"weights changed under {self.running}")
        self.base = (await request.json())["model_path"]
        self.history.append(("whole", self.base))
        return web.json_response({"success": True})

    async def _flush(self, request):
        return web.Response(text="ok")

    async def _generate(self, request):
        if self.dies:
            request.transport.close()
            return web.Response()
        assert request.headers["Authorization"] == "Bearer k"
        body = await request.json()
        adapter = (body.get("lora_path") or [None])[0]
        if adapter is not None and adapter not in self.adapters:
            return web.json_response({"error": {"message": f"{adapter} was never loaded"}}, status=400)
        job = (adapter, self.base)
        self.running.append(job)
        await asyncio.sleep(self.delay_s)
        self.running.remove(job)
        made_by = self.adapters[adapter] if adapter else self.base
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 7, None]], "by": made_by}
        return web.json_response([{"output_ids": [7], "meta_info": meta}] * len(body["input_ids"]))


@dataclasses.dataclass
class Engines:
    """The fleet of those above. started: what `revive` puts in the place of those that die."""

    engines: list[LoraEngine]
    started: list[LoraEngine] = dataclasses.field(default_factory=list)
    revivals: int = 0
    missing: int = 0  # that died, and have none in their place

    @property
    def endpoints(self):
        return [engine.endpoint for engine in self.engines]

    def revive(self):
        self.revivals += 1
        dead = [engine for engine in self.engines if engine.dies]
        self.engines = [engine for engine in self.engines if not engine.dies]
        self.missing += len(dead)
        if self.missing and not self.started:
            raise RunError("no GPU")
        self.engines += self.started[: self.missing]
        deaths = [f"engine {number}" for number in range(self.missing)]
        self.started, self.missing = self.started[self.missing :], 0
        return deaths

    def close(self):
        self.engines = []


@pytest.fixture
def folders(tmp_path) -> dict[str, str]:
    """Adapters a to f, and two whole models."""
    for name in "abcdef":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
        (folder / "adapter_model.safetensors").write_text("")
    for name in ("whole1", "whole2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return {path.name: str(path) for path in tmp_path.iterdir()}


def job(sampler: str) -> SampleJob:
    return SampleJob(sampler_id=sampler, prompt=PROMPT, max_tokens=1)


def run(folders, body, *, num_engines: int = 1, capacity: int = 2, spare: int = 0):
    """What `body(backend, fleet)` gives."""

    async def within():
        engines = [LoraEngine(index, capacity) for index in range(num_engines + spare)]
        for engine in engines:
            await engine.start()
        fleet = Engines(engines[:num_engines], engines[num_engines:])
        limits = EngineLimits(context_length=32, vocab_size=50, takes_seeds=True)
        options = SamplingOptions(
            base_folder="start", limits=limits, max_adapters=capacity, max_rank=8, request_timeout_s=5,
            load_deadline_s=5,
        )  # fmt: skip
        backend = EngineSampling(fleet, options)
        await backend.open("base", None)
        for name, folder in folders.items():
            await backend.open(name, folder)
        try:
            result = await body(backend, fleet)
        finally:
            await backend.close()
            for engine in engines:
                await engine.stop()
        assert [engine.problems for engine in engines] == [[]] * len(engines)
        return result, engines

    return asyncio.run(asyncio.wait_for(within(), 30))


def test_more_adapters_than_fit_take_turns(folders):
    async def body(backend, fleet):
        return await asyncio.gather(*(backend.sample(job(name)) for name in "abcdef" * 3))

    results, (engine,) = run(folders, body)
    assert len(results) == 18 and all(result.weights.split("@")[0] in "abcdef" for result in results)
    assert len(engine.adapters) == 2


def test_the_one_used_longest_ago_makes_way(folders):
    async def body(backend, fleet):
        for name in "abacab":
            await backend.sample(job(name))

    _, (engine,) = run(folders, body)
    names = [(what, folder[-1]) for what, folder in engine.history]
    assert names == [("load", "a"), ("load", "b"), ("unload", "b"), ("load", "c"), ("unload", "c"), ("load", "b")]


def test_whole_weights_wait_until_nothing_runs_and_the_base_comes_back(folders):
    async def body(backend, fleet):
        order = ["a", "base", "whole1", "b", "whole2", "base", "whole1", "a"]
        return await asyncio.gather(*(backend.sample(job(name)) for name in order))

    results, (engine,) = run(folders, body)
    assert [r.weights.split("@")[0] for r in results] == [
        "a", "base", "whole1", "b", "whole2", "base", "whole1", "a"
    ]  # fmt: skip
    assert [folder.rsplit("/", 1)[-1] for what, folder in engine.history if what == "whole"] == [
        "whole1", "start", "whole2", "start", "whole1", "start"
    ]  # fmt: skip


def test_a_released_adapter_is_unloaded_when_its_last_request_has_ended(folders):
    async def body(backend, fleet):
        fleet.engines[0].delay_s = 0.2
        running = asyncio.create_task(backend.sample(job("a")))
        await asyncio.sleep(0.15)
        await backend.release("a")
        other = await backend.sample(job("b"))  # not held up
        assert other.weights == "b@2"
        await running
        await asyncio.gather(*backend._releasing)
        with pytest.raises(RunError, match="not open"):
            await backend.sample(job("a"))

    _, (engine,) = run(folders, body)
    assert [folder[-1] for folder in engine.adapters.values()] == ["b"]


def test_requests_are_spread_over_engines_and_go_where_their_adapter_is(folders):
    async def body(backend, fleet):
        await backend.sample(job("a"))
        await backend.sample(job("a"))
        await asyncio.gather(*(backend.sample(job("b")) for _ in range(12)))

    _, engines = run(folders, body, num_engines=2)
    loads = [[folder[-1] for what, folder in engine.history if what == "load"] for engine in engines]
    assert sum(load.count("a") for load in loads) == 1 and sum(load.count("b") for load in loads) == 2


def test_engines_that_died_are_started_anew_once_for_all_who_noticed(folders):
    async def body(backend, fleet):
        await backend.sample(job("a"))
        fleet.engines[0].dies = True
        lost = await asyncio.gather(*(backend.sample(job(name)) for name in "aab"), return_exceptions=True)
        assert [type(error) for error in lost] == [BackendLost] * 3
        return (await backend.sample(job("a"))).weights, fleet.revivals

    (weights, revivals), _ = run(folders, body, spare=1)
    assert weights == "a@1" and revivals == 1


def test_where_no_engine_starts_samples_are_lost_until_one_does(folders):
    async def body(backend, fleet):
        fleet.engines[0].dies = True
        spare, fleet.started = fleet.started, []
        for _ in range(2):
            with pytest.raises(BackendLost, match="no GPU"):
                await backend.sample(job("a"))
        fleet.started = spare
        with pytest.raises(BackendLost, match="started anew"):
            await backend.sample(job("a"))
        return (await backend.sample(job("a"))).weights

    assert run(folders, body, spare=1)[0] == "a@1"
