"""Intervals and tests against scipy and against slow references."""

import itertools
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from pelocality._checks import check_confidence
from pelocality.statistics import (
    Estimate,
    mean_over_groups,
    mean_over_runs,
    proportion,
    proportion_over_groups,
    sign_flip,
    t_interval,
    wilson,
    wilson_over_groups,
)


@given(st.integers(1, 400), st.data())
def test_wilsons_interval_agrees_with_scipy(n, data):
    k = data.draw(st.integers(0, n))
    confidence = data.draw(st.sampled_from([0.8, 0.95, 0.99]))
    expected = stats.binomtest(k, n).proportion_ci(confidence, method="wilson")
    assert np.allclose(wilson(k, n, confidence), expected, atol=1e-12)
    assert np.allclose(wilson(k, n, np.float32(confidence)), expected, atol=1e-6)


def test_wilsons_interval_is_elementwise_and_nan_for_no_trials():
    low, high = wilson([1, 5, 0], [10, 10, 0])
    assert np.allclose([low[:2], high[:2]], np.transpose([wilson(1, 10), wilson(5, 10)]))
    assert np.isnan(low[2])
    assert np.isnan(proportion(0, 0).value)


@given(st.lists(st.floats(-9, 9), min_size=2, max_size=9, unique=True), st.sampled_from([0.8, 0.95]))
def test_the_interval_over_runs_agrees_with_scipys_t_test(values, confidence):
    found = mean_over_runs(values, confidence)
    expected = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_the_t_interval_is_elementwise_over_the_first_axis():
    values = np.random.default_rng(0).normal(size=(5, 2, 3))
    low, high = t_interval(values, 0.9)
    expected = stats.ttest_1samp(values, 0, axis=0).confidence_interval(0.9)
    np.testing.assert_allclose([low, high], [expected.low, expected.high])
    for of_array, of_tensor in zip((low, high), t_interval(torch.from_numpy(values), 0.9), strict=True):
        np.testing.assert_array_equal(of_tensor, of_array)
        assert isinstance(of_tensor, np.ndarray)
    assert np.isnan(t_interval(values[:1])).all()
    assert t_interval(values[:1])[0].shape == (2, 3)


def test_a_single_run_has_no_interval():
    found = mean_over_runs([0.7])
    assert found.value == 0.7
    assert np.isnan([found.low, found.high]).all()


def test_one_group_of_several_rows_has_no_interval_and_no_rows_have_no_mean():
    for values in ([1.0, 0.0], [0.5, 0.0]):
        assert np.isnan(mean_over_groups(values, ["a", "a"]).low)
    assert np.isnan(mean_over_groups([0.5], ["a"]).low)
    assert np.isnan(mean_over_groups([], []).value)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_a_proportion_over_groups_of_one_row_is_wilsons(rows):
    found = proportion_over_groups(rows, range(len(rows)))
    assert (found.low, found.high) == pytest.approx(wilson(sum(rows), len(rows)))


@pytest.mark.parametrize("each", [2, 5])
@pytest.mark.parametrize("right", [0, 7, 30, 60])
def test_copies_of_rows_say_no_more_than_the_rows(right, each):
    rows = np.arange(60) < right
    copies = proportion_over_groups(np.repeat(rows, each), np.repeat(np.arange(60), each))
    once = proportion(right, 60)
    assert copies.value == once.value
    assert (copies.low, copies.high) == pytest.approx((once.low, once.high), abs=0.004)  # quantiles of 59 groups
    assert copies.high - copies.low > once.high - once.low


def test_one_group_of_several_rows_has_no_interval_of_its_proportion():
    found = proportion_over_groups([True, False], ["a", "a"])
    assert found.value == 0.5
    assert np.isnan([found.low, found.high]).all()
    assert np.isnan(proportion_over_groups([], []).value)


def test_intervals_of_many_proportions_over_groups_are_those_of_each():
    rng = np.random.default_rng(0)
    groups, rows = np.sort(rng.integers(0, 12, 50)), rng.random((50, 3)) < [0.1, 0.5, 1]
    sums = np.array([rows[groups == group].sum(0) for group in np.unique(groups)])
    found = wilson_over_groups(sums, np.unique(groups, return_counts=True)[1])
    one_by_one = [proportion_over_groups(column, groups) for column in rows.T]
    assert np.array(found) == pytest.approx(np.array([[each.low, each.high] for each in one_by_one]).T)


@pytest.mark.parametrize("groups", [12, 60])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_intervals_over_groups_contain_the_share_as_often_as_they_say(share, groups):
    rng, held = np.random.default_rng(0), 0
    index = np.repeat(np.arange(groups), 5)
    for _ in range(300):
        whole = rng.random(groups)[index] < share  # half of the rows are copies of the first one of their group
        rows = np.where(rng.random(len(index)) < 0.5, whole, rng.random(len(index)) < share)
        found = proportion_over_groups(rows, index)
        held += found.low <= share <= found.high
    assert 0.91 < held / 300 < 0.99


def test_no_runs_have_no_mean():
    found = mean_over_runs([])
    assert np.isnan([found.value, found.low, found.high]).all()


def test_invalid_arguments_are_refused():
    for interval in (lambda: wilson(1, 2, 95), lambda: mean_over_runs([1, 2], 95), lambda: t_interval([1, 2], 95)):
        with pytest.raises(ValueError, match="confidence must be between 0 and 1"):
            interval()
    for successes in (-1, 3):
        with pytest.raises(ValueError, match="successes must be between 0 and trials"):
            wilson(successes, 2)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1"):
        check_confidence(95)
    with pytest.raises(ValueError, match=r"values must be between least=-1\.0 and most=1\.0, got nan to nan"):
        mean_over_groups([0.0, np.nan], ["a", "b"])
    with pytest.raises(ValueError, match=r"values must be between least=-1\.0 and most=1\.0, got 0 to 2"):
        mean_over_groups([2, 0], ["a", "b"])


def test_the_interval_over_few_groups_ends_where_values_do():
    found = mean_over_groups([5, 4, 0], ["a", "b", "c"], least=0, most=5)
    assert (found.low, found.high) == (0, 5)


@pytest.mark.parametrize("n", [1, 2, 5, 20])
@pytest.mark.parametrize(("least", "most"), [(0, 1), (-1, 1), (0, 100), (0.1, 0.7)])
def test_the_interval_of_binary_outcomes_is_exact_and_contains_the_mean_as_often_as_it_says(least, most, n):
    found = [mean_over_groups([most] * k + [least] * (n - k), range(n), least=least, most=most) for k in range(n + 1)]
    exact = [stats.binomtest(k, n).proportion_ci(0.95, method="exact") for k in range(n + 1)]
    ends = np.array([(each.low, each.high) for each in found])
    np.testing.assert_allclose(ends, least + (most - least) * np.array(exact), atol=1e-9)
    for p in np.linspace(0.01, 0.99, 25):
        inside = (ends[:, 0] <= least + (most - least) * p) & (least + (most - least) * p <= ends[:, 1])
        assert stats.binom.pmf(np.arange(n + 1), n, p)[inside].sum() >= 0.95


@pytest.mark.parametrize(("values", "shares"), [((0, 0.5, 1), (0, 0.1, 0.9)), ((0, 1, 4), (0.9, 0.1, 0))])
def test_the_interval_of_few_rows_contains_the_mean_where_most_rows_are_equal(values, shares):
    rng, mean, held = np.random.default_rng(0), np.dot(values, shares), 0
    for _ in range(300):
        found = mean_over_groups(rng.choice(values, 5, p=shares), range(5), least=0, most=max(values))
        held += found.low <= mean <= found.high
    assert held / 300 > 0.94


@settings(deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_the_sign_flip_test_counts_all_signs_of_the_groups(sums):
    signs = np.array(list(itertools.product((-1, 1), repeat=len(sums))))
    all_sums = signs @ np.abs(sums)
    assert sign_flip(np.transpose([sums]))[0] == pytest.approx((all_sums >= sum(sums)).mean())
    assert sign_flip(np.transpose([sums]), True)[0] == pytest.approx((abs(all_sums) >= abs(sum(sums))).mean())


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_sign_flip_test_of_groups_of_one_is_mcnemars(lost, gained):
    sums = np.array([-1] * lost + [1] * gained + [0])[:, None]
    mcnemar = stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1
    assert sign_flip(sums, two_sided=True)[0] == pytest.approx(mcnemar, rel=1e-6, abs=1e-12)
    assert sign_flip(sums)[0] == pytest.approx(stats.binom.sf(gained - 1, lost + gained, 0.5), rel=1e-6, abs=1e-12)


def test_the_sign_flip_test_stays_in_its_range_for_large_sums():
    rng = np.random.default_rng(0)
    sums = rng.integers(0, 15, (3000, 2)) * [1, -1]
    assert (sign_flip(sums) == [0.5 ** np.count_nonzero(sums[:, 0]), 1]).all() or sign_flip(sums)[0] < 1e-15
    assert sign_flip(sums)[1] == pytest.approx(1)


@pytest.mark.parametrize(("lost", "gained"), [(10, 90), (100, 900), (4000, 6000), (2, 1000), (0, 60), (0, 1000)])
@pytest.mark.parametrize("size", [1, 3])
def test_the_smallest_p_values_of_the_sign_flip_test_are_exact(lost, gained, size):
    sums = np.array([-size] * lost + [size] * gained)[:, None]
    wanted = stats.binom.sf(gained - 1, lost + gained, 0.5)
    assert wanted < 1e-15
    assert sign_flip(sums)[0] == pytest.approx(wanted, rel=1e-9, abs=0)
    assert sign_flip(sums, two_sided=True)[0] == pytest.approx(2 * wanted, rel=1e-9, abs=0)
    assert sign_flip(-sums)[0] == 1
    assert sign_flip(np.repeat(sums, 100, 0))[0] > 0  # below every number of float64


def test_the_sign_flip_test_of_sums_of_several_sizes_is_exact_at_the_far_end():
    sums = np.random.default_rng(0).integers(-1, 9, 120)
    chances = {0: Fraction(1)}
    for each in abs(sums).tolist():
        moved = Counter()
        for total, chance in chances.items():
            moved[total + each] += chance / 2
            moved[total - each] += chance / 2
        chances = moved
    wanted = float(sum(chance for total, chance in chances.items() if total >= sums.sum()))
    assert wanted < 1e-15
    assert sign_flip(sums[:, None])[0] == pytest.approx(wanted, rel=1e-9, abs=0)


def test_groups_are_told_apart_by_their_names():
    values = [1, 1, 0, 0, -1, -1]
    expected = mean_over_groups(values, ["a", "a", "b", "b", "c", "c"])
    for names in ([1, 1, "1", "1", 2, 2], [("a", 1), ("a", 1), ("a", 2), ("a", 2), ("b", 1), ("b", 1)],
                  [None, None, "b", "b", 3.5, 3.5], np.repeat([0, 1, 2], 2), pd.Series(list("xxyyzz")),
                  [("a", 1), ("a", 1), ("a", "b"), ("a", "b"), (1,), (1,)], [1, 1, "1", "1", (1,), (1,)]):  # fmt: skip
        assert mean_over_groups(values, names) == expected


def test_groups_named_by_tensors_and_arrays_are_those_of_their_numbers():
    rows, numbers = [1] * 20 + [0] * 20 + [1] * 20 + [0] * 20 + [1] * 20, [i // 20 for i in range(100)]
    expected = proportion_over_groups(rows, numbers)
    for names in (torch.tensor(numbers), torch.tensor(numbers, dtype=torch.bfloat16), torch.tensor(numbers)[:, None],
                  [torch.tensor(number) for number in numbers], [np.array(number) for number in numbers],
                  [("a", torch.tensor(number)) for number in numbers], list(np.array(numbers))):  # fmt: skip
        assert proportion_over_groups(rows, names) == expected
    assert mean_over_groups(rows, torch.tensor(numbers) > 1) == mean_over_groups(rows, [n > 1 for n in numbers])


def test_values_may_be_a_list_of_tensors():
    tensors = [torch.tensor(0.5, requires_grad=True), torch.tensor(0.75, dtype=torch.bfloat16), torch.tensor(1)]
    assert mean_over_runs(tensors) == mean_over_runs([0.5, 0.75, 1.0])
    assert mean_over_runs(torch.tensor([0.5j, 0.75j, 1j]).imag) == mean_over_runs([0.5, 0.75, 1.0])
    assert mean_over_runs(torch.tensor([0.5j, 0.75j, 1j]).conj().imag) == mean_over_runs([-0.5, -0.75, -1.0])


@pytest.mark.parametrize("names", [
    [None, None, float("nan"), float("nan"), "c", "c"],
    [None, None, np.nan, float("nan"), "None", "None"],
    [pd.NaT, pd.NaT, None, None, pd.NA, pd.NA],
    [np.nan, np.nan, "nan", "nan", None, None],
    np.repeat([np.nan, 1.0, 2.0], 2),
])  # fmt: skip
def test_missing_names_of_several_kinds_are_several_groups(names):
    rows = [1, 1, 0, 0, 0, 0] * 2
    expected = proportion_over_groups(rows, list("aabbcc") * 2)
    assert proportion_over_groups(rows, [*names] * 2) == expected
    mean = mean_over_groups(rows, list("aabbcc") * 2)
    assert mean_over_groups(rows, [*names] * 2) == mean


MISREAD = {
    ValueError: [
        ("whole numbers", lambda: sign_flip([[0.5]] * 5)),
        ("whole numbers", lambda: sign_flip([[np.nan]] * 5)),
        ("differences", lambda: sign_flip([1, 1, 1])),
        ("successes", lambda: proportion_over_groups([0.5, 1], "ab")),
        ("successes", lambda: wilson_over_groups([1], [1, 1])),
        ("successes", lambda: wilson_over_groups([1, 3], [1, 2])),
        ("trials", lambda: wilson_over_groups([0, 1], [0, 1])),
        ("shapes", lambda: wilson([1, 2], [3, 4, 5])),
    ],
    TypeError: [
        ("two_sided", lambda: sign_flip([[1]], two_sided="no")),
        ("differences", lambda: sign_flip([["a"]])),
        ("least", lambda: mean_over_groups([1, 0], "ab", least="a")),
        ("values", lambda: mean_over_runs(["0.1", "0.3"])),
        ("values", lambda: mean_over_runs([0.1, None, "0.3"])),
        ("values", lambda: mean_over_runs(pd.to_datetime(["2020", "2021"]))),
        ("values", lambda: mean_over_runs(torch.tensor([1 + 1j, 2]))),
        ("trials", lambda: wilson_over_groups([1], ["2"])),
        ("successes", lambda: proportion(np.array([1, 2]), 3)),
    ],
}


@pytest.mark.parametrize("error", MISREAD)
def test_input_that_would_be_misread_is_refused(error):
    for name, call in MISREAD[error]:
        with pytest.raises(error, match=name):
            call()


def test_numbers_may_be_objects():
    values = [Decimal("0.25"), Fraction(1, 2), 0.75]
    for each in (values, pd.Series(values), pd.Series([0.25, 0.5, 0.75], dtype="Float64")):
        assert mean_over_runs(each) == mean_over_runs([0.25, 0.5, 0.75])


def test_a_format_is_that_of_the_number_and_of_both_ends():
    found = Estimate(0.25, -0.5, 1)
    assert (f"{found}", f"{found:.1f}", f"{found:+.0%}") == (str(found), "0.2 [-0.5, 1.0]", "+25% [-50%, +100%]")
    for form in (">24", "24", "*^24"):
        assert f"{found:{form}}" == f"{found!s:{form}}"
    assert f"{found:>+24.1f}" == f"{'+0.2 [-0.5, +1.0]':>24}"
    assert round(found, 1) == Estimate(0.2, -0.5, 1.0)


def test_masked_entries_are_refused():
    hidden, shown = np.ma.masked_array([1, 0, 1], [False, False, True]), np.ma.masked_array([1, 1, 1])
    for name, call in (
        ("values", t_interval),
        ("groups", lambda masked: mean_over_groups([0, 0, 1], masked)),
        ("values", lambda masked: t_interval([[masked], [masked]])),
        ("differences", lambda masked: sign_flip(masked[:, None])),
    ):
        with pytest.raises(TypeError, match=name):
            call(hidden)
        call(shown)


def test_whole_numbers_may_be_floats_and_tensors():
    assert sign_flip([[1.0], [3.0]]) == sign_flip([[1], [3]])
    for dtype in (torch.int64, torch.bfloat16):
        assert sign_flip(torch.tensor([[1], [3]], dtype=dtype)) == sign_flip([[1], [3]])
    assert sign_flip(torch.tensor([[1.0], [3.0]], requires_grad=True)) == sign_flip([[1], [3]])


def test_other_values_than_differences_of_proportions_get_the_t_interval_of_the_jackknife():
    rng = np.random.default_rng(0)
    sizes = np.array([1, 4, 2, 9, 3, 3, 5, 1])
    groups = np.repeat(np.arange(8), sizes)
    values = rng.choice([-1.0, 0, 0.5], len(groups))
    found = mean_over_groups(values, groups, 0.9)
    without = [values[groups != g].mean() for g in range(8)]
    error = np.sqrt(7 / 8 * np.square(without - values.mean()).sum())
    degrees = 28**2 / (sizes**2).sum() - 1
    assert (found.low, found.high) == pytest.approx(values.mean() + stats.t.ppf([0.05, 0.95], degrees) * error)


@pytest.mark.parametrize("groups", [7, 30])
def test_groups_of_equal_sizes_get_the_t_interval_of_their_means(groups):
    values = np.random.default_rng(1).uniform(-0.5, 0.5, (groups, 3))
    found = mean_over_groups(values.ravel(), np.repeat(np.arange(groups), 3))
    assert (found.low, found.high) == pytest.approx(np.array(t_interval(values.mean(1))))


def test_the_interval_of_a_difference_of_paired_proportions_is_that_of_bonett_and_price():
    # the airway study of Bentur et al. (2009), 1 and 7 of 21 pairs changed: Fagerland, Lydersen and Laake (2014)
    found = mean_over_groups([1] + [-1] * 7 + [0] * 13, range(21))
    assert (found.value, found.low, found.high) == pytest.approx((-6 / 21, -0.508, -0.013), abs=5e-4)


@pytest.mark.parametrize("rows", [1, 3, 20, 100])
def test_an_interval_has_a_width_where_no_row_changed(rows):
    found = mean_over_groups([0] * rows, range(rows))
    assert found.value == 0
    assert found.high == -found.low == pytest.approx(stats.norm.ppf(0.975) * np.sqrt(2) / (rows + 2))


@pytest.mark.parametrize("confidence", [0.5, 0.95])
@pytest.mark.parametrize("value", [-1, 1])
def test_the_interval_of_rows_that_all_changed_alike_contains_them(value, confidence):
    found = mean_over_groups([value] * 30, range(30), confidence)
    assert found.low <= value <= found.high
    assert -1 <= found.low < found.high <= 1


def slow_effective_rows(values, groups, confidence):
    """Return the effective number of rows by the equation of `wilson_over_groups`, in loops."""
    total, names = len(values), sorted(set(groups))
    mean = sum(values) / total
    sizes = [groups.count(name) for name in names]
    variance, informative = 0.0, 0
    usual = Counter(values).most_common(1)[0][0]
    for name in names:
        others = [value for value, group in zip(values, groups, strict=True) if group != name]
        variance += (len(names) - 1) / len(names) * (sum(others) / len(others) - mean) ** 2
        informative += any(v != usual for v, group in zip(values, groups, strict=True) if group == name)
    alone = sum(value**2 for value in values) / total - mean**2
    effective = total**2 / sum(size**2 for size in sizes)
    of_rows, of_groups = (stats.t.ppf(0.5 + confidence / 2, max(n - 1, 1)) for n in (total, effective))
    relative = (informative * (variance / alone if informative else 0) + 1 / effective) / (informative + 1)
    return min(total, (of_rows / of_groups) ** 2 / relative)


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_a_group_count_as_their_effective_number(seed):
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 9, 50).tolist()
    changes = rng.choice([-1, 0, 1], 50, p=[[0.05, 0.9, 0.05], [0.6, 0.3, 0.1], [0, 0.1, 0.9]][seed % 3]).tolist()
    n = slow_effective_rows(changes, groups, 0.9)
    gained, lost = ((n * changes.count(value) / 50 + 1) / (n + 2) for value in (1, -1))
    half = stats.norm.ppf(0.95) * np.sqrt((gained + lost - (gained - lost) ** 2) / (n + 2))
    found = mean_over_groups(changes, groups, 0.9)
    assert (found.low, found.high) == pytest.approx((gained - lost - half, min(1, gained - lost + half)))
    right = [value == 1 for value in changes]
    n = slow_effective_rows(right, groups, 0.9)
    found, k = proportion_over_groups(right, groups, 0.9), n * np.mean(right)
    assert (found.low, found.high) == pytest.approx(wilson(k, n, 0.9))
    found = mean_over_groups(right, groups, 0.9, least=0)
    ends = stats.beta.ppf(0.05, k, n - k + 1), stats.beta.ppf(0.95, k + 1, n - k)
    assert (found.low, found.high) == pytest.approx(np.nan_to_num(ends))


def paired_changes(rng, sizes, rate, alike):
    """Return changes of rows with a mean of 0, of which a share are copies of one change of their group."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    whole, own = (rng.choice([-1, 0, 1], n, p=[rate / 2, 1 - rate, rate / 2]) for n in (len(sizes), len(groups)))
    return np.where(rng.random(len(groups)) < alike, whole[groups], own), groups


@pytest.mark.parametrize("rate", [0.02, 0.3])
@pytest.mark.parametrize(
    ("sizes", "alike"),
    [([1] * 20, 0), ([1] * 100, 0), ([5] * 20, 0.5), ([60 // i for i in range(1, 31)], 0.5), ([40] + [2] * 20, 1)],
)
def test_the_interval_of_a_difference_contains_it_where_changes_are_rare_and_groups_unequal(sizes, alike, rate):
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        found = mean_over_groups(*paired_changes(rng, sizes, rate, alike))
        held += found.low <= 0 <= found.high
    assert held / 300 > 0.92


def test_copies_of_paired_differences_say_no_more_than_the_rows():
    changes = [1] * 3 + [-1] * 9 + [0] * 68
    once = mean_over_groups(changes, range(80))
    copies = mean_over_groups(changes * 10, [*range(80)] * 10)
    assert copies.value == once.value
    assert (copies.low, copies.high) == pytest.approx((once.low, once.high), abs=0.005)
    assert copies.high - copies.low > once.high - once.low
