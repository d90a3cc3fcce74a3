"""A client with the public SDK: python tinker_client.py URL JSON. Prints a JSON object for each thing it did.

JSON: {"base", "rank", "seed", "rows": [[token, …], …], "steps", "learning_rate", "sample": {"prompt", "num_samples",
"max_tokens", "seed"}, "each_step": whether it samples with the weights of each step, as RL does}
"""

import json
import sys

import tinker
from tinker import types


def tell(**fields) -> None:
    """One line."""
    print(json.dumps(fields), flush=True)


def ask(sampler, asked: dict) -> tuple[list, list]:
    """([[tokens, their log-probs] of each sample], the prompt's log-probs)."""
    answer = sampler.sample(
        types.ModelInput.from_ints(asked["prompt"]),
        asked["num_samples"],
        types.SamplingParams(max_tokens=asked["max_tokens"], seed=asked["seed"], temperature=1.0, stop=[]),
        include_prompt_logprobs=True,
    ).result()
    return [[list(one.tokens), list(one.logprobs)] for one in answer.sequences], list(answer.prompt_logprobs)


def main(url: str, plan: dict) -> None:
    """Train, save, sample."""
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(
        base_model=plan["base"], rank=plan["rank"], seed=plan["seed"], train_unembed=False
    )
    info = training.get_info()
    tell(what="info", model_id=info.model_id, is_lora=info.is_lora, rank=info.lora_rank)
    start = training.save_state("start").result().path
    tell(what="start", path=start)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in plan["rows"]
    ]
    asked = plan["sample"]
    adam = types.AdamParams(learning_rate=plan["learning_rate"], beta1=0.9, beta2=0.95, eps=1e-8)
    for step in range(plan["steps"]):
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(adam)
        result = passed.result()
        tell(
            what="step",
            step=step,
            loss=result.metrics["loss:sum"],
            logprobs=[output["logprobs"].tolist() for output in result.loss_fn_outputs],
            grad_norm=next(v for k, v in stepped.result().metrics.items() if "grad_norm" in k),
            sequences=ask(training.save_weights_and_get_sampling_client(), asked)[0] if plan.get("each_step") else None,
        )
    saved = training.save_weights_for_sampler("trained").result().path
    sequences, prompt_logprobs = ask(service.create_sampling_client(model_path=saved), asked)
    tell(what="sample", path=saved, sequences=sequences, prompt_logprobs=prompt_logprobs)
    base = service.create_sampling_client(base_model=plan["base"])
    tell(what="base", logprobs=list(base.compute_logprobs(types.ModelInput.from_ints(asked["prompt"])).result()))
    end = training.save_state("end").result().path
    ours = training.forward(data, "cross_entropy").result()
    if plan["rank"]:
        again = service.create_training_client_from_state_with_optimizer(end)
    else:  # the trainer has room for one whole model
        training.load_state_with_optimizer(end).result()
        again = training
    theirs = again.forward(data, "cross_entropy").result()
    tell(what="loaded", ours=ours.metrics["loss:sum"], theirs=theirs.metrics["loss:sum"])


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
