"""The backward of a graph in two parts: for its inputs at once, for the parameters later.

Nodes of the graph of autograd that lead to an input are *on the way*; where such a node also has an edge to a node that
is not, the gradients of parameters branch off. The part for the inputs runs the nodes on the way alone and keeps the
gradients that arrive at the branching nodes. The part for the parameters runs from each branching node to its
parameters alone, so that both parts together compute what one whole backward does, and nothing twice. (Zero Bubble
Pipeline Parallelism, Qi et al., 2023: B and W.)

Parameters that several branching nodes lead to (tied weights) are computed from all of these at once. There a branching
node may be on the way from another one; what arrives from that is replaced by the gradient that was kept.

An activation checkpoint is computed again for each part; `torch.utils.checkpoint` does so for every call of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fireflyer.training.pipeline.phases import Gradients

__all__ = ["Deferred", "backward_for_inputs", "backward_whole"]

_LEAF = "AccumulateGrad"


class Deferred:
    """The part for the parameters, to be run once."""

    def __init__(self) -> None:
        self.roots: list[torch.Tensor] = []
        """Outputs that no input leads to, with their gradients: all of their backward is for parameters."""
        self.root_gradients: list[torch.Tensor | None] = []
        self.groups: list[tuple[list[Node], list[torch.Tensor]]] = []
        """Branching nodes with the parameters that they lead to."""
        self.kept: dict[Node, tuple[torch.Tensor | None, ...]] = {}

    def run(self) -> None:
        """Adds to `grad` of the parameters."""
        if self.roots:
            torch.autograd.backward(self.roots, self.root_gradients)
        # Groups of several nodes first: they pass through nodes of other groups, and keep their graph.
        for nodes, parameters in sorted(self.groups, key=lambda group: len(group[0]) == 1):
            edges: list[GradientEdge] = []
            gradients: list[torch.Tensor] = []
            for node in nodes:
                for number, gradient in enumerate(self.kept.get(node, ())):
                    if gradient is not None:
                        edges.append(GradientEdge(node, number))
                        gradients.append(gradient)
            if not edges:
                continue
            handles = [_replace(node, self.kept[node]) for node in nodes if node in self.kept] if len(nodes) > 1 else []
            try:
                torch.autograd.backward(edges, gradients, retain_graph=len(nodes) > 1, inputs=parameters)
            finally:
                for handle in handles:
                    handle.remove()
        self.roots, self.groups, self.kept = [], [], {}  # the graph goes with what pointed to it


def backward_whole(outputs: Sequence[torch.Tensor], gradients: Gradients, inputs: Sequence[torch.Tensor]) -> Gradients:
    """Adds to `grad` of the parameters; the gradients of `inputs`, which are leaves. A gradient None is that of an
    output that nothing depends on."""
    roots, given = _roots(outputs, gradients)
    if roots:
        torch.autograd.backward(roots, given)
    found = tuple(tensor.grad for tensor in inputs)
    for tensor in inputs:
        tensor.grad = None
    return found


def backward_for_inputs(
    outputs: Sequence[torch.Tensor], gradients: Gradients, inputs: Sequence[torch.Tensor]
) -> tuple[Gradients, Deferred]:
    """As `backward_whole`, but the part for the parameters is left to `Deferred.run`."""
    deferred = Deferred()
    roots, given = _roots(outputs, gradients)
    wanted = {id(tensor): tensor for tensor in inputs if tensor.requires_grad}
    nodes = [get_gradient_edge(root).node for root in roots]
    children, on_the_way = _walk(nodes, wanted)
    begins: list[torch.Tensor] = []
    begin_gradients: list[torch.Tensor | None] = []
    for root, gradient, node in zip(roots, given, nodes, strict=True):
        if node in on_the_way:
            begins.append(root)
            begin_gradients.append(gradient)
        else:
            deferred.roots.append(root)
            deferred.root_gradients.append(gradient)
    if not begins:
        return (None,) * len(inputs), deferred
    deferred.groups = _groups(children, on_the_way)
    handles = [_keep(node, deferred.kept) for group, _ in deferred.groups for node in group]
    try:
        found = torch.autograd.grad(
            begins, list(wanted.values()), begin_gradients, retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    by_id = dict(zip(wanted, found, strict=True))
    return tuple(by_id.get(id(tensor)) for tensor in inputs), deferred


def _roots(
    outputs: Sequence[torch.Tensor], gradients: Gradients
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs that autograd knows and that have a gradient."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _walk(roots: Sequence[Node], inputs: dict[int, torch.Tensor]) -> tuple[dict[Node, list[Node]], set[Node]]:
    """The nodes that `roots` lead to with their children, each after its children; those on the way to `inputs`."""
    children: dict[Node, list[Node]] = {}
    on_the_way: set[Node] = set()
    stack: list[tuple[Node, list[Node] | None]] = [(node, None) for node in roots]
    while stack:
        node, below = stack.pop()
        if node in children:
            continue
        if below is None:
            below = [child for child, _ in node.next_functions if child is not None]
            if below:
                stack.append((node, below))
                stack.extend((child, None) for child in below if child not in children)
                continue
            if type(node).__name__ == _LEAF and id(_variable(node)) in inputs:
                on_the_way.add(node)
        elif not on_the_way.isdisjoint(below):
            on_the_way.add(node)
        children[node] = below
    return children, on_the_way


def _groups(children: dict[Node, list[Node]], on_the_way: set[Node]) -> list[tuple[list[Node], list[torch.Tensor]]]:
    below: dict[Node, dict[int, torch.Tensor]] = {}
    """Of nodes that are not on the way: the parameters that they lead to."""
    groups: list[tuple[list[Node], list[torch.Tensor]]] = []
    of: dict[int, int] = {}
    """Parameter to its group."""
    for node, nexts in children.items():
        if node not in on_the_way:
            if nexts:
                below[node] = {key: one for child in nexts for key, one in below.get(child, {}).items()}
            elif type(node).__name__ == _LEAF:
                variable = _variable(node)
                below[node] = {id(variable): variable}
            continue
        found = {key: one for child in nexts for key, one in below.get(child, {}).items()}
        if not found:
            continue
        known = sorted({of[key] for key in found if key in of})
        if known:
            into = known[0]
            for other in known[1:]:
                nodes, parameters = groups[other]
                groups[into][0].extend(nodes)
                groups[into][1].extend(parameters)
                groups[other] = ([], [])
                of.update({id(one): into for one in parameters})
            groups[into][0].append(node)
            groups[into][1].extend(one for key, one in found.items() if key not in of)
        else:
            into = len(groups)
            groups.append(([node], list(found.values())))
        of.update(dict.fromkeys(found, into))
    return [group for group in groups if group[0]]


def _variable(node: Any) -> torch.Tensor:
    variable: torch.Tensor = node.variable
    return variable


def _keep(node: Node, kept: dict[Node, tuple[torch.Tensor | None, ...]]) -> RemovableHandle:
    def keep(gradients: Sequence[torch.Tensor | None]) -> None:
        kept[node] = tuple(gradients)

    return node.register_prehook(keep)


def _replace(node: Node, gradients: tuple[torch.Tensor | None, ...]) -> RemovableHandle:
    return node.register_prehook(lambda _: gradients)
