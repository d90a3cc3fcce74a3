"""What a client of SDK 0.24.1 sees of a server, as JSON: run by that SDK's own interpreter.

python tinker_old_client.py URL BASE_MODEL
"""

import json
import sys

import tinker
from tinker import types

TOKENS, TARGETS, WEIGHTS = [1, 2, 3], [2, 3, 4], [0.0, 1.0, 0.5]


def main(url: str, base_model: str) -> dict:
    """Losses of three steps, the same again from a saved state, samples, log-probs, and the REST client's answers."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client(base_model=base_model, rank=4)
    prompt = types.ModelInput.from_ints(TOKENS)
    inputs = {"target_tokens": TARGETS, "weights": WEIGHTS}
    data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs)] * 3
    losses = []
    for _ in range(3):
        step = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        losses.append(step.result().metrics["loss:sum"])
    forward = training.forward(data, "cross_entropy").result()
    state = training.save_state("old").result().path
    again = service.create_training_client_from_state(state)
    weights = training.save_weights_for_sampler("old").result().path
    sampler = service.create_sampling_client(model_path=weights)
    answer = sampler.sample(
        prompt,
        num_samples=4,
        sampling_params=types.SamplingParams(max_tokens=4, seed=3, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    rest = service.create_rest_client()
    return {
        "version": tinker.__version__,
        "losses": losses,
        "logprobs": forward.loss_fn_outputs[0]["logprobs"].tolist(),
        "again": again.forward(data, "cross_entropy").result().metrics["loss:sum"],
        "lengths": [len(sequence.tokens) for sequence in answer.sequences],
        "prompt_logprobs": answer.prompt_logprobs,
        "topk": [None if pairs is None else [pair[0] for pair in pairs] for pairs in answer.topk_prompt_logprobs],
        "computed": sampler.compute_logprobs(prompt).result(),
        "runs": [run.training_run_id for run in rest.list_training_runs().result().training_runs],
        "archive": rest.get_checkpoint_archive_url_from_tinker_path(weights).result().url,
        "model": training.model_id,
    }


if __name__ == "__main__":
    print("ANSWER " + json.dumps(main(*sys.argv[1:])))
