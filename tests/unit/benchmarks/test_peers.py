"""What both sides of a comparison with a peer rely on."""

import json

from benchmarks.peers.table import rows
from benchmarks.peers.work import Shape, endless_model, fixed_samples, noise, prompt
from tests.helpers.tiny_rewards import TINY


def test_the_token_that_ends_an_answer_is_none_of_the_models(tmp_path):
    folder = tmp_path / "model"
    assert endless_model(TINY, folder) == str(folder)
    config, texts, tokenizer = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("config.json", "tokenizer_config.json", "tokenizer.json")
    )
    assert config["eos_token_id"] == config["vocab_size"] and config["dtype"] == "float32"
    (last,) = (token for token in tokenizer["added_tokens"] if token["content"] == texts["eos_token"])
    assert last["id"] == config["vocab_size"]
    assert {path.name for path in folder.iterdir()} == {path.name for path in TINY.iterdir()}


def test_prompts_differ_and_have_the_words_that_were_asked_for():
    assert prompt(0, 140) == prompt(0, 140) != prompt(1, 140)
    assert len(prompt(3, 140).split()) == 140


def test_fixed_samples_share_prompts_in_groups_and_end_at_different_lengths():
    samples = fixed_samples(Shape.of("2x3x20x8"), 50)
    assert len(samples) == 6 and samples[0]["prompt"] == samples[2]["prompt"] != samples[3]["prompt"]
    assert len({len(sample["answer"]) for sample in samples}) > 1
    assert all(4 <= len(sample["answer"]) <= 8 and max(sample["answer"]) < 50 for sample in samples)
    assert (noise(1, 5) == noise(1, 5)).all() and (noise(1, 5) != noise(2, 5)).any()


def test_rows_of_the_table_say_whether_a_goal_is_met():
    steps = {
        name: {"step_s": seconds, "generate_s": 1.0, "train_s": 2.0} for name, seconds in (("ours", 4), ("trl", 8))
    }
    common = {"shape": "4x8x140x12", "model": "small", "hardware": "a host"}
    (missed,) = rows(common | steps | {"what": "steps", "faster": {"step_s": 2.0}, "goal": 3.0})
    assert missed.endswith("| 2.00 | ≥ 3 | MISSED |") and "8.0 s a step" in missed
    losses = {name: {"loss": -0.5, "grad_norm": 2.0} for name in ("ours", "trl")}
    (met,) = rows(common | losses | {"what": "loss", "apart": {"loss": 4e-7}, "goal": 1e-5})
    assert met.endswith("| 4.0e-07 | ≤ 1e-05 | met |")
    rates = {"tokens_per_second": {"ours": 99.0, "bare": 100.0}, "ratio": 0.99, "goal": 0.97}
    sizes = {"requests": 128, "prompt_tokens": 32, "new_tokens": 64, "concurrency": 64}
    assert "| 99 tokens/s | 100 tokens/s | 0.99 | ≥ 0.97 | met |" in rows(common | rates | sizes)[0]
    drivers = {who: {"cpu_us": cpu, "per_second": cpu / 2} for who, cpu in (("ours", 400.0), ("slime", 100.0))}
    of_drivers = rows(
        {"what": "driver", "goal": 3.0, "rows": [drivers | {"samples": n, "ratio": 4.0} for n in (10, 20)]}
    )
    assert len(of_drivers) == 2 and of_drivers[1].startswith("| slime's rollout driver | 20 samples")
    assert of_drivers[0].endswith("| 200 samples/s (400 us of CPU) | 50 samples/s (100 us of CPU) | 4.00 | ≥ 3 | met |")
