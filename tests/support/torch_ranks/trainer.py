"""A rank of a training run from a recipe that a test disturbs: `python -m tests.support.torch_ranks.trainer JSON`.

Its last line is the error with which the run ended, or null.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from tests.support.torch_ranks.guarded import flip
from tests.support.trainer.bad_batches import BadBatch, spoil

from fireflyer.base.errors import FireflyerError
from fireflyer.recipes.trainer import run as trainer
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import identity_of, resolved


def disturb(dies: tuple[int, int] | None, flips: tuple[int, int] | None) -> None:
    """Rank `dies[0]` is killed as it begins step `dies[1]`. A bit of a parameter of rank `flips[0]` flips in step
    `flips[1]`, after its commit."""
    take_step = trainer._take_step

    def take(run: Any, loop: Any, step: int) -> None:
        if dies is not None and (run.env.rank, step) == dies:
            loop.manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        take_step(run, loop, step)
        if (run.env.rank, step) == flips:
            flip(next(run.arrangement.module.parameters()), 3, 20)

    trainer._take_step = take
    trainer._say = lambda run, line: None  # the last line is the result


def main() -> int:
    given = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    disturb(*(tuple(given[what]) if given.get(what) else None for what in ("dies", "flips")))
    spoil([BadBatch(**one) for one in given.get("bad", [])])
    recipe = recipe_of(given["recipe"] if rank == 0 else given.get("other_recipe", given["recipe"]))
    base = given["base"] if rank == 0 else given.get("other_base", given["base"])
    try:
        trainer.run_recipe(resolved(recipe, base), identity_of(recipe))
    except FireflyerError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
        return 1
    print("null")
    return 0


if __name__ == "__main__":
    sys.exit(main())
