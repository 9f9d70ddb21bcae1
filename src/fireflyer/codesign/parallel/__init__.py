"""Plans of parallel training: degrees, stages, memory and traffic per rank, time per step, search.

    plan = ParallelPlan(pipeline=4, shard=16, zero=1, sequence_tokens=2048, batch_sequences=4096)
    refusals(plan, shape, node, nodes=8)        # [] or why it cannot be run
    estimate_step(plan, shape, node).step_s     # with its parts, links, memory and MFU; node = load_node("h800")

The device mesh of a plan is `mesh_dims(plan)`, its process groups are `groups(plan, axis)`.
"""

from fireflyer.codesign.parallel.memory import Kernels, RankMemory, peak_memory, plan_memory
from fireflyer.codesign.parallel.mesh import coordinates_of, gradient_adds, groups, mesh_dims
from fireflyer.codesign.parallel.node import Buffers, NodeModel, Rates, load_node, node_names
from fireflyer.codesign.parallel.plan import ParallelPlan, Precision, refusals, shape_refusals
from fireflyer.codesign.parallel.search import SearchResult, SearchSpace, search_plans
from fireflyer.codesign.parallel.stages import Stage, balance_model
from fireflyer.codesign.parallel.step import MeasuredStep, PlanFile, StepEstimate, StepParts, estimate_step

__all__ = [
    "Buffers",
    "Kernels",
    "MeasuredStep",
    "NodeModel",
    "ParallelPlan",
    "PlanFile",
    "Precision",
    "RankMemory",
    "Rates",
    "SearchResult",
    "SearchSpace",
    "Stage",
    "StepEstimate",
    "StepParts",
    "balance_model",
    "coordinates_of",
    "estimate_step",
    "gradient_adds",
    "groups",
    "load_node",
    "mesh_dims",
    "node_names",
    "peak_memory",
    "plan_memory",
    "refusals",
    "search_plans",
    "shape_refusals",
]
