"""One function for each place in a rollout that takes one of your own; docs/hooks.md has the protocols.

Each is small enough to read and does something that a run of the tiny model shows.
"""

from __future__ import annotations

import asyncio

import numpy as np

from slime_like.records import TrainSample, per_token


def train_shorter_half(args, groups):
    """--rollout-sample-filter-path: of each group the shorter half trains; all rewards count in the baseline."""
    return [
        [sample.num_response_tokens <= np.median([other.num_response_tokens for other in group.samples])
         for sample in group.samples]
        for group in groups
    ]  # fmt: skip


seen_groups: list[int] = []  # prompts of every group that was made in this process


def remember_all(args, groups, source):
    """--rollout-all-samples-process-path: sees dropped groups too."""
    seen_groups.extend(group.prompt.index for group in groups)


def most_varied(args, groups, count):
    """--buffer-filter-path: the groups whose rewards differ most teach most."""
    return sorted(groups, key=lambda group: -float(np.std(group.rewards)))[:count]


def centered_over_the_rollout(args, samples):
    """--custom-reward-post-process-path: every reward minus the mean of the whole rollout."""
    rewards = np.array([sample.reward for sample in samples])
    return rewards - rewards.mean()


def best_of_group(args, groups):
    """--custom-convert-samples-to-train-data-path: imitate each group's best answer (rejection sampling)."""
    train_samples = []
    for group in groups:
        best = max(group.samples, key=lambda sample: sample.reward)
        train_samples.append(
            TrainSample(
                prompt_index=best.prompt_index,
                sample_index=best.sample_index,
                tokens=best.tokens,
                loss_mask=best.loss_mask,
                engine_logprobs=best.engine_logprobs,
                weight_versions=best.weight_versions,
                reward=best.reward,
                advantages=per_token(1.0, best.loss_mask),
                weights=per_token(1.0, best.loss_mask),
                routed_experts=best.routed_experts,
                metadata=best.metadata,
            )
        )
    return train_samples


def vocabulary_used(step, args, samples, metrics, seconds):
    """--custom-rollout-log-function-path: how many different tokens the rollout's answers have."""
    chosen = np.concatenate([sample.tokens[sample.loss_mask != 0] for sample in samples])
    return {"rollout/different_tokens": len(np.unique(chosen))}


def best_of_eval(step, args, data, metrics):
    """--custom-eval-rollout-log-function-path: the best reward of each set."""
    return {f"eval/{name}/reward_max": max(one["rewards"]) for name, one in data.items()}


async def twice_as_many_prompts(args, step, rollout):
    """--rollout-function-path: of twice as many prompts, those whose first answer has a reward nearest `probe_reward`.

    They get a whole group, the others are dropped. `probe_reward` is of --custom-config-path.
    """
    prompts = rollout.draw(2 * rollout.num_groups)
    probes = await asyncio.gather(*(rollout.group(prompt, 1) for prompt in prompts))
    ranked = sorted(probes, key=lambda group: abs(group.rewards[0] - args.probe_reward))
    chosen = sorted((group.prompt for group in ranked[: rollout.num_groups]), key=lambda prompt: prompt.index)
    groups = await asyncio.gather(*(rollout.group(prompt) for prompt in chosen))
    return list(groups), {"rollout/probe_reward_mean": float(np.mean([group.rewards[0] for group in probes]))}


async def first_rows_only(args, step, evaluation):
    """--eval-function-path: the first four prompts of each set, for a quick look."""
    sets = {}
    for name, prompts in evaluation.sets.items():
        groups = (evaluation.group(name, prompt) for prompt in prompts[:4])
        sets[name] = list(await asyncio.gather(*groups))
    return sets, {"eval/prompts": float(sum(map(len, sets.values())))}


class Sorting:
    """--data-source-path: sorting tasks without end, of more digits once the present ones are mostly right."""

    def __init__(self, args, tokenizer):
        self.num_digits = 2

    def row_at(self, position):
        """A row as a line of --prompt-data has it; here the same for the same position and number of digits."""
        digits = np.random.default_rng([position, self.num_digits]).integers(0, 10, self.num_digits).tolist()
        text = "".join(map(str, digits))
        return {"prompt": [{"role": "user", "content": f"sort {text}"}], "label": "".join(sorted(text))}

    def observe(self, groups):
        """After each rollout: what became of the rows."""
        if np.mean([group.rewards.mean() for group in groups]) > 0.8:
            self.num_digits += 1

    def state_dict(self):
        """Goes into checkpoints."""
        return {"num_digits": self.num_digits}

    def load_state_dict(self, state):
        """And comes back."""
        self.num_digits = state["num_digits"]
