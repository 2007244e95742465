"""Which cases of dear tests are run each time, and which are left to `python -m pytest -m slow`.

Owns one table: of the tests named here every nth case runs, in the order of collection; the others are marked slow. These are the
tests whose many cases meet the same code again (kernels in the emulator, launches compiled offline) and took most of the time.
"""

from __future__ import annotations

from collections import Counter

import pytest

EVERY = {
    "test_hopper.py::test_forward_and_backward_stay_within_budget": 3,
    "test_hopper.py::test_the_backward_of_fixed_order_stays_within_budget": 3,
    "test_hopper_gathered_backward.py::test_contributions_are_the_bits_of_visits_one_by_one": 3,
    "test_hopper_gathered_backward.py::test_wide_contributions_are_the_bits_of_visits_one_by_one": 2,
    "test_hopper_gathered_backward.py::test_gradients_come_home_and_stay_within_budget": 4,
    "test_hopper_gathered_backward.py::test_gradients_in_fixed_order_stay_within_budget": 3,
    "test_hopper_gathered_backward.py::test_no_order_of_events_changes_what_is_computed": 2,
    "test_hopper_gathered_backward.py::test_what_never_comes_makes_results_nan_and_sets_the_error_word": 4,
    "test_hopper_rows.py::test_rows_and_wide_keys_stay_within_budget": 3,
    "test_hopper_rows.py::test_switches_and_float16_stay_within_budget": 3,
    "test_hopper_gathered.py::test_rows_that_never_come_leave_no_number_behind": 3,
    "test_hopper_gathered.py::test_no_moment_of_arrival_changes_a_bit": 4,
    "test_hopper_forward.py::test_no_switch_changes_what_is_computed": 3,
    "test_hopper_compile.py::test_every_launch_fits_and_keeps_its_loops_in_registers": 4,
    "test_hopper_compile.py::test_waiting_for_rows_costs_the_loops_nothing": 3,
    "test_decode_compile.py::test_pages_stream_past_registers_and_programs_fit_side_by_side": 2,
    "test_decode_compile.py::test_sixteen_new_tokens_fit": 2,
    "test_generate.py::test_ranks_generate_what_one_process_generates": 2,
}


def thin(items: list[pytest.Item]) -> None:
    """Marks slow what the table leaves out.

    Args:
        items: All that was collected.
    """
    seen: Counter[str] = Counter()
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        every = EVERY.get(name)
        if every is not None:
            if seen[name] % every:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
