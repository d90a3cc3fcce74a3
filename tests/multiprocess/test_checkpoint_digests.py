"""One bit that changed in any file of a checkpoint, written at once or in the background, is named on every rank."""
# Covers slime_like.megatron_backend.checkpoint.state and .async_save too.

import json
import os

import numpy as np
import pytest

from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess


def start(place, ports, folder, **checkpoint):
    from slime_like.megatron_backend.worker import TrainWorker

    config = make_config(folder, num_ranks=2, checkpoint=checkpoint)
    worker = TrainWorker(config, **(place | {"master_port": ports.pop(0)}))
    return worker, worker.start()


def flip(path, place):
    """Change one bit of a file; called by one rank."""
    with open(path, "r+b") as file:
        file.seek(place // 8)
        (byte,) = file.read(1)
        file.seek(place // 8)
        file.write(bytes([byte ^ 1 << place % 8]))


def in_world(place, folder, root, ports):

    from slime_like.errors import CheckpointError
    from slime_like.megatron_backend.initialize import shut_down

    ports, results = list(ports), {}
    for name, in_background in (("sync", False), ("async", True)):
        saves = os.path.join(root, name)
        worker, _ = start(place, ports, folder, save=saves, async_save=in_background)
        recipe_of(worker).train(0, make_samples(8, seed=0))
        path = recipe_of(worker).save(1, {"position": 1})
        assert worker.finish_save(wait=True)
        expected = recipe_of(worker).log_probs(make_samples(8, seed=1))
        with open(os.path.join(path, "client_state.json"), encoding="utf-8") as file:
            state = json.load(file)
        worker.close()
        refusals = {}
        shards = sorted(file for file in state["files"] if file.endswith(".distcp"))
        for shard in (shards[0], shards[-1], "common.pt"):
            bit = 8 * (state["files"][shard] // 2) + 3  # in the middle: of a tensor's numbers in a shard
            if place["rank"] == 0:
                flip(os.path.join(path, shard), bit)
            try:
                start(place, ports, folder, load=saves)
                refusals[shard] = "loaded"
            except CheckpointError as error:
                refusals[shard] = str(error)
            shut_down()
            if shard == shards[0]:
                worker, _ = start(place, ports, folder, load=saves, verify_checkpoint=False)
                worker.close()
            if place["rank"] == 0:
                flip(os.path.join(path, shard), bit)
        worker, _ = start(place, ports, folder, load=saves)
        same = np.array_equal(
            *(np.concatenate([np.asarray(one) for one in probs]) for probs in (
                expected, recipe_of(worker).log_probs(make_samples(8, seed=1))
            ))
        )  # fmt: skip
        worker.close()
        results[name] = (state, refusals, bool(same))
    return results


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder, root = str(tmp_path_factory.mktemp("model")), str(tmp_path_factory.mktemp("root"))
    make_tiny_model(folder, "qwen3")
    return run_ranks(in_world, 2, folder, root, free_ports(12))


@pytest.mark.parametrize("name", ["sync", "async"])
def test_every_file_has_a_digest_and_a_flipped_bit_is_named(worlds, name):
    for results in worlds:
        state, refusals, same = results[name]
        assert set(state["digests"]) == set(state["files"]) and len(state["files"]) >= 4
        assert {file.split("_")[2] for file in state["files"] if file.endswith(".distcp")} == {"0", "1"}
        assert len(refusals) == 3
        for shard, refusal in refusals.items():
            assert f"{shard} is not what was written" in refusal and "--no-verify-checkpoint" in refusal
        assert same, "what was saved is what is loaded"
