"""What is impossible about several config groups together: every rule that reaches across groups."""

from __future__ import annotations

from slime_like.config.adapter_rules import adapter_problems
from slime_like.config.async_rules import async_problems
from slime_like.config.fake_quantisation import rounding_problems
from slime_like.config.lora_targets import target_modules
from slime_like.config.transports import fitting
from slime_like.config.tree import GROUPS, ConfigTree


def problems_of(config: ConfigTree) -> list[str]:
    """Everything impossible that needs no file to see, of each group and across groups."""
    problems: list[str] = []
    for name in GROUPS:
        group = getattr(config, name)
        if name == "model":
            problems += group.problems() if group.is_known else []
        elif name == "parallel":
            problems += group.problems(config.model)
        elif name == "lora":
            problems += group.problems() or (group.target_problems(config.model) if config.model.is_known else [])
        else:
            problems += group.problems()
    return (
        problems + (_batch_problems(config) + _engine_problems(config) if not problems else []) + _role_problems(config)
    )


def _batch_problems(config: ConfigTree) -> list[str]:
    samples, steps, size = config.samples_per_rollout, config.num_steps_per_rollout, config.global_batch_size
    origin = (
        f"--rollout-batch-size {config.rollout.rollout_batch_size} x --n-samples-per-prompt"
        f" {config.rollout.n_samples_per_prompt}"
    )
    if steps * size != samples:
        return [
            (
                f"{steps} steps of {size} samples are not the rollout's {samples}: {origin}, --num-steps-per-rollout, "
                "--global-batch-size. Fix: make their products equal."
            )
        ]
    if config.placement.debug_rollout_only:
        return []
    gpus, model = config.placement.actor_num_gpus, config.parallel.model_parallel_size
    if gpus % model:
        return [
            (
                f"the trainer's {gpus} GPUs do not divide by tensor x pipeline x context parallel size {model}:"
                " --actor-num-nodes, --actor-num-gpus-per-node, --tensor-model-parallel-size,"
                " --pipeline-model-parallel-size."
            )
        ]
    block = config.parallel.expert_parallel_block if config.model.num_experts else 1
    if gpus % block:
        return [
            (
                f"the trainer's {gpus} GPUs do not divide by expert tensor x expert x pipeline parallel size {block}:"
                " --actor-num-nodes, --actor-num-gpus-per-node, --expert-tensor-parallel-size,"
                " --expert-model-parallel-size, --pipeline-model-parallel-size."
            )
        ]
    if size % config.data_parallel_size:
        return [
            (
                f"--global-batch-size {size} does not divide by the data parallel size {config.data_parallel_size} ("
                f"{gpus} GPUs / {model})."
            )
        ]
    per_rank = size // config.data_parallel_size
    if not config.batch.use_dynamic_batch_size and per_rank % config.batch.micro_batch_size:
        return [
            (
                f"{per_rank} samples per data parallel rank do not divide by --micro-batch-size"
                f" {config.batch.micro_batch_size}. Fix: another size, or --use-dynamic-batch-size."
            )
        ]
    return []


def _engine_problems(config: ConfigTree) -> list[str]:
    if not config.uses_engines:
        return []
    gpus, pp, dp, ep = (
        config.placement.rollout_num_gpus_per_engine,
        config.engine.pp_size,
        config.engine.dp_size,
        config.engine.ep_size,
    )
    if gpus % pp:
        return [
            (
                f"an engine of {gpus} GPUs does not divide into {pp} pipeline stages: --rollout-num-gpus-per-engine,"
                " --sglang-pp-size."
            )
        ]
    problems, tp = [], gpus // pp
    origin = f"tensor parallel size {tp} (--rollout-num-gpus-per-engine {gpus} / --sglang-pp-size {pp})"
    if dp > 1 and not config.engine.dp_attention:
        problems.append(
            f"--sglang-dp-size {dp} needs --sglang-enable-dp-attention. Fix: add it; or drop both: whole copies of the"
            " model are more engines (--rollout-num-gpus / --rollout-num-gpus-per-engine)."
        )
    if tp % dp:
        problems.append(f"--sglang-dp-size {dp} does not divide the engine's {origin}.")
    if tp % ep:
        problems.append(f"--sglang-ep-size {ep} does not divide the engine's {origin}.")
    if ep > 1 and config.model.is_known and not config.model.num_experts:
        problems.append(f"--sglang-ep-size {ep} needs a model with experts (--num-experts).")
    return problems


def _routing_problems(config: ConfigTree) -> list[str]:
    """What routing replay needs."""
    problems = []
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        flag_name = f"--{name.replace('_', '-')}"
        if not getattr(config.loss, name):
            continue
        if config.model.is_known and not config.model.num_experts:
            problems.append(f"{flag_name} needs a model with experts (--num-experts). Fix: drop it.")
        if config.is_sft:
            problems.append(f"{flag_name} is about sampled responses; --loss-type sft_loss samples none. Fix: drop it.")
    if (
        config.loss.use_rollout_routing_replay
        and str(config.engine.sglang.get("enable_return_routed_experts", True)).lower() == "false"
    ):
        problems.append(
            "--sglang-enable-return-routed-experts false keeps from the trainer what --use-rollout-routing-replay"
            " needs. Fix: drop one of them."
        )
    return problems


def _sampling_problems(config: ConfigTree) -> list[str]:
    """Samples that are not what training takes them for."""
    if config.is_sft and (config.rollout.mask_truncated_samples or config.reward.overlong_buffer_len is not None):
        return [
            (
                "--mask-truncated-samples and --overlong-buffer-len are about sampled responses; --loss-type sft_loss"
                " samples none. Fix: drop them."
            )
        ]
    if not config.uses_engines:
        extra = [
            name
            for name in ("passrate", "multi_turn", "correct_samples")
            if getattr(config.observability, f"log_{name}")
        ]
        flags = ", ".join(f"--log-{name.replace('_', '-')}" for name in extra)
        return [f"{flags}: about sampled responses, and this run samples none. Fix: leave it out."] if extra else []
    problems, rollout, buffer = [], config.rollout, config.reward.overlong_buffer_len
    if (
        rollout.filters_sampling
        and not rollout.rollout_allow_filtered_sampling
        and not config.placement.debug_rollout_only
    ):
        problems.append(
            f"--rollout-top-p {rollout.rollout_top_p:g} and --rollout-top-k {rollout.rollout_top_k} keep unlikely"
            " tokens from being drawn, but the log-probs of engines and trainer are of the whole distribution: the"
            " policy gradient is biased, and neither the ratio nor --use-tis sees it. Fix: leave them out"
            " (--eval-top-p and --eval-top-k are free), or accept it with --rollout-allow-filtered-sampling."
        )
    if buffer is not None and buffer > rollout.rollout_max_response_len:
        problems.append(
            f"--overlong-buffer-len {buffer} is above --rollout-max-response-len {rollout.rollout_max_response_len},"
            " whose end it is."
        )
    return problems


#: Flags of the user's functions that only a run that generates calls.
_OF_ROLLOUTS = {
    "rollout": (
        "rollout_function_path",
        "buffer_filter_path",
        "rollout_sample_filter_path",
        "rollout_all_samples_process_path",
        "custom_rollout_log_function_path",
    ),
    "eval": ("eval_function_path", "custom_eval_rollout_log_function_path"),
}


def _hook_problems(config: ConfigTree) -> list[str]:
    """Functions of the user's that would never be called, or whose results nobody would look at."""
    problems = []
    if not config.uses_engines:
        problems += [
            f"--{name.replace('_', '-')}: this run samples nothing. Fix: leave it out."
            for group, names in _OF_ROLLOUTS.items()
            for name in names
            if getattr(getattr(config, group), name)
        ]
    convert = config.rollout.custom_convert_samples_to_train_data_path
    post_process = config.reward.custom_reward_post_process_path
    of_training = {
        "--custom-convert-samples-to-train-data-path": convert,
        "--custom-reward-post-process-path": post_process,
    }
    if config.is_sft or config.placement.debug_rollout_only:
        why = "supervised rows have no rewards" if config.is_sft else "this run trains nothing"
        problems += [f"{name}: {why}. Fix: leave it out." for name, path in of_training.items() if path]
    advantage = config.loss.custom_advantage_function_path
    if convert and (post_process or advantage or config.rollout.mask_truncated_samples):
        problems.append(
            "--custom-convert-samples-to-train-data-path gives advantages and loss masks itself: it does not go with"
            " --custom-reward-post-process-path, --custom-advantage-function-path or --mask-truncated-samples. Fix:"
            " drop these."
        )
    elif post_process and advantage:
        problems.append(
            "--custom-reward-post-process-path and --custom-advantage-function-path both say what samples are pushed"
            " by. Fix: one of them."
        )
    return problems


def _reference_problems(config: ConfigTree) -> list[str]:
    """--ref-update-interval, which reaches into checkpoints and placement."""
    interval, save_interval = config.loss.ref_update_interval, config.checkpoint.save_interval
    if not interval:
        return []
    if not config.needs_reference:
        return [
            (
                f"--ref-update-interval {interval} needs a reference: --use-kl-loss or --kl-coef. Fix: one of them, or"
                " drop it."
            )
        ]
    if save_interval and save_interval % interval:
        return [
            (
                f"--save-interval {save_interval} is no multiple of --ref-update-interval {interval}: a checkpoint"
                " between two updates cannot be resumed, as it does not hold the reference. Fix: a multiple."
            )
        ]
    return []


def _agent_problems(config: ConfigTree) -> list[str]:
    """What --env needs of other flags, and what does not go with it."""
    if config.agents.env is None:
        return []
    problems = []
    if config.is_sft:
        problems.append("--env plays episodes; --loss-type sft_loss samples none. Fix: drop it.")
    if not config.data.apply_chat_template:
        problems.append("--env needs --apply-chat-template: turns are chat messages. Fix: add it.")
    if config.rollout.custom_generate_function_path:
        problems.append("--env and --custom-generate-function-path both make the answers. Fix: drop one of them.")
    return problems


def _serving_problems(config: ConfigTree) -> list[str]:
    """What --serve-rollout needs of other flags, and what does not go with it."""
    if not config.serving.serve_rollout:
        parsers = ("env_tool_call_parser", "env_reasoning_parser")
        return [
            f"--{name.replace('_', '-')} does nothing without --env or --serve-rollout. Fix: add one, or drop this."
            for name in parsers
            if getattr(config.agents, name) is not None and config.agents.env is None
        ]
    problems = []
    if not config.uses_engines:
        problems.append("--serve-rollout answers with engines, and this run has none. Fix: drop it.")
    for flag_name, given in {
        "--env": config.agents.env,
        "--custom-generate-function-path": config.rollout.custom_generate_function_path,
    }.items():
        if given:
            problems.append(f"--serve-rollout and {flag_name} both make the answers. Fix: drop one of them.")
    if config.loss.use_rollout_routing_replay:
        problems.append("--use-rollout-routing-replay does not go with --serve-rollout yet. Fix: drop one of them.")
    return problems


def _supervised_problems(config: ConfigTree) -> list[str]:
    problems: list[str] = []
    if config.is_sft and config.placement.debug_rollout_only:
        problems.append("--loss-type sft_loss generates nothing: drop --debug-rollout-only.")
    if config.is_sft and config.rollout.n_samples_per_prompt != 1:
        problems.append("--n-samples-per-prompt above 1: supervised rows have one answer. Fix: 1.")
    if config.data.loss_mask_type and not config.is_sft:
        problems.append(
            "--loss-mask-type says what of supervised conversations is trained: it does nothing without --loss-type"
            " sft_loss. Fix: drop it."
        )
    for name in ("eval_config", "eval_prompt_data"):
        if config.is_sft and getattr(config.eval, name):
            problems.append(f"--{name.replace('_', '-')} needs engines, and --loss-type sft_loss starts none.")
    return problems


def _role_problems(config: ConfigTree) -> list[str]:
    problems = _routing_problems(config) + _sampling_problems(config) + _hook_problems(config)
    problems += _reference_problems(config) + _agent_problems(config) + _serving_problems(config)
    problems += _supervised_problems(config)
    own_base = config.lora.enabled and config.swaps_reference  # adapters switched off
    if config.needs_reference and not config.checkpoint.ref_load and not own_base:
        problems.append(
            f"{'--use-kl-loss' if config.loss.use_kl_loss else '--kl-coef'} needs --ref-load, the reference model."
        )
    if config.placement.debug_train_only and not config.is_sft and not config.observability.load_debug_rollout_data:
        problems.append("--debug-train-only needs --load-debug-rollout-data (or --loss-type sft_loss).")
    if config.uses_engines and config.observability.load_debug_rollout_data:
        problems.append("--load-debug-rollout-data needs --debug-train-only: the loaded samples replace generation.")
    if config.checkpoint.reward_load and config.placement.debug_rollout_only:
        problems.append(
            "--debug-rollout-only starts engines only, not the model of --reward-load. Fix: --rm-type or"
            " --custom-rm-path instead."
        )
    if config.reward.reward_model_weight != 1.0 and not config.checkpoint.reward_load:
        problems.append("--reward-model-weight does nothing without --reward-load. Fix: add it, or drop this.")
    reward_source = config.reward.rm_type or config.reward.custom_rm_path or config.checkpoint.reward_load
    if config.uses_engines and not (reward_source or config.plays_episodes):
        problems.append(
            "samples need a reward: give --rm-type, --custom-rm-path, --reward-load, --env or --serve-rollout."
        )
    if config.checkpoint.critic_load and not config.needs_critic:
        problems.append("--critic-load does nothing without --advantage-estimator ppo. Fix: add it, or drop this.")
    if config.optimizer.critic_lr is not None and not config.needs_critic:
        problems.append("--critic-lr does nothing without --advantage-estimator ppo. Fix: add it, or drop this.")
    if config.needs_critic and config.lora.enabled and config.model.is_known:
        if not any(map(config.lora.of_critic.targets, target_modules(config.model))):
            problems.append(
                "--lora-target-modules lm_head leaves the critic none to adapt: its output layer is its value head."
                " Fix: name more modules."
            )
    if config.sync.custom_weight_transform_path and (not config.uses_engines or config.placement.debug_rollout_only):
        problems.append("--custom-weight-transform-path: this run sends no weights. Fix: leave it out.")
    if config.sync.update_weight_interface and config.placement.colocate:
        problems.append(
            "--update-weight-interface does nothing with --colocate: weights stay on the machine. Fix: drop it."
        )
    return (
        problems
        + _transport_problems(config)
        + _delta_problems(config)
        + async_problems(config)
        + adapter_problems(config)
        + rounding_problems(config)
    )


def _transport_problems(config: ConfigTree) -> list[str]:
    """A transport for engines on the trainer's GPUs where they are apart, and the other way round."""
    row, colocate = config.sync.transport_row, config.placement.colocate
    if row is None or row.is_mode or row.goes_with(colocate=colocate):
        return []
    wrong = f"does not go with --colocate: {row.why_not_colocated}" if colocate else "needs --colocate"
    return [f"--update-weight-transport {row.name} {wrong}. Fix: {' or '.join(fitting(colocate=colocate))}."]


def _delta_problems(config: ConfigTree) -> list[str]:
    """What --update-weight-mode delta needs, and what is given without it."""
    receivers, engines = (
        config.placement.rollout_external_receiver_addrs or [],
        config.placement.rollout_external_engine_addrs or [],
    )
    if not config.sync.sends_deltas:
        return (
            [
                (
                    "--rollout-external-receiver-addrs does nothing without --update-weight-mode delta. Fix: add it, or"
                    " drop this."
                )
            ]
            if receivers
            else []
        )
    if not config.uses_engines or config.placement.debug_rollout_only:
        return ["--update-weight-mode delta: this run sends no weights. Fix: leave it out."]
    if config.placement.colocate:
        return [
            (
                "--update-weight-mode delta is for slow links and does not go with --colocate. Fix: leave it out; ipc"
                " copies within the machine."
            )
        ]
    if len(receivers) != len(engines):
        shortage = (
            f"{len(receivers)} are given for {len(engines)}. Fix: start python -m slime_like.weight_sync.delta.receiver"
            " on each engine's machine."
        )
        return [
            (
                "--update-weight-mode delta needs one of --rollout-external-receiver-addrs for each external engine:"
                f" {shortage}"
            )
        ]
    if engines and config.sync.update_weight_local_checkpoint_dir:
        return [
            (
                "--update-weight-local-checkpoint-dir is for receivers that we start. Fix: --directory of the running"
                " receivers."
            )
        ]
    return []
