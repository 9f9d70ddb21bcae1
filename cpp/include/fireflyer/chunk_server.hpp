// Answers reads from authenticated connections, from the chunks of this node's targets. Nothing but the published table is
// asked: whoever decides publishes, these threads obey.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fireflyer/chunk_engine.hpp"
#include "fireflyer/chunk_wire.hpp"

namespace ff {

// What a target may do for its chain.
struct PublishedChain {
  std::uint32_t chain = 0, chain_version = 0;
  bool serving = false;
  bool answers_committed = false;   // a tail: what is pending here has been shown by nobody
  std::int64_t fence_until_ns = 0;  // CLOCK_MONOTONIC
  std::uint64_t tail = 0;
  std::shared_ptr<ChunkEngine> engine;
};

struct ServerStats {
  std::uint64_t reads = 0, bytes = 0, refused = 0, connections = 0;
};

class ChunkServer {
 public:
  explicit ChunkServer(int threads);
  ~ChunkServer();
  ChunkServer(const ChunkServer&) = delete;
  ChunkServer& operator=(const ChunkServer&) = delete;

  // Replaces the table: reads that come in later see this one. Earlier ones were decided when they came in.
  void publish(std::vector<PublishedChain> chains);
  void serve(int fd);  // a connected stream socket, which now belongs to the server
  ServerStats stats() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ff
