"""The demo: train, serve, upload, ask one question through four selections in one batch, show the answers."""

from __future__ import annotations

import asyncio
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loraplex.platform.demo.model import ensure_demo_model
from loraplex.platform.demo.server import MODEL_NAME, DemoServer, running_server
from loraplex.platform.demo.training import NUM_PROGRESS_UNITS, ensure_demo_adapters

QUESTION = "What is the capital of France?"
MAX_TOKENS = 64
TENANT, OTHER_TENANT = "acme", "globex"
MIX = [{"name": "json", "weight": 1.0}, {"name": "support", "weight": 1.2}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One reply of the batch."""

    label: str
    text: str
    num_tokens: int
    seconds: float


def run_demo(demo_dir: Path, *, host: str, port: int, once: bool, console: Console) -> None:
    """Show the whole product once; unless `once`, leave the server running until Ctrl-C."""
    console.print("Expanding the demo model (the first time about 20 s)", style="dim")
    model_dir = ensure_demo_model(demo_dir)
    adapters = _train(model_dir, demo_dir, console)
    console.print("Starting the server", style="dim")
    with running_server(model_dir, demo_dir, host=host, port=port) as server:
        keys = _set_up_tenants(server, adapters)
        _show_answers(server, keys[TENANT], console)
        if not once:
            _show_how_to_call(server, keys, console)
            _wait_for_interrupt(server, console)
        console.print("Stopping the server", style="dim")


def _train(model_dir: Path, demo_dir: Path, console: Console) -> dict[str, Path]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Training two LoRA adapters with PEFT", total=NUM_PROGRESS_UNITS)
        return ensure_demo_adapters(model_dir, demo_dir, lambda units: progress.advance(task, units))


def _set_up_tenants(server: DemoServer, adapters: dict[str, Path]) -> dict[str, str]:
    """Two tenants, each with a key; the first owns both adapters, the second only one: it cannot see the other."""
    keys = {}
    owned = {TENANT: list(adapters), OTHER_TENANT: ["support"]}
    for tenant, names in owned.items():
        server.call("POST", "/api/v1/tenants", json={"name": tenant})
        scopes = ["infer", "adapters:read", "adapters:write"]
        key = server.call("POST", f"/api/v1/tenants/{tenant}/keys", json={"name": "demo", "scopes": scopes})
        keys[tenant] = key["secret"]
        for name in names:
            version = server.upload(tenant, name, adapters[name])
            server.call("POST", f"/api/v1/tenants/{tenant}/adapters/{name}/versions/{version['version']}/load")
    return keys


def _show_answers(server: DemoServer, key: str, console: Console) -> None:
    weights = " + ".join(f"{part['weight']} {part['name']}" for part in MIX)
    asked: dict[str, Any] = {"base": None, "json": "json", "support": "support", f"mix: {weights}": MIX}
    started = time.monotonic()
    answers = asyncio.run(_ask_all(server, key, asked))
    seconds = time.monotonic() - started

    table = Table(title=f"{QUESTION}  (one batch, temperature 0)", title_justify="left", show_lines=True)
    for column in ("adapter", "answer", "tokens/s"):
        table.add_column(column, justify="right" if column == "tokens/s" else "left", overflow="fold")
    for answer in answers:
        table.add_row(answer.label, answer.text, f"{answer.num_tokens / answer.seconds:.0f}")
    console.print(table)
    total = sum(answer.num_tokens for answer in answers)
    console.print(f"{total} tokens in {seconds:.2f} s: {total / seconds:.0f} tokens/s over the whole batch")


async def _ask_all(server: DemoServer, key: str, asked: dict[str, Any]) -> list[Answer]:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
        return await asyncio.gather(*(_ask(client, label, lora) for label, lora in asked.items()))


async def _ask(client: httpx.AsyncClient, label: str, lora: Any) -> Answer:
    started = time.monotonic()
    response = await client.post("/v1/chat/completions", json=_body(lora))
    response.raise_for_status()
    reply = response.json()
    return Answer(
        label=label,
        text=reply["choices"][0]["message"]["content"],
        num_tokens=reply["usage"]["completion_tokens"],
        seconds=time.monotonic() - started,
    )


def _body(lora: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "lora": lora}


def _show_how_to_call(server: DemoServer, keys: dict[str, str], console: Console) -> None:
    body = (
        f'{{"model": "{MODEL_NAME}", "lora": "json", "max_tokens": {MAX_TOKENS}, '
        f'"messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'
    )
    lines = {
        "URL": server.url,
        "platform admin key": server.admin_key,
        f"key of {TENANT} (json, support)": keys[TENANT],
        f"key of {OTHER_TENANT} (support)": keys[OTHER_TENANT],
        "log": str(server.log),
    }
    for name, value in lines.items():
        console.print(f"{name}: {value}", soft_wrap=True, highlight=False)
    curl = (
        f"curl -s {server.url}/v1/chat/completions -H 'Authorization: Bearer {keys[TENANT]}' "
        f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )
    console.print(f"\n{curl}\n", soft_wrap=True, highlight=False, markup=False)


def _wait_for_interrupt(server: DemoServer, console: Console) -> None:
    console.print("The server is running; Ctrl-C stops it.")
    try:
        server.process.wait()
    except KeyboardInterrupt:
        return
    console.print(f"The server ended with {server.process.returncode}; see {server.log}", style="red")
