"""What is said aloud beside the plan: changed by us, without effect, or for GPU hosts only. Never an error."""

from __future__ import annotations

from slime_like.config.quantisation import NONE
from slime_like.config.run import RunConfig
from slime_like.config.share_prompt import share_prompt_notices

#: SGLang's arguments that choose a kernel or library which only CUDA hosts have, with the values that mean nothing
#: special.
_CUDA_ENGINE = {
    "attention_backend": ("torch_native", "triton", "flex_attention", "intel_amx"),
    "decode_attention_backend": ("torch_native", "triton", "flex_attention", "intel_amx"),
    "prefill_attention_backend": ("torch_native", "triton", "flex_attention", "intel_amx"),
    "dsa_decode_backend": (),
    "dsa_prefill_backend": (),
    "speculative_draft_attention_backend": (),
    "moe_a2a_backend": ("none",),
    "deepep_mode": (),
    "cuda_graph_bs_decode": (),
    "cuda_graph_max_bs_decode": (),
    "disaggregation_ib_device": (),
    "kv_cache_dtype": ("auto", "bfloat16", "bf16"),
}


def notices(config: RunConfig) -> list[str]:
    """One sentence each, in the order of the flags' groups."""
    lines = []
    if config.placement.rollout_external and config.placement.offload_rollout:
        lines.append("--offload-rollout is off: external engines are never asked to give memory back")
    if config.rollout.filters_sampling and config.rollout.rollout_allow_filtered_sampling and config.uses_engines:
        lines.append(
            "--rollout-allow-filtered-sampling: responses are drawn from another distribution than the one that is"
            " trained; their gradient is biased"
        )
    if config.loss.use_kl_loss and config.loss.kl_loss_coef == 0:
        lines.append("--kl-loss-coef is 0: the KL to the reference is measured, not trained on")
    if config.asynchrony.is_stale and config.loss.use_tis and config.uses_engines:
        lines.append(
            "--use-tis is on: what is trained on may be older than the weights that train on it (--no-use-tis trains on"
            " it as it is)"
        )
    corrects = config.loss.use_tis or config.loss.use_rollout_logprobs
    if config.sync.rollout_quantization != NONE and config.loss.loss_type == "policy_loss" and not corrects:
        lines.append(
            f"--rollout-quantization {config.sync.rollout_quantization}: samples are drawn from rounded weights and"
            " nothing corrects for it; --use-tis does (train/logprob_abs_diff is how far they are)"
        )
    lines += _loss(config)
    if (
        config.loss.use_routing_replay
        and not config.loss.use_rollout_routing_replay
        and config.num_steps_per_rollout == 1
    ):
        lines.append(
            "--use-routing-replay changes nothing with one step per rollout: the ratio is taken against that step's own"
            " forward pass"
        )
    if config.model.moe_token_dispatcher_type != "alltoall":
        flags = f"--moe-token-dispatcher-type {config.model.moe_token_dispatcher_type}" + (
            " and --moe-enable-deepep" if config.model.moe_enable_deepep else ""
        )
        lines.append(
            f"{flags}: the trainer's tokens go to their experts by alltoall, which computes the same and takes packs of"
            " any length"
        )
    return lines + share_prompt_notices(config) + _kernels(config)


def _loss(config: RunConfig) -> list[str]:
    """Choices of estimators and losses that do less than their names say."""
    loss = config.loss
    if loss.loss_type != "policy_loss":
        return []
    lines = []
    alone = config.rollout.n_samples_per_prompt == 1 and loss.estimator.compares_with == "group"
    if alone and not (loss.disable_rewards_normalization or loss.custom_advantage_function_path):
        lines.append(
            f"--n-samples-per-prompt 1 leaves --advantage-estimator {loss.advantage_estimator} nothing to compare with:"
            " advantages are raw rewards"
        )
    if loss.use_kl_loss and loss.kl_loss_coef and loss.kl_loss_type == "k1" and not loss.use_unbiased_kl:
        lines.append(
            "--kl-loss-type k1 as a loss pulls nowhere on average, as its mean gradient is 0 on policy: low_var_kl, k2"
            " or --use-unbiased-kl do"
        )
    if loss.kl_loss_type != "k1" and not loss.use_kl_loss and not loss.kl_coef:
        lines.append(f"--kl-loss-type {loss.kl_loss_type} changes nothing without --use-kl-loss")
    if (
        not loss.custom_policy_loss_function_path
        and loss.policy_loss_name == "kl_cov"
        and config.num_steps_per_rollout == 1
        and not loss.use_rollout_logprobs
    ):
        lines.append(
            "--policy-loss kl_cov holds nothing back with one step per rollout unless --use-rollout-logprobs is given:"
            " its penalty is flat at ratio 1"
        )
    return lines


def _kernels(config: RunConfig) -> list[str]:
    """Choices of kernels: on a CPU host the trainer has its own, and SGLang refuses those of CUDA."""
    model = config.model
    trainer = (
        [f"--attention-backend {model.attention_backend}"] if model.attention_backend not in ("auto", "local") else []
    )
    trainer += [
        f"--{name.replace('_', '-')}" for name in ("moe_grouped_gemm", "moe_permute_fusion") if getattr(model, name)
    ]
    engine = [
        f"--sglang-{name.replace('_', '-')}"
        + ("" if value is True else f" {value if isinstance(value, str) else ' '.join(value)}")
        for name, value in config.engine.sglang.items()
        if name in _CUDA_ENGINE and value not in _CUDA_ENGINE[name]
    ]
    lines = []
    if trainer:
        lines.append(
            f"{', '.join(trainer)}: for GPU hosts; on a CPU host the trainer computes the same with torch's own"
            " attention and matrices"
        )
    if engine and config.uses_engines:
        lines.append(f"{', '.join(engine)}: for GPU hosts; engines on a CPU host do not start with it")
    return lines
