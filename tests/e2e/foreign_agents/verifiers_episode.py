"""Two turns of verifiers 0.4 through /inference/v1/generate: arguments are base URL and tokenizer; prints its trace."""

import asyncio
import json
import os
import sys

os.environ["ENDPOINT_KEY"] = "any"
import verifiers.v1 as vf
from verifiers.v1.agent import make_agent
from verifiers.v1.configs.client import TrainClientConfig


class Sum(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace) -> float:
        return float("4" in trace.last_reply)


async def main(base_url: str, tokenizer: str) -> dict:
    client = TrainClientConfig(
        base_url=base_url,
        api_key_var="ENDPOINT_KEY",
        renderer_model_name=tokenizer,
        renderer={"name": "qwen3", "thinking_retention": "all"},
    )
    config = vf.AgentConfig(
        harness={"id": "verifiers_inprocess"},
        model="m",
        client=client,
        sampling={"temperature": 1.0, "max_tokens": 32},
        max_turns=4,
        runtime={"type": "subprocess"},
    )
    async with make_agent(config) as agent, agent.interaction(Sum(vf.TaskData(prompt="compute 2 plus 2"))) as talk:
        await talk.turn()
        if not talk.trace.errors:
            await talk.turn("and again")
    trace = talk.trace
    branches = [
        {"ids": list(one.token_ids), "mask": [int(bit) for bit in one.sampled_mask], "logprobs": list(one.logprobs)}
        for one in trace.branches
    ]
    return {
        "reward": trace.reward,
        "session": str(trace.id),
        "branches": branches,
        "errors": [e.message for e in trace.errors],
    }


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
