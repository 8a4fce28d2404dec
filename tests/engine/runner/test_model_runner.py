from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.engine.outputs import TokenLogprobs
from loraplex.engine.request import Request
from loraplex.engine.runner.model_runner import MAX_PROMPT_LOGITS_ROWS
from loraplex.engine.scheduler_output import SchedulerOutput
from loraplex.kernels.dispatch import create_backend
from loraplex.kernels.lora.metadata import SelectionSlots, WeightedSlot
from tests.engine.runner.driver import BLOCK_SIZE, Answer, World, create_pools, load
from tests.engine.runner.helpers import create_request
from tests.helpers import make_checkpoint

PROMPTS = [[1, 5, 9], [2], [7, 3, 3, 90, 14, 27, 60, 41, 8, 33, 12], [100] * 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DecoderModel:
    return load(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def create_requests(**params: Any) -> list[Request]:
    return [create_request(prompt=prompt, seed=seed, **params) for seed, prompt in enumerate(PROMPTS)]


def reference_logprobs(reference: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(dim=-1)


def assert_describes(entry: TokenLogprobs, expected: Tensor, *, num_top: int) -> None:
    assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
    assert entry.rank == int((expected > expected[entry.token_id]).sum()) + 1
    values, ids = expected.topk(num_top)
    assert [token for token, _ in entry.top] == ids.tolist()
    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 1000])
def test_greedy_tokens_equal_transformers(model: DecoderModel, reference: Any, chunk_size: int) -> None:
    requests = create_requests(temperature=0.0, max_tokens=20)
    answers = World.over(model).run(requests, chunk_size=chunk_size)
    for request in requests:
        generated = reference.generate(
            torch.tensor([request.prompt_token_ids]),
            attention_mask=torch.ones(1, request.num_prompt_tokens),
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
        )
        assert answers[request].token_ids == generated[0, request.num_prompt_tokens :].tolist()


def test_sampled_tokens_do_not_depend_on_batch_chunks_or_preemption(model: DecoderModel) -> None:
    params: dict[str, Any] = {"max_tokens": 12, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    together = World.over(model).run(create_requests(**params), chunk_size=3)
    for request, answer in together.items():
        alone = create_request(prompt=request.prompt_token_ids, seed=request.seed, **params)
        assert World.over(model).run([alone])[alone].token_ids == answer.token_ids

        preempted = create_request(prompt=request.prompt_token_ids, seed=request.seed, **params)
        preempted.token_ids += answer.token_ids[:5]  # waits with its output, and computes all of it again
        resumed = Answer(token_ids=answer.token_ids[:5])
        world = World.over(model)
        while resumed.is_running(preempted):
            resumed.take(world.step([preempted], 4)[preempted])
        assert resumed.token_ids == answer.token_ids


def test_seeds_make_answers_differ(model: DecoderModel) -> None:
    requests = [create_request(prompt=[1, 2], seed=seed, max_tokens=8) for seed in range(6)]
    answers = World.over(model).run(requests)
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 6


def test_logprobs_are_of_the_unmodified_logits(model: DecoderModel, reference: Any) -> None:
    edited: dict[str, Any] = {"logit_bias": {17: 100.0}, "repetition_penalty": 1.5, "temperature": 0.4, "top_k": 2}
    requests = [
        create_request(prompt=PROMPTS[2], max_tokens=5, logprobs=3, seed=1),
        create_request(prompt=PROMPTS[0], max_tokens=5, logprobs=0, **edited),
        create_request(prompt=PROMPTS[1], max_tokens=5, temperature=0.0),
        create_request(prompt=PROMPTS[3], max_tokens=5, temperature=0.0, logprobs=20),
    ]
    answers = World.over(model).run(requests)
    assert answers[requests[1]].token_ids == [17] * 5
    assert answers[requests[2]].logprobs == []
    for request, num_top in ((requests[0], 3), (requests[1], 0), (requests[3], 20)):
        expected = reference_logprobs(reference, request.token_ids)[request.num_prompt_tokens - 1 :]
        answer = answers[request]
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        for entry, row in zip(answer.logprobs, expected, strict=False):
            assert_describes(entry, row, num_top=num_top)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_prompt_logprobs_are_whole_for_every_chunk_size(model: DecoderModel, reference: Any, chunk_size: int) -> None:
    requests = [
        create_request(prompt=PROMPTS[2], max_tokens=2, prompt_logprobs=2, temperature=0.0),
        create_request(prompt=PROMPTS[3], max_tokens=0, prompt_logprobs=0),
        create_request(prompt=PROMPTS[0], max_tokens=2),
        create_request(prompt=PROMPTS[1], max_tokens=1, prompt_logprobs=3),  # one token: nothing predicts it
    ]
    answers = World.over(model).run(requests, chunk_size=chunk_size)
    assert answers[requests[1]].token_ids == []
    for request, num_top in zip(requests, (2, 0, None, 3), strict=True):
        entries = answers[request].prompt_logprobs
        if num_top is None:
            assert entries == []
            continue
        assert [entry.token_id for entry in entries] == request.prompt_token_ids[1:]
        expected = reference_logprobs(reference, request.prompt_token_ids)
        for entry, row in zip(entries, expected, strict=False):
            assert_describes(entry, row, num_top=num_top)


def test_prompt_logprobs_pass_the_head_in_bounded_pieces(
    model: DecoderModel, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    compute_logits = DecoderModel.compute_logits

    def counted(self: DecoderModel, hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return compute_logits(self, hidden)

    monkeypatch.setattr(DecoderModel, "compute_logits", counted)
    prompts = [[(7 * place + first) % 128 for place in range(200)] for first in range(3)]
    requests = [create_request(prompt=prompt, max_tokens=0, prompt_logprobs=1) for prompt in prompts]
    answers = World.over(model).run(requests)
    assert rows == [MAX_PROMPT_LOGITS_ROWS, MAX_PROMPT_LOGITS_ROWS, 3 * 199 - 2 * MAX_PROMPT_LOGITS_ROWS]
    for request in requests:
        expected = reference_logprobs(reference, request.prompt_token_ids)
        described = [entry.logprob for entry in answers[request].prompt_logprobs]
        assert described == pytest.approx(
            expected[:-1].gather(-1, torch.tensor(request.prompt_token_ids[1:]).unsqueeze(-1)).squeeze(-1).tolist(),
            abs=1e-4,
        )


def test_a_recomputed_prompt_is_not_described_again(model: DecoderModel) -> None:
    request = create_request(prompt=PROMPTS[2], output=[4], prompt_logprobs=1, max_tokens=3)
    assert World.over(model).step([request])[request].prompt_logprobs == ()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_poisoned_cache_fails_its_own_request_only(model: DecoderModel, value: float) -> None:
    params: dict[str, Any] = {"max_tokens": 10, "logprobs": 2}
    clean = [answer.token_ids for answer in World.over(model).run(create_requests(**params)).values()]
    requests = create_requests(**params)
    world = World.over(model)

    def poison() -> None:
        if requests[2].num_output_tokens == 4:
            world.kv_caches[1].value[requests[2].block_ids[1], 2] = value

    answers = world.run(requests, after_step=poison)
    assert [answers[request].is_finite for request in requests] == [True, True, False, True]
    assert [answers[request].token_ids for request in requests] == [clean[0], clean[1], clean[2][:4], clean[3]]
    assert [len(answers[request].logprobs) for request in requests] == [10, 10, 4, 10]


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_a_poisoned_chunk_is_found_before_its_prompt_ends(model: DecoderModel, prompt_logprobs: int | None) -> None:
    request, other = create_request(prompt=range(12), prompt_logprobs=prompt_logprobs), create_request(prompt=range(12))
    world = World.over(model)
    world.step([request, other], 4)
    world.kv_caches[0].key[request.block_ids[0], 0] = torch.nan
    results = world.step([request, other], 4)
    assert not results[request].is_finite
    assert results[request].prompt_logprobs == ()
    assert results[request].token_id is None
    assert results[other].is_finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_logit_fails_its_own_request_only(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    clean = list(World.over(model).step(create_requests(logprobs=1)).values())
    compute_logits = DecoderModel.compute_logits

    def overflowing(self: DecoderModel, hidden: Tensor) -> Tensor:
        logits = compute_logits(self, hidden)
        logits[1, 77] = value
        return logits

    monkeypatch.setattr(DecoderModel, "compute_logits", overflowing)
    results = list(World.over(model).step(create_requests(logprobs=1)).values())
    assert [result.is_finite for result in results] == [True, False, True, True]
    assert (results[1].token_id, results[1].logprobs) == (None, None)
    for row in (0, 2, 3):
        assert (results[row].token_id, results[row].logprobs) == (clean[row].token_id, clean[row].logprobs)


def test_what_took_the_way_of_the_reference_is_counted(checkpoint: Path) -> None:
    half = load_model(
        checkpoint,
        read_model_config(checkpoint),
        backend=create_backend("cpu", torch.device("cpu")),
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    world = World.over(half)
    world.run(create_requests(max_tokens=2))
    totals = world.runner.totals()
    assert totals.replayed_steps == 0
    assert totals.fallbacks["paged_attention"] > 0


def test_a_step_in_which_nothing_is_finite(model: DecoderModel) -> None:
    request = create_request(prompt=range(6), logprobs=1)
    world = World.over(model)
    world.step([request], 4)
    world.kv_caches[0].key[request.block_ids[0]] = torch.nan
    result = world.step([request], 4)[request]
    assert (result.is_finite, result.token_id) == (False, None)


def test_blocks_are_zeroed_before_the_step_reads_and_writes(model: DecoderModel) -> None:
    world = World.over(model)
    request = create_request(prompt=[1, 2, 3], max_tokens=1)
    entry = world.schedule([request], 1000, {}).scheduled
    world.runner.execute(SchedulerOutput(scheduled=entry, blocks_to_zero=(3, request.block_ids[0])))
    for cache in world.kv_caches:
        for tensor in (cache.key, cache.value):
            assert (tensor[3] == 0).all()
            assert (tensor[request.block_ids[0], :3] != 0).all()
            assert (tensor[request.block_ids[0], 3:] == 0).all()
            assert tensor[4].isnan().all()


def test_an_empty_schedule_still_zeroes(model: DecoderModel) -> None:
    world = World.over(model)
    assert world.runner.execute(SchedulerOutput()).results == ()
    assert world.runner.execute(SchedulerOutput(blocks_to_zero=(5,))).results == ()
    assert (world.kv_caches[0].key[5] == 0).all()


def test_requests_are_left_as_they_were(model: DecoderModel) -> None:
    world = World.over(model)
    request = create_request(prompt=[1, 2, 3])
    entries = world.schedule([request], 1000, {}).scheduled
    world.runner.execute(SchedulerOutput(scheduled=entries))
    assert (request.token_ids, request.num_computed_tokens) == ([1, 2, 3], 0)


def test_every_request_runs_through_its_own_selection(model: DecoderModel) -> None:
    pools = create_pools(model)
    single = SelectionSlots((WeightedSlot(1, 1.0),), (WeightedSlot(0, 1.0),))
    mix = SelectionSlots((WeightedSlot(1, 0.5), WeightedSlot(2, 0.5)), ())
    params: dict[str, Any] = {"prompt": PROMPTS[2], "temperature": 0.0, "max_tokens": 12}
    chosen = [single, None, mix, single, None]
    requests = [create_request(**params) for _ in chosen]
    slots = {request: each for request, each in zip(requests, chosen, strict=True) if each is not None}
    answers = [answer.token_ids for answer in World.over(model, pools).run(requests, slots=slots).values()]
    assert answers[0] == answers[3]
    assert answers[1] == answers[4]
    assert len({tuple(answer) for answer in answers}) == 3
    for each, answer in list(zip(chosen, answers, strict=True))[:3]:
        alone = create_request(**params)
        slots = {} if each is None else {alone: each}
        assert World.over(model, pools).run([alone], slots=slots, chunk_size=BLOCK_SIZE)[alone].token_ids == answer
    base = create_request(**params)
    assert World.over(model).run([base])[base].token_ids == answers[1]
