"""Colocated weight syncs in which every trainer rank serves the engine ranks on its own card: who sends what to whom,
over shared memory, to real engines.

Two trainer ranks in each way of sharing a model (between stages by slime_like.megatron_backend.hf.stages), and engines
of one and of two ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os

import numpy as np
import pytest

from slime_like.records import EngineEndpoint, WeightsRef
from slime_like.sglang_backend.client import EngineClient
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, run_ranks

pytestmark = pytest.mark.multiprocess

#: Of a sync's steps.
TIMEOUT_S = 30.0
START_S = 180.0
#: name -> (how two trainer ranks share the model, which engines of one GPU or two are there). Cards are numbered.
LAYOUTS: dict[str, tuple[dict, tuple[int, ...]]] = {
    "two replicas, two engines": ({}, (1, 1)),
    "tensor parallel, two engines": ({"tensor_model_parallel_size": 2}, (1, 1)),
    "tensor parallel, one engine of two": ({"tensor_model_parallel_size": 2}, (2,)),
    "pipeline parallel, two engines": ({"pipeline_model_parallel_size": 2}, (1, 1)),
    "pipeline parallel, one engine of two": ({"pipeline_model_parallel_size": 2}, (2,)),
}
SHAPE = {"num_key_value_heads": 4, "head_dim": 12}
FAULT = "model.layers.1.self_attn.o_proj.weight"


def cards_of_engines(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Engines one behind the other on cards 0, 1, …"""
    first = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(tuple(range(start, start + size)) for start, size in zip(first, sizes, strict=True))


class Warnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """As logging.Handler."""
        self.texts.append(record.getMessage())


def in_world(place, folder, endpoints, ports):
    """layout -> what one rank saw of two syncs: of weights that are 2**-n of the folder's, and of broken ones."""
    import torch

    from slime_like.megatron_backend.worker import TrainWorker
    from slime_like.weight_sync.session import PublishOrder, abandon
    from tests.helpers import sync_faults

    seen: dict = {}
    for number, ((layout, (parallel, sizes)), port) in enumerate(zip(LAYOUTS.items(), ports, strict=True)):
        config = make_config(folder, num_ranks=2, parallel=parallel)
        sync = dataclasses.replace(config.sync, update_weight_buffer_size=40_000, update_weight_timeout_s=TIMEOUT_S)
        worker = TrainWorker(dataclasses.replace(config, sync=sync), **(place | {"master_port": port}))
        worker.start()
        with torch.no_grad():
            for chunk in worker.stage:
                for parameter in chunk.parameters():
                    parameter.mul_(2.0 ** -(number + 1))
        if number == 0:
            sync_faults.install(worker)  # for this process: every worker's streams
        order = PublishOrder(
            weights=WeightsRef(version=10 * number + 1),
            endpoints=tuple(endpoints[sizes]),
            transport="ipc",
            timeout_s=TIMEOUT_S,
            finds_unsent=True,
            cards=cards_of_engines(sizes),
        )
        receipt = worker.publish(order)
        readers = worker._sender._publisher._options.readers
        said = []
        if place["rank"] == 0:
            clients = [EngineClient(endpoint, timeout_s=TIMEOUT_S) for endpoint in order.endpoints]
            said = [client.prompt_log_probs([PROMPT], TIMEOUT_S)[0] for client in clients]
        # What rank 1 sends is changed behind its receipt: only the engine rank on its card can be wrong.
        if place["rank"] == 1:
            sync_faults.arm(worker, "in flight", sync_faults.Fault("flipped", (FAULT,)))
        failure = "nothing"
        try:
            worker.publish(dataclasses.replace(order, weights=WeightsRef(version=10 * number + 2)))
        except Exception as error:  # noqa: BLE001 - looked at below
            failure = f"{type(error).__name__}: {error}"
        sync_faults.disarm(worker)
        torch.distributed.barrier()
        if place["rank"] == 0:
            abandon(order.endpoints)
        torch.distributed.barrier()
        worker.publish(dataclasses.replace(order, weights=WeightsRef(version=10 * number + 3)))
        seen[layout] = {"receipt": receipt, "readers": readers, "said": said, "failure": failure}
        if not parallel:  # a replica that has drifted away
            warnings = Warnings()
            logging.getLogger("slime_like.weight_sync.sender").addHandler(warnings)
            if place["rank"] == 1:
                sync_faults.nudge(worker)
            seen["drifted"] = worker.publish(dataclasses.replace(order, weights=WeightsRef(version=4))), warnings.texts
        worker.close()
    return seen


PROMPT = np.random.default_rng(3).integers(0, 101, 20).tolist()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder, what each rank saw)"""
    from slime_like.sglang_backend.launcher import EngineSpec, start_engine

    root = tmp_path_factory.mktemp("own-card")
    folder = make_tiny_model(os.path.join(root, "model"), "qwen3", num_layers=2, **SHAPE)
    with contextlib.ExitStack() as stack:
        engines = []
        for index, size in enumerate((1, 1, 2)):
            spec = EngineSpec(
                index=index,
                model_path=folder,
                tp_size=size,
                dtype="float32",
                log_path=str(root / f"engine-{index}.log"),
                context_length=256,
                extra_flags={"skip_tokenizer_init": True},
            )
            engines.append(start_engine(spec))
            stack.callback(engines[-1].close)
        for engine in engines:
            engine.wait_healthy(START_S)
        alone, other, both = (engine.endpoint for engine in engines)
        endpoints: dict[tuple[int, ...], list[EngineEndpoint]] = {(1, 1): [alone, other], (2,): [both]}
        yield folder, run_ranks(in_world, 2, folder, endpoints, free_ports(len(LAYOUTS)), timeout_s=240)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_sends_the_whole_model_to_its_own_cards_engine(world, layout):
    from slime_like.weight_sync.buckets import Digest
    from tests.helpers.hf_truth import load_model, score

    folder, ranks = world
    number, sizes = list(LAYOUTS).index(layout), LAYOUTS[layout][1]
    model = load_model(folder)
    digest = Digest()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(2.0 ** -(number + 1))
        digest.add(name, parameter.detach())
    first = 0 if sizes == (1, 1) else 2
    expected = [((first, 0),), ((first + 1, 0),) if sizes == (1, 1) else ((first, 1),)]
    assert [seen[layout]["readers"] for seen in ranks] == expected
    for seen in ranks:
        receipt = seen[layout]["receipt"]
        assert (receipt.engines_proven, receipt.tensors_unproven) == (len(sizes), 0)
        assert receipt.digest == f"{digest.value:016x}"
        assert receipt.num_bytes == sum(p.nbytes for p in model.parameters())
    truth = score(model, np.asarray(PROMPT), 1.0)[0].detach().numpy()
    said = ranks[0][layout]["said"]
    assert len(said) == len(sizes)
    assert all(np.abs(np.asarray(one) - truth[-len(one) :]).max() < 1e-5 for one in said)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_rank_sends_wrong_is_found_on_its_card_alone(world, layout):
    _, ranks = world
    wrong = "engine 1 at" if LAYOUTS[layout][1] == (1, 1) else "engine 2 at"
    for seen in ranks:
        failure = seen[layout]["failure"]
        assert failure.startswith("WeightSyncError: ") and wrong in failure and FAULT in failure, failure
        assert "engine 0 at" not in failure and "1 of 1 ranks differ" in failure
        assert ("rank 1: " in failure) is (LAYOUTS[layout][1] == (2,))


def test_replicas_that_have_drifted_apart_are_named(world):
    """Each engine holds what the rank on its card has, and the log says that these are not the same."""
    for seen in world[1]:
        receipt, texts = seen["drifted"]
        assert receipt.engines_proven == 2
        assert len(texts) == 1 and "trainer ranks 0 and 1 hold different weights" in texts[0]
