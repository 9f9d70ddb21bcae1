// Packets in finite buffers: what fluid rates cannot show. Not for use by several threads at once.
//
// Switches store and forward. Each output has a first-in first-out queue per lane; each link has a buffer per lane at its
// far end, and sends a packet only when the buffer has room for it (the credits of InfiniBand, or priority flow control
// without a delay). A packet takes room in the buffer of the link that it came by until it has left the switch, whatever
// output it waits for: where one output is congested, its packets fill the buffers of the links that lead to the switch,
// and these stop sending for all outputs, which is head-of-line blocking. Nothing is lost. Nodes take what arrives at once.
//
// A path is a set of links; where several of them leave a switch, each packet takes the one with the shortest queue. With
// a window, a transfer is requested from its target, which grants as many at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fireflyer/netsim/transfers.hpp"

namespace ff {

struct PacketOptions {
  std::uint32_t nodes;  // vertices below are nodes, the others switches
  std::uint32_t packet_bytes, buffer_bytes;
  std::uint32_t window;  // transfers that a target grants at a time; 0: all, without a request
  double hop_s;          // from the last bit of a packet at the end of a link to its place in the next queue
  std::vector<double> lane_weights;
};

class PacketRun {
 public:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  // `ends`: vertices that each link leaves from and leads to. Throws std::invalid_argument.
  PacketRun(std::vector<double> capacities, std::span<const std::int64_t> from, std::span<const std::int64_t> to, PacketOptions options);

  // Throws std::invalid_argument.
  std::uint32_t add_path(std::span<const std::uint32_t> links, std::uint32_t lane);

  // Once. Throws std::invalid_argument.
  void add_transfers(const TransferArrays& arrays);

  // Until nothing happens any more: what has not ended then waits for buffers that wait for each other.
  void run();

  const std::vector<double>& start_s() const { return start_s_; }
  const std::vector<double>& finish_s() const { return finish_s_; }
  // For how long each link had something to send, and no room for it at its end.
  const std::vector<double>& blocked_s() const { return blocked_s_; }
  std::uint64_t events() const { return events_; }

 private:
  struct Packet {
    std::uint32_t flow, bytes, came_by, next;
  };
  struct Queue {
    std::uint32_t first = none, last = none;  // packets
    std::vector<std::uint32_t> flows;         // at a node: those that send over this link, in turn
    std::size_t turn = 0;
    double room = 0;    // bytes in the buffer at the end of the link
    double served = 0;  // bytes over the weight of the lane
    double waits_since = -1;
  };
  struct Link {
    double capacity;
    std::uint32_t from, to;
    std::uint32_t sending = none;  // a packet
    double queued = 0;             // bytes
  };
  struct Path {
    std::uint64_t first;
    std::uint32_t count, lane;
  };
  struct Flow {
    std::uint32_t transfer, path;
    double left = 0, under_way = 0;  // bytes
  };
  enum class Kind : std::uint8_t {
    request,
    start,
    sent,
    arrived
  };
  struct Event {
    double time_s;
    std::uint64_t order;
    Kind kind;
    std::uint32_t number;  // of a transfer, link or packet
    bool operator<(const Event& other) const { return time_s > other.time_s || (time_s == other.time_s && order > other.order); }
  };

  void at(double time_s, Kind kind, std::uint32_t number);
  void handle(const Event& event);
  void begin(std::uint32_t transfer);
  void grant(std::uint32_t target);
  void start(std::uint32_t transfer);
  void finish(std::uint32_t transfer);
  void sent(std::uint32_t link);
  void arrived(std::uint32_t packet);
  void forward(std::uint32_t packet, std::uint32_t vertex);
  void send(std::uint32_t link);
  bool has_packet(Queue& queue, std::uint32_t& bytes);
  std::uint32_t take(Queue& queue, std::uint32_t link);
  bool is_node(std::uint32_t vertex) const { return vertex < options_.nodes; }
  Queue& queue_of(std::uint32_t link, std::uint32_t lane) { return queues_[link * options_.lane_weights.size() + lane]; }

  PacketOptions options_;
  std::vector<Link> links_;
  std::vector<Queue> queues_;  // of each link, its lanes
  std::vector<Path> paths_;
  std::vector<std::uint32_t> path_links_;
  std::vector<Flow> flows_;
  std::vector<Packet> packets_;
  std::vector<std::uint32_t> free_packets_;
  Dependencies dependencies_;
  std::vector<std::uint64_t> flow_starts_;
  std::vector<std::uint32_t> open_flows_, target_;
  std::vector<double> delay_s_, latency_s_, start_s_, finish_s_, blocked_s_;
  std::vector<std::uint32_t> granted_;               // of each node
  std::vector<std::vector<std::uint32_t>> requests_;  // of each node, transfers that it has not granted, from the end
  std::vector<Event> events_queue_;
  double now_s_ = 0, turn_bytes_ = 0;
  std::uint64_t order_ = 0, events_ = 0, turn_ = 0;
};

}  // namespace ff
