"""A verifiers 0.4 task as an agent of --agent-path, in verifiers' own virtual environment (--agent-python).

It renders by itself and asks /inference/v1/generate. POLICY_TOKENIZER: folder of the policy's tokenizer.
PYTHONPATH: the folder of verifiers_inprocess.py, the harness.
"""

import os

os.environ.setdefault("ENDPOINT_KEY", "any")
import verifiers.v1 as vf
from verifiers.v1.agent import make_agent
from verifiers.v1.configs.client import TrainClientConfig


class Varied(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Pays for every character that the last answer has not had before: what an untrained model does unequally well."""

    @vf.reward
    async def varied(self, trace) -> float:
        return len(set(trace.last_reply)) / 40


async def play(base_url, prompt, request_kwargs, metadata):
    """Two turns; the reward is the rubric's."""
    config = vf.AgentConfig(
        harness={"id": "verifiers_inprocess"},
        model=request_kwargs["model"],
        client=TrainClientConfig(
            base_url=base_url,
            api_key_var="ENDPOINT_KEY",
            renderer_model_name=os.environ["POLICY_TOKENIZER"],
            renderer={"name": "qwen3", "thinking_retention": "all"},
        ),
        sampling={
            "temperature": request_kwargs["temperature"],
            "max_tokens": request_kwargs["max_completion_tokens"],
        },
        max_turns=4,
        runtime={"type": "subprocess"},
    )
    data = vf.TaskData(prompt=prompt[-1]["content"])
    async with make_agent(config) as agent, agent.interaction(Varied(data)) as talk:
        await talk.turn()
        if not talk.trace.errors:
            await talk.turn("and again")
    trace = talk.trace
    if trace.errors:
        raise RuntimeError(trace.errors[0].message)
    rows = [
        {"ids": list(one.token_ids), "mask": [int(bit) for bit in one.sampled_mask], "logprobs": list(one.logprobs)}
        for one in trace.branches
    ]
    return {"reward": trace.reward, "metadata": {"said": trace.last_reply, "rows": rows}}
