// The exchange between ranks: what arrives, in which order, and who is to blame when nothing does.
#include "exchange_group.hpp"

#include <algorithm>
#include <cstring>
#include <map>
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

// Of another size or type, the receive first or the message first, kept or offered: these calls end, and the next ones do well.
void a_message_that_does_not_fit_ends_its_calls_only(const std::vector<int>& nodes) {
  Ranks ranks(nodes, 30 * second);
  std::uint64_t number = 0;
  for (const std::size_t bytes : {std::size_t{40}, std::size_t{400'000}}) {
    for (const bool type : {false, true}) {
      for (const bool sent_first : {false, true}) {
        Bytes data(bytes + 4), in(bytes + 4, 'k');
        const auto receive_one = [&] { return ranks.at(1).receive(0, in.data(), type ? bytes : bytes + 4, type ? ff::DType::i32 : ff::DType::f32, 0); };
        std::shared_ptr<ff::Work> receive = sent_first ? nullptr : receive_one();
        const auto send = ranks.at(0).send(1, data.data(), bytes, ff::DType::f32, 0);
        const auto marker = ranks.at(0).send(1, data.data(), 4, ff::DType::f32, 5);
        expect_well(*ranks.at(1).receive(0, data.data(), 4, ff::DType::f32, 5));  // what was sent before is there
        expect_well(*marker);
        if (sent_first) receive = receive_one();
        const std::string first = "rank 0 called send #" + std::to_string(number) + " to rank 1 (" + std::to_string(bytes / 4) + " f32, tag 0), but rank 1 called recv #";
        const std::string words = first + std::to_string(number + (sent_first ? 1 : 0)) + " from rank 0 (";
        expect_words(waited(receive), ff::FailureKind::mismatch, -1, {words});
        CHECK(in == Bytes(bytes + 4, 'k'));
        if (bytes > 100) {
          expect_words(waited(send), ff::FailureKind::mismatch, -1, {words, "both calls have failed"});
        } else {
          expect_well(*send);  // it was over before
        }
        number += 2;
      }
    }
  }
  CHECK(!ranks.window_of(0).failed() && !ranks.window_of(1).failed());
}

// Each is called for in the reverse order, from below and above the limit of what is sent unasked.
void messages_with_other_tags_hold_up_nobody(const std::vector<int>& nodes) {
  Ranks ranks(nodes, 30 * second);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{100}, std::size_t{65'535}, std::size_t{65'536}, std::size_t{3'000'000}}) {
    constexpr std::size_t count = 12;
    std::vector<Bytes> out, in(count, Bytes(bytes));
    std::vector<std::shared_ptr<ff::Work>> works;
    for (std::size_t tag = 0; tag < count; ++tag) out.push_back(pattern(0, 1, tag, bytes));
    for (std::size_t tag = 0; tag < count; ++tag) works.push_back(ranks.at(0).send(1, out[tag].data(), bytes, ff::DType::u8, static_cast<int>(tag)));
    for (std::size_t tag = count; tag-- > 0;) expect_well(*ranks.at(1).receive(0, in[tag].data(), bytes, ff::DType::u8, static_cast<int>(tag)));
    for (const auto& work : works) expect_well(*work);
    CHECK(in == out);
  }
}

// Once the credit is used up, messages without bytes are offered, too.
void empty_messages_need_no_credit(const std::vector<int>& nodes) {
  Ranks ranks(nodes, 30 * second);
  Bytes data(4000), in(4000);
  std::vector<std::shared_ptr<ff::Work>> works;
  for (int i = 0; i < 130; ++i) works.push_back(ranks.at(0).send(1, data.data(), data.size(), ff::DType::u8, 1));
  for (int i = 0; i < 3; ++i) works.push_back(ranks.at(0).send(1, data.data(), 0, ff::DType::u8, 2));
  const auto early = ranks.at(1).receive(0, nullptr, 0, ff::DType::u8, 3);
  for (int i = 0; i < 3; ++i) expect_well(*ranks.at(1).receive(0, nullptr, 0, ff::DType::u8, 2));
  works.push_back(ranks.at(0).send(1, data.data(), 0, ff::DType::u8, 3));
  expect_well(*early);
  for (int i = 0; i < 130; ++i) expect_well(*ranks.at(1).receive(0, in.data(), in.size(), ff::DType::u8, 1));
  for (const auto& work : works) expect_well(*work);
}

// A random program: every rank sends messages with random tags to random ranks, and receives those of a tag by naming
// ranks or from any, in random order. All arrive, and those of one rank with one tag in the order in which they were sent.
void random_histories(const std::vector<int>& nodes, unsigned seed) {
  Ranks ranks(nodes, 30 * second);
  std::mt19937 chance(seed);
  constexpr int tags = 5, messages = 120;
  const std::size_t sizes[tags] = {8, 300, 65'535, 65'536, 400'000};
  struct Call {
    int rank, other, tag;  // other: of a receive any_rank, where it is from any
    std::uint32_t number;  // of a send, among those of this pair and tag
  };
  std::vector<Call> sends, receives;
  std::map<std::pair<std::pair<int, int>, int>, std::uint32_t> sent;
  for (int i = 0; i < messages; ++i) {
    const int from = static_cast<int>(chance() % nodes.size());
    const int to = static_cast<int>((static_cast<std::size_t>(from) + 1 + chance() % (nodes.size() - 1)) % nodes.size());
    const int tag = static_cast<int>(chance() % tags);
    sends.push_back({from, to, tag, sent[{{from, to}, tag}]++});
    const bool any = (seed + static_cast<unsigned>(to * tags + tag)) % 2 == 0;  // all of a tag at one rank
    receives.push_back({to, any ? ff::any_rank : from, tag, 0});
  }
  std::shuffle(receives.begin(), receives.end(), chance);
  std::vector<Bytes> out, in;
  std::vector<std::shared_ptr<ff::Work>> sending(sends.size()), receiving(receives.size());
  for (const Call& call : sends) {
    Bytes bytes = pattern(call.rank, call.other, call.number, sizes[call.tag]);
    std::memcpy(bytes.data(), &call.number, sizeof call.number);
    out.push_back(std::move(bytes));
  }
  for (const Call& call : receives) in.emplace_back(sizes[call.tag]);
  std::vector<std::thread> threads;
  for (int me = 0; me < ranks.size(); ++me) {
    threads.emplace_back([&, me] {
      for (std::size_t i = 0; i < sends.size(); ++i) {
        if (sends[i].rank == me) sending[i] = ranks.at(me).send(sends[i].other, out[i].data(), out[i].size(), ff::DType::u8, sends[i].tag);
        if (receives[i].rank == me) receiving[i] = ranks.at(me).receive(receives[i].other, in[i].data(), in[i].size(), ff::DType::u8, receives[i].tag);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto* works : {&sending, &receiving}) {
    for (const auto& work : *works) expect_well(*work);
  }
  std::map<std::pair<std::pair<int, int>, int>, std::uint32_t> got;
  for (std::size_t i = 0; i < receives.size(); ++i) {
    const int source = receiving[i]->source();
    CHECK(receives[i].other == ff::any_rank || receives[i].other == source);
    const std::uint32_t number = got[{{source, receives[i].rank}, receives[i].tag}]++;
    Bytes expected = pattern(source, receives[i].rank, number, in[i].size());
    std::memcpy(expected.data(), &number, sizeof number);
    CHECK(in[i] == expected);
  }
  CHECK(got == sent);
}

void ranks_take_turns_where_any_may_send(const std::vector<int>& nodes) {
  Ranks ranks(nodes, 30 * second);
  Bytes data(4), in(4);
  for (int round = 0; round < 5; ++round) {
    for (int from = 1; from < ranks.size(); ++from) expect_well(*ranks.at(from).send(0, data.data(), 4, ff::DType::f32, 1));
  }
  for (int from = 1; from < ranks.size(); ++from) {  // once the last of each is there, all are
    expect_well(*ranks.at(from).send(0, data.data(), 4, ff::DType::f32, 2));
    expect_well(*ranks.at(0).receive(from, in.data(), 4, ff::DType::f32, 2));
  }
  for (int round = 0; round < 5; ++round) {
    std::vector<int> sources;
    for (int i = 1; i < ranks.size(); ++i) {
      const auto work = ranks.at(0).receive(ff::any_rank, in.data(), 4, ff::DType::f32, 1);
      expect_well(*work);
      sources.push_back(work->source());
    }
    std::sort(sources.begin(), sources.end());
    for (int i = 1; i < ranks.size(); ++i) CHECK(sources[static_cast<std::size_t>(i - 1)] == i);
  }
}

// The earlier of two receives gets the message, whether it names the rank or not.
void the_earlier_receive_is_first() {
  Ranks ranks({0, 0}, 30 * second);
  Bytes one(4), two(4);
  for (const bool any_first : {false, true}) {
    const auto first = ranks.at(0).receive(any_first ? ff::any_rank : 1, one.data(), 4, ff::DType::f32, 3);
    const auto next = ranks.at(0).receive(any_first ? 1 : ff::any_rank, two.data(), 4, ff::DType::f32, 3);
    expect_well(*ranks.at(1).send(0, "abcd", 4, ff::DType::f32, 3));
    expect_well(*first);
    CHECK(!next->done() && one == Bytes({'a', 'b', 'c', 'd'}) && first->source() == 1);
    expect_well(*ranks.at(1).send(0, "efgh", 4, ff::DType::f32, 3));
    expect_well(*next);
    CHECK(two == Bytes({'e', 'f', 'g', 'h'}));
  }
}

void who_could_send_to_a_receive_from_any_is_named(const std::vector<int>& nodes) {
  const auto kind = ff::FailureKind::peer_failed;
  Bytes data(400'000);
  const auto any_at = [&](Ranks& ranks, int rank) { return ranks.at(rank).receive(ff::any_rank, data.data(), 4, ff::DType::f32, 7); };
  Ranks two({nodes[0], nodes[1]}, second / 2);
  expect_words(waited(any_at(two, 0)), kind, 1, {"rank 1 has not called send to rank 0 (recv #0 from any rank (1 f32, tag 7)) for 0."});
  Ranks three(nodes, second / 2);
  expect_words(waited(any_at(three, 0)), kind, -1, {"no rank has called send to rank 0 (recv #0 from any rank"});
  Ranks unknown(nodes, second / 4, false);
  expect_words(waited(any_at(unknown, 0)), kind, -1, {"no rank has called send to rank 0"});
  Ranks chain(nodes, second / 2);  // 0 waits for any, 1 for 2: it is 2
  std::vector<ff::Failure> failures(2);
  std::thread first([&] { failures[0] = waited(any_at(chain, 0)); });
  std::thread next([&] {
    failures[1] = waited(chain.at(1).receive(2, data.data(), 4, ff::DType::f32, 0));
    chain.window_of(0).fail(failures[1]);
  });
  first.join();
  next.join();
  for (const auto& failure : failures) expect_words(failure, kind, 2, {"rank 2 has not called send to rank 1"});
  Ranks cycle({nodes[0], nodes[1]}, second / 2);
  const auto large = cycle.at(1).send(0, data.data(), data.size(), ff::DType::f32, 8);
  std::thread other([&] { waited(large); });
  const ff::Failure failure = waited(any_at(cycle, 0));
  cycle.window_of(1).fail(failure);
  other.join();
  expect_words(failure, ff::FailureKind::usage, -1, {"the ranks wait for each other: rank 0 in recv #0 from any rank (1 f32, tag 7), and all others for rank 0"});
  Ranks left({0, 0}, 30 * second);
  const auto receive = any_at(left, 0);
  left.at(1).close();
  expect_words(waited(receive), kind, -1, {"all other ranks closed their communicators before recv #0 from any rank"});
}

// The receive with tag 1 is not waited for: whoever waits for the one behind it is told about that.
void the_call_that_somebody_waits_for_is_watched(const std::vector<int>& nodes) {
  Ranks ranks(nodes, second / 2);
  Bytes data(4), other(4);
  const auto idle = ranks.at(0).receive(1, data.data(), 4, ff::DType::f32, 1);
  expect_well(*ranks.at(1).send(0, data.data(), 4, ff::DType::f32, 9));
  const auto failure = waited(ranks.at(0).receive(1, other.data(), 4, ff::DType::f32, 2));
  expect_words(failure, ff::FailureKind::peer_failed, 1, {"rank 1 has not called send to rank 0 (recv #1, tag 2) for", "messages from it with other tags wait for a recv: 9"});
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
  for (const auto& nodes : {std::vector<int>{0, 0}, {0, 1}}) {
    a_message_that_does_not_fit_ends_its_calls_only(nodes);
    messages_with_other_tags_hold_up_nobody(nodes);
    empty_messages_need_no_credit(nodes);
    the_call_that_somebody_waits_for_is_watched(nodes);
  }
  for (unsigned seed = 1; seed <= 6; ++seed) random_histories(layouts[seed % layouts.size()], seed);
  ranks_take_turns_where_any_may_send({0, 0, 0, 0});
  ranks_take_turns_where_any_may_send({0, 1, 2});
  the_earlier_receive_is_first();
  who_could_send_to_a_receive_from_any_is_named({0, 0, 0});
  who_could_send_to_a_receive_from_any_is_named({0, 1, 1});
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
