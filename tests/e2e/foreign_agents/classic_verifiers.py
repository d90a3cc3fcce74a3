"""Two turns of verifiers 0.2: arguments are base URL and client type; prints reward, turns and their token counts."""

import asyncio
import json
import os
import sys

os.environ["ENDPOINT_KEY"] = "any"
import verifiers as vf
from datasets import Dataset


def right(completion, answer, **_) -> float:
    last = completion[-1]
    return float(answer in str(last["content"] if isinstance(last, dict) else last.content))


class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "and again"}]


async def main(base_url: str, client_type: str) -> dict:
    rows = Dataset.from_list([{"question": "compute 2 plus 2", "answer": "4"}])
    environment = Again(dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=2)
    client = vf.ClientConfig(client_type=client_type, api_base_url=base_url, api_key_var="ENDPOINT_KEY")
    sampling = {"temperature": 1.0, "max_tokens": 32, "logprobs": True, "extra_body": {"return_token_ids": True}}
    output = await environment.run_rollout(
        environment.get_dataset(n=1)[0], client, "m", sampling, state_columns=["trajectory"]
    )
    turns = [step["tokens"] for step in output["trajectory"]]
    kept = ("prompt_ids", "completion_ids", "completion_logprobs")
    return {
        "reward": output["reward"],
        "error": str(output.get("error")),
        "turns": [{name: list(turn[name]) for name in kept} for turn in turns],
    }


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
