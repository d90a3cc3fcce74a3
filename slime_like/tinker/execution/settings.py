"""The numbers that the service goes by."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Folders are paths or fsspec URLs. Counts of tokens: of rows' tokens, or of a prompt and all that may follow."""

    state_folder: str  # snapshots, and ephemeral samplers' weights
    weights_folder: str  # what clients saved by name

    # Who is served, and how much at once.
    batch_tokens: int = 65_536  # passes of several models together
    batch_window_s: float = 0.002  # how long the first of them waits for others
    max_adapters_resident: int = 8  # models in the trainer, whole ones too
    max_whole_models_resident: int = 1
    max_samples_running: int = 256  # sequences
    max_samples_running_a_tenant: int = 128
    step_cost_tokens: int = 256  # what a call without rows counts as, in the tenant's share
    resident_slack_tokens: int = 4096  # how far a model in the trainer may go ahead of one that must be fetched
    shared_devices: bool = False  # training and sampling, in turn
    sampling_weight: float = 1.0  # of its seconds on shared devices, training's being 1
    turn_s: float = 2.0

    # What a tenant may have waiting, unless its row says otherwise (tenant_terms.py); more is refused.
    max_requests_a_tenant: int = 4096
    max_tokens_a_tenant: int = 16_777_216
    retry_after_s: float = 1.0

    # State.
    max_ephemeral_samplers: int = 8  # unnamed samplers of a model whose files are kept, and those that are in use
    snapshot_every_steps: int = 8
    snapshot_every_s: float = 60.0
    snapshot_share: float = 0.1  # of a model's time that its snapshots may take; they are rarer where they take long
    max_attempts: int = 3  # of a call that the trainer, or an engine, dies over

    # Deadlines.
    gap_timeout_s: float = 120.0  # for the call before a call
    backend_timeout_s: float = 3600.0  # for one verb of the trainer, or one sample
    close_timeout_s: float = 30.0  # for what the trainer does when the server ends
    session_timeout_s: float = 120.0  # without a heartbeat
    result_retention_s: float = 3600.0  # of answers that clients may ask for again
    sweep_every_s: float = 2.0
