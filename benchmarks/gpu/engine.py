"""The whole engine on random weights: requests in, tokens out, with adapters and without, replayed and op by op."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import SLOT_RANK, RandomAdapters, RandomWeights, num_slots_of
from loraplex.adapters.ref import BASE, AdapterRef, LoraSelection
from loraplex.engine.assembly import EngineParts, assemble_engine_core
from loraplex.engine.config import DType, EngineConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.messages import GenerateRequest, LoadAdapter
from loraplex.engine.models.base_shapes import base_shapes
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.decoder_builder import build_decoder
from loraplex.engine.models.dtypes import resolve_dtype
from loraplex.engine.runner.device_memory import DeviceMemory, device_memory
from loraplex.engine.sampling_params import SamplingParams
from loraplex.kernels.dispatch import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What is asked of the engine."""

    dtype: DType
    num_adapters: int
    batch_sizes: Sequence[int]
    prompt_length: int
    num_tokens: int  # of each answer
    max_model_len: int
    kv_cache_memory_bytes: int | None = None

    @property
    def max_num_seqs(self) -> int:
        return max(self.batch_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    token_ids: dict[str, tuple[int, ...]]
    tokens_per_s: float  # of the steps in which everybody decodes


def check_engine(report: Report, device: Device, backend: Backend, config: ModelConfig, run: EngineRun) -> None:
    """Throughput of base and LoRA by batch size, and whether replayed steps give the tokens of the others."""
    dtype = resolve_dtype(run.dtype, config)
    memory = device_memory(device.device)  # before the weights took theirs
    with torch.inference_mode():
        model = build_decoder(config, backend, RandomWeights(config, dtype=dtype, device=device.device))
    answers = {mode: _serve(report, device, model, memory, run, mode=mode) for mode in ("op by op", "replayed")}
    for name, replayed in answers["replayed"].items():
        eager = answers["op by op"][name]
        share = _equal_share(eager, replayed)
        report.add(
            "engine",
            f"{name}: tokens equal those op by op",
            passed=share == 1,
            equal_share=share,
            speedup=replayed.tokens_per_s / eager.tokens_per_s,
        )


def _equal_share(first: Answers, second: Answers) -> float:
    """Share of the tokens before each answer's first difference."""
    shares = []
    for request_id, token_ids in first.token_ids.items():
        is_equal = [ours == theirs for ours, theirs in zip(token_ids, second.token_ids[request_id], strict=True)]
        shares.append([*is_equal, False].index(False) / len(is_equal))
    return sum(shares) / len(shares)


def _serve(
    report: Report, device: Device, model: DecoderModel, memory: DeviceMemory, run: EngineRun, *, mode: str
) -> dict[str, Answers]:
    """Build an engine, load all adapters, answer every batch; the engine is gone afterwards."""
    start = time.monotonic()
    core, refs = _build(device, model, memory, run, enforce_eager=mode == "op by op")
    built = time.monotonic()
    _load(core, refs)
    report.add("engine", f"{mode}: start", built_s=built - start, adapters_loaded_s=time.monotonic() - built)
    answers: dict[str, Answers] = {}
    for batch_size in run.batch_sizes:
        base = _answer(core, device, run, [BASE] * batch_size)
        lora = _answer(core, device, run, [LoraSelection.single(refs[i % len(refs)]) for i in range(batch_size)])
        answers |= {f"base, batch {batch_size}": base, f"lora, batch {batch_size}": lora}
        report.add(
            "engine",
            f"{mode}: batch {batch_size}",
            base_tokens_per_s=base.tokens_per_s,
            lora_tokens_per_s=lora.tokens_per_s,
            lora_over_base=lora.tokens_per_s / base.tokens_per_s,
        )
        report.check_time()
    faults = core.integrity().faults
    report.add("engine", f"{mode}: nothing is left behind", passed=not faults, faults=float(len(faults)))
    del core
    gc.collect()
    if device.device.type == "cuda":
        torch.cuda.empty_cache()
    return answers


def _build(
    device: Device, model: DecoderModel, memory: DeviceMemory, run: EngineRun, *, enforce_eager: bool
) -> tuple[EngineCore, list[AdapterRef]]:
    base = base_shapes(model.config, name="random", digest="0" * 64)
    reader = RandomAdapters(base, num_adapters=run.num_adapters, dtype=model.dtype, device=device.device)
    config = EngineConfig(
        model="random",
        dtype=run.dtype,
        device=str(device.device),
        max_model_len=run.max_model_len,
        max_num_seqs=run.max_num_seqs,
        kv_cache_memory_bytes=run.kv_cache_memory_bytes,
        enable_prefix_caching=False,  # or the later batches would have no prompt to compute
        adapter_slots=num_slots_of(reader.refs),
        slot_rank=SLOT_RANK,
        lora_dtype=run.dtype,
        adapter_host_memory_bytes=0,  # the "host" copies of random adapters lie on the device
        enforce_eager=enforce_eager,
    )
    core, _ = assemble_engine_core(config, EngineParts(base=base, model=model, memory=memory), reader)
    return core, reader.refs


def _load(core: EngineCore, refs: Sequence[AdapterRef]) -> None:
    for call_id, ref in enumerate(refs):
        core.handle(LoadAdapter(call_id, ref))
    while core.has_work:
        core.step()
    errors = [reply.error.message for reply in core.take_replies() if reply.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} adapters were not loaded: {errors[0]}")


def _answer(core: EngineCore, device: Device, run: EngineRun, selections: Sequence[LoraSelection]) -> Answers:
    for index, selection in enumerate(selections):
        prompt = [(31 * index + 7 * place) % 250 for place in range(run.prompt_length)]
        params = SamplingParams(max_tokens=run.num_tokens, temperature=0.0, ignore_eos=True)
        core.add_request(
            GenerateRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params, selection=selection)
        )
    token_ids: dict[str, list[int]] = {str(index): [] for index in range(len(selections))}
    full_steps: list[float] = []
    while core.has_work:
        start = time.perf_counter()
        outputs = core.step()
        device.synchronize()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error.message)
            token_ids[output.request_id] += output.new_token_ids
        if sum(len(output.new_token_ids) for output in outputs) == len(selections):
            full_steps.append(time.perf_counter() - start)
    steady = full_steps[len(full_steps) // 4 :]  # the first steps hold prefills and what is recorded at first use
    return Answers(
        token_ids={request_id: tuple(ids) for request_id, ids in token_ids.items()},
        tokens_per_s=len(selections) * len(steady) / sum(steady),
    )
