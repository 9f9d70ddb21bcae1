"""A dump that is loaded lets no replica serve that lacks what was acknowledged since."""

from __future__ import annotations

import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds
from tests.support.fs.chain_sim.restored import MUTANTS, RestoredWorld, attempt


@pytest.mark.parametrize("seeds", [range(8), *more_seeds(8, 308, blocks=2, wide=308, seed_s=0.2)])
def test_what_was_acknowledged_is_kept_whatever_dump_is_loaded(seeds: range) -> None:
    """Dumps are older than changes of the chain, processes are stopped anywhere, disks lose what was not on them."""
    loads, serving = 0, 0
    for seed in seeds:
        world = RestoredWorld(seed)
        world.plan_faults()
        world.run()
        world.check()
        loads += world.loads
        serving += not world.lost
    assert loads >= len(seeds)
    assert serving > len(seeds) // 2


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a replica never becomes in sync; nothing is lost")
@pytest.mark.parametrize("seed", [1124])
def test_a_loaded_chain_becomes_whole_in_every_history(seed: int) -> None:
    """Not so: about one history in 500 ends with one replica that serves and one that never begins to copy. Seeds above
    308 run when that is mended."""
    world = RestoredWorld(seed)
    world.plan_faults()
    world.run()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print(mutant, *search("restored", mutant, MUTANTS[mutant].within, lambda seed: attempt(mutant, seed, monkeypatch)))
