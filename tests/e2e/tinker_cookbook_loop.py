"""tinker-cookbook's own loops without a network: python tinker_cookbook_loop.py URL JSON. Prints their metrics.

JSON: {"loop": "sl_loop" | "rl_loop", "base", "log", "steps", and further fields of the loop's Config}. What a hub
would give comes from here: the data set, and the tokenizer and name of a renderer for a model that the cookbook does
not know. The loop itself is the cookbook's.
"""

import importlib
import json
import sys

import datasets
from tinker_cookbook import model_info
from transformers import AutoTokenizer


def rows(loop: str) -> list[dict]:
    """Of the data set that the loop asks for: conversations, or questions."""
    if loop == "rl_loop":
        return [{"question": f"sort {n}", "answer": f"#### {n}"} for n in range(1000, 1064)]
    turns = [
        [{"role": "user", "content": f"sort {n}"}, {"role": "assistant", "content": "".join(sorted(str(n)))}]
        for n in range(1000, 1064)
    ]
    return [{"messages": messages} for messages in turns]


def main(url: str, plan: dict) -> None:
    """Run one."""
    name, base = plan.pop("loop"), plan.pop("base")
    datasets.load_dataset = lambda *_: datasets.DatasetDict(train=datasets.Dataset.from_list(rows(name)))
    model_info.get_recommended_renderer_name = lambda _: "role_colon"
    loop = importlib.import_module(f"tinker_cookbook.recipes.{name}")
    loop.get_tokenizer = lambda _: AutoTokenizer.from_pretrained(base)
    if name == "rl_loop":
        # The tiny model solves no sums: short answers earn more, so that there is something to learn.
        loop.get_reward = lambda response, _: 1.0 / (1 + len(response))
    log, steps = plan.pop("log"), plan.pop("steps")
    loop.main(loop.Config(base_url=url, log_path=log, model_name=base, max_steps=steps, **plan))
    with open(f"{log}/metrics.jsonl") as file:
        for line in file:
            print(json.dumps({"what": "metrics"} | json.loads(line)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
