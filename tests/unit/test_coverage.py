"""What calibration reached: modules without a call are told by kind, in full, once."""

from __future__ import annotations

from hf_ptq.quantization.coverage import kinds_of, never_called
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.quantizer import Quantizer


def quantizers(**names: tuple[str, ...]) -> dict[str, Quantizer]:
    found = {key: Quantizer(key, FORMATS["fp8"]) for key in names}
    for key, quantizer in found.items():
        quantizer.names = names[key]
    return found


def test_kinds_are_names_without_their_numbers() -> None:
    assert kinds_of(["a.0.w1", "a.10.w1", "h2o.1"]) == {"a.*.w1": ["a.0.w1", "a.10.w1"], "h2o.*": ["h2o.1"]}


def test_a_kind_that_was_called_in_part_is_told_module_by_module_and_only_at_the_end() -> None:
    own = quantizers(
        a=("t.0.q_proj", "t.0.k_proj"), b=("t.1.q_proj", "t.1.k_proj"), c=("m.experts.0.w1",), d=("m.experts.1.w1",)
    )
    calls = {"a": 0.0, "b": 0.0, "c": 3.0, "d": 0.0}
    early, late = never_called(calls, own, whole_kinds=True), never_called(calls, own)
    lead = "modules were never called in calibration, so their inputs have no range: t.*.q_proj (2), t.*.k_proj (2)"
    assert [problem.what for problem in early] == [f"4 {lead}"]
    assert [problem.what for problem in late] == [f"5 {lead}, m.experts.1.w1"]
    assert 'pattern: ["t.*.q_proj", "t.*.k_proj", "m.experts.1.w1"], enable: false' in late[0].cure
    assert [p.what for p in never_called({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, own)] == [
        "1 module was never called in calibration, so its input has no range: m.experts.1.w1"
    ]
    assert never_called({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, own, whole_kinds=True) == []
    assert never_called(dict.fromkeys(own, 2.0), own) == []


def test_no_cure_turns_off_what_was_called() -> None:
    """The pattern of a kind may fit other kinds, as `*` also stands for dots."""
    own = quantizers(a=("0",), b=("1",), c=("3.proj",), d=("t.0.q", "t.1.q"), e=("t.0.inner.q",))
    calls = {"a": 0.0, "b": 0.0, "c": 2.0, "d": 0.0}  # e needs no data
    (problem,) = never_called(calls, own, whole_kinds=True)
    lead = "4 modules were never called in calibration, so their inputs have no range:"
    assert problem.what == f"{lead} * (2), t.*.q (2)"
    assert '{pattern: ["0", "1", "t.0.q", "t.1.q"], enable: false}' in problem.cure
