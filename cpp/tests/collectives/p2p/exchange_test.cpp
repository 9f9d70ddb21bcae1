// The exchange between ranks: what arrives, in which order, and who is to blame when nothing does.
#include "exchange_group.hpp"

#include <cstring>
#include <random>

using namespace exchange_test;

namespace {

using Bytes = std::vector<char>;

Bytes pattern(int from, int to, std::size_t number, std::size_t bytes) {
  Bytes made(bytes);
  std::uint32_t state = static_cast<std::uint32_t>(from * 7919 + to * 104729) + static_cast<std::uint32_t>(number) * 31U + 1U;
  for (auto& byte : made) byte = static_cast<char>((state = state * 1664525U + 1013904223U) >> 24);
  return made;
}

// Every rank sends to every other one, several threads at once, while receives come late, early and in between.
void messages_arrive_in_order(const std::vector<int>& nodes) {
  Ranks ranks(nodes, 30 * second);
  const std::vector<std::size_t> sizes{0, 1, 100, 65'535, 65'536, 300'000, 7, 1'000'001, 64, 64, 262'144};
  std::vector<std::thread> threads;
  for (int me = 0; me < ranks.size(); ++me) {
    for (int other = 0; other < ranks.size(); ++other) {
      if (me == other) continue;
      threads.emplace_back([&, me, other] {
        for (std::size_t i = 0; i < sizes.size(); ++i) {
          const Bytes bytes = pattern(me, other, i, sizes[i]);
          expect_well(*ranks.at(me).send(other, bytes.data(), bytes.size(), ff::DType::f8e4m3, static_cast<int>(i)));
        }
      });
      threads.emplace_back([&, me, other] {
        std::mt19937 chance(static_cast<unsigned>(me * 100 + other));
        for (std::size_t i = 0; i < sizes.size(); ++i) {
          if (chance() % 3 == 0) std::this_thread::yield();
          Bytes bytes(sizes[i]);
          expect_well(*ranks.at(me).receive(other, bytes.data(), bytes.size(), ff::DType::f8e4m3, static_cast<int>(i)));
          CHECK(bytes == pattern(other, me, i, sizes[i]));
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

// More than a receiver keeps for a peer: what is too much is offered instead, and nothing is lost or reordered.
void credit_bounds_what_nobody_wants_yet(const std::vector<int>& nodes) {
  Ranks ranks(nodes, 30 * second);
  constexpr std::size_t count = 300, bytes = 4000;
  std::vector<Bytes> sent, got(count, Bytes(bytes));
  std::vector<std::shared_ptr<ff::Work>> works;
  for (std::size_t i = 0; i < count; ++i) {
    sent.push_back(pattern(0, 1, i, bytes));
    works.push_back(ranks.at(0).send(1, sent[i].data(), bytes, ff::DType::f8e4m3, 0));
  }
  CHECK(works.front()->wait(60 * second));
  CHECK(!works.back()->done());
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < count; ++i) works.push_back(ranks.at(1).receive(0, got[i].data(), bytes, ff::DType::f8e4m3, 0));
    for (const auto& work : works) expect_well(*work);
    CHECK(got == sent);
    works.clear();
    for (std::size_t i = 0; round == 0 && i < count; ++i) works.push_back(ranks.at(0).send(1, sent[i].data(), bytes, ff::DType::f8e4m3, 0));
    got.assign(count, Bytes(bytes));
  }
}

void parts_of_operations_meet(const std::vector<int>& nodes) {
  Ranks ranks(nodes, 30 * second);
  std::vector<std::thread> threads;
  for (int me = 0; me < ranks.size(); ++me) {
    threads.emplace_back([&, me] {
      for (std::uint64_t seq = 0; seq < 30; ++seq) {
        const ff::OpDescriptor op{seq, 0, ff::OpKind::all_to_all, ff::DType::f8e4m3, -1};
        const auto bytes_of = [&](int from, int to) { return (static_cast<std::size_t>(from) * 3 + static_cast<std::size_t>(to) + seq) % 5 * (seq % 3 == 0 ? 50'000 : 11); };
        std::vector<Bytes> out, in;
        std::vector<ff::Part> outgoing, incoming;
        for (int other = 0; other < ranks.size(); ++other) {
          out.push_back(pattern(me, other, seq, bytes_of(me, other)));
          in.emplace_back(bytes_of(other, me));
        }
        for (int other = 0; other < ranks.size(); ++other) {
          const auto o = static_cast<std::size_t>(other);
          if (other == me) continue;
          outgoing.push_back({other, out[o].data(), out[o].size()});
          incoming.push_back({other, in[o].data(), in[o].size()});
        }
        ranks.enter(me, op);
        expect_well(*ranks.at(me).start(op, outgoing, incoming));
        ranks.leave(me, op);
        for (int other = 0; other < ranks.size(); ++other) {
          if (other != me) CHECK(in[static_cast<std::size_t>(other)] == pattern(other, me, seq, bytes_of(other, me)));
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

void connections_may_come_after_the_calls() {
  Ranks ranks({0, 0}, 30 * second, false);
  Bytes out = pattern(0, 1, 0, 200'000), in(200'000);
  const auto small = ranks.at(0).send(1, out.data(), 10, ff::DType::f8e4m3, 0), large = ranks.at(0).send(1, out.data(), out.size(), ff::DType::f8e4m3, 0);
  const auto first = ranks.at(1).receive(0, in.data(), 10, ff::DType::f8e4m3, 0), second_one = ranks.at(1).receive(0, in.data(), in.size(), ff::DType::f8e4m3, 0);
  CHECK(!small->done() && !first->done());
  ranks.connect(1, 0);
  for (const auto& work : {small, large, first, second_one}) expect_well(*work);
  CHECK(in == out);
}

// A thread that waits for the work, as a program in a blocking call does.
ff::Failure waited(const std::shared_ptr<ff::Work>& work) { return expect_failure(*work); }

void unlike_calls_fail_on_both_sides(const std::vector<int>& nodes) {
  for (const std::size_t bytes : {std::size_t{40}, std::size_t{400'000}}) {
    for (const bool tag : {false, true}) {
      Ranks ranks(nodes, 2 * second);
      Bytes data(bytes + 4);
      const auto receive = ranks.at(1).receive(0, data.data(), tag ? bytes : bytes + 4, ff::DType::f32, tag ? 1 : 0);
      const auto send = ranks.at(0).send(1, data.data(), bytes, ff::DType::f32, 0);
      expect_words(waited(receive), ff::FailureKind::usage, -1, {"rank 0 called send #0 to rank 1 (", "but rank 1 called recv #0 from rank 0 ("});
      if (nodes[0] == nodes[1]) {
        const auto later = ranks.at(0).send(1, data.data(), 4, ff::DType::f32, 0);
        CHECK(waited(later).kind == ff::FailureKind::usage);
      } else {
        ranks.window_of(0).fail(ranks.window_of(1).failure());  // as the leaders' connections would tell it
      }
    }
  }
}

void who_never_calls_is_named(const std::vector<int>& nodes) {
  Ranks ranks(nodes, second / 2);
  Bytes data(100'000);
  const auto receive = ranks.at(0).receive(1, data.data(), 4, ff::DType::f32, 7);
  expect_words(waited(receive), ff::FailureKind::peer_failed, 1, {"rank 1 has not called send to rank 0 (recv #0, tag 7) for 0."});
  Ranks others(nodes, second / 2);
  const auto send = others.at(1).send(0, data.data(), data.size(), ff::DType::f32, 7);
  expect_words(waited(send), ff::FailureKind::peer_failed, 0, {"rank 0 has not called recv from rank 1 (send #0, tag 7)"});
  Ranks third(nodes, second / 2);
  const ff::OpDescriptor op{0, 25'000, ff::OpKind::gather, ff::DType::f32, 0};
  third.enter(0, op);
  const auto gather = third.at(0).start(op, {}, {{1, data.data(), data.size()}});
  expect_words(waited(gather), ff::FailureKind::peer_failed, 1, {"rank 1 has not entered gather #0 for 0."});
}

// 0 waits for 1, which waits for 2, which does nothing: both are told that it is 2.
void the_end_of_a_chain_is_named(const std::vector<int>& nodes) {
  Ranks ranks(nodes, second / 2);
  Bytes data(4);
  std::vector<ff::Failure> failures(2);
  std::thread first([&] { failures[0] = waited(ranks.at(0).receive(1, data.data(), 4, ff::DType::f32, 0)); });
  std::thread next([&] { failures[1] = waited(ranks.at(1).receive(2, data.data(), 4, ff::DType::f32, 0)); });
  next.join();
  if (nodes[0] != nodes[1]) ranks.window_of(0).fail(failures[1]);
  first.join();
  for (const auto& failure : failures) expect_words(failure, ff::FailureKind::peer_failed, 2, {"rank 2 has not called send to rank 1"});
}

void a_cycle_is_named_as_such(const std::vector<int>& nodes) {
  Ranks ranks(nodes, second / 2);
  std::vector<std::thread> threads;
  for (int me = 0; me < ranks.size(); ++me) {
    threads.emplace_back([&, me] {
      Bytes data(400'000);
      const auto work = ranks.at(me).send((me + 1) % ranks.size(), data.data(), data.size(), ff::DType::f32, 0);
      const ff::Failure failure = waited(work);
      expect_words(failure, ff::FailureKind::usage, -1, {"the ranks wait for each other", "rank 0 in send #0 to rank 1", "in send #0 to rank 0"});
      for (int other = 0; other < ranks.size(); ++other) ranks.window_of(other).fail(failure);
    });
  }
  for (auto& thread : threads) thread.join();
}

void who_left_or_broke_off_is_named() {
  Ranks ranks({0, 0}, 30 * second);
  Bytes data(400'000);
  const auto send = ranks.at(0).send(1, data.data(), data.size(), ff::DType::f32, 0);
  ranks.at(1).close();
  expect_words(waited(send), ff::FailureKind::peer_failed, 1, {"rank 1 closed its communicator before send #0 to rank 1"});
  Ranks others({0, 0}, 30 * second, false);
  const auto [mine, theirs] = unix_pair();
  others.at(0).link(1, mine);
  const auto receive = others.at(0).receive(1, data.data(), 4, ff::DType::f32, 0);
  close(theirs);
  expect_words(waited(receive), ff::FailureKind::peer_failed, 1, {"rank 1 died during recv #0 from rank 1", "its connection broke"});
}

void a_failure_elsewhere_ends_everything() {
  Ranks ranks({0, 0, 0}, 30 * second);
  Bytes data(400'000);
  const auto send = ranks.at(0).send(1, data.data(), data.size(), ff::DType::f32, 0), receive = ranks.at(2).receive(0, data.data(), 4, ff::DType::f32, 0);
  ranks.window_of(0).fail(ff::Failure{ff::FailureKind::aborted, 2, 5, "rank 2 gave up"});
  for (const auto& work : {send, receive, ranks.at(1).send(2, data.data(), 4, ff::DType::f32, 0)}) expect_words(waited(work), ff::FailureKind::aborted, 2, {"gave up"});
}

void what_is_pending_is_finished_before_closing() {
  Ranks ranks({0, 1}, 30 * second);
  Bytes out = pattern(0, 1, 0, 3'000'000), in(out.size());
  const auto send = ranks.at(0).send(1, out.data(), out.size(), ff::DType::f8e4m3, 0);
  std::thread closing([&] { ranks.at(0).close(); });
  const auto receive = ranks.at(1).receive(0, in.data(), in.size(), ff::DType::f8e4m3, 0);
  expect_well(*receive);
  closing.join();
  CHECK(send->done() && in == out);
}

}  // namespace

int main() {
  const std::vector<std::vector<int>> layouts{{0, 0}, {0, 1}, {0, 0, 1}, {0, 1, 0, 1}};
  for (const auto& nodes : layouts) messages_arrive_in_order(nodes);
  for (const auto& nodes : layouts) parts_of_operations_meet(nodes);
  credit_bounds_what_nobody_wants_yet({0, 0});
  credit_bounds_what_nobody_wants_yet({0, 1});
  connections_may_come_after_the_calls();
  unlike_calls_fail_on_both_sides({0, 0});
  unlike_calls_fail_on_both_sides({0, 1});
  who_never_calls_is_named({0, 0});
  who_never_calls_is_named({0, 1});
  the_end_of_a_chain_is_named({0, 0, 0});
  the_end_of_a_chain_is_named({0, 1, 1});
  a_cycle_is_named_as_such({0, 0});
  a_cycle_is_named_as_such({0, 1, 2});
  who_left_or_broke_off_is_named();
  a_failure_elsewhere_ends_everything();
  what_is_pending_is_finished_before_closing();
  std::puts("exchange: all well");
  return 0;
}
