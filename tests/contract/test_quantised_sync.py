"""--rollout-quantization before real engines that start with made-up weights: update after update, by every transport,
every byte that they hold is proven to be what the trainer quantised, scales too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from slime_like.config.engine import EngineConfig
from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.config.quantisation import SCHEMES, engine_flags
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import WeightSyncError
from slime_like.records import WeightsRef
from slime_like.sglang_backend.client import EngineClient
from slime_like.weight_sync.delta.receiver_client import start_receiver
from slime_like.weight_sync.proof.receipt import Receipt
from slime_like.weight_sync.quantise import Quantiser, quantise
from slime_like.weight_sync.ranks import RankPlace
from slime_like.weight_sync.sender import Gathering, WeightSender
from slime_like.weight_sync.session import EngineSide, run_session
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import hf_logprobs, options, order_of, prompt, prompt_logprobs
from tests.contract.quantised import Sent, by_hf_names, make_network, quantised_engine, with_own_products

LONG = pytest.mark.long_run
CASES = [
    pytest.param(("int8", False, 1), id="int8"),
    pytest.param(("fp8", False, 1), id="fp8"),
    pytest.param(("int8", False, 2), id="int8-tp2", marks=LONG),
    pytest.param(("fp8", False, 2), id="fp8-tp2", marks=LONG),
    pytest.param(("fp8-per-tensor", False, 1), id="fp8-per-tensor", marks=LONG),
    pytest.param(("int8", True, 2), id="int8-experts-tp2", marks=LONG),
    pytest.param(("fp8", True, 2), id="fp8-experts-tp2", marks=LONG),
]
LAYER = "model.layers.1."


@dataclasses.dataclass
class Case:
    """An engine, and what it is sent."""

    served: object
    scheme: object
    experts: bool
    tp_size: int
    model: ModelConfig

    @property
    def who(self) -> list:
        return [self.served]

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return by_hf_names(make_network(seed, experts=self.experts))

    def assert_computes(self, seed: int) -> None:
        sent = Sent.of(make_network(seed, experts=self.experts), self.scheme)
        expected = with_own_products(seed, sent, self.scheme, experts=self.experts, tp_size=self.tp_size)
        client = self.served.client
        differences = torch.cat(
            [(prompt_logprobs(client, prompt(one)) - hf_logprobs(expected, prompt(one))).abs() for one in (1, 2)]
        )
        # A token whose activation lies between two integers may become either; it is then one step off.
        assert differences.median() < 1e-5 and differences.max() < 1e-2


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> Iterator[Case]:
    name, experts, tp_size = request.param
    folder, scheme = tmp_path_factory.mktemp("quantised"), SCHEMES[name]
    with quantised_engine(make_network(1, experts=experts), scheme, folder, tp_size=tp_size) as served:
        yield Case(served, scheme, experts, tp_size, model_from_hf(read_hf_config(str(folder)), ModelConfig()))


@pytest.fixture
def world() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sender_of(case: Case, order, weights, **sync) -> WeightSender:
    place = RankPlace(source=0, num_sources=1, rank_in_source=0, num_gatherers=1)
    gathering = Gathering(
        place=place,
        tensors=lambda: iter(weights.items()),
        names=frozenset(weights),
        master_address="127.0.0.1",
    )
    sync_config = SyncConfig(rollout_quantization=case.scheme.name, update_weight_buffer_size=200_000, **sync)
    return WeightSender(RunConfig(model=case.model, sync=sync_config), order, gathering)


def next_order(case: Case, transport: str, folder, **beside):
    case.served.version += 1
    endpoint = dataclasses.replace(case.served.engine.endpoint, **beside)
    return order_of([endpoint], transport, case.served.version, directory=folder)


@pytest.mark.usefixtures("world")
def test_two_updates_by_every_transport(case, tmp_path):
    assert engine_flags(case.scheme, {}).items() <= case.served.engine.spec.extra_flags.items()
    receiver = start_receiver(str(tmp_path / "copy"), log_path=str(tmp_path / "log"), timeout_s=30)
    digests = []
    try:
        for transport in ("ipc", "broadcast", "disk", "delta"):
            beside = {"receiver_url": receiver.url, "receiver_key": receiver.key} if transport == "delta" else {}
            order, weights = next_order(case, transport, tmp_path / transport, **beside), case.weights(1)
            sender = sender_of(case, order, weights)
            for seed in (1, 2):
                weights.update(case.weights(seed))
                receipt = run_session(
                    dataclasses.replace(order, weights=WeightsRef(version=case.served.version)), sender
                )
                sent = [pair for name, tensor in weights.items() for pair in quantise(name, tensor, case.scheme)]
                assert receipt.num_tensors == len(sent) > len(weights)
                assert receipt.num_bytes == sum(tensor.numel() * tensor.element_size() for _, tensor in sent)
                assert (receipt.engines_proven, receipt.tensors_unproven) == (1, 0)
                digests.append(receipt.digest)
                case.served.version += seed == 1
            case.assert_computes(2)
            sender.close()
    finally:
        receiver.close()
    assert len(set(digests)) == 2 and digests[:2] * 4 == digests  # of the weights alone, whichever way they went


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Its last bit, the least that can be wrong."""
    tensor.view(torch.int32).reshape(-1)[-1] ^= 1
    return tensor


def test_what_was_changed_on_the_way_is_named(case, tmp_path):
    """One sync each, whose stream is changed after it was hashed."""
    suffix, matrix = case.scheme.scale_suffix, LAYER + "self_attn.o_proj.weight"
    stale = dict(quantise(matrix, case.weights(1)[matrix], case.scheme))[matrix + suffix]
    within = ("mlp.experts.3." if case.experts else "mlp.") + "down_proj.weight"
    faults = {
        matrix + suffix: lambda tensor: stale,  # of the version before
        LAYER + within + suffix: lambda tensor: flipped(tensor.clone()),
        LAYER + "self_attn.v_proj.weight": lambda tensor: tensor.float() + 0.5,  # silently cast by the engine
    }
    clients = [EngineClient(case.served.engine.endpoint, timeout_s=30)]
    weights, publisher = case.weights(2), make_publisher(options(case.who, "ipc", directory=tmp_path))
    receipt = Receipt(case.model, clients, "test", scheme=case.scheme)
    quantiser = Quantiser(case.scheme, weights)
    for name, change in {**faults, "nothing": None}.items():
        order = next_order(case, "ipc", tmp_path)
        update = EngineSide(order)
        update.begin()
        stream = receipt.watching(quantiser.over(weights.items()))
        changed = ((n, change(tensor) if n == name else tensor) for n, tensor in stream)
        publisher.send(changed, order.weights.version, receipt)
        if change is None:
            assert receipt.verify(timeout_s=30) == 1
        else:
            with pytest.raises(WeightSyncError, match=f"{name} is not what was sent"):
                receipt.verify(timeout_s=30)
        update.finish()
    publisher.close()
    case.assert_computes(2)


def with_a_scale_of_another_name(args, name, tensor):
    """An engine would end at it (sglang 0.5.23)."""
    return [(name, tensor), *([(name + "_scale_x", torch.ones(1))] if name.endswith("o_proj.weight") else [])]


@pytest.mark.usefixtures("world")
def test_a_name_that_no_engine_knows_is_never_sent(case, tmp_path):
    order, weights = next_order(case, "ipc", tmp_path), case.weights(1)
    path = f"{__name__}.{with_a_scale_of_another_name.__name__}"
    sender = sender_of(case, order, weights, custom_weight_transform_path=path)
    with pytest.raises(
        WeightSyncError, match=r"layers.0.self_attn.o_proj.weight_scale_x is no tensor that engines know"
    ):
        run_session(order, sender)
    sender.close()
    case.served.client.close_weight_update()
    assert case.served.engine.poll() is None and case.served.client.health()
    again = sender_of(case, order, weights)
    assert run_session(next_order(case, "ipc", tmp_path), again).engines_proven == 1
    again.close()
    case.assert_computes(1)


def without_the_last_norm(args, name, tensor):
    """What is never sent would stay as it was made up."""
    return [] if name == "model.norm.weight" else [(name, tensor)]


@pytest.mark.usefixtures("world")
def test_what_was_never_sent_is_named_by_the_first_sync(case, tmp_path):
    order, weights = next_order(case, "ipc", tmp_path), case.weights(2)
    path = f"{__name__}.{without_the_last_norm.__name__}"
    sender = sender_of(case, order, weights, custom_weight_transform_path=path)
    assert not order.finds_unsent
    with pytest.raises(WeightSyncError, match=r"has model\.norm\.weight, which was never sent \(1 in all\)"):
        run_session(order, sender)
    sender.close()
    case.served.client.close_weight_update()


def test_an_engine_of_another_scheme_is_sent_nothing(case):
    other = SCHEMES["fp8" if case.scheme.name == "int8" else "int8"]
    client = EngineClient(case.served.engine.endpoint, timeout_s=30)
    with pytest.raises(WeightSyncError, match=f"cannot be shown to hold weights in {other.name}"):
        Receipt(case.model, [client], "test", scheme=other)
    assert "quantised weights" in Receipt(case.model, [client], "test").not_compared[client.endpoint.index]


def test_flags_of_the_users_own_are_kept():
    """What the launcher is given is one JSON object of both."""
    given = EngineConfig(sglang={"json_model_override_args": '{"rope_theta": 5.0}'}).sglang
    flags = engine_flags(SCHEMES["int8"], given)
    assert '"rope_theta": 5.0' in flags["json_model_override_args"] and "w8a8_int8" in flags["json_model_override_args"]
