#include "fireflyer/netsim/packet_run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace ff {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

void check(bool fits, const char* words) {
  if (!fits) throw std::invalid_argument(words);
}

}  // namespace

PacketRun::PacketRun(std::vector<double> capacities, std::span<const std::int64_t> from, std::span<const std::int64_t> to, PacketOptions options)
    : options_(std::move(options)) {
  check(from.size() == capacities.size() && to.size() == capacities.size(), "each link has two ends");
  check(options_.packet_bytes > 0 && options_.buffer_bytes >= options_.packet_bytes, "a buffer holds a packet at least");
  check(!options_.lane_weights.empty(), "there is a lane at least");
  for (const double weight : options_.lane_weights) check(weight > 0 && std::isfinite(weight), "weights of lanes are above 0 and finite");
  turn_bytes_ = options_.packet_bytes / *std::min_element(options_.lane_weights.begin(), options_.lane_weights.end());
  for (std::size_t link = 0; link < capacities.size(); ++link) {
    check(capacities[link] > 0 && std::isfinite(capacities[link]), "capacities are above 0 and finite");
    check(from[link] >= 0 && from[link] < none && to[link] >= 0 && to[link] < none, "vertices are numbers from 0 on");
    links_.push_back({capacities[link], static_cast<std::uint32_t>(from[link]), static_cast<std::uint32_t>(to[link])});
  }
  queues_.resize(links_.size() * options_.lane_weights.size());
  for (Queue& queue : queues_) queue.room = options_.buffer_bytes;
  blocked_s_.assign(links_.size(), 0);
  granted_.assign(options_.nodes, 0);
  requests_.resize(options_.nodes);
}

std::uint32_t PacketRun::add_path(std::span<const std::uint32_t> links, std::uint32_t lane) {
  check(!links.empty(), "a path has at least one link");
  check(lane < options_.lane_weights.size(), "a path uses a lane that does not exist");
  for (const std::uint32_t link : links) check(link < links_.size(), "a path uses a link that does not exist");
  for (const std::uint32_t link : links) {
    const std::uint32_t vertex = links_[link].to;
    const bool leads_on = std::ranges::any_of(links, [&](std::uint32_t other) { return links_[other].from == vertex; });
    check(is_node(vertex) || leads_on, "a path ends at a node: a link leads to a switch that none of its links leaves");
  }
  paths_.push_back({path_links_.size(), static_cast<std::uint32_t>(links.size()), lane});
  path_links_.insert(path_links_.end(), links.begin(), links.end());
  return static_cast<std::uint32_t>(paths_.size() - 1);
}

void PacketRun::add_transfers(const TransferArrays& arrays) {
  check(start_s_.empty(), "transfers are given once");
  arrays.check(paths_.size());
  const std::size_t count = arrays.nbytes.size();
  dependencies_ = Dependencies(arrays);
  flow_starts_.assign(arrays.flow_starts.begin(), arrays.flow_starts.end());
  delay_s_.assign(arrays.delay_s.begin(), arrays.delay_s.end());
  latency_s_.assign(arrays.latency_s.begin(), arrays.latency_s.end());
  start_s_.assign(count, infinity);
  finish_s_.assign(count, infinity);
  open_flows_.assign(count, 0);
  target_.assign(count, none);
  for (std::uint32_t transfer = 0; transfer < count; ++transfer) {
    for (std::uint64_t flow = flow_starts_[transfer]; flow < flow_starts_[transfer + 1]; ++flow) {
      check(arrays.flow_paths[flow] >= 0, "each flow has a path");
      const Path& path = paths_[arrays.flow_paths[flow]];
      for (std::uint32_t at = 0; at < path.count; ++at) {
        const std::uint32_t vertex = links_[path_links_[path.first + at]].to;
        if (is_node(vertex)) target_[transfer] = vertex;
      }
      flows_.push_back({transfer, static_cast<std::uint32_t>(arrays.flow_paths[flow]), std::ceil(arrays.nbytes[transfer] * arrays.flow_shares[flow])});
    }
  }
}

void PacketRun::at(double time_s, Kind kind, std::uint32_t number) {
  events_queue_.push_back({time_s, order_++, kind, number});
  std::push_heap(events_queue_.begin(), events_queue_.end());
}

void PacketRun::run() {
  for (const std::uint32_t transfer : dependencies_.first()) begin(transfer);
  while (!events_queue_.empty()) {
    std::pop_heap(events_queue_.begin(), events_queue_.end());
    const Event event = events_queue_.back();
    events_queue_.pop_back();
    now_s_ = event.time_s;
    ++events_;
    handle(event);
  }
}

void PacketRun::handle(const Event& event) {
  switch (event.kind) {
    case Kind::request:
      requests_[target_[event.number]].insert(requests_[target_[event.number]].begin(), event.number);
      grant(target_[event.number]);
      break;
    case Kind::start: start(event.number); break;
    case Kind::sent: sent(event.number); break;
    case Kind::arrived: arrived(event.number); break;
  }
}

// All that it is after has ended.
void PacketRun::begin(std::uint32_t transfer) {
  start_s_[transfer] = now_s_ + delay_s_[transfer];
  const bool asks = options_.window != 0 && target_[transfer] != none;
  at(start_s_[transfer] + latency_s_[transfer], asks ? Kind::request : Kind::start, transfer);
}

void PacketRun::grant(std::uint32_t target) {
  std::vector<std::uint32_t>& waiting = requests_[target];
  while (!waiting.empty() && granted_[target] < options_.window) {
    ++granted_[target];
    at(now_s_ + latency_s_[waiting.back()], Kind::start, waiting.back());
    waiting.pop_back();
  }
}

void PacketRun::start(std::uint32_t transfer) {
  for (std::uint64_t number = flow_starts_[transfer]; number < flow_starts_[transfer + 1]; ++number) {
    Flow& flow = flows_[number];
    if (flow.left > 0) ++open_flows_[transfer];
  }
  if (open_flows_[transfer] == 0) {
    finish(transfer);
    return;
  }
  for (std::uint64_t number = flow_starts_[transfer]; number < flow_starts_[transfer + 1]; ++number) {
    if (flows_[number].left <= 0) continue;
    const Path path = paths_[flows_[number].path];
    for (std::uint32_t place = 0; place < path.count; ++place) {
      const std::uint32_t link = path_links_[path.first + place];
      if (!is_node(links_[link].from)) continue;
      queue_of(link, path.lane).flows.push_back(static_cast<std::uint32_t>(number));
      send(link);
    }
  }
}

void PacketRun::finish(std::uint32_t transfer) {
  finish_s_[transfer] = now_s_;
  const std::uint32_t target = target_[transfer];
  if (options_.window != 0 && target != none) {
    --granted_[target];
    grant(target);
  }
  dependencies_.finished(transfer, [&](std::uint32_t follower) { begin(follower); });
}

// The link has sent its packet, which leaves the buffer of the link that it came by.
void PacketRun::sent(std::uint32_t link) {
  const std::uint32_t packet = std::exchange(links_[link].sending, none);
  const std::uint32_t before = packets_[packet].came_by;
  packets_[packet].came_by = link;
  at(now_s_ + options_.hop_s, Kind::arrived, packet);
  send(link);
  if (before == none) return;
  queue_of(before, paths_[flows_[packets_[packet].flow].path].lane).room += packets_[packet].bytes;
  send(before);
}

void PacketRun::arrived(std::uint32_t packet) {
  const Packet one = packets_[packet];
  const std::uint32_t vertex = links_[one.came_by].to;
  if (!is_node(vertex)) return forward(packet, vertex);
  free_packets_.push_back(packet);
  Flow& flow = flows_[one.flow];
  queue_of(one.came_by, paths_[flow.path].lane).room += one.bytes;
  send(one.came_by);
  flow.under_way -= one.bytes;
  if (flow.left <= 0 && flow.under_way <= 0 && --open_flows_[flow.transfer] == 0) finish(flow.transfer);
}

void PacketRun::forward(std::uint32_t packet, std::uint32_t vertex) {
  const Path& path = paths_[flows_[packets_[packet].flow].path];
  std::uint32_t best = none;
  const auto first = static_cast<std::uint32_t>(turn_++ % path.count);  // equal queues are taken in turn
  for (std::uint32_t step = 0; step < path.count; ++step) {
    const std::uint32_t link = path_links_[path.first + (first + step) % path.count];
    if (links_[link].from == vertex && (best == none || links_[link].queued < links_[best].queued)) best = link;
  }
  Queue& queue = queue_of(best, path.lane);
  packets_[packet].next = none;
  (queue.first == none ? queue.first : packets_[queue.last].next) = packet;
  queue.last = packet;
  links_[best].queued += packets_[packet].bytes;
  send(best);
}

// The lane that has had least for its weight, of those with something to send and room for it, sends its first packet.
void PacketRun::send(std::uint32_t link) {
  Link& one = links_[link];
  if (one.sending != none) return;
  const std::size_t lanes = options_.lane_weights.size();
  std::size_t best = lanes;
  double most = 0;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    Queue& queue = queue_of(link, static_cast<std::uint32_t>(lane));
    std::uint32_t bytes = 0;
    most = std::max(most, queue.served);
    if (!has_packet(queue, bytes)) continue;
    if (queue.room < bytes) {
      if (queue.waits_since < 0) queue.waits_since = now_s_;
      continue;
    }
    if (queue.waits_since >= 0) blocked_s_[link] += now_s_ - std::exchange(queue.waits_since, -1.0);
    if (best == lanes || queue.served < queue_of(link, static_cast<std::uint32_t>(best)).served) best = lane;
  }
  if (best == lanes) return;
  Queue& queue = queue_of(link, static_cast<std::uint32_t>(best));
  one.sending = take(queue, link);
  const double bytes = packets_[one.sending].bytes;
  queue.room -= bytes;
  // A lane that had nothing to send has no claim on the time that it left to others, but for one packet of the slowest.
  queue.served = std::max(queue.served, most - turn_bytes_) + bytes / options_.lane_weights[best];
  at(now_s_ + bytes / one.capacity, Kind::sent, link);
}

bool PacketRun::has_packet(Queue& queue, std::uint32_t& bytes) {
  if (queue.first != none) {
    bytes = packets_[queue.first].bytes;
    return true;
  }
  while (!queue.flows.empty()) {
    queue.turn %= queue.flows.size();
    const Flow& flow = flows_[queue.flows[queue.turn]];
    if (flow.left > 0) {
      bytes = static_cast<std::uint32_t>(std::min<double>(options_.packet_bytes, flow.left));
      return true;
    }
    queue.flows.erase(queue.flows.begin() + static_cast<std::ptrdiff_t>(queue.turn));
  }
  return false;
}

std::uint32_t PacketRun::take(Queue& queue, std::uint32_t link) {
  if (queue.first != none) {
    const std::uint32_t packet = queue.first;
    queue.first = packets_[packet].next;
    links_[link].queued -= packets_[packet].bytes;
    return packet;
  }
  const std::uint32_t number = queue.flows[queue.turn++];
  Flow& flow = flows_[number];
  const double bytes = std::min<double>(options_.packet_bytes, flow.left);
  flow.left -= bytes;
  flow.under_way += bytes;
  const Packet packet{number, static_cast<std::uint32_t>(bytes), none, none};
  if (free_packets_.empty()) {
    packets_.push_back(packet);
    return static_cast<std::uint32_t>(packets_.size() - 1);
  }
  const std::uint32_t reused = free_packets_.back();
  free_packets_.pop_back();
  packets_[reused] = packet;
  return reused;
}

}  // namespace ff
