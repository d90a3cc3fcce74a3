"""Saved weights as files, by links (slime_like.tinker.api.links)."""

from __future__ import annotations

import asyncio
import email.utils
import io
import json
import tarfile
import time

import numpy as np
from safetensors.numpy import load

from tests.helpers.tinker_bigrams import base_table
from tests.helpers.tinker_http import trained_model, world


def test_an_archive_is_the_folder_and_its_link_ends(tmp_path):
    async def run() -> None:
        async with world(tmp_path, link_s=1.0) as there, there.http(await there.key("ann")) as ann:
            mine = await trained_model(ann)
            where = f"/api/v1/training_runs/{mine['model']}/checkpoints/sampler_weights/weights"
            answer = await ann.get(f"{where}/archive")
            assert answer.status_code == 302
            expires = email.utils.parsedate_to_datetime(answer.headers["Expires"]).timestamp()
            assert abs(expires - time.time() - 1) < 2
            async with there.http(None) as anybody:  # the link is its own proof
                got = await anybody.get(answer.headers["Location"])
                assert got.status_code == 200
                with tarfile.open(fileobj=io.BytesIO(got.content)) as archive:
                    files = {entry.name: archive.extractfile(entry).read() for entry in archive}
                assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
                assert json.loads(files["adapter_config.json"]) == {"peft_type": "LORA"}
                np.testing.assert_array_equal(load(files["adapter_model.safetensors"])["table"], base_table())
                folder = answer.headers["Location"].rpartition("/")[0]
                for name in ("../../tinker.db", "..%2F..%2Ftinker.db", "nothing"):
                    assert (await anybody.get(f"{folder}/{name}")).status_code in (401, 404)
                urls = (await ann.get(f"{where}/external_weights_urls")).json()["urls"]
                one = await anybody.get(urls["adapter_model.safetensors"])
                assert one.content == files["adapter_model.safetensors"]
                assert int(one.headers["content-length"]) == len(one.content)
                await asyncio.sleep(1.1)
                assert (await anybody.get(answer.headers["Location"])).status_code == 404

    asyncio.run(run())


def test_deleted_weights_are_gone_behind_their_links_too(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as there, there.http("tml-x") as http:
            mine = await trained_model(http)
            where = f"/api/v1/training_runs/{mine['model']}/checkpoints/weights/state"
            link = (await http.get(f"{where}/archive")).headers["Location"]
            assert (await http.get(link)).status_code == 200
            assert (await http.delete(where)).status_code == 204
            assert (await http.get(link)).status_code == 404
            assert (await http.delete(where)).status_code == 404
            body = {"model_id": mine["model"], "seq_id": 3, "path": mine["state"], "optimizer": False}
            assert (await http.get("/api/v1/checkpoints")).json()["cursor"]["total_count"] == 1
            create = {"session_id": mine["session"], "model_seq_id": 1, **body}
            del create["model_id"]
            assert (await http.post("/api/v1/load_weights", json=create)).status_code == 404

    asyncio.run(run())
