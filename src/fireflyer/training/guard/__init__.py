"""Silent-corruption guard: replicas of training state are compared bit for bit, and a differing one is named.

    guard = Guard(model, optimizer, every=100)
    for step in range(first, steps):
        loss(model, batch).backward()
        guard.before_commit(step)   # parameters, optimizer state, gradients
        optimizer.step()
        guard.after_commit(step)    # parameters, optimizer state
        if step % 10 == 0:
            guard.before_save(step)  # the same; `TrainingLoop(before_save=guard.before_save)` calls it
            save(model, optimizer)
    print(guard.cost)

Found is a flipped bit in state that is still there at one of these looks and that another rank holds too:

- a parameter or a number of the optimizer that flipped since the last look and was not overwritten;
- a gradient that flipped on one rank after gradients were summed, which the optimizer is about to use up;
- what the optimizer wrote otherwise on one rank.

Not found are: a flip that training overwrites or rounds away before a look (a moment decays, an update may round to the
same number), which is why state is looked at before the commit too, and which `every` above 1 allows between looks; a
flip before gradients are summed, in data, activations or a rank's own gradient, which reaches all replicas alike; the
same flip on all ranks; state that no other rank has, as the shards of FSDP without replicas; buffers of the model. A
flip in what the guard itself computes is reported as if state had flipped.
"""

from fireflyer.training.guard.compare import MAX_NAMED, CorruptionFound, GuardVerdict, TensorDifference, compare
from fireflyer.training.guard.digest import combine, digest
from fireflyer.training.guard.guard import Guard, GuardCost

__all__ = [
    "MAX_NAMED",
    "CorruptionFound",
    "Guard",
    "GuardCost",
    "GuardVerdict",
    "TensorDifference",
    "combine",
    "compare",
    "digest",
]
