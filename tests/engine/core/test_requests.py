"""One request's life: what is refused, how it stops, what it is told, how it is aborted."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.adapters.ref import BASE, AdapterRef, LoraSelection
from loraplex.engine.core.block_hash import MAX_SALT_BYTES
from loraplex.engine.messages import AbortRequests, GenerateRequest
from loraplex.engine.outputs import FinishReason
from loraplex.engine.scheduler_output import SchedulerOutput
from tests.engine.core.fake_adapters import FakeAdapters
from tests.engine.core.world import EOS, World, make_request, select, solo_tokens
from tests.engine.runner.helpers import create_request


def refusal(request: GenerateRequest, **world_settings: int) -> tuple[str, str]:
    """Code and message with which a request is refused, while another one is served."""
    world = World(**world_settings)  # type: ignore[arg-type]
    world.add(make_request("other"), request)
    world.run()
    assert world.tokens("other") == solo_tokens(make_request("other"))
    assert len(world.outputs[request.request_id]) == 1
    output = world.last(request.request_id)
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    world.assert_nothing_left()
    return output.error.code, output.error.message


class TestRefusals:
    def test_an_empty_prompt(self) -> None:
        assert refusal(make_request("r", []))[0] == "invalid_request"

    @pytest.mark.parametrize("token_id", [-1, 97, 1 << 40])
    def test_a_token_outside_the_vocabulary(self, token_id: int) -> None:
        request = make_request("r")
        code, message = refusal(
            GenerateRequest(request_id="r", prompt_token_ids=[1, token_id], sampling_params=request.sampling_params)
        )
        assert code == "invalid_request"
        assert str(token_id) in message
        assert "96" in message

    @pytest.mark.parametrize("params", [{"logit_bias": {97: 1.0}}, {"stop_token_ids": (97,)}])
    def test_sampling_parameters_outside_the_vocabulary(self, params: dict[str, Any]) -> None:
        code, message = refusal(make_request("r", **params))
        assert code == "invalid_request"
        assert "97" in message

    @pytest.mark.parametrize(("num_tokens", "max_tokens"), [(129, 0), (128, 1), (128, None), (500, 4)])
    def test_a_prompt_that_leaves_no_room_names_both_numbers(self, num_tokens: int, max_tokens: int | None) -> None:
        code, message = refusal(make_request("r", num_tokens, max_tokens=max_tokens))
        assert code == "context_length_exceeded"
        assert str(num_tokens) in message
        assert "128" in message

    def test_more_blocks_than_there_are_names_both_numbers(self) -> None:
        code, message = refusal(make_request("r", 40, max_tokens=10), num_blocks=12)
        assert code == "context_length_exceeded"
        assert "13 KV" in message
        assert "12" in message

    @pytest.mark.parametrize("digest", ["", "not a digest", "ab" * 31, "g" * 64])
    def test_a_digest_that_is_none(self, digest: str) -> None:
        code, message = refusal(make_request("r", selection=LoraSelection.single(AdapterRef(digest, 1, 1))))
        assert code == "invalid_request"
        assert repr(digest) in message

    def test_a_salt_that_is_too_long(self) -> None:
        assert refusal(make_request("r", salt=b"x" * (MAX_SALT_BYTES + 1)))[0] == "invalid_request"

    def test_an_id_that_is_in_use(self) -> None:
        world = World()
        world.add(make_request("r", max_tokens=9), make_request("r", max_tokens=9))
        world.run()
        assert sorted(world.finish_reasons("r")) == ["error", "length"]


class TestLength:
    def test_no_max_tokens_means_up_to_the_context(self) -> None:
        world = World(max_model_len=20)
        world.add(make_request("r", 8, max_tokens=None))
        world.run()
        assert len(world.tokens("r")) == 12
        assert world.finish_reasons("r") == [FinishReason.LENGTH]

    def test_max_tokens_beyond_the_context_ends_with_the_context(self) -> None:
        world = World(max_model_len=20)
        world.add(make_request("r", 8, max_tokens=1000))
        world.run()
        assert len(world.tokens("r")) == 12

    @pytest.mark.parametrize("prompt_logprobs", [None, 2])
    def test_no_output_tokens_at_all_end_after_the_prompt(self, prompt_logprobs: int | None) -> None:
        world = World(max_num_batched_tokens=8, max_model_len=20)
        world.add(make_request("r", 20, max_tokens=0, prompt_logprobs=prompt_logprobs))
        world.run()

        (output,) = world.outputs["r"]
        assert output.new_token_ids == ()
        assert output.finish_reason is FinishReason.LENGTH
        assert (output.prompt_logprobs is None) == (prompt_logprobs is None)
        assert sum(step.get("r", 0) for step in world.runner.num_tokens) == 20
        world.assert_nothing_left()

    def test_kv_for_exactly_one_request_serves_it_to_its_last_token(self) -> None:
        world = World(num_blocks=5, block_size=4, max_model_len=21)
        request = make_request("r", 9, max_tokens=12)  # the last token needs no KV
        world.add(request)
        world.run()
        assert world.tokens("r") == solo_tokens(request)


class TestStops:
    def stopping_at(self, index: int, **params: Any) -> tuple[World, list[int]]:
        """A world that ran a request told to stop at the token that it says at `index`."""
        tokens = solo_tokens(make_request("", max_tokens=20))
        world = World()
        world.add(make_request("r", max_tokens=20, stop_token_ids=(tokens[index],), **params))
        world.run()
        return world, tokens

    def test_a_stop_token_ends_it_and_is_said(self) -> None:
        world, tokens = self.stopping_at(6)
        first = tokens.index(tokens[6])
        assert world.tokens("r") == tokens[: first + 1]
        assert world.last("r").stop_token_id == tokens[6]
        assert world.finish_reasons("r") == [FinishReason.STOP]

    def test_a_stop_token_wins_over_the_length(self) -> None:
        world, _ = self.stopping_at(19)
        assert world.finish_reasons("r") == [FinishReason.STOP]

    def test_the_models_end_stops_unless_ignored(self) -> None:
        seed = next(s for s in range(1000) if EOS in solo_tokens(make_request("", max_tokens=20, seed=s))[1:10])
        world = World()
        world.add(make_request("obeys", max_tokens=20, seed=seed, ignore_eos=False))
        world.add(make_request("ignores", max_tokens=20, seed=seed))
        world.run()

        assert world.tokens("obeys")[-1] == EOS
        assert world.last("obeys").stop_token_id == EOS
        assert world.finish_reasons("obeys") == [FinishReason.STOP]
        assert len(world.tokens("ignores")) == 20

    def test_nothing_is_said_after_the_end(self) -> None:
        world, _ = self.stopping_at(3)
        world.add(make_request("next"))
        world.run()
        assert [output.finish_reason for output in world.outputs["r"][:-1]] == [None] * (len(world.outputs["r"]) - 1)
        assert world.last("r").finish_reason is FinishReason.STOP


class TestNonFinite:
    def test_it_fails_alone_and_its_blocks_are_zeroed_before_reuse(self) -> None:
        world = World(num_blocks=12, block_size=4, max_model_len=48)
        world.runner.non_finite = {"bad": 3}
        others = [make_request(f"r{i}", [i, *range(9)], max_tokens=8) for i in range(4)]
        world.add(make_request("bad", [50, *range(9)], max_tokens=8), *others)  # the runner asserts the zeroing
        world.run()

        assert len(world.tokens("bad")) == 3
        assert world.finish_reasons("bad") == [FinishReason.ERROR]
        error = world.last("bad").error
        assert error is not None
        assert error.code == "non_finite_logits"
        for request in others:
            assert world.tokens(request.request_id) == solo_tokens(request)
        assert any(step.blocks_to_zero for step in world.runner.steps)
        world.assert_nothing_left()

    def test_its_prefix_is_not_cached(self) -> None:
        world = World()
        world.runner.non_finite = {"bad": 1}
        world.add(make_request("bad", 20))
        world.run()
        world.add(make_request("same prompt", 20))
        world.run()

        assert world.cached_tokens("same prompt") == 0
        assert world.tokens("same prompt") == solo_tokens(make_request("", 20))


class TestAbort:
    @pytest.mark.parametrize("steps", range(12))
    @pytest.mark.parametrize("selection", [BASE, select("a")])
    def test_at_any_moment_it_frees_everything_at_once(self, steps: int, selection: LoraSelection) -> None:
        world = World(max_num_batched_tokens=8, adapters=FakeAdapters(load_steps=2))
        world.add(make_request("r", 20, max_tokens=4, selection=selection))
        world.step(steps)
        world.handle(AbortRequests(["r"]))
        report = world.core.integrity()

        assert (report.num_requests, report.num_blocks_in_use, report.num_leases, report.num_references) == (0,) * 4
        world.run()
        assert len(world.finish_reasons("r")) == 1
        world.assert_nothing_left()

    def test_while_it_waits_for_its_adapter(self) -> None:
        world = World(adapters=FakeAdapters(load_steps=3))
        world.add(make_request("r", selection=select("a")))
        world.step()
        assert world.core.stats().num_waiting_for_adapter == 1
        world.core.abort(["r"])
        world.run()
        assert world.finish_reasons("r") == [FinishReason.ABORT]
        world.assert_nothing_left()

    def test_while_it_is_preempted(self) -> None:
        world = World(num_blocks=8, block_size=4, max_model_len=32, enable_prefix_caching=False)
        world.add(*(make_request(f"r{i}", [i, *range(10)], max_tokens=12) for i in range(2)))
        while not world.core.stats().total_preemptions:
            world.step()
        world.core.abort(["r1"])
        world.run()
        assert world.finish_reasons("r1") == [FinishReason.ABORT]
        assert world.finish_reasons("r0") == [FinishReason.LENGTH]
        world.assert_nothing_left()

    def test_thirteen_of_thirty_in_all_states_leave_no_lease(self) -> None:
        world = World(num_blocks=20, max_num_batched_tokens=16, adapters=FakeAdapters(num_slots=2, load_steps=2))
        requests = [make_request(f"r{i}", [i, *range(8)], selection=select(f"a{i % 5}")) for i in range(30)]
        world.add(*requests)
        aborted = set(range(0, 26, 2))
        for index in aborted:
            world.step(index % 4)
            world.core.abort([f"r{index}"])
        world.run()

        for index, request in enumerate(requests):
            if index not in aborted:
                assert world.tokens(request.request_id) == solo_tokens(request)
            assert len(world.finish_reasons(request.request_id)) == 1
        world.assert_nothing_left()

    def test_unknown_and_finished_requests_are_ignored(self) -> None:
        world = World()
        world.add(make_request("r"))
        world.run()
        world.core.abort(["r", "never seen"])
        world.run()
        assert world.finish_reasons("r") == [FinishReason.LENGTH]


class TestSteps:
    def test_a_long_prompt_never_delays_a_decode(self) -> None:
        world = World(num_blocks=100, max_num_batched_tokens=16, max_model_len=256)
        world.add(make_request("stream", max_tokens=30))
        world.step()
        world.add(make_request("long", [9] * 200))
        world.step(20)

        chunks = [(step["stream"], step.get("long", 0)) for step in world.runner.num_tokens[1:21]]
        assert all(stream == 1 and 1 + chunk <= 16 for stream, chunk in chunks)
        assert [chunk for _, chunk in chunks[:14]] == [15] * 13 + [5]

    def test_budgets_are_kept(self) -> None:
        world = World(num_blocks=200, max_num_seqs=3, max_num_batched_tokens=10)
        world.add(*(make_request(f"r{i}", [i, *range(6)]) for i in range(10)))
        world.run()
        assert max(sum(step.values()) for step in world.runner.num_tokens) == 10
        assert max(len(step) for step in world.runner.num_tokens) == 3

    def test_fewer_tokens_than_seats_bound_who_runs(self) -> None:
        world = World(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=3)
        world.add(*(make_request(f"r{i}", [i, *range(6)], max_tokens=4) for i in range(6)))
        world.run()
        assert max(sum(step.values()) for step in world.runner.num_tokens) == 3
        assert all(world.finish_reasons(f"r{i}") == [FinishReason.LENGTH] for i in range(6))

    def test_blocks_to_zero_wait_for_a_step_that_is_executed(self) -> None:
        world = World(num_blocks=4, block_size=4)
        world.runner.non_finite = {"bad": 0}
        world.add(make_request("bad", [1] * 16, max_tokens=1))
        world.run()
        holder = create_request(prompt=[3] * 8)
        kv_cache = world.core.scheduler.kv_cache
        kv_cache.admit(holder, [])
        assert world.core.scheduler.schedule() == SchedulerOutput()
        taken = holder.block_ids
        world.add(make_request("good", [2] * 8, max_tokens=1))
        output = world.core.scheduler.schedule()
        assert set(output.blocks_to_zero) == {*taken, *output.scheduled[0].request.block_ids}

    def test_without_work_nothing_is_executed(self) -> None:
        world = World()
        world.step()
        assert world.runner.steps == []
        assert world.core.is_stalled

    def test_seeds_left_open_differ(self) -> None:
        world = World()
        world.add(*(make_request(f"r{i}", seed=None, max_tokens=8) for i in range(3)))
        world.run()
        assert len({tuple(world.tokens(f"r{i}")) for i in range(3)}) == 3

    def test_totals_count_every_token_once(self) -> None:
        world = World(block_size=4)
        world.add(make_request("r1", 9))
        world.run()
        world.add(make_request("r2", 9))
        world.run()
        stats = world.core.stats()
        assert (stats.total_prompt_tokens, stats.total_cached_tokens, stats.total_output_tokens) == (18, 8, 8)
