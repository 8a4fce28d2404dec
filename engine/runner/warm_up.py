"""Steps that nobody asked for, so that the first request finds every kernel compiled."""

from __future__ import annotations

from collections.abc import Iterator

from loraplex.adapters.ref import BASE
from loraplex.engine.request import Request
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduler_output import ScheduledRequest, SchedulerOutput
from loraplex.kernels.lora.metadata import SelectionSlots, WeightedSlot

# Of slot 0, whose weights are zeros before anything was loaded.
_ADAPTER = SelectionSlots(attention=(WeightedSlot(0, 1.0),), mlp=(WeightedSlot(0, 1.0),))
_PROMPT_LENGTH = 80  # more rows than the kernels for a few rows of 4-bit weights take


def warm_up(runner: ModelRunner, *, block_size: int, num_blocks: int, max_num_batched_tokens: int) -> None:
    """Run decodes and prefills, base and adapter, greedy and drawn, over blocks that nobody has written yet.

    A kernel is specialised on dtypes and tile sizes, which follow from the model, and on nothing of a batch; so these
    few steps meet every variant that serving does.
    """
    for batch in warm_up_batches(
        block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=max_num_batched_tokens
    ):
        runner.execute(batch)


def warm_up_batches(*, block_size: int, num_blocks: int, max_num_batched_tokens: int) -> Iterator[SchedulerOutput]:
    """A mixed step and a step of decodes, each without adapters and with one."""
    prompt = min(_PROMPT_LENGTH, max_num_batched_tokens - 1, num_blocks * block_size)
    for lengths in ([1, prompt] if prompt > 1 else [1], [1]):
        for slots in (None, _ADAPTER):
            yield SchedulerOutput(scheduled=tuple(_entry(length, slots, block_size) for length in lengths))


def _entry(num_tokens: int, slots: SelectionSlots | None, block_size: int) -> ScheduledRequest:
    request = Request(
        request_id="warm-up",
        prompt_token_ids=[0] * num_tokens,
        sampling_params=SamplingParams(temperature=float(num_tokens > 1), top_p=0.5),
        max_tokens=1,
        seed=0,
        eos_token_ids=frozenset(),
        selection=BASE,
        arrival_time=0.0,
        block_ids=list(range(-(-num_tokens // block_size))),
    )
    return ScheduledRequest(request=request, num_tokens=num_tokens, slots=slots)
