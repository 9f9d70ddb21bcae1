"""Dispatch and combine between real communicators, beside a plain oracle: bits, bytes, errors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.collectives.dispatching import combined, expected_rows, random_choices, travelled
from tests.support.collectives.thread_ranks import together
from tests.support.patience import allowed_s

from fireflyer.base.errors import Aborted, FireflyerError, PeerFailed, Timeout, UsageError
from fireflyer.collectives import Communicator
from fireflyer.collectives.dispatch import Dispatcher, ExpertPlacement
from fireflyer.collectives.dispatch.messages import HEADER_BYTES, Header, pack_header
from fireflyer.collectives.dispatch.traffic import traffic
from fireflyer.collectives.p2p.exchange import MAX_TAG
from fireflyer.collectives.tokens import token_codec

Array = npt.NDArray[Any]
NODES = [0, 0, 1, 1]
WIDTH = 128
TWO: dict[str, Any] = {"width": WIDTH, "per_token": 2, "max_tokens": 64, "dtype": "f32"}


def draw(
    seed: int, ranks: int, experts: int, per_token: int, kind: str
) -> tuple[list[Array], list[Array], list[Array]]:
    """Tokens, choices and weights of each rank; a rank may have no tokens."""
    rng = np.random.default_rng(seed)
    counts = [int(rng.choice([0, 1, 5, 24])) for _ in range(ranks)]
    values = [rng.standard_normal((count, WIDTH)).astype(np.float32) for count in counts]
    choices = [random_choices(rng, count, per_token, experts, kind) for count in counts]
    return values, choices, [rng.random(choice.shape).astype(np.float32) for choice in choices]


def computed(rows: Array, experts: Array) -> Array:
    """What the experts of this test give: differs by expert, and by value."""
    scaled: Array = rows * (1 + np.repeat(experts[0], experts[1]).astype(rows.dtype)[:, None] / 8)
    return scaled


MIXED = ("fp8", "bf16")


@pytest.mark.parametrize(
    ("nodes", "codecs"),
    [
        *(pytest.param(nodes, MIXED, id="".join(map(str, nodes))) for nodes in ([0], [0, 0], [0, 1, 0, 1], [0, 1, 2])),
        *(pytest.param(NODES, pair, id="-".join(pair)) for pair in (MIXED, ("f32", "f32"), ("logfmt10", "logfmt8"))),
    ],
)
def test_every_bit_is_that_of_the_plain_oracle(nodes: list[int], codecs: tuple[str, str]) -> None:
    ranks, per_token = len(nodes), 3
    placement = ExpertPlacement(np.random.default_rng(1).permutation(np.arange(12) % ranks).tolist(), nodes)
    drawn = [draw(seed, ranks, 12, per_token, kind) for seed, kind in enumerate(["even", "one", "few"] * 2)]

    def body(comm: Communicator) -> None:
        with Dispatcher(
            comm, placement, width=WIDTH, per_token=per_token, max_tokens=24, dtype="f32",
            dispatch_codec=codecs[0], combine_codec=codecs[1],
        ) as dispatcher:  # fmt: skip
            for values, choices, weights in drawn:
                mine = comm.rank
                arrived = dispatcher.start_dispatch(values[mine], choices[mine], weights[mine]).wait()
                expected = expected_rows(values, choices, weights, placement, mine, codecs[0])
                assert np.array_equal(arrived.rows, np.array([one[3] for one in expected]).reshape(-1, WIDTH))
                assert arrived.weights.tolist() == [one[4] for one in expected]
                own = placement.experts_of(mine)
                assert arrived.counts.tolist() == [sum(one[0] == expert for one in expected) for expert in own]
                outputs = computed(arrived.rows, np.array([own, arrived.counts])) * arrived.weights[:, None]
                found, back = dispatcher.start_combine(arrived.routed, outputs, arrived.weights).wait()
                sent = travelled(values[mine], codecs[0], np.float32)
                for token, chosen in enumerate(choices[mine]):
                    parts = {
                        int(expert): sent[token : token + 1] * np.float32(1 + expert / 8) * weight
                        for expert, weight in zip(chosen, weights[mine][token], strict=True)
                    }
                    assert np.array_equal(found[token], combined(parts, placement, codecs[1], np.float32)[0])
                assert back is not None
                assert np.array_equal(back, weights[mine])
                assert np.array_equal(dispatcher.start_rows(arrived.routed, values[mine]).wait(), arrived.rows)

    assert together(nodes, body) == [None] * ranks


def test_the_bytes_sent_are_those_of_the_plan() -> None:
    placement = ExpertPlacement.even(16, NODES)
    values, choices, _ = draw(3, 4, 16, 4, "even")
    codecs: dict[str, Any] = {"dispatch_codec": "fp8", "combine_codec": "bf16"}

    def body(comm: Communicator) -> tuple[Array, Array]:
        with Dispatcher(comm, placement, width=WIDTH, per_token=4, max_tokens=64, dtype="f32", **codecs) as dispatcher:
            arrived = dispatcher.start_dispatch(values[comm.rank], choices[comm.rank]).wait()
            first = dispatcher.sent_bytes
            dispatcher.start_combine(arrived.routed, arrived.rows).wait()
            return first, dispatcher.sent_bytes - first

    planned = traffic(
        choices,
        placement,
        dispatch_row_bytes=token_codec("fp8").row_bytes(WIDTH),
        combine_row_bytes=token_codec("bf16").row_bytes(WIDTH),
    )
    found = together(NODES, body)
    assert np.array_equal([one[0] for one in found], planned.dispatch)
    assert np.array_equal([one[1] for one in found], planned.combine)


def test_between_nodes_a_token_is_sent_once_to_each_node_that_has_one_of_its_experts() -> None:
    placement = ExpertPlacement.even(16, NODES)
    _, choices, _ = draw(3, 4, 16, 4, "even")
    with_rows, without = (
        traffic(choices, placement, dispatch_row_bytes=size, combine_row_bytes=size) for size in (1000, 0)
    )
    for one, other in ((with_rows.dispatch, without.dispatch), (with_rows.combine.T, without.combine.T)):
        for source, chosen in enumerate(choices):
            here = placement.node_of_rank[source]
            copies = sum(any(placement.node_of_expert[expert] != here for expert in token) for token in chosen)
            abroad = placement.node_of_rank != here
            assert (one - other)[source, abroad].sum() == 1000 * copies


def test_operations_of_several_dispatchers_overlap_and_do_not_mix() -> None:
    placement = ExpertPlacement.even(8, NODES)
    values, choices, _ = draw(2, 4, 8, 2, "even")

    def body(comm: Communicator) -> None:
        layers = [Dispatcher(comm, placement, **TWO) for _ in range(3)]
        order = [0, 1, 2] if comm.rank % 2 else [2, 0, 1]
        flights = {
            layer: layers[layer].start_dispatch(values[comm.rank] * np.float32(2**layer), choices[comm.rank])
            for layer in order
        }
        total = np.ones(5)
        comm.allreduce(total)  # other operations of the communicator go on
        rows = [flights[layer].wait().rows for layer in range(3)]
        assert np.array_equal(rows[1], rows[0] * 2)
        assert np.array_equal(rows[2], rows[0] * 4)
        for layer in layers:
            layer.close()

    assert together(NODES, body) == [None] * 4


def test_sums_do_not_depend_on_which_rank_of_a_node_has_an_expert() -> None:
    values, choices, weights = draw(7, 4, 8, 4, "even")
    found = []
    for placement in (
        ExpertPlacement([0, 0, 1, 1, 2, 2, 3, 3], NODES),
        ExpertPlacement([1, 0, 0, 1, 3, 3, 3, 2], NODES),
    ):

        def body(comm: Communicator, placement: ExpertPlacement = placement) -> Array:
            with Dispatcher(comm, placement, width=WIDTH, per_token=4, max_tokens=64, dtype="f32") as dispatcher:
                arrived = dispatcher.start_dispatch(values[comm.rank], choices[comm.rank], weights[comm.rank]).wait()
                experts = np.array([placement.experts_of(comm.rank), arrived.counts])
                outputs = computed(arrived.rows, experts) * arrived.weights[:, None]
                return dispatcher.start_combine(arrived.routed, outputs).wait()[0]

        found.append(together(NODES, body))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


class TestRefusals:
    def test_ranks_with_other_arguments_are_named_before_anything_is_sent(self) -> None:
        def body(comm: Communicator) -> None:
            placement = ExpertPlacement([0, 1, 1, 0] if comm.rank == 1 else [0, 0, 1, 1], [0, 1])
            Dispatcher(comm, placement, **TWO)

        said = [str(error) for error in together([0, 1], body)]
        assert "rank 1 makes a dispatcher with another placement of experts than rank 0" in said[0]
        assert "rank 0 makes a dispatcher with another placement of experts than rank 1" in said[1]

    def test_ranks_at_different_operations_all_get_an_error_and_no_numbers(self) -> None:
        placement = ExpertPlacement.even(4, NODES)
        choices = np.array([[0, 3], [1, 2]])
        values = np.ones((2, WIDTH), np.float32)

        def body(comm: Communicator) -> None:
            dispatcher = Dispatcher(comm, placement, **TWO)
            arrived = dispatcher.start_dispatch(values, choices).wait()
            if comm.rank == 2:  # forgets the combine
                dispatcher.start_dispatch(values, choices).wait()
            else:
                dispatcher.start_combine(arrived.routed, arrived.rows).wait()

        errors = together(NODES, body)
        assert all(isinstance(error, UsageError | Aborted) for error in errors)
        assert any("all ranks must call the same operations of the same dispatchers" in str(error) for error in errors)

    def test_routes_of_another_call_are_refused(self) -> None:
        placement = ExpertPlacement.even(4, [0, 1])
        choices, values = np.array([[0, 3], [1, 2]]), np.ones((2, WIDTH), np.float32)

        def body(comm: Communicator) -> None:
            dispatcher = Dispatcher(comm, placement, **TWO)
            calls = [dispatcher.start_dispatch(values, choices).wait() for _ in range(2)]
            chosen = calls[comm.rank]
            dispatcher.start_combine(chosen.routed, chosen.rows).wait()

        errors = together([0, 1], body)
        assert all(isinstance(error, UsageError | Aborted) for error in errors)
        assert any("with the routes of call" in str(error) for error in errors)

    def test_scalars_on_some_ranks_only_are_refused(self) -> None:
        placement = ExpertPlacement.even(4, [0, 1])
        choices, values = np.array([[0, 3], [1, 2]]), np.ones((2, WIDTH), np.float32)

        def body(comm: Communicator) -> None:
            dispatcher = Dispatcher(comm, placement, **TWO)
            arrived = dispatcher.start_dispatch(values, choices).wait()
            scalars = arrived.weights if comm.rank == 0 else None
            dispatcher.start_combine(arrived.routed, arrived.rows, scalars).wait()

        errors = together([0, 1], body)
        assert all(isinstance(error, UsageError | Aborted) for error in errors)
        assert any("do all ranks pass scalars, or none?" in str(error) for error in errors)

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            (Header(1, 0, 0, "routes to nodes", 1, 2), "is at call 0 of dispatcher 1"),
            (Header(0, 3, 3, "routes to nodes", 1, 2), "is at call 3 of dispatcher 0"),
            (Header(0, 0, 0, "rows to nodes", 1, 2), "rows to nodes"),
            (Header(0, 0, 0, "routes to nodes", 65, 2), "announced 65 rows and 2 entries, of at most 64 and 128"),
            (Header(0, 0, 0, "routes to nodes", 1, 1 << 62), "of at most 64 and 128"),
            (Header(0, 0, 0, "routes to nodes", -1, 2), "announced -1 rows"),
            (None, "sent no header of a dispatch"),
        ],
        ids=str,
    )
    def test_a_message_that_does_not_belong_here_is_refused(self, header: Header | None, said: str) -> None:
        """Rank 1 writes its messages by hand."""
        placement = ExpertPlacement.even(4, [0, 1])

        def body(comm: Communicator) -> None:
            dispatcher = Dispatcher(comm, placement, **TWO)
            if comm.rank == 0:
                dispatcher.start_dispatch(np.ones((1, WIDTH), np.float32), np.array([[0, 3]])).wait()
            else:
                raw = np.full(HEADER_BYTES, 7, np.uint8) if header is None else pack_header(header)
                comm.send(raw, to=0, tag=MAX_TAG)
                comm.recv(np.zeros(10), source=0)  # until rank 0 gives up

        errors = together([0, 1], body)
        assert isinstance(errors[0], UsageError | PeerFailed)
        assert said in str(errors[0])
        assert isinstance(errors[1], Aborted)
        assert "dispatcher 0 of rank 0" in str(errors[1])

    @pytest.mark.parametrize(
        "routes", [[0, 0, 2, 1], [5, 0, 2, 3], [0, 0, 0, 2], [0, 0, 2, 99], [-1, 0, 2, 3]], ids=str
    )
    def test_routes_that_no_plan_has_are_refused(self, routes: list[int]) -> None:
        """Two entries (row, row, expert, expert) of one row; experts 2 and 3 are on rank 1."""
        placement = ExpertPlacement.even(4, [0, 1])

        def body(comm: Communicator) -> None:
            dispatcher = Dispatcher(comm, placement, **TWO)
            if comm.rank == 1:
                dispatcher.start_dispatch(np.ones((1, WIDTH), np.float32), np.array([[0, 3]])).wait()
            else:
                comm.send(pack_header(Header(0, 0, 0, "routes to nodes", 1, 2)), to=1, tag=MAX_TAG)
                comm.send(np.array([*routes, 0, 0], "<i4").view(np.uint8), to=1, tag=MAX_TAG)
                comm.recv(np.zeros(10), source=1)

        errors = together([0, 1], body)
        assert isinstance(errors[1], PeerFailed)
        assert errors[1].rank == 0
        assert "rank 0 sent routes that no plan has" in str(errors[1])

    def test_wrong_arguments_are_said_and_the_next_call_goes_on(self) -> None:
        placement = ExpertPlacement.even(4, [0])

        def body(comm: Communicator) -> None:
            with Dispatcher(comm, placement, **TWO) as dispatcher:
                values, choices = np.ones((2, WIDTH), np.float32), np.array([[0, 3], [1, 2]])
                for wrong, message in (
                    ((values[:, :5], choices), "it needs some rows of 128 float32"),
                    ((values, choices[:1]), r"shape \(1, 2\) for 2 tokens"),
                    ((values, np.array([[0, 0], [1, 2]])), "token 0 chose expert 0 twice"),
                    ((values, np.array([[0, 1], [1, 4]])), "a token chose expert 4; there are experts 0 to 3"),
                    ((values, np.array([[0, 1], [1, -2]])), "a token chose expert -2"),
                    ((values, choices.astype(np.float32)), "pass integers"),
                    ((values, choices, np.ones(3)), r"weights has shape \(3,\)"),
                    ((np.ones((65, WIDTH), np.float32), np.tile(choices[:1], (65, 1))), "at most 64 tokens"),
                ):
                    with pytest.raises(UsageError, match=message):
                        dispatcher.start_dispatch(*wrong)
                arrived = dispatcher.start_dispatch(values, choices).wait()
                with pytest.raises(UsageError, match="it needs 4 rows of 128"):
                    dispatcher.start_combine(arrived.routed, values)
            with pytest.raises(UsageError, match="is closed; make another"):
                dispatcher.start_dispatch(values, choices)

        assert together([0], body) == [None]

    def test_placements_and_widths_that_do_not_fit(self) -> None:
        with pytest.raises(UsageError, match=r"nodes have \[2, 1\] ranks"):
            ExpertPlacement([0, 1], [0, 0, 1])
        with pytest.raises(UsageError, match="an expert is placed on rank 4"):
            ExpertPlacement([0, 4], NODES)
        with pytest.raises(UsageError, match="6 experts do not divide among 4 ranks"):
            ExpertPlacement.even(6, NODES)

        def body(comm: Communicator) -> None:
            with pytest.raises(UsageError, match="not made of tiles"):
                Dispatcher(
                    comm, ExpertPlacement.even(4, [0]), width=100, per_token=1, max_tokens=1, combine_codec="fp8"
                )
            with pytest.raises(UsageError, match="the placement has 4 ranks, the communicator 1"):
                Dispatcher(comm, ExpertPlacement.even(4, NODES), width=128, per_token=1, max_tokens=1)

        assert together([0], body) == [None]


class TestFailures:
    def test_an_abort_outside_of_an_exchange_wakes_peers_with_its_reason(self) -> None:
        placement = ExpertPlacement.even(4, NODES)

        def body(comm: Communicator) -> None:
            dispatcher = Dispatcher(comm, placement, **TWO)
            if comm.rank == 3:
                dispatcher.abort("the data loader has ended")
                return
            dispatcher.start_dispatch(np.ones((1, WIDTH), np.float32), np.array([[0, 3]])).wait()

        errors: list[FireflyerError] = together(NODES, body)[:3]
        assert all(isinstance(error, Aborted) for error in errors)
        assert all("dispatcher 0 of rank 3: the data loader has ended" in str(error) for error in errors)

    def test_a_rank_that_leaves_with_an_error_aborts(self) -> None:
        placement = ExpertPlacement.even(4, [0, 1])

        def body(comm: Communicator) -> None:
            with Dispatcher(comm, placement, **TWO) as dispatcher:
                if comm.rank == 1:
                    raise UsageError("the loss is not finite")
                dispatcher.start_dispatch(np.ones((1, WIDTH), np.float32), np.array([[0, 3]])).wait()

        errors = together([0, 1], body)
        assert "UsageError: the loss is not finite" in str(errors[0])

    def test_a_wait_with_a_limit_may_be_repeated_until_the_slow_rank_has_come(self) -> None:
        placement = ExpertPlacement.even(4, [0, 1])
        tried = threading.Event()

        def body(comm: Communicator) -> Array:
            with Dispatcher(comm, placement, **TWO) as dispatcher:
                values, choices = np.full((1, WIDTH), comm.rank, np.float32), np.array([[0, 3]])
                if comm.rank == 1:
                    assert tried.wait(allowed_s(60))
                flight = dispatcher.start_dispatch(values, choices)
                if comm.rank == 0:
                    with pytest.raises(Timeout, match=r"dispatch \(call 0 of dispatcher 0\) has not completed"):
                        flight.wait(1_000_000)
                    assert not flight.done()
                    tried.set()
                return flight.wait().rows[:, 0]

        assert [rows.tolist() for rows in together([0, 1], body)] == [[0, 1], [0, 1]]
