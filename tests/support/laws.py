"""How well draws fit a law: p-values, by scipy, which is imported with the first of them."""

from typing import Any


def p_of_counts(counts: Any, expected: Any) -> float:
    """Of counts per symbol, where so many are expected."""
    from scipy import stats

    return float(stats.chisquare(counts, expected).pvalue)


def p_of_statistic(statistic: float, freedom: int) -> float:
    """Of a chi-square statistic with that many degrees of freedom."""
    from scipy import stats

    return float(stats.chi2.sf(statistic, freedom))


def p_of_gumbel(draws: Any) -> float:
    """Of draws that should be of the standard Gumbel law."""
    from scipy import stats

    return float(stats.kstest(draws, stats.gumbel_r.cdf).pvalue)
