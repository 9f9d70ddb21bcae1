// The data connections ("links") of one node: epoll threads that answer reads from the published table, and carry messages
// to and from the node's owner. Nothing but the table and the rights of a link is asked: whoever decides publishes, these
// threads obey.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fireflyer/storage/server/events.hpp"
#include "fireflyer/storage/server/target.hpp"
#include "fireflyer/storage/wire/wire.hpp"

namespace ff {

// What a target may do for its chain.
struct PublishedChain {
  std::uint32_t chain = 0, chain_version = 0;
  bool serving = false;
  bool answers_committed = false;   // a tail: what is pending here has been shown by nobody
  std::int64_t fence_until_ns = 0;  // CLOCK_BOOTTIME
  std::uint64_t tail = 0;
  std::shared_ptr<ChunkTarget> target;
};

struct ServerStats {
  std::uint64_t links = 0, reads = 0, fetched = 0, read_bytes = 0, refused = 0, messages = 0, dropped = 0;
  std::uint64_t held_back = 0, stalled = 0;  // times that a link found no memory for its owner; links that ended for standing still
};

// Who fetches what reads wait for: the read threads of the target, or the kernel (io_uring) for all at once. `kernel` is
// `threads` where the kernel does not do it, or forbids it.
enum class ColdBy {
  threads,
  kernel
};

// How long links may stand still.
struct LinkPatience {
  // With memory of a payload, or of what it is sent from the pool, or with a frame that has begun; a payload and a frame have a
  // quarter of a second more for each MB.
  std::int64_t stall_ns = 10'000'000'000;
  // Without taking 64 KiB, or all, of what it is sent.
  std::int64_t unread_ns = 60'000'000'000;
};

// Thread-safe, and no call blocks but `close`. A link that is not there any more is ignored.
class ChunkServer {
 public:
  // A link that stands still for longer than `patience` ends.
  ChunkServer(int threads, std::shared_ptr<EventQueue> events, std::shared_ptr<BufferPool> pool, LinkPatience patience = {}, ColdBy cold_by = ColdBy::kernel);
  ~ChunkServer();
  ChunkServer(const ChunkServer&) = delete;
  ChunkServer& operator=(const ChunkServer&) = delete;

  // Replaces the table: reads that come in later see this one. Earlier ones were decided when they came in.
  void publish(const std::vector<PublishedChain>& chains);

  // A connected stream socket, which now belongs to the server. The number is never given again; in the end LostEvent
  // comes, once, and nothing of that link after it. `trusted`: as `trust` before the first byte is read. `owner`: links of
  // one name share what an owner may hold of the pool; of none each has its own.
  std::uint64_t connect(int fd, bool reads, bool trusted = false, const std::string& owner = {});
  void disconnect(std::uint64_t link);
  // Reads of files [from, to) are answered until then. Of one file, or one range, the latest grant counts. Above the
  // bound of a link another single file's grant goes, and for one more range it throws std::length_error.
  void grant(std::uint64_t link, std::uint64_t file_from, std::uint64_t file_to, std::int64_t until_ns);
  // All files; and its payloads may use all memory, and are dropped with their messages if there is none for a while, so
  // that two nodes never wait for each other.
  void trust(std::uint64_t link);
  // At most once. A link that does not take what it is sent ends.
  void send(std::uint64_t link, const std::string& body, SharedBuffer data);
  ServerStats stats() const;
  ColdBy cold_by() const;  // what came of it: `kernel` if it does so for all threads
  void close();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ff
