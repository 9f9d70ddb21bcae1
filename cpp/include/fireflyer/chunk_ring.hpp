// Reads of one client from many nodes: prepare any number, submit, wait for some. Data go from the socket into the
// caller's memory and are verified there. One thread at a time; there is none behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fireflyer/chunk_wire.hpp"
#include "fireflyer/disk.hpp"

namespace ff {

struct Completion {
  std::uint64_t tag = 0;  // of `prepare`
  ReadStatus status{};
  std::uint32_t bytes = 0;  // fewer than asked at the end of the chunk
  ContentId content;
  std::uint32_t chunk_length = 0, chain_version = 0;
  std::uint64_t where = 0;
};

// A connection that broke: its reads come back with `error` and status 0.
class ChunkRing {
 public:
  ChunkRing();
  ~ChunkRing();
  ChunkRing(const ChunkRing&) = delete;
  ChunkRing& operator=(const ChunkRing&) = delete;

  int add(int fd);           // a connected, authenticated stream socket, which now belongs to the ring; its number
  void remove(int server);   // what is under way there fails
  void prepare(int server, const ReadRequest& request, MutableBytes into);  // request.length bytes; both stay until completed
  void submit();
  // At least `least` completions, fewer only when `timeout_ns` has passed (negative: none) or so many are not under way.
  std::vector<Completion> wait(std::size_t least, std::int64_t timeout_ns);
  std::size_t under_way() const;
  std::string error(int server) const;  // why it broke; empty: it did not

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ff
