"""The whole command line: what users type, and what bad input gets."""

# Covers slime_like.job.command_line.

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from arguments import parse_args
from slime_like.config.run import GROUPS
from slime_like.errors import ConfigError

ROOT = Path(__file__).parents[3]

TINY_HF = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 1024,
}
MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention"
    " --num-query-groups 2 --kv-channels 32 --vocab-size 320 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu"
    " --disable-bias-linear --qk-layernorm --rotary-base 10000 --use-rotary-position-embeddings"
)
ROLLOUT = "--rm-type math --num-rollout 3 --rollout-batch-size 2 --n-samples-per-prompt 2"
PLACE = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 2"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(TINY_HF))
    (tmp_path / "data.jsonl").write_text('{"input": "hi"}\n')
    return f"--hf-checkpoint {tmp_path}/hf --prompt-data {tmp_path}/data.jsonl"


def command(*parts):
    return parse_args(shlex.split(" ".join(parts)))


def problems(*parts):
    with pytest.raises(ConfigError) as error:
        command(*parts)
    return error.value.problems


def test_architecture_from_the_checkpoint_equals_flags(files):
    from_checkpoint = command(files, ROLLOUT, PLACE).config.model
    from_flags = command(files, MODEL, ROLLOUT, PLACE).config.model
    for name in (
        "num_layers",
        "hidden_size",
        "mlp_size",
        "num_kv_heads",
        "head_size",
        "vocab_size",
        "norm_epsilon",
        "rotary_base",
        "qk_layernorm",
        "add_qkv_bias",
    ):
        assert getattr(from_checkpoint, name) == getattr(from_flags, name), name


def test_architecture_that_disagrees_with_the_checkpoint_is_refused(files):
    messages = problems(files, MODEL.replace("--ffn-hidden-size 384", "--ffn-hidden-size 512"), ROLLOUT, PLACE)
    assert any("--ffn-hidden-size: the command line says 512, --hf-checkpoint says 384" in p for p in messages)


def test_old_rope_theta_key_is_read(files, tmp_path):
    hf = {k: v for k, v in TINY_HF.items() if k != "rope_parameters"} | {"rope_theta": 5e5}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf))
    assert command(files, ROLLOUT, PLACE).config.model.rotary_base == 5e5


def test_seed_script_of_external_mode_parses(files):
    """The flags of a public two-machine smoke script, as they stand there."""
    parsed = command(
        files,
        "--ref-load /tmp --save /tmp/save --save-interval 9999 --input-key input --label-key label"
        " --apply-chat-template --rollout-shuffle --rm-type deepscaler",
        "--num-rollout 3 --rollout-batch-size 2 --n-samples-per-prompt 2 --num-steps-per-rollout 1 --global-batch-size"
        " 4 --rollout-max-response-len 256 --rollout-temperature 1",
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1"
        " --expert-model-parallel-size 1 --expert-tensor-parallel-size 1",
        "--use-dynamic-batch-size --max-tokens-per-gpu 2048 --advantage-estimator grpo --use-kl-loss --kl-loss-coef"
        " 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00",
        "--eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1"
        " --adam-beta1 0.9 --adam-beta2 0.98",
        "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.4 --rollout-external"
        " --rollout-external-engine-addrs 10.0.0.1:10091",
        "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32"
        " --attention-backend flash",
        "--actor-num-nodes 1 --actor-num-gpus-per-node 2",
        MODEL,
    ).config
    assert parsed.placement.external_urls() == ["http://10.0.0.1:10091"]
    assert parsed.engine.sglang == {"mem_fraction_static": "0.4"}
    assert parsed.loss.clip_high == 0.28 and parsed.global_batch_size == 4


def test_every_problem_at_once(tmp_path):
    messages = problems(
        "--hf-checkpoint",
        str(tmp_path / "nowhere"),
        "--prompt-data",
        str(tmp_path / "none.jsonl"),
        MODEL,
        PLACE,
        "--rm-type maths --num-rollout 3 --rollout-batch-size 3 --n-samples-per-prompt 3 --eval-interval 2",
    )
    text = "\n".join(messages)
    for part in (
        "no such folder",
        "no such file",
        "--rm-type maths is unknown. Known: math",
        "--eval-interval needs --eval-prompt-data",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--global-batch-size 3", "steps of 3 samples are not the rollout's 4"),
        ("--actor-num-gpus-per-node 3 --tensor-model-parallel-size 2", "3 GPUs do not divide"),
        ("--actor-num-gpus-per-node 8 ", "does not divide by the data parallel size 8"),
        ("--micro-batch-size 3", "2 samples per data parallel rank do not divide by --micro-batch-size 3"),
        ("--use-dynamic-batch-size", "needs --max-tokens-per-gpu"),
        ("--use-kl-loss", "needs --ref-load"),
        ("--advantage-estimator ppo --disable-grpo-std-normalization", "compares with a critic. Fix: drop it"),
        ("--num-experts 4 --moe-router-bias-update-rate 0.5", "does nothing without --moe-router-enable-expert-bias"),
        ("--gamma 0.9", "does nothing without --advantage-estimator ppo"),
        ("--colocate --update-weight-transport broadcast", "NCCL refuses two ranks on one GPU"),
        ("--rollout-temperature 0", "must be above 0"),
        ("--reward-model-weight 0.5", "does nothing without --reward-load"),
        ("--debug-rollout-only --reward-load /models/reward", "starts engines only, not the model of --reward-load"),
        ("--group-rm", "does nothing without --custom-rm-path"),
        ("--rm-type remote_rm", "needs --rm-url"),
        ("--rollout-external", "needs --rollout-external-engine-addrs"),
        ("--rollout-external --rollout-external-engine-addrs a:1 --colocate", "exclude each other"),
        ("--rollout-external --rollout-external-engine-addrs nonsense", "has no port"),
        ("--tensor-model-parallel-size 4 --actor-num-gpus-per-node 4", "key/value heads do not divide"),
        ("--num-epoch 1", "exactly one of --num-rollout and --num-epoch"),
        ("--context-parallel-size 0", "must be at least 1"),
        ("--sglang-dp-size 2", "needs --sglang-enable-dp-attention"),
        ("--sglang-pp-size 2", "does not divide into 2 pipeline stages"),
        ("--sglang-ep-size two", "must be a whole number"),
        ("--plan-bandwidth nvlonk=3", "Known names: ipc, nvlink"),
        ("--sglang-mem-fraction-statick 0.4", "mem-fraction-static"),
    ],
)
def test_bad_combination_names_flags_and_fix(files, flags, message):
    assert any(message in p for p in problems(files, MODEL, ROLLOUT, PLACE, flags)), problems(
        files, MODEL, ROLLOUT, PLACE, flags
    )


def test_every_field_is_declared_once():
    names = [name for group in GROUPS.values() for name in group.__dataclass_fields__]
    assert len(names) == len(set(names))


def test_command_line_without_traceback_and_status_2(tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "train.py", "--num-rolout", "3"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert "Did you mean --num-rollout?" in run.stderr and "Traceback" not in run.stderr
