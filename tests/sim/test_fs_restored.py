"""A dump that is loaded lets no replica serve that lacks what was acknowledged since."""

from __future__ import annotations

import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds
from tests.support.fs.chain_sim.restored import MUTANTS, RestoredWorld, attempt


@pytest.mark.parametrize("seeds", [range(8), *more_seeds(8, 108, blocks=1, wide=1500, seed_s=0.2)])
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print(mutant, *search("restored", mutant, MUTANTS[mutant].within, lambda seed: attempt(mutant, seed, monkeypatch)))
