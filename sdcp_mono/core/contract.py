"""Rules of the session contract that need more than one member, and what its absent members mean (4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sdcp_mono.core import cbor
from sdcp_mono.core.accept import RULES
from sdcp_mono.core.messages import UINT32_MAX, UNSET, Action, Contract, Sampling
from sdcp_mono.core.ports import ModelCard
from sdcp_mono.core.problems import BadContract

LADDER: Final = frozenset({Action.REDUCE, Action.SWITCH, Action.SELF_DECODE, Action.FAIL})  # 4.1, 6.5.2

_NO_SAMPLING: Final = Sampling()


def validate(contract: Contract, card: ModelCard | None = None, prompt_length: int | None = None) -> None:
    """Raise ``BadContract`` unless the contract can be served by the model of ``card`` for this prompt (tokens).

    A contract made in this process passes the same gate as one from the wire.
    """
    cbor.decode(cbor.encode(contract), Contract)
    if contract.rule not in RULES:  # 0 is reserved, 192..255 private use and not configured here (10.2.2)
        raise BadContract(f"contract.rule: {contract.rule} is not a registered acceptance rule")
    if contract.m_max < 1:
        raise BadContract("contract.m_max: 0 leaves no room for 1 <= m_cap <= m_max")  # AMB-016
    if contract.max_new > UINT32_MAX:
        raise BadContract("contract.max_new: more than 2^32 - 1, the largest round number")  # AMB-130
    if any(token > UINT32_MAX for token in contract.stop):
        raise BadContract("contract.stop: a token id is at most 2^32 - 1")  # AMB-019
    if not LADDER.issuperset(contract.fallback):
        raise BadContract("contract.fallback: only reduce, switch, self_decode and fail are allowed")  # AMB-012
    if card is None:
        return
    if contract.target != card.target:
        raise BadContract("contract.target: not the model served here")
    if contract.tokenizer != card.tokenizer:
        raise BadContract("contract.tokenizer: not the tokenizer of the model served here")  # AMB-032
    length = (prompt_length or 0) + contract.max_new
    if length > card.context:  # AMB-018
        raise BadContract(
            f"contract.max_new: prompt ({prompt_length or 0}) and max_new ({contract.max_new}) need {length} tokens, "
            f"the context holds {card.context}"
        )


def low_ratio(contract: Contract) -> int:
    """Percent of accepted tokens below which a round is low; absent means 0."""
    return 0 if contract.low_ratio is UNSET else contract.low_ratio


def sampling_of(contract: Contract) -> Sampling:
    """The sampling profile as created; absent means temperature 1, everything kept, no seed (AMB-022, AMB-030)."""
    return _NO_SAMPLING if contract.sampling is UNSET else contract.sampling


def seeded(contract: Contract) -> bool:
    """Whether the session's output must not depend on time, load or a failover (docs/decisions/0001)."""
    return sampling_of(contract).seed is not UNSET


def self_decode_permitted(contract: Contract, load_percent: int) -> bool:
    """Whether the ladder may enter, or go on with, self-decoding at this load (6.5.2)."""
    return contract.self_load is not UNSET and load_percent <= contract.self_load


def policy_at(contract_sampling: Sampling, policies: Mapping[int, Sampling], round: int) -> Sampling:
    """The profile in force in ``round``: the largest from_round not above it, as a whole (6.6, AMB-132, AMB-174)."""
    from_round = max((key for key in policies if key <= round), default=None)
    return contract_sampling if from_round is None else policies[from_round]
