"""Which cases of dear tests are run each time, and which are left to `python -m pytest -m slow`.

Owns one table: of the tests named here every nth case runs, in the order of collection; the others are marked slow. These are the
tests whose many cases meet the same code again (kernels in the emulator and the interpreter, launches compiled offline) and took
most of the time. What several releases of Triton or transformers run is divided between them: of the tests in `LATER` each
release runs other cases.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

EVERY = {
    "test_hopper.py::test_forward_and_backward_stay_within_budget": 9,
    "test_hopper.py::test_the_backward_of_fixed_order_stays_within_budget": 8,
    "test_hopper.py::test_masks_of_several_terms_stay_within_budget": 7,
    "test_hopper.py::test_no_order_of_events_changes_what_is_computed": 2,
    "test_hopper_backward.py::test_backward_stays_within_budget": 3,
    "test_hopper_backward.py::test_gradients_in_the_dtype_of_the_inputs_are_the_rounded_ones": 2,
    "test_hopper_fused_backward.py::test_contributions_are_the_bits_of_visits_one_by_one": 5,
    "test_hopper_fused_backward.py::test_wide_contributions_are_the_bits_of_visits_one_by_one": 3,
    "test_hopper_fused_backward.py::test_gradients_come_home_and_stay_within_budget": 8,
    "test_hopper_fused_backward.py::test_gradients_of_several_terms_stay_within_budget": 8,
    "test_hopper_fused_backward.py::test_outputs_of_several_terms_stay_within_budget": 3,
    "test_hopper_fused_backward.py::test_delta_is_made_as_it_would_be_given": 3,
    "test_hopper_fused_backward.py::test_gradients_in_fixed_order_stay_within_budget": 5,
    "test_hopper_fused_backward.py::test_no_order_of_events_changes_what_is_computed": 3,
    "test_hopper_fused_backward.py::test_what_never_comes_makes_results_nan_and_sets_the_error_word": 4,
    "test_hopper_dq_and_wide.py::test_rows_and_wide_keys_stay_within_budget": 8,
    "test_hopper_dq_and_wide.py::test_switches_and_float16_stay_within_budget": 3,
    "test_hopper_fused.py::test_all_visits_in_one_launch_are_attention": 3,
    "test_hopper_fused.py::test_no_switch_needs_rows_before_their_flag": 2,
    "test_hopper_fused.py::test_rows_that_never_come_leave_no_number_behind": 8,
    "test_hopper_fused.py::test_no_moment_of_arrival_changes_a_bit": 6,
    "test_hopper_forward.py::test_any_number_of_consumers_computes_the_same_attention": 5,
    "test_hopper_forward.py::test_packing_heads_computes_the_same_attention": 3,
    "test_hopper_forward.py::test_splitting_tiles_computes_the_same_attention": 4,
    "test_hopper_forward.py::test_no_switch_changes_what_is_computed": 3,
    "test_hopper_forward.py::test_all_switches_together_compute_the_same_attention": 12,
    "test_hopper_forward.py::test_a_carry_has_the_same_bits_on_every_way_through_memory": 6,
    "test_hopper_forward.py::test_what_is_not_finite_stays_with_its_request": 2,
    "test_portable.py::test_forward_and_backward_stay_within_budget": 5,
    "test_portable.py::test_masks_of_several_terms_stay_within_budget": 3,
    "test_portable.py::test_half_precision_stays_within_budget": 3,
    "test_portable.py::test_bulk_loads_stay_within_budget_at_any_offset": 3,
    "test_portable.py::test_what_is_not_finite_stays_with_its_request": 3,
    "test_decode_interpreted.py::test_the_kernel_stays_within_budget": 4,
    "test_decode_interpreted.py::test_shares_are_finer_where_the_last_round_would_be_long": 3,
    "test_one_shot_interpreted.py::test_sums_and_columns_are_those_of_all_ranks_whatever_divides_them": 2,
    "test_decode_interpreted.py::test_what_is_not_finite_stays_with_its_request": 3,
    "test_softmax_interpreted.py::test_kernels_are_inside_the_budget_forward_and_backward": 3,
    "test_hopper_compile.py::test_every_launch_fits_and_keeps_its_loops_in_registers": 16,
    "test_hopper_compile.py::test_keeping_pace_costs_the_loops_nothing": 3,
    "test_hopper_compile.py::test_waiting_for_rows_costs_the_loops_nothing": 4,
    "test_portable_compile.py::test_plain_kernels_fit_and_do_not_spill_in_their_loops": 3,
    "test_decode_kernel_compile.py::test_pages_stream_past_registers_and_programs_fit_side_by_side": 4,
    "test_decode_kernel_compile.py::test_sixteen_new_tokens_fit": 2,
    "test_ring_cache.py::test_generation_on_ranks_equals_one_process": 4,
    "test_ring_cache.py::test_batches_padded_on_the_left_generate_the_same_tokens": 2,
    "test_decode_compile.py::test_layers_share_compiled_code_which_runs_in_steps_of_a_cache_only": 2,
    "test_decode_compile.py::test_every_kind_of_model_can_be_compiled": 2,
    "test_ring_cache.py::test_prompts_may_come_in_chunks": 2,
    "test_images.py::test_generation_after_images_equals_one_process": 2,
    "test_refusals.py::test_families_that_cannot_attend_around_the_ring_are_refused_before_they_run": 3,
    "test_context_parallel.py::test_a_loop_makes_the_steps_of_one_process": 2,
    "test_trainer_models.py::test_ten_steps_equal_one_process": 4,
    "test_trainer_models.py::test_options_change_ten_steps_as_on_one_process": 2,
    "test_trl.py::test_ten_steps_equal_one_process": 5,
    "test_trl.py::test_options_change_ten_steps_as_on_one_process": 2,
    "test_tensor_parallel.py::test_compiled_layers_share_the_code_of_their_shards": 2,
    "test_tensor_parallel.py::test_generation_with_tensor_parallelism_equals_one_process": 2,
    "test_trl.py::test_the_example_learns_on_two_ranks_what_one_process_learns": 2,
    "test_context_parallel.py::test_the_example_learns_on_two_ranks_what_one_process_learns": 2,
}

LATER = {
    "triton 3.6": {
        "test_hopper_compile.py::test_every_launch_fits_and_keeps_its_loops_in_registers": 5,
        "test_hopper_compile.py::test_keeping_pace_costs_the_loops_nothing": 1,
        "test_hopper_compile.py::test_waiting_for_rows_costs_the_loops_nothing": 3,
    },
    "triton 3.8": {
        "test_hopper_compile.py::test_every_launch_fits_and_keeps_its_loops_in_registers": 10,
        "test_hopper_compile.py::test_keeping_pace_costs_the_loops_nothing": 2,
        "test_hopper_compile.py::test_waiting_for_rows_costs_the_loops_nothing": 1,
    },
    "transformers 4.57": {
        "test_ring_cache.py::test_generation_on_ranks_equals_one_process": 2,
        "test_ring_cache.py::test_batches_padded_on_the_left_generate_the_same_tokens": 1,
        "test_decode_compile.py::test_layers_share_compiled_code_which_runs_in_steps_of_a_cache_only": 1,
        "test_decode_compile.py::test_every_kind_of_model_can_be_compiled": 1,
        "test_ring_cache.py::test_prompts_may_come_in_chunks": 1,
        "test_images.py::test_generation_after_images_equals_one_process": 1,
        "test_context_parallel.py::test_a_loop_makes_the_steps_of_one_process": 1,
        "test_trainer_models.py::test_ten_steps_equal_one_process": 2,
        "test_trainer_models.py::test_options_change_ten_steps_as_on_one_process": 1,
        "test_trl.py::test_ten_steps_equal_one_process": 1,
        "test_trl.py::test_options_change_ten_steps_as_on_one_process": 1,
        "test_tensor_parallel.py::test_compiled_layers_share_the_code_of_their_shards": 1,
        "test_tensor_parallel.py::test_generation_with_tensor_parallelism_equals_one_process": 1,
        "test_trl.py::test_the_example_learns_on_two_ranks_what_one_process_learns": 1,
        "test_context_parallel.py::test_the_example_learns_on_two_ranks_what_one_process_learns": 1,
    },
}
"""With these releases the first case that runs is this one."""


def thin(items: list[pytest.Item]) -> None:
    """Marks slow what the table leaves out.

    Args:
        items: All that was collected.
    """
    # nothing of `LATER` is collected without it
    first: dict[str, int] = {}
    for package in ("triton", "transformers"):
        release = getattr(sys.modules.get(package), "__version__", "").rpartition(".")[0]
        first |= LATER.get(f"{package} {release}", {})
    seen: Counter[str] = Counter()
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        every = EVERY.get(name)
        if every is not None:
            if seen[name] % every != first.get(name, 0):
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
