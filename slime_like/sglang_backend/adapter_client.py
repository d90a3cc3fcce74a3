"""The control requests of a SGLang server that are about adapters (--enable-lora)."""

from __future__ import annotations

from slime_like.sglang_backend.bodies import Body
from slime_like.sglang_backend.client import EngineClient


class AdapterClient(EngineClient):
    """One engine's control requests, those about adapters with them. Errors are EngineClient's."""

    def adapters(self) -> list[str]:
        """Names of the adapters that are loaded."""
        served = self.models().get("data", [])
        return [model["id"] for model in served if model.get("parent")]

    def load_adapter(self, name: str, folder: str, timeout_s: float | None = None) -> None:
        """Serve the adapters of a PEFT folder that the server can see, under a name that is new."""
        self._checked("/load_lora_adapter", {"lora_name": name, "lora_path": folder}, timeout_s)

    def load_adapter_tensors(self, name: str, pickled: bytes, config: dict, digests: dict[str, str]) -> None:
        """Serve adapters under a name that is new.

        pickled: name -> tensor, by PEFT's names, whole. config: what adapter_config.json says.
        digests: sha256 in hex of each tensor's bytes, which every rank of the engine compares with what it got; SGLang
        (0.5.23) ends where one differs.
        """
        fields = {"lora_name": name, "config_dict": config, "expected_checksums": digests}
        body = Body(fields, "serialized_named_tensors", pickled, copies=self.endpoint.tp_size)
        self._checked("/load_lora_adapter_from_tensors", body)

    def unload_adapter(self, name: str, timeout_s: float | None = None) -> None:
        """Forget adapters, once the last request that names them has ended."""
        self._checked("/unload_lora_adapter", {"lora_name": name}, timeout_s)
