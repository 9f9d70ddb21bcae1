// Programs of the other algorithms than trees, as `fireflyer.collectives.planning.programs` builds them for nodes in
// ascending order. What that module says about rounds and blocks holds here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "fireflyer/collectives/group/program.hpp"

class Steps {
 public:
  std::uint32_t add(ff::Action action, int peer, int block, int span, int round, std::vector<std::uint32_t> after = {}) {
    std::sort(after.begin(), after.end());
    made.push_back({action, peer, static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(span), static_cast<std::uint32_t>(round), std::move(after)});
    return static_cast<std::uint32_t>(made.size() - 1);
  }
  std::vector<ff::Step> made;
};

// Lane 1 goes the other way round.
inline ff::Program ring_program(ff::OpKind kind, int nodes, int node, int lane) {
  using enum ff::Action;
  const bool scatters = kind != ff::OpKind::allgather, gathers = kind != ff::OpKind::reduce_scatter;
  const int forward = lane == 0 ? 1 : nodes - 1;
  const auto at = [&](int steps_back) { return (node + (nodes - forward) * steps_back) % nodes; };
  const int following = (node + forward) % nodes, preceding = at(1);
  Steps steps;
  std::vector<std::uint32_t> sent(static_cast<std::size_t>(nodes)), ready;
  if (scatters) {
    for (int k = 0; k < nodes - 1; ++k) {
      sent[static_cast<std::size_t>(at(1 + k))] = steps.add(send_acc, following, at(1 + k), 1, k, ready);
      ready = {steps.add(receive_add, preceding, at(2 + k), 1, k)};
    }
    ready = {steps.add(finish, -1, node, 1, std::max(0, nodes - 2), ready)};
  }
  for (int k = 0; gathers && k < nodes - 1; ++k) {
    const int round = (scatters ? nodes - 1 : 0) + k;
    steps.add(send_result, following, at(k), 1, round, ready);
    std::vector<std::uint32_t> after;
    if (scatters) after = {sent[static_cast<std::size_t>(at(1 + k))]};
    ready = {steps.add(receive_result, preceding, at(1 + k), 1, round, after)};
  }
  const int rounds = std::max(1, (nodes - 1) * (scatters + gathers));
  return {kind, lane, ff::channel_of(ff::Algorithm::ring, lane), static_cast<std::uint32_t>(nodes), static_cast<std::uint32_t>(rounds), steps.made};
}

// Lane 1 numbers the nodes the other way round. Those beyond a power of two go through the node before them.
inline ff::Program halving_doubling_program(ff::OpKind kind, int nodes, int node, int lane) {
  using enum ff::Action;
  const auto turned = [&](int place) { return lane == 0 ? place : nodes - 1 - place; };
  const int place = turned(node);
  int power = 1, levels = 0;
  for (; 2 * power <= nodes; power *= 2) ++levels;
  const int extra = nodes - power, rounds = 2 * levels + 2;
  const auto at = [&](int v) { return turned(v < extra ? 2 * v : v + extra); };
  Steps steps;
  const auto program = [&] {
    return ff::Program{kind, lane, ff::channel_of(ff::Algorithm::halving_doubling, lane), static_cast<std::uint32_t>(power), static_cast<std::uint32_t>(rounds), steps.made};
  };
  if (place < 2 * extra && place % 2 == 1) {
    const auto given = steps.add(send_acc, turned(place - 1), 0, power, 0);
    steps.add(receive_result, turned(place - 1), 0, power, rounds - 1, {given});
    return program();
  }
  const int v = place < 2 * extra ? place / 2 : place - extra;
  std::vector<std::uint32_t> added, sent(static_cast<std::size_t>(power));
  if (v < extra) added = {steps.add(receive_add, turned(place + 1), 0, power, 0)};
  int low = 0, round = 1;
  for (int d = power / 2; d > 0; d /= 2, ++round) {
    const bool high = (v & d) != 0;
    sent[static_cast<std::size_t>(d)] = steps.add(send_acc, at(v ^ d), high ? low : low + d, d, round, added);
    low += high ? d : 0;
    added = {steps.add(receive_add, at(v ^ d), low, d, round, added)};
  }
  std::vector<std::uint32_t> here{steps.add(finish, -1, v, 1, levels, added)};
  for (int d = 1; d < power; d *= 2, ++round) {
    const int mine = v & ~(d - 1);
    steps.add(send_result, at(v ^ d), mine, d, round, here);
    here.push_back(steps.add(receive_result, at(v ^ d), mine ^ d, d, round, {sent[static_cast<std::size_t>(d)]}));
  }
  if (v < extra) steps.add(send_result, turned(place + 1), 0, power, rounds - 1, here);
  return program();
}
