"""Statistics: batches count once, maxima keep NaN, one flat tensor per reduction and group."""

from __future__ import annotations

import torch

from hf_ptq.quantization.statistics import Statistics, StatisticSpec

CPU = torch.device("cpu")
SPECS = [
    StatisticSpec("a", 1, "max"), StatisticSpec("b", 3, "max"), StatisticSpec("n", 1, "sum"),
    StatisticSpec("experts", 2, "max", "expert"),
]  # fmt: skip


def test_a_discarded_batch_leaves_no_trace() -> None:
    statistics = Statistics(SPECS, CPU)
    statistics.pending("b")[:] = torch.tensor([1.0, 2.0, 3.0])
    statistics.pending("n")[0] += 2
    statistics.commit()
    statistics.pending("b")[0] = 9
    statistics.pending("n")[0] += 5
    statistics.discard()
    statistics.pending("b")[1] = 7
    statistics.pending("n")[0] += 1
    statistics.commit()
    assert statistics.total("b").tolist() == [1, 7, 3]
    assert statistics.total("n").tolist() == [3]
    assert statistics.total("a").tolist() == [0]


def test_nan_survives_a_maximum() -> None:
    statistics = Statistics(SPECS, CPU)
    statistics.pending("a")[0] = float("nan")
    statistics.commit()
    statistics.pending("a")[0] = 5
    statistics.commit()
    assert statistics.total("a").isnan().all()


def test_reduction_is_one_call_per_kind() -> None:
    statistics = Statistics(SPECS, CPU)
    calls = []

    def reducer(flat: torch.Tensor, reduction: str, group: str) -> None:
        calls.append((reduction, group, flat.numel()))
        flat += 1

    statistics.reduce(reducer)
    assert sorted(calls) == [("max", "data", 4), ("max", "expert", 2), ("sum", "data", 1)]
    assert statistics.total("experts").tolist() == [1, 1]


def test_sums_stay_exact() -> None:
    """fp32 loses a count of one beside 2^24; a batch's own values are fp32."""
    statistics = Statistics(SPECS, CPU)
    statistics.pending("n")[0] = 2.0**24
    statistics.commit()
    for _ in range(3):
        statistics.pending("n")[0] = 1
        statistics.commit()
    assert statistics.total("n").tolist() == [2**24 + 3]
    assert {key: statistics.total(key).dtype for key in ("n", "a", "experts")} == {
        "n": torch.float64, "a": torch.float32, "experts": torch.float32,
    }  # fmt: skip
    assert statistics.pending("n").dtype == torch.float32
