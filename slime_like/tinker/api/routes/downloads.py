"""Saved weights as files: a link to an archive, or a link to each file (an adapter's folder is PEFT's)."""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import os
import tarfile
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from fsspec.core import url_to_fs

from slime_like.tinker.api.context import Api, Context, Who
from slime_like.tinker.api.gate import OPEN_PREFIX
from slime_like.tinker.api.links import DownloadLink
from slime_like.tinker.api.routes.management import moment, path_of
from slime_like.tinker.store import clients
from slime_like.tinker.store.rows import missing

router = APIRouter(prefix="/api/v1")

_PIECE_BYTES = 2**20
_ARCHIVE = "archive.tar"


def _url(request: Request, token: str, name: str) -> str:
    return f"{str(request.base_url).rstrip('/')}{OPEN_PREFIX}{token}/{name}"


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """One file of saved weights, wherever they are kept."""

    system: Any
    path: str
    size_bytes: int

    def pieces(self) -> Iterator[bytes]:
        """Its bytes; no more than a piece is held."""
        with self.system.open(self.path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece


async def _files(api: Context, path: str, tenant: str) -> dict[str, StoredFile]:
    """Name -> file of saved weights that a tenant may use. Raises Refused (404)."""
    row, _ = await clients.readable(api.rows, path, tenant)
    files = await asyncio.to_thread(_listed, row.folder)
    if not files:
        raise missing(path)
    return files


def _listed(folder: str) -> dict[str, StoredFile]:
    system, root = url_to_fs(folder)
    entries = sorted(system.find(root, detail=True).items())
    return {os.path.relpath(path, root): StoredFile(system, path, entry["size"]) for path, entry in entries}


@router.get("/training_runs/{model_id}/checkpoints/{folder}/{name}/archive")
async def archive(model_id: str, folder: str, name: str, request: Request, api: Api, tenant: Who) -> Response:
    """A redirection to a tar of the weights' files, which needs no key and works for a while."""
    path = path_of(model_id, folder, name)
    await _files(api, path, tenant)
    expires = time.time() + api.settings.link_s
    url = _url(request, api.links.make(DownloadLink(path, tenant, expires)), _ARCHIVE)
    headers = {"Location": url, "Expires": email.utils.formatdate(expires, usegmt=True)}
    return Response(status_code=302, headers=headers)


@router.get("/training_runs/{model_id}/checkpoints/{folder}/{name}/external_weights_urls")
async def file_urls(model_id: str, folder: str, name: str, request: Request, api: Api, tenant: Who) -> dict[str, Any]:
    """A link to each file; of external weights those of the sampler's, PEFT's folder or HF's."""
    path = path_of(model_id, folder, name)
    files = await _files(api, path, tenant)
    expires = time.time() + api.settings.link_s
    token = api.links.make(DownloadLink(path, tenant, expires))
    return {"urls": {file: _url(request, token, file) for file in files}, "expires": moment(expires)}


@router.get("/links/{token}/{name:path}")
async def download(token: str, name: str, api: Api) -> Response:
    """What a link is to: a file of that name, or all of them. Deleted weights are gone here too."""
    link = api.links.get(token)
    files = await _files(api, link.path, link.tenant)
    if name in files:
        headers = {"Content-Length": str(files[name].size_bytes)}
        return StreamingResponse(files[name].pieces(), media_type="application/octet-stream", headers=headers)
    if name != _ARCHIVE:
        raise missing(name)
    headers = {"Content-Disposition": f'attachment; filename="{link.path.rpartition("/")[2]}.tar"'}
    return StreamingResponse(_tar(files), media_type="application/x-tar", headers=headers)


def _tar(files: dict[str, StoredFile]) -> Iterator[bytes]:
    """The bytes of an archive, piece by piece."""
    for name, file in files.items():
        entry = tarfile.TarInfo(name)
        entry.size = file.size_bytes
        yield entry.tobuf(tarfile.PAX_FORMAT)
        yield from file.pieces()
        yield b"\0" * (-entry.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)
