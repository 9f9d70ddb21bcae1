"""What clients are told about their reads and updates is true, whatever is lost, late, cut off or dead."""

from __future__ import annotations

import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds
from tests.support.fs.chain_sim.request_mutants import MUTANTS, attempt
from tests.support.fs.chain_sim.request_world import ExchangingClient, ListedWorld, RequestWorld, WholeWorld, run_seed

BLOCK = 40


@pytest.mark.parametrize("first", range(0, 80, BLOCK))
def test_what_clients_are_told_can_be_explained(first: int) -> None:
    worlds = [run_seed(seed) for seed in range(first, first + BLOCK)]
    assert sum(world.histories.updates for world in worlds) > 5 * BLOCK
    assert sum(world.histories.reads for world in worlds) > 10 * BLOCK
    assert sum(world.histories.unknown for world in worlds) > BLOCK


@pytest.mark.parametrize("seeds", more_seeds(80, 400, blocks=1, wide=4000, seed_s=0.03))
def test_so_it_is_for_many_seeds(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)


@pytest.mark.parametrize("seeds", [range(8), *more_seeds(8, 68, blocks=1, wide=1000, seed_s=0.18)])
def test_so_it_is_with_real_managers_and_storage_processes(seeds: range) -> None:
    worlds = [run_seed(seed, WholeWorld) for seed in seeds]
    assert sum(world.histories.updates for world in worlds) > 3 * len(seeds)
    clients = [one for world in worlds for one in world.clients if isinstance(one, ExchangingClient)]
    assert sum(one.exchanges for one in clients) > len(seeds)


@pytest.mark.parametrize("seeds", [range(8), *more_seeds(8, 100, blocks=1, wide=1000, seed_s=0.03)])
def test_each_chunk_in_a_page_of_the_chain_is_right_by_itself(seeds: range) -> None:
    worlds = [run_seed(seed, ListedWorld) for seed in seeds]
    assert sum(world.histories.reads for world in worlds) > 10 * len(seeds)


def test_the_same_seed_gives_the_same_history() -> None:
    def history(seed: int) -> bytes:
        return run_seed(seed).sim.trace.to_bytes()

    assert history(5) == history(5)
    assert history(6) != history(5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str) -> None:
    print(mutant, *search("requests", mutant, MUTANTS[mutant].within, lambda seed: attempt(mutant, seed)))


def test_without_faults_no_outcome_is_unknown_but_of_those_that_were_given_no_time() -> None:
    world = RequestWorld(3, calm=True)
    world.run()
    world.check()
    assert world.oracle.changes == 0
    assert world.histories.updates > 10
