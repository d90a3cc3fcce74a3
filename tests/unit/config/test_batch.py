import dataclasses

import pytest

from slime_like.config.batch import BatchConfig
from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100}


@pytest.mark.parametrize("options", [{"balance_by_flops": True}, {"log_probs_max_tokens_per_gpu": 200}])
def test_flags_of_dynamic_batches_need_them(options):
    (name,) = options
    (problem,) = BatchConfig(**options).problems()
    assert f"--{name.replace('_', '-')} does nothing without --use-dynamic-batch-size" in problem
    assert BatchConfig(**DYNAMIC, **options).problems() == []


@pytest.mark.parametrize(
    ("given", "on_gpu", "on_host"), [(None, 1024, None), (-1, None, None), (7, 7, 7)], ids=["default", "all", "seven"]
)
def test_a_gpu_never_makes_two_whole_fp32_copies_of_the_logits_unless_it_is_asked_to(given, on_gpu, on_host):
    batch = BatchConfig(log_probs_chunk_size=given)
    assert batch.log_probs_chunk_tokens(on_gpu=True) == on_gpu
    assert batch.log_probs_chunk_tokens(on_gpu=False) == on_host


def test_passes_without_gradients_have_sizes_of_their_own():
    rows = BatchConfig(micro_batch_size=2, log_probs_micro_batch_size=8)
    assert rows.problems() == [] and rows.scoring.micro_batch_size == 8
    assert BatchConfig(micro_batch_size=2).scoring == BatchConfig(micro_batch_size=2)
    tokens = BatchConfig(**DYNAMIC, log_probs_max_tokens_per_gpu=300)
    assert tokens.scoring.max_tokens_per_gpu == 300
    (problem,) = BatchConfig(**DYNAMIC, log_probs_micro_batch_size=8).problems()
    assert "Fix: --log-probs-max-tokens-per-gpu" in problem
    assert BatchConfig(log_probs_micro_batch_size=-1).problems() == [
        "--log-probs-micro-batch-size -1: must be at least 1."
    ]


def test_score_packs_hold_at_least_a_token():
    assert BatchConfig(**DYNAMIC, log_probs_max_tokens_per_gpu=-1).problems() == [
        "--log-probs-max-tokens-per-gpu -1: must be at least 1."
    ]


def test_experts_whose_gradients_megatron_would_not_sum_are_refused():
    """Found by the parity table: gradients off by a third of the largest, their norm by 1e-4 only."""
    model = ModelConfig(
        num_layers=2, hidden_size=48, num_attention_heads=4, vocab_size=101, num_experts=4, moe_ffn_hidden_size=32
    )
    split = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
    (problem,) = split.problems(model)
    assert "does not sum the experts' gradients" in problem
    assert dataclasses.replace(split, expert_model_parallel_size=2).problems(model) == []
    assert dataclasses.replace(split, expert_tensor_parallel_size=2).problems(model) == []
