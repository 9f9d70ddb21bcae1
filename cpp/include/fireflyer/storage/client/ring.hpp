// Reads and messages of one client over connections to many nodes: prepare any number, submit, wait for some. Data go
// from the socket into the caller's memory and are verified there; data of messages are sent from where they lie. One
// thread at a time; there is none behind it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "fireflyer/storage/engine/disk.hpp"
#include "fireflyer/storage/wire/wire.hpp"

namespace ff {

// A read is over.
struct Completion {
  std::uint64_t tag = 0;  // of the request
  ReadStatus status{};    // 0: the connection broke
  std::uint32_t bytes = 0;  // fewer than asked at the end of the chunk
  std::uint32_t crc = 0;    // crc32c of these bytes
  ContentId content;
  std::uint32_t chunk_length = 0, chain_version = 0;
  std::uint64_t where = 0;
  bool batched = false;  // as it was prepared
};

struct ReceivedMessage {
  int server = 0;
  std::string body, data;
};

// Told once, behind the completions of the reads that failed with it. Messages that were not answered will not be.
struct LostServer {
  int server = 0;
  std::string reason;
};

using RingEvent = std::variant<Completion, ReceivedMessage, LostServer>;

class ChunkRing {
 public:
  using Keep = std::shared_ptr<void>;  // of memory that is used here; let go as soon as it is not

  ChunkRing();
  ~ChunkRing();
  ChunkRing(const ChunkRing&) = delete;
  ChunkRing& operator=(const ChunkRing&) = delete;

  int add(int fd);          // a connected, authenticated stream socket, which now belongs to the ring; its number
  void remove(int server);  // as if the connection broke
  // `into` is of request.length bytes. The number of the read, for `cancel`.
  std::uint64_t prepare(int server, const ReadRequest& request, MutableBytes into, Keep keep = nullptr, bool batched = false);
  // Throws std::invalid_argument if the loss of the server was told.
  void prepare_message(int server, const std::string& body, Bytes data, Keep keep = nullptr);
  void submit();
  // At least `least` events, fewer only when `timeout_ns` has passed (negative: none), or no more are under way. A signal ends it
  // only if `interrupted`, which is asked then, says so: nothing is taken, and what came is for the next one.
  std::vector<RingEvent> wait(std::size_t least, std::int64_t timeout_ns, const std::function<bool()>& interrupted = nullptr);
  bool has(int server) const;       // it was added, be it lost or not
  bool cancel(std::uint64_t read);  // true: its memory is not touched any more, and no completion comes

  std::size_t under_way() const;  // reads, and messages that were not followed by one from the same node
  int descriptor() const;         // readable when `wait` has something to do

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ff
