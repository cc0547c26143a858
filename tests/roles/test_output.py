"""What comes out of a node, whatever its drafters do."""

from __future__ import annotations

import asyncio
from typing import Any


def test_smoke(kit, run) -> None:
    async def main() -> None:
        draft = kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))
        async with kit.node(draft) as world:
            assert await world.text(kit.request()) == kit.follow(3, 40)
            await world.assert_empty()
            print(world.target.passes)

    run(main())
