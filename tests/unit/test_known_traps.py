"""Bugs that others had and that look right: each with the tests that would fail.

A test that is gone or renamed fails here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

#: What went wrong elsewhere -> the tests that hold it, as file::function.
TRAPS = {
    "groups of unequal size after fan-out or filtering share one whole-batch baseline": [
        "tests/unit/rollout/test_train_samples.py::test_groups_of_unequal_size_are_their_own_baselines",
        "tests/unit/rollout/test_train_samples.py::test_a_fanned_out_group_does_not_move_another",
    ],
    "PPO puts the reward at the last token of context parallel rank 0, whose last chunk may be empty": [
        "tests/multiprocess/test_critic.py::test_policy_learns_from_whitened_token_advantages",
        "tests/unit/test_known_traps.py::test_the_critics_samples_have_empty_last_chunks",
    ],
    "node ranks of an engine on two nodes count on from the engine before it": [
        "tests/unit/planning/test_placement.py::test_node_ranks_count_within_the_engine"
    ],
    "Megatron's schedule divides the loss in place, so that a report shrinks with the number of micro-batches": [
        "tests/multiprocess/test_training.py::test_how_micro_batches_are_cut_changes_nothing",
        "tests/multiprocess/test_metamorphic.py::test_the_same_batch_gives_the_same_loss_and_gradients",
    ],
    "gloo silently corrupts tensors that are not contiguous, such as shards cut along columns": [
        "tests/multiprocess/test_parity.py::test_every_gradient_was_compared",
        "tests/multiprocess/test_experts.py::test_every_expert_comes_out_as_it_went_in",
    ],
    "metadata of a sample does not reach the trainer": [
        "tests/unit/rollout/test_train_samples.py::test_metadata_reaches_the_trainer",
        "tests/multiprocess/test_metamorphic.py::test_metadata_reaches_the_loss",
    ],
    "a hidden size equal to the intermediate size hides a transpose": [
        "tests/unit/test_known_traps.py::test_no_matrix_of_the_tiny_models_is_square"
    ],
    "tied embeddings on two pipeline stages drift apart, or are counted twice": [
        "tests/multiprocess/test_parity.py::test_equals_hf",
        "tests/unit/test_known_traps.py::test_the_parity_table_has_tied_embeddings_on_two_stages",
    ],
}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_is_held(repo_root: Path, trap: str):
    assert TRAPS[trap]
    for test in TRAPS[trap]:
        path, _, name = test.partition("::")
        file = repo_root / path
        assert file.is_file(), f"{trap}: {path} is gone"
        functions = {
            node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{trap}: {test} is gone"


def test_no_matrix_of_the_tiny_models_is_square(tmp_path: Path):
    """A transposed matrix then has another shape.

    Qwen2's output projection is square by definition; its values are random.
    """
    from safetensors import safe_open

    from tests.helpers.tiny_models import CONFIGS, make_tiny_model

    for family in CONFIGS:
        folder = make_tiny_model(str(tmp_path / family), family, num_layers=2)
        with safe_open(f"{folder}/model.safetensors", "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
        square = {name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == shape[1]}
        assert {
            name for name in square if not (family == "qwen2" and ("o_proj" in name or "q_proj" in name))
        } == set(), family
        assert shapes["model.embed_tokens.weight"][0] % 2, (
            f"{family}: tensor parallel ranks would hold equal parts of the vocabulary without padding"
        )


def test_the_critics_samples_have_empty_last_chunks():
    """Under context parallelism rank 0 holds the first and the last of 2 x ranks chunks.

    slime's reward went to the last token that it holds.
    """
    from tests.multiprocess.test_critic import CASES, rollout

    samples = [sample for sample in rollout() if sample.loss_mask.any()]
    sizes = {
        parallel["context_parallel_size"] for _, parallel, _ in CASES.values() if "context_parallel_size" in parallel
    }
    assert sizes == {2, 4}
    for size in sizes:
        lengths = [len(sample.tokens) for sample in samples]
        assert any(length <= (2 * size - 1) * -(-length // (2 * size)) for length in lengths), (size, lengths)


def test_the_parity_table_has_tied_embeddings_on_two_stages():
    from tests.helpers.parity_rows import MODELS, all_rows

    rows = [
        row
        for row in all_rows()
        if MODELS[row.model].get("tied") and row.parallel.get("pipeline_model_parallel_size") == 2
    ]
    assert {row.format for row in rows} == {"packed", "padded"}
    assert any(row.parallel.get("num_virtual_stages_per_pipeline_rank") for row in rows)
    assert any(row.parallel.get("tensor_model_parallel_size") for row in rows)
