"""Minutes of --async-mode full on engines that stall, an environment and a reward server that flap: nothing leaks, and
every prompt that was drawn has one fate.

SOAK_SECONDS (420): how long.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from slime_like.records import EngineEndpoint, WeightsRef
from slime_like.rollout.ledger import Ledger
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.sglang_backend.router import launch_router
from tests.unit.rollout.rows import digits_row, indexes
from tests.unit.rollout.soak_world import SEEN, Seen, Stalls, SyncedEngines, serve_engine, serve_reward, served

TINY = Path(__file__).parents[3] / "models" / "tiny-qwen3"
SECONDS = float(os.environ.get("SOAK_SECONDS", "420"))
NUM_ENGINES, BATCH, GROUP, TRAIN_S = 2, 4, 2, 0.1
#: From the first quarter to the last: what lasts (allocator, one account of the test's own a prompt), and what is in
#: flight at the moment of measuring. What grew with every rollout would be hundreds of steps' worth by then.
MOST_GROWTH = {"rss_mib": 4.0, "fds": 16, "tasks": 32, "threads": 2}
WORLD = "tests.unit.rollout.soak_world."


def usage(manager: RolloutManager) -> dict[str, float]:
    """What this process holds at the moment."""
    gc.collect()
    process = psutil.Process()
    return {
        "rss_mib": process.memory_info().rss / 2**20,
        "fds": process.num_fds(),
        "tasks": manager._tell(lambda: len(asyncio.all_tasks())),
        "threads": threading.active_count(),
    }


@dataclasses.dataclass
class Played:
    """What came of a soak."""

    trained: list[int] = dataclasses.field(default_factory=list)
    requeued: float = 0
    interrupted: float = 0
    failed_requests: float = 0
    num_steps: int = 0
    held: list[dict[str, float]] = dataclasses.field(default_factory=list)  # at each quarter


def play(manager: RolloutManager, engines: SyncedEngines) -> Played:
    """Rollouts, train steps and syncs for SECONDS."""
    played, start = Played(), time.monotonic()

    def sync() -> None:
        manager.policy_changing()
        engines.sync(played.num_steps + 1)
        manager.policy_changed(WeightsRef(version=played.num_steps + 1), played.num_steps)

    sync()
    while (passed := time.monotonic() - start) < SECONDS:
        result = manager.generate(played.num_steps)
        time.sleep(TRAIN_S)
        for group in result.groups:
            assert [sample.sample_index for sample in group.samples] == list(range(GROUP))
            assert {sample.prompt_index for sample in group.samples} == {group.prompt.index}
            assert group.rewards.tolist() == [1.0] * GROUP, "an answer to another prompt"
        assert result.metrics["async/staleness_max"] <= 1
        played.trained += indexes(result)
        manager.trained(indexes(result))
        Ledger().load_state_dict(manager.state_dict()["data"])  # raises unless it adds up
        played.num_steps += 1
        played.requeued += result.metrics["async/requeued_groups"]
        played.interrupted += result.metrics["async/continued_requests"]
        played.failed_requests += result.metrics["rollout/failed_requests"]
        sync()
        if passed >= SECONDS / 4 * (len(played.held) + 1):
            played.held.append(usage(manager))
    played.held.append(usage(manager))
    return played


def account(manager: RolloutManager) -> tuple[dict, Seen]:
    """The ledger, and what was seen until then, of one moment."""
    service = manager._service
    assert service is not None

    def now() -> tuple[dict, Seen]:
        since = {outcome.group.prompt.index for outcome in service.stream._pool.outcomes if outcome.failed}
        return service.feed.state_dict(), dataclasses.replace(
            SEEN, failed=SEEN.failed | since, filtered=[*SEEN.filtered]
        )

    return manager._tell(now)


def check_fates(state: dict, seen: Seen, trained: list[int]) -> collections.Counter[str]:
    """Every drawn prompt has one fate, and the ledger counts as many of each; their numbers."""
    fates: dict[int, list[str]] = {prompt: [] for prompt in range(state["position"])}
    named = {"trained": trained, "dropped: failed": seen.failed, "dropped: filter/some": seen.filtered}
    named |= {"waiting": state["waiting"]}
    for fate, prompts in named.items():
        for prompt in prompts:
            fates[prompt].append(fate)
    for prompt, where in state["open"].items():
        fates[int(prompt)].append(where)
    wrong = {prompt: names for prompt, names in fates.items() if len(names) != 1}
    assert not wrong, f"lost, or with two fates: {wrong}"
    counts = collections.Counter(names[0] for names in fates.values())
    assert counts["trained"] == state["trained"]
    assert {why: counts[f"dropped: {why}"] for why in state["dropped"]} == state["dropped"]
    return counts


def test_a_lost_and_a_doubled_prompt_are_named():
    state = {"position": 4, "trained": 2, "dropped": {"failed": 1}, "open": {"3": "ready"}, "waiting": []}
    fates = check_fates(state, Seen(failed={1}), [0, 2])
    assert fates == {"trained": 2, "dropped: failed": 1, "ready": 1}
    wrong_ones = (Seen(), [0, 2], "{1: "), (Seen(failed={1}), [0, 2, 3], "{3: "), (Seen(failed={1}), [0, 0], "2: ")
    for seen, trained, wrong in wrong_ones:
        with pytest.raises(AssertionError, match=wrong):
            check_fates(state, seen, trained)
    with pytest.raises(AssertionError):
        check_fates(state | {"dropped": {"stale": 1}}, Seen(failed={1}), [0, 2])


@pytest.mark.long_run
@pytest.mark.timeout(SECONDS + 180)
def test_nothing_leaks_and_no_prompt_is_lost_or_trained_twice(tmp_path, make_config):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(served(serve_engine, str(TINY), seed)) for seed in range(NUM_ENGINES)]
        reward_url, _ = stack.enter_context(served(serve_reward))
        config = make_config(
            [digits_row(number) for number in range(500)],
            async_mode="full",
            max_staleness=1,
            stale_policy="requeue",
            update_weight_pause_mode="abort",
            num_rollout=10**6,
            rollout_batch_size=BATCH,
            n_samples_per_prompt=GROUP,
            rollout_request_timeout_s=30.0,
            rollout_request_retries=6,
            custom_generate_function_path=WORLD + "environment",
            dynamic_sampling_filter_path=WORLD + "all_but_some",
            rollout_all_samples_process_path=WORLD + "remember_failed",
            rm_type="remote_rm",
            rm_url=reward_url,
            rm_retries=8,
        )
        endpoints = tuple(EngineEndpoint(index=i, url=url) for i, (url, _) in enumerate(servers))
        router = launch_router(policy="round_robin", log_path=str(tmp_path / "router.log"), timeout_s=60.0)
        stack.callback(router.close)
        for endpoint in endpoints:
            router.register(endpoint, timeout_s=60.0)
        access = EngineAccess(
            router_url=router.url, router_api_key=router.api_key, num_engines=NUM_ENGINES, endpoints=endpoints
        )
        manager = RolloutManager(config, access)
        stack.callback(manager.close)
        manager.start()
        with Stalls([pid for _, pid in servers]) as stalls:
            played = play(manager, SyncedEngines([url for url, _ in servers], config.pause_mode))
        state, seen = account(manager)
    counts = check_fates(state, seen, played.trained)
    numbers = {
        "steps": played.num_steps,
        "stalls": len(stalls.seconds),
        "stalled_s": round(sum(stalls.seconds), 1),
        "environment_errors": seen.num_environment_errors,
        "failed_requests": played.failed_requests,
        "ended_by_syncs": played.interrupted,
        "requeued": played.requeued,
        "fates": dict(counts),
    }
    print(json.dumps(numbers))
    for held in played.held:
        print(json.dumps(held))
    assert len(stalls.seconds) > SECONDS / 10 and seen.num_environment_errors > 0 and played.requeued > 0
    assert counts["dropped: failed"] > 0 and counts["dropped: filter/some"] > 0
    first, last = played.held[0], played.held[-1]
    growth = {name: last[name] - first[name] for name in MOST_GROWTH}
    assert all(growth[name] <= most for name, most in MOST_GROWTH.items()), growth
