// One operation in one lane at one node: runs the lane's program on every chunk. Private to the network.
//
// A step runs once everything that it waits for has happened: for every chunk in flight each step has a count of what is
// still missing, the steps in its `after` and one gate (the node's own contribution; for a received result, the slot).
// Frames on a connection come and go in the order of a Cursor. A frame that is to be added is first read into scratch
// memory of its connection, which lets the neighbour go on while this node is not ready to add.
//
// Where sums are wider than elements, a node of one rank sends its contribution as it is, and reads it where it lies: the
// slot holds a sum from the first addition on. What is added, and in which order, is the same.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "fireflyer/collectives/group/program.hpp"
#include "fireflyer/collectives/transport/network.hpp"
#include "fireflyer/collectives/transport/wire.hpp"

namespace ff {

// The order of frames in one direction of one connection, for both of its ends: by (position of the chunk in its lane *
// stride + round), then by chunk. Every `sockets`-th chunk goes through this connection, from `socket` on.
class Cursor {
 public:
  struct Frame {
    std::uint64_t i;     // position of the chunk in its lane
    std::uint32_t step;  // of the program
  };

  Cursor(std::vector<std::pair<std::uint32_t, std::uint32_t>> rounds_and_steps, int socket, int sockets);
  void begin(std::uint64_t total, std::uint64_t depth, std::uint64_t stride);
  const Frame* head();  // nullptr at the end
  void pop();

 private:
  std::uint64_t chunk(std::uint64_t u) const { return u * sockets_ + socket_; }

  std::vector<std::pair<std::uint32_t, std::uint32_t>> steps_;
  std::uint64_t socket_, sockets_;
  std::uint64_t count_ = 0, low_ = 0, stride_ = 1;
  std::vector<std::size_t> done_;  // of the chunks from low_ on: how many of steps_
  bool known_ = false;
  std::uint64_t at_ = 0;
  Frame head_{};
};

class LaneRun {
 public:
  LaneRun(Network& network, int lane);
  ~LaneRun();
  void begin(const Geometry& geometry, const Rules& rules);
  bool move();        // true where anything moved
  bool done() const { return freed_ == total_; }
  void end();         // publishes that every chunk of this lane is done and freed
  bool want(Wants& wants) const;  // what of this node's counters it waits for; false: it could go on at once
  const DataLink* awaited();      // the connection whose frames it lacks, if any

 private:
  struct Waiting {
    Cursor::Frame frame;
    bool narrow;  // in the array's own type
  };

  struct Inlet {
    DataLink* link;
    Cursor order;
    std::size_t adds;            // steps of the program that add what comes in here
    std::size_t slot_bytes = 0;  // of scratch memory
    std::size_t slots = 0;
    std::uint64_t received = 0, added = 0;  // frames to be added
    std::vector<Waiting> waiting;           // of frame k: entry k % slots
  };

  struct Outlet {
    DataLink* link;
    Cursor order;
  };

  struct Prepared {
    Program program;
    std::vector<std::vector<std::uint32_t>> dependents;
    std::vector<bool> of_one_node;           // of a step: its sums are this node's alone
    std::vector<std::uint32_t> checksum_of;  // of a step that has blocks of the result: which checksum that is
    std::uint32_t checksums = 0;
    std::uint32_t not_sends = 0;
    std::uint64_t stride = 1;
    std::vector<Inlet> inlets;
    std::vector<Outlet> outlets;
  };

  struct Chunk {
    std::vector<std::uint32_t> missing;      // of each step
    std::uint32_t left = 0, left_not_sends = 0;
    std::vector<std::uint64_t> checksums;    // 1 << 32 | checksum, 0 where not known
  };

  struct Range {
    std::size_t first, count;  // elements of the chunk
  };

  struct Payload {  // of a frame that is sent
    FrameType type;
    const char* from;
    std::size_t bytes;
  };

  std::uint64_t number(std::uint64_t i) const;
  Chunk& chunk(std::uint64_t i) { return chunks_[i % chunks_.size()]; }
  Prepared& prepared_for(const OpDescriptor& op);
  std::unique_ptr<Prepared> prepare(Program program);
  Range range(const Step& step, std::uint64_t i) const;
  char* place(const Step& step, std::uint64_t i, const Range& range) const;
  std::size_t frame_bytes(const Step& step, const Range& range) const;
  const char* own(std::uint64_t i, const Range& range) const;
  Payload payload(const Cursor::Frame& frame) const;
  bool ready(const Cursor::Frame& frame) const;
  void open();
  void release(std::uint64_t i, bool gate_of_results);
  void complete(std::uint64_t i, std::uint32_t step);
  void finish(std::uint64_t i, std::uint32_t step);
  bool receive(Inlet& inlet);
  bool add(Inlet& inlet);
  void add_frame(const Waiting& waiting, const char* received);
  bool send(Outlet& outlet);
  bool read_frame(DataLink& link, const Cursor::Frame& frame, char* to);
  bool write_frame(DataLink& link, const Cursor::Frame& frame);
  void start_frame(DataLink& link, const Cursor::Frame& frame, const Payload& payload);
  bool expected(const DataLink& link, const Cursor::Frame& frame);
  void make_room(Inlet& inlet);
  void publish();
  void calm();
  void broken(DataLink& link);

  Network& network_;
  int lane_;
  std::uint64_t depth_;  // chunks in flight
  const Geometry* geometry_ = nullptr;
  const Rules* rules_ = nullptr;
  Prepared* run_ = nullptr;
  bool sums_ = false, parted_ = false;
  std::uint64_t total_ = 0;
  std::uint64_t entered_ = 0, filled_ = 0, opened_ = 0, done_ = 0, freed_ = 0;  // chunks, each a prefix
  std::vector<Chunk> chunks_;
  std::map<std::pair<int, int>, std::unique_ptr<Prepared>> cache_;  // by kind and channel; of a tree by kind and ~parent
};

}  // namespace ff
