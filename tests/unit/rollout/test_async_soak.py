"""Minutes of --async-mode full on engines that stall, an environment and a reward server that flap: nothing leaks, and
every prompt that was drawn has one fate.

SOAK_SECONDS (420): how long, with each --stale-policy.
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
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from slime_like.records import EngineEndpoint, WeightsRef
from slime_like.rollout.ledger import Ledger
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.sglang_backend.router import launch_router
from slime_like.utils.files import RunDirectory, read_json_lines
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
    late: float = 0
    interrupted: float = 0
    failed_requests: float = 0
    num_steps: int = 0
    held: list[dict[str, float]] = dataclasses.field(default_factory=list)  # at each quarter


def play(manager: RolloutManager, engines: SyncedEngines, bound: int | None) -> Played:
    """Rollouts, train steps and syncs for SECONDS. bound: on staleness, where there is one."""
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
        if bound is not None:
            assert result.metrics["async/staleness_max"] <= bound
        played.trained += indexes(result)
        manager.trained(indexes(result))
        Ledger().load_state_dict(manager.snapshot()[0]["data"])  # raises unless it adds up
        played.num_steps += 1
        played.requeued += result.metrics["async/requeued_groups"]
        played.late += result.metrics["async/late_groups"]
        played.interrupted += result.metrics["async/continued_requests"]
        played.failed_requests += result.metrics["rollout/failed_requests"]
        sync()
        if passed >= SECONDS / 4 * (len(played.held) + 1):
            played.held.append(usage(manager))
    played.held.append(usage(manager))
    return played


def account(manager: RolloutManager, dropped: Path) -> tuple[dict, Seen, list[dict]]:
    """The ledger, what was seen until then, and the lines of dropped.jsonl, of one moment."""
    service = manager._service
    assert service is not None

    def now() -> tuple[dict, Seen, list[dict]]:
        since = {outcome.group.prompt.index for outcome in service.stream._pool.outcomes if outcome.failed}
        seen = dataclasses.replace(SEEN, failed=SEEN.failed | since, filtered=[*SEEN.filtered])
        return service.feed.state_dict(), seen, read_json_lines(dropped)

    return manager._tell(now)


def check_fates(state: dict, seen: Seen, trained: list[int], dropped: list[dict]) -> collections.Counter[str]:
    """Every drawn prompt has one fate, and the ledger counts as many of each; their numbers. Who failed and who was
    filtered was seen by others than the ledger.
    """
    fates: dict[int, list[str]] = {prompt: [] for prompt in range(state["position"])}
    named: dict[str, Collection[int]] = {"trained": trained, "waiting": state["waiting"]}
    for fate, prompts in named.items():
        for prompt in prompts:
            fates[prompt].append(fate)
    for line in dropped:
        fates[line["prompt"]].append(f"dropped: {line['why']}")
    by_why = {why: {line["prompt"] for line in dropped if line["why"] == why} for why in state["dropped"]}
    stale = by_why.get("stale", set())  # an answer may fail, and be filtered, after it was dropped
    assert by_why.get("failed", set()) - seen.failed == set() == seen.failed - by_why.get("failed", set()) - stale
    assert by_why.get("filter/some", set()) == set(seen.filtered) - stale
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
    seen, dropped = Seen(failed={1}), [{"prompt": 1, "why": "failed"}]
    fates = check_fates(state, seen, [0, 2], dropped)
    assert fates == {"trained": 2, "dropped: failed": 1, "ready": 1}
    for trained, wrong in (([0, 2, 3], "{3: "), ([0, 0], "2: ")):
        with pytest.raises(AssertionError, match=wrong):
            check_fates(state, seen, trained, dropped)
    wrong_ones = (Seen(), dropped), (seen, []), (Seen(failed={1, 2}), dropped)
    for other, lines in (*wrong_ones, (Seen(failed={1}, filtered=[0]), dropped)):
        with pytest.raises(AssertionError):
            check_fates(state, other, [0, 2], lines)
    with pytest.raises(AssertionError):
        check_fates(state | {"dropped": {"stale": 1}}, seen, [0, 2], dropped)


@pytest.mark.long_run
@pytest.mark.timeout(SECONDS + 180)
@pytest.mark.parametrize("policy", ["wait", "drop", "requeue", "train"])
def test_nothing_leaks_and_no_prompt_is_lost_or_trained_twice(tmp_path, make_config, policy: str):
    SEEN.clear()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(served(serve_engine, str(TINY), seed)) for seed in range(NUM_ENGINES)]
        reward_url, _ = stack.enter_context(served(serve_reward))
        config = make_config(
            [digits_row(number) for number in range(500)],
            async_mode="full",
            max_staleness=1,
            stale_policy=policy,
            run_dir=str(tmp_path),
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
            bound = None if policy == "train" else 1
            played = play(manager, SyncedEngines([url for url, _ in servers], config.pause_mode), bound)
        state, seen, dropped = account(manager, RunDirectory(str(tmp_path)).dropped)
    counts = check_fates(state, seen, played.trained, dropped)
    numbers = {
        "policy": policy,
        "steps": played.num_steps,
        "stalls": len(stalls.seconds),
        "stalled_s": round(sum(stalls.seconds), 1),
        "environment_errors": seen.num_environment_errors,
        "failed_requests": played.failed_requests,
        "ended_by_syncs": played.interrupted,
        "requeued": played.requeued,
        "late": played.late,
        "fates": dict(counts),
    }
    print(json.dumps(numbers))
    for held in played.held:
        print(json.dumps(held))
    assert len(stalls.seconds) > SECONDS / 10 and seen.num_environment_errors > 0
    met = {"requeue": played.requeued, "train": played.late, "drop": counts["dropped: stale"]}
    assert {name for name, count in met.items() if count} == ({policy} - {"wait"})
    assert counts["dropped: failed"] > 0 and counts["dropped: filter/some"] > 0
    first, last = played.held[0], played.held[-1]
    growth = {name: last[name] - first[name] for name in MOST_GROWTH}
    assert all(growth[name] <= most for name, most in MOST_GROWTH.items()), growth
