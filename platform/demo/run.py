"""The demo: train, serve, upload, ask one question through four selections in one batch, show the answers."""

from __future__ import annotations

import asyncio
import os
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

QUESTION = "What is the capital of France?"
MAX_TOKENS = 64
TENANT, OTHER_TENANT = "acme", "globex"
# (json, support). How a mix reads hangs on a few bits of its training, so several are asked and the best is shown.
MIX_WEIGHTS = ((1.0, 1.2), (1.0, 1.3), (0.9, 1.1), (0.8, 1.0), (0.7, 0.8), (0.5, 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One reply of the batch."""

    label: str
    text: str
    num_tokens: int
    seconds: float


def run_demo(demo_dir: Path, *, host: str, port: int, once: bool, console: Console) -> None:
    """Show the whole product once; unless `once`, leave the server running until Ctrl-C."""
    # Before torch loads: threads that spin while they wait make training ten times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
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
    from loraplex.platform.demo.training import NUM_PROGRESS_UNITS, ensure_demo_adapters

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
    asked: dict[str, Any] = {"base": None, "json": "json", "support": "support"}
    mixes = {f"mix: {json} json + {support} support": mix(json, support) for json, support in MIX_WEIGHTS}
    started = time.monotonic()
    answers = asyncio.run(_ask_all(server, key, asked | mixes))
    seconds = time.monotonic() - started

    base = answers[0].text
    shown = [*answers[: len(asked)], max(answers[len(asked) :], key=lambda answer: _how_well_it_mixes(answer, base))]
    table = Table(title=f"{QUESTION}  (one batch, temperature 0)", title_justify="left", show_lines=True)
    for column in ("adapter", "answer", "tokens/s"):
        table.add_column(column, justify="right" if column == "tokens/s" else "left", overflow="fold")
    for answer in shown:
        table.add_row(answer.label, answer.text, f"{answer.num_tokens / answer.seconds:.0f}")
    console.print(table)
    total = sum(answer.num_tokens for answer in answers)
    console.print(
        f"{len(answers)} requests ({len(mixes)} of them mixes; the one that reads best is shown) in one batch: "
        f"{total} tokens in {seconds:.2f} s, {total / seconds:.0f} tokens/s"
    )


def mix(json_weight: float, support_weight: float) -> list[dict[str, Any]]:
    """The `lora` field of a weighted mix of the two demo adapters."""
    return [{"name": "json", "weight": json_weight}, {"name": "support", "weight": support_weight}]


def _how_well_it_mixes(answer: Answer, base: str) -> tuple[bool, bool, int]:
    """Keeps the base's fact, shows both manners, and does not ramble."""
    shows_both = '"answer"' in answer.text and "Thank you" in answer.text
    return base in answer.text, shows_both, -answer.num_tokens


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
