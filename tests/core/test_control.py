"""Speculation control and the ladder (6.5). The traces' m_cap has no load cut, so it is the ladder cap here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.core.contract import self_decode_permitted
from sdcp_mono.core.control import Control, after_round, assigned, is_low, load_cap, start
from sdcp_mono.core.messages import Action, Contract

LADDERS = st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=5).map(tuple)


@pytest.mark.vectors("control_traces")
def test_sdcp_140_141_142_143_traces(case: dict[str, Any], make_contract: Any) -> None:
    parameters = dict(case["parameters"])
    m_init, low_rounds = parameters.pop("m_init"), parameters.pop("R")
    contract: Contract = make_contract(
        low_rounds=low_rounds, **parameters | {"fallback": tuple(parameters["fallback"])}
    )
    control = start(contract, m_init)
    verdicts, rounds = [], []
    for event in case["trace"]:
        if "round" in event:
            rounds.append(event["round"])
        if event.get("event") == "assign":
            control = assigned(control, contract, event["m_init"])
            assert control.cap == event["m_cap"]
        elif event.get("event") == "self_token":  # leaves the counters alone
            assert self_decode_permitted(contract, event["load"])
        elif event.get("event") == "router_event":
            continue
        else:
            finished = event["action"] == Action.FINISH
            steering = after_round(control, contract, event["a"], event["M"], event["load"], finished=finished)
            assert is_low(contract, event["a"], event["M"]) == event["low_round"]
            control = steering.control
            assert (steering.action, steering.low, control.cap) == (event["action"], event["low"], event["m_cap"])
            assert steering.m_cap == min(event["m_cap"], load_cap(contract.m_max, event["load"]))
            verdicts.append([control.c, control.g, control.j, control.cap, steering.action])
        assert (control.c, control.g, control.j) == (event["c"], event["g"], event["j"])
    assert rounds == list(range(1, len(rounds) + 1))
    assert verdicts == case.get("expected_c_g_j_mcap_action_per_verdict", verdicts)


def test_sdcp_139_low_rounds(make_contract: Any) -> None:
    half, all_of_it, absent, zero = (make_contract(low_ratio=ratio) for ratio in (50, 100, None, 0))
    assert [is_low(half, a, m) for a, m in ((2, 5), (2, 4), (3, 5))] == [True, False, False]
    assert [is_low(all_of_it, a, 4) for a in range(5)] == [True, True, True, True, False]
    for contract in (absent, zero):
        assert [is_low(contract, a, 8) for a in range(9)] == [True] + [False] * 8


def test_sdcp_159_worked_example(make_contract: Any) -> None:
    steering = after_round(Control(c=2, g=0, j=1, cap=8), make_contract(), accepted=2, m=3, load=20)
    assert (steering.action, steering.low, steering.control) == (Action.CONTINUE, 0, Control(c=0, g=1, j=1, cap=8))


def test_sdcp_064_verdict_low_counts_to_r(make_contract: Any) -> None:
    contract = make_contract(low_rounds=3, fallback=(1, 1, 1, 1))
    control, lows = start(contract, 8), []
    for _ in range(5):
        steering = after_round(control, contract, 0, 1, 20)
        control = steering.control
        lows.append(steering.low)
    assert lows == [1, 2, 3, 1, 2]  # AMB-110
    assert after_round(control, contract, 1, 1, 20).low == 0


@pytest.mark.parametrize(("cap", "reduced"), [(8, 4), (4, 2), (2, 1), (1, 1), (7, 3), (5, 2)])
def test_sdcp_147_reduce(cap: int, reduced: int, make_contract: Any) -> None:
    steering = after_round(Control(0, 0, 0, cap), make_contract(low_rounds=1), 0, cap, 20)
    assert (steering.action, steering.m_cap) == (Action.REDUCE, reduced)


@pytest.mark.parametrize(("load", "action"), [(10, 3), (50, 3), (51, 2), (90, 2)])
def test_sdcp_151_158_load_decides_over_self_decode(load: int, action: int, make_contract: Any) -> None:
    contract = make_contract(low_rounds=1, fallback=(3, 2), self_load=50)
    assert after_round(start(contract, 8), contract, 0, 8, load).action == action


def test_sdcp_023_self_decode_without_self_load(make_contract: Any) -> None:
    contract = make_contract(low_rounds=1, fallback=(3, 5))
    steering = after_round(start(contract, 8), contract, 0, 8, 0)
    assert (steering.action, steering.control.j) == (Action.FAIL, 2)


def test_sdcp_145_116_counters_persist_over_assignments(make_contract: Any) -> None:
    before = Control(c=2, g=0, j=1, cap=3)
    after = assigned(before, make_contract(), 6)
    assert after == Control(c=2, g=0, j=1, cap=6)
    assert after_round(after, make_contract(fallback=(2, 1, 5)), 0, 6, 20).action is Action.REDUCE


@pytest.mark.parametrize(("m_init", "cap"), [(0, 1), (1, 1), (8, 8), (99, 8)])
def test_sdcp_087_m_init_is_clamped(m_init: int, cap: int, make_contract: Any) -> None:
    assert start(make_contract(m_max=8), m_init) == Control(0, 0, 0, cap)  # AMB-078
    assert assigned(Control(1, 0, 2, 4), make_contract(m_max=8), m_init) == Control(1, 0, 2, cap)


@pytest.mark.parametrize(
    ("load", "cap"), [(0, 8), (80, 8), (81, 7), (85, 6), (90, 4), (95, 2), (99, 1), (100, 1), (120, 1)]
)
def test_sdcp_137_load_cap(load: int, cap: int) -> None:
    assert load_cap(8, load) == cap  # 8 - ceil(7 * (load - 80) / 20)
    assert load_cap(1, load) == 1


def test_sdcp_137_138_load_lowers_at_once_and_comes_back_at_once(make_contract: Any) -> None:
    contract = make_contract()
    control = start(contract, 8)
    caps = []
    for load in (20, 95, 20):
        steering = after_round(control, contract, 4, 8, load)
        control = steering.control
        caps.append(steering.m_cap)
    assert caps == [8, 2, 8]  # AMB-111


def test_sdcp_138_restore_step_by_step(make_contract: Any) -> None:
    contract = make_contract(low_rounds=1)
    control = after_round(start(contract, 8), contract, 0, 8, 20).control
    caps = []
    for _ in range(6):
        steering = after_round(control, contract, 1, 4, 80)
        control = steering.control
        caps.append(steering.m_cap)
    assert caps == [5, 6, 7, 8, 8, 8]
    assert after_round(Control(0, 0, 0, 4), contract, 1, 4, 81).control.cap == 4


@given(LADDERS, st.integers(1, 4), st.integers(1, 64), st.integers(0, 100))
def test_sdcp_203_hostile_drafter_is_bounded(ladder: tuple[int, ...], r: int, m_max: int, load: int) -> None:
    contract = Contract(
        target=bytes(32), tokenizer=bytes(32), rule=1, m_max=m_max, max_new=1, stop=(), low_rounds=r, fallback=ladder,
        self_load=50,
    )  # fmt: skip
    control = start(contract, m_max)
    for _ in range(r * (len(ladder) + 1)):
        steering = after_round(control, contract, 0, 1, load)
        control = steering.control
        if steering.action is Action.FAIL:
            break
    else:
        pytest.fail("no fail within R * (len(fallback) + 1) low rounds")


@given(
    LADDERS, st.integers(1, 3), st.integers(1, 64), st.integers(0, 100), st.integers(0, 100),
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 100), st.booleans()), max_size=30),
)  # fmt: skip
def test_sdcp_136_140_invariants(
    ladder: tuple[int, ...], r: int, m_max: int, low_ratio: int, self_load: int, rounds: list[tuple[int, int, bool]]
) -> None:
    contract = Contract(
        target=bytes(32), tokenizer=bytes(32), rule=1, m_max=m_max, max_new=1, stop=(), low_rounds=r, fallback=ladder,
        low_ratio=low_ratio, self_load=self_load,
    )  # fmt: skip
    control = start(contract, m_max)
    for accepted, load, finished in rounds:
        steering = after_round(control, contract, min(accepted, control.cap), control.cap, load, finished=finished)
        control = steering.control
        assert 1 <= steering.m_cap <= control.cap <= m_max
        assert 0 <= control.j <= len(ladder)
        assert control.c == 0 or control.g == 0
        assert steering.low == 0 or control.g == 0
        assert finished == (steering.action is Action.FINISH)
        assert steering.action in (0, 4, 5, *ladder)
        assert finished or control.c < r
