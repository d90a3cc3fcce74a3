"""A page for people, its numbers, and the metrics for Prometheus."""

from __future__ import annotations

import base64
import hashlib
import math
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from slime_like.tinker.api.context import Api, Who
from slime_like.tinker.api.routes.management import moment
from slime_like.tinker.store import listings

router = APIRouter()

_MAX_ROWS = 100
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
h1 { font-size: 1.3em } h2 { font-size: 1.05em; margin-top: 1.6em }
table { border-collapse: collapse } td, th { padding: .2em .8em .2em 0; text-align: left; vertical-align: middle }
th { font-weight: 600; border-bottom: 1px solid #ccc } td { border-bottom: 1px solid #eee }
code { font-size: .9em } polyline { fill: none; stroke: #36c; stroke-width: 1.5 } .off { color: #888 }
"""
#: All text of tenants goes through textContent: it is never read as HTML.
_SCRIPT = """
const at = id => document.getElementById(id);
function row(table, cells, isHead) {
  const line = table.insertRow();
  for (const cell of cells) {
    const place = line.appendChild(document.createElement(isHead ? "th" : "td"));
    if (cell instanceof Node) place.appendChild(cell); else place.textContent = cell ?? "";
  }
}
function fill(id, head, rows) {
  const table = at(id); table.replaceChildren(); row(table, head, true);
  for (const cells of rows) row(table, cells, false);
}
function curve(losses) {
  const width = 180, height = 28, svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", width); svg.setAttribute("height", height);
  const values = losses.map(l => l[1]).filter(v => v !== null);
  if (values.length < 2) return document.createTextNode(values.length ? values[0].toPrecision(4) : "");
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", values.map((v, i) =>
    `${(i * width / (values.length - 1)).toFixed(1)},${(height - 2 - (v - low) / span * (height - 4)).toFixed(1)}`
  ).join(" "));
  svg.appendChild(line); return svg;
}
async function refresh() {
  const key = sessionStorage.getItem("key");
  const answer = await fetch("/api/v1/overview", {headers: key ? {"X-API-Key": key} : {}});
  at("door").hidden = answer.status !== 401;
  if (!answer.ok) { at("note").textContent = (await answer.json()).error; return; }
  const seen = await answer.json();
  at("note").textContent = `tenant ${seen.tenant}, ${new Date().toLocaleTimeString()}`;
  fill("queues", ["kind", "state", "requests"], seen.queues.map(q => [q.kind, q.state, q.requests]));
  fill("runs", ["run", "base model", "rank", "steps", "last request", "", "loss", "last"], seen.runs.map(r => [
    r.id, r.base_model, r.lora_rank || "full", r.num_steps, r.last_request, r.released ? "released" : "",
    curve(r.losses), r.losses.length ? (r.losses.at(-1)[1] ?? NaN).toPrecision(5) : ""]));
  fill("sessions", ["session", "name", "began", "last heard", "state"], seen.sessions.map(s => [
    s.id, s.display_name, s.created, s.last_heartbeat, s.finish_reason ?? "lives"]));
}
at("enter").addEventListener("submit", event => {
  event.preventDefault(); sessionStorage.setItem("key", at("key").value); at("key").value = ""; refresh();
});
refresh(); setInterval(refresh, 5000);
"""
_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>slime_like</title><style>{_STYLE}</style></head><body>
<h1>slime_like <span id="note" class="off"></span></h1>
<div id="door" hidden><form id="enter">API key: <input id="key" type="password" size="60" autocomplete="off">
<button>Show</button></form></div>
<h2>Queues</h2><table id="queues"></table>
<h2>Runs</h2><table id="runs"></table>
<h2>Sessions</h2><table id="sessions"></table>
<script>{_SCRIPT}</script></body></html>
"""


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


#: Nothing but the page's own script runs in it, and it asks nobody but this server.
_POLICY = (
    f"default-src 'none'; script-src {_digest(_SCRIPT)}; style-src {_digest(_STYLE)}; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/")
async def page() -> Response:
    """Sessions, runs, queues and losses."""
    return Response(_PAGE, media_type="text/html", headers={"Content-Security-Policy": _POLICY})


@router.get("/metrics")
async def metrics(api: Api) -> Response:
    """Prometheus'. Any tenant's key reads them; they name none."""
    return Response(await api.observed.exposition(api.rows, api.service.stats()), media_type=CONTENT_TYPE_LATEST)


@router.get("/api/v1/overview")
async def overview(api: Api, tenant: Who) -> dict[str, Any]:
    """The page's numbers: the tenant's own, newest first."""
    sessions = await listings.list_sessions(api.rows, tenant, limit=_MAX_ROWS, offset=0)
    runs = await listings.list_runs(api.rows, tenant, limit=_MAX_ROWS, offset=0)
    queues = await listings.queue_lengths(api.rows, tenant)
    return {
        "tenant": tenant,
        "queues": [
            {"kind": kind, "state": state, "requests": number} for (kind, state), number in sorted(queues.items())
        ],
        "runs": [
            {
                "id": run.model.id,
                "base_model": run.model.base_model,
                "lora_rank": run.model.lora_rank,
                "num_steps": run.model.num_steps,
                "last_request": moment(run.model.last_request),
                "released": moment(run.model.released),
                "losses": [
                    (at, loss if math.isfinite(loss) else None) for at, loss in api.observed.losses(run.model.id)
                ],
            }
            for run in runs.rows
        ],
        "sessions": [
            {
                "id": row.id,
                "display_name": row.display_name,
                "created": moment(row.created),
                "last_heartbeat": moment(row.last_heartbeat),
                "finish_reason": row.finish_reason,
            }
            for row in sessions.rows
        ],
    }
