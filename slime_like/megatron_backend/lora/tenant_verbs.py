"""What a trainer can be asked to do for tenants: TrainWorker's verbs of the role "tenants"."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from slime_like.config.lora import LoraConfig
from slime_like.config.run import RunConfig
from slime_like.config.tree import TENANTS
from slime_like.megatron_backend.card_memory import CardMemory
from slime_like.megatron_backend.lora.tenants import Tenants
from slime_like.megatron_backend.step.optimizer import AdamParams
from slime_like.records import PassResult, TenantPass


def tenants_config(config: RunConfig) -> RunConfig:
    """Tenants' losses are sums of what they bring: no balancing of experts is added, and the base's routers stay."""
    if config.role != TENANTS:
        return config
    model = dataclasses.replace(config.model, moe_aux_loss_coeff=0.0, moe_router_bias_update_rate=0.0)
    return dataclasses.replace(config, model=model)


class TenantVerbs:
    """Many adapters on one trainer, and whole models. All collective, with the same arguments on every rank.

    Errors that one client's request causes are raised on every rank alike (UserError, RunError, ValueError) and leave
    all others as they were.
    """

    config: RunConfig
    model: Sequence[torch.nn.Module]
    _card: CardMemory
    _tenants: Tenants | None = None

    def add_tenant(self, name: str, lora: LoraConfig | None, seed: int) -> None:
        """A new tenant, with adapters that start as PEFT's do, or, without `lora`, with all parameters of the base."""
        self._all_tenants().add(name, lora, seed)

    def run_passes(self, passes: Sequence[TenantPass], together: bool = False) -> list[PassResult | str]:
        """Log-probs and losses, and unless forward_only gradients added to the tenants'; a str: what was wrong with a
        pass, which then added nothing. Equal on every rank.

        together: rows of several tenants in one micro-batch. It is faster, and equal to one by one up to rounding; one
        by one, a tenant's numbers do not depend on the others' by a bit.
        """
        return self._all_tenants().run(passes, together=together)

    def tenant_step(self, name: str, adam: AdamParams, grad_clip: float = 0.0) -> dict[str, float]:
        """One step of AdamW with the gradients since the last one; gives train/grad_norm and train/lr.

        grad_clip: largest norm of the gradients; 0: any. Raises RunError if they are not finite, and clears them.
        """
        return self._all_tenants().step(name, adam, grad_clip)

    def save_tenant(self, name: str, folder: str, optimizer: bool) -> None:
        """Weights as PEFT's or HF's folder; optimizer: with Adam's moments and count of steps. On disk when it returns,
        whole or not at all. Raises SaveError.
        """
        self._all_tenants().save(name, folder, optimizer=optimizer)

    def load_tenant(self, name: str, folder: str, optimizer: bool) -> None:
        """What save_tenant wrote under any layout, for a tenant of the same shape; gradients are cleared.

        optimizer: with Adam's state, else that of this tenant stays. Raises CheckpointError.
        """
        self._all_tenants().load(name, folder, optimizer=optimizer)

    def export_tenant(self, name: str, folder: str) -> None:
        """The weights for engines, in the model's type: PEFT's or HF's folder. Raises SaveError."""
        self._all_tenants().export(name, folder)

    def drop_tenant(self, name: str) -> None:
        """Forget a tenant."""
        self._all_tenants().drop(name)

    def tenants(self) -> tuple[str, ...]:
        """Their names, sorted."""
        return self._all_tenants().names

    def limit_tenants(self, max_resident: int | None) -> None:
        """Most adapters on the device at once; the others wait on the host and come back when used. None: all."""
        self._all_tenants().limit(max_resident)

    def show_base(self) -> None:
        """The model holds the base's weights, whoever used it last."""
        if self._tenants is not None:
            self._tenants.show_base()

    def _all_tenants(self) -> Tenants:
        if self._tenants is None:
            if self.config.role != TENANTS:
                raise ValueError(f"a trainer of role {self.config.role!r} has no tenants. Fix: role {TENANTS!r}.")
            self._tenants = Tenants(self.config, self.model)
        self._card.need("weights")
        return self._tenants
