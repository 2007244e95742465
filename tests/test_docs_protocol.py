"""Figures of the copy-engine protocol are current, and the timeline keeps the rules of the protocol."""

from __future__ import annotations

from itertools import pairwise

from tests.test_docs import DOCS, load


def test_committed_figures_of_the_protocol_are_current() -> None:
    for name, figure in load("protocol_figures").figures().items():
        assert (DOCS / name).read_text() == figure, "run `python docs/protocol_figures.py`"


def test_flags_of_the_timeline_rise_in_the_order_of_head_groups_and_ring_steps() -> None:
    for flags in load("protocol_figures").figure_times().flags:
        assert list(flags) == sorted(flags)
        assert list(flags.values()) == sorted(flags.values())


def test_kernels_of_the_timeline_wait_for_the_flag_of_a_step() -> None:
    times = load("protocol_figures").figure_times()
    for rank, visits in enumerate(times.visits):
        for begin, _, owner, group in visits:
            assert owner == rank or begin >= times.flags[rank][group, (rank - owner) % 4]


def test_owners_of_the_timeline_push_to_a_reader_one_at_a_time() -> None:
    times = load("protocol_figures").figure_times()
    for rank in range(4):
        received = sorted(push[:2] for pushes in times.pushes for push in pushes if push[2] == rank)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(received))
