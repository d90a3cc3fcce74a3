"""Log-prob, entropy and their gradients of a vocabulary cut among ranks, against float64 over the whole of it."""

import numpy as np
import pytest
import torch

from tests.helpers.train_world import run_ranks

pytestmark = pytest.mark.multiprocess

TOKENS = 33
#: Ranks, real vocabulary, columns of each rank: with padding; with a rank that has nothing but padding; more than a
#: block of the host holds.
VOCABULARIES = {
    "whole": (1, 64, 64),
    "padded": (1, 60, 64),
    "split": (2, 100, 64),
    "a rank of padding": (2, 50, 64),
    "many blocks": (1, 20000, 20096),
}
#: Type, temperature, rows at a time.
FORMS = [("float32", 1.0, None), ("float32", 0.7, 5), ("bfloat16", 1.0, None), ("bfloat16", 1.3, 5)]


def make(vocabulary, width, dtype):
    """[TOKENS, width] logits with rows far apart, targets [TOKENS], what the loss weighs log-probs
    and entropies with.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, width, generator=generator) * 4 + torch.arange(TOKENS)[:, None]
    targets = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    by_log_prob = torch.randn(TOKENS, generator=generator)
    by_log_prob[10:20] = 0  # tokens that are not trained on
    return logits.to(getattr(torch, dtype)), targets, by_log_prob, torch.randn(TOKENS, generator=generator)


#: How many targets each row predicts: none, one or several; whole targets, weights of log-probs and entropies follow.
COUNTS = [(1, 3, 0, 2)[row % 4] for row in range(TOKENS)]


def several(vocabulary):
    """Targets [sum of COUNTS], what the loss weighs their log-probs and entropies with, the row of each."""
    generator, rows = torch.Generator().manual_seed(1), np.repeat(np.arange(TOKENS), COUNTS)
    targets = torch.randint(0, vocabulary, (len(rows),), generator=generator)
    by_log_prob = torch.randn(len(rows), generator=generator)
    by_log_prob[10:20] = 0
    return targets, by_log_prob, torch.randn(len(rows), generator=generator), torch.as_tensor(rows)


def turned(leaf):
    """Logits [1, T, V] as Megatron makes them, from an output layer's [T, 1, V]; that layer's gradient lies as they
    did, so that torch takes it for a matrix.
    """

    def lies_as_a_matrix(gradient):
        assert gradient.stride(0) == gradient.stride(1) * gradient.size(1), gradient.stride()

    product = leaf.transpose(0, 1).contiguous() * 1
    product.register_hook(lies_as_a_matrix)
    return product.transpose(0, 1).contiguous()


def scores(place):
    """(case, form, whether entropy has a gradient, whether logits are a leaf, or predict several) -> log-probs,
    entropies, this rank's gradient.
    """
    from megatron.core import parallel_state

    from slime_like.megatron_backend.step.forward import Scoring, log_probs_and_entropy
    from slime_like.megatron_backend.step.packing import Predictions

    torch.distributed.init_process_group(
        "gloo",
        rank=place["rank"],
        world_size=place["world_size"],
        init_method=f"tcp://127.0.0.1:{place['master_port']}",
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=place["world_size"])
    results = {}
    for case, (ranks, vocabulary, width) in VOCABULARIES.items():
        if ranks != place["world_size"]:
            continue
        for form in FORMS:
            whole, targets, by_log_prob, by_entropy = make(vocabulary, width * ranks, form[0])
            mine = slice(place["rank"] * width, (place["rank"] + 1) * width)
            for entropy_counts in (False, True):
                for is_leaf in (False, True):
                    leaf = whole[:, mine].clone()[None].requires_grad_()
                    logits = leaf if is_leaf else turned(leaf)
                    scoring = Scoring(vocab_size=vocabulary, temperature=form[1], chunk_tokens=form[2])
                    log_probs, entropy = log_probs_and_entropy(logits, targets, scoring)
                    loss = log_probs @ by_log_prob + (entropy @ by_entropy if entropy_counts else 0)
                    loss.backward()
                    assert not is_leaf or torch.equal(leaf[0], whole[:, mine]), "a leaf is not written to"
                    values = (log_probs.detach().numpy(), entropy.detach().numpy(), leaf.grad[0].float().numpy())
                    results[case, form, entropy_counts, is_leaf] = values
                leaf = whole[:, mine].clone()[None].requires_grad_()
                targets_of, by_log_prob_of, by_entropy_of, _ = several(vocabulary)
                predictions = Predictions.of(COUNTS, leaf.device)
                log_probs, entropy = log_probs_and_entropy(turned(leaf), targets_of, scoring, predictions)
                loss = log_probs @ by_log_prob_of + (entropy @ by_entropy_of if entropy_counts else 0)
                loss.backward()
                values = (log_probs.detach().numpy(), entropy.detach().numpy(), leaf.grad[0].float().numpy())
                results[case, form, entropy_counts, "several"] = values
    torch.distributed.destroy_process_group()
    return results


def truth(case, form, entropy_counts, kind):
    """The same in float64, over the whole vocabulary; the gradient of padding is 0."""
    ranks, vocabulary, width = VOCABULARIES[case]
    logits, targets, by_log_prob, by_entropy = make(vocabulary, width * ranks, form[0])
    logits = logits.double().requires_grad_()
    rows = torch.log_softmax(logits[:, :vocabulary] / form[1], -1)
    if kind == "several":
        targets, by_log_prob, by_entropy, places = several(vocabulary)
        rows = rows[places]
    log_probs, entropy = rows.gather(-1, targets[:, None]).squeeze(-1), -(rows.exp() * rows).sum(-1)
    (log_probs @ by_log_prob.double() + (entropy @ by_entropy.double() if entropy_counts else 0)).backward()
    return log_probs.detach().numpy(), entropy.detach().numpy(), logits.grad.numpy()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_equals_float64(num_ranks):
    results = run_ranks(scores, num_ranks)
    assert len(results[0]) == sum(ranks == num_ranks for ranks, _, _ in VOCABULARIES.values()) * len(FORMS) * 6
    for key, (log_probs, entropy, _) in results[0].items():
        wanted = truth(*key)
        gradient = np.concatenate([result[key][2] for result in results], 1)
        # bf16 has 8 bits: the gradient is rounded to it once.
        gradient_error = {"rtol": 4e-3, "atol": 1e-6} if key[1][0] == "bfloat16" else {"rtol": 1e-4, "atol": 2e-6}
        if key[3] == "several":  # up to three gradients add up in a row, and so do their roundings
            gradient_error["atol"] *= 3
        np.testing.assert_allclose(log_probs, wanted[0], rtol=1e-5, atol=1e-5, err_msg=str(key))
        np.testing.assert_allclose(entropy, wanted[1], rtol=1e-5, atol=1e-5, err_msg=str(key))
        np.testing.assert_allclose(gradient, wanted[2], err_msg=str(key), **gradient_error)
        for result in results[1:]:
            np.testing.assert_array_equal(result[key][0], log_probs)
            np.testing.assert_array_equal(result[key][1], entropy)
