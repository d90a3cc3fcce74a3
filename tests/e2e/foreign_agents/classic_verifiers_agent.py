"""A verifiers 0.2 environment as an agent of --agent-path, in verifiers' own virtual environment (--agent-python): by
chat."""

import os

os.environ.setdefault("ENDPOINT_KEY", "any")
import verifiers as vf
from datasets import Dataset


def said(completion) -> str:
    """The last answer."""
    last = completion[-1]
    return str((last["content"] if isinstance(last, dict) else last.content) or "")


def varied(completion, **_) -> float:
    """Pays for every character that the last answer has not had before."""
    return len(set(said(completion))) / 40


class Again(vf.MultiTurnEnv):
    """Asks again."""

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "and again"}]


ENVIRONMENT = Again(
    dataset=Dataset.from_list([{"question": "q", "answer": "a"}]), rubric=vf.Rubric(funcs=[varied]), max_turns=2
)


async def play(base_url, prompt, request_kwargs, metadata):
    """Two turns; the reward is the rubric's."""
    client = vf.ClientConfig(client_type="openai_chat_completions", api_base_url=base_url, api_key_var="ENDPOINT_KEY")
    sampling = {
        "temperature": request_kwargs["temperature"],
        "max_tokens": request_kwargs["max_completion_tokens"],
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    row = {**ENVIRONMENT.get_dataset(n=1)[0], "prompt": prompt, "answer": str(metadata["label"])}
    output = await ENVIRONMENT.run_rollout(row, client, request_kwargs["model"], sampling, state_columns=["trajectory"])
    if output.get("error"):
        raise RuntimeError(str(output["error"]))
    rows = []
    for step in output["trajectory"]:
        prompt_ids, answer_ids = list(step["tokens"]["prompt_ids"]), list(step["tokens"]["completion_ids"])
        rows.append(
            {
                "ids": prompt_ids + answer_ids,
                "mask": [0] * len(prompt_ids) + [1] * len(answer_ids),
                "logprobs": [0.0] * len(prompt_ids) + list(step["tokens"]["completion_logprobs"]),
            }
        )
    return {"reward": output["reward"], "metadata": {"said": said(output["completion"]), "rows": rows}}
