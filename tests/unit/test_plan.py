"""The plan: which layout for which facts, its memory to the byte, and whose every part of the model is."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_ptq.distributed.launch import Wishes
from hf_ptq.distributed.plan import Facts, Plan, decide_plan, free_bytes
from hf_ptq.errors import UserError

GB = 10**9
DENSE = Facts(9000, 0, 900, 0, device="cpu", free_bytes=1 << 40, world_size=4)
MOE = Facts(1000, 8000, 100, 800, device="cpu", free_bytes=1 << 40, world_size=4, num_experts=8)
NO_EP, NO_FSDP = "its experts run by themselves", "it has no FSDP2 plan"


def decided(facts: Facts, wishes: Wishes = Wishes(), **changed: object) -> Plan:  # noqa: B008 - frozen
    return decide_plan(dataclasses.replace(facts, **changed), wishes)


def refused(facts: Facts, wishes: Wishes = Wishes(), **changed: object) -> list[tuple[str, str]]:  # noqa: B008
    with pytest.raises(UserError) as caught:
        decided(facts, wishes, **changed)
    return [(problem.what, problem.cure) for problem in caught.value.problems]


# ---- which layout, and its memory


@pytest.mark.parametrize(
    ("facts", "world", "wishes", "layout", "expected_bytes"),
    [
        # one process; a wish for replication changes nothing
        (MOE, 1, Wishes(), ("single", 1, "replicated", False), 9000 + 900),
        (DENSE, 1, Wishes(), ("single", 1, "replicated", False), 9000 + 900),
        (MOE, 1, Wishes(ep_degree=1, dense="replicated"), ("single", 1, "replicated", False), 9900),
        # dense models
        (DENSE, 3, Wishes(), ("replicated", 1, "replicated", False), 9000 + 900),
        (DENSE, 3, Wishes(ep_degree=1, dense="replicated"), ("replicated", 1, "replicated", False), 9900),
        # the degree is the largest common divisor; the ranks beyond it form groups
        (MOE, 4, Wishes(), ("expert-parallel", 4, "replicated", True), 1000 + 2000 + 100 + 200),
        (MOE, 8, Wishes(), ("expert-parallel", 8, "replicated", True), 1000 + 1000 + 100 + 100),
        (MOE, 16, Wishes(), ("expert-parallel", 8, "replicated", True), 1000 + 1000 + 100 + 100),
        (MOE, 6, Wishes(), ("expert-parallel", 2, "replicated", True), 1000 + 4000 + 100 + 400),
        (MOE, 4, Wishes(ep_degree=2), ("expert-parallel", 2, "replicated", True), 1000 + 4000 + 100 + 400),
        (MOE, 4, Wishes(ep_degree=1), ("replicated", 1, "replicated", False), 9000 + 900),
        (MOE, 3, Wishes(ep_degree=1), ("replicated", 1, "replicated", False), 9000 + 900),
        # the dense part sharded; several groups share out the experts too and gather a unit of them
        (MOE, 4, Wishes(dense="fsdp"), ("expert-parallel", 4, "fsdp", True), 9000 // 4 + 2 * 100),
        (MOE, 4, Wishes(2, "fsdp"), ("expert-parallel", 2, "fsdp", True), 9000 // 4 + 2 * 100 + 800 // 2),
        (MOE, 16, Wishes(dense="fsdp"), ("expert-parallel", 8, "fsdp", True), 9000 // 16 + 2 * 100 + 800 // 8),
        # everything sharded
        (MOE, 4, Wishes(use_fsdp2=True), ("fsdp2", 1, "fsdp", True), 9000 // 4 + 2 * 900),
        (MOE, 4, Wishes(1, "fsdp", True), ("fsdp2", 1, "fsdp", True), 9000 // 4 + 2 * 900),
        (DENSE, 3, Wishes(use_fsdp2=True), ("fsdp2", 1, "fsdp", True), 9000 // 3 + 2 * 900),
        (MOE, 1, Wishes(use_fsdp2=True), ("fsdp2", 1, "fsdp", True), 9000 + 2 * 900),
        (MOE, 3, Wishes(use_fsdp2=True), ("fsdp2", 1, "fsdp", True), 9000 // 3 + 2 * 900),
    ],
)
def test_layouts_and_their_bytes(facts: Facts, world: int, wishes: Wishes, layout: tuple, expected_bytes: int) -> None:
    plan = decided(facts, wishes, world_size=world)
    assert (plan.kind, plan.ep_degree, plan.dense, plan.shards_model) == layout
    assert (plan.expected_bytes, plan.world_size, plan.device, plan.warnings) == (expected_bytes, world, "cpu", ())


def test_a_plan_fits_to_the_byte() -> None:
    """First with a replicated dense part, then with a sharded one, then not at all."""
    whole, cut = decided(MOE), decided(MOE, Wishes(dense="fsdp"))
    assert cut.expected_bytes < whole.expected_bytes
    assert decided(MOE, free_bytes=whole.expected_bytes) == dataclasses.replace(
        whole, reasons=(*whole.reasons[:2], whole.reasons[2].replace("1099.51 GB", "0.00 GB"))
    )
    for free in (whole.expected_bytes - 1, cut.expected_bytes):
        plan = decided(MOE, free_bytes=free)
        assert (plan.kind, plan.dense, plan.expected_bytes) == ("expert-parallel", "fsdp", cut.expected_bytes)
        assert plan.reasons[1] == "the dense part sharded by FSDP2: it does not fit whole"
    assert len(refused(MOE, free_bytes=cut.expected_bytes - 1)) == 2
    assert decided(DENSE, free_bytes=9900).kind == "replicated"
    assert len(refused(DENSE, free_bytes=9899)) == 1


def test_what_is_wished_for_is_not_exchanged_for_what_fits() -> None:
    whole, cut = decided(MOE), decided(MOE, Wishes(dense="fsdp"))
    ((what, _),) = refused(MOE, Wishes(dense="replicated"), free_bytes=cut.expected_bytes)
    assert "dense weights" in what
    assert decided(MOE, Wishes(dense="fsdp"), free_bytes=whole.expected_bytes).dense == "fsdp"
    ((what, _),) = refused(MOE, Wishes(ep_degree=1), free_bytes=whole.expected_bytes)
    assert what.startswith("the model does not fit: replicated")


def test_reasons_say_what_and_the_arithmetic() -> None:
    big = {"dense_bytes": 3 * GB, "expert_bytes": 16 * GB, "dense_unit_bytes": GB // 2, "expert_unit_bytes": 2 * GB}
    room = {**big, "free_bytes": 80 * GB, "device": "cuda"}
    assert decided(MOE, **room).reasons == (
        "8 experts over 4 ranks: 2 each",
        "the dense part replicated: no forward gathers it",
        "dense weights 3.00 GB + experts 4.00 GB + one unit 1.00 GB; 80.00 GB free on cuda for each rank",
    )
    assert decided(MOE, Wishes(2, "fsdp"), **room).reasons == (
        "8 experts over 2 ranks: 4 each, in 2 expert-parallel groups",
        "the dense part sharded by FSDP2: asked for",
        "weights 4.75 GB + two units, gathered, 2.00 GB; 80.00 GB free on cuda for each rank",
    )
    assert decided(MOE, Wishes(use_fsdp2=True), **room).reasons == (
        "--use_fsdp2: every weight sharded over 4 ranks",
        "weights 4.75 GB + two units, gathered, 5.00 GB; 80.00 GB free on cuda for each rank",
    )
    assert decided(MOE, Wishes(ep_degree=1), **room).reasons == (
        "--ep_degree 1: every rank holds all experts",
        "weights 19.00 GB + one unit 2.50 GB; 80.00 GB free on cuda for each rank",
    )
    assert decided(MOE, **room, world_size=1).reasons[1].endswith("one unit 2.50 GB; 80.00 GB free on cuda")
    assert decided(DENSE).reasons[0] == "a dense model: every rank holds it"


# ---- models that cannot be sharded


def test_a_model_that_refuses_expert_parallelism_is_replicated_with_a_warning() -> None:
    plan = decided(MOE, expert_parallel_problem=NO_EP)
    assert (plan.kind, plan.ep_degree, plan.expected_bytes, plan.warnings) == ("replicated", 1, 9900, (NO_EP,))
    assert plan.reasons[0] == f"without expert parallelism: {NO_EP}"
    assert decided(MOE, Wishes(ep_degree=1), expert_parallel_problem=NO_EP).warnings == ()
    assert decided(MOE, Wishes(use_fsdp2=True), expert_parallel_problem=NO_EP).kind == "fsdp2"
    assert decided(MOE, expert_parallel_problem=NO_EP, world_size=1).warnings == ()
    assert decided(MOE, expert_parallel_problem=NO_EP, world_size=3).kind == "replicated", "no degree is looked for"


def test_a_model_that_refuses_fsdp2_has_no_sharded_plan() -> None:
    needed = decided(MOE).expected_bytes
    assert decided(MOE, fsdp_problem=NO_FSDP, free_bytes=needed).dense == "replicated"
    ((what, cure),) = refused(MOE, fsdp_problem=NO_FSDP, free_bytes=needed - 1)
    assert what.startswith("the model does not fit: expert-parallel: dense weights 0.00 GB")
    assert cure == "use more ranks; use a device with more memory"
    ((_, cure),) = refused(DENSE, fsdp_problem=NO_FSDP, free_bytes=1)
    assert "--use_fsdp2" not in cure


# ---- refusals

LEAVE = "leave it out"


@pytest.mark.parametrize(
    ("facts", "wishes", "changed", "what", "cure"),
    [
        # no common divisor: worlds that work
        (MOE, Wishes(), {"world_size": 3}, "3 ranks cannot share 8 experts evenly",
         "use 2, 4, 8 ranks (or a multiple), or --ep_degree 1 to replicate the experts"),
        (MOE, Wishes(dense="fsdp"), {"world_size": 2, "num_experts": 7}, "2 ranks cannot share 7 experts evenly",
         "use 7 ranks (or a multiple), or --ep_degree 1 to replicate the experts"),
        (MOE, Wishes(), {"world_size": 7, "num_experts": 240}, "7 ranks cannot share 240 experts evenly",
         "use 2, 3, 4, 5, 6, 8, 10, 12 ranks (or a multiple), or --ep_degree 1 to replicate the experts"),
        # a degree that divides one of the two, or neither
        (MOE, Wishes(ep_degree=3), {"world_size": 6}, "an expert-parallel degree of 3 does not divide 8 experts",
         "--ep_degree 1 or 2"),
        (MOE, Wishes(ep_degree=8), {}, "an expert-parallel degree of 8 does not divide 4 ranks",
         "--ep_degree 1 or 2 or 4"),
        (MOE, Wishes(ep_degree=3), {}, "an expert-parallel degree of 3 does not divide 4 ranks",
         "--ep_degree 1 or 2 or 4"),
        # wishes that the model cannot fulfil
        (MOE, Wishes(ep_degree=4), {"expert_parallel_problem": NO_EP},
         f"an expert-parallel degree of 4 was asked for: {NO_EP}",
         "--ep_degree 1 replicates the experts, --use_fsdp2 shards them"),
        (MOE, Wishes(dense="fsdp"), {"fsdp_problem": NO_FSDP}, f"--dense fsdp: {NO_FSDP}", LEAVE),
        (MOE, Wishes(use_fsdp2=True), {"fsdp_problem": NO_FSDP}, f"--use_fsdp2: {NO_FSDP}", LEAVE),
        (MOE, Wishes(use_fsdp2=True), {"fsdp_problem": NO_FSDP, "world_size": 1}, f"--use_fsdp2: {NO_FSDP}", LEAVE),
        # a sharded dense part is for expert-parallel runs
        (DENSE, Wishes(dense="fsdp"), {}, "--dense fsdp is for what is not an expert in an expert-parallel run",
         "--use_fsdp2 shards the whole model"),
        (MOE, Wishes(1, "fsdp"), {}, "--dense fsdp is for what is not an expert in an expert-parallel run",
         "--use_fsdp2 shards the whole model"),
        (MOE, Wishes(dense="fsdp"), {"expert_parallel_problem": NO_EP},
         "--dense fsdp is for what is not an expert in an expert-parallel run", "--use_fsdp2 shards the whole model"),
        (DENSE, Wishes(ep_degree=2), {},
         "an expert-parallel degree of 2 was asked for, but the model has no routed experts",
         "leave it out; --use_fsdp2 shards a dense model"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_had(facts: Facts, wishes: Wishes, changed: dict, what: str, cure: str) -> None:
    assert refused(facts, wishes, **changed) == [(what, cure)]


def test_where_nothing_fits_every_plan_tells_its_arithmetic() -> None:
    sizes = {
        "dense_bytes": 3 * GB,
        "expert_bytes": 16 * GB,
        "dense_unit_bytes": GB // 2,
        "expert_unit_bytes": 2 * GB,
    }
    moe = {**sizes, "free_bytes": GB, "device": "cuda"}
    free = "1.00 GB free on cuda"
    more = "use more ranks; use a device with more memory, or --device cpu"
    assert refused(MOE, **moe) == [
        ("the model does not fit: expert-parallel: dense weights 3.00 GB + experts 4.00 GB + one unit 1.00 GB; "
         f"{free} for each rank", ""),
        ("the model does not fit: expert-parallel: weights 4.75 GB + two units, gathered, 1.00 GB; "
         f"{free} for each rank", more),
    ]  # fmt: skip
    ((_, cure),) = refused(MOE, Wishes(dense="replicated"), **moe)
    assert cure == f"--dense fsdp shards the rest; {more}"
    ((what, cure),) = refused(MOE, Wishes(ep_degree=1), **moe)
    replicated = f"weights 19.00 GB + one unit 2.50 GB; {free}"
    assert what == f"the model does not fit: replicated: {replicated} for each rank"
    assert cure == f"--use_fsdp2 shards it over the ranks; {more}"
    ((what, cure),) = refused(MOE, Wishes(use_fsdp2=True), **moe)
    assert what.startswith("the model does not fit: fsdp2: weights 4.75 GB + two units, gathered, 5.00 GB")
    assert cure == more
    ((what, cure),) = refused(MOE, **moe, world_size=1)
    assert what == f"the model does not fit: single: {replicated}"
    assert cure == "use a device with more memory, or --device cpu"
    ((_, cure),) = refused(MOE, **{**moe, "device": "cpu"}, world_size=1)
    assert cure == "use a device with more memory"


# ---- whose every part is


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan over up to 16 ranks and a number of experts that its degree divides."""
    degree, groups = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    kind, dense = draw(
        st.sampled_from([("expert-parallel", "replicated"), ("expert-parallel", "fsdp")])
        if degree > 1
        else st.sampled_from([("replicated", "replicated"), ("fsdp2", "fsdp")])
    )
    plan = Plan(kind, "cpu", 0, (), degree * groups, degree, dense)
    return plan, degree * draw(st.integers(1, 12))


@given(plans())
def test_every_expert_is_written_once_by_a_rank_that_holds_it(case: tuple[Plan, int]) -> None:
    plan, experts = case
    ranks = range(plan.world_size)
    written = Counter(expert for rank in ranks for expert in plan.written_experts(experts, rank))
    assert written == Counter(range(experts))
    for rank in ranks:
        own, held, run = (f(experts, rank) for f in (plan.written_experts, plan.held_experts, plan.run_experts))
        assert set(own) <= set(held) <= set(run)
        assert held == (own if plan.dense == "fsdp" else run)
        assert len(run) == experts // plan.ep_degree


@given(plans())
def test_each_group_runs_every_expert_once(case: tuple[Plan, int]) -> None:
    plan, experts = case
    for start in range(0, plan.world_size, plan.ep_degree):
        group = range(start, start + plan.ep_degree)
        assert [expert for rank in group for expert in plan.run_experts(experts, rank)] == list(range(experts))


@given(plans(), st.integers(0, 60))
def test_rows_are_cut_as_torch_cuts_them(case: tuple[Plan, int], num_rows: int) -> None:
    """Full parts first, then a smaller one, then none; the same for the experts that several groups share out."""
    plan, experts = case
    rows = torch.arange(num_rows)
    parts = [part.tolist() for part in rows.chunk(plan.world_size)] if num_rows else []
    parts += [[]] * (plan.world_size - len(parts))
    for rank in range(plan.world_size):
        expected = parts[rank] if plan.dense == "fsdp" else rows.tolist()
        assert list(plan.held_rows(num_rows, rank)) == expected
    groups = plan.world_size // plan.ep_degree
    for rank in range(plan.world_size):
        run = torch.tensor(plan.run_experts(experts, rank))
        shares = [part.tolist() for part in run.chunk(groups)] + [[]] * groups
        assert list(plan.written_experts(experts, rank)) == shares[rank // plan.ep_degree]


@pytest.mark.parametrize(
    ("plan", "run", "written", "held"),
    [
        (("expert-parallel", 4, 2, "replicated"), [(0, 4), (4, 8), (0, 4), (4, 8)],
         [(0, 2), (4, 6), (2, 4), (6, 8)], [(0, 4), (4, 8), (0, 4), (4, 8)]),
        (("expert-parallel", 4, 2, "fsdp"), [(0, 4), (4, 8), (0, 4), (4, 8)],
         [(0, 2), (4, 6), (2, 4), (6, 8)], [(0, 2), (4, 6), (2, 4), (6, 8)]),
        (("replicated", 3, 1, "replicated"), [(0, 8)] * 3, [(0, 3), (3, 6), (6, 8)], [(0, 8)] * 3),
        (("fsdp2", 5, 1, "fsdp"), [(0, 8)] * 5, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 8)],
         [(0, 2), (2, 4), (4, 6), (6, 8), (8, 8)]),
        (("single", 1, 1, "replicated"), [(0, 8)], [(0, 8)], [(0, 8)]),
    ],
)  # fmt: skip
def test_eight_experts(plan: tuple, run: list, written: list, held: list) -> None:
    """Ranks side by side are a group: rank r runs the experts of r modulo the degree."""
    kind, world, degree, dense = plan
    made = Plan(kind, "cpu", 0, (), world, degree, dense)
    for of, expected in ((made.run_experts, run), (made.written_experts, written), (made.held_experts, held)):
        assert [(r.start, r.stop) for r in (of(8, rank) for rank in range(world))] == expected


def test_rows_that_do_not_divide() -> None:
    plan = Plan("fsdp2", "cpu", 0, (), 4, 1, "fsdp")
    assert [plan.held_rows(9, rank) for rank in range(4)] == [range(3), range(3, 6), range(6, 9), range(9, 9)]
    assert [len(plan.held_rows(2, rank)) for rank in range(4)] == [1, 1, 0, 0]


def test_free_memory_of_the_host() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 50
