"""Tests of workloads by name and by file, of their windows, and of sessions in a trace without session names."""

import json
import pickle

import pytest

from dualmap_sim.workloads.catalog import WORKLOADS, UnknownWorkload, Workload
from dualmap_sim.workloads.mooncake import TraceError
from dualmap_sim.workloads.sessions import label_sessions
from dualmap_sim.workloads.statistics import fact_lines
from dualmap_sim.workloads.trace import Trace, TraceRequest


@pytest.fixture
def recorded(tmp_path):
    """Five requests: a conversation of three turns, a conversation of one turn, and a fork of the first one."""
    prompts = [(1, 2), (1, 9), (1, 2, 3), (1, 2, 4), (1, 2, 3, 5)]
    path = tmp_path / "recorded.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": n, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids}) + "\n"
            for n, ids in enumerate(prompts)
        )
    )
    return path


@pytest.mark.parametrize("name", WORKLOADS)
class TestGenerated:
    def test_workload_loads_equal_requests_for_equal_seeds(self, name):
        workload = Workload(name=name, requests=40)

        assert len(workload.load().requests) == 40
        assert workload.load() == workload.load()
        assert workload.load() != Workload(name=name, requests=40, seed=1).load()

    def test_workload_window_drops_earlier_requests(self, name):
        assert (
            Workload(name=name, requests=30, start=10).load().requests
            == (Workload(name=name, requests=40).load().requests[10:])
        )

    def test_workload_can_be_pickled(self, name):
        workload = Workload(name=name, requests=40)

        assert pickle.loads(pickle.dumps(workload)) == workload
        assert {workload: 1}[Workload(name=name, requests=40)] == 1


def test_workload_facts_show_requested_and_actual_values(recorded):
    generated = Workload(name="tool_agent", requests=40)
    recorded_one = Workload(name="tool_agent", trace=recorded, requests=5)

    lines = fact_lines(generated.facts(generated.load()))
    assert lines[0].split() == ["asked", "produced"]
    assert lines[1].startswith("input tokens, mean ")
    assert lines[1].split()[-2] == "8,596"
    assert {len(line) for line in lines} == {len(lines[0])}
    assert [fact.asked for fact in recorded_one.facts(recorded_one.load())] == [None] * 6


def test_unknown_workload_is_rejected_with_accepted_names():
    with pytest.raises(UnknownWorkload, match=r"'nosuch' is not accepted; give one of default, .*"):
        Workload(name="nosuch").load()


def test_recorded_trace_is_read_in_its_window_with_sessions(recorded):
    trace = Workload(trace=recorded, start=1, requests=3).load()

    assert trace.name == "recorded.jsonl"
    assert [(r.blocks, r.session, r.turn) for r in trace.requests] == [
        ((1, 9), 0, 0),
        ((1, 2, 3), 1, 0),
        ((1, 2, 4), 2, 0),
    ]


def test_unreadable_recorded_trace_is_rejected(tmp_path):
    with pytest.raises(TraceError, match="readable file"):
        Workload(trace=tmp_path / "missing").load()


class TestLabelSessions:
    def labelled(self, *prompts: tuple[tuple[int, ...], int]) -> list[tuple[int | None, int]]:
        requests = tuple(
            TraceRequest(arrival_s=0.0, blocks=blocks, input_tokens=tokens, output_tokens=1)
            for blocks, tokens in prompts
        )
        return [
            (r.session, r.turn) for r in label_sessions(Trace(name="t", block_tokens=100, requests=requests)).requests
        ]

    def test_prompt_extending_last_prompt_of_session_is_its_next_turn(self):
        assert self.labelled(((1, 2), 200), ((1, 9), 200), ((1, 2, 3), 300), ((1, 2, 3, 4), 400)) == [
            (0, 0),
            (1, 0),
            (0, 1),
            (0, 2),
        ]

    def test_first_of_two_continuing_prompts_gets_the_session(self):
        assert self.labelled(((1, 2), 200), ((1, 2, 3), 300), ((1, 2, 4), 300)) == [(0, 0), (0, 1), (2, 0)]

    def test_common_system_prompt_continues_no_session(self):
        assert self.labelled(((1,), 100), ((1, 2), 200), ((1,), 120), ((1, 3), 250), ((1, 3, 4), 350)) == [
            (0, 0),
            (0, 1),
            (2, 0),
            (3, 0),
            (3, 1),
        ], "only the first could take it for a conversation's"

    def test_partial_block_does_not_end_a_prompt(self):
        assert self.labelled(((1, 2), 150), ((1, 2, 3), 300)) == [(0, 0), (0, 1)], "known by its first block"
        assert self.labelled(((2,), 50), ((2, 3), 150)) == [(0, 0), (1, 0)], "too short to be known"
