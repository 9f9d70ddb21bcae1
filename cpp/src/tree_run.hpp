// One operation in one tree at one node: the four movements and their counters. Private to the network thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "fireflyer/network.hpp"

namespace ff {

struct Free {
  void operator()(char* p) const { std::free(p); }
};

class TreeRun {
 public:
  TreeRun(Network& network, int tree);
  void begin(const Geometry& geometry, const Rules& rules);
  bool move();        // true where anything moved
  bool done() const;
  void end();         // publishes that every chunk of this tree is done and freed
  bool want(Wants& wants) const;  // what of this node's counters it waits for; false: it could go on at once
  const DataLink* awaited() const;  // the connection whose frames it lacks, if any

 private:
  struct Child {
    DataLink* link = nullptr;
    std::uint64_t received = 0;
    std::uint64_t sent = 0;
  };

  std::uint64_t chunk(std::uint64_t i) const { return geometry_->base + 2 * i + static_cast<std::uint64_t>(tree_); }
  std::uint64_t total() const { return (geometry_->chunks + 1 - static_cast<std::uint64_t>(tree_)) / 2; }
  bool room(std::uint64_t i) const;
  bool receive_up();
  bool add();
  bool receive_down();
  bool send_up();
  bool send_down();
  void publish();
  void calm();
  std::uint64_t deliverable() const;
  bool receive(DataLink& link, FrameType type, std::uint64_t i, char* to, std::size_t bytes);
  bool send(DataLink& link, FrameType type, std::uint64_t i, const char* from, std::size_t bytes);
  bool check(const DataLink& link, FrameType type, std::uint64_t i, std::size_t bytes);
  void broken(DataLink& link);
  char* buffer(std::size_t child, std::uint64_t i);
  DataLink* link_to(int node) const;

  Network& network_;
  int tree_;
  std::uint64_t depth_;  // frames that a child may be ahead
  const Geometry* geometry_ = nullptr;
  const Rules* rules_ = nullptr;
  bool up_ = false, down_ = false;
  DataLink* parent_ = nullptr;
  std::vector<Child> children_;
  std::uint64_t added_ = 0, sent_up_ = 0, received_down_ = 0, done_ = 0, freed_ = 0;
  std::array<std::unique_ptr<char, Free>, 4> buffers_;
};

}  // namespace ff
